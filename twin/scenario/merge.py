"""One document on top of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policy.files import FileError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping


def merged(base: Mapping[str, Any], over: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``base`` with the values of ``over``: mappings key by key, anything else replaced as a whole;
    null takes a key away. A mapping on top of a list changes the list's entries of these names, or
    of these numbers, counted from 0.

    Raises:
        FileError: the list has no such entry.
    """
    out = dict(base)
    for key, value in over.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict):
            out[key] = _onto(out.get(key), value, f"{where}.{key}")
        else:
            out[key] = value
    return out


def _onto(before: object, over: dict[Any, Any], where: str) -> object:
    if isinstance(before, dict):
        return merged(before, over, where)
    if not isinstance(before, list):
        return over
    entries = list(before)
    names = [
        entry.get("name", number) if isinstance(entry, dict) else number
        for number, entry in enumerate(entries)
    ]
    for name, value in over.items():
        number = name if isinstance(name, int) else _index(names, name, where)
        if not 0 <= number < len(entries):
            raise FileError(where, f"there is no entry {number}", hint=f"0 to {len(entries) - 1}")
        if value is None:
            entries[number] = None
        elif isinstance(value, dict):
            entries[number] = _onto(entries[number], value, f"{where}.{name}")
        else:
            entries[number] = value
    return [entry for entry in entries if entry is not None]


def _index(names: list[Any], name: str, where: str) -> int:
    if name not in names:
        raise FileError(where, f"there is no entry {name!r}", hint=nearest(name, map(str, names)))
    return names.index(name)
