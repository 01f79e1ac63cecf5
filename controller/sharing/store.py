"""The Redis that several controllers share: one connection, one pipeline at a time.

What must not happen twice at once is done by scripts in the server, on its clock. Names of users
and sessions are hashed: the server holds none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from controller.store.checkpoints import no_url, without_password
from policy.files import FileError

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_S = 0.25
"""The server has to answer within that time."""
STALL_S = 0.05
"""More, for what lies in the socket already: it may be this process that stood still."""
LEASE_MS = 1500
GONE_MS = 1500
"""A controller that was not heard for so long is none any more."""
SILENCE_MS = 1000
"""All were silent: shares may be in use that the store does not know of."""
CALM_MS = 1000
"""In which they are claimed. Longer than anybody waits before it tries again."""
KEYS_MOST = 100
"""In one call of a script, which holds the server up for about a millisecond."""
SCHEMES = ("redis", "rediss", "unix")
PREFIX = "twinkeel:1:"
"""Of all keys; the number is that of what they mean."""
SCRIPTS = ("beat", "quota", "session", "leave")


class StoreError(Exception):
    """The store cannot be used now: why."""


class Quota(NamedTuple):
    """Asks for a share of a limit."""

    kind: str
    name: str
    per_s: int
    in_flight: int
    used: int
    held: tuple[int, int]
    """What is spent until the answer is here, of each; 0: nothing."""
    lasts_ms: int = LEASE_MS
    """0: it is given back."""


class Session(NamedTuple):
    """Asks for a session."""

    name: str
    held: bool
    """It is this controller's already, as far as it knows."""


class Leave(NamedTuple):
    """Gives a session back."""

    name: str
    spent_ages_ns: tuple[int, ...] = ()


Ask = Quota | Session | Leave


class Told(NamedTuple):
    """The answers, in the order of what was asked: of a ``Quota`` the two shares (-1: no limit), of
    a ``Session`` None where another has it, else the ages in ns of what went on elsewhere."""

    controllers: int
    """That live, this one among them."""
    answers: list[tuple[int, ...] | None]
    runs: tuple[str, ...] = ()
    """What each of them runs; who is of a version that does not tell is left out."""


