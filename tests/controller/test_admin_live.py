"""The admin API, keys and command line of real controllers, in processes of their own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from controller.cli import keys as keys_command
from controller.demo import Load, run
from controller.store.folder import alone_in
from policy.audit import replay
from policy.log import read_segment
from policy.parameters import from_canonical
from tests.controller.processes import MODEL, ROOT, eventually, http, patient, segments
from tests.controller.wire import relay

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.controller.processes import Controllers, Twin

BODY = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
SECRET = "the-patient-is-Ferdinand"


def chat(url: str, **headers: str) -> tuple[int, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return http("POST", f"{url}/v1/chat/completions", BODY, named)


def test_a_policy_put_under_load_rules_is_logged_and_outlives_a_kill(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    controller = controllers([twin.url for twin in twins], policy=patient(tmp_path))
    answers: list[int] = []
    callers = [
        threading.Thread(target=lambda: answers.extend(chat(controller.url)[0] for _ in range(8)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    text = controller.admin("GET", "/policy")[1].decode()
    changed = re.sub(r"turbo_promise_ms: \d+", "turbo_promise_ms: 777", text)
    status, told = controller.put_policy(changed)
    assert status == 200, told
    for caller in callers:
        caller.join()
    assert answers == [200] * 32
    promise = {row["tier"]: row["promise_ms"] for row in controller.status()["tiers"]}
    assert promise["turbo"] == 777
    controller.kill()
    again = controllers.again(controller.settings, controller.folder)
    assert again.status()["policy"]["hash"] == json.loads(told)["hash"]
    assert chat(again.url)[0] == 200
    history = json.loads(again.admin("GET", "/policies")[1])["policies"]
    assert history[0]["by"] == "admin"
    assert again.stop() == 0
    header = read_segment(segments(again.data)[-1]).header
    assert from_canonical(header.policy).tiers.turbo_promise_ms == 777


def test_segments_can_be_fetched_and_replayed_while_it_serves(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twins[0].url])
    for _ in range(3):
        assert chat(controller.url)[0] == 200

    def logged() -> bytes:
        names = json.loads(controller.admin("GET", "/log")[1])["segments"]
        status, data = controller.admin("GET", f"/log/{names[-1]['name']}")
        assert status == 200
        return data if b"settled" in data else b""

    data: bytes = eventually("an outcome in the log", logged)
    assert replay([data]) is None


def test_drain_finishes_what_is_open_and_ends_well(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    controller = controllers(
        [twins[0].url], unready_s=5.0, drain_s=60.0, policy=patient(tmp_path)
    )  # fmt: skip
    twins[0].fault("latency", delay_s=8.0)
    answers: list[int] = []
    caller = threading.Thread(target=lambda: answers.append(chat(controller.url)[0]))
    caller.start()
    eventually("it is open", lambda: controller.status()["open_requests"])
    status, told = controller.admin("POST", "/drain")
    assert (status, json.loads(told)) == (202, {"status": "draining", "open": 1})
    assert http("GET", f"{controller.url}/ready")[0] == 503
    assert http("GET", f"{controller.admin_url}/ready")[0] == 503
    assert http("GET", f"{controller.admin_url}/live")[0] == 200
    assert controller.status()["state"] == "draining"
    caller.join()
    assert answers == [200]
    assert controller.process.wait(60) == 0


def test_keys_are_asked_for_and_never_passed_on(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    words = ["add", "support", "--sla", "P0", "--file", str(file)]
    key = CliRunner().invoke(keys_command, words).stdout.strip()
    with relay(twins[0].url) as wire:
        controller = controllers([wire.url], keys=str(file))
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {key}"}):
            status, body = chat(controller.url, **given)
            assert status == 401
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert http("GET", f"{controller.url}/v1/models")[0] == 401
        for path in ("/health", "/ready", "/openapi.json"):
            assert http("GET", f"{controller.url}{path}")[0] == 200
        status, _ = chat(controller.url, authorization=f"Bearer {key}")
        assert status == 200
        asked = [one for one, _ in wire.exchanges("/v1/chat/completions")]
        assert len(asked) == 1  # the refused ones never reached it
        named = {name.lower() for name in asked[0].headers}
        assert "authorization" not in named
        # P0, by its key: Turbo
        eventually("it is counted", lambda: controller.status()["tiers"][0]["calls"] == 1)
        assert controller.stop() == 0
    kept = [controller.output, *(path for path in controller.data.rglob("*") if path.is_file())]
    for file in kept:
        assert key.encode() not in file.read_bytes(), file


def test_without_keys_the_callers_header_goes_to_the_server(
    twins: list[Twin], controllers: Controllers
) -> None:
    with relay(twins[0].url) as wire:
        controller = controllers([wire.url])
        assert chat(controller.url, authorization="Bearer for-the-server")[0] == 200
        asked, _ = wire.exchanges("/v1/chat/completions")[0]
        sent = {name.lower(): value for name, value in asked.headers.items()}
        assert sent["authorization"] == "Bearer for-the-server"
        assert controller.stop() == 0


def test_no_text_of_a_prompt_is_kept_or_told(twins: list[Twin], controllers: Controllers) -> None:
    controller = controllers([twins[0].url])
    body = {**BODY, "messages": [{"role": "user", "content": f"{SECRET} " * 100}], "user": "u"}
    assert http("POST", f"{controller.url}/v1/chat/completions", body)[0] == 200
    told = [
        controller.admin("GET", path)[1]
        for path in ("/status", "/metrics", "/alerts", "/policies", "/log/decisions.0.log")
    ]
    assert controller.stop() == 0
    kept = [path.read_bytes() for path in controller.data.rglob("*") if path.is_file()]
    assert len(kept) > 2
    assert not any(SECRET.encode() in data for data in (*told, *kept))


# The command


@contextmanager
def command(tmp_path: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "twinkeel", "serve", "--admin-port", "0", "--unready-s", "0",
         "--data", str(tmp_path / "data"), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        cwd=ROOT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_command_says_what_it_serves_where_and_ends_well(
    twins: list[Twin], tmp_path: Path
) -> None:
    with command(tmp_path, "--upstream", twins[0].url, "--port", "0") as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(4)]
        url = said[0].removeprefix("twinkeel serving ").strip()
        assert "policy stable (tiered), 1 server" in said[1]
        assert str(tmp_path / "data" / "admin.token") in said[2]
        assert http("GET", f"{url}/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "")
        told = errors.splitlines()
        assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO ", line) for line in told), (
            told
        )
        assert any("stopping: 0 requests are open" in line for line in told)
    private = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    assert len(private) > 5
    assert not [path for path in private if path.stat().st_mode & 0o077]


def one_line(tmp_path: Path, *words: str) -> str:
    """What the command says, which cannot serve: one line, and exit code 2."""
    upstream = ("--upstream", "http://127.0.0.1:9")
    port = () if "--port" in words else ("--port", "0")
    with command(tmp_path, *upstream, *port, *words) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    (line,) = errors.splitlines()
    return line


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_that_is_taken_is_one_line(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"{option} {port}: cannot listen on 127.0.0.1" in one_line(tmp_path, option, port)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trace.key", "short", "5 bytes are no key"),
        ("fingerprint.key", "", "0 bytes are no key"),
        ("admin.token", "hunter", "6 characters"),
        ("controller.sqlite", "no database" * 100, "move it away"),
    ],
)
def test_a_damaged_data_folder_is_one_line(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / name).write_text(content)
    (data / name).chmod(0o600)
    line = one_line(tmp_path)
    assert str(data / name) in line
    assert said in line
    assert "hunter" not in line


def test_a_second_controller_on_a_data_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with alone_in(tmp_path / "data"):
        line = one_line(tmp_path)
    assert "another controller uses this data folder" in line
    assert "--data" in line


def test_a_second_signal_cuts_off_what_is_open(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    controller = controllers([twins[0].url], drain_s=120.0, policy=patient(tmp_path))
    twins[0].fault("latency", delay_s=60.0)
    caller = threading.Thread(target=lambda: _broken_off(controller.url))
    caller.start()
    eventually("it is open", lambda: controller.status()["open_requests"])
    controller.process.send_signal(signal.SIGINT)
    eventually("it has heard that", lambda: controller.status()["state"] == "draining")
    with pytest.raises(subprocess.TimeoutExpired):
        controller.process.wait(0.7)
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(20) == 0
    caller.join()
    assert "told again: 1 open requests are cut off" in controller.output.read_text()


def _broken_off(url: str) -> None:
    with suppress(OSError, HTTPException):
        chat(url)


def test_the_demo_shows_a_fault_and_proves_its_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(load=Load(seconds=4.0, rate=8.0), folder=tmp_path / "demo") == 0
    shown = capfd.readouterr().out
    for said in ("is killed, and comes back", "TTFT p50", "the same decisions byte for byte"):
        assert said in shown
