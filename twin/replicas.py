"""A replica in the world: an engine, the way there and back, and what may happen to it.

Its life::

    standby --start--> starting --cold start--> up --stop--> standby
                           |                     |
                           +------ the card is lost or broken ------> dead --repair--> standby

An engine that is killed is restarted by its supervisor or becomes a standby; so is one that the
policy says hangs, in a world that has a supervisor. A dead replica's work is lost, so each of its
callers hears of it, and then the policy hears that the replica is down. It hears so of a standby,
too, that cannot be started any more.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from policy.events import Progress, ReplicaDown, Standby, Warmed
from twin.agenda import DELIVERIES, ENGINES, Callbacks, Event
from twin.calls import UNHEARD, Call
from twin.engine import Engine
from twin.engine.steptime import slowed

if TYPE_CHECKING:
    from collections.abc import Hashable

    import simpy

    from twin.engine import Sequence
    from twin.fleet import ReplicaSpec
    from twin.world import World

State = Literal["standby", "starting", "up", "dead"]
Told = ReplicaDown | Standby | Warmed
NEVER_NS = 1 << 62
_REQUEST, _FIRST, _ANSWER, _ABORT, _METRICS = range(5)
"""Messages that may be lost on the way."""


class Trouble(NamedTuple):
    """What is wrong with a replica for a while. Several troubles add up."""

    factor: Fraction = Fraction(1)
    """Every step takes this many times as long."""
    upload_factor: Fraction = Fraction(1)
    """So does taking in a request and computing its prompt's tokens."""
    delay_ns: int = 0
    """Of each message, more than usual."""
    loss_permille: int = 0
    oom_tokens: int = 0
    """Prompts this long and longer kill the process; 0: none do."""
    oom_restart_ns: int | None = None
    hollow: bool = False
    """Answers have no token in them."""


