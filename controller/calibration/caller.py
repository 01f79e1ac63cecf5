"""Sends the designed load's requests and takes their times.

Everything is prepared before the clock matters: prompts are drawn and encoded first, and while
requests are under way this process sleeps, because it may share the machine with the engine.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec

from controller.calibration.errors import CalibrationError
from controller.calibration.server import DROPPED

if TYPE_CHECKING:
    from random import Random

    from controller.calibration.plan import Ask, Phase, Room
    from controller.calibration.server import Server

ANSWER_S_MOST = 120.0
"""Without a byte for so long, the server hangs. The first call with logprobs compiles for 14 s."""
TOKENS = range(10, 3000)
"""Ids that every model's vocabulary has; those below are often special."""
LOGPROBS = 5
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
"""An error within a stream; the word alone may be the model's."""


class Sent(NamedTuple):
    """A request that was answered, as its caller saw it. Times in ns on the monotonic clock."""

    id: str
    phase: str
    sent_ns: int
    ttft_ns: int | None
    """Of streams only."""
    e2e_ns: int
    prompt_tokens: int
    output_tokens: int
    logprobs: bool
    stream: bool
    round: int
    """Of the designed load, from 1; 0: before its first."""
    prompts: int
    """Of as many tokens each; the server gives each an id of its own, with its number behind."""


def encode_sent(sent: Sent) -> bytes:
    """Its line in ``client.jsonl``."""
    return msgspec.json.encode(sent._asdict()) + b"\n"


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


class _Ready(NamedTuple):
    ask: Ask
    id: str
    body: bytes


class _Got(NamedTuple):
    """An answer. Times in ns on the monotonic clock; ``first_ns`` -1: it has no body."""

    status: int
    body: bytes
    sent_ns: int
    first_ns: int
    end_ns: int


class _BrokenOff(aiohttp.ClientError):
    """An answer that has begun and does not end: not to be asked for again."""


class Caller:
    """The one caller of a server.

    Args:
        model: the name that the server answers for.
        room: what its KV cache holds: never more is asked for at a time.
    """

    def __init__(self, server: Server, model: str, room: Room, dice: Random) -> None:
        self._url = f"{server.url}/v1/completions"
        self._server = server
        self._model = model
        self.room = room
        self._dice = dice
        self._blocks = 0
        self._freed = asyncio.Event()
        self._serial = 0
        self.answered: list[Sent] = []
        self.sequences = 0
        """Prompts answered: to the server each is a request."""

    async def play(self, phase: Phase) -> list[Sent]:
        """Send a phase's requests; returns when all are answered.

        Raises:
            CalibrationError: one was not answered as it has to be.
        """
        ready = [self._prepare(phase.name, ask) for ask in phase.asks]
        if phase.one_by_one:
            sent = []
            for each in ready:
                await asyncio.sleep(each.ask.at_s)
                sent.append(await self._call(each, phase))
            return sent
        tasks: list[asyncio.Task[Sent]] = []
        began_s = time.monotonic()
        try:
            for each in ready:
                wait_s = began_s + each.ask.at_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                await self._take(each.ask)
                tasks.append(asyncio.create_task(self._call(each, phase, taken=True)))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _prepare(self, phase: str, ask: Ask) -> _Ready:
        prompts = [self._dice.choices(TOKENS, k=ask.prompt_tokens) for _ in range(ask.prompts)]
        body: dict[str, object] = {
            "model": self._model,
            "prompt": prompts[0] if ask.prompts == 1 else prompts,
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
        }
        if ask.stream:
            body["stream"] = True
        if ask.logprobs:
            body["logprobs"] = LOGPROBS
        self._serial += 1
        return _Ready(ask, f"cal.{phase}.{self._serial}", msgspec.json.encode(body))

    async def _take(self, ask: Ask) -> None:
        """Wait until the pool has the blocks that it may come to need."""
        blocks = self._blocks_of(ask)
        while self._blocks and self._blocks + blocks > self.room.blocks:
            self._freed.clear()
            await self._freed.wait()
        self._blocks += blocks

    def _blocks_of(self, ask: Ask) -> int:
        return ask.prompts * self.room.blocks_of(ask.prompt_tokens + ask.output_tokens)

    async def _call(self, ready: _Ready, phase: Phase, taken: bool = False) -> Sent:
        ask = ready.ask
        if not taken:
            await self._take(ask)
        try:
            got = await self._server.exchange(lambda session: self._exchange(session, ready))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CalibrationError(
                f"{ready.id}: no answer from {self._url}: {str(error) or type(error).__name__}"
            ) from error
        finally:
            self._blocks -= self._blocks_of(ask)
            self._freed.set()
        _check(ready, got.status, got.body)
        sent = Sent(
            ready.id, phase.name, got.sent_ns, got.first_ns - got.sent_ns if ask.stream else None,
            got.end_ns - got.sent_ns, ask.prompt_tokens, ask.output_tokens, ask.logprobs,
            ask.stream, phase.round, ask.prompts,
        )  # fmt: skip
        self.answered.append(sent)
        self.sequences += ask.prompts
        return sent

    async def _exchange(self, session: aiohttp.ClientSession, ready: _Ready) -> _Got:
        headers = {"Content-Type": "application/json", "X-Request-Id": ready.id}
        limit = aiohttp.ClientTimeout(total=None, sock_read=ANSWER_S_MOST)
        first_ns = -1
        parts: list[bytes] = []
        sent_ns = time.monotonic_ns()
        async with session.post(
            self._url, data=ready.body, headers=headers, timeout=limit
        ) as answer:
            try:
                async for part in answer.content.iter_any():
                    if first_ns < 0:
                        first_ns = time.monotonic_ns()
                    parts.append(part)
            except DROPPED as error:
                raise _BrokenOff(f"it broke off after {sum(map(len, parts))} bytes") from error
            return _Got(answer.status, b"".join(parts), sent_ns, first_ns, time.monotonic_ns())


def _check(ready: _Ready, status: int, body: bytes) -> None:
    """It is a whole answer of just the tokens that were asked for."""
    shown = body[:300].decode("utf-8", "replace")
    if status != 200:
        raise CalibrationError(f"{ready.id}: the server answered {status}: {shown}")
    if ready.ask.stream:
        if not body.rstrip().endswith(_DONE) or _ERROR in body:
            tail = body[-300:].decode("utf-8", "replace")
            raise CalibrationError(f"{ready.id}: the stream broke off: {tail}")
        return
    try:
        made = msgspec.json.decode(body, type=_Answer).usage.completion_tokens
    except msgspec.DecodeError as error:
        raise CalibrationError(f"{ready.id}: no completion: {shown}") from error
    asked = ready.ask.output_tokens * ready.ask.prompts
    if made != asked:
        raise CalibrationError(
            f"{ready.id}: asked for {asked} tokens, got {made}: the server does "
            "not honour ignore_eos or max_tokens"
        )
