"""What is asked of a tuning, as a form: its values outlive the page, and make the job's request.

Streamlit forgets the widgets of a page that is left; so the form keeps its values beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards import state
from dashboards.parts.plain import complain
from dashboards.scenario import Kind, Scenario
from dashboards.shelf import label
from dashboards.state import t
from policy.files import FileError, load_policy, parse_document
from traces import TraceError
from twin.tune.objectives import TuneError, figure_names, goals_of
from twin.tune.offers import GROUPS, offers_of
from twin.tune.space import Space, parse_space

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator

    from policy.parameters import Parameters
    from twin.tune.offers import Offer

FORM = "tune_form"
SCENARIO_FIELDS = ("trace", "slo", "seed", "speed", "scale", "scale_lengths", "assume_output")
OBJECTIVES = ("goodput", "p0_ttft_p95_s")
CONSTRAINTS = (
    "slo_attainment.P0 >= 0.95", "slo_attainment.P1 >= 0.95", "slo_attainment.P2 >= 0.9",
    "shed_share <= 0.05", "p0_ttft_p95_s <= 1.5",
)  # fmt: skip
"""Such as are often wanted; others can be typed."""
TRIALS_MOST = 2000
WIDTHS = (4.6, 2.2, 2.2, 1.2)
"""Of a parameter's row: its key, from, to, log."""


UNUSABLE = (FileError, TraceError, TuneError)
"""Why what was asked once cannot be asked now."""


def basis_of(scenario: Scenario) -> dict[str, Any]:
    """What of the scenario decides a tuning."""
    return {name: getattr(scenario, name) for name in SCENARIO_FIELDS} | {
        "fleet": [[kind.profile, kind.replicas] for kind in scenario.fleet]
    }


def form() -> dict[str, Any]:
    """The session's. At first what was last asked of this scenario, so that a reload loses nothing;
    else the usual."""
    if FORM not in st.session_state:
        basis = basis_of(state.scenario())
        last = (job.request for job in state.jobs().recent("tune"))
        found = next((asked for asked in last if basis.items() <= asked.items()), None)
        try:
            filled = _usual() if found is None else _of_request(found)
        except UNUSABLE:  # its policy is not kept any more, or has other keys by now
            filled = _usual()
        st.session_state[FORM] = filled
    kept: dict[str, Any] = st.session_state[FORM]
    return kept


def open_job(request: dict[str, Any]) -> None:
    """Show what was asked: in this form, and in the scenario's. As a callback."""
    try:
        asked = _of_request(request)
    except UNUSABLE as error:
        complain(error)
        return
    now = state.scenario()
    state.set_scenario(
        msgspec.structs.replace(
            now, fleet=tuple(Kind(name, count) for name, count in request["fleet"]),
            **{name: request[name] for name in SCENARIO_FIELDS},
        )
    )  # fmt: skip
    st.session_state.pop("form_trace", None)  # the scenario's form is filled anew
    _adopt(asked)


def tune_form(
    left: DeltaGenerator, right: DeltaGenerator
) -> tuple[dict[str, Any], Space | None, str]:
    """Draw it: (the request, the space, what is wrong with it; empty: nothing)."""
    kept = form()
    with left:
        parent = _parent(kept)
        offers = {} if parent is None else offers_of(parent)
        _keys(kept, offers)
        if kept["keys"]:
            heads = st.columns(WIDTHS)
            heads[0].caption(t("tune.head_key"), help=t("tune.head_key_help"))
            heads[1].caption(t("tune.head_low"))
            heads[2].caption(t("tune.head_high"))
            heads[3].caption(t("tune.log"), help=t("tune.log_help"))
        for key in kept["keys"]:
            _range(kept, key, offers)
        for key, given in kept["others"].items():
            st.caption(t("tune.other_key", name=key, given=given))
    with right:
        _goals(kept)
        _budget(kept)
        _files(kept)
    request = _request(kept)
    if parent is None:
        return request, None, ""
    if not request["space"]["space"]:
        return request, None, t("tune.no_keys")
    try:
        space = parse_space(request["space"], "space.yaml", parent)
        goals_of(space.objectives, space.constraints, trace=True)
    except (FileError, TuneError) as error:
        return request, None, str(error)
    if request["trace"] in request["held_out"]:
        return request, None, t("tune.held_is_trace")
    return request, space, ""


def _usual() -> dict[str, Any]:
    return {
        "parent": state.scenario().policies[0], "group": "queue", "keys": list(GROUPS["queue"]),
        "ranges": {}, "others": {}, "objectives": list(OBJECTIVES), "constraints": [],
        "trials": 40, "seeds": 3, "held_seeds": 3, "jobs": 0, "held_out": [],
    }  # fmt: skip


def _of_request(asked: dict[str, Any]) -> dict[str, Any]:
    kept = _usual() | {"parent": asked["policy"]}
    kept |= {name: asked[name] for name in ("trials", "seeds", "held_seeds", "jobs", "held_out")}
    _take_space(kept, asked["space"])
    return kept


