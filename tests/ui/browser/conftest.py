"""One app and one controller for all browser tests, and the figures that they measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

from tests.figures import Figure, read_figures, require, show, write_figures
from tests.ui.browser.harness import (
    App,
    Demo,
    Look,
    app_process,
    chromium,
    demo_controller,
    looking,
)
from traces.generate import generate_trace, load_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser

FIGURES = Path("build/figures/ui.json")
TIMED = frozenset(["first_chart_s", "widget_ms_p95", "cancel_s", "draw_10k_requests_s"])
"""The machine's as much as the app's: a miss is reported as missed, and fails nothing."""
BROKEN = 5
"""Times the goal that is no matter of the machine any more."""
NAMES = (
    "pages_without_console_error_pct", "first_chart_s", "widget_ms_p95", "cancel_s",
    "draw_10k_requests_s", "questions_in_3_clicks", "figures_equal_cli_pct",
)  # fmt: skip
SPEC = Path(__file__).parents[2] / "bench" / "tuning.yaml"
SPEC_ROWS, SPEC_S = 19_700, 570
"""Requests that the specification gives, in that many seconds."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with demo_controller(tmp_path_factory.mktemp("controller")) as found:
        yield found


@pytest.fixture(scope="session")
def app(controller: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    options = [
        "--admin", controller.admin, "--token-file", str(controller.token_file),
        "--key", str(controller.key),
    ]  # fmt: skip
    with app_process(tmp_path_factory.mktemp("ui"), *options) as found:
        yield found


@pytest.fixture
def look(browser: Browser, app: App) -> Iterator[Look]:
    """A tab in which nothing goes wrong."""
    with looking(browser, app) as found:
        yield found
        assert found.faults() == []
        assert found.wrong == []


@pytest.fixture(scope="session")
def trace_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A trace of about that many requests, generated once."""
    import msgspec

    folder = tmp_path_factory.mktemp("traces")

    def made(rows: int) -> Path:
        path = folder / f"mixed{rows}.parquet"
        if not path.exists():
            spec = load_spec(SPEC)
            length_s = round(SPEC_S * rows / SPEC_ROWS)
            spec = msgspec.structs.replace(spec, duration_s=length_s, warm_up_s=0)
            generate_trace(spec, path)
        return path

    return made


@pytest.fixture(scope="session")
def measured() -> Iterator[Callable[[Figure], None]]:
    """Notes a figure; they are written when all tests have run."""
    found: dict[str, Figure] = {}

    def note(figure: Figure) -> None:
        found[figure.name] = figure
        show([figure])
        said = f"{figure.name} is {figure.value} {figure.unit}: goal {figure.goal}"
        if figure.name in TIMED:
            assert figure.value is not None, said
            assert figure.value <= BROKEN * float(figure.goal.split()[-1]), said
        else:
            assert figure.holds, said

    yield note
    kept = {figure.name: figure for figure in read_figures(FIGURES)} | found
    write_figures(FIGURES, [kept[name] for name in NAMES if name in kept])
    show(kept.values())
    for problem in require(kept.values(), NAMES):
        print(problem)
