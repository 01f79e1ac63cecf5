"""Recordings made with the twin's own engine, their truth known; used by the calibration's tests.

Each step takes what a known cost says, times noise. What a step held is written down as the engine
schedules it, so that what is rebuilt from the recording can be compared.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from policy.cost import TICKS_PER_NS, StepCost
from traces.steps import (
    Header,
    Recording,
    RequestRow,
    ServerSettings,
    StepRow,
    encode_header,
    encode_row,
)
from twin.engine import Engine, EngineSettings, Sequence, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

HOST_NS = 300_000
IN_NS, OUT_NS, TOKEN_NS = 800_000, 200_000, 10_000

COST = StepCost(
    decode_fixed=round((1_900_000 + HOST_NS) * TICKS_PER_NS),
    prefill_fixed=round((3_400_000 + HOST_NS) * TICKS_PER_NS),
    per_sequence=80_000 * TICKS_PER_NS,
    per_kv_token=240 * TICKS_PER_NS,
    per_prefill_token=20_000 * TICKS_PER_NS,
    per_prefill_quad=11 * TICKS_PER_NS,
    max_step_tokens=2048,
)
TRUE_NS = {
    "decode_fixed_ns": 1_900_000,
    "decode_per_sequence_ns": 80_000,
    "decode_per_kv_token_ns": 240,
    "prefill_fixed_ns": 3_400_000,
    "prefill_per_token_ns": 20_000,
    "prefill_per_quad_ns": 11,
    "host_per_step_ns": HOST_NS,
}
ENGINE = EngineSettings(
    kv_blocks=4096,
    block_tokens=128,
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    max_model_len=8192,
    async_scheduling=False,
    prefix_caching=False,
)


class Dice(random.Random):
    """Seeded, so equal in every process."""


@dataclass(frozen=True)
class Ask:
    at_ns: int
    phase: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    logprobs: bool = False
    priority: int = 0
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 0


@dataclass
class Held:
    """What a step truly held."""

    batch: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    prefill_quad: int = 0
    prefill_requests: int = 0
    logprobs: int = 0


@dataclass
class Made:
    recording: Recording
    truth: list[Held] = field(default_factory=list)
    client: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        rows: dict[int, list[RequestRow]] = defaultdict(list)
        for index, row in self.recording.requests:
            rows[index].append(row)
        with (folder / "steps.jsonl").open("wb") as file:
            file.write(encode_header(self.recording.header))
            for index, step in enumerate(self.recording.steps):
                file.write(encode_row(step))
                for row in rows[index]:
                    file.write(encode_row(row))
        lines = "".join(json.dumps(row) + "\n" for row in self.client)
        (folder / "client.jsonl").write_text(lines)
        return folder


class NoisyCost:
    """A cost whose steps differ: each asked-for step draws its own factor."""

    def __init__(
        self, cost: StepCost, noise: Callable[[], float], logprobs: Callable[[], int]
    ) -> None:
        self.cost = cost
        self.noise = noise
        self.logprobs = logprobs
        self.per_kv_token = cost.per_kv_token
        self.last_ticks = 0

    def step_ticks(self, batch: int, kv: int, tokens: int = 0, quad: int = 0) -> int:
        exact = self.cost.step_ticks(batch, kv, tokens, quad)
        exact += self.cost.per_logprobs_sequence * self.logprobs()
        self.last_ticks = round(exact * self.noise())
        return self.last_ticks


def server_settings(engine: EngineSettings) -> ServerSettings:
    return ServerSettings(
        model="tiny",
        served_model="tiny",
        dtype="bfloat16",
        device="cpu",
        tensor_parallel=1,
        block_tokens=engine.block_tokens,
        kv_blocks=engine.kv_blocks,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        scheduling_policy=engine.scheduling_policy,
        async_scheduling=engine.async_scheduling,
        prefix_caching=engine.prefix_caching,
        gpu_memory_utilization=0.9,
    )


class Recorder:
    """Watches an engine's steps and writes down what a plug-in and a client would."""

    def __init__(
        self, asked: list[Ask], settings: EngineSettings, cost: StepCost,
        noise: Callable[[], float], exact_periods: bool, late_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        self.asked = asked
        self.cost = cost
        self.exact_periods = exact_periods
        self.late_ns = late_ns
        header = Header(
            1, "vllm-steps", "0.32.0", "0.1.0", 0, 1_790_000_000_000_000_000, 0, True,
            server_settings(settings),
        )  # fmt: skip
        self.made = Made(Recording(header))
        self.computed = [0] * len(asked)
        self.preemptions = [0] * len(asked)
        self.first_scheduled: dict[int, int] = {}
        self.first_token: dict[int, int] = {}
        self.ended: set[int] = set()
        self.live: set[int] = set()
        self.end_ns = 0
        self.seqs: list[Sequence] = []
        self.noisy = NoisyCost(cost, noise, self._logprobs)
        self.engine = Engine(settings, self.noisy, skip=False, on_step=self.step)  # type: ignore[arg-type]

    def play(self) -> Made:
        engine = self.engine
        for number, ask in enumerate(self.asked):
            entry_ns = ask.at_ns + IN_NS
            while engine.next_wake_ns is not None and engine.next_wake_ns <= entry_ns:
                engine.wake(engine.next_wake_ns)
            seq = Sequence(
                number, ask.prompt_tokens, ask.output_tokens, ask.max_tokens or ask.output_tokens,
                ask.priority, prefix=ask.prefix, prefix_block_tokens=ask.prefix_block_tokens,
            )  # fmt: skip
            self.seqs.append(seq)
            engine.submit(seq, entry_ns)
        while engine.next_wake_ns is not None:
            engine.wake(engine.next_wake_ns)
        return self.made

    def _logprobs(self) -> int:
        return sum(
            1
            for number in self.live
            if self.asked[number].logprobs
            and self.computed[number] >= self.asked[number].prompt_tokens
        )

    def step(self, record: StepRecord) -> None:
        for number in record.preempted:
            self.preemptions[number] += 1
            self.computed[number] = 0
        if not record.scheduled:
            return
        # The engine decides a step when the one before has ended (or, asynchronous, one earlier).
        begin_ns = max(self.engine.now_ns, self.end_ns)
        took_ns = self.noisy.last_ticks / TICKS_PER_NS
        end_ns = round(begin_ns + took_ns)
        followed = begin_ns == self.end_ns
        self.end_ns = end_ns
        held = Held()
        done = [
            number
            for number, tokens in record.scheduled
            if self._share(held, number, tokens, begin_ns, end_ns)
        ]
        at_ns = end_ns + self.late_ns()
        self.made.truth.append(held)
        self.made.recording.add(
            StepRow(
                at_ns, len(self.made.recording.steps), held.prefill_requests, held.prefill_tokens,
                held.batch, max(1, round(took_ns * (1 - HOST_NS / self._exact_ns(held)))),
                len(self.live), record.waiting, 0, len(record.preempted),
                round(took_ns) if self.exact_periods and held.batch and followed else None,
            )
        )  # fmt: skip
        for number in done:
            self._finish(number, at_ns, end_ns)

    def _share(self, held: Held, number: int, tokens: int, begin_ns: int, end_ns: int) -> bool:
        """Count one request's part of a step; says whether it ends with it."""
        ask = self.asked[number]
        if number not in self.first_scheduled:
            self.first_scheduled[number] = begin_ns
            self.live.add(number)
            self.computed[number] = self.seqs[number].cached_tokens
        before = self.computed[number]
        if before >= ask.prompt_tokens:
            held.batch += 1
            held.kv_tokens += before + 1
            held.logprobs += ask.logprobs
        else:
            # A request that goes on after a pre-emption counts as generating.
            held.prefill_requests += number not in self.first_token
            held.prefill_tokens += tokens
            held.prefill_quad += (before + tokens) ** 2 - before**2
        self.computed[number] = before + tokens
        if self.computed[number] == ask.prompt_tokens:
            self.first_token.setdefault(number, end_ns)
        last = ask.prompt_tokens + max(1, ask.output_tokens) - 1
        if self.computed[number] != last or number in self.ended:
            return False
        self.ended.add(number)
        self.live.discard(number)
        return True

    def _finish(self, number: int, at_ns: int, end_ns: int) -> None:
        ask, first_ns = self.asked[number], self.first_token[number]
        outputs = max(1, ask.output_tokens)
        scheduled_ns = self.first_scheduled[number]
        e2e_ns = end_ns - ask.at_ns + OUT_NS + TOKEN_NS * outputs
        self.made.recording.add(
            RequestRow(
                at_ns, f"cmpl-cal.{ask.phase}.{number}-0-ab12", ask.prompt_tokens,
                self.seqs[number].cached_tokens, outputs, self.preemptions[number],
                scheduled_ns - ask.at_ns - IN_NS, first_ns - scheduled_ns - HOST_NS,
                end_ns - first_ns, e2e_ns, "stop" if outputs < ask.max_tokens else "length",
            )
        )  # fmt: skip
        self.made.client.append({
            "id": f"cal.{ask.phase}.{number}", "phase": ask.phase, "sent_ns": ask.at_ns,
            "ttft_ns": first_ns - ask.at_ns + TOKEN_NS, "e2e_ns": e2e_ns,
            "prompt_tokens": ask.prompt_tokens, "output_tokens": outputs,
            "logprobs": ask.logprobs, "stream": True,
        })  # fmt: skip

    def _exact_ns(self, held: Held) -> float:
        ticks = self.cost.step_ticks(
            held.batch, held.kv_tokens, held.prefill_tokens, held.prefill_quad
        )
        ticks += self.cost.per_logprobs_sequence * held.logprobs
        return max(ticks / TICKS_PER_NS, HOST_NS + 1)


def make(
    asks: Iterable[Ask],
    *,
    engine_settings: EngineSettings = ENGINE,
    cost: StepCost = COST,
    noise: Callable[[], float] = lambda: 1.0,
    exact_periods: bool = True,
    late_ns: Callable[[], int] = lambda: 0,
) -> Made:
    """Play ``asks`` and record them.

    Args:
        noise: by how much a step takes longer than the cost says, as a factor.
        exact_periods: the engine tells its steps' periods.
        late_ns: how late the API server stamps a step.
    """
    asked = sorted(asks, key=lambda each: each.at_ns)
    return Recorder(asked, engine_settings, cost, noise, exact_periods, late_ns).play()


MS = 1_000_000
S = 1_000 * MS


def designed_load(seed: int = 1, rounds: int = 4, scale: float = 1.0) -> list[Ask]:
    """A designed load like the one that the controller runs, one phase after the other."""
    dice = Dice(seed)
    asks: list[Ask] = []
    at_ns = S

    def pause(extra_ns: int) -> None:
        nonlocal at_ns
        at_ns += round(extra_ns * scale)

    for number in range(6):
        asks.append(Ask(at_ns + number * 50 * MS, "warm", 64, 8))
    pause(2 * S)
    for _ in range(rounds):
        for tokens in (16, 64, 256, 1024, 2048):
            for _ in range(4):
                asks.append(Ask(at_ns, f"prefill-{tokens}", tokens, 1))
                pause(300 * MS)
        for _ in range(2):
            asks.append(Ask(at_ns, "chunks-5000", 5000, 2))
            pause(800 * MS)
        for batch, context in ((1, 200), (4, 800), (16, 200), (16, 1500), (48, 400)):
            for _ in range(batch):
                asks.append(Ask(at_ns, f"decode-{batch}-{context}", context, 60))
            pause(3 * S + batch * context * 40_000)
        for number in range(30):
            asks.append(
                Ask(at_ns + number * 60 * MS, "mixed", dice.randint(32, 900), dice.randint(5, 40))
            )
        pause(5 * S)
        for _ in range(8):
            asks.append(Ask(at_ns, "logprobs-8", 100, 40, logprobs=True))
        pause(2 * S)
        for _ in range(6):
            asks.append(Ask(at_ns, "api", 32, dice.choice([2, 4, 8, 16])))
            pause(200 * MS)
        for _ in range(40):
            asks.append(Ask(at_ns, "check", dice.randint(16, 1200), dice.randint(2, 50)))
            at_ns += round(dice.expovariate(1 / 60) * MS * scale)
        pause(4 * S)
    return asks


def test_the_recorder_is_faithful() -> None:
    made = make(designed_load(rounds=1))
    steps = made.recording.steps
    assert len(steps) == len(made.truth) > 300
    assert [row.decode_requests for row in steps] == [held.batch for held in made.truth]
    assert len(made.recording.requests) == len(made.client)
    spent = [row.period_ns for row in steps if row.period_ns]
    exact = [
        COST.step_ticks(held.batch, held.kv_tokens, held.prefill_tokens, held.prefill_quad)
        for held, row in zip(made.truth, steps, strict=True)
        if row.period_ns
    ]
    assert abs(sum(spent) - sum(exact) / TICKS_PER_NS) < len(spent)
