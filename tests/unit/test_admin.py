"""The admin API over real HTTP: who gets in, what is told, and that bad input is never a 500."""

from __future__ import annotations

import asyncio
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from controller.admin import Sources, Stats, Status, load_token, make_app
from controller.admin.token import Gate
from controller.call import Call, EngineTimes
from controller.config import Settings, Upstream
from controller.deployment.manager import Deployments, Tee
from controller.driver import Clock, Driver
from controller.gateway.asking import read
from controller.store.database import Database
from controller.store.steps import ChainStep, StepStore
from controller.upstream.replica import Replica
from policy.compose import build_policy
from policy.decisions import Alert, BreakerMoved, Refused, Rotated, Scaled, Settled, Verify
from policy.events import ReplicaDown, ReplicaUp, Scraped, StepsRead
from policy.files import FileError, load_policy, parse_policy
from policy.log import HashLog
from policy.parameters import render

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from aiohttp import ClientResponse

    from policy.parameters import Parameters

TOKEN = "t0ken-of-a-good-length"
SECRET_TEXT = "the patient's name is Ferdinand"

Client = TestClient[web.Request, web.Application]


class Controller(NamedTuple):
    """What the admin API stands on, without upstreams."""

    client: Client
    driver: Driver
    stats: Stats
    drained: list[str]
    steps: StepStore

    async def ask(
        self, path: str, method: str = "GET", token: str | None = TOKEN, **more: Any
    ) -> ClientResponse:
        headers = {**more.pop("headers", {})}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return await self.client.request(method, path, headers=headers, **more)

    async def json(self, path: str, **more: Any) -> Any:
        answer = await self.ask(path, **more)
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "application/json"
        return await answer.json()


def with_controller(
    folder: Path,
    work: Callable[[Controller], Awaitable[None]],
    ready: str = "",
    shadow: Parameters | None = None,
) -> None:
    """Run ``work`` beside a real driver, a real database, and the admin API on a real port."""

    async def whole() -> None:
        settings = Settings(
            upstreams=(Upstream("http://127.0.0.1:9"),), data=str(folder),
            observe=shadow is not None,
        )  # fmt: skip
        parameters = load_policy("stable" if shadow is None else "fifo")
        stats = Stats(parameters)
        steps = StepStore(folder / "chains.sqlite")
        tee = Tee(HashLog())
        driver = Driver(settings, build_policy(parameters), parameters, tee, (), Clock(), [stats])
        database = Database(folder / "controller.sqlite")
        deployments = Deployments(settings, driver, tee, database, b"k" * 32)
        driver.listen(deployments)
        drained: list[str] = []
        app = make_app(
            Sources(
                settings=settings,
                driver=driver,
                stats=stats,
                token=TOKEN,
                metrics=lambda: (b"twinkeel_up 1\n", "text/plain; version=0.0.4"),
                history=database,
                deployments=deployments,
                ready=lambda: ready,
                drain=lambda: drained.append("drain"),
                waiting=lambda: {"turbo": 4, "held": 2},
                shadow=shadow,
                chains=steps,
            )
        )
        try:
            async with TestClient(TestServer(app)) as client:
                await work(Controller(client, driver, stats, drained, steps))
        finally:
            await deployments.close()
            await driver.close()
            steps.close()
            database.close()

    asyncio.run(whole())


GETS = (
    "/metrics", "/status", "/policy", "/policies", "/deployments", "/deployments/current", "/log",
    "/alerts", "/chains", "/openapi.json",
)  # fmt: skip
OVERRIDE = {"x-twinkeel-override": "a test wants it"}


# Who gets in


@pytest.mark.parametrize(
    ("header", "opens"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        (f"Bearer {TOKEN}x", False),
        (f"Bearer {TOKEN[:-1]}", False),
        (f"Basic {TOKEN}", False),
        (TOKEN, False),
        ("Bearer", False),
        ("", False),
        ("Bearer \udcff", False),
    ],
)
def test_only_the_whole_token_opens(header: str, opens: bool) -> None:
    assert Gate(TOKEN).opens(header) == opens


