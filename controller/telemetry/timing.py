"""Where a request's time went, as its caller is told: ``Server-Timing``, and the same in JSON."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.call import Call, Hops

NS_PER_MS = 1_000_000
HOPS = ("gateway", "queue", "schedule", "prefill", "decode", "network")
"""In the order of ``Hops``; ``rest`` comes after them, where all of them are known."""

# A metric of the header (RFC 9110 tokens), then its parameters, of which values may be quoted.
_PARAMETER = r"""\s*;\s*([\w-]+)\s*(?:=\s*("(?:[^"\\]|\\.)*"|[^;,]*))?"""
_METRIC = re.compile(rf"([!#$%&'*+.^_`|~\w-]+)((?:{_PARAMETER})*)")
_EACH = re.compile(_PARAMETER)


def known(hops: Hops) -> list[tuple[str, int]]:
    """The hops that were measured, in ns; with the rest where all were. A rest below 0 says that
    two of them overlap."""
    parts = [(name, ns) for name, ns in zip(HOPS, hops, strict=False) if ns >= 0]
    if len(parts) == len(HOPS):
        parts.append(("rest", hops.rest_ns))
    return parts


def server_timing(hops: Hops) -> str:
    """The header's value, in ms: ``gateway;dur=0.412, queue;dur=3.100, ...``."""
    return ", ".join([f"{name};dur={ns / NS_PER_MS:.3f}" for name, ns in known(hops)])


def server_timing_so_far(call: Call, now_ns: int) -> str:
    """What is known when a stream's headers go out: ``first`` is from sending it to a replica to
    its first token (to ``now_ns``, where that has not come)."""
    parts = [f"gateway;dur={call.gateway_ns / NS_PER_MS:.3f}"]
    if call.dispatched_ns >= 0:
        if call.arrived_ns >= 0:
            queue_ns = call.dispatched_ns - call.arrived_ns
            parts.append(f"queue;dur={queue_ns / NS_PER_MS:.3f}")
        first_ns = call.first_ns if call.first_ns >= 0 else now_ns
        parts.append(f"first;dur={(first_ns - call.dispatched_ns) / NS_PER_MS:.3f}")
    return ", ".join(parts)


def timing_object(hops: Hops) -> dict[str, float]:
    """The same for the ``twinkeel`` object of an answer: ``{"gateway_ms": 0.412, ...}``."""
    return {f"{name}_ms": round(ns / NS_PER_MS, 3) for name, ns in known(hops)}


def parse(text: str) -> dict[str, float]:
    """Durations in ms by name, of any ``Server-Timing`` value; what has none is left out."""
    found: dict[str, float] = {}
    for metric in _METRIC.finditer(text):
        for name, value in _EACH.findall(metric[2]):
            if name.lower() == "dur":
                with contextlib.suppress(ValueError):
                    found[metric[1]] = float(value.strip('" '))
    return found
