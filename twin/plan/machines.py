"""What a replica can be made of: a card, a number of them, and the profile that says how fast.

A card without a fitted profile is scaled from the H100's by public figures: what reads memory by
bandwidth, what computes by operations a second, the host's part not at all. On the one pair of
cards of which both were fitted (H100 and RTX 4090, Llama-3.1-8B) that rule is 22 to 34 % too slow;
so figures from it are called extrapolated, and all times are drawn with a common factor of
``SCALED_PERCENT``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from policy.cost import (
    Coefficient,
    Gpu,
    ModelShape,
    Padding,
    Profile,
    TokenPadding,
    Trust,
    Uncertainty,
    activation_bytes,
    kv_blocks,
    weights_bytes,
)
from policy.files import FileError, load_gpus, load_models, load_profile, profile_names
from twin.plan.inputs import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from policy.evidence import Kind

BASE_CARD = "h100-sxm"
"""Where scaling to another card starts: the card with the best fitted profiles."""
SAME_CHIP = frozenset({("h100-sxm", "h200")})
"""Cards of one chip that differ in their memory alone."""
SAME_CHIP_PERCENT = 10.0
SCALED_PERCENT = 20.0
"""Standard deviation of the factor on all times of a profile scaled to another card; and of the
same chip with another memory."""
OTHER_MODEL_PERCENT = 10.0
"""The same for another model, or more cards, than was fitted: vidur's operators of Llama-2-7b on 1
to 8 H100s lie within 20 % of the rule."""
TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Region:
    """What a profile was fitted on; beyond it nobody knows."""

    sequences: int
    """In one step."""
    kv_tokens: int
    """In one step, of all its sequences."""
    context_tokens: int
    """Of one sequence."""
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica's cards and model, as a plan sees them."""

    name: str
    """Card, model and tensor-parallel size, as in ``h100-sxm/qwen3-8b@tp2``."""
    profile: Profile
    gpu: Gpu
    model: ModelShape
    region: Region
    path: Path
    """The profile's file, for other processes."""

    @property
    def cards(self) -> int:
        return self.profile.tensor_parallel

    @property
    def kv_tokens(self) -> int:
        """Tokens that its cache holds."""
        blocks = kv_blocks(self.profile, self.model, self.gpu)
        return (blocks - 1) * self.profile.engine.block_tokens

    @property
    def kind(self) -> Kind:
        """What the twin's figures on it are."""
        return "fitted" if self.profile.trust.status == "fitted" else "extrapolated"

    def text(self, count: int) -> str:
        """So many of it, in words: ``12 H100 SXM (3 x TP4)``."""
        card = card_name(self.gpu.name)
        if self.cards == 1:
            return f"{count} {card}"
        return f"{count * self.cards} {card} ({count} x TP{self.cards})"


def card_name(name: str) -> str:
    return name.upper().replace("-", " ").replace("RTX ", "RTX ")


def machine_of(name: str, folder: Path, **flags: object) -> Machine:
    """The machine of a profile's name, such as ``h200/qwen3-8b@tp2``, or of a profile's file.

    Args:
        folder: where its profile is written for other processes.
        flags: engine settings that are set otherwise.

    Raises:
        FileError: no such card, model or profile.
        PlanError: the model does not fit, or a flag cannot be so.
    """
    profile = widened(find_profile(name))
    gpu, model = load_gpus()[profile.gpu], load_models()[profile.model]
    if flags:
        changed = {**msgspec.to_builtins(profile.engine), **flags}
        try:
            engine = msgspec.convert(changed, type(profile.engine))
        except msgspec.ValidationError as error:
            raise PlanError(f"{name}: {error}") from error
        profile = msgspec.structs.replace(profile, engine=engine)
    try:
        kv_blocks(profile, model, gpu)
    except ValueError as error:
        raise PlanError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    told = "-".join(f"{key}-{value}" for key, value in sorted(flags.items()))
    path = folder / f"{profile.name.replace('/', '--')}{'--' + told if told else ''}.yaml"
    path.write_bytes(msgspec.yaml.encode(profile))
    return Machine(profile.name, profile, gpu, model, region_of(profile), path)


