"""The controller's core on ephemeral ports, before servers whose every byte a test decides.

No timers of watching or scraping run: a test says which server is up. When a core is closed, its
books must be empty and every request that arrived must have exactly one outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import tempfile
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

from controller.config import Features, Limits, Settings, Upstream
from controller.driver import Clock, Driver
from controller.errands import Errands
from controller.gateway.answers import Answers
from controller.gateway.app import Gateway
from controller.gateway.chains import KnownChains
from controller.http import listen, public_options
from controller.http import session as make_session
from controller.listener import Listener
from controller.store.answers import KeptAnswers
from controller.store.chains import ChainStore
from controller.store.checkpoints import SqliteCheckpoints
from controller.upstream.embeddings import Embeddings
from controller.upstream.replica import Replica
from policy.audit import replay
from policy.compose import build_policy
from policy.decisions import Refused, Settled
from policy.events import Arrived, ReplicaDown, Warmed
from policy.files import code_hash
from policy.log import FullLog, Header, read_segment
from policy.parameters import canonical
from tests.policy_support import parameters as made_parameters
from tests.policy_support import up as announced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from controller.call import Call
    from controller.gateway.keys import Keys
    from policy.events import Event
    from policy.log import Record

    Script = Callable[["Question", "Line"], Awaitable[object]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


class Question(NamedTuple):
    """What came to a server."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document


class Line:
    """A server's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._chunked = False

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(
        self,
        status: int = 200,
        kind: str = "text/event-stream; charset=utf-8",
        length: int | None = None,
        more: str = "",
    ) -> None:
        """Status and headers; without a length the body comes in chunks."""
        self._chunked = length is None
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        text = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n{framing}\r\n{more}\r\n"
        await self.raw(text.encode())

    async def part(self, data: bytes) -> None:
        """Part of a body, in one write."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end(self) -> None:
        if self._chunked:
            await self.raw(b"0\r\n\r\n")

    async def whole(
        self, body: bytes | dict[str, Any], status: int = 200, kind: str = "application/json"
    ) -> None:
        """An answer in one piece."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.head(status, kind, len(data))
        await self.raw(data)

    async def stream(self, *events: bytes) -> None:
        """A whole stream, each event in a write of its own."""
        await self.head()
        for event in events:
            await self.part(event)
        await self.end()

    def reset(self) -> None:
        """Cut the connection so that the other side gets an error."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()

    def close(self) -> None:
        self._writer.close()

    async def gone(self, within_s: float = 5.0) -> None:
        """Until the other side has closed the connection."""
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while await self._reader.read(65_536):
                    pass


class Server:
    """Answers each question by ``script``. What a script raises is kept in ``troubles``."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or good
        self.questions: list[Question] = []
        self.troubles: list[BaseException] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await self._server.wait_closed()
        while self._open:  # noqa: ASYNC110 - its tasks end on their own
            await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while not writer.is_closing():
                question = await _question(reader)
                self.questions.append(question)
                await self.script(question, Line(reader, writer))
        except (ConnectionError, RuntimeError, asyncio.IncompleteReadError):
            pass
        except Exception as trouble:
            self.troubles.append(trouble)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._open.discard(writer)


async def _question(reader: asyncio.StreamReader) -> Question:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in head[1:] if line]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Question(head[0].split(" ")[1], headers, body)


class Heard(Listener):
    """What listeners are told, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.outcomes: list[tuple[Call, Settled]] = []

    def arrived(self, call: Call) -> None:
        self.names.append("arrived")

    def dispatched(self, call: Call) -> None:
        self.names.append("dispatched")

    def first_token(self, call: Call) -> None:
        self.names.append("first_token")

    def settled(self, call: Call, settled: Settled) -> None:
        self.names.append("settled")
        self.outcomes.append((call, settled))


