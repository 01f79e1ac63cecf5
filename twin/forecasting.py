"""From traces to series of rates, and from series to a forecaster and how good it is."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from policy.forecast.baselines import LastValue
from policy.forecast.contract import MEDIAN, QUANTILES
from policy.forecast.files import ForecastError, Score
from policy.forecast.series import DAY_S, TARGETS, WEEK_S, Series
from traces import TraceError, open_trace
from traces.readers import ReadOptions, guess_format
from traces.readers.common import Misfit, Rejects, csv_rows, open_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

    from policy.forecast.forecaster import LoadForecaster
    from policy.forecast.series import Target

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Progress = Callable[[int], None]

WINDOW_S = 300.0
MINUTE_S = 60.0
COLD_START_S = 120.0
AHEAD_MINUTES = (30.0, 60.0)
WINDOWS_LEAST = 60
WINDOWS_PER_HORIZON = 10
"""A series must be so many times as long as the longest horizon: its end is held out to see when
training should stop, and that end must hold such a horizon."""
GOOD_S = 2 * DAY_S
"""Less does not show what a day is like, and that the next one is like it."""
HELD_OUT = 0.2
"""Share of each series, its end, that the forecaster's twin has not seen when it is measured."""
BUSY_REQUESTS = 30.0
"""Where the windows on both sides have as many, one between them does not have none by chance: it
was not recorded."""
BINS_MOST = 5_000_000
"""Ten years of minutes."""
DATES_FROM_S = 1e9
"""Seconds from here on are counted from 1970, and not from a trace's start."""
LATEST_S = 1e11
"""Seconds from here on are milliseconds, or wrong."""
MONDAY_S = 4 * DAY_S
"""The first one of 1970."""
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
LEVEL = QUANTILES.index(0.95)
RATE_COLUMNS = ("t_s", "rate")
_START = re.compile(
    r"(?P<day>[a-z]{3}|\d{4}-\d\d-\d\d)?(?:(?(day)[ t]|)(?P<clock>\d\d?:\d\d(?::\d\d)?))?"
)
_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "weight")


class Start(NamedTuple):
    """When a trace begins: seconds after midnight (on a Monday, if the weekday is known)."""

    at_s: float
    weekday_known: bool