def find_profile(name: str) -> Profile:
    """A profile by its name or file; a card without one is scaled from ``BASE_CARD``."""
    if name.endswith((".yaml", ".yml")) or name.removesuffix("@tp1") in profile_names():
        return load_profile(name)
    card, _, rest = name.partition("/")
    fitted = any(
        load_profile(known).trust.status == "fitted"
        for known in profile_names() if known.startswith(f"{card}/")
    )  # fmt: skip
    if card not in load_gpus() or fitted:
        return load_profile(name)
    gpu = load_gpus()[card]
    base = load_profile(f"{BASE_CARD}/{rest}")
    if base.tensor_parallel > 1 and not any(
        row.workers == base.tensor_parallel for row in gpu.all_reduce
    ):
        raise FileError(name, f"no all-reduce over {base.tensor_parallel} {card} is known",
                        hint="use one card a replica, or give a profile of your own")  # fmt: skip
    return scale_card(base, load_gpus()[BASE_CARD], gpu)


def scale_card(base: Profile, old: Gpu, new: Gpu) -> Profile:
    """``base`` on another card, by its public figures.

    What reads memory (fixed part of a decode step, KV tokens) goes by bandwidth; what computes (new
    tokens, attention of a prefill, decoding sequences) by operations a second; a fixed part of a
    prefill by the slower of both. Host and server terms stay.
    """
    read = old.bandwidth_bytes_per_s * old.bandwidth_efficiency
    read /= new.bandwidth_bytes_per_s * new.bandwidth_efficiency
    compute = old.flops_per_s / new.flops_per_s
    by_read = f"by memory bandwidth, times {read:.4g}"
    by_flops = f"by bf16 operations a second, times {compute:.4g}"
    step = base.step

    def scaled(coefficient: Coefficient, factor: float, rule: str) -> Coefficient:
        source = f"scaled from {base.name}: {rule} ({coefficient.source})"
        return Coefficient(float(f"{coefficient.value * factor:.6g}"), source)

    def if_known(coefficient: Coefficient | None, factor: float, rule: str) -> Coefficient | None:
        return None if coefficient is None else scaled(coefficient, factor, rule)

    fixed = max(read, compute) if compute > 1 else read
    rule = by_flops if fixed == compute else by_read
    return msgspec.structs.replace(
        base,
        name=base.name.replace(old.name, new.name, 1),
        gpu=new.name,
        step=msgspec.structs.replace(
            step,
            decode_fixed_ns=scaled(step.decode_fixed_ns, read, by_read),
            decode_per_sequence_ns=scaled(step.decode_per_sequence_ns, compute, by_flops),
            decode_per_kv_token_ns=scaled(step.decode_per_kv_token_ns, read, by_read),
            prefill_fixed_ns=scaled(step.prefill_fixed_ns, fixed, rule),
            prefill_per_token_ns=scaled(step.prefill_per_token_ns, compute, by_flops),
            prefill_per_quad_ns=scaled(step.prefill_per_quad_ns, compute, by_flops),
            mixed_per_sequence_ns=if_known(step.mixed_per_sequence_ns, compute, by_flops),
            mixed_per_kv_token_ns=if_known(step.mixed_per_kv_token_ns, read, by_read),
            batch_padding=tuple(
                Padding(row.up_to_batch, row.extra_ns * read) for row in step.batch_padding
            ),
            token_padding=tuple(
                TokenPadding(row.up_to_tokens, row.extra_ns * compute) for row in step.token_padding
            ),
        ),
        engine=msgspec.structs.replace(base.engine, kv_blocks=None),
        trust=Trust(
            status="scaled",
            fitted_on=f"scaled, not yet fitted: from {base.name}",
            notes=(
                "By the cards' public figures, not by a run: bandwidth and bf16 operations a "
                "second stand in gpus.yaml with their sources.",
                "Calibrate against a real server before relying on absolute times.",
            ),
        ),
    )


def widened(profile: Profile) -> Profile:
    """The profile with a factor on all its times where its file knows none from run to run.

    Of a fitted one the spread is the worst of its mean errors on rows held out; of a scaled one
    what the rule was off elsewhere. It widens what is drawn, and changes no time.
    """
    known = profile.trust.uncertainty
    if known is not None and known.run_to_run_percent:
        return profile
    percent = spread_percent(profile)
    if known is None:
        name = "decode_fixed_ns"
        wide = profile.step.decode_fixed_ns.interval or (0.0, 0.0)
        sd_ns = (wide[1] - wide[0]) / 3.92
        known = Uncertainty((name,), ((sd_ns * sd_ns,),), percent)
    else:
        known = msgspec.structs.replace(known, run_to_run_percent=percent)
    return msgspec.structs.replace(
        profile, trust=msgspec.structs.replace(profile.trust, uncertainty=known)
    )


