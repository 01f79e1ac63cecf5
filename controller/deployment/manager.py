"""A policy's way into force, live: shadow, canary, full, done, or back.

What is judged, and when the next stage may begin, is said by ``policy.deployment``, the same as in
the twin. Here it is written down, and then done: every step is in the database before the policy is
told of it. A restart therefore finds how far a deployment can have come, and ends it: what was
open is lost to the comparison, the candidate may be what brought the process down, and the policy
from before is the one that is known to be good.

Listening costs a request a few comparisons; beside a deployment, what its judge takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from controller.deployment import papers
from controller.deployment.measured import Measuring
from controller.deployment.papers import Refusal, drifting_replicas
from controller.deployment.plans import plan_of
from controller.deployment.views import Current, Diff, Row, changes_between, finite, row_of
from controller.gateway.telling import POLICY, short_hash
from controller.listener import Listener
from controller.observe import Shadow
from controller.store import deployments as table
from controller.store.database import DatabaseError
from controller.store.deployments import DONE, REFUSED, ROLLED_BACK, Transition
from policy.canary import broke
from policy.decisions import Dispatch
from policy.deployment import Deployment, Watcher
from policy.files import FileError
from policy.parameters import canonical, from_canonical, policy_hash
from policy.service import Service

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from controller.call import Call
    from controller.config import Settings
    from controller.deployment.papers import Papers
    from controller.driver import Driver
    from controller.driver import Log as DriverLog
    from controller.store.database import Database
    from policy.decisions import Decision
    from policy.deployment import DeploymentPlan, Stage, Verdict
    from policy.events import Event
    from policy.parameters import Parameters

T = TypeVar("T")
LOGGER = logging.getLogger("twinkeel")
TICK_S = 0.1
"""How often it is looked whether a judgement is due."""
WRITE_S_MOST = 1.0
"""A rollback waits no longer for the disk: it must be over within 5 s, whatever the disk does."""
SHADOW_KEEP_BYTES = 256 * 1024 * 1024
ROLLBACK = "rollback"
"""Who puts a policy from before in force."""
INTERRUPTED = "the controller was restarted in the middle of it"


class Tee:
    """The decision log, and beside it whoever has to see each step of the policy."""

    __slots__ = ("_append", "flush", "watch")

    def __init__(self, log: DriverLog) -> None:
        self._append = log.append
        self.flush = log.flush
        self.watch: Callable[[int, Event, tuple[Decision, ...]], None] | None = None
        """Called with what was appended, before it is carried out; must not raise."""

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        self._append(now_ns, event, decisions)
        if self.watch is not None:
            self.watch(now_ns, event, decisions)


class _Running:
    """A deployment that is under way."""

    def __init__(
        self, new: Parameters, old: Parameters, judge: Deployment, entry: table.Entry
    ) -> None:
        self.id = entry.id
        self.new = new
        self.old = old
        """Kept as it is, so that a rollback has nothing to load."""
        self.judge = judge
        self.entry = entry
        """As the history has it, or will have it once the disk lets it."""
        self.watcher = Watcher(old, entry.id)
        self.measuring = Measuring(judge.plan)
        self.verdict: Verdict | None = None
        self.ending = False
        """It is being rolled back."""
        self.canary = False
        """Both policies rule, each its share."""
        self.shadow: Shadow | None = None
        self.broken = ""
        """What failed in the judging itself."""

    def took(self, step: Transition) -> None:
        self.entry = self.entry._replace(transitions=(*self.entry.transitions, step))


class _Begin(NamedTuple):
    """All that a deployment needs to begin."""

    new: Parameters
    old: Parameters
    plan: DeploymentPlan
    entry: table.New
    why: str


class Deployments(Listener):
    """Deploys, watches, and rolls back. All of it in the event loop.

    Args:
        tee: what ``driver`` writes its log through.
        key: evidence is signed with it.
    """

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        tee: Tee,
        database: Database,
        key: bytes,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._tee = tee
        self._database = database
        self._key = key
        self._wall_s = wall_s
        self._ruling = short_hash(driver.parameters)
        self._running: _Running | None = None
        self._checking = False
        """Somebody's evidence is being checked."""
        self._turn = asyncio.Lock()
        """Held while a step is written and done."""
        self._looking: asyncio.Task[None] | None = None
        self._asked: set[asyncio.Task[Any]] = set()
        """What somebody asked for and is being done."""
        driver.every(TICK_S, self._tick)

    # What the driver calls

    def fed(self, now_ns: int, event: Event) -> None:
        running = self._running
        if running is not None and running.shadow is not None:
            running.shadow.fed(now_ns, event)

    def dispatched(self, call: Call) -> None:
        if self._running is None or not self._running.canary:
            call.policy = self._ruling
        if call.response is not None and not call.committed:
            call.response.headers[POLICY] = call.policy

    def settled(self, call: Call, settled: Any) -> None:
        running = self._running
        if running is not None and running.shadow is not None:
            running.shadow.settled(call, settled)

    def switched(self, parameters: Parameters) -> None:
        self._ruling = short_hash(parameters)

    def _watch(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        """Each step of the policy, while a deployment is under way."""
        running = self._running
        if running is None:
            return
        if running.canary:
            for decision in decisions:
                if type(decision) is Dispatch:
                    call = self._driver.calls.get(decision.request)
                    if call is not None:
                        call.policy = decision.policy or self._ruling
        if running.broken:
            return
        if running.canary and broke(decisions):  # the old policy rules alone since this step
            running.broken = "the new policy failed while it was asked: the alert says where"
            return
        try:
            told = running.watcher.aside(now_ns)
            for result in (*told, *running.watcher.step(now_ns, event, decisions)):
                running.judge.settled(result)
                running.measuring.settled(result)
        except Exception as error:  # requests must not notice
            LOGGER.exception("the judge of deployment %d failed", running.id)
            running.broken = f"its judge failed ({type(error).__name__}: {error})"

    def _tick(self) -> None:
        running = self._running
        if running is None or running.ending:
            return
        if self._looking is not None and not self._looking.done():
            return
        if running.shadow is not None:
            running.shadow.flush()
        if running.broken or _is_due(running.judge, self._driver.now_ns()):
            self._looking = asyncio.get_running_loop().create_task(self._look(running))

    async def close(self) -> None:
        """Stop. What is under way stays as it is: the next start ends it."""
        self._tee.watch = None
        running, self._running = self._running, None
        for task in (self._looking, *self._asked):
            if task is not None:
                task.cancel()
        if running is not None and running.shadow is not None:
            await asyncio.to_thread(running.shadow.end())

    # Beginning

    async def deploy(self, asked: Papers, by: str) -> Row:
        """Begin a deployment.

        Raises:
            Refusal: why not, in sentences.
            DatabaseError: it cannot be written down, so it is not done.
        """
        self._check_free()
        self._checking = True
        try:
            begin = await self._checked(asked, by)
        finally:
            self._checking = False
        return await self._to_its_end(self._begin(begin))

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it, though whoever asked for it may hang up meanwhile: no half of it may be left."""
        task = asyncio.create_task(work)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return await asyncio.shield(task)

    def _check_free(self) -> None:
        self._check_none_runs()
        if self._checking:
            raise Refusal("busy", "another deployment is being checked just now: try again")

    def _check_none_runs(self) -> None:
        running = self._running
        if running is not None:
            raise Refusal(
                "busy",
                f"deployment {running.id} ({running.new.name}) is under way, in stage"
                f" {running.judge.stage.kind}: wait for its end, or end it with `twinkeel policy"
                " rollback`",
            )

    async def _checked(self, asked: Papers, by: str) -> _Begin:
        """What is to be deployed, if it may be."""
        live = self._driver.parameters
        try:
            new = await asyncio.to_thread(papers.read_policy, asked.policy.encode())
        except FileError as error:
            raise Refusal("invalid_policy", str(error)) from error
        self._check_fits(new, live)
        if not isinstance(self._driver.policy, Service):
            raise Refusal(
                "no_canary", f"the discipline {live.discipline} knows no canary: restart with a"
                " policy of the discipline tiered",
            )  # fmt: skip
        drifting = drifting_replicas(self._driver.policy)
        question = papers.Question(new, live, self._key, self._wall_s(), drifting)
        evidence, reasons = await asyncio.to_thread(papers.check, asked, question)
        if evidence is not None:
            failed = await self._database.run(lambda db: table.failed_with(db, asked.evidence))
            if failed is not None:
                reasons = [
                    *reasons,
                    f"deployment {failed} on this evidence was rolled back by its judge: live"
                    " traffic has said otherwise, so validate on traffic recorded since",
                ]
        plan = plan_of(asked.plan, evidence)
        override = asked.override.strip()
        entry = table.New(
            by, new.name, canonical(new), canonical(live),
            "" if evidence is None else asked.evidence, override,
            msgspec.json.encode(plan).decode(),
        )  # fmt: skip
        lacks = "; ".join(reasons)
        if reasons and not override:
            refused = Transition(self._wall_s(), REFUSED, 0, lacks, {})
            await self._database.run(
                lambda db: table.begin(db, entry._replace(evidence=""), refused)
            )
            raise Refusal("refused", *reasons)
        why = "its evidence holds"
        if override:
            why = f"override: {override}{lacks and f' (although {lacks})'}"
        return _Begin(new, live, plan, entry, why)

    def _check_fits(self, new: Parameters, live: Parameters) -> None:
        """What no override changes.

        Raises:
            Refusal: it cannot take over from what rules.
        """
        if self._settings.observe:
            raise Refusal(
                "observing",
                f"this controller only observes, so {new.name} cannot be put in force: start it"
                " without --observe",
            )
        if new.discipline != live.discipline:
            raise Refusal(
                "discipline_changed",
                f"the discipline is {live.discipline} and cannot become {new.discipline} while"
                " requests are open: restart with the new policy file",
            )
        if canonical(new) == canonical(live):
            raise Refusal("same_policy", f"{new.name} ({short_hash(new)}) is in force already")

    async def _begin(self, begin: _Begin) -> Row:
        async with self._turn:
            self._check_none_runs()
            if begin.old is not self._driver.parameters:
                raise Refusal("changed_meanwhile", "another policy came into force meanwhile")
            judge, new = Deployment(begin.plan, self._driver.now_ns()), begin.new
            first = self._step_to(judge.stage, begin.why, {})
            state = judge.state()

            def written(db: sqlite3.Connection) -> table.Entry | None:
                return table.entry(db, table.begin(db, begin.entry, first, state))

            entry = await self._database.run(written)
            assert entry is not None
            self._running = running = _Running(new, begin.old, judge, entry)
            self._tee.watch = self._watch
            LOGGER.info("deployment %d: %s begins", running.id, new.name)
            if entry.override:
                name = f"the policy {new.name} ({short_hash(new)})"
                self._loudly(f"{name} is deployed by an {begin.why}")
            await self._enter(running, judge.stage)
            return row_of(running.entry)

    def _step_to(self, stage: Stage, why: str, figures: dict[str, float]) -> Transition:
        return Transition(self._wall_s(), stage.kind, stage.share_permille, why, figures)

    # Under way

    async def _look(self, running: _Running) -> None:
        async with self._turn:
            if running.ending or running is not self._running:
                return
            try:
                await self._judged(running)
            except DatabaseError as error:  # nothing is done that is not written down
                self._driver.trouble("deployment", f"it holds where it is: {error}")
            except Exception as error:
                LOGGER.exception("deployment %d could not be judged", running.id)
                running.broken = f"it could not be judged ({type(error).__name__}: {error})"

    async def _judged(self, running: _Running) -> None:
        verdict = await self._verdict(running)
        if verdict is None or verdict.value == "hold":
            return
        judge, number, figures = running.judge, running.id, finite(verdict.figures)
        state = judge.state()
        if judge.stage_number + 1 == len(judge.plan.stages):
            done = Transition(self._wall_s(), DONE, 1000, verdict.why, figures)
            if await self._written(running, lambda db: table.finish(db, number, done, state)):
                self._over(running)
                LOGGER.info("deployment %d: %s is done", number, running.new.name)
            return
        stage = judge.plan.stages[judge.stage_number + 1]
        step = self._step_to(stage, verdict.why, figures)
        if await self._written(running, lambda db: table.add(db, number, step, state)):
            running.took(step)
            await self._enter(running, stage)
            if not running.ending:
                judge.advance(self._driver.now_ns())
                running.measuring.begin(self._driver.now_ns())

    async def _verdict(self, running: _Running) -> Verdict | None:
        """That it may go on or is to be held; what must not go on is rolled back. None: that, or
        nothing is due."""
        shadow, broken = running.shadow, running.broken
        if shadow is not None and (shadow.off or shadow.refused):
            broken = f"in shadow, it does not hold: {shadow.off or 'it refused events'}"
        if broken:
            await self._back(running, broken, {})
            return None
        verdict = running.judge.look(self._driver.now_ns())
        if verdict is None:
            return None
        running.verdict = verdict
        if verdict.value == "roll_back":
            await self._back(running, verdict.why, finite(verdict.figures))
            return None
        return verdict

    async def _written(self, running: _Running, work: Callable[[sqlite3.Connection], None]) -> bool:
        """Have a step written, and look on meanwhile: a disk that hangs must not keep a bad policy
        in force. False: it was rolled back.

        Raises:
            DatabaseError: it could not be written.
        """
        writing = asyncio.ensure_future(self._database.run(work))
        writing.add_done_callback(_heard)
        while not (await asyncio.wait({writing}, timeout=TICK_S))[0] and not running.ending:
            await self._verdict(running)
        if running.ending:  # nobody waits for the disk
            return False
        writing.result()
        return True

    async def _enter(self, running: _Running, stage: Stage) -> None:
        """Do what was written down."""
        driver = self._driver
        LOGGER.info("deployment %d: %s %d", running.id, stage.kind, stage.share_permille)
        try:
            if stage.kind == "shadow":
                assert isinstance(driver.policy, Service)
                running.shadow = Shadow(
                    running.new, self._shadow_folder, driver.now_ns, driver.at,
                    lambda text: driver.trouble("shadow", text), driver.policy,
                    keep_bytes=SHADOW_KEEP_BYTES,
                )  # fmt: skip
                return
            self._end_shadow(running)
            if stage.kind == "canary":
                driver.canary(running.new, stage.share_permille, running.id)
                running.canary = True
                return
            self._rule(running.new, driver.switch if not running.canary else self._keep_new)
            running.canary = False
            running.watcher.share_permille = 1000  # of a switch alone it cannot know that
        except Exception as error:  # whatever it is, the policy from before rules
            await self._back(running, f"it could not be done: {error}", {})

    def _keep_new(self, parameters: Parameters) -> None:
        self._driver.end_canary("new")

    def _rule(self, parameters: Parameters, switch: Callable[[Parameters], None]) -> None:
        """They rule from now on; what is sent in that very step is theirs already.

        Raises:
            ValueError: the policy does not take them; the old ones go on.
        """
        before, self._ruling = self._ruling, short_hash(parameters)
        try:
            switch(parameters)
        except Exception:
            self._ruling = before
            raise

    @property
    def _shadow_folder(self) -> Path:
        return self._settings.data_path / "shadow"

    def _end_shadow(self, running: _Running) -> None:
        shadow, running.shadow = running.shadow, None
        if shadow is not None:  # its disk must not hold anybody up
            asyncio.get_running_loop().run_in_executor(None, shadow.end())

    def _over(self, running: _Running) -> None:
        self._end_shadow(running)
        self._running = None
        self._tee.watch = None

    # Back

    async def roll_back(self, why: str, to: int | None = None) -> Row:
        """End what is under way, and let the policy from before rule; if nothing is, put back what
        ruled before, or the policy of deployment ``to``.

        Raises:
            Refusal: there is nothing to go back to.
            DatabaseError: it cannot be written down, so it is not done.
        """
        return await self._to_its_end(self._roll_back(why, to))

    async def _roll_back(self, why: str, to: int | None) -> Row:
        if self._running is not None and to is None:  # its turn may be waiting for the disk
            return await self._back(self._running, why, {})
        async with self._turn:
            if self._running is None:
                return await self.row(await self._put_back(why, to))
            if to is None:
                return await self._back(self._running, why, {})
            raise Refusal(
                "busy", f"deployment {self._running.id} is under way: roll it back first, without"
                " --to",
            )  # fmt: skip

    async def _back(self, running: _Running, why: str, figures: dict[str, float]) -> Row:
        number, old = running.id, running.old
        if running.ending:
            return row_of(running.entry)
        running.ending = True
        running.judge.abort(why)
        state = running.judge.state()
        back = Transition(self._wall_s(), ROLLED_BACK, 0, why, figures)
        running.took(back)
        entry = table.New(ROLLBACK, old.name, canonical(old), canonical(running.new))
        await self._written_soon(lambda db: table.go_back(db, number, back, state, entry))
        try:
            self._undo(old)
        except Exception as error:
            LOGGER.exception("deployment %d could not be undone", number)
            why = f"{why}; it could not be undone ({error}), so restart the controller"
        self._over(running)
        self._driver.trouble(
            f"deployment {number}", f"{running.new.name} is rolled back, {old.name} rules: {why}"
        )
        return row_of(running.entry)

    def _undo(self, old: Parameters) -> None:
        """By what the policy says of itself: what broke on the way in may have come half-way."""
        driver, policy = self._driver, self._driver.policy
        assert isinstance(policy, Service)
        if policy.canary is not None:
            driver.end_canary("old")
        if canonical(policy.parameters) != canonical(old):
            driver.parameters = policy.parameters
            self._rule(old, driver.switch)

    async def _written_soon(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Have it written, but wait for the disk only so long: what is done next cannot wait."""
        writing = asyncio.ensure_future(self._database.run(work))
        done, _ = await asyncio.wait({writing}, timeout=WRITE_S_MOST)
        if not done:
            writing.add_done_callback(lambda late: self._late(late, work))
        elif writing.exception() is not None:
            self._late(writing, work)

    def _late(
        self, writing: asyncio.Future[None], work: Callable[[sqlite3.Connection], None]
    ) -> None:
        if not writing.cancelled() and writing.exception() is not None:
            self._driver.trouble("deployment", f"not written down yet: {writing.exception()}")
            self._driver.at(self._driver.now_ns() + 1_000_000_000, lambda: self._again(work))

    def _again(self, work: Callable[[sqlite3.Connection], None]) -> None:
        writing = asyncio.ensure_future(self._database.run(work))
        writing.add_done_callback(lambda late: self._late(late, work))

    async def _put_back(self, why: str, to: int | None) -> int:
        """Switch to a policy that ruled before."""
        live = self._driver.parameters
        entry = await self._entry(to) if to is not None else await self._last_change(live)
        if entry.stage != DONE:  # least of all what was refused
            raise Refusal(
                "never_ruled", f"deployment {entry.id} ({entry.name}) was"
                f" {entry.stage.replace('_', ' ')}: only a policy that came into force for good can"
                " be put back; deploy it with its evidence",
            )  # fmt: skip
        text = entry.canonical if to is not None else entry.against
        try:
            parameters = from_canonical(text)
        except msgspec.MsgspecError as error:
            raise Refusal(
                "unreadable", f"this version cannot read the policy of deployment {entry.id}:"
                f" {error}",
            ) from error  # fmt: skip
        self._check_fits(parameters, live)
        number = await self._put(parameters, ROLLBACK, why)
        self._driver.trouble(
            f"deployment {number}", f"{parameters.name} rules again, {live.name} no more: {why}"
        )
        return number

    async def _last_change(self, live: Parameters) -> table.Entry:
        newest = await self._database.run(table.newest)
        if newest is not None and (newest.stage == ROLLED_BACK or newest.by == ROLLBACK):
            # Asked for twice, or just after the judge did it: once is enough.
            raise Refusal(
                "back_already", f"since deployment {newest.id} the policy from before rules again:"
                " to go further back, name a deployment with --to",
            )  # fmt: skip
        found = await self._database.run(lambda db: table.last_change(db, canonical(live)))
        if found is None:
            raise Refusal("no_policy_before", "no policy ruled before this one: name one with --to")
        return found

    async def _put(self, parameters: Parameters, by: str, why: str, override: str = "") -> int:
        """At once, without stages. Written down first; what is refused is written back."""
        live = self._driver.parameters
        at_s = self._wall_s()
        new = table.New(by, parameters.name, canonical(parameters), canonical(live),
                        override=override)  # fmt: skip
        number = await self._database.run(lambda db: table.put_in_force(db, new, at_s, why))
        try:
            self._rule(parameters, self._driver.switch)
        except ValueError as error:
            old = table.New(by, live.name, canonical(live), canonical(parameters))
            note = f"the switch was refused: {error}"
            await self._database.run(lambda db: table.put_in_force(db, old, at_s, note))
            raise Refusal("switch_refused", str(error)) from error
        return number

    async def put(self, parameters: Parameters, override: str, expected: str = "") -> str:
        """Put a policy in force at once, whatever is known of it; the hash of the one before.

        Args:
            override: why.
            expected: hash of the policy that must be in force, if it is not empty.

        Raises:
            Refusal: why not.
            DatabaseError: it cannot be written down, so it is not done.
        """
        return await self._to_its_end(self._put_now(parameters, override, expected))

    async def _put_now(self, parameters: Parameters, override: str, expected: str) -> str:
        async with self._turn:
            live = self._driver.parameters
            old_hash = policy_hash(live)
            if expected and expected not in ("*", old_hash):
                raise Refusal(
                    "changed_meanwhile", f"the policy in force is {old_hash}, not {expected}"
                )
            self._check_free()
            try:
                self._check_fits(parameters, live)
            except Refusal as refusal:
                if refusal.code == "same_policy":
                    return old_hash
                raise
            await self._put(parameters, "admin", override, override)
            self._loudly(
                f"the policy {parameters.name} ({short_hash(parameters)}) was put in force at once,"
                f" by an override: {override}"
            )
        return old_hash

    def _loudly(self, text: str) -> None:
        """Tell everyone, each time."""
        self._driver.trouble(f"override {self._wall_s():.3f}", text)

    def tell_interrupted(self, ended: list[table.Entry]) -> None:
        """Say what this start has rolled back."""
        for entry in ended:
            self._driver.trouble(
                f"deployment {entry.id}", f"{entry.name} was in stage {entry.stage} and is rolled"
                f" back: {INTERRUPTED}; deploy it again",
            )  # fmt: skip

    # Looking

    async def rows(self, most: int = 100) -> list[Row]:
        """The history, the youngest first."""
        return [row_of(entry) for entry in await self._database.run(
            lambda db: table.entries(db, most)
        )]  # fmt: skip

    async def row(self, number: int) -> Row:
        return row_of(await self._entry(number))

    async def diff(self, number: int, other: int | None = None) -> Diff:
        """What a deployment's policy changed; or what differs from that of ``other`` to it.

        Raises:
            Refusal: there is no such deployment.
        """
        entry = await self._entry(number)
        before = entry.against if other is None else (await self._entry(other)).canonical
        return Diff(number, other, tuple(changes_between(before, entry.canonical)))

    async def _entry(self, number: int) -> table.Entry:
        found = await self._database.run(lambda db: table.entry(db, number))
        if found is None:
            raise Refusal("no_such_deployment", f"there is no deployment {number}: GET /deployments"
                          " lists them")  # fmt: skip
        return found

    def current(self) -> Current | None:
        """What is under way now, with its figures; None: nothing is."""
        running = self._running
        if running is None:
            return None
        judge, verdict = running.judge, running.verdict
        plan = judge.plan
        budget = (("hurt_budget", plan.hurt_budget), ("hurt_most", plan.hurt_most))
        return Current(
            id=running.id,
            name=running.new.name,
            hash=policy_hash(running.new),
            against=running.old.name,
            against_hash=policy_hash(running.old),
            stage=judge.stage.kind,
            share_permille=judge.stage.share_permille,
            verdict="" if verdict is None else verdict.value,
            why="" if verdict is None else verdict.why,
            figures=finite((*judge.figures(), *budget)),
            shadow=None if running.shadow is None else running.shadow.report(),
            override=running.entry.override,
            stage_number=judge.stage_number,
            stage_s=round(max(0.0, self._wall_s() - running.entry.transitions[-1].at_s), 3),
            plan=plan,
            measured=running.measuring.figures(self._driver.now_ns()),
        )

    def said(self) -> str:
        """The same in a few words, for the status; empty: nothing is under way."""
        running = self._running
        if running is None:
            return ""
        stage = running.judge.stage
        return f"{stage.kind} {stage.share_permille / 10:g} % of {running.new.name}"


def _is_due(judge: Deployment, now_ns: int) -> bool:
    due_ns = judge.deadline_ns()
    return due_ns is not None and due_ns <= now_ns


def _heard(writing: asyncio.Future[None]) -> None:
    """Whoever wanted it may not wait for it any more: that it failed is no news then."""
    if not writing.cancelled():
        writing.exception()
