"""Two policies over one fold of facts, in a hostile world: no invariant breaks."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import pytest

from policy.canary import BROKEN
from policy.compose import build_policy, restore
from policy.decisions import Abort, Alert, Dispatch, Refused, Settled, Verify
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Failed,
    Finished,
    Forecasted,
    GpuFault,
    PolicySwitched,
    Restored,
    Verified,
)
from policy.fleet import Fleet
from policy.parameters import Parameters, canonical, policy_hash
from policy.service import Service
from policy.tiered import Tiered
from tests.dst.light import MS, LightFleet, S, Weather
from tests.policy_support import QUEUE_ALONE, parameters, up

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event

SHAPES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 2},
    {"kv_blocks": 600, "max_model_len": 8192, "domain": "host1"},
    {"models": ("m",), "max_num_seqs": 4, "domain": "host2"},
    {"models": ("m",), "max_num_seqs": 4},
)
LIMITS: dict[str, Any] = {
    "user_in_flight_most": 3, "session_in_flight_most": 1, "model_in_flight_most": 7,
    "global_in_flight_most": 9, "user_per_s": 4,
}  # fmt: skip
SWIFT_BREAKERS = {
    "rules": [
        {
            "name": "errors", "by": ["model", "line"], "kinds": ["timeout", "http_5xx", "empty"],
            "share_permille": 300, "volume_least": 4, "failures_least": 2, "open_ms": 200,
            "window_ms": 2000,
        }
    ]
}  # fmt: skip
POLICIES: tuple[Parameters, ...] = (
    parameters(limits=LIMITS),
    parameters(name="same", limits=LIMITS),
    parameters(
        limits=LIMITS,
        tiers={"fallback_model": "n", "turbo_max_tflop": 10, "stable_max_tflop": 60},
        shedding={"queue_max": 10}, breakers=SWIFT_BREAKERS, health={"failures_most": 1},
        confidence={"budget_permille": 500}, chains={"default": {"budget_ms": 3000}},
    ),
    parameters(
        limits={**LIMITS, "parked_max": 50}, shedding={"enabled": False}, breakers=SWIFT_BREAKERS,
        capacity={"loop_ms": 500, "down_window_ms": 1000}, health={"enabled": False},
        inflight={"sequences_permille": 700, "kv_permille": 500},
    ),
    parameters(limits=LIMITS, chains={"enabled": False}, breakers={"enabled": False}),
)  # fmt: skip


class Watcher:
    """A decision log that holds both policies to what they must keep together."""

    def __init__(self, policy: Service, rng: random.Random) -> None:
        self.policy = policy
        self.rng = rng
        self.arrivals: dict[int, Arrived] = {}
        self.outcomes: dict[int, str] = {}
        self.on: dict[int, int] = {}
        """Where each is in flight."""
        self.counted: set[int] = set()
        """Dispatched and not settled: what limits count at least."""
        self.whose: dict[int, str] = {}
        """Who decided on it since the canary began."""
        self.hashes: tuple[str, ...] = ()
        self.seen: Counter[str] = Counter()
        self.double: Any = None
        self.records = 0
        self.first_sent: dict[str, int] = {}

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        self._follow(now_ns, event, decisions)
        if not any(isinstance(decision, Refused) for decision in decisions):
            self._learn(event)
        for decision in decisions:
            self._check(decision)
            if isinstance(decision, Alert) and decision.key == BROKEN:
                self.seen["broke"] += 1
                self._canary_over()
        self._targets()
        self.records += 1
        if self.rng.randrange(20) == 0:
            snapshot = self.policy.snapshot()
            if self.double is not None:
                assert self.double.snapshot() == snapshot
            self.double = restore(self.policy.parameters, snapshot)
            assert self.double.snapshot() == snapshot

    def _follow(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        if self.double is not None:
            assert tuple(self.double.step(now_ns, event)) == decisions, event
            assert self.double.deadline_ns() == self.policy.deadline_ns(), event

    def _learn(self, event: Event) -> None:
        self.seen[type(event).__name__] += 1
        if isinstance(event, Arrived):
            self.arrivals[event.request] = event
        elif isinstance(event, (Finished, Failed, Verified)):
            if self.on.get(event.request) == event.replica:
                del self.on[event.request]
        elif isinstance(event, (CanaryEnded, Restored)):
            self._canary_over()
            self.on = {} if isinstance(event, Restored) else self.on
        elif isinstance(event, CanaryStarted) and self.policy.canary is not None:
            old, new = (policy_hash(each)[:12] for each in self.both())
            self.hashes = old, new

    def _canary_over(self) -> None:
        self.seen["ended with work open"] += bool(self.whose)
        self.hashes = ()
        self.whose.clear()

    def both(self) -> tuple[Parameters, Parameters]:
        canary = self.policy.canary
        assert canary is not None
        return self.policy.parameters, canary.candidate.parameters

    def _check(self, decision: Decision) -> None:
        if isinstance(decision, (Dispatch, Settled)):
            assert decision.request not in self.outcomes
            assert decision.request in self.arrivals
            if self.hashes:
                assert decision.policy in self.hashes
                assert self.whose.setdefault(decision.request, decision.policy) == decision.policy
                self.seen[f"{type(decision).__name__} {self.hashes.index(decision.policy)}"] += 1
            else:
                assert decision.policy == ""
        if isinstance(decision, Settled):
            self.outcomes[decision.request] = decision.outcome
            self.on.pop(decision.request, None)
            self.counted.discard(decision.request)
            self.whose.pop(decision.request, None)
        elif isinstance(decision, (Dispatch, Verify)):
            assert decision.request not in self.on
            self.on[decision.request] = decision.replica
            self.counted.add(decision.request)
            self._limits(decision.request)
        elif isinstance(decision, Abort) and self.on.get(decision.request) == decision.replica:
            del self.on[decision.request]

    def _limits(self, request: int) -> None:
        event = self.arrivals[request]
        counts: Counter[str] = Counter()
        for other in self.counted:
            asked = self.arrivals[other]
            counts["global"] += 1
            counts["model"] += asked.model == event.model
            counts["user"] += bool(event.user) and asked.user == event.user
            counts["session"] += bool(event.session) and asked.session == event.session
        assert counts["global"] <= LIMITS["global_in_flight_most"]
        assert counts["model"] <= LIMITS["model_in_flight_most"]
        assert counts["user"] <= LIMITS["user_in_flight_most"]
        assert counts["session"] <= 1
        if event.session:
            assert self.first_sent.setdefault(event.session, request) <= request
            self.first_sent[event.session] = request

    def _targets(self) -> None:
        """No replica has more in flight than the larger of both targets allows."""
        counts = Counter(self.on.values())
        for number, replica in self.policy.facts.replicas.items():
            assert replica.in_flight == counts[number]
            assert replica.in_flight <= replica.spec.max_num_seqs

    def end(self) -> None:
        assert set(self.outcomes) == set(self.arrivals)


class World:
    """A light fleet under a policy with, now and then, another beside it."""

    def __init__(self, seed: int, watcher: type[Watcher] = Watcher) -> None:
        self.rng = rng = random.Random(seed)  # noqa: S311
        self.policies = rng.sample(POLICIES, 2)
        policy = build_policy(self.policies[0])
        assert isinstance(policy, Service)
        self.policy = policy
        self.watcher = watcher(policy, rng)
        weather = Weather(shaky_permille=300, logprobs_permille=700)
        self.fleet = LightFleet(policy, self.watcher, rng, weather=weather)
        self.fleet.stand_by(up(4, version="v1", models=("m",), max_num_seqs=4), S)
        for number in range(1 + rng.randrange(3)):
            self.come_up(number)

    def come_up(self, number: int) -> None:
        if number not in self.fleet.servers:
            self.fleet.bring_up(up(number, version="v1", **SHAPES[number]))

    def burst(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 4, 12))):
            self.fleet.offer(
                model=rng.choice(("m", "m", "n")),
                endpoint="chat",
                prompt_bytes=rng.choice((4, 400, 3600, 12_000, 30_000)),
                sla=rng.choice(("", "P0", "P1", "P2")),
                line=rng.choice(("", "search")),
                user=rng.choice(("", "", "ann", "bob", "cy", "di")),
                session=rng.choice(("", "", "", "s1", "s2")),
                deadline_ns=rng.choice((0, 0, 300 * MS, 60 * S)),
                stream=rng.random() < 0.7,
                chain=rng.choice(("", "", "", "c1", "c2")),
                step=rng.choice(("", "plan", "write")),
                prefix=rng.choice(((), (1,), (1, 2, 3))),
                prefix_block_bytes=512,
            )

    def canary(self) -> None:
        """Start one, change its share, or end it."""
        rng, fleet = self.rng, self.fleet
        if self.policy.canary is None:
            old = self.policy.parameters
            new = next(each for each in self.policies if each != old)
            share = rng.choice((1, 50, 300, 500, 900, 1000))
            fleet.feed(CanaryStarted(canonical(old), canonical(new), share, 7))
        elif rng.random() < 0.4:
            old, new = self.watcher.both()
            share = rng.choice((10, 500, 1000))
            fleet.feed(CanaryStarted(canonical(old), canonical(new), share, 7))
        else:
            fleet.feed(CanaryEnded(cast("Any", rng.choice(("old", "new")))))

    def move(self) -> None:
        rng, fleet = self.rng, self.fleet
        fleet.run(fleet.now_ns + rng.choice((0, 1, MS, 40 * MS, 40 * MS, S)))
        kind = rng.random()
        number = rng.randrange(5)
        if kind < 0.5:
            self.burst()
        elif kind < 0.62:
            self.canary()
        elif kind < 0.67:
            fleet.cancel(rng.randrange(max(1, fleet.next_request)))
        elif kind < 0.75:
            self.come_up(number % len(SHAPES))
        elif kind < 0.79:
            fleet.kill(number, down_first=rng.random() < 0.5)
        elif kind < 0.82:
            fleet.hang(number)
        elif kind < 0.86:
            fleet.unhang(number)
        elif kind < 0.90:
            server = fleet.servers.get(number)
            if server is not None:
                server.error = rng.choice(("timeout", "http_5xx", "empty", "backpressure", None))
                server.error_permille = 600
        elif kind < 0.92 and number in fleet.servers:
            fleet.feed(GpuFault(number, "ecc_uncorrectable"))
        elif kind < 0.95:
            fleet.scrape()
            fleet.read_gpus()
        elif kind < 0.97:
            fleet.feed(Forecasted((S, 60 * S), (0, 9000), (9000, 9999), (0, 900), (900, 999)))
        elif kind < 0.98:
            fleet.crash(S)
        else:
            old = self.policy.parameters
            fleet.feed(PolicySwitched(canonical(old), canonical(rng.choice(self.policies))))

    def end(self) -> None:
        for number in list(self.fleet.servers):
            self.fleet.unhang(number)
        self.fleet.run()
        self.watcher.end()


@pytest.mark.parametrize("part", range(4))
def test_walks(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(10 * part, 10 * part + 10):
        world = World(seed)
        try:
            for _ in range(120):
                world.move()
            world.end()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {world.watcher.records}")
            raise
        seen += world.watcher.seen
    assert min(seen["Dispatch 0"], seen["Dispatch 1"], seen["ended with work open"]) > 20, seen


class Recorder(Watcher):
    """Keeps all steps, instead of a second policy beside this one."""

    def __init__(self, policy: Service, rng: random.Random) -> None:
        super().__init__(policy, rng)
        self.steps: list[tuple[int, Event, tuple[Decision, ...]]] = []

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        self.steps.append((now_ns, event, decisions))
        super().append(now_ns, event, decisions)
        self.double = None

    def _check(self, decision: Decision) -> None:
        """In the step in which the candidate raises, what follows is decided by one policy."""
        if self.hashes and isinstance(decision, (Dispatch, Settled)) and not decision.policy:
            assert any(isinstance(each, Alert) for each in self.steps[-1][2])
            self._canary_over()
        super()._check(decision)


class Faults:
    """Makes one method of every candidate raise, now and then."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, late: bool) -> None:
        self.calls = 0
        self.every = {"waits_on": 100, "answered": 2, "_lost": 1}.get(name, 6)
        method = getattr(owner, name)
        faults = self

        def faulty(mechanism: Any, *args: Any, **more: Any) -> Any:
            whose = mechanism.arm if owner is Service else mechanism._leader is not None
            faults.calls += bool(whose)
            due = whose and faults.calls % faults.every == faults.every - 1
            if due and not late:
                raise KeyError(name)
            found = method(mechanism, *args, **more)
            if due:
                raise KeyError(name)
            return found

        patch.setattr(owner, name, faulty)


