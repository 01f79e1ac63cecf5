"""What the policy asks for beside sending requests: second runs, checkpoints, look-ups, progress.

Each is answered by one event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Literal

from controller.driver import AFTER_READING_S
from controller.gateway.answers import LOOK_S_MOST, versions_of
from controller.store.checkpoints import CheckpointsError, NewCheckpoint
from controller.upstream import outgoing, warming
from controller.upstream.client import TryFailed
from policy.decisions import (
    Lease,
    LookUp,
    ReadProgress,
    Release,
    Rotated,
    SaveCheckpoint,
    Start,
    Stop,
    Undo,
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
from policy.signals import compare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from controller.call import Call
    from controller.driver import Driver
    from controller.gateway.answers import Answers
    from controller.store.chains import ChainStore
    from controller.upstream.client import Client
    from controller.upstream.replica import Replica
    from policy.decisions import Decision

LOGGER = logging.getLogger("twinkeel")
SAVE_S_LEAST = 0.05
"""For so long a checkpoint is waited for, however little is left of its chain's budget."""


class Errands:
    """Carries out the decisions that not every request needs."""

    def __init__(
        self,
        driver: Driver,
        client: Client,
        chains: ChainStore,
        answers: Answers,
        read_progress: Callable[[Replica], Awaitable[int | None]],
        counts: Callable[[Replica], bool],
        warm: Callable[[Replica], Awaitable[Warmed]],
        fleet: Callable[[Decision], object] = lambda decision: None,
        lease: Callable[[Lease | Release], object] = lambda decision: None,
    ) -> None:
        self._driver = driver
        self._client = client
        self._chains = chains
        self._answers = answers
        self._read = read_progress
        self._counts = counts
        self._warm_up = warm
        self._fleet = fleet
        self._lease = lease
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, decision: Decision) -> None:
        """Carry it out; a decision that asks for nothing is only for the log."""
        if isinstance(decision, ReadProgress):
            self._progress(self._driver.replicas[decision.replica])
        elif isinstance(decision, Verify):
            self._verify(decision)
        elif isinstance(decision, SaveCheckpoint):
            self._spawn(self._save(decision, self._driver.calls[decision.request]))
        elif isinstance(decision, Undo):
            self._spawn(self._undo(decision))
        elif isinstance(decision, LookUp):
            self._spawn(self._look_up(self._driver.calls[decision.request]))
        elif isinstance(decision, Warm):
            self._spawn(self._warm(self._driver.replicas[decision.replica]))
        elif isinstance(decision, Start | Stop | Rotated):
            self._fleet(decision)
        elif isinstance(decision, Lease | Release):
            self._lease(decision)

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
        request, first = call.request, call.said
        try:
            second = await self._client.second(call, replica)
            section = self._driver.parameters.confidence
            # In a thread: of long texts it takes some 100 ms, which nobody else is to wait for.
            same = first is not None and await asyncio.to_thread(
                compare,
                first,
                second.said,
                greedy=outgoing.greedy(call.asked),
                gap_min_permille=section.gap_min_permille,
                same_tokens_permille=section.same_tokens_permille,
            )
        except Exception as error:  # whatever it was, its caller waits
            if not isinstance(error, TryFailed):
                LOGGER.exception("the second run on %s failed", replica.name)
            self._driver.feed(Verified(request, replica.id, "failed"))
            return
        verdict: Literal["match", "mismatch"] = "match" if same else "mismatch"
        self._driver.feed(
            Verified(
                request, replica.id, verdict, second.tokens, *second.certainty, second.contradiction
            )
        )

    # ---- checkpoints and kept answers ----

    async def _save(self, decision: SaveCheckpoint, call: Call) -> None:
        answer = call.kept or call.body
        if not answer:
            self._driver.feed(CheckpointFailed(decision.request))
            return
        try:
            checkpoint = await self._chains.save(
                NewCheckpoint(
                    call.asked.user, decision.chain, decision.step, call.name, answer,
                    ends_s=time.time() + decision.left_ns / 1e9, line=call.asked.line,
                ),
                max(SAVE_S_LEAST, decision.left_ns / 1e9),
            )  # fmt: skip
        except Exception as error:  # whatever the store's trouble is, the caller gets its answer
            self._driver.trouble("checkpoint", f"the chain's state was not saved: {error}")
            self._driver.feed(CheckpointFailed(decision.request))
            return
        self._driver.feed(CheckpointSaved(decision.request, checkpoint))

    async def _undo(self, decision: Undo) -> None:
        try:
            await self._chains.undo(decision.checkpoint, decision.user)
        except CheckpointsError as error:
            self._driver.trouble("checkpoint", f"steps that are to run again were kept: {error}")

    async def _look_up(self, call: Call) -> None:
        driver, asked, request = self._driver, call.asked, call.request
        versions = versions_of(driver.replicas.values(), asked.model)
        left_ns = call.arrived_ns + asked.deadline_ns - driver.now_ns()
        try:
            # The caller's own is that of the first token. Once it is over, the policy's counts: it
            # waits for no look-up at its end.
            s_left = left_ns / 1e9 if asked.deadline_ns and left_ns > 0 else LOOK_S_MOST
            kept = await self._answers.find(asked, versions, s_left)
        except Exception:  # whatever it was, its caller waits for the next best
            LOGGER.exception("the look-up of a kept answer failed")
            kept = None
        if driver.calls.get(request) is not call:
            return  # its caller went away, or its time was over
        if kept is None:
            driver.feed(LookedUp(request, False))
            return
        call.body, call.version, call.similarity = kept.body, kept.version, kept.similarity
        driver.feed(LookedUp(request, True, kept.age_ns, kept.confidence_permille))

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
