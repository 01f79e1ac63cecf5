"""``twinkeel ui``: what is wrong is one line; else it serves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from dashboards import cli
from tests.controller.processes import eventually, tail
from tests.fleet.ports import lasting_port
from twinkeel import main

if TYPE_CHECKING:
    from pathlib import Path

SERVES_S = 240.0


@pytest.fixture(autouse=True)
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' process does not become Streamlit."""

    def become(*words: object) -> None:
        raise AssertionError(words)

    monkeypatch.setattr("os.execve", become)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--admin", "127.0.0.1:8081"), "--admin 127.0.0.1:8081: write a URL"),
        (("--admin", "east=ftp://x"), "--admin ftp://x: write a URL"),
        (("--token-file", "/no/file"), "there is no --admin that it is for"),
        (
            ("--admin", "http://127.0.0.1:8081", "--token-file", "/no/file"),
            "--token-file /no/file: no such file",
        ),
        (("--admin", "http://x:1", "--token-file", "west=/no"), "there is no --admin"),
        (("--port", "0"), "--port"),
        (("--jobs", "0"), "--jobs"),
        (("--key", "/no/key"), "--key"),
    ],
)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["ui", *words])
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_two_controllers_of_one_name_are_refused() -> None:
    words = ["ui", "--admin", "a=http://x:1", "--admin", "a=http://y:1"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "a stands twice" in result.output


def test_without_streamlit_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["ui"])
    assert result.exit_code == 2
    assert "pip install 'twinkeel[ui]'" in result.output


def test_it_serves(tmp_path: Path) -> None:
    port = lasting_port()
    out = tmp_path / "out.txt"
    command = [sys.executable, "-m", "twinkeel", "ui", "--no-browser", "--port", str(port)]
    with out.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--data", str(tmp_path / "data")], stdout=sink, stderr=sink
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            assert process.poll() is None, tail(out)
            try:
                with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5) as answer:
                    return bool(answer.read() == b"ok")
            except OSError:
                return False

        eventually("it serves", healthy, SERVES_S)
        with urllib.request.urlopen(f"{url}/tune?seed=3", timeout=60) as answer:
            assert re.search(r"<title>\w+</title>", answer.read().decode())
        eventually("it has said where", lambda: f"{url}\n" in out.read_text(), SERVES_S)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    text = out.read_text()
    assert "Traceback" not in text
    assert "External URL" not in text, "it asks nobody else who we are"
    assert "0.0.0.0" not in text
