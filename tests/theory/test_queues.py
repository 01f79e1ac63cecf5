"""The twin against queueing theory, end to end: arrivals, policy, engine, results.

A step takes a fixed time whatever it holds, so a request's service takes as many steps as it has
output tokens: geometric outputs with a mean of 400 are exponential service (in steps of 1/400 of
the mean), constant ones deterministic service. Nothing lies between client and engine.

Two kinds of checks. *Path by path*: every single start is the one that the queue's recursion
(Lindley; Kiefer and Wolfowitz for several servers) gives from the same arrivals and services, to
the nanosecond. *Theory*: the mean wait is the formula's. A twin run of some 30,000 requests would
be too noisy to see a small error, so the recursion is its control variate: the estimate is the
twin minus the recursion on the same path, plus the recursion over a path of a million. Three
standard errors (by batch means) are allowed, and each check asserts that these are less than 3 %
of the expected value: an error of 5 % in the twin's waits cannot pass. Seeds are fixed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from policy.compose import build_policy
from policy.decisions import Decision, Dispatch, Settled
from policy.events import Arrived, Event, Finished
from policy.files import load_policy
from tests.support import BARE, ScriptedPolicy, bare_fleet, engine_settings, flat_cost, play_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from twin.world import World

    Array = np.ndarray[Any, np.dtype[Any]]

STEP_NS = 1000
MEAN_STEPS = 400
SERVICE_NS = STEP_NS * MEAN_STEPS
BATCHES = 40
LONG = 1_000_000
MOST_ERROR = 0.03


@dataclass(frozen=True, slots=True)
class Queue:
    """Poisson arrivals at ``servers`` equal servers, each under ``load``."""

    load: float
    servers: int = 1
    law: Literal["geometric", "constant"] = "geometric"

    def draw(self, seed: int, count: int) -> tuple[Array, Array]:
        """Arrivals in ns, and services in steps."""
        dice = np.random.default_rng(seed)
        gap_ns = SERVICE_NS / (self.load * self.servers)
        arrival_ns = np.rint(np.cumsum(dice.exponential(gap_ns, count))).astype(np.int64)
        if self.law == "constant":
            return arrival_ns, np.full(count, MEAN_STEPS)
        return arrival_ns, np.asarray(dice.geometric(1 / MEAN_STEPS, count))

    def starts(self, arrival_ns: Array, steps: Array, lag_ns: int = 0) -> Array:
        """By recursion, of what finds a server free 1 ns after its arrival, as in an idle engine.

        Args:
            lag_ns: from the end of a service to the start of the one that waited for it.
        """
        free_ns = [-lag_ns] * self.servers
        starts = []
        for arrival, service in zip(arrival_ns.tolist(), steps.tolist(), strict=True):
            start = max(arrival + 1, free_ns[0] + lag_ns)
            heapq.heapreplace(free_ns, start + service * STEP_NS)
            starts.append(start)
        return np.array(starts)


@dataclass(frozen=True, slots=True)
class Path:
    """What happened to some requests."""

    arrival_ns: Array
    steps: Array
    start_ns: Array

    @property
    def wait_ns(self) -> Array:
        return self.start_ns - self.arrival_ns

    @property
    def sojourn_ns(self) -> Array:
        sojourn_ns: Array = self.wait_ns + self.steps * STEP_NS
        return sojourn_ns


@dataclass(frozen=True, slots=True)
class Run:
    """The twin on a queue."""

    queue: Queue
    world: World
    path: Path
    end_ns: Array


def run(queue: Queue, seed: int, count: int, *, seats: int = 1) -> Run:
    """The servers are the seats of one engine, or else replicas behind the policy's queue."""
    replicas = queue.servers // seats
    arrival_ns, steps = queue.draw(seed, count)
    settings = engine_settings(max_num_seqs=seats, max_model_len=10**6, kv_blocks=10**6)
    world, results = play_rows(
        {"arrival_s": arrival_ns / 1e9, "output_tokens": steps, "max_output_tokens": steps},
        bare_fleet(replicas, settings, flat_cost(STEP_NS)),
        build_policy(load_policy("fifo")) if replicas == 1 else central_queue(replicas),
        settings=replace(BARE, sample_every_ns=1_000_000 if queue.servers == 1 else 0),
    )
    start_ns = np.array([result.scheduled_ns for result in results])
    end_ns = np.array([result.last_ns for result in results])
    return Run(queue, world, Path(arrival_ns, steps, start_ns), end_ns)


