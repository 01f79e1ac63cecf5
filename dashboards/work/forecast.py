"""The job ``forecast``: how well the end of a load is forecast from its beginning."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dashboards.shelf import Shelf, label
from traces.store import resolve_path
from twin.report.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from policy.forecast.series import Series
    from twin.forecast_trial import Trial

    Tell = Callable[[float | None, str], None]

RESULT, TOLD = "forecast.json", "told.npz"
POINTS_MOST = 2000
"""Of a line in a chart; more are averaged."""
MISSING = (
    "{name} is not installed: forecasting needs the extra `forecast`, as in"
    " pip install 'twinkeel[forecast]'"
)
EXAMPLE = "example"
RATES = ".rates.csv"
"""Ending of a table of rates among the uploads."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request."""

    source: str
    """A trace as scenarios name it, a table of rates among the uploads, or ``example``."""
    further: list[str]
    """The same load at other times."""
    what: str
    """Requests or tokens."""
    window_s: float
    horizons_min: list[float]
    start: str
    """When the source begins; empty: not known."""
    members: int
    epochs: int
    seed: int


def run(request: dict[str, Any], folder: Path, tell: Tell) -> None:
    asked = msgspec.convert(request, Asked)
    try:
        from policy.forecast.forecaster import LoadForecaster
        from twin.forecast_trial import tried
        from twin.forecasting import check_length, horizons_of, next_forecast
    except ModuleNotFoundError as error:
        raise ValueError(MISSING.format(name=error.name)) from error
    import numpy as np

    tell(0.0, "reading the load")
    horizons = horizons_of(asked.window_s, asked.horizons_min, asked.window_s)
    uploads = folder.parents[1] / "uploads"
    series, notes = series_of(asked, asked.source, uploads)
    name = Path(label(asked.source))
    notes += check_length(name, [series], horizons)
    further = []
    for one in asked.further:
        found, more = series_of(msgspec.structs.replace(asked, start=""), one, uploads)
        further.append(found)
        notes += more
    forecaster = LoadForecaster(
        horizons=horizons, members=asked.members, epochs=asked.epochs, seed=asked.seed
    )
    trial = tried(forecaster, series, further, tell)
    ahead = next_forecast(forecaster, series, peaks=False)["mean"]
    tell(0.99, "writing the results")
    arrays: dict[str, Any] = {
        "origins": trial.origins, "horizons": np.array(horizons), "mean": series.mean,
        "window_s": np.array(series.window_s), **trial.told,
    }  # fmt: skip
    np.savez_compressed(folder / TOLD, **arrays)
    write_result(folder / RESULT, _plain(asked, series, trial, ahead, notes + trial.notes))


def series_of(asked: Asked, source: str, uploads: Path) -> tuple[Series, list[str]]:
    """(the load, what its owner should know).

    Raises:
        TraceError, ForecastError: it cannot be read, or has no such rate.
    """
    from twin.forecast_trial import example_week
    from twin.forecasting import parse_start, read_series

    if source == EXAMPLE:
        return example_week(asked.seed), []
    path = path_of(source, uploads)
    start = parse_start(asked.start) if asked.start.strip() else None
    loaded = read_series(path, asked.window_s, start)
    shown = [note.replace(str(path), label(source)) for note in loaded.notes]
    chosen = next((each for each in loaded.series if each.name == asked.what), loaded.series[0])
    return chosen, shown


def path_of(source: str, uploads: Path) -> Path:
    """The file of a source."""
    if source.endswith(RATES):
        return uploads / Path(source).name
    return resolve_path(Shelf(uploads).path_of(source))


def _plain(
    asked: Asked, series: Series, trial: Trial, ahead: Any, notes: list[str]
) -> dict[str, Any]:
    import numpy as np

    from policy.forecast.contract import QUANTILES
    from twin.forecast_trial import OURS

    own = trial.told[OURS]
    day = series.window_s / 86_400
    size = max(1, -(-len(series) // POINTS_MOST))
    kept = slice(max(0, len(own) - POINTS_MOST), None)
    horizons = sorted({each.horizon for each in trial.rated})
    bands = [
        {
            "horizon": horizon,
            "day": _list((trial.origins[kept] + horizon + 0.5) * day),
            **{
                f"q{round(1000 * level)}": _list(own[kept, column, place])
                for place, level in enumerate(QUANTILES)
            },
        }
        for column, horizon in enumerate(horizons)
    ]
    return {
        "window_s": series.window_s,
        "what": series.name,
        # A table of rates does not say of what: who uploaded it does.
        "tokens": "tokens" in (series.name, asked.what if asked.source.endswith(RATES) else ""),
        "days": len(series) * day,
        "held_day": float((trial.origins[0] + 1) * day),
        "day": _list(np.array([
            (at + min(at + size, len(series))) / 2 * day for at in range(0, len(series), size)
        ])),
        "mean": _list(np.array([_mean(series.mean[at : at + size])
                                for at in range(0, len(series), size)])),
        "bands": bands,
        "next": {
            "day": [(len(series) - 0.5 + horizon) * day for horizon in horizons],
            **{f"q{round(1000 * level)}": _list(ahead[:, place])
               for place, level in enumerate(QUANTILES)},
        },
        "rated": [asdict(each) for each in trial.rated],
        "notes": notes,
    }  # fmt: skip


def _mean(values: Any) -> float:
    import numpy as np

    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _list(values: Any) -> list[float | None]:
    """Rounded to what a chart shows; None: not recorded."""
    return [float(f"{value:.6g}") if value == value else None for value in values.tolist()]


def write_result(path: Path, value: Any) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(value, allow_nan=False))
