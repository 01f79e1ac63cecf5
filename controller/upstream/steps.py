"""A server's own record of its engine's steps, held against what its profile says they should take.

The plug-in in a vLLM server writes a row for each step and for each finished request
(``traces.steps``). Where its file is on this machine, the new rows are read with every scrape, and
two sums come of them: what the steps took, and what the profile predicts for the very same ones.
A path that the server itself names may be another server's file here: it counts only if both the
server's page and the file say the same life.

A step's *measured* time is the time from the output before it to its own, by the engine's clock
where the row has that, else by the rows' times. ``elapsed_ns`` is not taken: it leaves out what the
engine does between two steps, and with asynchronous scheduling part of the step, too. Only steps
that followed at once count: something that decodes was in the step before, and a prefill alone
counts while others wait. So no idle time is in it, and the host's part, which the profile has, is.

What a step *computed* is in its row but for the context that was read. That is known when the
requests in it have finished: one with n output tokens decoded in the n - 1 steps up to its last,
and its prompt was computed before. So steps are held back for a while. Where too many requests of
a step are not known by then, its context is taken from the KV cache's usage, less half a block a
sequence; not where requests share much of their prompts, since shared blocks are counted once
there. Of prompts that are not known the quadratic term is taken as if each began in this step:
too little for later chunks of a long one.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from policy.cost import TICKS_PER_NS
from traces.schema import TraceError
from traces.steps import STEPS_FILE, StepRow, StepTail, decode_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.cost import StepCost
    from policy.events import ReplicaUp
    from traces.steps import Header, RequestRow

HELD_MOST = 4096
"""Steps kept until the requests in them have finished."""
HELD_NS = 30_000_000_000
KNOWN_LEAST = 0.9
"""Share of a step's sequences that must be known for the others to be taken to be like them."""
SHARED_MOST = 0.1
"""Share of prompt tokens found in the cache from which the cache's usage tells no context."""
FORGET = 0.98
"""What is left of older requests' tokens with each new one, for that share."""
FILES_MOST = 16
"""Engines of one server that are followed."""
LINE_BYTES_MOST = 1 << 16
COMPLAIN_S = 60.0
TOLD_MOST = 64

log = logging.getLogger(__name__)


class Said(NamedTuple):
    """A file of step records, as a server's page names it."""

    path: str
    life: str = ""
    """As in the file's header; empty: the plug-in is older and does not say."""


class Sums(NamedTuple):
    """Of steps whose measured and predicted times are both known."""

    steps: int = 0
    measured_ns: int = 0
    predicted_ticks: int = 0

    @property
    def predicted_us(self) -> int:
        return self.predicted_ticks // TICKS_PER_NS // 1000

    def plus(self, other: Sums) -> Sums:
        return Sums(*(one + two for one, two in zip(self, other, strict=True)))


class _Held:
    """A step, and what is known by now of the requests in it."""

    __slots__ = ("known", "measured_ns", "quad", "row", "spent_tokens", "tokens")

    def __init__(self, row: StepRow, measured_ns: int) -> None:
        self.row = row
        self.measured_ns = measured_ns
        """0: not known."""
        self.known = 0
        """Requests that are known to have decoded in it, and (next) their context, each with its
        new token."""
        self.tokens = 0
        self.spent_tokens = 0
        """Of its prefill tokens, those that are known, and (next) their quadratic term."""
        self.quad = 0


