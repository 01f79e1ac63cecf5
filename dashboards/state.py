"""What a session of the app knows: the settings it was started with, the scenario, the language."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards.jobs import Jobs
from dashboards.scenario import NAMES, Scenario, ScenarioError, from_query, in_query, to_query
from dashboards.shelf import Shelf
from dashboards.words import LANGUAGES, Words
from twin.report.colours import DARK, LIGHT

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "TWINKEEL_UI_SETTINGS"
"""``Settings`` as JSON, for the process that Streamlit runs the app in."""
_SCENARIO, _URL, _WRONG, _LANGUAGE = "scenario", "scenario_url", "scenario_wrong", "lang"
_EXTRA, _PAST = "extra_query", "scenario_urls_past"
STALE_S = 5.0
"""So long a browser may send a URL that the app has replaced meanwhile."""
EXTRAS_MOST, EXTRA_LONG = 12, 4000
"""Names that pages may keep in the URL, and characters of each."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the app was started."""

    data: str = "build/ui"
    """Folder of uploads and jobs."""
    controllers: dict[str, str] = {}
    """Admin APIs by name."""
    token_files: dict[str, str] = {}
    """Where the app reads the admin token of a controller, to look; it never acts with it."""
    jobs: int = 2
    """At the same time."""


@st.cache_resource
def settings() -> Settings:
    return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Settings)


@st.cache_resource
def jobs() -> Jobs:
    return Jobs(Path(settings().data) / "jobs", settings().jobs)


@st.cache_resource
def shelf() -> Shelf:
    return Shelf(Path(settings().data) / "uploads")


def scenario() -> Scenario:
    """What is looked at now."""
    found: Scenario = st.session_state.get(_SCENARIO, Scenario())
    return found


def set_scenario(new: Scenario) -> None:
    """For all pages, and for the URL."""
    st.session_state[_SCENARIO] = new
    st.session_state.pop(_WRONG, None)


def write_url() -> None:
    """Of what is looked at now, where a scenario was set after the URL was read."""
    _write(st.session_state.get(_URL))


def sync_url() -> bool:
    """Read the scenario from the URL where someone changed it there, else write it into the URL.

    Returns:
        Whether the URL has brought another scenario, so that forms must show it.
    """
    query = {name: st.query_params.get_all(name) for name in st.query_params}
    last = st.session_state.get(_URL)
    _adopt_language(query)
    came = False
    changed = query != last and not _is_stale(query)
    if in_query(query) and changed:
        try:
            came = scenario() != (found := from_query(query))
            set_scenario(found)
        except ScenarioError as error:
            st.session_state[_WRONG] = str(error)
    more = {name: values for name, values in query.items() if _is_extra(name, values)}
    if changed and (more or in_query(query)):
        st.session_state[_EXTRA] = dict(list(more.items())[:EXTRAS_MOST])
    _write(query)
    return came or last is None


def extra(name: str) -> list[str]:
    """What a page keeps in the URL beside the scenario, so that a link has it too."""
    return list(st.session_state.get(_EXTRA, {}).get(name, ()))


def set_extra(name: str, values: list[str]) -> None:
    """Keep it; nothing: no more."""
    kept = {**st.session_state.get(_EXTRA, {}), name: values}
    st.session_state[_EXTRA] = {name: values for name, values in kept.items() if values}
    _write(st.session_state.get(_URL))


def _written() -> dict[str, list[str]]:
    """The URL of what is looked at."""
    more: dict[str, list[str]] = st.session_state.get(_EXTRA, {})
    return to_query(scenario()) | {_LANGUAGE: [language()]} | more


def _write(there: Mapping[str, list[str]] | None) -> None:
    """Put the URL of what is looked at in place of ``there``."""
    written, last = _written(), st.session_state.get(_URL)
    if there != written:
        st.query_params.from_dict(written)
    if last is not None and last != written:
        st.session_state[_PAST] = [*_past(), (time.monotonic(), last)]
    st.session_state[_URL] = written


def _past() -> list[tuple[float, dict[str, list[str]]]]:
    """URLs that were replaced a moment ago, and when."""
    now_s = time.monotonic()
    return [one for one in st.session_state.get(_PAST, ()) if now_s - one[0] < STALE_S]


def _is_stale(query: Mapping[str, list[str]]) -> bool:
    """Whether the browser sent it before it had the last one: who clicks twice in quick succession
    has not gone back to what stood there before the first click."""
    return any(query == one for _, one in _past())


def _is_extra(name: str, values: list[str]) -> bool:
    ours = name in NAMES.values() or name == _LANGUAGE
    return not ours and sum(map(len, values)) <= EXTRA_LONG


def link_error() -> str:
    """What is wrong with the link that the session began with; empty: nothing."""
    return str(st.session_state.get(_WRONG, ""))


def language() -> str:
    """``en`` or ``zh``."""
    return str(st.session_state.get(_LANGUAGE, LANGUAGES[0]))


def set_language(name: str) -> None:
    st.session_state[_LANGUAGE] = name


def t(key: str, **values: Any) -> str:
    """The text of this name in the session's language."""
    return _words().text(key, language(), **values)


def said(text: str) -> str:
    """An English text that somebody else wrote (a chart's title, a policy's help), in the session's
    language where the dictionary has it, else as it is."""
    return _words().translated(text, language())


@st.cache_resource
def _words() -> Words:
    return Words.load()


def dark() -> bool:
    """Whether the browser shows the dark theme."""
    return st.context.theme.type == "dark"


def colours() -> dict[str, str]:
    """Of the theme that the browser shows, by name (``twin.report.colours``)."""
    return DARK if dark() else LIGHT


def _adopt_language(query: Mapping[str, list[str]]) -> None:
    if _LANGUAGE not in st.session_state and query.get(_LANGUAGE, [""])[-1] in LANGUAGES:
        set_language(query[_LANGUAGE][-1])
