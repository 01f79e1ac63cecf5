"""A real `vllm serve` of the tiny model on this machine, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.live.vllm_env.ensure import environment, python_of, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_TIMEOUT_S = 180.0
"""Measured: 31 to 37 s on two quiet cores; a busy machine takes longer."""
STOP_TIMEOUT_S = 20.0
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


class ServerError(RuntimeError):
    """The server did not come up; the end of its log is in the message."""


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def vllm_server(*options: str, start_timeout_s: float = START_TIMEOUT_S) -> Iterator[str]:
    """Serve the tiny model as `tiny`; gives the base URL, and leaves no process behind."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="twinkeel-vllm-") as scratch:
        log = Path(scratch) / "server.log"
        process = _start(log, port, options)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, url, log, start_timeout_s)
            yield url
        finally:
            _stop(process)


def _start(log: Path, port: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    env = environment()
    command = [
        python_of(env), "-m", "vllm.entrypoints.cli.main", "serve", str(tiny_model(env)),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "8192", "--max-num-seqs", "64", "--enforce-eager",
        "--scheduling-policy", "priority", "--disable-uvicorn-access-log",
        "--shutdown-timeout", "15", *options,
    ]  # fmt: skip
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **SETTINGS},
            cwd=log.parent,
            start_new_session=True,  # engine core and workers are its children: stop all of them
        )


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"vllm serve ended with {process.returncode}:\n{_tail(log)}")
        if _is_healthy(url):
            return
        time.sleep(0.25)
    raise ServerError(f"vllm serve was not healthy after {timeout_s:.0f} s:\n{_tail(log)}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:  # urllib's errors are such, too
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the whole session to end, then make it."""
    group = process.pid
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):  # raised when nobody is left
        os.killpg(group, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)


def _tail(log: Path, lines: int = 30) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(text[-lines:])
