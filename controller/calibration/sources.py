"""Where a server's step records are found, and how they are followed while it works."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from controller.calibration.errors import CalibrationError
from traces.schema import TraceError
from traces.steps import RequestRow, ServerSettings, StepTail, read_iteration_log, steps_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traces.steps import Header, StepRow

DETAILS = "start vLLM with --enable-logging-iteration-details"
PLUGIN = (
    "install the plug-in into vLLM's environment (pip install ./controller/vllm_plugin, in "
    "Twinkeel's repository) and start vLLM with TWINKEEL_STEPS=FOLDER, or write vLLM's output to a "
    "file and give it with --log"
)


class Source(Protocol):
    """Step records as they come."""

    tells_requests: bool
    """It has a row for each request."""
    name: str

    @property
    def header(self) -> Header | None:
        """What the records say of the server; None: nothing (yet)."""

    def drain(self) -> list[StepRow | RequestRow]:
        """The rows since the last call."""

    def close(self) -> None: ...


class FileSource:
    """A file that the plug-in writes."""

    tells_requests = True

    def __init__(self, path: Path) -> None:
        self._tail = StepTail(path)
        self.name = str(path)

    @property
    def header(self) -> Header | None:
        return self._tail.header

    def drain(self) -> list[StepRow | RequestRow]:
        """
        Raises:
            CalibrationError: a broken file.
        """
        try:
            return self._tail.read_new()
        except TraceError as error:
            raise CalibrationError(str(error)) from error

    def close(self) -> None:
        self._tail.close()


class LogSource:
    """The text that vLLM prints, in a file."""

    tells_requests = False
    header: Header | None = None

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CalibrationError: it cannot be read.
        """
        self._path = path
        self.name = str(path)
        try:
            self._offset = path.stat().st_size
        except OSError as error:
            raise CalibrationError(f"{path}: {error.strerror}") from error

    def drain(self) -> list[StepRow | RequestRow]:
        """The rows of whole lines. The log has whole seconds only, so the last row is taken to be
        of now and the others lie before it by as much as the log says."""
        with self._path.open("rb") as log:
            if log.seek(0, os.SEEK_END) < self._offset:  # cut off, and begun anew
                self._offset = 0
            log.seek(self._offset)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        if b"Iteration(" not in whole:
            return []
        with tempfile.NamedTemporaryFile(suffix=".log") as part:
            part.write(whole)
            part.flush()
            try:
                steps = read_iteration_log(Path(part.name), ServerSettings()).steps
            except TraceError:  # the word stood there, but no such line
                return []
        shift_ns = time.monotonic_ns() - steps[-1].at_ns
        return [row._replace(at_ns=row.at_ns + shift_ns) for row in steps]

    def close(self) -> None:
        """Nothing is held open."""


def candidates(
    announced: Sequence[Path], steps: Path | None, log: Path | None
) -> list[FileSource] | list[LogSource]:
    """What may be this server's records; what is there already is passed over.

    Args:
        announced: files that the server itself names.
        steps: a file, or the folder of such files, where the caller names one.
        log: vLLM's text log.

    Raises:
        CalibrationError: there are none.
    """
    if log is not None:
        if steps is not None:
            raise CalibrationError("--steps and --log exclude each other: give one of them")
        return [LogSource(log)]
    if steps is not None:
        return _opened(_named(steps))
    if announced:
        if len(announced) > 1:
            raise CalibrationError(
                f"{len(announced)} engines write step records behind this address: calibrate a "
                "server with one engine (--data-parallel-size 1, --api-server-count 1)"
            )
        if not os.path.isfile(announced[0]):
            raise CalibrationError(
                f"the server writes its step records to {announced[0]}, which cannot be read here: "
                "run the command on the server's machine; if vLLM is in a container, let it write "
                "to a volume and give the file with --steps"
            )
        return _opened(announced[:1])
    raise CalibrationError(f"the server writes no step records: {PLUGIN}")


def _opened(paths: Sequence[Path]) -> list[FileSource]:
    """Those that can be read, at their ends.

    Raises:
        CalibrationError: none can.
    """
    found: list[FileSource] = []
    why: CalibrationError | None = None
    for path in paths:
        source = FileSource(path)
        try:
            source.drain()
        except CalibrationError as error:
            if source.header is None:  # another version's, or another user's
                source.close()
                why = why or error
                continue
            source.drain()  # a broken row from before
        found.append(source)
    if not found and why is not None:
        raise why
    return found


def _named(steps: Path) -> list[Path]:
    if steps.is_dir():
        found = sorted(steps.glob("steps-*.jsonl"))
        if not found:
            try:
                steps_file(steps)
            except TraceError as error:  # it says what to do
                raise CalibrationError(str(error)) from error
        return found
    if not steps.is_file():
        raise CalibrationError(f"{steps}: there is no such file")
    return [steps]


def is_ours(row: RequestRow) -> bool:
    """It is of the designed load: vLLM puts the kind of request before the caller's id."""
    return (row.id or "").removeprefix("cmpl-").startswith("cal.")
