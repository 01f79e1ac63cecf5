"""Fits a profile to the step records of a real server, and says how far it can be believed.

- `fit_profile`: from the designed load of `twinkeel calibrate` (`twin.calibrate.calibration`);
- `fit_passive`: from recorded live traffic (`twin.calibrate.passive`);
- `drift`: measured over predicted time of a recording (`twin.calibrate.drifting`);
- `write_profile`, `write_report`: the YAML file, and a page that needs no network.

What these are made of:

- `material`: a recording, and which of its steps are held out; `client`: its requests as sent;
- `contents`, `usage`: what each step held, rebuilt exactly, or estimated from the KV usage;
- `timing`: how long each step took; `overheads`: a request's time outside of steps;
- `fitting`: the fit; `checking`: its error on unseen load; `refusal`: when it is not good enough;
- `making`: from a fit to a profile; `report`: the page; `errors`: what goes wrong.
"""

from twin.calibrate.calibration import Calibration, fit_profile
from twin.calibrate.drifting import Drift, drift
from twin.calibrate.errors import CalibrationError
from twin.calibrate.making import write_profile
from twin.calibrate.passive import fit_passive
from twin.calibrate.report import write_report

__all__ = [
    "Calibration",
    "CalibrationError",
    "Drift",
    "drift",
    "fit_passive",
    "fit_profile",
    "write_profile",
    "write_report",
]
