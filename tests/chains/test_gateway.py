"""Steps that are model calls: a real controller in front of served twins."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from controller.chains import Chain, StepFailed
from policy.parameters.chains import Plan, Step
from tests.chains.killing import Killer
from tests.controller.processes import MODEL, Controllers, Twin, eventually, settings_for
from tests.fleet.ports import lasting_port
from tests.redis_server import redis_server

if TYPE_CHECKING:
    from pathlib import Path

PLAN = Plan(
    budget_ms=8000,
    steps=(Step("parse", 2), Step("tool", 1), Step("answer", 4), Step("memory", 1)),
)


def body(text: str, tokens: int = 4) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
    }


def came(twins: list[Twin]) -> int:
    """Requests that models ran to the end."""
    return sum(twin.state()["finished"] for twin in twins)


def test_a_chain_of_model_calls_and_functions(
    controllers: Controllers, twins: list[Twin], tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins])
    before = came(twins)
    with Chain(PLAN, gateway=controller.url, store=tmp_path / "c.sqlite") as chain:
        with chain.run("order-1", user="u1", session="s1") as run:
            parsed = run.call("parse", body("what"))
            run.do("tool", lambda: run.note(rows=12, similarity=0.83))
            answer = run.call("answer", body("so"), headers={"x-twinkeel-sla": "P1"})
        result = run.result()
        assert parsed["choices"][0]["message"]["content"]
        assert not result.partial
        assert result.missing == {"memory": "not called"}
        assert result.values == {"parse": parsed, "tool": None, "answer": answer}
        assert came(twins) - before == 2

        # The gateway knows the steps, and has checkpoints of its own for them.
        step = result.steps["answer"]
        assert step.gateway_checkpoint == answer["twinkeel"]["checkpoint_id"]
        assert step.attributes["request"] == answer["twinkeel"]["request_id"]

        def steps() -> list[str]:
            told = [record.event for record in controller.records()]
            mine = [event for event in told if getattr(event, "chain", "") == "order-1"]
            return [event.step for event in mine if hasattr(event, "prompt_bytes")]

        # The log is written a little later.
        eventually("they are on record", lambda: steps() == ["parse", "answer"])

        # Beside them it shows the step that it did not see, in one trace.
        def shown() -> Any:
            seen = json.loads(controller.admin("GET", "/chains/order-1")[1])
            return seen if len(seen.get("steps", ())) == 3 else None

        seen = eventually("all steps are shown", shown, 30)
        assert seen["trace_id"] == result.trace_id
        own = next(step for step in seen["steps"] if step["step"] == "tool")
        assert (own["external"], own["outcome"]) == (True, "done")
        assert own["attributes"] == {"rows": 12, "similarity": 0.83}
        assert own["checkpoint"] == result.checkpoints["tool"]

        # Run again, nothing is asked.
        with chain.run("order-1", user="u1") as run:
            assert run.call("parse", body("what")) == parsed
        assert came(twins) - before == 2


def test_the_same_on_an_event_loop(
    controllers: Controllers, twins: list[Twin], tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins])

    async def fetch(budget: Any) -> float:
        await asyncio.sleep(0.01)
        return float(budget.left_s)

    async def main(chain: Chain) -> Any:
        async with chain.arun("order-2", user="ü1") as run:
            both = await asyncio.gather(run.call("parse", body("one")), run.do("tool", fetch))
            assert both[0]["choices"]
            assert 0 < both[1] < 8
            await run.call("answer", body("two"))
        return run.result()

    with Chain(PLAN, gateway=controller.url, store=tmp_path / "c.sqlite") as chain:
        result = asyncio.run(main(chain))
    assert not result.partial
    assert set(result.values) == {"parse", "tool", "answer"}
    assert all(step.gateway_checkpoint for step in result.steps.values() if step.kind == "model")


@pytest.mark.parametrize("manner", ["sync", "async"])
def test_a_model_call_is_ended_when_the_time_is_over(
    manner: str, controllers: Controllers, twins: list[Twin], tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins])
    plan = Plan(budget_ms=5000, steps=PLAN.steps)
    long = {**body("long", tokens=4000), "ignore_eos": True}

    async def run_async(chain: Chain) -> Any:
        async with chain.arun("slow", user=manner) as run:
            await run.call("parse", body("short"))
            await run.call("answer", long)
            raise AssertionError("the block was to be left")
        return run.result()

    with Chain(plan, gateway=controller.url, store=tmp_path / "c.sqlite") as chain:
        began_s = time.monotonic()
        if manner == "sync":
            with chain.run("slow", user=manner) as run:
                run.call("parse", body("short"))
                run.call("answer", long)
                raise AssertionError("the block was to be left")
            result = run.result()
        else:
            result = asyncio.run(run_async(chain))
        assert 4.6 < time.monotonic() - began_s < 16, "24 s are asked for"
    assert result.partial
    assert list(result.values) == ["parse"]
    assert result.missing["answer"] == "ended: step 'answer': the chain's time was over"
    assert result.missing["memory"].endswith("the chain's time was over")
    eventually("the gateway stops the model", lambda: sum(t.busy for t in twins) == 0)


def test_a_chain_goes_on_after_its_time_with_a_new_budget(
    controllers: Controllers, twins: list[Twin], tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins])
    policy = "schema: 1\nname: short\nchains: {default: {budget_ms: 6000}}\n"
    assert controller.put_policy(policy)[0] < 300
    plan = Plan(budget_ms=6000, steps=PLAN.steps)
    before, go_on = came(twins), threading.Event()
    with Chain(plan, gateway=controller.url, store=tmp_path / "c.sqlite") as chain:
        with chain.run("long", user="u") as run:
            first = run.call("parse", body("one"))
            run.do("tool", go_on.wait, 60)
        go_on.set()
        assert run.result().partial
        # The run ends a little before its budget, and the gateway began to count later.
        time.sleep(3.0)
        with chain.run("long", user="u") as run:
            assert run.call("parse", body("one")) == first
            run.call("answer", body("two"))
            raise AssertionError("its budget is over")
        assert "the chain's time was over" in run.result().missing["answer"]
        assert run.result().values == {"parse": first}
        with chain.run(user="u", resume_from_checkpoint=run.checkpoint) as run:
            assert run.chain == "long"
            assert 2.0 < run.left_s <= 5.95, "all of it, but for what has passed since"
            assert run.call("parse", body("one")) == first
            run.do("tool", lambda: "quick")
            run.call("answer", body("two"))
        assert not run.result().partial, run.result().missing
        assert came(twins) - before == 2, "each model call ran once"

        # Another chain from a checkpoint in the middle: what was before is taken over.
        middle = run.result().checkpoints["tool"]
        with chain.run("other", user="u", resume_from_checkpoint=middle) as run:
            assert run.call("parse", body("one")) == first
            assert run.do("tool", lambda: "again") == "quick"
            run.call("answer", body("two"))
        assert came(twins) - before == 3


def test_what_the_gateway_does_not_answer_is_said(
    controllers: Controllers, twins: list[Twin], tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins])
    with Chain(PLAN, gateway=controller.url, store=tmp_path / "c.sqlite") as chain:
        with chain.run("bad", user="u") as run:
            with pytest.raises(StepFailed, match=r"step .parse.: 404: .*nothing-like-it") as caught:
                run.call("parse", {**body("one"), "model": "nothing-like-it"})
            assert caught.value.status == 404
            run.call("parse", body("one"))
        assert run.result().values
        assert not run.result().partial

    with Chain(
        Plan(budget_ms=4000, steps=PLAN.steps),
        gateway="http://127.0.0.1:9",
        store=tmp_path / "c.sqlite",
    ) as chain:
        run = chain.run("nobody", user="u")
        with (
            pytest.raises(StepFailed, match=r"did not answer: http://127\.0\.0\.1:9: ") as caught,
            run,
        ):
            run.call("parse", body("one"))
        assert caught.value.status == 0
        assert run.result().spent_ms["parse"] > 500, "it was tried for a while"
        assert run.result().missing["tool"].startswith("the run was left: StepFailed")


def test_a_gateway_that_was_killed_is_waited_for(
    controllers: Controllers, twins: list[Twin], tmp_path: Path
) -> None:
    folder, port = tmp_path / "controller", lasting_port("127.0.0.1")
    settings = settings_for([twin.url for twin in twins], folder, port=port)
    controller = controllers.again(settings, folder)
    plan = Plan(budget_ms=30_000, steps=PLAN.steps)
    with Chain(plan, gateway=controller.url, store=tmp_path / "c.sqlite") as chain:
        with chain.run("killed", user="u") as run:
            run.call("parse", body("one"))
            controller.kill()
            starter = threading.Timer(0.3, lambda: controllers.again(settings, folder))
            starter.start()
            run.call("answer", body("two"))
            starter.join()
        assert not run.result().partial, run.result().missing
        assert run.result().spent_ms["answer"] > 300


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@pytest.mark.parametrize("manner", ["sync", "async"])
def test_a_client_that_is_killed_is_answered_from_the_gateways_checkpoint(
    kind: str, manner: str, controllers: Controllers, twins: list[Twin], tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins])
    before = came(twins)

    def kill_at(where: str) -> Killer:
        killer = Killer(where, tmp_path, manner, controller.url, MODEL)
        killer.at_every_point(4 if kind == "sqlite" else 3)
        return killer

    if kind == "sqlite":
        killer = kill_at(str(tmp_path / "c.sqlite"))
    else:
        with redis_server() as server:
            killer = kill_at(server.url)
    assert killer.tally.twice == []
    assert any("before save" in point for point in killer.tally.points)
    assert killer.tally.chains > 5
    assert came(twins) - before == 2 * killer.tally.chains, "each model call ran once"
