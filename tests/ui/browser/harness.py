"""The app as a process, a controller for it to look at, and a real browser that looks at it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import psutil
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from controller import demo
from dashboards.jobs import Jobs
from dashboards.scenario import Scenario, to_query
from dashboards.shelf import Shelf
from tests.fleet.ports import lasting_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, Response

ROOT = Path(__file__).parents[3]
CHROMIUM = "TWINKEEL_CHROMIUM"
SERVES_S = 240.0
ENDS_S = 60.0
WAIT_MS = 180_000
MENU_MS = 20_000
"""Until a menu has opened, if it has not been closed again."""
LAPTOP = {"width": 1366, "height": 768}
SHOTS = Path("build/ui-screenshots")
PAGES = ("replay", "what-if", "tune", "forecast", "live", "drills", "deploy")
POLLING = ("live", "deploy")
"""Pages that ask for news all the time."""
QUIET = 3
PROBES = ("/_stcore/health", "/_stcore/host-config")
"""Streamlit asks for these below a page's own path first, when it is opened by its link."""

WATCH = """
(() => {
  const now = () => performance.timeOrigin + performance.now();
  window.twinkeel = { clicked: 0, first: 0 };
  const note = () => { window.twinkeel.clicked = now(); };
  for (const kind of ["click", "keydown"]) addEventListener(kind, note, true);
  const drawn = () => document.querySelector(
    ".js-plotly-plot .cartesianlayer .trace, .js-plotly-plot .gl-canvas, .js-plotly-plot .barlayer"
  );
  const look = () => {
    if (drawn()) { window.twinkeel.first = now(); return; }
    requestAnimationFrame(look);
  };
  addEventListener("DOMContentLoaded", look);
  window.twinkeel.until = (text) => new Promise((done, fail) => {
    const true_ = new Function("return (" + text + ")()");
    const end = now() + 180000;
    const look = () => {
      if (window.twinkeel.clicked && true_()) return done(now());
      if (now() > end) return fail("not within three minutes: " + text);
      requestAnimationFrame(look);
    };
    window.twinkeel.clicked = 0;
    look();
  });
})();
"""
"""When somebody clicked, when the first chart was drawn, and when something became true: all by the
browser's own clock, frame by frame."""


def chromium() -> str:
    """Where it is.

    Raises:
        RuntimeError: it is not installed, and how to do that.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get(CHROMIUM) or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise RuntimeError(
            "there is no Chromium for the browser tests: apt-get install chromium, or say where it"
            f" is in {CHROMIUM}"
        )
    return found


@dataclass
class App:
    """``twinkeel ui``, as a process."""

    url: str
    data: Path
    process: subprocess.Popen[bytes]

    def keep(self, path: Path) -> str:
        """Put a trace among its uploads; gives the upload's name."""
        return Shelf(self.data / "uploads").add_trace(path.name, path.read_bytes()).name

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.data / "jobs", 0)

    def pid_of(self, number: str) -> int:
        """Of a job's process; its group has the same number."""
        with closing(sqlite3.connect(self.data / "jobs" / "jobs.db")) as database:
            row = database.execute("select pid from jobs where id = ?", (number,)).fetchone()
        return int(row[0])

    def link(self, page: str = "replay", scenario: Scenario | None = None, **more: str) -> str:
        query = urlencode(to_query(scenario) | more if scenario else more, doseq=True)
        place = "" if page == PAGES[0] else page
        return f"{self.url}/{place}" + (f"?{query}" if query else "")


