"""The job ``forecast_worth``: GPU-hours of a stretch with what the job ``forecast`` has said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dashboards.work.forecast import TOLD, write_result
from twin.forecast_worth import OURS, Told, compared, never_so_many, steepest, worth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Tell = Callable[[float | None, str], None]

RESULT = "worth.json"


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request."""

    forecast: str
    """The job whose forecasts are played."""
    seed: int


def run(request: dict[str, Any], folder: Path, tell: Tell) -> None:
    asked = msgspec.convert(request, Asked)
    path = folder.parent / asked.forecast / TOLD
    if not path.is_file():
        raise ValueError("the forecasts are gone from the disk: forecast again")
    with np.load(path) as kept:
        load = Told(
            float(kept["window_s"]), tuple(int(each) for each in kept["horizons"]), kept["mean"],
            kept["origins"], kept[OURS],
        )  # fmt: skip
    tell(0.0, "drawing the requests")
    stretch = steepest(load)
    curves = worth(load, asked.seed, tell)
    level, hours = compared(curves)
    write_result(folder / RESULT, {
        "curves": {
            name: [point._asdict() for point in points] for name, points in curves.items()
        },
        "level": level, "hours": hours, "at_most": never_so_many(curves, level),
        "begin_day": stretch.begin * load.window_s / 86_400,
        "hours_long": (stretch.end - stretch.begin) * load.window_s / 3600,
        "offered": max(point.offered for points in curves.values() for point in points),
    })  # fmt: skip
