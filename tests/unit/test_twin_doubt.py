"""A replica with bad weights in the twin: its answers are less certain, and it is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twin.scenario import parse_scenario, run_scenario
from twin.serve.words import LOGPROBS, certainty_of, codes_of, key_of, noisy

SURE = {
    "share": 1, "entropy_mean": {"fixed": 400}, "entropy_worst": {"fixed": 1500},
    "close_permille": {"fixed": 20}, "correct": 1,
}  # fmt: skip
BAD = SURE | {
    "entropy_mean": {"fixed": 900}, "entropy_worst": {"fixed": 2500},
    "close_permille": {"fixed": 60}, "correct": 0,
}  # fmt: skip


def played(stream: bool = False, **confidence: Any) -> Any:
    """Three replicas, one of them with bad weights from 20 s on; the run."""
    raw = {
        "schema": 1, "name": "noisy", "about": "One of three replicas has bad weights.",
        "duration_s": 90, "seeds": [1],
        "traffic": {
            "clients": [
                {
                    "kind": "chains", "name": "agents", "model": "qwen3-8b", "stream": stream,
                    "arrivals": {"law": "poisson", "rate_rps": 5}, "budget_s": 30,
                    "steps": [
                        {
                            "kind": "llm", "name": "plan", "prompt_tokens": {"fixed": 500},
                            "output_tokens": {"fixed": 100},
                        }
                    ],
                }
            ]
        },
        "fleet": [{"profile": "h100-sxm/qwen3-8b", "count": 3}],
        "policy": {"preset": "stable", "set": {"confidence": confidence, "placement": {
            "rule": "least_loaded"}}},
        "answers": {"rules": [{"kinds": [SURE], "bad": BAD}]},
        "faults": [{"kind": "bad_weights", "at_s": 20, "on": 1, "shift_permille": 900}],
    }  # fmt: skip
    result = run_scenario(parse_scenario(raw, "noisy", Path()))
    (runs,) = result.runs.values()
    (run,) = runs
    assert run.figures["refused_events"] == 0
    return run.figures


def test_its_breaker_opens_and_its_answers_stop() -> None:
    figures = played()
    assert set(figures["breakers"]["by_key"]) == {"doubtful replica=1"}
    everyone = figures["all"]
    assert everyone["wrong"] == 0
    assert 6 <= everyone["degraded"] <= 30  # until it was found, and when it was tried again
    assert everyone["verifications"]["mismatch"] >= 1
    after = figures["faults"]["bad_weights"]["breaker_open_s"]
    assert 0 < after < 20


def test_of_streams_no_more_get_out_than_it_takes_to_notice() -> None:
    figures = played(stream=True)
    assert set(figures["breakers"]["by_key"]) == {"doubtful replica=1"}
    assert 6 <= figures["all"]["wrong"] <= 20


def test_without_logprobs_nobody_notices() -> None:
    figures = played(candidates_most=0)
    assert figures["breakers"]["opened"] == 0
    assert figures["all"]["wrong"] > 80


def test_noisy_weights_say_other_words_and_are_not_sure_of_them() -> None:
    key = key_of(1, "m", b"a prompt")
    assert codes_of(noisy(key), 20) != codes_of(key, 20)
    assert codes_of(noisy(key), 20) == codes_of(noisy(key), 20)
    rows = [LOGPROBS[row] for row in certainty_of(key, 20, "noisy")]
    assert all(-0.6 < row[0] < -0.4 for row in rows)
