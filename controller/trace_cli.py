"""``twinkeel trace show``: a chain as a waterfall in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
import msgspec

from controller.cli import (
    BadInput,
    admin_url,
    data_option,
    fetch,
    other_version,
    plain_errors,
    token_file_option,
    token_for,
    wide_console,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.text import Text

    from controller.store.samples import Sample
    from controller.store.steps import ChainLine, ChainView, StepView

RECENT = 5
"""Chains that are named where one is not known."""
NAME_CHARS_MOST = 24
BAR_CHARS_LEAST = 20
PARTS = {"queue": ".", "prefill": "=", "decode": "#", "other": "-", "own step": "~"}
"""How the parts of a step's time look; colours only repeat it."""
_STYLES = {".": "yellow", "=": "cyan", "#": "green", "-": "bright_black", "~": "magenta"}
_WELL = ("answered", "done")


@click.command("show", short_help="Show a chain that went through a controller.")
@click.argument("chain")
@click.option("--user", default=None, help="Whose chain, with the tenant: TENANT/USER.")
@data_option
@click.option(
    "--admin", default=None, metavar="URL",
    help="Ask the controller's admin API instead of reading its data folder.",
)  # fmt: skip
@token_file_option
@click.option(
    "--texts", is_flag=True,
    help="With prompts and answers, as far as they were sampled; only from the data folder.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As the admin API says it.")
def show(
    chain: str,
    user: str | None,
    data: Path,
    admin: str | None,
    token_file: Path | None,
    texts: bool,
    as_json: bool,
) -> None:
    """Show a chain that went through a controller, step by step: where its time went, what became
    of each step, and what was left of its budget."""
    with plain_errors():
        if texts and admin is not None:
            raise BadInput("--texts: texts are in the data folder only, so --admin does not go with"
                           " it: give --data")  # fmt: skip
        local = admin is None and token_file is None and _has_file(data)
        if local:
            found, recent = _from_file(data, chain, user)
        else:
            admin = admin_url(data, admin)
            found, recent = _from_admin(admin, token_for(token_file, data), chain, user)
        if found is None:
            raise BadInput(_unknown(chain, user, recent))
        samples = _samples(data, found) if texts else {}
    if as_json:
        document: Any = found
        if texts:
            document = {**msgspec.to_builtins(found), "texts": list(samples.values())}
        click.echo(msgspec.json.encode(document).decode())
    else:
        _print(found, samples if texts else None)


# Where it is found


def _has_file(data: Path) -> bool:
    from controller.store.steps import FILE

    return (data / FILE).is_file()


def _from_file(
    data: Path, chain: str, user: str | None
) -> tuple[ChainView | None, list[ChainLine]]:
    from controller.store.database import DatabaseError
    from controller.store.steps import FILE, find_chain, read_only, recent_chains

    now_s = time.time()
    try:
        return read_only(
            data / FILE,
            lambda db: (find_chain(db, chain, user, now_s), recent_chains(db, RECENT, now_s)),
        )
    except DatabaseError as error:
        raise BadInput(str(error)) from error


def _from_admin(
    admin: str, token: str, chain: str, user: str | None
) -> tuple[ChainView | None, list[ChainLine]]:
    from controller.store.steps import ChainList, ChainView

    path = f"/chains/{quote(chain, safe='')}"
    if user is not None:
        path += f"?user={quote(user, safe='')}"
    try:
        body = fetch(admin, path, token, missing=b"")
        if body:
            return msgspec.json.decode(body, type=ChainView), []
        return None, msgspec.json.decode(fetch(admin, "/chains", token), type=ChainList).chains
    except msgspec.DecodeError as error:
        raise other_version(admin, error) from error


def _unknown(chain: str, user: str | None, recent: list[ChainLine]) -> str:
    of = "" if user is None else f" of {user}"
    said = f"no step of a chain {chain!r}{of} is known"
    if not recent:
        return f"{said}, nor of any other: requests name theirs in the header x-twinkeel-chain"
    named = ", ".join(
        f"{each.chain}{f' of {each.user}' if each.user else ''}" for each in recent[:RECENT]
    )
    return f"{said}; the youngest are: {_printable(named)}"


def _samples(data: Path, chain: ChainView) -> dict[str, Sample]:
    """What is kept of its texts, by ``x-request-id``."""
    from controller.store.samples import FOLDER, find_samples, key_of

    requests = [step.request for step in chain.steps if step.request]
    keys = {key_of(chain.user, chain.chain, request): request for request in requests}
    found = find_samples(data / FOLDER, keys)
    return {keys[key]: sample for key, sample in found.items()}


# How it looks


def _print(chain: ChainView, samples: Mapping[str, Sample] | None) -> None:
    console = wide_console(highlight=False)
    for line in waterfall(chain, console.width, samples):
        console.print(line)


