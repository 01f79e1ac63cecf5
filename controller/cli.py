"""The controller's commands: serve, status, keys."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec
import yaml

from controller.config import Limits, Settings, Upstream
from policy.files import (
    FileError,
    decode,
    load_policy,
    load_profile,
    nearest,
    policy_names,
    read_document,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from controller.admin.status import Status
    from controller.serve import Running

TOKEN_VARIABLE = "TWINKEEL_ADMIN_TOKEN"
PARTS_OF_UPSTREAM = tuple(name for name in Upstream.__struct_fields__ if name != "url")
CHECK_TIMEOUT_S = 5.0
LOG_LEVELS = ("debug", "info", "warning", "error")
WATCH_S = 2.0
ADMIN_URL = "http://127.0.0.1:8081"
WIDTH = 120
"""Columns where no terminal says how many it has."""

SERVE_HELP = """Stand in front of vLLM servers: queue, place, retry, measure and record requests.

\b
An upstream is a URL and, after commas, what its server does not say of itself:
  http://10.0.0.7:8000,profile=h100-sxm/qwen3-8b,domain=host0/card3,label=vllm=0.32
\b
Examples:
  twinkeel serve --upstream http://10.0.0.7:8000 --upstream http://10.0.0.8:8000
  twinkeel serve --fleet fleet.yaml
  twinkeel serve --gpu-policy=stable --upstream http://10.0.0.7:8000 --observe
  twinkeel serve --config controller.yaml --port 9000 --check

