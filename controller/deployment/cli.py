"""`twinkeel deploy`, and of `twinkeel policy`: history, diff, rollback, status."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from controller.cli import (
    BadInput,
    no_answer,
    other_version,
    plain_errors,
    where_of,
    where_options,
    wrong_token,
)
from controller.deployment.asking import evidence_at, parse_stages, request_of
from controller.deployment.views import Current, Diff, Row, Step
from policy.files import load_policy, read_document
from policy.parameters import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.cli import Where

T = TypeVar("T")
WATCH_S = 1.0
ANSWER_S_MOST = 120.0
"""The controller replays a log before it answers."""
ENDS = ("done", "rolled_back", "refused")
SHOWN = 12
"""Digits of a hash."""
STAGES_HELP = (
    "Stages instead of the usual ones: KIND:SECONDS[:REQUESTS] after one another, where KIND is"
    " shadow, canary=PERCENT or full, such as shadow:60,canary=5:600:500,full:600."
)
DEPLOY_HELP = """Bring POLICY, a file or a preset, into live traffic; back by itself if it harms.

\b
It goes through shadow, canary and full. The controller refuses a policy without evidence that is
signed, fresh, about this policy, this code and the policy that is live, and that holds. The
decision log that `twinkeel validate` wrote beside the evidence goes with it, and is replayed.
\b
Examples:
  twinkeel deploy tuned.yaml --evidence ev.json --watch
  twinkeel deploy tuned.yaml --evidence ev.json --stages shadow:60,canary=10:600:500,full:600
  twinkeel deploy hotfix.yaml --override "ticket 4711: stop the retry storm"
"""


# deploy


@click.command("deploy", help=DEPLOY_HELP)
@click.argument("policy")
@click.option(
    "--evidence", type=click.Path(path_type=Path), metavar="FILE",
    help="What `twinkeel validate` wrote; its decision log lies beside it, as FILE with .log.",
)  # fmt: skip
@click.option(
    "--override", default="", metavar="REASON",
    help="Deploy it whatever the evidence says. Everyone is told, and the history keeps it.",
)  # fmt: skip
@click.option("--stages", default="", metavar="STAGES", help=STAGES_HELP)
@click.option(
    "--plan", type=click.Path(path_type=Path), metavar="FILE",
    help="YAML with what differs from the usual plan: windows, looks, budgets.",
)  # fmt: skip
@click.option("--watch", is_flag=True, help="Show how it goes, to its end.")
@where_options
def deploy(
    policy: str, evidence: Path | None, override: str, stages: str, plan: Path | None,
    watch: bool, data: Path, admin: str | None, token_file: Path | None,
) -> None:  # fmt: skip
    with plain_errors():
        where = where_of(data, admin, token_file)
        wanted = {
            **({} if plan is None else read_document(plan)),
            **({"stages": parse_stages(stages)} if stages else {}),
        }
        document = request_of(render(load_policy(policy)), evidence_at(evidence), wanted, override)
        row = asked(where, "/deployments", Row, document)
        if row.stage in ENDS:
            raise click.ClickException(f"deployment {row.id}: {_step(row.steps[-1])}")
        click.echo(f"deployment {row.id}: {row.name} ({row.hash[:SHOWN]}) begins in {row.stage}")
        if watch:
            raise SystemExit(_watched(where, row.id))


def _watched(where: Where, number: int) -> int:
    """Say each step, and what is measured, to its end; the exit code."""
    told = 0
    before = ""
    while True:
        row = next((each for each in _rows(where) if each.id == number), None)
        if row is None:
            raise BadInput(f"the controller does not know deployment {number} any more")
        for step in row.steps[told:]:
            click.echo(_step(step))
        told = len(row.steps)
        if row.stage in ENDS:
            return int(row.stage != "done")
        current = _current(where)
        if current is not None and current.verdict:
            line = f"  {current.verdict}: {current.why}"
            if line != before:
                click.echo(line)
            before = line
        time.sleep(WATCH_S)


# policy


@click.command("history")
@click.option(
    "-n", "most", type=click.IntRange(1, 100), default=20, show_default=True,
    help="Deployments shown.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As the controller says it.")
@where_options
def history(
    most: int, as_json: bool, data: Path, admin: str | None, token_file: Path | None
) -> None:
    """Which policies were deployed, by whom, with which evidence, and what became of each."""
    with plain_errors():
        rows = _rows(where_of(data, admin, token_file))[:most]
        if as_json:
            click.echo(msgspec.json.encode(rows).decode())
            return
        for row in rows:
            evidence = "evidence" if row.evidence else "no evidence"
            override = f", override: {row.override}" if row.override else ""
            click.echo(
                f"{row.id}  {row.name} ({row.hash[:SHOWN]}) by {row.by}: {row.stage}"
                f" ({evidence}{override})"
            )
            for step in row.steps:
                click.echo(f"   {_step(step)}")


@click.command("diff")
@click.argument("a", type=int, required=False)
@click.argument("b", type=int, required=False)
@where_options
def diff(
    a: int | None, b: int | None, data: Path, admin: str | None, token_file: Path | None
) -> None:
    """What deployment A changed; or what differs from A's policy to B's. Without both: what the
    last deployment changed."""
    with plain_errors():
        where = where_of(data, admin, token_file)
        if a is None:
            rows = _rows(where)
            if not rows:
                raise BadInput("nothing was deployed yet")
            a = rows[0].id
        path = f"/deployments/{a}/diff" if b is None else f"/deployments/{b}/diff?from={a}"
        found = asked(where, path, Diff)
        for change in found.changes:
            click.echo(f"{change.key}: {_value(change.before)} -> {_value(change.after)}")
        if not found.changes:
            click.echo("they are the same")


@click.command("rollback")
@click.option(
    "--to", type=int, default=None, metavar="ID",
    help="The deployment whose policy is to rule.  [default: what ruled before]",
)  # fmt: skip
@click.option("--why", default="an operator asked for it", show_default=True, metavar="REASON")
@where_options
def rollback(
    to: int | None, why: str, data: Path, admin: str | None, token_file: Path | None
) -> None:
    """End the deployment that is under way, or put back the policy from before; at once."""
    with plain_errors():
        where = where_of(data, admin, token_file)
        began_s = time.monotonic()
        row = asked(where, "/deployments/current/rollback", Row, {"why": why, "to": to})
        took_s = time.monotonic() - began_s
        what = "is rolled back" if row.stage == "rolled_back" else "rules again"
        click.echo(f"deployment {row.id}: {row.name} {what}, after {took_s:.2f} s")


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="As the controller says it.")
@click.option("--watch", is_flag=True, help="Again every second, until interrupted.")
@where_options
def status(
    as_json: bool, watch: bool, data: Path, admin: str | None, token_file: Path | None
) -> None:
    """What is being deployed: stage, both arms' requests and misses, verdict, budget."""
    with plain_errors():
        where = where_of(data, admin, token_file)
        while True:
            current = _current(where)
            if as_json:
                click.echo(msgspec.json.encode(current).decode())
            else:
                if watch:
                    click.clear()
                _show(current)
            if not watch:
                return
            time.sleep(WATCH_S)


