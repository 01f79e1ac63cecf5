"""What the policy is told of a chain that only the store knows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from controller.gateway.asking import read
from controller.gateway.chains import KnownChains
from controller.store.checkpoints import Checkpoint, CheckpointsError
from policy.events import ChainFound
from tests.policy_support import parameters as made_parameters

if TYPE_CHECKING:
    from controller.gateway.asking import Asked

PARAMETERS = made_parameters(
    chains={"default": {"budget_ms": 8000}, "lines": {"long": {"budget_ms": 60_000}}}
)
NOW_S = 1_000_000.0


class Store:
    """Has one chain, whose budget ends when it is said."""

    def __init__(self, ends_s: float, line: str = "") -> None:
        self.row = Checkpoint("cp-1", "ann", "c", "plan", "r", b"", 200, "", 0.0, ends_s, line)
        self.asked = 0
        self.fails = False

    async def chain(self, owner: str, chain: str) -> list[Checkpoint]:
        self.asked += 1
        if self.fails:
            raise CheckpointsError("it is gone")
        return [self.row] if (owner, chain) == ("ann", "c") else []

    async def load(self, checkpoint: str, owner: str) -> Checkpoint | None:
        return self.row if (checkpoint, owner) == ("cp-1", "ann") else None


class Driver:
    parameters = PARAMETERS

    def __init__(self) -> None:
        self.fed: list[ChainFound] = []
        self.troubles: list[str] = []

    def feed(self, event: ChainFound) -> None:
        self.fed.append(event)

    def trouble(self, key: str, text: str) -> None:
        self.troubles.append(f"{key}: {text}")


def step(chain: str = "c", user: str = "ann", resume: str = "") -> Asked:
    headers = {"x-twinkeel-chain": chain, "x-twinkeel-user": user, "x-twinkeel-resume": resume}
    return read("completions", headers, b'{"model": "m", "prompt": "Hi"}', b"k" * 32)


def look_up(store: Store, *asked: Asked, shared: bool = False) -> Any:
    driver = Driver()
    clock = SimpleNamespace(s=0.0)
    known = KnownChains(driver, store, shared, lambda: NOW_S, lambda: clock.s)  # type: ignore[arg-type]

    async def main() -> None:
        for each in asked:
            await known.look_up(each)

    asyncio.run(main())
    return driver


@pytest.mark.parametrize(
    ("ends_s", "line", "left_s"),
    [
        (NOW_S + 3, "", 3), (NOW_S - 3, "", 0),
        (NOW_S + 8 + 3600, "", 8),  # the clock was put back by an hour since
        (NOW_S + 50, "long", 50), (NOW_S + 3600, "long", 60), (NOW_S + 50, "unknown", 8),
        (1e300, "", 8), (-1e300, "", 0),
    ],
)  # fmt: skip
def test_no_more_is_left_than_all_of_the_budget(ends_s: float, line: str, left_s: float) -> None:
    driver = look_up(Store(ends_s, line), step())
    assert driver.fed == [
        ChainFound("ann", "c", line, (("plan", "cp-1"),), round(left_s * 1_000_000_000))
    ]


def test_a_chain_is_looked_up_once_where_nobody_else_writes() -> None:
    alone, shared = Store(NOW_S + 3), Store(NOW_S + 3)
    look_up(alone, step(), step())
    look_up(shared, step(), step(), shared=True)
    assert (alone.asked, shared.asked) == (1, 2)


def test_nobody_is_told_of_anothers_chain() -> None:
    driver = look_up(Store(NOW_S + 3), step(user="eve"), step("x", user="eve", resume="cp-1"))
    assert not driver.fed


def test_what_is_resumed_is_looked_up_and_a_store_that_fails_is_told() -> None:
    driver = look_up(Store(NOW_S + 3), step("x", resume="cp-1"))
    assert [each.chain for each in driver.fed] == ["c"]
    store = Store(NOW_S + 3)
    store.fails = True
    driver = look_up(store, step())
    assert (driver.fed, len(driver.troubles)) == ([], 1)
    assert "it is gone" in driver.troubles[0]
