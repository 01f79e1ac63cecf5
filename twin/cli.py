"""The twin's commands: replay a trace, look at policy files."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policy.files import FileError, load_policy, policy_names, profile_names
from policy.parameters import Parameters, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress

    from traces import Trace
    from twin.faults import Fault
    from twin.fleet import ReplicaSpec
    from twin.replay import Replay, ReplayOptions
    from twin.summary import Slo

RUNS_MOST = 10_000
REPLAY_HELP = """Replay TRACE through simulated vLLM replicas, under one policy or several.

TRACE is a trace file (Parquet; make one with `twinkeel trace import` or `generate`) or a shipped
one, such as shipped:demo. A table goes to the terminal; the folder --out gets report.html,
report.json and, for each policy, requests.parquet (what became of every request).

\b
Examples:
  twinkeel replay shipped:demo
  twinkeel replay shipped:demo --policy fifo --policy stable --replicas 2
  twinkeel replay week.parquet --profile h100-sxm/qwen3-8b --replicas 8 --policy mine.yaml
  twinkeel replay shipped:demo --profile h100-sxm/qwen3-8b --replicas 2 \\
                  --profile h100-sxm/qwen3-embedding-0.6b --replicas 1
  twinkeel replay shipped:demo --policy fifo --uncertainty 40

