"""Where the public traces and step-time tables lie, for plain ``pytest`` as for ``make``; and how
often a test may be tried."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[1].parent / "shared"
BY_THE_CLOCK = ("chains", "controller", "docs", "fleet", "live", "notebooks", "ui")
"""Rooms whose tests start processes and wait for them by the clock."""
MORE_TRIES = 2
"""For those: on two shared cores a process may get no turn for a second. A test that needed them is
named at the end of the run; all others have one."""

if (SHARED / "traces").is_dir():
    os.environ.setdefault("TWINKEEL_DATA", str(SHARED))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in BY_THE_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=MORE_TRIES))
