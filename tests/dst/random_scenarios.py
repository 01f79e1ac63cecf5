"""A whole run out of one integer: fleet, policy, traffic, faults, and what else befalls it.

Each scenario leaves some features out, drawn at random: what hides behind one of them is found in
a run without it. The same seed gives the same run, to the last decision.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from policy.compose import build_policy
from policy.events import Forecasted, GpuFault, PolicySwitched, ReplicaUp, RolloutRequested
from policy.parameters import Parameters, canonical
from tests.dst.checker import Checker
from tests.dst.clients import Clients
from tests.dst.light import MS, LightFleet, S, Weather
from tests.dst.random_parameters import random_parameters
from tests.policy_support import up

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from policy.contract import Policy

FEATURES = (
    "bursts", "sessions", "users", "chains", "cancels", "retries", "embeddings", "prefixes",
    "deadlines", "monsters", "standbys", "domains", "deaths", "hangs", "slow", "errors", "gpus",
    "forecasts", "switches", "rollouts", "crashes", "lighter", "scrapes", "touchy",
)  # fmt: skip
MODELS = ("m", "n", "o")
STEPS = ("plan", "search", "tool", "write", "")
ERRORS = (
    "timeout", "oom", "http_5xx", "stream_cut", "empty", "malformed", "silent", "rejected",
    "backpressure",
)  # fmt: skip
SNAPSHOT_EVERY_STEPS = 150
FOLLOWED = 4
"""One in so many runs is followed by a restored policy: it doubles the price of a run."""


@dataclass(slots=True)
class Moment:
    """Something befalls the fleet."""

    at_ns: int
    what: str
    target: int = 0
    for_ns: int = 0
    detail: Any = None


@dataclass(slots=True)
class Scenario:
    """One run, before it has begun."""

    seed: int
    features: frozenset[str]
    parameters: Parameters
    replicas: list[ReplicaUp]
    standbys: list[tuple[ReplicaUp, int]]
    weather: Weather
    span_ns: int
    arrivals: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    chains: list[tuple[int, dict[str, Any], list[str]]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


def random_scenario(seed: int) -> Scenario:
    """The scenario of this seed."""
    rng = random.Random(seed)  # noqa: S311
    features = frozenset(name for name in FEATURES if rng.random() < 0.5)
    models = MODELS[: rng.randrange(1, 4)]
    replicas = _fleet(rng, features, models)
    standbys = []
    if "standbys" in features:
        first = len(replicas)
        for number in range(first, first + rng.randrange(1, 4)):
            spec = _replica(rng, features, number, models, pooling=False)
            standbys.append((spec, rng.choice((MS, S, 5 * S))))
    scenario = Scenario(
        seed, features, _policy(rng, features), replicas, standbys, _weather(rng),
        rng.choice((2, 5, 10, 20, 60)) * S,
    )  # fmt: skip
    _add_traffic(rng, scenario, models)
    _add_moments(rng, scenario, models)
    return scenario


def _policy(rng: random.Random, features: frozenset[str]) -> Parameters:
    # A mechanism that has no room for the fleet cannot watch it.
    fixed: dict[str, Any] = {
        name: {"replicas_max": 4096} for name in ("health", "capacity", "rollout")
    }
    # In seconds of run, a drift shows in fewer readings than in a day.
    fixed["drift"] = {"sample_ms": 0, "samples_least": 2}
    fixed["tiers"] = {"turbo_max_tflop": 15, "stable_max_tflop": 60}
    if "lighter" in features:
        fixed["tiers"]["fallback_model"] = rng.choice(MODELS)
    if "touchy" in features:
        fixed["breakers"] = {"rules": touchy_rules(rng)}
    if rng.random() < 0.3:
        fixed["shedding"] = {"queue_max": rng.choice((1, 5, 30))}
    return random_parameters(rng, **fixed)


def touchy_rules(rng: random.Random) -> list[dict[str, Any]]:
    """Breakers that open within seconds; the defaults judge minutes."""
    swift = {
        "window_ms": rng.choice((1000, 3000)), "share_permille": rng.choice((100, 400)),
        "volume_least": rng.choice((3, 10)), "failures_least": 2,
        "open_ms": rng.choice((50, 500)), "open_most_ms": 5000,
        "probe_wait_ms": rng.choice((200, 3000)), "probes_most": rng.choice((1, 3)),
    }  # fmt: skip
    errors = ["timeout", "oom", "http_5xx", "stream_cut", "empty", "malformed", "replica_lost"]
    by = rng.choice((["model"], ["model", "line"], ["model", "kind"], []))
    doubt = {"name": "doubt", "kinds": ["mismatch"], "low_confidence_below_permille": 300}
    return [
        {"name": "errors", "by": by, "kinds": errors, **swift},
        {**doubt, "by": rng.choice((["model"], ["line"])), **swift},
    ]


def _weather(rng: random.Random) -> Weather:
    def share() -> int:
        return rng.choice((0, 50, 300, 1000))

    return Weather(
        hit_permille=share(), save_fails_permille=share() // 2, mismatch_permille=share() // 2,
        verify_fails_permille=share() // 2, wrong_version_permille=rng.choice((0, 0, 500)),
        warm_fails_permille=rng.choice((0, 0, 500)), shaky_permille=share(),
        logprobs_permille=share(), noisy=rng.choice((-1, -1, 0, 1)),
    )  # fmt: skip


def _fleet(
    rng: random.Random, features: frozenset[str], models: tuple[str, ...]
) -> list[ReplicaUp]:
    replicas = [
        _replica(rng, features, number, models, pooling=False)
        for number in range(rng.randrange(1, 6))
    ]
    if "embeddings" in features:
        replicas.append(_replica(rng, features, len(replicas), models, pooling=True))
    return replicas


def _replica(
    rng: random.Random, features: frozenset[str], number: int, models: tuple[str, ...],
    *, pooling: bool,
) -> ReplicaUp:  # fmt: skip
    serves: tuple[str, ...] = () if rng.random() < 0.5 else (rng.choice(models),)
    domain = ""
    if "domains" in features:  # two cards a host, two slices a card
        domain = f"host{number // 4}/gpu{number // 2}/mig{number % 2}"
    return up(
        number, models=serves, pooling=pooling, domain=domain, version="v1",
        max_num_seqs=rng.choice((1, 2, 4, 16, 64)),
        kv_blocks=rng.choice((300, 1000, 5000, 20_000)),
        max_num_batched_tokens=rng.choice((512, 2048, 8192)),
        max_model_len=rng.choice((2048, 8192, 32_768)),
        closeness_permille=rng.choice((1000, 1000, 600)), memory_mb=rng.choice((0, 80_000)),
    )  # fmt: skip


def _add_traffic(rng: random.Random, scenario: Scenario, models: tuple[str, ...]) -> None:
    features = scenario.features
    for _ in range(rng.choice((30, 100, 250))):
        at_ns = rng.randrange(scenario.span_ns)
        copies = rng.choice((1, 1, 3, 12)) if "bursts" in features else 1
        fields = random_request(rng, features, models)
        scenario.arrivals += [(at_ns, fields)] * copies
    scenario.arrivals.sort(key=lambda arrival: arrival[0])
    if "chains" in features:
        for number in range(rng.randrange(1, 15)):
            fields = random_request(rng, features, models)
            fields |= {"chain": f"chain{number}", "endpoint": "chat"}
            steps = [rng.choice(STEPS) for _ in range(rng.randrange(1, 6))]
            scenario.chains.append((rng.randrange(scenario.span_ns), fields, steps))


def random_request(
    rng: random.Random, features: frozenset[str], models: tuple[str, ...]
) -> dict[str, Any]:
    """The fields of one arrival."""
    tokens = [1, 100, 300, 900, 3000]
    if "monsters" in features:
        tokens += [20_000, 200_000]
    fields: dict[str, Any] = {
        "model": rng.choice((*models, *models, *models, "nobody")),
        "endpoint": "chat",
        "prompt_bytes": 4 * rng.choice(tokens),
        "max_tokens": rng.choice((0, 0, 1, 50, 2000)),
        "sla": rng.choice(("", "P0", "P1", "P2")),
        "line": rng.choice(("", "search", "support")),
        "stream": rng.random() < 0.7,
    }
    if "embeddings" in features and rng.random() < 0.2:
        fields |= {"endpoint": "embeddings", "stream": False}
    if "users" in features:
        fields["user"] = rng.choice(("ann", "bob", "cid", ""))
    if "sessions" in features:
        fields["session"] = rng.choice(("s1", "s2", "s3", "s4", ""))
    if "deadlines" in features:
        fields["deadline_ns"] = rng.choice((0, MS, 300 * MS, 5 * S, 60 * S))
    if "prefixes" in features:
        fields["prefix"] = rng.choice(((), (1,), (1, 2), (1, 2, 3), (9, 8)))
        fields["prefix_block_bytes"] = 512
    return fields


def _add_moments(rng: random.Random, scenario: Scenario, models: tuple[str, ...]) -> None:
    """Faults and other events; each feature brings a few."""
    features = scenario.features
    kinds = {
        "deaths": ("kill", "kill_down_first"), "hangs": ("hang",), "slow": ("slow",),
        "errors": ("errors",), "gpus": ("gpu_fault", "read_gpus"), "forecasts": ("forecast",),
        "switches": ("switch",), "rollouts": ("rollout",), "crashes": ("crash",),
        "scrapes": ("scrape",),
    }  # fmt: skip
    for name, whats in kinds.items():
        if name not in features:
            continue
        most = 1 if name in ("crashes", "rollouts") else 4
        for _ in range(rng.randint(1, most)):
            moment = Moment(
                rng.randrange(scenario.span_ns), rng.choice(whats),
                rng.randrange(len(scenario.replicas) + len(scenario.standbys)),
                rng.choice((0, 100 * MS, S, 5 * S, 30 * S)),
            )  # fmt: skip
            moment.detail = _detail(rng, features, models, moment)
            scenario.moments.append(moment)
    scenario.moments.sort(key=lambda moment: moment.at_ns)


def _detail(
    rng: random.Random, features: frozenset[str], models: tuple[str, ...], moment: Moment
) -> Any:
    if moment.what == "errors":
        return rng.choice(ERRORS), rng.choice((50, 300, 1000))
    if moment.what == "slow":
        return rng.choice((2, 5, 20))
    if moment.what == "gpu_fault":
        kinds = ("ecc_uncorrectable", "ecc_correctable", "xid_fatal", "xid_minor")
        return rng.choice(kinds), rng.choice((0, 13, 79))
    if moment.what == "switch":
        return _policy(rng, features)
    if moment.what == "rollout":
        return rng.choice(models), rng.choice(("v2", "v2", "v1"))
    if moment.what == "forecast":
        rates = tuple(rng.choice((0, 500, 10_000, 200_000)) for _ in range(4))
        tokens = tuple(rate * 2 for rate in rates)
        horizons = (60 * S, 300 * S, 600 * S, 1200 * S)
        if rng.random() < 0.5:
            horizons = (S, 5 * S, 20 * S, 60 * S)
        more = tuple(rate * 3 // 2 for rate in rates)
        return Forecasted(horizons, rates, more, tokens, tuple(2 * rate for rate in more))
    return None


def checked(scenario: Scenario, seen: Counter[str] | None) -> tuple[Checker, Policy]:
    """The scenario's policy, and the log that checks it."""
    policy = build_policy(scenario.parameters)
    every = SNAPSHOT_EVERY_STEPS if scenario.seed % FOLLOWED == 0 else 0
    checker = Checker(
        scenario.parameters, policy, seed=scenario.seed, snapshot_every_steps=every, seen=seen
    )
    return checker, policy


