"""The limits against a plain model of them: exact, in order, fair, and never idle with room."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from policy.events import QuotaLeased, StoreChanged
from policy.leases import Leases
from policy.limits import FULL, PARKED, PASS, Limits
from policy.parameters.limits import Limits as Section
from tests.policy_support import MS, S

FEW = st.sampled_from((0, 1, 2, 3))
SECTIONS = st.fixed_dictionaries(
    {
        "user_per_s": FEW, "session_per_s": FEW, "model_per_s": FEW, "user_in_flight_most": FEW,
        "session_in_flight_most": FEW, "model_in_flight_most": FEW,
        "global_in_flight_most": st.sampled_from((0, 0, 1, 4)),
        "order": st.sampled_from(("least_served", "arrival")),
        "half_life_s": st.sampled_from((1, 60)), "parked_max": st.just(30),
    }
)  # fmt: skip
GAPS = st.sampled_from((0, 0, 1, 100 * MS, 500 * MS, S - 1, S, 30 * S, 3000 * S))


class Machine(RuleBasedStateMachine):
    """Who passed when, kept as a plain list."""

    @initialize(section=SECTIONS)
    def start(self, section: dict[str, Any]) -> None:
        self.section = Section(**section)
        self.limits = Limits(self.section)
        self.double = Limits(self.section)
        self.now_ns = 0
        self.next = 0
        self.keys: dict[int, tuple[str, str, str]] = {}
        self.passed: list[tuple[int, int]] = []
        self.in_flight: list[int] = []
        self.parked: list[int] = []

    def both(self, method: str, *arguments: Any) -> Any:
        first = getattr(self.limits, method)(*arguments)
        assert getattr(self.double, method)(*arguments) == first
        assert self.limits.deadline_ns() == self.double.deadline_ns()
        assert self.limits.size() <= self.limits.size_most()
        return first

    def most(self, place: int) -> tuple[int, int]:
        """Limits by user, session and model."""
        section = self.section
        return (
            (section.user_per_s, section.user_in_flight_most),
            (section.session_per_s, section.session_in_flight_most),
            (section.model_per_s, section.model_in_flight_most),
        )[place]

    def has_room(self, request: int) -> bool:
        """By the rules alone: may this request go on now?"""
        if 0 < self.section.global_in_flight_most <= len(self.in_flight):
            return False
        for place, name in enumerate(self.keys[request]):
            rate, most = self.most(place)
            same = [other for other in self.in_flight if self.keys[other][place] == name]
            late = [
                other
                for at_ns, other in self.passed
                if self.now_ns - at_ns < S and self.keys[other][place] == name
            ]
            if name and (0 < most <= len(same) or 0 < rate <= len(late)):
                return False
        return not self.behind_its_session(request)

    def behind_its_session(self, request: int) -> bool:
        session = self.keys[request][1]
        if not session or not any(self.most(1)):
            return False
        return any(self.keys[other][1] == session for other in self.parked if other < request)

    def note_pass(self, request: int) -> None:
        assert self.has_room(request)
        self.passed.append((self.now_ns, request))
        self.in_flight.append(request)

    def serve(self) -> None:
        released = self.both("released", self.now_ns)
        for request in released:
            assert request in self.parked
            self.note_pass(request)
            self.parked.remove(request)
            assert not self.limits.parked(request)
        assert not any(self.has_room(request) for request in self.parked)  # none idles with room
        due_ns = self.limits.deadline_ns()
        assert due_ns is None or due_ns > self.now_ns
        assert due_ns is None or self.parked

    @rule(
        gap=GAPS,
        user=st.sampled_from(("", "ann", "bob")),
        session=st.sampled_from(("", "s", "t")),
        model=st.sampled_from(("a", "b")),
        burst=st.integers(1, 4),
    )
    def arrive(self, gap: int, user: str, session: str, model: str, burst: int) -> None:
        self.pass_time(gap)
        for _ in range(burst):
            request, self.next = self.next, self.next + 1
            self.keys[request] = (user, session, model)
            verdict = self.both("arrive", self.now_ns, request, user, session, model)
            if verdict == PASS:
                self.note_pass(request)
            elif verdict == PARKED:
                assert not self.has_room(request)
                self.parked.append(request)
                assert self.limits.parked(request)
            else:
                assert verdict == FULL
                assert len(self.parked) == self.section.parked_max

    def pass_time(self, gap: int) -> None:
        """Tick by tick, as a driver does."""
        until_ns = self.now_ns + gap
        while (due_ns := self.limits.deadline_ns()) is not None and due_ns <= until_ns:
            self.now_ns = due_ns
            assert self.both("ticked", self.now_ns) == ()
            self.serve()
        self.now_ns = until_ns

    @precondition(lambda self: self.in_flight or self.parked)
    @rule(gap=GAPS, index=st.integers(0, 99), tokens=st.sampled_from((0, 1, 3000, 10**6)))
    def over(self, gap: int, index: int, tokens: int) -> None:
        self.pass_time(gap)
        waiting = self.in_flight + self.parked
        request = waiting[index % len(waiting)]
        (self.in_flight if request in self.in_flight else self.parked).remove(request)
        self.both("served", self.now_ns, self.keys[request][0], tokens)
        self.both("over", self.now_ns, request)
        self.both("over", self.now_ns, request)
        self.serve()

    @rule(shift=st.sampled_from((0, 5 * S)))
    def restore(self, shift: int) -> None:
        """The double is made anew from a state, and goes on the same."""
        state = self.limits.state(self.now_ns)
        self.double = Limits(self.section)
        self.double.load(state, self.now_ns)
        assert self.double.state(self.now_ns) == state
        elsewhere = Limits(self.section)
        elsewhere.load(state, self.now_ns + shift)
        assert elsewhere.state(self.now_ns + shift) == state

    def teardown(self) -> None:
        """Whatever is parked goes on in the end, and in any second no more than may."""
        if not hasattr(self, "limits"):
            return
        for _ in range(200):
            for request in list(self.in_flight):
                self.in_flight.remove(request)
                self.both("over", self.now_ns, request)
            self.serve()
            self.pass_time(S)
        assert not self.parked
        for place in range(3):
            rate, _ = self.most(place)
            for at_ns, _ in self.passed:
                within = Counter(
                    self.keys[request][place]
                    for later_ns, request in self.passed
                    if at_ns <= later_ns < at_ns + S
                )
                del within[""]
                assert not rate or all(count <= rate for count in within.values())


TestLimits = Machine.TestCase
TestLimits.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class FairMachine(RuleBasedStateMachine):
    """One slot for all: who is let in next was served least of late."""

    @initialize()
    def start(self) -> None:
        self.limits = Limits(
            Section(
                user_per_s=0, session_per_s=0, session_in_flight_most=0, global_in_flight_most=1,
                request_tokens=1,
            )
        )  # fmt: skip
        self.now_ns = 0
        self.next = 1
        self.running = 0
        self.parked: dict[int, str] = {}
        self.service = dict.fromkeys(("eve", "ann", "bob"), 0.0)
        self.limits.arrive(0, 0, "eve", "", "m")

    @rule(user=st.sampled_from(("eve", "ann", "bob")))
    def arrive(self, user: str) -> None:
        request, self.next = self.next, self.next + 1
        assert self.limits.arrive(self.now_ns, request, user, "", "m") == PARKED
        self.parked[request] = user

    @precondition(lambda self: self.parked)
    @rule(gap=GAPS, tokens=st.sampled_from((10, 3000, 10**6)), index=st.integers(0, 9))
    def serve(self, gap: int, tokens: int, index: int) -> None:
        self.now_ns += gap
        for user in self.service:
            self.service[user] *= 0.5 ** (gap / (60 * S))
        user = sorted(set(self.parked.values()))[index % len(set(self.parked.values()))]
        self.limits.served(self.now_ns, user, tokens)
        self.service[user] += tokens
        self.limits.over(self.now_ns, self.running)
        (chosen,) = self.limits.released(self.now_ns)
        user = self.parked.pop(chosen)
        self.running = chosen
        for other, name in self.parked.items():
            if name == user:
                assert other > chosen
            else:
                assert self.service[user] <= self.service[name] * 1.05 + 5
        self.service[user] += 1


TestFairness = FairMachine.TestCase
TestFairness.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


SHARES = st.sampled_from((-1, 0, 1, 2, 3, 5))


class SharedMachine(RuleBasedStateMachine):
    """One user whose share of the limit changes: none of its seconds has more than the share that
    was in force at that second's last request."""

    @initialize(
        per_s=st.integers(0, 5), most=st.integers(0, 3), session=st.booleans(),
        order=st.sampled_from(("least_served", "arrival")),
    )  # fmt: skip
    def start(self, per_s: int, most: int, session: bool, order: str) -> None:
        self.section = Section(
            user_per_s=per_s, user_in_flight_most=most, session_in_flight_most=0,
            session_per_s=0, order=order,  # type: ignore[arg-type]
        )  # fmt: skip
        self.whole = (per_s, most)
        self.leases = Leases(200_000)
        self.leases.changed(0, StoreChanged("shared", 2))
        self.limits = Limits(self.section, self.leases)
        self.leases.use = self.limits.use
        self.now_ns = 0
        self.next = 0
        self.share: tuple[int, int, int] | None = None
        """(per s, in flight, until)"""
        self.passed: list[int] = []
        self.in_flight: list[int] = []
        self.parked: list[int] = []

    def room(self) -> bool:
        """By the rules alone."""
        if not any(self.whole):
            return True
        if self.share is None or self.now_ns >= self.share[2]:
            return False
        for place, used in enumerate(
            (sum(self.now_ns - at_ns < S for at_ns in self.passed), len(self.in_flight))
        ):
            whole, given = self.whole[place], self.share[place]
            most = whole if given < 0 else min(whole, given)
            if whole and used >= most:
                return False
        return True

    def serve(self) -> None:
        for request in self.limits.released(self.now_ns):
            assert self.room()
            self.parked.remove(request)
            self.in_flight.append(request)
            self.passed.append(self.now_ns)
        assert not (self.parked and self.room())
        due_ns = self.limits.deadline_ns()
        assert due_ns is None or due_ns > self.now_ns

    def pass_time(self, gap: int) -> None:
        until_ns = self.now_ns + gap
        while (due_ns := self.limits.deadline_ns()) is not None and due_ns <= until_ns:
            self.now_ns = due_ns
            self.serve()
        self.now_ns = until_ns
        self.leases.ticked(self.now_ns)
        if not self.leases.size():  # it was not in use
            self.share = None
        self.serve()

    @rule(gap=GAPS, count=st.integers(1, 4))
    def arrive(self, gap: int, count: int) -> None:
        self.pass_time(gap)
        for _ in range(count):
            request, self.next = self.next, self.next + 1
            may = self.room() and not self.parked
            verdict = self.limits.arrive(self.now_ns, request, "ann", "", "m")
            assert (verdict == PASS) == may
            if may:
                self.in_flight.append(request)
                self.passed.append(self.now_ns)
            else:
                self.parked.append(request)

    @rule(gap=GAPS, per_s=SHARES, most=SHARES, for_ns=st.sampled_from((0, 200 * MS, 5 * S, 60 * S)))
    def lease(self, gap: int, per_s: int, most: int, for_ns: int) -> None:
        self.pass_time(gap)
        if not (self.parked or self.in_flight):
            return
        self.leases.ticked(self.now_ns)  # it is in use, so it is asked for
        self.leases.leased(self.now_ns, QuotaLeased("user", "ann", per_s, most, for_ns))
        self.limits.lent(self.now_ns, "user", "ann")
        self.share = (per_s, most, self.now_ns + for_ns)
        self.serve()

    @precondition(lambda self: self.in_flight)
    @rule(gap=GAPS)
    def over(self, gap: int) -> None:
        self.pass_time(gap)
        self.limits.over(self.now_ns, self.in_flight.pop(0))
        self.serve()

    @rule()
    def restore(self) -> None:
        state, held = self.limits.state(self.now_ns), self.leases.state(self.now_ns)
        leases = Leases(200_000)
        leases.load(held, self.now_ns)
        again = Limits(self.section, leases)
        again.load(state, self.now_ns)
        leases.use = again.use
        assert again.state(self.now_ns) == state
        assert again.deadline_ns() == self.limits.deadline_ns()
        self.limits, self.leases = again, leases


def test_a_share_that_changes() -> None:
    case = SharedMachine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    case("runTest").debug()
