"""The page Drills: what is chosen, what it costs to hit callers, what a drill shows; and one on a
real controller with served twins."""

from __future__ import annotations

import json
import os
import sqlite3
import time
import urllib.request
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller import demo as starting
from controller.drills import demo as fleets
from controller.drills.cli import HELP
from controller.drills.demo import DemoFleet
from controller.drills.measure import Criterion, DrillResult
from dashboards import state
from dashboards.jobs import Jobs
from dashboards.parts.drills.form import command, request_of, word
from dashboards.parts.drills.result import FIGURES
from dashboards.words import Words
from dashboards.work.drill import RESULT, TAKEN_BACK, Asked
from policy.drills import DRILL_KINDS, Difference, DrillFigures, Raised
from tests.controller.processes import eventually
from tests.ui.canned import document, local_fleet, told
from tests.ui.controllers import holding
from tests.ui.test_live import everything, replica, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from streamlit.testing.v1 import AppTest

    from dashboards.jobs import Job

WORDS = Words.load()
ENDS_S = 400.0
STARTS_S = 240.0
DRILL_S, LONG_S = 10, 300


def figures(**more: Any) -> DrillFigures:
    given: dict[str, Any] = {
        "offered": 900, "answered": 890, "late": 2, "degraded": 0, "refused": 4, "failed": 6,
        "avoidable": 0, "cancelled": 0, "lost": 0, "isolated_s": 0.0123, "recovered_s": 4.5678,
        "serving_before": 2, "serving_least": 1, "others_out": (),
        "alerts": (Raised(0.015, "replica qwen3-8b-0", "killed by signal 9", "none needed"),),
    }  # fmt: skip
    return DrillFigures(**{**given, **more})


def drill_result(**more: Any) -> DrillResult:
    given: dict[str, Any] = {
        "kind": "engine-kill", "target": "demo", "slot": "qwen3-8b-0", "at": 1.8e9, "for_s": 30.0,
        "what": "SIGKILL to qwen3-8b-0", "simulated": "", "measured": figures(),
        "predicted": figures(recovered_s=None, failed=5), "not_predicted": "",
        "differences": (
            Difference("isolated_s", 0.0123, 0.0123, 0.0),
            Difference("failed", 6.0, 5.0, 0.11),
        ),
        "criteria": (
            Criterion("isolated alone", True, "out of rotation after 0.012 s"),
            Criterion("recovered", False, "fewer replicas <than> before"),
        ),
        "alerts": (), "callers": {"answered": 890, "failed": 6},
    }  # fmt: skip
    return DrillResult(**{**given, **more})


def asked(**more: Any) -> dict[str, Any]:
    return {
        "kind": "engine-kill", "for_s": 30.0, "on": "", "target": "demo", "data": "", "profile": "",
        "asked_s": 1.8e9, **more,
    }  # fmt: skip


def as_job(tmp_path: Path, how: str, **more: Any) -> Job:
    """A drill of the app that is in this state."""
    jobs = Jobs(tmp_path / "ui" / "jobs", 0)
    job = jobs.start("drill", asked(**more))
    job.folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(tmp_path / "ui" / "jobs" / "jobs.db")) as database:
        database.execute(
            "update jobs set state = ?, began_s = 1, ended_s = ? where id = ?",
            (how, time.time(), job.id),
        )
        database.commit()
    return jobs.get(job.id)


def link_of(session: AppTest) -> str:
    """The drill that the address bar names."""
    found = session.query_params["drill"]
    return found if isinstance(found, str) else found[-1]


# The form


def test_each_kind_is_explained_as_the_command_does() -> None:
    for kind in DRILL_KINDS:
        assert WORDS.text(f"drills.kind.{word(kind)}", "en") in HELP


def test_a_drill_on_the_demo_fleet_is_asked_for(app: Callable[..., AppTest], idle: None) -> None:
    session = app("drills")
    assert not session.exception
    session.radio("drill_kind").set_value("ecc").run()
    session.number_input("drill_for").set_value(30).run()
    session.text_input("drill_on").set_value("qwen3-8b-1").run()
    assert "twinkeel drill ecc --for 30s --on qwen3-8b-1" in [each.value for each in session.code]
    session.button("drill_go").click().run()
    (job,) = state.jobs().recent("drill")
    request = msgspec.convert(job.request, Asked)
    assert (request.kind, request.for_s, request.on, request.target) == (
        "ecc", 30.0, "qwen3-8b-1", "demo",
    )  # fmt: skip
    assert link_of(session) == job.id
    shown = everything(session)
    assert "ecc · demo fleet · 30 s" in shown
    session.button("cancel_drill").click().run()
    assert state.jobs().get(job.id).state == "cancelled"
    session.button("drill_go").click().run()
    assert len(state.jobs().recent("drill")) == 2, "each drill is one of its own"
    moved = session.switch_page("app_pages/live.py").run().switch_page("app_pages/drills.py").run()
    assert moved.radio("drill_kind").value == "ecc", "what was chosen outlives the page"


