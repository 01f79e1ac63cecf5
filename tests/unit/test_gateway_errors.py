"""What refused and failed callers are told."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from controller.gateway import errors
from policy.decisions import Settled
from policy.events import ErrorKind
from policy.outcomes import FAILURE_HTTP, failed, unserved

S = 1_000_000_000


@pytest.mark.parametrize("kind", get_args(ErrorKind))
def test_every_failure_has_words_of_its_own(kind: str) -> None:
    settled = failed(7, kind)
    told = json.loads(errors.of(settled, "tk-1"))
    assert told["error"]["code"] == kind
    assert told["twinkeel"] == {"request_id": "tk-1"}
    message = told["error"]["message"]
    assert message.startswith("request tk-1 failed: ")
    assert len(message.split(": ")[1].split()) >= 3
    assert told["error"]["type"]


def test_shed_and_failed_are_told_apart() -> None:
    shed = Settled(1, "shed", "batch", "deadline", 429, 3 * S)
    told = json.loads(errors.of(shed, "tk-1"))["error"]
    assert told["type"] == "rate_limit_error"
    assert "was not taken" in told["message"]
    told = json.loads(errors.of(unserved(1, "", S), "tk-1"))["error"]
    assert (told["type"], told["code"]) == ("service_unavailable_error", "no_replica")


def test_a_reason_without_words_is_told_as_it_is() -> None:
    told = json.loads(errors.of(Settled(1, "shed", "", "some_new_reason", 503), "n"))["error"]
    assert told["message"].endswith("some new reason")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
        (405, "invalid_request_error"), (408, "timeout_error"), (413, "invalid_request_error"),
        (429, "rate_limit_error"), (500, "upstream_error"), (502, "upstream_error"),
        (503, "service_unavailable_error"), (504, "upstream_error"),
    ],
)  # fmt: skip
def test_types_are_openais(status: int, kind: str) -> None:
    told = json.loads(errors.document("text", "code", status))
    assert told == {"error": {"message": "text", "type": kind, "param": None, "code": "code"}}


def test_the_wrong_field_is_named() -> None:
    told = json.loads(errors.document("text", "code", 400, param="model"))
    assert told["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("after_ns", "header"), [(0, "1"), (1, "1"), (S, "1"), (S + 1, "2"), (30 * S, "30")]
)
def test_retry_after_is_rounded_up(after_ns: int, header: str) -> None:
    assert errors.retry_after_s(Settled(1, "shed", retry_after_ns=after_ns)) == header


def test_every_failure_has_a_status() -> None:
    assert set(FAILURE_HTTP) == set(get_args(ErrorKind))
