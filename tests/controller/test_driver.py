"""The driver: one outcome for each request, whatever fails, leaves or comes late."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from controller import driver
from controller.config import Limits
from policy.decisions import Abort, Dispatch
from policy.events import (
    Arrived,
    Cancelled,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    PolicySwitched,
    Progress,
    Ticked,
)
from tests.controller.turns import Turns
from tests.core_support import (
    CHAT,
    DONE,
    ROLE,
    STREAM,
    Core,
    Got,
    Line,
    Question,
    Server,
    chat,
    core,
    delta,
    good,
    post,
    whole,
)
from tests.policy_support import parameters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ALONE: dict[str, Any] = {"health": {"enabled": False}}


def run(test: Callable[[Core], Awaitable[None]], *servers: Server, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), core(*servers, **options) as running:
            await test(running)

    uvloop.run(main())


async def silent(_: Question, line: Line) -> None:
    await line.gone()


async def broken(_: Question, line: Line) -> None:
    await line.whole({"error": {"message": "boom"}}, 500)


async def unreachable(_: Question, line: Line) -> None:
    line.reset()


async def left(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_request_is_told_to_the_policy_and_the_listeners_in_order() -> None:
    async def test(running: Core) -> None:
        await post(running.url, chat(stream=True))
        assert running.heard.names == ["arrived", "dispatched", "first_token", "settled"]
        told = [type(record.event) for record in running.records() if not _tick(record)]
        assert told[1:] == [Arrived, FirstToken, Finished]
        call, settled = running.heard.outcomes[0]
        assert settled.outcome == "answered"
        times = [
            call.entered_ns, call.arrived_ns, call.dispatched_ns, call.sent_ns, call.first_ns,
            call.last_ns, call.settled_ns,
        ]  # fmt: skip
        assert times == sorted(times)
        assert (call.prompt_tokens, call.output_tokens, call.finish_reason) == (5, 2, "stop")
        assert running.driver.replicas[0].tokens == 2

    run(test, Server())


def _tick(record: Any) -> bool:
    return type(record.event) is Ticked


def test_a_failure_is_tried_on_another_server() -> None:
    servers = Server(broken), Server(broken), Server()

    async def test(running: Core) -> None:
        for stream in (False, True):
            got = await post(running.url, chat(stream=stream))
            assert got.status == 200
        asked = [len(server.questions) for server in servers]
        assert asked[2] == 2

    run(test, *servers, policy=ALONE | {"retries": {"tries_most": 3}})


def test_a_server_that_takes_no_connection_is_suspected_and_left() -> None:
    servers = Server(), Server()
    suspected: list[int] = []

    async def test(running: Core) -> None:
        running.driver.suspect = lambda replica: suspected.append(replica.id)
        await servers[0].stop()
        for _ in range(3):
            assert (await post(running.url, chat())).status == 200
        await servers[0].start()
        assert 0 in suspected
        assert {each.kind for each in running.events(Failed)} == {"replica_lost"}

    run(test, *servers)


def test_a_connection_that_is_cut_before_the_answer_is_a_lost_server() -> None:
    async def test(running: Core) -> None:
        assert (await post(running.url, chat())).status == 200
        assert (await post(running.url, chat(stream=True))).status == 200
        assert {each.kind for each in running.events(Failed)} <= {"replica_lost", "stream_cut"}
        assert running.events(Failed)

    run(test, Server(unreachable), Server())


def test_a_call_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LOOK_S", 0.05)

    async def test(running: Core) -> None:
        got = await post(running.url, chat())
        assert got.status == 504
        assert [each.kind for each in running.events(Failed)] == ["timeout"]

    run(test, Server(silent), limits=Limits(call_s_most=0.3), policy=ALONE)


def test_a_whole_answer_that_is_lost_is_asked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server is well, and answers all others: only this one never comes."""
    monkeypatch.setattr(driver, "LOOK_S", 0.05)

    async def test(running: Core) -> None:
        got = await post(running.url, chat(max_tokens=2))
        assert got.status == 200
        assert [each.kind for each in running.events(Failed)] == ["timeout"]

    limits = Limits(whole_s_least=3.0, whole_token_s=0.01)
    run(test, Server(silent), Server(good), limits=limits, policy=ALONE)


