"""Breakers under any outcomes: legal moves only, few probes, a bound, and a true memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy.breakers import Breakers, BreakersState
from policy.decisions import BreakerMoved
from policy.parameters.breakers import Breakers as Section
from tests.policy_support import MS, S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision

RULES: list[dict[str, Any]] = [
    {
        "name": "errors", "by": ["model", "line"], "kinds": ["oom", "http_5xx"],
        "window_ms": 30_000, "share_permille": 200, "volume_least": 5, "failures_least": 2,
        "open_ms": 1000, "open_most_ms": 5000, "probe_wait_ms": 4000,
    },
    {
        "name": "runs", "by": ["model", "version", "kind"], "kinds": ["http_5xx", "timeout"],
        "consecutive_least": 2, "consecutive_ms": 1, "probes_most": 1, "successes_least": 1,
        "probe_wait_ms": 9000,
    },
    {
        "name": "doubt", "kinds": ["mismatch"], "low_confidence_below_permille": 300,
        "window_ms": 1000, "windows_least": 2, "share_permille": 500, "volume_least": 2,
        "failures_least": 1, "open_ms": 3000,
    },
]  # fmt: skip
LEGAL = {
    ("closed", "open"), ("open", "half_open"), ("half_open", "open"), ("half_open", "closed"),
}  # fmt: skip
KEYS = st.tuples(
    st.sampled_from(("m", "n")), st.sampled_from(("", "v2")), st.sampled_from(("", "a", "b", "c"))
)
OUTCOMES = st.sampled_from(
    ("", "", "", "http_5xx", "http_5xx", "timeout", "oom", "mismatch", "neutral", "backpressure")
)
SCORES = st.sampled_from((-1, -1, 0, 299, 300, 900))
GAPS = st.sampled_from((0, 1, MS, 300 * MS, S, 2 * S, 10 * S, 100 * S))


class BreakersMachine(RuleBasedStateMachine):
    """Drives breakers and a double that is restored from their state, at another clock."""

    @initialize(keys_max=st.sampled_from((2, 3, 100)))
    def start(self, keys_max: int) -> None:
        self.section = msgspec.convert({"rules": RULES, "keys_max": keys_max}, Section)
        self.breakers = Breakers(self.section)
        self.double = Breakers(self.section)
        self.ahead_ns = 0
        """How far the double's clock is ahead."""
        self.now_ns = 0
        self.requests = 0
        self.open: dict[int, tuple[str, str, str]] = {}
        self.phases: dict[str, str] = {}
        self.failures: dict[str, int] = {}

    def told(self, ours: Sequence[Decision], theirs: Sequence[Decision]) -> None:
        assert tuple(ours) == tuple(theirs)
        for moved in ours:
            assert isinstance(moved, BreakerMoved)
            before = self.phases.get(moved.key, "closed")
            assert (before, moved.state) in LEGAL
            if moved.state == "open":
                assert moved.why == ("probe" if before == "half_open" else moved.why)
                assert 1 <= moved.bad <= moved.total
                assert moved.for_ns > 0
            self.phases[moved.key] = moved.state

    @rule(key=KEYS)
    def arrive(self, key: tuple[str, str, str]) -> None:
        self.requests += 1
        request = self.requests
        before = self.breakers.size()
        blocked = self.breakers.gate(self.now_ns, request, *key)
        assert self.double.gate(self.now_ns + self.ahead_ns, request, *key) == blocked
        if blocked is None:
            self.open[request] = key
            assert all(self.phases.get(label) != "open" for label in self.labels(key)), (
                "an open breaker let a request through"
            )
        else:
            assert self.phases[blocked] in ("open", "half_open")
            assert blocked in self.labels(key)
            assert self.breakers.size() <= max(before, self.breakers.size_most())

    def labels(self, key: tuple[str, str, str]) -> list[str]:
        model, version, line = key
        return [
            f"errors model={model} line={line}",
            f"runs model={model} version={version} kind=http_5xx",
            f"runs model={model} version={version} kind=timeout",
            f"doubt model={model}",
        ]

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 99), kind=OUTCOMES, score=SCORES, times=st.integers(1, 4))
    def over(self, index: int, kind: str, score: int, times: int) -> None:
        for _ in range(min(times, len(self.open))):
            request = sorted(self.open)[index % len(self.open)]
            key = self.open.pop(request)
            self.told(
                self.breakers.observe(self.now_ns, request, *key, kind, score),
                self.double.observe(self.now_ns + self.ahead_ns, request, *key, kind, score),
            )
            if kind in ("neutral", "backpressure"):
                assert request not in [probe for probe, _ in self.probes()]

    @rule(kind=OUTCOMES, score=SCORES, key=KEYS, count=st.integers(1, 20), gap=GAPS)
    def burst(self, kind: str, score: int, key: tuple[str, str, str], count: int, gap: int) -> None:
        for _ in range(count):
            self.arrive(key)
            if self.requests in self.open:
                del self.open[self.requests]
                at_ns = self.now_ns
                self.told(
                    self.breakers.observe(at_ns, self.requests, *key, kind, score),
                    self.double.observe(at_ns + self.ahead_ns, self.requests, *key, kind, score),
                )
            self.wait(gap // count)

    @rule(key=KEYS)
    def doubt(self, key: tuple[str, str, str]) -> None:
        self.burst("", 100, key, 8, 4 * S)

    @rule(gap=GAPS)
    def wait(self, gap: int) -> None:
        end_ns = self.now_ns + gap
        while (due_ns := self.breakers.deadline_ns()) is not None and due_ns <= end_ns:
            assert self.double.deadline_ns() == due_ns + self.ahead_ns
            self.now_ns = max(self.now_ns, due_ns)
            self.told(
                self.breakers.ticked(self.now_ns),
                self.double.ticked(self.now_ns + self.ahead_ns),
            )
            later_ns = self.breakers.deadline_ns()
            assert later_ns is None or later_ns > self.now_ns
        self.now_ns = end_ns

    @rule(clock_ns=st.sampled_from((0, 5 * S, 10_000 * S)))
    def restore(self, clock_ns: int) -> None:
        packed = msgspec.msgpack.encode(self.breakers.state(self.now_ns))
        self.double = Breakers(self.section)
        self.ahead_ns = clock_ns - self.now_ns
        self.double.load(msgspec.msgpack.decode(packed, type=BreakersState), clock_ns)
        assert msgspec.msgpack.encode(self.double.state(clock_ns)) == packed

    def probes(self) -> list[tuple[int, int]]:
        state = self.breakers.state(self.now_ns)
        return [probe for breaker in state.breakers for probe in breaker.probes]

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "breakers"):
            return
        assert self.breakers.size() <= self.breakers.size_most()
        for breaker in self.breakers.state(self.now_ns).breakers:
            most = 1 if breaker.key[0] in (1, 2) else 2
            assert len(breaker.probes) <= most
            assert not breaker.probes or breaker.phase == "half_open"
        unclosed = {key for key, phase in self.phases.items() if phase != "closed"}
        assert unclosed == set(self.breakers.open_keys())
        assert (self.breakers.deadline_ns() is None) == (not unclosed)


