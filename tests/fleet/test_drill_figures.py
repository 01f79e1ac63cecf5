"""What a decision log says of a drill, on logs made by hand; and that a drill can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.drills.measure import DrillResult, judge
from policy.decisions import Alert, Dispatch, Rotated, Settled, Start
from policy.drills import (
    RULE,
    SAME_REQUESTS,
    SAME_S,
    Broken,
    DrillFigures,
    DrillReader,
    Raised,
    differences,
)
from policy.events import (
    Arrived,
    Failed,
    Finished,
    FirstToken,
    ReplicaDown,
    ReplicaUp,
    Restored,
    Ticked,
)
from policy.files import load_policy
from tests.bench import drills as bench

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.drills import DrillKind
    from policy.events import Event

MS = 1_000_000
S = 1000 * MS
AT_MS, UNTIL_MS = 10_000, 20_000
KILLED = Broken("engine-kill", (0,), AT_MS * MS, UNTIL_MS * MS)


class Story:
    """A log of two replicas (2 is a standby), in milliseconds."""

    def __init__(self, broken: Broken = KILLED) -> None:
        self._reader = DrillReader(load_policy("stable"), broken)
        self._next = 0
        for replica in (0, 1):
            self.up(0, replica)

    def at(self, ms: float, event: Event, *decisions: Decision) -> None:
        self._reader.step(round(ms * MS), event, decisions)

    def up(self, ms: float, replica: int) -> None:
        self.at(ms, ReplicaUp(replica, f"r{replica}", ("m",), False, 1000, 16, 256, 8192, 32768,
                              (1, 1, 1, 1, 1, 1), 1, 1))  # fmt: skip

    def down(self, ms: float, replica: int, reason: str, *decisions: Decision) -> None:
        self.at(ms, ReplicaDown(replica, reason), *decisions)

    def arrives(self, ms: float, replica: int, sla: str = "P1") -> int:
        """It is sent to ``replica`` at once."""
        request = self._next
        self._next += 1
        sent = Dispatch(request, replica, "stable")
        self.at(ms, Arrived(request, "m", "chat", 100, sla=sla), sent)
        return request

    def answered(self, ms: float, replica: int, took_ms: float = 200, sla: str = "P1") -> int:
        request = self.arrives(ms, replica, sla)
        self.at(ms + took_ms / 2, FirstToken(request, replica))
        self.at(ms + took_ms, Finished(request, replica, 25, 0, 9), Settled(request, "answered"))
        return request

    def figures(self) -> DrillFigures:
        return self._reader.end()


def calm(story: Story, from_ms: int, until_ms: int, *replicas: int) -> None:
    """A request every 100 ms, answered by these in turns."""
    for number, ms in enumerate(range(from_ms, until_ms, 100)):
        story.answered(ms, replicas[number % len(replicas)], 50)


def test_a_killed_engine_that_a_standby_replaces() -> None:
    story = Story()
    calm(story, 1000, 9900, 0, 1)
    streaming, waiting = story.arrives(9950, 0), story.arrives(9960, 0)
    story.at(9990, FirstToken(streaming, 0))
    alert = Alert("replica r0", "down: killed by signal 9")
    story.down(10_004, 0, "killed by signal 9", alert, Start(2))
    story.at(10_005, Failed(streaming, 0, "stream_cut"), Settled(streaming, "failed"))
    story.at(10_006, Failed(waiting, 0, "replica_lost"), Dispatch(waiting, 1, "stable"))
    story.at(10_100, FirstToken(waiting, 1))
    story.up(10_250, 2)
    story.at(10_300, Finished(waiting, 1, 25, 0, 9), Settled(waiting, "answered"))
    calm(story, 10_400, 19_900, 1, 2)
    story.answered(20_100, 1)  # after the drill
    figures = story.figures()
    assert figures.isolated_s == pytest.approx(0.004)
    assert figures.recovered_s == pytest.approx(0.25)
    assert (figures.serving_before, figures.serving_least) == (2, 1)
    assert (figures.offered, figures.answered, figures.failed) == (97, 96, 1)
    assert (figures.avoidable, figures.lost, figures.late, figures.others_out) == (0, 0, 0, ())
    assert [(raised.key, raised.cause) for raised in figures.alerts] == [
        ("replica r0", "down: killed by signal 9")
    ]
    assert all(each.passed for each in judge("engine-kill", figures, {}, ""))


def test_it_is_isolated_only_when_all_that_was_hit_is_out() -> None:
    story = Story(msgspec.structs.replace(KILLED, kind="ecc", replicas=(0, 1)))
    story.at(10_100, Ticked(), Rotated(0, "isolated", "ecc_uncorrectable"))
    story.at(10_400, Ticked(), Rotated(1, "isolated", "ecc_uncorrectable"))
    assert story.figures().isolated_s == pytest.approx(0.4)


def test_what_was_not_in_the_rotation_cannot_be_seen_to_leave_it() -> None:
    story = Story()
    story.at(9_000, Ticked(), Rotated(0, "ejected", "slow"))
    calm(story, 9_100, 12_000, 1)
    figures = story.figures()
    assert figures.isolated_s is None
    assert not judge("engine-kill", figures, {}, "")[0].passed


def test_after_a_restart_only_what_comes_up_again_counts() -> None:
    story = Story()
    story.at(5_000, Restored(1_000 * MS))
    story.up(6_000, 0)
    calm(story, 6_000, 10_000, 0)
    assert story.figures().serving_before == 1


def test_the_alert_is_about_what_was_hit() -> None:
    story = Story()
    killed = "down: killed by signal 9"
    story.down(10_010, 0, "killed by signal 9", Alert("replica r1", killed))
    figures = story.figures()
    assert figures.hit == ("r0",)
    assert not judge("engine-kill", figures, {}, "")[2].passed
    own = msgspec.structs.replace(figures, alerts=(Raised(0.01, "replica r0", killed),))
    assert judge("engine-kill", own, {}, "")[2].passed


def test_what_is_only_probed_after_it_was_out_is_not_back_and_what_is_full_is_not_out() -> None:
    story = Story()
    story.at(10_500, Ticked(), Rotated(0, "ejected", "failures"))
    story.at(12_500, Ticked(), Rotated(0, "probing", "time"))
    story.at(12_600, Ticked(), Rotated(0, "ejected", "failures"))
    story.at(15_000, Ticked(), Rotated(1, "probing", "backpressure"))
    story.at(16_700, Ticked(), Rotated(0, "in", "probe_answered"))
    figures = story.figures()
    assert figures.isolated_s == pytest.approx(0.5)
    assert figures.recovered_s == pytest.approx(6.7)
    assert figures.serving_least == 1
    assert figures.others_out == ()


def test_goodput_is_back_with_the_last_request_that_fared_badly_among_others() -> None:
    story = Story()
    calm(story, 1000, 9900, 0, 1)
    story.down(10_000, 0, "killed by signal 9")
    story.up(10_050, 2)
    for ms in range(10_100, 12_000, 100):  # their first token comes after their deadline of 4 s
        story.answered(ms, 1, 9000)
    calm(story, 12_000, 19_000, 1, 2)
    figures = story.figures()
    assert figures.late == 19
    assert figures.recovered_s == pytest.approx(10.9, abs=0.3)


def test_a_single_request_that_fares_badly_says_nothing_of_goodput() -> None:
    story = Story()
    calm(story, 1000, 9900, 0, 1)
    story.down(10_000, 0, "killed by signal 9")
    story.up(10_050, 2)
    calm(story, 10_100, 15_000, 1, 2)
    story.answered(15_000, 1, 9000)
    calm(story, 15_001, 19_000, 1, 2)
    assert story.figures().recovered_s == pytest.approx(0.05)


# What a drill must not show


def fine() -> DrillFigures:
    return DrillFigures(
        offered=100, answered=99, late=0, degraded=0, refused=0, failed=1, avoidable=0,
        cancelled=0, lost=0, isolated_s=0.01, recovered_s=0.2, serving_before=2, serving_least=1,
        others_out=(), alerts=(Raised(0.01, "replica r0", "down: killed by signal 9"),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "criterion", "why"),
    [
        ({"isolated_s": None}, "isolated alone", "never left"),
        ({"others_out": ("r1 (ejected: slow)",)}, "isolated alone", "r1 (ejected: slow)"),
        ({"lost": 2}, "degraded by policy", "2 without exactly one outcome"),
        ({"avoidable": 3}, "degraded by policy", "3 failed that were not being answered"),
        ({"offered": 0}, "degraded by policy", "no request came"),
        ({"alerts": ()}, "alert names the cause", "none was raised"),
        (
            {"alerts": (Raised(1.0, "replica r0", "ejected: slow"),)},
            "alert names the cause",
            "ejected: slow",
        ),
        (
            {"alerts": (Raised(1.0, "breaker x", "killed by signal 9"),)},
            "alert names the cause",
            "none was raised",
        ),
        ({"recovered_s": None}, "recovered", "fewer replicas than the 2"),
    ],
)
def test_each_criterion_fails_alone_and_says_why(
    change: dict[str, object], criterion: str, why: str
) -> None:
    assert all(each.passed for each in judge("engine-kill", fine(), {"answered": 99}, ""))
    judged = judge("engine-kill", msgspec.structs.replace(fine(), **change), {}, "")
    (failed,) = [each for each in judged if not each.passed]
    assert failed.name == criterion
    assert why in failed.why


def test_callers_who_were_told_nothing_and_what_stays_broken_fail_too() -> None:
    judged = judge("engine-kill", fine(), {"answered": 98, "cut": 2}, "slot 0 is broken")
    assert [each.name for each in judged if not each.passed] == ["degraded by policy", "recovered"]
    assert "2 whose caller was told nothing" in judged[1].why


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("ecc", "isolated: ecc_uncorrectable"), ("gpu-loss", "isolated: xid_fatal"),
        ("engine-hang", "ejected: silent"), ("bad-answers", "ejected: failures"),
        ("oom", "down: killed by signal 9"), ("network", "ejected: silent"),
    ],
)  # fmt: skip
def test_the_cause_told_must_be_the_drill_s_own(kind: DrillKind, cause: str) -> None:
    told = msgspec.structs.replace(fine(), alerts=(Raised(0.1, "replica r0", cause),))
    assert judge(kind, told, {}, "")[2].passed
    other: DrillKind = "ecc" if kind != "ecc" else "engine-hang"
    assert not judge(other, told, {}, "")[2].passed


def test_lost_twice_settled_and_avoidable_requests_are_counted() -> None:
    story = Story()
    story.arrives(11_000, 1)  # never settled
    twice = story.answered(11_100, 1)
    story.at(11_500, Ticked(), Settled(twice, "answered"))
    elsewhere = story.arrives(11_600, 1)
    story.at(11_700, FirstToken(elsewhere, 1))
    story.at(11_800, Failed(elsewhere, 1, "stream_cut"), Settled(elsewhere, "failed"))
    unheard = story.arrives(11_900, 0)
    story.at(12_000, Failed(unheard, 0, "replica_lost"), Settled(unheard, "failed"))
    wrong = story.arrives(12_100, 0)
    story.at(12_200, Failed(wrong, 0, "rejected"), Settled(wrong, "failed", why="rejected"))
    figures = story.figures()
    assert figures.lost == 2
    assert (figures.failed, figures.avoidable) == (2, 2)
    assert figures.offered == 4  # its caller's own mistake is none of the drill's


# Beside the twin


def test_differences_by_their_definition() -> None:
    twin = msgspec.structs.replace(
        fine(), isolated_s=0.055, recovered_s=0.1, failed=3, degraded=1, refused=2
    )
    found = {each.figure: each.error_pct for each in differences(fine(), twin)}
    assert found["isolated_s"] == 0.0  # less than 50 ms apart
    assert found["recovered_s"] == pytest.approx(50.0)
    assert found["failed"] == pytest.approx(2.0)
    assert found["degraded"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("measured", "predicted", "offered", "error_pct"),
    [
        (5, 5, 600, 0.0),
        (2, 5, 600, 0.5),  # 3 apart: what was in flight is chance
        (4, 8, 600, 50.0), (8, 4, 600, 50.0),
        (0, 4, 600, 100.0),
        (100, 110, 600, 100 * 10 / 110),
        (0, 3, 10, 30.0),  # of few requests three are much
    ],
)  # fmt: skip
def test_counts_are_compared_with_each_other(
    measured: int, predicted: int, offered: int, error_pct: float
) -> None:
    for name, figure in (("failed", "failed"), ("degraded", "degraded"), ("refused", "degraded")):
        real, twin = (
            msgspec.structs.replace(fine(), offered=offered, **{"failed": 0, name: count})
            for count in (measured, predicted)
        )
        found = {each.figure: each.error_pct for each in differences(real, twin)}
        assert found.pop(figure) == pytest.approx(error_pct)
        assert set(found.values()) == {0.0}


def test_the_rule_in_words_has_the_rule_s_numbers() -> None:
    assert f"less than {1000 * SAME_S:g} ms apart" in RULE
    assert f"at most {SAME_REQUESTS} apart" in RULE


def test_what_only_one_of_them_saw_is_wholly_off() -> None:
    never = msgspec.structs.replace(fine(), recovered_s=None)
    by_name = {each.figure: each.error_pct for each in differences(fine(), never)}
    assert by_name["recovered_s"] == 100.0
    assert all(each.error_pct == 0.0 for each in differences(never, never))


# What ``make drills`` makes of several runs


def result(measured: DrillFigures, predicted: DrillFigures | None = None) -> DrillResult:
    return DrillResult(
        kind="ecc", target="demo", slot="m-0", at=0.0, for_s=14.0, what="", simulated="",
        measured=measured, predicted=predicted, not_predicted="" if predicted else "no trace",
        differences=(), criteria=judge("engine-kill", measured, {}, ""), alerts=(), callers={},
    )  # fmt: skip


def times(isolated_s: float | None, failed: int = 0) -> DrillFigures:
    return msgspec.structs.replace(fine(), isolated_s=isolated_s, failed=failed)


def test_figures_are_medians_and_every_run_has_to_pass() -> None:
    runs = [result(times(each, failed), fine()) for each, failed in ((9.0, 0), (0.2, 4), (0.3, 1))]
    made = {each.name: each for each in bench.figures_of({"ecc": runs}, [0.9, 1.5, 1.1], 0)}
    assert made["ecc_isolated_s"].value == pytest.approx(0.3)
    assert made["first20_p99_ratio"].value == pytest.approx(1.1)
    assert made["drills_passed_pct"].value == 100.0
    assert made["prediction_error_worst_pct"].value == pytest.approx(100 * 0.29 / 0.3)
    assert "ecc isolated_s" in made["prediction_error_worst_pct"].how
    assert RULE in made["prediction_error_worst_pct"].how
    runs[0] = result(times(None), fine())
    made = {each.name: each for each in bench.figures_of({"ecc": runs}, [], 2)}
    assert made["drills_passed_pct"].value == pytest.approx(200 / 3)
    assert made["first20_p99_ratio"].value is None
    assert not made["orphans_left"].holds


def test_a_drill_that_the_twin_cannot_play_is_wholly_off() -> None:
    made = {each.name: each for each in bench.figures_of({"ecc": [result(fine())]}, [], 0)}
    assert made["prediction_error_worst_pct"].value == 100.0
    assert "no trace" in made["prediction_error_worst_pct"].how


def test_most_runs_decide_whether_there_is_a_time() -> None:
    assert bench.medians([times(None), times(None), times(0.1)]).isolated_s is None
    assert bench.medians([times(None), times(0.3), times(0.1)]).isolated_s == pytest.approx(0.2)


def test_p99_of_twenty_is_the_longest() -> None:
    assert bench.p99([float(each) for each in range(20)]) == 19.0
