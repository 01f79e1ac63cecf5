"""The command ``ui``."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import msgspec

from twin.cli import BadInput
from twin.validate.cli import KEY_VARIABLE

HELP = """Open the app in a browser: replay, what-if, tune, forecast, live, drills, deploy.

\b
Examples:
  twinkeel ui
  twinkeel ui --admin http://127.0.0.1:8081
  twinkeel ui --admin east=http://10.0.0.5:8081 --admin west=http://10.1.0.5:8081

It listens on this machine only, unless --host says otherwise, and asks nobody who they are: put it
behind a proxy that does. To look at a controller it takes the controller's admin token: typed into
the page, or read from --token-file. To deploy, to roll back, or to break something of it in a drill
the token is typed each time.
"""


@click.command("ui", help=HELP, context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", help="Address it listens on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8501)
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), default=Path("build/ui"),
    metavar="FOLDER", help="Uploads, jobs and their results.",
)  # fmt: skip
@click.option(
    "--admin", "admins", multiple=True, metavar="[NAME=]URL",
    help="Admin API of a controller. Repeat for several.",
)  # fmt: skip
@click.option(
    "--token-file", "token_files", multiple=True, metavar="[NAME=]FILE",
    help="Its admin token, to look without typing it. Repeat in the order of --admin, or by name.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=2, metavar="N",
    help="Jobs that run at the same time.",
)  # fmt: skip
@click.option(
    "--key", "key_path", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=None, envvar=KEY_VARIABLE, metavar="FILE",
    help=f"The deploy key, which signs evidence that the app gathers.  [env: {KEY_VARIABLE}]",
)  # fmt: skip
@click.option("--browser/--no-browser", default=True, help="Open a browser.")
def ui(
    host: str, port: int, data: Path, admins: tuple[str, ...], token_files: tuple[str, ...],
    jobs: int, key_path: Path | None, browser: bool,
) -> None:  # fmt: skip
    if find_spec("streamlit") is None:
        raise BadInput(
            "streamlit is not installed: the app needs the extra `ui`, as in"
            " pip install 'twinkeel[ui]'"
        )
    from dashboards.state import VARIABLE, Settings

    controllers: dict[str, str] = {}
    for n, text in enumerate(admins, 1):
        name, url = _named(text, f"controller-{n}")
        if name in controllers:
            raise BadInput(f"--admin {text}: {name} stands twice")
        controllers[name] = url
    for name, url in controllers.items():
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"--admin {url}: write a URL, as in http://127.0.0.1:8081")
        controllers[name] = url.rstrip("/")
    names = list(controllers)
    tokens = dict(
        _named(text, names[n] if n < len(names) else "") for n, text in enumerate(token_files)
    )
    for name, file in tokens.items():
        if name not in controllers:
            raise BadInput(f"--token-file {file}: there is no --admin that it is for")
        if not Path(file).is_file():
            raise BadInput(f"--token-file {file}: no such file")
    settings = Settings(
        str(data.resolve()), controllers,
        {name: str(Path(file).resolve()) for name, file in tokens.items()}, jobs,
    )  # fmt: skip
    command = [
        sys.executable, "-m", "streamlit", "run", str(Path(__file__).with_name("app.py")),
        "--server.address", host, "--server.port", str(port), "--server.headless",
        "false" if browser else "true", "--browser.gatherUsageStats", "false",
        "--server.fileWatcherType", "none", "--runner.magicEnabled", "false",
        "--client.toolbarMode", "viewer", "--client.showErrorDetails", "none",
    ]  # fmt: skip
    click.echo(f"twinkeel ui: http://{host}:{port}")
    sys.stdout.flush()
    root = str(Path(__file__).parents[1])
    path = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ,
        VARIABLE: msgspec.json.encode(settings).decode(),
        "PYTHONPATH": os.pathsep.join(part for part in (root, path) if part),
    }
    if key_path is not None:
        environment[KEY_VARIABLE] = str(key_path.resolve())
    os.execve(sys.executable, command, environment)


def _named(text: str, usual: str) -> tuple[str, str]:
    """``NAME=REST``, or the rest alone under its usual name."""
    name, equals, rest = text.partition("=")
    return (name, rest) if equals and "/" not in name and ":" not in name else (usual, text)
