"""Chains on an event loop; their steps may run beside each other."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from controller.chains.asking import Reply, Unreachable, Wait, ask
from controller.chains.base import RunBase
from controller.chains.core import NO_TIME, ChainOver
from controller.chains.wire import exchange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

    from controller.chains.asking import Ask
    from controller.chains.core import Step

GRACE_S = 0.02
"""For what a cancelled step has to put away; then it is left alone."""


class AsyncRun(RunBase):
    """A chain under way, in one event loop. When the time is over the ``async with`` block is left
    quietly, and ``result()`` says what there is."""

    _http: Any = None

    async def __aenter__(self) -> Self:
        if self.kind.gateway is not None:  # it takes a while, which is none of the budget's
            import aiohttp  # noqa: F401
        opening = asyncio.ensure_future(self._in_store(self._open))
        opening.add_done_callback(_heard)
        await asyncio.wait({opening}, timeout=self.kind.plan.budget_ms / 1e3)
        if not opening.done():
            raise self._slow()
        opening.result()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        over = isinstance(error, ChainOver) and self.course.over  # another chain's goes through
        try:
            await asyncio.to_thread(self._close, error)
        finally:
            if self._http is not None:
                await self._http.close()
        return over

    async def call(
        self,
        step: str,
        body: Mapping[str, Any],
        *,
        path: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """As ``Run.call``."""
        kept = await self._kept(step)
        if kept is not None:
            return kept.value
        call = self._model_call(step, body, path, headers)
        began = self._begun(step, "model")
        asking = ask(self.course, began, call)
        try:
            todo = next(asking)
            while True:
                came = None
                if isinstance(todo, Wait):
                    await asyncio.sleep(todo.for_ns / 1e9)
                else:
                    came = await self._send(todo)
                todo = asking.send((self.kind.clock_ns(), came))
        except StopIteration:
            pass
        except ChainOver as over:
            self._over(str(over))
            raise
        except BaseException as error:
            self._failed(began, error)
            raise
        self._gateway_resume = ""
        return await self._finished(began, call.request)

    async def do(self, step: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """As ``Run.do``; a coroutine function is cancelled when the time is over, any other runs in
        a thread."""
        kept = await self._kept(step)
        if kept is not None:
            return kept.value
        coroutine = inspect.iscoroutinefunction(function)
        began = self._begun(step, "coroutine" if coroutine else "function")
        try:
            work, _ = self._bound(began, function, args, named)
            if coroutine:
                in_time = await self._within(began, self._awaited(work))
            else:
                future = self.kind.in_thread(partial(_plain, step, work), step)
                try:
                    in_time = await self._within(began, asyncio.wrap_future(future))
                finally:
                    if not future.done():
                        self.kind.give_up(future)
        except BaseException as error:
            self._failed(began, error)
            raise
        if not in_time:
            self._over(NO_TIME)
            raise ChainOver(f"step {step!r}: {NO_TIME}")
        return await self._finished(began)

    async def _kept(self, step: str) -> Step | None:
        known = self.course.finished(step)
        if known is None and self.course.left_ns(self.kind.clock_ns()):
            finding = asyncio.ensure_future(self._in_store(self._find, step))
            finding.add_done_callback(_heard)
            await asyncio.wait({finding}, timeout=self._save_s())
            if not finding.done():
                self._over(NO_TIME)
                raise ChainOver(f"step {step!r}: {NO_TIME}")
            found = finding.result()
            known = None if found is None else self.course.keep(found)
        return known if known is not None and known.finished else None

    async def _finished(self, step: Step, request: str = "") -> Any:
        if not self.course.came_back(step):
            raise ChainOver(f"step {step.name!r}: {NO_TIME}")
        # It is seen to its end though the caller be cancelled: a step must not be lost halfway.
        saving = asyncio.ensure_future(self._saved(step, request or secrets.token_hex(12)))
        saving.add_done_callback(_heard)
        await asyncio.wait({saving}, timeout=self._save_s())
        if not saving.done():
            raise self._not_saved(step)
        return saving.result()

    async def _saved(self, step: Step, request: str) -> Any:
        answer = self._encoded(step)
        try:
            kept = await self._in_store(self._commit, step.name, request, answer)
        except BaseException as error:
            self._failed(step, error)
            raise
        return self._finish(step, kept) if step.outcome == "open" else kept.value

    async def _in_store(self, work: Callable[..., Any], *given: Any) -> Any:
        """In a thread of its own: one that the store holds up holds up nothing else."""
        return await asyncio.wrap_future(self.kind.in_thread(partial(work, *given), "store"))

    def _begun(self, step: str, kind: Any) -> Step:
        try:
            return self._begin(step, kind)
        except ChainOver as over:
            self._over(str(over))
            raise

    async def _awaited(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()

    async def _within(self, step: Step, work: Awaitable[Any]) -> bool:
        """Put its result into the step, if it is there before the chain's time is over."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(_heard)
        try:
            await asyncio.wait({task}, timeout=self.course.left_ns(self.kind.clock_ns()) / 1e9)
            if task.done():
                step.value = task.result()
                return True
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return False

    async def _send(self, todo: Ask) -> Reply | Unreachable:
        import aiohttp

        assert self.kind.gateway is not None
        if self._http is None:
            self._http = aiohttp.ClientSession()
        work = asyncio.ensure_future(exchange(self._http, self.kind.gateway, todo))
        try:
            await asyncio.wait({work}, timeout=todo.left_ns / 1e9)
        finally:
            if not work.done():
                work.cancel()
        return work.result() if work.done() else Unreachable(NO_TIME)


def _plain(step: str, work: Callable[[], Any]) -> Any:
    """A ``StopIteration`` cannot be handed on to an event loop: whoever waits would wait on."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError(f"step {step!r} raised StopIteration") from error


def _heard(task: asyncio.Future[Any]) -> None:
    """Nobody asks any more what became of it."""
    if not task.cancelled():
        task.exception()
