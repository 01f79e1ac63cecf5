"""What waits for the store of chains' checkpoints."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from controller.store.chains import ChainStore
from controller.store.checkpoints import CheckpointsError, NewCheckpoint, SqliteCheckpoints

if TYPE_CHECKING:
    from pathlib import Path

NEW = NewCheckpoint("ann", "c", "s", "r", b"{}")


class Slow(SqliteCheckpoints):
    """Answers once it is let."""

    let = threading.Event()

    def save(self, new: NewCheckpoint) -> str:
        self.let.wait(10)
        return super().save(new)


def test_a_slow_store_does_not_hold_steps_up(tmp_path: Path) -> None:
    async def main(store: ChainStore) -> None:
        began_s = time.monotonic()
        asked: list[Any] = [store.save(NEW, 0.2), store.save(NEW, 60), store.chain("ann", "c")]
        came = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - began_s < 3
        assert all(isinstance(each, CheckpointsError) for each in came), came
        slow.let.set()
        kept = await store.save(NEW)  # what had begun is done
        (row,) = await store.chain("ann", "c")
        assert row.id == kept

    slow = Slow(tmp_path / "c.sqlite")
    with closing(ChainStore(slow)) as store:
        asyncio.run(main(store))
    with pytest.raises(CheckpointsError):
        slow.chain("ann", "c")
