"""What is read of cards: through pynvml's own code, from a library that answers as told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pynvml  # type: ignore[import-untyped]
import pytest

from controller.gpus.nvml import GoneError, Happened, NoGpuError, Nvml, Reading
from tests.fleet.fakes import CUT, ECC_DOUBLE, LARGE_SLICE, SMALL_SLICES, WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from controller.gpus.nvml import Card
    from tests.fleet.fakes import FakeCards

NOT_SUPPORTED = 3
IDLE, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 1, 4, 8, 0x20, 0x40, 0x80


@pytest.fixture
def nvml(cards: FakeCards) -> Iterator[Nvml]:
    opened = Nvml()
    yield opened
    opened.close()


def card_of(nvml: Nvml, uuid: str) -> Card:
    return next(card for card in nvml.cards if card.uuid == uuid)


def read(nvml: Nvml, uuid: str = WHOLE) -> Reading:
    return nvml.read(card_of(nvml, uuid))[0][0]


def test_cards_are_found_with_what_they_are(nvml: Nvml) -> None:
    assert [card.uuid for card in nvml.cards] == [CUT, WHOLE]
    card = card_of(nvml, WHOLE)
    assert card.name == "NVIDIA H100 80GB HBM3"
    assert (card.bus, card.driver, card.capability) == ("00000000:43:00.0", "570.133.20", "9.0")


def test_only_the_cards_that_are_asked_for_are_touched(cards: FakeCards) -> None:
    nvml = Nvml(["00000000:43:00.0"])
    try:
        assert [card.uuid for card in nvml.cards] == [WHOLE]
    finally:
        nvml.close()


def test_slices_are_their_cards_and_have_their_own_memory(nvml: Nvml) -> None:
    told = nvml.read(card_of(nvml, CUT))
    parts = [part for _, part in told if part is not None]
    assert [part.uuid for part in parts] == [LARGE_SLICE, *SMALL_SLICES]
    assert [part.profile for part in parts] == ["3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb"]
    assert [part.instance for part in parts] == [2, 7, 8, 9]
    memory = [(reading.memory_total_mb, reading.memory_free_mb) for reading, _ in told]
    assert memory[:3] == [(81559, 60000), (40448, 39448), (9856, 8856)]
    # A MIG handle does not answer for its heat or its link: its card does.
    assert {reading.temperature_c for reading, _ in told} == {55}
    assert {reading.pcie_permille for reading, _ in told} == {99}


@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"])
def test_a_slice_that_vanishes_meanwhile_is_no_loss_of_the_card(
    cards: FakeCards, nvml: Nvml, function: str
) -> None:
    cards.fail(SMALL_SLICES[1], function, 15)
    told = [reading.uuid for reading, _ in nvml.read(card_of(nvml, CUT))]
    assert told == [CUT, LARGE_SLICE, SMALL_SLICES[0], SMALL_SLICES[2]]


def test_no_utilisation_is_told_in_mig_mode(nvml: Nvml) -> None:
    assert read(nvml, CUT).memory_busy_permille is None
    assert read(nvml, WHOLE).memory_busy_permille == 400


def test_all_figures_of_a_whole_card(nvml: Nvml) -> None:
    reading = read(nvml)
    assert (reading.memory_total_mb, reading.memory_free_mb) == (81559, 60000)
    assert (reading.pcie_rx_mb_s, reading.pcie_tx_mb_s) == (6300, 1000)
    assert reading.pcie_most_mb_s == 16 * 3938
    assert reading.pcie_permille == 99
    assert (reading.nvlinks_up, reading.nvlinks) == (18, 18)
    assert (reading.temperature_c, reading.slowdown_c, reading.heat_permille) == (55, 90, 416)
    assert (reading.power_w, reading.power_limit_w, reading.power_permille) == (350, 700, 500)
    assert (reading.clocks, reading.throttled) == ((), False)
    assert (reading.ecc_corrected, reading.ecc_uncorrected) == (0, 0)
    assert (reading.reset_pending, reading.recovery, reading.wrong) == (False, "none", "")


def test_a_link_that_is_down_is_seen(cards: FakeCards, nvml: Nvml) -> None:
    cards.set(WHOLE, nvlinks="110111")
    assert (read(nvml).nvlinks_up, read(nvml).nvlinks) == (5, 6)


@pytest.mark.parametrize(
    ("bits", "words", "throttled"),
    [
        (IDLE, ("idle",), False),
        (POWER_CAP, ("at its power limit",), False),
        (SW_THERMAL, ("too hot (driver)",), True),
        (HW_SLOWDOWN | HW_THERMAL, ("too hot (hardware)", "hardware slow-down"), True),
        (HW_SLOWDOWN | POWER_BRAKE, ("power brake", "hardware slow-down"), True),
        (IDLE | SW_THERMAL, ("too hot (driver)", "idle"), True),
    ],
)
def test_why_clocks_are_low(
    cards: FakeCards, nvml: Nvml, bits: int, words: tuple[str, ...], throttled: bool
) -> None:
    cards.set(WHOLE, clock_reasons=bits)
    reading = read(nvml)
    assert (reading.clocks, reading.throttled) == (words, throttled)


def test_heat_and_power_may_pass_their_limits(cards: FakeCards, nvml: Nvml) -> None:
    cards.set(WHOLE, temperature_c=96, power_mw=721_000)
    assert (read(nvml).heat_permille, read(nvml).power_permille) == (1100, 1030)
    cards.set(WHOLE, temperature_c=22)
    assert read(nvml).heat_permille == 0


def test_newer_cards_tell_how_far_it_is_to_the_slow_down(cards: FakeCards, nvml: Nvml) -> None:
    cards.set(WHOLE, slowdown_c=None, margin_c=30)
    assert (read(nvml).slowdown_c, read(nvml).heat_permille) == (85, 454)


@pytest.mark.parametrize(
    ("function", "figures"),
    [
        ("nvmlDeviceGetMemoryInfo", ("memory_total_mb", "memory_free_mb")),
        ("nvmlDeviceGetUtilizationRates", ("memory_busy_permille",)),
        ("nvmlDeviceGetPcieThroughput", ("pcie_rx_mb_s", "pcie_tx_mb_s", "pcie_permille")),
        ("nvmlDeviceGetMaxPcieLinkWidth", ("pcie_most_mb_s", "pcie_permille")),
        ("nvmlDeviceGetNvLinkState", ("nvlinks_up", "nvlinks")),
        ("nvmlDeviceGetTemperature", ("temperature_c", "heat_permille")),
        ("nvmlDeviceGetTemperatureThreshold", ("slowdown_c", "heat_permille")),
        ("nvmlDeviceGetPowerUsage", ("power_w", "power_permille")),
        ("nvmlDeviceGetEnforcedPowerLimit", ("power_limit_w", "power_permille")),
        ("nvmlDeviceGetCurrentClocksEventReasons", ("clocks", "throttled")),
        ("nvmlDeviceGetTotalEccErrors", ("ecc_corrected", "ecc_uncorrected")),
        ("nvmlDeviceGetFieldValues", ("recovery",)),
    ],
)
def test_what_a_card_cannot_tell_is_none(
    cards: FakeCards, nvml: Nvml, function: str, figures: tuple[str, ...]
) -> None:
    before = read(nvml)
    assert all(getattr(before, figure) is not None for figure in figures)
    cards.fail(WHOLE, function, NOT_SUPPORTED)
    reading = read(nvml)
    assert [getattr(reading, figure) for figure in figures] == [None] * len(figures)
    assert reading.memory_total_mb == (None if "Memory" in function else 81559)


def test_pages_stand_in_for_rows_on_older_cards(cards: FakeCards, nvml: Nvml) -> None:
    cards.set(WHOLE, remap_pending=1)
    assert read(nvml).reset_pending is True
    cards.set(WHOLE, remap_pending=None, pages_pending=1)
    assert read(nvml).reset_pending is True
    cards.set(WHOLE, pages_pending=None)
    assert read(nvml).reset_pending is None


def test_an_error_that_should_not_be_is_said_once(
    cards: FakeCards, nvml: Nvml, caplog: pytest.LogCaptureFixture
) -> None:
    cards.fail(WHOLE, "nvmlDeviceGetPowerUsage", 999)
    assert [read(nvml).power_w for _ in range(3)] == [None] * 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{WHOLE}: nvmlDeviceGetPowerUsage: Unknown Error"]


def test_a_card_that_is_lost_says_so(cards: FakeCards, nvml: Nvml) -> None:
    cards.set(WHOLE, lost=1)
    with pytest.raises(GoneError) as told:
        read(nvml)
    assert (told.value.uuid, told.value.lost) == (WHOLE, True)
    assert read(nvml, CUT).memory_total_mb == 81559


def test_a_card_that_must_be_reset_says_so(cards: FakeCards, nvml: Nvml) -> None:
    cards.fail(WHOLE, "nvmlDeviceGetMemoryInfo", 16)
    with pytest.raises(GoneError, match="must be reset") as told:
        read(nvml)
    assert not told.value.lost


def test_a_card_that_was_taken_out_is_not_found_again(cards: FakeCards) -> None:
    cards.remove(WHOLE)
    nvml = Nvml()
    try:
        assert [card.uuid for card in nvml.cards] == [CUT]
    finally:
        nvml.close()


def test_errors_are_told_by_the_card_itself(cards: FakeCards, nvml: Nvml) -> None:
    assert nvml.wait(0) is None
    cards.xid(WHOLE, 79)
    cards.event(CUT, ECC_DOUBLE)
    cards.xid(CUT, 13, instance=7)
    assert nvml.wait(0) == Happened(WHOLE, "xid", 79, None)
    assert nvml.wait(0) == Happened(CUT, "ecc_uncorrectable", 0, None)
    assert nvml.wait(0) == Happened(CUT, "xid", 13, 7)
    assert nvml.wait(0) is None


@pytest.mark.usefixtures("cards")
def test_a_machine_without_event_sets_is_read_all_the_same(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise pynvml.NVMLError(NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", refused)
    assert nvml.wait(1) is None
    assert read(nvml).memory_total_mb


def test_a_card_without_events_does_not_keep_others_from_theirs(cards: FakeCards) -> None:
    cards.set(CUT, event_types=None)
    nvml = Nvml()
    try:
        assert nvml.wait(0) is None
        cards.xid(CUT, 79)
        cards.xid(WHOLE, 48)
        assert nvml.wait(10) == Happened(WHOLE, "xid", 48, None)
    finally:
        nvml.close()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (18, "kernel module and its library are of different versions"),
        (9, "installed, and not loaded"),
        (12, r"libnvidia-ml\.so\.1 is not found"),
        (999, "NVML cannot be used: Unknown Error"),
    ],
)
def test_why_there_is_no_gpu(cards: FakeCards, code: int, why: str) -> None:
    cards.set("system", init=code)
    with pytest.raises(NoGpuError, match=why) as told:
        Nvml()
    assert "\n" not in str(told.value)


def test_a_driver_without_cards(cards: FakeCards) -> None:
    cards.remove(CUT)
    cards.remove(WHOLE)
    with pytest.raises(NoGpuError, match="sees no card"):
        Nvml()


def test_what_is_closed_lets_go_of_its_cards(
    cards: FakeCards, attached: Callable[[str], bool]
) -> None:
    nvml = Nvml()
    assert (attached(CUT), attached(WHOLE)) == (True, True)
    nvml.close()
    assert (attached(CUT), attached(WHOLE)) == (False, False)
    nvml = Nvml(["00000000:43:00.0"])
    assert (attached(CUT), attached(WHOLE)) == (False, True)
    nvml.close()
