"""The one command: the twin's, the controller's and the traces' commands under one name."""

from __future__ import annotations

import click

from controller.cli import keys, serve, status
from traces.cli import trace
from twin.cli import completion, policy, replay_command
from twin.log_cli import audit, explain
from twin.scenario_cli import scenario
from twin.serve.cli import twin

HELP = """Twinkeel: a digital twin and live controller that keep LLM serving stable.

The same policy code replays last week's traffic through a simulated vLLM fleet, is tuned there, and
then drives the real fleet.

\b
Start here:
  twinkeel replay shipped:demo --policy fifo --policy stable   compare two policies
  twinkeel scenario run peak                                   play a claim with its seeds
  twinkeel trace import mylog.csv --map map.yaml -o my.parquet bring your own traffic
  twinkeel policy show --defaults                              see every parameter
  twinkeel twin serve --profile h100-sxm/qwen3-8b --port 8000  a simulated vLLM over HTTP
  twinkeel serve --upstream http://127.0.0.1:8000              the controller in front of it
"""


@click.group(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twinkeel")
def main() -> None:
    """The command group; its text is ``HELP``."""


main.add_command(replay_command)
main.add_command(trace)
main.add_command(policy)
main.add_command(scenario)
main.add_command(twin)
main.add_command(serve)
main.add_command(status)
main.add_command(keys)
main.add_command(audit)
main.add_command(explain)
main.add_command(completion)

if __name__ == "__main__":
    main()