@dataclass
class Loaded:
    """What was read from a file."""

    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What its owner should know, a sentence each."""


def parse_start(text: str) -> Start:
    """A trace's start as it is written by hand: a date or a weekday, a time of day, or both.

    Raises:
        ForecastError: it is none of these.
    """
    match = _START.fullmatch(text.strip().lower())
    if match is None or not text.strip():
        raise _bad_start(text)
    day, clock = match["day"], match["clock"] or "0:00"
    hours, minutes, seconds = (int(part) for part in [*clock.split(":"), "0"][:3])
    if hours > 23 or minutes > 59 or seconds > 59:
        raise _bad_start(text)
    weekday = 0
    if day in WEEKDAYS:
        weekday = WEEKDAYS.index(day)
    elif day:
        try:
            weekday = datetime.fromisoformat(day).weekday()
        except ValueError as error:
            raise _bad_start(text) from error
    return Start(weekday * DAY_S + hours * 3600.0 + minutes * 60 + seconds, bool(day))


def _bad_start(text: str) -> ForecastError:
    return ForecastError(
        f"--start {text!r}: write it as 2024-05-10, '2024-05-10 08:30', fri, 'fri 08:30' or 08:30"
    )


def horizons_of(
    window_s: float,
    minutes: Sequence[float] | None = None,
    cold_start_s: float = COLD_START_S,
) -> tuple[int, ...]:
    """Windows ahead, each once, in order.

    Args:
        minutes: ahead; None: the next two windows, half an hour, an hour.
        cold_start_s: how long a new replica takes: what the load is like then matters most.

    Raises:
        ForecastError: one of them is no time to come.
    """
    for what, value in (
        ("--window", window_s), ("--cold-start", cold_start_s),
        *(("--horizons", each) for each in minutes or ()),
    ):  # fmt: skip
        if not (math.isfinite(value) and value > 0):
            raise ForecastError(f"{what} {value:g}: it must be more than 0")
    ahead_s = [60 * each for each in (AHEAD_MINUTES if minutes is None else minutes)]
    found = {max(1, round(each / window_s)) for each in ahead_s}
    found.add(math.ceil(cold_start_s / window_s))
    return tuple(sorted(found if minutes is not None else found | {1, 2}))


# Reading


def read_series(
    path: Path,
    window_s: float,
    start: Start | None = None,
    progress: Progress | None = None,
    name: str = "",
) -> Loaded:
    """Series of a file: of a trace requests and tokens per second, of a table of rates that one.

    Args:
        path: a trace, a public trace as it was published, or a CSV file with the columns ``t_s``,
            ``rate`` and perhaps ``peak``, times in seconds from its start or from 1970.
        start: when it begins, if it is known.
        progress: is told the requests read so far.
        name: of the load; part of what has been learned of one is used for that one alone.

    Raises:
        TraceError, ForecastError: it cannot be read, or has no use; says why.
    """
    header = _csv_header(path)
    if header is not None and set(RATE_COLUMNS) <= set(header):
        return _read_rates(path, name or "rate", window_s, start, "peak" in header)
    batches = _batches(path, header is not None or _is_jsonl(path))
    return _read_requests(path, name, window_s, start, batches, progress)


def check_length(path: Path, series: Sequence[Series], horizons: Sequence[int]) -> list[str]:
    """Refuse series that are too short to learn from; gives warnings of short ones.

    Raises:
        ForecastError: says how many windows there are, and how many it takes.
    """
    least = max(WINDOWS_LEAST, WINDOWS_PER_HORIZON * max(horizons))
    window_s = series[0].window_s
    known = min(int((~np.isnan(each.mean)).sum()) for each in series)
    span = _span(known * window_s)
    if known < least:
        raise ForecastError(
            f"{path}: has {known} whole windows of {window_s:g} s ({span}), too few to learn from:"
            f" it takes {least}, and two days are good; give a longer trace"
        )
    if known * window_s < GOOD_S:
        return [f"{path}: is {span} long; two days show what a day is like, a week is better"]
    return []


def evaluation_begins(path: Path, series: Series, horizons: Sequence[int]) -> int:
    """The first window after which a series is forecast: something must be known before.

    Raises:
        ForecastError: it is too short.
    """
    check_any(path, series)
    first = min(series.day_windows, len(series) // 3)
    least = max(WINDOWS_LEAST, 2 * max(horizons))
    if len(series) < least:
        raise ForecastError(
            f"{path}: has {len(series)} whole windows of {series.window_s:g} s"
            f" ({_span(len(series) * series.window_s)}), too few to measure a forecaster on: it"
            f" takes {least}; give a longer trace"
        )
    return first


def check_any(path: Path, series: Series) -> None:
    """Refuse a series of which nothing is known.

    Raises:
        ForecastError: that is so.
    """
    if np.isnan(series.mean).all():
        raise ForecastError(
            f"{path}: has no whole window of {series.window_s:g} s in which anything was recorded;"
            " give a longer trace"
        )


def _span(seconds: float) -> str:
    for unit, name in ((DAY_S, "days"), (3600, "hours")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 60:.0f} minutes"


def _csv_header(path: Path) -> list[str] | None:
    """Of a CSV file, or None for anything else."""
    if not path.is_file() or not path.name.removesuffix(".gz").endswith(".csv"):
        return None
    with open_text(path) as file:
        return [name.strip() for name in next(csv.reader([file.readline(10_000)]), [])]


def _is_jsonl(path: Path) -> bool:
    return path.is_file() and path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def _batches(path: Path, is_text: bool) -> Iterable[pa.RecordBatch]:
    if not is_text:
        trace = open_trace(path)
        if not trace.has_arrivals:
            raise TraceError(
                f"{path}: is session-relative, with no arrivals; import it again with"
                " --session-rate"
            )
        return trace.batches(_COLUMNS)
    try:
        chosen = guess_format(path)
    except TraceError as error:
        raise TraceError(
            f"{path}: is no known trace, nor a table of rates with the columns t_s, rate and"
            " perhaps peak; import it first: twinkeel trace import SOURCE -o TRACE.parquet"
        ) from error
    return chosen.read(path, ReadOptions(), Rejects(path, "fail"))


def _read_requests(
    path: Path,
    name: str,
    window_s: float,
    start: Start | None,
    batches: Iterable[pa.RecordBatch],
    progress: Progress | None,
) -> Loaded:
    parts = max(1, round(window_s / MINUTE_S))
    bins: dict[int, tuple[float, float]] = {}
    rows = unanswered = 0
    first_s, last_s = math.inf, -math.inf
    for batch in batches:
        if not batch.num_rows:
            continue
        arrivals, tokens, weights, unknown = _columns(path, batch)
        first_s, last_s = min(first_s, arrivals.min()), max(last_s, arrivals.max())
        _check_span(path, first_s, last_s)
        places, at = np.unique(
            np.floor(arrivals / (window_s / parts)).astype(np.int64), return_inverse=True
        )
        requests, sums = np.bincount(at, weights), np.bincount(at, weights * tokens)
        for place, more, and_tokens in zip(
            places.tolist(), requests.tolist(), sums.tolist(), strict=True
        ):
            before = bins.get(place, (0.0, 0.0))
            bins[place] = before[0] + more, before[1] + and_tokens
        rows += batch.num_rows
        unanswered += unknown
        if progress is not None:
            progress(rows)
    if not rows:
        raise TraceError(f"{path}: holds no request")
    part_s = window_s / parts
    begin = min(bins) // parts * parts
    if first_s - begin * part_s > part_s:  # a first window that began before the record did
        begin += parts
    count = max(0, int((last_s - begin * part_s) // window_s))  # the last one was not over
    counts = np.zeros((2, count * parts))
    for place, both in bins.items():
        if 0 <= place - begin < count * parts:
            counts[:, place - begin] = both
    loaded = Loaded()
    if unanswered:
        loaded.notes.append(
            f"{path}: {unanswered / rows:.0%} of its requests have no known answer length; their"
            " prompts alone are counted"
        )
    by_window = counts.reshape(2, count, parts)
    gap = _gaps(by_window[0].sum(axis=1))
    if gap.any():
        loaded.notes.append(
            f"{path}: {int(gap.sum())} windows without any request are taken for gaps in the record"
        )
    begins_at_s, weekday_known = _start_of(path, begin * part_s, first_s, start, loaded.notes)
    for label, each in zip(("requests", "tokens"), by_window, strict=True):
        mean, peak = each.sum(axis=1) / window_s, each.max(axis=1, initial=0) / part_s
        mean[gap] = peak[gap] = np.nan
        loaded.series.append(
            Series(
                window_s, mean, peak if parts > 1 else np.empty(0), begins_at_s, weekday_known,
                f"{name}-{label}" if name else label,
            )
        )  # fmt: skip
    return loaded


def _columns(path: Path, batch: pa.RecordBatch) -> tuple[Array, Array, Array, int]:
    """(arrivals, tokens, weights, requests whose answer length is unknown)."""
    names = batch.schema.names

    def column(name: str, default: float) -> tuple[Array, int]:
        if name not in names:
            return np.full(batch.num_rows, default), batch.num_rows
        values = batch.column(names.index(name))
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
        if values.null_count:
            numbers = np.nan_to_num(numbers, nan=default)
        return numbers, values.null_count

    if "arrival_s" not in names or batch.column(names.index("arrival_s")).null_count:
        raise TraceError(
            f"{path}: has no arrival times; import it with --session-rate to give it some"
        )
    arrivals, _ = column("arrival_s", 0.0)
    prompts, _ = column("prompt_tokens", 0.0)
    outputs, unknown = column("output_tokens", 0.0)
    weights, _ = column("weight", 1.0)
    return arrivals, prompts + outputs, weights, unknown


def _check_span(path: Path, first_s: float, last_s: float) -> None:
    if not -LATEST_S < first_s <= last_s < LATEST_S or last_s - first_s >= MINUTE_S * BINS_MOST:
        raise ForecastError(
            f"{path}: has times from {first_s:.10g} to {last_s:.10g} s, more than ten years or none"
            " of ours: one is wrong, or they are no seconds; correct it, or cut the part you mean:"
            " twinkeel trace slice"
        )


def _gaps(requests: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Windows that were not recorded, as far as their neighbours tell."""
    places = np.arange(len(requests))
    empty: np.ndarray[Any, np.dtype[np.bool_]] = requests == 0
    if empty.all():
        return np.zeros_like(empty)
    before = np.maximum.accumulate(np.where(empty, 0, places))
    after = np.minimum.accumulate(np.where(empty, len(requests) - 1, places)[::-1])[::-1]
    busy = np.minimum(requests[before], requests[after]) >= BUSY_REQUESTS
    return empty & busy


