"""Alerts as whoever listens at the other end gets them."""

from __future__ import annotations

import asyncio
import time

from controller.telemetry.webhook import QUEUE_MOST, Webhook
from policy.decisions import Alert, BreakerMoved, Rotated
from tests.telemetry_servers import Pager, until
from tests.telemetry_support import S

AT_NS = 1_700_000_000 * S + 250_000_000
ALERT = Alert("replica 0", "ejected: silent", (("in_flight", 3), ("bad", 2)), "out of rotation")


def webhook(url: str, moves: bool = False) -> Webhook:
    return Webhook(url, "gw-1:8080", lambda: "stable", lambda: AT_NS, moves, (0.05, 0.05))


def test_an_alert_arrives_with_cause_figures_and_action() -> None:
    async def run() -> Pager:
        async with Pager() as pager:
            of = webhook(pager.url)
            await of.start()
            of.decided(ALERT)
            of.decided(BreakerMoved("k", "open", "share"))
            await until(lambda: of.counts().sent == 1)
            await of.close()
            assert of.counts() == (1, 0, 0)
        return pager

    ((body, key),) = asyncio.run(run()).got
    assert body == {
        "key": "replica 0", "cause": "ejected: silent", "figures": {"in_flight": 3, "bad": 2},
        "action": "out of rotation", "at": "2023-11-14T22:13:20.250+00:00",
        "controller": "gw-1:8080", "policy": "stable",
    }  # fmt: skip
    assert len(key) == 32


def test_it_is_tried_again_under_the_same_key() -> None:
    async def run() -> Pager:
        async with Pager(503, 429) as pager:
            of = webhook(pager.url)
            await of.start()
            of.decided(ALERT)
            of.decided(ALERT)  # the policy says it again: that is another alert
            await until(lambda: of.counts().sent == 2)
            await of.close()
        return pager

    keys = [key for _, key in asyncio.run(run()).got]
    assert len(keys) == 4
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]


def test_after_three_tries_or_a_plain_no_it_is_given_up_and_the_next_goes_out() -> None:
    async def run() -> None:
        async with Pager(500, 500, 500, 404) as pager:
            of = webhook(pager.url)
            await of.start()
            for _ in range(3):
                of.decided(ALERT)
            await until(lambda: of.counts().sent == 1)
            await of.close()
            assert of.counts() == (1, 2, 0)
            assert len(pager.got) == 5

    asyncio.run(run())


def test_breakers_and_isolations_only_where_they_are_asked_for() -> None:
    async def run() -> Pager:
        async with Pager() as pager:
            of = webhook(pager.url, moves=True)
            await of.start()
            of.decided(BreakerMoved("errors model=q", "open", "share", 5, 100))
            of.decided(BreakerMoved("errors model=q", "closed", "probes"))
            of.decided(Rotated(2, "isolated", "ecc"))
            of.decided(Rotated(2, "ejected", "silent"))
            await of.close()
        return pager

    first, second = [body for body, _ in asyncio.run(run()).got]
    assert (first["key"], first["figures"]) == ("breaker errors model=q", {"bad": 5, "total": 100})
    assert (second["key"], second["cause"]) == ("replica 2", "isolated: ecc")


def test_it_never_waits_and_drops_the_oldest() -> None:
    async def run() -> None:
        wait = asyncio.Event()
        async with Pager(wait=wait) as pager:
            of = webhook(pager.url)
            await of.start()
            of.decided(ALERT)
            await until(lambda: len(pager.got) == 1)
            began_s = time.monotonic()
            for number in range(QUEUE_MOST + 7):
                of.decided(Alert(f"k {number}", "x"))
            assert time.monotonic() - began_s < 2.0
            assert of.counts() == (0, 0, 7)
            wait.set()
            await until(lambda: of.counts().sent == QUEUE_MOST + 1)
            await of.close()
            assert pager.got[1][0]["key"] == "k 7"

    asyncio.run(run())


def test_the_end_does_not_wait_for_who_does_not_answer() -> None:
    async def run() -> None:
        wait = asyncio.Event()
        async with Pager(wait=wait) as pager:
            of = webhook(pager.url)
            await of.start()
            of.decided(ALERT)
            of.decided(ALERT)
            began_s = time.monotonic()
            await of.close()
            assert 1.9 < time.monotonic() - began_s < 3.0
            assert of.counts() == (0, 2, 0)
            wait.set()

    asyncio.run(run())


def test_nobody_there_is_no_trouble_and_no_address_is_nothing_to_do() -> None:
    async def run() -> None:
        of = webhook("http://127.0.0.1:9/hook")
        await of.start()
        of.decided(ALERT)
        await until(lambda: of.counts().failed == 1)
        await of.close()
        off = webhook("")
        await off.start()
        off.decided(ALERT)
        await off.close()
        assert off.counts() == (0, 0, 0)

    asyncio.run(run())