def test_without_the_token_only_liveness_and_readiness_are_told(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        paths = [*GETS, "/log/decisions.0.log", "/nowhere", "/../status"]
        for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x"):
            for path in paths:
                answer = await controller.ask(path, token=token)
                assert answer.status == 401, path
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert (await answer.json())["error"]["code"] == "unauthorized"
            for method, path in (
                ("PUT", "/policy"), ("POST", "/drain"), ("POST", "/deployments"),
                ("POST", "/deployments/current/rollback"), ("GET", "/deployments/1/diff"),
                ("GET", "/chains/c-1"),
            ):  # fmt: skip
                assert (await controller.ask(path, method, token=token)).status == 401
        assert controller.drained == []
        for path in ("/live", "/ready"):
            answer = await controller.ask(path, token=None)
            assert answer.status == 200
            assert answer.headers["Cache-Control"] == "no-store"

    with_controller(tmp_path, work)


def test_not_ready_says_why(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        answer = await controller.ask("/ready", token=None)
        assert answer.status == 503
        assert await answer.json() == {"status": "not ready", "why": "no server is up"}
        assert (await controller.json("/status"))["state"] == "not ready: no server is up"
        assert (await controller.ask("/live", token=None)).status == 200

    with_controller(tmp_path, work, ready="no server is up")


def test_a_token_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(upstreams=(), data=str(tmp_path / "data"))
    token = load_token(settings)
    assert len(token) >= 40
    assert load_token(settings) == token
    path = tmp_path / "data" / "admin.token"
    assert path.read_text() == token + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["admin.token"]


def test_a_token_that_was_given_is_used_and_written_nowhere(tmp_path: Path) -> None:
    settings = Settings(upstreams=(), data=str(tmp_path / "data"), admin_token=TOKEN)
    assert load_token(settings) == TOKEN
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("token", ["short", "with a space in the middle", "ümlaut-in-the-token"])
def test_a_token_that_cannot_serve_is_refused(tmp_path: Path, token: str) -> None:
    settings = Settings(upstreams=(), data=str(tmp_path), admin_token=token)
    with pytest.raises(FileError, match="token") as caught:
        load_token(settings)
    assert token not in str(caught.value)


def test_a_token_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    assert load_token(Settings(upstreams=(), data=str(tmp_path))) == TOKEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(FileError, match="is no text"):
        load_token(Settings(upstreams=(), data=str(tmp_path)))


# What is told


def replica_up(number: int) -> ReplicaUp:
    return ReplicaUp(number, f"host:{number}", ("m",), False, 100, 16, 8, 512, 1600,
                     (1024, 1024, 1, 1, 1, 0), 1_000_000, 1)  # fmt: skip


def call(request: int, tier: str, ttft_ms: int, stream: bool = True) -> Call:
    body = msgspec.json.encode(
        {"model": "m", "stream": stream, "messages": [{"role": "user", "content": SECRET_TEXT}]}
    )
    asked = read("chat", {"x-twinkeel-user": "u"}, body, b"k" * 32)
    made = Call(asked, f"tk-{request}", 0, None)  # type: ignore[arg-type]
    made.request, made.tier = request, tier
    made.arrived_ns, made.dispatched_ns = 1_000_000, 3_000_000
    made.first_ns = ttft_ms * 1_000_000 if stream else -1
    made.gateway_ns, made.network_ns = 1_000_000, 500_000
    made.engine = EngineTimes(0, (ttft_ms - 3) * 1_000_000, 50_000_000)
    made.settled_ns = (ttft_ms + 60) * 1_000_000
    return made


def test_the_status_tells_what_happened(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        stats = controller.stats
        for number in range(20):
            one = call(number, "turbo", 100 + number, stream=number % 2 == 0)
            stats.settled(one, Settled(number, "answered", "turbo"))
        shed = call(20, "", -1)
        stats.settled(shed, Settled(20, "shed", "stable", "breaker errors line=secret", 503))
        stats.lost(Settled(21, "failed", "", "controller_lost"))
        stats.decided(BreakerMoved("errors model=m", "open", "share", 7, 90, 2_000_000_000))
        stats.decided(Alert("replica 0", "ejected", (("bad", 3),), "moved"))
        stats.decided(Refused("FirstToken", "had it already"))
        stats.decided(Scaled("m", 3, "floor"))
        status = msgspec.convert(await controller.json("/status"), Status)
        assert (status.state, status.policy.name) == ("serving", "stable")
        assert (status.settled_requests, status.lost_requests, status.refused_events) == (21, 1, 1)
        turbo, *_ = status.tiers
        assert (turbo.tier, turbo.queued, turbo.calls, turbo.promise_ms) == ("turbo", 4, 20, 800)
        assert (turbo.ttft_ms_p50, turbo.ttft_ms_p95) == (109.0, 118.0)
        assert status.tiers[-1].tier == "held"
        hops = {hop.hop: hop for hop in status.hops}
        assert (hops["queue"].ms_p50, hops["queue"].calls) == (2.0, 20)
        assert (hops["network"].ms_p50, hops["decode"].ms_p50) == (0.5, 50.0)
        assert hops["rest"].ms_p50 == 109 + 60 - (1 + 2 + 0 + 106 + 50 + 0.5)
        assert [(row.outcome, row.why, row.requests) for row in status.outcomes] == [
            ("answered", "", 20), ("failed", "controller_lost", 1), ("shed", "breaker", 1),
        ]  # fmt: skip
        assert (status.breakers[0].key, status.breakers[0].bad) == ("errors model=m", 7)
        assert status.scaling == {"m": 3}
        alerts = (await controller.json("/alerts"))["alerts"]
        assert [(row["key"], row["figures"]) for row in alerts] == [("replica 0", {"bad": 3})]

    with_controller(tmp_path, work)


def test_rotation_and_metrics_are_of_the_present_replica() -> None:
    stats = Stats()
    stats.fed(5, replica_up(0))
    stats.fed(6, Scraped(0, 3, 1, 250, 0, 0))
    stats.decided(Rotated(0, "ejected", "http_5xx"))
    assert stats.rotation[0][0].state == "ejected"
    assert stats.scraped[0][0].running == 3
    stats.fed(6, StepsRead(0, 100, 900, 1000))
    assert stats.drifts.permille(0) == -100
    stats.fed(7, ReplicaDown(0, "gone"))
    assert 0 not in stats.scraped
    assert stats.drifts.permille(0) is None
    stats.fed(8, replica_up(0))
    assert 0 not in stats.rotation


def test_a_server_that_is_not_up_is_not_in_rotation(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        session: Any = None
        replica = Replica(0, Upstream("http://127.0.0.1:9"), session)
        controller.driver.replicas[0] = replica

        async def told() -> tuple[str, str]:
            (row,) = (await controller.json("/status"))["replicas"]
            return row["rotation"], row["rotation_why"]

        assert await told() == ("out", "never seen")
        replica.spec, replica.up = replica_up(0), True
        assert await told() == ("in", "")
        controller.stats.decided(Rotated(0, "ejected", "http_5xx"))
        assert await told() == ("ejected", "http_5xx")
        replica.up = False
        assert await told() == ("out", "down")

    with_controller(tmp_path, work)


def test_what_is_kept_is_bounded() -> None:
    stats = Stats()
    for number in range(1500):
        stats.settled(call(number, "turbo", 100), Settled(number, "answered", "turbo"))
        stats.decided(Alert(f"a{number}", "cause"))
        state: Any = "open" if number == 3 else "closed"
        stats.decided(BreakerMoved(f"errors line={number}", state, "why"))
    assert (len(stats.calls), len(stats.alerts), len(stats.breakers)) == (1000, 100, 1000)
    assert stats.outcomes["answered", ""] == 1500
    assert "errors line=3" in stats.breakers  # closed ones are forgotten first


def test_answers_are_counted_by_how_far_they_can_be_trusted(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        section = controller.driver.parameters.confidence
        below = section.verify_below_permille
        told = (await controller.json("/status"))["answers"]
        assert told["confidence"] == {"scored": 0, "mean_permille": None, "below_verify": 0}
        for number, (score, verification, why) in enumerate([
            (below, "not_needed", ""), (below - 1, "match", ""), (below - 100, "mismatch", "x"),
            (-1, "", ""), (1000, "", "cached"), (0, "", "checkpoint"),
        ]):  # fmt: skip
            settled = Settled(
                number, "answered", "turbo", why, confidence_permille=score,
                verification=verification,  # type: ignore[arg-type]
            )  # fmt: skip
            controller.stats.settled(call(number, "turbo", 100), settled)
        controller.stats.decided(Verify(1, 1))
        controller.stats.decided(Verify(2, 0))
        told = (await controller.json("/status"))["answers"]
        mean = round((3 * below - 101) / 3)
        assert told == {
            "confidence": {"scored": 3, "mean_permille": mean, "below_verify": 2},
            "verification": {"match": 1, "mismatch": 1, "not_needed": 1},
            "second_runs": 2,
            "budget": {
                "saved_tokens": 0, "burst_tokens": section.burst_tokens,
                "budget_permille": section.budget_permille,
            },
        }  # fmt: skip

    with_controller(tmp_path, work)


def test_a_policy_that_scores_nothing_has_no_budget(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        assert (await controller.json("/status"))["answers"]["budget"] is None

    with_controller(tmp_path, work, shadow=load_policy("stable"))


def test_chains_are_listed_and_shown(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        assert await controller.json("/chains") == {"chains": []}
        answer = await controller.ask("/chains/c%2F1")
        assert answer.status == 404
        error = (await answer.json())["error"]
        assert (error["code"], "GET /chains" in error["message"]) == ("no_such_chain", True)
        step = ChainStep("ann", "c/1", "plan", "r-1", 5.0, 6.5, "answered", model="qwen")
        controller.steps.add(step)
        (line,) = (await controller.json("/chains"))["chains"]
        assert (line["chain"], line["user"], line["steps"], line["over"]) == (
            "c/1",
            "ann",
            1,
            False,
        )
        chain = await controller.json("/chains/c%2F1?user=ann")
        assert await controller.json("/chains/c/1") == chain
        (shown,) = chain["steps"]
        assert (shown["began_s"], shown["ended_s"], shown["queue_s"]) == (0.0, 1.5, None)
        assert (await controller.ask("/chains/c%2F1?user=bob")).status == 404

    with_controller(tmp_path, work)


def test_nothing_tells_a_prompt(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        one = call(0, "turbo", 100)
        assert SECRET_TEXT.encode() in one.asked.body
        controller.stats.settled(one, Settled(0, "answered", "turbo"))
        for path in GETS:
            assert SECRET_TEXT not in await (await controller.ask(path)).text()

    with_controller(tmp_path, work)


def test_metrics_are_passed_as_they_are(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        answer = await controller.ask("/metrics")
        assert await answer.read() == b"twinkeel_up 1\n"
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4"

    with_controller(tmp_path, work)


# The policy


def test_a_policy_is_read_changed_and_remembered(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        shown = await controller.ask("/policy")
        text = await shown.text()
        assert parse_policy(text, "shown") == controller.driver.parameters
        etag = shown.headers["ETag"]
        changed = text.replace("turbo_max_tflop: 50", "turbo_max_tflop: 60")
        changed = changed.replace("name: stable", "name: mine")
        answer = await controller.ask(
            "/policy", "PUT", data=changed.encode(), headers={"If-Match": etag, **OVERRIDE}
        )
        told = await answer.json()
        assert answer.status == 200, told
        assert (told["name"], f'"{told["old_hash"]}"') == ("mine", etag)
        assert controller.driver.parameters.tiers.turbo_max_tflop == 60
        assert (await controller.ask("/policy")).headers["ETag"] == f'"{told["hash"]}"'
        status = await controller.json("/status")
        assert status["policy"] == {"name": "mine", "discipline": "tiered", "hash": told["hash"]}
        late = await controller.ask(
            "/policy", "PUT", data=text.encode(), headers={"If-Match": etag, **OVERRIDE}
        )
        assert late.status == 412
        again = await controller.ask("/policy", "PUT", data=changed.encode(), headers=OVERRIDE)
        assert again.status == 200  # the same once more: no second entry in the history
        history = (await controller.json("/policies"))["policies"]
        assert [(row["name"], row["by"], row["sha256"]) for row in history] == [
            ("mine", "admin", told["hash"])
        ]
        (alert,) = (await controller.json("/alerts"))["alerts"]
        assert "by an override: a test wants it" in alert["cause"]
        (row,) = (await controller.json("/deployments"))["deployments"]
        assert (row["stage"], row["override"]) == ("done", "a test wants it")
        diff = await controller.json(f"/deployments/{row['id']}/diff")
        assert diff["changes"] == [
            {"key": "name", "before": "stable", "after": "mine"},
            {"key": "tiers.turbo_max_tflop", "before": 50, "after": 60},
        ]

    with_controller(tmp_path, work)


def test_without_a_reason_no_policy_is_put_in_force(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        before = controller.driver.parameters
        for headers in ({}, {"x-twinkeel-override": "  "}):
            answer = await controller.ask("/policy", "PUT", data=b"schema: 1\n", headers=headers)
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (403, "override_needed")
            assert "POST /deployments" in error["message"]
        assert controller.driver.parameters is before
        assert (await controller.json("/deployments")) == {"deployments": []}

    with_controller(tmp_path, work)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"schema: 1\ntiers: {turbo_max_tflop: 0}\n", 400, "turbo_max_tflop"),
        (b"schema: 1\ntiers: {turbo_max: 9}\n", 400, "did you mean turbo_max_tflop"),
        (b"schema: 2\n", 400, "schema 2"),
        (b"", 400, "mapping"),
        (b"[1, 2]", 400, "mapping"),
        (b"a: [", 400, "YAML"),
        (b"\xff\xfe\x00", 400, "UTF-8"),
        (b"schema: 1\nname: \x00\n", 400, "YAML"),
        (b"schema: 1\nname: 2020-99-99\n", 400, "month"),
        (b"schema: 1\nname: " + b"9" * 5000 + b"\n", 400, "digits"),
        (b"[" * 100_000, 400, "nested"),
        (b"schema: 1\nx:\n " + b"- " * 5000, 400, "nested"),
        (b"schema: 1\n? [a, b]\n: 1\n", 400, "YAML"),
        (b"schema: 1\n5: x\n", 400, "policy"),
        (b"schema: 1\nname: !!python/object/apply:os.getcwd []\n", 400, "YAML"),
        (b"schema: 1\ndiscipline: fifo\n", 409, "fifo"),
        (b"#" * 300_000, 413, "Too Large"),
    ],
)
def test_a_bad_policy_is_refused_with_the_reason(
    tmp_path: Path, body: bytes, status: int, said: str
) -> None:
    async def work(controller: Controller) -> None:
        before = controller.driver.parameters
        answer = await controller.ask("/policy", "PUT", data=body, headers=OVERRIDE)
        error = (await answer.json())["error"]
        assert answer.status == status, error
        assert said in error["message"]
        assert controller.driver.parameters is before
        assert (await controller.json("/policies"))["policies"] == []

    with_controller(tmp_path, work)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"policy":"","plan":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "nested"),
        (b'{"policy":"' + b"#" * 200_000 + b'"}', "$.policy"),
        (b'{"policy":"","override":"' + b"x" * 501 + b'"}', "$.override"),
    ],
)
def test_what_is_no_deployment_is_refused_before_it_is_read(
    tmp_path: Path, body: bytes, said: str
) -> None:
    async def work(controller: Controller) -> None:
        answer = await controller.ask("/deployments", "POST", data=body)
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (400, "invalid_body"), error
        assert said in error["message"]

    with_controller(tmp_path, work)


def test_observing_it_says_who_decides_in_shadow_and_takes_no_other(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        status = msgspec.convert(await controller.json("/status"), Status)
        assert status.policy.name == "fifo"
        assert status.shadow is not None
        assert (status.shadow.name, status.shadow.discipline) == ("stable", "tiered")
        text = await (await controller.ask("/policy")).text()
        assert "In shadow decides stable (tiered" in text
        assert parse_policy(text, "shown") == controller.driver.parameters
        for body in (text.encode(), b"schema: 1\n"):
            answer = await controller.ask("/policy", "PUT", data=body, headers=OVERRIDE)
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (409, "observing")
            assert "without --observe" in error["message"]

    with_controller(tmp_path, work, shadow=load_policy("stable"))


# The log


def test_the_log_is_listed_and_given_out_and_nothing_beside_it(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        assert (await controller.json("/log")) == {"segments": []}
        folder = tmp_path / "log"
        folder.mkdir()
        for number, size in ((10, 3), (9, 5)):
            (folder / f"decisions.{number}.log").write_bytes(b"x" * size)
        (folder / "other.txt").write_text("secret")
        (tmp_path / "admin.token").write_text("secret")
        (folder / "decisions.7.log").symlink_to(tmp_path / "admin.token")
        listed = (await controller.json("/log"))["segments"]
        assert [(row["name"], row["bytes"]) for row in listed] == [
            ("decisions.9.log", 5), ("decisions.10.log", 3),
        ]  # fmt: skip
        answer = await controller.ask("/log/decisions.9.log")
        assert await answer.read() == b"xxxxx"
        assert answer.content_type == "application/octet-stream"
        for name in (
            "other.txt", "decisions.8.log", "decisions.7.log", "..%2Fadmin.token", "%2e%2e",
            "../admin.token", "decisions.9.log%00", "decisions.9.log%0a", "decisions.%D9%A9.log",
            "..%5cadmin.token", "decisions.9.log/..",
        ):  # fmt: skip
            answer = await controller.ask(f"/log/{name}")
            assert answer.status in (400, 404), name
            assert "secret" not in await answer.text()

    with_controller(tmp_path, work)


# The rest


def test_drain_is_passed_on(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        answer = await controller.ask("/drain", "POST")
        assert answer.status == 202
        assert await answer.json() == {"status": "draining", "open": 0}
        assert controller.drained == ["drain"]
        controller.driver.draining = True
        assert (await controller.json("/status"))["state"] == "draining"

    with_controller(tmp_path, work)


def test_unknown_routes_and_methods_are_json_errors(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        for path, method, status in (
            ("/nowhere", "GET", 404), ("/policy", "DELETE", 405), ("/drain", "GET", 405),
        ):  # fmt: skip
            answer = await controller.ask(path, method)
            assert answer.status == status
            assert answer.content_type == "application/json"
            assert (await answer.json())["error"]["message"]

    with_controller(tmp_path, work)


def test_the_published_document_names_every_route(tmp_path: Path) -> None:
    async def work(controller: Controller) -> None:
        document = await controller.json("/openapi.json")
        app = controller.client.app
        assert app is not None
        routes = {
            (route.method.lower(), route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        told = {(method, path) for path, item in document["paths"].items() for method in item}
        assert routes - {("get", "/openapi.json")} == told

    with_controller(tmp_path, work)


def test_every_preset_can_be_rendered_and_read_again() -> None:
    for name in ("stable", "fifo", "throughput"):
        parameters = load_policy(name)
        assert parse_policy(render(parameters), name) == parameters
        assert yaml.safe_load(render(parameters))["schema"] == 1
