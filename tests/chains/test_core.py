"""What steps may take, and what a gateway's answers mean: no IO, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.chains.asking import Ask, ModelCall, Reply, Unreachable, Wait, ask, encode_body
from controller.chains.core import (
    NS_PER_MS,
    RESERVE_NS,
    STEPS_MOST,
    ChainError,
    ChainOver,
    Course,
    Step,
    StepFailed,
    check_name,
)
from policy.parameters.chains import Plan
from policy.parameters.chains import Step as Planned

S = 1_000_000_000
NAMES = ("intent_parse", "tool_selection", "db_query", "summary", "memory_update")
PLAN = Plan(
    budget_ms=8050,  # 8 s, and what is kept back for the caller
    steps=tuple(Planned(name, part) for name, part in zip(NAMES, (2, 1, 4, 2, 1), strict=True)),
)


def course(left_ns: int | None = None) -> Course:
    return Course(PLAN, 0, left_ns)


def run(one: Course, name: str, now_ns: int, took_ns: int) -> Step:
    step = one.begin(name, "function", now_ns)
    one.came_back(step)
    one.finish(step, now_ns + took_ns)
    return step


def test_each_step_gets_its_share_of_what_is_left() -> None:
    one = course()
    assert run(one, "intent_parse", 0, S).share_ns == 1_600_000_000
    # 0.6 s were left over: they flow on.
    assert run(one, "tool_selection", S, 2 * S).share_ns == 7 * S // 8
    # And what it took too much is taken from those after it.
    assert run(one, "db_query", 3 * S, S).share_ns == 5 * S * 4 // 7
    assert run(one, "summary", 4 * S, S).share_ns == 4 * S * 2 // 3
    assert run(one, "memory_update", 5 * S, S).share_ns == 3 * S
    result = one.result(6 * S, "c", "u", "t")
    assert not result.partial
    assert result.left_ms == 2000
    assert result.spent_ms == dict(zip(NAMES, (1000, 2000, 1000, 1000, 1000), strict=True))


def test_a_step_may_be_left_out_and_its_time_flows_on() -> None:
    one = course()
    assert run(one, "summary", 0, S).share_ns == 8 * S * 2 // 3
    result = one.result(S, "c", "u", "t")
    assert not result.partial
    assert result.missing["db_query"] == "not called"


def test_numbered_repetitions_have_their_steps_weight() -> None:
    one = course()
    for number in ("", "#2", "#3"):
        assert run(one, f"db_query{number}", 0, 0).share_ns == 8 * S * 4 // 7
    with pytest.raises(ChainError, match="is done already: number repetitions, as db_query#2"):
        one.begin("db_query#2", "function", 0)
    for wrong in ("db_query#", "db_query#x", "query"):
        with pytest.raises(ChainError, match=r"not in the chain's definition"):
            one.begin(wrong, "function", 0)
    assert list(one.steps) == ["db_query", "db_query#2", "db_query#3"], "nothing was changed"


def test_when_nothing_is_left_what_runs_is_ended_and_the_rest_is_not_begun() -> None:
    one = course()
    run(one, "intent_parse", 0, S)
    saving, model, function, coroutine = (
        one.begin(name, kind, S)  # type: ignore[arg-type]
        for name, kind in (
            ("tool_selection", "model"), ("db_query", "model"), ("db_query#2", "function"),
            ("db_query#3", "coroutine"),
        )
    )  # fmt: skip
    assert one.came_back(saving)
    with pytest.raises(ChainOver, match="step 'summary' was not begun"):
        one.begin("summary", "model", 8 * S)
    assert one.over
    assert [step.outcome for step in (model, function, coroutine)] == ["ended", "late", "ended"]
    one.finish(saving, 8 * S)  # it was back in time, and is only committed now
    one.finish(model, 8 * S)  # this was not
    assert not one.came_back(function)
    result = one.result(8 * S, "c", "u", "t")
    assert result.partial
    assert list(result.values) == ["intent_parse", "tool_selection"]
    assert result.missing == {
        "summary": "the chain's time was over",
        "memory_update": "the chain's time was over",
        "db_query": "ended: the chain's time was over",
        "db_query#2": "late: the chain's time was over",
        "db_query#3": "ended: the chain's time was over",
    }
    assert one.left_ns(0) == 0, "it is over for good"


def test_a_step_that_failed_may_be_tried_again() -> None:
    one = course()
    step = one.begin("summary", "model", 0)
    with pytest.raises(ChainError, match="is open already"):
        one.begin("summary", "model", 0)
    one.fail(step, S, "no answer")
    assert one.missing()["summary"] == "failed: no answer"
    assert run(one, "summary", 2 * S, S).spent_ns == 2 * S
    assert "summary" not in one.missing()


def test_what_is_kept_is_not_begun_again() -> None:
    one = course(left_ns=2 * S)
    assert one.left_ns(0) == 2 * S - RESERVE_NS
    kept = Step("summary", "model", "kept", "said", checkpoint="cp-1")
    assert one.keep(kept) is kept
    assert one.keep(Step("summary", "model", "kept", "other")) is kept
    with pytest.raises(ChainError, match="is kept already"):
        one.begin("summary", "model", 0)
    opened = one.begin("db_query", "function", 0)
    assert one.keep(Step("db_query", "function", "kept")) is opened
    assert one.result(0, "c", "u", "t").checkpoint == "cp-1"


def test_a_budget_is_never_more_than_it_was() -> None:
    assert course(left_ns=1 << 60).left_ns(0) == 8 * S
    assert course(left_ns=-1).left_ns(0) == 0
    one = course()
    one.told_left(S, 2 * S)
    assert one.left_ns(S) == 2 * S
    one.told_left(S, 5 * S)
    assert one.left_ns(S) == 2 * S
    short = Course(Plan(budget_ms=100, steps=PLAN.steps), 0)
    assert short.left_ns(0) == 95 * NS_PER_MS


def test_steps_have_a_bound() -> None:
    one = course()
    for number in range(2, STEPS_MOST + 2):
        run(one, f"db_query#{number}", 0, 0)
    with pytest.raises(ChainError, match="begin a new chain"):
        one.begin("db_query", "function", 0)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.lists(st.floats(0, 3), min_size=12, max_size=12),
    st.integers(1, 100_000),
)
@settings(deadline=None)
def test_shares_add_up_to_the_budget(
    weights: list[int], takes: list[float], budget_ms: int
) -> None:
    plan = Plan(budget_ms, tuple(Planned(f"s{n}", part) for n, part in enumerate(weights)))
    one, exact, now_ns, exact_ns = Course(plan, 0), Course(plan, 0), 0, 0
    whole_ns = one.left_ns(0)
    for place, take in zip(range(len(weights)), takes, strict=False):
        # Who takes exactly his share leaves exactly theirs to the others.
        step = run(exact, f"s{place}", exact_ns, 0)
        exact_ns += step.share_ns
        part_ns = whole_ns * weights[place] // sum(weights)
        assert abs(step.share_ns - part_ns) <= len(weights) + 1
        if one.left_ns(now_ns) == 0:
            continue
        step = one.begin(f"s{place}", "function", now_ns)
        assert 0 <= step.share_ns <= one.left_ns(now_ns)
        took_ns = min(int(step.share_ns * take), one.left_ns(now_ns))
        now_ns += took_ns
        one.finish(step, now_ns)
    assert exact_ns == whole_ns
    assert now_ns <= whole_ns


def test_names_that_cannot_be_sent_are_refused() -> None:
    assert check_name("user", "Jürgen / 42") == "Jürgen / 42"
    for wrong in ("", "a\nb", "\x7f", "\ud800", "x" * 257):
        with pytest.raises(ChainError, match="the user is"):
            check_name("user", wrong)


# ---- model calls ----


def asked(
    *replies: Reply | Unreachable, goes_on: bool = False, resume: str = "", took_ns: int = S // 10
) -> tuple[list[Ask | Wait], Step, Course]:
    """What was done to have a step answered, given what came back each time."""
    one = course()
    step = one.begin("intent_parse", "model", 0)
    call = ModelCall("/v1/chat/completions", b"{}", {"x-twinkeel-chain": "c"}, resume, goes_on)
    asking, done, now_ns, left = ask(one, step, call), [], 0, list(replies)
    came: Any = None
    try:
        todo = next(asking)
        while True:
            done.append(todo)
            now_ns += took_ns if isinstance(todo, Ask) else todo.for_ns
            came = left.pop(0) if isinstance(todo, Ask) else None
            todo = asking.send((now_ns, came))
    except StopIteration:
        assert not left
    return done, step, one


def good(**headers: str) -> Reply:
    return Reply(200, {k.replace("_", "-"): v for k, v in headers.items()}, b'{"choices": []}')


OVER = good(x_twinkeel_degraded="chain_budget", x_twinkeel_checkpoint="cp-g7")


def test_an_answer_is_taken_with_what_the_gateway_says_of_it() -> None:
    done, step, one = asked(
        good(
            x_twinkeel_checkpoint="cp-g1", x_twinkeel_chain_left_ms="3000",
            x_twinkeel_confidence="0.812", x_request_id="tk-1",
        )
    )  # fmt: skip
    (sent,) = done
    assert isinstance(sent, Ask)
    assert sent.left_ns == 8 * S
    assert sent.headers == {"x-twinkeel-chain": "c", "x-twinkeel-deadline-ms": "1600"}
    assert step.value == {"choices": []}
    assert step.gateway_checkpoint == "cp-g1"
    assert step.attributes == {"confidence": "0.812", "request": "tk-1"}
    assert one.left_ns(S // 10) == 3 * S, "the gateway has less left than we thought"


def test_what_is_not_there_is_tried_again_while_there_is_time() -> None:
    shed = Reply(429, {"retry-after": "1"}, b"")
    done, _, _ = asked(Unreachable("refused"), shed, Unreachable("reset"), good())
    waits = [todo.for_ns for todo in done if isinstance(todo, Wait)]
    assert waits == [S // 10, S, 4 * S // 10]
    deadlines = [t.headers["x-twinkeel-deadline-ms"] for t in done if isinstance(t, Ask)]
    assert deadlines == ["1600", "7800", "6700", "6200"], "what it takes more, later steps lack"
    with pytest.raises(StepFailed, match="did not answer: refused"):
        asked(*[Unreachable("refused")] * 20, took_ns=0)
    with pytest.raises(StepFailed, match="429"):
        asked(Reply(429, {"retry-after": "60"}, b""))
    with pytest.raises(ChainOver):
        asked(Unreachable("time"), took_ns=8 * S)


def test_what_is_refused_is_not_tried_again() -> None:
    body = b'{"error": {"message": "no such model"}}'
    with pytest.raises(StepFailed, match="step 'intent_parse': 404: no such model") as caught:
        asked(Reply(404, {}, body))
    assert (caught.value.status, caught.value.body) == (404, body)
    with pytest.raises(StepFailed, match="500"):
        asked(Reply(500, {}, b"oh"))
    with pytest.raises(StepFailed, match="only a template"):
        asked(good(x_twinkeel_degraded="template"))
    with pytest.raises(StepFailed, match="no JSON"):
        asked(Reply(200, {}, b"<html>"))


def test_a_chain_that_is_over_at_the_gateway() -> None:
    with pytest.raises(ChainOver, match="at the gateway"):
        asked(OVER)
    # Who resumes is told first what the gateway kept last, and goes on from there.
    done, _, _ = asked(OVER, good(), goes_on=True)
    assert [todo.headers.get("x-twinkeel-resume") for todo in done if isinstance(todo, Ask)] == [
        None, "cp-g7",
    ]  # fmt: skip
    # Who goes back further says so from the start.
    done, _, _ = asked(OVER, good(), goes_on=True, resume="cp-g3")
    assert [todo.headers.get("x-twinkeel-resume") for todo in done if isinstance(todo, Ask)] == [
        "cp-g3", "cp-g3",
    ]  # fmt: skip
    with pytest.raises(ChainOver):
        asked(OVER, OVER, goes_on=True)
    with pytest.raises(ChainOver):
        asked(good(x_twinkeel_degraded="chain_budget"), goes_on=True)


def test_bodies_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ChainError, match="leave stream out"):
        encode_body("s", {"stream": True})
    with pytest.raises(ChainError, match="nothing that JSON can hold"):
        encode_body("s", {"messages": object()})
