"""The server: routes, requests in flight, and how it goes away."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

import msgspec
from aiohttp import web

from twin.dice import Dice
from twin.engine import Sequence, UnfitError
from twin.fleet import fleet_of
from twin.serve import faults
from twin.serve.answers import ChatShape, CompletionShape, Times, Usage, embeddings, piece_of
from twin.serve.asking import Reader, Refusal
from twin.serve.engine import LiveEngine
from twin.serve.metrics import ServerMetrics
from twin.serve.replies import Generation, Part
from twin.serve.wire import TEXT, Connection, Dates, Sent
from twin.serve.words import certainty_of, codes_of, key_of, length_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiohttp import StreamReader
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.web_protocol import RequestHandler

    from twin.fleet import ReplicaSpec
    from twin.serve.answers import Piece
    from twin.serve.asking import Asked
    from twin.serve.faults import Fault
    from twin.serve.steps import StepWriter

VLLM_VERSION = "0.32.0"
BODY_BYTES_MOST = 64 * 1024 * 1024
SHORTEST, LONGEST = 16, 400
"""Answers without a limit, in tokens."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a replica is served; 0 and empty: as the profile says."""

    profile: str
    """Name or path."""
    model: str = ""
    """The name that it is served under; empty: the model's own."""
    version: str = ""
    """Of the model."""
    kv_blocks: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    scheduling_policy: Literal["", "fcfs", "priority"] = ""
    max_num_queued_reqs: int = 0
    """Requests waiting and running above which more get 503; 0: no limit."""
    request_id_headers: bool = False
    """Answers carry the caller's ``X-Request-Id``."""
    keep_alive_s: float = 5.0
    """How long an idle connection is kept; vLLM's default is short."""
    seed: int = 0
    """Of answers and of who is struck by faults."""
    steps: str = ""
    """Folder for step records, as the plug-in for vLLM writes them; empty: none."""
    fault: str = ""
    """Wrong with it from the beginning, as ``POST /twin/fault`` takes it; empty: nothing."""


def spec_of(options: Options) -> ReplicaSpec:
    """The replica that is served.

    Raises:
        FileError, FleetError, ValueError: a profile, a size or a fault that cannot be.
    """
    if options.fault:
        faults.read(options.fault)
    (spec,) = fleet_of(
        [(options.profile, 1)],
        max_model_len=options.max_model_len,
        kv_blocks_given=options.kv_blocks,
    )
    settings = spec.settings
    batched = options.max_num_batched_tokens or settings.max_num_batched_tokens
    seqs = options.max_num_seqs or min(settings.max_num_seqs, batched)
    changed = replace(
        settings,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        scheduling_policy=options.scheduling_policy or settings.scheduling_policy,
    )
    return replace(spec, settings=changed)


