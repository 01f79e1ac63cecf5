"""A server's metrics: how full it is, and whether it gets on.

Of the page's hundreds of lines a handful is needed, so these are looked up; nothing is parsed that
is not used. Figures of several engines behind one server are added up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import zlib
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import aiohttp

from controller.upstream.steps import FILES_MOST, Said, StepReader
from controller.upstream.threads import in_thread
from policy.events import Scraped, StepsRead

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.upstream.replica import Replica
    from controller.upstream.steps import Sums
    from policy.events import Event

NS_PER_S = 1_000_000_000
PAGE_BYTES_MOST = 8 << 20
"""More is no page of metrics."""
SCRAPE_S_MOST = 2.0
PROGRESS_S_MOST = 0.6
"""The policy asks again soon after."""
BASE_S_MOST = 3.0
"""Without a question for that long, progress is counted from the last scrape."""
COMPLAIN_S = 60.0
ANSWERLESS = (TimeoutError, aiohttp.ClientError, OSError)

_LABEL = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_GZIP = b"\x1f\x8b"

log = logging.getLogger(__name__)


class PageError(aiohttp.ClientError):
    """An answer that cannot be what was asked for."""


class Page(NamedTuple):
    """What is needed of a page of metrics; None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_used_permille: int | None = None
    preemptions: int | None = None
    generation_tokens: int | None = None
    """Output tokens since the server started."""
    started_s: float | None = None
    """When the server's process started, since 1970."""
    steps: tuple[Said, ...] = ()
    """Files on the server's machine in which its engines record their steps."""


NEEDED = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_used_permille": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "steps": "twinkeel_steps_info",
}
"""Which metric says which part of a page."""


def lacking(page: Page) -> tuple[str, ...]:
    """The metrics that a page should have and has not."""
    return tuple(metric for part, metric in NEEDED.items() if getattr(page, part) in (None, ()))


class CacheConfig(NamedTuple):
    """The KV cache that a server says it has; 0: it does not say."""

    kv_blocks: int
    block_tokens: int


class Fleet(Protocol):
    """What is needed of the driver."""

    replicas: dict[int, Replica]

    def feed(self, event: Event) -> None: ...


def parse(body: bytes) -> Page:
    """The figures on a page in Prometheus' text format."""
    usage = _values(body, b"vllm:kv_cache_usage_perc")
    started = _values(body, b"process_start_time_seconds")
    return Page(
        _total(body, b"vllm:num_requests_running"),
        _total(body, b"vllm:num_requests_waiting"),
        min(1000, max(0, round(1000 * sum(usage) / len(usage)))) if usage else None,
        _total(body, b"vllm:num_preemptions_total"),
        _total(body, b"vllm:generation_tokens_total"),
        started[0] if started else None,
        _steps_said(body),
    )


def cache_config(body: bytes) -> CacheConfig:
    """What ``vllm:cache_config_info`` says, in its labels."""
    blocks, block_tokens = 0, 0
    for labels in labels_of(body, b"vllm:cache_config_info"):
        blocks += _whole(labels.get("num_gpu_blocks", ""))
        block_tokens = _whole(labels.get("block_size", "")) or block_tokens
    return CacheConfig(blocks, block_tokens)


def labels_of(body: bytes, name: bytes) -> list[dict[str, str]]:
    """The labels of each line of a metric."""
    return [
        {
            key.decode(): _ESCAPED.sub(
                lambda found: "\n" if found[1] == "n" else found[1], value.decode(errors="replace")
            )
            for key, value in _LABEL.findall(line)
        }
        for line in _lines(body, name)
    ]


def _steps_said(body: bytes) -> tuple[Said, ...]:
    """What ``twinkeel_steps_info`` of the plug-in for vLLM says."""
    every = labels_of(body, b"twinkeel_steps_info")
    said = [Said(labels.get("path", ""), labels.get("life", "")) for labels in every]
    return tuple(each for each in said if each.path.startswith("/"))[:FILES_MOST]


def _lines(body: bytes, name: bytes) -> list[bytes]:
    """What follows ``name`` in each line that begins with just that name."""
    found: list[bytes] = []
    at = 0 if body.startswith(name) else _next(body, name, 0)
    while at >= 0:
        begin = at + len(name)
        end = body.find(b"\n", begin)
        end = len(body) if end < 0 else end
        if body[begin : begin + 1] in (b"{", b" "):
            found.append(body[begin:end])
        at = _next(body, name, end)
    return found


