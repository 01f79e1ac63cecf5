"""The page What-if: each of the twelve questions, from the preset, in at most three clicks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dashboards.words import Words
from tests.figures import Figure
from tests.ui.browser.harness import looking

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App

pytestmark = pytest.mark.ui
QUESTIONS = (
    "users", "capacity", "fit", "tp", "gpu", "double", "n1", "cost", "burst", "cold_start", "flag",
    "shed",
)  # fmt: skip
ANSWERED_MS = 400_000
CLICKS_MOST = 3


def test_every_question_takes_three_clicks(
    browser: Browser, app: App, measured: Callable[[Figure], None]
) -> None:
    words, clicks = Words.load(), dict[str, int]()
    for question in QUESTIONS:
        with looking(browser, app) as look:
            look.open("what-if")
            look.click(f"question_{question}")
            look.idle()
            look.click("ask_run")
            look.key("answer").wait_for(timeout=ANSWERED_MS)
            look.idle()
            asked = words.text(f"what_if.question.{question}", "en")
            assert look.page.locator("h3").filter(has_text=asked).is_visible(), question
            answer = look.text("answer")
            assert words.text("what_if.gone", "en") not in answer, question
            assert words.text("what_if.wrong", "en") in answer, answer
            assert len(answer.partition("\n")[0]) > 20, answer
            assert look.faults() == [], question
            assert look.wrong == [], question
            clicks[question] = look.clicks
    good = sum(count <= CLICKS_MOST for count in clicks.values())
    assert len(clicks) == len(QUESTIONS)
    measured(
        Figure(
            "questions_in_3_clicks", good, "questions", "= 12",
            f"each asked of the preset in a fresh tab; the most clicks were {max(clicks.values())}",
        )
    )  # fmt: skip
