"""``twinkeel drill``: break one thing on purpose, and see whether the fleet bears it."""

from __future__ import annotations

import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
import msgspec

from controller.cli import (
    TOKEN_VARIABLE,
    BadInput,
    check_url,
    plain_errors,
    token_for,
    wide_console,
)
from controller.config import Settings
from controller.drills.proxy import NOTHING_PASSES, Link
from policy.drills import DRILL_KINDS, RULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from rich.table import Table

    from controller.demo import Told
    from controller.drills.asking import Admin
    from controller.drills.demo import DemoFleet
    from controller.drills.inject import Injection
    from controller.drills.measure import DrillResult, Predict
    from policy.drills import DrillKind

FOR_S_LEAST, FOR_S_MOST = 10.0, 3600.0
EXIT_FAILED = 1
TRACE_S_MOST = 120.0
"""The recorded trace is made anew once a minute, at first."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

HELP = """Break one thing on purpose, and see whether the fleet bears it.

\b
  gpu-loss     a card falls off the bus          engine-kill  an engine is killed
  ecc          a card's memory goes bad          engine-hang  an engine stands still
  oom          a long prompt ends an engine      network      a link carries nothing
  bad-answers  an engine answers with nothing

It says how soon what was hit was out of rotation, what became of every request, when things were
as before, and what people were told, beside what the twin predicts of the same fault on the same
traffic. Four criteria pass or fail; exit code 1 if one fails.

--target demo starts a fleet of simulated servers with traffic of its own. Any other target is a
controller's admin API: its callers are hit, so it must be asked for with --yes, and it is done
where its servers run.

\b
Examples:
  twinkeel drill engine-kill
  twinkeel drill ecc --for 30s --json
  twinkeel drill engine-hang --target http://127.0.0.1:8081 --data build/controller --yes
"""


def _seconds(context: click.Context, param: click.Parameter, value: str) -> float:
    """A number with a unit: 60s, 2m."""
    found = _DURATION.fullmatch(value.strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is no duration: write 60s or 2m", context, param)
    seconds = float(found[1]) * _UNITS[found[2] or "s"]
    if not FOR_S_LEAST <= seconds <= FOR_S_MOST:
        bounds = f"{FOR_S_LEAST:g}s..{FOR_S_MOST:g}s"
        raise click.BadParameter(f"{value!r} is not within {bounds}", context, param)
    return seconds


def _link(context: click.Context, param: click.Parameter, value: str) -> Link:
    """How a link is to be: KIND or KIND=AMOUNT."""
    kind, equals, amount = value.partition("=")
    amounts = {"delay": "delay_ms", "loss": "loss_permille"}
    given: dict[str, object] = {"kind": kind}
    try:
        if equals and kind in amounts:
            given[amounts[kind]] = float(amount) if kind == "delay" else int(amount)
        if bool(equals) == (kind in amounts) and kind != "clear":
            return msgspec.convert(given, Link)
    except ValueError:
        pass
    raise click.BadParameter(
        f"{value!r} is no state of a link: give blackhole, reset, delay=MS or loss=PERMILLE",
        context, param,
    )  # fmt: skip


def drill_command(predict: Predict) -> click.Command:
    """The command; ``predict`` is the twin, which this half does not know."""

    @click.command("drill", help=HELP)
    @click.argument("kind", type=click.Choice(DRILL_KINDS))
    @click.option("--target", default="demo", show_default=True, metavar="demo|URL",
                  help="What is hit.")  # fmt: skip
    @click.option("--for", "for_s", callback=_seconds, default="60s", show_default=True,
                  metavar="TIME", help="How long, traffic before and after included.")  # fmt: skip
    @click.option("--link", callback=_link, default="blackhole", show_default=True,
                  metavar="KIND", help="With network: blackhole, reset, delay=MS (one way) or"
                  " loss=PERMILLE.")  # fmt: skip
    @click.option("--on", default="", metavar="SLOT",
                  help="Name or number of the slot.  [default: the first]")  # fmt: skip
    @click.option("--yes", is_flag=True, help="Yes, to a fleet that serves callers.")
    @click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
    @click.option("--data", type=click.Path(path_type=Path), default=Path(Settings().data),
                  show_default=True, metavar="FOLDER",
                  help="Of a target: the controller's data folder, if it is here.")  # fmt: skip
    @click.option("--token-file", type=click.Path(path_type=Path), default=None, metavar="FILE",
                  help=f"Of a target: the admin token; else the variable {TOKEN_VARIABLE}; else"
                  " admin.token in the data folder.")  # fmt: skip
    @click.option("--profile", default="", metavar="NAME",
                  help="Of a target: its step times, for the prediction.")  # fmt: skip
    @click.option("--keep", type=click.Path(file_okay=False, path_type=Path), default=None,
                  metavar="FOLDER", help="Of the demo: leave its files there.")  # fmt: skip
    def drill(
        kind: DrillKind, target: str, for_s: float, link: Link, on: str, yes: bool, as_json: bool,
        data: Path, token_file: Path | None, profile: str, keep: Path | None,
    ) -> None:  # fmt: skip
        from controller.drills.asking import Admin, DrillError

        say = _say_on_stderr(time.monotonic())
        with plain_errors(), ended_in_order():
            try:
                if target == "demo":
                    result = run_demo(kind, for_s, on, keep, predict, say, link)
                else:
                    check_url(target, "--target", "demo or URL", path=False)
                    admin = Admin(target, token_for(token_file, data))
                    live = LiveFleet(target, admin, data, profile)
                    result = run_live(kind, live, for_s, on, yes, predict, say, link)
            except DrillError as error:
                raise BadInput(str(error)) from error
        if as_json:
            click.echo(msgspec.json.encode(result).decode())
        else:
            show(result)
        raise SystemExit(0 if result.passed else EXIT_FAILED)

    return drill


@contextmanager
def ended_in_order() -> Iterator[None]:
    """At SIGTERM, and when the terminal is gone, what was broken is taken back, as at Ctrl-C."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # once is enough: taking back takes a while
        raise SystemExit(128 + number)

    try:
        for each, how in before.items():
            if how is not signal.SIG_IGN:  # it is, under nohup
                signal.signal(each, end)
        yield
    finally:
        for each, how in before.items():
            signal.signal(each, how)


