"""Local processes are a fleet like any other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.fleet.conformance import CHECKS, Check, run_check
from tests.fleet.support import LocalBench, file_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_a_fleet(check: Check, tmp_path: Path) -> None:
    """Two that serve, a warm standby, and one that is started when it is asked for."""
    file = file_of(2, [{"warm": True}, {"warm": False}])
    bench = LocalBench(tmp_path / "fleet", file, (0, 1), (2, 3))
    asyncio.run(run_check(check, lambda: bench))
