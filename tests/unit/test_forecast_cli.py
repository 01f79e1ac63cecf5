"""From traces to series, and the command group `forecast`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from policy.forecast.contract import QUANTILES
from policy.forecast.files import ForecastError, load, read_card
from policy.forecast.forecaster import LoadForecaster
from policy.forecast.series import DAY_S, Series
from traces import TraceError, TraceWriter
from twin.forecasting import (
    Start,
    check_length,
    evaluation_begins,
    horizons_of,
    measure,
    next_forecast,
    parse_start,
    read_series,
)
from twinkeel import main

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FRIDAY_S = 1_715_299_200.0
"""2024-05-10, midnight in UTC."""


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["forecast", *(str(word) for word in words)])


def write_trace(path: Path, arrivals: Any, **columns: Any) -> Path:
    rows = len(arrivals)
    given = {
        "request_id": np.arange(rows),
        "arrival_s": np.asarray(arrivals, float),
        "prompt_tokens": pa.array([100] * rows, pa.int32()),
        "output_tokens": pa.array([20] * rows, pa.int32()),
        **columns,
    }
    with TraceWriter(path) as writer:
        writer.write(pa.RecordBatch.from_pydict(given))
    return path


def write_rates(path: Path, rows: Sequence[Sequence[object]], head: str = "t_s,rate") -> Path:
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


# Traces


def test_a_trace_becomes_requests_and_tokens_per_second(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrivals = np.concatenate(([0.0], np.sort(rng.uniform(0, 3000, 900))))
    tokens = rng.integers(1, 500, len(arrivals)).astype(np.int32)
    path = write_trace(tmp_path / "a.parquet", arrivals, prompt_tokens=tokens)
    requests, both = read_series(path, 300.0, name="chat").series
    assert (requests.name, both.name) == ("chat-requests", "chat-tokens")
    assert len(requests) == 9  # the tenth was not over at the last arrival
    for place in range(9):
        inside = (arrivals >= 300 * place) & (arrivals < 300 * (place + 1))
        minutes = np.bincount(((arrivals[inside] - 300 * place) // 60).astype(int), minlength=5)
        assert requests.mean[place] == pytest.approx(inside.sum() / 300)
        assert requests.peak[place] == pytest.approx(minutes.max() / 60)
        assert both.mean[place] == pytest.approx((tokens[inside] + 20).sum() / 300)
    assert (both.peak > both.mean).all()


def test_windows_of_a_minute_have_no_peak(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.parquet", np.arange(0, 400, 5.0))
    assert not len(read_series(path, 60.0).series[0].peak)
    assert len(read_series(path, 120.0).series[0].peak) == 3


def test_weights_count_and_unknown_answers_are_told(tmp_path: Path) -> None:
    arrivals = np.arange(0, 601, 10.0)
    path = write_trace(
        tmp_path / "a.parquet", arrivals,
        weight=pa.array([4.0] * len(arrivals), pa.float32()),
        output_tokens=pa.array([None, *[20] * (len(arrivals) - 1)], pa.int32()),
    )  # fmt: skip
    loaded = read_series(path, 300.0)
    assert loaded.series[0].mean == pytest.approx([0.4, 0.4])
    assert loaded.series[1].mean == pytest.approx([0.4 * 120 - 80 / 300, 48])
    assert any("2% of its requests have no known answer length" in note for note in loaded.notes)


def test_silence_between_busy_windows_is_a_gap_and_a_quiet_night_is_none(tmp_path: Path) -> None:
    busy = np.concatenate((np.arange(0, 600, 2.0), np.arange(1200, 1801, 2.0)))
    loaded = read_series(write_trace(tmp_path / "busy.parquet", busy), 300.0)
    for each in loaded.series:
        assert np.isnan(each.mean).tolist() == [False, False, True, True, False, False]
        assert np.isnan(each.peak).tolist() == np.isnan(each.mean).tolist()
    assert any("2 windows without any request" in note for note in loaded.notes)
    evening = np.concatenate((np.arange(0, 300, 2.0), [400.0], np.arange(1200, 1801, 2.0)))
    loaded = read_series(write_trace(tmp_path / "quiet.parquet", evening), 300.0)
    assert loaded.series[0].mean == pytest.approx([0.5, 1 / 300, 0, 0, 0.5, 0.5])


def test_a_start_gives_hour_and_weekday(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.parquet", np.arange(900, 2000, 10.0))
    loaded = read_series(path, 300.0)
    assert any("does not say at what time" in note for note in loaded.notes)
    assert not loaded.series[0].weekday_known
    loaded = read_series(path, 300.0, parse_start("fri 08:30"))
    assert not loaded.notes
    begins = (loaded.series[0].start_s, loaded.series[0].weekday_known)
    assert begins == (4 * DAY_S + 8.5 * 3600 + 900, True)


def test_dates_give_the_start_and_part_windows_at_the_ends_are_left_out(tmp_path: Path) -> None:
    arrivals = FRIDAY_S + np.arange(100, 1600, 2.0)
    requests = read_series(write_trace(tmp_path / "a.parquet", arrivals), 300.0).series[0]
    assert (requests.start_s, requests.weekday_known) == (4 * DAY_S + 300, True)
    assert requests.mean == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("2024-05-10", (4 * DAY_S, True)),
        ("2024-05-10T08:30:05", (4 * DAY_S + 30605, True)),
        ("Sun 8:30", (6 * DAY_S + 30600, True)),
        ("23:59", (86340, False)),
    ],
)
def test_starts_as_people_write_them(text: str, start: tuple[float, bool]) -> None:
    assert parse_start(text) == Start(*start)


@pytest.mark.parametrize("text", ["", "fri8", "xyz 08:30", "25:00", "2024-13-01", "8"])
def test_other_starts_are_refused(text: str) -> None:
    with pytest.raises(ForecastError, match="write it as 2024-05-10"):
        parse_start(text)


def test_a_public_trace_is_read_as_it_was_published(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:{15 + at // 60}:{at % 60:02},374,44" for at in range(0, 700, 7)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    requests, tokens = read_series(path, 300.0).series
    assert requests.mean == pytest.approx([43 / 300, 43 / 300])
    assert tokens.mean == pytest.approx(requests.mean * 418)


def test_what_is_no_trace_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("when,how\n1,2\n")
    with pytest.raises(TraceError, match="columns t_s, rate and perhaps peak"):
        read_series(tmp_path / "a.csv", 300.0)
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(TraceError, match="trace import"):
        read_series(tmp_path / "a.parquet", 300.0)
    path = write_trace(tmp_path / "ms.parquet", np.arange(10) * 1e11)
    with pytest.raises(ForecastError, match="or they are no seconds"):
        read_series(path, 300.0)
    path = write_trace(tmp_path / "years.parquet", [0.0, 4e8])
    with pytest.raises(ForecastError, match="more than ten years"):
        read_series(path, 300.0)


# Tables of rates


def test_a_table_of_rates_is_taken_as_it_is(tmp_path: Path) -> None:
    rows = [(FRIDAY_S + 433 * place, place, place + 1) for place in (0, 1, 3, 4)]
    path = write_rates(tmp_path / "r.csv", rows, "t_s,rate,peak")
    loaded = read_series(path, 433.0, name="requests")
    (series,) = loaded.series
    assert (series.name, loaded.notes) == ("requests", [])
    assert (series.start_s, series.weekday_known) == (4 * DAY_S, True)
    np.testing.assert_array_equal(series.mean, [0, 1, np.nan, 3, 4])
    np.testing.assert_array_equal(series.peak, [1, 2, np.nan, 4, 5])


def test_finer_rates_are_averaged_and_their_highest_minute_is_the_peak(tmp_path: Path) -> None:
    rates = np.random.default_rng(0).uniform(1, 9, 40)
    rows: list[tuple[float, object]] = [(30.0 * at, rate) for at, rate in enumerate(rates)]
    rows[12:16] = [(at, "") for at, _ in rows[12:16]]  # less than half a window
    rows[21:27] = [(at, "nan") for at, _ in rows[21:27]]  # more
    (series,) = read_series(write_rates(tmp_path / "r.csv", rows), 300.0).series
    assert series.mean[0] == pytest.approx(rates[:10].mean())
    assert series.peak[0] == pytest.approx(rates[:10].reshape(-1, 2).mean(1).max())
    assert series.mean[1] == pytest.approx(np.delete(rates[10:20], range(2, 6)).mean())
    assert np.isnan(series.mean[2])
    assert np.isnan(series.peak[2])
    assert len(series) == 4


def test_rates_that_are_none_are_refused_by_their_row(tmp_path: Path) -> None:
    for rows, said in (
        ([(0, 1), (300, "x")], "row 3: rate 'x' is no number"),
        ([(0, 1), (300, -1)], "row 3: rate is -1"),
        ([(0, "inf"), (300, 1)], "row 2: rate is inf"),
        ([(0, 1), (0, 1)], "row 3: t_s 0 does not come after"),
        ([(0, 1), (300, 1, 2)], "row 3: the number of fields"),
        ([(0, 1)], "has 1 rows"),
        ([(0, 1), (600, 1), (1200, 2)], "use --window 600"),
    ):
        path = write_rates(tmp_path / "r.csv", cast("Any", rows))
        with pytest.raises(ForecastError) as caught:
            read_series(path, 300.0)
        assert said in str(caught.value)


def test_peaks_are_left_out_for_a_forecaster_that_never_saw_any() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    series = Series(300.0, values, values + 1)
    targets = {score.target for score in measure(cast("Any", Doubling()), series, 0)}
    assert targets == {"mean", "peak"}
    assert {score.target for score in measure(cast("Any", Doubling()), series, 0, peaks=False)} == {
        "mean"
    }
    assert set(next_forecast(cast("Any", Doubling()), series)) == {"mean", "peak"}
    assert set(next_forecast(cast("Any", Doubling()), series, peaks=False)) == {"mean"}


# Lengths and horizons


def test_short_series_are_refused_with_their_number(tmp_path: Path) -> None:
    def series(windows: int) -> list[Series]:
        return [Series(300.0, np.ones(windows))]

    with pytest.raises(ForecastError, match=r"has 59 whole windows of 300 s \(4.9 hours\).* 60,"):
        check_length(tmp_path, series(59), (1, 2))
    with pytest.raises(ForecastError, match="it takes 120,"):
        check_length(tmp_path, series(119), (1, 12))
    assert "is 5.0 hours long" in check_length(tmp_path, series(60), (1, 2))[0]
    assert not check_length(tmp_path, series(576), (1, 12))
    unknown = Series(300.0, np.where(np.arange(600) < 550, np.nan, 1.0))
    with pytest.raises(ForecastError, match="has 50 whole windows"):
        check_length(tmp_path, [unknown], (1,))
    with pytest.raises(ForecastError, match="too few to measure"):
        evaluation_begins(tmp_path, series(59)[0], (1,))
    with pytest.raises(ForecastError, match="has no whole window"):
        evaluation_begins(tmp_path, unknown.until(80), (1,))


def test_horizons_are_whole_windows_each_once_in_order() -> None:
    assert horizons_of(300.0) == (1, 2, 6, 12)
    assert horizons_of(600.0) == (1, 2, 3, 6)
    assert horizons_of(60.0, cold_start_s=200.0) == (1, 2, 4, 30, 60)
    assert horizons_of(300.0, (60, 5, 5, 7), cold_start_s=700.0) == (1, 3, 12)
    for wrong in ((0.0, None), (float("nan"), None), (300.0, (-5.0,))):
        with pytest.raises(ForecastError, match="must be more than 0"):
            horizons_of(*wrong)


# Measuring


class Doubling:
    """Says the last value for the median, and twice that for the 0.95 quantile."""

    horizons = (1, 3)

    def predict(self, series: Series, origins: Any, target: str = "mean") -> Any:
        last = series.of(cast("Any", target))[origins]
        factors = np.array([{0.95: 2.0}.get(quantile, 1.0) for quantile in QUANTILES])
        return np.repeat(last[:, None, None] * factors, len(self.horizons), axis=1)


def test_measures_are_what_they_say() -> None:
    series = Series(300.0, np.array([1.0, 1.0, 1.5, 4.0, np.nan, 2.0]), name="x")
    one, three = measure(cast("Any", Doubling()), series, 1, trace="t")
    # One ahead from windows 1, 2 and 3: 1 -> 1.5, 1.5 -> 4, 4 -> unknown; and from the unknown one.
    assert (one.series, one.trace, one.target, one.horizon) == ("x", "t", "mean", 1)
    assert (three.horizon, three.windows) == (3, 1)
    known = Series(300.0, np.array([1.0, 1.0, 1.5, 4.0, 2.0]))
    one, _ = measure(cast("Any", Doubling()), known, 1)
    assert one.windows == 3
    assert one.wape == pytest.approx((0.5 + 2.5 + 2.0) / 7.5)
    assert one.wape_last == one.wape
    assert one.pinball == pytest.approx((0.05 * 0.5 + 0.95 * 1 + 0.05 * 6) / 7.5)
    assert one.pinball_last == pytest.approx((0.95 * 0.5 + 0.95 * 2.5 + 0.05 * 2) / 7.5)
    assert one.coverage == pytest.approx(2 / 3)
    idle = next(iter(measure(cast("Any", Doubling()), Series(300.0, np.zeros(5)), 1)))
    assert (idle.wape, idle.coverage) == (None, 1.0)


# Commands


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    at = np.arange(150)
    rows = list(zip(300 * at, 5 + 3 * np.sin(at / 9) + rng.random(150), strict=True))
    return write_rates(tmp_path_factory.mktemp("rates") / "rates.csv", rows)


FITTED: list[LoadForecaster] = []
"""What the fixture below has fitted, in order."""
WINDOWS: list[int] = []


@pytest.fixture(scope="module")
def trained(rates: Path) -> Path:
    folder = rates.parent / "forecaster"
    fit = LoadForecaster.fit

    def noted(self: LoadForecaster, series: Sequence[Series]) -> LoadForecaster:
        FITTED.append(self)
        WINDOWS.extend(len(each) for each in series)
        return fit(self, series)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadForecaster, "fit", noted)
        result = run(
            "train", rates, "--out", folder, "--members", 1, "--epochs", 1, "--horizons", "5,10",
            "--start", "mon", "--name", "requests",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"forecaster: {folder}" in result.output
    assert "WAPE" in result.output
    assert "warning: " in result.stderr  # half a day is short
    return folder


def test_training_keeps_a_card(trained: Path, rates: Path) -> None:
    card = read_card(trained)
    assert (card.window_s, card.horizons) == (300.0, (1, 2))
    assert card.parameters["epochs"] == 1
    (learned,) = card.learned
    assert (learned.name, learned.windows, learned.weekday_known) == ("requests", 150, True)
    assert [(each.horizon, each.windows) for each in card.metrics] == [(1, 30), (2, 29)]
    assert {each.trace for each in card.metrics} == {str(rates)}


def test_a_twin_is_measured_and_what_has_learned_all_is_kept(trained: Path, rates: Path) -> None:
    assert WINDOWS == [120, 150]
    twin, all_ = FITTED
    kept, card = load(trained)
    series = read_series(rates, 300.0, parse_start("mon"), name="requests").series[0]
    origins = np.arange(119, 150)
    assert np.array_equal(kept.predict(series, origins), all_.predict(series, origins))
    assert not np.array_equal(kept.predict(series, origins), twin.predict(series, origins))
    assert card.metrics == tuple(measure(twin, series, 119, trace=str(rates)))


def test_show_prints_the_card_and_the_next_forecast(trained: Path, rates: Path) -> None:
    result = run("show", trained)
    assert result.exit_code == 0
    for part in ("5 min, 10 min", "150 windows", "epochs 1", read_card(trained).code, "WAPE"):
        assert part in result.output
    result = run("show", trained, rates, "--name", "requests")
    assert result.exit_code == 0
    assert "0.95" in result.output
    forecaster, _ = load(trained)
    series = read_series(rates, 300.0, name="requests").series[0]
    expected = next_forecast(forecaster, series)["mean"]
    assert expected.shape == (2, len(QUANTILES))
    assert f"{expected[1, 3]:.3g}" in result.output
    assert "is none of what it has learned (requests)" in run("show", trained, rates).stderr


def test_evaluate_prints_a_table_or_json(trained: Path, rates: Path) -> None:
    result = run("evaluate", trained, rates, "--name", "requests", "--start", "mon")
    assert result.exit_code == 0
    assert "10 min" in result.output
    assert "it was trained on these requests" in result.stderr
    result = run("evaluate", trained, rates, "--name", "requests", "--json")
    found = json.loads(result.stdout)
    assert [(each["horizon"], each["windows"]) for each in found] == [(1, 99), (2, 98)]
    assert 0 < found[0]["wape"] < 1
    assert "it was trained" not in result.stderr  # without --start it is another series


def test_a_folder_is_replaced_only_by_force(
    trained: Path, rates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_card(trained)
    result = run("train", rates, "--out", trained)
    assert result.exit_code == 2
    assert "exists already" in result.output
    (tmp_path / "mine").write_text("x")
    result = run("train", rates, "--out", tmp_path, "--force")
    assert result.exit_code == 2
    assert "holds something else" in result.output
    assert read_card(trained) == before

    def learned_before(self: LoadForecaster, series: Sequence[Series]) -> LoadForecaster:
        self.__dict__.update(load(trained)[0].__dict__)
        return self

    monkeypatch.setattr(LoadForecaster, "fit", learned_before)
    for metrics, more in ((2, ()), (0, ("--no-check", "--force"))):
        result = run("train", rates, "--out", tmp_path / "new", *more)
        assert result.exit_code == 0, result.output
        assert len(read_card(tmp_path / "new").metrics) == metrics


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "shipped:demo", "--out", "x"), "has 1 whole windows of 300 s (5 minutes)"),
        (("train", "nix", "--out", "x"), "nix: no such trace"),
        (("train", "shipped:demo", "--out", "x", "--horizons", "5,a"), "minutes with commas"),
        (("train", "shipped:demo", "--out", "x", "--window", "0"), "--window 0"),
        (("train", "shipped:demo", "--out", "x", "--start", "8"), "--start '8'"),
        (("train", "demo", "--out", "x", "--name", "a", "--name", "b"), "2 times --name"),
        (("train", "--out", "x"), "TRACE..."),
        (("evaluate", "x", "shipped:demo"), "holds no card.json"),
        (("show", "x"), "holds no card.json"),
        (("show", "x", "--start", "mon"), "give one"),
    ],
)
def test_errors_are_one_line_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output
    assert not list(tmp_path.iterdir())


def test_a_saved_forecaster_of_other_code_is_one_line_too(trained: Path, tmp_path: Path) -> None:
    text = (trained / "card.json").read_text()
    (tmp_path / "card.json").write_text(text.replace(read_card(trained).code, "0123"))
    result = run("evaluate", tmp_path, "shipped:demo")
    assert result.exit_code == 2
    assert "other forecasting code (0123)" in result.output
    assert "not this version's" in run("show", tmp_path).output


def test_the_extra_is_asked_for_only_where_it_is_needed(trained: Path) -> None:
    """Without it, help and cards can be read; training says what to install."""
    script = """
import sys
for name in ("pandas", "safetensors", "sklearn", "statsmodels", "torch"):
    sys.modules[name] = None
from click.testing import CliRunner
from twinkeel import main
run = CliRunner().invoke
assert run(main, ["--help"]).exit_code == 0
assert run(main, ["forecast", "train", "--help"]).exit_code == 0
shown = run(main, ["forecast", "show", sys.argv[1]])
assert shown.exit_code == 0, shown.output
for words in (["train", "shipped:demo", "--out", "x"], ["evaluate", sys.argv[1], "shipped:demo"]):
    result = run(main, ["forecast", *words])
    assert result.exit_code == 2, result.output
    assert "pip install 'twinkeel[forecast]'" in result.output, result.output
"""
    subprocess.run([sys.executable, "-c", script, str(trained)], check=True)
