"""What README.md and docs/ show: blocks of code, command lines in them and in running text.

``CHANGES`` is the one table of what is put in place of what a page says, so that it runs here.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
"""Paths from the root."""
KINDS = ("bash", "console", "json", "python", "text", "yaml")
"""What the opening fence of a block may say. `console` and `text` are not run."""


class Block(NamedTuple):
    """A fenced block."""

    line: int
    """Of its fence."""
    kind: str
    text: str


class Command(NamedTuple):
    """A command line that a page shows."""

    line: int
    words: tuple[str, ...]
    mention: bool
    """In running text: names a command, and may leave out what it needs."""


class Change(NamedTuple):
    """What is run in place of what a page says."""

    page: str
    says: str
    """A piece of a block's text, as it stands there."""
    run: str
    why: str


EVERYWHERE = "*"
CHANGES: tuple[Change, ...] = (
    Change(EVERYWHERE, "http://10.0.0.7:8000", "$UPSTREAM", "a server that the twin plays"),
    Change(EVERYWHERE, "http://10.0.0.8:8000", "$UPSTREAM_2", "another one"),
    Change(EVERYWHERE, "http://127.0.0.1:8000", "$UPSTREAM", "any free port"),
    Change(EVERYWHERE, "http://127.0.0.1:8080", "$GATEWAY", "any free port"),
    Change(EVERYWHERE, "http://127.0.0.1:8081", "$ADMIN", "any free port"),
    Change(EVERYWHERE, "http://10.0.0.5:8081", "$ADMIN", "a controller that runs here"),
    Change(EVERYWHERE, "redis://10.0.0.9:6379/0", "$REDIS", "a Redis that runs here"),
    Change("docs/start.md", "replay shipped:demo", "replay part.parquet", "30 s of ten minutes"),
    Change("docs/scenarios.md", "scenario run peak", "scenario run peak --seed 1", "one seed of 3"),
    Change("docs/scenarios.md", "--seed 4 --seed 5", "--seed 4", "one seed of 2"),
    Change("docs/planning.md", "--trace shipped:demo", "--trace part.parquet --rows 100 --draws 1",
           "100 requests, one day: it would take a minute"),
    Change("docs/planning.md", "--grow 1,1.5,2,3", "--grow 1", "one load of 4"),
    Change("docs/planning.md", "n-1,ecc,spike", "n-1", "one fault of 3"),
    Change("docs/deployment.md", "--evidence ev.json", "--evidence ev.json --stages full:1",
           "stages take minutes"),
    Change("docs/deployment.md", "--to 3", "--to 2", "as many as were deployed here"),
    Change("docs/validation.md", "twinkeel validate", ": twinkeel validate",
           "takes more than a minute of two quiet cores; tests/unit and `loop-demo` run it"),
    Change("docs/forecast.md", "forecast train", "forecast train --no-check --members 1 --epochs 1",
           "a network that has learned nothing"),
)  # fmt: skip
"""Times on two quiet cores. Files that a page takes for given are made in ``GIVEN``."""

_PART = "twinkeel trace slice shipped:demo --from 240 --to 270 -o part.parquet"
_TUNED = "printf 'schema: 1\\nname: tuned\\nlimits: {user_per_s: 10}\\n' > tuned.yaml"
_EVIDENCE = "python -m tests.docs.snippets tuned.yaml"
GIVEN: dict[str, str] = {
    "docs/start.md": _PART,
    "docs/planning.md": _PART,
    "docs/deployment.md": f"{_TUNED}\ntwinkeel serve --upstream $UPSTREAM\n"
    f"{_EVIDENCE} build/controller/deploy.key",
    "docs/validation.md": f"{_TUNED}\nopenssl rand -hex 32 > made.key\n{_EVIDENCE} made.key",
    "docs/app.md": "twinkeel serve --upstream $UPSTREAM\n"
    "cp build/controller/admin.token build/controller/deploy.key .",
    "docs/chains.md": "twinkeel serve --upstream $UPSTREAM",
    "docs/forecast.md": "python -m tests.docs.snippets weeks",
}
"""By page, what runs first in its folder: files and a controller that it takes for given."""

PYTHON_GIVEN = {"docs/chains.md": "def query(customer, timeout):\n    return [customer]\n\n\n"}
"""By page, functions that its Python leaves to its reader."""

SHELL = r"""
with_addresses() { sed "s#\$GATEWAY#${GATEWAY:-}#; s#\$UPSTREAM#${UPSTREAM:-}#" "$1"; }
set -euo pipefail
running=()
stop() {
  for one in ${running[@]+"${running[@]}"}; do kill "$one" 2>/dev/null || true; done
  for one in ${running[@]+"${running[@]}"}; do wait "$one" || true; done
  running=()
}
trap stop EXIT
until_said() {  # what; the last program's output has it
  until grep -q "$1" said.txt; do kill -0 $! || { cat said.txt; exit 1; }; sleep 0.1; done
}
pip() { echo "not run: pip $*"; }
make() { echo "not run: make $*"; }
twinkeel() {  # what serves goes on beside the rest, on ports of its own
  case " $* " in
    *" --check "*) command twinkeel "$@";;
    " serve "*)
      stop
      : >said.txt
      command twinkeel "$@" --port 0 --admin-port 0 --unready-s 0 --drain-s 1 >said.txt 2>&1 &
      running+=($!)
      until_said "data in"
      GATEWAY=$(sed -n 's/^twinkeel serving //p' said.txt)
      ADMIN=$(cat build/controller/admin.url)
      export GATEWAY ADMIN;;
    " ui "*)
      : >said.txt
      command twinkeel "$@" --no-browser --port "$UI_PORT" >said.txt 2>&1 &
      local app=$!
      until_said "http://"
      kill "$app"; wait "$app" || true;;
    *) command twinkeel "$@";;
  esac
}
"""
"""What each page's script begins with. `pip` and `make` are not run: one changes the environment,
the other's targets take minutes and are run by themselves."""


