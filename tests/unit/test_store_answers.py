"""The file of kept answers: bounded, private, there again after a restart, and only a cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sqlite3
import stat
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.store import answers as module
from controller.store.answers import OVERHEAD_BYTES, KeptAnswers, New, Vector

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

V = ("v",)
SPACE = "model"


class Clock:
    def __init__(self) -> None:
        self.s = 1_000_000.0

    def __call__(self) -> float:
        return self.s


@contextlib.contextmanager
def opened(folder: Path, clock: Clock | None = None, **how: Any) -> Iterator[KeptAnswers]:
    told: list[str] = []
    given_ = {"bytes_most": 1 << 20, "s_most": 100.0, "on_trouble": told.append, **how}
    store = KeptAnswers(folder / "answers.sqlite", wall_s=clock or Clock(), **given_)
    try:
        yield store
    finally:
        store.close()
        if "on_trouble" not in how:
            assert not told


def new(name: str, body: bytes = b"answer", at_s: float = 1_000_000.0, **how: Any) -> New:
    given_ = {"version": "v", "confidence_permille": -1, **how}
    return New(name.encode(), given_["version"], body, given_["confidence_permille"], at_s)


async def body_of(store: KeptAnswers, name: str) -> bytes | None:
    kept = await store.find(name.encode(), V)
    return None if kept is None else kept.body


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def test_it_is_there_again_after_a_restart_with_its_age(tmp_path: Path) -> None:
    clock = Clock()

    async def test() -> None:
        with opened(tmp_path, clock) as store:
            store.keep(new("a", confidence_permille=800))  # not written yet, and not lost
        clock.s += 40.0
        with opened(tmp_path, clock) as store:
            kept = await store.find(b"a", V)
            assert kept == (b"answer", 40 * 10**9, 800, "v", 1.0)
            assert (store.rows, store.kept_bytes) == (1, 6 + OVERHEAD_BYTES)

    run(test)


def test_old_answers_are_gone(tmp_path: Path) -> None:
    clock = Clock()

    async def test() -> None:
        with opened(tmp_path, clock) as store:
            store.keep(new("a"))
            assert await body_of(store, "a") == b"answer"
            clock.s += 100.0
            assert await body_of(store, "a") == b"answer"
            clock.s += 0.1
            assert await body_of(store, "a") is None
            clock.s += 61.0
            assert await body_of(store, "a") is None
            assert (store.rows, store.kept_bytes) == (0, 0)

    run(test)


def test_a_clock_that_was_put_back_makes_no_age_negative(tmp_path: Path) -> None:
    async def test() -> None:
        with opened(tmp_path) as store:
            store.keep(new("a", at_s=1_000_050.0))
            kept = await store.find(b"a", V)
            assert kept is not None
            assert kept.age_ns == 0

    run(test)


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 120), st.booleans()), max_size=30))
def test_what_is_kept_is_bounded_and_the_youngest(
    tmp_path_factory: pytest.TempPathFactory, kept: list[tuple[int, int, bool]]
) -> None:
    """The third of each: whether it is looked at at once, so that it is written alone."""
    most = 3 * OVERHEAD_BYTES + 100
    expected: dict[int, int] = {}

    async def test() -> None:
        with opened(tmp_path_factory.mktemp("answers"), bytes_most=most, rows_most=2) as store:
            for name, size, at_once in kept:
                store.keep(new(str(name), b"x" * size))
                if size + OVERHEAD_BYTES <= most:
                    expected.pop(name, None)
                    expected[name] = size
                while sum(expected.values()) + len(expected) * OVERHEAD_BYTES > most or (
                    len(expected) > 2
                ):
                    del expected[next(iter(expected))]
                if at_once:
                    await body_of(store, "none")
            for name in range(6):
                body = await body_of(store, str(name))
                assert (None if body is None else len(body)) == expected.get(name)
            assert store.rows == len(expected)
            assert store.kept_bytes == sum(expected.values()) + len(expected) * OVERHEAD_BYTES

    run(test)


def test_vectors_count_and_stay_with_their_question(tmp_path: Path) -> None:
    one, other = np.eye(2, 8, dtype=np.float32)

    async def test() -> None:
        with opened(tmp_path) as store:
            store.keep(new("a"))
            store.keep(new("b", at_s=999_999.0))
            store.keep(new("c"))
            keys = [(b"a", "v"), (b"b", "v"), (b"c", "v"), (b"none", "v")]
            assert await store.lacking(keys, SPACE) == [True, True, True, False]
            vectors = [Vector(b"a", "v", b"q", one), Vector(b"b", "v", b"q", other),
                       Vector(b"none", "v", b"q", one)]  # fmt: skip
            await store.put_vectors(vectors, SPACE)
            assert await store.lacking(keys, SPACE) == [False, False, True, False]
            assert await store.lacking(keys, "another") == [True, True, True, False]
            assert store.kept_bytes == 3 * (6 + OVERHEAD_BYTES) + 2 * 32
            assert await store.has_alike(b"q", V, SPACE)
            assert not await store.has_alike(b"q", V, "another")
            assert not await store.has_alike(b"q", ("w",), SPACE)
            assert not await store.has_alike(b"p", V, SPACE)
            for vector, age_s in ((one, 0), (other, 1)):
                kept = await store.nearest(b"q", V, SPACE, vector, 0.9)
                assert kept is not None
                assert (kept.age_ns, kept.similarity) == (age_s * 10**9, 1.0)
            assert await store.nearest(b"q", V, SPACE, (one + other) / 2**0.5, 0.9) is None
            assert await store.nearest(b"q", V, SPACE, one[:4], 0.9) is None
            store.keep(new("a", b"younger"))
            kept = await store.nearest(b"q", V, SPACE, one, 0.9)
            assert kept is not None
            assert kept.body == b"younger"
            assert store.kept_bytes == 3 * (6 + OVERHEAD_BYTES) + 2 * 32 + 1

    run(test)


def test_long_answers_are_packed(tmp_path: Path) -> None:
    body = b"data: the same again and again\n\n" * 1000

    async def test() -> None:
        with opened(tmp_path) as store:
            store.keep(new("a", body))
            assert await body_of(store, "a") == body
            assert store.kept_bytes < len(body) / 20 + OVERHEAD_BYTES
        with opened(tmp_path) as store:
            assert await body_of(store, "a") == body
            assert store.kept_bytes < len(body) / 20 + OVERHEAD_BYTES

    run(test)


def test_others_cannot_read_it(tmp_path: Path) -> None:
    async def test() -> None:
        before = os.umask(0o022)
        try:
            with opened(tmp_path) as store:
                store.keep(new("a"))
                await body_of(store, "a")
                modes = {
                    stat.S_IMODE((tmp_path / name).stat().st_mode) for name in os.listdir(tmp_path)
                }
                assert len(modes) >= 1
        finally:
            os.umask(before)
        assert modes == {0o600}

    run(test)


def test_too_many_at_once_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MOST", 3)
    monkeypatch.setattr(module, "WAITING_BYTES_MOST", 2000)

    async def test() -> None:
        with opened(tmp_path) as store:
            for name in "abcd":
                store.keep(new(name))
            assert store.left_out == 1
            assert await body_of(store, "c") == b"answer"
            assert await body_of(store, "d") is None
            store.keep(new("e", b"x" * 2000))
            assert store.left_out == 2
            store.keep(new("f"))
            assert await body_of(store, "f") == b"answer"

    run(test)


@pytest.mark.parametrize("damage", ["garbage", "torn", "schema"])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "answers.sqlite"
    troubles: list[str] = []

    async def test() -> None:
        with opened(tmp_path) as store:
            for number in range(200):
                store.keep(new(str(number), os.urandom(500)))
        if damage == "garbage":
            path.write_bytes(b"no database at all" * 1000)
        elif damage == "torn":
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2])
        else:
            db = sqlite3.connect(path)
            db.execute("PRAGMA user_version = 99")
            db.close()
        with opened(tmp_path, on_trouble=troubles.append) as store:
            for number in range(200):
                await body_of(store, str(number))
            store.keep(new("a"))
            assert await body_of(store, "a") == b"answer"
        assert len(troubles) == 1
        assert "moved to answers.sqlite.damaged" in troubles[0]
        assert (tmp_path / "answers.sqlite.damaged").exists()

    run(test)


def test_damage_that_shows_later_is_put_aside_then(tmp_path: Path) -> None:
    troubles: list[str] = []

    async def test() -> None:
        with opened(tmp_path, on_trouble=troubles.append) as store:
            for number in range(200):
                store.keep(new(str(number), os.urandom(500)))
            assert await body_of(store, "1") is not None
            store._executor.submit(
                lambda: store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[union-attr]
            ).result()
            with (tmp_path / "answers.sqlite").open("r+b") as file:
                file.seek(4096)
                file.write(b"\xff" * 100_000)
            store._executor.submit(
                lambda: store._connection.execute("PRAGMA shrink_memory")  # type: ignore[union-attr]
            ).result()
            for number in range(200):
                await body_of(store, str(number))
            assert troubles
            store.keep(new("a"))
            assert await body_of(store, "a") == b"answer"

    run(test)


def test_a_file_that_cannot_be_had_is_told_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").mkdir()
    troubles: list[str] = []

    async def test() -> None:
        with opened(tmp_path, on_trouble=troubles.append) as store:
            store.keep(new("a"))
            assert await body_of(store, "a") is None
            assert store.left_out == 0 or store.left_out == 1
        assert troubles

    run(test)


def test_a_full_disk_keeps_nothing_and_what_was_kept_is_found(tmp_path: Path) -> None:
    async def test() -> None:
        troubles: list[str] = []
        with opened(tmp_path, on_trouble=troubles.append) as store:
            store.keep(new("a"))
            assert await body_of(store, "a") == b"answer"
            assert store._connection is not None
            store._connection.execute("PRAGMA max_page_count = 1")  # as it is, it grows no more
            store.keep(new("b", secrets.token_bytes(100_000)))
            assert await body_of(store, "a") == b"answer"
            assert troubles == [
                f"{store.path}: database or disk is full: no answer is kept meanwhile"
            ]
            assert await body_of(store, "b") is None
            assert (store.rows, store.left_out) == (1, 1)

    run(test)


def test_a_bound_that_was_lowered_gives_the_disk_back(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"

    async def test() -> None:
        with opened(tmp_path, bytes_most=4 << 20) as store:
            for number in range(300):
                store.keep(new(str(number), os.urandom(10_000)))
        assert path.stat().st_size > 2 << 20
        with opened(tmp_path, bytes_most=200_000) as store:
            assert store.kept_bytes <= 200_000
            assert await body_of(store, "299") is not None
            assert await body_of(store, "1") is None
        assert path.stat().st_size < 1 << 20

    run(test)
