"""A chain goes on where another controller, or this one before it was killed, has left it."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from controller.store.checkpoints import NewCheckpoint, SqliteCheckpoints
from policy.decisions import Undo
from policy.events import ChainFound
from tests.controller.processes import (
    MODEL,
    PATIENT,
    Controllers,
    eventually,
    http,
    twin_process,
)
from tests.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.controller.processes import Controller, Twin

POLICY = f"{PATIENT}chains: {{default: {{budget_ms: 60000}}}}\n"


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    started = Controllers(tmp_path)
    yield started
    started.close()


@pytest.fixture
def twin() -> Iterator[Twin]:
    with twin_process() as running:
        yield running


def step(
    controller: Controller, name: str, *, chain: str = "order", user: str = "ann", resume: str = ""
) -> dict[str, Any]:
    """One step of the chain: its answer's document and the checkpoint that its headers name."""
    headers = {
        "x-twinkeel-chain": chain, "x-twinkeel-step": name, "x-twinkeel-user": user,
        **({"x-twinkeel-resume": resume} if resume else {}),
    }  # fmt: skip
    document = {
        "model": MODEL, "messages": [{"role": "user", "content": f"{chain} {name}"}],
        "max_tokens": 8,
    }  # fmt: skip
    status, body = http("POST", f"{controller.url}/v1/chat/completions", document, headers)
    assert status == 200, body
    return dict(json.loads(body))


def policy(folder: Path) -> str:
    path = folder / "chains.yaml"
    path.write_text(POLICY)
    return str(path)


def told_of(controller: Controller, kind: type) -> list[Any]:
    return [each.event for each in controller.records() if isinstance(each.event, kind)]


def decided(controller: Controller, kind: type) -> list[Any]:
    made = [decision for each in controller.records() for decision in each.decisions]
    return [decision for decision in made if isinstance(decision, kind)]


def test_a_step_that_was_committed_and_never_told_is_not_run_again(
    controllers: Controllers, twin: Twin, tmp_path: Path
) -> None:
    """Killed between the store's commit and everything after it: the log knows nothing of it."""
    one = controllers([twin.url], policy=policy(tmp_path))
    first = step(one, "plan")
    one.kill()
    with closing(SqliteCheckpoints(one.data / "checkpoints.sqlite")) as store:
        plan = store.load(first["twinkeel"]["checkpoint_id"], "ann")
        assert plan is not None
        answer = json.dumps({**first, "kept": True}).encode()
        store.save(NewCheckpoint("ann", "order", "act", "tk-9", answer, ends_s=plan.ends_s))
    sent = twin.state()["requests"]
    two = controllers.again(one.settings, one.folder)
    assert step(two, "plan")["choices"] == first["choices"]
    assert step(two, "act")["kept"] is True
    assert twin.state()["requests"] == sent
    found = eventually("the log is written", lambda: told_of(two, ChainFound))[-1]
    assert [step for step, _ in found.done] == ["plan", "act"]
    assert 0 < found.left_ns < 60_000_000_000


def test_a_chain_goes_on_at_another_controller(
    controllers: Controllers, twin: Twin, tmp_path: Path
) -> None:
    with redis_server() as redis:
        one = controllers([twin.url], policy=policy(tmp_path), redis=redis.url)
        two = controllers([twin.url], policy=policy(tmp_path), redis=redis.url)
        plan = step(one, "plan")
        sent = twin.state()["requests"]
        assert step(two, "plan")["choices"] == plan["choices"]
        act = step(two, "act")
        two.kill()
        assert step(one, "act")["choices"] == act["choices"]
        assert twin.state()["requests"] == sent + 1
        # Whose chain it is counts, not its name.
        assert "checkpoint_id" in step(one, "plan", user="bob")["twinkeel"]
        assert twin.state()["requests"] == sent + 2


def test_a_chain_that_the_policy_has_forgotten_is_still_in_the_store(
    controllers: Controllers, twin: Twin, tmp_path: Path
) -> None:
    """Its name begins no other chain, whose steps would be answered from this one's checkpoints."""
    path = tmp_path / "brief.yaml"
    path.write_text(POLICY.replace("budget_ms: 60000}", "budget_ms: 5000}, keep_ms: 200"))
    one = controllers([twin.url], policy=str(path))
    plan, act = step(one, "plan"), step(one, "act")
    time.sleep(5.2)
    sent = twin.state()["requests"]
    late = step(one, "sum")["twinkeel"]
    assert late["degraded"] == "chain_budget"
    assert late["checkpoint_id"] == act["twinkeel"]["checkpoint_id"]
    time.sleep(0.5)
    # Resumed where its last step was, nothing is run again.
    assert step(one, "act", resume=act["twinkeel"]["checkpoint_id"])["choices"] == act["choices"]
    assert step(one, "plan")["choices"] == plan["choices"]
    assert twin.state()["requests"] == sent


def test_steps_after_the_checkpoint_that_is_resumed_run_again(
    controllers: Controllers, twin: Twin, tmp_path: Path
) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(POLICY.replace("budget_ms: 60000", "budget_ms: 5000"))
    one = controllers([twin.url], policy=str(path))
    plan = step(one, "plan")["twinkeel"]["checkpoint_id"]
    step(one, "act")
    time.sleep(5.2)
    late = step(one, "sum")
    assert late["twinkeel"]["degraded"] == "chain_budget"
    sent = twin.state()["requests"]
    again = step(one, "act", resume=plan)
    assert twin.state()["requests"] == sent + 1
    eventually("the log is written", lambda: decided(one, Undo))
    one.kill()
    two = controllers.again(one.settings, one.folder)
    found = step(two, "act")
    assert found["twinkeel"]["checkpoint_id"] == again["twinkeel"]["checkpoint_id"]


def test_a_store_that_is_gone_costs_no_answer(
    controllers: Controllers, twin: Twin, tmp_path: Path
) -> None:
    with redis_server() as redis:
        one = controllers([twin.url], policy=policy(tmp_path), redis=redis.url)
        assert "checkpoint_id" in step(one, "plan")["twinkeel"]
        redis.pause()
        begun_s = time.monotonic()
        assert step(one, "act")["choices"]
        assert time.monotonic() - begun_s < 20.0
        redis.resume()
        eventually(
            "steps are kept again",
            lambda: "checkpoint_id" in step(one, f"more {time.monotonic()}")["twinkeel"],
        )
