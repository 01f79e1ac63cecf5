"""Limits: how many requests of a user, a session, a model, and of all, go on at once and a second.

They pace: a request over a limit is parked, and released once all of its limits have room. Every
limit is checked before any is charged. A rate is exact: in no half-open second do more go on.

A session's requests go in order of arrival, and only its first is a candidate. The candidates of a
user for one model form a lane, oldest first. While the user has room, its lanes stand in their
models' order, where the user with the least service of late comes first. So whatever frees room
touches the few keys concerned, never all that is parked.

Where several controllers share the limits, a key has room only for what ``policy.leases`` holds of
it here: its rate and its most change, and what went on before still counts. A session that is
another controller's waits as if it were full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import msgspec

from policy.leases import UNUSED, Leases, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.decisions import Decision
    from policy.leases import Kind
    from policy.parameters.limits import Limits as Section

PASS, PARKED, FULL = 0, 1, 2
SECOND = 1_000_000_000
UNLIMITED = 1 << 62
SERVICE_MOST = 1 << 62  # service stays a 64-bit number in a snapshot
FAR_NS = 1 << 62
KINDS: tuple[Kind, ...] = ("session", "model", "user")
"""What leases call the kinds of keys."""
HALVES_MOST = 20
"""Half-lives after which all service is scaled down, so that it stays small."""
KEEP_HALVES = 8
"""Half-lives for which a quiet user's service is remembered: 1/256 of it is left."""
# 2**10 * 2**(i/64), from 2**(1/64) in 1/2**32: what a token counts, i steps into a half-life.
WEIGHTS = tuple(((4_341_736_423**i) << 10) >> (32 * i) for i in range(64))


WHOLE = ("model_per_s", "model_in_flight_most", "global_in_flight_most")
"""Limits on more than one caller's requests."""


def within(own: Section, other: Section) -> Section:
    """``own``, with no more room for a model, and for all, than ``other`` leaves. Of a section that
    is off only that much counts."""
    if not other.enabled:
        return own
    if not own.enabled:
        if not any(getattr(other, name) for name in WHOLE):
            return own
        own = msgspec.structs.replace(
            own, enabled=True, user_per_s=0, session_per_s=0, user_in_flight_most=0,
            session_in_flight_most=0, order="arrival", **dict.fromkeys(WHOLE, 0),
        )  # fmt: skip
    least = {name: _least(getattr(own, name), getattr(other, name)) for name in WHOLE}
    return msgspec.structs.replace(own, open_max=min(own.open_max, other.open_max), **least)


def _least(first: int, second: int) -> int:
    """Of two limits, where 0 is none."""
    return min(first, second) if first and second else first or second


class KeyState(msgspec.Struct, array_like=True):
    """A user, session or model. Ages are times before now."""

    name: str
    service: int
    stamp_ages_ns: list[int]
    """Of what went on within the last second, oldest first."""
    last_age_ns: int


class LimitsState(msgspec.Struct, array_like=True):
    """The limits in canonical form. Requests are (request, user, session, model)."""

    in_flight: list[tuple[int, str, str, str]]
    parked: list[tuple[int, str, str, str]]
    users: list[KeyState]
    sessions: list[KeyState]
    models: list[KeyState]
    scale_age_ns: int
    """Since the instant at which a token counted least."""


class Key:
    """Whose requests are counted: what goes on, and when it last did."""

    __slots__ = (
        "due_ns", "in_flight", "last_ns", "most", "name", "next_stamp", "rate", "size", "stamps",
        "until_ns", "waits",
    )  # fmt: skip
    kind: ClassVar[int]

    def __init__(self, name: str, rate: int, most: int) -> None:
        self.name = name
        self.rate = rate
        self.most = most
        self.size = rate if rate < UNLIMITED else 0
        """How many instants are kept: the rate may be a share of this, and that may change."""
        self.until_ns = FAR_NS
        """When the share that it has runs out."""
        self.in_flight = 0
        self.waits = 0
        """How many are parked."""
        # A ring: the last ``size`` instants at which a request went on.
        self.stamps: list[int] = []
        self.next_stamp = 0
        self.last_ns = 0
        """When a request last came or went on."""
        self.due_ns = 0
        """When its window slides, while something waits for that; else 0."""

    def full(self, now_ns: int) -> bool:
        if self.in_flight >= self.most:
            return True
        rate, stamps = self.rate, self.stamps
        return len(stamps) >= rate and now_ns - stamps[self.next_stamp - rate] < SECOND

    def charge(self, now_ns: int) -> None:
        self.in_flight += 1
        self.last_ns = now_ns
        size, stamps = self.size, self.stamps
        if len(stamps) < size:
            stamps.append(now_ns)
        elif size > 0:
            at = self.next_stamp
            stamps[at] = now_ns
            self.next_stamp = at + 1 if at + 1 < size else 0

    def recent(self, now_ns: int) -> list[int]:
        """When requests went on within the last second, the oldest first."""
        stamps, at = self.stamps, self.next_stamp
        return [stamp for stamp in stamps[at:] + stamps[:at] if now_ns - stamp < SECOND]


