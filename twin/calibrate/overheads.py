"""The time a request spends in the server outside the engine's steps.

From the phase ``api``: single short requests on an idle server. Two views are kept: the client's,
with HTTP and its own work in it, and the server's, which its own records end with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from twin.calibrate.client import key_of
from twin.calibrate.timing import near_most

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.cost import StepCost
    from traces.steps import Recording, RequestRow
    from twin.calibrate.client import ClientRow
    from twin.calibrate.contents import Contents
    from twin.regression import Array

NAMES = ("request_in_ns", "request_out_ns", "token_out_ns")
PHASE = "api"
LEAST_REQUESTS = 8
DRAWS = 400


@dataclass(frozen=True)
class OverheadFit:
    """Nanoseconds by the profile's key, as a client sees them."""

    coefficients: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    covariance_ns2: Array
    """Of ``NAMES``, in their order."""
    requests: int
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seen:
    """One request of the phase; times in ns, NaN where not known."""

    outputs: int
    before_first: float
    """Of the time to first token, what was outside the engine."""
    outside: float
    """Of the whole time, the same."""
    server_outside: float
    """The same by the server's own clock."""
    http: float


def fit_overheads(
    recording: Recording, contents: Contents, client: Sequence[ClientRow], host_ns: float
) -> OverheadFit | None:
    """Fit the way in, the way out and what a token costs on its way.

    Args:
        host_ns: the gap per step, which the twin charges to a lone step too.

    Returns:
        None where the phase has too few requests.
    """
    return _fit(_match(recording, contents, client, host_ns))


def fit_overheads_by(predict: StepCost, client: Sequence[ClientRow]) -> OverheadFit | None:
    """The same without any record of the requests: what the formula says stands for the engine."""
    return _fit([
        _Seen(
            outputs=max(1, row.output_tokens),
            before_first=np.nan if row.ttft_ns is None else row.ttft_ns - first_ns,
            outside=row.e2e_ns - first_ns - rest_ns,
            server_outside=np.nan,
            http=np.nan,
        )
        for row in client
        if row.phase == PHASE and row.e2e_ns is not None
        for first_ns, rest_ns in [_lone(predict, row)]
    ])  # fmt: skip


def host_per_step(predict: StepCost, client: Sequence[ClientRow]) -> float | None:
    """The gap between steps, from streams that had the server to themselves.

    Args:
        predict: the formula without a gap.

    Returns:
        Nanoseconds, not below 0; None with too few streams.
    """
    gaps: list[float] = []
    for row in client:
        alone = row.phase == PHASE or row.phase.startswith("decode-1-")
        if alone and row.ttft_ns is not None and row.e2e_ns is not None and row.output_tokens > 1:
            left_ns = row.e2e_ns - row.ttft_ns - _lone(predict, row)[1]
            gaps.append(left_ns / (row.output_tokens - 1))
    if len(gaps) < LEAST_REQUESTS:
        return None
    values = np.array(gaps)
    return max(0.0, float(np.mean(values[near_most(values)])))


def _lone(predict: StepCost, row: ClientRow) -> tuple[int, int]:
    """Time to first token, and from there to the last, of a request alone in the engine."""
    first_ns = predict.prefill_ns(row.prompt_tokens)
    return first_ns, predict.decode_ns(row.output_tokens, row.prompt_tokens, 1)


