"""What an engine is set up with, and what it works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from twin.engine.blocks import Extent, Run

# Where a sequence stands. A sequence whose last token is being computed is ENDING: with async
# scheduling it keeps its seat and its blocks until that token is processed, one decision later.
INBOX, WAITING, PREFILL, DECODE, ENDING, DONE = range(6)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The part of vLLM's configuration that decides schedules; names as in vLLM.

    Raises:
        ValueError: a value is out of range, with the value in the message.
    """

    kv_blocks: int
    """Blocks in the pool, the null block included."""
    block_tokens: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    max_model_len: int = 40960
    async_scheduling: bool = True
    prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"

    def __post_init__(self) -> None:
        for name, least in (
            ("kv_blocks", 2), ("block_tokens", 1), ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1), ("max_model_len", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs}: it must not exceed "
                f"max_num_batched_tokens ({self.max_num_batched_tokens}), as in vLLM"
            )
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(
                f"scheduling_policy is {self.scheduling_policy!r}: use 'fcfs' or 'priority'"
            )


class Sequence:
    """One request inside an engine.

    Args:
        id: unique within the engine; breaks ties.
        prompt_tokens: length of the prompt.
        output_tokens: true length of the answer; the scheduler does not see it coming unless it
            equals ``max_tokens``.
        max_tokens: the caller's limit, known to the scheduler; 0: none but the model's length.
        priority: lower runs earlier (``scheduling_policy="priority"`` only).
        pooling: an embedding: done when its prompt is.
        prefix: ids of the prompt's leading content, each for ``prefix_block_tokens`` tokens: two
            prompts have the same first tokens as far as their ids agree from the start. What lies
            behind is this request's own.
    """

    __slots__ = (
        "arrival_ns", "cached_tokens", "data", "eos", "held", "held_blocks", "id", "known_tokens",
        "max_tokens", "offset", "order", "output_tokens", "outputs", "own_run", "path", "pooling",
        "preemptions", "prefilled", "prefix", "prefix_block_tokens", "priority", "prompt_tokens",
        "replayed", "scheduled_ns", "shared_blocks", "stalled_step", "state", "turn",
    )  # fmt: skip

    arrival_ns: int
    """When the engine was handed it."""
    outputs: int
    """Output tokens it will have, all limits considered."""
    eos: bool
    """It ends by itself, before any limit that the scheduler knows of."""
    order: int
    """Its place in RUNNING: admissions are counted."""
    offset: int
    """While it decodes: step minus tokens computed before that step."""

    def __init__(
        self,
        id: int,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int = 0,
        priority: int = 0,
        pooling: bool = False,
        prefix: tuple[int, ...] = (),
        prefix_block_tokens: int = 0,
        data: Any = None,
    ) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.pooling = pooling
        self.prefix = prefix
        self.prefix_block_tokens = prefix_block_tokens
        self.data = data
        """Whatever the owner wants to find again in the call-backs."""
        self.state = INBOX
        self.preemptions = 0
        self.scheduled_ns = -1
        """First time in a batch."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at the first admission."""
        self.turn = 0
        """Its place among the sequences that put out a token in the step of its first one, from
        1: it stands behind all that decode."""
        self.replayed = 0
        """Output tokens kept over a preemption: prompt of the next prefill."""
        self.prefilled = 0
        """Tokens that the last completed prefill covered."""
        self.known_tokens = 0
        """Tokens known by their content when it last stood still."""
        self.stalled_step = -9
        """Last step in which a preemption further up left this one out."""
        self.own_run: Run | None = None
        """Own hashed blocks that lie in the free queue after a preemption."""
        self.path: tuple[int, ...] = ()
        self.shared_blocks = 0
        self.held: list[tuple[Extent, int]] = []
        self.held_blocks = 0

    def last_out_ns(self, first_ns: int, now_ns: int, token_ns: int) -> int:
        """When its last token has been sent: after its own tokens, but not before the first one.

        Args:
            first_ns: when the engine had its first token; below 0: nobody listens for it.
            now_ns: when the engine had its last one.
            token_ns: what it takes to send one.
        """
        if self.pooling:
            return now_ns
        out_ns = now_ns + token_ns * self.outputs
        if self.turn <= self.outputs or first_ns < 0:
            return out_ns
        return max(out_ns, first_ns + token_ns * self.turn)
