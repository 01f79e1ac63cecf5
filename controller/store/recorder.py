"""Writes what passes as a trace that ``twinkeel replay`` takes as it is. Never any text.

A request becomes a row when it is settled. Each second, new rows are appended to a journal; about
once a minute they become a *part*, a sorted trace by itself, and the parts of the run so far are
merged into ``trace.parquet``, by a thread of its own. A clean end makes a trace of the whole run of
them. What a crash left, the rows in the journal included, is merged when the next recorder starts.

Identifiers of users, sessions and chains are keyed hashes, with a key that stays in the data
folder. Where a request ended before its answer was there, nobody knows how long that would have
been, and replay must: such a row has the usual length of answers of its model, and the provenance
``derived`` in place of ``real``. The same goes for the tokens of a prompt that no server counted.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from threading import Event as Flag
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from controller.listener import Listener
from controller.store.secret import kept_key
from policy.events import ReplicaUp
from traces import TraceError, TraceWriter, open_trace
from traces.pipeline import write_trace
from traces.schema import SCHEMA, category_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from controller.call import Call
    from policy.decisions import Settled
    from policy.events import Arrived, Event
    from policy.facts import Open

NS = 1_000_000_000
BYTES_PER_TOKEN = 4
"""Of a prompt, until a server has counted one."""
ANSWER_TOKENS = 256
"""Of an answer, until there was one."""
INT32_MOST = 2**31 - 1
PART_ROWS = 10_000
PART_S = 60.0
MERGE_ROWS_MOST = 1_000_000
"""Beyond them, ``trace.parquet`` is not made anew while it records."""
FINISH_ROWS_MOST = 300_000
"""A run with more is left in its parts at its end: the next one merges them meanwhile."""
MERGE_TIME_SHARE = 0.02
"""Of the time, at most, goes into merging while it records."""
MERGE_PART_S = 30.0
"""Between two such merges, for each part: the more there is to merge, the more rarely."""
KEEP_BYTES = 4 * 1024 * 1024 * 1024
WAITING_MOST = 10
"""Parts that may wait for the disk."""
USUAL_KEYS_MOST = 1_000
_AT_ONCE = 256
_ENCODER = msgspec.json.Encoder()
_DONE = frozenset({"answered", "degraded"})


class Row(NamedTuple):
    """One request. All times are in ns here. What is negative or empty is null in the trace."""

    arrival_s: int
    """After the recording's start."""
    request_id: int
    prompt_tokens: int
    output_tokens: int
    prompt_bytes: int
    max_output_tokens: int
    user_id: int
    session_id: int
    chain_id: int
    prefix_block_tokens: int
    prefix_ids: tuple[int, ...]
    http_code: int
    retries: int
    confidence: int
    """Per mille."""
    deadline_s: int
    model: str
    model_version: str
    endpoint: str
    tenant_id: str
    step: str
    sla_class: str
    business_line: str
    outcome: str
    error_kind: str
    tier: str
    replica: str
    degraded_how: str
    verification_status: str
    provenance: str
    gateway_s: int = -1
    queue_s: int = -1
    schedule_s: int = -1
    prefill_s: int = -1
    decode_s: int = -1
    network_s: int = -1
    ttft_s: int = -1
    e2e_s: int = -1
    tpot_s: int = -1


