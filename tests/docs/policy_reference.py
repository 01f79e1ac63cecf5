"""Writes ``docs/policy-reference.md`` from the policy file's schema: every key, from its own words.

``python -m tests.docs.policy_reference`` writes it; a test says when it is out of date.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Meta, Struct

from policy.parameters import Parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "policy-reference.md"

HEAD = """\
# Every key of the policy file

Made from the schema in `policy/parameters/` by `python -m tests.docs.policy_reference`: change that
and not this page. How a file is written, and what to change first: [policy.md](policy.md). In a
terminal: `twinkeel policy show --defaults`, and of a preset `twinkeel policy show throughput`.

The defaults are those of the preset `stable`. Ranges are checked when a file is read. Some keys are
also checked against each other, and the error says which. A *count* is a whole number: there are no
fractions in the policy file, so shares are per mille and small things are thousandths.
"""

UNITS: tuple[tuple[str, str], ...] = (
    ("_steps_milli", "1/1000 step"),
    ("bytes_per_token_milli", "1/1000 byte"),
    ("entropy_mean_zero_milli", "1/1000 nat"),
    ("entropy_worst_zero_milli", "1/1000 nat"),
    ("bytes_per_token_most", "bytes"),
    ("user_per_s", "1/s"),
    ("session_per_s", "1/s"),
    ("model_per_s", "1/s"),
    ("_permille", "per mille"),
    ("_tflop", "TFLOP"),
    ("_tokens", "tokens"),
    ("_ms", "ms"),
    ("_s", "s"),
)
"""By what a key ends in; the unit stands last in a name."""


class Key(typing.NamedTuple):
    """One line of the page."""

    name: str
    type: str
    range: str
    default: str
    unit: str
    why: str


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    top, parts = _split(Parameters)
    lines += ["## The file itself", "", *_table(top), ""]
    for name, section in parts:
        lines += _section(name, section)
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def keys() -> list[str]:
    """Every key by its path, such as ``tiers.turbo_max_tflop``."""
    return list(_paths(Parameters, ""))


def _paths(section: type[Struct], before: str) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        path = f"{before}{field.encode_name}"
        yield path
        inner = _structs(field.type)
        if inner:
            yield from _paths(inner[0], f"{path}.")


def _section(name: str, section: type[Struct]) -> Iterator[str]:
    top, parts = _split(section)
    yield from (f"## `{name}`", "", _doc(section), "", *_table(top), "")
    yield from _parts(name, parts)


def _parts(name: str, parts: list[tuple[str, type[Struct]]]) -> Iterator[str]:
    """What stands inside a section: an entry of a list or of a mapping has a table of its own."""
    told: set[type[Struct]] = set()
    for key, inner in parts:
        if inner in told:
            continue
        told.add(inner)
        names = [f"`{name}.{each}`" for each, other in parts if other is inner]
        keys_of, further = _split(inner)
        yield from (f"### {' and '.join(names)}: {_doc(inner)}", "", *_table(keys_of), "")
        yield from _parts(f"{name}.{key}", further)


def _split(section: type[Struct]) -> tuple[list[Key], list[tuple[str, type[Struct]]]]:
    """A section's keys, and the parts that have keys of their own."""
    found: list[Key] = []
    parts: list[tuple[str, type[Struct]]] = []
    for field in msgspec.structs.fields(section):
        inner = _structs(field.type)
        if inner:
            parts.append((field.encode_name, inner[0]))
        if not (isinstance(field.type, type) and issubclass(field.type, Struct)):
            found.append(_key(field))
    return found, parts


def _key(field: msgspec.structs.FieldInfo) -> Key:
    metas = [meta for meta in getattr(field.type, "__metadata__", ()) if isinstance(meta, Meta)]
    why = " ".join(meta.description for meta in metas if meta.description)
    return Key(
        field.encode_name, _type(field.type), _range(metas), _default(field),
        _unit(field.encode_name), why,
    )  # fmt: skip


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(args[0])
    if origin is Literal:
        return " or ".join(str(each) for each in args)
    if origin is tuple:
        return f"list of {_type(args[0])}"
    if origin is dict:
        return f"by name: {_type(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation.__name__.lower()
    return {int: "count", bool: "true or false", str: "text"}[annotation]


def _range(metas: list[Meta]) -> str:
    said: list[str] = []
    for meta in metas:
        if meta.ge is not None or meta.le is not None:
            said.append(f"{_number(meta.ge)} to {_number(meta.le)}")
        if meta.min_length is not None:
            said.append(f"from {meta.min_length} letters")
        if meta.max_length is not None:
            said.append(f"at most {meta.max_length} long")
        if meta.pattern is not None:
            said.append(f"`{meta.pattern}`")
    return ", ".join(said)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "must be said"
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = typing.cast("Any", field.default_factory)()
    if isinstance(value, tuple) and value and isinstance(value[0], Struct):
        return "the rules " + ", ".join(str(each.name) for each in value)  # type: ignore[attr-defined]
    if isinstance(value, Struct):
        return "as below"
    text = msgspec.json.encode(value).decode()
    return text if text in {"[]", "{}"} else text.strip('"') or "empty"


def _unit(name: str) -> str:
    return next((unit for end, unit in UNITS if name.endswith(end)), "")


def _structs(annotation: Any) -> list[type[Struct]]:
    """The sections that a type holds."""
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return [annotation]
    return [each for arg in typing.get_args(annotation) for each in _structs(arg)]


def _doc(section: type[Struct]) -> str:
    return " ".join((section.__doc__ or "").split())


def _table(rows: list[Key]) -> Iterator[str]:
    if not rows:
        return
    yield "| key | type | range | default | unit | what, and why |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = (f"`{row.name}`", row.type, row.range, row.default, row.unit, row.why)
        yield "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(keys())} keys")
