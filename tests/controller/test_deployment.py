"""Deployments on real controllers in front of served twins, under load: to the end, back, and
through every kind of death."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from controller.deployment.cli import deploy as deploy_command
from controller.deployment.cli import diff, history, rollback, status
from policy.evidence import key_of
from policy.files import load_policy
from policy.parameters import render
from tests.controller import deploying
from tests.controller.deploying import (
    GOOD,
    HARMFUL,
    PLACES,
    QUICK,
    in_force,
    load_on,
    read_ruled,
    short,
    stages,
    until,
)
from tests.controller.processes import eventually, segments, settings_for
from tests.deploy_support import evidence_for

if TYPE_CHECKING:
    from pathlib import Path

    from policy.parameters import Parameters
    from tests.controller.processes import Controller, Controllers, Twin

LIVE = load_policy("stable")
HARMED: dict[str, Any] = {
    "stages": [
        {"kind": "canary", "share_permille": 100, "least_s": 10, "least_requests": 100},
        QUICK["stages"][-1],
    ]
}
RATE = 40.0


def proven(controller: Controller, candidate: Parameters, **more: object) -> dict[str, object]:
    """A request that the controller has no reason to refuse."""
    text = (controller.data / "deploy.key").read_text()
    made = evidence_for(candidate, LIVE, key_of(text, "the key"))
    return made.request(candidate, plan=QUICK, **more)


def forced(candidate: Parameters, **plan: object) -> dict[str, object]:
    return {"policy": render(candidate), "override": "a drill", "plan": {**QUICK, **plan}}


def test_what_is_no_proof_is_refused_and_the_history_says_so(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twins[0].url])
    good = proven(controller, GOOD)
    other_key = evidence_for(GOOD, LIVE, bytes(32)).request(GOOD)
    for request, said in (
        ({"policy": render(GOOD)}, "there is no evidence"),
        (other_key, "another deploy key"),
        ({**good, "log": ""}, "is missing"),
        ({**good, "policy": render(HARMFUL)}, "is to be deployed: validate the file"),
    ):
        code, body = controller.admin("POST", "/deployments", request)
        error = json.loads(body)["error"]
        assert (code, error["code"]) == (422, "refused"), error
        assert any(said in reason for reason in error["reasons"]), error
    for request, wanted in (
        ({**good, "policy": render(LIVE)}, (409, "same_policy")),
        ({**good, "policy": render(load_policy("fifo"))}, (409, "discipline_changed")),
        ({**good, "policy": "schema: 1\nx: 1\n"}, (400, "invalid_policy")),
        ({**good, "plan": {"stages": []}}, (400, "invalid_plan")),
        ({"evidence": ""}, (400, "invalid_body")),
    ):  # fmt: skip
        code, body = controller.admin("POST", "/deployments", request)
        assert (code, json.loads(body)["error"]["code"]) == wanted, body
    rows = deploying.history(controller)
    assert [row["stage"] for row in rows] == ["refused"] * 4 + ["done"]
    assert in_force(controller) == short(LIVE)


def test_a_good_policy_goes_through_under_load_and_no_request_is_split(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twin.url for twin in twins])

    async def play() -> deploying.Load:
        async with load_on(controller.url, RATE) as load:
            row = await asyncio.to_thread(deploying.deploy, controller, proven(controller, GOOD))
            busy = controller.admin("POST", "/deployments", forced(HARMFUL))
            assert (busy[0], json.loads(busy[1])["error"]["code"]) == (409, "busy")
            assert b"is under way, in stage" in busy[1]
            put = controller.put_policy(render(HARMFUL))
            assert (put[0], json.loads(put[1])["error"]["code"]) == (409, "busy")
            await asyncio.to_thread(until, controller, row["id"], "done", "rolled_back")
            await asyncio.sleep(0.5)
        return load

    load = asyncio.run(play())
    row = deploying.history(controller)[0]
    assert stages(row) == ["shadow", "canary", "full", "done"], row
    assert in_force(controller) == short(GOOD)
    assert set(load.hashes()) == {short(LIVE), short(GOOD)}
    assert all(answer.good for answer in load.answers)
    named = {answer.extras.get("policy") for answer in load.answers}
    assert named == {short(LIVE), short(GOOD)}
    assert controller.stop() == 0
    ruled = read_ruled(segments(controller.data))
    assert (ruled.split, ruled.refused) == ([], [])
    assert ruled.decided[short(GOOD)] > 20
    shadow = controller.data / "shadow"
    assert list(shadow.glob("decisions.*.log"))


def test_a_harmful_policy_placed_by_override_is_rolled_back_by_the_verdict(
    twins: list[Twin], controllers: Controllers, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    where, told = hook
    controller = controllers([twin.url for twin in twins], webhook=where)

    async def play() -> deploying.Load:
        async with load_on(controller.url, RATE) as load:
            await asyncio.sleep(0.5)
            row = await asyncio.to_thread(deploying.deploy, controller, forced(HARMFUL, **HARMED))
            await asyncio.to_thread(until, controller, row["id"], "done", "rolled_back")
            await asyncio.sleep(1.0)
        return load

    load = asyncio.run(play())
    row = deploying.history(controller)[0]
    assert stages(row) == ["canary", "rolled_back"], row
    assert row["override"] == "a drill"
    hurt = sum(answer.headers[deploying.HEADER] == short(HARMFUL) and not answer.good
               for answer in load.answers)  # fmt: skip
    assert 0 < hurt <= 50, row
    assert in_force(controller) == short(LIVE)
    eventually("everyone is told", lambda: len(told) >= 2, 10.0)
    causes = " ".join(json.dumps(each) for each in told)
    assert "by an override: a drill" in causes
    assert "harmful is rolled back" in causes
    assert controller.stop() == 0
    ruled = read_ruled(segments(controller.data))
    assert ruled.split == []
    assert ruled.last_s[short(HARMFUL)] - row["steps"][-1]["at_s"] <= 5.0


def test_an_operator_rolls_back_at_once_by_the_commands(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins])
    at = ["--data", str(controller.data)]
    file, plan = tmp_path / "good.yaml", tmp_path / "plan.yaml"
    file.write_text(render(GOOD))
    plan.write_text("look_s: 1\nwarmup_least_s: 0\nwarmup_most_s: 1\n")
    text = (controller.data / "deploy.key").read_text()
    evidence = evidence_for(GOOD, LIVE, key_of(text, "the key")).write(tmp_path)
    run = CliRunner().invoke

    refused = run(deploy_command, [str(file), *at])
    assert refused.exit_code == 1
    assert "the policy is refused:\n  - there is no evidence" in refused.output
    unread = run(deploy_command, ["steady", *at])
    assert (unread.exit_code, "no such policy" in unread.output) == (2, True)
    wrong = run(deploy_command, [str(file), "--stages", "canary:5", *at])
    assert (wrong.exit_code, "'canary:5' is no stage" in wrong.output) == (2, True)
    begun = run(deploy_command, [
        str(file), "--evidence", str(evidence), "--plan", str(plan), "--stages",
        "shadow:1:5,canary=30:600:500,full:600", *at,
    ])  # fmt: skip
    assert begun.exit_code == 0, begun.output
    assert "good (" in begun.output

    async def play() -> float:
        async with load_on(controller.url, RATE):
            number = deploying.history(controller)[0]["id"]
            await asyncio.to_thread(until, controller, number, "canary")
            await asyncio.sleep(1.0)
            shown = await asyncio.to_thread(run, status, at)
            assert "stage canary, 30 % of the callers" in shown.output
            assert "canary requests" in shown.output
            decided_s = time.time()
            back = await asyncio.to_thread(run, rollback, ["--why", "a look at it", *at])
            assert back.exit_code == 0, back.output
            assert "good is rolled back" in back.output
            await asyncio.sleep(1.0)
        return decided_s

    decided_s = asyncio.run(play())
    assert in_force(controller) == short(LIVE)
    told = run(history, at).output
    assert "rolled_back: a look at it" in told
    assert "refused: there is no evidence" in told
    assert "tiers.turbo_max_tflop: 50 -> 60" in run(diff, at).output
    assert "nothing is being deployed" in run(status, at).output
    nothing = run(rollback, at)
    assert (nothing.exit_code, "the policy from before rules again" in nothing.output) == (2, True)
    code, _ = controller.put_policy(render(GOOD))
    assert code == 200
    put_back = run(rollback, at)
    assert "stable rules again" in put_back.output, put_back.output
    assert in_force(controller) == short(LIVE)
    forth = run(rollback, ["--to", str(deploying.history(controller)[1]["id"]), *at])
    assert forth.exit_code == 0
    assert in_force(controller) == short(GOOD)
    assert controller.stop() == 0
    ruled = read_ruled(segments(controller.data))
    assert ruled.split == []
    first = next(each for each in ruled.switches if hasattr(each, "keep"))
    assert first.keep == "old"
    assert ruled.decided[short(GOOD)] > 0
    assert ruled.last_s[short(GOOD)] - decided_s <= 5.0


def test_killed_anywhere_it_keeps_the_history_and_the_policy_from_before(
    twins: list[Twin], controllers: Controllers
) -> None:
    settings = settings_for([twin.url for twin in twins], controllers.folder)
    requests = {"": forced(GOOD), "rolled_back": forced(HARMFUL, **HARMED)}
    drill = deploying.killed_everywhere(settings, controllers.folder, requests, RATE / 2)
    assert drill.last is not None
    controllers.started.append(drill.last)
    assert (drill.lost, drill.wrong, drill.starts) == (0, [], len(PLACES) + 1)
    drill.last.stop()
    ruled = read_ruled(segments(drill.last.data))
    assert ruled.split == []
