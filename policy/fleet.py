"""The fleet as the policy runs it: which replicas take work, and how many there are.

Health says which are well, the rollout which have the right version, capacity how many are needed;
here what they decide is put together, and the queue's hosts brought into line with it. What is to
become of requests on a replica that is lost is said in ``stuck``: whoever owns the requests moves
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.alerts import Alerts, AlertsState
from policy.breakers import DOUBTED, MAY_TRY, NO_DOUBT
from policy.capacity import Capacity, CapacityState, Seen, check_forecast, pool_of
from policy.decisions import Alert, BreakerMoved, Rotated, Start, Stop
from policy.drift import Drift, DriftState
from policy.events import (
    Forecasted,
    GpuFault,
    GpuRead,
    Progress,
    ReplicaDown,
    ReplicaUp,
    RolloutRequested,
    Standby,
    StepsRead,
    Warmed,
)
from policy.health import Health, HealthState
from policy.rollout import ROLLED_BACK, Rollout, RolloutState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.breakers import Breakers
    from policy.decisions import Decision, RotationState
    from policy.events import Event
    from policy.facts import Facts, Open
    from policy.hosts import Host
    from policy.parameters import Parameters
    from policy.tiered import Tiered

    Decisions = list[Decision]

NO_PENALTIES = (0, 0, 0)
FORGOTTEN = "forgotten"
"""Why a replica is down of which whoever runs it knows nothing any more: what there is, as a
standby or by itself, it will say anew."""
NO_DEATH = frozenset({"stopped", "controller_lost", FORGOTTEN})
"""Reasons for being down that need no replacement: it was meant, or it will say that it is up."""
DOUBTFUL = "doubtful"
"""Why a replica is out of the rotation whose answers are worse than its peers'."""
CARD_LOST = "gpu"
"""What a reason for being down begins with where the card is to blame, such as ``gpu_lost``."""


class FleetState(msgspec.Struct, array_like=True):
    """What the fleet's mechanisms know, in canonical form."""

    health: HealthState | None
    capacity: CapacityState | None
    rollout: RolloutState | None
    alerts: AlertsState | None
    looped_ns: int
    stopping: list[int]
    drift: DriftState | None = None


