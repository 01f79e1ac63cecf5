"""An admin API that says what a test gives it, and how a fleet with cards looks there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from controller.fleet.contract import FleetView, SlotView
from controller.gpus.view import CardView
from tests.answering import answering

if TYPE_CHECKING:
    from collections.abc import Iterator

CARD, OTHER, SLICE = "GPU-11111111-aaaa", "GPU-22222222-bbbb", "MIG-33333333-cccc"


@contextmanager
def told(answers: dict[str, object]) -> Iterator[str]:
    """Its address; paths that it has no answer to are 404. Answers may be changed meanwhile."""

    def answer(path: str) -> tuple[int, str, bytes]:
        found = answers.get(path)
        missing = {"error": {"code": "not_found", "message": path}}
        body = msgspec.json.encode(missing if found is None else found)
        return (404 if found is None else 200), "application/json", body

    with answering(answer) as url:
        yield url


def slot(replica: int, **more: Any) -> SlotView:
    """One that serves."""
    given: dict[str, Any] = {
        "replica": replica, "name": f"qwen3-8b-{replica}", "model": "qwen3-8b", "version": "v1",
        "state": "serving", "why": "", "since_s": 42.0, "standby": False,
        "url": f"http://127.0.0.1:90{replica:02d}", "domain": f"host0/card{replica}",
        "gpus": (CARD,), "pid": 0, "starts": 1,
    }  # fmt: skip
    return SlotView(**{**given, **more})


def local_fleet(**more: Any) -> FleetView:
    """Two replicas, of which one hangs, and a standby."""
    return FleetView(
        "local",
        (
            slot(0, **more),
            slot(1, state="waiting", why="hung", starts=3, gpus=(SLICE,)),
            slot(2, name="qwen3-8b-standby-0", state="warm", standby=True, gpus=()),
        ),
    )


def cards() -> tuple[CardView, ...]:
    """One that tells all, one that tells nothing and is broken, and a slice of that one."""
    return (
        CardView(
            CARD, "NVIDIA H200", memory_total_mb=143_771, memory_free_mb=23_771, pcie_rx_mb_s=1200,
            pcie_tx_mb_s=300, pcie_most_mb_s=63_000, pcie_permille=19, memory_busy_permille=412,
            nvlinks_up=17, nvlinks=18, near=((OTHER, "two sockets"),), temperature_c=61,
            slowdown_c=87, heat_permille=500, power_w=512, power_limit_w=700, power_permille=731,
            clocks=(), throttled=False, replicas=(0,), labels=("driver=580.1", "cuda=9.0"),
            ecc_corrected=3, ecc_uncorrected=0, reset_pending=False, recovery="none",
            read_ms_ago=120,
        ),
        CardView(OTHER, "NVIDIA A100", broken="xid_fatal", last_xid=79),
        CardView(
            SLICE, "NVIDIA A100", parent=OTHER, profile="3g.40gb", instance=1,
            memory_total_mb=40_192, memory_free_mb=9_000, replicas=(1,), read_ms_ago=120,
        ),
    )  # fmt: skip


def document(fleet: FleetView, here: tuple[CardView, ...] = ()) -> dict[str, object]:
    """What ``GET /fleet`` answers."""
    return {"fleet": fleet, "cards": here}
