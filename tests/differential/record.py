"""Record the schedules of vLLM's own scheduler, one JSON line a workload.

Runs inside the vLLM environment, never in the project's own:

    ENV/bin/python -m tests.differential.record --model DIR --workloads FILE --out FILE

No model is run. The loop is that of vLLM's `EngineCore.step` and `step_with_batch_queue`
(a queue of one or two steps), with a clock: a step takes the time the workload says, a
submission or an abort at t is seen by the first decision after t, aborts before the outputs of
the step that has just ended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from tests.differential import probe
from tests.differential.workloads import (
    Request,
    Workload,
    load,
    own_token,
    prompt_token_ids,
)

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
MAX_DECISIONS = 20_000


class Oracle:
    """Builds vLLM schedulers and drives them; vLLM is imported when it is made."""

    def __init__(self, model: str) -> None:
        os.environ.update(QUIET)
        import torch
        from vllm.config.device import DeviceConfig  # noqa: F401 (fails early without vLLM)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.pooling_params import PoolingParams
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request as VllmRequest
        from vllm.v1.request import RequestStatus
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self.model = model
        self.engine_args = EngineArgs
        self.kv_types = (FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, torch.float32)
        self.schedulers = {True: probe.probed(AsyncScheduler), False: probe.probed(Scheduler)}
        self.structured_output = StructuredOutputManager
        self.output_type = ModelRunnerOutput
        self.request_type = VllmRequest
        self.aborted = RequestStatus.FINISHED_ABORTED
        self.params = (SamplingParams, PoolingParams)
        self.hasher = lambda block: get_request_block_hasher(block, sha256)

    def scheduler(self, workload: Workload) -> Any:
        """A fresh scheduler with the workload's settings (about 10 ms)."""
        config = self.engine_args(
            model=self.model,
            max_model_len=4096,
            enforce_eager=True,
            block_size=16,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            max_num_seqs=workload.max_num_seqs,
            scheduling_policy="priority" if workload.priority_policy else "fcfs",
            enable_prefix_caching=workload.prefix_caching,
            runner="pooling" if workload.pooling else "auto",
        ).create_engine_config()
        # What the command line would not take here (tiny pools, async on a CPU) is set after.
        config.cache_config.num_gpu_blocks = workload.kv_blocks
        config.model_config.max_model_len = workload.max_model_len
        config.scheduler_config.async_scheduling = workload.async_scheduling
        if workload.pooling:
            config.model_config.runner_type = "pooling"
        spec_type, config_type, group_type, dtype = self.kv_types
        block = workload.block_tokens
        spec = spec_type(block_size=block, num_kv_heads=1, head_size=1, dtype=dtype)
        kv_config = config_type(
            num_blocks=workload.kv_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[group_type(["layer"], spec)],
            hash_block_size=block,
        )
        return self.schedulers[workload.async_scheduling](
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=self.structured_output(config),
            block_size=block,
            hash_block_size=block,
            log_stats=False,
        )

    def request(self, workload: Workload, request: Request, hasher: Any) -> Any:
        """vLLM's request; a request that ends by EOS has its own last token as EOS."""
        sampling_type, pooling_type = self.params
        sampling = pooling = None
        if workload.pooling:
            pooling = pooling_type(task="embed")
        else:
            sampling = sampling_type(max_tokens=request.max_tokens)
            if request.output_tokens < request.max_tokens:
                last = request.prompt_tokens + request.output_tokens - 1
                sampling._eos_token_id = own_token(request, last)
        made = self.request_type(
            request_id=name_of(request.id),
            prompt_token_ids=prompt_token_ids(workload, request),
            sampling_params=sampling,
            pooling_params=pooling,
            arrival_time=float(request.at_ns),
            priority=request.priority,
            block_hasher=hasher,
        )
        made.content_tokens = workload.prefix_block_tokens
        shared = len(request.prefix) * workload.prefix_block_tokens
        made.shared_tokens = min(shared, request.prompt_tokens)
        return made


def name_of(identity: int) -> str:
    """vLLM breaks ties by the text of the id: the same order as the number's."""
    return f"{identity:06d}"


