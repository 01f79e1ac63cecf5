"""The page that looks at a controller: with its token, without it, and when it is gone."""

from __future__ import annotations

from html import unescape
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.text_format import MessageToString  # type: ignore[import-untyped]
from streamlit.testing.v1 import AppTest

from controller.admin.status import HopView, PolicyView, ReplicaView, Status, TierView
from controller.upstream.scrape import NEEDED
from dashboards.admin import Way
from dashboards.parts.live.found import acting, readable
from dashboards.parts.live.html import Html, badge, html_of, table
from dashboards.parts.live.needs import NEEDS, why_empty
from dashboards.parts.live.predicted import (
    POINTS_MOST,
    History,
    chosen,
    predicted_chart,
    remember,
    running_error,
)
from tests.ui.conftest import DRAWN_S
from tests.ui.controllers import DOMAIN, steps_read

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.controller.processes import Controller


def status_of(*replicas: ReplicaView, **more: Any) -> Status:
    given: dict[str, Any] = {
        "state": "serving", "observe": False, "uptime_s": 1.0,
        "policy": PolicyView("stable", "tiered", "ab"), "open_requests": 0, "settled_requests": 0,
        "lost_requests": 0, "refused_events": 0, "replicas": replicas,
        "tiers": (TierView("turbo", 0, 0, 0, -1.0, -1.0, 800),), "hops": (), "breakers": (),
        "outcomes": (), "alerts": (), "scaling": {},
    }  # fmt: skip
    return Status(**{**given, **more})


def replica(**more: Any) -> ReplicaView:
    given: dict[str, Any] = {
        "id": 0, "name": "a:1", "url": "http://a:1", "up": True, "rotation": "in",
        "rotation_why": "", "in_flight": 0, "running": 0, "waiting": 0, "kv_used_permille": 10,
        "scraped_ms_ago": 20, "output_tokens": 0, "network_ms": 1.0, "domain": "host0/card0",
        "drift_permille": 3, "steps_read": 10, "step_ms_measured": 6.0, "step_ms_predicted": 5.0,
    }  # fmt: skip
    return ReplicaView(**{**given, **more})


def everything(session: AppTest) -> str:
    """All that was sent to the browser, dialogs too, and all that the URL says."""
    assert not session.exception, session.exception[0]
    parts = [str(dict(session.query_params))]
    nodes: list[Any] = [session._tree]
    while nodes:
        node = nodes.pop()
        nodes += getattr(node, "children", {}).values()
        if getattr(node, "proto", None) is not None:
            parts.append(MessageToString(node.proto, as_utf8=True))
    return unescape("\n".join(parts))


# The page


def test_it_asks_for_the_token_and_keeps_it_to_itself(
    app: Callable[..., AppTest], controller: Controller, knows: Callable[..., None]
) -> None:
    steps_read(controller)
    knows({"east": controller.admin_url})
    session = app("live")
    assert session.text_input("token_look").value == ""
    session.text_input("token_look").set_value("no-token-of-this-controller")
    session.button("token_look_go").click().run()
    assert len(session.error) == 1
    assert "no-token-of-this" not in everything(session)
    session.text_input("token_look").set_value(controller.admin_token)
    session.button("token_look_go").click().run()
    assert not session.error
    shown = everything(session)
    assert controller.admin_token not in shown
    for wanted in (DOMAIN.partition("/")[0], "card3", "turbo", "/policies", "/drain"):
        assert wanted in shown, wanted
    assert session.session_state.live_history["east"]
    session.run()
    assert controller.admin_token not in everything(session)
    moved = session.switch_page("app_pages/deploy.py").run()
    assert controller.admin_token not in everything(moved)


def test_the_token_may_lie_in_a_file_and_a_page_is_in_chinese(
    app: Callable[..., AppTest], controller: Controller, knows: Callable[..., None]
) -> None:
    file = controller.data / "admin.token"
    knows({"east": controller.admin_url}, {"east": str(file)})
    session = app("live", {"lang": ["zh"]})
    assert "按故障域的机群" in everything(session)
    assert controller.admin_token not in everything(session)


def test_a_controller_that_is_gone_is_a_sentence(
    app: Callable[..., AppTest], knows: Callable[..., None]
) -> None:
    knows({"gone": "http://127.0.0.1:9"})
    session = app("live")
    session.text_input("token_look").set_value("whatever-it-is-called")
    session.button("token_look_go").click().run()
    assert not session.exception
    assert any("no controller answers at http://127.0.0.1:9" in each.value
               for each in session.warning)  # fmt: skip


