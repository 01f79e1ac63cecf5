"""Counts what arrives, window by window, and tells the policy what a trained model makes of it.

The windows are those of the model, and of the clock: they lie the same way after a restart, so that
the model goes on from what was counted before. What arrives is counted as it arrives, and what is
not known of it then is estimated from what was known of others: in an overload, what is served says
nothing about what is asked for. Nothing here decides, and nothing that fails here stops serving.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from controller.listener import Listener
from policy.files import FileError
from policy.forecast.events import forecasted
from policy.forecast.files import ForecastError, load
from policy.forecast.series import DAY_S, WEEK_S, Series

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Mapping, Sequence

    from controller.call import Call
    from controller.store.database import Database
    from policy.decisions import Settled
    from policy.events import Event, Forecasted
    from policy.forecast.files import Learned
    from policy.forecast.series import Array, Target

NS_PER_S = 1_000_000_000
MONDAY_S = 4 * DAY_S
"""The first one of 1970 began then."""
SLICE_S = 60.0
"""A window's peak is its highest minute, or what is nearest to one and divides it."""
COVERED_LEAST = 0.5
"""Share of a window that must have been counted for its rate to be known."""
KEEP_S = 28 * DAY_S
WINDOWS_MOST = 20_000
LOOK_S = 0.5
"""How often it is looked whether a window has ended: nothing may arrive that would show it."""
BYTES_PER_TOKEN = 4.0
"""Of a prompt, until a server has counted one."""
ANSWER_TOKENS = 256.0
"""Of an answer, until there was one."""
USUAL_MOST = 1_000
USUAL_MEMORY = 500
"""Answers that the usual length is an average of, about."""
LOGGER = logging.getLogger("twinkeel")


# ---- the model ----


class GoingOn(Protocol):
    """A series that a model follows: ``policy.forecast.forecaster.Online``."""

    def observe(self, mean: float, peak: float = ...) -> None: ...
    def predict(self) -> Mapping[Target, Array]: ...


@dataclass(frozen=True)
class Model:
    """What is needed of a trained forecaster."""

    window_s: float
    horizons: Sequence[int]
    """Windows ahead."""
    follow: Callable[[Series], GoingOn]
    """Go on from a history of at least one window."""


def load_model(folder: str) -> Model:
    """The forecaster in a folder.

    Raises:
        FileError: it cannot be used, or what it needs is not installed.
    """
    try:
        forecaster, card = load(Path(folder))
        import torch

        from policy.forecast.forecaster import Online
    except ForecastError as error:
        raise FileError("forecast", str(error)) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "policy":
            raise
        raise FileError(
            "forecast", f"{folder} needs {error.name}, which is not installed",
            hint="pip install 'twinkeel[forecast]'",
        ) from error  # fmt: skip
    torch.set_num_threads(1)  # a few rows need no more, and the event loop needs its core

    def follow(history: Series) -> GoingOn:
        return Online(forecaster, as_learned(history, card.learned))

    return Model(card.window_s, card.horizons, follow)


def as_learned(history: Series, learned: Sequence[Learned]) -> Series:
    """The series as the model knows it.

    Part of a model is fitted to each series for itself and finds it again by its name, which is
    that of a trace and of what was counted. If it has learned from one trace, that is taken to have
    been recorded here. Peaks are shown to a model that has seen some.
    """
    mine = [each for each in learned if f"-{each.name}".endswith(f"-{history.name}")]
    name = mine[0].name if len(mine) == 1 else history.name
    peaks = any(each.peaks for each in (mine if len(mine) == 1 else learned))
    return replace(history, name=name, peak=history.peak if peaks else np.empty(0))


# ---- counting ----


class Window(NamedTuple):
    """What arrived in a window, per second; NaN: it was not counted."""

    number: int
    """Windows of its length since 1970."""
    requests: float
    requests_peak: float
    """In its highest minute."""
    tokens: float
    """Prompt and output tokens of what arrived, though many may have come later."""
    tokens_peak: float


