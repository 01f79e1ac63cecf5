"""Step records of a vLLM server: what each engine step did and when, and each finished request.

The plug-in in `controller/vllm_plugin` writes them while vLLM serves; `read_steps` reads a file,
`StepTail` follows one that grows, and `read_iteration_log` makes the best of a stock server's text
log. A file is JSON Lines: a header object, then one array a row::

    ["s", at_ns, step, prefill_requests, prefill_tokens, decode_requests, elapsed_ns,
          running, waiting, kv_used_ppm, preemptions, period_ns]
    ["r", at_ns, id, prompt_tokens, cached_tokens, output_tokens, preemptions,
          queued_ns, prefill_ns, decode_ns, e2e_ns, reason]

A step's row comes before the rows of the requests that it finished. What is not known is null.
The file never holds the text of a prompt or of an answer. A last line without its end (the writer
was stopped, or is writing) is no error.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, NamedTuple

import msgspec
from msgspec import Meta

from traces.schema import TraceError

if TYPE_CHECKING:
    from pathlib import Path

STEPS_SCHEMA = 1
KIND = "vllm-steps"
STEPS_FILE = re.compile(r"steps-\d+(?:\.[0-9a-f]+)?-(\d+)\.jsonl")
"""A file's name, with the engine's number: as usual, and where another process has that name."""
_NS = 10**9

Count = Annotated[int, Meta(ge=0)]


class ServerSettings(msgspec.Struct, frozen=True):
    """What the server was started with, as far as it decides the steps. Null: not known."""

    model: str | None = None
    served_model: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    device: str | None = None
    tensor_parallel: Count | None = None
    block_tokens: Count | None = None
    kv_blocks: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    scheduling_policy: str | None = None
    async_scheduling: bool | None = None
    prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    long_prefill_token_threshold: Count | None = None
    enforce_eager: bool | None = None
    task: Literal["generate", "pooling"] = "generate"
    speculative: str | None = None


class Header(msgspec.Struct, frozen=True):
    """The first line of a file. Fields that this version does not know are passed over."""

    schema: int
    kind: str
    vllm: str | None
    plugin: str | None
    engine: Count
    wall_ns: int
    """Unix time when the monotonic clock, which stamps the rows, was at `mono_ns`."""
    mono_ns: int
    details: bool
    """Whether the server told what each step computed (`--enable-logging-iteration-details`)."""
    settings: ServerSettings
    life: str = ""
    """Drawn by the writer's process, and told on the server's `/metrics` beside the path: a path
    is no proof, since containers on two machines may have the same one. Empty: an older writer."""


class StepRow(NamedTuple):
    """One engine step."""

    at_ns: int
    """Monotonic clock of the API server when the step's output was there."""
    step: int
    prefill_requests: int | None
    prefill_tokens: int | None
    """New prompt tokens computed, parts of a prompt included; also those computed again after a
    pre-emption, whose requests `prefill_requests` does not count."""
    decode_requests: int | None
    """Requests that went on with one token each. With asynchronous scheduling, also the one that
    ended by a stop token in the step before: that was found out too late."""
    elapsed_ns: int | None
    """How long the engine core waited for the model: less than the step took, and with
    asynchronous scheduling much less."""
    running: int | None
    waiting: int | None
    kv_used_ppm: int | None
    preemptions: int | None
    """Pre-emptions of requests that went on in this step: vLLM tells of one when it is over."""
    period_ns: int | None = None
    """From the token before to this step's, by the engine core's clock, of the request for which
    that is least: what the step took, where the engine has one batch at a time. Null when nothing
    decoded."""


class RequestRow(NamedTuple):
    """One finished request. A request that its client left has no row: vLLM tells nothing."""

    at_ns: int
    id: str | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    preemptions: int | None
    queued_ns: int | None
    """From queued to first scheduled; this and the two after by the engine core's clock."""
    prefill_ns: int | None
    """From first scheduled to the first token."""
    decode_ns: int | None
    """From the first token to the last."""
    e2e_ns: int | None
    """From its arrival in the API server to its last output being processed there."""
    reason: str | None


@dataclass(frozen=True)
class Recording:
    """A file's rows in their order; a request stands with the index of its step in `steps`, which
    is -1 when the file begins after that step."""

    header: Header
    steps: list[StepRow] = field(default_factory=list)
    requests: list[tuple[int, RequestRow]] = field(default_factory=list)

    def add(self, row: StepRow | RequestRow) -> None:
        """Append the next row."""
        if isinstance(row, StepRow):
            self.steps.append(row)
        else:
            self.requests.append((len(self.steps) - 1, row))


# ---- lines ----


class _Step(msgspec.Struct, array_like=True, tag="s"):
    at_ns: Count
    step: Count
    prefill_requests: Count | None
    prefill_tokens: Count | None
    decode_requests: Count | None
    elapsed_ns: Count | None
    running: Count | None
    waiting: Count | None
    kv_used_ppm: Count | None
    preemptions: Count | None
    period_ns: Count | None = None


