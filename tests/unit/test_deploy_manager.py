"""Deploying without any traffic: what is written when, what a broken disk changes, and when nothing
can be judged."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from controller.config import Settings, Upstream
from controller.deployment import manager as module
from controller.deployment.asking import parse_stages
from controller.deployment.manager import Deployments, Tee
from controller.deployment.papers import Papers, Refusal
from controller.deployment.plans import plan_of
from controller.deployment.views import changes_between
from controller.driver import Clock, Driver
from controller.listener import Listener
from controller.store.database import Database, DatabaseError
from policy.compose import build_policy
from policy.deployment import DeploymentPlan
from policy.deployment import Stage as Step
from policy.events import CanaryEnded, CanaryStarted, PolicySwitched
from policy.evidence import Band, encode
from policy.files import FileError
from policy.log import HashLog
from policy.parameters import canonical, render
from policy.service import Service
from tests.deploy_support import KEY, evidence_for, packed
from tests.policy_support import parameters, up

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
    from pathlib import Path

    from policy.decisions import Alert, Decision
    from policy.events import Event

LIVE = parameters(name="live")
MINE = parameters(name="mine", tiers={"turbo_max_tflop": 60})
SHADOW = {"kind": "shadow", "share_permille": 0, "least_s": 0, "least_requests": 0}
CANARY = {"kind": "canary", "share_permille": 100, "least_s": 0, "least_requests": 0}
FULL = {"kind": "full", "share_permille": 1000, "least_s": 0, "least_requests": 0}


class Ear(Listener):
    """What was told, and what the policy was."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self.switches: list[Event] = []

    def decided(self, decision: Decision) -> None:
        if type(decision).__name__ == "Alert":
            self.alerts.append(decision)  # type: ignore[arg-type]

    def fed(self, now_ns: int, event: Event) -> None:
        if isinstance(event, PolicySwitched | CanaryStarted | CanaryEnded):
            self.switches.append(event)


class Stage(NamedTuple):
    driver: Driver
    deployments: Deployments
    database: Database
    ear: Ear

    async def deploy(self, *stages: dict[str, Any], **plan: Any) -> int:
        plan = {"look_s": 1, "window_s": 1, "stages": [*stages], **plan}
        row = await self.deployments.deploy(Papers(render(MINE), override="a test", plan=plan), "t")
        return row.id

    async def until(self, *wanted: str, within_s: float = 8.0) -> list[str]:
        """The last deployment's stages, once it has come to one of these."""
        deadline_s = time.monotonic() + within_s
        while True:
            (row, *_) = await self.deployments.rows()
            if row.stage in wanted:
                return [step.stage for step in row.steps]
            assert time.monotonic() < deadline_s, row
            await asyncio.sleep(0.02)

    async def alone(self) -> None:
        """The old policy rules alone again: that is done right after it is written."""
        deadline_s = time.monotonic() + 5.0
        while self.driver.candidate is not None:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)


def run(folder: Path, work: Callable[[Stage], Awaitable[None]]) -> None:
    async def whole() -> None:
        settings = Settings((Upstream("http://127.0.0.1:9"),), data=str(folder))
        ear, tee = Ear(), Tee(HashLog())
        driver = Driver(settings, build_policy(LIVE), LIVE, tee, (), Clock(), [ear])
        database = Database(folder / "controller.sqlite")
        deployments = Deployments(settings, driver, tee, database, KEY)
        driver.listen(deployments)
        try:
            await work(Stage(driver, deployments, database, ear))
        finally:
            await deployments.close()
            await driver.close()
            database.close()

    asyncio.run(whole())


