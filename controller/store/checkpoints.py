"""Where the finished steps of chains are kept: in an SQLite file, or in Redis.

A step is finished when ``save`` has returned: what it saved is then committed, and a process that
is killed afterwards finds it again. One named step of a chain has one checkpoint: whoever saves it
a second time is told of the first, so two that ran the same step agree on whose answer counts. A
step without a name is never recognised; each one's checkpoint replaces the one before.

Both stores keep the same promises and pass the same tests. Methods block, and are for one thread
at a time.
"""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from controller.store import sqlite

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

SCHEMA = 1
KEEP_S = 7 * 86_400.0
KEEP_BYTES = 1024 * 1024 * 1024
ROW_BYTES = 512
"""What a checkpoint counts beside its answer."""
PRUNE_S = 60.0
CONNECT_S = 0.25
COMMAND_S = 1.0

_TABLES = """
CREATE TABLE checkpoints (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    chain TEXT NOT NULL,
    step TEXT NOT NULL,
    request TEXT NOT NULL,
    status INTEGER NOT NULL,
    content_type TEXT NOT NULL,
    at_s REAL NOT NULL,
    ends_s REAL NOT NULL,
    line TEXT NOT NULL,
    answer BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX checkpoints_step ON checkpoints (owner, chain, step);
CREATE INDEX checkpoints_at ON checkpoints (at_s);
"""


class CheckpointsError(Exception):
    """The store cannot be used, or did not answer: which, why, and what to do about it."""


class NewCheckpoint(NamedTuple):
    """A chain's step that is finished."""

    owner: str
    """Whose chain it is: names of chains are the callers', and two may use the same."""
    chain: str
    step: str
    request: str
    """Its ``x-request-id``, or what else it is found by in logs."""
    answer: bytes
    """What its caller got."""
    status: int = 200
    content_type: str = "application/json"
    ends_s: float = 0.0
    """Time of day, seconds since 1970, at which the chain's budget ends; 0: not known."""
    line: str = ""


class Checkpoint(NamedTuple):
    """The same, kept."""

    id: str
    owner: str
    chain: str
    step: str
    request: str
    answer: bytes
    status: int
    content_type: str
    at_s: float
    """Time of day when it was saved."""
    ends_s: float
    line: str


class Checkpoints(Protocol):
    """A store of checkpoints. All methods raise CheckpointsError where it cannot do what is asked;
    a ``save`` that raised may have been done all the same, and may be asked for again."""

    def save(self, new: NewCheckpoint) -> str:
        """Keep a finished step; its checkpoint's id once that is committed. Of a named step that
        is kept already, the first stays as it is, and its id is given."""
        ...

    def load(self, checkpoint: str, owner: str) -> Checkpoint | None:
        """The checkpoint of this id, if it is ``owner``'s and still kept."""
        ...

    def chain(self, owner: str, chain: str) -> list[Checkpoint]:
        """What is kept of a chain, in the order of saving, without the answers (they are empty)."""
        ...

    def undo(self, checkpoint: str, owner: str) -> int:
        """Forget what its chain saved after this checkpoint, for who goes back to it; how many."""
        ...

    def forget(self, owner: str, chain: str) -> None:
        """Forget a whole chain."""
        ...

    def close(self) -> None: ...


def open_checkpoints(
    where: str | Path, *, keep_s: float = KEEP_S, wall_s: Callable[[], float] = time.time
) -> Checkpoints:
    """The store at a ``redis://``, ``rediss://`` or ``unix://`` URL; else in the file there."""
    if isinstance(where, str) and where.startswith(("redis://", "rediss://", "unix://")):
        return RedisCheckpoints(where, keep_s=keep_s, wall_s=wall_s)
    return SqliteCheckpoints(Path(where), keep_s=keep_s, wall_s=wall_s)


# ---- SQLite ----

_COLUMNS = "id, owner, chain, step, request, answer, status, content_type, at_s, ends_s, line"
_OVERVIEW = _COLUMNS.replace("answer", "x''")


