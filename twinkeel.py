"""The one command: the twin's, the controller's and the traces' commands under one name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from controller.calibration import cli as calibration
from controller.cli import BadInput, keys, plain_errors, serve, status
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
  twinkeel calibrate --engine http://127.0.0.1:8000 --out p.yaml   a profile of a real server
"""


@click.group(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twinkeel")
def main() -> None:
    """The command group; its text is ``HELP``."""


@click.command("calibrate", help=calibration.HELP)
@click.option("--engine", metavar="URL", help="A vLLM server that nobody else uses now.")
@click.option(
    "--from", "source", type=click.Path(exists=True, path_type=Path), metavar="PATH",
    help="A folder kept from an earlier run, or a file of step records.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="The profile.")
@click.option("--name", metavar="NAME", help="Of the profile; default: GPU/MODEL.")
@click.option("--gpu", metavar="NAME", help="The card, as in the shipped tables.")
@click.option("--model", metavar="NAME", help="The model, as in the shipped tables.")
@click.option("--base", metavar="PROFILE", help="Gives card and model, and what is not measured.")
@click.option("--against", metavar="PROFILE", help="Compare --from with it; fit nothing.")
@click.option("--alarm", default=10.0, show_default=True, help="Of --against, in per cent.")
@calibration.load_options
def calibrate(
    engine: str | None, source: Path | None, out: Path | None, base: str | None,
    against: str | None, alarm: float, **options: Any,
) -> None:  # fmt: skip
    from policy.cost import StepCost
    from traces import TraceError
    from traces.steps import read_steps
    from twin import calibrate as fit

    if (engine is None) == (source is None):
        raise BadInput("give either --engine (run a load) or --from (read a recording)")
    with plain_errors():
        try:
            if against is not None:
                if source is None:
                    raise BadInput("--against compares a recording: give it with --from")
                profile = calibration.load_base(against)
                assert profile is not None
                drift = fit.drift(StepCost.from_profile(profile), read_steps(source))
                sys.exit(calibration.show_drift(drift, against, alarm))
            if out is None:
                raise BadInput("--out is missing: the file for the profile")
            start = calibration.load_base(base)
            if source is not None and not source.is_dir():
                if start is None:
                    raise BadInput("--base is missing: the profile that live traffic is held to")
                found = fit.fit_passive(source, start)
            else:
                named = {key: options[key] for key in ("gpu", "model", "name")}
                names = calibration.names_of(**named, base=start)
                folder = source or options["keep"] or out.with_suffix(".recording")
                if engine is not None:
                    calibration.record(engine, folder, options)
                found = fit.fit_profile(folder, **names._asdict(), base=start)
            report = out.with_suffix(".html")
            fit.write_report(found, report)
            if found.profile is not None:
                fit.write_profile(found.profile, out)
        except (fit.CalibrationError, TraceError) as error:
            raise BadInput(str(error)) from error
    sys.exit(calibration.show_result(found.profile, found.refusal, out, report))


main.add_command(replay_command)
main.add_command(calibrate)
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
