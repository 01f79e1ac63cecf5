"""Steps that are the caller's own functions, in blocking code and on an event loop."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from controller.chains import Budget, Chain, ChainError, ChainOver, CheckpointsError, base, wire
from controller.store.checkpoints import NewCheckpoint, SqliteCheckpoints
from policy.files import FileError
from policy.parameters.chains import Plan
from policy.parameters.chains import Step as Planned
from tests.chains.example import answer_order
from tests.controller.processes import MODEL, Controllers, Twin, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DEFINITION = Path(__file__).parent / "agent.yaml"
PLAN = Plan(budget_ms=30_000, steps=tuple(Planned(name, 1) for name in "abcd"))
SHORT = Plan(budget_ms=3000, steps=PLAN.steps)
"""Time for a quick step, also of a process that has no turn for a while."""
SHORT_S = 3.0
LONG_S = 60.0
"""For which is not waited."""


class Clock:
    """Both of a chain's clocks; only its test moves them."""

    def __init__(self) -> None:
        self.now_s = 1_790_000_000.0

    def how(self) -> dict[str, Any]:
        """As a chain takes them."""
        return {"clock_ns": lambda: round(self.now_s * 1e9), "wall_s": lambda: self.now_s}


@pytest.fixture(params=["sync", "async"])
def play(request: pytest.FixtureRequest) -> Any:
    """Plays ``(step, function, *arguments)`` in a run, of either kind; gives the run."""

    async def on_a_loop(run: Any, steps: Any) -> None:
        async with run:
            for step, function, *arguments in steps:
                await run.do(step, function, *arguments)

    def plays(chain: Chain, name: str, *steps: Any, **how: Any) -> Any:
        if request.param == "async":
            run: Any = chain.arun(name, **how)
            asyncio.run(on_a_loop(run, steps))
            return run
        run = chain.run(name, **how)
        with run:
            for step, function, *arguments in steps:
                run.do(step, function, *arguments)
        return run

    return plays


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chains.sqlite"


@pytest.fixture
def chain(path: Path) -> Iterator[Chain]:
    with Chain(PLAN, store=path) as chain:
        yield chain


def boom() -> None:
    raise LookupError("no such row")


def test_the_definition_as_it_stands(path: Path) -> None:
    with Chain.load(DEFINITION, store=path, **Clock().how()) as chain, chain.run("c") as run:
        assert run.left_s == pytest.approx(7.95)
        assert run.do("intent_parse", lambda budget: budget.share_s) == pytest.approx(1.59)
        assert run.do("tool_selection", lambda budget: budget.share_s) < 1
    with pytest.raises(FileError, match="nowhere"):
        Chain.load("nowhere.yaml", store=path)


def test_finished_steps_are_taken_from_the_store(chain: Chain, play: Any, path: Path) -> None:
    done: list[str] = []

    def deed(name: str) -> dict[str, Any]:
        done.append(name)
        return {"n": len(done), "list": (1, 2)}

    with pytest.raises(LookupError):
        play(chain, "c", ("a", deed, "a"), ("b", boom))
    run = play(chain, "c", ("a", deed, "a"), ("b", deed, "b"), ("a", deed, "a"))
    assert done == ["a", "b"]
    result = run.result()
    assert result.values == {"a": {"n": 1, "list": [1, 2]}, "b": {"n": 2, "list": [1, 2]}}
    assert [step.outcome for step in result.steps.values()] == ["kept", "done"]
    play(chain, "c", ("a", deed, "a"), user="another")
    assert done == ["a", "b", "a"]
    with closing(SqliteCheckpoints(path)) as store:
        assert [row.step for row in store.chain("app/", "c")] == ["a", "b"]


def test_what_fails_is_said_and_may_be_tried_again(chain: Chain) -> None:
    with chain.run("c") as run:
        with pytest.raises(LookupError, match="no such row"):
            run.do("a", boom)
        assert run.result().missing["a"] == "failed: LookupError: no such row"
        assert run.result().partial
        with pytest.raises(ChainError, match="JSON cannot hold"):
            run.do("b", lambda: object())
        assert run.do("b", lambda: 1) == 1
        with pytest.raises(ChainError, match="not in the chain"):
            run.do("e", lambda: 1)
        assert run.do("a", lambda: "now") == "now"
    assert not run.result().partial
    with pytest.raises(ValueError, match="mine"), chain.run("c2") as run:
        raise ValueError("mine")
    assert run.result().missing["a"].startswith("the run was left: ValueError")


