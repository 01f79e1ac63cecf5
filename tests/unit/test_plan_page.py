"""The list of questions, what makes answers wrong, charts, and the report as a page."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from tests.support import write_rows
from tests.unit.test_plan import rows
from twin.plan.catalogue import QUESTIONS, Parameter, question_of
from twin.plan.charts import knee_charts, sizes_chart
from twin.plan.cli import ask
from twin.plan.doubts import FEW_DAYS, KINDS, ONE_DAY, OTHER_TRAFFIC, SHORT, TWO_DAYS, doubts
from twin.plan.doubts import QUESTIONS as DOUBTED
from twin.plan.estimates import Estimate, exact
from twin.plan.inputs import PlanError
from twin.plan.page import Paper, page
from twin.plan.preparing import named_in
from twin.plan.questions import Answer
from twin.plan.show import document_of, estimate_of

if TYPE_CHECKING:
    from pathlib import Path

FACTS: dict[str, Any] = {
    "trace": "<t>.parquet", "model": "qwen3-8b", "rows": 100, "span_s": 90.0,
    "peak_rate_per_s": 3.0, "users": 5, "notes": ["a note"], "policy": "stable",
    "promise": "P0 p95 1 s", "confidence": 0.9, "tpot_s": 0.1, "draws": FEW_DAYS, "seed": 0,
    "machines": [{
        "name": "h100-sxm/qwen3-8b", "kind": "fitted", "fitted_on": "a server",
        "usd_per_hour": 2.5, "price_source": "a list",
    }],
}  # fmt: skip


def estimate(value: float, low: float, high: float, kind: str = "fitted") -> dict[str, Any]:
    one = Estimate("knee", value, low, high, "x the load", kind)  # type: ignore[arg-type]
    return dict(document_of(Answer("", (), (one,)))["figures"][0])


def a_plan() -> dict[str, Any]:
    """A document of a plan, with a class that gets no answer at the largest load."""
    size = {
        "machine": "h100-sxm/qwen3-8b", "growth": 1.0, "bracket": [2, 4],
        "replicas": estimate(4, 3, 4), "refused": None, "usd_per_month": estimate(7300, 5475, 7300),
        "usd_per_million_good_tokens": None, "figures": [],
    }  # fmt: skip
    refused = {"name": "l40s/qwen3-8b", "gate": "rate", "why": "not even 8 hold"}
    none = {**size, "machine": "l40s/qwen3-8b", "replicas": None, "refused": refused}
    effect = {"kind": "class", "group": "P0", "points": estimate(5, 3, 7),
              "lasts_s": estimate(9, 4, math.inf), "missed": estimate(1, 0, 2)}  # fmt: skip
    curve = [
        {"multiple": 0.8, "holds": True, "attainment": {"P0": 1.0}, "ttft_s_p95": {"P0": 0.3}},
        {"multiple": 1.6, "holds": False, "attainment": {"P0": 0.5}, "ttft_s_p95": {"P0": None}},
    ]
    need = {"kind": "class", "group": "P0"}
    return {
        "growths": [1.0], "sizes": [size, none], "rejected": [refused],
        "faults": [{"size": size, "fault": "n-1", "holds": False, "effects": [effect],
                    "replicas": estimate(6, 6, 7), "cause": None}],
        "promise": {"needs": [{**need, "what": "ttft_s_p95", "limit": 1.0},
                              {**need, "what": "attainment", "limit": 0.95}]},
        "knee": {
            "machine": "h100-sxm/qwen3-8b", "replicas": 4, "multiple": estimate(1.2, 1.1, 1.4),
            "curve": curve, "broken": [], "outside": "",
            "cause": {"part": "KV cache", "why": "it is full", "knob": "more memory"},
        },
        "sentences": ["With 4 <H100> you hold it.", "Another."],
    }  # fmt: skip


def test_the_list_is_what_the_command_line_takes() -> None:
    assert set(QUESTIONS) == set(ask.commands)
    for name, question in QUESTIONS.items():
        given = {one.opts[0]: one for one in ask.commands[name].params}
        for parameter in question.parameters:
            if parameter.name == "NAME":
                assert isinstance(given["name"], click.Argument)
                continue
            option = given[f"--{parameter.name}"]
            assert option.required or option.default == parameter.usual
        assert ("--have" in given) == question.have
        assert ("--trace" in given) != question.plain


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("whole", 1.5, "write a whole number"), ("whole", 99, "between 1 and 10"),
        ("number", math.nan, "between"), ("number", "3", "write a number"),
        ("text", "", "write a name"), ("whole", True, "write a number"),
        ("whole", math.nan, "between"), ("whole", math.inf, "between"),
        ("whole", 10**400, "between"),
    ],
)  # fmt: skip
def test_what_a_parameter_cannot_be_is_told(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Parameter("n", kind, 1, "", 1, 10).checked(value)


def test_questions_are_found_and_asked_by_name() -> None:
    with pytest.raises(PlanError, match="no question 'why'"):
        question_of("why")
    fit = question_of("fit")
    with pytest.raises(PlanError, match="takes no depth"):
        fit.checked({"depth": 1})
    answer = fit.answer(None, {"NAME": "h100-sxm/qwen3-8b", "context": 8192})
    assert "45 such requests at once" in answer.sentences[0]


def test_every_question_says_what_would_make_it_wrong() -> None:
    assert set(DOUBTED) == {*QUESTIONS, "plan"}
    answer = document_of(Answer("", ("x",), (exact("a", 1.0, "", "estimated"),)))
    assert KINDS["estimated"] in doubts("fit", answer, None)
    assert OTHER_TRAFFIC not in doubts("fit", answer, None)
    told = doubts("cost", answer, {**FACTS, "span_s": 20.0, "draws": 1})
    assert told[:2] == [SHORT, ONE_DAY]
    assert TWO_DAYS in doubts("cost", answer, {**FACTS, "draws": 2})
    assert KINDS["fitted"] in doubts("plan", a_plan(), FACTS)


def test_a_figure_comes_back_from_its_document() -> None:
    one = Estimate("lasts", 3.0, 1.0, math.inf, "s", "fitted", 4)
    assert estimate_of(document_of(Answer("", (), (one,)))["figures"][0]) == one


def test_the_knees_charts_show_the_promise_and_what_holds() -> None:
    charts = knee_charts(a_plan())
    attainment, ttft = charts["attainment"], charts["ttft"]
    assert ttft["layout"]["yaxis"]["type"] == "log"
    assert [one["y"] for one in ttft["traces"]] == [[0.3, None], [1.0, 1.0]]
    assert [one["y"] for one in attainment["traces"]] == [[100.0, 50.0], [95.0, 95.0]]
    holds, knee, _ = attainment["layout"]["shapes"]
    assert holds["x1"] == 1.2
    assert (knee["x0"], knee["x1"]) == (1.1, 1.4)
    assert knee_charts({"knee": None}) == {}


def test_the_sizes_chart_leaves_out_what_has_no_answer() -> None:
    chart = sizes_chart(a_plan())
    assert chart is not None
    assert [one["y"] for one in chart["traces"]] == [[4]]
    assert sizes_chart({"sizes": [], "growths": []}) is None


def test_a_page_shows_all_and_trusts_no_text() -> None:
    whole = page(Paper("plan", "Plan", a_plan(), FACTS, "twinkeel plan --gpus <x>", {"K": "<v>"}))
    for text in (
        "With 4 &lt;H100&gt; you hold it.", "&lt;t&gt;.parquet", "KV cache", "gate rate",
        "losing one card at the peak", "a list", "twinkeel plan --gpus &lt;x&gt;", "&lt;v&gt;",
        "knee-attainment", OTHER_TRAFFIC,
    ):  # fmt: skip
        assert text in whole, text
    bare = page(Paper("plan", "Plan", {**a_plan(), "knee": None, "faults": []}, FACTS, "c"))
    assert "knee-attainment" not in bare


def test_an_answers_page_comes_from_the_command_line(tmp_path: Path) -> None:
    path, out = tmp_path / "fit.html", tmp_path / "fit.json"
    given = ["fit", "h100-sxm/qwen3-8b", "--html", str(path), "--out", str(out)]
    result = CliRunner().invoke(ask, given)
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    assert json.loads(out.read_text())["sentences"][0][:40] in text
    assert "Do the model and that context fit" in text


def test_what_a_trace_names(tmp_path: Path) -> None:
    named = named_in(write_rows(tmp_path / "a.parquet", rows(40)))
    assert named.users
    assert named.lines == ("logs", "shop")
    assert named.classes == ("P0", "P1")
    bare = rows(40, user_id=None, business_line=None, sla_class=None)
    named = named_in(write_rows(tmp_path / "b.parquet", bare))
    assert (named.users, named.lines, named.classes) == (False, (), ("",))
