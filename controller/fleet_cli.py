"""The command ``fleet``: what runs in which slot of a running controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from controller.cli import (
    admin_url,
    fetch,
    other_version,
    plain_errors,
    token_for,
    where_options,
    wide_console,
)

if TYPE_CHECKING:
    from pathlib import Path


@click.group("fleet", help="The servers that a controller runs.")
def fleet() -> None:
    """The group."""


@fleet.command("show")
@where_options
@click.option("--json", "as_json", is_flag=True, help="As the controller says it.")
def show(data: Path, admin: str | None, token_file: Path | None, as_json: bool) -> None:
    """Show every slot: what runs there, in which version and state, and why."""
    from controller.fleet.contract import FleetAnswer
    from controller.fleet.show import table

    with plain_errors():
        admin = admin_url(data, admin)
        body = fetch(admin, "/fleet", token_for(token_file, data))
        if as_json:
            click.echo(body.decode())
            return
        try:
            answer = msgspec.json.decode(body, type=FleetAnswer)
        except msgspec.DecodeError as error:
            raise other_version(admin, error) from error
    wide_console().print(table(answer.fleet))