def _start_of(
    path: Path, begin_s: float, first_s: float, start: Start | None, notes: list[str]
) -> tuple[float, bool]:
    """(start_s, weekday_known) of a series.

    Args:
        begin_s: when it begins, by the file's own clock.
        first_s: the first time in the file.
        start: of the file's clock at 0, or where it counts from 1970, of ``first_s``.
    """
    dated = first_s >= DATES_FROM_S
    if start is not None:
        since_s = begin_s - first_s if dated else begin_s
        return (start.at_s + since_s) % WEEK_S, start.weekday_known
    if dated:
        return (begin_s - MONDAY_S) % WEEK_S, True
    notes.append(
        f"{path}: does not say at what time of day it begins; where that is known, give --start,"
        " such as --start 'fri 08:30'"
    )
    return begin_s % DAY_S, False


def _read_rates(
    path: Path, name: str, window_s: float, start: Start | None, has_peak: bool
) -> Loaded:
    times, rates, peaks = _rate_rows(path, has_peak)
    steps = np.diff(times)
    step_s = float(np.quantile(steps, 0.5, method="lower"))
    step_s = float(steps[np.abs(steps - step_s) <= 0.05 * step_s].mean())
    if step_s > 1.01 * window_s:
        raise ForecastError(
            f"{path}: its rows are {step_s:.6g} s apart, more than a window of {window_s:g} s; use"
            f" --window {step_s:.6g}"
        )
    _check_span(path, times[0], times[-1])
    whole = step_s >= 0.99 * window_s
    begin_s = times[0]
    if not whole and begin_s >= DATES_FROM_S:
        begin_s = math.ceil(begin_s / window_s) * window_s
    # Stamps of whole windows may be rounded, to either side.
    place = np.floor((times - begin_s) / window_s + (0.5 if whole else 1e-9)).astype(np.int64)
    count = int((times[-1] + step_s - begin_s) / window_s + (0.5 if whole else 1e-6))
    kept = (place >= 0) & (place < count)
    place, times, rates, peaks = place[kept], times[kept], rates[kept], peaks[kept]
    known = ~np.isnan(rates)
    number = np.bincount(place[known], minlength=count)
    sums = np.bincount(place[known], rates[known], count)
    enough = number >= max(1.0, 0.5 * window_s / step_s)  # else a window is mostly unknown
    mean = np.where(enough, sums / np.maximum(number, 1), np.nan)
    peak = np.empty(0)
    if has_peak:
        peak = _highest(place, peaks, count)
    elif not whole:
        minute = np.floor((times - begin_s) / max(MINUTE_S, step_s) + 1e-9).astype(np.int64)
        _, first, at = np.unique(minute[known], return_index=True, return_inverse=True)
        averages = np.bincount(at, rates[known]) / np.bincount(at)
        peak = _highest(place[known][first], averages, count)
    if len(peak):
        peak = np.where(enough, np.fmax(peak, mean), np.nan)
    loaded = Loaded()
    at_s, weekday_known = _start_of(path, float(begin_s), float(times[0]), start, loaded.notes)
    loaded.series.append(Series(window_s, mean, peak, at_s, weekday_known, name))
    return loaded


