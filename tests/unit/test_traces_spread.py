"""Spreading coarse stamps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from traces import spread_ties


def stamped(arrival: list[float], resolution: float, first_id: int = 0) -> pa.RecordBatch:
    count = len(arrival)
    return pa.RecordBatch.from_pydict(
        {
            "request_id": np.arange(first_id, first_id + count),
            "arrival_s": pa.array(arrival, pa.float64()),
            "arrival_res_s": pa.array([resolution] * count, pa.float32()),
            "label": pa.array([str(i) for i in range(count)]).dictionary_encode(),
        }
    )


def test_exact_stamps_pass_untouched() -> None:
    batch = stamped([0.0, 0.0, 1.0], 0.0)
    assert list(spread_ties([batch])) == [batch]


def test_ties_are_spread_within_the_stamp() -> None:
    batch = stamped([0.0] * 500 + [3.0] * 500, 3.0)
    out = pa.Table.from_batches(spread_ties([batch], seed=1))
    arrival = out.column("arrival_s").to_numpy()
    assert (np.diff(arrival) >= 0).all()
    assert len(np.unique(arrival)) == 1000
    ids = out.column("request_id").to_numpy()
    stamps = np.where(ids < 500, 0.0, 3.0)
    assert ((arrival >= stamps) & (arrival < stamps + 3.0)).all()
    assert abs(arrival.mean() - 3.0) < 0.1
    assert not out.column("arrival_res_s").to_numpy().any()


def test_the_seed_decides_and_other_rows_do_not() -> None:
    whole = pa.Table.from_batches(spread_ties([stamped([5.0] * 50, 1.0)], seed=3))
    again = pa.Table.from_batches(spread_ties([stamped([5.0] * 50, 1.0)], seed=3))
    other = pa.Table.from_batches(spread_ties([stamped([5.0] * 50, 1.0)], seed=4))
    part = pa.Table.from_batches(spread_ties([stamped([5.0] * 10, 1.0, 20)], seed=3))
    assert whole.equals(again)
    assert not whole.equals(other)
    of_whole = dict(zip(*(whole.column(i).to_pylist() for i in (0, 1)), strict=True))
    of_part = dict(zip(*(part.column(i).to_pylist() for i in (0, 1)), strict=True))
    assert of_part == {key: of_whole[key] for key in range(20, 30)}


def test_spreading_twice_is_spreading_once() -> None:
    once = list(spread_ties([stamped([0.0] * 20, 1.0)], seed=2))
    twice = list(spread_ties(once, seed=2))
    assert pa.Table.from_batches(once).equals(pa.Table.from_batches(twice))
