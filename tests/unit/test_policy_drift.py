"""Drift: told when steps keep taking another time than the profile says, and with how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.compose import build_policy, restore
from policy.decisions import Alert
from policy.drift import ACTION, Drift
from policy.events import PolicySwitched, ReplicaDown, ReplicaUp, StepsRead
from policy.parameters import canonical, from_canonical
from policy.parameters.drift import Drift as Section
from tests.policy_support import MS, Checked, S, arrived, parameters, up

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRAPE = 5 * S
STEPS = 500


def read(replica: int, permille: int, steps: int = STEPS) -> StepsRead:
    """Steps of 5 ms by the profile."""
    return StepsRead(replica, steps, 5 * steps * permille, 5000 * steps)


def fed(
    drift: Drift, ratios: Sequence[int], at_ns: int = 0, replica: int = 0
) -> list[tuple[int, Alert]]:
    """One reading a scrape; what was told, and with which reading."""
    told: list[tuple[int, Alert]] = []
    for number, permille in enumerate(ratios):
        now_ns = at_ns + number * SCRAPE
        told += [(number, each) for each in drift.read(now_ns, read(replica, permille), "gpu7")]
    return told


def test_a_drift_that_stays_is_told_with_its_size() -> None:
    told = fed(Drift(Section()), [1302] * 15)
    number, alert = told[0]
    assert number == 14, "five samples of three readings each"
    assert alert == Alert(
        "drift gpu7",
        "steps take 30.2 % longer than its profile says",
        (("drift_permille", 302), ("steps", 15 * STEPS), ("samples", 5)),
        ACTION,
    )


def test_a_faster_replica_has_drifted_too() -> None:
    ((_, alert),) = fed(Drift(Section()), [850] * 15)
    assert dict(alert.figures)["drift_permille"] == -150
    assert alert.cause == "steps take 15.0 % shorter than its profile says"


@pytest.mark.parametrize(("permille", "tells"), [(1099, False), (1100, True), (901, False)])
def test_the_limit(permille: int, tells: bool) -> None:
    assert bool(fed(Drift(Section()), [permille] * 60)) is tells


def test_what_a_stall_spoils_is_no_drift() -> None:
    ratios = [1000] * 60
    for number in (3, 4, 30):  # two samples of five, a hundred times too slow
        ratios[number] = 100_000
    assert fed(Drift(Section()), ratios) == []


def test_it_is_over_only_well_below_the_limit() -> None:
    drift = Drift(Section())
    assert fed(drift, [1150] * 15)
    assert fed(drift, [1060] * 30, 100 * S), "the same trouble goes on"
    fed(drift, [1040] * 15, 300 * S)
    assert fed(drift, [1040] * 15, 400 * S) == []
    assert fed(drift, [1090] * 30, 500 * S) == [], "from anew, the higher limit counts"


def test_few_steps_are_no_sample() -> None:
    drift = Drift(Section())
    for number in range(100):  # 19 readings of 10 steps lie below 200
        now_ns = number * SCRAPE
        told = drift.read(now_ns, read(0, 2000, 10), "gpu7")
        assert bool(told) is (number == 99)


def test_what_is_long_ago_and_another_life_say_nothing() -> None:
    drift = Drift(Section())
    fed(drift, [2000] * 12)
    assert fed(drift, [2000] * 12, 60 * S + 600 * S) == [], "an idle night lies between"
    assert drift.permille_of(0) is None
    fed(drift, [2000] * 3, 800 * S)
    assert drift.permille_of(0) == 1000
    drift.renewed(0)
    assert drift.permille_of(0) is None
    assert fed(drift, [2000] * 14, 900 * S) == []


def test_nothing_predicted_is_nothing_compared() -> None:
    drift = Drift(Section(steps_least=1, sample_ms=0, samples_least=1))
    assert drift.read(0, StepsRead(0, 9, 100, 0), "r") == ()
    assert drift.read(0, StepsRead(0, 0, 0, 0), "r") == ()
    (alert,) = drift.read(0, StepsRead(0, 9, 1 << 40, 1), "r")
    assert dict(alert.figures)["drift_permille"] == 999_000, "it has a bound"


def test_replicas_beyond_the_bound_never_drift() -> None:
    drift = Drift(Section(replicas_max=1))
    assert fed(drift, [2000] * 15)
    assert fed(drift, [2000] * 15, replica=1) == []
    assert drift.size() == 6 == drift.size_most()


def test_numbers_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="recover_permille is 101, above"):
        msgspec.convert({"recover_permille": 101}, Section)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 4000)), min_size=1, max_size=80),
    st.integers(1, 7),
)
def test_what_is_told_was_measured(readings: list[tuple[int, int]], samples: int) -> None:
    section = Section(sample_ms=0, samples_least=samples)
    drift = Drift(section)
    for number, (steps, permille) in enumerate(readings):
        for alert in drift.read(number * S, read(0, permille, steps), "r"):
            told = dict(alert.figures)
            off = [one - 1000 for _, one in readings[: number + 1]]
            assert min(off) <= told["drift_permille"] <= max(off)
            assert abs(told["drift_permille"]) >= section.recover_permille
            assert told["steps"] >= samples * section.steps_least
    steady = Drift(section)
    for number, (steps, _) in enumerate(readings):
        assert not steady.read(number * S, read(0, 1000, steps), "r")


# In the whole policy


def drifting(checked: Checked, count: int, permille: int = 1300, replica: int = 0) -> list[Alert]:
    told = [checked.feed(read(replica, permille), SCRAPE) for _ in range(count)]
    return [each for decisions in told for each in decisions if isinstance(each, Alert)]


def test_the_policy_tells_it_once_and_changes_nothing_else() -> None:
    checked = Checked(parameters())
    checked.bring_up(up(0))
    assert [alert.key for alert in drifting(checked, 300)] == ["drift r0"]
    assert dict(checked.policy.mechanisms)["drift"].permille_of(0) == 300  # type: ignore[attr-defined]
    checked.restore()
    assert drifting(checked, 30) == []
    decisions = checked.policy.step(checked.now_ns, arrived(0))
    assert [type(each).__name__ for each in decisions] == ["Dispatch"]


def test_a_new_life_begins_anew() -> None:
    checked = Checked(parameters())
    checked.bring_up(up(0))
    drifting(checked, 14)
    checked.feed(ReplicaDown(0, "gone"), MS)
    assert drifting(checked, 30) == [], "it comes too late"
    checked.feed(up(0), MS)
    assert drifting(checked, 14) == []
    assert len(drifting(checked, 1)) == 1


def test_a_switch_keeps_what_was_measured_unless_its_section_changes() -> None:
    other, own = {"health": {"enforce": False}}, {"drift": {"sample_ms": 9999}}
    for sections, due in ((other, 1), (own, 15)):
        checked = Checked(parameters())
        checked.bring_up(up(0))
        drifting(checked, 14)
        new = parameters(**sections)
        checked.feed(PolicySwitched(canonical(checked.params), canonical(new)), MS)
        told = [drifting(checked, 1) for _ in range(15)]
        assert [bool(each) for each in told].index(True) == due - 1


def test_a_snapshot_and_a_policy_from_before_there_was_drift_are_understood() -> None:
    old = msgspec.json.decode(canonical(parameters()))
    del old["drift"]
    text = msgspec.json.encode(old, order="sorted").decode()
    params = from_canonical(text)
    assert params == parameters()
    policy = build_policy(params)
    policy.step(0, up(0))
    state = msgspec.msgpack.decode(policy.snapshot())
    fleet = state[6]
    assert fleet[-1] == [[]], "drift is what the fleet's state ends with"
    fleet.pop()
    again = restore(params, msgspec.msgpack.encode(state))
    assert again.snapshot() == policy.snapshot()
    new = canonical(parameters(drift={"enabled": False}))
    decisions = again.step(S, PolicySwitched(text, new))
    assert [type(each).__name__ for each in decisions] == []


def test_off_it_is_not_there() -> None:
    checked = Checked(parameters(drift={"enabled": False}))
    checked.bring_up(up(0))
    assert drifting(checked, 60) == []
    fifo = Checked(parameters("fifo"))
    fifo.bring_up(up(0))
    assert drifting(fifo, 60) == []
    assert isinstance(fifo.replicas[0], ReplicaUp)
