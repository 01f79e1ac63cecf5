"""Several controllers and the store that they share: whatever befalls, limits hold over all.

The store is a plain model of what a real one must do. It gives a share only where all that others
may still spend leaves it: what was cut until they say that they know, and a second more; what ran
out, a second more. Questions and answers take their time, controllers die and come back, and the
store is lost and comes back, with or without what it knew.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.compose import build_policy, restore
from policy.decisions import Dispatch, Lease, Refused, Release, Settled
from policy.events import (
    Finished,
    QuotaLeased,
    SessionOwned,
    StoreChanged,
    Ticked,
)
from tests.policy_support import MS, QUEUE_ALONE, S, arrived, parameters, up

if TYPE_CHECKING:
    from collections.abc import Callable

    from policy.contract import Policy
    from policy.events import Event

LEASE_NS = 1500 * MS
USER_PER_S, USER_IN_FLIGHT, MODEL_PER_S, ALL_IN_FLIGHT = 5, 4, 8, 7
FAR_NS = 1 << 62


@dataclass
class Grant:
    """What a controller may spend of a key, as far as the store can know."""

    share: tuple[int, int] = (0, 0)
    until_ns: int = 0
    used: int = 0
    cut: list[tuple[tuple[int, int], int, int]] = field(default_factory=list)
    """(share before, in force until at the latest, counts for a rate until)"""

    def spends(self, now_ns: int) -> tuple[int, int]:
        per_s, in_flight = 0, 0
        if self.until_ns > now_ns:
            in_flight = max(self.share[1], self.used)
        if self.until_ns + S > now_ns:
            per_s = self.share[0]
        for share, force_ns, counts_ns in self.cut:
            if counts_ns > now_ns:
                per_s = max(per_s, share[0])
            if force_ns > now_ns:
                in_flight = max(in_flight, share[1])
        return per_s, in_flight

    def heard(self, now_ns: int, used: int) -> None:
        """It asks again, so it knows of what was cut."""
        self.used = used
        self.cut = [
            (share, min(force_ns, now_ns), min(counts_ns, now_ns + S))
            for share, force_ns, counts_ns in self.cut
            if counts_ns > now_ns
        ]


class Store:
    """The model."""

    def __init__(self) -> None:
        self.up = True
        self.forget(-FAR_NS)

    def forget(self, now_ns: int) -> None:
        self.careful_until_ns = now_ns + 2500 * MS
        self.quotas: dict[tuple[str, str], dict[int, Grant]] = defaultdict(dict)
        self.sessions: dict[str, tuple[int, int]] = {}
        self.spent: dict[str, list[int]] = {}

    def ask(self, now_ns: int, who: int, lease: Lease, controllers: int) -> Event:
        if lease.kind == "session":
            owner, until_ns = self.sessions.get(lease.name, (who, 0))
            if owner != who and until_ns > now_ns:
                return SessionOwned(lease.name, 0)
            spent = () if owner == who else tuple(self.spent.get(lease.name, ()))
            self.sessions[lease.name] = (who, now_ns + LEASE_NS)
            return SessionOwned(
                lease.name, LEASE_NS, tuple(now_ns - at for at in spent if now_ns - at < S)
            )
        grants = self.quotas[lease.kind, lease.name]
        mine = grants.setdefault(who, Grant())
        mine.heard(now_ns, lease.used)
        others = [grant for other, grant in grants.items() if other != who]
        wanting = sorted(
            other for other, grant in grants.items() if other == who or grant.until_ns + S > now_ns
        )
        alike = len(wanting)
        if now_ns < self.careful_until_ns:
            alike = max(alike, controllers)
        share = []
        for place, whole in enumerate((lease.per_s, lease.in_flight)):
            taken = sum(grant.spends(now_ns)[place] for grant in others)
            fair = whole // alike + (wanting.index(who) < whole % alike)
            share.append(max(0, min(fair, whole - taken)) if whole else -1)
        given = (share[0], share[1])
        if mine.until_ns > now_ns and (given[0] < mine.share[0] or given[1] < mine.share[1]):
            mine.cut.append((mine.share, mine.until_ns, mine.until_ns + S))
        mine.share, mine.until_ns = given, now_ns + LEASE_NS
        return QuotaLeased(lease.kind, lease.name, *given, LEASE_NS)

    def release(self, now_ns: int, who: int, release: Release) -> None:
        if self.sessions.get(release.session, (-1, 0))[0] == who:
            self.sessions[release.session] = (-1, 0)
            self.spent[release.session] = [now_ns - age_ns for age_ns in release.spent_ages_ns]


@dataclass
class Asked:
    user: str
    session: str
    work_ns: int


class Node:
    """A controller: the whole policy, and one replica with room for all."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.alive = True
        self.policy: Policy = build_policy(world.parameters)
        self.requests: dict[int, Asked] = {}
        self.outcomes: dict[int, Settled] = {}
        self.running: set[int] = set()
        self.sent: list[int] = []
        self.out_ns = self.in_ns = 0
        """When the last message arrives there, and here: they keep their order."""
        self.feed(up(0))
        self.feed(StoreChanged("shared" if world.store.up else "lost", world.controllers()))

    def feed(self, event: Event) -> None:
        if not self.alive:
            return
        for decision in self.policy.step(self.world.now_ns, event):
            assert not isinstance(decision, Refused), decision
            if isinstance(decision, Dispatch):
                self.world.went_on(self, decision.request)
            elif isinstance(decision, Settled):
                assert decision.request not in self.outcomes
                self.outcomes[decision.request] = decision
                self.running.discard(decision.request)
            elif isinstance(decision, (Lease, Release)):
                self.tell(decision)

    def arrive(self, asked: Asked) -> None:
        request = len(self.requests)
        self.requests[request] = asked
        deadline_ns = self.world.rng.choice((300 * MS, 2 * S, 8 * S))
        self.feed(
            arrived(
                request, 10, user=asked.user, session=asked.session, stream=False,
                deadline_ns=deadline_ns,
            )
        )  # fmt: skip

    def finish(self, request: int) -> None:
        if request in self.running:
            self.running.discard(request)
            self.feed(Finished(request, 0, 10, 0, 5))

    def tell(self, decision: Lease | Release) -> None:
        world = self.world
        asked_ns = world.now_ns
        self.out_ns = max(self.out_ns, asked_ns + world.delay_ns())
        world.at(self.out_ns, lambda: self.reach(decision, asked_ns))

    def reach(self, decision: Lease | Release, asked_ns: int) -> None:
        """The question is at the store."""
        world = self.world
        if not world.store.up:
            return
        if isinstance(decision, Release):
            world.store.release(world.now_ns, self.number, decision)
            return
        answer = world.store.ask(world.now_ns, self.number, decision, world.controllers())
        self.in_ns = max(self.in_ns, world.now_ns + world.delay_ns())
        world.at(self.in_ns, lambda: self.hear(answer, asked_ns))

    def hear(self, answer: QuotaLeased | SessionOwned, asked_ns: int) -> None:
        """A lease began, for the store, no later than when it was asked for plus its way."""
        left_ns = answer.for_ns - (self.world.now_ns - asked_ns)
        if isinstance(answer, SessionOwned):
            for_ns = max(0, left_ns) if answer.for_ns else 0
            self.feed(SessionOwned(answer.session, for_ns, answer.spent_ages_ns))
        elif left_ns > 0:
            self.feed(
                QuotaLeased(answer.kind, answer.name, answer.per_s, answer.in_flight, left_ns)
            )

    def restore(self) -> None:
        """It goes on from its own snapshot, and nobody can tell."""
        due_ns = self.policy.deadline_ns()
        snapshot = self.policy.snapshot()
        self.policy = restore(self.world.parameters, snapshot)
        assert self.policy.snapshot() == snapshot
        assert self.policy.deadline_ns() == due_ns


