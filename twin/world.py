"""The simulated world: SimPy carries the events, engines do the work, the policy decides.

A request's way, all in nanoseconds of simulated time::

    arrival -> [policy's queue] -> dispatch -> gateway, network, request_in -> engine
    engine -> token_out, network -> first token
    engine -> request_out, token_out per token, network -> finished

What happens at the same instant has a fixed order: arrivals, deliveries (in the order in which
they became certain), then engines by number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import simpy

from policy.decisions import Abort, Dispatch, Refused, Settled
from policy.events import Arrived, Failed, Finished, FirstToken, Scraped
from policy.runner import Runner
from twin.engine import Engine, Sequence, UnfitError
from twin.engine.steptime import TICK_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.runner import Log
    from twin.arrivals import Chunk
    from twin.fleet import ReplicaSpec

ARRIVALS, DELIVERIES, ENGINES = 0, 1, 10
"""SimPy priorities: what comes first at the same instant."""


class WorldError(RuntimeError):
    """The simulation came to a state that must not be."""


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What lies between the client and the engines, in nanoseconds."""

    gateway_ns: int = 1_000_000
    """Our own proxy's work on a request: measured on plain Python proxies, .9 to 1.8 ms."""
    network_ns: int = 200_000
    """One way between controller and replica, within a cluster."""
    scrape_every_ns: int = 15_000_000_000
    """How often the policy is given a replica's metrics, as Prometheus is often set; 0: never."""
    scrape_age_ns: int = 1_000_000_000
    """How old they are by then."""
    sample_every_ns: int = 1_000_000_000
    """How often queues and KV usage are noted for the report, at first; 0: never. Twice as rarely
    each time ``samples_max`` is reached: then of two neighbours the busier one is kept."""
    samples_max: int = 2000


class Result(NamedTuple):
    """What became of one request. Times in ns since the start; -1: it never came to that."""

    outcome: str
    why: str
    tier: str
    http_code: int
    replica: int
    tries: int
    arrival_ns: int
    settled_ns: int
    dispatched_ns: int
    scheduled_ns: int
    first_ns: int
    """The engine had computed its first token."""
    last_ns: int
    """The engine had computed its last token."""
    first_out_ns: int
    """The first token was back at the controller."""
    cached_tokens: int
    output_tokens: int
    """Made by the engine; 0 for an embedding, and where it came to nothing."""
    preemptions: int


class Sample(NamedTuple):
    """The fleet at an instant."""

    at_ns: int
    queued: int
    """Requests in the policy's queue."""
    running: int
    waiting: int
    """Requests in the engines' own queues."""
    kv_used_permille: tuple[int, ...]
    """By replica."""
    arrived: int = 0
    """Requests so far."""


Callbacks = list[Callable[[Any], None]]


class _Event(simpy.Event):
    """A bare event that always succeeds and carries a value: half the price of a Timeout.

    SimPy takes the list of callbacks off an event without changing it, so one list serves many.
    """

    _ok = True
    _defused = False

    def __init__(self, callbacks: Callbacks, value: object = None) -> None:
        self.callbacks = callbacks
        self._value = value


class _Call:
    """A request between arrival and settlement."""

    __slots__ = (
        "arrival_ns", "chunk", "dispatched_ns", "first_ns", "first_out_ns", "last_ns", "replica",
        "row", "seq", "tries",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, row: int, arrival_ns: int) -> None:
        self.chunk = chunk
        self.row = row
        self.arrival_ns = arrival_ns
        self.dispatched_ns = -1
        self.first_ns = -1
        self.first_out_ns = -1
        self.last_ns = -1
        self.replica = -1
        self.tries = 0
        self.seq: Sequence | None = None