def _take_space(kept: dict[str, Any], raw: dict[str, Any]) -> None:
    """What a space file says; what the form has no fields for is kept as it stands.

    Raises:
        FileError: it is none of the parent.
    """
    parent = load_policy(state.shelf().path_of(kept["parent"]))
    offers, space = offers_of(parent), parse_space(raw, "space.yaml", parent)
    kept["keys"], kept["ranges"], kept["others"], kept["group"] = [], {}, {}, None
    for knob in space.knobs:
        offer = offers.get(knob.key)
        if offer is None or offer.kind != knob.kind or (
            knob.kind == "choice" and not set(knob.choices) <= set(offer.choices)
        ):  # fmt: skip
            kept["others"][knob.key] = raw["space"][knob.key]
            continue
        kept["keys"].append(knob.key)
        kept["ranges"][knob.key] = (
            {"choices": list(knob.choices)} if knob.kind == "choice"
            else {"low": knob.low, "high": knob.high, "log": knob.log}
        )  # fmt: skip
    kept["objectives"] = list(space.objectives) or ["goodput"]
    kept["constraints"] = list(space.constraints)


def _adopt(kept: dict[str, Any]) -> None:
    """Show these values: what the widgets hold is forgotten."""
    st.session_state[FORM] = kept
    for name in [name for name in st.session_state if str(name).startswith("tune_f_")]:
        del st.session_state[name]
    for name in ("tune_trials", "tune_keys", "tune_group", "tune_parent"):
        st.session_state.pop(name, None)


def _hold(name: str, value: Any) -> str:
    """The widget's key, with its value put in where Streamlit has forgotten it."""
    if name not in st.session_state:
        st.session_state[name] = value
    return name


def _parent(kept: dict[str, Any]) -> Parameters | None:
    names = list(dict.fromkeys([*state.scenario().policies, *state.shelf().policies()]))
    if kept["parent"] not in names:
        names.append(kept["parent"])

    def other() -> None:
        kept["ranges"] = {}
        _adopt(kept | {"parent": st.session_state.tune_parent})

    kept["parent"] = st.selectbox(
        t("tune.parent"), names, key=_hold("tune_parent", kept["parent"]), format_func=label,
        help=t("tune.parent_help"), on_change=other,
    )  # fmt: skip
    try:
        parent = load_policy(state.shelf().path_of(kept["parent"]))
    except (FileError, TraceError) as error:
        complain(error)
        return None
    if parent.discipline == "fifo":
        st.warning(t("tune.fifo"))
    return parent


def _keys(kept: dict[str, Any], offers: dict[str, Offer]) -> None:
    def chosen() -> None:
        group = st.session_state.tune_group
        if group is not None:
            _adopt(kept | {"keys": list(GROUPS[group]), "group": group})

    st.pills(
        t("tune.groups"), list(GROUPS), key=_hold("tune_group", kept["group"]),
        format_func=lambda name: t(f"tune.group.{name}"), on_change=chosen,
    )  # fmt: skip
    kept["keys"] = [key for key in kept["keys"] if key in offers]
    kept["keys"] = st.multiselect(
        t("tune.keys"), list(offers), key=_hold("tune_keys", kept["keys"]),
        help=t("tune.keys_help"), placeholder=t("tune.keys_find"),
        format_func=lambda key: f"{key} · {offers[key].unit}" if offers[key].unit else key,
    )  # fmt: skip
    with st.popover(t("tune.find"), width="stretch"):
        wanted = st.text_input(t("tune.find_what"), key="tune_f_find").lower().split()
        found = [
            offer for offer in offers.values()
            if wanted and all(word in f"{offer.key} {offer.about}".lower() for word in wanted)
        ]  # fmt: skip
        for offer in found[:20]:
            st.button(
                offer.key, key=f"tune_f_add_{offer.key}", help=offer.about, width="stretch",
                disabled=offer.key in kept["keys"], on_click=_add, args=(kept, offer.key),
            )  # fmt: skip
        if wanted and not found:
            st.caption(t("tune.find_nothing"))


def _add(kept: dict[str, Any], key: str) -> None:
    st.session_state.tune_keys = [*kept["keys"], key]


