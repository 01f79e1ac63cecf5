"""The dynamic tiered queue at work: requests wait here, in order, and engines are fed shallowly.

Puts complexity, tiers and placement together, and tries again elsewhere what a replica failed. One
file each; this one says what becomes of a request between its admission and its answer.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from policy.capacity import pool_of
from policy.complexity import UNIT, Complexity, ComplexityState, Quantile, flops
from policy.decisions import Dispatch, Settled, Verify
from policy.facts import ELIGIBLE_CACHE_MAX, STRIKES
from policy.hosts import CAPPED, FREE, FULL, TICKS_PER_NS, Host
from policy.outcomes import CALLERS_FAULT, failed, too_large, unserved
from policy.placement import Placer, PlacerState
from policy.prefixes import PrefixTable, chain
from policy.tiers import FALLBACK, LENT, NAMES, NS_PER_MS, TURBO, Job, Pool, PoolState, Tags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from policy.decisions import Decision
    from policy.events import Arrived, Finished
    from policy.facts import Facts, Open
    from policy.parameters import Inflight, Parameters
    from policy.placement import Choice, Score

Decisions = list["Decision"]
Passed = dict[int, tuple[int, int]]
"""(order, request) by lane."""
LAST = (1 << 62, 0)
State = TypeVar("State", bound=msgspec.Struct)

LOST = frozenset({"silent", "replica_lost"})
"""Failures of a replica, not of a request."""

# What came of an attempt to send a queue's next request to a replica.
NOTHING = 0  # none may go there, or none is first now
MOVED = 1  # one was sent, or shed as too late
HELD = 2  # it is full, and what comes free is kept for the one whose turn it is


class Split(Protocol):
    """Two queues in front of the same replicas (``policy.canary``), as each of them sees it."""

    def touch(self, numbers: Iterable[int]) -> None:
        """These are to be filled before the step is over."""
        ...

    def others_wait(self, queue: Tiered, hosts: tuple[Host, ...]) -> list[int]:
        """Of ``hosts``, those for which something waits in the other queue."""
        ...

    def learn(self, queue: Tiered, lesson: Callable[[Tiered], None]) -> None:
        """The other learns, too, from how long things take, whoever sent them."""
        ...

    def full(self, queue: Tiered) -> bool:
        """May no more wait in this one?"""
        ...

    def ahead_ns(self, queue: Tiered, pool: Pool, job: Job) -> int:
        """``Pool.ahead_ns`` with both queues, and this one's share."""
        ...

    def started(self, queue: Tiered, now_ns: int, number: int, work_ns: int) -> None:
        """Something that waited in ``queue`` was sent, and takes so much of the replica's time."""
        ...


class HostState(msgspec.Struct, array_like=True):
    """What was sent to a replica, in canonical form."""

    replica: int
    prefix_keys: list[int]
    prefix_values: list[int]
    held_tokens: int
    pace_ppm: int
    paced_ns: int
    penalties: tuple[int, int, int]
    factor: int
    throttled: bool


class TieredState(msgspec.Struct, array_like=True):
    """The queue in canonical form, times relative to the instant it was asked for."""

    jobs: list[Job]
    pools: list[PoolState]
    hosts: list[HostState]
    complexity: ComplexityState
    waits: Quantile
    prefills: Quantile
    assumed: list[tuple[int, int, int]]
    placer: PlacerState
    gone: list[int]
    reserve_permille: int
    counting: bool
    offered: list[tuple[str, int, int]]


