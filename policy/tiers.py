"""The dynamic tiered queue: which tier a request is taken for, and who goes next.

Between tiers the order is Turbo, what Turbo lent to Stable, Stable, Batch, Fallback; but a tier
that waits is sure of its share of the work started. Within a tier the earliest deadline goes first.
Deadlines beyond ``aging_ms`` count as ``aging_ms``, so everything is first some day.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.events import Arrived
    from policy.facts import Recent
    from policy.parameters import Classes, Tiers

TURBO, LENT, STABLE, BATCH, FALLBACK = range(5)
TIERS = 5
LANES = 3 * TIERS  # lane 3 x tier for short prompts, then one for long ones, then for retries
NAMES = ("turbo", "lent", "stable", "batch", "fallback")
TFLOP = 10**12
NS_PER_MS = 1_000_000
CREDIT_MOST = 1000 * TFLOP  # what a tier may save up: enough for one very costly request
BUCKET_SHIFT = 29  # work ahead is counted in deadline buckets of about half a second


class Job(msgspec.Struct, array_like=True, gc=False):
    """How an open request was judged."""

    request: int
    tier: int
    sla: str
    flops: int
    prompt_tokens: int
    output_tokens: int
    due_ns: int
    """By when its first token is wanted."""
    keys: tuple[int, ...] = ()
    """Of its prefix blocks (see ``policy.prefixes``)."""
    block_tokens: int = 0
    strikes: int = 0
    """Time-outs and out-of-memory failures of its own."""
    lighter: bool = False
    """The lighter model answers it."""
    queued: bool = False
    queued_ns: int = 0
    order_ns: int = 0
    """Its place within its tier: a deadline, never further off than aging allows."""
    latest_ns: int = 0
    """Sent later than this it would miss its deadline, even if all went well."""
    work_ns: int = 0
    """Of one full replica's time."""
    ahead_ns: int = 0
    """The wait that was predicted when it was queued."""
    long: bool = False
    again: bool = False
    """A replica failed it, so it may not go to all."""
    prefill_ns: int = 0
    """From dispatch to first token, as predicted at dispatch."""
    step_ns: int = 0
    """Of one decoding step, as predicted at dispatch."""


class Tags:
    """Gives each request its SLA class, its deadline and its tier."""

    __slots__ = (
        "_aging_ns", "_answers_ns", "_boost_permille", "_deadlines_ns", "_default_class",
        "_errors_permille", "_lend_from", "_lend_ns", "_lines", "_promises_ns", "_stable_max",
        "_strikes", "_turbo_max",
    )  # fmt: skip

    def __init__(self, classes: Classes, tiers: Tiers) -> None:
        self._deadlines_ns = {
            "P0": classes.p0_deadline_ms * NS_PER_MS,
            "P1": classes.p1_deadline_ms * NS_PER_MS,
            "P2": classes.p2_deadline_ms * NS_PER_MS,
        }
        self._answers_ns = {
            "P0": classes.p0_answer_ms * NS_PER_MS,
            "P1": classes.p1_answer_ms * NS_PER_MS,
            "P2": classes.p2_answer_ms * NS_PER_MS,
        }
        self._default_class: str = classes.default_class
        self._lines = classes.lines
        self._turbo_max = tiers.turbo_max_tflop * TFLOP
        self._stable_max = tiers.stable_max_tflop * TFLOP
        self._lend_ns = tiers.lend_wait_ms * NS_PER_MS
        self._lend_from = self._turbo_max * tiers.lend_from_permille // 1000
        self._strikes = tiers.fallback_strikes
        self._aging_ns = tiers.aging_ms * NS_PER_MS
        self._boost_permille = tiers.boost_permille
        self._errors_permille = tiers.boost_errors_permille
        no_promise = 1 << 62
        self._promises_ns = (
            tiers.turbo_promise_ms * NS_PER_MS,
            tiers.stable_promise_ms * NS_PER_MS,
            tiers.stable_promise_ms * NS_PER_MS,
            no_promise,
            tiers.fallback_promise_ms * NS_PER_MS,
        )

    def sla(self, event: Arrived) -> str:
        """The caller's class, else its business line's, else the default."""
        if event.sla in self._deadlines_ns:
            return event.sla
        line = self._lines.get(event.line)
        return self._default_class if line is None else line.sla

    def deadline_ns(self, event: Arrived, sla: str) -> int:
        """From arrival to first token: the caller's, else its line's, else the class's."""
        if event.deadline_ns:
            return event.deadline_ns
        line = self._lines.get(event.line)
        if line is not None and line.deadline_ms:
            return line.deadline_ms * NS_PER_MS
        return self._deadlines_ns[sla]

    def answer_ns(self, event: Arrived) -> int:
        """From arrival to the answer, however it comes about: its class's, or the caller's own
        deadline where that is later; 0: without an end."""
        answer_ns = self._answers_ns[self.sla(event)]
        return answer_ns and max(answer_ns, event.deadline_ns)

    def tier(self, sla: str, flops: int, strikes: int) -> int:
        """``strikes`` counts consecutive time-outs and out-of-memory failures."""
        if strikes >= self._strikes:
            return FALLBACK
        if sla == "P0":
            return TURBO if flops < self._turbo_max else STABLE
        return STABLE if sla == "P1" and flops < self._stable_max else BATCH

    def lends(self, tier: int, flops: int, wait_ns: int) -> bool:
        """Does Turbo, with this much of a wait, lend this request to Stable?"""
        if tier != TURBO or not self._lend_ns:
            return False
        return wait_ns >= self._lend_ns and flops >= self._lend_from

    def order_ns(self, job: Job, arrived_ns: int, recent: Recent | None) -> int:
        """Its place within its tier. Users who were served badly are moved up a little."""
        left_ns = min(job.due_ns - arrived_ns, self._aging_ns)
        if recent is not None and self._boost_permille and recent.results:
            late = recent.ttft_ns_p90() > self._promises_ns[job.tier]
            bad = recent.failed_or_retried_permille() >= max(1, self._errors_permille)
            if late or bad:
                left_ns -= left_ns * self._boost_permille // 1000
        return arrived_ns + left_ns


