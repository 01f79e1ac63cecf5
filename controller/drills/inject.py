"""What a drill breaks, and how it takes that back.

Signals go to real processes, bad links are real sockets, a used-up memory ends a real process. What
is only pretended is said in ``simulated``. Whatever was done is undone by ``undo``, which may be
called at any time and twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol
from urllib.parse import urlsplit

from controller.drills.asking import DrillError, slot_named
from controller.drills.proxy import CLEAR, NOTHING_PASSES, Link, write_link
from controller.fleet.processes import started_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.drills.asking import Admin
    from controller.fleet.contract import SlotView
    from policy.drills import DrillKind

LOST_CARD_XID = 79
DIES_AFTER_S = 1.0
"""From a card's falling off the bus to the end of the process on it."""
OOM_TOKENS = 6000
"""Longer than any prompt of usual traffic."""
OOM_AT_ONCE, OOM_MOST = 2, 40
"""Long prompts: enough at once that each server gets one."""
CALL_S = 30.0
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


class Cards(Protocol):
    """Cards that can be made to fail: those of a test's NVML library."""

    def break_memory(self, uuid: str) -> None:
        """It reports an uncorrectable ECC error."""
        ...

    def lose(self, uuid: str) -> None:
        """It falls off the bus."""
        ...

    def mend(self) -> None:
        """All are well again."""
        ...


class Injection(ABC):
    """Something that is broken on purpose.

    Args:
        slot: what is hit.
        admin: the controller's.
        gateway: its public address; empty: the drill sends nothing itself.
        cards: where they can be made to fail.
        link: how the link is meanwhile, with ``network``.
    """

    kind: ClassVar[DrillKind]
    lasts: ClassVar[bool] = False
    """It goes on until it is taken back, so that is done while the drill still measures."""
    tokens_from: ClassVar[int] = 0

    def __init__(
        self,
        slot: SlotView,
        admin: Admin,
        gateway: str = "",
        cards: Cards | None = None,
        link: Link = NOTHING_PASSES,
    ) -> None:
        self.slot = slot
        self.link = link
        self._admin = admin
        self._gateway = gateway
        self._cards = cards
        self._began = started_of(slot.pid) if slot.pid else 0

    def renew(self) -> None:
        """Look at the slot again, right before it is hit: its process may be another one by now.

        Raises:
            DrillError: it does not serve any more, or cannot be hit.
        """
        self.slot = slot_named(self._admin.fleet(), self.slot.name)
        self._began = started_of(self.slot.pid) if self.slot.pid else 0
        if why := self.refusal():
            raise DrillError(f"{self.kind}: {why}")

    @property
    @abstractmethod
    def what(self) -> str:
        """What will be done, in a sentence."""

    @property
    def simulated(self) -> str:
        """What of it is not the real thing; empty: nothing."""
        return ""

    def refusal(self) -> str:
        """Why it cannot be done here; empty: it can."""
        return ""

    @abstractmethod
    def inject(self) -> int:
        """Do it; the time of day (ns since 1970) at which it was done. Blocks for seconds, at
        most."""

    def undo(self) -> None:  # noqa: B027 - most leave nothing to take back
        """Take it back."""

    def _no_process(self) -> str:
        """Why its process cannot be reached by a signal."""
        pid = self.slot.pid
        host = urlsplit(self._admin.url).hostname or ""
        if not pid or host not in LOCAL:
            return f"{self.slot.name} has no process of this machine: run the drill where it runs"
        try:
            leads = os.getpgid(pid) == pid
        except ProcessLookupError:
            return f"process {pid} of {self.slot.name} is not there any more"
        if not leads:
            return f"process {pid} of {self.slot.name} leads no process group: others would be hit"
        return ""

    def _signal(self, number: signal.Signals) -> int:
        """To everything of the slot's process, if it is still the same one; the time of day."""
        same = self._began and started_of(self.slot.pid) == self._began
        at_ns = time.time_ns()
        if same:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.slot.pid, number)
        return at_ns


