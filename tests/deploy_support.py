"""Evidence for tests of what is done with it: signed as `twinkeel validate` signs, with a decision
log that replays. What its figures say is made up."""

from __future__ import annotations

import time
import zlib
from base64 import b64encode
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from policy.compose import build_policy
from policy.events import Finished, FirstToken
from policy.evidence import (
    GATES,
    SCHEMA,
    Band,
    Evidence,
    Expected,
    Figure,
    Gate,
    Source,
    encode,
    signed,
)
from policy.files import code_hash
from policy.log import FullLog, Header
from policy.parameters import canonical, policy_hash, render
from policy.runner import Runner
from tests.policy_support import MS, arrived, up

if TYPE_CHECKING:
    from pathlib import Path

    from policy.decisions import Decision
    from policy.parameters import Parameters

KEY = bytes(range(32))


class _Kept:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes, /) -> None:
        self.data += data

    def close(self) -> None:
        pass


def decision_log(parameters: Parameters, requests: int = 20) -> bytes:
    """One segment: requests that come, and are answered, one after another."""
    policy = build_policy(parameters)
    now_ns = 0
    sent: list[Decision] = []
    kept = _Kept()
    header = Header(1, code_hash(), canonical(parameters), 0)
    log = FullLog(header, policy.snapshot, lambda _: kept)
    runner = Runner(policy, lambda: now_ns, sent.append, lambda at_ns: None, log)
    runner.feed(up(0))
    for request in range(requests):
        now_ns += 10 * MS
        runner.feed(arrived(request, user=f"u{request % 3}"))
        now_ns += 50 * MS
        runner.feed(FirstToken(request, 0))
        now_ns += 50 * MS
        runner.feed(Finished(request, 0, 250, 0, 20))
    log.close()
    return kept.data


class Made(NamedTuple):
    """Evidence, and the log beside it."""

    evidence: Evidence
    log: bytes

    def request(self, candidate: Parameters, **more: object) -> dict[str, object]:
        """What is sent to the admin API."""
        return {
            "policy": render(candidate),
            "evidence": encode(self.evidence).decode(),
            "log": packed(self.log),
            **more,
        }

    def write(self, folder: Path) -> Path:
        """As files; where the evidence is."""
        (folder / "ev.json").write_bytes(encode(self.evidence))
        (folder / "ev.log").write_bytes(self.log)
        return folder / "ev.json"


def packed(log: bytes) -> str:
    return b64encode(zlib.compress(log)).decode()


def evidence_for(
    candidate: Parameters,
    live: Parameters,
    key: bytes = KEY,
    *,
    bands: tuple[Band, ...] = (Band("slo_miss_share", 0.0, 0.2),),
    window_s: int = 600,
    **changes: Any,
) -> Made:
    """Evidence that holds; ``changes`` are made before it is signed."""
    log = decision_log(candidate)
    effect = Figure("slo_miss_share", 0.0, -0.01, 0.01)
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "name": candidate.name,
        "policy": canonical(candidate),
        "policy_hash": policy_hash(candidate),
        "against": policy_hash(live),
        "against_name": live.name,
        "code_hash": code_hash(),
        "sources": (Source("scenario", "made", "00"),),
        "seeds": (1, 2, 3),
        "made_s": int(time.time()),
        "gates": tuple(Gate(name, True, "it holds") for name in GATES),
        "figures": (effect,),
        "expected": Expected(effect, 100, 200, 25, window_s, bands),
        "log_sha256": sha256(log).hexdigest(),
        "log_records": 61,
    }
    return Made(signed(Evidence(**{**fields, **changes}), key), log)
