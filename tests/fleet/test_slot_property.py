"""A slot under any order of events, beside a process that does what processes do.

Thousands of seeded walks: rules of Hypothesis spend most of their steps where nothing can happen.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

from controller.fleet.slot import (
    RUNNING,
    Action,
    Actions,
    Announce,
    Fail,
    Hold,
    Kill,
    Open,
    Role,
    Rules,
    Slot,
    Spawn,
    Tell,
    Terminate,
    WarmUp,
    Withdraw,
)

S = 1_000_000_000
WALKS, STEPS = 2000, 50
LIKELY = {
    "wait": 4, "answer": 4, "warmed": 4, "wrong": 1, "exit": 2, "start": 3, "stop": 2, "hang": 1,
    "break_card": 0.3, "mend_card": 1, "settle": 0.5, "change": 0.5, "close": 0.1,
}  # fmt: skip
"""How often each thing happens, of those that can."""


class World:
    """The world around one slot: its process, its gate, and what the policy thinks of it."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.now_ns = 0
        self.process = ""
        """Version of what runs; empty: nothing does."""
        self.asked_to_end = self.warm = self.open = self.closed = self.changing = False
        self.policy = "away"
        """What the policy takes it for: away, standby, starting or up."""
        self.unanswered = ""
        self.trail: list[str] = []
        self.seen: Counter[str] = Counter()
        rules = Rules(draw.random() < 0.7, 20 * S, 5 * S, S, 8 * S, 30 * S, draw.choice([0, 0, 2]))
        role: Role = draw.choice(["serve", "spare"])
        self.slot = Slot(rules, "v1", role, 0)
        adopted = draw.choice(["", "", "fresh", "warm"])
        if adopted:
            self.process, self.warm = "v1", adopted == "warm"
            self.obey(self.slot.adopt(0, "v1", self.warm))
        else:
            self.obey(self.slot.begin(0))

    def obey(self, actions: Actions) -> None:
        for action in actions:
            self.trail.append(f"    {action}")
            self.seen[type(action).__name__] += 1
            self._obey(action)

    def _obey(self, action: Action) -> None:
        match action:
            case Spawn(version=version):
                assert not self.process, "one process at a time"
                assert not self.closed
                self.process, self.asked_to_end, self.warm = version, False, False
            case WarmUp():
                assert self.process
            case Terminate() | Kill():
                assert self.process, "there is something to signal"
                self.asked_to_end = True
            case Open():
                assert self.process
                assert self.warm, "nobody waits for what a first request compiles"
                assert not self.asked_to_end
                assert not self.open
                self.open, self.policy = True, "up"
                if self.unanswered == self.process:
                    self.unanswered = ""
            case Hold(reason=reason):
                assert reason
                assert self.open
                self.open, self.policy = False, "away"
            case Announce(version=version, start_ns=start_ns):
                assert not self.open, "the policy would refuse it"
                assert start_ns > 0
                assert version == self.slot.home
                self.policy = "standby"
            case Withdraw(why=why):
                assert why
                assert self.policy in ("standby", "starting")
                self.policy = "away"
            case Fail(why=why):
                assert why
                self.unanswered = ""
                self.policy = "away"
            case Tell(text=text):
                assert text

    # What can happen

    def can(self) -> list[str]:
        found = ["wait", "break_card", "mend_card", "settle", "change"]
        found += ["answer", "exit"] * bool(self.process)
        found += ["warmed"] * (self.slot.state == "warming")
        found += ["wrong"] * (self.slot.state in ("starting", "warming"))
        found += ["start"] * (self.policy == "standby" and not self.closed)
        found += ["stop"] * (self.policy in ("up", "starting"))
        found += ["hang"] * (self.policy == "up")
        return found + ["close"] * (not self.closed)

    def step(self) -> None:
        names = self.can()
        name = self.draw.choices(names, [LIKELY[each] for each in names])[0]
        self.trail.append(f"{self.now_ns / S:g} s: {name}, {self.slot.state} {self.slot.role}")
        getattr(self, name)()
        self.holds()

    def wait(self, s: float = 0.0) -> None:
        self.now_ns += round((s or self.draw.choice([0.1, 0.3, 1.0, 7.0, 40.0])) * S)
        due_ns = self.slot.deadline_ns()
        if due_ns is not None and due_ns <= self.now_ns:
            self.obey(self.slot.tick(self.now_ns))

    def answer(self) -> None:
        self.obey(self.slot.answered(self.now_ns))

    def warmed(self) -> None:
        self.warm = True
        self.obey(self.slot.warmed(self.now_ns, self.draw.random() < 0.5))

    def wrong(self) -> None:
        loaded = self.draw.choice(["", "v9"])
        self.obey(self.slot.failed(self.now_ns, "not what it should be", loaded))

    def exit(self) -> None:
        self.process = ""
        self.obey(self.slot.exited(self.now_ns, "exited with code 1"))

    def start(self) -> None:
        version = self.draw.choice(["", "", "v1", "v2", "v3"])
        self.policy, self.unanswered = "starting", version
        self.obey(self.slot.start(self.now_ns, version))

    def stop(self) -> None:
        self.unanswered = ""
        self.obey(self.slot.stop(self.now_ns))

    def hang(self) -> None:
        self.obey(self.slot.hung(self.now_ns, "hung"))

    def break_card(self) -> None:
        self.obey(self.slot.card_broken(self.now_ns, "xid_fatal"))

    def mend_card(self) -> None:
        self.obey(self.slot.card_well(self.now_ns))

    def settle(self) -> None:
        self.obey(self.slot.settle(self.now_ns, self.draw.choice(["v1", "v2"])))

    def change(self) -> None:
        self.changing = self.draw.random() < 0.5
        self.obey(self.slot.change(self.now_ns, self.changing))

    def close(self) -> None:
        self.closed = True
        self.obey(self.slot.close(self.now_ns))

    # What always holds

    def holds(self) -> None:
        slot = self.slot
        assert self.open == (slot.state == "serving")
        assert bool(self.process) == (slot.state in RUNNING or slot.state == "stopping")
        if slot.state in ("starting", "stopping") or (slot.state == "waiting" and not self.closed):
            assert slot.deadline_ns() is not None, "nobody would wake it"
        if slot.state == "broken":
            assert slot.why
        if self.closed:
            assert not self.open

    def comes_to_rest(self) -> None:
        """From wherever it is, a world in which all goes well."""
        self.trail.append("all goes well")
        self.mend_card()
        for _ in range(12):
            if self.process and self.asked_to_end:
                self.exit()
            self.answer()
            if self.slot.state == "warming":
                self.warmed()
            self.wait(8.0)
            self.holds()
        if self.closed:
            assert not self.process
            return
        assert self.slot.state in ("serving", "warm", "cold")
        if self.slot.rules.warm and not self.changing:
            assert self.slot.state != "cold", "a warm spare is loaded"
        assert self.policy == {"serving": "up"}.get(self.slot.state, "standby")
        assert not self.unanswered, "every start in a version has an answer"


def test_a_slot_bears_any_order_of_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(WALKS):
        world = World(random.Random(seed))  # noqa: S311
        try:
            for _ in range(STEPS):
                world.step()
            world.comes_to_rest()
        except AssertionError as error:
            trail = "\n".join(world.trail[-30:])
            raise AssertionError(f"{error} (seed {seed}):\n{trail}") from error
        seen += world.seen
    names = {kind.__name__ for kind in get_args(Action)}
    assert min(seen[name] for name in names) > 50, f"the walks hardly met some of it: {seen}"
