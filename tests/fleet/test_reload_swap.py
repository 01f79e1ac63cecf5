"""A new version without a standby: one replica at a time, while the others serve."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

from tests.controller.asking import ask, chat, session
from tests.controller.processes import Controller, eventually, http, start_controller
from tests.fleet.loaded import weights
from tests.fleet.reloading import NEW, OLD, OVER, Fleet, ask_for, play, slots, until
from tests.fleet.support import members

if TYPE_CHECKING:
    from pathlib import Path


def _served(controller: Controller, version: str) -> Any:
    def both() -> bool:
        return [(each["state"], each["version"]) for each in slots(controller)] == [
            ("serving", version)
        ] * 2

    return eventually(f"both replicas serve {version}", both, 120.0, 0.1)


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
        starts = sorted(each["starts"] for each in slots(controller))
        assert starts == [2, 4], "the old version is not loaded once more to be ended again"
        assert json.loads(controller.admin("GET", "/status")[1])["refused_events"] == 0
    finally:
        controller.stop()
    assert controller.complaints() == []
    controller.audit()
    assert members(controller.data / "fleet") == []


def test_one_that_is_drained_is_called_back(tmp_path: Path) -> None:
    """A long answer is open on it; it serves again at once, and finishes that, too."""
    controller = Fleet(tmp_path, 2, ()).start()

    def twins(method: str, fault: object) -> None:
        for each in slots(controller):
            status, said = http(method, f"{each['url']}/twin/fault", fault)
            assert status in (200, 204), said

    async def call_back() -> None:
        under_way = asyncio.Semaphore(0)
        await asyncio.to_thread(twins, "POST", {"kind": "slow", "factor": 50})
        async with session() as client:
            document = chat("m", "long", 400, stream=True)
            answers = [asyncio.ensure_future(ask(client, controller.url, document,
                                                 began=under_way.release))
                       for _ in range(4)]  # fmt: skip
            for _ in answers:
                await asyncio.wait_for(under_way.acquire(), 60.0)
            path = weights(tmp_path / NEW, NEW)
            status, said = await asyncio.to_thread(ask_for, controller, NEW, path, swap=True)
            assert (status, said["phase"]) == (202, "draining"), said
            status, said = await asyncio.to_thread(ask_for, controller, OLD, "")
            assert (status, said["phase"]) == (202, "rolled back"), said
            await asyncio.to_thread(_served, controller, OLD)
            await asyncio.to_thread(
                eventually, "both are up",
                lambda: all(each["up"] for each in controller.status()["replicas"]), 60.0, 0.1,
            )  # fmt: skip
            assert not any(answer.done() for answer in answers), "they were not waited for"
            await asyncio.to_thread(twins, "DELETE", None)
            assert all([(await answer).good for answer in answers])

    try:
        before = [(each["pid"], each["starts"]) for each in slots(controller)]
        asyncio.run(call_back())
        assert [(each["pid"], each["starts"]) for each in slots(controller)] == before
    finally:
        controller.stop()
    assert controller.complaints() == []


def test_a_reload_that_stops_halfway_leaves_what_most_serve(tmp_path: Path) -> None:
    """The weights of the second wave cannot be read any more: it is given up. What crashes then,
    and all after the controller was killed, comes up in the version that most replicas have."""
    controller = Fleet(tmp_path, 3, ({},)).start()
    path = weights(tmp_path / NEW, NEW, code=1, loads=1)
    try:
        status, said = ask_for(controller, NEW, path)
        assert status == 202, said
        last = until(controller, OVER)
        assert (last["phase"], last["new"], last["old"]) == ("given up", 1, 2), last
        assert "exited with code 1" in last["why"]

        def states() -> list[tuple[str, str]]:
            return sorted((each["state"], each["version"]) for each in slots(controller))

        halfway = [("serving", OLD), ("serving", OLD), ("serving", NEW), ("warm", OLD)]
        eventually("the standby is one again", lambda: states() == halfway, 90.0, 0.1)
        serving = [each for each in slots(controller) if each["state"] == "serving"]
        old = next(each for each in serving if each["version"] == OLD)
        os.kill(old["pid"], signal.SIGKILL)

        def back() -> bool:
            pids = {each["pid"] for each in slots(controller)}
            return states() == halfway and old["pid"] not in pids

        eventually("it is back, as another process", back, 90.0, 0.1)

        controller.kill()
        controller = start_controller(controller.settings, tmp_path)

        def whole() -> bool:
            return states() == [("serving", OLD)] * 3 + [("warm", OLD)]

        eventually("all have the old version", whole, 90.0, 0.1)
    finally:
        controller.stop()
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
