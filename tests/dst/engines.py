"""Random scenarios on real engines: the twin's world, with its cards, answers and faults.

The same scenarios as on the light fleet, as far as the world knows what befalls them. A run costs
more, and what it says is about the driver, too: engines that preempt, answers that are late.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from policy.events import Forecasted, PolicySwitched, RolloutRequested
from policy.parameters import canonical
from tests.dst.clients import Clients
from tests.dst.random_scenarios import Moment, Scenario, checked
from tests.dst.rules import Broken
from twin.arrivals import Asked
from twin.cards import CardSettings
from twin.drawn_answers import Answers, DrawnAnswers
from twin.faults import Fault
from twin.fleet import ReplicaSpec, fleet_of
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from policy.decisions import Settled
    from policy.events import ReplicaUp
    from tests.dst.light import Weather
    from twin.calls import Result

S = 1_000_000_000
OUTPUTS = (1, 20, 60, 120, 400)
TEXT, POOLING = "h100-sxm/qwen3-8b", "h100-sxm/qwen3-embedding-0.6b"


class Request(Asked):
    """A request whose client is one of the scenario's."""

    __slots__ = ("clients", "number")

    def __init__(self, clients: Clients, fields: dict[str, Any]) -> None:
        super().__init__(**fields)
        self.clients = clients
        self.number = -1

    def settled(self, result: Result, decision: Settled) -> None:
        self.clients.settled(decision.request, decision)


class EnginePlayer:
    """Plays one scenario in the twin's world."""

    def __init__(self, scenario: Scenario, seen: Counter[str] | None = None) -> None:
        self.scenario = scenario
        self.checker, policy = checked(scenario, seen)
        self.rng = random.Random(scenario.seed + 2)  # noqa: S311
        features = scenario.features
        weather = scenario.weather
        self.world = World(
            [_spec(spec, 0) for spec in scenario.replicas],
            policy,
            self.checker,
            lambda chunk: None,
            WorldSettings(
                scrape_every_ns=S, scrape_age_ns=S // 10, sample_every_ns=0,
                call_timeout_ns=60 * S, warm_ns=S // 2,
                cache_hit_permille=weather.hit_permille,
                checkpoint_fail_permille=weather.save_fails_permille,
            ),
            standbys=[_spec(spec, start_ns) for spec, start_ns in scenario.standbys],
            faults=self._faults(),
            answers=DrawnAnswers(_answers(weather), scenario.seed),
            cards=CardSettings() if "gpus" in features else None,
            seed=scenario.seed,
        )  # fmt: skip
        self.clients = Clients(self.rng, features, self)

    def play(self) -> None:
        """Let the whole run happen, to its end.

        Raises:
            Broken: the policy broke an invariant.
        """
        scenario, clients = self.scenario, self.clients
        for at_ns, fields in scenario.arrivals:
            self.later(at_ns, partial(clients.ask, fields))
        for at_ns, fields, steps in scenario.chains:
            self.later(at_ns, partial(clients.go_on, fields, steps))
        for moment in scenario.moments:
            if moment.what in ("switch", "rollout", "forecast"):
                self.later(moment.at_ns, partial(self._tell, moment))
        self.world.run(iter(()))
        self.checker.end(self.world.now_ns)
        if self.world.refused:
            raise Broken(f"seed {scenario.seed}: {self.world.refused} events were refused")

    # The clients' door

    def offer(self, fields: dict[str, Any]) -> int:
        wanted = dict(fields)
        prompt_tokens = max(1, wanted.pop("prompt_bytes") // 4)
        output_tokens = self.rng.choice(OUTPUTS)
        if wanted["max_tokens"]:
            output_tokens = min(output_tokens, wanted["max_tokens"])
        if wanted["endpoint"] == "embeddings":
            output_tokens = 0
        wanted["prefix_block_tokens"] = wanted.pop("prefix_block_bytes", 0) // 4
        wanted |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        return self.world.offer(Request(self.clients, wanted))

    def cancel(self, request: int) -> None:
        if request in self.world.calls:
            self.world.cancel(request)

    def later(self, delay_ns: int, what: Callable[[], None]) -> None:
        self.world.clients += 1

        def happen(event: object) -> None:
            self.world.clients -= 1
            what()

        self.world.after(delay_ns, happen)

    # What befalls the fleet

    def _tell(self, moment: Moment) -> None:
        feed = self.world.runner.feed
        if moment.what == "switch":
            old = canonical(self.checker.ledger.parameters)
            feed(PolicySwitched(old, canonical(moment.detail)))
        elif moment.what == "rollout":
            feed(RolloutRequested(*moment.detail))
        else:
            assert isinstance(moment.detail, Forecasted)
            feed(moment.detail)

    def _faults(self) -> list[Fault]:
        found = [_fault(moment) for moment in self.scenario.moments]
        return msgspec.convert([fault for fault in found if fault], list[Fault])


def _answers(weather: Weather) -> Answers:
    """Sure ones and doubtful ones."""
    shaky = weather.shaky_permille / 1000

    def kind(share: float, mean: int, worst: int, close: int) -> dict[str, Any]:
        return {
            "share": share, "entropy_mean": {"fixed": mean}, "entropy_worst": {"fixed": worst},
            "close_permille": {"fixed": close}, "correct": 0.9,
        }  # fmt: skip

    kinds = [kind(1 - shaky, 300, 1500, 20), kind(shaky / 2, 1000, 2800, 80),
             kind(shaky / 2, 1800, 3000, 250)]  # fmt: skip
    return msgspec.convert({"rules": [{"kinds": kinds}]}, Answers)


def _fault(moment: Moment) -> dict[str, Any] | None:
    """What comes nearest to it in the world."""
    for_s = moment.for_ns / S
    lasting = for_s or None
    at = {"at_s": moment.at_ns / S, "on": moment.target}
    if moment.what in ("kill", "kill_down_first"):
        return at | {"kind": "engine_killed", "restart_s": lasting}
    if moment.what == "hang":
        return at | {"kind": "engine_hung", "for_s": for_s or 5.0}
    if moment.what == "slow":
        return at | {"kind": "slow_card", "factor_permille": 1000 * moment.detail, "for_s": lasting}
    if moment.what == "errors":
        return at | {"kind": "network", "loss_permille": moment.detail[1], "for_s": for_s or 1.0}
    if moment.what == "gpu_fault":
        kind, code = moment.detail
        if kind.startswith("ecc"):
            return at | {"kind": "ecc_uncorrectable", "dies_after_s": 1.0, "reset_s": 5.0}
        fatal = kind == "xid_fatal"
        return at | {"kind": "xid", "code": code or 31, "fatal": fatal, "reset_s": 20.0}
    return None


@cache
def _profile(pooling: bool) -> ReplicaSpec:
    (spec,) = fleet_of([(POOLING if pooling else TEXT, 1)])
    return spec


def _spec(told: ReplicaUp, start_ns: int) -> ReplicaSpec:
    """An engine of the size that the scenario's replica has."""
    spec = _profile(told.pooling)
    settings = replace(
        spec.settings,
        kv_blocks=told.kv_blocks,
        max_num_seqs=told.max_num_seqs,
        max_num_batched_tokens=told.max_num_batched_tokens,
        max_model_len=told.max_model_len,
    )
    return replace(
        spec, id=told.replica, name=told.name, settings=settings, serves=told.models,
        version=told.version, domain=told.domain, closeness_permille=told.closeness_permille,
        memory_mb=told.memory_mb, cold_start_ns=start_ns or 2 * S,
    )  # fmt: skip
