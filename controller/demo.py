"""The live demo: servers, a controller, callers, a fault, and the proof afterwards.

    python -m controller.demo                          # two simulated H100s, no GPU needed
    python -m controller.demo --upstream http://...    # servers that run already; none is killed

Everything is real but the servers' engines: processes, HTTP, streams. It ends by itself, leaves no
process, and exits with 1 if a request had no outcome or the decision log does not replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import click
import msgspec

from controller.admin.status import Status
from controller.cli import fetch, show
from policy.audit import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROFILE = "h100-sxm/qwen3-8b"
START_S = 30.0
STOP_S = 15.0
BACK_S = 15.0
"""Until a server that was started again has to be in use again."""
CALL_S = 30.0
DATA = Path("build/live-demo")


class DemoError(Exception):
    """Something that the demo needs did not come."""


class Load(NamedTuple):
    """What callers send."""

    seconds: float = 15.0
    rate: float = 12.0
    """Requests per second."""
    words_most: int = 1500
    """Of the longest prompts."""
    tokens_most: int = 96
    """Of the longest answers."""
    seed: int = 1


class Ask(NamedTuple):
    """One request."""

    at_s: float
    sla: str
    user: str
    words: int
    max_tokens: int
    stream: bool


class Told(NamedTuple):
    """What became of it, as its caller saw it."""

    ask: Ask
    outcome: str
    """answered, degraded, an error's code, or cut: the connection ended without any of these."""
    tier: str
    ttft_ms: float
    """Of streams, in the caller's clock; -1: there was no token."""


# Processes


