"""The command group `trace`."""

from __future__ import annotations

import functools
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traces.schema import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from traces.readers.common import ReadOptions

    Command = Callable[..., None]

_OUT = click.Path(dir_okay=False, path_type=Path)
_IN = click.Path(exists=True, dir_okay=False, path_type=Path)


class TraceFailure(click.ClickException):
    """A clear message and exit code 2."""

    exit_code = 2


def _clear_errors(command: Command) -> Command:
    """Turn the errors that a user can mend into a message and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except TraceError as error:
            raise TraceFailure(str(error)) from error
        except OSError as error:
            raise TraceFailure(
                f"{error.filename or 'output'}: {error.strerror or error}"
            ) from error

    return run


def _fresh(target: Path, force: bool) -> Path:
    if target.exists() and not force:
        raise TraceError(f"{target}: exists already; choose another name, or replace it: --force")
    if not os.access(target.parent, os.W_OK):
        raise TraceError(f"{target.parent}: no such folder, or it cannot be written to")
    return target


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int], None]]:
    """Show the rows so far on a terminal's stderr; stay silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,.0f} requests"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda rows: bar.update(task, completed=rows)


@click.group()
def trace() -> None:
    """Import, describe, generate and cut traces of LLM requests.

    A trace is a Parquet file with one row per model call. Where a TRACE is asked for, give a
    file, or a shipped one: shipped:demo, shipped:bursts, shipped:sessions, shipped:agents.
    """


@trace.command("import", short_help="Make a trace of a public trace or of your own logs.")
@click.argument("source", type=_IN)
@click.option("-o", "--out", required=True, type=_OUT, help="The trace to write (.parquet).")
@click.option(
    "--format", "format_name", metavar="NAME", help="Source format; guessed when left out."
)
@click.option("--map", "map_path", type=_IN, help="Map file: which column feeds which, as above.")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="At a bad row: stop, or leave it out and report the share.",
)
@click.option("--limit", type=click.IntRange(1), help="Stop after this many requests.")
@click.option("--trace-id", help="Name in the column trace_id; the source's name when left out.")
@click.option(
    "--resolution",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Resolution of the time stamps; detected when left out.",
)
@click.option(
    "--session-rate",
    type=click.FloatRange(0, min_open=True),
    metavar="PER_SECOND",
    help="Agent sessions: let so many start per second (Poisson). Without it arrivals are null.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of everything drawn.")
