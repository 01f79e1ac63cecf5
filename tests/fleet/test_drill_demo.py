"""Drills on a real demo fleet: a controller, served twins, real signals, and the twin beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from controller.drills.asking import Admin, DrillError, Log, serving, slot_named
from controller.drills.cli import LiveFleet, _link, ended_in_order, run_live
from controller.drills.demo import MODEL, DemoFleet
from controller.drills.inject import INJECTIONS, _call
from controller.drills.measure import _read_until_settled
from controller.drills.proxy import Link
from controller.fleet.contract import SlotView
from controller.fleet.drill import DrilledFault, DrillRefused, pretend
from policy.decisions import Settled
from policy.drills import DRILL_KINDS
from policy.events import Arrived, Ticked
from policy.log import Record
from tests.bench import drills as bench
from tests.controller.processes import twin_process
from twinkeel import main, play_drill

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from policy.drills import DrillKind


def slot(**given: object) -> SlotView:
    known = {
        "replica": 0, "name": "m-0", "model": "m", "version": "v1", "state": "serving", "why": "",
        "since_s": 1.0, "standby": False, "url": "http://127.0.0.1:1", "domain": "host0/card0",
    }  # fmt: skip
    return SlotView(**{**known, **given})  # type: ignore[arg-type]


class Answers(Admin):
    """An admin API that answers so, with these segments of a log."""

    def __init__(self, status: int = 200, log: dict[str, bytes] | None = None) -> None:
        super().__init__("http://127.0.0.1:1", "t")
        self._status = status
        self.held = {} if log is None else log
        self.asked: list[str] = []

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        self.asked.append(f"{method} {path}")
        if self._status != 200:
            raise DrillError("it says no", self._status)
        if path == "/log":
            listed = [{"name": name, "bytes": len(data)} for name, data in self.held.items()]
            return json.dumps({"segments": listed}).encode()
        return self.held.get(path.removeprefix("/log/"), b"")


class Told(Log):
    """A log that is another one at each reading; its clock is the time of day."""

    def __init__(self, *logs: tuple[Record, ...]) -> None:
        self._logs = list(logs)
        self._now: tuple[Record, ...] = ()

    def read(self) -> None:
        self._now = self._logs.pop(0)

    def records(self) -> Iterator[Record]:
        return iter(self._now)

    def clock_ns(self, wall_ns: int) -> int:
        return wall_ns


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    done: list[str] = []

    @ended_in_order()
    def drilled() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), number)  # a second one does not disturb it
            done.append("taken back")

    with pytest.raises(SystemExit) as ended:
        drilled()
    assert (ended.value.code, done) == (128 + number, ["taken back"])
    assert signal.getsignal(number) is before


def test_under_nohup_the_end_of_the_terminal_is_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_well_already_is_mended_and_another_no_is_told() -> None:
    Answers(404).mend(0)
    with pytest.raises(DrillError, match="it says no"):
        Answers(500).mend(0)


def test_what_other_callers_have_open_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.drills.measure.time.sleep", lambda s: None)
    came = Record(10, Arrived(0, "m", "chat", 100), ())
    later = Record(30, Arrived(1, "m", "chat", 100), ())
    over = Record(40, Ticked(), (Settled(0, "answered"),))
    log = Told((came,), (came, later), (came, later, over), ())
    _read_until_settled(log, 20)
    assert list(log.records()) == [came, later, over]


# The real thing


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoFleet]:
    with DemoFleet(tmp_path_factory.mktemp("demo"), "engine-kill") as running:
        yield running


def test_a_fleet_with_callers_is_left_alone_without_a_yes(fleet: DemoFleet, tmp_path: Path) -> None:
    before = fleet.admin.fleet()
    asked = [
        "drill", "engine-kill", "--target", fleet.admin.url, "--data", str(fleet.data),
        "--for", "10s", "--on", f"{MODEL}-1",
    ]  # fmt: skip
    told = CliRunner().invoke(main, asked)
    assert told.exit_code == 2
    pid = slot_named(before, f"{MODEL}-1").pid
    assert f"SIGKILL to {MODEL}-1 (process group {pid})" in told.output
    assert "Give --yes" in told.output
    after = fleet.admin.fleet()
    assert [each.pid for each in after.slots] == [each.pid for each in before.slots]
    assert serving(after) == serving(before)


COLD_S = 4.0
"""Longer than an answer takes of a server that has no turn for a while."""
UNWARMED = """
from controller.fleet import local
from policy.events import Warmed

async def opened(replica, pooling=None):
    return Warmed(replica.id, "", True)

