"""The jobs: what was asked, how far it is, where its results lie. SQLite, so any process may ask.

A job is named by what it does: the same request, to the same code, is the same job, so a link finds
the figures that it made. Its process has a group of its own, which a cancel ends as a whole.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

State = Literal["waiting", "running", "done", "failed", "cancelled", "died"]
OPEN: tuple[State, ...] = ("waiting", "running")
SCHEMA = """
create table if not exists jobs (
  id text primary key, kind text not null, request text not null, state text not null,
  share real, said text not null default '', error text not null default '',
  pid integer not null default 0, born text not null default '',
  asked_s real not null, began_s real not null default 0, ended_s real not null default 0
)
"""
GRACE_S = 0.3
"""From SIGTERM to SIGKILL."""
KILLED_S = 5.0
"""From SIGKILL until the kernel has done it, on a machine that may be busy."""
PATIENCE_S = {"drill": 45.0}
"""Kinds that have something to take back: their process is told alone, and given so long, before
what it has started is ended."""
BUSY_S = 10.0
WORK = "dashboards.work"
"""The package of the kinds."""
KEPT_MOST = 50
"""Of each kind, jobs that have ended; the oldest are forgotten with their folders."""


class JobsError(ValueError):
    """A job that is not known."""


class Job(msgspec.Struct, frozen=True):
    """What is known of a job."""

    id: str
    kind: str
    request: dict[str, Any]
    state: State
    share: float | None
    """Of the work that is done; None: not known."""
    said: str
    """What is being done."""
    error: str
    folder: Path
    """Where its results lie."""
    began_s: float
    ended_s: float
    """Since 1970; 0: not yet."""

    @property
    def open(self) -> bool:
        return self.state in OPEN


class Jobs:
    """The jobs whose store lies in ``folder``.

    Args:
        most: jobs that run at the same time; the others wait, in the order in which they were
            asked for.
        package: where the modules of the kinds are.
    """

    def __init__(self, folder: Path, most: int = 2, package: str = WORK) -> None:
        self._folder = folder
        self._most = most
        self._package = package
        folder.mkdir(parents=True, exist_ok=True)
        with closing(self._connection()) as database:
            _be_wal(database)
            database.execute(SCHEMA)

    def start(self, kind: str, request: dict[str, Any], *, again: bool = False) -> Job:
        """The job that does this: the one that has done it, or does it now, or a new one. One that
        was cancelled, failed or died goes on, where its work can go on.

        Args:
            again: one that is done is done once more.
        """
        number = job_id(kind, request)
        with self._writing() as database:
            known = self._row(database, number)
            if known is None:
                self._note(database, number, kind, request)
            elif not known.open and (again or known.state != "done"):
                database.execute(
                    "update jobs set state = 'waiting', share = null, said = '', error = '',"
                    " pid = 0, born = '', asked_s = ?, began_s = 0, ended_s = 0 where id = ?",
                    (time.time(), number),
                )
        self.look()
        return self.get(number)

    def start_now(self, kind: str, request: dict[str, Any], secret: str) -> Job:
        """A new job that begins at once or not at all: what somebody has agreed to now is not done
        at another time.

        Args:
            secret: what the job's process reads on its standard input; it is kept nowhere.

        Raises:
            JobsError: as many jobs run already as may, or this one was there before.
        """
        number = job_id(kind, request)
        self.look()
        with self._writing() as database:
            if self._row(database, number) is not None:
                raise JobsError(f"job {number} was there before: ask anew")
            query = "select count(*) from jobs where state in ('waiting', 'running')"
            (others,) = database.execute(query).fetchone()
            if others >= self._most:
                raise JobsError(
                    f"{others} other jobs run or wait, and it would not begin now: cancel one, or"
                    " ask again when one has ended"
                )
            self._note(database, number, kind, request)
            self._begin(database, number, secret)
        return self.get(number)

    def get(self, number: str) -> Job:
        """
        Raises:
            JobsError: there is none.
        """
        with self._reading() as database:
            job = self._row(database, number)
        if job is None:
            raise JobsError(f"there is no job {number!r} here")
        return job

    def find(self, kind: str, request: dict[str, Any]) -> Job | None:
        """The job that does this; None: nobody asked for it yet."""
        with self._reading() as database:
            return self._row(database, job_id(kind, request))

    def recent(self, *kinds: str, most: int = 20) -> list[Job]:
        """The youngest first; of no kind: of all."""
        chosen = f"where kind in ({','.join('?' * len(kinds))})" if kinds else ""
        query = f"select * from jobs {chosen} order by asked_s desc limit ?"
        with self._reading() as database:
            return [self._job(row) for row in database.execute(query, (*kinds, most))]

    def cancel(self, number: str) -> Job:
        """End it: after this its processes are gone. What it has written stays.

        Raises:
            JobsError: there is none.
        """
        with self._writing() as database:
            row = database.execute(
                "select kind, pid, born from jobs where id = ?", (number,)
            ).fetchone()
            ended = database.execute(
                "update jobs set state = 'cancelled', ended_s = ? where id = ? and state in"
                " ('waiting', 'running')",
                (time.time(), number),
            ).rowcount
        if row is not None and ended and row["pid"]:
            _end_job(row["pid"], row["born"], PATIENCE_S.get(row["kind"], 0.0))
        self.look()
        return self.get(number)

    def look(self) -> None:
        """Note which processes are gone, and begin what waits while there is room."""
        if not self._anything_to_do():
            return
        gone: list[sqlite3.Row] = []
        with self._writing() as database:
            running = 0
            rows = database.execute("select id, kind, pid, born from jobs where state = 'running'")
            for row in rows.fetchall():
                if _alive(row["pid"], row["born"]):
                    running += 1
                    continue
                gone.append(row)
                database.execute(
                    "update jobs set state = 'died', ended_s = ? where id = ?",
                    (time.time(), row["id"]),
                )
            waiting = database.execute(
                "select id from jobs where state = 'waiting' order by asked_s, rowid limit ?",
                (max(0, self._most - running),),
            ).fetchall()
            for row in waiting:
                self._begin(database, row["id"])
            self._forget(database)
        for row in gone:
            # What it had started would go on, and be in the way of the same job begun again.
            _end_job(row["pid"], row["born"], PATIENCE_S.get(row["kind"], 0.0))

    def _anything_to_do(self) -> bool:
        """Pages ask several times a second: mostly there is nothing, and then nobody is locked
        out."""
        with self._reading() as database:
            rows = database.execute(
                "select state, pid, born from jobs where state in ('waiting', 'running')"
            ).fetchall()
            ended = database.execute(
                "select count(*) from jobs where state not in ('waiting', 'running') group by kind"
            ).fetchall()
        running = [row for row in rows if row["state"] == "running"]
        room = len(running) < self._most and len(rows) > len(running)
        alive = all(_alive(row["pid"], row["born"]) for row in running)
        return room or not alive or any(row[0] > KEPT_MOST for row in ended)

    # For the job's own process

    def tell(self, number: str, share: float | None, said: str) -> None:
        """How far it is. Left out where the store is busy: no job is to end for that."""
        with suppress(sqlite3.OperationalError), self._writing() as database:
            database.execute(
                "update jobs set share = ?, said = ? where id = ? and state = 'running'",
                (share, said, number),
            )

    def end(self, number: str, error: str = "") -> None:
        """It is done, or has failed."""
        state = "failed" if error else "done"
        with self._writing() as database:
            database.execute(
                "update jobs set state = ?, error = ?, ended_s = ? where id = ? and"
                " state = 'running'",
                (state, error, time.time(), number),
            )

    def folder_of(self, number: str) -> Path:
        return self._folder / number

    def _connection(self) -> sqlite3.Connection:
        path = self._folder / "jobs.db"
        database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        database.row_factory = sqlite3.Row
        database.execute("pragma synchronous = normal")  # a power cut may forget the last steps
        return database

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with closing(self._connection()) as database:
            yield database

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which nobody else writes in meanwhile."""
        with closing(self._connection()) as database:
            database.execute("begin immediate")
            try:
                yield database
            except BaseException:
                database.rollback()
                raise
            database.commit()

    def _row(self, database: sqlite3.Connection, number: str) -> Job | None:
        row = database.execute("select * from jobs where id = ?", (number,)).fetchone()
        return None if row is None else self._job(row)

    def _job(self, row: sqlite3.Row) -> Job:
        return Job(
            row["id"], row["kind"], msgspec.json.decode(row["request"]), row["state"],
            row["share"], row["said"], row["error"], self.folder_of(row["id"]), row["began_s"],
            row["ended_s"],
        )  # fmt: skip

    def _note(
        self, database: sqlite3.Connection, number: str, kind: str, request: dict[str, Any]
    ) -> None:
        """It waits."""
        text = msgspec.json.encode(request).decode()
        database.execute(
            "insert into jobs (id, kind, request, state, asked_s) values (?, ?, ?, ?, ?)",
            (number, kind, text, "waiting", time.time()),
        )

    def _begin(self, database: sqlite3.Connection, number: str, secret: str = "") -> None:
        """Its process, and what the store knows of it."""
        folder = self.folder_of(number)
        command = [
            sys.executable, "-m", "dashboards.jobs.worker", str(self._folder), number,
            str(self._most), self._package,
        ]  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "log.txt").open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE if secret else subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
                if process.stdin is not None:
                    with suppress(BrokenPipeError), process.stdin as told:
                        told.write(secret.encode())
        except OSError as error:
            database.execute(
                "update jobs set state = 'failed', error = ?, ended_s = ? where id = ?",
                (f"its process could not be started: {error}", time.time(), number),
            )
            return
        database.execute(
            "update jobs set state = 'running', pid = ?, born = ?, began_s = ? where id = ?",
            (process.pid, _born(process.pid), time.time(), number),
        )
        # It outlives us, so nobody waits for it here: ``_born`` asks what became of it.
        process.returncode = 0

    def _forget(self, database: sqlite3.Connection) -> None:
        old = database.execute(
            "select id from (select id, row_number() over (partition by kind order by ended_s desc)"
            " as place from jobs where state not in ('waiting', 'running')) where place > ?",
            (KEPT_MOST,),
        ).fetchall()
        for row in old:
            database.execute("delete from jobs where id = ?", (row["id"],))
            shutil.rmtree(self.folder_of(row["id"]), ignore_errors=True)


