"""Out of memory on one slice ends the engine on that slice, and nothing else.

One card is cut by the real command, two models are served on its slices by real processes, and one
of them is killed as the kernel does it when memory runs out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner

from controller.partition_cli import partition
from policy.decisions import BreakerMoved, Rotated
from policy.events import Failed, ReplicaDown, ReplicaUp
from tests.controller.processes import Controllers, eventually, http
from tests.fleet.fakes import WHOLE
from tests.fleet.support import patient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.log import Record
    from tests.controller.processes import Controller
    from tests.fleet.fakes import FakeCards

LARGE, SMALL = 0, 1
"""Slots, in the order of the fleet file."""
MODELS = {"chat": "h100-sxm/qwen3-8b", "small": "h100-sxm/qwen3-0.6b"}
COMMAND = [
    sys.executable, "-m", "twinkeel", "twin", "serve", "--profile", "{weights}", "--model",
    "{model}", "--version", "{version}", "--host", "{host}", "--port", "{port}",
]  # fmt: skip
KILL_AFTER_S, WATCHED_S = 1.0, 1.5
WITHIN_S = 90.0


@pytest.fixture
def slices(cards: FakeCards, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A card cut in two, of which the controller and its servers know by NVML."""
    done = CliRunner().invoke(partition, ["--card", WHOLE, "--layout", "3g.40gb+1g.10gb", "--yes"])
    assert done.exit_code == 0, done.output
    for name, value in cards.environ.items():
        monkeypatch.setenv(name, value)
    lines = [line for line in done.output.splitlines() if line.startswith("  gpus:")]
    return [uuid for line in lines for uuid in yaml.safe_load(line)["gpus"]]


@pytest.fixture
def controller(slices: list[str], tmp_path: Path) -> Iterator[Controller]:
    """A fleet of two models, each on its slice; its log is replayed when it has ended."""
    fleet = tmp_path / "fleet.yaml"
    models = {
        name: {
            "versions": {"v1": profile}, "version": "v1", "command": COMMAND,
            "replicas": [{"gpus": [uuid]}],
        }
        for (name, profile), uuid in zip(MODELS.items(), slices, strict=True)
    }  # fmt: skip
    fleet.write_text(yaml.safe_dump({"schema": 1, "models": models, "backoff": {"first_s": 0.2}}))
    controllers = Controllers(tmp_path)
    try:
        started = controllers((), fleet=str(fleet), policy=patient(tmp_path))
        started.wait_up(len(MODELS))
        yield started
    finally:
        controllers.close()


def slots(controller: Controller) -> list[dict[str, Any]]:
    """The fleet, as the admin API shows it."""
    status, body = controller.admin("GET", "/fleet")
    assert status == 200, body
    found: list[dict[str, Any]] = json.loads(body)["fleet"]["slots"]
    return found


def ask(controller: Controller, model: str) -> int:
    """One short answer of a model: its HTTP status."""
    document = {
        "model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Say a word."}],
    }  # fmt: skip
    return http("POST", f"{controller.url}/v1/chat/completions", document)[0]


def test_an_out_of_memory_on_one_slice_ends_that_engine_only(
    controller: Controller, slices: list[str]
) -> None:
    before = slots(controller)
    assert [slot["gpus"] for slot in before] == [[uuid] for uuid in slices]
    domains = [slot["domain"] for slot in before]
    assert domains == ["host0/card1/mig1", "host0/card1/mig2"], "each slice fails alone"
    for slot, uuid in zip(before, slices, strict=True):
        environment = Path(f"/proc/{slot['pid']}/environ").read_bytes().split(b"\0")
        assert f"CUDA_VISIBLE_DEVICES={uuid}".encode() in environment, "one slice, and only that"

    answers: dict[str, list[int]] = {name: [] for name in MODELS}
    over = threading.Event()

    def call(name: str) -> None:
        while not over.is_set():
            answers[name].append(ask(controller, name))

    callers = [threading.Thread(target=call, args=(name,)) for name in MODELS]
    for caller in callers:
        caller.start()
    try:
        time.sleep(KILL_AFTER_S)
        eventually("both answer", lambda: all(answers.values()), WITHIN_S)
        os.kill(before[LARGE]["pid"], signal.SIGKILL)
        eventually(
            "the killed engine serves again",
            lambda: (now := slots(controller)[LARGE])["starts"] == 2 and now["state"] == "serving",
            within_s=WITHIN_S,
        )
        time.sleep(WATCHED_S)
        eventually("it answers again", lambda: answers["chat"][-1] == 200, WITHIN_S)
        eventually("the other was asked often", lambda: len(answers["small"]) > 20, WITHIN_S)
    finally:
        over.set()
        for caller in callers:
            caller.join()

    after = slots(controller)
    assert [slot["starts"] for slot in after] == [2, 1]
    assert after[LARGE]["pid"] != before[LARGE]["pid"]
    assert after[SMALL]["pid"] == before[SMALL]["pid"]
    assert [slot["state"] for slot in after] == ["serving", "serving"]
    # Whoever called the other model has noticed nothing.
    assert set(answers["small"]) == {200}
    assert answers["chat"][-1] == 200
    assert ask(controller, "chat") == 200

    def told_up() -> list[Record]:
        """The log, when what has happened is in it: it is written a little later."""
        found = controller.records()
        ups = [r.event.replica for r in found if isinstance(r.event, ReplicaUp)]
        return found if ups.count(LARGE) == 2 else []

    records = eventually("it is on record", told_up)
    told = [record.event for record in records]
    decided = [one for record in records for one in record.decisions]
    downs = [event for event in told if isinstance(event, ReplicaDown)]
    assert {event.replica for event in downs} == {LARGE}
    # Whoever sees it first: the kernel tells of the process, a request of its connection.
    assert downs[0].reason in ("killed by signal 9", "connection refused")
    ups = [event.replica for event in told if isinstance(event, ReplicaUp)]
    assert ups.count(SMALL) == 1
    assert not [event for event in told if isinstance(event, Failed) and event.replica == SMALL]
    moved = [one for one in decided if isinstance(one, BreakerMoved)]
    assert not [one for one in moved if "small" in one.key], moved
    rotated = [one for one in decided if isinstance(one, Rotated) and one.replica == SMALL]
    assert all(one.state == "in" for one in rotated), rotated
