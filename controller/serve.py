"""Puts a controller together, runs it, and takes it apart again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import time
from importlib import resources
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import yaml
from aiohttp import web

from controller.admin import Sources, Stats, load_token, make_app
from controller.admin.status import policy_hash
from controller.driver import Clock, Driver
from controller.errands import Errands
from controller.gateway.answers import Answers
from controller.gateway.app import Gateway
from controller.gateway.keys import load_keys
from controller.listener import Listener
from controller.reading import Reader
from controller.store.database import Database
from controller.store.log import LiveLog
from controller.store.recovery import recover
from controller.telemetry.metrics import LogHealth, Metrics
from controller.telemetry.spans import Spans
from controller.telemetry.webhook import Webhook
from controller.upstream.replica import Replica
from controller.upstream.scrape import Scraper
from controller.upstream.warming import warm
from controller.upstream.watching import Watcher
from policy.compose import build_policy
from policy.decisions import BreakerMoved
from policy.events import Restored
from policy.files import load_policy
from policy.parameters import canonical, from_canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from controller.config import Settings
    from controller.store.recovery import Recovered
    from controller.telemetry.metrics import Sink
    from policy.decisions import Decision
    from policy.parameters import Parameters

LOGGER = logging.getLogger("twinkeel")
CONNECT_S = 2.0
KEEP_ALIVE_S = 3.0
"""Below the five seconds after which vLLM's server closes an idle connection: a request sent over
one that is being closed is lost."""
CHECK_S = 0.05
"""How often it is looked whether the last stream has ended, while draining."""
BACKLOG = 4096
COLLECT_AFTER = 50_000
"""Objects made before the youngest are looked through for garbage: nothing here makes cycles."""
AT_START = "start"
"""Who deployed a policy that was given with the start."""


class Running:
    """A controller that serves."""

    def __init__(self, settings: Settings, driver: Driver, admin_token: str) -> None:
        self.settings = settings
        self.driver = driver
        self.admin_token = admin_token
        self.url = ""
        self.admin_url = ""
        self._drain = asyncio.Event()

    def stop(self) -> None:
        """As SIGTERM does: say that it is not ready, take no more, finish what is open, end."""
        self.driver.draining = True
        self._drain.set()

    async def stopped(self) -> None:
        """Until someone stops it."""
        await self._drain.wait()


class _Kept(Listener):
    """Keeps breakers' last moves where people, and a start without a log, find them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, BreakerMoved):
            self._database.breaker_moved(decision)


class _Named(Listener):
    """Lets the metrics say which policy is in force, and what it promises."""

    def __init__(self, metrics: Metrics, parameters: Parameters) -> None:
        self._metrics = metrics
        self.switched(parameters)

    def switched(self, parameters: Parameters) -> None:
        classes = parameters.classes
        ms = {
            "P0": classes.p0_deadline_ms,
            "P1": classes.p1_deadline_ms,
            "P2": classes.p2_deadline_ms,
        }
        deadlines_s = {name: value / 1000 for name, value in ms.items()}
        self._metrics.policy(parameters.name, policy_hash(parameters), deadlines_s)


async def serve(settings: Settings, ready: Callable[[Running], object] | None = None) -> None:
    """Serve until SIGTERM, SIGINT, or ``Running.stop``.

    Args:
        ready: called once the ports are open.

    Raises:
        policy.files.FileError: the policy cannot be read.
        controller.store.database.DatabaseError: the database cannot be used.
        OSError: a port or the data folder cannot be used.
    """
    async with contextlib.AsyncExitStack() as stack:
        running, gateway, site = await _start(settings, stack)
        if ready is not None:
            ready(running)
        await running.stopped()
        LOGGER.info("stopping: %d requests are open", running.driver.open)
        await asyncio.sleep(settings.unready_s)  # so that whoever sends requests here sees it
        await site.stop()
        gateway.closed = True
        deadline_s = time.monotonic() + settings.drain_s
        while running.driver.open and time.monotonic() < deadline_s:
            await asyncio.sleep(CHECK_S)
        if running.driver.open:
            LOGGER.warning("%d requests were still open", running.driver.open)


