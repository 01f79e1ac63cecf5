"""What may be tuned, and between which bounds: the space file.

    schema: 1
    objectives: [goodput]
    constraints: ["slo_attainment.P1 >= 0.95"]
    space:
      tiers.turbo_max_tflop: {low: 10, high: 200, log: true}
      tiers.lend_wait_ms: {around: x2}
      shedding.enabled: [true, false]
      breakers.rules.errors.window_ms: {around: x4}

A key is that of the policy file; entries of a list go by their name or their number. Types and
outermost bounds come from the policy's schema, the middle of ``around`` from the parent.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec import inspect as types

from policy.files import FileError, decode, nearest, read_document
from policy.parameters import Parameters
from twin.scenario.merge import merged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Value = bool | int | float | str
_AROUND = re.compile(r"^x(?P<factor>\d+(\.\d+)?)$")
FACTOR_MOST = 1e6
_NUMBERED = types.ListType | types.VarTupleType
NO_TUNING = frozenset({"schema", "name"})
"""Keys that say what a file is, not what it does."""


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key's range, as the file writes it."""

    low: int | float | None = None
    high: int | float | None = None
    log: bool | None = None
    """As many trials between 1 and 10 as between 10 and 100."""
    around: str = ""
    """``x2``: from half of the parent's value to twice of it, by ratios."""
    choices: Annotated[tuple[Any, ...], Meta(min_length=1)] | None = None


class SpaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    schema: Literal[1]
    space: Annotated[dict[str, Range | tuple[Any, ...]], Meta(min_length=1)]
    objectives: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Knob:
    """One key that is tuned."""

    key: str
    kind: Literal["int", "float", "choice"]
    low: float = 0
    high: float = 0
    """Both may be taken."""
    log: bool = False
    choices: tuple[Any, ...] = ()
    parent: Any = None

    def values(self) -> tuple[Any, ...] | None:
        """All that it can be; None: too many to count."""
        if self.kind == "choice":
            return self.choices
        return tuple(range(int(self.low), int(self.high) + 1)) if self.kind == "int" else None

    def text(self) -> str:
        """For people."""
        if self.kind == "choice":
            return " or ".join(map(_shown, self.choices))
        return f"{self.low:g} to {self.high:g}{', log' if self.log else ''}"


@dataclass(frozen=True, slots=True)
class Space:
    """What is tuned of one parent."""

    parent: Parameters
    knobs: tuple[Knob, ...]
    where: str
    objectives: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()

    @property
    def incumbent(self) -> dict[str, Any]:
        """The parent's own values, by key."""
        return {knob.key: knob.parent for knob in self.knobs}

    def policy(self, values: Mapping[str, Any]) -> Parameters:
        """The parent with these values.

        Raises:
            FileError: together they make no policy, such as a lower bound above an upper one.
        """
        raw = _plain(self.parent)
        over: dict[Any, Any] = {}
        for key, value in values.items():
            *way, last = key.split(".")
            place = over
            for step in way:
                place = place.setdefault(_step(step), {})
            place[_step(last)] = value
        return decode(merged(raw, over, self.where), Parameters, self.where)

    def points(self) -> int | None:
        """How many policies there are in it; None: too many to count."""
        counts = [knob.values() for knob in self.knobs]
        known = [len(values) for values in counts if values is not None]
        return math.prod(known) if len(known) == len(counts) else None


def load_space(path: Path, parent: Parameters) -> Space:
    """Read a space file for a parent.

    Raises:
        FileError: a key that no policy has, a value of the wrong type or out of bounds, or a range
            that leaves the parent out.
    """
    return parse_space(read_document(path), str(path), parent)


def parse_space(raw: Mapping[str, Any], where: str, parent: Parameters) -> Space:
    """The same of a document that is read already."""
    ranges = raw.get("space")
    for key, given in ranges.items() if isinstance(ranges, dict) else ():
        # One by one: errors name the key and what stands there.
        if isinstance(given, dict):
            decode(given, Range, f"{where}: space.{key}", schema=None)
        elif not isinstance(given, list):
            raise FileError(
                where, f"{_shown(given)} is neither a range nor a list of values",
                key=f"space.{key}", hint="write {low: 1, high: 9}, {around: x2} or [1, 2, 5]",
            )  # fmt: skip
    file = decode(raw, SpaceFile, where)
    knobs = tuple(_knob(key, given, where, parent) for key, given in file.space.items())
    return Space(parent, knobs, where, file.objectives, file.constraints)


def tunable(parent: Parameters) -> Iterator[tuple[str, types.Type, Any]]:
    """(key, type, value) of everything in the policy that can be tuned."""
    for key, kind, value, _ in described(parent):
        yield key, kind, value


def described(parent: Parameters) -> Iterator[tuple[str, types.Type, Any, str]]:
    """The same, with what the policy's schema says about it."""
    yield from _leaves("", _schema(), _plain(parent), "")


@cache
def _schema() -> types.Type:
    """Of a policy; to work it out takes longer than all that is asked of it."""
    return types.type_info(Parameters)


def _leaves(
    prefix: str, kind: types.Type, value: Any, about: str
) -> Iterator[tuple[str, types.Type, Any, str]]:
    about = _about(kind) or about
    kind = _bare(kind)
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            if prefix or field.encode_name not in NO_TUNING:
                key = f"{prefix}{field.encode_name}"
                yield from _leaves(f"{key}.", field.type, value[field.encode_name], "")
        return
    if isinstance(kind, types.DictType) and value:
        for name, item in value.items():
            yield from _leaves(f"{prefix}{name}.", kind.value_type, item, about)
        return
    if isinstance(kind, _NUMBERED) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            name = item.get("name", number)
            yield from _leaves(f"{prefix}{name}.", kind.item_type, item, about)
        return
    yield prefix.removesuffix("."), kind, value, about


