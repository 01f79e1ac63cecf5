"""Which replicas no longer keep to their profile: their steps take more time than it says, or less.

What the policy is told of a replica's steps (``StepsRead``) is put together into samples of enough
steps and time, each one ratio: measured over predicted. The median of the last few is judged. A
drift is told, with its size; predictions are not corrected by it, since what the twin was tuned
with, and what the log can be replayed with, is the profile. Calibrating again mends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.decisions import Alert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import StepsRead
    from policy.parameters.drift import Drift as Section

NS_PER_MS = 1_000_000
RATIO_MOST = 1_000_000
"""Per mille: a replica a thousand times too slow is as wrong as one that is slower still."""
ACTION = "calibrate again: predictions go on by the old profile"


class Course(msgspec.Struct, array_like=True, gc=False):
    """How one replica has kept to its profile since it came up."""

    replica: int
    read_ns: int
    """When it was last read."""
    begun_ns: int
    """When the sample that is being put together began; the next three are its sums."""
    steps: int = 0
    measured_us: int = 0
    predicted_us: int = 0
    samples: list[tuple[int, int]] = []
    """The last ones, the oldest first: per mille of the predicted time, and steps."""
    drifted: bool = False
    """It was told, and is not over."""


class DriftState(msgspec.Struct, array_like=True):
    """In canonical form: replicas by id, times relative to the present."""

    courses: list[Course]


class Drift:
    """Follows every replica whose steps are read."""

    __slots__ = ("_courses", "_forget_ns", "_sample_ns", "_section")

    def __init__(self, section: Section) -> None:
        self._section = section
        self._sample_ns = section.sample_ms * NS_PER_MS
        self._forget_ns = section.forget_ms * NS_PER_MS
        self._courses: dict[int, Course] = {}

    def permille_of(self, replica: int) -> int | None:
        """By how much its steps take longer than predicted (below 0: shorter); None: not known."""
        course = self._courses.get(replica)
        if course is None or len(course.samples) < self._section.samples_least:
            return None
        return _median([ratio for ratio, _ in course.samples]) - 1000

    def renewed(self, replica: int) -> None:
        """It came up anew, or went down: what was measured says nothing of its next life."""
        self._courses.pop(replica, None)

    def read(self, now_ns: int, event: StepsRead, name: str) -> Sequence[Alert]:
        """Its steps were read; ``name`` is what people know it by."""
        course = self._course_of(now_ns, event.replica)
        if course is None or event.predicted_us <= 0:
            return ()
        if not course.steps:
            course.begun_ns = now_ns
        course.read_ns = now_ns
        course.steps += event.steps
        course.measured_us += event.measured_us
        course.predicted_us += event.predicted_us
        section = self._section
        if course.steps < section.steps_least or now_ns - course.begun_ns < self._sample_ns:
            return ()
        ratio = min(course.measured_us * 1000 // course.predicted_us, RATIO_MOST)
        course.samples.append((ratio, course.steps))
        del course.samples[: -section.samples_least]
        course.steps = course.measured_us = course.predicted_us = 0
        return self._judged(course, name)

    def _course_of(self, now_ns: int, replica: int) -> Course | None:
        course = self._courses.get(replica)
        if course is None:
            if len(self._courses) >= self._section.replicas_max:
                return None
            course = self._courses[replica] = Course(replica, now_ns, now_ns)
        elif now_ns - course.read_ns >= self._forget_ns:
            course = self._courses[replica] = Course(replica, now_ns, now_ns)
        return course

    def _judged(self, course: Course, name: str) -> Sequence[Alert]:
        drift = self.permille_of(course.replica)
        if drift is None:
            return ()
        section = self._section
        limit = section.recover_permille if course.drifted else section.alarm_permille
        course.drifted = abs(drift) >= limit if limit else drift != 0
        if not course.drifted:
            return ()
        # Said with every sample while it lasts, so that it counts as one trouble.
        figures = (
            ("drift_permille", drift),
            ("steps", sum(steps for _, steps in course.samples)),
            ("samples", len(course.samples)),
        )
        how = "longer" if drift > 0 else "shorter"
        percent = f"{abs(drift) // 10}.{abs(drift) % 10}"
        cause = f"steps take {percent} % {how} than its profile says"
        return (Alert(f"drift {name}", cause, figures, ACTION),)

    # Time: it is only ever asked when something was read

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        return ()

    def deadline_ns(self) -> int | None:
        return None

    # Snapshots

    def state(self, now_ns: int) -> DriftState:
        return DriftState(
            [_shifted(course, -now_ns) for _, course in sorted(self._courses.items())]
        )

    def load(self, state: DriftState, now_ns: int) -> None:
        self._courses = {course.replica: _shifted(course, now_ns) for course in state.courses}

    def size(self) -> int:
        return sum(1 + len(course.samples) for course in self._courses.values())

    def size_most(self) -> int:
        return self._section.replicas_max * (1 + self._section.samples_least)


def _median(values: list[int]) -> int:
    """The lower one of two."""
    return sorted(values)[(len(values) - 1) // 2]


def _shifted(course: Course, by_ns: int) -> Course:
    """A copy with other times."""
    return msgspec.structs.replace(
        course,
        read_ns=course.read_ns + by_ns,
        begun_ns=course.begun_ns + by_ns,
        samples=list(course.samples),
    )
