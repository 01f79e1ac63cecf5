"""Weights that are a folder, and a served twin that behaves as the folder it was started with.

    python -m tests.fleet.loaded FOLDER [twin's options]

What stands in the folder's ``twin.json`` is what loading it comes to: a profile, the version that
it turns out to be, a fault from the beginning, how often it can be loaded, and the exit code that
it ends with from then on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROFILE = "h100-sxm/qwen3-8b"
COMMAND = (
    sys.executable, "-m", "tests.fleet.loaded", "{weights}", "--model", "{model}",
    "--host", "{host}", "--port", "{port}",
)  # fmt: skip


def weights(folder: Path, version: str, *, profile: str = PROFILE, fault: object = None,
            code: int = -1, loads: int = 0, size: int = 1 << 20) -> str:  # fmt: skip
    """Put weights of so many bytes into a folder (as a file with holes); its path.

    Args:
        code: what loading them ends with, after ``loads`` times that went well; -1: it goes well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    told = {"profile": profile, "version": version, "fault": fault,
            "code": code, "loads": loads}  # fmt: skip
    (folder / "twin.json").write_text(json.dumps(told))
    return str(folder)


def main() -> None:
    """Load them, and be that server."""
    folder, *options = sys.argv[1:]
    said = Path(folder, "twin.json")
    told = json.loads(said.read_text())
    if told["loads"] > 0:
        said.write_text(json.dumps({**told, "loads": told["loads"] - 1}))
    elif told["code"] >= 0:
        print(f"{folder}: the weights cannot be read", file=sys.stderr, flush=True)
        sys.exit(told["code"])
    fault = ["--fault", json.dumps(told["fault"])] if told["fault"] else []
    command = [
        sys.executable, "-m", "twinkeel", "twin", "serve", "--profile", told["profile"],
        "--version", told["version"], *fault, *options,
    ]  # fmt: skip
    os.execv(sys.executable, command)  # the same process, as vLLM's own command is


if __name__ == "__main__":
    main()
