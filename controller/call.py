"""A request as the controller keeps it, from its first byte to its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from typing import NamedTuple

    from aiohttp import web

    from controller.gateway.asking import Asked
    from policy.decisions import Settled
    from policy.signals import Said
else:
    from typing import NamedTuple


class EngineTimes(NamedTuple):
    """What vLLM says of a request (``--enable-per-request-metrics``), in ns."""

    schedule_ns: int
    """In its waiting queue."""
    prefill_ns: int
    """Scheduled to first token."""
    decode_ns: int
    """First to last token."""


class Logprobs(NamedTuple):
    """Which logprobs a server is asked for, and which of them the caller gets."""

    added: dict[str, Any]
    """What is put into the request; empty: it is as the caller wrote it."""
    shown: int = -1
    """So many of each token's candidates; ``AS_IT_CAME`` or ``NOTHING``."""
    scored: bool = False
    """Whether what comes is a measure of the answer."""
    candidates: int = 0
    """How many the server lists for each token."""


AS_IT_CAME = -1
NOTHING = -2
AS_ASKED = Logprobs({})
"""No more than its caller wants."""


class Hops(NamedTuple):
    """Where a request's time went, in ns; -1: not known. Each is measured on its own."""

    gateway_ns: int
    """In this process: reading the request, sending it on, writing the answer."""
    queue_ns: int
    """In the policy's queue, earlier tries that failed included."""
    schedule_ns: int
    prefill_ns: int
    decode_ns: int
    network_ns: int
    """There and back, with the server's HTTP handling."""
    total_ns: int
    """From the request's headers to its last byte, in this process."""

    @property
    def rest_ns(self) -> int:
        """What none of them explains; -1 where one is not known."""
        parts = self[:6]
        return -1 if min(parts) < 0 else self.total_ns - sum(parts)


class Call:
    """An open request. Times are on the log's clock, in ns; -1: it has not come to that."""

    __slots__ = (
        "aborted", "arrived_ns", "asked", "attempt", "body", "cached_tokens", "committed",
        "contradiction", "dispatched_ns", "done", "engine", "entered_ns", "events_sent",
        "finish_reason", "first_ns", "gateway_ns", "kept", "last_ns", "last_sent_ns", "name",
        "network_ns", "output_tokens", "own", "policy", "prompt_tokens", "raw", "read_ns",
        "replica", "request", "response", "said", "sampled", "second", "sent_ns", "served_status",
        "settled", "settled_ns", "similarity", "span", "tail", "tier", "trace", "tries", "version",
        "wanted", "web",
    )  # fmt: skip

    def __init__(self, asked: Asked, name: str, entered_ns: int, request: web.BaseRequest) -> None:
        self.asked = asked
        self.name = name
        """``x-request-id``, the caller's or our own."""
        self.web = request
        self.request = -1
        """The policy's id of it: rising, unique in the log."""
        self.entered_ns = entered_ns
        """Its headers were read."""
        self.read_ns = entered_ns
        """All of it was here."""
        self.arrived_ns = -1
        """The policy was told."""
        self.dispatched_ns = -1
        """The last try began."""
        self.sent_ns = -1
        """The last try's bytes were handed to the socket."""
        self.first_ns = -1
        """The first token came back."""
        self.last_ns = -1
        """The last byte came back."""
        self.settled_ns = -1
        self.last_sent_ns = -1
        """When the caller was last sent anything."""
        self.gateway_ns = 0
        """Time in this process so far, waiting not included."""
        self.network_ns = -1
        """There and back with the server's HTTP handling: of a stream its own, until its headers
        came; else the usual time of these, or of an empty request."""
        self.replica = -1
        self.tier = self.policy = ""
        """Hash of the policy that sent its present try, in short; empty: none did."""
        self.tries = 0
        self._unanswered()
        self.committed = False
        """Headers have gone out: what goes wrong now is told in the stream."""
        self.response: web.StreamResponse | None = None
        self.settled: Settled | None = None
        self.own: asyncio.Task[None] | None = None
        """The task that its caller waits in."""
        self.aborted = False
        """A try that runs in that task is to end, and nothing else."""
        self.attempt: asyncio.Task[None] | None = None
        """Its present try: a task of its own, or ``own``."""
        self.second: asyncio.Task[None] | None = None
        self.done: asyncio.Future[None] | None = None
        self.trace = ""
        """The ``traceparent`` that its caller is told; empty: none."""
        self.sampled = False
        """Its texts are kept: a stream's answer is wanted in one piece, too."""
        self.span: Any = None
        """What telemetry keeps of it; None: it is not traced."""

    def _unanswered(self) -> None:
        """What is known of its answer: nothing yet."""
        self.version = ""
        """Of the model of the replica that the last try went to, or that made an answer that was
        kept; empty: not known."""
        self.prompt_tokens = -1
        self.cached_tokens = self.output_tokens = self.events_sent = 0
        self.engine: EngineTimes | None = None
        self.finish_reason = ""
        self.served_status = 0
        """HTTP status that a 4xx of the server is passed on with."""
        self.wanted = AS_ASKED
        """The logprobs of its present try."""
        self.contradiction = False
        self.said: Said | None = None
        """What it says, where a second run may be compared with it."""
        self.body = b""
        """All of it, where it is no stream."""
        self.kept = b""
        """A stream in one piece, where it becomes a chain's state."""
        self.tail: list[bytes] = []
        """Events held back until the outcome is known."""
        self.raw: list[bytes] = []
        """What was passed on of a stream, where its answer may be kept; without ``tail``."""
        self.similarity = 0.0
        """Between its question and that of the kept answer it gets; 0: it gets none."""

    def hops(self) -> Hops:
        """Where its time went, once it is over."""
        engine = self.engine or EngineTimes(-1, -1, -1)
        queue_ns = -1 if self.dispatched_ns < 0 else self.dispatched_ns - self.arrived_ns
        return Hops(
            self.gateway_ns, queue_ns, *engine, self.network_ns, self.settled_ns - self.entered_ns
        )
