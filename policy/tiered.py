"""The tiered policy: requests wait here, in order, and engines are fed shallowly.

Puts the mechanisms together: facts, complexity, tiers, placement. One file each; this one only
says what happens to a request at each event.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from policy.complexity import UNIT, Complexity, ComplexityState, Quantile, flops
from policy.decisions import Abort, Dispatch, Refused, Settled
from policy.events import Arrived, Cancelled, Failed, Finished, FirstToken, Ticked
from policy.facts import ELIGIBLE_CACHE_MAX, STRIKES, Facts, FactsState, Illegal
from policy.outcomes import CALLERS_FAULT, MAYBE_RUNNING, failed, too_large, unserved
from policy.placement import CAPPED, FREE, FULL, TICKS_PER_NS, Host, Need, soonest
from policy.prefixes import PrefixTable, chain
from policy.tiers import FALLBACK, LENT, NAMES, NS_PER_MS, TURBO, Job, Pool, PoolState, Tags

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event
    from policy.facts import Open
    from policy.parameters import Parameters

Decisions = list["Decision"]


class HostState(msgspec.Struct, array_like=True):
    """What was sent to a replica, in canonical form."""

    replica: int
    prefixes: list[tuple[int, int]]
    held_tokens: int


class TieredState(msgspec.Struct, array_like=True):
    """The whole policy in canonical form. Times are relative to the facts' ``now_ns``."""

    facts: FactsState
    jobs: list[Job]
    pools: list[PoolState]
    hosts: list[HostState]
    complexity: ComplexityState
    waits: Quantile
    prefills: Quantile
    assumed: list[tuple[int, int, int]]


_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(TieredState)


