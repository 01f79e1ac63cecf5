"""The loop, closed: record live traffic, recalibrate, tune, validate, deploy, compare.

Two servers with an H100's timing, and a controller in front of them under a policy with thresholds
that somebody guessed badly. What passes is recorded; from then on everything is a command that
anyone can give, and is printed. At the end stands the trail: which trace and profile the policy was
tuned on, what it was held to, who put it in force, and that the decision log is what it decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from controller import demo
from policy.audit import replay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from controller.demo import Told

PROFILE = demo.PROFILE
BEFORE = """\
schema: 1
name: guessed
discipline: tiered
inflight:
  sequences_permille: 10
  kv_permille: 10  # two or three requests a server: far too few
tiers:
  turbo_max_tflop: 5
"""
SPACE = """\
schema: 1
objectives: [goodput, p0_ttft_p95_s]
space:
  inflight.sequences_permille: {low: 10, high: 2000, log: true}
  inflight.kv_permille: {low: 10, high: 1000, log: true}
  tiers.turbo_max_tflop: {low: 1, high: 200, log: true}
  tiers.lend_wait_ms: {low: 50, high: 800}
"""
LOAD = demo.Load(seconds=90.0, rate=12.0, tokens_most=600)
DEADLINES_MS = {"P0": 1500.0, "P1": 4000.0, "P2": 10000.0}
"""Of the policies' classes."""
RECORDED_S = 120.0
"""Until the recorder has merged its first trace."""
HEADROOM = "8"
"""Times the recorded load, for which the thresholds are tuned: there will be days like that."""
STAGES = "shadow:20,canary=20:40:100,full:20"
"""Short ones: a demonstration has minutes, not days."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What callers saw of a load."""

    requests: int
    good: int
    """Answered; of streams, with their first token within the class's deadline."""
    p0_ttft_ms_p95: float

    @property
    def good_pct(self) -> float:
        return 100 * self.good / self.requests


class Step(msgspec.Struct, frozen=True):
    """One link of the trail."""

    what: str
    proof: str


