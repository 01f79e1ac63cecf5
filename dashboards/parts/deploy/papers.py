"""What is to be deployed: a policy with its evidence, from a validation or from uploaded files."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import streamlit as st

from dashboards import state
from dashboards.parts.live.html import Html, badge, joined, muted, table
from dashboards.parts.live.tables import HASH_SHOWN, span
from dashboards.parts.plain import complain
from dashboards.state import said, t
from policy.evidence import (
    AGE_S_MOST,
    KEY_BYTES,
    EvidenceError,
    decode,
    key_of,
    refusals,
    signed,
)
from policy.files import FileError, code_hash, parse_policy
from policy.parameters import policy_hash
from twin.validate.cli import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.admin.status import Status
    from dashboards.jobs import Job
    from policy.evidence import Evidence, Figure, Gate
    from policy.parameters import Parameters

POLICY, EVIDENCE, LOG = "policy.yaml", "evidence.json", "evidence.log"
ANY_KEY = bytes(KEY_BYTES)
"""Stands for the deploy key where it is not here, so that all else can be checked."""
FIGURES_MOST = 6


class Papers(NamedTuple):
    """Files that belong together."""

    policy: str
    evidence: bytes = b""
    log: bytes = b""


class Read(NamedTuple):
    """What they hold."""

    papers: Papers
    parameters: Parameters
    evidence: Evidence | None


def choose() -> Read | None:
    """Widgets to choose them; None: nothing that can be read is chosen."""
    jobs = [job for job in state.jobs().recent("validate") if job.state == "done"]
    ways = {"validated": t("deploy.validated"), "upload": t("deploy.upload")}
    way = st.segmented_control(
        t("deploy.from"), list(ways), default="validated" if jobs else "upload",
        key="deploy_from", format_func=ways.__getitem__,
    )  # fmt: skip
    papers = _of_job(jobs) if way == "validated" else _uploaded()
    if papers is None:
        return None
    try:
        return read(papers)
    except (FileError, EvidenceError) as error:
        complain(error)
        return None


def read(papers: Papers) -> Read:
    """
    Raises:
        FileError: the policy is none.
        EvidenceError: the evidence is none.
    """
    parameters = parse_policy(papers.policy, POLICY)
    evidence = decode(papers.evidence, EVIDENCE) if papers.evidence else None
    return Read(papers, parameters, evidence)


def _of_job(jobs: Sequence[Job]) -> Papers | None:
    if not jobs:
        st.info(t("deploy.no_validated"))
        return None
    by_id = {job.id: job for job in jobs}
    wanted = st.session_state.get("deploy_job")
    names = list(by_id)
    index = names.index(wanted) if wanted in by_id else 0
    number = st.selectbox(
        t("deploy.validation"), names, index, key=f"deploy_validation_{names[index]}",
        format_func=lambda each: _label(by_id[each]),
    )  # fmt: skip
    folder = by_id[number].folder
    try:
        return _files(str(folder), (folder / EVIDENCE).stat().st_mtime)
    except OSError as error:
        st.error(t("deploy.files_gone", why=error.strerror or "", folder=folder))
        return None


@st.cache_data(max_entries=20, show_spinner=False)
def _files(folder: str, written_s: float) -> Papers:
    """Read once; ``written_s`` tells when they changed."""
    there = Path(folder)
    log = there / LOG
    return Papers(
        (there / POLICY).read_text(encoding="utf-8"), (there / EVIDENCE).read_bytes(),
        log.read_bytes() if log.is_file() else b"",
    )  # fmt: skip


def _label(job: Job) -> str:
    when = datetime.fromtimestamp(job.ended_s, UTC).strftime("%m-%d %H:%M UTC")
    try:
        evidence = _evidence_at(str(job.folder), (job.folder / EVIDENCE).stat().st_mtime)
    except (OSError, EvidenceError):
        return f"{when} {job.id}"
    key = "deploy.holds" if evidence.holds else "deploy.holds_not"
    return f"{when} {evidence.name} ({evidence.policy_hash[:HASH_SHOWN]}): {t(key)}"


@st.cache_data(max_entries=50, show_spinner=False)
def _evidence_at(folder: str, written_s: float) -> Evidence:
    return decode((Path(folder) / EVIDENCE).read_bytes(), EVIDENCE)


def _uploaded() -> Papers | None:
    columns = st.columns(3)
    given = [
        column.file_uploader(t(f"deploy.file_{name}"), type=kinds, key=f"deploy_file_{name}")
        for column, name, kinds in zip(
            columns, ("policy", "evidence", "log"), (["yaml", "yml"], ["json"], ["log"]),
            strict=True,
        )
    ]  # fmt: skip
    policy, evidence, log = (None if each is None else each.getvalue() for each in given)
    if policy is None:
        st.caption(t("deploy.upload_help"))
        return None
    try:
        text = policy.decode("utf-8")
    except UnicodeDecodeError as error:
        st.error(t("deploy.no_text", at=error.start))
        return None
    return Papers(text, evidence or b"", log or b"")


# What speaks against it


def reasons(papers: Read, status: Status | None) -> list[str]:
    """What will keep the controller from accepting them, as far as it can be told here."""
    evidence = papers.evidence
    if evidence is None:
        return [t("deploy.no_evidence")]
    key, known = _key()
    checked = evidence
    if not known and evidence.signature:
        checked = signed(evidence, key)
    live = evidence.against if status is None else status.policy.hash
    found = refusals(
        checked, key=key, policy_hash=policy_hash(papers.parameters), live_hash=live,
        code_hash=code_hash(), now_s=time.time(),
    )  # fmt: skip
    if not papers.papers.log:
        found.append(t("deploy.no_log"))
    return found


def _key() -> tuple[bytes, bool]:
    """The deploy key, where the app was started with it."""
    path = os.environ.get(KEY_VARIABLE, "")
    try:
        return key_of(Path(path).read_text(encoding="utf-8"), path), True
    except (OSError, UnicodeDecodeError, EvidenceError):
        return ANY_KEY, False


# How it is shown


def summary(read_: Read) -> Html:
    """What it is, in a line."""
    evidence = read_.evidence
    name = f"{read_.parameters.name} ({policy_hash(read_.parameters)[:HASH_SHOWN]})"
    if evidence is None:
        return joined([name, badge(t("deploy.without_evidence"), "--failed")], " &nbsp; ")
    age_s = time.time() - evidence.made_s
    holds, fresh, signature = evidence.holds, age_s <= AGE_S_MOST, bool(evidence.signature)
    parts: list[object] = [
        name,
        badge(
            t("deploy.holds" if holds else "deploy.holds_not"), "--good" if holds else "--failed"
        ),
        badge(t("deploy.signed" if signature else "deploy.unsigned"),
              "--good" if signature else "--failed"),
        badge(t("deploy.age", time=span(max(0.0, age_s)), most=span(AGE_S_MOST)),
              "--good" if fresh else "--failed"),
        t("deploy.against", name=evidence.against_name, hash=evidence.against[:HASH_SHOWN]),
    ]  # fmt: skip
    if evidence.quick:
        parts.append(badge(t("deploy.quick"), "--late"))
    return joined(parts, " &nbsp; ")


def gate_table(gates: Sequence[Gate]) -> Html:
    """Each gate, whether it holds, why, and by which figures; those that fail first."""
    rows = [
        [
            said(gate.name.replace("_", " ")),
            badge(t("deploy.gate_holds"), "--good") if gate.holds
            else badge(t("deploy.gate_fails"), "--failed"),
            gate.why,
            joined([_figure(each) for each in gate.figures[:FIGURES_MOST]], "<br>"),
        ]
        for gate in sorted(gates, key=lambda gate: gate.holds)
    ]  # fmt: skip
    head = [t("deploy.gate"), t("deploy.verdict"), t("live.why"), t("live.figures")]
    return table(head, rows)


def figure_table(figures: Sequence[Figure]) -> Html:
    rows = [
        [each.name, number(each.value, each.unit), interval(each), said(each.kind)]
        for each in figures
    ]
    head = [t("deploy.figure"), t("live.value"), t("deploy.interval"), t("deploy.kind")]
    return table(head, rows, (1, 2))


def expected_text(evidence: Evidence) -> str:
    """What the canary should show, said before it begins."""
    expected = evidence.expected
    effect = expected.effect
    return t(
        "deploy.expected", effect=number(effect.value, effect.unit), interval=interval(effect),
        sample=expected.sample_size, share=f"{expected.share_permille / 10:g}",
        budget=expected.hurt_budget,
    )  # fmt: skip


def _figure(figure: Figure) -> Html:
    text = f"{figure.name} {number(figure.value, figure.unit)} {interval(figure)}"
    return muted(text)


def number(value: float, unit: str = "") -> str:
    return f"{value:.4g} {unit}".rstrip()


def interval(figure: Figure) -> str:
    return f"{figure.low:.4g} .. {figure.high:.4g}"