class Session(Key):
    """Goes in order of arrival."""

    __slots__ = ("parked", "promoted")
    kind = 0

    def __init__(self, name: str, rate: int, most: int) -> None:
        super().__init__(name, rate, most)
        self.parked: list[int] = []
        self.promoted = False
        """Its first parked request is a candidate."""


class Model(Key):
    """Serves whoever was served least."""

    __slots__ = ("order",)
    kind = 1

    def __init__(self, name: str, rate: int, most: int) -> None:
        super().__init__(name, rate, most)
        self.order: list[tuple[int, int]] = []
        """(service of the user, oldest request) of the lanes of users that have room."""


class Lane:
    """A user's candidates for one model."""

    __slots__ = ("model", "place", "requests")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.requests: list[int] = []
        self.place: tuple[int, int] | None = None
        """Its entry in the model's order."""


class User(Key):
    """Has lanes, and was served so much."""

    __slots__ = ("lanes", "service")
    kind = 2

    def __init__(self, name: str, rate: int, most: int) -> None:
        super().__init__(name, rate, most)
        self.lanes: dict[str, Lane] = {}
        self.service = 0


K = TypeVar("K", bound=Key)
Keys = tuple[User, Session | None, Model]


class Table(Generic[K]):
    """The keys of one kind. Whoever was quiet for ``keep_ns`` is forgotten, and, when there are
    more than ``keys_max``, who has nothing open. The key "" has no limits and always stays."""

    __slots__ = ("_keep_ns", "_keys_max", "_line", "_make", "keys", "most", "rate")

    def __init__(
        self, make: Callable[[str, int, int], K], rate: int, most: int, keep_ns: int, keys_max: int
    ) -> None:
        self._make = make
        self.rate = rate
        """The whole limit; 0: none. So for the next."""
        self.most = most
        self._keep_ns = keep_ns
        self._keys_max = keys_max
        self._line: deque[K] = deque()
        """All keys but "": the first is looked at next."""
        self.keys: dict[str, K] = {"": make("", UNLIMITED, UNLIMITED)}

    def add(self, now_ns: int, name: str) -> K:
        """A key that is not known. As many as three others are looked at, so that the quiet ones
        go sooner than new ones come; more only while there are too many."""
        line = self._line
        looks = min(3, len(line))
        while looks > 0 or len(self.keys) > self._keys_max:
            looks -= 1
            key = line.popleft()
            quiet_ns = -1 if key.in_flight or key.waits else now_ns - key.last_ns
            if quiet_ns >= self._keep_ns or (quiet_ns >= 0 and len(self.keys) > self._keys_max):
                del self.keys[key.name]
            else:
                line.append(key)
        added = self.keys[name] = self._made(name)
        added.last_ns = now_ns
        line.append(added)
        return added

    def state(self, now_ns: int) -> list[KeyState]:
        return [
            KeyState(
                key.name,
                key.service if isinstance(key, User) else 0,
                [now_ns - stamp for stamp in key.recent(now_ns)],
                now_ns - key.last_ns,
            )
            for key in (self.keys[""], *self._line)
        ]

    def load(self, states: list[KeyState], now_ns: int) -> None:
        for state in states:
            key = self.keys.get(state.name)
            if key is None:
                key = self.keys[state.name] = self._made(state.name)
                self._line.append(key)
            if isinstance(key, User):
                key.service = state.service
            key.stamps = [now_ns - age_ns for age_ns in state.stamp_ages_ns]
            key.last_ns = now_ns - state.last_age_ns

    def _made(self, name: str) -> K:
        return self._make(name, self.rate or UNLIMITED, self.most or UNLIMITED)


