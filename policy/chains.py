"""Agent chains: one time budget for all steps of a chain, and checkpoints to resume from.

The budget runs from the first step's arrival, whoever spends it. A step's share is its weight's
part of what is left, against the steps after it: what one leaves over flows to those after it, and
what one takes too much is taken from them. Steps may run beside each other.

A step's name is what it is recognised by: once it has a checkpoint, it is answered from there and
never paid for again. So a caller who repeats a step numbers it; steps without a name are never
recognised. Two steps of one name at the same time both run, since neither has an answer yet.

A chain belongs to its user. Once over, its steps are late. Who was told so, or begins another
chain, may resume from a checkpoint: a new budget, with the steps up to that checkpoint done.

What is safe in the store is done, whoever did it: a chain that was begun by another controller, or
before this one was killed, goes on from there.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Literal

import msgspec

from policy.facts import NS_MOST, Illegal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import Arrived, ChainFound
    from policy.parameters.chains import Chains as Section
    from policy.parameters.chains import Plan

NS_PER_MS = 1_000_000
NO_CHAIN = ("", -1, -1)
FAR_NS = 1 << 62
AT_REST, SAVING = -1, -2


def share_ns(left_ns: int, weight: int, later: int) -> int:
    """What a step may take of what is left of its chain's budget: its weight's part, against the
    weights of the steps after it, which are ``later`` together."""
    return left_ns * weight // (weight + later)


class Ruling(msgspec.Struct, frozen=True):
    """What becomes of a step. ``late``: the chain is over, so it is settled at once with the last
    checkpoint. ``done``: it was answered before, and is again, from its checkpoint."""

    kind: Literal["go", "late", "done"]
    end_ns: int
    """When the chain's budget ends."""
    share_ns: int
    """What the step may take from now; 0 unless it goes."""
    checkpoint: str
    """The step's own, if it is done; else the chain's last, or empty."""
    undone: bool = False
    """The chain goes on after the checkpoint that was asked for: what it saved after that is to be
    forgotten."""


class Chain(msgspec.Struct, array_like=True):
    """A chain. In a snapshot its times are relative."""

    user: str
    name: str
    line: str
    end_ns: int
    next_step: int = 0
    """Of the plan: the one after the furthest that came."""
    over: bool = False
    told: bool = False
    """The client knows that it is over."""
    external_ns: int = FAR_NS
    """With a fixed limit: when the client's own step must be back."""
    done: dict[str, str] = {}
    """Steps by name, and their checkpoints, in order."""
    inherited: int = 0
    """How many of these, the first, another chain got."""
    last: str = ""
    """The newest checkpoint."""
    open: list[int] = []
    """Requests that went and are not answered, in order."""
    unsettled: int = 0
    """All its requests that are not settled."""


class ChainsState(msgspec.Struct, array_like=True):
    """All chains in canonical form, times relative to now."""

    chains: list[tuple[Chain, list[tuple[str, str]]]]
    """Each without its steps, and these beside it: their order counts, a mapping's is sorted."""
    steps: list[tuple[int, str, str, str, int]]
    """(request, user, chain, step, time until it ends its chain; or AT_REST, or SAVING)."""


class _Plan:
    """A plan, ready to be asked."""

    __slots__ = ("at", "budget_ns", "external", "later", "weights")

    def __init__(self, plan: Plan) -> None:
        self.budget_ns = plan.budget_ms * NS_PER_MS
        self.at = {step.name: place for place, step in enumerate(plan.steps)}
        self.external = [step.external for step in plan.steps]
        self.weights = [step.weight for step in plan.steps]
        self.later = [sum(self.weights[place:]) for place in range(len(plan.steps) + 1)]
        """Weights of a step and those after it."""

    def place(self, step: str) -> int:
        """Of a step, by its name or as a numbered repetition; -1: it is not planned."""
        place = self.at.get(step, -1)
        if place < 0:
            base, _, number = step.rpartition("#")
            if number.isascii() and number.isdigit():
                place = self.at.get(base, -1)
        return place


