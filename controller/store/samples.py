"""Texts of a share of the requests, redacted: for people who look at why an answer was as it was.

Off unless it is asked for. Each line of a file in ``data/samples`` is a request with its prompt and
its answer, as ``controller.store.redaction`` leaves them. Files are private, and the oldest go when
all together take too much room. Of a chain all steps are kept, or none. The work is done by a
thread; where it has too much of it, requests are left out.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from controller.gateway.asking import prompt_text
from controller.listener import Listener
from controller.store.redaction import cut
from controller.telemetry.chain_traces import derived

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from controller.call import Call
    from controller.store.redaction import Redactor
    from policy.decisions import Settled

FOLDER = "samples"
BYTES_MOST = 64 * 1024 * 1024
FILE_BYTES_MOST = 8 * 1024 * 1024
WAITING_MOST = 256
WAITING_BYTES_MOST = 32 * 1024 * 1024
"""Of answers that wait to be read."""
ANSWER_BYTES_MOST = 4 * 1024 * 1024
"""Larger answers are not looked into."""


class Sample(msgspec.Struct, frozen=True):
    """A request. Names are redacted, too, so it is found by ``key``."""

    key: str
    at_s: float
    chain: str
    step: str
    request: str
    model: str
    endpoint: str
    outcome: str
    why: str
    prompt: str
    answer: str
    """Empty: there was none of its own."""


class Samples(Listener):
    """Keeps them.

    Args:
        folder: made when the first is kept.
        share: of the requests, 0 to 1.
        on_trouble: is told, in the thread, why one could not be kept.
        wall_s: time of day.
    """

    def __init__(
        self,
        folder: Path,
        share: float,
        redactor: Redactor,
        *,
        on_trouble: Callable[[str], object] = lambda text: None,
        bytes_most: int = BYTES_MOST,
        file_bytes_most: int = FILE_BYTES_MOST,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.kept = self.failed = self.dropped = 0
        """Samples: on disk; that the disk did not take; for which there was no room in the
        queue."""
        self._folder = folder
        self._below = round(share * (1 << 32))
        self._redact = redactor.redact
        self._on_trouble = on_trouble
        self._bytes_most, self._file_bytes_most = bytes_most, file_bytes_most
        self._wall_s = wall_s
        # Each is written in one thread only: asked for in the loop's, done in the other.
        self._asked = self._asked_bytes = self._done = self._done_bytes = 0
        self._file: Path | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="samples")

    # The listener

    def arrived(self, call: Call) -> None:
        asked = call.asked
        if asked.chain:
            call.sampled = derived(asked.user, asked.chain)[2] < self._below
        else:
            call.sampled = crc32(call.name.encode()) < self._below

    def settled(self, call: Call, settled: Settled) -> None:
        if not call.sampled:
            return
        answer = b""
        if settled.outcome in ("answered", "degraded"):
            answer = call.body or call.kept
        size = len(answer)
        waiting_bytes = self._asked_bytes - self._done_bytes + size
        if self._asked - self._done >= WAITING_MOST or waiting_bytes > WAITING_BYTES_MOST:
            self.dropped += 1
            return
        self._asked += 1
        self._asked_bytes += size
        asked = call.asked
        sample = Sample(
            key_of(asked.user, asked.chain, call.name), self._wall_s(), asked.chain, asked.step,
            call.name, asked.model, asked.endpoint, settled.outcome, settled.why,
            cut(prompt_text(asked)), "",
        )  # fmt: skip
        self._executor.submit(self._take, sample, answer)

    def close(self) -> None:
        """Finish what waits."""
        self._executor.shutdown()

    # In the thread

    def _take(self, sample: Sample, answer: bytes) -> None:
        try:
            self._write(sample, answer)
            self.kept += 1
        except Exception as error:  # whatever it is: it must not be kept as it came
            self.failed += 1
            self._on_trouble(f"a sample was not kept: {self._folder}: {error}")
        finally:
            self._done += 1
            self._done_bytes += len(answer)

    def _write(self, sample: Sample, answer: bytes) -> None:
        redact = self._redact
        line = msgspec.json.encode(
            msgspec.structs.replace(
                sample,
                chain=redact(sample.chain),
                step=redact(sample.step),
                request=redact(sample.request),
                prompt=redact(sample.prompt),
                answer=redact(answer_text(answer)),
            )
        )
        handle = os.open(self._open_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "ab") as file:
            file.write(line + b"\n")

    def _open_file(self) -> Path:
        """Where the next line goes; the oldest files make room for it."""
        if self._file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif self._file.stat().st_size < self._file_bytes_most:
            return self._file
        files = files_in(self._folder)
        number = int(files[-1].stem) + 1 if files else 1
        self._file = self._folder / f"{number:08d}.jsonl"
        self._file.touch(0o600)
        room = self._bytes_most - self._file_bytes_most
        kept = sum(file.stat().st_size for file in files)
        for file in files:
            if kept <= room:
                break
            kept -= file.stat().st_size
            file.unlink(missing_ok=True)
        return self._file


def key_of(user: str, chain: str, request: str) -> str:
    """By which a request's sample is found."""
    names = f"{len(user)}:{user}{len(chain)}:{chain}{request}"
    return blake2b(names.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """The files of a folder, the oldest first."""
    found = [path for path in folder.glob("*.jsonl") if path.stem.isascii() and path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))


def find_samples(folder: Path, keys: Collection[str]) -> dict[str, Sample]:
    """Those of these keys that are kept, each by its key; of one key the youngest."""
    decode = msgspec.json.Decoder(Sample).decode
    wanted = {key.encode() for key in keys}
    found: dict[str, Sample] = {}
    for file in files_in(folder):
        with file.open("rb") as lines:
            for line in lines:
                # The key stands first; a line that a crash cut off is left out.
                if line[8:40] in wanted and line.endswith(b"\n"):
                    sample = decode(line)
                    found[sample.key] = sample
    return found


def answer_text(body: bytes) -> str:
    """What an answer says, calls of tools and reasoning with it; empty: nothing that is text."""
    if not body or len(body) > ANSWER_BYTES_MOST:
        return ""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    choices = document.get("choices") if isinstance(document, dict) else None
    texts: list[str] = []
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            texts += _texts_of(choice)
    return "\n".join(texts)


def _texts_of(choice: dict[str, Any]) -> list[str]:
    message = choice.get("message")
    parts: list[Any] = [choice.get("text")]
    if isinstance(message, dict):
        parts += [message.get(name) for name in ("reasoning_content", "reasoning", "content")]
        calls = message.get("tool_calls")
        parts.append(msgspec.json.encode(calls).decode() if calls else None)
    return [part for part in parts if isinstance(part, str) and part]
