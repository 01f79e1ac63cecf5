"""The page Tune: its form, its job, what it shows, and the way to deploy."""

from __future__ import annotations

import json
import sqlite3
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import streamlit

from dashboards.jobs import Job, Jobs
from dashboards.scenario import Kind, Scenario, to_query
from dashboards.shelf import Shelf
from dashboards.work import tune as tune_work
from dashboards.work import validate as validate_work
from policy.evidence import AGE_S_MOST, decode, encode
from policy.files import load_policy
from tests.deploy_support import evidence_for
from tests.tune_support import small_trace
from twin.tune.offers import GROUPS, offers_of
from twin.validate.cli import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamlit.testing.v1 import AppTest

SPACE: dict[str, Any] = {
    "schema": 1, "objectives": ["goodput", "p0_ttft_p95_s"], "constraints": [],
    "space": {
        "shedding.enabled": [True, False],
        "inflight.sequences_permille": {"low": 12, "high": 1020, "log": True},
    },
}  # fmt: skip


def nothing(share: float | None, said: str) -> None:
    """Nobody is told."""


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    """A small trace on one replica."""
    content = Path(small_trace()).read_bytes()
    kept = Shelf(tmp_path / "ui" / "uploads").add_trace("small.parquet", content)
    return Scenario(trace=kept.name, fleet=(Kind("h100-sxm/qwen3-8b", 1),))


def asked(scenario: Scenario, **other: Any) -> dict[str, Any]:
    """A tuning's request."""
    return {
        "trace": scenario.trace, "fleet": [["h100-sxm/qwen3-8b", 1]], "policy": "stable",
        "space": SPACE, "slo": scenario.slo, "seed": 0, "speed": 1.0, "scale": 1.0,
        "scale_lengths": 1.0, "assume_output": 0, "trials": 4, "seeds": 1, "held_seeds": 1,
        "held_out": [], "jobs": 1, **other,
    }  # fmt: skip


def job_of(tmp_path: Path, kind: str, request: dict[str, Any]) -> tuple[Jobs, Job]:
    """A job that nobody runs: the test does."""
    jobs = Jobs(tmp_path / "ui" / "jobs", 0)
    job = jobs.start(kind, request)
    job.folder.mkdir(parents=True, exist_ok=True)
    return jobs, job


def done(jobs: Jobs, job: Job) -> None:
    """It is, as far as the store knows."""
    with sqlite3.connect(job.folder.parent / "jobs.db") as database:
        database.execute("update jobs set state = 'done', ended_s = 1 where id = ?", (job.id,))
    database.close()
    assert jobs.get(job.id).state == "done"


def texts(session: AppTest) -> str:
    kinds = ("markdown", "caption", "success", "warning", "info", "error")
    return "\n".join(str(each.value) for kind in kinds for each in getattr(session, kind))


def test_offers_have_units_bounds_and_a_range_around_the_parent() -> None:
    offers = offers_of(load_policy("stable"))
    wait = offers["tiers.lend_wait_ms"]
    assert (wait.unit, wait.low, wait.value, wait.high, wait.log) == ("ms", 200, 400, 800, True)
    assert wait.least == 0
    assert "Turbo" in wait.about
    assert offers["shedding.enabled"].choices == (True, False)
    assert offers["limits.order"].unit == ""
    assert (offers["limits.user_in_flight_most"].low, offers["limits.model_per_s"].unit) == (
        0, "/s",
    )  # fmt: skip
    for keys in GROUPS.values():
        assert set(keys) <= set(offers)
    for offer in offers.values():
        if offer.kind != "choice":
            assert offer.low <= offer.value <= offer.high
            assert offer.least is None or offer.least <= offer.low
            assert offer.most is None or offer.high <= offer.most


def test_the_form_offers_typed_ranges_and_says_what_is_wrong(app: Callable[..., AppTest]) -> None:
    session = app("tune")
    assert not session.exception
    assert session.selectbox(key="tune_parent").value == "stable"
    assert session.multiselect(key="tune_keys").value == list(GROUPS["queue"])
    low = session.number_input(key="tune_f_low_tiers.turbo_max_tflop")
    assert (low.value, low.min, low.max) == (25, 1, 1_000_000)
    assert not session.button(key="job_tune").disabled
    low.set_value(90).run()
    assert "leaves out the parent's own value, 50" in texts(session)
    assert session.button(key="job_tune").disabled
    session.button_group(key="tune_group").set_value("limits").run()
    assert session.multiselect(key="tune_keys").value == list(GROUPS["limits"])
    assert "leaves out" not in texts(session)


