"""The GPU step benchmark without a GPU: its grid, the comparison, and what its figures claim."""

import importlib.util
from pathlib import Path

import pytest

from policy.cost import TICKS_PER_NS, StepCost
from policy.files import load_models, load_profile
from tests.bench import gpu_steps
from tests.bench.gpu_steps import Point, Timed

PROFILE = load_profile(gpu_steps.PROFILE)


def host_ns(batch: int) -> float:
    step = PROFILE.step
    return step.host_per_step_ns.value + step.host_per_sequence_ns.value * batch


def test_the_grid_keeps_to_the_cache_and_begins_small() -> None:
    points = gpu_steps.grid(340_000)  # about what an H100 leaves
    assert len(points) == len(set(points)) >= 60
    assert [point.kv_tokens for point in points] == sorted(point.kv_tokens for point in points)
    assert max(point.kv_tokens for point in points) <= 340_000
    decodes = [point for point in points if point.kind == "decode"]
    assert {point.batch for point in decodes} == set(gpu_steps.DECODE_BATCHES)
    assert {point.context for point in decodes} == set(gpu_steps.DECODE_CONTEXTS)
    assert all(point.tokens == 1 for point in decodes)
    prefills = [point for point in points if point.kind == "prefill"]
    assert max(point.tokens for point in prefills) == 8192
    assert any(point.context for point in prefills)
    assert gpu_steps.grid(0) == []


def test_the_cache_budget_leaves_room_for_activations() -> None:
    shape = load_models()["qwen3-8b"]
    assert gpu_steps.kv_budget_tokens(63 * 10**9, shape) == pytest.approx(341_000, rel=0.01)
    assert gpu_steps.kv_budget_tokens(10**9, shape) == 0


@pytest.mark.parametrize(
    ("device", "scale"),
    [
        ("NVIDIA H100 80GB HBM3", 1.0),
        ("NVIDIA H200", 4.8 / 3.35),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", None),
        ("NVIDIA H20", None),
    ],
)
def test_only_known_cards_are_compared(device: str, scale: float | None) -> None:
    assert gpu_steps.bandwidth_scale(device) == (None if scale is None else pytest.approx(scale))


@pytest.mark.parametrize("point", gpu_steps.grid(340_000), ids=str)
def test_the_profile_s_gpu_part_is_its_step_without_the_host(point: Point) -> None:
    cost = StepCost.from_profile(PROFILE)
    end = point.context + point.tokens
    if point.kind == "decode":
        ticks = cost.step_ticks(point.batch, point.batch * end)
        host = host_ns(point.batch)
    else:
        ticks = cost.step_ticks(0, 0, point.tokens, end**2 - point.context**2)
        host = host_ns(0)
    whole_ms = ticks / TICKS_PER_NS / 1e6
    assert gpu_steps.profile_ms(PROFILE, point) == pytest.approx(whole_ms - host / 1e6, rel=1e-3)


def test_decode_is_scaled_by_the_bandwidth_and_prefill_is_not() -> None:
    decode, prefill = Point("decode", 8, 1, 1024), Point("prefill", 1, 2048, 0)
    scale = 4.8 / 3.35
    fast = Timed(decode, gpu_steps.profile_ms(PROFILE, decode) / scale, graph=True)
    assert gpu_steps.off_percent(PROFILE, fast, scale) == pytest.approx(0)
    assert gpu_steps.off_percent(PROFILE, fast, 1.0) == pytest.approx((scale - 1) * 100)
    same = Timed(prefill, gpu_steps.profile_ms(PROFILE, prefill), graph=False)
    assert gpu_steps.off_percent(PROFILE, same, scale) == pytest.approx(0)


def test_figures_claim_a_comparison_only_on_a_known_card() -> None:
    point = Point("decode", 1, 1, 128)
    times = [Timed(point, gpu_steps.profile_ms(PROFILE, point) / 1.1, graph=True)]
    known = {f.name: f for f in gpu_steps.figures_of(PROFILE, times, "NVIDIA H100", 1.0, 9)}
    assert known["gpu_decode_off_median_pct"].value == 10.0
    assert "gpu_prefill_off_median_pct" not in known
    assert not known["gpu_steps_points"].holds
    other = gpu_steps.figures_of(PROFILE, times, "NVIDIA A100", None, 9)
    assert [figure.name for figure in other] == ["gpu_steps_points", "gpu_steps_s"]


def test_a_cpu_claims_nothing_about_a_gpu() -> None:
    times = [Timed(point, 1.0, graph=False) for point in gpu_steps.tiny_grid()]
    (figure,) = gpu_steps.cpu_figures(times)
    assert figure.name.startswith("cpu_only")
    assert figure.holds
    assert "no step time of a GPU was measured" in figure.how
    assert not gpu_steps.cpu_figures(times[1:])[0].holds


def test_the_points_are_written_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    gpu_steps.write_points(path, [Timed(Point("decode", 4, 1, 128), 7.25, True, "a note")])
    assert path.read_text("utf-8").splitlines() == [
        "kind,batch,tokens,context,ms,graph,note",
        "decode,4,1,128,7.2500,1,a note",
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="PyTorch is installed here"
)
def test_without_pytorch_it_says_how_to_get_it() -> None:
    with pytest.raises(SystemExit, match="pip install torch"):
        gpu_steps.load_torch()
