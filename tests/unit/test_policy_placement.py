"""Which replica takes a request: the rules, the dimensions, and what is learned."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.events import GpuRead
from policy.facts import Replica
from policy.hosts import Host
from policy.parameters import Inflight
from policy.parameters.placement import Affinity, Placement
from policy.placement import Placer
from policy.prefixes import PrefixTable
from policy.tiers import STABLE, Job
from tests.policy_support import MS, S, up

JOB = Job(0, STABLE, "P1", 10**13, 500, 100, S)


def hosts(count: int, **spec: Any) -> tuple[Host, ...]:
    made = []
    for number in range(count):
        replica = Replica(up(number, **spec), 32_768)
        made.append(Host(replica, Inflight(), PrefixTable(100)))
    return tuple(made)


def placer(**parameters: Any) -> Placer:
    return Placer(msgspec.convert(parameters, Placement))


def chosen(rule: Placer, among: tuple[Host, ...], job: Job = JOB, avoid: Any = ()) -> int | None:
    best = rule.choose(among, job, avoid, "m")
    return None if best is None else best[0].number


def read(host: Host, rule: Placer, now_ns: int = 0, **figures: Any) -> None:
    fields = {
        "free_mb": 1000, "pcie_permille": 0, "memory_permille": 0, "heat_permille": 300,
        "power_permille": 300, "throttled": False, "age_ns": 0,
    }  # fmt: skip
    host.replica.gpu = GpuRead(host.number, **(fields | figures))
    host.replica.gpu_ns = now_ns
    rule.refresh(host, now_ns)


def test_all_alike_the_first_is_taken_and_then_the_less_loaded() -> None:
    rule, among = placer(), hosts(3)
    assert chosen(rule, among) == 0
    among[0].replica.in_flight = 5
    assert chosen(rule, among) == 1
    assert chosen(rule, among, avoid={1}) == 2
    for host in among:
        host.out = True
    assert chosen(rule, among) is None


@pytest.mark.parametrize(
    "worse",
    [{"pcie_permille": 1000}, {"heat_permille": 1000}, {"power_permille": 1000}],
)
def test_a_card_with_a_busy_link_or_near_its_limit_is_worse(worse: dict[str, int]) -> None:
    rule, among = placer(), hosts(2)
    read(among[0], rule, **worse)
    read(among[1], rule)
    assert chosen(rule, among) == 1
    assert chosen(placer(rule="soonest"), among) == 0


def test_far_parts_full_memory_and_a_cold_prefix_are_worse() -> None:
    rule = placer()
    far, near = hosts(1, closeness_permille=500) + hosts(1)
    rule.refresh(far, 0)
    rule.refresh(near, 0)
    assert rule.score(far, JOB, "m").score_ns > rule.score(near, JOB, "m").score_ns
    full, empty = hosts(2)
    full.replica.kv_tokens = full.kv_most // 2
    row = rule.score(full, JOB, "m")
    assert (row.memory, rule.score(empty, JOB, "m").memory) == (500, 0)
    assert row.score_ns > row.done_ns
    warm, cold = hosts(2)
    warm.prefixes.add((7,), 400)
    warm.prefixes.remove((7,))
    job = msgspec.structs.replace(JOB, keys=(7,), block_tokens=400)
    assert rule.score(warm, job, "m").switch < rule.score(cold, job, "m").switch == 1000


def test_labels_are_conditions_or_wishes() -> None:
    affinity = {"m": Affinity(require=("vllm=0.32",), prefer=("rack=a",))}
    rule = Placer(Placement(affinity=affinity))
    plain = hosts(1)
    labelled = hosts(1, labels=("vllm=0.32",))
    best = hosts(1, labels=("vllm=0.32", "rack=a"))
    among = plain + labelled + best
    assert rule.required("m", among) == labelled + best
    assert rule.required("other", among) == among
    choice = rule.choose(labelled + best, JOB, (), "m")
    assert choice is not None
    assert choice[0] is best[0]
    assert rule.score(labelled[0], JOB, "m").affinity == 1000


def test_an_old_reading_says_nothing() -> None:
    rule, (host,) = placer(stale_ms=1000), hosts(1)
    read(host, rule, pcie_permille=1000, throttled=True)
    assert host.throttled
    assert host.factor > 1000
    rule.refresh(host, S + 1)
    assert not host.throttled
    assert host.factor == 1000


def test_a_replica_that_is_slower_than_predicted_is_avoided_and_then_tried_again() -> None:
    rule, among = placer(), hosts(2)
    for at in range(200):
        rule.observe(at * MS, among[0], 300 * MS, 100 * MS)
        rule.observe(at * MS, among[1], 100 * MS, 100 * MS)
    slow, quick = among
    assert slow.pace_ppm > 1.5 * quick.pace_ppm
    assert chosen(rule, among) == 1
    now_ns = S
    for _ in range(40):
        now_ns += 15 * S
        rule.fade(slow, now_ns)
        rule.fade(quick, now_ns)
    assert (slow.pace_ppm, slow.factor, quick.pace_ppm) == (1_000_000, 1000, 1_000_000)


def test_what_all_replicas_share_says_nothing_of_one() -> None:
    rule, among = placer(), hosts(2)
    for at in range(500):
        for host in among:
            rule.observe(at * MS, host, 150 * MS, 100 * MS)
    assert [abs(host.pace_ppm - 1_000_000) < 20_000 for host in among] == [True, True]


def test_the_weight_of_a_dimension_that_explains_slowness_grows_within_its_bound() -> None:
    rule, among = placer(adapt_most_permille=2000), hosts(2)
    read(among[0], rule, pcie_permille=1000, memory_permille=1000)
    read(among[1], rule)
    before = rule.state().weights_ppm[0]
    for at in range(2000):
        rule.observe(at * MS, among[0], 300 * MS, 100 * MS)
        rule.observe(at * MS, among[1], 100 * MS, 100 * MS)
    after = rule.state().weights_ppm[0]
    assert before < after <= 2 * before


def test_nothing_is_learned_where_that_is_switched_off() -> None:
    rule, (host,) = placer(adapt_permille=0), hosts(1)
    rule.observe(0, host, 300 * MS, 100 * MS)
    assert (host.pace_ppm, host.factor) == (1_000_000, 1000)


def test_a_replica_on_probation_is_tried_first() -> None:
    rule, among = placer(), hosts(3)
    among[2].probing = True
    assert chosen(rule, among) == 2


def test_the_rules_to_compare_with() -> None:
    among = hosts(4)
    among[0].replica.in_flight = 1
    assert chosen(placer(rule="least_loaded"), among) == 1
    jobs = [msgspec.structs.replace(JOB, request=request) for request in range(400)]
    taken = [chosen(placer(rule="random"), among, job) for job in jobs]
    assert all(60 < taken.count(number) < 140 for number in range(4))


def test_what_was_learned_survives_a_restart() -> None:
    rule, (host,) = placer(), hosts(1)
    read(host, rule, pcie_permille=1000)
    for at in range(50):
        rule.observe(at * MS, host, 170 * MS, 100 * MS)
    again = placer()
    again.load(rule.state())
    assert again.state() == rule.state()