def test_the_first_policy_is_tuned_whatever_it_is(app: Callable[..., AppTest]) -> None:
    session = app("tune", to_query(Scenario(policies=("fifo", "stable"))))
    assert session.selectbox(key="tune_parent").value == "fifo"
    assert "nearly all of its parameters have no effect" in texts(session)


def test_what_was_done_is_shown_again_and_can_be_validated(
    app: Callable[..., AppTest], tmp_path: Path, scenario: Scenario
) -> None:
    jobs, job = job_of(tmp_path, "tune", asked(scenario))
    shares: list[float | None] = []
    tune_work.run(job.request, job.folder, lambda share, said: shares.append(share))
    done(jobs, job)
    assert shares == sorted(shares, key=lambda share: share or 0.0)
    progress = json.loads((job.folder / "progress.json").read_text())
    assert progress["done"] == 4
    assert progress["parent"] == 0

    session = app("tune", to_query(scenario))
    assert not session.exception
    assert session.number_input(key="tune_trials").value == 4
    shown = texts(session)
    result = json.loads((job.folder / "result.json").read_text())
    assert result["why"] in shown
    assert any("--trials 4" in code.value for code in session.code)
    assert session.button(key="job_validate").label == "Validate"
    session.number_input(key="tune_trials").set_value(5).run()
    assert result["why"] not in texts(session), "other figures than were asked for"
    session.switch_page("app_pages/replay.py").run()
    session.switch_page("app_pages/tune.py").run()
    assert session.number_input(key="tune_trials").value == 5, "the form outlives the page"


def test_a_tuning_that_was_ended_goes_on(tmp_path: Path, scenario: Scenario) -> None:
    class _Ended(Exception):
        pass

    def end(share: float | None, said: str) -> None:
        if share is not None and share >= 0.4:
            raise _Ended

    _, job = job_of(tmp_path, "tune", asked(scenario))
    with pytest.raises(_Ended):
        tune_work.run(job.request, job.folder, end)
    seen: list[int] = []

    def watch(share: float | None, said: str) -> None:
        path = job.folder / "progress.json"
        if said == "playing trials" and path.is_file():
            seen.append(round((share or 0) / tune_work.TRIALS_SHARE * 4))

    tune_work.run(job.request, job.folder, watch)
    assert seen[0] >= 2, "what was played is not played again"
    assert json.loads((job.folder / "progress.json").read_text())["done"] == 4


def test_evidence_is_signed_shown_and_sent_to_deploy(
    app: Callable[..., AppTest], idle: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    scenario: Scenario,
) -> None:  # fmt: skip
    made = evidence_for(load_policy("stable"), load_policy("fifo")).evidence
    evidence = msgspec.structs.replace(made, signature="")
    key = tmp_path / "deploy.key"
    key.write_text("ab" * 32)
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    monkeypatch.setattr(validate_work, "validate", lambda what, told: (evidence, b"log"))
    request = {
        "policy": "stable", "against": "fifo", "traces": [scenario.trace],
        "fleet": [["h100-sxm/qwen3-8b", 1]], "quick": True, "seeds": 0,
        "signed": sha256(key.read_bytes()).hexdigest()[:8], "jobs": 0, "trace_s": 0.0,
    }  # fmt: skip
    jobs, job = job_of(tmp_path, "validate", request)
    validate_work.run(request, job.folder, nothing)
    done(jobs, job)
    written = decode((job.folder / "evidence.json").read_bytes(), "evidence")
    assert written.signature
    assert (job.folder / "evidence.log").read_bytes() == b"log"
    assert "name: stable" in (job.folder / "policy.yaml").read_text()
    assert encode(msgspec.structs.replace(written, signature="")) == encode(evidence)

    session = app("tune", to_query(scenario))
    session.button_group(key="tune_mode").set_value("validate").run()
    assert not session.exception
    assert session.selectbox(key="tune_candidate").value == "stable"
    table = session.table[0].value
    assert len(table) == len(evidence.gates)
    assert "validate_again" not in [button.key for button in session.button]
    session.button(key="send_to_deploy").click().run()
    assert session.session_state["deploy_job"] == job.id

    old = msgspec.structs.replace(written, made_s=written.made_s - AGE_S_MOST - 60)
    (job.folder / "evidence.json").write_bytes(encode(old))
    streamlit.cache_data.clear()
    session = app("tune", to_query(scenario))
    session.button_group(key="tune_mode").set_value("validate").run()
    assert "a controller refuses it" in texts(session)
    session.button(key="validate_again").click().run()
    assert not session.exception
    assert jobs.get(job.id).open, "the same job, once more"
