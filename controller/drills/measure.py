"""One drill, from the plan to the verdict: break it, watch, take it back, read the log, judge."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from controller.admin.status import AlertView  # noqa: TC001 - msgspec reads it
from controller.drills.asking import DrillError, Log, at_rest, serving
from policy.decisions import Settled
from policy.drills import (
    Broken,
    Difference,
    DrillFigures,
    DrillKind,
    DrillReader,
    differences,
)
from policy.events import Arrived

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from controller.demo import Told
    from controller.drills.asking import Admin
    from controller.drills.inject import Injection

NS = 1_000_000_000
BEFORE_SHARE, BEFORE_S_MOST = 0.25, 10.0
"""Of a drill, what passes before the fault: the policy gets to know its callers and servers."""
BACK_SHARE = 0.6
"""What goes on until it is taken back is taken back at this part of the drill."""
REST_S_MOST = 60.0
"""After a drill, until every slot is where it belongs."""
SETTLE_S = 0.3
"""The decision log is written every 20 ms, by a thread."""
OPEN_S_MOST = 60.0
"""After a drill, until what arrived in it has its outcome: other callers do not stop for it."""
CAUSES: dict[DrillKind, tuple[str, ...]] = {
    "gpu-loss": ("xid",),
    "ecc": ("ecc",),
    "engine-kill": ("signal", "connection refused"),
    "oom": ("signal", "connection refused", "memory"),
    "engine-hang": ("hung", "silent"),
    "network": ("hung", "silent"),
    "bad-answers": ("failures", "errors", "empty"),
}
"""Words of an alert's cause that tell what was done."""
NO_OUTCOME = ("cut", "empty")
"""What callers saw where they were told nothing."""


class Criterion(msgspec.Struct, frozen=True):
    """One of the four things that a drill must show."""

    name: str
    passed: bool
    why: str


class DrillResult(msgspec.Struct, frozen=True):
    """A drill, and what came of it."""

    kind: DrillKind
    target: str
    """demo, or the address of the controller's admin API."""
    slot: str
    at: float
    """When it was broken, in s since 1970."""
    for_s: float
    what: str
    simulated: str
    """What of it was not the real thing; empty: nothing."""
    measured: DrillFigures
    predicted: DrillFigures | None
    """By the twin, of the same fault on the same traffic."""
    not_predicted: str
    """Why the twin has no figures; empty: it has."""
    differences: tuple[Difference, ...]
    criteria: tuple[Criterion, ...]
    alerts: tuple[AlertView, ...]
    """What the controller told people."""
    callers: dict[str, int]
    """What became of requests by their callers' own books; empty: they are not the drill's."""

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.criteria)

    @property
    def error_pct(self) -> float | None:
        """The twin's largest."""
        return max((each.error_pct for each in self.differences), default=None)


class Case(NamedTuple):
    """What a twin needs to play the same drill."""

    broken: Broken
    log: Log
    trace: Path | None
    """As the controller recorded it; None: it is not on this machine."""
    profiles: Mapping[str, str]
    """Of step times, by model."""


class Predict(Protocol):
    """The twin."""

    def __call__(self, case: Case) -> DrillFigures:
        """Raises ``ValueError`` where it cannot be played."""
        ...


class Target(Protocol):
    """A fleet with its controller."""

    name: str
    admin: Admin
    profiles: Mapping[str, str]

    def play(
        self, seconds: float, at: Sequence[tuple[float, Callable[[], None]]]
    ) -> Sequence[Told] | None:
        """Let traffic pass for so long, with what is to be done at its times; what its callers
        say, where they are the drill's own."""
        ...

    def finish(self) -> Path | None:
        """The drill is over: where the recorded trace lies, if it lies here."""
        ...


class Played(NamedTuple):
    """What a run leaves, before it is judged."""

    at_ns: int
    """Time of day, so for the next."""
    back_ns: int
    until_ns: int
    callers: Sequence[Told] | None
    trouble: str
    """Why it could not be taken back as it should; empty: it was."""
    log: Log
    alerts: tuple[AlertView, ...]


def run_drill(
    injection: Injection,
    target: Target,
    for_s: float,
    predict: Predict,
    say: Callable[[str], object] = lambda text: None,
) -> DrillResult:
    """Do it.

    Args:
        say: told what is going on.

    Raises:
        DrillError: it could not be done at all.
    """
    played = _play(injection, target, for_s, say)
    log = played.log
    broken = Broken(
        injection.kind, (injection.slot.replica,), log.clock_ns(played.at_ns),
        log.clock_ns(played.until_ns), log.clock_ns(played.back_ns) if injection.lasts else -1,
        injection.tokens_from, injection.link.kind, injection.link.delay_ms,
    )  # fmt: skip
    measured = read_figures(log, broken)
    trace = target.finish()
    predicted, why = None, ""
    try:
        say("the twin plays the same")
        predicted = predict(Case(broken, log, trace, target.profiles))
    except ValueError as error:
        why = str(error)
    callers = Counter(one.outcome for one in played.callers or ())
    return DrillResult(
        kind=injection.kind,
        target=target.name,
        slot=injection.slot.name,
        at=played.at_ns / NS,
        for_s=for_s,
        what=injection.what,
        simulated=injection.simulated,
        measured=measured,
        predicted=predicted,
        not_predicted=why,
        differences=() if predicted is None else differences(measured, predicted),
        criteria=judge(injection.kind, measured, callers, played.trouble),
        alerts=played.alerts,
        callers=dict(sorted(callers.items())),
    )


