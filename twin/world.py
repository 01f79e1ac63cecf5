"""The simulated world: SimPy carries the events, engines do the work, the policy decides.

A request's way, all in nanoseconds of simulated time::

    arrival -> [policy's queue] -> dispatch -> gateway, network, request_in -> engine
    engine -> token_out per sequence running, network -> first token
    engine -> request_out, token_out per token, network -> finished

A server sends the outputs of a step one after another, and a new sequence's comes last.

What happens at the same instant has a fixed order: faults, arrivals, deliveries (in the order in
which they became certain), then engines by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import simpy

from policy.decisions import Abort, Dispatch, Refused, Settled
from policy.events import Arrived, Cancelled, Finished, FirstToken
from policy.runner import Runner
from twin.agenda import ARRIVALS, DELIVERIES, Callbacks, Event
from twin.answer_model import AnswerModel, Features
from twin.arrivals import Asked
from twin.calls import Call, Result
from twin.cards import Cards
from twin.dice import Dice
from twin.engine import Sequence, UnfitError
from twin.engine.steptime import TICK_BITS
from twin.errands import Errands
from twin.failures import Failures
from twin.faults import Injector
from twin.replicas import Replica
from twin.watch import Sample, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Series

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.runner import Log
    from twin.arrivals import Chunk
    from twin.cards import CardSettings
    from twin.faults import Fault
    from twin.fleet import ReplicaSpec

__all__ = [
    "AnswerModel",
    "Features",
    "Result",
    "Sample",
    "World",
    "WorldError",
    "WorldSettings",
]


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
    call_timeout_ns: int = 600_000_000_000
    """When the controller gives up a call that a replica does not answer."""
    checkpoint_ns: int = 2_000_000
    """Writing a chain's state to the store."""
    checkpoint_fail_permille: int = 0
    """How many of these the store does not take."""
    lookup_ns: int = 2_000_000
    """Looking for a similar answer that is kept."""
    cache_hit_permille: int = 0
    """How often there is one."""
    cache_age_most_ns: int = 3_600_000_000_000
    """How old a kept answer may be."""
    warm_ns: int = 2_000_000_000
    """A new replica's warm-up requests, one after another."""
    gpu_event_ns: int = 1_000_000_000
    """From a card's error to the event that tells of it."""
    hung_restart_ns: int = 0
    """A supervisor ends a process that hangs, by the policy's word, and sees to it again so much
    later: the model is loaded anew, or it is a standby if another took its place. 0: there is no
    supervisor, and it hangs on."""

    def __post_init__(self) -> None:
        if self.call_timeout_ns < 2:
            raise ValueError(f"call_timeout_ns is {self.call_timeout_ns}: it must be at least 2")


