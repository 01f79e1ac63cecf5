"""The page replay: its work, and what it shows of it."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner
from rich.console import Console

from dashboards import state
from dashboards.jobs import Jobs
from dashboards.jobs.store import job_id
from dashboards.scenario import Kind, Scenario, to_query
from dashboards.shelf import Shelf
from dashboards.work import replay as work
from dashboards.work import story
from tests.ui.conftest import DRAWN_S
from traces import TraceWriter, open_trace
from twin.cli import replay_command
from twin.fleet import fleet_of
from twin.replay import ReplayOptions, named_policies, replay
from twin.report import table
from twin.report.texts import text_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamlit.testing.v1 import AppTest

APP = Path(__file__).parents[2] / "dashboards" / "app.py"
FAULT = "{kind: slow_card, at_s: 2, on: 0, factor_permille: 3000, for_s: 3}"
NOT_COMPARED = ("wall_s", "cpu_s", "peak_mib")


def small_trace(path: Path, rows: int = 60) -> Path:
    columns: dict[str, Any] = {
        "request_id": list(range(100, 100 + rows)),
        "arrival_s": [row / 10 for row in range(rows)],
        "prompt_tokens": pa.array([300 + 7 * row for row in range(rows)], pa.int32()),
        "output_tokens": pa.array([20 + row % 9 for row in range(rows)], pa.int32()),
        "sla_class": ["P0", "P1", "P2"] * (rows // 3),
        "prefix_ids": pa.array([[1, 2, row] for row in range(rows)], pa.list_(pa.int64())),
        "prefix_block_tokens": pa.array([64] * rows, pa.int16()),
    }
    with TraceWriter(path) as writer:
        writer.write(pa.RecordBatch.from_pydict(columns))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def scenario(data: Path) -> Scenario:
    """Of an uploaded trace."""
    made = small_trace(data / "small.parquet")
    kept = Shelf(data / "uploads").add_trace("small.parquet", made.read_bytes())
    return Scenario(
        trace=kept.name, fleet=(Kind("h100-sxm/qwen3-8b", 2),), policies=("fifo", "stable"),
        faults=(FAULT,), slo="P0=0.05,tpot=0.1", seed=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def played(data: Path, scenario: Scenario) -> Path:
    """The folder of a job that has played it."""
    request = msgspec.to_builtins(scenario)
    store = Jobs(data / "jobs", most=0)  # so that the store begins no process of its own
    job = store.start("replay", request)
    job.folder.mkdir(parents=True)
    said: list[tuple[float | None, str]] = []
    work.run(request, job.folder, lambda share, text: said.append((share, text)))
    shares = [share for share, _ in said if share is not None]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    _done(data, job.id)
    return job.folder


def _done(data: Path, number: str) -> None:
    import sqlite3

    with sqlite3.connect(data / "jobs" / "jobs.db") as database:
        database.execute("update jobs set state = 'done' where id = ?", (number,))
    database.close()


@pytest.fixture
def app(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppTest]:
    from streamlit import cache_resource
    from streamlit.testing.v1 import AppTest

    settings = state.Settings(data=str(data), jobs=1)
    monkeypatch.setenv(state.VARIABLE, msgspec.json.encode(settings).decode())
    cache_resource.clear()
    yield AppTest.from_file(str(APP), default_timeout=DRAWN_S)
    cache_resource.clear()


def shown(app: AppTest, scenario: Scenario, language: str = "en") -> AppTest:
    for name, values in (to_query(scenario) | {"lang": [language]}).items():
        app.query_params[name] = values
    app.run()
    assert not app.exception
    return app


def test_the_figures_are_those_of_the_command(
    played: Path, data: Path, scenario: Scenario, tmp_path: Path
) -> None:
    words = [str(Shelf(data / "uploads").path_of(scenario.trace)), "--profile",
             "h100-sxm/qwen3-8b", "--replicas", "2", "--policy", "fifo", "--policy", "stable",
             "--fault", FAULT, "--slo", scenario.slo, "--seed", "3", "--out", str(tmp_path),
             "--quiet"]  # fmt: skip
    result = CliRunner().invoke(replay_command, words)
    assert result.exit_code == 0, result.output
    ours, theirs = (
        json.loads((folder / "report.json").read_text())["replays"] for folder in (played, tmp_path)
    )
    for one in (*ours, *theirs):
        for name in NOT_COMPARED:
            one.pop(name)
    assert ours == theirs


def test_the_tables_say_what_the_terminal_says(tmp_path: Path) -> None:
    trace = open_trace(small_trace(tmp_path / "t.parquet"))
    fleet = fleet_of([("h100-sxm/qwen3-8b", 1)])
    replays = [
        replay(trace, fleet, parameters, ReplayOptions(), policy_name=name)
        for name, parameters in named_policies(["fifo", "stable"])
    ]
    console = Console(width=100, record=True, file=StringIO())
    console.print(table(replays))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    for one in text_tables(replays):
        for row in one["rows"]:
            words = [row["group"], row["name"].strip(), *(cell["text"] for cell in row["cells"])]
            assert " ".join(" ".join(words).split()) in lines


def test_charts_are_small_and_have_the_fault(played: Path) -> None:
    charts = json.loads((played / "charts.json").read_text())
    assert charts["over_time"]["kv"]["layout"]["shapes"]
    assert charts["tier_queue"] is not None
    scatter = json.loads((played / "requests-1-ttft_s.json").read_text())
    assert sum(len(trace["x"]) for trace in scatter["traces"]) == 60
    assert (played / "stable" / "decisions.0.log").is_file()


def test_a_story_is_that_request_under_every_policy(
    played: Path, scenario: Scenario, tmp_path: Path
) -> None:
    request = {"replay": played.name, "row": 41}
    assert played.name == job_id("replay", msgspec.to_builtins(scenario))
    folder = played.parent / "story"
    folder.mkdir(exist_ok=True)
    story.run(request, folder, lambda share, text: None)
    told = json.loads((folder / "story.json").read_text())
    assert [policy["label"] for policy in told["policies"]] == ["fifo", "stable"]
    for policy in told["policies"]:
        one = policy["request"]
        assert one["request_id"] == 141
        assert policy["story"]["settled_ms"] == pytest.approx(1000 * one["e2e_s"], abs=0.01)
        assert policy["story"]["first_ms"] == pytest.approx(1000 * one["ttft_s"], abs=0.01)
    assert told["policies"][1]["story"]["scores"]
    assert told["waterfall"]["traces"]


def test_a_story_needs_a_replay(tmp_path: Path) -> None:
    request = {"replay": "0123456789abcdef", "row": 0}
    with pytest.raises(ValueError, match="not been played here yet"):
        story.run(request, tmp_path / "jobs" / "x", lambda share, text: None)


def test_what_does_not_fit_is_a_sentence(data: Path, scenario: Scenario, tmp_path: Path) -> None:
    folder = data / "jobs" / "other"
    fault = "{kind: gpu_lost, at_s: 1, on: host9}"
    request = msgspec.to_builtins(msgspec.structs.replace(scenario, faults=(fault,)))
    with pytest.raises(ValueError, match="there is no such replica or domain"):
        work.run(request, folder, lambda share, text: None)


@pytest.mark.parametrize(("language", "word"), [("en", "Request rate"), ("zh", "请求速率")])
def test_the_trace_is_seen_at_once(app: AppTest, language: str, word: str) -> None:
    shown(app, Scenario(trace="shipped:bursts"), language)
    assert f"**{word}**" in [one.value for one in app.markdown]
    assert [one.label for one in app.main.get("button") if one.key == "job_replay"]
    assert len(app.main.get("plotly_chart")) >= 2
    assert not app.error


def test_the_page_shows_the_same_texts(app: AppTest, played: Path, scenario: Scenario) -> None:
    shown(app, scenario)
    assert not app.error
    html = " ".join(one.proto.body for one in app.main.get("html"))
    texts = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    for one in json.loads((played / "rows.json").read_text()):
        for row in one["rows"]:
            for cell in row["cells"]:
                assert cell["text"] in texts


@pytest.mark.parametrize("view", ["latency", "hops", "time", "requests"])
def test_every_view_can_be_drawn(
    app: AppTest, played: Path, scenario: Scenario, view: str
) -> None:  # fmt: skip
    app.session_state["replay_view_kept"] = view
    shown(app, scenario)
    assert not app.error
    assert len(app.main.get("plotly_chart")) > 3


def test_a_chosen_request_is_told(
    app: AppTest, data: Path, played: Path, scenario: Scenario
) -> None:
    request = {"replay": played.name, "row": 41}
    job = Jobs(data / "jobs", most=0).start("story", request)
    job.folder.mkdir(parents=True, exist_ok=True)
    story.run(request, job.folder, lambda share, text: None)
    _done(data, job.id)
    app.session_state["replay_view_kept"] = "requests"
    app.session_state["replay_row_kept"] = 41
    shown(app, scenario)
    assert "#### Request 41" in [one.value for one in app.markdown]
    assert not app.error


def test_a_trace_that_is_not_there_is_a_sentence(app: AppTest) -> None:
    shown(app, Scenario(trace="upload:gone~0123456789abcdef.trace"))
    assert any("upload it again" in one.value for one in app.error)
