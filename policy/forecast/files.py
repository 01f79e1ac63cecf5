"""A forecaster in a folder: what it has learned as arrays, and a card that says what it is.

``model.safetensors`` holds numbers and nothing that could be run. ``card.json`` says which code
made them, from what, and how well it did. A folder that does not fit is refused: a forecaster whose
code has changed since would not say what it said when it was measured.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from hashlib import blake2b, sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policy.forecast.forecaster import LoadForecaster
    from policy.forecast.series import Array, Series

SCHEMA = 1
KIND = "load-forecaster"
WEIGHTS, CARD = "model.safetensors", "card.json"
DECIDING = (
    "baselines", "blend", "boosting", "conformal", "contract", "features", "forecaster", "learned",
    "lstm", "regression", "series",
)  # fmt: skip
"""Modules beside this one that decide what a forecaster says."""
LIBRARIES = ("numpy", "scikit-learn", "torch")
AGAIN = "train it again: twinkeel forecast train TRACE... --out {}"


class ForecastError(ValueError):
    """A forecaster cannot be made, kept or used: where, what differs, and what to do about it."""


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A series that a forecaster has learned from."""

    name: str
    windows: int
    unknown: int
    """Windows that were not recorded."""
    hash: str
    """Of its numbers."""
    peaks: bool
    start_s: float
    weekday_known: bool


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well windows were forecast that the forecaster had not seen."""

    series: str
    target: str
    horizon: int
    """Windows ahead."""
    windows: int
    """Truths that forecasts were held against."""
    wape: float | None
    """Sum of errors of the median over the sum of truths; None where all truths are 0."""
    wape_last: float | None
    """Of the last value."""
    pinball: float | None
    """Pinball loss of the 0.95 quantile, as a share of the mean truth."""
    pinball_last: float | None
    coverage: float
    """Share of truths that lie at the 0.95 quantile or below it."""
    trace: str = ""
    """The file that the series is from."""


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a saved forecaster is."""

    schema: int
    kind: str
    created: str
    """When, in ISO 8601; whoever saves it gives the time."""
    window_s: float
    horizons: tuple[int, ...]
    """Windows ahead."""
    parameters: dict[str, Any]
    learned: tuple[Learned, ...]
    data_hash: str
    """Of all series together."""
    metrics: tuple[Score, ...]
    """Of a twin of it, which had not seen the last part of each series; empty: not measured."""
    code: str
    """Hash of the sources that decide."""
    versions: dict[str, str]
    """Of libraries: another one may round differently, which is no reason to refuse."""
    weights_sha256: str
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each array."""


@cache
def code_version() -> str:
    """Hash of the sources that decide what a forecaster says."""
    root = Path(__file__).parent
    digest = blake2b(digest_size=16)
    for name in DECIDING:
        source = (root / f"{name}.py").read_bytes()
        digest.update(f"{name} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


def data_hash(series: Sequence[Series]) -> str:
    """Of the numbers, bit for bit, whatever the series are called."""
    digest = blake2b(digest_size=16)
    for each in series:
        digest.update(
            repr((each.window_s, each.start_s, each.weekday_known, len(each), len(each.peak)))
            .encode()
        )  # fmt: skip
        for values in (each.mean, each.peak):
            digest.update(np.ascontiguousarray(values, "<f8").tobytes())
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    """Of what computes the forecasts."""
    return {name: metadata.version(name) for name in LIBRARIES}


def save(
    folder: Path,
    forecaster: LoadForecaster,
    learned: Sequence[Series],
    *,
    created: str,
    metrics: Sequence[Score] = (),
) -> Card:
    """Write a fitted forecaster into a folder.

    A new folder appears as a whole. In one that exists the weights are replaced and then the card,
    and loading refuses a card that stands beside other weights.

    Args:
        learned: what it was fitted to.
        created: the time, in ISO 8601.

    Raises:
        ForecastError: the forecaster holds values that are not finite, or the folder is a file.
        OSError: it cannot be written.
    """
    from safetensors.numpy import save as encoded

    arrays = {name: np.ascontiguousarray(each) for name, each in forecaster.state().items()}
    for name, values in arrays.items():
        _check_finite(folder, name, values)
    weights = encoded(arrays)
    horizons = tuple(int(horizon) for horizon in forecaster.horizons)
    card = Card(
        schema=SCHEMA,
        kind=KIND,
        created=created,
        window_s=learned[0].window_s,
        horizons=horizons,
        parameters={**forecaster.get_params(deep=False), "horizons": horizons},
        learned=tuple(
            Learned(
                each.name, len(each), int(np.isnan(each.mean).sum()), data_hash([each]),
                len(each.peak) > 0, each.start_s, each.weekday_known,
            )
            for each in learned
        ),
        data_hash=data_hash(learned),
        metrics=tuple(metrics),
        code=code_version(),
        versions=library_versions(),
        weights_sha256=sha256(weights).hexdigest(),
        arrays={name: (str(each.dtype), each.shape) for name, each in sorted(arrays.items())},
    )  # fmt: skip
    text = msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"
    _write(folder, {WEIGHTS: weights, CARD: text})
    return card


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    if folder.exists() and not folder.is_dir():
        raise ForecastError(f"{folder}: is a file; name a folder for the forecaster")
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    making.mkdir()
    try:
        for name, content in contents.items():
            (making / name).write_bytes(content)
        if folder.exists():
            for name in contents:
                (making / name).replace(folder / name)
        else:
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def read_card(folder: Path) -> Card:
    """The card of a saved forecaster, whichever code made it.

    Raises:
        ForecastError: there is none, or none that this version can read.
    """
    path = folder / CARD
    again = AGAIN.format(folder)
    if not path.is_file():
        raise ForecastError(f"{folder}: holds no {CARD}, so it is no forecaster; {again}")
    try:
        raw: object = msgspec.json.decode(path.read_bytes())
        if not isinstance(raw, dict):
            raise ForecastError(f"{path}: is no card; {again}")
        schema = cast("dict[str, Any]", raw).get("schema")
        if schema != SCHEMA:
            raise ForecastError(
                f"{path}: schema {schema!r} is not known, this version reads {SCHEMA}; {again}"
            )
        card = msgspec.convert(raw, Card)
    except msgspec.MsgspecError as error:  # JSON that is none, or another struct
        raise ForecastError(f"{path}: is no valid card ({error}); {again}") from error
    if card.kind != KIND:
        raise ForecastError(f"{path}: is of kind {card.kind!r}, not {KIND!r}; {again}")
    return card


def load(folder: Path) -> tuple[LoadForecaster, Card]:
    """A saved forecaster, which says what it said when it was saved, bit for bit.

    Raises:
        ForecastError: it was made by other code, or its files are not what was saved.
    """
    card = read_card(folder)
    again = AGAIN.format(folder)
    if card.code != code_version():
        raise ForecastError(
            f"{folder}: was trained with other forecasting code ({card.code}) than this"
            f" ({code_version()}); {again}"
        )
    arrays = _read_arrays(folder, card)
    from policy.forecast.forecaster import LoadForecaster

    parameters = {**card.parameters, "horizons": card.horizons}
    if tuple(card.parameters.get("horizons", ())) != card.horizons:
        raise ForecastError(
            f"{folder / CARD}: horizons {list(card.horizons)} differ from those among the"
            f" parameters, {card.parameters.get('horizons')}; {again}"
        )
    try:
        return LoadForecaster.from_state(parameters, arrays), card
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ForecastError(
            f"{folder}: card and arrays do not make a forecaster ({error}); {again}"
        ) from error


def _read_arrays(folder: Path, card: Card) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load as decoded

    path, again = folder / WEIGHTS, AGAIN.format(folder)
    if not path.is_file():
        raise ForecastError(f"{path}: is missing; copy it there, or {again}")
    weights = path.read_bytes()
    found = sha256(weights).hexdigest()
    if found != card.weights_sha256:
        raise ForecastError(
            f"{path}: sha256 is {found}, the card says {card.weights_sha256}: damaged, or of"
            f" another forecaster; copy both files again, or {again}"
        )
    try:
        arrays: dict[str, Array] = decoded(weights)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ForecastError(f"{path}: is no safetensors file ({error}); {again}") from error
    missing, extra = sorted(card.arrays.keys() - arrays), sorted(arrays.keys() - card.arrays)
    if missing or extra:
        what = [f"lacks {', '.join(missing[:3])}"] * bool(missing)
        what += [f"has {', '.join(extra[:3])} too many"] * bool(extra)
        raise ForecastError(f"{path}: {' and '.join(what)}, by the card; {again}")
    for name, values in arrays.items():
        if (str(values.dtype), values.shape) != card.arrays[name]:
            raise ForecastError(
                f"{path}: {name} is {values.dtype} {list(values.shape)}, the card says"
                f" {card.arrays[name][0]} {list(card.arrays[name][1])}; {again}"
            )
        _check_finite(path, name, values)
    return arrays


def _check_finite(path: Path, name: str, values: Array) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        wrong = int((~np.isfinite(values)).sum())
        raise ForecastError(
            f"{path}: {wrong} of {values.size} values of {name} are not finite;"
            f" {AGAIN.format('DIR')}"
        )
