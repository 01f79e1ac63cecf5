"""What each package says of itself: a docstring, its public names, the files that are in it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
TOP = ("policy", "twin", "controller", "traces", "dashboards")
FILES_MOST = 8
"""Up to so many files need no list in the package's docstring."""
EXTRAS = (
    "aiohttp", "langgraph", "matplotlib", "opentelemetry", "optuna", "playwright",
    "prometheus_client", "pynvml", "ray", "redis", "safetensors", "sklearn", "statsmodels",
    "streamlit", "torch", "uvloop",
)  # fmt: skip
"""Modules of the extras: the command line is there without them."""
SLOW = ("pandas", "plotly", "rich", "scipy")
"""Modules that are there, but are imported only by what needs them."""


def packages() -> list[str]:
    """Every package, by its full name."""
    return [
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in TOP
        for path in sorted((ROOT / top).rglob("__init__.py"))
        if "vllm_plugin" not in path.parts  # a distribution of its own
    ]


def folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))


def doc_of(package: str) -> str:
    source = (folder_of(package) / "__init__.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def public(package: str) -> list[tuple[ModuleType, str]]:
    module = importlib.import_module(package)
    return [(module, name) for name in getattr(module, "__all__", ())]


@pytest.mark.parametrize("package", packages())
def test_a_package_says_what_it_is(package: str) -> None:
    assert doc_of(package), f"{package} has no docstring"


@pytest.mark.parametrize("package", packages())
def test_a_large_folder_is_listed_file_by_file(package: str) -> None:
    names = [
        path.stem for path in folder_of(package).glob("*.py") if not path.stem.startswith("__")
    ]
    if len(names) <= FILES_MOST:
        return
    doc = doc_of(package).replace("`", " ").replace(".", " ").replace(",", " ").replace(":", " ")
    words = set(doc.replace(";", " ").replace("(", " ").replace(")", " ").split())
    assert not [name for name in sorted(names) if name not in words]


@pytest.mark.parametrize("package", packages())
def test_public_names_are_there_and_documented(package: str) -> None:
    for module, name in public(package):
        assert hasattr(module, name), f"{package}.{name} is not there"
        value = getattr(module, name)
        if callable(value) and hasattr(value, "__module__"):
            doc = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
            assert doc, f"{package}.{name} has no docstring"


def test_every_event_and_decision_is_public() -> None:
    import policy

    kinds = (*policy.Event.__args__, *policy.Decision.__args__)
    assert not [kind.__name__ for kind in kinds if kind.__name__ not in policy.__all__]


def test_the_command_line_needs_no_extra_and_nothing_slow() -> None:
    """All of it is imported, but no library of an extra, and none that takes long."""
    script = (
        f"import sys\nfor name in {EXTRAS!r}: sys.modules[name] = None\n"
        f"import twinkeel\nprint(*(name for name in {SLOW!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
