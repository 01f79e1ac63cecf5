"""The widgets of the page: what is promised, of which cards, how careful; and a question's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards import state
from dashboards.parts.what_if.settings import CARE, Settings, keep, known_cards, usual
from dashboards.state import t
from policy.files import load_gpus
from twin.plan.cell import FAULTS
from twin.plan.machines import TP_SIZES, card_name

if TYPE_CHECKING:
    from dashboards.parts.what_if.settings import Standing
    from twin.plan.catalogue import Parameter, Question

GROWTH_MOST = 10.0
LEAST_S, MOST_S = 1e-4, 1e6


def assumptions(own: Settings, now: Standing) -> Settings:
    """Draw them; what they say is kept."""
    with st.expander(t("what_if.assumptions"), key="wi_expander", icon=":material/tune:"):
        promised, fleet, care = st.columns(3, gap="medium")
        with promised:
            fields = _promises(own, now)
        with fleet:
            fields |= _fleet(own, now)
        with care:
            fields |= _care(own, now)
    return _kept(own, fields)


def question_form(question: Question, own: Settings, now: Standing) -> Settings:
    """The question's own parameters, and the fleet that there is."""
    at_first = usual(question, now)
    given = {**at_first, **own.parameters.get(question.name, {})}
    fields: dict[str, Any] = {}
    values: dict[str, Any] = {}
    columns = st.columns(4, gap="medium")
    for place, one in enumerate(question.parameters):
        with columns[place]:
            key = f"wi_{question.name}_{one.name}_{at_first[one.name]}"
            values[one.name] = _parameter(question.name, one, given[one.name], key)
    if question.have:
        with columns[len(question.parameters)]:
            fields["have"] = _have(now, "ask")
    changed = {name: value for name, value in values.items() if value != at_first[name]}
    others = {name: each for name, each in own.parameters.items() if name != question.name}
    fields["parameters"] = others | ({question.name: changed} if changed else {})
    return _kept(own, fields)


def plan_form(own: Settings) -> Settings:
    """Growths and faults of the plan."""
    left, right = st.columns(2, gap="medium")
    with left:
        growths = _several(
            "what_if.growths", "wi_growths", [f"{growth:g}" for growth in own.growths],
            ["1", "1.25", "1.5", "2", "3", "4", "6"], new=True, help=t("what_if.growths_help"),
        )  # fmt: skip
        good = [number for text in growths if (number := _factor(text)) is not None]
        wrong = [text for text in growths if _factor(text) is None]
        if wrong:
            st.error(t("what_if.no_growth", given=", ".join(wrong), most=f"{GROWTH_MOST:g}"))
    with right:
        names = [name for name in FAULTS if name != "none"]
        faults = st.pills(
            t("what_if.faults"), names, selection_mode="multi", wrap=True,
            help=t("what_if.faults_help"),
            format_func=lambda name: t(f"what_if.fault.{name.replace('-', '_')}"),
            key=_seeded("wi_faults", [name for name in own.faults if name in names]),
        )  # fmt: skip
    return _kept(own, {"growths": tuple(sorted(good)) or (1.0,), "faults": tuple(faults)})


def _promises(own: Settings, now: Standing) -> dict[str, Any]:
    st.markdown(f"**{t('what_if.promised')}**")
    limits = {}
    for name, limit in now.scenario_ttft_s.items():
        shown = t("what_if.class_ttft", name=name if name != "other" else t("what_if.no_class"))
        key = _seeded(f"wi_ttft_{name}_{limit:g}", float(now.ttft_s[name]))
        limits[name] = st.number_input(
            shown, min(LEAST_S, limit), max(MOST_S, limit), step=0.1, key=key
        )
    key = _seeded(f"wi_tpot_{now.scenario_tpot_s:g}", float(now.tpot_s))
    usual_s = now.scenario_tpot_s
    tpot_s = st.number_input(
        t("what_if.tpot"), min(LEAST_S, usual_s), max(MOST_S, usual_s), step=0.01, key=key,
        format="%.3f",
    )  # fmt: skip
    attainment = st.slider(
        t("what_if.attainment"), 50.0, 99.9, step=0.1, format="%.1f %%",
        key=_seeded("wi_attainment", float(own.attainment)), help=t("what_if.attainment_help"),
    )  # fmt: skip
    confidence = st.slider(
        t("what_if.confidence"), 50.0, 99.0, step=1.0, format="%.0f %%",
        key=_seeded("wi_confidence", float(own.confidence)), help=t("what_if.confidence_help"),
    )  # fmt: skip
    return {
        "ttft_s": {
            name: limit for name, limit in limits.items() if limit != now.scenario_ttft_s[name]
        },
        "tpot_s": None if tpot_s == now.scenario_tpot_s else tpot_s,
        "attainment": attainment, "confidence": confidence,
    }  # fmt: skip


