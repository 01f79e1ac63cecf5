"""Clients: they wait for answers, press on, give up, try again, and walk through chains."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest

from policy.decisions import Abort, Decision, Dispatch, Settled
from policy.events import Arrived, Cancelled, Event, Finished
from tests.support import (
    BARE,
    MS,
    ListLog,
    S,
    ScriptedPolicy,
    bare_fleet,
    engine_settings,
    flat_cost,
)
from twin.clients import CallClients, Calls, ChainClients, Chains, SessionClients, Sessions, Setting
from twin.figures.contexts import Contexts
from twin.figures.hours import Hours
from twin.figures.incidents import Incidents
from twin.figures.watch import Watch
from twin.scenario.run import Recordings
from twin.world import Features, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twin.arrivals import Asked
    from twin.world import Result

STEP_NS = MS
"""An engine's step; a prompt of up to 64 tokens takes one."""


class Live:
    """A world with one replica and clients; everything that was logged and settled."""

    def __init__(self, policy: ScriptedPolicy, duration_s: float = 10) -> None:
        self.log = ListLog()
        self.contexts = Contexts()
        watch = Watch(self.log, Incidents({}), Hours({}), self.contexts)
        settings = engine_settings(max_num_seqs=64, max_model_len=20_000, kv_blocks=20_001)
        fleet = bare_fleet(1, settings, flat_cost(STEP_NS))
        self.world = World(fleet, policy, watch, lambda chunk: None, BARE)
        self.results: list[tuple[Asked, Result]] = []
        self.setting = Setting(
            self.world, 7, round(duration_s * S), lambda *pair: self.results.append(pair)
        )

    def run(self, clients: Any) -> dict[str, Any]:
        clients.start()
        self.world.run(iter(()))
        assert self.world.clients == 0
        figures: dict[str, Any] = clients.figures()
        return figures

    def arrivals(self) -> list[tuple[int, Arrived]]:
        return [(at, event) for at, event, _ in self.log.records if isinstance(event, Arrived)]


def at_once(refuse: Callable[[Arrived], Settled | None] = lambda event: None) -> ScriptedPolicy:
    """Everything goes to the replica at once, unless ``refuse`` settles it."""
    sent: set[int] = set()

    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            refusal = refuse(event)
            if refusal is not None:
                return [refusal]
            sent.add(event.request)
            return [Dispatch(event.request, 0, "")]
        if isinstance(event, Finished):
            sent.remove(event.request)
            return [Settled(event.request, "answered")]
        if isinstance(event, Cancelled) and event.request in sent:
            sent.remove(event.request)
            return [Abort(event.request, 0), Settled(event.request, "cancelled", http_code=499)]
        return []

    return ScriptedPolicy(decide)


def convert(kind: Any, **raw: Any) -> Any:
    return msgspec.convert(raw, kind, str_keys=False)


# Sessions


def sessions(**changes: Any) -> Sessions:
    raw: dict[str, Any] = {
        "name": "chat", "users": 1, "turns": {"fixed": 3}, "think_s": {"fixed": 2},
        "prompt_tokens": {"fixed": 10}, "output_tokens": {"fixed": 5}, "start_within_s": 0,
        **changes,
    }  # fmt: skip
    made: Sessions = convert(Sessions, **raw)
    return made


def test_a_user_thinks_and_then_says_more_of_the_same_conversation() -> None:
    live = Live(at_once(), duration_s=7)
    figures = live.run(SessionClients(sessions(), live.setting))
    arrived = live.arrivals()
    answer_ns = 5 * STEP_NS + 1  # the first token's step takes the prompt along
    gaps = {after - before for (before, _), (after, _) in pairwise(arrived)}
    assert all(abs(gap - 2 * S - answer_ns) < 5 for gap in gaps)
    assert [event.prompt_bytes for _, event in arrived] == [40, 100, 160, 40]
    assert [event.session for _, event in arrived] == ["chat-0-0"] * 3 + ["chat-0-1"]
    assert (figures["messages"], figures["sessions"], figures["impatient"]) == (4, 2, 0)
    assert live.contexts.figures() == {"sent": 4, "mixed": 0, "mixed_share": 0.0}


