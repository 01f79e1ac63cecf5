"""A new version of a model takes over from the old one, and nobody notices.

In waves: standbys are started with the new version, what they loaded is verified, they are warmed;
when all of a wave are ready, as many old replicas are drained as there are new ones. With a
standby for each old replica that is one wave, and one instant at which every new request goes to
the new version. With fewer, what an old replica leaves behind is started anew for the next wave.
Old requests end where they began. When anything about a wave goes wrong the rollout is over: its
new replicas are stopped, and what served before serves on.

After the last switch the new version is *watched*: the old replicas of that wave are drained, but
run on. When a breaker opens on the new version, or on its model while nothing else serves it, or a
replica of it fails, falls silent or goes down by itself, it is rolled back: the old ones take
requests again, at the same instant, and as many new ones are drained and stopped. One that is
isolated by then does not come back: nothing would get there, and what it replaced is gone. Only the
last wave can be kept so: what earlier waves replaced is stopped already, and comes back as a
rollout in reverse, by starting standbys with the old version. A rollback is not watched.

What earlier waves brought is looked at from its switch on: the same doubts, and a breaker of the
new version, end the rollout there, on the same way back, before it has replaced what serves.
As many serve at the end as before: an old one takes the place of a new one that went down, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from policy.decisions import Alert, Rotated, Start, Stop, Warm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.decisions import Decision
    from policy.events import ReplicaUp, RolloutRequested, Standby, Warmed
    from policy.parameters.rollout import Rollout as Section

NS_PER_MS = 1_000_000
ROLLED_BACK = "rolled back"
"""What the cause of such an alert begins with."""
DOUBTS = frozenset({"failures", "error_share", "probe_failed", "silent", "hung", "replica_lost"})
"""Why a replica is out, where its model's version may be to blame: not its card, and not that it is
slower than others. ``replica_lost``: the only one that serves broke a connection."""


class Known(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A replica that is up, or a standby."""

    models: tuple[str, ...]
    pooling: bool
    version: str

    def serves(self, model: str) -> bool:
        return not self.models or model in self.models

    def replaces(self, other: Known) -> bool:
        """Can it do what the other does?"""
        return self.models == other.models and self.pooling == other.pooling