def job_id(kind: str, request: dict[str, Any]) -> str:
    """Of what is done, and by which code."""
    text = msgspec.json.encode((kind, request, code_version()), order="sorted")
    return sha256(text).hexdigest()[:16]


@cache
def code_version() -> str:
    """Of everything that decides a figure: kept figures are shown for the code that made them."""
    root = Path(__file__).parents[2]
    digest = sha256()
    for package in ("policy", "traces", "twin", "dashboards/work"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".yaml", ".parquet"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _born(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty: there is none. With it a number that
    another process has by now is not taken for the old one."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # one of ours that ended is gone only when somebody has asked
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return fields[19] if fields else ""


def _fields(stat: Path) -> list[str]:
    """Of a process, from its state on, as proc(5) has them; none: it has ended, whether or not
    somebody has asked what became of it."""
    try:
        fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
    return [] if not fields or fields[0] in "ZX" else fields


def _alive(pid: int, born: str) -> bool:
    """Whether the process that a job began with is there."""
    return bool(born) and _born(pid) == born


def _end_job(pid: int, born: str, patience_s: float) -> None:
    """End what is left of a job's group: nothing, if another process has its number by now, which
    no process gets while any of the group is left."""
    if _born(pid) not in ("", born):
        return
    if patience_s > 0 and _alive(pid, born):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if _ends(pid, patience_s):
            return
    _end_group(pid, max(GRACE_S, patience_s))


def _end_group(pid: int, grace_s: float) -> None:
    """SIGTERM, then SIGKILL, to a process and all that it started."""
    for number, most_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_S)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
        if _ends(pid, most_s):
            return


def _ends(pgid: int, within_s: float) -> bool:
    """Whether all of a group are gone within that time."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if not _group(pgid):
            return True
        time.sleep(0.01)
    return False


def _group(pgid: int) -> bool:
    """Whether any process of a group is left."""
    with suppress(ChildProcessError):
        os.waitpid(pgid, os.WNOHANG)
    try:
        os.killpg(pgid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(
        fields[2] == str(pgid)
        for stat in Path("/proc").glob("[0-9]*/stat") if (fields := _fields(stat))
    )  # fmt: skip


def _be_wal(database: sqlite3.Connection) -> None:
    """Readers and the writer do not wait for each other; a change that SQLite itself does not wait
    for, where several begin at once."""
    end_s = time.monotonic() + BUSY_S
    while True:
        try:
            database.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)