class World:
    """Everything, on one clock, with what must be true."""

    def __init__(self, seed: int, nodes: int, **limits: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311
        given = {
            "enabled": True, "user_per_s": USER_PER_S, "user_in_flight_most": USER_IN_FLIGHT,
            "model_per_s": MODEL_PER_S, "global_in_flight_most": ALL_IN_FLIGHT, **limits,
        }  # fmt: skip
        self.parameters = parameters("tiered", **(QUEUE_ALONE | {"limits": given}))
        self.limits = self.parameters.limits
        self.now_ns = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        self.store = Store()
        self.nodes: list[Node] = []
        self.passed: list[tuple[int, str]] = []
        """(when, user) of all that went on, wherever."""
        self.strict_ns = 0
        """From when on the limits must hold exactly: not while the store is lost."""
        for _ in range(nodes):
            self.nodes.append(Node(self, len(self.nodes)))

    def controllers(self) -> int:
        return max(1, sum(node.alive for node in self.nodes))

    def delay_ns(self) -> int:
        return self.rng.choice((0, MS, 3 * MS, 40 * MS))

    def at(self, at_ns: int, work: Callable[[], None]) -> None:
        self.count += 1
        heappush(self.heap, (at_ns, self.count, work))

    def run(self, until_ns: int) -> None:
        while True:
            due = [
                (due_ns, node.number, node)
                for node in self.nodes
                if node.alive and (due_ns := node.policy.deadline_ns()) is not None
            ]
            tick = min(due)[:2] if due else (FAR_NS, 0)
            at_ns = min(tick[0], self.heap[0][0] if self.heap else FAR_NS)
            if at_ns > until_ns:
                break
            self.now_ns = max(self.now_ns, at_ns)
            if self.heap and self.heap[0][0] <= at_ns:
                heappop(self.heap)[2]()
            else:
                self.nodes[tick[1]].feed(Ticked())
        self.now_ns = max(self.now_ns, until_ns)

    # What befalls

    def kill(self, node: Node) -> None:
        node.alive = False
        node.running.clear()

    def lose(self) -> None:
        """All notice it within 200 ms."""
        self.store.up = False
        self.strict_ns = FAR_NS
        for node in self.nodes:
            count = self.controllers()
            at_ns = self.now_ns + self.rng.randrange(200) * MS
            self.at(at_ns, lambda node=node, count=count: self.tell(node, "lost", count))

    def find(self, fresh: bool) -> None:
        self.run(self.now_ns + 300 * MS)  # nobody misses that it was gone
        self.store.up = True
        if fresh:
            self.store.forget(self.now_ns)
        else:
            self.store.careful_until_ns = self.now_ns + 2500 * MS
        self.strict_ns = self.now_ns + 4 * S
        for node in self.nodes:
            count = self.controllers()
            at_ns = self.now_ns + self.rng.randrange(200) * MS
            self.at(at_ns, lambda node=node, count=count: self.tell(node, "shared", count))

    def tell(self, node: Node, state: str, count: int) -> None:
        """It is told how it is by now."""
        if (state == "shared") == self.store.up:
            node.feed(StoreChanged(state, count))  # type: ignore[arg-type]

    # What must be true

    def went_on(self, node: Node, request: int) -> None:
        asked = node.requests[request]
        running = [other.requests[each] for other in self.nodes for each in other.running]
        if asked.session:
            assert asked.session not in [each.session for each in running], "two of one session"
            earlier = [
                each
                for each, other in node.requests.items()
                if each < request and other.session == asked.session
            ]
            assert all(each in node.outcomes or each in node.sent for each in earlier)
        node.running.add(request)
        node.sent.append(request)
        self.at(self.now_ns + asked.work_ns, lambda: node.finish(request))
        self.passed.append((self.now_ns, asked.user))
        late = [user for at_ns, user in self.passed if self.now_ns - at_ns < S]
        spare = 0
        if self.now_ns < self.strict_ns:
            # With the store lost, who held no share of a key has its part of the limit.
            spare = len(self.nodes)
        limits = self.limits
        if asked.user:
            in_flight = sum(each.user == asked.user for each in running) + 1
            assert late.count(asked.user) <= _most(limits.user_per_s, spare)
            assert in_flight <= _most(limits.user_in_flight_most, spare)
        assert len(late) <= _most(limits.model_per_s, spare)
        assert len(running) < _most(limits.global_in_flight_most, spare)

    def end(self) -> None:
        """Everything that came to a controller which lives has its one outcome."""
        if not self.store.up:
            self.find(fresh=True)
        self.run(self.now_ns + 20 * S)
        for node in self.nodes:
            if node.alive:
                assert set(node.outcomes) == set(node.requests)
                assert not node.running

    def outcomes(self) -> Counter[str]:
        return Counter(
            settled.why or settled.outcome
            for node in self.nodes
            for settled in node.outcomes.values()
        )


def _most(limit: int, spare: int) -> int:
    return limit + spare * max(1, limit // 2) if limit else FAR_NS


GAPS = st.sampled_from((0, 0, 10 * MS, 90 * MS, 300 * MS, 700 * MS, 1100 * MS, 2 * S))
ARRIVE = st.tuples(
    st.just("arrive"), GAPS, st.integers(0, 2), st.sampled_from(("", "ann", "ann", "bob")),
    st.sampled_from(("", "", "s", "t")), st.integers(1, 4),
)  # fmt: skip
BEFALL = st.tuples(
    st.sampled_from(("kill", "start", "lose", "find", "restore")), GAPS, st.integers(0, 2)
)
PLANS = st.lists(st.one_of(ARRIVE, ARRIVE, ARRIVE, BEFALL), min_size=20, max_size=60)


def play(world: World, plan: list[tuple[object, ...]]) -> None:
    for what, gap, number, *rest in plan:
        assert isinstance(gap, int)
        assert isinstance(number, int)
        world.run(world.now_ns + gap)
        alive = [node for node in world.nodes if node.alive]
        node = alive[number % len(alive)]
        if what == "arrive":
            user, session, count = rest
            for _ in range(count):  # type: ignore[call-overload]
                work_ns = world.rng.choice((5, 80, 400, 800)) * MS
                node.arrive(Asked(str(user), str(session), work_ns))
        elif what == "kill" and len(alive) > 1:
            world.kill(node)
        elif what == "start" and len(alive) < 3:
            world.nodes.append(Node(world, len(world.nodes)))
        elif what == "lose" and world.store.up:
            world.lose()
        elif what == "find" and not world.store.up:
            world.find(fresh=world.rng.random() < 0.5)
        elif what == "restore":
            node.restore()


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 1 << 20), nodes=st.integers(2, 3), plan=PLANS)
def test_limits_hold_over_all_controllers_whatever_befalls(
    seed: int, nodes: int, plan: list[tuple[object, ...]]
) -> None:
    world = World(seed, nodes)
    play(world, plan)
    world.end()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), nodes=st.integers(2, 3))
