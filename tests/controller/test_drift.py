"""A server whose steps take longer than its profile says is told of, with the size; one that keeps
to it is not. The server's own records say what its steps took."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from policy.events import StepsRead
from tests.controller.asking import ask_all, chat
from tests.controller.inprocess import serving
from tests.controller.processes import (
    MODEL,
    audit,
    eventually,
    http,
    records,
    settings_for,
    twin_process,
)
from tests.controller.stories import read_story

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from controller.upstream.replica import Replica
    from tests.controller.processes import Twin

QUICK = """schema: 1
name: quick
drift:
  sample_ms: 500
  steps_least: 100
  samples_least: 3
"""
"""As by default, but within seconds."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Twin]]:
    """Two that record their steps: what the server says, and what the settings say."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(twin_process("--steps", str(tmp_path / f"steps{number}")))
            for number in range(2)
        ]


def test_a_drift_is_told_with_its_size(
    pair: list[Twin], tmp_path: Path, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    address, told = hook
    slow, sound = pair
    policy = tmp_path / "quick.yaml"
    policy.write_text(QUICK)
    upstreams = [{"url": slow.url}, {"url": sound.url, "steps": str(tmp_path / "steps1")}]
    settings = settings_for(
        upstreams, tmp_path, webhook=address, policy=str(policy), scrape_s=0.25
    )  # fmt: skip
    seen: dict[str, Any] = {}

    async def play() -> None:
        async with serving(settings) as running:
            slow.fault("slow", factor=1.3)
            for turn in range(60):
                # New prompts each time: known ones would go to where they are cached already. And
                # as many at once as make work for the slow one, too, which the policy avoids.
                asked = [chat(MODEL, f"{turn} {number} " * 200, 150) for number in range(24)]
                answers = await ask_all(running.url, asked)
                assert all(answer.good for answer in answers)
                if told:
                    break
            token = {"Authorization": f"Bearer {running.admin_token}"}
            for path in ("/status", "/metrics"):
                code, body = await asyncio.to_thread(
                    http, "GET", f"{running.admin_url}{path}", None, token
                )
                assert code == 200
                seen[path] = body.decode()

    asyncio.run(play())
    audit(settings.data_path)
    names = [urlsplit(each.url).netloc for each in pair]
    (alert,) = eventually("the alert is there", lambda: told)
    assert alert["key"] == f"drift {names[0]}"
    assert alert["figures"]["drift_permille"] == pytest.approx(300, abs=3)
    assert alert["figures"]["steps"] >= 300
    assert "longer than its profile says" in alert["cause"]
    assert "calibrate again" in alert["action"]

    story = read_story(records(settings.data_path))
    assert not story.refused
    assert [each.key for each in story.alerts] == [alert["key"]]
    reads = [each.event for each in records(settings.data_path) if type(each.event) is StepsRead]
    for number, ratio in ((0, 1.3), (1, 1.0)):
        mine = [each for each in reads if each.replica == number]
        assert sum(each.steps for each in mine) > 300
        measured = sum(each.measured_us for each in mine)
        assert measured / sum(each.predicted_us for each in mine) == pytest.approx(ratio, rel=0.003)

    views = json.loads(seen["/status"])["replicas"]
    assert views[0]["drift_permille"] == pytest.approx(300, abs=30)
    assert abs(views[1]["drift_permille"]) <= 20
    line = f'twinkeel_replica_drift_ratio{{replica="{names[0]}"}} '
    (shown,) = [each for each in seen["/metrics"].splitlines() if each.startswith(line)]
    assert float(shown.rpartition(" ")[2]) == pytest.approx(0.3, abs=0.03)


def test_a_server_without_records_tells_no_drift(twins: list[Twin], tmp_path: Path) -> None:
    settings = settings_for([twins[0].url], tmp_path, scrape_s=0.2)
    seen: list[Replica] = []

    async def play() -> None:
        async with serving(settings) as running:
            await ask_all(running.url, [chat(MODEL, "?", 60)] * 2)
            await asyncio.sleep(0.5)
            seen.extend(running.driver.replicas.values())

    asyncio.run(play())
    assert seen[0].cost is not None
    assert not [each for each in records(settings.data_path) if type(each.event) is StepsRead]
