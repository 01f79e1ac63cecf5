"""Whether a server is there, whether it is still the same one, and how far away it is.

A server is up once it says what it serves. It is down when nobody listens there any more, or when
another process does. How well it serves is judged from its answers, by the policy: a slow or
missing answer to ``/health`` says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

from controller.upstream.discovery import DiscoveryError, described
from controller.upstream.scrape import ANSWERLESS, Page, fetch, read_page, told
from policy.events import ReplicaDown

if TYPE_CHECKING:
    from controller.config import Upstream
    from controller.upstream.replica import Replica
    from controller.upstream.scrape import Fleet
    from policy.cost import StepCost
    from policy.events import ReplicaUp

DESCRIBE_S_MOST = 10.0
PING_S_MOST = 1.0
AGAIN_S = 0.2
"""After nobody listened, look again so soon."""
PINGS = 9
PINGS_AT_FIRST = 3
SAY_S = 60.0
"""How often the log is told of a server that does not come up."""
START_SLACK_S = 0.5
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Connections that failed for want of something here, not there."""

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """What a server has said of itself."""

    up: ReplicaUp
    page: Page
    page_ns: int
    """When it was asked for."""
    cost: StepCost
    upstream: Upstream
    """As it was then: a server that was replaced since has another."""


class _Watch:
    """What is kept of one replica between two looks at it."""

    __slots__ = (
        "doubtful", "level", "page", "page_ns", "pings", "prepared", "refused", "restarted",
        "said_s", "wake",
    )  # fmt: skip

    def __init__(self) -> None:
        self.page = Page()
        """What it said of itself last."""
        self.page_ns = 0
        """When that was asked for, on the monotonic clock: older pages are of another life."""
        self.pings: deque[int] = deque(maxlen=PINGS)
        """Times of the last empty requests, in ns."""
        self.refused = 0
        """How often in a row nobody listened."""
        self.doubtful = False
        """It was away for a moment: is it still the same process?"""
        self.restarted = False
        self.prepared: _Found | None = None
        """What it is, as found out while it is held."""
        self.wake = asyncio.Event()
        self.level = logging.NOTSET
        """Of what the log was told last, and (next) when that was."""
        self.said_s = 0.0

    def compare(self, page: Page, asked_ns: int) -> None:
        """Note whether ``page`` comes from another process than the page before."""
        if asked_ns < self.page_ns or (page.started_s is None and page.generation_tokens is None):
            return
        before, self.page, self.page_ns = self.page, page, asked_ns
        if _is_another(before, page):
            self.restarted = True
            self.wake.set()