class Player:
    """Plays one scenario on a light fleet."""

    def __init__(self, scenario: Scenario, seen: Counter[str] | None = None) -> None:
        self.scenario = scenario
        self.checker, policy = checked(scenario, seen)
        rng = random.Random(scenario.seed + 1)  # noqa: S311
        self.fleet = LightFleet(
            policy,
            self.checker,
            rng,
            lambda event, settled: self.clients.settled(event.request, settled),
            scenario.weather,
        )
        self.clients = Clients(rng, scenario.features, self)

    def play(self) -> None:
        """Let the whole run happen, to its end.

        Raises:
            Broken: the policy broke an invariant.
        """
        fleet, scenario, clients = self.fleet, self.scenario, self.clients
        for spec, start_ns in scenario.standbys:
            fleet.stand_by(spec, start_ns)
        for spec in scenario.replicas:
            fleet.bring_up(spec)
        for at_ns, fields in scenario.arrivals:
            fleet.at(at_ns, partial(clients.ask, fields))
        for at_ns, fields, steps in scenario.chains:
            fleet.at(at_ns, partial(clients.go_on, fields, steps))
        for moment in scenario.moments:
            fleet.at(moment.at_ns, partial(self._happen, moment))
        fleet.run()
        self.checker.end(fleet.now_ns)

    # The clients' door

    def offer(self, fields: dict[str, Any]) -> int:
        return self.fleet.offer(**fields)

    def cancel(self, request: int) -> None:
        self.fleet.cancel(request)

    def later(self, delay_ns: int, what: Callable[[], None]) -> None:
        self.fleet.at(self.fleet.now_ns + delay_ns, what)

    # What befalls the fleet

    def _happen(self, moment: Moment) -> None:
        fleet, target, what = self.fleet, moment.target, moment.what
        if what in ("kill", "kill_down_first"):
            self._kill(moment)
        elif what == "hang":
            fleet.hang(target)
            if moment.for_ns:
                fleet.at(fleet.now_ns + moment.for_ns, lambda: fleet.unhang(target))
            else:
                fleet.at(fleet.now_ns + 60 * S, lambda: fleet.kill(target))
        elif what in ("slow", "errors"):
            self._spoil(moment)
        elif what == "crash":
            fleet.crash(moment.for_ns)
        elif what == "scrape":
            fleet.scrape()
        elif what == "read_gpus":
            fleet.read_gpus()
        else:
            self._tell(moment)

    def _kill(self, moment: Moment) -> None:
        fleet, target = self.fleet, moment.target
        server = fleet.servers.get(target)
        fleet.kill(target, down_first=moment.what == "kill_down_first")
        if server is not None and moment.for_ns:

            def back() -> None:
                if target not in fleet.servers and target not in fleet.standbys:
                    fleet.bring_up(server.spec)

            fleet.at(fleet.now_ns + moment.for_ns, back)

    def _spoil(self, moment: Moment) -> None:
        server = self.fleet.servers.get(moment.target)
        if server is None:
            return
        if moment.what == "slow":
            server.slow = moment.detail
        else:
            server.error, server.error_permille = moment.detail

        def mend() -> None:
            server.slow, server.error = 1, None

        self.fleet.at(self.fleet.now_ns + (moment.for_ns or S), mend)

    def _tell(self, moment: Moment) -> None:
        fleet = self.fleet
        if moment.what == "gpu_fault":
            if moment.target in fleet.servers:
                fleet.feed(GpuFault(moment.target, *moment.detail))
        elif moment.what == "switch":
            old = canonical(self.checker.ledger.parameters)
            fleet.feed(PolicySwitched(old, canonical(moment.detail)))
        elif moment.what == "rollout":
            fleet.feed(RolloutRequested(*moment.detail))
        else:
            fleet.feed(moment.detail)
