"""Deployments in front of real vLLM: a good policy goes through and its predicted band holds, a
harmful one is rolled back within its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.files import load_policy
from policy.parameters import render
from tests.bench.deploying import play, record
from tests.controller import deploying
from tests.controller.deploying import HEADER, QUICK, read_ruled, short, stages
from tests.controller.processes import segments
from tests.live.server import MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controllers
    from tests.live.conftest import Ledger
    from tests.live.server import Vllm

pytestmark = pytest.mark.live

RATE = 3.0
"""Requests per second: the tiny model answers in some tenths of a second on one core."""
RECORD_S = 20.0
PLAN: dict[str, Any] = {
    **QUICK,
    "stages": [
        {"kind": "shadow", "share_permille": 0, "least_s": 3, "least_requests": 5},
        {"kind": "canary", "share_permille": 400, "least_s": 5, "least_requests": 10},
        {"kind": "full", "share_permille": 1000, "least_s": 5, "least_requests": 10},
    ],
}
HARMED = {**PLAN, "stages": [{**PLAN["stages"][1], "least_s": 60}, PLAN["stages"][2]]}


def test_a_good_policy_goes_through_and_a_harmful_one_goes_back(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers, ledger: Ledger,
    tmp_path: Path,
) -> None:  # fmt: skip
    live = load_policy(patient)
    tiers = msgspec.structs.replace(live.tiers, turbo_max_tflop=live.tiers.turbo_max_tflop + 10)
    limits = msgspec.structs.replace(live.limits, model_per_s=1)
    classes = msgspec.structs.replace(
        live.classes, p0_deadline_ms=2000, p1_deadline_ms=2000, p2_deadline_ms=2000
    )
    good = msgspec.structs.replace(live, name="good", tiers=tiers)
    harmful = msgspec.structs.replace(live, name="harmful", limits=limits, classes=classes)
    upstreams = [server.upstream(profile) for server in vllm]
    controller = controllers(upstreams, policy=patient)
    trace = record(controller, RECORD_S, RATE, MODEL)
    controller = controllers.again(controller.settings, controller.folder)

    file, out = tmp_path / "good.yaml", tmp_path / "ev.json"
    file.write_text(render(good))
    key = controller.data / "deploy.key"
    evidence = deploying.validated(file, patient, trace, key, out, profile)
    lacks = "; ".join(gate.why for gate in evidence.gates if not gate.holds)
    before = len(segments(controller.data))
    request = {"policy": render(harmful), "override": "a drill", "plan": HARMED}
    harmed = play(controller, request, RATE, model=MODEL)
    request = deploying.sent(good, out, plan=PLAN, override=lacks)
    through = play(controller, request, RATE, model=MODEL)
    assert controller.stop() == 0
    log = segments(controller.data)[before - 1 :]

    assert stages(harmed.row)[-1] == "rolled_back", harmed.row
    hurt = sum(
        answer.headers.get(HEADER) == short(harmful) and not answer.good
        for answer in harmed.load.answers
    )
    assert stages(through.row)[-1] == "done", through.row
    results = deploying.results_of(log, live, through.row["at_s"])
    mine = [each for each in results if each.canary]
    above, told = deploying.outside(mine, evidence.expected.band)
    ruled = read_ruled(log)
    took_s = max(0.0, ruled.last_s[short(harmful)] - harmed.row["steps"][-1]["at_s"])
    how = f"on vLLM; evidence {'holds' if not lacks else f'lacks: {lacks}'}"
    found = [
        ledger.add("deploy_hurt", hurt, "1", "<= 50", "requests hurt by a harmful policy"),
        ledger.add("deploy_rollback_s", took_s, "s", "<= 5", "verdict to last decision by it"),
        ledger.add("deploy_split_decisions", len(ruled.split), "1", "= 0",
                   f"of {sum(ruled.decided.values())} decisions"),
    ]  # fmt: skip
    # Reported whether it holds or not: server, callers and controller share these cores, and the
    # band is that of a server which has them to itself.
    ledger.add("deploy_band_held", float(bool(told) and not above), "1", "= 1",
               f"{how}; {'; '.join(told)}")  # fmt: skip
    assert [figure for figure in found if not figure.holds] == []
