"""Puts a controller together, runs it, and takes it apart again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from controller import http
from controller.admin import Sources, Stats, load_token, make_app
from controller.admin.token import ADDRESS_FILE
from controller.beginning import begin, go_on
from controller.deployment.manager import INTERRUPTED, Deployments, Tee
from controller.deployment.papers import KEY_FILE, KEY_VARIABLE, load_key
from controller.driver import FLUSH_S, Driver
from controller.errands import Errands
from controller.fleet.local import LocalFleet
from controller.fleet.opening import open_fleet
from controller.fleet.reload import Reloads
from controller.fleet.static import StaticFleet
from controller.forecasting import LOOK_S, Forecasting, kept_windows, load_model
from controller.gateway.answers import Answers
from controller.gateway.app import Gateway
from controller.gateway.chains import KnownChains
from controller.gateway.gauges import families as kept_answers
from controller.gateway.keys import load_keys
from controller.gpus.gauges import families
from controller.gpus.watching import GpuWatch
from controller.listener import Listener
from controller.observe import Shadow
from controller.openapi import published
from controller.reading import Reader
from controller.sharing.agreeing import Agreeing
from controller.sharing.leases import Sharing
from controller.sharing.store import Store
from controller.store.answers import KeptAnswers
from controller.store.chains import ChainStore
from controller.store.checkpoints import open_checkpoints
from controller.store.database import Database
from controller.store.deployments import end_interrupted
from controller.store.folder import alone_in
from controller.store.log import LiveLog
from controller.store.recorder import Recorder
from controller.store.redaction import Redactor, load_patterns
from controller.store.samples import FOLDER as SAMPLES_FOLDER
from controller.store.samples import Samples
from controller.store.secret import kept_key
from controller.store.steps import FILE as STEPS_FILE
from controller.store.steps import WRITE_S, StepStore
from controller.telemetry.chains import ChainTeller
from controller.telemetry.metrics import LogHealth, Metrics, Sink
from controller.telemetry.spans import Spans
from controller.telemetry.webhook import Webhook
from controller.upstream.embeddings import Embeddings
from controller.upstream.replica import Replica
from controller.upstream.scrape import Scraper
from controller.upstream.watching import Watcher
from policy.breakers import Breakers
from policy.decisions import BreakerMoved
from policy.events import ReplicaDown, ReplicaUp
from policy.files import FileError
from policy.fleet import FORGOTTEN
from policy.parameters import policy_hash
from policy.service import Service
from policy.signals.rules import rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from controller.accepting import Acceptor
    from controller.beginning import Beginning
    from controller.config import Settings
    from controller.fleet.contract import Fleet
    from controller.forecasting import Model
    from policy.decisions import BreakerState, Decision
    from policy.events import Event
    from policy.parameters import Parameters

LOGGER = logging.getLogger("twinkeel")
CHECK_S = 0.05
"""How often it is looked whether the last stream has ended, while draining."""
RECORD_S = 1.0
"""How often it is looked whether part of the trace should be written."""
COLLECT_AFTER = 50_000
"""Objects made before the youngest are looked through for garbage: nothing here makes cycles."""


class Running:
    """A controller that serves."""

    def __init__(self, settings: Settings, driver: Driver, admin_token: str) -> None:
        self.settings = settings
        self.driver = driver
        self.admin_token = admin_token
        self.url = ""
        self.admin_url = ""
        self.shadow: Parameters | None = None
        """With ``observe``: the policy that decides for nobody."""
        self.cut = asyncio.Event()
        """What is open is not waited for any more."""
        self._stop = asyncio.Event()
        self._signals = 0

    def stop(self) -> None:
        """As SIGTERM does: say that it is not ready, take no more, finish what is open, end."""
        self.driver.draining = True
        self._stop.set()

    def signalled(self) -> None:
        """SIGTERM or SIGINT came; one more of them cuts off what is open."""
        self._signals += 1
        if self._signals == 1:
            self.stop()
        elif not self.cut.is_set():
            LOGGER.warning("told again: %d open requests are cut off", self.driver.open)
            self.cut.set()

    async def stopped(self) -> None:
        """Until someone stops it."""
        await self._stop.wait()

    def why_not_ready(self) -> str:
        """Why new requests should go elsewhere; empty: they need not."""
        if self.driver.draining:
            return "draining"
        up = any(replica.up for replica in self.driver.replicas.values())
        return "" if up else "no replica is up"


async def serve(settings: Settings, ready: Callable[[Running], object] | None = None) -> None:
    """Serve until SIGTERM, SIGINT, or ``Running.stop``.

    Args:
        ready: called once the ports are open.

    Raises:
        policy.files.FileError: a file of the settings or of the data folder cannot be used, another
            controller has that folder, or a port cannot be had.
        controller.store.database.DatabaseError: the database cannot be used.
        policy.log.LogError: the decision log cannot be used.
        OSError: the data folder cannot be used.
    """
    async with contextlib.AsyncExitStack() as stack:
        running, gateway, door = await _start(settings, stack)
        if ready is not None:
            ready(running)
        await running.stopped()
        LOGGER.info(
            "stopping: %d requests are open and may take %.0f s; a second SIGINT or SIGTERM cuts"
            " them off", running.driver.open, settings.unready_s + settings.drain_s,
        )  # fmt: skip
        # Whoever sends requests here sees that it is not ready meanwhile.
        await _unless(running.cut, settings.unready_s)
        door.stop()
        gateway.closed = True
        await _drained(running, settings.drain_s)


async def _drained(running: Running, s_most: float) -> None:
    """Until all open requests have finished, or had their time."""
    driver, cut = running.driver, running.cut
    deadline_s = time.monotonic() + s_most
    while driver.open and not cut.is_set() and time.monotonic() < deadline_s:
        await _unless(cut, CHECK_S)
    if driver.open and not cut.is_set():
        LOGGER.warning("%d requests were still open and are cut off", driver.open)


async def _unless(event: asyncio.Event, s: float) -> None:
    """Sleep, unless it happens."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(s):
            await event.wait()


