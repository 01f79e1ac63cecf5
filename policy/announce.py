"""What the policy is told of a replica that can take work, the same in both worlds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from policy.events import ReplicaUp

if TYPE_CHECKING:
    from policy.cost import ModelShape, Profile, StepCost


class Sizes(NamedTuple):
    """What an engine has room for: computed in the twin, as the server says it live."""

    kv_blocks: int
    """One of them, the null block, holds nothing."""
    block_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def announce(
    replica: int,
    name: str,
    profile: Profile,
    model: ModelShape,
    cost: StepCost,
    sizes: Sizes,
    *,
    models: tuple[str, ...],
    version: str = "",
    domain: str = "",
    labels: tuple[str, ...] = (),
    closeness_permille: int = 1000,
    memory_mb: int = 0,
) -> ReplicaUp:
    """The event that says so.

    Args:
        replica: its id, unique in the log.
        cost: of its steps; the profile's own, or what a slice of the card makes of it.
        models: names it serves; empty: whatever is asked for.
        version: of the model that it has loaded.
        domain: what fails together; empty: the replica alone.
        labels: for affinity, such as ``vllm=0.32``.
        closeness_permille: how near its parts are; 1000: as near as can be.
        memory_mb: of its cards, or of its slice of one; 0: unknown.
    """
    return ReplicaUp(
        replica=replica,
        name=name,
        models=models,
        pooling=profile.task == "pooling",
        kv_blocks=sizes.kv_blocks,
        block_tokens=sizes.block_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        cost=(
            cost.decode_fixed,
            cost.prefill_fixed,
            cost.per_sequence,
            cost.per_kv_token,
            cost.per_prefill_token,
            cost.per_prefill_quad,
        ),
        active_params=model.active_parameters,
        attention_flops_per_token_pair=model.flops_per_token_pair,
        request_in_ns=round(profile.overheads.request_in_ns.value),
        prefill_free_tokens=cost.prefill_free_tokens,
        mixed_free_tokens=cost.mixed_free_tokens,
        version=version,
        domain=domain,
        labels=labels,
        closeness_permille=closeness_permille,
        memory_mb=memory_mb,
    )
