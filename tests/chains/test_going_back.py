"""Going back to an earlier checkpoint while a chain's time lasts; the order of checkpoints."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from controller.chains import Chain, ChainError, ChainOver
from controller.chains.core import NAME_MOST
from controller.chains.records import RENAMED_TYPE, owner_of
from controller.chains.wire import Gateway, Reporter
from controller.store.checkpoints import open_checkpoints
from policy.parameters.chains import Plan
from policy.parameters.chains import Step as Planned
from tests.controller.processes import MODEL, Controllers, Twin, eventually
from tests.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLAN = Plan(budget_ms=30_000, steps=tuple(Planned(name, 1) for name in "abcd"))


def body(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}


def came(twins: list[Twin]) -> int:
    """Requests that models ran to the end."""
    return sum(twin.state()["finished"] for twin in twins)


@pytest.fixture(params=["sqlite", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "chains.sqlite")
        return
    with redis_server() as server:
        yield server.url


@pytest.mark.parametrize("manner", ["sync", "async"])
def test_what_came_later_is_run_again_though_the_gateway_has_answers_of_it(
    manner: str, where: str, controllers: Controllers, twins: list[Twin]
) -> None:
    controller = controllers([twin.url for twin in twins])

    async def on_a_loop(run: Any, texts: dict[str, str]) -> None:
        async with run:
            for step, text in texts.items():
                await run.call(step, body(text))

    def play(chain: Chain, texts: dict[str, str], name: str = "c", **how: str) -> Any:
        if manner == "async":
            run: Any = chain.arun(name, user="u", **how)
            asyncio.run(on_a_loop(run, texts))
        else:
            run = chain.run(name, user="u", **how)
            with run:
                for step, text in texts.items():
                    run.call(step, body(text))
        return run

    before = came(twins)
    with Chain(PLAN, gateway=controller.url, store=where) as chain:
        first = play(chain, {"a": "one", "b": "two", "c": "three"})
        assert came(twins) - before == 3
        assert first.gateway_chain == "c"
        old = first.result()

        gone_back = play(
            chain, {"a": "one", "b": "another"}, resume_from_checkpoint=old.checkpoints["a"]
        )
        assert came(twins) - before == 4, "b ran again, and a did not"
        assert gone_back.gateway_chain.startswith("c~")
        again = gone_back.result()
        assert (again.chain, again.trace_id) == ("c", old.trace_id)
        assert again.values["a"] == old.values["a"]
        assert again.values["b"]["id"] != old.values["b"]["id"]
        assert "c" not in again.values

        # Whoever goes on without going back finds all of it, under the same name.
        went_on = play(chain, {"a": "one", "b": "another", "c": "last"})
        assert came(twins) - before == 5
        assert went_on.gateway_chain == gone_back.gateway_chain
        assert went_on.result().values["b"] == again.values["b"]

        # Going on after the last is no going back.
        last = went_on.result().checkpoint
        resumed = play(chain, {"c": "last", "d": "more"}, "", resume_from_checkpoint=last)
        assert came(twins) - before == 6
        assert resumed.gateway_chain == gone_back.gateway_chain

        # Back once more, and past the note of the name.
        anew = play(chain, {"b": "third"}, resume_from_checkpoint=old.checkpoints["a"])
        assert came(twins) - before == 7
        assert anew.gateway_chain not in ("c", gone_back.gateway_chain)

        # A chain that begins in this one takes its steps over, and nothing else.
        other = play(
            chain, {"a": "one", "c": "x"}, "other",
            resume_from_checkpoint=anew.result().checkpoint,
        )  # fmt: skip
        assert came(twins) - before == 8
        assert other.gateway_chain == "other"
        assert list(other.result().values) == ["a", "b", "c"]

    def shown() -> Any:
        seen = json.loads(controller.admin("GET", f"/chains/{gone_back.gateway_chain}")[1])
        steps = [step["step"] for step in seen.get("steps", ())]
        return seen if steps == ["b", "c", "d"] else None

    seen = eventually("the steps since are shown", shown)
    assert seen["trace_id"] == old.trace_id


def test_a_chain_with_the_longest_name_goes_back_too(tmp_path: Path) -> None:
    name, path = "ü" * NAME_MOST, tmp_path / "c.sqlite"
    with Chain(PLAN, gateway="http://127.0.0.1:9", store=path) as chain:
        with chain.run(name) as run:
            run.do("a", lambda: 1)
            run.do("b", lambda: 2)
        back = run.result().checkpoints["a"]
        with chain.run(name, resume_from_checkpoint=back) as run:
            assert run.result().values == {"a": 1}
        assert len(run.gateway_chain) == NAME_MOST
        assert run.gateway_chain[-9] == "~"
    with closing(open_checkpoints(path)) as store:
        rows = store.chain(owner_of(""), name)
    assert [row.content_type == RENAMED_TYPE for row in rows] == [False, True]


# ---- the order of checkpoints ----


@pytest.mark.parametrize("slow", ["a", "b"])
def test_the_last_checkpoint_is_that_of_the_step_that_ended_last(slow: str, where: str) -> None:
    """Resuming from it must not forget the step beside it."""
    done: list[str] = []

    async def work(name: str) -> str:
        await asyncio.sleep(0.3 if name == slow else 0)
        done.append(name)
        return name

    async def both(run: Any) -> Any:
        async with run:
            await asyncio.gather(run.do("a", work, "a"), run.do("b", work, "b"))
        return run.result()

    with Chain(PLAN, store=where) as chain:
        result = asyncio.run(both(chain.arun("c")))
        assert list(result.checkpoints)[-1] == slow
        assert result.checkpoint == result.checkpoints[slow]
        again = asyncio.run(both(chain.arun("c", resume_from_checkpoint=result.checkpoint)))
        assert again.values == {"a": "a", "b": "b"}
        assert len(done) == 2, "nothing ran again"


def test_a_step_of_another_process_lies_where_that_put_it(where: str) -> None:
    with Chain(PLAN, store=where) as chain, Chain(PLAN, store=where) as second:
        with chain.run("c") as run, second.run("c") as other:

            def slow() -> str:
                other.do("a", lambda: "other")
                run.do("b", lambda: "mine")
                return "mine"

            assert run.do("a", slow) == "other"
        result = run.result()
        assert list(result.values) == ["a", "b"]
        with chain.run(resume_from_checkpoint=result.checkpoint) as run:
            assert run.result().values == {"a": "other", "b": "mine"}


def test_a_new_chain_from_a_checkpoint_keeps_its_budget_over_a_restart(tmp_path: Path) -> None:
    with Chain(PLAN, store=tmp_path / "c.sqlite") as chain:
        with chain.run("one") as run:
            run.do("a", lambda: 1)
        with chain.run("two", resume_from_checkpoint=run.checkpoint):
            pass  # as if it were killed here
        with chain.run("two") as again:
            assert again.left_s > 10
            assert again.result().values == {"a": 1}


# ---- one within another, and odd names ----


def test_another_chains_end_does_not_end_this_one_quietly(tmp_path: Path) -> None:
    short = Plan(budget_ms=200, steps=PLAN.steps)

    async def on_a_loop(chain: Chain, inner: Chain) -> None:
        async with inner.arun("inner") as over:
            await over.do("a", asyncio.sleep, 30)
        async with chain.arun("outer") as run:
            assert await run.do("a", lambda: 1) == 1
            await over.do("b", asyncio.sleep, 0)

    with Chain(PLAN, store=tmp_path / "a") as chain, Chain(short, store=tmp_path / "b") as inner:
        with pytest.raises(ChainOver):
            asyncio.run(on_a_loop(chain, inner))
        with inner.run("blocking") as over:
            over.do("a", time.sleep, 1)
        with pytest.raises(ChainOver), chain.run("outer 2"):
            over.do("b", time.sleep, 0)


def test_a_chain_within_a_step_is_its_own(tmp_path: Path) -> None:
    with Chain(PLAN, store=tmp_path / "c.sqlite") as chain:

        def inner(budget: Any) -> Any:
            budget.note(outer=1)
            with chain.run("inner") as run:
                run.do("a", lambda: run.note(inner=1))
            return run.result().steps["a"].attributes

        with chain.run("outer") as run:
            assert run.do("a", inner) == {"inner": 1}
        assert run.result().steps["a"].attributes == {"outer": 1}


@pytest.mark.parametrize("manner", ["sync", "async"])
def test_a_function_that_runs_out_of_what_it_goes_over_fails_at_once(
    manner: str, tmp_path: Path
) -> None:
    def empty() -> Any:
        return next(iter(()))

    async def on_a_loop(chain: Chain) -> None:
        async with chain.arun("c") as run:
            await run.do("a", empty)

    began_s = time.monotonic()
    with Chain(PLAN, store=tmp_path / "c.sqlite") as chain:
        if manner == "async":
            with pytest.raises(RuntimeError, match="step 'a' raised StopIteration"):
                asyncio.run(on_a_loop(chain))
        else:
            with pytest.raises(StopIteration), chain.run("c") as run:
                run.do("a", empty)
    assert time.monotonic() - began_s < 15


@pytest.mark.parametrize("given", ["0" * 32, "ab", "g" * 32, "a" * 33, "a" * 31 + "\n"])
def test_a_trace_id_that_is_none_is_refused(given: str, tmp_path: Path) -> None:
    with Chain(PLAN, store=tmp_path / "c.sqlite") as chain:
        with pytest.raises(ChainError, match="the trace id is"):
            chain.run("c", trace_id=given)
        assert chain.run("c", trace_id="AB" * 16).trace_id == "ab" * 16


NAMES = ["a/b", "..", ".", "a%2Fb", "a?b#c", "日本 ~", "a\\b'\"", "%", "a;b=c&d"]


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_may_have_any_name(name: str, controllers: Controllers, twins: list[Twin]) -> None:
    controller = controllers([twin.url for twin in twins])
    reporter = Reporter(Gateway.at(controller.url), name, {"x-twinkeel-user": "u"})
    step = {"step": name, "took_ms": 1, "outcome": "done", "attributes": {}, "checkpoint": ""}
    reporter.tell({}, time.monotonic_ns() - 10_000_000, step)
    reporter.close(5)
    assert (reporter.told, reporter.left_out) == (1, 0)

    def shown() -> bool:
        chains = json.loads(controller.admin("GET", "/chains")[1])["chains"]
        return name in [each["chain"] for each in chains]

    assert eventually("it is shown", shown)


def test_a_reporter_whose_queue_is_full_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, paths = threading.Event(), queue.Queue[str]()

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            paths.put(unquote(self.path))
            busy.wait(20)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *what: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("controller.chains.wire.REPORTS_MOST", 2)
    try:
        reporter = Reporter(Gateway.at(f"http://127.0.0.1:{server.server_port}"), "c", {})
        reporter.tell({}, 0, {"step": "0"})
        assert paths.get(timeout=20) == "/v1/chains/c/steps"
        for number in range(1, 4):
            reporter.tell({}, 0, {"step": str(number)})
        assert reporter.left_out == 1
        reporter.close(0)
        assert reporter.left_out == 2
        busy.set()
        thread = reporter._thread
        assert thread is not None
        thread.join(20)
        assert not thread.is_alive()
    finally:
        busy.set()
        server.shutdown()
        server.server_close()
