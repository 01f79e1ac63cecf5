"""Cards before a real driver and policy: readings, faults, what follows, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop

from controller.gpus.nvml import Nvml, Reading
from controller.gpus.watching import GpuWatch, Times, event_of
from controller.listener import Listener
from policy.decisions import Rotated
from policy.events import GpuFault, GpuRead
from tests.core_support import Core, Server, core
from tests.fleet.fakes import CUT, ECC_DOUBLE, LARGE_SLICE, SMALL_SLICES, STATE_VARIABLE, WHOLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from policy.events import Event
    from tests.fleet.fakes import FakeCards

ON_WHOLE, ON_LARGE, ON_SMALL, ON_BOTH = range(4)
SEATS = {
    ON_WHOLE: (WHOLE,), ON_LARGE: (LARGE_SLICE,), ON_SMALL: (SMALL_SLICES[0],),
    ON_BOTH: (WHOLE, CUT),
}  # fmt: skip
QUICK = Times(read_s=0.1, hung_s=3.0, recheck_s=0.4, settle_s=0.5, begin_s=30.0)
"""A thread that has no turn for a while does not hang."""
SETTLING = msgspec.structs.replace(QUICK, settle_s=3.0)
"""Nor is a card's counter later than its error because of that."""
ISOLATED_S_MOST = 1.0
FED_S_MOST = 0.3
TRIES = 4
"""At any of them this process may have no turn."""
WITHIN_S = 30.0


class _Looked(Listener):
    """Readings that the policy was told, and when they were made."""

    def __init__(self) -> None:
        self.readings: list[tuple[int, GpuRead]] = []

    def fed(self, now_ns: int, event: Event) -> None:
        if isinstance(event, GpuRead):
            self.readings.append((time.monotonic_ns() - event.age_ns, event))


class Watched:
    """A driver with four replicas, which sit on the cards of ``SEATS``, and who watches these."""

    def __init__(self, running: Core) -> None:
        self.core = running
        self.driver = running.driver
        self.watch: GpuWatch
        self.broken: list[tuple[str, str]] = []
        self.well: list[str] = []
        self.looked = _Looked()
        self.driver.listen(self.looked)

    async def until(self, true: Callable[[], object]) -> None:
        await self.core.until(true, WITHIN_S)

    def faults(self) -> list[GpuFault]:
        return self.core.events(GpuFault)

    def told(self) -> list[tuple[int, str, int]]:
        return [(fault.replica, fault.kind, fault.code) for fault in self.faults()]

    def isolated(self) -> dict[int, str]:
        return {
            decision.replica: decision.why
            for record in self.core.records()
            for decision in record.decisions
            if isinstance(decision, Rotated) and decision.state == "isolated"
        }

    def readings(self, replica: int) -> list[GpuRead]:
        return [event for event in self.core.events(GpuRead) if event.replica == replica]

    async def next_reading(self, replica: int) -> GpuRead:
        """One that was made after this moment: the one after the next, since that may have been
        under way; what has been made, and not told yet, is older."""
        since_ns = time.monotonic_ns()

        def later() -> list[GpuRead]:
            return [event for made_ns, event in self.looked.readings
                    if event.replica == replica and made_ns > since_ns]  # fmt: skip

        await self.until(lambda: len(later()) >= 2)
        return later()[-1]

    async def asks_of(self, uuid: str) -> None:
        """A question about that card is under way, and hangs."""

        def asks() -> bool:
            turn = self.watch._asker._turn
            busy = None if turn is None else turn.busy
            return busy is not None and busy[0] == uuid and time.monotonic_ns() - busy[1] > 10**8

        await self.until(asks)

    async def stays(self, same: Callable[[], object], s: float = 0.5) -> None:
        before = same()
        await asyncio.sleep(s)
        assert same() == before


