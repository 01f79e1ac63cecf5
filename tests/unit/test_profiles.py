"""Shipped profiles, model shapes and cards; what a wrong file is told."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.cost import Gpu, ModelShape, Profile, StepCost
from policy.files import (
    FileError,
    decode,
    load_gpus,
    load_models,
    load_profile,
    profile_names,
    read_document,
)

# As the models' owners publish them (safetensors metadata).
PUBLISHED_PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-embedding-0.6b": 595_776_512,
    "qwen3-embedding-4b": 4_021_774_336,
    "jina-code-embeddings-0.5b": 494_032_768,
    "jina-code-embeddings-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "tiny-qwen3": 4_197_120,
}


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """A shipped profile as plain data, to be spoilt."""
    profile = load_profile("h100-sxm/qwen3-8b")
    return copy.deepcopy(msgspec.to_builtins(profile))


def refusal(raw: dict[str, Any]) -> FileError:
    with pytest.raises(FileError) as caught:
        decode(raw, Profile, "some.yaml")
    return caught.value


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_the_shape_gives_the_published_parameter_count(name: str) -> None:
    model = load_models()[name]
    assert model.dense_parameters == model.total_parameters == PUBLISHED_PARAMETERS[name]
    assert model.active_parameters == model.total_parameters


def test_every_model_has_its_count_checked() -> None:
    assert set(load_models()) == set(PUBLISHED_PARAMETERS)


def test_the_shipped_profiles_load_under_their_own_names() -> None:
    assert profile_names() == (
        "cpu/tiny-qwen3",
        "h100-sxm/llama-2-7b",
        "h100-sxm/llama-3.1-8b",
        "h100-sxm/qwen3-8b",
        "h200/llama-3.1-8b",
        "h200/qwen3-8b",
        "l40s/llama-3.1-8b",
        "l40s/qwen3-8b",
        "rtx-4090/llama-3.1-8b",
    )
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.gpu in load_gpus()
        assert profile.engine.max_model_len <= load_models()[profile.model].max_model_len


def test_every_model_has_a_profile_on_an_h100() -> None:
    for name, model in load_models().items():
        if name == "tiny-qwen3":
            continue
        profile = load_profile(f"h100-sxm/{name}")
        cost = StepCost.from_profile(profile)
        assert cost.decode_fixed > 0
        assert cost.per_prefill_token > 0
        assert profile.task == model.task


def test_a_scaled_profile_says_so() -> None:
    profile = load_profile("h100-sxm/qwen3-embedding-0.6b")
    assert profile.trust.status == "scaled"
    assert profile.trust.fitted_on == "scaled, not yet fitted: from h100-sxm/qwen3-8b"
    assert profile.task == "pooling"
    assert profile.engine.max_model_len == 32_768
    profile = load_profile("h100-sxm/llama-3.1-70b@tp4")
    assert profile.name == "h100-sxm/llama-3.1-70b@tp4"
    assert profile.tensor_parallel == 4
    assert "from h100-sxm/llama-3.1-8b" in profile.trust.fitted_on
    assert "160 all-reduces over 4 cards" in profile.step.decode_fixed_ns.source


def test_async_scheduling_is_off_for_pooling_as_in_vllm() -> None:
    assert load_profile("h100-sxm/qwen3-8b").engine.async_scheduling
    assert load_profile("h100-sxm/qwen3-14b").engine.async_scheduling
    assert not load_profile("h100-sxm/qwen3-embedding-0.6b").engine.async_scheduling


def test_one_card_may_be_spelt_out() -> None:
    assert load_profile("h100-sxm/qwen3-8b@tp1") == load_profile("h100-sxm/qwen3-8b")


def test_a_profile_file_is_loaded_by_its_path(tmp_path: Path, raw: dict[str, Any]) -> None:
    raw["name"] = "mine/qwen3-8b"
    path = tmp_path / "mine.yaml"
    path.write_bytes(msgspec.yaml.encode(raw))
    assert load_profile(path) == load_profile(str(path)) == msgspec.convert(raw, Profile)


def test_an_unknown_profile_is_answered_with_near_names() -> None:
    with pytest.raises(
        FileError, match=r"no such profile \(hint: did you mean .*qwen3-8b"
    ) as error:
        load_profile("h100-sxm/qwen3-9b")
    assert error.value.value == "h100-sxm/qwen3-9b"
    with pytest.raises(FileError, match="64 heads do not split over 3"):
        load_profile("h100-sxm/llama-3.1-70b@tp3")
    with pytest.raises(FileError, match="cannot be read"):
        load_profile("nowhere.yaml")


@pytest.mark.parametrize("schema", [2, None, "1"])
def test_an_unknown_schema_is_refused_with_a_hint(raw: dict[str, Any], schema: object) -> None:
    raw["schema"] = schema
    error = refusal(raw)
    assert error.key == "schema"
    assert error.hint == "this version reads schema: 1"
    assert repr(schema) in str(error)


def test_an_unknown_key_is_refused_with_the_nearest_name(raw: dict[str, Any]) -> None:
    raw["step"]["decode_fixd_ns"] = {"value": 1.0, "source": "x"}
    error = refusal(raw)
    assert error.key == "step.decode_fixd_ns"
    assert error.hint.startswith("did you mean decode_fixed_ns")


def test_an_unknown_key_inside_a_list_is_found(raw: dict[str, Any]) -> None:
    raw["trust"]["errors"][0]["rowz"] = 3
    error = refusal(raw)
    assert error.key == "trust.errors[0].rowz"
    assert error.hint == "did you mean rows?"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("engine", "block_tokens", -3),
        ("engine", "gpu_memory_utilization", 1.5),
        ("engine", "scheduling_policy", "lifo"),
        ("engine", "async_scheduling", "yes"),
        ("engine", "kv_blocks", 1),
    ],
)
def test_a_bad_value_is_named(raw: dict[str, Any], section: str, key: str, value: object) -> None:
    raw[section][key] = value
    error = refusal(raw)
    assert error.key == f"{section}.{key}"
    assert error.value == value
    assert repr(value) in str(error)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e13, "fast"])
def test_a_time_must_be_a_sane_number(raw: dict[str, Any], value: object) -> None:
    raw["step"]["decode_fixed_ns"]["value"] = value
    error = refusal(raw)
    assert error.key == "step.decode_fixed_ns.value"
    assert repr(value) in str(error)


def test_a_coefficient_needs_its_source(raw: dict[str, Any]) -> None:
    raw["step"]["decode_fixed_ns"]["source"] = ""
    assert refusal(raw).key == "step.decode_fixed_ns.source"
    del raw["step"]["decode_fixed_ns"]["source"]
    assert "missing required field `source`" in str(refusal(raw))


def test_fields_are_checked_against_each_other(raw: dict[str, Any]) -> None:
    spoilt = copy.deepcopy(raw)
    spoilt["engine"]["max_num_seqs"] = 9000
    assert "max_num_batched_tokens 8192 is below max_num_seqs 9000" in str(refusal(spoilt))
    spoilt = copy.deepcopy(raw)
    spoilt["step"]["decode_fixed_ns"]["interval"] = [1.0, 2.0]
    assert "lies outside its interval" in str(refusal(spoilt))
    spoilt = copy.deepcopy(raw)
    row = {"up_to_batch": 4, "extra_ns": 1.0}
    spoilt["step"]["batch_padding"] = [row, row]
    assert "must rise, got [4, 4]" in str(refusal(spoilt))
    spoilt = copy.deepcopy(raw)
    row = {"up_to_tokens": 64, "extra_ns": -1.0}
    spoilt["step"]["token_padding"] = [row, row]
    assert "token_padding: up_to_tokens must rise, got [64, 64]" in str(refusal(spoilt))
    for key in ("decode_fixed_ns", "prefill_fixed_ns"):
        spoilt = copy.deepcopy(raw)
        spoilt["step"][key]["value"], spoilt["step"][key]["interval"] = 5.0, None
        spoilt["step"]["token_padding"] = [row | {"extra_ns": -6.0}]
        assert f"{key} is 5.0, and the paddings take 6.0 ns off it" in str(refusal(spoilt))
    spoilt = copy.deepcopy(raw)
    spoilt["cold_start"]["weights_s"] = 101.0
    assert "above total_s" in str(refusal(spoilt))
    spoilt = copy.deepcopy(raw)
    spoilt["trust"]["errors"][0]["mean_percent"] = 99.0
    assert "mean_percent 99.0 is above" in str(refusal(spoilt))


def test_unknown_cards_and_models_are_refused(tmp_path: Path, raw: dict[str, Any]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(msgspec.yaml.encode(raw | {"gpu": "h100-sxn"}))
    with pytest.raises(FileError, match=r"unknown card 'h100-sxn' .*did you mean h100-sxm"):
        load_profile(path)
    path.write_bytes(msgspec.yaml.encode(raw | {"model": "qwen3-7b"}))
    with pytest.raises(FileError, match="unknown model 'qwen3-7b'"):
        load_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "'a' stands twice"),
        ("- 1\n", "a mapping is expected"),
        ("a: [1\n", "is no valid YAML"),
        ("a: !!python/object:os.system {}\n", "is no valid YAML"),
    ],
)
def test_a_document_must_be_one_plain_mapping(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=message):
        read_document(path)


def test_shapes_and_cards_are_checked_too() -> None:
    model = msgspec.to_builtins(load_models()["qwen3-8b"])
    with pytest.raises(FileError, match="heads 32 is no multiple of kv_heads 7"):
        decode(model | {"kv_heads": 7}, ModelShape, "m.yaml", schema=None)
    with pytest.raises(FileError, match="active_parameters 9000000000 is above"):
        decode(model | {"active_parameters": 9_000_000_000}, ModelShape, "m.yaml", schema=None)
    gpu = msgspec.to_builtins(load_gpus()["h100-sxm"])
    with pytest.raises(FileError, match=r"bandwidth_efficiency: .*got 1\.2"):
        decode(gpu | {"bandwidth_efficiency": 1.2}, Gpu, "g.yaml", schema=None)
