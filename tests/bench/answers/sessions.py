"""Two thousand users in sessions, live: limits by key against one limit for everybody.

The users are those of the scenario ``sessions``, drawn by the same code and seed as in the twin;
here their messages go over HTTP to a controller in front of two twin-served replicas, in real time.
What is said of them is read from the controllers' decision logs. Answers come in one piece: with
streams the sending of each token, not the queue, would be what is measured on a small machine.

A message asks for as many tokens as the scenario's user would get, so the policy knows a bound that
the twin's does not.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from policy.decisions import Dispatch, Settled
from policy.events import Arrived
from policy.parameters import render
from tests.bench.gateway import process
from tests.bench.gateway.client import Client
from tests.bench.gateway.logs import records
from tests.figures import Figure, show
from twin.calls import Result
from twin.clients import SessionClients, Sessions, Setting
from twin.figures.contexts import Contexts
from twin.scenario.files import load_scenario, policy_of
from twin.scenario.play import run_scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.gateway.client import Exchange
    from twin.arrivals import Asked
    from twin.scenario.files import Scenario
    from twin.world import World

SCENARIO, SEED = "sessions", 1
RUNS = ("one_limit", "by_key")
NS = 1_000_000_000
BYTES_PER_TOKEN = 4  # as the served twin counts them
LEFT_S = 150.0
"""How long what is under way may take after the last message."""
QUICK_S, QUICK_WARM_UP_S = 100.0, 60.0


class Seen(NamedTuple):
    """What a decision log says."""

    waits_s: list[float]
    """From arrival to dispatch, of messages that came after the warm-up."""
    contexts: dict[str, Any]
    outcomes: dict[str, int]


class LiveWorld:
    """A world for the twin's clients whose time is real and whose answers come over HTTP."""

    retry_attempts = 0

    def __init__(self, client: Client) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._began_s = monotonic()
        self._serial = 0
        self._sent: dict[int, Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients = 0

    @property
    def now_ns(self) -> int:
        return round((monotonic() - self._began_s) * NS)

    def after(self, delay_ns: int, then: Callable[[object], object]) -> None:
        self._loop.call_later(delay_ns / NS, then, None)

    def offer(self, asked: Asked) -> int:
        self._serial += 1
        number = self._serial
        task = self._loop.create_task(self._ask(number, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return number

    async def over(self, within_s: float) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=within_s)

    def cancel(self, number: int) -> None:
        self._sent[number].leave("left")

    async def _ask(self, number: int, asked: Asked) -> None:
        body = msgspec.json.encode(
            {
                "model": asked.model[0], "prompt": prompt(asked), "ignore_eos": True,
                "max_tokens": asked.output_tokens[0],
            }
        )  # fmt: skip
        named = {
            "user": asked.user[0], "session": asked.session[0], "line": asked.line[0],
            "sla": asked.sla[0], "deadline-ms": str(asked.deadline_ns[0] // 1_000_000),
        }  # fmt: skip
        headers = "".join(f"x-twinkeel-{name}: {value}\r\n" for name, value in named.items())
        data = self._client.request("POST", "/v1/completions", body, headers.encode())
        exchange = self._sent[number] = self._client.send(data)
        answer = await exchange.done
        del self._sent[number]
        outcome = "answered" if answer.kind == "ok" else answer.kind
        tokens = asked.output_tokens[0] if outcome == "answered" else 0
        result = _result(outcome, answer.status, tokens)
        asked.settled(result, Settled(number, "answered"))


def _result(outcome: str, status: int, tokens: int) -> Result:
    """What a client is told: the rest only the twin knows."""
    return Result(
        outcome=outcome, why="", tier="", http_code=status, replica=-1, tries=1, arrival_ns=-1,
        settled_ns=-1, dispatched_ns=-1, scheduled_ns=-1, first_ns=-1, last_ns=-1, first_out_ns=-1,
        cached_tokens=0, output_tokens=tokens, preemptions=0,
    )  # fmt: skip


def prompt(asked: Asked) -> str:
    """A text of its tokens: the system prompt that all share, then the session's own."""
    size = asked.prompt_tokens[0] * BYTES_PER_TOKEN
    blocks = asked.prefix[0]
    block = asked.prefix_block_tokens[0] * BYTES_PER_TOKEN
    text = "".join(f"{fingerprint:x}".ljust(block, ".") for fingerprint in blocks)
    return text + "-" * (size - len(text))


async def play(scenario: Scenario, run: str, folder: Path, duration_s: float) -> Path:
    """Let the scenario's users loose on a controller with that run's policy; its data folder."""
    setup = scenario.runs[run]
    policy = folder / f"{run}.yaml"
    parameters = policy_of(setup.policy, scenario.folder, run)
    policy.write_text(render(parameters, comments=False), encoding="utf-8")
    replicas = [process.twin(folder / f"{run}-twin{at}.log") for at in range(2)]
    for replica in replicas:
        await replica.start()
    data = folder / run
    urls = [replica.said["serving"] for replica in replicas]
    gateway = process.controller(
        folder / f"{run}.log", urls, data, ["--policy", str(policy), "--log-level", "warning"]
    )
    await gateway.start()
    client = Client(gateway.said["serving"], timeout_s=600.0)
    try:
        await _all_up(client)
        await _play(LiveWorld(client), scenario, run, duration_s)
        if not all(one.alive() for one in (gateway, *replicas)):
            raise RuntimeError(f"a process of {run} ended on its own; see {folder}")
    finally:
        await client.close()
        await gateway.stop()
        for replica in replicas:
            await replica.stop()
    return data


async def _all_up(client: Client) -> None:
    for _ in range(100):
        answer = await client.get("/ready")
        if b'"replicas_up":2' in answer.body:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the replicas did not come up: {answer.body!r}")


async def _play(world: LiveWorld, scenario: Scenario, run: str, duration_s: float) -> None:
    live: World = world  # type: ignore[assignment]
    end_ns = world.now_ns + round(duration_s * NS)
    setting = Setting(live, SEED, end_ns, lambda asked, result: None)
    for spec in scenario.runs[run].traffic.clients:
        assert isinstance(spec, Sessions)
        SessionClients(msgspec.structs.replace(spec, stream=False), setting).start()
    while world.now_ns < end_ns:
        await asyncio.sleep(1.0)
        print(f"\r{run}: {world.now_ns / NS:.0f} of {duration_s:.0f} s", end="", flush=True)
    await world.over(LEFT_S)


def read(data: Path, duration_s: float, warm_up_s: float) -> Seen:
    """What the controller decided."""
    contexts = Contexts()
    arrived: dict[int, int] = {}
    dispatched: dict[int, int] = {}
    waits_s: list[float] = []
    outcomes: dict[str, int] = {}
    began_ns = None
    for record in records(data):
        event, now_ns = record.event, record.now_ns
        if isinstance(event, Arrived):
            began_ns = now_ns if began_ns is None else began_ns
            arrived[event.request] = now_ns - began_ns
            contexts.arrived(event.request, event.session)
        for decision in record.decisions:
            if isinstance(decision, Dispatch) and began_ns is not None:
                dispatched[decision.request] = now_ns - began_ns
                contexts.dispatched(decision.request)
            elif isinstance(decision, Settled):
                request = decision.request
                contexts.settled(request)
                outcomes[decision.outcome] = outcomes.get(decision.outcome, 0) + 1
                at_s = arrived[request] / NS
                if request in dispatched and warm_up_s <= at_s < duration_s:
                    waits_s.append((dispatched[request] - arrived[request]) / NS)
    return Seen(waits_s, contexts.figures(), outcomes)


async def play_both(scenario: Scenario, folder: Path, duration_s: float) -> dict[str, Path]:
    """Both policies at the same time, each with replicas of its own: so whatever else this machine
    does, it does to both."""
    found = await asyncio.gather(*(play(scenario, run, folder, duration_s) for run in RUNS))
    return dict(zip(RUNS, found, strict=True))


def measure(quick: bool = False) -> list[Figure]:
    """Five minutes; ``quick``: two, too short for the ratio that is claimed to settle."""
    scenario = load_scenario(SCENARIO)
    setup = scenario.runs[RUNS[0]]
    duration_s = QUICK_S if quick else setup.duration_s
    warm_up_s = QUICK_WARM_UP_S if quick else setup.measure.warm_up_s
    with tempfile.TemporaryDirectory(prefix="twinkeel-sessions-") as folder:
        played = asyncio.run(play_both(scenario, Path(folder), duration_s))
        seen = {run: read(data, duration_s, warm_up_s) for run, data in played.items()}
    return figures(seen, _of_the_twin(scenario))


def _of_the_twin(scenario: Scenario) -> dict[str, float]:
    """Mean waits that the twin says, with the same users."""
    result = run_scenario(scenario, seeds=(SEED,), runs=RUNS)
    return {run: result.runs[run][0].figures["all"]["queue_s"]["mean"] for run in RUNS}


def figures(seen: dict[str, Seen], twin_s: dict[str, float]) -> list[Figure]:
    live_s = {run: fmean(seen[run].waits_s) for run in RUNS}
    one, keys = RUNS
    told = "; ".join(
        f"{run}: {live_s[run]:.2f} s over {len(seen[run].waits_s)} messages, in the twin"
        f" {twin_s[run]:.2f} s, {seen[run].outcomes}"
        for run in RUNS
    )
    users = "2,000 users on two twin-served replicas over HTTP"
    mixed = seen[keys].contexts
    return [
        Figure(
            "session_wait_ratio", live_s[keys] / live_s[one], "", "<= 0.405",
            f"{users}: mean wait, limits by key over one limit; {told}",
        ),
        Figure(
            "mixed_contexts", mixed["mixed"], "", "= 0",
            f"{users}: of {mixed['sent']} messages sent to a replica, those sent while another of"
            f" their session was in flight; with one limit {seen[one].contexts['mixed']}",
        ),
        Figure(
            "session_wait_off_twin_pct",
            max(100 * abs(live_s[run] - twin_s[run]) / twin_s[run] for run in RUNS), "%", "<= 25",
            "mean wait live against the twin's, the worse of the two policies",
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    show(measure(parser.parse_args().quick))


if __name__ == "__main__":
    main()
