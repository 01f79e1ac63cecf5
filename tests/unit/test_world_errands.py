"""Clients that wait, and what a policy may ask for: second runs, checkpoints, kept answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from policy.decisions import (
    Abort,
    Alert,
    Decision,
    Dispatch,
    LookUp,
    SaveCheckpoint,
    Settled,
    Verify,
)
from policy.events import (
    Arrived,
    Cancelled,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    Failed,
    Finished,
    LookedUp,
    Verified,
)
from policy.outcomes import failed
from tests.support import (
    BARE,
    MS,
    ListLog,
    ScriptedPolicy,
    bare_fleet,
    chunk_of,
    engine_settings,
    flat_cost,
    play_rows,
)
from twin.arrivals import Asked
from twin.faults import BadWeights, EngineHung, EngineKilled
from twin.world import Features, Result, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from policy.decisions import Verification
    from twin.fleet import ReplicaSpec

STEP_NS = 1000
WAYS = replace(BARE, network_ns=300)
WORDS: dict[str, Verification] = {
    "match": "match", "mismatch": "mismatch", "failed": "skipped_budget",
}  # fmt: skip


def fleet(count: int = 2, **changes: Any) -> list[ReplicaSpec]:
    specs = bare_fleet(count, engine_settings(**changes), flat_cost(STEP_NS))
    return [replace(spec, version=f"v{spec.id}") for spec in specs]


def scripted(answered: Callable[[Finished], list[Decision]], candidates: int = 0) -> ScriptedPolicy:
    """To replica 0 at once; ``answered`` says what to do with an answer."""

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            return [Dispatch(event.request, 0, "", candidates=candidates)]
        if isinstance(event, Finished):
            return answered(event)
        if isinstance(event, Failed):
            return [failed(event.request, event.kind)]
        if isinstance(event, Cancelled):
            return [Abort(event.request, 0), Settled(event.request, "cancelled", "", "client", 499)]
        if isinstance(event, Verified):
            return [Settled(event.request, "answered", verification=WORDS[event.verdict])]
        if isinstance(event, CheckpointSaved | CheckpointFailed | LookedUp):
            return [Settled(event.request, "answered")]
        return []

    return ScriptedPolicy(decide)


def told(log: ListLog, *kinds: type) -> list[tuple[int, Any]]:
    return [(now_ns, event) for now_ns, event, _ in log.records if isinstance(event, kinds)]


def settle(event: Finished) -> list[Decision]:
    return [Settled(event.request, "answered")]


def verify_on(replica: int) -> Callable[[Finished], list[Decision]]:
    return lambda event: [Verify(event.request, replica)]


class Answers:
    """Replica 0 is unsure and wrong on even requests; everything it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def features(self, request: int, asked: Any, row: int, **where: Any) -> Features:
        self.asked.append((request, where))
        right = where["replica"] != 0 or request % 2 == 1
        return Features(100 + where["shift_permille"], 900, 50, not right, right)

    def verdict(self, request: int, first: bool, second: bool) -> Literal["match", "mismatch"]:
        return "match" if first == second else "mismatch"


# Clients


class Talker(Asked):
    """Asks again when it has its answer, as long as it has turns."""

    def __init__(self, world: World, turns: int, told: list[Any]) -> None:
        super().__init__(prompt_tokens=5, output_tokens=3, user="u", session="s", chain="c7",
                         step="plan", resume="k1", stream=False)  # fmt: skip
        self._world = world
        self._turns = turns
        self._told = told

    def settled(self, result: Result, decision: Settled) -> None:
        self._told.append((self._world.now_ns, result, decision))
        if self._turns > 1:
            following = Talker(self._world, self._turns - 1, self._told)
            self._world.after(10_000, lambda event: self._world.offer(following) and None)
        else:
            self._world.clients -= 1


def test_a_client_asks_hears_and_asks_again() -> None:
    log = ListLog()
    world = World(fleet(), scripted(settle), log, lambda chunk: None, BARE)
    heard: list[Any] = []
    world.clients = 1
    world.after(5000, lambda event: world.offer(Talker(world, 3, heard)) and None)
    world.run(iter(()))
    assert [now_ns for now_ns, _ in told(log, Arrived)] == [5000, 18_001, 31_002]
    assert [now_ns for now_ns, _, _ in heard] == [8001, 21_002, 34_003]
    assert [result.arrival_ns for _, result, _ in heard] == [5000, 18_001, 31_002]
    assert {decision.outcome for _, _, decision in heard} == {"answered"}
    _, event = told(log, Arrived)[0]
    assert (event.user, event.session, event.chain, event.step, event.resume, event.stream) == (
        "u", "s", "c7", "plan", "k1", False,
    )  # fmt: skip
    assert event.prompt_bytes == 20