class _Replica:
    """An engine in the world: wakes it, and carries its answers back."""

    __slots__ = (
        "_alarm", "_callbacks", "_env", "_on_finished", "_on_first", "_priority", "_world",
        "engine", "entry_ns", "exit_ns", "id", "spec", "token_out_ns",
    )  # fmt: skip

    def __init__(self, world: World, spec: ReplicaSpec, skip: bool) -> None:
        self._world = world
        self._env = world.env
        self._priority = ENGINES + spec.id
        self._alarm: _Event | None = None
        self._callbacks: Callbacks = [self._wake]
        self._on_first: Callbacks = [world.first_token]
        self._on_finished: Callbacks = [world.finished]
        self.id = spec.id
        self.spec = spec
        network_ns = world.settings.network_ns
        overheads = spec.profile.overheads
        self.entry_ns = (
            world.settings.gateway_ns + network_ns + round(overheads.request_in_ns.value)
        )
        self.exit_ns = network_ns + round(overheads.request_out_ns.value)
        self.token_out_ns = round(overheads.token_out_ns.value)
        self.engine = Engine(spec.settings, spec.cost, self._first, self._finish, skip)

    def submit(self, seq: Sequence, now_ns: int) -> None:
        self.engine.submit(seq, now_ns + self.entry_ns)
        self._rearm(now_ns)

    def abort(self, request: int, now_ns: int) -> None:
        self.engine.abort(request, now_ns + self._world.settings.network_ns)
        self._rearm(now_ns)

    def _rearm(self, now_ns: int) -> None:
        """Set the alarm to when the engine wants to wake; an old alarm is ignored when it rings."""
        wake_ns = self.engine.next_wake_ns
        alarm = self._alarm
        if alarm is not None and alarm._value == wake_ns:
            return
        if wake_ns is None:
            self._alarm = None
            return
        self._alarm = alarm = _Event(self._callbacks, wake_ns)
        self._env.schedule(alarm, self._priority, wake_ns - now_ns)

    def _wake(self, event: simpy.Event) -> None:
        if event is not self._alarm:
            return
        now_ns = event._value
        engine = self.engine
        engine.wake(now_ns)
        wake_ns = engine.next_wake_ns
        if wake_ns is None:
            self._alarm = None
            return
        event._value = wake_ns  # the event has just left SimPy's queue and can go in again
        event.callbacks = self._callbacks
        self._env.schedule(event, self._priority, wake_ns - now_ns)

    def _first(self, seq: Sequence, at_ns: int) -> None:
        call: _Call | None = seq.data
        if call is None or call.seq is not seq:  # settled, or sent elsewhere: nobody listens
            return
        call.first_ns = at_ns
        delay_ns = at_ns - self.engine.now_ns + self.token_out_ns + self._world.settings.network_ns
        self._env.schedule(_Event(self._on_first, seq), DELIVERIES, delay_ns)

    def _finish(self, seq: Sequence) -> None:
        call: _Call | None = seq.data
        if call is None or call.seq is not seq:
            return
        call.last_ns = self.engine.now_ns
        delay_ns = self.exit_ns
        if not seq.pooling:
            delay_ns += self.token_out_ns * seq.outputs
        self._env.schedule(_Event(self._on_finished, seq), DELIVERIES, delay_ns)


def _busyness(sample: Sample) -> int:
    return sample.queued + sample.waiting


