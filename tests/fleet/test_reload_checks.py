"""What is no answer, and where there is no room: without a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.fleet.checking import Answer, _unlike, _unsure, read_answer, read_vectors
from controller.fleet.config import Checks, Model, Question
from controller.fleet.room import Spot, available_mb, lacking
from controller.gpus.view import CardView
from policy.confidence import Confidence
from policy.parameters import Parameters
from tests.fleet.loaded import weights

if TYPE_CHECKING:
    from pathlib import Path

SCORE = Confidence(Parameters(name="p").confidence)
CARD = "GPU-00000000-0000-0000-0000-000000000001"


def chat(tokens: list[str], logprob: Any = -0.1, reason: str = "stop", **message: Any) -> bytes:
    listed = [{"token": "a", "logprob": logprob}, {"token": "b", "logprob": -4.0}]
    entries = [{"token": token, "logprob": logprob, "top_logprobs": listed} for token in tokens]
    said = {"content": "".join(tokens), **message}
    choice = {"message": said, "finish_reason": reason, "logprobs": {"content": entries}}
    return json.dumps({"choices": [choice]}).encode()


def test_a_sound_answer_has_its_score() -> None:
    answer = read_answer(chat(["Par", "is"]), SCORE)
    assert (answer.wrong, answer.text, answer.tokens) == ("", "Paris", ("Par", "is"))
    assert 800 < answer.permille < 1000
    unsure = read_answer(chat(["Par", "is"], -0.7), SCORE)
    assert unsure.permille < answer.permille


def test_a_completion_is_read_as_well() -> None:
    logprobs = {
        "tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2],
        "top_logprobs": [{"a": -0.1}, {"b": -0.2}],
    }  # fmt: skip
    choice = {"text": "ab", "finish_reason": "length", "logprobs": logprobs}
    answer = read_answer(json.dumps({"choices": [choice]}).encode(), SCORE)
    assert (answer.wrong, answer.tokens) == ("", ("a", "b"))
    assert answer.permille > 0


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (chat(["!"] * 9, float("nan")), "its logprobs are no numbers (NaN)"),
        (chat(["!"] * 9, None), "its logprobs are no numbers (NaN)"),
        (chat([]), "its answer is empty"),
        (chat([" ", "\n"]), "its answer is empty"),
        (chat([" "], reason="length"), "its answer is empty"),
        (chat(["a"], reason="abort"), "its answer is stream_cut"),
        (chat(["a"])[:-20], "its answer is malformed"),
        (b"", "its answer is empty"),
        (b'{"choices": []}', "its answer is empty"),
        (b'{"error": {"code": 500}}', "its answer is http_5xx"),
        (b"[1]", "its answer is malformed"),
    ],
)  # fmt: skip
def test_what_is_no_answer(data: bytes, wrong: str) -> None:
    assert read_answer(data, SCORE).wrong == wrong


def test_a_model_that_thinks_for_all_its_tokens_has_answered() -> None:
    answer = read_answer(chat([], reason="length", content=None, reasoning="hm"), SCORE)
    assert (answer.wrong, answer.text) == ("", "hm")


def test_one_token_over_and_over_counts_where_the_old_version_does_not_do_it() -> None:
    question = Question("?")
    repeated = read_answer(chat(["!"] * 8), SCORE)
    sound = read_answer(chat(["a", "b"] * 4), SCORE)
    assert _unlike(repeated, None, question) == "it says '!' over and over"
    assert _unlike(repeated, sound, question) == "it says '!' over and over"
    assert _unlike(repeated, repeated, question) == ""
    assert _unlike(sound, repeated, question) == ""
    assert _unlike(read_answer(chat(["!"] * 7), SCORE), None, question) == ""
    assert Answer("", "! ! !!!! !!").repeated


def test_what_a_question_wants_must_stand_in_the_answer_whatever_the_case() -> None:
    answer = Answer("", "It is Paris.")
    assert _unlike(answer, None, Question("?", contains="PARIS")) == ""
    said = _unlike(answer, None, Question("?", contains="Rome"))
    assert said == "it says 'It is Paris.', which does not contain 'Rome'"


@pytest.mark.parametrize(
    ("mean", "before", "why"),
    [
        (0.7, 0.9, ""),
        (0.69, 0.9, "its mean confidence is 0.69, that of the version that serves 0.90"),
        (0.69, -1.0, ""),
        (0.29, -1.0, "below min_confidence, 0.3"),
        (-1.0, 0.9, "its answers have no logprobs"),
    ],
)
def test_confidence_is_compared(mean: float, before: float, why: str) -> None:
    said = _unsure(mean, before, Checks(min_confidence=0.3))
    assert why in said
    assert bool(why) == bool(said)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b'{"data": [{"embedding": [0.1, -2]}]}', ""),
        (b'{"data": [{"embedding": [NaN, 1]}]}', "its vector holds what are no numbers (NaN)"),
        (b'{"data": [{"embedding": [null]}]}', "its vector holds what are no numbers (NaN)"),
        (b'{"data": [{"embedding": [0.0, 0.0]}]}', "its vector is all zero"),
        (b'{"data": []}', "its answer holds no vector"),
        (b'{"data": 3}', "its answer holds no vector"),
        (b"", "its answer holds no vector"),
    ],
)
def test_a_vector_must_be_one(data: bytes, wrong: str) -> None:
    assert read_vectors(data).wrong == wrong


# ---- room ----


def model(folder: Path, **more: Any) -> Model:
    given = {"versions": {"v1": str(folder)}, "version": "v1", "replicas": [{}]}
    return msgspec.convert({**given, **more}, Model)


def card(total_mb: int | None, free_mb: int | None) -> dict[str, CardView]:
    view = CardView(CARD, "a card", memory_total_mb=total_mb, memory_free_mb=free_mb)
    return {CARD: view}


def test_vllm_takes_its_share_of_a_card_whatever_it_needs(tmp_path: Path) -> None:
    """A standby's own process is ended first, so what it holds counts; anything else there does
    not."""
    path = weights(tmp_path / "w", "v2", size=10_000 << 20)
    mine = model(tmp_path / "w")
    empty = [Spot("m-standby-0", (CARD,))]
    assert lacking(mine, "v2", path, empty, card(80_000, 79_000)) == []
    runs = [Spot("m-standby-0", (CARD,), runs=path, pid=1)]
    assert lacking(mine, "v2", path, runs, card(80_000, 6_000)) == []
    (told,) = lacking(mine, "v2", path, empty, card(80_000, 6_000))
    assert told == (
        "m-standby-0: v2 needs weights 10000 MB + KV cache 256 MB + overhead 1024 MB = 11280 MB,"
        f" and vLLM takes 73600 MB for it; {CARD} has 6000 MB free: 67600 MB are lacking"
    )
    half = model(tmp_path / "w", args=["--gpu-memory-utilization", "0.45"])
    assert lacking(half, "v2", path, empty, card(80_000, 40_000)) == []
    (told,) = lacking(half, "v2", path, empty, card(20_000, 20_000))
    assert f"and vLLM is given 9000 MB of {CARD}: 2280 MB are lacking" in told


def test_another_server_takes_what_it_needs(tmp_path: Path) -> None:
    path = weights(tmp_path / "w", "v2", size=10_000 << 20)
    other = model(tmp_path / "w", command=["engine", "{port}"])
    spot = [Spot("m-standby-0", (CARD,))]
    assert lacking(other, "v2", path, spot, card(80_000, 11_280)) == []
    (told,) = lacking(other, "v2", path, spot, card(80_000, 11_000))
    assert told.endswith(f"{CARD} has 11000 MB free: 280 MB are lacking")
    assert lacking(other, "v2", path, spot, card(None, None)) == []
    assert lacking(other, "v2", path, spot, {}) == []


def test_a_model_on_two_cards_needs_half_on_each(tmp_path: Path) -> None:
    path = weights(tmp_path / "w", "v2", size=10_000 << 20)
    other = model(tmp_path / "w", command=["engine", "{port}"])
    second = CARD[:-1] + "2"
    cards = {**card(80_000, 6_000), second: CardView(second, "b", memory_total_mb=80_000,
                                                     memory_free_mb=5_000)}  # fmt: skip
    (told,) = lacking(other, "v2", path, [Spot("m-0", (CARD, second))], cards)
    assert told.endswith(f"{second} has 5000 MB free: 640 MB are lacking")


def test_without_cards_this_machines_memory_counts_for_all_that_start(tmp_path: Path) -> None:
    free_mb = available_mb()
    path = weights(tmp_path / "w", "v2", size=int(free_mb * 0.5) << 20)
    mine = model(tmp_path / "w")
    assert lacking(mine, "v2", path, [Spot("m-standby-0")], {}) == []
    both = [Spot("m-standby-0"), Spot("m-standby-1")]
    (told,) = lacking(mine, "v2", path, both, {})
    assert told.startswith("m-standby-0 and m-standby-1: v2 needs weights ")
    assert "for each of 2 = " in told
    assert told.endswith(" MB are lacking")
