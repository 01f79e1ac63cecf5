"""The part of NVML that cuts a card: how it is cut now, who uses it, and carrying out a plan.

Everything is asked by UUID: the numbers of cards and slices change. Reading how a card could be cut
and cutting it needs root; which slices there are does not.
"""

from __future__ import annotations

from contextlib import contextmanager
from ctypes import byref, c_uint
from typing import TYPE_CHECKING, Any, NamedTuple

import pynvml  # type: ignore[import-untyped]

from controller.gpus.mig import (
    GPU,
    Card,
    Create,
    Destroy,
    DestroyCompute,
    Enable,
    Fill,
    Instance,
    MigError,
    Placement,
    Profile,
    Slice,
    plain_name,
)
from policy.files import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from controller.gpus.mig import Plan, Step

NOBODY = 0xFFFFFFFF
"""A process's instance where its card is not cut."""
WORDS = {
    pynvml.NVML_ERROR_IN_USE: "it is in use: a process has it open",
    pynvml.NVML_ERROR_NO_PERMISSION: "only root may: run it with sudo",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "there is no room for it",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the card or its driver does not support it",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the card is lost: it fell off the bus",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old for it",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the card needs a reset",
}


class Unfinished(Exception):
    """A plan stopped on its way: where, why, what exists now, what to do."""


class Work(NamedTuple):
    """A process on a card."""

    pid: int
    instance: int | None
    """Its GPU instance; None: the card is not cut."""

    def __str__(self) -> str:
        where = "" if self.instance is None else f" on GPU instance {self.instance}"
        return f"process {self.pid}{where}"


