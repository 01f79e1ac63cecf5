"""The page that deploys: what speaks against it is shown, each act asks for the token, and what
becomes of it is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.deployment.measured import Measured
from controller.deployment.views import Row, Step
from dashboards.parts.deploy.current import Point, band_chart, band_table, figure_name, why
from dashboards.parts.deploy.history import diff_table
from dashboards.parts.deploy.papers import Papers, gate_table, read, reasons
from dashboards.parts.deploy.plan import DEMO
from policy.evidence import Gate, encode
from policy.parameters import render
from tests.deploy_support import evidence_for
from tests.policy_support import parameters
from tests.ui.controllers import as_job, calm, validated
from tests.ui.test_live import everything
from twin.validate.cli import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from streamlit.testing.v1 import AppTest

    from tests.controller.processes import Controller

LIVE = parameters(name="live")
MINE = parameters(name="mine", tiers={"turbo_max_tflop": 60})


def papers_of(**changes: Any) -> Papers:
    made = evidence_for(MINE, LIVE)
    evidence = msgspec.structs.replace(made.evidence, **changes)
    return Papers(render(MINE), encode(evidence), made.log)


@pytest.fixture
def session(
    app: Callable[..., AppTest], controller: Controller, knows: Callable[..., None], tmp_path: Path
) -> AppTest:
    """The page, with a policy that was validated."""
    knows({"east": controller.admin_url}, {"east": str(controller.data / "admin.token")})
    calm(controller)
    as_job(validated(controller), tmp_path / "ui")
    return app("deploy")


def confirm(session: AppTest, name: str, token: str) -> None:
    """Open a dialog and go through with it. Without a browser the whole page is run again, so its
    button is pressed again, too."""
    opener = {"deploy": "deploy_go", "rollback": "rollback_go"}[name]
    session.button(opener).click().run()
    session.button(opener).click()
    session.text_input(f"{name}_token").set_value(token)
    session.button(f"{name}_confirm").click().run()


def test_a_validated_policy_is_deployed_seen_and_rolled_back(
    session: AppTest, controller: Controller
) -> None:
    assert "every gate holds" in everything(session)
    assert not session.error
    session.button_group(key="deploy_plan").set_value("demo").run()
    confirm(session, "deploy", "no-token-of-this-controller")
    assert any("not the controller's admin token" in each.value for each in session.error)
    assert controller.status()["deployment"] == ""
    confirm(session, "deploy", controller.admin_token)
    assert controller.status()["deployment"].startswith("shadow")
    shown = everything(session)
    assert "begins in shadow" in shown
    assert "missed, % of requests" in shown, "the band"
    assert controller.admin_token not in shown
    confirm(session, "rollback", "")
    assert any("needed for this each time" in each.value for each in session.error)
    assert controller.status()["deployment"]
    confirm(session, "rollback", controller.admin_token)
    assert controller.status()["deployment"] == ""
    shown = everything(session)
    assert "is rolled back" in shown
    assert "turbo_max_tflop" in shown, "the difference"
    assert controller.admin_token not in shown
    assert controller.admin_token not in str(session._session_state.filtered_state)


# What speaks against it


def test_papers_that_hold_have_nothing_against_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert reasons(read(papers_of()), None) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"signature": ""}, "not signed"),
        ({"made_s": 1}, "days old"),
        ({"code_hash": "00"}, "was made with policy code"),
        ({"gates": ()}, "gate slo is missing"),
    ],
)  # fmt: skip
def test_each_reason_is_told(changes: dict[str, Any], said: str) -> None:
    assert any(said in reason for reason in reasons(read(papers_of(**changes)), None))


def test_a_wrong_signature_is_seen_where_the_key_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "deploy.key"
    key.write_text("00" * 32)
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    assert any("signature is wrong" in each for each in reasons(read(papers_of()), None))


def test_missing_evidence_and_log_are_reasons() -> None:
    alone = Papers(render(MINE))
    assert len(reasons(read(alone), None)) == 1
    without_log = papers_of()._replace(log=b"")
    assert len(reasons(read(without_log), None)) == 1


def test_gates_that_fail_come_first() -> None:
    shown = gate_table((Gate("slo", True, "it is met"), Gate("faults", False, "a card is lost")))
    assert shown.index("a card is lost") < shown.index("it is met")


def test_bad_uploads_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="is no evidence"):
        read(Papers(render(MINE), b'{"schema": 1}'))
    with pytest.raises(ValueError, match="turbo"):
        read(Papers("schema: 1\nname: x\ntiers:\n  turbo_max: 1\n"))


def test_the_demo_is_a_plan() -> None:
    from controller.deployment.plans import plan_of

    assert [stage.kind for stage in plan_of(DEMO, None).stages] == ["shadow", "canary", "full"]


# Predicted against measured


def test_what_is_measured_is_drawn_over_the_predicted_band() -> None:
    figure = Measured("ttft_s_p95/P0", 0.1, 0.5, 0.7, 20, 0.3, 30)
    points = [Point(1e9 + n, {figure.figure: 0.7}, {figure.figure: None}) for n in range(3)]
    chart = band_chart(figure, points)  # type: ignore[arg-type]
    lines = {trace["name"]: trace["y"] for trace in chart["traces"]}
    assert lines["predicted band"] == [500.0] * 3
    assert lines["candidate"] == [700.0] * 3
    assert lines["live policy"] == [None] * 3
    table = band_table((figure, Measured("slo_miss_share", None, None, None, 0, None, 0)))
    assert "above the band" in table
    assert "not known yet" in table
    assert figure_name("ttft_s_p95/P0") == "TTFT p95 · P0"


def test_a_difference_is_shown_key_by_key() -> None:
    from controller.deployment.views import Change, Diff

    assert "<i>" not in diff_table(Diff(1, None, (Change("<i>", 1, None),)))


def test_the_name_of_a_policy_is_no_word_to_translate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboards.parts.deploy.current.said", lambda text: f"<{text}>")
    step = Step(1.0, "done", 1000, "stable", {})
    row = Row(1, 1.0, "start", "stable", "ab", "done", "", False, (step,))
    assert why(row, step) == "stable"
    assert why(msgspec.structs.replace(row, name="other"), step) == "<stable>"
