"""What each step of a chain was, in a SQLite file of its own: so a chain can be looked at.

Steps are written in batches by a thread, and nobody waits for it but who looks at a chain: what was
added before is seen. No text of a prompt or an answer is in it. Where the process is killed, the
last quarter of a second is lost.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec

from controller.store import sqlite
from controller.store.database import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future
    from pathlib import Path

T = TypeVar("T")
Scalar = str | int | float | bool | None

FILE = "chains.sqlite"
OVER = "chain_budget"
"""Why a request was degraded whose chain's budget had ended."""
LATE = "late"
"""Outcome of a client's own step that came back after that."""
SCHEMA = 1
KEEP_S = 7 * 86_400.0
ROWS_MOST = 200_000
BYTES_MOST = 256 * 1024 * 1024
WAITING_MOST = 10_000
"""Steps that wait to be written; more are left out."""
WRITE_S = 0.25
"""How often those that wait are written."""
STEPS_SHOWN = 1_000
"""Of a chain, the last ones."""
CHAINS_SHOWN = 50
LOOKED_AT = 5_000
"""Steps, the youngest, in which the youngest chains are looked for."""
FORGOTTEN_S = 60.0
"""After the end of its budget a chain is forgotten, as policies are shipped: then a step of that
name begins another chain, unless it resumes one."""
APART_S = 600.0
"""The same after a step whose chain has no budget."""
_PRUNE_S = 60.0

_TABLES = """
CREATE TABLE steps (
    number INTEGER PRIMARY KEY,
    chain TEXT NOT NULL,
    user TEXT NOT NULL,
    ended_s REAL NOT NULL,
    document BLOB NOT NULL
) STRICT;
CREATE INDEX steps_of_chain ON steps (chain, user);
"""


class ChainStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step that is over. Times of day are seconds since 1970; None: not known."""

    user: str
    """With its tenant; so everywhere here."""
    chain: str
    step: str
    request: str
    """Its ``x-request-id``; empty: the client's own step."""
    began_s: float
    ended_s: float
    outcome: str
    """Of a request its outcome; of the client's own step done, failed or late."""
    line: str = ""
    trace_id: str = ""
    budget_s: float | None = None
    """Of its chain, as it was planned."""
    left_s: float | None = None
    """Of it, when this step ended."""
    resumed: bool = False
    """It asked to go on after a checkpoint."""
    why: str = ""
    """The reason of its outcome, or how it was degraded."""
    model: str = ""
    tier: str = ""
    replica: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    gateway_s: float | None = None
    queue_s: float | None = None
    schedule_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    network_s: float | None = None
    checkpoint: str = ""
    confidence: float | None = None
    """0 to 1."""
    verification: str = ""
    external: bool = False
    """The client's own: it told of it."""
    attributes: dict[str, Scalar] = {}


class StepView(msgspec.Struct, frozen=True):
    """A step, as it is shown: times in seconds since the chain's first step began."""

    step: str
    request: str
    began_s: float
    ended_s: float
    outcome: str
    why: str
    model: str
    tier: str
    replica: str
    prompt_tokens: int | None
    output_tokens: int | None
    gateway_s: float | None
    queue_s: float | None
    schedule_s: float | None
    prefill_s: float | None
    decode_s: float | None
    network_s: float | None
    checkpoint: str
    confidence: float | None
    verification: str
    external: bool
    attributes: dict[str, Scalar]


class ChainView(msgspec.Struct, frozen=True):
    """A chain, with its steps in the order in which they began."""

    chain: str
    user: str
    line: str
    trace_id: str
    budget_s: float | None
    left_s: float | None
    """Of the budget, when its last step ended."""
    over: bool
    """Its budget has ended by now, whether its last step came or not."""
    partial: bool
    """Some of its steps were ended by the budget, or came back late."""
    steps: tuple[StepView, ...]


class ChainLine(msgspec.Struct, frozen=True):
    """A chain, in a list."""

    chain: str
    user: str
    line: str
    steps: int
    age_s: float
    """Since its first step began."""
    over: bool


class ChainList(msgspec.Struct, frozen=True):
    """Chains, as the admin API lists them."""

    chains: list[ChainLine]


