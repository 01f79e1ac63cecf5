"""How a card is cut into MIG slices: layouts, placements, plans. Nothing here touches a card.

A card offers *profiles*, by NVML's names (``3g.40gb``: three compute slices, 40 GB). A *GPU
instance* is one of them at a *placement*, the memory slices that it takes; the *compute instance*
that fills it is what a process sees, by its MIG UUID. One process uses one such slice: it is what
fails alone.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from policy.files import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MIG = "MIG-"
"""UUIDs of slices begin with it."""
GPU = "GPU-"
_PROFILE = re.compile(
    r"^(?:(?P<times>[0-9]{1,2})x)?(?P<name>[0-9]{1,2}g\.[0-9]{1,4}gb(?:-[a-z.]+)?)$"
)
_ATTRIBUTE = re.compile(r"^[a-z][a-z.]*$")
_PART = re.compile(r"^(?:[0-9]+x)?[0-9]+c\.")
_NAMED = re.compile(r"^MIG ")


class MigError(ValueError):
    """A layout, a card or a model that do not go together: which figures, and what to do."""


class Placement(NamedTuple):
    """Memory slices in a row."""

    start: int
    size: int

    @property
    def mask(self) -> int:
        return ((1 << self.size) - 1) << self.start

    def __str__(self) -> str:
        if self.size == 1:
            return f"memory slice {self.start}"
        return f"memory slices {self.start} to {self.start + self.size - 1}"


class Profile(NamedTuple):
    """A size of GPU instances that a card offers."""

    id: int
    name: str
    compute: int
    """Compute slices."""
    memory_mb: int
    most: int
    """Of them at once."""
    placements: tuple[Placement, ...]

    @property
    def memory(self) -> int:
        """Memory slices."""
        return max((placement.size for placement in self.placements), default=0)


class Slice(NamedTuple):
    """What a process sees: a compute instance, by its MIG UUID."""

    uuid: str
    instance: int
    """Its GPU instance."""
    compute: int
    """Its compute instance."""


class Instance(NamedTuple):
    """A GPU instance that exists."""

    id: int
    profile: Profile
    placement: Placement
    compute: Mapping[int, int]
    """Compute slices of each compute instance in it, by id."""

    @property
    def whole(self) -> bool:
        """One process can have all of it."""
        return tuple(self.compute.values()) == (self.profile.compute,)


class Card(NamedTuple):
    """A card, as far as it can be cut."""

    uuid: str
    name: str
    number: int
    """Its place on the host."""
    mig: bool
    """It is in MIG mode."""
    pending: bool = False
    """It will be, after a reset."""
    slices: tuple[Slice, ...] = ()
    profiles: tuple[Profile, ...] = ()
    """These and the next only where it is to be cut: the driver tells them to root only."""
    instances: tuple[Instance, ...] = ()

    @property
    def compute(self) -> int:
        """Compute slices in all: those of the profile that takes the whole card."""
        return max((profile.compute for profile in self.profiles), default=0)

    @property
    def memory(self) -> int:
        """Memory slices in all."""
        ends = [place.start + place.size for one in self.profiles for place in one.placements]
        return max(ends, default=0)


# Layouts


def plain_name(name: str) -> str:
    """A profile's name as layouts write it; drivers may put ``MIG`` before it."""
    return _NAMED.sub("", name.strip())


def parse_layout(text: str) -> tuple[str, ...]:
    """Profile names of ``3g.40gb+3x1g.10gb``, one for each slice, in order.

    A variant keeps its sign: ``1g.10gb+me+2x3g.40gb`` is one ``1g.10gb+me`` and two ``3g.40gb``.

    Raises:
        MigError: it is no layout.
    """
    found: list[tuple[int, str]] = []
    for part in text.replace(" ", "").split("+"):
        profile = _PROFILE.match(part)
        if profile is not None:
            times = int(profile["times"] or 1)
            if times == 0:
                raise MigError(f"layout {text!r}: {part!r} is no slice: leave it out")
            found.append((times, profile["name"]))
        elif _ATTRIBUTE.match(part) and found:
            times, name = found[-1]
            found[-1] = (times, f"{name}+{part}")
        elif _PART.match(part):
            raise MigError(
                f"layout {text!r}: {part!r} is a part of an instance: each slice gets the whole of"
                " its own, since only its memory keeps processes apart; leave out the part with 'c'"
            )
        else:
            raise MigError(
                f"layout {text!r}: {part!r} is no slice: write NAME or COUNTxNAME, joined by +,"
                " such as 3g.40gb+3x1g.10gb"
            )
    return tuple(name for times, name in found for _ in range(times))