def test_a_caller_that_leaves_aborts_once_and_frees_its_place() -> None:
    server = Server(silent)

    async def test(running: Core) -> None:
        first = asyncio.create_task(post(running.url, chat()))
        await running.until(lambda: server.questions)
        second = asyncio.create_task(post(running.url, chat()))
        await running.until(lambda: running.driver.open == 2)
        assert len(server.questions) == 1
        await left(first)
        await running.until(lambda: len(server.questions) == 2)
        await left(second)
        await running.until(lambda: not running.driver.calls)
        aborts = [
            each for record in running.records() for each in record.decisions
            if isinstance(each, Abort)
        ]  # fmt: skip
        assert [each.request for each in aborts] == [0, 1]

    run(test, server, policy=ALONE, up={"max_num_seqs": 1})


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.005, 0.02])
def test_callers_that_leave_at_any_moment_leave_nothing_behind(pause_s: float) -> None:
    """In the same turn of the loop as a token, a failure, the end, or the answer's way out."""
    chance = random.Random(7)  # noqa: S311 - a test

    async def script(question: Question, line: Line) -> None:
        kind = chance.randrange(5)
        await asyncio.sleep(pause_s * chance.random())
        if kind == 0:
            await broken(question, line)
        elif kind == 1:
            line.reset()
        elif kind == 2 and question.document.get("stream"):
            await line.head()
            for each in STREAM:
                await line.part(each)
                await asyncio.sleep(pause_s * chance.random() / 4)
            await line.end()
        else:
            await good(question, line)

    async def caller(running: Core, number: int) -> None:
        headers = {"x-twinkeel-chain": "c", "x-twinkeel-step": f"s{number}"} if number % 3 else {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((0.06 + 3 * pause_s) * chance.random()):
                await post(running.url, chat(stream=number % 2 == 0), headers=headers)

    async def test(running: Core) -> None:
        for at in range(0, 120, 12):
            await asyncio.gather(*(caller(running, at + number) for number in range(12)))
        await running.until(lambda: not running.driver.open)
        outcomes = {each.outcome for each in running.outcomes()}
        assert "cancelled" in outcomes

    run(test, Server(script), Server(script), policy={"limits": {"enabled": False}})


def test_a_server_that_goes_down_may_finish_what_it_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "SILENCE_S", 30.0)
    go_on = asyncio.Event()

    async def script(_: Question, line: Line) -> None:
        await line.head()
        await line.part(ROLE + delta("a"))
        await go_on.wait()
        await line.part(delta("b") + delta(None, "stop") + DONE)
        await line.end()

    async def test(running: Core) -> None:
        task = asyncio.create_task(post(running.url, chat(stream=True)))
        await running.until(lambda: running.events(FirstToken))
        running.down(0)
        await asyncio.sleep(0.5)
        go_on.set()
        got = await task
        assert got.events[-1] == DONE

    run(test, Server(script), policy=ALONE)


def test_what_a_server_that_is_down_holds_is_tried_elsewhere() -> None:
    held, other = Server(silent), Server()

    async def test(running: Core) -> None:
        running.down(1)
        tasks = [asyncio.create_task(post(running.url, chat(stream=n == 1))) for n in range(2)]
        await running.until(lambda: len(held.questions) == 2)
        running.up(1)
        running.down(0)
        for got in await asyncio.gather(*tasks):
            assert got.status == 200
        assert [each.kind for each in running.events(Failed)] == ["replica_lost"] * 2

    policy = ALONE | {"classes": {"p1_deadline_ms": 60_000, "p2_deadline_ms": 60_000}}
    run(test, held, other, policy=policy)


def test_a_server_that_comes_back_in_time_keeps_what_it_holds() -> None:
    go_on = asyncio.Event()

    async def script(_: Question, line: Line) -> None:
        await go_on.wait()
        await line.whole(whole())

    async def test(running: Core) -> None:
        task = asyncio.create_task(post(running.url, chat()))
        await running.until(lambda: running.driver.replicas[0].attempts)
        running.down(0)
        running.up(0)
        await asyncio.sleep(2.3)
        go_on.set()
        assert (await task).status == 200
        assert running.events(Failed) == []

    run(
        test,
        Server(script),
        policy=ALONE | {"classes": {"p1_deadline_ms": 60_000, "p2_deadline_ms": 60_000}},
    )


def test_a_server_that_is_silent_is_found_out() -> None:
    async def script(_: Question, line: Line) -> None:
        await line.head()
        await line.part(ROLE + delta("a"))
        await line.gone(15)

    async def test(running: Core) -> None:
        with Turns() as turns:
            got = await post(running.url, chat(stream=True))
        assert turns.s < 4.0
        assert b'"silent"' in got.events[-1]
        assert len(running.events(Progress)) >= 2
        running.down(1)

    run(test, Server(script), Server(script))


