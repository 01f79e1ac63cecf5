"""The client of the admin API: a real controller, servers that misbehave, and a token that is told
to nobody."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from controller.deployment.asking import packed, request_of
from dashboards.admin import UNAUTHORIZED, UNKNOWN, UNREACHABLE, Admin, AdminError
from dashboards.parts.deploy.plan import DEMO
from tests.ui.controllers import DOMAIN, ask, calm, validated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.controller.processes import Controller

TOKEN = "a-token-that-nobody-may-see"


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that always says the same; and the tokens that it was shown."""
    shown: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers.get("Authorization", ""))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", shown
        server.shutdown()
        thread.join(60)


def failing(act: Callable[[], object]) -> AdminError:
    with pytest.raises(AdminError) as caught:
        act()
    assert TOKEN not in repr(caught.value) + str(caught.value)
    assert caught.value.__cause__ is None
    return caught.value


def test_it_looks_deploys_and_rolls_back(controller: Controller) -> None:
    admin = Admin(controller.admin_url + "/", f" {controller.admin_token}\n")
    calm(controller)
    ask(controller)
    status = admin.status()
    assert (status.state, status.replicas[0].domain) == ("serving", DOMAIN)
    assert admin.current() is None
    assert {way.path for way in admin.ways()} >= {"/status", "/deployments/{id}/diff", "/drain"}
    assert admin.get("/metrics").kind == "text/plain"
    given = validated(controller)
    refusal = failing(lambda: admin.deploy(request_of(given.text, {}, {})))
    assert (refusal.status, refusal.code, len(refusal.reasons)) == (422, "refused", 1)
    row = admin.deploy(request_of(given.text, packed(given.evidence, given.log), DEMO))
    current = admin.current()
    assert current is not None
    assert (current.id, current.stage, current.stage_number) == (row.id, "shadow", 0)
    assert current.plan is not None
    assert current.plan.window_s == DEMO["window_s"]
    assert [each.figure for each in current.measured] == ["slo_miss_share", "ttft_s_p95/P1"]
    assert (current.measured[0].low, current.measured[0].high) == (0.0, 0.1)
    busy = failing(lambda: admin.deploy(request_of(given.text, {}, {}, "a test")))
    assert busy.code == "busy"
    assert admin.roll_back("a test").stage == "rolled_back"
    keys = [change.key for change in admin.diff(row.id).changes]
    assert keys == ["name", "tiers.turbo_max_tflop"]
    assert admin.diff(row.id, row.id).changes == ()
    assert [each.id for each in admin.deployments()][-1] >= 1


@pytest.mark.parametrize("token", ["", "wrong-token-wrong-token", TOKEN + "\nX: y", "ключ", "a b"])
def test_a_token_that_does_not_open_is_said_so(controller: Controller, token: str) -> None:
    error = failing(lambda: Admin(controller.admin_url, token).status())
    assert (error.status, error.code) == (401, UNAUTHORIZED)
    assert token == "" or token not in str(error)


def test_the_token_is_in_no_representation() -> None:
    assert TOKEN not in repr(Admin("http://127.0.0.1:9", TOKEN))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:99999", "http://[", "x"])
def test_nobody_answers(url: str) -> None:
    error = failing(lambda: Admin(url, TOKEN).status())
    assert (error.status, error.code) == (0, UNREACHABLE)
    assert url in str(error)


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, b"<html>", UNKNOWN), (200, b"{}", UNKNOWN), (500, b"oops", UNKNOWN),
        (503, b'{"error": {"code": "database", "message": "it could not"}}', "database"),
    ],
)  # fmt: skip
def test_answers_that_are_none(status: int, body: bytes, code: str) -> None:
    with answering(status, body) as (url, _):
        error = failing(lambda: Admin(url, TOKEN).status())
    assert error.code == code


def test_no_redirect_is_followed_with_the_token() -> None:
    with (
        answering(200, b"{}") as (elsewhere, shown),
        answering(302, b"", Location=f"{elsewhere}/status") as (url, _),
    ):
        assert failing(lambda: Admin(url, TOKEN).status()).status == 302
    assert shown == []
