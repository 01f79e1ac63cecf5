"""What goes wrong, when, and where: named faults with a time, carried out by the injector.

A fault on replicas says where: by number, by name, by failure domain (a host, a card, a MIG slice:
everything inside it is hit), ``*`` for all, or ``?`` for one of those that are up then, by seed.
Factors are in permille, so they are exact. A fault that starts at the same instant as something
else comes first; faults at one instant go by their place in the list.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
from msgspec import Meta

from policy.events import GpuFault
from policy.files import parse_document
from twin.agenda import FAULTS, Event
from twin.arrivals import repeated
from twin.dice import Dice
from twin.fleet import within
from twin.replicas import Trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from policy.events import GpuErrorKind
    from twin.arrivals import Chunk
    from twin.cards import Cards
    from twin.replicas import Replica
    from twin.world import World

NS = 1_000_000_000
NS_PER_MS = 1_000_000
At = Annotated[float, Meta(ge=0, le=1e7)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Lasting = Annotated[float, Meta(gt=0, le=1e7)]
Slower = Annotated[int, Meta(ge=1000, le=1_000_000)]
Permille = Annotated[int, Meta(ge=0, le=1000)]
Place = int | str


class FaultError(ValueError):
    """A fault that cannot happen in this world: which, and what would be right."""


class _Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    at_s: At
    """When it begins, in seconds from the start."""


class GpuLost(_Fault, frozen=True, kw_only=True, tag="gpu_lost"):
    """The card falls off the bus, or the host is gone: its processes die at once."""

    on: Place
    back_s: Lasting | None = None
    """Until it can be started again; none: never."""


class _CardError(_Fault, frozen=True, kw_only=True):
    on: Place
    dies_after_s: Seconds = 10.0
    """How long the process goes on with the bad card."""
    reset_s: Lasting | None = None
    """Until the card has been reset, so that a replica can be started there again; none: never."""

    def __post_init__(self) -> None:
        if self.reset_s is not None and self.reset_s <= self.dies_after_s:
            raise ValueError(
                f"reset_s is {self.reset_s}: it must be above dies_after_s ({self.dies_after_s}),"
                " since a reset ends what runs on the card"
            )


class EccUncorrectable(_CardError, frozen=True, kw_only=True, tag="ecc_uncorrectable"):
    """An uncorrectable memory error: the card says so, and its processes die a little later."""


class Xid(_CardError, frozen=True, kw_only=True, tag="xid"):
    """The driver reports an error by its number. Only a fatal one has consequences."""

    code: Annotated[int, Meta(ge=1, le=1000)]
    fatal: bool = True


class SlowCard(_Fault, frozen=True, kw_only=True, tag="slow_card"):
    """Every step takes ``factor_permille`` / 1000 times as long."""

    on: Place
    factor_permille: Slower
    for_s: Lasting | None = None
    """None: for good; so in all faults."""


class EngineHung(_Fault, frozen=True, kw_only=True, tag="engine_hung"):
    """No step ends and nothing comes back, while the server's ``/health`` says 200."""

    on: Place
    for_s: Lasting | None = None


class EngineKilled(_Fault, frozen=True, kw_only=True, tag="engine_killed"):
    """The process dies; whoever it served sees the connection break."""

    on: Place
    restart_s: Seconds | None = None
    """Until a supervisor has a new process, which then loads the model; none: it stays down until
    the policy starts it."""


class OomLongPrompt(_Fault, frozen=True, kw_only=True, tag="oom_long_prompt"):
    """While it lasts, a prompt that is long enough takes its process down with it."""

    on: Place
    tokens_from: Annotated[int, Meta(ge=1)]
    for_s: Lasting | None = None
    restart_s: Seconds | None = None
    """As in ``engine_killed``."""


class Network(_Fault, frozen=True, kw_only=True, tag="network"):
    """Messages between the controller and these replicas are late, or lost without a trace."""

    on: Place
    delay_ms: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    loss_permille: Permille = 0
    for_s: Lasting | None = None


class BadWeights(_Fault, frozen=True, kw_only=True, tag="bad_weights"):
    """Answers lose their confidence: of these replicas, this model, and this version of it."""

    on: Place = "*"
    model: str = ""
    """Empty: any."""
    version: str = ""
    """Empty: any. Replicas that load it later are hit too."""
    shift_permille: Permille
    for_s: Lasting | None = None


