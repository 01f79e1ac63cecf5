"""One suite for both stores of checkpoints, and what each has of its own."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from controller.sharing.store import check_redis
from controller.store import checkpoints as module
from controller.store.checkpoints import (
    Checkpoints,
    CheckpointsError,
    NewCheckpoint,
    RedisCheckpoints,
    SqliteCheckpoints,
)
from policy.files import FileError
from tests.controller.processes import eventually
from tests.redis_server import PATIENT_S, RedisServer, open_patiently, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
DAY_S = 86_400.0


class Wall:
    def __init__(self) -> None:
        self.now_s = 1_790_000_000.25

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Checkpoints]]:
    """Opens the same store as often as it is asked, as several processes would."""
    wall = Wall()
    opened: list[Checkpoints] = []

    def opens() -> Checkpoints:
        if request.param == "redis":
            url = request.getfixturevalue("server").url
            how = {"connect_s": PATIENT_S, "command_s": PATIENT_S}
            opened.append(RedisCheckpoints(url, keep_s=7 * DAY_S, wall_s=wall, **how))
        else:
            path = tmp_path / "own.sqlite"
            opened.append(SqliteCheckpoints(path, keep_s=7 * DAY_S, wall_s=wall))
        return opened[-1]

    opens.wall = wall  # type: ignore[attr-defined]
    opens.own = f"{tmp_path.name}/"  # type: ignore[attr-defined]
    yield opens
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Callable[[], Checkpoints]) -> Checkpoints:
    return opener()


@pytest.fixture
def owner(opener: Callable[[], Checkpoints]) -> str:
    """A name that no other test has, since they share one Redis."""
    return f"{opener.own}ann"  # type: ignore[attr-defined]


@pytest.fixture
def wall(opener: Callable[[], Checkpoints]) -> Wall:
    found = opener.wall  # type: ignore[attr-defined]
    assert isinstance(found, Wall)
    return found


def test_all_of_it_comes_back(store: Checkpoints, owner: str, wall: Wall) -> None:
    answer = bytes(range(256)) * 2000
    new = NewCheckpoint(
        owner, "order 42/ü", "db_query", "req-7", answer, 201, "application/x", 1.5e9, "shop"
    )
    kept = store.save(new)
    found = store.load(kept, owner)
    assert found is not None
    assert found == (kept, *new[:5], 201, "application/x", wall.now_s, 1.5e9, "shop")
    assert store.chain(owner, "order 42/ü") == [found._replace(answer=b"")]


def test_the_first_of_a_step_stays(
    store: Checkpoints, owner: str, opener: Callable[[], Checkpoints]
) -> None:
    first = store.save(NewCheckpoint(owner, "c", "s", "r1", b"one"))
    assert store.save(NewCheckpoint(owner, "c", "s", "r2", b"two")) == first
    assert opener().save(NewCheckpoint(owner, "c", "s", "r3", b"three")) == first
    found = store.load(first, owner)
    assert found is not None
    assert (found.answer, found.request) == (b"one", "r1")
    assert [one.id for one in store.chain(owner, "c")] == [first]


def test_steps_are_told_apart_by_owner_chain_and_name(store: Checkpoints, owner: str) -> None:
    places = [(owner, "a", "bc"), (owner, "ab", "c"), (f"{owner}a", "", "bc"), (owner, "a", "bC")]
    ids = [store.save(NewCheckpoint(*place, "r", repr(place).encode())) for place in places]
    assert len(set(ids)) == 4
    for place, kept in zip(places, ids, strict=True):
        found = store.load(kept, place[0])
        assert found is not None
        assert found.answer == repr(place).encode()
    assert [one.step for one in store.chain(owner, "a")] == ["bc", "bC"]
    assert store.chain(owner, "nobody's") == []


def test_a_nameless_step_replaces_the_one_before(store: Checkpoints, owner: str) -> None:
    first = store.save(NewCheckpoint(owner, "c", "", "r1", b"one"))
    named = store.save(NewCheckpoint(owner, "c", "s", "r2", b"two"))
    second = store.save(NewCheckpoint(owner, "c", "", "r3", b"three"))
    assert second != first
    assert store.load(first, owner) is None
    assert [one.id for one in store.chain(owner, "c")] == [named, second]


def test_nobody_else_gets_it(store: Checkpoints, owner: str) -> None:
    kept = store.save(NewCheckpoint(owner, "c", "s", "r", b"secret"))
    assert store.load(kept, "eve") is None
    assert store.load("cp-0", owner) is None
    assert store.load("", owner) is None
    assert store.undo(kept, "eve") == 0
    assert store.chain("eve", "c") == []


def test_going_back_forgets_what_came_after(store: Checkpoints, owner: str) -> None:
    ids = [store.save(NewCheckpoint(owner, "c", name, "r", name.encode())) for name in "abcd"]
    other = store.save(NewCheckpoint(owner, "other", "z", "r", b"z"))
    assert store.undo(ids[1], owner) == 2
    assert [one.step for one in store.chain(owner, "c")] == ["a", "b"]
    assert store.load(ids[2], owner) is None
    assert store.load(other, owner) is not None
    again = store.save(NewCheckpoint(owner, "c", "c", "r2", b"anew"))
    assert again != ids[2]
    found = store.load(again, owner)
    assert found is not None
    assert found.answer == b"anew"
    assert store.undo(again, owner) == 0
    store.forget(owner, "c")
    assert store.chain(owner, "c") == []
    assert store.load(other, owner) is not None


def test_what_is_too_old_is_as_if_it_had_never_been(
    store: Checkpoints, owner: str, wall: Wall
) -> None:
    old = store.save(NewCheckpoint(owner, "c", "s", "r", b"old"))
    wall.now_s += 6 * DAY_S
    store.save(NewCheckpoint(owner, "c", "t", "r", b"young"))
    assert store.save(NewCheckpoint(owner, "c", "s", "r", b"x")) == old
    wall.now_s += 2 * DAY_S
    assert store.load(old, owner) is None
    assert [one.step for one in store.chain(owner, "c")] == ["t"]
    new = store.save(NewCheckpoint(owner, "c", "s", "r", b"new"))
    assert new != old
    assert [one.step for one in store.chain(owner, "c")] == ["t", "s"]


def test_two_that_save_the_same_step_agree(owner: str, opener: Callable[[], Checkpoints]) -> None:
    rounds, writers = 60, 2
    barrier = threading.Barrier(writers)
    told: list[list[str]] = [[] for _ in range(writers)]
    stores = [opener() for _ in range(writers)]

    def write(me: int) -> None:
        for number in range(rounds):
            barrier.wait(30)
            new = NewCheckpoint(owner, f"c{number}", "s", f"r{me}", f"{me}".encode())
            told[me].append(stores[me].save(new))

    threads = [threading.Thread(target=write, args=(me,)) for me in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told[0] == told[1]
    assert len(set(told[0])) == rounds
    for number, kept in enumerate(told[0]):
        assert [one.id for one in stores[0].chain(owner, f"c{number}")] == [kept]


WRITER = """
import itertools, sys
from controller.store.checkpoints import NewCheckpoint
from tests.redis_server import open_patiently
store = open_patiently(sys.argv[1])
for number in itertools.count():
    new = NewCheckpoint("killed", sys.argv[2], f"step {number}", "r", b"%d" % number * 500)
    print(number, store.save(new), flush=True)