def spread_percent(profile: Profile) -> float:
    """Standard deviation of the factor that all times of the profile share, in per cent."""
    trust = profile.trust
    if trust.status == "scaled":
        origin = trust.fitted_on.rpartition("from ")[2].partition("/")[0]
        if origin == profile.gpu:
            return OTHER_MODEL_PERCENT
        return SAME_CHIP_PERCENT if (origin, profile.gpu) in SAME_CHIP else SCALED_PERCENT
    errors = [row.held_out_mean_percent or row.mean_percent for row in trust.errors]
    return max(errors, default=OTHER_MODEL_PERCENT)


class _Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sequences: int
    kv_tokens: int
    context_tokens: int
    source: str


def region_of(profile: Profile) -> Region:
    """What the profile, or the one that it was scaled from, was fitted on.

    A profile that is not shipped was calibrated on a server with its own limits, and those bound
    it."""
    from importlib import resources

    table = msgspec.yaml.decode(
        (resources.files("policy") / "profiles" / "regions.yaml").read_bytes(),
        type=dict[str, int | dict[str, _Fitted]],
    )["regions"]
    assert isinstance(table, dict)
    origin = profile.trust.fitted_on.rpartition("from ")[2]
    row = table.get(profile.name) or table.get(origin)
    if row is not None:
        return Region(row.sequences, row.kv_tokens * profile.tensor_parallel, row.context_tokens,
                      row.source)  # fmt: skip
    engine = profile.engine
    tokens = engine.max_num_seqs * engine.max_model_len
    return Region(engine.max_num_seqs, tokens, engine.max_model_len,
                  "the limits of the server that it was calibrated on")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model and a context fit on a machine: bytes of each card, and what is left."""

    name: str
    fits: bool
    usable_bytes: int
    weights_bytes: int
    reserved_bytes: int
    kv_token_bytes: int
    """Of one token on each card."""
    kv_tokens: int
    context_tokens: int
    sequences: int
    """So many of that context fit at once."""
    why: str = ""


def fit_of(name: str, context_tokens: int) -> Fit:
    """The arithmetic alone: nothing is played.

    Raises:
        FileError: no such profile.
    """
    profile = find_profile(name)
    gpu, model = load_gpus()[profile.gpu], load_models()[profile.model]
    split = min(profile.tensor_parallel, model.kv_heads)
    token_bytes = model.kv_bytes_per_token(profile.dtype) // split
    usable = int(gpu.memory_bytes * profile.engine.gpu_memory_utilization)
    weights = weights_bytes(model, profile.dtype, profile.tensor_parallel)
    reserved = gpu.reserve_bytes + activation_bytes(profile, model)
    block = profile.engine.block_tokens
    blocks = max(0, (usable - weights - reserved) // (block * token_bytes) - 1)
    tokens = blocks * block
    need = -(-context_tokens // block) * block
    why = ""
    if weights + reserved > usable:
        why = "the weights alone do not fit: more cards a replica, or a larger one"
    elif context_tokens > model.max_model_len:
        why = f"the model itself takes {model.max_model_len:,} tokens"
    elif tokens < need:
        why = "the weights fit, the context does not: more cards a replica, or a shorter context"
    sequences = tokens // need if not why else 0
    return Fit(profile.name, not why, usable, weights, reserved, token_bytes, tokens,
               context_tokens, sequences, why)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rejected:
    """A machine that is no candidate, and the gate that says so."""

    name: str
    gate: Literal["profile", "memory", "context", "region", "latency", "rate", "confidence"]
    why: str


def candidates(
    gpus: tuple[str, ...], model: str, sizes: tuple[int, ...], folder: Path
) -> tuple[list[Machine], list[Rejected]]:
    """Machines of these cards for the model, and those that cannot be."""
    found: list[Machine] = []
    rejected: list[Rejected] = []
    for name in _names(gpus, model, sizes):
        try:
            found.append(machine_of(name, folder))
        except FileError as error:
            rejected.append(Rejected(name, "profile", str(error).removeprefix(f"{name}: ")))
        except PlanError as error:
            rejected.append(Rejected(name, "memory", str(error).removeprefix(f"{name}: ")))
    return found, rejected


def _names(gpus: tuple[str, ...], model: str, sizes: tuple[int, ...]) -> Iterator[str]:
    for gpu in gpus:
        if gpu.endswith((".yaml", ".yml")):
            yield gpu
            continue
        for size in sizes:
            yield f"{gpu}/{model}" + (f"@tp{size}" if size > 1 else "")
