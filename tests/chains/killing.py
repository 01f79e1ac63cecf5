"""Chains whose process is killed at every point, and what their steps did.

A life is a process that runs a chain to its end; a point is where its driver may kill it: around
and in every commit, and around what a step does. A step is finished when its commit has returned or
would have: what the store holds before a life must not be done again in that life.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from controller.chains import Chain
from controller.chains.records import owner_of
from controller.store.checkpoints import SqliteCheckpoints
from policy.parameters.chains import Plan
from policy.parameters.chains import Step as Planned
from tests.redis_server import open_patiently

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from controller.store.checkpoints import Checkpoint, Checkpoints, NewCheckpoint

STEPS = {"intent_parse": 2, "tool_selection": 1, "db_query": 4, "summary": 2, "memory_update": 1}
PLAN = Plan(budget_ms=60_000, steps=tuple(Planned(name, part) for name, part in STEPS.items()))
USER = "u1"
LIFE_S_MOST = 30.0
LIFE_S_LEAST = 1e-6


class Life(NamedTuple):
    """How a process runs its chain."""

    where: str
    chain: str
    effects: str
    """A file: a line for each time that a step did something, ``LIFE STEP``."""
    number: int
    manner: str
    """sync or async; with ``gateway`` the first and the fourth step are model calls."""
    stepping: bool
    """It waits at every point until it is told to go on."""
    gateway: str = ""
    model: str = ""


class _Watched:
    """A store with points around and, where it is SQLite, before every statement."""

    def __init__(self, store: Checkpoints, point: Callable[[str], None]) -> None:
        self._store = store
        self._point = point
        if isinstance(store, SqliteCheckpoints):
            store._db.set_trace_callback(lambda statement: point(statement.split()[0]))

    def save(self, new: NewCheckpoint) -> str:
        self._point(f"before save {new.step}")
        saved = self._store.save(new)
        self._point(f"after save {new.step}")
        return saved

    def load(self, checkpoint: str, owner: str) -> Checkpoint | None:
        found = self._store.load(checkpoint, owner)
        self._point("after load")
        return found

    def chain(self, owner: str, chain: str) -> list[Checkpoint]:
        found = self._store.chain(owner, chain)
        self._point("after chain")
        return found

    def undo(self, checkpoint: str, owner: str) -> int:
        return self._store.undo(checkpoint, owner)

    def forget(self, owner: str, chain: str) -> None:
        self._store.forget(owner, chain)

    def close(self) -> None:
        self._store.close()


def live(life: Life, told: Connection) -> None:
    """A process's whole life."""

    def point(name: str) -> None:
        told.send(name)
        if life.stepping:
            told.recv()

    def effect(step: str) -> dict[str, str]:
        point(f"in {step}")
        with Path(life.effects).open("a") as file:
            file.write(f"{life.number} {step}\n")
        point(f"done {step}")
        return {"step": step}

    async def aeffect(step: str) -> dict[str, str]:
        return effect(step)

    def body(step: str) -> dict[str, Any]:
        content = f"{life.chain}: {step}"
        return {
            "model": life.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
        }

    with closing(open_patiently(life.where)) as store:
        chain = Chain(PLAN, store=_Watched(store, point), gateway=life.gateway)
        asked = ("intent_parse", "summary") if life.gateway else ()
        if life.manner == "sync":
            with chain.run(life.chain, user=USER) as run:
                for step in STEPS:
                    if step in asked:
                        run.call(step, body(step))
                    else:
                        run.do(step, effect, step)
            result = run.result()
        else:

            async def main() -> Any:
                async with chain.arun(life.chain, user=USER) as run:
                    for place, step in enumerate(STEPS):
                        if step in asked:
                            await run.call(step, body(step))
                        else:
                            await run.do(step, (effect, aeffect)[place % 2], step)
                return run.result()

            result = asyncio.run(main())
        assert not result.partial, result.missing
    told.send(("result", dict(result.values)))


@dataclass
class Tally:
    """What came of many kills."""

    kills: int = 0
    points: set[str] = field(default_factory=set)
    """Where lives were killed on purpose."""
    twice: list[str] = field(default_factory=list)
    """Finished steps that ran again."""
    again: int = 0
    """Steps that ran again because they were killed before they were finished."""
    chains: int = 0


