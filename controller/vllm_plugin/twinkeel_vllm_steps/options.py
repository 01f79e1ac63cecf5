"""What the environment variables say, and where records go when they say nothing."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = "TWINKEEL_STEPS"
ROOM = "TWINKEEL_STEPS_MIB"
QUIET = "TWINKEEL_STEPS_QUIET"
OFF = "off"
DEFAULT_ROOM_MIB = 32.0


@dataclass(frozen=True)
class Options:
    """`folder` is None when nothing is to be written; `room_bytes` is for both halves together."""

    folder: Path | None
    room_bytes: int
    quiet: bool


def read_options(variables: Mapping[str, str]) -> Options:
    """Read the plug-in's variables. Raises: ValueError for a size that is none."""
    given = variables.get(FOLDER, "").strip()
    room = variables.get(ROOM, "").strip()
    try:
        room_bytes = round(float(room or DEFAULT_ROOM_MIB) * 2**20)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{ROOM} is {room!r}; give a number of MiB, for example 32") from error
    if room_bytes < 2**16:
        raise ValueError(f"{ROOM} is {room!r}; give at least 0.0625")
    if given.lower() == OFF:
        folder = None
    else:
        folder = Path(given).expanduser().absolute() if given else default_folder()
    return Options(folder, room_bytes, variables.get(QUIET, "1").strip() != "0")


def default_folder() -> Path:
    """One folder for each user in the temporary folder."""
    return Path(tempfile.gettempdir()) / f"twinkeel-steps-{os.getuid()}"


def is_private(folder: Path) -> bool:
    """Nobody else is to read what is in it."""
    return folder == default_folder()


def make_folder(folder: Path) -> None:
    """Make it if it is not there: the default one for this user only, a given one for the group,
    too. A given one that is there keeps its mode.

    Raises: OSError when it cannot be made, and when the default folder is not this user's own:
    anyone can make a folder of that name before, or a link that leads elsewhere.
    """
    own = is_private(folder)
    folder.mkdir(mode=0o700 if own else 0o750, parents=True, exist_ok=True)
    if own:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{folder} is not this user's own folder; set {FOLDER}")
        if status.st_mode & 0o077:
            folder.chmod(0o700)
