"""A chain that went through a controller at work, as somebody sees it who has its id."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from dashboards.words import Words
from tests.controller.processes import eventually
from tests.ui.browser.harness import looking
from tests.ui.browser.test_pages import is_wide
from tests.ui.controllers import CHAIN_STEPS, send_chain

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App, Demo, Look

pytestmark = pytest.mark.ui
HOVER_MS = 3000
ROWS_JS = """(one) => [...one.querySelectorAll(".yaxislayer-above .ytick text, .ytick text")]
  .map((each) => each.textContent)"""
BARS_JS = """(one) => [...one.querySelectorAll(".barlayer .point path")]
  .filter((each) => each.getBoundingClientRect().width > 0).length"""
LEGEND_JS = """(one) => [...one.querySelectorAll(".legendtext")].map((each) => each.textContent)"""


def waterfall_of(look: Look, name: str) -> None:
    """It is the one of that chain: all its rows, in colours, and what is known beneath."""
    chart = look.key("chain_waterfall")
    chart.locator(".barlayer .point").first.wait_for()
    look.idle(1)
    rows = dict.fromkeys(chart.evaluate(ROWS_JS))
    assert list(rows) == [f"{number} {step}" for number, step in enumerate(CHAIN_STEPS, 1)]
    assert chart.evaluate(BARS_JS) >= len(CHAIN_STEPS) + 2, "parts of requests are apart"
    parts = chart.evaluate(LEGEND_JS)
    assert {"prefill", "decode", "the client's own"} <= set(parts), parts
    shown = look.text("chains")
    for wanted in (name, "rows 42", "similarity 0.83", "of ada", "qwen3-8b", "left after its last"):
        assert wanted in shown, wanted


def hovered(look: Look) -> str:
    """What is said of the first bar under the mouse. The page draws it anew all the while, and then
    the mouse has to move again."""
    bar = look.key("chain_waterfall").locator(".barlayer .point").first
    hover = look.page.locator(".hoverlayer .hovertext").first

    def said() -> str:
        bar.scroll_into_view_if_needed()
        box = bar.bounding_box()
        if box is None:
            return ""
        look.page.mouse.move(0, 0)
        look.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        with contextlib.suppress(PlaywrightTimeoutError):
            return hover.text_content(timeout=HOVER_MS) or ""
        return ""

    found: str = eventually("something is said of it", said, 60.0)
    return found


def test_a_chain_is_found_by_its_id_and_by_its_link(
    browser: Browser, app: App, look: Look, controller: Demo
) -> None:
    words, name = Words.load(), f"order {time.time_ns()}/a"
    send_chain(controller.url, name)
    look.open("live")
    look.key("chain_id").wait_for()
    assert words.text("live.chain.choose", "en") in look.text("chains")
    look.fill("chain_id", name)
    waterfall_of(look, name)
    assert parse_qs(urlsplit(look.page.url).query)["chain"] == [name]
    assert not is_wide(look)
    look.shot("live-chain", "chains")
    assert words.text("live.chain.took", "en") in hovered(look)

    with looking(browser, app, dark=True) as other:
        other.page.goto(look.page.url)
        waterfall_of(other, name)
        assert other.key("chain_id").locator("input").input_value() == name
        other.shot("live-chain-dark", "chains")
        other.fill("chain_id", f"{name}x")
        other.page.get_by_text("No step of a chain").wait_for()
        other.key("chain_waterfall").wait_for(state="hidden")
        assert other.faults() == []
        assert other.wrong == []


def test_a_chain_is_picked_from_the_list(look: Look, controller: Demo) -> None:
    name = f"picked-{time.time_ns()}"
    send_chain(controller.url, name)
    look.open("live")
    box = look.key("chain_pick").locator("input")
    option = look.page.get_by_role("option").filter(has_text=name)
    look.unfold(box, option)
    option.click()
    waterfall_of(look, name)
    query = parse_qs(urlsplit(look.page.url).query)
    assert (query["chain"], query["chain_user"]) == ([name], ["ada"])


def test_what_is_typed_is_not_lost_while_the_page_polls(look: Look) -> None:
    look.open("live")
    box = look.key("chain_id").locator("input")
    box.wait_for()
    box.press_sequentially("half a na")
    look.page.wait_for_timeout(7000)
    assert box.input_value() == "half a na"
