"""What a policy is played on: stretches of recorded traces, stress, every fault, scenarios.

Stress and faults are played on a slice of the fleet, at most two replicas of each profile, at
loads that are given as parts of what such a slice can serve, so that they mean the same on any
card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from policy.cost import TICKS_PER_NS
from traces import open_trace
from twin.scenario.rack import rack_of
from twin.scenario.spec import Replicas, Setup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twin.fleet import ReplicaSpec
    from twin.scenario.files import Scenario

NS = 1_000_000_000
SLICE_MOST = 2
SCALES = (1.0, 0.9, 1.1, 0.8, 1.2)
"""The trace's request rate, seed by seed: tomorrow's traffic is not quite what was recorded."""
KV_FILLED = 0.9
LONGEST = 3
"""Times the mean; and (next) how much of a model's context the longest may fill."""
FITS_SHARE = 0.9
FAULT_AT_S, FAULT_FOR_S = 10.0, 10.0
STEADY_LOAD = 0.6
FLAPPING_LOAD, FAILURES_PER_S = 0.4, 0.7
"""Of the replica that loses messages; each way loses as many."""
COLD_START_S = 5.0
"""Of a replica in stress runs: how a policy takes it back in is the question, not how long the
weights take to load."""
OTHER_POLICIES = ("switch", "canary", "canary_end")
"""Happenings of a scenario that bring in a policy of its own: here two others are compared."""
KINDS = ("search", "chat", "reports")
MIX: tuple[tuple[str, str, int, int], ...] = (
    ("search", "P0", 400, 40),
    ("chat", "P1", 1200, 200),
    ("reports", "P2", 3000, 300),
    ("tags", "P2", 600, 30),
)
"""Line, class, mean tokens of prompt and answer."""

Kind = Literal[
    "trace", "scenario", "overload", "long_prompts", "doubt", "retries", "flapping", "fault"
]


@dataclass(frozen=True, slots=True)
class Run:
    """Something that both policies are played on, with every seed."""

    name: str
    kind: Kind
    setup: Setup
    folder: Path
    fault_s: tuple[float, float] | None = None
    """When the fault begins and when it is over."""

    def with_policy(self, path: Path, seed: int) -> Setup:
        """The set-up of one seed under the policy in the file ``path``."""
        setup = self.setup
        if self.kind == "trace":
            setup = _scaled(setup, SCALES[seed % len(SCALES)])
        choice = type(setup.policy)(preset=str(path))
        events = tuple(
            event for event in setup.events if event.__struct_config__.tag not in OTHER_POLICIES
        )
        return msgspec.structs.replace(setup, policy=choice, events=events)


@dataclass(frozen=True, slots=True)
class Length:
    """How long runs last, in s of their own time."""

    trace_s: float
    stress_s: float


def trace_runs(traces: Sequence[str], fleet: Sequence[Replicas], length: Length) -> list[Run]:
    """The beginning of each trace, on the whole fleet.

    Raises:
        TraceError: a trace that cannot be played.
    """
    runs = []
    for name in traces:
        duration_s = min(length.trace_s, max(1.0, open_trace(name).duration_s))
        absolute = str(Path(name).resolve()) if name.endswith(".parquet") else name
        raw = {
            "duration_s": duration_s,
            "traffic": {"open": [{"trace": absolute}]},
            "fleet": msgspec.to_builtins(tuple(fleet)),
        }
        runs.append(Run(f"trace {Path(name).stem}", "trace", _setup(raw), Path()))
    return runs


def scenario_runs(scenarios: Sequence[Scenario]) -> list[Run]:
    """Each scenario's first run, as it is but for its policy."""
    found = []
    for scenario in scenarios:
        name, setup = next(iter(scenario.runs.items()))
        found.append(
            Run(f"scenario {scenario.head.name}/{name}", "scenario", setup, scenario.folder)
        )
    return found


