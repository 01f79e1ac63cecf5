"""Confidence, verification and chains on the page Live: what is told is shown, what is not is said,
and what callers have named steers nothing."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.admin.status import AnswersView, BudgetView, ConfidenceView
from controller.store.steps import ChainLine, ChainView, StepView
from dashboards.admin import Admin
from dashboards.parts.live.answers import (
    POINTS_MOST,
    WINDOW_S,
    History,
    budget_strip,
    lately_below,
    remember,
    score_chart,
    verification_table,
)
from dashboards.parts.live.needs import why_empty
from dashboards.parts.live.waterfall import (
    STEPS_MOST,
    budget_end_s,
    head_strip,
    parts_of,
    step_table,
    waterfall,
)
from dashboards.words import Words
from policy.decisions import Verification
from tests.controller.processes import eventually
from tests.ui.canned import told
from tests.ui.controllers import BODY, CHAIN_STEPS, send_chain
from tests.ui.test_fleet import cells
from tests.ui.test_live import everything, replica, status_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from streamlit.testing.v1 import AppTest

    from tests.controller.processes import Controller

WORDS = Words.load()
EVIL = '<a href="javascript:alert(1)">x</a>'


def answers(scored: int, mean: int | None, below: int, **more: Any) -> AnswersView:
    given: dict[str, Any] = {
        "confidence": ConfidenceView(scored, mean, below), "verification": {"match": 3},
        "second_runs": 3, "budget": BudgetView(1500, 6000, 50),
    }  # fmt: skip
    return AnswersView(**{**given, **more})


def step(name: str, began_s: float, ended_s: float, **more: Any) -> StepView:
    """A request that was answered, of which nothing else is known."""
    given: dict[str, Any] = dict.fromkeys(StepView.__struct_fields__)
    given |= dict.fromkeys(
        ("why", "model", "tier", "replica", "checkpoint", "verification", "request"), ""
    )
    given |= {
        "step": name, "began_s": began_s, "ended_s": ended_s, "outcome": "answered",
        "external": False, "attributes": {},
    }  # fmt: skip
    return StepView(**{**given, **more})


def chain(*steps: StepView, **more: Any) -> ChainView:
    given: dict[str, Any] = {
        "chain": "order-17", "user": "shop/ada", "line": "agents", "trace_id": "ab" * 16,
        "budget_s": 8.0, "left_s": 5.5, "over": False, "partial": False, "steps": steps,
    }  # fmt: skip
    return ChainView(**{**given, **more})


def three_steps(**more: Any) -> ChainView:
    """A request, the client's own step, and a request that the budget ended."""
    plan = step(
        "plan", 0.0, 1.0, gateway_s=0.1, queue_s=0.2, schedule_s=0.1, prefill_s=0.2, decode_s=0.3,
        network_s=0.05, model="qwen3-8b", tier="turbo", replica="a:1", prompt_tokens=1200,
        output_tokens=7, checkpoint="ck-1", confidence=0.731, verification="match",
        request="req-1",
    )  # fmt: skip
    query = step(
        "db_query", 1.0, 1.8, outcome="done", external=True,
        attributes={"rows": 42, "similarity": 0.83, "cold": True},
    )  # fmt: skip
    summary = step("summary", 1.8, 2.5, outcome="degraded", why="chain_budget")
    return chain(plan, query, summary, **more)


@pytest.fixture
def live(
    app: Callable[..., AppTest], knows: Callable[..., None], tmp_path: Path
) -> Callable[..., Callable[..., AppTest]]:
    """Opens the page of a controller by a link."""
    file = tmp_path / "admin.token"

    def at(url: str, token: str = "a-token") -> Callable[..., AppTest]:
        file.write_text(token)
        knows({"east": url}, {"east": str(file)})
        return lambda **query: app("live", {name: [value] for name, value in query.items()})

    return at


def usual(**answers: object) -> dict[str, object]:
    """Of a controller of now."""
    return {
        "/status": status_of(replica()), "/openapi.json": {"paths": {}}, "/chains": {"chains": []},
        **{name.replace("_", "/"): value for name, value in answers.items()},
    }  # fmt: skip


# Confidence and verification


