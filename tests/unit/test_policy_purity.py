"""What decides reads no clock, file, socket, random source or environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import policy

ROOT = Path(policy.__file__).parent
ROOMS = ("forecast", "signals", "files")
"""The parts that may do more; the rest of the policy never imports them."""
ALLOWED = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "hashlib", "heapq", "hmac",
    "itertools", "math", "msgspec", "policy", "re", "struct", "typing",
}  # fmt: skip


def pure_modules() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).with_suffix("").parts[0] not in ROOMS
    ]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", pure_modules(), ids=lambda path: path.stem)
def test_only_pure_modules_are_imported(path: Path) -> None:
    for name in imports_of(path):
        assert name.split(".")[0] in ALLOWED, f"{path.name} imports {name}"
        if path.name != "__init__.py":
            assert not name.startswith(tuple(f"policy.{room}" for room in ROOMS))


@pytest.mark.parametrize("path", pure_modules(), ids=lambda path: path.stem)
def test_nothing_is_read_through_builtins(path: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "input", "eval", "exec", "hash", "id", "__import__"}


def test_building_a_policy_loads_no_world() -> None:
    code = (
        "import sys; from policy.compose import build_policy;"
        "from policy.parameters import Parameters; build_policy(Parameters());"
        "bad = {'asyncio', 'numpy', 'simpy', 'aiohttp', 'torch', 'yaml', 'random', 'twin'};"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert done.stdout.strip() == "[]"


def test_the_package_exports_what_it_lists() -> None:
    assert policy.__all__ == sorted(policy.__all__)
    public = {name for name in vars(policy) if not name.startswith("_")}
    modules = {path.stem for path in ROOT.iterdir()}
    assert public - modules == set(policy.__all__) - modules
