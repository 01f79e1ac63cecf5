"""The world: a request's way, the order of things, exactly one result per request."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from policy.compose import build_policy
from policy.decisions import Abort, Decision, Dispatch, Settled
from policy.events import Arrived, Cancelled, Event, Failed, Finished, FirstToken, Scraped, Ticked
from policy.files import load_policy
from tests.support import (
    BARE,
    MS,
    ListLog,
    ScriptedPolicy,
    bare_fleet,
    engine_settings,
    flat_cost,
    play_rows,
)
from twin.fleet import fleet_of
from twin.world import WorldError, WorldSettings

if TYPE_CHECKING:
    from policy.contract import Policy

STEP_NS = 1000
REAL = WorldSettings(gateway_ns=700, network_ns=300, scrape_every_ns=0, sample_every_ns=0)
OVERHEADS = (5000, 400, 20)


def fifo() -> Policy:
    return build_policy(load_policy("fifo"))


def one_replica(**changes: Any) -> list[Any]:
    return bare_fleet(1, engine_settings(**changes), flat_cost(STEP_NS))


def to_replica(*replicas: int) -> ScriptedPolicy:
    """Request n goes to ``replicas[n]`` at once; answers are settled."""

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            return [Dispatch(event.request, replicas[event.request], "")]
        if isinstance(event, Finished):
            return [Settled(event.request, "answered")]
        return []

    return ScriptedPolicy(decide)


def random_rows(seed: int, count: int) -> dict[str, list[Any]]:
    dice = random.Random(seed)  # noqa: S311
    outputs = [dice.randint(1, 60) for _ in range(count)]
    return {
        "arrival_s": sorted(
            round(dice.uniform(0, 0.002), dice.choice([4, 6])) for _ in range(count)
        ),
        "prompt_tokens": [dice.randint(1, 300) for _ in range(count)],
        "output_tokens": outputs,
        "max_output_tokens": [dice.choice([0, made, made + 9]) for made in outputs],
        "endpoint": [dice.choice(["chat", "chat", "embeddings"]) for _ in range(count)],
        "prefix_ids": [[dice.randint(1, 3)] * dice.randint(0, 4) for _ in range(count)],
        "prefix_block_tokens": [16] * count,
        "user_id": [dice.randint(1, 5) for _ in range(count)],
        "sla_class": [dice.choice(["P0", "P1", "P2"]) for _ in range(count)],
    }


# A request's way


def test_every_hop_of_a_request_takes_what_it_should() -> None:
    fleet = bare_fleet(1, engine_settings(), flat_cost(STEP_NS), overhead_ns=OVERHEADS)
    rows = {"arrival_s": [0.001], "prompt_tokens": [5], "output_tokens": [4]}
    _, (result,) = play_rows(rows, fleet, fifo(), settings=REAL)
    assert result.arrival_ns == result.dispatched_ns == MS
    assert result.scheduled_ns == MS + 700 + 300 + 5000 + 1
    assert result.first_ns == result.scheduled_ns + STEP_NS
    assert result.first_out_ns == result.first_ns + 20 + 300
    assert result.last_ns == result.scheduled_ns + 4 * STEP_NS
    assert result.settled_ns == result.last_ns + 400 + 4 * 20 + 300
    assert (result.outcome, result.http_code, result.tries) == ("answered", 200, 1)


def test_a_first_token_is_sent_after_those_of_the_sequences_that_run() -> None:
    fleet = bare_fleet(1, engine_settings(), flat_cost(STEP_NS), overhead_ns=OVERHEADS)
    rows = {"arrival_s": [0.0, 2e-6, 5e-6], "prompt_tokens": [5] * 3, "output_tokens": [4, 9, 9]}
    _, results = play_rows(rows, fleet, fifo(), settings=REAL)
    assert [result.turn for result in results] == [1, 2, 2]  # the first is over when the last comes
    for result in results:
        assert result.first_out_ns == result.first_ns + 20 * result.turn + 300
        tokens = result.output_tokens
        assert result.settled_ns == result.last_ns + 400 + 20 * tokens + 300


def test_a_short_answer_does_not_overtake_its_first_token() -> None:
    fleet = bare_fleet(1, engine_settings(), flat_cost(STEP_NS), overhead_ns=(5000, 0, 900))
    rows = {"arrival_s": [0.0] * 3, "prompt_tokens": [5] * 3, "output_tokens": [1, 2, 9]}
    log = ListLog()
    _, results = play_rows(rows, fleet, fifo(), settings=REAL, log=log)
    one, two, nine = results
    assert one.first_ns == one.last_ns
    assert [result.turn for result in results] == [1, 2, 3]
    assert one.first_out_ns == one.settled_ns == one.last_ns + 900 + 300
    assert nine.first_out_ns == nine.first_ns + 3 * 900 + 300
    assert two.settled_ns == max(two.first_out_ns, two.last_ns + 2 * 900 + 300)
    assert nine.settled_ns == nine.last_ns + 9 * 900 + 300
    told = [type(event).__name__ for _, event, _ in log.records if getattr(event, "request", 9) < 2]
    assert told.index("FirstToken") < told.index("Finished")


def test_an_embedding_has_no_first_token_and_no_tokens_to_put_out() -> None:
    fleet = bare_fleet(1, engine_settings(), flat_cost(STEP_NS), overhead_ns=OVERHEADS)
    rows = {"arrival_s": [0.0], "prompt_tokens": [5], "endpoint": ["embeddings"]}
    log = ListLog()
    _, (result,) = play_rows(rows, fleet, fifo(), settings=REAL, log=log)
    assert result.first_ns == result.first_out_ns == -1
    assert result.settled_ns == result.last_ns + 400 + 300
    (finished,) = (event for _, event, _ in log.records if isinstance(event, Finished))
    assert finished.output_tokens == 0


def test_the_policy_hears_usage_and_not_before_the_end() -> None:
    log = ListLog()
    rows = {
        "arrival_s": [0.0, 0.1],
        "prompt_tokens": [10, 10],
        "output_tokens": [7, 8],
        "prefix_ids": [[1, 2], [1, 2]],
        "prefix_block_tokens": [4, 4],
    }
    play_rows(rows, one_replica(), fifo(), log=log)
    told = [event for _, event, _ in log.records if isinstance(event, Finished)]
    assert told == [Finished(0, 0, 10, 0, 7), Finished(1, 0, 10, 8, 8)]
    kinds = [type(event).__name__ for _, event, _ in log.records]
    assert kinds == ["ReplicaUp", *["Arrived", "FirstToken", "Finished"] * 2]


def test_what_arrives_is_told_as_a_gateway_sees_it() -> None:
    log = ListLog()
    rows = {
        "arrival_s": [0.5],
        "prompt_tokens": [100],
        "output_tokens": [7],
        "prompt_bytes": [444],
        "max_output_tokens": [50],
        "model": ["m"],
        "endpoint": ["completions"],
        "sla_class": ["P0"],
        "business_line": ["search"],
        "user_id": [12],
        "session_id": [34],
        "deadline_s": [1.5],
        "prefix_ids": [[5, 6]],
        "prefix_block_tokens": [16],
    }
    play_rows(rows, one_replica(), fifo(), log=log)
    (event,) = (event for _, event, _ in log.records if isinstance(event, Arrived))
    assert event == Arrived(
        request=0, model="m", endpoint="completions", prompt_bytes=444, max_tokens=50, sla="P0",
        line="search", user="u12", session="s34", deadline_ns=1_500 * MS, prefix=(5, 6),
        prefix_block_bytes=64,
    )  # fmt: skip


# Exactly one result


@pytest.mark.parametrize("name", ["fifo", "stable"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_request_has_exactly_one_result(name: str, replicas: int) -> None:
    log = ListLog()
    rows = random_rows(replicas, 300)
    cost = flat_cost(STEP_NS, per_prefill_token_ns=3)
    fleet = bare_fleet(replicas, engine_settings(kv_blocks=400), cost)
    world, results = play_rows(
        rows, fleet, build_policy(load_policy(name)), log=log, settings=REAL, chunk_rows=37
    )
    assert len(results) == 300
    settled = Counter(
        decision.request
        for _, _, decisions in log.records
        for decision in decisions
        if isinstance(decision, Settled)
    )
    assert settled == dict.fromkeys(range(300), 1)
    assert [result.arrival_ns for result in results] == [
        round(value * 1e9) for value in rows["arrival_s"]
    ]
    assert world.queued == world.refused == 0


@pytest.mark.parametrize("seed", range(6))
def test_skipping_changes_nothing_in_the_world(seed: int) -> None:
    """The log, the results and the samples of the same run, every decision taken or not."""
    settings = replace(
        REAL, scrape_every_ns=7000, scrape_age_ns=1500, sample_every_ns=5000, network_ns=300 * seed
    )
    runs = []
    for skip in (False, True):
        log = ListLog()
        fleet = bare_fleet(
            2, engine_settings(kv_blocks=160, async_scheduling=bool(seed % 2)),
            flat_cost(STEP_NS, per_kv_token_ns=seed % 3, per_prefill_token_ns=3),
            overhead_ns=OVERHEADS,
        )  # fmt: skip
        rows = random_rows(seed, 120)
        del rows["user_id"]  # or limits by user would hold them back for seconds of tiny steps
        world, results = play_rows(
            rows, fleet, build_policy(load_policy("stable")), log=log, settings=settings, skip=skip
        )
        runs.append((log.records, results, world.samples, world.gpu_busy_share(world.now_ns)))
    for slow, fast in zip(*runs, strict=True):
        assert slow == fast


def test_a_policy_that_loses_a_request_is_found_out() -> None:
    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived) and event.request != 1:
            return [Dispatch(event.request, 0, "")]
        return [Settled(event.request, "answered")] if isinstance(event, Finished) else []

    rows = {"arrival_s": [0.0, 0.1, 0.2]}
    with pytest.raises(WorldError, match=r"1 requests were never settled \(first ids: 1\)"):
        play_rows(rows, one_replica(), ScriptedPolicy(decide))


def test_a_lost_request_is_found_out_although_the_world_is_watched() -> None:
    """Samples and scrapes go on while anything is open: not for ever."""
    policy = ScriptedPolicy(lambda now_ns, event: [])
    settings = WorldSettings(call_timeout_ns=2 * 10**9)
    with pytest.raises(WorldError, match=r"2 requests .*first ids: 0, 1"):
        play_rows({"arrival_s": [0.0, 9.0]}, one_replica(), policy, settings=settings)


def test_a_policy_that_wants_to_be_ticked_for_ever_does_not_keep_the_world_going() -> None:
    class Ticking(ScriptedPolicy):
        """Every 5 us, whatever happens."""

        due_ns = 5000

        def step(self, now_ns: int, event: Event) -> tuple[Decision, ...]:
            if isinstance(event, Ticked):
                self.due_ns += 5000
            return super().step(now_ns, event)

        def deadline_ns(self) -> int | None:
            return self.due_ns

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            return [Dispatch(event.request, 0, "")]
        return [Settled(event.request, "answered")] if isinstance(event, Finished) else []

    log = ListLog()
    rows = {"arrival_s": [0.0], "output_tokens": [22]}
    play_rows(rows, one_replica(), Ticking(decide), log=log)
    ticks = [now_ns for now_ns, event, _ in log.records if isinstance(event, Ticked)]
    assert ticks == [5000, 10_000, 15_000, 20_000]


def test_a_call_needs_a_time_out() -> None:
    with pytest.raises(ValueError, match="call_timeout_ns is 0: it must be at least 2"):
        WorldSettings(call_timeout_ns=0)


def test_a_policy_that_never_settles_an_answer_is_found_out() -> None:
    policy = ScriptedPolicy(
        lambda now_ns, event: [Dispatch(event.request, 0, "")] if isinstance(event, Arrived) else []
    )
    with pytest.raises(WorldError, match=r"2 requests .*first ids: 0, 1"):
        play_rows({"arrival_s": [0.0, 0.1]}, one_replica(), policy)


def test_a_request_that_the_engine_cannot_hold_is_rejected_after_a_way_there_and_back() -> None:
    """Its bytes look harmless: only the server's tokenizer knows."""
    fleet = bare_fleet(
        1, engine_settings(max_model_len=50), flat_cost(STEP_NS), overhead_ns=OVERHEADS
    )
    rows = {"arrival_s": [0.0, 0.0], "prompt_tokens": [50, 49], "prompt_bytes": [8, 8]}
    log = ListLog()
    _, results = play_rows(rows, fleet, fifo(), settings=REAL, log=log)
    assert [result.outcome for result in results] == ["failed", "answered"]
    assert (results[0].why, results[0].http_code) == ("rejected", 400)
    assert results[0].settled_ns == 700 + 300 + 5000 + 300
    assert Failed(0, 0, "rejected") in [event for _, event, _ in log.records]


