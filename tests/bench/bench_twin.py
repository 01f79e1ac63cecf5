"""How fast the twin is: ``make bench-twin`` prints the table and writes its figures.

Every measurement is a process of its own. Wall time runs from the first row read to the last row
written: reading the Parquet trace, simulating, the decision log in hash mode, the results streamed
to Parquet. Starting Python and importing is not in it; memory is the whole process's peak. Ratios
are of processes that ran in turn, so that a machine whose speed drifts does not decide them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import simpy

from policy.compose import build_policy
from policy.files import load_policy
from policy.log import HashLog
from tests.figures import Figure, require, write_figures
from traces import open_trace
from twin.arrivals import arrivals
from twin.fleet import fleet_of
from twin.replay import replay
from twin.world import World

FIGURES = Path("build/figures/bench-twin.json")
WORKLOADS = Path("build/bench")
ROUNDS = 5
PAIRS = 3
QUEUE_ALONE = str(Path(__file__).with_name("queue-alone.yaml"))
REQUIRED = (
    "fifo_4r_10k_req_per_s", "fifo_4r_100k_s", "fifo_4r_100k_mib", "stable_4r_10k_req_per_s",
    "stable_all_req_per_s", "policy_us_per_request", "mooncake_prefix_req_per_s",
    "cost_ratio_16r_to_1r_fifo", "cost_ratio_16r_to_1r_stable", "cost_ratio_100k_to_10k_fifo",
)  # fmt: skip


def measure(trace: str, policy: str, replicas: int, rounds: int, max_model_len: int) -> None:
    """One process: replay ``rounds`` times and print what each took, as JSON."""
    opened = open_trace(trace)
    fleet = fleet_of([("h100-sxm/qwen3-8b", replicas)], max_model_len=max_model_len)
    parameters = load_policy(policy)
    runs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            run = replay(opened, fleet, parameters, out=Path(folder))
        runs.append({"wall_s": run.wall_s, "cpu_s": run.cpu_s, "mib": run.peak_mib})
    print(json.dumps({"requests": opened.rows, "runs": runs, "answered": run.summary.all.answered}))


def timed(
    trace: Path, policy: str, replicas: int, rounds: int = ROUNDS, max_model_len: int = 0
) -> dict[str, Any]:
    """Run ``measure`` in a process of its own and print a row: medians over the rounds."""
    command = [
        sys.executable, "-m", "tests.bench.bench_twin", str(trace), policy, str(replicas),
        str(rounds), str(max_model_len),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    out = json.loads(done.stdout)
    requests = out["requests"]
    wall_s = statistics.median(run["wall_s"] for run in out["runs"])
    cpu_s = statistics.median(run["cpu_s"] for run in out["runs"])
    row = {
        "requests": requests,
        "answered": out["answered"],
        "wall_s": wall_s,
        "best_wall_s": min(run["wall_s"] for run in out["runs"]),
        "cpu_s": cpu_s,
        "per_wall_s": requests / wall_s,
        "per_cpu_s": requests / cpu_s,
        "mib": max(run["mib"] for run in out["runs"]),
    }
    name = Path(policy).stem
    print(
        f"{trace.stem:<22}{name:<12}{replicas:>3} replicas {row['per_wall_s']:>9.0f} req/s"
        f" {wall_s:>8.2f} s wall {cpu_s:>8.2f} s CPU {row['mib']:>7.0f} MiB"
        f"  (best {requests / row['best_wall_s']:.0f}/s)",
        flush=True,
    )
    return row


class Recorded(HashLog):
    """A log that keeps what the policy was told, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, Any]] = []

    def append(self, now_ns: int, event: Any, decisions: tuple[Any, ...]) -> None:
        self.told.append((now_ns, event))
        super().append(now_ns, event, decisions)


def policy_us(trace: Path, replicas: int) -> float:
    """CPU of all steps of the preset ``stable`` for a request, in microseconds: what it was told in
    a run, told to it again without the world. The median over the rounds."""
    parameters = load_policy("stable")
    opened = open_trace(trace)
    log = Recorded()
    fleet = fleet_of([("h100-sxm/qwen3-8b", replicas)])
    World(fleet, build_policy(parameters), log, lambda chunk: None).run(arrivals(opened))
    costs: list[float] = []
    for _ in range(ROUNDS):
        policy = build_policy(parameters)
        step, deadline_ns = policy.step, policy.deadline_ns
        begin = time.process_time()
        for now_ns, event in log.told:
            step(now_ns, event)
            deadline_ns()
        costs.append((time.process_time() - begin) / opened.rows * 1e6)
    return statistics.median(costs)