local.warm = opened
from twinkeel import main
main()
"""
"""A controller that opens gates without a warm-up."""


@pytest.mark.parametrize("warmed", [True, False])
def test_without_a_warm_up_the_first_requests_of_a_start_wait_for_it(
    warmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios are for ``make drills``: of one start, on a machine with other work, they are chance.
    That none of them waited for what is compiled, or one did, is not."""
    running = DemoFleet(tmp_path, "engine-kill", fault=bench.cold(COLD_S))
    if not warmed:
        running.program = (sys.executable, "-c", UNWARMED)
    ask, times_s = bench.asked_s, dict[str, list[float]]()

    def asked_s(url: str, number: int) -> float:
        took_s = ask(url, number)
        times_s.setdefault(url, []).append(took_s)
        return took_s

    monkeypatch.setattr(bench, "asked_s", asked_s)
    with running as fleet:
        bench.first_ratio(fleet.admin.fleet().slots, fleet)
    (fresh_s,) = [each for each in times_s.values() if len(each) == bench.FIRST]
    if warmed:
        assert max(fresh_s) < COLD_S
    else:
        assert max(fresh_s) >= COLD_S


def test_what_a_slot_cannot_be_hit_by_is_said(fleet: DemoFleet) -> None:
    hit = slot_named(fleet.admin.fleet(), "")
    why = INJECTIONS["network"](hit, fleet.admin).refusal()
    assert "nothing stands between the controller and" in why
    assert "-m controller.drills.proxy --port {port}" in why
    assert "to the demo fleet only" in INJECTIONS["oom"](hit, fleet.admin).refusal()
    with pytest.raises(DrillError, match="there is no slot 'q'"):
        slot_named(fleet.admin.fleet(), "q")


def test_with_a_yes_it_is_done_and_without_callers_it_does_not_pass(fleet: DemoFleet) -> None:
    hit = slot_named(fleet.admin.fleet(), f"{MODEL}-1")
    live = LiveFleet(fleet.admin.url, fleet.admin, fleet.data, "")
    said: list[str] = []
    result = run_live("ecc", live, 10.0, hit.name, True, play_drill, said.append)
    failed = [each for each in result.criteria if not each.passed]
    assert [each.name for each in failed] == ["degraded by policy"]
    assert "no request came" in failed[0].why
    assert "over its admin API; no card says so" in result.simulated
    assert any(alert.key == f"controller drill {MODEL}-1" for alert in result.alerts)
    assert any("DRILL" in alert.cause for alert in result.alerts)
    assert any("isolated: ecc_uncorrectable" in alert.cause for alert in result.alerts)
    assert result.predicted is None
    assert "not on this machine" in result.not_predicted
    assert "taken back" not in said
    back = {each.name: each.state for each in fleet.admin.fleet().slots}
    assert set(back.values()) <= {"serving", "warm"}


def drilled() -> dict[str, Any]:
    told = CliRunner().invoke(main, ["drill", "engine-kill", "--for", "10s", "--json"])
    assert told.exit_code in (0, 1), told.output
    result: dict[str, Any] = json.loads(told.stdout)
    return result


def disturbed(result: dict[str, Any]) -> bool:
    """Another server, or the controller, had no turn for so long that the drill shows it."""
    isolated_s = result["measured"]["isolated_s"]
    alone = next(each for each in result["criteria"] if each["name"] == "isolated alone")
    return not alone["passed"] or isolated_s is None or isolated_s >= 1.0


def test_the_whole_command_on_a_demo_fleet_of_its_own() -> None:
    tries = (drilled() for _ in range(3))
    result = next(tries)
    while disturbed(result) and (another := next(tries, None)) is not None:
        result = another
    assert [each["name"] for each in result["criteria"]] == [
        "isolated alone", "degraded by policy", "alert names the cause", "recovered",
    ]  # fmt: skip
    assert all(each["passed"] for each in result["criteria"]), result["criteria"]
    measured = result["measured"]
    assert (measured["serving_before"], measured["serving_least"]) == (2, 1)
    assert measured["isolated_s"] < 1.0
    assert sum(result["callers"].values()) == 240
    assert any("killed by signal 9" in alert["cause"] for alert in result["alerts"])
    assert result["not_predicted"] == ""
    assert result["predicted"]["offered"] == pytest.approx(result["measured"]["offered"], abs=5)
    assert result["predicted"]["serving_least"] == 1
    assert {each["figure"] for each in result["differences"]} == {
        "isolated_s", "recovered_s", "failed", "degraded",
    }  # fmt: skip


# Without a fleet


@pytest.fixture
def follower() -> Iterator[int]:
    """A process that leads no group."""
    child = subprocess.Popen(["sleep", "60"])
    yield child.pid
    child.kill()
    child.wait()


