"""The policy file as YAML, every key with its unit, its range, its default and why."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.parameters.whole import Parameters


def render(parameters: Parameters, comments: bool = True) -> str:
    """The policy file as YAML, every key with its unit and why."""
    return "\n".join(_rendered(parameters, "", comments)) + "\n"


def _rendered(section: msgspec.Struct, indent: str, comments: bool) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        value: object = getattr(section, field.name)
        if isinstance(value, Struct):
            yield ""
            if comments:
                doc = " ".join((type(value).__doc__ or "").split())
                yield from _comment(doc, indent)
            yield f"{indent}{field.encode_name}:"
            yield from _rendered(value, indent + "  ", comments)
            continue
        if comments:
            yield from _comment(_described(field), indent)
        items = _sections(value)
        if items:
            yield f"{indent}{field.encode_name}:"
            for key, item in items:
                lines = list(_rendered(item, indent + "    ", comments=False))
                if key == "-":
                    lines[0] = f"{indent}  - {lines[0].strip()}"
                else:
                    yield f"{indent}  {key}"
                yield from lines
            continue
        yield f"{indent}{field.encode_name}: {_scalar(value)}"


def _sections(value: object) -> list[tuple[str, msgspec.Struct]]:
    """The parts of a list or a mapping of sections, each with what stands before it."""
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return [(f"{_scalar(key)}:", item) for key, item in pairs if isinstance(item, Struct)]
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return [("-", item) for item in items if isinstance(item, Struct)]
    return []


def _described(field: msgspec.structs.FieldInfo) -> str:
    metas = [meta for meta in _metas(field.type) if isinstance(meta, Meta)]
    text = " ".join(meta.description for meta in metas if meta.description)
    bounds = [(meta.ge, meta.le) for meta in metas if meta.ge is not None]
    if bounds:
        low, high = bounds[-1]
        text += f" [{low}..{high}]" if high is not None else f" [{low}..]"
    default = field.default
    if default is not msgspec.NODEFAULT and not _sections(default):
        text += f" Default {_scalar(default)}."
    return text


def _metas(annotation: Any) -> tuple[object, ...]:
    return getattr(annotation, "__metadata__", ())


def _comment(text: str, indent: str) -> Iterator[str]:
    line = f"{indent}#"
    for word in text.split():
        if len(line) + 1 + len(word) > 100:
            yield line
            line = f"{indent}#"
        line += f" {word}"
    yield line


def _scalar(value: object) -> str:
    """JSON is YAML; plain words need no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w-]*", value):
        return value
    return msgspec.json.encode(value, order="sorted").decode()
