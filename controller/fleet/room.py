"""Is there room for a new version of a model beside the one that serves?

On cards by what they say is free; without cards by what this machine says. What a standby's own
process holds is counted as free, since it is stopped before the new one starts.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from controller.fleet.memory import MIB, needed_mb
from policy.files import FileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.fleet.config import Model
    from controller.fleet.memory import Need
    from controller.gpus.view import CardView

UTILIZATION = 0.92
"""Of a card's memory, which vLLM takes where ``--gpu-memory-utilization`` does not say (0.32)."""
FIXED = "--kv-cache-memory-bytes"
"""With it vLLM takes no share of the card."""


class Spot(NamedTuple):
    """A slot in which the new version is to be started."""

    name: str
    gpus: tuple[str, ...] = ()
    """UUIDs of its cards or its slice; empty: it runs on the processor."""
    args: tuple[str, ...] = ()
    """Of its server, beside the model's."""
    runs: str = ""
    """Weights of the process that is stopped there first; empty: nothing runs."""
    pid: int = 0
    """Of that process, the leader of its group."""


def lacking(
    model: Model, version: str, weights: str, spots: Sequence[Spot], cards: Mapping[str, CardView]
) -> list[str]:
    """What there is no room for, each in a sentence with the sum; empty: there is room. Reads files
    and ``/proc``, so it is not for the event loop.

    Args:
        spots: where it is started at the same time.
        cards: by UUID; one that is not there, or does not tell, is taken to have room.

    Raises:
        FileError: nothing says how large the weights are.
    """
    found: list[str] = []
    here = [spot for spot in spots if not spot.gpus]
    if here:
        needs = [needed_mb(model, weights, spot.args) for spot in here]
        found += _in_ram(version, needs, here)
    for spot in spots:
        if spot.gpus:
            why = _on_cards(model, version, weights, spot, cards)
            found += [why] if why else []
    return found


def _in_ram(version: str, needs: Sequence[Need], spots: Sequence[Spot]) -> list[str]:
    free_mb = available_mb()
    held_mb = resident_mb(frozenset(spot.pid for spot in spots if spot.runs and spot.pid))
    total_mb = sum(need.total_mb for need in needs)
    if total_mb <= free_mb + held_mb:
        return []
    names = " and ".join(spot.name for spot in spots)
    times = f" for each of {len(spots)} = {total_mb} MB" if len(spots) > 1 else ""
    return [
        f"{names}: {version} needs {needs[0]}{times}; this machine has {free_mb} MB"
        f"{_more(held_mb)}: {total_mb - free_mb - held_mb} MB are lacking"
    ]  # fmt: skip


def _on_cards(
    model: Model, version: str, weights: str, spot: Spot, cards: Mapping[str, CardView]
) -> str:
    need = needed_mb(model, weights, spot.args)
    share_mb = -(-need.total_mb // len(spot.gpus))
    for uuid in spot.gpus:
        card = cards.get(uuid)
        if card is None or card.memory_total_mb is None or card.memory_free_mb is None:
            continue
        most_mb = _taken_mb(model, spot, card.memory_total_mb)
        if most_mb and share_mb > most_mb:
            return (
                f"{spot.name}: {version} needs {need}, and vLLM is given {most_mb} MB of {uuid}:"
                f" {share_mb - most_mb} MB are lacking"
            )  # fmt: skip
        held_mb = 0
        if spot.runs:
            with contextlib.suppress(FileError):  # how large it is, nothing says
                before = needed_mb(model, spot.runs, spot.args).total_mb
                held_mb = most_mb or -(-before // len(spot.gpus))
            held_mb = min(held_mb, card.memory_total_mb - card.memory_free_mb)
        wanted_mb = most_mb or share_mb
        lacks_mb = wanted_mb - card.memory_free_mb - held_mb
        if lacks_mb > 0:
            takes = f", and vLLM takes {most_mb} MB for it" if most_mb else ""
            return (
                f"{spot.name}: {version} needs {need}{takes}; {uuid} has {card.memory_free_mb} MB"
                f"{_more(held_mb)}: {lacks_mb} MB are lacking"
            )  # fmt: skip
    return ""


def _more(held_mb: int) -> str:
    return f" free, and {held_mb} MB more once what runs there has ended" if held_mb else " free"


def _taken_mb(model: Model, spot: Spot, total_mb: int) -> int:
    """What vLLM takes of a card, whatever it needs, and does not start without; 0: it is another
    server, or takes what it is told."""
    words = (*model.command, *model.args, *spot.args)
    if not any("vllm" in Path(word).name for word in model.command[:3]):
        return 0
    if any(word.partition("=")[0] == FIXED for word in words):
        return 0
    share = UTILIZATION
    for word, after in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name == "--gpu-memory-utilization":
            with contextlib.suppress(ValueError):  # vLLM will refuse it
                share = float(value if equals else after)
    return int(total_mb * share)


def available_mb() -> int:
    """Memory of this machine that can be had without swapping, in MiB."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def resident_mb(groups: frozenset[int]) -> int:
    """Memory that these process groups hold, what they share counted once, in MiB."""
    total = 0
    for entry in os.scandir("/proc") if groups else ():
        with contextlib.suppress(OSError, ValueError, StopIteration):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) in groups:
                text = Path(entry.path, "smaps_rollup").read_text(encoding="ascii")
                row = next(row for row in text.splitlines() if row.startswith("Pss:"))
                total += int(row.split()[1]) * 1024
    return total // MIB