def test_a_client_may_ask_again_in_the_moment_it_hears() -> None:
    """While the policy's decision is being carried out."""
    log = ListLog()
    world = World(fleet(), scripted(settle), log, lambda chunk: None, BARE)
    left = [3]

    class Hasty(Asked):
        def settled(self, result: Result, decision: Settled) -> None:
            left[0] -= 1
            if left[0]:
                world.offer(Hasty(prompt_tokens=1, output_tokens=1))
            else:
                world.clients -= 1

    world.clients = 1
    world.after(0, lambda event: world.offer(Hasty(prompt_tokens=1, output_tokens=1)) and None)
    world.run(iter(()))
    assert [event.request for _, event in told(log, Arrived)] == [0, 1, 2]
    assert world.queued == 0


def test_a_client_that_goes_away_cancels_its_request() -> None:
    log = ListLog()
    world = World(fleet(max_num_seqs=1), scripted(settle), log, lambda chunk: None, BARE)
    results: list[Result] = []

    class Leaver(Asked):
        def settled(self, result: Result, decision: Settled) -> None:
            results.append(result)
            world.clients -= 1

    def begin(event: object) -> None:
        request = world.offer(Leaver(prompt_tokens=1, output_tokens=50))
        world.after(7000, lambda event: world.cancel(request))

    world.clients = 1
    world.after(0, begin)
    world.run(iter(()))
    assert [(result.outcome, result.settled_ns) for result in results] == [("cancelled", 7000)]
    assert [now_ns for now_ns, _ in told(log, Cancelled)] == [7000]


def test_clients_and_a_trace_play_side_by_side_and_ids_rise() -> None:
    log = ListLog()
    chunks: list[Any] = []

    def begin(event: object) -> None:
        worlds[0].offer(Asked(prompt_tokens=1, output_tokens=1))

    worlds: list[World] = []
    policy = scripted(settle)
    world = World(fleet(), policy, log, chunks.append, BARE)
    worlds.append(world)
    world.after(1500, begin)
    world.run(iter([chunk_of({"arrival_s": [0.0, 1e-6, 2e-6]})]))
    assert [(now_ns, event.request) for now_ns, event in told(log, Arrived)] == [
        (0, 0), (1000, 1), (1500, 2), (2000, 3),
    ]  # fmt: skip
    assert [result.arrival_ns for result in chunks[0].results] == [0, 1000, 2000]


# Second runs


def test_an_answer_is_run_again_elsewhere_and_compared() -> None:
    log, answers = ListLog(), Answers()
    rows = {"arrival_s": [0.0, 0.1], "output_tokens": [3, 3]}
    world, results = play_rows(
        rows, fleet(), scripted(verify_on(1)), log=log, answers=answers, settings=WAYS
    )
    way_ns = 300 + 3 * STEP_NS + 300 + 1
    assert [(now_ns % (100 * MS), event) for now_ns, event in told(log, Verified)] == [
        (2 * way_ns, Verified(0, 1, "mismatch", 3)),
        (2 * way_ns, Verified(1, 1, "match", 3)),
    ]
    assert [(result.correct, result.verification) for result in results] == [
        (0, "mismatch"), (1, "match"),
    ]  # fmt: skip
    assert [result.answered_ns - result.arrival_ns for result in results] == [way_ns] * 2
    assert [replica.engine.held for replica in world.replicas] == [0, 0]
    requests = [(request, where["replica"], where["version"]) for request, where in answers.asked]
    assert requests == [(0, 0, "v0"), (0, 1, "v1"), (1, 0, "v0"), (1, 1, "v1")]


def test_the_policy_sees_what_an_answer_looks_like_but_not_whether_it_is_right() -> None:
    log = ListLog()
    script = scripted(settle, candidates=20)
    play_rows({"arrival_s": [0.0]}, fleet(), script, log=log, answers=Answers())
    ((_, event),) = told(log, Finished)
    assert event == Finished(0, 0, 1, 0, 1, 100, 900, 50, True)
    log = ListLog()
    play_rows({"arrival_s": [0.0]}, fleet(), scripted(settle), log=log, answers=Answers())
    ((_, event),) = told(log, Finished)
    assert event == Finished(0, 0, 1, 0, 1), "nothing was asked for that it could be seen from"


