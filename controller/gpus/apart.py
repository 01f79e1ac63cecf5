"""Reads one card in a process of its own.

A card is reset only while nobody has it open, and NVML holds what it has looked at until it is
closed. So a card that is broken is looked at from outside, for a moment, and whether that process
comes back does not matter to the others.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import msgspec

from controller.gpus.nvml import GoneError, NoGpuError, Nvml, Reading

ANSWER_S_MOST = 10.0
"""Of the process, most of which is spent on its own start."""


async def read_apart(bus: str) -> Reading | None:
    """What the card at this PCI address says; None: it says that it is gone.

    Raises:
        TimeoutError: neither was to be had: that says nothing of the card.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, bus,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(ANSWER_S_MOST):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()  # not waited for: in a call to a sick card it may not even be killed
    if not told:
        raise TimeoutError(f"the process that reads {bus} ended with {process.returncode}")
    return msgspec.json.decode(told, type=Reading | None)


def main(bus: str) -> None:
    reading: Reading | None = None
    with suppress(NoGpuError, GoneError):
        nvml = Nvml([bus])
        try:
            for card in nvml.cards:
                reading, _ = nvml.read(card)[0]
        finally:
            nvml.close()
    sys.stdout.buffer.write(msgspec.json.encode(reading))


if __name__ == "__main__":
    main(sys.argv[1])
