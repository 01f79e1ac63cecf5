"""Each fault of the served twin, as it looks on the socket."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import pytest

from policy.signals import certainty
from tests.controller.turns import Turns
from twin.serve.server import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

H100 = "h100-sxm/qwen3-8b"
TOKENS = 12
SOON_S = 1.0
"""Longer than any answer here takes on a busy machine, were there one."""


class Seen(NamedTuple):
    """Everything that came back on one connection."""

    head: bytes
    body: bytes
    end: str
    """``whole``: HTTP says it is complete; ``eof``: closed before that; ``reset``; ``open``:
    nothing more came, and the connection is open."""

    @property
    def events(self) -> list[bytes]:
        return [event for event in self.body.split(b"\n\n") if event.startswith(b"data: {")]

    @property
    def tokens(self) -> int:
        """Words that events brought."""
        texts = [
            (json.loads(event[6:])["choices"] or [{}])[0].get("delta", {}).get("content") or ""
            for event in self.events
            if event.endswith(b"}")
        ]
        return len("".join(texts).split())


def _complete(head: bytes, body: bytes) -> bool:
    if b"chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line
    )
    return len(body) >= length


def _plain(body: bytes) -> bytes:
    """Chunks put together, as far as they go."""
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        out += rest[:length]
        body = rest[length + 2 :]
    return out


async def ask(url: str, stream: bool, **fields: Any) -> Seen:
    """A request on a connection of its own, read byte by byte."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": stream,
            **fields,
        }
    ).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: twin\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    got, end, silent = b"", "", 0
    while not end:
        try:
            async with asyncio.timeout(SOON_S / 4):
                part = await reader.read(65536)
        except TimeoutError:
            silent += 1  # one of them may be over though this process had no turn meanwhile
            end = "open" if silent == 4 else ""
        except ConnectionResetError:
            end = "reset"
        else:
            got, silent = got + part, 0
            head, _, rest = got.partition(b"\r\n\r\n")
            if not part:
                end = "eof"
            elif rest or b"content-length: 0" in head:
                end = "whole" if _complete(head, rest) else ""
    writer.transport.abort()
    head, _, rest = got.partition(b"\r\n\r\n")
    return Seen(head, _plain(rest) if b"chunked" in head else rest, end)


