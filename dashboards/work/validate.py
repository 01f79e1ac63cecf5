"""The job ``validate``: what ``twinkeel validate`` does.

The evidence, its log and the policy lie in the job's folder, ready to be deployed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dashboards.scenario import by_name
from dashboards.shelf import Shelf, label
from policy.evidence import encode, key_of, signed
from twin.tune.asking import policy_text
from twin.validate.cli import KEY_VARIABLE, asked_for, log_beside
from twin.validate.making import validate

if TYPE_CHECKING:
    from collections.abc import Callable

    Tell = Callable[[float | None, str], None]

EVIDENCE, POLICY = "evidence.json", "policy.yaml"


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request."""

    policy: str
    against: str
    traces: list[str]
    fleet: list[tuple[str, int]]
    quick: bool
    seeds: int
    """0: as many as is usual."""
    signed: str
    """Of the deploy key that the app was started with, what tells it from another; empty: none."""
    jobs: int
    trace_s: float = 0.0
    """Of each trace; 0: as long as is usual."""


def run(request: dict[str, Any], folder: Path, tell: Tell) -> None:
    asked = msgspec.convert(request, Asked)
    path_of = Shelf(folder.parents[1] / "uploads").path_of
    policy, against = str(path_of(asked.policy)), str(path_of(asked.against))
    key_path = os.environ.get(KEY_VARIABLE, "") if asked.signed else ""
    key = key_of(Path(key_path).read_text("utf-8"), key_path) if key_path else None
    tell(0.0, "starting")
    what = asked_for(
        candidate=policy, against=against, traces=tuple(str(path_of(one)) for one in asked.traces),
        profiles=tuple(by_name(name) for name, _ in asked.fleet),
        replicas=tuple(count for _, count in asked.fleet), scenarios=(), seeds=asked.seeds or None,
        slo="", attain=95.0, margin=1.0, canary=50, drifting=(),
        trace_seconds=asked.trace_s or None, quick=asked.quick, jobs=asked.jobs,
    )  # fmt: skip
    named = replace(what, name=label(asked.policy), live_name=label(asked.against))
    evidence, log = validate(
        named, lambda done, of: tell(done / of, "playing both policies")
    )  # fmt: skip
    if key is not None:
        evidence = signed(evidence, key)
    text = policy_text(named.candidate, policy)
    (folder / POLICY).write_text(text, encoding="utf-8")
    out = folder / EVIDENCE
    log_beside(out).write_bytes(log)
    out.write_bytes(encode(evidence))
