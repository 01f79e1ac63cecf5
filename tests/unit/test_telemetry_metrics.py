"""What is counted of requests, replicas and breakers, as Prometheus reads it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.telemetry.metrics import BREAKERS_MOST, LogHealth, Metrics, Sink, State
from policy.decisions import Alert, BreakerMoved, Refused, Rotated, Scaled, Settled, Verify
from policy.events import Failed, ReplicaDown, Scraped, StepsRead
from tests.telemetry_support import (
    MS,
    S,
    Still,
    answer,
    call,
    dispatch,
    metrics,
    refuse,
    up,
)

if TYPE_CHECKING:
    from controller.call import Call


def read(of: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name, then by label values (gauges': in the order of the labels' names)."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(of.render()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def served(of: Metrics, ttft_ns: int = 200 * MS, **changed: Any) -> Call:
    made = call(**changed)
    of.arrived(made)
    dispatch(made)
    of.dispatched(made)
    settled = answer(made, ttft_ns)
    of.settled(made, settled)
    return made


def test_an_answered_request() -> None:
    of = metrics()
    of.fed(0, up(0))
    served(of)
    found = read(of)
    assert found["twinkeel_requests_total"] == {("chat", "P0", "turbo", "answered"): 1}
    assert found["twinkeel_dispatches_total"] == {("10.0.0.0:8000",): 1}
    assert found["twinkeel_ttft_seconds_sum"] == {("turbo", "P0"): 0.2}
    assert found["twinkeel_ttft_seconds_bucket"]["turbo", "P0", "0.2"] == 1
    assert found["twinkeel_ttft_seconds_bucket"]["turbo", "P0", "0.1"] == 0
    assert found["twinkeel_tpot_seconds_sum"] == {("turbo", "P0"): 0.02}
    assert found["twinkeel_e2e_seconds_sum"] == {("turbo", "P0"): 0.402}
    assert found["twinkeel_hop_seconds_sum"] == {
        ("gateway",): 0.0004, ("queue",): 0.01, ("schedule",): 0.003, ("prefill",): 0.185,
        ("decode",): 0.2, ("network",): 0.002, ("rest",): pytest.approx(0.0016),
    }  # fmt: skip
    assert found["twinkeel_gateway_seconds_sum"] == {(): 0.0004}
    assert found["twinkeel_rest_ratio_sum"] == {(): pytest.approx(0.0016 / 0.402, abs=2e-6)}
    assert found["twinkeel_prompt_tokens_total"] == {("qwen",): 100}
    assert found["twinkeel_cached_tokens_total"] == {("qwen",): 32}
    assert found["twinkeel_output_tokens_total"] == {("qwen",): 11}
    assert found["twinkeel_slo_met_total"] == found["twinkeel_slo_offered_total"]
    assert found["twinkeel_open_requests"] == found["twinkeel_open_streams"] == {(): 0}


def test_open_requests_and_streams() -> None:
    of = metrics()
    of.arrived(call(1))
    of.arrived(call(2, stream=False))
    assert read(of)["twinkeel_open_requests"] == {(): 2}
    assert read(of)["twinkeel_open_streams"] == {(): 1}


def test_refused_failed_and_lesser_answers_say_why() -> None:
    of = metrics()
    of.fed(0, up(0))
    for outcome, why, code in (
        ("shed", "deadline", 429), ("failed", "oom", 503), ("degraded", "lighter", 200),
        ("cancelled", "client", 499),
    ):  # fmt: skip
        made = call()
        of.arrived(made)
        of.settled(made, refuse(made, outcome, why, code))
    of.lost(Settled(7, "failed", "", "controller_lost", 503))
    of.rejected(401)
    found = read(of)
    assert found["twinkeel_shed_total"] == {("deadline", "batch"): 1}
    assert found["twinkeel_failures_total"] == {("oom",): 1}
    assert found["twinkeel_degraded_total"] == {("lighter",): 1}
    assert found["twinkeel_lost_requests_total"] == {(): 1}
    assert found["twinkeel_rejected_total"] == {("401",): 1}
    assert sum(found["twinkeel_requests_total"].values()) == 4


def test_retries_and_errors_of_tries() -> None:
    of = metrics()
    of.fed(0, up(0))
    of.fed(0, up(1))
    made = call()
    of.arrived(made)
    dispatch(made)
    of.dispatched(made)
    of.fed(1, Failed(made.request, 0, "http_5xx"))
    dispatch(made, 1)
    of.dispatched(made)
    of.settled(made, answer(made))
    found = read(of)
    assert found["twinkeel_retries_total"] == {(): 1}
    assert found["twinkeel_errors_total"] == {("http_5xx", "10.0.0.0:8000"): 1}
    assert len(found["twinkeel_dispatches_total"]) == 2


def test_the_objective_is_the_deadline_to_first_token_and_a_pace() -> None:
    of = metrics()

    def counted(what: str) -> int:
        text = of.render()[0].decode()
        return sum(
            int(n) for n in re.findall(rf"^twinkeel_slo_{what}_total{{.*}} (\d+)$", text, re.M)
        )

    def judged(made: Call, settled: Settled) -> tuple[int, int]:
        offered, met = counted("offered"), counted("met")
        of.settled(made, settled)
        return counted("offered") - offered, counted("met") - met

    def answered(ttft_ns: int, **changed: Any) -> tuple[int, int]:
        made = call(**changed)
        dispatch(made)
        return judged(made, answer(made, ttft_ns))

    assert answered(1500 * MS) == (1, 1)
    assert answered(1500 * MS + 1) == (1, 0)
    assert answered(3 * S, sla="P1") == (1, 1)
    assert answered(3 * S, sla="") == (1, 1)
    assert answered(3 * S, sla="P1", deadline_ns=2 * S) == (1, 0)
    slow = call()
    dispatch(slow)
    assert judged(slow, answer(slow, gap_ns=101 * MS)) == (1, 0)
    shed = call()
    assert judged(shed, refuse(shed)) == (1, 0)
    rejected = call()
    assert judged(rejected, refuse(rejected, "failed", "rejected", 400)) == (0, 0)
    impatient = call()
    assert judged(impatient, refuse(impatient, "cancelled", "client", 499)) == (0, 0)
    waited = call()
    settled = refuse(waited, "cancelled", "client", 499)
    waited.settled_ns = waited.arrived_ns + 2 * S
    assert judged(waited, settled) == (1, 0)
    of.policy("x", "y", {"P0": 0.1})
    assert answered(1500 * MS) == (1, 0)


def test_an_answer_in_one_piece_is_judged_by_what_its_engine_says() -> None:
    of = metrics()
    served(of, stream=False)
    assert read(of)["twinkeel_ttft_seconds_sum"] == {
        ("turbo", "P0"): pytest.approx(0.2 - 0.002)  # without the way there and back
    }
    silent = call(stream=False)
    dispatch(silent)
    settled = answer(silent, tokens=201)  # 4.2 s in all: nobody knows when it began
    silent.engine = None
    of.settled(silent, settled)
    found = read(of)
    assert found["twinkeel_ttft_seconds_count"] == {("turbo", "P0"): 1}
    assert found["twinkeel_slo_offered_total"] == {("turbo", "P0"): 1}
    assert found["twinkeel_e2e_seconds_count"] == {("turbo", "P0"): 2}


def test_an_embedding_has_no_first_token_but_an_objective() -> None:
    of = metrics()
    for ttft_ns in (S, 2 * S):
        made = call(endpoint="embeddings")
        dispatch(made)
        settled = answer(made, ttft_ns, tokens=0, gap_ns=0)
        made.engine = None
        of.settled(made, settled)
    found = read(of)
    assert found["twinkeel_ttft_seconds_count"] == {("turbo", "P0"): 0}
    assert found["twinkeel_slo_offered_total"] == {("turbo", "P0"): 2}
    assert found["twinkeel_slo_met_total"] == {("turbo", "P0"): 1}


def test_models_and_classes_that_callers_make_up_do_not_become_series() -> None:
    of = metrics()
    of.fed(0, up(0, models=("qwen", "tiny")))
    for number in range(50):
        served(of, model=f"made-up-{number}", sla=f"P{number}" if number > 2 else "P1")
    served(of, model="tiny")
    found = read(of)
    assert found["twinkeel_output_tokens_total"] == {("other",): 550, ("tiny",): 11}
    assert {labels[1] for labels in found["twinkeel_requests_total"]} <= {"P0", "P1", "other"}
    assert b"ann" not in of.render()[0]
    assert b"shop" not in of.render()[0]


def test_breakers_by_key_and_their_bound() -> None:
    of = metrics()
    of.restored({"old": "half_open"})
    of.decided(BreakerMoved("errors model=qwen", "open", "share", 5, 100))
    of.decided(BreakerMoved("errors model=qwen", "half_open", "time"))
    found = read(of)
    assert found["twinkeel_breaker_state"] == {("old",): 1, ("errors model=qwen",): 1}
    assert found["twinkeel_breaker_moves_total"] == {
        ("errors model=qwen", "open"): 1,
        ("errors model=qwen", "half_open"): 1,
    }
    of.decided(BreakerMoved("old", "closed", "probes"))
    for number in range(2 * BREAKERS_MOST):
        of.decided(BreakerMoved(f"line={number}" + "x" * 1000, "open", "share"))
    found = read(of)
    assert len(found["twinkeel_breaker_state"]) == BREAKERS_MOST
    assert ("old",) not in found["twinkeel_breaker_state"]  # it was closed
    assert ("errors model=qwen",) in found["twinkeel_breaker_state"]
    assert found["twinkeel_breaker_moves_total"]["other", "open"] == BREAKERS_MOST + 1


def test_replicas_in_and_out() -> None:
    of = metrics(State(20 * S, in_flight={(1, "turbo"): 3, (0, ""): 1, (9, "turbo"): 1}))
    of.fed(0, up(0, "a"))
    of.fed(0, up(1, "a"))  # the same name: still two
    of.decided(Rotated(1, "ejected", "silent"))
    of.decided(Rotated(7, "ejected", "unknown"))
    of.fed(18 * S, Scraped(0, 5, 2, 750, 0, S))
    found = read(of)
    states = found["twinkeel_replica_state"]
    current = [labels for labels, value in states.items() if value]
    assert current == [("a", "in"), ("a#1", "ejected")]
    assert len(states) == 12
    assert found["twinkeel_rotations_total"] == {("a#1", "ejected"): 1}
    assert found["twinkeel_in_flight"] == {
        ("a#1", "turbo"): 3, ("a", "none"): 1, ("other", "turbo"): 1, ("a#1", "none"): 0,
    }  # fmt: skip
    assert found["twinkeel_replica_running"] == {("a",): 5}
    assert found["twinkeel_replica_waiting"] == {("a",): 2}
    assert found["twinkeel_replica_kv_used_ratio"] == {("a",): 0.75}
    assert found["twinkeel_replica_scrape_age_seconds"] == {("a",): 3}
    of.fed(18 * S, StepsRead(0, 100, 1200, 1000))
    of.fed(18 * S, StepsRead(0, 300, 4200, 3000))
    of.fed(18 * S, StepsRead(1, 0, 0, 0))
    of.fed(18 * S, StepsRead(7, 9, 9, 9))
    found = read(of)
    assert found["twinkeel_replica_drift_ratio"] == {("a",): 0.35}
    assert found["twinkeel_replica_steps_total"] == {("a",): 400, ("a#1",): 0}
    of.fed(19 * S, ReplicaDown(0, "gone"))
    found = read(of)
    assert "twinkeel_replica_drift_ratio" not in found
    assert found["twinkeel_replica_state"]["a", "down"] == 1
    assert "twinkeel_replica_running" not in found


def test_what_the_driver_knows_is_read_when_it_is_asked_for() -> None:
    still = Still(
        State(
            S, {"turbo": 4, "held": 1}, {}, LogHealth(30, 7, 3),
            {"spans": Sink(10, 2, 1)}, True,
        )
    )  # fmt: skip
    of = Metrics(still)
    found = read(of)
    assert found["twinkeel_queued"] == {("turbo",): 4, ("held",): 1}
    assert found["twinkeel_log_waiting_bytes"] == {(): 30}
    assert found["twinkeel_log_dropped_bytes_total"] == {(): 7}
    assert found["twinkeel_log_segment"] == {(): 3}
    assert found["twinkeel_draining"] == {(): 1}
    assert found["twinkeel_sink_items_total"] == {
        ("sent", "spans"): 10, ("failed", "spans"): 2, ("dropped", "spans"): 1,
    }  # fmt: skip
    still.state = State(2 * S)
    assert read(of)["twinkeel_draining"] == {(): 0}


def test_the_rest_of_what_is_decided() -> None:
    of = metrics(State(200 * S, shadow={"shed": 4, "moved": 7.0}))
    of.fed(0, up(0))
    of.policy("stable", "abc123")
    for decision in (
        Alert("breaker errors model=qwen", "x"), Alert("replica 0", "x"), Alert("replica 1", "x"),
        Refused("Finished", "why"), Scaled("qwen", 3, "x"), Scaled("made-up", 3, "x"),
        Verify(0, 0),
    ):  # fmt: skip
        of.decided(decision)
    made = call()
    dispatch(made)
    answer(made)
    of.settled(
        made,
        Settled(
            made.request, "answered", "turbo", confidence_permille=640, verification="mismatch"
        ),
    )
    found = read(of)
    assert found["twinkeel_alerts_total"] == {("breaker",): 1, ("replica",): 2}
    assert found["twinkeel_refused_events_total"]["Finished",] == 1
    assert sum(found["twinkeel_refused_events_total"].values()) == 1
    assert found["twinkeel_wanted_replicas"] == {("qwen",): 3}
    assert found["twinkeel_verify_runs_total"] == {(): 1}
    assert found["twinkeel_verifications_total"] == {("mismatch",): 1}
    assert found["twinkeel_confidence_sum"] == {(): 0.64}
    assert found["twinkeel_policy_info"] == {("abc123", "stable"): 1}
    assert found["twinkeel_shadow"] == {("shed",): 4, ("moved",): 7}
    assert list(found["twinkeel_build_info"].values()) == [1]
    assert found["twinkeel_fairness_users"] == {(): 1}
    assert found["twinkeel_fairness_index"] == {(): 1}
    assert found["process_resident_memory_bytes"][()] > 1e6


def test_two_metrics_do_not_meet() -> None:
    first, second = metrics(), metrics()
    served(first)
    assert "twinkeel_requests_total" not in read(second)


def test_every_line_can_be_read_and_no_family_comes_twice() -> None:
    of = metrics()
    of.fed(0, up(0))
    served(of)
    names = [family.name for family in text_string_to_metric_families(of.render()[0].decode())]
    assert len(names) == len(set(names))
    assert of.render()[1].startswith("text/plain")


def test_a_request_costs_little() -> None:
    """A gross bound, for machines that are busy: about 15 us were measured."""
    of = metrics()
    of.fed(0, up(0))
    made = [call(number) for number in range(200)]
    settled = []
    for one in made:
        dispatch(one)
        settled.append(answer(one))
    best_s = 1.0
    for _ in range(20):
        began_s = time.perf_counter()
        for one, so in zip(made, settled, strict=True):
            of.arrived(one)
            of.dispatched(one)
            of.settled(one, so)
        best_s = min(best_s, time.perf_counter() - began_s)
    assert best_s / len(made) < 150e-6
