"""What a supervisor must bear: real processes that misbehave."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from operator import ge
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller import http
from controller.fleet import processes
from controller.fleet.local import LocalFleet
from controller.fleet.swapping import Swap
from controller.upstream.scrape import fetch
from policy.decisions import Rotated, Start, Stop
from policy.events import ReplicaDown, ReplicaUp, Standby, Warmed
from tests.fleet.conformance import Desk, until
from tests.fleet.ports import lasting_port
from tests.fleet.support import ENGINE_COMMAND, file_of, members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.fleet.config import FleetFile
    from controller.fleet.contract import SlotView
    from controller.upstream.replica import Replica

WITHIN_S = 30.0


class Site:
    """A fleet that has begun, and who is told."""

    def __init__(self, fleet: LocalFleet, desk: Desk, folder: Path) -> None:
        self.fleet = fleet
        self.desk = desk
        self.folder = folder

    def slot(self, replica: int = 0) -> SlotView:
        return self.fleet.view().slots[replica]

    async def until(self, state: str, replica: int = 0) -> SlotView:
        await until(f"{replica} is {state}", lambda: self.slot(replica).state == state, WITHIN_S)
        return self.slot(replica)

    async def up(self, replica: int = 0) -> None:
        await until(f"{replica} is up", lambda: self.desk.replicas[replica].up, WITHIN_S)


@asynccontextmanager
async def begun(file: FleetFile, folder: Path) -> AsyncIterator[Site]:
    fleet = LocalFleet(file, folder)
    async with http.session() as session:
        desk = Desk(fleet.upstreams, session)
        await fleet.begin(desk, desk)
        try:
            yield Site(fleet, desk, folder)
        finally:
            await fleet.close()
            assert not members(folder), "orphans"
            assert not records(folder), "of what does not run"


def records(folder: Path) -> list[Path]:
    return list(folder.glob("*-*.json"))


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def engine(*more: str) -> tuple[str, ...]:
    return (*ENGINE_COMMAND, *more)


@pytest.mark.parametrize("more", [(), ("--away",), ("--away", "--bare")], ids=len)
def test_what_an_engine_started_ends_with_it(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Its children are deaf to SIGTERM; some have left its session, or lost its environment."""

    async def run() -> None:
        command = engine("--children", "2", *more)
        async with begun(file_of(1, command=command), tmp_path / "f") as site:
            await site.up()
            before = members(site.folder)
            assert len(before) == 3
            os.kill(site.fleet.pid(0), signal.SIGKILL)
            await until("it is back", lambda: len(site.desk.of(ReplicaUp, 0)) == 2, WITHIN_S)
            assert not set(before) & set(members(site.folder)), "no engine core is left"
            assert len(members(site.folder)) == 3

    asyncio.run(run())


def test_one_that_does_not_hear_is_killed_in_time(tmp_path: Path) -> None:
    async def run() -> None:
        file = file_of(1, [{}], command=engine("--deaf"))
        async with begun(file, tmp_path / "f") as site:
            await site.up()
            first = site.fleet.pid(0)
            begun_s = time.monotonic()
            site.fleet.run(Stop(0))
            # its place is filled again at once: what can be waited for is that it is another's
            await until("it has stopped", lambda: site.fleet.pid(0) != first, WITHIN_S)
            assert 0.5 <= time.monotonic() - begun_s < 5.0, "after stop_s_most"
            await announced_again(site, 0)

    asyncio.run(run())


async def announced_again(site: Site, replica: int) -> None:
    await until("it is a standby", lambda: site.desk.of(Standby, replica), WITHIN_S)


