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

import msgspec
import pyarrow.parquet as pq
import pytest

from dashboards.scenario import Scenario
from tests.figures import Figure
from tests.ui.browser.harness import ROOT, looking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App, Look

pytestmark = pytest.mark.ui
NEVER_EQUAL = re.compile(r"wall_s|cpu_s|peak_mib|per_s_wall|speed_up|path|out$")
MACHINES_OWN = ("wall time of the replay", "requests per wall second")
"""What a run took of the machine, and where its files lie."""
PLAYED_MS = 600_000
DRAWN = 10_000


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
        [cell.strip() for cell in re.split("[│┃|]|  +", line) if cell.strip()]
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
    look.choose_file(uploaded)
    look.page.wait_for_function("() => decodeURIComponent(location.href).includes('upload:mine')")
    look.page.keyboard.press("Escape")
    look.idle().play(PLAYED_MS)
    every = rows_shown(look)
    shown = [row for row in every if row[0] not in MACHINES_OWN]
    assert len(shown) == len(every) - len(MACHINES_OWN)
    assert len(shown) >= 20
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


VIEWS = {"figures": "Figures", "latency": "Latency", "hops": "Where", "time": "Over time"}


def test_every_view_has_charts(look: Look) -> None:
    look.open().play(PLAYED_MS)
    for view, text in VIEWS.items():
        look.choose("replay_view", text)
        look.key(f"replay_{view}_view").locator(".js-plotly-plot .main-svg").first.wait_for()
        look.idle()
        assert look.key(f"replay_{view}_view").locator(".js-plotly-plot").count() >= 2, view
        look.shot(f"replay-{view}", "replay_results")


def test_a_slow_requests_story(look: Look) -> None:
    look.open().play(PLAYED_MS)
    look.choose("replay_view", "Requests")
    look.key("replay_scatter").locator(".js-plotly-plot").wait_for()
    look.idle()
    slowest = look.page.get_by_role("option").first
    look.unfold(look.key("replay_slow").locator("input"), slowest)
    slowest.click()
    look.key("replay_story").wait_for(timeout=PLAYED_MS)
    look.idle()
    story = look.text("replay_story")
    assert "fifo" in story
    assert "stable" in story, "the same request under another policy"
    assert look.key("replay_story").locator(".js-plotly-plot").count() >= 1, "the waterfall"
    assert look.key("replay_story").locator("table").count() >= 2
    look.shot("replay-requests", "replay_requests_view")
    look.shot("replay-story", "replay_story")


def test_a_timeline_for_perfetto(look: Look) -> None:
    look.open().play(PLAYED_MS)
    timeline = look.page.get_by_role("button", name="Timeline").first
    look.unfold(timeline, look.key("get_timeline"))
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
    look: Look, app: App, tmp_path: Path, trace_of: Callable[[int], Path],
    measured: Callable[[Figure], None],
) -> None:  # fmt: skip
    path = tmp_path / "ten.parquet"
    pq.write_table(pq.read_table(trace_of(11_000)).slice(0, DRAWN), path)
    asked = Scenario(trace=app.keep(path), policies=("stable",))
    look.open("replay", asked).play(PLAYED_MS)
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
    assert points > 0.9 * DRAWN, "each by itself: what was shed took no time"
    took = []
    for _ in range(3):
        look.choose("replay_view", "Figures")
        look.key("replay_figures").wait_for()
        look.idle()
        took.append(look.measured_ms(lambda: look.choose("replay_view", "Requests"), drawn) / 1000)
        look.idle()
    # And with the view kept, from the job's own end.
    again = msgspec.structs.replace(asked, seed=1)
    look.fill_more("form_seed", "1")
    look.key("replay_scatter").wait_for(state="hidden")
    look.click("job_replay")
    look.page.wait_for_function(drawn, timeout=PLAYED_MS)
    end_s = time.time()
    job = app.jobs.find("replay", msgspec.to_builtins(again))
    assert job is not None
    measured(
        Figure(
            "draw_10k_requests_s", max(took), "s", "<= 2",
            f"from asking for them to {points:,} points on the screen, of a replay of {DRAWN:,}"
            f" requests; the worst of {len(took)}. From the end of another such job, which the page"
            f" was waiting for: {end_s - job.ended_s:.2f}",
        )
    )  # fmt: skip
