"""Prometheus metrics of the controller.

What happens is counted as it happens, in plain dictionaries; what the driver knows anyway (queues,
in flight, the decision log's lag) is read from it when the metrics are read. No label holds what a
caller can choose freely: models are those that replicas serve, and users are only counted.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple, Protocol, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from controller.listener import Listener
from controller.telemetry.drifts import Drifts
from controller.telemetry.fairness import Fairness
from controller.telemetry.tallies import NS_PER_S, OTHER, Counter, Histogram, Names
from controller.telemetry.timing import HOPS
from policy.decisions import Alert, BreakerMoved, Refused, Rotated, Scaled, Verify
from policy.events import (
    Event,
    Failed,
    Forecasted,
    ReplicaDown,
    ReplicaUp,
    Scraped,
    StepsRead,
)
from policy.outcomes import CALLERS_FAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from prometheus_client import Metric

    from controller.call import Call, EngineTimes
    from controller.telemetry.tallies import Cell
    from policy.decisions import BreakerState, Decision, Settled

# Dense around what is promised (.8, 1.2 and 3 s) and the deadlines (1.5, 4 and 10 s).
LATENCY_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9,
    1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 2.8, 3.0, 3.2, 3.5, 4.0, 5.0, 7.5, 10.0, 15.0,
    20.0, 30.0, 45.0, 60.0, 90.0, 120.0,
)  # fmt: skip
TPOT_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
HOP_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.8, 1.0,
    1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
GATEWAY_S = (
    0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015,
    0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0,
)  # fmt: skip
SHARES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0)
PERMILLE = 1000
MICROS = 1_000_000

SLAS = {"": "none", "P0": "P0", "P1": "P1", "P2": "P2"}
DEADLINE_S = {"P0": 1.5, "P1": 4.0, "P2": 10.0, "": 4.0}
TPOT_MOST_NS = 100_000_000
"""Per output token of an answer within its objective: faster than reading."""
BREAKER_VALUES: dict[BreakerState, int] = {"closed": 0, "half_open": 1, "open": 2}
ROTATION = ("in", "ejected", "probing", "draining", "isolated", "down")
BREAKERS_MOST = 200
KEY_CHARS_MOST = 200
"""Of a breaker's key, which names the caller's business line."""
REPLICAS_MOST = 256
MODELS_MOST = 100
FIGURES_MOST = 100
HORIZONS_MOST = 20
"""Of a forecast, the nearest, that are shown."""


class LogHealth(NamedTuple):
    """How the writing of the decision log goes."""

    waiting_bytes: int = 0
    """Handed over and not written yet: how far it lags behind."""
    dropped_bytes: int = 0
    """Never written, since the start."""
    segment: int = 0
    """Number of the one being written."""


class Sink(NamedTuple):
    """How often something was handed on to others, since the start."""

    sent: int = 0
    failed: int = 0
    """Given up after an error, or after all tries."""
    dropped: int = 0
    """For want of room."""


class State(NamedTuple):
    """What the driver knows when the metrics are read."""

    now_ns: int
    """On the log's clock."""
    queued: Mapping[str, int] = {}
    """Requests that wait in the policy's queue, by tier (``held``: kept back by a limit)."""
    in_flight: Mapping[tuple[int, str], int] = {}
    """Calls to replicas, by replica and tier."""
    log: LogHealth = LogHealth()
    sinks: Mapping[str, Sink] = {}
    """By name, such as ``spans``, ``webhook``, ``trace``."""
    draining: bool = False
    shadow: Mapping[str, float] = {}
    """What observe mode would have done so far, as figures by name."""


class StateReader(Protocol):
    """Who can be asked for it: the driver, or who wires it up."""

    def read(self) -> State:
        """Called once for every reading of the metrics, in the event loop: no more than a walk
        over the open calls."""
        ...


