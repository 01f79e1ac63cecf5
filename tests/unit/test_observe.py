"""Observe mode: the shadow decides beside the live policy, in nobody's way."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.observe import Shadow
from controller.store.log import segments
from policy.audit import replay
from policy.decisions import Refused, Settled
from policy.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    FirstToken,
    PolicySwitched,
    Progress,
    ReplicaDown,
    Ticked,
    Verified,
)
from policy.log import read_segment
from policy.parameters import canonical
from policy.service import Service
from tests.policy_support import MS, QUEUE_ALONE, Checked, S, arrived, parameters, up

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters


class Stage:
    """A shadow with a clock and timers, told by hand what happens."""

    def __init__(
        self, folder: Path, params: Parameters, beside: Service | None = None, now_ns: int = 0
    ) -> None:
        self.now_ns = now_ns
        self.timers: list[tuple[int, int, Callable[[], None]]] = []
        self.troubles: list[str] = []
        self.folder = folder
        self.shadow = Shadow(
            params, folder, lambda: self.now_ns, self._schedule, self.troubles.append, beside
        )

    def _schedule(self, at_ns: int, call: Callable[[], None]) -> None:
        self.timers.append((at_ns, len(self.timers), call))

    def feed(self, event: Event, after_ns: int = 0) -> None:
        self.wait(after_ns)
        self.shadow.fed(self.now_ns, event)

    def wait(self, for_ns: int) -> None:
        end_ns = self.now_ns + for_ns
        while self.timers and min(self.timers)[0] <= end_ns:
            timer = min(self.timers)
            self.timers.remove(timer)
            self.now_ns = max(self.now_ns, timer[0])
            timer[2]()
        self.now_ns = end_ns

    def arrive(self, request: int, **fields: Any) -> None:
        self.feed(arrived(request, **fields))

    def close(self) -> list[bytes]:
        """The log, which audits."""
        self.shadow.close()
        data = [path.read_bytes() for _, path in segments(self.folder)]
        assert replay(data) is None
        return data

    def events(self) -> list[Event]:
        return [record.event for data in self.close() for record in read_segment(data).records]


def outcomes(report: dict[str, int]) -> dict[str, int]:
    names = ("answered", "degraded", "shed", "failed", "cancelled", "unknown")
    return {name: report[name] for name in names if report[name]}


ONE_AT_A_TIME = parameters(**QUEUE_ALONE, name="candidate")


def test_an_answer_is_told_where_the_shadow_would_have_had_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    stage.feed(up(0))
    stage.feed(up(1))
    stage.arrive(0)
    stage.feed(FirstToken(0, 1), 50 * MS)  # the live policy took the other one
    stage.feed(Finished(0, 1, 250, 0, 20), 50 * MS)
    stage.arrive(1)
    stage.feed(FirstToken(1, 0), 50 * MS)
    stage.feed(Finished(1, 0, 250, 0, 20), 50 * MS)
    report = stage.shadow.report()
    assert outcomes(report) == {"answered": 2}
    assert (report["compared"], report["same_replica"]) == (2, 1)
    assert report["queue_ms_p50"] == report["queue_ms_p95"] == 0
    assert report["tier stable"] == report["arrived"] == 2
    assert (report["open"], report["refused_events"], report["off"]) == (0, 0, 0)
    assert all(type(figure) is int for figure in report.values())
    events = stage.events()
    assert FirstToken(0, 0) in events
    assert FirstToken(0, 1) not in events
    assert not stage.troubles


def test_what_came_while_it_was_queued_is_told_once_it_is_sent(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    stage.feed(up(0, max_num_seqs=1))
    stage.arrive(0)
    stage.arrive(1)
    assert stage.shadow.report()["open"] == 2
    stage.feed(FirstToken(1, 0), 10 * MS)
    stage.feed(Finished(1, 0, 250, 0, 20), 10 * MS)
    assert outcomes(stage.shadow.report()) == {}, "the shadow still holds it back"
    stage.feed(FirstToken(0, 0), 10 * MS)
    stage.feed(Finished(0, 0, 250, 0, 20), 10 * MS)
    report = stage.shadow.report()
    assert outcomes(report) == {"answered": 2}
    assert report["queue_ms_p50"] == 0
    assert report["queue_ms_p95"] == 40
    kinds = [type(event) for event in stage.events() if not isinstance(event, Ticked)]
    assert kinds[3:] == [FirstToken, Finished, FirstToken, Finished]


def test_what_the_shadow_shed_is_over_for_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    stage.feed(up(0, models=("m",)))
    stage.arrive(0, model="other")
    report = stage.shadow.report()
    assert outcomes(report) == {"shed": 1}
    assert report["shed no_replica"] == 1
    stage.feed(FirstToken(0, 0))
    stage.feed(Finished(0, 0, 250, 0, 20))
    stage.feed(Cancelled(0))
    assert not [event for event in stage.events() if isinstance(event, (FirstToken, Cancelled))]
    assert stage.shadow.refused == 0


def test_a_failure_counts_where_the_shadow_sent_it_too(tmp_path: Path) -> None:
    params = parameters(**(QUEUE_ALONE | {"retries": {"tries_most": 1}}))
    stage = Stage(tmp_path, params)
    stage.feed(up(0))
    stage.feed(up(1))
    stage.arrive(0)
    stage.feed(Failed(0, 0, "http_5xx"), MS)
    assert stage.shadow.report()["failed http_5xx"] == 1
    stage.arrive(1)
    stage.feed(Failed(1, 1, "http_5xx"), MS)  # on a replica that the shadow did not choose
    stage.arrive(2)
    stage.feed(Failed(2, 1, "rejected"), MS)  # the caller's fault, wherever
    assert outcomes(stage.shadow.report()) == {"failed": 2, "unknown": 1}
    assert stage.shadow.report()["failed http_5xx"] == 1
    assert stage.shadow.report()["failed rejected"] == 1
    stage.close()


def test_a_retry_has_no_answer_and_is_given_up(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    stage.feed(up(0))
    stage.feed(up(1))
    stage.arrive(0)
    stage.feed(Failed(0, 0, "http_5xx"), MS)
    stage.wait(S)
    report = stage.shadow.report()
    assert outcomes(report) == {"unknown": 1}
    assert report["open"] == 0
    assert Cancelled(0) in stage.events()


def test_what_the_live_policy_refused_has_no_answer_here(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    stage.feed(up(0, max_num_seqs=1))
    for request in (0, 1):  # one goes, one waits
        stage.arrive(request)
        stage.shadow.settled(cast("Any", None), Settled(request, "shed", "", "no_replica", 503))
    assert outcomes(stage.shadow.report()) == {"unknown": 2}
    stage.close()


def test_a_caller_that_leaves_leaves_here_too(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    stage.feed(up(0, max_num_seqs=1))
    stage.arrive(0)
    stage.arrive(1)
    stage.feed(Cancelled(1))
    stage.feed(Cancelled(0))
    assert outcomes(stage.shadow.report()) == {"cancelled": 2}
    stage.close()


def test_what_concerns_the_live_policy_alone_is_not_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    for event in (Ticked(), Verified(0, 0, "match"), Progress(0, 5), PolicySwitched("", "")):
        stage.feed(event)
    stage.feed(FirstToken(7, 0))  # open before the shadow began
    stage.feed(Finished(7, 0, 1, 0, 1))
    stage.feed(Cancelled(7))
    assert stage.events() == []


def test_errands_are_answered_neutrally(tmp_path: Path) -> None:
    stage = Stage(tmp_path, parameters(health={"enabled": True}))
    stage.feed(up(0))
    stage.arrive(0)
    stage.wait(20 * S)  # nothing comes back, and yet the replica is not judged by that
    assert not [what for what in stage.shadow.report() if what.startswith("replica")]
    assert any(isinstance(event, Progress) for event in stage.events())


def test_chains_and_doubtful_answers_come_to_their_end(tmp_path: Path) -> None:
    stage = Stage(tmp_path, parameters())
    stage.feed(up(0))
    stage.feed(up(1, domain="elsewhere"))
    stage.arrive(0, chain="c", step="plan", user="u")
    stage.feed(FirstToken(0, 0), MS)
    stage.feed(Finished(0, 0, 250, 0, 20), MS)
    stage.arrive(1, stream=False)
    stage.feed(Finished(1, 0, 250, 0, 20, 5_000, 9_000, 900), MS)
    stage.wait(S)
    report = stage.shadow.report()
    assert report["open"] == 0
    assert report["refused_events"] == 0
    assert report["answered"] >= 1
    stage.close()


def test_a_fault_in_the_shadow_switches_it_off_and_nothing_else(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ONE_AT_A_TIME)
    stage.feed(up(0))

    def broken(now_ns: int, event: Event) -> tuple[Decision, ...]:
        raise ZeroDivisionError("a bug")

    stage.shadow._runner._step = broken
    stage.arrive(0)
    stage.arrive(1)
    stage.feed(FirstToken(0, 0))
    stage.wait(S)
    stage.shadow.tick()
    stage.shadow.flush()
    report = stage.shadow.report()
    assert report["off"] == 1
    assert stage.shadow.off == "ZeroDivisionError: a bug"
    assert len(stage.troubles) == 1
    assert "switched off" in stage.troubles[0]
    stage.close()  # what was logged before still audits


# In mid-flight


def test_beside_a_policy_that_rules_it_knows_what_is_open(tmp_path: Path) -> None:
    live = Service(parameters(**QUEUE_ALONE, name="live"))
    live.step(0, up(0, max_num_seqs=1))
    live.step(MS, arrived(0))
    live.step(2 * MS, arrived(1))
    assert [each.replica for each in live.facts.open.values()] == [0, -1]
    before = live.snapshot()
    stage = Stage(tmp_path, ONE_AT_A_TIME, live, 5 * MS)
    assert live.snapshot() == before
    assert stage.shadow.report()["open"] == 2
    stage.feed(FirstToken(0, 0), MS)
    stage.feed(Finished(0, 0, 250, 0, 20), MS)
    assert outcomes(stage.shadow.report()) == {"answered": 1}
    stage.feed(FirstToken(1, 0), MS)  # sent, here as there, when its turn came
    stage.feed(Finished(1, 0, 250, 0, 20), MS)
    report = stage.shadow.report()
    assert outcomes(report) == {"answered": 2}
    assert (report["open"], report["refused_events"], report["compared"]) == (0, 0, 1)
    events = stage.events()
    assert events[0] == PolicySwitched(canonical(live.parameters), canonical(ONE_AT_A_TIME))
    assert not [event for event in events if isinstance(event, Arrived)]


# Random walks


class Walk(Checked):
    """A live policy in a random world, with a shadow that is told everything; without one, first
    of all, where it is to begin later."""

    def __init__(self, stage: Stage | None, live: Parameters | None = None) -> None:
        self.stage = stage
        self.refused = 0
        self.started: set[int] = set()
        """Whose first token came."""
        super().__init__(live or parameters("fifo"), snapshots=False)

    def feed(self, event: Event, after_ns: int = 0) -> tuple[Decision, ...]:
        stage = self.stage
        if stage is not None:
            stage.wait(self.now_ns + after_ns - stage.now_ns)
            if not isinstance(event, Ticked):
                stage.feed(event)
        decisions = super().feed(event, after_ns)
        for decision in decisions:
            self.refused += isinstance(decision, Refused)
            if isinstance(decision, Settled) and stage is not None:
                stage.shadow.settled(cast("Any", None), decision)
        return decisions


CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "queue alone": QUEUE_ALONE,
    "tight": {
        "tiers": {"turbo_max_tflop": 10, "stable_max_tflop": 60, "fallback_model": "light"},
        "shedding": {"queue_max": 20},
        "retries": {"tries_most": 5},
        "limits": {"user_per_s": 2},
        "confidence": {"enabled": True},
    },
    "fifo": {"discipline": "fifo"},
}
SHAPES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 2},
    {"kv_blocks": 600, "max_model_len": 8192},
    {"models": ("m", "light"), "max_num_seqs": 3},
)


@pytest.mark.parametrize("name", CANDIDATES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_the_log_audits_and_nothing_is_left(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    rng = random.Random(seed)  # noqa: S311
    stage = Stage(tmp_path_factory.mktemp("shadow"), parameters(**CANDIDATES[name]))
    walk = Walk(stage)
    walk.bring_up(up(0, **SHAPES[0]))
    for _ in range(rng.randrange(10, 120)):
        walk.now_ns += rng.choice((0, 0, 1, MS, 40 * MS, S))
        move(walk, rng)
    walk.drain()
    if not walk.replicas:
        walk.bring_up(up(0, **SHAPES[0]))
    shadow = stage.shadow
    for _ in range(600):
        if not shadow.report()["open"]:
            break
        stage.wait(S)
    report = shadow.report()
    assert stage.shadow.off == ""
    assert not stage.troubles
    assert report["open"] == 0, "everything has its outcome"
    assert report["arrived"] == len(walk.arrivals) == sum(outcomes(report).values())
    assert report["refused_events"] <= walk.refused
    stage.close()


@pytest.mark.parametrize("name", sorted(set(CANDIDATES) - {"fifo"}))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_begun_in_mid_flight_it_ends_as_well(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    rng = random.Random(seed)  # noqa: S311
    walk = Walk(None, parameters(name="live", confidence={"enabled": True}))
    walk.bring_up(up(0, **SHAPES[0]))

    def go_on(steps: int) -> None:
        for _ in range(steps):
            walk.now_ns += rng.choice((0, 0, 1, MS, 40 * MS, S))
            move(walk, rng)

    go_on(rng.randrange(5, 80))
    walk.refused = 0
    candidate = parameters(**CANDIDATES[name])
    assert isinstance(walk.policy, Service)
    stage = Stage(tmp_path_factory.mktemp("shadow"), candidate, walk.policy, walk.now_ns)
    walk.stage = stage
    go_on(rng.randrange(5, 80))
    walk.drain()
    if not walk.replicas:
        walk.bring_up(up(0, **SHAPES[0]))
    for _ in range(600):
        if not stage.shadow.report()["open"]:
            break
        stage.wait(S)
    report = stage.shadow.report()
    assert stage.shadow.off == ""
    assert not stage.troubles
    assert report["open"] == 0, "everything has its outcome, what was open at first included"
    assert report["refused_events"] <= walk.refused
    stage.close()


def move(walk: Walk, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.4 or not walk.arrivals:
        for _ in range(rng.choice((1, 1, 3, 8))):
            walk.arrive(**request(rng))
    elif kind < 0.75 and walk.in_flight:
        chosen = rng.choice(sorted(walk.in_flight))
        if kind < 0.55 and chosen not in walk.started:
            walk.started.add(chosen)
            walk.first(chosen)
        else:
            finish(walk, chosen, rng)
    elif kind < 0.88 and walk.in_flight:
        kinds = ("timeout", "http_5xx", "oom", "replica_lost", "rejected", "backpressure")
        walk.fail(rng.choice(sorted(walk.in_flight)), rng.choice(kinds))
    elif kind < 0.92:
        walk.feed(Cancelled(rng.randrange(walk.next_request)))
    else:
        replica = rng.randrange(len(SHAPES))
        if walk.replicas.pop(replica, None) is None:
            walk.bring_up(up(replica, **SHAPES[replica]))
            return
        walk.feed(ReplicaDown(replica, "test"))
        for lost, where in sorted(walk.in_flight.items()):
            if where == replica:
                walk.fail(lost, "replica_lost")


def finish(walk: Walk, request: int, rng: random.Random) -> None:
    event: Arrived = walk.arrivals[request]
    doubts = rng.choice(((), (), (20, 90, 5), (5_000, 9_000, 900)))
    prompt = max(1, event.prompt_bytes // 4)
    walk.feed(Finished(request, walk.in_flight[request], prompt, 0, rng.randrange(500), *doubts))


def request(rng: random.Random) -> dict[str, Any]:
    return {
        "tokens": rng.choice((0, 1, 100, 900, 3000, 20_000)),
        "max_tokens": rng.choice((0, 50, 2000)),
        "sla": rng.choice(("", "P0", "P1", "P2")),
        "model": rng.choice(("m", "m", "m", "other")),
        "user": rng.choice(("", "ann", "bob")),
        "session": rng.choice(("", "s")),
        "chain": rng.choice(("", "", "c")),
        "step": rng.choice(("", "plan")),
        "stream": rng.random() < 0.7,
        "prefix": rng.choice(((), (1,), (1, 2, 3))),
        "prefix_block_bytes": 512,
    }