def test_a_request_too_large_for_every_replica_is_not_even_sent() -> None:
    rows = {"arrival_s": [0.0], "prompt_tokens": [49], "max_output_tokens": [52]}
    _, (result,) = play_rows(rows, one_replica(max_model_len=50), fifo())
    assert (result.outcome, result.why, result.http_code) == ("failed", "too_large", 400)
    assert result.dispatched_ns == result.replica == -1


# Order at the same instant


def names(log: ListLog, at_ns: int) -> list[str]:
    return [
        f"{type(event).__name__} {getattr(event, 'request', '')}"
        for now_ns, event, _ in log.records
        if now_ns == at_ns
    ]


def test_arrivals_come_before_answers_of_the_same_instant() -> None:
    """Request 0 is answered at 1 + 2 steps: exactly when request 1 arrives."""
    log = ListLog()
    rows = {"arrival_s": [0.0, (2 * STEP_NS + 1) / 1e9], "output_tokens": [2, 1]}
    play_rows(rows, one_replica(), fifo(), log=log)
    assert names(log, 2 * STEP_NS + 1) == ["Arrived 1", "Finished 0"]


def test_arrivals_come_before_what_is_on_its_way_back() -> None:
    """Request 0 is answered at 1301, and that is told at 1601: when request 1 arrives."""
    log = ListLog()
    rows = {"arrival_s": [0.0, 1601e-9]}
    play_rows(rows, one_replica(), fifo(), log=log, settings=replace(BARE, network_ns=300))
    assert names(log, 1601) == ["Arrived 1", "FirstToken 0", "Finished 0"]