def _play(
    injection: Injection, target: Target, for_s: float, say: Callable[[str], object]
) -> Played:
    """Break it, watch, and take it back, whatever happens meanwhile."""
    before = target.admin.fleet()
    log = Log(target.admin)
    times = {"at": 0, "back": 0}

    def begin() -> None:
        injection.renew()
        say(injection.what)
        times["at"] = injection.inject()

    def end() -> None:
        injection.undo()
        times["back"] = time.time_ns()
        say("taken back")

    before_s = min(BEFORE_S_MOST, BEFORE_SHARE * for_s)
    at: list[tuple[float, Callable[[], None]]] = [(before_s, begin)]
    if injection.lasts:
        at.append((BACK_SHARE * for_s, end))
    try:
        callers = target.play(for_s, at)
        until_ns = time.time_ns()
    except BaseException:  # Ctrl-C among them
        try:
            injection.undo()
        except DrillError as error:  # its controller may be gone; what happened first counts
            say(f"it could not be taken back: {error}")
        else:
            say("taken back")
        raise
    trouble = ""
    try:
        injection.undo()
        target.admin.wait(
            "the fleet as it was",
            lambda view: at_rest(view) and serving(view) >= serving(before),
            REST_S_MOST,
        )
    except DrillError as error:
        trouble = str(error)
    time.sleep(SETTLE_S)
    _read_until_settled(log, until_ns)
    alerts = target.admin.alerts(times["at"] / NS)
    return Played(times["at"], times["back"], until_ns, callers, trouble, log, alerts)


def _read_until_settled(log: Log, until_ns: int) -> None:
    """Until all that arrived until then is settled, or has been waited for long enough."""
    began_s = time.monotonic()
    while True:
        asked_s = time.monotonic()
        log.read()
        if not _open(log, log.clock_ns(until_ns)) or asked_s - began_s > OPEN_S_MOST:
            return
        time.sleep(max(1.0, time.monotonic() - asked_s))  # what is long takes long to read


def _open(log: Log, until_ns: int) -> set[int]:
    """Requests that arrived before then and have no outcome."""
    found: set[int] = set()
    for record in log.records():
        if isinstance(record.event, Arrived) and record.now_ns < until_ns:
            found.add(record.event.request)
        for decision in record.decisions:
            if isinstance(decision, Settled):
                found.discard(decision.request)
    return found


def read_figures(log: Log, broken: Broken) -> DrillFigures:
    """What the decision log says of it."""
    reader = DrillReader(log.parameters, broken)
    for record in log.records():
        reader.step(record.now_ns, record.event, record.decisions)
    return reader.end()


# The verdict


def judge(
    kind: DrillKind, measured: DrillFigures, callers: Mapping[str, int], trouble: str
) -> tuple[Criterion, ...]:
    """Whether it went as it should, and why.

    Args:
        callers: their own books; empty: nobody kept any.
        trouble: what could not be taken back.
    """
    return (
        _alone(measured), _by_policy(measured, callers), _named(kind, measured),
        _recovered(measured, trouble),
    )  # fmt: skip


def _alone(measured: DrillFigures) -> Criterion:
    name = "isolated alone"
    if measured.isolated_s is None:
        why = "what was hit never left the rotation, or was not in it"
        return Criterion(name, False, why)
    if measured.others_out:
        return Criterion(name, False, f"others left it, too: {', '.join(measured.others_out)}")
    return Criterion(name, True, f"out of rotation after {measured.isolated_s:.3f} s, no other")


def _by_policy(measured: DrillFigures, callers: Mapping[str, int]) -> Criterion:
    name = "degraded by policy"
    left = sum(callers.get(outcome, 0) for outcome in NO_OUTCOME)
    wrong = [
        f"{count} {words}"
        for count, words in (
            (measured.lost, "without exactly one outcome"),
            (measured.avoidable, "failed that were not being answered by what was hit"),
            (left, "whose caller was told nothing"),
        )
        if count
    ]
    if wrong:
        return Criterion(name, False, f"of {measured.offered} requests {', '.join(wrong)}")
    if not measured.offered:
        return Criterion(name, False, "no request came: there is nothing to tell it by")
    return Criterion(
        name, True,
        f"each of {measured.offered} requests has one outcome; {measured.failed} failed, all of"
        " them streams from what was hit",
    )  # fmt: skip


def _named(kind: DrillKind, measured: DrillFigures) -> Criterion:
    name = "alert names the cause"
    causes = [
        raised
        for raised in measured.alerts
        if raised.key.startswith("replica ")
        and (not measured.hit or raised.key.removeprefix("replica ") in measured.hit)
    ]
    for raised in causes:
        if any(word in raised.cause.lower() for word in CAUSES[kind]):
            return Criterion(
                name, True, f"{raised.key}: {raised.cause}, after {raised.after_s:.3f} s"
            )
    told = "; ".join(f"{raised.key}: {raised.cause}" for raised in causes) or "none was raised"
    return Criterion(
        name, False, f"no alert on what was hit says {' or '.join(CAUSES[kind])}: {told}"
    )


def _recovered(measured: DrillFigures, trouble: str) -> Criterion:
    name = "recovered"
    if measured.recovered_s is None:
        return Criterion(
            name, False,
            f"fewer replicas than the {measured.serving_before} from before serve at the end",
        )  # fmt: skip
    if trouble:
        return Criterion(name, False, trouble)
    return Criterion(
        name, True,
        f"{measured.serving_before} replicas serve, and goodput is back, after"
        f" {measured.recovered_s:.3f} s",
    )  # fmt: skip
