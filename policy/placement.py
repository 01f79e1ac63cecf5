"""Which replica takes a request: the predicted time there, made longer by six dimensions.

Predicted time comes from our own books (what is in flight, what prompts wait), never from old
gauges. Each dimension says how bad a replica is, from 0 (good) to 1000 per mille; its weight says
by how much of the predicted time that counts. Free memory and prefix warmth come from our books
too; bandwidth, heat and closeness from the card. A required label is a condition, not a score.

Weights adapt: where cards with a busy link turn out slower than predicted, the weight of bandwidth
grows (normalised least mean squares, within bounds). What the dimensions do not explain about a
replica becomes its own pace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.hosts import BUSY, CAPPED, FREE, FULL, TICKS_PER_NS
from policy.tiers import LENT

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from policy.hosts import Host, Need
    from policy.parameters.placement import Affinity, Placement
    from policy.tiers import Job

PPM = 1_000_000
HEAT_FROM_PERMILLE = 800
RATIO_MOST_PERMILLE = 4000  # one request that took forever says little about the next
NS_PER_MS = 1_000_000
ROOMS = {FREE: "free", FULL: "full", BUSY: "busy", CAPPED: "capped"}

Choice = tuple["Host", "Need", int, int]
"""Host, need, and in ticks: until the first token, and one decoding step."""


class Score(msgspec.Struct, frozen=True):
    """How a replica looks to a request; the dimensions in per mille, 0 is good."""

    replica: int
    name: str
    room: str
    prefill_ns: int
    done_ns: int
    memory: int
    bandwidth: int
    closeness: int
    heat: int
    switch: int
    affinity: int
    pace_permille: int
    score_ns: int


class PlacerState(msgspec.Struct, array_like=True):
    """What placement has learned about its weights, in canonical form."""

    weights_ppm: list[int]
    mean_ppm: int


class Placer:
    """Chooses, and learns from how long it took."""

    __slots__ = (
        "_adapt_ppm", "_affinity", "_affinity_weight", "_fade_ns", "_least_ppm", "_mean_ppm",
        "_memory_weight", "_most_ppm", "_rule", "_stale_ns", "_switch_weight", "_weights_ppm",
        "throttled_out",
    )  # fmt: skip

    def __init__(self, section: Placement) -> None:
        self._rule = section.rule
        self._memory_weight = section.memory_weight_permille
        self._switch_weight = section.switch_weight_permille
        self._affinity = section.affinity
        self._affinity_weight = section.affinity_weight_permille
        self.throttled_out = section.throttled_out
        self._stale_ns = section.stale_ms * NS_PER_MS
        self._adapt_ppm = section.adapt_permille * 1000
        self._fade_ns = section.pace_fade_ms * NS_PER_MS
        given = (
            section.bandwidth_weight_permille,
            section.closeness_weight_permille,
            section.heat_weight_permille,
        )
        self._weights_ppm = [weight * 1000 for weight in given]
        most = section.adapt_most_permille
        self._least_ppm = [weight * 1_000_000 // most for weight in given]
        self._most_ppm = [weight * most for weight in given]
        self._mean_ppm = PPM
        """Observed over predicted time, over all replicas: what all share says nothing of one."""

    def required(self, model: str, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        """Those of ``hosts`` that have every label the model requires."""
        rule = self._affinity.get(model)
        if rule is None or not rule.require:
            return hosts
        needed = set(rule.require)
        return tuple(host for host in hosts if needed <= set(host.spec.labels))

    def choose(
        self, hosts: Iterable[Host], job: Job, avoid: Container[int], model: str = ""
    ) -> Choice | None:
        """The best host outside ``avoid`` with room; None if there is none. Ties go to the earlier
        host, but one that is probed goes first: else nobody would ever try it."""
        best: Choice | None = None
        need: Need | None = None
        least = 0
        prompt_tokens, output_tokens, keys = job.prompt_tokens, job.output_tokens, job.keys
        first = job.tier <= LENT
        rule = self._rule
        memory_weight = self._memory_weight
        affinity = self._affinity.get(model) if self._affinity else None
        for host in hosts:
            if host.out or (avoid and host.number in avoid):
                continue
            if need is None or keys:  # without a prefix it needs the same everywhere
                need = host.need(prompt_tokens, output_tokens, keys, job.block_tokens)
            prefill = host.prefill_ticks(need)
            replica = host.replica
            kv_tokens = replica.kv_tokens
            step = host.decode + host.per_sequence * replica.in_flight + host.per_kv * kv_tokens
            if rule == "scored":
                factor = host.factor + memory_weight * kv_tokens // host.kv_most
                if keys:
                    factor += self._switch_weight * need.prefill_tokens // prompt_tokens
                if affinity is not None:
                    factor += self._affinity_weight * self._disliked(host, affinity) // 1000
                score = (prefill + output_tokens * step) * factor
            elif rule == "soonest":
                score = prefill + output_tokens * step
            elif rule == "least_loaded":
                score = replica.in_flight
            else:
                score = _shuffled(job.request, host.number)
            if best is not None and score >= least and not host.probing:
                continue  # most end here, so room comes last
            if host.room(need, first):
                continue
            best = host, need, prefill, step
            if host.probing:
                return best
            least = score
        return best

    def _disliked(self, host: Host, affinity: Affinity) -> int:
        prefer = affinity.prefer
        return 1000 if prefer and not any(label in host.spec.labels for label in prefer) else 0

    # Learning

    def refresh(self, host: Host, now_ns: int) -> None:
        """Take in what was last read from the host's card."""
        replica = host.replica
        reading = replica.gpu
        bandwidth = heat = 0
        host.throttled = False
        if reading is not None and now_ns - replica.gpu_ns <= self._stale_ns:
            host.throttled = reading.throttled
            bandwidth = min(1000, (3 * reading.pcie_permille + reading.memory_permille) // 4)
            hottest = max(reading.heat_permille, reading.power_permille) - HEAT_FROM_PERMILLE
            heat = max(0, min(1000, hottest * 1000 // (1000 - HEAT_FROM_PERMILLE)))
        host.penalties = (bandwidth, 1000 - host.spec.closeness_permille, heat)
        self._refactor(host)

    def fade(self, host: Host, now_ns: int) -> None:
        """Forget a part of a pace that has not been seen for a while."""
        if host.pace_ppm != PPM and now_ns - host.paced_ns >= self._fade_ns:
            host.paced_ns = now_ns
            excess = host.pace_ppm - PPM
            host.pace_ppm -= excess // 4 if abs(excess) > PPM // 100 else excess
            self._refactor(host)

    def observe(self, now_ns: int, host: Host, took_ns: int, predicted_ns: int) -> None:
        """A request that was to take ``predicted_ns`` there took ``took_ns``."""
        host.paced_ns = now_ns
        adapt = self._adapt_ppm
        if not adapt or predicted_ns <= 0:
            return
        ratio = min(took_ns * 1000 // predicted_ns, RATIO_MOST_PERMILLE) * 1000
        mean = self._mean_ppm
        self._mean_ppm = max(1, mean + (ratio - mean) * adapt // PPM)
        relative = ratio * PPM // mean
        expected = host.factor * 1000
        error = relative - expected
        penalties = host.penalties
        if penalties != (0, 0, 0):
            weights = self._weights_ppm
            for at in range(3):
                # Normalised by 1: penalties are shares of one.
                moved = weights[at] + error * penalties[at] // 1000 * adapt // PPM
                weights[at] = max(self._least_ppm[at], min(moved, self._most_ppm[at]))
        host.pace_ppm += error * adapt // PPM
        host.pace_ppm = max(PPM // 4, min(host.pace_ppm, 4 * PPM))
        self._refactor(host)

    def _refactor(self, host: Host) -> None:
        bandwidth, closeness, heat = host.penalties
        weights = self._weights_ppm
        explained = weights[0] * bandwidth + weights[1] * closeness + weights[2] * heat
        host.factor = (host.pace_ppm + explained // 1000) // 1000

    # What people and snapshots see

    def score(self, host: Host, job: Job, model: str, room: str = "") -> Score:
        """The host's row in the table that explains a choice."""
        need = host.need(job.prompt_tokens, job.output_tokens, job.keys, job.block_tokens)
        prefill = host.prefill_ticks(need)
        done = prefill + job.output_tokens * host.step_ticks()
        affinity = self._affinity.get(model)
        disliked = 0 if affinity is None else self._disliked(host, affinity)
        memory = 1000 * host.replica.kv_tokens // host.kv_most
        switch = 1000 * need.prefill_tokens // job.prompt_tokens if job.keys else 0
        added = self._memory_weight * memory + self._switch_weight * switch
        factor = host.factor + (added + self._affinity_weight * disliked) // 1000
        return Score(
            replica=host.number,
            name=host.spec.name,
            room=room or ROOMS[host.room(need, job.tier <= LENT)],
            prefill_ns=prefill // TICKS_PER_NS,
            done_ns=done // TICKS_PER_NS,
            memory=memory,
            bandwidth=host.penalties[0],
            closeness=host.penalties[1],
            heat=host.penalties[2],
            switch=switch,
            affinity=disliked,
            pace_permille=host.pace_ppm // 1000,
            score_ns=done * factor // (1000 * TICKS_PER_NS),
        )

    def state(self) -> PlacerState:
        return PlacerState(list(self._weights_ppm), self._mean_ppm)

    def load(self, state: PlacerState) -> None:
        self._weights_ppm = list(state.weights_ppm)
        self._mean_ppm = state.mean_ppm


def _shuffled(request: int, number: int) -> int:
    """A number that has nothing to do with either: for the rule that chooses at random."""
    mixed = (request * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 30) * 0x94D049BB133111EB & (1 << 64) - 1
    return mixed ^ mixed >> 31
