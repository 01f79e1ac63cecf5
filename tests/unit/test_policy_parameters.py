"""The policy file: presets, defaults with their reasons, errors that help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.files import code_hash, load_policy, parse_policy, policy_names
from policy.parameters import Parameters, canonical, from_canonical, render

if TYPE_CHECKING:
    from pathlib import Path

UNITS = (
    "_ms", "_permille", "_milli", "_tflop", "_tokens", "_max", "_most", "_least", "_samples",
    "_strikes", "_per_s", "_s", "_weight", "_replicas", "_ejections",
)  # fmt: skip
NO_UNIT = {
    "schema", "name", "discipline", "default_class", "lines", "fallback_model", "enabled",
    "engine_priority", "actions", "affinity", "checkpoints", "default", "enforce", "hpa_metric",
    "order", "rule", "rules", "throttled_out",
}  # fmt: skip


def test_the_presets_are_there_and_named_after_their_files() -> None:
    assert policy_names() == ("fifo", "stable", "throughput")
    assert {load_policy(name).name for name in policy_names()} == set(policy_names())
    assert load_policy("fifo").discipline == "fifo"
    assert load_policy("stable") == parse_policy("schema: 1\nname: stable", "x")


@pytest.mark.parametrize("name", ["fifo", "stable", "throughput"])
@pytest.mark.parametrize("comments", [True, False])
def test_what_is_written_is_read_back(name: str, comments: bool) -> None:
    policy = load_policy(name)
    text = render(policy, comments)
    assert ("#" in text) is comments
    assert parse_policy(text, "x") == policy
    assert from_canonical(canonical(policy)) == policy
    assert all(len(line) <= 100 for line in text.splitlines())


def test_lines_are_written_and_read_back() -> None:
    policy = parse_policy("schema: 1\nclasses: {lines: {'a b': {sla: P0, deadline_ms: 900}}}", "x")
    assert policy.classes.lines["a b"].deadline_ms == 900
    assert parse_policy(render(policy), "x") == policy


def sections() -> list[tuple[str, msgspec.structs.FieldInfo]]:
    found: list[tuple[str, msgspec.structs.FieldInfo]] = []
    for outer in msgspec.structs.fields(Parameters):
        kind: Any = outer.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            found += [(outer.name, field) for field in msgspec.structs.fields(kind)]
        else:
            found.append(("", outer))
    return found


@pytest.mark.parametrize(("section", "field"), sections())
def test_every_parameter_says_its_unit_why_and_range(
    section: str, field: msgspec.structs.FieldInfo
) -> None:
    metas = [meta for meta in field.type.__metadata__ if isinstance(meta, msgspec.Meta)]
    assert any(meta.description for meta in metas), f"{section}.{field.name} is not described"
    assert field.default is not msgspec.NODEFAULT or field.default_factory is not msgspec.NODEFAULT
    if field.name not in NO_UNIT:
        assert field.name.endswith(UNITS), f"{section}.{field.name} has no unit last in its name"
        assert any(meta.ge is not None for meta in metas), f"{section}.{field.name} has no range"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tiers: {turbo_max: 3}", r"mine: tiers.turbo_max: .*turbo_max_tflop"),
        ("tires: {}", r"mine: tires: .*tiers"),
        ("tiers: {turbo_max_tflop: -3}", r"mine: tiers.turbo_max_tflop: .*>= 1.*-3"),
        ("tiers: {turbo_max_tflop: many}", r"mine: tiers.turbo_max_tflop: .*many"),
        ("tiers: {turbo_max_tflop: 300}", r"mine: tiers: turbo_max_tflop is 300.*200"),
        ("tiers: {stable_least_permille: 900}", r"add up to 1200"),
        ("classes: {p0_deadline_ms: 9000}", r"9000, 4000 and 10000 ms"),
        ("shedding: {retry_after_least_ms: 99999}", r"99999, above retry_after_most_ms, 30000"),
        ("discipline: lifo", r"mine: discipline: .*lifo"),
        ("classes: {lines: {a: {slas: P0}}}", r"slas.*did you mean sla"),
        ("schema: 1", "stands twice"),
        ("- a", "valid YAML"),
    ],
)
def test_errors_name_file_key_value_and_remedy(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_policy(f"schema: 1\n{text}", "mine")


@pytest.mark.parametrize("text", ["name: x", "schema: 2", "schema: one"])
def test_an_unknown_schema_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ValueError, match=r"mine: schema: .*schema: 1"):
        parse_policy(text, "mine")


def test_a_policy_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema: 1\nname: mine\n")
    assert load_policy(path).name == load_policy(str(path)).name == "mine"
    with pytest.raises(ValueError, match=r"gone\.yaml"):
        load_policy(tmp_path / "gone.yaml")


def test_an_unknown_preset_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"stabel: no such policy.*stable"):
        load_policy("stabel")


def test_the_code_hash_is_stable() -> None:
    assert code_hash() == code_hash()
    assert len(code_hash()) == 32
