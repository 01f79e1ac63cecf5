"""HTTP to the gateway: blocking with the standard library, on an event loop with aiohttp, and what
is told it best-effort of the steps that it does not see."""

from __future__ import annotations

import contextlib
import http.client
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from controller.chains.asking import ANSWER_BYTES_MOST, Ask, Reply, Unreachable
from controller.chains.core import ChainError

if TYPE_CHECKING:
    import ssl


REPORTS_MOST = 64
"""Waiting to be told; more are left out."""
REPORT_S = 1.0
FLUSH_S = 0.5
"""How long the end of a run waits for what is still to be told."""


class Gateway(NamedTuple):
    """Where the gateway is."""

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def at(cls, url: str) -> Gateway:
        """From its URL.

        Raises:
            ChainError: it is none.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChainError(f"the gateway is {url!r}: give its URL, as http://127.0.0.1:8080")
        port = port or (443 if parts.scheme == "https" else 80)
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url, parts.scheme, parts.hostname, port, path)


class Exchange:
    """One request and its answer, blocking; ``abort`` ends it from another thread."""

    def __init__(self, gateway: Gateway, tls: ssl.SSLContext | None = None) -> None:
        self._gateway = gateway
        self._tls = tls
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = False

    def send(self, ask: Ask) -> Reply | Unreachable:
        gateway, timeout_s = self._gateway, max(0.001, ask.left_ns / 1e9)
        if gateway.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                gateway.host, gateway.port, timeout=timeout_s, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=timeout_s)
        self._connection = connection
        try:
            with contextlib.closing(connection):
                connection.connect()
                if self._aborted:
                    return Unreachable("it was ended")
                # Bytes: a str would go out as Latin-1, and names may be anything.
                headers = {name: value.encode() for name, value in ask.headers.items()}
                connection.request("POST", gateway.path + ask.path, ask.body, headers)
                answer = connection.getresponse()
                body = answer.read(ANSWER_BYTES_MOST + 1)
        except (OSError, http.client.HTTPException) as error:
            return Unreachable(f"{gateway.url}: {error or type(error).__name__}")
        if answer.length and len(body) <= ANSWER_BYTES_MOST:
            return Unreachable(f"{gateway.url}: the answer broke off")
        if len(body) > ANSWER_BYTES_MOST:
            return Unreachable(f"{gateway.url}: an answer of more than {ANSWER_BYTES_MOST} bytes")
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, body)

    def abort(self) -> None:
        """The gateway sees that its caller has gone, and stops the model."""
        self._aborted = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


async def exchange(session: Any, gateway: Gateway, ask: Ask) -> Reply | Unreachable:
    """The same on an event loop; a cancelled one closes its connection."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=max(0.001, ask.left_ns / 1e9))
    url = f"{gateway.scheme}://{_host(gateway)}:{gateway.port}{gateway.path}{ask.path}"
    try:
        async with session.post(
            url, data=ask.body, headers=ask.headers, timeout=timeout, allow_redirects=False
        ) as answer:
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > ANSWER_BYTES_MOST:
                    return Unreachable(f"{url}: an answer of more than {ANSWER_BYTES_MOST} bytes")
            headers = {k.lower(): v for k, v in answer.headers.items()}
            return Reply(answer.status, headers, bytes(body))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return Unreachable(f"{url}: {error or type(error).__name__}")


class Reporter:
    """Tells the gateway of steps that it does not see, so that a chain's waterfall is whole.

    Best-effort: in a thread of its own, nothing waits for it but the run's end, and that for half a
    second at most. ``left_out`` counts what was not told.
    """

    def __init__(self, gateway: Gateway, chain: str, headers: dict[str, str]) -> None:
        self._gateway = gateway
        self._path = f"/v1/chains/{quote(chain, safe='')}/steps"
        self._headers = headers
        self._queue: queue.Queue[tuple[dict[str, str], int, dict[str, Any]] | None]
        self._queue = queue.Queue(REPORTS_MOST)
        self._thread: threading.Thread | None = None
        self.told = self.left_out = 0

    def tell(self, headers: dict[str, str], began_ns: int, report: dict[str, Any]) -> None:
        """``began_ns``: of the step, monotonic; told as how long ago it was."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chain-reports", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((headers, began_ns, report))
        except queue.Full:
            self.left_out += 1

    def close(self, left_s: float) -> None:
        """Wait for what is still to be told, but not past the chain's own time."""
        if self._thread is None:
            return
        while True:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
                break
            with contextlib.suppress(queue.Empty):  # else its thread would wait for ever
                self._queue.get_nowait()
                self.left_out += 1
        self._thread.join(min(FLUSH_S, left_s))

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            headers, began_ns, report = one
            report["began_ago_ms"] = (time.monotonic_ns() - began_ns) / 1e6
            body = msgspec.json.encode(report)
            ask = Ask(self._path, {**self._headers, **headers}, body, int(REPORT_S * 1e9))
            reply = Exchange(self._gateway).send(ask)
            good = isinstance(reply, Reply) and reply.status < 300
            self.told += good
            self.left_out += not good


def _host(gateway: Gateway) -> str:
    return f"[{gateway.host}]" if ":" in gateway.host else gateway.host
