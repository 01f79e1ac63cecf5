"""OpenTelemetry spans: one trace over caller, controller and vLLM.

    POST /v1/chat/completions     server: headers read to last byte sent; gen_ai.* attributes
      queue                       once for each time it waited in the policy's queue
      chat MODEL                  client: once for each call to a replica; vLLM's own span is below

    chain NAME                    above all of these of a chain, where its caller has no trace
      step NAME                   a client's own step of a chain, as it told of it

A caller decides by the ``sampled`` flag of its ``traceparent`` whether it is traced; without one, a
share of requests is, and of chains (all steps or none). Of a traced request only instants are kept
until it is over; its spans are made then, and exported by a thread. No text of a prompt or an
answer goes into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from importlib.metadata import PackageNotFoundError, version
from random import SystemRandom
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from zlib import crc32

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from controller.listener import Listener
from controller.telemetry.chain_traces import QUIET_NS, ChainTraces
from controller.telemetry.metrics import Sink
from controller.telemetry.timing import known
from policy.decisions import Verify
from policy.events import Failed, Verified

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.util.types import AttributeValue

    from controller.call import Call
    from controller.config import Settings
    from controller.telemetry.chain_traces import ChainTrace
    from controller.telemetry.chains import OwnStep
    from policy.decisions import Decision, Settled
    from policy.events import Event

    Attributes = dict[str, AttributeValue]

CLOSE_S = 2.0
EXPORT_S = 5.0
"""When sending a batch is given up, tries included."""
PENDING_MOST = 8192
TRIES_MOST = 32
TEXT_MOST = 256
"""Characters of a name that a caller gave."""
OPERATIONS = {"chat": "chat", "completions": "text_completion", "embeddings": "embeddings"}
PATH = "/v1/traces"

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)


class Try:
    """One call to a replica, or a second run of it to compare."""

    __slots__ = ("began_ns", "ended_ns", "error", "first_ns", "number", "replica", "span_id")

    def __init__(self, span_id: int, number: int, replica: int, began_ns: int) -> None:
        self.span_id = span_id
        self.number = number
        """From 1; 0: a second run."""
        self.replica = replica
        self.began_ns = began_ns
        self.ended_ns = -1
        self.first_ns = -1
        self.error = ""


class Trace:
    """What is kept of a traced request until it is over."""

    __slots__ = ("chain", "current", "parent", "span_id", "trace_id", "tries")

    def __init__(
        self,
        trace_id: int,
        parent: SpanContext | None,
        span_id: int,
        chain: ChainTrace | None = None,
    ) -> None:
        self.trace_id = trace_id
        self.chain = chain
        self.parent = parent
        """The caller's span; None: it has none."""
        self.span_id = span_id
        self.current = span_id
        """Of the span below which the next call's server goes on."""
        self.tries: list[Try] = []


