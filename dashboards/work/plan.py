"""A plan: sizes, faults and the knee, with the formula's answer first."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from dashboards.scenario import by_name
from dashboards.shelf import Shelf
from twin.plan.inputs import Prices, SloFile
from twin.plan.planning import make_plan
from twin.plan.preparing import Ready, first_look, prepared
from twin.plan.runs import Runs
from twin.plan.show import plain_of, write_json
from twin.report.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SLO, PRICES = "slo.yaml", "prices.yaml"
FACTS, RUNS = "facts.json", "runs.txt"
PLAN, COARSE = "plan.json", "coarse.json"
STAGES = (("Looking for the sizes", 0.1), ("Faults at the peak", 0.6), ("The knee", 0.75))
"""What is done, and how much is done by then, about."""


def run(request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]) -> None:
    began_s = time.perf_counter()
    tell(0.02, "Reading the trace")
    growths = tuple(request["growths"])
    with opened(request, folder) as ready:
        if ready.machines:
            sizes, checks = first_look(ready, growths)
            coarse: dict[str, Any] = {"sizes": [plain_of(size) for size in sizes], "said": []}
            _write(coarse, folder / COARSE)
            tell(0.05, "A short run at the formula's size")
            for text in checks:
                coarse["said"].append(text)
                _write(coarse, folder / COARSE)
        with counted(folder) as runs:
            stages = iter(STAGES)

            def say(text: str = "") -> None:
                name, share = next(stages)
                tell(share, name)

            say()
            found = make_plan(
                ready.machines, ready.rejected, growths, request["faults"], ready.setting, runs,
                policy=request["policy"], say=say,
            )  # fmt: skip
            found = replace(found, wall_s=time.perf_counter() - began_s)
        write_json(found, folder / PLAN)
        write_facts(ready, runs, began_s, folder)


@contextmanager
def opened(request: dict[str, Any], folder: Path) -> Iterator[Ready]:
    """What the request names, as the command line would be given it.

    Raises:
        PlanError, FileError, TraceError, ScenarioError: something of it cannot be used.
    """
    shelf = Shelf(folder.parents[1] / "uploads")
    slo, prices = folder / SLO, None
    slo.write_bytes(msgspec.yaml.encode(slo_of(request)))
    if request["prices"]:
        prices = folder / PRICES
        prices.write_bytes(msgspec.yaml.encode(prices_of(request)))
    with prepared(
        trace_path=str(shelf.path_of(request["trace"])), slo_path=slo,
        gpus=tuple(map(by_name, request["gpus"])), tp_sizes=tuple(request["tp"]),
        model=request["model"],
        policy_name=str(shelf.path_of(request["policy"])), prices_path=prices,
        rows=request["rows"], draws=request["draws"], assume_output=request["assume_output"],
        seed=request["seed"],
    ) as ready:  # fmt: skip
        yield ready


def slo_of(request: dict[str, Any]) -> dict[str, Any]:
    """The file of service levels, without what is as usual.

    Raises:
        ValueError: it says something that cannot be.
    """
    plain = msgspec.convert({"schema": 1, **request["slo"]}, SloFile)
    return {"schema": 1, **_spare(msgspec.to_builtins(plain))}


def prices_of(request: dict[str, Any]) -> dict[str, Any]:
    """The file of prices, without what is as usual."""
    plain = msgspec.convert({"schema": 1, **request["prices"]}, Prices)
    return {"schema": 1, **_spare(msgspec.to_builtins(plain))}


@contextmanager
def counted(folder: Path, done: Callable[[int], None] = lambda played: None) -> Iterator[Runs]:
    """Runs whose number stands in a file while they are played."""

    def progress(played: int) -> None:
        (folder / RUNS).write_text(str(played), encoding="utf-8")
        done(played)

    with Runs(0, progress) as runs:
        yield runs


def write_facts(ready: Ready, runs: Runs, began_s: float, folder: Path) -> None:
    """What the figures stand on."""
    facts = {**ready.facts(), "runs": runs.played, "wall_s": time.perf_counter() - began_s}
    _write(facts, folder / FACTS)


def _write(document: dict[str, Any], path: Path) -> None:
    write_whole(path, json.dumps(document, allow_nan=False) + "\n")


def _spare(value: Any) -> Any:
    """Without what is empty."""
    if isinstance(value, dict):
        kept = {name: _spare(part) for name, part in value.items()}
        return {name: part for name, part in kept.items() if part not in (None, {}, [])}
    return value


__all__ = ["COARSE", "FACTS", "PLAN", "RUNS", "counted", "opened", "prices_of", "run", "slo_of",
           "write_facts"]  # fmt: skip
