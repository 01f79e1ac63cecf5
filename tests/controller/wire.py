"""HTTP on the wire: a relay that keeps every byte, and a reader for what it kept."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator


class Message(NamedTuple):
    """A request or an answer, as it was sent."""

    head: str
    """Its first line."""
    headers: dict[str, str]
    body: bytes
    """Without the framing of chunks."""


@dataclass
class Connection:
    """What passed on one connection."""

    sent: bytearray = field(default_factory=bytearray)
    """By the client."""
    answered: bytearray = field(default_factory=bytearray)

    def exchanges(self) -> list[tuple[Message, Message]]:
        """Requests, each with its answer."""
        asked = messages(bytes(self.sent))
        return list(zip(asked, messages(bytes(self.answered)), strict=False))


@dataclass
class Relay:
    """Passes TCP connections on to a server and keeps what passes."""

    url: str
    target: tuple[str, int]
    connections: list[Connection] = field(default_factory=list)

    def exchanges(self, path: str) -> list[tuple[Message, Message]]:
        """Those to ``path``, in no order between connections."""
        found = [pair for each in list(self.connections) for pair in each.exchanges()]
        return [pair for pair in found if pair[0].head.split(" ")[1] == path]


@contextlib.contextmanager
def relay(url: str) -> Iterator[Relay]:
    """A relay in front of ``url``, in threads of its own."""
    parts = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    this = Relay(f"http://127.0.0.1:{port}", (parts.hostname or "", parts.port or 80))
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(this.target)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets.extend((client, server))
            kept = Connection()
            this.connections.append(kept)
            for source, sink, keep in (
                (client, server, kept.sent),
                (server, client, kept.answered),
            ):
                thread = threading.Thread(target=_pump, args=(source, sink, keep), daemon=True)
                threads.append(thread)
                thread.start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield this
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)
        for each in sockets:
            each.close()


def _pump(source: socket.socket, sink: socket.socket, keep: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            keep += data
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def messages(data: bytes) -> list[Message]:
    """The messages of one direction of a connection; one that is cut off is left out."""
    found: list[Message] = []
    at = 0
    while (end := data.find(b"\r\n\r\n", at)) >= 0:
        head, *lines = data[at:end].decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (each.partition(":") for each in lines)
        }
        at = end + 4
        if headers.get("transfer-encoding") == "chunked":
            body, after = _dechunked(data, at)
        else:
            after = at + int(headers.get("content-length", 0))
            body = data[at:after] if after <= len(data) else None
        if body is None:
            break
        found.append(Message(head, headers, body))
        at = after
    return found


def _dechunked(data: bytes, at: int) -> tuple[bytes | None, int]:
    body = bytearray()
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].split(b";")[0], 16)
        at = end + 2
        if size == 0:
            return bytes(body), at + 2
        if at + size + 2 > len(data):
            break
        body += data[at : at + size]
        at += size + 2
    return None, at


def exchange(url: str, request: bytes, timeout_s: float = 30.0) -> bytes:
    """Send raw bytes; all that comes until the other side closes."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout_s) as line:
        line.sendall(request)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := line.recv(65_536):
                answer += data
    return bytes(answer)


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as bytes, for a connection that is closed after it."""
    lines = [
        f"POST {path} HTTP/1.1", "Host: test", "Connection: close",
        "Content-Type: application/json", f"Content-Length: {len(body)}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
