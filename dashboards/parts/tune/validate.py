"""Evidence about a policy: gathered here, shown as gates, and sent to the page Deploy."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards import state
from dashboards.parts.job_panel import job_panel
from dashboards.parts.plain import complain, plain_text
from dashboards.shelf import label
from dashboards.state import said, t
from dashboards.work.validate import EVIDENCE
from policy.evidence import AGE_S_MOST, EvidenceError, decode
from policy.files import FileError, load_policy
from policy.parameters import policy_hash
from traces import TraceError
from twin.validate.cli import KEY_VARIABLE

if TYPE_CHECKING:
    from dashboards.jobs import Job
    from policy.evidence import Evidence, Figure

KEPT = "tune_validate"


def validate_panel(policy: str, against: str) -> None:
    """What it is compared with and how long, the run, the gates.

    Args:
        policy: the candidate.
        against: the usual one to compare with.
    """
    kept: dict[str, Any] = st.session_state.setdefault(KEPT, {"quick": True, "against": ""})
    names = [name for name in dict.fromkeys([against, *state.shelf().policies()]) if name]
    left, right = st.columns(2, vertical_alignment="bottom")
    start = kept["against"] if kept["against"] in names else against
    kept["against"] = left.selectbox(
        t("tune.against"), names, index=names.index(start), key=f"validate_against_{against}",
        format_func=label, help=t("tune.against_help"),
    )  # fmt: skip
    lengths = [True, False]
    kept["quick"] = right.radio(
        t("tune.length"), lengths, index=lengths.index(kept["quick"]), key="validate_quick",
        horizontal=True, help=t("tune.length_help"),
        format_func=lambda quick: t("tune.quick" if quick else "tune.full"),
    )  # fmt: skip
    wrong = _same(policy, kept["against"])
    if wrong:
        st.info(plain_text(wrong))
    request = request_of(policy, kept["against"], quick=kept["quick"])
    if not request["signed"]:
        st.caption(t("tune.unsigned", variable=KEY_VARIABLE))
    st.caption(t("tune.what_counts"))
    job = job_panel("validate", request, label=t("tune.validate"), key="validate")
    with st.expander(t("tune.command")):
        st.code(command(request), language="bash", wrap_lines=True)
    if job is not None:
        gates(job)


def request_of(policy: str, against: str, *, quick: bool) -> dict[str, Any]:
    """Of the job ``validate``, on the scenario's trace and fleet."""
    scenario = state.scenario()
    return {
        "policy": policy, "against": against, "traces": [scenario.trace],
        "fleet": [[kind.profile, kind.replicas] for kind in scenario.fleet], "quick": quick,
        "seeds": 0, "signed": _key_print(), "jobs": 0, "trace_s": 0.0,
    }  # fmt: skip


def _key_print() -> str:
    """Tells the deploy key that signs from another one; empty: nothing signs."""
    path = os.environ.get(KEY_VARIABLE, "")
    return sha256(Path(path).read_bytes()).hexdigest()[:8] if path else ""


def command(request: dict[str, Any]) -> str:
    """What does the same in a terminal."""
    path_of = state.shelf().path_of
    words = ["twinkeel", "validate", str(path_of(request["policy"]))]
    words += ["--against", str(path_of(request["against"]))]
    for name in request["traces"]:
        words += ["--trace", str(path_of(name))]
    for name, count in request["fleet"]:
        words += ["--profile", name, "--replicas", str(count)]
    words += ["--quick"] if request["quick"] else []
    words += ["--key", os.environ[KEY_VARIABLE]] if request["signed"] else []
    return shlex.join(words)


def gates(job: Job) -> None:
    """What the evidence says, and the way to deploy it."""
    try:
        evidence = _evidence(str(job.folder / EVIDENCE), job.ended_s)
    except (OSError, EvidenceError) as error:
        complain(error)
        return
    with st.container(key="gates"):
        failing = [gate for gate in evidence.gates if not gate.holds]
        if evidence.holds:
            st.success(t("tune.all_hold", n=len(evidence.gates)), icon=":material/verified:")
        else:
            st.error(t("tune.some_fail", n=len(failing)), icon=":material/block:")
        made = datetime.fromtimestamp(evidence.made_s, UTC)
        signed = t("tune.is_signed" if evidence.signature else "tune.is_unsigned")
        st.caption(
            t(
                "tune.evidence_of", name=evidence.name, against=evidence.against_name,
                at=f"{made:%Y-%m-%d %H:%M} UTC", seeds=len(evidence.seeds), signed=signed,
            )
        )  # fmt: skip
        if evidence.quick:
            st.caption(t("tune.was_quick"))
        if datetime.now(UTC).timestamp() - evidence.made_s > AGE_S_MOST:
            _old(job)
        _gate_table(evidence)
        _expected(evidence)
        with st.expander(t("tune.all_figures")):
            _figures(evidence)
    _send(job)