def test_one_that_stands_still_is_killed_when_it_is_told_to_be_hung(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(file_of(1), tmp_path / "f") as site:
            await site.up()
            stopped = site.fleet.pid(0)
            os.kill(stopped, signal.SIGSTOP)
            site.fleet.run(Rotated(0, "isolated", "hung"))
            assert site.desk.reasons[0][-1] == "hung"
            await until("it is back", lambda: len(site.desk.of(ReplicaUp, 0)) == 2, WITHIN_S)
            assert site.fleet.pid(0) not in (0, stopped)
            assert site.slot().starts == 2

    asyncio.run(run())


def test_one_that_stands_still_still_hears_sigterm(tmp_path: Path) -> None:
    """A stopped process takes no SIGTERM until it goes on."""

    async def run() -> None:
        file = file_of(1, stop_s_most=20.0)
        async with begun(file, tmp_path / "f") as site:
            await site.up()
            os.kill(site.fleet.pid(0), signal.SIGSTOP)
            begun_s = time.monotonic()
            await site.fleet.close()
            assert time.monotonic() - begun_s < 20.0, "it was not waited for to be killed"

    asyncio.run(run())


def test_a_crash_is_known_within_milliseconds_and_says_how(tmp_path: Path) -> None:
    """One of a few is: at any of them this process may have had no turn."""
    file = file_of(1, backoff={"first_s": 60.0, "most_s": 60.0})  # so long it says why

    async def known_after_s(folder: Path) -> float:
        async with begun(file, folder) as site:
            await site.up()
            begun_s = time.monotonic()
            os.kill(site.fleet.pid(0), signal.SIGKILL)
            down = await until("down", lambda: site.desk.of(ReplicaDown, 0), WITHIN_S)
            took_s = time.monotonic() - begun_s
            assert down[0].reason == "killed by signal 9"
            assert site.slot().why == "killed by signal 9"
        return took_s

    took_s = (asyncio.run(known_after_s(tmp_path / f"f{turn}")) for turn in range(5))
    assert any(each < 0.2 for each in took_s)


def test_one_that_cannot_start_says_why_and_is_tried_more_and_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, spawned_s = processes.spawn, list[float]()

    def spawning(*given: Any) -> processes.Child:
        spawned_s.append(time.monotonic())
        return spawn(*given)

    async def run() -> None:
        monkeypatch.setattr(processes, "spawn", spawning)
        file = file_of(1, command=engine("--die", "1"), backoff={"first_s": 0.1, "most_s": 1.0})
        async with begun(file, tmp_path / "f") as site:
            slot = await site.until("waiting")
            assert slot.why == "exited with code 1: cannot go on: /weights/v1"
            await until("it was tried again", lambda: len(spawned_s) >= 4, WITHIN_S)
            waits_s = [after - before for before, after in pairwise(spawned_s)]
            assert all(map(ge, waits_s, (0.1, 0.2, 0.4))), waits_s
            assert not site.desk.events, "the policy never heard of it"

    asyncio.run(run())


def test_it_gives_up_and_somebody_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        file = file_of(1, command=engine("--die", "3"), backoff={"give_up_after": 2})
        async with begun(file, tmp_path / "f") as site:
            slot = await site.until("broken")
            assert "failed 2 times in a row" in slot.why
            assert "exited with code 3" in slot.why
            assert [key for key, _ in site.desk.troubles] == ["slot m-0"]
            assert site.fleet.slot_well(0)
            await until("it is tried again", lambda: site.slot().starts == 3, WITHIN_S)

    asyncio.run(run())


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    async def run() -> None:
        file = file_of(1, command=("/no/such/vllm", "--port", "{port}"))
        async with begun(file, tmp_path / "f") as site:
            slot = await site.until("waiting")
            assert slot.why == "cannot be started: /no/such/vllm: No such file or directory"

    asyncio.run(run())


def test_a_port_that_somebody_has_is_said_and_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        with socket.socket() as other:
            port = lasting_port("127.0.0.1")
            other.bind(("127.0.0.1", port))
            other.listen()
            async with begun(file_of([{"port": port}]), tmp_path / "f") as site:
                slot = await site.until("waiting")
                assert slot.why.startswith(f"cannot be started: port {port} of 127.0.0.1: Address")
                other.close()
                await site.up()
                assert site.slot().url.endswith(f":{port}")

    asyncio.run(run())


def test_one_whose_first_prompts_fail_takes_no_request(tmp_path: Path) -> None:
    async def run() -> None:
        file = file_of(1, command=engine("--dumb"))
        async with begun(file, tmp_path / "f") as site:
            slot = await site.until("waiting")
            assert slot.why == "it did not answer its first prompts"
            assert not site.desk.of(ReplicaUp, 0)

    asyncio.run(run())


def test_one_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def run() -> None:
        file = file_of(1, command=engine("--slow-s", "60"), start_s_most=0.4)
        async with begun(file, tmp_path / "f") as site:
            slot = await site.until("waiting")
            assert slot.why == "it did not answer within 0.4 s"

    asyncio.run(run())


def test_another_version_that_was_loaded_takes_no_request(tmp_path: Path) -> None:
    """Whatever it was told, it says that it has loaded something else."""
    liar = tuple(part.replace("{weights}", "/weights/v1") for part in ENGINE_COMMAND)

    async def run() -> None:
        async with begun(file_of(1, [{}], command=liar), tmp_path / "f") as site:
            await site.up()
            await until("announced", lambda: site.desk.of(Standby, 1), WITHIN_S)
            site.fleet.run(Start(1, "v2"))
            told = await until("it is said", lambda: site.desk.of(Warmed, 1), WITHIN_S)
            assert told == [Warmed(1, "/weights/v1", ok=False)]
            why = "another version was loaded: /weights/v1, not /weights/v2"
            assert site.fleet.failure(1) == why
            standby = await announced_twice(site, 1)
            assert standby.version == "v1"
            assert not site.desk.of(ReplicaUp, 1)

    asyncio.run(run())


async def announced_twice(site: Site, replica: int) -> Standby:
    found = await until(
        "it is a standby again", lambda: site.desk.of(Standby, replica)[1:], WITHIN_S
    )
    return found[-1]


def test_a_model_of_another_name_is_said(tmp_path: Path) -> None:
    command = tuple(part.replace("{model}", "other") for part in ENGINE_COMMAND)

    async def run() -> None:
        async with begun(file_of(1, command=command), tmp_path / "f") as site:
            slot = await site.until("waiting")
            assert slot.why.startswith("it serves other, not m")

    asyncio.run(run())


def test_a_new_version_takes_over_and_what_waits_is_renewed(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(file_of(1, [{}, {}]), tmp_path / "f") as site:
            await site.up()
            for spare in (1, 2):
                await until("announced", lambda spare=spare: site.desk.of(Standby, spare), WITHIN_S)
            site.fleet.add_version("m", "v3", "/weights/v3")
            site.fleet.run(Start(1, "v3"))
            await site.up(1)
            assert site.desk.of(ReplicaUp, 1)[0].version == "v3"
            site.fleet.run(Rotated(1, "in", "rollout of v3"))
            site.fleet.run(Rotated(0, "draining", "rollout of v3"))
            assert site.fleet.model("m").version == "v3"
            standby = await announced_twice(site, 2)
            assert standby.version == "v3"
            site.fleet.run(Stop(0))
            await announced_again(site, 0)
            assert site.desk.of(Standby, 0)[0].version == "v3"
        again = LocalFleet(file_of(1, [{}, {}]), tmp_path / "f")
        assert again.model("m").version == "v3"
        assert again.model("m").versions["v3"] == "/weights/v3"
        changed = LocalFleet(file_of(1, [{}, {}], version="v2"), tmp_path / "f")
        assert changed.model("m").version == "v2", "whoever changed the file has the last word"

    asyncio.run(run())


def test_a_model_s_version_is_what_most_of_it_serves(tmp_path: Path) -> None:
    """A rollout that stops halfway leaves two: what crashes comes back in the one of most, and a
    controller that follows begins with it."""
    file, folder = file_of(3, [{"warm": False}]), tmp_path / "f"

    async def wave(site: Site, comes: int, goes: int) -> None:
        ups = len(site.desk.of(ReplicaUp, comes))
        site.fleet.run(Start(comes, "v2"))
        await until("up", lambda: len(site.desk.of(ReplicaUp, comes)) > ups, WITHIN_S)
        before = site.fleet.model("m").version
        site.fleet.run(Rotated(comes, "in", "rollout of v2"))
        assert site.fleet.model("m").version == before, "there is no moment with one too many"
        site.fleet.run(Rotated(goes, "draining", "rollout of v2"))

    async def run() -> None:
        async with begun(file, folder) as site:
            for replica in range(3):
                await site.up(replica)
            await wave(site, 3, 0)
            assert site.fleet.model("m").version == "v1"
            assert LocalFleet(file, folder).model("m").version == "v1"
            site.fleet.run(Stop(0))
            await announced_again(site, 0)
            os.kill(site.fleet.pid(1), signal.SIGKILL)
            await until("it is back", lambda: len(site.desk.of(ReplicaUp, 1)) == 2, WITHIN_S)
            assert site.desk.of(ReplicaUp, 1)[-1].version == "v1"
            await wave(site, 0, 1)
            assert site.fleet.model("m").version == "v2"
            assert LocalFleet(file, folder).model("m").version == "v2"
            site.fleet.run(Rotated(1, "in", "rollback of v2"))
            assert site.fleet.model("m").version == "v2", "two of each"
            site.fleet.run(Rotated(0, "draining", "rollback of v2"))
            assert site.fleet.model("m").version == "v1", "it went back"

    asyncio.run(run())


def test_a_version_that_came_to_nothing_is_forgotten_when_nothing_has_it(tmp_path: Path) -> None:
    """Then its name is free for other weights; what the file has, or serves, stays."""

    async def run() -> None:
        async with begun(file_of(1, 1), tmp_path / "f") as site:
            await site.up()
            await site.until("warm", 1)
            site.fleet.add_version("m", "v3", "/weights/v3")
            site.fleet.run(Start(1, "v3"))
            assert not site.fleet.drop_version("m", "v3"), "it is being started"
            await site.up(1)
            site.fleet.run(Stop(1))
            assert not site.fleet.drop_version("m", "v3"), "its process has not ended"
            await until("dropped", lambda: site.fleet.drop_version("m", "v3"), WITHIN_S)
            site.fleet.add_version("m", "v3", "/other")
            assert site.fleet.drop_version("m", "v1")
            assert site.fleet.drop_version("m", "v2")
            assert site.fleet.drop_version("m", "v3")
            await site.until("warm", 1)
        again = LocalFleet(file_of(1, 1), tmp_path / "f").model("m")
        assert again.versions == {"v1": "/weights/v1", "v2": "/weights/v2"}

    asyncio.run(run())


@asynccontextmanager
async def draining(site: Site, s_most: float) -> AsyncIterator[tuple[Swap, asyncio.Task[str]]]:
    """Room is being made for another version, while a request is open on the first replica."""
    first = site.desk.replicas[0]
    request = asyncio.ensure_future(asyncio.sleep(60.0))
    first.attempts.add(request)
    swap = Swap(site.fleet, site.desk, site.desk, first, frozenset({0, 1}))
    drain = asyncio.ensure_future(swap.drain(s_most))
    await until("it is shut", lambda: first.held, WITHIN_S)
    try:
        yield swap, drain
    finally:
        request.cancel()
        first.attempts.clear()
        await drain


def test_what_dies_while_it_is_drained_and_comes_back_is_drained_on(tmp_path: Path) -> None:
    """What it has taken meanwhile is not cut off."""

    async def run() -> None:
        async with begun(file_of(2), tmp_path / "f") as site:
            await site.up(0)
            await site.up(1)
            first = site.desk.replicas[0]
            async with draining(site, 120.0) as (_, drain):
                killed = site.fleet.pid(0)
                os.kill(killed, signal.SIGKILL)

                def back() -> bool:  # whether it is let in or shut again already
                    runs = site.fleet.pid(0) not in (0, killed)
                    return runs and site.slot().state == "serving"

                await until("it is back", back, WITHIN_S)
                await until("it is shut again", lambda: first.held, WITHIN_S)
                assert not drain.done()
                assert site.slot().state == "serving", "what it took goes on"
                first.attempts.clear()
                assert await drain == ""
            await announced_again(site, 0)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["called back", "too late"])
def test_what_is_not_drained_serves_again(tmp_path: Path, how: str) -> None:
    async def run() -> None:
        async with begun(file_of(2), tmp_path / "f") as site:
            await site.up(0)
            pid = site.fleet.pid(0)
            async with draining(site, 30.0 if how == "called back" else 0.2) as (swap, drain):
                if how == "called back":
                    swap.call_back()
                why = await drain
                assert why in ("it was called back", "m-0 still had 1 open requests after 0.2 s")
            await site.up(0)
            swap.heal(frozenset())
            assert swap.healed
            assert site.fleet.pid(0) == pid

    asyncio.run(run())


def test_a_version_has_one_folder(tmp_path: Path) -> None:
    fleet = LocalFleet(file_of(1), tmp_path / "f")
    fleet.add_version("m", "v2", "/weights/v2")
    with pytest.raises(ValueError, match=r"v2 of m is /weights/v2 already, not /other"):
        fleet.add_version("m", "v2", "/other")
    with pytest.raises(KeyError):
        fleet.add_version("other", "v2", "/other")


def test_a_broken_card_stops_what_is_on_it_until_it_is_well(tmp_path: Path) -> None:
    first, second = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))

    async def run() -> None:
        file = file_of([{"gpus": [first]}, {"gpus": [second]}])
        async with begun(file, tmp_path / "f") as site:
            await site.up(0)
            await site.up(1)
            variable = f"CUDA_VISIBLE_DEVICES={first}".encode()
            assert variable in environment_of(site.fleet.pid(0))
            assert site.fleet.slots_on(first) == (0,)
            site.fleet.run(Rotated(0, "isolated", "xid_fatal"))
            site.fleet.card_broken(first, "Xid 79")
            assert site.desk.reasons[0][-1] == "gpu: xid_fatal"
            slot = await site.until("broken")
            assert (slot.why, slot.pid) == ("gpu: Xid 79", 0), "as exactly as it is known"
            await asyncio.sleep(0.6)  # longer than any wait before a restart
            assert site.slot().state == "broken"
            assert site.slot(1).state == "serving"
            assert site.fleet.restore(first)
            await until("it is back", lambda: len(site.desk.of(ReplicaUp, 0)) == 2, WITHIN_S)
            assert not site.fleet.restore(first)

    asyncio.run(run())