def test_what_is_told_of_answers_is_shown(live: Callable[..., Any]) -> None:
    given = answers(200, 812, 30)
    with told(usual(_status=status_of(replica(), answers=given))) as url:
        shown = everything(live(url)())
    for wanted in (
        "200 answers scored", "mean 0.812", "30 below the threshold of a second run (15.0 %)",
        "3 second runs", "1,500 of at most 6,000 tokens saved", "5 % of the tokens served",
        "a second run elsewhere said the same", "width:25.0%",
    ):  # fmt: skip
        assert wanted in shown, wanted


def test_every_status_of_a_verification_has_its_row_and_its_meaning() -> None:
    known = [name for name in Verification.__args__ if name]  # type: ignore[attr-defined]
    given = answers(1, 500, 0, verification={"mismatch": 1, "match": 3, "of_later": 4})
    rows = cells(verification_table(given))
    assert [row[2] for row in rows] == ["3", "1", "0", "0", "0", "4"]
    assert [row[3] for row in rows] == ["37.5 %", "12.5 %", "0.0 %", "0.0 %", "0.0 %", "50.0 %"]
    assert sorted(f"live.verify.{name}" for name in known) == sorted(
        key for key in WORDS.texts if key.removeprefix("live.verify.") in known
    )
    assert all(row[1] for row in rows[: len(known)])


def test_a_policy_without_second_runs_says_so_and_an_empty_budget_is_red() -> None:
    assert "makes no second runs" in budget_strip(answers(1, 500, 0, budget=None))
    empty = budget_strip(answers(1, 500, 0, budget=BudgetView(0, 6000, 50)))
    assert "0 of at most 6,000" in empty
    assert "width:0.0%" in empty


def test_why_there_is_nothing_is_said() -> None:
    none = answers(0, None, 0, verification={})
    assert "logprobs" in why_empty("confidence", status_of(replica(), answers=none))[0]
    assert why_empty("verification", status_of(replica(), answers=none))
    for panel in ("confidence", "verification"):
        assert "earlier version" in why_empty(panel, status_of(replica()))[0]
        assert why_empty(panel, status_of(replica(), answers=answers(1, 500, 0))) == []


