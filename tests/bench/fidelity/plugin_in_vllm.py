"""What recording one step costs in processor time, with vLLM's own objects.

    ENV/bin/python plugin_in_vllm.py FOLDER PERIOD_S SEQUENCES

runs in vLLM's environment, writes its records to FOLDER and prints JSON: microseconds a step by
part. Each part is the median of `ROUNDS` repetitions, in processor time of the whole process (user
and system), so that other processes on the machine disturb it little. The parts:

- `record`: the plug-in: its `record()`, its rows, their text, the writes to the file; the thread
  writes every 0.2 s, so the entries of that time at this period are written at once;
- `wake`: the writing thread waking up, for its share of a step;
- `count`, `carry`, `line`: what `--enable-logging-iteration-details` costs: counting the step's
  tokens in the engine core, carrying the counts to the API server, and the log line, which the
  plug-in stops before it is printed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from twinkeel_vllm_steps.logger import StepRecorder
from twinkeel_vllm_steps.writer import PERIOD_S
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    SchedulerIterationDetails,
    SchedulerStats,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.utils import compute_iteration_details

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7
FLUSHES = 400
CALLS = 4000
IDLE_S = 2.0


def step_stats(number: int, sequences: int, details: bool = True) -> SchedulerStats:
    """A step that decodes so many sequences."""
    told = SchedulerIterationDetails(number, 0, 0, sequences, sequences, 15.25)
    return SchedulerStats(
        num_running_reqs=sequences,
        num_waiting_reqs=3,
        kv_cache_usage=0.4321,
        iteration_details=told if details else None,
    )


def iteration_stats(number: int, sequences: int) -> IterationStats:
    """A token for each sequence, and the end of one of them."""
    stats = IterationStats()
    stats.num_generation_tokens = sequences
    stats.inter_token_latencies_iter = [0.015 + place * 1e-9 for place in range(sequences)]
    stats.finished_requests = [
        FinishedRequestStats(
            finish_reason=FinishReason.LENGTH,
            request_id=f"cmpl-8f14e45fceea467f9fd8c0e3b1a2d3c4-{number}",
            e2e_latency=1.234567,
            num_prompt_tokens=512,
            num_generation_tokens=64,
            queued_time=0.001234,
            prefill_time=0.123456,
            decode_time=0.987654,
            num_cached_tokens=256,
        )
    ]
    return stats


def scheduled(sequences: int) -> SchedulerOutput:
    """What the engine core's scheduler says of such a step."""
    names = [f"cmpl-8f14e45fceea467f9fd8c0e3b1a2d3c4-{place}" for place in range(sequences)]
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=names,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * sequences,
        num_computed_tokens=[500] * sequences,
        num_output_tokens=[50] * sequences,
    )
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    return output


def cost_us(action: Callable[[], object], calls: int) -> float:
    """Microseconds of processor time a call: the median of the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start_ns = time.process_time_ns()
        for _ in range(calls):
            action()
        rounds.append((time.process_time_ns() - start_ns) / calls / 1e3)
    return median(rounds)


def record_us(folder: str, period_s: float, sequences: int) -> tuple[float, float]:
    """A step's cost in `record()` and in what follows of it, and the wake-ups' share."""
    os.environ["TWINKEEL_STEPS"] = folder
    config: Any = SimpleNamespace(
        observability_config=SimpleNamespace(enable_logging_iteration_details=True)
    )
    recorder = StepRecorder(config, 0)
    recorder.log_engine_initialized()
    writer = recorder._writer
    assert writer is not None
    start_ns = time.process_time_ns()
    time.sleep(IDLE_S)
    wake_us = (time.process_time_ns() - start_ns) / 1e3 / IDLE_S * period_s
    writer._stop.set()  # from here on it is called, not woken
    writer._thread.join()
    at_once = max(1, round(PERIOD_S / period_s))
    given = [(step_stats(n, sequences), iteration_stats(n, sequences)) for n in range(at_once)]

    def flush() -> None:
        for scheduler, iteration in given:
            recorder.record(scheduler, iteration, mm_cache_stats=None, engine_idx=0)
        writer._drain()

    cost = cost_us(flush, FLUSHES) / at_once
    assert writer._overflow == 0
    recorder.close()
    return cost, wake_us


def details_us(sequences: int) -> dict[str, float]:
    """What the counts that the records need cost, in both of vLLM's processes."""
    fresh = scheduled(sequences)

    def count() -> None:
        fresh.scheduled_cached_reqs.__dict__.pop("_req_id_to_num_output_tokens", None)
        compute_iteration_details(fresh)

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def carry(details: bool) -> Callable[[], object]:
        outputs = EngineCoreOutputs(scheduler_stats=step_stats(5, sequences, details))
        return lambda: decoder.decode(encoder.encode(outputs))

    printer: Any = SimpleNamespace(kv_cache_device="CPU", _log_prefix_for_engine=lambda _: "")
    told = step_stats(5, sequences)
    logging.getLogger("vllm.v1.metrics.loggers").setLevel(logging.INFO)
    return {
        "count": cost_us(count, CALLS),
        "carry": max(0.0, cost_us(carry(True), CALLS) - cost_us(carry(False), CALLS)),
        "line": cost_us(lambda: LoggingStatLogger._log_iteration_details(printer, told, 0), CALLS),
    }


def main() -> None:
    """Print what each part costs."""
    folder, period_s, sequences = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    record, wake = record_us(folder, period_s, sequences)
    print(json.dumps({"record": record, "wake": wake, **details_us(sequences)}))


if __name__ == "__main__":
    main()
