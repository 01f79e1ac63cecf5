"""The scripts, in a real Redis, with controllers that are only ids."""

from __future__ import annotations

import asyncio
import secrets
import time
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from controller.sharing import store as storing
from controller.sharing.store import CALM, Leave, Quota, Session, Store, StoreError
from tests.controller.sharing import patient_store
from tests.controller.turns import Turns
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

LONG_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no lost store, nobody is silent, and nothing lapses, but where a test says
    so."""
    monkeypatch.setattr(storing, "ANSWER_S", 10.0)
    for name in ("GONE_MS", "SILENCE_MS", "LEASE_MS"):
        monkeypatch.setattr(storing, name, LONG_MS)


def play(
    server: RedisServer, controllers: int, story: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """With so many stores, on an empty server whose calm is over."""

    async def run() -> None:
        from redis.asyncio import Redis

        async with Redis.from_url(server.url) as plain:
            await plain.flushall()
            stores = [patient_store(server.url) for _ in range(controllers)]
            for each in stores:
                await each.open()
                await each.exchange([], 1)
            await plain.delete(storing.CALM)
            await story(plain, *stores)
            for each in stores:
                await each.close()

    asyncio.run(run())


async def quota(
    store: Store, held: int = 0, limit: int = 5, name: str = "u", controllers: int = 2,
    lasts_ms: int = LONG_MS,
) -> int:  # fmt: skip
    """Its share of a rate, asked for once more."""
    ask = Quota("user", name, limit, 0, 0, (held, 0), lasts_ms)
    told = await store.exchange([ask], controllers)
    found = told.answers[0]
    assert found is not None
    assert found[1] == -1, "there is no limit of what is in flight"
    return found[0]


async def flight(store: Store, held: int = 0, limit: int = 8, used: int = 0) -> int:
    told = await store.exchange([Quota("all", "", 0, limit, used, (0, held), LONG_MS)], 2)
    found = told.answers[0]
    assert found is not None
    assert found[0] == -1
    return found[1]


class Since:
    """How long ago something happened in the server, which is seen from here: between ``least_s``
    and ``most_s``, however long the way there and back took."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._ended_s = 0.0

    def over(self) -> None:
        self._ended_s = time.monotonic()

    @property
    def least_s(self) -> float:
        return time.monotonic() - self._ended_s

    @property
    def most_s(self) -> float:
        return time.monotonic() - self._begun_s


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
        left = await quota(one, 5)
        assert left in (2, 3)
        assert await quota(two, 0) == 0, "it has not said that it heard of it"
        since = Since()
        assert await quota(one, left) == left
        since.over()
        found = 0
        while not found:
            least_s = since.least_s
            found = await quota(two, 0)
            assert found or least_s < 1.01, "the window of a second was over"
            assert await quota(one, left) == left
            await asyncio.sleep(0.05)
        assert since.most_s > 0.99, "the window of a second was not over"
        assert found + left == 5

    play(server, 2, story)


def test_what_was_cut_and_not_heard_of_counts_until_it_would_have_lapsed(
    server: RedisServer,
) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert [await quota(one), await quota(one, 2)] == [2, 5]
        assert await quota(two) == 0
        since = Since()
        await quota(one, 5, lasts_ms=1500)  # the answer is lost, and it with it
        since.over()
        found = 0
        while not found:
            least_s = since.least_s
            found = await quota(two, 0)
            assert found or least_s < 2.51
            await asyncio.sleep(0.05)
        assert since.most_s > 2.49

    play(server, 2, story)


def test_a_share_that_lapsed_counts_one_more_second_for_whoever_had_it_and_comes_back(
    server: RedisServer,
) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        for turn in range(20):
            name = f"u{turn}"
            ask = Quota("user", name, 5, 0, 0, (2, 0), 100)
            assert await quota(one, name=name) == 2
            since = Since()
            assert (await one.exchange([ask], 2)).answers == [(5, -1)]
            await asyncio.sleep(0.15)
            assert await quota(one, 0, name=name) == 2, "it lapsed: this is its first"
            share = await quota(two, name=name)
            if since.most_s < 1.09:  # else there was no turn for so long that it is over
                assert share == 0, "it may have used five just now"
                break
        else:
            raise AssertionError("it was never asked in time")
        await asyncio.sleep(1.0)
        assert await quota(two, name=name) > 0

    play(server, 2, story)