def test_without_a_controller_it_says_how_to_name_one(app: Callable[..., AppTest]) -> None:
    session = app("live")
    assert not session.exception
    assert "--admin" in session.main.code[0].value


# Why a panel is empty


def test_what_is_missing_is_named_with_the_metric_and_the_version() -> None:
    lacking = replica(
        lacks=(NEEDED["kv_used_permille"], NEEDED["steps"]), drift_permille=None,
        scraped_ms_ago=-1, kv_used_permille=-1, domain="",
    )  # fmt: skip
    fleet = why_empty("fleet", status_of(lacking))
    assert "No replica has been scraped yet." in fleet
    assert any("vllm:kv_cache_usage_perc" in why and "0.9.2" in why for why in fleet)
    assert any("domain=" in why for why in fleet)
    (steps,) = why_empty("predicted", status_of(lacking))
    assert "twinkeel_steps_info" in steps
    assert "a:1" in steps


def test_nothing_is_explained_where_nothing_is_missing() -> None:
    full = status_of(
        replica(), hops=(HopView("prefill", 1, 1.0, 1.0),),
        tiers=(TierView("turbo", 0, 0, 1, 1.0, 1.0, 800),),
    )  # fmt: skip
    assert [why_empty(panel, full) for panel in ("fleet", "predicted", "tiers", "hops")] == [[]] * 4


def test_each_needed_metric_of_the_scrape_is_in_the_table() -> None:
    assert set(NEEDED.values()) <= {need.what for need in NEEDS}


def test_engines_that_do_not_tell_times_are_explained() -> None:
    hops = (HopView("total", 5, 1.0, 1.0), HopView("prefill", 0, -1.0, -1.0))
    (why,) = why_empty("hops", status_of(replica(), hops=hops))
    assert "--enable-per-request-metrics" in why


# Predicted against measured


def test_each_reading_is_remembered_once_and_memory_is_bounded() -> None:
    history: History = {}
    for poll in range(3 * POINTS_MOST):
        remember(history, status_of(replica(steps_read=10 + poll // 2)), float(poll))
    (points,) = history.values()
    assert len(points) == POINTS_MOST
    assert points[-1].at_s - points[-2].at_s == 2.0


def test_the_running_error_is_of_the_last_minutes() -> None:
    history: History = {}
    remember(history, status_of(replica(steps_read=1, step_ms_measured=50.0)), 0.0)
    remember(history, status_of(replica(steps_read=2, step_ms_measured=5.5)), 1000.0)
    remember(history, status_of(replica(steps_read=3, step_ms_measured=4.5)), 1001.0)
    points = chosen(history, "a:1")
    assert running_error(points, 1001.0) == (pytest.approx(0.0), pytest.approx(0.1), 2)
    assert running_error(points, 5000.0) is None
    names = [trace["name"] for trace in predicted_chart(chosen(history, ""))["traces"]]
    assert names == ["error, %", "measured", "predicted"]


# What is found


def test_what_no_panel_shows_is_found_and_acts_are_only_listed() -> None:
    ways = [
        Way("GET", "/status", ""), Way("GET", "/new-thing", "It is new."),
        Way("GET", "/log/{name}", ""), Way("POST", "/drain", ""),
    ]  # fmt: skip
    assert [way.path for way in readable(ways)] == ["/new-thing"]
    assert [way.path for way in acting(ways)] == ["/drain"]


DRAWN = """
from dashboards.admin import Answer
from dashboards.parts.live.found import draw

draw(Answer("application/json", b'{"rows": [{"a": 1, "b": "<i>"}], "n": 2, "none": []}'))
draw(Answer("text/plain", b"some text"))
draw(Answer("application/json", b"{"))
"""


def test_an_answer_is_drawn_by_its_shape() -> None:
    session = AppTest.from_string(DRAWN, default_timeout=DRAWN_S).run()
    assert "<i>" not in "".join(each.value for each in session.html)
    assert not session.exception
    assert session.code[0].value == "some text"
    assert len(session.error) == 1


# What is shown is escaped


def test_what_comes_from_elsewhere_is_no_html() -> None:
    evil = '<script>alert("x")</script>'
    for made in (html_of(evil), badge(evil, "--good"), table([evil], [[evil]])):
        assert "<script" not in made
    assert html_of(Html("<b>x</b>")) == "<b>x</b>"
