"""LangGraph's own graphs over both stores."""

from __future__ import annotations

import asyncio
import operator
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from controller.chains.langgraph import LangGraphSaver
from controller.store.checkpoints import Checkpoints, open_checkpoints
from tests.redis_server import open_patiently, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class State(TypedDict):
    said: Annotated[list[str], operator.add]


@pytest.fixture(params=["sqlite", "redis"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Checkpoints]]:
    if request.param == "sqlite":
        yield lambda: open_checkpoints(tmp_path / "c.sqlite")
    else:
        with redis_server() as server:
            yield lambda: open_patiently(server.url)


def graph(store: Checkpoints, ran: list[str], owner: str = "") -> Any:
    """plan -> (left, right) -> ask, which is interrupted -> end; nodes tell that they ran.

    The right one fails once, when what the left one did is kept: else that may be cut off.
    """
    saver, left_kept = LangGraphSaver(store, owner), threading.Event()
    put_writes = saver.put_writes

    def putting(config: Any, writes: Any, *given: Any) -> None:
        put_writes(config, writes, *given)
        if ("said", ["left"]) in writes:
            left_kept.set()

    saver.put_writes = putting  # type: ignore[method-assign]

    def node(name: str) -> Callable[[State], State]:
        def run(state: State) -> State:
            ran.append(name)
            return {"said": [name]}

        return run

    def ask(state: State) -> State:
        ran.append("ask")
        return {"said": [interrupt("may I?")]}

    def fails_once(state: State) -> State:
        ran.append("right")
        if ran.count("right") == 1:
            assert left_kept.wait(60)
            raise RuntimeError("the tool is down")
        return {"said": ["right"]}

    builder = StateGraph(State)
    for name in ("plan", "left"):
        builder.add_node(name, node(name))
    builder.add_node("right", fails_once)
    builder.add_node("ask", ask)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "left")
    builder.add_edge("plan", "right")
    builder.add_edge(["left", "right"], "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


def config(thread: str = "t1") -> Any:
    return {"configurable": {"thread_id": thread}}


def test_what_failed_is_run_again_and_nothing_else(opener: Callable[[], Checkpoints]) -> None:
    ran: list[str] = []
    with closing(opener()) as store, pytest.raises(RuntimeError, match="the tool is down"):
        graph(store, ran).invoke({"said": ["hello"]}, config())
    assert sorted(ran) == ["left", "plan", "right"]
    with closing(opener()) as store:  # another process, as far as the store can tell
        stopped = graph(store, ran).invoke(None, config())
        assert stopped["__interrupt__"][0].value == "may I?"
        assert ran.count("left") == ran.count("plan") == 1
    with closing(opener()) as store:
        end = graph(store, ran).invoke(Command(resume="yes"), config())
        assert end == {"said": ["hello", "plan", "left", "right", "yes"]}
        assert sorted(ran) == ["ask", "ask", "left", "plan", "right", "right"]

        history = list(graph(store, ran).get_state_history(config()))
        assert history[0].values["said"] == end["said"]
        assert [state.next for state in history][-3:] == [("left", "right"), ("plan",), (START,)]
        assert [state.next for state in history][:2] == [(), ("ask",)]

        # Time travel: from the point after the plan, anew.
        before = next(state for state in history if state.next == ("left", "right"))
        graph(store, ran).invoke(None, before.config)
        assert ran.count("plan") == 1
        assert ran.count("left") == 2


def test_the_same_on_an_event_loop(opener: Callable[[], Checkpoints]) -> None:
    ran: list[str] = ["right"]  # so that the tool is up

    async def main() -> None:
        with closing(opener()) as store:
            stopped = await graph(store, ran).ainvoke({"said": []}, config("t2"))
            assert stopped["__interrupt__"]
        with closing(opener()) as store:
            app = graph(store, ran)
            assert (await app.aget_state(config("t2"))).next == ("ask",)
            end = await app.ainvoke(Command(resume="yes"), config("t2"))
            assert end["said"] == ["plan", "left", "right", "yes"]
            assert len([state async for state in app.aget_state_history(config("t2"))]) == 5
            assert len([s async for s in app.aget_state_history(config("t2"), limit=2)]) == 2
            found = app.aget_state_history(config("t2"), filter={"source": "input"})
            assert [state.next async for state in found] == [(START,)]
            await app.checkpointer.adelete_thread("t2")
            assert (await app.aget_state(config("t2"))).values == {}

    asyncio.run(main())
    assert ran == ["right", "plan", "left", "right", "ask", "ask"]


def test_threads_of_others_are_not_seen(opener: Callable[[], Checkpoints]) -> None:
    ran: list[str] = ["right"]
    with closing(opener()) as store:
        graph(store, ran, "ann").invoke({"said": []}, config())
        assert graph(store, ran, "eve").get_state(config()).values == {}
        assert graph(store, ran, "ann").get_state(config("t9")).values == {}
        with pytest.raises(ValueError, match="name a thread"):
            list(LangGraphSaver(store, "ann").list(None))
