"""One suite for all mechanisms: state, clock, bounds and parameters obey the same rules.

Each mechanism is used at random by a ``Use``: calls in an order that a composition might make, and
some that it should not. Two instances that are used by the same draws can be compared.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.breakers import MAY_TRY
from policy.compose import build_policy
from policy.events import (
    Arrived,
    Finished,
    Forecasted,
    GpuFault,
    Progress,
    QuotaLeased,
    RolloutRequested,
    SessionOwned,
    Standby,
    StepsRead,
    StoreChanged,
    Warmed,
)
from policy.leases import FAR_NS, UNUSED
from policy.leases import Use as LeaseUse
from policy.parameters import Parameters
from tests.dst.random_parameters import random_parameters
from tests.policy_support import MS, S, assert_integers, up

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 300
GAPS = (0, 0, 1, MS, 40 * MS, 700 * MS, 5 * S, 90 * S)
KINDS = ("", "timeout", "oom", "http_5xx", "replica_lost", "rejected", "backpressure", "silent")


class Use:
    """Uses one mechanism. What a call returns is given back with times counted from now."""

    def __init__(self, mechanism: Any, seed: int) -> None:
        self.mechanism = mechanism
        self.rng = random.Random(seed)  # noqa: S311
        self.last = 0
        self.calls: list[Callable[[int], object]] = []

    def act(self, now_ns: int) -> object:
        """One call, drawn at random."""
        return self.rng.choice(self.calls)(now_ns)

    def tick(self, now_ns: int) -> object:
        """What the composition does when the mechanism's deadline has come."""
        return self.mechanism.ticked(now_ns)

    def new(self) -> int:
        self.last += 1
        return self.last

    def known(self) -> int:
        return self.rng.randrange(max(1, self.last - 30), self.last + 2)

    def replica(self) -> int:
        return self.rng.randrange(6)