class StepStore:
    """The file, open.

    Args:
        path: made if it does not exist; its folder too.
        on_trouble: is told, in the file's thread, why steps could not be written.
        wall_s: time of day.

    Raises:
        DatabaseError: the file is damaged, is none of ours, or of an unknown schema.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_trouble: Callable[[str], object] = lambda text: None,
        keep_s: float = KEEP_S,
        rows_most: int = ROWS_MOST,
        bytes_most: int = BYTES_MOST,
        waiting_most: int = WAITING_MOST,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.written = self.failed = self.dropped = 0
        """Steps: in the file; that it did not take; for which there was no room in the queue."""
        self._on_trouble = on_trouble
        self._keep_s, self._rows_most, self._bytes_most = keep_s, rows_most, bytes_most
        self._waiting_most = waiting_most
        self._wall_s = wall_s
        self._waiting: deque[ChainStep] = deque()
        self._writing: Future[None] | None = None
        self._pruned_s = wall_s()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="chains")
        try:
            self._connection = self._executor.submit(self._guarded, self._open).result()
        except BaseException:
            self._executor.shutdown()
            raise

    def add(self, step: ChainStep) -> None:
        """Keep a step. Nobody waits for it."""
        if len(self._waiting) >= self._waiting_most:
            self.dropped += 1
        else:
            self._waiting.append(step)

    def flush(self) -> None:
        """Have what waits written, unless a batch is being written."""
        if self._waiting and (self._writing is None or self._writing.done()):
            self._writing = self._submit()

    async def chain(self, chain: str, user: str | None = None) -> ChainView | None:
        """The youngest chain of that name, of ``user`` where that is given.

        Raises:
            DatabaseError: the file failed.
        """
        return await self._read(lambda db: find_chain(db, chain, user, self._wall_s()))

    async def recent(self, most: int = CHAINS_SHOWN) -> list[ChainLine]:
        """The chains whose last steps are the youngest, these first.

        Raises:
            DatabaseError: the file failed.
        """
        return await self._read(lambda db: recent_chains(db, most, self._wall_s()))

    def close(self) -> None:
        """Write what waits, and close the file."""
        if self._waiting:
            self._submit()
        self._executor.submit(lambda: self._connection.close()).result()
        self._executor.shutdown()

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._waiting:  # the thread takes them in before it reads
            self._writing = self._submit()
        reading = self._executor.submit(self._guarded, lambda: work(self._connection))
        return await asyncio.wrap_future(reading)

    def _submit(self) -> Future[None]:
        batch = list(self._waiting)
        self._waiting.clear()
        return self._executor.submit(self._write, batch)

    # In the file's thread

    def _write(self, batch: list[ChainStep]) -> None:
        encode = msgspec.json.encode
        rows = [(each.chain, each.user, each.ended_s, encode(each)) for each in batch]
        try:
            with self._connection:
                self._connection.executemany(
                    "INSERT INTO steps (chain, user, ended_s, document) VALUES (?, ?, ?, ?)", rows
                )
            self.written += len(rows)
            self._rows += len(rows)
            self._bytes += sum(len(row[3]) for row in rows)
            full = self._rows > self._rows_most or self._bytes > self._bytes_most
            if full or self._wall_s() - self._pruned_s > _PRUNE_S:
                with self._connection:
                    self._prune(self._connection)
        except (sqlite3.Error, UnicodeEncodeError) as error:
            self.failed += len(rows)
            self._on_trouble(f"{len(rows)} steps of chains were not kept: {self.path}: {error}")

    def _prune(self, db: sqlite3.Connection) -> None:
        """Drop what is too old, then the oldest of what is too much, a tenth more than need be."""
        self._pruned_s = self._wall_s()
        db.execute("DELETE FROM steps WHERE ended_s < ?", (self._pruned_s - self._keep_s,))
        self._count(db)
        while self._rows > self._rows_most or self._bytes > self._bytes_most:
            db.execute(
                "DELETE FROM steps WHERE number IN (SELECT number FROM steps ORDER BY number"
                " LIMIT ?)", (max(1, self._rows // 10),),
            )  # fmt: skip
            self._count(db)

    def _count(self, db: sqlite3.Connection) -> None:
        self._rows, self._bytes = db.execute(
            "SELECT count(*), coalesce(sum(length(document)), 0) FROM steps"
        ).fetchone()

    def _guarded(self, work: Callable[[], T]) -> T:
        lost = "the chains that it held can be looked at no more"
        with sqlite.plain_errors(self.path, DatabaseError, lost):
            return work()

    def _open(self) -> sqlite3.Connection:
        return sqlite.opened(self.path, self._prepare)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        schema = sqlite.schema_of(connection)
        if schema is None:
            sqlite.make(connection, _TABLES, SCHEMA)
        elif schema != SCHEMA:
            raise DatabaseError(sqlite.unknown_schema(self.path, schema, SCHEMA))
        with connection:
            self._prune(connection)


def read_only(path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
    """Read the file of a controller, whether that runs or not.

    Raises:
        DatabaseError: there is none, or it cannot be read.
    """
    if not path.is_file():
        raise DatabaseError(f"{path}: is not here: --data names the controller's data folder")
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=sqlite.BUSY_S)
        try:
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema != SCHEMA:
                raise DatabaseError(sqlite.unknown_schema(path, schema, SCHEMA))
            return work(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise DatabaseError(f"{path}: cannot be read: {error}") from error


def find_chain(
    db: sqlite3.Connection, chain: str, user: str | None, now_s: float
) -> ChainView | None:
    """As ``StepStore.chain``."""
    if not _storable(chain) or not _storable(user or ""):
        return None
    if user is None:
        row = db.execute(
            "SELECT user FROM steps WHERE chain = ? ORDER BY number DESC LIMIT 1", (chain,)
        ).fetchone()
        if row is None:
            return None
        user = row[0]
    rows = db.execute(
        "SELECT document FROM steps WHERE chain = ? AND user = ? ORDER BY number DESC LIMIT ?",
        (chain, user, STEPS_SHOWN),
    )
    steps = _last_run(_decoded(rows))
    return _view(steps, now_s) if steps else None


def recent_chains(db: sqlite3.Connection, most: int, now_s: float) -> list[ChainLine]:
    """As ``StepStore.recent``."""
    rows = db.execute("SELECT document FROM steps ORDER BY number DESC LIMIT ?", (LOOKED_AT,))
    found: dict[tuple[str, str], list[ChainStep]] = {}
    for step in _decoded(rows):
        found.setdefault((step.user, step.chain), []).append(step)
    lines: list[ChainLine] = []
    for (user, chain), every in list(found.items())[:most]:
        steps = _last_run(every)
        age_s = max(0.0, now_s - min(step.began_s for step in steps))
        lines.append(
            ChainLine(
                chain, user, steps[0].line, len(steps), round(age_s, 3), _is_over(steps, now_s)
            )
        )
    return lines


def _decoded(rows: Iterable[tuple[bytes]]) -> list[ChainStep]:
    decode = msgspec.json.Decoder(ChainStep).decode
    return [decode(document) for (document,) in rows]


def _last_run(steps: list[ChainStep]) -> list[ChainStep]:
    """Those of the youngest chain of that name, the first first."""
    run: list[ChainStep] = []
    for step in sorted(steps, key=lambda step: step.ended_s, reverse=True):
        if run:
            first = min(run, key=lambda each: each.began_s)
            until_s = APART_S if step.left_s is None else step.left_s + FORGOTTEN_S
            if first.began_s > step.ended_s + until_s and not first.resumed:
                break
        run.append(step)
    return sorted(run, key=lambda step: (step.began_s, step.ended_s))


def _view(steps: list[ChainStep], now_s: float) -> ChainView:
    zero_s = steps[0].began_s
    last = max(steps, key=lambda step: step.ended_s)
    budgets = [step.budget_s for step in steps if step.budget_s is not None]
    ends_s = _end_s(steps)
    left_s = None if ends_s is None else round(max(0.0, ends_s - last.ended_s), 6)
    return ChainView(
        last.chain,
        last.user,
        next((step.line for step in steps if step.line), ""),
        next((step.trace_id for step in steps if step.trace_id), ""),
        budgets[0] if budgets else None,
        left_s,
        _is_over(steps, now_s),
        any(step.why == OVER or step.outcome == LATE for step in steps),
        tuple(_step_view(step, zero_s) for step in steps),
    )


def _step_view(step: ChainStep, zero_s: float) -> StepView:
    parts = {name: getattr(step, name) for name in StepView.__struct_fields__}
    parts["began_s"] = round(step.began_s - zero_s, 6)
    parts["ended_s"] = round(step.ended_s - zero_s, 6)
    return StepView(**parts)


def _end_s(steps: list[ChainStep]) -> float | None:
    """When the budget ends, as the step that ended last was told; None: no step was."""
    told = [step for step in steps if step.left_s is not None]
    if not told:
        return None
    last = max(told, key=lambda step: step.ended_s)
    return last.ended_s + (last.left_s or 0.0)


def _is_over(steps: list[ChainStep], now_s: float) -> bool:
    ends_s = _end_s(steps)
    return ends_s is not None and ends_s <= now_s


def _storable(name: str) -> bool:
    """Bytes of an address that are no UTF-8 come as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in name)