def _next(body: bytes, name: bytes, start: int) -> int:
    at = body.find(b"\n" + name, start)
    return at + 1 if at >= 0 else -1


def _values(body: bytes, name: bytes) -> list[float]:
    """The finite figures of a series, one for each set of labels."""
    values: list[float] = []
    for line in _lines(body, name):
        fields = line[line.rfind(b"}") + 1 :].split()
        try:
            value = float(fields[0])
        except (IndexError, ValueError):
            continue
        if math.isfinite(value):
            values.append(value)
    return values


def _total(body: bytes, name: bytes) -> int | None:
    values = _values(body, name)
    return max(0, round(sum(values))) if values else None


def _whole(text: str) -> int:
    """A label's number; 0 for ``None`` and the like."""
    return int(text) if text.isascii() and text.isdigit() else 0


async def fetch(replica: Replica, path: str) -> tuple[int, bytes]:
    """Status and body of an answer of bounded size. Time-outs are the caller's."""
    async with replica.get(path) as answer:
        parts: list[bytes] = []
        size = 0
        async for part in answer.content.iter_any():
            size += len(part)
            if size > PAGE_BYTES_MOST:
                raise PageError(f"{path} has more than {PAGE_BYTES_MOST} bytes")
            parts.append(part)
    return answer.status, _plain(path, b"".join(parts))


def _plain(path: str, body: bytes) -> bytes:
    """Unpacked, where the session leaves answers as they come."""
    if not body.startswith(_GZIP):
        return body
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(body, PAGE_BYTES_MOST)
    except zlib.error as error:
        raise PageError(f"{path} cannot be unpacked: {error}") from error
    if unpacker.unconsumed_tail:
        raise PageError(f"{path} has more than {PAGE_BYTES_MOST} bytes")
    return plain


async def read_page(replica: Replica) -> Page:
    """The server's metrics now; an empty page where it has none."""
    status, body = await fetch(replica, "/metrics")
    return parse(body) if status == 200 else Page()


def told(error: BaseException) -> str:
    """An error in words; some have none."""
    return str(error) or type(error).__name__


class _Known:
    """What is kept of one replica between two readings."""

    __slots__ = ("asked_ns", "base", "complained_ns", "counted_ns", "reading", "steps")

    def __init__(self) -> None:
        self.asked_ns = -1
        """When the youngest page that was used was asked for."""
        self.base: int | None = None
        """Its output tokens, as far as they were told as progress."""
        self.counted_ns = -1
        """When they were last told."""
        self.complained_ns: int | None = None
        self.steps: StepReader | None = None
        """Follows its step records, in its present life."""
        self.reading: asyncio.Future[Sums] | None = None


