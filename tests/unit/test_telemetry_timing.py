"""Per-hop times as callers are told."""

from __future__ import annotations

import pytest

from controller.call import EngineTimes, Hops
from controller.telemetry.timing import (
    parse,
    server_timing,
    server_timing_so_far,
    timing_object,
)
from tests.telemetry_support import MS, S, answer, call, dispatch


def test_every_hop_and_the_rest_in_ms() -> None:
    hops = Hops(412_345, 3 * MS, 1_500_000, 20 * MS, 200 * MS, 2 * MS, 230 * MS)
    text = server_timing(hops)
    assert text == (
        "gateway;dur=0.412, queue;dur=3.000, schedule;dur=1.500, prefill;dur=20.000,"
        " decode;dur=200.000, network;dur=2.000, rest;dur=3.088"
    )
    assert timing_object(hops) == {f"{name}_ms": ms for name, ms in parse(text).items()}
    assert sum(parse(text).values()) == pytest.approx(230.0, abs=0.004)


def test_what_is_not_known_is_left_out_and_the_rest_with_it() -> None:
    hops = Hops(MS, 2 * MS, -1, -1, -1, MS, 300 * MS)
    assert list(parse(server_timing(hops))) == ["gateway", "queue", "network"]
    assert timing_object(hops) == {"gateway_ms": 1.0, "queue_ms": 2.0, "network_ms": 1.0}


def test_a_rest_below_nothing_is_shown() -> None:
    assert parse(server_timing(Hops(MS, 0, 0, MS, 0, 0, MS)))["rest"] == -1.0


def test_of_a_call_that_is_over() -> None:
    made = call()
    dispatch(made)
    answer(made)
    found = parse(server_timing(made.hops()))
    assert found["queue"] == 10.0
    assert found["decode"] == 200.0
    assert sum(found.values()) == pytest.approx((made.settled_ns - made.entered_ns) / MS, abs=0.01)


def test_a_streams_headers_say_what_is_known_then() -> None:
    made = call(at_ns=S)
    made.gateway_ns = 250_000
    assert server_timing_so_far(made, 2 * S) == "gateway;dur=0.250"
    dispatch(made)
    assert parse(server_timing_so_far(made, made.dispatched_ns + 7 * MS)) == {
        "gateway": 0.25, "queue": 10.0, "first": 7.0,
    }  # fmt: skip
    made.first_ns = made.dispatched_ns + 6 * MS
    made.engine = EngineTimes(1, 2, 3)
    assert parse(server_timing_so_far(made, 5 * S))["first"] == 6.0


def test_parse_takes_what_proxies_add() -> None:
    text = 'cdn-cache;desc="HIT, near; dur=9", edge; dur=1.5;desc="a \\" b", miss, db;DUR="2"'
    assert parse(text) == {"edge": 1.5, "db": 2.0}
    assert parse("") == {}