class World:
    """One run: a fleet, a policy and a stream of requests.

    Args:
        fleet: the replicas, all up from the start.
        policy: any ``policy.contract.Policy``.
        log: the decision log.
        settled: called with each chunk, in order, once all of its requests are settled.
        skip: let the engines skip what changes nothing.
    """

    __slots__ = (
        "_calls", "_chunks", "_more", "_next_id", "_on_arrival", "_sample_every_ns", "_settled",
        "_source", "env", "queued", "refused", "replicas", "runner", "samples", "settings",
    )  # fmt: skip

    def __init__(
        self,
        fleet: list[ReplicaSpec],
        policy: Policy,
        log: Log,
        settled: Callable[[Chunk], None],
        settings: WorldSettings | None = None,
        skip: bool = True,
    ) -> None:
        self.settings = settings or WorldSettings()
        env: Any = simpy.Environment()  # its time may be a float: here it never is
        self.env = env
        self.samples: list[Sample] = []
        self._sample_every_ns = self.settings.sample_every_ns
        self.queued = 0
        """Arrived, and neither in flight nor settled."""
        self.refused = 0
        """Events that the policy found illegal: always 0 unless there is a fault in the code."""
        self._settled = settled
        self._chunks: list[Chunk] = []
        self._calls: dict[int, _Call] = {}
        self._next_id = 0
        self._source: Iterator[Chunk] = iter(())
        self._on_arrival: Callbacks = [self._arrive]
        self._more = True
        clock = partial(attrgetter("_now"), env)  # env.now is a property: a call more, each time
        self.runner = Runner(policy, clock, self._apply, self._arm, log)
        self.replicas = [_Replica(self, spec, skip) for spec in fleet]

    @property
    def now_ns(self) -> int:
        return cast("int", self.env._now)

    def run(self, chunks: Iterator[Chunk]) -> None:
        """Play all of ``chunks`` and let everything come to its end.

        Raises:
            WorldError: requests were left without an outcome.
        """
        self._source = chunks
        for replica in self.replicas:
            self.runner.feed(replica.spec.up())
        self._next_chunk()
        if self.settings.sample_every_ns:
            self._sample(None)
        if self.settings.scrape_every_ns:
            self._after(self.settings.scrape_every_ns, self._scrape)
        self.env.run()
        if self._calls:
            left = ", ".join(str(request) for request in list(self._calls)[:5])
            raise WorldError(
                f"{len(self._calls)} requests were never settled (first ids: {left}): "
                "the policy lost them"
            )

    def gpu_busy_share(self, span_ns: int) -> list[float]:
        """By replica: for what share of ``span_ns`` a step was running."""
        ticks = span_ns << TICK_BITS
        return [replica.engine.busy_ticks / ticks if ticks else 0.0 for replica in self.replicas]

    # ---- arrivals ----

    def _next_chunk(self) -> None:
        chunk = next(self._source, None)
        if chunk is None:
            self._more = False
            return
        self._chunks.append(chunk)
        at_ns = chunk.arrival_ns[0]
        event = _Event(self._on_arrival, [chunk, 0])
        self.env.schedule(event, ARRIVALS, max(0, at_ns - self.now_ns))

    def _arrive(self, event: simpy.Event) -> None:
        """All arrivals of this instant; then wait for the next."""
        place = event._value
        chunk, row = place
        now_ns = self.env._now
        times = chunk.arrival_ns
        rows = len(times)
        while row < rows and times[row] <= now_ns:
            self._arrived(chunk, row, now_ns)
            row += 1
        if row == rows:
            self._next_chunk()
            return
        place[1] = row
        event.callbacks = self._on_arrival
        self.env.schedule(event, ARRIVALS, times[row] - now_ns)

    def _arrived(self, chunk: Chunk, row: int, now_ns: int) -> None:
        request = self._next_id
        self._next_id = request + 1
        self._calls[request] = _Call(chunk, row, now_ns)
        self.queued += 1
        prefix = chunk.prefix[row]
        self.runner.feed(
            Arrived(
                request, chunk.model[row], chunk.endpoint[row], chunk.prompt_bytes[row],
                chunk.max_tokens[row], chunk.sla[row], chunk.line[row], chunk.user[row],
                chunk.session[row], chunk.deadline_ns[row], 1, True, prefix,
                4 * chunk.prefix_block_tokens[row] if prefix else 0,
            )
        )  # fmt: skip

    # ---- the policy's driver ----

    def _arm(self, at_ns: int) -> None:
        self._after(max(0, at_ns - self.now_ns), self._tick)

    def _tick(self, event: simpy.Event) -> None:
        self.runner.tick()

    def _after(self, delay_ns: int, callback: Callable[[simpy.Event], None]) -> None:
        self.env.schedule(_Event([callback]), DELIVERIES, delay_ns)

    def _apply(self, decision: Decision) -> None:
        kind = type(decision)
        if kind is Dispatch:
            self._dispatch(decision)  # type: ignore[arg-type]
        elif kind is Settled:
            self._settle(decision)  # type: ignore[arg-type]
        elif kind is Abort:
            self.replicas[decision.replica].abort(decision.request, self.now_ns)  # type: ignore[union-attr]
        elif kind is Refused:
            self.refused += 1

    def _dispatch(self, decision: Dispatch) -> None:
        request = decision.request
        call = self._open(request)
        chunk = call.chunk
        row = call.row
        now_ns = self.env._now
        if call.dispatched_ns < 0:
            self.queued -= 1
        call.dispatched_ns = now_ns
        call.first_ns = call.first_out_ns = -1
        call.replica = decision.replica
        call.tries += 1
        call.seq = seq = Sequence(
            request, chunk.prompt_tokens[row], chunk.output_tokens[row], chunk.max_tokens[row],
            decision.priority, chunk.endpoint[row] == "embeddings", chunk.prefix[row],
            chunk.prefix_block_tokens[row], call,
        )  # fmt: skip
        try:
            self.replicas[decision.replica].submit(seq, now_ns)
        except UnfitError:
            self._after_reject(request, decision.replica)

    def _open(self, request: int) -> _Call:
        call = self._calls.get(request)
        if call is None:
            raise WorldError(f"the policy decided on request {request}, which is not open")
        return call

    def _after_reject(self, request: int, replica: int) -> None:
        """The server answers 400 after it has looked at the request."""
        failed = Failed(request, replica, "rejected")
        delay_ns = self.replicas[replica].entry_ns + self.settings.network_ns
        self._after(delay_ns, lambda event: self.runner.feed(failed))

    def first_token(self, event: simpy.Event) -> None:
        """A first token is back at the controller."""
        seq: Sequence = event._value
        call = self._calls.get(seq.id)
        if call is not None and call.seq is seq:
            call.first_out_ns = self.env._now
            self.runner.feed(FirstToken(seq.id, call.replica))

    def finished(self, event: simpy.Event) -> None:
        """An answer is complete at the controller."""
        seq: Sequence = event._value
        call = self._calls.get(seq.id)
        if call is not None and call.seq is seq:
            output_tokens = 0 if seq.pooling else seq.outputs
            self.runner.feed(
                Finished(seq.id, call.replica, seq.prompt_tokens, seq.cached_tokens, output_tokens)
            )

    def _settle(self, decision: Settled) -> None:
        call = self._open(decision.request)
        del self._calls[decision.request]
        seq = call.seq
        if seq is None:
            self.queued -= 1
            scheduled_ns = -1
            cached_tokens = output_tokens = preemptions = 0
        else:
            scheduled_ns = seq.scheduled_ns
            cached_tokens = seq.cached_tokens
            done = call.last_ns >= 0 and not seq.pooling
            output_tokens = seq.outputs if done else 0
            preemptions = seq.preemptions
            seq.data = None  # each held the other: free both now, not at the collector's leisure
        chunk = call.chunk
        chunk.results[call.row] = Result(
            decision.outcome, decision.why, decision.tier, decision.http_code, call.replica,
            call.tries, call.arrival_ns, self.env._now, call.dispatched_ns, scheduled_ns,
            call.first_ns, call.last_ns, call.first_out_ns, cached_tokens, output_tokens,
            preemptions,
        )  # fmt: skip
        chunk.open -= 1
        if not chunk.open:
            chunks = self._chunks
            while chunks and not chunks[0].open:
                self._settled(chunks.pop(0))

    # ---- watching ----

    @property
    def _alive(self) -> bool:
        return self._more or bool(self._calls)

    def _sample(self, event: simpy.Event | None) -> None:
        now_ns = self.now_ns
        running = waiting = 0
        used = []
        for replica in self.replicas:
            load = replica.engine.observe(now_ns)
            running += load.running
            waiting += load.waiting
            used.append(1000 * load.kv_blocks_used // (replica.spec.settings.kv_blocks - 1))
        samples = self.samples
        samples.append(Sample(now_ns, self.queued, running, waiting, tuple(used), self._next_id))
        if len(samples) >= self.settings.samples_max:
            pairs = (samples[at : at + 2] for at in range(0, len(samples), 2))
            samples[:] = [max(pair, key=_busyness) for pair in pairs]
            self._sample_every_ns *= 2
        if self._alive:
            self._after(self._sample_every_ns, self._sample)

    def _scrape(self, event: simpy.Event) -> None:
        now_ns = self.now_ns
        age_ns = self.settings.scrape_age_ns
        for replica in self.replicas:
            load = replica.engine.observe(now_ns)
            used = 1000 * load.kv_blocks_used // (replica.spec.settings.kv_blocks - 1)
            scraped = Scraped(
                replica.id, load.running, load.waiting, used, replica.engine.preemptions, age_ns
            )
            self._after(age_ns, lambda event, scraped=scraped: self.runner.feed(scraped))  # type: ignore[misc]
        if self._alive:
            self._after(self.settings.scrape_every_ns, self._scrape)