class Replica:
    """Wakes its engine, carries its answers back, and lives and dies."""

    __slots__ = (
        "_alarm", "_back_ns", "_broken", "_callbacks", "_cost", "_env", "_heard_tokens", "_hollow",
        "_life",
        "_loss_permille", "_on_finished", "_on_first", "_on_second", "_oom", "_past_busy_ticks",
        "_past_preemptions", "_past_steps", "_priority", "_restarting", "_skip",
        "_stalled_until_ns", "_troubled", "_troubles", "_world", "engine", "entry_ns", "exit_ns",
        "id", "spec", "state", "token_out_ns", "version",
    )  # fmt: skip

    def __init__(self, world: World, spec: ReplicaSpec, skip: bool, state: State) -> None:
        self._world = world
        self._env = world.env
        self._priority = ENGINES + spec.id
        self._skip = skip
        self._alarm: Event | None = None
        self._callbacks: Callbacks = [self._wake]
        self._on_first: Callbacks = [world.first_token]
        self._on_finished: Callbacks = [world.finished]
        self._on_second: Callbacks = [world.errands.verified]
        self.id = spec.id
        self.spec = spec
        self.state: State = state
        self.version = spec.version
        self._life = 0
        """Counts processes: what was meant for an earlier one is void."""
        self._broken = 0
        """Reasons why the card cannot be used."""
        self._restarting = False
        """It is dead, and its supervisor will see to it."""
        self._stalled_until_ns = -1
        self._past_busy_ticks = self._past_steps = self._past_preemptions = 0
        self._troubles: dict[Hashable, Trouble] = {}
        self._loss_permille = 0
        self._oom: Trouble | None = None
        self._hollow = False
        self._heard_tokens = 0
        """As its progress was told last."""
        self._troubled = state != "up"
        self._cost = spec.cost
        self.token_out_ns = round(spec.profile.overheads.token_out_ns.value)
        self._set_ways(0, Fraction(1))
        self.engine = self._new_engine()

    def _new_engine(self) -> Engine:
        spec = self.spec
        return Engine(spec.settings, self._cost, self._first, self._finish, self._skip)

    # ---- work ----

    def submit(self, seq: Sequence, now_ns: int) -> None:
        """Send a request. Raises ``UnfitError`` if the engine could never serve it."""
        if self._troubled and self._intercepted(seq, now_ns):
            return
        self.engine.submit(seq, now_ns + self.entry_ns)
        self._rearm(now_ns)

    def abort(self, request: int, now_ns: int) -> None:
        if self.state != "up" or self._lost(request, _ABORT):
            return
        self.engine.abort(request, now_ns + self._world.settings.network_ns)
        self._rearm(now_ns)

    def _intercepted(self, seq: Sequence, now_ns: int) -> bool:
        """Whether the request never reaches the engine."""
        if self.state != "up":  # connection refused
            self._world.failures.fail(
                seq.data, seq, "replica_lost", 2 * self._world.settings.network_ns
            )
            return True
        if self._lost(seq.id, _REQUEST, seq.data.tries):
            return True
        if self._oom is None or seq.prompt_tokens < self._oom.oom_tokens:
            if self._hollow:
                seq.output_tokens = 1  # as much as it computes before it is done
            return False
        life, restart_ns = self._life, self._oom.oom_restart_ns

        def run_out(event: simpy.Event) -> None:
            if self._life == life and self._world.listens_to(seq):
                self.die("oom", restart_ns, seq)

        self._world.after(self.entry_ns, run_out)
        return True

    def _rearm(self, now_ns: int) -> None:
        """Set the alarm to when the engine wants to wake; an old alarm is ignored when it rings."""
        wake_ns = self.engine.next_wake_ns
        alarm = self._alarm
        if alarm is not None and alarm._value == wake_ns:
            return
        if wake_ns is None or wake_ns >= NEVER_NS:
            self._alarm = None
            return
        self._alarm = alarm = Event(self._callbacks, wake_ns)
        self._env.schedule(alarm, self._priority, wake_ns - now_ns)

    def _wake(self, event: simpy.Event) -> None:
        if event is not self._alarm:
            return
        now_ns = event._value
        engine = self.engine
        engine.wake(now_ns)
        wake_ns = engine.next_wake_ns
        if wake_ns is None:
            self._alarm = None
            return
        event._value = wake_ns  # the event has just left SimPy's queue and can go in again
        event.callbacks = self._callbacks
        self._env.schedule(event, self._priority, wake_ns - now_ns)

    def _first(self, seq: Sequence, at_ns: int) -> None:
        call: Call | None = seq.data
        if call is None or call.seq is not seq:  # settled, or sent elsewhere: nobody listens
            return
        if self._troubled and self._lost(seq.id, _FIRST, call.tries):
            seq.data = UNHEARD  # nor will anybody hear the rest
            return
        if self._hollow and seq.output_tokens == 1:
            delay_ns = at_ns - self.engine.now_ns + self.token_out_ns + self.exit_ns
            self._world.failures.fail(call, seq, "empty", delay_ns)
            return
        call.first_ns = at_ns
        delay_ns = at_ns - self.engine.now_ns + self.token_out_ns * seq.turn + self._back_ns
        self._env.schedule(Event(self._on_first, seq), DELIVERIES, delay_ns)

    def _finish(self, seq: Sequence) -> None:
        call: Call | None = seq.data
        if call is None:
            return
        if self._troubled and self._lost(seq.id, _ANSWER, call.tries):
            seq.data = UNHEARD
            return
        now_ns = self.engine.now_ns
        first_ns = call.first_ns if call.seq is seq else -1
        out_ns = seq.last_out_ns(first_ns, now_ns, self.token_out_ns)
        delay_ns = out_ns - now_ns + self.exit_ns
        if call.seq is seq:
            call.last_ns = now_ns
            self._env.schedule(Event(self._on_finished, seq), DELIVERIES, delay_ns)
        elif call.second is not None and call.second.seq is seq:
            self._env.schedule(Event(self._on_second, seq), DELIVERIES, delay_ns)

    # ---- troubles ----

    def trouble(self, key: Hashable, trouble: Trouble | None) -> None:
        """From now on ``trouble`` is what ``key`` does to it; None: nothing any more."""
        if trouble is None:
            self._troubles.pop(key, None)
        else:
            self._troubles[key] = trouble
        troubles = self._troubles.values()
        self._loss_permille = max((each.loss_permille for each in troubles), default=0)
        self._oom = min(
            (each for each in troubles if each.oom_tokens),
            key=lambda each: each.oom_tokens,
            default=None,
        )
        self._hollow = any(each.hollow for each in troubles)
        upload = prod((each.upload_factor for each in troubles), start=Fraction(1))
        self._set_ways(sum(each.delay_ns for each in troubles), upload)
        self._troubled = self._is_troubled()
        self._set_cost()

    def _is_troubled(self) -> bool:
        sick = self._loss_permille > 0 or self._oom is not None or self._hollow
        return self.state != "up" or sick

    def _set_ways(self, delay_ns: int, upload_factor: Fraction) -> None:
        settings, overheads = self._world.settings, self.spec.profile.overheads
        network_ns = settings.network_ns + delay_ns
        request_in_ns = round(Fraction(overheads.request_in_ns.value) * upload_factor)
        self.entry_ns = settings.gateway_ns + network_ns + request_in_ns
        self.exit_ns = network_ns + round(overheads.request_out_ns.value)
        self._back_ns = network_ns

    def _set_cost(self) -> None:
        troubles = self._troubles.values()
        factor = prod((each.factor for each in troubles), start=Fraction(1))
        upload = prod((each.upload_factor for each in troubles), start=Fraction(1))
        cost = slowed(self.spec.cost, factor, upload)
        if cost != self._cost:
            self._cost = cost
            self.engine.slow(cost, self._world.now_ns)
            self._rearm(self._world.now_ns)

    def _lost(self, request: int, message: int, count: int = 0) -> bool:
        """Whether this message is lost on the way."""
        if not self._loss_permille:
            return False
        draw = self._world.link_dice.number(self.id, request, message, count)
        return draw % 1000 < self._loss_permille

    # ---- reading it from outside ----

    def loses_metrics(self) -> bool:
        """Whether what it says of itself is lost just now."""
        return self._lost(self._world.now_ns, _METRICS)

    @property
    def stalled(self) -> bool:
        return self._world.now_ns < self._stalled_until_ns

    @property
    def busy_ticks(self) -> int:
        """Ticks in which it computed, over all its processes."""
        return self._past_busy_ticks + self.engine.busy_ticks

    @property
    def steps(self) -> int:
        return self._past_steps + self.engine.steps

    @property
    def preemptions(self) -> int:
        return self._past_preemptions + self.engine.preemptions

    def busy_ticks_at(self, now_ns: int) -> int:
        """The same before ``now_ns``, steps that are being skipped included."""
        return self._past_busy_ticks + self.engine.totals(now_ns).busy_ticks

    def read_progress(self) -> None:
        """Ask it how far it has come; the answer comes after a way there and back.

        Its server answers even when its engine hangs. Where nothing at all comes through, the
        controller knows that it has heard no more than before.
        """
        network_ns = self._world.settings.network_ns
        life = self._life

        def answer(event: simpy.Event) -> None:
            now_ns = self._world.now_ns
            if self._life != life or self.state != "up":
                return
            if self._loss_permille < 1000:
                if self.loses_metrics():
                    return
                self._heard_tokens = self.engine.totals(now_ns).output_tokens
            progress = Progress(self.id, self._heard_tokens)
            self._world.after(network_ns, lambda event: self._world.runner.feed(progress))

        self._world.after(network_ns, answer)

    # ---- life and death ----

    def start(self, version: str = "") -> None:
        """A standby comes up after its cold start, with ``version``; empty: the one it has."""
        if self.state == "standby":
            self._begin(version, 0)

    def stop(self) -> None:
        """It is shut down, whatever it is doing, and can be started again."""
        if self._restarting:
            self._restarting = False
            self._stand_by()
        else:
            self.die("stopped")

    def restart(self, reason: str, after_ns: int) -> None:
        """Its supervisor ends its process and looks at it again after ``after_ns``: it loads its
        model anew, or stands by if another took its place meanwhile."""
        if self.state != "up":
            return
        self._end(reason, None)
        if self._broken:
            return
        self._restarting = True
        life = self._life

        def look(event: simpy.Event) -> None:
            if self._life != life or not self._restarting:
                return
            self._restarting = False
            if self._world.has_enough(self.spec):
                self._stand_by()
            else:
                self._begin("", 0)

        self._world.after(after_ns, look)

    def die(
        self, reason: str, restart_ns: int | None = None, out_of_memory: Sequence | None = None
    ) -> None:
        """Its process is gone; nothing happens if there is none.

        Args:
            reason: for the policy.
            restart_ns: when its supervisor has a new process running, which must still load the
                model; None: nobody does, it is a standby.
            out_of_memory: the request that was too much for it.
        """
        if self.state not in ("up", "starting"):
            return
        was_up = self.state == "up"
        self._end(reason, out_of_memory)
        if restart_ns is not None and not self._broken:
            self._begin("", restart_ns)
            return
        if not was_up and reason != "stopped":
            self._tell(ReplicaDown(self.id, reason))
        if not self._broken:
            self._stand_by()

    def _end(self, reason: str, out_of_memory: Sequence | None) -> None:
        """Its process is gone."""
        was_up = self.state == "up"
        self._life += 1
        self._stalled_until_ns = -1
        self._alarm = None
        self.state = "dead"
        self._troubled = True
        if was_up:
            done = self.engine.totals(self._world.now_ns)
            self._past_busy_ticks += done.busy_ticks
            self._past_steps += done.steps
            self._past_preemptions += self.engine.preemptions
            self.engine = self._new_engine()
            self._world.failures.lost(self, reason, out_of_memory)

    def break_card(self) -> None:
        """Its card cannot be used from now on; the process may live on for a while."""
        self._broken += 1
        self._restarting = False
        if self.state == "standby":
            self.state = "dead"
            self._tell(ReplicaDown(self.id, "gpu"))
        elif self.state == "starting":
            self.die("gpu")

    def repair_card(self) -> None:
        self._broken -= 1
        if not self._broken and self.state == "dead":
            self._stand_by()

    def hang(self, for_ns: int | None) -> None:
        """Its engine stands still for a while; None: for good. Its server does not notice."""
        if self.state != "up":
            return
        now_ns = self._world.now_ns
        gap_ns = NEVER_NS if for_ns is None else for_ns
        self._stalled_until_ns = max(self._stalled_until_ns, now_ns) + gap_ns
        self._hold_back(now_ns, gap_ns)
        self.engine.stall(now_ns, gap_ns)
        self._rearm(now_ns)

    def _hold_back(self, now_ns: int, gap_ns: int) -> None:
        """First tokens that the engine was about to compute come that much later, or never."""
        promised = sorted(
            (item for item in self._env._queue if item[3].callbacks is self._on_first),
            key=lambda item: item[:3],
        )
        for at_ns, _, _, event in promised:
            seq = event._value
            call: Call | None = seq.data
            if call is None or call.seq is not seq or call.first_ns < now_ns:
                continue
            event.callbacks = []  # it rings in vain
            if gap_ns >= NEVER_NS:
                call.first_ns = -1
            else:
                call.first_ns += gap_ns
                delay_ns = at_ns - now_ns + gap_ns
                self._env.schedule(Event(self._on_first, seq), DELIVERIES, delay_ns)

    def _begin(self, version: str, after_ns: int) -> None:
        self.state = "starting"
        self._life += 1
        life = self._life
        cold_ns = round(self.spec.cold_start_ns * self._world.cold_start_factor)

        def come_up(event: simpy.Event) -> None:
            if self._life != life:
                return
            if self._world.faults.keeps_down(self, version or self.version):
                self._fail_to_start(version)
                return
            if version and not self._world.keeps_version:
                self.version = version
            self.state = "up"
            self._troubled = self._is_troubled()
            self._world.runner.feed(self.spec.up(self.version))

        self._world.after(after_ns + cold_ns, come_up)

    def _fail_to_start(self, version: str) -> None:
        """Its process ended before it served; it can be started again."""
        if version:
            self._tell(Warmed(self.id, version, ok=False))
        else:
            self._tell(ReplicaDown(self.id, "did not start"))
        self._stand_by()

    def _stand_by(self) -> None:
        """It can be started, and the policy hears of it when it has heard that it was down."""
        self.state = "standby"
        self._tell(self.standby())

    def _tell(self, event: Told) -> None:
        """The policy hears of it after a way to the controller."""
        self._world.after(self._world.settings.network_ns, lambda _: self._world.runner.feed(event))

    def standby(self) -> Standby:
        """What the policy is told while it can be started."""
        spec = self.spec
        return Standby(
            self.id, spec.name, spec.serves, spec.cold_start_ns, self.version, spec.domain,
            spec.profile.task == "pooling",
        )  # fmt: skip
