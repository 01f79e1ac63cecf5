"""Both worlds tell the policy of a replica in the same words."""

from __future__ import annotations

import pytest

from policy.announce import Sizes, announce
from policy.cost import Profile, StepCost
from policy.events import ReplicaUp
from policy.files import load_models, load_profile
from twin.fleet import fleet_of

SIZES = Sizes(100, 16, 8, 2048, 4096)


def told(profile: Profile, sizes: Sizes = SIZES) -> ReplicaUp:
    cost = StepCost.from_profile(profile)
    return announce(
        3, "a:8000", profile, load_models()[profile.model], cost, sizes, models=("m", "lora"),
        version="v2", domain="host0/card1", labels=("vllm=0.32",), closeness_permille=700,
        memory_mb=81_559,
    )  # fmt: skip


def test_every_field_is_told() -> None:
    profile = load_profile("h100-sxm/qwen3-8b")
    model, cost = load_models()["qwen3-8b"], StepCost.from_profile(profile)
    assert told(profile) == ReplicaUp(
        3, "a:8000", ("m", "lora"), False, 100, 16, 8, 2048, 4096,
        (
            cost.decode_fixed, cost.prefill_fixed, cost.per_sequence, cost.per_kv_token,
            cost.per_prefill_token, cost.per_prefill_quad,
        ),
        model.active_parameters, model.flops_per_token_pair,
        round(profile.overheads.request_in_ns.value), cost.prefill_free_tokens,
        cost.mixed_free_tokens, "v2", "host0/card1", ("vllm=0.32",), 700, 81_559,
    )  # fmt: skip
    assert cost.prefill_free_tokens != cost.mixed_free_tokens, "or a mix-up would go unseen"


def test_a_profile_of_embeddings_is_told_as_pooling() -> None:
    assert told(load_profile("h100-sxm/qwen3-embedding-4b")).pooling


@pytest.mark.parametrize("name", ["h100-sxm/qwen3-8b", "cpu/tiny-qwen3"])
def test_a_simulated_replica_and_a_server_alike_are_told_alike(name: str) -> None:
    (spec,) = fleet_of([(name, 1)])
    settings = spec.settings
    sizes = Sizes(
        settings.kv_blocks, settings.block_tokens, settings.max_num_seqs,
        settings.max_num_batched_tokens, settings.max_model_len,
    )  # fmt: skip
    cost = StepCost.from_profile(spec.profile)
    live = announce(
        0, spec.name, spec.profile, spec.model, cost, sizes, models=(), domain=spec.domain,
        memory_mb=spec.memory_mb,
    )  # fmt: skip
    assert live == spec.up()
