"""Requests made up from the published documents: no answer is a fault of the server, and every
answer is as the documents say."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks

from tests.controller.processes import MODEL, Controllers, http, twin_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.controller.processes import Controller

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
EXAMPLES = 20
"""Of each operation, beside the boundary values that it has anyway."""
TOKENS_MOST = 4
"""The twin takes as long for a token as a card does."""
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def document(package: str) -> dict[str, Any]:
    """As it is shipped; that this is what is served has a test of its own."""
    text = (resources.files(package) / "openapi.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


public = schemathesis.openapi.from_dict(document("controller.gateway"))
admin = schemathesis.openapi.from_dict(document("controller.admin"))


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A real controller in front of a served twin; its log is replayed afterwards."""
    with twin_process() as twin:
        started = Controllers(tmp_path_factory.mktemp("schemathesis"))
        try:
            yield started([twin.url])
        finally:
            started.close()


def bounded(body: Any) -> None:
    """Half of the bodies reach the server, and their answers are short."""
    if not isinstance(body, dict):
        return
    if len(str(body.get("model", ""))) % 2 == 0:
        body["model"] = MODEL
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and body[name] > TOKENS_MOST:
            body[name] = TOKENS_MOST
    if "max_tokens" not in body and "max_completion_tokens" not in body:
        body["max_tokens"] = TOKENS_MOST


@public.parametrize()
@BOUNDED
def test_the_public_api_is_as_published(case: Any, controller: Controller) -> None:
    bounded(case.body)
    case.call_and_validate(base_url=controller.url, checks=CHECKS, timeout=20)


@admin.exclude(path="/drain").parametrize()
@settings(BOUNDED, max_examples=8)
def test_the_admin_api_is_as_published(case: Any, controller: Controller) -> None:
    headers = {"Authorization": f"Bearer {controller.admin_token}"}
    url = controller.admin_url
    case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, timeout=20)


def test_what_is_served_is_what_is_shipped(controller: Controller) -> None:
    status, body = http("GET", f"{controller.url}/openapi.json")
    assert (status, json.loads(body)) == (200, document("controller.gateway"))
    status, body = controller.admin("GET", "/openapi.json")
    assert (status, json.loads(body)) == (200, document("controller.admin"))


def test_it_still_serves(controller: Controller) -> None:
    """After all that."""
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    status, answer = http("POST", f"{controller.url}/v1/chat/completions", body)
    assert status == 200, answer
    told = controller.status()
    assert told["settled_requests"] >= 1
    assert told["open_requests"] == 0
    assert told["refused_events"] == 0
