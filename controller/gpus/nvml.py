"""What NVML says of this machine's cards; what follows from it is not decided here.

Cards and MIG slices are known by their UUIDs, never by an index: an index moves when a card is
gone, and of a MIG slice it gives the card. A slice answers for its memory only; everything else is
its card's. A figure that a card cannot give is None.

Nothing here waits or runs by itself, but any call may take seconds on a sick card: see ``asking``.
"""

from __future__ import annotations

import ctypes
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import pynvml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    T = TypeVar("T")

MIB = 1 << 20
XID_LOST = 79
"""The card has fallen off the bus."""
NO_INSTANCE = 0xFFFFFFFF
"""An event that is of no GPU instance."""
MB_S_PER_LANE = {1: 250, 2: 500, 3: 985, 4: 1969, 5: 3938, 6: 7563}
"""PCIe, one direction, by generation, after encoding."""
IDLE_C = 30
"""The temperature that counts as no heat."""
WANTED = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
"""Events that are waited for. Corrected errors come in storms: their counter is read instead."""

CANNOT = frozenset({
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA,
})  # fmt: skip
"""This card, this driver or this user does not get it; nothing is wrong."""
LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND})

REASONS: tuple[tuple[int, str, bool], ...] = (
    (pynvml.nvmlClocksEventReasonSwThermalSlowdown, "too hot (driver)", True),
    (pynvml.nvmlClocksEventReasonHwThermalSlowdown, "too hot (hardware)", True),
    (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, "power brake", True),
    (pynvml.nvmlClocksEventReasonHwSlowdown, "hardware slow-down", True),
    (pynvml.nvmlClocksEventReasonSwPowerCap, "at its power limit", False),
    (pynvml.nvmlClocksEventReasonGpuIdle, "idle", False),
    (pynvml.nvmlClocksEventReasonApplicationsClocksSetting, "clocks set by hand", False),
    (pynvml.nvmlClocksEventReasonSyncBoost, "in step with other cards", False),
    (pynvml.nvmlClocksEventReasonDisplayClockSetting, "display clocks", False),
)
"""Why clocks are not at their highest: bit, in words, and whether the card is throttled by it. At
its power limit a card under load does what it was bought for, as most do all day: that is in
``power_permille``, and to take it out of the rotation would leave the load to its peers."""
RECOVERY = (
    "none", "reset", "reboot", "drain peers", "drain and reset", "recover the fabric",
    "reset the bus", "reboot the system",
)  # fmt: skip
"""What the driver (560 or newer) asks for, by ``NVML_GPU_RECOVERY_ACTION_*``."""

LOGGER = logging.getLogger("twinkeel")


class NoGpuError(Exception):
    """There is nothing to read here: why, in a few words."""


class GoneError(Exception):
    """A card that does not answer any more.

    Args:
        uuid: of the card; empty: of one of them.
        lost: it has left the bus; False: it answers that it must be reset.
    """

    def __init__(self, uuid: str, lost: bool = True) -> None:
        super().__init__("it has left the bus" if lost else "it must be reset")
        self.uuid = uuid
        self.lost = lost


class Slice(msgspec.Struct, frozen=True):
    """A MIG slice, as it is now."""

    uuid: str
    profile: str
    """Such as ``1g.10gb``."""
    instance: int
    """Id of its GPU instance, by which events name it; -1: not told."""


class Card(msgspec.Struct, frozen=True):
    """A card of this machine."""

    uuid: str
    name: str
    bus: str
    """PCI address: what it is found by without a look at the others."""
    driver: str
    capability: str
    """Compute capability, such as ``9.0``; empty: not told."""


