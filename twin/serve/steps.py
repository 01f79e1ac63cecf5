"""Step records of a served twin, as the plug-in for vLLM writes them.

A step's row is written when its output is there, so before the rows of the requests that it
finished. Times are the engine's planned ones, so a late event loop is not seen in them.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from uuid import uuid4

from traces.steps import (
    KIND,
    STEPS_SCHEMA,
    Header,
    RequestRow,
    ServerSettings,
    StepRow,
    encode_header,
    encode_row,
    older_half,
)
from twin.engine.sequence import PREFILL

if TYPE_CHECKING:
    from pathlib import Path

    from twin.engine import Sequence, StepRecord
    from twin.fleet import ReplicaSpec


HALF_BYTES = 16 << 20
"""When the file has so much it begins anew; the half before stays."""

log = logging.getLogger(__name__)


class _Decided(NamedTuple):
    """A step that is decided and not over yet."""

    at_ns: int
    record: StepRecord
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int


class StepWriter:
    """Writes one file. Times that it is given are on the engine's clock, in ns."""

    def __init__(self, folder: Path, spec: ReplicaSpec, model: str, version: str) -> None:
        """``version``: of the vLLM that the twin stands for.

        Raises:
            OSError: the folder or the file cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder.resolve() / f"steps-{os.getpid()}-0.jsonl"
        self.start_ns = 0
        """The monotonic clock when the engine's was at 0."""
        self.life = uuid4().hex[:16]
        """In the file and on the page of metrics, as the plug-in has it."""
        self._file: BinaryIO = self.path.open("wb", buffering=0)
        self._written = 0
        self._torn = b""
        """The rest of a line that the disk took a part of."""
        self._told = False
        self._header = encode_header(_header(spec, model, version, self.life))
        self._lag = 1 if spec.settings.async_scheduling else 0
        self._blocks = spec.settings.kv_blocks - 1
        self._seqs: dict[int, tuple[Sequence, str]] = {}
        self._decoding: set[int] = set()
        self._decided: deque[_Decided] = deque()
        self._step = 0
        self._end_ns = 0
        self._lines: list[bytes] = [self._header]
        self.flush()

    def add(self, seq: Sequence, name: str) -> None:
        """A sequence goes into the engine. ``name``: how vLLM would call it."""
        self._seqs[seq.id] = seq, f"{name}-{uuid4().hex[:8]}"

    def drop(self, seq: Sequence) -> None:
        """It is no longer there."""
        self._seqs.pop(seq.id, None)
        self._decoding.discard(seq.id)

    def decided(self, record: StepRecord, now_ns: int) -> None:
        """The engine has decided a step: what will be in it."""
        prompts = tokens = decodes = 0
        decoding = self._decoding
        decoding.difference_update(record.preempted)
        for id, count in record.scheduled:
            known = self._seqs.get(id)
            if id in decoding:
                decodes += 1
                continue
            if known is not None and known[0].preemptions:
                # Computed again: to vLLM such a request is one that generates.
                decodes += 1
                tokens += count - 1
            else:
                prompts += 1
                tokens += count
            if known is not None and known[0].state != PREFILL:
                decoding.add(id)
        self._decided.append(_Decided(now_ns, record, prompts, tokens, decodes))

    def wake(self, now_ns: int) -> None:
        """The engine is about to decide: the output of the step before (with async scheduling, of
        the one before that) is there."""
        if len(self._decided) <= self._lag:
            return
        at_ns, record, prompts, tokens, decodes = self._decided.popleft()
        if not record.scheduled:
            self._end_ns = max(self._end_ns, now_ns)
            return
        elapsed_ns = now_ns - max(at_ns, self._end_ns)
        period_ns = now_ns - self._end_ns if decodes and self._end_ns else None
        self._end_ns = now_ns
        used = self._blocks - record.free_blocks
        row = StepRow(
            now_ns + self.start_ns, self._step, prompts, tokens, decodes, elapsed_ns,
            len(record.running), record.waiting, 1_000_000 * used // self._blocks,
            len(record.preempted), period_ns,
        )  # fmt: skip
        self._step += 1
        self._lines.append(encode_row(row))

    def finished(self, seq: Sequence, in_ns: int, first_ns: int, now_ns: int) -> None:
        """A sequence has its last token. ``in_ns``: its way into the engine; ``first_ns``: when it
        had its first token, -1 for an embedding."""
        known = self._seqs.get(seq.id)
        if known is None:
            return
        first_ns = now_ns if first_ns < 0 else first_ns
        row = RequestRow(
            now_ns + self.start_ns, known[1], seq.prompt_tokens, seq.cached_tokens,
            0 if seq.pooling else seq.outputs, seq.preemptions,
            seq.scheduled_ns - seq.arrival_ns, first_ns - seq.scheduled_ns, now_ns - first_ns,
            now_ns - seq.arrival_ns + in_ns, "stop" if seq.eos or seq.pooling else "length",
        )  # fmt: skip
        self._lines.append(encode_row(row))
        self.drop(seq)

    def flush(self) -> None:
        """Into the file with it. What a full disk does not take is lost: answers go on."""
        if not self._lines:
            return
        data, done = self._torn + b"".join(self._lines), 0
        self._lines.clear()
        try:
            if self._written >= HALF_BYTES and not self._torn:
                self._begin_anew()
                data = self._header + data
            while done < len(data):
                done += self._file.write(data[done:])
            self._torn = b""
        except OSError as error:
            if done and data[done - 1 : done] != b"\n":
                self._torn = data[done : data.index(b"\n", done) + 1]
            elif done:
                self._torn = b""
            if not self._told:
                self._told = True
                log.warning("%s: step records are lost, this is said once: %s", self.path, error)
        self._written += done

    def _begin_anew(self) -> None:
        """What was written until now becomes the older half."""
        os.replace(self.path, older_half(self.path))
        self._file.close()
        self._file = self.path.open("wb", buffering=0)
        self._written = 0

    def close(self) -> None:
        self.flush()
        self._file.close()


def _header(spec: ReplicaSpec, model: str, version: str, life: str) -> Header:
    profile, settings = spec.profile, spec.settings
    told = ServerSettings(
        model=profile.model,
        served_model=model,
        dtype=profile.dtype,
        kv_cache_dtype="auto",
        device="twin",
        tensor_parallel=profile.tensor_parallel,
        block_tokens=settings.block_tokens,
        kv_blocks=settings.kv_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        scheduling_policy=settings.scheduling_policy,
        async_scheduling=settings.async_scheduling,
        prefix_caching=settings.prefix_caching,
        gpu_memory_utilization=profile.engine.gpu_memory_utilization,
        long_prefill_token_threshold=0,
        enforce_eager=True,
        task=profile.task,
    )
    return Header(
        STEPS_SCHEMA, KIND, version, "twin", 0, time_ns(), monotonic_ns(), True, told, life
    )
