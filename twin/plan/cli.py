"""The command `plan`: how many replicas, of which card, what they bear; and twelve questions."""

from __future__ import annotations

import math
import shlex
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policy.files import policy_names
from twin.cli import BadInput, completed, plain_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twin.plan.cell import FaultName
    from twin.plan.planning import Plan
    from twin.plan.preparing import Ready
    from twin.plan.questions import Answer, Asking
    from twin.plan.runs import Runs

HELP = """Plan capacity: the fewest replicas that hold your service levels, on which card, and why.

Takes the busiest stretch of a trace, sizes each card for each growth of the load (a formula
brackets, the twin confirms), loses a card at the peak, finds the knee, and says what gives way
first. Prints a coarse answer at once, then the refined one. Every figure has an interval and a
kind: measured, fitted, extrapolated (a scaled profile) or estimated.

\b
  twinkeel plan --trace shipped:demo --slo slo.yaml --grow 1,1.5,2,3 \\
                --gpus h100-sxm,h200 --faults n-1,ecc,spike
  twinkeel plan ask users --trace shipped:demo --slo slo.yaml --users 20000

\b
slo.yaml:
  schema: 1
  confidence_percent: 90
  classes:
    P0: {ttft_s_p95: 0.8, attainment_percent: 95}
    P2: {attainment_percent: 90}
  tiers:
    stable: {attainment_percent: 95}
"""