def profiles_of(names: Sequence[str], card: Card) -> tuple[Profile, ...]:
    """The card's profiles of these names.

    Raises:
        MigError: it offers no such, fewer at once, or has not that many slices.
    """
    known = {profile.name: profile for profile in card.profiles}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise MigError(
            f"{card.name} ({card.uuid}) offers no {unknown[0]!r}: {nearest(unknown[0], known)}"
        )
    layout = told(names)
    wanted = tuple(known[name] for name in names)
    compute = sum(profile.compute for profile in wanted)
    memory = sum(profile.memory for profile in wanted)
    if compute > card.compute or memory > card.memory:
        raise MigError(
            f"{layout} needs {compute} of {card.compute} compute slices and {memory} of"
            f" {card.memory} memory slices: {card.name} does not hold it"
        )
    for name, count in Counter(names).items():
        if count > known[name].most:
            raise MigError(
                f"{layout} has {count} of {name}: {card.name} offers {known[name].most} at once"
            )
    return wanted


def told(names: Iterable[str]) -> str:
    """A layout, as one writes it."""
    counts = Counter(names)
    return "+".join(name if count == 1 else f"{count}x{name}" for name, count in counts.items())


# Placements


class Place(NamedTuple):
    """A profile at a placement."""

    profile: Profile
    placement: Placement


def arrange(wanted: Sequence[Profile], there: Iterable[Place] = ()) -> tuple[Place, ...] | None:
    """Placements that do not overlap, one for each of ``wanted``; None: there are none.

    As many as possible are ``there`` already; of those, the lowest ones. All are looked at: a card
    has at most eight memory slices, and slices of one profile are not told apart.
    """
    keep = frozenset(there)
    ordered = sorted(wanted, key=lambda profile: (-profile.memory, profile.id))
    best: tuple[int, tuple[Place, ...]] | None = None
    for found in _placed(ordered, 0, 0, 0):
        kept = sum(place in keep for place in found)
        if best is None or kept > best[0]:
            best = (kept, found)
            if kept == len(ordered):
                break
    return None if best is None else best[1]


def _placed(
    wanted: Sequence[Profile], at: int, taken: int, least: int
) -> Iterator[tuple[Place, ...]]:
    """Every way to place ``wanted[at:]`` beside what is taken; ``least``: where this profile's next
    one may begin, so that equal slices are not swapped."""
    if at == len(wanted):
        yield ()
        return
    profile = wanted[at]
    for placement in sorted(profile.placements):
        if placement.start < least or taken & placement.mask:
            continue
        same = at + 1 < len(wanted) and wanted[at + 1] == profile
        begin = placement.start + 1 if same else 0
        for rest in _placed(wanted, at + 1, taken | placement.mask, begin):
            yield (Place(profile, placement), *rest)


# Plans


class Enable(NamedTuple):
    """Turn MIG mode on."""

    pending: bool
    """It was asked for before, and waits for a reset."""

    def __str__(self) -> str:
        waits = ", which waits for a reset of the card" if self.pending else ""
        return f"turn MIG mode on{waits}"


class DestroyCompute(NamedTuple):
    """Destroy a compute instance."""

    instance: int
    compute: int

    def __str__(self) -> str:
        return f"destroy compute instance {self.compute} of GPU instance {self.instance}"


class Destroy(NamedTuple):
    """Destroy a GPU instance, whose compute instances are gone."""

    instance: int
    place: Place

    def __str__(self) -> str:
        name, placement = self.place.profile.name, self.place.placement
        return f"destroy GPU instance {self.instance}: {name} at {placement}"


class Create(NamedTuple):
    """Create a GPU instance and the compute instance that fills it."""

    place: Place

    def __str__(self) -> str:
        profile, placement = self.place
        return f"create {profile.name} at {placement}: {profile.memory_mb} MB"


class Fill(NamedTuple):
    """Create the compute instance that fills a GPU instance."""

    instance: int
    profile: Profile

    def __str__(self) -> str:
        return f"fill GPU instance {self.instance} ({self.profile.name}) with a compute instance"


Step = Enable | DestroyCompute | Destroy | Create | Fill


class Plan(NamedTuple):
    """What makes a card look as wanted."""

    steps: tuple[Step, ...]
    kept: tuple[Instance, ...]
    """What stays, as it is or filled anew."""


def plan_of(card: Card, names: Sequence[str]) -> Plan:
    """The steps from how the card is to the layout; none, where it has it already.

    Raises:
        MigError: it cannot have it.
    """
    if not card.profiles:
        raise MigError(f"{card.name} ({card.uuid}) cannot be cut: it offers no MIG profile")
    there = {Place(one.profile, one.placement): one for one in card.instances}
    wanted = profiles_of(names, card)
    found = arrange(wanted, there)
    if found is None:
        offered = "; ".join(
            f"{name} at {', '.join(str(place.start) for place in placements)}"
            for name, placements in {one.name: one.placements for one in wanted}.items()
        )
        raise MigError(
            f"{told(names)} has no placement on {card.name}, though the sum is small enough: slices"
            f" begin at fixed memory slices ({offered})"
        )
    kept = tuple(there[place] for place in found if place in there)
    steps: list[Step] = [] if card.mig else [Enable(card.pending)]
    for one in card.instances:
        if one not in kept:
            steps += [DestroyCompute(one.id, compute) for compute in one.compute]
            steps.append(Destroy(one.id, Place(one.profile, one.placement)))
    for one in kept:
        if not one.whole:
            steps += [DestroyCompute(one.id, compute) for compute in one.compute]
            steps.append(Fill(one.id, one.profile))
    steps += [Create(place) for place in found if place not in there]
    return Plan(tuple(steps), kept)