def _highest(place: Any, values: Array, count: int) -> Array:
    found = np.full(count, np.nan)
    np.fmax.at(found, place, values)
    return found


def _rate_rows(path: Path, has_peak: bool) -> tuple[Array, Array, Array]:
    columns: tuple[list[float], list[float], list[float]] = ([], [], [])
    wanted = (*RATE_COLUMNS, "peak") if has_peak else RATE_COLUMNS
    for row, fields in csv_rows(path, wanted):
        if isinstance(fields, Misfit):
            raise ForecastError(f"{path}: row {row}: the number of fields is not the header's")
        for column, name, text in zip(columns, wanted, fields, strict=False):
            try:
                value = float(text) if text.strip() or name == "t_s" else math.nan
            except ValueError as error:
                raise ForecastError(f"{path}: row {row}: {name} {text!r} is no number") from error
            if math.isinf(value) or (name != "t_s" and value < 0):
                raise ForecastError(f"{path}: row {row}: {name} is {text}, which no rate can be")
            column.append(value)
        times = columns[0]
        if math.isnan(times[-1]) or (len(times) > 1 and times[-1] <= times[-2]):
            raise ForecastError(
                f"{path}: row {row}: t_s {fields[0]} does not come after the row above; sort the"
                " rows, one for each time"
            )
    if len(columns[0]) < 2:
        raise ForecastError(f"{path}: has {len(columns[0])} rows; a series has more")
    times_s, rates, peaks = (np.array(column) for column in columns)
    return times_s, rates, peaks if has_peak else np.full(len(rates), np.nan)


