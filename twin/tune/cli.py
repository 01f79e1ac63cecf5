"""The command ``tune``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policy.files import load_policy, policy_names, profile_names
from twin.cli import BadInput, completed, paired_profiles, plain_errors, slo_limits

if TYPE_CHECKING:
    from policy.parameters import Parameters
    from twin.scenario.spec import PolicyChoice
    from twin.tune.tuning import Plan
    from twin.tune.work import Work

HELP = """Find better values for a policy's parameters.

SPACE.yaml says which keys of the policy are tried, and between which values. Each trial is a policy
that is played in the twin, on the same requests as all others; one that is clearly worse stops
early. The best ones are played with more seeds, and the result is confirmed on traffic that it was
not tuned on: only then is it called better.

\b
Examples:
  twinkeel tune space.yaml --trace week.parquet --trials 200
  twinkeel tune space.yaml --trace mon.parquet --held-out tue.parquet --held-out wed.parquet
  twinkeel tune space.yaml --trace shipped:demo --objective goodput --objective p0_ttft_p95_s \\
                --constraint "slo_attainment.P1 >= .95"
  twinkeel tune space.yaml --scenario verification-storm --run budget --objective wrong
  twinkeel tune space.yaml --trace week.parquet --storage postgresql://me@db/tune
  RAY_ADDRESS=ray://head:10001 twinkeel tune space.yaml --trace /shared/week.parquet --engine ray