def test_a_card_that_is_broken_from_the_beginning_is_not_used(tmp_path: Path) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000001"

    async def run() -> None:
        fleet = LocalFleet(file_of([{"gpus": [uuid]}, {}]), tmp_path / "f")
        fleet.card_broken(uuid, "ecc_uncorrectable")
        async with http.session() as session:
            desk = Desk(fleet.upstreams, session)
            await fleet.begin(desk, desk)
            try:
                await until("the other is up", lambda: desk.replicas[1].up, WITHIN_S)
                assert fleet.view().slots[0].state == "broken"
                assert not fleet.pid(0)
                fleet.card_well(uuid)
                await until("it is up", lambda: desk.replicas[0].up, WITHIN_S)
            finally:
                await fleet.close()

    asyncio.run(run())


def test_two_crashes_at_once_and_one_standby(tmp_path: Path) -> None:
    """One place is taken, the other slot serves again."""

    async def run() -> None:
        async with begun(file_of(2, 1), tmp_path / "f") as site:
            await site.up(0)
            await site.up(1)
            await announced_again(site, 2)
            for replica in (0, 1):
                os.kill(site.fleet.pid(replica), signal.SIGKILL)
            for replica in (0, 1):
                await until("down", lambda r=replica: site.desk.of(ReplicaDown, r), WITHIN_S)
            site.fleet.run(Start(2))
            await site.up(2)
            await until("whole again", lambda: len(site.desk.up()) == 2, WITHIN_S)
            await until(
                "one waits",
                lambda: (
                    sorted(each.state for each in site.fleet.view().slots)
                    == ["serving", "serving", "warm"]
                ),
                WITHIN_S,
            )
            await asyncio.sleep(0.3)
            assert len(site.desk.up()) == 2

    asyncio.run(run())


