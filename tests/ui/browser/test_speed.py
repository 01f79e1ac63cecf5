"""How fast pages answer while a job runs, and how soon a cancelled job is gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec import to_builtins

from dashboards.scenario import Scenario
from tests.figures import Figure
from tests.ui.browser.harness import group, looking

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.ui.browser.harness import App, Look

pytestmark = pytest.mark.ui
ROWS = 100_000
LONG = ("fifo", "stable", "throughput")
LEAST_OF_A_PAGE = 18
CANCELS = 5


def test_widgets_answer_while_a_job_runs(
    browser: Browser, app: App, trace_of: Callable[[int], Path],
    measured: Callable[[Figure], None],
) -> None:  # fmt: skip
    with looking(browser, app) as look:  # a result to look at meanwhile
        look.open().play(300_000)
    trace = app.keep(trace_of(ROWS))
    took: dict[str, list[float]] = {"replay": [], "what-if": [], "tune": []}
    use = {"replay": on_replay, "what-if": on_what_if, "tune": on_tune}
    number, begun = "", 0
    with looking(browser, app) as runner, looking(browser, app) as look:
        while min(map(len, took.values())) < LEAST_OF_A_PAGE:
            for page, clicks in use.items():
                if not number or not app.jobs.get(number).open:
                    begun += 1
                    number = begin(runner, Scenario(trace=trace, policies=LONG, seed=begun))
                some = clicks(look)
                if app.jobs.get(number).open:  # it ran all the while
                    took[page] += some
                assert look.faults() == []
        assert runner.faults() == []
        app.jobs.cancel(number)
    every = [one for some in took.values() for one in some]
    by_page = ", ".join(
        f"{page} {np.percentile(some, 95):.0f} of {len(some)}" for page, some in took.items()
    )
    measured(
        Figure(
            "widget_ms_p95", float(np.percentile(every, 95)), "ms", "<= 300",
            f"{len(every)} clicks, each to the frame that shows what it does, while {ROWS:,}"
            f" requests are replayed in a job; the middle {np.median(every):.0f}; p95 by page:"
            f" {by_page}",
        )
    )  # fmt: skip


def begin(look: Look, scenario: Scenario) -> str:
    """A job that replays it, which the page shows."""
    look.open("replay", scenario).click("job_replay")
    look.key("cancel_replay").wait_for()
    job = look.app.jobs.find("replay", to_builtins(scenario))
    assert job is not None
    return job.id


def on_replay(look: Look) -> list[float]:
    """Other views of a result."""
    look.open()
    look.key("replay_figures").wait_for()
    took = []
    for view, text in (
        ("latency", "Latency"), ("hops", "Where"), ("time", "Over time"), ("figures", "Figures"),
        ("requests", "Requests"), ("figures", "Figures"),
    ):  # fmt: skip
        shown = f"() => document.querySelector('.st-key-replay_{view}_view') !== null"
        took.append(look.measured_ms(lambda text=text: look.choose("replay_view", text), shown))
        look.idle()
    return took


def on_what_if(look: Look) -> list[float]:
    """Other questions."""
    look.open("what-if")
    took = []
    for question in ("capacity", "fit", "double", "n1", "cost", "burst"):
        chosen = (
            f"() => document.querySelector('.st-key-question_{question}"
            " [data-testid=stBaseButton-primary]') !== null"
        )
        took.append(look.measured_ms(
            lambda question=question: look.click(f"question_{question}"), chosen
        ))  # fmt: skip
        look.idle()
    return took


def on_tune(look: Look) -> list[float]:
    """More trials: the command below says so. Then the other half of the page, and back."""
    look.open("tune")
    took = []
    up = look.key("tune_trials").get_by_test_id("stNumberInputStepUp")
    for _ in range(4):
        trials = int(look.key("tune_trials").locator("input").input_value())
        says = f"() => document.body.textContent.includes('--trials {trials + 10}')"
        took.append(look.measured_ms(up.click, says))
        look.idle()
    shown = "() => document.querySelector('.st-key-tune_candidate') !== null"
    took.append(look.measured_ms(lambda: look.choose("tune_mode", "alidate"), shown))
    look.idle()
    shown = "() => document.querySelector('.st-key-tune_trials') !== null"
    took.append(look.measured_ms(lambda: look.choose("tune_mode", "Tune"), shown))
    look.idle()
    return took


def test_cancel_frees_the_workers(
    look: Look, app: App, trace_of: Callable[[int], Path], measured: Callable[[Figure], None]
) -> None:
    look.open("tune", Scenario(trace=app.keep(trace_of(20_000)), policies=("stable",)))
    look.fill("tune_trials", "500")
    look.idle()
    took, sizes = [], []
    for _ in range(CANCELS):
        look.click("job_tune")
        look.key("cancel_tune").wait_for()
        number = next(job.id for job in app.jobs.recent("tune") if job.open)
        pid = app.pid_of(number)
        end_s = time.monotonic() + 60
        while len(group(pid)) < 2 and time.monotonic() < end_s:
            time.sleep(0.1)
        time.sleep(1.0)  # in the middle of its work
        sizes.append(len(group(pid)))
        look.click("cancel_tune")
        clicked_s = look.clicked_s()
        while group(pid):
            time.sleep(0.002)
        took.append(time.time() - clicked_s)
        assert app.jobs.get(number).state == "cancelled"
        look.key("job_tune").wait_for()
        look.idle()
    measured(
        Figure(
            "cancel_s", max(took), "s", "<= 1",
            f"from the click on Cancel until no process of a tuning is left; the worst of"
            f" {len(took)}, the middle {np.median(took):.2f}; {min(sizes)} to {max(sizes)}"
            " processes each",
        )
    )  # fmt: skip
