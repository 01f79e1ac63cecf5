"""Which profile a server gets."""

from __future__ import annotations

import pytest

from controller.upstream.matching import advice, by_model, named
from policy.files import FileError


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("qwen3-8b", "h100-sxm/qwen3-8b"),
        ("Qwen/Qwen3-8B", "h100-sxm/qwen3-8b"),
        ("/models/Qwen3-8B/", "h100-sxm/qwen3-8b"),
        ("/c/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218",
         "h100-sxm/qwen3-8b"),
        ("meta-llama/Llama-2-7b-hf", "h100-sxm/llama-2-7b"),
        ("llama-2-7b-hf", "h100-sxm/llama-2-7b"),
        ("tiny-qwen3", "cpu/tiny-qwen3"),
    ],
)  # fmt: skip
def test_a_model_is_known_by_its_names(name: str, profile: str) -> None:
    match = by_model(["", name])
    assert match is not None
    assert match.profile.name == profile
    assert match.model.name == match.profile.model
    assert match.gpu.name == match.profile.gpu
    assert profile in match.note, "what was assumed is said"


@pytest.mark.parametrize(
    "name", ["", "/", "tiny", "qwen3", "my-qwen3-8b", "Qwen/Qwen3-8B-AWQ", "config.json"]
)
def test_names_that_are_only_alike_do_not_count(name: str) -> None:
    assert by_model([name]) is None


def test_what_was_loaded_counts_before_what_it_is_called() -> None:
    match = by_model(["Qwen/Qwen3-8B", "llama-3.1-8b"])
    assert match is not None
    assert match.model.name == "qwen3-8b"


def test_a_known_model_without_a_profile_gets_a_scaled_one() -> None:
    match = by_model(["Qwen/Qwen3-14B"])
    assert match is not None
    assert (match.profile.model, match.profile.trust.status) == ("qwen3-14b", "scaled")
    assert "scaled" in match.note


def test_a_given_profile_is_taken_without_a_note() -> None:
    assert named("cpu/tiny-qwen3").note == ""
    with pytest.raises(FileError, match="no such profile"):
        named("h200/nothing")


def test_the_advice_says_how_to_name_one() -> None:
    text = advice("http://a:1")
    assert "--upstream http://a:1,profile=NAME" in text
    assert "h100-sxm/qwen3-8b" in text
