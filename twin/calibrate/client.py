"""The designed load as its client saw it: ``client.jsonl``, one object a request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from twin.calibrate.errors import CalibrationError

if TYPE_CHECKING:
    from pathlib import Path

_KEY = re.compile(r"cal\.(?P<phase>[A-Za-z0-9_-]+)\.\d+")


class ClientRow(msgspec.Struct, frozen=True):
    """One request of the designed load; times by the client's monotonic clock."""

    id: str
    phase: str
    sent_ns: int
    prompt_tokens: int
    output_tokens: int
    ttft_ns: int | None = None
    """Of streams only."""
    e2e_ns: int | None = None
    """Null when the request failed."""
    logprobs: bool = False
    stream: bool = False


def key_of(request_id: str | None) -> str | None:
    """``cal.<phase>.<n>`` of a request's id, which the server lengthens; None for other traffic."""
    found = None if request_id is None else _KEY.search(request_id)
    return None if found is None else found[0]


def phase_of(request_id: str | None) -> str:
    """The phase of the designed load that a request belongs to; empty for other traffic."""
    found = None if request_id is None else _KEY.search(request_id)
    return "" if found is None else found["phase"]


def read_client(path: Path) -> list[ClientRow]:
    """All rows, in the order in which they were sent.

    Raises:
        CalibrationError: the file cannot be read, or a line is broken; its number is told.
    """
    decoder = msgspec.json.Decoder(ClientRow)
    rows: list[ClientRow] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read: {error.strerror}; it is written beside steps.jsonl when the "
            "designed load runs"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise CalibrationError(f"{path}: line {number}: {error}; record again") from error
    rows.sort(key=lambda row: (row.sent_ns, row.id))
    return rows
