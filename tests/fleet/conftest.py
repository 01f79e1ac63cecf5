"""What the fleet's tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pynvml
import pytest

from tests.fleet.fakes import FakeCards, in_this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[FakeCards]:
    """Two cards, which pynvml finds in this process and, with ``cards.environ``, in others."""
    made = FakeCards(tmp_path)
    with in_this_process(made):
        yield made


@pytest.fixture
def attached(cards: FakeCards) -> Callable[[str], bool]:
    """Whether this process keeps a card from being reset."""
    return lambda uuid: bool(pynvml.nvmlLib.fake_attached(uuid.encode()))
