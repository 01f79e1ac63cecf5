"""`serve --fleet` as it is run: a controller process, and served twins that it starts itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner

from controller.cli import serve
from controller.fleet_cli import fleet as fleet_group
from policy.decisions import Rotated
from policy.events import Arrived, ReplicaDown, ReplicaUp, Restored, Standby
from tests.controller.asking import Answer, ask, chat, session
from tests.controller.processes import Controller, eventually, settings_for, start_controller
from tests.fleet.support import TWIN_COMMAND, members, patient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROFILE = "h100-sxm/qwen3-8b"
START_S_MOST = 90.0


SLOW_COMMAND = ("sh", "-c", 'sleep 600; exec "$@"', "sh", *TWIN_COMMAND)
"""A start that takes longer than any test."""


@dataclass
class Site:
    """A controller with a fleet file, as often as it is started."""

    folder: Path
    controller: Controller
    refused: int = 0

    @property
    def fleet_folder(self) -> Path:
        return self.folder / "data" / "fleet"

    def slots(self) -> list[dict[str, Any]]:
        status, body = self.controller.admin("GET", "/fleet")
        assert status == 200, body
        slots: list[dict[str, Any]] = json.loads(body)["fleet"]["slots"]
        return slots

    def states(self) -> list[str]:
        return [slot["state"] for slot in self.slots()]

    def pids(self) -> list[int]:
        return [slot["pid"] for slot in self.slots()]

    def up(self) -> list[int]:
        return [each["id"] for each in self.controller.status()["replicas"] if each["up"]]

    def until(self, states: list[str]) -> None:
        eventually(f"the slots are {states}", lambda: self.states() == states, START_S_MOST)

    def until_up(self, *replicas: int) -> None:
        eventually(f"{replicas} are up", lambda: self.up() == list(replicas), START_S_MOST)

    def up_at_once(self, down: int, up: int) -> bool:
        """As the log has it, no request came between the loss of the one and the other's coming.

        Told by the order of what the controller saw, since its clock goes on while it has no turn.
        """
        events = [record.event for record in self.controller.records()]
        lost = next(at for at, event in enumerate(events)
                    if isinstance(event, ReplicaDown) and event.replica == down)  # fmt: skip
        came = next(at for at, event in enumerate(events)
                    if isinstance(event, ReplicaUp) and event.replica == up)  # fmt: skip
        between = events[lost + 1 : came]
        return came > lost and not any(isinstance(event, Arrived) for event in between)

    def again(self) -> None:
        """Start the next controller."""
        self.controller = start_controller(self.controller.settings, self.folder)

    def end(self) -> int:
        """Nothing was illegal, nothing complained, everything replays, nothing is left."""
        assert self.controller.status()["refused_events"] == 0
        code = self.controller.stop()
        assert not members(self.fleet_folder), "orphans"
        assert not self.controller.complaints()
        self.controller.audit()
        return code


def fleet_file(folder: Path, count: int, standbys: list[dict[str, Any]], **model: Any) -> Path:
    """A fleet of served twins."""
    document = {
        "schema": 1,
        "backoff": {"first_s": 0.2},
        "models": {
            "m": {
                "versions": {"v1": PROFILE}, "version": "v1", "command": list(TWIN_COMMAND),
                "replicas": [{}] * count, "standbys": standbys, "stop_s_most": 5.0, **model,
            }
        },
    }  # fmt: skip
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Starts a controller with a fleet of so many replicas and standbys."""
    made: list[Site] = []

    def start(
        replicas: int, standbys: list[dict[str, Any]], silent_ms: int = 30_000, **how: Any
    ) -> Site:
        file = fleet_file(tmp_path, replicas, standbys, **how)
        policy = patient(tmp_path, silent_ms)
        settings = settings_for([], tmp_path, fleet=str(file), policy=policy)
        made.append(Site(tmp_path, start_controller(settings, tmp_path)))
        return made[-1]

    yield start
    for each in made:
        each.controller.stop()
        for pid in members(each.fleet_folder):
            os.kill(pid, signal.SIGKILL)


