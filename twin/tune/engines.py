"""Where plays are played: in this process, on the local cores, on a Ray cluster.

An engine takes orders and gives back what came of them, in whatever order they end. None of them
knows of trials or of a study.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Protocol

from twin.tune.objectives import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from twin.tune.objectives import Goals
    from twin.tune.work import Order, Played, Work

LOST_MOST = 3
"""Times in a row that the processes may be ended from outside before anything is done."""
RAY_STORE_BYTES = 100 * 2**20
"""Object store of a Ray that is started here: traces and figures are small."""


class Engine(Protocol):
    """Plays orders."""

    slots: int
    """How many are played at the same time."""

    def submit(self, order: Order) -> None: ...

    def next(self) -> tuple[Order, Played]:
        """The next that has ended.

        Raises:
            TuneError: processes were ended from outside, again and again.
            TraceError, FileError, FleetError, FaultError: it cannot be played.
        """
        ...

    def close(self) -> None: ...


class HereEngine:
    """In this process, one after another."""

    slots = 1

    def __init__(self, work: Work, goals: Goals) -> None:
        self._play = work.ready(goals)
        self._orders: deque[Order] = deque()

    def submit(self, order: Order) -> None:
        self._orders.append(order)

    def next(self) -> tuple[Order, Played]:
        order = self._orders.popleft()
        return order, self._play(order)

    def close(self) -> None:
        pass


class LocalEngine:
    """On ``jobs`` processes of this machine. Where one is ended from outside, all are started anew
    and what they were at is played again: nothing is lost but time."""

    def __init__(self, work: Work, goals: Goals, jobs: int) -> None:
        self.slots = jobs
        self._given = (work, goals)
        self._pool = self._started()
        self._open: dict[Future[Played], Order] = {}
        self._lost = 0

    def submit(self, order: Order) -> None:
        try:
            self._open[self._pool.submit(_play_here, order)] = order
        except BrokenProcessPool:
            self._restart([order])

    def next(self) -> tuple[Order, Played]:
        while True:
            done, _ = wait(self._open, return_when=FIRST_COMPLETED)
            future = next(iter(done))
            try:
                played = future.result()
            except BrokenProcessPool:
                self._restart([])
                continue
            self._lost = 0
            return self._open.pop(future), played

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def processes(self) -> list[int]:
        """Ids of those that there are."""
        return list(self._pool._processes)

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.slots, get_context("spawn"), _begin, self._given)

    def _restart(self, more: list[Order]) -> None:
        self._lost += 1
        if self._lost > LOST_MOST:
            raise TuneError(
                f"one of {self.slots} processes was ended from outside {self._lost} times in a "
                "row, perhaps for want of memory: use fewer with --jobs; what was done is kept"
            )
        finished = {future: order for future, order in self._open.items() if _is_done(future)}
        again = [order for future, order in self._open.items() if future not in finished]
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._started()
        self._open = finished
        for order in [*again, *more]:
            self.submit(order)


class RayEngine:
    """On a Ray cluster: the one that ``RAY_ADDRESS`` names, or one started here with ``jobs``
    workers. Every machine of it needs twinkeel, and the trace under the same path.

    Raises:
        TuneError: Ray is not installed.
    """

    def __init__(self, work: Work, goals: Goals, jobs: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise TuneError(
                "--engine ray needs Ray: install it with pip install 'twinkeel[ray]'"
            ) from error
        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            here: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {
                "num_cpus": jobs, "object_store_memory": RAY_STORE_BYTES,
                "include_dashboard": False,
            }  # fmt: skip
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **here)
        self.slots = max(1, int(self._ray.cluster_resources().get("CPU", jobs)))
        self._given = ray.put((work, goals))
        self._task = ray.remote(num_cpus=1, max_retries=LOST_MOST)(_play_anywhere)
        self._open: dict[Any, Order] = {}

    def submit(self, order: Order) -> None:
        self._open[self._task.remote(self._given, order)] = order

    def next(self) -> tuple[Order, Played]:
        done, _ = self._ray.wait(list(self._open), num_returns=1)
        order = self._open.pop(done[0])
        try:
            played: Played = self._ray.get(done[0])
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            raise TuneError(f"Ray lost a task: {error}; what was done is kept") from error
        return order, played

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()


_play: Callable[[Order], Played] | None = None
"""Of this worker process, once it has loaded what it plays."""
_loaded: tuple[str, Goals] | None = None
_work: tuple[Work, Goals] | None = None


def _begin(work: Work, goals: Goals) -> None:
    global _work
    _work = (work, goals)


def _play_here(order: Order) -> Played:
    """Loaded with the first order and not before: so an error is told, not a process lost."""
    assert _work is not None
    return _play_anywhere(_work, order)


def _play_anywhere(given: tuple[Work, Goals], order: Order) -> Played:
    """A worker is used for many orders: it loads what it plays once."""
    global _play, _loaded
    work, goals = given
    if _play is None or _loaded != (work.exactly(), goals):
        _play, _loaded = work.ready(goals), (work.exactly(), goals)
    return _play(order)


def _is_done(future: Future[Played]) -> bool:
    return future.done() and not isinstance(future.exception(), BrokenProcessPool)
