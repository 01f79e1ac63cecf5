"""From a fit to a profile, and to its file."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import yaml

from policy.cost import (
    DTYPE_BYTES,
    Coefficient,
    EngineSettings,
    FitError,
    Overheads,
    Padding,
    Profile,
    Step,
    TokenCount,
    Trust,
    Uncertainty,
)
from policy.files import decode, load_gpus, load_models, nearest
from twin.calibrate.errors import CalibrationError
from twin.calibrate.overheads import NAMES as OVERHEAD_NAMES
from twin.calibrate.refusal import NEEDED_SETTINGS
from twin.report.files import write_whole

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from traces.steps import Header, ServerSettings
    from twin.calibrate.checking import StepErrors
    from twin.calibrate.fitting import StepFit
    from twin.calibrate.overheads import OverheadFit
    from twin.regression import Array

DIGITS = 6
MAY_BE_EMPTY = ("names", "covariance_ns2")
"""Keys that a profile must have where it has what is around them."""
PADDING_FINE = 8
PADDING_STEP = 1.15
"""Batch sizes of the padding's table: each up to 8, then in steps of this factor."""


def check_names(gpu: str, model: str) -> None:
    """Raises: CalibrationError for a card or model that the tables do not know."""
    for what, name, known in (("card", gpu, load_gpus()), ("model", model, load_models())):
        if name not in known:
            raise CalibrationError(f"unknown {what} {name!r}: {nearest(name, known)}")


def missing_settings(settings: ServerSettings) -> list[str]:
    return [name for name in NEEDED_SETTINGS if getattr(settings, name) is None]


def engine_flags(settings: ServerSettings, base: Profile | None) -> EngineSettings:
    """The server's flags; what the recording lacks comes from ``base``.

    Raises:
        CalibrationError: flags that no server can have.
    """
    known: dict[str, Any] = {} if base is None else msgspec.structs.asdict(base.engine)
    for name in (*NEEDED_SETTINGS, "gpu_memory_utilization"):
        value = getattr(settings, name)
        if value is not None:
            known[name] = value
    try:
        return msgspec.convert(known, EngineSettings)
    except msgspec.ValidationError as error:
        raise CalibrationError(f"the recorded settings make no engine: {error}") from error


def source_of(header: Header, steps: int, what: str = "steps") -> str:
    return f"calibrated: vLLM {header.vllm or '(unknown)'}, {_day(header)}, {steps} {what}"


def _day(header: Header) -> str:
    if not header.wall_ns:
        return "day unknown"
    return datetime.fromtimestamp(header.wall_ns / 1e9, tz=UTC).date().isoformat()


def make_step(fit: StepFit, source: str, max_num_seqs: int) -> Step:
    values: dict[str, Any] = {
        name: Coefficient(_digits(fit.coefficients[name]), source, _interval(fit, name))
        for name in fit.shape.names
    }
    shape = fit.shape
    counts: dict[str, Any] = {
        name: TokenCount(value, f"{source}: least held-out error")
        for name, value in (
            ("prefill_free_tokens", shape.prefill_free_tokens),
            ("mixed_free_tokens", shape.mixed_free_tokens),
        )
        if value
    }
    return Step(**values, **counts, batch_padding=padding_rows(fit, max_num_seqs))


def with_host(step: Step, host_ns: float, header: Header) -> Step:
    """The step with a gap that was not fitted with the rest."""
    source = f"{source_of(header, 0).rsplit(',', 1)[0]}, streams alone on the server"
    return msgspec.structs.replace(step, host_per_step_ns=Coefficient(_digits(host_ns), source))