class UseLimits(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [self.arrive, self.arrive, self.over, self.serve, self.tick, self.ask]

    def arrive(self, now_ns: int) -> object:
        draw = self.rng.choice
        user, session = draw(("", "ann", "bob", "cid")), draw(("", "s1", "s2"))
        return self.mechanism.arrive(now_ns, self.new(), user, session, draw(("m", "n")))

    def over(self, now_ns: int) -> object:
        self.mechanism.over(now_ns, self.known())
        return list(self.mechanism.released(now_ns))

    def serve(self, now_ns: int) -> object:
        return self.mechanism.served(now_ns, self.rng.choice(("ann", "bob", "")), 500)

    def ask(self, now_ns: int) -> object:
        return self.mechanism.parked(self.known())

    def tick(self, now_ns: int) -> object:
        return list(self.mechanism.released(now_ns)), self.mechanism.ticked(now_ns)


class UseBreakers(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [
            self.gate, self.observe, self.observe, self.tick, self.answer, self.answer, self.renew,
        ]  # fmt: skip
        mechanism.peers_of = lambda replica: [peer for peer in range(4) if peer != replica]

    def answer(self, now_ns: int) -> object:
        """Answers of a few replicas; most of the first one's are bad, and one may try it."""
        told: list[object] = []
        for _ in range(self.rng.randrange(60)):
            replica = self.rng.randrange(4)
            bad: bool | None = self.rng.random() < (0.05 if replica else 0.95)
            bad = None if self.rng.random() < 0.1 else bad
            request = self.new()
            if self.mechanism.doubt(replica) == MAY_TRY:
                self.mechanism.sent(now_ns, request, replica)
                told.append(self.mechanism.tried(request))
                if self.rng.random() < 0.2:
                    continue
            told += self.mechanism.answered(now_ns, request, replica, bad)
            told.append(self.mechanism.doubt(replica))
        return told

    def renew(self, now_ns: int) -> object:
        return self.rng.random() < 0.05 and list(self.mechanism.renewed(now_ns, self.replica()))

    def key(self) -> tuple[str, str, str]:
        draw = self.rng.choice
        return draw(("m", "n")), draw(("", "v1")), draw(("", "search"))

    def gate(self, now_ns: int) -> object:
        return self.mechanism.gate(now_ns, self.new(), *self.key())

    def observe(self, now_ns: int) -> object:
        kind = self.rng.choice((*KINDS, "mismatch", "neutral"))
        score = self.rng.choice((-1, 100, 900))
        moved = self.mechanism.observe(now_ns, self.known(), *self.key(), kind, score)
        return list(moved), self.mechanism.open_keys()


class UseConfidence(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [self.judge, self.serve, self.tick]

    def judge(self, now_ns: int) -> object:
        draw = self.rng.randrange
        finished = Finished(self.new(), 0, 9, 0, 9, draw(-1, 4000), draw(5000), draw(1001))
        score = self.mechanism.score(finished)
        return score, self.mechanism.judge(score, draw(4) == 0, draw(5000), draw(4) > 0)

    def serve(self, now_ns: int) -> object:
        return self.mechanism.served(self.rng.randrange(5000))


class UseChains(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [self.arrive, self.arrive, self.answer, self.over, self.tick]

    def arrive(self, now_ns: int) -> object:
        draw = self.rng.choice
        event = Arrived(
            self.new(), "m", "chat", 40, line=draw(("", "search")), user=draw(("", "ann")),
            chain=draw(("", "a", "b", "c")), step=draw(("", "plan", "write")),
            resume=draw(("", "", f"c{self.known()}")),
        )  # fmt: skip
        ruling = self.mechanism.arrive(now_ns, event)
        if ruling is None:
            return None
        return ruling.kind, ruling.end_ns - now_ns, ruling.share_ns, ruling.checkpoint

    def answer(self, now_ns: int) -> object:
        request = self.known()
        save = self.mechanism.answered(request)
        if save and self.rng.random() < 0.8:
            self.mechanism.saved(request, f"c{request}")
        return save

    def over(self, now_ns: int) -> object:
        return self.mechanism.over(now_ns, self.known())

    def tick(self, now_ns: int) -> object:
        return list(self.mechanism.ended(now_ns)), list(self.mechanism.ticked(now_ns))


class UseHealth(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [
            self.come, self.send, self.send, self.first, self.answer, self.fail, self.go,
            self.read, self.fault, self.tick, self.ask,
        ]  # fmt: skip

    def come(self, now_ns: int) -> object:
        if self.rng.random() < 0.3:
            return self.mechanism.down(now_ns, self.replica())
        return self.mechanism.up(now_ns, up(self.replica()))

    def send(self, now_ns: int) -> object:
        replica = self.replica()
        if not self.mechanism.takes(replica):
            return False
        return self.mechanism.dispatched(now_ns, self.new(), replica, self.rng.randrange(S))

    def first(self, now_ns: int) -> object:
        return list(self.mechanism.first_token(now_ns, self.known(), self.replica()))

    def answer(self, now_ns: int) -> object:
        draw = self.rng.randrange
        times = (draw(4 * S), draw(S))
        return list(self.mechanism.answered(now_ns, self.known(), self.replica(), *times))

    def fail(self, now_ns: int) -> object:
        kind = self.rng.choice(KINDS[1:])
        return list(self.mechanism.failed(now_ns, self.known(), self.replica(), kind))

    def go(self, now_ns: int) -> object:
        return self.mechanism.gone(now_ns, self.known(), self.replica())

    def read(self, now_ns: int) -> object:
        return self.mechanism.progress(now_ns, Progress(self.replica(), self.rng.randrange(50)))

    def fault(self, now_ns: int) -> object:
        kind = self.rng.choice(("ecc_uncorrectable", "ecc_correctable", "xid_fatal", "xid_minor"))
        return list(self.mechanism.gpu_fault(now_ns, GpuFault(self.replica(), kind)))

    def ask(self, now_ns: int) -> object:
        return self.mechanism.state_of(self.replica()), self.mechanism.takes(self.replica())


class UseRollout(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [
            self.request, self.stand_by, self.come, self.come, self.warm, self.empty, self.tick,
            self.ask,
        ]  # fmt: skip

    def request(self, now_ns: int) -> object:
        draw = self.rng.choice
        event = RolloutRequested(draw(("m", "n")), draw(("v1", "v2")))
        return list(self.mechanism.requested(now_ns, event))

    def stand_by(self, now_ns: int) -> object:
        number = self.replica()
        return self.mechanism.standby(now_ns, Standby(number, f"r{number}", ("m",), S, "v1"))

    def come(self, now_ns: int) -> object:
        if self.rng.random() < 0.3:
            return self.mechanism.down(now_ns, self.replica())
        spec = up(self.replica(), models=("m",), version=self.rng.choice(("v1", "v2")))
        return list(self.mechanism.up(now_ns, spec) or ())

    def warm(self, now_ns: int) -> object:
        draw = self.rng.choice
        event = Warmed(self.replica(), draw(("v1", "v2")), draw((True, True, False)))
        return list(self.mechanism.warmed(now_ns, event))

    def empty(self, now_ns: int) -> object:
        return list(self.mechanism.emptied(now_ns, self.replica()))

    def ask(self, now_ns: int) -> object:
        return self.mechanism.allowed(self.replica()), self.mechanism.draining(self.replica())


class UseCapacity(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [
            self.stand_by, self.come, self.come, self.lose, self.forecast, self.empty, self.tick,
            self.ask,
        ]  # fmt: skip

    def models(self) -> tuple[str, ...]:
        return self.rng.choice(((), ("m",), ("n",)))

    def stand_by(self, now_ns: int) -> object:
        number = self.replica()
        event = Standby(number, f"r{number}", self.models(), self.rng.randrange(60) * S)
        return self.mechanism.standby(now_ns, event)

    def come(self, now_ns: int) -> object:
        if self.rng.random() < 0.3:
            return self.mechanism.down(now_ns, self.replica())
        return self.mechanism.up(now_ns, up(self.replica(), models=self.models()))

    def lose(self, now_ns: int) -> object:
        return list(self.mechanism.lost(now_ns, self.replica()))

    def forecast(self, now_ns: int) -> object:
        rates = tuple(self.rng.randrange(100_000) for _ in range(3))
        horizons = (60 * S, 120 * S, 600 * S)
        more = tuple(2 * rate for rate in rates)
        return self.mechanism.forecast(now_ns, Forecasted(horizons, rates, more, rates, more))

    def empty(self, now_ns: int) -> object:
        return list(self.mechanism.emptied(now_ns, self.replica()))

    def tick(self, now_ns: int) -> object:
        seen_type = import_module("policy.capacity").Seen
        if not self.mechanism.due_loop(now_ns):
            return list(self.mechanism.ticked(now_ns))
        draw = self.rng.randrange
        seen = [
            seen_type(pool, draw(4), draw(3000), draw(100), draw(S), draw(9000), draw(9000))
            for pool in ("", "m", "n")
        ]
        return list(self.mechanism.loop(now_ns, seen))

    def ask(self, now_ns: int) -> object:
        return (
            self.mechanism.draining(self.replica()),
            self.mechanism.turbo_extra_permille(now_ns),
        )


class UseAlerts(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [self.say, self.say, self.tick]

    def say(self, now_ns: int) -> object:
        key = f"k{self.rng.randrange(50)}"
        return list(self.mechanism.raised(now_ns, key, "cause", (("bad", 3),), "none"))


class UseDrift(Use):
    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [self.read, self.read, self.read, self.renew, self.ask, self.tick]

    def read(self, now_ns: int) -> object:
        draw = self.rng.randrange
        number = self.replica()
        event = StepsRead(number, draw(400), draw(3_000_000), draw(2_000_000))
        return list(self.mechanism.read(now_ns, event, f"r{number}"))

    def renew(self, now_ns: int) -> object:
        return self.rng.random() < 0.2 and self.mechanism.renewed(self.replica())

    def ask(self, now_ns: int) -> object:
        return self.mechanism.permille_of(self.replica())


class UseLeases(Use):
    """Which keys are in use depends on how often ``move`` was called."""

    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [
            self.want, self.want, self.move, self.give, self.own, self.change, self.switch,
            self.tick, self.tick, self.ask,
        ]  # fmt: skip
        self.mechanism.use = self.use
        self.mechanism.changed(0, StoreChanged("shared", 2))

    def key(self) -> tuple[str, str]:
        kind = self.rng.choice(("user", "model", "session", "all"))
        return kind, "" if kind == "all" else f"k{self.rng.randrange(4)}"

    def want(self, now_ns: int) -> object:
        return self.mechanism.want(
            now_ns, *self.key(), self.rng.randrange(9), self.rng.randrange(3)
        )

    def move(self, now_ns: int) -> object:
        return self.new()

    def use(self, kind: str, name: str) -> LeaseUse:
        """Last uses are far off, whatever the clock shows."""
        drawn = 5 * self.last + len(kind) + sum(name.encode())
        return LeaseUse(drawn % 3, drawn % 2, UNUSED.last_ns)

    def give(self, now_ns: int) -> object:
        kind, name = self.key()
        if kind == "session":
            return None
        draw = self.rng.randrange
        event = QuotaLeased(kind, name, draw(-1, 9), draw(-1, 3), draw(2) * draw(2 * S))  # type: ignore[arg-type]
        return self.mechanism.leased(now_ns, event)

    def own(self, now_ns: int) -> object:
        event = SessionOwned(f"k{self.rng.randrange(4)}", self.rng.choice((0, S, 2 * S)))
        return self.mechanism.owned(now_ns, event), self.mechanism.gained

    def change(self, now_ns: int) -> object:
        state = self.rng.choice(("alone", "shared", "shared", "lost", "lost"))
        return self.mechanism.changed(now_ns, StoreChanged(state, self.rng.randrange(1, 4)))

    def switch(self, now_ns: int) -> object:
        return self.rng.random() < 0.2 and self.mechanism.other_limits()

    def ask(self, now_ns: int) -> object:
        share = self.mechanism.share(now_ns, *self.key(), 9, self.rng.randrange(2))
        cut_off = self.mechanism.cut_off
        return cut_off, share and (
            *share[:2],
            share[2] if share[2] == FAR_NS else share[2] - now_ns,
        )


USES: dict[str, type[Use]] = {
    "limits": UseLimits, "breakers": UseBreakers, "confidence": UseConfidence,
    "chains": UseChains, "health": UseHealth, "rollout": UseRollout, "capacity": UseCapacity,
    "alerts": UseAlerts, "drift": UseDrift, "leases": UseLeases,
}  # fmt: skip
NO_SECTION: dict[str, Any] = {"leases": 3}
"""What they are built from: they are facts, and have no parameters of their own."""
TIGHT: dict[str, dict[str, Any]] = {
    "limits": {"user_per_s": 2, "session_per_s": 3, "parked_max": 20, "open_max": 60},
    "breakers": {"keys_max": 4},
    "chains": {"chains_max": 3},
    "health": {"replicas_max": 4, "in_flight_max": 8},
    "capacity": {"replicas_max": 4},
    "drift": {"replicas_max": 4, "steps_least": 150},
}
"""Small bounds, where there are any, so that random use comes up against them."""

every_mechanism = pytest.mark.parametrize("name", USES)
with_a_section = pytest.mark.parametrize("name", [name for name in USES if name not in NO_SECTION])


def section_of(name: str, rng: random.Random | None = None) -> Any:
    """The mechanism's section: small bounds, and what is drawn with ``rng``."""
    if name in NO_SECTION:
        return NO_SECTION[name]
    fixed = {name: {"enabled": True, **TIGHT.get(name, {})}}
    if rng is not None:
        return getattr(random_parameters(rng, **fixed), name)
    return getattr(msgspec.convert({"schema": 1, **fixed}, Parameters), name)


def made(name: str, section: Any) -> Any:
    return getattr(import_module(f"policy.{name}"), name.capitalize())(section)


def walked(name: str, seed: int) -> tuple[Use, int]:
    """A mechanism after some random use, and the time."""
    rng = random.Random(seed)  # noqa: S311
    use = USES[name](made(name, section_of(name, rng)), seed)
    now_ns = 0
    for _ in range(rng.randrange(STEPS)):
        now_ns += rng.choice(GAPS)
        use.act(now_ns)
    return use, now_ns


@every_mechanism
def test_the_protocol_is_there(name: str) -> None:
    mechanism = made(name, section_of(name))
    for method in ("ticked", "deadline_ns", "state", "load", "size", "size_most"):
        assert callable(getattr(mechanism, method))
    assert mechanism.size() <= mechanism.size_most()
    assert not hasattr(mechanism, "__dict__"), "it has no __slots__"


@every_mechanism
def test_a_fresh_state_is_a_round_trip(name: str) -> None:
    section = section_of(name)
    fresh = made(name, section).state(7)
    again = made(name, section)
    again.load(fresh, 7)
    assert again.state(7) == fresh
    assert type(fresh).__struct_config__.array_like


@every_mechanism
def test_a_state_has_no_floats_and_survives_the_wire(name: str) -> None:
    for seed in range(15):
        use, now_ns = walked(name, seed)
        state = use.mechanism.state(now_ns)
        assert_integers(msgspec.to_builtins(state))
        wire = msgspec.msgpack.encode(state)
        assert msgspec.msgpack.decode(wire, type=type(state)) == state
        assert msgspec.msgpack.encode(use.mechanism.state(now_ns)) == wire, "asking changes it"


@every_mechanism
def test_a_state_is_apart_from_what_it_was_taken_from(name: str) -> None:
    for seed in range(8):
        use, now_ns = walked(name, seed)
        state = use.mechanism.state(now_ns)
        before = msgspec.msgpack.encode(state)
        for _ in range(50):
            now_ns += 40 * MS
            use.act(now_ns)
        assert msgspec.msgpack.encode(state) == before


@every_mechanism
def test_a_loaded_state_goes_on_alike_with_another_clock(name: str) -> None:
    for seed in range(25):
        use, now_ns = walked(name, seed)
        shift_ns = (seed % 3) * 1_000 * S
        section = section_of(name, random.Random(seed))  # noqa: S311
        double = USES[name](made(name, section), seed)
        state = use.mechanism.state(now_ns)
        wire = msgspec.msgpack.encode(state)
        double.mechanism.load(msgspec.msgpack.decode(wire, type=type(state)), now_ns + shift_ns)
        double.last = use.last
        use.rng, double.rng = random.Random(seed + 1), random.Random(seed + 1)  # noqa: S311
        gaps = random.Random(seed + 2)  # noqa: S311
        for step in range(STEPS):
            now_ns += gaps.choice(GAPS)
            assert use.act(now_ns) == double.act(now_ns + shift_ns), f"seed {seed}, step {step}"
            due_ns, due_too_ns = use.mechanism.deadline_ns(), double.mechanism.deadline_ns()
            if due_too_ns is not None:
                due_too_ns = max(due_too_ns - shift_ns, 0)
            assert due_ns == due_too_ns or max(due_ns or 0, due_too_ns or 0) <= now_ns, (
                f"seed {seed}, step {step}"
            )
        assert use.mechanism.state(now_ns) == double.mechanism.state(now_ns + shift_ns)


@every_mechanism
def test_its_size_keeps_to_its_bound(name: str) -> None:
    for seed in range(15):
        section = section_of(name, random.Random(seed))  # noqa: S311
        use = USES[name](made(name, section), seed)
        now_ns = 0
        for step in range(2 * STEPS):
            now_ns += use.rng.choice(GAPS[:6])
            use.act(now_ns)
            assert use.mechanism.size() <= use.mechanism.size_most(), f"seed {seed}, step {step}"


@every_mechanism
def test_after_a_tick_the_deadline_lies_later(name: str) -> None:
    for seed in range(15):
        use, now_ns = walked(name, seed)
        for step in range(STEPS):
            now_ns += use.rng.choice(GAPS)
            use.act(now_ns)
            due_ns = use.mechanism.deadline_ns()
            if due_ns is not None and due_ns <= now_ns + S:
                now_ns = max(now_ns, due_ns)
                use.tick(now_ns)
                again_ns = use.mechanism.deadline_ns()
                assert again_ns is None or again_ns > now_ns, f"seed {seed}, step {step}"


@with_a_section
def test_its_parameters_are_described(name: str) -> None:
    section = getattr(Parameters(), name)
    fields = msgspec.structs.fields(type(section))
    assert fields[0].name == "enabled"
    assert (type(section).__doc__ or "").strip()
    for field in fields:
        info = msgspec.inspect.type_info(field.type)
        metas = [meta for meta in field.type.__metadata__ if isinstance(meta, msgspec.Meta)]
        text = " ".join(meta.description or "" for meta in metas)
        assert text.strip(), f"{field.name} is not described"
        if isinstance(info, msgspec.inspect.IntType):
            bounds = [meta for meta in metas if meta.ge is not None]
            assert bounds, f"{field.name} has no least value"
            assert "_" in field.name, f"{field.name} has no unit last in its name"


@with_a_section
def test_what_is_off_is_not_there(name: str) -> None:
    on = {other: {"enabled": True} for other in USES if other not in NO_SECTION}
    whole: Any = build_policy(msgspec.convert({"schema": 1, **on}, Parameters))
    assert name in whole.mechanisms
    off = on | {name: {"enabled": False}}
    without: Any = build_policy(msgspec.convert({"schema": 1, **off}, Parameters))
    assert set(without.mechanisms) == set(whole.mechanisms) - {name}
