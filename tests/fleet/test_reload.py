"""A model's new version takes over under load: nobody notices, and each answer says whose it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.controller.processes import Controller, eventually, http, start_controller
from tests.fleet.loaded import weights
from tests.fleet.reloading import NEW, OLD, OVER, Fleet, ask_for, play, slots, until, view
from tests.fleet.support import members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def test_a_version_takes_over_in_waves_and_nobody_notices(tmp_path: Path) -> None:
    """Two replicas and one standby: two waves. The old processes end by themselves."""
    controller = Fleet(tmp_path, 2, ({},)).start()
    try:
        old = {slot["pid"] for slot in slots(controller)}
        story = asyncio.run(play(controller, weights(tmp_path / NEW, NEW)))
        assert story.last["phase"] == "done", story.last
        assert not story.bad, story.bad
        assert len(story.answers) > 20
        assert story.last["open_on_old"] == 0
        assert (story.last["new"], story.last["old"]) == (2, 0)
        assert story.wrong == []
        labels = {answer.extras["model_version"] for answer in story.answers}
        assert labels == {OLD, NEW}
        assert story.last["confidence"] > 0.8

        def settled() -> bool:
            now = slots(controller)
            return all(each["version"] == NEW for each in now) and sorted(
                each["state"] for each in now
            ) == ["serving", "serving", "warm"]

        eventually("every slot has the new version", settled, 90.0)
        assert not old & {slot["pid"] for slot in slots(controller)}
        assert not old & set(members(controller.data / "fleet"))
    finally:
        controller.stop()
    assert controller.complaints() == []
    controller.audit()
    assert members(controller.data / "fleet") == []


# ---- versions that are no good ----


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Controller, Path]]:
    """A fleet of one replica and one cold standby, on which nothing that is bad comes into force;
    when all is over, it has served on."""
    folder = tmp_path_factory.mktemp("fleet")
    controller = Fleet(folder, watch_ms=60_000, settings={"scrape_s": 0.5}).start()
    first = slots(controller)[0]
    try:
        yield controller, folder
        last = slots(controller)[0]
        same = ("pid", "version", "state", "starts")
        assert [last[key] for key in same] == [first[key] for key in same]
    finally:
        controller.stop()
    assert controller.complaints() == []
    controller.audit()
    assert members(controller.data / "fleet") == []


@pytest.fixture
def serving(kept: tuple[Controller, Path]) -> tuple[Controller, Path]:
    """The same, when what the test before it reloaded is over and put away."""
    controller, _ = kept

    def ready() -> bool:
        return [(each["state"], each["version"]) for each in slots(controller)] == [
            ("serving", OLD), ("cold", OLD),
        ]  # fmt: skip

    eventually("the standby is one", ready, 60.0, 0.1)
    return kept


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "does-not-start": ({"code": 1}, "exited with code 1: "),
    "another": ({"version": "v0.9"}, "another version was loaded: v0.9"),
    "repeats": ({"fault": {"kind": "same"}}, "over and over"),
    "empty": ({"fault": {"kind": "empty"}}, "its answer is empty"),
    "unsure": ({"fault": {"kind": "unsure"}}, "more than confidence_drop_most, 0.2, below it"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_version_that_is_bad_never_takes_requests(
    kind: str, serving: tuple[Controller, Path]
) -> None:
    """It is said why, in the reload and in an alert; nobody was answered by it."""
    controller, folder = serving
    how, why = BAD[kind]
    version = f"bad-{kind}"
    path = weights(folder / version, **{"version": version, **how})
    story = asyncio.run(play(controller, path, version, before_s=0.3, after_s=0.3))
    assert story.last["phase"] == "rolled back", story.last
    assert why in story.last["why"], story.last
    assert story.bad == []
    assert {answer.extras["model_version"] for answer in story.answers} == {OLD}
    assert story.wrong == []
    alerts = json.loads(controller.admin("GET", "/alerts")[1])["alerts"]
    told = [each["cause"] for each in alerts if each["key"] == f"controller reload m {version}"]
    assert told
    assert why in told[0]
    eventually("the standby is one again", lambda: slots(controller)[1]["state"] == "cold", 60.0)


def test_what_cannot_be_begun_is_refused_and_nothing_changes(
    serving: tuple[Controller, Path],
) -> None:
    """Weights that are not there, that are another version's by a link, or that need more memory
    than there is: the sum is told, and what can be done."""
    controller, folder = serving
    status, said = ask_for(controller, "v2", str(folder / "nowhere"))
    assert (status, said["error"]["code"]) == (409, "no_such_weights")
    assert "nowhere is not on the controller's machine" in said["error"]["message"]
    link = folder / "current"
    link.symlink_to(folder / OLD)
    status, said = ask_for(controller, "v2", str(link))
    assert (status, said["error"]["code"]) == (409, "same_weights")
    assert str(folder / OLD) in said["error"]["message"]
    status, said = ask_for(controller, "v2", "")
    assert (status, said["error"]["code"]) == (409, "no_such_weights")
    status, said = ask_for(controller, OLD, str(folder / OLD))
    assert (status, said["error"]["code"]) == (409, "served_already")
    huge = weights(folder / "huge", "huge", size=4 << 40)
    status, said = ask_for(controller, "huge", huge)
    assert (status, said["error"]["code"]) == (409, "no_room")
    sum_of_it = "weights 4194304 MB + KV cache 256 MB + overhead 419431 MB = 4613991 MB"
    assert f"m-standby-0: huge needs {sum_of_it}; this machine has" in said["error"]["message"]
    assert "MB are lacking; make room, or without standbys in" in said["error"]["message"]
    status, body = controller.admin(
        "POST", "/fleet/models/other/reload", {"version": "v2", "weights": "/x"}
    )
    assert (status, json.loads(body)["error"]["code"]) == (404, "no_such_model")
    assert [slot["state"] for slot in slots(controller)] == ["serving", "cold"]


def test_the_name_of_a_version_that_failed_is_free_again(
    serving: tuple[Controller, Path],
) -> None:
    """Its weights are put right in another folder."""
    controller, folder = serving
    for number in (1, 2):
        path = weights(folder / f"try{number}", "again", code=number)
        status, said = ask_for(controller, "again", path)
        assert status == 202, said
        last = until(controller, OVER)
        assert (last["phase"], "with code" in last["why"]) == ("rolled back", True), last

        def free() -> bool:
            kept = json.loads((controller.data / "fleet" / "versions.json").read_text())
            return "again" not in kept["m"]["versions"] and slots(controller)[1]["state"] == "cold"

        eventually("its name is free", free, 60.0, 0.1)


def _killed(controller: Controller) -> None:
    new = next(slot for slot in slots(controller) if slot["version"].startswith("late"))
    os.kill(new["pid"], signal.SIGKILL)


def _silenced(controller: Controller) -> None:
    new = next(slot for slot in slots(controller) if slot["version"].startswith("late"))
    status, _ = http("POST", f"{new['url']}/twin/fault", {"kind": "empty"})
    assert status == 200


LOST_HOW = ("replica_lost", "stream_cut", "empty")
MOST_LOST = 8
"""What the one replica did to its callers until it was known for bad."""
LATE: dict[str, tuple[Callable[[Controller], None], tuple[str, ...]]] = {
    # Whether its process or a request of it is heard of first is chance.
    "late-killed": (_killed, (
        "a new replica went down: m-standby-0 went down: killed by signal 9",
        "a new replica is out: replica_lost",
    )),
    "late-empty": (_silenced, ("a new replica is out: failures",)),
}  # fmt: skip


@pytest.mark.parametrize("version", LATE)
def test_a_version_that_turns_bad_after_the_switch_is_taken_back(
    version: str, serving: tuple[Controller, Path]
) -> None:
    """The old replica was kept, and takes requests again at once."""
    controller, folder = serving
    harm, reasons = LATE[version]

    async def turns_bad() -> None:
        await asyncio.to_thread(until, controller, ["watching"])
        await asyncio.to_thread(harm, controller)

    path = weights(folder / version, version)
    story = asyncio.run(play(controller, path, version, meanwhile=turns_bad))
    assert story.last["phase"] == "rolled back", story.last
    assert story.last["why"].startswith(reasons), story.last
    lost = [each for each in story.answers if not each.good]
    assert all(each.error["code"] in LOST_HOW for each in lost), story.bad
    assert len(lost) <= MOST_LOST
    assert story.wrong == []
    last = max(story.answers, key=lambda each: each.sent_s)
    assert last.extras["model_version"] == OLD
    eventually(
        "the standby is one again, in the version from before",
        lambda: [slots(controller)[1][key] for key in ("state", "version")] == ["cold", OLD], 60.0,
    )  # fmt: skip


def test_an_operator_calls_a_version_back(serving: tuple[Controller, Path]) -> None:
    """By asking for the one from before, while the new one is watched."""
    controller, folder = serving
    path = weights(folder / "v1.2", "v1.2")

    async def call_back() -> None:
        await asyncio.to_thread(until, controller, ["watching"])
        status, said = await asyncio.to_thread(ask_for, controller, "v1.3", path)
        assert (status, said["error"]["code"]) == (409, "busy")
        status, said = await asyncio.to_thread(ask_for, controller, OLD, "")
        assert status == 202, said

    story = asyncio.run(play(controller, path, "v1.2", meanwhile=call_back))
    assert (story.last["phase"], story.bad, story.wrong) == ("rolled back", [], [])
    assert "an operator asked for the version from before" in story.last["why"]
    assert view(controller)["version"] == "v1.2"


# ---- the command ----


@contextlib.contextmanager
def hot_reload(controller: Controller, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command, in a process of its own."""
    code = "from controller.model_cli import model; model()"
    command = [
        sys.executable, "-c", code, "hot-reload", "--model", "m", "--admin", controller.admin_url,
        "--data", str(controller.data), *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_command_shows_how_it_goes_and_fails_with_a_version_that_does(
    serving: tuple[Controller, Path],
) -> None:
    controller, folder = serving
    path = weights(folder / "v9", "v9", code=1)
    with hot_reload(controller, "--version", "v9", "--weights", path) as process:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 1, said
    assert f"m: v9 ({path}) is to replace v1.0" in said
    assert "v9 is rolled back after " in said
    assert "exited with code 1: " in said
    assert said.rstrip().endswith("; replicas: 1 of v1.0")
    with hot_reload(controller, "--version", "v9", "--weights", "/nowhere/at/all") as process:
        said, _ = process.communicate(timeout=120)
        assert (process.returncode, said.strip()) == (
            2,
            "Error: /nowhere/at/all is not on the controller's machine: copy the weights there, and"
            " give their whole path there, or a hub name",
        )  # fmt: skip


def test_the_command_can_be_left_and_taken_up_again(serving: tuple[Controller, Path]) -> None:
    """Ctrl-C ends the command, not the reload; the same command follows it, another calls it
    back."""
    controller, folder = serving
    options = ("--version", "v8", "--weights", weights(folder / "v8", "v8"))
    with hot_reload(controller, *options) as process:
        assert process.stdout is not None
        assert "is to replace v1.0" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 130, said
    again = f"twinkeel model hot-reload --model m --admin {controller.admin_url}"
    again = f"{again} --data {controller.data} --version"
    assert f"it goes on. To see how: {again} v8\nTo call it back: {again} v1.0\n" in said
    with hot_reload(controller, *options) as process:
        assert process.stdout is not None
        assert "is to replace v1.0" in process.stdout.readline(), "it follows that one"
        until(controller, ["watching"])
        with hot_reload(controller, "--version", OLD) as back:
            told, _ = back.communicate(timeout=120)
        said, _ = process.communicate(timeout=120)
        assert (process.returncode, back.returncode) == (1, 0)
    for each in (said, told):
        assert "an operator asked for the version from before; replicas: 1 of v1.0" in each


def test_the_command_says_when_it_cannot_follow_any_more(tmp_path: Path) -> None:
    """The controller was killed, or another one knows nothing of it: it had been begun, though."""
    controller = Fleet(tmp_path, watch_ms=60_000).start()
    options = ("--version", NEW, "--weights", weights(tmp_path / NEW, NEW))
    try:
        with hot_reload(controller, *options) as process:
            assert process.stdout is not None
            assert "is to replace v1.0" in process.stdout.readline()
            until(controller, ["watching"])
            controller.kill()
            said, _ = process.communicate(timeout=120)
        assert process.returncode == 1, said
        assert "no controller answers there" in said
        assert "The reload cannot be followed any more. A controller that was restarted" in said
        assert "`twinkeel fleet show` says which" in said
        controller = start_controller(controller.settings, tmp_path)
        eventually(
            "what had taken over serves",
            lambda: ("serving", NEW) in [(each["state"], each["version"]) for each in
                                         slots(controller)], 90.0,
        )  # fmt: skip
    finally:
        controller.stop()
    assert members(controller.data / "fleet") == []