def _by_deadline(head: tuple[Job, int]) -> tuple[int, int]:
    return head[0].order_ns, head[0].request


class PoolState(msgspec.Struct, array_like=True):
    """What a pool knows beside its jobs."""

    replicas: tuple[int, ...]
    credit: list[int]
    holds: list[int]
    served: int


class Pool:
    """The queue in front of one set of replicas: three lanes a tier.

    A long prompt that may not start yet must not block the short ones behind it, nor one that a
    replica has failed those that may go there.
    """

    __slots__ = (
        "_buckets", "_gone", "_jobs", "_lanes", "_last_bucket", "_shares", "credit", "holds",
        "queued", "replicas", "served", "waiting", "work_ns",
    )  # fmt: skip

    def __init__(
        self, replicas: tuple[int, ...], shares: tuple[int, ...], jobs: dict[int, Job]
    ) -> None:
        self.replicas = replicas
        self.served = 0
        """Millions of FLOPs started, for turns between pools that share a replica."""
        self.queued = 0
        self.waiting = [0] * LANES
        self.work_ns = [0] * TIERS
        self.credit = [0] * TIERS
        """FLOPs that a tier may start before the tiers above it."""
        self.holds = [-1] * LANES
        """The replica that fills no further until the lane's head fits; -1: none."""
        self._shares = shares
        self._jobs = jobs
        # Heaps of (order_ns, request). The top always waits; below it, some may be gone.
        self._lanes: list[list[tuple[int, int]]] = [[] for _ in range(LANES)]
        self._gone: set[int] = set()
        self._buckets: list[dict[int, int]] = [{} for _ in range(TIERS)]
        self._last_bucket = [0] * TIERS

    def push(self, job: Job) -> None:
        if job.request in self._gone:  # it waited here before, for another model: that is over
            self._compact()
        tier = job.tier
        lane = 3 * tier + (2 if job.again else job.long)
        heappush(self._lanes[lane], (job.order_ns, job.request))
        self.queued += 1
        self.waiting[lane] += 1
        self.work_ns[tier] += job.work_ns
        buckets = self._buckets[tier]
        bucket = job.order_ns >> BUCKET_SHIFT
        buckets[bucket] = buckets.get(bucket, 0) + job.work_ns
        if bucket > self._last_bucket[tier] or len(buckets) == 1:
            self._last_bucket[tier] = bucket

    def remove(self, job: Job) -> None:
        """The job waits no longer: it starts, is shed, or was cancelled."""
        tier = job.tier
        lane = 3 * tier + (2 if job.again else job.long)
        heap = self._lanes[lane]
        if heap[0][1] == job.request:
            heappop(heap)
            self.holds[lane] = -1
            while heap and heap[0][1] in self._gone:
                self._gone.remove(heappop(heap)[1])
        else:
            self._gone.add(job.request)
        self.queued -= 1
        self.waiting[lane] -= 1
        self.work_ns[tier] -= job.work_ns
        buckets = self._buckets[tier]
        bucket = job.order_ns >> BUCKET_SHIFT
        buckets[bucket] -= job.work_ns
        if not buckets[bucket]:
            del buckets[bucket]
        if not any(self.waiting[3 * tier : 3 * tier + 3]):
            self.credit[tier] = 0
        if len(self._gone) > 64 + 2 * self.queued:
            self._compact()

    def started(self, tier: int, cost: int, payer: int) -> None:
        """Count a started job's FLOPs towards the shares of the tiers that wait meanwhile.

        ``payer`` is the tier whose guaranteed turn it was, or that of the job.
        """
        self.served += cost >> 20  # else it outgrows 64 bits in a snapshot
        credit, waiting = self.credit, self.waiting
        for other in (LENT, STABLE, BATCH, FALLBACK):
            lane = 3 * other
            if waiting[lane] or waiting[lane + 1] or waiting[lane + 2]:
                saved = credit[other] + cost * self._shares[other] // 1000
                credit[other] = saved if saved < CREDIT_MOST else CREDIT_MOST
        credit[payer] = max(0, credit[payer] - cost)

    def insists(self, job: Job, payer: int, now_ns: int) -> bool:
        """Must a guaranteed turn be waited for, though its job does not fit yet?

        Not at first: smaller ones go before it. But once it is owed twice the job, or the job is
        due, nothing may pass, or a tier above could take every bit of room that comes free.
        """
        owed = self.credit[payer]
        return now_ns >= job.order_ns or owed >= min(2 * job.flops, CREDIT_MOST)

    def turns(self) -> Iterator[tuple[Job, int, int]]:
        """Heads in the order of their turn: (job, lane, tier whose guaranteed turn it is or -1).

        Stable's turn is also for what Turbo lent it, by deadline: so the lent, with a share of
        their own besides, do better than Stable itself.
        """
        credit = self.credit
        for tier in (LENT, STABLE, BATCH, FALLBACK):
            if credit[tier]:
                heads = self._heads(tier)
                if tier == STABLE:
                    lent = self._heads(LENT)
                    if lent:
                        heads = tuple(sorted(lent + heads, key=_by_deadline))
                for job, lane in heads:
                    if credit[tier] < min(job.flops, CREDIT_MOST):
                        break  # save on: cheaper ones would use up what the first is owed
                    yield job, lane, tier
        for tier in (TURBO, LENT, STABLE, BATCH, FALLBACK):
            for job, lane in self._heads(tier):
                yield job, lane, -1

    def _heads(self, tier: int) -> tuple[tuple[Job, int], ...]:
        lane = 3 * tier
        jobs = self._jobs
        short, long, again = self._lanes[lane : lane + 3]
        if not (long or again):
            return ((jobs[short[0][1]], lane),) if short else ()
        heads = [(heap[0], at) for at, heap in enumerate((short, long, again), lane) if heap]
        return tuple([(jobs[head[1]], at) for head, at in sorted(heads)])

    def _compact(self) -> None:
        for heap in self._lanes:
            heap[:] = [entry for entry in heap if entry[1] not in self._gone]
            heapify(heap)
        self._gone.clear()

    def blocked_for(self, tier: int, long: bool) -> bool:
        """Must a new job queue behind others? Only long prompts let a short one pass."""
        waiting = self.waiting
        return any(
            waiting[3 * before] or (long and waiting[3 * before + 1]) for before in range(tier + 1)
        )

    def again(self, tier: int) -> list[int]:
        """The first retry that waits in each tier down to this one."""
        return [lane[0][1] for lane in self._lanes[2 : 3 * tier + 3 : 3] if lane]

    def ahead_ns(self, tier: int, order_ns: int) -> int:
        """The wait of a job queued there, if all replicas work at full speed and none comes later:
        what goes before it, or its own tier's part of it on the tier's guaranteed share."""
        bucket = order_ns >> BUCKET_SHIFT
        own = self.work_ns[tier]
        if bucket < self._last_bucket[tier]:  # else all of it goes before: the common case
            own = sum([work for at, work in self._buckets[tier].items() if at <= bucket])
        before = own + sum(self.work_ns[:tier])
        share = self._shares[tier]
        if share and own * 1000 // share < before:
            before = own * 1000 // share
        return before // len(self.replicas)

    def state(self) -> PoolState:
        return PoolState(self.replicas, list(self.credit), list(self.holds), self.served)

    def load(self, state: PoolState) -> None:
        self.credit = list(state.credit)
        self.holds = list(state.holds)
        self.served = state.served
