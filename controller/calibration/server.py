"""What a vLLM server says of itself over HTTP."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from controller.calibration.errors import CalibrationError
from controller.upstream.scrape import labels_of, parse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

ASK_S_MOST = 10.0
IDLE_S_MOST = 1.0
DROPPED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)
T = TypeVar("T")
KEY_VARIABLE = "TWINKEEL_ENGINE_KEY"
"""Where the server's API key is: not in an option, which every user of the machine can read."""
_SUCCESS = re.compile(r"^vllm:request_success_total\{[^}]*\} (\S+)", re.MULTILINE)


class ModelCard(NamedTuple):
    """The model that the server answers for."""

    served: str
    root: str | None
    max_model_len: int | None


class Metrics(NamedTuple):
    """What is needed of ``/metrics``."""

    running: int
    waiting: int
    succeeded: int
    """Requests answered since the server started."""
    cache: dict[str, str]
    """Labels of ``vllm:cache_config_info``; empty: there is none."""
    steps_paths: tuple[Path, ...]
    """Files of step records that its engines write; of the gauge ``twinkeel_steps_info``."""
    engines: int = 1
    """Behind this address."""


class Server:
    """A server's address and a session for it; an async context manager."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            CalibrationError: ``url`` is no HTTP address.
        """
        self.url = url.rstrip("/")
        if not re.match(r"https?://[^/\s]+", self.url):
            raise CalibrationError(f"{url!r} is no address: write http://HOST:PORT")
        if self.url.endswith("/v1"):
            raise CalibrationError(f"{url!r} ends in /v1: write {self.url.removesuffix('/v1')}")
        self._kept: aiohttp.ClientSession
        self._fresh: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ASK_S_MOST)
        headers = _authorization()
        self._kept = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S_MOST),
            timeout=timeout, headers=headers,
        )  # fmt: skip
        self._fresh = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=timeout, headers=headers,
        )  # fmt: skip
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self._kept.close()
        await self._fresh.close()

    async def exchange(self, play: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
        """One request, on a connection that may have been used before.

        vLLM closes connections that were idle for 5 s, and a busy machine lets one side hear of it
        late. Then it has seen nothing of the request, which goes out again on a new connection.
        """
        try:
            return await play(self._kept)
        except DROPPED:
            return await play(self._fresh)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body.

        Raises:
            CalibrationError: no answer, or one that says that the key or the address is wrong.
        """
        status, body = await self._ask(path)
        if status in (401, 403):
            what = "refuses the API key" if os.environ.get(KEY_VARIABLE) else "wants an API key"
            raise CalibrationError(
                f"{self.url}{path}: the server {what} (status {status}): put the one of vLLM's "
                f"--api-key into the variable {KEY_VARIABLE}"
            )
        if status == 404 and "/" in self.url.partition("://")[2]:
            raise CalibrationError(
                f"{self.url}{path}: there is no such page (status 404): give the address without "
                "a path, http://HOST:PORT"
            )
        return status, body

    async def _ask(self, path: str) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=ASK_S_MOST)

        async def play(session: aiohttp.ClientSession) -> tuple[int, bytes]:
            async with session.get(self.url + path, timeout=limit) as answer:
                return answer.status, await answer.read()

        try:
            return await self.exchange(play)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CalibrationError(
                f"{self.url}{path}: no answer ({str(error) or type(error).__name__}); is vLLM "
                "serving there?"
            ) from error

    async def model(self) -> ModelCard:
        """The first model of ``/v1/models``: the base model, where adapters are served too.

        Raises:
            CalibrationError: there is none.
        """
        status, body = await self.get("/v1/models")
        try:
            card: dict[str, Any] = msgspec.json.decode(body)["data"][0]
            return ModelCard(card["id"], card.get("root"), card.get("max_model_len"))
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise CalibrationError(
                f"{self.url}/v1/models: no model in the answer (status {status}); is this a vLLM "
                "server?"
            ) from error

    async def metrics(self) -> Metrics:
        """
        Raises:
            CalibrationError: no page of vLLM's metrics.
        """
        status, body = await self.get("/metrics")
        page = parse(body)
        if status != 200 or page.running is None or page.waiting is None:
            raise CalibrationError(
                f"{self.url}/metrics: no gauge vllm:num_requests_running (status {status}); start "
                "vLLM without --disable-log-stats"
            )
        text = body.decode("utf-8", "replace")
        caches = labels_of(body, b"vllm:cache_config_info")
        running = labels_of(body, b"vllm:num_requests_running")
        return Metrics(
            page.running,
            page.waiting,
            round(sum(float(value) for value in _SUCCESS.findall(text))),
            caches[0] if caches else {},
            tuple(Path(said.path) for said in page.steps),
            max(1, len({labels.get("engine") for labels in running})),
        )

    async def config(self) -> dict[str, Any]:
        """``/server_info``'s ``vllm_config``; empty where vLLM does not offer it."""
        status, body = await self._ask("/server_info?config_format=json")
        if status != 200:
            return {}
        try:
            document: dict[str, Any] = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return {}
        config = document.get("vllm_config") if isinstance(document, dict) else None
        return config if isinstance(config, dict) else {}


def _authorization() -> dict[str, str]:
    """
    Raises:
        CalibrationError: the key cannot be sent.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CalibrationError(f"{KEY_VARIABLE} holds what no API key can have: write ASCII")
    return {"Authorization": f"Bearer {key}"} if key else {}