async def _start(
    settings: Settings, stack: contextlib.AsyncExitStack
) -> tuple[Running, Gateway, web.TCPSite]:
    """Everything in its order; the stack takes it apart the other way round."""
    data = settings.data_path
    data.mkdir(parents=True, exist_ok=True)
    token = load_token(settings)
    keys = load_keys(settings.keys) if settings.keys else None
    database = Database(data / "controller.sqlite")
    stack.callback(database.close)
    wanted = await _wanted(settings, database)
    parameters = load_policy("fifo") if settings.observe else wanted
    recovered = recover(data / "log", parameters)
    if recovered is not None and recovered.parameters.discipline != parameters.discipline:
        recovered = recovered._replace(
            policy=build_policy(parameters), parameters=parameters, next_request=0
        )
    clock = Clock(_clock_start_ns(recovered))
    policy = build_policy(parameters) if recovered is None else recovered.policy
    in_force = parameters if recovered is None else recovered.parameters

    log = LiveLog(
        data / "log", policy, in_force, clock(),
        on_trouble=lambda text: running.driver.trouble("log", text),
    )  # fmt: skip
    stack.callback(log.close)
    session = await stack.enter_async_context(_session(settings))
    replicas = [Replica(number, each, session) for number, each in enumerate(settings.upstreams)]
    epoch_ns = time.time_ns() - clock()
    spans = Spans(settings, epoch_ns, lambda replica: replicas[replica].url)
    stack.push_async_callback(spans.close)
    stats = Stats()
    webhook = Webhook(
        settings.webhook, f"{settings.host}:{settings.port}",
        lambda: running.driver.parameters.name, lambda: epoch_ns + clock(),
    )  # fmt: skip
    await webhook.start()
    stack.push_async_callback(webhook.close)
    driver = Driver(
        settings, policy, in_force, log, replicas, clock, [stats, spans, webhook, _Kept(database)],
        spans.traceparent, 0 if recovered is None else recovered.next_request,
    )  # fmt: skip
    running = Running(settings, driver, token)
    recorder = _recorder(settings, driver, epoch_ns, stack)

    def sinks() -> Mapping[str, Sink]:
        return {"spans": spans.counts(), "webhook": webhook.counts()}

    def health() -> LogHealth:
        return LogHealth(0, log.dropped_bytes, log.segment)

    reader = Reader(driver, health, sinks)
    metrics = Metrics(reader)
    driver.listen(metrics)
    driver.listen(_Named(metrics, in_force))
    shadow = None
    if settings.observe:
        from controller.observe import Shadow

        shadow = Shadow(wanted, data / "shadow", clock, driver.trouble)
        driver.listen(shadow)
        stack.callback(shadow.close)
    await _restored(recovered, wanted, driver, database, stats, metrics, settings, recorder)
    answers = Answers()
    watcher = Watcher(driver, settings.probe_s)
    scraper = Scraper(driver, settings.scrape_s, watcher.paged)
    errands = Errands(
        driver, driver.client, database, answers, scraper.read_progress, scraper.counts, warm
    )
    stack.push_async_callback(driver.close)
    stack.push_async_callback(errands.close)
    driver.start(errands, watcher.suspect)
    watcher.start()
    stack.push_async_callback(watcher.close)
    scraper.start()
    stack.push_async_callback(scraper.close)

    gateway = Gateway(driver, _secret(data), answers, database, keys, metrics.rejected)
    gateway.start()
    stack.push_async_callback(gateway.close)
    runner, site, port = await _public(settings, gateway)
    stack.push_async_callback(runner.cleanup)
    running.url = f"http://{settings.host}:{port}"
    admin = make_app(
        Sources(
            settings, driver, stats, token, metrics.render, database, _why_not_ready(driver),
            running.stop, reader.waiting, (lambda: None) if shadow is None else shadow.report,
        )
    )  # fmt: skip
    admin_runner, _, admin_port = await _listen(
        admin, settings.admin_host, settings.admin_port, shutdown_timeout=1.0
    )
    stack.push_async_callback(admin_runner.cleanup)
    running.admin_url = f"http://{settings.admin_host}:{admin_port}"
    _handle_signals(running, stack)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 100)
    return running, gateway, site


