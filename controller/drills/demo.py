"""The demo fleet: a controller of its own with served twins, and callers, for drills that harm
nobody.

Two replicas and a warm standby of one model, each in a failure domain of its own; the standby
serves when one of the two is lost. Everything lives in one folder, and ends with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from controller.admin.token import ADDRESS_FILE
from controller.demo import PROFILE, DemoError, Load, Process, Told, planned, send
from controller.drills.asking import Admin, DrillError, at_rest, serving
from controller.fleet.processes import running_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from policy.drills import DrillKind

MODEL = "qwen3-8b"
REPLICAS, STANDBYS = 2, 1
UP_S_MOST = 90.0
"""Until three servers have started and answered their first prompts, on a busy machine."""
SCRAPE_S = 1.0
LOAD = Load(rate=24.0, words_most=600, tokens_most=48)
"""Two replicas bear it easily, and one could, too."""


class Seats(NamedTuple):
    """Where the demo fleet runs, and what its processes find there."""

    gpus: tuple[tuple[str, ...], ...] = ((), (), ())
    """UUIDs of each slot's card or MIG slice: the replicas, then the standby."""
    environ: Mapping[str, str] = {}
    """Of the controller."""


class DemoFleet:
    """A context manager: the fleet runs while it is open.

    Args:
        folder: of its files; it must exist.
        kind: the drill that it is for: for ``network`` there is a proxy before each engine.
        fault: what is wrong with each engine from its beginning, as ``--fault`` of
            ``twin.serve`` takes it; empty: nothing.
    """

    profiles: Mapping[str, str] = {MODEL: PROFILE}

    program: Sequence[str] = (sys.executable, "-m", "twinkeel")

    def __init__(
        self, folder: Path, kind: DrillKind, seats: Seats | None = None, fault: str = ""
    ) -> None:
        self._folder = folder
        self._fault = fault
        self._kind = kind
        self._seats = seats or Seats()
        self._process: Process | None = None
        self.data = folder / "data"
        self.gateway = ""
        self.admin = Admin("", "")

    def __enter__(self) -> DemoFleet:
        file = self._folder / "fleet.json"
        file.write_text(json.dumps(self.file(), indent=1), encoding="utf-8")
        command = [
            *self.program, "serve", "--fleet", str(file), "--policy", "stable",
            "--port", "0", "--admin-port", "0", "--data", str(self.data), "--unready-s", "0",
            "--scrape-s", f"{SCRAPE_S:g}", "--drain-s", "10",
        ]  # fmt: skip
        if self._seats.environ:
            given = [f"{key}={value}" for key, value in self._seats.environ.items()]
            command = ["env", *given, *command]
        log = self._folder / "controller.txt"
        self._process = Process("the controller", command, log, "twinkeel serving ")
        try:
            self._process.start()
            self.gateway = self._process.url
            token = (self.data / "admin.token").read_text(encoding="utf-8").strip()
            address = (self.data / ADDRESS_FILE).read_text(encoding="utf-8").strip()
            self.admin = Admin(address, token)
            self.admin.wait(
                "each replica serving and the standby warm",
                lambda view: at_rest(view) and serving(view) == REPLICAS,
                UP_S_MOST,
            )
        except DemoError as error:
            self.close()
            raise DrillError(str(error)) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> int:
        """Let the controller end, and with it all that it started; its exit code."""
        process, self._process = self._process, None
        return 0 if process is None else process.stop()

    def crash(self) -> None:
        """The controller dies on the spot; its servers live on. It may be entered again."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def left(self) -> int:
        """How many processes of its servers there are now."""
        return len(running_in(self.data / "fleet"))

    def file(self) -> dict[str, Any]:
        """The fleet file."""
        engine = [
            sys.executable, "-m", "twin.serve", "--profile", PROFILE, "--version", "{version}",
            "--host", "{host}", *(["--fault", self._fault] if self._fault else []), "--port",
        ]  # fmt: skip
        command = [*engine, "{port}"]
        places: list[dict[str, Any]] = [
            {"gpus": list(gpus)} if gpus else {"domain": f"host0/card{number}"}
            for number, gpus in enumerate(self._seats.gpus)
        ]
        if self._kind == "network":
            command = [
                sys.executable, "-m", "controller.drills.proxy", "--host", "{host}",
                "--port", "{port}",
            ]  # fmt: skip
            for number, place in enumerate(places):
                state = self._folder.absolute() / f"link-{number}.json"
                place["args"] = ["--state", str(state), "--", *engine, "{inner}"]
        return {
            "schema": 1,
            "backoff": {"first_s": 1, "most_s": 1},
            "models": {
                MODEL: {
                    "versions": {"v1": MODEL}, "version": "v1", "command": command,
                    "profile": PROFILE, "replicas": places[:REPLICAS],
                    "standbys": [{**place, "warm": True} for place in places[REPLICAS:]],
                    "stop_s_most": 5, "memory_mb": 1,
                }
            },
        }  # fmt: skip

    def traffic(
        self, seconds: float, at: Sequence[tuple[float, Callable[[], None]]], seed: int = 1
    ) -> list[Told]:
        """Send traffic for so long, do what is to be done at its times, and say what became of
        every request for its caller.

        Requests come at even distances: with Poisson's it is chance how many are in flight at the
        fault, and how soon the next ones come, and no twin can know it. All are streams: a recorded
        trace does not tell which are, and the twin takes them for that.
        """
        count = round(seconds * LOAD.rate)
        asks = [
            ask._replace(stream=True, at_s=number / LOAD.rate)
            for number, ask in enumerate(planned(LOAD._replace(seconds=2 * seconds, seed=seed)))
        ][:count]
        return asyncio.run(send(self.gateway, asks, at))
