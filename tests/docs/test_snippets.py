"""Everything that README.md and docs/ show is taken by the programs that it is for.

Blocks of `bash` and `python` run, page by page, against simulated servers and a real controller;
`yaml` is loaded by what reads it, `json` is parsed, and every `twinkeel` command line, also one in
running text or in a block that cannot run here, is parsed by the real command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
import yaml

from tests.docs import snippets
from tests.docs.snippets import PAGES, ROOT, Block
from tests.redis_server import redis_server
from twinkeel import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPT_S_MOST = 240
"""A page's blocks take at most so long, also on a busy machine."""
PLACEHOLDERS = {"NUMBER": "17", "N": "3", "KIND": "engine-kill"}
"""What running text says for a value."""
BIN = str(Path(sys.executable).parent)
SCENARIO_HEAD = {
    "schema": 1,
    "name": "part",
    "about": "A part of one.",
    "duration_s": 600,
    "traffic": {"open": [{"trace": "shipped:demo"}]},
    "fleet": [{"profile": "h100-sxm/qwen3-8b", "count": 2}],
    "policy": "stable",
}
"""Where a page shows only a part of a scenario."""


def shown(kind: str) -> list[Any]:
    return [
        pytest.param(page, block, id=f"{page}:{block.line}")
        for page in PAGES
        for block in snippets.blocks(page)
        if block.kind == kind
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_parses(page: str) -> None:
    wrong = []
    for command in snippets.commands(page, "twinkeel"):
        words = command.words
        if command.mention:
            words = tuple(PLACEHOLDERS.get(word, word) for word in words)
        try:
            snippets.parse(main, words, command.mention)
        except click.ClickException as error:
            wrong.append(f"{page}:{command.line}: {' '.join(words)}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "no-such-command", "replay", "replay shipped:demo --no-such-option", "replay a b",
        "scenario no-such-command", "twin serve --port many", "explain log seventeen",
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_found(line: str) -> None:
    with pytest.raises(click.ClickException):
        snippets.parse(main, line.split(), mention=False)


def test_a_failing_line_is_found(tmp_path: Path) -> None:
    code, said = run(f"{snippets.SHELL}\necho one\nfalse\necho two\n", tmp_path, {**os.environ})
    assert (code, said) == (1, "one\n")


@pytest.mark.parametrize("page", PAGES)
def test_every_target_is_in_the_makefile(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w./-]+):", makefile, re.M))
    variables = set(re.findall(r"\$[({](?:or \$\()?(\w+)", makefile))
    for command in snippets.commands(page, "make"):
        for word in command.words:
            name, is_variable, _ = word.partition("=")
            known = variables if is_variable else targets
            assert name in known, f"{page}:{command.line}: make {' '.join(command.words)}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    for block in snippets.blocks(page):
        assert block.kind in snippets.KINDS, f"{page}:{block.line}: ```{block.kind}"


@pytest.mark.parametrize(
    "change", snippets.CHANGES, ids=lambda change: f"{change.page} {change.says}"
)
def test_a_change_is_of_something_that_stands_there(change: snippets.Change) -> None:
    pages = PAGES if change.page == snippets.EVERYWHERE else [change.page]
    assert any(change.says in (ROOT / page).read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize(("page", "block"), shown("json"))
def test_json_is_json(page: str, block: Block) -> None:
    del page
    json.loads(block.text)


@pytest.mark.parametrize(("page", "block"), shown("yaml"))
def test_yaml_is_taken_by_its_loader(page: str, block: Block, tmp_path: Path) -> None:
    path = tmp_path / (name_of(block) or "block.yaml")
    path.write_text(block.text, encoding="utf-8")
    for named in re.findall(r"file: ([\w.-]+\.jsonl)", block.text):
        (tmp_path / named).write_text("", encoding="utf-8")
    loader_of(page, yaml.safe_load(block.text))(path)


def name_of(block: Block) -> str:
    """A block that begins with `# NAME.yaml` is that file."""
    found = re.match(r"# ([\w-]+\.yaml)\b", block.text)
    return found[1] if found else ""


def loader_of(page: str, document: dict[str, Any]) -> Callable[[Path], object]:
    """By its keys."""
    from controller.fleet.config import load_fleet
    from controller.gateway.keys import load_keys
    from policy.files import load_chain, load_policy
    from traces.readers.mapped import load_map
    from twin.plan.inputs import load_prices, load_slo
    from twin.scenario import load_scenario
    from twin.tune.space import load_space

    def part_of_a_scenario(path: Path) -> object:
        part = yaml.safe_load(path.read_text(encoding="utf-8"))
        path.write_text(yaml.safe_dump({**SCENARIO_HEAD, **part}), encoding="utf-8")
        return load_scenario(path)

    loaders: tuple[tuple[str, Callable[[Path], object]], ...] = (
        ("space", lambda path: load_space(path, load_policy("stable"))),
        ("traffic", load_scenario),
        ("events", part_of_a_scenario),
        ("faults", part_of_a_scenario),
        ("chain_timeout", load_chain),
        ("models", load_fleet),
        ("columns", load_map),
        ("confidence_percent", load_slo),
        ("hours_per_month", load_prices),
        ("keys", load_keys),
        ("schema", load_policy),
    )
    for key, loader in loaders:
        if key in document:
            return loader
    raise AssertionError(f"{page}: nothing here reads a document of {sorted(document)}")


@pytest.mark.parametrize("page", [page for page in PAGES if snippets.script(page)])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    for block in snippets.blocks(page):
        if block.kind == "yaml" and name_of(block):
            (tmp_path / name_of(block)).write_text(block.text, encoding="utf-8")
    text = snippets.script(page)
    with contextlib.ExitStack() as stack:
        env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "UI_PORT": str(free_port()),
        }
        if snippets.needs_servers(text):
            env["UPSTREAM"] = stack.enter_context(twin_server())
        if "$UPSTREAM_2" in text:
            env["UPSTREAM_2"] = stack.enter_context(twin_server())
        if "$REDIS" in text:
            env["REDIS"] = stack.enter_context(redis_server()).url
        code, said = run(text, tmp_path, env)
    assert code == 0, said[-4000:]


def run(script: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output. It and all that it started are ended when its time is over."""
    with subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=SCRIPT_S_MOST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            said += f"\nnot done after {SCRIPT_S_MOST} s"
    return process.returncode, said


@contextlib.contextmanager
def twin_server() -> Iterator[str]:
    """A simulated server, for as long as it is needed; its URL."""
    command = [f"{BIN}/twinkeel", "twin", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