def script(page: str) -> str:
    """The page's blocks for a shell, one after the other; "" if there is nothing to run."""
    parts: list[str] = []
    for block in blocks(page):
        text = changed(page, block)
        if block.kind == "bash":
            parts.append(text)
        elif block.kind == "python":
            name = f"block_{block.line}.py"
            text = PYTHON_GIVEN.get(page, "") + text
            parts.append(
                f"cat > {name}.in <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\n"
                f"with_addresses {name}.in > {name}\npython {name}\n"
            )
        else:
            continue
        parts[-1] = f"echo '-- {page}:{block.line}'\n{parts[-1]}"
    if not parts:
        return ""
    return "\n".join([SHELL, GIVEN.get(page, ""), *parts])


def needs_servers(text: str) -> bool:
    """Does a script ask for servers?"""
    return "$UPSTREAM" in text or "$GATEWAY" in text or "$ADMIN" in text


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    kind, start, lines = "", 0, list[str]()
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fence = line.strip()
        if not start and fence.startswith("```"):
            kind, start, lines = fence[3:].strip(), number, []
        elif start and fence == "```":
            found.append(Block(start, kind, "\n".join(lines) + "\n"))
            start = 0
        elif start:
            lines.append(line)
    assert not start, f"{page}:{start}: this fence is never closed"
    return found


def changed(page: str, block: Block) -> str:
    """The text of a block as it is run here."""
    text = block.text
    for change in CHANGES:
        if change.page in (page, EVERYWHERE):
            text = text.replace(change.says, change.run)
    return text


def commands(page: str, program: str) -> Iterator[Command]:
    """All command lines of a program (`twinkeel`, `make`), in blocks and in running text."""
    for block in blocks(page):
        if block.kind in ("bash", "console", "text"):
            for line, words in _block_commands(block, program):
                yield Command(line, words, mention=False)
    for line, code in _inline(page):
        for words in _split(code):
            words = words[1:] if words[:1] == ["$"] else words
            if words and _program(words[0]) == program:
                yield Command(line, tuple(words[1:]), mention=True)


def _block_commands(block: Block, program: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block.text, flags=re.M | re.S)
    text = re.sub(r"\\\n", " ", text)
    for at, line in enumerate(text.splitlines(), block.line + 1):
        bare = line.removeprefix("$ ")
        if block.kind != "bash" and not line.startswith("$ "):
            continue
        for words in _split(bare):
            if words and _program(words[0]) == program:
                yield at, tuple(words[1:])


def _program(word: str) -> str:
    return word.rpartition("/")[2]


def _split(line: str) -> Iterator[list[str]]:
    """The commands of a line, without what is redirected, and variables that are set before."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # not a shell's line
        return
    words: list[str] = []
    skip = False
    for token in tokens:
        if token in (";", "&", "&&", "|", "||", "(", ")", "$("):
            yield words
            words = []
        elif token in ("<", ">", ">>", ">&", "<<<"):
            skip = True
        elif skip:
            skip = False
        elif words or not re.match(r"^\w+=", token):
            words.append(token)
    yield words


def _inline(page: str) -> Iterator[tuple[int, str]]:
    """Code in running text: line and text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    block = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
    text = block.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        line = text.count("\n", 0, found.start()) + 1
        yield line, " ".join(found[1].split())


class _Anything(click.ParamType):
    """A file argument that is not looked at."""

    name = "anything"

    def convert(self, value: str, param: object, ctx: object) -> Path:
        return Path(value)


def parse(main: click.Group, words: Sequence[str], mention: bool) -> None:
    """Let the real command line parse it, and run nothing; files need not be there.

    Raises:
        click.ClickException: it does not take that.
    """
    command: click.Command = main
    context = click.Context(main, info_name="twinkeel")
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None and not command.invoke_without_command:
            raise click.UsageError(f"no command {name!r} in {context.command_path!r}", context)
        if found is None:
            rest.insert(0, name)
            break
        command = found
        context = click.Context(command, info_name=name, parent=context)
    if mention and not any(not word.startswith("-") for word in rest):
        rest = [word for word in rest if word not in ("--help", "-h")]
        known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        for word in rest:
            if word.partition("=")[0] not in known:
                raise click.NoSuchOption(word, ctx=context)
        return
    if any(word in ("--help", "-h", "--version") for word in rest):
        return
    _take(command, context, rest)


def _take(command: click.Command, context: click.Context, rest: list[str]) -> None:
    kept = [(param, param.type) for param in command.params]
    for param, kind in kept:
        if isinstance(kind, (click.Path, click.File)):
            param.type = _Anything()
    try:
        command.make_context(context.info_name, rest, parent=context.parent)
    finally:
        for param, kind in kept:
            param.type = kind


def main(what: str, *key: str) -> None:
    """Make what a page takes for given: evidence for a policy file, or weeks of traffic."""
    if what == "weeks":
        _weeks()
        return
    from controller.deployment.papers import load_key
    from policy.files import load_policy
    from tests.deploy_support import evidence_for

    made = evidence_for(load_policy(what), load_policy("stable"), load_key(Path(key[0])))
    made.write(Path())


def _weeks() -> None:
    import math

    from tests.support import write_rows

    for name in ("last-weeks", "this-week"):
        rows = [
            {"arrival_s": float(at_s), "prompt_tokens": 100, "output_tokens": 20}
            for at_s in range(0, 2 * 86_400, 60)
            for _ in range(1 + round(3 * math.sin(at_s / 13_750) ** 2))
        ]
        write_rows(Path(f"{name}.parquet"), rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
