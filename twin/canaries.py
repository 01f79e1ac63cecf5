"""Canaries played in the twin: how a deployment is judged, measured over many runs.

One run is hours of a small fleet's traffic: chats and long documents of many users, more by day
than by night, with bursts, and a replica that dies and comes back with a cold cache. The candidate
serves a share of the users, and ``policy.deployment`` judges it, as it does live.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from policy.compose import build_policy
from policy.deployment import Deployment, DeploymentPlan, Watcher
from policy.events import CanaryEnded, CanaryStarted
from policy.files import FileError, code_hash
from policy.log import HashLog
from policy.parameters import canonical, policy_hash
from traces import open_trace
from traces.generate.spec import Stream
from twin.arrivals import arrivals
from twin.dice import Dice
from twin.faults import EngineKilled, Fault
from twin.fleet import fleet_of
from twin.replay import rare_collections
from twin.source import Source, write_sources
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from policy.decisions import Decision
    from policy.deployment import Result, Verdict
    from policy.events import Event
    from policy.parameters import Parameters
    from policy.runner import Log
    from twin.arrivals import Chunk

NS = 1_000_000_000
HOUR_S = 3600
SETTLED_S = 120
"""After a canary's end all that it held is settled."""
MODEL = "llama-3.1-8b"
DIURNAL = (
    0.5, 0.45, 0.4, 0.4, 0.45, 0.6, 0.8, 1.0, 1.2, 1.4, 1.5, 1.5,
    1.4, 1.3, 1.4, 1.5, 1.5, 1.4, 1.3, 1.2, 1.0, 0.8, 0.7, 0.6,
)  # fmt: skip
"""The usual rate by hour of the day; the run's seed says at which hour it begins."""


