"""kill -9 at any moment never runs a finished step again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chains.killing import STEPS, Killer
from tests.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["sqlite", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "chains.sqlite")
    else:
        with redis_server() as server:
            yield server.url


@pytest.mark.parametrize("manner", ["sync", "async"])
def test_killed_at_every_point(manner: str, where: str, tmp_path: Path) -> None:
    killer = Killer(where, tmp_path, manner)
    killer.at_every_point()
    tally = killer.tally
    assert tally.twice == []
    for step in STEPS:
        assert {f"in {step}", f"done {step}", f"before save {step}"} <= tally.points
        assert f"after save {step}" in tally.points
    if where.endswith(".sqlite"):
        assert {"BEGIN", "INSERT", "COMMIT"} <= tally.points
    assert tally.kills == tally.chains - 1, "all but the last, which had no such point any more"
    assert tally.again >= 2 * len(STEPS), "killed between its deed and its commit it runs again"


@pytest.mark.parametrize("manner", ["sync", "async"])
def test_killed_at_any_instant(manner: str, where: str, tmp_path: Path) -> None:
    killer = Killer(where, tmp_path, manner)
    killer.at_random(8, seed=7, within_s=0.03)
    assert killer.tally.twice == []
