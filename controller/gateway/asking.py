"""A caller's request, read: what the policy may know of it, and what is sent on.

Nothing is checked here that the server checks itself: only what the controller has to understand.
Texts are read to count and to fingerprint them, and are never part of an event.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from policy.events import Endpoint  # noqa: TC001 - part of a NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PATHS: Mapping[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
NAME_MOST = 256
"""Characters of a name in a header."""
NESTING_MOST = 128
PREFIX_BLOCK_BYTES = 512
PREFIX_BLOCKS_MOST = 64
SLA = frozenset({"", "P0", "P1", "P2"})
DEADLINE_MS_MOST = 3_600_000
TOKENS_MOST = 1 << 31
_decode = msgspec.json.Decoder().decode


class BadRequest(ValueError):
    """A request that cannot be passed on: what is wrong with it.

    Args:
        message: for the caller.
        param: the field or header that is wrong.
        code: a word for machines.
        status: HTTP status.
    """

    def __init__(
        self, message: str, param: str = "", code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Asked(NamedTuple):
    """A request that can be passed on."""

    endpoint: Endpoint
    path: str
    """Where it goes on the server, such as ``/v1/chat/completions``."""
    body: bytes
    """As the caller sent it."""
    document: dict[str, Any]
    """The same, decoded."""
    model: str
    stream: bool
    wants_usage: bool
    """The caller asked for the usage event."""
    max_tokens: int
    prompt_bytes: int
    messages: int
    sla: str
    line: str
    user: str
    session: str
    chain: str
    step: str
    resume: str
    deadline_ns: int
    tenant: str
    """Whose API key it came with; empty without keys."""
    prefix: tuple[int, ...]
    prefix_block_bytes: int
    traceparent: str
    """W3C trace context of the caller; empty: none."""


def read(
    endpoint: Endpoint,
    headers: Mapping[str, str],
    body: bytes,
    secret: bytes,
    tenant: tuple[str, str, str] = ("", "", ""),
) -> Asked:
    """Read a request.

    Args:
        secret: key of the fingerprints, so that nobody can guess a text from them.
        tenant: name, service class and business line that go with the caller's key.

    Raises:
        BadRequest: it cannot be understood.
    """
    document = _document(body)
    model = document.get("model", "")
    if not isinstance(model, str) or len(model) > NAME_MOST or not _loggable(model):
        raise BadRequest(
            f"model is {_shown(model)}: it must be a string of at most {NAME_MOST} characters, none"
            " of them a control",
            "model",
        )
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest(f"stream is {_shown(stream)}: it must be true or false", "stream")
    options = document.get("stream_options")
    chat = endpoint == "chat"
    texts = list(_chat_texts(document) if chat else _prompt_texts(document, endpoint))
    prompt_bytes = sum(map(len, texts))
    name, sla, line = tenant
    header = headers.get
    # One header decides whether the others are looked for: most requests have none of them.
    user = _name(header("x-twinkeel-user"), "x-twinkeel-user")
    if not user:
        given = document.get("user")
        user = given[:NAME_MOST] if isinstance(given, str) and _loggable(given) else ""
    sla = header("x-twinkeel-sla", sla)
    if sla not in SLA:
        raise BadRequest(f"x-twinkeel-sla is {sla[:20]!r}: use P0, P1 or P2", "x-twinkeel-sla")
    return Asked(
        endpoint=endpoint,
        path=PATHS[endpoint],
        body=body,
        document=document,
        model=model,
        stream=stream is True and endpoint != "embeddings",
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=_max_tokens(document),
        prompt_bytes=prompt_bytes,
        messages=len(document["messages"]) if chat else 1,
        sla=sla,
        line=_name(header("x-twinkeel-line"), "x-twinkeel-line") or line,
        user=_of_tenant(name, user) or name,
        session=_of_tenant(name, _name(header("x-twinkeel-session"), "x-twinkeel-session")),
        chain=_name(header("x-twinkeel-chain"), "x-twinkeel-chain"),
        step=_name(header("x-twinkeel-step"), "x-twinkeel-step"),
        resume=_name(header("x-twinkeel-resume"), "x-twinkeel-resume"),
        deadline_ns=_deadline_ns(header("x-twinkeel-deadline-ms")),
        tenant=name,
        prefix=fingerprints(texts, secret) if prompt_bytes >= PREFIX_BLOCK_BYTES else (),
        prefix_block_bytes=PREFIX_BLOCK_BYTES if prompt_bytes >= PREFIX_BLOCK_BYTES else 0,
        traceparent=sendable(header("traceparent")),
    )


def name(value: str, what: str) -> str:
    """A name that a caller gave, as a log can hold it.

    Raises:
        BadRequest: it cannot.
    """
    return _name(value, what)


def caller(headers: Mapping[str, str], tenant: tuple[str, str, str]) -> tuple[str, str]:
    """User and business line, where no body says more; as ``read`` has them.

    Raises:
        BadRequest: one is no name.
    """
    own, _, line = tenant
    user = _of_tenant(own, _name(headers.get("x-twinkeel-user"), "x-twinkeel-user"))
    return user or own, _name(headers.get("x-twinkeel-line"), "x-twinkeel-line") or line


def wants_json(asked: Asked) -> bool:
    """Whether the caller will read the answer's text as JSON."""
    document = asked.document
    form = document.get("response_format")
    if isinstance(form, dict) and form.get("type") in ("json_object", "json_schema"):
        return True
    outputs = document.get("structured_outputs")  # vLLM's own ways to say it
    given = outputs if isinstance(outputs, dict) else {}
    names = ("json", "json_object")
    return any(given.get(name) or document.get(f"guided_{name}") for name in names)