class Spans(Listener):
    """Keeps what spans are made of, and makes them.

    Args:
        settings: ``otlp`` says where spans go (empty: nothing is traced), ``span_share`` how many.
        epoch_ns_at_zero: time of day, since 1970, when the log's clock was 0.
        replica_url: where a replica is, by its id.
        pending_most: spans that may wait to be exported; those of a request that finds no room are
            not made.
    """

    def __init__(
        self,
        settings: Settings,
        epoch_ns_at_zero: int,
        replica_url: Callable[[int], str] = lambda replica: "",
        pending_most: int = PENDING_MOST,
    ) -> None:
        self._pending_most = pending_most
        self._epoch_ns = epoch_ns_at_zero
        self._replica_url = replica_url
        self._host, self._port = settings.host, settings.port
        self._on = bool(settings.otlp)
        self._below = round(settings.span_share * (1 << 32)) if self._on else 0
        self._chains = ChainTraces(self._below)
        self._open: dict[int, Call] = {}
        """Traced ones, by the policy's id."""
        self._dropped = 0
        self._made = 0
        self._over = False
        """Closed: what was not sent never will be."""
        self._ids = _Ids()
        self._exporter: _Counted | None = None
        if settings.otlp:
            self._begin(_endpoint(settings.otlp))

    def _begin(self, endpoint: str) -> None:
        self._exporter = _Counted(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S))
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=self._pending_most, schedule_delay_millis=1000,
            max_export_batch_size=min(512, self._pending_most),
        )  # fmt: skip
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # whether to trace is decided before a span is made
            resource=Resource.create({"service.name": "twinkeel", "service.version": _version()}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("twinkeel.controller", _version())

    def counts(self) -> Sink:
        """Spans that were exported and that could not be, and requests there was no room for."""
        exporter = self._exporter
        if exporter is None:
            return Sink()
        failed = self._made - exporter.sent if self._over else exporter.failed
        return Sink(exporter.sent, failed, self._dropped)

    def traceparent(self, call: Call) -> str:
        """What goes to the replica with the try that was dispatched last; empty: nothing."""
        trace: Trace | None = call.span
        if trace is None:
            return call.asked.traceparent
        return f"00-{trace.trace_id:032x}-{trace.current:016x}-01"

    async def close(self) -> None:
        """Export what is pending, within ``CLOSE_S``; what is left then is given up."""
        exporter = self._exporter
        if exporter is None:
            return
        for chain in self._chains.left():
            self._chain_span(chain)
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # the loop did not wait for it
                loop.call_soon_threadsafe(over.set)

        # Not in the loop's own pool, which would be waited for without a bound.
        threading.Thread(target=flush, name="spans-close", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await over.wait()
        except TimeoutError:
            exporter.shutdown()  # wakes it from its wait between tries
        self._over = True

    # The listener

    def arrived(self, call: Call) -> None:
        asked = call.asked
        given = asked.traceparent
        share = crc32(call.name.encode()) if self._below else 1 << 32
        if not given and not asked.chain and share >= self._below:
            return
        parent, sampled = _parsed(given) if given else (None, False)
        chain: ChainTrace | None = None
        if asked.chain:
            chain = self._chain(asked.user, asked.chain, asked.line, parent)
            parent, sampled = chain.parent, chain.sampled
        elif parent is None:  # a header that means nothing is as if there were none
            sampled = share < self._below
        if not self._on or not sampled:
            if parent is not None:
                call.trace = _told(parent)
            return
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        trace = Trace(trace_id, parent, self._ids.generate_span_id(), chain)
        call.span = trace
        call.trace = f"00-{trace_id:032x}-{trace.span_id:016x}-01"
        self._open[call.request] = call
        if chain is not None:
            chain.open += 1
            if chain.began_ns < 0:
                chain.began_ns = call.entered_ns

    def dispatched(self, call: Call) -> None:
        trace: Trace | None = call.span
        if trace is not None:
            for attempt in trace.tries:
                if attempt.ended_ns < 0:  # the policy gave it up without a word from the replica
                    attempt.ended_ns, attempt.error = call.dispatched_ns, "aborted"
            self._try(trace, call.tries, call.replica, call.dispatched_ns)

    def first_token(self, call: Call) -> None:
        trace: Trace | None = call.span
        if trace is not None and trace.tries:
            trace.tries[-1].first_ns = call.first_ns

    def fed(self, now_ns: int, event: Event) -> None:
        kind = type(event)
        if (kind is Failed or kind is Verified) and self._open:
            assert isinstance(event, Failed | Verified)
            call = self._open.get(event.request)
            if call is not None:
                error = "" if isinstance(event, Verified) else event.kind
                _end_try(call.span, event.replica, now_ns, error)

    def decided(self, decision: Decision) -> None:
        if type(decision) is Verify:
            call = self._open.get(decision.request)
            if call is not None:
                began_ns = max(call.last_ns, call.dispatched_ns)
                _end_try(call.span, call.replica, began_ns, "")
                self._try(call.span, 0, decision.replica, began_ns)

    def settled(self, call: Call, settled: Settled) -> None:
        trace: Trace | None = call.span
        if trace is None:
            return
        call.span = None
        self._open.pop(call.request, None)
        if trace.chain is not None:
            trace.chain.open -= 1
            _stepped(trace.chain, call.settled_ns, settled.left_ns, settled.why)
        if self._has_room(2 * len(trace.tries) + 2):
            self._make(call, settled, trace)

    # Chains

    def own(self, own: OwnStep, now_ns: int) -> str:
        """A client tells of a step that it ran itself; the id of its chain's trace, in hex."""
        parent = _parsed(own.traceparent)[0] if own.traceparent else None
        chain = self._chain(own.user, own.chain, own.line, parent)
        if self._on and chain.sampled:
            began_ns = now_ns - own.began_ago_ns
            if chain.began_ns < 0 or began_ns < chain.began_ns:
                chain.began_ns = began_ns
            why = "" if own.outcome == "done" else own.outcome
            _stepped(chain, began_ns + own.took_ns, -1, why)
            if self._has_room(1):
                self._own_span(own, chain, began_ns)
        return f"{chain.trace_id:032x}"

    def turn(self, now_ns: int) -> None:
        """Make the spans of chains that have ended; called now and then."""
        for chain in self._chains.quiet(now_ns):
            self._chain_span(chain)

    def _chain(self, user: str, chain: str, line: str, parent: SpanContext | None) -> ChainTrace:
        trace, gone = self._chains.of(user, chain, line, parent)
        for each in gone:
            self._chain_span(each)
        return trace

    def _has_room(self, spans: int) -> bool:
        assert self._exporter is not None
        if self._made - self._exporter.taken + spans > self._pending_most:
            self._dropped += 1
            return False
        return True

    def _try(self, trace: Trace, number: int, replica: int, began_ns: int) -> None:
        if len(trace.tries) < TRIES_MOST:
            trace.current = self._ids.generate_span_id()
            trace.tries.append(Try(trace.current, number, replica, began_ns))

    # Making spans

    def _make(self, call: Call, settled: Settled, trace: Trace) -> None:
        asked, ids = call.asked, self._ids
        about: Attributes = {
            "gen_ai.operation.name": OPERATIONS[asked.endpoint],
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": asked.model[:TEXT_MOST],
            "gen_ai.request.stream": asked.stream,
        }
        if asked.max_tokens > 0:
            about["gen_ai.request.max_tokens"] = asked.max_tokens
        if trace.parent is None:
            ids.trace_id = trace.trace_id
        ids.span_id = trace.span_id
        server = self._tracer.start_span(
            f"POST {asked.path}",
            _below(trace.parent),
            SpanKind.SERVER,
            about | self._server_attributes(call, settled),
            start_time=self._epoch_ns + call.entered_ns,
        )
        error = _error(settled)
        if error:
            server.set_attribute("error.type", error)
            if settled.outcome == "failed" and settled.http_code >= 500:
                server.set_status(Status(StatusCode.ERROR, error))
        below = set_span_in_context(server)
        waited_ns = call.arrived_ns
        for attempt in trace.tries:
            if attempt.number:
                self._span("queue", below, waited_ns, attempt.began_ns)
            self._client_span(call, settled, attempt, below, about)
            waited_ns = attempt.ended_ns if attempt.ended_ns >= 0 else call.settled_ns
        if not trace.tries or settled.outcome == "shed":
            self._span("queue", below, waited_ns, call.settled_ns)
        if call.first_ns >= 0:
            server.add_event("first_token", timestamp=self._epoch_ns + call.first_ns)
        if asked.stream and call.last_ns >= 0:
            server.add_event("stream_end", timestamp=self._epoch_ns + call.last_ns)
        server.end(self._epoch_ns + call.settled_ns)
        self._made += 1

    def _span(self, name: str, below: Context, began_ns: int, ended_ns: int) -> None:
        span = self._tracer.start_span(
            name, below, SpanKind.INTERNAL, start_time=self._epoch_ns + began_ns
        )
        span.end(self._epoch_ns + max(began_ns, ended_ns))
        self._made += 1

    def _client_span(
        self, call: Call, settled: Settled, attempt: Try, below: Context, about: Attributes
    ) -> None:
        url = urlsplit(self._replica_url(attempt.replica))
        more: Attributes = {"twinkeel.replica": attempt.replica, "twinkeel.try": attempt.number}
        if url.hostname:
            more["server.address"] = url.hostname
            if url.port:
                more["server.port"] = url.port
        self._ids.span_id = attempt.span_id
        span = self._tracer.start_span(
            f"{OPERATIONS[call.asked.endpoint]} {call.asked.model[:TEXT_MOST]}",
            below,
            SpanKind.CLIENT,
            about | more,
            start_time=self._epoch_ns + attempt.began_ns,
        )
        ended_ns = attempt.ended_ns
        if ended_ns < 0:  # with its last byte, or cut off with the request
            if settled.outcome in ("answered", "degraded"):
                ended_ns = call.last_ns
            else:
                ended_ns, attempt.error = call.settled_ns, settled.why or settled.outcome
        if attempt.first_ns >= 0:
            span.add_event("first_token", timestamp=self._epoch_ns + attempt.first_ns)
            if call.asked.stream:
                span.add_event("stream_end", timestamp=self._epoch_ns + ended_ns)
        if attempt.error:
            span.set_attribute("error.type", attempt.error)
            if attempt.error != "client":  # whose leaving is no fault
                span.set_status(Status(StatusCode.ERROR, attempt.error))
        span.end(self._epoch_ns + max(ended_ns, attempt.began_ns))
        self._made += 1

    def _own_span(self, own: OwnStep, chain: ChainTrace, began_ns: int) -> None:
        about: Attributes = {
            "twinkeel.chain.id": own.chain[:TEXT_MOST],
            "twinkeel.chain.step": own.step[:TEXT_MOST],
            "twinkeel.outcome": own.outcome,
            "twinkeel.line": own.line[:TEXT_MOST],
        }
        if own.checkpoint:
            about["twinkeel.checkpoint_id"] = own.checkpoint
        for name, value in own.attributes.items():
            if value is not None:
                about[f"twinkeel.result.{name}"] = value
        span = self._tracer.start_span(
            f"step {own.step}"[:TEXT_MOST], _below(chain.parent), SpanKind.INTERNAL, about,
            start_time=self._epoch_ns + began_ns,
        )  # fmt: skip
        if own.outcome != "done":
            span.set_attribute("error.type", own.outcome)
            span.set_status(Status(StatusCode.ERROR, own.outcome))
        span.end(self._epoch_ns + began_ns + own.took_ns)
        self._made += 1

    def _chain_span(self, chain: ChainTrace) -> None:
        """The span above all of a chain's steps, once."""
        if chain.told or not chain.steps:
            return
        chain.told = True
        if not self._has_room(1):
            return
        about: Attributes = {
            "twinkeel.chain.id": chain.chain[:TEXT_MOST],
            "twinkeel.line": chain.line[:TEXT_MOST],
            "twinkeel.chain.steps": chain.steps,
        }
        if chain.why:
            about["twinkeel.why"] = chain.why
        self._ids.trace_id, self._ids.span_id = chain.trace_id, chain.root_id
        span = self._tracer.start_span(
            f"chain {chain.chain}"[:TEXT_MOST], _below(None), SpanKind.INTERNAL, about,
            start_time=self._epoch_ns + chain.began_ns,
        )  # fmt: skip
        span.end(self._epoch_ns + chain.ended_ns)
        self._made += 1

    def _server_attributes(self, call: Call, settled: Settled) -> Attributes:
        asked = call.asked
        found: Attributes = {
            "http.request.method": "POST",
            "url.path": asked.path,
            "http.response.status_code": _status(call, settled),
            "server.address": self._host,
            "server.port": self._port,
            "twinkeel.request_id": call.name[:TEXT_MOST],
            "twinkeel.request": call.request,
            "twinkeel.outcome": settled.outcome,
            "twinkeel.tier": settled.tier or call.tier,
            "twinkeel.sla": asked.sla,
            "twinkeel.line": asked.line[:TEXT_MOST],
            "twinkeel.tries": call.tries,
        }
        if settled.why:
            found["twinkeel.why"] = settled.why
        if settled.outcome == "degraded":
            found["twinkeel.degraded"] = settled.why
        if call.replica >= 0:
            found["twinkeel.replica"] = call.replica
        if asked.chain:
            found["twinkeel.chain.id"] = asked.chain[:TEXT_MOST]
            found["twinkeel.chain.step"] = asked.step[:TEXT_MOST]
            if settled.left_ns >= 0:
                found["twinkeel.chain.left_ms"] = settled.left_ns / 1e6
        if settled.checkpoint:
            found["twinkeel.checkpoint_id"] = settled.checkpoint
        if settled.verification:
            found["twinkeel.verification_status"] = settled.verification
        if settled.confidence_permille >= 0:
            found["twinkeel.confidence_score"] = settled.confidence_permille / 1000
        if call.prompt_tokens >= 0:
            found["gen_ai.usage.input_tokens"] = call.prompt_tokens
            found["gen_ai.usage.output_tokens"] = call.output_tokens
            found["gen_ai.usage.cache_read.input_tokens"] = call.cached_tokens
        if call.finish_reason:
            found["gen_ai.response.finish_reasons"] = (call.finish_reason,)
        if asked.stream and call.first_ns >= 0:
            found["gen_ai.response.time_to_first_chunk"] = (call.first_ns - call.entered_ns) / 1e9
        for name, ns in known(call.hops()):
            found[f"twinkeel.hop.{name}_ms"] = ns / 1e6
        return found


class _Ids(IdGenerator):
    """Random ids, or those that were given away before the span was made."""

    def __init__(self) -> None:
        self._random = SystemRandom()
        self.trace_id = 0
        """Of the next trace; 0: a random one."""
        self.span_id = 0

    def generate_trace_id(self) -> int:
        given, self.trace_id = self.trace_id, 0
        return given or self._random.randrange(1, 1 << 128)

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, 0
        return given or self._random.randrange(1, 1 << 64)


class _Counted(SpanExporter):
    """Exports, and counts what became of it. It is called in the processor's thread only."""

    def __init__(self, inner: OTLPSpanExporter) -> None:
        self._inner = inner
        self._closed = False
        self.sent = 0
        self.failed = 0

    @property
    def taken(self) -> int:
        """Spans that do not wait any more."""
        return self.sent + self.failed

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception:  # counted, and the next batch may fare better
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def _end_try(trace: Trace, replica: int, now_ns: int, error: str) -> None:
    """The last try at this replica that has not ended is over."""
    for attempt in reversed(trace.tries):
        if attempt.replica == replica and attempt.ended_ns < 0:
            attempt.ended_ns = now_ns
            attempt.error = error
            return


def _parsed(traceparent: str) -> tuple[SpanContext | None, bool]:
    """The caller's span, and whether it is sampled; None: the header means nothing."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (traceparent[:2] == "00" and len(traceparent) != 55):
        return None, False
    sampled = int(found[3], 16) & 1 == 1
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return SpanContext(int(found[1], 16), int(found[2], 16), True, flags), sampled


def _stepped(chain: ChainTrace, ended_ns: int, left_ns: int, why: str) -> None:
    """A step of it is over, with so much left of its budget; -1: not known."""
    chain.steps += 1
    if ended_ns >= chain.ended_ns:
        chain.ended_ns, chain.why = ended_ns, why
    if left_ns >= 0:
        chain.due_ns = ended_ns + min(left_ns, QUIET_NS)
    elif chain.due_ns < ended_ns:
        chain.due_ns = ended_ns + QUIET_NS


def _told(parent: SpanContext) -> str:
    """The caller's own context, or a chain's that is not traced."""
    return f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{parent.trace_flags:02x}"


def _below(parent: SpanContext | None) -> Context:
    return set_span_in_context(NonRecordingSpan(parent or SpanContext(0, 0, False)))


def _error(settled: Settled) -> str:
    return settled.why or settled.outcome if settled.outcome in ("failed", "shed") else ""


def _status(call: Call, settled: Settled) -> int:
    """What the caller saw: a stream that has begun is a 200, whatever happens to it."""
    return 200 if call.committed else call.served_status or settled.http_code


def _endpoint(otlp: str) -> str:
    """The full address, of a collector's or of its traces'."""
    otlp = otlp.rstrip("/")
    return otlp if otlp.endswith(PATH) else otlp + PATH


def _version() -> str:
    try:
        return version("twinkeel")
    except PackageNotFoundError:
        return "unknown"
