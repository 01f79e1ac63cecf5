"""Tune, validate, deploy to a controller at work, and roll back: with clicks alone."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from dashboards.scenario import Kind, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ui.browser.harness import Demo, Look

pytestmark = pytest.mark.ui
WORK_MS = 580_000
STAGES_MS = 240_000


def asked(controller: Demo, path: str) -> Any:
    """Of the admin API."""
    request = urllib.request.Request(
        f"{controller.admin}{path}", headers={"Authorization": f"Bearer {controller.token}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def test_tuned_validated_deployed_and_taken_back(
    look: Look, controller: Demo, trace_of: Callable[[int], Path]
) -> None:
    before = asked(controller, "/status")["policy"]
    fleet = (Kind("h100-sxm/qwen3-8b", 2),)
    look.open("tune", Scenario(trace=str(trace_of(2_000)), fleet=fleet, policies=("stable",)))
    look.fill("tune_trials", "10")
    look.idle()
    look.click("job_tune")
    look.key("tune_result").wait_for(timeout=WORK_MS)
    look.idle()
    assert re.search(r"\b10\b", look.text("tune_result"))
    look.click("job_validate")
    look.key("gates").wait_for(timeout=WORK_MS)
    look.idle()
    look.click("send_to_deploy")
    look.key("deploy_go").wait_for()
    look.idle()
    with controller.traffic():
        look.choose("deploy_plan", "demo")
        look.idle()
        look.click("deploy_go")
        look.key("deploy_confirm").wait_for()
        look.fill("deploy_override", "a test of the browser", enter=False)
        look.click("deploy_confirm")
        look.page.get_by_role("dialog").get_by_test_id("stAlert").first.wait_for()
        assert asked(controller, "/status")["policy"] == before, "nothing without the token"
        look.fill("deploy_override", "a test of the browser", enter=False)
        look.fill("deploy_token", controller.token, enter=False)
        look.click("deploy_confirm")
        look.page.get_by_role("dialog").wait_for(state="hidden", timeout=60_000)
        assert controller.token not in look.page.content()
        look.page.wait_for_function(
            "() => /done|in force|rolled/i.test("
            "document.querySelector('.st-key-history')?.innerText || '')",
            timeout=STAGES_MS,
        )
        rows = asked(controller, "/deployments")
        last = max(rows if isinstance(rows, list) else rows["deployments"], key=lambda r: r["id"])
        assert last["stage"] in ("done", "full", "rolled_back"), last
        look.click("rollback_go")
        look.key("rollback_confirm").wait_for()
        look.fill("rollback_token", controller.token, enter=False)
        look.click("rollback_confirm")
        look.page.get_by_role("dialog").wait_for(state="hidden", timeout=60_000)
    look.page.wait_for_timeout(2500)
    assert asked(controller, "/status")["policy"] == before
    assert controller.token not in look.page.content()
    assert controller.token not in look.page.url