async def _start(
    settings: Settings, stack: contextlib.AsyncExitStack
) -> tuple[Running, Gateway, Acceptor]:
    """Everything in its order; the stack takes it apart the other way round."""
    data = settings.data_path
    stack.callback(os.umask, umask := os.umask(0o077))  # log, trace and database are private
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    stack.enter_context(alone_in(data))
    token = load_token(settings)
    keys = load_keys(settings.keys) if settings.keys else None
    rules()  # read once, before somebody waits for it
    model = load_model(settings.forecast) if settings.forecast else None
    deploy_key = load_key(Path(os.environ.get(KEY_VARIABLE) or data / KEY_FILE))
    database = Database(data / "controller.sqlite")
    stack.callback(database.close)
    chains = _chains(settings)
    stack.callback(chains.close)
    interrupted = await database.run(lambda db: end_interrupted(db, time.time(), INTERRUPTED))
    beginning = await begin(settings, database)
    fleet = _opened(settings, umask)
    driver, tee, ears = await _driver(settings, fleet, beginning, database, model, stack)
    deployments = Deployments(settings, driver, tee, database, deploy_key)
    driver.listen(deployments)
    stack.push_async_callback(deployments.close)
    running = Running(settings, driver, token)
    if settings.observe:
        running.shadow = beginning.wanted
    await _tell_breakers(beginning, database, ears)
    answers = await _answers(settings, driver, stack)
    ears.metrics.also(partial(kept_answers, answers))
    reloads = Reloads(fleet, driver)
    stack.push_async_callback(reloads.close)
    sharing = (
        Sharing(driver, Store(settings.redis), Agreeing(lambda: driver.parameters))
        if settings.redis
        else None
    )
    watcher, look = _servers(settings, driver, fleet, reloads, chains, answers, sharing, stack)
    reloads.gate = watcher
    go_on(beginning, driver, settings)
    _forget_standbys(beginning, driver)
    _handle_signals(running, stack)  # from before the fleet begins until it has ended
    stack.push_async_callback(fleet.close)
    watch = _watch_cards(fleet, driver)
    reloads.cards = watch.views
    ears.metrics.also(lambda: families(watch.views()))
    deployments.tell_interrupted(interrupted)
    await _share(sharing, driver, ears.metrics, stack)

    openapi = published("controller.gateway")
    secret = kept_key(data / "fingerprint.key")
    gateway = Gateway(
        driver, secret, answers, chains, KnownChains(driver, chains, bool(settings.redis)), keys,
        ears.metrics.rejected, openapi, ears.chains.own,
    )  # fmt: skip
    gateway.start()
    stack.push_async_callback(gateway.close)
    options = http.public_options(settings.limits)
    with _naming("port", settings.host, settings.port):
        runner, door = await http.listen(gateway.handle, settings.host, settings.port, **options)
    stack.push_async_callback(runner.cleanup)
    stack.callback(door.stop)
    gateway.guard(runner)
    running.url = f"http://{settings.host}:{door.port}"
    sources = Sources(
        settings, driver, ears.stats, token, ears.metrics.render, database, deployments,
        running.why_not_ready, running.stop, ears.reader.waiting, ears.observed, running.shadow,
        fleet.view, watch.views, partial(_restore, fleet, watch), partial(_mend, fleet),
        reloads, ears.steps,
    )  # fmt: skip
    await _serve_admin(running, sources, stack)
    await watch.begin()
    stack.push_async_callback(watch.close)
    await fleet.begin(driver, watcher)
    look()
    _collect_rarely()
    return running, gateway, door


