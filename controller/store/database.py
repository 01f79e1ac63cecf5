"""What must outlive a controller beside its log: deployments, breakers, checkpoints of chains.

One SQLite file and one thread that works on it. Everything that is committed survives the process;
a machine that loses its power may lose the last moments, but the file stays whole.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from controller.store import deployments
from policy.parameters import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from policy.decisions import BreakerMoved
    from policy.parameters import Parameters

T = TypeVar("T")

SCHEMA = 2
KEEP_S = 7 * 86_400.0
KEEP_BYTES = 1024 * 1024 * 1024
BREAKERS_MOST = 10_000
WAITING_MOST = 1_000
"""Writes that nobody waits for, waiting themselves; more are left out."""
_PRUNE_S = 60.0

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
CREATE TABLE checkpoints (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    chain TEXT NOT NULL,
    step TEXT NOT NULL,
    request TEXT NOT NULL,
    answer BLOB NOT NULL,
    status INTEGER NOT NULL,
    content_type TEXT NOT NULL,
    at_s REAL NOT NULL
) STRICT;
"""


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


class Checkpoint(NamedTuple):
    """A chain's step with the answer that its caller got."""

    id: str
    owner: str
    chain: str
    step: str
    request: str
    """Its ``x-request-id``."""
    answer: bytes
    status: int
    content_type: str
    at_s: float


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
        keep_s: float = KEEP_S,
        keep_bytes: int = KEEP_BYTES,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.moves = self.left_out = 0
        """Breaker moves that were written, and that were not: too many waited, or the file
        failed."""
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._wall_s = wall_s
        self._asked = self._done = 0
        self._pruned_s = wall_s()
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

    def record_policy(self, parameters: Parameters, source: str) -> None:
        """As ``deploy``, without waiting for anything but the disk."""
        self._submit(lambda db: self._deploy(db, parameters, source, "")).result()

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

    # Checkpoints

    async def save_checkpoint(
        self,
        chain: str,
        step: str,
        request: str,
        answer: bytes,
        status: int = 200,
        content_type: str = "application/json",
        owner: str = "",
    ) -> str:
        """Keep the answer of a chain's step; the checkpoint's id, which is new each time.

        Args:
            owner: whose chain it is: names of chains are the callers', and two may use the same.
        """
        at_s = self._wall_s()
        checkpoint = f"cp-{secrets.token_hex(12)}"
        row = (checkpoint, owner, chain, step, request, answer, status, content_type, at_s)
        await self.run(lambda db: self._save(db, row))
        return checkpoint

    async def load_checkpoint(self, checkpoint: str, owner: str = "") -> Checkpoint | None:
        """The checkpoint of this id, if it is ``owner``'s and still kept."""

        def find(db: sqlite3.Connection) -> Checkpoint | None:
            row = db.execute(
                "SELECT id, owner, chain, step, request, answer, status, content_type, at_s"
                " FROM checkpoints WHERE id = ? AND owner = ? AND at_s >= ?",
                (checkpoint, owner, self._wall_s() - self._keep_s),
            ).fetchone()
            return None if row is None else Checkpoint(*row)

        return await self.run(find)

    def _save(self, db: sqlite3.Connection, row: tuple[object, ...]) -> None:
        db.execute(
            "INSERT INTO checkpoints"
            " (id, owner, chain, step, request, answer, status, content_type, at_s)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
        self._kept_bytes += len(row[5])  # type: ignore[arg-type]
        if self._kept_bytes > self._keep_bytes or self._wall_s() - self._pruned_s > _PRUNE_S:
            self._prune(db)

    def _prune(self, db: sqlite3.Connection) -> None:
        """Drop what is too old, then the oldest of what is too much, a tenth more than need be."""
        self._pruned_s = self._wall_s()
        db.execute("DELETE FROM checkpoints WHERE at_s < ?", (self._pruned_s - self._keep_s,))
        kept_bytes = _checkpoint_bytes(db)
        if kept_bytes > self._keep_bytes:
            excess = kept_bytes - self._keep_bytes * 9 // 10
            cursor = db.execute("SELECT number, length(answer) FROM checkpoints ORDER BY number")
            last = 0
            for number, size in cursor:
                last = number
                excess -= size
                kept_bytes -= size
                if excess <= 0:
                    break
            cursor.close()
            db.execute("DELETE FROM checkpoints WHERE number <= ?", (last,))
        self._kept_bytes = kept_bytes

    # The file

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        return self._executor.submit(self._guarded, lambda: self._transaction(work))

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection:
            return work(self._connection)

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except sqlite3.Error as error:
            raise DatabaseError(
                f"{self.path}: {error}; if it is damaged, move it away: an empty one is made, and"
                " what it held (deployments, checkpoints) is gone"
            ) from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(0o600)
        self.path.chmod(0o600)  # it holds answers; the files beside it get the same mode
        connection = sqlite3.connect(self.path, timeout=10.0)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            self._check(connection)
            self._kept_bytes = _checkpoint_bytes(connection)
            with connection:
                self._prune(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        (schema,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        wanted = _TABLES if schema == 0 and not tables else ""
        if schema == 1:
            wanted = deployments.FROM_SCHEMA_1
        if wanted:
            with connection:
                connection.executescript(f"BEGIN; {wanted} PRAGMA user_version = {SCHEMA}; COMMIT;")
        elif schema != SCHEMA:
            raise DatabaseError(
                f"{self.path}: schema {schema} is not known, this version reads schema {SCHEMA}:"
                " use the version that wrote it, or move the file away"
            )


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


def _checkpoint_bytes(db: sqlite3.Connection) -> int:
    (size,) = db.execute("SELECT coalesce(sum(length(answer)), 0) FROM checkpoints").fetchone()
    return int(size)
