"""A profile from live traffic: a fit where it covers enough, else the base profile stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from policy.cost import Padding, Step, StepCost, TokenPadding, Uncertainty
from traces.schema import TraceError
from traces.steps import read_both_halves
from twin.calibrate import making, refusal
from twin.calibrate.calibration import (
    LEAST_TO_FIT,
    Calibration,
    Found,
    Names,
    calibrate,
    judge,
    judge_preemptions,
    say_coverage,
)
from twin.calibrate.drifting import pieces, predict_ns, sums_ratio
from twin.calibrate.errors import CalibrationError
from twin.calibrate.material import live

if TYPE_CHECKING:
    from pathlib import Path

    from policy.cost import Coefficient, Profile
    from twin.calibrate.contents import Ints
    from twin.calibrate.material import Material
    from twin.regression import Array

    _Ratio = tuple[float, float]

LEAST_TO_SCALE = 50
INTERVAL_SDS = 3.92
"""Standard deviations in a 95 % interval of a normal variable."""


def fit_passive(
    recording_path: Path, base: Profile, *, name: str = "", gpu: str = "", model: str = ""
) -> Calibration:
    """Fit what a live server served, as far as that covers enough; else scale ``base`` to it.

    ``figures["method"]`` and the profile's trust say which of the two was done. The way in and out
    stays as in ``base``: live traffic does not tell it. Names that are not given are those of
    ``base``. What came before the file began anew is read, too.

    Raises:
        CalibrationError: the recording cannot be read, or has no step, or names are unknown.
    """
    try:
        material = live(read_both_halves(recording_path))
    except TraceError as error:
        raise CalibrationError(str(error)) from error
    names = Names(name or base.name, gpu or base.gpu, model or base.model, base)
    if gpu or model:
        making.check_names(names.gpu, names.model)
    found = Found()
    table, kind = material.table(material.fitted), material.kind(material.fitted)
    lacking = refusal.refuse_coverage(table, kind)
    if lacking:
        return _scaled(material, names, found, base, lacking)
    found.figures["method"] = "fitted"
    found.notes.append("Fitted to live traffic, not to a designed load.")
    return calibrate(material, names, found)


def _scaled(
    material: Material, names: Names, found: Found, base: Profile, lacking: list[str]
) -> Calibration:
    found.reasons += refusal.refuse_details(material.recording.header)
    judge_preemptions(material, found)
    say_coverage(material, found)
    steps = len(material.fitted)
    if steps < LEAST_TO_SCALE:
        found.reasons.append(
            f"{steps} usable steps, at least {LEAST_TO_SCALE} are needed to scale a profile: "
            "record longer"
        )
        return Calibration(None, tuple(found.reasons), found.figures)
    (decode, decode_sd), (prefill, prefill_sd) = _ratios(material, base)
    ratio_percent = 100 * max(decode_sd / decode, prefill_sd / prefill)
    found.figures |= {
        "method": "scaled",
        "decode_ratio": decode,
        "prefill_ratio": prefill,
        "not_fitted_because": lacking,
    }
    found.notes.append(
        f"Live traffic did not cover enough for a fit of its own ({lacking[0].split(':')[0]}): "
        f"decode times of {base.name} times {decode:.3f}, prefill times times {prefill:.3f}."
    )
    source = making.source_of(material.recording.header, steps)
    return judge(
        material,
        names,
        _stretched(base.step, decode, prefill, source),
        base.overheads,
        lambda spread: _stretched_uncertainty(
            base.trust.uncertainty, decode, prefill, max(spread, ratio_percent)
        ),
        f"{base.trust.fitted_on}; scaled to {source.removeprefix('calibrated: ')}",
        found,
    )


def _ratios(material: Material, base: Profile) -> tuple[_Ratio, _Ratio]:
    """By how much the decode and the prefill part of a profile are to be multiplied, each with its
    standard deviation.

    Each from its own steps; without lone prefills, from what mixed steps take on top of decoding.
    """
    cost, contents, measured = StepCost.from_profile(base), material.contents, material.timing
    predicted_ns = predict_ns(cost, contents)
    kind = material.kind(material.fitted)
    decodes, prefills, mixed = (material.fitted[kind == place] for place in range(3))

    def ratio(steps: Ints) -> _Ratio:
        return _with_sd(measured.total_ns[steps], predicted_ns[steps])

    decode = ratio(decodes if len(decodes) >= LEAST_TO_FIT else material.fitted)
    if len(prefills) >= LEAST_TO_FIT:
        return decode, ratio(prefills)
    if len(mixed) >= LEAST_TO_FIT:
        without = replace(
            contents,
            prefill_tokens=np.zeros_like(contents.prefill_tokens),
            prefill_quad=np.zeros_like(contents.prefill_quad),
        )
        decode_ns = predict_ns(cost, without)[mixed]
        on_top = predicted_ns[mixed] - decode_ns
        left = measured.total_ns[mixed] - decode[0] * decode_ns
        if np.sum(on_top) > 0 and np.sum(left) > 0:
            return decode, _with_sd(left, on_top)
    return decode, decode


def _with_sd(measured_ns: Array, expected_ns: Array) -> _Ratio:
    ratio, low, high = sums_ratio(measured_ns, expected_ns, pieces(len(measured_ns)))
    return ratio, (high - low) / INTERVAL_SDS


def _stretched(step: Step, decode: float, prefill: float, source: str) -> Step:
    """Host times go with decoding, where they are the larger share."""

    def times(coefficient: Coefficient, factor: float) -> Coefficient:
        interval = coefficient.interval
        return msgspec.structs.replace(
            coefficient,
            value=coefficient.value * factor,
            interval=None if interval is None else (interval[0] * factor, interval[1] * factor),
            source=f"{coefficient.source}; times {factor:.3f}, {source}",
        )

    changed: dict[str, object] = {}
    for name in step.__struct_fields__:
        value = getattr(step, name)
        if name.endswith("_ns") and value is not None:
            changed[name] = times(value, prefill if name.startswith("prefill_") else decode)
    changed["batch_padding"] = tuple(
        Padding(row.up_to_batch, row.extra_ns * decode) for row in step.batch_padding
    )
    changed["token_padding"] = tuple(
        TokenPadding(row.up_to_tokens, row.extra_ns * prefill) for row in step.token_padding
    )
    return msgspec.structs.replace(step, **changed)


def _stretched_uncertainty(
    known: Uncertainty | None, decode: float, prefill: float, spread_percent: float
) -> Uncertainty:
    """Coefficients are as well known as before, relative to their new size; all times together no
    better than the recording's own spread lets them be."""
    spread_percent = making.percent(spread_percent)
    if known is None:
        return Uncertainty((), (), spread_percent)
    factors = [
        1.0 if name not in Step.__struct_fields__
        else prefill if name.startswith("prefill_") else decode
        for name in known.names
    ]  # fmt: skip
    rows = known.covariance_ns2
    return msgspec.structs.replace(
        known,
        run_to_run_percent=max(known.run_to_run_percent, spread_percent),
        covariance_ns2=tuple(
            tuple(value * (factors[i] * factors[j]) for j, value in enumerate(row))
            for i, row in enumerate(rows)
        ),
    )
