"""Plots of measured against predicted times: ``python -m tests.bench.fidelity.charts``.

Draws docs/fidelity/*.svg from what the last ``make fidelity`` left in build/fidelity.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

SERIES = Path("build/fidelity")
DOCS = Path("docs/fidelity")
MEASURED, PREDICTED = "#1f4e79", "#d1603d"
STEPS = 80
"""Points of a curve; more would not be seen."""


def _read(part: str) -> Any:
    return json.loads((SERIES / f"{part}.json").read_text(encoding="utf-8"))


def _share(axes: Axes, values: Sequence[float], colour: str, label: str, style: str) -> None:
    """Share of requests that took at most so long."""
    ordered = sorted(values)
    last = len(ordered) - 1
    places = sorted({round(last * step / STEPS) for step in range(STEPS + 1)})
    shares = [100 * (place + 1) / len(ordered) for place in places]
    axes.plot([ordered[place] for place in places], shares, style, color=colour, label=label)


def cpu() -> None:
    """Distributions of TTFT and e2e, load by load."""
    loads = _read("cpu")
    columns = 3
    rows = -(-len(loads) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(11, 2.7 * rows), layout="constrained")
    for axes in grid.flat[len(loads) :]:
        axes.set_visible(False)
    for axes, load in zip(grid.flat, loads.values(), strict=False):
        requests = load["requests"]
        for column, name, style in ((0, "TTFT", "-"), (2, "e2e", "--")):
            _share(axes, [row[column] for row in requests], MEASURED, f"{name} measured", style)
            _share(
                axes, [row[column + 1] for row in requests], PREDICTED, f"{name} predicted", style
            )
        axes.set_title(load["what"], fontsize=9)
        axes.set_xscale("log")
        axes.set_xlabel("ms", fontsize=8)
        axes.set_ylabel("% of requests", fontsize=8)
        axes.tick_params(labelsize=8)
    grid.flat[0].legend(fontsize=7)
    _save(figure, "cpu")


def rtx4090() -> None:
    """The recorded run: distributions, and request by request."""
    run = _read("rtx4090")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, style in (("ttft_s", "-"), ("latency_s", "--")):
        _share(left, run[name]["measured"], MEASURED, f"{name[:-2]} measured", style)
        _share(left, run[name]["predicted"], PREDICTED, f"{name[:-2]} predicted", style)
    left.set_xlabel("s")
    left.set_ylabel("% of requests")
    left.legend(fontsize=8)
    right.plot(run["ttft_s"]["measured"], run["ttft_s"]["predicted"], ".", color=PREDICTED)
    longest = max(run["ttft_s"]["measured"])
    right.plot([0, longest], [0, longest], color=MEASURED, linewidth=0.8)
    right.set_xlabel("TTFT measured, s")
    right.set_ylabel("TTFT predicted, s")
    _save(figure, "rtx4090")


def h100() -> None:
    """Published means against the twin's, run by run."""
    stages = _read("h100")["stages"]
    figure, all_axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axes, name in zip(all_axes, ("ttft_ms", "tpot_ms", "e2e_ms"), strict=True):
        for use, marker in (("calibrated", "x"), ("predicted", "o")):
            rows = [stage for stage in stages if stage["use"] == use]
            axes.plot(
                [row["measured"][name] for row in rows], [row["simulated"][name] for row in rows],
                marker, color=PREDICTED, label=use,
            )  # fmt: skip
        longest = max(stage["measured"][name] for stage in stages)
        axes.plot([0, longest], [0, longest], color=MEASURED, linewidth=0.8)
        axes.set_xlabel(f"{name[:-3].upper()} published, ms")
        axes.set_ylabel("simulated, ms")
        axes.legend(fontsize=8)
    _save(figure, "h100")


def _save(figure: Any, name: str) -> None:
    DOCS.mkdir(parents=True, exist_ok=True)
    figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    print(DOCS / f"{name}.svg")


def main() -> int:
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fidelity"  # the same data give the same bytes
    for part in (cpu, rtx4090, h100):
        if (SERIES / f"{part.__name__}.json").is_file():
            part()
        else:
            print(f"{part.__name__}: not drawn, it was not measured yet", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