class Tiered:
    """The dynamic tiered queue as a policy."""

    __slots__ = (
        "_assumed", "_bytes_per_token_most", "_complexity", "_engine_priority", "_facts",
        "_hosts", "_jobs", "_latest", "_lighter_model", "_optimism", "_parameters", "_pools",
        "_prefills", "_queued", "_queued_again", "_retrying", "_serving_embeddings",
        "_serving_text", "_shares", "_shedding", "_tags", "_waits",
    )  # fmt: skip

    def __init__(self, parameters: Parameters, facts: Facts) -> None:
        tiers = parameters.tiers
        self._parameters = parameters
        self._facts = facts
        self._tags = Tags(parameters.classes, tiers)
        self._complexity = Complexity(parameters)
        self._shedding = parameters.shedding.enabled
        self._optimism = parameters.estimates.optimism_permille
        self._lighter_model = tiers.fallback_model
        self._bytes_per_token_most = parameters.estimates.bytes_per_token_most
        self._engine_priority = parameters.inflight.engine_priority
        self._shares = (
            0, tiers.lent_least_permille, tiers.stable_least_permille, tiers.batch_least_permille,
            tiers.fallback_least_permille,
        )  # fmt: skip
        self._jobs: dict[int, Job] = {}
        self._hosts: dict[int, Host] = {}
        self._serving_text: dict[str, tuple[Host, ...]] = {}
        self._serving_embeddings: dict[str, tuple[Host, ...]] = {}
        self._pools: dict[tuple[int, ...], Pool] = {}
        self._queued = 0
        self._queued_again = 0
        """How many of them wait for a replica that has not failed them yet."""
        self._retrying = 0
        # Observed over predicted, in 1/1024. Waits begin at a half: nothing is shed on a guess.
        self._waits = Quantile(UNIT * UNIT // 2, 1)
        self._prefills = Quantile(UNIT * UNIT, 1)
        self._latest: list[tuple[int, int]] = []
        self._assumed: list[tuple[int, int, int]] = []

    # The contract

    def step(self, now_ns: int, event: Event) -> list[Decision] | tuple[Decision, ...]:
        try:
            if type(event) is Arrived:
                return self._arrived(now_ns, event)
            if type(event) is FirstToken:
                return self._first_token(now_ns, event)
            if type(event) is Finished:
                return self._finished(now_ns, event)
            if type(event) is Failed:
                return self._failed(now_ns, event)
            if type(event) is Cancelled:
                return self._cancelled(now_ns, event)
            if type(event) is Ticked:
                return self._ticked(now_ns)
            return self._fleet(now_ns, event)
        except Illegal as illegal:
            return (Refused(type(event).__name__, str(illegal)),)

    def deadline_ns(self) -> int | None:
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

    # Events

    def _arrived(self, now_ns: int, event: Arrived) -> list[Decision] | tuple[Decision, ...]:
        facts = self._facts
        opened = facts.arrive(now_ns, event)
        request = event.request
        hosts = self._serving(event.model, event)
        if not hosts:
            facts.drop(opened)
            return (self._unserved(request),)
        least_tokens = event.prompt_bytes // self._bytes_per_token_most + event.max_tokens
        if least_tokens > hosts[0].replica.tokens_most and least_tokens > max(
            host.replica.tokens_most for host in hosts
        ):
            facts.drop(opened)
            return (too_large(request),)
        job = self._judged(now_ns, event, hosts)
        self._jobs[request] = job
        if job.lighter:
            hosts = self._serving(self._lighter_model, event)
        if not self._queued:
            sent = self._send_at_once(now_ns, opened, job, hosts, ())
            if sent is not None:
                return (sent,)
        return self._queue_or_shed(now_ns, opened, job, hosts)

    def _first_token(self, now_ns: int, event: FirstToken) -> list[Decision] | tuple[()]:
        opened = self._facts.first_token(now_ns, event)
        if opened is None:
            return ()
        job = self._jobs[event.request]
        if job.prefill_ns > 0:
            took_ns = now_ns - (opened.dispatched_ns or 0)
            self._prefills.add(took_ns * UNIT // job.prefill_ns, self._optimism)
        if not self._queued:
            return ()
        return self._refill(now_ns, (event.replica,))

    def _finished(self, now_ns: int, event: Finished) -> list[Decision] | tuple[Decision, ...]:
        opened = self._facts.finished(now_ns, event)
        if opened is None:
            return ()
        job = self._jobs[event.request]
        if job.lighter:
            settled = Settled(
                event.request, "degraded", NAMES[job.tier], f"model {self._lighter_model}"
            )
        else:
            settled = Settled(event.request, "answered", NAMES[job.tier])
            self._complexity.observe(opened.event, job.sla, event)
        self._forget(opened, job)
        self._facts.settle(now_ns, opened)
        if not self._queued:
            return (settled,)
        decisions = self._refill(now_ns, (event.replica,))
        decisions.insert(0, settled)
        return decisions

    def _failed(self, now_ns: int, event: Failed) -> list[Decision] | tuple[()]:
        opened = self._facts.failed(now_ns, event)
        if opened is None:
            return ()
        job = self._jobs[event.request]
        decisions: Decisions = []
        if event.kind in MAYBE_RUNNING:
            decisions.append(Abort(event.request, event.replica))
        if event.kind in STRIKES:
            job.strikes += 1
        if self._may_retry(now_ns, opened, job, event.kind):
            self._release(opened, job)
            self._retrying += not opened.tried
            self._facts.take_back(opened)
            self._try_again(now_ns, opened, job, decisions)
        else:
            self._forget(opened, job)
            if event.kind in CALLERS_FAULT:
                self._facts.drop(opened)
            else:
                self._facts.settle(now_ns, opened, event.kind)
            retry_after_ns = self._parameters.shedding.retry_after_least_ms * NS_PER_MS
            decisions.append(failed(event.request, event.kind, NAMES[job.tier], retry_after_ns))
        if self._queued:
            decisions += self._refill(now_ns, (event.replica,))
        return decisions

    def _cancelled(self, now_ns: int, event: Cancelled) -> list[Decision] | tuple[()]:
        opened = self._facts.cancelled(now_ns, event)
        if opened is None:
            return ()
        job = self._jobs[event.request]
        decisions: Decisions = []
        replicas: tuple[int, ...] = (opened.replica,)
        if opened.replica >= 0:
            decisions.append(Abort(event.request, opened.replica))
        else:
            replicas = self._pool(self._hosts_for(opened.event, job)).replicas
        self._forget(opened, job)
        self._facts.drop(opened)
        decisions.append(Settled(event.request, "cancelled", NAMES[job.tier], "client", 499))
        if self._queued:
            decisions += self._refill(now_ns, replicas)
        return decisions

    def _ticked(self, now_ns: int) -> list[Decision] | tuple[()]:
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
                replicas = self._shed_late(now_ns, self._jobs[entry[1]], decisions)
                touched += [replica for replica in replicas if replica not in touched]
        if touched and self._queued:
            decisions += self._refill(now_ns, touched)
        return decisions

    def _fleet(self, now_ns: int, event: Event) -> list[Decision] | tuple[()]:
        facts = self._facts
        before = facts.fleet_version
        facts.fleet(now_ns, event)
        if facts.fleet_version == before:
            return ()
        inflight = self._parameters.inflight
        entries_max = self._parameters.history.prefix_entries_max
        for number, known in facts.replicas.items():
            host = self._hosts.get(number)
            if host is None or host.replica is not known:
                self._hosts[number] = Host(known, inflight, PrefixTable(entries_max))
            elif host.spec is not known.spec:  # it came back with work in flight
                self._hosts[number] = Host(known, inflight, host.prefixes)
        for replica in [gone for gone in self._hosts if gone not in facts.replicas]:
            del self._hosts[replica]
        return self._regroup(now_ns)

    # A request's way

    def _judged(self, now_ns: int, event: Arrived, hosts: tuple[Host, ...]) -> Job:
        tags = self._tags
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
        due_ns = now_ns + tags.deadline_ns(event, sla)
        return Job(
            event.request, tier, sla, cost, prompt_tokens, output_tokens, due_ns, keys,
            block_tokens, 0, tier == FALLBACK and self._has_lighter(event),
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
        best = soonest(hosts, job, avoid)
        if best is None:
            return None
        return self._dispatched(now_ns, opened, job, *best)

    def _dispatched(
        self, now_ns: int, opened: Open, job: Job, host: Host, need: Need, prefill_ticks: int
    ) -> Dispatch:
        opened.kv_tokens = need.kv_tokens
        opened.prefill_tokens = need.prefill_tokens
        opened.long = need.long
        job.prefill_ns = prefill_ticks // TICKS_PER_NS
        if job.keys:
            host.prefixes.add(job.keys, job.block_tokens)
        self._facts.dispatch(now_ns, opened, host.replica)
        number = host.replica.spec.replica
        event = opened.event
        if not event.stream:
            # Its first token may never be reported; by then its prefill is over for certain.
            over_ns = now_ns + 2 * job.prefill_ns + 50 * NS_PER_MS
            heappush(self._assumed, (over_ns, job.request, number))
        priority = job.tier if self._engine_priority else 0
        model = self._lighter_model if job.lighter else ""
        return Dispatch(job.request, number, NAMES[job.tier], priority, model)

    def _queue_or_shed(
        self, now_ns: int, opened: Open, job: Job, hosts: tuple[Host, ...]
    ) -> tuple[Decision, ...]:
        """No replica is free at once, or others wait: join the queue, or hear that it is no use."""
        shedding = self._parameters.shedding
        pool = self._pool(hosts)
        host = hosts[0]
        if self._queued >= shedding.queue_max:
            return (
                self._shed(opened, job, "queue_full", shedding.retry_after_most_ms * NS_PER_MS),
            )
        tags = self._tags
        need = host.need(job.prompt_tokens, job.output_tokens, job.keys, job.block_tokens)
        job.long = need.long
        event = opened.event
        recent = self._facts.users.get(event.user) if event.user else None
        job.order_ns = tags.order_ns(job, opened.arrived_ns, recent)
        if self._shedding or job.tier == TURBO:
            job.ahead_ns = pool.ahead_ns(job.tier, job.order_ns)
        if tags.lends(job.tier, job.flops, job.ahead_ns):
            job.tier = LENT
            job.ahead_ns = pool.ahead_ns(LENT, job.order_ns)
        if pool.queued:
            if not pool.blocked_for(job.tier, job.long):
                avoid = [*pool.holds, *opened.tried]
                sent = self._send_at_once(now_ns, opened, job, hosts, avoid)
                if sent is not None:
                    pool.started(job.tier, job.flops, job.tier)
                    return (sent,)
        elif self._queued:  # others wait, but for other replicas
            sent = self._send_at_once(now_ns, opened, job, hosts, opened.tried)
            if sent is not None:
                return (sent,)
        alone_ns = host.alone_ticks(need) // TICKS_PER_NS
        job.latest_ns = job.due_ns - alone_ns * (self._prefills.value // UNIT) // UNIT
        if self._shedding:
            wait_ns = self._optimistic_ns(job.ahead_ns)
            if now_ns + wait_ns > job.latest_ns:
                return (self._shed(opened, job, "deadline", now_ns + wait_ns - job.latest_ns),)
            heappush(self._latest, (job.latest_ns, job.request))
        job.work_ns = host.work_ticks(need, job.prompt_tokens, job.output_tokens) // TICKS_PER_NS
        job.queued = True
        job.queued_ns = now_ns
        if not pool.queued:
            self._join(pool)
        pool.push(job)
        self._queued += 1
        self._queued_again += bool(opened.tried)
        return ()

    def _refill(self, now_ns: int, replicas: tuple[int, ...] | list[int]) -> Decisions:
        """Something became free on these replicas: send what waits for them, in its turn."""
        decisions: Decisions = []
        if self._queued_again:
            # One that may not go to these may stand first now, with room for it elsewhere.
            replicas = [
                *replicas,
                *(number for number in self._facts.replicas if number not in replicas),
            ]
        for number in replicas:
            host = self._hosts.get(number)
            if host is None or not host.replica.ready:
                continue
            spent: list[Pool] = []
            while self._queued and host.replica.in_flight < host.sequences_most:
                pool = self._next_pool(number, spent)
                if pool is None:
                    break
                if not self._send_next(now_ns, pool, host, decisions):
                    spent.append(pool)
        return decisions

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

    def _send_next(self, now_ns: int, pool: Pool, host: Host, decisions: Decisions) -> bool:
        """Send the pool's next request that the replica has room for, if there is one."""
        number = host.replica.spec.replica
        for job, lane, payer in pool.turns():
            if self._shedding and job.latest_ns < now_ns:
                self._shed_late(now_ns, job, decisions)
                return True  # the turns are others now
            opened = self._facts.open[job.request]
            if number in opened.tried:
                continue
            need = host.need(job.prompt_tokens, job.output_tokens, job.keys, job.block_tokens)
            room = host.room(need, payer >= 0 or job.tier <= LENT)
            if room == FREE:
                self._unqueue(job, pool)
                pool.started(job.tier, job.flops, job.tier if payer < 0 else payer)
                if self._shedding:
                    took_ns = (now_ns - job.queued_ns) * UNIT
                    self._waits.add(took_ns // max(job.ahead_ns, NS_PER_MS), self._optimism)
                prefill = host.prefill_ticks(need)
                decisions.append(self._dispatched(now_ns, opened, job, host, need, prefill))
                return True
            if room == CAPPED or (payer >= 0 and not pool.insists(job, payer, now_ns)):
                continue
            if room == FULL:
                if pool.holds[lane] >= 0 and pool.holds[lane] != number:
                    continue  # room is being made for it elsewhere
                pool.holds[lane] = number
            return False
        return False

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
        if not opened.tried:  # a request that is being retried has its place in the budget
            budget = max(
                retries.budget_least, len(self._facts.open) * retries.budget_permille // 1000
            )
            if self._retrying >= budget:
                return False
        return any(
            host.number != opened.replica and host.number not in opened.tried
            for host in self._hosts_for(opened.event, job)
        )

    def _try_again(self, now_ns: int, opened: Open, job: Job, decisions: Decisions) -> None:
        if self._tags.tier(job.sla, job.flops, job.strikes) == FALLBACK:
            job.tier = FALLBACK
            job.lighter = self._has_lighter(opened.event)
        hosts = self._hosts_for(opened.event, job)
        if not self._queued:
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
        decisions.append(self._shed(opened, job, "deadline", wait_ns))
        return pool.replicas

    def _shed(self, opened: Open, job: Job, why: str, retry_after_ns: int) -> Settled:
        self._forget(opened, job)
        self._facts.drop(opened)
        shedding = self._parameters.shedding
        retry_after_ns = max(
            shedding.retry_after_least_ms * NS_PER_MS,
            min(retry_after_ns, shedding.retry_after_most_ms * NS_PER_MS),
        )
        return Settled(job.request, "shed", NAMES[job.tier], why, 429, retry_after_ns)

    def _unserved(self, request: int, tier: str = "") -> Settled:
        return unserved(request, tier, self._parameters.shedding.retry_after_least_ms * NS_PER_MS)

    # Books

    def _release(self, opened: Open, job: Job) -> None:
        """It is no longer on its replica (the facts are told by the caller)."""
        if job.keys and opened.replica >= 0:
            self._hosts[opened.replica].prefixes.remove(job.keys)

    def _forget(self, opened: Open, job: Job) -> None:
        """The request is about to be settled."""
        if job.queued:
            self._unqueue(job, self._pool(self._hosts_for(opened.event, job)))
        elif job.keys:
            self._release(opened, job)
        if opened.tried:
            self._retrying -= 1
        del self._jobs[job.request]

    def _unqueue(self, job: Job, pool: Pool) -> None:
        job.queued = False
        pool.remove(job)
        self._queued -= 1
        self._queued_again -= bool(self._facts.open[job.request].tried)
        if len(self._latest) > 64 + 4 * self._queued:
            # Most entries are of jobs that started in time: drop them.
            self._latest = [entry for entry in self._latest if self._waits_still(entry)]
            heapify(self._latest)

    def _optimistic_ns(self, wait_ns: int) -> int:
        return wait_ns * (self._waits.value // UNIT) // UNIT

    def _waits_still(self, entry: tuple[int, int]) -> bool:
        """Does the job of an entry in ``_latest`` wait for the start that the entry is about?"""
        job = self._jobs.get(entry[1])
        return job is not None and job.queued and job.latest_ns == entry[0]

    def _prefills_still(self, entry: tuple[int, int, int]) -> bool:
        """Is the request of an entry in ``_assumed`` still on that replica, without a token?"""
        opened = self._facts.open.get(entry[1])
        return opened is not None and opened.replica == entry[2] and opened.prefill_tokens > 0

    # Pools

    def _serving(self, model: str, event: Arrived) -> tuple[Host, ...]:
        """The replicas that can answer the event with this model, in order of id."""
        embeddings = event.endpoint == "embeddings"
        cache = self._serving_embeddings if embeddings else self._serving_text
        found = cache.get(model)
        if found is None:
            hosts = self._hosts
            found = tuple(
                [hosts[known.spec.replica] for known in self._facts.eligible(model, embeddings)]
            )
            if len(cache) >= ELIGIBLE_CACHE_MAX:
                cache.clear()
            cache[model] = found
        return found

    def _hosts_for(self, event: Arrived, job: Job) -> tuple[Host, ...]:
        return self._serving(self._lighter_model if job.lighter else event.model, event)

    def _has_lighter(self, event: Arrived) -> bool:
        return bool(self._lighter_model) and bool(self._serving(self._lighter_model, event))

    def _pool(self, hosts: tuple[Host, ...]) -> Pool:
        key = tuple([host.number for host in hosts])
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(key, self._shares, self._jobs)
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
        queued = [job for job in self._jobs.values() if job.queued]
        self._pools.clear()
        decisions: Decisions = []
        for job in queued:
            opened = self._facts.open[job.request]
            if job.lighter and not self._has_lighter(opened.event):
                job.lighter = False
            hosts = self._hosts_for(opened.event, job)
            if all(host.number in opened.tried for host in hosts):
                job.queued = False
                self._queued -= 1
                self._queued_again -= bool(opened.tried)
                self._forget(opened, job)
                self._facts.drop(opened)
                decisions.append(self._unserved(job.request, NAMES[job.tier]))
            else:
                self._pool(hosts).push(job)
        if self._queued:
            decisions += self._refill(now_ns, list(self._facts.replicas))
        return decisions

    # Snapshots

    def snapshot(self) -> bytes:
        facts = self._facts.state()
        shift_ns = -facts.now_ns
        return _ENCODER.encode(
            TieredState(
                facts,
                [_shifted(job, shift_ns) for job in self._jobs.values()],
                [pool.state() for pool in self._pools.values()],
                [
                    HostState(
                        number,
                        list(self._hosts[number].prefixes.entries.items()),
                        self._hosts[number].prefixes.held_tokens,
                    )
                    for number in self._facts.replicas
                ],
                self._complexity.state(),
                self._waits,
                self._prefills,
                sorted(
                    (entry[0] + shift_ns, entry[1], entry[2])
                    for entry in self._assumed
                    if self._prefills_still(entry)
                ),
            )
        )

    @classmethod
    def restored(cls, parameters: Parameters, snapshot: bytes, now_ns: int | None) -> Tiered:
        state = _DECODER.decode(snapshot)
        at_ns = state.facts.now_ns if now_ns is None else now_ns
        facts = Facts.restored(state.facts, parameters.history.keys_max, at_ns)
        policy = cls(parameters, facts)
        policy._load(state, at_ns)
        return policy

    def _load(self, state: TieredState, now_ns: int) -> None:
        parameters = self._parameters
        facts = self._facts
        for saved in state.hosts:
            prefixes = PrefixTable(parameters.history.prefix_entries_max)
            prefixes.entries = dict(saved.prefixes)
            prefixes.held_tokens = saved.held_tokens
            known = facts.replicas[saved.replica]
            self._hosts[saved.replica] = Host(known, parameters.inflight, prefixes)
        for pool_state in state.pools:
            pool = Pool(pool_state.replicas, self._shares, self._jobs)
            self._pools[pool_state.replicas] = pool
        for saved_job in state.jobs:
            job = _shifted(saved_job, now_ns)
            self._jobs[job.request] = job
            opened = facts.open[job.request]
            self._retrying += bool(opened.tried)
            if job.queued:
                self._queued += 1
                self._queued_again += bool(opened.tried)
                self._pool(self._hosts_for(opened.event, job)).push(job)
                if self._shedding:
                    heappush(self._latest, (job.latest_ns, job.request))
        for pool_state in state.pools:
            self._pools[pool_state.replicas].load(pool_state)
        self._complexity.load(state.complexity)
        self._waits = state.waits
        self._prefills = state.prefills
        self._assumed = [(at + now_ns, request, number) for at, request, number in state.assumed]


def _shifted(job: Job, by_ns: int) -> Job:
    return msgspec.structs.replace(
        job,
        due_ns=job.due_ns + by_ns,
        queued_ns=job.queued_ns + by_ns,
        order_ns=job.order_ns + by_ns,
        latest_ns=job.latest_ns + by_ns,
    )