class Tiered:
    """The dynamic tiered queue.

    Args:
        close: told of every request that ends here, just after the facts have closed it; gives
            what its caller hears.
        sent: told of everything sent, with the time in ns until something is heard of it.
        leader: the queue of the policy that rules, where this is a candidate's. What a replica
            has in its cache is known by both.
    """

    __slots__ = (
        "_assumed", "_bytes_per_token_most", "_candidates", "_close", "_complexity",
        "_engine_priority", "_facts", "_inflight", "_latest", "_leader", "_optimism",
        "_parameters", "_pools", "_prefills", "_reserve_permille", "_retrying", "_scored_lines",
        "_sent", "_serving_embeddings", "_serving_text", "_shares", "_shedding", "_waits",
        "counting", "doubted", "gone", "hosts", "jobs", "lighter_model", "offered", "placer",
        "queued", "queued_again", "split", "stranded", "tags",
    )  # fmt: skip

    def __init__(
        self,
        parameters: Parameters,
        facts: Facts,
        close: Callable[[int, Open, Settled], Settled],
        sent: Callable[[int, int, int, int], None],
        leader: Tiered | None = None,
    ) -> None:
        self._leader = leader
        self.split: Split | None = None
        """Set while another queue is in front of the same replicas."""
        self._inflight = parameters.inflight
        tiers = parameters.tiers
        self._parameters = parameters
        self._facts = facts
        self._close = close
        self._sent = sent
        self.placer = Placer(parameters.placement)
        self.gone: frozenset[int] = frozenset()
        """Replicas that are up and will take no new work any more."""
        self.doubted: frozenset[int] = frozenset()
        """Replicas whose answers are doubted: only one that can be judged before it is given out
        may be asked of them, and none be verified there."""
        self.stranded: list[Open] = []
        """Requests that a lighter model was to answer, and will not."""
        self.counting = False
        """Whether ``offered`` is kept: only a fleet that can grow needs it."""
        self.offered: dict[str, tuple[int, int]] = {}
        """By pool, since it was last cleared: tokens, and ns of one full replica's time."""
        self._reserve_permille = parameters.inflight.reserve_permille
        self.tags = Tags(parameters.classes, tiers)
        self._complexity = Complexity(parameters)
        self._shedding = parameters.shedding.enabled
        self._optimism = parameters.estimates.optimism_permille
        self.lighter_model = tiers.fallback_model
        self._bytes_per_token_most = parameters.estimates.bytes_per_token_most
        self._engine_priority = parameters.inflight.engine_priority
        confidence = parameters.confidence
        self._candidates = confidence.candidates_most if confidence.enabled else 0
        self._scored_lines = frozenset(confidence.lines)
        self._shares = (
            0, tiers.lent_least_permille, tiers.stable_least_permille, tiers.batch_least_permille,
            tiers.fallback_least_permille,
        )  # fmt: skip
        self.jobs: dict[int, Job] = {}
        self.hosts: dict[int, Host] = {}
        self._serving_text: dict[str, tuple[Host, ...]] = {}
        self._serving_embeddings: dict[str, tuple[Host, ...]] = {}
        self._pools: dict[tuple[int, ...], Pool] = {}
        self.queued = 0
        self.queued_again = 0
        """How many of them wait for a replica that has not failed them yet."""
        self._retrying = 0
        # Observed over predicted, in 1/1024. Waits begin at a half: nothing is shed on a guess.
        self._waits = Quantile(UNIT * UNIT // 2, 1)
        self._prefills = Quantile(UNIT * UNIT, 1)
        self._latest: list[tuple[int, int]] = []
        self._assumed: list[tuple[int, int, int]] = []

    def deadline_ns(self) -> int | None:
        """When something here is too late, or a prefill over for certain."""
        latest, assumed = self._latest, self._assumed
        if not latest and not assumed:
            return None
        while latest and not self._waits_still(latest[0]):
            heappop(latest)
        while assumed and not self._prefills_still(assumed[0]):
            heappop(assumed)
        # A job may start at its latest; it is too late one nanosecond after.
        due_ns = latest[0][0] + 1 if latest else None
        if assumed and (due_ns is None or assumed[0][0] < due_ns):
            return assumed[0][0]
        return due_ns

    def ticked(self, now_ns: int) -> Decisions:
        """Shed what is too late, and go on where a prefill is over."""
        decisions: Decisions = []
        touched: list[int] = []
        while self._assumed and self._assumed[0][0] <= now_ns:
            over = heappop(self._assumed)
            if self._prefills_still(over):
                self._facts.assume_prefilled(self._facts.open[over[1]])
                touched.append(over[2])
        while self._latest and self._latest[0][0] < now_ns:
            entry = heappop(self._latest)
            if self._waits_still(entry):
                replicas = self._shed_late(now_ns, self.jobs[entry[1]], decisions)
                touched += [replica for replica in replicas if replica not in touched]
        if touched and self.queued:
            decisions += self.refill(now_ns, touched)
        return decisions

    # The fleet

    def rehost(self, now_ns: int, gone: frozenset[int]) -> Decisions:
        """Other replicas take work from now on: all that waits joins the queue of those that can
        serve it."""
        facts = self._facts
        self.gone = gone
        inflight = self._inflight
        for number, known in facts.replicas.items():
            host = self.hosts.get(number)
            if host is None or host.replica is not known:
                self._add_host(Host(known, inflight, self._new_table(number)), now_ns)
            elif host.spec is not known.spec:  # it came back with work in flight
                self._add_host(Host(known, inflight, host.prefixes), now_ns)
        kept = [(number, host) for number, host in self.hosts.items() if number in facts.replicas]
        self.hosts = dict(sorted(kept))  # by number, whatever order they came in
        return self._regroup(now_ns)

    def _add_host(self, host: Host, now_ns: int) -> None:
        host.reserve(self._reserve_permille)
        self.hosts[host.number] = host
        self.placer.refresh(host, now_ns)

    def _new_table(self, number: int) -> PrefixTable:
        if self._leader is not None:
            return self._leader.hosts[number].prefixes
        return PrefixTable(self._parameters.history.prefix_entries_max)

    def aim(self, inflight: Inflight) -> None:
        """Other targets for what is in flight on each replica, or none but the parameters'."""
        self._inflight = inflight
        for host in self.hosts.values():
            host.aim(inflight)
            host.reserve(self._reserve_permille)

    def aim_at(self, number: int) -> None:
        """This controller's part of a replica has changed."""
        host = self.hosts.get(number)
        if host is not None:
            host.aim(self._inflight)
            host.reserve(self._reserve_permille)

    def reserve(self, permille: int) -> None:
        """Keep this part of every replica for Turbo."""
        if permille != self._reserve_permille:
            self._reserve_permille = permille
            for host in self.hosts.values():
                host.reserve(permille)

    # A request's way

    def admit(
        self, now_ns: int, opened: Open, lighter: bool = False, from_ns: int | None = None
    ) -> Decisions:
        """Send it, let it wait, or close it.

        Args:
            lighter: the lighter model is to answer it.
            from_ns: when its deadline began to count, if not at its arrival.
        """
        event = opened.event
        hosts = self.serving(self.lighter_model if lighter else event.model, event)
        if all(host.number in opened.tried for host in hosts):
            return self._unserved(now_ns, opened)
        least_tokens = event.prompt_bytes // self._bytes_per_token_most + event.max_tokens
        if least_tokens > hosts[0].tokens_most and least_tokens > max(
            host.tokens_most for host in hosts
        ):
            return self._refused(now_ns, opened, too_large(event.request))
        from_ns = opened.arrived_ns if from_ns is None else from_ns
        job = self._judged(from_ns, event, hosts)
        if lighter:
            job.lighter = True
        elif job.lighter:
            hosts = self.serving(self.lighter_model, event)
        if opened.due_ns and from_ns == opened.arrived_ns:
            job.due_ns = min(job.due_ns, opened.due_ns)
        if opened.answer_ns:
            job.due_ns = min(job.due_ns, opened.answer_ns)
        self.jobs[event.request] = job
        self._retrying += bool(opened.tried)
        if self.counting:
            self._count(job, hosts[0])
        if not self.queued:
            sent = self._send_at_once(now_ns, opened, job, hosts, opened.tried)
            if sent is not None:
                return [sent]
        return self._queue_or_shed(now_ns, opened, job, hosts)

    def _count(self, job: Job, host: Host) -> None:
        """Add an arrival to the load that was offered to its replicas."""
        spec = host.spec
        need = host.need(job.prompt_tokens, job.output_tokens, job.keys, job.block_tokens)
        work_ns = host.work_ticks(need, job.prompt_tokens, job.output_tokens) // TICKS_PER_NS
        pool = pool_of(spec.models, spec.pooling)
        tokens, before_ns = self.offered.get(pool, (0, 0))
        tokens += job.prompt_tokens + job.output_tokens
        self.offered[pool] = (tokens, before_ns + work_ns)

    def first_token(self, now_ns: int, opened: Open) -> None:
        """Learn from how long it took."""
        job = self.jobs[opened.event.request]
        if job.prefill_ns > 0:
            took_ns = now_ns - (opened.dispatched_ns or 0)
            self._prefills.add(took_ns * UNIT // job.prefill_ns, self._optimism)
            if self.split is not None:
                self._share_prefill(self.split, took_ns * UNIT // job.prefill_ns)

    def finished(self, now_ns: int, opened: Open, usage: Finished) -> Job:
        """Learn from an answer; the request stays where it is in the books."""
        job = self.jobs[usage.request]
        self._observe(now_ns, opened, job, usage)
        if self.split is not None:
            self._share_answer(self.split, now_ns, opened, job, usage)
        return job

    def _share_prefill(self, split: Split, ratio: int) -> None:
        split.learn(self, lambda other: other._prefills.add(ratio, other._optimism))

    def _share_answer(
        self, split: Split, now_ns: int, opened: Open, job: Job, usage: Finished
    ) -> None:
        split.learn(self, lambda other: other._observe(now_ns, opened, job, usage))

    def _observe(self, now_ns: int, opened: Open, job: Job, usage: Finished) -> None:
        if not job.lighter:
            self._complexity.observe(opened.event, job.sla, usage)
        predicted_ns = job.prefill_ns + usage.output_tokens * job.step_ns
        host = self.hosts[usage.replica]
        self.placer.observe(now_ns, host, now_ns - (opened.dispatched_ns or 0), predicted_ns)

    def answered(self, opened: Open, job: Job) -> None:
        """Its replica is done with it, but its caller is not told yet."""
        self._release(opened, job)
        self._facts.answered(opened)

    def second(self, opened: Open, job: Job) -> Choice | None:
        """Where an answer can be verified: another replica with room, in another failure domain."""
        served = self.hosts[opened.replica].spec
        others = [
            host
            for host in self._hosts_for(opened.event, job)
            if host.number != served.replica and not host.probing
            and host.number not in self.doubted
            and not (served.domain and host.spec.domain == served.domain)
        ]  # fmt: skip
        return self.placer.choose(others, job, (), opened.event.model)

    def verify(self, now_ns: int, opened: Open, job: Job, choice: Choice) -> Verify:
        """Run it a second time."""
        host, need, prefill_ticks, step_ticks = choice
        opened.kv_tokens = need.kv_tokens
        opened.prefill_tokens = need.prefill_tokens
        opened.long = need.long
        if job.keys:
            host.prefixes.add(job.keys, job.block_tokens)
        self._facts.verify(opened, host.replica)
        prefill_ns = prefill_ticks // TICKS_PER_NS
        self._assume(now_ns, opened, prefill_ns)
        heard_ns = prefill_ns + job.output_tokens * step_ticks // TICKS_PER_NS
        self._sent(now_ns, job.request, host.number, heard_ns)
        return Verify(job.request, host.number)

    def verification_over(self, opened: Open, job: Job) -> None:
        self._release(opened, job)
        self._facts.verification_over(opened)

    def retry(self, now_ns: int, opened: Open, kind: str) -> Decisions | None:
        """Try another replica, if that is allowed; None if it is not."""
        job = self.jobs[opened.event.request]
        if kind in STRIKES:
            job.strikes += 1
        own = opened.event.deadline_ns or opened.due_ns  # its caller's word, or its chain's
        if kind != "backpressure" and not (opened.tried or own):
            grace_ns = self._parameters.retries.grace_ms * NS_PER_MS
            job.due_ns = max(job.due_ns, now_ns + grace_ns)
        if not self._may_retry(now_ns, opened, job, kind):
            return None
        self._release(opened, job)
        self._retrying += not opened.tried
        self._facts.take_back(opened)
        opened.kind = kind
        decisions: Decisions = []
        self._try_again(now_ns, opened, job, decisions)
        return decisions

    def may_move(self, now_ns: int, opened: Open, kind: str) -> bool:
        """Could another replica still give it a first token in time?"""
        job = self.jobs[opened.event.request]
        in_time = now_ns + job.prefill_ns < job.due_ns
        return in_time and self._may_retry(now_ns, opened, job, kind)

    def waits_for(self, opened: Open, job: Job) -> tuple[int, ...]:
        """The replicas that could serve a queued request."""
        return self._pool(self._hosts_for(opened.event, job)).replicas

    def _judged(self, from_ns: int, event: Arrived, hosts: tuple[Host, ...]) -> Job:
        tags = self.tags
        sla = tags.sla(event)
        model = event.model
        prompt_tokens = self._complexity.prompt_tokens(model, event.prompt_bytes) or 1
        output_tokens = self._complexity.output_tokens(event, sla)
        keys: tuple[int, ...] = ()
        cached = block_tokens = 0
        if event.prefix and event.prefix_block_bytes > 0:
            history = self._parameters.history
            keys = chain(event, history.prefix_blocks_max)
            block_tokens = self._complexity.prompt_tokens(model, event.prefix_block_bytes)
            blocks = max([host.prefixes.cached_blocks(keys) for host in hosts])
            cached = min(blocks * block_tokens, prompt_tokens - 1)
        cost = flops(hosts[0].replica.spec, prompt_tokens, cached, output_tokens)
        strikes = 0
        if event.user:
            recent = self._facts.users.get(event.user)
            if recent is not None:
                strikes = recent.strikes
        tier = tags.tier(sla, cost, strikes)
        due_ns = from_ns + tags.deadline_ns(event, sla)
        return Job(
            event.request, tier, sla, cost, prompt_tokens, output_tokens, due_ns, keys,
            block_tokens, 0, tier == FALLBACK and self.has_lighter(event),
        )  # fmt: skip

    def _send_at_once(
        self,
        now_ns: int,
        opened: Open,
        job: Job,
        hosts: tuple[Host, ...],
        avoid: tuple[int, ...] | list[int],
    ) -> Dispatch | None:
        """To the replica with room where it is done soonest; None if none has room."""
        if self.split is not None:
            avoid = [*avoid, *self.split.others_wait(self, hosts)]
        if self.doubted and not self._may_try(opened.event):
            avoid = [*avoid, *self.doubted]
        best = self.placer.choose(hosts, job, avoid, opened.event.model)
        if best is None:
            return None
        return self._dispatched(now_ns, opened, job, best)

    def _dispatched(self, now_ns: int, opened: Open, job: Job, choice: Choice) -> Dispatch:
        host, need, prefill_ticks, step_ticks = choice
        opened.kv_tokens = need.kv_tokens
        opened.prefill_tokens = need.prefill_tokens
        opened.long = need.long
        job.prefill_ns = prefill_ticks // TICKS_PER_NS
        job.step_ns = step_ticks // TICKS_PER_NS
        if job.keys:
            host.prefixes.add(job.keys, job.block_tokens)
        self._facts.dispatch(now_ns, opened, host.replica)
        number = host.replica.spec.replica
        heard_ns = job.prefill_ns
        if not opened.event.stream:
            self._assume(now_ns, opened, job.prefill_ns)
            heard_ns += job.output_tokens * job.step_ns
        self._sent(now_ns, job.request, number, heard_ns)
        priority = job.tier if self._engine_priority else 0
        model = self.lighter_model if job.lighter else ""
        candidates = self.candidates(opened.event)
        return Dispatch(
            job.request, number, NAMES[job.tier], priority, model, candidates=candidates
        )

    def candidates(self, event: Arrived) -> int:
        """How many candidates of each token are asked for, so that its answer can be scored."""
        if event.endpoint == "embeddings":
            return 0
        lines = self._scored_lines
        return self._candidates if not lines or event.line in lines else 0

    def _may_try(self, event: Arrived) -> bool:
        """Can its answer be judged before its caller has any of it?"""
        return not event.stream and self.candidates(event) > 0

    def _assume(self, now_ns: int, opened: Open, prefill_ns: int) -> None:
        """Its first token is not reported if it is no stream; its prefill must be over by then.
        Much later, and prompts wait here for engines that are through with the ones before."""
        request = opened.event.request
        if opened.tries > 1 or opened.served >= 0:  # it may have been on this replica before
            self._assumed = [entry for entry in self._assumed if entry[1] != request]
            heapify(self._assumed)
        at_ns = now_ns + prefill_ns + 50 * NS_PER_MS
        heappush(self._assumed, (at_ns, request, opened.replica))

    def _queue_or_shed(
        self, now_ns: int, opened: Open, job: Job, hosts: tuple[Host, ...]
    ) -> Decisions:
        """No replica is free at once, or others wait: join the queue, or hear that it is no use."""
        shedding = self._parameters.shedding
        pool = self._pool(hosts)
        host = hosts[0]
        split = self.split
        if self.queued >= shedding.queue_max if split is None else split.full(self):
            retry_after_ns = shedding.retry_after_most_ms * NS_PER_MS
            return self._shed(now_ns, opened, job, "queue_full", retry_after_ns)
        tags = self.tags
        need = host.need(job.prompt_tokens, job.output_tokens, job.keys, job.block_tokens)
        job.long = need.long
        job.again = bool(opened.tried)
        event = opened.event
        recent = self._facts.users.get(event.user) if event.user else None
        job.order_ns = tags.order_ns(job, opened.arrived_ns, recent)
        if self._shedding or job.tier == TURBO:
            job.ahead_ns = self._ahead_ns(pool, job)
        if tags.lends(job.tier, job.flops, job.ahead_ns):
            job.tier = LENT
            job.ahead_ns = self._ahead_ns(pool, job)
        if pool.queued:
            if not pool.blocked_for(job.tier, job.long):
                avoid = [*pool.holds, *opened.tried, *self._claimed(pool, job.tier)]
                sent = self._send_at_once(now_ns, opened, job, hosts, avoid)
                if sent is not None:
                    pool.started(job.tier, job.flops, job.tier)
                    return [sent]
        elif self.queued:  # others wait, but for other replicas
            sent = self._send_at_once(now_ns, opened, job, hosts, opened.tried)
            if sent is not None:
                return [sent]
        alone_ns = host.alone_ticks(need) // TICKS_PER_NS
        job.latest_ns = job.due_ns - alone_ns * (self._prefills.value // UNIT) // UNIT
        if self._shedding:
            wait_ns = self._optimistic_ns(job.ahead_ns)
            if now_ns + wait_ns > job.latest_ns:
                late_ns = now_ns + wait_ns - job.latest_ns
                return self._shed(now_ns, opened, job, "deadline", late_ns)
            heappush(self._latest, (job.latest_ns, job.request))
        job.work_ns = host.work_ticks(need, job.prompt_tokens, job.output_tokens) // TICKS_PER_NS
        job.queued = True
        job.queued_ns = now_ns
        if not pool.queued:
            self._join(pool)
        pool.push(job)
        self.queued += 1
        self.queued_again += bool(opened.tried)
        return []

    def _ahead_ns(self, pool: Pool, job: Job) -> int:
        """The wait of a job, if all replicas work at full speed and none comes later."""
        if self.split is None:
            return pool.ahead_ns(job.tier, job.order_ns)
        return self.split.ahead_ns(self, pool, job)

    def _claimed(self, pool: Pool, tier: int) -> list[int]:
        """Replicas that a request which others have failed waits for, in this tier or above."""
        claimed: list[int] = []
        for request in pool.again(tier):
            tried = self._facts.open[request].tried
            claimed += [number for number in pool.replicas if number not in tried]
        return claimed

    def refill(self, now_ns: int, replicas: tuple[int, ...] | list[int]) -> Decisions:
        """Something became free on these replicas: send what waits for them, in its turn."""
        decisions: Decisions = []
        if self.split is not None:  # it is the other queue's turn, perhaps
            self.split.touch(replicas)
            return decisions
        again = self.queued_again
        self._fill(now_ns, replicas, decisions)
        sent = -1
        while again and len(decisions) > sent:
            # One that may not go to these may stand first now, with room for it elsewhere; and
            # behind it another that may.
            sent = len(decisions)
            self._fill(now_ns, list(self._facts.replicas), decisions)
        return decisions

    def _fill(
        self, now_ns: int, replicas: tuple[int, ...] | list[int], decisions: Decisions
    ) -> None:
        for number in replicas:
            host = self.hosts.get(number)
            if host is None or host.out or not host.replica.ready or number in self.gone:
                continue
            spent: list[Pool] = []
            while self.queued and not host.out and host.replica.in_flight < host.sequences_most:
                pool = self._next_pool(number, spent)
                if pool is None:
                    break
                if self._send_next(now_ns, pool, host, decisions) != MOVED:
                    spent.append(pool)

    def waits_on(self, number: int) -> bool:
        """Does anything wait for the replica that may go there?"""
        if not self.queued:
            return False
        host = self.hosts.get(number)
        if host is None or host.out or not host.replica.ready or number in self.gone:
            return False
        return any(pool.queued and number in pool.replicas for pool in self._pools.values())

    def urgency(self, number: int) -> tuple[int, int, int]:
        """Of what would be sent next to a replica that something waits for; the least goes
        first."""
        pool = self._next_pool(number, [])
        assert pool is not None
        job, _, _ = next(pool.turns())
        return job.tier, job.order_ns, job.request

    def send_one(self, now_ns: int, number: int, decisions: Decisions, passed: Passed) -> int:
        """Send the next request that waits for the replica, if it has room.

        Args:
            passed: heads of lanes, of either queue, that were passed by in this turn.
        """
        host = self.hosts[number]
        spent: list[Pool] = []
        outcome = NOTHING
        while not host.out and host.replica.in_flight < host.sequences_most:
            pool = self._next_pool(number, spent)
            if pool is None:
                return outcome
            came = self._send_next(now_ns, pool, host, decisions, passed)
            if came == MOVED:
                return came
            outcome = max(outcome, came)
            spent.append(pool)
        return outcome

    def pool_ahead_ns(self, replicas: tuple[int, ...], tier: int, order_ns: int) -> int:
        """``Pool.ahead_ns`` of what waits here for just these replicas."""
        pool = self._pools.get(replicas)
        return 0 if pool is None else pool.ahead_ns(tier, order_ns)

    def _next_pool(self, number: int, spent: list[Pool]) -> Pool | None:
        """The pool with work for the replica that was served least."""
        best: Pool | None = None
        for pool in self._pools.values():
            if (
                pool.queued
                and number in pool.replicas
                and pool not in spent
                and (best is None or pool.served < best.served)
            ):
                best = pool
        return best

    def _send_next(
        self,
        now_ns: int,
        pool: Pool,
        host: Host,
        decisions: Decisions,
        passed: Passed | None = None,
    ) -> int:
        """Send the pool's next request that the replica has room for, if there is one."""
        number = host.replica.spec.replica
        for job, lane, payer in pool.turns():
            if passed is not None and passed.get(lane, LAST) < (job.order_ns, job.request):
                continue  # one lane for both queues: its head stays where it is
            if self._shedding and job.latest_ns < now_ns:
                self._shed_late(now_ns, job, decisions)
                return MOVED  # the turns are others now
            opened = self._facts.open[job.request]
            if number in opened.tried or (
                number in self.doubted and not self._may_try(opened.event)
            ):
                _pass(passed, lane, job)
                continue
            need = host.need(job.prompt_tokens, job.output_tokens, job.keys, job.block_tokens)
            room = host.room(need, payer >= 0 or job.tier <= LENT)
            if room == FREE:
                self._unqueue(job, pool)
                pool.started(job.tier, job.flops, job.tier if payer < 0 else payer)
                if self.split is not None:
                    self.split.started(self, now_ns, number, job.work_ns)
                if self._shedding and (self.split is None or job.queued_ns != now_ns):
                    waited = (now_ns - job.queued_ns) * UNIT // max(job.ahead_ns, NS_PER_MS)
                    self._waits.add(waited, self._optimism)
                    if self.split is not None:
                        self._share_wait(self.split, waited)
                choice = (host, need, host.prefill_ticks(need), host.step_ticks())
                decisions.append(self._dispatched(now_ns, opened, job, choice))
                return MOVED
            if room == CAPPED or (payer >= 0 and not pool.insists(job, payer, now_ns)):
                if room == CAPPED:
                    _pass(passed, lane, job)
                continue
            if room == FULL:
                if pool.holds[lane] >= 0 and pool.holds[lane] != number:
                    _pass(passed, lane, job)
                    continue  # room is being made for it elsewhere
                pool.holds[lane] = number
            return HELD
        return NOTHING

    def _share_wait(self, split: Split, waited: int) -> None:
        split.learn(self, lambda other: other._waits.add(waited, other._optimism))

    # Failures

    def _may_retry(self, now_ns: int, opened: Open, job: Job, kind: str) -> bool:
        """Another replica may try if nothing was sent to the client, within deadline and budget."""
        if kind in CALLERS_FAULT or kind == "controller_lost":
            return False
        if opened.first_ns is not None and opened.event.stream:
            return False
        retries = self._parameters.retries
        if opened.tries >= retries.tries_most or now_ns >= job.due_ns:
            return False
        # What a lost or ejected replica held is no storm: it gets nothing new to fail. And a
        # request that is being retried has its place.
        host = self.hosts.get(opened.replica)
        gone = kind in LOST or host is None or host.out
        if not opened.tried and not gone:
            count = len(self._facts.open if self.split is None else self.jobs)
            budget = max(retries.budget_least, count * retries.budget_permille // 1000)
            if self._retrying >= budget:
                return False
        return any(
            host.number != opened.replica and host.number not in opened.tried
            for host in self._hosts_for(opened.event, job)
        )

    def _try_again(self, now_ns: int, opened: Open, job: Job, decisions: Decisions) -> None:
        if self.tags.tier(job.sla, job.flops, job.strikes) == FALLBACK:
            job.tier = FALLBACK
            job.lighter = self.has_lighter(opened.event) and any(
                host.number not in opened.tried
                for host in self.serving(self.lighter_model, opened.event)
            )
        hosts = self._hosts_for(opened.event, job)
        if not self.queued:
            sent = self._send_at_once(now_ns, opened, job, hosts, opened.tried)
            if sent is not None:
                decisions.append(sent)
                return
        decisions += self._queue_or_shed(now_ns, opened, job, hosts)

    def _shed_late(self, now_ns: int, job: Job, decisions: Decisions) -> tuple[int, ...]:
        """It can no longer meet its deadline. Returns the replicas it waited for."""
        opened = self._facts.open[job.request]
        pool = self._pool(self._hosts_for(opened.event, job))
        wait_ns = self._optimistic_ns(pool.ahead_ns(job.tier, job.order_ns))
        decisions += self._shed(now_ns, opened, job, "deadline", wait_ns)
        return pool.replicas

    def _shed(
        self, now_ns: int, opened: Open, job: Job, why: str, retry_after_ns: int
    ) -> Decisions:
        shedding = self._parameters.shedding
        retry_after_ns = max(
            shedding.retry_after_least_ms * NS_PER_MS,
            min(retry_after_ns, shedding.retry_after_most_ms * NS_PER_MS),
        )
        tier = NAMES[job.tier]
        if opened.kind:  # it was taken, and a replica failed it: it is not the load's fault
            return self._refused(
                now_ns, opened, failed(job.request, opened.kind, tier, retry_after_ns)
            )
        settled = Settled(job.request, "shed", tier, why, 429, retry_after_ns)
        return self._refused(now_ns, opened, settled)

    def _unserved(self, now_ns: int, opened: Open, tier: str = "") -> Decisions:
        retry_after_ns = self._parameters.shedding.retry_after_least_ms * NS_PER_MS
        return self._refused(now_ns, opened, unserved(opened.event.request, tier, retry_after_ns))

    def _refused(self, now_ns: int, opened: Open, settled: Settled) -> Decisions:
        """It will not be answered here. One that was to be answered by a lighter model has other
        ways left, and perhaps an answer already."""
        self.forget(opened)
        if opened.cause:
            self.stranded.append(opened)
            return []
        if opened.kind and settled.why == opened.kind:
            self._facts.settle(now_ns, opened, opened.kind)
        else:
            self._facts.drop(opened)
        return [self._close(now_ns, opened, settled)]

    # Books

    def _release(self, opened: Open, job: Job) -> None:
        """It is no longer on its replica (the facts are told by the caller)."""
        if job.keys and opened.replica >= 0:
            self.hosts[opened.replica].prefixes.remove(job.keys)

    def forget(self, opened: Open) -> None:
        """The request is about to be settled, or to be judged anew."""
        job = self.jobs.pop(opened.event.request, None)
        if job is None:
            return
        if job.queued:
            self._unqueue(job, self._pool(self._hosts_for(opened.event, job)))
        elif job.keys:
            self._release(opened, job)
        if opened.tried:
            self._retrying -= 1

    def _unqueue(self, job: Job, pool: Pool) -> None:
        job.queued = False
        pool.remove(job)
        self.queued -= 1
        self.queued_again -= bool(self._facts.open[job.request].tried)
        if len(self._latest) > 64 + 4 * self.queued:
            # Most entries are of jobs that started in time: drop them.
            self._latest = [entry for entry in self._latest if self._waits_still(entry)]
            heapify(self._latest)

    def _optimistic_ns(self, wait_ns: int) -> int:
        return wait_ns * (self._waits.value // UNIT) // UNIT

    def _waits_still(self, entry: tuple[int, int]) -> bool:
        """Does the job of an entry in ``_latest`` wait for the start that the entry is about?"""
        job = self.jobs.get(entry[1])
        return job is not None and job.queued and job.latest_ns == entry[0]

    def _prefills_still(self, entry: tuple[int, int, int]) -> bool:
        """Is the request of an entry in ``_assumed`` still on that replica, without a token?"""
        opened = self._facts.open.get(entry[1])
        return opened is not None and opened.replica == entry[2] and opened.prefill_tokens > 0

    # Pools

    def serving(self, model: str, event: Arrived) -> tuple[Host, ...]:
        """The replicas that can answer the event with this model, in order of id."""
        embeddings = event.endpoint == "embeddings"
        cache = self._serving_embeddings if embeddings else self._serving_text
        found = cache.get(model)
        if found is None:
            hosts = self.hosts
            found = tuple(
                [
                    hosts[known.spec.replica]
                    for known in self._facts.eligible(model, embeddings)
                    if known.spec.replica not in self.gone
                ]
            )
            found = self.placer.required(model, found)
            if len(cache) >= ELIGIBLE_CACHE_MAX:
                cache.clear()
            cache[model] = found
        return found

    def _hosts_for(self, event: Arrived, job: Job) -> tuple[Host, ...]:
        return self.serving(self.lighter_model if job.lighter else event.model, event)

    def lighter_ns(self, event: Arrived) -> int:
        """How long the lighter model takes for it at least, as predicted: until its first token, or
        its whole answer where it is no stream. Only where ``has_lighter``."""
        hosts = self.serving(self.lighter_model, event)
        job = self._judged(0, event, hosts)
        soonest = 1 << 62
        for host in hosts:
            need = host.need(job.prompt_tokens, job.output_tokens, job.keys, job.block_tokens)
            ticks = host.prefill_ticks(need)
            if not event.stream:
                ticks += job.output_tokens * host.step_ticks()
            soonest = min(soonest, ticks)
        return soonest // TICKS_PER_NS

    def has_lighter(self, event: Arrived) -> bool:
        """Is there another model than its own that could answer it?"""
        lighter = self.lighter_model
        return lighter not in ("", event.model) and bool(self.serving(lighter, event))

    def _pool(self, hosts: tuple[Host, ...]) -> Pool:
        key = tuple([host.number for host in hosts])
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(key, self._shares, self.jobs)
        return pool

    def _join(self, pool: Pool) -> None:
        """A pool begins to wait: it is owed nothing for the time when it did not."""
        waiting = [other.served for other in self._pools.values() if other.queued]
        if waiting:
            pool.served = max(pool.served, min(waiting))

    def _regroup(self, now_ns: int) -> Decisions:
        """The fleet changed: everything that waits joins the queue of who can serve it now."""
        self._serving_text.clear()
        self._serving_embeddings.clear()
        queued = [job for job in self.jobs.values() if job.queued]
        self._pools.clear()
        decisions: Decisions = []
        for job in queued:
            opened = self._facts.open[job.request]
            if job.lighter and not self.has_lighter(opened.event):
                if opened.cause:  # its own model is what it is kept from
                    job.queued = False
                    self.queued -= 1
                    self.queued_again -= bool(opened.tried)
                    self.forget(opened)
                    self.stranded.append(opened)
                    continue
                job.lighter = False
            hosts = self._hosts_for(opened.event, job)
            if all(host.number in opened.tried for host in hosts):
                job.queued = False
                self.queued -= 1
                self.queued_again -= bool(opened.tried)
                decisions += self._unserved(now_ns, opened, NAMES[job.tier])
            else:
                self._pool(hosts).push(job)
        if self.queued:
            decisions += self.refill(now_ns, list(self._facts.replicas))
        return decisions

    def adopt(self, before: Tiered, now_ns: int) -> list[Open]:
        """Take over from a queue with other parameters: what is in flight keeps the terms it was
        sent on. Returns what waits, in order of arrival: it is to be judged anew."""
        self.learn(before, now_ns)
        for host in self.hosts.values():
            host.prefixes.entries_max = self._parameters.history.prefix_entries_max
        return self.take_in(before)

    def learn(self, before: Tiered, now_ns: int) -> None:
        """Know of the replicas, and of how long things take, what a queue with other parameters
        does."""
        self.gone = before.gone
        self.doubted = before.doubted
        self.counting = before.counting
        self.offered = before.offered
        for host in before.hosts.values():
            taken = Host(host.replica, self._inflight, host.prefixes)
            taken.pace_ppm, taken.paced_ns = host.pace_ppm, host.paced_ns
            taken.out, taken.probing = host.out, host.probing
            self._add_host(taken, now_ns)
        old, new = before._parameters, self._parameters
        if (old.estimates, old.history) == (new.estimates, new.history):
            self._complexity.load(copied(before._complexity.state()))
        if old.placement == new.placement:
            self.placer.load(before.placer.state())
        self._waits, self._prefills = copied(before._waits), copied(before._prefills)

    def take_in(self, other: Tiered) -> list[Open]:
        """Take over what a queue with other parameters sent, on the terms it was sent on. Returns
        what waits there, in order of arrival: it is to be judged anew."""
        self._assumed += other._assumed
        heapify(self._assumed)
        waiting: list[Open] = []
        for request, job in other.jobs.items():
            opened = self._facts.open[request]
            if job.queued:
                waiting.append(opened)
            else:
                self.jobs[request] = job
                self._retrying += bool(opened.tried)
        return waiting

    def rule(self, close: Callable[[int, Open, Settled], Settled]) -> None:
        """It is no candidate's queue any more: it leads, and ``close`` is told what ends here."""
        self._close = close
        self._leader = None
        for host in self.hosts.values():
            host.prefixes.entries_max = self._parameters.history.prefix_entries_max

    # What people and snapshots see

    def scores(self, event: Arrived) -> list[Score]:
        """How the replicas that serve the event's model look to it now."""
        everyone = tuple(
            self.hosts[known.spec.replica]
            for known in self._facts.eligible(event.model, event.endpoint == "embeddings")
        )
        if not everyone:
            return []
        job = self.jobs.get(event.request) or self._judged(0, event, everyone)
        allowed = self.placer.required(event.model, everyone)
        scores: list[Score] = []
        for host in everyone:
            out = host.out or host.number in self.gone or host not in allowed
            scores.append(self.placer.score(host, job, event.model, "out" if out else ""))
        return scores

    def state(self, now_ns: int) -> TieredState:
        return TieredState(
            [_shifted(job, -now_ns) for job in self.jobs.values()],
            [pool.state() for pool in self._pools.values()],
            [
                HostState(
                    number, *self._prefixes(host),
                    host.pace_ppm, host.paced_ns - now_ns, host.penalties, host.factor,
                    host.throttled,
                )
                for number, host in sorted(self.hosts.items())
                if number in self._facts.replicas
            ],
            self._complexity.state(),
            self._waits,
            self._prefills,
            sorted(
                (entry[0] - now_ns, entry[1], entry[2])
                for entry in self._assumed
                if self._prefills_still(entry)
            ),
            self.placer.state(),
            sorted(self.gone),
            self._reserve_permille,
            self.counting,
            [(pool, *load) for pool, load in sorted(self.offered.items())],
        )  # fmt: skip

    def _prefixes(self, host: Host) -> tuple[list[int], list[int], int]:
        if self._leader is not None:  # whose state has them
            return [], [], 0
        table = host.prefixes
        return list(table.entries), list(table.entries.values()), table.held_tokens

    def load(self, state: TieredState, now_ns: int) -> None:
        """Go on from a state; the facts have been restored already."""
        facts = self._facts
        self.gone = frozenset(state.gone)
        self._reserve_permille = state.reserve_permille
        self.counting = state.counting
        self.offered = {pool: (tokens, work_ns) for pool, tokens, work_ns in state.offered}
        self.placer.load(state.placer)
        for saved in state.hosts:
            prefixes = self._new_table(saved.replica)
            if self._leader is None:
                prefixes.entries = dict(zip(saved.prefix_keys, saved.prefix_values, strict=True))
                prefixes.held_tokens = saved.held_tokens
            known = facts.replicas[saved.replica]
            host = Host(known, self._inflight, prefixes)
            host.pace_ppm, host.paced_ns = saved.pace_ppm, saved.paced_ns + now_ns
            host.penalties = saved.penalties
            host.factor, host.throttled = saved.factor, saved.throttled
            host.reserve(self._reserve_permille)
            self.hosts[host.number] = host
        for pool_state in state.pools:
            pool = Pool(pool_state.replicas, self._shares, self.jobs)
            self._pools[pool_state.replicas] = pool
        for saved_job in state.jobs:
            job = _shifted(saved_job, now_ns)
            self.jobs[job.request] = job
            opened = facts.open[job.request]
            self._retrying += bool(opened.tried)
            if job.queued:
                self.queued += 1
                self.queued_again += bool(opened.tried)
                self._pool(self._hosts_for(opened.event, job)).push(job)
                if self._shedding:
                    heappush(self._latest, (job.latest_ns, job.request))
        for pool_state in state.pools:
            self._pools[pool_state.replicas].load(pool_state)
        self._complexity.load(state.complexity)
        self._waits = state.waits
        self._prefills = state.prefills
        self._assumed = [(at + now_ns, request, number) for at, request, number in state.assumed]


def _pass(passed: Passed | None, lane: int, job: Job) -> None:
    if passed is not None:
        passed[lane] = min(passed.get(lane, LAST), (job.order_ns, job.request))


def copied(state: State) -> State:
    """All of it anew, so that nothing is shared."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state))


def _shifted(job: Job, by_ns: int) -> Job:
    return msgspec.structs.replace(
        job,
        due_ns=job.due_ns + by_ns,
        queued_ns=job.queued_ns + by_ns,
        order_ns=job.order_ns + by_ns,
        latest_ns=job.latest_ns + by_ns,
    )