class Replay:
    """One workload through one scheduler, on the workload's clock."""

    def __init__(self, oracle: Oracle, workload: Workload) -> None:
        self.oracle = oracle
        self.workload = workload
        self.scheduler = oracle.scheduler(workload)
        self.by_name = {name_of(request.id): request for request in workload.requests}
        self.hasher = oracle.hasher(workload.block_tokens)
        arrivals = [(request.at_ns, 0, request) for request in workload.requests]
        aborts = [
            (request.abort_ns, 1, request)
            for request in workload.requests
            if request.abort_ns is not None
        ]
        self.pending: deque[Any] = deque(sorted(arrivals, key=lambda event: event[0]))
        self.aborts: deque[Any] = deque(sorted(aborts, key=lambda event: event[0]))
        self.records: list[list[Any]] = []
        self.finished: list[int] = []
        self.now_ns = 0
        self.busy_until_ns = 0

    def run(self) -> list[list[Any]]:
        """The records: [t, scheduled, preempted, finished, running, waiting, free blocks]."""
        depth = 2 if self.workload.async_scheduling else 1
        queue: deque[Any] = deque()
        for _ in range(MAX_DECISIONS):
            self.take_input()
            if self.scheduler.has_requests():
                scheduled = self.decide()
                queue.append(scheduled)
                more = bool(scheduled[1]) or self.scheduler.has_requests()
                if len(queue) < depth and more:
                    continue
            elif not queue:
                if not self.pending:
                    return self.trimmed()
                self.now_ns = max(self.now_ns, self.pending[0][0] + 1)
                continue
            self.complete(*queue.popleft())
        raise RuntimeError(f"{self.workload.name}: no end after {MAX_DECISIONS} decisions")

    def take_input(self) -> None:
        """Submissions and aborts before now, as the input queue holds them."""
        while self.pending and self.pending[0][0] < self.now_ns:
            request = self.pending.popleft()[2]
            self.scheduler.add_request(self.oracle.request(self.workload, request, self.hasher))
        self.take_aborts()

    def take_aborts(self) -> None:
        """Aborts before now; one of a request not seen yet takes it out of the input queue."""
        while self.aborts and self.aborts[0][0] < self.now_ns:
            request = self.aborts.popleft()[2]
            self.scheduler.probe.aborting(name_of(request.id))
            self.scheduler.finish_requests(name_of(request.id), self.oracle.aborted)
            self.pending = deque(event for event in self.pending if event[2] is not request)

    def decide(self) -> tuple[Any, int, int, dict[str, bool]]:
        """One schedule, and its record."""
        scheduler = self.scheduler
        scheduler.probe.begin_step()
        decoding = {
            request.request_id for request in scheduler.running if not request.is_prefill_chunk
        }
        output = scheduler.schedule()
        preempted = scheduler.probe.end_step(output.num_scheduled_tokens)
        tokens = output.total_num_scheduled_tokens
        read = [
            scheduler.requests[name].num_computed_tokens
            for name in decoding.intersection(output.num_scheduled_tokens)
        ]
        starts = max(self.busy_until_ns, self.now_ns)
        self.busy_until_ns = starts + self.workload.step_cost_ns(tokens, sum(read))
        self.records.append(
            [
                self.now_ns,
                [[int(name), count] for name, count in output.num_scheduled_tokens.items()],
                preempted,
                self.finished,
                [int(request.request_id) for request in scheduler.running],
                sum(scheduler.get_request_counts()) - len(scheduler.running),
                scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            ]
        )
        self.finished = []
        chunks = {
            name: scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens
        }
        return output, tokens, self.busy_until_ns, chunks

    def complete(self, output: Any, tokens: int, ends_ns: int, chunks: dict[str, bool]) -> None:
        """Time passes to the end of the step, aborts come first, then its outputs."""
        self.now_ns = max(self.now_ns, ends_ns)
        self.take_aborts()
        names = list(chunks)
        model_output = self.oracle.output_type(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self.sampled(name, chunks[name]) for name in names],
            prompt_logprobs_dict={},
            pooler_output=self.pooled(chunks),
        )
        self.scheduler.probe.begin_update()
        outputs = self.scheduler.update_from_output(output, model_output)
        for client in outputs.values():
            for one in client.outputs:
                if one.finish_reason is not None:
                    self.finished.append(int(one.request_id))
        self.scheduler.probe.end_update()

    def sampled(self, name: str, chunk: bool) -> list[int]:
        """The token that the model would have sampled: the request's own next one."""
        request = self.scheduler.requests.get(name)
        if chunk or self.workload.pooling or request is None:
            return []
        return [own_token(self.by_name[name], request.num_tokens)]

    def pooled(self, chunks: dict[str, bool]) -> list[Any] | None:
        """A pooling output for each request whose prompt is complete."""
        if not self.workload.pooling:
            return None
        return [None if chunk else "pooled" for chunk in chunks.values()]

    def trimmed(self) -> list[list[Any]]:
        """The records without steps in which nothing happened; see `drop_empty`."""
        self.records.append([self.now_ns, [], [], self.finished, [], 0, -1])
        return drop_empty(self.records)


def drop_empty(records: list[list[Any]]) -> list[list[Any]]:
    """Leave out decisions that schedule and preempt nobody; what they saw finish is carried on.

    vLLM's loop takes one more empty step after a finish, an async engine idles while the last
    tokens are in flight: such steps take no time and change nothing. The last record has only
    what was left to finish.
    """
    kept: list[list[Any]] = []
    carried: list[int] = []
    for record in records[:-1]:
        if record[1] or record[2]:
            kept.append([*record[:3], carried + record[3], *record[4:]])
            carried = []
        else:
            carried = carried + record[3]
    last = records[-1]
    kept.append([0, [], [], carried + last[3], [], 0, 0])
    return kept


def record(oracle: Oracle, workload: Workload) -> dict[str, Any]:
    """The recorded schedule of one workload, with the rare paths that it went through."""
    replay = Replay(oracle, workload)
    steps = replay.run()
    return {
        "workload": workload.to_json(),
        "steps": steps,
        "paths": dict(sorted(replay.scheduler.probe.paths.items())),
    }


def main() -> None:
    """Record what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of the tiny model")
    parser.add_argument("--workloads", required=True, type=Path, help="workload lines")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    oracle = Oracle(options.model)
    started = time.monotonic()
    lines = options.workloads.read_text(encoding="utf-8").splitlines()
    with options.out.open("w", encoding="utf-8") as out:
        for done, text in enumerate(lines, 1):
            line = record(oracle, load(text))
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
            if done % 200 == 0:
                print(f"recorded {done} in {time.monotonic() - started:.0f} s", flush=True)
    print(f"recorded {len(lines)} workloads in {time.monotonic() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
