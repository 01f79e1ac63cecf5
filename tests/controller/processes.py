"""Controllers and served twins as processes of their own, and what they leave behind.

``python -m tests.controller.processes SETTINGS.json READY.json`` is one controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from controller.config import Settings
from policy.audit import replay
from policy.log import read_segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from policy.log import Record

ROOT = Path(__file__).parents[2]
START_S_MOST = 60.0
STOP_S_MOST = 60.0
PATIENT = """schema: 1
name: patient
discipline: tiered
health: {first_grace_ms: 30000, stall_ms: 30000, slow_slack_ms: 30000}
classes: {p0_deadline_ms: 60000, p1_deadline_ms: 60000, p2_deadline_ms: 60000}
"""
"""A policy for a machine whose processors have other work: nothing is late, silent or slow."""
PROFILE = "h100-sxm/qwen3-8b"
MODEL = "qwen3-8b"
EMBEDDING_PROFILE = "h100-sxm/qwen3-embedding-0.6b"
UNWANTED = ("Traceback", "was never awaited", "Task exception was never retrieved", "Unclosed ")
"""What the output of a healthy process never holds."""


def patient(folder: Path, more: str = "") -> str:
    """A file with that policy, and what else it is to say; its path."""
    path = folder / "patient.yaml"
    path.write_text(PATIENT + more)
    return str(path)


class ProcessError(RuntimeError):
    """A process did not do what it was started for; the end of its output is in the message."""


# ---- HTTP without a loop ----


def http(
    method: str, url: str, document: object = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """One request; error statuses are answers, too."""
    data = document if isinstance(document, bytes) else None
    if document is not None and data is None:
        data = json.dumps(document).encode()
    head = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data=data, headers=head, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def eventually(what: str, true: Any, within_s: float = 30.0, every_s: float = 0.02) -> Any:
    """Wait until ``true()`` is; returns what it gave.

    Raises:
        AssertionError: it was not within that time.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(every_s)


# ---- served twins ----


@dataclass
class Twin:
    """A replica: ``twinkeel twin serve`` in a process."""

    process: subprocess.Popen[bytes]
    url: str
    output: Path

    def fault(self, kind: str, **how: Any) -> None:
        """From now on it does that."""
        status, body = http("POST", f"{self.url}/twin/fault", {"kind": kind, **how})
        assert status == 200, body

    def heal(self) -> None:
        """No faults any more."""
        status, body = http("DELETE", f"{self.url}/twin/fault")
        assert status in (200, 204), body

    def state(self) -> dict[str, int]:
        """Requests running, waiting, aborted, finished, and how many came."""
        state: dict[str, int] = json.loads(http("GET", f"{self.url}/twin/state")[1])
        return state

    @property
    def busy(self) -> int:
        state = self.state()
        return state["running"] + state["waiting"]


@contextlib.contextmanager
def twin_process(*options: str, profile: str = PROFILE) -> Iterator[Twin]:
    """One served twin on a free port."""
    serve = ["twinkeel", "twin", "serve", "--profile", profile, "--port", "0", *options]
    with serving(serve) as twin:
        yield twin


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[Twin]:
    """A module, with its arguments, that serves a twin and says where as ``twin serve`` does."""
    with tempfile.TemporaryDirectory(prefix="twinkeel-twin-") as scratch:
        output = Path(scratch) / "twin.out"
        process = _start([sys.executable, "-m", *command], output)
        try:
            url = _announced(process, output)
            yield Twin(process, url, output)
        finally:
            stop(process)


def _announced(process: subprocess.Popen[bytes], output: Path) -> str:
    def line() -> str:
        if process.poll() is not None:
            raise ProcessError(f"ended with {process.returncode}:\n{tail(output)}")
        found = [at for at in output.read_text().splitlines() if at.startswith("twin serving ")]
        return found[0].split()[-1].rstrip("/") if found else ""

    url: str = eventually("a served twin's address", line, START_S_MOST)
    return url


# ---- controllers ----


