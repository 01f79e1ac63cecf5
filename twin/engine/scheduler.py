"""The engine: vLLM 0.32's V1 scheduler in closed form.

A *decision* makes the schedule of one step. vLLM takes one after every step; here only the ones
that can change something are taken. While a batch merely decodes, the time of the next completion,
of the next arrival and of the first step that lacks a block are all known, so the engine sleeps
until the first of them (a *span*). With ``skip=False`` it takes every decision, and reports each.

Async scheduling is a *lag* of one: the decision for step s is taken when step s - 1 - lag ends, so
outputs, seats and blocks come back one decision later. One code path serves both.

How blocks are counted: a decoding sequence that has computed c tokens before step s keeps its
``offset`` s - c, and needs a new block whenever c is a multiple of the block size, so step s needs
``_phase[s % block_tokens]`` new blocks in all. ``_phase`` is stored twice in a row so that any run
of steps is one slice.

What goes wrong with a card: ``slow`` changes the price of a step from the next decision on, and
``stall`` holds everything up. Both give the same run whether steps are skipped or not.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

from policy.cost import StepCost
from twin.engine.blocks import BlockPool, path_keys
from twin.engine.sequence import DECODE, DONE, ENDING, INBOX, PREFILL, WAITING
from twin.engine.steptime import TICK_BITS, span_ticks, steps_to_reach
from twin.engine.waiting import FcfsQueue, PriorityQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twin.engine.blocks import Hit
    from twin.engine.sequence import EngineSettings, Sequence

IDLE, SPAN, STEP, DECIDING = range(4)
ORDER_BITS = 32
ORDER_MASK = (1 << ORDER_BITS) - 1


def _by_order(seq: Sequence) -> int:
    return seq.order


def _outputs_after(seq: Sequence, step: int) -> int:
    """Output tokens of ``seq`` when ``step`` has ended."""
    if seq.state in (INBOX, WAITING, PREFILL):
        return seq.replayed
    if seq.state == DONE:
        return seq.outputs
    kept = seq.prefilled - seq.prompt_tokens
    if kept + 1 == seq.outputs:  # the last one comes with the prefill
        return kept
    computed = step + 1 - seq.offset
    return min(max(kept, computed - seq.prompt_tokens + 1), seq.outputs)


class EngineError(RuntimeError):
    """A call that makes no sense now: a fault of whoever drives the engine."""


class UnfitError(EngineError):
    """A request that could never be served: the caller's fault."""


class StepRecord(NamedTuple):
    """One decision, as ``on_step`` sees it."""

    step: int
    scheduled: list[tuple[int, int]]
    """(id, tokens) in RUNNING order."""
    preempted: list[int]
    finished: list[int]
    """Ended by the outputs processed since the previous record."""
    running: list[int]
    waiting: int
    free_blocks: int


class Load(NamedTuple):
    """What an engine's metrics would show at an instant."""

    running: int
    waiting: int
    kv_blocks_used: int


class Totals(NamedTuple):
    """What an engine has done so far."""

    steps: int
    output_tokens: int
    """Tokens put out, those of a step run too far included; an embedding counts as one."""
    busy_ticks: int