@click.option("--model", "models", multiple=True, help="ServeGen: only this model; repeatable.")
@click.option("--window", metavar="FROM:TO", help="ServeGen: only windows in these seconds.")
@click.option(
    "--rate-scale",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    help="ServeGen: multiply all rates.",
)
@click.option("--lengths", type=_IN, help="ServeGen: the lengths table; else beside SOURCE.")
@click.option(
    "--chars-per-token",
    type=click.FloatRange(0, min_open=True),
    default=4.0,
    show_default=True,
    help="LMCache agent runs: characters that make a token.",
)
@click.option("--force", is_flag=True, help="Replace OUT when it exists.")
@_clear_errors
def import_command(
    source: Path,
    out: Path,
    format_name: str | None,
    trace_id: str | None,
    resolution: float | None,
    window: str | None,
    force: bool,
    **given: Any,
) -> None:
    """Read SOURCE (gzipped or not), check every row, sort by arrival, and write a trace.

    \b
    Formats, guessed from the header:
      azure             Azure LLM inference 2023 and 2024, CSV
      burstgpt          BurstGPT, CSV
      mooncake          Mooncake, JSON lines
      agent-sessions    agent sessions of kv-cache-tester, Parquet
      lmcache-sessions  LMCache agent runs, Parquet
      servegen          ServeGen client rates, Parquet; arrivals are generated
      otlp              vLLM's OpenTelemetry spans, OTLP JSON lines
      twinkeel          a trace, to check and sort it again
      map               any CSV or JSON lines, by a map file

    \b
    A map file, for --map; delimiter, arrival_res_s and constants may be left out:
      schema: 1
      format: csv                             # or jsonl
      delimiter: ","                          # csv only; "\\t" for tabs
      arrival_res_s: 1                        # stamps' steps, s; else detected
      columns:                                # trace column: source column
        arrival_s: {from: start, unit: ms}    # s (default), ms, us or ns
        prompt_tokens: n_in                   # must be there, 1 or more
        output_tokens: n_out                  # jsonl: usage.n_out is in an object
        user_id: {from: user, hash: true}     # text to a number
        sla_class: {from: prio, values: {high: P0, low: P2}}
      constants: {model: qwen3-8b, endpoint: chat}

    \b
    Stamps that are dates, in UTC (strptime's %z for other zones):
        arrival_s: {from: start, time: iso}   # 2024-05-01T10:30:00.25Z
        arrival_s: {from: start, time: "%d.%m.%Y %H:%M:%S"}   # as strptime's

    \b
    Examples:
      twinkeel trace import AzureLLMInferenceTrace_conv.csv -o conv.parquet
      twinkeel trace import requests.csv.gz --map map.yaml --on-error skip -o ours.parquet
      twinkeel trace import agent_sessions.parquet --session-rate 0.05 -o agents.parquet

    Nothing is written unless all goes well; errors end with exit code 2.
    """
    from traces.readers import import_trace

    options = _read_options(window, given)
    with _progress("importing") as progress:
        report = import_trace(
            source,
            _fresh(out, force),
            format=format_name,
            options=options,
            trace_id=trace_id,
            resolution_s=resolution,
            progress=progress,
        )
    click.echo(
        f"{report.path}: {report.rows:,} requests over {report.duration_s:,.1f} s "
        f"from {report.format}; {report.rows_rejected:,} rows rejected "
        f"({report.rejected_share:.3%}); stamps "
        + (f"in steps of {report.resolution_s:g} s" if report.resolution_s else "exact")
    )
    for example in report.examples:
        click.echo(f"  rejected: {example}", err=True)
    for warning in report.warnings:
        click.echo(f"  warning: {warning}", err=True)


def _read_options(window: str | None, given: dict[str, Any]) -> ReadOptions:
    from traces.readers import ReadOptions

    window_s = None
    if window is not None:
        try:
            low, high = (float(part) for part in window.split(":"))
        except ValueError as error:
            raise TraceError(f"--window {window}: write it as FROM:TO, in seconds") from error
        window_s = (low, high)
    return ReadOptions(window_s=window_s, lengths_path=given.pop("lengths"), **given)