"""


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_what_a_killed_process_was_told_is_there(
    kind: str, tmp_path: Path, server: RedisServer
) -> None:
    where = server.url if kind == "redis" else str(tmp_path / "own.sqlite")
    chain = str(tmp_path)
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, where, chain],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(7)]
        writer.kill()
        lines += writer.stdout.read().splitlines()  # what it said before it died
        writer.stdout.close()
        writer.wait()
        with closing(open_patiently(where)) as store:
            for line in lines[:-1]:
                number, kept = line.split()
                found = store.load(kept, "killed")
                assert found is not None
                assert found.answer == number.encode() * 500
            names = [one.step for one in store.chain("killed", chain)]
        assert names == [f"step {number}" for number in range(len(names))]


# ---- SQLite ----


def test_the_oldest_make_room(tmp_path: Path) -> None:
    wall = Wall()
    with closing(
        SqliteCheckpoints(tmp_path / "c.sqlite", keep_bytes=100_000, wall_s=wall)
    ) as store:
        ids = []
        for number in range(40):
            wall.now_s += 1
            ids.append(store.save(NewCheckpoint("ann", "c", f"{number}", "r", b"x" * 9_000)))
        kept = [one.id for one in store.chain("ann", "c")]
        assert 5 < len(kept) <= 10
        assert kept == ids[-len(kept) :]
        assert store.save(NewCheckpoint("ann", "c", "huge", "r", b"x" * 200_000))
        assert store.chain("ann", "c") == []


def test_the_file_is_its_owners_and_written_through(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "c.sqlite"
    with closing(SqliteCheckpoints(path)) as store:
        store.save(NewCheckpoint("ann", "c", "s", "r", b"x"))
        assert {each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {0o600}
        (level,) = store._db.execute("PRAGMA synchronous").fetchone()
        assert level == 2, "FULL: a commit waits for the disk"


@pytest.mark.parametrize("damage", ["no database", "cut", "scribbled", "newer", "folder"])
def test_a_file_that_cannot_be_used_is_said(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    if damage != "no database":
        with closing(SqliteCheckpoints(path)) as store:
            for number in range(50):
                store.save(NewCheckpoint("ann", "c", f"{number}", "r", b"x" * 5000))
    size = path.stat().st_size if path.exists() else 0
    if damage == "no database":
        path.write_bytes(b"not a database at all" * 100)
    elif damage == "cut":
        os.truncate(path, size // 2)
    elif damage == "scribbled":
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(size - 8192))
    elif damage == "newer":
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 9")
    else:
        path = Path("/proc/nowhere/c.sqlite")
    with pytest.raises(CheckpointsError, match=r"c\.sqlite: .*(move it away|name )"):
        use(path)


def use(path: Path) -> None:
    with closing(SqliteCheckpoints(path)) as store:
        for one in store.chain("ann", "c"):
            store.load(one.id, "ann")
        store.save(NewCheckpoint("ann", "c", "new", "r", b"x" * 5000))


# ---- Redis ----


def test_redis_is_killed_and_comes_back_with_all_of_it() -> None:
    with redis_server() as server, closing(open_patiently(server.url)) as store:
        ids = [store.save(NewCheckpoint("ann", "c", f"{n}", "r", b"x")) for n in range(20)]
        server.kill()
        began_s = time.monotonic()
        with pytest.raises(CheckpointsError, match=r"127\.0\.0\.1:\d+/0: .*see that Redis"):
            store.save(NewCheckpoint("ann", "c", "20", "r", b"x"))
        with pytest.raises(CheckpointsError):
            store.load(ids[0], "ann")
        assert time.monotonic() - began_s < PATIENT_S, "it is said at once"
        server.start()
        assert [one.id for one in store.chain("ann", "c")] == ids
        assert store.save(NewCheckpoint("ann", "c", "0", "r", b"y")) == ids[0]


def test_a_redis_that_does_not_answer_is_not_waited_for_long() -> None:
    with redis_server() as server, closing(RedisCheckpoints(server.url, command_s=3)) as store:
        store.save(NewCheckpoint("ann", "c", "s", "r", b"x"))
        server.pause()
        began_s = time.monotonic()
        with pytest.raises(CheckpointsError, match="imeout"):
            store.save(NewCheckpoint("ann", "c", "t", "r", b"x"))
        assert time.monotonic() - began_s < 6, "it is asked once"
        server.resume()
        assert store.save(NewCheckpoint("ann", "c", "t", "r", b"x"))


def test_redis_drops_a_chain_in_time_and_names_nobody(server: RedisServer) -> None:
    import redis

    keep_s = 5.0
    with closing(
        RedisCheckpoints(server.url, keep_s=keep_s, connect_s=PATIENT_S, command_s=PATIENT_S)
    ) as store:
        store.save(NewCheckpoint("ann@example.org", "order-42", "s", "r", b"x"))
        with closing(redis.Redis.from_url(server.url)) as client:
            keys = client.scan_iter("twinkeel:chain:*")
            (key,) = [key for key in keys if 0 < client.pttl(key) <= 1000 * keep_s]
            assert b"ann" not in key
            assert b"42" not in key
            eventually("it is gone", lambda: client.exists(key) == 0, keep_s + 10)


def test_errors_tell_no_password() -> None:
    unreachable = "redis://:secret@127.0.0.1:1/0"
    with closing(RedisCheckpoints(unreachable)) as store, pytest.raises(CheckpointsError) as caught:
        store.load("cp-0", "ann")
    assert "secret" not in str(caught.value)
    with pytest.raises(CheckpointsError, match="give redis://host"):
        RedisCheckpoints("redis://127.0.0.1:port/0")


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1/0?password=secret",
        "redis://127.0.0.1:1/0?username=ann&password=sec@ret",
        "redis://:sec/ret@127.0.0.1:1/0",
        "redis://ann:sec#ret@127.0.0.1:1/0",
        "redis://ann:sec?ret@127.0.0.1:1/0",
        "redis://ann:sec/ret@ret@127.0.0.1:port/0",
    ],
)
def test_a_password_is_told_wherever_it_stands_nowhere(url: str) -> None:
    with pytest.raises(CheckpointsError) as caught, closing(RedisCheckpoints(url)) as store:
        store.load("cp-0", "ann")
    with pytest.raises(FileError) as refused:
        check_redis(f"{url}{'&' if '=' in url else '?'}db=x", "here")
    for error in (caught.value, refused.value):
        assert "sec" not in str(error)
        assert "ret" not in str(error)
        assert error.__cause__ is None or "sec" not in str(error.__cause__)


def test_a_checkpoint_of_another_version_is_said(server: RedisServer) -> None:
    with closing(RedisCheckpoints(server.url, command_s=PATIENT_S)) as store:
        kept = store.save(NewCheckpoint("vera", "c", "s", "r", b"x"))
        store._redis.hset(module._key(kept), f"m:{kept}", b"\x01")
        with pytest.raises(CheckpointsError, match="another database"):
            store.load(kept, "vera")