# ---- the policy, and what was before ----


async def _wanted(settings: Settings, database: Database) -> Parameters:
    """The policy to serve with: what was deployed last, unless the start asks for another one than
    the start before did."""
    given = load_policy(settings.policy)
    history = await database.history(1000)
    before = next((each for each in history if each.by == AT_START), None)
    if before is not None and before.canonical == canonical(given):
        return from_canonical(history[0].canonical)
    await database.deploy(given, AT_START)
    return given


def _clock_start_ns(recovered: Recovered | None) -> int:
    """The log's time goes on; while nothing ran, it passed as on the wall."""
    if recovered is None:
        return 0
    return recovered.last_ns + 1 + max(0, time.time_ns() - recovered.wall_ns_of_last)


async def _restored(
    recovered: Recovered | None,
    wanted: Parameters,
    driver: Driver,
    database: Database,
    stats: Stats,
    metrics: Metrics,
    settings: Settings,
    recorder: Recorder | None,
) -> None:
    """Settle what the process before left open, and go on under the policy that is wanted."""
    if recovered is None:
        return
    if recovered.note:
        LOGGER.warning("%s", recovered.note)
    if recorder is not None:
        recorder.recovered(recovered)
    down_ns = max(0, driver.now_ns() - recovered.last_ns)
    LOGGER.info(
        "going on after %.1f s, %d requests were open", down_ns / 1e9, recovered.open_requests
    )
    driver.feed(Restored(down_ns))
    moved = {each.key: each.state for each in await database.breakers()}
    stats.restored([key for key, state in moved.items() if state != "closed"])
    metrics.restored(moved)
    if not settings.observe and canonical(wanted) != canonical(driver.parameters):
        driver.switch(wanted)


def _recorder(
    settings: Settings, driver: Driver, epoch_ns: int, stack: contextlib.AsyncExitStack
) -> Recorder | None:
    if not settings.record:
        return None
    try:
        from controller.store.recorder import Recorder
    except ImportError:
        return None
    recorder = Recorder(settings, driver, epoch_ns)
    driver.listen(recorder)
    stack.callback(recorder.close)
    return recorder


def _secret(data: Path) -> bytes:
    """Key of the prompt fingerprints: kept, so that they stay comparable over restarts."""
    path = data / "fingerprint.key"
    if not path.exists():
        path.touch(0o600)
        path.write_bytes(secrets.token_bytes(32))
    return path.read_bytes()


# ---- HTTP ----


def _session(settings: Settings) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=settings.limits.call_s_most, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
        read_bufsize=1 << 18,
    )


async def _public(settings: Settings, gateway: Gateway) -> tuple[web.AppRunner, web.TCPSite, int]:
    limits = settings.limits
    text = (resources.files("controller.gateway") / "openapi.yaml").read_text(encoding="utf-8")
    app = gateway.app(msgspec.json.encode(yaml.safe_load(text)))
    return await _listen(
        app, settings.host, settings.port,
        keepalive_timeout=limits.idle_s_most,
        max_line_size=limits.header_bytes_most,
        max_field_size=limits.header_bytes_most,
        shutdown_timeout=1.0,
    )  # fmt: skip


async def _listen(
    app: web.Application, host: str, port: int, **options: float
) -> tuple[web.AppRunner, web.TCPSite, int]:
    """Serve ``app``; a caller that goes away cancels its handler. Gives the port, too."""
    runner = web.AppRunner(
        app, handle_signals=False, handler_cancellation=True, access_log=None, **options
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=BACKLOG)
    await site.start()
    return runner, site, runner.addresses[0][1]


def _why_not_ready(driver: Driver) -> Callable[[], str]:
    def why() -> str:
        if driver.draining:
            return "draining"
        return "" if any(replica.up for replica in driver.replicas.values()) else "no replica is up"

    return why


def _handle_signals(running: Running, stack: contextlib.AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, running.stop)
            stack.callback(loop.remove_signal_handler, number)
