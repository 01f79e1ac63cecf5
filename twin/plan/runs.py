"""Cells played in several processes, each once: what was seen is kept for whoever asks again."""

from __future__ import annotations

import os
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from threading import Lock
from typing import TYPE_CHECKING

from policy.parameters import canonical
from twin.plan.cell import Cell, Outcome, play
from twin.plan.inputs import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType


class Runs:
    """Plays cells; use it as a context manager.

    Args:
        jobs: processes; 1: this one, 0: one a core. Figures are the same with any number.
        progress: called when a cell has been played, with how many have been.
    """

    def __init__(self, jobs: int = 0, progress: Callable[[int], None] = lambda done: None) -> None:
        self.jobs = jobs or os.cpu_count() or 1
        self.played = 0
        self.cpu_s = 0.0
        self._progress = progress
        self._kept: dict[tuple[object, ...], Future[Outcome]] = {}
        self._lock = Lock()
        self._playing = Lock()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Runs:
        if self.jobs > 1:
            self._pool = ProcessPoolExecutor(self.jobs, get_context("spawn"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._pool is not None:
            self._pool.shutdown(wait=error is None, cancel_futures=True)

    def see(self, cell: Cell) -> Outcome:
        """What comes of a cell."""
        return self.all([cell])[0]

    def all(self, cells: Sequence[Cell]) -> list[Outcome]:
        """What comes of several, side by side; in their order.

        Raises:
            PlanError: a process was ended from outside.
            TraceError, FleetError: a cell cannot be played.
        """
        futures = [self._future(cell) for cell in cells]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise PlanError(
                f"one of {self.jobs} processes was ended from outside, perhaps for want of memory: "
                "use fewer with --jobs"
            ) from error

    def _future(self, cell: Cell) -> Future[Outcome]:
        with self._lock:
            known = self._kept.get(_key(cell)) or self._kept.get(_key(replace(cell, whole=True)))
            if known is not None:
                return known
            if self._pool is None:
                future: Future[Outcome] = Future()
            else:
                future = self._pool.submit(play, cell)
            self._kept[_key(cell)] = future
        if self._pool is None:
            with self._playing:  # two threads of one process would write the same day's file
                try:
                    future.set_result(play(cell))
                except BaseException as error:
                    future.set_exception(error)
        future.add_done_callback(self._count)
        return future

    def _count(self, future: Future[Outcome]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        with self._lock:
            self.played += 1
            self.cpu_s += future.result().cpu_s
            played = self.played
        self._progress(played)


def _key(cell: Cell) -> tuple[object, ...]:
    slo = cell.promise.slo
    return (
        cell.day_0, cell.window, cell.machine, cell.replicas, canonical(cell.parameters),
        cell.promise.needs, tuple(slo.ttft_s.items()), slo.tpot_s, cell.growth, cell.fault,
        cell.fault_s, cell.run, cell.seed, cell.whole, cell.cold_start_s, cell.spike_permille,
    )  # fmt: skip