def test_a_standby_that_crashes_while_it_waits_is_taken_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(file_of(1, 1), tmp_path / "f") as site:
            await site.up(0)
            await announced_again(site, 1)
            os.kill(site.fleet.pid(1), signal.SIGKILL)
            await until("it is taken back", lambda: site.desk.of(ReplicaDown, 1), WITHIN_S)
            site.fleet.run(Start(1))  # decided before that was known
            await site.up(1)

    asyncio.run(run())


def test_one_that_stops_listening_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process runs, and nobody is answered: it counts for nothing."""
    monkeypatch.setattr("controller.fleet.local.DUMB_S_MOST", 0.3)
    monkeypatch.setattr("controller.fleet.local.HEALTH_S_MOST", 5.0)
    monkeypatch.setattr("controller.fleet.local.TEND_S", 0.1)
    answered: list[str] = []

    async def asking(replica: Replica, path: str) -> Any:
        answer = await fetch(replica, path)
        answered.append(path)
        return answer

    async def run() -> None:
        async with begun(file_of(1), tmp_path / "f") as site:
            await site.up()
            replica, first = site.desk.replicas[0], site.fleet.pid(0)
            monkeypatch.setattr("controller.fleet.local.fetch", asking)
            replica.up = False  # as the watcher finds
            site.desk.feed(ReplicaDown(0, "connection refused"))
            await until("it answers, again and again", lambda: len(answered) > 2, WITHIN_S)
            assert site.fleet.pid(0) == first, "it answers: it is left alone"
            os.kill(first, signal.SIGSTOP)
            await until("another runs", lambda: site.fleet.pid(0) not in (0, first), WITHIN_S)
            await site.up()

    asyncio.run(run())


def test_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.fleet.processes.LOG_BYTES_MOST", 200_000)
    monkeypatch.setattr("controller.fleet.local.TEND_S", 0.1)

    async def run() -> None:
        file = file_of(1, command=engine("--shout", "300000"))
        async with begun(file, tmp_path / "f") as site:
            await site.up()
            log = Path(site.slot().log)
            await until("it was cut", lambda: log.stat().st_size < 200_000, WITHIN_S)
            assert log.with_name("m-0.log.1").stat().st_size >= 200_000
            os.kill(site.fleet.pid(0), signal.SIGKILL)
            await until("it is back", lambda: len(site.desk.of(ReplicaUp, 0)) == 2, WITHIN_S)
            assert {path.name for path in log.parent.glob("m-0.log*")} == {
                "m-0.log", "m-0.log.1",
            }  # fmt: skip

    asyncio.run(run())


def test_a_log_that_cannot_be_copied_is_cut_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOG_BYTES_MOST", 10)
    log = tmp_path / "m-0.log"
    log.write_bytes(b"x" * 20)
    monkeypatch.setattr("shutil.copyfile", no_room)
    processes.bound_log(log)
    assert log.stat().st_size == 0


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_on_a_full_disk_servers_are_started_and_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash is followed by a start, a warm standby serves when it is asked for, and a version
    takes over; what cannot be written is said."""

    async def run() -> None:
        async with begun(file_of(1, 1), tmp_path / "f") as site:
            await site.up()
            await site.until("warm", 1)
            monkeypatch.setattr(processes, "write_file", no_room)
            site.fleet.run(Start(1))
            await site.up(1)
            os.kill(site.fleet.pid(0), signal.SIGKILL)
            await site.until("warm", 0)
            site.fleet.add_version("m", "v3", "/weights/v3")
            assert "versions.json cannot be written: No space left" in str(site.desk.troubles)
        assert "the next one starts m-standby-0 anew" in caplog.text

    asyncio.run(run())