@contextlib.asynccontextmanager
async def watched(times: Times = QUICK, seats: dict[int, Any] = SEATS) -> AsyncIterator[Watched]:
    async with core(*(Server() for _ in SEATS)) as running:
        made = Watched(running)
        made.watch = GpuWatch(
            running.driver, seats, lambda uuid, why: made.broken.append((uuid, why)),
            made.well.append, times,
        )  # fmt: skip
        await made.watch.begin()
        try:
            yield made
        finally:
            await made.watch.close()


def run(test: Callable[[Watched], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(3 * WITHIN_S), watched(**options) as made:
            await test(made)

    uvloop.run(main())


# Readings


@pytest.mark.usefixtures("cards")
def test_the_policy_is_told_what_the_cards_of_each_replica_say() -> None:
    async def test(made: Watched) -> None:
        reading = await made.next_reading(ON_WHOLE)
        assert reading == GpuRead(ON_WHOLE, 60000, 99, 400, 416, 500, False, reading.age_ns)
        assert all(event.age_ns >= 0 for event in made.readings(ON_WHOLE))
        await made.until(lambda: made.readings(ON_WHOLE)[-1].age_ns < 1_000_000_000)
        # A slice's memory is its own; heat and power are its card's; a card that is cut tells no
        # utilisation, which is no load.
        reading = await made.next_reading(ON_SMALL)
        assert reading == GpuRead(ON_SMALL, 8856, 99, 0, 416, 500, False, reading.age_ns)
        assert made.told() == []

    run(test)


def test_heat_and_throttling_reach_everything_on_the_card(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.set(CUT, temperature_c=93, clock_reasons=0x40, power_mw=690_000)
        hot = await made.next_reading(ON_LARGE)
        assert (hot.heat_permille, hot.power_permille, hot.throttled) == (1050, 985, True)
        both = await made.next_reading(ON_BOTH)
        assert (both.heat_permille, both.throttled) == (1050, True)
        assert not (await made.next_reading(ON_WHOLE)).throttled
        cards.set(CUT, temperature_c=60, clock_reasons=1)
        assert not (await made.next_reading(ON_LARGE)).throttled

    run(test)


def test_of_several_cards_the_worst_figure_counts_and_of_none_nothing() -> None:
    one = Reading("a", 5, memory_free_mb=100, temperature_c=60, slowdown_c=90, throttled=False)
    other = Reading("b", 7, memory_free_mb=50, power_w=9000, power_limit_w=700, throttled=None)
    assert event_of(3, [one, other], 11) == GpuRead(3, 50, 0, 0, 500, 2000, False, 6)
    assert event_of(3, [], 11) == GpuRead(3, 0, 0, 0, 0, 0, False, 0)


@pytest.mark.usefixtures("cards")
def test_replicas_that_are_down_are_not_told_of() -> None:
    async def test(made: Watched) -> None:
        made.core.down(ON_LARGE)
        await made.stays(lambda: len(made.readings(ON_LARGE)), 0.3)
        assert made.driver.refused == 0

    run(test)


def test_where_a_replica_sits_is_known_before_it_is_looked_for(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        placed = [replica.placed for replica in made.driver.replicas.values()]
        assert placed == [(1000, 81559), (1000, 40448), (1000, 9856), (1000, 2 * 81559)]
        assert made.watch.placed(()) is None
        assert made.watch.placed((WHOLE, "GPU-0")) is None

    run(test)

    async def far(made: Watched) -> None:
        assert made.driver.replicas[ON_BOTH].placed == (200, 2 * 81559)

    cards.set(WHOLE, **{f"nvlink.{CUT}": None})
    run(far)


# Faults


@pytest.mark.parametrize("code", [46, 48, 74, 109, 110, 136, 140, 143, 155, 156, 158])
def test_a_fatal_xid_takes_the_card_out(cards: FakeCards, code: int) -> None:
    async def test(made: Watched) -> None:
        cards.xid(WHOLE, code)
        await made.until(lambda: made.broken)
        assert made.told() == [(ON_WHOLE, "xid_fatal", code), (ON_BOTH, "xid_fatal", code)]
        assert made.isolated() == {ON_WHOLE: "xid_fatal", ON_BOTH: "xid_fatal"}
        [(uuid, why)] = made.broken
        assert (uuid, f"Xid {code}: " in why) == (WHOLE, True)
        assert made.watch.broken((WHOLE,)) == made.watch.broken((CUT, WHOLE)) == why
        assert made.watch.broken((LARGE_SLICE,)) == ""

    run(test)


def test_an_xid_of_an_application_breaks_nothing(cards: FakeCards) -> None:
    codes = (13, 31, 43, 45, 63, 92, 7777)

    async def test(made: Watched) -> None:
        for code in codes:
            cards.xid(WHOLE, code)
        await made.until(lambda: len(made.faults()) == 2 * len(codes))
        assert made.told()[:2] == [(ON_WHOLE, "xid_minor", 13), (ON_BOTH, "xid_minor", 13)]
        assert {(kind, code) for _, kind, code in made.told()} == {
            ("xid_minor", code) for code in codes
        }
        await made.stays(lambda: (made.isolated(), list(made.broken), len(made.faults())), 0.3)
        assert (made.isolated(), made.broken) == ({}, [])
        [view] = [view for view in made.watch.views() if view.uuid == WHOLE]
        assert (view.last_xid, view.broken) == (7777, "")

    run(test)


def test_an_uncorrectable_error_isolates_within_a_second(cards: FakeCards) -> None:
    """With the real intervals: the event does not wait for the next reading."""
    tries_s: list[tuple[float, float]] = []

    async def test(made: Watched) -> None:
        begun_s = time.monotonic()
        cards.event(WHOLE, ECC_DOUBLE)
        await made.until(made.faults)
        fed_s = time.monotonic() - begun_s
        await made.until(made.isolated)
        tries_s.append((fed_s, time.monotonic() - begun_s))
        assert made.isolated() == {ON_WHOLE: "ecc_uncorrectable", ON_BOTH: "ecc_uncorrectable"}
        cards.set(WHOLE, ecc_uncorrected=1)  # the same one, counted
        cards.xid(WHOLE, 48)  # and told once more
        await made.stays(lambda: len(made.faults()), 1.5)
        assert made.broken == [(WHOLE, "uncorrectable ECC error")]

    for _ in range(TRIES):
        cards.set(WHOLE, ecc_uncorrected=0)
        run(test, times=Times())
        fed_s, isolated_s = tries_s[-1]
        if fed_s < FED_S_MOST and isolated_s < ISOLATED_S_MOST:
            return
    raise AssertionError(f"fed and isolated after so many seconds: {tries_s}")


def test_what_is_only_counted_is_told_as_well(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.set(WHOLE, ecc_corrected=3)
        await made.until(made.faults)
        assert made.told() == [(ON_WHOLE, "ecc_correctable", 0), (ON_BOTH, "ecc_correctable", 0)]
        await made.stays(lambda: len(made.faults()), 0.3)
        assert made.isolated() == {}
        cards.set(WHOLE, ecc_uncorrected=2)
        await made.until(made.isolated)
        assert made.told()[2:] == [
            (ON_WHOLE, "ecc_uncorrectable", 0), (ON_BOTH, "ecc_uncorrectable", 0),
        ]  # fmt: skip
        await made.stays(lambda: len(made.faults()), 0.3)

    run(test)


def test_the_driver_asks_for_a_reset(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.set(WHOLE, recovery_action=1)
        await made.until(made.isolated)
        assert made.told()[0] == (ON_WHOLE, "xid_fatal", 154)
        assert made.broken == [(WHOLE, "the driver asks for: reset")]

    run(test)


def test_a_cards_fault_hits_all_its_slices_and_a_slices_only_that(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.xid(CUT, 95, instance=7)
        await made.until(made.faults)
        assert made.told() == [(ON_SMALL, "xid_fatal", 95)]
        assert made.broken[0][0] == SMALL_SLICES[0]
        cards.set(CUT, ecc_uncorrected=1)  # the same error, which the card counts
        await made.stays(lambda: len(made.faults()), 0.3)
        cards.xid(CUT, 79)
        await made.until(lambda: len(made.broken) > 1)
        assert made.told()[1:] == [(ON_LARGE, "xid_fatal", 79), (ON_BOTH, "xid_fatal", 79)]
        assert [uuid for uuid, _ in made.broken[1:]] == [CUT, LARGE_SLICE, *SMALL_SLICES]
        assert made.watch.broken((LARGE_SLICE,)) == "Xid 79: it has fallen off the bus"

    run(test, times=SETTLING)


def test_a_contained_error_costs_whoever_ran_there_and_not_the_card(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.xid(CUT, 94, instance=2, ecc_uncorrected=1)
        await made.until(lambda: made.well)
        assert made.told() == [(ON_LARGE, "xid_fatal", 94)]
        assert made.well == [LARGE_SLICE]
        assert made.watch.broken((LARGE_SLICE, CUT)) == ""

    run(test, times=SETTLING)


def test_what_a_card_told_comes_before_what_it_counted(cards: FakeCards) -> None:
    """Else a slice's error would be taken for its card's."""

    async def test(made: Watched) -> None:
        cards.set(CUT, hang=1)
        await made.asks_of(CUT)
        cards.xid(CUT, 95, instance=2)
        cards.set(CUT, ecc_uncorrected=1)
        cards.set(CUT, hang=0)
        await made.until(made.faults)
        await made.stays(lambda: len(made.faults()), 0.3)
        assert made.told() == [(ON_LARGE, "xid_fatal", 95)]

    run(test, times=SETTLING)


def test_a_card_that_leaves_the_bus(cards: FakeCards) -> None:
    tries_s: list[float] = []

    async def test(made: Watched) -> None:
        begun_s = time.monotonic()
        cards.set(CUT, lost=1)
        await made.until(made.faults)
        tries_s.append(time.monotonic() - begun_s)
        assert [told[0] for told in made.told()] == [ON_LARGE, ON_SMALL, ON_BOTH]
        assert {told[1:] for told in made.told()} == {("xid_fatal", 79)}
        await made.stays(lambda: len(made.faults()), 0.5)
        views = {view.uuid: view for view in made.watch.views()}
        assert views[CUT].read_ms_ago is None
        assert views[LARGE_SLICE].broken == "it has left the bus"
        assert (await made.next_reading(ON_WHOLE)).free_mb == 60000  # others are read
        cards.xid(WHOLE, 48)  # and heard
        await made.until(lambda: made.broken[-1][0] == WHOLE)

    for _ in range(TRIES):
        cards.set(CUT, lost=None)
        run(test, times=Times(settle_s=0.5))
        if tries_s[-1] < FED_S_MOST:
            return
    raise AssertionError(f"known after so many seconds: {tries_s}")


def test_a_card_that_is_taken_out(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.remove(WHOLE)
        await made.until(made.faults)
        assert made.told() == [(ON_WHOLE, "xid_fatal", 79), (ON_BOTH, "xid_fatal", 79)]

    run(test)


def test_a_replica_that_comes_up_on_a_broken_card_does_not_stay(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        made.core.down(ON_WHOLE)
        cards.xid(WHOLE, 48)
        await made.until(lambda: made.broken)
        assert made.told() == [(ON_BOTH, "xid_fatal", 48)]
        made.core.up(ON_WHOLE)
        await made.until(lambda: len(made.faults()) == 2)
        assert made.isolated() == {ON_BOTH: "xid_fatal", ON_WHOLE: "xid_fatal"}

    run(test)


def test_a_card_that_was_broken_before_is_known_at_the_start(cards: FakeCards) -> None:
    cards.set(WHOLE, ecc_uncorrected=4, recovery_action=None)

    async def test(made: Watched) -> None:
        await made.until(made.isolated)
        assert made.broken == [(WHOLE, "4 uncorrectable ECC errors since its last reset")]

    run(test)
    # Where the driver says that they do not matter, they do not.
    cards.set(WHOLE, recovery_action=0)

    async def well(made: Watched) -> None:
        await made.next_reading(ON_WHOLE)
        assert made.broken == []

    run(well)


# The way back


async def _broken(made: Watched, cards: FakeCards, attached: Callable[[str], bool]) -> None:
    """The whole card breaks, and is let go so that it can be reset."""
    cards.event(WHOLE, ECC_DOUBLE, ecc_uncorrected=1)
    await made.until(lambda: made.broken)
    await made.until(lambda: attached(CUT) and not attached(WHOLE))
    await made.until(lambda: made.watch._broken[WHOLE].uncorrected)  # it has seen the counter


def test_a_card_that_was_reset_comes_back(
    cards: FakeCards, attached: Callable[[str], bool]
) -> None:
    async def test(made: Watched) -> None:
        await _broken(made, cards, attached)
        await made.stays(lambda: list(made.well), 1.0)
        cards.set(WHOLE, ecc_uncorrected=0)
        await made.until(lambda: made.well)
        assert made.well == [WHOLE]
        assert made.watch.broken((WHOLE,)) == ""
        made.core.down(ON_WHOLE)
        made.core.up(ON_WHOLE)
        assert (await made.next_reading(ON_WHOLE)).free_mb == 60000
        assert len(made.faults()) == 2
        cards.xid(WHOLE, 79)  # it can break again
        await made.until(lambda: len(made.broken) == 2)

    run(test)


def test_a_card_that_comes_back_to_the_bus(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        facts = cards.remove(CUT)
        await made.until(lambda: made.broken)
        await made.stays(lambda: list(made.well), 1.0)
        cards.set(CUT, **facts)
        await made.until(lambda: made.well)
        assert made.well == [CUT, LARGE_SLICE, *SMALL_SLICES]

    run(test)


def test_a_card_without_a_sign_of_a_reset_waits_for_somebody(
    cards: FakeCards, attached: Callable[[str], bool]
) -> None:
    async def test(made: Watched) -> None:
        cards.xid(WHOLE, 74)
        await made.until(lambda: made.broken and not attached(WHOLE))
        await made.stays(lambda: list(made.well), 1.5)
        assert not made.watch.restore(CUT)
        assert made.watch.restore(WHOLE)
        assert made.well == [WHOLE]
        assert not made.watch.restore(WHOLE)

    run(test)


def test_a_reset_that_left_rows_to_remap_is_not_enough(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.set(WHOLE, recovery_action=4, ecc_uncorrected=1, remap_pending=1)
        await made.until(lambda: made.broken)
        cards.set(WHOLE, recovery_action=0, ecc_uncorrected=0)
        await made.stays(lambda: list(made.well), 1.0)
        cards.set(WHOLE, remap_pending=0)
        await made.until(lambda: made.well)

    run(test)


# NVML itself


def test_a_call_that_hangs_is_told_and_holds_up_nobody_else(
    cards: FakeCards, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(made: Watched) -> None:
        cards.set(CUT, hang=1)
        await made.asks_of(CUT)
        turns_s: list[float] = []
        while len(turns_s) < 50:  # the loop goes on
            before_s = time.monotonic()
            await asyncio.sleep(0.01)
            turns_s.append(time.monotonic() - before_s)
        assert statistics.median(turns_s) < 0.25
        await made.until(lambda: f"NVML has not answered a question about {CUT}" in caplog.text)
        assert (await made.next_reading(ON_WHOLE)).free_mb == 60000
        await made.stays(lambda: len(made.readings(ON_LARGE)), 0.3)
        cards.xid(WHOLE, 48)
        await made.until(lambda: made.broken)
        cards.set(CUT, hang=0)
        assert (await made.next_reading(ON_LARGE)).free_mb == 39448

    run(test)


@pytest.mark.parametrize("read", [True, False])
def test_each_time_that_all_of_it_hangs_is_told(
    read: bool,
    cards: FakeCards,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while no card is read: nothing else tells then that it answers again."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("controller.driver.TROUBLE_AGAIN_NS", 0)

    def told(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    async def test(made: Watched) -> None:
        try:
            for uuid in () if read else (WHOLE, CUT):
                made.watch._asker.let_go(uuid)
            await asyncio.sleep(0.3)
            for times in (1, 2):
                cards.set("system", hang=1)
                await made.until(lambda: told("NVML has not answered a question for") == times)  # noqa: B023
                await asyncio.sleep(0.5)
                assert told("NVML answers again") == times - 1
                cards.set("system", hang=0)
                await made.until(lambda: told("NVML answers again") == times)  # noqa: B023
                if read:
                    assert (await made.next_reading(ON_WHOLE)).free_mb == 60000
        finally:
            cards.set("system", hang=0)
        assert told("NVML has not answered a question for") == 2

    run(test)


def test_a_card_that_hangs_forever_does_not_keep_the_controller(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        cards.set(CUT, hang=1)
        await made.asks_of(CUT)
        async with asyncio.timeout(WITHIN_S):  # it hangs until it is told not to
            await made.watch.close()
        cards.set(CUT, hang=0)

    run(test)


def _nothing_known(made: Watched) -> None:
    assert made.watch.views() == ()
    assert made.watch.placed((WHOLE,)) is None
    assert made.watch.broken((WHOLE,)) == ""
    assert [replica.placed for replica in made.driver.replicas.values()] == [None] * 4


@pytest.mark.parametrize(
    ("code", "why"),
    [(12, "no NVIDIA driver"), (18, "kernel module and its library are of different versions")],
)
def test_without_a_gpu_one_line_says_so(
    cards: FakeCards, caplog: pytest.LogCaptureFixture, code: int, why: str
) -> None:
    async def test(made: Watched) -> None:
        await asyncio.sleep(0.6)
        _nothing_known(made)
        said = [r for r in caplog.records if "GPU" in r.getMessage() or "NVML" in r.getMessage()]
        assert [record.levelno for record in said] == [logging.INFO]
        assert said[0].getMessage().startswith("no GPU here: ")
        assert why in said[0].getMessage()

    caplog.set_level(logging.INFO)
    cards.set("system", init=code)
    run(test)


@pytest.mark.usefixtures("cards")
def test_without_a_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: Watched) -> None:
        _nothing_known(made)

    monkeypatch.delenv(STATE_VARIABLE)
    run(test)


@pytest.mark.usefixtures("cards")
def test_a_watch_that_ends_by_a_fault_of_ours_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(made: Watched) -> None:
        monkeypatch.setattr(Nvml, "read", lambda self, card: 1 // 0)
        await made.until(lambda: "gpu: the cards are not watched any more" in caplog.text)
        assert "ZeroDivisionError" in caplog.text

    run(test)


@pytest.mark.usefixtures("cards")
def test_a_seat_that_is_not_there_is_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async def test(made: Watched) -> None:
        assert "gpu MIG-0: 127.0.0.1:" in caplog.text
        assert "no such card or slice: nvidia-smi -L" in caplog.text

    run(test, seats={0: (WHOLE,), 1: ("MIG-0",)})


def test_slices_that_are_cut_anew_are_followed(cards: FakeCards) -> None:
    async def test(made: Watched) -> None:
        facts = cards.remove(SMALL_SLICES[2])
        await made.until(lambda: len(made.watch.views()) == 5)
        await made.stays(lambda: list(made.broken), 0.3)
        cards.set(SMALL_SLICES[2], **facts)
        await made.until(lambda: len(made.watch.views()) == 6)
        assert made.faults() == []

    run(test)
