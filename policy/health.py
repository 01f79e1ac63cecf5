"""Which replicas may take work, judged by what comes back from them, never by ``/health``.

A replica leaves the rotation for failures, for being slow beside its peers, and for silence: work
in flight and no sign of life. It is tried again after a while that doubles, by one request at a
time. At most a part of a pool is out at once. A broken GPU is *isolated*: at once, whatever its
pool looks like, until the replica comes up anew. A replica that says it is full is only *paused*.

One that stays silent when it is tried again, several times in a row, *hangs*: it is isolated, too,
so that a standby takes its place, and whoever runs its process kills and restarts it. But if none
of a pool can be reached, the network is broken and not they: what hangs, what was killed for that
and is not back, and what is out for another reason are together no more than the part of a pool
that may be out. The only one of a pool may hang, too, where a standby can take its place. Where
nobody restarts it, it is tried again like one that is ejected.

What says nothing about the replica (4xx, a client that went away) changes nothing and frees the
slot of a probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.decisions import ReadProgress, Rotated, RotationState
from policy.events import GpuFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import ErrorKind, Progress, ReplicaUp, Standby
    from policy.parameters.health import Health as Section

NS_PER_MS = 1_000_000
FAULTS = frozenset({
    "timeout", "oom", "http_5xx", "stream_cut", "empty", "malformed", "silent", "replica_lost",
})  # fmt: skip
BROKEN = frozenset({"ecc_uncorrectable", "xid_fatal"})
OPEN, ONE, SHUT = 0, 1, 2  # what a replica's gate lets in: anything, one probe, nothing
DOUBLINGS_MOST = 32
SILENCES_MOST = 1000  # no rule asks for more
PoolKey = tuple[tuple[str, ...], bool]
"""Models, and whether they are served for embeddings only."""


class Watch(msgspec.Struct, array_like=True, gc=False):
    """What is known of one replica."""

    replica: int
    pool: PoolKey
    """Models, and whether it serves embeddings only: peers are alike in both."""
    life_ns: int
    """Its last sign of life, or when its work began."""
    asked_ns: int
    """When its progress was last asked for."""
    read_ns: int
    """When its progress was last read."""
    turn_ns: int
    """When the present half of the error window began."""
    back_ns: int
    """Since when it is in the rotation."""
    state: RotationState = "in"
    gate: int = OPEN
    probe: int = -1
    """The request that tries it; -1: none."""
    until_ns: int | None = None
    """When a shut gate lets a probe in; None: not by time."""
    paused: bool = False
    """It is in the rotation, but said that it is full."""
    ejections: int = 0
    """In a row."""
    bar_permille: int = 0
    """A probe this slow has failed; 0: it was not ejected for being slow."""
    tokens: int = 0
    """As last read."""
    still: bool = False
    """The last two readings since its last sign of life were the same."""
    failures: int = 0
    """In a row."""
    bad: int = 0
    total: int = 0
    bad_before: int = 0
    """In the half window before the present one."""
    total_before: int = 0
    ratios: list[int] = []
    """Per mille, observed over predicted time to first token, since the last comparison."""
    strikes: int = 0
    """Comparisons lost in a row."""
    waiting: dict[int, int] = {}
    """When the first token of a request was predicted, by request, in order of dispatch."""
    streams: set[int] = set()
    """Requests that had their first token."""
    silences: int = 0
    """Ejections for silence in a row, without an answer between them."""

    @property
    def broken(self) -> bool:
        """Its card is: it is not even tried again."""
        return self.state == "isolated" and self.until_ns is None

    def restart(self, now_ns: int) -> None:
        """Judge it anew from now on."""
        self.failures = 0
        self.bad = self.total = self.bad_before = self.total_before = 0
        self.turn_ns = now_ns
        self.ratios.clear()
        self.strikes = 0


WorkState = tuple[Watch, list[tuple[int, int]], list[int]]
"""A replica without its requests, and these: those without a first token, and the others."""


class HealthState(msgspec.Struct, array_like=True):
    """In canonical form: replicas by id, times relative to the present."""

    watches: list[WorkState]
    due_ns: int | None
    compare_ns: int | None
    detected: int
    enforced: int
    hung: list[tuple[int, PoolKey]] = []
    standbys: list[tuple[int, PoolKey]] = []


class Health:
    """Watches every replica that is up. A replica that it does not know counts as healthy.

    Args:
        leads: it may say that a replica hangs, which ends its process. A candidate's may not.
    """

    __slots__ = (
        "_ask_ns", "_compare_ns", "_due_ns", "_grace_ns", "_half_ns", "_hung", "_in_flight_max",
        "_ratios_most", "_section", "_slack_ns", "_stall_ns", "_standbys", "_watches", "detected",
        "doubted", "enforced", "leads", "version",
    )  # fmt: skip

    def __init__(self, section: Section, leads: bool = True) -> None:
        self._section = section
        self.leads = leads
        self._grace_ns = section.first_grace_ms * NS_PER_MS
        self._stall_ns = section.stall_ms * NS_PER_MS
        self._ask_ns = section.ask_ms * NS_PER_MS
        self._half_ns = section.error_window_ms * NS_PER_MS // 2
        self._slack_ns = section.slow_slack_ms * NS_PER_MS
        self._ratios_most = section.slow_samples_most
        self._in_flight_max = section.in_flight_max
        self._watches: dict[int, Watch] = {}
        self._hung: dict[int, PoolKey] = {}
        """Replicas that hung and did not come back since, those that are down among them."""
        self._standbys: dict[int, PoolKey] = {}
        """Replicas that can be started, or are."""
        self.doubted: frozenset[int] = frozenset()
        """Replicas that are out for what they answer: they count as out of the pool, too."""
        self._due_ns: int | None = None
        """No later than the next instant at which anything may be due."""
        self._compare_ns: int | None = None
        """When replicas are compared with their peers; None: there is nothing to compare."""
        self.version = 0
        """Rises whenever ``takes`` or ``state_of`` may answer otherwise than before."""
        self.detected = 0
        """How often a replica should have left the rotation."""
        self.enforced = 0
        """How often it did: not in shadow, and not beyond the cap."""

    # Asked

    def state_of(self, replica: int) -> RotationState:
        watch = self._watches.get(replica)
        if watch is None:
            return "in"
        return "probing" if watch.paused else watch.state

    def takes(self, replica: int) -> bool:
        """May a new request go there now?"""
        watch = self._watches.get(replica)
        return watch is None or watch.gate < SHUT

    def shut_ns(self, now_ns: int, replica: int) -> int:
        """How long it is not even tried again; 0: it is, or nothing is known of when."""
        watch = self._watches.get(replica)
        return 0 if watch is None or watch.until_ns is None else max(0, watch.until_ns - now_ns)

    # Replicas

    def up(self, now_ns: int, spec: ReplicaUp) -> None:
        """It is as new, whatever was known of it."""
        replica = spec.replica
        if len(self._watches) >= self._section.replicas_max and replica not in self._watches:
            return
        self._watches[replica] = Watch(
            replica, (spec.models, spec.pooling), life_ns=now_ns, asked_ns=now_ns, read_ns=now_ns,
            turn_ns=now_ns, back_ns=now_ns,
        )  # fmt: skip
        self._watches = dict(sorted(self._watches.items()))
        self._hung.pop(replica, None)
        self._standbys.pop(replica, None)
        self.version += 1

    def standby(self, event: Standby) -> None:
        """It can be started: if it hung, that is over."""
        self._hung.pop(event.replica, None)
        if len(self._standbys) < self._section.replicas_max:
            self._standbys[event.replica] = (event.models, event.pooling)
            self._standbys = dict(sorted(self._standbys.items()))

    def down(self, now_ns: int, replica: int) -> None:
        self._standbys.pop(replica, None)
        if self._watches.pop(replica, None) is not None:
            self.version += 1

    # Requests

    def dispatched(self, now_ns: int, request: int, replica: int, expected_ns: int) -> None:
        """``expected_ns``: from now to the first that will be seen of its answer."""
        watch = self._watches.get(replica)
        if watch is None:
            return
        if watch.gate == ONE:
            watch.gate = SHUT
            watch.probe = request
            self.version += 1
        waiting = watch.waiting
        if waiting or watch.streams:
            if len(waiting) + len(watch.streams) >= self._in_flight_max:
                return
        else:
            watch.life_ns = now_ns  # while it had no work, silence was no fault
            self._arm(now_ns + self._ask_ns)
        waiting[request] = now_ns + expected_ns

    def first_token(self, now_ns: int, request: int, replica: int) -> Sequence[Decision]:
        watch = self._watches.get(replica)
        if watch is None or watch.waiting.pop(request, None) is None:
            return ()
        watch.streams.add(request)
        watch.life_ns = now_ns
        if watch.paused and request == watch.probe:
            return (self._restored(now_ns, watch, "accepted"),)
        return ()

    def answered(
        self, now_ns: int, request: int, replica: int, ttft_ns: int, expected_ns: int
    ) -> Sequence[Decision]:
        """Both times count from dispatch; ``expected_ns`` 0: nothing to compare."""
        watch = self._watches.get(replica)
        if watch is None:
            return ()
        if watch.waiting.pop(request, None) is None:
            watch.streams.discard(request)
        watch.life_ns = now_ns
        watch.failures = 0
        if watch.silences and watch.gate == OPEN:
            watch.silences = 0
        if now_ns - watch.turn_ns >= self._half_ns:
            self._turn(now_ns, watch)
        watch.total += 1
        ratio = 0
        if expected_ns > 0 and (watch.gate or len(watch.ratios) < self._ratios_most):
            slack_ns = self._slack_ns
            ratio = (ttft_ns + slack_ns) * 1000 // (expected_ns + slack_ns)
        if watch.gate:
            return self._tried(now_ns, watch, ratio) if request == watch.probe else ()
        if ratio:
            watch.ratios.append(ratio)
            if self._compare_ns is None:
                self._compare_ns = now_ns + self._section.slow_window_ms * NS_PER_MS
                self._arm(self._compare_ns)
        return ()

    def failed(
        self, now_ns: int, request: int, replica: int, kind: ErrorKind
    ) -> Sequence[Decision]:
        watch = self._watches.get(replica)
        if watch is None:
            return ()
        self._leave(watch, request)
        probe = watch.gate == SHUT and request == watch.probe
        if kind == "backpressure":
            return self._full(now_ns, watch, probe)
        if probe and (watch.paused or kind not in FAULTS):
            self._free(watch)
        if kind not in FAULTS:
            return ()
        if watch.state != "in":
            return (self._eject(now_ns, watch, "probe_failed"),) if probe else ()
        if now_ns - watch.turn_ns >= self._half_ns:
            self._turn(now_ns, watch)
        watch.failures += 1
        watch.bad += 1
        watch.total += 1
        if watch.failures >= self._section.failures_most:
            return self._detected(now_ns, watch, "failures")
        if self._fails_often(watch):
            return self._detected(now_ns, watch, "error_share")
        return ()

    def take_in(self, now_ns: int, other: Health) -> None:
        """Watch what another policy sent, too."""
        for replica, taken in other._watches.items():
            watch = self._watches.get(replica)
            if watch is None or not (taken.waiting or taken.streams):
                continue
            if not (watch.waiting or watch.streams):
                watch.life_ns = now_ns
                self._arm(now_ns + self._ask_ns)
            room = self._in_flight_max - len(watch.waiting) - len(watch.streams)
            watch.streams.update(sorted(taken.streams)[:room])
            room = self._in_flight_max - len(watch.waiting) - len(watch.streams)
            watch.waiting.update(list(taken.waiting.items())[:room])

    def disown(self) -> None:
        """What was sent so far is another policy's to watch."""
        for watch in self._watches.values():
            watch.waiting.clear()
            watch.streams.clear()
            if watch.gate == SHUT and watch.probe >= 0:
                self._free(watch)

    def gone(self, now_ns: int, request: int, replica: int) -> None:
        """Cancelled, aborted, or moved elsewhere: it says nothing about the replica."""
        watch = self._watches.get(replica)
        if watch is not None:
            self._leave(watch, request)
            if watch.gate == SHUT and request == watch.probe:
                self._free(watch)

    # Signs from the driver

    def progress(self, now_ns: int, event: Progress) -> None:
        """The first reading after any other sign of life is only there to be compared with."""
        watch = self._watches.get(event.replica)
        if watch is None:
            return
        comparable = watch.read_ns >= watch.life_ns
        watch.still = comparable and event.output_tokens <= watch.tokens
        if comparable and not watch.still:
            watch.life_ns = now_ns
        watch.read_ns = now_ns
        watch.tokens = event.output_tokens

    def gpu_fault(self, now_ns: int, event: GpuFault) -> Sequence[Decision]:
        watch = self._watches.get(event.replica)
        if watch is None or event.kind not in BROKEN or watch.broken:
            return ()
        self.detected += 1
        if not self._section.enforce:
            return ()
        self.enforced += 1
        self._hung.pop(event.replica, None)
        self._shut(now_ns, watch, "isolated", None)
        return (Rotated(event.replica, "isolated", event.kind),)

    def know_standbys(self, before: Health) -> None:
        """Those that another policy's health knew."""
        self._standbys = dict(list(before._standbys.items())[: self._section.replicas_max])

    def keep_out(self, now_ns: int, before: Health, replica: int) -> None:
        """What another policy's health has isolated stays so, as new as this one is."""
        watch, known = self._watches.get(replica), before._watches.get(replica)
        if watch is None or known is None or known.state != "isolated":
            return
        if known.broken:
            self.gpu_fault(now_ns, GpuFault(replica, "ecc_uncorrectable"))
        elif self._section.enforce:
            watch.ejections, watch.silences = known.ejections, known.silences
            self._hung[replica] = watch.pool
            self._hung = dict(sorted(self._hung.items()))
            self._shut(now_ns, watch, "isolated", known.until_ns)

    # Time

    def deadline_ns(self) -> int | None:
        return self._due_ns

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        if self._due_ns is None or now_ns < self._due_ns:
            return ()
        decisions: list[Decision] = []
        if self._compare_ns is not None and self._compare_ns <= now_ns:
            self._compare_ns = None
            self._compare(now_ns, decisions)
        for watch in self._watches.values():
            self._look(now_ns, watch, decisions)
        dues = [self._next_ns(now_ns, watch) for watch in self._watches.values()]
        dues.append(self._compare_ns)
        self._due_ns = min((due_ns for due_ns in dues if due_ns is not None), default=None)
        return decisions

    def _arm(self, due_ns: int) -> None:
        if self._due_ns is None or due_ns < self._due_ns:
            self._due_ns = due_ns

    def _look(self, now_ns: int, watch: Watch, decisions: list[Decision]) -> None:
        """Its gate may be due, its progress to be read, or its silence to be noticed."""
        if watch.until_ns is not None and watch.until_ns <= now_ns:
            self._free(watch)
            if watch.state in ("ejected", "isolated"):
                watch.state = "probing"
                decisions.append(Rotated(watch.replica, "probing", "retry"))
        if not (watch.waiting or watch.streams):
            return
        fresh = watch.still and watch.read_ns + 2 * self._ask_ns >= now_ns
        if fresh and self._silent_ns(watch) <= now_ns:
            decisions += self._silent(now_ns, watch)
        elif self._ask_at_ns(watch) <= now_ns:
            watch.asked_ns = now_ns
            decisions.append(ReadProgress(watch.replica))

    def _next_ns(self, now_ns: int, watch: Watch) -> int | None:
        if not (watch.waiting or watch.streams):
            return watch.until_ns
        due_ns = self._ask_at_ns(watch)
        silent_ns = self._silent_ns(watch)
        if now_ns < silent_ns < due_ns:
            due_ns = silent_ns
        return due_ns if watch.until_ns is None else min(due_ns, watch.until_ns)

    def _ask_at_ns(self, watch: Watch) -> int:
        return max(watch.life_ns, watch.asked_ns) + self._ask_ns

    def _silent_ns(self, watch: Watch) -> int:
        """When a replica with work is silent, if it gives no sign of life until then."""
        stalled_ns = watch.life_ns + self._stall_ns
        if not watch.waiting:
            return stalled_ns
        expected_ns = next(iter(watch.waiting.values()))
        hung_ns = max(watch.life_ns, expected_ns) + self._grace_ns
        return min(stalled_ns, hung_ns) if watch.streams else hung_ns

    # Judgement

    def _silent(self, now_ns: int, watch: Watch) -> Sequence[Decision]:
        watch.life_ns = now_ns
        watch.still = False
        if watch.paused and watch.probe >= 0:
            self._free(watch)
        if watch.state == "in":
            return self._detected(now_ns, watch, "silent")
        if watch.state == "probing" and watch.probe >= 0:
            return (self._eject(now_ns, watch, "silent"),)
        # It is out already; say it again, for what is still there.
        return (Rotated(watch.replica, watch.state, "silent"),)

    def _fails_often(self, watch: Watch) -> bool:
        """Often enough, and more than twice as often as its peers together?"""
        section = self._section
        bad, total = watch.bad + watch.bad_before, watch.total + watch.total_before
        if total < section.error_volume_least or bad * 1000 < section.error_share_permille * total:
            return False
        peers = [peer for peer in self._peers(watch) if peer is not watch]
        peers_bad = sum(peer.bad + peer.bad_before for peer in peers)
        peers_total = sum(peer.total + peer.total_before for peer in peers)
        return bad * peers_total >= 2 * peers_bad * total

    def _compare(self, now_ns: int, decisions: list[Decision]) -> None:
        """Hold each replica's median time to first token against the median of its peers'."""
        pools: dict[tuple[tuple[str, ...], bool], list[tuple[int, Watch]]] = {}
        for watch in self._watches.values():
            if watch.gate == OPEN and len(watch.ratios) >= self._section.slow_samples_least:
                pools.setdefault(watch.pool, []).append((_median(watch.ratios), watch))
                watch.ratios.clear()
        for members in pools.values():
            if len(members) < 2:
                continue  # it has no peers
            members.sort(key=lambda member: (member[0], member[1].replica))
            # The lower median of all but itself, for every one above it; the others are fast.
            peers = members[(len(members) - 2) // 2][0]
            bar_permille = peers * self._section.slow_permille // 1000
            for own, watch in members:
                watch.strikes = watch.strikes + 1 if own >= bar_permille else 0
                if watch.strikes >= self._section.slow_strikes:
                    decisions += self._detected(now_ns, watch, "slow", bar_permille)

    def _tried(self, now_ns: int, watch: Watch, ratio: int) -> Sequence[Decision]:
        """The probe was answered."""
        if watch.bar_permille and ratio >= watch.bar_permille:
            return (self._eject(now_ns, watch, "slow", watch.bar_permille),)
        return (self._restored(now_ns, watch, "probe_answered"),)

    def _full(self, now_ns: int, watch: Watch, probe: bool) -> Sequence[Decision]:
        """The replica said that it is full: send nothing for a while, then one request."""
        if not (self._section.enforce and (probe or watch.gate == OPEN)):
            return ()
        pause_ns = self._section.pause_ms * NS_PER_MS
        pausing = watch.gate == OPEN
        watch.paused = watch.state == "in"
        self._close(watch, now_ns + pause_ns)
        if not pausing:
            return ()
        return (Rotated(watch.replica, "probing", "backpressure", pause_ns),)

    def _detected(
        self, now_ns: int, watch: Watch, why: str, bar_permille: int = 0
    ) -> Sequence[Decision]:
        """It should leave the rotation: does it?"""
        self.detected += 1
        watch.restart(now_ns)
        peers = self._peers(watch)
        out = sum(
            peer is not watch and (peer.state != "in" or peer.replica in self.doubted)
            for peer in peers
        )
        allowed = (out + 1) * 1000 <= self._section.ejected_most_permille * len(peers)
        if not (allowed and self._section.enforce):
            if why != "silent" or not self._section.enforce:
                return ()
            watch.silences = min(watch.silences + 1, SILENCES_MOST)
            if not self._hangs(watch):
                # It has to stay, but what waits there for nothing must not.
                return (Rotated(watch.replica, watch.state, why),)
            watch.silences -= 1  # it is counted anew
        self.enforced += 1
        return (self._eject(now_ns, watch, why, bar_permille),)

    def _peers(self, watch: Watch) -> list[Watch]:
        """All of its pool, itself among them, but for broken GPUs."""
        return [
            peer for peer in self._watches.values() if peer.pool == watch.pool and not peer.broken
        ]

    def _hangs(self, watch: Watch) -> bool:
        """Was it silent so often that its process is to be ended, and may it be?"""
        least = self._section.hung_ejections
        if not (self.leads and least and watch.silences >= least):
            return False
        peers = self._peers(watch)
        gone = sum(
            pool == watch.pool and replica not in self._watches
            for replica, pool in self._hung.items()
        )
        if not gone and len(peers) == 1 and watch.pool in self._standbys.values():
            return True
        out = gone + 1
        out += sum(
            peer.state != "in" or peer.replica in self.doubted
            for peer in peers
            if peer is not watch
        )
        return out * 1000 <= self._section.ejected_most_permille * (gone + len(peers))

    # Transitions

    def _eject(self, now_ns: int, watch: Watch, why: str, bar_permille: int = 0) -> Rotated:
        section = self._section
        if watch.state == "in" and now_ns - watch.back_ns >= section.forgive_ms * NS_PER_MS:
            watch.ejections = 0
        open_ms = min(section.open_ms << watch.ejections, section.open_most_ms)
        watch.ejections = min(watch.ejections + 1, DOUBLINGS_MOST)
        watch.bar_permille = bar_permille
        watch.silences = min(watch.silences + 1, SILENCES_MOST) if why == "silent" else 0
        state: RotationState = "ejected"
        if self._hangs(watch):
            state, why = "isolated", "hung"
            self._hung[watch.replica] = watch.pool
            self._hung = dict(sorted(self._hung.items())[-self._section.replicas_max :])
        self._shut(now_ns, watch, state, now_ns + open_ms * NS_PER_MS)
        return Rotated(watch.replica, state, why, open_ms * NS_PER_MS)

    def _shut(self, now_ns: int, watch: Watch, state: RotationState, until_ns: int | None) -> None:
        watch.state = state
        watch.paused = False
        watch.restart(now_ns)
        self._close(watch, until_ns)

    def _close(self, watch: Watch, until_ns: int | None) -> None:
        watch.gate = SHUT
        watch.probe = -1
        watch.until_ns = until_ns
        self.version += 1
        if until_ns is not None:
            self._arm(until_ns)

    def _free(self, watch: Watch) -> None:
        """One request may try it."""
        watch.gate = ONE
        watch.probe = -1
        watch.until_ns = None
        self.version += 1

    def _restored(self, now_ns: int, watch: Watch, why: str) -> Rotated:
        if not watch.paused:
            watch.back_ns = now_ns
            watch.silences = 0
            self._hung.pop(watch.replica, None)
            watch.restart(now_ns)
        watch.state = "in"
        watch.paused = False
        watch.bar_permille = 0
        watch.gate = OPEN
        watch.probe = -1
        self.version += 1
        return Rotated(watch.replica, "in", why)

    def _leave(self, watch: Watch, request: int) -> None:
        if watch.waiting.pop(request, None) is None:
            watch.streams.discard(request)

    def _turn(self, now_ns: int, watch: Watch) -> None:
        """Half a window is over; what is older than a whole one is forgotten."""
        recent = now_ns - watch.turn_ns < 2 * self._half_ns
        watch.bad_before = watch.bad if recent else 0
        watch.total_before = watch.total if recent else 0
        watch.bad = watch.total = 0
        watch.turn_ns = now_ns

    # Snapshots

    def state(self, now_ns: int) -> HealthState:
        return HealthState(
            [
                (
                    _shifted(watch, -now_ns),
                    [(request, at_ns - now_ns) for request, at_ns in watch.waiting.items()],
                    sorted(watch.streams),
                )
                for _, watch in sorted(self._watches.items())
            ],
            None if self._due_ns is None else self._due_ns - now_ns,
            None if self._compare_ns is None else self._compare_ns - now_ns,
            self.detected,
            self.enforced,
            list(self._hung.items()),
            list(self._standbys.items()),
        )

    def load(self, state: HealthState, now_ns: int) -> None:
        self._watches = {}
        for saved, waiting, streams in state.watches:
            watch = _shifted(saved, now_ns)
            watch.waiting = {request: at_ns + now_ns for request, at_ns in waiting}
            watch.streams = set(streams)
            self._watches[watch.replica] = watch
        self._due_ns = None if state.due_ns is None else state.due_ns + now_ns
        self._compare_ns = None if state.compare_ns is None else state.compare_ns + now_ns
        self.detected = state.detected
        self.enforced = state.enforced
        self._hung = dict(state.hung)
        self._standbys = dict(state.standbys)
        self.version += 1

    def size(self) -> int:
        return (
            len(self._hung)
            + len(self._standbys)
            + sum(
                1 + len(watch.waiting) + len(watch.streams) + len(watch.ratios)
                for watch in self._watches.values()
            )
        )

    def size_most(self) -> int:
        section = self._section
        return section.replicas_max * (3 + section.in_flight_max + section.slow_samples_most)


def _median(values: list[int]) -> int:
    """The lower one of two."""
    return sorted(values)[(len(values) - 1) // 2]


def _shifted(watch: Watch, by_ns: int) -> Watch:
    """A copy with other times, and without its requests."""
    return msgspec.structs.replace(
        watch,
        life_ns=watch.life_ns + by_ns,
        asked_ns=watch.asked_ns + by_ns,
        read_ns=watch.read_ns + by_ns,
        turn_ns=watch.turn_ns + by_ns,
        back_ns=watch.back_ns + by_ns,
        until_ns=None if watch.until_ns is None else watch.until_ns + by_ns,
        ratios=list(watch.ratios),
        waiting={},
        streams=set(),
    )