def padding_rows(fit: StepFit, max_num_seqs: int) -> tuple[Padding, ...]:
    """The bend of the decode curve as a table: straight between its knots."""
    knots = fit.shape.knots
    if not knots or not np.any(fit.padding_ns > 0):
        return ()
    rows: list[Padding] = []
    last = 0
    while last < max_num_seqs:
        up_to = last + 1 if last < PADDING_FINE else max(last + 1, int(last * PADDING_STEP))
        up_to = min(up_to, max_num_seqs)
        middle = (last + 1 + up_to) / 2
        rows.append(Padding(up_to, _digits(float(np.interp(middle, knots, fit.padding_ns)))))
        last = up_to
        if last >= knots[-1]:
            break
    if rows[-1].up_to_batch < max_num_seqs:  # flat behind the last knot
        rows.append(Padding(max_num_seqs, _digits(float(fit.padding_ns[-1]))))
    return tuple(rows)


def make_overheads(fit: OverheadFit | None, base: Profile | None, header: Header) -> Overheads:
    if fit is None:
        if base is not None:
            return base.overheads
        unknown = Coefficient(0.0, "not measured: no requests of the phase api")
        return Overheads(unknown, unknown, unknown)
    source = source_of(header, fit.requests, "single requests")
    return Overheads(**{
        name: Coefficient(
            _digits(fit.coefficients[name]),
            source,
            _around(_digits(fit.coefficients[name]), fit.intervals[name]),
        )
        for name in OVERHEAD_NAMES
    })  # fmt: skip


def server_overheads(figures: Mapping[str, Any]) -> Overheads:
    """As the server's own records see them; zero where they were not measured."""

    def named(name: str) -> Coefficient:
        return Coefficient(figures.get(name, 0.0), "calibrated: the server's own times")

    return Overheads(named("server_in_ns"), named("server_out_ns"), named("server_token_out_ns"))


def make_uncertainty(
    fit: StepFit, overheads: OverheadFit | None, run_to_run_percent: float
) -> Uncertainty:
    """Steps and overheads are fitted on different loads and taken as off independently.

    They are not quite: the overheads are what is left of single requests' times when the engine's
    part is taken off, so they are off the other way: by the fitted gap between steps, and, for a
    text log, by the whole formula. Intervals of sums of both are somewhat too wide by that.
    """
    names = list(fit.shape.names)
    matrix = fit.covariance_ns2
    if overheads is not None:
        size = len(names)
        names += OVERHEAD_NAMES
        whole = np.zeros((len(names), len(names)))
        whole[:size, :size] = matrix
        whole[size:, size:] = overheads.covariance_ns2
        matrix = whole
    moves = [place for place in range(len(names)) if matrix[place, place] > 0]
    return Uncertainty(
        names=tuple(names[place] for place in moves),
        covariance_ns2=tuple(
            tuple(_digits(_symmetric(matrix, row, column)) for column in moves) for row in moves
        ),
        run_to_run_percent=percent(run_to_run_percent),
    )


def fit_errors(
    fitted: Mapping[str, StepErrors], held_out: Mapping[str, StepErrors]
) -> tuple[FitError, ...]:
    out: list[FitError] = []
    for table in ("decode", "prefill", "mixed"):
        seen, unseen = fitted.get(table), held_out.get(table)
        if seen is None:
            continue
        out.append(
            FitError(
                table=cast("Any", table),
                rows=seen.steps,
                mean_percent=_percent(min(seen.mean, seen.worst)),
                worst_percent=_percent(seen.worst),
                held_out_mean_percent=None if unseen is None else _percent(unseen.mean),
                held_out_worst_percent=None if unseen is None else _percent(unseen.worst),
            )
        )
    return tuple(out)


def make_profile(
    *,
    name: str,
    gpu: str,
    model: str,
    header: Header,
    base: Profile | None,
    step: Step,
    overheads: Overheads,
    trust: Trust,
) -> Profile:
    """Raises: CalibrationError when the parts make no valid profile; the key is told."""
    settings = header.settings
    profile = Profile(
        schema=1,
        name=name,
        gpu=gpu,
        model=model,
        tensor_parallel=_tensor_parallel(settings, base),
        dtype=cast("Any", _dtype(settings, model)),
        step=step,
        overheads=overheads,
        engine=engine_flags(settings, base),
        trust=trust,
        task=settings.task,
        cold_start=None if base is None else base.cold_start,
    )
    try:
        return decode(msgspec.to_builtins(profile), Profile, name)
    except ValueError as error:
        raise CalibrationError(str(error)) from error