def test_breakers() -> None:
    case = BreakersMachine.TestCase
    case.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").debug()


def naive_opening(outcomes: list[tuple[int, str]]) -> int | None:
    """Which outcome opens a breaker of a 30 s window at 3 of 10 or 4 in a row over 2 s."""
    seen: list[tuple[int, bool]] = []
    for number, (at_ns, kind) in enumerate(outcomes):
        if kind not in ("", "oom"):
            continue
        part = (at_ns - (seen[0][0] if seen else at_ns)) // S
        seen.append((at_ns, kind == "oom"))
        if not kind:
            continue
        window = [bad for then_ns, bad in seen if (then_ns - seen[0][0]) // S > part - 30]
        if len(window) >= 6 and sum(window) >= 2 and 10 * sum(window) >= 3 * len(window):
            return number
        run: list[int] = []
        for then_ns, bad in seen:
            run = [*run, then_ns] if bad else []
        if len(run) >= 4 and at_ns - run[0] >= 2 * S:
            return number
    return None


@given(
    steps=st.lists(
        st.tuples(st.sampled_from((0, MS, S // 2, S, 9 * S, 29 * S, 31 * S)),
                  st.sampled_from(("", "", "", "oom", "timeout", "neutral"))),
        max_size=60,
    )
)  # fmt: skip
def test_it_opens_when_a_naive_count_says_so(steps: list[tuple[int, str]]) -> None:
    rule = {
        "name": "one", "by": [], "kinds": ["oom"], "window_ms": 30_000, "share_permille": 300,
        "volume_least": 6, "failures_least": 2, "consecutive_least": 4, "consecutive_ms": 2000,
    }  # fmt: skip
    breakers = Breakers(msgspec.convert({"rules": [rule]}, Section))
    now_ns = 0
    outcomes: list[tuple[int, str]] = []
    opening = None
    for gap, kind in steps:
        now_ns += gap
        outcomes.append((now_ns, kind))
        if breakers.observe(now_ns, len(outcomes), "", "", "", kind, -1):
            opening = len(outcomes) - 1
            break
    assert opening == naive_opening(outcomes)