class Recorder(Listener):
    """Records one run of a controller.

    Args:
        data: the data folder: parts and traces go to ``trace/`` in it, the key to ``trace.key``.
        start_ns: the log's clock now.
        left_open: requests that a crash took, as recovery found them.
        on_trouble: told in plain words, in the loop, once each time that writing fails.
    """

    def __init__(
        self,
        data: Path,
        start_ns: int,
        left_open: Iterable[Open] = (),
        *,
        on_trouble: Callable[[str], object],
        part_rows: int = PART_ROWS,
        part_s: float = PART_S,
        keep_bytes: int = KEEP_BYTES,
        merge_rows_most: int = MERGE_ROWS_MOST,
    ) -> None:
        self.folder = data / "trace"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows = 0
        """Written, or waiting to be."""
        self.dropped_rows = 0
        self.trouble = ""
        """What is wrong with writing; empty: nothing."""
        self._key = kept_key(data / "trace.key")
        self._left = {opened.event.request: opened for opened in left_open}
        earliest_ns = [opened.arrived_ns for opened in self._left.values()]
        self._base_ns = min([start_ns, *earliest_ns])
        self._began_ns = start_ns
        self._on_trouble = on_trouble
        self._part_rows = part_rows
        self._part_ns = round(part_s * NS)
        self._files = _Files(self.folder, keep_bytes, merge_rows_most)
        self._pending: list[Row] = []
        self._journaled = 0
        """How many of them, the first, are in the journal."""
        self._waiting: list[tuple[Future[None], int]] = []
        self._versions: dict[int, ReplicaUp] = {}
        self._usual: dict[tuple[str, str], _Usual] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._merger = ThreadPoolExecutor(1, thread_name_prefix="merger")
        self._unmerged = False
        """There is a part that ``trace.parquet`` lacks."""
        self._merge(self._files.finish_leftovers)

    # What passes

    def fed(self, now_ns: int, event: Event) -> None:
        if type(event) is ReplicaUp:
            self._versions[event.replica] = event

    def settled(self, call: Call, settled: Settled) -> None:
        self._pending.append(self._row(call, settled))
        self.rows += 1
        if self._due(call.settled_ns):
            self.flush(call.settled_ns)

    def lost(self, settled: Settled) -> None:
        opened = self._left.pop(settled.request, None)
        if opened is not None:
            self._pending.append(self._lost_row(opened, settled))
            self.rows += 1

    # Writing

    def flush(self, now_ns: int) -> None:
        """Write a part if it is time for one, else what is new to the journal. To be called each
        second or so: what is in neither when the process is killed is lost."""
        self._look_after()
        if self._unmerged and self._merging.done():
            self._unmerged = False
            self._merge(self._files.refresh)
        if self._due(now_ns):
            self._began_ns = now_ns
            self._write()
        elif len(self._pending) > self._journaled:
            new = self._pending[self._journaled :]
            self._journaled = len(self._pending)
            self._executor.submit(self._files.note, new)

    def close(self) -> None:
        """Write and merge what is there: some 10 s for the most rows that are merged here. What
        else is being merged is left to the next recorder."""
        self._write()
        self._executor.shutdown()
        self._files.ending.set()
        self._merge(self._files.finish)
        self._merger.shutdown()
        self._look_after()

    def _due(self, now_ns: int) -> bool:
        rows = len(self._pending)
        return rows >= self._part_rows or (rows > 0 and now_ns - self._began_ns >= self._part_ns)

    def _write(self) -> None:
        rows = self._pending
        if not rows:
            return
        self._pending = []
        self._journaled = 0
        if len(self._waiting) >= WAITING_MOST:
            self._lost_rows(len(rows), "the disk does not keep up")
            return
        self._waiting.append((self._executor.submit(self._files.write, rows), len(rows)))

    def _merge(self, work: Callable[[], None]) -> None:
        self._merging = self._merger.submit(work)
        self._waiting.append((self._merging, 0))

    def _look_after(self) -> None:
        over = [one for one in self._waiting if one[0].done()]
        for one in over:
            self._waiting.remove(one)
            done, rows = one
            error = done.exception()
            if error is not None:
                self._lost_rows(rows, f"{type(error).__name__}: {error}")
            elif rows:
                self.trouble = ""
                self._unmerged = True

    def _lost_rows(self, rows: int, why: str) -> None:
        self.dropped_rows += rows
        if not self.trouble:
            self.trouble = f"the trace lacks requests: {why}; serving goes on, see {self.folder}"
            self._on_trouble(self.trouble)

    # Rows

    def _row(self, call: Call, settled: Settled) -> Row:
        asked = call.asked
        outcome = settled.outcome
        done = outcome in _DONE
        out = call.output_tokens
        prompt, output, provenance = self._lengths(
            asked.model, asked.endpoint, asked.prompt_bytes, asked.max_tokens, call.prompt_tokens,
            out, outcome,
        )  # fmt: skip
        hops = call.hops()
        arrived_ns = call.arrived_ns
        ttft_ns = call.first_ns - arrived_ns if call.first_ns >= 0 else -1
        e2e_ns = call.settled_ns - arrived_ns if done else -1
        tpot_ns = (e2e_ns - ttft_ns) // (out - 1) if done and ttft_ns >= 0 and out > 1 else -1
        spec = self._versions.get(call.replica)
        return Row(
            arrived_ns - self._base_ns,
            call.request,
            prompt,
            output,
            asked.prompt_bytes,
            min(asked.max_tokens, INT32_MOST) or -1,
            self._hashed("user", asked.user),
            self._hashed("session", asked.session),
            self._hashed("chain", asked.chain and f"{asked.user}/{asked.chain}"),
            asked.prefix_block_bytes // BYTES_PER_TOKEN if asked.prefix else -1,
            asked.prefix,
            call.served_status or settled.http_code,
            min(max(call.tries - 1, 0), 127),
            settled.confidence_permille,
            asked.deadline_ns or -1,
            asked.model,
            spec.version if spec is not None else "",
            asked.endpoint,
            asked.tenant,
            asked.step,
            asked.sla,
            asked.line,
            outcome,
            settled.why if outcome == "failed" else "",
            settled.tier or call.tier,
            spec.name if spec is not None else "",
            settled.why if outcome == "degraded" else "",
            settled.verification,
            provenance,
            *hops[:6],
            ttft_ns,
            e2e_ns,
            tpot_ns,
        )

    def _lost_row(self, opened: Open, settled: Settled) -> Row:
        event: Arrived = opened.event
        prompt, output, _ = self._lengths(
            event.model, event.endpoint, event.prompt_bytes, event.max_tokens, -1, 0, "failed"
        )
        return Row(
            opened.arrived_ns - self._base_ns,
            event.request,
            prompt,
            output,
            event.prompt_bytes,
            min(event.max_tokens, INT32_MOST) or -1,
            self._hashed("user", event.user),
            self._hashed("session", event.session),
            self._hashed("chain", event.chain and f"{event.user}/{event.chain}"),
            event.prefix_block_bytes // BYTES_PER_TOKEN if event.prefix else -1,
            event.prefix,
            settled.http_code,
            max(opened.tries - 1, 0),
            -1,
            event.deadline_ns or -1,
            event.model,
            "",
            event.endpoint,
            "",
            event.step,
            event.sla,
            event.line,
            settled.outcome,
            settled.why,
            settled.tier,
            "",
            "",
            "",
            "derived",
        )

    def _lengths(
        self, model: str, endpoint: str, prompt_bytes: int, max_tokens: int, prompt: int,
        output: int, outcome: str,
    ) -> tuple[int, int, str]:  # fmt: skip
        """(prompt tokens, output tokens, provenance), where they are not known the usual ones."""
        key = (model, endpoint)
        usual = self._usual.get(key)
        if usual is None:
            if len(self._usual) >= USUAL_KEYS_MOST:
                self._usual.clear()
            usual = self._usual[key] = _Usual()
        provenance = "real"
        if prompt >= 0:
            usual.prompts(prompt_bytes, prompt)
        else:
            prompt = usual.prompt_tokens(prompt_bytes)
            provenance = "derived"
        if endpoint == "embeddings":
            output = 0
        elif output > 0 and outcome in _DONE:
            usual.answer(output)
        elif output <= 0 or outcome == "failed":  # a caller that left wanted no more than it got
            output = max(output, usual.output_tokens(max_tokens))
            provenance = "derived"
        return prompt, output, provenance

    def _hashed(self, kind: str, name: str) -> int:
        """63 bits; -1: no name. A tenant's users and sessions have the tenant in their names, and
        chains belong to a user."""
        if not name:
            return -1
        text = f"{kind}\0{name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8, key=self._key).digest()) >> 1


