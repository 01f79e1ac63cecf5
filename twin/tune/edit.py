"""A policy file with some values changed, and everything else as its author left it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from policy.files import FileError, parse_policy
from policy.parameters import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policy.parameters import Parameters


def edited(
    text: str, wanted: Parameters, changes: Mapping[str, Any], before: Mapping[str, Any]
) -> str:
    """The policy file ``text`` with ``changes`` made, so that it says ``wanted``: comments, order
    and all other lines stay. A file that cannot be edited so is written anew, with the comments of
    ``policy.parameters.render``.

    Args:
        changes: values by dotted key; entries of lists by name or number.
        before: what they were, for those that the file does not write out.
    """
    try:
        for key, value in changes.items():
            text = _set(text, key.split("."), value, before.get(key))
        if parse_policy(text, "edited") == wanted:
            return text
    except (FileError, yaml.YAMLError, _CannotEdit):
        pass
    return render(wanted, comments=True)


def diff(before: str, after: str, old: str, new: str) -> str:
    """A unified diff with one line of context."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), old, new, lineterm="", n=1
    )
    return "\n".join(lines)


class _CannotEdit(Exception):
    pass


def _set(text: str, path: Sequence[str], value: Any, before: Any) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        raise _CannotEdit
    node: yaml.Node = root
    rest = list(path)
    while rest:
        found: yaml.Node | None = _child(node, rest[0])
        if found is None:
            break
        node = found
        rest.pop(0)
    shown = _flow(value)
    if not rest:
        begin, end = node.start_mark.index, node.end_mark.index
        if node.start_mark.line != node.end_mark.line:
            raise _CannotEdit  # a block of several lines
        return text[:begin] + shown + text[end:]
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise _CannotEdit
    if node.flow_style:
        at = node.start_mark.index + 1
        inner = shown if len(rest) == 1 else _nested(rest[1:], shown)
        return f"{text[:at]}{rest[0]}: {inner}, {text[at:]}"
    return _inserted(text, node, rest, f"{shown}  # {_flow(before)} before")


def _inserted(text: str, section: yaml.MappingNode, rest: Sequence[str], shown: str) -> str:
    """As the section's last lines, indented like its others."""
    column = section.start_mark.column
    lines = [f"{' ' * (column + 2 * depth)}{name}:" for depth, name in enumerate(rest)]
    lines[-1] += f" {shown}"
    end = text.find("\n", _last_leaf(section).end_mark.index)
    head, tail = (text + "\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return head + "\n".join(lines) + "\n" + tail


def _last_leaf(node: yaml.Node) -> yaml.Node:
    """What stands last in it. A block's own end lies behind the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _last_leaf(last[1] if isinstance(last, tuple) else last)
    return node


def _child(node: Any, name: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == name:
                return value
        return None
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            own = _child(item, "name") if isinstance(item, yaml.MappingNode) else None
            if name == (own.value if own is not None else str(number)):
                return item
        raise _CannotEdit
    return None


def _nested(names: Sequence[str], shown: str) -> str:
    for name in reversed(names):
        shown = f"{{{name}: {shown}}}"
    return shown


def _flow(value: Any) -> str:
    """JSON is YAML."""
    return msgspec.json.encode(value).decode() if not _plain_word(value) else value


def _plain_word(value: Any) -> bool:
    return isinstance(value, str) and value.replace("_", "a").replace("-", "a").isalnum() and (
        value[0].isalpha() and value.lower() not in ("true", "false", "null", "yes", "no", "on",
                                                     "off")
    )  # fmt: skip
