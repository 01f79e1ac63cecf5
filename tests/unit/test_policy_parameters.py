"""The policy file: presets, defaults with their reasons, errors that help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.files import FileError, code_hash, load_chain, load_policy, parse_policy, policy_names
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


AGENT = """
chain_timeout: 8s
steps:
  - {name: intent_parse, weight: 0.2}
  - {name: tool_selection, weight: 0.1}
  - {name: db_query, weight: 0.4}
  - {name: summary, weight: 0.2}
  - {name: memory_update, weight: 0.1}
"""


def indented(text: str, by: int) -> str:
    return "".join(f"{' ' * by}{line}\n" for line in text.strip().splitlines())


def test_a_chains_definition_is_a_file_of_its_own_or_a_plan_in_a_policy_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(AGENT)
    plan = load_chain(path)
    assert plan.budget_ms == 8000
    assert [(step.name, step.weight) for step in plan.steps] == [
        ("intent_parse", 200), ("tool_selection", 100), ("db_query", 400), ("summary", 200),
        ("memory_update", 100),
    ]  # fmt: skip
    default = parse_policy(f"schema: 1\nchains:\n  default:\n{indented(AGENT, 4)}", "x")
    assert default.chains.default == plan
    assert default.chains.step_weight == 200  # a step that is in no plan weighs as the mean
    of_a_line = parse_policy(f"schema: 1\nchains:\n  lines:\n    agent:\n{indented(AGENT, 6)}", "x")
    assert of_a_line.chains.lines == {"agent": plan}
    assert of_a_line.chains.default == Parameters().chains.default
    assert parse_policy(render(default), "x") == default
    assert from_canonical(canonical(default)) == default


def test_integer_weights_keep_their_meaning_and_stand_beside_decimals() -> None:
    chains = parse_policy(
        "schema: 1\nchains:\n  default: {budget_ms: 900, steps: [{name: a, weight: 3}, {name: b}]}",
        "x",
    ).chains
    assert [step.weight for step in chains.default.steps] == [3, 1]
    assert (chains.default.budget_ms, chains.step_weight) == (900, 1)
    mixed = parse_policy(
        "schema: 1\nchains:\n  step_weight: 7\n  default:\n    chain_timeout: 1.001 s\n"
        "    steps: [{name: a, weight: 2}, {name: b, weight: 0.5}, {name: c}]",
        "x",
    ).chains
    assert [step.weight for step in mixed.default.steps] == [2000, 500, 1000]
    assert (mixed.default.budget_ms, mixed.step_weight) == (1001, 7)


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("chain_timeut: 8s", "chain_timeut", "did you mean chain_timeout"),
        ("chain_timeout: 8", "chain_timeout", "such as 8s, 800ms or 2m"),
        ("chain_timeout: 8 sec", "chain_timeout", "'8 sec'"),
        ("chain_timeout: 0s", "chain_timeout", "'0s'"),
        ("chain_timeout: 0.5ms", "chain_timeout", "'0.5ms'"),
        ("chain_timeout: 30h", "budget_ms", "86400000"),
        ("chain_timeout: 8s\nbudget_ms: 8000", "chain_timeout", "says the same"),
        ("steps: [{name: a, weight: 0}]", "steps[0].weight", ">= 1"),
        ("steps: [{name: a, weight: 0.2}, {name: b, weight: -0.1}]", "steps[1].weight", "-0.1"),
        ("steps: [{name: a, weight: 0.2}, {name: b, weight: 0}]", "steps[1].weight", "0.001"),
        ("steps: [{name: a, weight: 0.2}, {name: b, weight: .nan}]", "steps[1].weight", "nan"),
        ("steps: [{name: a, weight: 0.2}, {name: b, weight: yes}]", "steps[1].weight", "True"),
        ("steps: [{name: a, wait: 0.2}]", "steps[0].wait", "did you mean weight"),
        ("steps: [{name: a, weight: 0.2}, {name: a, weight: 0.2}]", "", "step a is planned twice"),
        ("steps: [a, b]", "steps[0]", "object"),
        ("steps: 3", "steps", "array"),
    ],
)
def test_a_chains_definition_that_cannot_be_used_says_why(
    tmp_path: Path, text: str, key: str, says: str
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    with pytest.raises(FileError) as error:
        load_chain(path)
    assert error.value.key == key
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_a_bad_duration_in_a_policy_file_is_found_where_it_stands() -> None:
    with pytest.raises(FileError) as error:
        parse_policy("schema: 1\nchains: {lines: {agent: {chain_timeout: soon}}}", "x")
    assert error.value.key == "chains.lines.agent.chain_timeout"
