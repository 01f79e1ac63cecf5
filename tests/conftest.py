"""What is so for every test: where the public traces and step-time tables lie, for plain ``pytest``
as for ``make``, how often it may be tried, and that SIGINT is heard."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SHARED = Path(__file__).parents[1].parent / "shared"
BY_THE_CLOCK = ("chains", "controller", "docs", "fleet", "live", "notebooks", "ui")
"""Rooms whose tests start processes and wait for them by the clock."""
MORE_TRIES = 2
"""For those: on two shared cores a process may get no turn for a second. A test that needed them is
named at the end of the run; all others have one."""

if (SHARED / "traces").is_dir():
    os.environ.setdefault("TWINKEEL_DATA", str(SHARED))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell leaves it so in what it runs in the background, and what tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How quickly examples are drawn says more of the machine than of what is tested.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in BY_THE_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=MORE_TRIES))
