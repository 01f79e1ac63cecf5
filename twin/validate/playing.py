"""Plays the runs: each with every seed, under the candidate and under the live policy."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from policy.audit import replay
from policy.compose import restore
from policy.log import read_segment
from policy.parameters import from_canonical
from twin.scenario.run import Recordings, run_setup
from twin.validate.reading import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import Event
    from policy.log import Header
    from policy.parameters import Parameters
    from twin.validate.reading import Story
    from twin.validate.setups import Run

Side = Literal["candidate", "live"]


@dataclass(frozen=True, slots=True)
class Sides:
    """The two policies, and the files that hold them while they are played."""

    candidate: Parameters
    live: Parameters
    folder: Path
    judged_by: Parameters
    """The live policy, perhaps with other deadlines: these say what is missed on either side."""

    def path(self, side: Side) -> Path:
        return self.folder / f"{side}.yaml"

    def of(self, side: Side) -> Parameters:
        return self.candidate if side == "candidate" else self.live


@dataclass(frozen=True, slots=True)
class Task:
    """One run with one seed under one of the policies."""

    run: Run
    seed: int
    side: Side
    keep_log: bool = False
    """Hand the log back, whole."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a task."""

    run: Run
    seed: int
    side: Side
    story: Story
    figures: dict[str, Any]
    log_hash: str
    difference: str = ""
    """Where replay decided otherwise; empty: nowhere, or it was not replayed."""
    log: bytes = b""

    @property
    def log_sha256(self) -> str:
        return sha256(self.log).hexdigest()


def play(tasks: Sequence[Task], sides: Sides, jobs: int, told: Callable[[], None]) -> list[Played]:
    """All tasks, in their order.

    Args:
        jobs: processes; 0: one a core, 1: in this one.
        told: called when one is done.

    Raises:
        FileError, FleetError, FaultError, TraceError: what a run names cannot be used.
    """
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        done = []
        for task in tasks:
            done.append(play_task(sides, task))
            told()
        return done
    with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
        futures = [pool.submit(play_task, sides, task) for task in tasks]
        for future in futures:
            future.add_done_callback(lambda _: told())
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def play_task(sides: Sides, task: Task) -> Played:
    """Play it, read its log, and where it is the candidate's replay it beside."""
    own = sides.of(task.side)
    reader = Reader(own, sides.judged_by)
    with TemporaryDirectory(prefix="twinkeel-") as scratch:
        out = Path(scratch) / "log"
        result = run_setup(
            task.run.with_policy(sides.path(task.side), task.seed), task.seed,
            run=task.run.name, folder=task.run.folder, recordings=Recordings(Path(scratch)),
            out=out,
        )  # fmt: skip
        paths = sorted(out.iterdir(), key=lambda path: int(path.name.split(".")[1]))
        segments = (path.read_bytes() for path in paths)
        difference = ""
        if task.side == "candidate":
            difference = _replayed(segments, reader)
        else:
            for now_ns, event, decisions in _records(segments):
                reader.step(now_ns, event, decisions)
        log = paths[0].read_bytes() if task.keep_log and len(paths) == 1 else b""
    story = reader.end()
    return Played(
        task.run, task.seed, task.side, story, result.figures, result.log_hash, difference, log
    )


def _records(segments: Iterator[bytes]) -> Iterator[tuple[int, Event, tuple[Decision, ...]]]:
    for data in segments:
        for record in read_segment(data).records:
            yield record.now_ns, record.event, record.decisions


def _replayed(segments: Iterator[bytes], reader: Reader) -> str:
    def policy_of(header: Header, snapshot: bytes) -> Policy:
        return _Read(restore(from_canonical(header.policy), snapshot), reader)

    difference = replay(segments, policy_of)
    if difference is None:
        return ""
    return (
        f"segment {difference.segment}, record {difference.record}, at"
        f" {difference.logged.now_ns} ns"
    )


class _Read:
    """A policy whose steps the reader is told."""

    def __init__(self, policy: Policy, reader: Reader) -> None:
        self._policy = policy
        self._reader = reader
        self.deadline_ns = policy.deadline_ns
        self.snapshot = policy.snapshot

    def step(self, now_ns: int, event: Event) -> Sequence[Decision]:
        decisions = self._policy.step(now_ns, event)
        self._reader.step(now_ns, event, decisions, self._policy)
        return decisions
