"""What must outlive a controller beside its log: deployments and breakers.

One SQLite file and one thread that works on it. Everything that is committed survives the process;
a machine that loses its power may lose the last moments, but the file stays whole.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from controller.store import deployments, sqlite
from policy.parameters import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from policy.decisions import BreakerMoved
    from policy.parameters import Parameters

T = TypeVar("T")

SCHEMA = 3
BREAKERS_MOST = 10_000
WAITING_MOST = 1_000
"""Writes that nobody waits for, waiting themselves; more are left out."""

_TABLES = f"""
{deployments.TABLES}
CREATE TABLE policies (
    id INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    name TEXT NOT NULL,
    canonical TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    by TEXT NOT NULL,
    note TEXT NOT NULL
) STRICT;
CREATE TABLE breakers (
    key TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    why TEXT NOT NULL,
    at_s REAL NOT NULL,
    until_s REAL
) STRICT;
"""

_TO_SCHEMA_3 = "DROP TABLE checkpoints;"
"""They have a file of their own now."""


class DatabaseError(Exception):
    """The file cannot be used: which, why, and what to do about it."""


class Deployment(NamedTuple):
    """A policy that was put in force."""

    id: int
    at_s: float
    """Time of day, seconds since 1970; so everywhere here."""
    name: str
    canonical: str
    """As ``policy.parameters.from_canonical`` reads it."""
    sha256: str
    """Of ``canonical``."""
    by: str
    note: str


class KeptBreaker(NamedTuple):
    """A breaker after its last move."""

    key: str
    state: str
    why: str
    at_s: float
    until_s: float | None
    """When it lets a probe in, if that is known."""


class Database:
    """The file, open. ``run`` does any work on it; what is used often has a method.

    Args:
        path: made if it does not exist; its folder too.
        wall_s: time of day.

    Raises:
        DatabaseError: the file is damaged, is none of ours, or of an unknown schema.
    """

    def __init__(
        self,
        path: Path,
        *,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.moves = self.left_out = 0
        """Breaker moves that were written, and that were not: too many waited, or the file
        failed."""
        self._wall_s = wall_s
        self._asked = self._done = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="database")
        try:
            self._connection = self._executor.submit(self._guarded, self._open).result()
        except BaseException:
            self._executor.shutdown()
            raise

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do ``work`` in the file's thread, as one transaction.

        Raises:
            DatabaseError: the file failed; nothing was changed.
        """
        return await asyncio.wrap_future(self._submit(work))

    def close(self) -> None:
        """Finish what was asked for and close the file."""
        self._executor.submit(lambda: self._connection.close()).result()
        self._executor.shutdown()

    # Deployments

    async def deploy(self, parameters: Parameters, by: str, note: str = "") -> int:
        """Remember that this policy is in force from now on; the deployment's id."""
        return await self.run(lambda db: self._deploy(db, parameters, by, note))

    async def history(self, most: int = 100) -> list[Deployment]:
        """The last ones, the youngest first."""
        return await self.run(lambda db: _history(db, most))

    def policies(self) -> Sequence[Mapping[str, object]]:
        """As ``history``, as plain values and without waiting for the loop."""
        return [one._asdict() for one in self._submit(lambda db: _history(db, 100)).result()]

    def _deploy(self, db: sqlite3.Connection, parameters: Parameters, by: str, note: str) -> int:
        last = _history(db, 1)
        against = last[0].canonical if last else ""
        new = deployments.New(by, parameters.name, canonical(parameters), against)
        return deployments.put_in_force(db, new, self._wall_s(), note)

    # Breakers

    def breaker_moved(self, moved: BreakerMoved) -> None:
        """Keep a copy of a breaker's last move. Nobody waits for it."""
        if self._asked - self._done >= WAITING_MOST:
            self.left_out += 1
            return
        self._asked += 1
        at_s = self._wall_s()
        until_s = at_s + moved.for_ns / 1e9 if moved.for_ns else None
        row = (moved.key, moved.state, moved.why, at_s, until_s)
        self._submit(lambda db: _keep_breaker(db, row)).add_done_callback(self._written)

    async def breakers(self) -> list[KeptBreaker]:
        """All that ever moved, the last moved first."""
        return await self.run(
            lambda db: [
                KeptBreaker(*row)
                for row in db.execute(
                    "SELECT key, state, why, at_s, until_s FROM breakers ORDER BY at_s DESC, key"
                )
            ]
        )

    def _written(self, done: Future[None]) -> None:
        self._done += 1
        failed = done.exception() is not None
        self.left_out += failed
        self.moves += not failed

    # The file

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        return self._executor.submit(self._guarded, lambda: self._transaction(work))

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection:
            return work(self._connection)

    def _guarded(self, work: Callable[[], T]) -> T:
        with sqlite.plain_errors(self.path, DatabaseError, "the history of deployments is gone"):
            return work()

    def _open(self) -> sqlite3.Connection:
        return sqlite.opened(self.path, self._prepare)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        schema = sqlite.schema_of(connection)
        if schema is None:
            sqlite.make(connection, _TABLES, SCHEMA)
        elif schema in (1, 2):
            newer = (deployments.FROM_SCHEMA_1 if schema == 1 else "") + _TO_SCHEMA_3
            sqlite.make(connection, newer, SCHEMA)
        elif schema != SCHEMA:
            raise DatabaseError(sqlite.unknown_schema(self.path, schema, SCHEMA))
        (told,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if told != "ok":
            raise sqlite3.DatabaseError(told.replace("\n", " "))


def _history(db: sqlite3.Connection, most: int) -> list[Deployment]:
    rows = db.execute(
        "SELECT id, at_s, name, canonical, sha256, by, note FROM policies ORDER BY id DESC LIMIT ?",
        (most,),
    )
    return [Deployment(*row) for row in rows]


def _keep_breaker(db: sqlite3.Connection, row: tuple[object, ...]) -> None:
    db.execute("INSERT OR REPLACE INTO breakers VALUES (?, ?, ?, ?, ?)", row)
    (count,) = db.execute("SELECT count(*) FROM breakers").fetchone()
    if count > BREAKERS_MOST:  # keys hold names that callers invent
        db.execute(
            "DELETE FROM breakers WHERE key IN (SELECT key FROM breakers"
            " ORDER BY state != 'closed', at_s LIMIT ?)",
            (count - BREAKERS_MOST * 9 // 10,),
        )
