"""What a controller begins with: the policy as a process before left it, or a fresh one."""

from __future__ import annotations

import logging
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from controller.driver import Clock
from controller.store.recovery import recover
from policy.compose import build_policy
from policy.events import Restored
from policy.files import load_policy, policy_names
from policy.parameters import canonical, from_canonical

if TYPE_CHECKING:
    from controller.config import Settings
    from controller.driver import Driver
    from controller.store.database import Database, Deployment
    from controller.store.recovery import Recovered
    from policy.contract import Policy
    from policy.parameters import Parameters

LOGGER = logging.getLogger("twinkeel")
AT_START = "start"
"""Who deployed a policy that was given with the start."""


class Beginning(NamedTuple):
    """A policy that can go on."""

    wanted: Parameters
    """The policy that is to rule: with ``observe``, only in shadow."""
    policy: Policy
    parameters: Parameters
    """Those that ``policy`` has now."""
    clock: Clock
    recovered: Recovered | None
    """None: nothing was before."""

    @property
    def next_request(self) -> int:
        return 0 if self.recovered is None else self.recovered.next_request


async def begin(settings: Settings, database: Database) -> Beginning:
    """Read what was before.

    Raises:
        policy.files.FileError: the policy cannot be read.
    """
    wanted = await _wanted(settings, database)
    parameters = load_policy("fifo") if settings.observe else wanted
    recovered = recover(settings.data_path / "log", parameters)
    if recovered is None:
        return Beginning(wanted, build_policy(parameters), parameters, Clock(), None)
    if recovered.note:
        LOGGER.warning("%s", recovered.note)
    clock = Clock(_resumed_ns(recovered))
    if recovered.parameters.discipline != parameters.discipline:
        return Beginning(wanted, build_policy(parameters), parameters, clock, recovered)
    return Beginning(wanted, recovered.policy, recovered.parameters, clock, recovered)


def go_on(beginning: Beginning, driver: Driver, settings: Settings) -> None:
    """Settle what the process before left open, and bring the wanted policy into force."""
    recovered = beginning.recovered
    if recovered is None:
        return
    down_ns = max(0, driver.now_ns() - recovered.last_ns)
    LOGGER.info(
        "going on after %.1f s, %d requests were open", down_ns / 1e9, recovered.open_requests
    )
    driver.feed(Restored(down_ns))
    if not settings.observe and canonical(beginning.wanted) != canonical(driver.parameters):
        driver.switch(beginning.wanted)


async def _wanted(settings: Settings, database: Database) -> Parameters:
    """What was deployed last, unless the start asks for another policy than the one before did.

    What is asked for is a name or a file: that a preset says something else in a newer version is
    no reason to leave what an operator has deployed since.
    """
    given = load_policy(settings.policy)
    if settings.observe:
        return given
    asked = _asked(settings.policy)
    history = await database.history(1000)
    last = history[0] if history else None
    before = next((each for each in history if each.by == AT_START), None)
    if last is not None and before is not None and last is not before:
        again = asked == before.note or (not before.note and before.canonical == canonical(given))
        deployed = _readable(last) if again else None
        if deployed is not None:
            return deployed
        LOGGER.warning(
            "the policy %s, which %s put in force, is left for %s: %s",
            last.name, last.by, given.name,
            "this version cannot read it" if again
            else f"this start asks for {asked}, the one before asked for {before.note}",
        )  # fmt: skip
    if last is None or (last.canonical, last.note) != (canonical(given), asked):
        await database.deploy(given, AT_START, asked)
    return given


def _asked(policy: str) -> str:
    """What a start asks for: a preset by its name, a file by what stands in it."""
    if policy in policy_names():
        return policy
    path = Path(policy)
    return f"{path.name} ({sha256(path.read_bytes()).hexdigest()[:16]})"


def _readable(deployed: Deployment) -> Parameters | None:
    try:
        return from_canonical(deployed.canonical)
    except msgspec.MsgspecError:
        return None


def _resumed_ns(recovered: Recovered) -> int:
    """The log's time goes on; while nothing ran, it passed as on the wall."""
    return recovered.last_ns + 1 + max(0, time.time_ns() - recovered.wall_ns_of_last)
