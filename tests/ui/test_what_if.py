"""The page what-if: its requests, its work beside the command line's, and what it shows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

from dashboards import state
from dashboards.parts.what_if import settings as asked
from dashboards.parts.what_if.answer import figure_name, plain_text
from dashboards.scenario import Scenario
from dashboards.shelf import Shelf
from dashboards.work import ask, plan
from tests.controller.processes import eventually
from tests.support import write_rows
from tests.unit.test_plan import rows
from twin.plan.catalogue import QUESTIONS
from twin.plan.cli import plan as command
from twin.plan.preparing import Named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from streamlit.testing.v1 import AppTest

    from dashboards.jobs import Job

ANSWERED_S = 300.0
SLO = {"confidence_percent": 90.0, "tpot_s": 0.1, "classes": {"P0": {"attainment_percent": 90.0}}}
NAMED = Named(True, ("logs", "shop"), ("P0", "P1"), ("qwen3-8b",))


def base(trace: str) -> dict[str, Any]:
    return {
        "trace": trace, "policy": "stable", "model": "qwen3-8b", "gpus": ["h100-sxm"],
        "tp": [1], "rows": 150, "draws": 1, "assume_output": 0, "seed": 0, "prices": None,
        "slo": SLO,
    }  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A short one, uploaded, and played in this process."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("twin.plan.workload.WINDOW_LEAST_S", 2.0)
    return uploaded(write_rows(tmp_path / "t.parquet", rows(150)).path, tmp_path)


def uploaded(path: Path, tmp_path: Path) -> str:
    return Shelf(tmp_path / "ui" / "uploads").add_trace(path.name, path.read_bytes()).name


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "ui" / "jobs" / "one"
    folder.mkdir(parents=True)
    return folder


def same_from_the_command_line(
    words: list[str], trace: str, folder: Path, tmp_path: Path
) -> dict[str, Any]:
    """What the command writes, given the files that the work wrote."""
    out = tmp_path / "cli.json"
    path = Shelf(tmp_path / "ui" / "uploads").path_of(trace)
    given = ["--trace", str(path), "--slo", str(folder / plan.SLO), "--gpus", "h100-sxm",
             "--rows", "150", "--draws", "1", "--jobs", "1", "--quiet",
             "--out", str(out)]  # fmt: skip
    result = CliRunner().invoke(command, [*words, *given])
    assert result.exit_code == 0, result.output
    return dict(json.loads(out.read_text(encoding="utf-8")))


def test_an_answer_is_what_the_command_line_says(trace: str, tmp_path: Path) -> None:
    folder, said = folder_of(tmp_path), []
    request = {"question": "cost", "parameters": {}, "have": 2, **base(trace)}
    ask.run(request, folder, lambda share, text: said.append(text))
    found = json.loads((folder / ask.ANSWER).read_text(encoding="utf-8"))
    cli = same_from_the_command_line(["ask", "cost", "--have", "2"], trace, folder, tmp_path)
    assert found == cli
    facts = json.loads((folder / plan.FACTS).read_text(encoding="utf-8"))
    assert (facts["runs"], facts["rows"]) == (1, 150)
    assert said[0] == "Reading the trace"


def test_a_plan_is_what_the_command_line_says(trace: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    request = {"growths": [1.0], "faults": ["none"], **base(trace)}
    plan.run(request, folder, lambda share, text: None)
    found = json.loads((folder / plan.PLAN).read_text(encoding="utf-8"))
    words = ["--grow", "1", "--faults", "none"]
    cli = same_from_the_command_line(words, trace, folder, tmp_path)
    found.pop("wall_s"), cli.pop("wall_s")
    assert found == cli
    coarse = json.loads((folder / plan.COARSE).read_text(encoding="utf-8"))
    assert coarse["sizes"][0]["replicas"]["kind"] == "estimated"


def standing(own: asked.Settings, **more: Any) -> asked.Standing:
    limits = {"P0": 1.5, "P1": 4.0}
    now = asked.Standing("fifo", "h100-sxm", 1, "qwen3-8b", ["h100-sxm"], [1], 4, limits, limits,
                         0.1, 0.1, NAMED)  # fmt: skip
    return msgspec.structs.replace(now, **more)


def test_a_request_holds_what_decides_the_answer_and_nothing_else() -> None:
    own, scenario = asked.Settings(), Scenario()
    made = {
        name: asked.ask_request(question, scenario, own, standing(own))
        for name, question in QUESTIONS.items()
    }
    assert set(made["fit"]) == {"question", "parameters"}
    assert made["double"]["have"] == 4
    assert made["users"]["have"] == 0
    assert made["gpu"]["gpus"] == ["h100-sxm", "h200", "l40s"]
    assert made["tp"]["parameters"] == {"large": 2, "small": 1}
    classes = made["cost"]["slo"]["classes"]
    assert classes["P1"] == {"ttft_s_p95": 4.0, "attainment_percent": 95.0}
    other = asked.Settings(usd={"h200": 9.0}, gpus=("h100-sxm", "h200"))
    cards = standing(other, gpus=["h100-sxm", "h200"])
    one = asked.ask_request(QUESTIONS["cost"], scenario, other, cards)
    assert one["prices"] is None  # of a card that is not asked about
    all_of_them = asked.plan_request(scenario, other, cards)
    assert all_of_them["prices"]["gpus"]["h200"]["usd_per_hour"] == 9.0
    json.dumps(made)


def test_files_are_no_names_of_profiles() -> None:
    mine = asked.Settings(parameters={"fit": {"NAME": "mine.yaml"}})
    with pytest.raises(ValueError, match=r"mine\.yaml is a file"):
        asked.ask_request(QUESTIONS["fit"], Scenario(), mine, standing(mine))


def test_the_command_gives_the_files_too(app: Callable[..., AppTest]) -> None:
    own = asked.Settings(overflow_usd=2.0)
    request = asked.ask_request(QUESTIONS["burst"], Scenario(), own, standing(own))
    text = asked.command("ask", request)
    assert "cat > slo.yaml" in text
    assert "overflow_usd_per_million_tokens: 2.0" in text
    last = text.splitlines()[-1]
    assert last.startswith("twinkeel plan ask burst --factor 2 --trace shipped:demo --slo slo.yaml")
    assert last.endswith("--prices prices.yaml --have 4")


def test_twelve_questions_and_an_answer_in_two_clicks(app: Callable[..., AppTest]) -> None:
    page = app("what_if")
    keys = [button.key for button in page.button if str(button.key).startswith("question_")]
    assert len(keys) == 12
    page.button(key="question_fit").click().run()
    assert not page.exception
    page.button(key="ask_run").click().run()
    jobs = state.jobs()

    def answered() -> Job | None:
        jobs.look()
        (job,) = jobs.recent("ask")
        return None if job.open else job

    job: Job = eventually("it is answered", answered, ANSWERED_S, 0.2)
    assert job.state == "done", job.error
    page.run()
    assert not page.exception
    shown = " ".join(one.value for one in page.markdown)
    assert "fits with 8,192 tokens" in shown.replace("\\", "")
    assert any("CUDA graphs" in one.value for one in page.markdown)
    page.button(key="pin_ask").click().run()
    assert job.id in page.query_params["pins"]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", ["users", "tp", "gpu", "n+1", "burst", "shed"])
def test_every_question_has_its_fields(app: Callable[..., AppTest], name: str, lang: str) -> None:
    asks = msgspec.json.encode({"question": name}).decode()
    page = app("what_if", {"what_if": [asks], "lang": [lang]})
    assert not page.exception
    assert page.button(key="ask_run")


def test_a_link_brings_what_was_asked(app: Callable[..., AppTest]) -> None:
    asks = {"question": "double", "parameters": {"double": {"factor": 3.0}}, "attainment": 99.0}
    page = app("what_if", {"what_if": [json.dumps(asks)]})
    assert not page.exception
    assert [one.value for one in page.number_input if one.label == "Times today's load"] == [3.0]
    wrong = app("what_if", {"what_if": ['{"question": "why"}']})
    assert any("no question 'why'" in one.value for one in wrong.error)


def test_a_trace_without_users_is_told_before_it_is_asked(
    app: Callable[..., AppTest], tmp_path: Path
) -> None:
    bare = write_rows(tmp_path / "bare.parquet", rows(40, user_id=None, business_line=None)).path
    for name in ("users", "shed"):
        asks = msgspec.json.encode({"question": name}).decode()
        page = app("what_if", {"trace": [uploaded(bare, tmp_path)], "what_if": [asks]})
        assert not page.exception
        assert page.button(key="ask_run").disabled
        assert page.warning


def test_a_pin_that_is_gone_is_told(app: Callable[..., AppTest]) -> None:
    page = app("what_if", {"pins": ["0123"], "what_if": ['{"view": "compare"}']})
    assert not page.exception
    assert any("0123" in one.value for one in page.warning)
    page.button(key="unpin_0123").click().run()
    assert page.info


def test_names_of_figures_and_marks() -> None:
    assert plain_text("a_b*c: 1 | 2") == r"a\_b\*c\: 1 \| 2"
    assert figure_name("ttft_s_p95/P0").endswith("P0")
