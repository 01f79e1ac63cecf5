"""A light fleet: replicas as two numbers a request, so that hundreds of whole runs cost a minute.

Prompts are computed one after another, answers run side by side, and whatever the policy asks for
is answered after a while, or fails. The real engines are in ``twin.engine``; what is tested here
is the policy, and for it any world will do, the more hostile the better.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Literal, cast

from policy.decisions import (
    Abort,
    Dispatch,
    LookUp,
    ReadProgress,
    SaveCheckpoint,
    Settled,
    Start,
    Stop,
    Verify,
    Warm,
)
from policy.events import (
    Arrived,
    Cancelled,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    GpuRead,
    LookedUp,
    Progress,
    ReplicaDown,
    ReplicaUp,
    Restored,
    Scraped,
    StepsRead,
    Verified,
    Warmed,
)
from policy.events import Standby as StandbyEvent
from policy.runner import Runner

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import ErrorKind, Event
    from policy.runner import Log

MS = 1_000_000
S = 1_000_000_000
NETWORK_NS = MS // 2
TOKEN_NS = 22_000
STEP_NS = 5 * MS
EVENTS_MOST = 200_000
"""Of one run: more means that it would never end."""
IDLE_TICKS = 20
"""A policy that watches its fleet may want to be ticked for ever: after so many ticks with nothing
else to come, a run is over."""


@dataclass(slots=True)
class Weather:
    """What the world does to the policy's wishes, in per mille; changed as a run goes on."""

    hit_permille: int = 300
    """Look-ups that find an answer."""
    save_fails_permille: int = 50
    mismatch_permille: int = 200
    verify_fails_permille: int = 50
    wrong_version_permille: int = 0
    """Replicas that come up with another version than was asked for."""
    warm_fails_permille: int = 0
    shaky_permille: int = 100
    """Answers with a poor confidence."""
    logprobs_permille: int = 500
    noisy: int = -1
    """A replica most of whose answers are doubtful; -1: none."""


@dataclass(slots=True)
class Run:
    """One request's work on one replica, the first or a second."""

    request: int
    prompt_tokens: int
    output_tokens: int
    begin_ns: int
    first_ns: int
    last_ns: int
    second: bool
    over: bool = False


@dataclass(slots=True)
class Server:
    """One replica: alive, hung or dead, fast or slow, sound or failing."""

    spec: ReplicaUp
    free_ns: int = 0
    slow: int = 1
    hung: bool = False
    error: ErrorKind | None = None
    error_permille: int = 0
    runs: dict[tuple[int, bool], Run] = field(default_factory=dict)
    held: list[Callable[[], None]] = field(default_factory=list)
    """What it would have sent while it hung."""
    done_tokens: int = 0
    hung_ns: int = 0


