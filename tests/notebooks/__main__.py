"""Runs the notebooks from scratch: ``make notebooks``; with ``--fast`` as the tests do.

Each runs in a kernel of its own, without its outputs of before; what it shows is kept in
``build/notebooks``, for people. Its figures become ``build/figures/notebooks.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.figures import Figure, read_figures, require, show, write_figures

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
OUT = ROOT / "build" / "notebooks"
FIGURES = ROOT / "build" / "figures" / "notebooks.json"
CELL_S_MOST = 4 * 3600


def names() -> list[str]:
    """All notebooks, in the order of their numbers."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def run(name: str, settings: str) -> list[Figure]:
    """Run one with ``fast``, ``full`` or ``long`` settings; its figures.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    os.environ["TWINKEEL_NOTEBOOKS"] = settings
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{NOTEBOOKS}"
    client = NotebookClient(
        notebook, timeout=CELL_S_MOST, kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
    )  # fmt: skip
    kept = OUT / f"{name}.json"
    kept.unlink(missing_ok=True)
    try:
        client.execute()
    finally:
        OUT.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, OUT / f"{name}.ipynb")
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    for row in found["figures"]:
        del row["holds"]
    return [Figure(**row) for row in found["figures"]]


def main() -> None:
    """Run all, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="none: all")
    parser.add_argument(
        "--fast",
        action="store_const",
        const="fast",
        help="little of everything",
        dest="settings",
        default="full",
    )
    parser.add_argument(
        "--long", action="store_const", const="long", help="what takes hours, too", dest="settings"
    )
    given = parser.parse_args()
    wanted = given.names or names()
    kept = [] if given.settings == "fast" else read_figures(FIGURES)
    figures = [one for one in kept if one.name.partition(":")[0] not in wanted]
    failed: list[str] = []
    for name in wanted:
        began_s = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            figures += [
                Figure(f"{name}: {one.name}", one.value, one.unit, one.goal, one.how)
                for one in run(name, given.settings)
            ]
        except CellExecutionError as error:
            failed.append(f"{name}: {error}")
        print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    show(figures)
    if given.settings != "fast":
        write_figures(FIGURES, figures)
        failed += require(figures, [])
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
