"""What the policy's tests share: replicas, a driver that checks the contract, a bench replica."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from policy.compose import build_policy, restore
from policy.decisions import (
    Abort,
    Dispatch,
    LookUp,
    Refused,
    SaveCheckpoint,
    Settled,
    Verify,
)
from policy.events import (
    Arrived,
    Cancelled,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    LookedUp,
    ReplicaUp,
    Restored,
    Ticked,
    Verified,
)
from policy.parameters import Parameters

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event

MS = 1_000_000
S = 1_000_000_000
TICKS_PER_NS = 1024
# An 8B model on one H100, roughly: 5 ms a step, 22 us a prompt token.
COST = (
    5 * MS * TICKS_PER_NS, 6 * MS * TICKS_PER_NS, 20_000 * TICKS_PER_NS, 25 * TICKS_PER_NS,
    22_000 * TICKS_PER_NS, 300,
)  # fmt: skip


def up(replica: int = 0, **changes: Any) -> ReplicaUp:
    """A replica with an 8B model."""
    fields: dict[str, Any] = {
        "replica": replica, "name": f"r{replica}", "models": (), "pooling": False,
        "kv_blocks": 20_000, "block_tokens": 16, "max_num_seqs": 256,
        "max_num_batched_tokens": 8192, "max_model_len": 32_768, "cost": COST,
        "active_params": 8_000_000_000, "attention_flops_per_token_pair": 589_824,
    }  # fmt: skip
    return ReplicaUp(**(fields | changes))


def arrived(request: int, tokens: int = 250, **changes: Any) -> Arrived:
    """A request with a prompt of about ``tokens`` tokens, by the first guess of four bytes each."""
    fields: dict[str, Any] = {
        "request": request, "model": "m", "endpoint": "chat", "prompt_bytes": 4 * tokens,
    }  # fmt: skip
    return Arrived(**(fields | changes))


QUEUE_ALONE: dict[str, Any] = {
    name: {"enabled": False}
    for name in (
        "limits", "breakers", "confidence", "chains", "health", "capacity", "rollout", "drift",
        "alerts",
    )
} | {"classes": {"p0_answer_ms": 0, "p1_answer_ms": 0, "p2_answer_ms": 0}}  # fmt: skip
"""Sections of a policy file that leave the tiered queue to itself."""


def parameters(discipline: str = "tiered", **sections: object) -> Parameters:
    """Defaults with some keys changed: ``parameters(tiers={"lend_wait_ms": 0})``."""
    return msgspec.convert({"schema": 1, "discipline": discipline, **sections}, Parameters)


class Checked:
    """A policy under a driver that holds it to the contract at every step.

    Knows of every request where it is, and fails at once on a decision that must not be. A second
    policy, after ``restore`` one that was restored from a snapshot of the first, is fed the same.
    Without ``snapshots`` it is not checked that illegal events change nothing, which takes long.
    """

    def __init__(self, params: Parameters, snapshots: bool = True) -> None:
        self.params = params
        self.snapshots = snapshots
        self.policy = build_policy(params)
        self.double = build_policy(params)
        self.now_ns = 0
        self.next_request = 0
        self.arrivals: dict[int, Arrived] = {}
        self.waiting: set[int] = set()
        self.in_flight: dict[int, int] = {}
        self.outcomes: dict[int, Settled] = {}
        self.replicas: dict[int, ReplicaUp] = {}
        self.dispatches: list[Dispatch] = []
        self.asked: dict[int, Verify | LookUp | SaveCheckpoint] = {}
        """What the policy waits for an answer to."""

    def feed(self, event: Event, after_ns: int = 0) -> tuple[Decision, ...]:
        self.now_ns += after_ns
        before = self.policy.snapshot() if self.snapshots else b""
        decisions = tuple(self.policy.step(self.now_ns, event))
        assert decisions == tuple(self.double.step(self.now_ns, event))
        assert self.policy.deadline_ns() == self.double.deadline_ns()
        if not any(isinstance(decision, Refused) for decision in decisions):
            self._learn(event)
        for decision in decisions:
            assert_integers(decision)
            if isinstance(decision, Refused):
                assert decisions == (decision,)
                after = self.policy.snapshot() if self.snapshots else b""
                assert after == before, "an illegal event changed something"
            else:
                self._check(decision)
        return decisions

    def restore(self) -> None:
        """From now on the double is the policy's snapshot brought to life again."""
        snapshot = self.policy.snapshot()
        assert_integers(msgspec.msgpack.decode(snapshot))
        self.double = restore(self.params, snapshot)
        assert self.double.snapshot() == snapshot

    def arrive(self, after_ns: int = 0, **fields: Any) -> int:
        request = self.next_request
        self.next_request += 1
        self.feed(arrived(request, **fields), after_ns)
        return request

    def first(self, request: int, after_ns: int = 0) -> None:
        self.feed(FirstToken(request, self.in_flight[request]), after_ns)

    def finish(self, request: int, output_tokens: int = 100, after_ns: int = 0) -> None:
        event = self.arrivals[request]
        prompt = max(1, event.prompt_bytes // 4)
        replica = self.in_flight[request]
        self.feed(Finished(request, replica, prompt, 0, output_tokens), after_ns)

    def fail(self, request: int, kind: Any, after_ns: int = 0) -> tuple[Decision, ...]:
        return self.feed(Failed(request, self.in_flight[request], kind), after_ns)

    def reply(self, request: int) -> None:
        """Answer what the policy asked for about the request."""
        asked = self.asked.pop(request)
        if isinstance(asked, LookUp):
            self.feed(LookedUp(request, found=False))
        elif isinstance(asked, Verify):
            self.feed(Verified(request, asked.replica, "match", 100))
        else:
            self.feed(CheckpointSaved(request, f"c{request}"))

    def tick(self) -> None:
        """Let the next deadline pass."""
        due_ns = self.policy.deadline_ns()
        if due_ns is not None:
            self.now_ns = max(self.now_ns, due_ns)
            self.feed(Ticked())
            again_ns = self.policy.deadline_ns()
            assert again_ns is None or again_ns > self.now_ns

    def drain(self) -> None:
        """Finish all work; afterwards every request must have its outcome."""
        rounds = 0
        while self.waiting or self.in_flight:
            rounds += 1
            assert rounds < 10_000, f"stuck: {self.waiting} wait, {self.in_flight} are in flight"
            if self.asked:
                self.reply(min(self.asked))
            elif self.in_flight:
                self.finish(min(self.in_flight), after_ns=MS)
            else:
                assert not self.replicas or self.policy.deadline_ns() is not None
                self.tick()
        assert set(self.outcomes) == set(self.arrivals)

    def _learn(self, event: Event) -> None:
        if isinstance(event, Arrived) and event.request not in self.arrivals:
            self.arrivals[event.request] = event
            self.waiting.add(event.request)
        elif isinstance(event, (Failed, Finished)):
            if self.in_flight.get(event.request) == event.replica:
                del self.in_flight[event.request]
                self.waiting.add(event.request)
        elif isinstance(event, Restored) and event.down_ns >= 0:
            self.waiting.update(self.in_flight)
            self.in_flight.clear()
        elif isinstance(event, Cancelled) and event.request in self.in_flight:
            del self.in_flight[event.request]
            self.waiting.add(event.request)

    def _check(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            self.dispatches.append(decision)
            assert decision.request in self.waiting
            self.waiting.remove(decision.request)
            self.in_flight[decision.request] = decision.replica
            spec = self.replicas[decision.replica]
            event = self.arrivals[decision.request]
            assert not spec.models or (decision.model or event.model) in spec.models
            assert event.endpoint == "embeddings" or not spec.pooling
        elif isinstance(decision, Settled):
            assert decision.request not in self.outcomes
            assert decision.request in self.waiting
            self.waiting.remove(decision.request)
            self.asked.pop(decision.request, None)
            self.outcomes[decision.request] = decision
        elif isinstance(decision, (Verify, LookUp, SaveCheckpoint)):
            assert decision.request in self.waiting
            self.asked[decision.request] = decision
        elif isinstance(decision, Abort):
            assert decision.request in self.arrivals
            if self.in_flight.get(decision.request) == decision.replica:
                del self.in_flight[decision.request]
                self.waiting.add(decision.request)

    def bring_up(self, spec: ReplicaUp) -> None:
        self.replicas[spec.replica] = spec
        self.feed(spec)


def assert_integers(value: object) -> None:
    """No float anywhere inside: it could differ between machines."""
    assert not isinstance(value, float)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    if isinstance(value, dict):
        for key, item in value.items():
            assert_integers(key)
            assert_integers(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            assert_integers(item)


class Bench:
    """A crude server per replica, so that queues can be watched: prompts are computed one after
    another, answers take their time side by side."""

    def __init__(self, params: Parameters, replicas: int = 1, **spec: Any) -> None:
        self.checked = Checked(params, snapshots=False)
        self.free_ns = [0] * replicas
        self.due: list[tuple[int, int, Event]] = []
        self.started_ns: dict[int, int] = {}
        self._seen = 0
        for replica in range(replicas):
            self.checked.bring_up(up(replica, **spec))

    def run(self, arrivals: list[tuple[int, dict[str, Any]]], answer_ns: int) -> None:
        """Feed ``(at_ns, fields)`` in order and let everything end."""
        todo = deque(arrivals)
        checked = self.checked
        while todo or self.due or checked.policy.deadline_ns() is not None:
            deadline_ns = checked.policy.deadline_ns()
            times = [todo[0][0]] if todo else []
            times += [self.due[0][0]] if self.due else []
            times += [deadline_ns] if deadline_ns is not None else []
            now_ns = min(times)
            checked.now_ns = max(checked.now_ns, now_ns)
            if todo and todo[0][0] == now_ns:
                checked.arrive(**todo.popleft()[1])
            elif self.due and self.due[0][0] == now_ns:
                _, _, event = self.due.pop(0)
                checked.feed(event)
            else:
                checked.feed(Ticked())
            self._serve(answer_ns)

    def _serve(self, answer_ns: int) -> None:
        checked = self.checked
        for dispatch in checked.dispatches[self._seen :]:
            request, replica = dispatch.request, dispatch.replica
            self.started_ns[request] = checked.now_ns
            tokens = checked.arrivals[request].prompt_bytes // 4
            begin_ns = max(self.free_ns[replica], checked.now_ns)
            first_ns = begin_ns + tokens * 22_000 + 5 * MS
            self.free_ns[replica] = first_ns
            self.due.append((first_ns, request, FirstToken(request, replica)))
            done = Finished(request, replica, max(1, tokens), 0, 100)
            self.due.append((first_ns + answer_ns, request, done))
        self._seen = len(checked.dispatches)
        self.due.sort(key=lambda item: item[:2])