def _tensor_parallel(settings: ServerSettings, base: Profile | None) -> int:
    return settings.tensor_parallel or (1 if base is None else base.tensor_parallel)


def _dtype(settings: ServerSettings, model: str) -> str:
    dtype = (settings.dtype or "").removeprefix("torch.")
    return dtype if dtype in DTYPE_BYTES else load_models()[model].dtype


def assumed(settings: ServerSettings, model: str, base: Profile | None) -> list[str]:
    """Notes on what the profile says of the server without knowing it, or cannot say."""
    out: list[str] = []
    if settings.tensor_parallel is None:
        out.append(
            f"tensor_parallel was not recorded: {_tensor_parallel(settings, base)} is assumed."
        )
    dtype = (settings.dtype or "").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        said = f"recorded as {settings.dtype}" if settings.dtype else "not recorded"
        out.append(f"dtype was {said}: {_dtype(settings, model)} is assumed, as of {model}.")
    if settings.quantization:
        out.append(
            f"The server's weights are quantized ({settings.quantization}); a profile cannot say "
            f"so, and has {_dtype(settings, model)}: do not scale it to other models or cards."
        )
    kept = (settings.kv_cache_dtype or "auto").removeprefix("torch.")
    if kept not in ("auto", dtype):
        out.append(
            f"The server's KV cache holds {kept}; a profile cannot say so, and has "
            f"{_dtype(settings, model)}: give kv_blocks, and do not scale it."
        )
    return out


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as a file that ``load_profile`` reads, keys in the shipped files' order.

    Raises:
        ReportError: the file cannot be written.
    """
    document = _without_empty(msgspec.to_builtins(profile))
    order = ("schema", "name", "gpu", "model", "tensor_parallel", "dtype", "task", "step",
             "overheads", "engine", "cold_start", "trust")  # fmt: skip
    document = {key: document[key] for key in order if key in document}
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    write_whole(path, f"# Nanoseconds. Written by a calibration; the notes are at the end.\n{text}")


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line; small mappings as well."""


def _represent_list(dumper: yaml.SafeDumper, values: Sequence[Any]) -> yaml.Node:
    flat = all(isinstance(value, int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flat)


def _represent_dict(dumper: yaml.SafeDumper, values: dict[str, Any]) -> yaml.Node:
    flat = "extra_ns" in values
    return dumper.represent_mapping("tag:yaml.org,2002:map", values, flow_style=flat)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    """Whole numbers without a point; an exponent that YAML 1.1 reads as a number."""
    if value == int(value) and abs(value) < 1e15:
        return dumper.represent_int(int(value))
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(dict, _represent_dict)
_Dumper.add_representer(float, _represent_float)


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_empty(item)
            for key, item in value.items()
            if item is not None and (item not in ([], ()) or key in MAY_BE_EMPTY)
        }
    if isinstance(value, list | tuple):
        return [_without_empty(item) for item in value]
    return value


def _digits(value: float) -> float:
    """So many significant digits as mean something."""
    return float(f"{value:.{DIGITS}g}")


def _interval(fit: StepFit, name: str) -> tuple[float, float]:
    return _around(_digits(fit.coefficients[name]), fit.intervals[name])


def _around(value: float, interval: tuple[float, float]) -> tuple[float, float]:
    low, high = interval
    return min(value, _digits(max(0.0, low))), max(value, _digits(high))


def _symmetric(matrix: Array, row: int, column: int) -> float:
    return float(matrix[min(row, column), max(row, column)])


def percent(value: float) -> float:
    """As a profile may hold it."""
    return _digits(min(value, 1000.0))


def _percent(share: float) -> float:
    return round(min(share * 100, 1000.0), 2)