def _say_on_stderr(began_s: float) -> Callable[[str], None]:
    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - began_s:6.1f} s  {text}", err=True)

    return say


# Targets


class DemoTarget:
    """A demo fleet that runs."""

    name = "demo"

    def __init__(self, fleet: DemoFleet) -> None:
        self._fleet = fleet
        self.admin = fleet.admin
        self.profiles = fleet.profiles

    def play(
        self, seconds: float, at: Sequence[tuple[float, Callable[[], None]]]
    ) -> Sequence[Told] | None:
        return self._fleet.traffic(seconds, at)

    def finish(self) -> Path | None:
        self._fleet.close()
        return self._fleet.data / "trace" / "trace.parquet"


class LiveFleet:
    """A fleet that serves callers: they are its traffic."""

    def __init__(self, name: str, admin: Admin, data: Path, profile: str) -> None:
        self.name = name
        self.admin = admin
        self.profiles: Mapping[str, str] = {"": profile} if profile else {}
        self._trace = data / "trace" / "trace.parquet"
        self._until_s = 0.0

    def play(
        self, seconds: float, at: Sequence[tuple[float, Callable[[], None]]]
    ) -> Sequence[Told] | None:
        began_s = time.monotonic()
        for at_s, act in at:
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            act()
        time.sleep(max(0.0, began_s + seconds - time.monotonic()))
        self._until_s = time.time()
        return None

    def finish(self) -> Path | None:
        """Wait until what passed is in the trace."""
        if not (self._trace.parent.is_dir() and self.profiles):
            return None
        deadline_s = time.monotonic() + TRACE_S_MOST
        while time.monotonic() < deadline_s:
            if self._trace.is_file() and self._trace.stat().st_mtime > self._until_s:
                return self._trace
            time.sleep(1.0)
        return None


