"""How the controller's SQLite files are opened, and what is said of one that cannot be used.

Each file is its owner's alone and has a write-ahead log; ``user_version`` holds its schema's
number.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BUSY_S = 10.0
"""For how long another that writes the same file is waited for."""


def opened(
    path: Path,
    prepare: Callable[[sqlite3.Connection], None],
    *,
    busy_s: float = BUSY_S,
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    any_thread: bool = False,
) -> sqlite3.Connection:
    """The file, open.

    Args:
        path: made if it does not exist; its folder too.
        prepare: sees to the tables, and to all else that comes first. Where it fails, the file is
            closed again.
        synchronous: FULL: a commit is on the disk before it returns. NORMAL: it outlives the
            process; a machine that loses its power may lose the last ones.
        any_thread: not only this one works on it.

    Raises:
        OSError: the file cannot be made.
        sqlite3.Error: it cannot be used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    path.chmod(0o600)  # the files beside it get the same mode
    connection = sqlite3.connect(path, timeout=busy_s, check_same_thread=not any_thread)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def schema_of(connection: sqlite3.Connection) -> int | None:
    """Its schema's number; None: there is nothing in it yet."""
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return None if schema == 0 and not tables else int(schema)


def make(connection: sqlite3.Connection, statements: str, schema: int) -> None:
    """Bring it to this schema, wholly or not at all."""
    with connection:
        connection.executescript(f"BEGIN; {statements} PRAGMA user_version = {schema}; COMMIT;")


def unknown_schema(path: Path, schema: int, known: int, instead: str = "move the file away") -> str:
    """What is said of a file that another version wrote, or something else."""
    return (
        f"{path}: schema {schema} is not known, this version reads schema {known}: use the version"
        f" that wrote it, or {instead}"
    )


@contextmanager
def plain_errors(path: Path, kind: type[Exception], lost: str) -> Iterator[None]:
    """What SQLite says is told as a ``kind``, with what is ``lost`` where the file is damaged."""
    try:
        yield
    except sqlite3.Error as error:
        raise kind(
            f"{path}: {error}; if it is damaged, move it away: an empty one is made, and {lost}"
        ) from error
