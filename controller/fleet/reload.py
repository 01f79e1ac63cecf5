"""Another version of a model takes over while it serves: ``twinkeel model hot-reload``.

What happens in which order is decided by ``policy.rollout``, and done by the fleet. Here it is seen
to that it can be begun (weights, room, standbys), the new version is tried out before it takes
requests, and how it goes is told to whoever asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from controller.deployment.papers import Refusal
from controller.fleet import room
from controller.fleet.checking import try_out
from controller.fleet.config import HUB_NAME, Name
from controller.fleet.local import LocalFleet
from controller.fleet.memory import needed_mb
from controller.fleet.room import Spot
from controller.fleet.swapping import Swap
from controller.listener import Listener
from controller.upstream.warming import warm
from policy.decisions import Alert, Rotated
from policy.events import ReplicaDown, RolloutRequested, Standby, Warmed
from policy.files import FileError
from policy.rollout import ROLLED_BACK, Rollout, RolloutState
from policy.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.driver import Driver
    from controller.fleet.contract import Fleet, Gate, SlotView
    from controller.fleet.local import ModelState
    from controller.gpus.view import CardView
    from controller.upstream.replica import Replica
    from policy.decisions import Decision
    from policy.events import Event
    from policy.rollout import Move

Phase = Literal[
    "draining", "starting", "warming", "verifying", "switched", "watching", "rolling back", "done",
    "rolled back", "given up",
]  # fmt: skip
"""draining: without a standby, one replica finishes what it has, and is ended. starting: its
processes start. warming: they answer, have loaded the right weights, and get their
first prompts. verifying: it is tried out beside the version that serves. switched: it takes
requests, and the old ones finish where they began. watching: the old replicas are kept for a while,
should it fail after all. rolling back: it did. done, rolled back: over. given up: over, halfway."""
OVER: frozenset[Phase] = frozenset({"done", "rolled back", "given up"})
LOOK_S = 0.25
STEPS_MOST = 100
"""Of a reload that is told; the oldest stay."""
SWAP = (
    "--drain-then-swap replaces one replica at a time instead: it is drained, ended and started"
    " anew, while the others serve"
)
ALONE = (
    "it is the only replica: while it is drained, ended and started anew, nothing would serve. Add"
    " a standby, or a replica, to the fleet file"
)
ELSEWHERE = "copy the weights there, and give their whole path there, or a hub name"
DRAIN_S_MOST = 900.0
"""For the requests that are open on the replica that goes first."""

log = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for another version of a model."""

    version: Name
    weights: Annotated[str, Meta(max_length=4096)] = ""
    """Folder on the controller's machine, or a hub name; empty: the version is known."""
    swap: bool = False
    """Where there is no standby: one replica at a time."""


class Step(msgspec.Struct, frozen=True):
    """Something that happened to a reload."""

    after_s: float
    """Since it was asked for."""
    text: str


class ReloadView(msgspec.Struct, frozen=True):
    """How a reload stands."""

    model: str
    version: str
    before: str
    phase: Phase
    why: str
    """Of one that did not come to its end."""
    took_s: float
    """Until now, or until it was over."""
    new: int
    """Replicas that take requests and have the new version."""
    old: int
    """Those that are up and have another."""
    open_on_old: int
    """Requests that are still open there."""
    confidence: float
    """Mean of the new version's answers; -1: not known."""
    confidence_before: float
    """That of the version before, to the same questions; -1: not known."""
    steps: tuple[Step, ...]

    @property
    def over(self) -> bool:
        return self.phase in OVER


class _Reload:
    """A reload, from when it was asked for until the next one of its model."""

    def __init__(
        self, model: str, version: str, before: str, swap: Swap | None, added: bool
    ) -> None:
        self.model = model
        self.added = added
        """The fleet knows the version only by this."""
        self.swap = swap
        self.waits = swap is not None
        """Nobody has asked the policy for it yet."""
        self.version = version
        self.before = before
        self.began_s = time.monotonic()
        self.ended_s: float | None = None
        self.phase: Phase = "starting"
        self.cause = ""
        """What the policy said."""
        self.detail = ""
        """What was seen."""
        self.confidence = self.confidence_before = -1.0
        self.steps: list[Step] = []

    @property
    def over(self) -> bool:
        return self.ended_s is not None

    @property
    def why(self) -> str:
        return ": ".join(part for part in (self.cause, self.detail) if part)

    @property
    def took_s(self) -> float:
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.began_s

    def note(self, text: str) -> None:
        if len(self.steps) < STEPS_MOST:
            self.steps.append(Step(round(self.took_s, 2), text))


