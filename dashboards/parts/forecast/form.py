"""What is forecast, as a form; its values outlive the page, and make the job's request."""

from __future__ import annotations

import re
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards import state
from dashboards.parts.plain import complain
from dashboards.shelf import label
from dashboards.state import t
from dashboards.work.forecast import EXAMPLE, RATES

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator

FORM = "forecast_form"
NEEDED = ("torch", "sklearn", "threadpoolctl")
TRAINING = {"quick": (1, 6), "usual": (2, 25)}
"""Networks and passes over the data."""
USUAL: dict[str, Any] = {
    "source": EXAMPLE, "further": [], "what": "requests", "window_s": 300.0,
    "horizons_min": [5.0, 10.0, 15.0, 30.0, 60.0], "start": "", "training": "quick", "seed": 0,
}  # fmt: skip
WINDOWS_S = (60.0, 300.0, 600.0, 900.0, 1800.0)
AHEAD_MIN = (1.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)


def missing() -> str:
    """What forecasting needs and is not installed."""
    return ", ".join(name for name in NEEDED if find_spec(name) is None)


def forecast_form() -> dict[str, Any]:
    """Draw it: the request."""
    kept: dict[str, Any] = _form()
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _source(kept)
        _ahead(kept)
    with right:
        _training(right, kept)
    members, epochs = TRAINING[kept["training"]]
    return {
        "source": kept["source"], "further": kept["further"], "what": kept["what"],
        "window_s": 300.0 if kept["source"] == EXAMPLE else kept["window_s"],
        "horizons_min": sorted(kept["horizons_min"]), "start": kept["start"],
        "members": members, "epochs": epochs, "seed": kept["seed"],
    }  # fmt: skip


def _form() -> dict[str, Any]:
    """The session's; at first what was last asked for."""
    if FORM not in st.session_state:
        last = state.jobs().recent("forecast", most=1)
        kept = dict(USUAL)
        if last:
            asked = last[0].request
            kept |= {name: asked[name] for name in USUAL if name in asked}
            how = (asked["members"], asked["epochs"])
            kept["training"] = next((n for n, each in TRAINING.items() if each == how), "quick")
        st.session_state[FORM] = kept
    found: dict[str, Any] = st.session_state[FORM]
    return found


def _source(kept: dict[str, Any]) -> None:
    trace = state.scenario().trace
    names = list(dict.fromkeys([EXAMPLE, trace, *state.shelf().traces(), *_tables()]))
    if kept["source"] not in names:
        names.append(kept["source"])
    _hold("forecast_source", kept["source"])
    kept["source"] = st.selectbox(
        t("forecast.source"), names, key="forecast_source", help=t("forecast.source_help"),
        format_func=lambda name: _named(name, trace),
    )  # fmt: skip
    if kept["source"] == EXAMPLE:
        st.caption(t("forecast.example_about"))
    _upload(kept)
    if kept["source"] == EXAMPLE:
        kept["further"], kept["what"], kept["start"] = [], "requests", ""
        return
    others = [name for name in names if name not in (EXAMPLE, kept["source"])]
    _hold("forecast_further", [name for name in kept["further"] if name in others])
    kept["further"] = st.multiselect(
        t("forecast.further"), others, key="forecast_further", help=t("forecast.further_help"),
        format_func=lambda name: _named(name, trace), placeholder=t("forecast.further_none"),
    )  # fmt: skip
    left, right = st.columns(2)
    rates = ["requests", "tokens"]
    _hold("forecast_what", kept["what"])
    kept["what"] = left.selectbox(
        t("forecast.what"), rates, key="forecast_what", help=t("forecast.what_help"),
        format_func=lambda name: t("forecast.tokens" if name == "tokens" else "forecast.requests"),
    )  # fmt: skip
    _hold("forecast_start", kept["start"])
    kept["start"] = right.text_input(
        t("forecast.start"), key="forecast_start", help=t("forecast.start_help"),
        placeholder=t("forecast.start_none"),
    )  # fmt: skip


def _ahead(kept: dict[str, Any]) -> None:
    left, right = st.columns([1, 2])
    if kept["source"] == EXAMPLE:
        left.text_input(
            t("forecast.window"), t("forecast.minutes", n=5), disabled=True, key="forecast_fixed"
        )
    else:
        _hold("forecast_window", kept["window_s"])
        kept["window_s"] = left.selectbox(
            t("forecast.window"), WINDOWS_S, key="forecast_window",
            help=t("forecast.window_help"),
            format_func=lambda seconds: t("forecast.minutes", n=f"{seconds / 60:g}"),
        )  # fmt: skip
    _hold("forecast_horizons", kept["horizons_min"])
    chosen = right.multiselect(
        t("forecast.horizons"), AHEAD_MIN, key="forecast_horizons",
        help=t("forecast.horizons_help"),
        format_func=lambda minutes: t("forecast.minutes", n=f"{minutes:g}"),
    )  # fmt: skip
    kept["horizons_min"] = chosen or [5.0]


def _training(place: DeltaGenerator, kept: dict[str, Any]) -> None:
    _hold("forecast_training", kept["training"])
    kept["training"] = place.radio(
        t("forecast.training"), list(TRAINING), key="forecast_training",
        format_func=lambda name: t(f"forecast.training_{name}"),
        captions=[t(f"forecast.training_{name}_about") for name in TRAINING],
    )  # fmt: skip
    _hold("forecast_seed", kept["seed"])
    kept["seed"] = place.number_input(
        t("forecast.seed"), 0, 1 << 31, key="forecast_seed", help=t("forecast.seed_help")
    )


def _upload(kept: dict[str, Any]) -> None:
    with st.popover(t("forecast.upload"), width="stretch"):
        given = st.file_uploader(t("forecast.upload_what"), type=["csv"], key="forecast_upload")
        if given is None or st.session_state.get("forecast_uploaded") == given.file_id:
            return
        st.session_state.forecast_uploaded = given.file_id
        wrong = _keep(given.name, given.getvalue(), kept)
        if wrong:
            complain(wrong)
            return
        st.session_state.pop("forecast_source", None)
        st.rerun(scope="app")


def _keep(filename: str, content: bytes, kept: dict[str, Any]) -> str:
    """Put a table of rates beside the uploads, by what is in it; gives what is wrong with it."""
    header = content[:10_000].decode("utf-8", "replace").partition("\n")[0]
    columns = [name.strip() for name in header.strip().split(",")]
    if not {"t_s", "rate"} <= set(columns):
        return t("forecast.no_rates", name=filename, columns=", ".join(columns)[:200])
    stem = re.sub(r"[^\w.-]+", "-", Path(filename).stem).strip("-.")[:60] or "rates"
    name = f"{stem}~{sha256(content).hexdigest()[:16]}{RATES}"
    folder = _uploads()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    kept["source"] = name
    return ""


def _tables() -> list[str]:
    return sorted(path.name for path in _uploads().glob(f"*~*{RATES}"))


def _uploads() -> Path:
    return Path(state.settings().data) / "uploads"


def _named(name: str, trace: str) -> str:
    if name == EXAMPLE:
        return t("forecast.example")
    shown = name.partition("~")[0] if name.endswith(RATES) else label(name)
    return t("forecast.of_scenario", name=shown) if name == trace else shown


def _hold(name: str, value: Any) -> None:
    """The widget's value, put in where Streamlit has forgotten it."""
    if name not in st.session_state:
        st.session_state[name] = value
