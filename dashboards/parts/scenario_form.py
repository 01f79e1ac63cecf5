"""The form of the scenario that all pages share: trace, fleet, policies, faults, service levels.

The widgets hold their values under names of their own; what the URL brings is put into them before
they are drawn.
"""

from __future__ import annotations

from typing import Any

import msgspec
import streamlit as st

from dashboards import shelf as uploads
from dashboards import state
from dashboards.parts.plain import complain, plain_text
from dashboards.scenario import (
    KINDS_MOST,
    POLICIES_MOST,
    Kind,
    Scenario,
    ScenarioError,
    check,
    command,
)
from dashboards.state import t
from policy.files import FileError, profile_names
from traces import TraceError
from twin.faults import FAULT_KINDS, FaultError, parse_fault

_LASTS = {
    "gpu_lost": "back_s", "ecc_uncorrectable": "reset_s", "xid": "reset_s",
    "engine_killed": "restart_s",
}  # fmt: skip
"""The field that says how long, where it is not ``for_s``."""
_SIZES: dict[str, tuple[str, Any]] = {
    "slow_card": ("factor_permille", 2000), "network": ("delay_ms", 50.0),
    "bad_weights": ("shift_permille", 500), "traffic_spike": ("factor_permille", 2000),
    "retry_storm": ("attempts", 3), "cold_start": ("factor_permille", 2000),
    "oom_long_prompt": ("tokens_from", 4000), "xid": ("code", 79),
}  # fmt: skip
"""The field that says how bad, and what is usual."""
NOWHERE = ("traffic_spike", "retry_storm", "cold_start")
NEEDS_CARDS = ("overheating", "pcie_load")
"""Faults that a replay has no cards for."""


def scenario_form(*, anew: bool) -> None:
    """Draw it; the scenario of the session is what it says afterwards.

    Args:
        anew: put the session's scenario into the widgets first.
    """
    now = state.scenario()
    if anew or "form_trace" not in st.session_state:
        _fill(now)
    st.subheader(t("form.title"))
    place = st.container()
    _upload_trace()  # first, since what it brings is chosen at once
    traces = state.shelf().traces()
    if st.session_state.form_trace not in traces:
        traces.append(st.session_state.form_trace)
    place.selectbox(t("form.trace"), traces, key="form_trace", format_func=uploads.label)
    _fleet()
    place = st.container()
    _upload_policy()
    policies = state.shelf().policies()
    policies += [name for name in st.session_state.form_policies if name not in policies]
    place.multiselect(
        t("form.policies"), policies, key="form_policies", max_selections=POLICIES_MOST,
        format_func=uploads.label, help=t("form.policies_help"),
        placeholder=", ".join(Scenario().policies),
    )  # fmt: skip
    _faults()
    with st.expander(t("form.more")):
        st.text_input(t("form.slo"), key="form_slo", help=t("form.slo_help"))
        st.number_input(t("form.scale"), 0.01, 1000.0, key="form_scale", step=0.1)
        st.number_input(t("form.speed"), 0.01, 1000.0, key="form_speed", step=0.1)
        st.number_input(t("form.scale_lengths"), 0.01, 1000.0, key="form_scale_lengths", step=0.1)
        st.number_input(
            t("form.assume_output"), 0, 1_000_000, key="form_assume_output", step=16,
            help=t("form.assume_output_help"),
        )  # fmt: skip
        st.number_input(t("form.seed"), 0, 1 << 32, key="form_seed", step=1)
    new = _read()
    if new != now:
        # No run anew: what was clicked together with it would be forgotten.
        state.set_scenario(new)
        state.write_url()
    try:
        check(new, state.shelf().path_of)
    except ScenarioError as error:
        complain(error)
    else:
        with st.expander(t("form.command")):
            st.code(command(new, state.shelf().path_of), language="bash", wrap_lines=True)


def _fill(scenario: Scenario) -> None:
    form: dict[str, Any] = msgspec.structs.asdict(scenario)
    fleet = form.pop("fleet")
    form |= {"policies": list(form["policies"]), "faults": list(form["faults"])}
    for name, value in form.items():
        st.session_state[f"form_{name}"] = value
    st.session_state.form_kinds = len(fleet)
    for place, kind in enumerate(fleet):
        st.session_state[f"form_profile_{place}"] = kind.profile
        st.session_state[f"form_replicas_{place}"] = kind.replicas


def _read() -> Scenario:
    form = st.session_state
    fleet = tuple(
        Kind(form[f"form_profile_{place}"], int(form[f"form_replicas_{place}"]))
        for place in range(form.form_kinds)
    )
    names = set(Scenario.__struct_fields__) - {"fleet", "policies", "faults"}
    return Scenario(
        fleet=fleet,
        policies=tuple(form.form_policies) or Scenario().policies,
        faults=tuple(form.form_faults),
        **{name: form[f"form_{name}"] for name in names},
    )


