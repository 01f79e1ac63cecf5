"""Answers kept for callers whose model is cut off: a cache in one SQLite file, and one thread that
works on it.

It is bounded in bytes, rows and age, the oldest out first. Nothing waits for a write; a file that
is damaged is moved aside and an empty one made. Of questions only hashes and vectors are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from controller.store import sqlite

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

T = TypeVar("T")
LOGGER = logging.getLogger("twinkeel")

SCHEMA = 1
OVERHEAD_BYTES = 400
"""Of an answer, beside its own and its vector's: keys, index entries, page space."""
ROWS_MOST = 200_000
WAITING_MOST = 2_000
WAITING_BYTES_MOST = 16 * 1024 * 1024
"""Answers that wait to be written; more are left out."""
CANDIDATES_MOST = 2_000
"""The youngest of these are compared by their vectors."""
BUSY_S = 2.0
"""For how long the file is waited for: it is only a cache."""
FLUSH_S = 0.1
"""Answers wait that long for others, to be written together."""
_PRUNE_S = 60.0
PACKED_FROM_BYTES = 512
_FREE_PAGES_MOST = 2
"""Times the pages in use: more are given back to the disk at a start."""
_TABLES = """
CREATE TABLE answers (
    number INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    version TEXT NOT NULL,
    alike BLOB,
    space TEXT,
    vector BLOB,
    body BLOB NOT NULL,
    packed INTEGER NOT NULL,
    confidence INTEGER NOT NULL,
    at_s REAL NOT NULL,
    UNIQUE (key, version)
) STRICT;
CREATE INDEX alikes ON answers (alike) WHERE alike IS NOT NULL;
CREATE INDEX ages ON answers (at_s);
"""
_SIZE = f"length(body) + coalesce(length(vector), 0) + {OVERHEAD_BYTES}"
_COUNT = f"SELECT count(*), coalesce(sum({_SIZE}), 0) FROM answers"


class Kept(NamedTuple):
    """An answer, whole, and how it looked."""

    body: bytes
    age_ns: int
    confidence_permille: int
    version: str
    """Of the model that made it; so everywhere here."""
    similarity: float = 1.0
    """Cosine between the question and the one that it answers; 1: it is the same."""


class New(NamedTuple):
    """An answer to keep."""

    key: bytes
    version: str
    body: bytes
    confidence_permille: int
    at_s: float

    @property
    def size(self) -> int:
        return len(self.body) + OVERHEAD_BYTES


class Vector(NamedTuple):
    """What finds an answer for questions like its own."""

    key: bytes
    version: str
    alike: bytes
    """Equal for questions that may be told apart by nothing but their vectors."""
    values: NDArray[np.float32]
    """Of length one."""