async def under_load(
    site: Site, s: float, happens: Callable[[], object], at_s: float, *, every_s: float = 0.05
) -> list[tuple[dict[str, Any], Answer]]:
    """Streams and whole answers in turn, and something that happens meanwhile. As many as there is
    time for, or that take longer: until it is over, too."""
    async with session() as client:
        tasks = []
        happening: asyncio.Task[object] | None = None
        number = 0
        while number < round(s / every_s) or (happening is not None and not happening.done()):
            if number >= round(at_s / every_s) and happening is None:
                happening = asyncio.create_task(asyncio.to_thread(happens))
            document = chat("m", f"{number}", 24, stream=number % 2 == 0)
            task = asyncio.create_task(ask(client, site.controller.url, document))
            tasks.append((document, task))
            number += 1
            await asyncio.sleep(every_s)
        if happening is not None:
            await happening
        return [(document, await task) for document, task in tasks]


def test_a_crash_under_load_costs_nothing_that_could_be_moved(site: Callable[..., Site]) -> None:
    one = site(2, [{}])
    one.until(["serving", "serving", "warm"])
    one.until_up(0, 1)
    (victim, *_) = one.pids()

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)
        one.until_up(1, 2)

    told = asyncio.run(under_load(one, 4.0, kill, 1.5))
    lost = [(document["stream"], answer) for document, answer in told if not answer.good]
    assert all(stream for stream, _ in lost), "what had not begun was moved"
    assert all(answer.text for _, answer in lost), "it had begun"
    assert {answer.error["code"] for _, answer in lost} <= {"replica_lost", "stream_cut"}
    assert len(told) > 50
    one.until(["warm", "serving", "serving"])
    slots = one.slots()
    assert (slots[0]["starts"], slots[0]["standby"]) == (2, True)
    causes = {each["cause"] for each in one.controller.status()["alerts"]}
    assert "down: killed by signal 9" in causes
    assert one.end() == 0
    told_of = [record.event for record in one.controller.records()]
    assert one.up_at_once(0, 2), "it was warm"
    downs = [event.reason for event in told_of if isinstance(event, ReplicaDown)]
    assert downs == ["killed by signal 9", "stopped", "stopped"]
    assert [each.replica for each in told_of if isinstance(each, Standby)] == [2, 0]


def test_the_only_one_crashes_and_nobody_is_sent_away(site: Callable[..., Site]) -> None:
    """Its warm standby is up in the same moment: no request finds nobody there."""
    one = site(1, [{}])
    one.until(["serving", "warm"])
    one.until_up(0)
    victim = one.pids()[0]
    told = asyncio.run(under_load(one, 3.0, lambda: os.kill(victim, signal.SIGKILL), 1.0))
    assert not [answer for document, answer in told if not answer.good and not answer.text]
    one.until(["warm", "serving"])
    assert one.end() == 0
    assert one.up_at_once(0, 1)


def test_a_killed_controller_is_followed_by_one_that_adopts(site: Callable[..., Site]) -> None:
    one = site(1, [{}])
    one.until(["serving", "warm"])
    one.until_up(0)
    os.kill(one.pids()[0], signal.SIGKILL)  # so that the standby serves, and the other waits
    one.until_up(1)
    one.until(["warm", "serving"])
    before = one.pids()
    one.controller.kill()
    assert len(members(one.fleet_folder)) == 2, "they live on"
    one.again()
    assert one.states()[1] == "serving", "what served serves when the controller does"
    one.until_up(1)
    one.until(["warm", "serving"])
    assert one.pids() == before, "none was started anew"
    (answer,) = [told for _, told in asyncio.run(under_load(one, 0.04, lambda: None, 9.0))]
    assert answer.good
    os.kill(before[1], signal.SIGKILL)
    one.until_up(0)
    one.until(["serving", "warm"])
    assert one.end() == 0
    events = [record.event for record in one.controller.records()]
    assert sum(isinstance(event, Restored) for event in events) == 1