class BadAnswers(_Fault, frozen=True, kw_only=True, tag="bad_answers"):
    """What these replicas are asked while it lasts they answer with nothing, and a 200."""

    on: Place
    for_s: Lasting | None = None


class TrafficSpike(_Fault, frozen=True, kw_only=True, tag="traffic_spike"):
    """Each request of the trace arrives ``factor_permille`` / 1000 times, on average."""

    factor_permille: Slower
    for_s: Lasting


class RetryStorm(_Fault, frozen=True, kw_only=True, tag="retry_storm"):
    """Clients that are refused or fail try again at once, up to ``attempts`` times."""

    attempts: Annotated[int, Meta(ge=1, le=100)]
    for_s: Lasting | None = None


class ColdStart(_Fault, frozen=True, kw_only=True, tag="cold_start"):
    """Replicas take ``factor_permille`` / 1000 times as long to start."""

    factor_permille: Slower = 1000
    keeps_version: bool = False
    """And they load the version they had, whatever was asked for."""
    for_s: Lasting | None = None


class StartFails(_Fault, frozen=True, kw_only=True, tag="start_fails"):
    """While it lasts, what is started there ends before it serves, as with weights that cannot be
    read."""

    on: Place = "*"
    version: str = ""
    """Only what is started with this version of its model; empty: any."""
    for_s: Lasting | None = None


class Overheating(_Fault, frozen=True, kw_only=True, tag="overheating"):
    """Cooling fails: the heat settles that much higher. 1000 is where the card throttles."""

    on: Place
    heat_permille: Annotated[int, Meta(ge=1, le=3000)]
    for_s: Lasting | None = None


class PcieLoad(_Fault, frozen=True, kw_only=True, tag="pcie_load"):
    """Other processes use that much more of the link."""

    on: Place
    permille: Permille
    for_s: Lasting | None = None


Fault = (
    GpuLost | EccUncorrectable | Xid | SlowCard | EngineHung | EngineKilled | OomLongPrompt
    | Network | BadWeights | BadAnswers | TrafficSpike | RetryStorm | ColdStart | StartFails
    | Overheating | PcieLoad
)  # fmt: skip
FAULT_KINDS: tuple[str, ...] = tuple(str(kind.__struct_config__.tag) for kind in get_args(Fault))