def run_demo(
    kind: DrillKind,
    for_s: float,
    on: str,
    keep: Path | None,
    predict: Predict,
    say: Callable[[str], object],
    link: Link = NOTHING_PASSES,
) -> DrillResult:
    """A drill on a demo fleet of its own.

    Raises:
        DrillError: it could not be done.
    """
    from controller.drills.asking import slot_named
    from controller.drills.demo import DemoFleet
    from controller.drills.inject import INJECTIONS
    from controller.drills.measure import run_drill

    with TemporaryDirectory(prefix="twinkeel-drill-") as scratch:
        folder = Path(scratch)
        if keep is not None:
            folder = keep
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise BadInput(f"--keep {folder}: there is something in it; give an empty folder")
        say("a controller and three simulated servers start")
        with DemoFleet(folder, kind) as fleet:
            slot = slot_named(fleet.admin.fleet(), on)
            injection = INJECTIONS[kind](slot, fleet.admin, fleet.gateway, link=link)
            _check(injection)
            return run_drill(injection, DemoTarget(fleet), for_s, predict, say)


def run_live(
    kind: DrillKind,
    fleet: LiveFleet,
    for_s: float,
    on: str,
    yes: bool,
    predict: Predict,
    say: Callable[[str], object],
    link: Link = NOTHING_PASSES,
) -> DrillResult:
    """A drill on a fleet that serves callers.

    Raises:
        DrillError: it cannot be done there, or nobody said yes to it.
    """
    from controller.drills.asking import DrillError, slot_named
    from controller.drills.inject import INJECTIONS
    from controller.drills.measure import run_drill

    view = fleet.admin.fleet()
    slot = slot_named(view, on)
    injection = INJECTIONS[kind](slot, fleet.admin, link=link)
    _check(injection)
    others = sum(each.state in ("serving", "warm", "outside") for each in view.slots) - 1
    if not yes:
        raise DrillError(
            f"this would be done to callers of {fleet.name}: {injection.what} ({slot.model}"
            f" {slot.version}, {slot.url}, {slot.domain or 'no domain'}), while {others} other"
            f" servers are there; it takes {for_s:g} s. Give --yes if that is meant"
        )
    return run_drill(injection, fleet, for_s, predict, say)


def _check(injection: Injection) -> None:
    from controller.drills.asking import DrillError

    if why := injection.refusal():
        raise DrillError(f"{injection.kind}: {why}")


# Showing it


def show(result: DrillResult) -> None:
    """Print it."""
    console = wide_console()
    console.print(f"{result.kind} on {result.target}: {result.what}", highlight=False)
    if result.simulated:
        console.print(f"  simulated: {result.simulated}", highlight=False)
    console.print(_figures(result))
    if result.not_predicted:
        console.print(f"no prediction: {result.not_predicted}", highlight=False)
    for raised in result.measured.alerts:
        console.print(f"alert after {raised.after_s:.3f} s: {raised.key}: {raised.cause}",
                      highlight=False)  # fmt: skip
    for each in result.criteria:
        word = "passed" if each.passed else "FAILED"
        console.print(f"{word}  {each.name}: {each.why}", highlight=False)


def _figures(result: DrillResult) -> Table:
    """Measured beside predicted."""
    from rich.table import Table

    measured, predicted = result.measured, result.predicted
    errors = {each.figure: f"{each.error_pct:.1f} %" for each in result.differences}
    table = Table("", "measured", "twin", "off by")
    rows = (
        ("isolated after, s", "isolated_s", "isolated_s"),
        ("recovered after, s", "recovered_s", "recovered_s"),
        ("requests offered", "offered", ""), ("answered in full", "answered", ""),
        ("late among them", "late", ""), ("degraded", "degraded", "degraded"),
        ("refused, with a reason", "refused", ""), ("failed", "failed", "failed"),
        ("could have gone elsewhere", "avoidable", ""), ("lost", "lost", ""),
        ("replicas serving, least", "serving_least", ""),
    )  # fmt: skip
    for words, name, figure in rows:
        twin = "" if predicted is None else _told(getattr(predicted, name))
        table.add_row(words, _told(getattr(measured, name)), twin, errors.get(figure, ""))
    table.caption = f"off by: {RULE}"
    return table


def _told(value: float | int | None) -> str:
    if value is None:
        return "never"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
