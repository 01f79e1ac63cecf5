"""Commands on decision logs: proof that a log is what the policy does, and a request's story."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from policy.events import Forecasted
from policy.files import code_hash
from policy.log import LogError
from policy.parameters import from_canonical
from twin.cli import BadInput, plain_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import Event
    from policy.log import Header
    from twin.story import Story

_SEGMENT = re.compile(r"^decisions\.(?P<number>\d+)\.log$")


@click.command("audit")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="LOG...")
def audit(logs: tuple[Path, ...]) -> None:
    """Replay decision logs through the policy that wrote them and compare byte for byte.

    LOG is a segment (decisions.N.log) or a folder of them. Exit code 1 at the first difference.
    """
    from policy.audit import replay
    from twin.story import forecast_words

    paths = _segments(logs)
    counted = _Count()
    with plain_errors():
        try:
            difference = replay((path.read_bytes() for path in paths), counted.policy_of)
        except (LogError, msgspec.ValidationError) as error:
            raise BadInput(_unreadable(error, counted.hashes)) from error
    for hash_ in sorted(counted.hashes - {code_hash()}):
        click.echo(f"note: the log was written by other policy code ({hash_})", err=True)
    if difference is None:
        click.echo(f"{counted.steps} steps in {len(paths)} segments: the same decisions")
        if counted.forecast is not None:
            at_ns, event = counted.forecast
            click.echo(
                f"{counted.forecasts} forecasts were told, the last after {at_ns / 1e9:.3f} s:"
                f" {forecast_words(event)}"
            )
        return
    logged = difference.logged
    click.echo(f"segment {difference.segment}, record {difference.record} differs")
    click.echo(f"  at       {logged.now_ns} ns")
    click.echo(f"  event    {logged.event}")
    click.echo(f"  logged   {list(logged.decisions)}")
    click.echo(f"  replayed {list(difference.replayed)}")
    raise SystemExit(1)


@click.command("explain")
@click.argument("log", type=click.Path(path_type=Path), metavar="LOG")
@click.argument("request", type=int)
def explain(log: Path, request: int) -> None:
    """Tell the story of one request from a decision log, in ms since it arrived.

    LOG is a segment (decisions.N.log) or a folder of them; REQUEST is the request's id. Shows what
    was told and decided about it, how the replicas stood when it was sent, and what else happened
    to replicas and breakers meanwhile.
    """
    from twin.story import tell

    paths = _segments((log,))
    with plain_errors():
        try:
            story = tell((path.read_bytes() for path in paths), request)
        except (LogError, msgspec.ValidationError) as error:
            raise BadInput(f"{log}: {_unreadable(error, set())}") from error
    _print(story)


def _unreadable(error: Exception, hashes: set[str]) -> str:
    if isinstance(error, LogError):
        return str(error)
    others = ", ".join(sorted(hashes - {code_hash()}))
    by = f" ({others})" if others else ""
    return f"its snapshot fits other policy code{by}, not this one ({code_hash()}): {error}"


def _segments(logs: Sequence[Path]) -> list[Path]:
    """Folders become the segments in them, by number."""
    paths: list[Path] = []
    for log in logs:
        if log.is_dir():
            found = {path: _SEGMENT.match(path.name) for path in log.iterdir()}
            numbers = {path: int(match["number"]) for path, match in found.items() if match}
            if not numbers:
                raise BadInput(
                    f"{log}: no decisions.N.log in this folder: write one with --log full"
                )
            paths += sorted(numbers, key=lambda path: numbers[path])
        elif log.is_file():
            paths.append(log)
        else:
            raise BadInput(f"{log}: no such file or folder")
    return paths


class _Count:
    """Makes policies that count their steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.forecasts = 0
        self.forecast: tuple[int, Forecasted] | None = None
        """The last one, and when it was told."""
        self.hashes: set[str] = set()

    def policy_of(self, header: Header, snapshot: bytes) -> Policy:
        from policy.compose import restore

        self.hashes.add(header.code_hash)
        return _Counted(restore(from_canonical(header.policy), snapshot), self)


class _Counted:
    def __init__(self, policy: Policy, count: _Count) -> None:
        self._policy = policy
        self._count = count
        self.deadline_ns = policy.deadline_ns
        self.snapshot = policy.snapshot

    def step(self, now_ns: int, event: Event) -> Sequence[Decision]:
        self._count.steps += 1
        if isinstance(event, Forecasted):
            self._count.forecasts += 1
            self._count.forecast = now_ns, event
        return self._policy.step(now_ns, event)


def _print(story: Story) -> None:
    for line in _summary(story):
        click.echo(line)
    click.echo("")
    scores = dict(story.scores)
    for at_ns, text in story.lines:
        click.echo(f"{story.after_ms(at_ns):+12.3f} ms  {text}")
        if text.startswith("decision  dispatch") and at_ns in scores:
            _print_scores(scores[at_ns])
    if story.meanwhile_left_out:
        click.echo(f"and {story.meanwhile_left_out} more things happened meanwhile")


def _print_scores(rows: list[dict[str, Any]]) -> None:
    """A plain table, a row a replica, as wide as it needs to be."""
    if not rows:
        return
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        click.echo(f"{'':18}{'  '.join(cells)}")


def _summary(story: Story) -> Iterator[str]:
    arrived = story.arrived
    if arrived is None:
        yield f"request {story.request}: it arrived before this log begins"
    else:
        yield (
            f"request {story.request}: {arrived.endpoint} of {arrived.prompt_bytes} bytes for"
            f" {arrived.model or 'any model'}, class {arrived.sla or 'not given'}"
        )
    marks = (
        ("sent to a replica", story.dispatched_ns),
        ("first token", story.first_ns),
        ("settled", story.settled_ns),
    )
    for name, at_ns in marks:
        if at_ns >= 0:
            yield f"  {name:18} after {story.after_ms(at_ns):.3f} ms"
    settled = story.settled
    if settled is None:
        yield "  the log ends before its outcome"
    else:
        why = f" ({settled.why})" if settled.why else ""
        yield f"  outcome            {settled.outcome}{why}, tier {settled.tier or 'none'}"