def test_the_second_run_ends_with_its_replica_or_its_request() -> None:
    """Killed, hanging, too long for it, or cancelled by the client while it runs."""
    log = ListLog()
    rows = {"arrival_s": [0.0], "output_tokens": [5]}
    kill = EngineKilled(at_s=9e-6, on=1)
    _, (result,) = play_rows(
        rows, fleet(), scripted(verify_on(1)), log=log, settings=WAYS, faults=[kill]
    )
    assert told(log, Verified) == [(9300, Verified(0, 1, "failed"))]
    assert (result.outcome, result.verification) == ("answered", "skipped_budget")

    log = ListLog()
    hang = EngineHung(at_s=9e-6, on=1)
    settings = replace(WAYS, call_timeout_ns=1_000_000)
    play_rows(rows, fleet(), scripted(verify_on(1)), log=log, settings=settings, faults=[hang])
    began_ns = 300 + 5 * STEP_NS + 300 + 1
    assert told(log, Verified) == [(began_ns + 1_000_000, Verified(0, 1, "failed"))]

    log = ListLog()
    large, small = fleet()
    small = replace(small, settings=engine_settings(max_model_len=3))
    long = {**rows, "prompt_tokens": [5]}
    play_rows(long, [large, small], scripted(verify_on(1)), log=log, settings=WAYS)
    assert [event.verdict for _, event in told(log, Verified)] == ["failed"]

    log = ListLog()
    world = World(fleet(), scripted(verify_on(1)), log, lambda chunk: None, WAYS)
    world.after(0, lambda event: world.offer(Asked(prompt_tokens=1, output_tokens=5)) and None)
    world.after(8000, lambda event: world.cancel(0))
    world.clients = 1
    world.after(9000, lambda event: setattr(world, "clients", 0))
    world.run(iter(()))
    assert not told(log, Verified)
    assert world.replicas[1].engine.steps < 5


def test_the_original_failing_over_does_not_touch_an_answer_that_is_being_checked() -> None:
    """Replica 0 dies after it answered: the second run on replica 1 goes on."""
    log = ListLog()
    kill = EngineKilled(at_s=7e-6, on=0)
    rows = {"arrival_s": [0.0], "output_tokens": [5]}
    _, (result,) = play_rows(
        rows, fleet(), scripted(verify_on(1)), log=log, settings=WAYS, faults=[kill]
    )
    assert not told(log, Failed)
    assert (result.outcome, result.verification) == ("answered", "match")


# The store and the cache


def test_a_chains_state_is_saved_after_a_while_or_not_at_all() -> None:
    log = ListLog()
    rows = {"arrival_s": [0.0] * 400}
    settings = replace(BARE, checkpoint_ns=5000, checkpoint_fail_permille=250)
    policy = scripted(lambda event: [SaveCheckpoint(event.request, "c", "plan")])
    _, results = play_rows(rows, fleet(1, max_num_seqs=60), policy, settings=settings, log=log)
    saved, lost = told(log, CheckpointSaved), told(log, CheckpointFailed)
    assert len(saved) + len(lost) == 400
    assert 60 < len(lost) < 140
    now_ns, event = saved[0]
    assert event == CheckpointSaved(event.request, f"c{event.request}")
    assert now_ns == results[event.request].answered_ns + 5000


def test_similar_answers_are_found_as_often_as_the_settings_say() -> None:
    log = ListLog()
    settings = replace(
        BARE, lookup_ns=2000, cache_hit_permille=300, cache_age_most_ns=1000, call_timeout_ns=MS
    )
    policy = scripted(lambda event: [LookUp(event.request)])
    play_rows(
        {"arrival_s": [0.0] * 400}, fleet(1, max_num_seqs=60), policy, settings=settings, log=log
    )
    looked = [event for _, event in told(log, LookedUp)]
    found = [event for event in looked if event.found]
    assert len(looked) == 400
    assert 80 < len(found) < 160
    assert {0 <= event.age_ns <= 1000 for event in found} == {True}
    assert {700 <= event.confidence_permille <= 1000 for event in found} == {True}
    assert {event.age_ns for event in looked if not event.found} == {0}


def test_the_seed_decides_what_is_found() -> None:
    def found(seed: int) -> list[bool]:
        log = ListLog()
        settings = replace(BARE, cache_hit_permille=500)
        policy = scripted(lambda event: [LookUp(event.request)])
        play_rows({"arrival_s": [0.0] * 60}, fleet(), policy, settings=settings, log=log, seed=seed)
        return [event.found for _, event in told(log, LookedUp)]

    assert found(1) == found(1) != found(2)


def test_decisions_that_ask_for_nothing_are_only_written_down() -> None:
    log = ListLog()
    policy = scripted(lambda event: [Alert("k", "a cause"), Settled(event.request, "answered")])
    play_rows({"arrival_s": [0.0]}, fleet(), policy, log=log)
    kinds = Counter(type(decision).__name__ for _, _, made in log.records for decision in made)
    assert kinds == {"Dispatch": 1, "Alert": 1, "Settled": 1}


def test_bad_weights_move_the_answers_of_a_version_while_they_last() -> None:
    """The second answer comes in the time, from replica 0; its second run is on another version."""
    answers = Answers()
    bad = BadWeights(at_s=0.05, version="v0", shift_permille=400, for_s=0.1)
    rows = {"arrival_s": [0.0, 0.1, 0.2]}
    play_rows(rows, fleet(), scripted(verify_on(1)), answers=answers, faults=[bad])
    shifts = [(request, where["shift_permille"]) for request, where in answers.asked]
    assert shifts == [(0, 0), (0, 0), (1, 400), (1, 0), (2, 0), (2, 0)]