class KeptAnswers:
    """The file, open.

    Args:
        path: made if it does not exist; its folder too.
        bytes_most: of answers and vectors, with ``OVERHEAD_BYTES`` for each.
        s_most: how long an answer is kept.
        on_trouble: is told what is wrong with the file, from any thread.
        wall_s: time of day.
    """

    def __init__(
        self,
        path: Path,
        *,
        bytes_most: int,
        s_most: float,
        rows_most: int = ROWS_MOST,
        on_trouble: Callable[[str], object] = LOGGER.warning,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.left_out = 0
        """Answers that were not kept: too many waited, or the file failed."""
        self._bytes_most = bytes_most
        self._s_most = s_most
        self._rows_most = rows_most
        self._on_trouble = on_trouble
        self._wall_s = wall_s
        self._bytes = self._rows = 0
        self._pruned_s = 0.0
        self._lock = threading.Lock()
        self._waiting: deque[New] = deque()
        self._waiting_bytes = 0
        self._asked = False
        """The thread was told to write what waits."""
        self._connection: sqlite3.Connection | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._closed = False
        self._stale = False
        """What is kept has to be counted again."""
        self._submit(lambda db: None, None).result()

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def kept_bytes(self) -> int:
        """Of what is kept, as the bound counts them."""
        return self._bytes

    # ---- from the loop ----

    def keep(self, new: New) -> None:
        """Keep an answer; an older one to the same question goes. Nobody waits for it."""
        with self._lock:
            if (
                len(self._waiting) >= WAITING_MOST
                or self._waiting_bytes + new.size > WAITING_BYTES_MOST
                or new.size > self._bytes_most
            ):
                self.left_out += 1
                return
            self._waiting.append(new)
            self._waiting_bytes += new.size
            if self._asked:
                return
            self._asked = True
        asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    async def find(self, key: bytes, versions: Collection[str]) -> Kept | None:
        """The youngest answer to the same question by one of these versions."""
        work = self._submit(lambda db: self._find(db, key, versions), None)
        return await asyncio.wrap_future(work)

    async def has_alike(self, alike: bytes, versions: Collection[str], space: str) -> bool:
        """Whether ``nearest`` has anything to compare."""
        work = self._submit(lambda db: self._has_alike(db, alike, versions, space), False)
        return await asyncio.wrap_future(work)

    async def nearest(
        self,
        alike: bytes,
        versions: Collection[str],
        space: str,
        vector: NDArray[np.float32],
        least: float,
    ) -> Kept | None:
        """Of the answers to questions like it the one whose vector is nearest, if their cosine is
        at least that. Vectors have length one."""
        work = self._submit(
            lambda db: self._nearest(db, alike, versions, space, vector, least), None
        )
        return await asyncio.wrap_future(work)

    async def lacking(self, keys: Sequence[tuple[bytes, str]], space: str) -> list[bool]:
        """Which of these answers (key, version) are kept, without a vector of this space."""
        work = self._submit(lambda db: [_lacks(db, *each, space) for each in keys], [False])
        found = await asyncio.wrap_future(work)
        return found if len(found) == len(keys) else [False] * len(keys)

    async def put_vectors(self, vectors: Sequence[Vector], space: str) -> None:
        """Those of answers that are kept no more are passed over."""
        rows = [
            (each.alike, space, each.values.astype("<f4").tobytes(), each.key, each.version)
            for each in vectors
        ]
        await asyncio.wrap_future(self._submit(lambda db: self._put_vectors(db, rows), None))

    def _flush(self) -> None:
        if not self._closed:
            self._submit(lambda db: None, None)

    def close(self) -> None:
        """Write what waits and close the file."""
        self._closed = True
        self._submit(lambda db: None, None).result()
        self._executor.submit(self._shut).result()
        self._executor.shutdown()

    # ---- in the thread ----

    def _submit(self, work: Callable[[sqlite3.Connection], T], failed: T) -> Future[T]:
        return self._executor.submit(self._guarded, work, failed)

    def _guarded(self, work: Callable[[sqlite3.Connection], T], failed: T) -> T:
        """Do it as one transaction, after what waits; the file's troubles end here."""
        try:
            connection = self._connection or self._opened()
            try:
                with connection:
                    self._write(connection)
            except sqlite3.OperationalError as error:  # such as a full disk: it can still be read
                self._stale = True
                self._on_trouble(f"{self.path}: {error}: no answer is kept meanwhile")
            with connection:
                return work(connection)
        except (sqlite3.OperationalError, OSError) as error:
            self._stale = True
            self._on_trouble(f"{self.path}: {error}: no answer is kept or found meanwhile")
        except (sqlite3.Error, zlib.error) as error:
            self._put_aside(str(error))
        return failed

    def _write(self, db: sqlite3.Connection) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
            self._asked = False
        if self._stale:
            self._count(db)
        if not waiting:
            if self._wall_s() - self._pruned_s > _PRUNE_S:
                self._prune(db)
            return
        try:
            for new in waiting:
                self._keep(db, new)
            self._prune(db)
        except sqlite3.Error:
            self.left_out += len(waiting)
            raise

    def _keep(self, db: sqlite3.Connection, new: New) -> None:
        where = (new.key, new.version)
        packed = len(new.body) >= PACKED_FROM_BYTES
        body = zlib.compress(new.body, 1) if packed else new.body
        before = db.execute(
            f"SELECT alike, space, vector, {_SIZE} FROM answers WHERE key = ? AND version = ?",
            where,
        ).fetchone()
        *found, size = before or (None, None, None, 0)
        if before:
            db.execute("DELETE FROM answers WHERE key = ? AND version = ?", where)
            self._rows -= 1
        db.execute(
            "INSERT INTO answers"
            " (key, version, alike, space, vector, body, packed, confidence, at_s)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*where, *found, body, packed, new.confidence_permille, new.at_s),
        )
        self._rows += 1
        self._bytes += len(body) + OVERHEAD_BYTES + len(found[2] or b"") - size

    def _put_vectors(
        self, db: sqlite3.Connection, rows: list[tuple[bytes, str, bytes, bytes, str]]
    ) -> None:
        for row in rows:
            before = db.execute(
                "SELECT coalesce(length(vector), 0) FROM answers WHERE key = ? AND version = ?",
                row[3:],
            ).fetchone()
            if before:  # else it is not kept any more
                db.execute(
                    "UPDATE answers SET alike = ?, space = ?, vector = ?"
                    " WHERE key = ? AND version = ?",
                    row,
                )
                self._bytes += len(row[2]) - before[0]
        self._prune(db)

    def _prune(self, db: sqlite3.Connection) -> None:
        """Drop what is too old, then the oldest of what is too much."""
        now_s = self._wall_s()
        if now_s - self._pruned_s > _PRUNE_S:
            self._pruned_s = now_s
            old = (now_s - self._s_most,)
            rows, size = db.execute(f"{_COUNT} WHERE at_s < ?", old).fetchone()
            db.execute("DELETE FROM answers WHERE at_s < ?", old)
            self._rows -= rows
            self._bytes -= size
        if self._bytes <= self._bytes_most and self._rows <= self._rows_most:
            return
        last = 0
        cursor = db.execute(f"SELECT number, {_SIZE} FROM answers ORDER BY number")
        for number, size in cursor:
            last = number
            self._bytes -= size
            self._rows -= 1
            if self._bytes <= self._bytes_most and self._rows <= self._rows_most:
                break
        cursor.close()
        db.execute("DELETE FROM answers WHERE number <= ?", (last,))

    def _count(self, db: sqlite3.Connection) -> None:
        self._rows, self._bytes = db.execute(_COUNT).fetchone()
        self._stale = False

    def _find(self, db: sqlite3.Connection, key: bytes, versions: Collection[str]) -> Kept | None:
        now_s = self._wall_s()
        row = db.execute(
            "SELECT body, packed, at_s, confidence, version FROM answers"
            f" WHERE key = ? AND {_which(versions)} AND at_s >= ? ORDER BY number DESC LIMIT 1",
            (key, *versions, now_s - self._s_most),
        ).fetchone()
        return None if row is None else _kept(now_s, *row)

    def _has_alike(
        self, db: sqlite3.Connection, alike: bytes, versions: Collection[str], space: str
    ) -> bool:
        row = db.execute(
            f"SELECT 1 FROM answers WHERE alike = ? AND {_which(versions)} AND at_s >= ?"
            " AND space = ? LIMIT 1",
            (alike, *versions, self._wall_s() - self._s_most, space),
        ).fetchone()
        return row is not None

    def _nearest(
        self,
        db: sqlite3.Connection,
        alike: bytes,
        versions: Collection[str],
        space: str,
        vector: NDArray[np.float32],
        least: float,
    ) -> Kept | None:
        now_s = self._wall_s()
        rows = db.execute(
            f"SELECT number, vector FROM answers WHERE alike = ? AND {_which(versions)}"
            " AND at_s >= ? AND space = ? AND length(vector) = ? ORDER BY number DESC LIMIT ?",
            (alike, *versions, now_s - self._s_most, space, 4 * len(vector), CANDIDATES_MOST),
        ).fetchall()
        if not rows:
            return None
        kept = np.frombuffer(b"".join(each[1] for each in rows), "<f4").reshape(len(rows), -1)
        cosines = kept @ vector
        best = int(np.argmax(cosines))  # the youngest of those that are equally near
        similarity = float(cosines[best])
        if not similarity >= least:
            return None
        row = db.execute(
            "SELECT body, packed, at_s, confidence, version FROM answers WHERE number = ?",
            rows[best][:1],
        ).fetchone()
        return _kept(now_s, *row)._replace(similarity=min(similarity, 1.0))

    # ---- the file ----

    def _opened(self) -> sqlite3.Connection:
        try:
            self._connection = self._connect()
        except sqlite3.OperationalError:
            raise
        except sqlite3.Error as error:
            self._put_aside(str(error))
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        return sqlite.opened(self.path, self._prepare, busy_s=BUSY_S, any_thread=True)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        schema = sqlite.schema_of(connection)
        if schema is None:
            sqlite.make(connection, _TABLES, SCHEMA)
        elif schema != SCHEMA:
            raise sqlite3.DatabaseError(f"schema {schema} is not known, this version has {SCHEMA}")
        with connection:
            self._pruned_s = 0.0
            self._count(connection)
            self._prune(connection)
        self._shrink(connection)

    def _shrink(self, connection: sqlite3.Connection) -> None:
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        if free > _FREE_PAGES_MOST * (pages - free):
            connection.execute("VACUUM")

    def _put_aside(self, why: str) -> None:
        """The file cannot be used, and is only a cache: the next one begins empty."""
        self._shut()
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with contextlib.suppress(OSError):
            for ending in ("", "-wal", "-shm"):
                file = Path(f"{self.path}{ending}")
                if file.exists():
                    file.replace(f"{aside}{ending}")
        self._rows = self._bytes = 0
        self._on_trouble(f"{self.path}: {why}: moved to {aside.name}, and an empty one is made")

    def _shut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _which(versions: Collection[str]) -> str:
    return f"version IN ({', '.join('?' * len(versions))})"


def _kept(
    now_s: float, body: bytes, packed: int, at_s: float, confidence: int, version: str
) -> Kept:
    if packed:
        body = zlib.decompress(body)
    return Kept(body, max(0, round((now_s - at_s) * 1e9)), confidence, version)


def _lacks(db: sqlite3.Connection, key: bytes, version: str, space: str) -> bool:
    row = db.execute(
        "SELECT space FROM answers WHERE key = ? AND version = ?", (key, version)
    ).fetchone()
    return row is not None and row[0] != space
