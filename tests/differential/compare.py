"""The twin's engine against a recorded schedule, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from policy.cost import StepCost
from tests.differential.record import MAX_DECISIONS, drop_empty
from twin.engine import Engine, EngineSettings, Sequence

if TYPE_CHECKING:
    from tests.differential.workloads import Request, Workload
    from twin.engine import StepRecord

TICKS_PER_NS = 1 << 10
FIELDS = ("t_ns", "scheduled", "preempted", "finished", "running", "waiting", "free_blocks")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the two schedules part."""

    workload: Workload
    step: int
    field: str
    vllm: list[Any] | None
    twin: list[Any] | None
    before: list[Any] | None
    """The last equal record."""
    error: str = ""

    def __str__(self) -> str:
        workload = self.workload
        lines = [
            f"{workload.name}: step {self.step} differs in {self.field}",
            f"  {_settings_line(workload)}",
            f"  equal before: {_record_line(self.before)}",
            f"  vLLM        : {_record_line(self.vllm)}",
            f"  twin        : {self.error or _record_line(self.twin)}",
        ]
        named = {identity for record in (self.vllm, self.twin) for identity in _ids(record)}
        lines += [f"    {request}" for request in workload.requests if request.id in named]
        return "\n".join(lines)


def compare(workload: Workload, vllm_steps: list[list[Any]]) -> Difference | None:
    """Run the workload through the twin's engine; the first difference, if there is one."""
    try:
        twin_steps = twin_schedule(workload)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Difference(workload, 0, "error", None, None, None, text)
    return first_difference(
        workload, _settled(workload, vllm_steps), _settled(workload, twin_steps)
    )


def _settled(workload: Workload, steps: list[list[Any]]) -> list[list[Any]]:
    """In the last record, leave out who was aborted.

    The engine makes no call-back for a request once `abort` was called, even if that is in the very
    nanosecond in which its last output is processed; the scheduler reports it as finished.
    """
    aborted = {request.id for request in workload.requests if request.abort_ns is not None}
    *others, last = steps
    finished = [identity for identity in last[3] if identity not in aborted]
    return [*others, [*last[:3], finished, *last[4:]]]


def first_difference(
    workload: Workload, vllm_steps: list[list[Any]], twin_steps: list[list[Any]]
) -> Difference | None:
    """Where two lists of records part."""
    before: list[Any] | None = None
    for step in range(max(len(vllm_steps), len(twin_steps))):
        vllm = vllm_steps[step] if step < len(vllm_steps) else None
        twin = twin_steps[step] if step < len(twin_steps) else None
        if vllm != twin:
            field = "length"
            if vllm is not None and twin is not None:
                pairs = zip(FIELDS, vllm, twin, strict=True)
                field = ", ".join(name for name, ours, theirs in pairs if ours != theirs)
            return Difference(workload, step, field, vllm, twin, before)
        before = vllm
    return None


def twin_schedule(workload: Workload) -> list[list[Any]]:
    """The twin's records, in the form of the recorded ones."""
    records: list[list[Any]] = []
    engine: Engine

    def on_step(record: StepRecord) -> None:
        records.append(
            [
                engine.now_ns,
                [list(pair) for pair in record.scheduled],
                list(record.preempted),
                list(record.finished),
                list(record.running),
                record.waiting,
                record.free_blocks,
            ]
        )

    finished: list[int] = []
    engine = Engine(
        engine_settings(workload),
        step_cost(workload),
        on_finish=lambda seq: finished.append(seq.id),
        skip=False,
        on_step=on_step,
    )
    _drive(engine, workload)
    reported = {identity for record in records for identity in record[3]}
    unreported = [identity for identity in finished if identity not in reported]
    records.append([0, [], [], unreported, [], 0, 0])
    return drop_empty(records)


def _drive(engine: Engine, workload: Workload) -> None:
    """Submissions, aborts and wakes in the order of time; input first where they meet."""
    coming: list[tuple[int, int, Request]] = []
    for request in workload.requests:
        coming.append((request.at_ns, 0, request))
        if request.abort_ns is not None:
            coming.append((request.abort_ns, 1, request))
    events = deque(sorted(coming, key=lambda event: event[:2]))
    for _ in range(MAX_DECISIONS):
        wake_ns = engine.next_wake_ns
        if events and (wake_ns is None or events[0][0] <= wake_ns):
            at_ns, is_abort, request = events.popleft()
            if is_abort:
                engine.abort(request.id, at_ns)
            else:
                engine.submit(sequence(workload, request), at_ns)
        elif wake_ns is None:
            return
        else:
            engine.wake(wake_ns)
    raise RuntimeError(f"no end after {MAX_DECISIONS} decisions")


def engine_settings(workload: Workload) -> EngineSettings:
    """The workload's replica in the twin's words."""
    return EngineSettings(
        kv_blocks=workload.kv_blocks,
        block_tokens=workload.block_tokens,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_num_seqs=workload.max_num_seqs,
        max_model_len=workload.max_model_len,
        async_scheduling=workload.async_scheduling,
        prefix_caching=workload.prefix_caching,
        scheduling_policy="priority" if workload.priority_policy else "fcfs",
    )


def step_cost(workload: Workload) -> StepCost:
    """`Workload.step_cost_ns` as the engine's formula."""
    fixed = workload.step_ns * TICKS_PER_NS
    per_token = workload.token_ns * TICKS_PER_NS
    return StepCost(
        decode_fixed=fixed,
        prefill_fixed=fixed,
        per_sequence=per_token,
        per_kv_token=workload.kv_ns * TICKS_PER_NS,
        per_prefill_token=per_token,
        per_prefill_quad=0,
    )


def sequence(workload: Workload, request: Request) -> Sequence:
    """The request in the twin's words."""
    return Sequence(
        id=request.id,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        pooling=workload.pooling,
        prefix=request.prefix,
        prefix_block_tokens=workload.prefix_block_tokens,
    )


def _settings_line(workload: Workload) -> str:
    plain = {key: value for key, value in workload.to_json().items() if key != "requests"}
    return " ".join(f"{key}={value}" for key, value in plain.items())


def _record_line(record: list[Any] | None) -> str:
    if record is None:
        return "nothing"
    return " ".join(f"{name}={value}" for name, value in zip(FIELDS, record, strict=True))


def _ids(record: list[Any] | None) -> set[int]:
    if record is None:
        return set()
    return {identity for identity, _ in record[1]}.union(record[2], record[3], record[4])