def test_what_cannot_be_watched_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left: it is ended, and started again later."""
    made = processes.Child
    none_left = True

    def child(*given: object) -> processes.Child:
        if none_left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return made(*given)  # type: ignore[arg-type]

    async def run() -> None:
        nonlocal none_left
        monkeypatch.setattr(processes, "Child", child)
        async with begun(file_of(1), tmp_path / "f") as site:
            slot = await site.until("waiting")
            assert slot.why == "cannot be started: Too many open files"
            assert not members(site.folder)
            none_left = False
            await site.up()

    asyncio.run(run())


def test_what_is_ended_twice_before_it_ran_is_started_once(tmp_path: Path) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000001"

    async def run() -> None:
        async with begun(file_of([{"gpus": [uuid]}]), tmp_path / "f") as site:
            site.fleet.run(Rotated(0, "isolated", "hung"))
            site.fleet.card_broken(uuid, "a drill")
            assert site.fleet.slot_well(0)
            await site.up()
            assert site.slot().starts == 2
            assert len(members(site.folder)) == 1

    asyncio.run(run())


# ---- a controller is killed, and another one begins ----


async def left_behind(file: FleetFile, folder: Path, started: int) -> list[int]:
    """What runs after a controller was killed: nothing looks after it."""
    script = (
        "import asyncio, msgspec, sys\n"
        "from pathlib import Path\n"
        "from controller import http\n"
        "from controller.fleet.config import FleetFile\n"
        "from controller.fleet.local import LocalFleet\n"
        "from tests.fleet.conformance import Desk\n"
        "async def run():\n"
        "    file = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=FleetFile)\n"
        "    fleet = LocalFleet(file, Path(sys.argv[2]))\n"
        "    async with http.session() as session:\n"
        "        desk = Desk(fleet.upstreams, session)\n"
        "        await fleet.begin(desk, desk)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(run())\n"
    )
    given = folder.with_suffix(".json")
    given.write_bytes(msgspec.json.encode(file))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(given), str(folder), cwd=Path(__file__).parents[2]
    )
    slots = sum(len(model.replicas) + len(model.standbys) for model in file.models.values())

    def warmed() -> bool:
        kept = [processes.read_record(path) for path in records(folder)]
        return sum(record is not None and record.warmed for record in kept) == slots

    try:
        await until("all are warmed, and on record", warmed, WITHIN_S)
        assert len(members(folder)) == started
    finally:
        process.kill()
        await process.wait()
    return members(folder)


def test_what_a_killed_controller_left_is_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    file = file_of(1, [{}])

    async def run() -> None:
        before = await left_behind(file, folder, 2)
        async with begun(file, folder) as site:
            assert site.slot().state == "serving", "nothing was waited for"
            await site.up()
            await announced_again(site, 1)
            assert sorted([site.fleet.pid(0), site.fleet.pid(1)]) == before, "the same processes"
            assert [each.starts for each in site.fleet.view().slots] == [0, 0]
            os.kill(site.fleet.pid(0), signal.SIGKILL)  # none of its children, and still seen
            down = await until("down", lambda: site.desk.of(ReplicaDown, 0), WITHIN_S)
            assert down[0].reason == "ended"
            await until("it is back", lambda: len(site.desk.of(ReplicaUp, 0)) == 2, WITHIN_S)

    asyncio.run(run())


def test_what_the_file_does_not_want_any_more_is_ended(tmp_path: Path) -> None:
    """Another argument, a slot less: the old ones end, children and all."""
    folder = tmp_path / "f"
    command = engine("--children", "1", "--away", "--bare")

    async def run() -> None:
        before = await left_behind(file_of(2, command=command), folder, 4)
        assert len(before) == 4
        record = processes.read_record(folder / "m-1.json")
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)  # what it had started outlives it
        async with begun(file_of(1, command=engine("--deaf")), folder) as site:
            assert not set(before) & set(members(folder)), "before anything else is started"
            await site.up()
            assert len(members(folder)) == 1

    asyncio.run(run())


def test_one_that_was_started_and_never_recorded_is_ended(tmp_path: Path) -> None:
    """The controller was killed between the two."""
    folder = tmp_path / "f"

    async def run() -> None:
        before = await left_behind(file_of(1), folder, 1)
        (folder / "m-0.json").unlink()
        async with begun(file_of(1), folder) as site:
            await site.up()
            assert members(folder) == [site.fleet.pid(0)]
            assert members(folder) != before

    asyncio.run(run())


def test_a_number_that_another_process_has_now_is_never_signalled(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()

    async def run() -> None:
        other = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
        try:
            record = processes.Record(
                other.pid, processes.started_of(other.pid) - 1, processes.boot_id(),
                ("sleep",), (), "m", "v1", "/weights/v1", "http://127.0.0.1:1", True, True,
            )  # fmt: skip
            assert not processes.alive(record)
            processes.write_file(folder / "m-0.json", record)
            async with begun(file_of(1), folder) as site:
                await site.up()
                assert site.fleet.pid(0) != other.pid
            assert other.returncode is None
            assert processes.started_of(other.pid)
        finally:
            other.kill()
            await other.wait()

    asyncio.run(run())


def test_a_version_is_where_its_link_led_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "first")
    file = file_of(1, versions={"v1": str(link)}, version="v1")

    async def run() -> None:
        async with begun(file, tmp_path / "f") as site:
            await site.up()
            link.unlink()
            link.symlink_to(tmp_path / "second")
            os.kill(site.fleet.pid(0), signal.SIGKILL)
            await until("it is back", lambda: len(site.desk.of(ReplicaUp, 0)) == 2, WITHIN_S)
            assert site.fleet.model("m").versions == {"v1": str(tmp_path / "first")}

    asyncio.run(run())
    assert LocalFleet(file, tmp_path / "f").model("m").versions["v1"] == str(tmp_path / "second")
    assert "give what has changed a name of its own" in caplog.text


def test_roles_outlive_the_controller(tmp_path: Path) -> None:
    """A standby that had taken a place goes on serving; what it replaced waits."""
    folder = tmp_path / "f"
    file = file_of(1, 1)

    async def run() -> None:
        await left_behind(file, folder, 2)
        for name, serves in (("m-0", False), ("m-standby-0", True)):
            record = processes.read_record(folder / f"{name}.json")
            assert record is not None
            processes.write_file(
                folder / f"{name}.json",
                msgspec.structs.replace(record, serves=serves),
            )  # fmt: skip
        async with begun(file, folder) as site:
            await site.up(1)
            await announced_again(site, 0)
            assert site.desk.up() == [1]

    asyncio.run(run())


def test_a_version_that_had_not_taken_over_is_a_standby_again(tmp_path: Path) -> None:
    """The controller was killed in the midst of a reload: no more serve than before."""
    folder = tmp_path / "f"
    file = file_of(1, 1)

    async def run() -> None:
        await left_behind(file, folder, 2)
        path = folder / "m-standby-0.json"
        record = processes.read_record(path)
        assert record is not None
        changed = msgspec.structs.replace(record, serves=True, version="v2", weights="/weights/v2")
        processes.write_file(path, changed)
        async with begun(file, folder) as site:
            await site.up(0)
            await announced_again(site, 1)
            assert site.desk.up() == [0]

    asyncio.run(run())
