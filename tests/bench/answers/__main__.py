"""``make answers``: how far answers can be trusted, and what becomes of chains and limits.

Each part measures for itself and can be run alone; ``PARTS="leases kept"`` are some of them. What
is not measured this time stays as it was measured last.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.figures import read_figures, require, show, write_figures

if TYPE_CHECKING:
    from tests.figures import Figure

OUT = Path("build/figures/answers.json")
PARTS = ("contradictions", "kept", "steps", "leases", "sessions", "clean", "noisy")
"""In this order: those with vLLM last."""


def measured(part: str, quick: bool) -> list[Figure]:
    """What one part says."""
    module = importlib.import_module(f"tests.bench.answers.{part}")
    began_s = time.monotonic()
    print(f"{part} ...", file=sys.stderr, flush=True)
    found: list[Figure] = module.measure(quick)
    print(f"{part}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="none: all")
    parser.add_argument("--quick", action="store_true", help="shorter, and not kept")
    given = parser.parse_args()
    kept = {figure.name: figure for figure in read_figures(OUT)}
    new: list[Figure] = []
    for part in given.parts or PARTS:
        new += measured(part, given.quick)
        kept.update({figure.name: figure for figure in new})
        if not given.quick:
            write_figures(OUT, list(kept.values()))
    show(new)
    complaints = require(new, [])
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