def test_turns_share_the_conversation_so_far_and_sessions_the_system_prompt() -> None:
    live = Live(at_once(), duration_s=7)
    spec = sessions(system_tokens=8, prefix_block_tokens=4)
    live.run(SessionClients(spec, live.setting))
    first, second, third, other = (event.prefix for _, event in live.arrivals())
    assert [len(first), len(second)] == [18 // 4, 33 // 4]
    assert third[: len(second)] == second
    assert second[: len(first)] == first
    assert other[:2] == first[:2]
    assert other[2:] != first[2:]


def test_an_impatient_user_mixes_the_contexts_up() -> None:
    live = Live(at_once())
    spec = sessions(
        output_tokens={"fixed": 3000}, impatient_share=1.0, impatient_after_s={"fixed": 1}
    )
    figures = live.run(SessionClients(spec, live.setting))
    times = [at for at, _ in live.arrivals()]
    assert times[:3] == [0, S, 2 * S]
    assert figures["impatient"] == live.contexts.mixed == figures["messages"] * 2 // 3


def test_patience_runs_out() -> None:
    live = Live(at_once())
    spec = sessions(output_tokens={"fixed": 3000}, patience_s={"fixed": 0.5})
    figures = live.run(SessionClients(spec, live.setting))
    assert figures["outcomes"] == {"cancelled": figures["messages"]}
    assert figures["answer_s"]["count"] == 0
    assert {result.settled_ns - result.arrival_ns for _, result in live.results} == {S // 2}


def test_impatience_is_said_wholly_or_not_at_all() -> None:
    with pytest.raises(msgspec.ValidationError, match="belong together"):
        sessions(impatient_share=0.5)


# Retries


def test_a_client_backs_off_and_honours_what_it_is_told() -> None:
    told = deque([0, 3 * S, 0])

    def refuse(event: Arrived) -> Settled | None:
        if not told:
            return None
        return Settled(event.request, "shed", http_code=429, retry_after_ns=told.popleft())

    live = Live(at_once(refuse), duration_s=1)
    spec = sessions(turns={"fixed": 1}, retries={"attempts": 5, "backoff_s": 0.5, "factor": 3})
    figures = live.run(SessionClients(spec, live.setting))
    assert [at / S for at, _ in live.arrivals()] == [0, 0.5, 3.5, 8]
    assert (figures["messages"], figures["attempts"]) == (1, 4)
    assert figures["outcomes"] == {"answered": 1}
    assert figures["answer_s"]["most"] == pytest.approx(8.005, abs=0.001)


def always_shed(event: Arrived) -> Settled:
    return Settled(event.request, "shed", http_code=429, retry_after_ns=60 * S)


def test_a_client_that_does_not_listen_gives_up_after_its_attempts() -> None:
    live = Live(at_once(always_shed), duration_s=1)
    retries = {
        "attempts": 4, "backoff_s": 1, "backoff_most_s": 2, "honour_retry_after": False,
        "jitter": 0.5,
    }  # fmt: skip
    figures = live.run(SessionClients(sessions(turns={"fixed": 1}, retries=retries), live.setting))
    times = [at / S for at, _ in live.arrivals()]
    waits = [after - before for before, after in pairwise(times)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, [1, 2, 2], strict=True))
    assert figures["outcomes"] == {"shed": 1}


def test_nobody_repeats_what_was_the_callers_own_fault() -> None:
    def refuse(event: Arrived) -> Settled:
        return Settled(event.request, "failed", why="rejected", http_code=400)

    live = Live(at_once(refuse), duration_s=1)
    spec = sessions(turns={"fixed": 1}, retries={"attempts": 5})
    assert live.run(SessionClients(spec, live.setting))["attempts"] == 1


def test_in_a_retry_storm_everybody_tries_again_at_once() -> None:
    live = Live(at_once(always_shed), duration_s=1)
    live.world.retry_attempts = 4
    spec = sessions(turns={"fixed": 1}, retries={"attempts": 1, "backoff_s": 0.1})
    live.run(SessionClients(spec, live.setting))
    assert [at / S for at, _ in live.arrivals()] == pytest.approx([0, 0.1, 0.2, 0.3])


# Calls


def test_calls_arrive_when_their_source_says_whatever_becomes_of_them(tmp_path: Path) -> None:
    raw = {
        "name": "batch", "line": "unused", "sla": "P2",
        "retries": {"attempts": 2, "backoff_s": 0.5, "honour_retry_after": False},
        "source": {
            "streams": [{
                "name": "s", "business_line": "reports", "sla_class": "P1", "model": "m",
                "endpoint": "completions", "arrivals": {"law": "poisson", "rate_rps": 5},
                "prompt_tokens": {"fixed": 30}, "output_tokens": {"fixed": 3},
            }],
        },
    }  # fmt: skip
    spec = convert(Calls, **raw)
    recordings = Recordings(tmp_path)
    expected = [
        at
        for chunk in recordings.chunks((spec.source,), 10, 3, tmp_path)
        for at in chunk.arrival_ns
    ]
    live = Live(at_once(always_shed))
    chunks = recordings.chunks((spec.source,), 10, 3, tmp_path)
    figures = live.run(CallClients(spec, live.setting, chunks))
    firsts = sorted(at for at, _ in live.arrivals())
    assert set(expected) <= set(firsts)
    assert figures["messages"] == len(expected) > 30
    assert figures["attempts_per_message"] == 2
    event = live.arrivals()[0][1]
    assert (event.line, event.sla, event.model, event.endpoint, event.prompt_bytes) == (
        "reports", "P1", "m", "completions", 120,
    )  # fmt: skip


# Chains


def chains(**changes: Any) -> Chains:
    raw: dict[str, Any] = {
        "name": "agents",
        "model": "m",
        "arrivals": {"law": "poisson", "rate_rps": 1},
        "budget_s": 5,
        "steps": [
            {"kind": "llm", "name": "plan", "prompt_tokens": {"fixed": 20},
             "output_tokens": {"fixed": 100}},
            {"kind": "external", "name": "query", "takes_s": {"fixed": 3}},
            {"kind": "embedding", "name": "embed", "prompt_tokens": {"fixed": 20}, "model": "e"},
            {"kind": "llm", "name": "answer", "prompt_tokens": {"fixed": 20},
             "output_tokens": {"fixed": 100}},
        ],
        **changes,
    }  # fmt: skip
    made: Chains = convert(Chains, **raw)
    return made


def chain_policy(decide: Callable[[int, Arrived], Settled | None]) -> ScriptedPolicy:
    """Settles an answered step as ``decide(step's number in its chain, event)`` says."""
    arrived: dict[int, tuple[int, Arrived]] = {}
    seen: dict[str, int] = {}

    def step(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            number = seen[event.chain] = seen.get(event.chain, -1) + 1
            arrived[event.request] = (number, event)
            return [Dispatch(event.request, 0, "")]
        if isinstance(event, Finished):
            settled = decide(*arrived.pop(event.request))
            return [settled or Settled(event.request, "answered")]
        return []

    return ScriptedPolicy(step)


def test_a_chain_goes_through_its_steps_in_order() -> None:
    live = Live(chain_policy(lambda number, event: None))
    figures = live.run(ChainClients(chains(), live.setting))
    first = [(at, event) for at, event in live.arrivals() if event.chain == "agents-0"]
    assert [event.step for _, event in first] == ["plan", "embed", "answer"]
    assert [event.model for _, event in first] == ["m", "e", "m"]
    assert [event.endpoint for _, event in first] == ["chat", "embeddings", "chat"]
    assert first[1][0] - first[0][0] == pytest.approx(3 * S + 100 * STEP_NS, abs=STEP_NS)
    assert figures["started"] == figures["complete"] == figures["useful"] > 5
    assert figures["lasted_s"]["mean"] == pytest.approx(3.2, abs=0.01)


def test_a_step_outside_is_cut_where_the_answer_before_says_so() -> None:
    def decide(number: int, event: Arrived) -> Settled:
        return Settled(event.request, "answered", left_ns=4 * S, step_ns=S)

    live = Live(chain_policy(decide))
    figures = live.run(ChainClients(chains(), live.setting))
    assert figures["cut_steps"] == figures["started"]
    assert figures["lasted_s"]["mean"] == pytest.approx(1.2, abs=0.01)
    live = Live(chain_policy(decide))
    figures = live.run(ChainClients(chains(cut_external=False), live.setting))
    assert figures["lasted_s"]["mean"] == pytest.approx(3.2, abs=0.01)


def test_a_database_has_its_slow_days() -> None:
    steps = list(msgspec.to_builtins(chains().steps))
    steps[1] |= {"slow_share": 0.3, "slow_s": {"fixed": 30}}
    live = Live(chain_policy(lambda number, event: None), duration_s=200)
    figures = live.run(ChainClients(chains(steps=steps), live.setting))
    assert figures["slow_steps"] / figures["started"] == pytest.approx(0.3, abs=0.08)
    assert figures["late"] == figures["useless"] == figures["slow_steps"]


def test_a_chain_that_is_told_it_is_over_stops_and_may_have_enough() -> None:
    def decide(number: int, event: Arrived) -> Settled | None:
        if event.step != "embed":
            return None
        return Settled(event.request, "degraded", why="chain_budget", left_ns=0)

    for enough, useful in (("", 0), ("plan", 1), ("query", 1), ("embed", 0)):
        live = Live(chain_policy(decide))
        figures = live.run(ChainClients(chains(enough_after=enough), live.setting))
        assert figures["ended"] == figures["started"]
        assert figures["useful"] == useful * figures["started"]
        assert {event.step for _, event in live.arrivals()} == {"plan", "embed"}


def test_a_chain_with_a_hollow_or_wrong_step_is_complete_and_useless() -> None:
    def decide(number: int, event: Arrived) -> Settled | None:
        why = {"agents-0": "template", "agents-1": "cached"}.get(event.chain)
        if event.step != "plan" or why is None:
            return None
        return Settled(event.request, "degraded", why=why)

    live = Live(chain_policy(decide))
    live.world._answers = AlwaysWrong("agents-2")
    figures = live.run(ChainClients(chains(), live.setting))
    assert figures["complete"] == figures["started"]
    assert (figures["hollow"], figures["wrong"], figures["degraded_steps"]) == (1, 1, 2)
    assert figures["useful"] == figures["started"] - 2


class AlwaysWrong:
    """Answers to one chain are wrong, others right."""

    def __init__(self, chain: str) -> None:
        self._chain = chain

    def features(self, request: int, asked: Asked, row: int, **where: Any) -> Features:
        return Features(1, 1, 1, False, asked.chain != self._chain)

    def verdict(self, request: int, first: bool, second: bool) -> Literal["match", "mismatch"]:
        return "match"


def failing_once(checkpoint: str) -> Callable[[int, Arrived], Settled | None]:
    """The second request of each chain fails; the first had this checkpoint."""

    def decide(number: int, event: Arrived) -> Settled | None:
        if number == 0:
            return Settled(event.request, "answered", checkpoint=checkpoint)
        if number == 1:
            return Settled(event.request, "failed", why="http_5xx", http_code=502)
        return None

    return decide


def test_a_chain_goes_on_from_its_checkpoint_without_paying_twice() -> None:
    live = Live(chain_policy(failing_once("c0")))
    figures = live.run(ChainClients(chains(), live.setting))
    first = [event for _, event in live.arrivals() if event.chain == "agents-0"]
    assert [event.step for event in first] == ["plan", "embed", "embed", "answer"]
    assert [event.resume for event in first] == ["", "", "c0", ""]
    assert figures["resumed"] == figures["complete"] == figures["started"]
    assert figures["steps_repeated"] == figures["restarted"] == 0


def test_without_a_checkpoint_it_begins_again_and_pays_again() -> None:
    live = Live(chain_policy(failing_once("")))
    figures = live.run(ChainClients(chains(), live.setting))
    first = [event.step for _, event in live.arrivals() if event.chain == "agents-0"]
    assert first == ["plan", "embed", "plan", "embed", "answer"]
    assert figures["restarted"] == figures["steps_repeated"] == figures["started"]
    assert figures["late"] == figures["started"]  # twice three seconds outside


def test_a_chain_without_resumes_left_has_failed() -> None:
    live = Live(chain_policy(failing_once("c0")))
    figures = live.run(ChainClients(chains(resumes=0), live.setting))
    assert figures["failed"] == figures["useless"] == figures["started"]
    assert figures["useless_share_up95"] == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enough_after": "dance"}, "enough_after 'dance' is no step: plan, query"),
        ({"steps": [{"kind": "external", "name": "x", "takes_s": {"fixed": 1}}]}, "first step"),
        ({"steps": []}, "length >= 1"),
    ],
)
def test_chains_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        chains(**changes)


def test_a_run_is_the_same_every_time() -> None:
    logs = []
    for _ in range(2):
        live = Live(chain_policy(lambda number, event: None), duration_s=30)
        live.run(ChainClients(chains(), live.setting))
        logs.append(live.log.records)
    assert logs[0] == logs[1]
