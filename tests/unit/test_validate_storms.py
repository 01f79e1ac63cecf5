"""Policies that would hurt, each found out for exactly its own reason; and good ones that pass.

Everything is played for real, on a slice of two replicas of a large model, where a run is short.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

from policy.audit import replay
from policy.evidence import decode, key_of, refusals
from policy.files import code_hash, load_policy
from policy.log import read_segment
from policy.parameters import Parameters, canonical, policy_hash
from twin.scenario.merge import merged
from twin.scenario.spec import Replicas, Setup
from twin.validate import making
from twin.validate.cli import evidence_group, log_beside, validate_command
from twin.validate.gates import Goals
from twin.validate.making import Asked, judged, profile_source
from twin.validate.playing import Sides, Task, play_task
from twin.validate.setups import Length, Run, Stress

if TYPE_CHECKING:
    from collections.abc import Callable

    from policy.evidence import Gate
    from twin.validate.playing import Played, Side

PROFILE = "h100-sxm/llama-3.1-70b@tp4"
FLEET = (Replicas(profile=PROFILE, count=2),)
STABLE = load_policy("stable")
FLAPPING_RULE = {
    "name": "errors", "by": ["model", "line"], "kinds": ["timeout", "http_5xx", "stream_cut"],
    "share_permille": 1, "volume_least": 1, "failures_least": 1, "window_ms": 1000,
    "open_ms": 100, "open_most_ms": 100, "successes_least": 1, "probes_most": 50,
}  # fmt: skip


def changed(**sections: Any) -> Parameters:
    raw = merged(msgspec.to_builtins(STABLE), {"name": "candidate", **sections}, "test")
    return msgspec.convert(raw, Parameters)


def runs() -> list[Run]:
    """A quiet trace, every stress run, and a lost card."""
    stream = {
        "name": "chat", "business_line": "chat", "sla_class": "P1", "model": "llama-3.1-70b",
        "endpoint": "chat", "arrivals": {"law": "poisson", "rate_rps": 20},
        "prompt_tokens": {"fixed": 200}, "output_tokens": {"fixed": 10},
    }  # fmt: skip
    raw = {
        "duration_s": 30,
        "traffic": {"open": [{"streams": [stream]}]},
        "fleet": msgspec.to_builtins(FLEET),
    }
    quiet = Run("trace quiet", "trace", msgspec.convert(raw, Setup), Path())
    stress = Stress(FLEET, Length(30, 30)).runs()
    return [quiet, *(run for run in stress if run.kind != "fault" or run.name.endswith("lost"))]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Parameters, Side], list[Played]]:
    def played(candidate: Parameters, side: Side) -> list[Played]:
        folder = tmp_path_factory.mktemp("sides")
        (folder / f"{side}.yaml").write_text(canonical(candidate))
        sides = Sides(candidate, candidate, folder, STABLE)
        return [play_task(sides, Task(run, 0, side)) for run in runs()]

    return played


@pytest.fixture(scope="module")
def live(play: Callable[[Parameters, Side], list[Played]]) -> list[Played]:
    return play(STABLE, "live")


def failing(candidate: Parameters, played: list[Played]) -> dict[str, Gate]:
    asked = Asked("c", candidate, "stable", STABLE, STABLE, (), FLEET, Goals())
    source = profile_source("h100-sxm/qwen3-8b", 0)
    made = judged(asked, played, [], [source], "estimated")
    return {gate.name: gate for gate in made if not gate.holds}


def test_a_slightly_changed_policy_passes_every_gate(
    play: Callable[[Parameters, Side], list[Played]], live: list[Played]
) -> None:
    slight = changed(tiers={"aging_ms": 15_000}, confidence={"budget_permille": 60})
    assert failing(slight, [*play(slight, "candidate"), *live]) == {}


@pytest.mark.parametrize(
    ("sections", "gate", "sentences"),
    [
        (
            {
                "confidence": {
                    "verify_below_permille": 1001, "budget_permille": 2000,
                    "degrade_below_permille": 0,
                }
            },
            "verification_storm",
            ("verification storm: second runs took", "confidence.budget_permille to 250 or less"),
        ),
        (
            {"breakers": {"rules": [FLAPPING_RULE]}},
            "breaker_flap",
            ("breaker flap: ", "'errors model=llama-3.1-70b line=search' opened"),
        ),
        (
            {"tiers": {"batch_least_permille": 0, "aging_ms": 86_400_000},
             "shedding": {"enabled": False}},
            "starvation",
            ("starvation: in stress overload P2 waited", "tiers.batch_least_permille above 0"),
        ),
        (
            {"shedding": {"queue_max": 60, "retry_after_least_ms": 0, "retry_after_most_ms": 0}},
            "retry_storm",
            ("retry storm: in a burst callers asked", "shedding.retry_after_least_ms (it is 0)"),
        ),
    ],
    ids=["verification_storm", "breaker_flap", "starvation", "retry_storm"],
)  # fmt: skip
def test_a_policy_that_would_hurt_fails_for_its_own_reason(
    sections: dict[str, Any],
    gate: str,
    sentences: tuple[str, ...],
    play: Callable[[Parameters, Side], list[Played]],
    live: list[Played],
) -> None:
    candidate = changed(**sections)
    found = failing(candidate, [*play(candidate, "candidate"), *live])
    assert set(found) == {gate}
    for sentence in sentences:
        assert sentence in found[gate].why


def test_the_command_writes_evidence_that_a_controller_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, with the shortest runs that hold a fault; the log beside it replays."""
    monkeypatch.setattr(making, "QUICK", Length(trace_s=60, stress_s=26))
    key = tmp_path / "deploy.key"
    key.write_text("0f" * 32)
    out = tmp_path / "ev.json"
    arguments = [
        "stable", "--against", "stable", "--trace", "shipped:bursts", "--quick", "--seeds", "1",
        "--profile", "h100-sxm/qwen3-8b", "--replicas", "1", "--jobs", "1", "--margin", "2",
        "--key", str(key), "--out", str(out),
    ]  # fmt: skip
    done = CliRunner().invoke(validate_command, arguments)
    assert done.exit_code == 0, done.output
    evidence = decode(out.read_bytes(), "ev.json")
    log = log_beside(out).read_bytes()
    stable = policy_hash(STABLE)
    assert refusals(
        evidence, key=key_of(key.read_text(), ""), policy_hash=stable, live_hash=stable,
        code_hash=code_hash(), now_s=evidence.made_s,
    ) == []  # fmt: skip
    assert sha256(log).hexdigest() == evidence.log_sha256
    assert replay([log]) is None
    assert sum(1 for _ in read_segment(log).records) == evidence.log_records
    assert read_segment(log).header.policy == evidence.policy
    assert evidence.quick
    shown = CliRunner().invoke(evidence_group, ["show", str(out), "--figures"])
    assert shown.exit_code == 0
    assert "PASS" in shown.output
    assert "second_run_share" in shown.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nosuch", "--against", "stable", "--trace", "shipped:demo"], "no such policy"),
        (["stable", "--against", "stable", "--trace", "nosuch.parquet"], "nosuch.parquet"),
        (["stable", "--against", "stable"], "--trace"),
        (
            ["stable", "--against", "stable", "--trace", "shipped:demo", "--slo", "P9=1"],
            "there are the classes P0, P1 and P2",
        ),
        (
            ["stable", "--against", "stable", "--trace", "shipped:demo", "--slo", "P0=9"],
            "deadlines must not fall",
        ),
        (
            ["stable", "--against", "stable", "--trace", "shipped:demo", "--profile", "a100/x"],
            "no such profile",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_code_2(
    arguments: list[str], sentence: str
) -> None:
    done = CliRunner().invoke(validate_command, [*arguments, "--quick", "--jobs", "1"])
    assert done.exit_code == 2
    assert sentence in done.output


def test_a_key_that_is_none_is_told_before_anything_is_played(tmp_path: Path) -> None:
    key = tmp_path / "deploy.key"
    key.write_text("not a key")
    done = CliRunner().invoke(
        validate_command,
        ["stable", "--against", "stable", "--trace", "shipped:demo", "--key", str(key)],
    )
    assert done.exit_code == 2
    assert "64 hex digits" in done.output


def test_evidence_that_was_touched_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "ev.json"
    path.write_text('{"schema": 1}')
    done = CliRunner().invoke(evidence_group, ["show", str(path)])
    assert done.exit_code == 2
    assert "this is no evidence" in done.output
