"""The fleet of a fleet file: processes of this machine, started, warmed, watched, ended.

``slot.Slot`` decides what happens in each slot; this carries it out, and tells it what came of it.
A process that ends is noticed at once, whoever started it; one that answers nobody is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, deque
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from controller.fleet import processes
from controller.fleet.contract import FleetView, SlotView
from controller.fleet.processes import Record
from controller.fleet.seats import Seat, Served, Versions, another, seats_of
from controller.fleet.slot import (
    Announce,
    Fail,
    Hold,
    Kill,
    Open,
    Spawn,
    Tell,
    Terminate,
    WarmUp,
    Withdraw,
)
from controller.gpus.mig import domain_of_place
from controller.gpus.mig_device import read_cards
from controller.store.secret import kept
from controller.upstream.discovery import DiscoveryError, base_of, cards_of
from controller.upstream.scrape import ANSWERLESS, fetch
from controller.upstream.warming import warm
from policy.decisions import Rotated, Start, Stop
from policy.events import ReplicaDown, Standby, Warmed

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from pathlib import Path
    from typing import Any

    from controller.config import Upstream
    from controller.fleet.config import FleetFile, Model
    from controller.fleet.contract import Feeder, Gate
    from controller.fleet.slot import Action, Actions
    from controller.upstream.replica import Replica
    from policy.decisions import Decision

NS_PER_S = 1_000_000_000
LOOK_S_FIRST = 0.05
LOOK_S_MOST = 0.5
"""How often a new process is asked whether it answers: often at first, more rarely later."""
HEALTH_S_MOST = 2.0
DUMB_S_MOST = 30.0
"""A process that runs, is let in requests and answers nobody is ended after that."""
ENDED_S = 0.2
"""A process that dies closes its connections first; its end is seen so soon after."""
ENDED_LOOK_S = 0.002
TEND_S = 1.0
"""How often logs and processes that answer nobody are looked for."""
CLOSE_SLACK_S = 10.0
"""At the end: for processes that SIGKILL did not end at once."""
CARD_FAULTS = ("ecc_", "xid_")
"""Why a replica is isolated whose card is broken; otherwise it is the process."""
CARD = "gpu: "
"""What begins the reason of a loss that is its card's: it says nothing against a new version."""
ROLLED = ("rollout of ", "rollback of ")
"""How the policy says that a replica takes over from another version, or leaves for one."""

log = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """A model of the fleet, as it is now."""

    name: str
    spec: Model
    """As the fleet file has it."""
    version: str
    """The one that serves."""
    versions: Mapping[str, str]
    """Weights by version."""