class Watcher:
    """Looks after every replica of the driver: one task each, until ``close``."""

    def __init__(self, fleet: Fleet, probe_s: float) -> None:
        self._fleet = fleet
        self._probe_s = probe_s
        self._watches: dict[int, _Watch] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin with the replicas that there are."""
        for replica in self._fleet.replicas.values():
            watch = self._watches[replica.id] = _Watch()
            run = self._run(replica, watch)
            self._tasks.append(asyncio.create_task(run, name=f"watch {replica.name}"))

    async def close(self) -> None:
        """Stop, and wait until nothing runs any more. Nothing is said to be down."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def hold(self, replica: Replica, reason: str) -> None:
        """Nothing new goes there, and nobody looks for it; if it was up, it is down from now on."""
        replica.held = True
        watch = self._watches.get(replica.id)
        if watch is not None:
            watch.prepared = None
        if replica.up:
            self._down(replica, reason)

    def release(self, replica: Replica) -> None:
        """Look for it at once, and say so when it is up: now, if it is known what it is."""
        replica.held = False
        watch = self._watches.get(replica.id)
        if watch is None:
            return
        found, watch.prepared = watch.prepared, None
        if found is not None and found.upstream is replica.upstream and not replica.up:
            self._found(replica, watch, found)
        watch.wake.set()

    async def prepare(self, replica: Replica) -> None:
        """Find out what it is while it is held, so that ``release`` need not wait for it."""
        watch = self._watches.get(replica.id)
        if watch is None or not replica.held:
            return
        with contextlib.suppress(DiscoveryError, *ANSWERLESS):  # then it is found out later
            found = await _asked(replica)
            if replica.held:
                watch.prepared = found

    def suspect(self, replica: Replica) -> None:
        """A connection to it failed: look at once."""
        watch = self._watches.get(replica.id)
        if watch is not None and replica.up:
            watch.wake.set()

    def paged(self, replica: Replica, page: Page, asked_ns: int) -> None:
        """Its metrics were read: notice a new process behind the same address."""
        watch = self._watches.get(replica.id)
        if watch is not None and replica.up:
            watch.compare(page, asked_ns)

    async def _run(self, replica: Replica, watch: _Watch) -> None:
        pause_s = 0.0
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await watch.wake.wait()
            except TimeoutError:
                pass
            watch.wake.clear()
            try:
                pause_s = await self._step(replica, watch)
            except Exception as error:  # the replica must not be lost for good
                self._say(replica, watch, error)
                pause_s = self._probe_s

    async def _step(self, replica: Replica, watch: _Watch) -> float:
        """Look at it once; how long to wait before the next look, in seconds."""
        if not replica.up:
            if not replica.held:
                await self._find(replica, watch)
        elif watch.restarted:
            self._down(replica, "restarted")
            return 0.0
        else:
            await self._look(replica, watch)
        return min(AGAIN_S, self._probe_s) if watch.refused else self._probe_s

    # Down: until it says what it is

    async def _find(self, replica: Replica, watch: _Watch) -> None:
        try:
            found = await _asked(replica)
        except (DiscoveryError, *ANSWERLESS) as error:
            self._say(replica, watch, error)
            return
        watch.refused = 0
        for _ in range(PINGS_AT_FIRST):
            await self._ping(replica, watch)
        # Its fleet may have shut and opened the gate meanwhile: what was asked is gone then.
        gate = not replica.held and not replica.up and replica.upstream is found.upstream
        if gate and not watch.refused:
            self._found(replica, watch, found)

    def _found(self, replica: Replica, watch: _Watch, found: _Found) -> None:
        watch.page, watch.page_ns = found.page, found.page_ns
        watch.refused = 0
        watch.doubtful = watch.restarted = False
        watch.level = logging.NOTSET
        self._up(replica, found.up, found.cost)

    def _up(self, replica: Replica, up: ReplicaUp, cost: StepCost) -> None:
        replica.spec = up
        replica.cost = cost
        replica.up = True
        try:
            self._fleet.feed(up)
        except BaseException:
            replica.up = False
            raise
        log.info(
            "%s is up: %s, version %s, %d KV blocks of %d tokens, %d sequences",
            replica.name, ", ".join(up.models), up.version, up.kv_blocks, up.block_tokens,
            up.max_num_seqs,
        )  # fmt: skip

    # Up: until nobody listens

    async def _look(self, replica: Replica, watch: _Watch) -> None:
        reason = await self._ping(replica, watch)
        if not replica.up:  # its fleet took it away meanwhile
            return
        if watch.refused >= 2:
            self._down(replica, reason)
            watch.refused = 0
        elif watch.doubtful and not watch.refused:
            asked_ns = time.monotonic_ns()
            with contextlib.suppress(*ANSWERLESS):
                async with asyncio.timeout(PING_S_MOST):
                    page = await read_page(replica)
                watch.compare(page, asked_ns)
                watch.doubtful = False

    async def _ping(self, replica: Replica, watch: _Watch) -> str:
        """Time an empty request; why nobody listens, or empty."""
        begun_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(min(self._probe_s, PING_S_MOST)):
                status, _ = await fetch(replica, "/health")
        except aiohttp.ClientConnectorError as error:
            reason = _gone(error)
            watch.refused = watch.refused + 1 if reason else 0
            watch.doubtful = True
            return reason
        except ANSWERLESS as error:
            # Somebody listens: a time-out says no more than that.
            watch.refused = 0
            watch.doubtful = watch.doubtful or not isinstance(error, TimeoutError)
            return ""
        watch.refused = 0
        if status == 200:
            watch.pings.append(time.monotonic_ns() - begun_ns)
            replica.network_ns = median_low(watch.pings)
        return ""

    def _down(self, replica: Replica, reason: str) -> None:
        log.warning("%s is down: %s", replica.name, reason)
        replica.up = False
        self._fleet.feed(ReplicaDown(replica.id, reason))

    def _say(self, replica: Replica, watch: _Watch, error: Exception) -> None:
        """Tell the log, but not at every look."""
        expected = isinstance(error, ANSWERLESS)
        level = logging.INFO if expected else logging.ERROR
        now_s = time.monotonic()
        if level == watch.level and now_s - watch.said_s < SAY_S:
            return
        watch.level, watch.said_s = level, now_s
        if expected:
            log.info("%s does not answer yet: %s", replica.name, told(error))
        elif isinstance(error, DiscoveryError):
            log.error("%s", error)
        else:
            log.error("watching %s: %s; going on", replica.name, told(error), exc_info=error)


async def _asked(replica: Replica) -> _Found:
    asked_ns, upstream = time.monotonic_ns(), replica.upstream
    async with asyncio.timeout(DESCRIBE_S_MOST):
        up, page, cost = await described(replica, upstream)
    return _Found(up, page, asked_ns, cost, upstream)


def _is_another(before: Page, page: Page) -> bool:
    if page.started_s is not None and before.started_s is not None:
        return abs(page.started_s - before.started_s) > START_SLACK_S
    if page.generation_tokens is None or before.generation_tokens is None:
        return False
    return page.generation_tokens < before.generation_tokens


def _gone(error: aiohttp.ClientConnectorError) -> str:
    """Why nobody can be reached there; empty: it was for want of something here."""
    cause = error.os_error
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    if isinstance(cause, socket.gaierror):
        return "name not found"
    if cause.errno in OURS:
        return ""
    return os.strerror(cause.errno).lower() if cause.errno else "cannot connect"