@pytest.mark.parametrize("kind", ["engine-kill", "engine-hang", "network"])
def test_signals_go_to_a_process_of_this_machine_only(kind: DrillKind, follower: int) -> None:
    near, far = Admin("http://127.0.0.1:1", "t"), Admin("http://10.0.0.9:8081", "t")
    for admin, pid in ((near, 0), (far, follower)):
        assert "no process of this machine" in INJECTIONS[kind](slot(pid=pid), admin).refusal()
    assert "leads no process group" in INJECTIONS[kind](slot(pid=follower), near).refusal()


def test_a_real_engine_s_answers_cannot_be_spoiled() -> None:
    why = INJECTIONS["bad-answers"](slot(), Admin("http://127.0.0.1:1", "t")).refusal()
    assert "is no served twin: a real engine's answers cannot be spoiled from outside" in why


def test_every_drill_says_what_it_would_do() -> None:
    for kind in DRILL_KINDS:
        assert "m-0" in INJECTIONS[kind](slot(pid=7), Admin("http://127.0.0.1:1", "t")).what


@pytest.mark.parametrize("given", ["ten", "10", "5s", "2h", "-3s"])
def test_durations_are_checked(given: str) -> None:
    told = CliRunner().invoke(main, ["drill", "ecc", "--for", given, "--target", "x"])
    assert told.exit_code == 2
    if given == "10":  # seconds
        assert "no URL" in told.output
    else:
        assert repr(given) in told.output


@pytest.mark.parametrize(
    ("given", "link"),
    [
        ("blackhole", Link("blackhole")), ("reset", Link("reset")),
        ("delay=200", Link("delay", delay_ms=200.0)), ("loss=50", Link("loss", loss_permille=50)),
        ("clear", None), ("delay", None), ("loss=x", None), ("loss=2000", None), ("reset=1", None),
        ("worse", None),
    ],
)  # fmt: skip
def test_a_link_is_one_of_four(given: str, link: Link | None) -> None:
    seen: list[Link] = []

    @click.command()
    @click.option("--link", callback=_link)
    def command(link: Link) -> None:
        seen.append(link)

    told = CliRunner().invoke(command, ["--link", given])
    if link is None:
        assert told.exit_code == 2
        assert f"{given!r} is no state of a link" in told.output
    else:
        assert seen == [link]


def test_a_controller_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "admin.token").write_text("0123456789abcdef0123")
    told = CliRunner().invoke(
        main, ["drill", "ecc", "--target", "http://127.0.0.1:1", "--data", str(tmp_path), "--yes"]
    )
    assert told.exit_code == 2
    assert "no controller answers there" in told.output


# What tells the policy of a card that is well


class Feeder:
    def __init__(self, up: bool) -> None:
        self.fed: list[object] = []
        self.troubles: list[str] = []
        self.replicas = {3: type("R", (), {"id": 3, "name": "m-3", "up": up})()}

    def now_ns(self) -> int:
        return 0

    def feed(self, event: object) -> None:
        self.fed.append(event)

    def trouble(self, key: str, text: str) -> None:
        self.troubles.append(f"{key}: {text}")


def test_a_pretended_fault_is_loudly_a_drill(caplog: pytest.LogCaptureFixture) -> None:
    feeder = Feeder(up=True)
    told = pretend(DrilledFault(3, "xid_fatal", 79), feeder)  # type: ignore[arg-type]
    assert "DRILL" in told
    assert "its card is well" in told
    assert told in caplog.text
    assert [text.partition(":")[0] for text in feeder.troubles] == ["drill m-3"]
    assert len(feeder.fed) == 1


@pytest.mark.parametrize(("replica", "status"), [(4, 404), (3, 409)])
def test_a_pretended_fault_needs_a_replica_that_serves(replica: int, status: int) -> None:
    feeder = Feeder(up=False)
    with pytest.raises(DrillRefused) as refused:
        pretend(DrilledFault(replica, "ecc_uncorrectable"), feeder)  # type: ignore[arg-type]
    assert refused.value.status == status
    assert feeder.fed == []


# A served twin that runs out of memory


def test_a_long_prompt_ends_a_served_twin_by_sigkill_and_a_short_one_does_not() -> None:
    with twin_process() as twin:
        twin.fault("oom", prompt_tokens_from=500)
        url = f"{twin.url}/v1/completions"
        body = {"model": MODEL, "prompt": "tide " * 100, "max_tokens": 2}
        assert json.loads(_call("POST", url, body))["usage"]["completion_tokens"] == 2
        with pytest.raises(DrillError):
            _call("POST", url, {**body, "prompt": "tide " * 1000})
        assert twin.process.wait(30) == -signal.SIGKILL
        assert "out of memory: a prompt of" in twin.output.read_text()
