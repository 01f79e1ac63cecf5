"""A caller's request, checked as vLLM checks it.

Only what vLLM looks at is looked at; unknown fields are ignored. There is no tokenizer: four bytes
are a token, and a prompt of token ids is four bytes for each, so both are counted alike.
"""

from __future__ import annotations

from array import array
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from twin.serve.words import MOST_LOGPROBS

CHAT_TOKENS = 8
"""What a chat template adds to a prompt."""
COMPLETION_TOKENS = 16
"""``max_tokens`` of /v1/completions where it is left out."""
TOKEN_BYTES = 4

Kind = Literal["chat", "completion", "embedding"]
_Prompt = str | list[str | int | list[int]]


class Refusal(Exception):
    """An error answer in vLLM's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode(
            {"error": {"message": message, "type": type, "param": param, "code": status}}
        )


class Asked(NamedTuple):
    """A request that the engine can be given."""

    kind: Kind
    prompts: tuple[bytes, ...]
    """As many bytes as ``TOKEN_BYTES`` times its tokens, template aside; several only for
    embeddings and whole completions."""
    prompt_tokens: tuple[int, ...]
    max_tokens: int = 0
    """0: none."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    logprobs: int = -1
    """Candidates wanted for each token; -1: none."""
    priority: int = 0
    base64: bool = False
    dimensions: int = 0


class _Part(msgspec.Struct):
    type: str = "text"
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    priority: int = 0
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class _Completion(_Common, kw_only=True):
    prompt: _Prompt
    max_tokens: int | None = COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool | None = None


class _Embedding(msgspec.Struct):
    input: _Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    priority: int = 0


_chat = msgspec.json.Decoder(_Chat)
_completion = msgspec.json.Decoder(_Completion)
_embedding = msgspec.json.Decoder(_Embedding)
T = TypeVar("T")


class Reader:
    """Reads requests to one server.

    Args:
        model: the name that it serves.
        max_model_len: prompt and answer together, in tokens.
        width: of its embeddings.
    """

    def __init__(self, model: str, max_model_len: int, width: int) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._width = width

    def chat(self, raw: bytes) -> Asked:
        body = _decoded(_chat, raw)
        self._check_model(body.model)
        if not body.messages:
            raise Refusal(400, "messages must not be empty", param="messages")
        prompt, counted = _rendered(body.messages)
        tokens = _tokens(counted) + CHAT_TOKENS
        limit = body.max_tokens
        if body.max_completion_tokens is not None:
            limit = body.max_completion_tokens
        wanted = -1
        if body.top_logprobs and not body.logprobs:
            raise Refusal(
                400,
                "when using `top_logprobs`, `logprobs` must be set to true.",
                param="top_logprobs",
            )
        if body.logprobs:
            wanted = body.top_logprobs or 0
        return self._generation("chat", body, prompt, tokens, limit, wanted)

    def completion(self, raw: bytes) -> Asked:
        body = _decoded(_completion, raw)
        self._check_model(body.model)
        prompts = _prompts(body.prompt, "prompt")
        if len(prompts) > 1 and body.stream:
            raise Refusal(
                400, f"{len(prompts)} prompts: this server streams one a request", param="prompt"
            )
        if body.echo:
            raise Refusal(400, "echo: this server does not repeat prompts", param="echo")
        wanted = -1 if body.logprobs is None else body.logprobs
        counts = tuple(_tokens(len(prompt)) for prompt in prompts)
        longest = max(counts)
        asked = self._generation("completion", body, prompts[0], longest, body.max_tokens, wanted)
        return asked._replace(prompts=prompts, prompt_tokens=counts)

    def embedding(self, raw: bytes) -> Asked:
        body = _decoded(_embedding, raw)
        self._check_model(body.model)
        prompts = _prompts(body.input, "input")
        counts = tuple(_tokens(len(prompt)) for prompt in prompts)
        for tokens in counts:
            self._check_length(tokens, self._max_model_len)
        width = self._width if body.dimensions is None else body.dimensions
        if not 0 < width <= self._width:
            raise Refusal(
                400, f"dimensions is {width}: it must be 1 to {self._width}", param="dimensions"
            )
        return Asked(
            "embedding", prompts, counts, priority=body.priority,
            base64=body.encoding_format == "base64", dimensions=width,
        )  # fmt: skip

    def _generation(
        self, kind: Kind, body: _Common, prompt: bytes, tokens: int, limit: int | None, wanted: int
    ) -> Asked:
        if limit is not None and limit < 1:
            raise Refusal(400, f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
        if body.n not in (None, 1):
            raise Refusal(400, f"n is {body.n}: this server gives one answer a request", param="n")
        if wanted > MOST_LOGPROBS:
            raise Refusal(
                400,
                f"Requested sample logprobs of {wanted}, which is greater than max allowed: "
                f"{MOST_LOGPROBS}",
                param="logprobs",
            )
        self._check_length(tokens, self._max_model_len - 1)
        room = self._max_model_len - tokens
        if limit is not None and limit > room:
            raise Refusal(
                400,
                f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. This model's "
                f"maximum context length is {self._max_model_len} tokens and your request has "
                f"{tokens} input tokens ({limit} > {self._max_model_len} - {tokens}).",
                param="max_tokens",
            )
        options = body.stream_options
        if options is not None and not body.stream:
            raise Refusal(
                400,
                "Stream options can only be defined when `stream=True`.",
                param="stream_options",
            )
        return Asked(
            kind, (prompt,), (tokens,),
            max_tokens=limit or 0,
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            stream=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            logprobs=max(-1, wanted),
            priority=body.priority,
        )  # fmt: skip

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            raise Refusal(404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    def _check_length(self, tokens: int, most: int) -> None:
        if tokens > most:
            raise Refusal(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. However, "
                f"your request has {tokens} input tokens. Please reduce the length of the input.",
                param="input_tokens",
            )


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Refusal(400, str(error), "Bad Request") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"JSON decode error: {error}", "Bad Request") from error


def _tokens(size: int) -> int:
    return max(1, -(-size // TOKEN_BYTES))


def _rendered(messages: list[_Message]) -> tuple[bytes, int]:
    """The prompt with its roles, and how many bytes of it the caller wrote."""
    pieces: list[str] = []
    for message in messages:
        pieces.append(message.role)
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type not in ("text", "input_text", "refusal"):
                    raise Refusal(400, f"{part.type}: this model takes text only", param="messages")
            content = "".join(part.text for part in content)
        pieces.append(content or "")
    counted = sum(len(piece.encode()) for piece in pieces[1::2])
    return "\0".join(pieces).encode(), counted


def _prompts(given: str | list[Any], name: str) -> tuple[bytes, ...]:
    """Each prompt of a completion or an embedding as bytes."""
    if isinstance(given, str):
        return (given.encode(),)
    if not given:
        raise Refusal(400, f"{name} must not be empty", param=name)
    if all(isinstance(item, int) for item in given):
        return (_packed(given, name),)
    if all(isinstance(item, str) for item in given):
        return tuple(item.encode() for item in given)
    if all(isinstance(item, list) and item for item in given):
        return tuple(_packed(item, name) for item in given)
    raise Refusal(400, f"{name}: strings and token ids are mixed, or a list is empty", param=name)


def _packed(ids: list[int], name: str) -> bytes:
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise Refusal(400, f"{name}: no such token id: {error}", param=name) from error
