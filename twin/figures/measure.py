"""What a scenario asks to be measured, beyond what always is."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from traces.generate.lengths import NonNegative, Positive  # noqa: TC001 - msgspec reads them


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requests that arrive in a stretch of time, such as a ramp."""

    from_s: NonNegative
    to_s: Positive

    def __post_init__(self) -> None:
        if self.to_s <= self.from_s:
            raise ValueError(f"to_s {self.to_s:g} must lie after from_s {self.from_s:g}")


class Above(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For how long the windows' 99th percentile of TTFT lies above a limit."""

    group: Annotated[str, Meta(pattern=r"^(all|by_class\..+|by_line\..+)$")]
    """``all``, ``by_class.P0`` or ``by_line.NAME``."""
    limit_s: Positive


class Measure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules by which figures are made."""

    ttft_s: dict[str, Positive] = msgspec.field(default_factory=dict)
    """Limit of a good answer by class, instead of P0 1.5, P1 4, P2 10, other 4."""
    tpot_s: Positive = 0.1
    """Limit of a good answer, per output token after the first."""
    window_s: Positive = 10.0
    """Length of the windows in which percentiles are compared."""
    window_least: Annotated[int, Meta(ge=1)] = 20
    """Answers that a window needs to count."""
    useful_degraded: tuple[str, ...] = ("cached", "model")
    """Ways of being degraded that still give the caller what was asked for, by their first word:
    ``model NAME`` is an answer of the lighter model NAME."""
    warm_up_s: NonNegative = 0.0
    """Requests that arrive before this are not counted."""
    spans: dict[str, Span] = msgspec.field(default_factory=dict)
    above: dict[str, Above] = msgspec.field(default_factory=dict)


def gives_what_was_asked(why: str, useful_degraded: tuple[str, ...]) -> bool:
    """Is an answer that was degraded in the way ``why`` of use to its caller?"""
    return why in useful_degraded or why.partition(" ")[0] in useful_degraded
