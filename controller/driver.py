"""Between the world and the policy: what happens becomes events, what is decided is carried out.

Nothing is decided here. ``Runner`` keeps the order, the one timer and the log; this keeps the open
calls and the tasks that work on them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Literal, Protocol

from controller.gateway.streams import Streams
from controller.listener import Listener
from controller.upstream.client import Client
from policy.decisions import Abort, Alert, Dispatch, Refused, Settled
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Cancelled,
    Failed,
    PolicySwitched,
    ReplicaDown,
)
from policy.parameters import canonical
from policy.runner import Runner
from policy.service import Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from controller.call import Call
    from controller.config import Settings
    from controller.errands import Errands
    from controller.upstream.replica import Replica
    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters

HOOKS = ("arrived", "dispatched", "first_token", "settled", "lost", "decided", "switched", "fed")
LOGGER = logging.getLogger("twinkeel")
SILENCE_S = 2.0
"""When a server that takes no connections any more has stopped finishing what it had."""
LOOK_S = 1.0
"""How often it is looked for calls that take too long."""
STALL_NS = 20_000_000
"""A timer this late means that the process stood still."""
AFTER_READING_S = 0.005
"""Long enough for the loop to read what lies in its sockets."""
TROUBLE_AGAIN_NS = 60_000_000_000
FLUSH_S = 0.02
"""How often the decision log is written."""


class Log(Protocol):
    """Where decisions are written: ``controller.store.log.LiveLog``."""

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None: ...
    def flush(self) -> None: ...


class Clock:
    """The decision log's time: it goes on where the process before left it."""

    __slots__ = ("_offset_ns",)

    def __init__(self, start_ns: int = 0) -> None:
        self._offset_ns = start_ns - time.monotonic_ns()

    def __call__(self) -> int:
        return time.monotonic_ns() + self._offset_ns


