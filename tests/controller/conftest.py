"""Two served twins for each worker, and controllers that are audited when a test ends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.controller.processes import Controllers, Twin, twin_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def served_twins() -> Iterator[list[Twin]]:
    """Two replicas of an 8-billion-parameter model, as on H100s."""
    with ExitStack() as stack:
        yield [stack.enter_context(twin_process()) for _ in range(2)]


@pytest.fixture
def twins(served_twins: list[Twin]) -> Iterator[list[Twin]]:
    """The same, healthy before and after."""
    yield served_twins
    for twin in served_twins:
        twin.heal()


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    """Starts controllers. When the test ends, their logs are replayed: the decisions are the same,
    byte for byte."""
    started = Controllers(tmp_path)
    yield started
    started.close()
