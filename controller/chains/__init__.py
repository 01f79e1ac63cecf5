"""Agent chains that end in time, from the side of who runs them.

    chain = Chain.load("agent.yaml", gateway="http://127.0.0.1:8080", store="chains.sqlite")
    with chain.run("order-42", user="u1") as run:
        intent = run.call("intent_parse", {"model": "m", "messages": [...]})
        rows = run.do("db_query", query, "select ...")
    result = run.result()

Each step gets its share of what is left of the chain's budget, is checkpointed when it is finished,
and is not run again by whoever runs the chain of this name the next time. When nothing is left, the
rest is ended, and what is there is the result, marked partial.

- ``Chain``: a definition with its gateway and store; ``Run``, ``AsyncRun``: one chain of it, for
  blocking code and on an event loop; ``ChainResult``: what there is of it in the end;
- ``Step``: one of the definition; ``Budget``: what one that is a function may take;
- ``ChainError``: it cannot be run as asked; ``ChainOver``: nothing is left; ``StepFailed``: a model
  call that came to nothing; ``CheckpointsError``: the store cannot be used;
- ``controller.chains.langgraph.LangGraphSaver``: a checkpointer for LangGraph, which it needs.

The files: ``core`` (the budget), ``base`` (what both kinds of runs share), ``running`` and
``async_running``, ``records`` (what a step leaves in the store), ``asking`` (a model call) and
``wire`` (HTTP to the gateway).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from controller.chains.async_running import AsyncRun
from controller.chains.base import Budget, ChainBase
from controller.chains.core import ChainError, ChainOver, ChainResult, Step, StepFailed
from controller.chains.running import Run
from controller.store.checkpoints import Checkpoints, CheckpointsError, open_checkpoints
from policy.files import load_chain

if TYPE_CHECKING:
    from policy.parameters.chains import Plan

__all__ = [
    "AsyncRun", "Budget", "Chain", "ChainError", "ChainOver", "ChainResult", "CheckpointsError",
    "Run", "Step", "StepFailed",
]  # fmt: skip

STORE = "twinkeel-chains.sqlite"


class Chain(ChainBase):
    """A kind of chain; each ``run`` or ``arun`` is one of it. Runs of several threads may use it.

    Args:
        plan: from a definition; see ``load``.
        store: where finished steps are kept: a file, a ``redis://`` URL, or a store that is open,
            which stays the caller's to close.
        gateway: URL; not needed without model calls.
        api_key: of the gateway.
        line: the business line, which the gateway may have a plan for.

    Raises:
        ChainError: a URL or name cannot be used.
        CheckpointsError: the store cannot be used.
    """

    def __init__(self, plan: Plan, *, store: str | Path | Checkpoints = STORE, **how: Any) -> None:
        self._own = isinstance(store, (str, Path))
        opened = open_checkpoints(store) if isinstance(store, (str, Path)) else store
        try:
            super().__init__(plan, opened, **how)
        except BaseException:
            if self._own:
                opened.close()
            raise

    @classmethod
    def load(cls, path: str | Path, **how: Any) -> Self:
        """From its definition: ``chain_timeout: 8s`` and ``steps: [{name, weight}, ...]``.

        Raises:
            FileError: the file is wrong: where, and what.
        """
        return cls(load_chain(Path(path)), **how)

    def run(
        self,
        chain: str = "",
        *,
        user: str = "",
        session: str = "",
        resume_from_checkpoint: str = "",
        trace_id: str = "",
    ) -> Run:
        """One chain, for blocking code. What is finished of it is taken from the store, and what is
        left of its budget goes on.

        Args:
            chain: its name; the same after a restart. May be left out to resume the same chain.
            resume_from_checkpoint: goes on after it with a new budget: in its own chain, where what
                was done later is forgotten, or in a new one.
            trace_id: 32 hexadecimal digits, if the caller has a trace already.
        """
        return Run(self, chain, user, session, resume_from_checkpoint, trace_id)

    def arun(
        self,
        chain: str = "",
        *,
        user: str = "",
        session: str = "",
        resume_from_checkpoint: str = "",
        trace_id: str = "",
    ) -> AsyncRun:
        """The same on an event loop."""
        return AsyncRun(self, chain, user, session, resume_from_checkpoint, trace_id)

    def close(self) -> None:
        if self._own:
            self.stored(lambda store: store.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