@contextlib.contextmanager
def app_process(data: Path, *options: str) -> Iterator[App]:
    """The app on a free port, until it is no longer wanted; its jobs end with it."""
    port = lasting_port()
    data.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "twinkeel", "ui", "--no-browser", "--port", str(port),
        "--data", str(data), *options,
    ]  # fmt: skip
    log = data / "app.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL
        )
    app = App(f"http://127.0.0.1:{port}", data, process)
    try:
        end_s = time.monotonic() + SERVES_S
        while not _healthy(app.url):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the app does not serve: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield app
    finally:
        jobs = app.jobs
        for job in jobs.recent(most=1000):
            if job.open:
                jobs.cancel(job.id)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(ENDS_S)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def group(pgid: int) -> list[int]:
    """Processes of a group that are there and no zombies."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            alive = process.info["status"] != psutil.STATUS_ZOMBIE
            if alive and os.getpgid(process.info["pid"]) == pgid:
                found.append(process.info["pid"])
    return found


@dataclass(frozen=True)
class Demo:
    """A controller in front of two served twins, with somebody who calls."""

    folder: Path
    admin: str
    url: str

    @property
    def token_file(self) -> Path:
        return self.folder / "data" / "admin.token"

    @property
    def token(self) -> str:
        return self.token_file.read_text(encoding="utf-8").strip()

    @property
    def key(self) -> Path:
        return self.folder / "data" / "deploy.key"

    @contextlib.contextmanager
    def traffic(self, rate: float = 8.0) -> Iterator[None]:
        """Requests all the while."""
        over = threading.Event()
        load = demo.Load(seconds=5.0, rate=rate, words_most=400, tokens_most=40)

        def work() -> None:
            while not over.is_set():
                asyncio.run(demo.send(self.url, demo.planned(load), ()))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def demo_controller(folder: Path) -> Iterator[Demo]:
    with contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        servers = [demo.twin_server(number, folder) for number in range(2)]
        for server in servers:
            stack.callback(server.stop)
            server.begin()
        for server in servers:
            _wait(server)
        profile = f",profile={demo.PROFILE}"
        gate = demo.controller([f"{server.url}{profile}" for server in servers], folder)
        stack.callback(gate.stop)
        gate.begin()
        _wait(gate)
        found = Demo(folder, demo.admin_url(folder), gate.url)
        demo.until_up(found.admin, found.token, len(servers), SERVES_S)
        yield found


def _wait(process: demo.Process) -> None:
    """Until it serves, on a machine that may have much else to do."""
    end_s = time.monotonic() + SERVES_S
    while True:
        try:
            process.wait()
            return
        except demo.DemoError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.5)


@dataclass
class Look:
    """A tab of the browser, with everything that went wrong in it."""

    page: Page
    app: App
    wrong: list[str] = field(default_factory=list)
    clicks: int = 0

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"exception: {error}"))
        self.page.on("response", self._response)
        self.page.on("requestfailed", self._failed)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not is_probe(message.location.get("url", "")):
            self.wrong.append(f"console: {message.text} ({message.location.get('url')})")

    def _response(self, answer: Response) -> None:
        if answer.status >= 400 and not is_probe(answer.url):
            self.wrong.append(f"{answer.status}: {answer.url}")

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left
            self.wrong.append(f"{request.failure}: {request.url}")

    # Going somewhere

    def open(self, page: str = "replay", scenario: Scenario | None = None, **more: str) -> Look:
        """By its link."""
        self.page.goto(self.app.link(page, scenario, **more))
        return self.idle(1 if page in POLLING else QUIET)

    def go(self, title: str) -> Look:
        """By the navigation, as people do."""
        link = self.page.get_by_test_id("stTopNavLink").filter(has_text=title).first
        link.click()
        self.page.locator("h2").filter(has_text=title).first.wait_for()
        return self.idle(1)

    def idle(self, looks: int = QUIET) -> Look:
        """Until the page has been drawn, and nothing is on its way, so many looks long."""
        self.page.wait_for_selector("[data-testid=stApp] h2", timeout=WAIT_MS)
        end_s, quiet = time.monotonic() + WAIT_MS / 1000, 0
        while quiet < looks:
            busy = self.page.evaluate(
                """() => {
                  const app = document.querySelector("[data-testid=stApp]");
                  return !app || app.dataset.testScriptState !== "notRunning"
                    || document.querySelector("[data-testid=stSkeleton]") !== null
                    || document.querySelector("[data-stale=true]") !== null
                    || [...document.querySelectorAll("[data-testid=stPlotlyChart]")].some(
                      (one) => one.offsetParent !== null && !one.querySelector(".main-svg"));
                }"""
            )
            quiet = 0 if busy else quiet + 1
            assert time.monotonic() < end_s, "the page is never idle"
            self.page.wait_for_timeout(60)
        return self

    # Finding and using

    def key(self, name: str) -> Locator:
        """Of a widget or container."""
        return self.page.locator(f".st-key-{name}").first

    def click(self, name: str) -> None:
        """The button in there."""
        self.clicks += 1
        inside = self.key(name)
        inside.wait_for(timeout=WAIT_MS)
        button = inside.locator("button").first
        button.scroll_into_view_if_needed()
        button.click(timeout=WAIT_MS)

    def choose(self, name: str, text: str) -> None:
        """A segment or radio of a control, by its text."""
        self.clicks += 1
        inside = self.key(name)
        inside.wait_for(timeout=WAIT_MS)
        inside.locator("button, label").filter(has_text=text).first.click(timeout=WAIT_MS)

    def unfold(self, button: Locator, wanted: Locator) -> None:
        """Click until it is there: what is still being laid out scrolls, and that closes menus."""
        for _ in range(5):
            button.click()
            with contextlib.suppress(PlaywrightTimeoutError):
                wanted.wait_for(timeout=MENU_MS)
                return
        wanted.wait_for(timeout=MENU_MS)

    def choose_file(self, path: Path) -> None:
        """A trace to be uploaded."""
        place = self.key("upload_trace")
        self.unfold(self.page.get_by_role("button", name="Upload a trace"), place)
        place.locator("input[type=file]").set_input_files(path)

    def play(self, timeout_ms: float = WAIT_MS) -> Look:
        """Replay the scenario, unless that has been done, until there are results."""
        any_of = (".st-key-job_replay", ".st-key-cancel_replay", ".st-key-replay_results")
        self.page.wait_for_selector(", ".join(any_of))
        if self.key("job_replay").is_visible():
            self.click("job_replay")
        self.key("replay_results").wait_for(timeout=timeout_ms)
        return self.idle()

    def fill(self, name: str, value: str, *, enter: bool = True) -> None:
        """A text or number."""
        box = self.key(name).locator("input").first
        box.fill(value, timeout=WAIT_MS)
        if enter:
            box.press("Enter")

    def fill_more(self, name: str, value: str) -> None:
        """Of the scenario's rarer fields, which are folded away."""
        box = self.key(name).locator("input").first
        if not box.is_visible():
            self.page.locator("[data-testid=stSidebar] summary").first.click()
            box.wait_for()
        self.fill(name, value)
        self.idle()

    def text(self, name: str) -> str:
        return self.key(name).inner_text(timeout=WAIT_MS)

    def alerts(self) -> list[str]:
        """What the page complains of."""
        return [each.inner_text() for each in self.page.get_by_test_id("stAlert").all()]

    def faults(self) -> list[str]:
        """Tracebacks."""
        return [each.inner_text() for each in self.page.get_by_test_id("stException").all()]

    def shot(self, name: str, upon: str = "") -> None:
        """A picture of what is seen, once Plotly has drawn; ``upon``: what stands at its top."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        if upon:
            self.key(upon).evaluate("(one) => one.scrollIntoView({block: 'start'})")
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=SHOTS / f"{name}.png")

    # Measuring

    def measured_ms(self, act: Any, effect: str) -> float:
        """From the click that ``act`` makes to the frame in which ``effect`` is true."""
        self.page.evaluate("(text) => { window.twinkeel.wait = twinkeel.until(text); }", effect)
        act()
        end = self.page.evaluate("() => window.twinkeel.wait")
        return float(end - self.page.evaluate("() => window.twinkeel.clicked"))

    def clicked_s(self) -> float:
        """When the last click was, since 1970."""
        return float(self.page.evaluate("() => window.twinkeel.clicked")) / 1000

    def first_chart_s(self) -> float:
        """From the beginning of the navigation to the first chart."""
        self.page.wait_for_function("() => window.twinkeel.first > 0", timeout=WAIT_MS)
        took: float = self.page.evaluate("() => window.twinkeel.first - performance.timeOrigin")
        return took / 1000


def is_probe(url: str) -> bool:
    path = urlsplit(url).path
    return path.endswith(PROBES) and path not in PROBES


@contextlib.contextmanager
def looking(
    browser: Browser, app: App, *, dark: bool = False, size: Any = LAPTOP
) -> Iterator[Look]:  # fmt: skip
    """A tab of somebody who was never here before."""
    context = browser.new_context(
        viewport=size, color_scheme="dark" if dark else "light", accept_downloads=True
    )
    context.set_default_timeout(WAIT_MS)
    context.add_init_script(WATCH)
    try:
        yield Look(context.new_page(), app)
    finally:
        context.close()