class LocalFleet:
    """See the module.

    Args:
        folder: of logs, records and what is remembered; of this fleet alone.
    """

    def __init__(self, file: FleetFile, folder: Path) -> None:
        self.umask = -1
        """Of its processes; -1: the controller's."""
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = kept(folder / processes.ID_FILE, lambda: secrets.token_hex(8).encode()).decode()
        self._family = processes.Family(folder, owner)
        self._boot = processes.boot_id()
        self._memory = Versions(folder / "versions.json")
        remembered = self._memory.read()
        self._models = {
            name: Served(name, spec, remembered.get(name)) for name, spec in file.models.items()
        }
        self._seats = seats_of(file, self._models, folder)
        cards = read_cards() if any(seat.place.gpus for seat in self._seats) else ()
        self._slices = {card.uuid: {each.uuid for each in card.slices} for card in cards}
        self._driver: Feeder
        self._gate: Gate
        self._begun = False
        self._closing = False
        self._early: list[Decision] = []
        """Decided before anything was begun."""
        self._broken: dict[str, str] = {}
        """Cards that were broken before anything was begun, and why."""
        self._due: deque[tuple[Seat, Action]] = deque()
        self._doing = False
        self._timer: asyncio.TimerHandle | None = None
        self._tending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        """A process, and all that it left, is gone."""
        self._ports: set[int] = set()
        """Given to a slot."""
        upstreams: list[Upstream] = []
        for seat in self._seats:
            port = seat.place.port or seat.free_port(frozenset(self._ports))
            self._ports.add(port)
            domain = domain_of_place(seat.place.gpus, cards)
            upstreams.append(seat.upstream(port, domain))
        self._upstreams = tuple(upstreams)

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """Every slot, by id. Ports that the file leaves open change with each start."""
        return self._upstreams

    # ---- beginning and end ----

    async def begin(self, driver: Feeder, gate: Gate) -> None:
        """Adopt what runs already, end what is not wanted any more, start what should run.

        Raises:
            OSError: the folder cannot be used.
        """
        self._driver, self._gate = driver, gate
        now_ns = driver.now_ns()
        for number, seat in enumerate(self._seats):
            seat.replica = driver.replicas[number]
            seat.replica.name = seat.name
            seat.slot.since_ns = now_ns
            gate.hold(seat.replica, "not started yet")
        found = {seat.name: processes.read_record(seat.record_path) for seat in self._seats}
        adopted = [seat for seat in self._seats if self._adopt(seat, found[seat.name])]
        await asyncio.to_thread(self._end_others, frozenset(seat.name for seat in adopted))
        await asyncio.to_thread(self._forget_others)
        self._give_roles(found)
        self._begun = True
        for seat in self._seats:
            record = seat.record
            if record is not None and seat in adopted:
                seat.work = self._run(self._look(seat))
                self._do(seat, seat.slot.adopt(driver.now_ns(), record.version, record.warmed))
            else:
                seat.forget()
                self._do(seat, seat.slot.begin(driver.now_ns()))
        self._memory.write(self._models)
        self._tending = self._run(self._tend())
        for uuid, why in self._broken.items():
            self.card_broken(uuid, why)
        for decision in self._early:
            self.run(decision)
        self._early.clear()

    def _adopt(self, seat: Seat, record: Record | None) -> bool:
        if record is None or not processes.alive(record) or not seat.wants(record):
            return False
        seat.child = processes.adopt(record, partial(self._exited, seat))
        if seat.child is None:
            return False
        seat.record = record
        seat.replica.move(record.url, record.version)
        self._ports.add(int(record.url.rpartition(":")[2]))
        log.info("%s: found process %d running, %s", seat.name, record.pid, record.url)
        return True

    def _end_others(self, adopted: frozenset[str]) -> None:
        """What a controller before started here, and what is not wanted, or was not recorded
        because that controller was killed meanwhile."""
        for name in sorted(set(self._family.members().values()) - adopted):
            count = self._family.sweep(name)
            log.warning("%s: ended %d processes that an earlier controller left", name, count)

    def _forget_others(self) -> None:
        """Records of slots that the fleet file has no more."""
        kept = {self._memory.path, *(seat.record_path for seat in self._seats)}
        for path in set(self._folder.glob("*.json")) - kept:
            path.unlink(missing_ok=True)

    def _give_roles(self, found: Mapping[str, Record | None]) -> None:
        """Who served before serves again, and as many as the file says: its replicas first."""
        for seat in self._seats:
            record = found[seat.name]
            serves = record is not None and record.serves
            if record is not None and record.version != seat.served.version:
                serves = False  # a new version that had not taken over, or an old one
            seat.slot.role = "serve" if serves else "spare"
        for served in self._models.values():
            mine = [seat for seat in self._seats if seat.served is served]
            missing = len(served.spec.replicas) - sum(seat.slot.role == "serve" for seat in mine)
            for seat in [seat for seat in mine if seat.slot.role == "spare"][: max(0, missing)]:
                seat.slot.role = "serve"

    async def close(self) -> None:
        """End every process that was started, by SIGTERM first: as long as the slowest may take."""
        if self._closing or not self._begun:
            self._closing = True
            return
        self._closing = True
        for seat in self._seats:
            self._do(seat, seat.slot.close(self._driver.now_ns()))
        most_s = max(seat.served.spec.stop_s_most for seat in self._seats) + CLOSE_SLACK_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._wait_for_end()
        if self._timer is not None:
            self._timer.cancel()
        tasks = [task for seat in self._seats for task in (seat.work,) if task is not None]
        if self._tending is not None:
            tasks.append(self._tending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._end_others, frozenset())
        for seat in self._seats:
            if seat.child is not None:
                seat.child.forget()
            seat.forget()

    async def _wait_for_end(self) -> None:
        while any(seat.child or seat.sweeping for seat in self._seats):
            self._over.clear()
            await self._over.wait()

    # ---- what the policy decides ----

    def run(self, decision: Decision) -> None:
        """Carry out ``Start``, ``Stop`` and ``Rotated``; others are none of its business."""
        if not isinstance(decision, Start | Stop | Rotated) or self._closing:
            return
        if not self._begun:
            self._early.append(decision)
            return
        if not 0 <= decision.replica < len(self._seats):
            log.warning("%s: the fleet has no such slot (any more)", decision)
            return
        seat = self._seats[decision.replica]
        now_ns = self._driver.now_ns()
        match decision:
            case Start(version=version):
                seat.failure = ""
                seat.counts = version in ("", seat.served.version)
                if version and version not in seat.served.versions:
                    known = ", ".join(seat.served.versions)
                    why = f"{seat.served.name} has no version {version}: there are {known}"
                    self._do(seat, seat.slot.refuse(version, why))
                else:
                    self._do(seat, seat.slot.start(now_ns, version))
            case Stop():
                self._do(seat, seat.slot.stop(now_ns))
            case Rotated(state="isolated", why=why) if why.startswith(CARD_FAULTS):
                self._do(seat, seat.slot.card_broken(now_ns, f"{CARD}{why}"))
            case Rotated(state="isolated", why=why):
                self._do(seat, seat.slot.hung(now_ns, why))
            case Rotated(state="in" | "draining" as state, why=why) if why.startswith(ROLLED):
                seat.counts = state == "in"
                self._settle(seat.served)

    async def ended(self, replica: Replica) -> None:
        """A connection to it broke: return when its end has been told, or after a moment."""
        seat = self._seats[replica.id]
        child, until_s = seat.child, asyncio.get_running_loop().time() + ENDED_S
        while child is not None and seat.child is child and replica.up:
            if asyncio.get_running_loop().time() >= until_s:
                return
            await asyncio.sleep(ENDED_LOOK_S)

    def _settle(self, served: Served) -> None:
        """A model's version is the one that most of what serves it has, of equals the one from
        before: what crashes halfway comes back in it, and so does all after a restart."""
        found = Counter(
            seat.slot.version
            for seat in self._seats
            if seat.served is served and seat.counts and seat.slot.state == "serving"
        )
        most, count = max(found.items(), key=itemgetter(1), default=(served.version, 0))
        if count <= found[served.version]:
            return
        served.version = most
        self._remember()
        log.info("%s is served in version %s from now on", served.name, served.version)
        for other in self._seats:
            if other.served is served:
                self._do(other, other.slot.settle(self._driver.now_ns(), served.version))

    # ---- what others ask ----

    def card_broken(self, uuid: str, why: str) -> None:
        """Nothing runs on this card or slice until ``card_well``."""
        if not self._begun:
            self._broken[uuid] = why
            return
        for seat in self._on(uuid):
            self._do(seat, seat.slot.card_broken(self._driver.now_ns(), f"{CARD}{why}"))

    def card_well(self, uuid: str) -> None:
        """It may be used again: what stood still for it starts."""
        self._broken.pop(uuid, None)
        if not self._begun:
            return
        for seat in self._on(uuid):
            self._do(seat, seat.slot.card_well(self._driver.now_ns()))

    def slot_well(self, replica: int) -> bool:
        """As ``card_well``, for one slot; also for one that failed too often. False: it is not
        broken."""
        if not 0 <= replica < len(self._seats) or not self._seats[replica].slot.down:
            return False
        seat = self._seats[replica]
        self._do(seat, seat.slot.card_well(self._driver.now_ns()))
        return True

    def restore(self, uuid: str) -> bool:
        """As ``card_well``. False: nothing that is on it is broken."""
        restored = [replica for replica in self.slots_on(uuid) if self.slot_well(replica)]
        return bool(restored)

    def failure(self, replica: int) -> str:
        """Why the version that was asked for last in a slot could not be had; empty: it could."""
        return self._seats[replica].failure

    def slots_on(self, uuid: str) -> tuple[int, ...]:
        """Replicas that run on this card or slice, or would."""
        here = self._on(uuid)
        return tuple(number for number, seat in enumerate(self._seats) if seat in here)

    def _on(self, uuid: str) -> list[Seat]:
        """What is on a slice is on its card, too."""
        same = {uuid, *self._slices.get(uuid, ())}
        return [seat for seat in self._seats if not same.isdisjoint(seat.place.gpus)]

    def pid(self, replica: int) -> int:
        """Of the process in a slot; 0: none runs."""
        child = self._seats[replica].child
        return 0 if child is None else child.pid

    def model(self, name: str) -> ModelState:
        """A model, as it is now.

        Raises:
            KeyError: the fleet has none of that name.
        """
        served = self._models[name]
        return ModelState(name, served.spec, served.version, dict(served.versions))

    def add_version(self, model: str, version: str, weights: str) -> None:
        """Let there be one more version of a model; it is remembered over restarts.

        Raises:
            KeyError: the fleet has no such model.
            ValueError: the version is there already, with other weights.
        """
        served = self._models[model]
        there = served.versions.get(version, weights)
        if there != weights:
            raise ValueError(f"version {version} of {model} is {there} already, not {weights}")
        served.versions[version] = weights
        self._remember()

    def changing(self, model: str, under_way: bool) -> None:
        """A model is asked to go to another version, or that is over, one way or the other.

        Raises:
            KeyError: the fleet has no such model.
        """
        served = self._models[model]
        for seat in self._seats:
            if seat.served is served:
                self._do(seat, seat.slot.change(self._driver.now_ns(), under_way))

    def drop_version(self, model: str, version: str) -> bool:
        """Forget a version that came to nothing, so that its name is free. False: something has it
        still; ask again.

        Raises:
            KeyError: the fleet has no such model.
        """
        served = self._models[model]
        if version in (served.version, *served.spec.versions):
            return True
        for seat in self._seats:
            record = seat.record
            runs = record is not None and record.version == version
            if seat.served is served and (runs or version in (seat.slot.version, seat.slot.asked)):
                return False
        if served.versions.pop(version, None) is not None:
            self._remember()
        return True

    def _remember(self) -> None:
        """A full disk must not stop what is under way."""
        try:
            self._memory.write(self._models)
        except OSError as error:
            text = f"{self._memory.path} cannot be written: {error.strerror}: if the controller is"
            text += " restarted, it serves the versions that were written last. Make room there"
            self._driver.trouble("fleet versions", text)

    def view(self) -> FleetView:
        """Every slot, and what runs in it."""
        return FleetView("local", tuple(self._viewed(number) for number in range(len(self._seats))))

    def _viewed(self, number: int) -> SlotView:
        seat, upstream = self._seats[number], self._upstreams[number]
        slot = seat.slot
        since_s = (self._driver.now_ns() - slot.since_ns) / NS_PER_S if self._begun else 0.0
        url = seat.replica.url if self._begun else upstream.url
        return SlotView(
            number, seat.name, seat.served.name, slot.version, slot.state, slot.why,
            round(max(0.0, since_s), 3), not seat.base or slot.role == "spare", url,
            upstream.domain, seat.place.gpus, self.pid(number), slot.starts, str(seat.log),
        )  # fmt: skip

    # ---- carrying out ----

    def _do(self, seat: Seat, actions: Actions) -> None:
        """Carry out what a slot decided, in order, also where one thing leads to the next."""
        self._due.extend((seat, action) for action in actions)
        if self._doing:
            return
        self._doing = True
        try:
            while self._due:
                self._carry_out(*self._due.popleft())
        finally:
            self._doing = False
            self._arm()

    def _carry_out(self, seat: Seat, action: Action) -> None:
        match action:
            case Spawn(version=version):
                self._work(seat, self._spawn(seat, version))
            case WarmUp():
                self._work(seat, self._warm(seat))
            case Terminate() | Kill():
                self._signal(seat, isinstance(action, Kill))
            case Open():
                seat.dumb_ns = self._driver.now_ns()
                seat.keep(serves=True, warmed=True)
                self._gate.release(seat.replica)
            case Hold(reason=reason):
                self._hold(seat, reason)
            case Announce(version=version, start_ns=start_ns):
                self._announce(seat, version, start_ns)
            case Withdraw(why=why):
                log.warning("%s cannot be had: %s", seat.name, why)
                if seat.known:
                    self._driver.feed(ReplicaDown(seat.replica.id, why))
            case Fail(version=version, why=why):
                log.warning("%s cannot have version %s: %s", seat.name, version, why)
                seat.failure = why
                self._driver.feed(Warmed(seat.replica.id, version, ok=False))
            case Tell(text=text):
                self._driver.trouble(f"slot {seat.name}", text)

    def _hold(self, seat: Seat, reason: str) -> None:
        was_up = seat.replica.up
        self._gate.hold(seat.replica, reason)
        if not was_up and seat.known:  # it was let in, and nobody has seen it yet
            self._driver.feed(ReplicaDown(seat.replica.id, reason))

    def _announce(self, seat: Seat, version: str, start_ns: int) -> None:
        replica = seat.replica
        if seat.slot.state == "warm":
            seat.keep(serves=False, warmed=True)
        elif not seat.slot.last_start_ns:  # never measured: as others of its model, if any was
            peers = [one.slot.last_start_ns for one in self._seats if one.served is seat.served]
            start_ns = max(peers) or start_ns
        peer = next((one for one in self._seats if one.served is seat.served and one.models), seat)
        spec = peer.replica.spec
        self._driver.feed(
            Standby(
                replica.id, replica.name, peer.models or (seat.served.name,), start_ns, version,
                replica.upstream.domain,
                seat.served.spec.pooling if spec is None else spec.pooling,
            )
        )  # fmt: skip
        seat.announced = True

    def _signal(self, seat: Seat, kill: bool) -> None:
        if seat.work is not None:
            seat.work.cancel()
        if seat.child is None:  # it was not started yet
            asyncio.get_running_loop().call_soon(self._not_started, seat)
        elif kill:
            seat.child.kill()
        else:
            seat.child.terminate()

    def _not_started(self, seat: Seat) -> None:
        """It was told to end before it ran; told twice, it may be on its way again by now."""
        if seat.child is None and seat.slot.state == "stopping":
            self._tell_exit(seat, "not started")

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dues = [seat.slot.deadline_ns() for seat in self._seats]
        due_ns = min((due for due in dues if due is not None), default=None)
        if due_ns is not None:
            delay_s = max(0, due_ns - self._driver.now_ns()) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(delay_s + 0.001, self._ring)

    def _ring(self) -> None:
        for seat in self._seats:
            self._do(seat, seat.slot.tick(self._driver.now_ns()))

    # ---- a process, from its start to its end ----

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_loud)
        return task

    def _work(self, seat: Seat, work: Coroutine[Any, Any, None]) -> None:
        if seat.work is not None and seat.work is not asyncio.current_task():
            seat.work.cancel()
        seat.work = self._run(work)

    async def _spawn(self, seat: Seat, version: str) -> None:
        try:
            if seat.sweeping is not None:
                await asyncio.shield(seat.sweeping)
            port = seat.free_port(frozenset(self._ports))
            self._ports.discard(int(seat.replica.url.rpartition(":")[2]))
            self._ports.add(port)
            command, env, url = seat.command(version, port), seat.env(), seat.url(port)
            seat.replica.move(url, version)
            seat.child = processes.spawn(
                command, env, self._family.mark(seat.name), seat.log, partial(self._exited, seat),
                self.umask,
            )  # fmt: skip
        except OSError as error:
            self._tell_exit(seat, f"cannot be started: {_told(error)}")
            return
        pid, weights = seat.child.pid, seat.served.versions[version]
        record = Record(
            pid, processes.started_of(pid), self._boot, command,
            tuple(sorted(env.items())), seat.served.name, version, weights, url,
            seat.slot.role == "serve",
        )  # fmt: skip
        seat.note(record)
        log.info("%s: started process %d, version %s, %s", seat.name, pid, version, url)
        await self._look(seat)

    async def _look(self, seat: Seat) -> None:
        """Until it answers."""
        pause_s = LOOK_S_FIRST
        while seat.child is not None:
            try:
                async with asyncio.timeout(HEALTH_S_MOST):
                    status, _ = await fetch(seat.replica, "/health")
                    cards = await cards_of(seat.replica) if status == 200 else []
            except DiscoveryError as error:
                self._do(seat, seat.slot.failed(self._driver.now_ns(), str(error)))
                return
            except ANSWERLESS:
                cards = []
            if cards:
                seat.models = tuple(dict.fromkeys(card.id for card in cards))
                wrong = another(cards, base_of(cards), seat, seat.replica.upstream.version)
                now_ns = self._driver.now_ns()
                if wrong is None:
                    self._do(seat, seat.slot.answered(now_ns))
                    if seat.slot.state == "warm":  # adopted
                        await self._gate.prepare(seat.replica)
                else:
                    self._do(seat, seat.slot.failed(now_ns, wrong.why, wrong.loaded))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(LOOK_S_MOST, pause_s * 1.1)

    async def _warm(self, seat: Seat) -> None:
        warmed = await warm(seat.replica, seat.served.spec.pooling)
        if not warmed.ok:
            why = "it did not answer its first prompts"
            self._do(seat, seat.slot.failed(self._driver.now_ns(), why))
            return
        await self._gate.prepare(seat.replica)
        now_ns = self._driver.now_ns()
        seat.keep(serves=seat.slot.role == "serve", warmed=True)
        others = [one for one in self._seats if one.served is seat.served and one is not seat]
        taken = sum(one.slot.opens for one in others) >= len(seat.served.spec.replicas)
        self._do(seat, seat.slot.warmed(now_ns, taken))

    def _exited(self, seat: Seat, how: str) -> None:
        """Its process has ended: what it left behind is ended, too, before anything else runs."""
        seat.child = None
        if seat.work is not None:
            seat.work.cancel()
        seat.forget()
        state = seat.slot.state
        if state in ("starting", "warming"):
            how = f"{how}: {processes.last_line(seat.log)}".rstrip(": ")
        if state != "stopping":
            log.warning("%s: its process %s; its output is in %s", seat.name, how, seat.log)
        loop = asyncio.get_running_loop()
        seat.sweeping = loop.run_in_executor(None, self._family.sweep, seat.name)
        seat.sweeping.add_done_callback(partial(self._swept, seat))
        self._tell_exit(seat, how)

    def _swept(self, seat: Seat, sweeping: asyncio.Future[int]) -> None:
        seat.sweeping = None
        self._over.set()
        if not sweeping.cancelled() and sweeping.exception() is None and sweeping.result():
            log.info("%s: ended %d processes that it had left", seat.name, sweeping.result())

    def _tell_exit(self, seat: Seat, how: str) -> None:
        self._do(seat, seat.slot.exited(self._driver.now_ns(), how))

    # ---- now and then ----

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            for seat in self._seats:
                await asyncio.to_thread(processes.bound_log, seat.log)
                await self._listen_to(seat)

    async def _listen_to(self, seat: Seat) -> None:
        """A process that runs and takes no connection is as good as none."""
        now_ns = self._driver.now_ns()
        if seat.slot.state != "serving" or seat.replica.up:
            seat.dumb_ns = now_ns
            return
        if now_ns - seat.dumb_ns < DUMB_S_MOST * NS_PER_S:
            return
        child = seat.child
        with contextlib.suppress(*ANSWERLESS):
            async with asyncio.timeout(HEALTH_S_MOST):
                await fetch(seat.replica, "/health")
            seat.dumb_ns = now_ns  # it answers: why it is not up, the watcher says
            return
        if seat.slot.state == "serving" and seat.child is child and not seat.replica.up:
            why = f"it answered nobody for {DUMB_S_MOST:g} s"
            self._do(seat, seat.slot.hung(self._driver.now_ns(), why))


def _told(error: OSError) -> str:
    name = f"{error.filename}: " if error.filename else ""
    return f"{name}{error.strerror or error}"


def _loud(task: asyncio.Task[None]) -> None:
    """A fault of ours must not go unheard."""
    if not task.cancelled() and task.exception() is not None:
        log.error("the fleet failed at something", exc_info=task.exception())