class Scraper:
    """Reads the metrics of every replica that is up, again and again.

    ``paged(replica, page, asked_ns)`` hears of each page, with the time (of the monotonic clock)
    at which it was asked for. ``logprobs``: every request is asked for them.
    """

    def __init__(
        self,
        fleet: Fleet,
        scrape_s: float,
        paged: Callable[[Replica, Page, int], object] | None = None,
        logprobs: bool = False,
    ) -> None:
        self._logprobs = logprobs
        self._fleet = fleet
        self._scrape_s = scrape_s
        self._paged = paged
        self._known: dict[int, _Known] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin with the replicas that there are, spread over one period."""
        replicas = list(self._fleet.replicas.values())
        for number, replica in enumerate(replicas):
            first_s = self._scrape_s * number / len(replicas)
            name = f"scrape {replica.name}"
            self._tasks.append(asyncio.create_task(self._run(replica, first_s), name=name))

    async def close(self) -> None:
        """Stop, and wait until nothing runs any more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for known in self._known.values():
            if known.steps is not None and (known.reading is None or known.reading.done()):
                known.steps.close()

    async def _run(self, replica: Replica, first_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + first_s
        while True:
            await asyncio.sleep(due_s - loop.time())
            if replica.up:
                try:
                    await self.scrape(replica)
                except Exception as error:  # a loop that ends would leave the policy blind
                    self._complain(replica, error)
            due_s = max(due_s + self._scrape_s, loop.time())

    async def scrape(self, replica: Replica) -> None:
        """Read its metrics once, and tell the policy if it has the needed ones."""
        spec = replica.spec
        asked_ns = time.monotonic_ns()
        async with asyncio.timeout(min(self._scrape_s, SCRAPE_S_MOST)):
            page = await read_page(replica)
        age_ns = time.monotonic_ns() - asked_ns
        if not (replica.up and replica.spec is spec and self._used(replica, page, asked_ns)):
            return
        replica.lacks = lacking(page)
        known = self._of(replica)
        if asked_ns - known.counted_ns > BASE_S_MOST * NS_PER_S:
            known.base = page.generation_tokens
        running, waiting, used = page.running, page.waiting, page.kv_used_permille
        if running is not None and waiting is not None and used is not None:
            preemptions = page.preemptions or 0
            self._fleet.feed(Scraped(replica.id, running, waiting, used, preemptions, age_ns))
        await self._read_steps(replica, known, page.steps)

    async def _read_steps(self, replica: Replica, known: _Known, said: tuple[Said, ...]) -> None:
        """Tell the policy what its steps took and should have, where it records them here."""
        spec, given = replica.spec, replica.upstream.steps
        if spec is None or replica.cost is None or not (said or given):
            return
        if known.reading is not None and not known.reading.done():
            return  # a disk that hangs
        if known.steps is None or known.steps.spec is not spec:
            if known.steps is not None:
                known.steps.close()
            known.steps = StepReader(replica.name, spec, replica.cost, given, self._logprobs)
        # A full scrape's worth of rows takes milliseconds, a slow disk takes longer.
        reading = in_thread("step-records", partial(known.steps.read, said))
        known.reading = reading
        await asyncio.wait({reading}, timeout=SCRAPE_S_MOST)
        if not reading.done():
            return
        sums = reading.result()
        if sums.steps and replica.up and replica.spec is spec:
            self._fleet.feed(
                StepsRead(replica.id, sums.steps, sums.measured_ns // 1000, sums.predicted_us)
            )

    async def read_progress(self, replica: Replica) -> int | None:
        """How many output tokens are known of it; None: it did not answer in time, or has no count.

        Where all that is in flight is seen token by token, that is known already. Else the server's
        own counter says whether it gets on: what it rose by since the last question is added.
        Tokens of streams are then counted twice, which is harmless: what matters is whether the
        answer has risen.
        """
        if replica.all_streams:
            return replica.tokens
        spec = replica.spec
        asked_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(PROGRESS_S_MOST):
                page = await read_page(replica)
        except ANSWERLESS:
            return None
        counted = page.generation_tokens
        if counted is None or replica.spec is not spec:
            return None
        if self._used(replica, page, asked_ns):
            known = self._of(replica)
            if known.base is not None:
                replica.tokens += max(0, counted - known.base)
            known.base = counted
            known.counted_ns = asked_ns
        return replica.tokens

    def counts(self, replica: Replica) -> bool:
        """Whether it says how many output tokens it made, as far as is known: then not answering
        is a sign."""
        known = self._known.get(replica.id)
        return known is None or known.asked_ns < 0 or known.base is not None

    def _of(self, replica: Replica) -> _Known:
        return self._known.setdefault(replica.id, _Known())

    def _used(self, replica: Replica, page: Page, asked_ns: int) -> bool:
        """Whether it is the youngest page so far; then ``paged`` hears of it."""
        known = self._of(replica)
        if asked_ns < known.asked_ns:
            return False
        known.asked_ns = asked_ns
        if self._paged is not None:
            self._paged(replica, page, asked_ns)
        return True

    def _complain(self, replica: Replica, error: Exception) -> None:
        known = self._of(replica)
        now_ns = time.monotonic_ns()
        if known.complained_ns is None or now_ns - known.complained_ns >= COMPLAIN_S * NS_PER_S:
            known.complained_ns = now_ns
            expected = isinstance(error, ANSWERLESS)
            log.warning(
                "%s: its metrics cannot be read (%s); the policy goes on with what it counts"
                " itself", replica.name, told(error), exc_info=None if expected else error,
            )  # fmt: skip