@contextmanager
def opened() -> Iterator[None]:
    """NVML, for as long as the block lasts.

    Raises:
        MigError: it cannot be had here.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MigError(f"NVML cannot be used here: {_words(error)}") from error
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def read_cards() -> tuple[Card, ...]:
    """This machine's cards and their slices, by NVML's numbers; none where NVML cannot be had.

    A card that does not answer (it is lost, say) is left out. Needs no privilege.
    """
    try:
        with opened():
            return tuple(card for _, card in _cards())
    except MigError:
        return ()


def read_card(uuid: str) -> Card:
    """A card, how it is cut, and how it could be.

    Raises:
        MigError: there is no such card, it cannot be cut, or it does not tell.
    """
    with opened(), _plain(f"card {uuid}"):
        device, card = _found(uuid)
        profiles = _profiles(device)
        instances = _instances(device, profiles) if card.mig else ()
        return card._replace(profiles=profiles, instances=instances)


def read_work(uuid: str) -> tuple[Work, ...]:
    """The processes that compute on a card or on one of its slices, by pid.

    Raises:
        MigError: it does not tell.
    """
    with opened(), _plain(f"who uses {uuid}"):
        device, card = _found(uuid)
        found: dict[int, Work] = {}
        # The card lists what runs on its slices only to root, so each slice is asked, too.
        for handle, at in ((device, None), *(_slice_handles(device) if card.mig else ())):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                instance = process.gpuInstanceId if at is None else at.instance
                known = None if instance in (None, NOBODY) else int(instance)
                found[int(process.pid)] = Work(int(process.pid), known)
        return tuple(found[pid] for pid in sorted(found))


def carry_out(card: Card, plan: Plan, say: Callable[[str], None]) -> Card:
    """Take the plan's steps, telling each; gives the card as it is then.

    Nothing is taken back when a step fails: a plan is made from what exists, so the same command
    goes on from there.

    Raises:
        Unfinished: a step failed, or MIG mode waits for a reset.
        MigError: the card cannot be read.
    """
    with opened():
        for number, step in enumerate(plan.steps, start=1):
            say(f"{number}/{len(plan.steps)}: {step}")
            try:
                _take(card.uuid, step)
            except pynvml.NVMLError as error:
                raise Unfinished(
                    f"step {number} of {len(plan.steps)} failed ({step}): {_words(error)}."
                    f" {_exists(card.uuid)} Run the same command again to go on from there."
                ) from error
    return read_card(card.uuid)


# Reading


def _cards() -> Iterator[tuple[Any, Card]]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            yield device, _seen(device, index)
        except pynvml.NVMLError:
            continue


def _found(uuid: str) -> tuple[Any, Card]:
    """A card and its handle.

    Raises:
        MigError: there is no such card here.
    """
    known = {card.uuid: (device, card) for device, card in _cards()}
    for _, card in known.values():
        if uuid in [one.uuid for one in card.slices]:
            raise MigError(f"{uuid} is a slice of {card.uuid}: give the card")
    if not known:
        raise MigError(f"card {uuid!r}: NVML finds no card here")
    if not uuid.startswith(GPU):
        raise MigError(f"card {uuid!r}: the UUID of a card is expected; {nearest(uuid, known)}")
    if uuid not in known:
        raise MigError(f"no card {uuid} here, or it does not answer: {nearest(uuid, known)}")
    return known[uuid]


def _seen(device: Any, index: int) -> Card:
    try:
        mig, pending = pynvml.nvmlDeviceGetMigMode(device)
    except pynvml.NVMLError_NotSupported:
        mig = pending = pynvml.NVML_DEVICE_MIG_DISABLE
    on = mig == pynvml.NVML_DEVICE_MIG_ENABLE
    return Card(
        pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetName(device), index, on,
        pending == pynvml.NVML_DEVICE_MIG_ENABLE,
        tuple(part for _, part in _slice_handles(device)) if on else (),
    )  # fmt: skip


def _slice_handles(device: Any) -> Iterator[tuple[Any, Slice]]:
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number)
        except pynvml.NVMLError_NotFound:
            continue
        yield (
            handle,
            Slice(
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetGpuInstanceId(handle),
                pynvml.nvmlDeviceGetComputeInstanceId(handle),
            ),
        )


def _profiles(device: Any) -> tuple[Profile, ...]:
    found = []
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(device, number, version=2)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue  # this card has no such size, or its driver does not know it
        count = c_uint()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, info.id, None, byref(count))
        places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, info.id, places, byref(count))
        found.append(
            Profile(
                info.id, plain_name(_text(info.name)), info.sliceCount, info.memorySizeMB,
                info.instanceCount,
                tuple(Placement(place.start, place.size) for place in places[: count.value]),
            )
        )  # fmt: skip
    return tuple(found)


def _instances(device: Any, profiles: tuple[Profile, ...]) -> tuple[Instance, ...]:
    found = []
    for profile in profiles:
        count = c_uint(profile.most)
        handles = (pynvml.c_nvmlGpuInstance_t * profile.most)()
        pynvml.nvmlDeviceGetGpuInstances(device, profile.id, handles, byref(count))
        for handle in handles[: count.value]:
            info = pynvml.nvmlGpuInstanceGetInfo(handle)
            place = Placement(info.placement.start, info.placement.size)
            found.append(Instance(info.id, profile, place, _compute(handle)))
    return tuple(sorted(found, key=lambda one: one.id))


def _compute_profiles(instance: Any) -> Iterator[Any]:
    """What compute instances a GPU instance can hold."""
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            yield pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                instance, number, pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, version=2
            )
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue


def _compute(instance: Any) -> dict[int, int]:
    """Compute slices of each compute instance, by id."""
    found = {}
    for info in _compute_profiles(instance):
        count = c_uint(info.instanceCount)
        handles = (pynvml.c_nvmlComputeInstance_t * info.instanceCount)()
        pynvml.nvmlGpuInstanceGetComputeInstances(instance, info.id, handles, byref(count))
        for handle in handles[: count.value]:
            found[pynvml.nvmlComputeInstanceGetInfo(handle).id] = info.sliceCount
    return found


# Cutting


def _take(uuid: str, step: Step) -> None:
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    match step:
        case Enable():
            _enable(device, uuid)
        case DestroyCompute(instance, compute):
            handle = pynvml.nvmlDeviceGetGpuInstanceById(device, instance)
            pynvml.nvmlComputeInstanceDestroy(
                pynvml.nvmlGpuInstanceGetComputeInstanceById(handle, compute)
            )
        case Destroy(instance):
            pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(device, instance))
        case Create(place):
            where = pynvml.c_nvmlGpuInstancePlacement_t(*place.placement)
            handle = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                device, place.profile.id, byref(where)
            )
            _fill(handle, place.profile.compute)
        case Fill(instance, profile):
            _fill(pynvml.nvmlDeviceGetGpuInstanceById(device, instance), profile.compute)


def _enable(device: Any, uuid: str) -> None:
    status = pynvml.nvmlDeviceSetMigMode(device, pynvml.NVML_DEVICE_MIG_ENABLE)
    # Turning it on may reset the card, after which its handle is another.
    current, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    if current == pynvml.NVML_DEVICE_MIG_ENABLE:
        return
    why = f" ({_words(pynvml.NVMLError(status))})" if status else ""
    raise Unfinished(
        f"MIG mode of {uuid} is asked for, and is on after a reset of the card{why}: stop what"
        f" uses it, run `nvidia-smi --gpu-reset --id={uuid}` or restart the machine, then run the"
        " same command again"
    )


def _fill(instance: Any, slices: int) -> None:
    for info in _compute_profiles(instance):
        if info.sliceCount == slices:
            pynvml.nvmlGpuInstanceCreateComputeInstance(instance, info.id)
            return
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


# Words


@contextmanager
def _plain(what: str) -> Iterator[None]:
    """NVML's errors as ours."""
    try:
        yield
    except pynvml.NVMLError as error:
        raise MigError(f"{what} cannot be read: {_words(error)}") from error


def _words(error: Any) -> str:
    return WORDS.get(error.value, str(error))


def _exists(uuid: str) -> str:
    """What there is now, in words."""
    try:
        card = read_card(uuid)
    except MigError as error:
        return f"What exists now cannot be read ({error})."
    if not card.instances:
        return "No GPU instance exists now."
    parts = [
        f"{one.id} ({one.profile.name} at {one.placement}"
        f"{'' if one.whole else ', not filled by a compute instance'})"
        for one in card.instances
    ]
    return f"These GPU instances exist now: {', '.join(parts)}."


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