def _show(current: Current | None) -> None:
    if current is None:
        click.echo("nothing is being deployed")
        return
    click.echo(
        f"deployment {current.id}: {current.name} ({current.hash[:SHOWN]}) against"
        f" {current.against} ({current.against_hash[:SHOWN]})"
    )
    click.echo(f"stage {current.stage}, {current.share_permille / 10:g} % of the callers")
    if current.override:
        click.echo(f"override: {current.override}")
    click.echo(f"verdict: {current.verdict or 'none yet'}{current.why and f', {current.why}'}")
    for name, value in current.figures.items():
        click.echo(f"  {name.replace('_', ' ')}: {value:g}")
    for name, count in (current.shadow or {}).items():
        click.echo(f"  in shadow, {name.replace('_', ' ')}: {count}")


def _step(step: Step) -> str:
    at = datetime.fromtimestamp(step.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    share = f" {step.share_permille / 10:g} %" if step.stage == "canary" else ""
    return f"{at} {step.stage}{share}: {step.why or '-'}"


def _value(value: object) -> str:
    return "-" if value is None else msgspec.json.encode(value).decode()


# The admin API


def _rows(where: Where) -> Sequence[Row]:
    return asked(where, "/deployments", _Rows).deployments


def _current(where: Where) -> Current | None:
    return asked(where, "/deployments/current", _Now).current


class _Rows(msgspec.Struct):
    deployments: tuple[Row, ...]


class _Now(msgspec.Struct):
    current: Current | None


class _Error(msgspec.Struct):
    code: str
    reasons: tuple[str, ...]


class _Problem(msgspec.Struct):
    error: _Error


def asked(where: Where, path: str, kind: type[T], document: object = None) -> T:
    """What the admin API answers; with ``document`` it is told something. What it refuses for what
    the policy or its evidence is ends the program with 1, each reason on a line."""
    import http.client
    import urllib.error
    import urllib.request

    url = f"{where.url}{path}"
    request = urllib.request.Request(
        url,
        data=None if document is None else msgspec.json.encode(document),
        headers={"Authorization": f"Bearer {where.token}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S_MOST) as answer:
            return msgspec.json.decode(answer.read(), type=kind)
    except urllib.error.HTTPError as error:
        with error:
            raise _told(url, error.code, error.read()) from None
    except (OSError, http.client.HTTPException) as error:
        raise no_answer(url, error) from None
    except msgspec.MsgspecError as error:
        raise other_version(url, error) from error


def _told(url: str, status: int, body: bytes) -> click.ClickException:
    if status == 401:
        return wrong_token(url)
    try:
        problem = msgspec.json.decode(body, type=_Problem).error
    except msgspec.MsgspecError:
        return BadInput(f"{url}: answered {status}")
    if problem.code != "refused":
        return BadInput("; ".join(problem.reasons))
    lines = "".join(f"\n  - {reason}" for reason in problem.reasons)
    return click.ClickException(f"the policy is refused:{lines}")
