"""What the policy asks for beside sending requests: second runs, checkpoints, look-ups, progress.

Each is answered by one event.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from controller.driver import AFTER_READING_S
from controller.upstream import judge, warming
from controller.upstream.client import TryFailed
from policy.decisions import (
    LookUp,
    ReadProgress,
    Rotated,
    SaveCheckpoint,
    Start,
    Stop,
    Verify,
    Warm,
)
from policy.events import (
    CheckpointFailed,
    CheckpointSaved,
    LookedUp,
    Progress,
    Verified,
    Warmed,
)
from policy.signals import answers_match

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from controller.call import Call
    from controller.driver import Driver
    from controller.gateway.answers import Answers
    from controller.upstream.client import Client
    from controller.upstream.replica import Replica
    from policy.decisions import Decision

LOGGER = logging.getLogger("twinkeel")


class Checkpoints(Protocol):
    """Where the states of chains are kept: ``controller.store.database.Database``."""

    async def save_checkpoint(
        self,
        chain: str,
        step: str,
        request: str,
        answer: bytes,
        status: int,
        content_type: str,
        owner: str,
    ) -> str:
        """Keep the answer of a chain's step; the checkpoint's id."""
        ...


class Errands:
    """Carries out the decisions that not every request needs."""

    def __init__(
        self,
        driver: Driver,
        client: Client,
        checkpoints: Checkpoints,
        answers: Answers,
        read_progress: Callable[[Replica], Awaitable[int | None]],
        counts: Callable[[Replica], bool],
        warm: Callable[[Replica], Awaitable[Warmed]],
        fleet: Callable[[Decision], object] = lambda decision: None,
    ) -> None:
        self._driver = driver
        self._client = client
        self._checkpoints = checkpoints
        self._answers = answers
        self._read = read_progress
        self._counts = counts
        self._warm_up = warm
        self._fleet = fleet
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, decision: Decision) -> None:
        """Carry it out; a decision that asks for nothing is only for the log."""
        if isinstance(decision, ReadProgress):
            self._progress(self._driver.replicas[decision.replica])
        elif isinstance(decision, Verify):
            self._verify(decision)
        elif isinstance(decision, SaveCheckpoint):
            self._spawn(self._save(decision, self._driver.calls[decision.request]))
        elif isinstance(decision, LookUp):
            self._look_up(decision)
        elif isinstance(decision, Warm):
            self._spawn(self._warm(self._driver.replicas[decision.replica]))
        elif isinstance(decision, Start | Stop | Rotated):
            self._fleet(decision)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- progress ----

    def _progress(self, replica: Replica) -> None:
        """Streams are counted as they come; of what comes in one piece only the server knows. Its
        metrics are read on their own time, and a server that does not answer makes no progress."""
        driver = self._driver
        if driver.streams.blocked.get(replica.id):
            replica.tokens += 1  # it is the caller that stands still
        if replica.all_streams:
            # After a look into the sockets: what has come and was not read yet counts, too.
            asyncio.get_running_loop().call_later(AFTER_READING_S, self._tell_progress, replica)
        else:
            self._spawn(self._ask(replica))

    def _tell_progress(self, replica: Replica) -> None:
        if replica.up:
            self._driver.feed(Progress(replica.id, replica.tokens))

    async def _ask(self, replica: Replica) -> None:
        tokens = await self._read(replica)
        if tokens is None and self._counts(replica):
            tokens = replica.tokens  # it could say how far it has come, and does not answer
        if tokens is not None and replica.up:
            self._driver.feed(Progress(replica.id, tokens))

    # ---- second runs ----

    def _verify(self, decision: Verify) -> None:
        call = self._driver.calls[decision.request]
        replica = self._driver.replicas[decision.replica]
        self._driver.second(call, replica, self._spawn(self._second(call, replica)))

    async def _second(self, call: Call, replica: Replica) -> None:
        request = call.request
        try:
            text, tokens = await self._client.second(call, replica)
        except Exception as error:  # whatever it was, its caller waits
            if not isinstance(error, TryFailed):
                LOGGER.exception("the second run on %s failed", replica.name)
            self._driver.feed(Verified(request, replica.id, "failed"))
            return
        wrong, first = judge.whole(call.body, call.asked.endpoint)
        same = wrong is None and first is not None and answers_match(judge.text_of(first), text)
        verdict = "match" if same else "mismatch"
        self._driver.feed(Verified(request, replica.id, verdict, tokens))  # type: ignore[arg-type]

    # ---- checkpoints and kept answers ----

    async def _save(self, decision: SaveCheckpoint, call: Call) -> None:
        answer = call.kept or call.body
        if not answer:
            self._driver.feed(CheckpointFailed(decision.request))
            return
        try:
            checkpoint = await self._checkpoints.save_checkpoint(
                decision.chain, decision.step, call.name, answer, 200, "application/json",
                call.asked.user,
            )  # fmt: skip
        except Exception as error:  # whatever the store's trouble is, the caller gets its answer
            self._driver.trouble("checkpoint", f"the chain's state was not saved: {error}")
            self._driver.feed(CheckpointFailed(decision.request))
            return
        self._driver.feed(CheckpointSaved(decision.request, checkpoint))

    def _look_up(self, decision: LookUp) -> None:
        driver = self._driver
        now_ns = driver.now_ns()
        call = driver.calls[decision.request]
        kept = self._answers.find(call.asked, now_ns)
        if kept is None:
            driver.feed(LookedUp(decision.request, False))
            return
        call.body, call.version = kept.body, kept.version
        age_ns = now_ns - kept.at_ns
        driver.feed(LookedUp(decision.request, True, age_ns, kept.confidence_permille))

    def warm_up(self, replica: Replica) -> None:
        """Let it answer a first few requests, logprobs among them: compiling what they need takes
        vLLM seconds, which its first callers should not wait for."""
        self._spawn(self._warm_quietly(replica))

    async def _warm_quietly(self, replica: Replica) -> None:
        warmed = await warming.warm(replica)
        if not warmed.ok:
            LOGGER.warning("%s did not answer its warm-up requests", replica.name)

    async def _warm(self, replica: Replica) -> None:
        self._driver.feed(await self._warm_up(replica))
