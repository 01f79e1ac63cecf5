"""Spans as a collector receives them over OTLP/HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from controller.config import Settings
from controller.telemetry.spans import Spans
from policy.decisions import Settled, Verify
from policy.events import Failed, Verified
from tests.telemetry_servers import Collector, attributes
from tests.telemetry_support import MS, S, answer, call, dispatch, refuse

if TYPE_CHECKING:
    from controller.call import Call

TRACE, CALLERS = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{CALLERS}-01"
EPOCH_NS = 1_700_000_000 * S


def spans(url: str, share: float = 0.0) -> Spans:
    settings = Settings((), otlp=url, span_share=share, port=8080)
    return Spans(settings, EPOCH_NS, lambda replica: f"http://10.0.0.{replica}:8000")


def begin(of: Spans, made: Call, replica: int = 0) -> str:
    """Its next try; the trace context that went with it."""
    if not made.tries:
        of.arrived(made)
    dispatch(made, replica, queue_ns=10 * MS * (1 + made.tries))
    of.dispatched(made)
    return of.traceparent(made)


def end(of: Spans, made: Call, settled: Settled) -> None:
    if made.first_ns >= 0:
        of.first_token(made)
    of.settled(made, settled)


def test_one_trace_over_caller_controller_and_vllm() -> None:
    async def run() -> tuple[Collector, str, Call]:
        async with Collector() as collector:
            of = spans(collector.url)
            made = call(3, traceparent=SAMPLED, body=b"a secret", document={"prompt": "a secret"})
            sent = begin(of, made, replica=4)
            settled = answer(made)
            made.body = b"a secret"
            end(of, made, settled)
            await of.close()
            assert of.counts() == (3, 0, 0)
        return collector, sent, made

    collector, sent, made = asyncio.run(run())
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert collector.resource["service.name"] == "twinkeel"
    (server,) = collector.named("POST /v1/chat/completions")
    (queue,) = collector.named("queue")
    (client,) = collector.named("chat qwen")
    assert server.parent_span_id.hex() == CALLERS
    assert queue.parent_span_id == client.parent_span_id == server.span_id
    # What vLLM was told: its own span becomes a child of the try's.
    assert sent == f"00-{TRACE}-{client.span_id.hex()}-01"
    assert (server.kind, client.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert server.start_time_unix_nano == EPOCH_NS + made.entered_ns
    assert server.end_time_unix_nano == EPOCH_NS + made.settled_ns
    assert queue.end_time_unix_nano == client.start_time_unix_nano == EPOCH_NS + made.dispatched_ns
    assert client.end_time_unix_nano == EPOCH_NS + made.last_ns
    for span in (server, client):
        assert [(event.name, event.time_unix_nano) for event in span.events] == [
            ("first_token", EPOCH_NS + made.first_ns), ("stream_end", EPOCH_NS + made.last_ns),
        ]  # fmt: skip
    assert b"secret" not in b"".join(collector.bodies)
    assert b"ann" not in b"".join(collector.bodies)
    check_attributes(attributes(server), attributes(client))


def check_attributes(server: dict[str, Any], client: dict[str, Any]) -> None:
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "qwen",
        "gen_ai.request.max_tokens": 100, "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 11, "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.response.finish_reasons": ["stop"], "http.response.status_code": 200,
        "server.address": "127.0.0.1", "server.port": 8080, "twinkeel.tier": "turbo",
        "twinkeel.sla": "P0", "twinkeel.outcome": "answered", "twinkeel.tries": 1,
        "twinkeel.hop.queue_ms": 10.0, "twinkeel.hop.decode_ms": 200.0,
        "twinkeel.hop.network_ms": 2.0, "gen_ai.response.time_to_first_chunk": 0.201,
    }  # fmt: skip
    assert {name: server[name] for name in expected} == expected
    assert "twinkeel.hop.rest_ms" in server
    assert "error.type" not in server
    assert (client["server.address"], client["server.port"]) == ("10.0.0.4", 8000)
    assert client["gen_ai.operation.name"] == "chat"


def test_a_try_that_failed_and_the_one_after_it() -> None:
    async def run() -> tuple[Collector, list[str], Call]:
        async with Collector() as collector:
            of = spans(collector.url, share=1.0)
            made = call(3, stream=False)
            sent = [begin(of, made, 0)]
            of.fed(made.dispatched_ns + 2 * MS, Failed(made.request, 0, "http_5xx"))
            sent.append(begin(of, made, 1))
            end(of, made, answer(made))
            await of.close()
        return collector, sent, made

    collector, sent, made = asyncio.run(run())
    first, second = collector.named("chat qwen")
    assert [span.span_id.hex() for span in (first, second)] == [each.split("-")[2] for each in sent]
    assert attributes(first)["error.type"] == "http_5xx"
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert second.status.code == Status.STATUS_CODE_UNSET
    assert [attributes(each)["twinkeel.try"] for each in (first, second)] == [1, 2]
    waits = [
        (each.start_time_unix_nano - EPOCH_NS, each.end_time_unix_nano - EPOCH_NS)
        for each in collector.named("queue")
    ]
    at_ns = made.arrived_ns
    assert waits == [(at_ns, at_ns + 10 * MS), (at_ns + 12 * MS, at_ns + 20 * MS)]
    (server,) = collector.named("POST /v1/chat/completions")
    assert server.status.code == Status.STATUS_CODE_UNSET
    assert not server.parent_span_id
    assert not server.events


def test_a_try_that_the_policy_gave_up_on_its_own() -> None:
    async def run() -> Collector:
        async with Collector() as collector:
            of = spans(collector.url, share=1.0)
            made = call(3)
            begin(of, made, 0)
            begin(of, made, 1)
            end(of, made, answer(made))
            await of.close()
        return collector

    first, second = asyncio.run(run()).named("chat qwen")
    assert attributes(first)["error.type"] == "aborted"
    assert first.end_time_unix_nano == second.start_time_unix_nano
    assert not first.events


def test_shed_failed_and_cancelled_ones() -> None:
    async def run() -> Collector:
        async with Collector() as collector:
            of = spans(collector.url, share=1.0)
            shed = call(1)
            of.arrived(shed)
            end(of, shed, refuse(shed))
            failed = call(2)
            begin(of, failed)
            end(of, failed, refuse(failed, "failed", "silent", 504))
            left = call(3)
            begin(of, left)
            end(of, left, refuse(left, "cancelled", "client", 499))
            await of.close()
        return collector

    collector = asyncio.run(run())
    found = {
        attributes(span)["twinkeel.outcome"]: (
            attributes(span)["http.response.status_code"],
            attributes(span).get("error.type"),
            span.status.code,
        )
        for span in collector.named("POST /v1/chat/completions")
    }
    assert found == {
        "shed": (429, "deadline", Status.STATUS_CODE_UNSET),
        "failed": (504, "silent", Status.STATUS_CODE_ERROR),
        "cancelled": (499, None, Status.STATUS_CODE_UNSET),
    }
    assert len(collector.named("queue")) == 3
    failed, left = collector.named("chat qwen")
    assert attributes(failed)["error.type"] == "silent"
    assert left.status.code == Status.STATUS_CODE_UNSET
    assert len({span.trace_id for span in collector.spans}) == 3


def test_a_second_run_is_a_span_of_its_own() -> None:
    async def run() -> tuple[Collector, str]:
        async with Collector() as collector:
            of = spans(collector.url, share=1.0)
            made = call(3, stream=False)
            begin(of, made, 0)
            settled = answer(made)
            of.decided(Verify(made.request, 1))
            sent = of.traceparent(made)
            of.fed(made.last_ns + 300 * MS, Verified(made.request, 1, "match"))
            made.settled_ns = made.last_ns + 301 * MS
            end(of, made, settled)
            await of.close()
        return collector, sent

    collector, sent = asyncio.run(run())
    first, second = collector.named("chat qwen")
    assert second.span_id.hex() == sent.split("-")[2]
    assert attributes(second)["twinkeel.try"] == 0
    assert second.start_time_unix_nano == first.end_time_unix_nano
    assert second.end_time_unix_nano - second.start_time_unix_nano == 300 * MS
    assert len(collector.named("queue")) == 1


def test_a_collector_that_refuses_or_is_not_there_is_counted_and_disturbs_nothing() -> None:
    async def refuse_all() -> web.Response:
        return web.Response(status=400)

    async def run() -> None:
        async with Collector(refuse_all) as collector:
            for url in (collector.url, "http://127.0.0.1:9"):
                of = spans(url, share=1.0)
                made = call(1)
                begin(of, made)
                began_s = time.monotonic()
                end(of, made, answer(made))
                assert time.monotonic() - began_s < 0.5
                await of.close()
                assert time.monotonic() - began_s < 3.5
                assert of.counts() == (0, 3, 0)

    asyncio.run(run())


def test_a_collector_that_hangs_does_not_hold_up_the_end() -> None:
    async def run() -> float:
        never = asyncio.Event()

        async def hang() -> web.Response:
            await never.wait()
            return web.Response(status=503)

        async with Collector(hang) as collector:
            of = spans(collector.url, share=1.0)
            made = call(1)
            begin(of, made)
            end(of, made, answer(made))
            began_s = time.monotonic()
            await of.close()
            took_s = time.monotonic() - began_s
            assert of.counts() == (0, 3, 0)
            never.set()
            await asyncio.sleep(0.3)
        return took_s

    assert 1.9 < asyncio.run(run()) < 3.0


def test_what_there_is_no_room_for_is_dropped_and_counted() -> None:
    async def run() -> None:
        never = asyncio.Event()

        async def hang() -> web.Response:
            await never.wait()
            return web.Response(status=400)

        async with Collector(hang) as collector:
            settings = Settings((), otlp=collector.url, span_share=1.0)
            of = Spans(settings, EPOCH_NS, pending_most=300)
            for number in range(200):  # three spans each, with room kept for one more
                made = call(number)
                begin(of, made)
                end(of, made, answer(made))
            assert of.counts() == (0, 0, 101)
            never.set()
            await of.close()
            assert of.counts() == (0, 297, 101)

    asyncio.run(run())
