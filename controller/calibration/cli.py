"""What ``twinkeel calibrate`` needs of this half: options, the load with its progress, figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click
from click.core import ParameterSource

from controller.calibration.settings import FLAGS
from controller.cli import BadInput
from policy.cost import Coefficient
from policy.files import load_gpus, load_models, load_profile, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from policy.cost import Profile

EXIT_REFUSED, EXIT_DRIFT = 1, 3
_SWITCHES = ("async_scheduling", "prefix_caching")
_TEXTS = {"dtype": "NAME", "scheduling_policy": "NAME"}
_KIND_OF_SETTING = "As given to vLLM, where the server does not say it."

HELP = """Measure a running vLLM server and fit a profile of it.

With --engine a designed load runs on the server for 60 to 90 s (--quick: about 25 s), which nobody
else may use meanwhile. The server's own step records say what each step held and took: from the
plug-in twinkeel-vllm-steps, or from vLLM's text log (--log). So the command has to run where these
files are: on the server's machine, or with its folder there (--steps). vLLM has to run with
--enable-logging-iteration-details. Its API key is read from the variable TWINKEEL_ENGINE_KEY. The
profile goes to --out, a report beside it; what was recorded stays in the folder --keep and can be
fitted again with --from.

With --from no load runs: a folder that was kept is fitted again; a file of step records of live
traffic is fitted as far as it covers enough (--base names the profile to start from), or compared
with a profile (--against), which ends with exit code 3 when it is off by more than --alarm.

A fit that is not good enough is refused: exit code 1, with the reasons.

\b
Examples (the second without the plug-in: with all that vLLM was started with, or its defaults):
  twinkeel calibrate --engine http://127.0.0.1:8000 --gpu h100-sxm --model qwen3-8b --out mine.yaml
  twinkeel calibrate --engine http://127.0.0.1:8000 --gpu h100-sxm --model qwen3-8b \\
                     --log vllm.log --max-num-seqs 256 --max-num-batched-tokens 2048 \\
                     --dtype bfloat16 --tensor-parallel-size 1 --scheduling-policy fcfs \\
                     --async-scheduling --out mine.yaml
  twinkeel calibrate --from mine.recording --gpu h100-sxm --model qwen3-8b --out again.yaml
  twinkeel calibrate --from steps-4711-0.jsonl --against mine.yaml