FAULTY: tuple[tuple[type, str], ...] = (
    (Tiered, "admit"), (Tiered, "_dispatched"), (Tiered, "_queue_or_shed"), (Tiered, "forget"),
    (Tiered, "waits_on"), (Tiered, "send_one"), (Tiered, "_observe"), (Tiered, "deadline_ns"),
    (Tiered, "answered"), (Service, "_closed"), (Service, "_settled"), (Service, "_ticked"),
    (Service, "_lost"), (Service, "_passed"), (Service, "follow_up"), (Fleet, "told"),
    (Fleet, "rotate"), (Fleet, "sent"),
)  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("owner", "name"), FAULTY)
def test_a_candidate_that_raises_is_at_an_end_and_nothing_is_lost(
    owner: type, name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, owner, name, late)
    broke = 0
    for seed in range(2):
        faults.calls = 0
        world = World(seed, Recorder)
        try:
            for _ in range(90):
                world.move()
            world.end()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {world.watcher.records}")
            raise
        broke += world.watcher.seen["broke"]
        assert world.fleet.open == 0
        for host in world.policy.queue.hosts.values():
            assert (host.replica.kv_tokens, host.prefixes.held_tokens) == (0, 0)
        watcher = world.watcher
        assert isinstance(watcher, Recorder)
        faults.calls = 0
        again = build_policy(world.policies[0])
        for now_ns, event, decisions in watcher.steps:
            assert tuple(again.step(now_ns, event)) == decisions
    assert broke