# Fitting and measuring


def measured(
    forecaster: LoadForecaster,
    read: Sequence[tuple[Path, Series]],
    progress: Callable[[str], None] | None = None,
) -> list[Score]:
    """How well a twin of the forecaster, fitted to the first part of each series, forecasts the
    rest.

    Args:
        read: each series with the file that it is from.
        progress: is told what is done now.
    """
    tell = progress or (lambda what: None)
    splits = [int(len(each) * (1 - HELD_OUT)) for _, each in read]
    twin = type(forecaster)(**forecaster.get_params(deep=False))
    tell("training on the first four fifths")
    twin.fit([each.until(split) for (_, each), split in zip(read, splits, strict=True)])
    peaks = any(len(each.peak) for _, each in read)
    scores: list[Score] = []
    for (path, each), split in zip(read, splits, strict=True):
        tell(f"forecasting the last fifth of {path}'s {each.name}")
        scores += measure(twin, each, split - 1, trace=str(path), peaks=peaks)
    return scores


def measure(
    forecaster: LoadForecaster, series: Series, first: int, *, trace: str = "", peaks: bool = True
) -> Iterator[Score]:
    """How good forecasts are when each window from ``first`` on was the last one known.

    Args:
        trace: the file that the series is from.
        peaks: the forecaster has learned peaks too.
    """
    horizons = tuple(forecaster.horizons)
    origins = np.arange(max(0, first), len(series) - min(horizons))
    last = LastValue(horizons)
    series, targets = _learnable(series, peaks)
    for target in targets:
        truths = series.of(target)
        ours = forecaster.predict(series, origins, target)
        theirs = last.predict(series, origins, target)
        for column, horizon in enumerate(horizons):
            there = origins + horizon < len(series)
            truth = truths[origins[there] + horizon]
            known = ~np.isnan(truth)
            if known.any():
                yield _score(
                    trace, series.name, target, horizon, truth[known],
                    ours[there][known, column], theirs[there][known, column],
                )  # fmt: skip


def _score(
    trace: str, name: str, target: str, horizon: int, truth: Array, ours: Array, theirs: Array
) -> Score:
    total = float(truth.sum())

    def share(value: float) -> float | None:
        return value / total if total > 0 else None

    def pinball(forecast: Array) -> float:
        error = truth - forecast
        return float(np.maximum(0.95 * error, -0.05 * error).sum())

    return Score(
        series=name,
        target=target,
        horizon=horizon,
        windows=len(truth),
        wape=share(float(np.abs(truth - ours[:, MEDIAN]).sum())),
        wape_last=share(float(np.abs(truth - theirs[:, MEDIAN]).sum())),
        pinball=share(pinball(ours[:, LEVEL])),
        pinball_last=share(pinball(theirs[:, LEVEL])),
        coverage=float((truth <= ours[:, LEVEL]).mean()),
        trace=trace,
    )


def next_forecast(
    forecaster: LoadForecaster, series: Series, *, peaks: bool = True
) -> dict[Target, Array]:
    """What comes after the last window: [horizon, quantile] by target."""
    series, targets = _learnable(series, peaks)
    origin = np.array([len(series) - 1])
    return {target: forecaster.predict(series, origin, target)[0] for target in targets}


def _learnable(series: Series, peaks: bool) -> tuple[Series, tuple[Target, ...]]:
    """A series without peaks for a forecaster that has never seen any; what can be forecast."""
    if not peaks:
        series = replace(series, peak=np.empty(0))
    return series, TARGETS if len(series.peak) else ("mean",)