def test_the_policy_can_be_switched_while_requests_are_open() -> None:
    go_on = asyncio.Event()

    async def script(_: Question, line: Line) -> None:
        await go_on.wait()
        await line.whole(whole())

    async def test(running: Core) -> None:
        task = asyncio.create_task(post(running.url, chat()))
        await running.until(lambda: running.driver.replicas[0].attempts)
        changed = parameters(**ALONE, name="other")
        running.driver.switch(changed)
        assert running.driver.parameters is changed
        with pytest.raises(ValueError, match="needs a restart"):
            running.driver.switch(parameters("fifo"))
        assert running.driver.parameters is changed
        assert running.driver.refused == 1
        go_on.set()
        assert (await task).status == 200
        assert len(running.events(PolicySwitched)) == 2

    run(test, Server(script), policy=ALONE, checked=False)


def test_troubles_are_told_but_not_again_and_again() -> None:
    async def test(running: Core) -> None:
        told: list[object] = []
        running.driver._hear["decided"].append(told.append)
        for _ in range(5):
            running.driver.trouble("disk", "is full")
        running.driver.trouble("other", "is wrong")
        assert len(told) == 2

    run(test, Server())


def test_what_is_cancelled_twice_or_too_late_stays_as_it_was() -> None:
    async def test(running: Core) -> None:
        await post(running.url, chat())
        call, _ = running.heard.outcomes[0]
        running.driver.cancel(call)
        assert running.events(Cancelled) == []
        running.driver.feed(Cancelled(call.request))
        assert [each.outcome for each in running.outcomes()] == ["answered"]

    run(test, Server())


def test_a_caller_that_leaves_while_its_state_is_saved() -> None:
    async def test(running: Core) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        save = running.chains.save

        async def slowly(*given: Any) -> str:
            begun.set()
            await go_on.wait()
            return await save(*given)

        running.chains.save = slowly  # type: ignore[method-assign]
        headers = {"x-twinkeel-chain": "c", "x-twinkeel-step": "s"}
        task = asyncio.create_task(post(running.url, chat(), headers=headers))
        await begun.wait()
        await left(task)
        await running.until(lambda: not running.driver.open)
        go_on.set()
        await running.until(lambda: running.events(CheckpointSaved))
        assert [each.outcome for each in running.outcomes()] == ["cancelled"]

    run(test, Server())


def test_a_listener_hears_only_what_it_overrides() -> None:
    async def test(running: Core) -> None:
        assert not running.driver._hear["fed"]
        assert not running.driver._hear["decided"]
        assert len(running.driver._hear["settled"]) == 1

    run(test, Server())


def test_many_at_once_each_get_their_own_answer() -> None:
    chance = random.Random(3)  # noqa: S311 - a test
    tried: set[str] = set()

    async def script(question: Question, line: Line) -> None:
        said = question.document["messages"][0]["content"]
        await asyncio.sleep(chance.random() / 50)
        name = question.headers["x-request-id"]
        if name not in tried and chance.random() < 0.1:
            tried.add(name)
            await broken(question, line)
        elif question.document.get("stream"):
            await line.stream(ROLE, *(delta(part) for part in said), delta(None, "stop"), DONE)
        else:
            await line.whole(whole(said))

    async def ask(running: Core, number: int) -> None:
        said = f"question {number}"
        document = chat(stream=number % 2 == 0, messages=[{"role": "user", "content": said}])
        got: Got = await post(running.url, document)
        assert got.status == 200
        if number % 2:
            assert got.document["choices"][0]["message"]["content"] == said
        else:
            parts = [each for each in got.events if b'"content": "' in each]
            assert len(parts) == len(said) + 1

    async def test(running: Core) -> None:
        await asyncio.gather(*(ask(running, number) for number in range(150)))
        sent = [
            each for record in running.records() for each in record.decisions
            if isinstance(each, Dispatch)
        ]  # fmt: skip
        assert len(sent) >= 150

    policy = {
        "limits": {"enabled": False}, "breakers": {"enabled": False}, "health": {"enabled": False},
        "retries": {"budget_permille": 1000, "tries_most": 3},
        "classes": {"p1_deadline_ms": 60_000, "p2_deadline_ms": 60_000},
    }  # fmt: skip
    run(test, *(Server(script) for _ in range(3)), policy=policy)


def test_closing_ends_what_is_under_way() -> None:
    server = Server(silent)

    async def main() -> None:
        async with core(server, policy=ALONE, checked=False) as running:
            task = asyncio.create_task(post(running.url, chat()))
            await running.until(lambda: server.questions)
            replica = running.driver.replicas[0]
            assert len(replica.attempts) == 1
        assert not replica.attempts
        await asyncio.gather(task, return_exceptions=True)
        assert task.done()

    uvloop.run(main())
    assert server.questions[0].path == CHAT
