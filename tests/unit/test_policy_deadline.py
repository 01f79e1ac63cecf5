"""One absolute deadline for everything, with a reserve for what is given instead; and scores."""

from __future__ import annotations

from typing import Any

import pytest

from policy.decisions import Abort, Dispatch, LookUp, SaveCheckpoint, Settled, Verify
from policy.events import Cancelled, Finished, LookedUp, Ticked, Verified
from policy.files import parse_policy
from policy.service import Service
from tests.policy_support import MS, Checked, S, parameters, up

SURE = {"entropy_mean_millinats": 100, "entropy_worst_millinats": 500, "close_permille": 5}
UNSURE = {"entropy_mean_millinats": 900, "entropy_worst_millinats": 2500, "close_permille": 60}
LOST = {"entropy_mean_millinats": 1900, "entropy_worst_millinats": 3000, "close_permille": 290}
OFF = {"enabled": False}


def service(replicas: int = 2, lighter: bool = False, **sections: Any) -> Checked:
    """Without health and limits, so that nothing else takes a request anywhere."""
    quiet: dict[str, Any] = {"health": OFF, "limits": OFF}
    if lighter:
        quiet["tiers"] = {"fallback_model": "light"}
    checked = Checked(parameters("tiered", **(quiet | sections)))
    for replica in range(replicas):
        checked.bring_up(up(replica, models=("m",)))
    if lighter:
        checked.bring_up(up(replicas, models=("light",)))
    return checked


def ticks(checked: Checked, until_ns: int) -> list[Any]:
    """Let every deadline up to ``until_ns`` pass; what was decided."""
    decided: list[Any] = []
    while True:
        due_ns = checked.policy.deadline_ns()
        if due_ns is None or due_ns > until_ns:
            checked.now_ns = max(checked.now_ns, until_ns)
            return decided
        checked.now_ns = max(checked.now_ns, due_ns)
        decided += checked.feed(Ticked())


def answer(checked: Checked, request: int, **features: Any) -> tuple[Any, ...]:
    return checked.feed(Finished(request, checked.in_flight[request], 250, 0, 100, **features))


# The deadline


@pytest.mark.parametrize(
    ("sla", "answer_s"), [("P0", 15), ("P1", 60), ("P2", 600)], ids=["P0", "P1", "P2"]
)
def test_without_an_answer_a_class_gets_something_else_in_time(sla: str, answer_s: int) -> None:
    checked = service()
    request = checked.arrive(sla=sla, stream=False)
    replica = checked.in_flight[request]
    assert not ticks(checked, answer_s * S - 301 * MS)
    assert ticks(checked, answer_s * S - 300 * MS) == [Abort(request, replica), LookUp(request)]
    (settled,) = checked.feed(LookedUp(request, found=False))
    assert (settled.outcome, settled.why, settled.http_code) == ("degraded", "template", 200)
    assert not checked.feed(Finished(request, replica, 250, 0, 100)), "late, and legal"


def test_a_look_up_that_takes_too_long_is_not_waited_for() -> None:
    checked = service()
    request = checked.arrive(sla="P0", stream=False)
    assert LookUp(request) in ticks(checked, 15 * S - 1)
    checked.restore()
    (settled,) = ticks(checked, 15 * S)
    assert (settled.why, checked.now_ns) == ("template", 15 * S)
    assert checked.feed(LookedUp(request, True, S, 900)) == ()


def test_a_kept_answer_that_is_found_in_the_reserve_is_given() -> None:
    checked = service()
    request = checked.arrive(sla="P0", stream=False)
    ticks(checked, 15 * S - 1)
    (settled,) = checked.feed(LookedUp(request, True, S, 900))
    assert (settled.why, settled.age_ns) == ("cached", S)