Ended before it is done, the same command goes on where it was; with the --storage of a database
several machines work on one study. The folder --out gets best.yaml and
best.diff, front.csv, front.json and front/ (the Pareto front and its policies), trials.csv,
importance.json and result.json (the verdict).
"""


@click.command("tune", help=HELP, context_settings={"show_default": True})
@click.argument(
    "space_path", metavar="SPACE.yaml", type=click.Path(path_type=Path, dir_okay=False)
)  # fmt: skip
@click.option("--trace", "trace_path", metavar="TRACE", help="A trace file, or shipped:NAME.")
@click.option("--scenario", metavar="NAME|FILE", help="Instead of a trace.")
@click.option(
    "--run", default="", show_default=False, metavar="NAME",
    help="Of the scenario, where it has several.",
)  # fmt: skip
@click.option(
    "--policy", "policy_name", default="", metavar="NAME", shell_complete=completed(policy_names),
    show_default=False,
    help="The parent: a preset or a policy file.  [default: stable; the scenario's own]",
)  # fmt: skip
@click.option("--trials", type=click.IntRange(1, 1_000_000), default=200, help="In all.")
@click.option(
    "--objective", "objectives", multiple=True, metavar="FIGURE",
    help="goodput, p0_ttft_p95_s, batch_tokens_per_s, gpu_hours, wrong, or FIGURE.CLASS such as "
    "ttft_p99_s.P1; of a scenario also max:PATH and min:PATH in its figures. Repeat; the first "
    "decides which of the front is the best.  [default: those of SPACE.yaml, else goodput]",
)  # fmt: skip
@click.option(
    "--constraint", "constraints", multiple=True, metavar="FIGURE>=NUMBER",
    help='What must hold, such as "slo_attainment.P1 >= .95"; with those of SPACE.yaml. Repeat.',
)  # fmt: skip
@click.option(
    "--held-out", multiple=True, metavar="TRACE",
    help="Traces to confirm on. Repeat.  [default: the last 30 % of the trace's time, which is not "
    "tuned on then; further seeds of a scenario]",
)  # fmt: skip
@click.option(
    "--profile", "profiles", multiple=True, default=("h100-sxm/qwen3-8b",), metavar="NAME",
    shell_complete=completed(profile_names), help="As in replay.",
)  # fmt: skip
@click.option(
    "--replicas", type=int, multiple=True, default=(4,), metavar="N", help="As in replay."
)  # fmt: skip
@click.option("--speed", default=1.0, help="Play the trace this many times as fast.")
@click.option("--scale", default=1.0, help="Multiply the request rate.")
@click.option("--scale-lengths", default=1.0, help="Multiply prompt and answer lengths.")
@click.option(
    "--assume-output", default=0, metavar="TOKENS",
    help="Answer length where the trace does not know it.",
)  # fmt: skip
@click.option(
    "--slo", default="P0=1.5,P1=4,P2=10,tpot=0.1", metavar="LIMITS", callback=slo_limits,
    help="What a good answer of a trace is, as in replay.",
)  # fmt: skip
@click.option("--seed", default=0, help="Of the trials that are drawn, and of the trace's ties.")
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=3,
    help="Of the last round, in which the best trials are compared.",
)  # fmt: skip
@click.option(
    "--held-seeds", type=click.IntRange(1, 100), default=3,
    help="Of the confirmation; a scenario takes 3 or more for an interval.",
)  # fmt: skip
@click.option(
    "--prune", default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8", metavar="SHARES",
    callback=lambda context, parameter, text: _shares(text),
    help="Of the trace, after which a trial that is clearly worse stops; empty: never.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(0, 256), default=0, metavar="N",
    help="Trials at the same time; 0: one a core.",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["local", "ray"]), default="local",
    help="Where trials are played: this machine's cores, or the Ray cluster of RAY_ADDRESS (none "
    "set: a Ray of its own on this machine).",
)  # fmt: skip
@click.option(
    "--storage", default="", metavar="URL", show_default=False,
    help="Of the study: sqlite:///FILE, postgresql://..., redis://... or journal:FILE. Several "
    "machines that share one work on one study.  [default: sqlite in --out]",
)  # fmt: skip
@click.option("--study", default="tune", metavar="NAME", help="Name of the study in the storage.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=None, metavar="FOLDER",
    help="[default: build/tune/NAME of the space file]",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress, no tables.")
def tune_command(space_path: Path, out: Path | None, quiet: bool, **given: Any) -> None:
    from twin.tune.objectives import TuneError
    from twin.tune.output import counts, tables, why, write_all
    from twin.tune.progress import Bars
    from twin.tune.tuning import tune

    folder = out or Path("build/tune") / space_path.stem
    with plain_errors():
        try:
            plan, parent_text, label = plan_of(space_path, folder, given)
            with Bars(plan.settings.trials, quiet) as bars:
                tuned = tune(plan, bars)
        except TuneError as error:
            raise BadInput(str(error)) from error
        changed = write_all(tuned, folder, parent_text, label)
    if not quiet:
        from rich.console import Console

        Console().print(tables(tuned))
    if changed:
        click.echo(changed)
    numbers = counts(tuned)
    click.echo(f"{numbers['finished']} trials, {numbers['stopped_early']} of them stopped early")
    click.echo(why(tuned))
    click.echo(f"policy: {folder / 'best.yaml'}")


def plan_of(space_path: Path, folder: Path, given: dict[str, Any]) -> tuple[Plan, str, str]:
    """(what to do, the parent's file as text, its name).

    Raises:
        BadInput: options that do not go together.
        TuneError, FileError, FleetError, TraceError: what they name is wrong.
    """
    from twin.tune.asking import policy_text, study_in
    from twin.tune.objectives import goals_of
    from twin.tune.space import load_space
    from twin.tune.study import Settings
    from twin.tune.tuning import Plan

    if bool(given["trace_path"]) == bool(given["scenario"]):
        raise BadInput("give one of --trace and --scenario: what is played")
    if given["scenario"]:
        work, held_out, parent, label = _scenario_work(given)
    else:
        work, held_out = _trace_work(given)
        label = given["policy_name"] or "stable"
        parent = load_policy(label)
    space = load_space(space_path, parent)
    goals = goals_of(
        given["objectives"] or space.objectives, (*space.constraints, *given["constraints"]),
        trace=work.is_trace,
    )  # fmt: skip
    storage = given["storage"] or study_in(folder)
    plan = Plan(
        space, goals, work, held_out, Settings(given["trials"], given["seed"], given["prune"]),
        storage, given["study"], given["seeds"], given["held_seeds"], given["engine"],
        given["jobs"] or os.cpu_count() or 1,
    )  # fmt: skip
    return plan, policy_text(parent, label), label


def _trace_work(given: dict[str, Any]) -> tuple[Work, tuple[Work, ...]]:
    from twin.fleet import fleet_of
    from twin.replay import ReplayOptions
    from twin.tune.asking import trace_works

    if given["run"]:
        raise BadInput("--run is of a scenario: give --scenario")
    names = ("seed", "speed", "scale", "scale_lengths", "assume_output", "slo")
    options = ReplayOptions(**{name: given[name] for name in names})
    fleet = fleet_of(paired_profiles(given["profiles"], given["replicas"]))
    return trace_works(given["trace_path"], given["held_out"], fleet, options)


def _scenario_work(given: dict[str, Any]) -> tuple[Work, tuple[Work, ...], Parameters, str]:
    from policy.files import nearest
    from twin.scenario import load_scenario
    from twin.scenario.files import policy_of
    from twin.tune.work import ScenarioWork

    if given["held_out"]:
        raise BadInput("--held-out is of a trace: a scenario is confirmed with further seeds")
    if given["held_seeds"] < 3:
        raise BadInput("--held-seeds: an interval over a scenario's seeds takes 3 of them")
    scenario = load_scenario(given["scenario"])
    run = given["run"] or next(iter(scenario.runs))
    if run not in scenario.runs or (len(scenario.runs) > 1 and not given["run"]):
        raise BadInput(
            f"--run {given['run']!r}: {scenario.head.name} has several runs, name one "
            f"({nearest(given['run'], scenario.runs)})"
        )
    setup = scenario.runs[run]
    own: PolicyChoice = setup.policy
    parent, label = policy_of(own, scenario.folder, scenario.where), f"{scenario.head.name}/{run}"
    if given["policy_name"]:
        label = given["policy_name"]
        parent = load_policy(label)
    seeds = tuple(scenario.head.seeds)
    work = ScenarioWork(scenario.head.name, run, setup, scenario.folder.resolve(), seeds)
    return work, (work,), parent, label


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        shares = (0.0,)
    if not all(0 < share < 1 for share in shares):
        raise BadInput(f"--prune {text}: write shares between 0 and 1, such as 0.1,0.3")
    return tuple(sorted(shares))