class SqliteCheckpoints:
    """Checkpoints in an SQLite file. Several processes may use one.

    A commit is on the disk before ``save`` returns (write-ahead log, ``synchronous = FULL``), so it
    outlives the machine's loss of power, too.

    Args:
        path: made with its folder if it does not exist.
        keep_s: older ones are dropped.
        keep_bytes: of all answers, each with 512 B more; past it the oldest are dropped.

    Raises:
        CheckpointsError: the file is damaged, is none of ours, or of an unknown schema.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_s: float = KEEP_S,
        keep_bytes: int = KEEP_BYTES,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._wall_s = wall_s
        self._path = path
        with self._plain_errors():
            self._db = _opened(path)
            try:
                with self._db:
                    self._prune()
            except BaseException:
                self._db.close()
                raise

    def save(self, new: NewCheckpoint) -> str:
        now_s = self._wall_s()
        place = (new.owner, new.chain, new.step)
        fields = (
            new.request, new.answer, new.status, new.content_type, now_s, new.ends_s, new.line
        )  # fmt: skip
        with self._plain_errors(), self._db as db:
            # The first statement writes, so nobody else does between it and the commit.
            gone = db.execute(
                "DELETE FROM checkpoints WHERE owner = ? AND chain = ? AND step = ?"
                " AND (step = '' OR at_s < ?)",
                (*place, now_s - self._keep_s),
            )
            gone.close()
            db.execute(
                f"INSERT INTO checkpoints ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (owner, chain, step) DO NOTHING",
                (_new_id(new.owner, new.chain), *place, *fields),
            )
            (saved,) = db.execute(
                "SELECT id FROM checkpoints WHERE owner = ? AND chain = ? AND step = ?", place
            ).fetchone()
            self._kept_bytes += len(new.answer) + ROW_BYTES
            if self._kept_bytes > self._keep_bytes or now_s - self._pruned_s > PRUNE_S:
                self._prune()
        return str(saved)

    def load(self, checkpoint: str, owner: str) -> Checkpoint | None:
        with self._plain_errors():
            row = self._db.execute(
                f"SELECT {_COLUMNS} FROM checkpoints WHERE id = ? AND owner = ? AND at_s >= ?",
                (checkpoint, owner, self._wall_s() - self._keep_s),
            ).fetchone()
        return None if row is None else Checkpoint(*row)

    def chain(self, owner: str, chain: str) -> list[Checkpoint]:
        with self._plain_errors():
            rows = self._db.execute(
                f"SELECT {_OVERVIEW} FROM checkpoints WHERE owner = ? AND chain = ? AND at_s >= ?"
                " ORDER BY number",
                (owner, chain, self._wall_s() - self._keep_s),
            ).fetchall()
        return [Checkpoint(*row) for row in rows]

    def undo(self, checkpoint: str, owner: str) -> int:
        with self._plain_errors(), self._db as db:
            return db.execute(
                "DELETE FROM checkpoints AS later WHERE EXISTS (SELECT 1 FROM checkpoints AS one"
                " WHERE one.id = ? AND one.owner = ? AND later.owner = one.owner"
                " AND later.chain = one.chain AND later.number > one.number)",
                (checkpoint, owner),
            ).rowcount

    def forget(self, owner: str, chain: str) -> None:
        with self._plain_errors(), self._db as db:
            db.execute("DELETE FROM checkpoints WHERE owner = ? AND chain = ?", (owner, chain))

    def close(self) -> None:
        self._db.close()

    def _prune(self) -> None:
        """Drop what is too old, then the oldest of what is too much, a tenth more than need be."""
        db = self._db
        self._pruned_s = self._wall_s()
        db.execute("DELETE FROM checkpoints WHERE at_s < ?", (self._pruned_s - self._keep_s,))
        sizes = f"length(answer) + {ROW_BYTES}"
        (kept,) = db.execute(f"SELECT coalesce(sum({sizes}), 0) FROM checkpoints").fetchone()
        if kept > self._keep_bytes:
            excess = kept - self._keep_bytes * 9 // 10
            cursor = db.execute(f"SELECT number, {sizes} FROM checkpoints ORDER BY number")
            last = 0
            for last, size in cursor:  # noqa: B007 - how far it came is what is wanted
                kept -= size
                excess -= size
                if excess <= 0:
                    break
            cursor.close()
            db.execute("DELETE FROM checkpoints WHERE number <= ?", (last,))
        self._kept_bytes = int(kept)

    def _plain_errors(self) -> AbstractContextManager[None]:
        lost = "the chains it held begin anew"
        return sqlite.plain_errors(self._path, CheckpointsError, lost)


def _opened(path: Path) -> sqlite3.Connection:
    try:
        return sqlite.opened(path, partial(_prepare, path), synchronous="FULL", any_thread=True)
    except OSError as error:
        raise CheckpointsError(
            f"{path}: {error.strerror}; name a file that can be written"
        ) from error


def _prepare(path: Path, db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")  # two processes may make the same file
    schema = sqlite.schema_of(db)
    if schema is None:
        for statement in f"{_TABLES} PRAGMA user_version = {SCHEMA}".split(";"):
            db.execute(statement)
    elif schema != SCHEMA:
        raise CheckpointsError(sqlite.unknown_schema(path, schema, SCHEMA, "name another file"))
    db.commit()


# ---- Redis ----

_SAVE = """
local step, new, oldest = 's:' .. ARGV[1], ARGV[2], tonumber(ARGV[3])
local kept = redis.call('HGET', KEYS[1], step)
if kept then
    local id = string.sub(kept, 1, #new)
    if id == new or (ARGV[1] ~= '' and tonumber(string.sub(kept, #new + 1)) >= oldest) then
        return id
    end
    local order = redis.call('HGET', KEYS[1], 'order') or ''
    local at = string.find(order, id, 1, true)
    if at then
        order = string.sub(order, 1, at - 1) .. string.sub(order, at + #id)
        redis.call('HSET', KEYS[1], 'order', order)
    end
    redis.call('HDEL', KEYS[1], 'm:' .. id, 'a:' .. id)
end
local order = (redis.call('HGET', KEYS[1], 'order') or '') .. new
redis.call('HSET', KEYS[1], step, new .. ARGV[4], 'm:' .. new, ARGV[5], 'a:' .. new, ARGV[6],
    'order', order)
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return new
"""
_CHAIN = """
local order, size, rows = redis.call('HGET', KEYS[1], 'order') or '', tonumber(ARGV[1]), {}
for at = 1, #order, size do
    local id = string.sub(order, at, at + size - 1)
    rows[#rows + 1] = id
    rows[#rows + 1] = redis.call('HGET', KEYS[1], 'm:' .. id) or ''
end
return rows
"""
_UNDO = """
local order = redis.call('HGET', KEYS[1], 'order') or ''
local size = #ARGV[1]
local at = string.find(order, ARGV[1], 1, true)
if not at then return 0 end
local gone = {}
for later = at + size, #order, size do
    gone[string.sub(order, later, later + size - 1)] = true
end
local count = 0
for id in pairs(gone) do
    redis.call('HDEL', KEYS[1], 'm:' .. id, 'a:' .. id)
    count = count + 1
end
local all = redis.call('HGETALL', KEYS[1])
for place = 1, #all, 2 do
    if string.sub(all[place], 1, 2) == 's:' and gone[string.sub(all[place + 1], 1, size)] then
        redis.call('HDEL', KEYS[1], all[place])
    end
end
redis.call('HSET', KEYS[1], 'order', string.sub(order, 1, at + size - 1))
return count
"""


class RedisCheckpoints:
    """Checkpoints in Redis, for several controllers or hosts.

    All of a chain is one hash, whose key is a hash of owner and chain, and which is gone ``keep_s``
    after its last step. ``save`` is one script, so it is done wholly or not at all, and at once.

    What has been saved is as safe as the server keeps it: it outlives the server's own kill with
    ``appendonly yes``, and the loss of its machine with ``appendfsync always`` beside it (with
    ``everysec`` the last second may be lost; without ``appendonly`` all since the last dump).
    ``maxmemory-policy`` must be ``noeviction``: the server's memory is the bound on size.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://`` or ``unix://``.

    Raises:
        CheckpointsError: the ``redis`` package is not installed, or the URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        keep_s: float = KEEP_S,
        connect_s: float = CONNECT_S,
        command_s: float = COMMAND_S,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._keep_s = keep_s
        self._wall_s = wall_s
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise CheckpointsError(
                "Redis needs the package redis: pip install 'twinkeel[redis]'"
            ) from error
        # A connection that has gone stale is opened again once; a server that is slow is not asked
        # twice. A script that is sent twice does its work once.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        self._errors = (redis.RedisError, OSError)
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_connect_timeout=connect_s, socket_timeout=command_s, retry=retry
            )
        except ValueError as error:
            raise CheckpointsError(
                f"{without_password(url)}: {no_url(url, error)}; give redis://host:port/db"
            ) from None  # it may quote the password
        self._name = without_password(url)
        self._save = self._redis.register_script(_SAVE)
        self._chain = self._redis.register_script(_CHAIN)
        self._undo = self._redis.register_script(_UNDO)

    def save(self, new: NewCheckpoint) -> str:
        now_s = self._wall_s()
        checkpoint = _new_id(new.owner, new.chain)
        meta = msgspec.msgpack.encode(
            Checkpoint(
                checkpoint, new.owner, new.chain, new.step, new.request, b"", new.status,
                new.content_type, now_s, new.ends_s, new.line,
            )
        )  # fmt: skip
        arguments = (
            new.step, checkpoint, repr(now_s - self._keep_s), repr(now_s), meta, new.answer,
            max(1, round(self._keep_s * 1000)),
        )  # fmt: skip
        with self._plain_errors():
            saved: bytes = self._save(keys=[_key(checkpoint)], args=arguments)
        return saved.decode()

    def load(self, checkpoint: str, owner: str) -> Checkpoint | None:
        with self._plain_errors():
            meta, answer = self._redis.hmget(
                _key(checkpoint), [f"m:{checkpoint}", f"a:{checkpoint}"]
            )
        if meta is None or answer is None:
            return None
        kept = self._read(meta)
        return kept._replace(answer=answer) if kept.owner == owner and self._young(kept) else None

    def chain(self, owner: str, chain: str) -> list[Checkpoint]:
        some_id = _new_id(owner, chain)
        with self._plain_errors():
            rows = self._chain(keys=[_key(some_id)], args=[len(some_id)])
        kept = [self._read(meta) for meta in rows[1::2] if meta]
        return [
            one for one in kept if (one.owner, one.chain) == (owner, chain) and self._young(one)
        ]

    def undo(self, checkpoint: str, owner: str) -> int:
        if self.load(checkpoint, owner) is None:
            return 0
        with self._plain_errors():
            return int(self._undo(keys=[_key(checkpoint)], args=[checkpoint]))

    def forget(self, owner: str, chain: str) -> None:
        with self._plain_errors():
            self._redis.delete(_key(_new_id(owner, chain)))

    def close(self) -> None:
        with self._plain_errors():
            self._redis.close()

    def _young(self, kept: Checkpoint) -> bool:
        return kept.at_s >= self._wall_s() - self._keep_s

    def _read(self, meta: bytes) -> Checkpoint:
        try:
            return msgspec.msgpack.decode(meta, type=Checkpoint)
        except msgspec.DecodeError as error:
            raise CheckpointsError(
                f"{self._name}: a checkpoint that another version wrote, or that is damaged"
                f" ({error}): use another database of this Redis"
            ) from error

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise CheckpointsError(
                f"{self._name}: {error or type(error).__name__}; see that Redis runs there and can"
                " be reached, and has memory left"
            ) from error


def _new_id(owner: str, chain: str) -> str:
    """A checkpoint's id; that it begins with its chain's hash is how Redis finds it."""
    names = f"{len(owner)}:{owner}{chain}".encode(errors="surrogatepass")
    return f"cp-{blake2b(names, digest_size=8).hexdigest()}{secrets.token_hex(8)}"


def _key(checkpoint: str) -> str:
    return f"twinkeel:chain:{checkpoint[3:19]}"


def without_password(url: str) -> str:
    """The address, as it can be shown: without user and password, wherever they stand."""
    scheme, _, rest = url.partition("://")
    address = rest.rpartition("@")[2]
    plain = not any(char in rest[: len(rest) - len(address)] for char in "/?#")
    address = address if plain else ""  # nobody can tell where a password ends
    return f"{scheme}://{address.partition('?')[0].partition('#')[0]}"


def no_url(url: str, error: ValueError) -> str:
    """Why it is no URL. What the error quotes may be a part of the password."""
    if "@" not in url and "?" not in url:
        return str(error)
    return (
        "see its port and options, and percent-encode what user and password have of / ? # @ : [ ]"
    )