def test_arrivals_of_one_instant_come_in_the_traces_order_across_chunks() -> None:
    log = ListLog()
    play_rows({"arrival_s": [0.25] * 7}, one_replica(), fifo(), log=log, chunk_rows=2)
    assert names(log, 250 * MS) == [f"Arrived {request}" for request in range(7)]


def test_engines_that_end_a_step_at_the_same_instant_answer_in_the_order_of_their_numbers() -> None:
    log = ListLog()
    fleet = bare_fleet(3, engine_settings(), flat_cost(STEP_NS))
    play_rows({"arrival_s": [0.0] * 3}, fleet, to_replica(2, 0, 1), log=log)
    assert names(log, STEP_NS + 1) == [
        f"{kind} {request}" for kind in ("FirstToken", "Finished") for request in (1, 2, 0)
    ]


def test_a_dispatch_at_the_end_of_a_step_waits_for_the_next_one() -> None:
    """It reaches the engine at the boundary itself, and decisions see what came before them."""
    rows = {"arrival_s": [0.0, (STEP_NS + 1) / 1e9], "output_tokens": [3, 1]}
    _, results = play_rows(rows, one_replica(), fifo())
    assert results[1].scheduled_ns == 2 * STEP_NS + 1


# Giving up


def cancelling(at_ns: int, abort: bool = True) -> ScriptedPolicy:
    """Request 0's client goes away when request 1 arrives, at ``at_ns``."""

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            decisions: list[Decision] = [Dispatch(event.request, 0, "")]
            if event.request == 1:
                assert now_ns == at_ns
                decisions += [Abort(0, 0)] if abort else []
                decisions.append(Settled(0, "cancelled", "", "client", 499))
            return decisions
        return [Settled(event.request, "answered")] if isinstance(event, Finished) else []

    return ScriptedPolicy(decide)


