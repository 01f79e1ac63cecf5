"""What the driver and its listeners know when the metrics are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.telemetry.metrics import State
from policy.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controller.driver import Driver
    from controller.telemetry.metrics import LogHealth, Sink


class Reader:
    """Reads it, at a walk over the open calls.

    Args:
        log: how the writing of the decision log goes.
        sinks: how often something was handed on to others.
    """

    def __init__(
        self,
        driver: Driver,
        log: Callable[[], LogHealth],
        sinks: Callable[[], Mapping[str, Sink]],
    ) -> None:
        self._driver = driver
        self._log = log
        self._sinks = sinks
        self.observed: Callable[[], Mapping[str, int] | None] = lambda: None
        """With ``observe``: what the policy would have done."""

    def waiting(self) -> Mapping[str, int]:
        """Requests in the policy's queue, by tier; ``held``: those that a limit keeps back."""
        policy = self._driver.policy
        return policy.waiting() if isinstance(policy, Service) else {}

    def read(self) -> State:
        driver = self._driver
        in_flight: dict[tuple[int, str], int] = {}
        for call in driver.calls.values():
            if call.attempt is not None and not call.attempt.done():
                key = call.replica, call.tier
                in_flight[key] = in_flight.get(key, 0) + 1
        return State(
            driver.now_ns(), self.waiting(), in_flight, self._log(), self._sinks(), driver.draining,
            self.observed() or {},
        )  # fmt: skip