def seen(told: Sequence[Told]) -> Seen:
    """The figures of what callers were told."""
    good = sum(
        one.outcome in ("answered", "degraded")
        and (one.ttft_ms < 0 or one.ttft_ms <= DEADLINES_MS[one.ask.sla])
        for one in told
    )
    ttft_ms = sorted(one.ttft_ms for one in told if one.ask.sla == "P0" and one.ttft_ms >= 0)
    p95_ms = ttft_ms[-(-len(ttft_ms) * 95 // 100) - 1] if ttft_ms else float("inf")
    return Seen(len(told), good, p95_ms)


class Loop:
    """Servers, a controller, and the folder that everything goes to."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.trail: list[Step] = []
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._put("before.yaml", BEFORE)
        self._put("space.yaml", SPACE)
        servers = [self._server(number) for number in range(2)]
        for server in servers:
            stack.callback(server.stop)
            server.begin()
        for server in servers:
            server.wait()
        self.gate = self._controller([server.url for server in servers])
        stack.callback(self.gate.stop)
        self.gate.start()
        token = (self.data / "admin.token").read_text(encoding="utf-8").strip()
        self.admin = demo.admin_url(folder)
        demo.until_up(self.admin, token, len(servers), demo.START_S)

    def _put(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def _server(self, number: int) -> demo.Process:
        command = [
            sys.executable, "-m", "twin.serve", "--profile", PROFILE, "--port", "0",
            "--steps", str(self.folder / f"steps-{number}"),
        ]  # fmt: skip
        log = self.folder / f"server-{number}.txt"
        return demo.Process(f"server {number}", command, log, "twin serving ")

    def _controller(self, upstreams: Sequence[str]) -> demo.Process:
        command = [
            sys.executable, "-m", "twinkeel", "serve", "--port", "0", "--admin-port", "0",
            "--policy", str(self.folder / "before.yaml"), "--data", str(self.data),
            "--unready-s", "0", "--scrape-s", "1",
        ]  # fmt: skip
        for upstream in upstreams:
            command += ["--upstream", f"{upstream},profile={PROFILE}"]
        log = self.folder / "controller.txt"
        return demo.Process("the controller", command, log, "twinkeel serving ")

    def send(self, load: demo.Load) -> Seen:
        """The load, as its callers saw it."""
        return seen(asyncio.run(demo.send(self.gate.url, demo.planned(load), ())))

    @contextlib.contextmanager
    def sending(self, load: demo.Load) -> Iterator[None]:
        """The load again and again, meanwhile."""
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                self.send(load)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def run(self, *words: str, allowed: Sequence[int] = (0,)) -> str:
        """One command of ours, shown with what it prints."""
        print(f"\n$ twinkeel {shlex.join(words)}", flush=True)
        command = [sys.executable, "-m", "twinkeel", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="", flush=True)
        if done.returncode not in allowed:
            raise demo.DemoError(f"{shlex.join(words[:2])} ended with {done.returncode}")
        return done.stdout

    def note(self, what: str, proof: str) -> None:
        self.trail.append(Step(what, proof))

    def digest(self, path: Path) -> str:
        return f"{path} sha256 {sha256(path.read_bytes()).hexdigest()[:16]}"

    # The links of the loop

    def record(self) -> Path:
        """What passed so far, as the controller has written it."""
        trace = self.data / "trace" / "trace.parquet"
        end_s = time.monotonic() + RECORDED_S
        while not trace.exists():
            if time.monotonic() > end_s:
                raise demo.DemoError(f"{trace} is not there after {RECORDED_S:.0f} s")
            time.sleep(1.0)
        kept = self.folder / "recorded.parquet"
        shutil.copyfile(trace, kept)
        self.note("recorded live", self.digest(kept))
        return kept

    def recalibrate(self) -> str:
        """A profile from the servers' own step records; the old one where that is refused."""
        profile = self.folder / "recalibrated.yaml"
        self.run(
            "calibrate", "--from", str(self.folder / "steps-0"), "--base", PROFILE,
            "--out", str(profile), allowed=(0, 1),
        )  # fmt: skip
        if not profile.exists():
            self.note("recalibrated", f"refused, so {PROFILE} stays")
            return PROFILE
        self.note("recalibrated", self.digest(profile))
        return str(profile)

    def tune(self, trace: Path, profile: str, trials: int) -> Path:
        folder = self.folder / "tuned"
        self.run(
            "tune", str(self.folder / "space.yaml"), "--trace", str(trace),
            "--policy", str(self.folder / "before.yaml"), "--profile", profile, "--replicas", "2",
            "--scale", HEADROOM, "--trials", str(trials), "--out", str(folder),
        )  # fmt: skip
        best = folder / "best.yaml"
        self.note("tuned", self.digest(best))
        return best

    def validate(self, policy: Path, trace: Path, profile: str) -> Path:
        evidence = self.folder / "evidence.json"
        self.run(
            "validate", str(policy), "--against", str(self.folder / "before.yaml"),
            "--trace", str(trace), "--profile", profile, "--replicas", "2", "--quick",
            "--key", str(self.data / "deploy.key"), "--out", str(evidence),
        )  # fmt: skip
        self.note("validated", self.digest(evidence))
        return evidence

    def deploy(self, policy: Path, evidence: Path) -> None:
        self.run(
            "deploy", str(policy), "--evidence", str(evidence), "--stages", STAGES, "--watch",
            "--data", str(self.data),
        )  # fmt: skip
        self.run("policy", "history", "--data", str(self.data))
        document = json.loads(self.run("policy", "history", "--json", "--data", str(self.data)))
        last = document[0]
        self.note("deployed", f"deployment {last['id']}: {last['stage']}, {last['hash'][:12]}")

    def audit(self) -> None:
        """The decision log, the canary included, is what the policies decide."""
        code = self.gate.stop()
        log = self.data / "log"
        segments = sorted(log.glob("decisions.*.log"), key=lambda path: int(path.suffixes[0][1:]))
        difference = replay(path.read_bytes() for path in segments)
        if code or difference is not None:
            raise demo.DemoError(f"the controller ended with {code}, the log differs: {difference}")
        self.note("audited", f"{len(segments)} segments of {log} replay byte for byte")


def play(folder: Path, trials: int = 60) -> tuple[Seen, Seen, list[Step]]:
    """The whole loop: what callers saw before, what they saw after, and the trail."""
    with contextlib.ExitStack() as stack:
        loop = Loop(folder, stack)
        print(
            f"recording {LOAD.seconds:.0f} s of traffic under badly guessed thresholds", flush=True
        )
        before = loop.send(LOAD)
        with loop.sending(LOAD):
            trace = loop.record()
        profile = loop.recalibrate()
        tuned = loop.tune(trace, profile, trials)
        evidence = loop.validate(tuned, trace, profile)
        with loop.sending(LOAD):
            loop.deploy(tuned, evidence)
        after = loop.send(LOAD)
        loop.audit()
        return before, after, loop.trail
