"""Telemetry of a controller that runs: one trace to the server, metrics, an alert."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.telemetry.timing import parse
from tests.controller.inprocess import serving
from tests.controller.processes import MODEL, patient, settings_for
from tests.controller.wire import relay
from tests.telemetry_servers import Collector, Pager, attributes, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Twin

TRACE, CALLERS = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PATH = "/v1/chat/completions"
pytestmark = pytest.mark.usefixtures("patient_telemetry")
BODY = {
    "model": MODEL, "max_tokens": 8, "stream": True, "user": "ferdinand",
    "messages": [{"role": "user", "content": "a secret"}],
}  # fmt: skip


def test_one_trace_and_what_the_metrics_say_of_it(twins: list[Twin], tmp_path: Path) -> None:
    async def run() -> tuple[Collector, str, str]:
        async with Collector() as collector, aiohttp.ClientSession() as session:
            settings = settings_for(
                [wire.url], tmp_path, otlp=collector.url, span_share=0.0, record=False,
                policy=patient(tmp_path),
            )  # fmt: skip
            async with serving(settings) as running:
                for flags in ("01", "00"):
                    headers = {"traceparent": f"00-{TRACE}-{CALLERS}-{flags}"}
                    url = f"{running.url}{PATH}"
                    async with session.post(url, json=BODY, headers=headers) as answer:
                        assert answer.status == 200
                        timing = answer.headers["Server-Timing"]
                        await answer.read()
                admin = {"Authorization": f"Bearer {running.admin_token}"}
                async with session.get(f"{running.admin_url}/metrics", headers=admin) as answer:
                    text = await answer.text()
        return collector, timing, text

    with relay(twins[0].url) as wire:
        collector, timing, text = asyncio.run(run())
        sent = [asked.headers["traceparent"] for asked, _ in wire.exchanges(PATH)]
    assert {"gateway", "queue", "first"} == set(parse(timing))
    (server,) = [span for span in collector.spans if span.name == f"POST {PATH}"]
    (client,) = [span for span in collector.spans if span.name == f"chat {MODEL}"]
    assert server.trace_id.hex() == client.trace_id.hex() == TRACE
    assert server.parent_span_id.hex() == CALLERS
    assert client.parent_span_id == server.span_id
    assert f"00-{TRACE}-{client.span_id.hex()}-01" in sent
    assert f"00-{TRACE}-{CALLERS}-00" in sent  # not ours to trace: it passes as it is
    assert server.start_time_unix_nano <= client.start_time_unix_nano
    assert client.end_time_unix_nano <= server.end_time_unix_nano
    assert attributes(server)["gen_ai.usage.output_tokens"] == 8
    assert {event.name for event in server.events} == {"first_token", "stream_end"}
    assert b"secret" not in b"".join(collector.bodies)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["twinkeel_output_tokens_total", MODEL] == 16
    assert sum(v for k, v in values.items() if k[0] == "twinkeel_ttft_seconds_count") == 2
    assert values["twinkeel_hop_seconds_count", "decode"] == 2
    assert values["twinkeel_open_requests",] == 0
    assert "ferdinand" not in text
    assert "secret" not in text


def test_an_alert_reaches_the_webhook(twins: list[Twin], tmp_path: Path) -> None:
    async def run() -> Pager:
        async with Pager() as pager, aiohttp.ClientSession() as session:
            settings = settings_for(
                [twin.url for twin in twins], tmp_path, webhook=pager.url, record=False,
                policy=patient(tmp_path),
            )  # fmt: skip
            async with serving(settings) as running:
                twins[0].fault(kind="http_500")

                async def ask() -> int:
                    async with session.post(f"{running.url}{PATH}", json=BODY) as answer:
                        await answer.read()
                        return answer.status

                # At once: one by one they would soon all go to the other server.
                assert set(await asyncio.gather(*[ask() for _ in range(12)])) == {200}
                await until(lambda: bool(pager.got))
        return pager

    body, key = asyncio.run(run()).got[0]
    assert body["cause"]
    assert body["figures"]
    assert body["action"]
    assert body["policy"] == "patient"
    assert key
