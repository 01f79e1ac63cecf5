"""Which step-time profile belongs to a server: what it is told to be, or what it serves."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from policy.files import load_gpus, load_models, load_profile, profile_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from policy.cost import Gpu, ModelShape, Profile

PREFERRED_CARD = "h100-sxm"
"""Where nothing says which card a server has."""

_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(?=,? |$)")
_HUB_FOLDER = "models--"


class Match(NamedTuple):
    """A profile and what it is about."""

    profile: Profile
    model: ModelShape
    gpu: Gpu
    note: str = ""
    """What was assumed; empty: nothing."""


def named(profile: str) -> Match:
    """The profile of that name or path.

    Raises:
        FileError: there is none, or it is wrong.
    """
    return _match(load_profile(profile))


def by_model(names: Iterable[str]) -> Match | None:
    """The profile of a model that goes by one of these names (id, hub name or folder).

    Only whole names count, in any case: ``Qwen/Qwen3-8B``, ``qwen3-8b``, ``/models/Qwen3-8B``.
    None: no such model is known.

    Raises:
        FileError: the model is known, but no profile can be made for it.
    """
    known = _models_by_name()
    model = next((known[name] for name in _spellings(names) if name in known), None)
    if model is None:
        return None
    fitting = [profile for profile in _shipped() if profile.model == model]
    if not fitting:
        name = f"{PREFERRED_CARD}/{model}"
        return _match(load_profile(name), f"{name} is taken, scaled from another model")
    preferred = next((each for each in fitting if each.gpu == PREFERRED_CARD), fitting[0])
    if len(fitting) == 1:
        return _match(preferred, f"{preferred.name} is taken: the one profile of its model")
    others = ", ".join(each.name for each in fitting if each is not preferred)
    return _match(preferred, f"{preferred.name} is taken; it could be {others} as well")


def advice(url: str) -> str:
    """What to do where no profile was found."""
    return f"name one with --upstream {url},profile=NAME; known: {', '.join(profile_names())}"


def _match(profile: Profile, note: str = "") -> Match:
    return Match(profile, load_models()[profile.model], load_gpus()[profile.gpu], note)


@cache
def _shipped() -> Sequence[Profile]:
    return tuple(load_profile(name) for name in profile_names())


@cache
def _models_by_name() -> dict[str, str]:
    """Names of known models by what they may be called, in lower case."""
    called: dict[str, str] = {}
    for name, shape in load_models().items():
        called[name.lower()] = name
        hub = _HUB_NAME.match(shape.source)
        if hub is not None:
            called[hub[0].lower()] = name
            called.setdefault(hub[0].split("/")[1].lower(), name)
    return called


def _spellings(names: Iterable[str]) -> list[str]:
    """The names, and for paths their folder, as hub names where it is the hub's cache."""
    found: list[str] = []
    for name in names:
        parts = [part for part in name.lower().split("/") if part]
        if not parts:
            continue
        cached = [part for part in parts if part.startswith(_HUB_FOLDER)]
        found += [part.removeprefix(_HUB_FOLDER).replace("--", "/", 1) for part in cached]
        found += [name.lower(), parts[-1]]
    return found