def test_the_command_repeats_it() -> None:
    live = asked(target="http://10.0.0.5:8081", data="/d", profile="h100-sxm/qwen3-8b", on="a b")
    assert command(live, "/d/admin.token") == (
        "twinkeel drill engine-kill --for 30s --on 'a b' --target http://10.0.0.5:8081 --data /d"
        " --profile h100-sxm/qwen3-8b --token-file /d/admin.token --yes"
    )
    assert "--token-file DATA/admin.token" in command(asked(target="http://10.0.0.5:8081"))


# What it has found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_an_outcome_is_shown(app: Callable[..., AppTest], tmp_path: Path, language: str) -> None:
    job = as_job(tmp_path, "done")
    (job.folder / RESULT).write_bytes(msgspec.json.encode(drill_result()))
    session = app("drills", {"lang": [language], "drill": [job.id]})
    shown = everything(session)
    for wanted in (
        "0.012 s", "4.568 s", "0.1 %", "fewer replicas <than> before".replace("<", "&lt;")[:14],
        "killed by signal 9", "twinkeel drill engine-kill --for 30s",
        WORDS.text("drills.some_failed", language, count=1, of=2),
        WORDS.text("drills.never", language),
        WORDS.text("drills.figure.avoidable", language),
    ):  # fmt: skip
        assert wanted in shown, wanted
    assert "<than>" not in "".join(each.value for each in session.html)
    if language == "zh":
        assert "只隔离了故障者" in shown


def test_without_a_prediction_the_reason_is_told(
    app: Callable[..., AppTest], tmp_path: Path
) -> None:
    job = as_job(tmp_path, "done")
    found = drill_result(
        predicted=None, differences=(), not_predicted="no profile", simulated="no real card",
        criteria=(Criterion("recovered", True, "it did"),), measured=figures(alerts=()),
    )  # fmt: skip
    (job.folder / RESULT).write_bytes(msgspec.json.encode(found))
    shown = everything(app("drills"))
    for wanted in ("No prediction: no profile", "All 1 criteria passed", "Simulated: no real card",
                   "Nobody was told anything."):  # fmt: skip
        assert wanted in shown, wanted


def test_how_a_drill_ended_is_told_and_each_can_be_looked_at(
    app: Callable[..., AppTest], tmp_path: Path
) -> None:
    back = as_job(tmp_path, "cancelled", asked_s=1.0)
    (back.folder / TAKEN_BACK).touch()
    hard = as_job(tmp_path, "cancelled", asked_s=2.0)
    died = as_job(tmp_path, "died", asked_s=3.0, target="http://10.0.0.5:8081")
    gone = as_job(tmp_path, "done", asked_s=4.0)
    said = {
        back.id: "taken_back", hard.id: "not_taken_back", died.id: "look_after", gone.id: "gone",
    }  # fmt: skip
    session = app("drills", {"drill": [back.id]})
    for number, key in said.items():
        session.selectbox("drill_earlier").set_value(number).run()
        assert link_of(session) == number
        text = WORDS.texts[f"drills.{key}"]["en"].partition("{")[0]
        alerts = [*session.info, *session.warning, *session.error]
        assert any(text in each.value for each in alerts), key
    assert "its process died" in everything(session)


def test_a_link_to_a_drill_that_is_not_here_is_a_sentence(app: Callable[..., AppTest]) -> None:
    session = app("drills", {"drill": ["0123456789abcdef"]})
    assert any("there is no job" in each.value for each in session.error)


def test_the_figures_are_those_of_a_drill() -> None:
    assert set(FIGURES) <= set(DrillFigures.__struct_fields__)
    named = {each for each in FIGURES.values() if each}
    assert named == {"isolated_s", "recovered_s", "failed", "degraded"}


# Callers are hit only on purpose


def ask(session: AppTest, name: str, token: str) -> None:
    """Go through the dialog. Without a browser the whole page is run again, so its button is
    pressed again, too."""
    session.button("drill_ask").click().run()
    session.button("drill_ask").click()
    session.text_input("drill_name").set_value(name)
    session.text_input("drill_token").set_value(token)
    session.button("drill_confirm").click().run()


