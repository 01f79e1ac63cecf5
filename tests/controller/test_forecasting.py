"""What arrives is counted by the model's windows, and the policy is told what the model says."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from controller import serve as serving_module
from controller.cli import serve
from controller.forecasting import (
    KEEP_S,
    WINDOWS_MOST,
    Counts,
    Forecasting,
    Forecasts,
    Model,
    Window,
    as_learned,
    keep_window,
    kept_windows,
    load_model,
)
from controller.store.database import Database
from policy.events import Forecasted
from policy.files import FileError
from policy.forecast.contract import QUANTILES
from policy.forecast.files import Learned, save
from policy.forecast.forecaster import LoadForecaster, Online
from policy.forecast.series import Series
from tests.controller.asking import ask_all, chat
from tests.controller.inprocess import serving
from tests.controller.processes import MODEL, audit, http, records, settings_for
from tests.telemetry_support import answer, call, dispatch, refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from controller.call import Call
    from policy.events import Event
    from tests.controller.processes import Twin

S = 1_000_000_000
NAN = math.nan
NUMBER = 2_900_000  # of a window of 600 s, in 2025
SIZE, ASKED = 400, 100
ESTIMATE = SIZE / 4 + ASKED  # of such a call, while nothing is known


class Desk:
    """A counter with a clock, and calls that come and go."""

    def __init__(self, window_s: float = 600.0, begin_s: float = 0.0) -> None:
        self.now_ns = 7 * S
        self.wall_ns = round((NUMBER * window_s + begin_s) * S)
        self.over: list[Window] = []
        self.counts = Counts(window_s, self.over.append, lambda: self.now_ns, lambda: self.wall_ns)
        self._next = 0

    def wait(self, s: float, wall_s: float | None = None, look: bool = True) -> None:
        self.now_ns += round(s * S)
        self.wall_ns += round((s if wall_s is None else wall_s) * S)
        if look:
            self.counts.turn()

    def arrive(self, count: int = 1, **changed: Any) -> list[Call]:
        made = []
        for _ in range(count):
            made.append(call(self._next, prompt_bytes=SIZE, max_tokens=ASKED, **changed))
            made[-1].arrived_ns = self.now_ns
            self._next += 1
            self.counts.arrived(made[-1])
        return made

    def settle(self, made: Call, prompt: int, output: int) -> None:
        dispatch(made)
        settled = answer(made)
        made.prompt_tokens, made.output_tokens = prompt, output
        self.counts.settled(made, settled)


# Counting


def test_a_window_has_its_rate_and_its_highest_minute() -> None:
    desk = Desk()
    desk.arrive(30)
    for _ in range(9):
        desk.wait(60)
        desk.arrive(3)
    assert not desk.over
    desk.wait(60)
    (window,) = desk.over
    assert window.number == NUMBER
    assert (window.requests, window.requests_peak) == (57 / 600, 30 / 60)
    assert window.tokens == pytest.approx(57 * ESTIMATE / 600)
    assert window.tokens_peak == pytest.approx(30 * ESTIMATE / 60)


def test_an_empty_window_is_known_to_be_empty() -> None:
    desk = Desk()
    desk.wait(600)
    desk.wait(600)
    assert desk.over == [Window(NUMBER, 0, 0, 0, 0), Window(NUMBER + 1, 0, 0, 0, 0)]


def test_what_arrives_after_the_end_is_the_next_windows_though_nobody_looked() -> None:
    desk = Desk()
    desk.arrive(6)
    desk.wait(599.9, look=False)
    desk.arrive(6)
    desk.wait(0.2, look=False)
    desk.arrive(600)
    assert [window.requests for window in desk.over] == [12 / 600]
    desk.wait(600)
    assert desk.over[1].requests == 1.0


def test_what_is_settled_within_its_window_is_put_right_in_its_minute() -> None:
    desk = Desk()
    first, second = desk.arrive(2)
    desk.wait(120)
    desk.settle(first, 1000, 5000)
    refused = refuse(second)
    desk.counts.settled(second, refused)  # shed: it would have been as long as others
    desk.wait(480)
    (window,) = desk.over
    assert window.tokens == pytest.approx((6000 + ESTIMATE) / 600)
    assert window.tokens_peak == pytest.approx((6000 + ESTIMATE) / 60)


def test_what_is_settled_later_keeps_its_estimate_and_teaches_the_next() -> None:
    desk = Desk()
    (late,) = desk.arrive()
    desk.wait(600)
    desk.settle(late, 200, 60)
    desk.arrive()
    other = desk.arrive(model="another")
    assert other
    desk.wait(600)
    assert desk.over[0].tokens == pytest.approx(ESTIMATE / 600)
    assert desk.over[1].tokens == pytest.approx((260 + ESTIMATE) / 600)


def test_an_embedding_has_a_prompt_only() -> None:
    desk = Desk()
    desk.arrive(endpoint="embeddings")
    desk.wait(600)
    assert desk.over[0].tokens == pytest.approx(SIZE / 4 / 600)


@pytest.mark.parametrize(("begin_s", "rate"), [(90.0, 51 / 510), (299.0, 51 / 301), (301.0, NAN)])
def test_of_a_window_that_was_counted_in_part_the_rate_is_of_that_part(
    begin_s: float, rate: float
) -> None:
    desk = Desk(begin_s=begin_s)
    desk.arrive(48)  # in a minute of which part was not counted
    desk.wait(600 - begin_s - 30)
    desk.arrive(3)
    desk.wait(30)
    (window,) = desk.over
    assert window.requests == pytest.approx(rate, nan_ok=True)
    peak = NAN if math.isnan(rate) else max(rate, 3 / 60)
    assert window.requests_peak == pytest.approx(peak, nan_ok=True)


@pytest.mark.parametrize("jump_s", [-7200.0, 1300.0, 86_400.0])
def test_when_the_clock_is_set_what_was_counted_fits_no_window(jump_s: float) -> None:
    desk = Desk()
    desk.arrive(6)
    desk.wait(60, wall_s=60 + jump_s)
    desk.arrive(6)
    left_s = 600 - (desk.wall_ns / S) % 600
    desk.wait(left_s)
    (window,) = desk.over
    assert window.number == (desk.wall_ns // S - 600) // 600
    assert math.isnan(window.requests) or window.requests == pytest.approx(6 / left_s)


def test_windows_of_odd_lengths_end_when_they_should() -> None:
    desk = Desk(433.2378)
    for _ in range(433):
        desk.arrive()
        desk.wait(1)
    assert not desk.over
    desk.wait(0.3)
    (window,) = desk.over
    assert window.requests == pytest.approx(433 / 433.2378)
    assert 1.0 <= window.requests_peak < 1.03


# Forecasting


@dataclass
class Follower:
    """Says 1 more than it saw last for a window ahead, and so on; notes what it was told."""

    history: Series
    seen: list[tuple[float, float]] = field(default_factory=list)
    fails: bool = False

    def observe(self, mean: float, peak: float = NAN) -> None:
        self.seen.append((mean, peak))

    def predict(self) -> dict[Any, Any]:
        if self.fails:
            raise RuntimeError("it does not work")
        means = [*self.history.mean, *(mean for mean, _ in self.seen)]
        last = [mean for mean in means if not math.isnan(mean)][-1]
        rows = np.array([[last + 1], [last + 2]]) * np.ones(len(QUANTILES))
        return {"mean": rows, "peak": rows}


class Fake:
    """A model of windows of 600 s, and who it follows: requests, tokens, requests, ..."""

    def __init__(self, window_s: float = 600.0) -> None:
        self.followers: list[Follower] = []
        self.model = Model(window_s, (1, 2), self._follow)
        self.fails = False

    def _follow(self, history: Series) -> Follower:
        self.followers.append(Follower(history, fails=self.fails))
        return self.followers[-1]


def window(number: int, rate: float) -> Window:
    return Window(NUMBER + number, rate, 2 * rate, 100 * rate, 300 * rate)


def test_the_policy_is_told_of_requests_and_tokens() -> None:
    fake = Fake()
    told = Forecasts(fake.model).after(window(0, 4.0))
    assert told is not None
    assert told.horizons_ns == (0, 300 * S, 900 * S, 1200 * S)
    assert told.requests_p50 == (4500, 5000, 6000, 6000)
    assert told.tokens_p50 == (400, 401, 402, 402)


def test_it_follows_what_comes_and_begins_again_after_a_gap() -> None:
    fake = Fake()
    forecasts = Forecasts(fake.model, [window(-3, 1.0), window(-1, 2.0)], lambda _: 0)
    forecasts.after(window(0, 3.0))
    forecasts.after(window(1, 4.0))
    requests, tokens = fake.followers
    np.testing.assert_equal(requests.history.mean, [1, NAN, 2, 3])
    np.testing.assert_equal(tokens.history.peak, [300, NAN, 600, 900])
    assert requests.seen == [(4.0, 8.0)]
    assert tokens.seen == [(400.0, 1200.0)]
    forecasts.after(window(4, 5.0))
    assert len(fake.followers) == 4
    np.testing.assert_equal(fake.followers[2].history.mean, [1, NAN, 2, 3, 4, NAN, NAN, 5])
    forecasts.after(window(2, 6.0))  # the clock was set back
    np.testing.assert_equal(fake.followers[4].history.mean, [1, NAN, 2, 3, 4, 6])


def test_the_model_is_told_the_local_day_and_week() -> None:
    fake = Fake()
    offsets = {0: 3600, 1: 3600, 2: 7200}
    forecasts = Forecasts(fake.model, (), lambda at_s: offsets[round(at_s / 600) - NUMBER - 1])
    for number in range(3):
        forecasts.after(window(number, 1.0))
    # 2025-02-19 21:20 UTC was a Wednesday
    assert fake.followers[0].history.start_s == 2 * 86_400 + 22 * 3600 + 20 * 60
    assert len(fake.followers) == 4  # the clocks were changed, so it begins again
    assert fake.followers[2].history.start_s == 2 * 86_400 + 23 * 3600 + 20 * 60
    assert len(fake.followers[2].history) == 3


def test_of_what_was_never_counted_nothing_is_forecast() -> None:
    fake = Fake()
    forecasts = Forecasts(fake.model)
    assert forecasts.after(Window(NUMBER, NAN, NAN, NAN, NAN)) is None
    assert not fake.followers
    assert forecasts.after(window(1, 1.0)) is not None
    told = forecasts.after(Window(NUMBER + 2, NAN, NAN, NAN, NAN))
    assert told is not None
    assert told.requests_p50[0] == told.requests_p50[1]  # nobody knows what it was


def test_what_has_failed_is_not_gone_on_from() -> None:
    fake = Fake()
    forecasts = Forecasts(fake.model)
    fake.fails = True
    with pytest.raises(RuntimeError, match="does not work"):
        forecasts.after(window(0, 1.0))
    fake.fails = False
    assert forecasts.after(window(1, 2.0)) is not None
    np.testing.assert_equal(fake.followers[-1].history.mean, [100, 200])
    assert len(fake.followers) == 4


def test_four_weeks_are_kept() -> None:
    fake = Fake(14_400.0)
    forecasts = Forecasts(fake.model, [window(0, 1.0)])
    forecasts.after(window(10_000_000, 1.0))
    assert len(fake.followers[0].history) == KEEP_S / 14_400 == 168
    assert np.isnan(fake.followers[0].history.mean[:-1]).all()


# What outlives the process


def test_windows_are_kept_by_their_length_and_old_ones_are_deleted() -> None:
    with sqlite3.connect(":memory:") as db:
        now_s = (NUMBER + 3) * 600.0
        assert kept_windows(db, 600.0, now_s) == []
        keep_window(db, 600.0, window(-5000, 9.0))  # more than four weeks ago
        keep_window(db, 300.0, window(0, 9.0))
        keep_window(db, 600.0, window(0, 1.0))
        keep_window(db, 600.0, Window(NUMBER + 1, NAN, NAN, NAN, NAN))
        keep_window(db, 600.0, window(2, 2.0))
        keep_window(db, 600.0, window(2, 3.0))
        keep_window(db, 600.0, window(3, 9.0))  # of a time that has not come: the clock was set
        assert kept_windows(db, 600.0, now_s) == [window(0, 1.0), window(2, 3.0)]
        assert db.execute("SELECT count(*) FROM load_windows").fetchone() == (3,)
        keep_window(db, 1.0, Window(1, 1.0, 1.0, 1.0, 1.0))
        keep_window(db, 1.0, Window(1 + WINDOWS_MOST, 1.0, 1.0, 1.0, 1.0))
        rows = db.execute("SELECT count(*) FROM load_windows WHERE window_ns = ?", (S,))
        assert rows.fetchone() == (1,)
    db.close()


class Driven:
    """A driver that notes what it is fed."""

    def __init__(self) -> None:
        self.now = 7 * S
        self.fed: list[Event] = []
        self.troubles: list[str] = []

    def now_ns(self) -> int:
        return self.now

    def feed(self, event: Event) -> None:
        self.fed.append(event)

    def trouble(self, key: str, text: str) -> None:
        self.troubles.append(f"{key}: {text}")


def test_a_restart_goes_on_from_what_was_counted(tmp_path: Path) -> None:
    begin_ns = NUMBER * 600 * S

    async def live(fake: Fake, driven: Driven, from_s: float, windows: int) -> Forecasting:
        wall_ns = begin_ns + round(from_s * S)
        start_ns = driven.now
        database = Database(tmp_path / "controller.sqlite")
        kept = await database.run(lambda db: kept_windows(db, 600.0, wall_ns / S))
        forecasting = Forecasting(
            fake.model, driven, database, kept, lambda: wall_ns + driven.now - start_ns
        )
        for _ in range(windows):
            made = call(at_ns=driven.now)
            made.arrived_ns = driven.now
            forecasting.arrived(made)
            driven.now += 600 * S
            forecasting.turn()
            while forecasting._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await forecasting.close()
        database.close()
        return forecasting

    fake, driven = Fake(), Driven()
    first = asyncio.run(live(fake, driven, 0, 2))
    assert (first.told, first.failed, len(driven.fed)) == (2, 0, 2)
    assert len(fake.followers[0].history) == 1
    after = Fake()
    asyncio.run(live(after, driven, 2400, 1))
    rate = 1 / 600
    np.testing.assert_allclose(after.followers[0].history.mean, [rate, rate, NAN, NAN, rate])
    assert isinstance(driven.fed[-1], Forecasted)

    broken = Fake()
    broken.fails = True
    failed = asyncio.run(live(broken, driven, 3000, 1))
    assert (failed.told, failed.failed) == (0, 1)
    assert driven.troubles == ["forecast: no forecast was made: RuntimeError: it does not work"]
    again = Fake()
    asyncio.run(live(again, driven, 3600, 1))  # its window was kept all the same
    assert np.isfinite(again.followers[0].history.mean[-2:]).all()


# All together


def figure(metrics: str, name: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def play(settings: Any, until: Callable[[list[Any], str], bool]) -> str:
    """Requests come in front of two twins, until the log holds enough, or the metrics say it; the
    metrics then."""

    async def run() -> str:
        async with serving(settings) as running:
            fed: list[Any] = []
            feed = running.driver.feed

            def noted(event: Event) -> None:
                feed(event)
                fed.append(event)

            running.driver.feed = noted  # type: ignore[method-assign]
            head = {"Authorization": f"Bearer {running.admin_token}"}
            url = f"{running.admin_url}/metrics"
            async with asyncio.timeout(90):
                while True:
                    await ask_all(running.url, [chat(MODEL, "?", 4)] * 4)
                    await asyncio.sleep(0.1)
                    _, body = await asyncio.to_thread(http, "GET", url, None, head)
                    if until(fed, body.decode()):
                        return body.decode()

    return asyncio.run(run())


def within(metrics: str, name: str, least: float) -> bool:
    """It is told, and more than that."""
    lines = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return any(float(line.split()[-1]) > least for line in lines)


def forecasts_in(fed: list[Any]) -> int:
    return sum(isinstance(event, Forecasted) for event in fed)


def usual(fed: list[Any]) -> int:
    """The most that was forecast for the next window, in requests per 1,000 s."""
    found = [event.requests_p50[1] for event in fed if isinstance(event, Forecasted)]
    return max(found, default=0)


def test_a_controller_tells_its_policy_and_its_log(
    twins: list[Twin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(1.0)
    monkeypatch.setattr(serving_module, "load_model", lambda folder: fake.model)
    settings = settings_for([twin.url for twin in twins], tmp_path, forecast="a-folder")
    expected = 'twinkeel_forecast_requests_per_second{ahead_seconds="0.5",quantile="0.9"}'
    sent = 'twinkeel_sink_items_total{result="sent",sink="forecast"}'
    # Where there was no turn for a while, nothing came in a window.
    metrics = play(
        settings,
        lambda fed, told: forecasts_in(fed) >= 2 and usual(fed) > 2000
        and within(told, expected, 1) and within(told, sent, 1),
    )  # fmt: skip
    assert audit(settings.data_path)
    events = [each.event for each in records(settings.data_path)]
    told = [event for event in events if isinstance(event, Forecasted)]
    assert len(told) >= 2
    most = max(told, key=lambda each: each.requests_p50[1])
    assert most.requests_p50[1] == usual(told) > 2000  # a window's requests, and one more
    assert most.tokens_p50[1] > 4 * most.requests_p50[1] / 1000
    assert 0 <= figure(metrics, "twinkeel_forecast_age_seconds") < 20
    assert figure(metrics, 'twinkeel_sink_items_total{result="failed",sink="forecast"}') == 0


def test_a_forecast_that_fails_stops_nothing(
    twins: list[Twin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(1.0)
    fake.fails = True
    monkeypatch.setattr(serving_module, "load_model", lambda folder: fake.model)
    settings = settings_for([twin.url for twin in twins], tmp_path, forecast="a-folder")
    metrics = play(settings, lambda *_: len(fake.followers) >= 3)
    failed = figure(metrics, 'twinkeel_sink_items_total{result="failed",sink="forecast"}')
    assert failed >= 1
    assert "twinkeel_forecast_age_seconds" not in metrics
    assert audit(settings.data_path)


# The real one


@pytest.fixture(scope="module")
def trained() -> tuple[LoadForecaster, list[Series]]:
    """A small one, which has learned two days of forty windows each."""
    torch.set_num_threads(1)  # as the controller does; more wait for each other on busy cores
    rng = np.random.default_rng(1)
    turns = 2 * np.pi * np.arange(80) / 40
    learned = []
    for label, level in (("requests", 20.0), ("tokens", 2000.0)):
        mean = level * (1.5 + np.sin(turns)) * np.exp(0.1 * rng.normal(size=80))
        learned.append(Series(600.0, mean, 1.3 * mean, name=f"mine-{label}"))
    return LoadForecaster(horizons=(1, 2), members=1, epochs=1).fit(learned), learned


def saved(trained: tuple[LoadForecaster, list[Series]], folder: Path, window_s: float) -> str:
    forecaster, learned = trained
    of_length = [replace(each, window_s=window_s) for each in learned]
    save(folder, forecaster, of_length, created="2026-01-01T00:00:00Z")
    return str(folder)


def test_a_trained_model_is_found_and_goes_on(
    trained: tuple[LoadForecaster, list[Series]], tmp_path: Path
) -> None:
    model = load_model(saved(trained, tmp_path / "model", 600.0))
    assert (model.window_s, tuple(model.horizons)) == (600.0, (1, 2))
    kept = [window(number, 20.0 + number % 7) for number in range(40)]
    step_by_step, at_once = Forecasts(model, kept[:29]), Forecasts(model, kept[:39])
    told = [step_by_step.after(each) for each in kept[29:]]
    again = at_once.after(kept[39])
    assert told[-1] is not None
    assert again is not None
    for ours, other in zip(
        msgspec.structs.astuple(told[-1]), msgspec.structs.astuple(again), strict=True
    ):
        assert ours == pytest.approx(other, abs=2)
    for median, upper in zip(again.requests_p50, again.requests_p90, strict=True):
        assert 10_000 < median <= upper < 60_000
    following = model.follow(Series(600.0, np.ones(3), np.ones(3), name="tokens"))
    assert isinstance(following, Online)
    assert set(following.weights) == {"mean", "peak"}


def test_a_series_is_the_one_of_the_only_trace_that_was_learned() -> None:
    def learned(name: str, peaks: bool) -> Learned:
        return Learned(name, 100, 0, "", peaks, 0.0, True)

    history = Series(600.0, np.ones(3), np.ones(3), name="requests")
    mine, other = learned("shop-requests", False), learned("shop-tokens", True)
    taken = as_learned(history, (mine, other))
    assert (taken.name, len(taken.peak)) == ("shop-requests", 0)
    assert as_learned(history, (learned("requests", True), other)).name == "requests"
    two = as_learned(history, (mine, other, learned("bank-requests", False)))
    assert (two.name, len(two.peak)) == ("requests", 3)
    assert len(as_learned(history, (learned("x", False),)).peak) == 0


def test_a_controller_with_a_trained_model(
    twins: list[Twin], trained: tuple[LoadForecaster, list[Series]], tmp_path: Path
) -> None:
    """Stopped and started again, it goes on from what it has counted."""
    model = saved(trained, tmp_path / "model", 1.0)
    settings = settings_for([twin.url for twin in twins], tmp_path, forecast=model)
    failed = 'twinkeel_sink_items_total{result="failed",sink="forecast"}'
    assert figure(play(settings, lambda fed, _: forecasts_in(fed) >= 2), failed) == 0
    before = forecasts_in([each.event for each in records(settings.data_path)])
    assert figure(play(settings, lambda fed, _: forecasts_in(fed) >= 2), failed) == 0
    assert audit(settings.data_path)
    found = [each.event for each in records(settings.data_path)]
    assert forecasts_in(found) >= before + 2 >= 4
    database = Database(settings.data_path / "controller.sqlite")
    kept = asyncio.run(database.run(lambda db: kept_windows(db, 1.0, time.time() + 1)))
    database.close()
    assert len(kept) >= 4
    assert any(each.requests > 1 for each in kept)


# What cannot be used


def test_a_folder_without_a_forecaster_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"forecast: .*holds no card\.json"):
        load_model(str(tmp_path))
    words = ["--upstream", "http://127.0.0.1:9", "--check", "--forecast", str(tmp_path)]
    result = CliRunner().invoke(serve, words)
    assert result.exit_code == 2
    assert "holds no card.json" in result.output
    settings = settings_for(["http://127.0.0.1:9"], tmp_path, forecast=str(tmp_path))

    async def start() -> None:
        async with serving(settings):
            raise AssertionError("it serves")

    with pytest.raises(FileError, match=r"holds no card\.json"):
        asyncio.run(start())


def test_without_the_extra_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(folder: Path) -> None:
        import torch  # noqa: F401

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("controller.forecasting.load", load)
    with pytest.raises(FileError, match=r"needs torch, .* pip install 'twinkeel\[forecast\]'"):
        load_model(str(tmp_path))
