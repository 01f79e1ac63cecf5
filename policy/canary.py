"""A canary: a share of the callers is served by another policy, beside the one that rules.

There is one fold of facts, and two judgements over it, the *stable* policy's (arm 0) and the
*candidate's* (arm 1). Every request belongs to one of them from its arrival to its outcome. Only
the stable policy runs the fleet; what the candidate thinks of replicas steers what it sends itself.

Both send to the same replicas, up to one target: the mean of both policies', by share. While
nothing of the other waits for a replica, either may take all of its room, so that a small canary
does no worse than a large one. Where both wait, the more urgent request goes first, as in one
queue, until one policy has started more than ``LEAD_NS`` of work beyond its share there: then it is
the other's turn, however urgent the candidate calls its requests.

What one lets through counts against the limits of both, and the candidate's limits on a model, and
on all, are at most the stable policy's.

A candidate that raises is at an end, in the same step: ``Service.carry_on`` serves what it had.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from policy.decisions import (
    Abort,
    Alert,
    BreakerMoved,
    Dispatch,
    LookUp,
    Refused,
    Rotated,
    SaveCheckpoint,
    Scaled,
    Settled,
    Start,
    Stop,
    Verify,
    Warm,
)
from policy.events import (
    Arrived,
    CanaryStarted,
    Cancelled,
    ChainFound,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    LookedUp,
    Ticked,
    Verified,
)
from policy.facts import Open
from policy.parameters import canonical, policy_hash
from policy.tiered import HELD, MOVED, NOTHING, Tiered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from policy.decisions import Decision
    from policy.events import Event
    from policy.facts import Facts
    from policy.hosts import Host
    from policy.parameters import Inflight, Parameters
    from policy.placement import Score
    from policy.tiered import Passed
    from policy.tiers import Job, Pool

    Decisions = list[Decision]
    OfRequest = (
        Arrived | FirstToken | Finished | Failed | Cancelled | Verified | CheckpointSaved
        | CheckpointFailed | LookedUp
    )  # fmt: skip

T = TypeVar("T")
HASH_DIGITS = 12
LEAD_NS = 10_000_000_000
"""How much more of a replica's time than its share a policy may start while the other waits for
it. A share of callers is never quite that share of the work: as much as this comes of chance in
some minutes of overload, and is served as in one queue. A policy that calls everything urgent, or
sheds nothing, takes no more than this from the other."""
FORGIVEN_NS = 60_000_000_000
"""For so long the other must have waited for nothing there until a lead is forgotten."""
BROKEN = "canary"
"""Key of the alert that says that a candidate raised, and is at an end."""
OF_REQUESTS = (
    FirstToken, Finished, Failed, Cancelled, Verified, CheckpointSaved, CheckpointFailed, LookedUp,
)  # fmt: skip
ON_REQUESTS = (Dispatch, Settled, Abort, Verify, LookUp, SaveCheckpoint)
OF_THE_FLEET = (Start, Stop, Warm, Rotated, BreakerMoved, Scaled, Alert)
"""Decisions that only the stable policy's are carried out of, or told."""
TARGETS = (
    "sequences_permille", "kv_permille", "prefill_steps_milli", "long_prefill_cap_tokens",
)  # fmt: skip


