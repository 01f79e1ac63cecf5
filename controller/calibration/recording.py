"""The designed load from its beginning to its end, and what is kept of it."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from controller.calibration import probe
from controller.calibration.caller import Caller, encode_sent
from controller.calibration.errors import CalibrationError
from controller.calibration.plan import MODEL_LEN_LEAST, ROUNDS, Ask, Phase, Planner, Room
from controller.calibration.server import Server
from controller.calibration.settings import from_config, from_pages, merge
from controller.calibration.sources import DETAILS, PLUGIN, LogSource, candidates, is_ours
from traces.steps import (
    KIND,
    STEPS_SCHEMA,
    Header,
    RequestRow,
    ServerSettings,
    StepRow,
    encode_header,
    encode_row,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from controller.calibration.server import Metrics
    from controller.calibration.sources import FileSource

STEPS_NAME, CLIENT_NAME = "steps.jsonl", "client.jsonl"
LOAD_S, QUICK_LOAD_S = 66.0, 18.0
"""Of all rounds together; warming up comes before."""
KNOCK_S_MOST = 5.0
"""How long records of an answered request may take to be in the file."""
SETTLE_S_MOST = 3.0
LOOK_S = 0.05


def record_load(
    engine_url: str,
    folder: Path,
    *,
    steps: Path | None = None,
    log: Path | None = None,
    settings: ServerSettings | None = None,
    given: Mapping[str, object] | None = None,
    quick: bool = False,
    load_s: float | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Path:
    """Run the designed load on the server and write ``steps.jsonl`` and ``client.jsonl``.

    Either both files are written or none, at the end.

    Args:
        engine_url: where vLLM serves; nobody else may use it meanwhile.
        folder: made if it is not there; older files of these names are replaced.
        steps: the plug-in's file, or its folder, where the server does not name it itself.
        log: vLLM's text log instead, with ``--enable-logging-iteration-details``.
        settings: the server's, where they are known; None: it is asked.
        given: settings that it may not tell, by their name in ``ServerSettings``.
        quick: about 25 s instead of 75.
        load_s: seconds for all rounds together, instead of what ``quick`` says.
        progress: is told what happens, and the share done (0 to 1).

    Returns:
        ``folder``.

    Raises:
        CalibrationError: no records, settings unknown, other traffic, a wrong answer.
    """
    told = progress or (lambda what, share: None)
    seconds = load_s or (QUICK_LOAD_S if quick else LOAD_S)

    async def run() -> _Load:
        async with Server(engine_url) as server:
            load = _Load(server, random.Random(seed or time.time_ns()), told)  # noqa: S311
            try:
                await load.begin(steps, log, settings, given or {})
                await load.play(seconds)
            finally:
                load.close()
            return load

    load = asyncio.run(run())
    load.write(folder)
    return folder


class _Load:
    """One run on one server."""

    def __init__(
        self, server: Server, dice: random.Random, told: Callable[[str, float], None]
    ) -> None:
        self._server = server
        self._dice = dice
        self._told = told
        self._source: FileSource | LogSource
        self._caller: Caller
        self._room: Room
        self._header: Header
        self._succeeded = 0
        """Requests that the server had answered before the first of ours."""
        self._rows: list[StepRow | RequestRow] = []
        self._recorded: set[str] = set()

    # ---- the beginning ----

    async def begin(
        self, steps: Path | None, log: Path | None, settings: ServerSettings | None,
        given: Mapping[str, object],
    ) -> None:  # fmt: skip
        """Find the records and the settings."""
        self._told("reading the server's settings", 0.0)
        metrics = await self._server.metrics()
        if metrics.running or metrics.waiting:
            raise CalibrationError(
                f"{self._server.url} is at work for somebody else ({metrics.running} requests "
                f"running, {metrics.waiting} waiting): calibrate when nobody else uses it"
            )
        if metrics.engines > 1:
            raise CalibrationError(
                f"{metrics.engines} engines are behind {self._server.url} and share its requests: "
                "calibrate a server with one (--data-parallel-size 1)"
            )
        self._succeeded = metrics.succeeded
        card = await self._server.model()
        sources = candidates(metrics.steps_paths, steps, log)
        # Sizes are not known yet; one short request fits anywhere.
        self._caller = Caller(self._server, card.served, Room(ServerSettings()), self._dice)
        try:
            self._source = await self._ours(sources)
        finally:
            for source in sources:
                if source is not getattr(self, "_source", None):
                    source.close()
        header = self._source.header
        if header is not None and not header.details:
            raise CalibrationError(
                f"{self._source.name}: the records do not say what each step computed: {DETAILS}"
            )
        if settings is None:
            read = [from_config(await self._server.config()), from_pages(metrics, card)]
            read = read if header is None else [header.settings, *read]
        else:
            read = [settings]
        settled = merge(read, given)
        if (settings_len := settled.max_model_len or 0) < MODEL_LEN_LEAST:
            raise CalibrationError(
                f"max_model_len is {settings_len}: at least {MODEL_LEN_LEAST} are needed"
            )
        self._header = _header(header, settled)
        self._room = Room(settled)
        self._caller.room = self._room

    async def _ours(self, sources: Sequence[FileSource | LogSource]) -> FileSource | LogSource:
        """The source that tells of a request that is sent now."""
        (knock,) = await self._caller.play(Phase(probe.NAME, (Ask(8, 4),), one_by_one=True))
        deadline_s = time.monotonic() + KNOCK_S_MOST
        others = False
        while time.monotonic() < deadline_s:
            for source in sources:
                rows = source.drain()
                requests = [row for row in rows if isinstance(row, RequestRow)]
                mine = any(is_ours(row) and knock.id in (row.id or "") for row in requests)
                if mine or (rows and isinstance(source, LogSource)):
                    self._keep(rows)
                    return source
                others = others or bool(rows)
            await asyncio.sleep(LOOK_S)
        names = ", ".join(source.name for source in sources)
        if isinstance(sources[0], LogSource):
            raise CalibrationError(
                f"{names}: no line 'Iteration(...)' of a request that was answered just now: "
                f"{DETAILS}, with TWINKEEL_STEPS_QUIET=0 if it has the plug-in for step records, "
                f"and give the log of the server at {self._server.url}"
            )
        why = "tells of other requests" if others else "has nothing new"
        raise CalibrationError(
            f"{names}: belongs to another server: it {why}, {KNOCK_S_MOST:.0f} s after one was "
            f"answered by {self._server.url}; give that server's file, or {PLUGIN}"
        )

    # ---- the load ----

    async def play(self, seconds: float) -> None:
        """Measure, plan, and send everything."""
        self._told("warming up, measuring its speed", 0.0)
        speed = await probe.measure(self._caller, self._room)
        await self._settle()
        planner = Planner(self._room, speed, seconds / ROUNDS, self._dice)
        rounds = [planner.round(number) for number in range(ROUNDS)]
        costs_s = [planner.seconds(phase) for phases in rounds for phase in phases]
        whole_s, done_s = sum(costs_s) or 1.0, 0.0
        place = 0
        for number, phases in enumerate(rounds, 1):
            for phase in phases:
                self._told(f"round {number} of {ROUNDS}: {phase.name}", done_s / whole_s)
                await self._caller.play(phase)
                await self._settle()
                done_s += costs_s[place]
                place += 1
        await self._complete()
        self._told("done", 1.0)

    async def _settle(self) -> None:
        """Wait until the engine is idle, and make sure that it worked for nobody else."""
        deadline_s = time.monotonic() + SETTLE_S_MOST
        while True:
            metrics = await self._server.metrics()
            if not (metrics.running or metrics.waiting) and self._extra(metrics) == 0:
                break
            if self._extra(metrics) > 0 or time.monotonic() > deadline_s:
                raise self._disturbed(metrics)
            await asyncio.sleep(LOOK_S)
        self._keep(self._source.drain())

    def _extra(self, metrics: Metrics) -> int:
        """Requests that the server answered beside ours."""
        return metrics.succeeded - self._succeeded - self._caller.sequences

    def _disturbed(self, metrics: Metrics) -> CalibrationError:
        extra = self._extra(metrics)
        what = f"{extra} requests answered that are not ours" if extra > 0 else "its count is off"
        return CalibrationError(
            f"{self._server.url} had other traffic during the calibration ({what}, "
            f"{metrics.running} running): calibrate when nobody else uses it"
        )

    def _keep(self, rows: Sequence[StepRow | RequestRow]) -> None:
        for row in rows:
            if isinstance(row, RequestRow):
                if not is_ours(row):
                    raise CalibrationError(
                        f"{self._server.url} had other traffic during the calibration (request "
                        f"{row.id}): calibrate when nobody else uses it"
                    )
                self._recorded.add(row.id or "")
        self._rows += rows

    async def _complete(self) -> None:
        """Wait until the last requests are in the records."""
        if not self._source.tells_requests:
            self._keep(self._source.drain())
            return
        deadline_s = time.monotonic() + KNOCK_S_MOST
        answered = self._caller.sequences
        while len(self._recorded) < answered:
            if time.monotonic() > deadline_s:
                raise CalibrationError(
                    f"{self._source.name}: {len(self._recorded)} of {answered} requests "
                    "are recorded: the writer left some out; is the disk full?"
                )
            await asyncio.sleep(LOOK_S)
            self._keep(self._source.drain())

    def close(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None:
            source.close()

    # ---- what is kept ----

    def write(self, folder: Path) -> None:
        """Both files, whole.

        Raises:
            OSError: the disk.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sent = sorted(self._caller.answered, key=lambda each: each.sent_ns)
        lines = [encode_header(self._header), *[encode_row(row) for row in self._rows]]
        parts = {
            STEPS_NAME: lines,
            CLIENT_NAME: [encode_sent(each) for each in sent],
        }
        written = [(folder / f"{name}.part", folder / name, parts[name]) for name in parts]
        try:
            for part, _, content in written:
                part.write_bytes(b"".join(content))
            for part, path, _ in written:
                part.replace(path)
        finally:
            for part, _, _ in written:
                part.unlink(missing_ok=True)


def _header(found: Header | None, settings: ServerSettings) -> Header:
    """Of what is written: the server's own, with all settings that are known."""
    if found is None:
        return Header(
            STEPS_SCHEMA, KIND, None, None, 0, time.time_ns(), time.monotonic_ns(), True, settings
        )
    return Header(
        found.schema, found.kind, found.vllm, found.plugin, found.engine, found.wall_ns,
        found.mono_ns, found.details, settings,
    )  # fmt: skip
