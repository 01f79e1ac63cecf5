"""The process of one job: ``python -m dashboards.jobs.worker STORE JOB MOST PACKAGE``."""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from dashboards.jobs.store import PATIENCE_S, Jobs, JobsError

NICE = 19
"""The pages come first."""
EVERY_S = 0.2
"""How often the store is told, at most."""
OURS = ("controller", "dashboards", "policy", "traces", "twin")


def main(store: Path, number: str, most: int, package: str) -> int:
    """The exit code.

    Args:
        most: jobs at the same time, of which this process begins the next when it is done.
        package: where the module of the kind is.
    """
    jobs = Jobs(store, most, package)
    last_s = 0.0

    def tell(share: float | None, said: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= EVERY_S:
            last_s = time.monotonic()
            jobs.tell(number, share, said)

    try:
        job = jobs.get(number)
        if job.kind not in PATIENCE_S:  # what takes something back is not to be held up
            _stand_back()
        import_module(f"{package}.{job.kind}").run(job.request, job.folder, tell)
    except (ValueError, OSError, JobsError) as error:
        # All errors of ours that a user can mend are ValueErrors, with a sentence.
        traceback.print_exc()
        jobs.end(number, str(error) or type(error).__name__)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        jobs.end(number, _missing(error.name or str(error), package))
    except BaseException as error:
        traceback.print_exc()
        jobs.end(number, f"a fault of ours: {type(error).__name__}: {error}")
        jobs.look()
        return 1
    else:
        jobs.end(number)
    jobs.look()
    return 0


def _stand_back() -> None:
    """Let everything else go first."""
    os.nice(max(0, NICE - os.nice(0)))  # one that a worker began has it already
    # Linux may share out its cores by session, as it does on desktops: then a process's own
    # niceness counts among those of its session alone, and that of the session is set here.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")


def _missing(module: str, package: str) -> str:
    """Of ours: a fault; of others: an extra that was left out when this was installed."""
    if module.partition(".")[0] in (*OURS, package.partition(".")[0]):
        return f"a fault of ours: there is no module {module}"
    return (
        f"{module} is not installed: it is in one of the extras, as in"
        " pip install 'twinkeel[ui,forecast]'"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
