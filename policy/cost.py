"""What a step costs: the profile's schema and the one step-time formula.

The twin's engine model and the policy's predictions call the same functions, so what was tuned
against the twin is what the live controller predicts with.

A step that decodes ``B`` sequences holding ``S`` tokens (the sum of computed + 1) and prefills
``tok`` new tokens whose chunks run from ``c0`` to ``c1`` computed tokens (``quad`` is the sum of
``c1**2 - c0**2``) takes, in ticks of 2**-10 ns::

    fixed + per_sequence * B + padding[B] + per_kv_token * S
          + per_prefill_token * max(0, tok - free) + per_prefill_quad * quad

``fixed`` is ``decode_fixed`` when anything decodes, else ``prefill_fixed``. ``free`` is the number
of new tokens that ride along while the weights are read anyway (the flat part of the roofline):
``mixed_free_tokens`` when anything decodes, else ``prefill_free_tokens``; both default to 0.
A step that prefills (``tok`` > 0) takes on top, where the profile knows them::

    mixed_per_sequence * B + mixed_per_kv_token * S + token_padding[B + tok]

The first two: next to a prefill, a decoding sequence is computed at the price of new tokens, and
its KV is read by a slower kernel. The last stands in place of ``padding[B]`` and may be negative:
matrices are computed in tiles, so time rises in stairs of the number of new tokens, not along a
line.
Everything is an integer and a decode step is affine in ``S``, so a run of them has a closed form.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

TICKS_PER_NS = 1024
SCHEMA = 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

Dtype = Literal["float32", "bfloat16", "float16", "fp8"]
Task = Literal["generate", "pooling"]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.\-/@]*$", max_length=80)]
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=2**40)]
Rate = Annotated[int, Meta(ge=1, le=2**62)]  # bytes or operations per second
CountOrZero = Annotated[int, Meta(ge=0, le=2**40)]
Nanoseconds = Annotated[float, Meta(ge=0.0, le=1e12)]
SignedNanoseconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Percent = Annotated[float, Meta(ge=0.0, le=1000.0)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class Coefficient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time in nanoseconds, where it comes from, and its 95 % interval where one is known."""

    value: Nanoseconds
    source: Text
    interval: tuple[Nanoseconds, Nanoseconds] | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and not self.interval[0] <= self.value <= self.interval[1]:
            raise ValueError(f"value {self.value} lies outside its interval {self.interval}")


class TokenCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of tokens and where it comes from."""

    value: CountOrZero
    source: Text


class Padding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step takes more (or less) than the formula's line if it decodes up to ``up_to_batch``
    sequences."""

    up_to_batch: Count
    extra_ns: SignedNanoseconds


class TokenPadding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step that prefills takes more (or less) than the formula's line, if it computes up to
    ``up_to_tokens`` new tokens, decoding sequences included."""

    up_to_tokens: Count
    extra_ns: SignedNanoseconds


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of one engine step. GPU and host parts stand apart and are summed on compile."""

    decode_fixed_ns: Coefficient
    decode_per_sequence_ns: Coefficient
    decode_per_kv_token_ns: Coefficient
    prefill_fixed_ns: Coefficient
    prefill_per_token_ns: Coefficient
    prefill_per_quad_ns: Coefficient
    host_per_step_ns: Coefficient
    host_per_sequence_ns: Coefficient
    logprobs_per_sequence_ns: Coefficient
    prefill_free_tokens: TokenCount | None = None
    mixed_free_tokens: TokenCount | None = None
    batch_padding: tuple[Padding, ...] = ()
    mixed_per_sequence_ns: Coefficient | None = None
    mixed_per_kv_token_ns: Coefficient | None = None
    token_padding: tuple[TokenPadding, ...] = ()

    def __post_init__(self) -> None:
        batches = [row.up_to_batch for row in self.batch_padding]
        if any(a >= b for a, b in pairwise(batches)):
            raise ValueError(f"batch_padding: up_to_batch must rise, got {batches}")
        tokens = [row.up_to_tokens for row in self.token_padding]
        if any(a >= b for a, b in pairwise(tokens)):
            raise ValueError(f"token_padding: up_to_tokens must rise, got {tokens}")
        least_ns = min((row.extra_ns for row in self.token_padding), default=0.0)
        least_decode_ns = min((row.extra_ns for row in self.batch_padding), default=0.0)
        _check_above_zero("decode_fixed_ns", self.decode_fixed_ns, least_ns + least_decode_ns)
        _check_above_zero("prefill_fixed_ns", self.prefill_fixed_ns, least_ns)


