"""The step-time formula: its terms, its closed form, what is predicted from it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.cost import (
    TICKS_PER_NS,
    Coefficient,
    Padding,
    Profile,
    StepCost,
    TokenPadding,
    activation_bytes,
    kv_blocks,
    request_flops,
    scale_profile,
    ticks,
    weights_bytes,
)
from policy.files import load_gpus, load_models, load_profile

COST = StepCost(
    decode_fixed=10_000,
    prefill_fixed=7_000,
    per_sequence=100,
    per_kv_token=3,
    per_prefill_token=20,
    per_prefill_quad=2,
    prefill_free_tokens=50,
    mixed_free_tokens=10,
    max_step_tokens=512,
)


def with_engine(profile: Profile, **changes: object) -> Profile:
    engine = msgspec.structs.replace(profile.engine, **changes)
    return msgspec.structs.replace(profile, engine=engine)


def test_a_decode_step_has_fixed_batch_and_kv_terms() -> None:
    assert COST.step_ticks(4, 1000) == 10_000 + 4 * 100 + 1000 * 3


def test_a_prefill_step_charges_tokens_above_the_free_ones() -> None:
    assert COST.step_ticks(0, 0, 40, 1600) == 7_000 + 2 * 1600
    assert COST.step_ticks(0, 0, 60, 3600) == 7_000 + 10 * 20 + 2 * 3600


def test_a_mixed_step_takes_the_decode_base_and_its_own_free_tokens() -> None:
    assert COST.step_ticks(1, 5, 60, 3600) == 10_000 + 100 + 15 + 50 * 20 + 2 * 3600


def test_without_free_tokens_the_formula_is_plainly_linear() -> None:
    plain = msgspec.structs.replace(COST, prefill_free_tokens=0, mixed_free_tokens=0)
    assert plain.step_ticks(0, 0, 60, 0) == 7_000 + 60 * 20
    assert plain.step_ticks(2, 9, 60, 0) == 10_000 + 200 + 27 + 60 * 20


@given(
    steps=st.integers(0, 200),
    batch=st.integers(1, 300),
    kv_tokens=st.integers(0, 10**6),
    padded=st.booleans(),
)
def test_a_span_of_decode_steps_equals_its_steps_one_by_one(
    steps: int, batch: int, kv_tokens: int, padded: bool
) -> None:
    cost = msgspec.structs.replace(COST, padding=tuple(range(257)) if padded else ())
    single = sum(cost.step_ticks(batch, kv_tokens + batch * done) for done in range(steps))
    assert cost.span_ticks(steps, batch, kv_tokens) == single


@given(uncached=st.integers(1, 5000), cached=st.integers(0, 5000))
def test_a_predicted_prefill_equals_its_chunks_one_by_one(uncached: int, cached: int) -> None:
    total, at, left = 0, cached, uncached
    while left:
        chunk = min(left, COST.max_step_tokens)
        total += COST.step_ticks(0, 0, chunk, (at + chunk) ** 2 - at**2)
        at, left = at + chunk, left - chunk
    assert COST.prefill_ns(uncached, cached) == total // TICKS_PER_NS


def test_a_fully_cached_prompt_costs_no_prefill() -> None:
    assert COST.prefill_ns(0, 4096) == 0


def test_one_output_token_needs_no_decode_step() -> None:
    assert COST.decode_ns(1, 100, 8) == 0
    assert COST.decode_ns(0, 100, 8) == 0
    assert COST.decode_ns(2, 100, 8) == COST.step_ticks(8, 8 * 101) // TICKS_PER_NS


def test_host_terms_are_summed_on_compile() -> None:
    profile = load_profile("h100-sxm/qwen3-8b")
    cost = StepCost.from_profile(profile)
    host = profile.step.host_per_step_ns.value
    assert host == 126_000
    assert cost.decode_fixed == ticks(profile.step.decode_fixed_ns.value + host)
    assert cost.prefill_fixed == ticks(profile.step.prefill_fixed_ns.value + host)
    assert cost.per_sequence == ticks(profile.step.decode_per_sequence_ns.value + 4400)
    assert cost.max_step_tokens == 8192
    assert all(isinstance(value, (int, tuple)) for value in msgspec.structs.astuple(cost))


def test_padding_is_compiled_to_one_entry_a_batch_size() -> None:
    profile = load_profile("cpu/tiny-qwen3")
    rows = (Padding(up_to_batch=1, extra_ns=5.0), Padding(up_to_batch=4, extra_ns=7.0))
    profile = msgspec.structs.replace(
        profile, step=msgspec.structs.replace(profile.step, batch_padding=rows)
    )
    cost = StepCost.from_profile(profile)
    assert len(cost.padding) == 129
    assert cost.padding[:6] == tuple(ticks(value) for value in (5, 5, 7, 7, 7, 7))
    plain = msgspec.structs.replace(cost, padding=())
    assert cost.step_ticks(1, 10) - plain.step_ticks(1, 10) == ticks(5)
    assert cost.step_ticks(500, 10) - plain.step_ticks(500, 10) == ticks(7)


def test_a_step_that_prefills_is_padded_by_its_new_tokens_and_not_by_its_batch() -> None:
    table = tuple(range(0, 5130, 10))
    padded = msgspec.structs.replace(COST, padding=(7,) * 257, token_padding=table)
    assert padded.step_ticks(4, 1000) == COST.step_ticks(4, 1000) + 7
    assert padded.step_ticks(4, 1000, 60, 3600) == COST.step_ticks(4, 1000, 60, 3600) + 640
    assert padded.step_ticks(0, 0, 60, 3600) == COST.step_ticks(0, 0, 60, 3600) + 600
    assert padded.step_ticks(4, 1000, 900) == COST.step_ticks(4, 1000, 900) + 5120
    assert padded.step_ticks(0, 0) == COST.step_ticks(0, 0)
    by_batch = msgspec.structs.replace(COST, padding=(7,) * 257)
    assert by_batch.step_ticks(4, 1000, 60) == COST.step_ticks(4, 1000, 60) + 7


def test_beside_a_prefill_decoding_costs_more_by_sequence_and_kv_token() -> None:
    mixed = msgspec.structs.replace(COST, mixed_per_sequence=1000, mixed_per_kv_token=5)
    assert mixed.step_ticks(4, 1000) == COST.step_ticks(4, 1000)
    assert mixed.step_ticks(0, 0, 60, 3600) == COST.step_ticks(0, 0, 60, 3600)
    assert mixed.step_ticks(4, 300, 60) == COST.step_ticks(4, 300, 60) + 4 * 1000 + 300 * 5


def test_terms_of_steps_that_prefill_are_compiled_and_scaled() -> None:
    profile = load_profile("h100-sxm/qwen3-8b")
    plain = StepCost.from_profile(profile)
    assert plain.mixed_per_sequence == plain.mixed_per_kv_token == 0
    assert plain.token_padding == ()
    step = msgspec.structs.replace(
        profile.step,
        mixed_per_sequence_ns=Coefficient(3.0, "test"),
        mixed_per_kv_token_ns=Coefficient(0.5, "test"),
        batch_padding=(Padding(256, -100.0),),
        token_padding=(TokenPadding(64, 5.0), TokenPadding(128, -7.0)),
    )
    profile = msgspec.structs.replace(profile, step=step)
    cost = StepCost.from_profile(profile)
    assert (cost.mixed_per_sequence, cost.mixed_per_kv_token) == (ticks(3), ticks(0.5))
    assert len(cost.token_padding) == 8193
    assert [cost.token_padding[at] for at in (64, 65, 8192)] == [ticks(5), ticks(-7), ticks(-7)]
    models, gpu = load_models(), load_gpus()["h100-sxm"]
    small, large = models["qwen3-8b"], models["qwen3-32b"]
    scaled = scale_profile(profile, small, large, gpu, 2).step
    by_layers = large.layer_parameters / small.layer_parameters / 2
    assert scaled.mixed_per_sequence_ns is not None
    assert scaled.mixed_per_sequence_ns.value == pytest.approx(3 * by_layers)
    assert scaled.mixed_per_kv_token_ns is not None
    kv_ratio = large.kv_bytes_per_token("bfloat16") / small.kv_bytes_per_token("bfloat16") / 2
    assert scaled.mixed_per_kv_token_ns.value == pytest.approx(0.5 * kv_ratio)
    assert [row.extra_ns for row in scaled.token_padding] == pytest.approx(
        [5 * by_layers, -7 * by_layers]
    )
    read = large.decode_parameters / small.decode_parameters / 2
    assert scaled.batch_padding[0].extra_ns == pytest.approx(-100 * read)


def test_flops_are_two_per_parameter_and_token_plus_attention() -> None:
    def attention(first: int, last: int) -> int:
        return sum(4 * 36 * 4096 * (position + 1) for position in range(first, last))

    whole = request_flops(8_190_735_360, 4 * 36 * 4096, 100, 20)
    assert whole == 2 * 8_190_735_360 * 120 + attention(0, 120)
    cached = request_flops(8_190_735_360, 4 * 36 * 4096, 40, 20, 60)
    assert cached == 2 * 8_190_735_360 * 60 + attention(60, 120)
    assert request_flops(8_190_735_360, 4 * 36 * 4096, 0, 0, 500) == 0


def test_one_token_of_an_8b_model_is_sixteen_gigaflop() -> None:
    model = load_models()["qwen3-8b"]
    flops = request_flops(model.active_parameters, model.flops_per_token_pair, 1, 0, 0)
    assert flops == pytest.approx(16.4e9, rel=0.01)


def test_kv_blocks_of_qwen3_8b_on_an_h100() -> None:
    profile, model, gpu = (
        load_profile("h100-sxm/qwen3-8b"),
        load_models()["qwen3-8b"],
        load_gpus()["h100-sxm"],
    )
    assert model.kv_bytes_per_token("bfloat16") == 147_456
    by_hand = int(85_061_000_000 * 0.9) - 2 * 8_190_735_360
    by_hand -= 1_922_000_000 + activation_bytes(profile, model)
    assert kv_blocks(profile, model, gpu) == by_hand // (16 * 147_456) == 23_529


def test_the_activation_rule_matches_what_vllm_measured() -> None:
    # vLLM pull request 10511: Llama-3-8B on one H100, 8192 tokens, 256 sequences: 1.26 GiB.
    profile = with_engine(load_profile("h100-sxm/llama-3.1-8b"), max_num_seqs=256)
    model, gpu = load_models()["llama-3.1-8b"], load_gpus()["h100-sxm"]
    assert activation_bytes(profile, model) / 2**30 == pytest.approx(1.26, abs=0.02)
    # The same run: 53.29 GiB were left for KV.
    profile = with_engine(profile, max_model_len=8192)
    kv_gib = kv_blocks(profile, model, gpu) * 16 * 131_072 / 2**30
    assert kv_gib == pytest.approx(53.29, abs=0.1)


def test_kv_blocks_of_a_real_run_on_an_rtx4090() -> None:
    # LLMServingSim 5daddb21: vLLM 0.19, Llama-3.1-8B, 2588 blocks.
    profile = with_engine(
        load_profile("h100-sxm/llama-3.1-8b"),
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=32_768,
    )
    blocks = kv_blocks(profile, load_models()["llama-3.1-8b"], load_gpus()["rtx-4090"])
    assert blocks == pytest.approx(2588, rel=0.01)


def test_given_kv_blocks_are_taken_as_they_are() -> None:
    profile = load_profile("cpu/tiny-qwen3")
    blocks = kv_blocks(profile, load_models()["tiny-qwen3"], load_gpus()["cpu-2core"])
    assert (
        blocks
        == 4096
        == 2**30 // (128 * load_models()["tiny-qwen3"].kv_bytes_per_token("bfloat16"))
    )


def test_a_model_that_leaves_too_little_for_kv_is_refused_with_the_figures() -> None:
    profile = load_profile("h100-sxm/qwen3-32b")
    with pytest.raises(ValueError, match=r"KV blocks for 21520 tokens .* raise tensor_parallel"):
        kv_blocks(profile, load_models()["qwen3-32b"], load_gpus()["h100-sxm"])


def test_tensor_parallel_splits_weights_and_kv() -> None:
    model, gpu = load_models()["llama-3.1-70b"], load_gpus()["h100-sxm"]
    profile = load_profile("h100-sxm/llama-3.1-70b@tp4")
    assert weights_bytes(model, "bfloat16", 4) == model.total_parameters // 2
    block_bytes = 16 * model.kv_bytes_per_token("bfloat16") // 4
    left = kv_blocks(profile, model, gpu) * block_bytes
    assert 30e9 < left < 40e9


def test_scaling_a_profile_to_its_own_model_changes_no_coefficient() -> None:
    base = load_profile("h100-sxm/qwen3-8b")
    model, gpu = load_models()["qwen3-8b"], load_gpus()["h100-sxm"]
    same = StepCost.from_profile(scale_profile(base, model, model, gpu, 1))
    for ours, theirs in zip(
        msgspec.structs.astuple(same),
        msgspec.structs.astuple(StepCost.from_profile(base)),
        strict=True,
    ):
        assert ours == pytest.approx(theirs, abs=1)


def test_scaling_predicts_one_fitted_model_from_the_other() -> None:
    models, gpu = load_models(), load_gpus()["h100-sxm"]
    base, truth = load_profile("h100-sxm/llama-3.1-8b"), load_profile("h100-sxm/qwen3-8b")
    # The rule scales the card's part; the host's was calibrated for one of the two only.
    host = truth.step.host_per_step_ns
    base = msgspec.structs.replace(
        base, step=msgspec.structs.replace(base.step, host_per_step_ns=host)
    )
    guess = StepCost.from_profile(
        scale_profile(base, models["llama-3.1-8b"], models["qwen3-8b"], gpu, 1)
    )
    known = StepCost.from_profile(truth)
    for batch, context in ((1, 512), (32, 1024), (128, 2048)):
        assert guess.step_ticks(batch, batch * context) == pytest.approx(
            known.step_ticks(batch, batch * context), rel=0.03
        )
    for tokens in (512, 2048, 8192):
        assert guess.prefill_ns(tokens) == pytest.approx(known.prefill_ns(tokens), rel=0.08)


def test_more_cards_are_faster_but_less_than_in_proportion() -> None:
    four, eight = (
        StepCost.from_profile(load_profile(f"h100-sxm/llama-3.1-70b@tp{size}")) for size in (4, 8)
    )
    assert 0.5 < eight.step_ticks(64, 64_000) / four.step_ticks(64, 64_000) < 1
    assert 0.5 < eight.prefill_ns(4096) / four.prefill_ns(4096) < 1


def test_scaling_starts_from_one_card_of_the_same_kind() -> None:
    models, gpus = load_models(), load_gpus()
    base = load_profile("h100-sxm/qwen3-8b")
    with pytest.raises(ValueError, match="starts from one rtx-4090 card, got h100-sxm x 1"):
        scale_profile(base, models["qwen3-8b"], models["qwen3-4b"], gpus["rtx-4090"], 1)
    with pytest.raises(ValueError, match="no all-reduce over 16 cards, only"):
        scale_profile(base, models["qwen3-8b"], models["qwen3-32b"], gpus["h100-sxm"], 16)