async def _serve_admin(
    running: Running, sources: Sources, stack: contextlib.AsyncExitStack
) -> None:
    settings = running.settings
    with _naming("admin-port", settings.admin_host, settings.admin_port):
        admin, door = await http.listen_app(
            make_app(sources), settings.admin_host, settings.admin_port
        )
    stack.push_async_callback(admin.cleanup)
    stack.callback(door.stop)
    running.admin_url = f"http://{settings.admin_host}:{door.port}"
    _tell_address(settings.data_path / ADDRESS_FILE, running.admin_url, stack)


# ---- the driver, and who listens ----


@dataclass
class _Hearers:
    """Who listens, and is asked later."""

    stats: Stats
    metrics: Metrics
    reader: Reader
    chains: ChainTeller
    steps: StepStore
    observed: Callable[[], Mapping[str, int] | None] = field(default=lambda: None)


async def _driver(
    settings: Settings,
    fleet: Fleet,
    beginning: Beginning,
    database: Database,
    model: Model | None,
    stack: contextlib.AsyncExitStack,
) -> tuple[Driver, Tee, _Hearers]:
    data, clock, parameters = settings.data_path, beginning.clock, beginning.parameters
    log = LiveLog(
        data / "log", beginning.policy, parameters, clock(),
        on_trouble=lambda text: driver.trouble("log", text),
    )  # fmt: skip
    stack.callback(log.close)
    session = await stack.enter_async_context(http.session())
    replicas = [Replica(number, each, session) for number, each in enumerate(fleet.upstreams)]
    epoch_ns = time.time_ns() - clock()
    spans = Spans(settings, epoch_ns, lambda replica: replicas[replica].url)
    stack.push_async_callback(spans.close)
    in_loop = partial(_trouble_in_loop, asyncio.get_running_loop())
    steps = StepStore(data / STEPS_FILE, on_trouble=lambda text: in_loop(driver, "chains", text))
    stack.callback(steps.close)
    webhook = Webhook(
        settings.webhook, f"{settings.host}:{settings.port}",
        lambda: driver.parameters.name, time.time_ns,
    )  # fmt: skip
    await webhook.start()
    stack.push_async_callback(webhook.close)
    stats = Stats(parameters)
    tee = Tee(log)
    driver = Driver(
        settings, beginning.policy, parameters, tee, replicas, clock,
        [stats, spans, webhook, _BreakerKeeper(database)], spans.traceparent,
        beginning.next_request,
    )  # fmt: skip
    stack.push_async_callback(driver.close)
    recorder = _recorder(settings, beginning, driver, stack)
    forecasting = await _forecasting(model, driver, database, stack)

    def sinks() -> Mapping[str, Sink]:
        kept = {} if recorder is None else {"trace": Sink(recorder.rows, 0, recorder.dropped_rows)}
        breakers = Sink(database.moves, 0, database.left_out)
        if samples is not None:
            kept["samples"] = Sink(samples.kept, samples.failed, samples.dropped)
        if forecasting is not None:
            kept["forecast"] = Sink(forecasting.told, forecasting.failed, 0)
        return {
            "spans": spans.counts(), "webhook": webhook.counts(), "breakers": breakers,
            "chains": Sink(steps.written, steps.failed, steps.dropped), **kept,
        }  # fmt: skip

    def health() -> LogHealth:
        return LogHealth(log.waiting_bytes, log.dropped_bytes, log.segment)

    reader = Reader(driver, health, sinks)
    metrics = Metrics(reader)
    driver.listen(metrics)
    driver.listen(_PolicyTeller(metrics, parameters))
    chains = ChainTeller(
        steps, spans, metrics, clock, lambda replica: replicas[replica].name,
        partial(_budget_s, driver),
    )  # fmt: skip
    driver.listen(chains)
    samples = _samples(settings, driver, stack)
    driver.every(WRITE_S, steps.flush)
    driver.every(LOOK_S, lambda: spans.turn(clock()))
    ears = _Hearers(stats, metrics, reader, chains, steps)
    if settings.observe:
        shadow = Shadow(
            beginning.wanted, data / "shadow", clock, driver.at, partial(driver.trouble, "shadow")
        )
        stack.callback(shadow.close)
        driver.every(FLUSH_S, shadow.flush)
        driver.listen(shadow)
        ears.observed = reader.observed = shadow.report
    return driver, tee, ears


