"""The step recorder in a real vLLM: its records say what was asked and what vLLM itself counts."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.controller.processes import eventually, http
from tests.live.server import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    MODEL,
    READ_S_MOST,
    Vllm,
    vllm_servers,
)
from traces.steps import Recording, RequestRow, StepRow, StepTail, read_steps, steps_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.live

SECRET = "marmalade"
LONG, OUTPUT = 900, 12
CONCURRENT = 24
_GAUGE = re.compile(
    r'^twinkeel_steps_info\{engine="0",life="\w+",path="([^"]+)"\} 1\.0$', re.MULTILINE
)


@dataclass(frozen=True)
class Ran:
    """A recording and what it should say."""

    recording: Recording
    path: Path
    tailed: list[StepRow | RequestRow]
    asked: dict[str, tuple[int, int]]
    """Prompt and output tokens by the request's own id."""
    samples: dict[str, float]
    metrics: str
    log: str
    began_ns: int
    ended_ns: int


def ask(server: Vllm, name: str, prompt: object, output_tokens: int) -> dict[str, int]:
    """One request of exactly so many output tokens; its usage."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
    headers = {"X-Request-Id": name}
    status, answer = http("POST", f"{server.url}/v1/completions", body, headers=headers)
    assert status == 200, answer
    usage: dict[str, int] = json.loads(answer)["usage"]
    return usage


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of so many token ids, another one for each seed."""
    return [(seed * 7919 + place * 31) % 3000 + 10 for place in range(count)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("steps")
    options = ["--enable-logging-iteration-details"]
    options += ["--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]
    with vllm_servers(1, *options, variables={"TWINKEEL_STEPS": str(folder)}) as [server]:
        began_ns = time.monotonic_ns()
        path = steps_file(folder)
        tail = StepTail(path)
        tailed = tail.read_new()
        asked: dict[str, tuple[int, int]] = {}

        def run(name: str, prompt: object, output_tokens: int) -> None:
            usage = ask(server, name, prompt, output_tokens)
            asked[name] = usage["prompt_tokens"], usage["completion_tokens"]

        run("live.secret.0", f"The {SECRET} is under the stairs", OUTPUT)
        run("live.long.0", tokens(LONG, 1), OUTPUT)
        run("live.again.0", tokens(LONG, 1), OUTPUT)
        with ThreadPoolExecutor(CONCURRENT) as pool:
            sizes = [(name, 20 + 7 * name, 5 + name) for name in range(CONCURRENT)]
            jobs = [
                pool.submit(run, f"live.many.{name}", tokens(prompt, 100 + name), output)
                for name, prompt, output in sizes
            ]
            for job in jobs:
                job.result()

        def written() -> Recording | None:
            recording = read_steps(path)
            tailed.extend(tail.read_new())
            whole = len(recording.requests) == len(asked)
            read = len(recording.requests) + len(recording.steps)
            return recording if whole and len(tailed) == read else None

        recording = eventually("all of them are in the file", written, 60.0, 0.2)
        tail.close()
        ended_ns = time.monotonic_ns()
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=READ_S_MOST) as answer:
            metrics = answer.read().decode()
        yield Ran(
            recording,
            path,
            tailed,
            asked,
            server.samples(),
            metrics,
            server.log.read_text(encoding="utf-8", errors="replace"),
            began_ns,
            ended_ns,
        )


def test_the_header_tells_the_settings(ran: Ran) -> None:
    header = ran.recording.header
    assert header.details
    assert header.settings.max_num_seqs == MAX_NUM_SEQS
    assert header.settings.max_num_batched_tokens == MAX_NUM_BATCHED_TOKENS
    assert header.settings.served_model == MODEL
    assert (header.settings.device, header.settings.dtype) == ("cpu", "bfloat16")
    assert header.settings.scheduling_policy == "priority"
    assert header.settings.kv_blocks is not None
    assert header.settings.kv_blocks > 10


def test_every_request_is_there_with_its_lengths(ran: Ran) -> None:
    found = {}
    for _, row in ran.recording.requests:
        assert row.id is not None
        name = row.id.removeprefix("cmpl-").rsplit("-", 1)[0]
        found[name] = row.prompt_tokens, row.output_tokens
        assert row.reason == "length"
    assert found == ran.asked


def test_the_steps_add_up_to_what_was_asked(ran: Ran) -> None:
    requests = [row for _, row in ran.recording.requests]
    steps = ran.recording.steps
    new = sum(row.prompt_tokens - (row.cached_tokens or 0) for row in requests)
    assert sum(step.prefill_tokens or 0 for step in steps) == new
    output = sum(row.output_tokens for row in requests)
    # The step that completes a prompt makes its first token.
    assert sum(step.decode_requests or 0 for step in steps) == output - len(requests)
    assert max(step.prefill_tokens or 0 for step in steps) <= MAX_NUM_BATCHED_TOKENS
    [again] = [row for row in requests if row.id is not None and "live.again" in row.id]
    assert (again.cached_tokens or 0) > LONG // 2
    assert all(step.preemptions == 0 for step in steps)


def test_a_long_prompt_takes_its_steps(ran: Ran) -> None:
    [(place, row)] = [
        each for each in ran.recording.requests if each[1].id and "live.long" in each[1].id
    ]
    alone = ran.recording.steps[place - (OUTPUT - 1) - 3 : place + 1]
    assert [step.prefill_tokens for step in alone] == [256, 256, 256, LONG - 768] + [0] * 11
    assert [step.decode_requests for step in alone] == [0, 0, 0, 0] + [1] * 11
    assert [step.period_ns is None for step in alone] == [True] * 4 + [False] * 11
    # The engine core's clock tells one story in both kinds of rows.
    assert row.decode_ns is not None
    assert sum(step.period_ns or 0 for step in alone) == pytest.approx(row.decode_ns, abs=1000)


def test_they_agree_with_what_vllm_counts(ran: Ran) -> None:
    requests = [row for _, row in ran.recording.requests]
    samples = ran.samples
    assert samples["vllm:prompt_tokens_total"] == sum(row.prompt_tokens for row in requests)
    assert samples["vllm:generation_tokens_total"] == sum(row.output_tokens for row in requests)
    assert samples["vllm:request_success_total"] == len(requests)
    assert samples["vllm:prefix_cache_hits_total"] == sum(
        row.cached_tokens or 0 for row in requests
    )
    for name, field in (
        ("queue", "queued_ns"),
        ("prefill", "prefill_ns"),
        ("decode", "decode_ns"),
    ):
        total_s = samples[f"vllm:request_{name}_time_seconds_sum"]
        assert total_s == pytest.approx(sum(getattr(row, field) for row in requests) / 1e9)


def test_times_are_in_order(ran: Ran) -> None:
    steps = ran.recording.steps
    stamps = [step.at_ns for step in steps]
    assert stamps == sorted(stamps)
    assert [step.step for step in steps] == list(range(steps[0].step, steps[0].step + len(steps)))
    for place, row in ran.recording.requests:
        assert ran.began_ns < row.at_ns < ran.ended_ns
        assert row.at_ns == stamps[place]
        inside = (row.queued_ns or 0) + (row.prefill_ns or 0) + (row.decode_ns or 0)
        assert 0 < inside < (row.e2e_ns or 0)


def test_the_file_has_no_text_and_is_for_its_user_and_group_only(ran: Ran) -> None:
    content = ran.path.read_text(encoding="utf-8")
    assert "live.secret" in content  # that request is in it
    assert SECRET not in content
    assert "stairs" not in content
    assert ran.path.stat().st_mode & 0o777 == 0o640, "a folder that was given may be shared"


def test_vllms_own_metrics_tell_where_the_file_is(ran: Ran) -> None:
    [found] = _GAUGE.findall(ran.metrics)
    assert found == str(ran.path)
    assert 'twinkeel_steps_dropped_total{engine="0"} 0.0' in ran.metrics


def test_vllm_prints_no_line_for_every_step(ran: Ran) -> None:
    assert "Iteration(" not in ran.log
    assert "step records of engine 0:" in ran.log


def test_the_tail_sees_the_same_rows(ran: Ran) -> None:
    recording = Recording(ran.recording.header)
    for row in ran.tailed:
        recording.add(row)
    assert recording.steps == ran.recording.steps
    assert recording.requests == ran.recording.requests