def test_callers_are_not_hit_without_the_target_s_name_and_token(
    app: Callable[..., AppTest], knows: Callable[..., None], idle: None, tmp_path: Path
) -> None:
    file = tmp_path / "admin.token"
    file.write_text("a-token")
    answers: dict[str, object] = {
        "/status": status_of(replica(in_flight=3), open_requests=5),
        "/fleet": document(local_fleet(pid=os.getpid())),
    }
    with told(answers) as url:
        knows({"east": url}, {"east": str(file)})
        session = app("drills")
        session.radio("drill_where").set_value("controller").run()
        assert "drill_go" not in [each.key for each in session.button]
        assert f"--target {url} --data {tmp_path}" in session.main.code[0].value
        session.radio("drill_kind").set_value("ecc").run()
        session.button("drill_ask").click().run()
        shown = everything(session)
        for wanted in ("qwen3-8b-0 would be hit", "3 requests are in flight there now, 5 in all",
                       "an uncorrectable memory error", "is hit", "stays"):  # fmt: skip
            assert wanted in shown, wanted
        for name, token, key in (("west", "a-token", "drills.name_wrong"), ("", "a-token", ""),
                                 ("east", "", "deploy.token_missing")):  # fmt: skip
            ask(session, name, token)
            text = WORDS.texts[key or "drills.name_wrong"]["en"].partition("{")[0]
            assert any(text in each.value for each in session.error), (name, token)
            assert state.jobs().recent("drill") == []
        ask(session, "east", "a-token")
        assert any("would not begin now" in each.value for each in session.error), "no room"
        assert state.jobs().recent("drill") == []
        session.radio("drill_kind").set_value("oom").run()
        session.button("drill_ask").click().run()
        assert any("demo fleet only" in each.value for each in session.error), "it says why not"
        assert "drill_confirm" not in [each.key for each in session.button]


# A real controller, served twins, real drills


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patience:
        patience.setattr(starting, "START_S", STARTS_S)
        patience.setattr(fleets, "UP_S_MOST", STARTS_S)
        with DemoFleet(folder, "bad-answers") as found:
            yield found


@pytest.fixture
def drilling(app: Callable[..., AppTest], knows: Callable[..., None], fleet: DemoFleet) -> AppTest:
    """The page, at that controller."""
    knows({"east": fleet.admin.url}, {"east": str(fleet.data / "admin.token")})
    session = app("drills")
    session.radio("drill_where").set_value("controller").run()
    return session


def ended(number: str) -> Job:
    def over() -> Job | None:
        state.jobs().look()
        job = state.jobs().get(number)
        return None if job.open else job

    found: Job = eventually("the drill is over", over, ENDS_S, 0.2)
    return found


def answers_well(fleet: DemoFleet) -> bool:
    """Whether each engine answers with something."""
    body = {"model": "qwen3-8b", "max_tokens": 3,
            "messages": [{"role": "user", "content": "hello"}]}  # fmt: skip
    good = []
    for slot in fleet.admin.fleet().slots:
        request = urllib.request.Request(
            f"{slot.url}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        good.append(text and json.loads(text)["choices"][0]["message"]["content"])
    return all(good)


def test_a_live_fleet_is_drilled_and_a_cancel_takes_it_back(
    drilling: AppTest, app: Callable[..., AppTest], fleet: DemoFleet, tmp_path: Path
) -> None:
    token = (fleet.data / "admin.token").read_text(encoding="utf-8").strip()
    seen = everything(app("live"))
    for wanted in ("qwen3-8b-0", "qwen3-8b-standby-0", "its own processes", "knows no card"):
        assert wanted in seen, wanted
    drilling.radio("drill_kind").set_value("bad-answers").run()
    drilling.number_input("drill_for").set_value(LONG_S).run()
    ask(drilling, fleet.admin.url, f"{token}x")
    assert any("not the controller's admin token" in each.value for each in drilling.error)
    ask(drilling, fleet.admin.url, token)
    (job,) = state.jobs().recent("drill")
    eventually("answers are spoiled", lambda: not answers_well(fleet), ENDS_S, 0.5)
    assert state.jobs().cancel(job.id).state == "cancelled"
    assert (job.folder / TAKEN_BACK).exists()
    assert answers_well(fleet), "what was broken is taken back"
    drilling.radio("drill_kind").set_value("engine-kill").run()
    drilling.number_input("drill_for").set_value(DRILL_S).run()
    ask(drilling, "east", token)
    killed = state.jobs().recent("drill")[0]
    assert killed.id != job.id
    done = ended(killed.id)
    assert (done.state, done.error) == ("done", "")
    shown = everything(drilling.run())
    for wanted in ("SIGKILL to qwen3-8b-0", "isolated alone", "killed by signal 9",
                   "No prediction"):  # fmt: skip
        assert wanted in shown, wanted
    assert token not in shown
    assert holding(tmp_path / "ui", "SIGKILL to qwen3-8b-0"), "what it has found is there"
    assert holding(tmp_path / "ui", token) == []


def test_what_the_target_refuses_is_a_sentence(app: object, fleet: DemoFleet) -> None:
    job = state.jobs().start_now(
        "drill", asked(target=fleet.admin.url, on="nowhere", asked_s=9.0), fleet.admin._token
    )
    failed = ended(job.id)
    assert failed.state == "failed"
    assert failed.error.startswith("there is no slot 'nowhere'")


def test_a_request_is_what_the_job_takes() -> None:
    kept = {"kind": "ecc", "for_s": 60, "on": "", "where": "demo", "profile": "x"}
    assert msgspec.convert(request_of(kept), Asked).profile == "", "a demo has its own"