def test_a_stream_counts_until_its_first_token() -> None:
    checked = service(classes={"p1_answer_ms": 5000})
    begun, silent = checked.arrive(), checked.arrive()
    checked.first(begun, after_ns=S)
    decided = ticks(checked, 100 * S)
    assert {d.request for d in decided} == {silent}
    assert checked.outcomes[silent].why == "template"
    answer(checked, begun)
    assert checked.outcomes[begun].outcome == "answered"


def test_a_callers_own_later_deadline_counts() -> None:
    checked = service()
    longer = checked.arrive(sla="P0", stream=False, deadline_ns=40 * S)
    shorter = checked.arrive(sla="P0", stream=False, deadline_ns=S)
    decided = ticks(checked, 39 * S)
    assert {d.request for d in decided} == {shorter}, "it is for the first token only"
    assert Abort(longer, checked.in_flight[longer]) in ticks(checked, 40 * S)


def test_what_waits_here_is_cut_off_too() -> None:
    checked = service(1, shedding={"enabled": False}, classes={"p2_answer_ms": 3000})
    first = [checked.arrive(tokens=6000, sla="P0", stream=False) for _ in range(60)]
    waits = checked.arrive(tokens=6000, sla="P2", stream=False)
    assert waits in checked.waiting
    decided = ticks(checked, 2700 * MS)
    assert decided[-1] == LookUp(waits)
    assert waits not in checked.in_flight
    checked.feed(LookedUp(waits, found=False))
    assert checked.outcomes[waits].why == "template"
    assert first[0] in checked.in_flight


@pytest.mark.parametrize("answered", [True, False])
def test_a_second_run_is_not_waited_for_beyond_it(answered: bool) -> None:
    checked = service(confidence={"budget_permille": 1000}, classes={"p1_answer_ms": 5000})
    request = checked.arrive(stream=False)
    checked.now_ns = 2 * S
    (verify,) = answer(checked, request, **UNSURE)
    assert isinstance(verify, Verify)
    if answered:
        checked.feed(Verified(request, verify.replica, "match", 100))
        assert checked.outcomes[request].verification == "match"
        return
    abort, settled = ticks(checked, 4700 * MS)
    assert abort == Abort(request, verify.replica)
    assert (settled.outcome, settled.verification) == ("answered", "skipped_budget")
    assert settled.confidence_permille > 300


def test_a_lighter_model_is_only_asked_if_it_can_make_it() -> None:
    for at_ms, made in ((1000, True), (4600, False)):
        checked = service(lighter=True, classes={"p1_answer_ms": 5000})
        request = checked.arrive(stream=False)
        checked.now_ns = at_ms * MS
        answer(checked, request, **LOST)
        (decided,) = checked.feed(LookedUp(request, found=False))
        if made:
            assert (decided.model, decided.candidates) == ("light", 20)
        else:
            assert (decided.why, decided.outcome) == ("template", "degraded")


def test_the_lighter_model_has_no_time_of_its_own() -> None:
    checked = service(lighter=True, classes={"p1_answer_ms": 5000})
    request = checked.arrive(stream=False)
    checked.now_ns = S
    answer(checked, request, **LOST)
    checked.feed(LookedUp(request, found=False))
    replica = checked.in_flight[request]
    abort, settled = ticks(checked, 4700 * MS)
    assert abort == Abort(request, replica)
    assert (settled.why, settled.confidence_permille >= 0) == ("template", True)


def test_the_first_try_says_nothing_of_a_second_one_on_the_same_replica() -> None:
    """When the prefill of the first would have been over, that of the second may not be."""
    checked = Checked(
        parameters("tiered", health=OFF, limits=OFF, tiers={"fallback_model": "light"})
    )
    checked.bring_up(up(0))
    checked.arrive(tokens=100, stream=False)
    request = checked.arrive(tokens=2000, stream=False)
    checked.now_ns += MS
    answer(checked, request, **LOST)
    checked.restore()
    checked.feed(LookedUp(request, False), 10 * MS)
    assert checked.dispatches[-1].model == "light"
    assert checked.policy.snapshot() == checked.double.snapshot()


