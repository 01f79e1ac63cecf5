"""Plays a segment against a real vLLM and reads what the server itself says of every request."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

from tests.bench.fidelity.loads import BLOCK_TOKENS
from traces.steps import RequestRow, StepRow, StepTail

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.bench.fidelity.loads import Want
    from tests.live.server import Vllm
    from traces.steps import Recording

TOKENS = (10, 3000)
RECORDS_S_MOST = 10.0
_runs = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as the server recorded it; ns on the server's clock."""

    want: Want
    at_ns: int
    """Arrival in the API server."""
    ttft_ns: int
    e2e_ns: int
    decode_ns: int
    cached_tokens: int
    preemptions: int
    outside_ns: int
    """Of ``e2e_ns``, what was spent outside the engine."""

    @property
    def tpot_ns(self) -> float:
        return self.decode_ns / (self.want.output_tokens - 1)


class Driven:
    """A server that is driven, and the file in which it records its steps."""

    def __init__(self, server: Vllm, steps: Path) -> None:
        self.server = server
        self._tail = StepTail(steps)
        self.drain()

    def drain(self) -> list[StepRow | RequestRow]:
        """The records that are new."""
        return self._tail.read_new()

    def recording(self, rows: Sequence[StepRow | RequestRow]) -> Recording:
        """Rows as `twin.calibrate` reads them."""
        from traces.steps import Recording

        assert self._tail.header is not None
        recording = Recording(self._tail.header)
        for row in rows:
            recording.add(row)
        return recording

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; the engine must be idle."""
        url = f"{self.server.url}/reset_prefix_cache"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30):
            pass

    def play(self, wants: Sequence[Want]) -> tuple[list[Seen], list[StepRow | RequestRow]]:
        """Send every request at its time, and read what the server recorded.

        Returns:
            The requests in order of their arrival, and all records.

        Raises:
            RuntimeError: a request was not answered with as many tokens as asked for, or the
                server recorded fewer requests than were sent.
        """
        run = next(_runs)
        self.drain()
        asyncio.run(_send(self.server.url, wants, run))
        rows: list[StepRow | RequestRow] = []
        deadline_s = time.monotonic() + RECORDS_S_MOST
        found: dict[int, RequestRow] = {}
        while len(found) < len(wants):
            rows += (new := self.drain())
            for row in new:
                if isinstance(row, RequestRow) and row.id and f"fid.{run}." in row.id:
                    found[int(row.id.split(f"fid.{run}.")[1].split("-")[0])] = row
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"{len(found)} of {len(wants)} requests are in the step records after "
                    f"{RECORDS_S_MOST:.0f} s: is the plug-in's file complete?"
                )
            time.sleep(0.1)
        seen = [_seen(wants[number], row) for number, row in found.items()]
        return sorted(seen, key=lambda each: each.at_ns), rows


def _seen(want: Want, row: RequestRow) -> Seen:
    if row.output_tokens != want.output_tokens or row.prompt_tokens != want.prompt_tokens:
        raise RuntimeError(
            f"{row.id}: {row.prompt_tokens} + {row.output_tokens} tokens, asked for were "
            f"{want.prompt_tokens} + {want.output_tokens}"
        )
    e2e, decode = row.e2e_ns, row.decode_ns
    assert e2e is not None
    assert decode is not None
    inside = (row.queued_ns or 0) + (row.prefill_ns or 0) + decode
    return Seen(
        want, row.at_ns - e2e, e2e - decode, e2e, decode, row.cached_tokens or 0,
        row.preemptions or 0, e2e - inside,
    )  # fmt: skip


def prompt_ids(want: Want, run: int, number: int) -> list[int]:
    """Token ids: equal where requests of a run share prefix blocks, else never the same."""
    ids: list[int] = []
    for block in want.prefix:
        ids += np.random.default_rng((1, run, block)).integers(*TOKENS, BLOCK_TOKENS).tolist()
    rest = want.prompt_tokens - len(ids)
    return ids + np.random.default_rng((2, run, number)).integers(*TOKENS, rest).tolist()


async def _send(url: str, wants: Sequence[Want], run: int) -> None:
    bodies = [
        json.dumps({
            "model": "tiny", "prompt": prompt_ids(want, run, number),
            "max_tokens": want.output_tokens, "ignore_eos": True, "priority": want.priority,
        }).encode()
        for number, want in enumerate(wants)
    ]  # fmt: skip
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

        async def one(number: int, body: bytes) -> None:
            headers = {"X-Request-Id": f"fid.{run}.{number}", "Content-Type": "application/json"}
            async with client.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise RuntimeError(f"{url}: {answer.status}: {text[:300]}")

        began_s = time.monotonic()
        tasks = []
        for number, (want, body) in enumerate(zip(wants, bodies, strict=True)):
            await asyncio.sleep(max(0.0, began_s + want.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(one(number, body)))
        await asyncio.gather(*tasks)
