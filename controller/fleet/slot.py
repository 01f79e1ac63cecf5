"""One slot of a local fleet, as a state machine: no process, no socket, no clock.

What happens to a slot is told by methods that take the time and give what is to be done about it.
``MOVES`` has every move between states that there is; ``Slot._go`` is the one place that makes one.
What comes too late, or cannot be at all in the present state, changes nothing.

A slot has a *role*. It ``serve``s: its gate is open, or opens as soon as its server is warm. It is
a ``spare``: whoever asks for it gets it. Or it is ``back``: it served and failed, and whether its
place is still free is seen when it is warm again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from controller.fleet.contract import SlotState

Role = Literal["serve", "spare", "back"]
After = Literal["again", "backoff", "rest", "broken", "end"]
"""What follows when a process that was told to end has ended: a new one at once, a new one in a
while, what a spare does, nothing until somebody says that its card is well, nothing for good."""

MOVES: dict[SlotState, frozenset[SlotState]] = {
    "cold": frozenset({"cold", "starting", "broken"}),
    "starting": frozenset(
        {"cold", "starting", "warming", "warm", "serving", "stopping", "waiting"}
    ),
    "warming": frozenset({"cold", "starting", "warm", "serving", "stopping", "waiting"}),
    "warm": frozenset({"serving", "stopping", "waiting"}),
    "serving": frozenset({"stopping", "waiting"}),
    "stopping": frozenset({"cold", "starting", "waiting", "broken"}),
    "waiting": frozenset({"cold", "starting", "broken"}),
    "broken": frozenset({"cold", "starting"}),
}
RUNNING: frozenset[SlotState] = frozenset({"starting", "warming", "warm", "serving"})
"""States in which a process runs, or is just being started, and is meant to."""
WARM_START_NS = 20_000_000
"""From ``Start`` to serving, of a standby whose process is warm and was looked at before: 5 to 15
ms were measured on two busy cores."""
COLD_START_NS = 60_000_000_000
"""Of one whose start was never measured."""


class Spawn(NamedTuple):
    """Start a process of this version, as soon as nothing of the one before is left; ``spawned`` or
    ``failed`` answers. Look for its first answer: ``answered`` or ``failed``."""

    version: str


class WarmUp(NamedTuple):
    """Send it its first prompts: ``warmed`` answers."""


class Terminate(NamedTuple):
    """SIGTERM to its process: ``exited`` answers."""


class Kill(NamedTuple):
    """SIGKILL to everything that it started: ``exited`` answers."""


class Open(NamedTuple):
    """Let requests in."""


class Hold(NamedTuple):
    """Let none in, at once."""

    reason: str


class Announce(NamedTuple):
    """It can be asked for."""

    version: str
    start_ns: int


class Withdraw(NamedTuple):
    """It was announced or asked for, and cannot be had for now."""

    why: str


class Fail(NamedTuple):
    """The version that was asked for cannot be had here."""

    version: str
    """That one; or another one, which was loaded in its place."""
    why: str


class Tell(NamedTuple):
    """Somebody should know."""

    text: str


Action = Spawn | WarmUp | Terminate | Kill | Open | Hold | Announce | Withdraw | Fail | Tell
Actions = list[Action]


class Rules(msgspec.Struct, frozen=True):
    """What does not change about a slot. Times in nanoseconds."""

    warm: bool
    """As a spare its process runs; False: it is started when it is asked for."""
    start_ns_most: int
    """From the process to its first answer."""
    stop_ns_most: int
    """From SIGTERM to SIGKILL."""
    backoff_ns_first: int
    backoff_ns_most: int
    forgive_ns: int
    """Serving or warm that long, its failures are forgotten."""
    give_up_after: int
    """Failures in a row; 0: never."""

    def backoff_ns(self, failures: int) -> int:
        """How long to wait after that many failures in a row."""
        doubled = self.backoff_ns_first << min(failures - 1, 40)
        return min(doubled, max(self.backoff_ns_first, self.backoff_ns_most))


class Slot:
    """A slot; see the module.

    Args:
        home: the version that its model is served in.
        role: what it is from the beginning.
    """

    __slots__ = (
        "_after", "_changing", "_closed", "_deadline_ns", "_launched_ns", "_told", "asked",
        "failures", "home", "last_start_ns", "role", "rules", "since_ns", "starts", "state",
        "version", "why",
    )  # fmt: skip

    def __init__(self, rules: Rules, home: str, role: Role, now_ns: int) -> None:
        self.rules = rules
        self.home = home
        self.role: Role = role
        self.state: SlotState = "cold"
        self.since_ns = now_ns
        self.why = ""
        self.version = home
        """Of what runs, or is to run next."""
        self.asked: str | None = None
        """A ``Start`` that is not answered yet: the version it named, or an empty text."""
        self.failures = 0
        self.starts = 0
        self.last_start_ns = 0
        """From its last process to its first prompts answered; 0: not measured."""
        self._told = False
        """The policy was told of it as a standby, and not since that it cannot be had."""
        self._after: After = "backoff"
        self._changing = False
        """Its model is on its way to another version."""
        self._launched_ns = now_ns
        self._deadline_ns: int | None = None
        self._closed = False

    # Asked

    def deadline_ns(self) -> int | None:
        """When ``tick`` is due."""
        return self._deadline_ns

    @property
    def opens(self) -> bool:
        """Its gate is open, or will be when what runs there is warm."""
        return self.role == "serve" and self.state in RUNNING

    @property
    def down(self) -> bool:
        """It stands still until somebody says that it is well."""
        return self.state == "broken" or (self.state == "stopping" and self._after == "broken")

    def start_ns(self) -> int:
        """From ``start`` to serving, as far as that is known."""
        if self.state == "warm":
            return WARM_START_NS
        return self.last_start_ns or COLD_START_NS

    # What is asked of it

    def begin(self, now_ns: int) -> Actions:
        """The controller begins, and nothing runs here."""
        actions: Actions = []
        if self.role == "spare" and not self.rules.warm:
            self._rest(now_ns, actions)
        else:
            self._launch(now_ns, actions)
        return actions

    def adopt(self, now_ns: int, version: str, warmed: bool) -> Actions:
        """The controller begins, and a process of a controller before runs here already."""
        self.version = version
        self._launched_ns = now_ns
        self._go(now_ns, "starting", "found running")
        self._deadline_ns = now_ns + self.rules.start_ns_most
        actions: Actions = []
        if self.role == "spare" and not self.rules.warm:
            self._end(now_ns, "rest", "not needed", actions)
        elif warmed:
            self._ready(now_ns, False, actions)
        return actions

    def start(self, now_ns: int, version: str = "") -> Actions:
        """The policy wants it, in this version of its model (empty: the one it has)."""
        actions: Actions = []
        wanted = version or self.home
        if self._closed or (self.state == "serving" and self.version == wanted):
            return actions
        self.asked = version
        if self.down:
            self._refuse(actions, f"it cannot be started: {self.why}")
            return actions
        changed = self.version != wanted
        self.role = "serve"
        self._told = True
        self.version = wanted
        if self.state == "cold" or (self.state == "waiting" and changed):
            self._launch(now_ns, actions)
        elif self.state == "stopping":
            self._after = "again"
        elif self.state in RUNNING and changed:
            self._end(now_ns, "again", f"version {wanted} is to run", actions)
        elif self.state == "warm":
            self._open(now_ns, actions)
        return actions

    def refuse(self, version: str, why: str) -> Actions:
        """The version that the policy wants it in is none that there is: it stays what it was."""
        actions: Actions = [Fail(version, why)]
        if self._told and self.role == "spare":
            self._announce(actions)
        return actions

    def stop(self, now_ns: int) -> Actions:
        """The policy does not want it any more; nothing is in flight there."""
        actions: Actions = []
        if self._closed:
            return actions
        served = self.state == "serving"
        self.role = "spare"
        self.asked = None
        self._told = False
        changed = self.version != self.home
        self.version = self.home
        if self.state == "stopping":
            self._after = "rest" if self._after in ("again", "backoff") else self._after
        elif served or (self.state in RUNNING and (changed or not self.rules.warm)):
            self._end(now_ns, "rest", "stopped", actions)
        elif self.state == "warm":
            self._announce(actions)
        elif self.state == "waiting" and (changed or not self.rules.warm):
            self._after_end(now_ns, "rest", actions)
        return actions

    def hung(self, now_ns: int, why: str) -> Actions:
        """It makes no progress: it is ended at once, without being asked."""
        actions: Actions = []
        if self.state in RUNNING:
            self._lose(why, actions)
            self._give_back(why, actions)
            self._kill(now_ns, "backoff", why, actions)
            self._count_failure(now_ns, actions)
        return actions

    def card_broken(self, now_ns: int, why: str) -> Actions:
        """Nothing may run there until ``card_well``."""
        actions: Actions = []
        if self._closed or self.down:
            self.why = why if self.down else self.why  # what is told later is told more exactly
            return actions
        self._lose(why, actions)
        self._give_back(why, actions)
        if self.state in RUNNING:
            self._kill(now_ns, "broken", why, actions)
        elif self.state == "stopping":
            self._after, self.why = "broken", why
            actions.append(Kill())
        else:
            self._go(now_ns, "broken", why)
        return actions

    def card_well(self, now_ns: int) -> Actions:
        """Whoever looked says that it may be used again."""
        actions: Actions = []
        if self._closed:
            return actions
        self.failures = 0
        if self.state == "stopping" and self._after == "broken":
            self._after = "rest" if self.role == "spare" else "again"
        elif self.state == "broken":
            self._after_end(now_ns, "rest" if self.role == "spare" else "again", actions)
        return actions

    def settle(self, now_ns: int, home: str) -> Actions:
        """From now on its model is served in this version: a spare has it ready."""
        actions: Actions = []
        self.home = home
        if self._closed or self.role == "serve" or self.version == home:
            return actions
        self.version = home
        if self.state in RUNNING:
            self._end(now_ns, "again", f"version {home} is to run", actions)
        elif self.state == "cold":
            self._rest(now_ns, actions)
        return actions

    def change(self, now_ns: int, under_way: bool) -> Actions:
        """Its model goes to another version, or that is over. Meanwhile what was stopped loads
        nothing: it is asked for in the other version next, and would have to end that again."""
        actions: Actions = []
        self._changing = under_way
        loads = self.role == "spare" and self.rules.warm and not (under_way or self._closed)
        if loads and self.state == "cold":
            self._launch(now_ns, actions)
        return actions

    def close(self, now_ns: int) -> Actions:
        """The controller ends."""
        actions: Actions = []
        self._closed = True
        if self.state in RUNNING:
            self._end(now_ns, "end", "the controller ends", actions)
        elif self.state == "stopping":
            self._after = "end"
        else:
            self._deadline_ns = None
        return actions

    # What happens to it

    def answered(self, now_ns: int) -> Actions:
        """Its server answers, and has loaded what it should."""
        actions: Actions = []
        if self.state == "starting":
            self._go(now_ns, "warming")
            actions.append(WarmUp())
        return actions

    def warmed(self, now_ns: int, taken: bool) -> Actions:
        """It has answered its first prompts.

        Args:
            taken: as many others serve its model as should.
        """
        actions: Actions = []
        if self.state == "warming":
            self.last_start_ns = max(1, now_ns - self._launched_ns)
            self._ready(now_ns, taken, actions)
        return actions

    def failed(self, now_ns: int, why: str, loaded: str = "") -> Actions:
        """What runs there is not what it should be: it is ended.

        Args:
            loaded: the version that it has, if that is the trouble.
        """
        actions: Actions = []
        if self.state in ("starting", "warming"):
            self._lose(why, actions)
            if self._give_back(why, actions, loaded):
                self._kill(now_ns, "rest", why, actions)
            else:
                self._kill(now_ns, "backoff", why, actions)
                self._count_failure(now_ns, actions)
        return actions

    def exited(self, now_ns: int, why: str) -> Actions:
        """Its process has ended, or could not be started."""
        actions: Actions = []
        if self.state == "stopping":
            self._after_end(now_ns, self._after, actions)
        elif self.state in RUNNING:
            self._lose(why, actions)
            if self._give_back(why, actions):
                self._after_end(now_ns, "rest", actions)
            else:
                self._go(now_ns, "waiting", why)
                self._count_failure(now_ns, actions)
        return actions

    def tick(self, now_ns: int) -> Actions:
        """The time that ``deadline_ns`` named has come."""
        actions: Actions = []
        if self._deadline_ns is None or now_ns < self._deadline_ns:
            return actions
        self._deadline_ns = None
        if self.state == "starting":
            most_s = self.rules.start_ns_most / 1e9
            actions += self.failed(now_ns, f"it did not answer within {most_s:g} s")
        elif self.state == "stopping":
            self._deadline_ns = now_ns + self.rules.stop_ns_most
            actions.append(Kill())
        elif self.state == "waiting":
            self._launch(now_ns, actions)
        else:
            self.failures = 0
        return actions

    # The moves

    def _go(self, now_ns: int, state: SlotState, why: str = "") -> None:
        if state not in MOVES[self.state]:
            raise AssertionError(f"a slot that is {self.state} cannot become {state}")
        self.state = state
        self.since_ns = now_ns
        self.why = why
        self._deadline_ns = None

    def _launch(self, now_ns: int, actions: Actions) -> None:
        self._go(now_ns, "starting")
        self._launched_ns = now_ns
        self._deadline_ns = now_ns + self.rules.start_ns_most
        self.starts += 1
        actions.append(Spawn(self.version))

    def _ready(self, now_ns: int, taken: bool, actions: Actions) -> None:
        if self.role == "back":
            self.role = "spare" if taken else "serve"
        if self.role == "serve":
            self._open(now_ns, actions)
        elif not self.rules.warm:
            self._end(now_ns, "rest", "not needed", actions)
        else:
            self._go(now_ns, "warm")
            self._deadline_ns = now_ns + self.rules.forgive_ns
            self._announce(actions)

    def _open(self, now_ns: int, actions: Actions) -> None:
        self.asked = None
        self._go(now_ns, "serving")
        self._deadline_ns = now_ns + self.rules.forgive_ns
        actions.append(Open())

    def _rest(self, now_ns: int, actions: Actions) -> None:
        self._go(now_ns, "cold")
        self._announce(actions)

    def _announce(self, actions: Actions) -> None:
        self._told = True
        actions.append(Announce(self.version, self.start_ns()))

    def _end(self, now_ns: int, after: After, why: str, actions: Actions) -> None:
        """Ask its process to end."""
        if self.state == "serving":
            actions.append(Hold("stopped"))
        self._after = after
        self._go(now_ns, "stopping", why)
        self._deadline_ns = now_ns + self.rules.stop_ns_most
        actions.append(Terminate())

    def _kill(self, now_ns: int, after: After, why: str, actions: Actions) -> None:
        """End it without asking. The signal is sent again, should it not have been enough."""
        self._after = "end" if self._closed else after
        self._go(now_ns, "stopping", why)
        self._deadline_ns = now_ns + self.rules.stop_ns_most
        actions.append(Kill())

    def _after_end(self, now_ns: int, after: After, actions: Actions) -> None:
        """Nothing runs here any more."""
        if after == "again" or (after == "rest" and self.rules.warm and not self._changing):
            self._launch(now_ns, actions)
        elif after == "backoff":
            self._go(now_ns, "waiting", self.why)
            self._deadline_ns = now_ns + self.rules.backoff_ns(max(1, self.failures))
        elif after == "broken":
            self._go(now_ns, "broken", self.why)
        elif after == "rest":
            self._rest(now_ns, actions)
        else:
            self._go(now_ns, "cold", self.why)

    # Failures

    def _lose(self, why: str, actions: Actions) -> None:
        """It is not to be had any more, whoever counted on it."""
        if self.state == "serving":
            actions.append(Hold(why))
            self.role = "back"
        elif self._told and not self.asked:
            actions.append(Withdraw(why))
            self.role = "back" if self.role == "serve" else self.role
            self.asked = None
        if not self.asked:
            self.version = self.home  # a rollout that has lost it is over
        self._told = False

    def _give_back(self, why: str, actions: Actions, loaded: str = "") -> bool:
        """A version that was asked for cannot be had: it is said, and the slot is again what it
        was, without a wait."""
        if not self.asked:
            return False
        actions.append(Fail(loaded or self.asked, why))
        self.asked = None
        self.role = "spare"
        if self.version == self.home:
            return False
        self.version = self.home
        return True

    def _refuse(self, actions: Actions, why: str) -> None:
        """Answer a ``start`` that cannot be."""
        if self.asked:
            actions.append(Fail(self.asked, why))
        else:
            actions.append(Withdraw(why))
        self.asked = None

    def _count_failure(self, now_ns: int, actions: Actions) -> None:
        self.failures += 1
        most = self.rules.give_up_after
        if most and self.failures >= most:
            text = f"failed {self.failures} times in a row, and is left: {self.why}"
            actions.append(Tell(text))
            if self.state == "waiting":
                self._go(now_ns, "broken", text)
            else:
                self._after, self.why = "broken", text
        elif self.state == "waiting":
            self._deadline_ns = now_ns + self.rules.backoff_ns(self.failures)
        if self._closed:
            self._deadline_ns = None
