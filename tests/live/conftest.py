"""One pair of real vLLM servers for the whole session, and the figures that its tests measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.controller.processes import Controllers
from tests.figures import Figure, write_figures
from tests.live.collector import Collector, collector
from tests.live.server import MAX_NUM_BATCHED_TOKENS, Vllm, measured_profile, vllm_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

FIGURES = Path("build/figures/live.json")
OPTIONS = (
    "--enable-per-request-metrics", "--enable-prompt-tokens-details",
    "--num-gpu-blocks-override", "512",
    "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--enable-logging-iteration-details",
)  # fmt: skip


@dataclass
class Ledger:
    """What the session's tests found out."""

    figures: list[Figure] = field(default_factory=list)
    controllers: int = 0
    """Whose decision logs were to be replayed."""
    equal: int = 0
    """Of these, those that gave the same decisions, byte for byte."""
    records: int = 0

    def add(self, name: str, value: float, unit: str, goal: str, how: str) -> Figure:
        """Note a figure, in the place of what an earlier try of the test has found; it is written
        when the session ends."""
        figure = Figure(name, round(value, 3), unit, goal, how)
        self.figures = [*(each for each in self.figures if each.name != name), figure]
        return figure


@pytest.fixture(scope="session")
def ledger() -> Iterator[Ledger]:
    """Figures; those of the last run are written to build/figures/live.json."""
    kept = Ledger()
    yield kept
    if kept.controllers:
        kept.add(
            "audit_equal_pct", 100 * kept.equal / kept.controllers, "%", "= 100",
            f"decision logs of {kept.controllers} controllers, {kept.records} records, replayed",
        )  # fmt: skip
    if kept.figures:
        write_figures(FIGURES, kept.figures)


@pytest.fixture(scope="session")
def spans() -> Iterator[Collector]:
    """An OpenTelemetry collector that vLLM and controllers export to."""
    with collector() as kept:
        yield kept


@pytest.fixture(scope="session")
def vllm(spans: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    """Two real vLLM servers of the tiny model."""
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "300",
        "TWINKEEL_STEPS": str(tmp_path_factory.mktemp("steps")),
        "TWINKEEL_STEPS_QUIET": "0",  # the text log is there, too: it is held against the records
    }
    endpoint = f"{spans.url}/v1/traces"
    with vllm_servers(
        2, *OPTIONS, "--otlp-traces-endpoint", endpoint, variables=variables
    ) as servers:
        yield servers


@pytest.fixture(scope="session")
def profile(vllm: list[Vllm], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Step times of the tiny model as they are on this machine."""
    return str(measured_profile(vllm[0], tmp_path_factory.mktemp("profile")))


@pytest.fixture(scope="session")
def patient(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The policy stable, for a machine that may be busy with something else for seconds: what is
    tested with it is not how soon a server is taken for dead or a request for late."""
    path = tmp_path_factory.mktemp("policy") / "patient.yaml"
    path.write_text(
        "schema: 1\nname: patient\ndiscipline: tiered\n"
        "health:\n  first_grace_ms: 30000\n  stall_ms: 30000\n  slow_slack_ms: 30000\n"
        "classes:\n  p0_deadline_ms: 60000\n  p1_deadline_ms: 60000\n  p2_deadline_ms: 60000\n"
    )
    return str(path)


@pytest.fixture
def controllers(tmp_path: Path, ledger: Ledger) -> Iterator[Controllers]:
    """Starts controllers; when the test ends, their decision logs are replayed."""
    started = Controllers(tmp_path)
    yield started
    logs = len({controller.folder for controller in started.started})
    ledger.controllers += logs
    started.close()
    ledger.equal += logs
    ledger.records += started.records
