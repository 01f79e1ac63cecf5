"""The runner: order, one armed timer, the log before the deed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from policy.decisions import Decision, Dispatch
from policy.events import Cancelled, Event, Ticked
from policy.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable


class Scripted:
    """A policy that answers each event by a function and wants its tick at ``due_ns``."""

    def __init__(self, answer: Callable[[Event], tuple[Decision, ...]]) -> None:
        self.answer = answer
        self.due_ns: int | None = None

    def step(self, now_ns: int, event: Event) -> tuple[Decision, ...]:
        if isinstance(event, Ticked) and self.due_ns is not None and now_ns >= self.due_ns:
            self.due_ns = None
        return self.answer(event)

    def deadline_ns(self) -> int | None:
        return self.due_ns

    def snapshot(self) -> bytes:
        return b""


class World:
    def __init__(self, answer: Callable[[Event], tuple[Decision, ...]] = lambda _: ()) -> None:
        self.now_ns: Any = 0
        self.policy = Scripted(answer)
        self.story: list[object] = []
        self.armed: list[int] = []
        self.on_apply: Callable[[Decision], None] = lambda _: None
        self.runner = Runner(self.policy, lambda: self.now_ns, self.apply, self.armed.append, self)

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        self.story.append(("log", now_ns, event, decisions))

    def apply(self, decision: Decision) -> None:
        self.story.append(decision)
        self.on_apply(decision)


def test_a_step_is_logged_before_it_is_carried_out() -> None:
    sent = Dispatch(1, 2, "")
    world = World(lambda _: (sent,))
    world.now_ns = 7
    world.runner.feed(Cancelled(1))
    assert world.story == [("log", 7, Cancelled(1), (sent,)), sent]


def test_events_fed_while_busy_wait_until_all_decisions_are_carried_out() -> None:
    first, second = Dispatch(1, 2, ""), Dispatch(3, 4, "")
    world = World(lambda event: (first, second) if event == Cancelled(1) else ())
    world.on_apply = lambda decision: world.runner.feed(Cancelled(10 + decision.request))
    world.runner.feed(Cancelled(1))
    assert world.story == [
        ("log", 0, Cancelled(1), (first, second)), first, second,
        ("log", 0, Cancelled(11), ()), ("log", 0, Cancelled(13), ()),
    ]  # fmt: skip


def test_an_event_left_behind_by_an_exception_goes_before_the_next() -> None:
    world = World(lambda event: (Dispatch(1, 2, ""),) if event == Cancelled(1) else ())

    def fail(_: Decision) -> None:
        world.runner.feed(Cancelled(2))
        raise OSError("driver")

    world.on_apply = fail
    with pytest.raises(OSError, match="driver"):
        world.runner.feed(Cancelled(1))
    world.now_ns = 5
    world.runner.feed(Cancelled(3))
    assert world.story[2:] == [("log", 0, Cancelled(2), ()), ("log", 5, Cancelled(3), ())]


def test_a_timer_is_armed_only_when_the_deadline_moves_earlier() -> None:
    world = World()
    for due_ns in (100, 100, 150, 60, 80):
        world.policy.due_ns = due_ns
        world.runner.feed(Cancelled(1))
    assert world.armed == [100, 60]


def test_a_timer_that_fires_too_early_is_armed_again_and_ticks_nothing() -> None:
    world = World()
    world.policy.due_ns = 50
    world.runner.feed(Cancelled(1))
    world.policy.due_ns = 90
    world.now_ns = 50
    world.runner.tick()
    assert world.armed == [50, 90]
    assert len(world.story) == 1
    world.now_ns = 90
    world.runner.tick()
    assert world.story[-1] == ("log", 90, Ticked(), ())
    world.runner.tick()  # nothing is due any more
    assert len(world.story) == 2


def test_a_policy_that_wants_a_tick_at_once_for_ever_is_stopped() -> None:
    world = World()
    world.policy.due_ns = 50
    world.now_ns = 50
    world.policy.step = lambda _now, _event: ()  # type: ignore[method-assign]
    runner = Runner(world.policy, lambda: 50, world.apply, world.armed.append, world)
    with pytest.raises(RuntimeError, match="ticked at 50 ns and wants its next tick at 50 ns"):
        runner.tick()


@pytest.mark.parametrize("now", [1.0, True, np.int64(3)])
def test_the_clock_must_give_plain_integers(now: object) -> None:
    world = World()
    world.now_ns = now
    with pytest.raises(TypeError, match="convert it once"):
        world.runner.feed(Cancelled(1))
    assert world.story == []


def test_the_clock_must_not_go_back() -> None:
    world = World()
    world.now_ns = 10
    world.runner.feed(Cancelled(1))
    world.now_ns = 9
    with pytest.raises(ValueError, match="from 10 to 9 ns"):
        world.runner.feed(Cancelled(1))


def test_timers_that_were_overtaken_die_out() -> None:
    """Each is fired when its time comes: none may leave another behind."""
    world = World()
    for due_ns in (900, 700, 500):  # each earlier than the one before: three timers
        world.policy.due_ns = due_ns
        world.runner.feed(Cancelled(due_ns))
    assert world.armed == [900, 700, 500]
    world.now_ns = 500
    world.policy.due_ns = 2000  # it moved later: the last timer is armed again, once
    world.runner.tick()
    assert world.armed[3:] == [2000]
    for world.now_ns in (700, 900):
        world.runner.tick()
    assert world.armed[3:] == [2000]
    world.now_ns = 2000
    world.runner.tick()
    assert world.story[-1] == ("log", 2000, Ticked(), ())
