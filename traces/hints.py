"""What a user probably meant: hints for errors in specifications and map files."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `(?P<path>.*)`)?$")
_KEY = re.compile(r"\.([A-Za-z_]\w*)")


def explain(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """The text of an error of converting to `kind`; at an unknown key, with the known ones."""
    found = _UNKNOWN.match(str(error))
    if found is None:
        return str(error)
    path = found["path"] or "$"
    place = path.removeprefix("$").removeprefix(".")
    where = f" in {place}" if place else ""
    return f"unknown key {found['name']!r}{where}; {nearest(found['name'], _keys(kind, path))}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which of the `known` names is close to `name`, and which there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}known: {', '.join(names)}"


def _keys(kind: Any, path: str) -> tuple[str, ...]:
    """The keys of the struct at `path` (as `$.streams[0].arrivals`) inside `kind`."""
    struct = _struct_in(kind)
    for key in _KEY.findall(path):
        struct = None if struct is None else _struct_in(get_type_hints(struct).get(key))
    return () if struct is None else tuple(struct.__struct_encode_fields__)


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """The struct inside an optional, list or dict type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    inner = (_struct_in(part) for part in get_args(kind))
    return next((struct for struct in inner if struct is not None), None)