@trace.command(short_help="Say what is in a trace.")
@click.argument("trace", metavar="TRACE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
@_clear_errors
def describe(trace: str, as_json: bool) -> None:
    """Show rates over time, burstiness, lengths, prefix hits, shares and what is missing.

    \b
    Examples:
      twinkeel trace describe shipped:demo
      twinkeel trace describe conv.parquet --json
    """
    from traces.describe import describe_trace, print_description
    from traces.store import open_trace

    description = describe_trace(open_trace(trace))
    if as_json:
        click.echo(json.dumps(description, indent=2))
        return
    from rich.console import Console

    print_description(description, Console())


@trace.command(short_help="Write a trace from a specification.")
@click.argument("spec", required=False, type=_IN)
@click.option("--bench", metavar="NAME", help="A bench load: w10k_r8, w10k_r32 or w100k_r32.")
@click.option("-o", "--out", required=True, type=_OUT, help="The trace to write (.parquet).")
@click.option("--seed", type=click.IntRange(0), help="In place of the specification's.")
@click.option("--force", is_flag=True, help="Replace OUT when it exists.")
@_clear_errors
def generate(
    spec: Path | None, bench: str | None, out: Path, seed: int | None, force: bool
) -> None:
    """Generate the trace of the YAML file SPEC, or a bench load. Same seed, same rows.

    \b
    A specification:
      schema: 1
      seed: 7
      duration_s: 600
      streams:
        - name: chat
          business_line: support
          sla_class: P1                            # P0, P1 or P2
          model: qwen3-8b
          endpoint: chat                           # chat, completions or embeddings
          arrivals:                                # poisson, gamma or weibull
            {law: gamma, cv: 2, rate_rps: 3, curve: [[200, 1], [300, 2.5], [400, 1]]}
          prompt_tokens: {lognormal: {mean: 900, sigma: 0.8}, low: 10, high: 8000}
          output_tokens: {quantiles: {0.0: 10, 0.5: 200, 1.0: 900}}
          prefix: {system_tokens: 1024, prompts: 4}
          sessions: {turns: {fixed: 4}, think_s: {fixed: 20}}
          users: {count: 500, zipf: 0.9}
    The shipped traces' own specifications are in traces/shipped/ as examples.

    \b
    Examples:
      twinkeel trace generate load.yaml -o load.parquet
      twinkeel trace generate --bench w10k_r8 -o w10k_r8.parquet
    """
    from msgspec.structs import replace

    from traces.generate import generate_bench, generate_trace, load_spec

    if (spec is None) == (bench is None):
        raise TraceError("give either a SPEC file or --bench NAME")
    with _progress("generating") as progress:
        if spec is not None:
            chosen = load_spec(spec)
            if seed is not None:
                chosen = replace(chosen, seed=seed)
            written = generate_trace(chosen, _fresh(out, force), progress=progress)
        else:
            if seed is not None:
                raise TraceError("a bench load has a seed of its own; leave --seed out")
            written = generate_bench(str(bench), _fresh(out, force), progress=progress)
    click.echo(f"{written.path}: {written.rows:,} requests over {written.duration_s:,.1f} s")


@trace.command("slice", short_help="Cut a part out of a trace.")
@click.argument("trace", metavar="TRACE")
@click.option("-o", "--out", required=True, type=_OUT, help="The trace to write (.parquet).")
@click.option("--from", "start_s", type=float, default=0.0, help="First second.  [default: 0]")
@click.option("--to", "end_s", type=float, default=float("inf"), help="Second to stop before.")
@click.option("--line", "business_line", multiple=True, help="Only this line; repeatable.")
@click.option("--sla", "sla_class", multiple=True, help="Only this SLA class; repeatable.")
@click.option("--model", multiple=True, help="Only this model; repeatable.")
@click.option("--endpoint", multiple=True, help="Only this endpoint; repeatable.")
@click.option("--tenant", "tenant_id", multiple=True, help="Only this tenant; repeatable.")
@click.option("--sample", type=float, default=1.0, help="Keep this share, 0 to 1.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the sample.")
@click.option("--keep-times", is_flag=True, help="Do not move --from to second 0.")
@click.option("--force", is_flag=True, help="Replace OUT when it exists.")
@_clear_errors
def slice_command(
    trace: str,
    out: Path,
    start_s: float,
    end_s: float,
    sample: float,
    seed: int,
    keep_times: bool,
    force: bool,
    **filters: tuple[str, ...],
) -> None:
    """Write the part of TRACE in a stretch of time that passes the filters.

    A sample keeps whole sessions and chains, and raises the weights to make up for the rest.

    \b
    Examples:
      twinkeel trace slice shipped:demo --from 240 --to 420 -o peak.parquet
      twinkeel trace slice shipped:demo --line support --sla P1 -o chat.parquet
      twinkeel trace slice week.parquet --sample 0.1 -o tenth.parquet
    """
    from traces.slicing import slice_trace
    from traces.store import open_trace

    keep = {name: values for name, values in filters.items() if values}
    with _progress("cutting") as progress:
        rows = slice_trace(
            open_trace(trace),
            _fresh(out, force),
            start_s=start_s,
            end_s=end_s,
            keep=keep,
            sample=sample,
            seed=seed,
            keep_times=keep_times,
            progress=progress,
        )
    click.echo(f"{out}: {rows:,} requests")
