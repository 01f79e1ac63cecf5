"""Processes that the checks start, watch and kill: servers, replicas, the controller."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

START_S = 20.0
SERVING = r"serving (http://[\w.:]+)"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Process:
    """A program that says on its standard output when it is ready, and where it listens: what the
    patterns ``words`` find is kept in ``said``. Output goes to ``log``."""

    def __init__(
        self,
        argv: Sequence[str],
        words: dict[str, str],
        log: Path,
        cpus: frozenset[int] = frozenset(),
        env: dict[str, str] | None = None,
    ) -> None:
        self.argv = list(argv)
        self.log = log
        self.said: dict[str, str] = {}
        self._words = words
        self._cpus = cpus
        self._env = env
        self._popen: subprocess.Popen[bytes] | None = None
        self._read_from = 0

    @property
    def pid(self) -> int:
        if self._popen is None:
            raise RuntimeError(f"{self.argv[:4]} was not started")
        return self._popen.pid

    def launch(self) -> None:
        """Start it, without waiting."""
        self.said.clear()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._read_from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(
                self.argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self._env,
                start_new_session=True, preexec_fn=self._prepare,
            )  # fmt: skip

    def _prepare(self) -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives the checks
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)

    async def ready(self, within_s: float = START_S) -> None:
        """Wait until it has said all its words."""
        end_s = time.monotonic() + within_s
        while not self._heard():
            if self._popen is not None and self._popen.poll() is not None:
                raise RuntimeError(f"{self.argv} ended at once:\n{self._output()[-3000:]}")
            if time.monotonic() > end_s:
                await self.stop(signal.SIGKILL)
                raise RuntimeError(
                    f"{self.argv} was not ready within {within_s} s:\n{self._output()[-3000:]}"
                )
            await asyncio.sleep(0.01)

    async def start(self) -> None:
        self.launch()
        await self.ready()

    def _output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._read_from)
            return file.read().decode(errors="replace")

    def _heard(self) -> bool:
        output = self._output()
        for name, pattern in self._words.items():
            found = re.search(pattern + r"[^\n]*\n", output)
            if found is not None:
                self.said[name] = found.group(1)
        return len(self.said) == len(self._words)

    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def send(self, number: int) -> None:
        """A signal, if it still runs."""
        if self.alive():
            os.kill(self.pid, number)

    async def stop(self, number: int = signal.SIGTERM, within_s: float = 15.0) -> int | None:
        """Ask it to end, and wait. Returns its exit code, None: it had to be killed."""
        if self._popen is None:
            return None
        if self.alive():
            self.send(signal.SIGCONT)
            self.send(number)
        code = await self.ended(within_s)
        if code is None:
            self.send(signal.SIGKILL)
            await self.ended(5.0)
        return code

    async def ended(self, within_s: float) -> int | None:
        """Wait for its end; None: it goes on."""
        end_s = time.monotonic() + within_s
        while self._popen is not None and time.monotonic() < end_s:
            code = self._popen.poll()
            if code is not None:
                return code
            await asyncio.sleep(0.01)
        return None

    def cpu_s(self) -> float:
        """CPU time of all its threads so far, dead ones too, exact to the nanosecond."""
        # The clock that clock_getcpuclockid() gives for a process, which Python does not offer.
        return time.clock_gettime((~self.pid << 3) | 2)

    def rss_bytes(self) -> int:
        """Memory that it holds now."""
        fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * resource.getpagesize()

    def threads(self) -> list[int]:
        """Ids of its threads, as the system knows them."""
        return [int(name) for name in os.listdir(f"/proc/{self.pid}/task")]

    def files(self) -> int:
        """File descriptors that it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def mock(log: Path, ports: int = 1, cpus: frozenset[int] = frozenset()) -> Process:
    """A mock server; ``said["mock"]`` is its URLs."""
    argv = [sys.executable, "-m", "tests.bench.gateway.mock", "--ports", str(ports)]
    return Process(argv, {"mock": r"mock (http[^\n]+)"}, log, cpus)


def bare(log: Path, upstreams: Sequence[str], cpus: frozenset[int] = frozenset()) -> Process:
    """The floor; ``said["serving"]`` is its URL."""
    argv = [sys.executable, "-m", "tests.bench.gateway.bare", *upstreams]
    return Process(argv, {"serving": SERVING}, log, cpus)


def controller(
    log: Path,
    upstreams: Sequence[str],
    data: Path,
    more: Sequence[str] = (),
    cpus: frozenset[int] = frozenset(),
) -> Process:
    """The controller; ``said`` has ``serving`` and ``admin``."""
    argv = [sys.executable, "-m", "twinkeel", "serve", "--policy", "stable", "--port", "0"]
    argv += ["--admin-port", "0", "--data", str(data)]
    for url in upstreams:
        argv += ["--upstream", url]
    words = {"serving": SERVING, "admin": r"admin API (http://[\w.:]+)"}
    return Process([*argv, *more], words, log, cpus)


def twin(log: Path, port: int = 0, more: Sequence[str] = ()) -> Process:
    """A twin-served replica; ``said["serving"]`` is its URL."""
    argv = [sys.executable, "-m", "twinkeel", "twin", "serve"]
    argv += ["--profile", "h100-sxm/qwen3-8b", "--port", str(port)]
    return Process([*argv, *more], {"serving": SERVING}, log)
