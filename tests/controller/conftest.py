"""Two served twins for each worker, controllers that are audited when a test ends, and somebody who
listens to alerts."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from controller.telemetry import spans, webhook
from tests.controller.processes import Controllers, Twin, twin_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def served_twins() -> Iterator[list[Twin]]:
    """Two replicas of an 8-billion-parameter model, as on H100s."""
    with ExitStack() as stack:
        yield [stack.enter_context(twin_process()) for _ in range(2)]


@pytest.fixture
def twins(served_twins: list[Twin]) -> Iterator[list[Twin]]:
    """The same, healthy before and after."""
    yield served_twins
    for twin in served_twins:
        twin.heal()


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    """Starts controllers. When the test ends, their logs are replayed: the decisions are the same,
    byte for byte."""
    started = Controllers(tmp_path)
    yield started
    started.close()


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Somebody who listens, and what was told."""
    told: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/alerts", told
        server.shutdown()
        thread.join(60)


@pytest.fixture
def patient_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end a controller waits for who takes its spans and alerts, however busy they are."""
    monkeypatch.setattr(spans, "CLOSE_S", 60.0)
    monkeypatch.setattr(spans, "EXPORT_S", 60.0)
    monkeypatch.setattr(webhook, "CLOSE_S", 60.0)