class Engine:
    """One replica's engine.

    Args:
        settings: sizes and switches.
        cost: the step-time formula, in ticks.
        on_first: called with a sequence and the time at which its first token will have been
            computed, as soon as that is certain; its ``turn`` is set by then. It may still be
            aborted before that time.
        on_finish: called with a sequence when its last token (or its embedding) has been computed.
        skip: leave out the decisions that change nothing.
        on_step: called after every decision; needs ``skip=False``.

    The owner calls ``wake(now_ns)`` at ``next_wake_ns``, which changes with every call.
    """

    __slots__ = (
        "_admissions", "_batch", "_block_tokens", "_blocked", "_by_id", "_by_priority",
        "_decide_ticks", "_end_ticks", "_ends", "_finished", "_first_ticks", "_growth_ticks",
        "_inbox", "_inbox_notices", "_inbox_serial", "_kv_tokens", "_lag", "_mode", "_on_finish",
        "_on_first", "_on_step", "_outputs", "_partial", "_partial_blocks", "_partial_tokens",
        "_phase", "_pool", "_preempted", "_running", "_scheduled", "_skip", "_span", "_step",
        "_waiting", "busy_ticks", "cost", "next_wake_ns", "now_ns", "output_tokens", "preemptions",
        "prefix_tokens_hit", "prefix_tokens_queried", "settings", "steps",
    )  # fmt: skip

    def __init__(
        self,
        settings: EngineSettings,
        cost: StepCost,
        on_first: Callable[[Sequence, int], None] = lambda seq, at_ns: None,
        on_finish: Callable[[Sequence], None] = lambda seq: None,
        skip: bool = True,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        if on_step is not None and skip:
            raise EngineError("on_step sees every step only with skip=False")
        self.settings = settings
        self.cost = cost
        self.next_wake_ns: int | None = None
        self.now_ns = 0
        self.steps = 0
        """Steps that computed something."""
        self.preemptions = 0
        self.busy_ticks = 0
        self.output_tokens = 0
        self.prefix_tokens_queried = 0
        self.prefix_tokens_hit = 0
        self._on_first = on_first
        self._on_finish = on_finish
        self._skip = skip
        self._on_step = on_step
        self._scheduled: list[tuple[int, int]] = []
        self._preempted: list[int] = []
        self._finished: list[int] = []
        self._pool = BlockPool(settings.kv_blocks, settings.block_tokens, settings.prefix_caching)
        self._block_tokens = settings.block_tokens
        self._lag = 1 if settings.async_scheduling else 0
        self._by_priority = settings.scheduling_policy == "priority"
        self._waiting = PriorityQueue() if self._by_priority else FcfsQueue()
        self._mode = IDLE
        self._step = 0
        """The step to be decided next."""
        self._decide_ticks = 0
        """When it is decided: the end of step ``_step - 1 - lag``."""
        self._end_ticks = 0
        """End of step ``_step - 1``."""
        self._span = 0
        """Steps that pass until the next decision worth taking."""
        self._first_ticks = 0
        self._growth_ticks = 0
        self._blocked = False
        """The head of the waiting queue cannot be admitted before the batch changes."""
        self._inbox: list[tuple[int, int, bool, Any]] = []
        """(visible after, serial, is a notice, what), sorted. What arrives is a sequence; a notice
        is the sequence to abort, or the cost to go on with."""
        self._inbox_serial = 0
        self._inbox_notices = 0
        self._by_id: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        """RUNNING, in order: the key counts admissions."""
        self._admissions = 0
        self._batch = 0
        """Decoding sequences."""
        self._kv_tokens = 0
        """Sum of (computed + 1) over them."""
        self._ends: list[int] = []
        """Heap of (first step without it) << ORDER_BITS | order, of the decoding sequences."""
        self._phase = [0] * (2 * settings.block_tokens)
        self._partial: Sequence | None = None
        """The one sequence whose prompt is computed in chunks; last of RUNNING."""
        self._partial_tokens = 0
        self._partial_blocks = 0
        self._outputs: deque[tuple[int, list[Sequence]]] = deque()
        """(step, sequences whose last token it computes), oldest first."""

    # ---- called by the owner ----

    def submit(self, seq: Sequence, at_ns: int) -> None:
        """Hand over a request; the first decision strictly after ``at_ns`` sees it.

        Raises:
            UnfitError: it could never be served.
            EngineError: its id is in use.
        """
        if seq.id in self._by_id:
            raise EngineError(f"request id {seq.id} is already in the engine: ids must be unique")
        settings = self.settings
        limit = settings.max_model_len - seq.prompt_tokens
        if seq.pooling:
            seq.outputs = 1
            seq.eos = False
            limit += 1  # its one output is no token
        else:
            known = limit
            if 0 < seq.max_tokens < limit:
                known = seq.max_tokens
            seq.eos = seq.output_tokens < known
            seq.outputs = max(1, seq.output_tokens) if seq.eos else known
        if limit < 1 or seq.prompt_tokens < 1:
            raise self._unfit(seq)
        blocks = -(-(seq.prompt_tokens + seq.outputs - 1) // self._block_tokens)
        if blocks >= settings.kv_blocks:
            raise self._unfit(seq)
        if seq.prefix and settings.prefix_caching:
            seq.path = path_keys(seq.prefix)
            shared = min(len(seq.prefix) * seq.prefix_block_tokens, seq.prompt_tokens)
            seq.shared_blocks = shared // self._block_tokens
        seq.arrival_ns = at_ns
        self._by_id[seq.id] = seq
        self._post(at_ns, False, seq)

    def _unfit(self, seq: Sequence) -> UnfitError:
        """Why ``seq`` could never be served.

        vLLM refuses a prompt beyond ``max_model_len``; a request that outgrows the whole pool
        would block the head of its queue for ever, so it is refused here.
        """
        what = f"request {seq.id} has {seq.prompt_tokens} prompt tokens"
        limit = self.settings.max_model_len
        if seq.prompt_tokens < 1:
            return UnfitError(f"{what}: it must have at least 1")
        if seq.prompt_tokens + (not seq.pooling) > limit:
            room = "" if seq.pooling else ", and an answer needs room too"
            return UnfitError(f"{what}: max_model_len is {limit}{room}")
        return UnfitError(
            f"{what} and {seq.outputs} output tokens: the whole KV cache holds "
            f"{(self.settings.kv_blocks - 1) * self._block_tokens} tokens"
        )

    def abort(self, id: int, at_ns: int) -> bool:
        """Drop a request at the first decision strictly after ``at_ns``; no call-back follows.

        Returns whether the engine still had it.
        """
        seq = self._by_id.pop(id, None)
        if seq is None:
            return False
        self._post(max(at_ns, seq.arrival_ns), True, seq)
        return True

    def slow(self, cost: StepCost, at_ns: int) -> None:
        """From the first decision strictly after ``at_ns`` on, steps cost this."""
        self._post(at_ns, True, cost)

    def stall(self, at_ns: int, for_ns: int) -> None:
        """Nothing moves from ``at_ns`` on: what would happen then or later is ``for_ns`` late.

        First tokens that were told ahead are the owner's to hold back. ``at_ns`` is the present,
        and decisions due at it have not been taken.
        """
        if self._mode == SPAN and self._span:
            steps = min(self._decisions_until(at_ns - 1), self._span)
            if steps:
                self._advance(steps)
                self._span -= steps
                self._first_ticks += self._growth_ticks * steps
        ticks = for_ns << TICK_BITS
        if self._decide_ticks >> TICK_BITS >= at_ns:
            self._decide_ticks += ticks
        if self._end_ticks >> TICK_BITS >= at_ns:
            self._end_ticks += ticks
        elif self._mode == IDLE:
            self._end_ticks = (at_ns + for_ns) << TICK_BITS
        if self._mode == SPAN:
            if self._batch and self._inbox:  # fewer steps pass now until it is looked into
                self._span = self._steps_until_inbox(self._span)
            self.next_wake_ns = self._decided_at(self._span) >> TICK_BITS
        elif self._mode == STEP:
            self.next_wake_ns = self._decide_ticks >> TICK_BITS
        elif self._inbox:
            self.next_wake_ns = self._idle_until()

    @property
    def held(self) -> int:
        """Requests that it was handed and has neither finished nor been told to drop."""
        return len(self._by_id)

    def observe(self, now_ns: int) -> Load:
        """Running, waiting and blocks in use after the decisions taken before ``now_ns``.

        Nothing changes: what a span has consumed by then is computed.
        """
        used = self.settings.kv_blocks - 1 - self._pool.free
        if self._mode == SPAN and self._batch and self._span:
            taken = min(self._decisions_until(now_ns - 1), self._span)
            used += self._blocks_for(taken)
        waiting = len(self._waiting)
        if self._inbox:
            waiting += sum(1 for at, _, notice, _ in self._inbox if at < now_ns and not notice)
        return Load(len(self._running), waiting, used)

    def totals(self, now_ns: int) -> Totals:
        """Of the steps decided before ``now_ns``. Nothing changes."""
        taken = 0
        tokens, ticks = self.output_tokens, self.busy_ticks
        if self._mode == SPAN and self._batch and self._span:
            taken = min(self._decisions_until(now_ns - 1), self._span)
            tokens += self._batch * taken
            ticks += span_ticks(taken, self._first_ticks, self._growth_ticks)
        return Totals(self.steps + taken, tokens, ticks)

    def outputs_at(self, seqs: Iterable[Sequence], now_ns: int) -> list[int]:
        """Output tokens of each of ``seqs`` once the steps that end by ``now_ns`` have ended.

        ``now_ns`` lies between the last wake and the next. Nothing changes. A token that was in
        flight when its sequence was preempted counts as there, and a sequence that was left out of
        a step (priority only) may have one too few until the step after it has ended.
        """
        limit = (now_ns + 1) << TICK_BITS
        ended = self._step - 1
        if self._end_ticks < limit:
            if self._mode == SPAN and self._batch:
                left = limit - self._end_ticks
                ended += steps_to_reach(left, self._first_ticks, self._growth_ticks) - 1
        else:
            ended -= 1 if self._decide_ticks < limit else 1 + self._lag
        return [_outputs_after(seq, ended) for seq in seqs]

    def wake(self, now_ns: int) -> None:
        """Take the decision that is due at ``now_ns`` (= ``next_wake_ns``)."""
        self.now_ns = now_ns
        if self._mode == SPAN:
            if self._span:
                self._advance(self._span)
        elif self._mode == IDLE:
            self._decide_ticks = self._end_ticks = max(self._end_ticks, now_ns << TICK_BITS)
        self._mode = DECIDING
        if self._inbox_notices:
            self._drain_notices(now_ns)
        step = self._step
        ends = self._ends
        ended = self._collect_ended(step) if ends and ends[0] >> ORDER_BITS == step else None
        outputs = self._outputs
        if ended or (outputs and outputs[0][0] < step - self._lag):
            self._deliver(ended)
        if self._inbox and self._inbox[0][0] < now_ns:
            self._drain_arrivals(now_ns)
        self._blocked = False
        nothing_new = self._partial is None and not self._waiting
        if nothing_new or not self._decide():
            if not self._batch:
                self._plan_empty()
            elif not self._plan_span():
                self._decide_preempting()
        if self._on_step is not None and self._mode != IDLE:
            self._report()

    # ---- inbox ----

    def _post(self, at_ns: int, is_notice: bool, what: Any) -> None:
        self._inbox_serial += 1
        if is_notice:
            self._inbox_notices += 1
        item = (at_ns, self._inbox_serial, is_notice, what)
        inbox = self._inbox
        if not inbox or inbox[-1][0] <= at_ns:
            inbox.append(item)
        else:
            insort(inbox, item)
        if self._mode == SPAN:
            # Behind a blocked head an arrival changes nothing before the batch does.
            if is_notice or not self._blocked or self._waiting.overtakes(what):
                steps = self._decisions_until(at_ns)
                if steps < self._span:
                    self._span = steps
                    self.next_wake_ns = self._decided_at(steps) >> TICK_BITS
        elif self._mode == IDLE:
            self.next_wake_ns = self._idle_until()

    def _drain_notices(self, now_ns: int) -> None:
        """Notices come before the outputs of the step that has ended, arrivals after them."""
        due = [item for item in self._inbox if item[2] and item[0] < now_ns]
        if due:
            self._inbox = [item for item in self._inbox if not (item[2] and item[0] < now_ns)]
            self._inbox_notices -= len(due)
            for _, _, _, what in due:
                if isinstance(what, StepCost):
                    self.cost = what
                else:
                    self._drop(what)

    def _drain_arrivals(self, now_ns: int) -> None:
        inbox = self._inbox
        count = 0
        for at_ns, _, _, seq in inbox:
            if at_ns >= now_ns:
                break
            count += 1
            if seq.state != DONE:
                seq.state = WAITING
                self._waiting.add(seq)
        del inbox[:count]

    def _drop(self, seq: Sequence) -> None:
        """An abort, between two steps."""
        state = seq.state
        if state == WAITING:
            self._unwait(seq)
        elif state not in (INBOX, DONE):
            held, hashed = self._holding(seq, scheduled=False, aborting=True)
            if state == DECODE:
                self._leave_batch(seq)
                self._forget_end(seq)
            elif state == PREFILL:
                self._partial = None
            del self._running[seq.order]
            self._pool.release(seq, held, hashed, keep=False)
        seq.state = DONE

    def _unwait(self, seq: Sequence) -> None:
        self._waiting.drop(seq)
        self._pool.forget(seq)

    # ---- time ----

    def _decided_at(self, steps: int) -> int:
        """When the decision for step ``_step + steps`` is taken, in ticks."""
        if self._lag:
            if not steps:
                return self._decide_ticks
            steps -= 1
        growth = self._growth_ticks * (steps * (steps - 1) >> 1)
        return self._end_ticks + steps * self._first_ticks + growth

    def _decisions_until(self, at_ns: int) -> int:
        """How many steps of the span pass before the first decision later than ``at_ns``."""
        ticks = (at_ns + 1) << TICK_BITS
        if ticks <= self._decide_ticks:
            return 0
        ticks -= self._end_ticks
        if not self._lag:
            return steps_to_reach(ticks, self._first_ticks, self._growth_ticks)
        if ticks <= 0:
            return 1
        return 1 + steps_to_reach(ticks, self._first_ticks, self._growth_ticks)

    def _blocks_for(self, steps: int) -> int:
        """Blocks that the batch needs in the next ``steps`` decode steps."""
        size = self._block_tokens
        first = self._step % size
        return (steps // size) * self._batch + sum(self._phase[first : first + steps % size])

    def _advance(self, steps: int) -> None:
        """Let ``steps`` decode steps (or an empty one) pass."""
        batch = self._batch
        if batch:
            blocks = self._blocks_for(steps)
            if blocks:
                self._pool.take(blocks)
            before = steps - 1
            growth = self._growth_ticks * before
            last = self._first_ticks + growth
            passed = steps * self._first_ticks + (growth * steps >> 1)
            self._decide_ticks = self._end_ticks + passed - (last if self._lag else 0)
            self._end_ticks += passed
            self.busy_ticks += passed
            self.steps += steps
            tokens = batch * steps
            self.output_tokens += tokens
            self._kv_tokens += tokens
        else:
            self._decide_ticks = self._end_ticks
        self._step += steps

    # ---- outputs ----

    def _collect_ended(self, step: int) -> list[Sequence]:
        """Take those out of the batch that are not scheduled in ``step`` any more.

        A sequence that reached a known limit has just computed its last token; its output is
        processed ``lag`` decisions later. One that ended by EOS was scheduled ``lag`` steps too
        far, and its last output is due now: these are returned.
        """
        ends = self._ends
        running = self._running
        lag = self._lag
        due: list[Sequence] = []
        in_flight: list[Sequence] = []
        while ends and ends[0] >> ORDER_BITS == step:
            seq = running[heappop(ends) & ORDER_MASK]
            self._leave_batch(seq)
            seq.state = ENDING
            if lag and not seq.eos:
                in_flight.append(seq)
            else:
                due.append(seq)
        if in_flight:
            self._put_ended(step - 1, in_flight)
        return due

    def _put_ended(self, step: int, ended: list[Sequence]) -> None:
        outputs = self._outputs
        if outputs and outputs[-1][0] == step:
            outputs[-1][1].extend(ended)
        else:
            outputs.append((step, ended))

    def _leave_batch(self, seq: Sequence) -> None:
        self._batch -= 1
        self._kv_tokens -= self._step - seq.offset + 1
        size = self._block_tokens
        phase = seq.offset % size
        self._phase[phase] -= 1
        self._phase[phase + size] -= 1

    def _forget_end(self, seq: Sequence) -> None:
        order = seq.order
        self._ends = [end for end in self._ends if end & ORDER_MASK != order]
        heapify(self._ends)

    def _deliver(self, ended: list[Sequence] | None) -> None:
        """Process the last tokens that are due: free seats and blocks, then call back."""
        outputs = self._outputs
        if outputs and outputs[0][0] < self._step - self._lag:
            _, others = outputs.popleft()
            ended = ended + others if ended else others
            if len(ended) > 1:  # freed in RUNNING order
                ended.sort(key=_by_order)
        for seq in ended or ():
            if seq.state == DONE:
                continue
            if seq.state == WAITING:  # preempted with its last token in flight
                self._unwait(seq)
            else:
                held, hashed = self._final_holding(seq)
                del self._running[seq.order]
                self._pool.release(seq, held, hashed, keep=False)
        for seq in ended or ():
            if seq.state != DONE:
                seq.state = DONE
                if self._on_step is not None:
                    self._finished.append(seq.id)
                if self._by_id.pop(seq.id, None) is not None:
                    self._on_finish(seq)

    def _final_holding(self, seq: Sequence) -> tuple[int, int]:
        """(blocks held, of these full and known) of a sequence all of whose outputs are known."""
        size = self._block_tokens
        tokens = seq.prompt_tokens + seq.outputs - 1
        computed = max(tokens, self._computed_at_end(seq))
        return -(-computed // size), tokens // size

    def _computed_at_end(self, seq: Sequence) -> int:
        """Tokens computed for an ended sequence: an EOS under async scheduling overran by one."""
        if not seq.eos or not self._lag:
            return 0
        return self._step - seq.offset

    # ---- deciding a step with a prefill ----

    def _decide(self) -> bool:
        """Schedule the step if it holds a prefill; otherwise say False and change nothing."""
        pool = self._pool
        batch = self._batch
        budget = self.settings.max_num_batched_tokens - batch
        if budget <= 0:
            self._blocked = True
            return False
        wanted = self._phase[self._step % self._block_tokens]
        if wanted > pool.free:
            self._decide_preempting()
            return True
        if self._on_step is not None:
            self._scheduled = self._decoding()
        done: list[Sequence] = []
        tokens = quad = 0
        seq = self._partial
        if seq is not None:
            before = self._partial_tokens
            tokens = min(seq.prompt_tokens + seq.replayed - before, budget)
            after = before + tokens
            blocks = -(-after // self._block_tokens) - self._partial_blocks
            if wanted + blocks > pool.free:
                self._decide_preempting()
                return True
            pool.take(wanted + blocks)
            wanted = 0
            self._chunk(seq, after, blocks, done)
            quad = after * after - before * before
            budget -= tokens
            if self._on_step is not None:
                self._scheduled.append((seq.id, tokens))
        if self._waiting:
            new_tokens, new_quad, look_again = self._admit(wanted, budget, done)
            tokens += new_tokens
            quad += new_quad
            if not tokens and not (look_again and batch):
                return False
        self._finish_step(batch, self._kv_tokens, tokens, quad, done)
        return True

    def _decoding(self) -> list[tuple[int, int]]:
        return [(seq.id, 1) for seq in self._running.values() if seq.state == DECODE]

    def _chunk(self, seq: Sequence, after: int, blocks: int, done: list[Sequence]) -> None:
        """The partial prefill has reached ``after`` tokens."""
        if after == seq.prompt_tokens + seq.replayed:
            done.append(seq)
            self._partial = None
        else:
            self._partial_tokens = after
            self._partial_blocks += blocks
        if seq.shared_blocks:
            self._pool.register(seq, after)

    def _admit(self, wanted: int, budget: int, done: list[Sequence]) -> tuple[int, int, bool]:
        """Admit from the head of the waiting queue while it fits.

        Args:
            wanted: blocks that the decoding sequences need this step and have not taken yet. They
                come first in the real order, but are left untouched until the head is known to
                fit, so that a decision that admits nothing changes nothing.

        Returns:
            Prefill tokens, their quadratic term, and whether the head must be looked at again
            after every step: where content lies in the pool twice, evicting a free copy may
            uncover one in use, and then the head needs less.
        """
        pool = self._pool
        size = self._block_tokens
        tokens = quad = 0
        look_again = False
        while self._waiting:
            if budget <= 0 or len(self._running) >= self.settings.max_num_seqs:
                self._blocked = True
                break
            seq = self._waiting.head()
            total = seq.prompt_tokens + seq.replayed
            need = -(-total // size)
            hit = pool.lookup(seq, total)
            fits = need - hit.in_use <= pool.free - wanted
            if not fits and hit.doubled:
                look_again = True
            elif not fits:
                self._blocked = True
                break
            if wanted:
                pool.take(wanted)
                wanted = 0
                if hit.blocks:
                    hit = pool.lookup(seq, total)
            if need - hit.in_use > pool.free:
                break
            cached = hit.blocks * size
            chunk = min(total - cached, budget)
            self._seat(seq, hit, cached + chunk, total, done)
            tokens += chunk
            quad += (cached + chunk) ** 2 - cached * cached
            budget -= chunk
            if self._on_step is not None:
                self._scheduled.append((seq.id, chunk))
        return tokens, quad, look_again

    def _seat(self, seq: Sequence, hit: Hit, after: int, total: int, done: list[Sequence]) -> None:
        """Move the head of WAITING to the end of RUNNING, with blocks for ``after`` tokens."""
        pool = self._pool
        self._waiting.take()
        seq.order = self._admissions
        self._admissions += 1
        self._running[seq.order] = seq
        cached_blocks = hit.blocks
        if cached_blocks:
            pool.claim(seq, hit)
        elif seq.own_run is not None:
            pool.forget(seq)
        blocks = -(-after // self._block_tokens)
        pool.take(blocks - cached_blocks)
        if after == total:
            done.append(seq)
        else:
            seq.state = PREFILL
            self._partial = seq
            self._partial_tokens = after
            self._partial_blocks = blocks
        if seq.shared_blocks:
            pool.register(seq, after)
        if seq.scheduled_ns < 0:
            seq.scheduled_ns = self.now_ns
            seq.cached_tokens = cached_blocks * self._block_tokens
            self.prefix_tokens_queried += total
            self.prefix_tokens_hit += seq.cached_tokens

    def _finish_step(
        self, batch: int, kv_tokens: int, tokens: int, quad: int, done: list[Sequence]
    ) -> None:
        """The step is decided: let its time pass and note what it will put out."""
        step = self._step
        if batch or tokens:
            ticks = self.cost.step_ticks(batch, kv_tokens, tokens, quad)
            self.steps += 1
        else:
            ticks = 0
        self.busy_ticks += ticks
        self.output_tokens += batch + len(done)
        self._kv_tokens += self._batch
        self._step = step + 1
        if self._lag:
            self._decide_ticks = self._end_ticks
            self._end_ticks += ticks
        else:
            self._end_ticks += ticks
            self._decide_ticks = self._end_ticks
        if done:
            self._end_prefills(step, done, batch)
        settled = self._partial is None and not self._waiting and self._batch
        if settled and self._skip and self._plan_span():
            return
        self._mode = STEP
        self.next_wake_ns = self._decide_ticks >> TICK_BITS

    def _end_prefills(self, step: int, done: list[Sequence], batch: int) -> None:
        """Prefills completed in ``step``: each yields a token at its end, and decodes from then.

        When that is, is known, so first tokens need no decision of their own. They stand behind
        the ``batch`` sequences that decode in the step, in the order of ``done``.
        """
        ended: list[Sequence] = []
        turn = batch - self._overrunning(step)
        end_ns = self._end_ticks >> TICK_BITS
        size = self._block_tokens
        for seq in done:
            turn += 1
            kept = seq.replayed
            total = seq.prompt_tokens + kept
            seq.prefilled = total
            seq.replayed = 0
            if not kept and not seq.pooling:
                seq.turn = turn
                self._on_first(seq, end_ns)
            more = seq.outputs - kept - 1
            if not more and not (seq.eos and self._lag):
                ended.append(seq)
                seq.state = ENDING
                continue
            seq.state = DECODE
            seq.offset = offset = step + 1 - total
            self._batch += 1
            self._kv_tokens += total + 1
            phase = offset % size
            self._phase[phase] += 1
            self._phase[phase + size] += 1
            end = step + 1 + more + (self._lag if seq.eos else 0)
            heappush(self._ends, end << ORDER_BITS | seq.order)
        if ended:
            self._outputs.append((step, ended))

    def _overrunning(self, step: int) -> int:
        """Of the sequences that decode in ``step``, those that ended by themselves one earlier:
        what is computed for them is thrown away.

        They leave the batch with the next step, so they are at the top of the heap of ends.
        """
        if not self._lag:
            return 0
        ends, count = self._ends, 0
        places = [0]
        while places:
            place = places.pop()
            if place < len(ends) and ends[place] >> ORDER_BITS == step + 1:
                seq = self._running[ends[place] & ORDER_MASK]
                count += seq.eos and seq.stalled_step != step
                places += (2 * place + 1, 2 * place + 2)
        return count

    # ---- deciding a step that lacks blocks ----

    def _decide_preempting(self) -> None:
        """The running sequences need more blocks than there are: preempt, admit nobody.

        RUNNING is walked in order. Under fcfs the last one goes; under priority the one with the
        highest (priority, arrival), even if this step has scheduled it already. If a sequence must
        preempt itself, all behind it stand still this step.
        """
        pool = self._pool
        step = self._step
        size = self._block_tokens
        order = list(self._running.values())
        budget = self.settings.max_num_batched_tokens
        batch = kv_tokens = tokens = quad = 0
        done: list[Sequence] = []
        scheduled: dict[int, int] = {}
        index = 0
        while index < len(order) and budget > 0:
            seq = order[index]
            if seq.state == PREFILL:
                before = self._partial_tokens
                chunk = min(seq.prompt_tokens + seq.replayed - before, budget)
                after = before + chunk
                blocks = -(-after // size) - self._partial_blocks
            elif seq.state == DECODE:
                before = step - seq.offset
                chunk = 1
                blocks = 0 if before % size else 1
            else:  # its last token is in flight
                index += 1
                continue
            while blocks > pool.free:
                at = self._victim(order)
                victim = order.pop(at)
                if at < index:
                    index -= 1
                counted = scheduled.pop(victim.id, 0)
                if counted:
                    batch -= 1
                    kv_tokens -= step - victim.offset + 1
                    budget += counted
                self._preempt(victim, bool(counted))
                if victim is seq:
                    break
            if seq.state == WAITING:
                break
            pool.take(blocks)
            if seq.state == PREFILL:
                self._chunk(seq, after, blocks, done)
                tokens = chunk
                quad = after * after - before * before
            else:
                batch += 1
                kv_tokens += before + 1
            scheduled[seq.id] = chunk
            budget -= chunk
            index += 1
        self._stall_unscheduled(scheduled)
        if self._on_step is not None:
            self._scheduled = list(scheduled.items())
        self._finish_step(batch, kv_tokens, tokens, quad, done)

    def _victim(self, order: list[Sequence]) -> int:
        """Index of the one to preempt; of equals the first in RUNNING, as ``max`` gives it."""
        if not self._by_priority:
            return len(order) - 1
        return max(range(len(order)), key=lambda i: (order[i].priority, order[i].arrival_ns))

    def _holding(self, seq: Sequence, scheduled: bool, aborting: bool) -> tuple[int, int]:
        """(blocks held, of these full and known) of a running sequence at a decision.

        Args:
            scheduled: the step being decided holds it already.
            aborting: the outputs due at this decision are not processed yet.
        """
        size = self._block_tokens
        if seq.state == PREFILL:
            return self._partial_blocks, self._partial_tokens // size
        final = seq.prompt_tokens + seq.outputs - 1
        computed = self._step - seq.offset + scheduled if seq.state == DECODE else final
        known = self._known_tokens(seq, computed, scheduled, aborting)
        return -(-computed // size), min(known, final) // size

    def _known_tokens(self, seq: Sequence, computed: int, scheduled: bool, aborting: bool) -> int:
        """Of ``computed`` tokens, those whose blocks can be known by their content.

        Blocks become known when they are scheduled, but a generated token is known only when its
        output has been processed: ``lag`` tokens later, except after a standstill, when nothing
        was in flight.
        """
        lag = self._lag
        ago = self._step - seq.stalled_step
        if seq.state == ENDING:
            in_flight = 0 if ago == 2 + aborting else lag
        elif ago == 1:
            if aborting:
                return seq.known_tokens
            in_flight = 0
        else:
            in_flight = 0 if ago == 2 and not scheduled else lag
        return max(computed - in_flight, seq.prefilled)

    def _preempt(self, seq: Sequence, scheduled: bool) -> None:
        held, hashed = self._holding(seq, scheduled, aborting=False)
        self.preemptions += 1
        seq.preemptions += 1
        if seq.state == PREFILL:
            self._partial = None
        elif seq.state == DECODE:
            outputs = self._step - seq.offset - seq.prompt_tokens + 1
            self._leave_batch(seq)
            self._forget_end(seq)
            seq.replayed = min(outputs, seq.outputs)
            if outputs >= seq.outputs:  # an EOS that the scheduler has not seen yet
                self._put_ended(self._step - 1, [seq])
        else:
            seq.replayed = seq.outputs
        del self._running[seq.order]
        self._pool.release(seq, held, hashed, keep=True)
        seq.state = WAITING
        self._waiting.put_back(seq)
        if self._on_step is not None:
            self._preempted.append(seq.id)

    def _stall_unscheduled(self, scheduled: dict[int, int]) -> None:
        """Decoding sequences left out of this step stand still: all of theirs is one step later."""
        size = self._block_tokens
        step = self._step
        moved = False
        for place, end in enumerate(self._ends):
            seq = self._running[end & ORDER_MASK]
            if seq.id in scheduled:
                continue
            moved = True
            overrun = seq.eos and step - seq.offset >= seq.prompt_tokens + seq.outputs - 1
            if not overrun:
                self._ends[place] = end + (1 << ORDER_BITS)
            seq.known_tokens = self._known_tokens(seq, step - seq.offset, False, False)
            seq.stalled_step = step
            phase = seq.offset % size
            self._phase[phase] -= 1
            self._phase[phase + size] -= 1
            seq.offset += 1
            phase = seq.offset % size
            self._phase[phase] += 1
            self._phase[phase + size] += 1
            self._kv_tokens -= 1  # _finish_step moves the whole batch on by one token
        if moved:
            heapify(self._ends)

    # ---- planning a span ----

    def _plan_span(self) -> bool:
        """Sleep over the steps in which the batch merely decodes, from step ``_step`` on.

        This may be called ahead of that step's decision, right after the step before was decided.

        Returns:
            Whether there is such a step: False if blocks lack, or (ahead only) the decision for
            ``_step`` has outputs to process or arrivals to see.
        """
        step = self._step
        steps = (self._ends[0] >> ORDER_BITS) - step
        if self._outputs:
            due = self._outputs[0][0] + 1 + self._lag - step
            if due < steps:
                steps = due
        if steps <= 0:
            return False
        free = self._pool.free
        if steps * self._batch > free and self._blocks_for(steps) > free:
            steps = self._steps_with_blocks()
            if not steps:
                return False
        cost = self.cost
        self._first_ticks = first = cost.step_ticks(self._batch, self._kv_tokens, 0, 0)
        self._growth_ticks = growth = cost.per_kv_token * self._batch
        if not self._skip:
            steps = 1
        elif self._inbox:
            steps = self._steps_until_inbox(steps)
            if not steps:
                return False
        if self._on_step is not None:
            self._scheduled = self._decoding()
        self._mode = SPAN
        self._span = steps
        if self._lag:
            steps -= 1
        ticks = self._end_ticks + steps * first + growth * (steps * (steps - 1) >> 1)
        self.next_wake_ns = ticks >> TICK_BITS
        return True

    def _steps_until_inbox(self, steps: int) -> int:
        if not self._blocked or self._by_priority or self._inbox_notices:
            return min(steps, self._decisions_until(self._inbox[0][0]))
        return steps

    def _steps_with_blocks(self) -> int:
        """How many decode steps the free blocks last; 0: not even one."""
        size = self._block_tokens
        rounds, free = divmod(self._pool.free, self._batch)
        steps = rounds * size
        step = self._step
        while True:
            free -= self._phase[(step + steps) % size]
            if free < 0:
                return steps
            steps += 1

    def _plan_empty(self) -> None:
        """Nothing can be computed in the next step."""
        self._first_ticks = self._growth_ticks = 0
        overrun = self._end_ticks > self._decide_ticks
        if self._outputs or (overrun and (self._waiting or not self._skip)):
            # Last tokens, or a step run too far, are still in flight.
            self._mode = SPAN
            self._span = 1
            self.next_wake_ns = self._end_ticks >> TICK_BITS
        elif self._waiting:
            raise EngineError("the head of the waiting queue does not fit into an empty engine")
        else:
            self._mode = IDLE
            self.next_wake_ns = self._idle_until() if self._inbox else None

    def _idle_until(self) -> int:
        """When an idle engine sees the inbox: at once, but not before its last step has ended."""
        return max(self._inbox[0][0] + 1, self._end_ticks >> TICK_BITS)

    # ---- reporting every step ----

    def _report(self) -> None:
        assert self._on_step is not None
        in_span = self._mode == SPAN
        taken_later = self._blocks_for(self._span) if in_span else 0
        self._on_step(
            StepRecord(
                self._step if in_span else self._step - 1,
                self._scheduled,
                self._preempted,
                self._finished,
                [seq.id for seq in self._running.values()],
                len(self._waiting),
                self._pool.free - taken_later,
            )
        )
        self._scheduled = []
        self._preempted = []
        self._finished = []
