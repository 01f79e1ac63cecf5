"""What a policy that shares its limits is told, with a real Redis that goes and comes back."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from controller.cli import make_settings
from controller.sharing import leases as leasing
from controller.sharing import store as storing
from controller.sharing.leases import Sharing
from controller.sharing.store import ALIVE, CALM, shown
from policy.decisions import Lease, Release
from policy.events import QuotaLeased, ReplicaShare, ReplicaUp, SessionOwned, StoreChanged
from policy.files import FileError
from tests.controller.sharing import patient_store
from tests.controller.turns import Turns
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

E = TypeVar("E")
UP = ReplicaUp(0, "a", (), False, 1, 16, 8, 1024, 4096, (1, 1, 1, 1, 1, 1), 1, 1)
GONE = "redis://127.0.0.1:1/0"
LONG_MS, SHORT_MS = 60_000, 1_500


class Policy:
    """Hears what a controller's driver is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.troubles: list[str] = []
        self.replicas = {number: SimpleNamespace(up=number == 0) for number in range(2)}
        self.sharing: Sharing

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def feed(self, event: Any) -> None:
        self.events.append(event)

    def trouble(self, key: str, text: str) -> None:
        self.troubles.append(f"{key}: {text}")

    def all(self, kind: type[E]) -> list[E]:
        return [each for each in self.events if type(each) is kind]

    async def wait(self, kind: type[E], count: int = 1, within_s: float = 20.0) -> E:
        """The ``count``-th event of this kind."""
        until_s = time.monotonic() + within_s
        while len(self.all(kind)) < count:
            assert time.monotonic() < until_s, f"not within {within_s} s: {self.events[-5:]}"
            await asyncio.sleep(0.005)
        return self.all(kind)[count - 1]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no lost store, and nothing lapses, but where that is what is tested."""
    if "not_there" not in request.node.name:
        for module in (storing, leasing):
            monkeypatch.setattr(module, "ANSWER_S", 10.0)
            monkeypatch.setattr(module, "LEASE_MS", LONG_MS)
        monkeypatch.setattr(leasing, "SHARE_MS", LONG_MS)
        monkeypatch.setattr(leasing, "SHARE_MS_MOST", LONG_MS)
        monkeypatch.setattr(storing, "GONE_MS", LONG_MS)
        monkeypatch.setattr(storing, "SILENCE_MS", LONG_MS)


def play(url: str, controllers: int, story: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """With so many controllers, whose calm is over."""

    async def run() -> None:
        from redis.asyncio import Redis

        policies = [Policy() for _ in range(controllers)]
        for each in policies:
            each.sharing = Sharing(each, patient_store(url))  # type: ignore[arg-type]
            await each.sharing.begin()
        if url != GONE:
            async with Redis.from_url(url) as plain:
                await plain.delete(CALM)
        for each in policies:
            while each.all(StoreChanged)[-1].controllers < controllers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        try:
            await story(*policies)
        finally:
            for each in policies:
                await each.sharing.close()

    asyncio.run(run())


def test_questions_are_answered_and_their_time_is_taken_off(server: RedisServer) -> None:
    async def story(one: Policy, two: Policy) -> None:
        assert one.events[0] == StoreChanged("shared", 1)
        assert one.all(StoreChanged)[1:] == [StoreChanged("shared", 2)]
        assert two.all(StoreChanged) == [StoreChanged("shared", 2)]
        for name in ("u", "v"):
            one.sharing.run(Lease("user", name, 10, 4))
        one.sharing.run(Lease("session", "s"))
        two.sharing.run(Lease("session", "t"))
        first = await one.wait(QuotaLeased)
        assert (first.kind, first.name, first.per_s, first.in_flight) == ("user", "u", 5, 2)
        assert 0 < first.for_ns < LONG_MS * 1_000_000
        owned = await one.wait(SessionOwned)
        assert owned.session == "s"
        assert 0 < owned.for_ns < LONG_MS * 1_000_000
        assert len(one.all(QuotaLeased)) == 2
        two.sharing.run(Lease("session", "s"))
        assert await two.wait(SessionOwned, 2) == SessionOwned("s", 0)
        count, ages_ns = 1, ()
        while len(ages_ns) < 2:  # what is a second old is told no more: it may have taken so long
            count += 1
            assert count < 20
            one.sharing.run(Release("s", (500_000_000, 3_000_000)))
            one.sharing.run(Lease("session", "s"))
            ages_ns = (await one.wait(SessionOwned, count)).spent_ages_ns
        assert ages_ns[0] >= 500_000_000
        assert 3_000_000 <= ages_ns[1] == ages_ns[0] - 497_000_000

    play(server.url, 2, story)


def test_one_that_stood_still_takes_no_share_that_has_run_out(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEASE_MS", "SHARE_MS", "SHARE_MS_MOST"):
        monkeypatch.setattr(leasing, name, 1_500)

    async def story(one: Policy) -> None:
        one.sharing.run(Lease("user", "u", 10, 4))
        one.sharing.run(Lease("session", "s"))
        for _ in range(3):  # it is asked, and the answer comes while nobody looks
            await asyncio.sleep(0)
        time.sleep(1.7)  # noqa: ASYNC251
        assert (await one.wait(QuotaLeased)).for_ns == 0
        assert (await one.wait(SessionOwned)).for_ns == 0

    play(server.url, 1, story)


def test_a_lease_ends_at_the_same_time_however_long_it_takes_to_tell_of_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_ns = []

    async def story(one: Policy) -> None:
        def slow(event: Any) -> None:
            one.events.append(event)
            if type(event) is SessionOwned:
                ends_ns.append(one.now_ns() + event.for_ns)
                time.sleep(0.05)

        monkeypatch.setattr(one, "feed", slow)
        for name in "abcd":
            one.sharing.run(Lease("session", name))
        await one.wait(SessionOwned, 4)
        assert max(ends_ns) - min(ends_ns) < 40_000_000

    play(server.url, 1, story)


def test_many_sessions_are_taken_and_left_in_parts(server: RedisServer) -> None:
    async def story(one: Policy, two: Policy) -> None:
        names = [f"s{number}" for number in range(1_300)]
        for each in (one, two):
            before = len(each.all(SessionOwned))
            for name in names:
                each.sharing.run(Lease("session", name))
            await each.wait(SessionOwned, before + len(names))
            assert all(owned.for_ns for owned in each.all(SessionOwned))
            for name in names:
                each.sharing.run(Release(name))
            each.sharing.run(Lease("session", names[-1]))  # wanted again: it waits for its leaving
            assert (await each.wait(SessionOwned, before + len(names) + 1)).for_ns
            each.sharing.run(Release(names[-1]))
            each.sharing.run(Lease("session", f"after {before}"))  # what is left goes out first
            await each.wait(SessionOwned, before + len(names) + 2)
        assert not one.troubles

    play(server.url, 2, story)


def test_a_share_that_was_cut_is_another_s_a_second_after_it_was_heard_of(
    server: RedisServer,
) -> None:
    async def story(one: Policy, two: Policy) -> None:
        for count, share in ((1, 2), (2, 5)):
            one.sharing.run(Lease("user", "u", 5))
            assert (await one.wait(QuotaLeased, count)).per_s == share
        two.sharing.run(Lease("user", "u", 5))
        assert (await two.wait(QuotaLeased)).per_s == 0
        one.sharing.run(Lease("user", "u", 5))
        cut = await one.wait(QuotaLeased, 3)
        assert cut.per_s in (2, 3)
        asked_s = hears_s = time.monotonic()
        one.sharing.run(Lease("user", "u", 5))  # as the policy does at once
        again = await one.wait(QuotaLeased, 4)
        assert again.per_s == cut.per_s
        heard_s = time.monotonic()
        count = 1
        while (found := two.all(QuotaLeased)[-1].per_s) == 0:
            assert asked_s - heard_s < 1.0, "more than a second after the first had heard of it"
            count, asked_s = count + 1, time.monotonic()
            two.sharing.run(Lease("user", "u", 5))
            await two.wait(QuotaLeased, count)
            one.sharing.run(Lease("user", "u", 5))
            await asyncio.sleep(0.1)
        assert time.monotonic() - hears_s > 0.99, "its window was not over"
        assert found == 5 - cut.per_s

    play(server.url, 2, story)


def test_replicas_are_shared_by_those_who_live(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(one: Policy, two: Policy, three: Policy) -> None:
        for each in (one, two, three):
            assert each.all(ReplicaShare)[-1] == ReplicaShare(0, 333)
        assert three.all(ReplicaShare) == [ReplicaShare(0, 333)]
        three.replicas[1].up = True
        three.sharing.fed(0, UP)
        assert await three.wait(ReplicaShare, 2) == ReplicaShare(0, 333)
        await asyncio.sleep(1.0)  # the calm of the first moment
        told = len(one.all(StoreChanged))
        await two.sharing.close()
        assert await one.wait(StoreChanged, told + 1) == StoreChanged("shared", 2)
        await three.wait(ReplicaShare, 4)
        assert set(three.all(ReplicaShare)[-2:]) == {ReplicaShare(0, 500), ReplicaShare(1, 500)}

    play(server.url, 3, story)


def test_at_the_end_all_is_given_back(server: RedisServer) -> None:
    async def story(one: Policy, two: Policy) -> None:
        asked = SimpleNamespace(session="s")
        one.sharing.run(Lease("session", "s"))
        one.sharing.run(Lease("all", "", 0, 8))
        await one.wait(SessionOwned)
        one.sharing.run(Lease("all", "", 0, 8))
        assert (await one.wait(QuotaLeased, 2)).in_flight == 8
        call: Any = SimpleNamespace(asked=asked, dispatched_ns=one.now_ns())
        one.sharing.dispatched(call)
        await one.sharing.close()
        two.sharing.run(Lease("session", "s"))
        two.sharing.run(Lease("all", "", 0, 8))
        owned = await two.wait(SessionOwned)
        assert owned.for_ns > 0
        assert len(owned.spent_ages_ns) == 1, "what went on there counts here"
        assert (await two.wait(QuotaLeased)).in_flight in (4, 8)
        # Nothing lapses within this test: that two has it is by what was given back.
        assert await two.wait(StoreChanged, 2) == StoreChanged("shared", 1)
        one.sharing.run(Lease("session", "s"))  # nothing is asked any more

    play(server.url, 2, story)


def test_at_the_end_what_is_under_way_is_waited_for(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        from redis.asyncio import Redis

        async with Redis.from_url(server.url) as plain:
            for turns in range(10):
                one = Policy()
                one.sharing = Sharing(one, patient_store(server.url))  # type: ignore[arg-type]
                await one.sharing.begin()
                for number in range(200):
                    one.sharing.run(Lease("user", f"u{number}", 10))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await one.sharing.close()
                assert await plain.zcard(ALIVE) == 0, "it counts no more"

    asyncio.run(story())
    assert not caplog.records


@pytest.mark.parametrize("how", ["paused", "killed"])
def test_a_store_that_goes_and_comes_back(
    server: RedisServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes to notice is counted in this process's own turns: others may have the
    processors for longer than a store has to answer."""

    async def story(one: Policy, two: Policy) -> None:
        one.sharing.run(Lease("session", "s"))
        one.sharing.run(Lease("user", "u", 5))
        await one.wait(SessionOwned)
        one.sharing.run(Lease("user", "u", 5))
        assert (await one.wait(QuotaLeased, 2)).per_s == 5
        for name in ("SHARE_MS", "SHARE_MS_MOST"):
            monkeypatch.setattr(leasing, name, SHORT_MS)
        monkeypatch.setattr(storing, "LEASE_MS", SHORT_MS)
        await _asked_again(one, two)  # nothing in the store lasts longer
        monkeypatch.setattr(storing, "ANSWER_S", 0.25)
        monkeypatch.setattr(storing, "SILENCE_MS", 1_000)
        monkeypatch.setattr(storing, "CALM_MS", LONG_MS)
        await _asked_again(one, two)  # no answer is awaited for longer
        losses = one.sharing.counts.losses
        server.pause() if how == "paused" else server.kill()
        with Turns() as turns:
            while not all(each.all(StoreChanged)[-1].state == "lost" for each in (one, two)):
                assert turns.s < 1.0, "nobody has noticed"
                await asyncio.sleep(0.01)
                turns.noted()
        assert turns.longest_s < 0.2, "the loop stood still"
        for each in (one, two):
            assert each.all(StoreChanged)[-1] == StoreChanged("lost", 2)
        assert len(one.troubles) >= 1
        assert server.url.partition("/0")[0] in one.troubles[0]
        assert one.sharing.counts.losses == losses + 1
        assert not one.sharing.counts.up
        one.sharing.run(Lease("session", "new"))
        await asyncio.sleep(2.6)  # all leases lapsed
        # From now on it takes as long as it takes: the calm outlasts it.
        monkeypatch.setattr(storing, "ANSWER_S", 10.0)
        monkeypatch.setattr(leasing, "CALM_MS", LONG_MS)
        monkeypatch.setattr(storing, "LEASE_MS", LONG_MS)
        told = [len(each.all(StoreChanged)) for each in (one, two)]
        server.resume() if how == "paused" else server.start()
        for each, before in zip((one, two), told, strict=True):
            assert (await each.wait(StoreChanged, before + 1)).state == "shared"
        for each in (two, one):  # the other is first
            before = len(each.all(SessionOwned))
            each.sharing.run(Lease("session", "s"))
            each.sharing.run(Lease("user", "u", 5))
            assert (await each.wait(SessionOwned, before + 1)).for_ns >= 0
        assert two.all(SessionOwned)[-1].for_ns == 0
        assert one.all(SessionOwned)[-1].for_ns > 0, "it was claimed anew"
        assert two.all(QuotaLeased)[-1].per_s <= 2
        assert not [each for each in one.all(SessionOwned) if each.session == "new"]

    play(server.url, 2, story)