def test_a_function_that_takes_too_long_is_left_alone(path: Path, play: Any) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def slow() -> str:
        go_on.wait(LONG_S)
        ended.set()
        return "too late"

    with Chain(SHORT, store=path) as chain:
        began_s = time.monotonic()
        run = play(chain, "c", ("a", lambda: "quick"), ("b", slow), ("c", lambda: "never"))
        assert 0.9 * SHORT_S < time.monotonic() - began_s < LONG_S / 2
        result = run.result()
        assert result.partial
        assert result.values == {"a": "quick"}
        assert result.missing["b"] == "late: the chain's time was over"
        assert result.missing["c"] == "the chain's time was over"
        assert result.steps["b"].outcome == "late"
        assert run.left_s == 0
        go_on.set()
        assert ended.wait(LONG_S)
        assert run.result().values == {"a": "quick"}, "its late result is dropped"
        with closing(SqliteCheckpoints(path)) as store:
            assert [row.step for row in store.chain("app/", "c")] == ["a"]


def test_a_coroutine_is_cancelled_at_its_time(path: Path) -> None:
    seen: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def stubborn() -> None:
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            seen.append("ignored")
        await asyncio.sleep(LONG_S)

    async def main(chain: Chain) -> None:
        for name, function in (("c1", slow), ("c2", stubborn)):
            began_s = time.monotonic()
            async with chain.arun(name) as run:
                await run.do("a", function)
            assert 0.9 * SHORT_S < time.monotonic() - began_s < LONG_S / 2
            assert run.result().steps["a"].outcome == "ended"
            assert run.result().partial

    with Chain(SHORT, store=path) as chain:
        asyncio.run(main(chain))
        assert seen == ["cancelled", "ignored"]
        with pytest.raises(ChainError, match="is a coroutine: use"), chain.run("c3") as run:
            run.do("a", slow)


def test_steps_beside_each_other(path: Path) -> None:
    go_on = threading.Event()

    async def main(chain: Chain) -> Any:
        async with chain.arun("c") as run:
            await asyncio.gather(
                run.do("a", asyncio.sleep, 0.05, "a"),
                run.do("b", asyncio.sleep, LONG_S),
                run.do("c", go_on.wait, LONG_S),
            )
        return run.result()

    with Chain(SHORT, store=path) as chain:
        result = asyncio.run(main(chain))
    go_on.set()
    assert result.values == {"a": "a"}
    assert {name: step.outcome for name, step in result.steps.items()} == {
        "a": "done", "b": "ended", "c": "late",
    }  # fmt: skip


def test_a_cancelled_caller_loses_no_step_halfway(chain: Chain, path: Path) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def long() -> None:
            begun.set()
            await asyncio.sleep(LONG_S)

        async def work() -> None:
            async with chain.arun("c") as run:
                await run.do("a", asyncio.sleep, 0, "done")
                await run.do("b", long)

        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with chain.run("c") as run:
        assert run.result().values == {"a": "done"}


def test_what_is_left_of_the_budget_goes_on_after_a_restart(path: Path, play: Any) -> None:
    long, clock = Plan(budget_ms=4000, steps=PLAN.steps), Clock()
    with Chain(long, store=path, **clock.how()) as chain:
        play(chain, "c", ("a", lambda: 1))
        clock.now_s += 2.0
        run = play(chain, "c", ("a", lambda: 2), ("b", lambda budget: budget.left_s))
        assert run.result().values["b"] == pytest.approx(1.95)
        clock.now_s += 2.1
        run = play(chain, "c", ("a", lambda: 2), ("c", lambda: 3))
        assert run.result().partial
        assert run.result().values["a"] == 1, "what is finished is there all the same"
        run = play(
            chain, "", ("c", lambda budget: budget.left_s),
            resume_from_checkpoint=run.checkpoint,
        )  # fmt: skip
        assert run.chain == "c"
        assert run.result().values["c"] == pytest.approx(3.95)


def test_going_back_to_a_checkpoint(chain: Chain, play: Any) -> None:
    done: list[str] = []
    steps = [(name, lambda name=name: done.append(name)) for name in "abc"]
    first = play(chain, "c", *steps).result()
    play(chain, "c", *steps, resume_from_checkpoint=first.checkpoint)
    assert done == ["a", "b", "c"], "after the last there is nothing to be done again"
    play(chain, "c", *steps, resume_from_checkpoint=first.checkpoints["a"])
    assert done == ["a", "b", "c", "b", "c"]
    other = play(chain, "other", *steps, resume_from_checkpoint=first.checkpoints["a"])
    assert done == ["a", "b", "c", "b", "c", "b", "c"]
    assert other.result().checkpoints["a"] != first.checkpoints["a"]
    play(chain, "c", *steps)
    assert len(done) == 7
    for user, checkpoint in (("eve", first.checkpoint), ("", "cp-0")):
        with pytest.raises(ChainError, match="there is no checkpoint"):
            play(chain, "c", user=user, resume_from_checkpoint=checkpoint)