class Chains:
    """All chains of one policy.

    Args:
        reserve_ns: so long before its chain's end, or a tenth of its time before it if that is
            less, a step is ended, so that what is there reaches the caller within the budget.
    """

    __slots__ = (
        "_chains", "_chains_max", "_checkpoints", "_default", "_due", "_forget", "_keep_ns",
        "_kept", "_open_max", "_plans", "_reserve_ns", "_running", "_saving", "_step_limit_ns",
        "_step_weight", "_steps", "_steps_max",
    )  # fmt: skip

    def __init__(self, section: Section, reserve_ns: int = 0) -> None:
        self._reserve_ns = reserve_ns
        self._default = _Plan(section.default)
        self._plans = {line: _Plan(plan) for line, plan in section.lines.items()}
        self._step_weight = section.step_weight
        self._step_limit_ns = section.step_limit_ms * NS_PER_MS
        self._checkpoints = section.checkpoints
        self._steps_max = section.steps_max
        self._keep_ns = section.keep_ms * NS_PER_MS
        self._chains_max = section.chains_max
        self._open_max = section.open_max
        self._chains: dict[tuple[str, str], Chain] = {}
        self._kept: dict[str, tuple[str, str]] = {}
        """Whose a checkpoint is."""
        self._steps: dict[int, tuple[Chain, str]] = {}
        """What is not settled, with its step's name."""
        self._running: dict[int, int] = {}
        """Of these, what went: when its chain ends if it is not back."""
        self._saving: set[int] = set()
        """Of these, what is answered while its checkpoint is not safe yet."""
        # Heaps: (when, request), where some may be settled; (when at the earliest, user, chain).
        self._due: list[tuple[int, int]] = []
        self._forget: list[tuple[int, str, str]] = []

    # What happens to a step

    def arrive(self, now_ns: int, event: Arrived) -> Ruling | None:
        """None: it belongs to no chain."""
        if not event.chain or len(self._steps) >= self._open_max:
            return None
        self._forget_old(now_ns)
        chain = self._chains.get((event.user, event.chain))
        if chain is None:
            if len(self._chains) >= self._chains_max:
                return None
            chain = self._begun(now_ns, event)
        elif now_ns >= chain.end_ns or now_ns > chain.external_ns:
            chain.over = True
        undone = False
        if chain.told and not chain.unsettled and event.resume in chain.done.values():
            undone = self._resumed(now_ns, chain, event.resume)
        chain.unsettled += 1
        self._steps[event.request] = (chain, event.step)
        if chain.over:
            chain.told = True
            return Ruling("late", chain.end_ns, 0, chain.last)
        if event.step and event.step in chain.done:
            return Ruling("done", chain.end_ns, 0, chain.done[event.step], undone)
        ruling = self._gone(now_ns, chain, event)
        return msgspec.structs.replace(ruling, undone=True) if undone else ruling

    def answered(self, request: int) -> bool:
        """Its answer is there: must the chain's state be saved before it is given out? Meanwhile
        the end of the budget no longer ends it."""
        if request not in self._running or not self._checkpoints:
            return False
        chain, step = self._steps[request]
        if not self._may_save(chain, step):
            return False
        self._stop(chain, request)
        self._saving.add(request)
        return True

    def saved(self, request: int, checkpoint: str) -> None:
        """Its chain's state is safe; if another of its name was faster, that one's counts."""
        if request not in self._saving or checkpoint in self._kept:
            return
        self._saving.remove(request)
        chain, step = self._steps[request]
        if not self._may_save(chain, step):
            return
        key = (chain.user, chain.name)
        before = chain.done.pop(step, "")
        if before and self._kept.get(before) == key:
            del self._kept[before]
        elif before:
            chain.inherited -= 1
        chain.done[step] = chain.last = checkpoint
        self._kept[checkpoint] = key

    def over(self, now_ns: int, request: int) -> tuple[str, int, int]:
        """It is settled, whatever became of it: (checkpoint to resume from or "", what is left of
        the budget, what the client's own next step may take); -1 where there is no such thing."""
        known = self._steps.pop(request, None)
        if known is None:
            return NO_CHAIN
        chain, step = known
        chain.unsettled -= 1
        if request in self._running:
            self._stop(chain, request)
        self._saving.discard(request)
        left_ns = 0 if chain.over else max(0, chain.end_ns - now_ns)
        checkpoint = (chain.done.get(step) if step else None) or chain.last
        return checkpoint, left_ns, self._external_ns(now_ns, chain, step, left_ns)

    def left_ns(self, now_ns: int, request: int) -> int:
        """What is left of the budget of its chain; -1: it has none."""
        known = self._steps.get(request)
        if known is None:
            return -1
        chain = known[0]
        return 0 if chain.over else max(0, chain.end_ns - now_ns)

    def found(self, now_ns: int, event: ChainFound) -> None:
        """The store has checkpoints of a chain. One that is not known goes on from there; to one
        that is, the steps are added that it has not, but for what runs here now.

        Raises:
            Illegal: it cannot be; nothing was changed.
        """
        key = (event.user, event.chain)
        self._check_found(event, self._chains.get(key))
        self._forget_old(now_ns)  # what the step itself would forget, when it arrives
        chain = self._chains.get(key)
        if chain is None:
            if len(self._chains) >= self._chains_max:
                return
            end_ns = now_ns + event.left_ns
            chain = self._chains[key] = Chain(event.user, event.chain, event.line, end_ns)
            # Whoever ended it has told its client.
            chain.over = chain.told = not event.left_ns
            heappush(self._forget, (end_ns, *key))
        self._add_done(chain, event.done)

    def _check_found(self, event: ChainFound, chain: Chain | None) -> None:
        steps = [step for step, _ in event.done]
        checkpoints = [checkpoint for _, checkpoint in event.done]
        if not event.chain or not 0 <= event.left_ns <= NS_MOST:
            raise Illegal(
                f"chain {event.chain!r}: it has a name, and left_ns, {event.left_ns}, lies within"
                f" 0..{NS_MOST}"
            )
        if len(set(steps)) < len(steps) or len(set(checkpoints)) < len(steps) or "" in checkpoints:
            raise Illegal(f"chain {event.chain}: steps and checkpoints are each their own")
        known = {} if chain is None else chain.done
        key = (event.user, event.chain)
        own = False
        for step, checkpoint in event.done:
            keeper = self._kept.get(checkpoint)
            if keeper is not None and keeper[0] != event.user:
                raise Illegal(f"chain {event.chain}: checkpoint {checkpoint} is another user's")
            elsewhere = keeper is not None and keeper != key
            if elsewhere and own and step not in known:
                raise Illegal(f"chain {event.chain}: checkpoint {checkpoint} is another chain's")
            own |= not elsewhere

    def _add_done(self, chain: Chain, found: tuple[tuple[str, str], ...]) -> None:
        """What it was resumed after comes first, then what the store has, in its order."""
        running: set[str] = set()
        if chain.unsettled:
            running.update(step for other, step in self._steps.values() if other is chain)
        before = list(chain.done.items())
        done = dict(before[: chain.inherited])
        known = set(chain.done.values())
        room = self._steps_max - len(chain.done)
        new = ""
        for step, checkpoint in found:
            if step in chain.done:
                done[step] = chain.done[step]
            elif room > 0 and not (step in running and step) and checkpoint not in known:
                room -= 1
                if checkpoint not in self._kept:
                    self._kept[checkpoint] = (chain.user, chain.name)
                elif len(done) == chain.inherited:
                    chain.inherited += 1
                else:
                    continue
                done[step] = new = checkpoint
        chain.done = done | {step: own for step, own in before if step not in done}
        if new:
            chain.last = new
            plan = self._plans.get(chain.line, self._default)
            places = [plan.place(step) + 1 for step in chain.done]
            chain.next_step = max(chain.next_step, *places)

    def ended(self, now_ns: int) -> Sequence[int]:
        """What is under way for chains whose budget has just ended. Said once."""
        due = self._due
        if not due or due[0][0] > now_ns:
            return ()
        requests: list[int] = []
        while due and due[0][0] <= now_ns:
            request = heappop(due)[1]
            if request in self._running:
                chain = self._steps[request][0]
                chain.over = chain.told = True
                for ended in chain.open:
                    del self._running[ended]
                requests += chain.open
                chain.open = []
        return requests

    def known(self, event: Arrived) -> bool:
        """Is the step's chain remembered here, over or not, or what its caller resumes from?"""
        if (event.user, event.chain) in self._chains:
            return True
        source = self._kept.get(event.resume)
        return source is not None and source[0] == event.user

    def take_in(self, now_ns: int, other: Chains) -> None:
        """Another policy's chains go on here; of those that both know, the one here counts."""
        state = other.state(now_ns)
        chains = [
            (chain, done)
            for chain, done in state.chains
            if (chain.user, chain.name) not in self._chains
        ][: max(0, self._chains_max - len(self._chains))]
        mine = {(chain.user, chain.name) for chain, _ in chains}
        steps = [step for step in state.steps if step[1:3] in mine]
        self.load(ChainsState(chains, steps), now_ns)

    # What every mechanism has

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        """Nothing by itself: ``ended`` is called at every tick too."""
        return ()

    def deadline_ns(self) -> int | None:
        due = self._due
        while due and due[0][1] not in self._running:
            heappop(due)
        return due[0][0] if due else None

    def state(self, now_ns: int) -> ChainsState:
        chains = [
            (msgspec.structs.replace(_moved(chain, -now_ns), done={}), list(chain.done.items()))
            for chain in self._chains.values()
        ]
        steps: list[tuple[int, str, str, str, int]] = []
        for request, (chain, step) in sorted(self._steps.items()):
            due_ns = self._running.get(request)
            left_ns = SAVING if request in self._saving else AT_REST
            if due_ns is not None:
                left_ns = max(0, due_ns - now_ns)
            steps.append((request, chain.user, chain.name, step, left_ns))
        return ChainsState(chains, steps)

    def load(self, state: ChainsState, now_ns: int) -> None:
        """Go on from a state. Only before anything else."""
        for saved, done in state.chains:
            chain = _moved(saved, now_ns)
            chain.done = dict(done)
            key = (chain.user, chain.name)
            self._chains[key] = chain
            self._kept.update(dict.fromkeys(_own(chain), key))
            heappush(self._forget, (chain.end_ns, *key))
        for request, user, name, step, left_ns in state.steps:
            self._steps[request] = (self._chains[user, name], step)
            if left_ns == SAVING:
                self._saving.add(request)
            elif left_ns != AT_REST:
                self._running[request] = now_ns + left_ns
                heappush(self._due, (now_ns + left_ns, request))

    def size(self) -> int:
        chains = len(self._chains) + len(self._kept)
        return chains + len(self._steps) + len(self._running) + len(self._saving)

    def size_most(self) -> int:
        return self._chains_max * (1 + self._steps_max) + 2 * self._open_max

    # Chains

    def _begun(self, now_ns: int, event: Arrived) -> Chain:
        key = (event.user, event.chain)
        end_ns = now_ns + self._plans.get(event.line, self._default).budget_ns
        chain = self._chains[key] = Chain(event.user, event.chain, event.line, end_ns)
        heappush(self._forget, (end_ns, *key))
        source = self._kept.get(event.resume)
        if source is not None and source[0] == event.user:
            chain.done = dict(self._chains[source].done)
            chain.inherited = len(chain.done)
            self._resumed(now_ns, chain, event.resume)
        return chain

    def _resumed(self, now_ns: int, chain: Chain, checkpoint: str) -> bool:
        """It goes on after the checkpoint, with a new budget. Returns whether it had gone on
        before."""
        plan = self._plans.get(chain.line, self._default)
        steps = list(chain.done)
        places = list(chain.done.values()).index(checkpoint) + 1
        for step in steps[places:]:
            undone = chain.done.pop(step)
            if self._kept.get(undone) == (chain.user, chain.name):
                del self._kept[undone]
        chain.inherited = min(chain.inherited, places)
        chain.last = checkpoint
        chain.over = chain.told = False
        chain.end_ns = now_ns + plan.budget_ns
        chain.external_ns = FAR_NS
        chain.next_step = max(plan.place(step) for step in steps[:places]) + 1
        return places < len(steps)

    def _gone(self, now_ns: int, chain: Chain, event: Arrived) -> Ruling:
        plan = self._plans.get(chain.line, self._default)
        place = plan.place(event.step)
        left_ns = chain.end_ns - now_ns
        if place < 0:
            weight, later = self._step_weight, plan.later[chain.next_step]
        else:
            weight, later = plan.weights[place], plan.later[place + 1]
            chain.next_step = max(chain.next_step, place + 1)
        step_ns = self._share_ns(left_ns, weight, later)
        limit_ns = step_ns if self._step_limit_ns else left_ns
        due_ns = now_ns + limit_ns - min(self._reserve_ns, limit_ns // 10)
        chain.external_ns = FAR_NS
        chain.open.append(event.request)
        self._running[event.request] = due_ns
        heappush(self._due, (due_ns, event.request))
        return Ruling("go", chain.end_ns, step_ns, chain.last)

    def _stop(self, chain: Chain, request: int) -> None:
        """It runs no more, so the budget's end is nothing to it."""
        del self._running[request]
        chain.open.remove(request)
        if len(self._due) > 64 + 2 * len(self._running):
            self._due = [(due_ns, running) for running, due_ns in self._running.items()]
            heapify(self._due)

    def _may_save(self, chain: Chain, step: str) -> bool:
        """Nameless steps replace each other's checkpoint; any other step has one."""
        if step in chain.done:
            return not step
        return len(chain.done) < self._steps_max

    def _share_ns(self, left_ns: int, weight: int, later: int) -> int:
        if self._step_limit_ns:
            return min(self._step_limit_ns, left_ns)
        return share_ns(left_ns, weight, later)

    def _external_ns(self, now_ns: int, chain: Chain, step: str, left_ns: int) -> int:
        """What the client's own step may take, if it is the next one; else -1."""
        plan = self._plans.get(chain.line, self._default)
        place = plan.place(step) + 1 or chain.next_step
        if place == len(plan.weights) or not plan.external[place]:
            return -1
        step_ns = self._share_ns(left_ns, plan.weights[place], plan.later[place + 1])
        if self._step_limit_ns and place == chain.next_step:
            chain.external_ns = now_ns + step_ns
        return step_ns

    def _forget_old(self, now_ns: int) -> None:
        """Chains that were over for long; or just over, while there are too many."""
        forget = self._forget
        while forget:
            end_ns, user, name = forget[0]
            chain = self._chains[user, name]
            if chain.end_ns > end_ns:  # it was resumed since
                heapreplace(forget, (chain.end_ns, user, name))
                continue
            keep_ns = 0 if len(self._chains) >= self._chains_max else self._keep_ns
            if chain.unsettled or now_ns < end_ns + keep_ns:
                break
            heappop(forget)
            del self._chains[user, name]
            for checkpoint in _own(chain):
                del self._kept[checkpoint]


def _own(chain: Chain) -> list[str]:
    """The checkpoints that this chain itself got."""
    return list(chain.done.values())[chain.inherited :]


def _moved(chain: Chain, by_ns: int) -> Chain:
    """A copy on another clock."""
    external_ns = chain.external_ns
    return msgspec.structs.replace(
        chain,
        end_ns=chain.end_ns + by_ns,
        external_ns=external_ns if external_ns == FAR_NS else external_ns + by_ns,
        done=dict(chain.done),
        open=list(chain.open),
    )
