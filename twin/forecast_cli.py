"""The command group `forecast`: train a forecaster on traces, measure it, look at it."""

from __future__ import annotations

import functools
import json
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twin.cli import BadInput, plain_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from policy.forecast.files import Card, Score
    from policy.forecast.series import Array, Series
    from twin.forecasting import Start

_DIR = click.Path(file_okay=False, path_type=Path)
_OURS = ("controller", "policy", "traces", "twin")
_SHOWN_CHARS = 12
SEEN = "On the last fifth of each series, which a twin of it had not seen, beside the last value:"


def _clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """What the user can mend is one clear line and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            from policy.forecast.files import ForecastError

            with plain_errors():
                try:
                    command(*args, **options)
                except ForecastError as error:
                    raise BadInput(str(error)) from error
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in _OURS:
                raise
            raise BadInput(
                f"{error.name} is not installed: forecasting needs the extra `forecast`, as in"
                " pip install 'twinkeel[forecast]'"
            ) from error

    return run


@contextmanager
def _working() -> Iterator[Callable[[str, str], None]]:
    """Shows on standard error what is being done and how far it is, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.fields[far]}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("starting", total=None, far="")
        yield lambda what, far: bar.update(task, description=what, far=far)


def _minutes(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"--horizons {text}: write minutes with commas, such as 5,10,30") from error


_START_OPTION = click.option(
    "--start", "starts", multiple=True, metavar="WHEN",
    help="When a TRACE begins, in your local time: 2024-05-10, 'fri 08:30' or 08:30. Repeat in the"
    " order of TRACE; `-` where it is not known.",
)  # fmt: skip
_NAME_OPTION = click.option(
    "--name", "names", multiple=True, metavar="NAME",
    help="Of the load in a TRACE, where there are several loads. Repeat in the order of TRACE; all"
    " without one are the same load at other times. Part of what is learned is of one load alone.",
)  # fmt: skip
_TRACES = click.argument("traces", nargs=-1, required=True, metavar="TRACE...")


@click.group()
def forecast() -> None:
    """Forecast the load: train a forecaster on traces, measure it, look at it.

    A TRACE is a trace file, a shipped one (shipped:demo), a public trace as it was published, or a
    CSV file of rates with the columns t_s, rate and perhaps peak, a row a window or finer, t_s in
    seconds from its start or from 1970. Of a trace both requests and tokens a second are taken.
    """


@forecast.command("train", short_help="Train a forecaster on traces.")
@_TRACES
@click.option("--out", required=True, type=_DIR, metavar="DIR", help="Where the forecaster goes.")
@click.option(
    "--window", "window_s", type=float, default=300.0, show_default=True, metavar="SECONDS",
    help="Rates are averaged over so long, and forecast for it.",
)  # fmt: skip
@click.option(
    "--horizons", "minutes", callback=_minutes, metavar="MINUTES",
    help="How far ahead, with commas.  [default: the next two windows, 30 and 60 minutes]",
)  # fmt: skip
@click.option(
    "--cold-start", "cold_start_s", type=float, default=120.0, show_default=True,
    metavar="SECONDS", help="What a new replica takes: it is a horizon too.",
)  # fmt: skip
@_START_OPTION
@_NAME_OPTION
@click.option("--members", type=click.IntRange(1, 100), help="Networks that are averaged.")
@click.option("--epochs", type=click.IntRange(1, 10_000), help="Most passes over the data.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of everything that is drawn.")
@click.option(
    "--no-check", is_flag=True,
    help="Do not measure it first, on the last fifth of each series: half the time.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the forecaster in DIR.")