def test_another_process_that_was_faster_counts(chain: Chain, path: Path) -> None:
    with chain.run("c") as run, Chain(PLAN, store=path) as second, second.run("c") as other:
        assert other.do("a", lambda: "other") == "other"
        assert run.do("a", lambda: "mine") == "other", "it was finished just now"

        def slow() -> str:
            other.do("b", lambda: "other")
            return "mine"

        assert run.do("b", slow) == "other", "both ran it, and agree on one"
        assert run.result().checkpoints == other.result().checkpoints


def test_what_a_function_is_given(path: Path, play: Any) -> None:
    chain = Chain(PLAN, store=path, **Clock().how())
    seen: list[Any] = []

    def step(number: int, budget: Budget) -> None:
        seen.append((budget.step_key, budget.traceparent, budget.left_s, budget.share_s))
        budget.note(rows=number, similarity=0.83, table="x" * 400)

    run = play(chain, "c", ("a", step, 3), ("b", step, 4))
    (key_a, trace_a, left_s, share_s), (key_b, trace_b, *_) = seen
    assert key_a == run.step_key("a") != key_b
    assert trace_a.split("-")[1] == trace_b.split("-")[1] == run.trace_id
    assert trace_a != trace_b
    assert left_s == pytest.approx(29.95)
    assert share_s == pytest.approx(left_s / 4)
    assert run.result().steps["a"].attributes == {
        "rows": 3, "similarity": 0.83, "table": "x" * 256,
    }  # fmt: skip
    play(chain, "c3", ("a", lambda budget: seen.append(budget), "its caller's"))
    assert seen[-1] == "its caller's"
    again = play(chain, "c", ("a", step, 3))
    assert again.trace_id == run.trace_id
    assert again.result().steps["a"].attributes["rows"] == 3
    with chain.run("c2") as run:
        run.do("a", lambda: run.note(rows=1))
        with pytest.raises(ChainError, match="texts, numbers and truths"):
            run.do("b", lambda: run.note(rows=[1]))
        with pytest.raises(ChainError, match="call it in there"):
            run.note(rows=1)
    chain.close()


def test_a_store_that_fails_is_said_and_the_step_is_not_finished(tmp_path: Path) -> None:
    class Failing(SqliteCheckpoints):
        broken = False

        def save(self, new: NewCheckpoint) -> str:
            if self.broken:
                raise CheckpointsError("the disk is full")
            return super().save(new)

    with closing(Failing(tmp_path / "c.sqlite")) as store:
        chain = Chain(PLAN, store=store)
        with chain.run("c") as run:
            store.broken = True
            with pytest.raises(CheckpointsError, match="the disk is full"):
                run.do("a", lambda: 1)
            assert run.result().missing["a"] == "failed: CheckpointsError: the disk is full"
            store.broken = False
            assert run.do("a", lambda: 2) == 2
        chain.close()
        assert store.chain("app/", "c"), "a store that was given is its giver's to close"


def test_a_store_that_is_held_up_does_not_hold_up_the_chain(path: Path, play: Any) -> None:
    """What it did not commit in time is not finished."""
    with (
        Chain(SHORT, store=path) as chain,
        closing(sqlite3.connect(path, check_same_thread=False)) as other,
    ):
        began_s = time.monotonic()
        run = play(chain, "c", ("a", int), ("b", lambda: bool(other.execute("BEGIN IMMEDIATE"))))
        took_s = time.monotonic() - began_s
        other.rollback()
    assert took_s < 9, "10 s are waited for a file that is locked"
    result = run.result()
    assert result.partial
    assert result.values == {"a": 0}
    assert "checkpoint was not committed" in result.missing["b"]


def test_a_store_that_does_not_answer_is_not_waited_for(path: Path, play: Any) -> None:
    go_on, ended = threading.Event(), threading.Event()

    class Stuck(SqliteCheckpoints):
        def chain(self, owner: str, chain: str) -> Any:
            go_on.wait(LONG_S)
            try:
                return super().chain(owner, chain)
            finally:
                ended.set()

    with closing(Stuck(path)) as store, Chain(SHORT, store=store) as chain:
        began_s = time.monotonic()
        with pytest.raises(CheckpointsError, match="did not answer within the 3000 ms"):
            play(chain, "c", ("a", int))
        assert time.monotonic() - began_s < LONG_S / 2
        go_on.set()
        assert ended.wait(LONG_S)


