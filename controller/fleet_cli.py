"""The command ``fleet``: what runs in which slot of a running controller."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from controller.cli import (
    WIDTH,
    BadInput,
    admin_url,
    check_url,
    fetch,
    plain_errors,
    token_file_option,
    token_for,
)
from controller.config import Settings


@click.group("fleet", help="The servers that a controller runs.")
def fleet() -> None:
    """The group."""


@fleet.command("show")
@click.option(
    "--data", type=click.Path(path_type=Path), default=Path(Settings().data),
    show_default=True, metavar="FOLDER", help="The controller's data folder, if it is here.",
)  # fmt: skip
@click.option("--admin", default=None, metavar="URL", help="The controller's admin API.")
@token_file_option
@click.option("--json", "as_json", is_flag=True, help="As the controller says it.")
def show(data: Path, admin: str | None, token_file: Path | None, as_json: bool) -> None:
    """Show every slot: what runs there, in which version and state, and why."""
    from rich.console import Console

    from controller.fleet.contract import FleetAnswer
    from controller.fleet.show import table

    with plain_errors():
        admin = admin or admin_url(data)
        check_url(admin, "--admin", "URL", path=False)
        body = fetch(admin, "/fleet", token_for(token_file, data))
        if as_json:
            click.echo(body.decode())
            return
        try:
            answer = msgspec.json.decode(body, type=FleetAnswer)
        except msgspec.DecodeError as error:
            raise BadInput(f"{admin}: is no admin API of this version: {error}") from error
    console = Console()
    if not console.is_terminal:  # a file or a pipe: its 80 columns are only a guess
        console = Console(width=WIDTH)
    console.print(table(answer.fleet))
