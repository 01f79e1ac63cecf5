"""The page Forecast: its form, its job, what it shows, and what a forecast is worth."""

from __future__ import annotations

import json
import math
import sqlite3
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dashboards.jobs import Job, Jobs
from dashboards.parts.forecast import form as forecast_form
from dashboards.work import forecast as work
from dashboards.work import forecast_worth as worth_work
from policy.forecast import forecaster
from policy.forecast.baselines import LastValue, SeasonalNaive
from policy.forecast.files import ForecastError
from twin import forecast_trial, forecast_worth
from twin.forecast_worth import LOOP, OURS, PERFECT, Point, Told, compared, hours_at, steepest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from streamlit.testing.v1 import AppTest

TABLE = f"load~{'0' * 16}.rates.csv"


def nothing(share: float | None, said: str) -> None:
    """Nobody is told."""


def asked(**other: Any) -> dict[str, Any]:
    """A forecast's request: a small table, one network, one pass."""
    return {
        "source": TABLE, "further": [], "what": "requests", "window_s": 300.0,
        "horizons_min": [5.0, 10.0, 15.0], "start": "", "members": 1, "epochs": 6, "seed": 0,
        **other,
    }  # fmt: skip


def table(tmp_path: Path, windows: int = 150) -> None:
    """A load that swings, among the uploads."""
    folder = tmp_path / "ui" / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    rows = (
        f"{300 * place},{10 + 6 * math.sin(place / 8) + 0.3 * (place * 7919 % 11):.4f}"
        for place in range(windows)
    )
    (folder / TABLE).write_text("\n".join(["t_s,rate", *rows]) + "\n", encoding="utf-8")


def job_of(tmp_path: Path, kind: str, request: dict[str, Any]) -> tuple[Jobs, Job]:
    """A job that nobody runs: the test does."""
    jobs = Jobs(tmp_path / "ui" / "jobs", 0)
    job = jobs.start(kind, request)
    job.folder.mkdir(parents=True, exist_ok=True)
    return jobs, job


def done(job: Job) -> None:
    """It is, as far as the store knows."""
    with sqlite3.connect(job.folder.parent / "jobs.db") as database:
        database.execute("update jobs set state = 'done', ended_s = 1 where id = ?", (job.id,))
    database.close()


def texts(session: AppTest) -> str:
    kinds = ("markdown", "caption", "info", "error")
    return "\n".join(str(each.value) for kind in kinds for each in getattr(session, kind))


def load() -> Told:
    """Forty quiet windows, a rise, forty busy ones; the second half was forecast."""
    mean = np.array([2.0] * 60 + [10.0] * 40)
    origins = np.arange(39, 98)
    told = np.repeat(np.repeat(mean[origins][:, None, None], 3, axis=1), 4, axis=2)
    return Told(300.0, (1, 2, 3), mean, origins, told)


class Quick(SeasonalNaive):
    """In the place of the forecaster, whose training is tested elsewhere."""

    def __init__(
        self, horizons: Sequence[int] = (1,), members: int = 1, epochs: int = 1, seed: int = 0
    ) -> None:
        super().__init__(horizons)
        self.members, self.epochs, self.seed = members, epochs, seed


def test_a_load_is_forecast_and_shown(
    app: Callable[..., AppTest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecaster, "LoadForecaster", Quick)
    monkeypatch.setattr(
        forecast_trial, "BASELINES", {"last value": LastValue, "seasonal": SeasonalNaive}
    )
    table(tmp_path)
    _, job = job_of(tmp_path, "forecast", asked())
    work.run(job.request, job.folder, nothing)
    done(job)
    found = json.loads((job.folder / work.RESULT).read_text())
    assert {each["name"] for each in found["rated"]} >= {"forecaster", "last value", "seasonal"}
    assert [band["horizon"] for band in found["bands"]] == [1, 2, 3]
    assert all(0 <= each["coverage"] <= 1 and each["wape"] > 0 for each in found["rated"])
    for band in found["bands"]:
        assert all(low <= high for low, high in zip(band["q50"], band["q950"], strict=True))

    session = app("forecast")
    assert not session.exception
    assert session.selectbox(key="forecast_source").value == TABLE
    assert session.metric[0].label == "Error (WAPE)"
    assert not session.button(key="job_forecast_worth").disabled


def test_a_load_that_is_too_short_is_refused_in_a_sentence(tmp_path: Path) -> None:
    table(tmp_path, windows=20)
    _, job = job_of(tmp_path, "forecast", asked())
    with pytest.raises(ForecastError, match=r"20 whole windows of 300 s .* too few"):
        work.run(job.request, job.folder, nothing)


def test_without_the_extra_the_page_says_what_to_install(
    app: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_form, "find_spec", lambda name: None)
    session = app("forecast")
    assert not session.exception
    assert "pip install 'twinkeel[forecast]'" in texts(session)
    assert session.button(key="job_forecast").disabled


def test_a_table_without_rates_is_refused(
    app: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_form, "t", lambda key, **values: f"{key} {values}")
    assert "'columns': 'time, value'" in forecast_form._keep("a.csv", b"time,value\n1,2\n", {})


def test_the_steepest_stretch_that_was_forecast_is_played() -> None:
    stretch = steepest(load())
    assert stretch.end - stretch.begin == 24
    assert stretch.begin < 60 < stretch.end
    assert stretch.scale == pytest.approx(forecast_worth.PEAK_RPS / 10)
    with pytest.raises(ValueError, match="give a longer load"):
        steepest(Told(300.0, (1,), load().mean, np.arange(90, 98), load().told[-8:, :1]))


def test_rules_are_compared_where_they_miss_equally_many() -> None:
    dear, cheap = Point(500, 20.0, 0, 1000), Point(1000, 10.0, 100, 1000)
    assert hours_at([dear, cheap], 0.2) == 10.0
    assert 10.0 < (hours_at([dear, cheap], 0.01) or 0) < 20.0
    assert hours_at([cheap], 0.01) is None
    level, hours = compared({OURS: [dear], LOOP: [Point(500, 30.0, 15, 1000)]})
    assert (level, hours) == (0.02, {OURS: 20.0, LOOP: 30.0})


def test_its_worth_is_played_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told_files: list[str] = []

    def play(
        trace: Path, lasts_s: float, capacity: dict[str, Any], forecasts: str, seed: int
    ) -> tuple[float, int, int]:
        assert trace.is_file()
        assert lasts_s == 7200
        told_files.append(forecasts)
        return (10.0 if forecasts else 12.0), 0, 100

    monkeypatch.setattr(forecast_worth, "play", play)
    known = load()
    _, first = job_of(tmp_path, "forecast", asked())
    np.savez_compressed(
        first.folder / work.TOLD, origins=known.origins, horizons=np.array(known.horizons),
        mean=known.mean, window_s=np.array(300.0), **{OURS: known.told},
    )  # fmt: skip
    _, job = job_of(tmp_path, "forecast_worth", {"forecast": first.id, "seed": 0})
    worth_work.run(job.request, job.folder, nothing)
    found = json.loads((job.folder / worth_work.RESULT).read_text())
    assert found["hours"] == {"HPA": 12.0, LOOP: 12.0, OURS: 10.0, PERFECT: 10.0}
    assert sum(bool(name) for name in told_files) == 6
    assert set(found["at_most"]) == set(found["hours"])
