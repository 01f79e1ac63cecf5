"""A trace on its way into the world: spread, sped up, scaled, in columns of plain Python values.

Rows stay in Arrow batches until they are settled; only what the world needs is unpacked. So memory
holds the batches since that of the oldest open request, however long the trace is.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from policy.events import Endpoint
from traces import TraceError, spread_ties
from traces.spread import uniforms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from policy.decisions import Settled
    from traces import Trace
    from twin.calls import Result

NS = 1_000_000_000
BYTES_PER_TOKEN = 4
"""Prompt bytes of a token, where the trace knows no bytes: about that of English text."""
LENGTH_MAX = 2**31 - 1
FIRST_COPY_ID = 1 << 62
"""Request ids of what a traffic spike adds, far above those of any trace."""
LIKENESS_ID = 1 << 40
"""Between the ids of a caller and of its next likeness; hashed ids may wrap, and are told apart
even so."""
COPY_SPREAD_S = 1.0
"""Copies made by ``scale`` above 1 are spread over this long after the original."""


class Chunk:
    """A batch of requests: as columns to simulate from, and with room for what became of them."""

    __slots__ = (
        "arrival_ns", "batch", "deadline_ns", "endpoint", "line", "max_tokens", "model", "open",
        "output_tokens", "prefix", "prefix_block_tokens", "prompt_bytes", "prompt_tokens",
        "results", "session", "sla", "user",
    )  # fmt: skip
    stream: ClassVar[bool] = True
    """Traces do not say; most callers of chat and completions do."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        rows = batch.num_rows
        self.batch = batch
        self.arrival_ns: list[int] = np.rint(_numbers(batch, "arrival_s") * NS).astype(int).tolist()
        self.prompt_tokens: list[int] = _numbers(batch, "prompt_tokens").tolist()
        self.output_tokens: list[int] = _integers(batch, "output_tokens", 0)
        self.prompt_bytes = [
            known or BYTES_PER_TOKEN * tokens
            for known, tokens in zip(
                _integers(batch, "prompt_bytes", 0), self.prompt_tokens, strict=True
            )
        ]
        self.max_tokens = _integers(batch, "max_output_tokens", 0)
        self.deadline_ns = [round(value * NS) for value in _floats(batch, "deadline_s")]
        self.model = _strings(batch, "model")
        self.endpoint = _endpoints(batch)
        self.sla = _strings(batch, "sla_class")
        self.line = _strings(batch, "business_line")
        self.user = _names(batch, "user_id", "u")
        self.session = _names(batch, "session_id", "s")
        self.prefix_block_tokens = _integers(batch, "prefix_block_tokens", 0)
        prefix = _column(batch, "prefix_ids")
        self.prefix: list[tuple[int, ...]]
        if prefix.null_count == rows:
            self.prefix = [()] * rows
        else:
            self.prefix = [tuple(ids) if ids else () for ids in prefix.to_pylist()]
        self.results: list[Any] = [None] * rows
        self.open = rows


class Asked:
    """One request of a client that waits for its answer: a chunk of a single row.

    A client makes its own kind of it and overrides ``settled``. Lengths are in tokens; what is not
    given is empty or 0, as in ``policy.events.Arrived``.
    """

    __slots__ = (
        "arrival_ns", "chain", "deadline_ns", "endpoint", "line", "max_tokens", "model", "open",
        "output_tokens", "prefix", "prefix_block_tokens", "prompt_bytes", "prompt_tokens",
        "results", "resume", "session", "sla", "step", "stream", "user",
    )  # fmt: skip

    def __init__(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int = 0,
        prompt_bytes: int = 0,
        deadline_ns: int = 0,
        model: str = "",
        endpoint: Endpoint = "chat",
        sla: str = "",
        line: str = "",
        user: str = "",
        session: str = "",
        prefix: tuple[int, ...] = (),
        prefix_block_tokens: int = 0,
        chain: str = "",
        step: str = "",
        resume: str = "",
        stream: bool = True,
    ) -> None:
        self.prompt_tokens = [prompt_tokens]
        self.output_tokens = [output_tokens]
        self.max_tokens = [max_tokens]
        self.prompt_bytes = [prompt_bytes or BYTES_PER_TOKEN * prompt_tokens]
        self.deadline_ns = [deadline_ns]
        self.model = [model]
        self.endpoint: list[Endpoint] = [endpoint]
        self.sla = [sla]
        self.line = [line]
        self.user = [user]
        self.session = [session]
        self.prefix = [prefix]
        self.prefix_block_tokens = [prefix_block_tokens]
        self.chain = chain
        self.step = step
        self.resume = resume
        self.stream = stream
        self.arrival_ns = [-1]
        """When it was asked."""
        self.results: list[Any] = [None]
        self.open = 1

    def settled(self, result: Result, decision: Settled) -> None:
        """It has its outcome, at this instant; the way to the client is the client's own."""