Everything can stand in the file given with --config (docs/controller.md shows one); options go
before what it says.
"""


class BadInput(click.ClickException):
    """One clear line and exit code 2."""

    exit_code = 2


@contextmanager
def plain_errors() -> Iterator[None]:
    """What the user can mend is one clear line and exit code 2; a fault of ours is a traceback."""
    try:
        yield
    except FileError as error:
        raise BadInput(str(error)) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("controller", "policy", "traces"):
            raise
        raise BadInput(
            f"{error.name} is not installed: the live controller needs the extra `live`, as in"
            " pip install 'twinkeel[live]'"
        ) from error
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise BadInput(f"{name}{error.strerror or error}") from error


# Settings, from a file and from options


def parse_upstream(text: str) -> dict[str, object]:
    """``URL[,part=value...]`` as a mapping of ``Upstream``'s fields; ``label`` and ``gpu`` may be
    repeated."""
    url, *parts = [part.strip() for part in text.split(",")]
    found: dict[str, object] = {"url": url}
    lists: dict[str, list[str]] = {"labels": [], "gpus": []}
    known = (*PARTS_OF_UPSTREAM, "label", "gpu")
    for part in parts:
        name, equals, value = part.partition("=")
        if name not in known:
            raise FileError(
                f"upstream {url}", "unknown part", key=name, value=part, hint=nearest(name, known)
            )
        if not equals or not value:
            raise FileError(f"upstream {url}", "has no value: write NAME=VALUE", key=name)
        if f"{name.removesuffix('s')}s" in lists:
            lists[f"{name.removesuffix('s')}s"].append(value)
        elif name in found:
            raise FileError(f"upstream {url}", "stands twice", key=name)
        elif name.startswith("max_"):
            if not value.isascii() or not value.isdigit():
                raise FileError(f"upstream {url}", f"a number is expected, got {value!r}", key=name)
            found[name] = int(value)
        else:
            found[name] = value
    return found | {name: values for name, values in lists.items() if values}


def parse_embeddings(text: str) -> dict[str, object]:
    """``URL[,model=NAME]`` as settings."""
    url, *parts = [part.strip() for part in text.split(",", 1)]
    found: dict[str, object] = {"embeddings": url}
    for part in parts:
        name, equals, value = part.partition("=")
        if name != "model" or not equals or not value:
            raise FileError(
                f"--embeddings {text}", "only the model's name may follow the URL", value=part,
                hint="write URL,model=NAME",
            )  # fmt: skip
        found["embeddings_model"] = value
    return found


def make_settings(file: Path | None, options: dict[str, Any]) -> Settings:
    """The settings of ``file``, with what ``options`` says instead; checked as a whole."""
    raw: dict[str, Any] = {} if file is None else read_document(file)
    where = "the options" if file is None else str(file)
    schema = raw.pop("schema", 1)
    if schema != 1:
        raise FileError(
            where, f"schema {schema!r} is not known", key="schema",
            hint="this version reads schema: 1",
        )  # fmt: skip
    merged = {**raw, **{key: value for key, value in options.items() if key not in _NESTED}}
    for section in _NESTED:
        given: object = options.get(section)
        in_file = merged.get(section, {})
        if given and isinstance(in_file, dict):
            merged[section] = {**in_file, **given} if isinstance(given, dict) else given
    upstreams = merged.get("upstreams", [])
    if isinstance(upstreams, list):
        merged["upstreams"] = [
            parse_upstream(item) if isinstance(item, str) else item for item in upstreams
        ]
    settings = decode(merged, Settings, where, schema=None)
    _check_whole(settings, where)
    return settings


_NESTED = ("features", "limits")


def _check_whole(settings: Settings, where: str) -> None:
    """What no single value shows."""
    if settings.fleet and settings.upstreams:
        raise FileError(
            where, f"{settings.fleet} says which servers there are, and upstreams are given, too",
            key="fleet", hint="give either --fleet or --upstream",
        )  # fmt: skip
    if not (settings.fleet or settings.upstreams):
        raise FileError(
            where, "there is no server to send requests to", key="upstreams",
            hint="--upstream http://HOST:8000, once for each vLLM server, or --fleet FILE",
        )  # fmt: skip
    urls: set[str] = set()
    for index, upstream in enumerate(settings.upstreams):
        key = f"upstreams[{index}].url"
        check_url(upstream.url, where, key, path=False)
        url = upstream.url.rstrip("/")
        if url in urls:
            raise FileError(where, f"{url} stands twice", key=key)
        urls.add(url)
        if upstream.profile:
            load_profile(upstream.profile)
    if settings.redact:
        from controller.store.redaction import load_patterns

        load_patterns(Path(settings.redact))
    if settings.embeddings:
        check_url(settings.embeddings, where, "embeddings", path=False)
    for key in ("otlp", "webhook"):
        if getattr(settings, key):
            check_url(getattr(settings, key), where, key, path=True)
    if settings.redis:
        from controller.sharing.store import check_redis

        check_redis(settings.redis, where)
    if settings.admin_token:
        from controller.admin.token import checked

        checked(settings.admin_token, where, "admin_token")
    if settings.port and (settings.host, settings.port) == (
        settings.admin_host,
        settings.admin_port,
    ):
        raise FileError(
            where, f"{settings.port} is the public port: give the admin API one of its own",
            key="admin_port", value=settings.port,
        )  # fmt: skip
    least = {"body_bytes_most": 1024, "header_bytes_most": 1024, "open_most": 1}
    for name, bound in least.items():
        value: int = getattr(settings.limits, name)
        if value < bound:
            raise FileError(where, f"is {value}, below {bound}", key=f"limits.{name}", value=value)


def check_url(url: str, where: str, key: str, path: bool) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FileError(where, f"{url!r} is no URL: {error}", key=key, value=url) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise FileError(
            where, f"{url!r} is no URL", key=key, value=url,
            hint=f"such as http://10.0.0.7:8000{'/some/path' if path else ''}",
        )  # fmt: skip
    if parts.username is not None or parts.password is not None:
        raise FileError(where, "a URL with a password in it is not taken", key=key)
    if parts.query or parts.fragment or (not path and parts.path not in ("", "/")):
        raise FileError(
            where, f"{url!r} has more than scheme, host and port", key=key, value=url,
            hint="paths such as /v1 are added",
        )  # fmt: skip


def _limits(texts: tuple[str, ...]) -> dict[str, object]:
    """``NAME=VALUE`` of the section ``limits``."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in Limits.__struct_fields__:
            raise FileError(
                f"--limit {text}", "unknown limit", key=name, value=name,
                hint=nearest(name, Limits.__struct_fields__),
            )  # fmt: skip
        try:
            number: object = yaml.safe_load(value) if equals else None
        except yaml.YAMLError:
            number = value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise FileError(f"--limit {text}", f"a number is expected, got {value!r}", key=name)
        found[name] = number
    return found


def _token_of(file: Path | None) -> str:
    """The admin token from a file, else from the environment; empty: neither is given."""
    from controller.admin.token import checked, read_token

    if file is not None:
        return read_token(file.read_bytes(), file)
    given = os.environ.get(TOKEN_VARIABLE, "")
    return checked(given, TOKEN_VARIABLE) if given else ""


def _completed(names: Callable[[], tuple[str, ...]]) -> Callable[..., list[str]]:
    return lambda context, parameter, start: [name for name in names() if name.startswith(start)]


