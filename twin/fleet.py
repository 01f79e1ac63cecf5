"""What stands in the simulated rack: replicas, each a profile brought to life."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from policy.announce import Sizes, announce
from policy.cost import StepCost, kv_blocks
from policy.files import load_gpus, load_models, load_profile
from twin.engine import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.cost import Gpu, ModelShape, Profile
    from policy.events import ReplicaUp


NS = 1_000_000_000
MIB = 1 << 20
CARDS_PER_HOST = 8
COLD_START_S = 100.0
"""Where a profile does not know: public measurements of vLLM pods lie around it."""
MIG_SEVENTHS, MIG_EIGHTHS = 7, 8
"""Into how many parts MIG cuts a card's multiprocessors and its memory."""


class Slice(NamedTuple):
    """A MIG profile: its part of the card."""

    compute: int
    """Sevenths of the multiprocessors."""
    memory: int
    """Eighths of the memory, its capacity and its bandwidth."""


MIG_SLICES = {
    "1g": Slice(1, 1), "2g": Slice(2, 2), "3g": Slice(3, 4), "4g": Slice(4, 4), "7g": Slice(7, 8),
}  # fmt: skip
"""As NVIDIA's guide gives them for cards of seven slices, by the profile's first part."""


class FleetError(ValueError):
    """A fleet that cannot stand: which figure is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica, ready to be built."""

    id: int
    name: str
    profile: Profile
    model: ModelShape
    gpu: Gpu
    settings: EngineSettings
    cost: StepCost
    serves: tuple[str, ...]
    """Model names; empty: whatever is asked for."""
    version: str = ""
    """Of the model that it loads."""
    domain: str = ""
    """What fails together, from the host inwards: ``host0/card3``, or ``host0/card3/mig1``; cards
    that work as one are joined, ``host0/card0+1``. Empty: the replica alone."""
    labels: tuple[str, ...] = ()
    closeness_permille: int = 1000
    """How near its parts are: NVLink, PCIe switch, CPU socket."""
    memory_mb: int = 0
    """Of its cards, or of its slice of one."""
    cold_start_ns: int = round(COLD_START_S * NS)
    """From being asked for to taking work."""
    mig: str = ""
    """The MIG profile of its slice; empty: it has whole cards."""

    @property
    def usd_per_hour(self) -> float:
        price = self.gpu.usd_per_hour * self.profile.tensor_parallel
        return price * MIG_SLICES[self.mig].compute / MIG_SEVENTHS if self.mig else price

    def up(self, version: str | None = None) -> ReplicaUp:
        """What the policy is told about it; ``version`` is what it has loaded, its own if None."""
        settings = self.settings
        sizes = Sizes(
            settings.kv_blocks,
            settings.block_tokens,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_model_len,
        )
        return announce(
            self.id, self.name, self.profile, self.model, self.cost, sizes,
            models=self.serves,
            version=self.version if version is None else version,
            domain=self.domain,
            labels=self.labels,
            closeness_permille=self.closeness_permille,
            memory_mb=self.memory_mb,
        )  # fmt: skip


def fleet_of(
    profiles: Sequence[tuple[str, int]], *, max_model_len: int = 0, kv_blocks_given: int = 0
) -> list[ReplicaSpec]:
    """Replicas of named profiles, on hosts of eight cards, in order.

    With one profile the fleet serves whatever model a request names; with several, each serves its
    own, and embeddings go to the pooling ones.

    Args:
        profiles: (profile name or path, number of replicas).
        max_model_len: instead of the profile's; 0: the profile's.
        kv_blocks_given: KV blocks of each replica; 0: computed from the card's memory.

    Raises:
        FleetError: no replica at all, or a figure out of range.
        FileError: a profile that does not exist or is wrong.
    """
    specs: list[ReplicaSpec] = []
    cards = 0
    models, gpus = load_models(), load_gpus()
    for name, count in profiles:
        if count < 1:
            raise FleetError(f"{name}: {count} replicas: a fleet needs at least 1 of each profile")
        profile = load_profile(name)
        model, gpu = models[profile.model], gpus[profile.gpu]
        try:
            settings = engine_settings(profile, model, gpu, max_model_len, kv_blocks_given)
        except ValueError as error:
            raise FleetError(str(error)) from error
        cost = StepCost.from_profile(profile)
        serves = (profile.model,) if len(profiles) > 1 else ()
        wide = profile.tensor_parallel
        cold_start = profile.cold_start
        for number in range(count):
            cards = _next_room(cards, wide)
            specs.append(
                ReplicaSpec(
                    len(specs), f"{profile.name}#{number}", profile, model, gpu, settings, cost,
                    serves, domain=_domain(cards, wide),
                    memory_mb=wide * gpu.memory_bytes // MIB,
                    cold_start_ns=round(
                        (COLD_START_S if cold_start is None else cold_start.total_s) * NS
                    ),
                )
            )  # fmt: skip
            cards += wide
    if not specs:
        raise FleetError("the fleet has 0 replicas: give at least one profile")
    return specs


