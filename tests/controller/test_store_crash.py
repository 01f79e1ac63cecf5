"""What a crash and a full disk leave behind, with real processes and a real limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from controller.store.log import segments
from controller.store.recovery import recover
from policy.audit import replay
from policy.log import read_segment
from policy.service import Service

if TYPE_CHECKING:
    from pathlib import Path

COMMON = """
import os, sys, time
from pathlib import Path
from controller.store.log import LiveLog
from policy.compose import build_policy
from policy.decisions import BreakerMoved, Dispatch, Settled
from policy.events import Failed, Finished, FirstToken
from tests.policy_support import MS, arrived, parameters, up

PARAMS = parameters(
    breakers={"rules": [{"name": "errors", "by": ["model"], "kinds": ["http_5xx"],
                         "consecutive_least": 3, "consecutive_ms": 0, "open_ms": 3600000,
                         "open_most_ms": 3600000}], "actions": []},
    retries={"tries_most": 1},
)
folder = Path(sys.argv[1])
policy = build_policy(PARAMS)
now_ns = 0

def feed(event):
    global now_ns
    now_ns += MS
    decisions = tuple(policy.step(now_ns, event))
    log.append(now_ns, event, decisions)
    return decisions

def one(request, model="m", fails=False):
    for decision in feed(arrived(request, model=model, user=f"u{request}")):
        if isinstance(decision, Dispatch):
            if fails:
                return feed(Failed(request, decision.replica, "http_5xx"))
            feed(FirstToken(request, decision.replica))
            return feed(Finished(request, decision.replica, 250, 0, 9))
    return ()
"""

CRASH = (
    COMMON
    + """
log = LiveLog(folder, policy, PARAMS, 0, on_trouble=print, segment_bytes=50_000)
feed(up(0)); feed(up(1, domain="other"))
for request in range(3):
    moved = one(request, "bad", fails=True)
assert any(isinstance(decision, BreakerMoved) for decision in moved)
request = 3
while True:
    for _ in range(100):
        one(request); request += 1
    log.flush()
    (folder / "state.tmp").write_bytes(policy.snapshot())
    while log.waiting_bytes:
        time.sleep(0.0005)
    os.rename(folder / "state.tmp", folder / f"state.{now_ns}")
    if len(sys.argv) > 2 and now_ns > int(sys.argv[2]):
        one(request); request += 1  # appended, never flushed
        os._exit(9)
"""
)

FULL = (
    COMMON
    + """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, resource.RLIM_INFINITY))
troubles = []
log = LiveLog(folder, policy, PARAMS, 0, on_trouble=troubles.append, segment_bytes=10**9,
              retry_s=0.02)
feed(up(0))
for request in range(4000):
    one(request)
    if request % 20 == 0:
        log.flush()
        time.sleep(0.0005)
assert 1 <= len(troubles) < 10 and "File too large" in troubles[0], troubles
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
end = time.monotonic() + 10
while log.trouble and time.monotonic() < end:
    log.flush()
    time.sleep(0.005)
assert not log.trouble, log.trouble
for request in range(4000, 4500):
    one(request)
log.close()
(folder / "state").write_bytes(policy.snapshot())
print(log.dropped_bytes)
"""
)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def last_state(folder: Path) -> tuple[int, bytes]:
    """The newest one that was surely on the disk when the process died."""
    at_ns = max(int(path.name.removeprefix("state.")) for path in folder.glob("state.[0-9]*"))
    return at_ns, (folder / f"state.{at_ns}").read_bytes()


def test_an_exit_without_warning_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    ended = run(CRASH, str(tmp_path), "1500000000")
    assert ended.returncode == 9, ended.stderr
    at_ns, snapshot = last_state(tmp_path)
    data = [path.read_bytes() for _, path in segments(tmp_path)]
    assert len(data) > 1, "segments were begun on the way"
    assert replay(data) is None
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == snapshot
    assert recovered.last_ns == at_ns
    assert recovered.open_requests == 0
    assert isinstance(recovered.policy, Service)
    breakers = recovered.policy.mechanisms["breakers"]
    assert breakers.open_keys() == ["errors model=bad"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("after_s", [0.8, 1.1])
def test_kill_9_at_any_moment_leaves_a_log_that_audits(tmp_path: Path, after_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", CRASH, str(tmp_path)])
    try:
        end_s = time.monotonic() + 30
        while not list(tmp_path.glob("state.[0-9]*")):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        time.sleep(after_s)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert replay(path.read_bytes() for _, path in segments(tmp_path)) is None
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.note == ""
    at_ns, _ = last_state(tmp_path)
    assert recovered.last_ns >= at_ns


def test_a_file_that_cannot_grow_costs_records_but_nothing_else(tmp_path: Path) -> None:
    ended = run(FULL, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
    data = [path.read_bytes() for _, path in segments(tmp_path)]
    assert len(data) > 1
    assert len(data[0]) == 120_000, "torn where the disk was full"
    assert sum(1 for part in data for _ in read_segment(part).records) > 100
    assert replay(data) is None
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == (tmp_path / "state").read_bytes()
