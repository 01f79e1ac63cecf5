"""The runbook has every alert that the code can raise, and none that it cannot."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
RULES = ROOT / "controller" / "deploy" / "prometheus" / "rules.yaml"
HANDED_ON = ("key", "name")
"""Parameters of functions that only pass a key on."""


def parsed(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))


def prefix(node: ast.expr) -> str | None:
    """What a text begins with, up to the first part that is filled in; None: it is no text here."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        return str(node.values[0].value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return prefix(node.func.value)  # f"gpu {uuid}".strip()
    return None


@cache
def assigned(tree: ast.Module) -> dict[str, str]:
    """Names that are given a text somewhere in a module."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = prefix(node.value)
            if text:
                found[node.targets[0].id] = text
    return found


def called(node: ast.Call) -> str:
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def said(tree: ast.Module, node: ast.expr) -> str | None:
    text = prefix(node)
    if text is None and isinstance(node, ast.Name):
        return assigned(tree).get(node.id)
    return text


@cache
def policy_keys() -> dict[str, str]:
    """Where each key, or what it begins with, is made."""
    found: dict[str, str] = {}
    for path, tree in parsed("policy"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            of = {"Alert": 0, "alert": 1, "raised": 1}.get(called(node))
            if of is None or len(node.args) <= of or isinstance(node.args[of], ast.Starred):
                continue
            key = said(tree, node.args[of])
            if key is None:
                assert getattr(node.args[of], "id", "") in HANDED_ON, f"{path}:{node.lineno}"
                continue
            found[key] = f"{path.name}:{node.lineno}"
    return found


@cache
def trouble_keys() -> dict[str, str]:
    """The same of what the controller says of itself, without the word in front of it."""
    found: dict[str, str] = {}
    for path, tree in parsed("controller"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if called(node) in ("trouble", "_trouble") and len(node.args) == 2:
                keys: list[ast.expr] = node.args[:1]
            else:  # partial(driver.trouble, "key"), call_soon_threadsafe(driver.trouble, "key", x)
                keys = [after for before, after in pairwise(node.args) if hands_on(before)]
            for each in keys:
                key = said(tree, each)
                if key is None:
                    assert getattr(each, "id", "") in HANDED_ON, f"{path}:{node.lineno}"
                    continue
                found[key] = f"{path.name}:{node.lineno}"
            if called(node) == "in_loop" or any(passes_on(each) for each in node.args):
                keys_in = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found |= {str(key): f"{path.name}:{node.lineno}" for key in keys_in}
    return found


def hands_on(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "trouble"


def passes_on(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "_trouble_in_loop"


def headings() -> set[str]:
    """The keys in the headings."""
    lines = [line for line in RUNBOOK.splitlines() if line.startswith("### ")]
    return {key for line in lines for key in re.findall(r"`([^`]+)`", line)}


def alike(key: str, heading: str) -> bool:
    """A key that is filled in further has words in capitals in its heading."""
    if not key.endswith(" "):
        return key == heading
    rest = heading.removeprefix(key)
    return rest != heading and rest.split()[0].isupper()


def test_the_code_was_read() -> None:
    assert {"replica ", "breaker ", "rollout ", "drift ", "canary"} <= set(policy_keys())
    troubles = set(trouble_keys())
    assert {"log", "trace", "store", "kept answers", "samples", "chains", "forecast"} <= troubles
    assert {"gpu ", "slot ", "reload ", "kubernetes api", "shadow", "embeddings"} <= troubles


def test_every_alert_of_the_code_is_there() -> None:
    keys = policy_keys() | {f"controller {key}": at for key, at in trouble_keys().items()}
    missing = {
        key: at for key, at in keys.items() if not any(alike(key, each) for each in headings())
    }
    assert not missing


def test_none_is_there_that_the_code_cannot_raise() -> None:
    keys = [*policy_keys(), *(f"controller {key}" for key in trouble_keys())]
    stale = {each for each in headings() if not any(alike(key, each) for key in keys)}
    assert not stale


@pytest.mark.parametrize("name", ["_alert", "_fail", "_undo"])
def test_every_cause_of_a_rollout_is_there(name: str) -> None:
    """Of texts that are put together, as far as they are fixed."""
    tree = ast.parse((ROOT / "policy" / "rollout.py").read_text(encoding="utf-8"))
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and called(each) == name]
    of = {"_alert": 1, "_fail": 1, "_undo": 2}[name]
    causes = {text for call in calls if (text := prefix(call.args[of]))}
    assert causes
    assert not {cause for cause in causes if cause.strip(": ") not in RUNBOOK}


def test_every_reason_of_health_is_there() -> None:
    tree = ast.parse((ROOT / "policy" / "health.py").read_text(encoding="utf-8"))
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    reasons = {
        str(call.args[2].value)
        for call in calls
        if called(call) in ("_detected", "_eject")
        if isinstance(call.args[2], ast.Constant)
    }
    assert {"failures", "slow", "silent"} <= reasons
    assert not {reason for reason in reasons if f"`ejected: {reason}`" not in RUNBOOK}


def test_every_prometheus_rule_is_there_and_no_other() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set(re.findall(r"^\| `(Twinkeel\w+)`", RUNBOOK, re.MULTILINE)) == rules
