"""The quick starts of ``docker compose``: their commands, settings and fleet file are taken by the
programs that get them. No container is built here, and compose itself does not read the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml

from controller.fleet.config import FleetFile
from twinkeel import main as twinkeel

DEPLOY = Path(__file__).parents[2] / "controller" / "deploy"
FILES = ("compose.yaml", "compose.fleet.yaml")


def compose(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What the command would be called with.

    Raises:
        click.UsageError: it would refuse them.
    """
    command: click.Command = twinkeel
    while isinstance(command, click.Group):
        context = click.Context(command)
        found = command.get_command(context, arguments[0])
        assert found is not None, f"there is no command {arguments[0]}"
        command, arguments = found, arguments[1:]
    with command.make_context(str(command.name), list(arguments)) as made:
        return dict(made.params)


@pytest.mark.parametrize("name", FILES)
def test_commands_are_taken_and_name_what_there_is(name: str) -> None:
    document = compose(name)
    ours = {key: each for key, each in document["services"].items() if each["image"] == "twinkeel"}
    assert "controller" in ours
    for service in ours.values():
        parsed(service["command"])
        for mount in service.get("configs", ()):
            assert mount["source"] in document["configs"]
        for secret in service.get("secrets", ()):
            assert secret in document["secrets"]
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in document["volumes"]
    hosts = parsed(ours["controller"]["command"])
    for upstream in hosts.get("upstream") or ():
        assert str(upstream).partition("//")[2].partition(":")[0] in document["services"]


def test_a_command_that_would_be_refused_is_found() -> None:
    with pytest.raises(click.UsageError):
        parsed(["serve", "--flet=fleet.yaml"])


def test_the_fleet_file_is_one() -> None:
    document = compose("compose.fleet.yaml")
    raw = yaml.safe_load(document["configs"]["fleet"]["content"])
    (model,) = msgspec.convert(raw, FleetFile).models.values()
    (arguments,) = [
        [part.format(weights=model.versions[model.version], model="m", version="v1",
                     host="127.0.0.1", port=8000) for part in model.command]
    ]  # fmt: skip
    assert arguments[0] == "twinkeel"
    assert parsed(arguments[1:])["profile"]
    mounted = {each["target"] for each in document["services"]["controller"]["configs"]}
    assert f"--fleet={mounted.pop()}" in document["services"]["controller"]["command"]


def test_the_image_has_all_that_is_imported() -> None:
    """Packages that the command imports are copied, and not left out."""
    copied = (DEPLOY / "Dockerfile").read_text()
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    lines = (DEPLOY.parents[1] / "twinkeel.py").read_text().splitlines()
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith("from ")}
    for package in {"policy", "traces"} | imported - {"__future__", "pathlib", "typing"}:
        assert f"COPY {package} {package}" in copied
        assert f"!{package}" in kept
