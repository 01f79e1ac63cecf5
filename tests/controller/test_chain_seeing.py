"""A chain of three calls and a step of the client's own, in front of served twins: one trace over
all of it, what the admin API shows, and what is left of it on disk."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
import pytest
from click.testing import CliRunner

from controller.gateway.keys import Entry, add_entry, digest_of
from controller.telemetry.chain_traces import derived
from tests.controller.inprocess import serving
from tests.controller.processes import MODEL, Controllers, http, patient, settings_for
from tests.telemetry_servers import Collector, attributes
from twinkeel import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from controller.config import Settings
    from controller.serve import Running
    from tests.controller.processes import Controller, Twin

TRACE, CALLERS = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEY = "twk_a-key-for-tests-of-own-steps"
PATH = "/v1/chat/completions"
STEPS = ("plan", "search", "summary")
BUDGET_S = 60
BUDGET = f"chains: {{default: {{budget_ms: {BUDGET_S * 1000}}}}}\n"
pytestmark = pytest.mark.usefixtures("patient_telemetry")
OWN = {
    "step": "db_query", "took_ms": 40, "began_ago_ms": 41.5,
    "attributes": {"rows": 42, "similarity": 0.83, "index": "orders", "cached": False},
}  # fmt: skip


@dataclass
class Seen:
    """What was told of it."""

    spans: list[Span] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    """Each answer's ``traceparent``."""
    chain: dict[str, Any] = field(default_factory=dict)
    listed: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    metrics: str = ""


async def play(session: aiohttp.ClientSession, url: str, traceparent: str, seen: Seen) -> None:
    """The chain ``c-1`` of ann: two calls, the client's own step, and a third call, streamed."""
    head = {"x-twinkeel-user": "ann", "x-twinkeel-line": "shop"}
    for number, step in enumerate(STEPS):
        if step == "summary":
            own = f"{url}/v1/chains/c-1/steps"
            async with session.post(own, json=OWN, headers=head) as answer:
                assert answer.status == 204, await answer.text()
        body = {
            "model": MODEL, "max_tokens": 4, "stream": step == "summary",
            "messages": [{"role": "user", "content": "what was ordered"}],
        }  # fmt: skip
        more = {"x-twinkeel-chain": "c-1", "x-twinkeel-step": step}
        if traceparent and number == 0:
            more["traceparent"] = traceparent
        async with session.post(f"{url}{PATH}", json=body, headers=head | more) as answer:
            assert answer.status == 200, await answer.text()
            seen.headers.append(answer.headers["traceparent"])
            await answer.read()