def _range(kept: dict[str, Any], key: str, offers: dict[str, Offer]) -> None:
    """One key: its range, or its choices."""
    offer = offers[key]
    given = kept["ranges"].get(key, {})
    widths = WIDTHS if offer.kind != "choice" else (WIDTHS[0], sum(WIDTHS[1:]))
    name, low, *rest = st.columns(widths, vertical_alignment="center")
    unit = f" · {offer.unit}" if offer.unit else ""
    name.caption(f"`{key}`{unit}", help=_help(offer))
    if offer.kind == "choice":
        chosen = low.pills(
            key, list(offer.choices), selection_mode="multi", label_visibility="collapsed",
            key=_hold(f"tune_f_of_{key}", given.get("choices", list(offer.choices))),
            format_func=lambda value: str(value).lower(),
        )  # fmt: skip
        kept["ranges"][key] = {"choices": list(chosen)}
        return
    high, log = rest
    whole = offer.kind == "int"
    number = int if whole else float
    bounds: dict[str, Any] = {
        "min_value": None if offer.least is None else number(offer.least),
        "max_value": None if offer.most is None else number(offer.most),
        "step": max(1, offer.value // 20) if whole else offer.value / 20 or 0.1,
        "label_visibility": "collapsed",
    }
    kept["ranges"][key] = {
        "low": low.number_input(
            f"{key} ≥", key=_hold(f"tune_f_low_{key}", number(given.get("low", offer.low))),
            **bounds,
        ),
        "high": high.number_input(
            f"{key} ≤", key=_hold(f"tune_f_high_{key}", number(given.get("high", offer.high))),
            **bounds,
        ),
        "log": log.checkbox(
            t("tune.log"), key=_hold(f"tune_f_log_{key}", given.get("log", offer.log)),
            label_visibility="collapsed",
        ),
    }  # fmt: skip


def _help(offer: Offer) -> str:
    bounds = ""
    if offer.least is not None or offer.most is not None:
        ends = ("" if end is None else f"{end:,}" for end in (offer.least, offer.most))
        bounds = "\n\n" + t("tune.bounds", ends=" .. ".join(ends))
    now = t("tune.now", value=str(offer.value).lower())
    return f"{state.said(offer.about)}{bounds}\n\n{now}"


def _goals(kept: dict[str, Any]) -> None:
    known = figure_names(trace=True)
    known += [name for name in kept["objectives"] if name not in known]
    kept["objectives"] = st.multiselect(
        t("tune.objectives"), known, key=_hold("tune_f_objectives", kept["objectives"]),
        help=t("tune.objectives_help"), accept_new_options=True,
    )  # fmt: skip
    bounds = [*CONSTRAINTS, *(one for one in kept["constraints"] if one not in CONSTRAINTS)]
    kept["constraints"] = st.multiselect(
        t("tune.constraints"), bounds, key=_hold("tune_f_constraints", kept["constraints"]),
        help=t("tune.constraints_help"), accept_new_options=True,
        placeholder=t("tune.constraints_none"),
    )  # fmt: skip


def _budget(kept: dict[str, Any]) -> None:
    left, right = st.columns(2)
    kept["trials"] = left.number_input(
        t("tune.trials"), 1, TRIALS_MOST, key=_hold("tune_trials", kept["trials"]), step=10,
        help=t("tune.trials_help"),
    )  # fmt: skip
    kept["jobs"] = right.number_input(
        t("tune.jobs"), 0, 64, key=_hold("tune_f_jobs", kept["jobs"]), help=t("tune.jobs_help")
    )  # fmt: skip
    with st.popover(t("tune.confirming"), width="stretch"):
        left, right = st.columns(2)
        kept["seeds"] = left.number_input(
            t("tune.seeds"), 1, 100, key=_hold("tune_f_seeds", kept["seeds"]),
            help=t("tune.seeds_help"),
        )  # fmt: skip
        kept["held_seeds"] = right.number_input(
            t("tune.held_seeds"), 1, 100, key=_hold("tune_f_held_seeds", kept["held_seeds"]),
            help=t("tune.held_seeds_help"),
        )  # fmt: skip
        traces = [name for name in state.shelf().traces() if name != state.scenario().trace]
        kept["held_out"] = st.multiselect(
            t("tune.held_out"), traces, help=t("tune.held_out_help"), format_func=label,
            key=_hold("tune_f_held_out", [name for name in kept["held_out"] if name in traces]),
            placeholder=t("tune.held_out_none"),
        )  # fmt: skip


def _files(kept: dict[str, Any]) -> None:
    with st.popover(t("tune.upload"), width="stretch"):
        given = st.file_uploader(t("tune.upload_what"), type=["yaml", "yml"], key="tune_upload")
        if given is None or st.session_state.get("tune_uploaded") == given.file_id:
            return
        try:
            raw = parse_document(given.getvalue().decode("utf-8"), given.name)
            new = dict(kept)
            _take_space(new, raw)
        except (FileError, TraceError, UnicodeDecodeError) as error:
            complain(error)
            return
        st.session_state.tune_uploaded = given.file_id
        _adopt(new)
        st.rerun(scope="app")


def _request(kept: dict[str, Any]) -> dict[str, Any]:
    ranges: dict[str, Any] = {}
    for key in kept["keys"]:
        given = kept["ranges"][key]
        if "choices" in given:
            ranges[key] = given["choices"]
        else:
            ranges[key] = {name: given[name] for name in ("low", "high")}
            if given["log"]:
                ranges[key]["log"] = True
    space = {
        "schema": 1, "objectives": kept["objectives"], "constraints": kept["constraints"],
        "space": ranges | kept["others"],
    }  # fmt: skip
    names = ("trials", "seeds", "held_seeds", "held_out", "jobs")
    return basis_of(state.scenario()) | {
        "policy": kept["parent"],
        "space": space,
        **{name: kept[name] for name in names},
    }
