"""The dynamic tiered queue: tags, order, shares, lending, holding, shedding, retries."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from policy.decisions import Abort, Dispatch, Settled
from policy.events import Cancelled, ReplicaDown, Ticked
from policy.facts import Recent
from policy.parameters import Classes, Line, Tiers
from policy.tiers import BATCH, FALLBACK, LENT, STABLE, TFLOP, TURBO, Job, Pool, Tags
from tests.policy_support import MS, QUEUE_ALONE, Bench, Checked, S, arrived, parameters, up

SHARES = (0, 150, 200, 100, 50)


def tiered(replicas: int = 1, spec: dict[str, Any] | None = None, **sections: Any) -> Checked:
    checked = Checked(parameters("tiered", **(QUEUE_ALONE | sections)))
    for replica in range(replicas):
        checked.bring_up(up(replica, **(spec or {})))
    return checked


# Tags


@pytest.mark.parametrize(
    ("sla", "tflop", "strikes", "tier"),
    [("P0", 49, 0, TURBO), ("P0", 50, 0, STABLE), ("P0", 900, 0, STABLE), ("P1", 1, 0, STABLE),
     ("P1", 199, 1, STABLE), ("P1", 200, 0, BATCH), ("P2", 1, 0, BATCH), ("P0", 1, 2, FALLBACK),
     ("P2", 1, 5, FALLBACK)],
)  # fmt: skip
def test_the_tier_follows_class_complexity_and_failures(
    sla: str, tflop: int, strikes: int, tier: int
) -> None:
    assert Tags(Classes(), Tiers()).tier(sla, tflop * TFLOP, strikes) == tier


def test_the_class_and_deadline_come_from_caller_then_line_then_default() -> None:
    lines = {"search": Line("P0"), "logs": Line("P2", 60_000)}
    tags = Tags(Classes(lines=lines), Tiers())

    def tagged(**fields: Any) -> tuple[str, int]:
        event = arrived(0, **fields)
        sla = tags.sla(event)
        return sla, tags.deadline_ns(event, sla) // MS

    assert tagged() == ("P1", 4000)
    assert tagged(sla="P2") == ("P2", 10_000)
    assert tagged(sla="gold") == ("P1", 4000)
    assert tagged(line="search") == ("P0", 1500)
    assert tagged(line="logs") == ("P2", 60_000)
    assert tagged(line="logs", sla="P0") == ("P0", 60_000)
    assert tagged(line="logs", deadline_ns=70 * MS) == ("P2", 70)


def test_aging_bounds_how_far_off_a_deadline_counts() -> None:
    tags = Tags(Classes(), Tiers(aging_ms=20_000))
    job = Job(0, STABLE, "P1", 1, 1, 1, due_ns=3600 * S)
    assert tags.order_ns(job, 5 * S, None) == 25 * S


def test_users_who_were_served_badly_are_moved_up_a_little() -> None:
    tags = Tags(Classes(), Tiers())
    job = Job(0, STABLE, "P1", 1, 1, 1, due_ns=4 * S)
    recent = Recent()
    recent.add(1 * S, "", 0)
    assert tags.order_ns(job, 0, recent) == 4 * S
    recent.add(2 * S, "", 0)  # above Stable's promise
    assert tags.order_ns(job, 0, recent) == 3600 * MS
    failing = Recent()
    failing.add(1, "http_5xx", 0)
    assert tags.order_ns(job, 0, failing) == 3600 * MS


# The queue by itself


class Queue:
    """A pool that serves whatever has its turn."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.pool = Pool((0,), SHARES, self.jobs)
        self.next = 0

    def push(self, tier: int, order_ns: int = 0, flops: int = TFLOP, long: bool = False) -> int:
        request = self.next
        self.next += 1
        job = Job(
            request, tier, "P1", flops, 1, 1, 0, order_ns=order_ns, work_ns=10, long=long,
            queued=True,
        )  # fmt: skip
        self.jobs[request] = job
        self.pool.push(job)
        return request

    def serve(self) -> Job:
        job, _, payer = next(iter(self.pool.turns()))
        self.pool.remove(job)
        self.pool.started(job.tier, job.flops, job.tier if payer < 0 else payer)
        return job