def arm_of(event: Arrived, salt: int) -> int:
    """Where in 0..999 the caller of a request falls: below the share of the canary, it is served by
    the candidate. Always the same for a user, else a session, else a chain, so that a larger share
    only adds callers."""
    key = event.user or event.session or event.chain or str(event.request)
    digest = blake2b(f"{salt}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 1000


def broke(decisions: Iterable[Decision]) -> bool:
    """Did the candidate raise in the step that decided this? The old policy rules alone again."""
    return any(isinstance(each, Alert) and each.key == BROKEN for each in decisions)


def place_of(error: Exception) -> str:
    """What was raised, and where: the same words at each replay."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    kind = type(error).__name__
    if trace is None:
        return kind
    return f"{kind} in {trace.tb_frame.f_globals.get('__name__')}, line {trace.tb_lineno}"


def mixed(own: Inflight, old: Inflight, new: Inflight, share_permille: int) -> Inflight:
    """``own``, but for the targets, which are the mean of ``old`` and ``new`` by share."""
    means = {
        name: (getattr(old, name) * (1000 - share_permille) + getattr(new, name) * share_permille)
        // 1000
        for name in TARGETS
    }
    return msgspec.structs.replace(own, **means)


class CanaryState(msgspec.Struct, array_like=True):
    """A canary in canonical form."""

    new: str
    share_permille: int
    salt: int
    lead: list[tuple[int, int, int]]
    """(replica, lead, how long ago)."""
    candidate: bytes
    """Its judgement, encoded by itself."""
    due_ns: int | None


class Rules(Protocol):
    """A policy's judgement (``policy.service``), as a canary asks it for its part."""

    facts: Facts
    parameters: Parameters

    @property
    def queue(self) -> Tiered: ...
    @property
    def canary(self) -> Canary | None: ...
    def step(self, now_ns: int, event: Event) -> Sequence[Decision]: ...
    def deadline_ns(self) -> int | None: ...
    def snapshot(self) -> bytes: ...
    def waiting(self) -> dict[str, int]: ...
    def scores(self, event: Arrived) -> list[Score]: ...
    def holds_back(self, event: Arrived) -> bool: ...
    def continues(self, event: Arrived) -> bool: ...
    def next_up(self, now_ns: int) -> int | None: ...
    def let_go(self, now_ns: int, request: int) -> Sequence[Decision]: ...
    def lose(self, now_ns: int) -> list[Decision]: ...
    def unsettled(self) -> bool: ...
    def attend(self) -> None: ...
    def follow_up(self, now_ns: int) -> list[Decision]: ...
    def carry_on(
        self, now_ns: int, told: dict[int, Open], event: Event | None
    ) -> list[Decision]: ...


class Canary:
    """Two policies over one fold of facts.

    Args:
        stable: the policy that rules, which owns this.
        candidate: built beside it.
    """

    __slots__ = (
        "_broken", "_gone", "_hashes", "_lead_ns", "_led_ns", "_queues", "_rules",
        "_share_permille", "_told", "_touched", "_unheard", "candidate", "deciding", "due_ns",
        "salt",
    )  # fmt: skip

    def __init__(self, stable: Rules, candidate: Rules, share_permille: int, salt: int) -> None:
        self.candidate = candidate
        self.salt = salt
        self.deciding = False
        """The stable policy is asked for its own part."""
        self._rules = (stable, candidate)
        self._queues = (stable.queue, candidate.queue)
        self._hashes = tuple(policy_hash(each.parameters)[:HASH_DIGITS] for each in self._rules)
        self._touched: dict[int, None] = {}
        """Replicas to be filled before the step is over."""
        self._lead_ns: dict[int, int] = {}
        """By replica: how much of its time the candidate has started beyond its share, while both
        waited; negative: the stable policy has."""
        self._led_ns: dict[int, int] = {}
        """When that was last looked at."""
        self._told: dict[int, Open] = {}
        """The candidate's requests, each as it was when something was last decided on it: what the
        driver knows of them."""
        self._broken = ""
        """What the candidate raised."""
        self._unheard: Event | None = None
        """What is then to be told to the stable policy: a tick, for what it takes over may be due,
        or what the candidate was told of one of its requests."""
        self.due_ns: int | None = None
        """When the candidate wants to be ticked."""
        self._gone = stable.queue.gone
        self._queues[1].offered = self._queues[0].offered
        for queue in self._queues:
            queue.split = self
        self._share_permille = 0
        self._aim(share_permille)

    def _aim(self, share_permille: int) -> None:
        self._share_permille = share_permille
        old, new = (each.parameters.inflight for each in self._rules)
        self._queues[0].aim(mixed(old, old, new, share_permille))
        self.ask(1, lambda: self._queues[1].aim(mixed(new, old, new, share_permille)), None)

    def resize(self, share_permille: int) -> None:
        """Another share of the callers from now on; who was the canary's and still is, stays."""
        self._lead_ns.clear()
        self._led_ns.clear()
        self._aim(share_permille)
        self._touch_all()

    def begun(self, now_ns: int) -> Decisions:
        """The first step of the two is over."""
        decisions: Decisions = []
        self._touch_all()
        self._settle(now_ns, decisions)
        return self._over(now_ns, decisions)

    # What the candidate is asked

    def ask(self, arm: int, work: Callable[[], T], instead: T) -> T:
        """What one of the two says: ``instead`` from when on the candidate has raised."""
        if not arm:
            return work()
        if self._broken:
            return instead
        try:
            return work()
        except Exception as error:
            self._broken = place_of(error)
            return instead

    def _over(self, now_ns: int, decisions: Decisions) -> Decisions:
        """The step is over, and so is the canary if the candidate raised. Nobody was told what it
        decided in that call, so the stable policy goes on from what was told before."""
        if not self._broken:
            self.due_ns = self.ask(1, self.candidate.deadline_ns, None)
        if not self._broken:
            return decisions
        self._touched.clear()
        decisions += self._rules[0].carry_on(now_ns, self._told, self._unheard)
        cause = f"the candidate {self._hashes[1]} raised {self._broken}"
        decisions.append(Alert(BROKEN, cause, (), "the old policy serves everyone"))
        return decisions

    # A step

    def step(self, now_ns: int, event: Event) -> Sequence[Decision]:
        self._unheard = event if type(event) is Ticked else None
        queued = [queue.queued for queue in self._queues]
        self.deciding = True
        try:
            decisions = self._decide(now_ns, event)
        finally:
            self.deciding = False
        over = self._rules[0].canary is not self
        if over or (decisions and type(decisions[0]) is Refused):
            self._touched.clear()
            return decisions
        if self._broken:
            return self._over(now_ns, decisions)
        if any(queue.queued < count for queue, count in zip(self._queues, queued, strict=True)):
            # What was shed or went away may have been what others waited for, anywhere.
            self._touch_all()
        self._settle(now_ns, decisions)
        return self._over(now_ns, decisions)

    def _decide(self, now_ns: int, event: Event) -> Decisions:
        """Ask whom it concerns."""
        stable, candidate = self._rules
        if isinstance(event, Arrived):
            arm = self._arm(event)
            if arm and event.request not in stable.facts.open:
                self._told[event.request] = Open(event, now_ns, arm=1)
            return self._of_request(arm, now_ns, event)
        if isinstance(event, OF_REQUESTS):
            opened = stable.facts.open.get(event.request)
            arm = 0
            if opened is not None:
                arm = opened.arm
                self.touch((opened.replica,))  # what it frees there is for both
            return self._of_request(arm, now_ns, event)
        if isinstance(event, ChainFound):
            return self._of_chain(now_ns, event)
        told = stable.step(now_ns, event)
        if stable.canary is not self:
            return list(told)
        self._touch_all()
        decisions = self._stamped(0, told)
        refused = bool(told) and type(told[0]) is Refused
        self._queues[1].counting = self._queues[0].counting
        if not refused and type(event) is not CanaryStarted:
            decisions += self._decided(1, lambda: candidate.step(now_ns, event))
        return decisions

    def _of_request(self, arm: int, now_ns: int, event: OfRequest) -> Decisions:
        """An event that is one policy's to judge."""
        request, queue = event.request, self._queues[arm]
        if not arm:
            return self._stamped(0, self._rules[0].step(now_ns, event))
        job = queue.jobs.get(request)
        before = None if job is None else msgspec.structs.replace(job)
        made = self._decided(1, lambda: self._rules[1].step(now_ns, event))
        if not self._broken:
            self._note(request)
        elif type(event) is not Arrived:
            self._unheard = event
            self._take_back(request, job, before)
        return made

    def _of_chain(self, now_ns: int, event: ChainFound) -> Decisions:
        """A chain is known to one of the two only: to whom its next step is to be told."""
        step = Arrived(0, "", "chat", 0, line=event.line, user=event.user, chain=event.chain)
        if not self._arm(step):
            return self._stamped(0, self._rules[0].step(now_ns, event))
        made = self._decided(1, lambda: self._rules[1].step(now_ns, event))
        if self._broken:
            self._unheard = event
        return made

    def _note(self, request: int) -> None:
        """All that was decided on it so far is told."""
        opened = self._rules[0].facts.open.get(request)
        if opened is None or not opened.arm:
            self._told.pop(request, None)
        else:
            self._told[request] = msgspec.structs.replace(opened)

    def _take_back(self, request: int, job: Job | None, before: Job | None) -> None:
        """The candidate raised when it was told something of the request: all of that is undone,
        and the stable policy is told instead."""
        queue, facts, told = self._queues[1], self._rules[0].facts, self._told[request]
        found = facts.open.get(request)
        if before is None:
            queue.jobs.pop(request, None)
        else:
            kept = queue.jobs.get(request) is job
            kept = kept and found is not None and found.replica == told.replica
            if told.replica >= 0 and not kept:
                queue.hosts[told.replica].prefixes.add(before.keys, before.block_tokens)
            if found is not None and found.replica >= 0 and found.replica != told.replica:
                queue.hosts[found.replica].prefixes.remove(before.keys)
            queue.jobs[request] = before
        facts.open[request] = told
        if told.replica >= 0:  # it may have been the last on one that is down
            facts.replicas.setdefault(told.replica, queue.hosts[told.replica].replica)

    def _arm(self, event: Arrived) -> int:
        """Whose it is. A session's requests go in order, and a chain has one budget: what goes on
        stays where it is, whoever its caller is served by from now on."""
        arm = int(arm_of(event, self.salt) < self._share_permille)
        for kept_by in (arm, 1 - arm):
            if self._held_back(kept_by, event):
                return kept_by
        for kept_by in (arm, 1 - arm):
            if self._continued(kept_by, event):
                return kept_by
        return 0 if self._broken else arm

    def _held_back(self, arm: int, event: Arrived) -> bool:
        return self.ask(arm, lambda: self._rules[arm].holds_back(event), False)

    def _continued(self, arm: int, event: Arrived) -> bool:
        return self.ask(arm, lambda: self._rules[arm].continues(event), False)

    def _decided(self, arm: int, work: Callable[[], Sequence[Decision]]) -> Decisions:
        return self._stamped(arm, self.ask(arm, work, ()))

    def _stamped(self, arm: int, decisions: Iterable[Decision]) -> Decisions:
        """Whose decisions they are; of the candidate's, those that are carried out."""
        stamped: Decisions = []
        policy = self._hashes[arm]
        for decision in decisions:
            if arm and isinstance(decision, ON_REQUESTS):
                self._note(decision.request)
            if isinstance(decision, (Dispatch, Settled)):
                stamped.append(msgspec.structs.replace(decision, policy=policy))
            elif not (arm and isinstance(decision, OF_THE_FLEET)):
                stamped.append(decision)
        return stamped

    def _settle(self, now_ns: int, decisions: Decisions) -> None:
        """Carry what was set off to its end in both. Each round settles, sends or rotates
        something, of which there is only so much."""
        stable, candidate = self._rules
        due = bool(stable.queue.gone)  # one that drains may just have become empty
        while True:
            if stable.queue.gone != self._gone:
                self._gone = stable.queue.gone
                self.ask(1, candidate.attend, None)
            busy = False
            for arm, rules in enumerate(self._rules):
                if self.ask(arm, rules.unsettled, False) or (due and not arm):
                    decisions += self._followed_up(arm, now_ns)
                    self._touch_all()
                    busy = True
            due = False
            busy |= self._release(now_ns, decisions)
            if self._touched:
                self._fill_touched(now_ns, decisions)
                busy = True
            if not busy and stable.queue.gone == self._gone:
                return

    def _followed_up(self, arm: int, now_ns: int) -> Decisions:
        return self._decided(arm, lambda: self._rules[arm].follow_up(now_ns))

    def _release(self, now_ns: int, decisions: Decisions) -> bool:
        """Let go what limits held back and have room for now: in order of arrival, whosever, but
        first who has less than half of its share of all that limits let go."""
        released = False
        while True:
            ready = [
                (self._has_room(arm), request, arm)
                for arm in (0, 1)
                if (request := self._next_up(arm, now_ns)) is not None
            ]
            if not ready:
                return released
            _, request, arm = min(ready)
            decisions += self._let_go(arm, now_ns, request)
            released = True

    def _has_room(self, arm: int) -> bool:
        own, total = len(self._queues[arm].jobs), sum(len(each.jobs) for each in self._queues)
        return own * 2000 >= self._share(arm) * total

    def _next_up(self, arm: int, now_ns: int) -> int | None:
        return self.ask(arm, lambda: self._rules[arm].next_up(now_ns), None)

    def _let_go(self, arm: int, now_ns: int, request: int) -> Decisions:
        return self._decided(arm, lambda: self._rules[arm].let_go(now_ns, request))

    # The replicas

    def touch(self, numbers: Iterable[int]) -> None:
        self._touched.update(dict.fromkeys(numbers))

    def _touch_all(self) -> None:
        self.touch(self._rules[0].facts.replicas)

    def others_wait(self, queue: Tiered, hosts: tuple[Host, ...]) -> list[int]:
        other = 1 - self._arm_of(queue)
        if not self._queues[other].queued:
            return []
        numbers = [host.number for host in hosts if self._waits_on(other, host.number)]
        self.touch(numbers)  # it is seen there whose turn it is
        return numbers

    def learn(self, queue: Tiered, lesson: Callable[[Tiered], None]) -> None:
        other = 1 - self._arm_of(queue)
        self.ask(other, lambda: lesson(self._queues[other]), None)

    def full(self, queue: Tiered) -> bool:
        """One bound for both queues; beyond its share of it the other's counts no more. The
        candidate's is at most the stable policy's."""
        arm = self._arm_of(queue)
        most = min(rules.parameters.shedding.queue_max for rules in self._rules[: arm + 1])
        others = min(self._queues[1 - arm].queued, most * self._share(1 - arm) // 1000)
        return queue.queued + others >= most

    def _waits_on(self, arm: int, number: int) -> bool:
        return self.ask(arm, lambda: self._queues[arm].waits_on(number), False)

    def ahead_ns(self, queue: Tiered, pool: Pool, job: Job) -> int:
        own_ns = pool.ahead_ns(job.tier, job.order_ns)
        arm = 1 - self._arm_of(queue)
        ahead_ns = self._queues[arm].pool_ahead_ns
        all_ns = own_ns + self.ask(arm, lambda: ahead_ns(pool.replicas, job.tier, job.order_ns), 0)
        share = self._share(0)
        if queue is self._queues[1] or not share:
            return all_ns
        # Whatever a candidate piles up, it can take no more than its share and its lead.
        return min(all_ns, own_ns * 1000 // share + LEAD_NS)

    def started(self, queue: Tiered, now_ns: int, number: int, work_ns: int) -> None:
        arm = self._arm_of(queue)
        lead_ns = self._lead_ns.get(number, 0)
        since_ns = now_ns - self._led_ns.get(number, now_ns)
        if self._waits_on(1 - arm, number):
            more_ns = work_ns * self._share(1 - arm) // 1000
            lead_ns += more_ns if arm else -more_ns
        else:  # nobody is owed anything for when he did not wait
            left_ns = max(0, FORGIVEN_NS - since_ns)
            lead_ns = abs(lead_ns) * left_ns // FORGIVEN_NS * (1 if lead_ns > 0 else -1)
        # More is not remembered: what neither can use now goes to either.
        self._lead_ns[number] = max(-2 * LEAD_NS, min(lead_ns, 2 * LEAD_NS))
        self._led_ns[number] = now_ns

    def _arm_of(self, queue: Tiered) -> int:
        return int(queue is self._queues[1])

    def _share(self, arm: int) -> int:
        return self._share_permille if arm else 1000 - self._share_permille

    def _fill_touched(self, now_ns: int, decisions: Decisions) -> None:
        touched, self._touched = self._touched, {}
        before = len(decisions)
        for number in touched:
            self._fill(now_ns, number, decisions)
        if len(decisions) > before and any(queue.queued_again for queue in self._queues):
            # One that may not go to these may stand first now, with room for it elsewhere.
            self._touch_all()

    def _fill(self, now_ns: int, number: int, decisions: Decisions) -> None:
        """Send to a replica what waits for it, in turn."""
        spent: set[int] = set()
        passed: Passed = {}
        while True:
            waiting = [
                arm
                for arm, queue in enumerate(self._queues)
                if arm not in spent and queue.queued and self._waits_on(arm, number)
            ]
            if not waiting:
                return
            arm = waiting[0] if len(waiting) == 1 else self._turn(number)
            came = self._send_one(arm, now_ns, number, decisions, passed)
            if came == HELD:
                return  # what comes free is kept for this one
            if came != MOVED:
                spent.add(arm)

    def _send_one(
        self, arm: int, now_ns: int, number: int, decisions: Decisions, passed: Passed
    ) -> int:
        made: Decisions = []
        send_one = self._queues[arm].send_one
        came = self.ask(arm, lambda: send_one(now_ns, number, made, passed), NOTHING)
        decisions += self._stamped(arm, made)
        return came

    def _turn(self, number: int) -> int:
        """Whose request goes next to a replica that both wait for."""
        for arm in (0, 1):
            if self._leads(arm, number):
                return 1 - arm
        urgency = self._queues[0].urgency(number)
        return self.ask(1, lambda: int(self._queues[1].urgency(number) < urgency), 0)

    def _leads(self, arm: int, number: int) -> bool:
        """Has it started so much more than its share there that it is the other's turn?"""
        lead_ns = self._lead_ns.get(number, 0)
        return (lead_ns if arm else -lead_ns) > LEAD_NS

    # Snapshots

    def state(self) -> CanaryState:
        now_ns = self._rules[0].facts.now_ns
        return CanaryState(
            canonical(self.candidate.parameters), self._share_permille, self.salt,
            [
                (number, lead_ns, now_ns - self._led_ns[number])
                for number, lead_ns in sorted(self._lead_ns.items())
            ],
            self.candidate.snapshot(), None if self.due_ns is None else self.due_ns - now_ns,
        )  # fmt: skip

    def load(self, state: CanaryState, now_ns: int) -> None:
        """Go on from a state; both judgements have been restored already."""
        for number, lead_ns, ago_ns in state.lead:
            self._lead_ns[number], self._led_ns[number] = lead_ns, now_ns - ago_ns
        for request in self._rules[0].facts.open:
            self._note(request)
        self.due_ns = None if state.due_ns is None else state.due_ns + now_ns