def waterfall(
    chain: ChainView, width: int, samples: Mapping[str, Sample] | None = None
) -> Iterator[Text]:
    """The chain, line by line.

    Args:
        width: columns.
        samples: texts that are shown, too, by ``x-request-id``; None: none are.
    """
    from rich.text import Text

    yield from _head(chain)
    names = [_printable(step.step) or "(no name)" for step in chain.steps]
    left = min(max(map(len, names)), NAME_CHARS_MOST)
    total_s = max(step.ended_s for step in chain.steps)
    cells = max(BAR_CHARS_LEAST, width - left - 32)
    axis = f"0 s{f'{total_s:.3f} s':>{cells - 3}}"
    yield Text(f"{'':{left}} {axis}  {'began':>8} {'took':>8}", style="bright_black")
    for name, step in zip(names, chain.steps, strict=True):
        line = Text(f"{name[:left]:{left}} ")
        for part in _bar(step, total_s, cells):
            line.append(part, _STYLES.get(part[:1], ""))
        line.append(f"  {step.began_s:8.3f} {step.ended_s - step.began_s:8.3f} ")
        line.append(step.outcome, "" if step.outcome in _WELL else "red")
        yield line
        indent = " " * (left + 1)
        for said in _about(step):
            yield Text(f"{indent}{_printable(said)}")
        if samples is not None and step.request:
            yield from _texts(samples.get(step.request), indent)
    yield Text("  ".join(f"{char} {part}" for part, char in PARTS.items()), style="bright_black")


def _head(chain: ChainView) -> Iterator[Text]:
    from rich.text import Text

    of = f" of {chain.user}" if chain.user else ""
    line = f", line {chain.line}" if chain.line else ""
    yield Text(_printable(f"chain {chain.chain}{of}{line}"), style="bold")
    if chain.trace_id:
        yield Text(f"trace {chain.trace_id}")
    total_s = max(step.ended_s for step in chain.steps)
    count = len(chain.steps)
    said = f"{count} step{'' if count == 1 else 's'} in {total_s:.3f} s"
    if chain.left_s is not None:
        budget = "" if chain.budget_s is None else f" of {chain.budget_s:g} s"
        said += f"; {chain.left_s:.3f} s{budget} were left after the last"
    elif chain.budget_s is not None:
        said += f"; budget {chain.budget_s:g} s"
    if chain.over:
        said += "; its budget is over"
    yield Text(said)
    if chain.partial:
        yield Text("partial: the budget ended before all of its steps did", style="red")


def _bar(step: StepView, total_s: float, cells: int) -> Iterator[str]:
    """The step's place on the chain's time, each part in its own letters, then room to the end."""
    total_s = max(total_s, 1e-9)
    first = min(cells - 1, int(step.began_s / total_s * cells))
    last = max(first + 1, min(cells, round(step.ended_s / total_s * cells)))
    yield " " * first
    took_s = max(step.ended_s - step.began_s, 1e-9)
    at = 0
    sum_s = 0.0
    for part, part_s in _parts(step):
        sum_s += part_s
        end = min(last - first, round(sum_s / took_s * (last - first)))
        yield PARTS[part] * (end - at)
        at = max(at, end)
    yield PARTS["own step" if step.external else "other"] * (last - first - at)
    yield " " * (cells - last)


def _parts(step: StepView) -> list[tuple[str, float]]:
    """What is known of its time, in its order; what is left over is other."""
    if step.external:
        return []
    queue_s = (step.queue_s or 0.0) + (step.schedule_s or 0.0)
    return [
        ("queue", queue_s), ("prefill", step.prefill_s or 0.0), ("decode", step.decode_s or 0.0)
    ]  # fmt: skip


def _about(step: StepView) -> Iterator[str]:
    """What else is known of a step, in few lines."""
    parts = [step.model, step.tier, step.replica and f"on {step.replica}"]
    if step.prompt_tokens is not None:
        parts.append(f"{step.prompt_tokens} + {step.output_tokens} tokens")
    if step.why:
        parts.append(f"why: {step.why}")
    if step.confidence is not None:
        parts.append(f"confidence {step.confidence:.3f}")
    if step.verification:
        parts.append(f"verification {step.verification}")
    if any(parts):
        yield ", ".join(part for part in parts if part)
    more = [step.checkpoint and f"checkpoint {step.checkpoint}"]
    more.append(step.request and f"request {step.request}")
    if any(more):
        yield ", ".join(part for part in more if part)
    if step.attributes:
        yield ", ".join(
            f"{name}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
            for name, value in step.attributes.items()
        )


def _texts(sample: Sample | None, indent: str) -> Iterator[Text]:
    from rich.text import Text

    if sample is None:
        yield Text(f"{indent}its texts were not sampled (twinkeel serve --sample-share)")
        return
    for what, text in (("prompt", sample.prompt), ("answer", sample.answer)):
        yield Text(f"{indent}{what}:")
        for line in text.splitlines() or ["(none)"]:
            yield Text(f"{indent}  {_printable(line)}")


def _printable(line: str) -> str:
    """Callers' texts must not steer the terminal."""
    return "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line)
