"""One request between the engine and its caller: tokens become bytes here, or a fault does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from twin.serve.answers import DONE, Piece, Times, Usage, piece_of
from twin.serve.faults import HOLLOW, MIDWAY
from twin.serve.words import certainty_of, codes_of, noisy

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable

    from twin.engine import Sequence
    from twin.serve.answers import Shape
    from twin.serve.asking import Asked
    from twin.serve.faults import Fault
    from twin.serve.wire import Connection

_NULL = b"null"


class Generation:
    """The answer to a chat or a completion; a ``twin.serve.engine.Hearer``."""

    __slots__ = (
        "_asked", "_codes", "_connection", "_fault", "_key", "_mute", "_opened", "_over", "_rows",
        "_shape", "done", "first_ns", "last_ns", "sent", "seq", "watching",
    )  # fmt: skip

    def __init__(
        self,
        asked: Asked,
        shape: Shape,
        key: bytes,
        connection: Connection,
        fault: Fault | None,
        done: Future[None],
        over: Callable[[Generation, str], None],
    ) -> None:
        """``over`` is told the finish reason once the answer is out, or "" if none went out."""
        self._asked = asked
        self._shape = shape
        self._key = key
        self._connection = connection
        self._fault = fault
        self._over = over
        self._codes = self._rows = b""
        self._mute = False
        self.seq: Sequence
        self.done = done
        self.first_ns = self.last_ns = -1
        self._opened = False
        self.sent = 0
        self.watching = asked.stream or (fault is not None and fault.kind in MIDWAY)

    def begin(self, seq: Sequence, after_s: float) -> None:
        """The engine has taken it, and sees it ``after_s`` from now, when it is read: then a
        stream's headers go out, before anything is computed."""
        self.seq = seq
        kind = "" if self._fault is None else self._fault.kind
        self._codes = codes_of(noisy(self._key) if kind == "noisy" else self._key, seq.outputs)
        if kind == "same":
            self._codes = self._codes[:1] * seq.outputs
        if self._asked.logprobs >= 0:
            self._rows = certainty_of(self._key, seq.outputs, kind)
        if self._asked.stream:
            asyncio.get_running_loop().call_later(after_s, self._open)
        else:
            self._struck(0)

    def _open(self) -> None:
        if not (self._opened or self.done.done()):
            self._opened = True
            self._connection.open_stream()
            self._struck(0)

    # ---- what the engine says ----

    def hear_first(self) -> None:
        if self._asked.stream:
            self._open()
        if not self._struck(1):
            self._put_out(1)

    def hear_tokens(self, count: int) -> None:
        if not self._struck(count):
            self._put_out(count)

    def hear_last(self) -> None:
        if self._struck(1 << 40):
            return
        fault = self._fault
        if fault is not None and fault.kind in HOLLOW:
            self._end_hollow(fault.kind)
        else:
            self._end("stop" if self.seq.eos else "length", self.seq.outputs)

    def cut_short(self) -> None:
        """The server goes away: HTTP 200, finish reason "abort", as vLLM does it."""
        if self._asked.stream:
            self._open()
        if self._mute:
            self._connection.cut()
            self._close("")
        else:
            self._end("abort", self.sent)

    # ---- what goes out ----

    def _put_out(self, count: int) -> None:
        hollow = self._fault is not None and self._fault.kind in HOLLOW
        if self._asked.stream and not self._mute and not hollow:
            event = self._shape.event(self._piece(count), _NULL)
            self._connection.chunk(self._opening() + event)
        self.sent = count

    def _opening(self) -> bytes:
        return b"" if self.sent else self._shape.opening()

    def _piece(self, end: int) -> Piece:
        """Tokens up to ``end``: of a stream, those that have not gone out."""
        start = self.sent if self._asked.stream else 0
        return piece_of(self._shape, self._codes, self._rows, start, end, self._asked.logprobs)

    def _usage(self, outputs: int) -> bytes:
        return Usage(self._asked.prompt_tokens[0], outputs, self.seq.cached_tokens).json()

    def _metrics(self, outputs: int) -> bytes:
        return self.times().json(outputs)

    def times(self) -> Times:
        """Of what the engine did for it."""
        seq = self.seq
        return Times(seq.arrival_ns, seq.scheduled_ns, self.first_ns, self.last_ns)

    def _end(self, reason: str, outputs: int) -> None:
        finish = b'"%b"' % reason.encode()
        if self._asked.stream:
            opening = self._opening()
            self._finish_stream(opening + self._shape.event(self._piece(outputs), finish), outputs)
        else:
            self._connection.answer(200, self._whole(self._piece(outputs), finish, outputs))
        self.sent = outputs
        self._close(reason)

    def _whole(self, piece: Piece, finish: bytes, outputs: int) -> bytes:
        return self._shape.whole(piece, finish, self._usage(outputs), self._metrics(outputs))

    def _finish_stream(self, events: bytes, outputs: int) -> None:
        if self._asked.include_usage:
            events += self._shape.usage_event(self._usage(outputs), self._metrics(outputs))
        self._connection.last_chunk(events + DONE)

    @property
    def broken(self) -> bool:
        """A fault has struck, so the connection is of no more use."""
        return self._mute

    def _close(self, reason: str) -> None:
        self._over(self, reason)
        if not self.done.done():
            self.done.set_result(None)

    # ---- faults ----

    def _end_hollow(self, kind: str) -> None:
        piece = Piece(_NULL if kind == "null" else b'""')
        stop = b'"stop"'
        if self._asked.stream:
            if kind == "blank":
                self._connection.last_chunk(b"")
            else:
                events = self._shape.opening() + self._shape.event(piece, stop)
                self._finish_stream(events, 1)
        else:
            body = b"" if kind == "blank" else self._whole(piece, stop, 1)
            self._connection.answer(200, body)
        self._close("stop")

    def _struck(self, count: int) -> bool:
        """Whether a fault has the word now that ``count`` tokens are there."""
        fault = self._fault
        if fault is None or fault.kind not in MIDWAY:
            return False
        if self._mute:
            return True
        if count < fault.after_tokens:
            return False
        if self._asked.stream and self.sent < fault.after_tokens:
            self._put_out(min(fault.after_tokens, self.seq.outputs))
        self._mute = True
        self._strike(fault)
        return True

    def _strike(self, fault: Fault) -> None:
        outputs = self.seq.outputs
        connection, stream = self._connection, self._asked.stream
        if fault.kind == "stall":  # nothing more goes out; the engine goes on
            return
        if fault.kind == "abort":
            self._end("abort", max(self.sent, min(fault.after_tokens, outputs)))
            return
        if fault.kind == "reset":
            connection.reset()
        elif fault.kind == "cut":
            if not stream:
                connection.part_of(self._whole(self._piece(outputs), _NULL, outputs))
            connection.cut()
        elif fault.kind == "no_end" and stream:
            connection.last_chunk(b"")
        elif fault.kind == "no_end":
            connection.answer(200, self._whole(self._piece(outputs), _NULL, outputs))
        elif stream:
            event = self._opening() + self._shape.event(self._piece(outputs), _NULL)
            connection.last_chunk(event[: len(event) * 2 // 3])
        else:
            body = self._whole(self._piece(outputs), b'"length"', outputs)
            connection.answer(200, body[: len(body) // 2])
        self._close("")


class Part:
    """One of the vectors or of the answers of a request with several prompts; a
    ``twin.serve.engine.Hearer``."""

    __slots__ = ("_over", "first_ns", "last_ns", "sent", "watching")

    def __init__(self, over: Callable[[Part], None]) -> None:
        self._over = over
        self.first_ns = self.last_ns = -1
        self.sent = 0
        self.watching = False

    def hear_first(self) -> None:
        """Only the whole is of interest."""

    def hear_tokens(self, count: int) -> None:
        """The same."""

    def hear_last(self) -> None:
        self._over(self)
