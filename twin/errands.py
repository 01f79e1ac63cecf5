"""What the policy asks for beside sending requests: second runs, checkpoints, look-ups, replicas.

Each is answered by one event, after the time it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from policy.decisions import (
    LookUp,
    ReadProgress,
    Rotated,
    SaveCheckpoint,
    Start,
    Stop,
    Verify,
    Warm,
)
from policy.events import CheckpointFailed, CheckpointSaved, LookedUp, Verified, Warmed
from twin.calls import Second
from twin.dice import Dice
from twin.engine import Sequence, UnfitError

if TYPE_CHECKING:
    import simpy

    from policy.decisions import Decision
    from policy.events import Event
    from twin.calls import Call
    from twin.world import World

_FOUND, _AGE, _CONFIDENCE = range(3)
"""What is drawn of a kept answer."""
KEPT_CONFIDENCE_LEAST = 700  # only answers that looked sure are kept


class Errands:
    """Carries out the decisions that not every request needs."""

    __slots__ = ("_cache_dice", "_doers", "_store_dice", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._cache_dice = Dice(world.seed, "cache")
        self._store_dice = Dice(world.seed, "store")
        self._doers = {
            Verify: self._verify,
            SaveCheckpoint: self._save,
            LookUp: self._look_up,
            ReadProgress: self._read_progress,
            Start: self._start,
            Warm: self._warm,
            Stop: self._stop,
            Rotated: self._rotated,
        }

    def run(self, decision: Decision) -> None:
        """Carry it out; a decision that asks for nothing is only for the log."""
        doer = self._doers.get(type(decision))
        if doer is not None:
            doer(decision)  # type: ignore[operator]

    def _later(self, delay_ns: int, event: Event) -> None:
        self._world.after(delay_ns, lambda _: self._world.runner.feed(event))

    # ---- second runs ----

    def _verify(self, decision: Verify) -> None:
        world = self._world
        call = world.open_call(decision.request)
        self.abort_second(call)
        chunk, row = call.chunk, call.row
        seq = Sequence(
            ~decision.request, chunk.prompt_tokens[row], chunk.output_tokens[row],
            chunk.max_tokens[row], 0, chunk.endpoint[row] == "embeddings", chunk.prefix[row],
            chunk.prefix_block_tokens[row], call,
        )  # fmt: skip
        call.second = Second(seq, decision.replica, world.now_ns)
        replica = world.replicas[decision.replica]
        try:
            replica.submit(seq, world.now_ns)
        except UnfitError:
            world.failures.fail(call, seq, "rejected", replica.entry_ns + world.settings.network_ns)

    def verified(self, event: simpy.Event) -> None:
        """The second answer is back."""
        seq: Sequence = cast("Sequence", event._value)
        call: Call | None = seq.data
        if call is None or call.second is None or call.second.seq is not seq:
            return
        world = self._world
        where = call.second.replica
        features = world.features(call, seq, where)
        correct = -1 if features is None else int(features.correct)
        request = ~seq.id
        call.second = None
        seq.data = None
        tokens = 0 if seq.pooling else seq.outputs
        verified = Verified(request, where, world.agree(request, call.correct, correct), tokens)
        if features is not None and call.candidates:
            verified = msgspec.structs.replace(
                verified,
                entropy_mean_millinats=features.entropy_mean_millinats,
                entropy_worst_millinats=features.entropy_worst_millinats,
                close_permille=features.close_permille,
                contradiction=features.contradiction,
            )
        world.runner.feed(verified)

    def verification_failed(self, call: Call, seq: Sequence) -> None:
        """No second answer will come."""
        second = call.second
        if second is not None and second.seq is seq:
            call.second = None
            seq.data = None
            self._world.runner.feed(Verified(~seq.id, second.replica, "failed"))

    def abort_second(self, call: Call) -> None:
        second = call.second
        if second is not None:
            call.second = None
            second.seq.data = None
            self._world.replicas[second.replica].abort(second.seq.id, self._world.now_ns)

    # ---- the store and the cache ----

    def _save(self, decision: SaveCheckpoint) -> None:
        settings = self._world.settings
        request = decision.request
        fails = self._store_dice.number(request) % 1000 < settings.checkpoint_fail_permille
        self._later(
            settings.checkpoint_ns,
            CheckpointFailed(request) if fails else CheckpointSaved(request, f"c{request}"),
        )

    def _look_up(self, decision: LookUp) -> None:
        settings = self._world.settings
        request, dice = decision.request, self._cache_dice
        looked_up = LookedUp(request, False)
        if dice.number(request, _FOUND) % 1000 < settings.cache_hit_permille:
            age_ns = dice.number(request, _AGE) % (settings.cache_age_most_ns + 1)
            spread = 1001 - KEPT_CONFIDENCE_LEAST
            confidence = KEPT_CONFIDENCE_LEAST + dice.number(request, _CONFIDENCE) % spread
            looked_up = LookedUp(request, True, age_ns, confidence)
        self._later(settings.lookup_ns, looked_up)

    # ---- replicas ----

    def _read_progress(self, decision: ReadProgress) -> None:
        self._world.replicas[decision.replica].read_progress()

    def _start(self, decision: Start) -> None:
        self._world.replicas[decision.replica].start(decision.version)

    def _stop(self, decision: Stop) -> None:
        self._world.replicas[decision.replica].stop()

    def _rotated(self, decision: Rotated) -> None:
        after_ns = self._world.settings.hung_restart_ns
        if after_ns and (decision.state, decision.why) == ("isolated", "hung"):
            self._world.replicas[decision.replica].restart("hung", after_ns)

    def _warm(self, decision: Warm) -> None:
        replica = self._world.replicas[decision.replica]

        def warmed(event: simpy.Event) -> None:
            ok = replica.state == "up" and not replica.stalled
            self._world.runner.feed(Warmed(replica.id, replica.version, ok))

        self._world.after(self._world.settings.warm_ns, warmed)
