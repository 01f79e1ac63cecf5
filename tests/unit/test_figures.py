"""The collectors of a scenario's run, each against a small case that can be counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policy.decisions import (
    Alert,
    BreakerMoved,
    Dispatch,
    Refused,
    Rotated,
    Settled,
    Start,
)
from policy.events import Arrived, GpuFault, ReplicaDown, ReplicaUp, Ticked
from tests.support import ListLog, S, bare_fleet, engine_settings, flat_cost
from traces.generate.lengths import Law, Lognormal
from twin.dice import Dice, quantile_of
from twin.figures import Above, Measure, Span
from twin.figures.bounds import upper_share
from twin.figures.columns import Row
from twin.figures.contexts import Contexts
from twin.figures.hours import Hours
from twin.figures.incidents import Incidents
from twin.figures.requests import HELD_ROWS, Requests
from twin.figures.spread import Spread, Trickle, Windows
from twin.figures.watch import Watch
from twin.world import Result


def up(replica: int) -> ReplicaUp:
    (spec,) = bare_fleet(1, engine_settings(), flat_cost())
    event = spec.up()
    return ReplicaUp(replica, *(getattr(event, name) for name in event.__struct_fields__[1:]))


# Dice


def test_draws_depend_on_their_keys_only() -> None:
    dice = Dice(3, "a", "b")
    assert dice.uniform(1, 2) == Dice(3, "a", "b").at(1).uniform(2)
    others = (Dice(4, "a", "b"), Dice(3, "b", "a"), Dice(3, "a"), dice.at(0))
    assert len({dice.uniform(1, 2), *(other.uniform(1, 2) for other in others)}) == 5
    drawn = [dice.uniform(number) for number in range(20_000)]
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(drawn[:-1], drawn[1:])[0, 1] == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize(
    "law",
    [
        Law(lognormal=Lognormal(mean=200, sigma=0.7), low=10, high=900),
        Law(quantiles={0.0: 5.0, 0.5: 20.0, 0.9: 300.0, 1.0: 400.0}),
        Law(quantiles={0.25: 7.0, 0.75: 9.0}),
        Law(fixed=12, high=10),
    ],
)
def test_a_law_by_key_has_the_distribution_of_the_law_in_sequence(law: Law) -> None:
    dice, value_at = Dice(1, "law"), quantile_of(law)
    by_key = np.sort([value_at(dice.uniform(number)) for number in range(20_000)])
    in_sequence = np.sort(law.draw(np.random.default_rng(2), 20_000))
    steps = np.unique(np.concatenate((by_key, in_sequence)))
    shares = (np.searchsorted(drawn, steps, "right") / 20_000 for drawn in (by_key, in_sequence))
    assert np.abs(np.subtract(*shares)).max() < 0.02  # Kolmogorov and Smirnov: .1 % by chance


# Bounds and spreads


@pytest.mark.parametrize(
    ("count", "of", "bound"),
    [
        (0, 100, 0.029513),  # 1 - 0.05 ** (1 / 100)
        (0, 1_000_000, 2.99573e-06),
        (1, 10, 0.394163),  # Clopper-Pearson, from tables
        (5, 100, 0.102253),
        (10, 10, 1.0),
        (2000, 1_000_000, 0.00207596),
        (2001, 1_000_000, 0.00207594),
    ],
)
def test_the_upper_bound_of_a_share(count: int, of: int, bound: float) -> None:
    assert upper_share(count, of) == pytest.approx(bound, rel=1e-3)


def test_of_nothing_there_is_no_bound() -> None:
    assert upper_share(0, 0) is None


def test_a_spread_knows_mean_and_deviation() -> None:
    values = np.random.default_rng(1).lognormal(0, 1, 5000)
    whole, trickle = Spread(), Trickle()
    whole.add(values[:3000])
    whole.add(values[3000:])
    for value in values:
        trickle.add(float(value))
    for figures in (whole.figures(), trickle.figures()):
        assert figures["count"] == 5000
        assert figures["mean"] == pytest.approx(values.mean())
        assert figures["sd"] == pytest.approx(values.std())
        assert figures["p99"] == pytest.approx(np.quantile(values, 0.99), rel=0.02)
        assert figures["most"] == pytest.approx(values.max())
    assert Spread().figures() == {
        "count": 0, "mean": None, "sd": None, "p50": None, "p95": None, "p99": None, "most": None,
    }  # fmt: skip


def test_windows_are_compared_with_each_other() -> None:
    windows = Windows(10, least=50)
    at_s = np.arange(0, 400, 0.1)
    windows.add(at_s[::-1], np.where(at_s[::-1] < 200, 0.5, 2.0))
    windows.add(np.array([1000.0]), np.array([90.0]))  # one answer makes no window
    figures = windows.figures()
    assert figures["count"] == 40
    assert figures["p99_mean"] == pytest.approx(1.25, rel=0.01)
    assert figures["p99_sd"] == pytest.approx(0.75, rel=0.01)
    assert windows.above_s(1.0) == 200
    assert windows.above_s(3.0) == 0


# Requests


def result(**changes: Any) -> Result:
    plain = Result(
        outcome="answered", why="", tier="turbo", http_code=200, replica=0, tries=1, arrival_ns=0,
        settled_ns=3 * S, dispatched_ns=S, scheduled_ns=S, first_ns=2 * S, last_ns=3 * S,
        first_out_ns=2 * S, cached_tokens=0, output_tokens=101, preemptions=0,
    )  # fmt: skip
    return plain._replace(**changes)


ROWS = [
    Row("P1", "chat", 0, result()),
    Row("P0", "chat", 0, result()),  # two seconds are too long for its class
    Row("P0", "chat", 3 * S, result(correct=1)),  # but not for its own deadline
    Row("P1", "chat", 0, result(correct=0)),
    Row("P1", "chat", 0, result(output_tokens=5)),  # a quarter of a second per token
    Row("P1", "mail", 0, result(outcome="degraded", why="cached", first_out_ns=-1, correct=0)),
    Row("P1", "mail", 0, result(outcome="degraded", why="template")),
    Row("P2", "mail", 0, result(outcome="shed", why="deadline", dispatched_ns=-1, tier="batch")),
    Row("P2", "mail", 0, result(outcome="failed", why="oom", replica=1, tier="batch")),
    Row("P2", "", 0, result(outcome="cancelled")),
]


def requests(measure: Measure | None = None, rows: list[Row] | None = None) -> dict[str, Any]:
    collected = Requests(measure or Measure(), ["host0", "host1", "host1"])
    for row in ROWS if rows is None else rows:
        collected.add(row)
    return collected.figures()


def test_requests_are_counted_by_what_became_of_them() -> None:
    figures = requests()["all"]
    counts = {
        "offered": 10, "answered": 5, "degraded": 2, "shed": 1, "failed": 1, "cancelled": 1,
        "good": 5, "useful": 5, "useless": 4, "wrong": 1, "slo_missed": 4, "refused": 2,
    }  # fmt: skip
    assert {name: figures[name] for name in counts} == counts
    assert figures["failed_share"] == 0.1
    assert figures["failed_share_up95"] == pytest.approx(0.394, abs=0.001)
    assert figures["degraded_by"] == {"cached": 1, "template": 1}
    assert figures["why"] == {"": 1, "deadline": 1, "oom": 1}
    assert figures["ttft_s"]["count"] == 7
    assert figures["ttft_s"]["most"] == 3
    assert figures["queue_s"]["mean"] == 1
    assert figures["served_per_s"] == pytest.approx(7 / 3)


def test_an_answer_sent_as_a_whole_began_when_its_engine_did() -> None:
    rows = [
        Row("P1", "", 0, result(first_out_ns=-1)),
        Row("P1", "", 0, result(first_out_ns=-1, outcome="degraded", why="model lighter")),
    ]
    assert requests(rows=rows)["all"]["ttft_s"]["most"] == 2


def test_who_was_sent_away_before_its_first_token_was_dropped() -> None:
    unheard = {"outcome": "failed", "why": "replica_lost", "first_out_ns": -1}
    rows = [
        Row("P1", "", 0, result(**unheard)),
        Row("P1", "", 0, result(**unheard | {"outcome": "shed", "why": "deadline"})),
        Row("P1", "", 0, result(**unheard | {"tries": 0, "why": "too_large"})),
        Row("P1", "", 0, result(**unheard | {"first_out_ns": 2 * S})),
        Row("P1", "", 2 * S, result(**unheard)),
        Row("P1", "", 0, result(outcome="degraded", why="template", first_out_ns=-1)),
    ]
    assert requests(rows=rows)["all"]["dropped"] == 2


def test_requests_are_grouped() -> None:
    figures = requests()
    assert {name: group["offered"] for name, group in figures["by_class"].items()} == {
        "P0": 2, "P1": 5, "P2": 3,
    }  # fmt: skip
    assert set(figures["by_line"]) == {"chat", "mail"}
    assert figures["by_tier"]["batch"]["refused"] == 2
    assert figures["by_domain"] == {
        "host0": {"sent": 9, "failed": 0}, "host1": {"sent": 1, "failed": 1},
    }  # fmt: skip


def test_spans_and_warm_up_choose_by_arrival() -> None:
    no_token = {"first_ns": -1, "first_out_ns": -1}
    rows = [
        Row("P0", "chat", 0, result(arrival_ns=at * S, settled_ns=(at + 5) * S, **no_token))
        for at in range(100)
    ]
    measure = Measure(
        warm_up_s=10,
        window_s=10,
        window_least=5,
        spans={"ramp": Span(from_s=20, to_s=40)},
        above={"slow": Above(group="by_class.P0", limit_s=1), "none": Above("by_line.x", 1)},
    )
    figures = requests(measure, rows)
    assert figures["all"]["offered"] == 90
    ramp = figures["spans"]["ramp"]
    assert ramp["all"]["offered"] == ramp["P0"]["slo_missed"] == 20
    assert ramp["all"]["offered_per_s"] == ramp["served_within_per_s"] == 1
    assert figures["above_s"] == {"slow": 90, "none": 0}
    assert figures["by_class"]["P0"]["windows"]["above_slo_s"] == 90


def test_memory_does_not_grow_with_the_requests() -> None:
    collected = Requests(Measure(), ["host0"])
    for number in range(2 * HELD_ROWS + 1):
        collected.add(Row("P1", "chat", 0, result(arrival_ns=number)))
        assert len(collected._held) < HELD_ROWS
    assert collected.figures()["all"]["offered"] == 2 * HELD_ROWS + 1


# What the policy did


def test_incidents_are_counted_and_timed_from_each_fault() -> None:
    incidents = Incidents({"xid": 10 * S, "later": 1000 * S})
    incidents.event(0, up(0))
    incidents.decision(5 * S, Alert("k", "before"))
    incidents.event(11 * S, GpuFault(0, "xid_fatal", 79))
    incidents.decision(11 * S, Rotated(0, "isolated", "xid"))
    incidents.decision(12 * S, Alert("k", "gpu"))
    incidents.decision(12 * S, Start(1))
    incidents.event(20 * S, ReplicaDown(0, "gpu_error"))
    incidents.event(47 * S, up(1))
    assert incidents.fresh == {1}
    incidents.dispatched(48 * S, 1)
    assert not incidents.fresh
    incidents.decision(50 * S, BreakerMoved("m", "open", "share"))
    incidents.decision(60 * S, BreakerMoved("m", "half_open", "time"))
    incidents.decision(61 * S, BreakerMoved("m", "open", "probe"))
    incidents.decision(70 * S, BreakerMoved("m", "closed", "probes"))
    incidents.decision(80 * S, BreakerMoved("m", "open", "share"))
    incidents.decision(81 * S, Refused("arrived", "twice"))
    figures = incidents.figures()
    assert figures["faults"]["xid"] == {
        "at_s": 10, "gpu_fault_s": 1, "alert_s": 2, "out_s": 1, "isolated_s": 1, "down_s": 10,
        "start_s": 2, "up_s": 37, "served_s": 38, "in_s": None, "breaker_open_s": 40,
        "breaker_closed_s": 60,
    }  # fmt: skip
    assert figures["faults"]["later"]["up_s"] is None
    assert figures["breakers"]["by_key"] == {"m": {"incidents": 2, "opened": 3}}
    assert figures["breakers"]["opened_per_incident"] == 1.5
    assert figures["alerts"] == {"before": 1, "gpu": 1}
    assert figures["decisions"]["refused"] == figures["decisions"]["start"] == 1
    assert figures["decisions"]["verify"] == 0


def test_hours_run_from_the_start_of_a_replica_to_its_end() -> None:
    hours = Hours({0: 2.0, 1: 0.5})
    hours.event(0, up(0))
    hours.decision(1000 * S, Start(1))
    hours.event(1100 * S, up(1))
    hours.event(2800 * S, ReplicaDown(1, "stopped"))
    hours.event(9000 * S, ReplicaDown(0, "stopped"))  # after the run's end
    figures = hours.figures(3600 * S)
    assert figures == {"replica_hours": 1.5, "gpu_hours": 2.25, "replicas_most": 2}


def test_contexts_are_mixed_while_two_of_a_session_are_in_flight() -> None:
    contexts = Contexts()
    for request, session in ((0, "a"), (1, "a"), (2, "b"), (3, "a")):
        contexts.arrived(request, session)
        if request != 3:
            contexts.dispatched(request)
    contexts.dispatched(1)  # again, after a failure: the same mix-up
    contexts.settled(0)
    contexts.settled(1)
    contexts.dispatched(3)
    contexts.settled(3)
    contexts.settled(9)
    contexts.settled(2)
    assert contexts.figures() == {"sent": 4, "mixed": 1, "mixed_share": 0.25}
    assert not contexts._open
    assert not contexts._in_flight


def test_the_watch_passes_every_record_on_and_shows_it_to_the_collectors() -> None:
    log, incidents, contexts = ListLog(), Incidents({}), Contexts()
    watch = Watch(log, incidents, Hours({}), contexts)
    records: list[Any] = [
        (0, up(0), ()),
        (1, Arrived(0, "m", "chat", 4, session="s"), (Dispatch(0, 0, ""),)),
        (2, Ticked(), (Settled(0, "answered"), Alert("k", "cause"))),
    ]
    for record in records:
        watch.append(*record)
    assert log.records == records
    assert contexts.sent == 1
    assert incidents.figures()["alerts"] == {"cause": 1}
