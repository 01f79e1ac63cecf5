"""What would make an answer wrong: for each question, and for each kind of figure in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

QUESTIONS: dict[str, tuple[str, ...]] = {
    "users": (
        "New users who ask more, longer or at other times than those of the trace: the load is"
        " taken to grow with their number.",
    ),
    "capacity": (
        "New users who ask more, longer or at other times than those of the trace: the load is"
        " taken to grow with their number.",
        "The 99th percentile rests on one request in a hundred: a longer stretch says it better.",
    ),
    "fit": (
        "It is arithmetic, nothing was played: other quantisation, LoRA adapters, a draft model or"
        " CUDA graphs of more batch sizes take memory of their own.",
    ),
    "tp": (
        "The time of an all-reduce comes from public figures: another interconnect, or cards on"
        " two hosts, change the verdict.",
    ),
    "gpu": (
        "The order of two cards whose intervals overlap: calibrate both before buying.",
        "Prices: a contract, an upfront payment or a shortage turns the order round.",
    ),
    "double": (
        "Growth of another kind: here there is more of the same requests, not longer ones or new"
        " ones.",
    ),
    "n+1": (
        "A supervisor that is slower than the 37 s taken here to move to a spare card, or no spare"
        " card at all.",
        "Two cards lost at once, or one lost while another is being replaced.",
    ),
    "cost": (
        "Prices and hours: reserved, spot and idle cards cost otherwise than a flat hour.",
        "The load of the busiest stretch: at night a million good tokens cost more.",
    ),
    "burst": (
        "A burst of another shape: here it lasts a minute at most, at the peak, with the same mix"
        " of requests.",
    ),
    "cold-start": (
        "Another start: what a cold start takes here is the profile's figure, and yours depends on"
        " where the weights lie.",
    ),
    "flag": (
        "Flags are tried one at a time: two of them together may do what none does alone.",
        "A flag moves memory and speed in ways that a profile does not know: try the winner on a"
        " real server.",
    ),
    "shed": (
        "What a request is worth is assumed by class; your business lines may weigh otherwise.",
    ),
    "plan": (
        "Growth of another kind: here there is more of the same requests, not longer ones or new"
        " ones.",
        "A fleet that scales itself: here its size is fixed, and the policy's scaling is off.",
    ),
}
KINDS = {
    "measured": "Measured: in another run, on another day, it may differ by its interval.",
    "fitted": (
        "Fitted: the times come from a profile of one server; another driver, engine version or"
        " host moves all of them."
    ),
    "extrapolated": (
        "Extrapolated: the profile was scaled by public figures and never measured; its real times"
        " may lie a fifth away or more."
    ),
    "estimated": (
        "Estimated: it comes from a formula or an assumed price, and is as good as its inputs."
    ),
}
ONE_DAY = (
    "It rests on the recorded day alone: other days are not in the interval. Ask for more days."
)
TWO_DAYS = (
    "Few days were played, so that the intervals are rough: more days narrow or correct them."
)
SHORT = (
    "The stretch is shorter than a minute: a fleet that starts empty holds too much there. Ask for"
    " more requests."
)
OTHER_TRAFFIC = (
    "Traffic that no recording has: a new customer, a new prompt, another season. No interval"
    " knows of it."
)
FEW_DAYS, MINUTE_S = 3, 60.0


def doubts(
    question: str, document: Mapping[str, Any], facts: Mapping[str, Any] | None
) -> list[str]:
    """In sentences, the nearest first.

    Args:
        question: its name, or ``plan``.
        document: what ``show.document_of`` made of the answer or the plan.
        facts: what it stands on (``Ready.facts``); None: on arithmetic alone.
    """
    return [*dict.fromkeys(_doubts(question, document, facts))]


def _doubts(
    question: str, document: Mapping[str, Any], facts: Mapping[str, Any] | None
) -> Iterator[str]:
    if facts is not None:
        if facts["span_s"] < MINUTE_S:
            yield SHORT
        if facts["draws"] == 1:
            yield ONE_DAY
        elif facts["draws"] < FEW_DAYS:
            yield TWO_DAYS
    yield from QUESTIONS[question]
    seen = kinds(document)
    yield from (text for kind, text in KINDS.items() if kind in seen)
    if facts is not None:
        yield OTHER_TRAFFIC


def kinds(value: Any) -> frozenset[str]:
    """The kinds of all figures in a document."""
    if isinstance(value, dict):
        own = {value["kind"]} if "kind" in value and "low" in value else set()
        return frozenset(own).union(*(kinds(part) for part in value.values()))
    if isinstance(value, list):
        return frozenset().union(*(kinds(part) for part in value))
    return frozenset()