def cpu_ratio(a: tuple[Path, int], b: tuple[Path, int], policy: str = "fifo") -> float:
    """CPU per request of ``a`` over that of ``b``, each (trace, replicas) under ``policy``.

    The median over pairs of processes that ran right after each other.
    """
    ratios: list[float] = []
    for _ in range(PAIRS):
        costs: list[float] = []
        for trace, replicas in (a, b):
            row = timed(trace, policy, replicas, rounds=3)
            costs.append(row["cpu_s"] / row["requests"])
        ratios.append(costs[0] / costs[1])
    return statistics.median(ratios)


def raw_simpy_per_s() -> float:
    """Bare SimPy timeouts a second here and now: what a Python event costs on this machine."""
    env = simpy.Environment()

    def ticking() -> Any:
        while True:
            yield env.timeout(1)

    env.process(ticking())
    begin = time.perf_counter()
    env.run(until=300_000)
    return 300_000 / (time.perf_counter() - begin)


def workloads() -> dict[str, Path]:
    """The shared workload in its three sizes, and the Mooncake trace where it is at hand."""
    from traces.generate import generate_bench
    from traces.readers import import_trace

    WORKLOADS.mkdir(parents=True, exist_ok=True)
    names = ["w10k_r8", "w10k_r32", "w100k_r32", "mooncake"]
    paths = {name: WORKLOADS / f"{name}.parquet" for name in names}
    for name in names[:3]:
        generate_bench(name, paths[name])
    data = os.environ.get("TWINKEEL_DATA")
    if data:
        source = Path(data) / "traces" / "mooncake_conversation.jsonl.gz"
        import_trace(source, paths["mooncake"])
    else:
        print("the Mooncake trace is not at hand: set TWINKEEL_DATA to where the traces lie")
        del paths["mooncake"]
    return paths


def main() -> int:
    paths = workloads()
    simpy_before = raw_simpy_per_s()
    small = timed(paths["w10k_r32"], "fifo", 4)
    large = timed(paths["w100k_r32"], "fifo", 4, rounds=3)
    queue = timed(paths["w10k_r32"], QUEUE_ALONE, 4)
    stable = timed(paths["w10k_r32"], "stable", 4)
    how = "median of the runs in one process"
    figures = [
        Figure("fifo_4r_10k_req_per_s", small["per_wall_s"], "1/s", ">= 40000", how),
        Figure("fifo_4r_100k_s", large["wall_s"], "s", "<= 3.5", how),
        Figure("fifo_4r_100k_mib", large["mib"], "MiB", "<= 150", "peak of the process"),
        Figure(
            "stable_4r_10k_req_per_s", queue["per_wall_s"], "1/s", ">= 20000",
            f"the tiered queue by itself; {how}",
        ),
        Figure(
            "stable_all_req_per_s", stable["per_wall_s"], "1/s", ">= 10000",
            f"the preset stable, with every mechanism; {how}",
        ),
        Figure(
            "policy_us_per_request", policy_us(paths["w10k_r32"], 4), "us", "<= 60",
            "CPU of all of stable's steps for a request, events replayed without the world",
        ),
    ]  # fmt: skip
    if "mooncake" in paths:
        prefix = timed(paths["mooncake"], "fifo", 8, rounds=3, max_model_len=131_072)
        figures.append(
            Figure(
                "mooncake_prefix_req_per_s", prefix["per_wall_s"], "1/s", ">= 5000",
                "the Mooncake conversation trace, 8 replicas, shared prefixes on",
            )
        )  # fmt: skip
    figures += [
        Figure(
            "cost_ratio_16r_to_1r_fifo",
            cpu_ratio((paths["w10k_r8"], 16), (paths["w10k_r8"], 1)), "1", "<= 1.25",
            "CPU of the same trace on 16 replicas and on 1, median of pairs",
        ),
        Figure(
            "cost_ratio_16r_to_1r_stable",
            cpu_ratio((paths["w10k_r8"], 16), (paths["w10k_r8"], 1), "stable"), "1", "<= 1.5",
            "CPU of the same trace on 16 replicas and on 1, every mechanism on, median of pairs",
        ),
        Figure(
            "cost_ratio_100k_to_10k_fifo",
            cpu_ratio((paths["w100k_r32"], 4), (paths["w10k_r32"], 4)), "1", "<= 1.2",
            "CPU per request of 100,000 requests and of 10,000, median of pairs",
        ),
        Figure(
            "raw_simpy_timeouts_per_s", (simpy_before + raw_simpy_per_s()) / 2, "1/s", "> 0",
            "bare SimPy on this machine, mean of before and after: the yardstick for the others",
        ),
    ]  # fmt: skip
    write_figures(FIGURES, figures)
    complaints = require(figures, REQUIRED)
    print("\n".join(complaints) or "all figures hold")
    absent = set(REQUIRED) - {figure.name for figure in figures}
    return int(bool(absent))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], sys.argv[2], *(int(word) for word in sys.argv[3:]))
    else:
        sys.exit(main())