class Counts(Listener):
    """Counts requests and tokens as they arrive.

    Tokens are estimated at the arrival: by the bytes of the prompt and the usual length of answers
    of this model and endpoint. What is settled before its window ends is put right; the rest keeps
    its estimate, and so does what is shed, which would have been as long as others.

    Args:
        ended: told of each window, when it has ended.
        wall_ns: time of day since 1970.
    """

    def __init__(
        self,
        window_s: float,
        ended: Callable[[Window], object],
        clock_ns: Callable[[], int],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._window_ns = round(window_s * NS_PER_S)
        self._slices = max(1, round(window_s / SLICE_S))
        self._ended = ended
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._usual: dict[tuple[str, str], _Usual] = {}
        now_ns = wall_ns()
        self._begin(now_ns // self._window_ns, now_ns)
        self._place(now_ns)

    def arrived(self, call: Call) -> None:
        if call.arrived_ns >= self._due_ns:
            self.turn()
        asked = call.asked
        usual = self._usual_of(asked.model, asked.endpoint)
        tokens = usual.prompt_tokens(asked.prompt_bytes)
        if asked.endpoint != "embeddings":
            tokens += usual.output_tokens(asked.max_tokens)
        self._requests[self._slice] += 1
        self._tokens[self._slice] += tokens
        self._open[call.request] = (self._slice, tokens)

    def settled(self, call: Call, settled: Settled) -> None:
        estimated = self._open.pop(call.request, None)
        if settled.outcome != "answered" or call.prompt_tokens < 0:
            return
        asked = call.asked
        usual = self._usual_of(asked.model, asked.endpoint)
        usual.learn(asked.prompt_bytes, call.prompt_tokens, call.output_tokens)
        if estimated is not None:
            place, tokens = estimated
            self._tokens[place] += call.prompt_tokens + call.output_tokens - tokens

    def turn(self) -> None:
        """If a minute or a window has ended, go on with the next. To be called now and then."""
        if self._clock_ns() < self._due_ns:
            return
        now_ns = self._wall_ns()
        number = now_ns // self._window_ns
        if number == self._number + 1:
            over = self._over()
            self._begin(number, number * self._window_ns)
            self._place(now_ns)
            self._ended(over)
        elif number != self._number:
            # The clock was set, or the machine slept: what was counted fits no window.
            self._begin(number, now_ns)
            self._place(now_ns)
        else:
            self._place(now_ns)

    def _begin(self, number: int, from_ns: int) -> None:
        self._number = number
        self._from_ns = from_ns
        """Since when it was counted."""
        self._requests = [0.0] * self._slices
        self._tokens = [0.0] * self._slices
        self._open: dict[int, tuple[int, float]] = {}
        """(slice, estimate) of requests of this window that are not settled."""

    def _place(self, now_ns: int) -> None:
        """Find the slice, and when to look again."""
        within_ns = now_ns - self._number * self._window_ns
        slice_ns = self._window_ns // self._slices
        self._slice = min(within_ns // slice_ns, self._slices - 1)
        last = self._slice == self._slices - 1
        end_ns = self._window_ns if last else (self._slice + 1) * slice_ns
        self._due_ns = self._clock_ns() + end_ns - within_ns

    def _over(self) -> Window:
        begin_ns = self._number * self._window_ns
        before_ns = self._from_ns - begin_ns
        covered_ns = self._window_ns - before_ns
        if covered_ns < COVERED_LEAST * self._window_ns:
            return Window(self._number, *[np.nan] * 4)
        slice_s = self._window_ns / self._slices / NS_PER_S
        whole = -(-before_ns * self._slices // self._window_ns)
        """The first slice that was counted from its beginning."""
        figures: list[float] = []
        for counts in (self._requests, self._tokens):
            mean = max(0.0, sum(counts)) * NS_PER_S / covered_ns
            figures += [mean, max([mean, *(count / slice_s for count in counts[whole:])])]
        return Window(self._number, *figures)

    def _usual_of(self, model: str, endpoint: str) -> _Usual:
        key = (model, endpoint)
        usual = self._usual.get(key)
        if usual is None:
            if len(self._usual) >= USUAL_MOST:  # callers may name any model
                self._usual.clear()
            usual = self._usual[key] = _Usual()
        return usual


class _Usual:
    """Averages over the last answers of a model and an endpoint."""

    __slots__ = ("_answers", "_bytes", "_output", "_prompt")

    def __init__(self) -> None:
        self._answers = 0
        self._bytes = BYTES_PER_TOKEN
        self._prompt = 1.0
        self._output = ANSWER_TOKENS

    def prompt_tokens(self, size: int) -> float:
        return size * self._prompt / max(self._bytes, 1.0)

    def output_tokens(self, most: int) -> float:
        return min(self._output, most) if most else self._output

    def learn(self, size: int, prompt: int, output: int) -> None:
        self._answers = min(self._answers + 1, USUAL_MEMORY)
        self._bytes += (size - self._bytes) / self._answers
        self._prompt += (prompt - self._prompt) / self._answers
        self._output += (output - self._output) / self._answers


# ---- forecasting ----


def utc_offset_s(unix_s: float) -> int:
    """By how much this machine's clocks are ahead of UTC then."""
    return time.localtime(unix_s).tm_gmtoff


class Forecasts:
    """What the model says after each window. Used in one thread at a time.

    Args:
        kept: windows of earlier processes.
        offset_s: of local time, at a time since 1970: the model knows days and weeks.
    """

    def __init__(
        self,
        model: Model,
        kept: Sequence[Window] = (),
        offset_s: Callable[[float], int] = utc_offset_s,
    ) -> None:
        self._model = model
        self._offset_s = offset_s
        self._most = min(WINDOWS_MOST, max(1, round(KEEP_S / model.window_s)))
        self._windows: deque[Window] = deque(maxlen=self._most)
        """Without gaps."""
        self._following: tuple[GoingOn, GoingOn] | None = None
        self._offset = 0
        for window in kept:
            self._add(window)

    def after(self, window: Window) -> Forecasted | None:
        """What is forecast now that this window has ended; None: nothing was ever counted."""
        following, self._following = self._following, None  # what fails is not gone on from
        alone = self._add(window)
        if all(np.isnan(each.requests) for each in self._windows):
            return None
        offset = self._offset_s((window.number + 1) * self._model.window_s)
        if following is None or not alone or offset != self._offset:
            following, self._offset = self._followed(offset), offset
        else:
            following[0].observe(window.requests, window.requests_peak)
            following[1].observe(window.tokens, window.tokens_peak)
        told = forecasted(
            self._model.window_s,
            self._model.horizons,
            following[0].predict()["mean"],
            following[1].predict()["mean"],
            (window.requests, window.tokens),
        )
        self._following = following
        return told

    def _add(self, window: Window) -> bool:
        """Keep it, and unknown ones for those that are missing before it; was it just the next?"""
        windows = self._windows
        if windows and window.number <= windows[-1].number:  # the clock was set back
            while windows and windows[-1].number >= window.number:
                windows.pop()
            windows.append(window)
            return False
        missing = window.number - windows[-1].number - 1 if windows else 0
        first = window.number - min(missing, self._most)
        windows.extend(Window(number, *[np.nan] * 4) for number in range(first, window.number))
        windows.append(window)
        return not missing

    def _followed(self, offset: int) -> tuple[GoingOn, GoingOn]:
        table = np.array([window[1:] for window in self._windows], np.float64)
        window_s = self._model.window_s
        local_s = self._windows[0].number * window_s + offset - MONDAY_S
        return (
            self._model.follow(
                Series(window_s, table[:, 0], table[:, 1], local_s % WEEK_S, name="requests")
            ),
            self._model.follow(
                Series(window_s, table[:, 2], table[:, 3], local_s % WEEK_S, name="tokens")
            ),
        )


# ---- what outlives the process ----

_TABLE = """
CREATE TABLE IF NOT EXISTS load_windows (
    window_ns INTEGER NOT NULL,
    number INTEGER NOT NULL,
    requests REAL NOT NULL,
    requests_peak REAL NOT NULL,
    tokens REAL NOT NULL,
    tokens_peak REAL NOT NULL,
    PRIMARY KEY (window_ns, number)
) STRICT
"""
"""Made here and not with the database: older versions may go on with it."""


def kept_windows(db: sqlite3.Connection, window_s: float, now_s: float) -> list[Window]:
    """Those of this length that have ended and are not too old, the oldest first."""
    db.execute(_TABLE)
    rows = db.execute(
        "SELECT number, requests, requests_peak, tokens, tokens_peak FROM load_windows"
        " WHERE window_ns = ? AND number >= ? AND number < ? ORDER BY number",
        (
            round(window_s * NS_PER_S), int((now_s - KEEP_S) // window_s),
            int(now_s // window_s),
        ),
    )  # fmt: skip
    return [Window(*row) for row in rows]


def keep_window(db: sqlite3.Connection, window_s: float, window: Window) -> None:
    """Write it, and delete what is too old. One that was not counted is not written."""
    window_ns = round(window_s * NS_PER_S)
    db.execute(_TABLE)
    if not np.isnan(window.requests):
        db.execute(
            "INSERT OR REPLACE INTO load_windows VALUES (?, ?, ?, ?, ?, ?)", (window_ns, *window)
        )
    oldest_ns = window.number * window_ns - KEEP_S * NS_PER_S
    db.execute("DELETE FROM load_windows WHERE window_ns * number < ?", (oldest_ns,))
    db.execute(
        "DELETE FROM load_windows WHERE window_ns = ? AND number <= ?",
        (window_ns, window.number - WINDOWS_MOST),
    )


# ---- all together ----


class Driven(Protocol):
    """What is needed of the driver."""

    def now_ns(self) -> int: ...
    def feed(self, event: Event) -> None: ...
    def trouble(self, key: str, text: str) -> None: ...


class Forecasting(Counts):
    """Counts, forecasts in a thread of its own, and feeds what came out.

    Args:
        kept: windows of earlier processes (``kept_windows``).
    """

    def __init__(
        self,
        model: Model,
        driver: Driven,
        database: Database,
        kept: Sequence[Window] = (),
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(model.window_s, self._window_ended, driver.now_ns, wall_ns)
        self.told = 0
        """Forecasts that the policy was fed."""
        self.failed = 0
        self._window_s = model.window_s
        self._driver = driver
        self._database = database
        self._forecasts = Forecasts(model, kept)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Forecast no more; what is being written is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._executor.shutdown()

    def _window_ended(self, window: Window) -> None:
        task = asyncio.get_running_loop().create_task(self._forecast(window))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forecast(self, window: Window) -> None:
        loop = asyncio.get_running_loop()
        try:
            event = await loop.run_in_executor(self._executor, self._forecasts.after, window)
            if event is not None:
                self._driver.feed(event)
                self.told += 1
        except Exception as error:
            self._troubled("no forecast was made", error)
        try:
            await self._database.run(lambda db: keep_window(db, self._window_s, window))
        except Exception as error:
            self._troubled("what arrived cannot be kept for the next start", error)

    def _troubled(self, what: str, error: Exception) -> None:
        self.failed += 1
        LOGGER.error("%s", what, exc_info=error)
        self._driver.trouble("forecast", f"{what}: {type(error).__name__}: {error}")
