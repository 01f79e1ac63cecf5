"""The frame of the app: pages, language, and a scenario that lives in the URL."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from dashboards import state
from dashboards.scenario import Kind, Scenario, from_query, to_query
from dashboards.words import FILE, Words
from tests.ui.conftest import DRAWN_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamlit.testing.v1 import AppTest

PAGES = re.findall(
    r"\w+", re.findall(r"PAGES = \((.*?)\)", FILE.with_name("app.py").read_text())[0]
)
CHINESE = re.compile("[\u4e00-\u9fff]")
LINKED = Scenario(
    trace="shipped:sessions",
    fleet=(Kind("h100-sxm/qwen3-8b", 2), Kind("h100-sxm/qwen3-embedding-0.6b", 3)),
    policies=("throughput", "fifo"),
    faults=("{kind: gpu_lost, at_s: 30, on: 0}",),
    slo="P0=0.8,tpot=0.05", seed=7, speed=2.0, scale=1.25, scale_lengths=0.5, assume_output=64,
)  # fmt: skip


def scenario(session: AppTest) -> Scenario:
    """What its URL says."""
    found: dict[str, Any] = dict(session.query_params)
    return from_query({n: v if isinstance(v, list) else [v] for n, v in found.items()})


def errors(session: AppTest) -> list[str]:
    assert not session.exception, session.exception[0]
    return [error.value for error in session.error]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_drawn(app: Callable[..., AppTest], page: str, language: str) -> None:
    session = app(page, {"lang": [language]})
    assert errors(session) == []
    assert session.header[0].value == Words.load().text(f"{page}.title", language)
    assert bool(CHINESE.search(session.sidebar.subheader[0].value)) == (language == "zh")


def test_a_click_is_taken_with_what_was_typed_before_it(app: Callable[..., AppTest]) -> None:
    session = app("", {"trace": ["shipped:sessions"], "policy": ["fifo"]})
    session.number_input("form_seed").set_value(3)
    session.button("job_replay").click().run()
    assert errors(session) == []
    asked = [job.request for job in state.jobs().recent("replay")]
    assert [(each["seed"], each["trace"]) for each in asked] == [(3, "shipped:sessions")]
    assert scenario(session).seed == 3


def test_a_link_sets_the_form(app: Callable[..., AppTest]) -> None:
    session = app("", to_query(LINKED))
    assert errors(session) == []
    assert scenario(session) == LINKED
    form = session.session_state
    assert session.selectbox("form_trace").value == LINKED.trace
    assert session.number_input("form_replicas_1").value == 3
    assert session.number_input("form_scale").value == 1.25
    assert form.form_policies == ["throughput", "fifo"]
    assert session.multiselect("form_faults").value == list(LINKED.faults)
    assert "--fault" in session.sidebar.code[0].value
    session.switch_page("app_pages/tune.py").run()
    assert scenario(session) == LINKED, "all pages share it"


def test_the_form_goes_into_the_link(app: Callable[..., AppTest]) -> None:
    session = app()
    assert scenario(session) == Scenario()
    session.number_input("form_replicas_0").set_value(9).run()
    session.text_input("form_slo").set_value("P0=0.8").run()
    session.number_input("form_scale").set_value(1.5).run()
    session.selectbox("form_trace").set_value("shipped:sessions").run()
    session.multiselect("form_policies").set_value(["throughput"]).run()
    session.button("form_add_kind").click().run()
    assert errors(session) == []
    first, second = scenario(session).fleet
    assert first == Kind("h100-sxm/qwen3-8b", 9)
    assert second.replicas == 1
    session.button("form_drop_kind").click().run()
    assert scenario(session) == Scenario(
        trace="shipped:sessions",
        fleet=(first,),
        policies=("throughput",),
        slo="P0=0.8",
        scale=1.5,
    )


def test_a_url_that_comes_late_takes_nothing_back(
    app: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who clicks quickly sends the URL of before the last click with the next one."""
    monkeypatch.setattr(state, "STALE_S", float(DRAWN_S))  # quickly, as this machine has it
    session = app()
    before = {name: list(values) for name, values in session.query_params.items()}
    session.number_input("form_replicas_0").set_value(9).run()
    assert scenario(session).fleet[0].replicas == 9
    for name, values in before.items():
        session.query_params[name] = values
    session.number_input("form_scale").set_value(2.0).run()
    assert scenario(session) == Scenario(fleet=(Kind("h100-sxm/qwen3-8b", 9),), scale=2.0)
    monkeypatch.setattr(state, "STALE_S", 0.0)
    session.query_params["seed"] = ["3"]
    session.run()
    assert scenario(session).seed == 3, "what somebody writes there is taken"


def test_a_wrong_link_is_forgotten_when_the_form_is_used(app: Callable[..., AppTest]) -> None:
    session = app("", {"scale": ["0"]})
    assert errors(session)
    session.number_input("form_replicas_0").set_value(9).run()
    assert errors(session) == []