class Process:
    """A command that says on its standard output that it serves."""

    def __init__(self, name: str, command: Sequence[str], log: Path, said: str) -> None:
        self.name = name
        self._command = list(command)
        self._log = log
        self._said = said
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines:
                if line.startswith(self._said):
                    self.url = line.removeprefix(self._said).strip()
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        tail = "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        raise DemoError(f"{self.name} does not serve; {self._log} ends with:\n{tail}")

    def again(self) -> None:
        """Start it once more, where it was."""
        port = str(urlsplit(self.url).port)
        self._command[self._command.index("--port") + 1] = port
        self.begin()

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """Ask it to end, then make it; its exit code."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(STOP_S)
            self.kill()
        return self._process.wait()


def twin_server(number: int, folder: Path) -> Process:
    """A simulated server in real time."""
    command = [sys.executable, "-m", "twin.serve", "--profile", PROFILE, "--port", "0"]
    log = folder / f"server-{number}.txt"
    return Process(f"server {number}", command, log, "twin serving ")


def controller(upstreams: Sequence[str], folder: Path) -> Process:
    """`twinkeel serve` in front of them."""
    command = [
        sys.executable, "-m", "twinkeel", "serve", "--policy", "stable", "--port", "0",
        "--admin-port", "0", "--data", str(folder / "data"), "--unready-s", "0", "--scrape-s", "1",
    ]  # fmt: skip
    for upstream in upstreams:
        command += ["--upstream", upstream]
    return Process("the controller", command, folder / "controller.txt", "twinkeel serving ")


def admin_url(folder: Path) -> str:
    """Where the controller said its admin API is."""
    for line in (folder / "controller.txt").read_text(encoding="utf-8").splitlines():
        if "admin API " in line:
            return line.partition("admin API ")[2].partition(",")[0]
    raise DemoError("the controller did not say where its admin API is")


# Callers


def planned(load: Load) -> list[Ask]:
    """Interactive, standard and background requests, mixed; the same for the same seed."""
    draw = random.Random(load.seed)  # noqa: S311
    asks: list[Ask] = []
    at_s = 0.0
    while True:
        at_s += draw.expovariate(load.rate)
        if at_s >= load.seconds:
            return asks
        sla = draw.choices(("P0", "P1", "P2"), (5, 3, 2))[0]
        share = {"P0": 0.15, "P1": 0.4, "P2": 1.0}[sla]
        asks.append(
            Ask(
                at_s,
                sla,
                f"user-{draw.randrange(30)}",
                max(5, round(load.words_most * share * draw.uniform(0.3, 1.0))),
                max(4, round(load.tokens_most * share * draw.uniform(0.5, 1.0))),
                draw.random() < 0.7,
            )
        )


async def call(session: aiohttp.ClientSession, url: str, model: str, ask: Ask) -> Told:
    """Send a request, and see what its caller sees."""
    draw = random.Random(ask.at_s)  # noqa: S311
    words = " ".join(
        draw.choices(("tide", "keel", "harbour", "rope", "north", "lamp"), k=ask.words)
    )
    body = {
        "model": model, "max_tokens": ask.max_tokens, "stream": ask.stream, "ignore_eos": True,
        "messages": [{"role": "user", "content": words}],
    }  # fmt: skip
    headers = {"x-twinkeel-sla": ask.sla, "x-twinkeel-user": ask.user}
    started = time.monotonic()
    tier, ttft_ms = "-", -1.0
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            tier = answer.headers.get("x-twinkeel-tier", "-")
            if answer.status != 200:
                return Told(ask, str((await answer.json())["error"]["code"]), tier, -1.0)
            degraded = "degraded" if "x-twinkeel-degraded" in answer.headers else "answered"
            if not ask.stream:
                whole = (await answer.json())["choices"][0]["message"]["content"]
                return Told(ask, degraded if whole else "empty", tier, -1.0)
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    return Told(ask, degraded if ttft_ms >= 0 else "empty", tier, ttft_ms)
                event = json.loads(line[6:])
                if "error" in event:
                    return Told(ask, str(event["error"]["code"]), tier, ttft_ms)
                if ttft_ms < 0 and any(one["delta"].get("content") for one in event["choices"]):
                    ttft_ms = (time.monotonic() - started) * 1000
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass
    return Told(ask, "cut", tier, ttft_ms)


async def send(url: str, asks: Sequence[Ask], faults: Sequence[tuple[float, Callable[[], None]]]
               ) -> list[Told]:  # fmt: skip
    """All requests at their times, with the faults at theirs."""
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.get(f"{url}/v1/models") as answer:
            model = str((await answer.json())["data"][0]["id"])
        began = time.monotonic()

        async def one(ask: Ask) -> Told:
            await asyncio.sleep(ask.at_s - (time.monotonic() - began))
            return await call(session, url, model, ask)

        async def fault(at_s: float, act: Callable[[], None]) -> None:
            await asyncio.sleep(at_s - (time.monotonic() - began))
            await asyncio.to_thread(act)

        told, _ = await asyncio.gather(
            asyncio.gather(*(one(ask) for ask in asks)),
            asyncio.gather(*(fault(at_s, act) for at_s, act in faults)),
        )
        return list(told)


# The demo


def run(upstreams: Sequence[str] = (), load: Load | None = None, folder: Path = DATA) -> int:
    """The whole of it; the exit code.

    Args:
        upstreams: servers that run already, as ``twinkeel serve --upstream`` takes them; without
            any, two simulated ones are started, of which one is killed and comes back.
    """
    load = load or Load()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            return _run(list(upstreams), load, folder, stack)
    except DemoError as error:
        click.echo(f"Error: {error}", err=True)
        return 1


def _run(upstreams: list[str], load: Load, folder: Path, stack: contextlib.ExitStack) -> int:
    faults: list[tuple[float, Callable[[], None]]] = []
    if not upstreams:
        servers = [twin_server(number, folder) for number in range(2)]
        for server in servers:
            stack.callback(server.stop)
            server.begin()
        for server in servers:
            server.wait()
        upstreams = [server.url for server in servers]
        victim = servers[0]
        faults = [(load.seconds / 3, victim.kill), (load.seconds * 0.55, victim.again)]
    gate = controller(upstreams, folder)
    stack.callback(gate.stop)
    gate.start()
    admin = admin_url(folder)
    token = (folder / "data" / "admin.token").read_text(encoding="utf-8").strip()
    until_up(admin, token, len(upstreams), START_S)
    asks = planned(load)
    click.echo(
        f"{len(asks)} requests in {load.seconds:.0f} s through {gate.url} to {len(upstreams)}"
        " servers" + (f"; {servers[0].url} is killed, and comes back" if faults else "")
    )
    told = asyncio.run(send(gate.url, asks, faults))
    back = until_up(admin, token, len(upstreams), BACK_S)
    status = status_at(admin, token)
    code = gate.stop()
    show(status)
    _print_tiers(told, status)
    wrong = list(_wrong(asks, told, status, back, code))
    steps = _audit(folder / "data" / "log", wrong)
    click.echo(f"decision log: {steps}")
    click.echo(f"look at one request: twinkeel explain {folder / 'data' / 'log'} NUMBER")
    for each in wrong:
        click.echo(f"Error: {each}", err=True)
    return 1 if wrong else 0


def status_at(admin: str, token: str) -> Status:
    return msgspec.json.decode(fetch(admin, "/status", token), type=Status)


def until_up(admin: str, token: str, count: int, timeout_s: float) -> bool:
    """Whether ``count`` servers take requests in time. One that is probing does: it is back in
    rotation after the next requests, which may not come any more."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = status_at(admin, token)
        if sum(row.up and row.rotation in ("in", "probing") for row in status.replicas) >= count:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _print_tiers(told: Sequence[Told], status: Status) -> None:
    """What the callers measured themselves."""
    promises = {row.tier: row.promise_ms for row in status.tiers}
    click.echo("what the callers saw")
    click.echo(
        f"{'tier':<10}{'requests':>9}{'streams':>9}{'TTFT p50':>10}{'p95 ms':>9}{'promise':>9}"
    )
    for tier in sorted({one.tier for one in told}):
        mine = [one for one in told if one.tier == tier]
        ttft = sorted(one.ttft_ms for one in mine if one.ttft_ms >= 0)
        p50, p95 = (
            f"{ttft[max(0, -(-len(ttft) * share // 100) - 1)]:.1f}" if ttft else "-"
            for share in (50, 95)
        )
        promise = promises.get(tier, -1)
        shown = str(promise) if promise >= 0 else "-"
        click.echo(f"{tier:<10}{len(mine):>9}{len(ttft):>9}{p50:>10}{p95:>9}{shown:>9}")
    counted = {name: sum(one.outcome == name for one in told) for name in
               sorted({one.outcome for one in told})}  # fmt: skip
    click.echo("outcomes: " + ", ".join(f"{name} {count}" for name, count in counted.items()))