def central_queue(replicas: int) -> ScriptedPolicy:
    """One queue in front of all: who is free takes the oldest request."""
    queue: deque[int] = deque()
    free = list(range(replicas))

    def decide(now_ns: int, event: Event) -> list[Decision]:
        decisions: list[Decision] = []
        if isinstance(event, Arrived):
            queue.append(event.request)
        elif isinstance(event, Finished):
            decisions.append(Settled(event.request, "answered"))
            free.append(event.replica)
        while queue and free:
            decisions.append(Dispatch(queue.popleft(), free.pop(), ""))
        return decisions

    return ScriptedPolicy(decide)


def estimate(seen: Run, measure: Callable[[Path], Array]) -> tuple[float, float]:
    """The twin's long-run mean of ``measure``, and its standard error."""
    queue, path = seen.queue, seen.path
    same = Path(path.arrival_ns, path.steps, queue.starts(path.arrival_ns, path.steps))
    apart, apart_error = batch_means(measure(path) - measure(same))
    mean, error = batch_means(measure(long_path(queue)))
    return apart + mean, math.hypot(apart_error, error)


@cache
def long_path(queue: Queue) -> Path:
    arrival_ns, steps = queue.draw(99, LONG)
    return Path(arrival_ns, steps, queue.starts(arrival_ns, steps))


def batch_means(values: Array) -> tuple[float, float]:
    """The mean and its standard error, of values that depend on those before them."""
    size = values.size // BATCHES
    means = values[: size * BATCHES].reshape(BATCHES, size).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1)) / math.sqrt(BATCHES)


def assert_agrees(seen: Run, measure: Callable[[Path], Array], expected: float) -> None:
    mean, error = estimate(seen, measure)
    assert 3 * error < MOST_ERROR * expected, f"too noisy: {mean} +- {error}"
    assert mean == pytest.approx(expected, abs=3 * error), f"{mean / expected - 1:+.2%}"


def wait_ns(path: Path) -> Array:
    return path.wait_ns


def has_waited(path: Path) -> Array:
    return (path.wait_ns > 1).astype(float)


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival must wait in M/M/c."""
    offered = servers * load
    last = offered**servers / math.factorial(servers) / (1 - load)
    return last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)


def erlang_c_wait_ns(servers: int, load: float) -> float:
    return erlang_c(servers, load) * SERVICE_NS / (servers * (1 - load))


@pytest.fixture(scope="module")
def single() -> Run:
    """M/M/1."""
    return run(Queue(0.5), seed=11, count=40_000)


@pytest.fixture(scope="module")
def several() -> Run:
    """M/M/3, in the policy's queue."""
    return run(Queue(0.6, 3), seed=13, count=30_000)


def test_erlang_c_itself() -> None:
    """Against tabulated values, and one server."""
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3)
    assert erlang_c(10, 0.8) == pytest.approx(0.4092, abs=1e-4)


