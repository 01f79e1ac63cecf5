"""A checkpointer for LangGraph over the same stores: a thread is a chain, in SQLite or Redis.

graph = builder.compile(checkpointer=LangGraphSaver(open_checkpoints("chains.sqlite")))
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from typing import TYPE_CHECKING, Any

import msgspec
from langgraph.checkpoint import base
from langgraph.checkpoint.base import CheckpointTuple, get_checkpoint_id

from controller.store.checkpoints import NewCheckpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.runnables import RunnableConfig

    from controller.store.checkpoints import Checkpoint, Checkpoints

    Rows = dict[tuple[str, ...], Checkpoint]

KIND = "application/vnd.twinkeel.langgraph"
NS, _SEPARATOR = "checkpoint_ns", "\n"
Name = tuple[str, ...]
Writes = list[tuple[int, str, str, tuple[str, bytes]]]


class LangGraphSaver(base.BaseCheckpointSaver[int]):
    """Keeps graphs' states; safe from several threads. A store that fails raises CheckpointsError.

    Args:
        store: open; it stays the caller's to close.
        owner: whose threads these are, so that two users' may have the same name.
    """

    def __init__(self, store: Checkpoints, owner: str = "") -> None:
        super().__init__()
        self._store = store
        self._owner = f"langgraph/{owner}"
        self._lock = threading.Lock()

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        here = {**config["configurable"], NS: config["configurable"].get(NS, "")}
        return next(self.list({"configurable": here}, limit=1), None)

    def list(self, config: Any, **how: Any) -> Iterator[CheckpointTuple]:
        filter, before, limit = (how.get(key) for key in ("filter", "before", "limit"))
        if config is None:
            raise ValueError("list(None): name a thread, since the store finds it by its name only")
        thread, space = config["configurable"]["thread_id"], config["configurable"].get(NS)
        wanted, end = get_checkpoint_id(config), get_checkpoint_id(before) if before else None
        rows, given = self._rows(thread), 0
        for name in sorted(rows, key=lambda name: name[2], reverse=True):
            if name[0] != "c" or space not in (None, name[1]) or wanted not in (None, name[2]):
                continue
            one = self._tuple(thread, rows, name) if end is None or name[2] < end else None
            wants = (filter or {}).items()
            if one is None or any(one.metadata.get(key) != value for key, value in wants):
                continue
            if given == limit:
                return
            given += 1
            yield one

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> RunnableConfig:
        thread, space = _place(config)
        about = base.get_checkpoint_metadata(config, metadata)
        parts = [self.serde.dumps_typed(checkpoint), self.serde.dumps_typed(about)]
        name = ("c", space, checkpoint["id"])
        self._save(thread, name, get_checkpoint_id(config) or "", parts)
        return _config(thread, *name[1:])

    def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        thread, space = _place(config)
        at, dumps = base.WRITES_IDX_MAP, self.serde.dumps_typed
        parts = [(at.get(w[0], n), task_path, w[0], dumps(w[1])) for n, w in enumerate(writes)]
        name = ("w", space, get_checkpoint_id(config) or "", task_id, secrets.token_hex(8))
        self._save(thread, name, "", parts)

    def delete_thread(self, thread_id: str) -> None:
        with self._lock:
            self._store.forget(self._owner, thread_id)

    async def aget_tuple(self, *given: Any, **named: Any) -> CheckpointTuple | None:
        return await asyncio.to_thread(self.get_tuple, *given, **named)

    async def alist(self, *given: Any, **named: Any) -> AsyncIterator[CheckpointTuple]:
        for one in await asyncio.to_thread(lambda: [*self.list(*given, **named)]):
            yield one

    async def aput(self, *given: Any, **named: Any) -> RunnableConfig:
        return await asyncio.to_thread(self.put, *given, **named)

    async def aput_writes(self, *given: Any, **named: Any) -> None:
        await asyncio.to_thread(self.put_writes, *given, **named)

    async def adelete_thread(self, thread_id: str) -> None:
        await asyncio.to_thread(self.delete_thread, thread_id)

    def _save(self, thread: str, name: Name, parent: str, parts: Any) -> None:
        answer = msgspec.msgpack.encode(parts)
        row = NewCheckpoint(self._owner, thread, _SEPARATOR.join(name), parent, answer, 200, KIND)
        with self._lock:
            self._store.save(row)

    def _rows(self, thread: str) -> Rows:
        with self._lock:
            rows = self._store.chain(self._owner, thread)
        return {tuple(row.step.split(_SEPARATOR)): row for row in rows}

    def _answer(self, row: Checkpoint, kind: Any) -> Any:
        with self._lock:
            whole = self._store.load(row.id, self._owner)
        return None if whole is None else msgspec.msgpack.decode(whole.answer, type=kind)

    def _tuple(self, thread: str, rows: Rows, name: Name) -> CheckpointTuple | None:
        if (parts := self._answer(rows[name], list[tuple[str, bytes]])) is None:
            return None
        writes: dict[tuple[str, int], tuple[str, str, tuple[str, bytes]]] = {}
        for other, row in rows.items():
            if other[:3] == ("w", *name[1:3]):
                for place, path, *write in self._answer(row, Writes) or ():
                    if place < 0 or (other[3], place) not in writes:  # as what is special replaces
                        writes[other[3], place] = (path, *write)
        order = sorted(writes, key=lambda key: (writes[key][0], *key))
        space, parent = name[1], rows[name].request
        return CheckpointTuple(
            _config(thread, space, name[2]),
            self.serde.loads_typed(parts[0]),
            self.serde.loads_typed(parts[1]),
            _config(thread, space, parent) if parent else None,
            [(key[0], writes[key][1], self.serde.loads_typed(writes[key][2])) for key in order],
        )


def _place(config: RunnableConfig) -> tuple[str, str]:
    return config["configurable"]["thread_id"], config["configurable"].get(NS, "")


def _config(thread: str, space: str, checkpoint: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, NS: space, "checkpoint_id": checkpoint}}
