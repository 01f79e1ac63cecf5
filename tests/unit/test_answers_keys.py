"""Whatever changes what a good answer is keeps two requests from sharing a kept one."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from controller.gateway.answers import Answers, gathers
from controller.gateway.asking import read
from controller.gateway.questions import is_whole, key_of, likeness_of
from controller.store.answers import KeptAnswers
from tests.policy_support import parameters as made_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from controller.gateway.asking import Asked

PICTURE = "data:image/png;base64,iVBORw0KGgo="


def chat(*contents: Any, last: str = "user", **more: Any) -> Asked:
    roles = ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": each} for role, each in zip(roles, contents, strict=False)
    ]
    messages[-1]["role"] = last
    return asked("chat", messages=messages, **more)


def asked(endpoint: Any, tenant: str = "", **document: Any) -> Asked:
    body = json.dumps({"model": "m", **document}).encode()
    return read(endpoint, {}, body, b"k" * 32, (tenant, "", ""))


def share(one: Asked, other: Asked) -> bool:
    """By the words alone, as if all vectors were one."""
    if key_of(one) == key_of(other):
        return True
    ours, theirs = likeness_of(one), likeness_of(other)
    return ours is not None and theirs is not None and ours.alike == theirs.alike


FIELDS = [
    ("seed", 1, 2), ("seed", None, 1), ("stop", None, ["\n"]), ("stop", ["a"], ["b"]),
    ("stop_token_ids", [1], [2]), ("max_tokens", 5, 50), ("max_completion_tokens", 5, 50),
    ("temperature", 0, 1), ("top_p", 0.1, 1), ("top_k", 1, 40), ("min_p", 0, 0.5),
    ("response_format", None, {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}},
     {"type": "json_schema", "json_schema": {"name": "b"}}),
    ("structured_outputs", {"regex": "a"}, {"regex": "b"}), ("guided_json", {}, {"type": "object"}),
    ("guided_choice", ["a"], ["b"]), ("tools", None, [{"type": "function"}]),
    ("tool_choice", "auto", "none"), ("parallel_tool_calls", True, False),
    ("logprobs", None, True), ("top_logprobs", 1, 2), ("n", 1, 2), ("logit_bias", None, {"1": 5}),
    ("presence_penalty", 0, 1), ("repetition_penalty", 1, 2), ("bad_words", None, ["a"]),
    ("chat_template", None, "x"), ("chat_template_kwargs", None, {"enable_thinking": False}),
    ("documents", None, [{"text": "a"}]), ("reasoning_effort", "low", "high"),
    ("add_generation_prompt", True, False), ("echo", False, True), ("model", "m", "m-lora"),
    ("cache_salt", "ann", "ben"), ("vllm_xargs", None, {"a": 1}), ("tenant", "a", "b"),
    ("mm_processor_kwargs", None, {"num_crops": 4}), ("return_token_ids", None, True),
]  # fmt: skip


@pytest.mark.parametrize(("field", "first", "second"), FIELDS)
def test_a_field_that_changes_the_answer_is_part_of_the_question(
    field: str, first: Any, second: Any
) -> None:
    def one(value: Any) -> Asked:
        return chat("What is it?", **({} if value is None else {field: value}))

    assert share(one(first), one(first))
    assert not share(one(first), one(second))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat("Hi", "Yes?", "Why?"), chat("Ho", "Yes?", "Why?")),
        (chat("Hi", "Yes?", "Why?"), chat("Hi", "No.", "Why?")),
        (chat("Hi", "Yes?", "Why?"), chat("Why?")),
        (chat("Why?"), asked("completions", prompt="Why?")),
        (chat("Why?"), asked("chat", messages=[{"role": "system", "content": "Be brief."},
                                               {"role": "user", "content": "Why?"}])),
        (chat([{"type": "text", "text": "Why?"},
               {"type": "image_url", "image_url": {"url": PICTURE}}]),
         chat([{"type": "text", "text": "Why?"},
               {"type": "image_url", "image_url": {"url": PICTURE[:-2] + "A="}}])),
        (chat([{"type": "text", "text": "Why?"},
               {"type": "image_url", "image_url": {"url": PICTURE}}]), chat("Why?")),
        (chat("Count the spaces in: a  b"), chat("Count the spaces in: a b")),
        (chat("I give you texts, say how many spaces they have.", "Yes.", "a  b"),
         chat("I give you texts, say how many spaces they have.", "Yes.", "a b")),
        (chat("数一数空格:a  b"), chat("数一数空格:a b")),
    ],
)  # fmt: skip
def test_what_was_said_before_is_part_of_the_question(one: Asked, other: Asked) -> None:
    assert share(one, one)
    assert not share(one, other)


@pytest.mark.parametrize(
    ("first", "second"),
    [("The answer is", "The answer is "), ("def f():", "def f():\n"), ("x", "\nx"),
     ("a b", "a  b")],
)  # fmt: skip
def test_what_is_continued_is_continued_where_it_ends(first: str, second: str) -> None:
    """An answer " 42" to a text that ends with a space makes two of them."""
    prompts = [asked("completions", prompt=text) for text in (first, second)]
    assert not share(*prompts)
    begun = [chat("Write it.", text, last="assistant") for text in (first, second)]
    assert not share(*begun)
    continued = [chat(text, continue_final_message=True) for text in (first, second)]
    assert not share(*continued)
    assert likeness_of(continued[0]) is None
    if "\nx" not in (first, second):  # of any other message its end is not looked at
        assert share(*[chat(text) for text in (first.strip(), f"{first.strip()} \n")])


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ({"type": "text", "text": "see https://example.com/a.png"}, True),
        ({"type": "image_url", "image_url": {"url": PICTURE}}, True),
        ({"type": "image_url", "image_url": PICTURE.upper()}, True),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, True),
        ({"type": "image_url", "image_url": {"url": "https://example.com/now.png"}}, False),
        ({"type": "image_url", "image_url": {"url": " HTTP://example.com/now.png"}}, False),
        ({"type": "image_url", "image_url": "https://example.com/now.png"}, False),
        ({"type": "video_url", "video_url": {"url": "file:///srv/now.mp4"}}, False),
        ({"type": "audio_url", "audio_url": {"url": "s3://bucket/now.wav"}}, False),
        ({"image_url": "https://example.com/now.png"}, False),
    ],
)  # fmt: skip
def test_an_answer_about_what_lies_elsewhere_is_not_kept(
    tmp_path: Path, part: dict[str, Any], whole: bool
) -> None:
    """The picture of a camera is another one by the next time."""
    one = chat([{"type": "text", "text": "What is there?"}, part])
    assert is_whole(one) == whole

    async def kept() -> bool:
        store = KeptAnswers(
            tmp_path / "answers.sqlite", bytes_most=1 << 20, s_most=60.0,
            on_trouble=lambda text: None,
        )  # fmt: skip
        try:
            answers = Answers(store)
            answers.keep(one, b'{"choices": []}', -1, "v1")
            return await answers.find(one, ("v1",)) is not None
        finally:
            store.close()

    assert asyncio.run(kept()) == whole


def test_a_stream_is_not_kept_for_who_wants_what_it_loses_in_one_piece() -> None:
    parameters = made_parameters()
    assert gathers(chat("Hi"), parameters, 1)
    assert not gathers(chat("Hi", return_token_ids=True), parameters, 1)
