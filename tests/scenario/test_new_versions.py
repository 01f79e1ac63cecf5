"""A new version takes over under load, good or bad, and an engine hangs: nobody looks after it.

Two H100s serve with v1, two standbys can be started. The policy is the shipped one. A good version
is alone in the end; a bad one never is, and in no case does a request fail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.compose import build_policy
from policy.decisions import Alert, Dispatch, Rotated, Start, Stop
from policy.events import Event, ReplicaDown, ReplicaUp, RolloutRequested, Standby
from policy.files import load_policy
from tests.support import ListLog, S, chunk_of
from twin.drawn_answers import Answers, DrawnAnswers
from twin.faults import BadWeights, ColdStart, EngineHung, EngineKilled, StartFails
from twin.fleet import fleet_of
from twin.scenario.happenings import schedule
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from policy.decisions import Decision
    from twin.faults import Fault
    from twin.world import Result

MODEL = "qwen3-8b"
ASKED_S = 20
START_S = 30.0
SURE = {
    "entropy_mean": {"fixed": 300}, "entropy_worst": {"fixed": 1500},
    "close_permille": {"fixed": 10}, "correct": 1.0,
}  # fmt: skip
LOST = {
    "entropy_mean": {"fixed": 2000}, "entropy_worst": {"fixed": 3000},
    "close_permille": {"fixed": 290}, "correct": 0.2,
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "rules": [{"kinds": [SURE | {"share": 1}], "bad": LOST | {"share": 1}}],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Played:
    world: World
    results: list[Result]
    records: list[tuple[int, Event, tuple[Decision, ...]]]

    def decided(self, *kinds: type) -> list[tuple[float, Any]]:
        """(when in seconds, what)."""
        return [
            (now_ns / S, decision)
            for now_ns, _, decisions in self.records
            for decision in decisions
            if isinstance(decision, kinds)
        ]

    def told(self, *kinds: type) -> list[tuple[float, Any]]:
        return [
            (now_ns / S, event) for now_ns, event, _ in self.records if isinstance(event, kinds)
        ]

    def alerts(self, key: str) -> list[tuple[float, str]]:
        return [(at_s, alert.cause) for at_s, alert in self.decided(Alert) if alert.key == key]

    def served_by(self, from_s: float) -> Counter[str]:
        """Requests that arrived from then on, by the version of who was sent them last."""
        versions: dict[int, str] = {}
        sent: Counter[str] = Counter()
        for now_ns, event, decisions in self.records:
            if isinstance(event, ReplicaUp):
                versions[event.replica] = event.version
            for decision in decisions:
                if isinstance(decision, Dispatch) and now_ns >= from_s * S:
                    sent[versions[decision.replica]] += 1
        return sent

    def up(self) -> dict[int, str]:
        return {each.id: each.version for each in self.world.replicas if each.state == "up"}


def play(
    length_s: int, *faults: Fault, version: str = "v2", standbys: int = 2, **settings: int
) -> Played:
    """Two requests a second; ``version`` is asked for after 20 s, unless it is empty."""
    specs = [
        replace(spec, version="v1", cold_start_ns=round(START_S * S))
        for spec in fleet_of([(f"h100-sxm/{MODEL}", 2 + standbys)])
    ]
    log, results = ListLog(), list[Any]()
    world = World(
        specs[:2], build_policy(load_policy("stable")), log,
        lambda chunk: results.extend(chunk.results), WorldSettings(**settings),
        standbys=specs[2:], faults=faults,
        answers=DrawnAnswers(msgspec.convert(ANSWERS, Answers), 0),
    )  # fmt: skip
    if version:
        schedule(world, [(ASKED_S * S, RolloutRequested(MODEL, version))])
    count = 2 * length_s
    rows = {
        "request_id": range(count), "arrival_s": [each / 2 for each in range(count)],
        "model": [MODEL] * count, "prompt_tokens": [300] * count, "prompt_bytes": [1200] * count,
        "output_tokens": [60] * count, "max_output_tokens": [100] * count,
        "user_id": range(count),
    }  # fmt: skip
    world.run(iter([chunk_of(rows)]))
    assert world.refused == 0
    return Played(world, results, log.records)


def test_a_good_version_is_alone_in_the_end() -> None:
    played = play(420)
    switched_s = [at_s for at_s, each in played.decided(Rotated) if each.state == "draining"]
    assert len(switched_s) == 2
    assert ASKED_S + START_S <= switched_s[0] == switched_s[1] <= ASKED_S + START_S + 5
    assert [each.replica for _, each in played.decided(Stop)] == [0, 1]
    assert all(300 <= at_s - switched_s[0] <= 301 for at_s, _ in played.decided(Stop))
    assert played.up() == {2: "v2", 3: "v2"}
    assert played.served_by(switched_s[0] + 1).keys() == {"v2"}
    assert not played.decided(Alert)
    assert {result.outcome for result in played.results} == {"answered"}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (StartFails(at_s=0, version="v2"), "the new replica did not start"),
        (ColdStart(at_s=0, keeps_version=True), "another version was loaded"),
    ],
)
def test_a_version_that_does_not_start_or_is_another_never_serves(fault: Fault, cause: str) -> None:
    played = play(120, fault)
    [(at_s, told)] = played.alerts(f"rollout {MODEL}")
    assert told == cause
    assert at_s <= ASKED_S + START_S + 1
    assert played.served_by(0).keys() == {"v1"}
    assert {one: v for one, v in played.up().items() if v == "v1"} == {0: "v1", 1: "v1"}
    assert {each.state for each in played.world.replicas[2:]} == {"standby"}
    assert {result.outcome for result in played.results} == {"answered"}


def test_a_version_that_answers_badly_is_taken_back() -> None:
    """Half of its answers look lost. That is doubted after three whole minutes, and then at once
    everything goes to the version before, which is not cut off for what the other did."""
    bad = BadWeights(at_s=0, version="v2", shift_permille=500)
    played = play(420, bad)
    [(back_s, told)] = played.alerts(f"rollout {MODEL}")
    assert told == "rolled back: a breaker opened"
    assert ASKED_S + START_S + 180 < back_s < ASKED_S + START_S + 245
    assert played.served_by(back_s + 1).keys() == {"v1"}
    assert played.up() == {0: "v1", 1: "v1"}
    assert {each.replica for _, each in played.decided(Stop)} == {2, 3}
    late = [result for result in played.results if result.arrival_ns > (back_s + 1) * S]
    assert {result.outcome for result in late} == {"answered"}
    assert {result.outcome for result in played.results} <= {"answered", "degraded"}


def test_a_version_that_hangs_is_taken_back_and_not_started_again() -> None:
    hang = EngineHung(at_s=70, on=2)
    played = play(200, hang, hung_restart_ns=5 * S)
    [(back_s, told)] = played.alerts(f"rollout {MODEL}")
    assert told == "rolled back: a new replica is out: silent"
    assert 70 < back_s < 75
    assert played.up() == {0: "v1", 1: "v1"}
    assert played.served_by(back_s + 1).keys() == {"v1"}


def test_the_place_of_what_died_between_waves_is_never_given_up() -> None:
    """One standby for two. The new one dies while the next is started, and is a standby itself when
    an old version takes its place: two serve in the end, though one could bear the load."""
    played = play(500, EngineKilled(at_s=57, on=2, restart_s=5), standbys=1)
    [(back_s, told)] = played.alerts(f"rollout {MODEL}")
    assert told == "rolled back: a new replica went down"
    assert back_s == pytest.approx(57, abs=0.01)
    standby_s = {each.replica: at_s for at_s, each in played.told(Standby)}
    [(in_s, _)] = [(at_s, each) for at_s, each in played.decided(Rotated)
                   if at_s > back_s and each.state == "in"]  # fmt: skip
    assert back_s < standby_s[2] < in_s
    assert played.up() == {0: "v1", 1: "v1"}
    assert {result.outcome for result in played.results} == {"answered"}


# An engine that hangs


def test_what_hangs_is_replaced_restarted_and_then_stands_by() -> None:
    played = play(120, EngineHung(at_s=20, on=0), version="", standbys=1, hung_restart_ns=5 * S)
    [(hung_s, _)] = [each for each in played.decided(Rotated) if each[1].why == "hung"]
    assert 20 < hung_s < 30
    assert played.decided(Start) == [(hung_s, Start(2))]
    [(down_s, down)] = played.told(ReplicaDown)
    assert down.reason == "hung"
    assert down_s - hung_s < 0.01
    [(again_s, _)] = [each for each in played.told(Standby) if each[0] > 0]
    assert 5 <= again_s - down_s < 5.01
    assert played.up() == {1: "v1", 2: "v1"}
    assert {result.outcome for result in played.results} <= {"answered", "failed"}
    failed = [result for result in played.results if result.outcome == "failed"]
    assert all(result.arrival_ns < (hung_s + 1) * S for result in failed)


def test_without_a_standby_it_comes_up_again() -> None:
    played = play(120, EngineHung(at_s=20, on=0), version="", standbys=0, hung_restart_ns=5 * S)
    [(up_s, _)] = [each for each in played.told(ReplicaUp) if each[0] > 0]
    [(hung_s, _)] = [each for each in played.decided(Rotated) if each[1].why == "hung"]
    assert up_s == pytest.approx(hung_s + 5 + START_S, abs=0.01)
    assert played.up() == {0: "v1", 1: "v1"}
    assert played.served_by(up_s).total() > 0


def test_without_a_supervisor_it_is_tried_until_it_answers() -> None:
    played = play(120, EngineHung(at_s=20, on=0, for_s=30), version="", standbys=0)
    assert any(each.why == "hung" for _, each in played.decided(Rotated))
    assert not played.told(ReplicaDown)
    [(back_s, _)] = [each for each in played.decided(Rotated) if each[1].why == "probe_answered"]
    assert 50 < back_s < 85
    assert [replica.steps > 0 for replica in played.world.replicas] == [True, True]
