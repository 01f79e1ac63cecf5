"""Servers that someone else runs are a fleet like any other."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from controller import http
from controller.config import Upstream
from controller.fleet.static import StaticFleet
from policy.decisions import Rotated, Start, Stop
from policy.events import ReplicaDown, ReplicaUp
from tests.fleet.conformance import CHECKS, Check, Desk, run_check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CARD = "GPU-00000000-0000-0000-0000-000000000001"
UPSTREAMS = (
    Upstream("http://127.0.0.1:9001", domain="host0/card0", gpus=(CARD,)),
    Upstream("http://127.0.0.1:9002", version="v1"),
)


class StaticBench:
    crashes = False
    within_s = 2.0
    serving = (0, 1)
    spares = ()

    def __init__(self) -> None:
        self.fleet = StaticFleet(UPSTREAMS)

    def runs(self, replica: int) -> bool:
        raise AssertionError("nobody here knows")

    async def crash(self, replica: int) -> None:
        raise AssertionError("it is not run here")

    async def clear(self) -> None:
        pass


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_a_fleet(check: Check) -> None:
    asyncio.run(run_check(check, StaticBench))


def begun(check: Callable[[StaticFleet, Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        fleet = StaticFleet(UPSTREAMS)
        async with http.session() as session:
            desk = Desk(fleet.upstreams, session)
            await fleet.begin(desk, desk)
            await asyncio.sleep(0)
            await check(fleet, desk)

    asyncio.run(run())


def test_what_it_cannot_do_it_says_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check(fleet: StaticFleet, desk: Desk) -> None:
        for _ in range(3):
            fleet.run(Stop(1))
            fleet.run(Start(1, "v2"))
            fleet.run(Rotated(0, "isolated", "hung"))
        assert desk.up() == [0, 1]

    with caplog.at_level(logging.WARNING):
        begun(check)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "stop http://127.0.0.1:9002" in said[0]
    assert "start http://127.0.0.1:9002" in said[1]
    assert "hung, http://127.0.0.1:9001" in said[2]


def test_what_is_on_a_card_comes_back_when_the_card_is_well() -> None:
    """A replica that was isolated comes back only as a new one."""

    async def check(fleet: StaticFleet, desk: Desk) -> None:
        fleet.card_well(CARD)
        await asyncio.sleep(0)
        kinds = [type(each) for each in desk.events if getattr(each, "replica", None) == 0]
        assert kinds == [ReplicaUp, ReplicaDown, ReplicaUp]
        assert len(desk.of(ReplicaUp, 1)) == 1, "that one is elsewhere"
        assert not fleet.slot_well(7)

    begun(check)


def test_it_says_what_the_servers_have_said() -> None:
    async def check(fleet: StaticFleet, desk: Desk) -> None:
        view = fleet.view()
        assert view.kind == "static"
        assert [(each.name, each.model, each.state, each.pid) for each in view.slots] == [
            ("127.0.0.1:9001", "m", "outside", 0), ("127.0.0.1:9002", "m", "outside", 0),
        ]  # fmt: skip
        assert view.slots[1].version == "v1"

    begun(check)
    assert StaticFleet(UPSTREAMS).view().slots[0].model == "", "nobody has asked yet"
