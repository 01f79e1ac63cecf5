"""The cards under the replicas in time: heat, power, throttling, and how busy their links are.

A card is read every few seconds, and what was read then holds until the next reading:

- *Power* lies between the idle figure and the limit, by how much of the time a step was running.
- *Heat* follows power with a time constant. At 1000 permille the card throttles, which makes every
  step slower, until it has cooled down to ``resume_heat_permille``.
- *The PCIe link* carries other processes' traffic too: a random walk of its own for each card.
  A replica's prompts go over the link, so taking in a request and prefilling take
  ``1 + pcie_permille / 1000`` times as long. Decoding stays on the card.
- *Closeness* does not change. Over switches and between sockets prompts are slower by up to
  ``far_permille``, whatever else is on the link.

All figures are integers and all draws are keyed by card and reading, so nothing depends on the
order in which cards are looked at. MIG slices share their card's heat, power and link.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from policy.events import GpuRead
from twin.agenda import FAULTS, Event
from twin.dice import Dice
from twin.engine.steptime import TICK_BITS
from twin.fleet import card_of
from twin.replicas import Trouble

if TYPE_CHECKING:
    import simpy

    from twin.replicas import Replica
    from twin.world import World

NS = 1_000_000_000
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Permille = Annotated[int, Meta(ge=0, le=1000)]


class CardSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How cards behave. The figures are those of no particular card."""

    read_every_s: Seconds = 5.0
    lag_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    """How old a reading is when the policy gets it."""
    idle_power_permille: Permille = 150
    full_heat_permille: Annotated[int, Meta(ge=0, le=3000)] = 800
    """Where the heat settles under full load; above 1000 a busy card throttles by itself."""
    heat_s: Seconds = 30.0
    """Time constant of the heat."""
    resume_heat_permille: Permille = 900
    throttle_factor_permille: Annotated[int, Meta(ge=1000, le=100_000)] = 1500
    """A throttling card's steps take this many times as long."""
    pcie_most_permille: Permille = 300
    """The most that other processes use of the link."""
    pcie_step_permille: Permille = 40
    """How far that moves at most from one reading to the next."""
    far_permille: Permille = 300
    """By how much longer taking in and prefilling take at a closeness of 0."""


class Card:
    """One card: its state as of the last reading."""

    __slots__ = (
        "busy_ticks", "extra_heat_permille", "extra_pcie_permille", "heat_permille", "number",
        "outside_permille", "power_permille", "replicas", "throttled",
    )  # fmt: skip

    def __init__(self, number: int, settings: CardSettings, outside_permille: int) -> None:
        self.number = number
        self.replicas: list[Replica] = []
        self.busy_ticks = 0
        self.heat_permille = settings.full_heat_permille * settings.idle_power_permille // 1000
        self.power_permille = settings.idle_power_permille
        self.throttled = False
        self.outside_permille = outside_permille
        """Of the link, used by other processes."""
        self.extra_heat_permille = 0
        """By which a bad fan or neighbour moves where the heat settles."""
        self.extra_pcie_permille = 0

    @property
    def pcie_permille(self) -> int:
        return min(1000, self.outside_permille + self.extra_pcie_permille)


class Cards:
    """All cards of a world, read at one interval."""

    __slots__ = ("_cards", "_dice", "_of", "_reading", "_settings", "_world")

    def __init__(self, world: World, settings: CardSettings) -> None:
        self._world = world
        self._settings = settings
        self._dice = Dice(world.seed, "pcie")
        self._reading = 0
        self._cards: dict[str, Card] = {}
        self._of: list[Card] = []
        """By replica."""
        for replica in world.replicas:
            name = card_of(replica.spec)
            card = self._cards.get(name)
            if card is None:
                number = len(self._cards)
                outside = self._dice.number(number, 0) % (settings.pcie_most_permille + 1)
                card = self._cards[name] = Card(number, settings, outside)
            card.replicas.append(replica)
            self._of.append(card)

    def begin(self) -> None:
        for card in self._cards.values():
            self._weigh(card)
        self._await_reading()

    def heat(self, replicas: list[Replica], permille: int) -> None:
        """Move where the heat of these replicas' cards settles; negative: back again."""
        for card in self._under(replicas):
            card.extra_heat_permille += permille

    def load_link(self, replicas: list[Replica], permille: int) -> None:
        """Other processes use that much more of these replicas' links, from now on."""
        for card in self._under(replicas):
            card.extra_pcie_permille += permille
            self._weigh(card)

    def _under(self, replicas: list[Replica]) -> list[Card]:
        numbers = sorted({self._of[replica.id].number for replica in replicas})
        cards = list(self._cards.values())
        return [cards[number] for number in numbers]

    def _await_reading(self) -> None:
        every_ns = round(self._settings.read_every_s * NS)
        self._world.env.schedule(Event([self._read]), FAULTS, every_ns)

    def _read(self, event: simpy.Event) -> None:
        self._reading += 1
        for card in self._cards.values():
            busy_permille = self._busy_permille(card)
            self._move(card, busy_permille)
            self._weigh(card)
            for replica in card.replicas:
                if replica.state == "up":
                    self._tell(replica, card, busy_permille)
        if self._world.alive:
            self._await_reading()

    def _busy_permille(self, card: Card) -> int:
        """For how much of the time since the last reading the busiest of its engines computed."""
        now_ns = self._world.now_ns
        ticks = sum(replica.busy_ticks_at(now_ns) for replica in card.replicas)
        spent = ticks - card.busy_ticks
        card.busy_ticks = ticks
        span_ticks = round(self._settings.read_every_s * NS) << TICK_BITS
        return min(1000, 1000 * spent // (span_ticks * len(card.replicas)))

    def _move(self, card: Card, busy_permille: int) -> None:
        """On to the next reading: power, heat and the link's other traffic."""
        settings = self._settings
        idle = settings.idle_power_permille
        card.power_permille = idle + (1000 - idle) * busy_permille // 1000
        goal = settings.full_heat_permille * card.power_permille // 1000 + card.extra_heat_permille
        every_ns, heat_ns = round(settings.read_every_s * NS), round(settings.heat_s * NS)
        card.heat_permille += (goal - card.heat_permille) * every_ns // (heat_ns + every_ns)
        limit = settings.resume_heat_permille if card.throttled else 1000
        card.throttled = card.heat_permille >= limit
        step = settings.pcie_step_permille
        change = self._dice.number(card.number, self._reading) % (2 * step + 1) - step
        moved = card.outside_permille + change
        card.outside_permille = min(settings.pcie_most_permille, max(0, moved))

    def _weigh(self, card: Card) -> None:
        """What the card's state does to its replicas."""
        slow = self._settings.throttle_factor_permille if card.throttled else 1000
        for replica in card.replicas:
            apart_permille = 1000 - replica.spec.closeness_permille
            far = Fraction(1_000_000 + self._settings.far_permille * apart_permille, 1_000_000)
            upload = far * Fraction(1000 + card.pcie_permille, 1000)
            replica.trouble("card", Trouble(factor=Fraction(slow, 1000), upload_factor=upload))

    def _tell(self, replica: Replica, card: Card, busy_permille: int) -> None:
        spec = replica.spec
        kept_permille = 1000 - round(1000 * spec.profile.engine.gpu_memory_utilization)
        lag_ns = round(self._settings.lag_s * NS)
        read = GpuRead(
            replica.id,
            spec.memory_mb * kept_permille // 1000,
            card.pcie_permille,
            busy_permille,
            card.heat_permille,
            card.power_permille,
            card.throttled,
            lag_ns,
        )
        self._world.after(lag_ns, lambda event: self._world.runner.feed(read))