def _check_above_zero(name: str, fixed: Coefficient, least_extra_ns: float) -> None:
    if least_extra_ns < 0 and fixed.value + least_extra_ns < 0:
        raise ValueError(
            f"{name} is {fixed.value}, and the paddings take {-least_extra_ns} ns off it: "
            "a step would take less than no time"
        )


class Overheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time a request spends in the server outside the engine's steps.

    One process in front of the engine sends the outputs of a step one after another, each in
    ``token_out_ns``. A new sequence stands behind those that decode, so its first token is out
    after ``token_out_ns`` for each of them that puts out a token in that step, for each new one in
    front of it, and for itself. Its last token is out after ``token_out_ns`` for each of its own,
    but not before the first.
    """

    request_in_ns: Coefficient
    request_out_ns: Coefficient
    token_out_ns: Coefficient


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine flags that decide its schedule. ``kv_blocks`` null: computed from memory."""

    block_tokens: Annotated[int, Meta(ge=1, le=1024)]
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)]
    max_model_len: Annotated[int, Meta(ge=1, le=2**24)]
    async_scheduling: bool
    kv_blocks: Annotated[int, Meta(ge=2, le=2**31)] | None = None
    gpu_memory_utilization: Share = 0.9
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below "
                f"max_num_seqs {self.max_num_seqs}: not every sequence could decode"
            )


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative error of the formula on one table, fitted on all of it and on a part held out."""

    table: Literal["decode", "prefill", "mixed"]
    rows: Count
    mean_percent: Percent
    worst_percent: Percent
    held_out_mean_percent: Percent | None = None
    held_out_worst_percent: Percent | None = None

    def __post_init__(self) -> None:
        if self.mean_percent > self.worst_percent:
            raise ValueError(
                f"mean_percent {self.mean_percent} is above worst_percent {self.worst_percent}"
            )


class Uncertainty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the coefficients may be off together, as the fit that they come from knows it."""

    names: tuple[Text, ...]
    """Keys of ``Step`` and ``Overheads``, in the order of the matrix."""
    covariance_ns2: tuple[tuple[float, ...], ...]
    run_to_run_percent: Percent = 0.0
    """By how much all times together differ from one run to the next, as a standard deviation. A
    calibration knows the spread between its own rounds only: what differs between days, and from
    one start of the server to the next, is not in it. 0 also stands for a spread not known."""

    def __post_init__(self) -> None:
        size = len(self.names)
        known = (*Step.__struct_fields__, *Overheads.__struct_fields__)
        for name in self.names:
            if name not in known or not name.endswith("_ns"):
                raise ValueError(f"names: {name!r} is no coefficient of step or overheads")
        if len(set(self.names)) != size:
            raise ValueError(f"names: each may stand there once, got {', '.join(self.names)}")
        rows = self.covariance_ns2
        if len(rows) != size or any(len(row) != size for row in rows):
            raise ValueError(f"covariance_ns2 must have {size} rows of {size} numbers")
        for i, row in enumerate(rows):
            if row[i] < 0 or any(row[j] != rows[j][i] for j in range(i)):
                raise ValueError(f"covariance_ns2 is no covariance: row {i + 1} ({self.names[i]})")