class Metrics(Listener):
    """Counts, and is read by ``render()``, all in the event loop's thread."""

    def __init__(self, state: StateReader) -> None:
        self._state = state
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Gauges(self._families))
        ProcessCollector(registry=self._registry)
        self._fairness = Fairness()
        self._deadline_ns = {sla: round(s * NS_PER_S) for sla, s in DEADLINE_S.items()}
        self._policy = ("", "")
        self._forecast: tuple[int, Forecasted] | None = None
        """When the last one was told, and what."""
        self._open = 0
        self._streams = 0
        self._begin_names()
        self._begin_counters()
        self._begin_histograms()
        self._on_event: dict[type[Event], Callable[[int, Any], None]] = {
            Failed: self._failed,
            Forecasted: self._forecasted,
            Scraped: self._scraped,
            StepsRead: self._steps_read,
            ReplicaUp: self._up,
            ReplicaDown: self._down,
        }
        self._on_decision: dict[type[Decision], Callable[[Any], None]] = {
            BreakerMoved: self._breaker_moved,
            Rotated: self._rotated,
            Alert: self._alert,
            Refused: self._refused_event,
            Verify: lambda _: self._verify_runs.add(),
            Scaled: self._scaled,
        }

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        lines: list[str] = []
        for counter in self._counters:
            counter.write(lines)
        for histogram in self._histograms:
            histogram.write(lines)
        return "".join(lines).encode() + generate_latest(self._registry), CONTENT_TYPE_LATEST

    def also(self, families: Callable[[], Iterator[Metric]]) -> None:
        """Read these, too, when the metrics are read."""
        self._registry.register(_Gauges(families))

    # What is told by others than the driver

    def policy(self, name: str, hash: str, deadline_s: Mapping[str, float] | None = None) -> None:
        """Which policy is in force; ``deadline_s`` by SLA class (empty: where none is given)."""
        self._policy = (name, hash)
        for sla, seconds in (deadline_s or {}).items():
            self._deadline_ns[sla] = round(seconds * NS_PER_S)

    def restored(self, breakers: Mapping[str, BreakerState]) -> None:
        """The breakers that were not closed when the controller came back."""
        for key, state in breakers.items():
            self._set_breaker(key, state)

    def rejected(self, http_code: int) -> None:
        """The gateway refused a request itself: unauthorised, malformed, too large, too many."""
        self._rejections.add((str(http_code),))

    def chain_step(self, of: str, outcome: str) -> None:
        """A step of a chain is over: of a ``request``, or the ``client``'s own."""
        self._chain_steps.add((of, outcome))

    def chain_partial(self) -> None:
        """The budget of a chain ended before its steps did."""
        self._chains_partial.add()

    # The listener

    def arrived(self, call: Call) -> None:
        self._open += 1
        if call.asked.stream:
            self._streams += 1

    def dispatched(self, call: Call) -> None:
        self._dispatches.add((self._replicas.get(call.replica, OTHER),))

    def settled(self, call: Call, settled: Settled) -> None:
        asked, outcome = call.asked, settled.outcome
        self._open -= 1
        if asked.stream:
            self._streams -= 1
        sla = SLAS.get(asked.sla, OTHER)
        tier = self._tiers(settled.tier or call.tier)
        self._requests.add((asked.endpoint, sla, tier, outcome))
        if call.tries > 1:
            self._retries.add((), call.tries - 1)
        if outcome != "answered":
            self._explain(settled, tier)
        if settled.verification:
            self._verifications.add((settled.verification,))
        if settled.confidence_permille >= 0 and settled.why not in ("cached", "checkpoint"):
            # Of those it was observed when they were made.
            self._confidence.cell().observe(settled.confidence_permille)
        self._tokens(call)
        self._times(call, settled, sla, tier)

    def lost(self, settled: Settled) -> None:
        self._lost_requests.add()

    def decided(self, decision: Decision) -> None:
        handle = self._on_decision.get(type(decision))
        if handle is not None:
            handle(decision)

    def fed(self, now_ns: int, event: Event) -> None:
        handle = self._on_event.get(type(event))
        if handle is not None:
            handle(now_ns, event)

    # A request that is over

    def _explain(self, settled: Settled, tier: str) -> None:
        if settled.outcome == "shed":
            self._sheds.add((self._reasons(settled.why), tier))
        elif settled.outcome == "degraded":
            self._degradations.add((self._reasons(settled.why),))
        elif settled.outcome == "failed":
            self._failures.add((self._reasons(settled.why),))

    def _tokens(self, call: Call) -> None:
        model = call.asked.model
        if model not in self._served:
            model = OTHER
        read, written = max(call.prompt_tokens, 0), call.output_tokens
        self._prompt_tokens.add((model,), read)
        self._cached_tokens.add((model,), call.cached_tokens)
        self._output_tokens.add((model,), written)
        if call.asked.user:
            self._fairness.add(call.settled_ns, call.asked.user, read + written)

    def _times(self, call: Call, settled: Settled, sla: str, tier: str) -> None:
        ttft_ns, tpot_ns = _ttft_ns(call), _tpot_ns(call)
        series = (tier, sla)
        cells = self._series.get(series)
        if cells is None:
            cells = (self._ttft.cell(series), self._tpot.cell(series), self._e2e.cell(series))
            self._series[series] = cells
        if ttft_ns >= 0:
            cells[0].observe(ttft_ns)
        if tpot_ns >= 0:
            cells[1].observe(tpot_ns)
        complete = settled.outcome in ("answered", "degraded")
        self._judge(call, settled, series, ttft_ns, tpot_ns, complete)
        if not complete:
            return
        hops = call.hops()
        cells[2].observe(hops.total_ns)
        self._gateway.observe(hops.gateway_ns)
        for cell, ns in zip(self._hop_cells, hops, strict=False):
            if ns >= 0:
                cell.observe(ns)
        if min(hops) >= 0:
            rest_ns = hops.rest_ns
            self._rest.observe(rest_ns if rest_ns > 0 else 0)
            if hops.total_ns:
                self._rest_share.observe(abs(rest_ns) * MICROS // hops.total_ns)

    def _judge(
        self,
        call: Call,
        settled: Settled,
        series: tuple[str, str],
        ttft_ns: int,
        tpot_ns: int,
        complete: bool,
    ) -> None:
        """Was it served within its objective? As in the twin: its own deadline or its class's, to
        first token, then a usual pace. What its caller did to it is not judged."""
        asked = call.asked
        limit_ns = asked.deadline_ns or self._deadline_ns.get(asked.sla, self._deadline_ns[""])
        if settled.outcome == "cancelled":
            if 0 <= ttft_ns <= limit_ns or call.settled_ns - call.arrived_ns <= limit_ns:
                return
        elif settled.outcome == "failed" and settled.why in CALLERS_FAULT:
            return
        if not complete:
            self._offered.add(series)
            self._met.add(series, 0)  # without it, a share of nothing met would be no number
            return
        if ttft_ns < 0:  # in one piece, and its engine does not say: not before it was sent there
            ttft_ns = call.settled_ns - call.arrived_ns
            queue_ns = max(call.dispatched_ns, call.arrived_ns) - call.arrived_ns
            if asked.endpoint != "embeddings" and queue_ns <= limit_ns < ttft_ns:
                return
        self._offered.add(series)
        self._met.add(series, int(ttft_ns <= limit_ns and tpot_ns <= TPOT_MOST_NS))

    # Replicas, breakers, alerts

    def _up(self, now_ns: int, event: ReplicaUp) -> None:
        name = event.name or str(event.replica)
        others = {known for id, known in self._replicas.items() if id != event.replica}
        if name in others:
            name = f"{name}#{event.replica}"
        if len(self._replicas) >= REPLICAS_MOST and event.replica not in self._replicas:
            return
        self._replicas[event.replica] = name
        self._rotations[event.replica] = "in"
        self._drifts.renewed(event.replica)
        for model in event.models:
            if len(self._served) < MODELS_MOST:
                self._served.add(model)

    def _down(self, now_ns: int, event: ReplicaDown) -> None:
        if event.replica in self._replicas:
            self._rotations[event.replica] = "down"
            self._scrapes.pop(event.replica, None)
            self._drifts.renewed(event.replica)

    def _rotated(self, decision: Rotated) -> None:
        name = self._replicas.get(decision.replica)
        if name is not None:
            self._rotations[decision.replica] = decision.state
            self._moves.add((name, decision.state))

    def _scraped(self, now_ns: int, event: Scraped) -> None:
        if event.replica in self._replicas:
            self._scrapes[event.replica] = (now_ns, event)

    def _steps_read(self, now_ns: int, event: StepsRead) -> None:
        name = self._replicas.get(event.replica)
        if name is not None:
            self._drifts.read(event)
            self._steps.add((name,), event.steps)

    def _failed(self, now_ns: int, event: Failed) -> None:
        self._errors.add((event.kind, self._replicas.get(event.replica, OTHER)))

    def _forecasted(self, now_ns: int, event: Forecasted) -> None:
        self._forecast = now_ns, event

    def _breaker_moved(self, decision: BreakerMoved) -> None:
        key = self._set_breaker(decision.key, decision.state)
        self._breaker_moves.add((key, decision.state))

    def _set_breaker(self, key: str, state: BreakerState) -> str:
        key = key[:KEY_CHARS_MOST]
        breakers = self._breakers
        if key not in breakers and len(breakers) >= BREAKERS_MOST:  # a closed one goes, if any
            for known, was in breakers.items():
                if was == "closed":
                    del breakers[known]
                    break
            else:
                return OTHER
        breakers[key] = state
        return key

    def _alert(self, decision: Alert) -> None:
        self._alerts.add((self._alert_kinds(decision.key.partition(" ")[0]),))

    def _refused_event(self, decision: Refused) -> None:
        self._refusals.add((decision.event,))

    def _scaled(self, decision: Scaled) -> None:
        if decision.pool in self._served:
            self._wanted[decision.pool] = decision.replicas

    # What there is

    def _begin_names(self) -> None:
        self._tiers = Names(20)
        self._reasons = Names(100)
        self._alert_kinds = Names(50)
        self._replicas: dict[int, str] = {}
        self._rotations: dict[int, str] = {}
        self._scrapes: dict[int, tuple[int, Scraped]] = {}
        self._drifts = Drifts()
        self._served: set[str] = set()
        self._breakers: dict[str, BreakerState] = {}
        self._wanted: dict[str, int] = {}

    def _begin_counters(self) -> None:
        self._counters: list[Counter] = []

        def counter(name: str, help: str, *labels: str) -> Counter:
            self._counters.append(Counter(f"twinkeel_{name}", help, labels))
            return self._counters[-1]

        self._requests = counter(
            "requests", "Requests with their outcome", "endpoint", "sla", "tier", "outcome"
        )
        self._rejections = counter("rejected", "Requests that the gateway refused itself", "code")
        self._lost_requests = counter("lost_requests", "Requests that a crash took with it")
        self._sheds = counter("shed", "Requests shed, by reason", "reason", "tier")
        self._degradations = counter("degraded", "Requests answered in a lesser way", "how")
        self._failures = counter("failures", "Requests that failed, by kind of error", "kind")
        self._dispatches = counter("dispatches", "Calls to replicas", "replica")
        self._retries = counter("retries", "Calls to replicas after a request's first")
        self._steps = counter(
            "replica_steps", "Engine steps held against the replica's profile", "replica"
        )
        self._errors = counter("errors", "Calls to replicas that failed", "kind", "replica")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts", "model")
        self._cached_tokens = counter("cached_tokens", "Of these, found in a cache", "model")
        self._output_tokens = counter("output_tokens", "Tokens of answers", "model")
        self._offered = counter(
            "slo_offered", "Requests judged by their objective; shed and failed too", "tier", "sla"
        )
        self._met = counter("slo_met", "Of these, served within it", "tier", "sla")
        self._verifications = counter(
            "verifications", "Answers by what became of their verification", "status"
        )
        self._verify_runs = counter("verify_runs", "Second runs of answered requests")
        self._chain_steps = counter(
            "chain_steps", "Steps of chains with their outcome", "of", "outcome"
        )
        self._chains_partial = counter(
            "chains_partial", "Chains whose budget ended before they did"
        )
        self._breaker_moves = counter("breaker_moves", "Transitions of breakers", "key", "state")
        self._moves = counter("rotations", "Moves in the rotation", "replica", "state")
        self._alerts = counter("alerts", "Alerts, by the first word of their key", "kind")
        self._refusals = counter("refused_events", "Events that the policy refused", "event")
        for event in get_args(Event):  # from 0, so that the first one shows as an increase
            self._refusals.add((event.__name__,), 0)

    def _begin_histograms(self) -> None:
        self._histograms: list[Histogram] = []

        def histogram(
            name: str, help: str, labels: tuple[str, ...], bounds: tuple[float, ...],
            unit: int = NS_PER_S,
        ) -> Histogram:  # fmt: skip
            self._histograms.append(Histogram(f"twinkeel_{name}", help, labels, bounds, unit))
            return self._histograms[-1]

        by = ("tier", "sla")
        self._series: dict[tuple[str, str], tuple[Cell, Cell, Cell]] = {}
        """Of these three, by tier and class: both have few values."""
        self._ttft = histogram("ttft_seconds", "Arrival here to first token", by, LATENCY_S)
        self._tpot = histogram("tpot_seconds", "Per output token after the first", by, TPOT_S)
        self._e2e = histogram("e2e_seconds", "Headers read to last byte sent", by, LATENCY_S)
        self._confidence = histogram(
            "confidence", "How far answers can be trusted", (), CONFIDENCE, PERMILLE
        )
        hops = histogram(
            "hop_seconds", "Where the time of answers went; rest: unexplained", ("hop",), HOP_S
        )
        self._hop_cells: list[Cell] = [hops.cell((name,)) for name in HOPS]
        self._rest = hops.cell(("rest",))
        self._gateway = histogram(
            "gateway_seconds", "Time of answers in this process, waiting not included", (),
            GATEWAY_S,
        ).cell()  # fmt: skip
        self._rest_share = histogram(
            "rest_ratio", "Unexplained share of an answer's time", (), SHARES, MICROS
        ).cell()

    # Reading

    def _families(self) -> Iterator[Metric]:
        state = self._state.read()
        yield from self._info()
        yield from self._of_state(state)
        yield from self._of_replicas(state.now_ns)
        yield from self._of_service(state.now_ns)
        yield from self._of_forecast(state.now_ns)
        figures = list(state.shadow.items())[:FIGURES_MOST]
        yield _gauge(
            "shadow", "Figures of observe mode: what would have been done", ("figure",),
            {(figure,): value for figure, value in figures},
        )  # fmt: skip

    def _info(self) -> Iterator[Metric]:
        name, hash = self._policy
        yield _gauge(
            "build_info", "What runs here", ("version", "python"),
            {(_version(), platform.python_version()): 1},
        )  # fmt: skip
        yield _gauge("policy_info", "The policy in force", ("name", "hash"), {(name, hash): 1})

    def _of_state(self, state: State) -> Iterator[Metric]:
        yield _gauge(
            "queued", "Requests waiting in the policy's queue", ("tier",),
            {(self._tiers(tier),): count for tier, count in state.queued.items()},
        )  # fmt: skip
        flying: dict[tuple[str, ...], float] = {}
        for (replica, tier), count in state.in_flight.items():
            labels = (self._replicas.get(replica, OTHER), self._tiers(tier))
            flying[labels] = flying.get(labels, 0) + count
        for name in self._replicas.values():
            flying.setdefault((name, "none"), 0)
        yield _gauge("in_flight", "Calls to replicas", ("replica", "tier"), flying)
        yield _gauge("open_requests", "Requests without an outcome yet", (), {(): self._open})
        yield _gauge("open_streams", "Of these, streams", (), {(): self._streams})
        yield _gauge("draining", "1 once no new requests are taken", (), {(): state.draining})
        log = state.log
        yield _gauge(
            "log_waiting_bytes", "Of the decision log, not written yet", (),
            {(): log.waiting_bytes},
        )  # fmt: skip
        yield _gauge("log_segment", "Number of the log's segment", (), {(): log.segment})
        yield CounterMetricFamily(
            "twinkeel_log_dropped_bytes", "Of the decision log, never written", log.dropped_bytes
        )
        sinks = CounterMetricFamily(
            "twinkeel_sink_items", "Handed on to others", labels=("sink", "result")
        )
        for sink, counts in state.sinks.items():
            for result, count in zip(Sink._fields, counts, strict=True):
                sinks.add_metric((sink, result), count)
        yield sinks

    def _of_replicas(self, now_ns: int) -> Iterator[Metric]:
        names = self._replicas
        yield _gauge(
            "replica_state", "1 for where it is in the rotation", ("replica", "state"),
            {
                (names[id], state): float(state == current)
                for id, current in self._rotations.items()
                for state in ROTATION
            },
        )  # fmt: skip
        scrapes = {(names[id],): seen for id, seen in self._scrapes.items()}
        label = ("replica",)
        yield _gauge(
            "replica_running", "Requests it runs, as it says", label,
            {name: event.running for name, (_, event) in scrapes.items()},
        )  # fmt: skip
        yield _gauge(
            "replica_waiting", "Requests in its own queue, as it says", label,
            {name: event.waiting for name, (_, event) in scrapes.items()},
        )  # fmt: skip
        yield _gauge(
            "replica_kv_used_ratio", "Of its KV blocks, as it says", label,
            {name: event.kv_used_permille / PERMILLE for name, (_, event) in scrapes.items()},
        )  # fmt: skip
        yield _gauge(
            "replica_scrape_age_seconds", "Since it wrote these", label,
            {
                name: (now_ns - at_ns + event.age_ns) / NS_PER_S
                for name, (at_ns, event) in scrapes.items()
            },
        )  # fmt: skip

        drifts = {id: self._drifts.permille(id) for id in names}
        yield _gauge(
            "replica_drift_ratio", "By how much its last steps took longer than its profile says",
            label,
            {(names[id],): drift / PERMILLE for id, drift in drifts.items() if drift is not None},
        )  # fmt: skip

    def _of_service(self, now_ns: int) -> Iterator[Metric]:
        yield _gauge(
            "breaker_state", "0 closed, 1 half-open, 2 open", ("key",),
            {(key,): BREAKER_VALUES[state] for key, state in self._breakers.items()},
        )  # fmt: skip
        index, users = self._fairness.figures(now_ns)
        yield _gauge(
            "fairness_index", "Jain's index of users' tokens in the last minutes; 1: even", (),
            {(): index},
        )  # fmt: skip
        yield _gauge("fairness_users", "Users that it is about", (), {(): users})
        yield _gauge(
            "wanted_replicas", "Replicas that a pool should have", ("pool",),
            {(pool,): count for pool, count in self._wanted.items()},
        )  # fmt: skip

    def _of_forecast(self, now_ns: int) -> Iterator[Metric]:
        """Nothing, while none was told."""
        if self._forecast is None:
            return
        at_ns, event = self._forecast
        yield _gauge(
            "forecast_age_seconds", "Since the policy was told the last one", (),
            {(): (now_ns - at_ns) / NS_PER_S},
        )  # fmt: skip
        ahead = [f"{ns / NS_PER_S:g}" for ns in event.horizons_ns[:HORIZONS_MOST]]
        for name, help, unit, median, upper in (
            ("requests", "Requests", PERMILLE, event.requests_p50, event.requests_p90),
            ("tokens", "Prompt and output tokens", 1, event.tokens_p50, event.tokens_p90),
        ):
            yield _gauge(
                f"forecast_{name}_per_second", f"{help} expected, by the last forecast",
                ("ahead_seconds", "quantile"),
                {
                    (seconds, quantile): value / unit
                    for quantile, values in (("0.5", median), ("0.9", upper))
                    for seconds, value in zip(ahead, values, strict=False)
                },
            )  # fmt: skip


class _Gauges(Collector):
    """What is read from the driver, for the registry."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


def _gauge(
    name: str, help: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"twinkeel_{name}", help, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _ttft_ns(call: Call) -> int:
    """Arrival to first token, also of answers that come in one piece, where the engine says; -1:
    not known."""
    if call.asked.stream:
        return call.first_ns - call.arrived_ns if call.first_ns >= 0 else -1
    engine: EngineTimes | None = call.engine
    if engine is None or call.dispatched_ns < 0 or min(engine.schedule_ns, engine.prefill_ns) < 0:
        return -1
    return call.dispatched_ns - call.arrived_ns + engine.schedule_ns + engine.prefill_ns


def _tpot_ns(call: Call) -> int:
    """Per output token after the first; -1: not known, or there is none."""
    gaps = call.output_tokens - 1
    if gaps < 1:
        return -1
    if call.asked.stream and 0 <= call.first_ns <= call.last_ns:
        return (call.last_ns - call.first_ns) // gaps
    return -1 if call.engine is None or call.engine.decode_ns < 0 else call.engine.decode_ns // gaps


def _version() -> str:
    try:
        return version("twinkeel")
    except PackageNotFoundError:
        return "unknown"
