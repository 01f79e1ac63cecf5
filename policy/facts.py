"""What is true: a pure fold of events. Open requests, replicas, what is in flight, histories.

Every method checks first and changes afterwards: an ``Illegal`` event leaves no trace. A late
event, about a request that is already settled or about an earlier try of it, is legal and yields
None. Request ids rise, so an id that was seen and is not open is settled: nothing else is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.bounded import Bounded
from policy.decisions import Settled  # noqa: TC001  (msgspec resolves it)
from policy.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    GpuFault,
    GpuRead,
    Progress,
    ReplicaDown,
    ReplicaShare,
    ReplicaUp,
    Scraped,
    Standby,
    StepsRead,
    Verified,
    Warmed,
)

if TYPE_CHECKING:
    from policy.events import CheckpointFailed, CheckpointSaved, Event, FirstToken, LookedUp

ELIGIBLE_CACHE_MAX = 1024  # model names come from callers, so the cache of choices needs a bound
COUNT_MOST = 1 << 40  # bytes or tokens of a request: far above any, and no sum overflows 64 bits
NS_MOST = 1 << 60
GPU_PERMILLE_MOST = 2000  # a card may run above its limits for a moment
RECENT_MAX = 10  # requests a history remembers
STRIKES = frozenset({"timeout", "oom", "silent"})

UNANSWERED, VERIFYING, LOOKING, SAVING = range(4)
"""How far an open request is: no answer yet; or what is awaited before the caller is told."""


class Illegal(Exception):
    """The event cannot happen in this state. Nothing was changed."""


class Open(msgspec.Struct, array_like=True, gc=False):
    """A request that arrived and is not settled."""

    event: Arrived
    arrived_ns: int
    replica: int = -1
    """Where it is in flight; -1: nowhere, it waits here."""
    dispatched_ns: int | None = None
    first_ns: int | None = None
    """When its first token came."""
    kv_tokens: int = 0
    """Tokens reserved for it in the replica's KV cache."""
    prefill_tokens: int = 0
    """Prompt tokens that the replica still has to compute for it; 0 after the first token."""
    long: bool = False
    """Its prefill counts against the cap on long prefills."""
    tries: int = 0
    tried: tuple[int, ...] = ()
    """Replicas that failed it."""
    stage: int = UNANSWERED
    served: int = -1
    """The replica that answered it."""
    pending: Settled | None = None
    """What its caller is told when nothing more is awaited."""
    gated: tuple[str, str] | None = None
    """Model and version whose breakers let it through and do not know yet how it went."""
    cause: str = ""
    """Why it is degraded."""
    due_ns: int = 0
    """By when its chain wants its first token; 0: it has no chain."""
    rung: int = 0
    """How many of the ways to degrade were tried."""
    kind: str = ""
    """How its last try failed, while it waits for another."""
    arm: int = 0
    """Whose it is, while a canary goes on: 0 the stable policy's, 1 the candidate's."""
    answer_ns: int = 0
    """By when its caller has something, whatever comes; 0: it waits as long as it takes."""
    late: bool = False
    """So little of that is left that only what is given instead can still come."""


class Replica(msgspec.Struct, array_like=True, gc=False):
    """A replica and what we sent to it."""

    spec: ReplicaUp
    tokens_most: int
    """Prompt and output of the largest request it can ever hold."""
    ready: bool = True
    in_flight: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    long_tokens: int = 0
    """The part of ``prefill_tokens`` that belongs to long prompts."""
    scraped_ns: int | None = None
    """When the engine wrote the metrics below."""
    waiting: int = 0
    running: int = 0
    kv_used_permille: int = 0
    preemptions: int = 0
    gpu: GpuRead | None = None
    """The youngest reading of its card."""
    gpu_ns: int = 0
    """When it was read."""
    share_permille: int = 1000
    """This controller's part of what may be in flight there."""


