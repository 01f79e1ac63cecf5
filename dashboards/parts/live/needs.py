"""Why a panel is empty: which metric or flag it needs, and what the controller knows of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from controller.upstream.scrape import NEEDED
from dashboards.parts.live.html import Html, table
from dashboards.state import t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.admin.status import Status

STEPS = NEEDED["steps"]


class Need(NamedTuple):
    """What a panel, or a part of it, is drawn from."""

    panel: str
    """Of the dictionary: ``live.panels.PANEL``."""
    what: str
    """The metric's or field's name."""
    since: str
    """The first version of vLLM that is known to have it; empty: the dictionary says more."""
    how: str
    """Of the dictionary: ``live.how.HOW``."""


NEEDS = (
    Need("fleet", NEEDED["running"], "", "always"),
    Need("fleet", NEEDED["waiting"], "", "always"),
    Need("fleet", NEEDED["kv_used_permille"], "0.9.2", "kv"),
    Need("fleet", NEEDED["preemptions"], "", "always"),
    Need("fleet", NEEDED["generation_tokens"], "", "always"),
    Need("fleet", "domain", "", "domain"),
    Need("predicted", STEPS, "0.32", "steps"),
    Need("predicted", "profile", "", "profile"),
    Need("tiers", "metrics.time_to_first_token_ms", "0.27.1", "per_request"),
    Need("hops", "metrics.queue_time_ms", "0.27.1", "per_request"),
    Need("breakers", "-", "", "breakers"),
    Need("confidence", "logprobs", "", "logprobs"),
    Need("verification", "domain", "", "verification"),
)
"""With vLLM 0.32 all of it has been tried. ``vllm:kv_cache_usage_perc`` was
``vllm:gpu_cache_usage_perc`` before 0.9.2."""


def why_empty(panel: str, status: Status) -> list[str]:
    """In sentences, what keeps a panel, or a part of it, empty; none: nothing does."""
    return list(_WHY[panel](status))


def need_table() -> Html:
    """All that the panels are drawn from."""
    rows = [
        [
            t(f"live.panels.{need.panel}"), need.what,
            t("live.since", version=need.since) if need.since else "-", t(f"live.how.{need.how}"),
        ]
        for need in NEEDS
    ]  # fmt: skip
    head = [t("live.panel"), t("live.needs"), t("live.version"), t("live.how_to")]
    return table(head, rows)


def _fleet(status: Status) -> Iterator[str]:
    if not status.replicas:
        yield t("live.empty.no_replica")
        return
    up = [each for each in status.replicas if each.up]
    if not up:
        yield t("live.empty.none_up")
    elif all(each.scraped_ms_ago < 0 for each in up):
        yield t("live.empty.none_scraped")
    for need in NEEDS:
        names = [each.name for each in up if need.what in each.lacks]
        if names and need.what != STEPS:
            how = t(f"live.how.{need.how}")
            yield t("live.empty.lacks", names=", ".join(names), metric=need.what, how=how)
    if any(not each.domain for each in status.replicas):
        yield t("live.empty.no_domain")


def _predicted(status: Status) -> Iterator[str]:
    up = [each for each in status.replicas if each.up]
    if not up:
        yield t("live.empty.none_up")
        return
    silent = [each for each in up if each.drift_permille is None]
    without = [each.name for each in silent if STEPS in each.lacks]
    unread = [each.name for each in silent if STEPS not in each.lacks]
    if without:
        yield t("live.empty.no_steps", names=", ".join(without), metric=STEPS)
    if unread:
        yield t("live.empty.unread_steps", names=", ".join(unread))


def _tiers(status: Status) -> Iterator[str]:
    if not any(tier.calls for tier in status.tiers):
        key = "no_calls" if not status.settled_requests else "no_first_token"
        yield t(f"live.empty.{key}")


def _hops(status: Status) -> Iterator[str]:
    calls = {hop.hop: hop.calls for hop in status.hops}
    if not any(calls.values()):
        yield t("live.empty.no_answers")
    elif not calls.get("prefill", 0):
        yield t("live.empty.no_engine_times")


def _breakers(status: Status) -> Iterator[str]:
    if not status.breakers:
        yield t("live.empty.no_breaker")


def _alerts(status: Status) -> Iterator[str]:
    if not status.alerts:
        yield t("live.empty.no_alert")


def _outcomes(status: Status) -> Iterator[str]:
    if not status.outcomes:
        yield t("live.empty.no_calls")


def _confidence(status: Status) -> Iterator[str]:
    if status.answers is None:
        yield t("live.empty.no_answers_told")
    elif not status.answers.confidence.scored:
        yield t("live.empty.no_score")


def _verification(status: Status) -> Iterator[str]:
    if status.answers is None:
        yield t("live.empty.no_answers_told")
    elif not status.answers.verification:
        yield t("live.empty.no_verification")


_WHY = {
    "fleet": _fleet, "predicted": _predicted, "tiers": _tiers, "hops": _hops,
    "breakers": _breakers, "alerts": _alerts, "outcomes": _outcomes, "confidence": _confidence,
    "verification": _verification,
}  # fmt: skip