def arrivals(
    trace: Trace,
    *,
    seed: int = 0,
    speed: float = 1.0,
    scale: float = 1.0,
    scale_lengths: float = 1.0,
    assume_output: int = 0,
) -> Iterator[Chunk]:
    """The trace's requests in order of arrival.

    Args:
        seed: of everything drawn here: ties, thinning, copies.
        speed: the trace runs this many times as fast.
        scale: the rate is multiplied by this, at the trace's own pace: below 1 requests are left
            out, above 1 copies are added within a second of the original.
        scale_lengths: prompts and answers are this many times as long.
        assume_output: tokens of an answer whose length the trace does not know; 0: refuse those.

    Raises:
        TraceError: the trace has no absolute arrivals, or a factor is not above 0; on the way:
            an answer of unknown length, or one too long for the trace's columns.
    """
    for name, value in (("speed", speed), ("scale", scale), ("scale_lengths", scale_lengths)):
        if not (value > 0 and isfinite(value)):
            raise TraceError(f"{name} is {value}: it must be above 0 and finite")
    if assume_output < 0:
        raise TraceError(f"assume_output is {assume_output}: it must not be negative")
    if not trace.has_arrivals:
        raise TraceError(
            f"{trace.path}: arrivals are relative to their sessions; import the trace again with "
            "--session-rate, so that sessions start at a rate of your choice"
        )
    return _chunks(trace, seed, speed, scale, scale_lengths, assume_output)


def _chunks(
    trace: Trace, seed: int, speed: float, scale: float, scale_lengths: float, assume_output: int
) -> Iterator[Chunk]:
    batches: Iterable[pa.RecordBatch] = trace.batches()
    if scale != 1.0:
        batches = (_scaled(batch, scale, seed) for batch in batches)
    for batch in spread_ties(batches, seed):
        if not batch.num_rows:
            continue
        if speed != 1.0:
            batch = _with(batch, "arrival_s", _numbers(batch, "arrival_s") / speed)
        batch = _with_outputs(batch, assume_output, trace)
        if scale_lengths != 1.0:
            batch = _lengthened(batch, scale_lengths)
        yield Chunk(batch)


def _with_outputs(batch: pa.RecordBatch, assume_output: int, trace: Trace) -> pa.RecordBatch:
    """Answers of unknown length become ``assume_output`` tokens long; embeddings have none."""
    outputs = _column(batch, "output_tokens")
    if not outputs.null_count:
        return batch
    embeddings = np.array([name == "embeddings" for name in _strings(batch, "endpoint")])
    unknown = outputs.is_null().to_numpy(zero_copy_only=False) & ~embeddings
    if unknown.any() and not assume_output:
        row = int(_numbers(batch, "request_id")[np.flatnonzero(unknown)[0]])
        raise TraceError(
            f"{trace.path}: request {row} has no output_tokens: give --assume-output TOKENS for "
            "answers whose length the trace does not know"
        )
    values = np.where(unknown, assume_output, outputs.fill_null(0).to_numpy())
    return _with(batch, "output_tokens", values)


def _scaled(batch: pa.RecordBatch, scale: float, seed: int) -> pa.RecordBatch:
    """Rows repeated ``scale`` times on average; ids stay unique and rising in the original."""
    ids = _numbers(batch, "request_id")
    whole = int(scale)
    copies = whole + (uniforms(ids, seed + 1) < scale - whole)
    order = np.repeat(np.arange(ids.size), copies)
    first = np.r_[0, np.cumsum(copies)[:-1]] if ids.size else np.zeros(0, int)
    number = np.arange(order.size) - first[order]
    batch = batch.take(pa.array(order))
    resolution = _numbers(batch, "arrival_res_s")
    batch = _with(batch, "request_id", ids[order] * (whole + 1) + number)
    batch = _of_others(batch, number)
    return _with(batch, "arrival_res_s", np.where(number > 0, COPY_SPREAD_S, resolution))


def _of_others(batch: pa.RecordBatch, number: np.ndarray[Any, np.dtype[Any]]) -> pa.RecordBatch:
    """More load is more callers: the n-th copy of a request is the n-th likeness of its user's, in
    a session and a chain of its own, or it would queue behind its original."""
    for name in ("user_id", "session_id", "chain_id"):
        index = batch.schema.get_field_index(name)
        ids = pc.add(batch.column(index), pa.array(number * LIKENESS_ID, pa.int64()))
        batch = batch.set_column(index, batch.schema.field(index), ids)
    return batch


