"""Alerts, posted as JSON to an address: at most a few seconds late, and never in the way."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from datetime import UTC, datetime
from hashlib import blake2b
from typing import TYPE_CHECKING

import aiohttp

from controller.listener import Listener
from controller.telemetry.metrics import Sink
from policy.decisions import Alert, BreakerMoved, Rotated

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from policy.decisions import Decision

QUEUE_MOST = 1000
TRIES_MOST = 3
TIMEOUT_S = 5.0
BACKOFF_S = (0.5, 2.0)
CLOSE_S = 2.0


class Webhook(Listener):
    """Posts each alert; the policy has told the same trouble only once already.

    A post is ``{"key", "cause", "figures", "action", "at", "controller", "policy"}``, with an
    ``Idempotency-Key``: a repeated one is the same alert. Answers of 2xx are taken for received;
    429, 5xx and no answer are tried again.

    Args:
        url: where to; empty: nothing is posted.
        controller: name of this controller, such as its address.
        policy: gives the name of the policy in force.
        now_ns: time of day, since 1970.
        moves: post every breaker that opens and every replica that is isolated too, for policies
            whose own alerts are off.
        backoff_s: waits before the second and the third try.
    """

    def __init__(
        self,
        url: str,
        controller: str,
        policy: Callable[[], str],
        now_ns: Callable[[], int],
        moves: bool = False,
        backoff_s: tuple[float, float] = BACKOFF_S,
    ) -> None:
        self._url = url
        self._controller = controller
        self._policy = policy
        self._now_ns = now_ns
        self._moves = moves
        self._backoff_s = backoff_s
        self._queue: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._numbered = 0
        self._sent = self._failed = self._dropped = 0

    def counts(self) -> Sink:
        """Alerts posted, given up, and dropped because too many were waiting."""
        return Sink(self._sent, self._failed, self._dropped)

    async def start(self) -> None:
        if self._url and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Post what is waiting, within ``CLOSE_S``."""
        task, self._task = self._task, None
        if task is None:
            return
        self._closing = True
        self._wake.set()
        _, running = await asyncio.wait((task,), timeout=CLOSE_S)
        if running:
            task.cancel()
            await asyncio.wait((task,))
            self._failed += len(self._queue)
            self._queue.clear()

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Alert):
            figures = dict(decision.figures)
            self._post(decision.key, decision.cause, figures, decision.action)
        elif not self._moves:
            return
        elif isinstance(decision, BreakerMoved) and decision.state == "open":
            figures = {"bad": decision.bad, "total": decision.total}
            self._post(
                f"breaker {decision.key}", f"breaker open: {decision.why}", figures, "degraded"
            )
        elif isinstance(decision, Rotated) and decision.state == "isolated":
            self._post(
                f"replica {decision.replica}", f"isolated: {decision.why}", {}, "out of rotation"
            )

    def _post(self, key: str, cause: str, figures: dict[str, int], action: str) -> None:
        if not self._url:
            return
        now_ns = self._now_ns()
        self._numbered += 1
        body: dict[str, Any] = {
            "key": key,
            "cause": cause,
            "figures": figures,
            "action": action,
            "at": datetime.fromtimestamp(now_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
            "controller": self._controller,
            "policy": self._policy(),
        }
        mark = f"{self._controller} {now_ns} {self._numbered} {key}"
        if len(self._queue) >= QUEUE_MOST:
            self._queue.popleft()  # what is new says more
            self._dropped += 1
        self._queue.append(
            (blake2b(mark.encode(), digest_size=16).hexdigest(), json.dumps(body).encode())
        )
        self._wake.set()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                while self._queue:
                    name, body = self._queue.popleft()
                    try:
                        received = await self._deliver(session, name, body)
                    except asyncio.CancelledError:
                        self._failed += 1
                        raise
                    self._sent += received
                    self._failed += not received
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()

    async def _deliver(self, session: aiohttp.ClientSession, name: str, body: bytes) -> bool:
        headers = {"Content-Type": "application/json", "Idempotency-Key": name}
        for number in range(TRIES_MOST):
            if number:
                await asyncio.sleep(self._backoff_s[min(number, len(self._backoff_s)) - 1])
            try:
                async with session.post(
                    self._url, data=body, headers=headers, allow_redirects=False
                ) as answer:
                    if answer.status < 300:
                        return True
                    if answer.status < 500 and answer.status != 429:
                        return False
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
        return False
