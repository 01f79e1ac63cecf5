"""Records the forecasts of the scenario ``forecast-ramp``: run it with ``python -m``.

Seven days of history differ from the usual day at random; the day that is played comes half an hour
early or late, and is busier or quieter than any of them is meant to be. What the forecaster sees of
it are counts of a day of that shape with noise of its own: the run's requests are another draw.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from twin.forecasts import Dated, DayShape, forecasts, past_days, write_forecasts

FOLDER = Path("twin/scenarios")
USUAL = DayShape(night_rps=0.7, day_rps=3.5, rise_takes_s=300.0, tokens_per_request=24_200.0)
POINTS = {
    "usual": (0.0, 1.0),
    "early-busy": (-1800.0, 1.3),
    "early-quiet": (-1800.0, 0.7),
    "late-busy": (1800.0, 1.3),
    "late-quiet": (1800.0, 0.7),
}
"""By name: by how many seconds the day is late, and by which factor it is busier."""
LEAD_S = 4500
"""From the run's start to the beginning of the rise."""
LASTS_S = 7200
PAST_DAYS = 7
SEED = 5


def recorded(point: str) -> list[Dated]:
    """What is forecast in the run of this point, every five minutes."""
    shape = USUAL.differing(*POINTS[point])
    rng = np.random.default_rng((SEED, list(POINTS).index(point)))
    begin_s = int(shape.rise_s) - LEAD_S
    history = past_days(USUAL, PAST_DAYS, SEED)
    return forecasts(history, shape.rates(rng), begin_s, begin_s + LASTS_S)


def path_of(point: str) -> Path:
    return FOLDER / f"forecast-ramp.{point}.jsonl"


if __name__ == "__main__":
    for name in POINTS:
        write_forecasts(path_of(name), recorded(name))
