"""The world's agenda: bare SimPy events, and the order of what happens at the same instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

FAULTS, ARRIVALS, DELIVERIES, ENGINES = -1, 0, 1, 10
"""SimPy priorities: what comes first at the same instant. Engines follow each other by number."""

Callbacks = list[Callable[[Any], None]]


class Event(simpy.Event):
    """A bare event that always succeeds and carries a value: half the price of a Timeout.

    SimPy takes the list of callbacks off an event without changing it, so one list serves many.
    """

    _ok = True
    _defused = False

    def __init__(self, callbacks: Callbacks, value: object = None) -> None:
        self.callbacks = callbacks
        self._value = value
