"""Agent chains: one budget for all steps, nothing paid for twice, nothing after the end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.chains import Chains, Ruling, share_ns
from policy.events import ChainFound
from policy.facts import Illegal
from policy.parameters import Parameters
from policy.parameters.chains import Chains as Section
from tests.policy_support import MS, S, arrived

STEPS = [{"name": "plan", "weight": 1}, {"name": "tool", "weight": 1, "external": True},
         {"name": "act", "weight": 2}]  # fmt: skip


def section(steps: list[dict[str, Any]] | None = None, **changes: Any) -> Section:
    plan = {"budget_ms": 8000, "steps": STEPS if steps is None else steps}
    return msgspec.convert({"default": plan, **changes}, Section)


class Driver:
    """Chains with a clock and rising ids."""

    def __init__(self, steps: list[dict[str, Any]] | None = None, **changes: Any) -> None:
        self.chains = Chains(section(steps, **changes))
        self.now_ns = 0
        self.next = 0

    def ask(self, step: str = "", chain: str = "c", **fields: Any) -> Ruling:
        ruling = self.maybe(step, chain, **fields)
        assert ruling is not None
        return ruling

    def maybe(self, step: str = "", chain: str = "c", **fields: Any) -> Ruling | None:
        request, self.next = self.next, self.next + 1
        return self.chains.arrive(self.now_ns, arrived(request, chain=chain, step=step, **fields))

    def answer(self, request: int, after_ns: int = 0) -> tuple[str, int, int]:
        """Answered and, where that is asked for, saved as k<request>."""
        self.now_ns += after_ns
        if self.chains.answered(request):
            self.chains.saved(request, f"k{request}")
        return self.chains.over(self.now_ns, request)


def test_a_request_of_no_chain_costs_nothing() -> None:
    driver = Driver()
    assert driver.maybe(chain="") is None
    assert driver.chains.over(0, 0) == ("", -1, -1)
    assert not driver.chains.answered(0)
    assert driver.chains.size() == 0


def test_a_step_gets_its_weights_part_of_what_is_left() -> None:
    driver = Driver()
    assert driver.ask("plan") == Ruling("go", 8 * S, 2 * S, "")
    # It took only one second: of the seven left the tool may take a third, not two seconds.
    assert driver.answer(0, 1 * S) == ("k0", 7 * S, 7 * S // 3)
    driver.now_ns += 1 * S
    assert driver.ask("act") == Ruling("go", 8 * S, 6 * S, "k0")
    assert driver.answer(1, 1 * S) == ("k1", 5 * S, -1)


def test_an_overrun_is_taken_from_the_later_steps() -> None:
    driver = Driver()
    driver.ask("plan")
    assert driver.answer(0, 5 * S) == ("k0", 3 * S, 1 * S)
    assert driver.ask("act").share_ns == 3 * S


def test_steps_out_of_plan_weigh_beside_those_still_to_come() -> None:
    driver = Driver(step_weight=5)
    assert driver.ask("extra").share_ns == 8 * S * 5 // 9
    driver.ask("act")
    assert driver.ask("extra2").share_ns == 8 * S
    unplanned = Driver([])
    assert unplanned.ask("a").share_ns == 8 * S
    assert unplanned.ask("").share_ns == 8 * S


def test_a_numbered_repetition_weighs_what_its_step_does() -> None:
    driver = Driver(step_weight=5)
    first, again = driver.ask("plan"), driver.ask("plan#2")
    assert again.share_ns == first.share_ns == 2 * S
    driver.answer(1)
    # The client's own tool is next, as after the step itself.
    assert driver.answer(0)[2] == 8 * S // 3
    for other in ("plan#", "plan#x", "#2", "none#2", "plan#2#3"):
        assert driver.ask(other).share_ns == 8 * S * 5 // 8, other


def test_lines_have_plans_of_their_own() -> None:
    driver = Driver(lines={"search": {"budget_ms": 100}})
    assert driver.ask("plan", line="search") == Ruling("go", 100 * MS, 100 * MS, "")
    assert driver.ask("plan", chain="d", line="else").end_ns == 8 * S


def test_the_end_of_the_budget_ends_what_is_under_way_and_what_returns_is_late() -> None:
    driver = Driver()
    driver.ask("plan")
    driver.answer(0, 1 * S)
    driver.ask("act")
    driver.ask("side")
    driver.ask("plan", chain="other")
    assert driver.chains.deadline_ns() == 8 * S
    driver.now_ns = 8 * S
    assert driver.chains.ended(8 * S - 1) == ()
    assert driver.chains.ended(8 * S) == [1, 2]
    assert driver.chains.ended(8 * S) == ()
    assert driver.chains.over(8 * S, 1) == ("k0", 0, -1)
    assert driver.ask("report") == Ruling("late", 8 * S, 0, "k0")
    assert driver.answer(4) == ("k0", 0, -1)
    assert driver.ask("report").kind == "late"
    assert driver.chains.deadline_ns() == 9 * S


def test_a_clients_own_step_that_returns_after_the_end_is_late() -> None:
    driver = Driver()
    driver.ask("plan")
    driver.answer(0, 1 * S)
    assert driver.chains.deadline_ns() is None  # nothing of it can be ended
    driver.now_ns = 8 * S
    assert driver.ask("act") == Ruling("late", 8 * S, 0, "k0")


def test_a_step_with_a_checkpoint_is_never_paid_for_again() -> None:
    # harness-sdk 3390, aegra 320, langflow 13633: resuming ran finished steps again.
    driver = Driver()
    driver.ask("plan")
    driver.answer(0)
    assert driver.ask("plan") == Ruling("done", 8 * S, 0, "k0")
    assert driver.answer(1) == ("k0", 8 * S, 8 * S // 3)
    assert driver.ask("act", resume="k0").kind == "go"
    driver.answer(2)
    assert driver.ask("plan", resume="k0").checkpoint == "k0"
    assert driver.answer(3)[0] == "k0"


def test_a_step_is_done_only_once_its_checkpoint_is_safe() -> None:
    driver = Driver()
    driver.ask("plan")
    assert driver.chains.answered(0)
    assert driver.ask("plan").kind == "go"  # the save may still fail
    assert driver.chains.over(0, 0) == ("", 8 * S, 8 * S // 3)  # it did
    assert driver.chains.answered(1)
    driver.chains.saved(1, "k1")
    driver.chains.saved(0, "k0")  # long settled
    assert driver.chains.over(0, 1)[0] == "k1"


def test_an_answer_that_is_being_saved_is_not_ended_any_more() -> None:
    driver = Driver()
    driver.ask("plan")
    driver.ask("side")
    assert driver.chains.answered(0)
    driver.now_ns = 8 * S
    assert driver.chains.ended(driver.now_ns) == [1]
    driver.chains.saved(0, "k0")
    assert driver.chains.over(driver.now_ns, 0) == ("k0", 0, 0)
    driver.chains.over(driver.now_ns, 1)
    assert driver.ask("plan", resume="k0") == Ruling("done", 16 * S, 0, "k0")


def test_of_two_steps_with_one_name_the_first_saved_counts() -> None:
    driver = Driver()
    driver.ask("plan")
    driver.ask("plan")
    assert driver.chains.answered(0)
    assert driver.chains.answered(1)
    driver.chains.saved(1, "k1")
    driver.chains.saved(0, "k0")
    assert driver.chains.over(0, 0)[0] == "k1"
    assert driver.ask("plan").checkpoint == "k1"


def test_steps_without_a_name_are_saved_but_never_recognised() -> None:
    driver = Driver()
    for request in range(3):
        assert driver.ask("").kind == "go"
        assert driver.answer(request)[0] == f"k{request}"
    assert driver.chains.size() == 2  # the chain, and its newest checkpoint


def test_an_unknown_checkpoint_starts_the_step_afresh_but_not_a_late_chain() -> None:
    driver = Driver()
    assert driver.ask("act", resume="lost").kind == "go"
    driver.now_ns = 9 * S
    driver.chains.ended(driver.now_ns)
    driver.answer(0)
    assert driver.ask("act", resume="lost").kind == "late"


def test_a_chain_that_was_told_it_is_late_may_be_resumed() -> None:
    driver = Driver()
    driver.ask("plan")
    driver.answer(0)
    driver.ask("act")
    driver.answer(1)
    driver.now_ns = 9 * S
    assert driver.ask("more", resume="k0").kind == "late"  # the client cannot know it yet
    driver.answer(2)
    undone = Ruling("done", 17 * S, 0, "k0", undone=True)  # k1 is to be forgotten
    assert driver.ask("plan", resume="k0") == undone
    assert driver.ask("extra").share_ns == 2 * S  # of four weights still to come
    assert driver.ask("act") == Ruling("go", 17 * S, 8 * S, "k0")  # after k0: to be done again
    assert driver.ask("plan", chain="z", resume="k1").kind == "go"  # k1 is given up
    driver.now_ns = 70 * S
    driver.chains.ended(driver.now_ns)
    for request in range(3, 7):
        driver.answer(request)
    assert driver.ask("act").kind == "late"  # remembered from its new end


def test_a_chain_is_not_resumed_while_its_end_is_being_carried_out() -> None:
    driver = Driver()
    driver.ask("plan")
    driver.answer(0)
    driver.ask("act")
    driver.now_ns = 8 * S
    assert driver.chains.ended(driver.now_ns) == [1]
    assert driver.ask("plan", resume="k0").kind == "late"
    driver.answer(1)
    driver.answer(2)
    assert driver.ask("plan", resume="k0").kind == "done"


def test_another_chain_may_go_on_from_a_checkpoint_of_the_same_user() -> None:
    driver = Driver()
    driver.ask("plan", user="ann")
    driver.answer(0)
    driver.ask("act", user="ann")
    driver.answer(1)
    assert driver.ask("plan", chain="d", user="ann", resume="k0").kind == "done"
    assert driver.ask("act", chain="d", user="ann").kind == "go"
    driver.answer(3)
    assert driver.ask("act", chain="d", user="ann").checkpoint == "k3"
    assert driver.ask("act", chain="c", user="ann").checkpoint == "k1"
    assert driver.ask("plan", chain="c", user="bob", resume="k0").kind == "go"
    assert driver.ask("plan", chain="e", user="bob", resume="k0").kind == "go"


def test_nothing_is_left_of_forgotten_chains() -> None:
    driver = Driver()
    for request, step in enumerate(("plan", "", "act")):
        driver.ask(step)
        driver.answer(request)
    driver.ask("act", chain="d", resume="k1")  # plan and a nameless step are done there
    driver.answer(3)
    driver.ask("", chain="d")
    driver.answer(4)
    assert driver.chains.size() == 2 + 5
    driver.now_ns = 100 * S
    driver.ask("plan", chain="e", resume="k4")
    driver.answer(5)
    assert driver.chains.size() == 1 + 1


def test_a_fixed_limit_gives_nothing_on_and_ends_the_chain_with_the_step() -> None:
    driver = Driver(step_limit_ms=2000)
    assert driver.ask("plan").share_ns == 2 * S
    assert driver.answer(0, 100 * MS) == ("k0", 7900 * MS, 2 * S)
    assert driver.ask("act").share_ns == 2 * S
    assert driver.chains.deadline_ns() == 2100 * MS
    driver.now_ns = 2100 * MS
    assert driver.chains.ended(driver.now_ns) == [1]
    assert driver.answer(1) == ("k0", 0, -1)
    assert driver.ask("act").kind == "late"


def test_a_fixed_limit_also_holds_for_the_clients_own_step() -> None:
    driver = Driver(step_limit_ms=2000)
    driver.ask("plan")
    driver.answer(0)
    driver.now_ns = 2 * S
    assert driver.ask("act").kind == "go"
    late = Driver(step_limit_ms=2000)
    late.ask("plan")
    late.answer(0)
    late.now_ns = 2 * S + 1
    assert late.ask("act").kind == "late"


def test_checkpoints_can_be_off() -> None:
    driver = Driver(checkpoints=False)
    driver.ask("plan")
    assert driver.answer(0) == ("", 8 * S, 8 * S // 3)
    assert driver.ask("plan").kind == "go"


def test_bounds_are_kept() -> None:
    driver = Driver(chains_max=2, steps_max=2, open_max=3)
    for step in ("a", "b", "c"):
        driver.ask(step)
        driver.answer(driver.next - 1)
    assert driver.ask("c").kind == "go"  # a third is not remembered
    assert driver.maybe("a", chain="d") is not None
    assert driver.maybe("a", chain="e") is None  # both are within their budget
    assert driver.ask("b", chain="d").kind == "go"
    assert driver.maybe("c", chain="d") is None  # three in flight
    assert driver.chains.size() <= driver.chains.size_most()
    driver.now_ns = 8 * S
    for request in driver.chains.ended(driver.now_ns):
        driver.answer(request)
    assert driver.ask("a", chain="e").kind == "go"  # one that is over makes room


def test_a_chain_is_forgotten_some_time_after_its_end() -> None:
    driver = Driver()
    driver.ask("plan")
    driver.answer(0)
    driver.now_ns = 68 * S - 1
    assert driver.ask("plan").kind == "late"
    driver.answer(1)
    driver.now_ns = 68 * S
    assert driver.ask("plan") == Ruling("go", 76 * S, 2 * S, "")


def test_a_plan_with_a_step_twice_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="act is planned twice"):
        msgspec.convert({"chains": {"default": {"steps": [STEPS[2]] * 2}}}, Parameters)


def test_a_chain_is_known_after_its_end_and_only_to_its_user() -> None:
    driver = Driver()
    driver.ask("plan", user="ann")
    driver.answer(0)
    driver.now_ns += 9 * S

    def known(**fields: Any) -> bool:
        return driver.chains.known(arrived(9, step="x", **fields))

    assert known(user="ann", chain="c")
    assert not known(user="bob", chain="c")
    assert known(user="ann", chain="d", resume="k0")
    assert not known(user="bob", chain="d", resume="k0")


def found(driver: Driver, *done: tuple[str, str], left_ns: int = 5 * S, **fields: Any) -> None:
    event = ChainFound(
        **{"user": "", "chain": "c", "line": "", **fields}, done=done, left_ns=left_ns
    )
    driver.chains.found(driver.now_ns, event)


def test_a_step_takes_its_weights_part_of_what_is_left() -> None:
    assert share_ns(8 * S, 2, 8) == 1600 * MS
    assert share_ns(8 * S, 1, 0) == 8 * S


def test_a_chain_that_was_begun_elsewhere_goes_on_from_the_store() -> None:
    driver = Driver()
    driver.now_ns = 3 * S
    found(driver, ("plan", "s1"), ("tool2", "s2"))
    assert driver.ask("plan") == Ruling("done", 8 * S, 0, "s1")
    assert driver.answer(0) == ("s1", 5 * S, 5 * S // 3)
    assert driver.ask("act") == Ruling("go", 8 * S, 5 * S, "s2")
    driver.now_ns = 8 * S
    assert driver.chains.ended(8 * S) == [1]
    assert driver.chains.known(arrived(9, chain="d", step="x", resume="s1"))


def test_a_chain_found_over_is_late_and_can_be_resumed() -> None:
    driver = Driver()
    found(driver, ("plan", "s1"), ("act", "s2"), left_ns=0)
    assert driver.ask("more") == Ruling("late", 0, 0, "s2")
    driver.answer(0)
    assert driver.ask("act", resume="s1") == Ruling("go", 8 * S, 8 * S, "s1", undone=True)
    assert driver.ask("plan", resume="s1").kind == "done"


def test_a_chain_that_is_forgotten_when_its_step_arrives_is_found_before() -> None:
    """Else the step would begin another chain, though its store was just asked."""
    driver = Driver()
    driver.ask("plan")
    driver.answer(0)
    driver.now_ns = 68 * S
    found(driver, ("plan", "k0"), left_ns=0)
    assert driver.ask("act").kind == "late"


def test_a_known_chain_gets_the_steps_that_only_the_store_has() -> None:
    """Killed after the store had committed, and before the policy was told: its snapshot is without
    the step."""
    driver = Driver()
    driver.ask("plan")
    driver.answer(0)
    found(driver, ("plan", "k0"), ("act", "s2"), left_ns=1)
    assert driver.ask("act") == Ruling("done", 8 * S, 0, "s2")  # its budget is as it was
    assert driver.answer(1)[0] == "s2"
    found(driver, ("plan", "other"), ("act", "s2"))
    assert driver.ask("plan").checkpoint == "k0"
    state = driver.chains.state(0)
    again = Chains(section())
    again.load(state, 0)
    assert again.state(0) == state


def test_a_step_that_runs_here_now_is_not_done_by_what_is_found() -> None:
    driver = Driver()
    driver.ask("plan")
    found(driver, ("plan", "s1"))
    assert driver.ask("plan").kind == "go"  # neither has an answer yet
    driver.answer(0)
    assert driver.ask("plan").checkpoint == "k0"


def test_a_chain_found_after_one_that_went_on_from_it_shares_its_checkpoints() -> None:
    driver = Driver()
    found(driver, ("plan", "s1"), ("x", "s3"), chain="d")
    found(driver, ("plan", "s1"), ("act", "s2"), chain="c")
    assert driver.ask("plan", chain="c").checkpoint == "s1"
    assert driver.ask("act", chain="c").checkpoint == "s2"
    driver.answer(0)
    driver.answer(1)
    state = driver.chains.state(0)
    again = Chains(section())
    again.load(state, 0)
    assert again.state(0) == state
    driver.now_ns = 200 * S
    driver.ask("plan", chain="e")
    assert driver.chains.size() == 3  # nothing is left of the two


def test_what_is_found_is_bounded() -> None:
    driver = Driver(steps_max=2, chains_max=1)
    found(driver, ("a", "s1"), ("b", "s2"), ("e", "s3"))
    assert [driver.ask(step).kind for step in ("a", "b", "e")] == ["done", "done", "go"]
    found(driver, ("a", "s9"), chain="d")  # there is room for one chain
    assert driver.maybe("a", chain="d") is None
    assert driver.chains.size() <= driver.chains.size_most()


@pytest.mark.parametrize(
    ("fields", "done"),
    [
        ({"chain": ""}, ()),
        ({"left_ns": -1}, ()),
        ({}, (("a", "s1"), ("a", "s2"))),
        ({}, (("a", "s1"), ("b", "s1"))),
        ({}, (("a", ""),)),
        ({"chain": "x", "user": "bob"}, (("a", "k0"),)),
        ({"chain": "x"}, (("b", "s1"), ("a", "k0"))),
    ],
)
def test_what_cannot_be_found_changes_nothing(
    fields: dict[str, Any], done: tuple[tuple[str, str], ...]
) -> None:
    driver = Driver()
    driver.ask("plan")
    driver.answer(0)
    before = driver.chains.state(0)
    with pytest.raises(Illegal):
        found(driver, *done, **fields)
    assert driver.chains.state(0) == before


def test_what_is_left_is_told_with_the_checkpoint() -> None:
    driver = Driver()
    driver.ask("plan")
    assert driver.chains.left_ns(3 * S, 0) == 5 * S
    assert driver.chains.left_ns(9 * S, 0) == 0
    assert driver.chains.left_ns(0, 99) == -1