class StepBook:
    """The steps of one engine.

    Args:
        cost: the profile's.
        kv_tokens: that the engine's KV cache holds; 0: not known.
        block_tokens: in one of its blocks.
        logprobs: every sequence is asked for logprobs.
    """

    def __init__(
        self, cost: StepCost, kv_tokens: int, block_tokens: int, logprobs: bool = False
    ) -> None:
        self._cost = cost
        self._kv_tokens = kv_tokens
        self._block_tokens = block_tokens
        self._per_sequence = cost.per_logprobs_sequence if logprobs else 0
        self._held: list[_Held] = []
        self._last: StepRow | None = None
        self._prompt_tokens = 0.0
        self._cached_tokens = 0.0

    def add(self, rows: Sequence[StepRow | RequestRow]) -> Sums:
        """Take the rows of one reading. Returns the steps that are settled by it; without any row
        the engine stands still, and all are."""
        sums = Sums()
        for row in rows:
            if isinstance(row, StepRow):
                if self._last is not None and row.step != self._last.step + 1:
                    # Some are missing: where a request was before them cannot be told any more.
                    sums = sums.plus(self._settled(len(self._held)))
                self._held.append(_Held(row, _measured_ns(self._last, row)))
                self._last = row
                if len(self._held) >= 2 * HELD_MOST:
                    sums = sums.plus(self._settled(HELD_MOST))
            else:
                self._finished(row)
        if not rows or self._last is None:
            return sums.plus(self._settled(len(self._held)))
        due_ns = self._last.at_ns - HELD_NS
        due = max(0, len(self._held) - HELD_MOST)
        while due < len(self._held) - 1 and (
            self._held[due].row.at_ns <= due_ns or self._complete(self._held[due])
        ):
            due += 1
        return sums.plus(self._settled(due))

    def _finished(self, row: RequestRow) -> None:
        """Note in its steps what the request did there; its last one is the last row."""
        cached = row.cached_tokens or 0
        self._prompt_tokens = self._prompt_tokens * FORGET + row.prompt_tokens
        self._cached_tokens = self._cached_tokens * FORGET + cached
        if row.preemptions:
            return  # computed twice, nobody knows where
        held = self._held
        first = len(held) - max(1, row.output_tokens)  # an embedding has none
        """Where its first token came from: the end of its prefill."""
        for index in range(max(first + 1, 0), len(held)):
            held[index].known += 1
            held[index].tokens += row.prompt_tokens + index - first
        left = row.prompt_tokens - cached
        index = first
        while left > 0 and index >= 0:
            step = held[index]
            taken = min(left, (step.row.prefill_tokens or 0) - step.spent_tokens)
            if taken <= 0:
                return
            end = cached + left
            step.quad += end * end - (end - taken) ** 2
            step.spent_tokens += taken
            left -= taken
            index -= 1

    @staticmethod
    def _complete(step: _Held) -> bool:
        return step.known == step.row.decode_requests and (
            step.spent_tokens == step.row.prefill_tokens
        )

    def _settled(self, count: int) -> Sums:
        """Let go of the first so many steps."""
        steps = measured_ns = predicted = 0
        for held in self._held[:count]:
            ticks = self._predicted_ticks(held) if held.measured_ns > 0 else 0
            if ticks > 0:
                steps += 1
                measured_ns += held.measured_ns
                predicted += ticks
        del self._held[:count]
        return Sums(steps, measured_ns, predicted)

    def _predicted_ticks(self, held: _Held) -> int:
        """0: not known."""
        row = held.row
        batch, prefill_tokens = row.decode_requests, row.prefill_tokens
        if batch is None or prefill_tokens is None or not batch + prefill_tokens:
            return 0
        kv_tokens = 0
        if batch:
            if held.known >= batch * KNOWN_LEAST:
                kv_tokens = held.tokens * batch // held.known
            else:
                kv_tokens = self._by_usage(row, batch)
            if not kv_tokens:
                return 0
        rest = prefill_tokens - held.spent_tokens
        quad = held.quad
        if rest > 0:
            quad += rest * rest // max(1, row.prefill_requests or 1)
        ticks = self._cost.step_ticks(batch, kv_tokens, prefill_tokens, quad)
        return ticks + self._per_sequence * batch

    def _by_usage(self, row: StepRow, batch: int) -> int:
        """Context tokens of the step's sequences, as the cache's usage has them; 0: not known."""
        if row.kv_used_ppm is None or not self._kv_tokens:
            return 0
        if self._cached_tokens > SHARED_MOST * self._prompt_tokens:
            return 0
        sequences = max(batch, row.running or 0)
        used = row.kv_used_ppm * self._kv_tokens // 1_000_000
        used -= sequences * self._block_tokens // 2
        return max(batch, used * batch // sequences)


def _measured_ns(before: StepRow | None, row: StepRow) -> int:
    """How long a step took that followed at once on the one before; 0: not known."""
    if row.period_ns is not None:
        return row.period_ns
    if before is None or row.step != before.step + 1:
        return 0
    if row.decode_requests or (row.prefill_tokens and before.waiting):
        return max(0, row.at_ns - before.at_ns)
    return 0


class _FromNow(StepTail):
    """Of a file that is there already only the header: what was before is no drift of today, and
    may have been read in an earlier life of its server."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._first = True

    def _open(self, path: Path) -> bool:
        if not super()._open(path):
            return False
        first, self._first = self._first, False
        if first:
            try:
                self._pass_over()
            except (TraceError, OSError):
                self._first = True
                self.close()
                raise
        return True

    def _pass_over(self) -> None:
        """Go to the end of the last whole line."""
        file = self._file
        assert file is not None
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(0)
            return
        self.header = decode_header(line[:-1], f"{self.path}: line 1")
        self._line = 1
        start, size = file.tell(), file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LINE_BYTES_MOST))
        last = file.read()
        file.seek(last.rfind(b"\n") + 1 - len(last), os.SEEK_CUR)


class _Engine:
    """One file and its book, which is begun with the file's header. ``life``: of the server, where
    only its word says that the file is its own; else empty."""

    def __init__(self, path: Path, life: str) -> None:
        self.path = path
        self.life = life
        self.tail = _FromNow(path)
        self.book: StepBook | None = None
        self.unfit = False


class StepReader:
    """Follows the files of one server, as long as it lives.

    Args:
        given: the file, or the folder of files, that the settings name; empty: as the server says.
        logprobs: every request is asked for logprobs.
    """

    def __init__(
        self, name: str, spec: ReplicaUp, cost: StepCost, given: str = "", logprobs: bool = False
    ) -> None:
        self.name = name
        self.spec = spec
        self._cost = cost
        self._given = given
        self._logprobs = logprobs
        self._engines: dict[int, _Engine] = {}
        """By number."""
        self._complained_s = -COMPLAIN_S
        self._told: set[str] = set()

    def read(self, said: Sequence[Said]) -> Sums:
        """What is new. Reads files: not for the event loop.

        Args:
            said: files that the server says it writes to; those that are not here, or are another
                server's, are passed over.
        """
        sums = Sums()
        for number, (path, life) in sorted(self._paths(said).items()):
            engine = self._engines.get(number)
            if engine is None or (engine.path, engine.life) != (path, life):
                if engine is not None:
                    engine.tail.close()
                engine = self._engines[number] = _Engine(path, life)
            if not engine.unfit:
                sums = sums.plus(self._read(engine))
        return sums

    def close(self) -> None:
        for engine in self._engines.values():
            engine.tail.close()
        self._engines.clear()

    def _paths(self, said: Sequence[Said]) -> dict[int, tuple[Path, str]]:
        """The youngest file of each engine, and its life if that has to be right, by the engine's
        number."""
        aged: list[tuple[int, Path, str]] = []
        try:
            if self._given:
                named = [(path, "") for path in given_files(Path(self._given))]
            else:
                named = [(Path(each.path), each.life) for each in said]
                named = [each for each in named if STEPS_FILE.fullmatch(each[0].name)]
            for path, life in named:
                # Nothing but a file is opened: a pipe would never end.
                if not path.is_file():
                    continue
                if life or self._given:
                    aged.append((path.stat().st_mtime_ns, path, life))
                else:
                    self._complain(
                        f"{path} may be another server's records: its plug-in does not say; put the"
                        " plug-in of this version into vLLM's environment, or name the file with"
                        " steps="
                    )
        except (OSError, ValueError) as error:
            self._complain(f"its step records cannot be found ({error})")
            return {}
        if self._given and not aged:
            self._complain(f"steps={self._given}: there are no step records; nothing tells drift")
        paths: dict[int, tuple[Path, str]] = {}
        for _, path, life in sorted(aged):
            match = STEPS_FILE.fullmatch(path.name)
            paths[int(match[1]) if match else 0] = path, life
        return dict(sorted(paths.items())[:FILES_MOST])

    def _read(self, engine: _Engine) -> Sums:
        try:
            rows = engine.tail.read_new()
        except (TraceError, OSError) as error:
            self._complain(f"its step records cannot be read ({error})")
            return Sums()
        header = engine.tail.header
        if header is None:
            return Sums()
        why = ""
        if engine.life and header.life != engine.life:
            why = "it is another server's; give this one's with steps="
        elif engine.book is None:
            why = self._unfit(header)
        if why:
            engine.unfit = True
            engine.tail.close()
            log.warning("%s: %s tells no drift: %s", self.name, engine.path, why)
            return Sums()
        if engine.book is None:
            engine.book = self._book(header)
        return engine.book.add(rows)

    def _unfit(self, header: Header) -> str:
        """Why its rows cannot be held against the profile; empty: they can."""
        settings, models = header.settings, self.spec.models
        if settings.served_model and models and settings.served_model not in models:
            return f"it is of a server of {settings.served_model}, and this one is {models[0]}"
        if not header.details:
            return "start vLLM with --enable-logging-iteration-details"
        if settings.speculative:
            return "speculative decoding is in no profile"
        return ""

    def _book(self, header: Header) -> StepBook:
        settings, spec = header.settings, self.spec
        block_tokens = settings.block_tokens or spec.block_tokens
        blocks = settings.kv_blocks or spec.kv_blocks // max(1, len(self._engines))
        return StepBook(self._cost, blocks * block_tokens, block_tokens, self._logprobs)

    def _complain(self, what: str) -> None:
        """Of a path that nobody here has given, once: what is amiss may be so for good."""
        now_s = time.monotonic()
        if now_s - self._complained_s < COMPLAIN_S or what in self._told:
            return
        self._complained_s = now_s
        if not self._given and len(self._told) < TOLD_MOST:
            self._told.add(what)
        log.warning("%s: %s", self.name, what)


def given_files(given: Path) -> list[Path]:
    """The files that a setting ``steps`` names: itself, or those of the folder.

    Raises:
        OSError: the folder cannot be read.
    """
    if given.is_dir():
        return [path for path in given.iterdir() if STEPS_FILE.fullmatch(path.name)]
    return [given] if given.is_file() else []
