"""Steps put together from operators, and the RTX 4090 profile that is fitted on them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from policy.cost import StepCost
from policy.files import load_profile
from twin import fit_operators
from twin.fit_operators import Limits, Operators

needs_data = pytest.mark.skipif(
    "TWINKEEL_DATA" not in os.environ, reason="TWINKEEL_DATA is not set: no tables to fit"
)
THREE_DIGITS = 5e-4
LAYERS = 10


def curve(*points: tuple[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([x for x, _ in points], dtype=float), np.array([y for _, y in points])


def operators() -> Operators:
    """A card on which attention takes chunk**2 + kv_prefill + sequences * kv / 10 us."""
    axes = ((0, 16, 64, 128), (0, 32), (0, 1, 8, 16), (0, 128, 256))
    attention = {
        (chunk, before, decodes, kv): chunk**2 + before + decodes * kv / 10
        for chunk in axes[0]
        for before in (axes[1] if chunk else (0,))
        for decodes in axes[2]
        for kv in (axes[3][1:] if decodes else (0,))
    }
    return Operators(
        layers=LAYERS,
        limits=Limits(kv_tokens=2048, step_tokens=128, sequences=16, capture_sizes=(1, 8, 16)),
        dense={
            "qkv_proj": curve((1, 1.0), (8, 2.0), (16, 3.0), (64, 4.0), (128, 5.0)),
            "layernorm": curve((1, 0.5), (128, 0.5)),
            "embedding": curve((1, 7.0), (128, 7.0)),
        },
        per_sequence={"lm_head": curve((1, 100.0), (8, 170.0), (16, 170.0))},
        attention=attention,
        axes=axes,
    )


def us(dense: float, attention: float, head: float) -> float:
    """One embedding, and in each layer two norms, the projection, and attention."""
    return 7 + LAYERS * (2 * 0.5 + dense + attention) + head


@pytest.mark.parametrize(
    ("decodes", "kv", "chunk", "before", "wanted_us"),
    [
        (8, 128, 0, 0, us(2, 102.4, 170)),
        (3, 192, 0, 0, us(2, 3 * 19.2, 120)),  # padded to 8 sequences; attention and head are not
        (0, 0, 16, 32, us(3, 256 + 32, 100)),
        (0, 0, 40, 0, us(4, 1600, 100)),  # the next measured size; attention by the square
        (1, 128, 64, 0, us(5, 4096 + 12.8, 110)),  # 65 tokens need one tile more
    ],
)
def test_a_step_is_the_sum_of_its_operators(
    decodes: int, kv: int, chunk: int, before: int, wanted_us: float
) -> None:
    step_ns = operators().step_ns(decodes, kv, chunk, before)
    assert step_ns == pytest.approx(wanted_us * 1000)


def test_fitted_steps_hold_what_the_pool_holds() -> None:
    card = operators()
    assert card.contexts(8, 2048) == [128, 192, 256]
    assert card.contexts(1, 2048) == [256]  # 512 and more were not measured
    decode = fit_operators.decode_table(card)
    assert set(decode.batch) == {1, 2, 8, 9, 16}
    assert decode.kv_tokens.max() == 2048
    mixed = fit_operators.mixed_table(card)
    assert set(mixed.batch) == {8}, "fewer are not fitted, and 16 leave no room for a prompt"
    assert (mixed.kv_tokens + mixed.prefill_tokens).max() <= 2048
    assert (mixed.batch + mixed.prefill_tokens).max() <= 128
    assert set(mixed.prefill_tokens) == {16, 32, 64}
    prefill = fit_operators.prefill_table(card)
    assert set(prefill.prefill_tokens) == {16, 32, 64, 128}
    assert prefill.prefill_quad.max() == (128 + 32) ** 2 - 32**2


def test_the_entry_point_asks_for_its_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TWINKEEL_DATA", raising=False)
    assert fit_operators.main() == 2
    assert "TWINKEEL_DATA" in capsys.readouterr().err


@needs_data
def test_the_shipped_rtx4090_profile_is_the_refit() -> None:
    data = Path(os.environ["TWINKEEL_DATA"])
    shipped, result = load_profile(fit_operators.PROFILE), fit_operators.fit_rtx4090(data)
    for key in result.step.__struct_fields__:
        old, new = getattr(shipped.step, key), getattr(result.step, key)
        if key.endswith("_padding"):
            assert len(old) == len(new)
            for one, other in zip(old, new, strict=True):
                bounds = [getattr(row, row.__struct_fields__[0]) for row in (one, other)]
                assert bounds[0] == bounds[1]
                assert one.extra_ns == pytest.approx(other.extra_ns, abs=501)
        else:
            assert old.value == pytest.approx(new.value, rel=THREE_DIGITS), key
    assert {row.table for row in shipped.trust.errors} == set(result.errors)
    for quoted in shipped.trust.errors:
        measured = result.errors[quoted.table]
        assert quoted.rows == measured.rows
        for name in ("mean", "worst", "held_out_mean", "held_out_worst"):
            key = f"{name}_percent"
            assert getattr(quoted, key) == pytest.approx(getattr(measured, key), abs=0.051), key
    line = [f"{percent:.1f} % on {name}" for name, percent in result.line_mean_percent.items()]
    assert all(text in shipped.trust.notes[-1] for text in line)


@needs_data
def test_the_compiled_profile_is_as_close_to_the_tables_as_the_fit() -> None:
    data = Path(os.environ["TWINKEEL_DATA"])
    card = fit_operators.read_operators(data / fit_operators.FOLDER, 32)
    profile = load_profile(fit_operators.PROFILE)
    cost = StepCost.from_profile(profile)
    tables = {
        "decode": fit_operators.decode_table(card),
        "prefill": fit_operators.prefill_table(card),
        "mixed": fit_operators.mixed_table(card),
    }
    for quoted in profile.trust.errors:
        table = tables[quoted.table]
        columns = (table.batch, table.kv_tokens, table.prefill_tokens, table.prefill_quad)
        rows = zip(*(column.astype(int).tolist() for column in columns), strict=True)
        predicted_ns = np.array([cost.step_ticks(*row) / 1024 for row in rows])
        off_percent = np.abs(predicted_ns / table.time_ns - 1) * 100
        assert float(off_percent.mean()) == pytest.approx(quoted.mean_percent, abs=0.06)
        assert float(off_percent.max()) == pytest.approx(quoted.worst_percent, abs=0.1)
