"""Jobs of kinds that only tests have, and the app without a browser."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest
import streamlit
from streamlit.testing.v1 import AppTest

from dashboards import admin
from dashboards.jobs import Jobs
from dashboards.parts import job_panel
from dashboards.state import VARIABLE, Settings
from dashboards.words import FILE
from tests.ui.controllers import controller_at

if TYPE_CHECKING:
    import http.client
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.controller.processes import Controller

KINDS = "tests.ui.kinds"
DRAWN_S = 300
"""Until a page is drawn, on a machine that may have much else to do."""
ANSWERS_S = 60.0
"""Until a controller answers there."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the app's own patience is for, a person before it, is not there: a page that looks at a
    controller waits for it, and a click is for the panel that is drawn next, however late."""
    connection = admin._connection

    def patient(
        scheme: str, host: str, port: int | None, timeout_s: float
    ) -> http.client.HTTPConnection:
        return connection(scheme, host, port, max(ANSWERS_S, timeout_s))

    monkeypatch.setattr(admin, "_connection", patient)
    monkeypatch.setattr(job_panel, "ASKED_S", float(DRAWN_S))


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[..., Jobs]]:
    """Opens the same store, each time anew; nothing of it runs on after the test."""
    folder = tmp_path / "jobs"

    def opened(most: int = 2) -> Jobs:
        return Jobs(folder, most, KINDS)

    yield opened
    jobs = opened(0)
    for job in jobs.recent(most=1000):
        jobs.cancel(job.id)


@pytest.fixture
def jobs(stores: Callable[..., Jobs]) -> Jobs:
    """Two at a time."""
    return stores()


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AppTest]]:
    """Opens a session of the app, with data of its own; ``query`` is what its link says."""
    settings = Settings(str(tmp_path / "ui"))
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(settings).decode())
    streamlit.cache_resource.clear()
    streamlit.cache_data.clear()

    def opened(page: str = "", query: dict[str, list[str]] | None = None) -> AppTest:
        session = AppTest.from_file(str(FILE.with_name("app.py")), default_timeout=DRAWN_S)
        for name, values in (query or {}).items():
            session.query_params[name] = values
        session.run()
        return session.switch_page(f"app_pages/{page}.py").run() if page else session

    yield opened
    jobs = Jobs(tmp_path / "ui" / "jobs", 0)
    for job in jobs.recent(most=1000):
        jobs.cancel(job.id)
    streamlit.cache_resource.clear()
    streamlit.cache_data.clear()


@pytest.fixture
def idle(app: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """An app whose jobs wait for good."""
    settings = msgspec.json.decode(os.environ[VARIABLE], type=Settings)
    still = msgspec.structs.replace(settings, jobs=0)
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(still).decode())
    streamlit.cache_resource.clear()


@pytest.fixture(scope="session")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """One in front of a served twin."""
    with controller_at(tmp_path_factory.mktemp("controller")) as started:
        yield started


@pytest.fixture
def knows(app: object, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the app know controllers by name, and token files."""

    def known(controllers: dict[str, str], token_files: dict[str, str] | None = None) -> None:
        settings = msgspec.json.decode(os.environ[VARIABLE], type=Settings)
        with_them = msgspec.structs.replace(
            settings, controllers=controllers, token_files=token_files or {}
        )
        monkeypatch.setenv(VARIABLE, msgspec.json.encode(with_them).decode())
        streamlit.cache_resource.clear()

    return known
