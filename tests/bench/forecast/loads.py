"""The seven series that forecasters are held against, read from the public traces.

Digitised: read off a plot, so that neighbouring windows share a line of pixels and are a little
alike for that reason alone. Derived: someone's aggregate of a real trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from policy.forecast.series import DAY_S, Series

if TYPE_CHECKING:
    from pathlib import Path

    Array = np.ndarray[Any, np.dtype[np.float64]]

WEEK_WINDOW_S = 7 * DAY_S / 1396
"""Of the digitised week: one column of pixels."""
SERVEGEN_WINDOW_S = 600
SERVEGEN_WINDOWS = 14 * 144
GAP_SHARE = 0.2
"""A window of a model under this share of its median is a gap in the logging, says the source."""
BURST_WINDOW_S = 300
"""The policy is told a forecast every five minutes."""
FRIDAY, SUNDAY = 4, 6


@dataclass(frozen=True)
class Load:
    """A series, and what kind of data it is."""

    series: Series
    kind: str
    steps_30min: int


def azure_week(traces: Path, service: str, weekday: int) -> Series:
    """Requests per minute of a week in May 2024."""
    table = pd.read_csv(traces / "azure2024_week_rpm_digitised.csv.gz")
    rows = table[table.service == service].iloc[1:-1]  # the outer columns are cut off in the plot
    mean = rows.mean_rpm_calibrated.to_numpy(float)
    scale = mean / np.maximum(rows.mid_rpm.to_numpy(float), 1e-9)
    return Series(
        WEEK_WINDOW_S, mean, rows.max_rpm.to_numpy(float) * np.median(scale),
        start_s=weekday * DAY_S + float(rows.t_s.iloc[0]), name=f"azure-{service}",
    )  # fmt: skip


def servegen(traces: Path, model: str) -> Series:
    """Requests per second of all clients of a model."""
    table = pd.read_parquet(traces / "servegen_client_rates_10min.parquet")
    rows = table[table.model == model]
    return _servegen(rows.t_s, rows.rate_rps, model)


def servegen_tokens(traces: Path, model: str) -> Series:
    """Prompt and output tokens per second, of the clients whose lengths are known."""
    rates = pd.read_parquet(traces / "servegen_client_rates_10min.parquet")
    lengths = pd.read_parquet(traces / "servegen_client_lengths_6h.parquet")
    rows, own = rates[rates.model == model], lengths[lengths.model == model]
    own = own.assign(tokens=own.input_tokens_mean.fillna(0) + own.output_tokens_mean.fillna(0))
    own = own[own.tokens > 0].sort_values("t_s")
    joined = pd.merge_asof(
        rows.sort_values("t_s"), own[["client_id", "t_s", "tokens"]], on="t_s", by="client_id"
    ).dropna(subset=["tokens"])
    return _servegen(joined.t_s, joined.rate_rps * joined.tokens, f"{model}-tokens")


def _servegen(t_s: pd.Series[Any], rates: pd.Series[Any], name: str) -> Series:
    mean = np.bincount((t_s // SERVEGEN_WINDOW_S).astype(int), rates, SERVEGEN_WINDOWS)
    mean[mean < GAP_SHARE * np.median(mean)] = np.nan
    return Series(SERVEGEN_WINDOW_S, mean, weekday_known=False, name=name)


def burst(traces: Path) -> Series:
    """Tokens per second of a week of BurstGPT."""
    minutes = pd.read_csv(traces / "burstgpt1_week1_tokens_1min_derived.csv.gz")
    by_window = minutes.tokens_per_s.to_numpy(float).reshape(-1, BURST_WINDOW_S // 60)
    return Series(
        BURST_WINDOW_S,
        by_window.mean(1),
        by_window.max(1),
        weekday_known=False,
        name="burst-tokens",
    )


def all_loads(traces: Path) -> list[Load]:
    """All seven."""
    return [
        Load(azure_week(traces, "code", FRIDAY), "digitised", 4),
        Load(azure_week(traces, "conv", SUNDAY), "digitised", 4),
        *(Load(servegen(traces, f"m-{size}"), "real", 3) for size in ("large", "mid", "small")),
        Load(servegen_tokens(traces, "m-large"), "real rates x partial lengths", 3),
        Load(burst(traces), "derived", 6),
    ]
