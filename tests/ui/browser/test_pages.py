"""Every page, in both languages, light and dark, by its link and by the navigation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dashboards.words import Words
from tests.figures import Figure
from tests.ui.browser.harness import PAGES, PROBES, looking

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App, Look

pytestmark = pytest.mark.ui
SHOTS = Path("build/ui-screenshots")
LANGUAGES = ("en", "zh")


def test_no_page_says_an_error(
    browser: Browser, app: App, measured: Callable[[Figure], None]
) -> None:
    words = Words.load()
    looks = good = 0
    wrong: list[str] = []
    SHOTS.mkdir(parents=True, exist_ok=True)

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
            for page in PAGES:
                with looking(browser, app, dark=dark) as look:
                    look.open(page, lang=language)
                    look.page.screenshot(path=SHOTS / f"{page}-{dress}.png")
                    judge(look, f"{page} {dress} by its link")
            with looking(browser, app, dark=dark) as look:
                look.open(lang=language)
                for page in reversed(PAGES):
                    look.go(words.text(f"{page.replace('-', '_')}.title", language))
                    judge(look, f"{page} {dress} by the navigation")
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


def test_a_page_fits_a_laptop(browser: Browser, app: App) -> None:
    """Nothing has to be scrolled sideways."""
    for dark in (False, True):
        with looking(browser, app, dark=dark) as look:
            for page in PAGES:
                look.open(page)
                wide, window = look.page.evaluate(
                    "() => [document.documentElement.scrollWidth, innerWidth]"
                )
                assert wide <= window, page
                main = look.page.get_by_test_id("stMain")
                assert main.evaluate("(one) => one.scrollWidth - one.clientWidth") <= 1, page