@_clear_errors
def train(
    traces: tuple[str, ...],
    out: Path,
    window_s: float,
    minutes: tuple[float, ...] | None,
    cold_start_s: float,
    starts: tuple[str, ...],
    names: tuple[str, ...],
    no_check: bool,
    force: bool,
    **chosen: int | None,
) -> None:
    """Train a forecaster on TRACEs and keep it in the folder DIR.

    It is fitted twice: to the first four fifths of each series, to see how well it forecasts the
    rest, and then to all, which is kept. Two days are good, a week is better.

    \b
    Examples:
      twinkeel forecast train week.parquet --out forecaster --start 'mon 00:00'
      twinkeel forecast train rates.csv --out forecaster --window 600 --horizons 10,30,60
    """
    from policy.forecast.files import CARD, ForecastError, save
    from policy.forecast.forecaster import LoadForecaster
    from twin.forecasting import check_length, horizons_of, measured

    horizons = horizons_of(window_s, minutes, cold_start_s)
    if out.exists() and not force:
        raise ForecastError(f"{out}: exists already; choose another folder, or replace it: --force")
    if force and out.is_dir() and any(out.iterdir()) and not (out / CARD).is_file():
        raise ForecastError(f"{out}: holds something else than a forecaster; choose another folder")
    parameters = {name: value for name, value in chosen.items() if value is not None}
    forecaster = LoadForecaster(horizons=horizons, **parameters)
    with _working() as tell:
        read = _read(traces, window_s, starts, names, tell)
        for path, series in read:
            for note in check_length(path, series, horizons):
                click.echo(f"warning: {note}", err=True)
        pairs = [(path, each) for path, series in read for each in series]
        every = [each for _, each in pairs]
        about = f"{len(every)} series of {sum(len(each) for each in every):,} windows"
        scores: list[Score] = []
        if not no_check:
            scores = measured(forecaster, pairs, lambda what: tell(f"{about}: {what}", ""))
        tell(f"{about}: training on all", "")
        forecaster.fit(every)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        card = save(out, forecaster, every, created=now, metrics=scores)
    if scores:
        _print_scores(scores, card.window_s, SEEN)
    click.echo(f"forecaster: {out}")