class World:
    """One run: a fleet, a policy and a stream of requests.

    Args:
        fleet: the replicas that are up from the start, numbered from 0.
        policy: any ``policy.contract.Policy``.
        log: the decision log.
        settled: called with each chunk, in order, once all of its requests are settled.
        skip: let the engines skip what changes nothing.
        standbys: replicas that can be started; their numbers follow the fleet's.
        faults: what goes wrong, and when.
        answers: what the engines answer; None: answers have no features.
        cards: how cards heat up and how busy their links are; None: nobody reads them.
        seed: of everything drawn here.

    Raises:
        WorldError: the replicas are not numbered in a row.
        twin.faults.FaultError: a fault that cannot happen here.
    """

    __slots__ = (
        "_alarm", "_answers", "_cards", "_chunks", "_declared", "_more", "_next_id",
        "_on_arrival", "_settled", "_source", "calls", "clients", "cold_start_factor", "env",
        "errands", "failures", "faults", "keeps_version", "link_dice", "queued", "refused",
        "replicas", "retry_attempts", "runner", "seed", "settings", "watch",
    )  # fmt: skip

    def __init__(
        self,
        fleet: list[ReplicaSpec],
        policy: Policy,
        log: Log,
        settled: Callable[[Chunk], None],
        settings: WorldSettings | None = None,
        skip: bool = True,
        *,
        standbys: Series[ReplicaSpec] = (),
        faults: Series[Fault] = (),
        answers: AnswerModel | None = None,
        cards: CardSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings or WorldSettings()
        self.seed = seed
        env: Any = simpy.Environment()  # its time may be a float: here it never is
        self.env = env
        self.queued = 0
        """Arrived, and neither in flight nor settled."""
        self.refused = 0
        """Events that the policy found illegal: always 0 unless there is a fault in the code."""
        self.clients = 0
        """Clients that may still ask: while there are any, the world goes on."""
        self.retry_attempts = 0
        """How often clients try again in a retry storm; 0: there is none."""
        self.cold_start_factor = Fraction(1)
        self.keeps_version = False
        """Replicas that are started load the version they had."""
        self.calls: dict[int, Call] = {}
        """Open requests, in order of arrival."""
        self.link_dice = Dice(seed, "link")
        self._alarm: Event | None = None
        self._declared = len(fleet)
        self._answers = answers
        self._settled = settled
        self._chunks: list[Chunk] = []
        self._next_id = 0
        self._source: Iterator[Chunk] = iter(())
        self._on_arrival: Callbacks = [self._arrive]
        self._more = True
        clock = partial(attrgetter("_now"), env)  # env.now is a property: a call more, each time
        self.runner = Runner(policy, clock, self._apply, self._arm, log)
        self.errands = Errands(self)
        self.failures = Failures(self)
        specs = [*fleet, *standbys]
        if [spec.id for spec in specs] != list(range(len(specs))):
            raise WorldError(
                f"replicas have the ids {[spec.id for spec in specs]}: number the fleet and then "
                "the standbys in a row from 0"
            )
        self.replicas = [
            Replica(self, spec, skip, "up" if spec.id < len(fleet) else "standby") for spec in specs
        ]
        self.watch = Watch(self)
        self._cards = Cards(self, cards) if cards is not None else None
        self.faults = Injector(self, faults, self._cards)

    def has_enough(self, spec: ReplicaSpec) -> bool:
        """Whether as many replicas that do the same are up, or starting, as were up at first."""
        alike = [
            replica
            for replica in self.replicas
            if replica.spec.serves == spec.serves and replica.spec.profile.task == spec.profile.task
        ]
        running = sum(replica.state in ("up", "starting") for replica in alike)
        return running >= sum(replica.id < self._declared for replica in alike)

    @property
    def now_ns(self) -> int:
        return cast("int", self.env._now)

    def run(self, chunks: Iterator[Chunk]) -> None:
        """Play all of ``chunks`` and let everything come to its end.

        Raises:
            WorldError: requests were left without an outcome.
        """
        self._source = self.faults.repeated(chunks)
        for replica in self.replicas:
            if replica.state == "up":
                self.runner.feed(replica.spec.up(replica.version))
            else:
                self.runner.feed(replica.standby())
        self._next_chunk()
        self.watch.begin()
        self.faults.begin()
        if self._cards is not None:
            self._cards.begin()
        self.failures.begin()
        self.env.run()
        if self.calls:
            raise self.lost_requests()

    def lost_requests(self) -> WorldError:
        left = ", ".join(str(request) for request in list(self.calls)[:5])
        return WorldError(
            f"{len(self.calls)} requests were never settled (first ids: {left}): "
            "the policy lost them"
        )

    @property
    def alive(self) -> bool:
        """Whether anything may still arrive or has to be settled."""
        return self.expects_more or bool(self.calls)

    @property
    def expects_more(self) -> bool:
        """Whether anything may still arrive."""
        return self._more or self.clients > 0

    @property
    def arrived(self) -> int:
        """Requests so far."""
        return self._next_id

    @property
    def samples(self) -> list[Sample]:
        return self.watch.samples

    def gpu_busy_share(self, span_ns: int) -> list[float]:
        """By replica: for what share of ``span_ns`` a step was running."""
        ticks = span_ns << TICK_BITS
        return [replica.busy_ticks / ticks if ticks else 0.0 for replica in self.replicas]

    # ---- arrivals ----

    def _next_chunk(self) -> None:
        chunk = next(self._source, None)
        if chunk is None:
            self._more = False
            return
        self._chunks.append(chunk)
        at_ns = chunk.arrival_ns[0]
        event = Event(self._on_arrival, [chunk, 0])
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
        self.calls[request] = Call(chunk, row, now_ns)
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

    # ---- clients ----

    def offer(self, asked: Asked) -> int:
        """A client asks, now; returns the request's id."""
        request = self._next_id
        self._next_id = request + 1
        now_ns = self.now_ns
        asked.arrival_ns[0] = now_ns
        self.calls[request] = Call(asked, 0, now_ns)
        self.queued += 1
        prefix = asked.prefix[0]
        self.runner.feed(
            Arrived(
                request, asked.model[0], asked.endpoint[0], asked.prompt_bytes[0],
                asked.max_tokens[0], asked.sla[0], asked.line[0], asked.user[0], asked.session[0],
                asked.deadline_ns[0], 1, asked.stream, prefix,
                4 * asked.prefix_block_tokens[0] if prefix else 0, asked.chain, asked.step,
                asked.resume,
            )
        )  # fmt: skip
        return request

    def listens_to(self, seq: Sequence) -> bool:
        """Whether the controller still waits for what comes of ``seq``."""
        call: Call | None = seq.data
        if call is None:
            return False
        return call.seq is seq or (call.second is not None and call.second.seq is seq)

    def cancel(self, request: int) -> None:
        """The client of a request goes away, now; nothing happens if it is settled already."""
        self.runner.feed(Cancelled(request))

    def after(self, delay_ns: int, callback: Callable[[simpy.Event], None]) -> None:
        """Call back that much later, among the deliveries of that instant."""
        self.env.schedule(Event([callback]), DELIVERIES, delay_ns)

    # ---- the policy's driver ----

    def _arm(self, at_ns: int) -> None:
        """Set the policy's alarm; one that was set before rings in vain."""
        self._alarm = alarm = Event([self._tick])
        self.env.schedule(alarm, DELIVERIES, max(0, at_ns - self.now_ns))

    def _tick(self, event: simpy.Event) -> None:
        # A policy that wants to be ticked for ever would never let it end.
        if event is self._alarm and self.alive:
            self.runner.tick()

    def _apply(self, decision: Decision) -> None:
        kind = type(decision)
        if kind is Dispatch:
            self._dispatch(decision)  # type: ignore[arg-type]
        elif kind is Settled:
            self._settle(decision)  # type: ignore[arg-type]
        elif kind is Abort:
            self._abort(decision)  # type: ignore[arg-type]
        elif kind is Refused:
            self.refused += 1
        else:
            self.errands.run(decision)

    def _dispatch(self, decision: Dispatch) -> None:
        request = decision.request
        call = self.open_call(request)
        chunk = call.chunk
        row = call.row
        now_ns = self.env._now
        if call.seq is None:
            self.queued -= 1
        call.dispatched_ns = now_ns
        call.first_ns = call.first_out_ns = call.last_ns = call.answered_ns = -1
        call.replica = decision.replica
        call.model = decision.model
        call.candidates = decision.candidates
        call.tries += 1
        call.seq = seq = Sequence(
            request, chunk.prompt_tokens[row], chunk.output_tokens[row], chunk.max_tokens[row],
            decision.priority, chunk.endpoint[row] == "embeddings", chunk.prefix[row],
            chunk.prefix_block_tokens[row], call,
        )  # fmt: skip
        replica = self.replicas[decision.replica]
        try:
            replica.submit(seq, now_ns)
        except UnfitError:  # the server answers 400 after it has looked at the request
            self.failures.fail(call, seq, "rejected", replica.entry_ns + self.settings.network_ns)

    def _abort(self, decision: Abort) -> None:
        """Close the connection: nothing that is still on its way back is heard."""
        call = self.calls.get(decision.request)
        if call is not None:
            self.errands.abort_second(call)
            if call.replica == decision.replica:
                self.detach(call)
                if call.gone is not None:
                    call.gone.data = None
        self.replicas[decision.replica].abort(decision.request, self.now_ns)

    def detach(self, call: Call) -> None:
        """Nobody listens to the present try any more."""
        if call.seq is not None:
            call.gone = call.seq
            call.seq = None
            self.queued += 1

    def open_call(self, request: int) -> Call:
        call = self.calls.get(request)
        if call is None:
            raise WorldError(f"the policy decided on request {request}, which is not open")
        return call

    def first_token(self, event: simpy.Event) -> None:
        """A first token is back at the controller, which sees none of an answer sent as a whole."""
        seq: Sequence = event._value
        call = self.calls.get(seq.id)
        if call is not None and call.seq is seq and call.chunk.stream:
            call.first_out_ns = self.env._now
            self.runner.feed(FirstToken(seq.id, call.replica))

    def finished(self, event: simpy.Event) -> None:
        """An answer is complete at the controller."""
        seq: Sequence = event._value
        call = self.calls.get(seq.id)
        if call is not None and call.seq is seq:
            output_tokens = 0 if seq.pooling else seq.outputs
            finished = Finished(
                seq.id, call.replica, seq.prompt_tokens, seq.cached_tokens, output_tokens
            )
            call.answered_ns = self.env._now
            if self._answers is not None:
                finished = self._with_features(finished, call, seq)
            self.runner.feed(finished)

    def _with_features(self, finished: Finished, call: Call, seq: Sequence) -> Finished:
        features = self.features(call, seq, call.replica)
        if features is None:
            return finished
        call.correct = int(features.correct)
        if not call.candidates:  # no logprobs were asked for
            return finished
        return msgspec.structs.replace(
            finished,
            entropy_mean_millinats=features.entropy_mean_millinats,
            entropy_worst_millinats=features.entropy_worst_millinats,
            close_permille=features.close_permille,
            contradiction=features.contradiction,
        )

    def features(self, call: Call, seq: Sequence, where: int) -> Features | None:
        """Of the answer that replica ``where`` gave; None for an embedding or without a model."""
        if self._answers is None or seq.pooling:
            return None
        replica = self.replicas[where]
        chunk = call.chunk
        model = call.model or chunk.model[call.row]
        return self._answers.features(
            max(seq.id, ~seq.id),
            chunk,
            call.row,
            replica=where,
            version=replica.version,
            model=model,
            in_flight=replica.engine.held,
            shift_permille=self.faults.shift_permille(replica),
            now_ns=self.now_ns,
        )

    def agree(self, request: int, first: int, second: int) -> Literal["match", "mismatch"]:
        """Whether two answers to a request agree; without a model they do."""
        if self._answers is None:
            return "match"
        return self._answers.verdict(request, first == 1, second == 1)

    def _settle(self, decision: Settled) -> None:
        call = self.open_call(decision.request)
        del self.calls[decision.request]
        seq = call.seq
        if seq is None:
            self.queued -= 1
            seq = call.gone
        if seq is None:
            scheduled_ns = -1
            cached_tokens = output_tokens = preemptions = turn = 0
        else:
            scheduled_ns = seq.scheduled_ns
            cached_tokens = seq.cached_tokens
            done = call.answered_ns >= 0 and not seq.pooling
            output_tokens = seq.outputs if done else 0
            preemptions = seq.preemptions
            turn = seq.turn
            seq.data = None  # each held the other: free both now, not at the collector's leisure
            if call.second is not None:
                call.second.seq.data = None
        chunk = call.chunk
        chunk.results[call.row] = Result(
            decision.outcome, decision.why, decision.tier, decision.http_code, call.replica,
            call.tries, call.arrival_ns, self.env._now, call.dispatched_ns, scheduled_ns,
            call.first_ns, call.last_ns, call.first_out_ns, cached_tokens, output_tokens,
            preemptions, decision.confidence_permille, decision.verification, call.correct,
            call.answered_ns, turn,
        )  # fmt: skip
        chunk.open -= 1
        if not chunk.open:
            self._close(chunk, decision)

    def _close(self, chunk: Chunk | Asked, decision: Settled) -> None:
        """All of ``chunk`` is settled."""
        if isinstance(chunk, Asked):
            chunk.settled(chunk.results[0], decision)
            return
        chunks = self._chunks
        while chunks and not chunks[0].open:
            self._settled(chunks.pop(0))