def _old(job: Job) -> None:
    """It can be gathered once more: by the same request, so under the same name."""
    st.warning(t("tune.too_old"))
    if st.button(t("tune.validate_again"), key="validate_again", icon=":material/refresh:"):
        state.jobs().start("validate", job.request, again=True)
        st.rerun()


def _send(job: Job) -> None:
    st.caption(t("tune.send_help"))
    left, middle, _ = st.columns(3)
    if left.button(
        t("tune.send"), key="send_to_deploy", type="primary", width="stretch",
        icon=":material/rocket_launch:",
    ):  # fmt: skip
        st.session_state["deploy_job"] = job.id
        st.switch_page("app_pages/deploy.py")
    middle.download_button(
        t("tune.get_evidence"), (job.folder / EVIDENCE).read_bytes(), "evidence.json",
        width="stretch", key="get_evidence",
    )  # fmt: skip


def _gate_table(evidence: Evidence) -> None:
    ordered = sorted(evidence.gates, key=lambda gate: gate.holds)
    rows = {
        t("tune.gate"): [said(gate.name.replace("_", " ")) for gate in ordered],
        t("tune.verdict"): [
            f":green-badge[:material/check: {t('tune.holds')}]" if gate.holds
            else f":red-badge[:material/close: {t('tune.fails')}]"
            for gate in ordered
        ],
        t("tune.why"): [gate.why.replace("|", "\\|") for gate in ordered],
    }  # fmt: skip
    import pandas as pd

    frame = pd.DataFrame(rows)
    st.table(frame.set_index(t("tune.gate")), border="horizontal")


def _expected(evidence: Evidence) -> None:
    expected = evidence.expected
    effect = expected.effect
    points = [100 * value for value in (effect.value, effect.low, effect.high)]
    st.markdown(t("tune.expected"), help=t("tune.expected_help"))
    st.caption(
        t(
            "tune.expected_text", value=f"{points[0]:+.2f}", low=f"{points[1]:+.2f}",
            high=f"{points[2]:+.2f}", share=f"{expected.share_permille / 10:g}",
            size=f"{expected.sample_size:,}", budget=f"{expected.hurt_budget:,}",
        )
    )  # fmt: skip
    band = "; ".join(f"{one.figure} {one.low:.3g} .. {one.high:.3g}" for one in expected.band)
    if band:
        st.caption(t("tune.band", band=band, window=expected.window_s))


def _figures(evidence: Evidence) -> None:
    rows = [
        _row(gate.name.replace("_", " "), figure)
        for gate in evidence.gates for figure in gate.figures
    ] + [_row("", figure) for figure in evidence.figures]  # fmt: skip
    st.dataframe(rows, hide_index=True, width="stretch", key="validate_figures")


def _row(gate: str, figure: Figure) -> dict[str, Any]:
    shown = "" if figure.low == figure.high else f"{figure.low:.4g} … {figure.high:.4g}"
    return {
        t("tune.gate"): said(gate),
        t("tune.figure"): figure.name,
        t("tune.value"): f"{figure.value:.4g} {figure.unit}".strip(),
        t("tune.interval"): shown,
        t("tune.kind"): said(figure.kind),
    }


def _same(policy: str, against: str) -> str:
    """A sentence where both say the same, or one cannot be read."""
    try:
        path_of = state.shelf().path_of
        ours, theirs = (policy_hash(load_policy(path_of(name))) for name in (policy, against))
    except (FileError, TraceError) as error:
        return str(error)
    return t("tune.same_policy") if ours == theirs else ""


@st.cache_data(max_entries=50, show_spinner=False)
def _evidence(path: str, ended_s: float) -> Evidence:
    return decode(Path(path).read_bytes(), path)
