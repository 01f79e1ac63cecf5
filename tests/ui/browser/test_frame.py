"""What all pages share: the scenario in the URL, uploads, jobs that go on, and tokens that are
nowhere."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING

import pytest
from msgspec import to_builtins

from dashboards.scenario import Scenario, from_query
from tests.controller.processes import eventually
from tests.ui.browser.harness import looking
from tests.ui.controllers import holding

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App, Demo, Look

pytestmark = pytest.mark.ui
BEGUN_S = 60.0
PLAYED_MS = 600_000
SMALL = Scenario(trace="shipped:sessions", policies=("fifo",))


def scenario(look: Look) -> Scenario:
    """What the address bar says."""
    from urllib.parse import parse_qs, urlsplit

    return from_query(parse_qs(urlsplit(look.page.url).query, keep_blank_values=True))


def test_clicks_in_quick_succession_are_all_taken(look: Look) -> None:
    look.open()
    for number in range(5, 11):
        look.fill("form_replicas_0", str(number))
    look.page.wait_for_function("() => /8b(\\*|%2A)10/.test(location.href)")
    look.idle()
    assert scenario(look).fleet[0].replicas == 10


def test_a_link_brings_the_scenario_to_everybody(browser: Browser, look: Look, app: App) -> None:
    look.open()
    look.fill("form_replicas_0", "5")
    look.page.wait_for_function("() => /8b(\\*|%2A)5/.test(location.href)")
    with looking(browser, app) as other:
        other.page.goto(look.page.url)
        other.idle()
        assert other.key("form_replicas_0").locator("input").input_value() == "5"
        assert scenario(other) == scenario(look)
    look.go("Tune")
    assert scenario(look).fleet[0].replicas == 5, "pages share it"


def test_a_link_may_leave_out_most(look: Look) -> None:
    look.open(trace=SMALL.trace)
    assert scenario(look) == Scenario(trace=SMALL.trace)
    for name in Scenario().policies:
        look.key("form_policies").get_by_text(name, exact=True).wait_for()


def test_a_click_is_taken_while_the_trace_is_read(
    look: Look, app: App, trace_of: Callable[[int], Path], tmp_path: Path
) -> None:
    """That ends by drawing the page anew."""
    for number in range(3):
        path = shutil.copyfile(trace_of(25_000), tmp_path / f"never-read-{number}.parquet")
        asked = Scenario(trace=app.keep(path), policies=("fifo",))
        look.page.goto(look.app.link("replay", asked))
        look.key("job_replay").locator("button").click()
        look.page.wait_for_selector(".st-key-cancel_replay, .st-key-replay_results")
        job = app.jobs.find("replay", to_builtins(asked))
        assert job is not None
        app.jobs.cancel(job.id)
        look.idle()


def test_a_bad_upload_is_a_sentence(look: Look, tmp_path: Path) -> None:
    wrong = tmp_path / "mine.csv"
    wrong.write_text("a,b\n1,2\n")
    look.open()
    look.choose_file(wrong)
    alert = look.page.get_by_test_id("stAlert").filter(has_text="mine.csv")
    alert.wait_for()
    assert "Traceback" not in alert.inner_text()
    assert scenario(look) == Scenario()


def test_a_bad_link_is_a_sentence(look: Look) -> None:
    look.open(scale="-1")
    assert any("the link's scale is '-1'" in text for text in look.alerts())
    look.open(trace="shipped:none")
    assert any("no such trace" in text for text in look.alerts())


def test_a_job_outlives_a_reload_and_other_pages(
    look: Look, app: App, trace_of: Callable[[int], Path]
) -> None:
    asked = Scenario(trace=app.keep(trace_of(20_000)), policies=("fifo", "stable"))
    look.open("replay", asked)
    look.click("job_replay")
    job = eventually("it is begun", lambda: app.jobs.find("replay", to_builtins(asked)), BEGUN_S)
    number, pid = job.id, eventually("its process", lambda: app.pid_of(job.id), BEGUN_S)
    os.killpg(pid, signal.SIGSTOP)  # it is not over before the page has been left
    look.key("cancel_replay").wait_for()
    look.page.reload()
    look.key("cancel_replay").wait_for()
    look.page.get_by_test_id("stTopNavLink").filter(has_text="Live").first.click()
    look.page.wait_for_selector("h2:has-text('Live')")
    look.page.get_by_test_id("stTopNavLink").filter(has_text="Replay").first.click()
    look.key("cancel_replay").wait_for()
    os.killpg(pid, signal.SIGCONT)
    look.page.wait_for_selector(".st-key-replay_results", timeout=PLAYED_MS)
    assert app.pid_of(number) == pid, "it was begun once"
    assert app.jobs.get(number).state == "done"
    look.idle()


def test_the_token_is_nowhere(
    browser: Browser, controller: Demo, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An app that was told no token file: it is typed."""
    from tests.ui.browser.harness import app_process

    data = tmp_path_factory.mktemp("typed")
    with app_process(data, "--admin", controller.admin) as app, looking(browser, app) as look:
        look.open("live")
        look.fill("token_look", "not-the-token", enter=False)
        look.click("token_look_go")
        look.page.get_by_test_id("stAlert").first.wait_for()
        look.idle()
        look.fill("token_look", controller.token, enter=False)
        look.click("token_look_go")
        look.key("fleet_map").wait_for()
        look.page.wait_for_timeout(2500)  # a few of its panels' own refreshes
        nowhere(look, controller.token)
        look.go("Deploy")
        look.key("current").wait_for()
        nowhere(look, controller.token)
        look.page.reload()
        look.page.wait_for_selector(".st-key-token_look, .st-key-current")
        assert look.key("token_look").is_visible(), "a reload asks again"
        assert look.faults() == []
        assert holding(data, controller.token) == []


def nowhere(look: Look, token: str) -> None:
    """In the page, its address, or what the browser keeps."""
    assert token not in look.page.content()
    assert token not in look.page.url
    stored = look.page.evaluate(
        "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie,"
        " [...document.querySelectorAll('input')].map((one) => one.value)])"
    )
    assert token not in stored
