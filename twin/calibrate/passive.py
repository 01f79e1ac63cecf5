"""A profile from live traffic: a fit where it covers enough, else the base profile stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from policy.cost import Padding, Step, StepCost, TokenPadding
from twin.calibrate import making, refusal
from twin.calibrate.calibration import (
    LEAST_TO_FIT,
    Calibration,
    Found,
    Names,
    calibrate,
    judge,
    read_recording,
    say_coverage,
)
from twin.calibrate.drifting import predict_ns
from twin.calibrate.material import live

if TYPE_CHECKING:
    from pathlib import Path

    from policy.cost import Coefficient, Profile, Uncertainty
    from twin.calibrate.contents import Ints
    from twin.calibrate.material import Material

LEAST_TO_SCALE = 50


def fit_passive(recording_path: Path, base: Profile) -> Calibration:
    """Fit what a live server served, as far as that covers enough; else scale ``base`` to it.

    ``figures["method"]`` and the profile's trust say which of the two was done. The way in and out
    stays as in ``base``: live traffic does not tell it.

    Raises:
        CalibrationError: the recording cannot be read, or has no step.
    """
    material = live(read_recording(recording_path))
    names = Names(base.name, base.gpu, base.model, base)
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
    found.reasons += refusal.refuse_preemptions(material.recording)
    say_coverage(material, found)
    steps = len(material.fitted)
    if steps < LEAST_TO_SCALE:
        found.reasons.append(
            f"{steps} usable steps, at least {LEAST_TO_SCALE} are needed to scale a profile: "
            "record longer"
        )
        return Calibration(None, tuple(found.reasons), found.figures)
    decode, prefill = _ratios(material, base)
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
        lambda _: _stretched_uncertainty(base.trust.uncertainty, decode, prefill),
        f"{base.trust.fitted_on}; scaled to {source.removeprefix('calibrated: ')}",
        found,
    )


def _ratios(material: Material, base: Profile) -> tuple[float, float]:
    """By how much the decode and the prefill part of a profile are to be multiplied.

    Each from its own steps; without lone prefills, from what mixed steps take on top of decoding.
    """
    cost, contents, measured = StepCost.from_profile(base), material.contents, material.timing
    predicted_ns = predict_ns(cost, contents)
    kind = material.kind(material.fitted)
    decodes, prefills, mixed = (material.fitted[kind == place] for place in range(3))

    def ratio(steps: Ints) -> float:
        return float(np.sum(measured.total_ns[steps]) / np.sum(predicted_ns[steps]))

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
        on_top = float(np.sum(predicted_ns[mixed] - decode_ns))
        left = float(np.sum(measured.total_ns[mixed] - decode * decode_ns))
        if on_top > 0 and left > 0:
            return decode, left / on_top
    return decode, decode


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
    known: Uncertainty | None, decode: float, prefill: float
) -> Uncertainty | None:
    """Coefficients are as well known as before, relative to their new size."""
    if known is None:
        return None
    factors = [
        1.0 if name not in Step.__struct_fields__
        else prefill if name.startswith("prefill_") else decode
        for name in known.names
    ]  # fmt: skip
    rows = known.covariance_ns2
    return msgspec.structs.replace(
        known,
        covariance_ns2=tuple(
            tuple(value * (factors[i] * factors[j]) for j, value in enumerate(row))
            for i, row in enumerate(rows)
        ),
    )
