"""The main path of the page Replay: upload a trace, play it, see what the command line prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from dashboards.scenario import Scenario
from tests.figures import Figure
from tests.ui.browser.harness import ROOT, looking
from traces.generate import generate_trace, load_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App, Look

pytestmark = pytest.mark.ui
NEVER_EQUAL = re.compile(r"wall_s|_per_s_wall|speed_up|path|out$")
"""How long a run took, and where its files lie."""
PLAYED_MS = 300_000


@pytest.fixture
def uploaded(tmp_path: Path, trace_of: Callable[[int], Path]) -> Path:
    """A trace that nobody has uploaded yet."""
    path = tmp_path / "mine.parquet"
    shutil.copyfile(trace_of(2_000), path)
    return path


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every figure of a document, by its path."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from leaves(item, f"{path}[{place}]")
    else:
        yield path, value


def rows_shown(look: Look) -> list[list[str]]:
    """The texts of the tables, row by row, without empty ones and without notes."""
    found: list[list[str]] = (
        look.key("replay_figures")
        .locator("tbody tr")
        .evaluate_all(
            "(rows) => rows.map((row) => [...row.querySelectorAll('td:not(.note)')]"
            ".map((cell) => cell.innerText.trim()).filter((text) => text))"
        )
    )
    return found


def printed(text: str) -> list[list[str]]:
    """The same of a table in a terminal."""
    return [
        [cell.strip() for cell in re.split("[│┃|]", line) if cell.strip()]
        for line in text.splitlines()
    ]


def stands_in(row: list[str], lines: list[list[str]]) -> int:
    """How many cells of a row some one line of the terminal has too, in this order."""

    def common(line: list[str]) -> int:
        rest = iter(line)
        return sum(any(cell == other for other in rest) for cell in row)

    return max(map(common, lines), default=0)


def test_uploaded_played_and_equal_to_the_command(
    look: Look, app: App, uploaded: Path, tmp_path: Path, measured: Callable[[Figure], None]
) -> None:
    look.open()
    look.page.get_by_role("button", name="Upload a trace").click()
    look.key("upload_trace").locator("input[type=file]").set_input_files(uploaded)
    look.page.wait_for_function("() => decodeURIComponent(location.href).includes('upload:mine')")
    look.page.keyboard.press("Escape")
    look.idle()
    look.click("job_replay")
    look.key("replay_figures").wait_for(timeout=PLAYED_MS)
    look.idle()
    shown = rows_shown(look)
    assert len(shown) >= 10
    with look.page.expect_download() as download:
        look.click("get_json")
    ours = json.loads(download.value.path().read_text())

    command = look.page.locator("[data-testid=stSidebar] [data-testid=stCode]").last
    words = shlex.split(command.text_content() or "")
    assert words[:2] == ["twinkeel", "replay"]
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "twinkeel", *words[1:], "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "400"},
    )  # fmt: skip
    theirs = dict(leaves(json.loads((out / "report.json").read_text())))
    found = {path: value for path, value in leaves(ours) if not NEVER_EQUAL.search(path)}
    equal = sum(path in theirs and theirs[path] == value for path, value in found.items())
    lines = printed(done.stdout)
    cells = sum(map(len, shown))
    equal_cells = sum(stands_in(row, lines) for row in shown)
    unlike = [path for path, value in found.items() if theirs.get(path) != value]
    unlike += [" | ".join(row) for row in shown if stands_in(row, lines) < len(row)]
    print(done.stdout, *unlike[:20], sep="\n")
    measured(
        Figure(
            "figures_equal_cli_pct", 100 * (equal + equal_cells) / (len(found) + cells), "%",
            "= 100",
            f"a trace uploaded and played on the page; {len(found)} figures of its report.json and"
            f" {cells} texts of its tables against what `twinkeel replay` writes and prints for the"
            " command that the page shows",
        )
    )  # fmt: skip


def test_a_slow_requests_story(look: Look) -> None:
    look.open()
    look.click("job_replay")
    look.key("replay_figures").wait_for(timeout=PLAYED_MS)
    look.choose("replay_view", "Requests")
    look.key("replay_scatter").locator(".js-plotly-plot").wait_for()
    look.idle()
    look.key("replay_slow").locator("input").click()
    look.page.get_by_role("option").first.click()
    look.key("replay_story").wait_for(timeout=PLAYED_MS)
    look.idle()
    story = look.text("replay_story")
    assert "fifo" in story
    assert "stable" in story, "the same request under another policy"
    assert look.key("replay_story").locator(".js-plotly-plot").count() >= 1, "the waterfall"
    assert look.key("replay_story").locator("table").count() >= 2


def test_a_timeline_for_perfetto(look: Look) -> None:
    look.open()
    look.click("job_replay")
    look.key("replay_figures").wait_for(timeout=PLAYED_MS)
    look.idle()
    look.page.get_by_role("button", name="Timeline").first.click()
    with look.page.expect_download() as download:
        look.click("get_timeline")
    events = json.loads(download.value.path().read_text())["traceEvents"]
    assert len(events) > 100
    assert all("ph" in event and "pid" in event for event in events)


def test_the_first_chart(browser: Browser, app: App, measured: Callable[[Figure], None]) -> None:
    colds, warm = [], []
    for _ in range(2):
        with looking(browser, app) as look:
            look.open()
            colds.append(look.first_chart_s())
            for _ in range(5 if not warm else 0):
                look.open("deploy")
                look.open()
                warm.append(look.first_chart_s())
    value = statistics.median(warm)
    measured(
        Figure(
            "first_chart_s", value, "s", "<= 2",
            "from opening the page Replay with the preset to its first chart, as the browser's own"
            f" clock has it: the middle of {len(warm)} ({min(warm):.2f} to {max(warm):.2f}); in a"
            f" browser that was never there {colds[-1]:.2f}, and the first of all {colds[0]:.2f}",
        )
    )  # fmt: skip


def test_ten_thousand_requests_are_drawn(
    look: Look, app: App, tmp_path: Path, measured: Callable[[Figure], None]
) -> None:
    import msgspec

    from tests.ui.browser.conftest import SPEC

    path = tmp_path / "ten.parquet"
    spec = msgspec.structs.replace(load_spec(SPEC), duration_s=290, warm_up_s=0)
    rows = generate_trace(spec, path).rows
    look.open("replay", Scenario(trace=str(path), policies=("stable",), scale=10_000 / rows))
    look.click("job_replay")
    look.key("replay_results").wait_for(timeout=PLAYED_MS)
    look.choose("replay_view", "Requests")
    drawn = """() => {
      const plot = document.querySelector('.st-key-replay_scatter .js-plotly-plot');
      return plot && plot.querySelector('.scatterlayer .trace, .gl-canvas') !== null;
    }"""
    look.page.wait_for_function(drawn)
    look.idle()
    points = (
        look.key("replay_scatter")
        .locator(".js-plotly-plot")
        .evaluate("(plot) => plot.data.reduce((sum, one) => sum + one.x.length, 0)")
    )
    took = []
    for _ in range(3):
        look.choose("replay_view", "Figures")
        look.key("replay_figures").wait_for()
        look.idle()
        took.append(look.measured_ms(lambda: look.choose("replay_view", "Requests"), drawn) / 1000)
        look.idle()
    # And with the view kept, from the job's own end.
    again = Scenario(trace=str(path), policies=("stable",), scale=10_000 / rows, seed=1)
    look.fill_more("form_seed", "1")
    look.click("job_replay")
    look.key("replay_scatter").wait_for(state="hidden")
    look.page.wait_for_function(drawn, timeout=PLAYED_MS)
    end_s = time.time()
    job = app.jobs.find("replay", msgspec.to_builtins(again))
    assert job is not None
    measured(
        Figure(
            "draw_10k_requests_s", max(took), "s", "<= 2",
            f"from asking for them to {points:,} points on the screen, of a replay of 10,000"
            f" requests; the worst of {len(took)}. From the end of another such job, which the page"
            f" was waiting for: {end_s - job.ended_s:.2f}",
        )
    )  # fmt: skip
