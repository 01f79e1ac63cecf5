"""Fleet files for tests, and what runs on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from controller.fleet.config import FleetFile
from controller.fleet.local import LocalFleet
from controller.fleet.processes import running_in

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE = Path(__file__).with_name("engine.py")
ENGINE_COMMAND = (
    sys.executable, "-S", str(ENGINE), "--port", "{port}", "--model", "{model}",
    "--root", "{weights}",
)  # fmt: skip
TWIN_COMMAND = (
    sys.executable, "-m", "twinkeel", "twin", "serve", "--profile", "{weights}",
    "--model", "{model}", "--version", "{version}", "--host", "{host}", "--port", "{port}",
)  # fmt: skip
"""A served twin; the profile stands for its weights."""
QUICK = {"first_s": 0.05, "most_s": 0.4, "forgive_s": 30.0}


def file_of(replicas: int | Sequence[Any] = 1, standbys: int | Sequence[Any] = 0,
            command: Sequence[str] = ENGINE_COMMAND, backoff: dict[str, Any] | None = None,
            **model: Any) -> FleetFile:  # fmt: skip
    """A fleet of one model ``m``; places are counts, or mappings of their parts."""
    given: dict[str, Any] = {
        "versions": {"v1": "/weights/v1", "v2": "/weights/v2"}, "version": "v1",
        "replicas": [{}] * replicas if isinstance(replicas, int) else list(replicas),
        "standbys": [{}] * standbys if isinstance(standbys, int) else list(standbys),
        "command": list(command), "start_s_most": 20.0, "stop_s_most": 0.5,
    }  # fmt: skip
    document = {"models": {"m": {**given, **model}}, "backoff": {**QUICK, **(backoff or {})}}
    return msgspec.convert(document, FleetFile)


def patient(folder: Path, silent_ms: int = 30_000, more: str = "") -> str:
    """A policy for a machine whose processors have other work, in a file: nothing is late, and
    whoever says nothing for less than ``silent_ms`` is not silent."""
    path = folder / "patient.yaml"
    path.write_text(
        "schema: 1\nname: patient\ndiscipline: tiered\n"
        f"health: {{first_grace_ms: {silent_ms}, stall_ms: {silent_ms}}}\n"
        f"classes: {{p0_deadline_ms: 60000, p1_deadline_ms: 60000, p2_deadline_ms: 60000}}\n{more}"
    )
    return str(path)


def members(folder: Path, name: str = "") -> list[int]:
    """Processes that run for a fleet, or for one of its slots."""
    found = running_in(folder)
    return sorted(pid for pid, slot in found.items() if name in ("", slot))


class LocalBench:
    """A local fleet for ``tests.fleet.conformance``."""

    crashes = True
    within_s = 30.0

    def __init__(self, folder: Path, file: FleetFile, serving: tuple[int, ...],
                 spares: tuple[int, ...]) -> None:  # fmt: skip
        self.folder = folder
        self.fleet = LocalFleet(file, folder)
        self.serving = serving
        self.spares = spares

    def runs(self, replica: int) -> bool:
        return bool(members(self.folder, self.fleet.view().slots[replica].name))

    async def crash(self, replica: int) -> None:
        os.kill(self.fleet.pid(replica), signal.SIGKILL)

    async def clear(self) -> None:
        left = await asyncio.to_thread(members, self.folder)
        assert not left, f"processes are left: {left}"
