"""A controller for the pages to look at, in front of one served twin; and what was validated for
it."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec

from dashboards.admin import Admin
from dashboards.jobs import Jobs
from policy.evidence import Band, encode, key_of, signed
from policy.files import parse_policy
from policy.parameters import render
from tests.controller.processes import (
    eventually,
    http,
    patient,
    settings_for,
    start_controller,
    stop,
    twin_process,
)
from tests.deploy_support import evidence_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from policy.parameters import Parameters
    from tests.controller.processes import Controller

DOMAIN = "host7/card3"
BODY = {
    "model": "qwen3-8b", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}],
}  # fmt: skip
CHAINS = "chains: {default: {budget_ms: 60000}}\n"
CHAIN_STEPS = ("plan", "db_query", "summary")


@contextlib.contextmanager
def controller_at(folder: Path) -> Iterator[Controller]:
    """A controller and its twin, as processes; the twin records its steps."""
    with twin_process("--steps", str(folder / "steps")) as twin:
        upstream = {"url": twin.url, "domain": DOMAIN, "profile": "h100-sxm/qwen3-8b"}
        settings = settings_for([upstream], folder, policy=patient(folder, CHAINS))
        controller = start_controller(settings, folder)
        try:
            controller.wait_up(1)
            yield controller
        finally:
            stop(controller.process)


def ask(controller: Controller, times: int = 1, **body: Any) -> None:
    """Callers, one after another."""
    for _ in range(times):
        status, answer = http("POST", f"{controller.url}/v1/chat/completions", {**BODY, **body})
        assert status == 200, answer


def send_chain(url: str, name: str) -> None:
    """A chain of the user ``ada`` through a gateway: two requests, and between them a step of the
    client's own."""
    plan, query, summary = CHAIN_STEPS
    own = {"step": query, "took_ms": 30, "attributes": {"rows": 42, "similarity": 0.83}}
    for step in (plan, summary):
        headers = {"x-twinkeel-chain": name, "x-twinkeel-step": step, "x-twinkeel-user": "ada"}
        status, body = http("POST", f"{url}/v1/chat/completions", BODY, headers)
        assert status == 200, body
        if step == plan:
            time.sleep(0.03)
            path = f"/v1/chains/{quote(name, safe='')}/steps"
            status, body = http("POST", f"{url}{path}", own, {"x-twinkeel-user": "ada"})
            assert status == 204, body


def calm(controller: Controller) -> None:
    """Nothing is being deployed, whatever another test has left."""
    admin = Admin(controller.admin_url, controller.admin_token)
    if admin.current() is not None:
        admin.roll_back("a test")


class Validated(NamedTuple):
    """A policy with the evidence that lets it into force."""

    policy: Parameters
    text: str
    evidence: bytes
    log: bytes


def validated(controller: Controller, turbo_max_tflop: int = 60) -> Validated:
    """What would have been validated against what rules now."""
    admin = Admin(controller.admin_url, controller.admin_token)
    live = parse_policy(admin.get("/policy").body.decode(), "the live policy")
    tiers = msgspec.structs.replace(live.tiers, turbo_max_tflop=turbo_max_tflop)
    mine = msgspec.structs.replace(live, name="tuned", tiers=tiers)
    made = evidence_for(mine, live)
    key = key_of((controller.data / "deploy.key").read_text(), "deploy.key")
    expected = msgspec.structs.replace(
        made.evidence.expected,
        band=(Band("slo_miss_share", 0.0, 0.1), Band("ttft_s_p95/P1", 0.01, 0.5)),
    )
    evidence = msgspec.structs.replace(
        made.evidence, expected=expected, made_s=int(time.time()) - 60, signature=""
    )
    return Validated(mine, render(mine), encode(signed(evidence, key)), made.log)


def as_job(given: Validated, data: Path, number: str = "0123456789abcdef") -> str:
    """The same as a job of the app that has been done."""
    jobs = Jobs(data / "jobs", 0)
    folder = jobs.folder_of(number)
    folder.mkdir(parents=True)
    (folder / "policy.yaml").write_text(given.text, encoding="utf-8")
    (folder / "evidence.json").write_bytes(given.evidence)
    (folder / "evidence.log").write_bytes(given.log)
    now_s = time.time()
    with contextlib.closing(sqlite3.connect(data / "jobs" / "jobs.db")) as database:
        database.execute(
            "insert into jobs (id, kind, request, state, asked_s, began_s, ended_s)"
            " values (?, 'validate', '{}', 'done', ?, ?, ?)",
            (number, now_s, now_s, now_s),
        )
        database.commit()
    return number


def holding(folder: Path, text: str) -> list[Path]:
    """The files in there that have it."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # SQLite has some that come and go
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def steps_read(controller: Controller) -> Any:
    """Wait until steps were held against the profile; the status."""

    def read() -> Any:
        ask(controller, max_tokens=40)
        status = controller.status()
        return status if status["replicas"][0]["steps_read"] else None

    return eventually("steps that were read", read, 120.0, 0.2)
