"""Chains whose steps run one after the other in blocking code."""

from __future__ import annotations

import inspect
import secrets
import time
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from controller.chains.asking import Reply, Unreachable, Wait, ask
from controller.chains.base import RunBase
from controller.chains.core import NO_TIME, ChainError, ChainOver
from controller.chains.wire import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from types import TracebackType

    from controller.chains.asking import Ask
    from controller.chains.core import Step


class Run(RunBase):
    """A chain under way, for one thread. When the time is over the ``with`` block is left quietly,
    and ``result()`` says what there is."""

    def __enter__(self) -> Self:
        future = self.kind.in_thread(self._open, "store")
        if not self._waited(future, self.kind.plan.budget_ms / 1e3):
            raise self._slow()
        future.result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        over = isinstance(error, ChainOver) and self.course.over
        self._close(error)
        return over

    def call(
        self,
        step: str,
        body: Mapping[str, Any],
        *,
        path: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """A step that is a model call through the gateway; its answer, decoded.

        Args:
            body: as the OpenAI API takes it, without ``stream``.
            path: ``/v1/chat/completions`` if empty.

        Raises:
            StepFailed: no model answered.
            ChainOver: the time is over.
            CheckpointsError: its answer could not be kept, so the step is not finished.
        """
        kept = self._kept(step)
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
                    time.sleep(todo.for_ns / 1e9)
                else:
                    came = self._send(todo)
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
        return self._finished(began, call.request)

    def do(self, step: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A step that is the caller's own function; what it returned, as JSON keeps it.

        It runs in a thread of its own. A function cannot be stopped: when the time is over it is
        left alone, its result is dropped, and the step is marked late. An argument named ``budget``
        is given by the run.

        Raises:
            Exception: what the function raised.
            ChainOver: the time is over.
            CheckpointsError: its result could not be kept, so the step is not finished.
        """
        kept = self._kept(step)
        if kept is not None:
            return kept.value
        if inspect.iscoroutinefunction(function):
            raise ChainError(f"step {step!r} is a coroutine: use 'async with chain.arun(...)'")
        began = self._begun(step, "function")
        try:
            work, _ = self._bound(began, function, args, named)
            future = self.kind.in_thread(work, step)
            wait([future], self.course.left_ns(self.kind.clock_ns()) / 1e9)
            in_time = future.done()
            if in_time:
                began.value = future.result()
            else:
                self.kind.give_up(future)
        except BaseException as error:
            self._failed(began, error)
            raise
        if not in_time:
            self._over(NO_TIME)
            raise ChainOver(f"step {step!r}: {NO_TIME}")
        return self._finished(began)

    def _kept(self, step: str) -> Step | None:
        known = self.course.finished(step)
        if known is None and self.course.left_ns(self.kind.clock_ns()):
            future = self.kind.in_thread(partial(self._find, step), "store")
            if not self._waited(future, self._save_s()):
                self._over(NO_TIME)
                raise ChainOver(f"step {step!r}: {NO_TIME}")
            found = future.result()
            known = None if found is None else self.course.keep(found)
        return known

    def _finished(self, step: Step, request: str = "") -> Any:
        self.course.came_back(step)
        answer = self._encoded(step)
        work = partial(self._commit, step.name, request or secrets.token_hex(12), answer)
        try:
            future = self.kind.in_thread(work, "store")
            in_time = self._waited(future, self._save_s())
            kept = future.result() if in_time else None
        except BaseException as error:
            self._failed(step, error)
            raise
        if kept is None:
            raise self._not_saved(step)
        return self._finish(step, kept)

    def _waited(self, future: Future[Any], for_s: float) -> bool:
        """Whether it was done in time; else it is left alone."""
        wait([future], for_s)
        if not future.done():
            self.kind.give_up(future)
            return False
        return True

    def _begun(self, step: str, kind: Any) -> Step:
        try:
            return self._begin(step, kind)
        except ChainOver as over:
            self._over(str(over))
            raise

    def _send(self, todo: Ask) -> Reply | Unreachable:
        assert self.kind.gateway is not None
        exchange = Exchange(self.kind.gateway)
        future = self.kind.in_thread(partial(exchange.send, todo), "call")
        try:
            wait([future], todo.left_ns / 1e9)
        finally:
            if not future.done():
                exchange.abort()
                self.kind.give_up(future)
        came: Reply | Unreachable = future.result() if future.done() else Unreachable(NO_TIME)
        return came
