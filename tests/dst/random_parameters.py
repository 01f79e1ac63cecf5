"""A valid policy file, drawn at random: defaults, most of them, and some numbers far from them.

It reads the ranges off the parameters themselves, so a new key takes part without being named here.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from policy.parameters import Parameters

if TYPE_CHECKING:
    import random

KEEP = 0.7
"""Share of the keys that keep their default."""
FACTORS = (0, 1, 2, 5, 20)
"""Over 5: how many times the default a number becomes."""
TIMES = (5, 10, 50, 200, 1000, 2000)
"""Over 1000, for what is measured in time: a run of seconds should see minutes pass."""
TRIES = 50


def random_parameters(rng: random.Random, **fixed: Any) -> Parameters:
    """``fixed`` overrides what is drawn, by section and key."""
    drawn: dict[str, Any] = {"schema": 1, "name": "random", "discipline": "tiered"}
    for field in _fields(Parameters):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            drawn[field.name] = _section(rng, field.type, fixed.get(field.name, {}))
    return msgspec.convert(drawn, Parameters)


def _section(
    rng: random.Random, kind: type[msgspec.Struct], fixed: dict[str, Any]
) -> dict[str, Any]:
    for _ in range(TRIES):
        drawn = _drawn(rng, kind()) | fixed
        try:
            msgspec.convert(drawn, kind)
        except msgspec.ValidationError:
            continue  # two numbers that do not go together
        return drawn
    raise AssertionError(f"no valid {kind.__name__} in {TRIES} tries")


def _drawn(rng: random.Random, section: msgspec.Struct) -> dict[str, Any]:
    """The section as plain values, some of them changed."""
    drawn: dict[str, Any] = {}
    for field in _fields(type(section)):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            drawn[field.name] = _drawn(rng, value)
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            drawn[field.name] = [_drawn(rng, item) for item in value]
        elif rng.random() < (0.8 if field.name == "enabled" else KEEP):
            drawn[field.name] = msgspec.to_builtins(value)
        else:
            drawn[field.name] = _changed(rng, field.name, value, field.type)
    return drawn


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Resolving their types takes longer than a whole run does."""
    return msgspec.structs.fields(kind)


def _changed(rng: random.Random, name: str, value: Any, hint: Any) -> Any:
    if isinstance(value, bool):
        return not value
    plain = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if get_origin(plain) is Literal:
        return rng.choice(get_args(plain))
    if not isinstance(value, int):
        return msgspec.to_builtins(value)
    low, high = _range(hint)
    if name.endswith(("_ms", "_s")):
        wanted = value * rng.choice(TIMES) // 1000
    else:
        wanted = value * rng.choice(FACTORS) // 5
    return min(max(wanted, low), high)


def _range(hint: Any) -> tuple[int, int]:
    low, high = 0, 1 << 40
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, Meta):
            low = low if meta.ge is None else int(meta.ge)
            high = high if meta.le is None else int(meta.le)
    return low, high
