"""The steps of chains on disk: kept in batches, bounded, shown as they were."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from controller.store.database import DatabaseError
from controller.store.steps import (
    FORGOTTEN_S,
    ChainStep,
    StepStore,
    find_chain,
    read_only,
    recent_chains,
)

if TYPE_CHECKING:
    from pathlib import Path

    from controller.store.steps import ChainLine, ChainView

DAY_S = 86_400.0
NOW_S = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.s = NOW_S

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(name: str = "plan", at_s: float = 0.0, took_s: float = 1.0, **changed: Any) -> ChainStep:
    """One that began ``at_s`` after the clock's start."""
    began_s = NOW_S + at_s
    given: dict[str, Any] = {
        "user": "ann", "chain": "c", "step": name, "request": f"r-{name}", "began_s": began_s,
        "ended_s": began_s + took_s, "outcome": "answered", "budget_s": 8.0,
        "left_s": 8.0 - at_s - took_s,
    }  # fmt: skip
    return ChainStep(**(given | changed))


def shown(store: StepStore, chain: str = "c", user: str | None = None) -> ChainView | None:
    return asyncio.run(store.chain(chain, user))


def listed(store: StepStore) -> list[ChainLine]:
    return asyncio.run(store.recent())


def test_what_was_added_is_seen_at_once_and_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "chains.sqlite"
    store = StepStore(path, wall_s=clock)
    clock.s += 3
    store.add(step("db", 1.0, 0.5, external=True, left_s=None, budget_s=None, request="",
                   attributes={"rows": 42, "score": 0.5, "hit": True, "none": None}))  # fmt: skip
    store.add(step("plan", 0.0, 1.0, line="shop", trace_id="ab"))
    store.add(step("sum", 1.5, 1.5, confidence=0.7, verification="match", queue_s=0.25))
    view = shown(store)
    assert view is not None
    assert (view.user, view.line, view.trace_id, view.budget_s) == ("ann", "shop", "ab", 8.0)
    assert (view.left_s, view.over, view.partial) == (5.0, False, False)
    assert [each.step for each in view.steps] == ["plan", "db", "sum"]
    assert (view.steps[1].began_s, view.steps[1].ended_s) == (1.0, 1.5)
    assert view.steps[1].attributes == {"rows": 42, "score": 0.5, "hit": True, "none": None}
    assert (view.steps[2].confidence, view.steps[2].queue_s) == (0.7, 0.25)
    assert store.written == 3
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_only(path, lambda db: find_chain(db, "c", "ann", clock.s)) == view
    again = StepStore(path, wall_s=clock)
    assert shown(again) == view
    clock.s += 60
    later = shown(again)
    assert later is not None
    assert later.over
    again.close()


def test_whose_it_is_and_which_are_the_youngest(tmp_path: Path, clock: Clock) -> None:
    store = StepStore(tmp_path / "chains.sqlite", wall_s=clock)
    store.add(step("a", 0.0, chain="one"))
    store.add(step("b", 1.0, chain="two", user="bob"))
    store.add(step("c", 2.0, chain="one", user="bob"))
    store.add(step("d", 3.0, chain="one"))
    clock.s += 5
    assert [(line.chain, line.user, line.steps) for line in listed(store)] == [
        ("one", "ann", 2), ("one", "bob", 1), ("two", "bob", 1),
    ]  # fmt: skip
    assert [line.age_s for line in listed(store)] == [5.0, 3.0, 4.0]
    assert [s.step for s in shown(store, "one").steps] == ["a", "d"]  # type: ignore[union-attr]
    assert [s.step for s in shown(store, "one", "bob").steps] == ["c"]  # type: ignore[union-attr]
    assert shown(store, "one", "carol") is None
    assert shown(store, "three") is None
    assert shown(store, "\udcff") is None
    assert asyncio.run(store.recent(1)) == listed(store)[:1]
    store.close()


