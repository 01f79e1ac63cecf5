"""How many pods a Deployment should have, and which one is to go: what is changed in a cluster.

Each change goes on until it is made or has lost its meaning; an API server that is away delays it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controller.fleet.kubernetes_api import (
    BACKOFF_S,
    UNREACHED,
    Api,
    ApiError,
    Pod,
    Reflector,
    change_scale,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from controller.config import Upstream
    from controller.fleet.contract import SlotState
    from controller.fleet.kubernetes_api import Scale
    from controller.fleet.kubernetes_config import Model, Served
    from controller.upstream.replica import Replica

CONFLICT_S = 0.05
"""Before a scale that others changed is looked at again."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Source:
    """A Deployment, and what is known of it."""

    model: str
    version: str
    served: Served
    reflector: Reflector = field(init=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One change of its scale at a time."""
    adopted: bool = False
    """Pods that are found from now on are new."""
    growing: bool = False


@dataclass(eq=False)
class Slot:
    """A place for one pod."""

    id: int
    model: str
    settings: Model
    base: bool
    """Its pod is never given up."""
    upstream: Upstream
    replica: Replica = field(init=False)
    state: SlotState = "cold"
    why: str = ""
    since_ns: int = 0
    source: Source | None = None
    """Of its pod, or of the one that it waits for."""
    pod: Pod | None = None
    """As it was seen last."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Its pod was deleted, or is gone; another pod, another one."""
    claim: int = 0
    """Counts up with every address that a pod brings: of two with one address the later has it."""
    failed: bool = False
    """Its pod served, and failed."""
    known: bool = False
    """Its pod served before this controller began: nobody waits for a warm-up."""
    stopping: bool = False
    """The policy gave its pod up, or isolated it."""
    lowered: bool = False
    """The Deployment's scale counts without its pod already."""
    asked: asyncio.TimerHandle | None = None
    """A pod was asked for; rings when it is given up."""
    asked_ns: int = 0
    version: str = ""
    """That was asked for; empty: any."""
    raised: bool = False
    """The scale was looked at for it."""
    starts: int = 0

    @property
    def waits(self) -> bool:
        """A pod was asked for, and none is there."""
        return self.asked is not None and self.pod is None


class Scaler:
    """Changes scales and pods.

    Args:
        trouble: told of what is not done yet, with a key.
    """

    def __init__(
        self, api: Api, slots: Sequence[Slot], trouble: Callable[[str, str], object]
    ) -> None:
        self._api = api
        self._slots = slots
        self._trouble = trouble

    async def grow(self, source: Source) -> None:
        """As many pods as there are and are waited for, at least: also after someone else has
        scaled, and where a Deployment is about to replace a pod."""
        deployment = source.served.deployment
        asked: list[Slot] = []

        def wanted(seen: Scale) -> int:
            asked[:] = [each for each in self._slots if each.source is source and each.waits]
            return max(seen.replicas, self.alive(source) + len(asked))

        try:
            failed = 0
            while any(each.source is source and each.waits and not each.raised
                      for each in self._slots):  # fmt: skip
                try:
                    async with source.lock:
                        scale, changed = await change_scale(self._api, deployment, wanted)
                except (ApiError, *UNREACHED, ValueError) as error:
                    failed += 1
                    await self.pause(f"{deployment} was not scaled up", error, failed)
                    continue
                for slot in asked:
                    slot.raised = True
                if changed:
                    log.info("%s is scaled up to %d", deployment, scale.replicas)
        finally:
            source.growing = False

    def alive(self, source: Source) -> int:
        """Pods that count for the scale: neither ending nor given up."""
        lowered = {slot.pod.uid for slot in self._slots if slot.lowered and slot.pod is not None}
        pods = source.reflector.pods.values()
        return sum(not pod.ending and pod.uid not in lowered for pod in pods)

    async def lower(self, slot: Slot, pod: Pod, source: Source) -> None:
        """One less, once, for ``pod``. Where it is not known whether a change was made, since its
        answer was lost, the scale itself says it."""
        deployment = source.served.deployment
        target, failed = -1, 0
        while not self.gone(source, pod):
            try:
                async with source.lock:
                    seen = await self._api.scale(deployment)
                    if seen.replicas != target:
                        target = max(0, seen.replicas - 1)
                        await self._api.set_scale(deployment, seen, target)
                    slot.lowered = slot.pod is not None and slot.pod.uid == pod.uid
                log.info("%s is scaled down to %d, by %s", deployment, target, pod.name)
                return
            except ApiError as error:
                if error.code == 409:  # others scaled meanwhile, and nothing was changed
                    target = -1
                    await asyncio.sleep(CONFLICT_S)
                    continue
                failed += 1
                await self.pause(f"{deployment} was not scaled down", error, failed)
            except (*UNREACHED, ValueError) as error:
                failed += 1
                await self.pause(f"{deployment} was not scaled down", error, failed)

    async def lower_unmade(self, source: Source) -> None:
        """Pods that were never made are not asked for any more."""

        def wanted(seen: Scale) -> int:
            waits = sum(each.source is source and each.waits for each in self._slots)
            return min(seen.replicas, self.alive(source) + waits)

        try:
            async with source.lock:
                await change_scale(self._api, source.served.deployment, wanted)
        except (ApiError, *UNREACHED, ValueError) as error:
            await self.pause(f"{source.served.deployment} was not scaled down", error, 1)

    def gone(self, source: Source, pod: Pod) -> bool:
        now = source.reflector.pods.get(pod.uid)
        return now is None or now.ending

    def _there(self, pod: Pod) -> bool:
        """As far as anything here knows, that pod still is."""
        sources = {slot.source for slot in self._slots if slot.source is not None}
        return any(not self.gone(source, pod) for source in sources)

    async def insist(self, pod: Pod, what: str, call: Callable[[], Awaitable[object]]) -> bool:
        """Until it is done; False: that pod is gone, and another may have its name."""
        failed = 0
        while True:
            try:
                await call()
                return True
            except ApiError as error:
                # Another uid is a conflict when deleting, and invalid in a patch; so is a change
                # that somebody else made at the same time.
                if error.code == 404 or (error.code in (409, 422) and not self._there(pod)):
                    return False
                failed += 1
                await self.pause(f"pod {pod.name}: cannot {what}", error, failed)
            except (*UNREACHED, ValueError) as error:
                failed += 1
                await self.pause(f"pod {pod.name}: cannot {what}", error, failed)

    async def pause(self, what: str, error: Exception, failed: int) -> None:
        said = str(error) or type(error).__name__
        self._trouble("kubernetes api", f"{what}: {said}; it is tried again")
        first_s, most_s = BACKOFF_S
        pause_s = min(most_s, first_s * 2 ** min(failed, 10))
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
