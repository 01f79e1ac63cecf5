"""A chain's definition with its gateway and store, and what both kinds of runs do alike."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from controller.chains import records
from controller.chains.asking import CHAT, ModelCall, encode_body
from controller.chains.core import NAME_MOST as CHAIN_NAME_MOST
from controller.chains.core import (
    NO_TIME,
    NOT_SAVED,
    NS_PER_MS,
    ChainError,
    ChainOver,
    ChainResult,
    Course,
    Step,
    check_name,
)
from controller.chains.wire import Gateway, Reporter
from controller.store.checkpoints import (
    Checkpoint,
    Checkpoints,
    CheckpointsError,
    NewCheckpoint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controller.chains.core import Kind
    from policy.parameters.chains import Plan

LATE_MOST = 64
"""Functions of chains that are over and that still run; more are not begun."""
ATTRIBUTES_MOST = 32
NAME_MOST, TEXT_MOST = 64, 256
"""Characters of an attribute."""

_current: contextvars.ContextVar[Budget] = contextvars.ContextVar("twinkeel_step")


class Budget:
    """What a step that is a function may take, and what it is called.

    A function with an argument named ``budget`` is given one. Functions that cannot be stopped
    should pass ``left_s`` on to their own client as its time-out.
    """

    def __init__(self, run: RunBase, step: Step) -> None:
        self._run = run
        self._step = step
        self.step_key = records.step_key(run.user, run.chain, step.name)
        """For an idempotent write: the same for this step after any restart."""
        self.traceparent = records.traceparent(run.trace_id)
        self.share_s = step.share_ns / 1e9
        """Of what was left, when the step began; taking more takes it from later steps."""

    @property
    def left_s(self) -> float:
        """Until the chain is ended."""
        return self._run.left_s

    def note(self, **attributes: str | float | bool) -> None:
        """What is worth knowing of the step's result: it is kept, and seen in the chain's trace."""
        for name, value in attributes.items():
            if not isinstance(value, (str, int, float)):
                raise ChainError(
                    f"{name} is a {type(value).__name__}: note texts, numbers and truths"
                )
            kept = value[:TEXT_MOST] if isinstance(value, str) else value
            self._step.attributes[name[:NAME_MOST]] = kept
        if len(self._step.attributes) > ATTRIBUTES_MOST:
            raise ChainError(
                f"step {self._step.name!r} notes more than {ATTRIBUTES_MOST} attributes"
            )


class ChainBase:
    """A kind of chain: its plan, its gateway, and the store of its finished steps."""

    def __init__(
        self,
        plan: Plan,
        store: Checkpoints,
        *,
        gateway: str = "",
        api_key: str = "",
        line: str = "",
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.plan = plan
        self.gateway = Gateway.at(gateway) if gateway else None
        self.line = check_name("line", line) if line else ""
        self.clock_ns = clock_ns
        self.wall_s = wall_s
        self._api_key = api_key
        self._store = store
        self._lock = threading.Lock()
        self._late: set[Future[Any]] = set()

    def stored(self, work: Callable[[Checkpoints], Any]) -> Any:
        """Work on the store, one thread at a time."""
        with self._lock:
            return work(self._store)

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        if self.line:
            headers["x-twinkeel-line"] = self.line
        return headers

    def in_thread(self, work: Callable[[], Any], name: str) -> Future[Any]:
        """Begin it in a thread that nothing waits for when the process ends.

        Raises:
            ChainError: too many that were given up still run.
        """
        if len(self._late) >= LATE_MOST:
            raise ChainError(
                f"{LATE_MOST} functions of chains that are over still run: pass budget.left_s on as"
                " the time-out of what they call"
            )
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                future.set_result(context.run(work))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"chain-{name}", daemon=True).start()
        return future

    def give_up(self, future: Future[Any]) -> None:
        """Nobody waits for it any more: what it gives is dropped."""
        self._late.add(future)
        future.add_done_callback(self._late.discard)


class RunBase:
    """One chain under way: what needs no waiting, and the store's part, which blocks."""

    def __init__(
        self, kind: ChainBase, chain: str, user: str, session: str, resume: str, trace_id: str
    ) -> None:
        for what, name in (("user", user), ("session", session)):
            if name:
                check_name(what, name)
        if chain or not resume:
            check_name("chain", chain)
        self.kind = kind
        self.chain = chain
        self.user = user
        self._owner = records.owner_of(user)
        self._session = session
        self._resume = resume
        self.gateway_chain = chain
        """Its name at the gateway, by which ``twinkeel trace show`` finds it: its own, until it
        goes back to an earlier checkpoint: what is to run again would be answered from its own."""
        self._gateway_resume = ""
        """The gateway's checkpoint that its next call resumes from."""
        self._trace_id = records.check_trace_id(trace_id)
        self._ends_s = 0.0
        self._order: list[str] = []
        """Finished steps as the store has them: resuming from one forgets those after it."""
        self._course: Course | None = None
        self._reporter: Reporter | None = None

    # What the caller may ask

    @property
    def trace_id(self) -> str:
        return self._trace_id or records.trace_id(self.user, self.chain)

    @property
    def left_s(self) -> float:
        """What is left of the chain's budget."""
        return self.course.left_ns(self.kind.clock_ns()) / 1e9

    @property
    def course(self) -> Course:
        if self._course is None:
            raise ChainError("the run has not begun: use it as 'with chain.run(...) as run:'")
        return self._course

    @property
    def checkpoint(self) -> str:
        """The last one: what the chain resumes from."""
        return self.result().checkpoint

    def note(self, **attributes: str | float | bool) -> None:
        """Of the step whose function calls it; see ``Budget.note``."""
        budget = _current.get(None)
        if budget is None or budget._run is not self:
            raise ChainError("note is for a function that runs as a step: call it in there")
        budget.note(**attributes)

    def step_key(self, step: str) -> str:
        """The same for the same step of this chain after any restart, and for no other."""
        return records.step_key(self.user, self.chain, step)

    def result(self) -> ChainResult:
        """What there is so far."""
        return self.course.result(
            self.kind.clock_ns(), self.chain, self.user, self.trace_id, tuple(self._order)
        )

    # The store's part

    def _open(self) -> None:
        """Take what is finished from the store; the budget begins, or goes on. What the store takes
        for it is part of the budget."""
        now_ns, now_s = self.kind.clock_ns(), self.kind.wall_s()
        self._ends_s = now_s + self.kind.plan.budget_ms / 1e3
        if self._resume:
            self._go_back()
        rows = self._rows()
        left_ns = None
        if rows and not self._resume:
            ends_s = max(row.ends_s for row in rows)
            left_ns = round((ends_s - now_s) * 1e9)
        course = Course(self.kind.plan, now_ns, left_ns)
        self._ends_s = now_s + course.budget_ns / 1e9
        for row in rows:
            step = self._load(row)
            if step is not None:
                course.keep(step)
        self._course = course
        if self._gateway_resume:
            before = [step.gateway_checkpoint for step in course.steps.values()]
            self._gateway_resume = next(filter(None, reversed(before)), "")
        if self.kind.gateway is not None:
            self._reporter = Reporter(self.kind.gateway, self.gateway_chain, self._headers(""))

    def _save_s(self) -> float:
        return self.course.save_ns(self.kind.clock_ns()) / 1e9

    def _slow(self) -> CheckpointsError:
        return CheckpointsError(
            f"the store did not answer within the {self.kind.plan.budget_ms} ms that chain"
            f" {self.chain!r} has: see that it can be reached, and is not held up"
        )

    def _not_saved(self, step: Step) -> ChainOver:
        """The store has not committed it in time. If it still does, it is finished for whoever
        runs the chain the next time."""
        self.course.fail(step, self.kind.clock_ns(), NOT_SAVED)
        self._report(step)
        self._over(NO_TIME)
        return ChainOver(f"step {step.name!r}: {NOT_SAVED}")

    def _go_back(self) -> None:
        """To a checkpoint: what its chain did later is forgotten, or left to that chain."""
        source: Checkpoint | None = self.kind.stored(lambda s: s.load(self._resume, self._owner))
        if source is None:
            raise ChainError(
                f"there is no checkpoint {self._resume!r} of user {self.user!r} in the store: it is"
                " another's, or is not kept any more"
            )
        self.chain = self.chain or source.chain
        if self.chain == source.chain:
            undone = self.kind.stored(lambda s: s.undo(self._resume, self._owner))
            if undone and self.kind.gateway is not None:
                self._rename()
        else:
            undone = 1
            for row in self.kind.stored(lambda s: s.chain(self._owner, source.chain)):
                if row.content_type == records.CONTENT_TYPE:
                    self._copy(row)
                if row.id == self._resume:
                    break
        self._gateway_resume = "yes" if undone else ""

    def _rename(self) -> None:
        """For the gateway it is another chain from here on, whoever runs it."""
        name = records.renamed(self.chain, CHAIN_NAME_MOST)
        new = NewCheckpoint(
            self._owner, self.chain, f"{records.RENAMED}{name}", "", b"",
            content_type=records.RENAMED_TYPE, ends_s=self._ends_s, line=self.kind.line,
        )  # fmt: skip
        self.kind.stored(lambda s: s.save(new))

    def _copy(self, row: Checkpoint) -> None:
        """A step of another chain, into this one."""
        whole: Checkpoint | None = self.kind.stored(lambda s: s.load(row.id, self._owner))
        if whole is not None:
            self._save(whole.step, whole.request, whole.answer)

    def _rows(self) -> list[Checkpoint]:
        def read(store: Checkpoints) -> list[Checkpoint]:
            rows = store.chain(self._owner, self.chain)
            names = [row.step for row in rows if row.content_type == records.RENAMED_TYPE]
            self.gateway_chain = names[-1].removeprefix(records.RENAMED) if names else self.chain
            rows = [row for row in rows if row.content_type == records.CONTENT_TYPE]
            self._order = [row.step for row in rows]
            return rows

        found: list[Checkpoint] = self.kind.stored(read)
        return found

    def _load(self, row: Checkpoint) -> Step | None:
        whole: Checkpoint | None = self.kind.stored(lambda s: s.load(row.id, self._owner))
        return None if whole is None else records.decode(row.step, row.id, whole.answer)

    def _find(self, name: str) -> Step | None:
        """The step, if it is finished: another process may have done so just now."""
        row = next((row for row in self._rows() if row.step == name), None)
        return None if row is None else self._load(row)

    def _save(self, step: str, request: str, answer: bytes) -> str:
        new = NewCheckpoint(
            self._owner, self.chain, step, request, answer,
            content_type=records.CONTENT_TYPE, ends_s=self._ends_s, line=self.kind.line,
        )  # fmt: skip

        def save(store: Checkpoints) -> str:
            saved = store.save(new)
            if step not in self._order:
                self._order.append(step)
            return saved

        saved: str = self.kind.stored(save)
        return saved

    def _commit(self, step: str, request: str, answer: bytes) -> Step:
        """Once this returns the step is finished. The step as it is kept: if another process was
        faster, that one's value counts.

        Raises:
            CheckpointsError: the store did not keep it.
        """
        checkpoint = self._save(step, request, answer)
        try:
            row: Checkpoint | None = self.kind.stored(lambda s: s.load(checkpoint, self._owner))
        except CheckpointsError:
            row = None  # it is committed, whatever became of the store since
        if row is not None and row.request != request:
            with contextlib.suppress(CheckpointsError):
                self._rows()  # it lies where the other process put it
        return records.decode(step, checkpoint, answer if row is None else row.answer)

    # A step's begin and end

    def _begin(self, name: str, kind: Kind) -> Step:
        check_name("step", name)
        return self.course.begin(name, kind, self.kind.clock_ns())

    def _model_call(
        self, step: str, body: Mapping[str, Any], path: str, headers: Mapping[str, str] | None
    ) -> ModelCall:
        check_name("step", step)
        if self.kind.gateway is None:
            raise ChainError(
                f"step {step!r} is a model call, and no gateway was given: Chain.load(...,"
                " gateway='http://127.0.0.1:8080')"
            )
        every = {name.lower(): value for name, value in (headers or {}).items()}
        return ModelCall(
            path or CHAT,
            encode_body(step, body),
            {**every, **self._headers(step)},
            self._gateway_resume,
            goes_on=bool(self._resume),
        )

    def _headers(self, step: str) -> dict[str, str]:
        """To the gateway, of a step."""
        headers = self.kind.headers()
        headers["x-twinkeel-chain"] = self.gateway_chain
        headers["traceparent"] = records.traceparent(self.trace_id)
        if step:
            headers["x-twinkeel-step"] = step
        if self.user:
            headers["x-twinkeel-user"] = self.user
        if self._session:
            headers["x-twinkeel-session"] = self._session
        return headers

    def _bound(
        self, step: Step, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Callable[[], Any], Budget]:
        """The function with what it is called with; it finds its budget."""
        budget = Budget(self, step)
        if _wants_budget(function, args, named):
            named = {**named, "budget": budget}

        def work() -> Any:
            _current.set(budget)
            return function(*args, **named)

        return work, budget

    def _encoded(self, step: Step) -> bytes:
        """As it is to be kept.

        Raises:
            ChainError: JSON cannot hold it; the step has failed.
        """
        try:
            return records.encode(step, self.kind.clock_ns())
        except ChainError as error:
            self._failed(step, error)
            raise

    def _finish(self, step: Step, kept: Step) -> Any:
        """It is committed; its value."""
        step.value, step.attributes = kept.value, kept.attributes
        step.checkpoint, step.gateway_checkpoint = kept.checkpoint, kept.gateway_checkpoint
        self.course.finish(step, self.kind.clock_ns())
        self._report(step)
        return step.value

    def _over(self, why: str) -> None:
        for step in self.course.end(self.kind.clock_ns(), why):
            self._report(step)

    def _failed(self, step: Step, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.course.fail(step, self.kind.clock_ns(), why)
        self._report(step)

    def _report(self, step: Step) -> None:
        """Steps that the gateway does not see are told it, best-effort."""
        if self._reporter is None or step.kind == "model":
            return
        outcome = step.outcome if step.outcome in ("done", "failed") else "late"
        report = {
            "step": step.name,
            "took_ms": (self.kind.clock_ns() - step.began_ns) / NS_PER_MS,
            "outcome": outcome,
            "attributes": {k: v for k, v in step.attributes.items() if v is not None},
            "checkpoint": step.checkpoint,
        }
        headers = {"traceparent": records.traceparent(self.trace_id)}
        self._reporter.tell(headers, step.began_ns, report)

    def _close(self, error: BaseException | None) -> None:
        """The block is left: what was still open is given up."""
        if self._course is None:
            return
        still = [step for step in self._course.steps.values() if step.outcome == "open"]
        if still or error is not None:
            self._over("the run was left" if error is None else f"the run was left: {error!r}")
        if self._reporter is not None:
            self._reporter.close(self.left_s)


def _wants_budget(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> bool:
    """It has an argument of that name, and is not given it by its caller."""
    try:
        signature = inspect.signature(function)
        given = signature.bind_partial(*args, **named).arguments
    except (TypeError, ValueError):  # of some built in C, nothing is known; or the call is wrong
        return False
    return "budget" in signature.parameters and "budget" not in given