def test_an_aborted_request_stops_working_and_gives_its_seat_to_the_next() -> None:
    at_ns = 2500
    log = ListLog()
    rows = {"arrival_s": [0.0, at_ns / 1e9], "output_tokens": [50, 2]}
    world, results = play_rows(rows, one_replica(max_num_seqs=1), cancelling(at_ns), log=log)
    assert [result.outcome for result in results] == ["cancelled", "answered"]
    assert results[0].settled_ns == at_ns
    assert results[0].last_ns == -1
    assert results[1].scheduled_ns == 3 * STEP_NS + 1
    told = [event.request for _, event, _ in log.records if isinstance(event, Finished)]
    assert told == [1]
    assert world.replicas[0].engine.steps == 3 + 2


def test_an_abort_takes_the_network_to_the_engine() -> None:
    at_ns = 2500
    rows = {"arrival_s": [0.0, at_ns / 1e9], "output_tokens": [50, 2]}
    settings = replace(BARE, network_ns=2 * STEP_NS)
    world, _ = play_rows(rows, one_replica(max_num_seqs=1), cancelling(at_ns), settings=settings)
    # Works from 2001 on; the abort is there at 4500, in its third step.
    assert world.replicas[0].engine.steps == 3 + 2


def test_a_request_settled_without_an_abort_works_on_unheard() -> None:
    at_ns = 2500
    log = ListLog()
    rows = {"arrival_s": [0.0, at_ns / 1e9], "output_tokens": [50, 2]}
    world, results = play_rows(rows, one_replica(), cancelling(at_ns, abort=False), log=log)
    assert [result.outcome for result in results] == ["cancelled", "answered"]
    told = [event.request for _, event, _ in log.records if isinstance(event, Finished)]
    assert told == [1]
    assert world.replicas[0].engine.steps == 50


