"""What stands in the simulated rack: replicas, each a profile brought to life."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from policy.cost import StepCost, kv_blocks
from policy.events import ReplicaUp
from policy.files import load_gpus, load_models, load_profile
from twin.engine import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.cost import Gpu, ModelShape, Profile


class FleetError(ValueError):
    """A fleet that cannot stand: which figure is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica, ready to be built."""

    id: int
    name: str
    profile: Profile
    model: ModelShape
    gpu: Gpu
    settings: EngineSettings
    cost: StepCost
    serves: tuple[str, ...]
    """Model names; empty: whatever is asked for."""

    @property
    def usd_per_hour(self) -> float:
        return self.gpu.usd_per_hour * self.profile.tensor_parallel

    def up(self) -> ReplicaUp:
        """What the policy is told about it."""
        cost = self.cost
        return ReplicaUp(
            replica=self.id,
            name=self.name,
            models=self.serves,
            pooling=self.profile.task == "pooling",
            kv_blocks=self.settings.kv_blocks,
            block_tokens=self.settings.block_tokens,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_model_len=self.settings.max_model_len,
            cost=(
                cost.decode_fixed,
                cost.prefill_fixed,
                cost.per_sequence,
                cost.per_kv_token,
                cost.per_prefill_token,
                cost.per_prefill_quad,
            ),
            active_params=self.model.active_parameters,
            attention_flops_per_token_pair=self.model.flops_per_token_pair,
            request_in_ns=round(self.profile.overheads.request_in_ns.value),
            prefill_free_tokens=cost.prefill_free_tokens,
            mixed_free_tokens=cost.mixed_free_tokens,
        )


def fleet_of(
    profiles: Sequence[tuple[str, int]], *, max_model_len: int = 0, kv_blocks_given: int = 0
) -> list[ReplicaSpec]:
    """Replicas of named profiles.

    With one profile the fleet serves whatever model a request names; with several, each serves its
    own, and embeddings go to the pooling ones.

    Args:
        profiles: (profile name or path, number of replicas).
        max_model_len: instead of the profile's; 0: the profile's.
        kv_blocks_given: KV blocks of each replica; 0: computed from the card's memory.

    Raises:
        FleetError: no replica at all, or a figure out of range.
        FileError: a profile that does not exist or is wrong.
    """
    specs: list[ReplicaSpec] = []
    models, gpus = load_models(), load_gpus()
    for name, count in profiles:
        if count < 1:
            raise FleetError(f"{name}: {count} replicas: a fleet needs at least 1 of each profile")
        profile = load_profile(name)
        model, gpu = models[profile.model], gpus[profile.gpu]
        try:
            settings = engine_settings(profile, model, gpu, max_model_len, kv_blocks_given)
        except ValueError as error:
            raise FleetError(str(error)) from error
        cost = StepCost.from_profile(profile)
        serves = (profile.model,) if len(profiles) > 1 else ()
        for number in range(count):
            specs.append(
                ReplicaSpec(
                    len(specs), f"{profile.name}#{number}", profile, model, gpu, settings, cost,
                    serves,
                )
            )  # fmt: skip
    if not specs:
        raise FleetError("the fleet has 0 replicas: give at least one profile")
    return specs


def engine_settings(
    profile: Profile, model: ModelShape, gpu: Gpu, max_model_len: int = 0, blocks: int = 0
) -> EngineSettings:
    """The profile's engine flags, with the KV blocks that the card has room for."""
    flags = profile.engine
    settings = EngineSettings(
        kv_blocks=blocks or kv_blocks(profile, model, gpu),
        block_tokens=flags.block_tokens,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        max_model_len=flags.max_model_len,
        async_scheduling=flags.async_scheduling,
        prefix_caching=flags.prefix_caching,
        scheduling_policy=flags.scheduling_policy,
    )
    return replace(settings, max_model_len=max_model_len) if max_model_len else settings