def _list(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise BadInput(f"{parameter.opts[0]}: write names with commas")
    return found


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise BadInput(f"{parameter.opts[0]} {value}: write a number")
    return value


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise BadInput(
            f"{parameter.opts[0]} {text}: write numbers with commas, as in 1,1.5,2"
        ) from error
    if not all(0 < number < 1000 for number in found):
        raise BadInput(f"{parameter.opts[0]} {text}: each must be above 0 and below 1000")
    return found


def _sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    numbers = _numbers(context, parameter, text)
    if any(number != int(number) for number in numbers):
        raise BadInput(f"{parameter.opts[0]} {text}: write whole numbers of cards, as in 1,2,4")
    return tuple(int(number) for number in numbers)


html_option = click.option(
    "--html", "html_path", type=click.Path(path_type=Path), metavar="FILE",
    help="A report that opens without any network.",
)  # fmt: skip
OPTIONS = (
    click.option("--trace", "trace_path", metavar="TRACE", help="A trace file, or shipped:demo."),
    click.option(
        "--slo", "slo_path", type=click.Path(path_type=Path), metavar="FILE",
        help="Service levels, see above.",
    ),
    click.option(
        "--gpus", default="h100-sxm", show_default=True, callback=_list, metavar="CARDS",
        help="Cards with commas, or profile files.",
    ),
    click.option(
        "--tp", "tp_sizes", default="1", show_default=True, callback=_sizes, metavar="SIZES",
        help="Cards a replica (tensor-parallel sizes), with commas.",
    ),
    click.option(
        "--model", default="", metavar="NAME",
        help="The model that is served.  [default: the trace's most frequent]",
    ),
    click.option(
        "--policy", "policy_name", default="stable", show_default=True, metavar="NAME",
        shell_complete=completed(policy_names), help="A preset or a policy file.",
    ),
    click.option(
        "--prices", "prices_path", type=click.Path(path_type=Path), metavar="FILE",
        help="Prices by card.  [default: the shipped table's, which are assumptions]",
    ),
    click.option(
        "--rows", default=10_000, show_default=True, metavar="N",
        help="Requests of the stretch around the peak.",
    ),
    click.option(
        "--draws", type=click.IntRange(1, 40), default=4, show_default=True, metavar="N",
        help="Days that a size is confirmed on: the recorded one and others like it.",
    ),
    click.option(
        "--assume-output", default=0, metavar="TOKENS",
        help="Answer length where the trace does not know it.",
    ),
    click.option("--seed", default=0, help="Of everything that is drawn."),
    click.option(
        "--jobs", type=click.IntRange(0, 64), default=0, metavar="N",
        help="Processes; 0: one a core.",
    ),
    click.option(
        "--out", type=click.Path(path_type=Path), metavar="FILE", help="All of it as JSON.",
    ),
    html_option,
    click.option("--quiet", is_flag=True, help="No progress, no coarse answer."),
)  # fmt: skip


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@contextmanager
def clear_errors() -> Iterator[None]:
    from twin.plan.inputs import PlanError

    with plain_errors():
        try:
            yield
        except PlanError as error:
            raise BadInput(str(error)) from error


@click.group("plan", help=HELP, invoke_without_command=True)
@plan_options
@click.option(
    "--grow", "growths", default="1,1.5,2,3", show_default=True, callback=_numbers,
    metavar="FACTORS", help="Growths of the load, with commas.",
)  # fmt: skip
@click.option(
    "--faults",
    default="n-1",
    show_default=True,
    callback=_list,
    metavar="NAMES",
    help="At the peak: n-1, host, ecc, slow, spike; none: none.",
)
@click.pass_context
def plan(
    context: click.Context, /, growths: tuple[float, ...], faults: tuple[str, ...], **given: Any
) -> None:
    if context.invoked_subcommand is not None:
        return
    from twin.plan.cell import FAULTS
    from twin.plan.planning import make_plan
    from twin.plan.preparing import prepared
    from twin.plan.show import report, write_json

    unknown = [name for name in faults if name not in FAULTS]
    if unknown:
        raise BadInput(f"--faults {unknown[0]}: use {', '.join(FAULTS)}")
    began_s = time.perf_counter()
    with clear_errors(), prepared(**given) as ready:
        if not given["quiet"]:
            _coarse(ready, growths)
        with _runs(given["jobs"], given["quiet"]) as (runs, say):
            from dataclasses import replace

            known: tuple[FaultName, ...] = faults  # type: ignore[assignment]
            found = make_plan(
                ready.machines, ready.rejected, growths, known, ready.setting, runs,
                policy=given["policy_name"], say=say,
            )  # fmt: skip
            found = replace(found, wall_s=time.perf_counter() - began_s)
        from rich.console import Console

        Console().print(report(found))
        if given["out"] is not None:
            write_json(found, given["out"])
            click.echo(f"plan: {given['out']}")
        if given["html_path"] is not None:
            more = {"Growths": ", ".join(f"{growth:g}x" for growth in growths),
                    "Faults": ", ".join(faults)}  # fmt: skip
            title = f"Capacity plan for {ready.setting.load.trace}"
            _write_page("plan", title, found, given["html_path"], ready.facts(), more)
    if found.best(growths[0]) is None:
        context.exit(1)


def _coarse(ready: Ready, growths: tuple[float, ...]) -> None:
    """The formula's answer, and whether it holds on a short stretch."""
    from rich.console import Console
    from rich.text import Text

    from twin.plan.preparing import first_look
    from twin.plan.show import sizes_table

    if not ready.machines:
        return
    found, checks = first_look(ready, growths)
    console = Console()
    console.print(sizes_table(found, "First, by formula"))
    for text in checks:
        console.print(Text(text))


@contextmanager
def _runs(jobs: int, quiet: bool) -> Iterator[tuple[Runs, Callable[[str], None]]]:
    """Processes and a line that says how far it is, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from twin.plan.runs import Runs

    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ExitStack() as stack:
        bar = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=hidden)
        )
        task = bar.add_task("sizes")
        what = {"now": "sizes"}

        def say(text: str) -> None:
            what["now"] = text
            bar.update(task, description=text)

        def done(count: int) -> None:
            bar.update(task, description=f"{what['now']}: {count} runs played")

        yield stack.enter_context(Runs(jobs, done)), say


@plan.group("ask")
def ask() -> None:
    """Twelve questions, each answered in sentences: fleet, cost, faults, flags."""


have_option = click.option(
    "--have",
    default=0,
    metavar="N",
    help="Replicas of the first card that there are; 0: as many as the load takes.",
)


def _answer(function: Callable[[Asking], Answer], given: dict[str, Any]) -> None:
    from twin.plan.preparing import prepared

    have = given.pop("have", 0)
    with clear_errors(), prepared(**given) as ready:
        with _runs(given["jobs"], given["quiet"]) as (runs, _):
            answer = function(ready.asking(runs, have))
        _tell(answer, given["out"], given["html_path"], ready.facts())


def _tell(
    answer: Answer, out: Path | None, html: Path | None, facts: dict[str, Any] | None = None
) -> None:
    from rich.console import Console
    from rich.text import Text

    from twin.plan.show import write_json

    for text in answer.sentences:
        Console().print(Text(text))
    for figure in answer.figures:
        click.echo(f"  {figure.name}: {figure.text()}")
    if out is not None:
        write_json(answer, out)
    if html is not None:
        from twin.plan.catalogue import question_of

        name = str(click.get_current_context().info_name)
        _write_page(name, question_of(name).title, answer, html, facts)


def _write_page(
    question: str, title: str, thing: Plan | Answer, path: Path, facts: dict[str, Any] | None,
    more: dict[str, str] | None = None,
) -> None:  # fmt: skip
    from twin.plan.page import Paper, write_page
    from twin.plan.show import document_of

    command = shlex.join(["twinkeel", *sys.argv[1:]])
    write_page(Paper(question, title, document_of(thing), facts, command, more or {}), path)
    click.echo(f"report: {path}")


@ask.command("users")
@plan_options
@click.option("--users", required=True, type=click.IntRange(1), metavar="N",
            help="So many; the trace's are counted over all of it.")  # fmt: skip
def ask_users(users: int, **given: Any) -> None:
    """How many GPUs for so many users?"""
    from twin.plan.questions import gpus_for_users

    _answer(lambda asking: gpus_for_users(asking, users), given)


@ask.command("capacity")
@plan_options
@have_option
@click.option("--p99", default=2.0, show_default=True, type=click.FloatRange(0.001), metavar="S",
              callback=_finite,
              help="Seconds to the first token of the first class.")  # fmt: skip
def ask_capacity(p99: float, **given: Any) -> None:
    """How many users on what I have, before p99 falls off?"""
    from twin.plan.questions import users_on_fleet

    _answer(lambda asking: users_on_fleet(asking, p99), given)


@ask.command("fit")
@click.argument("name", metavar="CARD/MODEL[@tpN]")
@click.option("--context", "context_tokens", default=8192, show_default=True,
              type=click.IntRange(1), metavar="TOKENS",
              help="Of the longest request, prompt and answer together.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="The same as JSON.")
@html_option
def ask_fit(
    name: str, context_tokens: int, out: Path | None, html_path: Path | None
) -> None:  # fmt: skip
    """Do the model and that context fit on the card?"""
    from twin.plan.questions import does_it_fit

    with clear_errors():
        _tell(does_it_fit(name, context_tokens), out, html_path)


@ask.command("tp")
@plan_options
@click.option("--large", default=8, show_default=True, type=click.IntRange(2), metavar="CARDS",
              help="Of one replica.")  # fmt: skip
@click.option("--small", default=4, show_default=True, type=click.IntRange(1), metavar="CARDS",
              help="Of each of the several replicas on as many cards.")  # fmt: skip
def ask_tp(large: int, small: int, **given: Any) -> None:
    """Is TP8 worth twice TP4?"""
    from twin.plan.questions import tensor_parallel

    _answer(lambda asking: tensor_parallel(asking, large, small), given)


@ask.command("gpu")
@plan_options
def ask_gpu(**given: Any) -> None:
    """H100, H200 or a cheaper card? Give --gpus h100-sxm,h200,l40s."""
    from twin.plan.questions import which_gpu

    _answer(which_gpu, given)


@ask.command("double")
@plan_options
@have_option
@click.option("--factor", default=2.0, show_default=True, type=click.FloatRange(0.01, 100),
              callback=_finite, help="Times today's load.")  # fmt: skip
def ask_double(factor: float, **given: Any) -> None:
    """What if traffic doubles?"""
    from twin.plan.questions import doubled

    _answer(lambda asking: doubled(asking, factor), given)


@ask.command("n+1")
@plan_options
def ask_n1(**given: Any) -> None:
    """How many so that a card may be lost at the peak?"""
    from twin.plan.questions import n_plus_one

    _answer(n_plus_one, given)


@ask.command("cost")
@plan_options
@have_option
def ask_cost(**given: Any) -> None:
    """What does it cost a month, and a million good tokens?"""
    from twin.plan.questions import cost

    _answer(cost, given)


@ask.command("burst")
@plan_options
@have_option
@click.option("--factor", default=2.0, show_default=True, type=click.FloatRange(1, 100),
              callback=_finite, help="Times the load of that time.")  # fmt: skip
def ask_burst(factor: float, **given: Any) -> None:
    """A burst: buffer it or overflow?"""
    from twin.plan.questions import burst

    _answer(lambda asking: burst(asking, factor), given)


@ask.command("cold-start")
@plan_options
@have_option
def ask_cold_start(**given: Any) -> None:
    """What does a cold start cost?"""
    from twin.plan.questions import cold_start

    _answer(cold_start, given)


@ask.command("flag")
@plan_options
@have_option
def ask_flag(**given: Any) -> None:
    """Which vLLM flag limits me?"""
    from twin.plan.questions import limiting_flag

    _answer(limiting_flag, given)


@ask.command("shed")
@plan_options
@have_option
@click.option("--growth", default=0.0, type=click.FloatRange(0, 1000), callback=_finite,
              help="Of the load; 0: a little beyond the knee.")  # fmt: skip
def ask_shed(growth: float, **given: Any) -> None:
    """Which business line can be shed with the least harm?"""
    from twin.plan.questions import least_harm

    _answer(lambda asking: least_harm(asking, growth), given)