class Reading(msgspec.Struct, frozen=True):
    """What a card, or a slice of it, said at one moment. None: it does not tell."""

    uuid: str
    read_ns: int
    """On the monotonic clock."""
    memory_total_mb: int | None = None
    memory_free_mb: int | None = None
    memory_busy_permille: int | None = None
    """Share of time in which memory was read or written. No card in MIG mode tells it."""
    pcie_rx_mb_s: int | None = None
    pcie_tx_mb_s: int | None = None
    pcie_most_mb_s: int | None = None
    """What its link carries in one direction."""
    nvlinks_up: int | None = None
    nvlinks: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Where it lowers its clocks."""
    power_w: int | None = None
    power_limit_w: int | None = None
    clocks: tuple[str, ...] | None = None
    """Why its clocks are not at their highest, in words; empty: they are."""
    throttled: bool | None = None
    """It has lowered its clocks to protect itself, from heat or for want of power."""
    ecc_corrected: int | None = None
    """Since its last reset; so for the next."""
    ecc_uncorrected: int | None = None
    reset_pending: bool | None = None
    """It has rows to remap or pages to retire, which it does when it is reset."""
    recovery: str | None = None
    """What its driver asks for, one of ``RECOVERY``."""

    @property
    def pcie_permille(self) -> int | None:
        """Of the link's bandwidth, in the busier direction."""
        busier = [mb_s for mb_s in (self.pcie_rx_mb_s, self.pcie_tx_mb_s) if mb_s is not None]
        if not busier or not self.pcie_most_mb_s:
            return None
        return max(busier) * 1000 // self.pcie_most_mb_s

    @property
    def heat_permille(self) -> int | None:
        """Between idle (0) and where it slows down (1000)."""
        if self.temperature_c is None or self.slowdown_c is None or self.slowdown_c <= IDLE_C:
            return None
        return max(0, (self.temperature_c - IDLE_C) * 1000 // (self.slowdown_c - IDLE_C))

    @property
    def power_permille(self) -> int | None:
        """Of its limit."""
        if self.power_w is None or not self.power_limit_w:
            return None
        return self.power_w * 1000 // self.power_limit_w

    @property
    def asks(self) -> bool:
        """Its driver asks for a recovery."""
        return self.recovery not in (None, "none")

    @property
    def wrong(self) -> str:
        """What speaks against using it, if nothing else is known of it; empty: nothing. Of errors
        that it counted, the driver knows best whether they matter, where it says so."""
        errors = f"{self.ecc_uncorrected} uncorrectable ECC errors since its last reset"
        if self.asks:
            also = f", {errors}" if self.ecc_uncorrected else ""
            return f"the driver asks for: {self.recovery}{also}"
        return errors if self.recovery is None and self.ecc_uncorrected else ""


class Happened(msgspec.Struct, frozen=True):
    """An error that NVML told by itself."""

    uuid: str
    """Of the card."""
    kind: Literal["xid", "ecc_uncorrectable"]
    code: int = 0
    """The Xid."""
    instance: int | None = None
    """The GPU instance that it befell; None: the card."""


class Nvml:
    """NVML, opened; ``close`` it.

    Args:
        buses: PCI addresses of the cards to look at. The others are not touched, so they can be
            reset meanwhile. None: all there are.

    Raises:
        NoGpuError: there is no driver, or it does not work, or it sees no card.
    """

    def __init__(self, buses: Sequence[str] | None = None) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoGpuError(_why_none(error)) from error
        self._handles: dict[str, Any] = {}
        self._uuids: dict[int | None, str] = {}
        """By handle: a card that is lost cannot be asked for its name."""
        self._set: Any = None
        self._said: set[tuple[str, str]] = set()
        try:
            self.cards = tuple(self._find(buses))
            if buses is None and not self.cards:
                raise NoGpuError("the NVIDIA driver sees no card")
        except pynvml.NVMLError as error:
            self.close()
            raise NoGpuError(_why_none(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all cards."""
        with suppress(pynvml.NVMLError):
            if self._set is not None:
                pynvml.nvmlEventSetFree(self._set)
        self._set = None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    # Which there are

    def _find(self, buses: Sequence[str] | None) -> Iterator[Card]:
        driver = _ask("", pynvml.nvmlSystemGetDriverVersion) or ""
        get = pynvml.nvmlDeviceGetHandleByPciBusId
        every: Sequence[str] | range | None = buses
        if every is None:
            get = pynvml.nvmlDeviceGetHandleByIndex
            every = range(_ask("", pynvml.nvmlDeviceGetCount) or 0)
        for which in every:
            with suppress(GoneError):
                handle = _ask("", get, which)
                if handle is not None:
                    yield self._card(handle, driver)

    def _card(self, handle: Any, driver: str) -> Card:
        uuid: str = _ask("", pynvml.nvmlDeviceGetUUID, handle) or ""
        pci = _ask(uuid, pynvml.nvmlDeviceGetPciInfo, handle)
        capability = _ask(uuid, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        self._handles[uuid] = handle
        self._uuids[ctypes.cast(handle, ctypes.c_void_p).value] = uuid
        return Card(
            uuid, _ask(uuid, pynvml.nvmlDeviceGetName, handle) or "unknown",
            "" if pci is None else pci.busId, driver,
            "" if capability is None else ".".join(map(str, capability)),
        )  # fmt: skip

    def _slices(self, card: Card) -> Iterator[tuple[Slice, Any]]:
        handle = self._handles[card.uuid]
        mode = self._ask(card, pynvml.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for index in range(self._ask(card, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            found = self._ask(card, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if found is None:  # fewer than there could be
                continue
            with suppress(GoneError):  # it was taken away since
                uuid = self._ask(card, pynvml.nvmlDeviceGetUUID, found)
                name = self._ask(card, pynvml.nvmlDeviceGetName, found) or ""
                instance = self._ask(card, pynvml.nvmlDeviceGetGpuInstanceId, found)
                if uuid is not None:
                    profile = name.rpartition(" ")[2]
                    yield Slice(uuid, profile, -1 if instance is None else instance), found

    # What they say

    def read(self, card: Card) -> tuple[tuple[Reading, Slice | None], ...]:
        """Of the card, and of each of its slices.

        Raises:
            GoneError: it does not answer.
        """
        handle = self._handles[card.uuid]
        ask = self._ask
        lanes = ask(card, pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
        generation = ask(card, pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
        rx, tx = pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES
        busy = ask(card, pynvml.nvmlDeviceGetUtilizationRates, handle)
        temperature_c, slowdown_c = self._heat(card, handle)
        reasons = ask(card, pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        up, links = self._nvlinks(card, handle)
        whole = Reading(
            card.uuid, time.monotonic_ns(), *self._memory(card, handle),
            memory_busy_permille=None if busy is None else busy.memory * 10,
            pcie_rx_mb_s=_thousandth(ask(card, pynvml.nvmlDeviceGetPcieThroughput, handle, rx)),
            pcie_tx_mb_s=_thousandth(ask(card, pynvml.nvmlDeviceGetPcieThroughput, handle, tx)),
            pcie_most_mb_s=MB_S_PER_LANE.get(generation or 0, 0) * (lanes or 0) or None,
            nvlinks_up=up,
            nvlinks=links,
            temperature_c=temperature_c,
            slowdown_c=slowdown_c,
            power_w=_thousandth(ask(card, pynvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_thousandth(ask(card, pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            clocks=None if reasons is None else tuple(w for b, w, _ in REASONS if reasons & b),
            throttled=None if reasons is None else any(reasons & b for b, _, p in REASONS if p),
            ecc_corrected=self._ecc(card, handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(card, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            reset_pending=self._pending(card, handle),
            recovery=self._recovery(card, handle),
        )  # fmt: skip
        told: list[tuple[Reading, Slice | None]] = [(whole, None)]
        for found, part in self._slices(card):
            with suppress(GoneError):
                total_mb, free_mb = self._memory(card, part)
                told.append((
                    msgspec.structs.replace(
                        whole, uuid=found.uuid, memory_total_mb=total_mb, memory_free_mb=free_mb
                    ), found,
                ))  # fmt: skip
        return tuple(told)

    def _memory(self, card: Card, handle: Any) -> tuple[int | None, int | None]:
        memory = self._ask(card, pynvml.nvmlDeviceGetMemoryInfo, handle)
        return (None, None) if memory is None else (memory.total // MIB, memory.free // MIB)

    def _heat(self, card: Card, handle: Any) -> tuple[int | None, int | None]:
        """Now, and where it slows down, which newer cards tell as what is left until there."""
        sensor = pynvml.NVML_TEMPERATURE_GPU
        now_c = self._ask(card, pynvml.nvmlDeviceGetTemperature, handle, sensor)
        slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        most_c = self._ask(card, pynvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown)
        if not most_c and now_c is not None:
            margin_c = self._ask(card, pynvml.nvmlDeviceGetMarginTemperature, handle)
            most_c = None if margin_c is None else now_c + margin_c
        return now_c, most_c

    def _nvlinks(self, card: Card, handle: Any) -> tuple[int | None, int | None]:
        """How many are up, of how many."""
        states = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask(card, pynvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None:
                break
            states.append(state)
        return (sum(states), len(states)) if states else (None, None)

    def _ecc(self, card: Card, handle: Any, kind: int) -> int | None:
        volatile = pynvml.NVML_VOLATILE_ECC
        return self._ask(card, pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, volatile)

    def _pending(self, card: Card, handle: Any) -> bool | None:
        """Rows since Ampere, pages before it."""
        rows = self._ask(card, pynvml.nvmlDeviceGetRemappedRows, handle)
        if rows is not None:
            return bool(rows[2])
        pages = self._ask(card, pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        return None if pages is None else bool(pages)

    def _recovery(self, card: Card, handle: Any) -> str | None:
        field = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        values = self._ask(card, pynvml.nvmlDeviceGetFieldValues, handle, [field])
        if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        action = values[0].value.uiVal
        return RECOVERY[action] if action < len(RECOVERY) else f"action {action}"

    def near(self, one: Card, other: Card) -> tuple[bool, int | None]:
        """Whether NVLink joins them, and the level of the topology at which they meet
        (``NVML_TOPOLOGY_*``); None: not told.

        Raises:
            GoneError: one of them does not answer.
        """
        handles = self._handles[one.uuid], self._handles[other.uuid]
        index = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = self._ask(one, pynvml.nvmlDeviceGetP2PStatus, *handles, index)
        level = self._ask(one, pynvml.nvmlDeviceGetTopologyCommonAncestor, *handles)
        return status == pynvml.NVML_P2P_STATUS_OK, level

    # What they tell by themselves

    def wait(self, ms: int) -> Happened | None:
        """The next error that a card tells, waited for at most so long.

        Raises:
            GoneError: a card does not answer any more, without saying which.
        """
        try:
            if self._set is None:
                self._set = self._listen()
            data = pynvml.nvmlEventSetWait(self._set, ms)
        except pynvml.NVMLError as error:
            if error.value in LOST:
                raise GoneError("") from error
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                self._say("", "nvmlEventSetWait", error)  # counters tell as well, a little later
                time.sleep(ms / 1000)  # it would fail again at once
            return None
        uuid = self._uuids.get(ctypes.cast(data.device, ctypes.c_void_p).value, "")
        instance = None if data.gpuInstanceId == NO_INSTANCE else data.gpuInstanceId
        if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
            return Happened(uuid, "xid", data.eventData, instance)
        return Happened(uuid, "ecc_uncorrectable", 0, instance)

    def _listen(self) -> Any:
        made = pynvml.nvmlEventSetCreate()
        for card in self.cards:
            handle = self._handles[card.uuid]
            with suppress(GoneError):
                types = self._ask(card, pynvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
                if types & WANTED:
                    self._ask(card, pynvml.nvmlDeviceRegisterEvents, handle, types & WANTED, made)
        return made

    def _ask(self, card: Card, function: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return _ask(card.uuid, function, *arguments)
        except pynvml.NVMLError as error:
            self._say(card.uuid, function.__name__, error)
            return None

    def _say(self, uuid: str, function: str, error: Exception) -> None:
        """What should not be, once."""
        if (uuid, function) not in self._said:
            self._said.add((uuid, function))
            LOGGER.warning("%s: %s: %s", uuid or "NVML", function, error)


def _ask(uuid: str, function: Callable[..., T], *arguments: Any) -> T | None:
    """None: it cannot be had."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in LOST:
            raise GoneError(uuid) from error
        if error.value == pynvml.NVML_ERROR_RESET_REQUIRED:
            raise GoneError(uuid, lost=False) from error
        if error.value in CANNOT:
            return None
        raise


def _why_none(error: pynvml.NVMLError) -> str:
    mismatch = (
        "the NVIDIA driver's kernel module and its library are of different versions: load the"
        " module of the new driver, or restart the machine"
    )
    reasons = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver (libnvidia-ml.so.1 is not found)",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed, and not loaded",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: mismatch,
    }
    return reasons.get(error.value, f"NVML cannot be used: {error}")


def _thousandth(value: int | None) -> int | None:
    return None if value is None else value // 1000