# Models


class Demand(NamedTuple):
    """A server that needs a slice of its own."""

    name: str
    needed_mb: int
    why: str = ""
    """The sum, such as ``weights 100 + KV cache 20 = 120 MB``; empty: it was given."""

    def __str__(self) -> str:
        return f"{self.name} needs {self.why or f'{self.needed_mb} MB'}"


def assign(demands: Sequence[Demand], slices: Sequence[Profile]) -> list[tuple[Demand, Profile]]:
    """A slice for each, the largest first: each gets the smallest left that is large enough.

    Raises:
        MigError: one does not fit what is left, with the sum.
    """
    if len(demands) > len(slices):
        raise MigError(
            f"{len(demands)} models ({', '.join(one.name for one in demands)}) and"
            f" {len(slices)} slices: each process has a slice of its own"
        )
    left = sorted(slices, key=lambda profile: (profile.memory_mb, profile.id))
    found: list[tuple[Demand, Profile]] = []
    for demand in sorted(demands, key=lambda one: (-one.needed_mb, one.name)):
        fitting = [profile for profile in left if profile.memory_mb >= demand.needed_mb]
        if not fitting:
            largest = left[-1]
            raise MigError(
                f"{demand}: the largest slice {'left ' if found else ''}for it, {largest.name}, has"
                f" {largest.memory_mb} MB"
            )
        left.remove(fitting[0])
        found.append((demand, fitting[0]))
    return found


# Fleets


def domain_of(uuid: str, cards: Iterable[Card], host: str = "host0") -> str:
    """What fails together with a card or a slice: ``host0/card3``, ``host0/card3/mig5``.

    A slice is named by its GPU instance, whose id stays when others come and go. Empty: no card
    here has that UUID.
    """
    for card in cards:
        if uuid == card.uuid:
            return f"{host}/card{card.number}"
        for part in card.slices:
            if uuid == part.uuid:
                return f"{host}/card{card.number}/mig{part.instance}"
    return ""


def domain_of_place(uuids: Sequence[str], cards: Iterable[Card], host: str = "host0") -> str:
    """The same of all that a process is given: ``host0/card0+1`` where it has several cards.

    Where a UUID is not known here, the UUIDs themselves: they still tell places apart.
    """
    cards = tuple(cards)
    found = [domain_of(uuid, cards, host) for uuid in uuids]
    if not all(found):
        return "+".join(uuids)
    if len(found) <= 1:
        return "".join(found)
    numbers = sorted({int(domain.partition("/card")[2].partition("/")[0]) for domain in found})
    return f"{host}/card{'+'.join(str(number) for number in numbers)}"


def check_places(places: Mapping[str, Sequence[str]], cards: Sequence[Card]) -> list[str]:
    """What is wrong with the UUIDs that places are given, by a place's name; empty: nothing.

    ``cards`` are those of this machine; none: it cannot be asked, and only what the UUIDs tell
    among themselves is checked.
    """
    wrong: list[str] = []
    holders: dict[str, str] = {}
    for name, uuids in places.items():
        wrong += [f"{name}: {text}" for text in _wrong_in(uuids, cards)]
        for uuid in dict.fromkeys(uuids):
            other = holders.setdefault(uuid, name)
            if other != name and uuid.startswith(MIG):
                wrong.append(
                    f"{name}: {uuid} is {other}'s already: one process has a slice, and all of it"
                )
    return wrong


def _wrong_in(uuids: Sequence[str], cards: Sequence[Card]) -> list[str]:
    """The same of one place."""
    slices = [uuid for uuid in uuids if uuid.startswith(MIG)]
    wrong = [f"{uuid} stands twice" for uuid, count in Counter(uuids).items() if count > 1]
    if len(set(slices)) > 1:
        wrong.append(
            f"{len(set(slices))} MIG slices ({', '.join(dict.fromkeys(slices))}): a process can use"
            " one; give each its own place"
        )
    if slices and len(slices) < len(uuids):
        others = [uuid for uuid in uuids if uuid not in slices]
        wrong.append(
            f"{slices[0]} beside {', '.join(others)}: a process that has a MIG slice can use"
            " nothing else"
        )
    known = {card.uuid: card for card in cards}
    parts = [part.uuid for card in cards for part in card.slices]
    for uuid in dict.fromkeys(uuids):
        card = known.get(uuid)
        if not uuid.startswith((MIG, GPU)):
            wrong.append(f"{uuid!r} is no UUID: numbers of cards change, give GPU-... or MIG-...")
        elif cards and card is None and uuid not in parts:
            hint = nearest(uuid, [*known, *parts])
            wrong.append(f"{uuid} is neither a card nor a slice of this machine: {hint}")
        elif card is not None and card.mig:
            own = ", ".join(part.uuid for part in card.slices)
            use = f"its slices are {own}" if own else "cut it with `twinkeel gpu partition`"
            wrong.append(f"{uuid} is in MIG mode, and cannot be used whole: {use}")
    return wrong
