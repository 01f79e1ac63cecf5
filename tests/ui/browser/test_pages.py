"""Every page, in both languages, light and dark, by its link and by the navigation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dashboards.words import Words
from tests.figures import Figure
from tests.ui.browser.harness import PAGES, PROBES, looking

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App, Demo, Look

pytestmark = pytest.mark.ui
LANGUAGES = ("en", "zh")


def test_no_page_says_an_error(
    browser: Browser, app: App, measured: Callable[[Figure], None]
) -> None:
    words = Words.load()
    looks = good = 0
    wrong: list[str] = []
    wide: list[str] = []

    def judge(look: Look, what: str) -> None:
        nonlocal looks, good
        found = [*look.wrong, *look.faults()]
        looks += 1
        good += not found
        wrong.extend(f"{what}: {each}" for each in found)
        look.wrong.clear()

    for dark in (False, True):
        for language in LANGUAGES:
            dress = f"{language}-{'dark' if dark else 'light'}"
            with looking(browser, app, dark=dark) as look:
                for page in PAGES:
                    look.open(page, lang=language)
                    look.shot(f"{page}-{dress}")
                    wide.extend(f"{page} {dress}" for _ in range(is_wide(look)))
                    judge(look, f"{page} {dress} by its link")
                look.open(lang=language)
                for page in reversed(PAGES):
                    look.go(words.text(f"{page.replace('-', '_')}.title", language))
                    judge(look, f"{page} {dress} by the navigation")
    assert wide == [], "nothing has to be scrolled sideways on a laptop"
    measured(
        Figure(
            "pages_without_console_error_pct", 100 * good / looks, "%", "= 100",
            f"{looks} looks at {len(PAGES)} pages in a real Chromium: in English and Chinese, light"
            " and dark, by link and by navigation; no console error, no failed request, no"
            " exception. Left out are the 404 of Streamlit's own probes of"
            f" {' and '.join(PROBES)} below a page's path, which come with every link."
            + "".join(f" {each[:120]};" for each in wrong[:3]),
        )
    )  # fmt: skip


def test_a_controller_at_work_is_seen(look: Look, controller: Demo) -> None:
    look.open("live")
    look.key("fleet_map").wait_for()
    with controller.traffic():
        look.page.wait_for_timeout(6000)
        look.shot("live-under-load")


def is_wide(look: Look) -> bool:
    """Whether something lies beyond the window's side."""
    wide, window = look.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    beyond = look.page.get_by_test_id("stMain").evaluate(
        "(one) => one.scrollWidth - one.clientWidth"
    )
    return bool(wide > window or beyond > 1)