class Stress:
    """Makes the stress runs for a slice of a fleet."""

    def __init__(self, fleet: Sequence[Replicas], length: Length) -> None:
        self._length_s = length.stress_s
        self._fleet = [
            msgspec.structs.replace(
                kind, count=min(kind.count, SLICE_MOST), standbys=0, cold_start_s=COLD_START_S
            )
            for kind in fleet
        ]
        up, _ = rack_of(self._fleet, Path())
        self._models: dict[str, list[ReplicaSpec]] = {}
        for spec in up:
            if spec.profile.task == "generate":
                self._models.setdefault(spec.profile.model, []).append(spec)
        self._replicas = sum(len(specs) for specs in self._models.values())
        self._on = next((spec.id for spec in up if spec.profile.task == "generate"), 0)

    def runs(self) -> list[Run]:
        """All of them; none where the fleet answers nothing but embeddings."""
        if not self._models:
            return []
        return [
            self._overload(), self._long_prompts(), self._doubt(), self._retries(),
            self._flapping(), *self._faults(),
        ]  # fmt: skip

    # ---- stress ----

    def _overload(self) -> Run:
        """Interactive work alone is more than can be served, for most of the run; background work
        trickles in."""
        end_s = self._length_s
        curve = _hump(5, end_s - 5, 0.3, 1)
        streams = self._streams({"search": 0.9, "chat": 0.9, "tags": 0.3}, curve)
        return self._run("overload", end_s, {"open": [{"streams": streams}]})

    def _long_prompts(self) -> Run:
        """Short interactive requests among prompts ten times as long."""
        streams = self._streams({"search": 0.4}) + self._streams({"reports": 0.5}, times=5)
        return self._run("long_prompts", self._length_s, {"open": [{"streams": streams}]})

    def _doubt(self) -> Run:
        """A model that is unsure of a third of its answers, and of more under load."""
        streams = self._streams({"search": 0.4, "reports": 0.4})
        raw = {"clients": [_calls("callers", streams, stream=False)]}
        return self._run("doubt", self._length_s, raw, answers=_ANSWERS)

    def _retries(self) -> Run:
        """A burst, and callers who come back as soon as they may."""
        curve = _hump(5, 20, 0.3, 1)
        streams = self._streams(dict.fromkeys(KINDS, 2.4 / len(KINDS)), curve)
        raw = {"clients": [_calls("callers", streams, attempts=12, backoff_s=0.2)]}
        return self._run("retries", self._length_s, raw)

    def _flapping(self) -> Run:
        """One replica loses a message now and then: single failures, and good answers between."""
        streams = self._streams({"search": FLAPPING_LOAD})
        rate_rps = sum(stream["arrivals"]["rate_rps"] for stream in streams) / self._replicas
        fault = {
            "kind": "network", "at_s": 5, "on": self._on, "for_s": self._length_s - 10,
            "loss_permille": min(200, max(1, round(1000 * FAILURES_PER_S / rate_rps))),
        }  # fmt: skip
        return self._run(
            "flapping", self._length_s, {"open": [{"streams": streams}]}, faults=[fault],
            world={"call_timeout_ns": 5 * NS},
        )  # fmt: skip

    # ---- faults ----

    def _faults(self) -> Iterator[Run]:
        for raw in _fault_list(self._on, self._long_tokens()):
            kind = raw["kind"]
            lasting = {"for_s": FAULT_FOR_S} if kind in _LASTING else {}
            fault = {**raw, **lasting, "at_s": FAULT_AT_S}
            streams = self._streams(dict.fromkeys(KINDS, STEADY_LOAD / len(KINDS)))
            if kind == "retry_storm":  # callers only try again if they are refused
                curve = _hump(FAULT_AT_S, FAULT_AT_S + FAULT_FOR_S, 1, 3)
                streams = self._streams(dict.fromkeys(KINDS, STEADY_LOAD / len(KINDS)), curve)
            traffic: dict[str, Any] = {"clients": [_calls("callers", streams)]}
            if kind == "traffic_spike":  # the trace is what is multiplied
                traffic = {"open": [{"streams": streams}]}
            faults = [fault]
            if kind == "cold_start":  # slow starts hurt when something must be started
                faults.append(
                    {"kind": "engine_killed", "at_s": FAULT_AT_S, "on": self._on, "restart_s": 1}
                )
            more: dict[str, Any] = {"answers": _ANSWERS_SURE} if kind == "bad_weights" else {}
            yield self._run(
                "fault", self._length_s, traffic, faults=faults, name=f"fault {kind}",
                fault_s=(FAULT_AT_S, FAULT_AT_S + FAULT_FOR_S), cards={"read_every_s": 5},
                world={"call_timeout_ns": 20 * NS}, **more,
            )  # fmt: skip

    # ---- parts ----

    def _long_tokens(self) -> int:
        """From where a report's prompt is longer than most."""
        specs = next(iter(self._models.values()))
        _, _, prompt, output = MIX[KINDS.index("reports")]
        return round(1.2 * _fitting(specs, prompt, output)[0])

    def _run(
        self, kind: Kind, duration_s: float, traffic: dict[str, Any], *, name: str = "",
        fault_s: tuple[float, float] | None = None, **more: Any,
    ) -> Run:  # fmt: skip
        raw = {
            "duration_s": duration_s,
            "traffic": traffic,
            "fleet": msgspec.to_builtins(tuple(self._fleet)),
            **more,
        }
        return Run(name or f"stress {kind}", kind, _setup(raw), Path(), fault_s)

    def _streams(
        self, loads: dict[str, float], curve: list[list[float]] | None = None, times: int = 1
    ) -> list[dict[str, Any]]:
        """For each model a stream of each line, at a part of what its replicas can serve; prompts
        ``times`` as long."""
        made = []
        for model, specs in self._models.items():
            for line, sla, prompt, output in MIX:
                if line not in loads:
                    continue
                prompt_tokens, output_tokens = _fitting(specs, prompt * times, output)
                rate_rps = sum(capacity_rps(spec, prompt_tokens, output_tokens) for spec in specs)
                made.append(
                    {
                        "name": f"{line}-{model}", "business_line": line, "sla_class": sla,
                        "model": model, "endpoint": "chat",
                        "arrivals": {
                            "law": "poisson", "rate_rps": loads[line] * rate_rps, "curve": curve,
                        },
                        "prompt_tokens": _law(prompt_tokens), "output_tokens": _law(output_tokens),
                        "max_output_tokens": LONGEST * output_tokens,
                        "users": {"count": 5000, "zipf": 0.2},
                    }
                )  # fmt: skip
        return made