class New(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A replica of the present wave; it takes no requests yet."""

    model: str
    stage: Literal["starting", "warming", "ready"] = "starting"


class Drain(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A replica whose work goes to an end."""

    model: str
    stopped: bool = False
    """It was empty, and was told to stop."""
    kept: bool = False
    """It runs on while the new version is watched."""


class Move(msgspec.Struct, array_like=True, gc=False):
    """A model on its way to another version."""

    model: str
    version: str
    phase: Literal["starting", "watching", "draining"]
    due_ns: int | None
    """Starting: when it is given up. Watching: when that is over. Draining: when someone is told
    that it takes long."""
    replaced: int = 0
    """Old replicas drained so far."""
    before: str = ""
    """The version that most replicas had."""
    undoes: str | None = None
    """The version that this takes away again, and no other; None: it is no rollback."""
    owed: int = -1
    """A replica that went down, whose place the next one takes that comes in; -1: none."""


class RolloutState(msgspec.Struct, array_like=True):
    """In canonical form: replicas by id, rollouts as they were asked for, times relative."""

    up: list[tuple[int, Known]]
    standbys: list[tuple[int, Known]]
    new: list[tuple[int, New]]
    draining: list[tuple[int, Drain]]
    unwanted: list[int]
    moves: list[Move]


class Rollout:
    """At most one rollout a model; another request for it takes the place of the first.

    Args:
        isolated: is the card of this replica broken, or does it hang?
    """

    __slots__ = (
        "_draining", "_is_isolated", "_moves", "_new", "_section", "_standbys", "_unwanted", "_up",
        "exchanged", "forgone", "undone",
    )  # fmt: skip

    def __init__(
        self, section: Section, isolated: Callable[[int], bool] = lambda replica: False
    ) -> None:
        self._section = section
        self._is_isolated = isolated
        self._up: dict[int, Known] = {}
        self._standbys: dict[int, Known] = {}
        self._new: dict[int, New] = {}
        self._draining: dict[int, Drain] = {}
        self._unwanted: set[int] = set()
        """Started for a wave that failed, or died while they were drained: they must stop, once
        they are up."""
        self._moves: dict[str, Move] = {}
        self.exchanged: list[tuple[int, int]] = []
        """(which takes requests, which is drained for it) in this step; and (next): whoever looks
        at them clears them."""
        self.undone: list[str] = []
        """Models that were rolled back in this step."""
        self.forgone: list[int] = []
        """Replicas that went down, whose place nothing of a rollout will take after all."""

    # Asked

    def allowed(self, replica: int) -> bool:
        """May it take new requests? Neither what is too new may, nor what only finishes."""
        return not self.holds(replica)

    def draining(self, replica: int) -> bool:
        """Does it only finish what it has?"""
        return replica in self._draining

    def holds(self, replica: int) -> bool:
        """Is it in the midst of a rollout, so that nobody else should start or stop it?"""
        return replica in self._new or replica in self._draining or replica in self._unwanted

    # Events

    def requested(self, now_ns: int, event: RolloutRequested) -> Sequence[Decision]:
        model, version = event.model, event.version
        decisions: list[Decision] = []
        owed = -1
        under_way = self._moves.get(model)
        if under_way is not None:
            if under_way.version == version:
                return ()
            if under_way.phase == "watching" and under_way.before == version:
                self._roll_back(now_ns, under_way, decisions)
                return decisions
            self._end(under_way, decisions)
            owed = under_way.owed
        elif len(self._moves) >= self._section.rollouts_max:
            under_way_count = (("under_way", len(self._moves)),)
            return (_alert(model, "too many rollouts at a time", under_way_count),)
        self._back(model, version, decisions)
        move = Move(model, version, "starting", None, owed=owed)
        old = self._old(move)
        if not any(known.serves(model) for known in self._up.values()):
            decisions.append(_alert(model, "no replica serves the model"))
        if not old:
            self._forgo(owed)
        else:
            move.before = _usual([self._up[replica].version for replica in old])
            self._moves[model] = move
            if not self._wave(now_ns, move, decisions):
                if self._unwanted or self._drains(model):  # some will soon be standbys
                    self._wait(now_ns, move)
                else:
                    self._fail(move, "no standby to start", decisions)
        return decisions

    def standby(self, now_ns: int, event: Standby) -> Sequence[Decision]:
        replica = event.replica
        self._unwanted.discard(replica)
        if len(self._standbys) >= self._section.replicas_max and replica not in self._standbys:
            return ()
        self._standbys[replica] = Known(event.models, event.pooling, event.version)
        self._standbys = dict(sorted(self._standbys.items()))
        return self._go_on(now_ns)

    def taken(self, replica: int) -> str:
        """Someone else starts this standby. Returns the version that it is to have, of those that
        are served now; empty: the one it has will do."""
        standby = self._standbys.pop(replica, None)
        if standby is None or not standby.version:
            return ""
        serving = [
            known.version
            for other, known in self._up.items()
            if known.replaces(standby) and self.allowed(other)
        ]
        return _usual(serving) if serving and standby.version not in serving else ""

    def up(self, now_ns: int, spec: ReplicaUp) -> Sequence[Decision]:
        replica = spec.replica
        self._standbys.pop(replica, None)
        if len(self._up) < self._section.replicas_max or replica in self._up:
            self._up[replica] = Known(spec.models, spec.pooling, spec.version)
            self._up = dict(sorted(self._up.items()))
        new = self._new.get(replica)
        if replica in self._unwanted or (new is not None and replica not in self._up):
            return (Stop(replica),)
        if new is None or new.stage != "starting":
            return ()
        decisions: list[Decision] = []
        if spec.version == self._moves[new.model].version:
            self._new[replica] = New(new.model, "warming")
            decisions.append(Warm(replica))
        else:
            self._fail(self._moves[new.model], "another version was loaded", decisions, replica)
        return decisions

    def warmed(self, now_ns: int, event: Warmed) -> Sequence[Decision]:
        """How a new replica's warm-up went; not ok while it is starting: it will not come up."""
        new = self._new.get(event.replica)
        if new is None or new.stage == "ready" or (new.stage == "starting" and event.ok):
            return ()
        decisions: list[Decision] = []
        move = self._moves[new.model]
        if event.version != move.version:
            self._fail(move, "another version was loaded", decisions, event.replica)
        elif not event.ok:
            starting = new.stage == "starting"
            cause = "the new replica did not start" if starting else "the warm-up failed"
            self._fail(move, cause, decisions, event.replica)
        else:
            self._new[event.replica] = New(new.model, "ready")
            wave = [other for other in self._new.values() if other.model == move.model]
            if all(other.stage == "ready" for other in wave):
                self._switch(now_ns, move, decisions)
        return decisions

    def emptied(self, now_ns: int, replica: int) -> Sequence[Decision]:
        """Nothing is in flight there."""
        drain = self._draining.get(replica)
        if drain is None or drain.stopped or drain.kept:
            return ()
        self._draining[replica] = Drain(drain.model, stopped=True)
        return (Stop(replica),)

    def down(
        self, now_ns: int, replica: int, died: bool = False, card: bool = False
    ) -> Sequence[Decision]:
        """A replica is gone, or a standby cannot be started any more.

        Args:
            died: nobody stopped it: it may come up again as it was.
            card: its card is to blame.
        """
        known = self._up.pop(replica, None)
        self._standbys.pop(replica, None)
        self._unwanted.discard(replica)
        if self._draining.pop(replica, None) is not None:
            if died:
                self._not_again(replica)
            return self._go_on(now_ns)
        new = self._new.pop(replica, None)
        decisions: list[Decision] = []
        if new is not None:
            self._fail(self._moves[new.model], "a new replica went down", decisions, replica)
            return decisions
        move = self._watched(known) if died and not card else None
        if move is not None:
            cause = "a new replica went down"
            gone = replica if self._makes_up(move) else -1
            self._undo(now_ns, move, cause, (("replica", replica),), decisions, gone=gone)
            self._not_again(replica)
        return decisions

    def _not_again(self, replica: int) -> None:
        """What runs there is not wanted any more, if it comes up once more."""
        if len(self._new) + len(self._unwanted) < self._section.replicas_max:
            self._unwanted.add(replica)

    def isolated(self, replica: int) -> Sequence[Decision]:
        """Its card broke: nothing that warms up there will ever take requests."""
        new = self._new.get(replica)
        decisions: list[Decision] = []
        if new is not None:
            self._fail(self._moves[new.model], "a new replica's card broke", decisions, replica)
        return decisions

    def doubted(self, now_ns: int, replica: int, why: str) -> Sequence[Decision]:
        """It is out, or would be if it might."""
        taken = why in DOUBTS and replica not in self._new
        move = self._watched(self._up.get(replica)) if taken else None
        decisions: list[Decision] = []
        if move is not None:
            cause = f"a new replica is out: {why}"
            self._undo(now_ns, move, cause, (("replica", replica),), decisions, replica)
        return decisions

    def breaker_opened(
        self, now_ns: int, model: str, version: str, figures: tuple[tuple[str, int], ...]
    ) -> Sequence[Decision]:
        """A breaker of this model opened; ``version`` is empty where it is not by version."""
        move = self._moves.get(model)
        decisions: list[Decision] = []
        if move is None:
            return ()
        alone = move.phase == "watching" and version in ("", move.version)
        if alone or (version == move.version and self._between(move)):
            self._undo(now_ns, move, "a breaker opened", figures, decisions)
        return decisions

    def covers(self, replica: int) -> bool:
        """Does nobody else need to see to it that something takes its place, should it be lost?
        Either it takes no requests, or an old one that is kept does."""
        move = self._watched(self._up.get(replica))
        return self.holds(replica) or (move is not None and self._makes_up(move))

    def _makes_up(self, move: Move) -> bool:
        """Is what takes the place of a lost new replica to be seen to here? Old ones that are there
        do, or, between waves, the standby that is on its way."""
        return move.phase != "watching" or bool(self._returning(move))

    # Time

    def deadline_ns(self) -> int | None:
        if not self._moves:
            return None
        dues = (move.due_ns for move in self._moves.values())
        return min((due_ns for due_ns in dues if due_ns is not None), default=None)

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        if not self._moves:
            return ()
        decisions: list[Decision] = []
        for move in list(self._moves.values()):
            if self._moves.get(move.model) is not move:
                continue
            if move.due_ns is None or now_ns < move.due_ns:
                continue
            if move.phase == "starting":
                self._fail(move, "the new replicas took too long to come up", decisions)
            elif move.phase == "watching":
                self._let_go(move.model)
                self._wait(now_ns, move)
                decisions += self._go_on(now_ns)
            else:
                move.due_ns = None
                left = len(self._old(move)) + self._drains(move.model)
                figures = (("replaced", move.replaced), ("left", left))
                waits = "waiting for old requests to end, and for standbys"
                decisions.append(_alert(move.model, "the rollout is not over yet", figures, waits))
        return decisions

    # What happens to a rollout

    def _wave(self, now_ns: int, move: Move, decisions: list[Decision]) -> bool:
        """Start a standby for each old replica, as far as there are any. False: there is none."""
        room = self._section.replicas_max - len(self._new) - len(self._unwanted)
        chosen: list[int] = []
        wanted = [self._up[old] for old in self._old(move)]
        if move.owed >= 0:
            wanted[:0] = [each for each in self._up.values() if each.serves(move.model)][:1]
        for old in wanted[: max(0, room)]:
            for replica, known in self._standbys.items():
                if replica not in chosen and known.replaces(old):
                    chosen.append(replica)
                    break
        if not chosen:
            return False
        for replica in chosen:
            del self._standbys[replica]
            self._new[replica] = New(move.model)
            decisions.append(Start(replica, move.version))
        move.phase = "starting"
        move.due_ns = now_ns + self._section.start_most_ms * NS_PER_MS
        return True

    def _switch(self, now_ns: int, move: Move, decisions: list[Decision]) -> None:
        """Everything of the wave is ready: it takes the place of as many old replicas."""
        wave = [replica for replica, new in self._new.items() if new.model == move.model]
        old = self._old(move)
        for replica in wave:
            del self._new[replica]
        drained = self._exchange(move, wave, old, f"rollout of {move.version}", decisions)
        if self._section.watch_ms and move.undoes is None and not old:
            self._draining |= {replica: Drain(move.model, kept=True) for replica in drained}
            move.phase = "watching"
            move.due_ns = now_ns + self._section.watch_ms * NS_PER_MS
            return
        self._wait(now_ns, move)
        decisions += self._go_on(now_ns)

    def _exchange(
        self, move: Move, coming: list[int], going: list[int], why: str, decisions: list[Decision]
    ) -> list[int]:
        """All of ``coming`` take requests, and as many of ``going`` are drained, and taken from the
        list, as can be replaced by them. Returns these."""
        drained: list[int] = []
        for replica in coming:
            decisions.append(Rotated(replica, "in", why))
            known = self._up[replica]
            if move.owed >= 0:
                self.exchanged.append((replica, move.owed))
                move.owed = -1
                continue
            leaving = next((other for other in going if known.replaces(self._up[other])), None)
            if leaving is not None:
                going.remove(leaving)
                drained.append(leaving)
                self.exchanged.append((replica, leaving))
                self._draining[leaving] = Drain(move.model)
                move.replaced += 1
                decisions.append(Rotated(leaving, "draining", why))
        return drained

    def _wait(self, now_ns: int, move: Move) -> None:
        """Until what drains is empty and stopped, and there is a standby to go on with."""
        move.phase = "draining"
        move.due_ns = now_ns + self._section.drain_alarm_ms * NS_PER_MS

    def _go_on(self, now_ns: int) -> Sequence[Decision]:
        """Something was drained, or a standby is there: what is finished, and what begins?"""
        decisions: list[Decision] = []
        for move in list(self._moves.values()):
            if move.phase != "draining" or self._drains(move.model):
                continue
            if not self._old(move) and move.owed < 0:
                del self._moves[move.model]
            else:
                self._wave(now_ns, move, decisions)
        return decisions

    # The way back

    def _undo(
        self,
        now_ns: int,
        move: Move,
        cause: str,
        figures: tuple[tuple[str, int], ...],
        decisions: list[Decision],
        worst: int = -1,
        gone: int = -1,
    ) -> None:
        """The new version does not do: go back, and say so."""
        back, left = self._roll_back(now_ns, move, decisions, worst, gone)
        figures = (*figures, ("back", back), ("left", left))
        action = "standbys are started with it" if left else "it serves again"
        action = f"back to {move.before or 'the version before'}: {action}"
        decisions.append(_alert(move.model, f"{ROLLED_BACK}: {cause}", figures, action))

    def _roll_back(
        self,
        now_ns: int,
        move: Move,
        decisions: list[Decision],
        worst: int = -1,
        gone: int = -1,
    ) -> tuple[int, int]:
        """What is kept takes requests again, ``worst`` leaves first. Returns how many old replicas
        came back, and how many new ones still are to be replaced.

        Args:
            gone: a new one that is down already: the first that comes back takes its place.
        """
        model = move.model
        self._stop_new(model, decisions)
        bad = move.version
        back = Move(model, move.before, "draining", None, before=bad, undoes=bad, owed=gone)
        self._moves[model] = back
        new = sorted(self._old(back), key=lambda replica: replica != worst)
        kept = self._returning(move)
        for replica in kept:
            del self._draining[replica]
        self._let_go(model)  # what is kept for nothing
        why = f"rollback of {bad}"
        self._exchange(back, kept, new, why, decisions)
        self.undone.append(model)
        if not self._wave(now_ns, back, decisions):
            self._wait(now_ns, back)
            decisions += self._go_on(now_ns)
        return len(kept), len(new)

    def _watched(self, known: Known | None) -> Move | None:
        """The rollout that is watched, if the replica has what it brought."""
        for move in self._moves.values():
            if known is None or not known.serves(move.model):
                continue
            if move.phase == "watching" or self._between(move):
                return move if known.version == move.version else None
        return None

    def _between(self, move: Move) -> bool:
        """Some have the new version, others are still to get it."""
        watches = self._section.watch_ms > 0 and move.undoes is None
        return watches and move.replaced > 0 and bool(self._old(move))

    def _returning(self, move: Move) -> list[int]:
        """Old replicas that could take requests again at once."""
        return [
            replica
            for replica, drain in self._draining.items()
            if drain.model == move.model and not drain.stopped
            and (drain.kept or self._up[replica].version == move.before)
            and not self._is_isolated(replica)
        ]  # fmt: skip

    def _kept(self, model: str) -> list[int]:
        return [
            replica
            for replica, drain in self._draining.items()
            if drain.kept and drain.model == model
        ]

    def _let_go(self, model: str) -> None:
        """What was kept is stopped when it is empty."""
        for replica in self._kept(model):
            self._draining[replica] = Drain(model)

    # The end

    def _fail(
        self, move: Move, cause: str, decisions: list[Decision], replica: int | None = None
    ) -> None:
        left = len(self._old(move))
        self._end(move, decisions)
        self._forgo(move.owed)
        figures = [("replaced", move.replaced), ("left", left)]
        if replica is not None:
            figures.insert(0, ("replica", replica))
        decisions.append(
            _alert(move.model, cause, tuple(figures), "given up; what served serves on")
        )

    def _forgo(self, owed: int) -> None:
        if owed >= 0:
            self.forgone.append(owed)

    def _end(self, move: Move, decisions: list[Decision]) -> None:
        """The rollout is over: what it has started and not yet put to use is stopped."""
        del self._moves[move.model]
        self._let_go(move.model)
        self._stop_new(move.model, decisions)

    def _stop_new(self, model: str, decisions: list[Decision]) -> None:
        """What was started for the present wave is not put to use."""
        for replica in [one for one, new in self._new.items() if new.model == model]:
            started = self._new.pop(replica).stage == "starting"
            if replica in self._up:
                self._unwanted.add(replica)
                decisions.append(Stop(replica))
            elif started:
                self._unwanted.add(replica)

    def _back(self, model: str, version: str, decisions: list[Decision]) -> None:
        """What was being drained and has the version that is wanted now comes back."""
        for replica, drain in list(self._draining.items()):
            wanted = drain.model == model and self._up[replica].version == version
            if wanted and not drain.stopped and not self._is_isolated(replica):
                del self._draining[replica]
                decisions.append(Rotated(replica, "in", f"rollout of {version}"))

    def _old(self, move: Move) -> list[int]:
        """Replicas that serve the model with a version that is to go, and take requests, by id."""
        goes = move.undoes
        return [
            replica
            for replica, known in self._up.items()
            if known.serves(move.model)
            and (known.version != move.version if goes is None else known.version == goes)
            and self.allowed(replica)
        ]

    def _drains(self, model: str) -> int:
        return sum(drain.model == model for drain in self._draining.values())

    # Snapshots

    def state(self, now_ns: int) -> RolloutState:
        return RolloutState(
            list(self._up.items()),
            list(self._standbys.items()),
            list(self._new.items()),
            list(self._draining.items()),
            sorted(self._unwanted),
            [_shifted(move, -now_ns) for move in self._moves.values()],
        )

    def load(self, state: RolloutState, now_ns: int) -> None:
        self._up = dict(state.up)
        self._standbys = dict(state.standbys)
        self._new = dict(state.new)
        self._draining = dict(state.draining)
        self._unwanted = set(state.unwanted)
        self._moves = {move.model: _shifted(move, now_ns) for move in state.moves}

    def size(self) -> int:
        tables = (self._up, self._standbys, self._new, self._draining, self._unwanted, self._moves)
        return sum(len(table) for table in tables)

    def size_most(self) -> int:
        """New and unwanted ones together are as many as replicas, and so are the draining."""
        return 4 * self._section.replicas_max + self._section.rollouts_max


def _alert(
    model: str, cause: str, figures: tuple[tuple[str, int], ...] = (), action: str = "nothing done"
) -> Alert:
    return Alert(f"rollout {model}", cause, figures, action)


def _usual(versions: list[str]) -> str:
    """The most frequent one, of equals the first; empty without any."""
    return max(dict.fromkeys(versions), key=versions.count, default="")


def _shifted(move: Move, by_ns: int) -> Move:
    due_ns = None if move.due_ns is None else move.due_ns + by_ns
    return msgspec.structs.replace(move, due_ns=due_ns)