async def ask(session: aiohttp.ClientSession, running: Running, path: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {running.admin_token}"}
    async with session.get(f"{running.admin_url}{path}", headers=headers) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text[:1] == "{" else text


def seen_of(urls: list[str], folder: Path, traceparent: str = "", share: float = 1.0) -> Seen:
    folder.mkdir(exist_ok=True)

    async def run() -> Seen:
        seen = Seen()
        async with Collector() as collector, aiohttp.ClientSession() as session:
            settings = settings_for(
                urls, folder, otlp=collector.url, span_share=share, policy=patient(folder, BUDGET)
            )
            async with serving(settings) as running:
                await play(session, running.url, traceparent, seen)
                status, seen.chain = await ask(session, running, "/chains/c-1")
                assert status == 200
                assert await ask(session, running, "/chains/c-1?user=ann") == (200, seen.chain)
                for missing in ("/chains/c-1?user=bob", "/chains/c-2", "/chains/%FF"):
                    status, told = await ask(session, running, missing)
                    assert (status, told["error"]["code"]) == (404, "no_such_chain")
                seen.listed = (await ask(session, running, "/chains"))[1]["chains"]
                seen.answers = (await ask(session, running, "/status"))[1]["answers"]
                seen.metrics = (await ask(session, running, "/metrics"))[1]
        seen.spans = collector.spans
        return seen

    return asyncio.run(run())


def test_a_chain_is_one_trace_and_is_shown_step_by_step(twins: list[Twin], tmp_path: Path) -> None:
    seen = seen_of([twin.url for twin in twins], tmp_path)
    trace_id, root_id, _ = derived("ann", "c-1")
    trace, root = f"{trace_id:032x}", f"{root_id:016x}"
    assert {span.trace_id.hex() for span in seen.spans} == {trace}
    assert [told[:36] + told[-2:] for told in seen.headers] == [f"00-{trace}-01"] * 3
    by_name = {name: [s for s in seen.spans if s.name == name] for name in
               (f"POST {PATH}", f"chat {MODEL}", "step db_query", "chain c-1")}  # fmt: skip
    assert {name: len(found) for name, found in by_name.items()} == {
        f"POST {PATH}": 3, f"chat {MODEL}": 3, "step db_query": 1, "chain c-1": 1,
    }  # fmt: skip
    (whole,), (own,) = by_name["chain c-1"], by_name["step db_query"]
    servers = by_name[f"POST {PATH}"]
    assert (whole.span_id.hex(), whole.parent_span_id) == (root, b"")
    assert {span.parent_span_id.hex() for span in (*servers, own)} == {root}
    assert [told[36:52] for told in seen.headers] == [span.span_id.hex() for span in servers]
    assert whole.start_time_unix_nano == min(s.start_time_unix_nano for s in servers)
    assert whole.end_time_unix_nano == max(s.end_time_unix_nano for s in servers)
    said = attributes(own)
    assert said["twinkeel.result.rows"] == 42
    assert said["twinkeel.result.similarity"] == 0.83
    assert said["twinkeel.result.index"] == "orders"
    assert said["twinkeel.result.cached"] is False
    assert own.end_time_unix_nano - own.start_time_unix_nano == 40_000_000
    for span, step in zip(servers, STEPS, strict=True):
        told = attributes(span)
        assert (told["twinkeel.chain.id"], told["twinkeel.chain.step"]) == ("c-1", step)
        assert told["twinkeel.checkpoint_id"]
        assert told["gen_ai.usage.output_tokens"] == 4
        assert {"twinkeel.tier", "twinkeel.outcome", "twinkeel.hop.queue_ms"} < set(told)
        assert told["twinkeel.replica"] in (0, 1)

    chain = seen.chain
    assert (chain["trace_id"], chain["user"], chain["line"]) == (trace, "ann", "shop")
    assert (chain["budget_s"], chain["over"], chain["partial"]) == (BUDGET_S, False, False)
    assert 0 < chain["left_s"] < BUDGET_S
    steps = chain["steps"]
    assert [(s["step"], s["external"]) for s in steps] == [
        ("plan", False), ("search", False), ("db_query", True), ("summary", False),
    ]  # fmt: skip
    for span, step in zip(servers, [s for s in steps if not s["external"]], strict=True):
        took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert abs(step["ended_s"] - step["began_s"] - took_s) < 0.001
        assert step["checkpoint"] == attributes(span)["twinkeel.checkpoint_id"]
        assert (step["outcome"], step["model"], step["output_tokens"]) == ("answered", MODEL, 4)
        assert step["prompt_tokens"] > 0
        assert step["replica"]
        assert None not in [step[f"{hop}_s"] for hop in ("gateway", "queue", "prefill", "decode")]
    assert steps[0]["began_s"] == 0
    assert steps[2]["attributes"] == OWN["attributes"]
    assert (steps[2]["outcome"], steps[2]["queue_s"], steps[2]["request"]) == ("done", None, "")
    (line,) = seen.listed
    assert (line["chain"], line["user"], line["steps"]) == ("c-1", "ann", 4)
    assert seen.answers["budget"]["burst_tokens"] > 0
    assert 'twinkeel_chain_steps_total{of="request",outcome="answered"} 3' in seen.metrics
    assert 'twinkeel_chain_steps_total{of="client",outcome="done"} 1' in seen.metrics


def test_the_callers_trace_holds_for_the_whole_chain(twins: list[Twin], tmp_path: Path) -> None:
    given = f"00-{TRACE}-{CALLERS}-01"
    seen = seen_of([twins[0].url], tmp_path, given, share=0.0)
    assert {span.trace_id.hex() for span in seen.spans} == {TRACE}
    names = [span.name for span in seen.spans]
    assert (names.count(f"POST {PATH}"), names.count("step db_query")) == (3, 1)
    assert "chain c-1" not in names  # its caller has a span of it
    for span in seen.spans:
        if span.name in (f"POST {PATH}", "step db_query"):
            assert span.parent_span_id.hex() == CALLERS
    assert seen.chain["trace_id"] == TRACE
    assert all(told.startswith(f"00-{TRACE}-") and told.endswith("-01") for told in seen.headers)


def test_what_is_not_traced_is_shown_nevertheless(twins: list[Twin], tmp_path: Path) -> None:
    seen = seen_of([twins[0].url], tmp_path / "share", share=0.0)
    trace_id, root_id, _ = derived("ann", "c-1")
    assert not seen.spans
    assert seen.headers == [f"00-{trace_id:032x}-{root_id:016x}-00"] * 3
    seen = seen_of([twins[0].url], tmp_path / "caller", f"00-{TRACE}-{CALLERS}-00")
    assert not seen.spans
    assert set(seen.headers) == {f"00-{TRACE}-{CALLERS}-00"}
    assert (seen.chain["trace_id"], len(seen.chain["steps"])) == (TRACE, 4)


def shell(*words: str) -> Any:
    return CliRunner().invoke(main, ["trace", "show", *words])


def test_trace_show_prints_the_waterfall(twins: list[Twin], tmp_path: Path) -> None:
    """From the data folder and by the admin API, while it serves and when it does not."""
    seen = Seen()
    outputs: list[str] = []
    settings = settings_for(
        [twins[0].url], tmp_path, sample_share=1.0, policy=patient(tmp_path, BUDGET)
    )

    async def run() -> None:
        async with aiohttp.ClientSession() as session, serving(settings) as running:
            await play(session, running.url, "", seen)
            seen.chain = (await ask(session, running, "/chains/c-1"))[1]
            token = tmp_path / "token"
            token.write_text(running.admin_token)
            words = ("c-1", "--admin", running.admin_url, "--token-file", str(token))
            told = await asyncio.to_thread(shell, *words)
            assert told.exit_code == 0, told.output
            outputs.append(told.output)
            told = await asyncio.to_thread(shell, *words, "--json")
            assert json.loads(told.output) == seen.chain
            unknown = await asyncio.to_thread(shell, "c-9", *words[1:])
            assert unknown.exit_code == 2
            assert "no step of a chain 'c-9' is known" in unknown.output
            assert "the youngest are: c-1 of ann" in unknown.output
            told = await asyncio.to_thread(shell, *words, "--texts")
            assert told.exit_code == 2
            assert "--data" in told.output

    asyncio.run(run())
    told = shell("c-1", "--data", str(settings.data_path), "--user", "ann")
    assert told.exit_code == 0, told.output
    outputs.append(told.output)
    outputs = [output.replace("; its budget is over", "") for output in outputs]
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert lines[0] == "chain c-1 of ann, line shop"
    assert lines[1] == f"trace {seen.chain['trace_id']}"
    assert f"4 steps in {max(s['ended_s'] for s in seen.chain['steps']):.3f} s" in lines[2]
    assert f"{seen.chain['left_s']:.3f} s of {BUDGET_S} s were left" in lines[2]
    bars = {name: next(at for at in lines if at.startswith(name)) for name in (*STEPS, "db_query")}
    assert all("#" in bars[name] for name in STEPS)  # decoding
    assert "~" in bars["db_query"]
    starts = [len(bars[s["step"]]) - len(bars[s["step"]].lstrip("abcdefghijklmnopqrstuvwxyz_ "))
              for s in seen.chain["steps"]]  # fmt: skip
    assert starts == sorted(starts)
    for step in seen.chain["steps"]:
        assert step["checkpoint"] in outputs[0]
    assert "rows=42, similarity=0.83, index=orders, cached=false" in outputs[0]
    assert "what was ordered" not in outputs[0]
    told = shell("c-1", "--data", str(settings.data_path), "--texts")
    assert told.output.count("what was ordered") == 3
    assert told.output.count("answer:") == 3
    assert "(none)" not in told.output  # the stream's answer, too
    unknown = shell("c-1", "--data", str(settings.data_path), "--user", "bob")
    assert unknown.exit_code == 2
    assert "of bob is known; the youngest are: c-1 of ann" in unknown.output


def test_a_chain_outlives_its_controller(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    controller = controllers([twins[0].url], policy=patient(tmp_path, BUDGET))
    head = {"x-twinkeel-chain": "c-1", "x-twinkeel-user": "ann"}
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}

    def call(step: str) -> None:
        status, told = http(
            "POST", f"{controller.url}{PATH}", body, {**head, "x-twinkeel-step": step}
        )
        assert status == 200, told

    def chain() -> dict[str, Any]:
        return json.loads(controller.admin("GET", "/chains/c-1")[1])  # type: ignore[no-any-return]

    call("one")
    before = chain()
    controller.kill()
    controller = controllers.again(controller.settings, controller.folder)
    assert chain() | {"over": False} == before | {"over": False}
    call("two")
    assert [step["step"] for step in chain()["steps"]] == ["one", "two"]
    assert chain()["trace_id"] == before["trace_id"]


CANARY = "xylophone-canary-4711"


def holds(folder: Path, text: str) -> list[str]:
    return [
        path.name
        for path in folder.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]


def test_no_text_is_on_disk_unless_it_is_sampled(twins: list[Twin], tmp_path: Path) -> None:
    """Checkpoints aside: they are the answers of chains, which callers get again."""

    answers: list[str] = []

    async def ask_all(settings: Settings) -> None:
        async with aiohttp.ClientSession() as session, serving(settings) as running:
            for stream in (False, True):
                for chain in ("", "c-1"):
                    body = {
                        "model": MODEL, "max_tokens": 4, "stream": stream,
                        "messages": [{"role": "user", "content": f"{CANARY} of ann@example.com"}],
                    }  # fmt: skip
                    head = {"x-twinkeel-user": "ann", "x-twinkeel-step": f"s{stream}"}
                    if chain:
                        head["x-twinkeel-chain"] = chain
                    url = f"{running.url}{PATH}"
                    async with session.post(url, json=body, headers=head) as answer:
                        assert answer.status == 200
                        body = await answer.read()
                    if not stream:
                        answers.append(json.loads(body)["choices"][0]["message"]["content"])

    off = settings_for([twins[0].url], tmp_path / "off")
    asyncio.run(ask_all(off))
    assert holds(off.data_path, CANARY) == []
    # Answers are kept for those who get them again, and nowhere else.
    for text in answers:
        held = {name.partition(".sqlite")[0] for name in holds(off.data_path, text)}
        assert held <= {"answers", "checkpoints"}
    assert not (off.data_path / "samples").exists()
    redact = tmp_path / "redact"
    redact.write_text("instrument = xylophone\n", encoding="utf-8")
    on = settings_for([twins[0].url], tmp_path / "on", sample_share=1.0, redact=str(redact))
    asyncio.run(ask_all(on))
    assert holds(on.data_path, "xylophone") == []
    assert holds(on.data_path, "ann@example.com") == []
    (name,) = holds(on.data_path, "[instrument]-canary-4711 of [email]")
    lines = (on.data_path / "samples" / name).read_text().splitlines()
    assert len(lines) == 4
    assert all(json.loads(line)["answer"] for line in lines)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"step": "db", "took_ms": 5}, 204, ""),
        ({"step": "db", "took_ms": 0, "began_ago_ms": None, "outcome": "late"}, 204, ""),
        ({"step": "数据库", "took_ms": 5, "attributes": {"n": None, "ok": True}}, 204, ""),
        ({"took_ms": 5}, 400, "step"), ({"step": "db"}, 400, "took_ms"),
        ({"step": "", "took_ms": 5}, 400, "step"), ({"step": "x" * 257, "took_ms": 5}, 400, "step"),
        ({"step": "d\nb", "took_ms": 5}, 400, "step"), ({"step": "db", "took_ms": -1}, 400, "took"),
        ({"step": "db", "took_ms": 1e12}, 400, "took_ms"),
        ({"step": "db", "took_ms": 5, "began_ago_ms": 4}, 400, "end in the future"),
        ({"step": "db", "took_ms": 5, "outcome": "fine"}, 400, "outcome"),
        ({"step": "db", "took_ms": 5, "rows": 4}, 400, "rows"),
        ({"step": "db", "took_ms": 5, "attributes": {"x": [1]}}, 400, "attributes.x"),
        ({"step": "db", "took_ms": 5, "attributes": {"x": "y" * 257}}, 400, "at most 256"),
        ({"step": "db", "took_ms": 5, "attributes": {"x": 1 << 63}}, 400, "64 bits"),
        ({"step": "db", "took_ms": 5, "attributes": {"": 1}}, 400, "1 to 64"),
        ({"step": "db", "took_ms": 5, "attributes": {"x" * 65: 1}}, 400, "1 to 64"),
        ({"step": "db", "took_ms": 5, "attributes": dict.fromkeys(map(str, range(65)), 1)}, 400,
         "at most 64"),
        (b"{", 400, "not JSON"), (b"[]", 400, "cannot be understood"), (b"\xff", 400, ""),
        (b"[" * 9000, 400, ""), (b'{"step": "' + b"x" * 17_000 + b'"}', 413, "16384 bytes"),
    ],
)  # fmt: skip
def test_a_clients_own_step_is_taken_or_told_why_not(
    own_steps: Controller, body: Any, status: int, said: str
) -> None:
    url = f"{own_steps.url}/v1/chains/{quote('own 1/2')}/steps"
    got, told = http("POST", url, body, {"Authorization": f"Bearer {KEY}"})
    assert got == status, told
    if status != 204:
        error = json.loads(told)["error"]
        assert said in error["message"]
    else:
        status, told = own_steps.admin("GET", f"/chains/{quote('own 1/2')}?user=support")
        assert status == 200
        assert body["step"] in [each["step"] for each in json.loads(told)["steps"]]


