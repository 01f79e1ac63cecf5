"""What outlives a controller: deployments and breakers."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from controller.store import deployments
from controller.store.database import SCHEMA, Database, DatabaseError
from policy.decisions import BreakerMoved
from policy.parameters import canonical, from_canonical, policy_hash
from tests.policy_support import parameters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Wall:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[Database]:
    database = Database(folder / "sub" / "controller.sqlite", **options)
    try:
        yield database
    finally:
        database.close()


def test_the_last_deployment_is_what_the_next_process_finds(tmp_path: Path) -> None:
    async def first(database: Database) -> None:
        assert await database.history() == []
        await database.deploy(parameters(name="one"), "ann", "the first")
        await database.deploy(parameters(name="two"), "bob")

    async def second(database: Database) -> None:
        last, _ = await database.history()
        assert (last.name, last.by, last.at_s) == ("two", "bob", 1_000_000.0)
        assert from_canonical(last.canonical) == parameters(name="two")
        assert len(last.sha256) == 64
        assert [one.name for one in await database.history()] == ["two", "one"]
        assert [one.name for one in await database.history(1)] == ["two"]

    with opened(tmp_path, wall_s=Wall()) as database:
        asyncio.run(first(database))
    with opened(tmp_path) as database:
        asyncio.run(second(database))
        asyncio.run(database.deploy(parameters(name="three"), "admin"))
        assert [one["name"] for one in database.policies()] == ["three", "two", "one"]


def test_what_was_committed_is_there_though_the_process_was_not_closed(tmp_path: Path) -> None:
    with opened(tmp_path) as database:
        asyncio.run(database.deploy(parameters(name="one"), "ann"))
        with opened(tmp_path) as other:  # reads the journal beside the file
            (last,) = asyncio.run(other.history())
            assert last.name == "one"


def test_it_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "controller.sqlite").touch(0o644)
    with opened(tmp_path) as database:
        asyncio.run(database.deploy(parameters(name="one"), "ann"))
        names = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(names) == 3, "the file, its journal and the index of that"
    assert set(names.values()) == {0o600}, names


def test_breakers_are_kept_as_they_last_moved(tmp_path: Path) -> None:
    wall = Wall()
    with opened(tmp_path, wall_s=wall) as database:
        database.breaker_moved(BreakerMoved("errors/m", "open", "share", 3, 9, 2_000_000_000))
        database.breaker_moved(BreakerMoved("errors/n", "open", "share", 3, 9, 5_000_000_000))
        wall.now_s += 2
        database.breaker_moved(BreakerMoved("errors/m", "half_open", "time"))
        kept = asyncio.run(database.breakers())
    assert [(one.key, one.state, one.until_s) for one in kept] == [
        ("errors/m", "half_open", None),
        ("errors/n", "open", 1_000_005.0),
    ]


def test_breakers_with_invented_keys_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.store.database.BREAKERS_MOST", 20)
    with opened(tmp_path) as database:
        database.breaker_moved(BreakerMoved("first", "open", "share"))
        for number in range(100):
            database.breaker_moved(BreakerMoved(f"k{number}", "closed", "quiet"))
        kept = asyncio.run(database.breakers())
    assert 18 <= len(kept) <= 20
    assert "first" in {one.key for one in kept}, "what is open outlives what is closed"
    assert "k99" in {one.key for one in kept}


def test_more_moves_than_the_disk_takes_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.store.database.WAITING_MOST", 3)

    async def flood(database: Database) -> None:
        import threading

        go = threading.Event()
        held = asyncio.create_task(database.run(lambda _: go.wait(5)))
        await asyncio.sleep(0)
        for number in range(10):
            database.breaker_moved(BreakerMoved(f"k{number}", "open", "share"))
        go.set()
        await held
        assert len(await database.breakers()) == 3
        database.breaker_moved(BreakerMoved("later", "open", "share"))
        assert len(await database.breakers()) == 4

    with opened(tmp_path) as database:
        asyncio.run(flood(database))
        assert (database.moves, database.left_out) == (4, 7)


def test_work_that_fails_changes_nothing(tmp_path: Path) -> None:
    def half(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO breakers VALUES ('k', 'open', '', 0, NULL)")
        db.execute("INSERT INTO breakers VALUES ('k', 'open', '', 0, NULL)")

    with opened(tmp_path) as database:
        with pytest.raises(DatabaseError, match=r"controller\.sqlite: UNIQUE"):
            asyncio.run(database.run(half))
        assert asyncio.run(database.breakers()) == []


OLD_TABLES = """
CREATE TABLE policies (id INTEGER PRIMARY KEY, at_s REAL NOT NULL, name TEXT NOT NULL,
    canonical TEXT NOT NULL, sha256 TEXT NOT NULL, by TEXT NOT NULL, note TEXT NOT NULL) STRICT;
CREATE TABLE breakers (key TEXT PRIMARY KEY, state TEXT NOT NULL, why TEXT NOT NULL,
    at_s REAL NOT NULL, until_s REAL) STRICT;
