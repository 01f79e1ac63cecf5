"""A canary: a share of the callers is served by another policy, beside the one that rules.

There is one fold of facts, and two judgements over it, the *stable* policy's (arm 0) and the
*candidate's* (arm 1). Every request belongs to one of them from its arrival to its outcome. Only
the stable policy runs the fleet; what the candidate thinks of replicas steers what it sends itself.

Both send to the same replicas, up to one target: the mean of both policies', by share. While
nothing of the other waits for a replica, either may take all of its room, so that a small canary
does no worse than a large one. Where both wait, the more urgent request goes first, as in one
queue, until one policy has started more than ``LEAD_NS`` of work beyond its share there: then it is
the other's turn, however urgent the candidate calls its requests.

What one lets through counts against the limits of both.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import msgspec

from policy.decisions import (
    Alert,
    BreakerMoved,
    Dispatch,
    Refused,
    Rotated,
    Scaled,
    Settled,
    Start,
    Stop,
    Warm,
)
from policy.events import (
    Arrived,
    CanaryStarted,
    Cancelled,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    LookedUp,
    Verified,
)
from policy.parameters import canonical, policy_hash
from policy.tiered import HELD, MOVED, Tiered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from policy.decisions import Decision
    from policy.events import Event
    from policy.facts import Facts
    from policy.hosts import Host
    from policy.parameters import Inflight, Parameters
    from policy.placement import Score
    from policy.tiered import Passed
    from policy.tiers import Job, Pool

    Decisions = list[Decision]

HASH_DIGITS = 12
LEAD_NS = 10_000_000_000
"""How much more of a replica's time than its share a policy may start while the other waits for
it. A share of callers is never quite that share of the work: as much as this comes of chance in
some minutes of overload, and is served as in one queue. A policy that calls everything urgent, or
sheds nothing, takes no more than this from the other."""
OF_REQUESTS = (
    FirstToken, Finished, Failed, Cancelled, Verified, CheckpointSaved, CheckpointFailed, LookedUp,
)  # fmt: skip
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
    lead: list[tuple[int, int]]
    candidate: bytes
    """Its judgement, encoded by itself."""


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
    def continues(self, now_ns: int, event: Arrived) -> bool: ...
    def next_up(self, now_ns: int) -> int | None: ...
    def let_go(self, now_ns: int, request: int) -> Sequence[Decision]: ...
    def lose(self, now_ns: int) -> list[Decision]: ...
    def unsettled(self) -> bool: ...
    def attend(self) -> None: ...
    def follow_up(self, now_ns: int) -> list[Decision]: ...


class Canary:
    """Two policies over one fold of facts.

    Args:
        stable: the policy that rules, which owns this.
        candidate: built beside it.
    """

    __slots__ = (
        "_gone", "_hashes", "_lead_ns", "_queues", "_rules", "_share_permille", "_touched",
        "candidate", "deciding", "salt",
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
        self._gone = stable.queue.gone
        self._queues[1].offered = self._queues[0].offered
        for queue in self._queues:
            queue.split = self
        self._share_permille = 0
        self._aim(share_permille)

    def _aim(self, share_permille: int) -> None:
        self._share_permille = share_permille
        old, new = (each.parameters.inflight for each in self._rules)
        for queue, own in zip(self._queues, (old, new), strict=True):
            queue.aim(mixed(own, old, new, share_permille))

    def resize(self, share_permille: int) -> None:
        """Another share of the callers from now on; who was the canary's and still is, stays."""
        self._lead_ns.clear()
        self._aim(share_permille)
        self._touch_all()

    def begun(self, now_ns: int) -> Decisions:
        """The first step of the two is over."""
        decisions: Decisions = []
        self._touch_all()
        self._settle(now_ns, decisions)
        return decisions

    # A step

    def step(self, now_ns: int, event: Event) -> Sequence[Decision]:
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
        if any(queue.queued < count for queue, count in zip(self._queues, queued, strict=True)):
            # What was shed or went away may have been what others waited for, anywhere.
            self._touch_all()
        self._settle(now_ns, decisions)
        return decisions

    def _decide(self, now_ns: int, event: Event) -> Decisions:
        """Ask whom it concerns."""
        stable, candidate = self._rules
        if isinstance(event, Arrived):
            arm = self._arm(now_ns, event)
            return self._stamped(arm, self._rules[arm].step(now_ns, event))
        if isinstance(event, OF_REQUESTS):
            opened = stable.facts.open.get(event.request)
            arm = 0
            if opened is not None:
                arm = opened.arm
                self.touch((opened.replica,))  # what it frees there is for both
            return self._stamped(arm, self._rules[arm].step(now_ns, event))
        told = stable.step(now_ns, event)
        if stable.canary is not self:
            return list(told)
        self._touch_all()
        decisions = self._stamped(0, told)
        refused = bool(told) and type(told[0]) is Refused
        self._queues[1].counting = self._queues[0].counting
        if not refused and type(event) is not CanaryStarted:
            decisions += self._stamped(1, candidate.step(now_ns, event))
        return decisions

    def _arm(self, now_ns: int, event: Arrived) -> int:
        """Whose it is. A session's requests go in order, and a chain has one budget: what goes on
        stays where it is, whoever its caller is served by from now on."""
        arm = int(arm_of(event, self.salt) < self._share_permille)
        for kept_by in (arm, 1 - arm):
            if self._rules[kept_by].holds_back(event):
                return kept_by
        for kept_by in (arm, 1 - arm):
            if self._rules[kept_by].continues(now_ns, event):
                return kept_by
        return arm

    def _stamped(self, arm: int, decisions: Iterable[Decision]) -> Decisions:
        """Whose decisions they are; of the candidate's, those that are carried out."""
        stamped: Decisions = []
        policy = self._hashes[arm]
        for decision in decisions:
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
                candidate.attend()
            busy = False
            for arm, rules in enumerate(self._rules):
                if rules.unsettled() or (due and not arm):
                    decisions += self._stamped(arm, rules.follow_up(now_ns))
                    self._touch_all()
                    busy = True
            due = False
            busy |= self._release(now_ns, decisions)
            if self._touched:
                self._fill_touched(now_ns, decisions)
                busy = True
            if not busy and stable.queue.gone == self._gone:
                return

    def _release(self, now_ns: int, decisions: Decisions) -> bool:
        """Let go what limits held back and have room for now: in order of arrival, whosever."""
        released = False
        while True:
            ready = [
                (request, arm)
                for arm, rules in enumerate(self._rules)
                if (request := rules.next_up(now_ns)) is not None
            ]
            if not ready:
                return released
            request, arm = min(ready)
            decisions += self._stamped(arm, self._rules[arm].let_go(now_ns, request))
            released = True

    # The replicas

    def touch(self, numbers: Iterable[int]) -> None:
        self._touched.update(dict.fromkeys(numbers))

    def _touch_all(self) -> None:
        self.touch(self._rules[0].facts.replicas)

    def others_wait(self, queue: Tiered, hosts: tuple[Host, ...]) -> list[int]:
        other = self.other(queue)
        if not other.queued:
            return []
        numbers = [host.number for host in hosts if other.waits_on(host.number)]
        self.touch(numbers)  # it is seen there whose turn it is
        return numbers

    def other(self, queue: Tiered) -> Tiered:
        return self._queues[1 - self._arm_of(queue)]

    def queued(self) -> int:
        return self._queues[0].queued + self._queues[1].queued

    def ahead_ns(self, queue: Tiered, pool: Pool, job: Job) -> int:
        own_ns = pool.ahead_ns(job.tier, job.order_ns)
        all_ns = own_ns + self.other(queue).pool_ahead_ns(pool.replicas, job.tier, job.order_ns)
        share = self._share(0)
        if queue is self._queues[1] or not share:
            return all_ns
        # Whatever a candidate piles up, it can take no more than its share and its lead.
        return min(all_ns, own_ns * 1000 // share + LEAD_NS)

    def started(self, queue: Tiered, number: int, work_ns: int) -> None:
        arm = self._arm_of(queue)
        if not self.other(queue).waits_on(number):
            self._lead_ns.pop(number, None)  # nobody is owed anything for when he did not wait
            return
        lead_ns = work_ns * self._share(1 - arm) // 1000
        lead_ns = self._lead_ns.get(number, 0) + (lead_ns if arm else -lead_ns)
        # More is not remembered: what neither can use now goes to either.
        self._lead_ns[number] = max(-2 * LEAD_NS, min(lead_ns, 2 * LEAD_NS))

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
                if arm not in spent and queue.waits_on(number)
            ]
            if not waiting:
                return
            arm = waiting[0] if len(waiting) == 1 else self._turn(number)
            made: Decisions = []
            came = self._queues[arm].send_one(now_ns, number, made, passed)
            decisions += self._stamped(arm, made)
            if came == HELD:
                return  # what comes free is kept for this one
            if came != MOVED:
                spent.add(arm)

    def _turn(self, number: int) -> int:
        """Whose request goes next to a replica that both wait for."""
        for arm in (0, 1):
            if self._leads(arm, number):
                return 1 - arm
        stable, candidate = (queue.urgency(number) for queue in self._queues)
        return int(candidate < stable)

    def _leads(self, arm: int, number: int) -> bool:
        """Has it started so much more than its share there that it is the other's turn?"""
        lead_ns = self._lead_ns.get(number, 0)
        return (lead_ns if arm else -lead_ns) > LEAD_NS

    # Snapshots

    def state(self) -> CanaryState:
        return CanaryState(
            canonical(self.candidate.parameters), self._share_permille, self.salt,
            sorted(self._lead_ns.items()), self.candidate.snapshot(),
        )  # fmt: skip

    def load(self, state: CanaryState) -> None:
        """Go on from a state; both judgements have been restored already."""
        self._lead_ns = dict(state.lead)