class Injector:
    """Makes faults happen, and ends those that last for a while."""

    __slots__ = (
        "_bad_starts", "_bad_weights", "_cards", "_cold", "_dice", "_faults", "_storms", "_world",
    )  # fmt: skip

    def __init__(self, world: World, faults: Sequence[Fault], cards: Cards | None) -> None:
        self._world = world
        self._dice = Dice(world.seed, "where")
        self._faults = tuple(faults)
        self._cards = cards
        self._bad_starts: dict[int, tuple[StartFails, frozenset[int]]] = {}
        self._bad_weights: dict[int, tuple[BadWeights, frozenset[int]]] = {}
        self._storms: dict[int, RetryStorm] = {}
        self._cold: dict[int, ColdStart] = {}
        for fault in self._faults:
            if isinstance(fault, Overheating | PcieLoad) and cards is None:
                raise FaultError(
                    f"{kind_of(fault)} at {fault.at_s} s needs cards to happen to: give card"
                    " settings"
                )
            self._hit(fault)

    def begin(self) -> None:
        starts: dict[type, Callable[[int, Any], None]] = {
            GpuLost: self._lose_card,
            EccUncorrectable: self._report_ecc,
            Xid: self._report_xid,
            SlowCard: self._slow,
            EngineHung: self._hang,
            EngineKilled: self._kill,
            OomLongPrompt: self._starve,
            Network: self._disturb,
            BadWeights: self._spoil,
            BadAnswers: self._hollow,
            RetryStorm: self._storm,
            ColdStart: self._chill,
            StartFails: self._keep_down,
            Overheating: self._overheat,
            PcieLoad: self._load_link,
        }
        for number, fault in enumerate(self._faults):
            start = starts.get(type(fault))
            if start is not None:  # spikes are in the arrivals already
                self._at(fault.at_s, partial(start, number, fault))

    def repeated(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The trace with its spikes."""
        spikes = [
            (_ns(fault.at_s), _ns(fault.at_s + fault.for_s), fault.factor_permille)
            for fault in self._faults
            if isinstance(fault, TrafficSpike)
        ]
        return repeated(chunks, spikes, self._world.seed) if spikes else chunks

    def shift_permille(self, replica: Replica) -> int:
        """How far bad weights move this replica's answers."""
        shift = 0
        for fault, hit in self._bad_weights.values():
            if (
                replica.id in hit
                and fault.version in ("", replica.version)
                and (fault.model in ("", replica.spec.model.name, *replica.spec.serves))
            ):
                shift += fault.shift_permille
        return min(1000, shift)

    def keeps_down(self, replica: Replica, version: str) -> bool:
        """Whether what is started there now with this version ends before it serves."""
        return any(
            replica.id in hit and fault.version in ("", version)
            for fault, hit in self._bad_starts.values()
        )

    # ---- when and where ----

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        def ring(event: object) -> None:
            if self._world.alive:
                act()

        delay_ns = max(0, _ns(at_s) - self._world.now_ns)
        self._world.env.schedule(Event([ring]), FAULTS, delay_ns)

    def _until(self, fault: Any, end: Callable[[], None]) -> None:
        if fault.for_s is not None:
            self._at(fault.at_s + fault.for_s, end)

    def _hit(self, fault: Fault) -> list[Replica]:
        """The replicas that a fault is about."""
        replicas = self._world.replicas
        where = getattr(fault, "on", "*")
        if where == "*":
            return list(replicas)
        if where == "?":
            up = [replica for replica in replicas if replica.state == "up"]
            return [up[self._dice.number(_ns(fault.at_s)) % len(up)]] if up else []
        hit = [
            replica
            for replica in replicas
            if where in (replica.id, replica.spec.name)
            or (isinstance(where, str) and within(replica.spec.domain, where))
        ]
        if not hit:
            known = ", ".join(
                f"{replica.id} {replica.spec.name} ({replica.spec.domain})" for replica in replicas
            )
            raise FaultError(
                f"{kind_of(fault)} at {fault.at_s} s is on {where!r}, and there is no such replica"
                f" or domain: there are {known}"
            )
        return hit

    def _trouble(self, number: int, fault: Any, trouble: Trouble) -> None:
        """``trouble`` for all that are hit, while the fault lasts."""

        def end() -> None:
            for replica in hit:
                replica.trouble(number, None)

        hit = self._hit(fault)
        for replica in hit:
            replica.trouble(number, trouble)
        self._until(fault, end)

    # ---- cards ----

    def _lose_card(self, number: int, fault: GpuLost) -> None:
        for replica in self._hit(fault):
            replica.break_card()
            replica.die("gpu_lost")
            if fault.back_s is not None:
                self._at(fault.at_s + fault.back_s, replica.repair_card)

    def _report_ecc(self, number: int, fault: EccUncorrectable) -> None:
        self._report(fault, "ecc_uncorrectable", 0)
        self._break(fault)

    def _report_xid(self, number: int, fault: Xid) -> None:
        self._report(fault, "xid_fatal" if fault.fatal else "xid_minor", fault.code)
        if fault.fatal:
            self._break(fault)

    def _report(self, fault: Fault, kind: GpuErrorKind, code: int) -> None:
        """The card's own event, for each replica that is up on it."""
        for replica in self._hit(fault):
            if replica.state == "up":
                self._tell(GpuFault(replica.id, kind, code))

    def _tell(self, event: GpuFault) -> None:
        world = self._world
        world.after(world.settings.gpu_event_ns, lambda _: world.runner.feed(event))

    def _break(self, fault: EccUncorrectable | Xid) -> None:
        for replica in self._hit(fault):
            replica.break_card()
            self._at(fault.at_s + fault.dies_after_s, partial(replica.die, "gpu_error"))
            if fault.reset_s is not None:
                self._at(fault.at_s + fault.reset_s, replica.repair_card)

    def _slow(self, number: int, fault: SlowCard) -> None:
        self._trouble(number, fault, Trouble(factor=Fraction(fault.factor_permille, 1000)))

    def _overheat(self, number: int, fault: Overheating) -> None:
        cards = self._cards
        assert cards is not None
        hit = self._hit(fault)
        cards.heat(hit, fault.heat_permille)
        self._until(fault, lambda: cards.heat(hit, -fault.heat_permille))

    def _load_link(self, number: int, fault: PcieLoad) -> None:
        cards = self._cards
        assert cards is not None
        hit = self._hit(fault)
        cards.load_link(hit, fault.permille)
        self._until(fault, lambda: cards.load_link(hit, -fault.permille))

    # ---- engines ----

    def _hang(self, number: int, fault: EngineHung) -> None:
        for replica in self._hit(fault):
            replica.hang(None if fault.for_s is None else _ns(fault.for_s))

    def _kill(self, number: int, fault: EngineKilled) -> None:
        restart_ns = None if fault.restart_s is None else _ns(fault.restart_s)
        for replica in self._hit(fault):
            replica.die("killed", restart_ns)

    def _starve(self, number: int, fault: OomLongPrompt) -> None:
        restart_ns = None if fault.restart_s is None else _ns(fault.restart_s)
        trouble = Trouble(oom_tokens=fault.tokens_from, oom_restart_ns=restart_ns)
        self._trouble(number, fault, trouble)

    def _chill(self, number: int, fault: ColdStart) -> None:
        def end() -> None:
            del self._cold[number]
            self._set_cold()

        self._cold[number] = fault
        self._set_cold()
        self._until(fault, end)

    def _set_cold(self) -> None:
        factors = (fault.factor_permille for fault in self._cold.values())
        self._world.cold_start_factor = Fraction(max(factors, default=1000), 1000)
        self._world.keeps_version = any(fault.keeps_version for fault in self._cold.values())

    # ---- everything else ----

    def _disturb(self, number: int, fault: Network) -> None:
        delay_ns = round(fault.delay_ms * NS_PER_MS)
        self._trouble(number, fault, Trouble(delay_ns=delay_ns, loss_permille=fault.loss_permille))

    def _spoil(self, number: int, fault: BadWeights) -> None:
        def end() -> None:
            del self._bad_weights[number]

        hit = frozenset(replica.id for replica in self._hit(fault))
        self._bad_weights[number] = (fault, hit)
        self._until(fault, end)

    def _hollow(self, number: int, fault: BadAnswers) -> None:
        self._trouble(number, fault, Trouble(hollow=True))

    def _keep_down(self, number: int, fault: StartFails) -> None:
        def end() -> None:
            del self._bad_starts[number]

        hit = frozenset(replica.id for replica in self._hit(fault))
        self._bad_starts[number] = (fault, hit)
        self._until(fault, end)

    def _storm(self, number: int, fault: RetryStorm) -> None:
        def end() -> None:
            del self._storms[number]
            self._set_storm()

        self._storms[number] = fault
        self._set_storm()
        self._until(fault, end)

    def _set_storm(self) -> None:
        attempts = (fault.attempts for fault in self._storms.values())
        self._world.retry_attempts = max(attempts, default=0)


def parse_fault(text: str) -> Fault:
    """A fault written on one line as in a scenario file, such as
    ``{kind: gpu_lost, at_s: 30, on: 0}``.

    Raises:
        FaultError: it is none, or one of its fields is wrong.
    """
    try:
        raw = parse_document(text, "a fault")
        # YAML 1.1 reads a bare ``on`` as true.
        named = {"on" if key is True else key: value for key, value in raw.items()}  # type: ignore[comparison-overlap]
        return msgspec.convert(named, Fault)  # type: ignore[no-any-return]
    except ValueError as error:  # of the document, or of a field
        why = " ".join(str(error).split())
        raise FaultError(
            f"{text!r} is no fault: {why}; write it as {{kind: gpu_lost, at_s: 30, on: 0}}, with"
            f" one of the kinds {', '.join(FAULT_KINDS)}"
        ) from error


def span_s(fault: Fault) -> tuple[float, float | None]:
    """From when to when it lasts, in seconds; None: for good."""
    lasts = (getattr(fault, name, None) for name in ("for_s", "back_s", "reset_s", "restart_s"))
    known = [seconds for seconds in lasts if seconds is not None]
    return fault.at_s, fault.at_s + known[0] if known else None


def kind_of(fault: Fault) -> str:
    """Its name in scenario files."""
    return str(fault.__struct_config__.tag)


def _ns(seconds: float) -> int:
    return round(seconds * NS)
