"""Leases: what this controller holds of limits and sessions that several controllers share.

``alone`` (as it begins) there is nothing to hold. ``shared``, a limit's share and a session are
asked for when a request needs them, and again before they run out, for as long as they are in use:
something of the key is open or parked, or was within the last second. A session that is not in use
is given back. With the store ``lost``, shares do not run out, sessions that are held are kept, and
no others are taken over.

What has its share is ``policy.limits``; this only knows what is held, until when, and what is
wanted. It is a fold of events, and the same for two policies that judge beside each other.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from policy.decisions import Lease, Release
from policy.facts import NS_MOST, Illegal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.decisions import Decision
    from policy.events import QuotaLeased, SessionOwned, StoreChanged

Kind = Literal["user", "model", "all", "session"]
State = Literal["alone", "shared", "lost"]

LEASE_NS = 1_500_000_000
"""How long a lease is given for."""
RENEW_NS = 400_000_000
"""After so much of it, it is asked for again; and so long an answer is waited for."""
RETRY_NS = 100_000_000
"""What another controller has is asked for again after this."""
IDLE_NS = 1_000_000_000
"""So long a key counts as in use after it was."""
UNHEARD_NS = 800_000_000
"""So long it may take until the store's loss is told: what has less left by then is asked for, or
it would have run out when the policy hears that it is to keep what it holds."""
FIRST_NS = 1_000_000_000
"""When a store is back, it may know nothing: for so long only holders ask, for what they hold."""
GRACE_NS = 1_000_000_000
"""So long a lost store may come back, before requests of sessions held elsewhere are refused."""
FAR_NS = 1 << 62
CONTROLLERS_MOST = 10_000
COUNT_MOST = 1 << 40


class Use(NamedTuple):
    """What a key is used for here."""

    used: int
    """Requests in flight."""
    waiting: int
    """Requests parked."""
    last_ns: int
    """When one last came or went on."""


UNUSED = Use(0, 0, -FAR_NS)


class Lent(msgspec.Struct, array_like=True, gc=False):
    """One key. In a snapshot its times are relative."""

    kind: Kind
    name: str
    want_per_s: int
    """The whole limit, of all controllers; 0: none. So for the next."""
    want_in_flight: int
    stale: bool = False
    """The limits have changed: the next request says what they are."""
    asked_per_s: int = 0
    """As ``want_per_s`` was when it was last asked for."""
    asked_in_flight: int = 0
    per_s: int = 0
    """What was given."""
    in_flight: int = 0
    given: bool = False
    until_ns: int = -1
    due_ns: int = 0
    """When it is looked at next."""
    asked_ns: int | None = None
    """When an answer was last asked for that has not come."""
    of_per_s: int = 0
    """As ``asked_per_s`` was when ``per_s`` was given: what the share is a share of."""
    of_in_flight: int = 0


class LeasesState(msgspec.Struct, array_like=True):
    """All that is held, in canonical form, times relative to now."""

    state: State
    controllers: int
    first_ns: int
    grace_ns: int
    """Negative: none is waited for."""
    cut_off: bool
    lent: list[Lent]


def _unused(_kind: Kind, _name: str) -> Use:
    return UNUSED


class Leases:
    """All leases of one controller.

    Args:
        keys_max: users, models and sessions at most, each.
    """

    __slots__ = (
        "_controllers", "_due", "_first_ns", "_grace_ns", "_lent", "cut_off", "due_ns", "gained",
        "keys_max", "sharing", "state_name", "use",
    )  # fmt: skip

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        self.use: Callable[[Kind, str], Use] = _unused
        """What a key is used for now."""
        self.forget()

    def forget(self) -> None:
        """It is alone, as it began."""
        self.state_name: State = "alone"
        self.sharing = False
        """Not alone."""
        self.cut_off = False
        """The store is lost, and was not back in time: what is elsewhere stays there."""
        self.gained = ""
        """The session that the last ``SessionOwned`` brought here."""
        self.due_ns = FAR_NS
        """When ``ticked`` has something to do, at the earliest."""
        self._controllers = 1
        self._first_ns = 0
        self._grace_ns = FAR_NS
        self._lent: dict[tuple[Kind, str], Lent] = {}
        # A heap: (when, kind, name) of what is looked at then; some may be outdated.
        self._due: list[tuple[int, Kind, str]] = []

    # What is held

    def share(
        self, now_ns: int, kind: Kind, name: str, per_s: int, in_flight: int
    ) -> tuple[int, int, int] | None:
        """What may be spent here of a limit, or of a session's: (per s, in flight, until); 0: no
        limit. None: nothing may go on now.

        Args:
            per_s: the whole limit; 0: none. So for the next.
        """
        if not self.sharing or not (per_s or in_flight):
            return per_s, in_flight, FAR_NS
        lent = self._lent.get((kind, name))
        lost = self.state_name == "lost"
        if kind == "session":
            if lent is None or not (lost or lent.until_ns > now_ns):
                return None
            return per_s, in_flight, FAR_NS if lost else lent.until_ns
        if lent is not None and lent.given and (lost or lent.until_ns > now_ns):
            own_per_s = _part(lent.per_s, lent.of_per_s, per_s)
            own_in_flight = _part(lent.in_flight, lent.of_in_flight, in_flight)
            if own_per_s >= 0 and own_in_flight >= 0:
                return own_per_s, own_in_flight, FAR_NS if lost else lent.until_ns
        if not lost:
            return None
        alike = self._controllers
        return per_s and max(1, per_s // alike), in_flight and max(1, in_flight // alike), FAR_NS

    def want(self, now_ns: int, kind: Kind, name: str, per_s: int, in_flight: int) -> None:
        """A request needs the key, which has this limit over all controllers (0: none)."""
        lent = self._lent.get((kind, name))
        if lent is None:
            if self.state_name == "shared":
                self._make_room()
                lent = self._lent[kind, name] = Lent(kind, name, per_s, in_flight)
                self._look(lent, max(now_ns, self._first_ns))
            return
        if lent.stale:
            lent.stale = False
        else:  # one of two policies that judge beside each other may have a tighter limit
            per_s, in_flight = max(per_s, lent.want_per_s), max(in_flight, lent.want_in_flight)
        if (per_s, in_flight) != (lent.want_per_s, lent.want_in_flight):
            lent.want_per_s, lent.want_in_flight = per_s, in_flight
            if self.state_name == "shared":
                self._look(lent, now_ns)

    def other_limits(self) -> None:
        """The policy has changed: what is held stays held, until its whole limit is told anew."""
        for lent in self._lent.values():
            lent.stale = True

    # What is told

    def changed(self, now_ns: int, event: StoreChanged) -> None:
        """How this controller stands to the store.

        Raises:
            Illegal: it cannot be. So for the next two.
        """
        if event.state not in ("alone", "shared", "lost"):
            raise Illegal(f"the store's state is {event.state!r}: alone, shared or lost")
        if not 1 <= event.controllers <= CONTROLLERS_MOST:
            raise Illegal(f"controllers is {event.controllers}: it is 1..{CONTROLLERS_MOST}")
        before = self.state_name
        if event.state == "alone":
            self.forget()
            return
        self.state_name, self.sharing = event.state, True
        self._controllers = event.controllers
        if event.state == "lost" and before != "lost":
            self._lost(now_ns)
        elif event.state == "shared" and before == "lost":
            self._found(now_ns)

    def leased(self, now_ns: int, event: QuotaLeased) -> None:
        """The share of a limit. One that was not asked for, or is no longer, changes nothing."""
        if (
            not -1
            <= min(event.per_s, event.in_flight)
            <= max(event.per_s, event.in_flight)
            <= (COUNT_MOST)
        ):
            raise Illegal(
                f"the share of {event.kind} {event.name} is {event.per_s} per s and"
                f" {event.in_flight} in flight: they lie within -1..{COUNT_MOST}"
            )
        if not 0 <= event.for_ns <= NS_MOST or (event.kind == "all") != (not event.name):
            raise Illegal(
                f"a share of {event.kind} {event.name!r} for {event.for_ns} ns: only all has no"
                f" name, and for_ns lies within 0..{NS_MOST}"
            )
        lent = self._lent.get((event.kind, event.name))
        if lent is None:
            return
        share = (event.per_s, event.in_flight)
        cut = lent.until_ns > now_ns and (
            _is_less(event.per_s, lent.per_s) or _is_less(event.in_flight, lent.in_flight)
        )
        lent.per_s, lent.in_flight, lent.given = *share, True
        lent.of_per_s, lent.of_in_flight = lent.asked_per_s, lent.asked_in_flight
        self._given(now_ns, lent, event.for_ns, 0 in share)
        if cut and self.state_name == "shared":
            self._look(lent, now_ns)  # the store hears that it is in force, and what is in flight

    def owned(self, now_ns: int, event: SessionOwned) -> None:
        """Whose a session is."""
        ages_ns = event.spent_ages_ns
        if not 0 <= event.for_ns <= NS_MOST or (
            ages_ns and not 0 <= min(ages_ns) <= max(ages_ns) <= NS_MOST
        ):
            raise Illegal(
                f"session {event.session}: for_ns is {event.for_ns} and spent_ages_ns {ages_ns}:"
                f" they lie within 0..{NS_MOST}"
            )
        lent = self._lent.get(("session", event.session))
        self.gained = ""
        if lent is None:
            return
        if event.for_ns and lent.until_ns <= now_ns:
            self.gained = event.session
        self._given(now_ns, lent, event.for_ns, not event.for_ns)

    def cut(self, now_ns: int) -> None:
        """See whether the lost store's time is over."""
        if self._grace_ns <= now_ns:
            self._grace_ns, self.cut_off = FAR_NS, True

    # What every mechanism has

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        """Ask for what is wanted, and give back what is not."""
        self.cut(now_ns)
        decisions: list[Decision] = []
        due = self._due
        while due and due[0][0] <= now_ns:
            at_ns, kind, name = heappop(due)
            lent = self._lent.get((kind, name))
            if lent is not None and lent.due_ns == at_ns:
                self._turn(now_ns, lent, decisions)
        self.due_ns = min(due[0][0] if due else FAR_NS, self._grace_ns)
        return decisions

    def deadline_ns(self) -> int | None:
        due = self._due
        while due and not self._still(due[0]):
            heappop(due)
        self.due_ns = min(due[0][0] if due else FAR_NS, self._grace_ns)
        return self.due_ns if self.due_ns < FAR_NS else None

    def state(self, now_ns: int) -> LeasesState:
        return LeasesState(
            self.state_name, self._controllers, max(0, self._first_ns - now_ns),
            -1 if self._grace_ns == FAR_NS else max(0, self._grace_ns - now_ns), self.cut_off,
            [
                msgspec.structs.replace(
                    lent,
                    until_ns=max(-1, lent.until_ns - now_ns),
                    due_ns=lent.due_ns - now_ns if self.state_name == "shared" else 0,
                    asked_ns=None if lent.asked_ns is None else lent.asked_ns - now_ns,
                )
                for lent in self._lent.values()
            ],
        )  # fmt: skip

    def load(self, state: LeasesState, now_ns: int) -> None:
        """Go on from a state. Only before anything else."""
        self.state_name, self.sharing = state.state, state.state != "alone"
        self._controllers, self.cut_off = state.controllers, state.cut_off
        self._first_ns = now_ns + state.first_ns
        self._grace_ns = FAR_NS if state.grace_ns < 0 else now_ns + state.grace_ns
        self.due_ns = self._grace_ns
        for saved in state.lent:
            lent = msgspec.structs.replace(
                saved,
                until_ns=now_ns + saved.until_ns,
                asked_ns=None if saved.asked_ns is None else now_ns + saved.asked_ns,
            )
            self._lent[lent.kind, lent.name] = lent
            if self.state_name == "shared":
                self._look(lent, now_ns + saved.due_ns)

    def size(self) -> int:
        return len(self._lent)

    def size_most(self) -> int:
        return 3 * self.keys_max + 1

    # Keys

    def _make_room(self) -> None:
        """Forget the oldest that is not in use, while there are too many."""
        looks = len(self._lent)
        while len(self._lent) >= self.size_most():
            key = next(iter(self._lent))
            lent = self._lent.pop(key)
            use = self.use(*key)
            looks -= 1
            if looks > 0 and (use.used or use.waiting):
                self._lent[key] = lent

    def _look(self, lent: Lent, at_ns: int) -> None:
        """Look at it then."""
        lent.due_ns = at_ns
        heappush(self._due, (at_ns, lent.kind, lent.name))
        self.due_ns = min(self.due_ns, at_ns)
        if len(self._due) > 64 + 4 * len(self._lent):
            self._due = [(each.due_ns, each.kind, each.name) for each in self._lent.values()]
            heapify(self._due)

    def _still(self, entry: tuple[int, Kind, str]) -> bool:
        lent = self._lent.get(entry[1:])
        return lent is not None and lent.due_ns == entry[0]

    def _turn(self, now_ns: int, lent: Lent, decisions: list[Decision]) -> None:
        """Ask for it if it is in use, else give it back."""
        use = self.use(lent.kind, lent.name)
        held = lent.until_ns > now_ns
        session = lent.kind == "session"
        idle_ns = use.last_ns + IDLE_NS
        if use.used or use.waiting:
            idle_ns = FAR_NS
        elif session and not held:
            idle_ns = now_ns
        if now_ns >= idle_ns:
            if session and lent.asked_ns is not None and now_ns - lent.asked_ns < LEASE_NS:
                # What it is given back before would else be taken for what comes after.
                self._look(lent, now_ns + RETRY_NS)
                return
            del self._lent[lent.kind, lent.name]
            if session and held:
                decisions.append(Release(lent.name))
            return
        if idle_ns < lent.until_ns - UNHEARD_NS:  # it is held until it may be given back
            self._look(lent, idle_ns)
            return
        lent.asked_per_s, lent.asked_in_flight = lent.want_per_s, lent.want_in_flight
        lent.asked_ns = now_ns
        asked = (0, 0) if session else (lent.want_per_s, lent.want_in_flight)
        decisions.append(Lease(lent.kind, lent.name, *asked, use.used))
        self._look(lent, min(now_ns + RENEW_NS, idle_ns))

    def _given(self, now_ns: int, lent: Lent, for_ns: int, nothing: bool) -> None:
        lent.until_ns = now_ns + for_ns
        lent.asked_ns = None
        if self.state_name != "shared":  # it was given just before the store was lost
            return
        renew_ns = RETRY_NS if nothing else max(for_ns * RENEW_NS // LEASE_NS, RETRY_NS)
        self._look(lent, now_ns if self._is_idle(now_ns, lent) else now_ns + renew_ns)

    def _is_idle(self, now_ns: int, lent: Lent) -> bool:
        use = self.use(lent.kind, lent.name)
        return not (use.used or use.waiting) and now_ns >= use.last_ns + IDLE_NS

    def _lost(self, now_ns: int) -> None:
        """Shares and sessions that are held stay; sessions that ran out may be others' now."""
        self.due_ns = self._grace_ns = now_ns + GRACE_NS
        self._due.clear()
        for key, lent in list(self._lent.items()):
            lent.asked_ns = None
            if lent.kind == "session" and lent.until_ns <= now_ns:
                del self._lent[key]

    def _found(self, now_ns: int) -> None:
        """The store is back: what is held runs out again, and is asked for before all else."""
        self._grace_ns, self.cut_off = FAR_NS, False
        self._first_ns = now_ns + FIRST_NS
        for lent in self._lent.values():
            if lent.given or lent.kind == "session":
                lent.until_ns = now_ns + LEASE_NS
                self._look(lent, now_ns)
            else:
                self._look(lent, self._first_ns)


def _is_less(share: int, before: int) -> bool:
    """Of two shares, where -1 is no limit."""
    return share >= 0 and not 0 <= before <= share


def _part(share: int, asked: int, whole: int) -> int:
    """What of a share, of a limit ``asked`` for, is that of one who has the limit ``whole`` (0:
    none): 0: no limit; -1: nothing."""
    if not whole:
        return 0
    if share < 0:
        return whole
    if not asked:  # it was asked for by one who has no such limit
        return -1
    return (min(share, whole) if asked <= whole else share * whole // asked) or -1
