"""What is found out of a server, and its warm-up."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from controller.upstream.discovery import DiscoveryError, describe
from controller.upstream.warming import warm
from policy.events import Warmed
from policy.files import load_profile
from tests.upstream_support import answered, card, page, served

TINY = load_profile("cpu/tiny-qwen3").engine


def test_a_server_says_its_sizes_and_its_model() -> None:
    async def main() -> None:
        async with served(domain="host1", labels=("fast",)) as (server, replica):
            server.cards = [card(root="/models/tiny-1")]
            up = await describe(replica, replica.upstream)
            assert (up.replica, up.name) == (0, f"127.0.0.1:{server.port}")
            assert (up.kv_blocks, up.block_tokens, up.max_model_len) == (256, 128, 8192)
            assert (up.max_num_seqs, up.max_num_batched_tokens) == (
                TINY.max_num_seqs, TINY.max_num_batched_tokens,
            )  # fmt: skip
            assert (up.models, up.version) == (("tiny",), "/models/tiny-1")
            assert (up.domain, up.labels) == ("host1", ("fast", "vllm=0.32", "vllm=0.32.0"))
            assert not up.pooling
            assert min(up.cost) > 0

    asyncio.run(main())


def test_what_is_configured_counts_before_what_the_server_says() -> None:
    async def main() -> None:
        given: dict[str, Any] = {
            "version": "v7", "max_num_seqs": 5, "max_num_batched_tokens": 99,
            "labels": ("vllm=mine",),
        }  # fmt: skip
        async with served(**given) as (_, replica):
            up = await describe(replica, replica.upstream)
            assert (up.version, up.max_num_seqs, up.max_num_batched_tokens) == ("v7", 5, 99)
            assert up.labels == ("vllm=mine",)

    asyncio.run(main())


def test_adapters_are_served_models_as_well() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            server.cards = [
                card("sql", root="/lora/sql", parent="tiny", max_model_len=None),
                card(root="/models/tiny-1"), card("tiny-too", root="/models/tiny-1"),
                card("law", root="/lora/law", parent="tiny", max_model_len=None),
            ]  # fmt: skip
            up = await describe(replica, replica.upstream)
            assert up.models == ("tiny", "tiny-too", "law", "sql")
            assert (up.version, up.max_model_len) == ("/models/tiny-1", 8192)

    asyncio.run(main())


def test_the_profile_is_found_by_the_model() -> None:
    async def main() -> None:
        async with served(profile="") as (server, replica):
            server.cards = [card("chat", root="Qwen/Qwen3-8B")]
            up = await describe(replica, replica.upstream)
            assert (up.active_params, up.memory_mb) == (8_190_735_360, 81_120)
            server.cards = [card("chat", root="x", twinkeel_profile="h100-sxm/llama-3.1-8b")]
            up = await describe(replica, replica.upstream)
            assert up.active_params == 8_030_261_248
            server.cards = [card("chat", root="x", twinkeel_profile="h100-sxm/qwen3-embedding-4b")]
            assert (await describe(replica, replica.upstream)).pooling

    asyncio.run(main())


def test_a_twin_says_its_version() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            server.cards = [card(root="qwen3-8b", twinkeel_version="v3")]
            assert (await describe(replica, replica.upstream)).version == "v3"

    asyncio.run(main())


def test_a_server_that_is_no_vllm_gets_the_profiles_sizes() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            server.cards = [{"id": "other"}]
            server.metrics = server.version = None
            up = await describe(replica, replica.upstream)
            assert (up.kv_blocks, up.block_tokens) == (TINY.kv_blocks, TINY.block_tokens)
            assert (up.max_model_len, up.labels, up.version) == (TINY.max_model_len, (), "other")
            server.metrics = page().replace('num_gpu_blocks="256"', 'num_gpu_blocks="None"')
            assert (await describe(replica, replica.upstream)).kv_blocks == TINY.kv_blocks

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cards", "profile", "complaint"),
    [
        ([card(root="/m/tiny-1")], "",
         r"127.0.0.1:\d+ serves tiny \(loaded from /m/tiny-1\), whose step times are not known: "
         r"name one with --upstream http://127.0.0.1:\d+,profile=NAME; known: cpu/tiny-qwen3, "),
        ([card()], "h100-sxm/tiny", r"0.1:\d+: h100-sxm/tiny: no such profile .*profile=NAME"),
        ([card(twinkeel_profile="x/y")], "", "x/y: no such profile"),
        ([], "", "lists no model"),
        ([{"name": "x"}], "", "no list of models"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_used_is_named_with_what_to_do(
    cards: list[dict[str, object]], profile: str, complaint: str
) -> None:
    async def main() -> None:
        async with served(profile=profile) as (server, replica):
            server.cards = cards
            with pytest.raises(DiscoveryError, match=complaint):
                await describe(replica, replica.upstream)

    asyncio.run(main())


@pytest.mark.parametrize(("status", "hint"), [(503, ""), (401, ": it asks for a key")])
def test_a_server_that_refuses(status: int, hint: str) -> None:
    async def main() -> None:
        async with served() as (server, replica):
            server.models_status = status
            with pytest.raises(DiscoveryError, match=f"/v1/models answers {status}{hint}"):
                await describe(replica, replica.upstream)
            await server.stop()
            with pytest.raises(aiohttp.ClientConnectorError):
                await describe(replica, replica.upstream)

    asyncio.run(main())


# Warm-up


def test_warm_up_tries_each_endpoint_with_logprobs_and_tells_the_version() -> None:
    async def main() -> None:
        async with served(version="v2") as (server, replica):
            assert await warm(replica) == Warmed(0, "v2")
            paths = [path for path, _ in server.questions]
            assert paths == ["/v1/completions", "/v1/chat/completions"]
            assert all(question["logprobs"] for _, question in server.questions)
            assert all(question["model"] == "tiny" for _, question in server.questions)

    asyncio.run(main())


def test_a_pooling_server_is_warmed_with_an_embedding() -> None:
    async def main() -> None:
        async with served(profile="h100-sxm/qwen3-embedding-4b") as (server, replica):
            replica.spec = await describe(replica, replica.upstream)
            assert await warm(replica) == Warmed(0, "tiny")
            assert [path for path, _ in server.questions] == ["/v1/embeddings"]

    asyncio.run(main())


def reply(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text, content_type="application/json")


@pytest.mark.parametrize(
    ("of_chat", "ok"),
    [
        (lambda question: reply(400, "{}"), True),  # a model without a chat template
        (lambda question: reply(500, "{}"), False),
        (lambda question: reply(200, "nonsense"), False),
        (lambda question: reply(200, '{"model": "other", "choices": [{}]}'), False),
        (lambda question: reply(200, '{"model": "tiny", "choices": []}'), False),
        (lambda question: reply(200, '{"model": "tiny", "choices": [3]}'), False),
        (lambda question: reply(200, '{"model": "tiny", "choices": [{"finish_reason": "abort"}]}'),
         False),
    ],
)  # fmt: skip
def test_what_counts_as_warm(of_chat: Any, ok: bool) -> None:
    def answer(path: str, question: dict[str, Any]) -> web.Response:
        return of_chat(question) if "chat" in path else answered(path, question)

    async def main() -> None:
        async with served() as (server, replica):
            server.answer = answer
            assert await warm(replica) == Warmed(0, "tiny", ok)

    asyncio.run(main())


def test_a_server_without_any_endpoint_or_without_an_answer_is_not_warm() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            server.answer = lambda path, question: reply(404, "{}")
            assert await warm(replica) == Warmed(0, "tiny", False)
            await server.stop()
            assert await warm(replica) == Warmed(0, "", False)

    asyncio.run(main())
