"""Which rare paths of vLLM's scheduler a workload really went through.

The counts are taken on the real scheduler, so "this path was compared" is a measured fact.
Runs inside the vLLM environment, but imports nothing of it: `probed` extends the class it gets.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

GROUP_ID_BYTES = 4

RARE_PATHS = {
    "preempted": "a running request gave up its blocks",
    "preempted_self": "a request that lacked a block was itself the victim",
    "preempted_self_midlist": "... with others after it in RUNNING, which stood still",
    "preempted_after_scheduling": "the victim had tokens this step; they returned to the budget",
    "preempted_after_standing_still": "the victim had stood still in the step before",
    "preempted_in_prefill": "the victim was part-way through its prompt",
    "preempted_last_in_flight": "async: the victim's last token was in flight",
    "preempted_several": "more than one victim in one step",
    "preempted_several_for_one": "more than one victim, so that one request gets its blocks",
    "preempted_beside_chunk": "a step that preempted and computed a part of a prompt",
    "finished_while_waiting": "a preempted request finished from WAITING",
    "finished_while_waiting_eos": "... by EOS",
    "resumed": "a preempted request was admitted again",
    "resumed_on_own_blocks": "... and hit blocks that only itself had computed",
    "resumed_on_generated_blocks": "... past its prompt",
    "stood_still_in_flight": "async: no step for a request whose last token is in flight",
    "prefill_chunked": "a prompt was split over steps",
    "blocked_head": "the head of WAITING did not fit",
    "hit": "prefix cache hit at admission",
    "hit_same_step": "... on a block scheduled in this very step",
    "hit_partial_prefix": "... on a part of the shared content only",
    "hit_inside_content": "... that ends inside a content block",
    "hit_after_eviction": "... where the next shared block had been cached and was evicted",
    "hit_free_block": "... on a block that nobody held",
    "duplicate_cached": "a second copy of a cached block",
    "duplicate_evicted": "a copy was evicted and another stayed",
    "duplicate_uncovered": "... and the copy that lookups now return is in use",
    "eos": "a request ended by EOS",
    "eos_overrun": "async: it had been scheduled one step too far",
    "eos_overrun_block": "... which had taken a block of its own",
    "model_len_stop": "a request ended at max_model_len",
    "abort_unseen": "abort before the scheduler saw the request",
    "abort_settled": "abort of a request that had finished",
    "abort_waiting": "abort of a request that had never run",
    "abort_prefilling": "abort part-way through a prompt",
    "abort_decoding": "abort of a decoding request",
    "abort_preempted": "abort of a preempted request",
    "abort_after_standing_still": "abort of a request that had stood still in the step before",
    "abort_in_flight": "async: abort with a step in flight",
    "pooled": "a pooling request finished",
    "pooled_in_flight": "async: it stood in RUNNING with its output in flight",
}
"""Every path that is counted, and what it is."""


class Probe:
    """Counters on one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.paths: Counter[str] = Counter()
        self.step = 0
        self.allocating: Any = None
        self.allocated: set[str] = set()
        self.preempted: list[Any] = []
        self.preempted_for: Any = None
        self.stood_still: set[str] = set()
        self.hashed_in: dict[int, int] = {}
        self.ever_cached: set[bytes] = set()
        self.waiting_before: dict[str, Any] = {}
        self.running_before: dict[str, tuple[Any, int]] = {}
        self._watch_blocks(scheduler.kv_cache_manager)

    def _watch_blocks(self, manager: Any) -> None:
        """Wrap what allocates, hashes and evicts blocks."""
        pool = manager.block_pool
        allocate, insert = manager.allocate_slots, pool._insert_block_hash
        remove = pool._remove_cached_block_hashes

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.allocating = request
            waiting = request.status.name != "RUNNING"
            if waiting:
                self._looked_up(request, kwargs["new_computed_blocks"].blocks[0])
            blocks = allocate(request, *args, **kwargs)
            if blocks is None:
                self.paths["blocked_head"] += waiting
            else:
                self.allocated.add(request.request_id)
                if waiting:
                    self._admitted(request, kwargs["new_computed_blocks"].blocks[0])
            return blocks

        def insert_hash(key: Any, block: Any, *args: Any, **kwargs: Any) -> None:
            known = pool.cached_block_hash_to_block.get_one_block(key)
            self.paths["duplicate_cached"] += known is not None and known is not block
            self.hashed_in[block.block_id] = self.step
            self.ever_cached.add(bytes(key[:-GROUP_ID_BYTES]))
            insert(key, block, *args, **kwargs)

        def remove_hashes(block: Any) -> Any:
            key = block.block_hash
            first = key and pool.cached_block_hash_to_block.get_one_block(key)
            removed = remove(block)
            left = key and pool.cached_block_hash_to_block.get_one_block(key)
            if left:
                self.paths["duplicate_evicted"] += 1
                self.paths["duplicate_uncovered"] += first is block and left.ref_cnt > 0
            return removed

        manager.allocate_slots = allocate_slots
        pool._insert_block_hash = insert_hash
        pool._remove_cached_block_hashes = remove_hashes

    def _looked_up(self, request: Any, hit: Any) -> None:
        """The state of hit blocks must be read before they are taken."""
        self.free_hits = sum(block.ref_cnt == 0 for block in hit)

    def _admitted(self, request: Any, hit: Any) -> None:
        paths = self.paths
        block = self.scheduler.block_size
        tokens = len(hit) * block
        shared = request.shared_tokens
        resumed = request.num_preemptions > 0
        paths["resumed"] += resumed
        if not hit:
            return
        paths["hit"] += 1
        paths["hit_free_block"] += self.free_hits > 0
        paths["hit_same_step"] += any(self.hashed_in[b.block_id] == self.step for b in hit)
        paths["resumed_on_own_blocks"] += resumed and tokens > shared
        paths["resumed_on_generated_blocks"] += resumed and tokens > request.num_prompt_tokens
        paths["hit_partial_prefix"] += tokens < min(shared, request.num_tokens - 1) // block * block
        paths["hit_inside_content"] += tokens < shared and tokens % request.content_tokens != 0
        could = min(len(request.block_hashes), (request.num_tokens - 1) // block)
        if tokens < shared and len(hit) < could:
            following = bytes(request.block_hashes[len(hit)])
            paths["hit_after_eviction"] += following in self.ever_cached

    def begin_step(self) -> None:
        """Before schedule()."""
        self.step += 1
        self.allocated = set()
        self.preempted = []

    def preempting(self, victim: Any) -> None:
        """Before a victim loses its blocks."""
        paths = self.paths
        again = bool(self.preempted) and self.allocating is self.preempted_for
        paths["preempted_several_for_one"] += again
        self.preempted_for = self.allocating
        self.preempted.append(victim)
        paths["preempted"] += 1
        paths["preempted_self"] += victim is self.allocating
        paths["preempted_after_scheduling"] += victim.request_id in self.allocated
        paths["preempted_after_standing_still"] += victim.request_id in self.stood_still
        paths["preempted_in_prefill"] += victim.is_prefill_chunk
        paths["preempted_last_in_flight"] += _last_in_flight(victim)

    def end_step(self, scheduled: dict[str, int]) -> list[int]:
        """After schedule(); returns the victims in their order."""
        paths, scheduler = self.paths, self.scheduler
        idle = [request for request in scheduler.running if request.request_id not in scheduled]
        in_flight = [request for request in idle if _last_in_flight(request)]
        ready = [request for request in idle if not _last_in_flight(request)]
        self.stood_still = {request.request_id for request in ready}
        selfish = any(victim is self.allocating for victim in self.preempted)
        paths["preempted_self_midlist"] += selfish and bool(ready)
        paths["preempted_several"] += len(self.preempted) > 1
        paths["preempted_beside_chunk"] += bool(self.preempted) and any(
            count > 1 for count in scheduled.values()
        )
        pooling = scheduler.num_sampled_tokens_per_step == 0
        paths["pooled_in_flight" if pooling else "stood_still_in_flight"] += bool(in_flight)
        paths["prefill_chunked"] += any(
            scheduler.requests[name].is_prefill_chunk for name in scheduled
        )
        return [int(victim.request_id) for victim in self.preempted]

    def begin_update(self) -> None:
        """Before update_from_output()."""
        self.waiting_before = {r.request_id: r for r in self.scheduler.waiting}
        self.running_before = {
            r.request_id: (r, r.num_in_flight_tokens) for r in self.scheduler.running
        }

    def end_update(self) -> None:
        """After update_from_output()."""
        paths = self.paths
        for request in self.waiting_before.values():
            if request.is_finished():
                paths["finished_while_waiting"] += 1
                paths["finished_while_waiting_eos"] += request.status.name == "FINISHED_STOPPED"
        for request, _ in self.running_before.values():
            if not request.is_finished():
                continue
            if request.pooling_params:
                paths["pooled"] += 1
            elif request.status.name == "FINISHED_STOPPED":
                overrun = request.num_in_flight_tokens > 0
                paths["eos"] += 1
                paths["eos_overrun"] += overrun
                first_of_block = (request.num_tokens - 1) % self.scheduler.block_size == 0
                paths["eos_overrun_block"] += overrun and first_of_block
            elif request.num_output_tokens < request.max_tokens:
                paths["model_len_stop"] += 1

    def aborting(self, name: str) -> None:
        """Before finish_requests()."""
        request = self.scheduler.requests.get(name)
        if request is None:
            kind = "abort_settled" if name in self.scheduler.seen else "abort_unseen"
            self.paths[kind] += 1
            return
        status = request.status.name
        if status == "RUNNING":
            prefilling = request.num_computed_tokens < request.num_prompt_tokens
            self.paths["abort_prefilling" if prefilling else "abort_decoding"] += 1
        else:
            self.paths[f"abort_{status.lower()}"] += 1
        self.paths["abort_after_standing_still"] += name in self.stood_still
        self.paths["abort_in_flight"] += request.num_in_flight_tokens > 0


def _last_in_flight(request: Any) -> bool:
    """Whether nothing is left to schedule: only an output in flight is awaited."""
    if request.pooling_params:
        return request.num_computed_tokens >= request.num_prompt_tokens
    return request.num_output_placeholders > 0 and (
        request.num_computed_tokens + 2 - request.num_output_placeholders
        >= request.num_prompt_tokens + request.max_tokens
    )


def probed(base: type) -> type:
    """The scheduler class with a probe; the schedule is untouched."""

    class Probed(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen: set[str] = set()
            self.probe = Probe(self)

        def add_request(self, request: Any) -> None:
            self.seen.add(request.request_id)
            super().add_request(request)

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            self.probe.preempting(request)
            super()._preempt_request(request, *args, **kwargs)

    return Probed