EVEN: dict[str, Any] = {
    **QUEUE_ALONE,
    "inflight": {"reserve_permille": 0, "sequences_permille": 1000},
}  # fmt: skip
"""A replica is full when all its seats are taken, and not before."""
EVEN_POLICIES = (
    parameters(**EVEN),
    parameters(**{**EVEN, "shedding": {"enabled": False}}, name="patient"),
    parameters(**EVEN, name="urgent", tiers={"turbo_max_tflop": 900, "stable_max_tflop": 900}),
)


class Seats:
    """A decision log that looks whether anything waits for a seat that is free."""

    def __init__(self, policy: Service) -> None:
        self.policy = policy
        self.waited = 0

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        policy = self.policy
        queues = [policy.queue]
        if policy.canary is not None:
            queues.append(policy.canary.candidate.queue)
        for queue in queues:
            for job in queue.jobs.values():
                if not job.queued:
                    continue
                self.waited += 1
                opened = policy.facts.open[job.request]
                for number in queue.waits_for(opened, job):
                    replica = policy.facts.replicas[number]
                    full = replica.in_flight >= replica.spec.max_num_seqs
                    assert full or number in opened.tried, (event, job)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_waits_while_there_is_room(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    policies = rng.sample(EVEN_POLICIES, 2)
    policy = build_policy(policies[0])
    assert isinstance(policy, Service)
    seats = Seats(policy)
    fleet = LightFleet(policy, seats, rng)
    for number in range(2):
        fleet.bring_up(up(number, max_num_seqs=3, max_num_batched_tokens=1 << 20))
    for _ in range(250):
        fleet.run(fleet.now_ns + rng.choice((0, 0, MS, 40 * MS, 200 * MS)))
        kind = rng.random()
        if kind < 0.7:
            for _ in range(rng.choice((1, 3, 8))):
                fleet.offer(
                    model="m", endpoint="chat", prompt_bytes=400, stream=rng.random() < 0.5,
                    sla=rng.choice(("P0", "P1", "P2")), user=rng.choice(("ann", "bob", "cy", "")),
                )  # fmt: skip
        elif kind < 0.8:
            fleet.cancel(rng.randrange(max(1, fleet.next_request)))
        elif kind < 0.85:
            server = fleet.servers[rng.randrange(2)]
            server.error, server.error_permille = "http_5xx", rng.choice((0, 300))
        elif policy.canary is None:
            old = policy.parameters
            new = next(each for each in policies if each != old)
            share = rng.choice((50, 500, 1000))
            fleet.feed(CanaryStarted(canonical(old), canonical(new), share, 0))
        elif kind > 0.96:
            fleet.feed(CanaryEnded(cast("Any", rng.choice(("old", "new")))))
    fleet.run()
    assert fleet.open == 0
    assert seats.waited > 500
