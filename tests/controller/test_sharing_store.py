"""The scripts, in a real Redis, with controllers that are only ids."""

from __future__ import annotations

import asyncio
import secrets
import time
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from controller.sharing import store as storing
from controller.sharing.store import Leave, Quota, Session, Store, StoreError
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no lost store, but where that is what is tested."""
    if "server_that" not in request.node.name:
        monkeypatch.setattr(storing, "ANSWER_S", 3.0)


def play(
    server: RedisServer, controllers: int, story: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """With so many stores, on an empty server whose calm is over."""

    async def run() -> None:
        from redis.asyncio import Redis

        async with Redis.from_url(server.url) as plain:
            await plain.flushall()
            stores = [Store(server.url) for _ in range(controllers)]
            for each in stores:
                await each.open()
                await each.exchange([], 1)
            await plain.delete(storing.CALM)
            await story(plain, *stores)
            for each in stores:
                await each.close()

    asyncio.run(run())


async def quota(
    store: Store, held: int = 0, limit: int = 5, name: str = "u", controllers: int = 2
) -> int:
    """Its share of a rate, asked for once more."""
    told = await store.exchange([Quota("user", name, limit, 0, 0, (held, 0))], controllers)
    found = told.answers[0]
    assert found is not None
    assert found[1] == -1, "there is no limit of what is in flight"
    return found[0]


async def flight(store: Store, held: int = 0, limit: int = 8, used: int = 0) -> int:
    told = await store.exchange([Quota("all", "", 0, limit, used, (0, held))], 2)
    found = told.answers[0]
    assert found is not None
    assert found[0] == -1
    return found[1]


# ---- rates ----


def test_the_first_gets_its_part_and_then_all_while_nobody_else_asks(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert await quota(one) == 2, "the other is about to ask, too"
        assert await quota(one, 2) == 5

    play(server, 2, story)


def test_two_that_ask_share_all_of_it(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        shares = [await quota(one), await quota(two)]
        assert shares == [2, 2]
        shares[0] = await quota(one, shares[0])
        shares[1] = await quota(two, shares[1])
        assert sorted(shares) == [2, 3], "what is left over goes to one of them"

    play(server, 2, story)


def test_no_more_than_the_limit_among_more_controllers_than_it_allows(server: RedisServer) -> None:
    async def story(plain: Any, *stores: Store) -> None:
        shares = [await quota(each, limit=2, controllers=4) for each in stores]
        assert shares == [1, 1, 0, 0]

    play(server, 4, story)


def test_what_was_cut_counts_one_more_second(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert [await quota(one), await quota(one, 2)] == [2, 5]
        assert await quota(two) == 0, "the first has it all"
        cut_s = time.monotonic()
        left = await quota(one, 5)
        assert left in (2, 3)
        assert await quota(two, 0) == 0, "it has not said that it heard of it"
        assert await quota(one, left) == left
        while (found := await quota(two, 0)) == 0:
            assert time.monotonic() - cut_s < 1.4
            assert await quota(one, left) == left
            await asyncio.sleep(0.05)
        assert time.monotonic() - cut_s > 0.99, "the window of a second was not over"
        assert found + left == 5

    play(server, 2, story)


def test_what_was_cut_and_not_heard_of_counts_until_it_would_have_lapsed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert [await quota(one), await quota(one, 2)] == [2, 5]
        assert await quota(two) == 0
        since_s = time.monotonic()
        await quota(one, 5)  # the answer is lost, and it with it
        while await quota(two, 0) == 0:
            await asyncio.sleep(0.05)
            assert time.monotonic() - since_s < 2.8
        assert time.monotonic() - since_s > 2.45

    play(server, 2, story)


def test_a_share_that_lapsed_counts_one_more_second_for_whoever_had_it_and_comes_back(
    server: RedisServer,
) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        ask = Quota("user", "u", 5, 0, 0, (2, 0), 100)
        assert await quota(one) == 2
        assert (await one.exchange([ask], 2)).answers == [(5, -1)]
        await asyncio.sleep(0.15)
        assert await quota(one, 0) == 2, "it lapsed: it asks as if for the first time"
        assert await quota(two) == 0, "it may have used five just now"
        await asyncio.sleep(1.0)
        assert await quota(two) > 0

    play(server, 2, story)


def test_what_is_given_back_is_another_s_after_the_window(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert [await quota(one), await quota(one, 2)] == [2, 5]
        gone_s = time.monotonic()
        await one.leave([Quota("user", "u", 5, 0, 0, (5, 0), 0)])
        assert (await two.exchange([], 1)).controllers == 1
        held = 0
        while (held := await quota(two, held)) < 5:
            assert time.monotonic() - gone_s < 1.3
            await asyncio.sleep(0.02)
        assert time.monotonic() - gone_s > 0.99

    play(server, 2, story)


def test_a_limit_of_one_goes_round(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        shares, had = [0, 0], set[int]()
        until_s = time.monotonic() + 8.0
        while len(had) < 2:
            assert time.monotonic() < until_s, f"only {had} had it"
            for at, each in enumerate((one, two)):
                shares[at] = await quota(each, shares[at], limit=1)
            assert sum(shares) <= 1
            had |= {at for at, share in enumerate(shares) if share}
            await asyncio.sleep(0.05)

    play(server, 2, story)


# ---- what is in flight ----


def test_in_flight_counts_what_is_used_above_the_share(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert [await flight(one), await flight(one, 4)] == [4, 8]
        assert await flight(two) == 0
        assert await flight(one, 8, used=7) == 4
        assert await flight(two) == 0, "it has not said that it heard of it"
        assert await flight(one, 4, used=7) == 4
        assert await flight(two) == 1, "seven are still in flight there"
        assert await flight(one, 4, used=2) == 4
        assert await flight(two, 1) == 4, "there is no window to wait for"

    play(server, 2, story)


def test_rate_and_number_are_shared_by_one_call(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        ask = Quota("model", "m", 100, 10, 0, (0, 0))
        assert (await one.exchange([ask], 2)).answers == [(50, 5)]
        assert (await two.exchange([ask], 2)).answers == [(50, 5)]

    play(server, 2, story)


@pytest.mark.parametrize("seed", range(3))
def test_the_sum_never_exceeds_the_limit(server: RedisServer, seed: int) -> None:
    """Three that ask, forget to, lose answers and leave: what they may spend within a second stays
    below the limit, however it goes."""
    draw = Random(seed)  # noqa: S311

    async def story(plain: Any, *stores: Store) -> None:
        limit = 7
        held = [(0, 0.0)] * 3  # what each believes to have, and until when
        spent: list[list[tuple[float, int]]] = [[], [], []]
        until_s = time.monotonic() + 4.0
        while time.monotonic() < until_s:
            at = draw.randrange(3)
            now_s = time.monotonic()
            share, lapses_s = held[at]
            if now_s > lapses_s:
                share = 0
            ask = Quota("user", "u", limit, 0, 0, (share, 0), draw.choice((150, 300, 1500)))
            answer = (await stores[at].exchange([ask], 3)).answers[0]
            if answer is not None and draw.random() < 0.8:
                held[at] = (answer[0], now_s + ask.lasts_ms / 1000)
            now_s = time.monotonic()
            for each, (share, lapses_s) in enumerate(held):
                # Each may spend all of its share at any time within the second.
                spent[each].append((now_s, share if now_s < lapses_s else 0))
                while now_s - spent[each][0][0] >= 0.99:
                    spent[each].pop(0)
            most = [max(share for _, share in each) for each in spent]
            assert sum(most) <= limit, most
            await asyncio.sleep(draw.choice((0.0, 0.02, 0.2)))

    play(server, 3, story)


# ---- sessions ----


async def take(store: Store, name: str = "s", held: bool = False) -> tuple[int, ...] | None:
    return (await store.exchange([Session(name, held)], 2)).answers[0]


def test_a_session_is_one_s_until_it_leaves_it(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert await take(one) == ()
        assert await take(one, held=True) == ()
        assert await take(two) is None
        await two.exchange([Leave("s")], 2)
        assert await take(two) is None, "it was not its own to leave"
        await one.exchange([Leave("s", (900_000_000, 20_999_999))], 2)
        older, younger = await take(two) or (0, 0)
        assert 900_000_000 <= older < 1_000_000_000
        assert 20_000_000 <= younger < 120_000_000
        assert await take(two, held=True) == (), "they are told once"
        assert await take(one) is None

    play(server, 2, story)


def test_a_session_that_is_not_asked_for_again_lapses(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "LEASE_MS", 200)

    async def story(plain: Any, one: Store, two: Store) -> None:
        assert await take(one) == ()
        for _ in range(3):
            await asyncio.sleep(0.1)
            assert await take(one, held=True) == ()
            assert await take(two) is None
        began_s = time.monotonic()
        while await take(two) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert 0.15 < time.monotonic() - began_s < 0.4

    play(server, 2, story)


def test_many_sessions_in_one_pipeline(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        asks = [Session(f"s{number}", False) for number in range(450)]
        assert (await one.exchange(asks[::2], 2)).answers == [()] * 225
        mixed: list[storing.Ask] = [
            asks[0],
            Quota("user", "u", 5, 0, 0, (0, 0)),
            Leave("s0"),
            *asks[1:],
        ]
        answers = (await two.exchange(mixed, 2)).answers
        assert answers == [None, (2, -1), None] + [() if n % 2 else None for n in range(1, 450)]

    play(server, 2, story)


def test_no_name_is_in_the_store(server: RedisServer) -> None:
    async def story(plain: Any, one: Store) -> None:
        name = f"ann-{secrets.token_hex(4)}"
        await one.exchange([Session(name, False), Quota("user", name, 5, 0, 0, (0, 0))], 1)
        kept = [key.decode() for key in await plain.keys()]
        assert len(kept) == 3
        for key in kept:
            assert key.startswith("twinkeel:")
            assert name not in key + repr(await plain.dump(key))
            assert await plain.pttl(key) > 0, f"{key} is kept for ever"

    play(server, 1, story)


# ---- who is there, and the calm ----


HOUR_MS = 3_600_000


async def put_back(plain: Any) -> None:
    """What the server holds, as if its clock had been put back by an hour."""
    for key in await plain.keys():
        left_ms = await plain.pttl(key)
        if await plain.type(key) == b"zset":
            for member, score in await plain.zrange(key, 0, -1, withscores=True):
                await plain.zadd(key, {member: score + HOUR_MS})
        elif b":user:" in key:
            for member, share in (await plain.hgetall(key)).items():
                numbers = [int(each) for each in share.split()]
                for at in (0, 3, 6):
                    numbers[at] += HOUR_MS
                await plain.hset(key, member, " ".join(map(str, numbers)))
        await plain.pexpire(key, left_ms + HOUR_MS)


def test_a_clock_that_was_put_back_keeps_nothing_for_those_who_are_gone(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "GONE_MS", 400)
    monkeypatch.setattr(storing, "CALM_MS", 300)

    async def story(plain: Any, one: Store, two: Store, three: Store) -> None:
        for store, name in ((one, "s"), (two, "t"), (three, "gone")):
            assert await take(store, name) == ()
        assert [await quota(each, limit=6, controllers=3) for each in (one, two, three)] == [2] * 3
        await put_back(plain)
        assert (await one.exchange([], 3)).controllers == 3
        assert await take(two, "s") is None, "its holder may claim it"
        assert await take(one, "s", held=True) == ()
        assert await quota(one, 2, limit=6) == 2
        assert await quota(two, 2, limit=6) == 2, "in the calm nothing grows"
        await asyncio.sleep(0.45)  # the third was killed
        assert (await two.exchange([], 2)).controllers <= 2
        assert (await one.exchange([], 2)).controllers == 2
        assert await take(one, "gone") == ()
        assert [await quota(each, 2, limit=6) for each in (one, two)] == [3, 3]

    play(server, 3, story)


def test_whoever_is_not_heard_is_gone(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "GONE_MS", 200)

    async def story(plain: Any, *stores: Store) -> None:
        for each in stores:
            await each.exchange([], 1)
        assert (await stores[0].exchange([], 1)).controllers == 3
        await stores[1].leave([])
        assert (await stores[0].exchange([], 1)).controllers == 2
        await asyncio.sleep(0.25)
        assert (await stores[0].exchange([], 1)).controllers == 1

    play(server, 3, story)


def test_after_a_silence_of_all_only_what_was_held_is_claimed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "SILENCE_MS", 150)
    monkeypatch.setattr(storing, "CALM_MS", 600)

    async def story(plain: Any, one: Store, two: Store) -> None:
        assert [await quota(one), await quota(one, 2)] == [2, 5]
        assert await take(one) == ()
        await plain.flushall()  # as a server that came back empty
        assert await take(two) is None, "another may have it"
        assert await take(one, held=True) == ()
        assert await quota(two, 0, name="v") == 2, "what there would be without a store"
        assert await quota(two, 2, name="v") == 2, "nothing grows"
        assert await quota(one, 5) == 5
        assert await quota(two, 0) == 0
        for _ in range(13):  # somebody is heard meanwhile
            await asyncio.sleep(0.05)
            await one.exchange([], 2)
        assert await quota(two, 2, name="v") == 5
        assert await take(two) is None
        assert await take(two, "t") == ()

    play(server, 2, story)


# ---- trouble ----


def test_a_server_that_stands_still_is_given_up_and_found_again(server: RedisServer) -> None:
    async def story(plain: Any, one: Store) -> None:
        server.pause()
        began_s = time.monotonic()
        try:
            with pytest.raises(StoreError, match="no answer within 250 ms"):
                await one.exchange([Session("s", False)], 1)
            assert 0.2 < time.monotonic() - began_s < 0.5
            with pytest.raises(StoreError):
                await one.open()
            assert time.monotonic() - began_s < 1.2
        finally:
            server.resume()
        await one.open()
        assert (await one.exchange([], 1)).controllers == 1

    play(server, 1, story)


def test_a_server_that_is_gone_says_so_at_once_and_comes_back() -> None:
    with redis_server() as own:

        async def story(plain: Any, one: Store) -> None:
            assert await take(one) == ()
            own.kill()
            with pytest.raises(StoreError):
                await one.exchange([], 1)
            with pytest.raises(StoreError):
                await one.open()
            own.start()
            await one.open()
            assert await take(one, held=True) == ()

        play(own, 1, story)
