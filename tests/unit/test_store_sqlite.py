"""How the controller's SQLite files are opened."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from controller.store import sqlite

if TYPE_CHECKING:
    from pathlib import Path

TABLES = "CREATE TABLE t (a TEXT) STRICT;"


def prepare(connection: sqlite3.Connection) -> None:
    if sqlite.schema_of(connection) is None:
        sqlite.make(connection, TABLES, 3)


def test_it_is_made_with_its_folder_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.sqlite"
    with closing(sqlite.opened(path, prepare)) as db:
        db.execute("INSERT INTO t VALUES ('x')")
        assert {each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {0o600}
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (1,)
        db.commit()
    path.chmod(0o644)
    with closing(sqlite.opened(path, prepare, synchronous="FULL", busy_s=2.0)) as db:
        assert path.stat().st_mode & 0o777 == 0o600
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA busy_timeout").fetchone() == (2000,)
        assert db.execute("SELECT a FROM t").fetchall() == [("x",)]
        assert sqlite.schema_of(db) == 3


def test_where_it_cannot_be_prepared_it_is_closed_again(tmp_path: Path) -> None:
    seen: list[sqlite3.Connection] = []

    def refuse(connection: sqlite3.Connection) -> None:
        seen.append(connection)
        raise KeyError("no")

    with pytest.raises(KeyError):
        sqlite.opened(tmp_path / "a.sqlite", refuse)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        seen[0].execute("SELECT 1")


def test_an_empty_file_has_no_schema_and_one_with_tables_has(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as db:
        assert sqlite.schema_of(db) is None
        db.execute("CREATE TABLE other (a)")
        assert sqlite.schema_of(db) == 0


def test_a_schema_is_made_wholly_or_not_at_all(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as db:
        with pytest.raises(sqlite3.OperationalError):
            sqlite.make(db, f"{TABLES} DROP TABLE nothing;", 1)
        assert sqlite.schema_of(db) is None


def test_what_sqlite_says_is_told_with_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with (
        pytest.raises(LookupError) as told,
        sqlite.plain_errors(path, LookupError, "all is gone"),
    ):
        raise sqlite3.DatabaseError("malformed")
    assert str(told.value) == (
        f"{path}: malformed; if it is damaged, move it away: an empty one is made, and all is gone"
    )
    assert sqlite.unknown_schema(path, 9, 3) == (
        f"{path}: schema 9 is not known, this version reads schema 3: use the version that wrote"
        " it, or move the file away"
    )