def test_too_many_late_functions_are_not_joined_by_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LATE_MOST", 2)
    free = threading.Event()
    with Chain(SHORT, store=path) as chain:
        for number in range(2):
            with chain.run(f"c{number}") as run:
                run.do("a", free.wait, LONG_S)
        with pytest.raises(ChainError, match="still run"), chain.run("c9") as run:
            run.do("a", free.wait, LONG_S)
        free.set()
        eventually("they have ended", lambda: not chain._late)
        with chain.run("c10") as run:
            run.do("a", lambda: 1)
        assert run.result().values


def test_names_and_uses_that_are_wrong_are_refused(chain: Chain, path: Path) -> None:
    with pytest.raises(ChainError, match="the chain is ''"):
        chain.run("")
    with pytest.raises(ChainError, match="the user is"):
        chain.run("c", user="a\nb")
    with pytest.raises(ChainError, match="has not begun"):
        chain.run("c").result()
    with pytest.raises(ChainError, match="no gateway was given"), chain.run("c") as run:
        run.call("a", {})
    with pytest.raises(ChainError, match="give its URL"):
        Chain(PLAN, store=path, gateway="127.0.0.1:8080")
    over = ChainOver("of another")
    with pytest.raises(ChainOver, match="of another"), chain.run("c") as run:
        raise over


def test_own_steps_are_told_to_the_gateway(
    path: Path, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "REPORT_S", LONG_S)
    monkeypatch.setattr(wire, "FLUSH_S", LONG_S)
    go_on = threading.Event()
    told: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.append((self.path, dict(self.headers.items()), body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with Chain(SHORT, store=path, gateway=url, api_key="twk_1", line="shop") as chain:

            def step(budget: Budget) -> None:
                budget.note(rows=12)
                time.sleep(0.05)

            with pytest.raises(LookupError):
                play(chain, "o/1", ("a", step), ("b", boom), user="u1")
            run = play(chain, "o/1", ("a", step), ("c", go_on.wait, LONG_S), user="u1")
        go_on.set()
        eventually("all is told", lambda: len(told) == 3, LONG_S)
        server.shutdown()
        thread.join(5)
    assert {path for path, *_ in told} == {"/v1/chains/o%2F1/steps"}
    headers = {name.lower(): value for name, value in told[0][1].items()}
    assert headers["authorization"] == "Bearer twk_1"
    assert headers["x-twinkeel-user"] == "u1"
    assert headers["x-twinkeel-line"] == "shop"
    assert headers["traceparent"].split("-")[1] == run.trace_id
    first, second, third = (body for *_, body in told)
    assert (first["step"], first["outcome"], first["attributes"]) == ("a", "done", {"rows": 12})
    assert first["checkpoint"].startswith("cp-")
    assert first["began_ago_ms"] >= first["took_ms"] >= 50
    assert (second["step"], second["outcome"]) == ("b", "failed")
    assert (third["step"], third["outcome"]) == ("c", "late")


@pytest.mark.parametrize("manner", ["sync", "async"])
def test_an_answer_that_breaks_off_is_asked_for_again(manner: str, path: Path) -> None:
    """As of a gateway that is killed while it writes it."""
    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(1)
            self.rfile.read(int(self.headers["content-length"]))
            body = b'{"choices": []}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if len(asked) > 1 else body[:5])

        def log_message(self, *given: Any) -> None:
            pass

    async def on_a_loop(chain: Chain) -> Any:
        async with chain.arun("c") as run:
            return await run.call("a", {})

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with Chain(PLAN, store=path, gateway=url) as chain:
            if manner == "sync":
                with chain.run("c") as run:
                    value = run.call("a", {})
            else:
                value = asyncio.run(on_a_loop(chain))
        server.shutdown()
    assert value == {"choices": []}
    assert len(asked) == 2


def test_nothing_is_needed_that_is_an_extra() -> None:
    code = (
        "import sys; import controller.chains;"
        " print([m for m in ('aiohttp', 'redis', 'langgraph') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr


def test_the_example(controllers: Controllers, twins: list[Twin], tmp_path: Path) -> None:
    controller = controllers([twin.url for twin in twins])
    database = str(tmp_path / "shop.sqlite")
    with closing(sqlite3.connect(database)) as db:
        db.executescript(
            "CREATE TABLE orders (customer, item); CREATE TABLE memory (key PRIMARY KEY, summary);"
            "INSERT INTO orders VALUES (42, 'lamp'), (42, 'chair'), (7, 'bed');"
        )
    results = [answer_order(DEFINITION, controller.url, MODEL, database) for _ in range(2)]
    assert results[0].values == results[1].values
    assert not results[0].partial
    assert results[0].values["db_query"] == [["lamp"], ["chair"]]
    assert results[0].steps["db_query"].attributes == {"rows": 2}
    with closing(sqlite3.connect(database)) as db:
        (memories,) = db.execute("SELECT count(*) FROM memory").fetchone()
    assert memories == 1