class Reloads(Listener):
    """Reloads of a fleet's models, one at a time for each."""

    def __init__(self, fleet: Fleet, driver: Driver) -> None:
        self._fleet = fleet
        self._driver = driver
        self._tasks: set[asyncio.Task[None]] = set()
        self.gate: Gate
        """Of the replicas; it is made after this."""
        self.cards: Callable[[], Sequence[CardView]] = tuple
        """This machine's cards and slices, as they are now."""
        self._reloads: dict[str, _Reload] = {}
        driver.listen(self)
        driver.every(LOOK_S, self._look_at_all)

    # ---- asking for one ----

    async def begin(self, model: str, asked: Asked) -> ReloadView:
        """Begin a reload, or call one back by asking for the version from before.

        Raises:
            Refusal: it cannot be begun, and nothing was changed: why, and what to do.
        """
        fleet = self._able()
        state = _state_of(fleet, model)
        if self._under_way(model, asked):
            return self.view(model)
        weights = await asyncio.to_thread(_weights_of, state, asked)
        need = await asyncio.to_thread(_need_of, state, weights)
        spots = self._spots(state, asked, need)
        await asyncio.to_thread(self._see_room, state, asked, weights, spots)
        if self._under_way(model, asked):  # somebody else was quicker
            return self.view(model)
        try:
            fleet.add_version(model, asked.version, weights)
        except ValueError as error:
            raise Refusal(
                "version_known", f"{error}: give other weights another version's name"
            ) from None
        swap = self._swap(fleet, state, spots) if asked.swap else None
        added = asked.version not in state.versions
        reload = self._reloads[model] = _Reload(model, asked.version, state.version, swap, added)
        reload.note(f"{model}: {asked.version} ({weights}) is to replace {state.version}")
        log.info("%s: reload of %s from %s asked for", model, asked.version, weights)
        fleet.changing(model, True)
        if swap is None:
            self._driver.feed(RolloutRequested(model, asked.version))
        else:
            task = asyncio.get_running_loop().create_task(self._make_room(reload, swap))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._look(reload)
        return self.view(model)

    def _swap(self, fleet: LocalFleet, state: ModelState, spots: Sequence[Spot]) -> Swap | None:
        """What makes room, if there is no standby."""
        base = self._base(state)
        first = next((slot.replica for slot in base if slot.name == spots[0].name), None)
        if first is None:
            return None  # a standby is started first, as ever
        declared = frozenset(slot.replica for slot in base)
        return Swap(fleet, self._driver, self.gate, self._driver.replicas[first], declared)

    async def _make_room(self, reload: _Reload, swap: Swap) -> None:
        why = await swap.drain(DRAIN_S_MOST)
        if why and reload.waits:
            reload.waits, reload.detail = False, why

    def view(self, model: str) -> ReloadView:
        """The last reload of a model, as it stands.

        Raises:
            Refusal: there was none since the controller began.
        """
        reload = self._reloads.get(model)
        if reload is None:
            raise Refusal("no_such_reload", f"no reload of {model} was asked for since it began")
        self._look(reload)
        new, old = self._sides(reload)
        return ReloadView(
            model, reload.version, reload.before, reload.phase, reload.why,
            round(reload.took_s, 3), len(new), len(old), sum(len(each.attempts) for each in old),
            reload.confidence, reload.confidence_before, tuple(reload.steps),
        )  # fmt: skip

    def _able(self) -> LocalFleet:
        if not isinstance(self._fleet, LocalFleet):
            raise Refusal(
                "not_local",
                "the servers are run by someone else, who changes their version: only a fleet of"
                " this controller's own processes (serve --fleet) is reloaded here",
            )
        policy = self._driver.policy
        rollout = policy.mechanisms.get("rollout") if isinstance(policy, Service) else None
        if not isinstance(rollout, Rollout):
            raise Refusal(
                "no_rollout",
                "the policy in force has no rollout: it only observes, or has rollout.enabled:"
                " false",
            )
        return self._fleet

    def _under_way(self, model: str, asked: Asked) -> bool:
        """Whether there is nothing to begin; what is called back is on its way back then."""
        reload = self._reloads.get(model)
        if reload is None:
            return False
        if reload.over:
            if reload.swap is not None and not reload.swap.healed:
                raise Refusal("busy", f"the last replica of {model} is being started again")
            return False
        if asked.version == reload.version:  # it is asked how that goes
            return True
        if asked.version != reload.before:
            raise Refusal(
                "busy",
                f"{model} is on its way to {reload.version} ({reload.phase}); asking for"
                f" {reload.before} calls that back",
            )
        if reload.swap is not None:
            reload.swap.call_back()
        reload.waits = False
        reload.detail = "an operator asked for the version from before"
        self._driver.feed(RolloutRequested(model, asked.version))
        self._look(reload)
        return True

    def _spots(self, state: ModelState, asked: Asked, need: str) -> list[Spot]:
        """Where the new version is to be started first."""
        name = state.name
        slots, known = self._slots(name), self._standbys(name)
        standbys = [slot for slot in slots if slot.replica in known]
        serving = [slot for slot in slots if slot.state == "serving"]
        if not serving:
            raise Refusal("not_serving", f"no replica of {name} serves: see GET /fleet")
        if all(slot.version == asked.version for slot in serving):
            raise Refusal("served_already", f"{name} is served in version {asked.version} already")
        if not standbys and not asked.swap:
            later = ", ".join(f"{slot.name} is {slot.state}" for slot in slots if slot.standby)
            ready = (
                f"no standby of {name} is ready ({later})" if later else f"{name} has no standby"
            )
            raise Refusal(
                "no_standby",
                f"{ready}, so {asked.version}, which needs {need}, cannot be started beside"
                f" {state.version}: add one under models.{name}.standbys, or {SWAP}",
            )  # fmt: skip
        if not standbys and len(serving) == 1:
            raise Refusal("only_replica", f"{serving[0].name}: {ALONE}")
        places = (*state.spec.replicas, *state.spec.standbys)
        args = {slot.replica: place.args for slot, place in zip(slots, places, strict=True)}
        chosen = standbys[: len(serving)] or serving[:1]
        return [
            Spot(
                slot.name, slot.gpus, args[slot.replica],
                state.versions.get(slot.version, "") if slot.pid else "", slot.pid,
            )
            for slot in chosen
        ]  # fmt: skip

    def _see_room(
        self, state: ModelState, asked: Asked, weights: str, spots: Sequence[Spot]
    ) -> None:
        cards = {card.uuid: card for card in self.cards()}
        lacking = room.lacking(state.spec, asked.version, weights, spots, cards)
        if lacking:
            # A standby goes first, whatever was asked for: the policy starts what is there.
            alone = any(spot.name == slot.name for spot in spots for slot in self._base(state))
            offer = [] if alone else [f"make room, or without standbys in the fleet file {SWAP}"]
            raise Refusal("no_room", *lacking, *offer)

    # ---- trying it out ----

    async def close(self) -> None:
        """What is being drained is not waited for any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def warm(self, replica: Replica) -> Warmed:
        """What ``Warm`` asks for; a version that is new is tried out as well."""
        warmed = await warm(replica)
        reload = self._reload_of(replica)
        if reload is None or reload.over or warmed.version != reload.version:
            return warmed
        if not warmed.ok:
            reload.detail = f"{replica.name} did not answer its first prompts"
            return warmed
        assert isinstance(self._fleet, LocalFleet)
        spec = self._fleet.model(reload.model).spec
        try:
            trial = await try_out(
                replica, self._beside(reload), reload.model, spec.checks,
                self._driver.parameters, spec.pooling,
            )  # fmt: skip
        except Exception as error:  # whatever it answers, the rollout waits for a word
            log.exception("%s could not be tried out", replica.name)
            reload.detail = f"{replica.name} could not be tried out: {error!r}"
            return Warmed(replica.id, warmed.version, False)
        reload.confidence, reload.confidence_before = trial.confidence, trial.before
        if trial.why:
            reload.detail = f"{replica.name}: {trial.why}"
            reload.note(reload.detail)
            return Warmed(replica.id, warmed.version, False)
        if trial.confidence >= 0:
            beside = f", {trial.before:.2f} before" if trial.before >= 0 else ""
            reload.note(f"{replica.name}: mean confidence {trial.confidence:.2f}{beside}")
        return warmed

    def _beside(self, reload: _Reload) -> Replica | None:
        """The least busy of those that serve the version from before."""
        _, old = self._sides(reload)
        return min(old, key=lambda each: len(each.attempts), default=None)

    # ---- how it goes ----

    def decided(self, decision: Decision) -> None:
        """The policy says why a rollout ends, once in a while: an alert is not repeated."""
        if not isinstance(decision, Alert | Rotated):
            return
        for reload in self._reloads.values():
            if reload.over:
                continue
            if isinstance(decision, Alert) and decision.key == f"rollout {reload.model}":
                reload.cause = decision.cause.removeprefix(f"{ROLLED_BACK}: ")
            elif isinstance(decision, Rotated) and self._models_slot(decision.replica, reload):
                name = self._driver.replicas[decision.replica].name
                reload.note(f"{name} {decision.state}: {decision.why}")

    def fed(self, now_ns: int, event: Event) -> None:
        """What goes wrong with the new version is seen here first. A slot that was drained for it
        is a standby as soon as the policy has heard so."""
        if isinstance(event, Standby):
            asyncio.get_running_loop().call_soon(self._go_on)
        if not isinstance(event, ReplicaDown | Warmed):
            return
        replica = self._driver.replicas.get(event.replica)
        reload = None if replica is None else self._reload_of(replica)
        if replica is None or reload is None or reload.over:
            return
        if isinstance(event, Warmed):
            assert isinstance(self._fleet, LocalFleet)
            why = "" if event.ok else self._fleet.failure(replica.id)
            if why:
                reload.detail = f"{replica.name}: {why}"
            return
        version = "" if replica.spec is None else replica.spec.version
        if event.reason != "stopped" and version == reload.version:
            reload.detail = f"{replica.name} went down: {event.reason}"

    def _go_on(self) -> None:
        for reload in self._reloads.values():
            standbys = self._standbys(reload.model)
            if reload.waits and standbys:
                reload.waits = False
                self._driver.feed(RolloutRequested(reload.model, reload.version))

    def _standbys(self, model: str) -> frozenset[int]:
        """Those that the policy knows."""
        known = frozenset(replica for replica, _ in self._rollout_state().standbys)
        return known & frozenset(slot.replica for slot in self._slots(model))

    def _look_at_all(self) -> None:
        for reload in self._reloads.values():
            self._look(reload)
            if reload.over and reload.swap is not None and not reload.swap.healed:
                reload.swap.heal(self._standbys(reload.model))
            if reload.over and reload.added and isinstance(self._fleet, LocalFleet):
                reload.added = not self._fleet.drop_version(reload.model, reload.version)

    def _look(self, reload: _Reload) -> None:
        """Note what has changed since the last look."""
        if reload.over:
            return
        phase = self._phase(reload)
        if phase == reload.phase and phase not in OVER:
            return
        reload.phase = phase
        if phase in OVER:
            reload.ended_s = time.monotonic()
            assert isinstance(self._fleet, LocalFleet)
            self._fleet.changing(reload.model, False)
            if phase == "done":
                reload.cause = reload.detail = ""
                reload.added = False
            elif not reload.why:
                reload.detail = "the policy gave it up: its alerts say why"
            text = f"{reload.model} {reload.version}: {phase}"
            text = f"{text}: {reload.why}" if reload.why else text
            log.log(logging.INFO if phase == "done" else logging.WARNING, "%s", text)
            if phase != "done":
                key = f"reload {reload.model} {reload.version}"
                self._driver.trouble(key, f"{phase}: {reload.why}")
        reload.note(f"{phase}: {reload.why}" if reload.why else phase)

    def _phase(self, reload: _Reload) -> Phase:
        if reload.waits:
            return "draining"
        state = self._rollout_state()
        move = next((each for each in state.moves if each.model == reload.model), None)
        if move is not None and move.undoes is None and move.version == reload.version:
            return self._forward(reload, state, move)
        if move is not None:
            return "rolling back"
        new, old = self._sides(reload)
        serving_old = [each for each in old if self._in_rotation(each, state)]
        if new:
            return "given up" if serving_old else "done"
        return "rolled back"

    def _forward(self, reload: _Reload, state: RolloutState, move: Move) -> Phase:
        if move.phase == "watching":
            return "watching"
        if move.phase == "draining" or move.replaced:
            return "switched"
        stages = {new.stage for _, new in state.new if new.model == reload.model}
        if stages and "starting" not in stages:
            return "verifying"
        starting = {number for number, new in state.new if new.stage == "starting"}
        slots = [slot for slot in self._slots(reload.model) if slot.replica in starting]
        return "warming" if slots and all(_answers(slot) for slot in slots) else "starting"

    def _rollout_state(self) -> RolloutState:
        policy = cast("Service", self._driver.policy)
        rollout: Any = policy.mechanisms.get("rollout")
        if not isinstance(rollout, Rollout):  # a policy came into force that has none
            return RolloutState([], [], [], [], [], [])
        return rollout.state(self._driver.now_ns())

    def _sides(self, reload: _Reload) -> tuple[list[Replica], list[Replica]]:
        """Replicas that take requests in the new version, and those that are up in another."""
        state = self._rollout_state()
        new: list[Replica] = []
        old: list[Replica] = []
        for slot in self._slots(reload.model):
            replica = self._driver.replicas[slot.replica]
            if replica.spec is None:
                continue
            if replica.spec.version != reload.version:
                if replica.up or replica.attempts:
                    old.append(replica)
            elif self._in_rotation(replica, state):
                new.append(replica)
        return new, old

    def _in_rotation(self, replica: Replica, state: RolloutState) -> bool:
        left_out = {*(each for each, _ in (*state.new, *state.draining)), *state.unwanted}
        return replica.up and replica.id not in left_out

    def _base(self, state: ModelState) -> list[SlotView]:
        """Slots of the model's replicas, as the fleet file has them; its standbys follow."""
        return self._slots(state.name)[: len(state.spec.replicas)]

    def _slots(self, model: str) -> list[SlotView]:
        return [slot for slot in self._fleet.view().slots if slot.model == model]

    def _models_slot(self, replica: int, reload: _Reload) -> bool:
        return any(slot.replica == replica for slot in self._slots(reload.model))

    def _reload_of(self, replica: Replica) -> _Reload | None:
        for reload in self._reloads.values():
            if self._models_slot(replica.id, reload):
                return reload
        return None


