"""A deployment's way through its stages, judged on streams of results made here."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.canary import BROKEN, arm_of
from policy.decisions import Alert, Dispatch, Refused, Settled
from policy.deployment import (
    Deployment,
    DeploymentPlan,
    Result,
    Stage,
    Verdict,
    Watch,
    Watcher,
    is_judged,
)
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Cancelled,
    Failed,
    Finished,
    FirstToken,
    PolicySwitched,
    Ticked,
)
from policy.evidence import Band
from policy.parameters import Parameters
from policy.sequential import MeanBets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.decisions import Decision
    from policy.events import Event

NS = 1_000_000_000
MS = 1_000_000
SHORT = (
    Stage("shadow", 0, 60, 10),
    Stage("canary", 100, 300, 20),
    Stage("canary", 300, 300, 20),
    Stage("full", 1000, 300, 20),
)


def plan(**more: Any) -> DeploymentPlan:
    return DeploymentPlan(**{"stages": SHORT, "warmup_most_s": 60, "warmup_least_s": 30, **more})


def result(at_s: float, key: str, **more: Any) -> Result:
    given = {"canary": False, "sla": "P1", "prompt_bytes": 100, "missed": False, "hard": False}
    given |= {"ttft_ns": 500 * MS, "arrived_ns": round(at_s * NS)}
    return Result(at_ns=round(at_s * NS), key=key, **{**given, **more})


class Stream:
    """One request a second from callers who come once; who is the canary's is drawn by chance."""

    def __init__(self, deployment: Deployment, seed: int = 1) -> None:
        self.deployment = deployment
        self.random = Random(seed)  # noqa: S311
        self.at_s = 0
        self.hurt = 0
        self.verdicts: list[tuple[int, Verdict]] = []

    def play(
        self, seconds: int, miss: float = 0.01, ratio: float = 1.0, hard: bool = False, **more: Any
    ) -> Verdict | None:
        """Until a verdict other than to hold, or the time is over."""
        for _ in range(seconds):
            self.at_s += 1
            canary = self.random.random() < self.deployment.stage.share_permille / 1000
            missed = self.random.random() < miss * (ratio if canary else 1.0)
            self.hurt += canary and missed
            self.deployment.settled(
                result(
                    self.at_s, f"caller-{self.at_s}", canary=canary, missed=missed,
                    hard=hard and missed, **more,
                )
            )  # fmt: skip
            verdict = self.deployment.look(self.at_s * NS)
            if verdict is not None:
                self.verdicts.append((self.at_s, verdict))
                if verdict.value != "hold":
                    return verdict
        return None

    def through(self, stages: int, **more: Any) -> None:
        for _ in range(stages):
            verdict = self.play(20_000, **more)
            assert verdict is not None
            assert verdict.value == "go_on", verdict
            self.deployment.advance(self.at_s * NS)


def test_a_good_policy_goes_through_all_stages() -> None:
    stream = Stream(Deployment(plan(), 0))
    stream.through(4)
    assert stream.deployment.over == "done"
    assert stream.deployment.look(stream.at_s * NS + 60 * NS) is None
    assert stream.deployment.deadline_ns() is None
    with pytest.raises(ValueError, match="over"):
        stream.deployment.advance(stream.at_s * NS)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ratio", [5.0, 20.0])
def test_a_worse_policy_is_rolled_back_within_its_budget(ratio: float, seed: int) -> None:
    stream = Stream(Deployment(plan(), 0), seed)
    stream.through(1)
    verdict = stream.play(36_000, ratio=ratio)
    assert verdict is not None
    assert verdict.value == "roll_back", verdict
    assert stream.deployment.stage.share_permille == 100
    assert stream.hurt <= 50


def test_a_policy_that_misses_nothing_passes_without_any_misses_to_compare() -> None:
    stream = Stream(Deployment(plan(), 0))
    stream.through(1)
    verdict = stream.play(40_000, miss=0.0)
    assert verdict is not None
    assert (verdict.value, "per mille" in verdict.why) == ("go_on", True)


def test_no_stage_is_passed_before_its_time_and_its_requests() -> None:
    stages = (Stage("shadow", 0, 100, 500), Stage("canary", 100, 0, 0))
    stream = Stream(Deployment(plan(stages=stages), 0))
    stream.through(1)
    assert stream.at_s >= 500
    values = [verdict.why for _, verdict in stream.verdicts]
    assert "90 s more" in values[0]
    assert "of 500 requests" in values[-2]