def prompt_text(asked: Asked) -> str:
    """All of the prompt's text, for what has to compare it with the answer."""
    document = asked.document
    texts = _chat_texts(document) if asked.endpoint == "chat" else _prompt_texts(document, "")
    return "\n".join(text.decode(errors="replace") for text in texts)


def fingerprints(texts: list[bytes], secret: bytes) -> tuple[int, ...]:
    """One number for each leading block of the prompt, each over all bytes up to its end."""
    data = b"\0".join(texts)
    whole = blake2b(key=secret, digest_size=8)
    found: list[int] = []
    last = min(len(data) // PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MOST) * PREFIX_BLOCK_BYTES
    for start in range(0, last, PREFIX_BLOCK_BYTES):
        whole.update(data[start : start + PREFIX_BLOCK_BYTES])
        found.append(int.from_bytes(whole.digest(), "big") >> 1)  # traces hold signed numbers
    return tuple(found)


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise BadRequest("the body is not a JSON object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > NESTING_MOST and _is_deep(document):
        raise BadRequest(f"the body is nested more than {NESTING_MOST} deep", code="invalid_json")
    return document


def _is_deep(document: object) -> bool:
    """Whether it is nested deeper than what is still encoded again safely, level by level."""
    level: list[Any] = [document]
    for _ in range(NESTING_MOST):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _chat_texts(document: dict[str, Any]) -> Iterator[bytes]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    for message in messages:
        if not isinstance(message, dict):
            raise BadRequest("each of messages must be an object", "messages")
        content = message.get("content")
        if isinstance(content, str):
            yield _bytes(content)
        elif isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    yield _bytes(part["text"])
        calls = message.get("tool_calls")
        if calls:
            yield msgspec.json.encode(calls)
    tools = document.get("tools")
    if tools:
        yield msgspec.json.encode(tools)


def _prompt_texts(document: dict[str, Any], endpoint: str) -> Iterator[bytes]:
    name = "input" if endpoint == "embeddings" or "prompt" not in document else "prompt"
    prompt = document.get(name)
    if isinstance(prompt, str):
        yield _bytes(prompt)
    elif isinstance(prompt, list) and prompt:
        for part in prompt:
            if isinstance(part, str):
                yield _bytes(part)
            elif isinstance(part, list):
                yield b"\0\0\0\0" * len(part)  # token ids: about four bytes of text each
            elif isinstance(part, int):
                yield b"\0\0\0\0"
            else:
                raise BadRequest(f"{name} holds {_shown(part)}", name)
    else:
        raise BadRequest(f"{name} is {_shown(prompt)}: give a text or a list", name)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _max_tokens(document: dict[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = document.get(name)
        if type(value) is int and 0 < value < TOKENS_MOST:
            return value
    return 0


def _name(value: str | None, header: str) -> str:
    if not value:
        return ""
    if len(value) > NAME_MOST:
        raise BadRequest(
            f"{header} has {len(value)} characters: at most {NAME_MOST}", header, status=400
        )
    if not _loggable(value):
        raise BadRequest(f"{header} has characters that are no UTF-8, or control it", header)
    return value


def _of_tenant(tenant: str, name: str) -> str:
    """Names are the caller's own: two tenants' may be the same."""
    return f"{tenant}/{name}" if tenant and name else name


def _loggable(text: str) -> bool:
    """Whether a log can hold it: bytes of a header that are no UTF-8 come as lone surrogates."""
    return not any(char < " " or char == "\x7f" or "\ud800" <= char <= "\udfff" for char in text)


def sendable(value: str | None) -> str:
    """A header that can be passed on as it is; empty otherwise."""
    return value if value and value.isascii() and value.isprintable() else ""


def _deadline_ns(value: str | None) -> int:
    if not value:
        return 0
    if not (value.isascii() and value.isdigit() and 0 < len(value) < 10):
        raise BadRequest(
            f"x-twinkeel-deadline-ms is {value[:20]!r}: give whole milliseconds",
            "x-twinkeel-deadline-ms",
        )
    return min(int(value), DEADLINE_MS_MOST) * 1_000_000


def _shown(value: object) -> str:
    """What is wrong, without telling a text."""
    return "missing" if value is None else f"a {type(value).__name__}"