@pytest.mark.parametrize("name", ["fifo", "stable"])
def test_a_client_that_goes_away_is_cancelled_once(name: str) -> None:
    """Fed by hand, as a live gateway would: in flight, and again when it is long settled."""
    policy = build_policy(load_policy(name))
    log = ListLog()

    class Leaving:
        """Passes on what the policy decides; with the first token of 0 its client is gone."""

        deadline_ns = policy.deadline_ns
        snapshot = policy.snapshot

        def step(self, now_ns: int, event: Event) -> list[Decision]:
            if isinstance(event, FirstToken) and event.request == 0:
                return [*policy.step(now_ns, event), *policy.step(now_ns, Cancelled(0))]
            return list(policy.step(now_ns, event))

    rows = {"arrival_s": [0.0, 0.0], "output_tokens": [40, 60]}
    world, results = play_rows(rows, one_replica(), Leaving(), log=log)
    assert [result.outcome for result in results] == ["cancelled", "answered"]
    assert results[0].settled_ns == results[0].first_out_ns == STEP_NS + 1
    assert policy.step(world.now_ns, Cancelled(0)) == ()


def test_a_request_sent_again_is_counted_as_tried_twice() -> None:
    """The first replica's engine refuses it; the policy tries the second."""
    small, large = bare_fleet(2, engine_settings(), flat_cost(STEP_NS))
    small = replace(small, settings=engine_settings(max_model_len=10))

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            return [Dispatch(event.request, 0, "")]
        if isinstance(event, Failed):
            return [Dispatch(event.request, 1, "")]
        return [Settled(event.request, "answered")] if isinstance(event, Finished) else []

    rows = {"arrival_s": [0.0], "prompt_tokens": [20], "output_tokens": [3]}
    _, (result,) = play_rows(rows, [small, large], ScriptedPolicy(decide), settings=REAL)
    assert (result.outcome, result.tries, result.replica) == ("answered", 2, 1)
    assert result.dispatched_ns == 700 + 300 + 300
    assert result.scheduled_ns == result.dispatched_ns + 700 + 300 + 1