With one profile every request goes to it, whatever model it names; with several, each replica
serves its own model, and embeddings go to the embedding models.
"""


class BadInput(click.ClickException):
    """One clear line and exit code 2."""

    exit_code = 2


@contextmanager
def plain_errors() -> Iterator[None]:
    """What the user can mend is one clear line and exit code 2; a fault of ours is a traceback."""
    from traces import TraceError
    from twin.faults import FaultError
    from twin.fleet import FleetError
    from twin.intervals import UncertaintyError
    from twin.report import ReportError

    try:
        yield
    except (
        TraceError, FileError, FleetError, FaultError, ReportError, UncertaintyError,
    ) as error:  # fmt: skip
        raise BadInput(str(error)) from error
    except OSError as error:
        raise BadInput(f"{error.filename or 'output'}: {error.strerror or error}") from error


def paired_profiles(names: tuple[str, ...], replicas: tuple[int, ...]) -> list[tuple[str, int]]:
    """Each --profile with its --replicas; 1 where there are fewer of these."""
    if len(replicas) > len(names):
        raise BadInput(
            f"{len(replicas)} times --replicas for {len(names)} times --profile: give one each"
        )
    counts = list(replicas) + [1] * (len(names) - len(replicas))
    return list(zip(names, counts, strict=True))


def slo_limits(context: click.Context, parameter: click.Parameter, text: str) -> Slo:
    """What --slo says, as a click callback."""
    from twin.summary import Slo

    try:
        return Slo.parse(text)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _faults(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[Fault, ...]:
    from twin.faults import parse_fault

    with plain_errors():
        return tuple(parse_fault(text) for text in texts)


def _runs(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    from twin.intervals import LEVEL_PERCENT, RUNS_LEAST

    if text is None:
        return None
    if not text.isdecimal():
        raise BadInput(f"--uncertainty {text}: that is no number of runs; TRACE goes before it")
    runs = int(text)
    if not RUNS_LEAST <= runs <= RUNS_MOST:
        raise BadInput(
            f"--uncertainty {runs}: a {LEVEL_PERCENT} % interval takes {RUNS_LEAST} to {RUNS_MOST} "
            "runs"
        )
    return runs


def completed(names: Callable[[], tuple[str, ...]]) -> Callable[..., list[str]]:
    """Shell completion from a list of names, beside which paths are allowed."""
    return lambda context, parameter, start: [name for name in names() if name.startswith(start)]


@click.command("replay", help=REPLAY_HELP, context_settings={"show_default": True})
@click.argument("trace_path", metavar="TRACE")
@click.option(
    "--profile", "profiles", multiple=True, default=("h100-sxm/qwen3-8b",), metavar="NAME",
    shell_complete=completed(profile_names),
    help="GPU and model: a shipped profile, one scaled from it (h100-sxm/llama-3.1-70b@tp4), or a "
    "file. Repeat for several kinds of replicas.",
)  # fmt: skip
@click.option(
    "--replicas", type=int, multiple=True, default=(4,), metavar="N",
    help="Number of replicas of the profile; repeat in the order of --profile.",
)  # fmt: skip
@click.option(
    "--policy", "policies", multiple=True, default=("stable",), metavar="NAME",
    shell_complete=completed(policy_names),
    help="A preset or a policy file; repeat to compare.",
)  # fmt: skip
@click.option("--seed", default=0, help="Of everything that is drawn: ties, thinning, copies.")
@click.option("--speed", default=1.0, help="Play the trace this many times as fast.")
@click.option("--scale", default=1.0, help="Multiply the request rate, at the trace's own pace.")
@click.option("--scale-lengths", default=1.0, help="Multiply prompt and answer lengths.")
@click.option(
    "--assume-output", default=0, metavar="TOKENS",
    help="Answer length where the trace does not know it; 0: refuse such a trace.",
)  # fmt: skip
@click.option(
    "--slo", default="P0=1.5,P1=4,P2=10,tpot=0.1", metavar="LIMITS", callback=slo_limits,
    help="What a good answer is: seconds to first token by SLA class (`other`: no class), and per "
    "token after it. A request's own deadline goes first.",
)  # fmt: skip
@click.option(
    "--fault", "faults", multiple=True, metavar="FAULT", callback=_faults,
    help="What goes wrong meanwhile, as in a scenario file: '{kind: gpu_lost, at_s: 30, on: 0}'. "
    "Repeat for several.",
)  # fmt: skip
@click.option(
    "--max-model-len", default=0, metavar="TOKENS",
    help="Longest prompt plus answer; 0: the profile's.",
)  # fmt: skip
@click.option(
    "--kv-blocks", default=0, metavar="N",
    help="KV blocks of each replica, as your server reports them; 0: computed from the card.",
)  # fmt: skip
@click.option(
    "--log", "log_mode", type=click.Choice(["full", "hash", "sample"]), default="hash",
    help="Decision log: kept whole, only hashed, or hashed with the last segment kept.",
)  # fmt: skip
@click.option(
    "--no-skip", is_flag=True,
    help="Simulate every engine step: the same figures, bit for bit, many times slower.",
)  # fmt: skip
@click.option(
    "--uncertainty", "runs", is_flag=False, flag_value="20", default=None, metavar="[N]",
    callback=_runs,
    help="Give every figure a 90 % interval, from N more runs (20 if not said), each with step "
    "times drawn from what the profiles know of their errors and with a seed of its own.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(0, 64), default=0, metavar="N",
    help="Processes for the runs of --uncertainty; 0: one a core.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=None, metavar="FOLDER",
    help="Where the report goes.  [default: build/replay/TRACE]",
)  # fmt: skip
@click.option(
    "--timeline", type=click.Path(path_type=Path, dir_okay=False), default=None, metavar="FILE",
    help="Write the requests as a timeline for ui.perfetto.dev or chrome://tracing: the 20,000 "
    "slowest, if there are more. Of several policies each gets a file of its own, its name before "
    "the ending.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress bar, no table.")
def replay_command(
    trace_path: str,
    profiles: tuple[str, ...],
    replicas: tuple[int, ...],
    policies: tuple[str, ...],
    max_model_len: int,
    kv_blocks: int,
    log_mode: Any,
    no_skip: bool,
    runs: int | None,
    jobs: int,
    out: Path | None,
    timeline: Path | None,
    quiet: bool,
    **scaling: Any,
) -> None:
    from traces import open_trace
    from twin.fleet import fleet_of
    from twin.replay import ReplayOptions, named_policies
    from twin.report import table, write_html, write_json

    with plain_errors():
        trace = open_trace(trace_path)
        fleet = fleet_of(
            paired_profiles(profiles, replicas),
            max_model_len=max_model_len,
            kv_blocks_given=kv_blocks,
        )
        loaded = named_policies(policies)
        options = ReplayOptions(log=log_mode, skip=not no_skip, **scaling)
        folder = out or Path("build/replay") / trace.path.stem
        if runs is not None:
            _check_errors(fleet)
        replays = [
            _replay_one(trace, fleet, name, parameters, options, folder, quiet)
            for name, parameters in loaded
        ]
        if runs is not None:
            replays = [
                _with_intervals(run, trace, parameters, runs, jobs, quiet)
                for run, (_, parameters) in zip(replays, loaded, strict=True)
            ]
        write_json(replays, folder / "report.json")
        write_html(replays, folder / "report.html")
        if timeline is not None:
            _write_timelines(replays, folder, timeline)
    if not quiet:
        from rich.console import Console

        Console().print(table(replays))
    click.echo(f"report: {folder / 'report.html'}")


def _replay_one(
    trace: Trace,
    fleet: list[ReplicaSpec],
    name: str,
    parameters: Parameters,
    options: ReplayOptions,
    folder: Path,
    quiet: bool,
) -> Replay:
    from twin.replay import replay

    with _progress(quiet) as bar:
        task = bar.add_task(f"replay under {name}", total=round(trace.rows * options.scale))
        return replay(
            trace,
            fleet,
            parameters,
            options,
            policy_name=name,
            out=folder / name,
            progress=lambda rows: bar.advance(task, rows),
        )


def _write_timelines(replays: list[Replay], folder: Path, target: Path) -> None:
    from twin.timeline import write_timeline

    target.parent.mkdir(parents=True, exist_ok=True)
    for run in replays:
        path = target
        if len(replays) > 1:
            path = target.with_name(f"{target.stem}.{run.policy}{target.suffix}")
        requests = folder / run.policy / "requests.parquet"
        count = write_timeline(requests, path, faults=run.options.faults)
        click.echo(f"timeline: {path} ({count:,} of {run.summary.all.offered:,} requests)")


def _check_errors(fleet: list[ReplicaSpec]) -> None:
    """A profile whose errors cannot be drawn is told before anything is played."""
    from twin.uncertainty import errors_of

    for spec in fleet:
        errors_of(spec.profile)


def _with_intervals(
    run: Replay, trace: Trace, parameters: Parameters, runs: int, jobs: int, quiet: bool
) -> Replay:
    from twin.uncertainty import uncertain_replay

    with _progress(quiet) as bar:
        task = bar.add_task(f"uncertainty under {run.policy}", total=runs)
        return uncertain_replay(
            run, trace, parameters, runs=runs, jobs=jobs, progress=lambda: bar.advance(task)
        )


def _progress(quiet: bool) -> Progress:
    """A bar on standard error; none if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    quiet = quiet or not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet)


