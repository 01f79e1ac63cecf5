"""A new version without a standby: one replica at a time, while the others serve."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.controller.processes import Controller, eventually
from tests.fleet.loaded import weights
from tests.fleet.reloading import NEW, OLD, Fleet, ask_for, play, slots
from tests.fleet.support import members

if TYPE_CHECKING:
    from pathlib import Path


def _served(controller: Controller, version: str) -> Any:
    def both() -> bool:
        return [(each["state"], each["version"]) for each in slots(controller)] == [
            ("serving", version)
        ] * 2

    return eventually(f"both replicas serve {version}", both, 60.0, 0.1)


def test_without_a_standby_replicas_are_replaced_one_by_one(tmp_path: Path) -> None:
    """Asked for so only; a version that is no good leaves things as they were."""
    controller = Fleet(tmp_path, 2, ()).start()
    try:
        path = weights(tmp_path / NEW, NEW)
        status, said = ask_for(controller, NEW, path)
        assert (status, said["error"]["code"]) == (409, "no_standby")
        assert "m has no standby, so v1.1, which needs weights 1 MB" in said["error"]["message"]
        assert "--drain-then-swap replaces one replica at a time" in said["error"]["message"]

        bad = weights(tmp_path / "bad", "bad", fault={"kind": "unsure"})
        story = asyncio.run(play(controller, bad, "bad", swap=True))
        assert story.last["phase"] == "rolled back", story.last
        assert "confidence_drop_most" in story.last["why"]
        assert (story.bad, story.wrong) == ([], [])
        _served(controller, OLD)

        story = asyncio.run(play(controller, path, swap=True))
        assert story.last["phase"] == "done", story.last
        assert (story.bad, story.wrong) == ([], [])
        assert {each.extras["model_version"] for each in story.answers} == {OLD, NEW}
        _served(controller, NEW)
        assert json.loads(controller.admin("GET", "/status")[1])["refused_events"] == 0
    finally:
        controller.stop()
    assert controller.complaints() == []
    controller.audit()
    assert members(controller.data / "fleet") == []


def test_the_only_replica_is_not_taken_away(tmp_path: Path) -> None:
    controller = Fleet(tmp_path, 1, ()).start()
    try:
        path = weights(tmp_path / NEW, NEW)
        status, said = ask_for(controller, NEW, path, swap=True)
        assert (status, said["error"]["code"]) == (409, "only_replica")
        assert "m-0: it is the only replica" in said["error"]["message"]
        assert slots(controller)[0]["state"] == "serving"
    finally:
        controller.stop()