# Looking on


def test_the_policy_is_given_metrics_as_old_as_they_are() -> None:
    """Scraped at 2000 and 4000, told at 2700 and 4700; nothing is scraped after the end."""
    log = ListLog()
    settings = replace(BARE, scrape_every_ns=2 * STEP_NS, scrape_age_ns=700)
    rows = {"arrival_s": [0.0], "prompt_tokens": [7], "output_tokens": [5]}
    fleet = one_replica(kv_blocks=11)
    play_rows(rows, fleet, fifo(), settings=settings, log=log)
    told = [(now_ns, event) for now_ns, event, _ in log.records if isinstance(event, Scraped)]
    assert told[:2] == [
        (2700, Scraped(0, 1, 0, 200, 0, 700)),
        (4700, Scraped(0, 1, 0, 300, 0, 700)),
    ]
    assert len(told) == 3


def test_samples_show_where_requests_wait() -> None:
    """One in the engine's batch, one in the engine's queue, two in the policy's."""
    released = 6 * STEP_NS

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived) and event.request < 2:
            return [Dispatch(event.request, 0, "")]
        if isinstance(event, Arrived) and event.request == 4:
            assert now_ns == released
            return [Dispatch(request, 0, "") for request in (2, 3, 4)]
        return [Settled(event.request, "answered")] if isinstance(event, Finished) else []

    rows = {"arrival_s": [0.0] * 4 + [released / 1e9], "output_tokens": [9] * 5}
    settings = replace(BARE, sample_every_ns=STEP_NS)
    world, _ = play_rows(
        rows, one_replica(max_num_seqs=1), ScriptedPolicy(decide), settings=settings
    )
    by_time = {sample.at_ns: sample for sample in world.samples}
    seen = by_time[3 * STEP_NS]
    assert (seen.queued, seen.running, seen.waiting) == (2, 1, 1)
    later = by_time[8 * STEP_NS]
    assert (later.queued, later.running, later.waiting) == (0, 1, 4)
    assert world.samples[-1].running == world.samples[-1].waiting == 0


def test_samples_are_bounded_and_keep_the_peaks() -> None:
    """Two bursts in a run that is sampled 1200 times at first: the bound is 100."""
    bursts = [at for at in (0.0, 0.0010) for _ in range(100)]
    rows = {"arrival_s": bursts, "output_tokens": [12] * 200}
    runs = []
    for most in (10**9, 100):
        settings = replace(BARE, sample_every_ns=1000, samples_max=most)
        runs.append(play_rows(rows, one_replica(), fifo(), settings=settings)[0].samples)
    every, few = runs
    assert len(every) > 1000
    assert 25 <= len(few) < 100
    times = [sample.at_ns for sample in few]
    assert times == sorted(set(times))
    assert times[-1] >= every[-1].at_ns - 64_000
    first, second = (
        [max(s.waiting for s in samples if start <= s.at_ns < start + MS) for samples in runs]
        for start in (0, MS)
    )
    assert first[0] == first[1] > 80  # it was sampled before it was thinned
    assert second[0] >= second[1] > 60


def test_a_fleet_of_several_profiles_serves_each_its_own_model() -> None:
    fleet = fleet_of([("h100-sxm/qwen3-8b", 1), ("h100-sxm/llama-3.1-8b", 2)])
    rows = {
        "arrival_s": [0.0, 0.1, 0.2, 0.3],
        "model": ["llama-3.1-8b", "qwen3-8b", "llama-3.1-8b", "gpt"],
    }
    _, results = play_rows(rows, fleet, fifo(), settings=replace(BARE, gateway_ns=10**9))
    assert [result.replica for result in results] == [1, 0, 2, -1]
    assert (results[3].outcome, results[3].http_code) == ("shed", 503)


def test_a_fleet_needs_a_replica_of_each_profile() -> None:
    with pytest.raises(ValueError, match="0 replicas"):
        fleet_of([])
    with pytest.raises(ValueError, match="qwen3-8b: 0 replicas"):
        fleet_of([("h100-sxm/qwen3-8b", 0)])