def test_what_is_given_back_is_another_s_after_the_window(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        assert [await quota(one), await quota(one, 2)] == [2, 5]
        since = Since()
        await one.leave([Quota("user", "u", 5, 0, 0, (5, 0), 0)])
        since.over()
        assert (await two.exchange([], 1)).controllers == 1
        held = 0
        while held < 5:
            least_s = since.least_s
            held = await quota(two, held)
            assert held == 5 or least_s < 1.01
            await asyncio.sleep(0.02)
        assert since.most_s > 0.99

    play(server, 2, story)


def test_a_limit_of_one_goes_round(server: RedisServer) -> None:
    async def story(plain: Any, one: Store, two: Store) -> None:
        shares, had = [0, 0], set[int]()
        until_s = time.monotonic() + 60.0
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
        for _ in range(20):
            await one.exchange([Leave("s", (900_000_000, 20_999_999))], 2)
            ages_ns = await take(two) or ()
            if len(ages_ns) == 2:
                break
            # There was no turn for so long that what went on was a second ago.
            await two.exchange([Leave("s")], 2)
            assert await take(one) == ()
        older, younger = ages_ns
        assert 900_000_000 <= older < 1_000_000_000
        assert older - younger == 880_000_000
        assert await take(two, held=True) == (), "they are told once"
        assert await take(one) is None

    play(server, 2, story)


def test_a_session_that_is_not_asked_for_again_lapses(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "LEASE_MS", 1000)

    async def kept(one: Store, two: Store) -> bool:
        """For longer than it lasts; False: there was no turn for so long that it lapsed."""
        for _ in range(4):
            await asyncio.sleep(0.4)
            since = Since()
            assert await take(one, held=True) == ()
            if await take(two) is not None:
                assert since.most_s > 0.99
                await two.exchange([Leave("s")], 2)
                return False
        return True

    async def story(plain: Any, one: Store, two: Store) -> None:
        assert await take(one) == ()
        while not await kept(one, two):
            pass
        since = Since()
        assert await take(one, held=True) == ()
        since.over()
        had = False
        while not had:
            least_s = since.least_s
            had = await take(two) is not None
            assert had or least_s < 1.01
            await asyncio.sleep(0.01)
        assert since.most_s > 0.99

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
    monkeypatch.setattr(storing, "CALM_MS", LONG_MS)

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
        monkeypatch.setattr(storing, "GONE_MS", 400)
        until_s = time.monotonic() + 20.0
        while (await one.exchange([], 2)).controllers != 2:  # the third was killed
            assert time.monotonic() < until_s, "it counts for ever"
            await asyncio.sleep(0.1)
            await two.exchange([], 2)
        await plain.delete(CALM)  # it is over
        assert await take(one, "gone") == ()
        assert [await quota(each, 2, limit=6) for each in (one, two)] == [3, 3]

    play(server, 3, story)


def test_whoever_is_not_heard_is_gone(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(plain: Any, *stores: Store) -> None:
        for each in stores:
            await each.exchange([], 1)
        assert (await stores[0].exchange([], 1)).controllers == 3
        await stores[1].leave([])
        assert (await stores[0].exchange([], 1)).controllers == 2
        monkeypatch.setattr(storing, "GONE_MS", 200)
        await asyncio.sleep(0.25)
        assert (await stores[0].exchange([], 1)).controllers == 1

    play(server, 3, story)


def test_after_a_silence_of_all_only_what_was_held_is_claimed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "CALM_MS", LONG_MS)

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
        await plain.pexpire(CALM, 600)
        while await plain.exists(CALM):  # somebody is heard meanwhile
            await asyncio.sleep(0.05)
            await one.exchange([], 2)
        assert await quota(two, 2, name="v") == 5
        assert await take(two) is None
        assert await take(two, "t") == ()

    play(server, 2, story)


# ---- trouble ----


def test_a_server_that_stands_still_is_given_up_and_found_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(plain: Any, one: Store) -> None:
        monkeypatch.setattr(storing, "ANSWER_S", 0.25)
        server.pause()
        began_s = time.monotonic()
        try:
            with Turns() as turns:
                with pytest.raises(StoreError, match="no answer within 250 ms"):
                    await one.exchange([Session("s", False)], 1)
                assert time.monotonic() - began_s > 0.2
                assert turns.s < 0.5
                with pytest.raises(StoreError):
                    await one.open()
                assert turns.s < 1.2
        finally:
            server.resume()
        monkeypatch.setattr(storing, "ANSWER_S", 10.0)
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