@forecast.command("evaluate", short_help="Measure a forecaster on traces.")
@click.argument("folder", type=_DIR, metavar="DIR")
@_TRACES
@_START_OPTION
@_NAME_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
@_clear_errors
def evaluate(
    folder: Path,
    traces: tuple[str, ...],
    starts: tuple[str, ...],
    names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Let the forecaster in DIR forecast TRACEs, window after window, and see what came.

    At each window it is shown only what was known by then, after a first day or the first third.
    WAPE is the sum of the errors as a share of the sum of the rates, pinball the loss of the 0.95
    quantile as the same share, each beside that of saying that it stays as it is. Of the windows
    95 % should lie under that quantile.

    \b
    Examples:
      twinkeel forecast evaluate forecaster nextweek.parquet --start 'mon 00:00'
      twinkeel forecast evaluate forecaster rates.csv --json
    """
    import msgspec

    from policy.forecast.files import data_hash, load
    from twin.forecasting import evaluation_begins, measure

    forecaster, card = load(folder)
    peaks = any(each.peaks for each in card.learned)
    known = {each.hash for each in card.learned}
    scores: list[Score] = []
    with _working() as tell:
        read = _read(traces, card.window_s, starts, names, tell)
        _note_new(read, card)
        for path, series in read:
            for each in series:
                first = evaluation_begins(path, each, card.horizons)
                if data_hash([each]) in known:
                    click.echo(
                        f"warning: {path}: it was trained on these {each.name}, and does worse on"
                        " what it has not seen",
                        err=True,
                    )
                tell(f"forecasting {path}'s", each.name)
                scores += measure(forecaster, each, first, trace=str(path), peaks=peaks)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(scores), indent=2))
    else:
        _print_scores(scores, card.window_s, f"{folder}, beside the last value:")


@forecast.command("show", short_help="Say what a forecaster is, or what it forecasts.")
@click.argument("folder", type=_DIR, metavar="DIR")
@click.argument("traces", nargs=-1, metavar="[TRACE...]")
@_START_OPTION
@_NAME_OPTION
@_clear_errors
def show(
    folder: Path, traces: tuple[str, ...], starts: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """Show the card of the forecaster in DIR, or what it says comes after the end of TRACEs.

    \b
    Examples:
      twinkeel forecast show forecaster
      twinkeel forecast show forecaster today.parquet
    """
    from policy.forecast.files import load, read_card

    if not traces:
        if starts or names:
            raise BadInput("--start and --name say something of a TRACE: give one")
        _print_card(folder, read_card(folder))
        return
    from twin.forecasting import check_any, next_forecast

    forecaster, card = load(folder)
    peaks = any(each.peaks for each in card.learned)
    found = []
    with _working() as tell:
        read = _read(traces, card.window_s, starts, names, tell)
        _note_new(read, card)
        for path, series in read:
            for each in series:
                check_any(path, each)
                tell(f"forecasting {path}'s", each.name)
                found.append((path, each, next_forecast(forecaster, each, peaks=peaks)))
    for path, each, forecasts in found:
        _print_forecast(path, each, card.horizons, forecasts)


def _read(
    traces: Sequence[str],
    window_s: float,
    starts: Sequence[str],
    names: Sequence[str],
    tell: Callable[[str, str], None],
) -> list[tuple[Path, list[Series]]]:
    """The series of each trace; notes of them go to standard error."""
    from twin.forecasting import parse_start, read_series

    for what, given in (("--start", starts), ("--name", names)):
        if len(given) > len(traces):
            raise BadInput(f"{len(given)} times {what} for {len(traces)} traces: give one each")
    begins: list[Start | None] = [None if text == "-" else parse_start(text) for text in starts]
    read: list[tuple[Path, list[Series]]] = []
    for text, start, name in zip_longest(traces, begins, names):

        def far(rows: int, text: str = text) -> None:
            tell(f"reading {text}:", f"{rows:,} requests")

        loaded = read_series(Path(text), window_s, start, far, name or "")
        for note in loaded.notes:
            click.echo(f"note: {note}", err=True)
        read.append((Path(text), loaded.series))
    return read


def _note_new(read: Sequence[tuple[Path, Sequence[Series]]], card: Card) -> None:
    """Say which series cannot be forecast as well as the forecaster could."""
    known = sorted({each.name for each in card.learned})
    for path, series in read:
        for each in series:
            if each.name not in known:
                click.echo(
                    f"note: {path}: {each.name} is none of what it has learned"
                    f" ({', '.join(known)}), so it is forecast as a new load; --name says which"
                    " load it is",
                    err=True,
                )


# Tables


def _ahead(horizon: int, window_s: float) -> str:
    return f"{horizon * window_s / 60:.3g} min"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _print_scores(scores: Sequence[Score], window_s: float, title: str) -> None:
    """A table a series."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(title)
    for (trace, name), rows in groupby(scores, lambda score: (score.trace, score.series)):
        table = Table(title=f"{name} of {trace}", title_justify="left")
        table.add_column("rate")
        for heading in ("ahead", "windows", "WAPE", "of last", "pinball", "of last", "under .95"):
            table.add_column(heading, justify="right")
        for score in rows:
            table.add_row(
                score.target, _ahead(score.horizon, window_s), f"{score.windows:,}",
                _percent(score.wape), _percent(score.wape_last), _percent(score.pinball),
                _percent(score.pinball_last), _percent(score.coverage),
            )  # fmt: skip
        console.print(table)


def _print_forecast(
    path: Path, series: Series, horizons: Sequence[int], forecasts: dict[Any, Array]
) -> None:
    from rich.console import Console
    from rich.table import Table

    from policy.forecast.contract import QUANTILES

    table = Table(title=f"{series.name} of {path}, per second", title_justify="left")
    table.add_column("rate")
    for heading in ("ahead", *(f"{quantile:g}" for quantile in QUANTILES)):
        table.add_column(heading, justify="right")
    for target, rates in forecasts.items():
        last = series.of(target)[-1]
        table.add_row(target, "now", "", _rate(last) if last == last else "-", "", "")
        for horizon, row in zip(horizons, rates, strict=True):
            table.add_row("", _ahead(horizon, series.window_s), *(_rate(each) for each in row))
        table.add_section()
    Console().print(table)


def _print_card(folder: Path, card: Card) -> None:
    from rich.console import Console
    from rich.table import Table

    from policy.forecast.files import code_version

    table = Table(title=str(folder), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("made", card.created)
    table.add_row("windows", f"{card.window_s:g} s")
    table.add_row("ahead", ", ".join(_ahead(each, card.window_s) for each in card.horizons))
    for each in card.learned:
        at = "with weekdays" if each.weekday_known else "weekdays not known"
        gaps = f", {each.unknown:,} of them not recorded" if each.unknown else ""
        peaks = "with peaks" if each.peaks else "no peaks"
        table.add_row("learned", f"{each.name}: {each.windows:,} windows{gaps}; {at}; {peaks}")
    others = {key: value for key, value in card.parameters.items() if key != "horizons"}
    table.add_row("parameters", ", ".join(f"{key} {value}" for key, value in others.items()))
    table.add_row("data", card.data_hash)
    fits = "" if card.code == code_version() else "; not this version's: train it again"
    table.add_row("code", card.code + fits)
    table.add_row("libraries", ", ".join(f"{key} {value}" for key, value in card.versions.items()))
    size = sum(_count(shape) for _, shape in card.arrays.values())
    table.add_row(
        "weights", f"{size:,} numbers in {len(card.arrays)} arrays; sha256"
        f" {card.weights_sha256[:_SHOWN_CHARS]}...",
    )  # fmt: skip
    Console().print(table)
    if card.metrics:
        _print_scores(card.metrics, card.window_s, SEEN)


def _count(shape: Sequence[int]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size