def test_a_controller_that_is_killed_in_the_midst_of_a_start(site: Callable[..., Site]) -> None:
    one = site(2, [])
    eventually("they have been started", lambda: len(members(one.fleet_folder)) == 2, START_S_MOST)
    kept = one.fleet_folder.glob
    eventually("that is on record", lambda: len(list(kept("*-?.json"))) == 2, START_S_MOST)
    one.controller.kill()
    left = members(one.fleet_folder)
    one.again()
    one.until(["serving", "serving"])
    assert sorted(one.pids()) == left, "each was adopted before it answered, and warmed"
    one.until_up(0, 1)
    assert one.end() == 0


def test_sigterm_in_the_midst_of_a_start_leaves_nothing(site: Callable[..., Site]) -> None:
    one = site(2, [{}, {"warm": False}], command=SLOW_COMMAND)
    assert set(one.states()) <= {"starting", "cold"}
    assert one.end() == 0


TOLD_TO_END = """
import asyncio, os, signal
from controller.fleet.local import LocalFleet
from tests.controller.processes import main

begin = LocalFleet.begin

async def interrupted(self, driver, gate):
    await begin(self, driver, gate)
    while not all(self.pid(number) for number in range(len(self.upstreams))):
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)

LocalFleet.begin = interrupted
if __name__ == "__main__":
    main()
"""


