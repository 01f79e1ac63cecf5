"""The process of one job: ``python -m dashboards.jobs.worker STORE JOB``."""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from dashboards.jobs.store import Jobs, JobsError

NICE = 10
"""The pages come first."""
EVERY_S = 0.2
"""How often the store is told, at most."""


def main(store: Path, number: str) -> int:
    """The exit code."""
    os.nice(NICE)
    jobs = Jobs(store)
    last_s = 0.0

    def tell(share: float | None, said: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= EVERY_S:
            last_s = time.monotonic()
            jobs.tell(number, share, said)

    try:
        job = jobs.get(number)
        import_module(f"dashboards.work.{job.kind}").run(job.request, job.folder, tell)
    except (ValueError, OSError, JobsError) as error:
        # All errors of ours that a user can mend are ValueErrors, with a sentence.
        traceback.print_exc()
        jobs.end(number, str(error) or type(error).__name__)
    except BaseException as error:
        traceback.print_exc()
        jobs.end(number, f"a fault of ours: {type(error).__name__}: {error}")
        jobs.look()
        return 1
    else:
        jobs.end(number)
    jobs.look()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
