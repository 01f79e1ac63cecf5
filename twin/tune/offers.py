"""What of a policy people may want to tune: each key with its unit, what it does, its bounds, and a
range around the parent's value to begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec import inspect as types

from twin.tune.space import described

if TYPE_CHECKING:
    from policy.parameters import Parameters

FACTOR = 2.0
"""A range goes from the parent's value divided by it to the value times it."""
FROM_ZERO = 100.0
"""The upper end of a range whose parent is 0, which has no double; less where the schema says."""
UNITS = {
    "ms": "ms", "s": "s", "permille": "‰", "milli": "1/1000", "tflop": "TFLOP",
    "tokens": "tokens", "per_s": "/s", "requests": "requests",
}  # fmt: skip
"""By the end of a key."""
GROUPS: dict[str, tuple[str, ...]] = {
    "queue": (
        "tiers.turbo_max_tflop", "tiers.stable_max_tflop", "tiers.lend_wait_ms",
        "inflight.sequences_permille", "inflight.kv_permille", "inflight.prefill_steps_milli",
        "shedding.enabled",
    ),
    "shares": (
        "tiers.stable_least_permille", "tiers.batch_least_permille",
        "tiers.lent_least_permille", "tiers.lend_from_permille", "tiers.aging_ms",
    ),
    "long_prompts": (
        "inflight.prefill_steps_milli", "inflight.long_prefill_tokens",
        "inflight.long_prefill_cap_tokens",
    ),
    "placement": (
        "placement.memory_weight_permille", "placement.bandwidth_weight_permille",
        "placement.switch_weight_permille", "placement.affinity_weight_permille",
    ),
    "limits": (
        "limits.user_per_s", "limits.user_in_flight_most", "limits.order", "limits.half_life_s",
    ),
}  # fmt: skip
"""Keys that belong together, the usual ones first."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A key that can be tuned."""

    key: str
    value: Any
    """The parent's."""
    kind: Literal["int", "float", "choice"]
    about: str
    """What the policy's schema says of it."""
    least: float | None = None
    most: float | None = None
    """Bounds of the schema; None: it has none."""
    low: float = 0
    high: float = 0
    log: bool = False
    choices: tuple[Any, ...] = ()
    """All values, of one that is no number."""

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def unit(self) -> str:
        """Empty: a count, a word."""
        last = self.key.rpartition(".")[2]
        found = [end for end in UNITS if last == end or last.endswith(f"_{end}")]
        return UNITS[max(found, key=len)] if found and self.kind != "choice" else ""


def offers_of(parent: Parameters) -> dict[str, Offer]:
    """By key, in the policy file's order. Keys that hold texts and lists are not among them: what
    else they could be, only their author knows."""
    found = (_offer(*each) for each in described(parent))
    return {offer.key: offer for offer in found if offer is not None}


def _offer(key: str, kind: types.Type, value: Any, about: str) -> Offer | None:
    if isinstance(kind, types.BoolType):
        return Offer(key, value, "choice", about, choices=(True, False))
    if isinstance(kind, types.LiteralType):
        return Offer(key, value, "choice", about, choices=tuple(kind.values))
    if not isinstance(kind, types.IntType | types.FloatType):
        return None
    whole = isinstance(kind, types.IntType)
    low, high = (value / FACTOR, value * FACTOR) if value > 0 else (min(value, 0), FROM_ZERO)
    if whole:
        low, high = int(low), int(-(-high // 1))
    low = low if kind.ge is None else max(low, kind.ge)
    high = high if kind.le is None else min(high, kind.le)
    log = value > 0 and low > 0
    return Offer(
        key, value, "int" if whole else "float", about, kind.ge, kind.le, low, high, log
    )  # fmt: skip