class Broken:
    """A disk that takes nothing, or takes its time."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = False
        self.hangs_s = 0.0
        real = database.run

        async def through(work: Callable[[Any], Any]) -> Any:
            if self.hangs_s:
                await asyncio.sleep(self.hangs_s)
            if self.fails:
                raise DatabaseError("the disk is full")
            return await real(work)

        monkeypatch.setattr(database, "run", through)


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """Somebody else writes into the file: whoever wants to, waits for 10 s at most."""
    with closing(sqlite3.connect(database.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.rollback()


def test_too_little_data_holds_and_goes_back_after_three_windows(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        await stage.deploy(CANARY, FULL)
        await asyncio.sleep(1.5)
        current = stage.deployments.current()
        assert current is not None
        assert (current.stage, current.verdict) == ("canary", "hold")
        assert stage.deployments.said() == "canary 10 % of mine"
        assert await stage.until("rolled_back", "done") == ["canary", "rolled_back"]
        (row, *_) = await stage.deployments.rows()
        assert "too little data" in row.steps[-1].why
        assert stage.driver.parameters is LIVE
        assert [type(each) for each in stage.ear.switches] == [CanaryStarted, CanaryEnded]
        assert stage.deployments.current() is None

    run(tmp_path, work)


def test_a_rollback_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_S_MOST", 0.1)

    async def work(stage: Stage) -> None:
        await stage.deploy(CANARY, FULL)
        disk = Broken(stage.database, monkeypatch)
        disk.fails = True
        began_s = time.monotonic()
        row = await stage.deployments.roll_back("a drill")
        assert (row.stage, row.steps[-1].why) == ("rolled_back", "a drill")
        assert isinstance(stage.ear.switches[-1], CanaryEnded)
        assert stage.driver.candidate is None
        assert time.monotonic() - began_s < 1.0
        disk.fails = False
        assert await stage.until("rolled_back") == ["canary", "rolled_back"], "it is written later"

        await stage.deploy(CANARY, FULL)
        disk.hangs_s = 0.7
        back = asyncio.create_task(stage.deployments.roll_back("another"))
        await asyncio.sleep(0.3)
        assert stage.driver.candidate is None
        await back
        disk.hangs_s = 0.0
        assert await stage.until("rolled_back") == ["canary", "rolled_back"]

    run(tmp_path, work)


def test_called_back_while_its_end_is_being_written_the_policy_from_before_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_S_MOST", 0.1)

    async def work(stage: Stage) -> None:
        disk = Broken(stage.database, monkeypatch)
        await stage.deploy(FULL, window_s=60)
        assert stage.driver.parameters == MINE
        disk.hangs_s = 1.0
        await asyncio.sleep(1.4)  # it was looked at after a second, and is to be done
        back = asyncio.create_task(stage.deployments.roll_back("no"))
        await asyncio.sleep(0.2)
        assert stage.driver.parameters == LIVE
        await back
        disk.hangs_s = 0.0
        while len(rows := await stage.deployments.rows()) < 2:  # the disk takes its time
            pass
        newest, before = rows
        assert [step.stage for step in before.steps] == ["full", "done", "rolled_back"]
        assert (newest.name, newest.by) == ("live", "rollback")
        assert stage.database.policies()[0]["name"] == "live", "what a start finds"
        assert stage.driver.parameters == LIVE

    run(tmp_path, work)


def test_nothing_is_done_that_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage) -> None:
        disk = Broken(stage.database, monkeypatch)
        disk.fails = True
        with pytest.raises(DatabaseError):
            await stage.deploy(CANARY, FULL)
        with pytest.raises(DatabaseError):
            await stage.deployments.put(MINE, "a test")
        assert stage.ear.switches == []
        disk.fails = False
        await stage.deploy(SHADOW, CANARY, FULL, window_s=60)
        disk.fails = True
        await asyncio.sleep(2.2)  # it wants to go on, and must not
        assert stage.ear.switches == []
        assert any("holds where it is" in alert.cause for alert in stage.ear.alerts)
        disk.fails = False
        stages = await stage.until("canary", "rolled_back")
        assert stages[:2] == ["shadow", "canary"]

    run(tmp_path, work)


def test_whoever_hangs_up_leaves_nothing_half_done(tmp_path: Path) -> None:
    async def hung_up(stage: Stage, work: Coroutine[Any, Any, Any]) -> None:
        with locked(stage.database):
            asking = asyncio.create_task(work)
            await asyncio.sleep(0.4)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        await stage.deployments.rows()  # all that was asked of the disk before is done
        await asyncio.sleep(0.05)

    async def work(stage: Stage) -> None:
        await stage.deploy({**CANARY, "least_s": 60}, FULL)
        await hung_up(stage, stage.deployments.roll_back("a drill"))
        assert stage.driver.candidate is None
        assert stage.deployments.current() is None
        await hung_up(stage, stage.deployments.put(MINE, "a test"))
        assert stage.database.policies()[0]["name"] == stage.driver.parameters.name == "mine"
        await stage.deployments.put(LIVE, "a test")
        await hung_up(stage, stage.deploy({**CANARY, "least_s": 60}, FULL))
        (row, *_) = await stage.deployments.rows()
        current = stage.deployments.current()
        assert (current is not None) == (row.stage == "canary"), row

    run(tmp_path, work)


def test_while_the_disk_hangs_it_is_judged_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_S_MOST", 0.1)

    async def work(stage: Stage) -> None:
        for first in (SHADOW, {**CANARY, "least_s": 60}):  # one that may go on, and one that holds
            await stage.deploy(first, {**CANARY, "share_permille": 500}, FULL, window_s=2,
                               held_windows_most=1)  # fmt: skip
            with locked(stage.database):
                await asyncio.sleep(2.6)
                assert stage.deployments.current() is None
                assert stage.driver.candidate is None
            assert (await stage.until("rolled_back"))[-1] == "rolled_back"

    run(tmp_path, work)


def test_what_could_not_be_written_when_it_was_done_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage) -> None:
        disk = Broken(stage.database, monkeypatch)
        await stage.deploy(FULL, window_s=60)
        disk.fails = True
        await asyncio.sleep(1.3)
        assert stage.deployments.current() is not None
        disk.fails = False
        assert await stage.until("done") == ["full", "done"]
        assert stage.deployments.current() is None

    run(tmp_path, work)


def test_what_breaks_halfway_into_a_stage_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage) -> None:
        driver = stage.driver
        for name, stages in (("canary", (CANARY, FULL)), ("switch", (FULL,))):
            real = getattr(driver, name)

            def breaks(*asked: Any, real: Callable[..., None] = real, name: str = name) -> None:
                real(*asked)
                driver.parameters = LIVE
                monkeypatch.undo()
                raise KeyError(name)

            monkeypatch.setattr(driver, name, breaks)
            await stage.deploy(*stages)
            assert await stage.until("rolled_back") == [stages[0]["kind"], "rolled_back"]
            assert isinstance(driver.policy, Service)
            assert driver.policy.canary is None
            assert driver.policy.parameters == driver.parameters == LIVE

    run(tmp_path, work)


def test_what_fails_in_shadow_or_in_judging_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage) -> None:
        await stage.deploy({**SHADOW, "least_s": 60}, CANARY, FULL)
        running = stage.deployments._running
        assert running is not None
        assert running.shadow is not None
        running.shadow._switch_off(ZeroDivisionError("a bug"))
        assert await stage.until("rolled_back") == ["shadow", "rolled_back"]
        assert stage.ear.switches == []

        await stage.deploy({**CANARY, "least_s": 60}, FULL)
        assert stage.deployments._running is not None

        def broken(*_: object) -> list[Any]:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(stage.deployments._running.watcher, "step", broken)
        stage.driver.feed(stage.ear.switches[0])  # any event: the judge sees each
        assert await stage.until("rolled_back") == ["canary", "rolled_back"]
        (row, *_) = await stage.deployments.rows()
        assert "its judge failed (ZeroDivisionError: a bug)" in row.steps[-1].why

        await stage.deploy({**CANARY, "least_s": 60}, FULL)
        assert stage.deployments._running is not None
        monkeypatch.setattr(stage.deployments._running.judge, "look", broken)
        assert await stage.until("rolled_back") == ["canary", "rolled_back"]
        await stage.alone()

    run(tmp_path, work)


def test_a_candidate_that_raises_ends_its_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage) -> None:
        await stage.deploy({**CANARY, "least_s": 60}, FULL)
        policy = stage.driver.policy
        assert isinstance(policy, Service)
        assert policy.canary is not None
        candidate, real = policy.canary.candidate, Service.step

        def step(self: Service, now_ns: int, event: Event) -> Sequence[Decision]:
            if self is candidate:
                raise ZeroDivisionError("a bug")
            return real(self, now_ns, event)

        monkeypatch.setattr(Service, "step", step)
        stage.driver.feed(up(0))
        assert policy.canary is None
        assert await stage.until("rolled_back") == ["canary", "rolled_back"]
        await stage.alone()
        (row, *_) = await stage.deployments.rows()
        assert "the new policy failed" in row.steps[-1].why

    run(tmp_path, work)


def test_what_the_policy_does_not_take_is_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage) -> None:
        def refuses(*_: object) -> None:
            raise ValueError("the policy refused it")

        monkeypatch.setattr(stage.driver, "switch", refuses)
        with pytest.raises(Refusal, match="refused it"):
            await stage.deployments.put(MINE, "a test")
        assert [row["name"] for row in stage.database.policies()] == ["live", "mine"]
        monkeypatch.setattr(stage.driver, "canary", refuses)
        await stage.deploy(CANARY, FULL)
        assert await stage.until("rolled_back") == ["canary", "rolled_back"]

    run(tmp_path, work)


def test_going_back_finds_what_ruled_before(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        with pytest.raises(Refusal, match="no policy ruled before"):
            await stage.deployments.roll_back("why")
        with pytest.raises(Refusal, match="there is no deployment 7"):
            await stage.deployments.roll_back("why", 7)
        await stage.deployments.put(MINE, "a test")
        assert stage.driver.parameters == MINE
        row = await stage.deployments.roll_back("it was no good")
        assert (row.name, row.by, row.steps[-1].why) == ("live", "rollback", "it was no good")
        assert "live rules again, mine no more" in stage.ear.alerts[-1].cause
        assert stage.driver.parameters == LIVE
        diff = await stage.deployments.diff(row.id)
        assert [(each.key, each.after) for each in diff.changes] == [
            ("name", "live"), ("tiers.turbo_max_tflop", 50),
        ]  # fmt: skip
        assert (await stage.deployments.diff(row.id, row.id)).changes == ()

    run(tmp_path, work)


def test_going_back_twice_goes_back_once(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        await stage.deployments.put(MINE, "a test")
        await stage.deployments.roll_back("it was no good")
        with pytest.raises(Refusal, match="the policy from before rules again"):
            await stage.deployments.roll_back("it was no good")
        await stage.deployments.put(MINE, "a test")
        with pytest.raises(Refusal, match="there is no evidence"):
            await stage.deployments.deploy(Papers(render(LIVE), override=" "), "a test")
        assert (
            await stage.deployments.roll_back("what was refused changed nothing")
        ).name == "live"

    run(tmp_path, work)


def test_what_is_no_evidence_does_not_stand_as_such_in_the_history(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        asked = Papers(render(MINE), evidence="{}", override="a test", plan={"stages": [FULL]})
        await stage.deployments.deploy(asked, "a test")
        assert not (await stage.deployments.rows())[0].evidence

    run(tmp_path, work)


def test_of_two_that_are_asked_for_at_once_one_begins(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        async def one() -> int | str:
            try:
                return await stage.deploy({**CANARY, "least_s": 60}, FULL)
            except Refusal as refusal:
                return refusal.code

        first = asyncio.create_task(one())
        others: list[int | str] = []
        while not first.done():
            await asyncio.sleep(0)  # whoever is checked next must not keep it from beginning
            others.append(await one())
        current = stage.deployments.current()
        assert current is not None
        assert await first == current.id
        assert set(others) == {"busy"}

    run(tmp_path, work)


def test_what_never_ruled_is_not_put_back(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        with pytest.raises(Refusal, match="there is no evidence"):
            await stage.deployments.deploy(Papers(render(MINE)), "a test")
        (row, *_) = await stage.deployments.rows()
        with pytest.raises(Refusal, match=r"\(mine\) was refused: only"):
            await stage.deployments.roll_back("why", row.id)
        number = await stage.deploy({**CANARY, "least_s": 60}, FULL)
        await stage.deployments.roll_back("a drill")
        with pytest.raises(Refusal, match=r"\(mine\) was rolled back: only"):
            await stage.deployments.roll_back("why", number)
        assert stage.driver.parameters is LIVE

    run(tmp_path, work)


def test_evidence_may_ask_for_more_care_than_usual_not_for_less() -> None:
    evidence = evidence_for(
        MINE, LIVE, bands=(Band("slo_miss_share", 0, 0.1), Band("gpu_hours", 1, 2))
    ).evidence
    expected = msgspec.structs.replace(evidence.expected, hurt_budget=900, sample_size=777)
    plan = plan_of({}, msgspec.structs.replace(evidence, expected=expected))
    usual = DeploymentPlan()
    assert plan.hurt_budget == usual.hurt_budget
    assert [band.figure for band in plan.band] == ["slo_miss_share"]
    counts = [stage.least_requests for stage in plan.stages]
    assert counts == [100, 777, *(stage.least_requests for stage in usual.stages[2:])]
    assert plan_of({"look_s": 3}, None) == msgspec.structs.replace(usual, look_s=3)
    with pytest.raises(Refusal, match="the last stage must be full"):
        plan_of({"stages": [CANARY]}, None)
    with pytest.raises(Refusal, match="look_s"):
        plan_of({"look_s": 0}, None)


def test_stages_can_be_written_on_one_line() -> None:
    stages = parse_stages("shadow:60, canary=2.5:600:500,full:90")
    assert plan_of({"stages": stages}, None).stages == (
        Step("shadow", 0, 60, 0), Step("canary", 25, 600, 500), Step("full", 1000, 90, 0),
    )  # fmt: skip
    for text in ("", "canary:5", "shadow=3:5", "full", "canary=x:1", "full:1:2:3", "canary=101:5",
                 "full:-1"):  # fmt: skip
        with pytest.raises(FileError, match="is no stage"):
            parse_stages(text)


def test_a_diff_names_keys_and_values() -> None:
    assert list(changes_between(canonical(LIVE), canonical(LIVE))) == []
    changes = {each.key: (each.before, each.after) for each in
               changes_between(canonical(LIVE), canonical(MINE))}  # fmt: skip
    assert changes == {"name": ("live", "mine"), "tiers.turbo_max_tflop": (50, 60)}
    assert all(each.before is None for each in changes_between("", canonical(LIVE)))


def test_evidence_that_live_traffic_spoke_against_is_not_taken_again(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        made = evidence_for(MINE, LIVE)
        papers = Papers(
            render(MINE), encode(made.evidence).decode(), packed(made.log),
            plan={"look_s": 1, "window_s": 1, "stages": [CANARY, FULL]},
        )  # fmt: skip
        await stage.deployments.deploy(papers, "t")
        await stage.until("rolled_back")  # nobody asks for anything: too little data
        with pytest.raises(Refusal, match="deployment 1 on this evidence was rolled back"):
            await stage.deployments.deploy(papers, "t")

    run(tmp_path, work)