CREATE TABLE checkpoints (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL, chain TEXT NOT NULL, step TEXT NOT NULL, request TEXT NOT NULL,
    answer BLOB NOT NULL, status INTEGER NOT NULL, content_type TEXT NOT NULL,
    at_s REAL NOT NULL) STRICT;
"""


def test_a_file_of_the_schema_before_keeps_what_it_held(tmp_path: Path) -> None:
    one, two = parameters(name="one"), parameters(name="two")
    path = tmp_path / "sub" / "controller.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as old:
        old.executescript(OLD_TABLES)
        for number, (each, by) in enumerate([(one, "start"), (two, "admin")]):
            row = (1000.5 + number, each.name, canonical(each), policy_hash(each), by, "why")
            old.execute(
                "INSERT INTO policies (at_s, name, canonical, sha256, by, note)"
                " VALUES (?, ?, ?, ?, ?, ?)", row,
            )  # fmt: skip
        old.execute("INSERT INTO breakers VALUES ('k', 'open', 'share', 1.0, NULL)")
        old.execute("PRAGMA user_version = 1")
        old.commit()
    for _ in range(2):  # once made new, it is read as it is
        with opened(tmp_path) as database:
            last, first = asyncio.run(database.history())
            assert (last.name, first.by, first.at_s) == ("two", "start", 1000.5)
            assert [each.key for each in asyncio.run(database.breakers())] == ["k"]
            newer, older = asyncio.run(database.run(lambda db: deployments.entries(db, 10)))
            assert (older.name, older.against, older.stage) == ("one", "", "done")
            assert (newer.name, newer.against, newer.by) == ("two", canonical(one), "admin")
            assert [(each.at_s, each.why) for each in newer.transitions] == [(1001.5, "why")]


def test_what_a_process_left_halfway_is_rolled_back_and_nothing_else(tmp_path: Path) -> None:
    new = deployments.New("ann", "mine", "{}", "{}", "evidence")

    def shadow(at_s: float) -> deployments.Transition:
        return deployments.Transition(at_s, "shadow", 0, "it begins", {})

    with opened(tmp_path) as database:
        first = asyncio.run(database.run(lambda db: deployments.begin(db, new, shadow(1.0))))
        over = deployments.Transition(2.0, "done", 1000, "it holds", {"misses": 0.5})
        asyncio.run(database.run(lambda db: deployments.finish(db, first, over, b"state")))
        second = asyncio.run(database.run(lambda db: deployments.begin(db, new, shadow(3.0))))
    with opened(tmp_path) as database:
        left = asyncio.run(database.run(lambda db: deployments.end_interrupted(db, 4.0, "why")))
        assert [(each.id, each.stage) for each in left] == [(second, "shadow")]
        again = asyncio.run(database.run(lambda db: deployments.end_interrupted(db, 5.0, "why")))
        assert again == []
        found = asyncio.run(database.run(lambda db: deployments.entries(db, 10)))
        assert [(each.id, each.stage) for each in found] == [
            (second, "rolled_back"), (first, "done"),
        ]  # fmt: skip
        assert (found[1].state, found[1].transitions[-1].figures) == (b"state", {"misses": 0.5})
        assert [each.name for each in asyncio.run(database.history())] == ["mine"]


def test_many_refused_deployments_do_not_push_out_what_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.store.deployments.KEPT_MOST", 5)
    refused = deployments.Transition(1.0, "refused", 0, "no", {})
    with opened(tmp_path) as database:
        asyncio.run(database.deploy(parameters(name="one"), "start"))
        for _ in range(20):
            new = deployments.New("ann", "mine", "{}", "{}")
            asyncio.run(database.run(lambda db, new=new: deployments.begin(db, new, refused)))
        assert [each.name for each in asyncio.run(database.history())] == ["one"]
        assert len(asyncio.run(database.run(lambda db: deployments.entries(db, 100)))) == 5


@pytest.mark.parametrize("schema", [4, 99])
def test_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    with opened(tmp_path) as database:
        asyncio.run(database.run(lambda db: db.execute(f"PRAGMA user_version = {schema}")))
    with pytest.raises(DatabaseError, match=f"schema {schema} is not known.*reads schema {SCHEMA}"):
        Database(tmp_path / "sub" / "controller.sqlite")


def test_someone_elses_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "controller.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (a)")
    other.close()
    with pytest.raises(DatabaseError, match="schema 0 is not known"):
        Database(path)


@pytest.mark.parametrize("damage", ["no database", "zeros in it", "cut short"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as database:

        async def fill() -> None:
            for number in range(200):
                await database.deploy(parameters(name=f"p{number}"), "ann", "x" * 3_000)

        asyncio.run(fill())
    path = tmp_path / "sub" / "controller.sqlite"
    data = path.read_bytes()
    if damage == "no database":
        path.write_bytes(b"hello world" * 1_000)
    elif damage == "zeros in it":
        path.write_bytes(data[:4096] + bytes(len(data) - 4096))
    else:
        path.write_bytes(data[: len(data) // 3])
    with pytest.raises(DatabaseError, match=r"controller\.sqlite.*move it away"):
        Database(path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Database(tmp_path / "file" / "controller.sqlite")