def test_sigterm_while_the_fleet_begins_leaves_nothing(
    site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a controller before left is adopted, and then ended as well."""
    one = site(2, [])
    eventually("they have been started", lambda: len(members(one.fleet_folder)) == 2, START_S_MOST)
    one.controller.kill()
    (tmp_path / "told_to_end.py").write_text(TOLD_TO_END)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one.controller = start_controller(one.controller.settings, tmp_path, "told_to_end")
    assert one.controller.process.wait(60.0) == 0
    assert not members(one.fleet_folder), "orphans"
    assert not one.controller.complaints()


def test_what_servers_write_is_not_hidden_from_others(site: Callable[..., Site]) -> None:
    """The controller's own files are private; a cache that servers share is not."""
    one = site(1, [])
    eventually("it has been started", lambda: members(one.fleet_folder), START_S_MOST)
    before = os.umask(0o077)
    os.umask(before)
    (server,) = members(one.fleet_folder)
    assert _umask_of(one.controller.process.pid) == 0o077
    assert _umask_of(server) == before != 0o077


def _umask_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def test_one_that_hangs_is_replaced(site: Callable[..., Site]) -> None:
    """Its port is open and nothing moves: the policy sees it, and the fleet ends it."""
    one = site(2, [{}], silent_ms=3000)  # another that has no turn for so long is not taken for it
    one.until(["serving", "serving", "warm"])
    one.until_up(0, 1)
    (victim, *_) = one.pids()

    def hang() -> None:
        os.kill(victim, signal.SIGSTOP)
        eventually("the standby serves", lambda: 2 in one.up(), START_S_MOST)

    told = asyncio.run(under_load(one, 3.0, hang, 1.0))
    one.until(["warm", "serving", "serving"])
    assert one.pids()[0] not in (0, victim)
    lost = [answer for document, answer in told if not answer.good and not document["stream"]]
    assert not lost, "they had not begun"
    alerts = one.controller.status()["alerts"]
    assert any("silent" in each["cause"] or "hung" in each["cause"] for each in alerts), alerts
    assert one.end() == 0
    decided = [each for record in one.controller.records() for each in record.decisions]
    isolated = [each for each in decided if isinstance(each, Rotated) and each.state == "isolated"]
    assert {(each.replica, each.why) for each in isolated} == {(0, "hung")}


def test_a_drilled_fault_isolates_and_a_word_brings_it_back(site: Callable[..., Site]) -> None:
    one = site(1, [{}])
    one.until(["serving", "warm"])
    one.until_up(0)
    admin = one.controller.admin
    assert admin("DELETE", "/fleet/drill/0")[0] == 404, "nothing is broken"
    assert admin("POST", "/fleet/drill", {"replica": 0, "kind": "ecc"})[0] == 400
    assert admin("POST", "/fleet/drill", {"replica": 7, "kind": "xid_fatal"})[0] == 404
    status, said = admin("POST", "/fleet/drill", {"replica": 0, "kind": "ecc_uncorrectable"})
    assert status == 200, said
    assert one.up() == [1], "the standby serves as soon as it has been told"
    one.until(["broken", "serving"])
    assert one.pids()[0] == 0
    assert admin("POST", "/fleet/cards/GPU-1/restore")[0] == 404
    assert admin("DELETE", "/fleet/drill/0")[0] == 200
    one.until(["warm", "serving"])
    assert one.end() == 0


def test_a_fleet_file_with_fewer_slots_is_agreed_upon(site: Callable[..., Site]) -> None:
    """The policy remembers standbys that are no more; nothing is asked of them."""
    one = site(1, [{}, {}])
    one.until(["serving", "warm", "warm"])
    one.until_up(0)
    one.controller.kill()
    fleet_file(one.folder, 1, [])
    one.again()
    one.until(["serving"])
    one.until_up(0)
    assert len(members(one.fleet_folder)) == 1
    os.kill(one.pids()[0], signal.SIGKILL)
    eventually(
        "it is back", lambda: one.slots()[0]["starts"] == 1 and one.up() == [0], START_S_MOST
    )
    assert one.end() == 0
    events = [record.event for record in one.controller.records()]
    assert {each.replica for each in events if isinstance(each, ReplicaUp)} == {0}
    log = one.controller.output.read_text()
    assert "the fleet has no such slot" not in log, "nothing was asked of what is gone"


def test_the_command_shows_what_runs(site: Callable[..., Site]) -> None:
    one = site(1, [{"warm": False}])
    one.until(["serving", "cold"])
    data = str(one.folder / "data")
    shown = CliRunner().invoke(fleet_group, ["show", "--data", data])
    assert shown.exit_code == 0, shown.output
    assert "fleet (local)" in shown.output
    assert "m-standby-0 (standby)" in shown.output
    assert str(one.pids()[0]) in shown.output
    raw = CliRunner().invoke(fleet_group, ["show", "--data", data, "--json"])
    assert [each["name"] for each in json.loads(raw.output)["fleet"]["slots"]] == [
        "m-0", "m-standby-0",
    ]  # fmt: skip
    assert one.end() == 0
    gone = CliRunner().invoke(
        fleet_group, ["show", "--data", data, "--admin", "http://127.0.0.1:1"]
    )
    assert gone.exit_code == 2
    assert "no controller answers there" in gone.output


# ---- before anything is started ----


def checked(path: Path, *more: str) -> Any:
    return CliRunner().invoke(serve, ["--fleet", str(path), "--check", *more])


def test_a_fleet_file_is_checked(tmp_path: Path) -> None:
    result = checked(fleet_file(tmp_path, 2, [{}]))
    assert result.exit_code == 0, result.output
    assert "m, version v1: replicas 2, standbys 1: valid" in result.output


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"versions": {"v1": "/no/weights"}}, "models.m.versions.v1: /no/weights is not here"),
        ({"command": ["/no/vllm", "{port}"]}, "models.m.command: /no/vllm is no program"),
        ({"command": ["sleep", "1"]}, "models.m.command: {port} is missing"),
        ({"replicas": [{"gpus": ["0"]}]}, "models.m.replicas[0].gpus: '0' is no UUID"),
        ({"version": "v9"}, "version 'v9' is none of versions: v1"),
        ({"replicas": [{"port": 1}, {"port": 1}]}, "port 1 is given twice"),
        ({"replicas": []}, ".replicas: Expected `array` of length >= 1"),
        ({"replica": []}, "replica: unknown key"),
        ({"profile": "h100/none"}, "no such profile"),
        (
            {"replicas": [{"gpus": ["MIG-00000000-0000-0000-0000-000000000001"]}] * 2},
            "MIG-00000000-0000-0000-0000-000000000001",
        ),
    ],
)
def test_what_is_wrong_with_a_fleet_file_is_said(
    tmp_path: Path, model: dict[str, Any], said: str
) -> None:
    result = checked(fleet_file(tmp_path, 1, [], **model))
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_servers_come_from_one_place(tmp_path: Path) -> None:
    both = checked(fleet_file(tmp_path, 1, []), "--upstream", "http://127.0.0.1:1")
    assert both.exit_code == 2
    assert "give either --fleet or --upstream" in both.output
    none = CliRunner().invoke(serve, ["--check"])
    assert "or --fleet FILE" in none.output