class Store:
    """A connection, which is made by ``open``, and after a ``StoreError`` by ``open`` again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.id = secrets.token_hex(8)
        """This controller's."""
        self._client: Any = None
        self._scripts: dict[str, str] = {}
        self._sources = {
            name: (Path(__file__).parent / f"{name}.lua").read_text(encoding="ascii")
            for name in SCRIPTS
        }

    async def open(self) -> None:
        """Connect, and give the server the scripts: it may be a new one.

        Raises:
            StoreError: it is not there, or is none that can be used.
        """
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        await self.close()
        self._client = Redis.from_url(
            self.url, retry=Retry(NoBackoff(), 0), protocol=2, socket_connect_timeout=ANSWER_S,
            max_connections=1,
        )  # fmt: skip
        pipe = self._client.pipeline(transaction=False)
        for source in self._sources.values():
            pipe.script_load(source)
        hashes = await self._executed(pipe, 2 * ANSWER_S)
        self._scripts = dict(zip(SCRIPTS, hashes, strict=True))

    async def exchange(self, asks: Sequence[Ask], controllers: int, runs: str = "") -> Told:
        """Say that this controller is there, and ask, in one pipeline.

        Args:
            runs: what it decides by, to be compared.

        Raises:
            StoreError: there was no answer in time, or an error; what of it was done is not known.
        """
        pipe = self._client.pipeline(transaction=False)
        self._beat(pipe, here=True, runs=runs)
        parts = self._ask(pipe, asks, controllers)
        (alive, *all_runs), *found = await self._executed(pipe, ANSWER_S)
        answers: list[tuple[int, ...] | None] = [None] * len(asks)
        for part, many in zip(parts, found, strict=True):
            kind = type(asks[part[0]])
            if kind is Quota:
                for at, (rate, number) in zip(part, many, strict=True):
                    answers[at] = (int(rate), int(number))
            elif kind is Session:
                for at, answer in zip(part, many, strict=True):
                    if answer:
                        answers[at] = tuple(1_000_000 * int(age) for age in answer[1:])
        return Told(int(alive), answers, tuple(each.decode(errors="replace") for each in all_runs))

    async def leave(self, asks: Sequence[Ask], last: bool = True) -> None:
        """Give back what is held, and at the ``last`` go: others need not wait until it lapses.

        Raises:
            StoreError: as ``exchange``.
        """
        pipe = self._client.pipeline(transaction=False)
        self._ask(pipe, asks, 1)
        self._beat(pipe, here=not last)
        await self._executed(pipe, ANSWER_S)

    async def close(self) -> None:
        """Drop the connection; what is under way there is forgotten."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await client.connection_pool.disconnect(inuse_connections=True)

    # ---- the scripts ----

    def _beat(self, pipe: Any, here: bool, runs: str = "") -> None:
        args = [self.id, int(here), GONE_MS, SILENCE_MS, CALM_MS, runs]
        self._call(pipe, "beat", [ALIVE, CALM, RUNS], args)

    def _ask(self, pipe: Any, asks: Sequence[Ask], controllers: int) -> list[list[int]]:
        """One call for many of a kind: places in ``asks``, by call. Sessions are left first: one of
        them may be wanted again."""
        parts: list[list[int]] = []
        for kind in (Leave, Quota, Session):
            places = [at for at, ask in enumerate(asks) if type(ask) is kind]
            parts += [places[at : at + KEYS_MOST] for at in range(0, len(places), KEYS_MOST)]
        for part in parts:
            self._ask_alike(pipe, [asks[at] for at in part], controllers)
        return parts

    def _ask_alike(self, pipe: Any, asks: Sequence[Any], controllers: int) -> None:
        if type(asks[0]) is Quota:
            args = [self.id, controllers]
            for ask in asks:
                args += [ask.per_s, ask.in_flight, ask.used, *ask.held, ask.lasts_ms]
            keys = [_key(ask.kind, ask.name) for ask in asks]
            self._call(pipe, "quota", [CALM, *keys], args)
            return
        keys = [_key("session", ask.name) for ask in asks]
        if type(asks[0]) is Session:
            held = [int(ask.held) for ask in asks]
            self._call(pipe, "session", [CALM, *keys], [self.id, LEASE_MS, *held])
        else:
            ages = [" ".join(str(age // 1_000_000) for age in ask.spent_ages_ns) for ask in asks]
            self._call(pipe, "leave", keys, [self.id, *ages])

    def _call(self, pipe: Any, script: str, keys: list[str], args: list[Any]) -> None:
        pipe.evalsha(self._scripts[script], len(keys), *keys, *args)

    async def _executed(self, pipe: Any, within_s: float) -> list[Any]:
        from redis.exceptions import RedisError

        task = asyncio.ensure_future(pipe.execute())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was seen
        try:
            done, _ = await asyncio.wait({task}, timeout=within_s)
            if not done:
                done, _ = await asyncio.wait({task}, timeout=STALL_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            await asyncio.wait({task})
            await self.close()
            raise StoreError(f"no answer within {within_s * 1000:.0f} ms")
        try:
            answer: list[Any] = task.result()
        except (RedisError, OSError) as error:
            await self.close()
            raise StoreError(str(error) or type(error).__name__) from error
        return answer


ALIVE = f"{PREFIX}alive"
CALM = f"{PREFIX}calm"
RUNS = f"{PREFIX}runs"


def _key(kind: str, name: str) -> str:
    return f"{PREFIX}{kind}:{blake2b(name.encode(), digest_size=16).hexdigest()}"


# ---- the address ----


def check_redis(url: str, where: str) -> None:
    """Whether the address can be that of a Redis, and what is needed to talk to one is here.

    Raises:
        FileError: what is wrong.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FileError(
            where, f"{shown(url)!r} is no URL: {no_url(url, error)}", key="redis"
        ) from None
    named = parts.path if parts.scheme == "unix" else parts.hostname
    if parts.scheme not in SCHEMES or not named or port == 0:
        raise FileError(
            where, f"{shown(url)!r} is no address of a Redis", key="redis",
            hint="such as redis://10.0.0.9:6379/0, or rediss:// with TLS",
        )  # fmt: skip
    try:
        from redis.asyncio.connection import parse_url
    except ModuleNotFoundError as error:
        raise FileError(
            where, f"{error.name} is not installed", key="redis",
            hint="--redis needs the extra `redis`: pip install 'twinkeel[redis]'",
        ) from error  # fmt: skip
    try:
        parse_url(url)
    except ValueError as error:
        raise FileError(where, f"{shown(url)!r}: {no_url(url, error)}", key="redis") from None


def shown(url: str) -> str:
    """The address without its password."""
    return without_password(url)
