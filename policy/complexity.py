"""What a request will cost, guessed from what a gateway can see and corrected by usage.

Everything is an integer: the guesses reach decisions, and must be the same on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.bounded import Bounded
from policy.cost import request_flops

if TYPE_CHECKING:
    from policy.events import Arrived, Finished, ReplicaUp
    from policy.parameters import Parameters

UNIT = 1024  # fixed point: this many parts of one
MODELS_MAX = 1024
RATIO_BYTES_MOST = 1 << 22  # usage older than about this many prompt bytes fades


class Quantile(msgspec.Struct, array_like=True, gc=False):
    """An online quantile that forgets: each sample pulls it by a share of itself.

    A sample above pulls up by p of a step, one below pulls down by 1 - p of it, so it rests where
    the share p lies below. Steps shrink from a half to a thirty-second over the first samples.
    """

    value: int = 0
    """In units of 1/1024."""
    count: int = 0

    def add(self, sample: int, permille: int) -> None:
        value = self.value
        count = self.count
        if not count:
            self.value = sample * UNIT
            self.count = 1
            return
        if count < 64:
            self.count = count + 1
            step = (value >> (1 + count // 16)) + UNIT
        else:
            step = (value >> 5) + UNIT
        # Never past the sample: a far outlier must not be overtaken by a long stride.
        target = sample * UNIT
        if target > value:
            value += step * permille // 1000
            self.value = value if value < target else target
        else:
            value -= step * (1000 - permille) // 1000
            self.value = value if value > target else target


class Ratio(msgspec.Struct, array_like=True, gc=False):
    """Prompt tokens per byte, from sums in which old usage fades."""

    tokens: int
    bytes: int

    def add(self, tokens: int, prompt_bytes: int) -> None:
        self.tokens += tokens
        self.bytes += prompt_bytes
        if self.bytes > RATIO_BYTES_MOST:
            self.tokens = self.tokens + 1 >> 1
            self.bytes = self.bytes + 1 >> 1


class ComplexityState(msgspec.Struct, array_like=True):
    """The estimates in canonical form."""

    users: tuple[list[tuple[str, Quantile]], list[tuple[str, Quantile]]]
    lines: tuple[list[tuple[str, Quantile]], list[tuple[str, Quantile]]]
    classes: tuple[list[tuple[str, Quantile]], list[tuple[str, Quantile]]]
    ratios: tuple[list[tuple[str, Ratio]], list[tuple[str, Ratio]]]


class Complexity:
    """Tokens and FLOPs that a request is expected to take."""

    __slots__ = (
        "_classes", "_default", "_first", "_least", "_lines", "_permille", "_ratios", "_users",
    )  # fmt: skip

    def __init__(self, parameters: Parameters) -> None:
        estimates = parameters.estimates
        keys_max = parameters.history.keys_max
        self._default = estimates.output_tokens
        self._least = estimates.least_samples
        self._permille = estimates.output_quantile_permille
        self._users = Bounded(keys_max, Quantile)
        self._lines = Bounded(keys_max, Quantile)
        self._classes = Bounded(keys_max, Quantile)
        # The first guess weighs as much as one prompt of 4,000 tokens.
        first_bytes = 4 * estimates.bytes_per_token_milli
        self._ratios = Bounded(MODELS_MAX, lambda: Ratio(4000, first_bytes))
        self._first = Ratio(4000, first_bytes)

    def prompt_tokens(self, model: str, prompt_bytes: int) -> int:
        ratio = self._ratios.get(model) or self._first
        return prompt_bytes * ratio.tokens // ratio.bytes

    def output_tokens(self, event: Arrived, sla: str) -> int:
        """By this user's past answers, else this business line's, else those without a line."""
        if event.endpoint == "embeddings":
            return 0
        least = self._least
        found = self._users.get(event.user) if event.user else None
        if found is None or found.count < least:
            found = self._lines.get(event.line) if event.line else None
            if found is None or found.count < least:
                found = self._classes.get(sla)
        expected = self._default
        if found is not None and found.count >= least:
            expected = found.value // UNIT
        if event.max_tokens and event.max_tokens < expected:
            return event.max_tokens
        return expected or 1

    def observe(self, event: Arrived, sla: str, usage: Finished) -> None:
        """Learn from a finished request."""
        if event.prompt_bytes and usage.prompt_tokens:
            model = event.model
            ratio = self._ratios.young.get(model) or self._ratios.use(model)
            ratio.add(usage.prompt_tokens, event.prompt_bytes)
        if event.endpoint == "embeddings":
            return
        tokens = usage.output_tokens
        permille = self._permille
        user, line = event.user, event.line
        if user:
            (self._users.young.get(user) or self._users.use(user)).add(tokens, permille)
        if line:
            (self._lines.young.get(line) or self._lines.use(line)).add(tokens, permille)
        else:
            self._classes.use(sla).add(tokens, permille)

    def state(self) -> ComplexityState:
        return ComplexityState(
            self._users.state(), self._lines.state(), self._classes.state(), self._ratios.state()
        )

    def load(self, state: ComplexityState) -> None:
        self._users.load(state.users)
        self._lines.load(state.lines)
        self._classes.load(state.classes)
        self._ratios.load(state.ratios)


def flops(spec: ReplicaUp, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """What the request costs on a replica, from what the replica says of itself."""
    return request_flops(
        spec.active_params,
        spec.attention_flops_per_token_pair,
        prompt_tokens - cached_tokens,
        output_tokens,
        cached_tokens,
    )