class Killer:
    """Runs chains in processes and kills these.

    Args:
        where: the store: a file or a Redis URL.
        folder: for the files that the steps write.
    """

    def __init__(
        self, where: str, folder: Path, manner: str, gateway: str = "", model: str = ""
    ) -> None:
        self.tally = Tally()
        self._where = where
        self._folder = folder
        self._manner = manner
        self._gateway = (gateway, model)
        self._made = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chains.killing", "redis", "aiohttp"])

    def at_every_point(self, every: int = 1) -> None:
        """One chain for each point (or each ``every``-th): its first life is killed there, its
        second runs to the end."""
        place = 0
        while self._chain([place]):
            place += every

    def at_random(self, kills: int, seed: int, within_s: float) -> None:
        """Chains, three lives each, until so many lives were killed at any instant of them.

        Args:
            within_s: how long a life may last at first. A life that ends before it is killed
                shortens it: a machine is quicker than another, or this process gets no turn.
        """
        generator = random.Random(seed)  # noqa: S311 - instants, not secrets
        wanted = self.tally.kills + kills
        while self.tally.kills < wanted:
            assert within_s > LIFE_S_LEAST, "its lives end before they can be killed"
            before = self.tally.kills
            self._chain([generator.uniform(0, within_s) for _ in range(3)])
            within_s *= 0.8 ** (3 - (self.tally.kills - before))

    def _chain(self, kills: list[int] | list[float]) -> bool:
        """False: it ended before the place at which it was to be killed."""
        self._made += 1
        self.tally.chains += 1
        name = f"{self._folder.name}-{self._manner}-{self._made}"
        effects = self._folder / f"{name}.effects"
        effects.write_text("")
        reached, number = True, 0
        for number, kill in enumerate(kills):
            reached = self._live(name, effects, number, kill)
        self._live(name, effects, number + 1, None)
        return reached

    def _live(self, name: str, effects: Path, number: int, kill: float | None) -> bool:
        stepping = isinstance(kill, int)
        life = Life(self._where, name, str(effects), number, self._manner, stepping, *self._gateway)
        with closing(open_patiently(self._where)) as store:
            finished = {row.step for row in store.chain(owner_of(USER), name)}
        before = len(_lines(effects))
        here, there = self._context.Pipe()
        process = self._context.Process(target=live, args=(life, there))
        process.start()
        there.close()
        try:
            killed = self._killed(process, here, kill)
            if kill is None:
                self._check(name, self._result(here))
        finally:
            here.close()
            process.kill()
            process.join(LIFE_S_MOST)
            process.close()
        did = [line.split()[1] for line in _lines(effects)[before:]]
        self.tally.kills += killed
        self.tally.twice += [f"{name}: {step}" for step in did if step in finished]
        earlier = {line.split()[1] for line in _lines(effects)[:before]}
        self.tally.again += sum(step in earlier and step not in finished for step in did)
        return killed

    def _killed(self, process: Any, here: Connection, kill: float | None) -> bool:
        """Kill it where or when it is due; false: it came to its end before."""
        if kill is None:
            return False
        if not isinstance(kill, int):
            assert here.poll(LIFE_S_MOST), "the process did not begin"
            time.sleep(kill)
            process.kill()
            process.join(LIFE_S_MOST)
            try:
                while not isinstance(here.recv(), tuple):
                    pass
            except (EOFError, ConnectionError):
                return True
            return False
        for _ in range(kill):
            if isinstance(self._next(here), tuple):
                return False
            here.send("go on")
        point = self._next(here)
        if isinstance(point, tuple):
            return False
        self.tally.points.add(point)
        process.kill()
        process.join(LIFE_S_MOST)
        return True

    def _result(self, here: Connection) -> Any:
        """What the life told at its end; points before it are passed over."""
        while True:
            told = self._next(here)
            if isinstance(told, tuple):
                return told[1]

    def _check(self, name: str, values: dict[str, Any]) -> None:
        assert list(values) == list(STEPS), f"{name}: {values}"
        asked = ("intent_parse", "summary") if self._gateway[0] else ()
        for step, value in values.items():
            assert "choices" in value if step in asked else value == {"step": step}, value

    @staticmethod
    def _next(here: Connection) -> Any:
        assert here.poll(LIFE_S_MOST), "the process stands still"
        return here.recv()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