class Core:
    """Driver, gateway and what they need, running."""

    def __init__(
        self,
        driver: Driver,
        gateway: Gateway,
        log: _Kept,
        url: str,
        chains: ChainStore,
        answers: Answers,
    ) -> None:
        self.driver = driver
        self.gateway = gateway
        self.url = url
        self.chains = chains
        self.answers = answers
        self.heard = Heard()
        driver.listen(self.heard)
        self._log = log

    def up(self, number: int, **changes: Any) -> None:
        replica = self.driver.replicas[number]
        spec = announced(number, **({"models": ("m",), "name": replica.name} | changes))
        replica.up, replica.spec = True, spec
        self.driver.feed(spec)

    def down(self, number: int) -> None:
        self.driver.replicas[number].up = False
        self.driver.feed(ReplicaDown(number, "connection refused"))

    def records(self) -> list[Record]:
        return list(read_segment(self._log.data()).records)

    def events(self, kind: type[Event]) -> list[Any]:
        return [record.event for record in self.records() if type(record.event) is kind]

    def outcomes(self) -> list[Settled]:
        return [
            decision
            for record in self.records()
            for decision in record.decisions
            if isinstance(decision, Settled)
        ]

    async def until(self, true: Callable[[], object], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 - anything may be waited for
                await asyncio.sleep(0.002)

    async def check_books(self) -> None:
        """Nothing is left open, nothing was illegal, and each request has its one outcome."""
        driver = self.driver
        await self.until(lambda: not driver.open)
        await self.until(lambda: not any(each.attempts for each in driver.replicas.values()))
        assert driver.calls == {}
        assert [each.streams for each in driver.replicas.values()] == [0] * len(driver.replicas)
        assert not any(driver.streams.blocked.values())
        records = self.records()
        refused = [each for one in records for each in one.decisions if isinstance(each, Refused)]
        assert refused == []
        arrived = [one.event.request for one in records if isinstance(one.event, Arrived)]
        assert sorted(each.request for each in self.outcomes()) == arrived
        told = [settled.request for _, settled in self.heard.outcomes]
        assert sorted(told) == arrived
        assert replay([self._log.data()]) is None


class _Kept:
    """The log's only segment, in memory, encoded as it is live."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.log: FullLog | None = None

    def write(self, data: bytes, /) -> None:
        self.parts.append(data)

    def close(self) -> None:
        pass

    def data(self) -> bytes:
        assert self.log is not None
        self.log.flush()
        return b"".join(self.parts)


@contextlib.asynccontextmanager
async def core(
    *servers: Server,
    features: Features | None = None,
    limits: Limits | None = None,
    keys: Keys | None = None,
    policy: Mapping[str, Any] | None = None,
    models: tuple[str, ...] = ("m",),
    up: Mapping[str, Any] | None = None,
    checked: bool = True,
    embeddings: str | None = None,
) -> AsyncIterator[Core]:
    """Started servers with a controller before them, whose replicas are all up."""
    loop = asyncio.get_running_loop()
    loops_troubles: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: loops_troubles.append(context))
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(
            tuple(Upstream(server.url) for server in servers),
            features=features or Features(),
            limits=limits or Limits(),
            keys="some" if keys is not None else "",
        )
        chains = ChainStore(SqliteCheckpoints(folder / "checkpoints.sqlite"))
        stack.callback(chains.close)
        chosen = made_parameters(**(policy or {}))
        service = build_policy(chosen)
        kept, clock = _Kept(), Clock()
        header = Header(1, code_hash(), canonical(chosen), 0, 0, 0)
        kept.log = FullLog(header, service.snapshot, lambda _: kept, 1 << 40)
        session = await stack.enter_async_context(make_session())
        replicas = [Replica(n, each, session) for n, each in enumerate(settings.upstreams)]
        driver = Driver(settings, service, chosen, kept.log, replicas, clock)
        kept_answers = KeptAnswers(
            folder / "answers.sqlite", bytes_most=64 * 1024 * 1024, s_most=3600.0
        )
        stack.callback(kept_answers.close)
        vectors = None if embeddings is None else Embeddings(session, embeddings)
        answers = Answers(kept_answers, vectors)
        stack.push_async_callback(answers.close)
        errands = Errands(
            driver, driver.client, chains, answers, _unread, lambda replica: False, _warmed
        )
        stack.push_async_callback(driver.close)
        stack.push_async_callback(errands.close)
        driver.start(errands, lambda replica: None)
        gateway = Gateway(
            driver, b"k" * 32, answers, chains, KnownChains(driver, chains, False), keys
        )
        gateway.start()
        stack.push_async_callback(gateway.close)
        runner, door = await listen(
            gateway.handle, "127.0.0.1", 0, **public_options(settings.limits)
        )
        stack.push_async_callback(runner.cleanup)
        stack.callback(door.stop)
        running = Core(driver, gateway, kept, f"http://127.0.0.1:{door.port}", chains, answers)
        for replica in replicas:
            running.up(replica.id, models=models, **(up or {}))
        yield running
        if checked:
            await running.check_books()
    troubles = [trouble for server in servers for trouble in server.troubles]
    assert troubles == []
    if checked:
        assert loops_troubles == []


async def _unread(replica: Replica) -> None:
    return None


async def _warmed(replica: Replica) -> Warmed:
    return Warmed(replica.id, "v1")


class Got(NamedTuple):
    """What a caller got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document

    @property
    def events(self) -> list[bytes]:
        return [part + b"\n\n" for part in self.body.split(b"\n\n") if part]


async def post(
    url: str,
    document: bytes | dict[str, Any],
    path: str = CHAT,
    headers: Mapping[str, str] | None = None,
) -> Got:
    """Ask the controller, on a connection of its own."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session,
        session.post(f"{url}{path}", data=body, headers=headers) as answer,
    ):
        return Got(answer.status, answer.headers, await answer.read())


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Hi", **more}


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str | None, finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    """A chunk of a streamed chat."""
    said = {} if text is None else {"content": text}
    choice = {"index": index, "delta": said, "finish_reason": finish} | more
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


ROLE = event({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
USAGE = event({"id": "c", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"
STREAM = (ROLE, delta("Good "), delta("day"), delta(None, "stop"), USAGE, DONE)


def whole(text: str | None = "Good day", finish: str = "stop", **more: Any) -> dict[str, Any]:
    """A chat's answer in one piece."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "c",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    } | more


async def good(question: Question, line: Line) -> None:
    """As a healthy server answers."""
    document = question.document
    if question.path == EMBEDDINGS:
        await line.whole({"object": "list", "data": [{"index": 0, "embedding": [0.5, 1.0]}]})
    elif question.path == COMPLETIONS:
        await line.whole({"id": "c", "choices": [{"text": "Good day", "finish_reason": "stop"}]})
    elif document.get("stream") is True:
        await line.stream(*STREAM)
    else:
        await line.whole(whole())