class Server:
    """One replica behind HTTP. ``start`` it, then ``stop`` it."""

    def __init__(self, options: Options, spec: ReplicaSpec) -> None:
        self._options = options
        self._spec = spec
        self._pooling = spec.profile.task == "pooling"
        self.model = options.model or spec.profile.model
        self._created = int(time())
        self._reader = Reader(self.model, spec.settings.max_model_len, spec.model.hidden)
        self._dice = Dice(options.seed, "faults")
        self._dates = Dates()
        self._kept, self._closed = Sent(True), Sent(False)
        self._fault: Fault | None = None
        self._fault_ends: asyncio.TimerHandle | None = None
        self._compiled: set[str] = set()
        """With ``cold``: what prompts have asked for."""
        self._compiles: asyncio.TimerHandle | None = None
        """Until then the engine stands still for it."""
        self._draining = False
        self._open: dict[int, Generation] = {}
        self._busy = 0
        """Requests in this server, of any kind."""
        self._serial = self._requests = self._aborted = self._finished = 0
        self._idle = asyncio.Event()
        self._idle.set()
        loop = asyncio.get_running_loop()
        self._writer = _writer(options, spec, self.model)
        self._live = LiveEngine(
            loop, spec.settings, spec.cost, spec.profile.overheads, self._writer
        )
        steps = ("", "") if self._writer is None else (str(self._writer.path), self._writer.life)
        self._metrics = ServerMetrics(self.model, self._live, *steps)
        self._routes = self._make_routes()
        self._runner: web.ServerRunner | None = None
        self.url = ""

    def _make_routes(self) -> dict[str, dict[str, Callable[[web.BaseRequest], Awaitable[Sent]]]]:
        routes: dict[str, dict[str, Callable[[web.BaseRequest], Awaitable[Sent]]]] = {
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._show_metrics},
            "/v1/models": {"GET": self._models},
            "/twin/state": {"GET": self._state},
            "/twin/fault": {"POST": self._set_fault, "DELETE": self._end_fault},
        }
        if self._pooling:
            routes["/v1/embeddings"] = {"POST": self._embeddings}
        else:
            routes["/v1/chat/completions"] = {"POST": self._chat}
            routes["/v1/completions"] = {"POST": self._completion}
        return routes

    # ---- life ----

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0: any. ``url`` tells where."""
        server = web.Server(
            self._handle,
            request_factory=_make_request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._options.keep_alive_s,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=2048)
        await site.start()
        bound = self._runner.addresses[0]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{bound[1]}"
        if self._options.fault:
            self._begin_fault(faults.read(self._options.fault))

    async def stop(self, timeout_s: float = 0.0) -> None:
        """Go as vLLM goes on SIGTERM.

        Requests in flight have ``timeout_s`` to finish, and are then answered with finish reason
        "abort". Meanwhile new ones get a 500, and ``/health`` says 200.
        """
        self._draining = True
        if timeout_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        for generation in list(self._open.values()):
            generation.cut_short()
        for timer in (self._fault_ends, self._compiles):
            if timer is not None:
                timer.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        self._live.close()
        if self._writer is not None:
            self._writer.close()

    # ---- requests ----

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        methods = self._routes.get(request.path)
        try:
            if methods is None:
                raise Refusal(404, "Not Found", "NotFoundError")
            handler = methods.get(request.method)
            if handler is None:
                raise Refusal(405, "Method Not Allowed", "Method Not Allowed")
            self._busy += 1
            self._idle.clear()
            try:
                return await handler(request)
            finally:
                self._busy -= 1
                if not self._busy:
                    self._idle.set()
        except Refusal as refusal:
            return self._answer(request, refusal.status, refusal.body)

    def _answer(
        self, request: web.BaseRequest, status: int, body: bytes, content_type: bytes | None = None
    ) -> Sent:
        connection = Connection(request, self._dates, self._echo(request))
        if content_type is None:
            connection.answer(status, body)
        else:
            connection.answer(status, body, content_type)
        return self._kept if connection.kept else self._closed

    def _echo(self, request: web.BaseRequest) -> bytes:
        if not self._options.request_id_headers:
            return b""
        given = request.headers.get("X-Request-Id") or uuid4().hex
        return f"x-request-id: {given}\r\n".encode()

    async def _chat(self, request: web.BaseRequest) -> Sent:
        return await self._generate(request, self._reader.chat)

    async def _completion(self, request: web.BaseRequest) -> Sent:
        return await self._generate(request, self._reader.completion)

    async def _admit(
        self, request: web.BaseRequest, read: Callable[[bytes], Asked]
    ) -> tuple[Asked, Fault | None]:
        """Read a request, unless a fault or the server's state says no."""
        if "json" not in request.headers.get("Content-Type", "application/json"):
            message = "Unsupported Media Type: Only 'application/json' is allowed"
            raise Refusal(415, message, "Unsupported Media Type")
        raw = await request.read()
        self._requests += 1
        fault = self._strikes()
        if fault is not None:
            await self._strike(fault)
        asked = read(raw)
        if fault is not None and fault.kind == "oom":
            _run_out_of_memory(max(asked.prompt_tokens), fault)
        if self._draining:
            message = "cannot schedule new futures after shutdown"
            raise Refusal(500, message, "InternalServerError")
        most = self._options.max_num_queued_reqs
        if most and self._live.held >= most:
            self._metrics.rejections += 1
            message = f"The server holds {self._live.held} requests: its limit is {most}"
            raise Refusal(503, message, "ServiceUnavailableError")
        if fault is not None and fault.kind == "cold":
            self._compile(asked, fault)
        return asked, fault

    async def _generate(self, request: web.BaseRequest, read: Callable[[bytes], Asked]) -> Sent:
        live = self._live
        entered_ns = live.now_ns
        asked, fault = await self._admit(request, read)
        if len(asked.prompts) > 1:
            return await self._several(request, asked, fault, entered_ns)
        key = key_of(self._options.seed, self.model, asked.prompts[0])
        seq = self._sequence(asked, 0, key, fault)
        shape_of = ChatShape if asked.kind == "chat" else CompletionShape
        name = _name(request)
        shape = shape_of(name, int(time()), self.model)
        connection = Connection(request, self._dates, self._echo(request))

        def over(generation: Generation, reason: str) -> None:
            del self._open[seq.id]
            running = live.abort(seq)
            if reason and reason != "abort":
                self._finished += 1
                self._metrics.finished(
                    reason, seq.prompt_tokens, seq.outputs, generation.times(), entered_ns,
                    live.now_ns,
                )  # fmt: skip
            elif running:
                self._aborted += 1

        done = asyncio.get_running_loop().create_future()
        generation = Generation(asked, shape, key, connection, fault, done, over)
        seq.data = generation
        self._submit(seq, f"chatcmpl-{name}" if asked.kind == "chat" else f"cmpl-{name}-0")
        self._open[seq.id] = generation
        generation.begin(seq, live.in_s)
        try:
            await done
        except asyncio.CancelledError:  # the caller has gone
            if seq.id in self._open:
                over(generation, "")
            raise
        return self._kept if connection.kept and not generation.broken else self._closed

    async def _embeddings(self, request: web.BaseRequest) -> Sent:
        live = self._live
        entered_ns = live.now_ns
        asked, fault = await self._admit(request, self._reader.embedding)
        keys = self._keys(asked)
        name = _name(request)
        seqs = await self._whole(asked, keys, f"embd-{name}")
        for seq in seqs:
            times = Times(seq.arrival_ns, seq.scheduled_ns, -1, seq.data.last_ns)
            self._metrics.finished("stop", seq.prompt_tokens, 0, times, entered_ns, live.now_ns)
        body = embeddings(
            name, int(time()), self.model, keys, asked.dimensions, asked.base64,
            sum(asked.prompt_tokens),
        )  # fmt: skip
        return self._answer(request, 200, _marred(body, fault))

    async def _several(
        self, request: web.BaseRequest, asked: Asked, fault: Fault | None, entered_ns: int
    ) -> Sent:
        """A completion of several prompts, whole."""
        keys = self._keys(asked)
        name = _name(request)
        seqs = await self._whole(asked, keys, f"cmpl-{name}")
        shape = CompletionShape(name, int(time()), self.model)
        answers: list[tuple[Piece, bytes]] = []
        for seq, key in zip(seqs, keys, strict=True):
            part: Part = seq.data
            times = Times(seq.arrival_ns, seq.scheduled_ns, part.first_ns, part.last_ns)
            reason = "stop" if seq.eos else "length"
            self._metrics.finished(
                reason, seq.prompt_tokens, seq.outputs, times, entered_ns, self._live.now_ns
            )
            codes = codes_of(key, seq.outputs)
            rows = certainty_of(key, seq.outputs) if asked.logprobs >= 0 else b""
            piece = piece_of(shape, codes, rows, 0, seq.outputs, asked.logprobs)
            answers.append((piece, b'"%b"' % reason.encode()))
        usage = Usage(
            sum(asked.prompt_tokens),
            sum(seq.outputs for seq in seqs),
            sum(seq.cached_tokens for seq in seqs),
        )
        return self._answer(request, 200, _marred(shape.several(answers, usage.json()), fault))

    def _keys(self, asked: Asked) -> list[bytes]:
        return [key_of(self._options.seed, self.model, prompt) for prompt in asked.prompts]

    async def _whole(self, asked: Asked, keys: list[bytes], name: str) -> list[Sequence]:
        """Run every prompt of a request to its end; each sequence's ``data`` is its ``Part``."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = len(keys)

        def over(part: Part) -> None:
            nonlocal left
            left -= 1
            if not left and not done.done():
                done.set_result(None)

        seqs: list[Sequence] = []
        now_ns = self._live.now_ns  # of all of them, however long the loop below takes
        try:
            for index, key in enumerate(keys):
                seq = self._sequence(asked, index, key, None)
                seq.data = Part(over)
                self._submit(seq, f"{name}-{index}", now_ns)
                seqs.append(seq)
            await done
        except BaseException:
            self._aborted += sum([self._live.abort(seq) for seq in seqs])
            raise
        self._finished += 1
        return seqs

    def _submit(self, seq: Sequence, name: str, at_ns: int | None = None) -> None:
        try:
            self._live.submit(seq, name, at_ns)
        except UnfitError as error:
            raise Refusal(400, str(error), param="input_tokens") from error

    def _sequence(self, asked: Asked, index: int, key: bytes, fault: Fault | None) -> Sequence:
        """What the engine is given for one prompt."""
        prompt, tokens = asked.prompts[index], asked.prompt_tokens[index]
        most = self._spec.settings.max_model_len
        if asked.ignore_eos:
            outputs = asked.max_tokens or most
        else:
            outputs = max(length_of(key, SHORTEST, LONGEST), asked.min_tokens)
        if fault is not None and fault.kind in faults.HOLLOW:
            outputs = 1
        block = self._spec.settings.block_tokens
        size = block * 4
        blocks = min(len(prompt) // size, tokens // block)
        prefix = tuple(
            [hash(prompt[start : start + size]) for start in range(0, blocks * size, size)]
        )
        self._serial += 1
        return Sequence(
            self._serial, tokens, outputs, asked.max_tokens, asked.priority, self._pooling,
            prefix, block if prefix else 0,
        )  # fmt: skip

    # ---- faults ----

    def _strikes(self) -> Fault | None:
        """The fault that strikes this request."""
        fault = self._fault
        if fault is None or fault.of_engine:
            return None
        return fault if self._dice.uniform(self._requests) < fault.share else None

    async def _strike(self, fault: Fault) -> None:
        """What happens before the request is even looked at."""
        if fault.kind == "latency":
            await asyncio.sleep(fault.delay_s)
        elif fault.kind == "hang":
            await asyncio.get_running_loop().create_future()
        elif fault.kind == "http_500":
            raise Refusal(500, "EngineCore encountered an issue.", "InternalServerError")
        elif fault.kind == "http_503":
            raise Refusal(503, "The server is overloaded.", "ServiceUnavailableError")
        elif fault.kind == "http_400":
            raise Refusal(400, "A fault of the twin: this request is refused.")

    def _compile(self, asked: Asked, fault: Fault) -> None:
        """What nobody has asked for before holds up the engine, once: whoever brings two such
        things waits as long as with one, and one that comes meanwhile begins after the other."""
        wanted = {"prompt", "logprobs"} if asked.logprobs >= 0 else {"prompt"}
        if wanted <= self._compiled:
            return
        self._compiled |= wanted
        self._live.stop_clock()
        loop = asyncio.get_running_loop()
        begins_s = loop.time()
        if self._compiles is not None:
            self._compiles.cancel()
            begins_s = max(begins_s, self._compiles.when())
        self._compiles = loop.call_at(begins_s + fault.delay_s, self._live.start_clock)

    async def _set_fault(self, request: web.BaseRequest) -> Sent:
        try:
            fault = faults.read(await request.read())
        except msgspec.DecodeError as error:
            raise Refusal(400, str(error)) from error
        self._begin_fault(fault)
        return self._answer(request, 200, msgspec.json.encode(fault))

    async def _end_fault(self, request: web.BaseRequest) -> Sent:
        self._change_fault(None)
        return self._answer(request, 200, b"{}")

    def _begin_fault(self, fault: Fault) -> None:
        self._change_fault(fault)
        if fault.for_s is not None:
            loop = asyncio.get_running_loop()
            self._fault_ends = loop.call_later(fault.for_s, self._change_fault, None)

    def _change_fault(self, fault: Fault | None) -> None:
        """Also tells the engine, where it is one of the engine."""
        if self._fault_ends is not None:
            self._fault_ends.cancel()
            self._fault_ends = None
        if self._compiles is not None:
            self._compiles.cancel()
            self._compiles = None
            self._live.start_clock()
        self._compiled.clear()
        before, self._fault = self._fault, fault
        if before is not None and before.of_engine:
            self._live.start_clock()
            if before.kind == "slow":
                self._live.slow(1.0)
        if fault is not None and fault.of_engine:
            if fault.kind == "slow":
                self._live.slow(fault.factor)
            else:
                self._live.stop_clock()

    # ---- the rest ----

    async def _health(self, request: web.BaseRequest) -> Sent:
        return self._answer(request, 200, b"")

    async def _version(self, request: web.BaseRequest) -> Sent:
        return self._answer(request, 200, msgspec.json.encode({"version": VLLM_VERSION}))

    async def _show_metrics(self, request: web.BaseRequest) -> Sent:
        return self._answer(request, 200, self._metrics.render(self._pooling), TEXT)

    async def _models(self, request: web.BaseRequest) -> Sent:
        card = {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._spec.profile.model,
            "parent": None,
            "max_model_len": self._spec.settings.max_model_len,
            "permission": [],
            "twinkeel_profile": self._options.profile,
            "twinkeel_version": self._options.version,
        }
        return self._answer(request, 200, msgspec.json.encode({"object": "list", "data": [card]}))

    async def _state(self, request: web.BaseRequest) -> Sent:
        load = self._live.load()
        state = {
            "running": load.running,
            "waiting": load.waiting,
            "held": self._live.held,
            "requests": self._requests,
            "aborted": self._aborted,
            "finished": self._finished,
            "fault": None if self._fault is None else self._fault.kind,
        }
        return self._answer(request, 200, msgspec.json.encode(state))


def _run_out_of_memory(prompt_tokens: int, fault: Fault) -> None:
    """End this process, if the prompt is long enough, as the kernel would."""
    if prompt_tokens >= fault.prompt_tokens_from:
        print(f"out of memory: a prompt of {prompt_tokens} tokens", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def _writer(options: Options, spec: ReplicaSpec, model: str) -> StepWriter | None:
    if not options.steps:
        return None
    # With it come the traces' libraries, which a twin without records does not need.
    from twin.serve.steps import StepWriter

    return StepWriter(Path(options.steps), spec, model, VLLM_VERSION)


def _name(request: web.BaseRequest) -> str:
    """The caller's name for the request, or one of our own."""
    return request.headers.get("X-Request-Id") or uuid4().hex