@asynccontextmanager
async def faulty(**fault: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async with serving(H100) as url, aiohttp.ClientSession(url) as session:
        async with session.post("/twin/fault", data=json.dumps(fault)) as answer:
            assert answer.status == 200, await answer.text()
        yield url, session


async def state(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/twin/state") as answer:
        found: dict[str, Any] = await answer.json()
        return found


def seen(stream: bool, **fault: Any) -> Seen:
    """What one caller sees of a fault; afterwards nothing is left in the engine."""

    async def run() -> Seen:
        async with faulty(**fault) as (url, session):
            found = await ask(url, stream)
            async with asyncio.timeout(20):
                while (await state(session))["held"]:  # noqa: ASYNC110 - over HTTP
                    await asyncio.sleep(0.01)
            return found

    return asyncio.run(run())


BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@BOTH
@pytest.mark.parametrize("status", [500, 503, 400])
def test_error_statuses(stream: bool, status: int) -> None:
    found = seen(stream, kind=f"http_{status}")
    assert found.head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(found.body)["error"]["code"] == status
    assert b"retry-after" not in found.head.lower()


def test_a_stalled_stream_stops_and_its_connection_stays() -> None:
    found = seen(True, kind="stall", after_tokens=3)
    assert (found.end, found.tokens) == ("open", 3)


def test_a_stalled_answer_never_comes() -> None:
    found = seen(False, kind="stall", after_tokens=3)
    assert (found.end, found.head) == ("open", b"")


@pytest.mark.parametrize("after", [0, 1, 5, 99])
def test_a_reset_stream_is_broken_off_by_rst(after: int) -> None:
    found = seen(True, kind="reset", after_tokens=after)
    assert (found.end, found.tokens) == ("reset", min(after, TOKENS))
    assert b"[DONE]" not in found.body


def test_a_reset_answer_has_no_byte() -> None:
    found = seen(False, kind="reset", after_tokens=3)
    assert (found.end, found.head) == ("reset", b"")


def test_a_cut_stream_is_closed_in_order_and_incomplete() -> None:
    found = seen(True, kind="cut", after_tokens=3)
    assert (found.end, found.tokens) == ("eof", 3)


def test_a_cut_answer_is_shorter_than_it_says() -> None:
    found = seen(False, kind="cut", after_tokens=3)
    assert found.end == "eof"
    assert found.head.startswith(b"HTTP/1.1 200 ")
    with pytest.raises(json.JSONDecodeError):
        json.loads(found.body)


def test_a_stream_without_an_end_is_complete_http() -> None:
    found = seen(True, kind="no_end", after_tokens=3)
    assert (found.end, found.tokens) == ("whole", 3)
    assert b"[DONE]" not in found.body
    assert all(json.loads(event[6:])["choices"][0]["finish_reason"] is None
               for event in found.events)  # fmt: skip


def test_an_answer_without_an_end_has_no_finish_reason() -> None:
    found = seen(False, kind="no_end")
    assert json.loads(found.body)["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize(("kind", "content"), [("empty", ""), ("null", None)])
def test_hollow_answers_stop_without_content(kind: str, content: str | None) -> None:
    choice = json.loads(seen(False, kind=kind).body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
    stream = seen(True, kind=kind)
    assert (stream.end, stream.tokens) == ("whole", 0)
    last = json.loads(stream.events[-1][6:])["choices"][0]
    assert (last["delta"]["content"], last["finish_reason"]) == (content, "stop")
    assert stream.body.endswith(b"data: [DONE]\n\n")


def test_an_abort_is_a_200_with_finish_reason_abort() -> None:
    whole = seen(False, kind="abort", after_tokens=3)
    choice = json.loads(whole.body)["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert len(choice["message"]["content"].split()) == 3
    stream = seen(True, kind="abort", after_tokens=3)
    assert stream.head.startswith(b"HTTP/1.1 200 ")
    assert (stream.end, stream.tokens) == ("whole", 3)
    assert json.loads(stream.events[-1][6:])["choices"][0]["finish_reason"] == "abort"
    assert stream.body.endswith(b"data: [DONE]\n\n")


def test_truncated_answers_are_complete_http_and_broken_json() -> None:
    whole = seen(False, kind="truncated")
    assert whole.end == "whole"
    with pytest.raises(json.JSONDecodeError):
        json.loads(whole.body)
    stream = seen(True, kind="truncated", after_tokens=3)
    assert stream.end == "whole"
    last = stream.body.rsplit(b"\n\n", 1)[1]
    assert last.startswith(b"data: {")
    with pytest.raises(json.JSONDecodeError):
        json.loads(last[6:])
    assert stream.tokens == 3


@BOTH
def test_a_blank_answer_is_a_200_without_a_byte(stream: bool) -> None:
    found = seen(stream, kind="blank")
    assert found.head.startswith(b"HTTP/1.1 200 ")
    assert (found.end, found.body) == ("whole", b"")


@BOTH
def test_latency_comes_before_the_answer(stream: bool) -> None:
    async def run() -> float:
        async with faulty(kind="latency", delay_s=0.4) as (url, _):
            began = asyncio.get_running_loop().time()
            with Turns() as turns:
                assert (await ask(url, stream)).end == "whole"
            assert turns.s < 2
            return asyncio.get_running_loop().time() - began

    assert asyncio.run(run()) > 0.4 + 0.1


@BOTH
def test_a_hung_engine_gives_nothing_while_the_server_is_healthy_and_then_goes_on(
    stream: bool,
) -> None:
    async def run() -> None:
        async with serving(H100) as url, aiohttp.ClientSession(url) as session:
            before = asyncio.create_task(ask(url, True, max_tokens=400))
            await asyncio.sleep(0.1)
            async with session.post("/twin/fault", data=b'{"kind": "hang"}') as answer:
                assert answer.status == 200
            cut = await before  # it had begun, and got no further
            assert cut.end == "open"
            assert 0 < cut.tokens < 380
            lost = await ask(url, stream)
            assert (lost.end, lost.body) == ("open", b"")
            async with session.get("/health") as answer:
                assert answer.status == 200
            kept = asyncio.create_task(ask(url, stream))
            await asyncio.sleep(0.2)
            assert (await state(session))["held"] == 1
            assert not kept.done()
            async with session.delete("/twin/fault") as answer:
                assert answer.status == 200
            assert (await kept).end == "whole"

    asyncio.run(run())


def test_a_share_of_requests_hangs_and_the_others_do_not() -> None:
    async def run() -> list[str]:
        async with faulty(kind="hang", share=0.5) as (url, _):
            return [
                found.end for found in await asyncio.gather(*(ask(url, False) for _ in range(24)))
            ]

    ends = asyncio.run(run())
    assert set(ends) == {"open", "whole"}
    assert 4 <= ends.count("open") <= 20


def test_a_slow_engine_takes_its_factor() -> None:
    async def run() -> list[float]:
        async with serving(H100) as url, aiohttp.ClientSession(url) as session:
            means = []
            for fault in (None, {"kind": "slow", "factor": 3}, None):
                if fault is None:
                    await session.delete("/twin/fault")
                else:
                    await session.post("/twin/fault", data=json.dumps(fault))
                whole = await ask(url, False)
                means.append(json.loads(whole.body)["metrics"]["mean_itl_ms"])
            return means

    before, during, after = asyncio.run(run())
    assert during == pytest.approx(3 * before, rel=0.01)
    assert after == pytest.approx(before, rel=0.001)


def test_a_cold_engine_stands_still_once_for_each_thing_that_it_compiles() -> None:
    cold_s = 0.6

    async def run() -> None:
        cold = json.dumps({"kind": "cold", "delay_s": cold_s})
        with Turns() as turns:
            async with serving(H100, fault=cold) as url:

                async def took_s(**fields: Any) -> tuple[float, float]:
                    """And how much of it this process had its turns."""
                    began_s = time.monotonic()
                    assert (await ask(url, False, **fields)).end == "whole"
                    ended_s = time.monotonic()
                    return ended_s - began_s, turns.between(began_s, ended_s)

                sure = {"logprobs": True, "top_logprobs": 2}
                first, again = await took_s(), await took_s()
                assert first[0] > cold_s
                assert first[1] < cold_s + again[0] + 0.3
                assert again[1] < cold_s
                # What comes while it stands still waits as well.
                both = await asyncio.gather(took_s(**sure), took_s())
                assert min(each for each, _ in both) > 0.9 * cold_s
                later = [await took_s(), await took_s(**sure)]
                assert max(each for _, each in later) < cold_s

    asyncio.run(run())


def test_a_first_prompt_with_logprobs_compiles_both() -> None:
    async def run() -> None:
        async with serving(H100, fault='{"kind": "cold", "delay_s": 0.6}') as url:
            began_s = time.monotonic()
            assert (await ask(url, False, logprobs=True)).end == "whole"
            assert time.monotonic() - began_s > 0.6
            with Turns() as turns:
                assert (await ask(url, False)).end == "whole"
            assert turns.s < 0.6

    asyncio.run(run())


def test_a_cold_engine_goes_on_when_the_fault_is_taken_away() -> None:
    async def run() -> None:
        async with faulty(kind="cold", delay_s=60) as (url, session):
            asked = asyncio.create_task(ask(url, False))
            await asyncio.sleep(0.3)
            assert not asked.done()
            async with session.delete("/twin/fault") as answer:
                assert answer.status == 200
            assert (await asked).end == "whole"

    asyncio.run(run())


def test_an_unsure_answer_is_decided_by_a_hair_at_every_token() -> None:
    async def run() -> list[int]:
        async with serving(H100) as url, aiohttp.ClientSession(url) as session:
            found = []
            for kind in ("slow", "unsure"):
                await session.post("/twin/fault", data=json.dumps({"kind": kind}))
                whole = await ask(url, False, logprobs=True, top_logprobs=5)
                tokens = json.loads(whole.body)["choices"][0]["logprobs"]["content"]
                tops = [[top["logprob"] for top in token["top_logprobs"]] for token in tokens]
                sure = certainty(tops)
                assert sure is not None
                found.append(sure.close_permille)
            return found

    assert asyncio.run(run()) == [0, 1000]


def test_a_fault_ends_by_itself_and_a_wrong_one_is_refused() -> None:
    async def run() -> None:
        async with faulty(kind="http_500", for_s=3.0) as (url, session):
            assert (await ask(url, False)).head.startswith(b"HTTP/1.1 500 ")
            async with asyncio.timeout(20):
                while (await state(session))["fault"] is not None:  # noqa: ASYNC110 - over HTTP
                    await asyncio.sleep(0.05)
            assert (await ask(url, False)).head.startswith(b"HTTP/1.1 200 ")
            async with session.post("/twin/fault", data=b'{"kind": "typo"}') as answer:
                assert answer.status == 400
                assert "typo" in await answer.text()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "body"), [("blank", b""), ("empty", b'{"object":"list","data":[]}')]
)
def test_embeddings_are_struck_too(kind: str, body: bytes) -> None:
    async def run() -> None:
        async with (
            serving("h100-sxm/qwen3-embedding-0.6b") as url,
            aiohttp.ClientSession(url) as session,
        ):
            await session.post("/twin/fault", data=json.dumps({"kind": kind}))
            async with session.post("/v1/embeddings", json={"input": "x"}) as answer:
                assert (answer.status, await answer.read()) == (200, body)

    asyncio.run(run())
