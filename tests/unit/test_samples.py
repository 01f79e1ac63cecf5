"""Sampled texts: which, how they look on disk, and how much of them there is."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.store.redaction import Redactor
from controller.store.samples import Samples, answer_text, files_in, find_samples, key_of
from policy.decisions import Settled
from tests.telemetry_support import call

if TYPE_CHECKING:
    from pathlib import Path

    from controller.call import Call

QUESTION = {"messages": [{"role": "user", "content": "I am ann@example.com, is it late?"}]}
ANSWER = {"choices": [{"message": {"content": "No, call +49 30 901820."}}]}


def settle(
    samples: Samples, made: Call, answer: Any = ANSWER, outcome: Any = "answered"
) -> Settled:
    samples.arrived(made)
    made.body = msgspec.json.encode(answer) if answer is not None else b""
    settled = Settled(made.request, outcome, "turbo")
    samples.settled(made, settled)
    return settled


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for file in files_in(folder) for line in file.read_bytes().splitlines()
    ]


def test_a_sample_is_redacted_private_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    samples = Samples(folder, 1.0, Redactor(), wall_s=lambda: 5.0)
    made = call(1, name="r-ann@example.com", document=QUESTION, chain="c", step="plan")
    settle(samples, made)
    settle(samples, call(2, document=QUESTION), None, "shed")
    samples.close()
    assert (samples.kept, samples.failed, samples.dropped) == (2, 0, 0)
    one, two = lines(folder)
    assert one == {
        "key": key_of("ann", "c", "r-ann@example.com"), "at_s": 5.0, "chain": "c", "step": "plan",
        "request": "[email]", "model": "qwen", "endpoint": "chat", "outcome": "answered",
        "why": "", "prompt": "I am [email], is it late?", "answer": "No, call [phone].",
    }  # fmt: skip
    assert (two["outcome"], two["answer"]) == ("shed", "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in files_in(folder)} == {0o600}
    found = find_samples(folder, [one["key"], "0" * 32])
    assert [sample.prompt for sample in found.values()] == [one["prompt"]]
    (file,) = files_in(folder)
    with file.open("ab") as torn:
        torn.write(msgspec.json.encode(one)[:60])
    assert find_samples(folder, [one["key"]]) == found
    assert find_samples(tmp_path / "nothing", [one["key"]]) == {}


def test_of_a_chain_all_steps_are_sampled_or_none(tmp_path: Path) -> None:
    samples = Samples(tmp_path, 0.3, Redactor())
    chosen = []
    for chain in range(300):
        steps = [call(step, chain=f"c-{chain}", user="ann") for step in range(4)]
        for made in steps:
            samples.arrived(made)
        assert len({made.sampled for made in steps}) == 1
        chosen.append(steps[0].sampled)
    assert 0.2 < sum(chosen) / 300 < 0.4
    singles = [call(number) for number in range(1000)]
    for made in singles:
        samples.arrived(made)
    assert 0.24 < sum(made.sampled for made in singles) / 1000 < 0.36
    samples.close()


def test_the_oldest_files_go(tmp_path: Path) -> None:
    samples = Samples(
        tmp_path, 1.0, Redactor(), bytes_most=100_000, file_bytes_most=20_000
    )  # fmt: skip
    text = {"messages": [{"role": "user", "content": "word " * 500}]}
    for number in range(120):
        settle(samples, call(number, name=f"r-{number}", document=text))
    samples.close()
    assert samples.kept == 120
    files = files_in(tmp_path)
    assert sum(file.stat().st_size for file in files) <= 103_000  # the last line may go beyond
    assert len(files) >= 4
    assert lines(tmp_path)[-1]["request"] == "r-119"
    again = Samples(tmp_path, 1.0, Redactor(), bytes_most=100_000, file_bytes_most=20_000)
    settle(again, call(1, name="r-120", document=text))
    again.close()
    assert lines(tmp_path)[-1]["request"] == "r-120"


def test_what_cannot_be_kept_is_counted_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    blocked = tmp_path / "samples"
    blocked.write_text("a file where the folder should be")
    samples = Samples(blocked, 1.0, Redactor(), on_trouble=told.append)
    settle(samples, call(1, document=QUESTION))
    samples.close()
    assert (samples.kept, samples.failed) == (0, 1)
    assert "a sample was not kept" in told[0]
    assert "ann@example.com" not in told[0]


def test_too_much_at_once_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.store.samples.WAITING_BYTES_MOST", 100)
    samples = Samples(tmp_path, 1.0, Redactor())
    settle(samples, call(1, document=QUESTION), {"choices": [{"text": "x" * 200}]})
    samples.close()
    assert (samples.kept, samples.dropped) == (0, 1)
    assert lines(tmp_path) == []


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (ANSWER, "No, call +49 30 901820."),
        ({"choices": [{"text": "one"}, {"text": "two"}]}, "one\ntwo"),
        ({"choices": [{"message": {"reasoning_content": "hm", "content": "yes"}}]}, "hm\nyes"),
        (
            {"choices": [{"message": {"content": None, "tool_calls": [{"id": "t"}]}}]},
            '[{"id":"t"}]',
        ),
        ({"data": [{"embedding": [0.5]}]}, ""), ({"choices": ["x", {"message": 5}]}, ""),
        ([1], ""), ("text", ""),
    ],
)  # fmt: skip
def test_what_an_answer_says(document: Any, text: str) -> None:
    assert answer_text(msgspec.json.encode(document)) == text


def test_what_is_no_answer_says_nothing() -> None:
    assert answer_text(b"") == answer_text(b"{") == answer_text(b'"\xff"') == ""
