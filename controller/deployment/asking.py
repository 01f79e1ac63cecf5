"""A request to deploy, as it is sent: built here for the command and for the app.

Needs none of the live controller's libraries.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from typing import TYPE_CHECKING, Any

from policy.files import FileError

if TYPE_CHECKING:
    from pathlib import Path


def request_of(
    policy: str, evidence: dict[str, str], plan: dict[str, Any], override: str = ""
) -> dict[str, Any]:
    """The body of ``POST /deployments``.

    Args:
        policy: the policy file's text.
        evidence: as ``packed`` gives it; empty: there is none.
        plan: what differs from the usual plan.
        override: why it is to be deployed whatever the evidence says; empty: it is not.
    """
    return {"policy": policy, "override": override.strip(), "plan": plan, **evidence}


def packed(evidence: bytes, log: bytes = b"") -> dict[str, str]:
    """The evidence and its decision log (empty: it is not there), as they are sent."""
    text = b64encode(zlib.compress(log)).decode() if log else ""
    return {"evidence": evidence.decode("utf-8", "replace"), "log": text}


def evidence_at(path: Path | None) -> dict[str, str]:
    """The same from a file, and the log beside it; None: there is no evidence."""
    if path is None:
        return {}
    log = path.with_suffix(".log")
    return packed(path.read_bytes(), log.read_bytes() if log.is_file() else b"")


def parse_stages(text: str) -> list[dict[str, object]]:
    """``KIND:SECONDS[:REQUESTS]``, one after another, as the plan's stages.

    Raises:
        FileError: it is none of that.
    """
    stages: list[dict[str, object]] = []
    for part in text.split(","):
        kind, *numbers = part.strip().split(":")
        kind, equals, percent = kind.partition("=")
        share = {"shadow": "0", "full": "100"}.get(kind, percent)
        try:
            if kind not in ("shadow", "canary", "full") or bool(equals) != (kind == "canary"):
                raise ValueError
            permille = round(10 * float(share))
            least_s, least_requests = int(numbers[0]), int((*numbers, "0")[1])
            if len(numbers) > 2 or not 0 <= permille <= 1000 or min(least_s, least_requests) < 0:
                raise ValueError
        except (ValueError, IndexError):
            raise FileError(
                "--stages", f"{part.strip()!r} is no stage", value=part,
                hint="such as shadow:60, canary=5:600:500 or full:600",
            ) from None  # fmt: skip
        stages.append(
            {"kind": kind, "share_permille": permille, "least_s": least_s,
             "least_requests": least_requests}
        )  # fmt: skip
    return stages