def _fleet(own: Settings, now: Standing) -> dict[str, Any]:
    st.markdown(f"**{t('what_if.fleet')}**")
    policies = list(state.scenario().policies)
    policy = st.selectbox(
        t("what_if.policy"), policies, key=_seeded(f"wi_policy_{policies}", now.policy),
        help=t("what_if.policy_help"),
    )  # fmt: skip
    gpus = _several(
        "what_if.gpus", f"wi_gpus_{now.own_gpu}", now.gpus,
        list(dict.fromkeys((now.own_gpu, *known_cards()))), show=card_name,
        help=t("what_if.gpus_help"),
    )  # fmt: skip
    sizes = list(map(str, sorted({now.own_tp, *TP_SIZES})))
    tp = _several(
        "what_if.tp", f"wi_tp_{now.own_tp}", list(map(str, now.tp)), sizes,
        help=t("what_if.tp_help"),
    )  # fmt: skip
    chosen = [int(size) for size in tp] or [now.own_tp]
    return {
        "policy": "" if policy == policies[0] else policy,
        "gpus": () if gpus in ([], [now.own_gpu]) else tuple(gpus),
        "tp": () if chosen == [now.own_tp] else tuple(chosen),
        "have": _have(now, "all"),
    }  # fmt: skip


def _care(own: Settings, now: Standing) -> dict[str, Any]:
    st.markdown(f"**{t('what_if.care')}**")
    care = st.segmented_control(
        t("what_if.how_careful"), list(CARE), key=_seeded("wi_care", own.care), required=True,
        format_func=lambda name: t(
            f"what_if.care_{name}", rows=f"{CARE[name][0]:,}", draws=CARE[name][1]
        ),
        help=t("what_if.care_help"),
    )  # fmt: skip
    st.markdown(f"**{t('what_if.prices')}**", help=t("what_if.prices_help"))
    usd = dict(own.usd)
    for name in dict.fromkeys(gpu for gpu in now.gpus if gpu in load_gpus()):
        shipped = load_gpus()[name].usd_per_hour
        key = _seeded(f"wi_usd_{name}", float(own.usd.get(name, shipped)))
        price = st.number_input(
            t("what_if.usd", card=card_name(name)), 0.0, 1000.0, step=0.1, key=key
        )
        usd.pop(name, None)
        if price != shipped:
            usd[name] = price
    overflow = st.number_input(
        t("what_if.overflow"), 0.0, 1e4, step=0.5, key=_seeded("wi_overflow", own.overflow_usd),
        value=None, placeholder=t("what_if.overflow_none"), help=t("what_if.overflow_help"),
    )  # fmt: skip
    return {"care": care or "quick", "usd": usd, "overflow_usd": overflow}


def _have(now: Standing, where: str) -> int | None:
    """The replicas that there are; drawn twice, so each shows what the other says."""
    fleet = state.scenario().fleet[0].replicas
    key = f"wi_have_{where}_{fleet}"
    told = f"wi_told_{where}"
    if st.session_state.get(told) != now.have:  # the other one has changed it
        st.session_state[key] = now.have
    have = st.number_input(
        t("what_if.have"), 0, 10_000, key=_seeded(key, now.have), help=t("what_if.have_help")
    )
    st.session_state[told] = have
    return None if have == fleet else int(have)


def _parameter(question: str, one: Parameter, value: Any, key: str) -> Any:
    name = one.name.lower()
    label = t(f"what_if.parameter.{question}.{name}")
    if one.kind == "text":
        return st.text_input(
            label, key=_seeded(key, value), help=t(f"what_if.help.{question}.{name}")
        ).strip()
    number = int if one.kind == "whole" else float
    _seeded(key, number(value))
    step = 0.1 if one.kind == "number" else 1
    if one.most >= 1e5:
        step = max(1, int(one.usual) // 10)  # of users, of tokens
    return st.number_input(
        label, number(one.least), number(one.most), step=number(step), key=key,
        help=t(f"what_if.help.{question}.{name}"),
    )  # fmt: skip


def _several(
    label: str, key: str, value: list[str], options: list[str], *, new: bool = False, **more: Any
) -> list[str]:
    """Some of them, and others that are typed."""
    show = more.pop("show", None)
    if show is not None:
        more["format_func"] = show
    options = list(dict.fromkeys([*options, *value]))
    return list(
        st.multiselect(t(label), options, key=_seeded(key, value), accept_new_options=new, **more)
    )


def _seeded(key: str, value: Any) -> str:
    """The key of a widget that begins with this value."""
    if key not in st.session_state:
        st.session_state[key] = value
    return key


def _factor(text: str) -> float | None:
    try:
        number = float(text.strip().removesuffix("x"))
    except ValueError:
        return None
    return number if 0 < number <= GROWTH_MOST else None


def _kept(own: Settings, fields: dict[str, Any]) -> Settings:
    new = msgspec.structs.replace(own, **fields)
    if new != own:
        keep(new)
    return new


__all__ = ["assumptions", "plan_form", "question_form"]
