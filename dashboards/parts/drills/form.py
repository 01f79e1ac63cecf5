"""What a drill breaks, where and how long; its values outlive the page."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from controller.drills.cli import FOR_S_LEAST, FOR_S_MOST, DemoTarget
from dashboards import state
from dashboards.state import t
from policy.drills import DRILL_KINDS
from policy.files import profile_names

if TYPE_CHECKING:
    from dashboards.parts.live.door import Door

BUILT_IN = DemoTarget.name
"""The target that is started for the drill, and ends with it."""
FORM = "drills_form"
USUAL: dict[str, Any] = {
    "kind": DRILL_KINDS[0], "for_s": 60, "on": "", "where": BUILT_IN, "profile": "",
}  # fmt: skip
PLACES = (BUILT_IN, "controller")
TOKEN_FILE = "admin.token"
"""As a controller calls it, in its data folder."""


def word(kind: str) -> str:
    """A kind's name in the dictionary."""
    return kind.replace("-", "_")


def drill_form() -> dict[str, Any]:
    """Draw it: what is chosen."""
    kept: dict[str, Any] = st.session_state.setdefault(FORM, dict(USUAL))
    left, right = st.columns([3, 2], gap="large")
    with left:
        _hold("drill_kind", kept["kind"])
        kept["kind"] = st.radio(
            t("drills.what"), DRILL_KINDS, key="drill_kind",
            captions=[t(f"drills.kind.{word(kind)}") for kind in DRILL_KINDS],
        )  # fmt: skip
    with right:
        _hold("drill_where", kept["where"])
        kept["where"] = st.radio(
            t("drills.where"), PLACES, key="drill_where",
            format_func=lambda place: t(f"drills.place.{place}"),
            captions=[t(f"drills.place_about.{place}") for place in PLACES],
        )  # fmt: skip
        _hold("drill_for", kept["for_s"])
        kept["for_s"] = st.number_input(
            t("drills.for"), int(FOR_S_LEAST), int(FOR_S_MOST), step=10, key="drill_for",
            help=t("drills.for_help"),
        )  # fmt: skip
        _hold("drill_on", kept["on"])
        kept["on"] = st.text_input(
            t("drills.hit"), key="drill_on", help=t("drills.hit_help"), max_chars=200,
            placeholder=t("drills.hit_first"),
        ).strip()  # fmt: skip
        if kept["where"] != BUILT_IN:
            names = ["", *profile_names()]
            _hold("drill_profile", kept["profile"] if kept["profile"] in names else "")
            kept["profile"] = st.selectbox(
                t("drills.profile"), names, key="drill_profile", help=t("drills.profile_help"),
                format_func=lambda name: name or t("drills.no_profile"),
            )  # fmt: skip
    return kept


def request_of(kept: dict[str, Any], door: Door | None = None) -> dict[str, Any]:
    """Of the job ``drill``; ``door``: the controller that is hit."""
    target = data = profile = ""
    if door is not None:
        target, data, profile = door.admin.url, _data_of(door), kept["profile"]
    return {
        "kind": kept["kind"], "for_s": float(kept["for_s"]), "on": kept["on"],
        "target": target or BUILT_IN, "data": data, "profile": profile,
        "asked_s": round(time.time(), 3),
    }  # fmt: skip


def command(request: dict[str, Any], token_file: str = "") -> str:
    """What does the same in a terminal."""
    words = ["twinkeel", "drill", request["kind"], "--for", f"{request['for_s']:g}s"]
    words += ["--on", request["on"]] if request["on"] else []
    if request["target"] != BUILT_IN:
        words += ["--target", request["target"]]
        words += ["--data", request["data"]] if request["data"] else []
        words += ["--profile", request["profile"]] if request["profile"] else []
        words += ["--token-file", token_file or f"DATA/{TOKEN_FILE}", "--yes"]
    return shlex.join(words)


def token_file(target: str) -> str:
    """Where the app was told that the token of an admin API lies; empty: it was not."""
    settings = state.settings()
    for name, url in settings.controllers.items():
        if url == target and name in settings.token_files:
            return settings.token_files[name]
    return ""


def _data_of(door: Door) -> str:
    """The controller's data folder, where its token tells where that is; the recorded trace, which
    the twin plays, lies there."""
    file = Path(token_file(door.admin.url))
    return str(file.parent) if file.name == TOKEN_FILE else ""


def _hold(name: str, value: Any) -> None:
    """The widget's value, put in where Streamlit has forgotten it."""
    if name not in st.session_state:
        st.session_state[name] = value
