"""Tune, validate, deploy to a controller at work, and roll back: with clicks alone."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from dashboards.scenario import Kind, Scenario
from dashboards.words import Words
from tests.controller.processes import eventually
from tests.ui.browser.harness import app_process, looking
from tests.ui.controllers import holding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, WebSocket

    from tests.ui.browser.harness import Demo, Look

pytestmark = pytest.mark.ui
WORK_MS = 580_000
STAGES_S = 600.0
BACK_S = 120.0
TRIALS = 10
KEPT_JS = """() => JSON.stringify([
  {...localStorage}, {...sessionStorage}, document.cookie, history.state,
  performance.getEntries().map((one) => one.name),
  [...document.querySelectorAll("input, textarea")].map((one) => one.value),
])"""
"""What a browser keeps beside the page itself."""


def asked(controller: Demo, path: str) -> Any:
    """Of the admin API."""
    request = urllib.request.Request(
        f"{controller.admin}{path}", headers={"Authorization": f"Bearer {controller.token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def deployments(controller: Demo) -> Any:
    """The youngest first."""
    return asked(controller, "/deployments")["deployments"]


class Overheard:
    """Everything that the app sends to a tab."""

    def __init__(self, look: Look) -> None:
        self._frames: list[bytes] = []
        look.page.on("websocket", self._listen)

    def _listen(self, socket: WebSocket) -> None:
        def hear(said: str | bytes) -> None:
            self._frames.append(said if isinstance(said, bytes) else said.encode())

        socket.on("framereceived", hear)

    def __contains__(self, text: str) -> bool:
        assert self._frames
        return any(text.encode() in frame for frame in self._frames)


def kept_nowhere(token: str, look: Look, overheard: Overheard) -> None:
    """Neither in the page, nor in what the browser keeps, nor in what the app sent or wrote."""
    assert token not in look.page.content()
    assert token not in look.page.url
    assert token not in look.page.evaluate(KEPT_JS)
    assert token not in json.dumps(look.page.context.storage_state())
    assert token not in overheard
    assert holding(look.app.data, "") != []
    assert holding(look.app.data, token) == []


def test_tuned_validated_deployed_and_taken_back(
    look: Look, controller: Demo, trace_of: Callable[[int], Path]
) -> None:
    words, overheard = Words.load(), Overheard(look)
    token, before = controller.token, asked(controller, "/status")["policy"]
    history = deployments(controller)
    fleet = (Kind("h100-sxm/qwen3-8b", 2),)
    look.open(
        "tune", Scenario(trace=look.app.keep(trace_of(1_000)), fleet=fleet, policies=("stable",))
    )
    look.choose("tune_group", words.text("tune.group.placement", "en"))
    look.idle()
    look.fill("tune_trials", str(TRIALS))
    look.idle()
    look.click("job_tune")
    look.key("tune_result").wait_for(timeout=WORK_MS)
    look.idle()
    assert re.search(rf"\b{TRIALS} / {TRIALS}\b", look.text("tune_result"))
    look.click("job_validate")
    look.key("gates").wait_for(timeout=WORK_MS)
    look.idle()
    assert words.text("tune.is_unsigned", "en") not in look.text("gates")
    look.click("send_to_deploy")
    look.key("deploy_go").wait_for()
    look.idle(1)
    assert words.text("deploy.unsigned", "en") not in look.text("new")
    assert words.text("deploy.may_go", "en") in look.text("reasons")
    with controller.traffic():
        look.choose("deploy_plan", words.text("deploy.plan_demo", "en"))
        look.idle(1)
        look.click("deploy_go")
        _confirm(look, "deploy", "")
        assert deployments(controller) == history, "nothing without the token"
        _confirm(look, "deploy", f"{token}x")
        assert deployments(controller) == history, "nor with another one"
        _confirm(look, "deploy", token, done=True)
        kept_nowhere(token, look, overheard)
        assert deployments(controller)[0]["override"] == "", "its evidence is enough"
        look.key("current").get_by_text(words.text("deploy.judged_by", "en")).wait_for()
        eventually("the end of its stages", lambda: _ended(controller), STAGES_S, 0.5)
        last = deployments(controller)[0]
        assert last["stage"] == "done", last
        assert asked(controller, "/status")["policy"] != before
        row = re.compile(rf"^{last['id']}\s.*\bdone\b", re.MULTILINE)
        eventually("it in the history", lambda: row.search(look.text("history")), BACK_S, 0.5)
        look.click("rollback_go")
        _confirm(look, "rollback", "")
        assert asked(controller, "/status")["policy"] != before, "nothing without the token"
        _confirm(look, "rollback", token, done=True)
        eventually(
            "what ruled before", lambda: asked(controller, "/status")["policy"] == before, BACK_S
        )  # fmt: skip
    kept_nowhere(token, look, overheard)


def test_a_controller_that_thinks_holds_up_nobody_else(
    browser: Browser, controller: Demo, tmp_path: Path
) -> None:
    said = threading.Event()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_thinking(controller, said))
        stack.callback(said.set)
        options = ["--admin", url, "--token-file", str(controller.token_file)]
        app = stack.enter_context(app_process(tmp_path / "ui", *options))
        look = stack.enter_context(looking(browser, app)).open("deploy")
        look.click("rollback_go")
        look.key("rollback_confirm").wait_for()
        look.fill("rollback_token", controller.token, enter=False)
        look.click("rollback_confirm")
        dialog = look.page.get_by_role("dialog")
        dialog.get_by_text(Words.load().text("deploy.asking", "en")).wait_for()
        other = stack.enter_context(looking(browser, app)).open("what-if")
        other.click("question_cost")
        other.key("ask_run").wait_for()
        other.go("Live")
        other.key("fleet_map").wait_for()
        assert not said.is_set()
        said.set()
        dialog.get_by_text(THOUGHT).wait_for()
        for each in (look, other):
            assert each.faults() == []
            assert each.wrong == []


THOUGHT = "it was thought about, and is not done"


@contextlib.contextmanager
def _thinking(controller: Demo, said: threading.Event) -> Iterator[str]:
    """In front of a controller: looking is passed on, and acting refused once ``said`` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._tell(200, json.dumps(asked(controller, self.path)).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            said.wait(WORK_MS / 1000)
            problem = {"error": {"code": "busy", "reasons": [THOUGHT]}}
            self._tell(409, json.dumps(problem).encode())

        def _tell(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _confirm(look: Look, act: str, token: str, *, done: bool = False) -> None:
    """Go through the dialog; then it is closed, or has an error."""
    dialog = look.page.get_by_role("dialog")
    look.key(f"{act}_confirm").wait_for()
    look.fill(f"{act}_token", token, enter=False)
    look.click(f"{act}_confirm")
    if done:
        dialog.wait_for(state="hidden", timeout=WORK_MS)
        look.idle(1)
        return
    wrong = "live.token_wrong" if token else "deploy.token_missing"
    dialog.get_by_text(Words.load().text(wrong, "en")).wait_for()


def _ended(controller: Demo) -> bool:
    return asked(controller, "/deployments/current")["current"] is None
