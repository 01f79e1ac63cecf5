"""The tables of deployments: which policies were to rule, by whom, and what became of each.

A deployment is one row; what became of it is its transitions, in order. A transition is written
before it is acted on, so that after a crash the last one says how far it can have come. The table
``policies`` says which policy a start finds: a deployment stands in it once it is done, not before.

Everything here works on an open connection, in the file's thread (``Database.run``).
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    import sqlite3

KEPT_MOST = 10_000
"""Deployments, and policies that were put in force; the oldest are forgotten."""
DONE, ROLLED_BACK, REFUSED = "done", "rolled_back", "refused"
ENDS = (DONE, ROLLED_BACK, REFUSED)
"""Stages after which nothing follows."""

TABLES = """
CREATE TABLE deployments (
    id INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    by TEXT NOT NULL,
    name TEXT NOT NULL,
    canonical TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    against TEXT NOT NULL,
    evidence TEXT NOT NULL,
    override TEXT NOT NULL,
    plan TEXT NOT NULL,
    state BLOB NOT NULL
) STRICT;
CREATE TABLE transitions (
    id INTEGER PRIMARY KEY,
    deployment INTEGER NOT NULL REFERENCES deployments (id),
    at_s REAL NOT NULL,
    stage TEXT NOT NULL,
    share_permille INTEGER NOT NULL,
    why TEXT NOT NULL,
    figures TEXT NOT NULL
) STRICT;
CREATE INDEX transitions_of ON transitions (deployment);
"""
FROM_SCHEMA_1 = f"""
{TABLES}
INSERT INTO deployments
    SELECT id, at_s, by, name, canonical, sha256, lag(canonical, 1, '') OVER (ORDER BY id), '', '',
        '', x'' FROM policies;
INSERT INTO transitions (deployment, at_s, stage, share_permille, why, figures)
    SELECT id, at_s, '{DONE}', 1000, note, '{{}}' FROM policies ORDER BY id;
"""
"""Schema 1 knew only which policies were put in force: each becomes a deployment that is done."""


class New(NamedTuple):
    """A deployment that begins."""

    by: str
    name: str
    """The policy's."""
    canonical: str
    against: str
    """The policy that ruled then, in canonical form; empty: none did."""
    evidence: str = ""
    override: str = ""
    """Why it is to be done though its evidence does not allow it; empty: it does."""
    plan: str = ""


class Transition(NamedTuple):
    """A step of a deployment."""

    at_s: float
    stage: str
    """shadow, canary, full, done, rolled_back or refused."""
    share_permille: int
    """Of the callers, served by the new policy from then on."""
    why: str
    figures: dict[str, float]


class Entry(NamedTuple):
    """A deployment, and what became of it."""

    id: int
    at_s: float
    by: str
    name: str
    canonical: str
    sha256: str
    against: str
    evidence: str
    override: str
    plan: str
    state: bytes
    """Of its judge, at the last step."""
    transitions: tuple[Transition, ...]

    @property
    def stage(self) -> str:
        return self.transitions[-1].stage if self.transitions else ""


def begin(db: sqlite3.Connection, new: New, first: Transition, state: bytes = b"") -> int:
    """A deployment begins, or is refused at once; its id."""
    digest = sha256(new.canonical.encode()).hexdigest()
    cursor = db.execute(
        "INSERT INTO deployments (at_s, by, name, canonical, sha256, against, evidence, override,"
        " plan, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (first.at_s, new.by, new.name, new.canonical, digest, new.against, new.evidence,
         new.override, new.plan, state),
    )  # fmt: skip
    assert cursor.lastrowid is not None
    add(db, cursor.lastrowid, first)
    for table, key in (("transitions", "deployment"), ("deployments", "id")):
        db.execute(f"DELETE FROM {table} WHERE {key} <= ?", (cursor.lastrowid - KEPT_MOST,))
    return cursor.lastrowid


def add(
    db: sqlite3.Connection, deployment: int, transition: Transition, state: bytes | None = None
) -> None:
    """The next step of a deployment, and with it the state of its judge."""
    db.execute(
        "INSERT INTO transitions (deployment, at_s, stage, share_permille, why, figures)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (deployment, transition.at_s, transition.stage, transition.share_permille, transition.why,
         msgspec.json.encode(transition.figures).decode()),
    )  # fmt: skip
    if state is not None:
        db.execute("UPDATE deployments SET state = ? WHERE id = ?", (state, deployment))


def finish(db: sqlite3.Connection, deployment: int, transition: Transition, state: bytes) -> None:
    """It is done: its policy is the one that a start from now on finds."""
    add(db, deployment, transition, state)
    _rules(db, deployment, transition)