async def _asked_again(one: Policy, two: Policy) -> None:
    """Until both have had answers to what they asked from now on."""
    one.sharing.run(Lease("session", "s"))
    one.sharing.run(Lease("user", "u", 5))
    two.sharing.run(Lease("session", "t"))
    for each in (one, two):
        for _ in range(2):  # the first may have been asked before
            before = len(each.all(SessionOwned))
            each.sharing.run(Lease("session", "s" if each is one else "t"))
            await each.wait(SessionOwned, before + 1)


def test_an_empty_store_is_told_what_was_held(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "CALM_MS", LONG_MS)

    async def story(one: Policy, two: Policy) -> None:
        from redis.asyncio import Redis

        one.sharing.run(Lease("session", "s"))
        await one.wait(SessionOwned)
        async with Redis.from_url(server.url) as plain:
            await plain.flushall()
        two.sharing.run(Lease("session", "s"))
        one.sharing.run(Lease("session", "s"))
        assert (await one.wait(SessionOwned, 2)).for_ns > 0
        assert await two.wait(SessionOwned) == SessionOwned("s", 0)

    play(server.url, 2, story)


def test_a_store_without_the_scripts_is_given_them_again(server: RedisServer) -> None:
    async def story(one: Policy) -> None:
        from redis.asyncio import Redis

        async with Redis.from_url(server.url) as plain:
            await plain.script_flush()
        assert (await one.wait(StoreChanged, 2)).state == "lost"
        assert (await one.wait(StoreChanged, 3)).state == "shared"

    play(server.url, 1, story)