@click.group()
def policy() -> None:
    """Check and show policy files."""


@policy.command("check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def check(files: tuple[str, ...]) -> None:
    """Check policy files: unknown keys, ranges, combinations. Exit code 2 if one is wrong."""
    wrong = 0
    for name in files:
        try:
            parameters = load_policy(name)
        except FileError as error:
            wrong += 1
            click.echo(f"Error: {error}", err=True)
        else:
            click.echo(f"{name}: a valid policy file ({parameters.discipline})")
    if wrong:
        raise SystemExit(2)


@policy.command("show")
@click.argument("name", default="", shell_complete=completed(policy_names))
@click.option("--defaults", is_flag=True, help="Every parameter's default, its unit and why.")
def show(name: str, defaults: bool) -> None:
    """Print a policy file in full: a preset (stable, fifo, throughput) or a file."""
    if name and defaults:
        raise BadInput(
            f"--defaults shows what stands in no file: leave out {name!r}, or the option"
        )
    with plain_errors():
        parameters = Parameters() if defaults else load_policy(name or "stable")
    click.echo(render(parameters, comments=True), nl=False)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash:  eval "$(twinkeel completion bash)"
    zsh:   eval "$(twinkeel completion zsh)"
    fish:  twinkeel completion fish | source
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "twinkeel", "_TWINKEEL_COMPLETE").source())
