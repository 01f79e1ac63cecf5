"""What can be made to go wrong, for drills: ``POST /twin/fault`` and ``DELETE /twin/fault``.

One fault at a time. It strikes requests that arrive while it is on, each with the chance ``share``;
``slow``, and ``hang`` with a share of 1, strike the engine itself. ``unsure`` shows in logprobs
only: every token could as well have been another. ``noisy`` is weights that have become so: it says
other words than it should, and is not sure of them. ``same`` says one token over and over, as
weights full of NaN do. ``oom`` ends the process at a prompt that is long enough, as the kernel does
when memory is out: by SIGKILL, after a word in its output. ``cold`` is a process in which nothing
is compiled yet: the engine stands still, with all that is in it, at the first prompt, and at the
first one that asks for logprobs. vLLM takes 3 to 14 s for these.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Kind = Literal[
    "http_500", "http_503", "http_400", "hang", "stall", "reset", "cut", "no_end", "empty", "null",
    "abort", "truncated", "blank", "slow", "latency", "unsure", "noisy", "same",
    "oom", "cold",
]  # fmt: skip
MIDWAY: tuple[Kind, ...] = ("stall", "reset", "cut", "no_end", "abort", "truncated")
"""They strike when ``after_tokens`` tokens are out, at the latest at the end of the answer."""
HOLLOW: tuple[Kind, ...] = ("empty", "null", "blank")
"""The engine makes one token, and the answer has none."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that is wrong."""

    kind: Kind
    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    """Of the requests that arrive."""
    for_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None
    """Null: until it is taken away."""
    after_tokens: Annotated[int, Meta(ge=0, le=2**20)] = 4
    """0: right after a stream's headers."""
    factor: Annotated[float, Meta(ge=0.01, le=1000.0)] = 4.0
    """``slow``: steps take this many times as long."""
    delay_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 1.0
    """``latency``: before every answer. ``cold``: for each thing that is compiled."""
    prompt_tokens_from: Annotated[int, Meta(ge=1, le=2**20)] = 4096
    """``oom``: prompts that long, and longer."""

    @property
    def of_engine(self) -> bool:
        """It strikes the engine, and so everything in flight."""
        return self.kind == "slow" or (self.kind == "hang" and self.share == 1.0)


read = msgspec.json.Decoder(Fault).decode
"""Raises ``msgspec.DecodeError`` or ``msgspec.ValidationError``."""