def _wrong(
    asks: Sequence[Ask], told: Sequence[Told], status: Status, back: bool, code: int
) -> Iterator[str]:
    cut = sum(one.outcome in ("cut", "empty") for one in told)
    if cut or len(told) != len(asks):
        yield f"{cut + len(asks) - len(told)} of {len(asks)} callers were left without an outcome"
    if status.open_requests or status.settled_requests != len(asks):
        yield (
            f"the controller has {status.open_requests} requests open and"
            f" {status.settled_requests} settled, of {len(asks)}"
        )
    if status.refused_events:
        yield f"the policy refused {status.refused_events} events"
    if not back:
        yield f"after {BACK_S:.0f} s not every server was in use"
    if code:
        yield f"the controller ended with {code}"


def _audit(log: Path, wrong: list[str]) -> str:
    """Replay the decision log, and say how it went."""
    segments = sorted(log.glob("decisions.*.log"), key=lambda path: int(path.name.split(".")[1]))
    if not segments:
        wrong.append(f"there is no decision log in {log}")
        return "missing"
    difference = replay(path.read_bytes() for path in segments)
    if difference is not None:
        wrong.append(f"the log replays differently from record {difference.record} on")
        return "replays differently"
    return f"{len(segments)} segments, replayed: the same decisions byte for byte"


@click.command()
@click.option(
    "--upstream", "upstreams", multiple=True, metavar="URL[,...]",
    help="A server that runs already; repeat for each.  [default: two simulated ones]",
)  # fmt: skip
@click.option("--seconds", default=Load().seconds, show_default=True, help="Of load.")
@click.option("--rate", default=Load().rate, show_default=True, help="Requests per second.")
def main(upstreams: tuple[str, ...], seconds: float, rate: float) -> None:
    """Show the controller at work."""
    raise SystemExit(run(upstreams, Load(seconds=seconds, rate=rate)))


if __name__ == "__main__":
    main()
