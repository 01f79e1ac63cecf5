"""Commands on evidence: validate a policy, show what an evidence file says."""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from policy.evidence import EvidenceError, decode, encode, key_of, signed
from policy.files import decode as decode_document
from policy.files import load_policy, policy_names, profile_names
from policy.parameters import Parameters
from twin.cli import BadInput, completed, paired_profiles, plain_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from policy.evidence import Evidence
    from twin.validate.making import Asked

KEY_VARIABLE = "TWINKEEL_DEPLOY_KEY_FILE"
VALIDATE_HELP = f"""Gather the evidence that CANDIDATE may take over from the live policy.

CANDIDATE is a policy file or a preset. It is played beside the live policy on recorded traces,
under stress (overload, long prompts, doubtful answers, callers that try again, a flapping replica)
and under every kind of fault, with the same seeds. The evidence file says for each gate whether it
holds and why; beside it lies the decision log of one run, which the controller replays.

Exit code 0: every gate holds; 1: one does not; 2: something that was asked for cannot be used.

\b
Examples:
  twinkeel validate mine.yaml --against stable --trace shipped:demo --quick
  twinkeel validate mine.yaml --against live.yaml --trace week.parquet --seeds 5 \\
                    --profile h100-sxm/qwen3-8b --replicas 8 --key deploy.key --out ev.json

Without --key (or {KEY_VARIABLE}) the evidence is not signed, and a controller refuses it.
"""


@click.command("validate", help=VALIDATE_HELP)
@click.argument("candidate", metavar="CANDIDATE", shell_complete=completed(policy_names))
@click.option(
    "--against", required=True, metavar="LIVE", shell_complete=completed(policy_names),
    help="The policy that is live: a file or a preset.",
)  # fmt: skip
@click.option(
    "--trace", "traces", multiple=True, required=True, metavar="TRACE",
    help="A recorded trace, or a shipped one such as shipped:demo; repeat.",
)  # fmt: skip
@click.option(
    "--profile", "profiles", multiple=True, default=("h100-sxm/qwen3-8b",), show_default=True,
    metavar="NAME", shell_complete=completed(profile_names), help="As in `twinkeel replay`.",
)  # fmt: skip
@click.option(
    "--replicas", type=click.IntRange(1, 1000), multiple=True, default=(4,), show_default=True,
    metavar="N", help="Of each profile, in order.",
)  # fmt: skip
@click.option(
    "--scenario", "scenarios", multiple=True, metavar="NAME|FILE",
    help="Its first run is played too, under both policies; repeat.",
)  # fmt: skip
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=None, metavar="N",
    help="Seeds of each run.  [default: 5; with --quick 2]",
)  # fmt: skip
@click.option(
    "--slo", default="", metavar="LIMITS",
    help="Seconds to first token by class, such as P0=1.5,P1=4,P2=10, for both policies."
    "  [default: the live policy's deadlines]",
)  # fmt: skip
@click.option(
    "--attain", type=click.FloatRange(0, 100), default=95.0, show_default=True, metavar="PERCENT",
    help="Of each class's requests that must be in time on the traces.",
)  # fmt: skip
@click.option(
    "--margin", type=click.FloatRange(0, 100), default=1.0, show_default=True, metavar="POINTS",
    help="By which the candidate may miss more than the live policy on the traces.",
)  # fmt: skip
@click.option(
    "--canary", type=click.IntRange(1, 999), default=50, show_default=True, metavar="PERMILLE",
    help="Share of the keys that the expectation for the canary is for.",
)  # fmt: skip
@click.option(
    "--drifting", multiple=True, metavar="PROFILE",
    help="A profile whose drift alarm is on; repeat.",
)  # fmt: skip
@click.option(
    "--trace-seconds", type=click.FloatRange(10, 1e6), default=None, metavar="S",
    help="Of each trace, from its beginning.  [default: 900; with --quick 120]",
)  # fmt: skip
@click.option(
    "--quick", is_flag=True,
    help="About a minute, for demonstrations: one seed of each stress run, shorter runs. The"
    " evidence says so.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(0, 64), default=0, metavar="N", help="Processes; 0: one a core."
)  # fmt: skip
@click.option(
    "--key", "key_path", type=click.Path(path_type=Path, dir_okay=False), default=None,
    envvar=KEY_VARIABLE, metavar="FILE", help=f"The deploy key.  [env: {KEY_VARIABLE}]",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("build/evidence.json"),
    show_default=True, metavar="FILE",
    help="The evidence; the decision log goes beside it, with the ending .log.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress, no table.")
