"""Chains under any order of events: budgets, checkpoints, bounds, snapshots."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from policy.chains import Chains
from policy.parameters.chains import Chains as Section
from tests.policy_support import MS, S, arrived

PLAN = {
    "budget_ms": 4000,
    "steps": [{"name": "a", "weight": 3}, {"name": "x", "external": True}, {"name": "b"}],
}
SECTIONS = st.fixed_dictionaries(
    {
        "default": st.just(PLAN), "lines": st.just({"slow": {"budget_ms": 20_000}}),
        "step_limit_ms": st.sampled_from((0, 0, 1500)), "checkpoints": st.booleans(),
        "steps_max": st.sampled_from((2, 64)), "keep_ms": st.sampled_from((0, 5000)),
        "chains_max": st.sampled_from((2, 100)), "open_max": st.sampled_from((3, 100)),
    }
)  # fmt: skip
GAPS = st.sampled_from((0, 0, 1, 300 * MS, S, 4 * S, 30 * S))


class Machine(RuleBasedStateMachine):
    """A driver, and a double that is restored from a snapshot now and then."""

    @initialize(section=SECTIONS)
    def start(self, section: dict[str, Any]) -> None:
        self.section = msgspec.convert(section, Section)
        self.chains = Chains(self.section)
        self.double = Chains(self.section)
        self.now_ns = 0
        self.next = 0
        self.running: dict[int, tuple[tuple[str, str], str, int]] = {}
        """(chain, step, when its budget ends)"""
        self.saving: dict[int, tuple[tuple[str, str], str, int]] = {}
        self.paid: dict[tuple[str, str], set[str]] = {}
        """Steps of the run that is under way which have a checkpoint."""
        self.ends_ns: dict[tuple[str, str], int] = {}
        self.cut: set[tuple[str, str]] = set()
        """Chains whose budget ended while something ran."""

    def both(self, method: str, *arguments: Any) -> Any:
        first = getattr(self.chains, method)(*arguments)
        assert getattr(self.double, method)(*arguments) == first
        assert self.chains.deadline_ns() == self.double.deadline_ns()
        assert self.chains.size() <= self.chains.size_most()
        return first

    def pass_time(self, gap: int) -> None:
        until_ns = self.now_ns + gap
        while (due_ns := self.chains.deadline_ns()) is not None and due_ns <= until_ns:
            self.now_ns = due_ns
            self.both("ticked", self.now_ns)
            for request in self.both("ended", self.now_ns):
                key, _, end_ns = self.running.pop(request)
                assert self.section.step_limit_ms or end_ns == self.now_ns
                self.both("over", self.now_ns, request)
                self.cut.add(key)
            after_ns = self.chains.deadline_ns()
            assert after_ns is None or after_ns > self.now_ns
        self.now_ns = until_ns
        assert all(end_ns > self.now_ns for _, _, end_ns in self.running.values())

    @rule(
        gap=GAPS,
        user=st.sampled_from(("", "ann")),
        chain=st.sampled_from(("c", "d", "e")),
        step=st.sampled_from(("a", "b", "x", "other", "")),
        line=st.sampled_from(("", "slow")),
        resume=st.integers(-3, 30),
    )
    def arrive(self, gap: int, user: str, chain: str, step: str, line: str, resume: int) -> None:
        self.pass_time(gap)
        request, self.next = self.next, self.next + 1
        event = arrived(
            request, user=user, chain=chain, step=step, line=line,
            resume=f"k{resume}" if resume >= 0 else "",
        )  # fmt: skip
        ruling = self.both("arrive", self.now_ns, event)
        if ruling is None:
            assert self.chains.over(self.now_ns, request) == ("", -1, -1)
            return
        key = (user, chain)
        if self.ends_ns.get(key) != ruling.end_ns:  # begun, or resumed
            assert ruling.kind != "late"
            assert ruling.end_ns in (self.now_ns + 4 * S, self.now_ns + 20 * S)
            self.ends_ns[key] = ruling.end_ns
            self.cut.discard(key)
            self.paid[key] = set()
        if key in self.cut:
            assert ruling.kind == "late"
        if ruling.kind == "go":
            assert 0 <= ruling.share_ns <= ruling.end_ns - self.now_ns
            assert not step or step not in self.paid[key]  # never paid for twice
            self.running[request] = (key, step, ruling.end_ns)
            return
        assert ruling.share_ns == 0
        if ruling.kind == "done":
            assert step
            assert ruling.checkpoint
        assert not self.both("answered", request)
        checkpoint, left_ns, _ = self.both("over", self.now_ns, request)
        assert ruling.kind == "late" or checkpoint == ruling.checkpoint
        assert (left_ns == 0) == (ruling.kind == "late")

    @precondition(lambda self: self.running)
    @rule(gap=GAPS, index=st.integers(0, 99), ok=st.booleans())
    def finish(self, gap: int, index: int, ok: bool) -> None:
        self.pass_time(gap)
        if not self.running:
            return
        request = sorted(self.running)[index % len(self.running)]
        key, step, end_ns = self.running.pop(request)
        if ok and self.both("answered", request):
            assert self.section.checkpoints
            self.saving[request] = (key, step, end_ns)
        else:
            self.settle(request, end_ns)

    @precondition(lambda self: self.saving)
    @rule(gap=GAPS, index=st.integers(0, 99), saved=st.booleans())
    def save(self, gap: int, index: int, saved: bool) -> None:
        self.pass_time(gap)
        request = sorted(self.saving)[index % len(self.saving)]
        key, step, end_ns = self.saving.pop(request)
        if saved:
            self.both("saved", request, f"k{request}")
            if self.ends_ns[key] == end_ns:
                self.paid[key].add(step)
        self.settle(request, end_ns)

    def settle(self, request: int, end_ns: int) -> None:
        _, left_ns, step_ns = self.both("over", self.now_ns, request)
        cut = self.section.step_limit_ms and left_ns == 0
        assert cut or left_ns == max(0, end_ns - self.now_ns)
        assert -1 <= step_ns <= left_ns
        assert self.both("over", self.now_ns, request) == ("", -1, -1)

    @rule(shift=st.sampled_from((0, 7 * S)))
    def restore(self, shift: int) -> None:
        state = self.chains.state(self.now_ns)
        self.double = Chains(self.section)
        self.double.load(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state)),
                         self.now_ns)  # fmt: skip
        assert self.double.state(self.now_ns) == state
        elsewhere = Chains(self.section)
        elsewhere.load(state, self.now_ns + shift)
        assert elsewhere.state(self.now_ns + shift) == state


TestChains = Machine.TestCase
TestChains.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