def _answers(slot: SlotView) -> bool:
    return slot.state in ("warming", "serving")


def _state_of(fleet: LocalFleet, model: str) -> ModelState:
    try:
        return fleet.model(model)
    except KeyError:
        known = ", ".join(dict.fromkeys(slot.model for slot in fleet.view().slots))
        raise Refusal("no_such_model", f"the fleet has no model {model}: it has {known}") from None


def _need_of(state: ModelState, weights: str) -> str:
    """What a server with these weights needs, in words."""
    try:
        return str(needed_mb(state.spec, weights))
    except FileError as error:
        raise Refusal("size_unknown", str(error)) from None


def _weights_of(state: ModelState, asked: Asked) -> str:
    """The weights, a link followed: where it leads later must not change what a version is.

    Raises:
        Refusal: they are not there, or are another version's.
    """
    known = state.versions.get(asked.version)
    given = asked.weights or known
    if given is None:
        raise Refusal(
            "no_such_weights",
            f"{state.name} has no version {asked.version} yet: give its folder with --weights",
        )
    path = Path(given).expanduser()
    if not path.exists():
        if HUB_NAME.fullmatch(given) and not given.startswith("."):
            return given
        raise Refusal("no_such_weights", f"{given} is not on the controller's machine: {ELSEWHERE}")
    real = path.resolve()
    if not path.is_absolute() and not given.startswith("~"):
        raise Refusal("no_such_weights", f"{given}: give the whole path")
    for version, other in state.versions.items():
        if version != asked.version and Path(other).expanduser().resolve() == real:
            raise Refusal(
                "same_weights",
                f"{given} is {real}, and so is {version} ({other}): a link that was moved, or one"
                " folder under two names, would be served under the wrong one. Give each version a"
                " folder of its own",
            )  # fmt: skip
    if known is not None and Path(known).expanduser().resolve() == real:
        return known
    return str(real)