class Trust(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the profile can be believed."""

    status: Literal["fitted", "untuned", "scaled"]
    fitted_on: Text
    errors: tuple[FitError, ...] = ()
    notes: tuple[Text, ...] = ()
    uncertainty: Uncertainty | None = None


class ColdStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds from asking for a replica to its first token; parts where they are known."""

    total_s: Seconds
    source: Text
    process_s: Seconds | None = None
    weights_s: Seconds | None = None
    compile_s: Seconds | None = None
    warmup_s: Seconds | None = None

    def __post_init__(self) -> None:
        parts = [self.process_s, self.weights_s, self.compile_s, self.warmup_s]
        known_s = sum(part for part in parts if part is not None)
        if known_s > self.total_s:
            raise ValueError(f"the parts add up to {known_s} s, above total_s {self.total_s}")


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Step times and settings of one GPU x model x tensor-parallel size x dtype."""

    schema: Literal[1]
    name: Name
    gpu: Name
    model: Name
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)]
    dtype: Dtype
    step: Step
    overheads: Overheads
    engine: EngineSettings
    trust: Trust
    task: Task = "generate"
    cold_start: ColdStart | None = None


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a decoder-only transformer, as its public configuration gives it."""

    name: Name
    source: Text
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate: Count
    vocab: Count
    tied_embeddings: bool
    max_model_len: Count
    total_parameters: Count
    active_parameters: Count
    dtype: Dtype = "bfloat16"
    task: Task = "generate"
    qk_norm: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.active_parameters > self.total_parameters:
            raise ValueError(
                f"active_parameters {self.active_parameters} is above "
                f"total_parameters {self.total_parameters}"
            )

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def flops_per_token_pair(self) -> int:
        """Attention: 4 operations per layer and unit of width, for each earlier token."""
        return 4 * self.layers * self.attention_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of all transformer layers, without embeddings and the last norm."""
        kv_width = self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (self.attention_width + kv_width)
        mlp = 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        bias = self.attention_width + 2 * kv_width if self.qkv_bias else 0
        return self.layers * (attention + mlp + norms + bias)

    @property
    def dense_parameters(self) -> int:
        """The total that the shape implies for a dense model."""
        copies = 1 if self.tied_embeddings else 2
        return self.layer_parameters + self.hidden + copies * self.vocab * self.hidden

    @property
    def decode_parameters(self) -> int:
        """Parameters read for one decode step: the layers and the output head."""
        head = self.vocab * self.hidden if self.task == "generate" else 0
        return self.layer_parameters + self.hidden + head

    def kv_bytes_per_token(self, dtype: Dtype) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


class AllReduce(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one all-reduce over ``workers`` cards: latency plus bytes."""

    workers: Annotated[int, Meta(ge=2, le=64)]
    latency_ns: Nanoseconds
    per_kib_ns: Nanoseconds
    source: Text


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A card: what its memory and arithmetic can do, and what an hour of it is taken to cost."""

    name: Name
    source: Text
    memory_bytes: Count
    bandwidth_bytes_per_s: Rate
    bandwidth_efficiency: Share
    flops_per_s: Rate
    reserve_bytes: CountOrZero
    reserve_source: Text
    usd_per_hour: Annotated[float, Meta(ge=0.0, le=1000.0)]
    usd_source: Text
    all_reduce: tuple[AllReduce, ...] = ()


class StepCost(msgspec.Struct, frozen=True):
    """A profile compiled to integer ticks. Every attribute may be used in a hot loop."""

    decode_fixed: int
    prefill_fixed: int
    per_sequence: int
    per_kv_token: int
    per_prefill_token: int
    per_prefill_quad: int
    padding: tuple[int, ...] = ()  # empty, or extra ticks by batch size 0..max_num_seqs
    prefill_free_tokens: int = 0  # new tokens at no cost in a step that decodes nothing
    mixed_free_tokens: int = 0  # and in a step that decodes too
    per_logprobs_sequence: int = 0  # for each decoding sequence that asked for logprobs
    max_step_tokens: int = 8192
    # In a step that prefills; 0 and empty where the profile does not say.
    mixed_per_sequence: int = 0
    mixed_per_kv_token: int = 0
    token_padding: tuple[int, ...] = ()  # empty, or extra ticks by new tokens 0..max_step_tokens

    @classmethod
    def from_profile(cls, profile: Profile) -> StepCost:
        step = profile.step
        host_fixed_ns = step.host_per_step_ns.value
        prefill_free, mixed_free = step.prefill_free_tokens, step.mixed_free_tokens
        return cls(
            decode_fixed=ticks(step.decode_fixed_ns.value + host_fixed_ns),
            prefill_fixed=ticks(step.prefill_fixed_ns.value + host_fixed_ns),
            per_sequence=ticks(step.decode_per_sequence_ns.value + step.host_per_sequence_ns.value),
            per_kv_token=ticks(step.decode_per_kv_token_ns.value),
            per_prefill_token=ticks(step.prefill_per_token_ns.value),
            per_prefill_quad=ticks(step.prefill_per_quad_ns.value),
            padding=_padding_table(
                [(row.up_to_batch, row.extra_ns) for row in step.batch_padding],
                profile.engine.max_num_seqs,
            ),
            prefill_free_tokens=0 if prefill_free is None else prefill_free.value,
            mixed_free_tokens=0 if mixed_free is None else mixed_free.value,
            per_logprobs_sequence=ticks(step.logprobs_per_sequence_ns.value),
            max_step_tokens=profile.engine.max_num_batched_tokens,
            mixed_per_sequence=_ticks_or_0(step.mixed_per_sequence_ns),
            mixed_per_kv_token=_ticks_or_0(step.mixed_per_kv_token_ns),
            token_padding=_padding_table(
                [(row.up_to_tokens, row.extra_ns) for row in step.token_padding],
                profile.engine.max_num_batched_tokens,
            ),
        )

    def step_ticks(
        self, batch: int, kv_tokens: int, prefill_tokens: int = 0, prefill_quad: int = 0
    ) -> int:
        """Ticks of one step; see the module's text for the terms."""
        if batch:
            total = self.decode_fixed + self.per_sequence * batch + self.per_kv_token * kv_tokens
            if self.padding and not (prefill_tokens and self.token_padding):
                total += self.padding[min(batch, len(self.padding) - 1)]
            if not prefill_tokens:
                return total
            total += self.mixed_per_sequence * batch + self.mixed_per_kv_token * kv_tokens
            charged = prefill_tokens - self.mixed_free_tokens
        else:
            total = self.prefill_fixed
            charged = prefill_tokens - self.prefill_free_tokens
        if charged > 0:
            total += self.per_prefill_token * charged
        if self.token_padding and prefill_tokens:
            total += self.token_padding[min(batch + prefill_tokens, len(self.token_padding) - 1)]
        return total + self.per_prefill_quad * prefill_quad

    def span_ticks(self, steps: int, batch: int, kv_tokens: int) -> int:
        """Ticks of ``steps`` decode steps in a row, each adding one token to every sequence."""
        growth = self.per_kv_token * batch * (steps * (steps - 1) // 2)
        return steps * self.step_ticks(batch, kv_tokens) + growth

    def prefill_ns(self, uncached_tokens: int, cached_tokens: int = 0) -> int:
        """Nanoseconds to prefill a prompt alone, in as few chunks as the token budget allows."""
        if uncached_tokens <= 0:
            return 0
        total = uncached_tokens + cached_tokens
        quad = total * total - cached_tokens * cached_tokens
        full, rest = divmod(uncached_tokens, self.max_step_tokens)
        spent = full * self.step_ticks(0, 0, self.max_step_tokens)
        if rest:
            spent += self.step_ticks(0, 0, rest)
        return (spent + self.per_prefill_quad * quad) // TICKS_PER_NS

    def decode_ns(self, output_tokens: int, context_tokens: int, batch: int) -> int:
        """Nanoseconds from first to last token in a batch of sequences like this one.

        The first token comes with the prefill, so ``output_tokens`` take one step fewer.
        ``context_tokens`` is what each sequence had computed when its first token came.
        """
        steps = max(0, output_tokens - 1)
        batch = max(1, batch)
        return self.span_ticks(steps, batch, batch * (context_tokens + 1)) // TICKS_PER_NS


def ticks(value_ns: float) -> int:
    """Nanoseconds to the nearest tick."""
    return round(value_ns * TICKS_PER_NS)


def _ticks_or_0(coefficient: Coefficient | None) -> int:
    return 0 if coefficient is None else ticks(coefficient.value)


def _padding_table(rows: Sequence[tuple[int, float]], most: int) -> tuple[int, ...]:
    """Extra ticks by number from 0 to ``most``, from rows of (up to that number, extra ns)."""
    if not rows:
        return ()
    table: list[int] = []
    for up_to, extra_ns in rows:
        table.extend([ticks(extra_ns)] * (min(up_to, most) + 1 - len(table)))
    table.extend([table[-1]] * (most + 1 - len(table)))
    return tuple(table)


def request_flops(
    active_parameters: int,
    flops_per_token_pair: int,
    uncached_prompt_tokens: int,
    expected_output_tokens: int,
    cached_tokens: int = 0,
) -> int:
    """Floating-point operations of a request: 2 x parameters x new tokens, and attention.

    A token at position p attends to p + 1 tokens; cached tokens are attended to but not computed.
    """
    new_tokens = uncached_prompt_tokens + expected_output_tokens
    total = cached_tokens + new_tokens
    pairs_doubled = total * (total + 1) - cached_tokens * (cached_tokens + 1)
    return 2 * active_parameters * new_tokens + flops_per_token_pair * pairs_doubled // 2


def weights_bytes(model: ModelShape, dtype: Dtype, tensor_parallel: int) -> int:
    """Bytes of weights on each card."""
    return -(-model.total_parameters * DTYPE_BYTES[dtype] // tensor_parallel)


def activation_bytes(profile: Profile, model: ModelShape) -> int:
    """Peak working memory of a full step on each card, as the engine reserves it at start.

    A token keeps three MLP rows (split over the cards) and four hidden rows; a sequence keeps
    three float32 rows of logits. For Llama-3-8B (8192 tokens, 256 sequences) this is 1.27 GiB,
    where vLLM's own profiling run says 1.26 GiB (vLLM pull request 10511).
    """
    settings = profile.engine
    mlp = 3 * model.intermediate // profile.tensor_parallel
    per_token = (mlp + 4 * model.hidden) * DTYPE_BYTES[profile.dtype]
    logits = 3 * 4 * model.vocab if profile.task == "generate" else 0
    return settings.max_num_batched_tokens * per_token + settings.max_num_seqs * logits


def kv_blocks(profile: Profile, model: ModelShape, gpu: Gpu) -> int:
    """KV blocks of a replica: as given, else what the card's memory leaves for them."""
    settings = profile.engine
    if settings.kv_blocks is not None:
        return settings.kv_blocks
    split = min(profile.tensor_parallel, model.kv_heads)
    block_bytes = settings.block_tokens * model.kv_bytes_per_token(profile.dtype) // split
    budget = int(gpu.memory_bytes * settings.gpu_memory_utilization)
    weights = weights_bytes(model, profile.dtype, profile.tensor_parallel)
    reserve = gpu.reserve_bytes + activation_bytes(profile, model)
    blocks = (budget - weights - reserve) // block_bytes
    if blocks < 2:
        raise ValueError(
            f"{profile.name}: {weights} bytes of weights and {reserve} reserved do not fit into "
            f"{budget} usable bytes of {gpu.name}: raise tensor_parallel "
            f"(now {profile.tensor_parallel}), as in {gpu.name}/{model.name}@tp2"
        )
    held_tokens = (blocks - 1) * settings.block_tokens  # the null block holds nothing
    if held_tokens < settings.max_model_len:
        raise ValueError(
            f"{profile.name}: KV blocks for {held_tokens} tokens fit on {gpu.name}, max_model_len "
            f"is {settings.max_model_len}: of {budget} usable bytes the weights take {weights} and "
            f"{reserve} are reserved; lower max_model_len or raise tensor_parallel "
            f"(now {profile.tensor_parallel})"
        )
    return blocks


def scale_profile(
    base: Profile, base_model: ModelShape, model: ModelShape, gpu: Gpu, tensor_parallel: int
) -> Profile:
    """A profile for ``model`` from one fitted on the same card with one GPU, by a stated rule.

    Fixed terms: the time to read the weights (bytes / bandwidth / efficiency) is replaced by this
    model's, split over the cards; what is left of the base's fixed term goes by layers. Per
    sequence and per prefill token: by parameters, and so are the paddings. Per KV token: by KV
    bytes. Quadratic term: by attention FLOPs. Two all-reduces a layer are added above one card.
    Host terms stay.
    """
    if base.tensor_parallel != 1 or base.gpu != gpu.name:
        raise ValueError(
            f"{base.name}: scaling starts from one {gpu.name} card, got {base.gpu} "
            f"x {base.tensor_parallel}"
        )
    latency_ns, per_token_ns, network = _all_reduce(model, gpu, tensor_parallel)
    base_weights_ns = _weights_read_ns(base_model, gpu, 1)
    weights_ns = _weights_read_ns(model, gpu, tensor_parallel)
    by_layers = model.layers / base_model.layers
    kv_ratio = model.kv_bytes_per_token(model.dtype) / base_model.kv_bytes_per_token(base.dtype)
    kv_split = min(tensor_parallel, model.kv_heads)
    attention_ratio = (model.layers * model.attention_width) / (
        base_model.layers * base_model.attention_width
    )
    decode_ratio = model.decode_parameters / base_model.decode_parameters
    layer_ratio = model.layer_parameters / base_model.layer_parameters

    def fixed(coefficient: Coefficient) -> Coefficient:
        rest_ns = max(0.0, coefficient.value - base_weights_ns) * by_layers
        rule = "weights read at the card's bandwidth, the rest by layers"
        return _scaled(base, weights_ns + rest_ns + latency_ns, rule + network)

    def by_ratio(coefficient: Coefficient, ratio: float, extra_ns: float, rule: str) -> Coefficient:
        return _scaled(base, coefficient.value * ratio + extra_ns, rule)

    def if_known(coefficient: Coefficient | None, ratio: float, rule: str) -> Coefficient | None:
        return None if coefficient is None else by_ratio(coefficient, ratio, 0.0, rule)

    old = base.step
    read, computed = decode_ratio / tensor_parallel, layer_ratio / tensor_parallel
    kv_read = kv_ratio / kv_split
    step = msgspec.structs.replace(
        old,
        decode_fixed_ns=fixed(old.decode_fixed_ns),
        prefill_fixed_ns=fixed(old.prefill_fixed_ns),
        decode_per_sequence_ns=by_ratio(
            old.decode_per_sequence_ns,
            read,
            per_token_ns,
            "by parameters read" + network,
        ),
        decode_per_kv_token_ns=by_ratio(
            old.decode_per_kv_token_ns, kv_read, 0.0, "by KV bytes per card"
        ),
        prefill_per_token_ns=by_ratio(
            old.prefill_per_token_ns,
            computed,
            per_token_ns,
            "by layer parameters" + network,
        ),
        prefill_per_quad_ns=by_ratio(
            old.prefill_per_quad_ns,
            attention_ratio / tensor_parallel,
            0.0,
            "by attention operations per card",
        ),
        mixed_per_sequence_ns=if_known(
            old.mixed_per_sequence_ns, computed, "by layer parameters per card"
        ),
        mixed_per_kv_token_ns=if_known(old.mixed_per_kv_token_ns, kv_read, "by KV bytes per card"),
        batch_padding=tuple(
            Padding(row.up_to_batch, row.extra_ns * read) for row in old.batch_padding
        ),
        token_padding=tuple(
            TokenPadding(row.up_to_tokens, row.extra_ns * computed) for row in old.token_padding
        ),
    )
    suffix = f"@tp{tensor_parallel}" if tensor_parallel > 1 else ""
    return msgspec.structs.replace(
        base,
        name=f"{gpu.name}/{model.name}{suffix}",
        model=model.name,
        tensor_parallel=tensor_parallel,
        dtype=model.dtype,
        task=model.task,
        step=step,
        engine=msgspec.structs.replace(
            base.engine,
            kv_blocks=None,
            max_model_len=model.max_model_len,
            # vLLM's default for pooling models is off
            async_scheduling=base.engine.async_scheduling and model.task == "generate",
        ),
        trust=Trust(
            status="scaled",
            fitted_on=f"scaled, not yet fitted: from {base.name}",
            notes=("Calibrate against a real server before relying on absolute times.",),
        ),
    )


def _weights_read_ns(model: ModelShape, gpu: Gpu, tensor_parallel: int) -> float:
    read = model.decode_parameters * DTYPE_BYTES[model.dtype] / tensor_parallel
    return read * 1e9 / (gpu.bandwidth_bytes_per_s * gpu.bandwidth_efficiency)


def _all_reduce(model: ModelShape, gpu: Gpu, tensor_parallel: int) -> tuple[float, float, str]:
    """Nanoseconds per step and per token, and how the source text says so."""
    if tensor_parallel == 1:
        return 0.0, 0.0, ""
    if model.heads % tensor_parallel:
        raise ValueError(f"{model.name}: {model.heads} heads do not split over {tensor_parallel}")
    known = [row for row in gpu.all_reduce if row.workers == tensor_parallel]
    if not known:
        sizes = sorted(row.workers for row in gpu.all_reduce)
        raise ValueError(f"{gpu.name}: no all-reduce over {tensor_parallel} cards, only {sizes}")
    calls = 2 * model.layers
    kib_per_token = model.hidden * DTYPE_BYTES[model.dtype] / 1024
    return (
        calls * known[0].latency_ns,
        calls * kib_per_token * known[0].per_kib_ns,
        f", plus {calls} all-reduces over {tensor_parallel} cards",
    )


def _scaled(base: Profile, value_ns: float, rule: str) -> Coefficient:
    return Coefficient(value=value_ns, source=f"scaled from {base.name}: {rule}")