def test_missing_data_holds_and_then_reverts() -> None:
    deployment = Deployment(plan(), 0)
    stream = Stream(deployment)
    stream.through(1)
    began_s, held = stream.at_s, []
    while True:  # the canary's callers have gone
        stream.at_s += 10
        deployment.settled(result(stream.at_s, f"caller-{stream.at_s}"))
        verdict = deployment.look(stream.at_s * NS)
        assert verdict is not None
        assert verdict.value != "go_on"
        held.append(dict(verdict.figures)["held_windows"])
        if verdict.value == "roll_back":
            break
    assert "too little data" in verdict.why
    assert stream.at_s - began_s <= 3 * 600 + 10
    assert sorted(set(held)) == [0, 1, 2, 3]


def test_one_window_with_data_forgives_those_before() -> None:
    deployment = Deployment(plan(), 0)
    stream = Stream(deployment)
    stream.through(1)
    for _ in range(3):
        stream.at_s += 1250  # two windows without anything
        deployment.look(stream.at_s * NS)
        stream.play(700)
    assert all(verdict.value != "roll_back" for _, verdict in stream.verdicts)


def test_misses_of_the_warm_up_are_left_out_but_not_from_the_budget() -> None:
    deployment = Deployment(plan(warmup_least_s=600, warmup_most_s=600), 0)
    stream = Stream(deployment)
    stream.through(1)
    assert stream.play(300, miss=0.02, ratio=20.0) is None
    figures = dict(stream.verdicts[-1][1].figures)
    assert figures["evidence"] == pytest.approx(1.0, abs=0.2)
    assert figures["hurt"] >= 5


def test_hard_failures_are_judged_during_the_warm_up() -> None:
    deployment = Deployment(plan(warmup_least_s=3600, warmup_most_s=3600, hurt_most=1000), 0)
    stream = Stream(deployment)
    stream.through(1)
    verdict = stream.play(3000, miss=0.03, ratio=30.0, hard=True)
    assert verdict is not None
    assert verdict.value == "roll_back"
    assert "hard failures" in verdict.why
    assert deployment.stage.kind == "canary"


def test_the_warm_up_ends_when_the_canary_reuses_as_much_as_the_others() -> None:
    def requests_compared(cached: int) -> str:
        deployment = Deployment(plan(warmup_least_s=30, warmup_most_s=3000), 0)
        stream = Stream(deployment)
        stream.through(1)
        for number in range(400):
            stream.at_s += 1
            canary = number % 5 == 0
            deployment.settled(
                result(
                    stream.at_s, f"c{number}", canary=canary,
                    cached_permille=cached if canary else 600,
                )
            )  # fmt: skip
            verdict = deployment.look(stream.at_s * NS) or stream.verdicts[-1][1]
        return verdict.why

    assert "requests seen" not in requests_compared(550)
    assert requests_compared(300).startswith("0 of 20 requests seen")


def test_the_hard_cap_asks_for_a_look_at_once() -> None:
    """Nothing to compare with is known to be worse, but nobody else misses."""
    deployment = Deployment(plan(warmup_least_s=3000, warmup_most_s=3000), 0)
    stream = Stream(deployment)
    stream.through(1)
    for number in range(200):
        at_s = stream.at_s + 1 + number / 100  # within a look
        deployment.settled(result(at_s, f"x{number}", canary=True, missed=True))
        due_ns = deployment.deadline_ns()
        assert due_ns is not None
        if due_ns <= round(at_s * NS):
            break
    assert number + 1 == 35
    verdict = deployment.look(round(at_s * NS))
    assert verdict is not None
    assert verdict.value == "roll_back"
    assert "35 requests hurt" in verdict.why


def test_one_caller_alone_cannot_end_it() -> None:
    """A caller whose requests all miss falls to the canary by chance: that says nothing."""
    deployment = Deployment(plan(), 0)
    stream = Stream(deployment)
    stream.through(1)
    for _ in range(600):
        stream.at_s += 5
        deployment.settled(result(stream.at_s, "heavy", canary=True, missed=True, hard=True))
        deployment.settled(result(stream.at_s, f"other-{stream.at_s}"))
        verdict = deployment.look(stream.at_s * NS)
        assert verdict is None or verdict.value == "hold" or "hard_failure_share" in verdict.why
    assert dict(deployment.figures())["hurt"] <= 5