def test_scores_are_remembered_once_and_a_new_start_forgets_them() -> None:
    history: History = deque(maxlen=POINTS_MOST)
    for at_s, scored in enumerate((0, 10, 10, 30)):
        given = answers(scored, 700 if scored else None, scored // 10)
        remember(history, status_of(answers=given), float(at_s))
    assert [(point.at_s, point.scored) for point in history] == [(1.0, 10), (3.0, 30)]
    remember(history, status_of(), 4.0)
    remember(history, status_of(answers=answers(5, 700, 0)), 5.0)
    assert [point.scored for point in history] == [5]


def test_the_share_of_low_scores_is_of_the_last_minute() -> None:
    history: History = deque(maxlen=POINTS_MOST)
    for at_s, scored, below in ((0.0, 100, 90), (1.0, 110, 91), (2 * WINDOW_S, 120, 96)):
        remember(history, status_of(answers=answers(scored, 700, below)), at_s)
    assert lately_below(history) == [None, 0.1, 0.5]
    low, mean = score_chart(history)["traces"]
    assert low["y"] == [None, 10.0, 50.0]
    assert mean["y"] == [0.7] * 3


# The waterfall


def test_the_parts_of_a_step_stand_one_after_another_and_the_rest_is_what_is_unknown() -> None:
    plan, query, summary = three_steps().steps
    parts = parts_of(plan)
    assert [name for name, _, _ in parts] == [
        "gateway", "queue", "schedule", "prefill", "decode", "network", "rest",
    ]  # fmt: skip
    assert [to_s for _, _, to_s in parts] == pytest.approx([0.1, 0.3, 0.4, 0.6, 0.9, 0.95, 1.0])
    assert [from_s for _, from_s, _ in parts[1:]] == [to_s for _, _, to_s in parts[:-1]]
    assert parts_of(query) == [("own", 1.0, 1.8)]
    assert parts_of(summary) == [("rest", 1.8, 2.5)]
    assert parts_of(step("none", 1.0, 1.0)) == []


def test_parts_that_overlap_end_with_the_step() -> None:
    parts = parts_of(step("x", 2.0, 3.0, prefill_s=0.7, decode_s=0.6, network_s=0.2))
    assert [(name, from_s, to_s) for name, from_s, to_s in parts] == [
        ("prefill", 2.0, 2.7), ("decode", 2.7, 3.0),
    ]  # fmt: skip


def test_each_part_has_its_colour_and_each_step_its_row() -> None:
    chart = waterfall(three_steps())
    colours = [trace["marker"]["color"] for trace in chart["traces"]]
    assert len(set(colours)) == len(colours) == 8
    own = chart["traces"][-1]
    assert (own["name"], own["y"], own["base"]) == ("the client's own", ["2 db_query"], [1.0])
    assert own["x"] == pytest.approx([0.8])
    assert chart["layout"]["yaxis"]["categoryarray"] == ["1 plan", "2 db_query", "3 summary"]
    (queue,) = (each for each in chart["traces"] if each["marker"]["color"] == "--hop-queue")
    (hover,) = queue["hovertext"]
    for wanted in ("qwen3-8b · turbo · a:1", "1,200 + 7", "ck-1", "0.731 · match", "answered"):
        assert wanted in hover, wanted
    (hover,) = own["hovertext"]
    for wanted in ("rows: 42", "similarity: 0.83", "cold: true", "done"):
        assert wanted in hover, wanted


def test_the_end_of_the_budget_is_drawn_where_it_is_near() -> None:
    assert budget_end_s(three_steps()) == pytest.approx(8.0)
    assert waterfall(three_steps())["layout"]["shapes"] == []
    near = waterfall(three_steps(left_s=0.5, budget_s=3.0))["layout"]
    assert [shape["x0"] for shape in near["shapes"]] == pytest.approx([3.0])
    assert near["xaxis"]["range"][1] > 3.0
    assert budget_end_s(three_steps(left_s=0.0, budget_s=2.0)) == 2.0
    assert budget_end_s(three_steps(left_s=0.0, budget_s=9.0)) is None
    assert budget_end_s(three_steps(left_s=None)) is None


def test_the_table_has_all_that_is_known_of_a_step() -> None:
    plan, query, summary = cells(step_table(three_steps().steps))
    words = " ".join(plan)
    for wanted in (
        "1 plan", "req-1", "1.00 s", "answered", "qwen3-8b", "turbo", "a:1", "1,200 + 7", "0.731",
        "match", "ck-1",
    ):  # fmt: skip
        assert wanted in words, wanted
    assert "the client&#x27;s own" in query[0]
    assert re.sub(r"\s+", " ", query[8]).strip() == "rows 42 similarity 0.83 cold true"
    assert "chain budget" in summary[3]
    assert [cell.strip() for cell in summary[4:]] == ["-"] * 5, "unknown is no figure"


def test_the_head_says_whose_it_is_what_was_left_and_that_it_is_partial() -> None:
    whole = head_strip(three_steps())
    for wanted in ("order-17", "of shop/ada", "line agents", "steps: 3", "ab" * 16):
        assert wanted in whole, wanted
    assert re.search(r"5\.50 s of 8\.00 s left", whole)
    assert ">partial<" not in whole
    assert ">partial<" in head_strip(three_steps(partial=True, over=True))
    assert "time has passed" in head_strip(three_steps(over=True))
    assert "no budget" in head_strip(three_steps(left_s=None, budget_s=None))


def test_what_callers_named_is_no_html_and_no_mark() -> None:
    bad = chain(step(EVIL, 0.0, 1.0, model=EVIL, attributes={EVIL: EVIL}), chain=EVIL, user=EVIL)
    assert "<a " not in head_strip(bad) + step_table(bad.steps)
    encoded = msgspec.json.encode(waterfall(bad)["traces"]).decode()
    assert "<a " not in encoded
    assert "&lt;a " in encoded


def test_a_long_chain_is_cut_with_a_word(live: Callable[..., Any]) -> None:
    long = chain(*(step(f"s{at}", float(at), at + 1.0) for at in range(STEPS_MOST + 5)))
    assert len(waterfall(long)["layout"]["yaxis"]["categoryarray"]) == STEPS_MOST
    with told(usual() | {"/chains/order-17": long}) as url:
        shown = everything(live(url)(chain="order-17"))
    assert f"The first {STEPS_MOST} of {STEPS_MOST + 5} are shown." in shown


# The page


def field(session: AppTest) -> Any:
    """Where the id is typed."""
    (found,) = (each for each in session.text_input if str(each.key).startswith("chain_id_"))
    return found


LINES = {
    "chains": [
        ChainLine("order-17", "shop/ada", "agents", 3, 4.0, False),
        ChainLine("order-17", "shop/bob", "agents", 1, 60.0, True),
    ]
}


def test_a_link_shows_its_chain(live: Callable[..., Any]) -> None:
    given = usual(_chains=LINES) | {
        "/chains/order-17?user=shop%2Fada": three_steps(partial=True, over=True)
    }
    with told(given) as url:
        session = live(url)(chain="order-17", chain_user="shop/ada")
        shown = everything(session)
    assert field(session).value == "order-17"
    for wanted in ("db_query", "This chain is partial", "chain_waterfall", "shop/bob", "ck-1"):
        assert wanted in shown, wanted


def test_a_chain_is_typed_or_picked_and_stands_in_the_link(live: Callable[..., Any]) -> None:
    given = usual(_chains=LINES) | {
        "/chains/order-17": three_steps(),
        "/chains/order-17?user=shop%2Fbob": chain(step("of-bob", 0.0, 1.0), user="shop/bob"),
    }
    with told(given) as url:
        session = live(url)()
        assert "or pick one: its waterfall is shown" in everything(session)
        field(session).set_value(" order-17 ").run()
        assert "db_query" in everything(session)
        assert session.query_params["chain"] == "order-17"
        session.selectbox("chain_pick").set_value(("order-17", "shop/bob")).run()
        shown = everything(session)
        assert "of-bob" in shown
        assert "db_query" not in shown
        assert session.query_params["chain_user"] == "shop/bob"
        assert session.selectbox("chain_pick").value is None
        assert field(session).value == "order-17"
        field(session).set_value("order-18").run()
        assert "No step of a chain order-18 is known" in everything(session)
        assert "chain_user" not in session.query_params
        field(session).set_value("").run()
        assert "chain" not in session.query_params


def test_the_page_is_in_chinese(live: Callable[..., Any]) -> None:
    given = usual(_chains=LINES) | {"/chains/order-17": three_steps(partial=True)}
    with told(given) as url:
        shown = everything(live(url)(chain="order-17", lang="zh"))
    for wanted in ("调用链逐步查看", "客户端自有步骤", "此调用链不完整", "预填充"):
        assert wanted in shown, wanted


def test_without_chains_it_says_how_to_make_one(live: Callable[..., Any]) -> None:
    with told(usual()) as url:
        session = live(url)()
        assert "x-twinkeel-chain: order-17" in session.main.code[0].value
        assert WORDS.text("live.chain.none_yet", "en") in everything(session)


def test_a_controller_of_an_earlier_version_is_no_error(live: Callable[..., Any]) -> None:
    status = msgspec.to_builtins(status_of(replica()))
    del status["answers"]
    with told({"/status": status, "/openapi.json": {"paths": {}}}) as url:
        session = live(url)(chain="order-17")
        shown = everything(session)
    assert not session.error
    assert WORDS.text("live.chain.not_told", "en") in shown
    assert shown.count("does not tell how far answers can be trusted") == 2


# A controller at work


def test_a_real_chain_is_shown(controller: Controller, live: Callable[..., Any]) -> None:
    name = f"chain {time.time_ns()}/a"
    send_chain(controller.url, name)
    admin = Admin(controller.admin_url, controller.admin_token)
    found = eventually("the chain is known", lambda: admin.chain(name))
    assert [each.step for each in found.steps] == list(CHAIN_STEPS)
    assert admin.chain(name, "nobody") is None
    assert (name, "ada") in [(line.chain, line.user) for line in admin.chains()]
    shown = everything(
        live(controller.admin_url, controller.admin_token)(chain=name, chain_user="ada")
    )
    for wanted in (*CHAIN_STEPS, str(BODY["model"]), found.trace_id, found.steps[0].checkpoint):
        assert wanted, found
        assert wanted in shown, wanted