def _budget_s(driver: Driver, line: str) -> float | None:
    chains = driver.parameters.chains
    if not chains.enabled or not isinstance(driver.policy, Service):
        return None
    return chains.lines.get(line, chains.default).budget_ms / 1000


async def _forecasting(
    model: Model | None, driver: Driver, database: Database, stack: contextlib.AsyncExitStack
) -> Forecasting | None:
    if model is None:
        return None
    now_s = time.time()
    kept = await database.run(lambda db: kept_windows(db, model.window_s, now_s))
    forecasting = Forecasting(model, driver, database, kept)
    driver.listen(forecasting)
    driver.every(LOOK_S, forecasting.turn)
    stack.push_async_callback(forecasting.close)
    return forecasting


async def _tell_breakers(beginning: Beginning, database: Database, ears: _Hearers) -> None:
    """Which breakers the policy still has open: nothing moves them at a start."""
    policy = beginning.policy
    if not isinstance(policy, Service):
        return
    breakers = policy.mechanisms.get("breakers")
    known = set(breakers.open_keys()) if isinstance(breakers, Breakers) else set()
    states = {
        each.key: cast("BreakerState", each.state)
        for each in await database.breakers()
        if each.key in known
    }
    ears.stats.restored(list(states))
    ears.metrics.restored(states)


def _recorder(
    settings: Settings, beginning: Beginning, driver: Driver, stack: contextlib.AsyncExitStack
) -> Recorder | None:
    if not settings.record:
        return None
    left = beginning.recovered.open if beginning.recovered is not None else ()
    recorder = Recorder(
        settings.data_path, beginning.clock(), left,
        on_trouble=lambda text: driver.trouble("trace", text),
    )  # fmt: skip
    driver.listen(recorder)
    driver.every(RECORD_S, lambda: recorder.flush(driver.now_ns()))
    stack.callback(recorder.close)
    return recorder


def _trouble_in_loop(loop: asyncio.AbstractEventLoop, driver: Driver, key: str, text: str) -> None:
    """As ``Driver.trouble``, from a thread."""
    with contextlib.suppress(RuntimeError):  # it is closed already
        loop.call_soon_threadsafe(driver.trouble, key, text)


def _samples(
    settings: Settings, driver: Driver, stack: contextlib.AsyncExitStack
) -> Samples | None:
    """None: no text is ever kept."""
    more = load_patterns(Path(settings.redact)) if settings.redact else ()
    if settings.sample_share <= 0.0:
        return None
    samples = Samples(
        settings.data_path / SAMPLES_FOLDER, settings.sample_share, Redactor(more),
        on_trouble=partial(_trouble_in_loop, asyncio.get_running_loop(), driver, "samples"),
    )  # fmt: skip
    driver.listen(samples)
    stack.callback(samples.close)
    return samples


class _BreakerKeeper(Listener):
    """Keeps breakers' last moves where people, and ``_tell_breakers``, find them. Their state is
    the policy's: it comes back from the decision log, and without one all begin closed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, BreakerMoved):
            self._database.breaker_moved(decision)


class _PolicyTeller(Listener):
    """Lets the metrics say which policy is in force, and what it promises."""

    def __init__(self, metrics: Metrics, parameters: Parameters) -> None:
        self._metrics = metrics
        self.switched(parameters)

    def switched(self, parameters: Parameters) -> None:
        classes = parameters.classes
        deadlines_s = {
            "P0": classes.p0_deadline_ms / 1000,
            "P1": classes.p1_deadline_ms / 1000,
            "P2": classes.p2_deadline_ms / 1000,
        }
        self._metrics.policy(parameters.name, policy_hash(parameters), deadlines_s)


# ---- the servers' side ----


def _opened(settings: Settings, umask: int) -> Fleet:
    fleet = open_fleet(settings)
    if isinstance(fleet, LocalFleet):
        fleet.umask = umask  # what its servers put into shared caches is for others, too
    return fleet


def _watch_cards(fleet: Fleet, driver: Driver) -> GpuWatch:
    """The cards of this machine's servers, whoever runs these."""
    cards = {number: each.gpus for number, each in enumerate(fleet.upstreams) if each.gpus}
    if isinstance(fleet, LocalFleet | StaticFleet):
        return GpuWatch(driver, cards, fleet.card_broken, fleet.card_well)
    return GpuWatch(driver, cards)


def _restore(fleet: Fleet, watch: GpuWatch, uuid: str) -> bool:
    """An operator says that a card is well: whoever holds it for broken hears of it."""
    if watch.restore(uuid):
        return True
    return isinstance(fleet, LocalFleet | StaticFleet) and fleet.restore(uuid)