# serve


@click.command("serve", help=SERVE_HELP)
@click.option(
    "--upstream", "upstreams", multiple=True, metavar="URL[,...]",
    help="A vLLM server; repeat for each.",
)  # fmt: skip
@click.option(
    "--fleet", default=None, metavar="FILE",
    help="Start, watch and stop the servers of a fleet file; instead of --upstream.",
)  # fmt: skip
@click.option(
    "--policy", default=None, metavar="NAME|FILE", shell_complete=_completed(policy_names),
    help="A preset or a policy file.  [default: stable]",
)  # fmt: skip
@click.option(
    "--gpu-policy", default=None, metavar="NAME", shell_complete=_completed(policy_names),
    help="A preset, by its name; instead of --policy.",
)  # fmt: skip
@click.option(
    "--observe", is_flag=True, default=None,
    help="Pass everything on as it comes; decide in shadow only, and report.",
)  # fmt: skip
@click.option(
    "--config", type=click.Path(path_type=Path), default=None, metavar="FILE",
    help="Settings in YAML; options go before what it says.",
)  # fmt: skip
@click.option("--host", default=None, help="Address of the public API.  [default: 127.0.0.1]")
@click.option("--port", type=int, default=None, help="0: any free one.  [default: 8080]")
@click.option("--admin-host", default=None, help="Of the admin API.  [default: 127.0.0.1]")
@click.option("--admin-port", type=int, default=None, help="0: any free one.  [default: 8081]")
@click.option(
    "--admin-token-file", type=click.Path(path_type=Path), default=None, metavar="FILE",
    help=f"File with the admin token; else the variable {TOKEN_VARIABLE}; else one is made and kept"
    " in the data folder.",
)  # fmt: skip
@click.option(
    "--data", default=None, metavar="FOLDER",
    help="Decision log, trace, database.  [default: build/controller]",
)  # fmt: skip
@click.option(
    "--keys", default=None, metavar="FILE",
    help="Hashed API keys of callers (see `twinkeel keys`).  [default: callers need none]",
)  # fmt: skip
@click.option(
    "--forecast", default=None, metavar="DIR",
    help="A trained forecaster: the policy is told what it says.  [default: none]",
)  # fmt: skip
@click.option(
    "--redis", default=None, metavar="URL",
    help="Redis shared with other controllers: limits, sessions, chains.  [default: alone]",
)  # fmt: skip
@click.option("--otlp", default=None, metavar="URL", help="OTLP/HTTP endpoint for spans.")
@click.option(
    "--span-share", type=float, default=None, metavar="SHARE",
    help="Of requests that are traced where their caller does not say.  [default: 0.01]",
)  # fmt: skip
@click.option(
    "--embeddings", default=None, metavar="URL[,model=NAME]",
    help="An OpenAI-compatible server of embeddings: kept answers to questions that say the same in"
    " other words are found by it.  [default: only to the same question]",
)  # fmt: skip
@click.option("--webhook", default=None, metavar="URL", help="Where alerts are posted.")
@click.option("--no-usage", is_flag=True, help="Do not ask streams for their token counts.")
@click.option("--no-extras", is_flag=True, help="Put no `twinkeel` object into answers.")
@click.option("--confidence", is_flag=True, help="Ask for logprobs and score the answers.")
@click.option("--no-record", is_flag=True, help="Write no trace of what passes.")
@click.option(
    "--sample-share", type=float, default=None, metavar="SHARE",
    help="Of requests whose texts are kept, redacted; of a chain all or none.  [default: 0]",
)  # fmt: skip
@click.option(
    "--redact", default=None, metavar="FILE",
    help="More patterns of what is redacted, one NAME = REGEX a line.",
)  # fmt: skip
@click.option(
    "--limit", "limits", multiple=True, metavar="NAME=VALUE",
    help=f"A bound: {', '.join(Limits.__struct_fields__)}. Repeat for several.",
)  # fmt: skip
@click.option("--scrape-s", type=float, default=None, help="Between two readings of metrics.")
@click.option("--probe-s", type=float, default=None, help="Between two looks at a server.")
@click.option("--drain-s", type=float, default=None, help="Open requests may take, at the end.")
@click.option("--unready-s", type=float, default=None, help="/ready says no before the end begins.")
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True,
    help="What is told on stderr.",
)  # fmt: skip
@click.option(
    "--check", is_flag=True,
    help="Check everything, ask each server what it is, say what is wrong, and end.",
)  # fmt: skip
def serve(
    policy: str | None,
    gpu_policy: str | None,
    config: Path | None,
    admin_token_file: Path | None,
    no_usage: bool,
    no_extras: bool,
    confidence: bool,
    no_record: bool,
    limits: tuple[str, ...],
    upstreams: tuple[str, ...],
    embeddings: str | None,
    log_level: str,
    check: bool,
    **plain: Any,
) -> None:
    with plain_errors():
        options = {name: value for name, value in plain.items() if value is not None}
        if policy is not None and gpu_policy is not None:
            raise BadInput(
                f"--policy {policy} and --gpu-policy {gpu_policy} both choose a policy: give one"
            )
        if gpu_policy is not None and gpu_policy not in policy_names():
            raise BadInput(
                f"--gpu-policy {gpu_policy}: no such preset"
                f" (hint: {nearest(gpu_policy, policy_names())})"
            )
        if policy is not None or gpu_policy is not None:
            options["policy"] = policy or gpu_policy
        if upstreams:
            options["upstreams"] = list(upstreams)
        if embeddings is not None:
            options |= parse_embeddings(embeddings)
        if no_record:
            options["record"] = False
        token = _token_of(admin_token_file)
        if token:
            options["admin_token"] = token
        switched = {"usage": no_usage, "extras": no_extras}
        options["features"] = {name: False for name, off in switched.items() if off}
        if confidence:
            options["features"]["confidence"] = True
        options["limits"] = _limits(limits)
        settings = make_settings(config, options)
        _check_files(settings)
        logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
        if check:
            _report_check(settings)
            return
        _serve(settings)


