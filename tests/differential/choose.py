"""Record schedules with vLLM and keep a few hundred of them for the test that needs no vLLM.

    python -m tests.differential.choose

Every rare path is kept several times in both modes, the shortest schedules first; then every family
gets its share at random. Writes `recorded.jsonl.xz` beside this file, the same bytes every time.
"""

from __future__ import annotations

import json
import lzma
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from tests.differential.oracle import BUILD, record, recorded
from tests.differential.probe import RARE_PATHS
from tests.differential.workloads import FAMILIES, load, workloads

RECORDED = Path(__file__).with_name("recorded.jsonl.xz")
FIRST_SEED = 10_000
SEEDS_PER_FAMILY = 60
TELLING = Path(__file__).with_name("telling.workloads")
"""Workloads that told a subtly wrong engine from vLLM when few others did: always kept.

Found by changing the engine on purpose and looking for what notices; family `telling`.
"""
EACH_PATH = 8
"""Schedules kept of each rare path, for each mode."""
EACH_FAMILY = 6
"""Schedules kept of each family, for each mode, whatever they do."""


def choose(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines to keep, in their old order."""
    kept = {index for index, line in enumerate(lines) if line["workload"]["family"] == "telling"}
    have: Counter[tuple[str, bool]] = Counter()
    by_length = sorted(range(len(lines)), key=lambda index: (len(lines[index]["steps"]), index))
    rarest_first = sorted(
        RARE_PATHS, key=lambda path: sum(bool(line["paths"].get(path)) for line in lines)
    )

    def keep(index: int) -> None:
        if index in kept:
            return
        kept.add(index)
        mode = lines[index]["workload"]["async_scheduling"]
        have.update((path, mode) for path, count in lines[index]["paths"].items() if count)

    for path in rarest_first:
        for index in by_length:
            mode = lines[index]["workload"]["async_scheduling"]
            if lines[index]["paths"].get(path) and have[path, mode] < EACH_PATH:
                keep(index)
    for family in FAMILIES:
        for mode in (False, True):
            of_family = [
                index
                for index, line in enumerate(lines)
                if line["workload"]["family"] == family
                and line["workload"]["async_scheduling"] == mode
            ]
            dice = random.Random(f"{family}/{mode}")  # noqa: S311 (test data)
            for index in dice.sample(of_family, min(EACH_FAMILY, len(of_family))):
                keep(index)
    return [lines[index] for index in sorted(kept)]


def write(lines: list[dict[str, Any]], path: Path = RECORDED) -> None:
    """Compress the lines."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path = RECORDED) -> list[dict[str, Any]]:
    """The lines that `write` kept."""
    text = lzma.decompress(path.read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Record the candidates, choose, write."""
    candidates = BUILD / "oracle" / "candidates.jsonl"
    count = 2 * SEEDS_PER_FAMILY * len(FAMILIES)
    telling = [load(line) for line in TELLING.read_text(encoding="utf-8").splitlines()]
    record(candidates, chain(workloads(count, FIRST_SEED), telling))
    kept = choose(list(recorded(candidates)))
    write(kept)
    print(f"kept {len(kept)} schedules in {RECORDED.stat().st_size / 1000:.0f} kB: {RECORDED}")


if __name__ == "__main__":
    main()