class EngineKill(Injection):
    """The engine's processes die at once."""

    kind = "engine-kill"

    @property
    def what(self) -> str:
        return f"SIGKILL to {self.slot.name} (process group {self.slot.pid})"

    def refusal(self) -> str:
        return self._no_process()

    def inject(self) -> int:
        return self._signal(signal.SIGKILL)


class EngineHang(Injection):
    """They stand still: connections are taken, and nothing comes."""

    kind = "engine-hang"

    @property
    def what(self) -> str:
        return f"SIGSTOP to {self.slot.name} (process group {self.slot.pid})"

    def refusal(self) -> str:
        return self._no_process()

    def inject(self) -> int:
        return self._signal(signal.SIGSTOP)

    def undo(self) -> None:
        self._signal(signal.SIGCONT)


class OutOfMemory(Injection):
    """A long prompt takes the engine down with it."""

    kind = "oom"
    tokens_from = OOM_TOKENS

    @property
    def what(self) -> str:
        return (
            f"prompts of {OOM_TOKENS} tokens are sent, until {self.slot.name} gets one and runs out"
            " of memory"
        )

    @property
    def simulated(self) -> str:
        return "the served twin ends itself by SIGKILL, as the kernel does; no memory is used up"

    def refusal(self) -> str:
        if not self._gateway:
            return "the drill sends the long prompt itself, and does that to the demo fleet only"
        return _no_twin(self.slot, "a real engine would have to be given a prompt too long for it")

    def inject(self) -> int:
        _fault(self.slot, {"kind": "oom", "prompt_tokens_from": OOM_TOKENS})
        at_ns = time.time_ns()
        model = _model(self._gateway)
        with ThreadPoolExecutor(OOM_AT_ONCE) as pool:
            for first in range(0, OOM_MOST, OOM_AT_ONCE):  # the policy says where each goes
                numbers = range(first, first + OOM_AT_ONCE)
                list(pool.map(partial(_send_long, self._gateway, model), numbers))
                if started_of(self.slot.pid) != self._began:
                    return at_ns
        raise DrillError(f"none of {OOM_MOST} long prompts was sent to {self.slot.name}")

    def undo(self) -> None:
        if started_of(self.slot.pid) == self._began:
            _heal(self.slot)


class BadAnswers(Injection):
    """Answers come with a 200, and hold nothing."""

    kind = "bad-answers"
    lasts = True

    @property
    def what(self) -> str:
        return f"{self.slot.name} answers with a 200 and not one token"

    def refusal(self) -> str:
        return _no_twin(self.slot, "a real engine's answers cannot be spoiled from outside")

    def inject(self) -> int:
        at_ns = time.time_ns()
        _fault(self.slot, {"kind": "blank"})
        return at_ns

    def undo(self) -> None:
        if started_of(self.slot.pid) == self._began:
            _heal(self.slot)


