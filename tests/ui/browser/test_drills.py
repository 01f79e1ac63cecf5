"""Slots and cards, and drills: with clicks alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from dashboards.words import Words
from dashboards.work.drill import DEMO
from tests.controller.processes import eventually
from tests.fleet.support import members
from tests.ui.browser.harness import app_process, group, looking
from tests.ui.browser.test_pages import is_wide
from tests.ui.canned import CARD, SLICE, cards, document, local_fleet, told
from tests.ui.test_live import replica, status_of

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import Demo, Look

pytestmark = pytest.mark.ui
WORDS = Words.load()
WORK_MS = 300_000


def test_slots_and_cards_are_seen(browser: Browser, tmp_path: Path) -> None:
    token = tmp_path / "admin.token"
    token.write_text("a-token")
    answers: dict[str, object] = {
        "/status": status_of(replica()), "/openapi.json": {"paths": {}},
        "/fleet": document(local_fleet(), cards()),
    }  # fmt: skip
    with told(answers) as url:
        options = ("--admin", url, "--token-file", str(token))
        with app_process(tmp_path / "ui", *options) as app:
            for language, dark in (("en", False), ("zh", True)):
                with looking(browser, app, dark=dark) as look:
                    look.open("live", lang=language)
                    look.key("slots").get_by_text(SLICE).wait_for()
                    shown = look.text("slots")
                    for wanted in (CARD, "23771", WORDS.text("live.card.as_card", language)):
                        assert wanted in shown, wanted
                    look.page.wait_for_timeout(5000)  # two of its refreshes
                    assert look.key("slots").get_by_text(SLICE).count() == 1
                    assert not is_wide(look)
                    look.shot(f"live-cards-{language}", "slots")
                    assert (look.wrong, look.faults()) == ([], [])


def test_the_demo_fleet_is_drilled(look: Look) -> None:
    look.open("drills")
    look.choose("drill_kind", "engine-kill")
    look.idle(1)
    look.fill("drill_for", "20")
    look.idle(1)
    look.click("drill_go")
    look.key("cancel_drill").wait_for()
    look.key("drill_result").wait_for(timeout=WORK_MS)
    look.idle()
    shown = look.text("drill_result")
    for wanted in ("isolated alone", "alert names the cause", "SIGKILL to qwen3-8b-0",
                   WORDS.text("drills.figure.recovered_s", "en"), "after"):  # fmt: skip
        assert wanted in shown, wanted
    assert "engine-kill" in look.text("drill_list")
    assert "drill=" in look.page.url
    assert not is_wide(look)
    look.shot("drills-result", "drill_shown")
    look.page.reload()
    look.key("drill_result").wait_for()
    look.idle()


def test_a_cancel_ends_all_of_it(look: Look) -> None:
    look.open("drills")
    look.choose("drill_kind", "network")
    look.idle(1)
    look.fill("drill_for", "600")
    look.idle(1)
    look.click("drill_go")
    look.key("cancel_drill").wait_for()
    (job,) = [each for each in look.app.jobs.recent("drill") if each.open]
    with closing(sqlite3.connect(look.app.data / "jobs" / "jobs.db")) as database:
        (pid,) = database.execute("select pid from jobs where id = ?", (job.id,)).fetchone()
    engines = job.folder / DEMO / "data" / "fleet"
    begun = WORK_MS / 1000
    eventually("its engines run", lambda: (engines / "id").exists() and members(engines), begun)
    assert group(pid)
    look.click("cancel_drill")
    look.page.get_by_test_id("stAlert").filter(
        has_text=WORDS.text("drills.taken_back", "en")
    ).first.wait_for()  # fmt: skip
    assert group(pid) == []
    assert members(engines) == []
    look.idle()


def test_callers_are_hit_only_after_the_name_was_typed(look: Look, controller: Demo) -> None:
    before = len(look.app.jobs.recent("drill"))
    look.open("drills")
    look.choose("drill_kind", "bad-answers")
    look.idle(1)
    look.choose("drill_where", WORDS.text("drills.place.controller", "en"))
    look.key("drill_ask").wait_for()
    look.idle(1)
    look.click("drill_ask")
    look.key("drill_hit").wait_for()
    assert controller.admin in look.text("drill_hit")
    assert WORDS.text("drills.is_hit", "en") in look.text("drill_hit")
    look.fill("drill_token", controller.token, enter=False)
    look.fill("drill_name", "another", enter=False)
    look.click("drill_confirm")
    dialog = look.page.get_by_role("dialog")
    dialog.get_by_test_id("stAlert").first.wait_for()
    wrong = WORDS.texts["drills.name_wrong"]["en"].partition("{")[0].strip()
    assert wrong in dialog.inner_text()
    look.shot("drills-dialog")
    assert controller.token not in look.page.content()
    look.page.keyboard.press("Escape")
    assert len(look.app.jobs.recent("drill")) == before
    look.idle()
