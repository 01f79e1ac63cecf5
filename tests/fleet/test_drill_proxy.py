"""The link between controller and engine really is as bad as it is told to be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from controller.drills.proxy import CLEAR, RESEND_S, Link, Proxy, read_link, write_link
from tests.controller.processes import PROFILE, eventually
from tests.fleet.ports import lasting_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def link() -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy before a server that answers each line with the same line."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                writer.write(line)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    proxy = Proxy(HOST, server.sockets[0].getsockname()[1], seed=1)
    try:
        yield proxy, await proxy.start(HOST, 0)
    finally:
        await proxy.close()
        server.close()


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())


async def ask(port: int, text: bytes = b"keel\n") -> tuple[bytes, float]:
    """What comes back, and after how many seconds; empty: the connection ended."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(text)
    try:
        answer = await reader.readline()
    finally:
        writer.transport.abort()
    return answer, time.monotonic() - began_s


@in_a_loop
async def test_a_clear_link_passes_everything_on_in_order() -> None:
    async with link() as (_, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        sent = b"".join(b"%d\n" % number for number in range(20_000))
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()


@in_a_loop
async def test_a_delay_is_there_both_ways_and_lets_pieces_follow_each_other() -> None:
    async with link() as (proxy, port):
        proxy.become(Link("delay", delay_ms=150))
        answers = await asyncio.gather(*(ask(port) for _ in range(40)))
        assert all(answer == b"keel\n" for answer, _ in answers)
        assert min(seconds for _, seconds in answers) >= 0.3
        assert max(seconds for _, seconds in answers) < 0.3 * 40  # not one after another


@in_a_loop
async def test_what_is_lost_comes_later_and_whole() -> None:
    async with link() as (proxy, port):
        proxy.become(Link("loss", loss_permille=300))
        draw, late_s = proxy._late_s, list[float]()

        def drawn() -> float:
            late_s.append(draw())
            return late_s[-1]

        proxy._late_s = drawn  # type: ignore[method-assign]
        answers = await asyncio.gather(*(ask(port, b"%d\n" % each) for each in range(40)))
        assert [answer for answer, _ in answers] == [b"%d\n" % each for each in range(40)]
        assert len(late_s) >= 80, "each way of each"
        assert 0.2 < sum(each > 0 for each in late_s) / len(late_s) < 0.4  # three of ten are lost
        assert sum(seconds >= RESEND_S for _, seconds in answers) >= 10  # 20 are expected


@in_a_loop
async def test_a_reset_breaks_what_is_open_and_what_comes() -> None:
    async with link() as (proxy, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"keel\n")
        assert await reader.readline() == b"keel\n"
        proxy.become(Link("reset"))
        with pytest.raises(ConnectionResetError):
            await reader.readline()
        with pytest.raises(ConnectionResetError):
            await ask(port)
        proxy.become(CLEAR)
        assert (await ask(port))[0] == b"keel\n"
        writer.transport.abort()


@in_a_loop
async def test_a_black_hole_passes_nothing_on_until_it_is_over() -> None:
    async with link() as (proxy, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"before\n")
        assert await reader.readline() == b"before\n"
        proxy.become(Link("blackhole"))
        writer.write(b"held\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readline(), 0.3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(port), 0.3)
        proxy.become(CLEAR)
        assert await asyncio.wait_for(reader.readline(), 30) == b"held\n"
        writer.transport.abort()


@in_a_loop
async def test_a_server_behind_it_that_is_gone_ends_the_connection() -> None:
    async with link() as (proxy, port):
        proxy._port = 1  # nobody listens there
        assert (await ask(port))[0] == b""


def test_a_link_without_a_file_or_with_a_broken_one_is_clear(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    assert read_link(path) == CLEAR
    path.write_text('{"kind": "worse"}')
    assert read_link(path) == CLEAR
    write_link(path, Link("loss", loss_permille=20))
    assert read_link(path) == Link("loss", loss_permille=20)


# The process


def children_of(pid: int) -> list[int]:
    said = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(each) for each in said.split()]


def is_well(url: str, within_s: float) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=within_s) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A served twin behind a link, as a fleet file starts it; (process, URL)."""
    port = lasting_port(HOST)
    command = [
        sys.executable, "-m", "controller.drills.proxy", "--port", str(port),
        "--state", str(tmp_path / "link.json"), "--",
        sys.executable, "-m", "twin.serve", "--profile", PROFILE, "--port", "{inner}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://{HOST}:{port}"
    try:
        eventually("the engine answers", lambda: is_well(url, 1.0), within_s=60.0)
        yield process, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_real_engine_behind_it_is_cut_off_and_comes_back_and_ends_as_it_ends(
    engine: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    process, url = engine
    write_link(tmp_path / "link.json", Link("blackhole"))
    eventually("it cannot be reached", lambda: not is_well(url, 0.2), within_s=30.0)
    write_link(tmp_path / "link.json", CLEAR)
    eventually("it can be reached again", lambda: is_well(url, 1.0), within_s=30.0)
    (child,) = children_of(process.pid)
    os.kill(child, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_whoever_ends_the_proxy_ends_the_engine(
    engine: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, _ = engine
    (child,) = children_of(process.pid)
    process.terminate()
    assert process.wait(30) == 0
    assert not Path(f"/proc/{child}").exists()


def test_a_proxy_needs_something_to_stand_before(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "controller.drills.proxy", "--port", "1", "--state", "x"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "give one of --to PORT and" in told.stderr
