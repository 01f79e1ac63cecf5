"""Seven drills on demo fleets, beside what the twin predicts: ``make drills``.

Cards are those of the tests' NVML library: one whole, and one cut into MIG slices. Each drill is
done three times on a fleet of its own, since the moment at which a fault strikes is chance: figures
are medians, but every single run has to meet all four criteria.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import importlib.util
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.table import Table

from controller.drills.asking import DrillError, slot_named
from controller.drills.cli import DemoTarget, show
from controller.drills.demo import MODEL, DemoFleet, Seats
from controller.drills.inject import INJECTIONS
from controller.drills.measure import run_drill
from policy.drills import DRILL_KINDS, RULE, differences
from tests.figures import Figure, require, write_figures
from tests.figures import show as show_figures
from tests.fleet.fakes import ECC_DOUBLE, LARGE_SLICE, SMALL_SLICES, WHOLE, FakeCards
from twinkeel import play_drill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from controller.drills.measure import DrillResult
    from controller.fleet.contract import SlotView
    from policy.drills import DrillFigures, DrillKind

OUT = Path("build/drills")
FIGURES = Path("build/figures/drills.json")
RUNS = 3
LASTING_S, SHORT_S = 24.0, 14.0
"""Of a drill: the first where what is out is tried again and again, each time later."""
LASTING = frozenset({"engine-hang", "network", "bad-answers"})
HIT, OTHER = f"{MODEL}-0", f"{MODEL}-1"
"""The slot on the whole card: the policy fills it first under so little load, so that it has work
when it is hit."""
XID_LOST = 79
STARTS = 5
FIRST = 20
FIRST_TOKENS = 24
COLD_S = 3.0
"""Of a start's first prompt, and of its first with logprobs: vLLM takes 3 to 14 s for these."""
RELOAD = {
    "reload_5xx": ("1", "= 0"), "reload_wrong_version": ("1", "= 0"),
    "reload_p99_change_pct": ("%", "<= 5"), "bad_version_rolled_back": ("1", "= 1"),
}  # fmt: skip
"""Figures of ``tests.bench.reloading``: (unit, goal)."""


class BreakableCards:
    """The library's cards, as a drill breaks them."""

    def __init__(self, cards: FakeCards) -> None:
        self.cards = cards
        self._gone: dict[str, dict[str, str]] = {}
        self._bad: list[str] = []

    def break_memory(self, uuid: str) -> None:
        self._bad.append(uuid)
        self.cards.set(uuid, ecc_uncorrected=1)
        self.cards.event(uuid, ECC_DOUBLE)

    def lose(self, uuid: str) -> None:
        self.cards.xid(uuid, XID_LOST)
        self._gone[uuid] = self.cards.remove(uuid)

    def mend(self) -> None:
        for uuid in self._bad:
            self.cards.set(uuid, ecc_uncorrected=0)
        for uuid, facts in self._gone.items():
            self.cards.set(uuid, **facts)
        self._bad.clear()
        self._gone.clear()


