"""Traces and policy files that were uploaded, kept by what is in them: a name means one content."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from policy.files import FileError, parse_policy, policy_names
from traces import TraceError, open_trace, shipped_traces

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "upload:"
_DIGITS = 16
_STEM_BYTES = 180
"""Of a name, so that with all that is added a file system takes it."""
_NAME = re.compile(
    r"upload:(?P<stem>[\w.-]{1,180})~(?P<digest>[0-9a-f]{16})\.(?P<kind>trace|policy)"
)
_PLAIN = re.compile(r"[\w-]+")
"""What may be a preset's name and is no path."""
ENDINGS = {"trace": ".parquet", "policy": ".yaml"}


class Kept(NamedTuple):
    """What an upload became."""

    name: str
    """By which a scenario names it."""
    note: str
    """What was left out or is not understood; empty: nothing."""


class Shelf:
    """The uploads in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def traces(self) -> list[str]:
        """Names of all traces, the shipped ones first."""
        return [f"shipped:{name}" for name in shipped_traces()] + self._names("trace")

    def policies(self) -> list[str]:
        """Names of all policies, the presets first."""
        return [*policy_names(), *self._names("policy")]

    def path_of(self, name: str) -> Path | str:
        """What the command line calls it: the kept file, or the name itself.

        A path is no name: what is kept is found by its name, and a link must not open any file of
        this machine.

        Raises:
            TraceError, FileError: it was uploaded somewhere else, is not kept any more, or is none
                of the shipped ones.
        """
        if name.startswith("shipped:") or _PLAIN.fullmatch(name):
            return name
        match = _NAME.fullmatch(name)
        path = self._path(match["stem"], match["digest"], match["kind"]) if match else None
        if path is None or not path.is_file():
            if name.startswith(PREFIX):
                text = "it is not among the uploads here: upload it again"
            else:
                text = "it is none of the shipped ones: upload it, and choose the upload"
            if name.endswith((".policy", ".yaml", ".yml")):
                raise FileError(name, text)
            raise TraceError(f"{name}: {text}")
        return path

    def add_trace(
        self, filename: str, content: bytes, progress: Callable[[int], None] = lambda rows: None
    ) -> Kept:
        """Read a trace, in any format that ``twinkeel trace import`` guesses, and keep it.

        Raises:
            TraceError: which row or column cannot be used, and why; nothing is kept.
        """
        from traces.readers import import_trace

        stem, digest = _stem(filename), sha256(content).hexdigest()[:_DIGITS]
        target = self._path(stem, digest, "trace")
        name = f"{PREFIX}{stem}~{digest}.trace"
        if target.is_file():
            return Kept(name, "")
        self._folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self._folder, prefix=".upload-") as scratch:
            source = Path(scratch) / f"{stem}{_suffix(filename)}"
            source.write_bytes(content)
            made = Path(scratch) / "made.parquet"
            try:
                report = import_trace(source, made, trace_id=stem, progress=progress)
                open_trace(made)
            except TraceError as error:
                raise TraceError(str(error).replace(str(source), filename)) from error
            made.replace(target)
        return Kept(name, "; ".join(report.warnings))

    def add_policy(self, filename: str, text: str) -> Kept:
        """Check a policy file and keep it.

        Raises:
            FileError: which key is wrong.
        """
        parse_policy(text, filename)
        stem, digest = _stem(filename), sha256(text.encode()).hexdigest()[:_DIGITS]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path(stem, digest, "policy").write_text(text, encoding="utf-8")
        return Kept(f"{PREFIX}{stem}~{digest}.policy", "")

    def _path(self, stem: str, digest: str, kind: str) -> Path:
        return self._folder / f"{stem}~{digest}{ENDINGS[kind]}"

    def _names(self, kind: str) -> list[str]:
        ending = ENDINGS[kind]
        found = sorted(self._folder.glob(f"*~*{ending}"), key=lambda path: -path.stat().st_mtime)
        return [f"{PREFIX}{path.name.removesuffix(ending)}.{kind}" for path in found]


def label(name: str) -> str:
    """A short name for people."""
    match = _NAME.fullmatch(name)
    return match["stem"] if match else name


def _stem(filename: str) -> str:
    stem = re.sub(r"[^\w.-]+", "-", Path(filename).name.partition(".")[0]).strip("-.")
    return stem.encode()[:_STEM_BYTES].decode(errors="ignore") or "upload"


def _suffix(filename: str) -> str:
    """By which readers know a format or a compression."""
    found = re.fullmatch(r"\.\w{1,9}", Path(filename).suffix, re.ASCII)
    return found[0].lower() if found else ""