def repeated(
    chunks: Iterator[Chunk], spikes: Sequence[tuple[int, int, int]], seed: int
) -> Iterator[Chunk]:
    """Chunks in which the requests of some times arrive several times at once.

    Copies stand right behind their original and have ids that no other request has, and callers of
    their own.

    Args:
        spikes: (from, until, factor in permille) in ns; where they overlap, the largest counts.
    """
    copied = 0
    for chunk in chunks:
        times = np.array(chunk.arrival_ns)
        permille = np.full(times.size, 1000)
        for from_ns, until_ns, factor in spikes:
            inside = (times >= from_ns) & (times < until_ns)
            permille = np.where(inside, np.maximum(permille, factor), permille)
        if (permille == 1000).all():
            yield chunk
            continue
        ids = _numbers(chunk.batch, "request_id")
        times_each = permille // 1000 + (uniforms(ids, seed + 2) * 1000 < permille % 1000)
        order = np.repeat(np.arange(times.size), times_each)
        first = np.r_[0, np.cumsum(times_each)[:-1]]
        number = np.arange(order.size) - first[order]
        is_copy = number > 0
        fresh = FIRST_COPY_ID + copied + np.cumsum(is_copy) - 1
        copied += int(is_copy.sum())
        batch = _of_others(chunk.batch.take(pa.array(order)), number)
        yield Chunk(_with(batch, "request_id", np.where(is_copy, fresh, ids[order])))


def _lengthened(batch: pa.RecordBatch, factor: float) -> pa.RecordBatch:
    for name in ("prompt_tokens", "output_tokens", "prompt_bytes", "max_output_tokens"):
        column = _column(batch, name)
        values: Any
        if column.null_count:
            values = [
                None if value is None else max(1, round(value * factor))
                for value in column.to_pylist()
            ]
        else:
            numbers = column.to_numpy()
            values = np.where(numbers > 0, np.maximum(1, np.rint(numbers * factor)), 0)
        batch = _with(batch, name, _bounded(values, name, factor))
    return batch


def _bounded(values: Any, name: str, factor: float) -> Any:
    largest = max((value for value in values if value is not None), default=0)
    if largest > LENGTH_MAX:
        raise TraceError(
            f"scale_lengths {factor} makes {name} as large as {largest:.4g}: at most {LENGTH_MAX}"
        )
    return values


def _with(batch: pa.RecordBatch, name: str, values: Any) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index)
    if isinstance(values, np.ndarray):
        values = values.astype(field.type.to_pandas_dtype())
    return batch.set_column(index, field, pa.array(values, field.type))


def _endpoints(batch: pa.RecordBatch) -> list[Endpoint]:
    """The endpoint column; null, and what is none of the gateway's endpoints, is a chat."""
    known = set(get_args(Endpoint))
    names = _strings(batch, "endpoint")
    return [cast("Endpoint", name) if name in known else "chat" for name in names]


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(batch.schema.get_field_index(name))


def _numbers(batch: pa.RecordBatch, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    values: np.ndarray[Any, np.dtype[Any]] = _column(batch, name).to_numpy(zero_copy_only=False)
    return values


def _integers(batch: pa.RecordBatch, name: str, default: int) -> list[int]:
    column = _column(batch, name)
    if column.null_count == len(column):
        return [default] * len(column)
    if column.null_count:
        return [default if value is None else value for value in column.to_pylist()]
    values: list[int] = column.to_numpy().tolist()
    return values


def _floats(batch: pa.RecordBatch, name: str) -> list[float]:
    column = _column(batch, name)
    if column.null_count == len(column):
        return [0.0] * len(column)
    return [0.0 if value is None else value for value in column.to_pylist()]


def _strings(batch: pa.RecordBatch, name: str) -> list[str]:
    """A dictionary column; null becomes the empty string."""
    column = _column(batch, name)
    if column.null_count == len(column):
        return [""] * len(column)
    words = [word or "" for word in column.dictionary.to_pylist()]
    words.append("")
    indices = column.indices.fill_null(len(words) - 1) if column.null_count else column.indices
    return [words[index] for index in indices.to_numpy().tolist()]


def _names(batch: pa.RecordBatch, name: str, prefix: str) -> list[str]:
    """A column of numbers as names for the policy; null becomes the empty string."""
    column = _column(batch, name)
    if column.null_count == len(column):
        return [""] * len(column)
    return ["" if value is None else f"{prefix}{value}" for value in column.to_pylist()]
