"""Callers that do not wait for one another, but try again: the stuff of retry storms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twin.clients.sender import Sender
from twin.clients.setting import Client
from twin.source import Source  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.decisions import Settled
    from twin.arrivals import Chunk
    from twin.clients.setting import Setting
    from twin.world import Result


class Calls(Client, frozen=True, forbid_unknown_fields=True, tag="calls", kw_only=True):
    """Requests that arrive as ``source`` says, each sent by a client that retries.

    What the source says about model, line, class and limits goes before what stands here.
    """

    source: Source


class CallClients:
    """All callers of one ``Calls``."""

    def __init__(self, spec: Calls, setting: Setting, chunks: Iterator[Chunk]) -> None:
        self._spec = spec
        self._setting = setting
        self._rows = ((chunk, row) for chunk in chunks for row in range(len(chunk.arrival_ns)))
        self._sender = Sender(setting, spec.name, spec.retries, spec.patience_s)

    def start(self) -> None:
        self._setting.world.clients += 1
        self._await_next()

    def figures(self) -> dict[str, Any]:
        return self._sender.figures()

    def _await_next(self) -> None:
        following = next(self._rows, None)
        world = self._setting.world
        if following is None or following[0].arrival_ns[following[1]] >= self._setting.end_ns:
            world.clients -= 1
            return
        chunk, row = following
        delay_ns = max(0, chunk.arrival_ns[row] - world.now_ns)
        world.after(delay_ns, lambda event: self._call(chunk, row))

    def _call(self, chunk: Chunk, row: int) -> None:
        fields = self._spec.fields()
        given = {
            "model": chunk.model[row],
            "line": chunk.line[row],
            "sla": chunk.sla[row],
            "deadline_ns": chunk.deadline_ns[row],
            "max_tokens": chunk.max_tokens[row],
        }
        message = {
            **fields,
            **{name: value for name, value in given.items() if value},
            "endpoint": chunk.endpoint[row],
            "prompt_tokens": chunk.prompt_tokens[row],
            "output_tokens": chunk.output_tokens[row],
            "prompt_bytes": chunk.prompt_bytes[row],
            "user": chunk.user[row],
            "session": chunk.session[row],
            "prefix": chunk.prefix[row],
            "prefix_block_tokens": chunk.prefix_block_tokens[row],
        }
        self._sender.send(message, _ignore)
        self._await_next()


def _ignore(result: Result, told: Settled) -> None:
    """The sender counts; nothing follows."""