def test_equal_policies_are_rarely_rolled_back_whatever_the_bursts() -> None:
    """40 canaries of four hours whose misses come in bursts that strike callers of both; at 1 % the
    chance of three wrong ones is below a hundredth."""
    wrong = 0
    for seed in range(40):
        random = Random(seed)  # noqa: S311
        deployment = Deployment(plan(stages=(Stage("canary", 100, 10**6, 1),)), 0)
        canaries = set(random.sample(range(5000), 500))
        at_s = 0.0
        while at_s < 4 * 3600:
            at_s += random.expovariate(1 / 60)
            for missed in random.choice([[True], [True], [True] * 12]) + [False] * 6:
                key = random.randrange(5000)
                each = result(at_s, str(key), canary=key in canaries, missed=missed)
                deployment.settled(each)
            verdict = deployment.look(round(at_s * NS))
            if verdict is not None and verdict.value == "roll_back":
                wrong += "too little data" not in verdict.why
                break
    assert wrong < 3


def test_many_misses_of_equal_policies_are_no_hurt() -> None:
    """A canary of a large fleet: three misses a second for an hour, 3,200 of them the canary's. By
    chance alone some of these four are more than fifty requests ahead."""
    ahead = 0.0
    for seed in range(4):
        random = Random(seed)  # noqa: S311
        deployment = Deployment(plan(stages=(Stage("canary", 300, 10**6, 1),)), 0)
        for number in range(3 * 3600):
            at_s = number / 3
            for missed in (True, False):
                canary = random.random() < 0.3
                each = result(at_s, f"{number}", canary=canary, missed=missed)
                deployment.settled(each)
            verdict = deployment.look(round(at_s * NS))
            assert verdict is None or verdict.value != "roll_back", verdict
            ahead = max(ahead, dict(deployment.figures())["hurt"])
    assert ahead > 50


def test_figures_outside_their_band_end_it_when_it_is_full() -> None:
    band = (Band("ttft_s_p95/P1", 0.0, 1.0),)
    stages = (Stage("full", 1000, 30_000, 20),)
    good = Stream(Deployment(plan(stages=stages, band=band), 0))
    assert good.play(20_000) is None
    slow = Stream(Deployment(plan(stages=stages, band=band), 0))
    verdict = slow.play(20_000, ttft_ns=1500 * MS)
    assert verdict is not None
    assert (verdict.value, verdict.why.split(":")[0]) == (
        "roll_back", "ttft_s_p95/P1 outside its band"
    )  # fmt: skip


def test_a_band_that_the_live_policy_leaves_too_says_nothing_of_the_candidate() -> None:
    stages = (Stage("canary", 300, 10**6, 1),)
    stream = Stream(Deployment(plan(stages=stages, band=(Band("slo_miss_share", 0, 0.01),)), 0))
    assert stream.play(20_000, miss=0.05) is None


def _results() -> Iterator[Result]:
    random = Random(3)  # noqa: S311
    for at_s in range(1, 3000):
        canary = at_s > 70 and random.random() < 0.1
        yield result(
            at_s, f"caller-{random.randrange(900)}", canary=canary,
            missed=random.random() < (0.1 if canary else 0.02), hard=random.random() < 0.002,
            cached_permille=random.randrange(900),
        )  # fmt: skip


def test_a_deployment_restored_anywhere_says_the_same() -> None:
    whole, broken = Deployment(plan(), 0), Deployment(plan(), 0)
    verdicts = 0
    for number, each in enumerate(_results()):
        if number % 7 == 0:
            broken = Deployment.load(broken.plan, broken.state())
        whole.settled(each)
        broken.settled(each)
        assert whole.deadline_ns() == broken.deadline_ns()
        said, said_too = whole.look(each.at_ns), broken.look(each.at_ns)
        assert said == said_too
        if said is not None and said.value == "go_on":
            verdicts += 1
            whole.advance(each.at_ns)
            broken.advance(each.at_ns)
        elif said is not None and said.value == "roll_back":
            verdicts += 1
            break
    assert verdicts == 2
    assert whole.state() == broken.state()