class _Usual:
    """Means over what was seen of a model and an endpoint."""

    __slots__ = ("_answers", "_bytes", "_output_tokens", "_prompt_tokens")

    def __init__(self) -> None:
        self._answers = self._output_tokens = self._bytes = self._prompt_tokens = 0

    def prompts(self, size: int, tokens: int) -> None:
        self._bytes += size
        self._prompt_tokens += tokens

    def answer(self, tokens: int) -> None:
        self._answers += 1
        self._output_tokens += tokens

    def prompt_tokens(self, size: int) -> int:
        if self._prompt_tokens and self._bytes:
            return max(1, size * self._prompt_tokens // self._bytes)
        return max(1, size // BYTES_PER_TOKEN)

    def output_tokens(self, most: int) -> int:
        tokens = self._output_tokens // self._answers if self._answers else ANSWER_TOKENS
        return max(1, min(tokens, most or tokens))


def _batch(rows: list[Row]) -> pa.RecordBatch:
    """The rows in order of arrival. A few are turned into Arrow at a time: it holds the loop up."""
    rows.sort()
    few: list[pa.RecordBatch] = []
    for start in range(0, len(rows), _AT_ONCE):
        columns = zip(*rows[start : start + _AT_ONCE], strict=True)
        arrays = [_column(name, one) for name, one in zip(Row._fields, columns, strict=True)]
        few.append(pa.RecordBatch.from_arrays(arrays, list(Row._fields)))
    table = pa.Table.from_batches(few).unify_dictionaries().combine_chunks()
    return table.to_batches()[0]


def _column(name: str, values: tuple[Any, ...]) -> pa.Array:
    kind = SCHEMA.field(name).type
    if pa.types.is_dictionary(kind):
        return category_column(list(values))
    if pa.types.is_list(kind):
        return pa.array([ids or None for ids in values], kind)
    numbers = np.array(values, np.int64)
    if name == "arrival_s":
        return pa.array(numbers / NS, kind)
    if pa.types.is_floating(kind):
        scale = 1000 if name == "confidence" else NS
        return pa.array((numbers / scale).astype(kind.to_pandas_dtype()), mask=numbers < 0)
    return pa.array(numbers, mask=numbers < 0).cast(kind)


class Ended(Exception):
    """The process ends, so what is being merged is left."""


class _Files:
    """Journals, parts and traces. ``note`` and ``write`` run in one thread, all that merges in
    another: a part is never late because a long trace is being made."""

    def __init__(self, folder: Path, keep_bytes: int, merge_rows_most: int) -> None:
        self.ending = Flag()
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._merge_rows_most = merge_rows_most
        self._run = datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{time.time_ns() % NS:09d}"
        self._number = 0
        self._merge_after_s = 0.0
        for scratch in (*folder.glob(".*.tmp"), *folder.glob(".twinkeel-*")):
            if scratch.is_dir():
                shutil.rmtree(scratch, ignore_errors=True)
            else:
                scratch.unlink(missing_ok=True)

    # One thread

    def note(self, rows: list[Row]) -> None:
        """Append them to the journal of the part to come: a kill loses only what is not there. A
        disk that does not take them is told of when it does not take the part."""
        path = self._path(self._number).with_suffix(".rows")
        with suppress(OSError, ValueError), path.open("ab") as file:
            file.write(b"".join(_ENCODER.encode(row) + b"\n" for row in rows))

    def write(self, rows: list[Row]) -> None:
        """Make them a part, in place of its journal."""
        path = self._path(self._number)
        self._number += 1
        self._write(path, rows, self._run)
        self._prune()

    def _write(self, path: Path, rows: list[Row], run: str) -> None:
        with TraceWriter(path, defaults={"trace_id": f"live-{run}"}) as writer:
            writer.write(_batch(rows))
        pa.default_memory_pool().release_unused()
        path.with_suffix(".rows").unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{self._run}-{number:06d}.parquet"

    # The other

    def refresh(self) -> None:
        """Make ``trace.parquet`` of this run's parts so far, unless that takes too long or was
        done just now."""
        parts = self._parts(self._run)
        began_s = time.monotonic()
        if began_s < self._merge_after_s or _rows(parts) > self._merge_rows_most:
            return
        with suppress(Ended):
            merge(parts, self._folder / "trace.parquet", self.ending.is_set)
        ended_s = time.monotonic()
        took_s = ended_s - began_s
        self._merge_after_s = ended_s + max(took_s / MERGE_TIME_SHARE, MERGE_PART_S * len(parts))
        pa.default_memory_pool().release_unused()

    def finish(self) -> None:
        """Make a trace of this run's parts, unless that takes too long."""
        self.ending.clear()
        if _rows(self._parts(self._run)) <= min(self._merge_rows_most, FINISH_ROWS_MOST):
            self._finish(self._run)

    def finish_leftovers(self) -> None:
        """Make traces of what earlier runs left."""
        runs = {path.stem.rpartition("-")[0] for path in self._folder.glob("part-*")}
        failed: list[str] = []
        for run in sorted(runs - {f"part-{self._run}"}):
            try:
                self._finish(run.removeprefix("part-"))
            except Ended:
                return
            except (TraceError, OSError) as error:
                failed.append(str(error))
        if failed:
            raise TraceError("; ".join(failed))

    def _finish(self, run: str) -> None:
        for journal in sorted(self._folder.glob(f"part-{run}-*.rows")):
            part = journal.with_suffix(".parquet")
            rows = [] if part.exists() else _noted(journal)
            if rows:
                self._write(part, rows, run)
            else:
                journal.unlink()
        parts = self._parts(run)
        if not parts:
            return
        path = self._folder / f"trace-{run}.parquet"
        merge(parts, path, self.ending.is_set)
        newest = self._folder / ".trace.tmp"
        try:
            os.link(path, newest)
        except OSError:  # a file system without such links
            shutil.copyfile(path, newest)
        os.replace(newest, self._folder / "trace.parquet")
        for part in parts:
            part.unlink()

    def _parts(self, run: str) -> list[Path]:
        return sorted(self._folder.glob(f"part-{run}-*.parquet"))

    def _prune(self) -> None:
        """Delete the oldest files beyond the bound."""
        found = [*self._folder.glob("part-*.parquet"), *self._folder.glob("trace-*.parquet")]
        found.sort(key=lambda path: path.name.partition("-")[2])
        sizes = [path.stat().st_size for path in found]
        kept_bytes = sum(sizes)
        for path, size in zip(found[:-1], sizes, strict=False):
            if kept_bytes <= self._keep_bytes:
                return
            path.unlink()
            kept_bytes -= size


def merge(parts: Iterable[Path], path: Path, ended: Callable[[], bool] = lambda: False) -> Path:
    """Make one trace, whose first arrival is at 0, of the parts of a run.

    Raises:
        TraceError: there is nothing in them, or a part cannot be read.
        Ended: ``ended`` said so; nothing was written.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        for part in parts:
            for batch in open_trace(part).batches():
                if ended():
                    raise Ended
                yield batch

    return write_trace(batches(), path, resolution_s=0.0).path


def _rows(parts: list[Path]) -> int:
    return sum(open_trace(part).rows for part in parts)


def _noted(journal: Path) -> list[Row]:
    """The rows in a journal; a kill may have torn the last."""
    rows: list[Row] = []
    for line in journal.read_bytes().split(b"\n"):
        with suppress(msgspec.MsgspecError):
            rows.append(msgspec.json.decode(line, type=Row))
    return rows
