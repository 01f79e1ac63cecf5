"""What deploying does to live traffic: real controllers in front of two served twins, under load.

    python -m tests.bench.deploying [--out build/deploying/figures.json]

A good policy is validated on traffic that was recorded here, and goes through to full; a harmful
one, placed there by an override, is rolled back; an operator calls one back; and a controller is
killed at every place where it can be caught between what is written and what is done.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from policy.files import load_policy
from policy.parameters import render
from tests.controller import deploying
from tests.controller.deploying import (
    GOOD,
    HARMFUL,
    HEADER,
    PLACES,
    QUICK,
    load_on,
    read_ruled,
    short,
    stages,
)
from tests.controller.processes import (
    MODEL,
    PROFILE,
    Controller,
    segments,
    settings_for,
    start_controller,
    twin_process,
)
from tests.figures import Figure, show, write_figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.evidence import Evidence
    from policy.parameters import Parameters

RATE = 15.0
"""Requests per second: two cores carry callers, controller and servers, and times are predicted as
if they had nothing else to do."""
RECORD_S = 30.0
FOLDER = Path("build/deploying")
OUT = Path("build/deploying/figures.json")
HARMED: dict[str, Any] = {
    **QUICK,
    "stages": [
        {"kind": "canary", "share_permille": 100, "least_s": 30, "least_requests": 1000},
        QUICK["stages"][-1],
    ],
}
WAITS: dict[str, Any] = {**QUICK, "stages": [{**QUICK["stages"][1], "least_s": 600},
                                             QUICK["stages"][-1]]}  # fmt: skip
"""A canary that nobody is done with."""


class Went(NamedTuple):
    """How a deployment went."""

    row: dict[str, Any]
    load: deploying.Load
    asked_s: float
    """Time of day when an operator asked for its end; -1: nobody did."""


def play(
    controller: Controller,
    request: dict[str, object],
    rate: float,
    back_after_s: float = -1.0,
    model: str = MODEL,
) -> Went:
    """Deploy under load, to its end, and some load more; or until an operator calls it back."""

    async def under_load() -> tuple[deploying.Load, int, float]:
        asked_s = -1.0
        async with load_on(controller.url, rate, model) as load:
            await asyncio.sleep(1.0)
            row = await asyncio.to_thread(deploying.deploy, controller, request)
            if back_after_s >= 0:
                await asyncio.to_thread(deploying.until, controller, row["id"], "canary")
                await asyncio.sleep(back_after_s)
                asked_s = time.time()
                path = "/deployments/current/rollback"
                await asyncio.to_thread(controller.admin, "POST", path, {"why": "a drill"})
            await asyncio.to_thread(
                deploying.until, controller, row["id"], "done", "rolled_back", within_s=180.0
            )
            await asyncio.sleep(2.0)
        return load, row["id"], asked_s

    load, number, asked_s = asyncio.run(under_load())
    rows = deploying.history(controller)
    return Went(next(row for row in rows if row["id"] == number), load, asked_s)


def record(controller: Controller, seconds: float, rate: float, model: str = MODEL) -> Path:
    """Traffic for a trace; the controller ends. Where the trace is."""

    async def under_load() -> None:
        async with load_on(controller.url, rate, model):
            await asyncio.sleep(seconds)

    asyncio.run(under_load())
    controller.stop()
    traces = sorted((controller.data / "trace").glob("trace*.parquet"))
    if not traces:
        raise click.ClickException(f"no trace was recorded in {controller.data}")
    return traces[-1]


def good(went: Went, evidence: Evidence, log: list[bytes], live: Parameters) -> list[Figure]:
    through = stages(went.row)
    results = deploying.results_of(log, live, went.row["at_s"])
    mine = [each for each in results if each.canary]
    above, told = deploying.outside(mine, evidence.expected.band)
    beside = deploying.outside([each for each in results if not each.canary],
                               evidence.expected.band)[1]  # fmt: skip
    gates = [gate.name for gate in evidence.gates if not gate.holds]
    how = f"evidence of {len(evidence.gates)} gates, {len(gates)} fail {gates or ''}".strip()
    return [
        Figure("good_policy_reached_full", float(through[-1] == "done"), "1", "= 1",
               f"{' -> '.join(through)}; {how}; {len(went.load.answers)} requests"),
        Figure("predicted_band_held", float(bool(told) and not above), "1", "= 1",
               f"{len(mine)} requests of the candidate: {'; '.join(told) or 'no band'};"
               f" the live policy beside it: {'; '.join(beside)}"),
    ]  # fmt: skip


def harmful(went: Went) -> Figure:
    hurt = sum(
        answer.headers.get(HEADER) == short(HARMFUL) and not answer.good
        for answer in went.load.answers
    )
    rolled_back = stages(went.row)[-1] == "rolled_back" and hurt <= HARMED.get("hurt_most", 50)
    return Figure(
        "harmful_rolled_back", float(rolled_back), "1", "= 1",
        f"by the verdict, {hurt} requests hurt: {went.row['steps'][-1]['why']}",
    )  # fmt: skip


def rollback_s(wents: Sequence[tuple[Went, Parameters]], log: list[bytes]) -> Figure:
    """The longest from a decision to go back to the last decision by the new policy. A policy that
    was tried several times is seen by its last time."""
    last_s = read_ruled(log).last_s
    took = []
    for went, new in wents:
        decided_s = went.asked_s if went.asked_s >= 0 else went.row["steps"][-1]["at_s"]
        took.append(max(0.0, last_s.get(short(new), 0.0) - decided_s))
    return Figure(
        "rollback_s", round(max(took), 4), "s", "<= 5",
        f"of {len(took)} rollbacks, one by the verdict, one by an operator: "
        + ", ".join(f"{each:.3f}" for each in took),
    )  # fmt: skip


def splits(logs: Sequence[list[bytes]]) -> Figure:
    found = [read_ruled(log) for log in logs]
    decided = sum(sum(each.decided.values()) for each in found)
    switches = sum(len(each.switches) for each in found)
    return Figure(
        "split_decisions", sum(len(each.split) for each in found), "1", "= 0",
        f"requests that two policies decided about, of {decided} decisions and {switches} switches",
    )  # fmt: skip


def figures(folder: Path = FOLDER, rate: float = RATE) -> list[Figure]:
    """All of it, in about four minutes."""
    shutil.rmtree(folder, ignore_errors=True)
    live = load_policy("stable")
    called_back = msgspec.structs.replace(GOOD, name="called-back")
    with ExitStack() as stack:
        twins = [stack.enter_context(twin_process()) for _ in range(2)]
        settings = settings_for([twin.url for twin in twins], folder)
        controller = start_controller(settings, folder)
        controller.wait_up(2)
        told = _Progress()
        trace = record(controller, RECORD_S, rate)
        controller = start_controller(settings, folder)
        stack.callback(lambda: controller.stop())
        controller.wait_up(2)
        told("recorded")
        file, out = folder / "good.yaml", folder / "ev.json"
        file.write_text(render(GOOD), encoding="utf-8")
        key = controller.data / "deploy.key"
        evidence = deploying.validated(file, "stable", trace, key, out, PROFILE)
        told("validated")
        override = "" if evidence.holds else "the quick evidence of this machine does not hold"
        request = deploying.sent(GOOD, out, plan=QUICK, override=override)
        before = len(segments(controller.data))
        harmed = play(controller, forced(HARMFUL, HARMED), rate)
        told("a harmful one was placed")
        back = play(controller, forced(called_back, WAITS), rate, back_after_s=5.0)
        told("one was called back")
        through = play(controller, request, rate)
        told("a good one went through")
        controller.stop()
        log = segments(controller.data)[before - 1 :]
        drill = deploying.killed_everywhere(
            settings_for([twin.url for twin in twins], folder / "killed"), folder / "killed",
            {"": forced(GOOD, QUICK), "rolled_back": forced(HARMFUL, HARMED)}, rate,
        )  # fmt: skip
        assert drill.last is not None
        drill.last.stop()
        told("the controller was killed")
        logs = [log, segments(drill.last.data)]
    return [
        *good(through, evidence, log, live),
        harmful(harmed),
        rollback_s([(harmed, HARMFUL), (back, called_back)], log),
        splits(logs),
        Figure(
            "kill9_history_lost", drill.lost + len(drill.wrong), "1", "= 0",
            f"killed at {len(PLACES)} places: {'; '.join(drill.wrong) or 'each time rolled back'}",
        ),
    ]  # fmt: skip


class _Progress:
    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, what: str) -> None:
        click.echo(f"after {time.monotonic() - self._began_s:.0f} s {what}", err=True)


def forced(candidate: Parameters, plan: dict[str, Any]) -> dict[str, object]:
    return {"policy": render(candidate), "override": "a drill", "plan": plan}


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("build/deploying/figures.json")
)
@click.option("--rate", default=RATE, show_default=True, help="Requests per second.")
def main(out: Path, rate: float) -> None:
    """Measure, print, and write the figures; exit code 1 if one misses its goal."""
    found = figures(rate=rate)
    show(found)
    write_figures(out, found)
    raise SystemExit(not all(figure.holds for figure in found))


if __name__ == "__main__":
    main()
