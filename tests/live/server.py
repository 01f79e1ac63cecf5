"""Real `vllm serve` processes of the tiny model, for as long as a test needs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.controller.processes import http
from tests.fleet.ports import lasting_port
from tests.live.vllm_env.ensure import environment, python_of, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_TIMEOUT_S = 900.0
"""Measured: 31 to 65 s on two quiet cores; a busy machine takes longer."""
STOP_TIMEOUT_S = 60.0
READ_S_MOST = 60.0
MODEL = "tiny"
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 256
"""A step of the default 2048 takes seconds on a slow processor, and nothing ends a step early."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_SAMPLE = re.compile(r"^(vllm:\w+)\{[^}]*\} (\S+)$", re.MULTILINE)


class ServerError(RuntimeError):
    """The server did not come up; the end of its log is in the message."""


@dataclass(frozen=True)
class Vllm:
    """A server that is up."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def samples(self) -> dict[str, float]:
        """Its metrics by name; of those with more than one label set, the sum."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=READ_S_MOST) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    @property
    def busy(self) -> int:
        """Requests that run or wait inside it."""
        samples = self.samples()
        return int(samples["vllm:num_requests_running"] + samples["vllm:num_requests_waiting"])

    def engine_pids(self) -> list[int]:
        """The engine core's process and its workers'; the HTTP server is another."""
        found = _descendants(self.process.pid)
        return [pid for pid in found if _command_of(pid).startswith(("VLLM::Engine", "VLLM::Work"))]

    def upstream(self, profile: str, **more: object) -> dict[str, object]:
        """It as a controller is told of it."""
        given = {"url": self.url, "profile": profile, "max_num_seqs": MAX_NUM_SEQS}
        return {**given, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS, **more}

    def signal_engine(self, number: signal.Signals) -> None:
        """What is behind the HTTP server gets a signal."""
        for pid in self.engine_pids():
            os.kill(pid, number)


@contextlib.contextmanager
def vllm_servers(
    count: int,
    *options: str,
    variables: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    models: Sequence[Path] = (),
    own: Sequence[Sequence[str]] = (),
) -> Iterator[list[Vllm]]:
    """Serve the tiny model as `tiny`, `count` times side by side, each engine on a core of its own
    where there is more than one server; leaves no process behind. `models` are folders of other
    ones, one for each server, under the same name; `own` are options of each beside the common
    ones."""
    environment_of = {**os.environ, **SETTINGS, **(variables or {})}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="twinkeel-vllm-") as scratch, ExitStack() as stack:
        servers: list[Vllm] = []
        for number in range(count):
            if count > 1:
                core = cores[number % len(cores)]
                environment_of["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
            port = lasting_port()  # it is half a minute until it listens there
            log = Path(scratch) / f"server{number}.log"
            model = models[number] if models else tiny_model(environment())
            given = (*options, *(own[number] if own else ()))
            process = _start(model, log, port, given, environment_of)
            stack.callback(_stop, process)
            servers.append(Vllm(f"http://127.0.0.1:{port}", process, log))
        for server in servers:
            _wait_until_healthy(server, start_timeout_s)
        yield servers


def _start(
    model: Path, log: Path, port: int, options: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    env = environment()
    command = [
        python_of(env), "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "8192", "--max-num-seqs", str(MAX_NUM_SEQS), "--enforce-eager",
        "--scheduling-policy", "priority", "--disable-uvicorn-access-log",
        "--shutdown-timeout", "15", *options,
    ]  # fmt: skip
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(variables),
            cwd=log.parent,
            start_new_session=True,  # engine core and workers are its children: stop all of them
        )


def _wait_until_healthy(server: Vllm, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(
                f"vllm serve ended with {server.process.returncode}:\n{_tail(server.log)}"
            )
        if _is_healthy(server.url):
            return
        time.sleep(0.25)
    raise ServerError(f"vllm serve was not healthy after {timeout_s:.0f} s:\n{_tail(server.log)}")


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
        os.killpg(group, signal.SIGCONT)  # what a test stopped could not end
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):  # raised when nobody is left
        os.killpg(group, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)


def _descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_descendants(int(child))]
    return found


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _tail(log: Path, lines: int = 30) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(text[-lines:])


# ---- its step times ----


def measured_profile(server: Vllm, folder: Path) -> Path:
    """A profile of the tiny model as fast as it is here and now: processors differ by a factor of
    five. The shape of the shipped profile is kept; decode and prefill are scaled on their own.
    """
    shipped = Path(__file__).parents[2] / "policy/profiles/cpu/tiny-qwen3.yaml"
    profile = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    step = {name: each["value"] for name, each in profile["step"].items()}

    def engine_ms(prompt_tokens: int, output_tokens: int, seed: int) -> tuple[float, float]:
        prompt = [(seed * 7919 + place * 31) % 3000 + 10 for place in range(prompt_tokens)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
        status, answer = http("POST", f"{server.url}/v1/completions", body)
        assert status == 200, answer
        times = json.loads(answer)["metrics"]
        return times["time_to_first_token_ms"], times["mean_itl_ms"]

    engine_ms(16, 8, 0)  # warms it up
    short = sorted(engine_ms(16, 24, seed)[1] for seed in (1, 2, 3))[1]
    long = sorted(engine_ms(2048, 2, seed)[0] for seed in (4, 5, 6))[1]
    decode = short * 1e6 / (step["decode_fixed_ns"] + step["decode_per_sequence_ns"])
    quad = 2048 * 2048 * step["prefill_per_quad_ns"]
    prefill = long * 1e6 / (step["prefill_fixed_ns"] + 2048 * step["prefill_per_token_ns"] + quad)
    for name, each in profile["step"].items():
        each["value"] = round(each["value"] * (prefill if "prefill" in name else decode), 3)
    profile["name"] = "cpu/tiny-here"
    path = folder / "tiny-here.yaml"
    path.write_text(yaml.safe_dump(profile, sort_keys=False), encoding="utf-8")
    return path