def validate_command(key_path: Path | None, out: Path, quiet: bool, **options: Any) -> None:
    from twin.validate.making import validate

    with plain_evidence_errors():
        key = None if key_path is None else key_of(key_path.read_text("utf-8"), str(key_path))
        asked = asked_for(**options)
        with _bar(quiet) as told:
            evidence, log = validate(asked, told)
        if key is not None:
            evidence = signed(evidence, key)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(encode(evidence))
        log_beside(out).write_bytes(log)
    _report(evidence, out, quiet)
    if not evidence.holds:
        raise SystemExit(1)


@click.group("evidence")
def evidence_group() -> None:
    """Evidence files, as `twinkeel validate` writes them."""


@evidence_group.command("show")
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--figures", is_flag=True, help="Every figure with its interval as well.")
def show(path: Path, figures: bool) -> None:
    """Say in words what an evidence file says. Exit code 1 if one of its gates fails.

    The signature is not checked: that takes the deploy key, and is the controller's business.
    """
    from rich.console import Console

    from twin.validate.showing import print_evidence

    with plain_evidence_errors():
        evidence = decode(path.read_bytes(), str(path))
    print_evidence(evidence, Console(), figures)
    if not evidence.holds:
        raise SystemExit(1)


def asked_for(
    *,
    candidate: str,
    against: str,
    traces: tuple[str, ...],
    profiles: tuple[str, ...],
    replicas: tuple[int, ...],
    scenarios: tuple[str, ...],
    seeds: int | None,
    slo: str,
    attain: float,
    margin: float,
    canary: int,
    drifting: tuple[str, ...],
    trace_seconds: float | None,
    quick: bool,
    jobs: int,
) -> Asked:
    """The command line as a value.

    Raises:
        BadInput, FileError: which part of it cannot be used.
    """
    from twin.scenario import load_scenario
    from twin.scenario.spec import Replicas
    from twin.validate.gates import Goals
    from twin.validate.making import FULL, QUICK, Asked

    numbers = {"--attain": attain, "--margin": margin, "--trace-seconds": trace_seconds}
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise BadInput(f"{name} {number}: write a number")
    files = tuple(
        str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name for name in profiles
    )
    live = load_policy(against)
    length = QUICK if quick else FULL
    if trace_seconds is not None:
        length = type(length)(trace_seconds, length.stress_s)
    return Asked(
        name=Path(candidate).stem,
        candidate=load_policy(candidate),
        live_name=Path(against).stem,
        live=live,
        judged_by=with_slo(live, slo),
        traces=traces,
        fleet=tuple(
            Replicas(profile=name, count=count) for name, count in paired_profiles(files, replicas)
        ),
        goals=Goals(attain / 100, margin / 100),
        scenarios=tuple(load_scenario(name) for name in scenarios),
        seeds=seeds or (2 if quick else 5),
        quick=quick,
        share_permille=canary,
        drifting=drifting,
        jobs=jobs,
        length=length,
    )


def with_slo(live: Parameters, text: str) -> Parameters:
    """The live policy with the deadlines of ``P0=1.5,P1=4``; those of its lines go first no more.

    Raises:
        BadInput, FileError: a class that there is not, or a limit that cannot be.
    """
    if not text:
        return live
    changed: dict[str, Any] = {}
    for part in text.split(","):
        sla, _, seconds = part.partition("=")
        try:
            changed[f"{sla.lower()}_deadline_ms"] = round(1000 * float(seconds))
        except (ValueError, OverflowError):
            raise BadInput(f"--slo {part!r}: write CLASS=SECONDS, such as P0=1.5") from None
        if sla not in ("P0", "P1", "P2"):
            raise BadInput(f"--slo {part!r}: there are the classes P0, P1 and P2")
    raw = msgspec.to_builtins(live)
    kept = {name: {**line, "deadline_ms": 0} for name, line in raw["classes"]["lines"].items()}
    raw["classes"] = {**raw["classes"], **changed, "lines": kept}
    return decode_document(raw, Parameters, "--slo")


def log_beside(out: Path) -> Path:
    """Where the decision log of an evidence file lies."""
    return out.with_suffix(".log")


@contextmanager
def plain_evidence_errors() -> Iterator[None]:
    """``plain_errors``, for evidence and keys too."""
    with plain_errors():
        try:
            yield
        except EvidenceError as error:
            raise BadInput(str(error)) from error


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Progress on standard error; none if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    off = quiet or not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=off) as bar:
        task = bar.add_task("validate", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _report(evidence: Evidence, out: Path, quiet: bool) -> None:
    from rich.console import Console

    from twin.validate.showing import print_evidence

    if not quiet:
        print_evidence(evidence, Console())
    if not evidence.signature:
        click.echo(
            f"note: the evidence is not signed, so a controller refuses it: give --key FILE or"
            f" {KEY_VARIABLE}",
            err=True,
        )
    click.echo(f"evidence: {out}")
