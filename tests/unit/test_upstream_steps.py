"""A server's step records, held against its profile: which steps count, and what they cost."""

from __future__ import annotations

import logging
import os
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.upstream import steps as module
from controller.upstream.steps import Said, StepBook, StepReader, Sums
from controller.vllm_plugin.twinkeel_vllm_steps.files import StepFile
from policy.cost import StepCost
from tests.policy_support import up
from traces.steps import (
    KIND,
    STEPS_SCHEMA,
    Header,
    RequestRow,
    ServerSettings,
    StepRow,
    encode_header,
    encode_row,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from controller.vllm_plugin.twinkeel_vllm_steps import rows as plugin_rows

TICK = 1024
COST = StepCost(
    5_000_000 * TICK, 6_000_000 * TICK, 20_000 * TICK, 25 * TICK, 22_000 * TICK, 300,
    padding=tuple(1000 * TICK * size for size in range(65)), per_logprobs_sequence=7_000 * TICK,
)  # fmt: skip
SLOWER = 1.3
MS = 1_000_000
Row = StepRow | RequestRow


def step(number: int, at_ns: int, **fields: Any) -> StepRow:
    """One of 4 sequences that decode."""
    plain: dict[str, Any] = {
        "prefill_requests": 0, "prefill_tokens": 0, "decode_requests": 4, "elapsed_ns": 3 * MS,
        "running": 4, "waiting": 0, "kv_used_ppm": 10_000, "preemptions": 0, "period_ns": 9 * MS,
    }  # fmt: skip
    return StepRow(at_ns, number, **(plain | fields))


def done(prompt: int, outputs: int, cached: int = 0, preemptions: int = 0) -> RequestRow:
    return RequestRow(0, "x", prompt, cached, outputs, preemptions, 0, 0, 0, 0, "length")


class Engine:
    """A simple engine that writes what the plug-in would: prompts in chunks, then a token a step.
    Steps take what the cost says, times ``slower``."""

    def __init__(self, slower: float = 1.0, chunk: int = 300) -> None:
        self.slower = slower
        self.chunk = chunk
        self.rows: list[Row] = []
        self.running: list[list[int]] = []
        """Prompt, computed of it, outputs wanted, outputs made, cached."""
        self.now_ns = 0.0
        self.number = 0
        self.exact_ticks = 0
        """Of all steps with something that decodes."""

    def ask(self, prompt: int, outputs: int, cached: int = 0) -> None:
        self.running.append([prompt, cached, outputs, 0, cached])

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        decoding = [each for each in self.running if each[3]]
        kv_tokens = sum(each[0] + each[3] for each in decoding)
        left, quad, prompts = self.chunk, 0, 0
        ended = []
        for each in self.running:
            if each[3]:
                each[3] += 1
            elif left:
                taken = min(left, each[0] - each[1])
                quad += (each[1] + taken) ** 2 - each[1] ** 2
                each[1] += taken
                left -= taken
                prompts += 1
                each[3] += each[1] == each[0]
            if each[3] == each[2]:
                ended.append(each)
        computed = self.chunk - left
        if not decoding and not computed:
            return
        ticks = COST.step_ticks(len(decoding), kv_tokens, computed, quad)
        self.exact_ticks += ticks if decoding else 0
        took_ns = ticks / TICK * self.slower
        self.now_ns += took_ns
        self.rows.append(
            step(
                self.number, round(self.now_ns), prefill_requests=prompts, prefill_tokens=computed,
                decode_requests=len(decoding), running=len(self.running),
                period_ns=round(took_ns) if decoding else None,
            )
        )  # fmt: skip
        self.number += 1
        for each in ended:
            self.running.remove(each)
            self.rows.append(done(each[0], each[2], each[4]))


def total(book: StepBook, rows: Sequence[Row], each: int = 50) -> Sums:
    """Read in parts, and to the end."""
    sums = Sums()
    for start in range(0, len(rows), each):
        sums = sums.plus(book.add(rows[start : start + each]))
    return sums.plus(book.add([]))


@pytest.mark.parametrize(("chunk", "rel"), [(10_000, 0.0), (300, 1e-5)])
def test_what_steps_computed_is_known_when_their_requests_have_finished(
    chunk: int, rel: float
) -> None:
    """Exactly, but for whose chunk of a prompt was in which step."""
    draw = random.Random(1)  # noqa: S311
    engine = Engine(SLOWER, chunk)
    for _ in range(60):
        cached = draw.choice((0, 0, 64))
        engine.ask(draw.randrange(65, 900), draw.randrange(1, 200), cached)
        engine.run(draw.randrange(1, 30))
    engine.run(500)
    decoded = sum(isinstance(row, StepRow) and bool(row.decode_requests) for row in engine.rows)
    sums = total(StepBook(COST, 100_000, 16), engine.rows)
    assert sums.steps == decoded > 500
    assert sums.predicted_ticks == pytest.approx(engine.exact_ticks, rel=rel, abs=0)
    assert sums.measured_ns / (sums.predicted_ticks / TICK) == pytest.approx(SLOWER, rel=1e-5)


def test_steps_wait_for_their_requests_and_not_for_ever() -> None:
    engine = Engine()
    engine.ask(100, 20)
    engine.run(19)
    book = StepBook(COST, 100_000, 16)
    assert book.add(engine.rows) == Sums(), "its only request has not finished"
    engine.run(1)
    assert book.add(engine.rows[19:]).steps == 18, "the last may have more to come"
    assert book.add([]).steps == 1
    slow = [step(number, number * 1000 * MS) for number in range(100)]
    assert StepBook(COST, 100_000, 16).add(slow).steps == 70, "half a minute"


def test_held_steps_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_MOST", 100)
    book = StepBook(COST, 100_000, 16)
    assert book.add([step(number, number) for number in range(5000)]).steps == 4900
    assert len(book._held) == 100


def test_of_strangers_the_context_is_as_the_cache_says() -> None:
    """1 % of a million tokens are held by four sequences in blocks of 16."""
    sums = total(StepBook(COST, 1_000_000, 16), [step(0, 0)])
    assert sums == Sums(1, 9 * MS, COST.step_ticks(4, 10_000 - 4 * 8))
    half = total(StepBook(COST, 1_000_000, 16), [step(0, 0, running=8)])
    assert half.predicted_ticks == COST.step_ticks(4, (10_000 - 8 * 8) // 2)
    for unknown in ({"kv_used_ppm": None}, {"decode_requests": None}, {"prefill_tokens": None}):
        assert total(StepBook(COST, 1_000_000, 16), [step(0, 0, **unknown)]) == Sums()
    assert total(StepBook(COST, 0, 16), [step(0, 0)]) == Sums()


def test_shared_prompts_leave_the_context_unknown() -> None:
    book = StepBook(COST, 1_000_000, 16)
    rows: list[Row] = [done(1000, 1, 900), *(step(number, number) for number in range(9))]
    assert total(book, rows) == Sums()
    own = StepBook(COST, 1_000_000, 16)
    assert total(own, [done(1000, 1, 0), *rows[1:]]).steps == 9


def test_nearly_all_stand_for_all() -> None:
    rows: list[Row] = [step(number, number, decode_requests=10) for number in range(5)]
    rows += [done(100, 3) for _ in range(9)]
    sums = total(StepBook(COST, 0, 16), rows)
    mean = [(101 * 10), (102 * 10)]
    assert sums.steps == 2
    assert sums.predicted_ticks == sum(COST.step_ticks(10, tokens) for tokens in mean)
    rows.pop()
    assert total(StepBook(COST, 0, 16), rows) == Sums(), "eight of ten do not"


def test_what_was_computed_twice_is_nobodys() -> None:
    rows: list[Row] = [step(number, number, decode_requests=1) for number in range(9)]
    assert total(StepBook(COST, 0, 16), [*rows, done(100, 5, preemptions=1)]) == Sums()
    assert total(StepBook(COST, 0, 16), [*rows, done(100, 5)]).steps == 4


@pytest.mark.parametrize(
    ("before", "row", "measured_ns"),
    [
        ({}, {"period_ns": 8}, 8),
        ({}, {"period_ns": None}, 7),
        ({}, {"period_ns": None, "step": 2}, 0),
        ({}, {"period_ns": None, "decode_requests": 0, "prefill_tokens": 9}, 0),
        ({"waiting": 1}, {"period_ns": None, "decode_requests": 0, "prefill_tokens": 9}, 7),
        ({"waiting": None}, {"period_ns": None, "decode_requests": 0, "prefill_tokens": 9}, 0),
        ({"waiting": 1}, {"period_ns": None, "decode_requests": 0}, 0),
        ({}, {"period_ns": None, "at_ns": 0}, 0),
    ],
)
def test_a_step_is_measured_where_it_followed_at_once(
    before: dict[str, Any], row: dict[str, Any], measured_ns: int
) -> None:
    first = step(0, 100, **before)
    second = step(1, 107)._replace(**row)
    assert module._measured_ns(first, second) == measured_ns


def test_after_a_gap_nobody_knows_where_requests_were() -> None:
    rows: list[Row] = [step(number, number, decode_requests=1) for number in (0, 1, 2, 5, 6)]
    sums = total(StepBook(COST, 0, 16), [*rows, done(100, 9)])
    assert sums.steps == 2, "5 and 6"


def test_prefills_of_strangers_begin_in_their_step() -> None:
    row = step(0, 0, prefill_requests=2, prefill_tokens=600)
    sums = total(StepBook(COST, 1_000_000, 16), [row])
    assert sums.predicted_ticks == COST.step_ticks(4, 9968, 600, 2 * 300**2)


def test_logprobs_cost_more_where_all_are_asked_for() -> None:
    plain = total(StepBook(COST, 1_000_000, 16), [step(0, 0)])
    more = total(StepBook(COST, 1_000_000, 16, logprobs=True), [step(0, 0)])
    assert more.predicted_ticks - plain.predicted_ticks == 4 * 7_000 * TICK


# Files

SETTINGS = ServerSettings(served_model="m", block_tokens=16, kv_blocks=62_500)
LIFE = "ab12"
SPEC = up(models=("m", "lora"), kv_blocks=100, block_tokens=16)


def header(details: bool = True, **settings: Any) -> Header:
    told = msgspec.structs.replace(SETTINGS, **settings)
    return Header(STEPS_SCHEMA, KIND, "0.32.0", "0.1.0", 0, 0, 0, details, told, LIFE)


def write(path: Path, rows: Sequence[Row], head: Header | None = None) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        if not file.tell():
            file.write(encode_header(head or header()))
        file.write(b"".join(map(encode_row, rows)))
    return path


def reader(given: Path | str = "", **changes: Any) -> StepReader:
    spec = msgspec.structs.replace(SPEC, **changes)
    OPENED.append(StepReader("here:8000", spec, COST, str(given)))
    return OPENED[-1]


OPENED: list[StepReader] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


ONE = Sums(1, 9 * MS, COST.step_ticks(4, 9968))


def test_files_are_found_by_what_the_server_or_the_settings_say(tmp_path: Path) -> None:
    path = write(tmp_path / "a" / "steps-7-0.jsonl", [step(0, 0)])
    here, nowhere = [Said(str(path), LIFE)], [Said("/nowhere/steps-1-0.jsonl", LIFE)]
    for given, said in (("", here), (path, []), (tmp_path / "a", []), (path, nowhere)):
        follow = reader(given)
        assert follow.read(said) == Sums(), "what was before is no drift of today"
        write(path, [step(1, 0)])
        assert follow.read(said) == Sums(), "the last step waits for its requests"
        assert follow.read(said) == ONE
        assert follow.read(said) == Sums()
        follow.close()
    assert reader().read([Said(str(tmp_path / "a" / "steps-8-0.jsonl"), LIFE)]) == Sums()


def test_the_plug_ins_files_are_known_by_their_names(tmp_path: Path) -> None:
    """The second process of a number, in another container, gets a name of its own."""

    def first_line() -> dict[str, Any]:
        return msgspec.to_builtins(header())

    files = [StepFile(tmp_path, 0, 1 << 20, first_line) for _ in range(2)]
    assert files[0].path != files[1].path
    rows: list[plugin_rows.Row] = [("s", *step(number, number)) for number in range(3)]
    for file in files:
        file.write(())
        follow = reader()
        assert follow.read([Said(str(file.path), LIFE)]) == Sums()
        file.write(rows)
        follow.read([Said(str(file.path), LIFE)])
        assert follow.read([Said(str(file.path), LIFE)]).steps >= 1, file.path
        file.close()


def test_a_path_that_another_server_has_too_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two containers say the same; only one's folder is here."""
    path = write(tmp_path / "steps-1-0.jsonl", [])
    ours, theirs, unknown = reader(), reader(), reader()
    said = {ours: Said(str(path), LIFE), theirs: Said(str(path), "cd"), unknown: Said(str(path))}

    def steps() -> list[int]:
        return [follow.read([said[follow]]).steps for follow in said]

    with caplog.at_level(logging.WARNING):
        steps()
        write(path, [step(number, number) for number in range(3)])
        steps()
        settled = steps()
    assert settled[0] > 0
    assert settled[1:] == [0, 0]
    told = [record.getMessage() for record in caplog.records]
    assert [("another server's" in text) for text in told] == [True, True]
    said[theirs] = Said(str(path), LIFE)  # it was restarted, and the file is its own by now
    steps()
    write(path, [step(number, number) for number in range(3, 6)])
    theirs.read([said[theirs]])
    assert theirs.read([said[theirs]]).steps > 0


def test_records_that_the_settings_name_in_vain_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPLAIN_S", 0.0)
    (tmp_path / "empty").mkdir()
    for given in ("typo", "empty"):
        caplog.clear()
        follow = reader(tmp_path / given)
        with caplog.at_level(logging.WARNING):
            follow.read([])
            follow.read([])
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == 2
        assert f"steps={tmp_path / given}: there are no step records" in texts[0]


def test_a_path_that_the_server_names_and_nobody_may_read_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPLAIN_S", 0.0)
    path = write(tmp_path / "steps-1-0.jsonl", [])
    really = module.Path.is_file

    def closed(each: Path) -> bool:
        if each == path:
            raise PermissionError(13, "Permission denied", str(path))
        return really(each)

    monkeypatch.setattr(module.Path, "is_file", closed)
    follow = reader()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert follow.read([Said(str(path), LIFE)]) == Sums()
    (record,) = caplog.records
    assert "Permission denied" in record.getMessage()


def test_every_engine_and_the_youngest_life_count(tmp_path: Path) -> None:
    for number in (0, 1):
        write(tmp_path / "a" / f"steps-7-{number}.jsonl", [])
    follow = reader(tmp_path / "a")
    follow.read([])
    for number in (0, 1):
        write(tmp_path / "a" / f"steps-7-{number}.jsonl", [step(0, 0)])
    follow.read([])
    assert follow.read([]) == ONE.plus(ONE)
    later = write(tmp_path / "a" / "steps-9-1.jsonl", [step(0, 0)] * 3)
    os.utime(later, ns=(1 << 62, 1 << 62))
    assert follow.read([]) == Sums()
    write(tmp_path / "a" / "steps-7-1.jsonl", [step(1, 0)] * 100)
    write(later, [step(1, 0)])
    os.utime(later, ns=(1 << 62, 1 << 62))
    follow.read([])
    assert follow.read([]).steps == 1


def test_what_is_in_a_file_already_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "steps-7-0.jsonl", [step(number, number) for number in range(99)])
    line = encode_row(step(99, 99))
    with path.open("ab") as file:
        file.write(line[:20])  # it is being written just now
    follow = reader(path)
    assert follow.read([]) == follow.read([]) == Sums()
    with path.open("ab") as file:
        file.write(line[20:])
    write(path, [step(100, 100)])
    follow.read([])
    assert follow.read([]).steps >= 1
    path.replace(path.with_name(path.name + ".1"))
    write(path, [step(number, number) for number in range(101, 120)])
    sums = follow.read([]).plus(follow.read([]))
    assert sums.steps == 19, "a file that was begun anew is read from its start"


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (header(details=False), "--enable-logging-iteration-details"),
        (header(served_model="other"), "it is of a server of other, and this one is m"),
        (header(speculative="eagle"), "speculative decoding"),
    ],
)
def test_records_that_tell_nothing_are_told_of_once(
    head: Header, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "steps-7-0.jsonl", [step(0, 0)], head)
    follow = reader(path)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert follow.read([]) == Sums()
    (record,) = caplog.records
    assert why in record.getMessage()


def test_a_broken_line_costs_one_reading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "steps-7-0.jsonl", [])
    follow = reader(path)
    assert follow.read([]) == Sums()
    write(path, [step(0, 0)])
    with path.open("ab") as file:
        file.write(b'["s", 1, "what"]\n')
    write(path, [step(1, 9), step(2, 18)])
    with caplog.at_level(logging.WARNING):
        assert follow.read([]) == Sums()
    assert "line 3" in caplog.text
    follow.read([])
    assert follow.read([]).steps >= 1


def test_what_is_no_file_of_records_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "steps-7-0.jsonl"
    os.mkfifo(pipe)
    (tmp_path / "secret.txt").write_text("secret")
    follow = reader()
    paths = (str(pipe), str(tmp_path / "secret.txt"), "/steps-1-0.jsonl\0")
    assert follow.read([Said(path, LIFE) for path in paths]) == Sums()
    assert follow._engines == {}