def capacity_rps(spec: ReplicaSpec, prompt_tokens: int, output_tokens: int) -> float:
    """About how many such requests a second a replica serves when its batch is full.

    Each takes its prefill alone, and its part of as many steps as it has tokens, of a batch that
    fills the KV cache or the engine's limit. Mixed steps do better, by up to a third: what load
    is meant is a matter of tens of per cent, not of single ones.
    """
    settings, cost = spec.settings, spec.cost
    kv_tokens = KV_FILLED * settings.kv_blocks * settings.block_tokens
    length = prompt_tokens + output_tokens
    batch = max(1, min(settings.max_num_seqs, int(kv_tokens / length)))
    in_kv = round(batch * (prompt_tokens + output_tokens / 2))
    step_ns = cost.step_ticks(batch, in_kv) / TICKS_PER_NS
    return NS / (cost.prefill_ns(prompt_tokens) + output_tokens * step_ns / batch)


def _fitting(specs: Sequence[ReplicaSpec], prompt: int, output: int) -> tuple[int, int]:
    """Mean lengths of prompt and answer, as asked for or so short that the longest fit."""
    fits = min(spec.settings.max_model_len for spec in specs)
    part = min(1.0, FITS_SHARE * fits / (LONGEST * (prompt + output)))
    return max(4, round(prompt * part)), max(2, round(output * part))


def _setup(raw: dict[str, Any]) -> Setup:
    return msgspec.convert(raw, Setup)


