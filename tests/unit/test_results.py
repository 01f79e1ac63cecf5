"""Results as columns: the hops add up, and the row tells what became of the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from policy.compose import build_policy
from policy.decisions import Decision, Dispatch, Settled, Verify
from policy.events import Arrived, Event, Finished, Verified
from policy.files import load_policy
from tests.support import NoLog, ScriptedPolicy, bare_fleet, engine_settings, flat_cost, write_rows
from traces.schema import SCHEMA
from twin.arrivals import Chunk, arrivals
from twin.results import HOPS, Observed, results_batch
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from pathlib import Path

    from policy.contract import Policy
    from twin.fleet import ReplicaSpec

SETTINGS = WorldSettings(gateway_ns=900, network_ns=300, scrape_every_ns=0, sample_every_ns=0)


def played(
    tmp_path: Path, rows: list[dict[str, Any]], policy: str | Policy = "fifo", **changes: Any
) -> tuple[Chunk, Observed, list[ReplicaSpec]]:
    """One chunk of rows, played through two replicas."""
    fleet = bare_fleet(
        2,
        engine_settings(**{"max_num_seqs": 2, **changes}),
        flat_cost(1000, per_kv_token_ns=1, per_prefill_token_ns=2),
        overhead_ns=(5000, 400, 20),
    )
    trace = write_rows(tmp_path / "t.parquet", rows)
    done: list[Chunk] = []
    if isinstance(policy, str):
        policy = build_policy(load_policy(policy))
    world = World(fleet, policy, NoLog(), done.append, SETTINGS)
    world.run(arrivals(trace))
    (chunk,) = done
    return chunk, Observed(chunk, fleet, SETTINGS), fleet


def mixed_rows(count: int = 60) -> list[dict[str, Any]]:
    dice = np.random.default_rng(8)
    return [
        {
            "arrival_s": number * 2e-6,
            "prompt_tokens": int(dice.integers(1, 150)),
            "output_tokens": int(dice.integers(1, 40)),
            "endpoint": "embeddings" if number % 5 == 0 else "chat",
            "model": "m",
            "user_id": number,
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("policy", ["fifo", "stable"])
def test_the_hops_of_an_answer_add_up_to_its_time(tmp_path: Path, policy: str) -> None:
    _, seen, _ = played(tmp_path, mixed_rows(), policy)
    assert seen.answered.all()
    total = sum(seen.columns[name] for name in HOPS)
    assert np.allclose(total, seen.columns["e2e_s"], rtol=0, atol=1e-12)
    for name in HOPS:
        assert (seen.columns[name] >= 0).all(), name
    assert (seen.columns["schedule_s"] > 0).any()


def test_an_answer_of_one_token_is_not_out_before_that_token(tmp_path: Path) -> None:
    rows = [{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 1} for _ in range(60)]
    _, seen, _ = played(tmp_path, rows, max_num_seqs=40, max_num_batched_tokens=999)
    columns = seen.columns
    # Thirty a replica, all in one step: their outputs are sent one by one, and then the way out.
    assert set((columns["decode_s"] * 1e9).round()) == {400.0}
    expected = sorted(2 * [1000 + 30 * 2 * 10 + turn * 20 for turn in range(1, 31)])
    assert sorted((columns["prefill_s"] * 1e9).round()) == expected
    assert np.allclose(columns["e2e_s"] - columns["ttft_s"], 400e-9, rtol=0, atol=1e-12)
    total = sum(columns[name] for name in HOPS)
    assert np.allclose(total, columns["e2e_s"], rtol=0, atol=1e-12)


def test_each_hop_is_what_it_says(tmp_path: Path) -> None:
    """Nothing else is there: 900 + 2 x 300 ns of way, 5000 in, 400 out, 20 a token."""
    rows = [{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 3}]
    _, seen, _ = played(tmp_path, rows)
    ns = {name: round(column[0] * 1e9) for name, column in seen.columns.items()}
    prefill = 1000 + 2 * 10
    decode = 2 * 1000 + 11 + 12
    assert ns == {
        "gateway_s": 900,
        "queue_s": 0,
        "schedule_s": 5000 + 1,
        "prefill_s": prefill + 20,
        "decode_s": decode + 400 + 3 * 20 - 20,
        "network_s": 600,
        "ttft_s": 900 + 300 + 5001 + prefill + 20 + 300,
        "e2e_s": 900 + 600 + 5001 + prefill + decode + 400 + 60,
        "tpot_s": round((decode + 400 + 40) / 2),
    }


def test_one_token_has_no_time_per_token(tmp_path: Path) -> None:
    rows = [{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": output} for output in (1, 2)]
    _, seen, _ = played(tmp_path, rows)
    assert np.isnan(seen.columns["tpot_s"]).tolist() == [True, False]


def test_a_row_cut_short_is_judged_by_what_was_made(tmp_path: Path) -> None:
    """max_output_tokens is below the trace's output: two tokens are made, one gap is between."""
    rows = [{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 30, "max_output_tokens": 2}]
    _, seen, _ = played(tmp_path, rows)
    columns = seen.columns
    assert columns["tpot_s"][0] == pytest.approx(columns["e2e_s"][0] - columns["ttft_s"][0])