@dataclass
class Controller:
    """A controller in a process, with its data folder."""

    settings: Settings
    folder: Path
    process: subprocess.Popen[bytes]
    url: str = ""
    admin_url: str = ""
    admin_token: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.folder / "controller.out"

    @property
    def data(self) -> Path:
        return self.settings.data_path

    def admin(
        self, method: str, path: str, document: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Ask the admin API, with its token."""
        return http(
            method, f"{self.admin_url}{path}", document,
            {"Authorization": f"Bearer {self.admin_token}", **(headers or {})},
        )  # fmt: skip

    def put_policy(self, text: str) -> tuple[int, bytes]:
        """Put a policy in force at once."""
        return self.admin("PUT", "/policy", text.encode(), {"x-twinkeel-override": "a test"})

    def status(self) -> dict[str, Any]:
        status, body = self.admin("GET", "/status")
        assert status == 200, body
        document: dict[str, Any] = json.loads(body)
        return document

    def metrics(self) -> str:
        status, body = self.admin("GET", "/metrics")
        assert status == 200
        return body.decode()

    def wait_up(self, replicas: int) -> None:
        """Until that many servers are up."""

        def up() -> bool:
            self.check_alive()
            return sum(each["up"] for each in self.status()["replicas"]) >= replicas

        eventually(f"{replicas} servers are up", up, START_S_MOST, 0.05)

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise ProcessError(f"ended with {self.process.returncode}:\n{tail(self.output)}")

    def term(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S_MOST)

    def stop(self) -> int:
        """End it as an orderly supervisor does; its exit status."""
        return stop(self.process)

    # What it leaves behind

    def records(self) -> list[Record]:
        """All that the policy was told, and what it decided."""
        return records(self.data)

    def audit(self) -> int:
        """Replay the decision log; how many records it has."""
        return audit(self.data)

    def complaints(self) -> list[str]:
        """Lines of its output that no healthy process writes."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [line for line in lines if any(word in line for word in UNWANTED)]


def segments(data: Path) -> list[bytes]:
    """The decision log in a data folder, in order."""
    found = (data / "log").glob("decisions.*.log")
    return [each.read_bytes() for each in sorted(found, key=lambda at: int(at.name.split(".")[1]))]


def records(data: Path) -> list[Record]:
    """All that the policy was told, and what it decided."""
    return [record for each in segments(data) for record in read_segment(each).records]


def audit(data: Path) -> int:
    """Replay the decision log; how many records it has.

    Raises:
        AssertionError: replay decides otherwise.
    """
    found = segments(data)
    assert found, f"no decision log in {data}"
    difference = replay(found)
    assert difference is None, f"replay decides otherwise than the log says: {difference}"
    return sum(1 for each in found for _ in read_segment(each).records)


def settings_for(urls: Sequence[Any], folder: Path, **how: Any) -> Settings:
    """Settings for tests: free ports, quick to notice, quick to stop. An upstream is a URL, or a
    mapping of its parts; ``how`` is what differs."""
    given: dict[str, Any] = {
        "upstreams": [{"url": url} if isinstance(url, str) else url for url in urls],
        "port": 0,
        "admin_port": 0,
        "data": str(folder / "data"),
        "scrape_s": 1.0,
        "probe_s": 0.5,
        "unready_s": 0.0,
        "drain_s": 10.0,
    }
    return msgspec.convert({**given, **how}, Settings)


def start_controller(
    settings: Settings, folder: Path, module: str = "tests.controller.processes"
) -> Controller:
    """A controller in a process of its own, once it listens; again with the same settings, it goes
    on from its data folder. ``module`` is what is run."""
    folder.mkdir(parents=True, exist_ok=True)
    given, ready = folder / "settings.json", folder / "ready.json"
    given.write_bytes(msgspec.json.encode(settings))
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, str(given), str(ready)]
    controller = Controller(settings, folder, _start(command, folder / "controller.out"))

    def listens() -> bool:
        controller.check_alive()
        return ready.exists()

    try:
        eventually("the controller listens", listens, START_S_MOST)
    except BaseException:
        stop(controller.process)
        raise
    said = json.loads(ready.read_text())
    controller.url, controller.admin_url = said["url"].rstrip("/"), said["admin_url"].rstrip("/")
    controller.admin_token = said["admin_token"]
    return controller


@dataclass
class Controllers:
    """Starts controllers for one test, and sees to their end."""

    folder: Path
    started: list[Controller] = field(default_factory=list)
    records: int = 0
    """Of decision logs whose replay gave the same, byte for byte."""
    module: str = "tests.controller.processes"
    """What is run."""

    def __call__(self, urls: Sequence[Any], *, wait: bool = True, **how: Any) -> Controller:
        """Start one in front of ``urls``, and wait until all of these are up."""
        folder = self.folder / f"controller{len(self.started)}"
        return self.again(settings_for(urls, folder, **how), folder, wait=wait)

    def again(self, settings: Settings, folder: Path, *, wait: bool = True) -> Controller:
        """Start one, on a data folder that may have been used before."""
        controller = start_controller(settings, folder, self.module)
        self.started.append(controller)
        if wait:
            controller.wait_up(len(settings.upstreams))
        return controller

    def close(self) -> None:
        """Stop all, replay their logs, and look for complaints in their output."""
        for controller in self.started:
            stop(controller.process)
        for folder in dict.fromkeys(controller.folder for controller in self.started):
            last = [each for each in self.started if each.folder == folder][-1]
            complaints = last.complaints()
            assert not complaints, "\n".join([*complaints[:5], tail(last.output)])
            self.records += last.audit()


# ---- both ----


def _start(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as sink:
        return subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ask it to end, then make it; its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S_MOST)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(STOP_S_MOST)


def tail(output: Path, lines: int = 30) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-lines:])


def main() -> None:
    """Serve until told to stop; the second argument is written once it listens."""
    import uvloop

    from controller.serve import serve

    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)
    ready = Path(sys.argv[2])

    def listening(running: Any) -> None:
        making = ready.with_suffix(".making")
        said = {
            "url": running.url, "admin_url": running.admin_url, "admin_token": running.admin_token
        }  # fmt: skip
        making.write_text(json.dumps(said))
        making.rename(ready)

    uvloop.run(serve(settings, listening))


if __name__ == "__main__":
    main()