def test_under_a_steady_load_limits_are_also_used(seed: int, nodes: int) -> None:
    """Two users ask more than they may, at every controller, for ten seconds."""
    world = World(seed, nodes, model_per_s=0, global_in_flight_most=0, user_in_flight_most=0)
    for step in range(200):
        for node in world.nodes:
            for user in ("ann", "bob"):
                node.arrive(Asked(user, "", 20 * MS))
        world.run((step + 1) * 50 * MS)
    settled = Counter(user for at_ns, user in world.passed if at_ns >= 3 * S)
    for user in ("ann", "bob"):
        assert settled[user] >= 0.7 * 7 * USER_PER_S
    world.end()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), nodes=st.integers(2, 3))
def test_who_is_left_has_all_of_every_limit_and_every_session(seed: int, nodes: int) -> None:
    world = World(seed, nodes, model_per_s=0, global_in_flight_most=0, user_in_flight_most=0)
    for node in world.nodes:
        for number in range(4):
            node.arrive(Asked("ann", f"s{node.number}{number}", 100 * MS))
    world.run(300 * MS)
    for node in world.nodes[1:]:
        world.kill(node)
    last = world.nodes[0]
    killed_ns = world.now_ns
    taken = {node.number: len(last.requests) + place for place, node in enumerate(world.nodes[1:])}
    for number in taken:
        last.arrive(Asked("", f"s{number}0", 10 * MS))
    world.run(killed_ns + 2 * S)
    for request in taken.values():
        outcome = last.outcomes.get(request)
        deadline = outcome is not None and outcome.outcome == "shed"
        assert request in last.sent or deadline
    world.run(killed_ns + 6 * S)
    before = len(world.passed)
    for _ in range(USER_PER_S):
        last.arrive(Asked("ann", "", 10 * MS))
    world.run(world.now_ns + 200 * MS)
    assert len(world.passed) - before == USER_PER_S
    world.end()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_with_the_store_lost_each_goes_on_with_what_it_has(seed: int) -> None:
    world = World(seed, 2, model_per_s=0, global_in_flight_most=0, user_in_flight_most=0)
    one, two = world.nodes
    one.arrive(Asked("ann", "s", 50 * MS))
    world.run(500 * MS)
    world.lose()
    world.run(5 * S)
    one.arrive(Asked("ann", "s", 50 * MS))
    two.arrive(Asked("bob", "s", 50 * MS))
    two.arrive(Asked("bob", "", 50 * MS))
    world.run(6 * S)
    assert one.outcomes[1].outcome == "answered"
    assert (two.outcomes[0].why, two.outcomes[0].http_code) == ("session_elsewhere", 503)
    assert two.outcomes[1].outcome == "answered"
    world.find(fresh=True)
    world.run(9 * S)
    two.arrive(Asked("bob", "s", 50 * MS))
    world.end()
    assert two.outcomes[2].outcome == "answered" or two.outcomes[2].why == "session_elsewhere"