def _fit(seen: list[_Seen]) -> OverheadFit | None:
    if len(seen) < LEAST_REQUESTS:
        return None
    outputs = np.array([each.outputs for each in seen], dtype=np.float64)
    first = np.array([each.before_first for each in seen])
    outside = np.array([each.outside for each in seen])
    kept = near_most(outside)
    outputs, first, outside = outputs[kept], first[kept], outside[kept]
    solution = _solve(outputs, first, outside)
    generator = np.random.default_rng(0)
    draws = np.stack([
        _solve(outputs[rows], first[rows], outside[rows])
        for rows in generator.integers(0, len(outputs), (DRAWS, len(outputs)))
    ])  # fmt: skip
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    server = np.array([each.server_outside for each in seen])[kept]
    http = np.array([each.http for each in seen])[kept]
    figures: dict[str, float] = {}
    if np.isfinite(http).any():
        figures["http_ns"] = _mean(http)
    if np.isfinite(server).sum() >= LEAST_REQUESTS:
        known = np.isfinite(server)
        fixed, token = _line(outputs[known], server[known])
        # Where on its way the time passes cannot be told from inside: it is all put in front.
        figures |= {"server_in_ns": fixed, "server_out_ns": 0.0, "server_token_out_ns": token}
    return OverheadFit(
        coefficients={name: float(value) for name, value in zip(NAMES, solution, strict=True)},
        intervals={
            name: (min(float(a), float(value)), max(float(b), float(value)))
            for name, a, b, value in zip(NAMES, low, high, solution, strict=True)
        },
        covariance_ns2=np.cov(draws, rowvar=False),
        requests=int(kept.sum()),
        figures=figures,
    )


def before_server(recording: Recording, client: Sequence[ClientRow]) -> dict[str, float]:
    """Mean ns by phase that a client waited more than the server knows of: HTTP, and what it
    takes until the server's front process and the client itself are given a CPU."""
    rows = _by_key(recording)
    found: dict[str, list[float]] = {}
    for each in client:
        row = rows.get(key_of(each.id) or each.id)
        if row is not None and row.e2e_ns is not None and each.e2e_ns is not None:
            found.setdefault(each.phase, []).append(each.e2e_ns - row.e2e_ns)
    return {phase: float(np.mean(values)) for phase, values in sorted(found.items())}


def _by_key(recording: Recording) -> dict[str, RequestRow]:
    return {key: row for _, row in recording.requests if (key := key_of(row.id)) is not None}


def _match(
    recording: Recording, contents: Contents, client: Sequence[ClientRow], host_ns: float
) -> list[_Seen]:
    rows = _by_key(recording)
    seen: list[_Seen] = []
    for each in client:
        key = key_of(each.id) or each.id
        row, place = rows.get(key), contents.prefill_step.get(key)
        if each.phase != PHASE or row is None or place is None or each.e2e_ns is None:
            continue
        if row.queued_ns is None or row.decode_ns is None or not contents.usable[place]:
            continue
        # What the twin will charge until the first token: the waiting, and a whole step.
        to_first = row.queued_ns + float(contents.engine_ns[place]) + host_ns
        engine = to_first + row.decode_ns
        seen.append(
            _Seen(
                outputs=max(1, row.output_tokens),
                before_first=np.nan if each.ttft_ns is None else each.ttft_ns - to_first,
                outside=each.e2e_ns - engine,
                server_outside=np.nan if row.e2e_ns is None else row.e2e_ns - engine,
                http=np.nan if row.e2e_ns is None else float(each.e2e_ns - row.e2e_ns),
            )
        )
    return seen


def _solve(outputs: Array, first: Array, outside: Array) -> Array:
    """Way in, way out, per token: all the time outside is shared among them."""
    _, token = _line(outputs, outside)
    whole = max(0.0, _mean(outside) - token * float(np.mean(outputs)))
    way_in = whole
    if np.isfinite(first).any():
        way_in = min(whole, max(0.0, _mean(first) - token))
    return np.array([way_in, whole - way_in, token])


def _line(outputs: Array, outside: Array) -> tuple[float, float]:
    """Fixed part and slope by output tokens; the slope is 0 where it cannot be told or is below."""
    mean = _mean(outside)
    spread = outputs - np.mean(outputs)
    if float(np.max(outputs)) < 2 * float(np.min(outputs)) or len(outputs) < LEAST_REQUESTS:
        return max(0.0, mean), 0.0
    slope = float(np.sum(spread * outside) / np.sum(spread**2))
    slope = max(0.0, slope)
    return max(0.0, mean - slope * float(np.mean(outputs))), slope


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else float("nan")