def fresh(name: str) -> Path:
    """An empty folder of that name."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder.absolute()


def seats_on(cards: FakeCards) -> Seats:
    """A replica on the whole card, one on a slice of the other, and the standby on a slice, too."""
    return Seats(((WHOLE,), (LARGE_SLICE,), (SMALL_SLICES[0],)), cards.environ)


def drill(kind: DrillKind, folder: Path, say: Callable[[str], object]) -> tuple[DrillResult, int]:
    """(what came of it, processes left)."""
    cards = FakeCards(folder)
    for_s = LASTING_S if kind in LASTING else SHORT_S
    with DemoFleet(folder, kind, seats_on(cards)) as fleet:
        slot = slot_named(fleet.admin.fleet(), HIT)
        made = INJECTIONS[kind](slot, fleet.admin, fleet.gateway, BreakableCards(cards))
        if why := made.refusal():
            raise DrillError(f"{kind}: {why}")
        result = run_drill(made, DemoTarget(fleet), for_s, play_drill, say)
    left = fleet.left()
    (folder / "result.json").write_bytes(msgspec.json.encode(result))
    return result, left


# The first requests of a server


def cold(s: float) -> str:
    """The fault of servers that compile so long, each time that they start."""
    return json.dumps({"kind": "cold", "delay_s": s})


def first_ratios(folder: Path) -> list[float]:
    """For each of a few starts: p99 of the first requests there over that of a server that runs
    for long, asked in turns."""
    with DemoFleet(folder, "engine-kill", fault=cold(COLD_S)) as fleet:
        admin = fleet.admin
        return [first_ratio(admin.fleet().slots, fleet) for _ in range(STARTS)]


def first_ratio(slots: Sequence[SlotView], fleet: DemoFleet) -> float:
    """End a server, wait until it is back and warm, and ask it and another one in turns."""
    steady = next(slot for slot in slots if slot.name == OTHER)
    for number in range(2):  # of both kinds: it has nothing to compile any more
        asked_s(steady.url, number)
    hit = next(slot for slot in slots if slot.name == HIT)
    killed = INJECTIONS["engine-kill"](hit, fleet.admin)
    killed.inject()

    def is_back(slots: Sequence[SlotView]) -> bool:
        now = next(slot for slot in slots if slot.name == hit.name)
        return now.pid not in (0, hit.pid) and now.state in ("serving", "warm")

    view = fleet.admin.wait("it is back and warm", lambda view: is_back(view.slots), 60.0)
    begun = next(slot for slot in view.slots if slot.name == hit.name)
    fresh_s: list[float] = []
    steady_s: list[float] = []
    for number in range(FIRST):
        for url, times in ((begun.url, fresh_s), (steady.url, steady_s)):
            times.append(asked_s(url, number))
    return p99(fresh_s) / p99(steady_s)


def asked_s(url: str, number: int) -> float:
    """How long a whole answer takes; every second one comes with logprobs."""
    body = {
        "model": MODEL, "max_tokens": FIRST_TOKENS, "ignore_eos": True,
        "logprobs": number % 2 == 1,
        "messages": [{"role": "user", "content": f"{number} " + "tide and keel " * 40}],
    }  # fmt: skip
    host = urlsplit(url).netloc
    began_s = time.monotonic()
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == 200
    return time.monotonic() - began_s


def p99(values: Sequence[float]) -> float:
    """Of twenty it is the longest."""
    return sorted(values)[-(-len(values) * 99 // 100) - 1]


def left_by_a_crash(folder: Path) -> int:
    """The controller is killed, another one takes over what runs, and ends: what is left then."""
    fleet = DemoFleet(folder, "engine-kill")
    with fleet:
        before = {slot.pid for slot in fleet.admin.fleet().slots}
        fleet.crash()
        assert fleet.left() >= len(before)
        with fleet:
            kept = {slot.pid for slot in fleet.admin.fleet().slots}
            print(f"a crash: {len(before & kept)} of {len(before)} servers were adopted")
    return fleet.left()


# The figures


def medians(runs: Sequence[DrillFigures]) -> DrillFigures:
    """The same kind of figures, each the median of all runs; None: more than half have none."""

    def middle(values: Sequence[float | None]) -> float | None:
        known = sorted(value for value in values if value is not None)
        return None if 2 * len(known) <= len(values) else statistics.median(known)

    def count(values: Sequence[int]) -> int:
        return round(statistics.median(values))

    return msgspec.structs.replace(
        runs[0],
        isolated_s=middle([run.isolated_s for run in runs]),
        recovered_s=middle([run.recovered_s for run in runs]),
        **{
            name: count([getattr(run, name) for run in runs])
            for name in ("offered", "failed", "degraded", "refused")
        },
    )


def worst_errors(
    results: dict[DrillKind, list[DrillResult]],
) -> Iterator[tuple[float, str]]:
    """(per cent, which) for each drill and figure, from medians."""
    for kind, runs in results.items():
        twins = [run.predicted for run in runs if run.predicted is not None]
        if len(twins) < len(runs):
            yield 100.0, f"{kind}: {runs[0].not_predicted}"
            continue
        for each in differences(medians([run.measured for run in runs]), medians(twins)):
            told = f"{kind} {each.figure}: {each.measured} measured, {each.predicted} by the twin"
            yield each.error_pct, told


def figures_of(
    results: dict[DrillKind, list[DrillResult]], ratios: Sequence[float], left: int
) -> list[Figure]:
    every = [run for runs in results.values() for run in runs]
    failed = [
        f"{run.kind}: {each.name}: {each.why}"
        for run in every
        for each in run.criteria
        if not each.passed
    ]
    passed = sum(run.passed for run in every)
    figures = [
        Figure("drills_passed_pct", 100 * passed / len(every) if every else None, "%", "= 100",
               "; ".join(failed) or f"all four criteria, in each of {len(every)} runs")
    ]  # fmt: skip
    if "ecc" in results:
        ecc = medians([run.measured for run in results["ecc"]])
        runs = f"median of {len(results['ecc'])}"
        figures += [
            Figure("ecc_isolated_s", ecc.isolated_s, "s", "<= 1",
                   f"{runs}: from the card's error, told by NVML, to out of rotation"),
            Figure("ecc_replaced_s", ecc.recovered_s, "s", "<= 37",
                   f"{runs}: to as many serving as before, and goodput back"),
        ]  # fmt: skip
    ratio = statistics.median(ratios) if ratios else None
    shown = ", ".join(f"{each:.2f}" for each in ratios)
    error_pct, which = max(worst_errors(results), default=(None, "no drill was done"))
    figures += [
        Figure("first20_p99_ratio", ratio, "1", "<= 1.2",
               f"median of {len(ratios)} starts ({shown}): p99 of the first {FIRST} requests, half"
               " of them with logprobs, over that of a server that runs for long, asked in turns;"
               f" served twins that stand still for {COLD_S:g} s at their first prompt, and at the"
               " first with logprobs, as vLLM does while it compiles: without a warm-up it is far"
               " above"),
        Figure("orphans_left", left, "1", "= 0",
               "servers that still ran when their controllers had ended, one after a crash"),
        Figure("prediction_error_worst_pct", error_pct, "%", "<= 20",
               f"{which}. Of all drills and figures: {RULE}; medians"),
    ]  # fmt: skip
    return figures


def reload_figures() -> list[Figure]:
    """Those of hot reloads, where they are measured."""
    if importlib.util.find_spec("tests.bench.reloading") is not None:
        measured: list[Figure] = importlib.import_module("tests.bench.reloading").measure()
        return measured
    return [Figure(name, None, unit, goal, "not measured") for name, (unit, goal) in RELOAD.items()]


def table_of(results: dict[DrillKind, list[DrillResult]]) -> Table:
    table = Table("drill", "isolated, s", "twin", "recovered, s", "twin", "failed", "twin",
                  "degraded", "twin", "of", "criteria")  # fmt: skip
    for kind, runs in results.items():
        for run in runs:
            cells = [kind]
            twin = run.predicted
            for name in ("isolated_s", "recovered_s", "failed", "degraded"):
                cells.append(_told(getattr(run.measured, name)))
                cells.append("-" if twin is None else _told(getattr(twin, name)))
            kept = sum(each.passed for each in run.criteria)
            table.add_row(*cells, str(run.measured.offered), f"{kept} of {len(run.criteria)}")
    return table


def _told(value: float | int | None) -> str:
    return "never" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Drills on demo fleets, beside the twin.")
    parser.add_argument("kinds", nargs="*", choices=[*DRILL_KINDS, []], help="default: all")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--starts", action=argparse.BooleanOptionalAction, default=True,
                        help="also the first requests of a server, and a crash")  # fmt: skip
    chosen = parser.parse_args(argv)
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {text}", flush=True)

    kinds: Sequence[DrillKind] = chosen.kinds or DRILL_KINDS
    results: dict[DrillKind, list[DrillResult]] = {kind: [] for kind in kinds}
    left = 0
    for run in range(chosen.runs):
        for kind in kinds:
            say(f"{kind}, run {run + 1} of {chosen.runs}")
            result, orphans = drill(kind, fresh(f"{kind}-{run}"), say)
            results[kind].append(result)
            left += orphans
            if not result.passed:
                show(result)
    ratios: list[float] = []
    if chosen.starts:
        say(f"a server is started {STARTS} times, and asked")
        ratios = first_ratios(fresh("first"))
        say("a controller is killed, and another one takes over")
        left += left_by_a_crash(fresh("crash"))
    Console(width=140).print(table_of(results))
    figures = figures_of(results, ratios, left)
    if chosen.kinds or not chosen.starts:
        show_figures(figures)
        return 0
    write_figures(FIGURES, figures)  # whatever becomes of the reloads
    say("hot reloads")
    figures += reload_figures()
    show_figures(figures)
    write_figures(FIGURES, figures)
    print("\n".join(require(figures, [figure.name for figure in figures])) or "all figures hold")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