def test_another_chain_of_the_same_name_is_another(tmp_path: Path, clock: Clock) -> None:
    store = StepStore(tmp_path / "chains.sqlite", wall_s=clock)
    end_s = 8 + FORGOTTEN_S
    store.add(step("a"))
    store.add(step("late", 9.0, 0.1, left_s=0.0, outcome="degraded", why="chain_budget"))
    view = shown(store)
    assert view is not None
    assert (view.partial, view.over, len(view.steps)) == (True, False, 2)
    clock.s += 10
    assert shown(store).over  # type: ignore[union-attr]
    store.add(step("x", 1000 + end_s, left_s=7.0))
    store.add(step("y", 1001 + end_s, left_s=6.0))
    assert [each.step for each in shown(store).steps] == ["x", "y"]  # type: ignore[union-attr]
    assert not shown(store).partial  # type: ignore[union-attr]
    store.add(step("z", 2000 + end_s, resumed=True, left_s=7.0))
    assert [s.step for s in shown(store).steps] == ["x", "y", "z"]  # type: ignore[union-attr]
    store.close()


def test_a_client_step_that_was_late_makes_it_partial(tmp_path: Path, clock: Clock) -> None:
    store = StepStore(tmp_path / "chains.sqlite", wall_s=clock)
    store.add(step("tool", external=True, outcome="late", left_s=None, budget_s=None))
    view = shown(store)
    assert view is not None
    assert (view.partial, view.left_s, view.budget_s, view.over) == (True, None, None, False)
    store.close()


def test_rows_bytes_and_age_are_bounded(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "chains.sqlite"
    store = StepStore(path, rows_most=100, wall_s=clock)
    for number in range(250):
        store.add(step(str(number), number / 100))
        if number % 20 == 0:
            shown(store)
    (line,) = listed(store)
    assert 80 <= line.steps <= 100
    assert shown(store).steps[-1].step == "249"  # type: ignore[union-attr]
    store.close()
    store = StepStore(path, bytes_most=20_000, wall_s=clock)
    for number in range(20):
        store.add(step(str(number), 10.0 + number / 100, attributes={"text": "x" * 2000}))
    listed(store)
    store.close()
    with sqlite3.connect(path) as db:
        (size,) = db.execute("SELECT sum(length(document)) FROM steps").fetchone()
    assert 10_000 < size <= 20_000
    clock.s += 8 * DAY_S
    store = StepStore(path, wall_s=clock)
    assert listed(store) == []
    store.close()


def test_a_full_queue_leaves_steps_out_and_counts_them(tmp_path: Path, clock: Clock) -> None:
    store = StepStore(tmp_path / "chains.sqlite", waiting_most=3, wall_s=clock)
    for number in range(5):
        store.add(step(str(number), number))
    assert store.dropped == 2
    store.flush()
    store.flush()
    assert len(shown(store).steps) == 3  # type: ignore[union-attr]
    store.close()


def test_a_file_that_fails_is_told_and_nothing_stops(tmp_path: Path, clock: Clock) -> None:
    told: list[str] = []
    path = tmp_path / "chains.sqlite"
    store = StepStore(path, on_trouble=told.append, wall_s=clock)
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE steps")
    store.add(step())
    with pytest.raises(DatabaseError, match="no such table"):
        shown(store)
    assert (store.failed, store.written) == (1, 0)
    assert "1 steps of chains were not kept" in told[0]
    store.close()


@pytest.mark.parametrize(
    ("content", "said"), [(b"no database at all" * 100, "not a database"), (None, "schema 9")]
)
def test_a_file_that_is_none_of_ours_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "chains.sqlite"
    if content is None:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 9")
            db.execute("CREATE TABLE x (y)")
    else:
        path.write_bytes(content)
    with pytest.raises(DatabaseError, match=said):
        StepStore(path)
    with pytest.raises(DatabaseError, match=said):
        read_only(path, lambda db: recent_chains(db, 5, NOW_S))
    with pytest.raises(DatabaseError, match="--data"):
        read_only(tmp_path / "nothing", lambda db: recent_chains(db, 5, NOW_S))


KILLED = """
import asyncio, os, sys, time
from controller.store.steps import StepStore
from tests.unit.test_store_steps import step
from pathlib import Path
store = StepStore(Path(sys.argv[1]))
store.add(step("kept"))
store.flush()
asyncio.run(store.recent())
store.add(step("lost", 1.0))
os.kill(os.getpid(), 9)
"""


def test_what_was_written_outlives_a_kill(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "chains.sqlite"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], check=False, timeout=60, env={**os.environ}
    )
    assert killed.returncode == -9
    view = read_only(path, lambda db: find_chain(db, "c", None, NOW_S))
    assert [each.step for each in view.steps] == ["kept"]  # type: ignore[union-attr]
    store = StepStore(path, wall_s=clock)
    assert len(shown(store).steps) == 1  # type: ignore[union-attr]
    store.close()
