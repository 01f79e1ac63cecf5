"""Between the policy and the store that several controllers share.

What the policy asks within one turn of the loop, or while an answer is awaited, goes out together.
With the store gone the policy is told so, at the latest after 0.7 s, and goes on by itself. Nothing
here ever keeps a request waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from controller.listener import Listener
from controller.sharing.gauges import Counts
from controller.sharing.store import (
    ANSWER_S,
    CALM_MS,
    LEASE_MS,
    Leave,
    Quota,
    Session,
    StoreError,
    shown,
)
from policy.decisions import Lease, Release
from policy.events import QuotaLeased, ReplicaShare, ReplicaUp, SessionOwned, StoreChanged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from controller.call import Call
    from controller.driver import Driver
    from controller.sharing.agreeing import Agreeing
    from controller.sharing.store import Ask, Store, Told
    from policy.events import Event

NS_PER_MS = 1_000_000
SECOND = 1_000_000_000
BEAT_S = 0.4
"""How often a controller says that it is there, at least."""
ASKS_MOST = 500
"""In one pipeline; more go in the next."""
LEAVES_MOST = 10_000
RETRY_S = (0.05, 0.1, 0.2, 0.4)
"""Between tries to reach the store; the last for all that follow. Shorter than its calm."""
SHARE_MS, SHARE_MS_MOST, FEW, MANY = 600, LEASE_MS, 200, 1_000
"""A share counts a second longer than it lasts, and others wait for it where its holder was killed.
So it lasts short, unless there are so many keys that asking again so often would cost too much."""
WHOLE = 1000
LOGGER = logging.getLogger("twinkeel")


class _Held(NamedTuple):
    """What the policy was granted last."""

    lease: Lease
    shares: tuple[int, int]
    """0 where there is nothing, or no limit."""
    until_ns: int


class Sharing(Listener):
    """Keeps one controller in touch with the store; ``run`` takes what the policy decides.

    Args:
        agreeing: compares what this controller runs with the others; None: it tells them nothing.
    """

    def __init__(self, driver: Driver, store: Store, agreeing: Agreeing | None = None) -> None:
        self._driver = driver
        self._store = store
        self._agreeing = agreeing
        self.counts = Counts()
        self._asks: dict[tuple[str, str], Lease] = {}
        """What is to be asked next. Of each key only the last counts."""
        self._leaves: dict[str, Release] = {}
        """Sessions to be given back next: before any is asked for, since it may be wanted again."""
        self._held: dict[tuple[str, str], _Held] = {}
        self._told: tuple[str, int] = ("", 1)
        """What the policy was told last: how it stands, and how many controllers there are."""
        self._went: deque[tuple[int, str]] = deque()
        """When requests of sessions went on, within the last second."""
        self._calm_ns = 0
        """Until when the store may not know of all that there is."""
        self._forget_ns = 0
        self._work: asyncio.Event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def begin(self) -> None:
        """Try to reach the store once, tell the policy how it stands, and go on in the background.
        A store that is not there stops nothing."""
        try:
            await self._reach()
        except StoreError as error:
            self._lost(error)
        self._task = asyncio.get_running_loop().create_task(self._run())

    # ---- what the policy decides ----

    def run(self, decision: Lease | Release) -> None:
        """Ask the store; nothing while it is gone: the policy asks again once it is back."""
        if self._closing:
            return
        if isinstance(decision, Release):
            self._held.pop(("session", decision.session), None)
            if len(self._leaves) < LEAVES_MOST:  # what is not left lapses
                self._leaves[decision.session] = decision
        elif self._told[0] == "shared":
            self._asks[decision.kind, decision.name] = decision
        self._work.set()

    # ---- the connection ----

    async def _run(self) -> None:
        tries = 0
        while not self._closing:
            try:
                if self._told[0] != "shared":
                    await self._reach()
                tries = 0
                await self._turn()
            except StoreError as error:
                self._lost(error)
            except Exception as error:
                LOGGER.exception("sharing failed")
                self._lost(StoreError(f"a fault of this program: {error}"))
            if self._told[0] != "shared" and not self._closing:
                await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                tries += 1

    async def _reach(self) -> None:
        await self._store.open()
        began_ns = self._driver.now_ns()
        told = await self._exchange([])
        self._counted(began_ns)
        # What was held when it was lost is claimed: it may not know of it any more. Nor of all
        # controllers, before they are back, too.
        self._calm_ns = self._driver.now_ns() + CALM_MS * NS_PER_MS
        self._held = {
            key: held._replace(until_ns=self._calm_ns) for key, held in self._held.items()
        }
        if self._told[0] == "lost":
            LOGGER.info("the store %s is back", shown(self._store.url))
        self._shared(told.controllers)

    async def _turn(self) -> None:
        """Ask what there is to ask, or say that it is still there."""
        if not self._asks and not self._leaves:
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._work.wait()
        # A session may be wanted again that is to be left: that goes first.
        leaves = {name: self._leaves.pop(name) for name in list(self._leaves)[:ASKS_MOST]}
        room = ASKS_MOST - len(leaves)
        leases = [self._asks.pop(key) for key in list(self._asks)[:room]]
        began_ns = self._driver.now_ns()
        self._forget(began_ns)
        asks = [*_leaving(leaves), *(self._ask(lease, began_ns) for lease in leases)]
        try:
            told = await self._exchange(asks)
        except StoreError:
            self._leaves = {**leaves, **self._leaves}
            raise
        self._counted(began_ns)
        self._shared(told.controllers)
        answers = zip(leases, asks[len(leaves) :], told.answers[len(leaves) :], strict=True)
        for lease, ask, answer in answers:
            lasts_ms = ask.lasts_ms if type(ask) is Quota else LEASE_MS
            self._answered(lease, answer, began_ns + lasts_ms * NS_PER_MS)

    async def _exchange(self, asks: list[Ask]) -> Told:
        agreeing = self._agreeing
        if agreeing is None:
            return await self._store.exchange(asks, self._told[1])
        own = agreeing.own()
        told = await self._store.exchange(asks, self._told[1], own)
        trouble = agreeing.heard(self._driver.now_ns(), own, told.runs, told.controllers)
        self.counts.differ = agreeing.differ
        if trouble:
            self._driver.trouble("policies", trouble)
        return told

    def _ask(self, lease: Lease, now_ns: int) -> Ask:
        held = self._held.get((lease.kind, lease.name))
        still = held is not None and now_ns < held.until_ns
        if lease.kind == "session":
            return Session(lease.name, still)
        shares = held.shares if held is not None and still else (0, 0)
        return _quota(lease, shares, _share_ms(len(self._held)))

    def _answered(self, lease: Lease, answer: tuple[int, ...] | None, until_ns: int) -> None:
        """Where this process stood still in between, or has many to tell, less of it is left."""
        key = lease.kind, lease.name
        self.counts.leases[lease.kind] = self.counts.leases.get(lease.kind, 0) + 1
        left_ns = max(until_ns - self._driver.now_ns(), 0)
        if lease.kind == "session":
            if answer is None:
                self._held.pop(key, None)
                self._driver.feed(SessionOwned(lease.name, 0))
            else:
                self._held[key] = _Held(lease, (0, 0), until_ns)
                self._driver.feed(SessionOwned(lease.name, left_ns, answer))
            return
        assert answer is not None
        shares = (max(answer[0], 0), max(answer[1], 0))
        self._held[key] = _Held(lease, shares, until_ns)
        # Of a smaller one than before the policy asks again at once: what was cut counts until the
        # store hears that it is not spent any more.
        self._driver.feed(QuotaLeased(lease.kind, lease.name, answer[0], answer[1], left_ns))

    def _forget(self, now_ns: int) -> None:
        """What lapsed is nothing to give back, and what went on long ago does not count."""
        if now_ns >= self._forget_ns:
            self._forget_ns = now_ns + SECOND
            self._held = {key: each for key, each in self._held.items() if now_ns < each.until_ns}
        while self._went and now_ns - self._went[0][0] >= SECOND:
            self._went.popleft()

    def _counted(self, began_ns: int) -> None:
        self.counts.round_trips.add((self._driver.now_ns() - began_ns) / 1e9)

    # ---- how it stands ----

    def _lost(self, error: StoreError) -> None:
        self._asks.clear()
        if self._told[0] != "lost":
            self.counts.losses += 1
        self._driver.trouble(
            "store",
            f"{shown(self._store.url)}: {error}: limits go on with the last shares, and sessions of"
            " other controllers are refused until it is back",
        )
        self._stands("lost", self._told[1])

    def _shared(self, controllers: int) -> None:
        calm = self._driver.now_ns() < self._calm_ns
        self._stands("shared", max(controllers, self._told[1]) if calm else controllers)

    def _stands(self, state: Literal["shared", "lost"], controllers: int) -> None:
        if (state, controllers) == self._told:
            return
        before = self._told[1]
        self._told = (state, controllers)
        self.counts.up, self.counts.controllers = state == "shared", controllers
        self._driver.feed(StoreChanged(state, controllers))
        if controllers != before:
            for replica in list(self._driver.replicas):
                self._share(replica)

    def _share(self, replica: int) -> None:
        if self._driver.replicas[replica].up:
            self._driver.feed(ReplicaShare(replica, max(1, WHOLE // self._told[1])))

    # ---- the listener ----

    def fed(self, now_ns: int, event: Event) -> None:
        if type(event) is ReplicaUp:  # which the policy is about to be told
            asyncio.get_running_loop().call_soon(self._share, event.replica)

    def dispatched(self, call: Call) -> None:
        if call.asked.session:
            self._went.append((call.dispatched_ns, call.asked.session))

    # ---- the end ----

    async def close(self) -> None:
        """Give everything back, so that others need not wait until it lapses."""
        if self._closing:
            return
        self._closing = True
        shared = self._told[0] == "shared"
        if self._task is not None:
            if shared:  # what is under way is waited for: there is one connection
                self._work.set()
                await asyncio.wait({self._task}, timeout=2 * ANSWER_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            shared = shared and not self._task.cancelled()
        now_ns = self._driver.now_ns()
        self._forget(now_ns)
        ages: dict[str, list[int]] = {}
        for went_ns, session in self._went:
            ages.setdefault(session, []).append(now_ns - went_ns)
        asks: list[Ask] = _leaving(self._leaves)
        for (kind, name), held in self._held.items():
            if kind == "session":
                asks.append(Leave(name, tuple(ages.get(name, ()))))
            else:
                asks.append(_quota(held.lease, held.shares, 0))
        if shared and self._told[0] == "shared":
            try:
                for at in range(0, len(asks) or 1, ASKS_MOST):
                    await self._store.leave(asks[at : at + ASKS_MOST], at + ASKS_MOST >= len(asks))
            except StoreError as error:
                LOGGER.warning("what is held lapses by itself: the store: %s", error)
        await self._store.close()


def _share_ms(keys: int) -> int:
    part = min(max(keys - FEW, 0), MANY - FEW)
    return SHARE_MS + (SHARE_MS_MOST - SHARE_MS) * part // (MANY - FEW)


def _leaving(releases: Mapping[str, Release]) -> list[Ask]:
    return [Leave(each.session, each.spent_ages_ns) for each in releases.values()]


def _quota(lease: Lease, held: tuple[int, int], lasts_ms: int) -> Quota:
    return Quota(lease.kind, lease.name, lease.per_s, lease.in_flight, lease.used, held, lasts_ms)