def _check_files(settings: Settings) -> None:
    """The files that the settings name can be used."""
    load_policy(settings.policy)
    if settings.keys:
        from controller.gateway.keys import load_keys

        if not len(load_keys(settings.keys)):
            raise FileError(
                settings.keys, "holds no key, so nobody could call", key="keys",
                hint="add one: twinkeel keys add TENANT",
            )  # fmt: skip
    if settings.fleet:
        from controller.fleet.opening import checked

        list(checked(Path(settings.fleet)))
    data = settings.data_path
    if data.exists() and not data.is_dir():
        raise FileError(str(data), "is no folder", key="data")


def _report_check(settings: Settings) -> None:
    parameters = load_policy(settings.policy)
    click.echo(f"policy   {parameters.name} ({parameters.discipline}): valid")
    if settings.keys:
        from controller.gateway.keys import read_entries

        click.echo(f"keys     {len(read_entries(Path(settings.keys)))} in {settings.keys}: valid")
    if settings.forecast:
        from controller.forecasting import load_model

        model = load_model(settings.forecast)
        ahead = ", ".join(f"{horizon * model.window_s / 60:g}" for horizon in model.horizons)
        click.echo(f"forecast {settings.forecast}: says what comes in {ahead} minutes: valid")
    if settings.fleet:
        from controller.fleet.opening import checked

        for line in checked(Path(settings.fleet)):
            click.echo(f"fleet    {line}: valid")
    unfit = _report_servers(settings)
    if unfit:
        raise BadInput(f"{', '.join(unfit)}: cannot be used as it is, see above")
    click.echo("the settings are valid")


def _report_servers(settings: Settings) -> list[str]:
    """Say what each server is, as it says itself; which cannot be used. That one does not answer
    is no fault of the settings."""
    import asyncio

    from aiohttp import ClientError

    from controller import http
    from controller.upstream.discovery import DiscoveryError, describe
    from controller.upstream.replica import Replica

    unfit: list[str] = []

    async def ask() -> None:
        async with http.session() as session:
            for number, upstream in enumerate(settings.upstreams):
                try:
                    async with asyncio.timeout(CHECK_TIMEOUT_S):
                        up = await describe(Replica(number, upstream, session), upstream)
                    said = (
                        f"serves {', '.join(up.models)}, version {up.version}, {up.kv_blocks} KV"
                        f" blocks of {up.block_tokens} tokens, {up.max_num_seqs} sequences"
                    )
                except DiscoveryError as error:
                    unfit.append(upstream.url)
                    said = str(error)
                except (ClientError, OSError, TimeoutError) as error:
                    said = f"does not answer now ({error or type(error).__name__})"
                click.echo(f"upstream {upstream.url}: {said}")
                if upstream.steps:
                    click.echo(f"  steps {upstream.steps}: {_count_steps(upstream.steps)}")

    asyncio.run(ask())
    return unfit


