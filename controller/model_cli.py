"""``twinkeel model hot-reload``: another version of a model takes over while it serves."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from controller.cli import (
    BadInput,
    admin_option,
    data_option,
    plain_errors,
    token_file_option,
    where_of,
)
from controller.config import Settings
from controller.deployment.cli import asked

if TYPE_CHECKING:
    from controller.fleet.reload import ReloadView

WATCH_S = 0.5
EXIT_BACK = 1
EXIT_LEFT = 130
"""As a shell reports SIGINT."""
HELP = """Bring MODEL into another version while it serves; back by itself if that is no good.

\b
The new version is started beside the one that serves, on standbys; what it has loaded is verified,
it is warmed, and it is tried out: its answers must be answers, and as confident as those of the
version that serves. Then every new request goes to it, and old ones finish where they began. For a
while (rollout.watch_ms) the old replicas are kept, and take over again if it fails after all.

Without room beside the old version, --drain-then-swap replaces one replica after the other. Asking
for the version from before, while a reload goes on, calls it back.

\b
Examples:
  twinkeel model hot-reload --model qwen --version v1.1 --weights /models/qwen-v1.1
  twinkeel model hot-reload --model qwen --version v1.0
"""


@click.group("model", help="The models of a running controller's fleet.")
def model() -> None:
    """The group."""


@model.command("hot-reload", help=HELP)
@click.option("--model", "name", required=True, metavar="MODEL", help="As callers name it.")
@click.option("--version", required=True, metavar="V", help="The one that is to serve.")
@click.option("--weights", default="", metavar="PATH",
              help="Folder on the controller's machine, or hub name; of a version that it knows"
              " already, none is needed.")  # fmt: skip
@click.option("--drain-then-swap", "swap", is_flag=True,
              help="Without standbys: one replica at a time is started anew.")  # fmt: skip
@admin_option
@data_option
@token_file_option
def hot_reload(
    name: str, version: str, weights: str, swap: bool,
    admin: str | None, data: Path, token_file: Path | None,
) -> None:  # fmt: skip
    with plain_errors():
        from controller.fleet.reload import ReloadView

        where = where_of(data, admin, token_file)
        path = f"/fleet/models/{quote(name, safe='')}/reload"
        document = {"version": version, "weights": _whole(weights), "swap": swap}
        view = asked(where, path, ReloadView, document)
        try:
            told = _tell(view, 0)
            while not view.over:
                time.sleep(WATCH_S)
                view = asked(where, path, ReloadView)
                told = _tell(view, told)
        except KeyboardInterrupt:
            options = ["--model", name, "--admin", where.url, *_found_by(data, token_file)]
            again = f"twinkeel model hot-reload {shlex.join(options)} --version"
            click.echo(f"it goes on. To see how: {again} {shlex.quote(version)}")
            click.echo(f"To call it back: {again} {shlex.quote(view.before)}")
            raise SystemExit(EXIT_LEFT) from None
        except BadInput as error:  # it was begun, whatever has become of it
            raise click.ClickException(
                f"{error.message}\nThe reload cannot be followed any more. A controller that was"
                " restarted has forgotten it, and serves each model in the version that most of its"
                " replicas had: `twinkeel fleet show` says which"
            ) from None
    _tell_end(view)
    wanted = "done" if version == view.version else "rolled back"  # it was asked to call it back
    raise SystemExit(0 if view.phase == wanted else EXIT_BACK)


def _found_by(data: Path, token_file: Path | None) -> list[str]:
    """The options by which the token is found again, from any folder."""
    found = [] if data == Path(Settings().data) else ["--data", os.path.abspath(data)]
    return found + ([] if token_file is None else ["--token-file", os.path.abspath(token_file)])


def _whole(weights: str) -> str:
    """A path that is here is told in full: the controller may have been started elsewhere."""
    path = Path(weights).expanduser()
    return os.path.abspath(path) if weights and path.exists() else weights


def _tell(view: ReloadView, told: int) -> int:
    """Say the steps that were not said yet; how many have been."""
    for step in view.steps[told:]:
        click.echo(f"{step.after_s:7.1f} s  {step.text}")
    return len(view.steps)


def _tell_end(view: ReloadView) -> None:
    if view.phase == "done":
        click.echo(f"{view.model} is served in version {view.version}, after {view.took_s:.1f} s")
        return
    sides = ((view.new, view.version), (view.old, view.before))
    serving = ", ".join(f"{count} of {version}" for count, version in sides if count)
    click.echo(
        f"{view.version} is {view.phase} after {view.took_s:.1f} s: {view.why}; replicas:"
        f" {serving or 'none'}"
    )