def test_the_earliest_deadline_goes_first_and_ties_go_by_id() -> None:
    queue = Queue()
    for order_ns in (30, 10, 20, 10):
        queue.push(STABLE, order_ns)
    queue.push(STABLE, 15, long=True)
    assert [queue.serve().request for _ in range(5)] == [1, 3, 4, 2, 0]
    assert list(queue.pool.turns()) == []


def test_tiers_go_in_their_order_when_nothing_is_owed() -> None:
    queue = Queue()
    for tier in (FALLBACK, BATCH, STABLE, LENT, TURBO):
        queue.push(tier)
    assert queue.serve().tier == TURBO
    queue = Queue()
    for tier in (FALLBACK, BATCH, STABLE, LENT):
        queue.push(tier)
    assert queue.serve().tier == LENT


@pytest.mark.parametrize("costs", [{}, {BATCH: 7 * TFLOP, STABLE: 3 * TFLOP}])
def test_every_waiting_tier_gets_its_guaranteed_share_of_the_work(costs: dict[int, int]) -> None:
    served = flooded((TURBO, STABLE, BATCH, FALLBACK), costs)
    for tier in (STABLE, BATCH, FALLBACK):
        assert served[tier] == pytest.approx(SHARES[tier] / 1000, abs=0.01)
    assert served[TURBO] == pytest.approx(0.65, abs=0.02)


def test_what_turbo_lent_has_a_share_of_its_own_and_stables_turns_by_deadline() -> None:
    served = flooded((TURBO, LENT, STABLE), {})
    assert served[TURBO] == pytest.approx(0.65, abs=0.01)
    assert served[LENT] == pytest.approx(0.35, abs=0.01)  # all are due before Stable's
    served = flooded((TURBO, LENT, STABLE), {}, lent_order_ns=2)
    assert served[LENT] == pytest.approx(0.15, abs=0.01)
    assert served[STABLE] == pytest.approx(0.20, abs=0.01)


def flooded(
    tiers: tuple[int, ...], costs: dict[int, int], lent_order_ns: int = 0
) -> dict[int, float]:
    """Share of the work that each tier gets when all have more than enough."""
    queue = Queue()
    for tier in tiers:
        for _ in range(3000):
            order_ns = lent_order_ns if tier == LENT else 1
            queue.push(tier, order_ns, flops=costs.get(tier, TFLOP))
    served: Counter[int] = Counter()
    for _ in range(2000):
        job = queue.serve()
        served[job.tier] += job.flops
    return {tier: served[tier] / sum(served.values()) for tier in tiers}


def test_a_tier_is_owed_nothing_for_the_time_when_it_did_not_wait() -> None:
    queue = Queue()
    for _ in range(100):
        queue.push(TURBO)
        queue.push(STABLE)
    while queue.pool.waiting[3 * STABLE]:
        queue.serve()
    for _ in range(50):
        queue.push(TURBO)
    for _ in range(10):
        queue.serve()
    queue.push(STABLE)
    assert [queue.serve().tier for _ in range(4)] == [TURBO] * 4


def test_nothing_waits_longer_than_aging_allows() -> None:
    """However late the deadline, what comes more than ``aging`` later goes behind it."""
    queue = Queue()
    tags = Tags(Classes(), Tiers(aging_ms=1000))
    patient = queue.push(STABLE, tags.order_ns(Job(0, STABLE, "P1", 1, 1, 1, 10**15), 0, None))
    served = []
    for at_ms in range(0, 3000, 100):
        job = Job(0, STABLE, "P1", 1, 1, 1, at_ms * MS + 300 * MS)
        queue.push(STABLE, tags.order_ns(job, at_ms * MS, None))
        served.append(queue.serve().request)
    assert served.index(patient) == 7  # from 700 ms on, all others are due later or tie