def test_what_was_never_sent_has_only_its_time_in_the_queue(tmp_path: Path) -> None:
    rows = [{"arrival_s": 0.0, "prompt_tokens": 10, "max_output_tokens": 5000, "output_tokens": 9}]
    chunk, seen, fleet = played(tmp_path, rows)
    batch = results_batch(chunk, seen, fleet)
    row = {name: batch.column(name)[0].as_py() for name in batch.schema.names}
    assert (row["outcome"], row["error_kind"], row["http_code"]) == ("failed", "too_large", 400)
    assert row["replica"] is None
    assert row["queue_s"] == 0.0
    times = ("gateway_s", "schedule_s", "prefill_s", "decode_s", "network_s", "ttft_s", "e2e_s")
    assert [row[name] for name in times] == [None] * len(times)
    assert row["retries"] == 0


def test_rows_keep_what_they_had_and_gain_what_was_seen(tmp_path: Path) -> None:
    chunk, seen, fleet = played(tmp_path, mixed_rows())
    batch = results_batch(chunk, seen, fleet)
    assert batch.schema.equals(SCHEMA)
    observed = {
        "outcome", "http_code", "error_kind", "retries", "tier", "replica", "degraded_how",
        "confidence", "verification_status", "ttft_s", "e2e_s", "tpot_s", *HOPS,
    }  # fmt: skip
    for name in SCHEMA.names:
        if name not in observed:
            assert batch.column(name).equals(chunk.batch.column(name)), name
    assert set(batch.column("replica").to_pylist()) == {spec.name for spec in fleet}
    assert set(batch.column("outcome").to_pylist()) == {"answered"}
    e2e_s = np.array(batch.column("e2e_s").to_pylist())
    assert np.allclose(e2e_s, seen.columns["e2e_s"], rtol=1e-6)


def test_what_is_done_with_an_answer_that_is_back_is_the_gateways_time(tmp_path: Path) -> None:
    """A second run to compare with: the hops still add up."""

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            return [Dispatch(event.request, 0, "")]
        if isinstance(event, Finished):
            return [Verify(event.request, 1)]
        if isinstance(event, Verified):
            return [Settled(event.request, "answered", "", "", 200, 0, 640, "match")]
        return []

    rows = [{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 3}]
    chunk, seen, fleet = played(tmp_path, rows, ScriptedPolicy(decide))
    ns = {name: round(seen.columns[name][0] * 1e9) for name in (*HOPS, "e2e_s")}
    once = 900 + 2 * 300 + 5000 + 1 + (1000 + 2 * 10) + (2 * 1000 + 11 + 12) + 400 + 3 * 20
    assert ns["e2e_s"] == 2 * once
    assert ns["gateway_s"] == 900 + once
    assert sum(ns[name] for name in HOPS) == ns["e2e_s"]
    batch = results_batch(chunk, seen, fleet)
    assert batch["verification_status"].to_pylist() == ["match"]
    assert batch["confidence"].to_pylist() == [pytest.approx(0.64)]


def test_an_answer_that_was_kept_has_a_time_but_no_engine(tmp_path: Path) -> None:
    """The second request is answered from the cache, the third from a template."""

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived) and event.request == 0:
            return [Dispatch(0, 0, "")]
        if isinstance(event, Finished):
            how = {1: "cached", 2: "template"}
            kept = [Settled(request, "degraded", "", how[request]) for request in how]
            return [Settled(0, "answered"), *kept]
        return []

    rows = [{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 3}] * 3
    _, seen, _ = played(tmp_path, rows, ScriptedPolicy(decide))
    assert seen.whole.tolist() == [True, True, False]
    e2e, ttft, queue = (seen.columns[name] for name in ("e2e_s", "ttft_s", "queue_s"))
    assert e2e[1] == ttft[1] == queue[1] == e2e[0]
    assert np.isnan(e2e[2])
    assert np.isnan(ttft[2])
