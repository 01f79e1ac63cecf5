"""The bars of a tuning, on standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twin.tune.tuning import Watcher

if TYPE_CHECKING:
    from types import TracebackType

    from twin.tune.study import Tuning


class Bars(Watcher):
    """One bar for each part of the work; none where standard error is no terminal."""

    def __init__(self, trials: int, quiet: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("{task.fields[note]}"),
            console=console, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self._trials = self._progress.add_task("trials", total=trials, note="")
        self._round = self._progress.add_task("last round", total=None, note="", visible=False)
        self._held = self._progress.add_task("held out", total=None, note="", visible=False)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self._progress.stop()

    def trials(self, tuning: Tuning) -> None:
        """With the best of the first objective so far, and how many were stopped early."""
        ahead = tuning.front()
        stopped = sum(not tried.whole for tried in tuning.tried.values())
        first = tuning.goals.objectives[0]
        best = max((t.values[first.name] * first.better for t in ahead), default=None)
        note = "" if best is None else f"best {first.name} {abs(best):.4g}, {stopped} stopped early"
        self._progress.update(
            self._trials, completed=len(tuning.tried), total=tuning.wanted, note=note
        )

    def round(self, done: int, of: int) -> None:
        self._progress.update(self._round, completed=done, total=of, visible=True)

    def confirming(self, done: int, of: int) -> None:
        self._progress.update(self._held, completed=done, total=of, visible=True)
