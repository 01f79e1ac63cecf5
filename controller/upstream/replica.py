"""A server as the controller sees it: where it is, and what is known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from yarl import URL

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    import aiohttp

    from controller.config import Upstream
    from policy.cost import StepCost
    from policy.events import ReplicaUp

PLAIN = {"Accept-Encoding": "identity"}
"""Compressing its metrics costs vLLM's server more than sending them."""


class Replica:
    """One server. Its numbers are kept by whoever finds them out; nothing is decided here."""

    __slots__ = (
        "_urls", "attempts", "cost", "handling_ns", "held", "id", "lacks", "name", "network_ns",
        "placed", "session", "spec", "streams", "tokens", "up", "upstream", "url",
    )  # fmt: skip

    def __init__(self, id: int, upstream: Upstream, session: aiohttp.ClientSession) -> None:
        self.id = id
        self.upstream = upstream
        self.url = upstream.url.rstrip("/")
        self.name = urlsplit(self.url).netloc
        self.session = session
        self._urls: dict[str, URL] = {}
        """Parsed once."""
        self.up = False
        """``ReplicaUp`` was fed, and no ``ReplicaDown`` since."""
        self.held = False
        """Its fleet keeps it back: nobody looks for it, and it is not up."""
        self.spec: ReplicaUp | None = None
        """What was last said of it."""
        self.placed: tuple[int, int] | None = None
        """How near its cards are to each other, per mille, and their memory in MB, as they say
        themselves; None: nobody asked them."""
        self.cost: StepCost | None = None
        """Of its steps, by its profile."""
        self.tokens = 0
        """Output tokens seen from it, or known by its metrics; only ever rises."""
        self.network_ns = -1
        """The usual time of an empty request to it; -1: not measured yet."""
        self.handling_ns = -1
        """The usual time until the headers of a stream come from it, which it sends when it has
        read the request; -1: none came yet."""
        self.attempts: set[asyncio.Task[None]] = set()
        """Calls in flight."""
        self.streams = 0
        """How many of these are streams, whose tokens are seen as they come."""

        self.lacks: tuple[str, ...] = ()
        """Metrics that its page, as last read, should have and has not."""

    def move(self, url: str, version: str | None = None) -> None:
        """What runs in its place is at another address, or has another version of its model (None:
        the one it had), from now on. It must not be up."""
        if version is None:
            version = self.upstream.version
        self.url = url.rstrip("/")
        self.upstream = msgspec.structs.replace(self.upstream, url=url, version=version)
        self._urls.clear()

    def handled(self, ns: int) -> None:
        """A stream's headers came after that long."""
        usual_ns = self.handling_ns
        self.handling_ns = ns if usual_ns < 0 else usual_ns + (ns - usual_ns) // 8

    @property
    def all_streams(self) -> bool:
        """Whether everything in flight is seen token by token."""
        return self.streams == len(self.attempts)

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.client._RequestContextManager:
        """Send ``body``; enter what is returned to wait for the answer's headers."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(f"{self.url}{path}")
        return self.session.post(url, data=body, headers=headers, allow_redirects=False)

    def get(self, path: str) -> aiohttp.client._RequestContextManager:
        # A redirect would lead to a server that nobody configured.
        return self.session.get(f"{self.url}{path}", headers=PLAIN, allow_redirects=False)
