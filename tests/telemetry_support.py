"""Calls as the driver would have made them, without a driver."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from aiohttp.test_utils import make_mocked_request

from controller.call import Call, EngineTimes
from controller.gateway.asking import PATHS, Asked
from controller.telemetry.metrics import Metrics, State
from policy.decisions import Settled
from policy.events import ReplicaUp

if TYPE_CHECKING:
    from aiohttp import web

MS = 1_000_000
S = 1_000_000_000


def asked(**changed: Any) -> Asked:
    """A streamed chat of P0, but for what is ``changed``."""
    endpoint = changed.get("endpoint", "chat")
    fields: dict[str, Any] = {
        "endpoint": endpoint, "path": PATHS[endpoint], "body": b"{}", "document": {},
        "model": "qwen", "stream": endpoint != "embeddings", "wants_usage": False,
        "max_tokens": 100, "prompt_bytes": 400, "messages": 1, "sla": "P0", "line": "shop",
        "user": "ann", "session": "", "chain": "", "step": "", "resume": "", "deadline_ns": 0,
        "tenant": "", "prefix": (), "prefix_block_bytes": 0, "traceparent": "",
    }  # fmt: skip
    return Asked(**(fields | changed))


def call(number: int = 0, at_ns: int = 100 * S, name: str = "", **changed: Any) -> Call:
    """One whose headers were read at ``at_ns`` and that was told to the policy 1 ms later."""
    made = Call(asked(**changed), name or f"tk-{number:024x}", at_ns, _request())
    made.request = number
    made.arrived_ns = at_ns + MS
    return made


@cache
def _request() -> web.Request:
    return make_mocked_request("POST", "/v1/chat/completions")


def dispatch(made: Call, replica: int = 0, queue_ns: int = 10 * MS, tier: str = "turbo") -> None:
    made.replica, made.tier = replica, tier
    made.tries += 1
    made.dispatched_ns = made.arrived_ns + queue_ns
    made.sent_ns = made.dispatched_ns + MS // 10


def answer(made: Call, ttft_ns: int = 200 * MS, tokens: int = 11, gap_ns: int = 20 * MS) -> Settled:
    """Its whole answer, with ``ttft_ns`` from arrival to first token."""
    waited_ns = made.dispatched_ns - made.arrived_ns
    decode_ns = (tokens - 1) * gap_ns
    if made.asked.stream:
        made.first_ns = made.arrived_ns + ttft_ns
        made.committed = True
    made.last_ns = made.arrived_ns + ttft_ns + decode_ns
    made.settled_ns = made.last_ns + MS
    made.prompt_tokens, made.cached_tokens, made.output_tokens = 100, 32, tokens
    made.network_ns, made.gateway_ns = 2 * MS, 400_000
    made.engine = EngineTimes(3 * MS, ttft_ns - waited_ns - 5 * MS, decode_ns)
    made.finish_reason = "stop"
    made.settled = Settled(made.request, "answered", made.tier)
    return made.settled


def refuse(made: Call, outcome: Any = "shed", why: str = "deadline", code: int = 429) -> Settled:
    made.settled_ns = made.arrived_ns + 5 * MS
    made.settled = Settled(made.request, outcome, made.tier or "batch", why, code)
    return made.settled


def up(replica: int, name: str = "", models: tuple[str, ...] = ("qwen",)) -> ReplicaUp:
    return ReplicaUp(
        replica, name or f"10.0.0.{replica}:8000", models, False, 1000, 16, 256, 8192, 32768,
        (1, 1, 1, 1, 1, 1), 8_000_000_000, 1000,
    )  # fmt: skip


class Still:
    """A state that the test sets."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State(200 * S)

    def read(self) -> State:
        return self.state


def metrics(state: State | None = None) -> Metrics:
    return Metrics(Still(state))
