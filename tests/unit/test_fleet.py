"""Where replicas stand, what fails together, and cards cut into slices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twin.fleet import FleetError, card_of, cut, fleet_of, numbered, within

QWEN = "h100-sxm/qwen3-8b"


def test_replicas_fill_hosts_card_by_card_and_never_span_two() -> None:
    specs = fleet_of([(QWEN, 7), ("h100-sxm/llama-3.1-70b@tp4", 2)])
    assert [spec.domain for spec in specs] == [
        *(f"host0/card{number}" for number in range(7)),
        "host1/card0+1+2+3", "host1/card4+5+6+7",
    ]  # fmt: skip


def test_the_policy_is_told_where_a_replica_stands_and_what_it_loaded() -> None:
    (spec,) = fleet_of([(QWEN, 1)])
    spec = replace(spec, version="v1", labels=("vllm=0.32",), closeness_permille=700)
    up = spec.up()
    assert (up.version, up.domain, up.labels) == ("v1", "host0/card0", ("vllm=0.32",))
    assert (up.closeness_permille, up.memory_mb) == (700, spec.gpu.memory_bytes >> 20)
    assert spec.up("v2").version == "v2"
    assert spec.cold_start_ns == 100 * 10**9


@pytest.mark.parametrize(
    ("domain", "where", "inside"),
    [
        ("host0/card3/mig1", "host0", True),
        ("host0/card3/mig1", "host0/card3", True),
        ("host0/card3/mig1", "host0/card3/mig1", True),
        ("host0/card3/mig1", "host0/card3/mig0", False),
        ("host0/card3", "host0/card3/mig1", False),
        ("host0/card10", "host0/card1", False),
        ("host0/card0+1", "host0/card1", True),
        ("host0/card0+1", "host0/card0+1", True),
        ("host0/card0+1", "host0/card2", False),
        ("", "host0", False),
        ("host0", "", False),
    ],
)
def test_what_lies_in_a_domain(domain: str, where: str, inside: bool) -> None:
    assert within(domain, where) is inside


def test_slices_share_the_card_by_compute_and_memory() -> None:
    (whole,) = fleet_of([(QWEN, 1)])
    large, small = numbered(cut(whole, ["4g", "3g"]))
    assert [spec.domain for spec in (large, small)] == ["host0/card0/mig0", "host0/card0/mig1"]
    assert card_of(large) == card_of(small) == card_of(whole)
    assert (large.id, small.id) == (0, 1)
    assert small.memory_mb == whole.memory_mb // 2
    assert small.settings.kv_blocks < whole.settings.kv_blocks // 2
    assert small.cost.per_kv_token == 2 * whole.cost.per_kv_token
    assert small.cost.per_prefill_token == round(whole.cost.per_prefill_token * 7 / 3)
    assert large.cost.per_prefill_token == round(whole.cost.per_prefill_token * 7 / 4)
    assert large.usd_per_hour + small.usd_per_hour == pytest.approx(whole.usd_per_hour)
    assert small.up().cost[3] == small.cost.per_kv_token


@pytest.mark.parametrize(
    ("slices", "complaint"),
    [
        (["3g", "3g", "1g"], "take 7 of 7 parts of the compute and 9 of 8 of the memory"),
        (["4g", "4g"], "take 8 of 7 parts"),
        (["5g"], "no slice '5g': use 1g, 2g"),
        (["1g"], "slice 1g of .*do not fit .*: take a larger slice or a smaller model$"),
    ],
)
def test_a_card_holds_what_it_holds(slices: list[str], complaint: str) -> None:
    (whole,) = fleet_of([(QWEN, 1)])
    with pytest.raises(FleetError, match=complaint):
        cut(whole, slices)


def test_only_whole_cards_are_cut() -> None:
    (pair,) = fleet_of([("h100-sxm/llama-3.1-70b@tp4", 1)])
    with pytest.raises(FleetError, match="only a replica on one whole card"):
        cut(pair, ["3g"])
