"""A server that answers like vLLM at next to no cost, so that a gateway before it is what counts.

Runs as a process of its own (``python -m tests.bench.gateway.mock``) and prints ``mock URL [URL
...]``. Chat answers come 20 ms after the request; streams bring 50 events, one each 5 ms. A request
with ``"mock": "idle"`` gets its first event and then one a minute. It also takes spans (OTLP over
HTTP) and forgets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import cast

import msgspec
import uvloop

MODEL = "qwen3-8b"
PROFILE = "h100-sxm/qwen3-8b"
ANSWER_S = 0.020
EVENTS = 50
EVENT_S = 0.005
IDLE_S = 60.0
PROMPT_TOKENS = 24
SHORT_TOKENS = 16
KV_BLOCKS = 100_000


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Ask(msgspec.Struct):
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    mock: str = ""


_DECODER = msgspec.json.Decoder(_Ask)


def _logprob(top: int) -> dict[str, object]:
    def entry(rank: int) -> dict[str, object]:
        return {"token": f" w{rank}", "logprob": -0.1 - 2.5 * rank, "bytes": [32, 119, 48 + rank]}

    return {**entry(0), "top_logprobs": [entry(rank) for rank in range(top)]}


def _usage(tokens: int) -> dict[str, object]:
    return {
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "total_tokens": PROMPT_TOKENS + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": None,
        },
        "metrics": {
            "time_to_first_token_ms": 12.5,
            "generation_time_ms": 5.0,
            "queue_time_ms": 0.1,
            "mean_itl_ms": 5.0,
            "tokens_per_second": 200.0,
        },
    }


def short_answer(top: int) -> bytes:
    """A whole response of about 400 bytes of JSON; ``top`` > 0: with that many logprobs."""
    content = [_logprob(top)] * SHORT_TOKENS
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " word" * SHORT_TOKENS},
        "logprobs": {"content": content} if top else None,
        "finish_reason": "stop",
    }
    body = {
        "id": "chatcmpl-mock", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [choice], **_usage(SHORT_TOKENS),
    }  # fmt: skip
    return _response("application/json", _compact(body))


def _compact(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _response(content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: {content_type}\r\n\r\n".encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def _event(choices: list[object], more: dict[str, object] | None = None) -> bytes:
    body = {
        "id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
        "choices": choices, **(more or {}),
    }  # fmt: skip
    return _chunk(b"data: " + _compact(body) + b"\n\n")


def token_event(top: int, role: bool = False) -> bytes:
    """One event with a token; ``role``: the one before the first token."""
    delta = {"role": "assistant", "content": ""} if role else {"content": " word"}
    logprobs = {"content": [_logprob(top)]} if top and not role else None
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
    return _event([choice])


def end_events(usage: bool) -> bytes:
    """What a stream ends with."""
    choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "length"}
    events = _event([choice])
    if usage:
        events += _event([], _usage(EVENTS))
    return events + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


SHORT = {top: short_answer(top) for top in (0, 2, 5)}
TOKEN = {top: token_event(top) for top in (0, 2, 5)}
ROLE = token_event(0, role=True)
END = {usage: end_events(usage) for usage in (False, True)}
METRICS = f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.01
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{KV_BLOCKS}"}} 1.0
""".encode()
MODELS = _compact({
    "object": "list",
    "data": [{
        "id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL,
        "max_model_len": 40_960, "twinkeel_profile": PROFILE,
    }],
})  # fmt: skip
PAGES = {
    b"/health": _response("text/plain", b""),
    b"/metrics": _response("text/plain; version=0.0.4", METRICS),
    b"/v1/models": _response("application/json", MODELS),
    b"/version": _response("application/json", b'{"version":"0.32.0"}'),
    b"/v1/traces": _response("application/x-protobuf", b""),
}
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Counts:
    """What came by, over all ports."""

    def __init__(self) -> None:
        self.requests = 0
        self.open = 0
        self.left = 0
        """Clients that went away before their answer was complete."""

    def page(self) -> bytes:
        body = {"requests": self.requests, "open": self.open, "left": self.left}
        return _response("application/json", _compact(body))


class Server(asyncio.Protocol):
    """One connection; one request at a time, as HTTP/1.1 clients send them."""

    __slots__ = ("_answering", "_counts", "_data", "_loop", "_timer", "_transport")

    def __init__(self, counts: Counts, loop: asyncio.AbstractEventLoop) -> None:
        self._counts = counts
        self._loop = loop
        self._data = b""
        self._answering = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._timer is not None:
            self._timer.cancel()
        if self._answering:
            self._counts.left += 1
            self._over()

    def data_received(self, data: bytes) -> None:
        if self._data:
            data = self._data + data
        while not self._answering:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                break
            head = data[:end].lower()
            size = 0
            at = head.find(b"\r\ncontent-length:")
            if at >= 0:
                stop = head.find(b"\r\n", at + 2)
                size = int(head[at + 17 : stop if stop >= 0 else end])
            whole = end + 4 + size
            if len(data) < whole:
                break
            self._serve(head, data[end + 4 : whole])
            data = data[whole:]
        self._data = data

    def _serve(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path not in (b"/v1/chat/completions", b"/v1/completions"):
            page = self._counts.page() if path == b"/mock/counts" else PAGES.get(path, NOT_FOUND)
            self._transport.write(page)
            return
        ask = _DECODER.decode(body)
        top = ask.top_logprobs or 0 if ask.logprobs else 0
        top = top if top in SHORT else 5
        self._counts.requests += 1
        self._counts.open += 1
        self._answering = True
        if ask.mock == "idle":
            self._later(ANSWER_S, self._idle, True)
        elif ask.stream:
            usage = ask.stream_options is not None and ask.stream_options.include_usage
            self._later(ANSWER_S, self._first, top, usage)
        else:
            self._later(ANSWER_S, self._whole, SHORT[top])

    def _later(self, delay_s: float, call: object, *args: object) -> None:
        self._timer = self._loop.call_later(delay_s, call, *args)  # type: ignore[arg-type]

    def _over(self) -> None:
        self._answering = False
        self._counts.open -= 1

    def _whole(self, answer: bytes) -> None:
        self._transport.write(answer)
        self._over()

    def _first(self, top: int, usage: bool) -> None:
        self._transport.write(STREAM_HEAD + ROLE + TOKEN[top])
        self._later(EVENT_S, self._next, EVENTS - 1, top, usage, self._loop.time() + EVENT_S)

    def _next(self, left: int, top: int, usage: bool, due_s: float) -> None:
        self._transport.write(TOKEN[top])
        if left > 1:
            # Against the clock, or the delays of the timers would add up.
            due_s += EVENT_S
            wait_s = max(0.0, due_s - self._loop.time())
            self._later(wait_s, self._next, left - 1, top, usage, due_s)
        else:
            self._transport.write(END[usage])
            self._over()

    def _idle(self, first: bool) -> None:
        self._transport.write(STREAM_HEAD + ROLE + TOKEN[0] if first else TOKEN[0])
        # Streams that were opened together must not speak together, nor all be silent together.
        wait_s = IDLE_S * random.random() if first else IDLE_S  # noqa: S311
        self._later(wait_s, self._idle, False)


async def serve(ports: int) -> None:
    """Listen on that many ports until killed."""
    loop = asyncio.get_running_loop()
    counts = Counts()
    urls = []
    servers = []
    for _ in range(ports):
        server = await loop.create_server(
            lambda: Server(counts, loop), "127.0.0.1", 0, backlog=4096
        )
        servers.append(server)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print("mock", *urls, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, default=1)
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