def engine_settings(
    profile: Profile, model: ModelShape, gpu: Gpu, max_model_len: int = 0, blocks: int = 0
) -> EngineSettings:
    """The profile's engine flags, with the KV blocks that the card has room for."""
    flags = profile.engine
    settings = EngineSettings(
        kv_blocks=blocks or kv_blocks(profile, model, gpu),
        block_tokens=flags.block_tokens,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        max_model_len=flags.max_model_len,
        async_scheduling=flags.async_scheduling,
        prefix_caching=flags.prefix_caching,
        scheduling_policy=flags.scheduling_policy,
    )
    return replace(settings, max_model_len=max_model_len) if max_model_len else settings


def _next_room(card: int, wide: int) -> int:
    """The first card from ``card`` on with ``wide - 1`` more behind it on the same host."""
    over = card % CARDS_PER_HOST + wide > CARDS_PER_HOST
    return card + CARDS_PER_HOST - card % CARDS_PER_HOST if over else card


def _domain(card: int, wide: int) -> str:
    host, first = divmod(card, CARDS_PER_HOST)
    numbers = "+".join(str(first + number) for number in range(wide))
    return f"host{host}/card{numbers}"


def within(domain: str, where: str) -> bool:
    """Whether ``domain`` lies in ``where``: ``host0/card3/mig1`` in ``host0`` and in itself."""
    parts, wanted = domain.split("/"), where.split("/")
    return len(wanted) <= len(parts) and all(
        name == part or name in _members(part) for name, part in zip(wanted, parts, strict=False)
    )


def _members(part: str) -> list[str]:
    """The cards of ``card0+1``: ``card0`` and ``card1``."""
    numbers = part.removeprefix("card").split("+")
    return [f"card{number}" for number in numbers] if len(numbers) > 1 else []


def card_of(spec: ReplicaSpec) -> str:
    """The name of the card (or of the cards that work as one) under a replica."""
    parts = spec.domain.split("/")
    return "/".join(parts[:2]) if len(parts) > 1 else f"#{spec.id}"


def cut(spec: ReplicaSpec, slices: Sequence[str]) -> list[ReplicaSpec]:
    """One card's replica as several, on MIG slices such as ``3g``; they keep its number.

    A slice has its part of the multiprocessors and of the memory's bandwidth, so prefill slows
    down by the one and decoding by the other. The host's part of a step does too: a slice's figures
    are on the safe side. The KV cache has what the slice's memory leaves for it.

    Raises:
        FleetError: no such slice, more than a card holds, too small for the model, or a replica
            of several cards.
    """
    if spec.profile.tensor_parallel > 1 or spec.mig:
        raise FleetError(f"{spec.name}: only a replica on one whole card can be cut into slices")
    unknown = [name for name in slices if name not in MIG_SLICES]
    if unknown:
        raise FleetError(f"{spec.name}: no slice {unknown[0]!r}: use {', '.join(MIG_SLICES)}")
    parts = [MIG_SLICES[name] for name in slices]
    compute, memory = sum(part.compute for part in parts), sum(part.memory for part in parts)
    if compute > MIG_SEVENTHS or memory > MIG_EIGHTHS:
        raise FleetError(
            f"{spec.name}: slices {', '.join(slices)} take {compute} of 7 parts of the compute and"
            f" {memory} of 8 of the memory: a card does not hold them"
        )
    return [
        _sliced(spec, name, part, number)
        for number, (name, part) in enumerate(zip(slices, parts, strict=True))
    ]


def _sliced(spec: ReplicaSpec, name: str, part: Slice, number: int) -> ReplicaSpec:
    gpu = msgspec.structs.replace(
        spec.gpu, memory_bytes=spec.gpu.memory_bytes * part.memory // MIG_EIGHTHS
    )
    try:
        settings = engine_settings(spec.profile, spec.model, gpu, spec.settings.max_model_len)
    except ValueError as error:
        # What it advises beside is for whole cards: a slice is no part of a larger engine.
        why = str(error).partition(": raise tensor_parallel")[0].partition("; lower")[0]
        raise FleetError(
            f"slice {name} of {spec.name}: {why}: take a larger slice or a smaller model"
        ) from error
    reading, computing = Fraction(MIG_EIGHTHS, part.memory), Fraction(MIG_SEVENTHS, part.compute)
    cost = spec.cost
    return replace(
        spec,
        name=f"{spec.name}/mig{number}",
        settings=settings,
        cost=msgspec.structs.replace(
            cost,
            decode_fixed=round(cost.decode_fixed * reading),
            per_sequence=round(cost.per_sequence * reading),
            per_kv_token=round(cost.per_kv_token * reading),
            padding=tuple(round(extra * reading) for extra in cost.padding),
            per_logprobs_sequence=round(cost.per_logprobs_sequence * reading),
            prefill_fixed=round(cost.prefill_fixed * computing),
            per_prefill_token=round(cost.per_prefill_token * computing),
            per_prefill_quad=round(cost.per_prefill_quad * computing),
            mixed_per_sequence=round(cost.mixed_per_sequence * computing),
            mixed_per_kv_token=round(cost.mixed_per_kv_token * reading),
            token_padding=tuple(round(extra * computing) for extra in cost.token_padding),
        ),
        domain=f"{spec.domain}/mig{number}",
        memory_mb=gpu.memory_bytes // MIB,
        mig=name,
    )


def numbered(specs: Sequence[ReplicaSpec]) -> list[ReplicaSpec]:
    """The same replicas, numbered in a row from 0."""
    return [replace(spec, id=number) for number, spec in enumerate(specs)]