class _Request(msgspec.Struct, array_like=True, tag="r"):
    at_ns: Count
    id: str | None
    prompt_tokens: Count
    cached_tokens: Count | None
    output_tokens: Count
    preemptions: Count | None
    queued_ns: int | None
    prefill_ns: int | None
    decode_ns: int | None
    e2e_ns: int | None
    reason: str | None


class _Kind(msgspec.Struct):
    """So much of a header as tells whether the rest can be read."""

    schema: int
    kind: str


_ROWS = msgspec.json.Decoder(_Step | _Request)
_KINDS = msgspec.json.Decoder(_Kind)
_HEADERS = msgspec.json.Decoder(Header)
_ENCODER = msgspec.json.Encoder()


def decode_header(line: bytes, where: str) -> Header:
    """The header in a file's first line; `where` names file and line in the message.

    Raises: TraceError when this is no header, or one of another schema.
    """
    try:
        kind = _KINDS.decode(line)
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{where}: not a header of step records ({error}); give a file that the vLLM plug-in "
            "twinkeel-vllm-steps wrote"
        ) from error
    if kind.kind != KIND or kind.schema != STEPS_SCHEMA:
        raise TraceError(
            f"{where}: kind {kind.kind!r}, schema {kind.schema} is unknown here, which reads "
            f"{KIND!r}, schema {STEPS_SCHEMA}; use the plug-in that belongs to this version"
        )
    try:
        return _HEADERS.decode(line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: broken header: {error}; record again") from error


def decode_row(line: bytes, where: str) -> StepRow | RequestRow:
    """The row in a line; `where` names file and line in the message. Raises: TraceError."""
    try:
        row = _ROWS.decode(line)
    except msgspec.DecodeError as error:
        shown = line[:80].decode("utf-8", "replace")
        raise TraceError(f"{where}: not a step record: {shown!r} ({error}); cut it out") from error
    if isinstance(row, _Step):
        return StepRow(*msgspec.structs.astuple(row))
    return RequestRow(*msgspec.structs.astuple(row))


def encode_header(header: Header) -> bytes:
    """A header as its line."""
    return _ENCODER.encode(header) + b"\n"


def encode_row(row: StepRow | RequestRow) -> bytes:
    """A row as its line."""
    return _ENCODER.encode(["s" if isinstance(row, StepRow) else "r", *row]) + b"\n"


# ---- files ----


def steps_file(path: Path, engine: int = 0) -> Path:
    """The file itself, or of a folder the file of `engine` that was written to last.

    Raises: TraceError when there is none.
    """
    if not path.is_dir():
        return path
    found = [each for each in path.glob(f"steps-*-{engine}.jsonl") if each.is_file()]
    if not found:
        raise TraceError(
            f"{path}: no steps-*-{engine}.jsonl in this folder; is the plug-in in vLLM's "
            "environment (pip install ./controller/vllm_plugin, in Twinkeel's repository), and "
            "does TWINKEEL_STEPS name this folder?"
        )
    return max(found, key=lambda each: each.stat().st_mtime_ns)


def older_half(path: Path) -> Path:
    """Where the plug-in keeps what came before `path`, which it began anew when it was full."""
    return path.with_name(path.name + ".1")


def read_steps(path: Path) -> Recording:
    """Read one file of step records. A last line that is not whole is left out.

    Raises: TraceError with the line's number for a file that cannot be read, a wrong header or a
    broken line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    torn = lines.pop()  # empty when the last line is whole
    if not lines:
        raise TraceError(f"{path}: line 1: no header yet; wait for the server's first step")
    recording = Recording(decode_header(lines[0], f"{path}: line 1"))
    for number, line in enumerate(lines[1:], 2):
        recording.add(decode_row(line, f"{path}: line {number}"))
    if torn:
        with contextlib.suppress(TraceError):
            recording.add(decode_row(torn, ""))
    return recording


def read_both_halves(path: Path) -> Recording:
    """As `read_steps`, with what the same server recorded before the file began anew.

    Raises: TraceError for `path`; an older half that cannot be read, or is of another life, is
    left out.
    """
    recording = read_steps(path)
    try:
        older = read_steps(older_half(path))
    except TraceError:
        return recording
    follows = older.steps and recording.steps and older.steps[-1].step < recording.steps[0].step
    if not follows or older.header.life != recording.header.life:
        return recording
    count = len(older.steps)
    requests = older.requests + [(count + place, row) for place, row in recording.requests]
    return Recording(recording.header, older.steps + recording.steps, requests)


class StepTail:
    """Follows a file that the plug-in writes to, and the next one when that file was full.

    The file need not be there yet. `header` is that of the rows read last, None before the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self._file: BinaryIO | None = None
        self._rows: list[StepRow | RequestRow] = []
        self._torn = b""
        self._line = 0

    def read_new(self) -> list[StepRow | RequestRow]:
        """The rows that were written since the last call, in their order.

        Raises: TraceError for the first broken line; the next call gives the rows before and after
        it, and passes over what else was broken. A file with a wrong header is refused at every
        call.
        """
        if self._file is None and not self._open(self.path):
            return []
        self._read_rest()
        if self._replaced():
            self._read_rest()  # what was written between the read and the rename
            ours = self._number()
            self.close()
            # Filled and renamed since the last call, too: it holds the rows in between.
            if self._open(older_half(self.path)):
                if self._number() != ours:
                    self._read_rest()
                self.close()
            if self._open(self.path):
                self._read_rest()
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        """Let the file go; the next read begins the file at `path` from its start."""
        if self._file is not None:
            self._file.close()
        self._file, self._torn, self._line = None, b"", 0

    def _open(self, path: Path) -> bool:
        try:
            self._file = path.open("rb")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
        return True

    def _number(self) -> tuple[int, int]:
        assert self._file is not None
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino

    def _replaced(self) -> bool:
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False  # between the rename and the new file, or cleared away
        return (now.st_dev, now.st_ino) != self._number()

    def _read_rest(self) -> None:
        assert self._file is not None
        *lines, self._torn = (self._torn + self._file.read()).split(b"\n")
        broken: TraceError | None = None
        for line in lines:
            self._line += 1
            where = f"{self.path}: line {self._line}"
            if self._line == 1:
                try:
                    self.header = decode_header(line, where)
                except TraceError:
                    self.close()
                    raise
                continue
            try:
                self._rows.append(decode_row(line, where))
            except TraceError as error:
                broken = broken or error
        if broken is not None:
            raise broken


# ---- the text log ----

_ITERATION = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Iteration\((?P<step>\d+)\): "
    r"(?P<prefills>\d+) context requests, (?P<prefill_tokens>\d+) context tokens, "
    r"(?P<decodes>\d+) generation requests, (?P<decode_tokens>\d+) generation tokens, "
    r"iteration elapsed time: (?P<elapsed_ms>\d+(?:\.\d+)?) ms(?P<dummy> \(dummy\))?"
    r"(?:, \w+ KV cache usage: (?P<used>\d+(?:\.\d+)?)%)?"
)
_STAMP = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d) \[")
_LEAP_YEAR = 2000
"""The log's stamps have no year; a leap year has every day."""
_YEAR_S = 366 * 86400


def read_iteration_log(path: Path, settings: ServerSettings, engine: int = 0) -> Recording:
    """Read the lines that `--enable-logging-iteration-details` makes vLLM print for every step.

    The log has whole seconds, two decimals of a millisecond, and neither queue lengths nor
    requests: those are missing here, and `at_ns` is a step's second or, if later, the step before
    plus the time elapsed. `settings` is what the log cannot tell.

    Raises: TraceError when the file cannot be read or has no such line for `engine`.
    """
    header = Header(STEPS_SCHEMA, KIND, None, None, engine, 0, 0, True, settings)
    recording = Recording(header)
    at_ns = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                found = _ITERATION.search(line)
                if found is None or found["dummy"] or int(found["engine"] or 0) != engine:
                    continue
                elapsed_ns = round(float(found["elapsed_ms"]) * 1e6)
                at_ns = max(at_ns + elapsed_ns, _stamp_ns(line, at_ns))
                recording.add(_logged_step(found, at_ns, elapsed_ns, settings))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    if not recording.steps:
        raise TraceError(
            f"{path}: no line 'Iteration(...)' of engine {engine}; start vLLM with "
            "--enable-logging-iteration-details, and with TWINKEEL_STEPS_QUIET=0 if the plug-in "
            "twinkeel-vllm-steps is installed there"
        )
    return recording


def _logged_step(
    found: re.Match[str], at_ns: int, elapsed_ns: int, settings: ServerSettings
) -> StepRow:
    decodes = int(found["decodes"])
    # A request that goes on after a pre-emption counts as generating, whatever it computes again.
    again = int(found["decode_tokens"]) - decodes if settings.speculative is None else 0
    return StepRow(
        at_ns=at_ns,
        step=int(found["step"]),
        prefill_requests=int(found["prefills"]),
        prefill_tokens=int(found["prefill_tokens"]) + again,
        decode_requests=decodes,
        elapsed_ns=elapsed_ns,
        running=None,
        waiting=None,
        kv_used_ppm=None if found["used"] is None else round(float(found["used"]) * 1e4),
        preemptions=None,
    )


def _stamp_ns(line: str, after_ns: int) -> int:
    """The second of a line's stamp, counted from the start of the log's year; 0 without one."""
    found = _STAMP.search(line)
    if found is None:
        return 0
    try:
        stamp = datetime.strptime(f"{_LEAP_YEAR}-{found[1]}Z", "%Y-%m-%d %H:%M:%S%z")
    except ValueError:
        return 0
    start = datetime(_LEAP_YEAR, 1, 1, tzinfo=stamp.tzinfo)
    at_s = round((stamp - start).total_seconds())
    if at_s * _NS < after_ns - _YEAR_S * _NS // 2:  # the year turned
        at_s += _YEAR_S
    return at_s * _NS