class Ground(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a canary is played."""

    hours: float = 10.0
    rate_rps: float = 0.5
    """Requests per second, on average over a day."""
    users: int = 2000
    """Of each business line; some ask more often than others."""
    replicas: int = 3
    profile: str = "rtx-4090/llama-3.1-8b"
    restart: bool = True
    """One replica dies at a random time, and loads its model again."""


class Played(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of one run."""

    seed: int
    ended: str
    """``done``, why it was rolled back, or empty: it was under way at the end."""
    rolled_back: bool
    after_s: float
    """From the canary's beginning to the verdict, or to the end."""
    stage: int
    """The last one."""
    hurt: float
    """Misses of the canary until the end of its last request, beyond what the live policy's own,
    beside it, explain."""
    alone_misses: int
    """Misses while the candidate served everyone."""
    raw_misses: int
    """All misses of requests that the candidate had to serve."""
    canary_requests: int
    stable_requests: int
    stable_misses: int
    lateness_s: float = 0.0
    """From the verdict to the last decision of the candidate."""


def streams(ground: Ground, seed: int) -> tuple[Stream, ...]:
    """The traffic: short chats in sessions, single requests with long documents, batch work."""
    start = Dice(seed, "hour").number() % 24
    diurnal = [*DIURNAL[start:], *DIURNAL[:start]]

    def stream(name: str, sla: str, share: float, **more: Any) -> dict[str, Any]:
        return {
            "name": name, "business_line": name, "sla_class": sla, "model": MODEL,
            "endpoint": "chat", "users": {"count": ground.users, "zipf": 0.4},
            "arrivals": {
                "law": "gamma", "cv": 1.5, "rate_rps": ground.rate_rps * share,
                "diurnal": diurnal,
                "bursts": {"factors": [0.92, 5.0], "stay_s": [2940.0, 60.0]},
            },
            **more,
        }  # fmt: skip

    turns = 3.0
    made = [
        stream(
            "chat", "P0", 0.6 / turns,
            prompt_tokens={"lognormal": {"mean": 250, "sigma": 0.8}, "low": 10, "high": 3000},
            output_tokens={"lognormal": {"mean": 150, "sigma": 0.6}, "low": 5, "high": 600},
            prefix={"system_tokens": 512, "prompts": 4},
            sessions={
                "turns": {"quantiles": {0.0: 1, 0.5: 3, 1.0: 6}},
                "think_s": {"lognormal": {"mean": 40, "sigma": 0.7}, "low": 2, "high": 300},
            },
        ),
        stream(
            "documents", "P1", 0.3,
            prompt_tokens={"lognormal": {"mean": 9000, "sigma": 0.68}, "low": 200, "high": 31000},
            output_tokens={"lognormal": {"mean": 250, "sigma": 0.5}, "low": 20, "high": 800},
        ),
        stream(
            "tags", "P2", 0.1,
            prompt_tokens={"lognormal": {"mean": 600, "sigma": 0.6}, "low": 50, "high": 4000},
            output_tokens={"lognormal": {"mean": 20, "sigma": 0.5}, "low": 2, "high": 80},
        ),
    ]  # fmt: skip
    return tuple(msgspec.convert(each, Stream, str_keys=False) for each in made)


def faults(ground: Ground, seed: int) -> tuple[Fault, ...]:
    """What goes wrong: a replica dies, at a time that the seed draws."""
    if not ground.restart:
        return ()
    at_s = Dice(seed, "restart").uniform() * ground.hours * HOUR_S
    return (EngineKilled(at_s=at_s, on="?", restart_s=5.0),)


def miss_share(rules: Parameters, live: Parameters, ground: Ground, seed: int) -> tuple[int, int]:
    """(requests, misses) of a run in which the policy ``rules`` serves everyone, judged by the
    deadlines of ``live``."""
    counts = _Counts()
    watcher = Watcher(live)

    class Counting(HashLog):
        def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
            super().append(now_ns, event, decisions)
            for result in watcher.step(now_ns, event, decisions):
                counts.add(result)

    with TemporaryDirectory(prefix="twinkeel-") as scratch, rare_collections():
        world = _world(ground, rules, Counting(), seed)
        world.run(_traffic(ground, seed, Path(scratch)))
    return counts.others, counts.their_misses


def play(
    live: Parameters,
    candidate: Parameters,
    plan: DeploymentPlan,
    ground: Ground,
    seed: int,
) -> Played:
    """One run: the canary begins with it, after the plan's shadow stage."""
    with TemporaryDirectory(prefix="twinkeel-") as scratch, rare_collections():
        return _Play(live, candidate, plan, ground, seed).play(Path(scratch))


def play_many(
    live: Parameters,
    candidate: Parameters,
    plan: DeploymentPlan,
    ground: Ground,
    seeds: Sequence[int],
    *,
    out: Path,
    jobs: int = 1,
    progress: Callable[[Played], None] = lambda played: None,
) -> list[Played]:
    """Runs of all ``seeds``, in their order. What is in the file ``out`` already is not played
    again: each run is written there as soon as it is over.

    Raises:
        FileError: the file holds runs of something else.
    """
    what = msgspec.json.encode(
        (canonical(live), canonical(candidate), plan, ground, code_hash()), order="sorted"
    )
    name = sha256(what).hexdigest()
    known = _known(out, name)
    for played in known.values():
        progress(played)
    left = [seed for seed in seeds if seed not in known]
    out.parent.mkdir(parents=True, exist_ok=True)
    one = partial(play, live, candidate, plan, ground)
    with out.open("ab") as file, ExitStack() as stack:
        if not out.stat().st_size:
            file.write(msgspec.json.encode(name) + b"\n")
        runs: Iterable[Played] = map(one, left)
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, get_context("spawn")))
            runs = (run.result() for run in as_completed([pool.submit(one, seed) for seed in left]))
        for played in runs:
            file.write(msgspec.json.encode(played) + b"\n")
            file.flush()
            known[played.seed] = played
            progress(played)
    return [known[seed] for seed in seeds]


def _known(out: Path, name: str) -> dict[int, Played]:
    """The runs that a file holds; a last line cut short by a crash is cut off."""
    if not out.exists() or not out.stat().st_size:
        return {}
    head, *lines = out.read_bytes().split(b"\n")
    if head != msgspec.json.encode(name):
        raise FileError(
            str(out), "holds runs of other policies, another plan or other code",
            hint="move it away, or give another file",
        )  # fmt: skip
    if lines and lines[-1]:
        out.write_bytes(b"\n".join([head, *lines[:-1], b""]))
    return {
        played.seed: played
        for line in lines[:-1]
        for played in [msgspec.json.decode(line, type=Played)]
    }


def _traffic(ground: Ground, seed: int, folder: Path) -> Iterator[Chunk]:
    path = folder / "traffic.parquet"
    source = Source(streams=streams(ground, seed), warm_up_s=600.0)
    write_sources([source], path, duration_s=ground.hours * HOUR_S, seed=seed)
    return arrivals(open_trace(path), seed=seed)


def _world(ground: Ground, rules: Parameters, log: Log, seed: int) -> World:
    return World(
        fleet_of([(ground.profile, ground.replicas)], max_model_len=32_768),
        build_policy(rules), log, lambda chunk: None, WorldSettings(sample_every_ns=0),
        faults=faults(ground, seed), seed=seed,
    )  # fmt: skip


class _Over(Exception):
    """Nothing more of interest happens."""


