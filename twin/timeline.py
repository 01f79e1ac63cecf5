"""Requests of a replay as a timeline for ui.perfetto.dev or chrome://tracing.

A replica is a process there. Requests that overlap lie in lanes below each other, each with a span
for each hop of its way. What was shed waits in a process of its own; faults are marks.
"""

from __future__ import annotations

import heapq
import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from twin.faults import kind_of, span_s
from twin.report.charts import HOP_NAMES
from twin.report.files import write_whole
from twin.report.requests import Requests

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from twin.faults import Fault

MOST = 20_000
"""Requests in one file: some 25 MB, which the viewers still open at once."""
Which = Literal["slowest", "first"]
WAY = ("queue_s", "gateway_s", "network_s", "schedule_s", "prefill_s", "decode_s", "network_s")
"""One half of the network's time is on the way there, the other on the way back."""
FAULTS_PID, NOWHERE_PID, REPLICA_PID = 1, 2, 10
NS = 1_000_000_000


def write_timeline(
    requests: Path, target: Path, *, faults: Sequence[Fault] = (), which: Which = "slowest",
    most: int = MOST,
) -> int:  # fmt: skip
    """Write the timeline of the run whose ``requests.parquet`` is given.

    Args:
        which: the requests that took longest, or those that came first, where there are more than
            ``most``.

    Returns:
        Number of requests in it.

    Raises:
        ReportError: the file cannot be written.
    """
    document, count = timeline(Requests(requests), faults=faults, which=which, most=most)
    write_whole(target, json.dumps(document, separators=(",", ":"), allow_nan=False))
    return count


def timeline(
    requests: Requests, *, faults: Sequence[Fault] = (), which: Which = "slowest", most: int = MOST
) -> tuple[dict[str, Any], int]:
    """The document, in the trace event format, and the number of requests in it."""
    rows = _chosen(requests, which, most)
    events: list[dict[str, Any]] = []
    events += _fault_events(faults, float(requests.arrival_s[-1]))
    pids: dict[str, int] = {}
    lanes: dict[int, _Lanes] = {}
    for one in requests.some(rows):
        start_ns = round(one["arrival_s"] * NS)
        hops = _hops(one)
        took_ns = _took_ns(one, hops)
        replica = one["replica"] or ""
        pid = NOWHERE_PID if not replica else pids.setdefault(replica, REPLICA_PID + len(pids))
        lane = lanes.setdefault(pid, _Lanes()).take(start_ns, start_ns + took_ns)
        events += _request_events(one, pid, lane, start_ns, took_ns, hops)
    events += _names(pids, lanes)
    document = {
        "displayTimeUnit": "ms", "traceEvents": events,
        "otherData": {"requests": len(rows), "of": requests.rows, "which": which},
    }  # fmt: skip
    return document, len(rows)


def _chosen(requests: Requests, which: Which, most: int) -> list[int]:
    if requests.rows <= most or which == "first":
        return list(range(min(most, requests.rows)))
    spent = requests.numbers("e2e_s")
    spent = np.where(np.isnan(spent), requests.numbers("queue_s"), spent)
    spent = np.nan_to_num(spent)
    return sorted(int(row) for row in np.argsort(-spent, kind="stable")[:most])


def _hops(one: dict[str, Any]) -> list[tuple[str, int]]:
    """(name, nanoseconds), in the order of its way."""
    if one["e2e_s"] is None:
        return [(HOP_NAMES["queue_s"], round((one["queue_s"] or 0.0) * NS))]
    return [
        (HOP_NAMES[hop], round(one[hop] * NS * (0.5 if hop == "network_s" else 1.0)))
        for hop in WAY
        if one[hop]
    ]


def _took_ns(one: dict[str, Any], hops: Sequence[tuple[str, int]]) -> int:
    known = one["e2e_s"]
    return round(known * NS) if known is not None else sum(ns for _, ns in hops)


def _request_events(
    one: dict[str, Any], pid: int, lane: int, start_ns: int, took_ns: int,
    hops: Iterable[tuple[str, int]],
) -> list[dict[str, Any]]:  # fmt: skip
    shown = ("outcome", "tier", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s", "retries",
             "error_kind", "degraded_how")  # fmt: skip
    where = {"pid": pid, "tid": lane, "ph": "X"}
    name = f"{one['sla_class'] or one['endpoint'] or 'request'} #{one['row']}"
    events = [{
        "name": name, "cat": one["outcome"] or "request", **where,
        "ts": _us(start_ns), "dur": _us(took_ns),
        "args": {"request_id": one["request_id"]}
        | {key: one[key] for key in shown if one[key] is not None},
    }]  # fmt: skip
    at_ns, end_ns = start_ns, start_ns + took_ns
    for hop, ns in hops:
        # A span may not end after the one around it; columns of 32 bits do not add up exactly.
        ns = min(ns, end_ns - at_ns)
        if ns > 0:
            events.append({"name": hop, "cat": "hop", **where, "ts": _us(at_ns), "dur": _us(ns)})
            at_ns += ns
    return events


def _fault_events(faults: Sequence[Fault], end_s: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for lane, fault in enumerate(faults):
        start_s, until_s = span_s(fault)
        start_us = _us(round(start_s * NS))
        where = {"name": kind_of(fault), "cat": "fault", "pid": FAULTS_PID, "tid": lane}
        events.append({**where, "ph": "i", "s": "g", "ts": start_us})
        lasts_s = max(0.0, (end_s if until_s is None else until_s) - start_s)
        events.append({**where, "ph": "X", "ts": start_us, "dur": _us(round(lasts_s * NS))})
    return events


def _names(pids: dict[str, int], lanes: dict[int, _Lanes]) -> list[dict[str, Any]]:
    """Metadata: what processes and threads are called, and in which order they stand."""
    named = {FAULTS_PID: "faults", NOWHERE_PID: "never sent to a replica"}
    named |= {pid: name for name, pid in pids.items()}
    events: list[dict[str, Any]] = []
    order = [FAULTS_PID, *(pids[name] for name in sorted(pids)), NOWHERE_PID]
    for place, pid in enumerate(order):
        events.append(_meta("process_name", pid, 0, name=named[pid]))
        events.append(_meta("process_sort_index", pid, 0, sort_index=place))
        for lane in range(lanes[pid].count if pid in lanes else 0):
            events.append(_meta("thread_name", pid, lane, name=f"lane {lane + 1}"))
    return events


def _meta(name: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


class _Lanes:
    """Gives each span the lowest lane that is free when it begins; asked in order of beginning."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []

    def take(self, start_ns: int, end_ns: int) -> int:
        while self._busy and self._busy[0][0] <= start_ns:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane, self.count = self.count, self.count + 1
        heapq.heappush(self._busy, (end_ns, lane))
        return lane


def _us(ns: int) -> float:
    return ns / 1000
