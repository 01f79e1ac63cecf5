"""What the page asks beside the scenario, as it stands in the URL, and the requests that it makes
of both."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import streamlit as st
from msgspec import Meta

from dashboards import state
from dashboards.scenario import by_name, profile_of
from dashboards.work.plan import prices_of, slo_of
from policy.files import load_gpus
from traces import open_trace
from twin.plan.catalogue import Question, question_of
from twin.plan.cell import FAULTS
from twin.plan.preparing import Named, named_in
from twin.summary import Slo

if TYPE_CHECKING:
    from dashboards.scenario import Scenario

QUERY, PINS = "what_if", "pins"
PINS_MOST = 4
VIEWS = ("questions", "plan", "compare")
CARE = {"quick": (1000, 2), "careful": (5000, 4)}
"""Requests of the stretch around the peak, and days that are played."""
OTHER_CARDS = ("h100-sxm", "h200", "l40s")
"""Beside the fleet's own, where cards are compared."""
Seconds = Annotated[float, Meta(ge=1e-4, le=1e6)]
Cards = Annotated[int, Meta(ge=1, le=64)]
Factor = Annotated[float, Meta(gt=0, le=10)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is asked. What is empty is as the scenario says."""

    view: Literal["questions", "plan", "compare"] = "questions"
    question: str = ""
    parameters: dict[str, dict[str, int | float | str]] = {}
    """By question."""
    have: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    policy: str = ""
    gpus: Annotated[tuple[str, ...], Meta(max_length=8)] = ()
    tp: Annotated[tuple[Cards, ...], Meta(max_length=4)] = ()
    ttft_s: dict[str, Seconds] = {}
    """By class, to the first token for 95 %."""
    tpot_s: Seconds | None = None
    attainment: Annotated[float, Meta(ge=50, le=99.9)] = 95.0
    confidence: Annotated[float, Meta(ge=50, le=99)] = 90.0
    care: Literal["quick", "careful"] = "quick"
    growths: Annotated[tuple[Factor, ...], Meta(min_length=1, max_length=8)] = (1.0, 1.5, 2.0, 3.0)
    faults: tuple[str, ...] = ("n-1",)
    usd: dict[str, Annotated[float, Meta(ge=0, le=1000)]] = {}
    """An hour of a card."""
    overflow_usd: Annotated[float, Meta(ge=0, le=1e4)] | None = None


def settings() -> Settings:
    """Of the session, or of the link that it began with."""
    raw = (state.extra(QUERY) or ["{}"])[-1]
    if st.session_state.get("wi_raw") != raw:  # a link brought others: the widgets show them
        for key in [key for key in st.session_state if str(key).startswith("wi_")]:
            del st.session_state[key]
        st.session_state.wi_raw = raw
    try:
        found = msgspec.json.decode(raw, type=Settings)
        if found.question:
            question_of(found.question)
        checked = {
            name: {one: question_of(name).checked(given)[one] for one in given}
            for name, given in found.parameters.items()
        }
        return msgspec.structs.replace(found, parameters=checked)
    except (msgspec.DecodeError, ValueError) as error:
        keep(Settings())
        st.session_state.wi_wrong = str(error)
        return Settings()


def keep(new: Settings) -> None:
    """For the URL, and for the next look."""
    raw = msgspec.json.encode(new, order="sorted").decode()
    st.session_state.wi_raw = raw
    state.set_extra(QUERY, [] if raw == "{}" else [raw])


def change(**fields: Any) -> None:
    """Some of them."""
    keep(msgspec.structs.replace(settings(), **fields))


def pins() -> list[str]:
    """The jobs that are compared."""
    return state.extra(PINS)[:PINS_MOST]


def pin(number: str) -> None:
    """One more; it goes when it is there already."""
    now = pins()
    others = [one for one in now if one != number]
    state.set_extra(PINS, others if number in now else [*others, number][-PINS_MOST:])


class Standing(msgspec.Struct, frozen=True):
    """What the scenario says about a plan, with the page's settings put over it."""

    policy: str
    own_gpu: str
    own_tp: int
    model: str
    gpus: list[str]
    tp: list[int]
    have: int
    ttft_s: dict[str, float]
    """By class that the trace has."""
    scenario_ttft_s: dict[str, float]
    tpot_s: float
    scenario_tpot_s: float
    named: Named


def standing(scenario: Scenario, own: Settings) -> Standing:
    """
    Raises:
        ValueError: the scenario names what there is not.
    """
    first = scenario.fleet[0]
    profile = profile_of(first.profile)
    gpu, tp = profile.gpu, profile.tensor_parallel
    named = _named(str(state.shelf().path_of(scenario.trace)))
    slo = Slo.parse(scenario.slo)
    limits = {name or "other": slo.limit_s(name) for name in named.classes}
    policy = own.policy if own.policy in scenario.policies else scenario.policies[0]
    return Standing(
        policy, gpu, tp, profile.model, list(map(by_name, own.gpus)) or [gpu], list(own.tp) or [tp],
        first.replicas if own.have is None else own.have,
        {name: own.ttft_s.get(name, limit) for name, limit in limits.items()}, limits,
        own.tpot_s or slo.tpot_s, slo.tpot_s, named,
    )  # fmt: skip


@st.cache_data(max_entries=32, show_spinner=False)
def _named(path: str) -> Named:
    return named_in(open_trace(path))


def usual(question: Question, now: Standing) -> dict[str, Any]:
    """What a question is asked with at first: of the fleet, where that says it better."""
    values: dict[str, Any] = {one.name: one.usual for one in question.parameters}
    if question.name == "fit":
        size = f"@tp{now.own_tp}" if now.own_tp > 1 else ""
        values["NAME"] = f"{now.own_gpu}/{now.model}{size}"
    if question.name == "tp":
        values |= {"large": 2 * now.own_tp, "small": now.own_tp}
    return values


def ask_request(
    question: Question, scenario: Scenario, own: Settings, now: Standing
) -> dict[str, Any]:
    """Of the job ``ask``: everything that decides the answer, and nothing else.

    Raises:
        ValueError: a parameter cannot be.
    """
    given = {**usual(question, now), **own.parameters.get(question.name, {})}
    asked = {"question": question.name, "parameters": question.checked(given)}
    if question.name == "fit":
        by_name(given["NAME"])
    if question.plain:
        return asked
    request = asked | _base(scenario, own, now) | {"have": now.have if question.have else 0}
    if question.name == "gpu" and not own.gpus:
        request["gpus"] = list(dict.fromkeys((now.own_gpu, *OTHER_CARDS)))
    elif question.name not in ("gpu", "users"):
        request |= {"gpus": request["gpus"][:1], "tp": request["tp"][:1]}
    request["prices"] = _prices(own, request["gpus"])
    return request


def plan_request(scenario: Scenario, own: Settings, now: Standing) -> dict[str, Any]:
    """Of the job ``plan``."""
    faults = [name for name in FAULTS if name in own.faults] or ["none"]
    return _base(scenario, own, now) | {
        "growths": [float(growth) for growth in own.growths], "faults": faults,
    }  # fmt: skip


def _base(scenario: Scenario, own: Settings, now: Standing) -> dict[str, Any]:
    rows, draws = CARE[own.care]
    target = {"attainment_percent": own.attainment}
    classes = {name: {"ttft_s_p95": limit, **target} for name, limit in now.ttft_s.items()}
    return {
        "trace": scenario.trace, "policy": now.policy, "model": now.model, "gpus": now.gpus,
        "tp": now.tp, "rows": rows, "draws": draws, "assume_output": scenario.assume_output,
        "seed": scenario.seed, "prices": _prices(own, now.gpus),
        "slo": {
            "confidence_percent": own.confidence, "tpot_s": now.tpot_s, "classes": classes,
        },
    }  # fmt: skip


def _prices(own: Settings, gpus: list[str]) -> dict[str, Any] | None:
    """Those that are not the shipped ones."""
    source = "said on the page"
    cards = {
        name: {"usd_per_hour": own.usd[name], "source": source} for name in gpus if name in own.usd
    }
    prices: dict[str, Any] = {"gpus": cards} if cards else {}
    if own.overflow_usd is not None:
        prices["overflow_usd_per_million_tokens"] = own.overflow_usd
    return prices or None


def command(kind: str, request: dict[str, Any]) -> str:
    """What gives the same figures in a shell.

    Args:
        kind: of the job: ``ask`` or ``plan``.
    """
    words = ["twinkeel", "plan"]
    if kind == "ask":
        words += ["ask", request["question"]]
        for name, value in request["parameters"].items():
            text = f"{value:.12g}" if isinstance(value, float) else str(value)
            words += [text] if name == "NAME" else [f"--{name}", text]
    if "trace" not in request:
        return shlex.join(words)
    files = [_heredoc("slo.yaml", slo_of(request))]
    path_of = state.shelf().path_of
    words += ["--trace", str(path_of(request["trace"])), "--slo", "slo.yaml"]
    words += ["--policy", str(path_of(request["policy"])), "--model", request["model"]]
    words += ["--gpus", ",".join(request["gpus"]), "--tp", ",".join(map(str, request["tp"]))]
    words += ["--rows", str(request["rows"]), "--draws", str(request["draws"])]
    if request["seed"]:
        words += ["--seed", str(request["seed"])]
    if request["assume_output"]:
        words += ["--assume-output", str(request["assume_output"])]
    if request["prices"]:
        files.append(_heredoc("prices.yaml", prices_of(request)))
        words += ["--prices", "prices.yaml"]
    if request.get("have"):
        words += ["--have", str(request["have"])]
    if kind == "plan":
        words += ["--grow", ",".join(f"{growth:g}" for growth in request["growths"])]
        words += ["--faults", ",".join(request["faults"])]
    return "\n".join([*files, shlex.join(words)])


def _heredoc(name: str, plain: dict[str, Any]) -> str:
    text = msgspec.yaml.encode(plain).decode().rstrip()
    return f"cat > {name} <<'END'\n{text}\nEND"


def known_cards() -> list[str]:
    """Cards that a plan may take, by name."""
    return [name for name in load_gpus() if not name.startswith("cpu")]


__all__ = [
    "CARE", "PINS_MOST", "VIEWS", "Settings", "Standing", "ask_request",
    "change", "command", "keep", "known_cards", "pin", "pins", "plan_request", "settings",
    "standing", "usual",
]  # fmt: skip
