"""Open loop: from the recorded arrivals alone, the twin predicts what live did.

On served twins, whose engines are exact: what is left is the controller, the network and the clock.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.controller.processes import twin_process
from tests.controller.recording import load, play, predict

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controllers
    from tests.live.conftest import Ledger

pytestmark = pytest.mark.live

SPAN_S = 70.0
RATE = 7.0
BURST = 220
SEED = 7


def test_the_twin_predicts_what_live_did(
    controllers: Controllers, ledger: Ledger, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        twins = [stack.enter_context(twin_process()) for _ in range(2)]
        controller = controllers([twin.url for twin in twins])
        answers = asyncio.run(play(controller.url, load(SEED, SPAN_S, RATE, BURST)))
        assert controller.stop() == 0
    assert {answer.status for answer in answers} <= {200, 429}
    seen = predict(controller.data / "trace" / "trace.parquet", tmp_path)
    assert seen.requests == len(answers)
    assert seen.shed == sum(answer.status == 429 for answer in answers)
    assert seen.shed > 0, "the burst was not enough"
    print(seen)
    how = f"{seen.requests} requests in {SPAN_S:.0f} s, {seen.shed} of them shed"
    ledger.add(
        "predicted_tier_pct", seen.both_pct, "%", ">= 95",
        f"tier and admit or shed as the twin predicts, {how}",
    )  # fmt: skip
    for name, error in seen.errors_pct.items():
        measured, predicted = seen.told[name]
        ledger.add(
            f"predicted_{name}_error_pct", error, "%", "<= 5",
            f"{predicted:.1f} ms predicted, {measured:.1f} ms measured, {how}",
        )  # fmt: skip
    assert seen.both_pct >= 95
    assert max(seen.errors_pct.values()) <= 5, seen