def _marred(body: bytes, fault: Fault | None) -> bytes:
    """An embedding has no middle: a fault spoils its body."""
    if fault is None:
        return body
    if fault.kind == "blank":
        return b""
    if fault.kind in ("empty", "null"):
        return b'{"object":"list","data":[]}'
    return body[: len(body) // 2] if fault.kind == "truncated" else body


def _make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    """aiohttp's own, with room for long prompts."""
    return web.BaseRequest(
        message, payload, protocol, writer, task, asyncio.get_running_loop(),
        client_max_size=BODY_BYTES_MOST,
    )  # fmt: skip


async def serve(
    options: Options,
    host: str,
    port: int,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    shutdown_timeout_s: float = 0.0,
) -> None:
    """Serve until ``stop`` is set; ``ready`` is given the URL."""
    server = Server(options, spec_of(options))
    await server.start(host, port)
    gc.collect()
    gc.freeze()
    ready(server.url)
    await stop.wait()
    await server.stop(shutdown_timeout_s)


@asynccontextmanager
async def serving(
    profile: str = "h100-sxm/qwen3-8b",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    **options: object,
) -> AsyncIterator[str]:
    """A server in this event loop; gives its URL."""
    chosen = Options(profile, **options)  # type: ignore[arg-type]
    server = Server(chosen, spec_of(chosen))
    await server.start(host, port)
    try:
        yield server.url
    finally:
        await server.stop()
