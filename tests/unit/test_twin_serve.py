"""The served twin without a network: reading requests, words, shapes, metrics, the alarm."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import sys
from array import array
from time import monotonic_ns
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policy.files import load_profile
from policy.signals import certainty
from tests.support import bare_fleet, engine_settings, flat_cost
from twin.engine import Sequence
from twin.serve import faults
from twin.serve.alarm import ExactAlarm, LoopAlarm, alarm
from twin.serve.answers import ChatShape, CompletionShape, Times, Usage, embeddings, piece_of
from twin.serve.asking import Asked, Reader, Refusal
from twin.serve.engine import LiveEngine
from twin.serve.metrics import Histogram, ServerMetrics
from twin.serve.server import Options, spec_of
from twin.serve.words import LOGPROBS, TEXTS, candidate, certainty_of, codes_of, key_of, text_of

READER = Reader("m", 1000, 64)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "x" * 40}]


def chat(**fields: Any) -> Asked:
    return READER.chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> Asked:
    return READER.completion(json.dumps({"model": "m", "prompt": "x" * 40, **fields}).encode())


def refused(call: Any, **fields: Any) -> dict[str, Any]:
    with pytest.raises(Refusal) as caught:
        call(**fields)
    error: dict[str, Any] = json.loads(caught.value.body)["error"]
    assert error["code"] == caught.value.status
    assert set(error) == {"message", "type", "param", "code"}
    return error


# Reading


def test_four_bytes_are_a_token_and_a_template_adds_eight() -> None:
    assert chat().prompt_tokens == (18,)
    parts = [{"type": "text", "text": "x" * 38}, {"type": "text", "text": "xx"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompt_tokens == (18,)
    assert chat(messages=[{"role": "user", "content": None}]).prompt_tokens == (9,)
    assert completion().prompt_tokens == (10,)
    assert completion(prompt="x").prompt_tokens == (1,)
    assert completion(prompt=[5, 6, 7]).prompt_tokens == (3,)
    assert completion(prompt=[[5, 6, 7]]).prompts == completion(prompt=[5, 6, 7]).prompts


def test_limits_are_read_as_vllm_reads_them() -> None:
    assert chat().max_tokens == 0
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert completion().max_tokens == 16
    assert completion(max_tokens=None).max_tokens == 0
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert completion(logprobs=2).logprobs == 2
    assert chat().logprobs == -1


def test_unknown_fields_and_tools_are_ignored() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat(tools=tools, tool_choice="auto", nonsense={"a": [1]}, user="u") == chat()


def test_usage_comes_only_when_asked_for() -> None:
    assert not chat(stream=True).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage


@pytest.mark.parametrize(
    ("fields", "status", "type", "param"),
    [
        ({"model": "other"}, 404, "NotFoundError", "model"),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, 400, "BadRequestError",
         "input_tokens"),
        ({"max_tokens": 983}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"priority": "high"}, 400, "Bad Request", None),
        ({"messages": []}, 400, "BadRequestError", "messages"),
        ({"messages": "hello"}, 400, "Bad Request", None),
        ({"n": 2}, 400, "BadRequestError", "n"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "BadRequestError", "logprobs"),
        ({"top_logprobs": 2}, 400, "BadRequestError", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
    ],
)  # fmt: skip
def test_what_vllm_refuses_is_refused_in_its_shape(
    fields: dict[str, Any], status: int, type: str, param: str | None
) -> None:
    error = refused(chat, **fields)
    assert (error["code"], error["type"], error["param"]) == (status, type, param)
    assert error["message"]


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    fits = chat(messages=[{"role": "user", "content": "x" * 4 * 991}])
    assert fits.prompt_tokens == (999,)
    error = refused(chat, messages=[{"role": "user", "content": "x" * 4 * 992}])
    assert error["message"].startswith("This model's maximum context length is 1000 tokens.")


def test_broken_bodies_are_bad_requests() -> None:
    for raw in (b"", b"{", b"[]", b'"\xff"', b'{"messages": [{"role": "user"'):
        with pytest.raises(Refusal) as caught:
            READER.chat(raw)
        assert caught.value.status == 400


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[]], [-1]])
def test_prompts_that_are_none_are_refused(prompt: list[Any]) -> None:
    assert refused(completion, prompt=prompt)["code"] == 400


def test_a_whole_completion_takes_several_prompts_and_a_stream_one() -> None:
    assert completion(prompt=["abcd", "x" * 8]).prompt_tokens == (1, 2)
    assert refused(completion, prompt=["a", "b"], stream=True)["param"] == "prompt"


def test_embeddings_take_one_prompt_or_many() -> None:
    def ask(given: Any, **fields: Any) -> Asked:
        return READER.embedding(json.dumps({"input": given, **fields}).encode())

    assert ask("abcd").prompt_tokens == (1,)
    assert ask(["abcd", "abcde"]).prompt_tokens == (1, 2)
    assert ask([[1, 2], [3]]).prompt_tokens == (2, 1)
    assert ask("a", encoding_format="base64").base64
    assert ask("a").dimensions == 64
    assert ask("a", dimensions=8).dimensions == 8
    with pytest.raises(Refusal):
        ask("a", dimensions=65)


# Words


def test_words_are_distinct_and_fit_into_json() -> None:
    assert len(TEXTS) == len(set(TEXTS)) == 256
    for text in TEXTS:
        assert json.loads(b'"' + text + b'"') == text.decode()
    assert TEXTS[128] == TEXTS[0].strip()


def test_an_answer_depends_on_its_prompt_and_begins_like_a_longer_one() -> None:
    key = key_of(0, "m", b"hello")
    assert codes_of(key, 9) == codes_of(key, 40)[:9]
    assert text_of(codes_of(key, 3)).count(b" ") == 2
    assert key != key_of(1, "m", b"hello")
    assert key != key_of(0, "n", b"hello")
    assert key != key_of(0, "m", b"hello!")
    assert codes_of(key, 0) == b""


def test_candidates_are_distinct_and_their_chances_fall_and_stay_below_one() -> None:
    for code in (0, 127, 128, 255):
        names = {candidate(code, rank) for rank in range(20)}
        assert len(names) == 20
        assert candidate(code, 0) == code
        assert {name & 128 for name in names} == {code & 128}
    for row in LOGPROBS:
        assert list(row) == sorted(row, reverse=True)
        assert 0.9 < sum(math.exp(value) for value in row) <= 1.0


# Shapes


def test_merged_events_hold_the_same_tokens_as_single_ones() -> None:
    for shape in (ChatShape("a", 1, "m"), CompletionShape("a", 1, "m")):
        key = key_of(0, "m", b"p")
        codes, rows = codes_of(key, 6), certainty_of(key, 6)
        whole = piece_of(shape, codes, rows, 0, 6, 2)
        single = [piece_of(shape, codes, rows, at, at + 1, 2) for at in range(6)]
        assert json.loads(whole.text) == "".join(json.loads(piece.text) for piece in single)
        merged = json.loads(whole.logprobs)
        for name, values in merged.items():
            assert values == [json.loads(piece.logprobs)[name][0] for piece in single]


def test_a_chat_answers_logprobs_give_the_score_its_features() -> None:
    """What the controller reads: at least two candidates a token."""
    key = key_of(0, "m", b"p")
    shape = ChatShape("a", 1, "m")
    piece = piece_of(shape, codes_of(key, 50), certainty_of(key, 50), 0, 50, 5)
    content = json.loads(piece.logprobs)["content"]
    assert [entry["token"] for entry in content] == [
        entry["top_logprobs"][0]["token"] for entry in content
    ]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert "".join(entry["token"] for entry in content) == json.loads(piece.text)
    sure = certainty([[top["logprob"] for top in entry["top_logprobs"]] for entry in content])
    assert sure is not None
    assert 0 < sure.entropy_mean_millinats < sure.entropy_worst_millinats


def test_times_are_as_vllm_defines_them() -> None:
    times = Times(queued=1_000_000, scheduled=3_000_000, first=13_000_000, last=33_000_000)
    assert json.loads(times.json(5)) == {
        "time_to_first_token_ms": 10.0,
        "generation_time_ms": 20.0,
        "queue_time_ms": 2.0,
        "mean_itl_ms": 5.0,
        "tokens_per_second": 166.667,
    }
    assert json.loads(times.json(1))["mean_itl_ms"] is None
    assert json.loads(Times(1, -1, -1, -1).json(0)) is None


def test_names_are_escaped() -> None:
    rude = 'a"b\\c\n'
    for shape in (ChatShape(rude, 1, rude), CompletionShape(rude, 1, rude)):
        piece = piece_of(shape, codes_of(b"k", 2), b"", 0, 2, -1)
        whole = json.loads(shape.whole(piece, b'"stop"', Usage(3, 2, 1).json(), b"null"))
        assert whole["id"].endswith(rude)
        assert whole["model"] == rude
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        event = shape.event(piece, b"null")
        assert event.endswith(b"\n\n")
        assert json.loads(event.removeprefix(b"data: "))["model"] == rude


def test_both_encodings_of_an_embedding_are_the_same_unit_vector() -> None:
    plain, packed = (
        json.loads(embeddings("a", 1, "m", [b"x", b"y"], 64, packed, 5))["data"]
        for packed in (False, True)
    )
    for one, other in zip(plain, packed, strict=True):
        vector = array("f", base64.b64decode(other["embedding"])).tolist()
        assert one["embedding"] == pytest.approx(vector)
        assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-5)
    assert plain[0]["embedding"] != plain[1]["embedding"]


# Outputs, sent in turn


class Heard:
    """A hearer that notes when it is told what."""

    def __init__(self, live: LiveEngine, over: asyncio.Event) -> None:
        self.first_ns = self.last_ns = -1
        self.watching = False
        self.sent = 0
        self.told: list[tuple[str, int]] = []
        self._live = live
        self._over = over

    def hear_first(self) -> None:
        self.told.append(("first", self._live.now_ns))

    def hear_tokens(self, count: int) -> None:
        raise AssertionError("it is not watching")

    def hear_last(self) -> None:
        self.told.append(("last", self._live.now_ns))
        self._over.set()


def test_first_tokens_wait_for_the_outputs_in_front_and_short_answers_for_them() -> None:
    token_ns, out_ns = 20_000_000, 1_000_000
    fleet = bare_fleet(
        1, engine_settings(), flat_cost(1000), overhead_ns=(1_000_000, out_ns, token_ns)
    )
    outputs = [5, 1, 1]

    async def run() -> list[Heard]:
        loop = asyncio.get_running_loop()
        (spec,) = fleet
        live = LiveEngine(loop, spec.settings, spec.cost, spec.profile.overheads)
        over = [asyncio.Event() for _ in outputs]
        heard = [Heard(live, each) for each in over]
        at_ns = live.now_ns
        for number, (count, each) in enumerate(zip(outputs, heard, strict=True)):
            live.submit(Sequence(number, 5, count, count, data=each), at_ns=at_ns)
        await asyncio.wait_for(asyncio.gather(*(each.wait() for each in over)), 30)
        live.close()
        return heard

    for turn, (count, each) in enumerate(zip(outputs, asyncio.run(run()), strict=True), 1):
        (first, first_ns), (last, last_ns) = each.told
        assert (first, last) == ("first", "last")
        assert first_ns >= each.first_ns + turn * token_ns
        assert last_ns >= out_ns + max(
            each.first_ns + turn * token_ns, each.last_ns + count * token_ns
        )


# Metrics


def test_metrics_are_prometheus_text_with_vllms_names() -> None:
    async def render() -> str:
        spec = spec_of(Options("cpu/tiny-qwen3"))
        loop = asyncio.get_running_loop()
        live = LiveEngine(loop, spec.settings, spec.cost, spec.profile.overheads)
        metrics = ServerMetrics('od"d', live)
        metrics.finished("stop", 10, 5, Times(0, 10, 2000, 9000), 0, 10_000)
        text = metrics.render(pooling=False).decode()
        live.close()
        return text

    families = {
        family.name: family for family in text_string_to_metric_families(asyncio.run(render()))
    }
    running = families["vllm:num_requests_running"].samples[0]
    assert running.labels == {"engine": "0", "model_name": 'od"d'}
    info = families["vllm:cache_config_info"].samples[0].labels
    assert (info["num_gpu_blocks"], info["block_size"]) == ("4096", "128")
    success = {
        sample.labels["finished_reason"]: sample.value
        for sample in families["vllm:request_success"].samples
    }
    assert success == {"stop": 1, "length": 0, "abort": 0, "error": 0, "repetition": 0}
    for name in (
        "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prefix_cache_queries",
        "prefix_cache_hits", "prompt_tokens", "generation_tokens", "admission_rejections",
        "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):  # fmt: skip
        assert f"vllm:{name}" in families


def test_a_histogram_counts_its_bounds_inclusively() -> None:
    histogram = Histogram("h", "help.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    (family,) = text_string_to_metric_families("\n".join(histogram.lines('a="b"')) + "\n")
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert values["h_bucket", "1.0"] == 2
    assert values["h_bucket", "2.0"] == 6
    assert values["h_bucket", "+Inf"] == values["h_count", None] == 7
    assert values["h_sum", None] == 18.0


# Faults and options


def test_faults_are_checked() -> None:
    assert faults.read(b'{"kind": "stall"}').share == 1.0
    for raw in (b'{"kind": "typo"}', b'{"kind": "slow", "factor": 0}', b'{"kind": "cut", "x": 1}'):
        with pytest.raises(msgspec.ValidationError):
            faults.read(raw)
    assert faults.read(b'{"kind": "hang"}').of_engine
    assert not faults.read(b'{"kind": "hang", "share": 0.5}').of_engine


def test_options_go_before_the_profile() -> None:
    spec = spec_of(
        Options("h100-sxm/qwen3-8b", kv_blocks=99, max_model_len=500, scheduling_policy="priority")
    )
    assert (spec.settings.kv_blocks, spec.settings.max_model_len) == (99, 500)
    assert spec.settings.scheduling_policy == "priority"
    plain = spec_of(Options("h100-sxm/qwen3-8b")).settings
    assert plain.max_num_seqs == load_profile("h100-sxm/qwen3-8b").engine.max_num_seqs


# The alarm


@pytest.mark.parametrize("kind", [LoopAlarm, alarm])
def test_an_alarm_rings_once_and_not_early(kind: Any) -> None:
    async def ring() -> list[int]:
        rung: list[int] = []
        clock = kind(asyncio.get_running_loop(), lambda: rung.append(monotonic_ns()))
        for delay_ns in (30_000_000, 4_000_000):  # the later setting goes
            due_ns = monotonic_ns() + delay_ns
            clock.set(due_ns)
        await asyncio.sleep(0.06)
        clock.set(monotonic_ns() - 5)  # at once if it is over
        await asyncio.sleep(0.03)
        clock.set(monotonic_ns() + 5_000_000)
        clock.close()
        await asyncio.sleep(0.02)
        return [at_ns - due_ns for at_ns in rung]

    late_ns = asyncio.run(ring())
    assert len(late_ns) == 2
    assert late_ns[0] >= -10_000


@pytest.mark.skipif(sys.platform != "linux", reason="timer file descriptors are Linux's")
def test_the_exact_alarm_is_there_on_linux() -> None:
    async def kind() -> type:
        made = alarm(asyncio.get_running_loop(), lambda: None)
        made.close()
        return type(made)

    assert asyncio.run(kind()) is ExactAlarm
