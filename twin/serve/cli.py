"""``twinkeel twin serve``: the twin behind vLLM's API."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import click

from policy.files import profile_names
from twin.cli import BadInput, completed, plain_errors

SERVE_HELP = """Serve a simulated vLLM replica: vLLM's API and /metrics, in real time.

It answers as fast as the profile says a real server would, so a controller can be pointed at it
where there is no GPU. Answers are words drawn by the prompt. One line tells when it listens.

\b
Examples:
  twinkeel twin serve --profile h100-sxm/qwen3-8b --port 8001
  twinkeel twin serve --profile h100-sxm/qwen3-embedding-0.6b --port 0
  curl -X POST localhost:8001/twin/fault -d '{"kind": "stall", "share": 0.1, "for_s": 30}'
"""


@click.group()
def twin() -> None:
    """The twin as a server."""


@twin.command("serve", help=SERVE_HELP, context_settings={"show_default": True})
@click.option(
    "--profile", default="h100-sxm/qwen3-8b", metavar="NAME",
    shell_complete=completed(profile_names),
    help="GPU and model: a shipped profile, one scaled from it, or a file.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, help="0: any that is free.")
@click.option("--model", default="", metavar="NAME", help="Served name; empty: the model's own.")
@click.option("--version", default="", metavar="V", help="The model's version, for /v1/models.")
@click.option("--kv-blocks", default=0, metavar="N", help="0: computed from the card.")
@click.option("--max-model-len", default=0, metavar="TOKENS", help="0: the profile's.")
@click.option("--max-num-seqs", default=0, metavar="N", help="0: the profile's.")
@click.option("--max-num-batched-tokens", default=0, metavar="N", help="0: the profile's.")
@click.option(
    "--scheduling-policy", type=click.Choice(["", "fcfs", "priority"]), default="",
    help="Empty: the profile's.",
)  # fmt: skip
@click.option(
    "--max-num-queued-reqs", default=0, metavar="N",
    help="Waiting and running requests above which more get 503; 0: no limit.",
)  # fmt: skip
@click.option(
    "--enable-request-id-headers", "request_id_headers", is_flag=True,
    help="Answers carry X-Request-Id.",
)  # fmt: skip
@click.option(
    "--keep-alive-s", default=5.0, metavar="SECONDS", help="How long idle connections are kept."
)
@click.option(
    "--shutdown-timeout", default=0.0, metavar="SECONDS",
    help='How long requests may finish after SIGTERM; then they end with finish reason "abort".',
)  # fmt: skip
@click.option(
    "--steps", default="", metavar="DIR",
    help="Write step records there, as the plug-in for vLLM does; empty: none.",
)  # fmt: skip
@click.option("--seed", default=0, help="Of answers, and of whom faults strike.")
@click.option(
    "--fault", default="", metavar="JSON",
    help="What is wrong with it from the beginning, as POST /twin/fault takes it.",
)  # fmt: skip
def serve(host: str, port: int, shutdown_timeout: float, **options: Any) -> None:
    try:
        import uvloop

        from twin.serve import server
    except ImportError as error:
        raise BadInput(
            f"{error.name} is missing: install the extra `live` (pip install 'twinkeel[live]')"
        ) from error

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await server.serve(
            server.Options(**options), host, port, stop,
            lambda url: click.echo(f"twin serving {url}"), shutdown_timeout,
        )  # fmt: skip

    with plain_errors():
        try:
            uvloop.run(run())
        except ValueError as error:
            raise BadInput(str(error)) from error
