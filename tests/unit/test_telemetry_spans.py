"""Which requests are traced, and what goes to the replica."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from controller.config import Settings
from controller.telemetry.chain_traces import KEEP_NS, KEPT_MOST, derived
from controller.telemetry.chains import OwnStep
from controller.telemetry.spans import Spans
from tests.telemetry_support import MS, S, answer, call, dispatch

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOWHERE = "http://127.0.0.1:9"


def spans(share: float, otlp: str = NOWHERE) -> Spans:
    return Spans(Settings((), otlp=otlp, span_share=share), 0)


@pytest.fixture
def all_of_them() -> Iterator[Spans]:
    made = spans(1.0)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def none_of_them() -> Iterator[Spans]:
    made = spans(0.0)
    yield made
    asyncio.run(made.close())


def test_the_callers_flag_decides(all_of_them: Spans, none_of_them: Spans) -> None:
    sampled = call(1, traceparent=f"00-{TRACE}-{SPAN}-01")
    none_of_them.arrived(sampled)
    dispatch(sampled)
    none_of_them.dispatched(sampled)
    version, trace, span, flags = none_of_them.traceparent(sampled).split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert span not in (SPAN, "0" * 16)
    assert len(span) == 16
    for header in (f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-02-more"):
        unsampled = call(2, traceparent=header)
        all_of_them.arrived(unsampled)
        assert unsampled.span is None
        assert all_of_them.traceparent(unsampled) == header


@pytest.mark.parametrize(
    "header",
    [
        "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1",
    ],
)  # fmt: skip
def test_a_header_that_means_nothing_is_as_none(
    header: str, all_of_them: Spans, none_of_them: Spans
) -> None:
    made = call(1, traceparent=header)
    none_of_them.arrived(made)
    assert made.span is None
    all_of_them.arrived(made)
    assert made.span is not None
    assert TRACE not in all_of_them.traceparent(made)


def test_a_share_of_the_others_is_traced_the_same_every_time() -> None:
    first, second = spans(0.1), spans(0.1)
    chosen: list[list[int]] = [[], []]
    for number in range(5000):
        for of, traced in zip((first, second), chosen, strict=True):
            made = call(number)
            of.arrived(made)
            if made.span is not None:
                traced.append(number)
    assert chosen[0] == chosen[1]
    assert 400 < len(chosen[0]) < 600
    asyncio.run(first.close())
    asyncio.run(second.close())


def test_every_try_has_its_own_span_under_one_trace(all_of_them: Spans) -> None:
    made = call(1)
    all_of_them.arrived(made)
    seen = []
    for replica in (0, 1):
        dispatch(made, replica)
        all_of_them.dispatched(made)
        seen.append(all_of_them.traceparent(made).split("-"))
    assert seen[0][1] == seen[1][1]
    assert seen[0][2] != seen[1][2]


def test_without_an_address_nothing_is_traced_and_headers_pass() -> None:
    off = spans(1.0, otlp="")
    for header in ("", f"00-{TRACE}-{SPAN}-01"):
        made = call(1, traceparent=header)
        off.arrived(made)
        dispatch(made)
        off.dispatched(made)
        assert made.span is None
        assert off.traceparent(made) == header
        off.settled(made, answer(made))
    assert off.counts() == (0, 0, 0)
    asyncio.run(off.close())


def test_what_is_not_traced_costs_next_to_nothing(none_of_them: Spans) -> None:
    """A gross bound, for machines that are busy: under 1 us was measured."""
    made = [call(number) for number in range(300)]
    settled = []
    for one in made:
        dispatch(one)
        settled.append(answer(one))
    best_s = 1.0
    for _ in range(20):
        began_s = time.perf_counter()
        for one, so in zip(made, settled, strict=True):
            none_of_them.arrived(one)
            none_of_them.dispatched(one)
            none_of_them.traceparent(one)
            none_of_them.first_token(one)
            none_of_them.settled(one, so)
        best_s = min(best_s, time.perf_counter() - began_s)
    assert best_s / len(made) < 20e-6


def test_steps_of_a_chain_share_a_trace_that_every_controller_finds(
    all_of_them: Spans, none_of_them: Spans
) -> None:
    trace_id, root_id, _ = derived("ann", "c-1")
    assert len({derived(user, chain)[:2] for user, chain in
                (("ann", "c-1"), ("ann", "c-2"), ("an", "nc-1"), ("", "annc-1"))}) == 4  # fmt: skip
    for number in range(3):
        made = call(number, chain="c-1", user="ann", step=str(number))
        all_of_them.arrived(made)
        assert made.span.parent.span_id == root_id
        version, trace, span, flags = made.trace.split("-")
        assert (version, int(trace, 16), flags) == ("00", trace_id, "01")
        assert int(span, 16) == made.span.span_id
        none_of_them.arrived(made := call(number, chain="c-1", user="ann"))
        assert made.span is None
        assert made.trace == f"00-{trace_id:032x}-{root_id:016x}-00"
        assert none_of_them.traceparent(made) == ""


def test_a_share_of_the_chains_is_traced_with_all_their_steps() -> None:
    some = spans(0.3)
    traced = 0
    for chain in range(300):
        steps = [call(step, chain=f"c-{chain}") for step in range(3)]
        for made in steps:
            some.arrived(made)
        assert len({made.span is None for made in steps}) == 1
        traced += steps[0].span is not None
    assert 60 < traced < 120
    asyncio.run(some.close())


def test_a_callers_trace_holds_for_steps_that_bring_none(all_of_them: Spans) -> None:
    given = f"00-{TRACE}-{SPAN}-01"
    later = call(1, chain="c-1", user="ann")
    first = call(0, chain="c-1", user="ann", traceparent=given)
    all_of_them.arrived(first)
    all_of_them.arrived(later)
    assert later.trace.startswith(f"00-{TRACE}-")
    assert later.span.parent.span_id == int(SPAN, 16)
    other = call(3, chain="c-1", user="ann", traceparent=f"00-{'1' * 32}-{SPAN}-00")
    all_of_them.arrived(other)
    assert (other.span, other.trace) == (None, f"00-{'1' * 32}-{SPAN}-00")
    all_of_them.arrived(nonsense := call(4, chain="c-2", user="ann", traceparent="nonsense"))
    assert nonsense.trace.startswith(f"00-{derived('ann', 'c-2')[0]:032x}-")


def test_without_a_chain_only_what_was_decided_is_told(all_of_them: Spans) -> None:
    off = spans(1.0, otlp="")
    for made, said in (
        (call(1), ""), (call(2, traceparent=f"00-{TRACE}-{SPAN}-01"), f"00-{TRACE}-{SPAN}-01"),
        (call(3, traceparent="nonsense"), ""),
        (call(4, chain="c", user="ann"), f"00-{derived('ann', 'c')[0]:032x}-"),
    ):  # fmt: skip
        off.arrived(made)
        assert made.span is None
        assert made.trace.startswith(said)
        assert bool(made.trace) == bool(said)
    assert call(4).trace == ""
    all_of_them.arrived(traced := call(5))
    assert traced.trace == f"00-{traced.span.trace_id:032x}-{traced.span.span_id:016x}-01"


def test_the_span_of_a_chain_is_made_once_and_chains_are_forgotten() -> None:
    made = spans(1.0)

    def step(number: int, at_ns: int, left_ns: int, chain: str = "c") -> None:
        one = call(number, at_ns, chain=chain)
        made.arrived(one)
        dispatch(one)
        made.dispatched(one)
        made.settled(one, structs.replace(answer(one), left_ns=left_ns))

    before = made.counts().dropped
    step(1, 100 * S, 5 * S)
    made.turn(100 * S + MS)
    assert not next(made._chains.left()).told
    step(2, 101 * S, 4 * S)
    made.turn(200 * S)
    assert list(made._chains.left()) == []
    step(3, 210 * S, 0)
    made.turn(300 * S)
    made.turn(300 * S + KEEP_NS)
    assert not made._chains._kept
    for number in range(KEPT_MOST + 20):
        made.own(OwnStep("ann", f"c-{number}", "", "db", 0, 0, "done", {}), 400 * S)
    assert len(made._chains._kept) == KEPT_MOST
    assert made.counts().dropped > before  # nobody takes them: what waits is bounded
    asyncio.run(made.close())
