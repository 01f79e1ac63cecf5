"""From a recording of the designed load to a profile, or to the reasons why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.cost import StepCost, Trust
from traces.schema import TraceError
from traces.steps import read_steps
from twin.calibrate import making, refusal, usage
from twin.calibrate.checking import (
    CHECK_PHASE,
    errors_by_kind,
    step_errors,
    whole_requests,
    whole_requests_inside,
)
from twin.calibrate.client import read_client
from twin.calibrate.drifting import predict_ns
from twin.calibrate.errors import CalibrationError
from twin.calibrate.fitting import fit_steps
from twin.calibrate.material import designed, round_ratios, rows_to_fit
from twin.calibrate.overheads import PHASE as API_PHASE
from twin.calibrate.overheads import (
    before_server,
    fit_overheads,
    fit_overheads_by,
    host_per_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from policy.cost import Overheads, Profile, Step, Uncertainty
    from traces.steps import Recording
    from twin.calibrate.checking import StepErrors
    from twin.calibrate.contents import Flags, Ints
    from twin.calibrate.material import Material
    from twin.calibrate.overheads import OverheadFit
    from twin.regression import Array

LEAST_TO_FIT = 10
"""Steps without which there is nothing to solve."""
STALLS_WORTH_TELLING = 2.0
"""Per cent of the time."""
FRONT_WORTH_TELLING = 0.05
ROUNDS_NOTE = (
    "run_to_run_percent is the spread between the rounds of this one recording: what differs "
    "between days, and from one start of the server to the next, is not in it."
)
APART_NOTE = (
    "Steps and overheads are drawn as if off independently of each other; they are off in opposite "
    "ways, so intervals of whole requests are somewhat too wide."
)
NO_ROUNDS_NOTE = (
    "How far the machine's speed varies is not known: fewer than two rounds could be compared, and "
    "a run_to_run_percent of 0 says no more than that."
)


@dataclass(frozen=True)
class StepsTable:
    """The steps behind a fit, for plots: one value a step."""

    kind: Ints
    """0 decode, 1 prefill, 2 mixed."""
    held_out: Flags
    batch: Array
    kv_tokens: Array
    prefill_tokens: Array
    measured_ns: Array
    predicted_ns: Array


@dataclass(frozen=True)
class Calibration:
    """What came of a recording."""

    profile: Profile | None
    """None when the fit is refused."""
    refusal: tuple[str, ...]
    """Why, each with its value and what to do; empty when the fit is good."""
    figures: dict[str, Any]
    """What was measured on the way: numbers and texts, good for JSON."""
    steps: StepsTable | None = None
    draft: Profile | None = None
    """The profile as fitted, also when it is refused: for the report, not for use."""


@dataclass(frozen=True)
class Names:
    """Of the profile to be."""

    name: str
    gpu: str
    model: str
    base: Profile | None = None
    """Fills in settings that the recording lacks, and the cold start."""


@dataclass
class Found:
    """What is gathered until the verdict."""

    reasons: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fit_profile(
    folder: Path, *, name: str, gpu: str, model: str, base: Profile | None = None
) -> Calibration:
    """Fit the designed load that was recorded into ``folder``.

    Args:
        folder: holds ``steps.jsonl`` and ``client.jsonl``.
        name: of the profile, as ``card/model``.
        base: fills in settings that the recording lacks, and the cold start.

    Raises:
        CalibrationError: the folder cannot be read, or names are unknown.
    """
    making.check_names(gpu, model)
    recording = read_recording(folder / "steps.jsonl")
    material = designed(recording, tuple(read_client(folder / "client.jsonl")))
    return calibrate(material, Names(name, gpu, model, base), Found())


def read_recording(path: Path) -> Recording:
    """Raises: CalibrationError with the file and line."""
    try:
        return read_steps(path)
    except TraceError as error:
        raise CalibrationError(str(error)) from error


def calibrate(material: Material, names: Names, found: Found) -> Calibration:
    """Fit, check and judge. Whatever speaks against the fit is gathered, not only the first."""
    header = material.recording.header
    found.reasons += refusal.refuse_details(header)
    missing = making.missing_settings(header.settings)
    if names.base is None:
        found.reasons += refusal.refuse_settings(missing)
    elif missing:
        found.notes.append(f"Not recorded, taken from {names.base.name}: {', '.join(missing)}.")
    say_coverage(material, found)
    kind = material.kind(material.fitted)
    found.reasons += refusal.refuse_coverage(material.table(material.fitted), kind)
    judge_preemptions(material, found)
    if len(material.fitted) < LEAST_TO_FIT or (missing and names.base is None):
        return Calibration(None, tuple(found.reasons), found.figures)

    fit = fit_steps(rows_to_fit(material))
    found.figures["refinements"] = fit.refinements
    source = making.source_of(header, fit.rows)
    flags = making.engine_flags(header.settings, names.base)
    step = making.make_step(fit, source, flags.max_num_seqs)
    if material.contents.exact:
        host_ns = fit.coefficients["host_per_step_ns"]
        overheads = fit_overheads(material.recording, material.contents, material.client, host_ns)
    else:
        material, step, overheads = _from_client(material, names, step, found)
    _say_overheads(material, overheads, found)
    return judge(
        material,
        names,
        step,
        making.make_overheads(overheads, names.base, header),
        lambda spread: making.make_uncertainty(fit, overheads, spread),
        f"{source.removeprefix('calibrated: ')}, engine {header.engine}",
        found,
    )


def _from_client(
    material: Material, names: Names, step: Step, found: Found
) -> tuple[Material, Step, OverheadFit | None]:
    """What a text log does not tell: the gap between steps, and the way in and out.

    Returns:
        The material, its times with the gap; the step, and what is around it.
    """
    header = material.recording.header

    def cost(step: Step) -> StepCost:
        profile = making.make_profile(
            name=names.name, gpu=names.gpu, model=names.model, header=header, base=names.base,
            step=step, overheads=making.make_overheads(None, None, header),
            trust=Trust("fitted", "a step"),
        )  # fmt: skip
        return StepCost.from_profile(profile)

    if not np.isfinite(material.timing.gap_ns).any():
        host_ns = host_per_step(cost(step), material.client)
        if host_ns is None:
            found.notes.append("The gap between steps is not known: host_per_step_ns is 0.")
        else:
            found.notes.append("The gap between steps is what lone streams took on top of them.")
            step = making.with_host(step, host_ns, header)
            total_ns = material.timing.total_ns + host_ns
            material = replace(material, timing=replace(material.timing, total_ns=total_ns))
    return material, step, fit_overheads_by(cost(step), material.client)


def judge(
    material: Material, names: Names, step: Step, overheads: Overheads,
    uncertain: Callable[[float], Uncertainty | None], fitted_on: str, found: Found,
) -> Calibration:  # fmt: skip
    """Put the profile together, measure its errors and decide whether it may be used.

    Args:
        uncertain: makes the profile's uncertainty from the spread between rounds in per cent.
    """

    def made(trust: Trust) -> Profile:
        return making.make_profile(
            name=names.name, gpu=names.gpu, model=names.model, header=material.recording.header,
            base=names.base, step=step, overheads=overheads, trust=trust,
        )  # fmt: skip

    found.notes += making.assumed(material.recording.header.settings, names.model, names.base)
    # The formula as the twin will use it, tables and rounding included.
    plain = made(Trust("fitted", fitted_on))
    predicted_ns = predict_ns(StepCost.from_profile(plain), material.contents)
    fitted, held_out = _say_errors(material, predicted_ns, found)
    ratios = round_ratios(material, predicted_ns)
    spread = float(np.std(list(ratios.values()), ddof=1)) * 100 if len(ratios) > 1 else 0.0
    found.figures["rounds"] = {str(number): ratio for number, ratio in ratios.items()}
    found.figures["run_to_run_percent"] = spread
    found.notes.append(ROUNDS_NOTE if len(ratios) > 1 else NO_ROUNDS_NOTE)
    found.notes.append(APART_NOTE)
    unseen = material.held_out
    found.reasons += refusal.refuse_check(
        step_errors(predicted_ns[unseen], material.timing.total_ns[unseen])
    )
    found.reasons += refusal.refuse_kinds(held_out)
    found.reasons += refusal.refuse_rounds(ratios)
    inside: dict[str, dict[str, float]] = {}
    if not material.live:
        server = making.server_overheads(found.figures)
        inside = whole_requests_inside(plain, material.recording, server)
    found.figures["requests"] = whole_requests(plain, material.client)
    found.figures["requests_inside"] = inside
    found.reasons += refusal.refuse_requests(inside)
    if not inside:
        found.notes.append(
            "Judged by its steps only: no whole requests of a held-out load were recorded."
        )
    trust = Trust(
        "fitted", fitted_on, making.fit_errors(fitted, held_out), tuple(found.notes),
        uncertain(spread),
    )  # fmt: skip
    profile = made(trust)
    return Calibration(
        profile=None if found.reasons else profile,
        refusal=tuple(found.reasons),
        figures=found.figures,
        steps=_plots(material, predicted_ns),
        draft=profile,
    )


def say_coverage(material: Material, found: Found) -> None:
    """How much of the recording could be used, what of that was lost to stalls, and whether that
    is too much."""
    contents, timing = material.contents, material.timing
    stalled_ns = timing.total_ns[material.stalled]
    used = np.concatenate([material.fitted, material.held_out])
    whole_ns = float(np.sum(timing.total_ns[used])) + float(np.sum(stalled_ns))
    stalled = 100 * float(np.sum(stalled_ns)) / whole_ns if whole_ns else 0.0
    usable = int(contents.usable.sum())
    worked = len(contents.batch) - contents.unusable.get("empty step", 0)
    found.reasons += refusal.refuse_lost(usable, worked, stalled)
    found.figures |= {
        "steps": len(contents.batch),
        "usable_steps": usable,
        "unusable_steps": contents.unusable,
        "fitted_steps": len(material.fitted),
        "held_out_steps": len(material.held_out),
        "stalled_steps": len(stalled_ns),
        "stalled_percent": stalled,
        "same_load": material.same_load,
        "exact_contents": contents.exact,
        "exact_periods": contents.exact_periods,
        "phases": {
            name: int(np.sum(contents.usable & (contents.phase == place)))
            for place, name in enumerate(contents.phases)
        },
    }
    if not contents.exact:
        found.notes.append(usage.NOTE)
    if material.same_load:
        found.notes.append(
            "Held out: every fifth part of the same load, not a load of its own; an easier test."
        )
    if not contents.exact_periods and np.isfinite(timing.gap_ns).any():
        found.notes.append(
            "The gap between steps is by the times at which the API server saw their outputs."
        )
    if stalled > STALLS_WORTH_TELLING:
        found.notes.append(
            f"{stalled:.1f} % of the time was in {len(stalled_ns)} steps that took many times as "
            "long as their like; these were left out."
        )


def judge_preemptions(material: Material, found: Found) -> None:
    """Against a designed load they speak; whoever recorded live traffic cannot help them, and the
    requests that were pre-empted are left out anyway."""
    count = refusal.preemptions(material.recording)
    if not material.live:
        found.reasons += refusal.refuse_preemptions(count)
    elif count:
        found.notes.append(
            f"{count} pre-emptions in the traffic: steps with the requests that had them are left "
            "out."
        )
    if count is None:
        found.notes.append("Whether requests were pre-empted is not known.")


def _say_errors(
    material: Material, predicted_ns: Array, found: Found
) -> tuple[Mapping[str, StepErrors], Mapping[str, StepErrors]]:
    out: list[Mapping[str, StepErrors]] = []
    for name, steps in (("fitted", material.fitted), ("held_out", material.held_out)):
        told, seen = predicted_ns[steps], material.timing.total_ns[steps]
        by_kind = errors_by_kind(told, seen, material.kind(steps))
        whole = step_errors(told, seen)
        out.append(by_kind)
        found.figures[f"{name}_errors"] = {
            key: each.percent()
            for key, each in (("all", whole), *by_kind.items())
            if each is not None
        }
    return out[0], out[1]


def _say_overheads(material: Material, overheads: OverheadFit | None, found: Found) -> None:
    http = before_server(material.recording, material.client)
    found.figures["http_ns_by_phase"] = http
    spent = [row.e2e_ns for row in material.client if row.phase == CHECK_PHASE and row.e2e_ns]
    if spent and CHECK_PHASE in http and API_PHASE in http:
        share = (http[CHECK_PHASE] - http[API_PHASE]) / float(np.mean(spent))
        if share > FRONT_WORTH_TELLING:
            found.notes.append(
                f"Under load {share:.0%} of what clients waited for was outside the server's own "
                "times, beyond what single requests take there: its front process or the client "
                "had to wait for a CPU. The profile does not hold that."
            )
    if overheads is None:
        found.notes.append(
            "The way in and out was not measured: too few single requests in the phase api."
        )
        return
    found.figures |= overheads.figures
    found.figures["overhead_requests"] = overheads.requests


def _plots(material: Material, predicted_ns: Array) -> StepsTable:
    steps = np.concatenate([material.fitted, material.held_out])
    contents = material.contents
    return StepsTable(
        kind=material.kind(steps),
        held_out=np.arange(len(steps)) >= len(material.fitted),
        batch=contents.batch[steps],
        kv_tokens=contents.kv_tokens[steps],
        prefill_tokens=contents.prefill_tokens[steps],
        measured_ns=material.timing.total_ns[steps],
        predicted_ns=predicted_ns[steps],
    )
