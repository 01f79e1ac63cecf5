"""What a decision log says of a run: each invariant that is broken, and what storms look like."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.decisions import BreakerMoved, Dispatch, Refused, Settled, Verify
from policy.events import Arrived, Failed, Finished, FirstToken, Ticked
from policy.parameters import Parameters
from policy.parameters.limits import Limits
from twin.validate.reading import BLOCK_NS, Reader

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event
    from twin.validate.reading import Story

MS = 1_000_000
S = 1000 * MS
Step = tuple[int, "Event", tuple["Decision", ...]]


def arrived(request: int, **fields: Any) -> Arrived:
    return Arrived(request, "m", "chat", 400, **{"sla": "P1", **fields})


def finished(request: int, **fields: Any) -> Finished:
    return Finished(request, 0, 100, 0, 50, **fields)


def served(request: int, at_ns: int, wait_ns: int = 0, **fields: Any) -> list[Step]:
    """Arrives, is sent after ``wait_ns``, and answered."""
    sent_ns = at_ns + wait_ns
    return [
        (at_ns, arrived(request, **fields), ()),
        (sent_ns, Ticked(), (Dispatch(request, 0, "stable"),)),
        (sent_ns + MS, FirstToken(request, 0), ()),
        (sent_ns + 2 * MS, finished(request), (Settled(request, "answered"),)),
    ]


def read(steps: list[Step], parameters: Parameters | None = None, policy: Any = None) -> Story:
    own = parameters or Parameters()
    reader = Reader(own, own)
    for now_ns, event, decisions in sorted(steps, key=lambda step: step[0]):
        reader.step(now_ns, event, decisions, policy)
    return reader.end()


def limits(**changes: int) -> Parameters:
    return Parameters(limits=msgspec.structs.replace(Limits(), **changes))


def test_a_run_without_fault_breaks_nothing() -> None:
    story = read([step for request in range(5) for step in served(request, request * S)])
    assert story.broken == []
    assert (story.arrived, story.sent, story.again, story.open_at_end) == (5, 5, 0, 0)
    assert story.offered.sum() == 5
    assert story.missed.sum() == 0
    assert story.ttft_s == {"P1": pytest.approx([0.001] * 5)}
    assert story.tokens == 5 * 150


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([(0, arrived(1), ())], "1 requests have no outcome at the end, such as [1]"),
        ([(0, arrived(1), (Settled(2, "shed"),))], "request 2 is settled, and it is not open"),
        (
            [*served(1, 0), (S, Ticked(), (Settled(1, "failed"),))],
            "request 1 is settled, and it is not open",
        ),
        ([(0, Ticked(), (Dispatch(7, 0, "turbo"),))], "request 7 is sent, and it is not open"),
        ([(0, Ticked(), (Verify(7, 0),))], "request 7 is verified, and it is not open"),
        ([(0, Ticked(), (Refused("ticked", "no"),))], "an event was refused at 0 ns"),
    ],
)
def test_each_broken_promise_is_told(steps: list[Step], sentence: str) -> None:
    assert sentence in read(steps).broken[0]


def test_a_session_keeps_its_order_and_one_at_a_time() -> None:
    first, second = (served(number, number * S, session="s", user="u") for number in (1, 2))
    assert read([*first, *second]).broken == []
    both = [*served(1, 0, wait_ns=5 * S, session="s"), *served(2, S, session="s")]
    assert "before request 1 of its session" in read(both).broken[0]
    assert read(both, limits(session_in_flight_most=0)).broken == []


def test_limits_of_what_is_under_way_are_kept() -> None:
    steps = [
        step
        for request in (1, 2, 3)
        for step in (
            (0, arrived(request, user="u"), (Dispatch(request, 0, "stable"),)),
            (S, finished(request), (Settled(request, "answered"),)),
        )
    ]
    assert read(steps).broken == []
    assert (
        "number 3 under way of user u: at most 2"
        in (read(steps, limits(user_in_flight_most=2)).broken[0])
    )
    assert "of model m" in read(steps, limits(model_in_flight_most=2)).broken[0]
    assert "of all" in read(steps, limits(global_in_flight_most=2)).broken[0]
    later = [*served(1, 0, user="u"), *served(2, S, user="u")]
    assert read(later, limits(user_in_flight_most=1)).broken == []


def policy(parked: set[int] | None = None, size: int = 0, due_ns: int | None = None) -> Any:
    """What the reader looks at of a policy."""
    held = parked or set()
    table = SimpleNamespace(
        size=lambda: size, size_most=lambda: 10, parked=lambda number: number in held
    )
    return SimpleNamespace(mechanisms={"limits": table}, deadline_ns=lambda: due_ns)


def test_a_table_beyond_its_bound_is_told() -> None:
    ticks = [(number, Ticked(), ()) for number in range(40)]
    assert read(ticks, policy=policy(size=10)).broken == []
    assert read(ticks, policy=policy(size=11)).broken == ["limits holds 11 entries: at most 10"]


def test_a_deadline_left_in_the_past_is_told() -> None:
    assert read([(S, Ticked(), ())], policy=policy(due_ns=S + 1)).broken == []
    assert "leaves the deadline at" in read([(S, Ticked(), ())], policy=policy(due_ns=S)).broken[0]


def test_more_than_its_rate_let_through_in_a_second_is_told() -> None:
    steps = [step for request in range(7) for step in served(request, request * MS, MS, user="u")]
    assert (
        "number 6 of user 'u' within a second: at most 5"
        in (read(steps, policy=policy()).broken[0])
    )
    slower = [step for request in range(7) for step in served(request, request * S // 5, user="u")]
    assert read(slower, policy=policy()).broken == []


def test_nothing_is_sent_while_it_is_held_back() -> None:
    assert "held" not in str(read(served(1, 0), policy=policy()).broken)
    assert "while the limits hold it back" in read(served(1, 0), policy=policy({1})).broken[0]


def test_missed_are_the_late_the_shed_and_the_failed() -> None:
    late = served(1, 0, wait_ns=5 * S)  # P1 has 4 s
    shed = [(BLOCK_NS, arrived(2, sla="P0"), (Settled(2, "shed"),))]
    gone = [(BLOCK_NS, arrived(3), (Settled(3, "cancelled"),))]
    failed = [
        (2 * BLOCK_NS, arrived(4), (Dispatch(4, 0, "stable"),)),
        (2 * BLOCK_NS + S, Failed(4, 0, "timeout"), (Settled(4, "failed"),)),
    ]
    story = read([*late, *shed, *gone, *failed, *served(5, 2 * BLOCK_NS)])
    assert story.offered.tolist() == [[0, 1, 0], [1, 0, 0], [0, 2, 0]]
    assert story.missed.tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert story.failures == {"timeout": 1}


def test_a_class_starves_while_only_others_are_started() -> None:
    others = [step for number in range(2, 30) for step in served(number, number * S)]
    waits = [
        (S, arrived(1, sla="P2"), ()),
        (40 * S, Ticked(), (Settled(1, "shed"),)),
    ]
    assert read([*others, *waits]).starved_s["P2"] == pytest.approx(28)
    idle = [(S, arrived(1, sla="P2"), ()), (40 * S, Ticked(), (Settled(1, "shed"),))]
    assert read(idle).starved_s["P2"] == 0


def test_second_runs_and_tries_after_a_failure_are_counted() -> None:
    steps: list[Step] = [
        (0, arrived(1), (Dispatch(1, 0, "stable"),)),
        (S, Failed(1, 0, "timeout"), (Dispatch(1, 1, "stable"),)),
        (2 * S, finished(1), (Verify(1, 0),)),
        (3 * S, Ticked(), (Settled(1, "answered", confidence_permille=450),)),
    ]
    story = read(steps)
    assert (story.sent, story.again) == (2, 1)
    assert (story.tokens, story.second_tokens) == (150, 150)
    assert story.scores == {450: 1}


def test_openings_count_from_closed_only() -> None:
    moves = ["open", "half_open", "open", "half_open", "closed", "open"]
    steps: list[Step] = [
        (number * S, Ticked(), (BreakerMoved("errors", state, ""),))  # type: ignore[arg-type]
        for number, state in enumerate(moves)
    ]
    steps.append((10 * S, Ticked(), ()))
    story = read(steps)
    assert story.openings == {"errors": 2}
    assert story.opened_for_s == {"errors": pytest.approx(4 + 5)}