class _Counts(msgspec.Struct):
    """The candidate's requests, and the live policy's beside it."""

    requests: int = 0
    misses: int = 0
    others: int = 0
    their_misses: int = 0

    def add(self, result: Result) -> None:
        if result.canary:
            self.requests += 1
            self.misses += result.missed
        else:
            self.others += 1
            self.their_misses += result.missed


def _over(event: object) -> None:
    raise _Over


def _hurt(stages: Sequence[_Counts]) -> float:
    """Misses of the candidate beyond what the live policy's own, beside it, explain."""
    return sum(
        each.misses - each.requests * each.their_misses / each.others
        for each in stages
        if each.others
    )


class _Play:
    """The world, the candidate, and its judge."""

    def __init__(
        self,
        live: Parameters,
        candidate: Parameters,
        plan: DeploymentPlan,
        ground: Ground,
        seed: int,
    ) -> None:
        self._old, self._new = canonical(live), canonical(candidate)
        self._salt = Dice(seed, "salt").number() >> 32
        self._watcher = Watcher(live)
        self._deployment = Deployment(plan, 0)
        self._log = HashLog()
        self._ground, self._seed = ground, seed
        self._world = _world(ground, live, self, seed)
        self._began_ns = -1
        self._ended_ns = -1
        self._rolled_back = False
        self._why = ""
        self._awaited = False
        self._hash = policy_hash(candidate)[:12]
        self._last_ns = -1
        """Of the candidate's last decision."""
        self._counts: list[_Counts] = []
        """By stage since the canary began."""

    def play(self, folder: Path) -> Played:
        self._await_look()
        with suppress(_Over):
            self._world.run(_traffic(self._ground, self._seed, folder))
        counts = self._counts
        end_ns = self._ended_ns if self._ended_ns >= 0 else self._world.now_ns
        return Played(
            seed=self._seed,
            ended=self._why,
            rolled_back=self._rolled_back,
            after_s=(end_ns - max(0, self._began_ns)) / NS,
            stage=self._deployment.stage_number,
            hurt=_hurt(counts),
            alone_misses=sum(each.misses for each in counts if not each.others),
            raw_misses=sum(each.misses for each in counts),
            canary_requests=sum(each.requests for each in counts),
            stable_requests=sum(each.others for each in counts),
            stable_misses=sum(each.their_misses for each in counts),
            lateness_s=max(0, self._last_ns - end_ns) / NS if self._rolled_back else 0.0,
        )

    # ---- the decision log ----

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        """As a log: what is decided, and what became of whom."""
        self._log.append(now_ns, event, decisions)
        if self._rolled_back and any(
            getattr(made, "policy", "") == self._hash for made in decisions
        ):
            self._last_ns = now_ns
        told = self._watcher.aside(now_ns)
        for result in (*told, *self._watcher.step(now_ns, event, decisions)):
            self._settled(result)

    def _settled(self, result: Result) -> None:
        counts = 0 <= self._began_ns <= result.arrived_ns and result.told in ("whole", "late")
        if counts and (self._ended_ns < 0 or result.canary):
            self._counts[-1].add(result)
        self._deployment.settled(result)
        due_ns = self._deployment.deadline_ns()
        if due_ns is not None and due_ns <= result.at_ns and not self._awaited:
            self._awaited = True
            self._world.after(0, self._look)

    # ---- looks ----

    def _await_look(self) -> None:
        due_ns = self._deployment.deadline_ns()
        if due_ns is not None and self._world.expects_more:
            self._world.after(max(0, due_ns - self._world.now_ns), self._look_and_go_on)

    def _look_and_go_on(self, event: object) -> None:
        self._look(event)
        self._await_look()

    def _look(self, event: object) -> None:
        self._awaited = False
        verdict = self._deployment.look(self._world.now_ns)
        if verdict is not None and verdict.value != "hold":
            self._act(verdict)

    def _act(self, verdict: Verdict) -> None:
        now_ns = self._world.now_ns
        feed = self._world.runner.feed
        if verdict.value == "roll_back":
            self._rolled_back, self._why, self._ended_ns = True, verdict.why, now_ns
            self._deployment.abort(verdict.why)
            feed(CanaryEnded("old"))
            self._world.after(SETTLED_S * NS, _over)
            return
        stage = self._deployment.advance(now_ns)
        self._counts.append(_Counts())
        if stage is None:
            self._why, self._ended_ns = "done", now_ns
            self._world.after(SETTLED_S * NS, _over)
        elif stage.kind == "canary":
            if self._began_ns < 0:
                self._began_ns = now_ns
            feed(CanaryStarted(self._old, self._new, stage.share_permille, self._salt))
        elif stage.kind == "full":
            feed(CanaryEnded("new"))