def _mend(fleet: Fleet, replica: int) -> bool:
    return isinstance(fleet, LocalFleet | StaticFleet) and fleet.slot_well(replica)


def _forget_standbys(beginning: Beginning, driver: Driver) -> None:
    """What the policy remembers as a standby, or as about to start, may be neither by now, or gone
    from the fleet file: the fleet tells anew what there is."""
    if beginning.recovered is not None and isinstance(beginning.policy, Service):
        for replica in range(beginning.policy.facts.highest_replica + 1):
            driver.feed(ReplicaDown(replica, FORGOTTEN))


def _chains(settings: Settings) -> ChainStore:
    where = settings.redis or settings.data_path / "checkpoints.sqlite"
    return ChainStore(open_checkpoints(where))


async def _answers(settings: Settings, driver: Driver, stack: contextlib.AsyncExitStack) -> Answers:
    """Answers for callers who have to be content with them, and who embeds their questions."""
    loop = asyncio.get_running_loop()

    def trouble(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(driver.trouble, "kept answers", text)

    store = KeptAnswers(
        settings.data_path / "answers.sqlite", bytes_most=settings.answers_mb_most * 1024 * 1024,
        s_most=settings.answers_s_most, on_trouble=trouble,
    )  # fmt: skip
    stack.callback(store.close)
    embeddings = None
    if settings.embeddings:
        embeddings = Embeddings(
            await stack.enter_async_context(http.session()), settings.embeddings,
            settings.embeddings_model, partial(driver.trouble, "embeddings"),
        )  # fmt: skip
    answers = Answers(store, embeddings)
    stack.push_async_callback(answers.close)
    return answers


def _servers(
    settings: Settings,
    driver: Driver,
    fleet: Fleet,
    reloads: Reloads,
    chains: ChainStore,
    answers: Answers,
    sharing: Sharing | None,
    stack: contextlib.AsyncExitStack,
) -> tuple[Watcher, Callable[[], None]]:
    """Do what the policy asks for; the second of what is returned begins to look for the
    servers."""
    watcher = Watcher(driver, settings.probe_s)
    scraper = Scraper(driver, settings.scrape_s, watcher.paged, settings.features.confidence)
    errands = Errands(
        driver, driver.client, chains, answers, scraper.read_progress, scraper.counts,
        reloads.warm, fleet.run, *(() if sharing is None else (sharing.run,)),
    )  # fmt: skip
    stack.push_async_callback(errands.close)
    driver.start(errands, watcher.suspect, fleet.ended)
    if settings.features.confidence:
        driver.listen(_WarmsUp(driver, errands))
    stack.push_async_callback(watcher.close)
    stack.push_async_callback(scraper.close)

    def look() -> None:
        watcher.start()
        scraper.start()

    return watcher, look


async def _share(
    sharing: Sharing | None, driver: Driver, metrics: Metrics, stack: contextlib.AsyncExitStack
) -> None:
    """Let the policy know with whom it shares its limits, before anybody may call."""
    if sharing is None:
        return  # it is alone, as it begins and after a restart
    metrics.also(sharing.counts.families)
    driver.listen(sharing)
    stack.push_async_callback(sharing.close)
    await sharing.begin()


class _WarmsUp(Listener):
    """Has a server that came up compile what logprobs need."""

    def __init__(self, driver: Driver, errands: Errands) -> None:
        self._driver = driver
        self._errands = errands

    def fed(self, now_ns: int, event: Event) -> None:
        if isinstance(event, ReplicaUp):
            self._errands.warm_up(self._driver.replicas[event.replica])


# ---- the process ----


@contextlib.contextmanager
def _naming(option: str, host: str, port: int) -> Iterator[None]:
    """Let an address that cannot be had be told with the option that says it."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"--{option} {port}", f"cannot listen on {host}: {_told(error)}",
            hint=f"--{option} 0 takes any free one",
        ) from error  # fmt: skip


def _told(error: OSError) -> str:
    return (error.strerror or str(error)).partition(" (")[0]


def _tell_address(path: Path, url: str, stack: contextlib.AsyncExitStack) -> None:
    """For ``twinkeel status --data``."""
    path.write_text(f"{url}\n", encoding="utf-8")
    stack.callback(path.unlink, missing_ok=True)


def _handle_signals(running: Running, stack: contextlib.AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, running.signalled)
            stack.callback(loop.remove_signal_handler, number)


def _collect_rarely() -> None:
    """What was made until now stays: it need not be looked through for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 100)
