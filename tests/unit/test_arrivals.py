"""A trace on its way into the world: speed, scale, lengths, nulls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import MS, S, write_rows
from traces import TraceError
from twin.arrivals import Chunk, arrivals

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from traces import Trace


def joined(chunks: Iterable[Chunk], name: str) -> list[Any]:
    return [value for chunk in chunks for value in getattr(chunk, name)]


def ids(chunks: Iterable[Chunk]) -> list[int]:
    return [value for chunk in chunks for value in chunk.batch.column("request_id").to_pylist()]


@pytest.fixture
def steady(tmp_path: Path) -> Trace:
    """20,000 requests, ten a second, exact stamps, in 3 row groups."""
    rows = [
        {"arrival_s": number / 10, "prompt_tokens": 100 + number % 7, "output_tokens": 50}
        for number in range(20_000)
    ]
    return write_rows(tmp_path / "steady.parquet", rows, batch_rows=7000)


def test_a_plain_trace_comes_through_as_it_is(steady: Trace) -> None:
    chunks = list(arrivals(steady))
    assert joined(chunks, "arrival_ns") == [number * 100 * MS for number in range(20_000)]
    assert joined(chunks, "prompt_tokens") == [100 + number % 7 for number in range(20_000)]
    assert set(joined(chunks, "output_tokens")) == {50}
    assert ids(chunks) == list(range(20_000))
    assert all(type(value) is int for value in chunks[0].arrival_ns[:10])
    assert all(chunk.open == len(chunk.arrival_ns) == len(chunk.results) for chunk in chunks)


def test_chunks_are_bounded(steady: Trace) -> None:
    assert max(len(chunk.arrival_ns) for chunk in arrivals(steady)) <= 8192


def test_speed_divides_the_times(steady: Trace) -> None:
    chunks = list(arrivals(steady, speed=4))
    assert joined(chunks, "arrival_ns") == [number * 25 * MS for number in range(20_000)]
    slow = list(arrivals(steady, speed=0.5))
    assert joined(slow, "arrival_ns")[:3] == [0, 200 * MS, 400 * MS]


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 2.5, 3.1])
def test_scale_multiplies_the_rate_at_the_same_pace(steady: Trace, scale: float) -> None:
    """The number of rows is binomial: within four standard deviations, everywhere in the trace."""
    chunks = list(arrivals(steady, scale=scale, seed=3))
    times = joined(chunks, "arrival_ns")
    deviation = 2.0 if scale % 1 else 0.0
    assert abs(len(times) - 20_000 * scale) <= deviation * np.sqrt(20_000)
    first_half = sum(at_ns < 1000 * S for at_ns in times)
    assert abs(first_half - 10_000 * scale) <= deviation * np.sqrt(10_000) + 10 * scale
    assert times == sorted(times)
    assert 1999 * S < times[-1] < 2001 * S


@pytest.mark.parametrize("scale", [0.5, 2.0, 2.5])
def test_scaled_ids_are_unique_and_copies_follow_their_original(
    steady: Trace, scale: float
) -> None:
    chunks = list(arrivals(steady, scale=scale, seed=3))
    numbers = ids(chunks)
    assert len(set(numbers)) == len(numbers)
    times = dict(zip(numbers, joined(chunks, "arrival_ns"), strict=True))
    copies = int(scale) + 1
    for number, at_ns in times.items():
        original, copy = divmod(number, copies)
        late_ns = at_ns - original * 100 * MS
        assert 0 <= late_ns < S
        assert (late_ns == 0) == (copy == 0)


def test_thinning_keeps_other_requests_with_another_seed_only(steady: Trace) -> None:
    kept, again, other = (set(ids(arrivals(steady, scale=0.5, seed=seed))) for seed in (1, 1, 2))
    assert kept == again
    assert 0.4 < len(kept & other) / len(kept) < 0.6


def test_copies_do_not_come_in_step(steady: Trace) -> None:
    chunks = list(arrivals(steady, scale=2.0, seed=3))
    copies = [
        at_ns % (100 * MS)
        for number, at_ns in zip(ids(chunks), joined(chunks, "arrival_ns"), strict=True)
        if number % 3 == 1
    ]
    assert len(set(copies)) > 0.99 * len(copies)


def test_lengths_are_scaled_rounded_and_never_vanish(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 31, "prompt_bytes": 404,
         "max_output_tokens": 64},
        {"arrival_s": 1.0, "prompt_tokens": 1, "output_tokens": 1, "prompt_bytes": 1,
         "max_output_tokens": 1},
        {"arrival_s": 2.0, "prompt_tokens": 7, "output_tokens": 0, "prompt_bytes": 28,
         "max_output_tokens": 0},
    ]  # fmt: skip
    (chunk,) = arrivals(write_rows(tmp_path / "t.parquet", rows), scale_lengths=0.4)
    assert chunk.prompt_tokens == [40, 1, 3]
    assert chunk.output_tokens == [12, 1, 0]
    assert chunk.prompt_bytes == [162, 1, 11]
    assert chunk.max_tokens == [26, 1, 0]
    assert chunk.arrival_ns == [0, S, 2 * S]


def test_scaling_lengths_keeps_nulls(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 30, "max_output_tokens": None},
        {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": None, "max_output_tokens": 50},
    ]
    trace = write_rows(tmp_path / "t.parquet", rows)
    (chunk,) = arrivals(trace, scale_lengths=2, assume_output=7)
    assert chunk.prompt_tokens == [200, 200]
    assert chunk.output_tokens == [60, 14]
    assert chunk.max_tokens == [0, 100]


def test_answers_of_unknown_length_are_refused_unless_one_is_assumed(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.0, "prompt_tokens": 10, "endpoint": "embeddings"},
        {"arrival_s": 1.0, "prompt_tokens": 10, "output_tokens": 4},
        {"arrival_s": 2.0, "prompt_tokens": 10},
    ]
    trace = write_rows(tmp_path / "t.parquet", rows)
    with pytest.raises(TraceError, match=r"request 2 has no output_tokens.*--assume-output"):
        list(arrivals(trace))
    (chunk,) = arrivals(trace, assume_output=9)
    assert chunk.output_tokens == [0, 4, 9]
    (chunk,) = arrivals(write_rows(tmp_path / "e.parquet", rows[:2]))
    assert chunk.output_tokens == [0, 4]


def test_lengths_beyond_the_columns_are_refused_with_the_factor(steady: Trace) -> None:
    with pytest.raises(TraceError, match=r"scale_lengths 1000000000.*prompt_tokens"):
        list(arrivals(steady, scale_lengths=1e9))


def test_what_the_trace_does_not_know_becomes_empty_or_zero(tmp_path: Path) -> None:
    """In a column that is null all through, and in one with some nulls."""
    known = {
        "output_tokens": 5, "prompt_bytes": 90, "max_output_tokens": 9, "model": "m",
        "endpoint": "completions", "user_id": 3, "session_id": 4, "sla_class": "P0",
        "business_line": "search", "deadline_s": 2.5, "prefix_block_tokens": 16,
        "prefix_ids": [1, 2],
    }  # fmt: skip
    unknown = {
        "output_tokens": 7, "max_tokens": 0, "model": "", "endpoint": "chat", "user": "",
        "session": "", "sla": "", "line": "", "deadline_ns": 0, "prefix_block_tokens": 0,
        "prefix": (), "prompt_bytes": 400,
    }  # fmt: skip
    bare = {"arrival_s": 0.0, "prompt_tokens": 100}
    (alone,) = arrivals(write_rows(tmp_path / "bare.parquet", [bare]), assume_output=7)
    assert {name: getattr(alone, name)[0] for name in unknown} == unknown
    both = write_rows(tmp_path / "mixed.parquet", [{**bare, **known}, bare])
    (mixed,) = arrivals(both, assume_output=7)
    assert {name: getattr(mixed, name)[1] for name in unknown} == unknown
    assert mixed.user[0] == "u3"
    assert mixed.session[0] == "s4"
    assert mixed.deadline_ns[0] == 2500 * MS
    assert mixed.prefix[0] == (1, 2)
    assert mixed.prompt_bytes[0] == 90
    assert mixed.model[0] == "m"


def test_an_endpoint_that_the_gateway_lacks_is_taken_for_a_chat(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 1, "endpoint": name}
        for name in ("chat", "embeddings", "audio", None)
    ]
    (chunk,) = arrivals(write_rows(tmp_path / "t.parquet", rows))
    assert chunk.endpoint == ["chat", "embeddings", "chat", "chat"]


def test_coarse_stamps_are_spread_by_the_seed(tmp_path: Path) -> None:
    rows = [
        {
            "arrival_s": float(number // 100),
            "arrival_res_s": 1.0,
            "prompt_tokens": 1,
            "output_tokens": 1,
        }
        for number in range(500)
    ]
    trace = write_rows(tmp_path / "t.parquet", rows)
    first, again, other = (joined(arrivals(trace, seed=seed), "arrival_ns") for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 500
    assert first == sorted(first)
    assert [sum(at // S == second for at in first) for second in range(5)] == [100] * 5


@pytest.mark.parametrize("name", ["speed", "scale", "scale_lengths"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_must_be_above_zero(steady: Trace, name: str, value: float) -> None:
    with pytest.raises(TraceError, match=f"{name} is {value}"):
        arrivals(steady, **{name: value})  # type: ignore[arg-type]


def test_a_session_relative_trace_is_refused_at_once(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "t.parquet", [{"prompt_tokens": 1, "session_id": 1}])
    with pytest.raises(TraceError, match=r"t\.parquet: arrivals are relative .* --session-rate"):
        arrivals(trace)
