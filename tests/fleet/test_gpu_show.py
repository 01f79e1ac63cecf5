"""``twinkeel gpu show``, and what Prometheus is told, of cards as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from controller.gpu_cli import gpu
from controller.gpus.gauges import families
from controller.gpus.topology import closeness_permille
from controller.gpus.view import CardView
from controller.telemetry.metrics import Metrics, State
from tests.fleet.fakes import CUT, LARGE_SLICE, SMALL_SLICES, STATE_VARIABLE, WHOLE

if TYPE_CHECKING:
    from tests.fleet.fakes import FakeCards

SHOW = (sys.executable, "-c", "from controller.gpu_cli import gpu; gpu()", "show")


def show(*options: str) -> str:
    result = CliRunner().invoke(gpu, ["show", *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def shown() -> dict[str, dict[str, Any]]:
    return {view["uuid"]: view for view in json.loads(show("--json"))}


def test_the_table_has_the_six_dimensions_of_every_card_and_slice(cards: FakeCards) -> None:
    cards.set(WHOLE, clock_reasons=0x40, temperature_c=92, ecc_uncorrected=2, recovery_action=1)
    text = show()
    for uuid in (CUT, WHOLE, LARGE_SLICE, *SMALL_SLICES):
        assert uuid in text
    for part in (
        "free 60000 of 81559 MB", "free 39448 of 40448 MB", "3g.40gb",
        "PCIe in 6300, out 1000 MB/s (10 %)", "memory busy 40 %", "memory busy -",
        "NVLink 18 of 18 up", f"{CUT[:12]}: NVLink", "92 of 90 C, 350 of 700 W",
        "THROTTLED: too hot (hardware)", "full clocks", "driver=570.133.20", "cuda=9.0",
        "ECC 2 uncorrected, 0 corrected", "broken: the driver asks for: reset",
    ):  # fmt: skip
        assert part in text


def test_for_programs_it_is_json(cards: FakeCards) -> None:
    views = shown()
    assert list(views) == [CUT, LARGE_SLICE, *SMALL_SLICES, WHOLE]
    part = views[SMALL_SLICES[1]]
    assert (part["parent"], part["profile"], part["instance"]) == (CUT, "1g.10gb", 8)
    assert (part["memory_total_mb"], part["temperature_c"]) == (9856, 55)
    assert views[CUT]["near"] == [[WHOLE, "NVLink"]]
    assert views[WHOLE]["broken"] == ""
    cards.set(WHOLE, lost=1)
    assert WHOLE not in shown()


def test_a_card_that_cannot_tell_shows_so(cards: FakeCards) -> None:
    told = ("temperature_c", "power_mw", "nvlinks", "ecc_corrected", "ecc_uncorrected")
    cards.set(WHOLE, **dict.fromkeys(told), pcie_rx_kb_s=None, pcie_tx_kb_s=None)
    text = show()
    for part in ("PCIe in -, out - MB/s (-)", "no NVLink", "-, -", "no ECC"):
        assert part in text


def test_another_process_finds_the_cards_by_its_library_path(cards: FakeCards) -> None:
    environ = {**os.environ, **cards.environ}
    done = subprocess.run(
        [*SHOW, "--json"], env=environ, check=True, capture_output=True, text=True
    )
    assert len(json.loads(done.stdout)) == 6


def test_without_a_gpu_it_says_why_and_that_is_no_error(cards: FakeCards) -> None:
    environ = {**os.environ, **cards.environ}
    del environ[STATE_VARIABLE]
    done = subprocess.run(SHOW, env=environ, check=True, capture_output=True, text=True)
    why = "no NVIDIA driver (libnvidia-ml.so.1 is not found)"
    assert (done.stdout, done.stderr) == (f"no GPU here: {why}\n", "")


def test_a_mismatch_of_the_driver_is_told_in_one_line(cards: FakeCards) -> None:
    cards.set("system", init=18)
    assert show().count("\n") == 1
    assert "restart the machine" in show()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((True, 50), 1000), ((False, 0), 900), ((False, 10), 800), ((False, 20), 700),
        ((False, 30), 500), ((False, 40), 400), ((False, 50), 200), ((False, None), 200),
        ((False, 99), 200),
    ],
)  # fmt: skip
def test_how_near_two_cards_are(told: tuple[bool, int | None], expected: int) -> None:
    assert closeness_permille(("a", "b"), {("b", "a"): told}) == expected


def test_the_farthest_two_of_several_count() -> None:
    pairs = {("a", "b"): (True, 10), ("a", "c"): (False, 10), ("b", "c"): (False, 40)}
    assert closeness_permille(("a", "b", "c"), pairs) == 400
    assert closeness_permille(("a", "b"), pairs) == 1000
    assert closeness_permille(("a",), pairs) == 1000
    assert closeness_permille(("a", "d"), pairs) == 200


class _Nothing:
    def read(self) -> State:
        return State(0)


def test_prometheus_is_told_of_each_card() -> None:
    views = (
        CardView("GPU-1", "H100", memory_free_mb=2, temperature_c=55, throttled=True),
        CardView("MIG-1", "H100", "GPU-1", "1g.10gb", broken="Xid 95"),
    )
    metrics = Metrics(_Nothing())
    metrics.also(lambda: families(views))
    text = metrics.render()[0].decode()
    card = '{name="H100",parent="",profile="",uuid="GPU-1"}'
    part = '{name="H100",parent="GPU-1",profile="1g.10gb",uuid="MIG-1"}'
    for line in (
        f"twinkeel_gpu_memory_free_bytes{card} 2.097152e+06",
        f"twinkeel_gpu_temperature_celsius{card} 55.0",
        f"twinkeel_gpu_throttled{card} 1.0",
        f"twinkeel_gpu_broken{card} 0.0",
        f"twinkeel_gpu_broken{part} 1.0",
    ):
        assert line in text
    assert f"twinkeel_gpu_temperature_celsius{part}" not in text