class Fleet:
    """Health, rollout, capacity, drift and alerts, each None where it is off.

    Methods that are told of an event check it against the facts first, and give what was decided.

    Args:
        leader: the fleet as the policy that rules runs it, where this is a candidate's: it only
            watches what it sends itself, and sends nothing to what the leader takes away.
    """

    __slots__ = (
        "_doubts", "_doubts_seen", "_facts", "_fleet_version", "_health_version", "_leader",
        "_out_most_permille", "_queue", "_reserve_permille", "_stopping", "alerts", "attention",
        "capacity", "doubts_version", "drift", "guests", "health", "looped_ns", "rolled_back",
        "rollout", "stuck",
    )  # fmt: skip

    def __init__(self, parameters: Parameters, facts: Facts, leader: Fleet | None = None) -> None:
        self._facts = facts
        self._leader = leader
        self.guests: tuple[Tiered, ...] = ()
        """Queues of a candidate: what waits there is load, too."""
        self._reserve_permille = parameters.inflight.reserve_permille
        section = parameters.health
        self._out_most_permille = section.ejected_most_permille
        self._doubts: Breakers | None = None
        self.doubts_version = 0
        """Rises whenever what ``_doubts`` say of a replica changes."""
        self._doubts_seen = 0
        """Of the leader's."""
        self.health = Health(section, leads=leader is None) if section.enabled else None
        self.capacity: Capacity | None = None
        self.rollout: Rollout | None = None
        self.drift: Drift | None = None
        self.alerts: Alerts | None = None
        if leader is None:
            self.lead(parameters)
        self.attention = False
        """The rotation may have changed: ``rotate`` is due."""
        self.stuck: list[tuple[int, str]] = []
        """Replicas whose requests are to be moved, and the kind of failure."""
        self.rolled_back: list[str] = []
        """Models that another version serves again."""
        self.looped_ns = 0
        """When the load was last told to capacity."""
        self._stopping: set[int] = set()
        """Replicas that were told to stop, and are not down yet."""
        self._health_version = 0
        self._fleet_version = 0
        self._queue: Tiered

    def lead(self, parameters: Parameters) -> None:
        """Run the fleet, too, from now on: ``take_over`` tells what is known of it."""
        self._leader = None
        if self.health is not None:
            self.health.leads = True
        self.capacity = Capacity(parameters.capacity) if parameters.capacity.enabled else None
        section = parameters.rollout
        self.rollout = Rollout(section, self._isolated) if section.enabled else None
        self.drift = Drift(parameters.drift) if parameters.drift.enabled else None
        self.alerts = Alerts(parameters.alerts) if parameters.alerts.enabled else None

    def _isolated(self, replica: int) -> bool:
        return self.health is not None and self.health.state_of(replica) == "isolated"

    def attach(self, queue: Tiered, doubts: Breakers | None = None) -> None:
        """The queue whose hosts are kept in line, and the breakers that replicas have."""
        self._queue = queue
        self._doubts = doubts
        if doubts is not None:
            doubts.peers_of = self._peers_of

    # What is due

    def pulse(self, now_ns: int, decisions: Decisions) -> None:
        """Ask whether something is due, and look at cards and load again."""
        for mechanism in (self.health, self.rollout):
            if mechanism is not None:
                due_ns = mechanism.deadline_ns()
                if due_ns is not None and due_ns <= now_ns:
                    self.tell(now_ns, mechanism.ticked(now_ns), decisions)
                    self.attention |= mechanism is self.rollout  # what was kept may go
        capacity, queue = self.capacity, self._queue
        if self._leader is not None:
            capacity = self._leader.capacity
        if capacity is not None:
            if self._leader is None and capacity.due_loop(now_ns):
                self._scale(now_ns, capacity.loop(now_ns, self._seen(now_ns)), decisions)
            extra_permille = 1000 + capacity.turbo_extra_permille(now_ns)
            queue.reserve(min(self._reserve_permille * extra_permille // 1000, 1000))
        for host in queue.hosts.values():
            queue.placer.fade(host, now_ns)
            if host.penalties != NO_PENALTIES or host.throttled:  # or has the reading grown stale?
                before = host.throttled
                queue.placer.refresh(host, now_ns)
                self.attention |= host.throttled != before
        self.attention |= self.moved()

    def _seen(self, now_ns: int) -> list[Seen]:
        """The load of each pool since the last time."""
        queue = self._queue
        elapsed_ns = max(1, now_ns - self.looped_ns)
        self.looped_ns = now_ns
        pools: dict[str, list[Host]] = {}
        held: set[str] = set()
        """Pools in the midst of a rollout: there are more replicas than there will be."""
        for number, host in sorted(queue.hosts.items()):
            pool = pool_of(host.spec.models, host.spec.pooling)
            if host.replica.ready and number not in queue.gone:
                pools.setdefault(pool, []).append(host)
            if host.replica.ready and self.rollout is not None and self.rollout.holds(number):
                held.add(pool)
        queued: dict[str, tuple[int, int]] = {}
        jobs = [(each, job) for each in (queue, *self.guests) for job in each.jobs.values()]
        for each, job in jobs:
            if job.queued:
                spec = queue.hosts[each.waits_for(self._facts.open[job.request], job)[0]].spec
                pool = pool_of(spec.models, spec.pooling)
                count, work_ns = queued.get(pool, (0, 0))
                queued[pool] = (count + 1, work_ns + job.work_ns)
        seen: list[Seen] = []
        for pool, hosts in pools.items():
            if pool in held:
                continue
            waiting, work_ns = queued.get(pool, (0, 0))
            in_flight = sum(host.replica.in_flight for host in hosts)
            target = sum(host.sequences_most for host in hosts)
            busy_permille = (in_flight + waiting) * 1000 // target
            kv_tokens = sum(host.replica.kv_tokens for host in hosts)
            kv_most = sum(host.kv_most for host in hosts)
            tokens, offered_ns = queue.offered.get(pool, (0, 0))
            seen.append(
                Seen(
                    pool, len(hosts),
                    max(busy_permille, kv_tokens * 1000 // kv_most), waiting,
                    work_ns // len(hosts), tokens * 1_000_000_000 // elapsed_ns,
                    offered_ns * 1000 // elapsed_ns,
                )
            )  # fmt: skip
        queue.offered.clear()
        return seen

    # The rotation

    @property
    def gone(self) -> frozenset[int]:
        """Replicas that are up and will take no new work any more."""
        return self._queue.gone

    def moved(self) -> bool:
        """Has the rotation changed since hosts were last brought into line with it?"""
        return self.health is not None and self.health.version != self._health_version

    def sent(self, now_ns: int, request: int, replica: int, heard_ns: int) -> None:
        """Something goes to a replica; the first sign of life is due in ``heard_ns``."""
        health = self.health
        if health is not None:
            health.dispatched(now_ns, request, replica, heard_ns)
            if health.version != self._health_version:  # a probe's slot is taken
                host = self._queue.hosts[replica]
                host.out = not health.takes(replica)
                host.probing = False
                self.attention = True
        doubts = self._doubts
        if self._queue.doubted and doubts is not None and doubts.doubt(replica) == MAY_TRY:
            doubts.sent(now_ns, request, replica)
            host = self._queue.hosts[replica]
            host.out, host.probing = True, False
            self.attention = True

    def tell(self, now_ns: int, told: Sequence[Decision], decisions: Decisions) -> None:
        """Pass on what a mechanism decided, with what follows from it."""
        for decision in told:
            if isinstance(decision, Alert):  # a mechanism's own: told once, like all others
                if self.alerts is not None:
                    if decision.cause.startswith(ROLLED_BACK):
                        self.alerts.forget(decision.key)
                    told_once = msgspec.structs.astuple(decision)
                    decisions += self.alerts.raised(now_ns, *told_once)
                continue
            if isinstance(decision, Rotated):
                self.attention = True
                decisions.append(self._placed(now_ns, decision))
                self._rotated(now_ns, decision, decisions)
                continue
            decisions.append(decision)
            if isinstance(decision, Stop):
                self._stopping.add(decision.replica)
            elif isinstance(decision, BreakerMoved) and decision.state == "open":
                figures = (("bad", decision.bad), ("total", decision.total))
                cause = f"breaker open: {decision.why}"
                self.alert(now_ns, f"breaker {decision.key}", cause, figures, decisions)

    # Doubt

    def _peers_of(self, replica: int) -> tuple[int, ...] | None:
        """The others of its pool; None where no more of that may be out of the rotation."""
        facts, gone = self._facts, self._queue.gone
        own = facts.replicas.get(replica)
        if own is None:
            return None
        pool = [
            number
            for number, known in facts.replicas.items()
            if known.ready and number not in gone
            and (known.spec.models, known.spec.pooling) == (own.spec.models, own.spec.pooling)
        ]  # fmt: skip
        out = sum(number != replica and self._is_out(number) for number in pool)
        if (out + 1) * 1000 > self._out_most_permille * len(pool):
            return None
        return tuple(number for number in pool if number != replica)

    def _is_out(self, replica: int) -> bool:
        if self._doubt(replica) != NO_DOUBT:
            return True
        return self.health is not None and self.health.state_of(replica) in ("ejected", "isolated")

    def _doubt(self, replica: int) -> int:
        """What the leader doubts a candidate does not even try."""
        if self._leader is not None and self._leader._doubt(replica) != NO_DOUBT:
            return DOUBTED
        return NO_DOUBT if self._doubts is None else self._doubts.doubt(replica)

    @property
    def behind(self) -> bool:
        """Has the leader other doubts than this candidate knows?"""
        return self._leader is not None and self._leader.doubts_version != self._doubts_seen

    def doubted(self, now_ns: int, replica: int, moved: BreakerMoved, decisions: Decisions) -> None:
        """The breaker of a replica moved: it leaves the rotation, is tried, or is back."""
        states: dict[str, RotationState] = {
            "open": "ejected", "half_open": "probing", "closed": "in",
        }  # fmt: skip
        self.doubts_version += 1
        decisions.append(moved)
        rotated = Rotated(replica, states[moved.state], DOUBTFUL, moved.for_ns)
        self.tell(now_ns, (rotated,), decisions)
        if moved.state == "open":
            figures = (("bad", moved.bad), ("total", moved.total))
            cause = f"{DOUBTFUL}: its answers are worse than its peers', by {moved.why}"
            self.alert(now_ns, f"replica {self._name(replica)}", cause, figures, decisions)

    def believe(self, now_ns: int, before: Sequence[int], decisions: Decisions) -> None:
        """Another policy rules than the one that doubted these: they are back unless it does."""
        for replica in before:
            if replica in self._facts.replicas and self._doubt(replica) == NO_DOUBT:
                self.tell(now_ns, (Rotated(replica, "in", DOUBTFUL),), decisions)

    def _placed(self, now_ns: int, moved: Rotated) -> Rotated:
        """As it is told: one mechanism lets a replica in, and another may still keep it out."""
        replica = moved.replica
        if moved.state != "in":
            return moved
        leaves = replica in self._stopping
        leaves |= self._leader is not None and replica in self._leader.gone
        leaves |= self.rollout is not None and self.rollout.holds(replica)
        leaves |= self.capacity is not None and self.capacity.draining(replica)
        if leaves:
            return Rotated(replica, "draining", moved.why)
        doubt = self._doubt(replica)
        if doubt != NO_DOUBT:
            return Rotated(replica, "ejected" if doubt == DOUBTED else "probing", moved.why)
        if self.health is None or self.health.state_of(replica) == "in":
            return moved
        state, for_ns = self.health.state_of(replica), self.health.shut_ns(now_ns, replica)
        return Rotated(replica, state, moved.why, for_ns)

    def _roll(self, now_ns: int, told: Sequence[Decision], decisions: Decisions) -> None:
        """Pass on what the rollout decided; capacity keeps its hands off what it started."""
        for decision in told:
            if isinstance(decision, Start) and self.capacity is not None:
                self.capacity.taken(now_ns, decision.replica)
        if told:
            self.tell(now_ns, told, decisions)
            self.attention = True
        rollout = self.rollout
        if rollout is not None and (rollout.exchanged or rollout.undone or rollout.forgone):
            exchanged, rollout.exchanged = rollout.exchanged, []
            forgone, rollout.forgone = rollout.forgone, []
            self.rolled_back += rollout.undone
            rollout.undone.clear()
            if self.capacity is None:
                return
            for coming, leaving in exchanged:
                self.capacity.succeed(coming, leaving, gone=not rollout.draining(leaving))
            for replica in forgone:
                self._scale(now_ns, self.capacity.forgone(now_ns, replica), decisions)

    def _scale(self, now_ns: int, told: Sequence[Decision], decisions: Decisions) -> None:
        """Pass on what capacity decided; a rollout keeps its hands off what it started, and says
        with which version that is to come up."""
        passed: Decisions = []
        for decision in told:
            if isinstance(decision, Start) and self.rollout is not None:
                decision = Start(decision.replica, self.rollout.taken(decision.replica))
            passed.append(decision)
        self.tell(now_ns, passed, decisions)

    def _rotated(self, now_ns: int, moved: Rotated, decisions: Decisions) -> None:
        host = self._queue.hosts.get(moved.replica)
        if host is not None and moved.state != "in":  # at once: the same event may send more
            health = self.health
            if moved.state != "probing" or health is None or not health.takes(moved.replica):
                host.out = True
        replica = moved.replica
        out = moved.state in ("ejected", "isolated")
        answers = moved.state == "in" and moved.why == "probe_answered"
        if answers and self.capacity is not None and replica not in self._stopping:
            self.capacity.back(replica)  # it may have hung
        if moved.why in ("backpressure", DOUBTFUL) or not (out or moved.why == "silent"):
            return
        known = self._facts.replicas.get(replica)
        figures = (("in_flight", 0 if known is None else known.in_flight),)
        cause = f"{moved.state}: {moved.why}" if out else "silent, and has to stay"
        self.alert(now_ns, f"replica {self._name(replica)}", cause, figures, decisions)
        if moved.state == "isolated":
            hung = moved.why == "hung"
            self.stuck.append((replica, "silent" if hung else "replica_lost"))
            covered = self._covered(replica, card=not hung)
            if self.rollout is not None:
                self._roll(now_ns, self.rollout.isolated(replica), decisions)
            self._lost(now_ns, replica, covered, not hung, decisions)
        elif moved.why == "silent":
            self.stuck.append((replica, "silent"))
        if self.rollout is not None:
            self._roll(now_ns, self.rollout.doubted(now_ns, replica, moved.why), decisions)

    def _covered(self, replica: int, card: bool) -> bool:
        """Does a rollout see to it that something takes the place of this replica, which is lost?
        It says so as long as it has not heard of the loss."""
        rollout = self.rollout
        if rollout is None:
            return False
        return rollout.holds(replica) if card else rollout.covers(replica)

    def _lost(
        self, now_ns: int, replica: int, covered: bool, card: bool, decisions: Decisions
    ) -> None:
        """Let a standby take its place."""
        if self.capacity is None:
            return
        if not covered:
            self._scale(now_ns, self.capacity.lost(now_ns, replica, card), decisions)
        elif self.rollout is not None and self.rollout.holds(replica):
            self.capacity.taken(now_ns, replica)
        else:  # something takes its place, now or later
            self.capacity.awaits(now_ns, replica)

    def _name(self, replica: int) -> str:
        """For people, who know it by that; of one that is not up only the number is known."""
        known = self._facts.replicas.get(replica)
        return str(replica) if known is None else known.spec.name

    def alert(
        self,
        now_ns: int,
        key: str,
        cause: str,
        figures: tuple[tuple[str, int], ...],
        decisions: Decisions,
    ) -> None:
        if self.alerts is not None:
            action = "out of rotation" if key.startswith("replica") else "degraded"
            decisions += self.alerts.raised(now_ns, key, cause, figures, action)

    def rotate(self, now_ns: int, decisions: Decisions) -> None:
        """Bring hosts into line with what the mechanisms say of them."""
        facts, queue = self._facts, self._queue
        rollout, capacity = self.rollout, self.capacity
        leaving: set[int] = set()
        stopping = self._stopping
        if self._leader is not None:
            stopping = stopping | self._leader.gone
        for number, replica in facts.replicas.items():
            isolated = self._isolated(number)
            old = rollout is not None and not rollout.allowed(number)
            surplus = capacity is not None and capacity.draining(number)
            if isolated or old or surplus or number in stopping:
                leaving.add(number)
            if (old or surplus) and not replica.in_flight:
                self._emptied(now_ns, number, decisions)
        gone = frozenset(leaving)
        changed = facts.fleet_version != self._fleet_version or gone != queue.gone
        self._fleet_version = facts.fleet_version
        if changed:
            decisions += queue.rehost(now_ns, gone)
        back = self._flag_hosts(gone)
        if back and queue.queued:
            decisions += queue.refill(now_ns, back)

    def _flag_hosts(self, gone: frozenset[int]) -> list[int]:
        """Say of each host whether it takes work for the moment. Returns those that do again."""
        health = self.health
        back: list[int] = []
        throttled = self._throttled(gone)
        doubted: set[int] = set()
        for number, host in self._queue.hosts.items():
            takes = health is None or health.takes(number)
            doubt = self._doubt(number)
            if doubt:
                doubted.add(number)
            out = not takes or number in throttled or doubt == DOUBTED
            if host.out and not out:
                back.append(number)
            host.out = out
            probing = health is not None and health.state_of(number) == "probing"
            host.probing = not out and (probing or doubt == MAY_TRY)
        self._queue.doubted = frozenset(doubted)
        if self._leader is not None:
            self._doubts_seen = self._leader.doubts_version
        if health is not None:
            health.doubted = self._queue.doubted
            self._health_version = health.version
        return back

    def _throttled(self, gone: frozenset[int]) -> set[int]:
        """Replicas on cards that have lowered their clocks, while most others have not."""
        if not self._queue.placer.throttled_out:
            return set()
        hosts = [
            host
            for number, host in self._queue.hosts.items()
            if host.replica.ready and number not in gone
        ]
        slow = {host.number for host in hosts if host.throttled}
        if not slow:
            return slow
        pools: dict[str, list[int]] = {}
        for host in hosts:
            pool = pool_of(host.spec.models, host.spec.pooling)
            pools.setdefault(pool, []).append(host.number)
        out: set[int] = set()
        for numbers in pools.values():
            mine = [number for number in numbers if number in slow]
            if 2 * len(mine) <= len(numbers):
                out.update(mine)
        return out

    def _emptied(self, now_ns: int, replica: int, decisions: Decisions) -> None:
        if self.capacity is not None and self.capacity.draining(replica):
            self._scale(now_ns, self.capacity.emptied(now_ns, replica), decisions)
        elif self.rollout is not None and self.rollout.draining(replica):
            self._roll(now_ns, self.rollout.emptied(now_ns, replica), decisions)

    # Events

    def told(self, now_ns: int, event: Event) -> Sequence[Decision]:
        """Take an event about the fleet.

        Raises:
            Illegal: it cannot be; nothing was changed.
        """
        if isinstance(event, Forecasted):
            check_forecast(event)
            self._queue.counting |= self.capacity is not None
        name = self._name(event.replica) if isinstance(event, ReplicaDown) else ""
        if self._leader is None:  # which has folded it already
            self._facts.fleet(now_ns, event)
        decisions: Decisions = []
        match event:
            case ReplicaUp():
                self._up(now_ns, event, decisions)
            case ReplicaDown():
                self._down(now_ns, event, name, decisions)
            case Standby():
                self._standby(now_ns, event, decisions)
            case GpuRead():
                self._gpu_read(now_ns, event)
            case GpuFault() if self.health is not None:
                self.tell(now_ns, self.health.gpu_fault(now_ns, event), decisions)
            case Progress() if self.health is not None:
                self.health.progress(now_ns, event)
            case StepsRead() if self.drift is not None:
                known = self._facts.replicas.get(event.replica)
                if known is not None and known.ready:  # else it comes too late
                    told = self.drift.read(now_ns, event, known.spec.name)
                    self.tell(now_ns, told, decisions)
            case Forecasted() if self.capacity is not None:
                self.capacity.forecast(now_ns, event)
            case RolloutRequested() if self.rollout is not None:
                self._roll(now_ns, self.rollout.requested(now_ns, event), decisions)
                self.attention = True  # what was kept may go
            case Warmed():
                self._warmed(now_ns, event, decisions)
            case _:
                pass
        return decisions

    def _up(self, now_ns: int, event: ReplicaUp, decisions: Decisions) -> None:
        self._stopping.discard(event.replica)
        if self.health is not None:
            self.health.up(now_ns, event)
        if self._doubts is not None:
            for moved in self._doubts.renewed(now_ns, event.replica):
                assert isinstance(moved, BreakerMoved)
                self.doubted(now_ns, event.replica, moved, decisions)
        if self.drift is not None:
            self.drift.renewed(event.replica)
        if self.capacity is not None:
            self.capacity.up(now_ns, event)
        if self.rollout is not None:
            self._roll(now_ns, self.rollout.up(now_ns, event), decisions)
        self.attention = True

    def _down(self, now_ns: int, event: ReplicaDown, name: str, decisions: Decisions) -> None:
        self._stopping.discard(event.replica)
        isolated = self._isolated(event.replica)
        if self.health is not None:
            self.health.down(now_ns, event.replica)
        if self.drift is not None:
            self.drift.renewed(event.replica)
        died = event.reason not in NO_DEATH
        card = event.reason.startswith(CARD_LOST)
        if died:
            self.alert(now_ns, f"replica {name}", f"down: {event.reason}", (), decisions)
            covered = self._covered(event.replica, card or isolated)
            self._lost(now_ns, event.replica, covered, card, decisions)
        if self.capacity is not None:
            self.capacity.down(now_ns, event.replica)
            if event.reason == FORGOTTEN:
                self.capacity.forget(event.replica)
        if self.rollout is not None:
            told = self.rollout.down(now_ns, event.replica, died, card or isolated)
            self._roll(now_ns, told, decisions)
        self.attention = True

    def let_back(self, now_ns: int, replica: int, opened: Open, decisions: Decisions) -> None:
        """A request's connection to this replica broke. If nothing else is in rotation that could
        serve it, and old replicas are kept, these are let back now: when the replica is said to
        be down, it is too late for the request."""
        rollout = self.rollout
        if rollout is None or rollout.holds(replica) or not rollout.covers(replica):
            return
        asked, tried = opened.event, (*opened.tried, replica)
        if all(host.number in tried for host in self._queue.serving(asked.model, asked)):
            self._roll(now_ns, rollout.doubted(now_ns, replica, "replica_lost"), decisions)
            self.rotate(now_ns, decisions)

    def breaker_opened(
        self, now_ns: int, model: str, version: str, moved: BreakerMoved, decisions: Decisions
    ) -> None:
        """A breaker of this model, and of this version if it is by version, opened."""
        if self.rollout is not None:
            figures = (("bad", moved.bad), ("total", moved.total))
            told = self.rollout.breaker_opened(now_ns, model, version, figures)
            self._roll(now_ns, told, decisions)

    def _standby(self, now_ns: int, event: Standby, decisions: Decisions) -> None:
        if self.health is not None:
            self.health.standby(event)
        if self.capacity is not None:
            self.capacity.standby(now_ns, event)
            self._queue.counting = True
        if self.rollout is not None:
            self._roll(now_ns, self.rollout.standby(now_ns, event), decisions)

    def _warmed(self, now_ns: int, event: Warmed, decisions: Decisions) -> None:
        if self.rollout is not None:
            self._roll(now_ns, self.rollout.warmed(now_ns, event), decisions)
        known = self._facts.replicas.get(event.replica)
        if not event.ok and (known is None or not known.ready):  # it does not come up
            self._lost(now_ns, event.replica, False, False, decisions)

    def _gpu_read(self, now_ns: int, event: GpuRead) -> None:
        host = self._queue.hosts.get(event.replica)
        if host is not None:
            self._queue.placer.refresh(host, now_ns)
            self.attention = True

    # Another policy file

    def take_over(self, now_ns: int, before: Fleet, fresh: set[str]) -> None:
        """Tell the mechanisms in ``fresh``, which begin anew, what is true of the fleet."""
        self.looped_ns = before.looped_ns
        self._stopping = before._stopping
        self._fleet_version = before._fleet_version
        self.attention = True
        up = [known.spec for known in self._facts.replicas.values() if known.ready]
        if "health" in fresh:
            self.watch_all(now_ns, before)
        if "capacity" in fresh and self.capacity is not None:
            if before.capacity is not None:
                self.capacity.adopt(before.capacity.state(now_ns), now_ns)
            else:
                for spec in up:
                    self.capacity.up(now_ns, spec)
                self._queue.counting = True
        if "rollout" in fresh and self.rollout is not None:
            if before.rollout is not None:
                self.rollout.load(before.rollout.state(now_ns), now_ns)
            else:
                for spec in up:
                    self.rollout.up(now_ns, spec)
        if self.rollout is None and self.capacity is not None:
            self.capacity.forgo_all()

    def watch_all(self, now_ns: int, before: Fleet) -> None:
        """Health begins anew with the replicas that are up."""
        if self.health is None:
            return
        if before.health is not None:
            self.health.know_standbys(before.health)
        for known in self._facts.replicas.values():
            if known.ready:
                number = known.spec.replica
                self.health.up(now_ns, known.spec)
                if before.health is not None:  # a broken card stays broken
                    self.health.keep_out(now_ns, before.health, number)

    def follow(self, before: Fleet) -> None:
        """The hosts are known as ``before``, whose candidate this is, knows them."""
        self._fleet_version = before._fleet_version
        self.attention = True

    # Snapshots

    def state(self, now_ns: int) -> FleetState:
        health, capacity, rollout, alerts = self.health, self.capacity, self.rollout, self.alerts
        return FleetState(
            None if health is None else health.state(now_ns),
            None if capacity is None else capacity.state(now_ns),
            None if rollout is None else rollout.state(now_ns),
            None if alerts is None else alerts.state(now_ns),
            self.looped_ns - now_ns,
            sorted(self._stopping),
            None if self.drift is None else self.drift.state(now_ns),
        )

    def load(self, state: FleetState, now_ns: int) -> None:
        """Go on from a state; the queue has been restored already."""
        if self.health is not None and state.health is not None:
            self.health.load(state.health, now_ns)
        if self.capacity is not None and state.capacity is not None:
            self.capacity.load(state.capacity, now_ns)
        if self.rollout is not None and state.rollout is not None:
            self.rollout.load(state.rollout, now_ns)
        if self.alerts is not None and state.alerts is not None:
            self.alerts.load(state.alerts, now_ns)
        if self.drift is not None and state.drift is not None:
            self.drift.load(state.drift, now_ns)
        self.looped_ns = state.looped_ns + now_ns
        self._stopping = set(state.stopping)
        self._flag_hosts(self._queue.gone)
