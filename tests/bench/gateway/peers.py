"""What other gateways showed in the same drills, each with its defaults, as published figures.

They were measured on a machine with two cores, replica A faulty, B good, ``/health`` 200.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A drill, and what the others did; empty: nobody publishes it."""

    drill: str
    best: str = ""
    most: str = ""
    bar: str = ""


A500 = Published(
    "A answers 500: client errors of 100; tries wasted on A",
    "0; 5 to 10", "0", "0; at most 5, then at most 1 probe in 2 s",
)  # fmt: skip
KILLED = Published(
    "A killed under load: errors of 100", "0", "0 (one: 50)", "0; steady again in 2 s"
)
OVERLOAD = Published(
    "both 503 for 3 s: tries per request; recovery",
    "1.0; .6 s", ".33; over 40 s", "at most 1.2; at most 1 s",
)  # fmt: skip
STORM400 = Published("60 client 400s, then 40 good: answered", "40", "40 (one: 0)", "40")
HANG = Published(
    "A hangs before the first byte: lost of 120", "55", "60", "at most 2",
)  # fmt: skip
STALL = Published(
    "A stalls mid-stream: client time-outs of 40", "16", "20", "0; error event within 3 s"
)
RESET = Published("A resets mid-stream: cut sockets of 20", "0 (error event)", "20", "0")
EMPTY = Published("A returns empty 200s: passed through of 60", "30", "30", "0")
SIGTERM = Published("SIGTERM with 20 open streams: cut", "0", "0 (one: 20)", "0")
BUSY = Published(
    "upstream still busy after 20 clients left, mid-stream / before first byte",
    "0 / 0 in 10 s", "20 / 20 in 10 s", "0 / 0 within 1 s",
)  # fmt: skip
FAIR = Published("Jain's index among equal tenants at 2x load", bar="at least .95")
LOWEST = Published("lowest tier's share at 2x load", bar="at least 5 %")
P0 = Published("1,000 P0 requests at 80 % load, one fault: over 3 s", bar="0")
DIVERGENCE = Published("same request at temperature 0, 100 times: answers that differ")
