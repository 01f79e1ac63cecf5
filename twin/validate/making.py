"""Evidence about a policy: everything is played, judged, and put together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from policy.evidence import SCHEMA, Evidence, EvidenceError, Source
from policy.files import code_hash, load_profile
from policy.parameters import canonical, policy_hash
from traces import open_trace
from twin.validate import gates, storms
from twin.validate.expecting import expected
from twin.validate.numbers import counts, pairs_of, share
from twin.validate.playing import Sides, Task, play
from twin.validate.setups import Length, Stress, scenario_runs, trace_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.evidence import Figure, Gate, Kind
    from policy.parameters import Parameters
    from twin.scenario.files import Scenario
    from twin.scenario.spec import Replicas
    from twin.validate.gates import Goals
    from twin.validate.playing import Played
    from twin.validate.setups import Run

LOG_BYTES_MOST = 4 * 1024 * 1024
LOG_KINDS = ("overload", "doubt", "long_prompts", "trace")
"""Which run's log goes beside the evidence: the first of these that is small enough."""
DAY_S = 86_400
FULL, QUICK = Length(trace_s=900, stress_s=90), Length(trace_s=120, stress_s=45)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be validated, and on what."""

    name: str
    candidate: Parameters
    live_name: str
    live: Parameters
    judged_by: Parameters
    """Its deadlines say what is missed, on both sides."""
    traces: tuple[str, ...]
    fleet: tuple[Replicas, ...]
    goals: Goals
    scenarios: tuple[Scenario, ...] = ()
    seeds: int = 5
    quick: bool = False
    share_permille: int = 50
    drifting: tuple[str, ...] = ()
    jobs: int = 0
    length: Length = field(default_factory=lambda: FULL)


def runs_of(asked: Asked) -> list[Run]:
    """Everything that is played."""
    return [
        *trace_runs(asked.traces, asked.fleet, asked.length),
        *scenario_runs(asked.scenarios),
        *Stress(asked.fleet, asked.length).runs(),
    ]


def tasks_of(runs: Sequence[Run], asked: Asked) -> tuple[list[Task], list[Task]]:
    """(each run with its seeds on both sides, a few of the candidate's once more). In a quick
    validation stress and faults have one seed."""
    tasks = []
    for run in runs:
        seeds = 1 if asked.quick and run.kind not in ("trace", "scenario") else asked.seeds
        for seed in range(seeds):
            keep = seed == 0 and run.kind in LOG_KINDS
            tasks.append(Task(run, seed, "candidate", keep_log=keep))
            tasks.append(Task(run, seed, "live"))
    twice = {run.kind: run for run in reversed(runs) if run.kind in ("trace", "overload", "fault")}
    return tasks, [Task(run, 0, "candidate") for run in twice.values()]


def validate(asked: Asked, told: Callable[[int, int], None]) -> tuple[Evidence, bytes]:
    """Play everything and judge it: the evidence, not yet signed, and the decision log beside it.

    Args:
        told: called with (done, of) now and then.

    Raises:
        FileError, FleetError, FaultError, TraceError: what is asked for cannot be played.
        EvidenceError: no decision log is small enough to be sent along.
    """
    runs = runs_of(asked)
    tasks, again = tasks_of(runs, asked)
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1
        told(done, len(tasks) + len(again))

    with TemporaryDirectory(prefix="twinkeel-") as scratch:
        sides = Sides(asked.candidate, asked.live, Path(scratch), asked.judged_by)
        for side in ("candidate", "live"):
            text = canonical(sides.of(side))  # JSON is YAML
            sides.path(side).write_text(text, encoding="utf-8")
        played = play([*tasks, *again], sides, asked.jobs, one_more)
    return _evidence(asked, runs, played[: len(tasks)], played[len(tasks) :])


def _evidence(
    asked: Asked, runs: Sequence[Run], played: Sequence[Played], again: Sequence[Played]
) -> tuple[Evidence, bytes]:
    made_s = int(time.time())
    sources = sources_of(asked, runs, made_s)
    kind: Kind = (
        "extrapolated" if any(source.trust == "scaled" for source in sources) else "estimated"
    )
    errors = [source.held_out_error_percent or 0.0 for source in sources]
    kept = log_beside(played)
    evidence = Evidence(
        schema=SCHEMA,
        name=asked.name,
        policy=canonical(asked.candidate),
        policy_hash=policy_hash(asked.candidate),
        against=policy_hash(asked.live),
        against_name=asked.live_name,
        code_hash=code_hash(),
        sources=sources,
        seeds=tuple(range(asked.seeds)),
        made_s=made_s,
        gates=judged(asked, played, again, sources, kind),
        figures=figures_of(played, kind),
        expected=expected(played, asked.share_permille, max(errors, default=0.0), kind),
        log_sha256=kept.log_sha256,
        log_records=kept.story.steps,
        quick=asked.quick,
    )
    return evidence, kept.log


def judged(
    asked: Asked,
    played: Sequence[Played],
    again: Sequence[Played],
    sources: Sequence[Source],
    kind: Kind,
) -> tuple[Gate, ...]:
    """Every gate of ``policy.evidence.GATES``."""
    return (
        gates.invariants(played),
        gates.slo(played, asked.goals, kind),
        gates.faults(played, asked.goals, kind),
        gates.not_worse(played, asked.goals, kind),
        gates.profile(sources, asked.drifting),
        gates.determinism(played, again),
        storms.verification_storm(played, asked.candidate, kind),
        storms.breaker_flap(played, asked.candidate, kind),
        storms.starvation(played, asked.candidate, kind),
        storms.retry_storm(played, asked.candidate, kind),
    )


def figures_of(played: Sequence[Played], kind: Kind) -> tuple[Figure, ...]:
    """Of each run what either side missed, for the record."""
    figures = []
    pairs = pairs_of(played)
    for name in dict.fromkeys(pair.candidate.run.name for pair in pairs):
        found = counts([pair for pair in pairs if pair.candidate.run.name == name])
        figures.append(share(f"miss_share/{name}", found.candidate, found.offered, kind))
        figures.append(share(f"live miss_share/{name}", found.live, found.offered, kind))
    return tuple(figures)


def log_beside(played: Sequence[Played]) -> Played:
    """The run whose decision log goes beside the evidence.

    Raises:
        EvidenceError: none is small enough.
    """
    small = [one for one in played if one.log and len(one.log) <= LOG_BYTES_MOST]
    if not small:
        raise EvidenceError(
            f"no decision log has less than {LOG_BYTES_MOST >> 20} MB, so none can go beside the"
            " evidence: validate with fewer replicas or a shorter trace (--quick)"
        )
    return min(small, key=lambda one: LOG_KINDS.index(one.run.kind))


# ---- what was played, by its hashes ----


def sources_of(asked: Asked, runs: Sequence[Run], made_s: int) -> tuple[Source, ...]:
    """Traces and scenarios by their files' bytes; profiles by what they say; the stress runs by
    their set-ups."""
    stress = [run.setup for run in runs if run.kind not in ("trace", "scenario")]
    return (
        *(
            Source("trace", name, sha256(Path(open_trace(name).path).read_bytes()).hexdigest())
            for name in asked.traces
        ),
        *(
            Source("scenario", scenario.head.name, _digest((scenario.head, scenario.runs)))
            for scenario in asked.scenarios
        ),
        *([Source("scenario", "stress and faults", _digest(stress))] if stress else []),
        *(
            profile_source(name, made_s)
            for name in dict.fromkeys(kind.profile for kind in asked.fleet)
        ),
    )


def profile_source(name: str, made_s: float) -> Source:
    """A profile, and how far it can be trusted.

    Raises:
        FileError: no such profile, or it is wrong.
    """
    profile = load_profile(name)
    trust = profile.trust
    errors = [
        row.mean_percent if row.held_out_mean_percent is None else row.held_out_mean_percent
        for row in trust.errors
    ]
    is_file = name.endswith((".yaml", ".yml"))
    return Source(
        "profile",
        profile.name,
        _digest(profile),
        trust=trust.status,
        held_out_error_percent=max(errors) if errors else None,
        age_days=max(0.0, (made_s - Path(name).stat().st_mtime) / DAY_S) if is_file else None,
    )


def _digest(value: Any) -> str:
    return sha256(msgspec.json.encode(value, order="sorted")).hexdigest()