def _fleet() -> None:
    form = st.session_state
    known = list(profile_names())
    for place in range(form.form_kinds):
        form.setdefault(f"form_profile_{place}", known[0])
        form.setdefault(f"form_replicas_{place}", 1)
        options = known if form[f"form_profile_{place}"] in known else [
            *known, form[f"form_profile_{place}"],
        ]  # fmt: skip
        st.selectbox(
            t("form.profile"), options, key=f"form_profile_{place}", accept_new_options=True,
            help=t("form.profile_help"),
            label_visibility="collapsed" if place else "visible",
        )  # fmt: skip
        st.number_input(
            t("form.replicas"), 1, 1000, key=f"form_replicas_{place}",
            label_visibility="collapsed" if place else "visible",
        )  # fmt: skip

    def more(by: int) -> None:
        form.form_kinds += by

    left, right = st.columns(2)
    left.button(
        t("form.add_kind"), on_click=more, args=(1,), disabled=form.form_kinds >= KINDS_MOST,
        key="form_add_kind", width="stretch",
    )  # fmt: skip
    right.button(
        t("form.drop_kind"), on_click=more, args=(-1,), disabled=form.form_kinds < 2,
        key="form_drop_kind", width="stretch",
    )  # fmt: skip


def _faults() -> None:
    form = st.session_state
    if form.form_faults:
        st.multiselect(t("form.faults"), list(form.form_faults), key="form_faults")
    with st.popover(t("form.add_fault"), width="stretch"):
        kinds = [kind for kind in FAULT_KINDS if kind not in NEEDS_CARDS]
        kind = st.selectbox(t("form.fault_kind"), kinds, key="fault_kind")
        st.number_input(t("form.fault_at"), 0.0, 1e7, 60.0, key="fault_at", step=10.0)
        if kind not in NOWHERE:
            st.text_input(t("form.fault_on"), "0", key="fault_on", help=t("form.fault_on_help"))
        st.number_input(t("form.fault_lasts"), 0.0, 1e7, 60.0, key="fault_lasts", step=10.0,
                        help=t("form.fault_lasts_help"))  # fmt: skip
        if kind in _SIZES:
            name, usual = _SIZES[kind]
            st.number_input(name, value=usual, key=f"fault_size_{kind}")
        wrong = form.get("fault_wrong", "")
        st.button(t("form.fault_put"), on_click=_put_fault, type="primary", width="stretch",
                  key="fault_put")  # fmt: skip
        if wrong:
            complain(wrong)


def _put_fault() -> None:
    """Of the fields; as a callback, since the list is a widget's too."""
    form = st.session_state
    kind = form.fault_kind
    parts: dict[str, Any] = {"kind": kind, "at_s": form.fault_at}
    if kind not in NOWHERE:
        where = str(form.fault_on).strip()
        parts["on"] = int(where) if where.isdecimal() else f"'{where}'"
    if form.fault_lasts:
        parts[_LASTS.get(kind, "for_s")] = form.fault_lasts
    if kind in _SIZES:
        parts[_SIZES[kind][0]] = form[f"fault_size_{kind}"]
    shown = (
        f"{name}: {repr(value).removesuffix('.0') if isinstance(value, float) else value}"
        for name, value in parts.items()
    )
    text = "{" + ", ".join(shown) + "}"
    try:
        parse_fault(text)
    except FaultError as error:
        form.fault_wrong = str(error)
    else:
        form.fault_wrong = ""
        form.form_faults = [*form.form_faults, text]


def _upload_trace() -> None:
    with st.popover(t("form.upload_trace"), width="stretch"):
        given = st.file_uploader(t("form.upload_trace_what"), key="upload_trace")
        if given is None or st.session_state.get("uploaded") == given.file_id:
            return
        if st.session_state.get("upload_wrong", ("", ""))[0] == given.file_id:
            complain(st.session_state.upload_wrong[1])
            return
        try:
            with st.spinner(t("form.reading")):
                kept = state.shelf().add_trace(given.name, given.getvalue())
        except TraceError as error:
            st.session_state.upload_wrong = given.file_id, str(error)  # so it is read once
            complain(error)
            return
        st.session_state.uploaded = given.file_id
        st.session_state.form_trace = kept.name
        if kept.note:
            st.warning(plain_text(kept.note))


def _upload_policy() -> None:
    with st.popover(t("form.upload_policy"), width="stretch"):
        given = st.file_uploader(t("form.upload_policy_what"), type=["yaml", "yml"],
                                 key="upload_policy")  # fmt: skip
        if given is None or st.session_state.get("uploaded_policy") == given.file_id:
            return
        try:
            text = given.getvalue().decode("utf-8")
            kept = state.shelf().add_policy(given.name, text)
        except (FileError, UnicodeDecodeError) as error:
            complain(error)
            return
        st.session_state.uploaded_policy = given.file_id
        st.info(t("form.policy_kept", name=uploads.label(kept.name)))