def _about(kind: types.Type) -> str:
    """What ``Meta(description=...)`` says, the innermost layer first."""
    texts: list[str] = []
    while isinstance(kind, types.Metadata):
        texts.append((kind.extra_json_schema or {}).get("description", ""))
        kind = kind.type
    return " ".join(text for text in reversed(texts) if text)


def _bare(kind: types.Type) -> types.Type:
    return _bare(kind.type) if isinstance(kind, types.Metadata) else kind


def _knob(key: str, given: Range | tuple[Any, ...], where: str, parent: Parameters) -> Knob:
    place = f"space.{key}"
    known = {name: (kind, value) for name, kind, value in tunable(parent)}
    if key not in known:
        raise FileError(where, "no policy has this key", key=place, hint=nearest(key, known))
    kind, value = known[key]
    if isinstance(given, tuple):
        given = Range(choices=given)
    if given.choices is not None:
        if given != Range(choices=given.choices):
            raise FileError(where, "choices go without low, high, log and around", key=place)
        knob = Knob(key, "choice", choices=tuple(_plain(given.choices)), parent=value)
    elif isinstance(kind, types.IntType | types.FloatType):
        knob = _ranged(key, kind, given, where, value)
    else:
        raise FileError(
            where, "is no number: give the list of its values to be tried", key=place,
            hint=f"it is {_shown(value)} now",
        )  # fmt: skip
    _check(knob, where, parent)
    return knob


def _ranged(
    key: str, kind: types.IntType | types.FloatType, given: Range, where: str, value: Any
) -> Knob:
    place = f"space.{key}"
    least, most = kind.ge, kind.le
    whole = isinstance(kind, types.IntType)
    low, high, log = given.low, given.high, bool(given.log)
    if given.around:
        if low is not None or high is not None:
            raise FileError(where, "give either around, or low and high", key=place)
        low, high = _around(given.around, value, whole, where, place)
        log = given.log is None or given.log
        low = low if least is None else max(low, least)
        high = high if most is None else min(high, most)
    low = least if low is None else low
    high = most if high is None else high
    for name, bound in (("low", low), ("high", high)):
        if bound is None:
            raise FileError(where, f"has no bound of its own: give {name}", key=place)
        if not math.isfinite(bound):
            raise FileError(where, f"{name} {bound} is no number to draw from", key=place)
        if whole and bound != int(bound):
            raise FileError(where, f"is a whole number, got {name} {bound}", key=place)
        if (least is not None and bound < least) or (most is not None and bound > most):
            raise FileError(
                where, f"{name} {bound:g} lies outside what a policy can have", key=place,
                hint=f"{_end(least)} to {_end(most)}",
            )  # fmt: skip
    assert low is not None
    assert high is not None
    if low > high:
        raise FileError(where, f"low {low:g} lies above high {high:g}", key=place)
    if log and low <= 0:
        raise FileError(where, f"log: low must lie above 0, got {low:g}", key=place)
    if not low <= value <= high:
        raise FileError(
            where, f"{low:g} to {high:g} leaves out the parent's own value, {value}: "
            "the parent is always the first trial", key=place, hint="widen the range",
        )  # fmt: skip
    return Knob(key, "int" if whole else "float", low, high, log, parent=value)


def _around(text: str, value: Any, whole: bool, where: str, place: str) -> tuple[float, float]:
    match = _AROUND.match(text)
    factor = float(match["factor"]) if match else 0.0
    if not 1 < factor <= FACTOR_MOST:
        raise FileError(
            where, f"around: {text!r} is not understood", key=place, hint="write x2, or x1.5"
        )
    if not value > 0:
        raise FileError(
            where, f"around: the parent's value is {value}, which has no half and no double",
            key=place, hint="give low and high",
        )  # fmt: skip
    low, high = value / factor, value * factor
    return (max(1, math.floor(low)), math.ceil(high)) if whole else (low, high)


def _check(knob: Knob, where: str, parent: Parameters) -> None:
    """Every choice, and both ends, are values that a policy can have."""
    place = f"space.{knob.key}"
    if knob.kind == "choice":
        if knob.parent not in knob.choices:
            raise FileError(
                where, f"the parent's own value, {_shown(knob.parent)}, is not among the choices: "
                "the parent is always the first trial", key=place, hint="add it",
            )  # fmt: skip
        alone = Space(parent, (knob,), where)
        for choice in knob.choices:
            if choice != knob.parent:
                _check_type(alone, knob.key, choice, where)


def _check_type(space: Space, key: str, choice: Any, where: str) -> None:
    try:
        space.policy({key: choice})
    except FileError as error:
        # What does not fit the parent's other values may fit those of a trial: only the value's
        # own type and bounds count here, and errors of these name the key itself.
        if error.key.split(".")[-1].partition("[")[0] in key.split("."):
            raise FileError(where, str(error).partition(f"{error.key}: ")[2],
                            key=f"space.{key}", value=choice) from error  # fmt: skip


def _plain(value: Any) -> Any:
    """As JSON has it: lists, no tuples."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _step(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _end(bound: float | None) -> str:
    return "any" if bound is None else f"{bound:g}"
