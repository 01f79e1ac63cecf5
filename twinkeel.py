"""The one command: the twin's, the controller's and the traces' commands under one name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controller.calibration import cli as calibration
from controller.cli import BadInput, keys, plain_errors, serve, status
from controller.deployment import cli as deployment
from controller.drills.cli import drill_command
from controller.fleet_cli import fleet
from controller.gpu_cli import gpu
from controller.model_cli import model
from controller.trace_cli import show as show_chain
from dashboards.cli import ui
from traces.cli import trace
from twin.cli import completion, policy, replay_command
from twin.forecast_cli import forecast
from twin.log_cli import audit, explain
from twin.plan.cli import plan
from twin.scenario_cli import scenario
from twin.serve.cli import twin
from twin.tune.cli import tune_command
from twin.validate.cli import evidence_group, validate_command

if TYPE_CHECKING:
    from controller.drills.measure import Case
    from policy.drills import DrillFigures

HELP = """Twinkeel: a digital twin and live controller that keep LLM serving stable.

The same policy code replays last week's traffic through a simulated vLLM fleet, is tuned there, and
then drives the real fleet.

\b
Start here:
  twinkeel replay shipped:demo --policy fifo --policy stable   compare two policies
  twinkeel scenario run peak                                   play a claim with its seeds
  twinkeel trace import mylog.csv --map map.yaml -o my.parquet bring your own traffic
  twinkeel policy show --defaults                              see every parameter
  twinkeel forecast train week.parquet --out forecaster        a forecaster of your load
  twinkeel plan --trace week.parquet --slo slo.yaml            how many GPUs it takes
  twinkeel tune space.yaml --trace week.parquet                better thresholds, confirmed
  twinkeel validate tuned.yaml --against stable --trace week.parquet   evidence for it
  twinkeel deploy tuned.yaml --evidence build/evidence.json    to live traffic, and back if it harms
  twinkeel twin serve --profile h100-sxm/qwen3-8b --port 8000  a simulated vLLM over HTTP
  twinkeel serve --upstream http://127.0.0.1:8000              the controller in front of it
  twinkeel serve --fleet fleet.yaml                            the same, and it runs the servers too
  twinkeel drill engine-kill                                   break something, on a demo fleet
  twinkeel ui --admin http://127.0.0.1:8081                    all of it in a browser
  twinkeel calibrate --engine http://127.0.0.1:8000 --out p.yaml   a profile of a real server
"""


STEPS_NAME, CLIENT_NAME = "steps.jsonl", "client.jsonl"
"""Of what a designed load leaves in its folder."""
NAMES = ("name", "gpu", "model")


@click.group(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twinkeel")
def main() -> None:
    """The command group; its text is ``HELP``."""


@click.command("calibrate", help=calibration.HELP)
@click.option("--engine", metavar="URL", help="A vLLM server that nobody else uses now.")
@click.option(
    "--from", "source", type=click.Path(exists=True, path_type=Path), metavar="PATH",
    help="A folder kept from an earlier run, or step records: the plug-in's file or its folder.",
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
    from traces import TraceError
    from traces.steps import steps_file
    from twin import calibrate as fit
    from twin.report.figures import ReportError

    if (engine is None) == (source is None):
        raise BadInput("give either --engine (run a load) or --from (read a recording)")
    with plain_errors():
        try:
            if against is not None:
                if source is None:
                    raise BadInput("--against compares a recording: give it with --from")
                calibration.refuse_others(("source", "against", "alarm"), "--against")
                sys.exit(_compare(source, against, alarm))
            if out is None:
                raise BadInput("--out is missing: the file for the profile")
            if source is not None:
                taken = ("source", "out", "base", *NAMES)
                calibration.refuse_others(taken, "--from")
            else:
                every = {option.name or "" for option in click.get_current_context().command.params}
                calibration.refuse_others(tuple(every - {"alarm"}), "--engine")
            start = calibration.load_base(base)
            named = {key: options[key] for key in NAMES}
            if source is not None and not _is_kept(source):
                if start is None:
                    raise BadInput("--base is missing: the profile that live traffic is held to")
                calibration.check_out(out)
                given = {key: value for key, value in named.items() if value}
                if given:
                    given = calibration.names_of(**named, base=start)._asdict()
                found = fit.fit_passive(steps_file(source), start, **given)
            else:
                names = calibration.names_of(**named, base=start)
                calibration.check_out(out)
                folder = source or options["keep"] or out.with_suffix(".recording")
                if engine is not None:
                    calibration.record(engine, folder, options)
                found = fit.fit_profile(folder, **names._asdict(), base=start)
            report = out.with_suffix(".html")
            fit.write_report(found, report)
            if found.profile is not None:
                fit.write_profile(found.profile, out)
        except (fit.CalibrationError, ReportError, TraceError) as error:
            raise BadInput(str(error)) from error
    sys.exit(calibration.show_result(found.profile, found.refusal, out, report))


def _is_kept(source: Path) -> bool:
    """It is what an earlier run left; else step records of live traffic."""
    return (source / STEPS_NAME).is_file()


def _compare(source: Path, against: str, alarm: float) -> int:
    """Print how a recording differs from a profile; gives the exit code."""
    from policy.cost import StepCost
    from traces.steps import read_both_halves, steps_file
    from twin.calibrate import drift
    from twin.calibrate.client import read_client

    profile = calibration.load_base(against)
    assert profile is not None
    path = source / STEPS_NAME if _is_kept(source) else steps_file(source)
    client = path.with_name(CLIENT_NAME)
    asked = read_client(client) if path.name == STEPS_NAME and client.is_file() else ()
    found = drift(StepCost.from_profile(profile), read_both_halves(path), asked)
    return calibration.show_drift(found, against, alarm)


def play_drill(case: Case) -> DrillFigures:
    """A drill in the twin.

    Raises:
        ValueError: it cannot be played there, or its trace is not here.
    """
    from twin.drills import predict

    if case.trace is None:
        raise ValueError(
            "the traffic's trace is not on this machine, or no --profile says how fast its servers"
            " are"
        )
    return predict(case.broken, case.log.records(), case.trace, case.log.parameters, case.profiles)


main.add_command(replay_command)
main.add_command(calibrate)
trace.add_command(show_chain)
main.add_command(trace)
main.add_command(policy)
main.add_command(scenario)
main.add_command(plan)
main.add_command(tune_command)
main.add_command(validate_command)
main.add_command(evidence_group)
main.add_command(deployment.deploy)
main.add_command(forecast)
main.add_command(twin)
main.add_command(serve)
main.add_command(status)
main.add_command(keys)
main.add_command(audit)
main.add_command(explain)
main.add_command(fleet)
main.add_command(gpu)
main.add_command(model)
main.add_command(drill_command(play_drill))
main.add_command(ui)
main.add_command(completion)
for live in (deployment.history, deployment.diff, deployment.rollback, deployment.status):
    policy.add_command(live)

if __name__ == "__main__":
    main()
