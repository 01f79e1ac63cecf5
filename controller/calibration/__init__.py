"""Calibration, the live half: a designed load on a running vLLM server, and what it recorded.

- `recording.record_load`: the whole of it, into a folder with `steps.jsonl` and `client.jsonl`;
- `plan`: which requests, sized by what the server can do and by how fast it is;
- `probe`: how fast it is;
- `caller`: sends them and takes the time;
- `server`: what the server says of itself; `settings`: from which place which setting comes;
- `sources`: where its step records are found and followed;
- `cli`: what the command needs of this half; `errors`: its one error.

The other half, the fit, is in the twin; `twinkeel calibrate` joins both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.calibration.errors import CalibrationError

if TYPE_CHECKING:
    from controller.calibration.recording import record_load

__all__ = ["CalibrationError", "record_load"]


def __getattr__(name: str) -> Any:
    """The load is imported when it is used: the command is there without the extra `live`, too."""
    if name != "record_load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from controller.calibration.recording import record_load

    return record_load
