"""How far the fitted profile can be believed: its error on load that the fit never saw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from policy.cost import StepCost
from policy.files import load_gpus, load_models
from twin.alone import Asked, serve_alone
from twin.calibrate.client import phase_of
from twin.calibrate.contents import KINDS
from twin.engine import UnfitError
from twin.fleet import engine_settings
from twin.regression import relative_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.cost import Overheads, Profile
    from traces.steps import Recording
    from twin.alone import Served
    from twin.calibrate.client import ClientRow
    from twin.calibrate.contents import Ints
    from twin.regression import Array

CHECK_PHASE = "check"


@dataclass(frozen=True)
class StepErrors:
    """Errors of predicted step times, as shares of what was measured."""

    steps: int
    mean: float
    """Weighted by time: the sum of what each step is off over the sum of the times."""
    median: float
    worst: float
    bias: float
    """Sum of predicted over sum of measured, less one."""

    def percent(self) -> dict[str, float]:
        return {
            "steps": float(self.steps),
            "mean_percent": self.mean * 100,
            "median_percent": self.median * 100,
            "worst_percent": self.worst * 100,
            "bias_percent": self.bias * 100,
        }


def step_errors(predicted_ns: Array, measured_ns: Array) -> StepErrors | None:
    """None where there is no step."""
    if not len(measured_ns):
        return None
    each = relative_error(predicted_ns, measured_ns)
    whole = float(np.sum(measured_ns))
    return StepErrors(
        steps=len(measured_ns),
        mean=float(np.sum(np.abs(predicted_ns - measured_ns))) / whole,
        median=float(np.median(each)),
        worst=float(np.max(each)),
        bias=float(np.sum(predicted_ns)) / whole - 1.0,
    )


def errors_by_kind(predicted_ns: Array, measured_ns: Array, kind: Ints) -> dict[str, StepErrors]:
    """Kinds without a step are left out."""
    found = {
        name: step_errors(predicted_ns[kind == place], measured_ns[kind == place])
        for place, name in enumerate(KINDS)
    }
    return {name: each for name, each in found.items() if each is not None}


def whole_requests(
    profile: Profile, client: Sequence[ClientRow], phase: str = CHECK_PHASE
) -> dict[str, dict[str, float]]:
    """Play a phase's real arrivals through the twin's engine and compare whole requests.

    Returns:
        By metric (``e2e``, ``ttft``, ``tpot``): how many requests, measured and predicted mean and
        p99 in ns, and their errors in per cent. Empty when nothing can be compared.
    """
    rows = [each for each in client if each.phase == phase and each.e2e_ns is not None]
    asked = [Asked(row.sent_ns, row.prompt_tokens, max(1, row.output_tokens)) for row in rows]
    served = _play(profile, asked, profile.overheads)
    if not served:
        return {}
    measured: dict[str, list[float]] = {"e2e": [], "ttft": [], "tpot": []}
    predicted: dict[str, list[float]] = {"e2e": [], "ttft": [], "tpot": []}
    for row, each in zip(rows, served, strict=True):
        assert row.e2e_ns is not None
        measured["e2e"].append(row.e2e_ns)
        predicted["e2e"].append(each.e2e_ns)
        if row.ttft_ns is None:
            continue
        measured["ttft"].append(row.ttft_ns)
        predicted["ttft"].append(each.ttft_ns)
        if row.output_tokens > 1:
            gaps = row.output_tokens - 1
            measured["tpot"].append((row.e2e_ns - row.ttft_ns) / gaps)
            predicted["tpot"].append((each.e2e_ns - each.ttft_ns) / gaps)
    return {
        name: _compare(np.array(predicted[name], dtype=np.float64), np.array(values))
        for name, values in measured.items()
        if values
    }


def whole_requests_inside(
    profile: Profile, recording: Recording, overheads: Overheads, phase: str = CHECK_PHASE
) -> dict[str, dict[str, float]]:
    """The same by the server's own clock: from its arrival in the server to its last output there.

    What a starved client or front process makes of it is not in here.

    Args:
        overheads: as the server sees them.

    Returns:
        As ``whole_requests``, for ``e2e`` and ``tpot``.
    """
    rows = [row for _, row in recording.requests if phase_of(row.id) == phase]
    known = [(row.at_ns - row.e2e_ns, row) for row in rows if row.e2e_ns is not None]
    known.sort(key=lambda each: each[0])
    asked = [Asked(at_ns, row.prompt_tokens, max(1, row.output_tokens)) for at_ns, row in known]
    served = _play(profile, asked, overheads)
    if not served:
        return {}
    measured: dict[str, list[float]] = {"e2e": [], "tpot": []}
    predicted: dict[str, list[float]] = {"e2e": [], "tpot": []}
    for (_, row), each in zip(known, served, strict=True):
        assert row.e2e_ns is not None
        measured["e2e"].append(row.e2e_ns)
        predicted["e2e"].append(each.e2e_ns)
        if row.decode_ns is not None and row.output_tokens > 1:
            gaps = row.output_tokens - 1
            measured["tpot"].append(row.decode_ns / gaps)
            predicted["tpot"].append(each.decode_ns / gaps)
    return {
        name: _compare(np.array(predicted[name], dtype=np.float64), np.array(values))
        for name, values in measured.items()
        if values
    }


def _play(profile: Profile, asked: list[Asked], overheads: Overheads) -> list[Served]:
    """Arrivals count from the first; nothing comes back when the engine could not serve one."""
    if not asked:
        return []
    settings = engine_settings(profile, load_models()[profile.model], load_gpus()[profile.gpu])
    start_ns = asked[0].at_ns
    moved = [replace(each, at_ns=each.at_ns - start_ns) for each in asked]
    try:
        return serve_alone(settings, StepCost.from_profile(profile), moved, overheads)
    except UnfitError:
        return []


def _compare(predicted_ns: Array, measured_ns: Array) -> dict[str, float]:
    out: dict[str, float] = {"requests": float(len(measured_ns))}
    for name, value in (("mean", np.mean), ("p99", lambda values: np.quantile(values, 0.99))):
        seen, told = float(value(measured_ns)), float(value(predicted_ns))
        out[f"{name}_measured_ns"] = seen
        out[f"{name}_predicted_ns"] = told
        out[f"{name}_error_percent"] = (told / seen - 1.0) * 100 if seen else float("nan")
    return out