"""


class Names(NamedTuple):
    """Of the profile that is made."""

    name: str
    gpu: str
    model: str


def refuse_others(taken: Sequence[str], mode: str) -> None:
    """An option that would do nothing is an error.

    Raises:
        BadInput: one was given that this way to use the command does not take.
    """
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name not in taken:
            raise BadInput(f"{option.opts[0]} does nothing with {mode}: leave it out")


def check_out(out: Path) -> None:
    """Before minutes are spent.

    Raises:
        BadInput: the profile could not be written there.
    """
    folder = out.parent
    if not folder.is_dir():
        raise BadInput(f"--out {out}: there is no folder {folder}; make it first")
    if out.is_dir():
        raise BadInput(f"--out {out}: this is a folder; give a file in it")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"--out {out}: nothing can be written in {folder}; give another place")


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the designed load, among them a flag for each setting of the server."""
    for field, flag in reversed(FLAGS.items()):
        if field in _SWITCHES:
            declaration = f"{flag}/--no-{flag.removeprefix('--')}"
            option = click.option(declaration, field, default=None, help=_KIND_OF_SETTING)
        elif field in _TEXTS:
            option = click.option(flag, field, metavar=_TEXTS[field], help=_KIND_OF_SETTING)
        else:
            option = click.option(
                flag, field, type=click.IntRange(min=1), metavar="N", help=_KIND_OF_SETTING
            )
        command = option(command)
    for option in (
        click.option("--quick", is_flag=True, help="A third of the time, a coarser fit."),
        click.option(
            "--keep", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
            help="Folder for what is recorded; default: beside --out, with the suffix .recording.",
        ),
        click.option(
            "--log", type=click.Path(path_type=Path), metavar="FILE",
            help="vLLM's text log, where the plug-in is not installed.",
        ),
        click.option(
            "--steps", type=click.Path(path_type=Path), metavar="PATH",
            help="The plug-in's file or its folder; default: as /metrics of the server names it.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def names_of(gpu: str | None, model: str | None, name: str | None, base: Profile | None) -> Names:
    """As given, else as ``base`` has them; checked before minutes are spent.

    Raises:
        BadInput: one is missing or unknown.
    """
    gpu = gpu or (base.gpu if base else None)
    model = model or (base.model if base else None)
    for flag, given, known in (("--gpu", gpu, load_gpus()), ("--model", model, load_models())):
        if given is None:
            raise BadInput(f"{flag} is missing: one of {', '.join(known)}")
        if given not in known:
            raise BadInput(f"{flag} {given!r} is not known: {nearest(given, known)}")
    assert gpu is not None
    assert model is not None
    return Names(name or f"{gpu}/{model}", gpu, model)


def record(engine: str, folder: Path, options: Mapping[str, Any]) -> Path:
    """Run the designed load with a progress bar; ``options`` are those of ``load_options``.

    Raises:
        BadInput: it cannot be done, or was interrupted: nothing is written then.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from controller.calibration import CalibrationError, record_load

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"calibrating {engine}", total=1.0)

        def told(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)

        try:
            return record_load(
                engine, folder,
                steps=options["steps"], log=options["log"], quick=options["quick"],
                given={field: options[field] for field in FLAGS}, progress=told,
            )  # fmt: skip
        except CalibrationError as error:
            raise BadInput(str(error)) from error
        except KeyboardInterrupt:
            raise BadInput(
                "interrupted: nothing was written, the server may be used again"
            ) from None


def load_base(name: str | None) -> Profile | None:
    """Raises: FileError."""
    return load_profile(name) if name else None


class Drifted(Protocol):
    """How a recording differs from a profile."""

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""

    @property
    def interval(self) -> tuple[float, float]: ...

    @property
    def steps(self) -> int: ...


def show_drift(drift: Drifted, against: str, alarm_percent: float) -> int:
    """In a line; gives the exit code."""
    off_percent = 100 * (drift.ratio - 1)
    low, high = (100 * (edge - 1) for edge in drift.interval)
    click.echo(
        f"{drift.steps} steps took {_more(off_percent)} than {against} says "
        f"(95 % interval {low:+.1f} to {high:+.1f} %)"
    )
    if abs(off_percent) <= alarm_percent:
        return 0
    click.echo(f"above the alarm of {alarm_percent:g} %: calibrate this server again", err=True)
    return EXIT_DRIFT


def show_result(profile: Profile | None, refusal: Sequence[str], out: Path, report: Path) -> int:
    """The profile, or why there is none; gives the exit code."""
    if profile is None:
        click.echo(f"no profile: the fit is not good enough (report: {report})", err=True)
        for reason in refusal:
            click.echo(f"- {reason}", err=True)
        return EXIT_REFUSED
    show_profile(profile)
    click.echo(f"profile: {out}\nreport: {report}")
    return 0


def show_profile(profile: Profile) -> None:
    """Its coefficients with their intervals, and its errors."""
    from rich.console import Console
    from rich.table import Table

    table = Table("coefficient", "value", "95 % interval", title=profile.name)
    for part in (profile.step, profile.overheads):
        for name in part.__struct_fields__:
            coefficient = getattr(part, name)
            if not isinstance(coefficient, Coefficient):
                continue
            interval = coefficient.interval
            shown = "" if interval is None else f"{_time(interval[0])} to {_time(interval[1])}"
            table.add_row(name.removesuffix("_ns"), _time(coefficient.value), shown)
    console = Console()
    console.print(table)
    for error in profile.trust.errors:
        unseen = error.held_out_mean_percent
        held_out = "" if unseen is None else f", on held-out load {unseen:.1f} %"
        console.print(f"{error.table}: mean error {error.mean_percent:.1f} %{held_out}")
    for note in profile.trust.notes:
        console.print(note, markup=False)


def _more(percent: float) -> str:
    return f"{abs(percent):.1f} % {'more' if percent >= 0 else 'less'} time"


def _time(value_ns: float) -> str:
    for unit, size in (("ms", 1e6), ("us", 1e3)):
        if value_ns >= size:
            return f"{value_ns / size:.3f} {unit}"
    return f"{value_ns:.3f} ns"