class LightFleet:
    """A policy's driver.

    Args:
        settled: called with every outcome; it may offer new requests.
        weather: how wishes turn out.
    """

    def __init__(
        self,
        policy: Policy,
        log: Log,
        rng: random.Random,
        settled: Callable[[Arrived, Settled], None] = lambda event, settled: None,
        weather: Weather | None = None,
    ) -> None:
        self.policy = policy
        self.now_ns = 0
        self.rng = rng
        self.weather = weather or Weather()
        self.servers: dict[int, Server] = {}
        self.standbys: dict[int, tuple[ReplicaUp, StandbyEvent]] = {}
        self.arrivals: dict[int, Arrived] = {}
        self.next_request = 0
        self.open = 0
        self._settled = settled
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._timers = 0
        """How many of ``_due`` are the policy's."""
        self._armed_ns = -1
        self.runner = Runner(policy, lambda: self.now_ns, self._apply, self._arm, log)

    # What a run is made of

    def at(self, at_ns: int, what: Callable[[], None]) -> None:
        """Do something then; what falls on the same instant keeps its order."""
        self._order += 1
        heappush(self._due, (max(at_ns, self.now_ns), self._order, what))

    def feed(self, event: Event) -> None:
        self.runner.feed(event)

    def bring_up(self, spec: ReplicaUp) -> None:
        self.servers[spec.replica] = Server(spec, self.now_ns)
        self.feed(spec)

    def stand_by(self, spec: ReplicaUp, start_ns: int) -> None:
        event = StandbyEvent(
            spec.replica, spec.name, spec.models, start_ns, spec.version, spec.domain, spec.pooling
        )
        self.standbys[spec.replica] = (spec, event)
        self.feed(event)

    def offer(self, **fields: Any) -> int:
        """A request arrives now."""
        request = self.next_request
        self.next_request += 1
        self.open += 1
        event = Arrived(request, **fields)
        self.arrivals[request] = event
        self.feed(event)
        return request

    def cancel(self, request: int) -> None:
        """Its client goes away, if it still waits for an answer."""
        if request in self.arrivals:
            self.feed(Cancelled(request))

    def run(self, until_ns: int | None = None) -> None:
        """Let time pass until then, or until nothing is left to happen."""
        idle_ticks = 0
        for _ in range(EVENTS_MOST):
            if not self._due or (until_ns is not None and self._due[0][0] > until_ns):
                break
            if until_ns is None and not self.open and self._timers == len(self._due):
                idle_ticks += 1
                if idle_ticks > IDLE_TICKS:
                    break
            self.now_ns, _, what = heappop(self._due)
            what()
        else:
            raise AssertionError(f"no end after {EVENTS_MOST} events, at {self.now_ns} ns")
        if until_ns is not None:
            self.now_ns = max(self.now_ns, until_ns)

    # Faults

    def kill(self, number: int, reason: str = "killed", down_first: bool = False) -> None:
        """The process is gone: what it held fails one by one, and it is told as down."""
        server = self.servers.pop(number, None)
        if server is None:
            return
        if down_first:
            self.feed(ReplicaDown(number, reason))
        for run in list(server.runs.values()):
            run.over = True
            if run.second:
                self.feed(Verified(run.request, number, "failed"))
            else:
                self.feed(Failed(run.request, number, "replica_lost"))
        if not down_first:
            self.feed(ReplicaDown(number, reason))

    def hang(self, number: int) -> None:
        """It takes work, and nothing comes back."""
        server = self.servers.get(number)
        if server is not None and not server.hung:
            server.hung = True
            server.hung_ns = self.now_ns

    def unhang(self, number: int) -> None:
        server = self.servers.get(number)
        if server is not None and server.hung:
            server.hung = False
            held, server.held = server.held, []
            for what in held:
                self.at(self.now_ns, what)

    def crash(self, down_ns: int) -> None:
        """The controller dies and comes back; the replicas go on, and are told again."""
        for server in self.servers.values():
            for run in list(server.runs.values()):
                self._ends(server, run)
        self.feed(Restored(down_ns))
        for _, standby in self.standbys.values():
            self.feed(standby)
        for server in self.servers.values():
            self.feed(server.spec)

    def scrape(self) -> None:
        for number, server in self.servers.items():
            running = len(server.runs)
            self.feed(Scraped(number, running, running // 4, min(1000, running * 50), 0, 10 * MS))
            steps = 100 + self.now_ns // MS % 200
            predicted_us = steps * STEP_NS // 1000
            wobble_us = predicted_us * (self.now_ns // 1000 % 21) // 100  # up to a fifth
            measured_us = predicted_us * server.slow + wobble_us
            self.feed(StepsRead(number, steps, measured_us, predicted_us))

    def read_gpus(self) -> None:
        draw = self.rng.randrange
        for number in list(self.servers):
            reading = GpuRead(
                number, draw(40_000), draw(1001), draw(1001), draw(1001), draw(1001),
                draw(10) == 0, draw(3) * 100 * MS,
            )  # fmt: skip
            self.feed(reading)

    # The policy's wishes

    def _arm(self, at_ns: int) -> None:
        self._timers += 1
        self._armed_ns = at_ns

        def tick() -> None:
            self._timers -= 1
            if self._armed_ns == at_ns:  # else an earlier one took its place
                self.runner.tick()

        self.at(at_ns, tick)

    def _apply(self, decision: Decision) -> None:
        kind = type(decision)
        if kind is Dispatch:
            sent = cast("Dispatch", decision)
            self._submit(sent.request, sent.replica, second=False)
        elif kind is Settled:
            self._settle(cast("Settled", decision))
        elif kind is Abort:
            self._abort(cast("Abort", decision))
        elif kind is Verify:
            again = cast("Verify", decision)
            self._submit(again.request, again.replica, second=True)
        elif kind in (SaveCheckpoint, LookUp):
            self._ask_store(cast("SaveCheckpoint | LookUp", decision))
        elif kind in (Start, Stop, Warm, ReadProgress):
            self._ask_replica(cast("Start | Stop | Warm | ReadProgress", decision))

    def _settle(self, decision: Settled) -> None:
        event = self.arrivals.pop(decision.request)
        self.open -= 1
        self._settled(event, decision)

    def _submit(self, request: int, number: int, second: bool) -> None:
        event = self.arrivals[request]
        server = self.servers.get(number)
        if server is None:  # it died just now, and the policy is about to hear of it
            lost: Event = Failed(request, number, "replica_lost")
            if second:
                lost = Verified(request, number, "failed")
            self.at(self.now_ns + NETWORK_NS, lambda: self.feed(lost))
            return
        spec = server.spec
        prompt = max(1, event.prompt_bytes // 4)
        output = self.rng.choice((1, 20, 60, 120, 400))
        if event.max_tokens:
            output = min(output, event.max_tokens)
        begin_ns = max(server.free_ns, self.now_ns + NETWORK_NS)
        first_ns = begin_ns + (prompt * TOKEN_NS + STEP_NS) * server.slow
        last_ns = first_ns + output * STEP_NS * server.slow // 4
        server.free_ns = first_ns
        run = Run(request, prompt, output, begin_ns, first_ns, last_ns, second)
        server.runs[request, second] = run
        if prompt + output > spec.max_model_len:
            self._later(server, run, self.now_ns + 2 * NETWORK_NS, "too_large")
        elif server.error is not None and self.rng.randrange(1000) < server.error_permille:
            late_ns = last_ns if server.error == "stream_cut" else first_ns
            self._later(server, run, late_ns + NETWORK_NS, server.error)
        else:
            if event.stream and not second:
                self.at(first_ns + NETWORK_NS, lambda: self._first(server, run))
            self.at(last_ns + NETWORK_NS, lambda: self._finish(server, run))

    def _first(self, server: Server, run: Run) -> None:
        if server.hung:
            server.held.append(lambda: self._first(server, run))
        elif not run.over:
            self.feed(FirstToken(run.request, server.spec.replica))

    def _later(self, server: Server, run: Run, at_ns: int, kind: ErrorKind) -> None:
        self.at(at_ns, lambda: self._fail(server, run, kind))

    def _fail(self, server: Server, run: Run, kind: ErrorKind) -> None:
        if server.hung:
            server.held.append(lambda: self._fail(server, run, kind))
        elif not run.over:
            self._ends(server, run)
            if run.second:
                self.feed(Verified(run.request, server.spec.replica, "failed"))
            else:
                self.feed(Failed(run.request, server.spec.replica, kind))

    def _finish(self, server: Server, run: Run) -> None:
        if server.hung:
            server.held.append(lambda: self._finish(server, run))
        elif not run.over:
            self._ends(server, run)
            server.done_tokens += run.output_tokens
            number = server.spec.replica
            if run.second:
                self.feed(self._verdict(run, number))
            else:
                self.feed(self._answer(run, number))

    def _answer(self, run: Run, number: int) -> Finished:
        chance, weather = self.rng.randrange, self.weather
        cached = chance(run.prompt_tokens + 1) if chance(4) == 0 else 0
        fields = (run.request, number, run.prompt_tokens, cached, run.output_tokens)
        if chance(1000) >= weather.logprobs_permille:
            return Finished(*fields)
        return Finished(*fields, *self._figures(number))

    def _figures(self, number: int) -> tuple[int, int, int, bool]:
        """What an answer of the replica looks like."""
        chance, weather = self.rng.randrange, self.weather
        if chance(1000) < (900 if number == weather.noisy else weather.shaky_permille):
            if chance(2):  # doubtful: worth a second run
                return 800 + chance(600), 2800, 80, chance(3) == 0
            return 2500 + chance(2500), 6000, 300 + chance(700), chance(3) == 0
        return chance(400), chance(1500), chance(60), False

    def _verdict(self, run: Run, number: int) -> Verified:
        draw, weather = self.rng.randrange(1000), self.weather
        if draw < weather.verify_fails_permille:
            return Verified(run.request, number, "failed")
        mismatch = draw < weather.verify_fails_permille + weather.mismatch_permille
        verdict: Literal["match", "mismatch"] = "mismatch" if mismatch else "match"
        scored = self.rng.randrange(1000) < weather.logprobs_permille
        figures = self._figures(number) if scored else (-1, -1, -1, False)
        return Verified(run.request, number, verdict, run.output_tokens, *figures)

    def _abort(self, decision: Abort) -> None:
        server = self.servers.get(decision.replica)
        if server is not None:
            for second in (False, True):
                run = server.runs.get((decision.request, second))
                if run is not None:
                    self._ends(server, run)

    def _ends(self, server: Server, run: Run) -> None:
        run.over = True
        del server.runs[run.request, run.second]

    def _ask_store(self, decision: SaveCheckpoint | LookUp) -> None:
        request = decision.request
        draw, weather = self.rng.randrange(1000), self.weather
        event: Event
        if isinstance(decision, LookUp):
            found = draw < weather.hit_permille
            event = LookedUp(request, found, draw * MS if found else 0, 900 if found else -1)
        elif draw < weather.save_fails_permille:
            event = CheckpointFailed(request)
        else:
            event = CheckpointSaved(request, f"c{request}")
        delay_ns = self.rng.choice((0, MS, 5 * MS, 200 * MS))
        self.at(self.now_ns + delay_ns, lambda: self.feed(event))

    def _ask_replica(self, decision: Start | Stop | Warm | ReadProgress) -> None:
        number = decision.replica
        if isinstance(decision, Start):
            self._start(number, decision.version)
        elif isinstance(decision, Stop):
            self.at(self.now_ns + 10 * MS, lambda: self._stop(number))
        elif isinstance(decision, Warm):
            self.at(self.now_ns + 300 * MS, lambda: self._warmed(number))
        else:
            self.at(self.now_ns + 2 * NETWORK_NS, lambda: self._progress(number))

    def _start(self, number: int, version: str) -> None:
        spec, standby = self.standbys.pop(number)
        if self.rng.randrange(1000) < self.weather.wrong_version_permille:
            version = "wrong"
        fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
        loaded = ReplicaUp(**(fields | {"version": version or spec.version}))
        self.at(self.now_ns + standby.start_ns, lambda: self.bring_up(loaded))

    def _stop(self, number: int) -> None:
        server = self.servers.get(number)
        if server is None:
            return
        self.kill(number, "stopped")
        self.stand_by(server.spec, 2 * S)

    def _warmed(self, number: int) -> None:
        server = self.servers.get(number)
        if server is not None:
            ok = self.rng.randrange(1000) >= self.weather.warm_fails_permille
            self.feed(Warmed(number, server.spec.version, ok))

    def _progress(self, number: int) -> None:
        server = self.servers.get(number)
        if server is None:
            return
        now_ns = server.hung_ns if server.hung else self.now_ns
        tokens = server.done_tokens
        for run in server.runs.values():
            took_ns = min(max(0, now_ns - run.first_ns), run.last_ns - run.first_ns)
            tokens += run.output_tokens * took_ns // max(1, run.last_ns - run.first_ns)
        self.feed(Progress(number, tokens))