class Driver:
    """Drives one policy.

    Args:
        policy: fresh, or as it was before a restart.
        parameters: those in force.
        log: of decisions.
        replicas: every server that there may be, by id.
        clock: of the log.
        listeners: who is told; see ``Listener``.
        traceparent: the trace context that goes with a try.
        next_request: the first id to give.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        parameters: Parameters,
        log: Log,
        replicas: Sequence[Replica],
        clock: Callable[[], int],
        listeners: Sequence[Listener] = (),
        traceparent: Callable[[Call], str] = lambda call: "",
        next_request: int = 0,
    ) -> None:
        self.settings = settings
        self.features = settings.features
        self.policy = policy
        self.parameters = parameters
        self.replicas = {replica.id: replica for replica in replicas}
        self.calls: dict[int, Call] = {}
        """Open requests, in order of arrival."""
        self._hear: dict[str, list[Callable[..., None]]] = {name: [] for name in HOOKS}
        for listener in listeners:
            self.listen(listener)
        self.now_ns = clock
        self.draining = False
        self.open = 0
        """Requests whose caller has not been told everything yet."""
        self.refused = 0
        """Events that the policy found illegal: always 0 unless there is a fault in the code."""
        self.refusal = ""
        """What it said of the last of them."""
        self.suspect: Callable[[Replica], object] = lambda replica: None
        self._ended: Callable[[Replica], Awaitable[None]] | None = None
        self._offered: Call | None = None
        """The request that the policy is being told of."""
        self._direct: tuple[Replica, Dispatch] | None = None
        """Where it is to be sent at once."""
        self._errands: Errands | None = None
        self._troubles: dict[str, int] = {}
        """Until when each is not told again."""
        self._log = log
        self._next = next_request
        self._loop = asyncio.get_running_loop()
        self._givers: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._repeated: list[asyncio.TimerHandle] = []
        self.streams = Streams(clock, settings.limits.unread_s_most)
        self.client = Client(self, settings.features, traceparent, not settings.keys)
        self._runner = Runner(policy, clock, self._apply, self._arm, log)

    @property
    def candidate(self) -> Parameters | None:
        """What serves a share of the callers, while a canary goes on: the policy may end it."""
        canary = self.policy.canary if isinstance(self.policy, Service) else None
        return None if canary is None else canary.candidate.parameters

    # ---- events ----

    def start(
        self,
        errands: Errands,
        suspect: Callable[[Replica], object],
        ended: Callable[[Replica], Awaitable[None]] | None = None,
    ) -> None:
        """Take work from now on.

        Args:
            errands: does what is asked for beside sending requests.
            suspect: is told of a replica that could not be reached.
            ended: waits a moment for the end of a replica whose connection broke.
        """
        self._errands = errands
        self.suspect = suspect
        self._ended = ended
        self.every(FLUSH_S, self._log.flush)
        self.every(LOOK_S, self._time_out)

    def listen(self, listener: Listener) -> None:
        """Tell it what happens from now on; of what it does not override it is not told."""
        for name, hearers in self._hear.items():
            if getattr(type(listener), name) is not getattr(Listener, name):
                hearers.append(getattr(listener, name))

    def _say(self, hook: str, *what: object) -> None:
        """Tell the listeners; one that fails must not stop a request on its way."""
        for hear in self._hear[hook]:
            try:
                hear(*what)
            except Exception:
                LOGGER.exception("a listener failed at %s", hook)

    def feed(self, event: Event) -> None:
        """Let the policy see ``event``."""
        self._say("fed", self.now_ns(), event)
        self._runner.feed(event)
        if type(event) is ReplicaDown:
            replica = self.replicas.get(event.replica)  # an earlier run may have had more
            if replica is not None and replica.attempts:
                task = self._loop.create_task(self._give_up(replica))
                self._givers.add(task)
                task.add_done_callback(self._givers.discard)

    async def serve(self, call: Call) -> None:
        """Take a request, until it has its outcome.

        Where it can be sent at once, as most can, that is done here, in its own task: one of its
        own would cost two turns of the loop.
        """
        self._offer(call)
        if self._direct is not None:
            replica, decision = self._direct
            self._direct = None
            await self._attempt_here(call, replica, decision)
        if call.done is not None:
            await call.done

    async def _attempt_here(self, call: Call, replica: Replica, decision: Dispatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        stream = call.asked.stream
        call.own = call.attempt = task
        replica.attempts.add(task)
        replica.streams += stream
        try:
            await self.client.attempt(call, replica, decision)
        except asyncio.CancelledError:
            # The policy's Abort ends the try, and the caller's leaving ends it all.
            if not call.aborted or task.uncancel():
                raise
        finally:
            call.aborted = False
            replica.attempts.discard(task)
            replica.streams -= stream
            if call.attempt is task:
                call.attempt = None

    def _offer(self, call: Call) -> None:
        request = self._next
        self._next = request + 1
        self.open += 1
        call.request = request
        call.done = self._loop.create_future()
        self.calls[request] = call
        asked = call.asked
        call.arrived_ns = self.now_ns()
        self._say("arrived", call)
        self._offered = call
        try:
            self.feed(
                Arrived(
                    request, asked.model, asked.endpoint, asked.prompt_bytes, asked.max_tokens,
                    asked.sla, asked.line, asked.user, asked.session, asked.deadline_ns,
                    asked.messages, asked.stream, asked.prefix, asked.prefix_block_bytes,
                    asked.chain, asked.step, asked.resume,
                )
            )  # fmt: skip
        finally:
            self._offered = None
            call.gateway_ns += self.now_ns() - call.read_ns

    async def broke(self, replica: Replica) -> None:
        """A connection to it broke. A process's connections break a moment before its end is seen,
        and that is told first: so its cause is known, and a request finds what took its place."""
        if replica.up and self._ended is not None:
            await self._ended(replica)
        if replica.up:
            self.suspect(replica)

    def cancel(self, call: Call) -> None:
        """Its caller went away; nothing happens if it is settled already."""
        if call.settled is None:
            self.feed(Cancelled(call.request))

    def first_token(self, call: Call) -> None:
        """The policy knows; the listeners are told."""
        self._say("first_token", call)

    def told(self, call: Call) -> None:
        """The caller of a settled request has been told, as far as it can be."""
        self.open -= 1
        call.settled_ns = self.now_ns()
        if call.settled is not None:
            self._say("settled", call, call.settled)

    def switch(self, parameters: Parameters) -> None:
        """Another policy file rules from now on.

        Raises:
            ValueError: the policy does not take it; the old one goes on.
        """
        refused = self.refused
        self.feed(PolicySwitched(canonical(self.parameters), canonical(parameters)))
        if self.refused != refused:
            raise ValueError(
                f"the policy {parameters.name} was refused: a switch to or from discipline fifo"
                " needs a restart"
            )
        self.parameters = parameters
        self._say("switched", parameters)

    def canary(self, parameters: Parameters, share_permille: int, salt: int) -> None:
        """``parameters`` serve a share of the callers from now on, or another share than before.

        Raises:
            ValueError: the policy does not take it; what went on before goes on.
        """
        self._asked(
            CanaryStarted(canonical(self.parameters), canonical(parameters), share_permille, salt),
            f"the canary of {parameters.name} with {share_permille} per mille",
        )

    def end_canary(self, keep: Literal["old", "new"]) -> None:
        """The policy that is kept serves everyone from now on.

        Raises:
            ValueError: there is no canary.
        """
        candidate = self.candidate
        self._asked(CanaryEnded(keep), "the end of the canary")
        if keep == "new" and candidate is not None:
            self.parameters = candidate
            self._say("switched", candidate)

    def _asked(self, event: Event, what: str) -> None:
        refused = self.refused
        self.feed(event)
        if self.refused != refused:
            raise ValueError(f"the policy refused {what}: {self.refusal}")

    def snapshot(self) -> bytes:
        return self.policy.snapshot()

    def trouble(self, key: str, text: str) -> None:
        """Something is wrong with the controller itself: told like an alert, but not too often."""
        now_ns = self.now_ns()
        if now_ns < self._troubles.get(key, 0):
            return
        self._troubles[key] = now_ns + TROUBLE_AGAIN_NS
        LOGGER.warning("%s: %s", key, text)
        self._say("decided", Alert(f"controller {key}", text, (), "serving goes on"))

    def _time_out(self) -> None:
        """Give up calls that take too long, whatever the policy thinks of them."""
        now_ns = self.now_ns()
        for call in list(self.calls.values()):
            if call.attempt is not None and call.dispatched_ns + self._most_ns(call) < now_ns:
                self._cancel(call, call.attempt)
                self.feed(Failed(call.request, call.replica, "timeout"))

    def _most_ns(self, call: Call) -> int:
        """How long a try may take. Where callers wait in the servers' queues, nobody knows."""
        limits, asked = self.settings.limits, call.asked
        most_s = limits.call_s_most
        if not asked.stream and asked.max_tokens and not self.settings.observe:
            units = asked.max_tokens + asked.prompt_bytes / 1000
            most_s = min(most_s, limits.whole_s_least + limits.whole_token_s * units)
        return round(most_s * 1e9)

    async def _give_up(self, replica: Replica) -> None:
        """A server that takes no connection may still finish what it has, as vLLM does when it is
        told to end; what it stops answering is lost."""
        tokens = -1
        while replica.attempts and replica.tokens != tokens and not replica.up:
            tokens = replica.tokens
            await asyncio.sleep(SILENCE_S)
        if replica.up:
            return
        for call in list(self.calls.values()):
            for task in (call.attempt, call.second):
                if task in replica.attempts:
                    self._cancel(call, task)
                    self.feed(Failed(call.request, replica.id, "replica_lost"))

    # ---- time ----

    def _arm(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, at_ns - self.now_ns()) / 1e9
        self._timer = self._loop.call_later(delay_s, self._ring, at_ns)

    def _ring(self, at_ns: int, reading: bool = False) -> None:
        # Loops round delays to milliseconds, so it may be too early by part of one. Much too late,
        # it is this process that stood still, and what came meanwhile lies unread: that goes first,
        # or its silence would be taken for the servers'.
        late_ns = self.now_ns() - at_ns
        if late_ns < 0:
            self._timer = self._loop.call_later(0.001, self._ring, at_ns)
        elif late_ns > STALL_NS and not reading:
            self._timer = self._loop.call_later(AFTER_READING_S, self._ring, at_ns, True)
        else:
            self._timer = None
            self._runner.tick()

    def at(self, at_ns: int, work: Callable[[], object]) -> None:
        """Do ``work`` then, or a little later."""
        if self.now_ns() < at_ns:
            delay_s = (at_ns - self.now_ns()) / 1e9 + 0.001
            self._loop.call_later(delay_s, self.at, at_ns, work)
        else:
            work()

    def every(self, s: float, work: Callable[[], object]) -> None:
        """Do ``work`` again and again, until ``close``."""

        def again() -> None:
            self._repeated[number] = self._loop.call_later(s, again)
            work()

        number = len(self._repeated)
        self._repeated.append(self._loop.call_later(s, again))

    # ---- decisions ----

    def _apply(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            self._dispatch(decision)
        elif isinstance(decision, Settled):
            self._settle(decision)
        elif isinstance(decision, Abort):
            self._abort(decision)
        else:
            if isinstance(decision, Refused):
                self.refused += 1
                self.refusal = decision.why
            if self._errands is not None:
                self._errands.run(decision)
            self._say("decided", decision)

    def _dispatch(self, decision: Dispatch) -> None:
        call = self.calls[decision.request]
        replica = self.replicas[decision.replica]
        call.replica = replica.id
        call.version = "" if replica.spec is None else replica.spec.version
        call.tier = decision.tier
        call.tries += 1
        call.dispatched_ns = self.now_ns()
        call.output_tokens = call.events_sent = 0
        call.first_ns = -1
        call.tail = []
        self._say("dispatched", call)
        if call is self._offered:
            self._direct = replica, decision
            return
        attempt = self._loop.create_task(self.client.attempt(call, replica, decision))
        call.attempt = attempt
        self._track(attempt, replica, call.asked.stream)

    def _track(self, task: asyncio.Task[None], replica: Replica, stream: bool) -> None:
        replica.attempts.add(task)
        replica.streams += stream

        def over(task: asyncio.Task[None]) -> None:
            replica.attempts.discard(task)
            replica.streams -= stream
            if not task.cancelled() and task.exception() is not None:
                self._loop.call_exception_handler(
                    {"message": f"a call to {replica.name} failed", "exception": task.exception()}
                )

        task.add_done_callback(over)

    def second(self, call: Call, replica: Replica, run: asyncio.Task[None]) -> None:
        """``run`` is a second run of ``call`` on ``replica``."""
        call.second = run
        self._track(run, replica, stream=False)

    def _abort(self, decision: Abort) -> None:
        """Close the connection: nothing that is still on its way back is heard."""
        call = self.calls.get(decision.request)
        if call is None:
            return
        if call is self._offered:
            self._direct = None  # it was to be sent at once, and is not
        for task in (call.attempt, call.second):
            self._cancel(call, task)
        call.attempt = call.second = None

    def _cancel(self, call: Call, task: asyncio.Task[None] | None) -> None:
        """End a try, whether it has a task of its own or runs in its caller's."""
        if task is None or task.done() or task is asyncio.current_task():
            return
        if task is call.own:
            if call.aborted:  # once is enough: what is more would end its caller's wait, too
                return
            call.aborted = True
        task.cancel()

    def _settle(self, settled: Settled) -> None:
        call = self.calls.pop(settled.request, None)
        if call is None:  # it was open when an earlier process ended
            self._say("lost", settled)
            return
        call.settled = settled
        call.tier = settled.tier or call.tier
        if call.done is not None and not call.done.done():
            call.done.set_result(None)

    async def close(self) -> None:
        """Stop timers and calls; the log is the owner's to close."""
        for handle in (self._timer, *self._repeated):
            if handle is not None:
                handle.cancel()
        tasks = [*self._givers]
        tasks += [task for replica in self.replicas.values() for task in replica.attempts]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        self._log.flush()
