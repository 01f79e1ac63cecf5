"""Commands on scenarios: play one, list them, show one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from twin.cli import completed, plain_errors


def _names() -> tuple[str, ...]:
    from twin.scenario import scenario_names

    return scenario_names()


@click.group()
def scenario() -> None:
    """Play scenarios: traffic, faults and policies, and what is claimed to come of them."""


@scenario.command("list")
def list_() -> None:
    """The scenarios that are shipped."""
    from twin.scenario import load_scenario, scenario_names

    for name in scenario_names():
        with plain_errors():
            head = load_scenario(name).head
        click.echo(f"{name:24} {' '.join(head.about.split())}")


@scenario.command("show")
@click.argument("name", shell_complete=completed(_names))
def show(name: str) -> None:
    """Print a scenario's file."""
    from twin.scenario import scenario_path

    with plain_errors():
        click.echo(scenario_path(name).read_text(encoding="utf-8"), nl=False)


@scenario.command("run")
@click.argument("name", metavar="NAME|FILE", shell_complete=completed(_names))
@click.option(
    "--seed", "seeds", type=click.IntRange(min=0), multiple=True, metavar="N",
    help="Instead of the scenario's seeds; repeat for several.",
)  # fmt: skip
@click.option("--run", "runs", multiple=True, help="Only this run of the scenario; repeat.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=None, metavar="FOLDER",
    help="Where result.json goes.  [default: build/scenario/NAME]",
)  # fmt: skip
@click.option(
    "--log", is_flag=True, help="Keep the decision logs in FOLDER/RUN/seed-N, whole (else hashed)."
)
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=1, metavar="N", show_default=True,
    help="Seeds that are played at the same time.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress, no tables.")
def run(
    name: str, seeds: tuple[int, ...], runs: tuple[str, ...], out: Path | None, log: bool,
    jobs: int, quiet: bool,
) -> None:  # fmt: skip
    """Play a scenario with each of its seeds and judge its claims.

    Exit code 1 if a claim does not hold.
    """
    from rich.console import Console

    from twin.scenario import load_scenario, run_scenario
    from twin.scenario.table import claims_table, runs_table

    notes = Console(stderr=True)

    def progress(run_name: str, seed: int) -> None:
        if not quiet:
            notes.print(f"played {run_name} with seed {seed}", highlight=False)

    with plain_errors():
        loaded = load_scenario(name)
        folder = out or Path("build/scenario") / loaded.head.name
        result = run_scenario(
            loaded, seeds=seeds, runs=runs, out=folder if log else None, jobs=jobs,
            progress=progress,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result.plain(), indent=1, allow_nan=False)
        (folder / "result.json").write_text(text + "\n", encoding="utf-8")
    if not quiet:
        console = Console()
        console.print(runs_table(result))
        if loaded.head.expect:
            console.print(claims_table(result))
    click.echo(f"result: {folder / 'result.json'}")
    if not result.holds:
        raise SystemExit(1)
