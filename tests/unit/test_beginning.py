"""Which policy a controller begins with: the start's, or what was put in force since."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from controller.beginning import begin
from controller.config import Settings, Upstream
from controller.store.database import Database
from policy.files import load_policy
from policy.parameters import canonical
from tests.policy_support import parameters

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MINE = parameters(name="mine")


def begun(folder: Path, policy: str = "stable", *, observe: bool = False) -> str:
    """Name of the policy that a process which is started so brings into force."""

    async def start() -> str:
        settings = Settings(
            (Upstream("http://127.0.0.1:9"),), policy, data=str(folder), observe=observe
        )
        return (await begin(settings, database)).wanted.name

    database = Database(folder / "controller.sqlite")
    with closing(database):
        return asyncio.run(start())


def put(folder: Path) -> None:
    """As an operator does it over the admin API."""
    with closing(Database(folder / "controller.sqlite")) as database:
        asyncio.run(database.deploy(MINE, "admin"))


def history(folder: Path) -> list[tuple[object, object]]:
    with closing(Database(folder / "controller.sqlite")) as database:
        return [(one["name"], one["by"]) for one in database.policies()]


def rewrite(folder: Path, what: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "controller.sqlite")) as database, database:
        database.execute(f"UPDATE policies SET {what}", values)


def test_what_was_put_in_force_rules_until_the_start_asks_for_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert begun(tmp_path) == "stable"
    assert begun(tmp_path) == "stable"
    assert history(tmp_path) == [("stable", "start")], "not once for each start"
    put(tmp_path)
    assert begun(tmp_path) == "mine"
    assert begun(tmp_path) == "mine"
    assert not caplog.records
    assert begun(tmp_path, "throughput") == "throughput"
    assert "the policy mine, which admin put in force, is left for throughput" in caplog.text
    assert begun(tmp_path, "throughput") == "throughput"
    assert history(tmp_path)[0] == ("throughput", "start")


def test_a_preset_that_a_new_version_changes_does_not_replace_it(tmp_path: Path) -> None:
    begun(tmp_path)
    put(tmp_path)
    older = canonical(load_policy("stable")).replace('"turbo_promise_ms":800', '"x":1')
    rewrite(tmp_path, "canonical = ? WHERE by = 'start'", older)
    assert begun(tmp_path) == "mine"


def test_a_database_of_before_is_understood(tmp_path: Path) -> None:
    begun(tmp_path)
    put(tmp_path)
    rewrite(tmp_path, "note = ''")
    assert begun(tmp_path) == "mine"


def test_a_file_with_another_text_is_another_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("schema: 1\nname: first\n")
    assert begun(tmp_path, str(file)) == "first"
    put(tmp_path)
    assert begun(tmp_path, str(file)) == "mine"
    file.write_text("schema: 1\nname: second\n")
    assert begun(tmp_path, str(file)) == "second"
    assert "is left for second" in caplog.text


def test_what_this_version_cannot_read_is_left_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path)
    put(tmp_path)
    rewrite(tmp_path, "canonical = '{\"tiers\": 5}' WHERE by = 'admin'")
    assert begun(tmp_path) == "stable"
    assert "this version cannot read it" in caplog.text


def test_observing_puts_nothing_in_force(tmp_path: Path) -> None:
    assert begun(tmp_path, "throughput", observe=True) == "throughput"
    assert history(tmp_path) == []