def test_a_store_that_is_not_there_at_the_start() -> None:
    async def story(one: Policy) -> None:
        assert one.events == [StoreChanged("lost", 1)]
        assert GONE in one.troubles[0]
        one.sharing.run(Lease("session", "s"))
        await asyncio.sleep(0.3)
        assert one.all(StoreChanged) == [StoreChanged("lost", 1)]

    play(GONE, 1, story)


def test_what_is_told_to_prometheus(server: RedisServer) -> None:
    began_s = time.monotonic()

    async def story(one: Policy) -> None:
        one.sharing.run(Lease("session", "s"))
        await one.wait(SessionOwned)
        values = {
            f"{sample.name}{sample.labels or ''}": sample.value
            for family in one.sharing.counts.families()
            for sample in family.samples
        }
        assert values["twinkeel_store_up"] == 1
        assert values["twinkeel_store_controllers"] == 1
        assert values["twinkeel_store_losses_total"] == 0
        assert values["twinkeel_store_leases_total{'kind': 'session'}"] == 1
        assert values["twinkeel_store_round_trip_seconds_count"] >= 2
        took_s = time.monotonic() - began_s
        assert 0 < values["twinkeel_store_round_trip_seconds_sum"] < took_s

    play(server.url, 1, story)


# ---- the address ----


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://10.0.0.9:6379", "is no address of a Redis"),
        ("10.0.0.9:6379", "is no address of a Redis"),
        ("redis://", "is no address of a Redis"),
        ("redis://10.0.0.9:66000/0", "is no URL"),
    ],
)
def test_a_bad_address_is_told_at_the_start(url: str, said: str) -> None:
    with pytest.raises(FileError, match=said):
        make_settings(None, {"upstreams": ["http://10.0.0.7:8000"], "redis": url})


@pytest.mark.parametrize(
    "url", ["redis://10.0.0.9:6379/0", "rediss://:secret@cache:6380", "unix:///run/redis.sock"]
)
def test_an_address_is_taken(url: str) -> None:
    settings = make_settings(None, {"upstreams": ["http://10.0.0.7:8000"], "redis": url})
    assert settings.redis == url
    assert "secret" not in shown(url)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "redis.asyncio.connection", None)
    with pytest.raises(FileError, match=r"pip install 'twinkeel\[redis\]'"):
        make_settings(
            None, {"upstreams": ["http://10.0.0.7:8000"], "redis": "redis://10.0.0.9:6379/0"}
        )
