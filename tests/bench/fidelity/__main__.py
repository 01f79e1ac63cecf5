"""How well the twin predicts: ``make fidelity``, about half an hour of which most is real vLLM.

Writes ``build/figures/fidelity.json``, and ``build/fidelity/`` with each request's measured and
predicted times, from which `charts` draws the plots of docs/fidelity.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.fidelity import cpu, rows, stack
from tests.bench.fidelity.h100 import h100
from tests.bench.fidelity.plugin import plugin_overhead_pct
from tests.bench.fidelity.rtx4090 import rtx4090
from tests.figures import Figure, require, show, write_figures

if TYPE_CHECKING:
    from collections.abc import Sequence

FIGURES = Path("build/figures/fidelity.json")
SERIES = Path("build/fidelity")
PARTS = ("rtx4090", "h100", "cpu", "plugin")
LOADS = (
    "poisson30", "poisson60", "poisson80", "poisson95", "poisson110", "gamma", "azure", "mooncake",
    "prefixes", "priority", "tight",
)  # fmt: skip
REQUIRED = (
    *(f"cpu_{load}_{metric}_pct" for load in LOADS for metric in rows.BARS),
    "cpu_calibration_accepted", "cpu_calibration_level_pct", "cpu_saturation_pct",
    "cpu_preemptions_pct", "cpu_prefix_hits_pct", "rtx4090_worst_row_pct",
    "h100_llama2_worst_pct", "stack_worst_e2e_mean_pct", "plugin_overhead_pct",
)  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(part: str) -> tuple[list[Figure], dict[str, Any]]:
    """Figures and plot data of one part."""
    if part == "rtx4090":
        return rtx4090()
    if part == "h100":
        return h100()
    if part == "plugin":
        value, how = plugin_overhead_pct()
        return [Figure("plugin_overhead_pct", round(value, 3), "%", "<= 1", how)], {}
    outcome = cpu.measure(Path(os.environ["TWINKEEL_DATA"]) / "traces", _say)
    figures = [*rows.figures(outcome), *stack.figures(*outcome.stack)]
    return figures, rows.as_json(outcome)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"some of {', '.join(PARTS)}")
    parts = parser.parse_args(argv).parts
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if not os.environ.get("TWINKEEL_DATA"):
        parser.error("set TWINKEEL_DATA to the directory that holds traces/ and profiles/")
    SERIES.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []
    for part in parts:
        _say(f"--- {part}")
        found, series = measure(part)
        figures += found
        write_figures(SERIES / f"{part}.figures.json", found)
        if series:
            (SERIES / f"{part}.json").write_text(json.dumps(series), encoding="utf-8")
    show(figures)
    if set(parts) != set(PARTS):
        return 0
    write_figures(FIGURES, figures)
    print("\n".join(require(figures, REQUIRED)) or "all figures hold")
    return int(bool(set(REQUIRED) - {figure.name for figure in figures}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