def _scaled(setup: Setup, scale: float) -> Setup:
    traffic = setup.traffic
    sources = tuple(msgspec.structs.replace(source, scale=scale) for source in traffic.open)
    return msgspec.structs.replace(setup, traffic=msgspec.structs.replace(traffic, open=sources))


def _hump(from_s: float, to_s: float, before: float, within: float) -> list[list[float]]:
    """A rate that is another for a while, as a curve."""
    return [
        [0.0, before], [from_s, before], [from_s + 1, within], [to_s - 1, within], [to_s, before],
    ]  # fmt: skip


def _law(mean: int) -> dict[str, Any]:
    return {"lognormal": {"mean": mean, "sigma": 0.6}, "low": 2, "high": LONGEST * mean}


def _calls(
    name: str, streams: list[dict[str, Any]], *, attempts: int = 1, backoff_s: float = 0.5,
    stream: bool = True,
) -> dict[str, Any]:  # fmt: skip
    return {
        "kind": "calls", "name": name, "stream": stream,
        "retries": {"attempts": attempts, "backoff_s": backoff_s, "factor": 1, "jitter": 0.5},
        "source": {"streams": streams},
    }  # fmt: skip


def _kind(share: float, loaded: float, mean: int, worst: int, close: int, right: float) -> Any:
    return {
        "share": share, "loaded_share": loaded, "correct": right,
        "entropy_mean": {"lognormal": {"mean": mean, "sigma": 0.2}},
        "entropy_worst": {"lognormal": {"mean": worst, "sigma": 0.1}},
        "close_permille": {"lognormal": {"mean": close, "sigma": 0.3}},
    }  # fmt: skip


# With these entropies a sure answer scores .75 or so, an unsure one .5 and a lost one .15.
_ANSWERS = {
    "match_otherwise": 0.05,
    "rules": [
        {
            "load": {"from_in_flight": 4, "to_in_flight": 40},
            "kinds": [
                _kind(0.69, 0.39, 400, 1900, 20, 0.995),
                _kind(0.30, 0.58, 950, 2600, 120, 0.7),
                _kind(0.01, 0.03, 1700, 3000, 250, 0.2),
            ],
        }
    ],
}
_ANSWERS_SURE = {
    "match_otherwise": 0.05,
    "rules": [
        {
            "kinds": [_kind(1.0, 1.0, 400, 1900, 20, 0.998)],
            "bad": _kind(1.0, 1.0, 1700, 3000, 250, 0.2),
        }
    ],
}
_LASTING = frozenset({
    "slow_card", "engine_hung", "oom_long_prompt", "network", "bad_weights", "traffic_spike",
    "retry_storm", "cold_start", "overheating", "pcie_load",
})  # fmt: skip


def _fault_list(on: int, long_tokens: int) -> list[dict[str, Any]]:
    """Every kind of fault that strikes what serves, on one replica where it is about one."""
    dies = {"dies_after_s": FAULT_FOR_S / 2, "reset_s": FAULT_FOR_S}
    return [
        {"kind": "gpu_lost", "on": on, "back_s": FAULT_FOR_S},
        {"kind": "ecc_uncorrectable", "on": on, **dies},
        {"kind": "xid", "on": on, "code": 79, **dies},
        {"kind": "slow_card", "on": on, "factor_permille": 3000},
        {"kind": "engine_hung", "on": on},
        {"kind": "engine_killed", "on": on, "restart_s": 5},
        {"kind": "oom_long_prompt", "on": on, "tokens_from": long_tokens, "restart_s": 5},
        {"kind": "network", "on": on, "delay_ms": 100, "loss_permille": 5},
        {"kind": "bad_weights", "on": on, "shift_permille": 300},
        {"kind": "traffic_spike", "factor_permille": 3000},
        {"kind": "retry_storm", "attempts": 5},
        {"kind": "cold_start", "factor_permille": 2000},
        {"kind": "overheating", "on": on, "heat_permille": 1300},
        {"kind": "pcie_load", "on": on, "permille": 700},
    ]
