"""The fall-back for a server that tells no requests: what the steps held, from its KV usage.

Blocks in use times their size, less half a block for each sequence (its last block is half full on
average). Prompt parts are taken to begin at zero, and to go on where a step used up the token
budget. Both are estimates, and a profile that rests on them says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twin.calibrate.contents import NO_PHASE, Contents, Flags, as_array, periods

if TYPE_CHECKING:
    from traces.steps import Recording
    from twin.regression import Array

NOTE = (
    "Context tokens are estimated from the KV usage, half a block less for each sequence: the "
    "recording has no finished requests. Install the stat-logger plug-in for exact ones."
)


def estimate(recording: Recording) -> Contents:
    """What the steps held, as far as counts and KV usage tell."""
    steps, settings = recording.steps, recording.header.settings
    batch = as_array([row.decode_requests for row in steps])
    tokens = as_array([row.prefill_tokens for row in steps])
    requests = as_array([row.prefill_requests for row in steps])
    used_ppm = as_array([row.kv_used_ppm for row in steps])
    engine_ns = as_array([row.elapsed_ns for row in steps])
    blocks = np.nan if settings.kv_blocks is None else float(settings.kv_blocks - 1)
    size = np.nan if settings.block_tokens is None else float(settings.block_tokens)
    held = used_ppm / 1e6 * blocks * size
    # Told when the step is over: what its last token ended is free by then, so the step before
    # says better how much there was.
    held = np.maximum(held, np.concatenate([[0.0], held[:-1]]))
    new = np.nan_to_num(tokens)
    kv = np.maximum(held - size / 2 * (batch + np.nan_to_num(requests)) - new, batch)
    quad, known = _quads(new, np.nan_to_num(requests), np.nan_to_num(batch), recording)
    stamped = recording.header.plugin is not None
    period_ns, exact_periods = periods(steps, stamped=stamped)
    unusable: dict[str, int] = {}
    usable = np.ones(len(steps), dtype=np.bool_)
    for reason, bad in (
        ("no iteration details", np.isnan(batch) | np.isnan(tokens)),
        ("no elapsed time", np.isnan(engine_ns) | (engine_ns <= 0)),
        ("empty step", (batch == 0) & (new == 0)),
        ("no KV usage or block size", (batch > 0) & np.isnan(kv)),
        ("prompt parts of several prompts", ~known),
    ):
        count = int(np.sum(usable & bad))
        if count:
            unusable[reason] = count
        usable &= ~bad
    return Contents(
        batch=np.nan_to_num(batch),
        kv_tokens=np.where(batch > 0, np.nan_to_num(kv), 0.0),
        prefill_tokens=new,
        prefill_quad=quad,
        logprobs=np.zeros(len(steps)),
        engine_ns=engine_ns,
        period_ns=period_ns,
        exact_periods=exact_periods,
        at_ns=np.array([row.at_ns for row in steps], dtype=np.int64),
        usable=usable,
        phase=np.full(len(steps), NO_PHASE, dtype=np.int64),
        phases=(),
        unusable=unusable,
        exact=False,
        prefill_step={},
    )


def _quads(
    tokens: Array, requests: Array, batch: Array, recording: Recording
) -> tuple[Array, Flags]:
    """Quadratic terms, and where they could be told."""
    budget = recording.header.settings.max_num_batched_tokens
    quad = np.zeros(len(tokens))
    known = np.ones(len(tokens), dtype=np.bool_)
    begun = 0.0
    for place, (new, prompts) in enumerate(zip(tokens.tolist(), requests.tolist(), strict=True)):
        if not new:
            begun = 0.0
            continue
        full = budget is not None and new + batch[place] >= budget
        if prompts == 1:
            quad[place] = (begun + new) ** 2 - begun**2
            begun = begun + new if full else 0.0
            continue
        known[place] = not full and not begun
        quad[place] = prompts * (new / max(1.0, prompts)) ** 2
        begun = 0.0
    return quad, known
