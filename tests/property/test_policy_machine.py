"""The whole policy on a light fleet, driven by Hypothesis: whatever befalls, no invariant breaks.

Random scenarios (``tests.dst``) go further; what goes wrong here is shrunk to the few moves that
matter.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from policy.compose import build_policy
from policy.events import Forecasted, GpuFault, PolicySwitched, RolloutRequested
from policy.parameters import Parameters, canonical
from tests.dst.checker import Checker
from tests.dst.light import MS, LightFleet, S, Weather
from tests.policy_support import parameters, up

STANDBYS = (3, 4)
REPLICAS = st.integers(0, 4)
GAPS = st.sampled_from((0, 1, MS, 40 * MS, S, 5 * S))
SHAPES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 2},
    {"kv_blocks": 600, "max_model_len": 8192, "domain": "host1"},
    {"models": ("m",), "max_num_seqs": 4, "domain": "host2"},
    {"models": ("m",), "max_num_seqs": 4},
    {"domain": "host1"},
)
REQUESTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(("m", "m", "n")),
        "endpoint": st.just("chat"),
        "prompt_bytes": st.sampled_from((4, 400, 3600, 12_000, 80_000)),
        "sla": st.sampled_from(("", "P0", "P1", "P2")),
        "line": st.sampled_from(("", "search")),
        "user": st.sampled_from(("", "ann", "bob")),
        "session": st.sampled_from(("", "", "s1", "s2")),
        "deadline_ns": st.sampled_from((0, 0, 300 * MS, 60 * S)),
        "stream": st.booleans(),
        "chain": st.sampled_from(("", "", "c1", "c2")),
        "step": st.sampled_from(("", "plan", "write")),
    }
)
SWIFT_BREAKERS = {
    "rules": [
        {
            "name": "errors", "by": ["model", "line"], "kinds": ["timeout", "http_5xx", "empty"],
            "share_permille": 300, "volume_least": 4, "failures_least": 2, "open_ms": 200,
            "window_ms": 2000,
        },
        {
            "name": "doubt", "by": ["model"], "kinds": ["mismatch"], "share_permille": 500,
            "low_confidence_below_permille": 300, "volume_least": 4, "window_ms": 1000,
            "open_ms": 200,
        },
    ]
}  # fmt: skip
MECHANISMS = (
    "limits", "breakers", "confidence", "chains", "health", "capacity", "rollout", "drift",
    "alerts",
)  # fmt: skip
POLICIES: tuple[Parameters, ...] = (
    parameters(),
    parameters(
        tiers={"fallback_model": "n", "turbo_max_tflop": 10, "stable_max_tflop": 60},
        shedding={"queue_max": 10}, breakers=SWIFT_BREAKERS,
        confidence={"budget_permille": 500}, chains={"default": {"budget_ms": 3000}},
    ),
    parameters(
        shedding={"enabled": False}, limits={"enabled": False}, health={"failures_most": 1},
        capacity={"loop_ms": 500, "down_window_ms": 1000}, breakers=SWIFT_BREAKERS,
    ),
    parameters("tiered", **{name: {"enabled": False} for name in MECHANISMS}),
)  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Moves of a hostile world."""

    @initialize(
        seed=st.integers(0, 1 << 20), policy=st.sampled_from(POLICIES), count=st.integers(0, 3)
    )
    def start(self, seed: int, policy: Parameters, count: int) -> None:
        self.crashed = False
        built = build_policy(policy)
        self.checker = Checker(policy, built, seed=seed, snapshot_every_steps=25)
        rng = random.Random(seed)  # noqa: S311
        weather = Weather(shaky_permille=300, logprobs_permille=700)
        self.fleet = LightFleet(built, self.checker, rng, weather=weather)
        for number in STANDBYS:
            self.fleet.stand_by(up(number, version="v1", **SHAPES[number]), S)
        for number in range(count):
            self.come_up(number)

    @rule(gap=GAPS, fields=REQUESTS, burst=st.integers(1, 8))
    def arrive(self, gap: int, fields: dict[str, Any], burst: int) -> None:
        self.wait(gap)
        for _ in range(burst):
            self.fleet.offer(**fields)

    @rule(gap=GAPS)
    def wait(self, gap: int) -> None:
        self.fleet.run(self.fleet.now_ns + gap)

    @rule(index=st.integers(0, 999))
    def cancel(self, index: int) -> None:
        self.fleet.cancel(index % max(1, self.fleet.next_request))

    @rule(number=st.integers(0, 2))
    def come_up(self, number: int) -> None:
        if number not in self.fleet.servers:
            self.fleet.bring_up(up(number, version="v1", **SHAPES[number]))

    @rule(number=REPLICAS, down_first=st.booleans())
    def die(self, number: int, down_first: bool) -> None:
        self.fleet.kill(number, down_first=down_first)

    @rule(number=REPLICAS)
    def hang(self, number: int) -> None:
        self.fleet.hang(number)

    @rule(number=REPLICAS)
    def go_on(self, number: int) -> None:
        self.fleet.unhang(number)

    @rule(
        number=REPLICAS,
        kind=st.sampled_from(("timeout", "oom", "http_5xx", "empty", "backpressure", None)),
    )
    def spoil(self, number: int, kind: Any) -> None:
        server = self.fleet.servers.get(number)
        if server is not None:
            server.error = kind
            server.error_permille = 700

    @rule(number=REPLICAS, kind=st.sampled_from(("ecc_uncorrectable", "xid_fatal", "xid_minor")))
    def break_card(self, number: int, kind: Any) -> None:
        if number in self.fleet.servers:
            self.fleet.feed(GpuFault(number, kind))

    @rule()
    def look(self) -> None:
        self.fleet.scrape()
        self.fleet.read_gpus()

    @rule(policy=st.sampled_from(POLICIES))
    def switch(self, policy: Parameters) -> None:
        old = canonical(self.checker.ledger.parameters)
        self.fleet.feed(PolicySwitched(old, canonical(policy)))

    @rule(version=st.sampled_from(("v1", "v2")))
    def roll_out(self, version: str) -> None:
        self.fleet.feed(RolloutRequested("m", version))

    @rule(rate=st.sampled_from((0, 10_000, 500_000)))
    def forecast(self, rate: int) -> None:
        rates, more = (0, rate), (rate, 2 * rate)
        self.fleet.feed(Forecasted((S, 60 * S), rates, more, rates, more))

    @precondition(lambda self: not self.crashed)  # else little else would ever happen
    @rule()
    def crash(self) -> None:
        self.crashed = True
        self.fleet.crash(S)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            for number in list(self.fleet.servers):
                self.fleet.unhang(number)
            self.fleet.run()
            self.checker.end(self.fleet.now_ns)


def test_machine() -> None:
    case = Machine.TestCase
    case.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").debug()
