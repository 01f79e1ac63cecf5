"""What is looked at: one scenario, shared by all pages. It lives in the URL."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from policy.files import FileError, load_policy, load_profile
from traces import TraceError
from traces.store import resolve_path
from twin.faults import FaultError, parse_fault
from twin.summary import Slo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from policy.cost import Profile
    from twin.faults import Fault

KINDS_MOST = 4
POLICIES_MOST = 4
Factor = Annotated[float, Meta(ge=0.01, le=1000)]


class ScenarioError(ValueError):
    """A scenario that cannot be: what is wrong, in a sentence."""


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas of one profile."""

    profile: str
    replicas: Annotated[int, Meta(ge=1, le=1000)]


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trace, a fleet, policies, faults and service levels.

    Traces and policies are named as on the command line, or by what the shelf calls them.
    """

    trace: str = "shipped:demo"
    fleet: Annotated[tuple[Kind, ...], Meta(min_length=1, max_length=KINDS_MOST)] = (
        Kind("h100-sxm/qwen3-8b", 4),
    )
    policies: Annotated[tuple[str, ...], Meta(min_length=1, max_length=POLICIES_MOST)] = (
        "stable", "fifo",
    )  # fmt: skip
    """The first is the one that is asked about; the others are compared with it."""
    faults: Annotated[tuple[str, ...], Meta(max_length=20)] = ()
    """Each on a line, as ``twinkeel replay --fault`` takes it."""
    slo: str = "P0=1.5,P1=4,P2=10,tpot=0.1"
    seed: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    speed: Factor = 1.0
    scale: Factor = 1.0
    scale_lengths: Factor = 1.0
    assume_output: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

    def parsed_faults(self) -> tuple[Fault, ...]:
        """
        Raises:
            FaultError: one of them is none.
        """
        return tuple(parse_fault(text) for text in self.faults)


NAMES = {
    "trace": "trace", "fleet": "fleet", "policies": "policy", "faults": "fault", "slo": "slo",
    "seed": "seed", "speed": "speed", "scale": "scale", "scale_lengths": "lengths",
    "assume_output": "output",
}  # fmt: skip
"""Of the fields in the URL."""


def to_query(scenario: Scenario) -> dict[str, list[str]]:
    """For a URL. Everything is in it, so that other defaults change no link."""
    plain = msgspec.to_builtins(scenario)
    query: dict[str, list[str]] = {}
    for field, name in NAMES.items():
        value = plain[field]
        if field == "fleet":
            query[name] = [f"{kind['profile']}*{kind['replicas']}" for kind in value]
        elif isinstance(value, list | tuple):
            query[name] = [str(item) for item in value]
        elif isinstance(value, float):
            query[name] = [_exact(value)]
        else:
            query[name] = [str(value)]
    return {name: values for name, values in query.items() if values}


def in_query(query: Mapping[str, Sequence[str]]) -> bool:
    """Whether a URL names a scenario."""
    return any(name in query for name in NAMES.values())


def from_query(query: Mapping[str, Sequence[str]]) -> Scenario:
    """What a URL says; what it leaves out is as usual.

    Raises:
        ScenarioError: it says something that cannot be.
    """
    raw: dict[str, object] = {}
    for field, name in NAMES.items():
        values = list(query.get(name, ()))
        if not values:
            continue
        if field == "fleet":
            raw[field] = [_kind(text) for text in values]
        elif field in ("policies", "faults"):
            raw[field] = values
        else:
            raw[field] = values[-1]
    try:
        return msgspec.convert(raw, Scenario, strict=False)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].partition("`")[0].partition("[")[0]
        name = NAMES.get(field, field)
        given = ", ".join(query.get(name, ())) if name else ""
        raise ScenarioError(f"the link's {name or 'scenario'} is {given!r}: {error}") from error


def _kind(text: str) -> dict[str, object]:
    profile, star, count = text.rpartition("*")
    if not star or not count.isdecimal():
        raise ScenarioError(
            f"the link's fleet is {text!r}: write PROFILE*REPLICAS, as in h100-sxm/qwen3-8b*4"
        )
    return {"profile": profile, "replicas": int(count)}


def _exact(value: float) -> str:
    """It comes back as the very same number."""
    return repr(value).removesuffix(".0")


def check(scenario: Scenario, path_of: Callable[[str], Path | str]) -> None:
    """Whether it can be played, as far as that is known without playing it.

    Args:
        path_of: what the command line calls a trace or a policy (``Shelf.path_of``).

    Raises:
        ScenarioError: the first thing that is wrong.
    """
    try:
        resolve_path(path_of(scenario.trace))
        for kind in scenario.fleet:
            profile_of(kind.profile)
        for policy in scenario.policies:
            load_policy(path_of(policy))
        scenario.parsed_faults()
        Slo.parse(scenario.slo)
    except (TraceError, FileError, FaultError, ValueError) as error:
        raise ScenarioError(str(error)) from error


def by_name(profile: str) -> str:
    """The profile, or the card: what is kept is found by its name, and a file could be another one
    by then.

    Raises:
        ScenarioError: it is a file.
    """
    if profile.endswith((".yaml", ".yml")):
        raise ScenarioError(
            f"{profile} is a file, and profiles go by their names here, as in h100-sxm/qwen3-8b:"
            " twinkeel replay --profile takes a file"
        )
    return profile


@lru_cache(256)
def profile_of(name: str) -> Profile:
    """The profile of that name, read once: pages ask at every click.

    Raises:
        ScenarioError, FileError: there is none, or it is a file.
    """
    return load_profile(by_name(name))


def command(scenario: Scenario, path_of: Callable[[str], Path | str]) -> str:
    """The command that plays the same in a terminal."""
    words = ["twinkeel", "replay", str(path_of(scenario.trace))]
    for kind in scenario.fleet:
        words += ["--profile", kind.profile, "--replicas", str(kind.replicas)]
    for policy in scenario.policies:
        words += ["--policy", str(path_of(policy))]
    for fault in scenario.faults:
        words += ["--fault", fault]
    usual = Scenario()
    options = {
        "--slo": "slo", "--seed": "seed", "--speed": "speed", "--scale": "scale",
        "--scale-lengths": "scale_lengths", "--assume-output": "assume_output",
    }  # fmt: skip
    for option, field in options.items():
        value = getattr(scenario, field)
        if value != getattr(usual, field):
            words += [option, _exact(value) if isinstance(value, float) else str(value)]
    return shlex.join(words)
