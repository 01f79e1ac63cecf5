"""A machine with two cards, for tests: a fake ``libnvidia-ml.so.1`` that pynvml loads by itself.

``CUT`` is an 80 GB card cut into four MIG slices, ``WHOLE`` one beside it that is not. What the
library answers stands in a text file (see ``fake_nvml/fake.h``), which tests change at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pynvml
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parent / "fake_nvml"
LIBRARY = "libnvidia-ml.so.1"
STATE_VARIABLE = "FAKE_NVML_STATE"
FLAGS = (
    "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread",
)  # fmt: skip

CUT = "GPU-11111111-1111-4111-8111-111111111111"
WHOLE = "GPU-22222222-2222-4222-8222-222222222222"
LARGE_SLICE = "MIG-31111111-1111-5111-8111-111111111111"
SMALL_SLICES = tuple(f"MIG-1{n}111111-1111-5111-8111-111111111111" for n in (1, 2, 3))
ECC_DOUBLE, XID = 2, 8
"""Types of NVML's events."""
CARD = {
    "kind": "card", "name": "NVIDIA H100 80GB HBM3", "capability": "9.0",
    "memory_total_mb": 81559, "memory_free_mb": 60000, "gpu_pct": 70, "memory_pct": 40,
    "pcie_generation": 5, "pcie_lanes": 16, "pcie_rx_kb_s": 6_300_000, "pcie_tx_kb_s": 1_000_000,
    "temperature_c": 55, "slowdown_c": 90, "power_mw": 350_000, "power_limit_mw": 700_000,
    "clock_reasons": 0, "ecc_corrected": 0, "ecc_uncorrected": 0, "remap_pending": 0,
    "recovery_action": 0, "event_types": 0x8F, "nvlinks": "1" * 18, "mig": 0, "mig_most": 7,
}  # fmt: skip


def library_folder() -> Path:
    """Where the compiled library lies: built once for each version of its sources."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"fake-nvml-{os.getuid()}-{digest.hexdigest()[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / LIBRARY
    if not library.exists():
        made = folder / f"{os.getpid()}.so"
        code = [str(source) for source in sources if source.suffix == ".c"]
        subprocess.run(["cc", *FLAGS, "-o", str(made), *code], check=True)
        made.rename(library)
    return folder


class FakeCards:
    """The state of the machine's cards, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "cards"
        self._facts: dict[tuple[str, str], str] = {}
        self._serial = 0
        self._begin()

    def _begin(self) -> None:
        facts: dict[str, dict[str, object]] = {
            "system": {"driver": "570.133.20", "nvml": "12.570.133.20", "init": 0},
            CUT: {**CARD, "pci": "00000000:1B:00.0", "mig": 1, f"near.{WHOLE}": 50},
            WHOLE: {**CARD, "pci": "00000000:43:00.0", f"nvlink.{CUT}": 1},
        }
        layout = [(LARGE_SLICE, "3g.40gb", 40448, 2)]
        layout += [
            (uuid, "1g.10gb", 9856, number) for number, uuid in enumerate(SMALL_SLICES, start=7)
        ]
        for uuid, profile, total_mb, instance in layout:
            facts[uuid] = {
                "kind": "slice", "parent": CUT, "gi": instance, "ci": 0,
                "name": f"{CARD['name']} MIG {profile}",
                "memory_total_mb": total_mb, "memory_free_mb": total_mb - 1000,
            }  # fmt: skip
        self._facts = {
            (subject, key): str(value)
            for subject, given in facts.items()
            for key, value in given.items()
        }
        self._write()

    @property
    def environ(self) -> dict[str, str]:
        """For another process, which then finds these cards."""
        return {"LD_LIBRARY_PATH": str(library_folder()), STATE_VARIABLE: str(self.path)}

    def get(self, subject: str, key: str) -> str | None:
        """A fact, as it is now."""
        with self._changing(write=False):
            return self._facts.get((subject, key))

    def set(self, subject: str, **facts: object) -> None:
        """Change facts of a card, a slice or the system; None: it is not told any more."""
        with self._changing():
            for key, value in facts.items():
                if value is None:
                    self._facts.pop((subject, key), None)
                else:
                    self._facts[subject, key] = str(value)

    def fail(self, subject: str, function: str, code: int = 3) -> None:
        """Let a function of the library give an error for it; 0: no more."""
        self.set(subject, **{f"error.{function}": code})

    def remove(self, subject: str) -> dict[str, str]:
        """It is not there any more; what is returned can be given to ``set`` to put it back."""
        with self._changing():
            gone = {key: value for (uuid, key), value in self._facts.items() if uuid == subject}
            for key in gone:
                del self._facts[subject, key]
        return gone

    def event(
        self, uuid: str, kind: int, data: int = 0, instance: int | None = None, **facts: object
    ) -> None:
        """NVML tells an event of a card, or of its GPU instance; in the same moment ``facts`` of
        the card are others."""
        self._serial += 1
        where = "" if instance is None else f" {instance} 0"
        with self._changing():
            self._facts["event", str(self._serial)] = f"{uuid} {kind} {data}{where}"
            for key, value in facts.items():
                self._facts[uuid, key] = str(value)

    def xid(self, uuid: str, code: int, instance: int | None = None, **facts: object) -> None:
        self.event(uuid, XID, code, instance, **facts)

    @contextlib.contextmanager
    def _changing(self, write: bool = True) -> Iterator[None]:
        """What the library wrote meanwhile is kept."""
        with open(f"{self.path}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._facts.clear()
            for line in self.path.read_text(encoding="utf-8").splitlines():
                subject, key, *value = line.split(" ", 2)
                self._facts[subject, key] = " ".join(value)
            yield
            if write:
                self._write()

    def _write(self) -> None:
        text = "".join(f"{uuid} {key} {value}\n" for (uuid, key), value in self._facts.items())
        made = self.path.with_suffix(".new")
        made.write_text(text, encoding="utf-8")
        made.rename(self.path)


@contextlib.contextmanager
def in_this_process(cards: FakeCards) -> Iterator[ctypes.CDLL]:
    """Let pynvml find ``cards`` here. The loader looks at its path only when a process starts, so
    the library is put where pynvml keeps the one that it has loaded; the rest is pynvml's own."""
    library = ctypes.CDLL(str(library_folder() / LIBRARY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", library)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        for name, value in cards.environ.items():  # for the processes that are started from here
            patch.setenv(name, value)
        yield library