def _count_steps(given: str) -> str:
    """What is there of step records: they come with the server, so none is no fault."""
    from controller.upstream.steps import given_files

    try:
        found = len(given_files(Path(given)))
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return f"{found} files of step records" if found else "no step records there (yet)"


def _serve(settings: Settings) -> None:
    import asyncio
    from importlib import import_module

    for needed in ("aiohttp", "prometheus_client"):
        import_module(needed)
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    try:
        import uvloop

        new_event_loop = uvloop.new_event_loop
    except ModuleNotFoundError:  # no wheel for this machine: slower, and as good
        pass
    from controller.serve import serve as run
    from controller.store.database import DatabaseError
    from policy.log import LogError

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run(settings, lambda running: _announce(settings, running)))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except (DatabaseError, LogError, FileError) as error:
        raise BadInput(str(error)) from error


def _announce(settings: Settings, running: Running) -> None:
    """What is served where. Scripts wait for the first line."""
    from controller.admin.token import token_path

    parameters = running.driver.parameters
    count = len(running.driver.replicas)
    servers = "1 server" if count == 1 else f"{count} servers"
    click.echo(f"twinkeel serving {running.url}")
    click.echo(f"  policy {parameters.name} ({parameters.discipline}), {servers}")
    if running.shadow is not None:
        shadow = f"{running.shadow.name} ({running.shadow.discipline})"
        click.echo(f"  observing only: everything is passed on as it comes, {shadow} in shadow")
    token = "as given" if settings.admin_token else f"in {token_path(settings)}"
    click.echo(f"  admin API {running.admin_url}, its token {token}")
    click.echo(f"  data in {settings.data_path}")
    if not settings.keys and settings.host not in ("127.0.0.1", "::1", "localhost"):
        click.echo(
            f"note: whoever reaches {settings.host} may call: --keys asks for keys", err=True
        )


# A controller that runs: where it is found, and how it is asked


class Where(NamedTuple):
    """A controller's admin API."""

    url: str
    token: str