class Network(Injection):
    """The link to the engine is bad."""

    kind = "network"
    lasts = True
    _changed: Path | None = None
    """The file in which it stands."""

    @property
    def what(self) -> str:
        how = {
            "blackhole": "carries nothing",
            "delay": f"is {self.link.delay_ms:g} ms slower each way",
            "loss": f"loses {self.link.loss_permille / 10:g} % of what is sent, until sent again",
            "reset": "breaks every connection",
        }
        return f"the link to {self.slot.name} {how.get(self.link.kind, self.link.kind)}"

    @property
    def simulated(self) -> str:
        return "a proxy between controller and engine holds the bytes; the kernel still takes" \
            " connections"  # fmt: skip

    def refusal(self) -> str:
        if why := self._no_process():
            return why
        if self._state() is None:
            return (
                f"nothing stands between the controller and {self.slot.name}: let its command in"
                " the fleet file begin with `python -m controller.drills.proxy --port {port}"
                " --state FILE --`, and give the engine the port {inner}"
            )
        return ""

    def _state(self) -> Path | None:
        """The file of the proxy that the slot's process is."""
        try:
            command = Path(f"/proc/{self.slot.pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            return None
        if "controller.drills.proxy" not in command or "--state" not in command:
            return None
        path = Path(command[command.index("--state") + 1])
        return path if path.is_absolute() else None

    def inject(self) -> int:
        self._changed = self._state()
        if self._changed is None:
            raise DrillError(self.refusal())
        at_ns = time.time_ns()
        write_link(self._changed, self.link)
        return at_ns

    def undo(self) -> None:
        if self._changed is not None:
            write_link(self._changed, CLEAR)


class _OfCard(Injection):
    """The card under it fails."""

    fault: ClassVar[str]
    code: ClassVar[int] = 0
    _pretended = False

    @property
    def _real(self) -> bool:
        return self._cards is not None and bool(self.slot.gpus)

    @property
    def simulated(self) -> str:
        if self._real:
            return "the card is one of a test's NVML library"
        return "the controller is told over its admin API; no card says so"

    def refusal(self) -> str:
        return "" if self._real or self.slot.state == "serving" else (
            f"{self.slot.name} is run by someone else: nobody could bring it back"
        )  # fmt: skip

    def _pretend(self) -> None:
        self._pretended = True
        self._admin.pretend(self.slot.replica, self.fault, self.code)

    def undo(self) -> None:
        if self._cards is not None:
            self._cards.mend()
        if self._pretended:
            self._pretended = False
            self._admin.mend(self.slot.replica)


class Ecc(_OfCard):
    """Its memory has an error that cannot be corrected."""

    kind = "ecc"
    fault = "ecc_uncorrectable"

    @property
    def what(self) -> str:
        return f"an uncorrectable memory error on the card of {self.slot.name}"

    def inject(self) -> int:
        at_ns = time.time_ns()
        if self._real and self._cards is not None:
            self._cards.break_memory(self.slot.gpus[0])
        else:
            self._pretend()
        return at_ns


class GpuLoss(_OfCard):
    """It falls off the bus, and its process dies of that a little later."""

    kind = "gpu-loss"
    fault = "xid_fatal"
    code = LOST_CARD_XID

    @property
    def what(self) -> str:
        return (
            f"the card of {self.slot.name} falls off the bus (Xid {LOST_CARD_XID}), and"
            f" {DIES_AFTER_S:g} s later its processes die"
        )

    def inject(self) -> int:
        at_ns = time.time_ns()
        if self._real and self._cards is not None:
            self._cards.lose(self.slot.gpus[0])
        else:
            self._pretend()
        if not self._no_process():
            time.sleep(DIES_AFTER_S)
            self._signal(signal.SIGKILL)
        return at_ns


INJECTIONS: dict[DrillKind, Callable[..., Injection]] = {
    each.kind: each
    for each in (GpuLoss, EngineKill, EngineHang, Network, OutOfMemory, BadAnswers, Ecc)
}


# Served twins


def _no_twin(slot: SlotView, why: str) -> str:
    """Why a served twin's faults are not to be had; empty: they are."""
    try:
        _call("GET", f"{slot.url}/twin/state")
    except DrillError:
        return f"{slot.name} is no served twin: {why}"
    return ""


def _fault(slot: SlotView, fault: dict[str, object]) -> None:
    _call("POST", f"{slot.url}/twin/fault", fault)


def _heal(slot: SlotView) -> None:
    """A process that has ended meanwhile has no fault any more."""
    with contextlib.suppress(DrillError):
        _call("DELETE", f"{slot.url}/twin/fault")


def _send_long(gateway: str, model: str, number: int) -> None:
    """A prompt of ``OOM_TOKENS`` that begins like no other; what becomes of it is in the log."""
    body = {
        "model": model, "max_tokens": 4, "stream": True,
        "messages": [{"role": "user", "content": f"{number} " + "tide " * OOM_TOKENS}],
    }  # fmt: skip
    with contextlib.suppress(DrillError):
        _call("POST", f"{gateway}/v1/chat/completions", body)


def _model(gateway: str) -> str:
    name: str = json.loads(_call("GET", f"{gateway}/v1/models"))["data"][0]["id"]
    return name


def _call(method: str, url: str, body: object = None) -> bytes:
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"}, method=method,
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            read: bytes = answer.read()
            return read
    except OSError as error:
        raise DrillError(f"{method} {url}: {error}") from error
