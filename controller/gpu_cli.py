"""The command ``gpu``: this machine's cards, as placement sees them."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations
from typing import TYPE_CHECKING

import click
import msgspec

from controller.partition_cli import partition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.gpus.nvml import Nvml
    from controller.gpus.view import CardView

WIDTH = 220
"""Columns where no terminal says how many it has."""


@click.group("gpu", help="This machine's GPUs and MIG slices.")
def gpu() -> None:
    """The group."""


gpu.add_command(partition)


@gpu.command("show")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(as_json: bool) -> None:
    """Print the six dimensions of placement for every card and slice.

    Needs no controller. Without a GPU it says why there is none, and that is no error.
    """
    try:
        views, why = _look()
    except ModuleNotFoundError as error:
        if error.name != "pynvml":
            raise
        views, why = (), "pynvml is not installed, which is in the extra `live`"
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(views), indent=2).decode())
    elif not views:
        click.echo(f"no GPU here: {why}")
    else:
        _print(views)


def _look() -> tuple[tuple[CardView, ...], str]:
    """What there is; and if there is nothing, why."""
    from controller.gpus.nvml import NoGpuError, Nvml

    try:
        nvml = Nvml()
    except NoGpuError as error:
        return (), str(error)
    try:
        return tuple(_views(nvml)), ""
    finally:
        nvml.close()


def _views(nvml: Nvml) -> Iterator[CardView]:
    from controller.gpus.nvml import GoneError
    from controller.gpus.view import view_of

    pairs: dict[tuple[str, str], tuple[bool, int | None]] = {}
    for one, other in combinations(nvml.cards, 2):
        with suppress(GoneError):
            pairs[one.uuid, other.uuid] = nvml.near(one, other)
    for card in nvml.cards:
        try:
            readings = nvml.read(card)
        except GoneError as error:
            yield view_of(card, None, None, uuid=card.uuid, pairs=pairs, broken=str(error))
            continue
        for reading, part in readings:
            yield view_of(
                card, part, reading, uuid=reading.uuid, pairs=pairs, broken=readings[0][0].wrong
            )


def _print(views: tuple[CardView, ...]) -> None:
    from rich.console import Console

    from controller.gpus.view import table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=WIDTH, highlight=False)
    console.print(table(views))