def test_cancelled_jobs_leave_no_trace() -> None:
    queue = Queue()
    for order_ns in range(1000):
        queue.push(BATCH, order_ns)
    for request in range(999, 0, -1):
        queue.pool.remove(queue.jobs.pop(request))
    assert queue.pool.queued == 1
    assert sum(len(lane) for lane in queue.pool._lanes) < 100  # pyright: ignore[reportPrivateUsage]
    assert queue.serve().request == 0
    assert queue.pool.ahead_ns(FALLBACK, 10**12) == 0


def test_a_request_that_waits_here_again_waits_once() -> None:
    """It was taken off, and comes back for another model that the same replicas serve."""
    queue = Queue()
    for order_ns in (1, 2, 3):
        queue.push(STABLE, order_ns)
    last = queue.jobs.pop(2)
    queue.pool.remove(last)
    queue.jobs[2] = again = msgspec.structs.replace(last, order_ns=4)
    queue.pool.push(again)
    assert [queue.serve().request for _ in range(2)] == [0, 1]
    queue.pool.remove(queue.jobs.pop(2))
    assert list(queue.pool.turns()) == []


def test_the_wait_ahead_counts_what_goes_before() -> None:
    queue = Queue()
    for _ in range(20):
        queue.push(TURBO)
    for order_ns in (1 * S, 2 * S, 30 * S):
        queue.push(STABLE, order_ns)
    pool = queue.pool
    assert pool.ahead_ns(TURBO, S) == 200
    assert pool.ahead_ns(STABLE, 3 * S) == 100  # its own 20, on a share of 200 per mille
    assert pool.ahead_ns(BATCH, 3 * S) == 0  # alone in its tier, it is next on its share


# The policy


def test_an_idle_fleet_sends_at_once_where_it_is_done_soonest() -> None:
    checked = tiered(2)
    for _ in range(4):
        checked.arrive()
    assert [checked.in_flight[request] for request in range(4)] == [0, 1, 0, 1]


def test_a_replica_that_has_the_prefix_is_preferred() -> None:
    checked = tiered(2)
    fields = {"tokens": 2000, "prefix": tuple(range(15)), "prefix_block_bytes": 512}
    checked.arrive(tokens=100)
    checked.arrive(**fields)
    assert checked.in_flight[1] == 1
    checked.first(0)
    checked.first(1)
    checked.arrive(tokens=100)
    checked.first(2)
    checked.arrive(**fields)
    assert checked.in_flight[3] == 1


def test_requests_wait_here_and_not_in_the_engine() -> None:
    checked = tiered(1, {"max_num_seqs": 10}, inflight={"reserve_permille": 0})
    for _ in range(30):
        checked.arrive()
    assert len(checked.in_flight) == 10
    checked.finish(0)
    assert len(checked.in_flight) == 10


def test_kv_tokens_are_reserved_for_prompt_and_expected_output() -> None:
    checked = tiered(1, {"kv_blocks": 1001}, inflight={"kv_permille": 1000, "reserve_permille": 0})
    for _ in range(40):
        checked.arrive(tokens=1000, max_tokens=100)
        for request in sorted(checked.in_flight):
            if request == checked.next_request - 1:
                checked.first(request)
    assert len(checked.in_flight) == 15  # 16,000 tokens by 1,060 each


def test_long_prompts_are_capped_and_let_short_ones_pass() -> None:
    checked = tiered(
        1, inflight={"long_prefill_tokens": 4000, "long_prefill_cap_tokens": 8000}
    )  # fmt: skip
    for _ in range(3):
        checked.arrive(tokens=4000)
    assert sorted(checked.in_flight) == [0, 1]
    short = checked.arrive(tokens=100)
    assert short in checked.in_flight
    checked.first(0)
    assert sorted(checked.in_flight) == [0, 1, 2, short]


def test_the_reserve_is_for_turbo() -> None:
    checked = tiered(1, {"max_num_seqs": 100}, inflight={"reserve_permille": 100})
    for _ in range(150):
        checked.arrive(tokens=10, sla="P1")
    in_flight = len(checked.in_flight)
    assert in_flight == 102 * 9 // 10
    turbo = checked.arrive(tokens=10, sla="P0")
    assert checked.in_flight[turbo] == 0
    assert checked.dispatches[-1].tier == "turbo"


