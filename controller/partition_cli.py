"""`twinkeel gpu partition`: cut a card into MIG slices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from controller.cli import BadInput, plain_errors
from controller.fleet.config import FleetFile
from controller.fleet.memory import needed_mb
from controller.gpus.mig import Demand, MigError, assign, parse_layout, plan_of, told
from policy.files import FileError, decode, nearest, read_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.gpus.mig import Card, Plan, Profile

HELP = """Cut a card into MIG slices, each for one process, which then fails alone.

Without --yes it only says what it would do. It changes nothing while a process computes on the
card, and nothing that is as the layout wants it already: the same command again is harmless, and
goes on where an earlier one stopped. It needs root.

\b
A layout is profile names of NVML's, with how many of each:
  twinkeel gpu partition --card GPU-5c8a... --layout 3g.40gb+3x1g.10gb
  twinkeel gpu partition --card GPU-5c8a... --layout 7x1g.10gb --model embed=6000 --yes
  twinkeel gpu partition --card GPU-5c8a... --layout 3g.40gb+4g.40gb --fleet fleet.yaml --yes

Models that are named with --model, or all that a fleet file has, must each fit a slice of its own.
At the end stand the slices' UUIDs, as a fleet file takes them.
"""


class Stopped(click.ClickException):
    """It was begun and could not be brought to its end: exit code 1."""


@click.command("partition", help=HELP)
@click.option("--card", "uuid", required=True, metavar="UUID", help="GPU-..., never a number.")
@click.option(
    "--layout", required=True, metavar="NAME[+NAME...]", help="Such as 3g.40gb+4x1g.10gb."
)
@click.option(
    "--model", "models", multiple=True, metavar="NAME[=MB]",
    help="A server that shall have a slice, and the memory it needs; without it, as --fleet says.",
)  # fmt: skip
@click.option(
    "--fleet", type=click.Path(path_type=Path), metavar="FILE",
    help="The fleet file, for what its models need.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do it.")
def partition(
    uuid: str, layout: str, models: tuple[str, ...], fleet: Path | None, yes: bool
) -> None:
    with plain_errors():
        from controller.gpus import mig_device as device  # needs the extra `live`

        try:
            names = parse_layout(layout)
            demands = _demands(models, fleet)
            card = device.read_card(uuid)
            plan = plan_of(card, names)
            wanted = {profile.name: profile for profile in card.profiles}
            given = assign(demands, [wanted[name] for name in names])
            _show(card, names, plan, given)
            if not yes:
                _show_steps(plan)
            if plan.steps:
                _refuse_work(card, device.read_work(uuid))
            if not plan.steps:
                click.echo("Nothing to do: the card is cut like that already.")
            elif not yes:
                click.echo("Nothing was changed: give --yes to do it.")
                return
            else:
                card = device.carry_out(card, plan, click.echo)
        except MigError as error:
            raise BadInput(str(error)) from error
        except device.Unfinished as error:
            raise Stopped(str(error)) from error
    _show_slices(card, given)


def _show(
    card: Card, names: Sequence[str], plan: Plan, given: Sequence[tuple[Demand, Profile]]
) -> None:
    click.echo(f"{card.name} {card.uuid} as {told(names)}:")
    for demand, profile in given:
        click.echo(f"  {demand}: fits {profile.name} with {profile.memory_mb} MB")
    for one in plan.kept:
        click.echo(f"  stays: GPU instance {one.id}, {one.profile.name} at {one.placement}")


def _show_steps(plan: Plan) -> None:
    for number, step in enumerate(plan.steps, start=1):
        click.echo(f"{number}/{len(plan.steps)}: {step}")


def _refuse_work(card: Card, work: Sequence[object]) -> None:
    if work:
        raise MigError(
            f"work runs on {card.uuid}: {', '.join(str(one) for one in work)}. Nothing was changed:"
            " end it (a fleet's servers by ending its controller), then run this again"
        )


def _show_slices(card: Card, given: Sequence[tuple[Demand, Profile]]) -> None:
    """The slices as a fleet file takes them; beside them, for whom they are large enough."""
    waiting = [(demand.name, profile.name) for demand, profile in given]
    by_instance = {one.id: one for one in card.instances}
    click.echo("For the places of a fleet file:")
    for part in card.slices:
        instance = by_instance[part.instance]
        profile = instance.profile
        name = next((name for name, size in waiting if size == profile.name), None)
        if name is not None:
            waiting.remove((name, profile.name))
        model = f": {name}" if name is not None else ""
        click.echo(f"  gpus: [{part.uuid}]  # {profile.name}, {profile.memory_mb} MB{model}")


def _demands(models: Sequence[str], fleet: Path | None) -> list[Demand]:
    """What must fit, by ``--model`` and ``--fleet``.

    Raises:
        FileError, MigError: a model without a size, or not of this file.
    """
    file = None if fleet is None else decode(read_document(fleet), FleetFile, str(fleet))
    found: list[Demand] = []
    for text in models or (() if file is None else tuple(file.models)):
        name, equals, size = text.rpartition("=")
        if equals:
            if not size.isascii() or not size.isdigit() or not int(size) or not name:
                raise MigError(f"--model {text!r}: NAME=MB is expected, such as qwen=18000")
            found.append(Demand(name, int(size)))
        elif file is None:
            raise MigError(f"--model {text!r}: give its size, as {text}=MB, or --fleet")
        elif text not in file.models:
            raise FileError(str(fleet), f"no model {text!r}", hint=nearest(text, file.models))
        else:
            found.append(_demand(text, file))
    return found


def _demand(name: str, file: FleetFile) -> Demand:
    """What the largest of a model's servers needs."""
    model = file.models[name]
    weights = model.versions[model.version]
    need = max(
        (needed_mb(model, weights, place.args) for place in (*model.replicas, *model.standbys)),
        key=lambda need: need.total_mb,
    )
    return Demand(name, need.total_mb, str(need))