def go_back(
    db: sqlite3.Connection, deployment: int, transition: Transition, state: bytes, old: New
) -> None:
    """It is rolled back; if it was done a moment before, ``old`` is what a start finds again."""
    query = "SELECT count(*) FROM transitions WHERE deployment = ? AND stage = ?"
    (was_done,) = db.execute(query, (deployment, DONE)).fetchone()
    add(db, deployment, transition, state)
    if was_done:
        put_in_force(db, old, transition.at_s, transition.why)


def put_in_force(db: sqlite3.Connection, new: New, at_s: float, note: str) -> int:
    """A policy rules without any stages: at a start, by an override, after a rollback."""
    done = Transition(at_s, DONE, 1000, note, {})
    deployment = begin(db, new, done)
    _rules(db, deployment, done)
    return deployment


def _rules(db: sqlite3.Connection, deployment: int, done: Transition) -> None:
    cursor = db.execute(
        "INSERT INTO policies (at_s, name, canonical, sha256, by, note)"
        " SELECT ?, name, canonical, sha256, by, ? FROM deployments WHERE id = ?",
        (done.at_s, done.why, deployment),
    )
    assert cursor.lastrowid is not None
    db.execute("DELETE FROM policies WHERE id <= ?", (cursor.lastrowid - KEPT_MOST,))


def end_interrupted(db: sqlite3.Connection, at_s: float, why: str) -> list[Entry]:
    """Those that a process left before their end are rolled back; they, as they were before."""
    rows = db.execute(
        "SELECT deployments.* FROM deployments JOIN transitions ON deployment = deployments.id"
        " WHERE transitions.id IN (SELECT max(id) FROM transitions GROUP BY deployment)"
        " AND stage NOT IN (?, ?, ?)",
        ENDS,
    )
    left = [_entry(db, row) for row in rows.fetchall()]
    for each in left:
        add(db, each.id, Transition(at_s, ROLLED_BACK, 0, why, {"restarted": 1}))
    return left


def failed_with(db: sqlite3.Connection, evidence: str) -> int | None:
    """The last deployment on this very evidence that its judge rolled back; None: there is none."""
    row = db.execute(
        "SELECT max(deployment) FROM transitions JOIN deployments ON deployment = deployments.id"
        " WHERE evidence = ? AND stage = ? AND json_extract(figures, '$.evidence') IS NOT NULL",
        (evidence, ROLLED_BACK),
    ).fetchone()
    return None if row[0] is None else int(row[0])


def newest(db: sqlite3.Connection) -> Entry | None:
    """The last one that was not refused."""
    row = db.execute(
        "SELECT * FROM deployments WHERE (SELECT stage FROM transitions"
        " WHERE deployment = deployments.id ORDER BY id DESC LIMIT 1) != ?"
        " ORDER BY id DESC LIMIT 1",
        (REFUSED,),
    ).fetchone()
    return None if row is None else _entry(db, row)


def last_change(db: sqlite3.Connection, ruling: str) -> Entry | None:
    """The last deployment that put the policy ``ruling`` in the place of another."""
    row = db.execute(
        "SELECT * FROM deployments WHERE canonical = ? AND against NOT IN ('', canonical)"
        " AND (SELECT stage FROM transitions WHERE deployment = deployments.id"
        " ORDER BY id DESC LIMIT 1) = ? ORDER BY id DESC LIMIT 1",
        (ruling, DONE),
    ).fetchone()
    return None if row is None else _entry(db, row)


def entries(db: sqlite3.Connection, most: int) -> list[Entry]:
    """The last ones, the youngest first."""
    rows = db.execute("SELECT * FROM deployments ORDER BY id DESC LIMIT ?", (most,)).fetchall()
    return [_entry(db, row) for row in rows]


def entry(db: sqlite3.Connection, deployment: int) -> Entry | None:
    row = db.execute("SELECT * FROM deployments WHERE id = ?", (deployment,)).fetchone()
    return None if row is None else _entry(db, row)


def _entry(db: sqlite3.Connection, row: tuple[object, ...]) -> Entry:
    steps = db.execute(
        "SELECT at_s, stage, share_permille, why, figures FROM transitions WHERE deployment = ?"
        " ORDER BY id",
        (row[0],),
    )
    made = tuple(
        Transition(at_s, stage, share, why, msgspec.json.decode(figures, type=dict[str, float]))
        for at_s, stage, share, why, figures in steps
    )
    return Entry._make((*row, made))