def test_a_state_of_another_plan_is_refused() -> None:
    deployment = Deployment(plan(), 0)
    for _ in range(2):
        deployment.advance(0)
    short = plan(stages=SHORT[:1])
    with pytest.raises(ValueError, match="the plan has 1"):
        Deployment.load(short, deployment.state())
    with pytest.raises(ValueError, match="not a deployment's state"):
        Deployment.load(short, b"\x01")


def test_an_operator_can_advance_and_abort() -> None:
    deployment = Deployment(plan(), 0)
    stage = deployment.advance(5 * NS)
    assert stage == SHORT[1]
    deployment.abort("the traffic is not usual today")
    assert deployment.over == "the traffic is not usual today"
    assert deployment.look(10**15) is None
    before = deployment.state()
    deployment.settled(result(20, "ann", canary=True, missed=True))
    assert deployment.state() == before


def test_requests_of_the_stage_before_are_not_counted() -> None:
    deployment = Deployment(plan(), 0)
    deployment.advance(100 * NS)
    before = deployment.state()
    deployment.settled(result(120, "ann", missed=True, arrived_ns=99 * NS))
    assert deployment.state() == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": ()}, "must rise"),
        ({"stages": (SHORT[2], SHORT[1])}, "must rise"),
        ({"stages": (SHORT[3], SHORT[3])}, "only the last stage"),
        ({"hurt_budget": 60}, "above hurt_most"),
        ({"warmup_least_s": 700}, "above warmup_most_s"),
        ({"band": (Band("gpu_hours", 0, 1),)}, "gpu_hours"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(**changes)


def test_a_stage_has_the_share_of_its_kind() -> None:
    with pytest.raises(ValueError, match=r"within 1\.\.999"):
        Stage("canary", 0, 1, 1)
    assert is_judged("ttft_s_p95/P0")
    assert not is_judged("ttft_s_p95/P9")


def test_a_plan_survives_json() -> None:
    made = plan(band=(Band("slo_miss_share", 0.0, 0.02),))
    assert msgspec.json.decode(msgspec.json.encode(made), type=DeploymentPlan) == made


class Log:
    """Feeds a watcher as a log would."""

    def __init__(self) -> None:
        self.watcher = Watcher(Parameters())

    def __call__(self, at_s: float, event: Event, *decisions: Decision) -> list[Result]:
        return self.watcher.step(round(at_s * NS), event, decisions)


def test_what_is_missed_is_judged_by_the_live_deadlines() -> None:
    log = Log()
    for request, sla in enumerate(["P0", "P1", "P2", ""]):
        log(0, Arrived(request, "m", "chat", 100, sla=sla, user=f"u{request}"))
        log(0, FirstToken(request, 0)) if request == 3 else log(3, FirstToken(request, 0))
    told = [log(9, Finished(n, 0, 100, 60, 5), Settled(n, "answered"))[0] for n in range(4)]
    assert [each.missed for each in told] == [True, False, False, False]
    assert [each.ttft_ns for each in told] == [3 * NS, 3 * NS, 3 * NS, 0]
    assert (told[3].sla, told[3].key, told[3].cached_permille) == ("P1", "u3", 600)
    own = Arrived(9, "m", "chat", 100, sla="P2", deadline_ns=NS)
    log(10, own)
    assert log(12, Finished(9, 0, 9, 0, 5), Settled(9, "degraded"))[0].missed


def test_what_became_of_a_request() -> None:
    log = Log()

    def told(request: int, settled: Settled, sent: bool = True) -> list[Result]:
        log(1, Arrived(request, "m", "chat", 1), *([Dispatch(request, 0, "turbo")] if sent else []))
        return log(1, Failed(request, 0, "oom"), settled)

    (failed,) = told(1, Settled(1, "failed", why="oom"))
    assert (failed.missed, failed.hard, failed.shed, failed.ttft_ns) == (True, True, False, -1)
    (shed,) = told(2, Settled(2, "shed", why="deadline"), sent=False)
    assert (shed.missed, shed.hard, shed.shed) == (True, False, True)
    assert told(3, Settled(3, "cancelled")) == []
    assert told(4, Settled(4, "failed", why="too_large")) == []  # the server's word
    (refused,) = told(5, Settled(5, "failed", why="too_large"), sent=False)  # the policy's own
    assert (refused.missed, refused.hard) == (True, False)
    assert log(2, Cancelled(5)) == []


def test_whose_a_request_is_follows_the_log() -> None:
    log = Log()

    def canaries(first: int) -> int:
        count = 0
        for request in range(first, first + 400):
            log(1, Arrived(request, "m", "chat", 1, user=f"u{request % 200}"))
            (told,) = log(1, Finished(request, 0, 1, 0, 1), Settled(request, "answered"))
            count += told.canary
        return count

    assert canaries(0) == 0
    log(1, CanaryStarted("old", "new", 100, 3))
    few = canaries(1000)
    log(1, CanaryStarted("old", "new", 500, 3))
    assert 10 < few < 80 < canaries(2000) < 280
    log(1, CanaryEnded("new"))
    assert canaries(3000) == 400
    log(1, CanaryEnded("old"))
    assert canaries(4000) == 0


# What hangs, what serves few, what hurts one class


def in_canary(**more: Any) -> Stream:
    """A stream whose deployment is in its first canary stage."""
    stream = Stream(Deployment(plan(**more), 0))
    stream.through(1)
    return stream


def test_who_hangs_is_missed_at_the_deadline_and_only_once() -> None:
    log = Log()
    for request in (0, 1, 2):
        log(0, Arrived(request, "m", "chat", 100, sla="P1", deadline_ns=4 * NS))
    log(3, FirstToken(1, 0))
    assert log.watcher.aside(4 * NS) == []
    late = log.watcher.aside(5 * NS)
    assert [(each.key, each.missed, each.hard, each.told) for each in late] == [
        ("0", True, False, "late"), ("2", True, False, "late")
    ]  # fmt: skip
    assert log.watcher.aside(900 * NS) == []
    (failed,) = log(901, Failed(0, 0, "oom"), Settled(0, "failed", why="oom"))
    assert (failed.told, failed.missed, failed.hard) == ("end", True, False)
    assert log(901, Cancelled(2), Settled(2, "cancelled")) == []
    (answered,) = log(901, Finished(1, 0, 9, 0, 5), Settled(1, "answered"))
    assert (answered.told, answered.missed) == ("whole", False)


@pytest.mark.parametrize(("at_s", "missed"), [(3, []), (120, [True])])
def test_who_leaves_after_the_deadline_was_missed(at_s: float, missed: list[bool]) -> None:
    log = Log()
    log(0, Arrived(1, "m", "chat", 100, sla="P1", deadline_ns=4 * NS))
    told = log(at_s, Cancelled(1), Settled(1, "cancelled"))
    assert [each.missed for each in told] == missed


def test_who_leaves_while_it_is_told_in_time_says_nothing() -> None:
    log = Log()
    log(0, Arrived(1, "m", "chat", 100, sla="P1", deadline_ns=4 * NS))
    log(1, FirstToken(1, 0))
    assert log(50, Cancelled(1), Settled(1, "cancelled")) == []


def test_deadlines_of_requests_that_are_over_are_forgotten() -> None:
    log = Log()
    for request in range(1000):
        log(1, Arrived(request, "m", "chat", 1, deadline_ns=10**6 * NS))
        log(1, Finished(request, 0, 1, 0, 1), Settled(request, "answered"))
    assert len(log.watcher._due) <= 66


def test_a_late_request_counts_once_and_its_end_only_as_a_failure() -> None:
    deployment = in_canary().deployment
    at_s = 100
    late = result(at_s, "ann", canary=True, missed=True, ttft_ns=-1, told="late")
    deployment.settled(late)
    end = msgspec.structs.replace(late, at_ns=(at_s + 30) * NS, hard=True, told="end")
    deployment.settled(end)
    figures = dict(deployment.figures())
    assert [figures[f"canary_{what}"] for what in ("requests", "misses", "hards")] == [1, 1, 1]
    assert figures["hurt"] == pytest.approx(1.0)


def test_a_candidate_that_hangs_half_of_its_requests_is_rolled_back() -> None:
    watcher, deployment = Watcher(Parameters()), Deployment(plan(), 0)
    deployment.advance(0)
    watcher.step(0, CanaryStarted("old", "new", 100, 3), ())
    random = Random(5)  # noqa: S311
    hung = 0
    for second in range(1, 3600):
        now_ns = second * NS
        told = watcher.aside(now_ns)
        event = Arrived(second, "m", "chat", 100, sla="P1", user=f"u{second}")
        told += watcher.step(now_ns, event, ())
        if arm_of(event, 3) < 100 and random.random() < 0.5:
            hung += 1  # its caller would leave after an hour
        else:
            done = Finished(second, 0, 100, 60, 5)
            told += watcher.step(now_ns, done, (Settled(second, "answered"),))
        for each in told:
            deployment.settled(each)
        verdict = deployment.look(now_ns)
        if verdict is not None and verdict.value == "roll_back":
            break
    else:
        pytest.fail("it was never rolled back")
    assert hung <= 50


def test_what_is_refused_changes_nothing() -> None:
    log = Log()
    log(0, CanaryStarted("old", "new", 100, 3))
    refused = Refused("whatever", "not now")
    log(1, PolicySwitched("old", "other"), refused)
    log(1, CanaryStarted("old", "other", 900, 5), refused)
    log(1, CanaryEnded("new"), refused)
    assert (log.watcher.share_permille, log.watcher._salt) == (100, 3)
    log(1, Arrived(1, "m", "chat", 1, user="ann"))
    log(2, Arrived(1, "m", "chat", 1, user="ben"), refused)
    (told,) = log(2, Finished(1, 0, 1, 0, 1), Settled(1, "answered"))
    assert told.key == "ann"


def test_a_candidate_that_raised_serves_nobody_any_more() -> None:
    log = Log()
    log(0, CanaryStarted("old", "new", 100, 3))
    log(1, Ticked(), Settled(9, "shed"), Alert(BROKEN, "it raised"))
    assert log.watcher.share_permille == 0


def test_what_a_server_refuses_is_told_aside() -> None:
    log = Log()
    log(1, Arrived(4, "m", "chat", 1, user="ann"), Dispatch(4, 0, "turbo"))
    assert log(1, Failed(4, 0, "rejected"), Settled(4, "failed", why="rejected")) == []
    (told,) = log.watcher.aside(NS)
    assert (told.key, told.told, told.missed, told.hard) == ("ann", "refused", False, False)
    assert log.watcher.aside(NS) == []


def test_a_candidate_whose_servers_refuse_is_found_out() -> None:
    """It sends to a model that answers 400; of everybody else's requests 1 % are their mistakes."""
    stream = in_canary()
    for _ in range(3000):
        stream.at_s += 1
        canary = stream.random.random() < 0.1
        refused = stream.random.random() < (0.5 if canary else 0.01)
        told = "refused" if refused else "whole"
        stream.deployment.settled(
            result(stream.at_s, f"c{stream.at_s}", canary=canary, told=told)
        )  # fmt: skip
        verdict = stream.deployment.look(stream.at_s * NS)
        if verdict is not None and verdict.value != "hold":
            break
    assert verdict is not None
    assert (verdict.value, "refusals" in verdict.why) == ("roll_back", True)
    assert dict(verdict.figures)["canary_misses"] == 0


@pytest.mark.parametrize("sla", ["P0", "P2"])
def test_one_class_that_is_hurt_is_seen_though_the_others_do_better(sla: str) -> None:
    """The candidate sheds 60 % of a class, and saves what the live policy loses of another."""
    other = "P2" if sla == "P0" else "P0"
    for seed in range(3):
        stream = Stream(Deployment(plan(), 0), seed)
        stream.through(1)
        hurt = 0
        for number in range(4 * 4 * 3600):
            stream.at_s += number % 4 == 0
            canary = stream.random.random() < 0.1
            of = stream.random.choices((sla, other, "P1"), (10, 60, 30))[0]
            bad = {sla: 0.6, other: 0.0, "P1": 0.01} if canary else {sla: 0.01, other: 0.1}
            missed = stream.random.random() < bad.get(of, 0.01)
            hurt += missed and canary and of == sla
            stream.deployment.settled(
                result(stream.at_s, f"c{number}", canary=canary, missed=missed, sla=of)
            )
            verdict = stream.deployment.look(stream.at_s * NS)
            if verdict is not None and verdict.value != "hold":
                break
        assert verdict is not None
        assert verdict.value == "roll_back"
        assert f"misses of {sla}" in verdict.why or "hurt" in verdict.why
        assert hurt <= 50


def heavy(stream: Stream, seconds: int, of_all: float, keys: int = 2) -> Verdict | None:
    """A few heavy callers of the canary's make up so much of all, and it never serves them."""
    for _ in range(seconds):
        stream.at_s += 1
        big = stream.random.random() < of_all
        canary = big or stream.random.random() < stream.deployment.stage.share_permille / 1000
        key = f"heavy-{stream.random.randrange(keys)}" if big else f"c{stream.at_s}"
        missed = big or stream.random.random() < 0.006
        stream.deployment.settled(result(stream.at_s, key, canary=canary, missed=missed))
        verdict = stream.deployment.look(stream.at_s * NS)
        if verdict is not None:
            stream.verdicts.append((stream.at_s, verdict))
            if verdict.value != "hold":
                return verdict
    return None


def test_a_candidate_that_serves_its_heavy_callers_badly_does_not_go_on() -> None:
    stream = in_canary()
    assert heavy(stream, 4 * 3600, 0.05) is None
    why = stream.verdicts[-1][1].why
    assert why.startswith("it misses 3")
    assert "can be compared" in why


def test_a_canary_that_misses_most_while_the_others_do_not_reverts() -> None:
    """Of few callers each counts once: what they miss is plain to see all the same."""
    stream = in_canary()
    began_s = stream.at_s
    verdict = heavy(stream, 4 * 3600, 0.3)
    assert verdict is not None
    assert (verdict.value, "miss most" in verdict.why) == ("roll_back", True)
    assert stream.at_s - began_s <= 3 * 600 + 20
    alone = in_canary()  # one caller alone may have fallen to the canary by chance
    assert heavy(alone, 3000, 0.3, keys=1) is None


# Everyone


def in_full(miss: float = 0.005, seed: int = 1, **more: Any) -> Stream:
    stages = (*SHORT[:2], Stage("full", 1000, 3000, 20))
    stream = Stream(Deployment(plan(stages=stages, **more), 0), seed)
    stream.through(2, miss=miss)
    assert stream.deployment.stage.kind == "full"
    return stream


@pytest.mark.parametrize("band", [(), (Band("slo_miss_share", 0, 0.02), Band("ttft_s_p95", 0, 5))])
@pytest.mark.parametrize("hard", [False, True])
def test_an_outage_of_everything_ends_it_within_minutes(band: tuple[Band, ...], hard: bool) -> None:
    stream = in_full(band=band)
    began_s = stream.at_s
    assert stream.play(300) is None
    verdict = stream.play(3600, miss=1.0, hard=hard)
    assert verdict is not None
    assert verdict.value == "roll_back", verdict
    assert stream.at_s - began_s <= 300 + (250 if hard else 310)


def test_what_the_live_policy_missed_before_is_the_measure_without_a_band() -> None:
    worse = in_full(miss=0.03)
    verdict = worse.play(3 * 3600, miss=0.3)
    assert verdict is not None
    assert verdict.value == "roll_back"
    assert "slo_miss_share" in verdict.why
    assert "before" in verdict.why
    equal = in_full(miss=0.1)
    verdict = equal.play(3 * 3600, miss=0.1)
    assert verdict is not None
    assert verdict.value == "go_on"


def test_one_class_that_is_never_served_is_seen_when_it_is_full() -> None:
    stream = in_full()
    for number in range(3600):
        stream.at_s += 1
        of = ("P2", "P0", "P1")[number % 20 if number % 20 < 2 else 2]
        stream.deployment.settled(
            result(stream.at_s, f"c{stream.at_s}", canary=True, missed=of == "P2", sla=of)
        )
        verdict = stream.deployment.look(stream.at_s * NS)
        if verdict is not None and verdict.value != "hold":
            break
    assert verdict is not None
    assert (verdict.value, "slo_miss_share/P2" in verdict.why) == ("roll_back", True)


def test_it_is_not_done_while_it_misses_far_more_than_before() -> None:
    stages = (*SHORT[:2], Stage("full", 1000, 60, 20))
    stream = Stream(Deployment(plan(stages=stages), 0))
    stream.through(2, miss=0.005)
    verdict = stream.play(120, miss=0.25)
    assert verdict is None
    assert "can be compared" in stream.verdicts[-1][1].why


# Chance


def test_misses_of_one_caller_fall_to_one_policy_together() -> None:
    """The sum of m misses that fall alike varies by m^2 and not by m: else equal policies whose
    callers miss five times each would be told apart by chance."""

    def chance(keys: int, misses: int) -> float:
        deployment = in_canary().deployment
        for number in range(keys):
            for _ in range(misses):
                each = result(100, f"c{number}", canary=True, missed=True)
                deployment.settled(each)
        group = deployment._s.groups[""]
        return group.chance / (group.canary.requests + 2)

    assert chance(1, 5) == pytest.approx(25 * chance(1, 1), rel=0.5)
    assert chance(1, 5) > 3 * chance(5, 1)


def test_a_caller_counts_anew_in_the_next_stage() -> None:
    stream = in_canary()
    for _ in range(9):
        stream.deployment.settled(result(stream.at_s, "ann", canary=False, missed=True))
    group = stream.deployment._s.groups[""]
    before = group.hurt
    stream.deployment.advance(stream.at_s * NS)
    stream.deployment.settled(result(stream.at_s, "ann", canary=True, missed=True))
    assert group.hurt == pytest.approx(before + 1)


def test_an_incident_that_is_open_when_a_stage_ends_is_bet_on() -> None:
    stream = in_canary()
    stream.play(100, miss=0.0)
    for number in range(3):
        at_s = stream.at_s + number * 20
        each = result(at_s, f"x{number}", canary=False, missed=True)
        stream.deployment.settled(each)
    stream.deployment.look(at_s * NS)
    two = stream.deployment.evidence()
    stream.deployment.advance(at_s * NS)
    assert stream.deployment.evidence() < two - 0.005 < 1


def test_windows_that_nobody_looked_into_do_not_count() -> None:
    stream = in_canary()
    stream.play(100)
    stream.at_s += 4 * 600  # it slept
    verdict = stream.deployment.look(stream.at_s * NS)
    assert verdict is not None
    assert verdict.value == "hold"
    assert dict(verdict.figures)["held_windows"] <= 1


def test_a_band_says_nothing_before_the_live_policy_can_tell() -> None:
    stages = (Stage("canary", 300, 10**6, 1),)
    deployment = Deployment(plan(stages=stages, band=(Band("slo_miss_share", 0, 0.01),)), 0)
    for second in range(6 * 3600):  # three requests of the live policy in ten minutes
        if second % 200 == 0:
            canary = result(second, f"c{second}", canary=True, missed=second % 400 == 0)
            deployment.settled(canary)
            deployment.settled(result(second, f"s{second}"))
        deployment.look(second * NS)
    watch = deployment._s.watches[1]
    assert watch.figure == "slo_miss_share"
    assert watch.bets.wealth != [1.0, 1.0, 1.0]
    assert sum(watch.stable) < 100
    alone = Watch("slo_miss_share", MeanBets(0.01), canary=(5, 5), stable=(99, 0))
    alone.bet(beside=True)
    assert alone.bets.evidence() == 1.0


def test_more_callers_in_trouble_than_can_be_remembered_hold_and_revert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("sequential", "deployment"):
        monkeypatch.setattr(f"policy.{module}.KEYS_MOST", 50)
    stream = in_canary()
    values: list[str] = []
    for _ in range(3 * 3600):
        verdict = stream.play(1, miss=0.1)
        if verdict is not None:
            break
        values.append(stream.verdicts[-1][1].why)
    assert verdict is not None
    assert (verdict.value, "50 callers" in verdict.why) == ("roll_back", True)
    assert any("50 callers" in why for why in values)


def test_the_state_of_many_callers_in_trouble_is_written_in_no_time() -> None:
    deployment = in_canary(warmup_least_s=0, warmup_most_s=0).deployment
    for number in range(30_000):
        at_s = 1000 + number / 10
        if number == 1:
            deployment.look(1000 * NS)
        deployment.settled(result(at_s, f"r{number}", canary=number % 10 == 0, missed=True))
    state = deployment.state()
    assert len(state) < 30_000 * 10 * 4
    began_ns = time.perf_counter_ns()
    for _ in range(10):
        deployment.state()
    assert time.perf_counter_ns() - began_ns < 10 * 10 * MS
    assert Deployment.load(deployment.plan, state).state() == state
