"""What a formula knows of a fleet's size, before anything is played.

A replica in balance, under ``rate`` requests a second: each takes ``outputs - 1`` decode steps and
its prefill. With ``steps`` steps a second of a fixed cost and the work that each request adds to
them, in seconds,

    steps * fixed + rate * work = 1        work = decode steps * (per sequence + per KV token *
                                                  context) + new tokens * per token + quadratic

so the batch is ``rate * decode steps / steps``, and three walls bound the rate: step time within
the promise per token, the batch within the engine's seats, and its tokens within the KV cache.
``replicas_least`` keeps to what cannot be argued with: the work alone, of the requests that may not
be missed, in the time that there is. ``replicas_likely`` takes the busiest minute, and an M/G/c
queue in front of the seats (Allen and Cunneen's approximation, which is exact for M/M/c; Erlang's C
for the share that waits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.cost import TICKS_PER_NS, StepCost
from twin.plan.inputs import Need

if TYPE_CHECKING:
    from twin.plan.inputs import Promise
    from twin.plan.machines import Machine
    from twin.plan.workload import Workload

    Array = np.ndarray[Any, np.dtype[Any]]

TICKS_PER_S = TICKS_PER_NS * 1e9
REPLICAS_MOST = 4096
_NOTHING = Need("class", "", "attainment", 0.0)
"""Of a group without a promise: all may be missed."""
WAIT_SHARE = 0.05
"""Of requests that may wait longer: promises are for 95 %."""


@dataclass(frozen=True, slots=True)
class Balance:
    """One replica under the mean request. Rates are per second."""

    rate_most: float
    wall: str
    """What bounds it: per-token time, seats, or the KV cache."""
    work_s: float
    """Of a request, without its part of the fixed cost."""
    fixed_s: float
    outputs: float
    context_tokens: float
    seats: float

    def steps_per_s(self, rate: float) -> float:
        return max(0.0, 1 - rate * self.work_s) / self.fixed_s

    def batch(self, rate: float) -> float:
        steps = self.steps_per_s(rate)
        return rate * self.outputs / steps if steps else math.inf


def balance(machine: Machine, load: Workload, promise: Promise) -> Balance:
    """The mean request of ``load`` on one replica."""
    cost = StepCost.from_profile(machine.profile)
    work_s = _work_s(cost, load, np.maximum(load.output_tokens - 1, 0))
    outputs = max(1.0, float(np.mean(np.maximum(load.output_tokens - 1, 0))))
    weight = np.maximum(load.output_tokens, 1)
    context = float(np.average(load.prompt_tokens + load.output_tokens / 2, weights=weight))
    fixed_s = cost.decode_fixed / TICKS_PER_S
    mean_s = float(work_s.mean())
    engine = machine.profile.engine
    by_kv = machine.kv_tokens / max(context, 1.0)
    seats = min(float(engine.max_num_seqs), by_kv)
    rates = {
        "time per token": max(0.0, 1 - fixed_s / promise.slo.tpot_s) / mean_s,
        "KV cache" if by_kv < engine.max_num_seqs else "seats": seats / (
            outputs * fixed_s + seats * mean_s
        ),
    }  # fmt: skip
    wall = min(rates, key=lambda name: rates[name])
    return Balance(rates[wall], wall, mean_s, fixed_s, outputs, context, seats)


def replicas_least(machine: Machine, load: Workload, promise: Promise, growth: float = 1.0) -> int:
    """No fewer can hold the promise on day 0, whatever the policy: the work of what may not be
    missed, over the time until the last of it must be done.

    As many as may be missed are taken to be the costliest; classes without a promise cost nothing;
    what any earlier request may have left in a cache is cached; each step holds a full batch. Where
    only first tokens are promised, only prefills have to be done in time.
    """
    cost = StepCost.from_profile(machine.profile)
    seats = min(machine.profile.engine.max_num_seqs, machine.kv_tokens)
    steps = np.maximum(load.output_tokens - 1, 0)
    first_s = _work_s(cost, load, 0.0 * steps, least=True)
    whole_s = _work_s(cost, load, steps, least=True)
    whole_s = whole_s + steps * cost.decode_fixed / TICKS_PER_S / seats
    from_s, until_s = load.window(growth)
    inside = (load.arrival_s >= from_s) & (load.arrival_s <= until_s)
    times = math.floor(growth)  # each request comes at least so often
    total_s = 0.0
    for kind, names in (("class", load.sla), ("line", load.line)):
        own_s = 0.0
        column = np.array(names)
        for name in dict.fromkeys(names):
            rows = inside & (column == name)
            own_s += max(
                _cheapest_s(np.repeat(work_s[rows], times), need.missed_most, growth)
                for work_s, need in [
                    (whole_s if need.what == "attainment" else first_s, need)
                    for need in promise.needs if need.kind == kind and need.group == name
                ] or [(whole_s, _NOTHING)]
            )  # fmt: skip
        total_s = max(total_s, own_s)
    last_s = float(np.max(load.output_tokens)) * promise.slo.tpot_s
    wait_s = max(*promise.slo.ttft_s.values(), load.deadline_most_s)
    wait_s = max(wait_s, *(need.limit for need in promise.needs if need.what != "attainment"), 0.0)
    time_s = until_s - from_s + last_s + wait_s
    return max(1, math.ceil(total_s / time_s))


def replicas_likely(
    machine: Machine, load: Workload, promise: Promise, growth: float = 1.0
) -> int | None:
    """About so many; None: no number of them, since one request alone takes too long."""
    found = balance(machine, load, promise)
    if found.rate_most <= 0:
        return None
    rate = load.peak_rate_per_s * growth
    least = max(1, math.ceil(rate / found.rate_most))
    wait_s = min((need.limit for need in promise.needs if need.what != "attainment"), default=1.0)
    for replicas in range(least, REPLICAS_MOST):
        each = rate / replicas
        if each >= found.rate_most:
            continue
        steps = found.steps_per_s(each)
        servers = max(1, math.floor(found.seats)) * replicas
        service_s = found.outputs / steps + found.work_s
        if wait_quantile_s(servers, rate, service_s, 1.0, 1 - WAIT_SHARE) <= wait_s:
            return replicas
    return None


def alone_s(machine: Machine, load: Workload) -> tuple[float, float]:
    """What a prompt as long as 95 % takes to its first token on an idle replica with nothing in
    its cache, and the time per token of one answer alone."""
    cost = StepCost.from_profile(machine.profile)
    overheads = machine.profile.overheads
    tokens = int(np.quantile(load.new_tokens, 0.95))
    way_ns = overheads.request_in_ns.value + overheads.token_out_ns.value
    first_ns = cost.prefill_ns(tokens) + way_ns
    step_ns = cost.step_ticks(1, int(np.median(load.prompt_tokens))) / TICKS_PER_NS
    return first_ns / 1e9, step_ns / 1e9


def erlang_c(servers: int, load: float) -> float:
    """Share of arrivals that wait in M/M/c, for a load below 1 of each server (Erlang 1917)."""
    if load >= 1:
        return 1.0
    offered = servers * load
    blocked = 1.0  # Erlang's B by its recursion: no factorials, any number of servers
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def wait_mean_s(servers: int, rate: float, service_s: float, variation: float = 1.0) -> float:
    """Mean wait in M/G/c; ``variation`` is the squared coefficient of variation of the service
    (Allen and Cunneen 1990; exact for M/M/c, and for M/G/1, where it is Pollaczek and Khinchine's).
    """
    load = rate * service_s / servers
    if load >= 1:
        return math.inf
    waits = erlang_c(servers, load)
    return waits * service_s / (servers * (1 - load)) * (1 + variation) / 2


def wait_quantile_s(
    servers: int, rate: float, service_s: float, variation: float, share: float
) -> float:
    """The wait that ``share`` of arrivals do not exceed: those that wait at all do so for an
    exponential time, as in M/M/c."""
    load = rate * service_s / servers
    if load >= 1:
        return math.inf
    waits = erlang_c(servers, load)
    if waits <= 1 - share:
        return 0.0
    mean_s = wait_mean_s(servers, rate, service_s, variation) / waits
    return mean_s * math.log(waits / (1 - share))


def _work_s(cost: StepCost, load: Workload, steps: Array, *, least: bool = False) -> Array:
    """Of each request with so many decode steps, without the fixed cost of its steps."""
    context = load.prompt_tokens + load.output_tokens / 2
    new = load.new_tokens
    cached = load.prompt_tokens - new
    quad = load.prompt_tokens.astype(float) ** 2 - cached**2
    free = max(cost.prefill_free_tokens, cost.mixed_free_tokens) if least else 0
    ticks = steps * (cost.per_sequence + cost.per_kv_token * context)
    ticks = ticks + np.maximum(0.0, new - free) * cost.per_prefill_token
    ticks = ticks + quad * cost.per_prefill_quad
    paddings = min((*cost.padding, *cost.token_padding, 0)) if least else 0
    out: Array = np.maximum(0.0, ticks + paddings * (steps + 1)) / TICKS_PER_S
    return out


def _cheapest_s(work_s: Array, missed_most: float, growth: float) -> float:
    """The work of a group without the costliest that may be missed. A day that has grown has at
    most one of each more than are counted here, and a share of those may be missed, too."""
    counted = max(1, math.floor(growth))
    missed = math.ceil(missed_most * (work_s.size * (counted + 1) / counted + 1))
    return float(np.sort(work_s)[: max(0, work_s.size - missed)].sum())


__all__ = [
    "Balance", "alone_s", "balance", "erlang_c", "replicas_least", "replicas_likely",
    "wait_mean_s", "wait_quantile_s",
]  # fmt: skip