def test_where_nothing_can_be_given_it_has_timed_out() -> None:
    checked = service(breakers={"actions": []}, confidence={"actions": []})
    request = checked.arrive(sla="P0", stream=False)
    ticks(checked, 20 * S)
    settled = checked.outcomes[request]
    assert (settled.outcome, settled.why, settled.http_code) == ("failed", "timeout", 504)


def test_a_checkpoint_that_is_not_written_does_not_keep_the_answer() -> None:
    long = {"default": {"budget_ms": 100_000}}
    checked = service(chains=long, classes={"p1_answer_ms": 5000})
    request = checked.arrive(stream=False, chain="c", step="plan", user="ann")
    assert isinstance(answer(checked, request)[0], SaveCheckpoint)
    (settled,) = ticks(checked, 5 * S)
    assert (settled.outcome, settled.checkpoint) == ("answered", "")


def test_a_chain_gives_what_is_there_inside_its_budget() -> None:
    checked = service(chains={"default": {"budget_ms": 8000}})
    request = checked.arrive(stream=False, chain="c", step="plan", user="ann")
    _, settled = ticks(checked, 7700 * MS)
    assert (settled.request, settled.why, settled.left_ns) == (request, "chain_budget", 0)


def test_zero_is_no_deadline() -> None:
    checked = service(classes={"p1_answer_ms": 0})
    request = checked.arrive(stream=False)
    assert not ticks(checked, 5000 * S)
    answer(checked, request)
    assert checked.outcomes[request].outcome == "answered"


def test_who_is_gone_is_not_cut_off() -> None:
    checked = service()
    request = checked.arrive(sla="P0", stream=False)
    checked.feed(Cancelled(request))
    assert not ticks(checked, 100 * S)


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="an answer in 200 ms leaves nothing"):
        parse_policy("schema: 1\nclasses: {p0_answer_ms: 200}", "mine")


# Scores


def dispatched(checked: Checked, **fields: Any) -> Dispatch:
    request = checked.arrive(**fields)
    assert request in checked.in_flight
    return checked.dispatches[-1]


def test_only_what_is_to_be_scored_is_asked_for_logprobs() -> None:
    checked = service(confidence={"candidates_most": 5, "lines": ["support", "search"]})
    assert dispatched(checked, line="support").candidates == 5
    assert dispatched(checked, line="other").candidates == 0
    assert dispatched(checked).candidates == 0
    assert dispatched(service()).candidates == 20
    assert dispatched(service(), endpoint="embeddings").candidates == 0
    assert dispatched(service(), chain="c", user="u").candidates == 20
    assert dispatched(service(confidence=OFF)).candidates == 0


def test_what_was_not_asked_for_is_not_scored() -> None:
    checked = service(confidence={"candidates_most": 0})
    request = checked.arrive(stream=False)
    (settled,) = answer(checked, request, **LOST)
    assert (settled.confidence_permille, settled.outcome) == (-1, "answered")


@pytest.mark.parametrize("lacking", list(SURE))
def test_a_part_of_the_figures_is_no_score(lacking: str) -> None:
    checked = service()
    request = checked.arrive(stream=False)
    (settled,) = answer(checked, request, **(SURE | {lacking: -1}))
    assert isinstance(settled, Settled)
    assert (settled.confidence_permille, settled.verification) == (-1, "")


def test_one_candidate_is_none_to_compare_with() -> None:
    with pytest.raises(ValueError, match="candidates_most is 1"):
        parse_policy("schema: 1\nconfidence: {candidates_most: 1}", "mine")


def test_the_budget_can_be_read() -> None:
    checked = service(confidence={"budget_permille": 100, "burst_tokens": 1000})
    answer(checked, checked.arrive(stream=False), **SURE)
    assert isinstance(checked.policy, Service)
    assert checked.policy.verification() == (35, 1000, 100)
    without = service(confidence=OFF).policy
    assert isinstance(without, Service)
    assert without.verification() is None
