"""The panel of chains: one is named, by its id or from a list, and shown as a waterfall.

Which one it is stands in the URL, so that a link shows it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import streamlit as st

from dashboards import state
from dashboards.admin import NOT_FOUND, UNREACHABLE, AdminError
from dashboards.parts.charts import show_chart
from dashboards.parts.live.door import complain
from dashboards.parts.live.waterfall import (
    STEPS_MOST,
    budget_bar,
    head_strip,
    step_table,
    waterfall,
)
from dashboards.parts.plain import plain_text
from dashboards.state import t

if TYPE_CHECKING:
    from controller.store.steps import ChainLine, ChainView
    from dashboards.parts.live.door import Door

POLL_S = 2.0
LIST_S = 6.0
"""How often the list is asked for: one that changes is folded up under the pointer."""
STALE_S = 6.0
"""Older answers are greyed."""
CHAIN, USER = "chain", "chain_user"
"""Their names in the link."""
_SHOWN = "chain_shown"
"""What stands in the field for the id, and which field that is."""
NAME_MOST = 1000
HOW = """curl CONTROLLER/v1/chat/completions -H 'content-type: application/json' \\
  -H 'x-twinkeel-user: ada' -H 'x-twinkeel-chain: order-17' -H 'x-twinkeel-step: plan' \\
  -d '{"model": "MODEL", "messages": [{"role": "user", "content": "hello"}]}'"""


class Choice(NamedTuple):
    """The chain that is looked at."""

    chain: str
    """Empty: none."""
    user: str = ""
    """With its tenant; empty: whoever had the youngest chain of that name."""


class _List(NamedTuple):
    """The last list, and when it came."""

    chains: tuple[ChainLine, ...] | None
    """None: the controller does not tell."""
    at_s: float


class _Seen(NamedTuple):
    """The last answer about a chain, and when it came."""

    choice: Choice
    chain: ChainView | None
    """None: it is not known there."""
    at_s: float


def choose(choice: Choice) -> None:
    """Look at this one from now on."""
    state.set_extra(CHAIN, [choice.chain] if choice.chain else [])
    state.set_extra(USER, [choice.user] if choice.chain and choice.user else [])


def chosen() -> Choice:
    """The one that the link names."""
    chain, user = state.extra(CHAIN), state.extra(USER)
    if not chain or not chain[-1]:
        return Choice("")
    return Choice(chain[-1][:NAME_MOST], user[-1][:NAME_MOST] if user else "")


def chains(door: Door) -> None:
    """One round. While nobody answers, which the panels above say, the last answers stay."""
    listed = _listed(door)
    if listed is None:
        return
    if listed.chains is None:
        st.caption(t("live.chain.not_told"))
        return
    _choose(listed.chains)
    choice = chosen()
    if choice.chain:
        _show(door, choice)
    elif not listed.chains:
        st.info(t("live.chain.none_yet"), icon=":material/help:")
        st.code(HOW, "bash")
    else:
        st.caption(t("live.chain.choose"))


def _listed(door: Door) -> _List | None:
    """None: there was no answer yet."""
    known: dict[str, _List] = st.session_state.setdefault("chains_listed", {})
    last, now_s = known.get(door.name), time.time()
    if last is not None and 0.0 <= now_s - last.at_s < LIST_S:
        return last
    try:
        known[door.name] = _List(door.admin.chains(), now_s)
    except AdminError as error:
        if error.status == NOT_FOUND:
            known[door.name] = _List(None, now_s)
        elif error.code != UNREACHABLE:
            complain(door, error)
    return known.get(door.name)


def _choose(listed: tuple[ChainLine, ...]) -> None:
    """By its id, or from the list."""
    session = st.session_state
    choice = chosen()
    # What is being typed stays while the page polls. Where another chain was chosen elsewhere the
    # field is a new one: a browser that has not heard of it sends what stands in the old one.
    shown, number = session.get(_SHOWN, (None, 0))
    if shown != choice:
        number += 1
        session[_SHOWN] = (choice, number)
    field = f"chain_id_{number}"

    def typed() -> None:
        new = Choice(session[field].strip()[:NAME_MOST])
        session[_SHOWN] = (new, number)
        choose(new)

    def picked() -> None:
        if session.chain_pick is not None:
            choose(Choice(*session.chain_pick))
            session.chain_pick = None

    left, right = st.columns([2, 3])
    with left, st.container(key="chain_id"):
        st.text_input(
            t("live.chain.id"), choice.chain, key=field, on_change=typed, max_chars=NAME_MOST,
            placeholder=t("live.chain.id_as"),
        )  # fmt: skip
    names = {(line.chain, line.user): _line(line) for line in listed}
    right.selectbox(
        t("live.chain.recent", count=len(names)), list(names), None, key="chain_pick",
        format_func=lambda key: names.get(key, ""), placeholder=t("live.chain.pick"),
        on_change=picked, disabled=not names,
    )  # fmt: skip


def _line(line: ChainLine) -> str:
    """In the list; nothing in it changes by itself."""
    steps = t("live.chain.steps", count=line.steps)
    return " · ".join(part for part in (line.chain, line.user, line.line, steps) if part)


def _show(door: Door, choice: Choice) -> None:
    known: dict[str, _Seen] = st.session_state.setdefault("chain_seen", {})
    now_s = time.time()
    try:
        known[door.name] = _Seen(choice, door.admin.chain(*choice), now_s)
    except AdminError as error:
        if error.code != UNREACHABLE:
            complain(door, error)
    seen = known.get(door.name)
    if seen is None or seen.choice != choice:
        return
    age_s = now_s - seen.at_s
    with st.container(key="chain_stale" if age_s > STALE_S else "chain_fresh"):
        if seen.chain is None:
            _unknown(choice)
        else:
            draw(seen.chain)
        st.caption(t("live.age", s=f"{age_s:.1f}"))
    if age_s > STALE_S:
        st.html("<style>.st-key-chain_stale{opacity:.45}</style>")


def _unknown(choice: Choice) -> None:
    name = plain_text(choice.chain[:80])
    if choice.user:
        st.warning(t("live.chain.unknown_of", chain=name, user=plain_text(choice.user[:80])))
    else:
        st.warning(t("live.chain.unknown", chain=name))


def draw(chain: ChainView) -> None:
    """What was answered."""
    st.html(head_strip(chain))
    budget = budget_bar(chain)
    if budget is not None:
        st.html(budget)
    if chain.partial:
        st.warning(t("live.chain.partial_why"), icon=":material/warning:")
    if chain.steps:
        with st.container(key="chain_waterfall"):
            show_chart(waterfall(chain), "chain_chart")
        st.html(step_table(chain.steps))
    if len(chain.steps) > STEPS_MOST:
        st.caption(t("live.cut", shown=STEPS_MOST, all=len(chain.steps)))
    st.caption(t("live.chain.about"))