class Recent(msgspec.Struct, array_like=True, gc=False):
    """The last requests of one user or business line."""

    results: list[tuple[int, bool, int]] = []
    """(time to first token in ns, failed, retries), oldest first."""
    strikes: int = 0
    """Consecutive time-outs and out-of-memory failures."""

    def add(self, ttft_ns: int, kind: str, retries: int) -> None:
        """Remember one outcome; ``kind`` is the error's kind, or empty."""
        results = self.results
        results.append((ttft_ns, kind != "", retries))
        if len(results) > RECENT_MAX:
            del results[0]
        self.strikes = self.strikes + 1 if kind and kind in STRIKES else 0

    def ttft_ns_p90(self) -> int:
        """Of the remembered requests, by nearest rank; 0 without any."""
        if not self.results:
            return 0
        ordered = sorted(result[0] for result in self.results)
        return ordered[(len(ordered) * 9 + 9) // 10 - 1]

    def failed_or_retried_permille(self) -> int:
        if not self.results:
            return 0
        bad = sum(1 for _, failed, retries in self.results if failed or retries)
        return 1000 * bad // len(self.results)


HistoryState = tuple[list[tuple[str, Recent]], list[tuple[str, Recent]]]


class FactsState(msgspec.Struct, array_like=True):
    """Facts in canonical form. Times are relative to ``now_ns``."""

    now_ns: int
    highest: int
    highest_replica: int
    open: list[Open]
    replicas: list[Replica]
    users: HistoryState
    lines: HistoryState


class Facts:
    """The fold. ``open`` holds requests in order of arrival, ``replicas`` in order of id."""

    __slots__ = (
        "_eligible", "_eligible_embeddings", "fleet_version", "highest", "highest_replica",
        "lines", "now_ns", "open", "replicas", "users",
    )  # fmt: skip

    def __init__(self, keys_max: int) -> None:
        self.now_ns = 0
        self.highest = -1
        self.highest_replica = -1
        self.open: dict[int, Open] = {}
        self.replicas: dict[int, Replica] = {}
        self.users = Bounded(keys_max, Recent)
        self.lines = Bounded(keys_max, Recent)
        self.fleet_version = 0
        """Rises whenever a replica comes or goes."""
        self._eligible: dict[str, tuple[Replica, ...]] = {}
        self._eligible_embeddings: dict[str, tuple[Replica, ...]] = {}

    # Requests

    def arrive(self, now_ns: int, event: Arrived) -> Open:
        request = event.request
        if request <= self.highest:
            raise Illegal(
                f"request id {request} is not above the highest seen, {self.highest}: ids must rise"
            )
        if not (
            0 <= event.prompt_bytes <= COUNT_MOST
            and 0 <= event.max_tokens <= COUNT_MOST
            and 0 <= event.deadline_ns <= NS_MOST
        ):
            raise Illegal(
                f"request {request}: prompt_bytes {event.prompt_bytes}, max_tokens"
                f" {event.max_tokens} and deadline_ns {event.deadline_ns} must lie within"
                f" 0..{COUNT_MOST}, 0..{COUNT_MOST} and 0..{NS_MOST}"
            )
        self.now_ns = now_ns
        self.highest = request
        opened = Open(event, now_ns)
        self.open[request] = opened
        return opened

    def dispatch(self, now_ns: int, opened: Open, replica: Replica) -> None:
        """Book ``opened``, with its token figures filled in, on ``replica``."""
        opened.dispatched_ns = now_ns
        opened.tries += 1
        self._book(opened, replica)

    def _book(self, opened: Open, replica: Replica) -> None:
        opened.replica = replica.spec.replica
        replica.in_flight += 1
        replica.kv_tokens += opened.kv_tokens
        replica.prefill_tokens += opened.prefill_tokens
        if opened.long:
            replica.long_tokens += opened.prefill_tokens

    def first_token(self, now_ns: int, event: FirstToken) -> Open | None:
        opened = self.open.get(event.request)
        if opened is None or opened.replica != event.replica:
            self._check_late(event.request, event.replica, opened)
            return None
        if opened.first_ns is not None or opened.stage:
            raise Illegal(f"request {event.request} had its first token already")
        self.now_ns = now_ns
        opened.first_ns = now_ns
        if opened.prefill_tokens:
            self._prefilled(opened)
        return opened

    def finished(self, now_ns: int, event: Finished) -> Open | None:
        """Check a ``Finished``; the caller settles what is returned."""
        opened = self.open.get(event.request)
        if opened is None or opened.replica != event.replica:
            self._check_late(event.request, event.replica, opened)
            return None
        if opened.stage:
            raise Illegal(f"request {event.request} has its answer already")
        if not 0 <= event.cached_tokens <= event.prompt_tokens or event.output_tokens < 0:
            raise Illegal(
                f"request {event.request}: prompt_tokens {event.prompt_tokens}, cached_tokens"
                f" {event.cached_tokens}, output_tokens {event.output_tokens}: none may be"
                " negative, and cached tokens are part of the prompt"
            )
        self.now_ns = now_ns
        return opened

    def failed(self, now_ns: int, event: Failed) -> Open | None:
        """Check a ``Failed``; the caller settles what is returned, or takes it back."""
        opened = self.open.get(event.request)
        if opened is None or opened.replica != event.replica:
            self._check_late(event.request, event.replica, opened)
            return None
        self.now_ns = now_ns
        return opened

    def cancelled(self, now_ns: int, event: Cancelled) -> Open | None:
        """Check a ``Cancelled``; the caller settles what is returned."""
        opened = self.open.get(event.request)
        if opened is not None:
            self.now_ns = now_ns
        elif not 0 <= event.request <= self.highest:
            raise Illegal(f"request {event.request} never arrived")
        return opened

    def verified(self, now_ns: int, event: Verified) -> Open | None:
        """Check a ``Verified``; the caller goes on with what is returned."""
        opened = self._awaiting(event, VERIFYING)
        if opened is not None and opened.replica != event.replica:
            raise Illegal(
                f"request {event.request} is verified on replica {opened.replica}, not on"
                f" {event.replica}"
            )
        if event.output_tokens < 0:
            raise Illegal(f"request {event.request}: output_tokens is {event.output_tokens}")
        if opened is not None:
            self.now_ns = now_ns
        return opened

    def looked_up(self, now_ns: int, event: LookedUp) -> Open | None:
        """Check a ``LookedUp``; the caller goes on with what is returned."""
        opened = self._awaiting(event, LOOKING)
        if event.age_ns < 0 or event.confidence_permille > 1000:
            raise Illegal(
                f"request {event.request}: age_ns is {event.age_ns} and confidence_permille"
                f" {event.confidence_permille}"
            )
        if opened is not None:
            self.now_ns = now_ns
        return opened

    def saved(self, now_ns: int, event: CheckpointSaved | CheckpointFailed) -> Open | None:
        """Check the end of a ``SaveCheckpoint``; the caller settles what is returned."""
        opened = self._awaiting(event, SAVING)
        if opened is not None:
            self.now_ns = now_ns
        return opened

    def _awaiting(
        self, event: Verified | LookedUp | CheckpointSaved | CheckpointFailed, stage: int
    ) -> Open | None:
        opened = self.open.get(event.request)
        if opened is None:
            if not 0 <= event.request <= self.highest:
                raise Illegal(f"request {event.request} never arrived")
        elif opened.stage != stage:
            raise Illegal(f"request {event.request} does not wait for {type(event).__name__}")
        return opened

    def answered(self, opened: Open) -> None:
        """Its replica is done with it, and its caller not told yet."""
        opened.served = opened.replica
        self._release(opened)
        opened.replica = -1

    def verify(self, opened: Open, replica: Replica) -> None:
        """Book the second run of an answered request, token figures filled in, on ``replica``."""
        opened.stage = VERIFYING
        self._book(opened, replica)

    def verification_over(self, opened: Open) -> None:
        """The second run is no longer on its replica."""
        self._release(opened)
        opened.replica = -1
        opened.stage = UNANSWERED

    def _check_late(self, request: int, replica: int, opened: Open | None) -> None:
        """A replica's event is not about a request in flight there: is it only late?"""
        if opened is None:
            if not 0 <= request <= self.highest:
                raise Illegal(f"request {request} never arrived")
        elif replica not in opened.tried and replica != opened.served:
            on = f"on replica {opened.replica}" if opened.replica >= 0 else "in no replica's hands"
            raise Illegal(f"request {request} is {on}, and was never on replica {replica}")

    def assume_prefilled(self, opened: Open) -> None:
        """By now its prefill must be over, though no first token was reported."""
        self._prefilled(opened)

    def take_back(self, opened: Open) -> None:
        """The try on its replica is over without an answer: the request waits here again."""
        self._release(opened)
        if opened.replica not in opened.tried:
            opened.tried = (*opened.tried, opened.replica)
        opened.replica = -1
        opened.first_ns = None

    def settle(self, now_ns: int, opened: Open, kind: str = "") -> None:
        """Close a request that was answered, or failed with ``kind``."""
        event = opened.event
        del self.open[event.request]
        if opened.replica >= 0:
            self._release(opened)
        if event.user or event.line:
            first_ns = now_ns if opened.first_ns is None else opened.first_ns
            ttft_ns = first_ns - opened.arrived_ns
            retries = opened.tries - 1 if opened.tries else 0
            if event.user:
                user = event.user
                (self.users.young.get(user) or self.users.use(user)).add(ttft_ns, kind, retries)
            if event.line:
                line = event.line
                (self.lines.young.get(line) or self.lines.use(line)).add(ttft_ns, kind, retries)

    def drop(self, opened: Open) -> None:
        """Close a request that says nothing about the service: shed, rejected or cancelled."""
        del self.open[opened.event.request]
        if opened.replica >= 0:
            self._release(opened)

    def _prefilled(self, opened: Open) -> None:
        replica = self.replicas[opened.replica]
        replica.prefill_tokens -= opened.prefill_tokens
        if opened.long:
            replica.long_tokens -= opened.prefill_tokens
            opened.long = False
        opened.prefill_tokens = 0

    def _release(self, opened: Open) -> None:
        if opened.prefill_tokens:
            self._prefilled(opened)
        replica = self.replicas[opened.replica]
        replica.in_flight -= 1
        replica.kv_tokens -= opened.kv_tokens
        if not (replica.ready or replica.in_flight):
            del self.replicas[opened.replica]

    def recount(self) -> None:
        """Book anew what is open: something went wrong while it was booked. Requests are put into
        order of arrival again."""
        for replica in self.replicas.values():
            replica.in_flight = replica.kv_tokens = 0
            replica.prefill_tokens = replica.long_tokens = 0
        self.open = dict(sorted(self.open.items()))
        for opened in self.open.values():
            if opened.replica >= 0:
                self._book(opened, self.replicas[opened.replica])
        for number, replica in list(self.replicas.items()):
            if not (replica.ready or replica.in_flight):
                del self.replicas[number]

    # Replicas

    def fleet(self, now_ns: int, event: Event) -> None:
        """Fold an event about a replica."""
        if isinstance(event, ReplicaUp):
            self._up(event)
        elif isinstance(event, ReplicaDown):
            replica = self._known(event.replica)
            if replica is not None and replica.ready:
                replica.ready = False
                if not replica.in_flight:
                    del self.replicas[event.replica]
                self._fleet_changed()
        elif isinstance(event, Scraped):
            self._scraped(now_ns, event)
        elif isinstance(event, GpuRead):
            self._gpu_read(now_ns, event)
        elif isinstance(event, Standby):
            self._standby(event)
        elif isinstance(event, Progress):
            self._known(event.replica)
            if event.output_tokens < 0:
                raise Illegal(f"replica {event.replica}: output_tokens is {event.output_tokens}")
        elif isinstance(event, StepsRead):
            self._known(event.replica)
            sums = (event.steps, event.measured_us, event.predicted_us)
            if not 0 <= min(sums) <= max(sums) <= COUNT_MOST:
                raise Illegal(
                    f"replica {event.replica}: steps, measured_us and predicted_us, {sums}, lie"
                    f" within 0..{COUNT_MOST}"
                )
        elif isinstance(event, ReplicaShare):
            self._shared(event)
        elif isinstance(event, (GpuFault, Warmed)):
            self._known(event.replica)
            if isinstance(event, GpuFault) and not 0 <= event.code <= COUNT_MOST:
                raise Illegal(f"replica {event.replica}: the code of a fault is {event.code}")
        self.now_ns = now_ns

    def eligible(self, model: str, embeddings: bool) -> tuple[Replica, ...]:
        """The replicas that can serve this, in order of id."""
        cache = self._eligible_embeddings if embeddings else self._eligible
        return cache.get(model) or self._find_eligible(cache, model, embeddings)

    def _find_eligible(
        self, cache: dict[str, tuple[Replica, ...]], model: str, embeddings: bool
    ) -> tuple[Replica, ...]:
        serving = [
            replica
            for replica in self.replicas.values()
            if replica.ready and (not replica.spec.models or model in replica.spec.models)
        ]
        pooling = [replica for replica in serving if replica.spec.pooling]
        if embeddings and pooling:
            serving = pooling
        else:
            serving = [replica for replica in serving if not replica.spec.pooling]
        if len(cache) >= ELIGIBLE_CACHE_MAX:
            cache.clear()
        cache[model] = tuple(serving)
        return cache[model]

    def _fleet_changed(self) -> None:
        self._eligible.clear()
        self._eligible_embeddings.clear()
        self.fleet_version += 1

    def _known(self, replica: int) -> Replica | None:
        """The replica, or None if it is gone: an event about it comes too late."""
        known = self.replicas.get(replica)
        if known is None and not 0 <= replica <= self.highest_replica:
            raise Illegal(f"replica {replica} never came up")
        return known

    def _up(self, event: ReplicaUp) -> None:
        known = self.replicas.get(event.replica)
        if known is not None and known.ready:
            raise Illegal(f"replica {event.replica} is up already")
        least = min(
            event.kv_blocks - 1, event.block_tokens, event.max_num_seqs,
            event.max_num_batched_tokens, event.max_model_len, event.active_params,
        )  # fmt: skip
        if event.replica < 0 or least < 1:
            raise Illegal(
                f"replica {event.replica} ({event.name}): its id must be at least 0, and its sizes"
                " (blocks, tokens, sequences, parameters) at least 1"
            )
        costs = min(
            *event.cost, event.attention_flops_per_token_pair, event.request_in_ns,
            event.prefill_free_tokens, event.mixed_free_tokens,
        )  # fmt: skip
        if costs < 0 or not 0 <= event.closeness_permille <= 1000:
            raise Illegal(
                f"replica {event.replica} ({event.name}): costs must not be negative, and"
                f" closeness_permille, {event.closeness_permille}, lies within 0..1000"
            )
        # A request larger than the pool would block the engine's queue for ever. One block is never
        # given out, and the last output token is never stored.
        tokens_most = min(event.max_model_len, (event.kv_blocks - 1) * event.block_tokens + 1)
        if known is None:
            self.replicas[event.replica] = Replica(event, tokens_most)
            self.replicas = dict(sorted(self.replicas.items()))
        else:  # it went down with work in flight, which still counts
            known.spec = event
            known.tokens_most = tokens_most
            known.ready = True
            known.share_permille = 1000
        self.highest_replica = max(self.highest_replica, event.replica)
        self._fleet_changed()

    def _standby(self, event: Standby) -> None:
        known = self.replicas.get(event.replica)
        if event.replica < 0 or event.start_ns < 0 or (known is not None and known.ready):
            raise Illegal(
                f"standby {event.replica} ({event.name}): its id and start_ns must be at least 0,"
                " and it must not be up"
            )
        self.highest_replica = max(self.highest_replica, event.replica)

    def _shared(self, event: ReplicaShare) -> None:
        if not 1 <= event.permille <= 1000:
            raise Illegal(
                f"replica {event.replica}: the share of it is {event.permille} per mille: it lies"
                " within 1..1000"
            )
        replica = self._known(event.replica)
        if replica is not None and replica.ready:
            replica.share_permille = event.permille

    def _scraped(self, now_ns: int, event: Scraped) -> None:
        least = min(
            event.running, event.waiting, event.kv_used_permille, event.preemptions, event.age_ns
        )
        if least < 0:
            raise Illegal(f"metrics of replica {event.replica} hold a negative figure, {least}")
        replica = self._known(event.replica)
        if replica is None:
            return
        written_ns = max(0, now_ns - event.age_ns)
        if replica.scraped_ns is not None and written_ns < replica.scraped_ns:
            return  # overtaken by a younger one
        replica.scraped_ns = written_ns
        replica.waiting = event.waiting
        replica.running = event.running
        replica.kv_used_permille = event.kv_used_permille
        replica.preemptions = event.preemptions

    def _gpu_read(self, now_ns: int, event: GpuRead) -> None:
        shares = (
            event.pcie_permille, event.memory_permille, event.heat_permille, event.power_permille,
        )  # fmt: skip
        if min(event.free_mb, event.age_ns, *shares) < 0 or max(shares) > GPU_PERMILLE_MOST:
            raise Illegal(
                f"card of replica {event.replica}: no figure may be negative, and shares lie within"
                f" 0..{GPU_PERMILLE_MOST} per mille, but they are {shares}"
            )
        replica = self._known(event.replica)
        read_ns = now_ns - event.age_ns
        if replica is not None and (replica.gpu is None or read_ns >= replica.gpu_ns):
            replica.gpu = event
            replica.gpu_ns = read_ns

    # Snapshots

    def state(self) -> FactsState:
        return FactsState(
            self.now_ns,
            self.highest,
            self.highest_replica,
            [
                _shifted(
                    opened,
                    -self.now_ns,
                    _left_ns(opened.due_ns, self.now_ns),
                    _left_ns(opened.answer_ns, self.now_ns),
                )
                for opened in self.open.values()
            ],
            [_seen(replica, -self.now_ns) for replica in self.replicas.values()],
            self.users.state(),
            self.lines.state(),
        )

    @classmethod
    def restored(cls, state: FactsState, keys_max: int, now_ns: int) -> Facts:
        facts = cls(keys_max)
        facts.now_ns = now_ns
        facts.highest = state.highest
        facts.highest_replica = state.highest_replica
        facts.open = {
            opened.event.request: _shifted(
                opened, now_ns, _due_ns(opened.due_ns, now_ns), _due_ns(opened.answer_ns, now_ns)
            )
            for opened in state.open
        }
        facts.replicas = {
            replica.spec.replica: _seen(replica, now_ns) for replica in state.replicas
        }
        facts.users.load(state.users)
        facts.lines.load(state.lines)
        return facts


def _shifted(opened: Open, by_ns: int, due_ns: int, answer_ns: int) -> Open:
    return msgspec.structs.replace(
        opened,
        arrived_ns=opened.arrived_ns + by_ns,
        dispatched_ns=_moved(opened.dispatched_ns, by_ns),
        first_ns=_moved(opened.first_ns, by_ns),
        due_ns=due_ns,
        answer_ns=answer_ns,
    )


def _left_ns(due_ns: int, now_ns: int) -> int:
    """Until ``due_ns``, where 0 still says that there is none: what is over is 1 less."""
    if not due_ns:
        return 0
    return due_ns - now_ns if due_ns > now_ns else due_ns - now_ns - 1


def _due_ns(left_ns: int, now_ns: int) -> int:
    """Back from ``_left_ns``."""
    if not left_ns:
        return 0
    return now_ns + left_ns if left_ns > 0 else now_ns + left_ns + 1


def _seen(replica: Replica, by_ns: int) -> Replica:
    return msgspec.structs.replace(
        replica,
        scraped_ns=_moved(replica.scraped_ns, by_ns),
        gpu_ns=replica.gpu_ns + by_ns,
    )


def _moved(at_ns: int | None, by_ns: int) -> int | None:
    return None if at_ns is None else at_ns + by_ns
