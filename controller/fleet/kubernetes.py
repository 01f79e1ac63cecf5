"""A fleet of pods: Deployments are scaled as the policy decides, and slots follow the pods.

A slot takes a pod's address while that pod is ready, and holds its gate otherwise. Who else scales
the Deployments (kubectl, an HPA) is respected: pods appear and vanish, and slots follow. Nothing
here is kept but what the API server said last, so while it is away serving goes on with the pods
that are known.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from controller.config import Upstream
from controller.fleet.contract import FleetView, SlotView
from controller.fleet.kubernetes_api import OBJECT_BYTES_MOST, Api, Pod, Reflector
from controller.fleet.kubernetes_config import read_cluster
from controller.fleet.kubernetes_scaling import Scaler, Slot, Source
from controller.upstream.discovery import DiscoveryError, base_of, cards_of
from controller.upstream.scrape import ANSWERLESS
from controller.upstream.warming import warm
from policy.decisions import Rotated, Start, Stop
from policy.events import ReplicaDown, Standby, Warmed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from controller.fleet.contract import Feeder, Gate, SlotState
    from controller.fleet.kubernetes_config import Cluster
    from controller.upstream.replica import Replica
    from policy.decisions import Decision

STOP_COST = "-1000"
"""Deletion cost of a pod that is to go: below what anyone sets by hand."""
REMOVED_S_MOST = 10.0
"""A pod that its ReplicaSet does not remove within that time is deleted by name."""
AGAIN_S = 5.0
"""After a pod did not answer its first prompts."""
GIVEN_UP_S = 60.0
"""After a pod that was asked for did not come."""
BASE_BACK_S = 10.0
"""A Deployment replaces a pod within that time; later its slot is a standby like any other."""
HERE_NS = 1_000_000_000
"""From ``Start`` to serving, where the pod runs already."""
KILL_S = 1
"""Of grace for a pod that is broken: its requests have been moved."""
BROKEN_CARD = ("ecc", "xid")
ROLLED = ("rollout of ", "rollback of ")
"""Why replicas of another version than before take requests now."""

log = logging.getLogger(__name__)


class KubernetesFleet:
    """Pods of one namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._observes = cluster.scale == "observe"
        self._slots: list[Slot] = []
        self._sources: list[Source] = []
        self._versions = {name: model.version for name, model in cluster.models.items()}
        """That each model is served in: a rollout changes it."""
        self._start_ns: dict[str, int] = {}
        """How long the last start took, by model."""
        for name, model in cluster.models.items():
            self._start_ns[name] = round(model.start_s * 1e9)
            for version, served in model.versions.items():
                self._sources.append(Source(name, version, served))
            for number in range(model.replicas_most):
                host = f"slot-{number}.{model.versions[model.version].deployment}"
                upstream = Upstream(
                    f"http://{host}:{model.port}", model.profile, labels=model.labels
                )
                base = number < model.replicas_least
                self._slots.append(Slot(len(self._slots), name, model, base, upstream))
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._due = False
        self._begun = self._closed = False
        self._api: Api
        self._scaler: Scaler
        self._session: aiohttp.ClientSession | None = None
        self._driver: Feeder
        self._gate: Gate

    # ---- the interface ----

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """Every slot, by id. A pod's own address comes when it is there."""
        return tuple(slot.upstream for slot in self._slots)

    async def begin(self, driver: Feeder, gate: Gate) -> None:
        """Hold every gate, announce what may be started, and begin to look for pods.

        Raises:
            policy.files.FileError: it is not said where the API server is.
        """
        self._driver, self._gate = driver, gate
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=OBJECT_BYTES_MOST
        )
        self._api = Api(self._session, self._cluster)
        self._scaler = Scaler(self._api, self._slots, driver.trouble)
        self._begun = True
        now_ns = driver.now_ns()
        for slot in self._slots:
            slot.replica = driver.replicas[slot.id]
            slot.since_ns = now_ns
            gate.hold(slot.replica, "its pod is looked for")
        for slot in self._slots:
            if not slot.base:
                self._announce(slot)
        for source in self._sources:
            deployment = source.served.deployment
            trouble = partial(driver.trouble, f"kubernetes {deployment}")
            source.reflector = Reflector(self._api, deployment, self._soon, trouble)
            self._spawn(source.reflector.run(), f"pods of {deployment}")

    async def ended(self, replica: Replica) -> None:
        """Nobody here knows more of it than the watcher."""

    def run(self, decision: Decision) -> None:
        """Carry out ``Start``, ``Stop`` and ``Rotated(isolated)``."""
        if not isinstance(decision, Start | Stop | Rotated):
            return
        if self._closed or decision.replica >= len(self._slots):
            return  # a policy that was restored may remember more slots
        slot = self._slots[decision.replica]
        if isinstance(decision, Start):
            self._start(slot, decision.version)
        elif isinstance(decision, Stop):
            self._stop(slot)
        elif decision.state == "isolated":
            self._isolate(slot, decision.why)
        elif decision.state == "in" and decision.why.startswith(ROLLED) and slot.source is not None:
            self._versions[slot.model] = slot.source.version

    def view(self) -> FleetView:
        """How it stands, for people."""
        now_ns = self._driver.now_ns()
        return FleetView("kubernetes", tuple(self._slot_view(slot, now_ns) for slot in self._slots))

    async def close(self) -> None:
        """Let go of the pods, which are their Deployments' and run on."""
        if self._closed:
            return
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for slot in self._slots if self._begun else ():
            self._unask(slot)
            if not slot.replica.held:
                self._hold(slot, "stopped")
            slot.pod = None
            self._be(slot, "cold")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _slot_view(self, slot: Slot, now_ns: int) -> SlotView:
        pod = slot.pod
        return SlotView(
            replica=slot.id,
            name=pod.name if pod is not None else slot.replica.name,
            model=slot.model,
            version=slot.source.version if slot.source is not None else self._versions[slot.model],
            state=slot.state,
            why=slot.why,
            since_s=(now_ns - slot.since_ns) / 1e9,
            standby=not slot.base or slot.state == "cold",
            url=slot.replica.url if pod is not None else "",
            domain=pod.node if pod is not None else "",
            starts=slot.starts,
        )

    # ---- slots follow pods ----

    def _soon(self) -> None:
        """Bring the slots into line with the pods, after what is going on now."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Gates are held first, then pods take slots, then gates open: two pods that changed
        places never share an address."""
        self._due = False
        if self._closed:
            return
        for slot in self._slots:
            if slot.pod is not None:
                self._follow(slot, slot.pod)
        for source in self._sources:
            if source.reflector.listed:
                self._place_all(source)
        for slot in self._slots:
            later = self._later_claim(slot)
            if later is not None and slot.state in ("serving", "warming", "broken"):
                self._hold(slot, f"pod {later.name} has its address now")
                self._be(slot, "waiting", f"pod {later.name} has its address now")
        for slot in self._slots:
            self._open(slot)
        for source in self._sources:
            waits = any(each.source is source and each.waits and not each.raised
                        for each in self._slots)  # fmt: skip
            if waits and not source.growing and not self._observes:
                source.growing = True
                self._spawn(self._scaler.grow(source), f"scale {source.served.deployment}")

    def _follow(self, slot: Slot, before: Pod) -> None:
        """What became of the slot's pod?"""
        assert slot.source is not None
        pod = slot.source.reflector.pods.get(before.uid)
        if pod is None or pod.ending:
            slot.ended.set()
        if pod is None:
            self._hold(slot, "stopped" if slot.stopping or before.ending else "its pod is gone")
            self._vacate(slot)
            return
        slot.pod = pod
        if pod.ending:
            if slot.state != "stopping":
                # Whoever deleted it meant it, and its Deployment knows: nothing is to be replaced.
                self._hold(slot, "stopped")
                self._be(slot, "stopping", "somebody deleted its pod: it finishes what it has")
        elif slot.stopping:
            pass
        elif pod.restarts != before.restarts or pod.ip != before.ip:
            slot.known = False
            moved = "its pod has another address" if pod.ip != before.ip else "restarted"
            slot.failed = slot.failed or slot.state == "serving"
            if pod.ip != before.ip:
                self._claim(slot)
            self._hold(slot, pod.why or moved)
            self._be(slot, "waiting", pod.why or moved)
        elif not pod.ready and slot.state in ("serving", "warming", "broken"):
            slot.failed = slot.failed or slot.state == "serving"
            self._hold(slot, pod.why)
            self._be(slot, "waiting", pod.why)
        elif not pod.ready:
            slot.why = pod.why

    def _place_all(self, source: Source) -> None:
        """Pods without a slot take one."""
        taken = {slot.pod.uid for slot in self._slots if slot.pod is not None}
        for pod in sorted(source.reflector.pods.values(), key=lambda each: each.name):
            if pod.uid in taken or pod.ending:
                continue
            slot = self._room(source)
            if slot is None:
                self._driver.trouble(
                    f"kubernetes {source.model}",
                    f"pod {pod.name} gets no requests: all slots of {source.model} are taken;"
                    " raise replicas_most in the fleet file",
                )
                continue
            self._place(source, slot, pod)
        if not source.adopted:
            source.adopted = True
            sources = [each for each in self._sources if each.model == source.model]
            if all(each.adopted for each in sources):
                self._adopted(source.model, sources)

    def _room(self, source: Source) -> Slot | None:
        """Who waits for a pod of this Deployment, else who has none, else whose pod ends and has
        nothing left to do; those first that always have one."""
        slots = [slot for slot in self._slots if slot.model == source.model]
        for slot in slots:
            if slot.waits and slot.source is source:
                return slot
        slots = [slot for slot in slots if slot.asked is None]
        for base in (True, False):
            mine = [slot for slot in slots if slot.base is base]
            free = [slot for slot in mine if slot.pod is None]
            free += [
                slot for slot in mine
                if slot.pod is not None and slot.pod.ending and not slot.replica.attempts
            ]  # fmt: skip
            if free:
                return free[0]
        return None

    def _place(self, source: Source, slot: Slot, pod: Pod) -> None:
        slot.source, slot.pod = source, pod
        slot.ended = asyncio.Event()
        self._claim(slot)
        slot.failed = False
        slot.stopping = slot.lowered = False
        slot.known = not source.adopted
        self._be(slot, "starting", pod.why)
        if pod.cost == STOP_COST:  # a controller before this one ended meanwhile
            clear = self._scaler.insist(pod, "let it stay", lambda: self._api.set_cost(pod, None))
            self._spawn(clear, f"keep {pod.name}")

    def _adopted(self, model: str, sources: list[Source]) -> None:
        """All pods of a model are known: most of them say which version serves, since a rollout may
        have changed it; what should always run and does not is asked for, once."""
        file_version = self._cluster.models[model].version
        most = max(
            sources,
            key=lambda each: (len(each.reflector.pods), each.version == file_version),
        )
        self._versions[model] = most.version
        for slot in self._slots if not self._observes else ():
            if slot.model == model and slot.base and slot.pod is None and slot.asked is None:
                self._ask(slot, most)

    def _vacate(self, slot: Slot) -> None:
        """Its pod is gone."""
        meant = slot.stopping
        slot.pod = None
        slot.stopping = slot.lowered = False
        if slot.asked is not None:  # a Deployment makes another in its place
            self._be(slot, "starting", "its pod is gone: another one is waited for")
            return
        slot.source = None
        self._be(slot, "cold")
        if slot.base and not meant:
            self._later(BASE_BACK_S, lambda: self._announce(slot))
        else:
            self._announce(slot)

    def _announce(self, slot: Slot) -> None:
        """It can be started, if it still is a standby."""
        if slot.asked is not None:
            return
        if slot.state == "warm" and slot.source is not None:
            self._standby(slot, HERE_NS, slot.source.version)
        elif slot.pod is None:
            self._standby(slot, self._start_ns[slot.model], self._versions[slot.model])

    def _standby(self, slot: Slot, start_ns: int, version: str) -> None:
        known = (each.replica.spec for each in self._slots if each.model == slot.model)
        models = next((spec.models for spec in known if spec is not None), (slot.model,))
        self._driver.feed(
            Standby(
                slot.id, slot.replica.name, models, start_ns, version,
                pooling=slot.settings.pooling,
            )
        )  # fmt: skip

    def _claim(self, slot: Slot) -> None:
        slot.claim = 1 + max(each.claim for each in self._slots)

    def _later_claim(self, slot: Slot) -> Pod | None:
        """A pod that has this one's address since later: what is known of this one is old."""
        for other in self._slots:
            if (
                slot.pod is not None and other.pod is not None and slot.pod.ip
                and other.pod.ip == slot.pod.ip and other.claim > slot.claim
            ):  # fmt: skip
                return other.pod
        return None

    # ---- gates ----

    def _hold(self, slot: Slot, reason: str) -> None:
        self._gate.hold(slot.replica, reason)

    def _be(self, slot: Slot, state: SlotState, why: str = "") -> None:
        if state != slot.state:
            slot.since_ns = self._driver.now_ns()
        slot.state, slot.why = state, why

    def _open(self, slot: Slot) -> None:
        """Let requests go to a pod that is ready; to a new one after its first prompts."""
        pod, source = slot.pod, slot.source
        if pod is None or source is None or slot.stopping or slot.state not in (
            "starting", "waiting",
        ):  # fmt: skip
            return
        if pod.ending or not pod.ready or not pod.ip or self._later_claim(slot) is not None:
            return
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{slot.settings.port}"
        slot.replica.move(url)
        slot.replica.upstream = msgspec.structs.replace(
            slot.upstream, url=url, domain=pod.node, version=source.version
        )
        if slot.known:
            self._release(slot)
            return
        self._be(slot, "warming")
        self._spawn(self._warm(slot, pod, source, slot.since_ns), f"warm {pod.name}")

    def _release(self, slot: Slot) -> None:
        if slot.failed and slot.base:
            # Others took its place meanwhile, and are not given up any more: it can be, instead.
            serving = [each for each in self._slots
                       if each.model == slot.model and each.state == "serving"]  # fmt: skip
            if len(serving) >= slot.settings.replicas_least:
                self._standby(slot, HERE_NS, slot.replica.upstream.version)
        slot.failed = False
        slot.known = True
        slot.starts += 1
        self._be(slot, "serving")
        self._unask(slot, served=True)
        self._gate.release(slot.replica)

    async def _warm(self, slot: Slot, pod: Pod, source: Source, since_ns: int) -> None:
        """Its first prompts; it must have loaded what its version says.

        Args:
            since_ns: when this warm-up began: a pod that was not ready meanwhile has a later one.
        """
        loaded = await self._loaded(slot)
        wrong = bool(source.served.loads) and loaded not in ("", source.served.loads)
        ok = bool(loaded) and not wrong
        ok = ok and (await warm(slot.replica, slot.settings.pooling)).ok
        now = slot.pod
        same = now is not None and now.uid == pod.uid and slot.since_ns == since_ns
        if not same or slot.state != "warming":
            return  # its time has passed
        if ok:
            self._release(slot)
            return
        why = (
            f"it has loaded {loaded}, and version {source.version} is {source.served.loads}"
            if wrong else "it did not answer its first prompts"
        )  # fmt: skip
        self._driver.trouble(f"kubernetes {pod.name}", f"pod {pod.name} gets no requests: {why}")
        self._be(slot, "broken", why)
        if wrong and slot.asked is not None:
            self._give_up(slot, "another version was loaded", loaded)
        elif not wrong:
            self._later(AGAIN_S, lambda: self._warm_again(slot, pod))

    async def _loaded(self, slot: Slot) -> str:
        """What it says it has loaded; empty: it does not answer."""
        try:
            async with asyncio.timeout(AGAIN_S):
                card = base_of(await cards_of(slot.replica))
        except (DiscoveryError, *ANSWERLESS):
            return ""
        return card.twinkeel_version or card.root or card.id

    def _warm_again(self, slot: Slot, pod: Pod) -> None:
        if slot.pod is not None and slot.pod.uid == pod.uid and slot.state == "broken":
            self._be(slot, "starting", slot.why)
            self._soon()

    # ---- Start ----

    def _start(self, slot: Slot, version: str) -> None:
        wanted = version or self._versions[slot.model]
        source = next(
            (each for each in self._sources
             if each.model == slot.model and each.version == wanted), None,
        )  # fmt: skip
        if source is None:
            self._driver.trouble(
                f"kubernetes {slot.model}",
                f"version {wanted} of {slot.model} cannot be started: versions in the fleet file"
                f" are {', '.join(slot.settings.versions)}",
            )
            self._refused(slot, wanted)
        elif slot.state == "warm" and slot.source is source and slot.pod is not None:
            pod = slot.pod
            slot.stopping = False
            self._be(slot, "starting")
            clear = self._scaler.insist(pod, "let it stay", lambda: self._api.set_cost(pod, None))
            self._spawn(clear, f"keep {pod.name}")
            self._soon()
        elif slot.pod is not None and slot.source is not source:
            self._refused(slot, wanted)
        elif slot.state != "serving" and slot.asked is None:
            if slot.pod is None:
                self._take_over(slot, source)
            self._ask(slot, source, version)

    def _take_over(self, slot: Slot, source: Source) -> None:
        """A pod that is on its way and that nobody asked for is the one that is asked for now: its
        Deployment replaces one that went, as the policy does."""
        for other in self._slots:
            pod = other.pod
            coming = other.state in ("starting", "warming") and not (other.known or other.stopping)
            if pod is None or other.source is not source or other.asked or not coming:
                continue
            other.pod = other.source = None
            self._be(other, "cold")
            self._place(source, slot, pod)
            self._later(0.0, partial(self._announce, other))
            return

    def _ask(self, slot: Slot, source: Source, version: str = "") -> None:
        """Wait for a pod, and have the Deployment make one if it does not by itself."""
        slot.source = source
        slot.version = version
        slot.asked_ns = self._driver.now_ns()
        slot.raised = False
        loop = asyncio.get_running_loop()
        slot.asked = loop.call_later(slot.settings.start_s_most, self._late, slot)
        if slot.pod is None:
            self._be(slot, "starting", "a pod is waited for")
        self._soon()

    def _unask(self, slot: Slot, served: bool = False) -> None:
        if slot.asked is None:
            return
        slot.asked.cancel()
        slot.asked = None
        if served:
            self._start_ns[slot.model] = max(1, self._driver.now_ns() - slot.asked_ns)

    def _late(self, slot: Slot) -> None:
        self._give_up(slot, slot.why or "it took too long to come up", "")

    def _give_up(self, slot: Slot, why: str, loaded: str) -> None:
        """The pod that was asked for does not come, or is not the one that was meant."""
        source = slot.source
        assert source is not None
        self._unask(slot)
        what = slot.pod.name if slot.pod is not None else f"a pod of {source.served.deployment}"
        self._driver.trouble(
            f"kubernetes {source.served.deployment}",
            f"{what} was asked for, and is given up: {why}",
        )
        if slot.version:
            self._driver.feed(Warmed(slot.id, loaded or slot.version, False))
        else:
            self._driver.feed(ReplicaDown(slot.id, why))
        if slot.pod is not None:
            self._stop(slot)
            return
        slot.source = None
        self._be(slot, "cold", why)
        # A rollout wants its standby back; for load the same would only be tried again at once.
        self._later(0.0 if slot.version else GIVEN_UP_S, lambda: self._announce(slot))
        if not self._observes and slot.raised:
            self._spawn(self._scaler.lower_unmade(source), f"scale {source.served.deployment}")

    def _refused(self, slot: Slot, version: str) -> None:
        """It cannot be started so: told after the decision has been dealt with."""

        def tell() -> None:
            self._driver.feed(Warmed(slot.id, version, False))
            self._announce(slot)

        self._later(0.0, tell)

    # ---- Stop, and isolated ----

    def _stop(self, slot: Slot) -> None:
        """Nothing is in flight there any more."""
        self._hold(slot, "stopped")
        self._unask(slot)
        pod, source = slot.pod, slot.source
        if slot.stopping:
            return
        if pod is None or source is None:
            waited, slot.source = slot.source, None
            self._be(slot, "cold")
            self._later(0.0, lambda: self._announce(slot))
            if waited is not None and slot.raised and not self._observes:
                self._spawn(self._scaler.lower_unmade(waited), f"scale {waited.served.deployment}")
            return
        slot.stopping = True
        self._be(slot, "stopping", "the policy gave it up")
        if not pod.ending:
            self._spawn(self._remove(slot, pod, source), f"remove {pod.name}")

    async def _remove(self, slot: Slot, pod: Pod, source: Source) -> None:
        """Have the Deployment go down by exactly this pod."""
        ended = slot.ended
        there = await self._scaler.insist(
            pod, "mark it as the one to go", lambda: self._api.set_cost(pod, STOP_COST)
        )
        if not there or self._scaler.gone(source, pod):
            return
        if self._observes:  # whoever scales removes it, if the policy does not want it back
            if slot.pod is not None and slot.pod.uid == pod.uid and slot.stopping:
                self._be(slot, "warm", "whoever scales may remove its pod")
                self._announce(slot)
            return
        await self._scaler.lower(slot, pod, source)
        try:
            async with asyncio.timeout(REMOVED_S_MOST):
                await ended.wait()
        except TimeoutError:
            # Its ReplicaSet removed another one, which was not ready; it replaces this one.
            await self._scaler.insist(pod, "delete it", lambda: self._api.delete(pod))

    def _isolate(self, slot: Slot, why: str) -> None:
        """Its Deployment makes a new pod; the broken one gets no time to end."""
        self._hold(slot, f"isolated: {why}")
        pod = slot.pod
        if pod is None or slot.state == "stopping":
            return  # it is on its way out
        slot.stopping = True
        self._be(slot, "stopping", f"isolated: {why}")
        if why.startswith(BROKEN_CARD) and pod.node:
            self._driver.trouble(
                f"card on {pod.node}",
                f"pod {pod.name} is deleted, since its card broke ({why}); so that no other pod"
                f" comes onto that card: kubectl taint nodes {pod.node}"
                f" twinkeel.dev/broken-card={why.split(':')[0].replace(' ', '-')}:NoSchedule",
            )
        delete = self._scaler.insist(pod, "delete it", lambda: self._api.delete(pod, KILL_S))
        self._spawn(delete, f"delete {pod.name}")

    def _spawn(self, work: Coroutine[Any, Any, object], name: str) -> None:
        async def run() -> None:
            try:
                await work
            except Exception:  # what one pod does must not stop the others
                log.exception("%s failed", name)
                self._driver.trouble("kubernetes", f"{name} failed: see the log")

        task = asyncio.get_running_loop().create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _later(self, s: float, work: Callable[[], object]) -> None:
        def ring() -> None:
            self._timers.discard(timer)
            work()

        timer = asyncio.get_running_loop().call_later(s, ring)
        self._timers.add(timer)


def kubernetes_fleet(path: str, data: Mapping[str, Any]) -> KubernetesFleet:
    """The fleet of a file whose top level has ``kubernetes``; ``path`` is what errors call it.

    Raises:
        policy.files.FileError: it cannot be used.
    """
    return KubernetesFleet(read_cluster(path, data))