def test_background_work_does_not_starve_under_a_turbo_flood() -> None:
    """Twice what one replica can do arrives as Turbo; Batch still gets its tenth."""
    bench = Bench(
        parameters("tiered", tiers={"lend_wait_ms": 0}, shedding={"enabled": False}), 1,
        max_num_seqs=8,
    )  # fmt: skip
    flood = [(at * 10 * MS, {"tokens": 500, "sla": "P0", "max_tokens": 100}) for at in range(2000)]
    batch = [
        (at * 10 * MS + 1, {"tokens": 500, "sla": "P2", "max_tokens": 100}) for at in range(300)
    ]
    bench.run(sorted(flood + batch, key=lambda item: item[0]), answer_ns=150 * MS)
    until_ns = 15 * S
    started = Counter(
        bench.checked.arrivals[request].sla
        for request, at_ns in bench.started_ns.items()
        if at_ns < until_ns
    )
    share = started["P2"] / sum(started.values())
    assert share == pytest.approx(0.1, abs=0.015)
    assert len(bench.checked.outcomes) == 2300


def test_turbo_goes_before_stable_before_batch() -> None:
    checked = tiered(1, {"max_num_seqs": 1}, shedding={"enabled": False})
    first = checked.arrive(sla="P0")
    for sla in ("P2", "P1", "P0", "P2", "P1", "P0"):
        checked.arrive(sla=sla)
    checked.finish(first)
    order = [first]
    while checked.in_flight:
        order += checked.in_flight
        checked.finish(order[-1])
    tiers = [dispatch.tier for dispatch in checked.dispatches]
    # Turbo's two; the shares owed by then; the rest in order.
    assert tiers[:3] == ["turbo"] * 3
    assert sorted(tiers[3:]) == ["batch", "batch", "stable", "stable"]
    assert tiers[3] == "stable"


