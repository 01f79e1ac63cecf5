"""Circuit breakers: what opens them, what does not, and how they are tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.breakers import Breakers, BreakersState
from policy.decisions import BreakerMoved
from policy.files import parse_policy
from policy.parameters.breakers import Breakers as Section
from tests.policy_support import MS, S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision

ERRORS: dict[str, Any] = {
    "name": "errors", "by": ["model"], "kinds": ["timeout", "http_5xx"], "share_permille": 100,
    "volume_least": 20, "failures_least": 3,
}  # fmt: skip
RUNS: dict[str, Any] = {
    "name": "runs", "kinds": ["http_5xx", "replica_lost"], "consecutive_least": 3,
    "consecutive_ms": 0,
}  # fmt: skip
DOUBT: dict[str, Any] = {
    "name": "doubt", "low_confidence_below_permille": 300, "window_ms": 60_000, "windows_least": 3,
    "share_permille": 150, "volume_least": 10, "failures_least": 1,
}  # fmt: skip


def section(*rules: dict[str, Any], **fields: Any) -> Section:
    if rules:
        fields["rules"] = rules
    return msgspec.convert(fields, Section)


class Driven:
    """Breakers with a clock and request ids of their own."""

    def __init__(self, *rules: dict[str, Any], **fields: Any) -> None:
        self.breakers = Breakers(section(*rules, **fields))
        self.now_ns = 0
        self.next = 0
        self.moved: list[BreakerMoved] = []

    def _told(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            assert isinstance(decision, BreakerMoved)
            self.moved.append(decision)

    def wait(self, ns: int) -> None:
        """Let time pass, ticking whenever the breakers ask for it."""
        end_ns = self.now_ns + ns
        while (due_ns := self.breakers.deadline_ns()) is not None and due_ns <= end_ns:
            self.now_ns = due_ns
            self._told(self.breakers.ticked(due_ns))
            later_ns = self.breakers.deadline_ns()
            assert later_ns is None or later_ns > due_ns
        self.now_ns = end_ns

    def gate(self, model: str = "m", version: str = "", line: str = "") -> tuple[int, str | None]:
        self.next += 1
        return self.next, self.breakers.gate(self.now_ns, self.next, model, version, line)

    def over(
        self, request: int, kind: str = "", score: int = -1, model: str = "m", version: str = "",
        line: str = "",
    ) -> None:  # fmt: skip
        self._told(self.breakers.observe(self.now_ns, request, model, version, line, kind, score))

    def feed(self, kinds: Sequence[str], gap_ns: int = MS, score: int = -1, **key: str) -> None:
        """Requests one after another, each over before the next."""
        for kind in kinds:
            self.wait(gap_ns)
            request, blocked = self.gate(**key)
            if blocked is None:
                self.over(request, kind, score, **key)

    @property
    def phases(self) -> list[str]:
        return [moved.state for moved in self.moved]


def test_errors_open_at_the_share_and_not_before_the_least_volume() -> None:
    driven = Driven(ERRORS)
    driven.feed(["http_5xx"] * 2 + [""] * 17)
    assert not driven.moved
    driven.feed(["timeout"])
    assert driven.moved == [BreakerMoved("errors model=m", "open", "share", 3, 20, 2 * S)]
    assert driven.gate() == (21, "errors model=m")
    assert driven.gate(model="other") == (22, None)
    assert driven.breakers.open_keys() == ["errors model=m"]


def test_the_default_share_is_half_a_per_cent_of_five_minutes() -> None:
    driven = Driven()
    driven.feed([""] * 2000 + ["malformed", ""] * 9, 100 * MS)
    assert not driven.moved
    driven.feed(["", "malformed", "malformed"], 100 * MS)
    assert [(moved.state, moved.bad, moved.total) for moved in driven.moved] == [("open", 11, 2021)]


def test_old_errors_leave_the_window() -> None:
    driven = Driven(ERRORS)
    driven.feed(["http_5xx"] * 2 + [""] * 17)
    driven.wait(300 * S)
    driven.feed([""] * 18 + ["http_5xx"] * 2)
    assert not driven.moved


@pytest.mark.parametrize("kind", ["neutral", "rejected", "too_large", "backpressure"])
def test_the_callers_errors_and_backpressure_never_open_it(kind: str) -> None:
    driven = Driven()
    driven.feed([kind] * 500, 10 * MS)
    assert not driven.moved
    driven.feed([""] * 40)
    assert driven.next == 540
    assert not driven.breakers.open_keys()


def test_refused_requests_leave_no_key_behind() -> None:
    driven = Driven()
    driven.feed(["neutral"] * 10, line="invented")
    assert driven.breakers.size() == 0


def test_neutral_outcomes_do_not_break_a_run_either() -> None:
    driven = Driven(RUNS)
    driven.feed(["http_5xx", "neutral", "http_5xx", "backpressure", "timeout", "http_5xx"])
    assert driven.moved == [BreakerMoved("runs model=m", "open", "consecutive", 3, 3, 2 * S)]


def test_a_success_breaks_a_run() -> None:
    driven = Driven(RUNS)
    driven.feed(["http_5xx", "http_5xx", ""] * 20)
    assert not driven.moved


def test_straight_500s_open_it_at_once() -> None:
    driven = Driven()
    driven.feed(["http_5xx"] * 25, 50 * MS)
    assert driven.moved[0].key == "transport model=m"
    assert (driven.moved[0].bad, driven.now_ns) == (5, 25 * 50 * MS)


def test_the_streams_of_one_lost_replica_do_not_open_it() -> None:
    driven = Driven()
    driven.feed(["replica_lost"] * 60, 0)
    assert not driven.moved
    driven.feed(["", "replica_lost", "replica_lost"], 300 * MS)
    assert not driven.moved


def opened(**fields: Any) -> Driven:
    driven = Driven(RUNS | fields)
    driven.feed(["http_5xx"] * 3)
    assert driven.phases == ["open"]
    return driven


def test_many_probes_in_a_row_tell_a_share_of_failures() -> None:
    driven = opened(probes_most=2, successes_least=5)
    driven.wait(2 * S)
    driven.feed([""] * 4 + ["http_5xx"])
    assert driven.phases == ["open", "half_open", "open"]
    driven.wait(4 * S)
    driven.feed([""] * 4)
    assert driven.phases[-1] == "half_open"
    driven.feed([""])
    assert driven.phases[-1] == "closed"


def test_half_open_lets_a_few_in_and_closes_when_they_succeed() -> None:
    driven = opened()
    driven.wait(2 * S)
    assert driven.phases == ["open", "half_open"]
    outcomes = [driven.gate() for _ in range(50)]
    probes = [request for request, blocked in outcomes if blocked is None]
    assert len(probes) == 2
    driven.over(probes[0])
    third, blocked = driven.gate()
    assert blocked is None
    driven.over(probes[1])
    assert driven.moved[-1] == BreakerMoved("runs model=m", "closed", "probe", 0, 2)
    assert driven.gate()[1] is None
    driven.over(third, "http_5xx")  # no probe any more: it counts as any other
    assert driven.phases == ["open", "half_open", "closed"]


def test_a_failed_probe_opens_it_again_for_twice_as_long() -> None:
    driven = opened(open_most_ms=7000)
    for for_ns in (4 * S, 7 * S, 7 * S):
        driven.wait(driven.moved[-1].for_ns)
        request, blocked = driven.gate()
        assert blocked is None
        driven.over(request, "replica_lost")
        assert driven.moved[-1] == BreakerMoved("runs model=m", "open", "probe", 1, 1, for_ns)
        assert driven.gate()[1] == "runs model=m"
    driven.wait(7 * S)
    driven.feed(["", ""])
    assert driven.phases[-1] == "closed"
    driven.feed(["http_5xx"] * 3)
    assert driven.moved[-1].for_ns == 2 * S  # a new incident begins with the first wait


@pytest.mark.parametrize("kind", ["neutral", "rejected", "backpressure", "timeout"])
def test_a_neutral_outcome_frees_the_probes_slot_and_changes_nothing(kind: str) -> None:
    driven = opened()
    driven.wait(2 * S)
    for _ in range(30):
        first, blocked = driven.gate()
        second, also = driven.gate()
        assert blocked is also is None
        assert driven.gate()[1] is not None
        driven.over(first, kind)
        driven.over(second, kind)
    assert driven.phases == ["open", "half_open"]


def test_a_probe_that_never_comes_back_has_failed() -> None:
    driven = opened(probe_wait_ms=5000)
    driven.wait(2 * S)
    lost, _ = driven.gate()
    driven.wait(1 * S)
    driven.gate()
    driven.wait(4 * S)
    assert driven.moved[-1] == BreakerMoved("runs model=m", "open", "probe", 1, 1, 4 * S)
    driven.over(lost)  # too late
    driven.wait(4 * S)
    assert driven.phases == ["open", "half_open", "open", "half_open"]
    assert [driven.gate()[1] is None for _ in range(3)] == [True, True, False]


def test_answers_asked_for_before_it_opened_do_not_close_it() -> None:
    driven = Driven(RUNS)
    early = [driven.gate()[0] for _ in range(9)]
    driven.feed(["http_5xx"] * 3)
    driven.over(early[0])
    driven.wait(2 * S)
    for request in early[1:5]:
        driven.over(request)
    for request in early[5:]:
        driven.over(request, "http_5xx")
    assert driven.phases == ["open", "half_open"]


def test_half_open_closes_when_nobody_came_for_a_window() -> None:
    driven = opened(window_ms=10_000)
    driven.wait(2 * S + 10 * S)
    assert driven.moved[-1] == BreakerMoved("runs model=m", "closed", "quiet")
    assert driven.breakers.deadline_ns() is None


def doubtful_minute(driven: Driven, low: int, answers: int = 20) -> None:
    for number in range(answers):
        driven.feed([""], 60 * S // answers, score=299 if number < low else 300)


def test_low_confidence_opens_after_three_minutes_in_a_row() -> None:
    driven = Driven(DOUBT)
    doubtful_minute(driven, 3)
    doubtful_minute(driven, 3)
    doubtful_minute(driven, 2)  # 10 %: begins anew
    for _ in range(3):
        doubtful_minute(driven, 3)
        assert not driven.moved
    driven.feed([""], 3 * S, score=900)
    assert driven.moved == [BreakerMoved("doubt model=m", "open", "share", 9, 60, 2 * S)]


def test_three_doubtful_minutes_long_ago_open_nothing() -> None:
    driven = Driven(DOUBT)
    for _ in range(3):
        doubtful_minute(driven, 20)
    driven.wait(3600 * S)
    driven.feed([""], score=100)
    assert not driven.moved


def test_answers_without_a_score_say_nothing_about_confidence() -> None:
    driven = Driven(DOUBT)
    for _ in range(4):
        doubtful_minute(driven, 3)
        driven.feed([""] * 400, 0)
    assert driven.phases[:1] == ["open"]
    assert (driven.moved[0].bad, driven.moved[0].total) == (9, 60)


def test_a_probe_is_judged_by_its_confidence() -> None:
    driven = Driven(DOUBT)
    for _ in range(3):
        doubtful_minute(driven, 10)
    driven.feed([""], 3 * S, score=100)
    driven.wait(2 * S)
    driven.feed([""] * 3)  # no score: neutral
    assert driven.phases == ["open", "half_open"]
    driven.feed([""], score=299)
    assert driven.phases == ["open", "half_open", "open"]
    driven.wait(4 * S)
    driven.feed([""] * 2, score=300)
    assert driven.phases[-1] == "closed"


def test_mismatches_count_as_doubt_by_default() -> None:
    driven = Driven()
    for _ in range(3):
        for _ in range(30):
            driven.feed(["mismatch"], 2 * S, score=500)
    driven.feed([""], 2 * S, score=900)
    assert [moved.key for moved in driven.moved] == ["doubt model=m line="]


def test_a_breaker_for_each_part_of_the_key() -> None:
    rule = RUNS | {"by": ["model", "version", "line"]}
    driven = Driven(rule)
    driven.feed(["http_5xx"] * 3, model="m", version="v2", line="search")
    assert driven.moved[0].key == "runs model=m version=v2 line=search"
    for key in (("m", "v1", "search"), ("m", "v2", "chat"), ("n", "v2", "search")):
        assert driven.gate(*key)[1] is None
    assert driven.gate("m", "v2", "search")[1] is not None


def test_a_breaker_for_each_error_kind() -> None:
    driven = Driven(RUNS | {"by": ["model", "kind"]})
    driven.feed(["http_5xx", "replica_lost"] * 2)
    assert not driven.moved
    driven.feed(["http_5xx"])
    assert driven.moved[0].key == "runs model=m kind=http_5xx"


def test_one_breaker_for_everything() -> None:
    driven = Driven(RUNS | {"by": []})
    driven.feed(["http_5xx"] * 3, model="a")
    assert driven.gate("b")[1] == "runs"


def test_a_request_blocked_by_one_breaker_takes_no_slot_of_another() -> None:
    driven = Driven(RUNS, RUNS | {"name": "slow", "open_ms": 9000})
    driven.feed(["http_5xx"] * 3)
    driven.wait(2 * S)
    assert [driven.gate()[1] for _ in range(5)] == ["slow model=m"] * 5
    assert driven.breakers.size() == 2  # no probes


def test_a_probe_of_two_breakers_counts_for_both() -> None:
    driven = Driven(RUNS, RUNS | {"name": "twin"})
    driven.feed(["http_5xx"] * 3)
    driven.wait(2 * S)
    assert driven.breakers.open_keys() == ["runs model=m", "twin model=m"]
    driven.feed(["", ""])
    assert driven.phases == ["open", "open", "half_open", "half_open", "closed", "closed"]


def test_a_probe_that_is_late_for_one_breaker_still_counts_for_the_other() -> None:
    patient = {"name": "patient", "probes_most": 1, "successes_least": 1}
    driven = Driven(RUNS | {"probe_wait_ms": 1000}, RUNS | patient)
    driven.feed(["http_5xx"] * 3)
    driven.wait(2 * S)
    request, _ = driven.gate()
    driven.wait(1 * S)
    driven.over(request)
    assert [(moved.key, moved.state) for moved in driven.moved[-2:]] == [
        ("runs model=m", "open"), ("patient model=m", "closed"),
    ]  # fmt: skip


def test_a_tick_too_early_changes_nothing() -> None:
    driven = opened()
    assert driven.breakers.ticked(driven.now_ns) == ()
    assert driven.breakers.deadline_ns() == driven.now_ns + 2 * S


def test_a_request_that_tries_it_takes_one_slot_however_often_it_asks() -> None:
    driven = opened(probes_most=1, successes_least=1)
    driven.wait(2 * S)
    request, _ = driven.gate()
    assert driven.breakers.gate(driven.now_ns, request, "m", "", "") is None
    driven.over(request)
    assert driven.phases[-1] == "closed"


def test_invented_keys_drive_out_each_other_and_not_those_in_use() -> None:
    driven = Driven(ERRORS | {"by": ["line"]}, keys_max=10)
    driven.feed(["http_5xx"] * 2 + [""] * 17, line="used")
    for number in range(100):
        driven.feed([""], line=f"invented-{number}")
        assert driven.breakers.size() <= 10
    driven.feed(["http_5xx"], line="used")
    assert driven.moved[0].key == "errors line=used"


def test_open_ones_are_not_forgotten_and_bounded() -> None:
    driven = Driven(RUNS | {"by": ["line"]}, keys_max=4)
    for number in range(9):
        driven.feed(["http_5xx"] * 3, line=str(number))
    assert driven.breakers.open_keys() == ["runs line=0", "runs line=1"]
    assert driven.gate(line="0")[1] is not None
    assert driven.gate(line="8")[1] is None
    assert driven.breakers.size() <= driven.breakers.size_most()


def test_without_rules_nothing_is_blocked() -> None:
    driven = Driven(rules=[])
    driven.feed(["http_5xx"] * 50)
    assert not driven.moved
    assert driven.breakers.size_most() == 0


def test_a_state_is_relative_and_read_back() -> None:
    driven = opened()
    driven.wait(2 * S)
    probe, _ = driven.gate()
    packed = msgspec.msgpack.encode(driven.breakers.state(driven.now_ns))
    again = Breakers(section(RUNS))
    again.load(msgspec.msgpack.decode(packed, type=BreakersState), 77 * S)
    assert msgspec.msgpack.encode(again.state(77 * S)) == packed
    assert again.deadline_ns() == 77 * S + 30 * S
    assert again.gate(77 * S, 900, "m", "", "") is None
    assert again.gate(77 * S, 901, "m", "", "") == "runs model=m"
    again.observe(78 * S, probe, "m", "", "", "", -1)
    (closed,) = again.observe(78 * S, 900, "m", "", "", "", -1)
    assert closed == BreakerMoved("runs model=m", "closed", "probe", 0, 2)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("{name: a, share_permille: 5}", "neither kinds nor low_confidence_below_permille"),
        ("{name: a, kinds: [oom]}", "neither share_permille nor consecutive_least"),
        ("{name: a, kinds: [oom, oom], share_permille: 5}", "a kind twice"),
        ("{name: a, by: [line, line], kinds: [oom], share_permille: 5}", "a part of its key"),
        ("{name: a, by: [version], kinds: [oom], share_permille: 5}", "add model"),
        (
            "{name: a, by: [kind], low_confidence_below_permille: 300, share_permille: 5}",
            "low confidence is none",
        ),
        ("{name: a, kinds: [oom], share_permille: 5, open_ms: 40000}", "40000, above open_most_ms"),
        ("{name: a, kinds: [rejected], share_permille: 5}", "rejected"),
        ("{name: a, kinds: [oom], share_permille: 5}", "one name"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rule: str, told: str) -> None:
    other = "{name: a, kinds: [oom], share_permille: 5}"
    with pytest.raises(ValueError, match=told):
        parse_policy(f"schema: 1\nbreakers: {{rules: [{rule}, {other}]}}", "mine")


def test_actions_stand_once() -> None:
    with pytest.raises(ValueError, match="an action stands twice: cached, cached"):
        parse_policy("schema: 1\nbreakers: {actions: [cached, cached]}", "mine")
