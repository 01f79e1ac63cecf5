"""The fleet of ``--upstream``: servers that someone else runs.

All of them are looked for from the beginning and ever after. Starting and stopping them is for
whoever runs them, so a decision to do so is a signal, told once for each server.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from controller.fleet.contract import FleetView, SlotView
from policy.decisions import Rotated, Start, Stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.config import Upstream
    from controller.fleet.contract import Feeder, Gate
    from controller.upstream.replica import Replica
    from policy.decisions import Decision

NS_PER_S = 1_000_000_000

log = logging.getLogger(__name__)


class StaticFleet:
    """See the module."""

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self._upstreams = tuple(upstreams)
        self._driver: Feeder | None = None
        self._begun_ns = 0
        self._gate: Gate | None = None
        self._told: set[tuple[str, int]] = set()
        """What was asked for already, of which server."""

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        return self._upstreams

    async def begin(self, driver: Feeder, gate: Gate) -> None:
        self._driver, self._gate = driver, gate
        self._begun_ns = driver.now_ns()
        for replica in driver.replicas.values():
            gate.release(replica)

    def run(self, decision: Decision) -> None:
        """Tell the log, once."""
        match decision:
            case Start() | Stop():
                asked = f"{type(decision).__name__.lower()}"
            case Rotated(state="isolated", why=why):
                asked = f"replace, because it is {why},"
            case _:
                return
        if (asked, decision.replica) in self._told or decision.replica >= len(self._upstreams):
            return
        self._told.add((asked, decision.replica))
        url = self._upstreams[decision.replica].url
        log.warning("the policy would %s %s, which is not run by this controller", asked, url)

    async def ended(self, replica: Replica) -> None:
        """Nobody here knows more of it than the watcher."""

    def card_broken(self, uuid: str, why: str) -> None:
        """The policy knows, and sends nothing there."""

    def card_well(self, uuid: str) -> None:
        """What is on this card comes up anew, as what was isolated does."""
        for number, upstream in enumerate(self._upstreams):
            if uuid in upstream.gpus:
                self.slot_well(number)

    def slot_well(self, replica: int) -> bool:
        """The same of one slot. False: there is none."""
        if self._driver is None or self._gate is None or replica not in self._driver.replicas:
            return False
        self._gate.hold(self._driver.replicas[replica], "restored")
        self._gate.release(self._driver.replicas[replica])
        return True

    def restore(self, uuid: str) -> bool:
        """Only who watches the cards knows."""
        return False

    def view(self) -> FleetView:
        """Whether a server is up, the status says."""
        driver = self._driver
        since_s = 0.0 if driver is None else (driver.now_ns() - self._begun_ns) / NS_PER_S
        slots: list[SlotView] = []
        for number, upstream in enumerate(self._upstreams):
            spec = None if driver is None else driver.replicas[number].spec
            slots.append(
                SlotView(
                    number, urlsplit(upstream.url).netloc, "" if spec is None else spec.models[0],
                    upstream.version if spec is None else spec.version, "outside", "",
                    round(since_s, 3), False, upstream.url, upstream.domain,
                )
            )  # fmt: skip
        return FleetView("static", tuple(slots))

    async def close(self) -> None:
        """They run on."""