def test_turbo_lends_its_costlier_requests_when_its_wait_is_long() -> None:
    sections: dict[str, Any] = {"tiers": {"lend_wait_ms": 300}, "shedding": {"enabled": False}}
    bench = Bench(parameters("tiered", **sections), 1, max_num_seqs=8)
    cheap = [(at * 20 * MS, {"tokens": 500, "sla": "P0"}) for at in range(600)]
    costly = [(at * 200 * MS, {"tokens": 2000, "sla": "P0"}) for at in range(60)]
    plain = [(at * 200 * MS, {"tokens": 1500, "sla": "P1"}) for at in range(60)]
    bench.run(sorted(cheap + costly + plain, key=lambda item: item[0]), answer_ns=150 * MS)
    arrivals = sorted(cheap + costly + plain, key=lambda item: item[0])
    waits: dict[str, list[int]] = {"turbo": [], "lent": [], "stable": []}
    for dispatch in bench.checked.dispatches:
        request = dispatch.request
        waits[dispatch.tier].append(bench.started_ns[request] - arrivals[request][0])
    assert len(waits["lent"]) > 10
    lent = [dispatch.request for dispatch in bench.checked.dispatches if dispatch.tier == "lent"]
    assert all(bench.checked.arrivals[request].prompt_bytes == 8000 for request in lent)
    p95 = {tier: sorted(times)[len(times) * 95 // 100] for tier, times in waits.items()}
    assert p95["lent"] < p95["stable"]


def test_only_what_cannot_meet_its_deadline_is_shed_and_it_is_told_when_to_come_back() -> None:
    checked = tiered(1, {"max_num_seqs": 1})
    checked.arrive()
    outcomes = []
    for _ in range(60):
        request = checked.arrive(tokens=4000, max_tokens=500)
        outcomes.append(checked.outcomes.get(request))
    shed = [outcome for outcome in outcomes if outcome is not None]
    assert outcomes[0] is None
    assert shed
    assert outcomes == [None] * (60 - len(shed)) + shed  # once hopeless, always hopeless
    for outcome in shed:
        assert (outcome.outcome, outcome.why, outcome.http_code) == ("shed", "deadline", 429)
        assert outcome.retry_after_ns >= S
    assert shed[-1].retry_after_ns >= shed[0].retry_after_ns


def test_a_request_is_shed_when_its_last_chance_passes_and_not_before() -> None:
    checked = tiered(1, {"max_num_seqs": 1})
    checked.arrive()
    waiting = checked.arrive(tokens=1000, sla="P0")
    due_ns = checked.policy.deadline_ns()
    assert due_ns is not None
    # Deadline 1.5 s less a prefill of 6 ms and 1,000 tokens at 22 us.
    assert due_ns == pytest.approx(1500 * MS - 28 * MS, abs=MS)
    checked.now_ns = due_ns - 1
    assert checked.feed(Ticked()) == ()
    checked.now_ns = due_ns
    (decision,) = checked.feed(Ticked())
    assert isinstance(decision, Settled)
    assert (decision.request, decision.why) == (waiting, "deadline")
    assert checked.policy.deadline_ns() is None


def test_without_shedding_only_a_full_queue_refuses() -> None:
    checked = tiered(1, {"max_num_seqs": 1}, shedding={"enabled": False, "queue_max": 5})
    for _ in range(8):
        checked.arrive(tokens=4000)
    assert {request: outcome.why for request, outcome in checked.outcomes.items()} == {
        6: "queue_full", 7: "queue_full",
    }  # fmt: skip
    assert checked.policy.deadline_ns() is None
    assert checked.outcomes[6].retry_after_ns == 30 * S


def test_a_failed_request_is_tried_on_another_replica() -> None:
    checked = tiered(2)
    request = checked.arrive()
    assert checked.fail(request, "http_5xx") == (Dispatch(request, 1, "stable"),)
    assert checked.fail(request, "http_5xx")[0] == Settled(
        request, "failed", "stable", "http_5xx", 502, S
    )


@pytest.mark.parametrize("kind", ["rejected", "too_large"])
def test_the_callers_fault_is_not_tried_again(kind: str) -> None:
    checked = tiered(2)
    checked.fail(checked.arrive(), kind)
    assert checked.outcomes[0].http_code == 400


def test_a_stream_that_has_begun_is_never_moved() -> None:
    checked = tiered(2)
    for stream, moved in ((True, False), (False, True)):
        request = checked.arrive(stream=stream)
        checked.first(request)
        checked.fail(request, "stream_cut")
        assert (request in checked.in_flight) is moved


def test_retries_have_a_budget() -> None:
    checked = tiered(3, retries={"budget_least": 2, "budget_permille": 0})
    requests = [checked.arrive() for _ in range(6)]
    for request in requests:
        checked.fail(request, "http_5xx")
    assert sorted(checked.in_flight) == requests[:2]
    for request in requests[:2]:
        checked.finish(request)
    again = checked.arrive()
    checked.fail(again, "http_5xx")  # the budget is free again
    assert again in checked.in_flight


def test_what_an_ejected_replica_held_is_outside_the_budget() -> None:
    none = {"budget_least": 0, "budget_permille": 0}
    checked = tiered(2, retries=none, health={"failures_most": 2})
    for _ in range(6):
        checked.arrive()
    bad = checked.dispatches[0].replica
    held = [sent.request for sent in checked.dispatches if sent.replica == bad]
    assert len(held) == 3
    for request in held:  # with the second its replica leaves the rotation
        checked.fail(request, "http_5xx")
    assert [request in checked.in_flight for request in held] == [False, True, True]


def test_what_a_replica_failed_may_be_a_little_late() -> None:
    for grace_ms, moved in ((1500, True), (0, False)):
        checked = tiered(2, retries={"grace_ms": grace_ms})
        request = checked.arrive(sla="P0")
        checked.fail(request, "silent", 1600 * MS)  # past its class's deadline to first token
        assert (request in checked.in_flight) is moved
        request = checked.arrive(sla="P0")
        checked.fail(request, "empty", 1600 * MS)
        assert (request in checked.in_flight) is moved
    checked = tiered(2)
    request = checked.arrive(sla="P0", deadline_ns=1500 * MS)  # its caller's own word
    checked.fail(request, "silent", 1600 * MS)
    assert request not in checked.in_flight


def test_two_time_outs_lead_to_fallback_and_a_lighter_model() -> None:
    checked = tiered(0, tiers={"fallback_model": "light"})
    for replica, models in enumerate((("m",), ("m",), ("m", "light"))):
        checked.bring_up(up(replica, models=models))
    request = checked.arrive(user="ann")
    checked.fail(request, "timeout")
    (abort, dispatch) = checked.fail(request, "timeout")
    assert abort == Abort(request, checked.dispatches[-2].replica)
    assert dispatch == Dispatch(request, 2, "fallback", 0, "light")
    checked.finish(request)
    assert checked.outcomes[request] == Settled(request, "degraded", "fallback", "model light")


def test_a_user_with_two_time_outs_is_taken_into_fallback_until_one_is_answered() -> None:
    checked = tiered(1)
    for _ in range(2):
        checked.fail(checked.arrive(user="ann", sla="P0"), "timeout")
    request = checked.arrive(user="ann", sla="P0")
    assert checked.dispatches[-1].tier == "fallback"
    checked.finish(request)
    checked.arrive(user="ann", sla="P0")
    assert checked.dispatches[-1].tier == "turbo"


def test_with_the_last_replica_gone_everything_that_waits_is_told_503() -> None:
    checked = tiered(1, {"max_num_seqs": 1})
    for _ in range(4):
        checked.arrive()
    checked.replicas.clear()
    checked.feed(ReplicaDown(0, "gone"))
    assert {request: o.http_code for request, o in checked.outcomes.items()} == {
        1: 503, 2: 503, 3: 503,
    }  # fmt: skip
    checked.fail(0, "replica_lost")
    assert checked.outcomes[0].why == "replica_lost"


def test_a_new_replica_takes_what_waits() -> None:
    checked = tiered(1, {"max_num_seqs": 2})
    for _ in range(6):
        checked.arrive()
    checked.bring_up(up(1))
    assert len(checked.in_flight) == 6


def test_a_client_that_leaves_the_queue_is_settled_without_an_abort() -> None:
    checked = tiered(1, {"max_num_seqs": 1})
    checked.arrive()
    waiting = checked.arrive()
    assert checked.feed(Cancelled(waiting)) == (
        Settled(waiting, "cancelled", "stable", "client", 499),
    )


def test_a_prefill_whose_first_token_is_never_reported_frees_its_room_in_time() -> None:
    checked = tiered(1)
    for _ in range(4):
        checked.arrive(tokens=4000, stream=False)
    assert len(checked.in_flight) == 2
    checked.tick()
    checked.tick()
    assert len(checked.in_flight) == 4
    assert 160 * MS < checked.now_ns < 300 * MS, "8,000 tokens are prefilled within .2 s"


def test_embeddings_go_to_pooling_replicas_and_text_never_does() -> None:
    checked = tiered(1)
    checked.bring_up(up(1, pooling=True))
    for _ in range(3):
        checked.arrive(endpoint="embeddings")
        checked.arrive()
    assert [checked.in_flight[request] for request in range(6)] == [1, 0] * 3


def test_models_that_share_a_replica_take_turns() -> None:
    checked = tiered(0, shedding={"enabled": False})
    checked.bring_up(up(0, max_num_seqs=1, models=("a", "b")))
    checked.bring_up(up(1, max_num_seqs=1, models=("b",)))
    for model in ("b", "b"):
        checked.arrive(model=model)
    for _ in range(20):
        checked.arrive(model="a")
        checked.arrive(model="b")
    served: Counter[str] = Counter()
    for _ in range(16):
        request = next(r for r, where in checked.in_flight.items() if where == 0)
        served[checked.arrivals[request].model] += 1
        checked.finish(request)
    assert served["a"] >= 7
    assert served["b"] >= 7