def test_a_clients_own_step_needs_its_key(own_steps: Controller) -> None:
    body = {"step": "db", "took_ms": 5}
    url = f"{own_steps.url}/v1/chains/mine/steps"
    assert http("POST", url, body)[0] == 401
    assert http("POST", url, body, {"Authorization": "Bearer nonsense"})[0] == 401
    assert own_steps.admin("GET", "/chains/mine")[0] == 404
    key = {"Authorization": f"Bearer {KEY}"}
    assert http("GET", url, None, key)[0] == 405
    assert http("POST", f"{own_steps.url}/v1/chains//steps", body, key)[0] == 404
    assert http("POST", url, body, {**key, "x-twinkeel-user": "ann"})[0] == 204
    chain = json.loads(own_steps.admin("GET", "/chains/mine")[1])
    assert (chain["user"], chain["line"]) == ("support/ann", "desk")


@pytest.fixture(scope="module")
def own_steps(
    served_twins: list[Twin], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controller]:
    folder = tmp_path_factory.mktemp("own-steps")
    keys = folder / "keys.yaml"
    add_entry(keys, Entry(digest_of(KEY), "support", "P1", "desk"))
    started = Controllers(folder)
    try:
        yield started([served_twins[0].url], keys=str(keys))
    finally:
        started.close()