def test_the_language_can_be_changed(app: Callable[..., AppTest]) -> None:
    session = app("", {"seed": ["5"]})
    session.button_group("lang_switch").set_value("zh").run()
    assert errors(session) == []
    assert CHINESE.search(session.header[0].value)
    assert session.query_params["lang"] in ("zh", ["zh"])
    assert scenario(session).seed == 5
    session.button_group("lang_switch").set_value("en").run()
    assert not CHINESE.search(session.header[0].value)


def test_faults_are_added_and_taken_away(app: Callable[..., AppTest]) -> None:
    session = app()
    session.selectbox("fault_kind").set_value("slow_card").run()
    session.text_input("fault_on").set_value("host0").run()
    session.button("fault_put").click().run()
    assert errors(session) == []
    fault = "{kind: slow_card, at_s: 60, on: 'host0', for_s: 60, factor_permille: 2000}"
    assert scenario(session).faults == (fault,)
    session.number_input("fault_at").set_value(10.0).run()
    session.button("fault_put").click().run()
    assert len(scenario(session).faults) == 2
    session.multiselect("form_faults").set_value([fault]).run()
    assert scenario(session).faults == (fault,)
    session.multiselect("form_faults").set_value([]).run()
    assert scenario(session).faults == ()


def test_every_fault_can_be_added(app: Callable[..., AppTest]) -> None:
    """With what the form offers for it at first."""
    session = app()
    kinds = session.selectbox("fault_kind").options
    assert len(kinds) >= 10
    for kind in kinds:
        session.selectbox("fault_kind").set_value(kind).run()
        session.button("fault_put").click().run()
        assert errors(session) == [], kind
    assert [fault.kind for fault in map(_tag, scenario(session).parsed_faults())] == kinds


class _tag:
    def __init__(self, fault: Any) -> None:
        self.kind = fault.__struct_config__.tag


def test_a_wrong_fault_is_a_sentence(app: Callable[..., AppTest]) -> None:
    session = app()
    session.selectbox("fault_kind").set_value("slow_card").run()
    session.number_input("fault_size_slow_card").set_value(5).run()
    session.button("fault_put").click().run()
    assert "factor_permille" in errors(session)[0].replace("\\", "")
    assert scenario(session).faults == ()
    session.number_input("fault_size_slow_card").set_value(3000).run()
    session.button("fault_put").click().run()
    assert errors(session) == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"scale": ["0"]}, "the link's scale is '0'"),
        ({"fleet": ["h100"]}, "write PROFILE*REPLICAS"),
        ({"trace": ["shipped:none"]}, "no such trace"),
        ({"trace": ["upload:mine~0123456789abcdef.trace"]}, "upload it again"),
        ({"policy": ["upload:mine~0123456789abcdef.policy"]}, "upload it again"),
        ({"policy": ["stabel"]}, "did you mean stable"),
        ({"fleet": ["h100-sxm/none*2"]}, "h100-sxm/none"),
        ({"fault": ["{kind: fire, at_s: 1}"]}, "fire"),
        ({"slo": ["soon"]}, "soon"),
    ],
)
def test_a_bad_link_is_a_sentence(
    app: Callable[..., AppTest], query: dict[str, list[str]], said: str
) -> None:
    session = app("", query)
    assert any(said in error for error in errors(session)), errors(session)


def test_a_bad_upload_is_a_sentence(app: Callable[..., AppTest]) -> None:
    session = app()
    session.file_uploader("upload_trace").set_value(("mine.csv", b"a,b\n1,2\n", "text/csv")).run()
    assert any("mine.csv" in error for error in errors(session))
    assert scenario(session).trace == Scenario().trace
    wrong = ("mine.yaml", b"schema: 1\nnmae: x\n", "text/yaml")
    session.file_uploader("upload_policy").set_value(wrong).run()
    assert any("nmae" in error for error in errors(session))
    session.file_uploader("upload_policy").set_value(("b.yaml", b"\xff\xfe\0", "text/yaml")).run()
    assert any("b.yaml" in error or "utf-8" in error for error in errors(session))


def test_an_upload_becomes_the_scenarios_trace(app: Callable[..., AppTest]) -> None:
    session = app()
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    content = ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows).encode()
    session.file_uploader("upload_trace").set_value(("mine.csv", content, "text/csv")).run()
    assert errors(session) == []
    assert scenario(session).trace.startswith("upload:mine~")
    policy = ("own.yaml", b"schema: 1\nname: own\n", "text/yaml")
    session.file_uploader("upload_policy").set_value(policy).run()
    assert errors(session) == []
    kept = next(n for n in session.multiselect("form_policies").options if "own" in n)
    assert kept == "own"
    link = to_query(scenario(session))
    assert scenario(app("", link)) == scenario(session), "its link brings it back"