data_option = click.option(
    "--data", type=click.Path(path_type=Path), default=Path(Settings(upstreams=()).data),
    show_default=True, metavar="FOLDER", help="The controller's data folder, if it is here.",
)  # fmt: skip
admin_option = click.option(
    "--admin", default=None, metavar="URL",
    help=f"The controller's admin API.  [default: as the data folder says, else {ADMIN_URL}]",
)  # fmt: skip
token_file_option = click.option(
    "--token-file", type=click.Path(path_type=Path), default=None, metavar="FILE",
    help=f"File with the admin token; else the variable {TOKEN_VARIABLE}; else admin.token in the"
    " data folder.",
)  # fmt: skip


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which controller is meant."""
    for option in (token_file_option, admin_option, data_option):
        command = option(command)
    return command


def where_of(data: Path, admin: str | None, token_file: Path | None) -> Where:
    """What the options mean."""
    url = admin_url(data, admin)
    return Where(url.rstrip("/"), token_for(token_file, data))


def admin_url(data: Path, given: str | None) -> str:
    """What was given; else where a controller with this data folder listens, or usually does."""
    from controller.admin.token import ADDRESS_FILE

    try:
        url = given or (data / ADDRESS_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        url = ADMIN_URL
    check_url(url, "--admin", "URL", path=False)
    return url


def token_for(file: Path | None, data: Path) -> str:
    from controller.admin.token import FILE

    given = _token_of(file)
    if given:
        return given
    path = data / FILE
    if not path.is_file():
        raise BadInput(
            f"no admin token: {path} is not here (--data names the controller's data folder), and"
            f" neither --token-file nor {TOKEN_VARIABLE} is given"
        )
    return _token_of(path)


def fetch(admin: str, path: str, token: str, missing: bytes | None = None) -> bytes:
    """The body of an answer of the admin API; what is wrong is a ``BadInput``. ``missing`` is given
    for a 404, where it is not None."""
    import http.client
    import urllib.error
    import urllib.request

    url = f"{admin.rstrip('/')}{path}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401:
                raise wrong_token(url) from None
            if error.code == 404 and missing is not None:
                return missing
            raise BadInput(f"{url}: answered {error.code} ({error.reason})") from None
    except (OSError, http.client.HTTPException) as error:
        raise no_answer(url, error) from None


def wrong_token(url: str) -> BadInput:
    return BadInput(f"{url}: the admin token is not the controller's")


def no_answer(url: str, error: Exception) -> BadInput:
    reason = getattr(error, "reason", error)
    return BadInput(
        f"{url}: no controller answers there ({reason}): give its data folder with --data, or"
        " its admin API with --admin"
    )


def other_version(url: str, error: Exception) -> BadInput:
    """It answers something that this version does not know."""
    return BadInput(f"{url}: is no admin API of this version: {error}")


def wide_console(*, highlight: bool = True) -> Console:
    from rich.console import Console

    console = Console(highlight=highlight)
    if not console.is_terminal:  # a file or a pipe: its 80 columns are only a guess
        console = Console(width=WIDTH, highlight=highlight)
    return console


# status


@click.command("status")
@where_options
@click.option("--json", "as_json", is_flag=True, help="As the controller says it.")
@click.option("--watch", is_flag=True, help="Again every 2 s, until interrupted.")
def status(
    data: Path, admin: str | None, token_file: Path | None, as_json: bool, watch: bool
) -> None:
    """Show what a running controller does: replicas, tiers, breakers, hops, outcomes, alerts."""
    with plain_errors():
        admin = admin_url(data, admin)
        token = token_for(token_file, data)
        while True:
            body = fetch(admin, "/status", token)
            if as_json:
                click.echo(body.decode())
            else:
                if watch:
                    click.clear()
                show(_decoded(body, admin))
            if not watch:
                return
            time.sleep(WATCH_S)


def show(current: Status) -> None:
    """Print a status as tables."""
    from controller.admin.show import tables

    console = wide_console()
    for table in tables(current):
        console.print(table)


def _decoded(body: bytes, admin: str) -> Status:
    from controller.admin.status import Status

    try:
        return msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError as error:
        raise other_version(admin, error) from error


# keys


@click.group("keys")
def keys() -> None:
    """API keys of callers: the file holds only their hashes."""


_KEYS_FILE = click.option(
    "--file", "path", type=click.Path(path_type=Path), default=Path("keys.yaml"),
    show_default=True, metavar="FILE", help="The file for `twinkeel serve --keys`.",
)  # fmt: skip


@keys.command("add")
@click.argument("tenant")
@_KEYS_FILE
@click.option("--sla", type=click.Choice(["P0", "P1", "P2"]), default=None, help="Default class.")
@click.option("--line", default="", help="Default business line.")
@click.option(
    "--expires", type=click.DateTime(["%Y-%m-%d"]), default=None, metavar="DATE",
    help="The last day, UTC, on which it is taken.",
)  # fmt: skip
def add(tenant: str, path: Path, sla: str | None, line: str, expires: datetime | None) -> None:
    """Make a key for TENANT, add its hash to the file, and print the key: this once."""
    from controller.gateway.keys import Entry, add_entry, digest_of, new_key

    with plain_errors():
        day = None if expires is None else expires.date()
        if day is not None and day < _today():
            raise BadInput(f"--expires {day}: is over already")
        key = new_key()
        raw = {"sha256": digest_of(key), "tenant": tenant, "sla": sla or "", "line": line}
        try:
            entry = decode({**raw, "expires": day}, Entry, "the new key", schema=None)
        except FileError as error:
            if error.key != "tenant":
                raise
            raise BadInput(
                f"{tenant!r} can name no tenant: give it at most 80 letters, digits, spaces and"
                " signs of ._@:/-, beginning with a letter or a digit"
            ) from error
        add_entry(path, entry)
    click.echo(key)
    click.echo(
        f"its hash is in {path}; the key itself is kept nowhere. Restart the controller to have it"
        " taken.",
        err=True,
    )


@keys.command("list")
@_KEYS_FILE
def list_(path: Path) -> None:
    """Whose keys the file holds."""
    from controller.gateway.keys import read_entries

    with plain_errors():
        for entry in read_entries(path):
            expired = entry.expires is not None and entry.expires < _today()
            until = "" if entry.expires is None else f" until {entry.expires}"
            parts = (entry.sla, entry.line, "EXPIRED" if expired else "")
            more = " ".join(part for part in parts if part)
            click.echo(f"{entry.sha256[:12]} {entry.tenant}{until} {more}".rstrip())


def _today() -> date:
    return datetime.now(UTC).date()


__all__ = ["keys", "make_settings", "parse_upstream", "serve", "show", "status"]
