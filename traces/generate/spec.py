"""The specification of a generated trace: one validated YAML document."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import yaml

from traces.generate.arrivals import Arrivals  # noqa: TC001 - msgspec reads them
from traces.generate.lengths import Law, NonNegative, Positive  # noqa: TC001
from traces.hints import explain
from traces.schema import TraceError

if TYPE_CHECKING:
    import os

Count = Annotated[int, msgspec.Meta(ge=1)]


class Users(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asks: user k (1, 2, ... count) is drawn with weight k ** -zipf.

    Streams of the same line share its users.
    """

    count: Count
    zipf: NonNegative = 1.0


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts share leading blocks: one of `prompts` system prompts of `system_tokens` each.

    System prompt k is drawn with weight k ** -zipf; `system_tokens` are part of every prompt.
    """

    system_tokens: Count
    prompts: Count = 1
    zipf: NonNegative = 1.0
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=32767)] = 64


class Sessions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A start opens a session: turns, each with the whole conversation so far as its prompt.

    `turns` is the number of turns; a turn comes `think_s` after the answer to the one before,
    and an answer is taken to last `service_s` plus `service_s_per_token` for each of its tokens.
    A session ends early when its prompt would pass `prompt_tokens_max`.
    """

    turns: Law
    think_s: Law
    service_s: NonNegative = 0.3
    service_s_per_token: NonNegative = 0.015
    prompt_tokens_max: Count = 32_000


class Chains(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A start opens an agent chain: a plan, rounds of tool calls, an answer.

    Each round holds 1 to `parallel` calls that start together and whose parent is the last call
    of the round before; the context grows by the round's answers and by `tool_tokens` a call.
    """

    rounds: Law
    tool_tokens: Law
    gap_s: Law
    parallel: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    service_s: NonNegative = 0.3
    service_s_per_token: NonNegative = 0.015
    prompt_tokens_max: Count = 64_000


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of traffic. `prompt_tokens` are the new tokens of a request or turn."""

    name: str
    business_line: str
    sla_class: Literal["P0", "P1", "P2"]
    model: str
    endpoint: Literal["chat", "completions", "embeddings"]
    arrivals: Arrivals
    prompt_tokens: Law
    output_tokens: Law
    users: Users | None = None
    prefix: Prefix | None = None
    sessions: Sessions | None = None
    chains: Chains | None = None
    tenant_id: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-128, le=127)] | None = None
    deadline_s: Positive | None = None
    max_output_tokens: Count | None = None
    prompt_bytes_per_token: Positive | None = None

    def __post_init__(self) -> None:
        if self.sessions is not None and self.chains is not None:
            raise ValueError(f"stream {self.name!r} has both sessions and chains; give one")


class TraceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trace of `duration_s` seconds, made of streams that do not depend on each other.

    Every stream starts `warm_up_s` before the trace does, so that sessions are already under way
    at its start; calls before 0 are left out.
    """

    schema: Literal[1]
    duration_s: Positive
    streams: Annotated[list[Stream], msgspec.Meta(min_length=1)]
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    warm_up_s: NonNegative = 0.0

    def __post_init__(self) -> None:
        names = [stream.name for stream in self.streams]
        if len(set(names)) < len(names):
            raise ValueError(f"two streams have the same name: {', '.join(names)}")


def load_spec(path: str | os.PathLike[str]) -> TraceSpec:
    """Read and check a specification.

    Raises: TraceError, naming the file, the field and the value, when it is not valid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    return parse_spec(text, str(path))


def parse_spec(text: str, name: str) -> TraceSpec:
    """Check the YAML text of a specification; `name` is what errors call it.

    Raises: TraceError when it is not valid.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TraceError(f"{name}: not valid YAML: {error}") from error
    number = document.get("schema") if isinstance(document, dict) else None
    if number != 1:
        raise TraceError(f"{name}: schema {number!r} is unknown here; write schema: 1")
    try:
        return msgspec.convert(document, TraceSpec, str_keys=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"{name}: {explain(error, TraceSpec)}") from error