class Limits:
    """All limits of one policy.

    Args:
        leases: what of them this controller holds, where others share them.
    """

    __slots__ = (
        "_away", "_by_model", "_by_session", "_by_user", "_ends", "_fair", "_global_most",
        "_global_until_ns", "_half_life_ns", "_in_flight", "_keys_max", "_leases", "_models",
        "_now_ns", "_open_max", "_parked", "_parked_max", "_request_tokens", "_scale_ns",
        "_sessions", "_shared", "_timers", "_users", "_waiting", "_weight", "_weight_until_ns",
        "_whole_most",
    )  # fmt: skip

    def __init__(self, section: Section, leases: Leases | None = None) -> None:
        self._leases = Leases(section.keys_max) if leases is None else leases
        self._shared = self._leases.sharing
        self._away: dict[str, Session] = {}
        """Sessions of which something is parked, and which are not here."""
        self._ends: list[tuple[int, int, str]] = []
        """A heap: (when, kind, name) of shares that run out; some may have been renewed."""
        self._fair = section.order == "least_served"
        self._whole_most = section.global_in_flight_most
        self._global_most = section.global_in_flight_most or UNLIMITED
        self._global_until_ns = FAR_NS
        self._half_life_ns = section.half_life_s * SECOND
        self._request_tokens = section.request_tokens if self._fair else 0
        self._open_max = section.open_max
        self._parked_max = section.parked_max
        self._by_user = bool(section.user_per_s or section.user_in_flight_most) or self._fair
        self._by_session = bool(section.session_per_s or section.session_in_flight_most)
        self._by_model = bool(section.model_per_s or section.model_in_flight_most)
        keep_ns = KEEP_HALVES * self._half_life_ns if self._fair else SECOND
        keys_max = self._keys_max = section.keys_max
        self._users = Table(
            User, section.user_per_s, section.user_in_flight_most, keep_ns, keys_max
        )
        self._sessions = Table(
            Session, section.session_per_s, section.session_in_flight_most, SECOND, keys_max
        )
        self._models = Table(
            Model, section.model_per_s, section.model_in_flight_most, SECOND, keys_max
        )
        self._in_flight: dict[int, Keys] = {}
        self._parked: dict[int, Keys] = {}
        self._waiting: dict[str, Model] = {}
        """Models in whose order somebody stands."""
        self._timers: list[tuple[int, int, str]] = []
        """(when, kind, name) of windows that slide, soonest first; one for each key at most."""
        self._now_ns = 0
        self._scale_ns = 0
        self._weight = 0
        self._weight_until_ns = 0

    # What happens to a request

    def arrive(self, now_ns: int, request: int, user: str, session: str, model: str) -> int:
        """PASS: it is charged and goes on. PARKED: ``released`` gives it back in time."""
        if len(self._in_flight) + len(self._parked) >= self._open_max:
            return FULL
        keys = self._keys(now_ns, user, session, model)
        owner, turn, asked = keys
        if self._shared:
            self._want(now_ns, keys)
        if (
            owner.full(now_ns)
            or (turn is not None and (turn.waits or turn.full(now_ns)))
            or (self._by_model and asked.full(now_ns))
            or len(self._in_flight) >= self._global_most
            or (self._parked and self._others_first(now_ns))
        ):
            if len(self._parked) >= self._parked_max:
                return FULL
            self._park(now_ns, request, keys)
            return PARKED
        self._charge(now_ns, request, keys)
        if self._parked:
            self._room(now_ns, keys)
        return PASS

    def adopt(self, request: int, user: str, session: str, model: str) -> None:
        """It went on under another policy: it counts as in flight, whatever the limits are.

        Only before anything arrives here. What exceeds ``open_max`` is not counted.
        """
        if request in self._in_flight or len(self._in_flight) >= self._open_max:
            return
        keys = self._in_flight[request] = self._keys(0, user, session, model)
        owner, turn, asked = keys
        owner.in_flight += 1
        if turn is not None:
            turn.in_flight += 1
        if self._by_model:
            asked.in_flight += 1

    def count(self, now_ns: int, request: int, user: str, session: str, model: str) -> None:
        """It went on by the leave of another policy, which rules beside this one: it is charged
        here too, whatever the limits are. What exceeds ``open_max`` is not counted."""
        if len(self._in_flight) >= self._open_max:
            return
        keys = self._keys(now_ns, user, session, model)
        self._charge(now_ns, request, keys)
        if self._parked:
            owner, turn, asked = keys
            # Their windows slide later now than they would have.
            self._disarm(owner)
            self._disarm(asked)
            if turn is not None:
                self._disarm(turn)
            if turn is not None and turn.promoted and turn.full(now_ns):
                self._demote(now_ns, turn)
            self._room(now_ns, keys)

    def disown(self, now_ns: int) -> None:
        """What is parked is another policy's to release."""
        for request in list(self._parked):
            self.over(now_ns, request)

    def over(self, now_ns: int, request: int) -> None:
        """It is settled, whatever became of it. ``released`` says who may go on now."""
        keys = self._in_flight.pop(request, None)
        if keys is None:
            keys = self._parked.pop(request, None)
            if keys is not None:
                self._withdraw(request, keys)
                self._room(now_ns, keys)
            return
        owner, turn, model = keys
        owner.in_flight -= 1
        if turn is not None:
            turn.in_flight -= 1
            if self._shared:
                turn.last_ns = now_ns  # it is given back some time after its last answer
        if self._by_model:
            model.in_flight -= 1
        if self._parked:
            self._room(now_ns, keys)

    def served(self, now_ns: int, user: str, tokens: int) -> None:
        """One of the user's requests took this many tokens of the service."""
        owner = self._users.keys.get(user) if self._fair else None
        if owner is not None:
            self._add_service(now_ns, owner, tokens)
            if owner.lanes:
                self._stand(now_ns, owner)

    def released(self, now_ns: int) -> Sequence[int]:
        """Parked requests that go on now, in this order; each is charged."""
        gone: list[int] = []
        while (request := self.next_up(now_ns)) is not None:
            self.release(now_ns, request)
            gone.append(request)
        return gone

    def next_up(self, now_ns: int) -> int | None:
        """The parked request that may go on now, before all others."""
        if not self._parked:
            return None
        self._wake(now_ns)
        return self._first()

    def release(self, now_ns: int, request: int) -> None:
        """What ``next_up`` gave goes on, and is charged."""
        keys = self._parked.pop(request)
        self._withdraw(request, keys)
        self._charge(now_ns, request, keys)
        self._room(now_ns, keys)

    def parked(self, request: int) -> bool:
        return request in self._parked

    def passed(self, request: int) -> bool:
        """Does it count as in flight?"""
        return request in self._in_flight

    def bounded_by(self, now_ns: int, section: Section) -> Limits:
        """What is in flight here, and was of late, under other limits; nothing is parked there."""
        limits = Limits(section, self._leases)
        limits.load(msgspec.structs.replace(self.state(now_ns), parked=[]), now_ns)
        return limits

    def holds_back(self, session: str) -> bool:
        """Is something of the session parked?"""
        turn = self._sessions.keys.get(session) if session else None
        return turn is not None and turn.waits > 0

    # What is shared with other controllers

    def changed(self, now_ns: int) -> None:
        """The store's state has: every key has its share, or all of its limit."""
        self._shared = self._leases.sharing
        if self._whole_most and self._parked:
            self._leases.want(now_ns, "all", "", 0, self._whole_most)
        self._lend_global(now_ns)
        for table in (self._users, self._sessions, self._models):
            for _, key in sorted(table.keys.items()):  # what is wanted is remembered in this order
                if key.waits:
                    self._want_key(now_ns, key)
                self._lend(now_ns, key)

    def lent(self, now_ns: int, kind: Kind, name: str) -> None:
        """The leases hold something else of this key now."""
        key = None if kind == "all" else self._key(kind, name)
        if kind == "all":
            self._lend_global(now_ns)
        elif key is not None:
            self._lend(now_ns, key)

    def spent(self, now_ns: int, session: str, ages_ns: Sequence[int]) -> None:
        """So long ago requests of the session went on elsewhere. ``lent`` is to follow."""
        turn = self._sessions.keys.get(session) if session else None
        if turn is None or not turn.size:
            return
        stamps = turn.recent(now_ns)
        stamps += [now_ns - age_ns for age_ns in ages_ns if age_ns < SECOND]
        self._disarm(turn)
        turn.stamps, turn.next_stamp = sorted(stamps)[-turn.size :], 0

    def foreign(self, now_ns: int, session: str) -> bool:
        """Is it a session that goes in order, and is not here?"""
        if not (session and self._by_session):
            return False
        sessions = self._sessions
        return self._leases.share(now_ns, "session", session, sessions.rate, sessions.most) is None

    def away(self) -> list[int]:
        """What is parked of sessions that are not here, in order of arrival."""
        return sorted(request for turn in self._away.values() for request in turn.parked)

    def use(self, kind: Kind, name: str) -> Use:
        """What a limit is used for here; nothing, where it is none."""
        if kind == "all":
            if not self._whole_most:
                return UNUSED
            return Use(len(self._in_flight), len(self._parked), UNUSED.last_ns)
        key = self._key(kind, name)
        return UNUSED if key is None else Use(key.in_flight, key.waits, key.last_ns)

    def _key(self, kind: Kind, name: str) -> Key | None:
        """What has a limit that can be shared."""
        table = self._table(KINDS.index(kind))
        return table.keys.get(name) if name and (table.rate or table.most) else None

    def _table(self, kind: int) -> Table[Session] | Table[Model] | Table[User]:
        return (self._sessions, self._models, self._users)[kind]

    def _want(self, now_ns: int, keys: Keys) -> None:
        """Say what a request needs. What is not held has no room."""
        for key in keys:
            if key is not None and key.name:
                self._want_key(now_ns, key)
                self._lend(now_ns, key)
        if self._whole_most:
            self._leases.want(now_ns, "all", "", 0, self._whole_most)
            self._lend_global(now_ns)
        self._run_out(now_ns)

    def _want_key(self, now_ns: int, key: Key) -> None:
        table = self._table(key.kind)
        if key.name and (table.rate or table.most):
            self._leases.want(now_ns, KINDS[key.kind], key.name, table.rate, table.most)

    def _lend(self, now_ns: int, key: Key) -> None:
        """The key has room for its share, and for nothing without one."""
        if not key.name:
            return
        table = self._table(key.kind)
        kind = KINDS[key.kind]
        share = self._leases.share(now_ns, kind, key.name, table.rate, table.most)
        if share is None:
            key.until_ns = FAR_NS
            self._resize(now_ns, key, key.rate, 0)
            return
        per_s, most, until_ns = share
        if until_ns != key.until_ns:
            key.until_ns = until_ns
            if until_ns < FAR_NS:
                heappush(self._ends, (until_ns, key.kind, key.name))
        self._resize(now_ns, key, per_s or UNLIMITED, most or UNLIMITED)

    def _lend_global(self, now_ns: int) -> None:
        share = self._leases.share(now_ns, "all", "", 0, self._whole_most)
        if share is None:
            self._global_most, self._global_until_ns = 0, FAR_NS
        else:
            self._global_most, self._global_until_ns = share[1] or UNLIMITED, share[2]

    def _resize(self, now_ns: int, key: Key, rate: int, most: int) -> None:
        """Other limits from now on; what went on within the last second counts still."""
        if rate == key.rate and most == key.most:
            return
        self._now_ns = now_ns
        self._disarm(key)
        key.rate, key.most = rate, most
        if not key.waits:
            return
        if isinstance(key, Session):
            self._note_away(key)
            if key.promoted and self._holds(now_ns, key):
                self._demote(now_ns, key)
            else:
                self._promote(now_ns, key)
        elif isinstance(key, User):
            self._stand(now_ns, key)
        elif isinstance(key, Model) and key.order:
            self._holds(now_ns, key)

    def _note_away(self, turn: Session) -> None:
        if turn.waits and not turn.most:
            self._away[turn.name] = turn
        else:
            self._away.pop(turn.name, None)

    def _run_out(self, now_ns: int) -> None:
        """Shares that have run out give no more room."""
        ends = self._ends
        while ends and ends[0][0] <= now_ns:
            until_ns, kind, name = heappop(ends)
            key = self._table(kind).keys.get(name)
            if key is not None and key.until_ns == until_ns:
                self._lend(now_ns, key)
        if self._global_until_ns <= now_ns:
            self._lend_global(now_ns)

    # What every mechanism has

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        """Nothing by itself: ``released`` is called at every tick too."""
        self._wake(now_ns)
        return ()

    def deadline_ns(self) -> int | None:
        """When a window slides for something parked; what is in flight may free it earlier."""
        if self._waiting and self._first() is not None:
            return self._now_ns
        return self._timers[0][0] if self._timers else None

    def state(self, now_ns: int) -> LimitsState:
        return LimitsState(
            _named(self._in_flight),
            _named(self._parked),
            self._users.state(now_ns),
            self._sessions.state(now_ns),
            self._models.state(now_ns),
            now_ns - self._scale_ns,
        )

    def load(self, state: LimitsState, now_ns: int) -> None:
        """Go on from a state. Only before anything else."""
        self._now_ns = self._weight_until_ns = now_ns
        self._scale_ns = now_ns - state.scale_age_ns
        self._users.load(state.users, now_ns)
        self._sessions.load(state.sessions, now_ns)
        self._models.load(state.models, now_ns)
        for request, user, session, model in state.in_flight:
            self.adopt(request, user, session, model)
        if self._leases.sharing:
            self.changed(now_ns)
        for request, user, session, model in state.parked:
            self._park(now_ns, request, self._keys(now_ns, user, session, model))

    def size(self) -> int:
        keys = len(self._users.keys) + len(self._sessions.keys) + len(self._models.keys)
        return keys + len(self._in_flight) + len(self._parked)

    def size_most(self) -> int:
        return 3 * (self._keys_max + 1) + self._open_max

    # Keys

    def _keys(self, now_ns: int, user: str, session: str, model: str) -> Keys:
        """Whose request it is: known, or added. Where there is no limit, the key is ""."""
        turn = None
        if session and self._by_session:
            sessions = self._sessions
            turn = sessions.keys.get(session) or sessions.add(now_ns, session)
        if not self._by_user:
            user = ""
        if not self._by_model:
            model = ""
        users, models = self._users, self._models
        return (
            users.keys.get(user) or users.add(now_ns, user),
            turn,
            models.keys.get(model) or models.add(now_ns, model),
        )

    def _others_first(self, now_ns: int) -> bool:
        """Has a window just slid for others? The tick that is due lets them go."""
        self._wake(now_ns)
        return self._first() is not None

    def _charge(self, now_ns: int, request: int, keys: Keys) -> None:
        """It goes on. Where others are parked, the caller calls ``_room`` afterwards."""
        owner, turn, model = keys
        self._in_flight[request] = keys
        owner.charge(now_ns)
        if turn is not None:
            turn.charge(now_ns)
        if self._by_model:
            model.charge(now_ns)
        if self._fair:
            self._add_service(now_ns, owner, self._request_tokens)

    # What is parked

    def _park(self, now_ns: int, request: int, keys: Keys) -> None:
        owner, turn, model = keys
        self._wake(now_ns)
        self._parked[request] = keys
        owner.waits += 1
        model.waits += 1
        if turn is None:
            self._offer(now_ns, request, keys)
        else:
            turn.waits += 1
            if turn.promoted and request < turn.parked[0]:
                self._unpromote(now_ns, turn)  # this one waited before it, under another policy
            insort(turn.parked, request)
            self._promote(now_ns, turn)
            if not turn.most:
                self._note_away(turn)

    def _promote(self, now_ns: int, turn: Session) -> None:
        """Its first request becomes a candidate, unless the session has no room."""
        if not turn.parked:
            self._disarm(turn)
        elif not turn.promoted and not self._holds(now_ns, turn):
            turn.promoted = True
            request = turn.parked[0]
            self._offer(now_ns, request, self._parked[request])

    def _demote(self, now_ns: int, turn: Session) -> None:
        """The session has no room any more: its first request is no candidate now."""
        self._unpromote(now_ns, turn)
        self._promote(now_ns, turn)

    def _unpromote(self, now_ns: int, turn: Session) -> None:
        request = turn.parked[0]
        owner, _, model = self._parked[request]
        turn.promoted = False
        self._leave_lane(owner, model, request)
        self._stand(now_ns, owner)

    def _offer(self, now_ns: int, request: int, keys: Keys) -> None:
        owner, _, model = keys
        lane = owner.lanes.get(model.name)
        if lane is None:
            lane = owner.lanes[model.name] = Lane(model)
        insort(lane.requests, request)
        if lane.requests[0] == request:
            self._stand(now_ns, owner)

    def _withdraw(self, request: int, keys: Keys) -> None:
        """It waits no longer. The caller calls ``_room`` after what else it has to do."""
        owner, turn, model = keys
        owner.waits -= 1
        model.waits -= 1
        if turn is not None:
            turn.waits -= 1
            if not turn.most:
                self._note_away(turn)
            at = bisect_left(turn.parked, request)
            del turn.parked[at]
            if at or not turn.promoted:
                return  # it was no candidate
            turn.promoted = False
        self._leave_lane(owner, model, request)

    def _leave_lane(self, owner: User, model: Model, request: int) -> None:
        lane = owner.lanes[model.name]
        self._leave(lane)
        del lane.requests[bisect_left(lane.requests, request)]
        if not lane.requests:
            del owner.lanes[model.name]

    def _room(self, now_ns: int, keys: Keys) -> None:
        """What these keys have room for changed: who is a candidate, and who stands in order?"""
        owner, turn, model = keys
        self._now_ns = now_ns
        if turn is not None:
            self._promote(now_ns, turn)
        self._stand(now_ns, owner)
        if model.order:
            self._holds(now_ns, model)

    def _stand(self, now_ns: int, owner: User) -> None:
        """While the user has room, its lanes stand where its service puts them; else nowhere."""
        for lane in owner.lanes.values():
            self._leave(lane)
        if not owner.lanes:
            self._disarm(owner)
        elif not self._holds(now_ns, owner):
            for lane in owner.lanes.values():
                model = lane.model
                lane.place = (owner.service if self._fair else 0, lane.requests[0])
                insort(model.order, lane.place)
                self._waiting[model.name] = model
                self._holds(now_ns, model)

    def _leave(self, lane: Lane) -> None:
        if lane.place is None:
            return
        model = lane.model
        del model.order[bisect_left(model.order, lane.place)]
        lane.place = None
        if not model.order:
            del self._waiting[model.name]
            self._disarm(model)

    def _first(self) -> int | None:
        """The parked request that goes on next, if any may."""
        if len(self._in_flight) >= self._global_most:
            return None
        best: tuple[int, int] | None = None
        for model in self._waiting.values():
            if not model.due_ns and model.in_flight < model.most:
                place = model.order[0]
                if best is None or place < best:
                    best = place
        return None if best is None else best[1]

    # Windows

    def _holds(self, now_ns: int, key: Key) -> bool:
        """Has the key no room? If time alone will give it some, its timer is set."""
        if not key.full(now_ns):
            return False
        if not key.due_ns and key.in_flight < key.most:
            key.due_ns = key.stamps[key.next_stamp - key.rate] + SECOND
            insort(self._timers, (key.due_ns, key.kind, key.name))
        return True

    def _disarm(self, key: Key) -> None:
        if key.due_ns:
            del self._timers[bisect_left(self._timers, (key.due_ns, key.kind, key.name))]
            key.due_ns = 0

    def _wake(self, now_ns: int) -> None:
        """Windows that have slid by now have room."""
        self._now_ns = now_ns
        if self._shared:
            self._run_out(now_ns)
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            _, kind, name = timers.pop(0)
            if kind == Session.kind:
                turn = self._sessions.keys[name]
                turn.due_ns = 0
                self._promote(now_ns, turn)
            elif kind == Model.kind:
                model = self._models.keys[name]
                model.due_ns = 0
                self._holds(now_ns, model)
            else:
                owner = self._users.keys[name]
                owner.due_ns = 0
                self._stand(now_ns, owner)

    # Service

    def _add_service(self, now_ns: int, owner: User, tokens: int) -> None:
        """Instead of all past service fading, what is new weighs more and more."""
        if now_ns >= self._weight_until_ns:
            self._weigh(now_ns)
        service = owner.service + tokens * self._weight
        owner.service = service if service < SERVICE_MOST else SERVICE_MOST

    def _weigh(self, now_ns: int) -> None:
        half_life_ns = self._half_life_ns
        steps = (now_ns - self._scale_ns) * 64 // half_life_ns
        if steps >= 64 * HALVES_MOST:
            halves = steps >> 6
            self._scale_ns += halves * half_life_ns
            steps &= 63
            for owner in self._users.keys.values():
                owner.service >>= halves
            for owner in {keys[0].name: keys[0] for keys in self._parked.values()}.values():
                self._stand(now_ns, owner)
        self._weight = WEIGHTS[steps & 63] << (steps >> 6)
        self._weight_until_ns = self._scale_ns + -(-(steps + 1) * half_life_ns // 64)


def _named(requests: dict[int, Keys]) -> list[tuple[int, str, str, str]]:
    return [
        (request, owner.name, "" if turn is None else turn.name, model.name)
        for request, (owner, turn, model) in sorted(requests.items())
    ]
