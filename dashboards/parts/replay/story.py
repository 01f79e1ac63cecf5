"""One request's story: where its time went, why it went where it did, and the same elsewhere."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboards.parts.charts import show_chart
from dashboards.parts.replay.tables import plain_table
from dashboards.state import said, t
from twin.report.figures import NONE, count, duration

NS_PER_S = 1e9


def show_story(told: dict[str, Any], about: dict[str, Any]) -> None:
    """Draw what ``dashboards.work.story`` wrote."""
    policies = told["policies"]
    one = policies[0]["request"]
    st.markdown(f"#### {t('replay.request', number=told['row'])}")
    parts = [
        one["sla_class"] or t("replay.no_class"), one["endpoint"],
        t("replay.prompt_tokens", number=count(one["prompt_tokens"])),
        t("replay.output_tokens", number=count(one["output_tokens"] or 0)),
        t("replay.arrived", at=duration(one["arrival_s"])),
    ]  # fmt: skip
    st.caption(" · ".join(part for part in parts if part))
    plain_table(
        ["", *(policy["label"] for policy in policies)],
        [[t(f"replay.facts.{name}"), *(write(policy) for policy in policies)]
         for name, write in FACTS.items()],
    )  # fmt: skip
    if told["waterfall"] is not None:
        st.markdown(f"**{t('replay.waterfall')}**")
        show_chart(told["waterfall"], "story_waterfall", legend=False)
    if not about["logged"]:
        st.info(t("replay.not_logged", number=count(about["offered"])))
        return
    for tab, policy in zip(st.tabs([policy["label"] for policy in policies]), policies,
                           strict=True):  # fmt: skip
        with tab:
            _lines(policy["story"])


def _lines(story: dict[str, Any] | None) -> None:
    if story is None:
        st.caption(t("replay.not_in_log"))
        return
    if story["scores"]:
        for at_ms, rows in story["scores"]:
            st.markdown(f"**{t('replay.scores', at=duration(at_ms / 1000))}**")
            _scores(rows)
        st.caption(t("replay.scores_what"))
    else:
        st.caption(t("replay.no_scores"))
    st.markdown(f"**{t('replay.what_happened')}**")
    plain_table(
        [t("replay.after"), t("replay.kind"), t("replay.what")],
        [[_ms(at_ms), *_split(text)] for at_ms, text in story["lines"]], left=3,
    )  # fmt: skip
    if story["left_out"]:
        st.caption(t("replay.left_out", number=story["left_out"]))


def _scores(rows: list[dict[str, Any]]) -> None:
    """Durations with their unit, best first as the policy weighed them."""
    if not rows:
        return
    names = [name for name in rows[0] if name != "replica"]
    ordered = sorted(rows, key=lambda row: row.get("score_ns", 0))
    plain_table(
        [said(name.removesuffix("_ns")) for name in names],
        [[_score(name, row[name]) for name in names] for row in ordered], left=2,
    )  # fmt: skip


def _score(name: str, value: Any) -> str:
    if name.endswith("_ns"):
        return duration(value / NS_PER_S) if value >= 0 else NONE
    return said(str(value))


def _split(text: str) -> tuple[str, str]:
    kind, _, what = text.partition(" ")
    return said(kind), what.strip()


def _ms(value: float) -> str:
    return f"{value:+,.3f} ms"


def _seconds(name: str) -> Any:
    def write(policy: dict[str, Any]) -> str:
        value = policy["request"][name]
        return NONE if value is None else duration(value)

    return write


def _outcome(policy: dict[str, Any]) -> str:
    one = policy["request"]
    why = one["degraded_how"] or one["error_kind"]
    why = why or (policy["story"] or {}).get("why", "")
    return said(one["outcome"]) + (f" ({why})" if why else "")


def _text(name: str) -> Any:
    return lambda policy: str(policy["request"][name] or NONE)


FACTS: dict[str, Any] = {
    "outcome": _outcome,
    "tier": _text("tier"),
    "replica": _text("replica"),
    "queue": _seconds("queue_s"),
    "schedule": _seconds("schedule_s"),
    "ttft": _seconds("ttft_s"),
    "e2e": _seconds("e2e_s"),
    "tpot": _seconds("tpot_s"),
    "retries": lambda policy: count(policy["request"]["retries"] or 0),
}
"""Of a request under a policy, in this order."""
