"""Processes of this machine: started so that they outlive the controller, watched, ended, found
again.

Each runs in a session of its own. A record of it lies beside its log: process id, when it began,
and in which run of the machine, so that another process with its number is never taken for it.
Everything it starts is known by a mark in its environment or by its output, and is ended with it,
even where it has left the session or outlived who started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MARK = "TWINKEEL_FLEET_SLOT"
"""Environment variable that everything of a slot has: which folder's, and which slot's."""
SECRETS = frozenset({"TWINKEEL_ADMIN_TOKEN", "TWINKEEL_DEPLOY_KEY_FILE"})
"""Of the controller's own environment, what no server needs."""
ID_FILE = "id"
"""In a fleet's folder: what begins the marks of its slots."""
LOG_BYTES_MOST = 16 << 20
"""More of a log is moved to the one before it."""
SWEEPS = 200
SWEEP_S = 0.01
"""How often, and how soon again, it is looked whether everything of a slot has ended."""
TAIL_BYTES = 4096


class Record(msgspec.Struct, frozen=True):
    """What is kept of a process, for the next controller."""

    pid: int
    started: int
    """Clock ticks from the machine's start to the process's, as the kernel counts them."""
    boot: str
    """Id of this run of the machine."""
    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    """What its environment has beside the controller's own."""
    model: str
    version: str
    weights: str
    url: str
    serves: bool
    """Its gate is open, or opens when it is warm; else it waits for somebody's place."""
    warmed: bool = False
    """It has answered its first prompts."""


def boot_id() -> str:
    """Of this run of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def started_of(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; 0: there is none, or only what
    its parent has not asked about yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The command stands in brackets and may hold anything, brackets too.
    fields = text[text.rfind(")") + 2 :].split()
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def alive(record: Record) -> bool:
    """Whether the process of a record runs: the same one, not another with its number."""
    started = started_of(record.pid)
    return started > 0 and record.boot == boot_id() and started == record.started


def read_record(path: Path) -> Record | None:
    """The record in a file; None: there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def write_file(path: Path, what: object) -> None:
    """Put JSON into a file, whole or not at all."""
    making = path.with_name(f"{path.name}.making")
    making.write_bytes(msgspec.json.encode(what))
    making.replace(path)


class Family:
    """Everything that runs for the slots of a folder, whoever started it.

    A process belongs to a slot by the mark in its environment; where it has overwritten that, as
    vLLM's engine cores do to show a name of their own, by its output, which goes to the slot's log.

    Args:
        folder: of the logs.
        owner: what begins the marks of this folder's slots.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = f"{folder.resolve()}/"
        self._owner = f"{owner}/"

    def mark(self, name: str) -> str:
        """Of a slot."""
        return f"{self._owner}{name}"

    def slot_of(self, pid: int) -> str:
        """The slot that a process runs for; empty: none of these, or it has ended."""
        needle = f"{MARK}={self._owner}".encode()
        try:
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(needle):
                    return variable[len(needle) :].decode(errors="replace")
            for number in (1, 2):
                output = os.readlink(f"/proc/{pid}/fd/{number}").removesuffix(" (deleted)")
                name = output.removesuffix(".1")
                if name.startswith(self._folder) and name.endswith(".log"):
                    return name.removeprefix(self._folder).removesuffix(".log")
        except OSError:  # somebody else's, or gone
            pass
        return ""

    def members(self) -> dict[int, str]:
        """Every process of a slot, with the slot. Some 30 us for each process of this machine."""
        found: dict[int, str] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                slot = self.slot_of(int(entry.name))
                if slot and started_of(int(entry.name)):
                    found[int(entry.name)] = slot
        return found

    def sweep(self, name: str) -> int:
        """SIGKILL to everything that runs for a slot, until nothing does; how many there were.
        Blocks, for two seconds at most."""
        ended: set[int] = set()
        for _ in range(SWEEPS):
            members = [pid for pid, slot in self.members().items() if slot == name]
            if not members:
                break
            for pid in members:
                self._kill(pid, name)
            ended.update(members)
            time.sleep(SWEEP_S)
        return len(ended)

    def _kill(self, pid: int, name: str) -> None:
        """Unless another process has taken the number meanwhile."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        try:
            if self.slot_of(pid) == name:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:
            pass
        finally:
            os.close(fd)


def running_in(folder: Path) -> dict[int, str]:
    """Processes that run for the slots of a fleet's folder, with their slots; whoever asks."""
    return Family(folder, (folder / ID_FILE).read_text(encoding="ascii")).members()


class Child:
    """A process that was started here, or by a controller before.

    Args:
        on_exit: called once, with how it ended, in words.
    """

    def __init__(
        self, pid: int, own: subprocess.Popen[bytes] | None, on_exit: Callable[[str], object]
    ) -> None:
        self.pid = pid
        self._own = own
        self._on_exit = on_exit
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended)

    def terminate(self) -> None:
        """Ask it to end; one that is stopped goes on first, or it would not hear."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it, and its session, at once."""
        if self._own is not None and self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def _ended(self) -> None:
        how = "ended"
        if self._own is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # what it left; its number is still its
            code = self._own.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self.forget()
        self._on_exit(how)

    def forget(self) -> None:
        """Do not look after it any more; it runs on."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def adopt(record: Record, on_exit: Callable[[str], object]) -> Child | None:
    """Look after a process that a controller before started; None: it has ended meanwhile."""
    try:
        child = Child(record.pid, None, on_exit)
    except OSError:
        return None
    if alive(record):  # asked after it was taken hold of: from now on its number is not given away
        return child
    child.forget()
    return None


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    mark: str,
    log: Path,
    on_exit: Callable[[str], object],
    umask: int = -1,
) -> Child:
    """Start a process; its output goes to ``log``, and what was there to the one before it.

    Args:
        umask: what it keeps from others of the files that it makes; -1: as the controller.

    Raises:
        OSError: it cannot be started.
    """
    keep_log(log)
    environment = {key: value for key, value in os.environ.items() if key not in SECRETS}
    with log.open("ab") as output:
        own = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**environment, **env, MARK: mark}, start_new_session=True, umask=umask,
        )  # fmt: skip
    try:
        return Child(own.pid, own, on_exit)
    except OSError:  # no descriptor is left: what cannot be watched must not run
        with contextlib.suppress(ProcessLookupError):
            os.killpg(own.pid, signal.SIGKILL)
        own.wait()
        raise


def keep_log(log: Path) -> None:
    """Move it aside: a new process begins a new one."""
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(f"{log.name}.1"))


def bound_log(log: Path) -> None:
    """Move what a process has written aside if it is too much; the process writes on. Where
    there is no room for a copy, there is none."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES_MOST:
            with contextlib.suppress(OSError):
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def last_line(log: Path) -> str:
    """The last line of a log that says something, cut short; empty: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