def test_a_twin_that_is_five_percent_off_would_be_noticed(single: Run) -> None:
    path = single.path
    slower = Path(path.arrival_ns, path.steps, path.start_ns + path.wait_ns // 20)
    expected = SERVICE_NS * single.queue.load / (1 - single.queue.load)
    with pytest.raises(AssertionError, match=r"\+[456]\.\d\d%"):
        assert_agrees(replace(single, path=slower), wait_ns, expected)


# One server


def test_every_start_of_a_single_server_is_lindleys(single: Run) -> None:
    path = single.path
    expected = single.queue.starts(path.arrival_ns, path.steps)
    assert path.start_ns.tolist() == expected.tolist()
    assert (single.end_ns - path.start_ns).tolist() == (path.steps * STEP_NS).tolist()


def test_the_mean_wait_of_mm1(single: Run) -> None:
    load = single.queue.load
    assert_agrees(single, wait_ns, SERVICE_NS * load / (1 - load))


def test_the_mean_time_in_system_of_mm1(single: Run) -> None:
    assert_agrees(single, lambda path: path.sojourn_ns, SERVICE_NS / (1 - single.queue.load))


def test_the_share_that_waits_in_mm1(single: Run) -> None:
    assert_agrees(single, has_waited, single.queue.load)


def test_the_tail_of_mm1(single: Run) -> None:
    """Time in system is exponential: 10 % take more than ln 10 times the mean."""
    limit_ns = math.log(10) * SERVICE_NS / (1 - single.queue.load)
    assert_agrees(single, lambda path: (path.sojourn_ns > limit_ns).astype(float), 0.1)


def test_littles_law(single: Run) -> None:
    """L is the rate times the time in system, whatever the laws are.

    Both come from the same path, so only the sampling of L (every ms) is at random: 32,000
    samples, which forget each other within some, and deviate by 1.4 times the mean, give about
    1 %. 4 % are allowed.
    """
    span_ns = int(single.end_ns.max())
    rate = single.end_ns.size / span_ns
    samples = [sample for sample in single.world.samples if sample.at_ns <= span_ns]
    assert len(samples) > 30_000
    seen = np.mean([sample.running + sample.waiting + sample.queued for sample in samples])
    assert seen == pytest.approx(rate * single.path.sojourn_ns.mean(), rel=0.04)
    running = np.mean([sample.running for sample in samples])
    assert running == pytest.approx(rate * single.path.steps.mean() * STEP_NS, rel=0.04)


def test_the_busy_share_is_the_work_over_the_time(single: Run) -> None:
    (share,) = single.world.gpu_busy_share(single.world.now_ns)
    work_ns = int(single.path.steps.sum()) * STEP_NS
    assert share == pytest.approx(work_ns / single.world.now_ns, rel=1e-9)


def test_the_mean_wait_of_md1() -> None:
    """Constant service: half the wait of exponential service (Pollaczek and Khinchine)."""
    seen = run(Queue(0.6, law="constant"), seed=12, count=20_000)
    path = seen.path
    assert path.start_ns.tolist() == seen.queue.starts(path.arrival_ns, path.steps).tolist()
    assert_agrees(seen, wait_ns, SERVICE_NS * 0.6 / (2 * (1 - 0.6)))


# Several servers


def test_every_start_with_several_servers_is_kiefer_and_wolfowitzs(several: Run) -> None:
    """From the policy's queue a request starts a nanosecond after the answer before it."""
    path = several.path
    expected = several.queue.starts(path.arrival_ns, path.steps, lag_ns=1)
    assert path.start_ns.tolist() == expected.tolist()


def test_the_mean_wait_of_mmc_in_the_policys_queue(several: Run) -> None:
    assert_agrees(several, wait_ns, erlang_c_wait_ns(3, several.queue.load))


def test_the_share_that_waits_in_mmc(several: Run) -> None:
    assert_agrees(several, has_waited, erlang_c(3, several.queue.load))


def test_the_mean_wait_of_mmc_in_the_engines_queue() -> None:
    """Four seats of one engine. A request that finds a free seat while others run waits for the
    end of the step, on average half a step: added to the formula for those."""
    seen = run(Queue(0.65, 4), seed=14, count=30_000, seats=4)
    waiting = erlang_c(4, 0.65)
    idle = waiting * (1 - 0.65) * math.factorial(4) / (4 * 0.65) ** 4
    to_boundary_ns = (1 - waiting - idle) * STEP_NS / 2
    assert to_boundary_ns < 0.004 * SERVICE_NS
    assert_agrees(seen, wait_ns, erlang_c_wait_ns(4, 0.65) + to_boundary_ns)
