"""Replicas as placement sees them: what a request takes there, how soon, and if there is room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from policy.facts import Replica
    from policy.parameters import Inflight
    from policy.prefixes import PrefixTable

TICKS_PER_NS = 1024


# Whether a replica can take a request now, and if not, why.
FREE = 0
FULL = 1  # its sequences or its KV tokens are taken: something must finish
BUSY = 2  # enough prompts wait for their prefill: some first token must come
CAPPED = 3  # enough long prompts wait for their prefill: short ones may still go


class Need(msgspec.Struct, frozen=True, gc=False):
    """What a request takes on one replica."""

    kv_tokens: int
    """Of its own; prefix blocks, which others may share, are not among them."""
    new_prefix_tokens: int
    """Of prefix blocks that nothing in flight holds there."""
    prefill_tokens: int
    quad: int
    """End squared less start squared of what is computed: attention's part of a prefill."""
    long: bool


class Host:
    """A replica as placement sees it: the facts, our targets for it, and what we sent there."""

    __slots__ = (
        "decode", "factor", "free_alone", "free_mixed", "kv_most", "kv_shared", "long_most",
        "long_tokens", "number", "out", "output_permille", "pace_ppm", "paced_ns", "penalties",
        "per_kv", "per_quad", "per_sequence", "per_token", "prefill_most", "prefixes", "probing",
        "replica", "sequences_most", "sequences_shared", "spec", "start_ticks", "throttled",
        "tokens_most",
    )  # fmt: skip

    def __init__(self, replica: Replica, inflight: Inflight, prefixes: PrefixTable) -> None:
        spec = replica.spec
        self.replica = replica
        self.spec = spec
        self.number = spec.replica
        self.sequences_most = self.kv_most = self.sequences_shared = self.kv_shared = 0
        self.prefill_most = self.long_most = 0
        self.aim(inflight)
        self.reserve(inflight.reserve_permille)
        self.tokens_most = replica.tokens_most
        self.long_tokens = inflight.long_prefill_tokens
        self.output_permille = inflight.output_reserve_permille
        self.prefixes = prefixes
        self.decode, fixed, self.per_sequence, self.per_kv, self.per_token, self.per_quad = (
            spec.cost
        )
        self.free_alone = spec.prefill_free_tokens
        self.free_mixed = spec.mixed_free_tokens
        self.start_ticks = spec.request_in_ns * TICKS_PER_NS + fixed
        self.out = False
        """It takes no new work for the moment."""
        self.probing = False
        """It waits for one request that tries whether it is well again."""
        self.throttled = False
        """Its card has lowered its clocks."""
        self.pace_ppm = 1_000_000
        """Observed over predicted time, beyond what the dimensions below explain."""
        self.paced_ns = 0
        """When that was last learned, or faded."""
        self.penalties: tuple[int, int, int] = (0, 0, 0)
        """How bad bandwidth, closeness and heat are, per mille."""
        self.factor = 1000
        """Per mille by which the predicted time is made longer for these."""

    def aim(self, inflight: Inflight) -> None:
        """How much may be in flight there: this controller's share of the targets. ``reserve`` is
        to be called afterwards."""
        spec = self.spec
        share = self.replica.share_permille
        sequences = spec.max_num_seqs * inflight.sequences_permille // 1000
        self.sequences_most = max(1, sequences * share // 1000)
        kv_tokens = (spec.kv_blocks - 1) * spec.block_tokens
        self.kv_most = max(1, kv_tokens * inflight.kv_permille // 1000 * share // 1000)
        prefill = spec.max_num_batched_tokens * inflight.prefill_steps_milli // 1000
        self.prefill_most = prefill * share // 1000
        self.long_most = inflight.long_prefill_cap_tokens * share // 1000

    def reserve(self, permille: int) -> None:
        """Keep this part of the targets for Turbo, and for what it lent."""
        shared_permille = 1000 - permille
        self.sequences_shared = max(1, self.sequences_most * shared_permille // 1000)
        self.kv_shared = self.kv_most * shared_permille // 1000

    def need(
        self, prompt_tokens: int, output_tokens: int, keys: tuple[int, ...], block_tokens: int
    ) -> Need:
        """What the request takes here. ``block_tokens`` is the size of a prefix block in tokens."""
        own = prompt_tokens + output_tokens * self.output_permille // 1000
        if own > self.tokens_most:
            own = self.tokens_most  # the prompt's length is a guess: it fits, or is refused there
        if not keys:
            long = prompt_tokens >= self.long_tokens
            return Need(own, 0, prompt_tokens, prompt_tokens * prompt_tokens, long)
        # A hit of the whole prompt still computes its last token.
        most = prompt_tokens - 1
        cached = min(self.prefixes.cached_blocks(keys) * block_tokens, most)
        shared = min(len(keys) * block_tokens, most)
        new = shared - min(self.prefixes.held_blocks(keys) * block_tokens, shared)
        prefill = prompt_tokens - cached
        quad = prompt_tokens * prompt_tokens - cached * cached
        return Need(own - shared, new, prefill, quad, prefill >= self.long_tokens)

    def room(self, need: Need, first: bool) -> int:
        """Whether there is room; ``first`` says that the reserve may be used.

        An idle replica takes anything, so that nothing waits for ever.
        """
        replica = self.replica
        if replica.in_flight >= (self.sequences_most if first else self.sequences_shared):
            return FULL
        held = replica.kv_tokens + self.prefixes.held_tokens
        if held and held + need.kv_tokens + need.new_prefix_tokens > (
            self.kv_most if first else self.kv_shared
        ):
            return FULL
        if need.long:
            if replica.long_tokens and replica.long_tokens + need.prefill_tokens > self.long_most:
                return CAPPED
            return FREE
        short = replica.prefill_tokens - replica.long_tokens
        if short and short + need.prefill_tokens > self.prefill_most:
            return BUSY
        return FREE

    def alone_ticks(self, need: Need) -> int:
        """Predicted from dispatch to first token on an idle replica: the best case."""
        tokens = max(0, need.prefill_tokens - self.free_alone)
        return self.start_ticks + self.per_token * tokens + self.per_quad * need.quad

    def prefill_ticks(self, need: Need) -> int:
        """Predicted from dispatch to first token, behind the prompts that are there already."""
        tokens = max(0, self.replica.prefill_tokens + need.prefill_tokens - self.free_mixed)
        return self.start_ticks + self.per_token * tokens + self.per_quad * need.quad

    def step_ticks(self) -> int:
        """One decoding step with what is in flight now."""
        replica = self.replica
        return self.decode + self.per_sequence * replica.in_flight + self.per_kv * replica.kv_tokens

    def work_ticks(self, need: Need, prompt_tokens: int, output_tokens: int) -> int:
        """The share of a full replica's time that a request takes: what a queue drains by."""
        kv_tokens = prompt_tokens + output_tokens // 2 + 1
        batch = max(1, min(self.sequences_most, self.kv_most // kv_tokens))
        step = self.decode // batch + self.per_sequence + self.per_kv * kv_tokens
        prefill = self.per_token * need.prefill_tokens + self.per_quad * need.quad
        return prefill + output_tokens * step
