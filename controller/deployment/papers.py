"""What is handed in with a policy that is to rule: its evidence, and the log of one of its runs.

The controller takes nobody's word for it: it checks signature, hashes, age and gates, and replays
the log by its own policy code.
"""

from __future__ import annotations

import binascii
import re
import secrets
import time
import zlib
from base64 import b64decode
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from controller.store.secret import kept
from policy import audit
from policy.compose import restore
from policy.drift import Drift
from policy.evidence import EvidenceError, decode, key_of, refusals
from policy.files import FileError, code_hash, parse_policy
from policy.log import LogError, read_segment
from policy.parameters import canonical, from_canonical, policy_hash
from policy.service import Service

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import Event
    from policy.evidence import Evidence
    from policy.log import Header
    from policy.parameters import Parameters

KEY_FILE = "deploy.key"
KEY_VARIABLE = "TWINKEEL_DEPLOY_KEY_FILE"
LOG_BYTES_MOST = 8 * 1024 * 1024
"""Of the log, unpacked; ``twinkeel validate`` writes at most half of it."""
POLICY_MOST = 128 * 1024
"""A policy file with all its comments has a fifth of it; a long one takes minutes to parse."""
OVERRIDE_MOST = 500
NESTING_MOST = 32
STEPS_AT_ONCE, PAUSE_S = 20, 0.001
"""Replayed steps (about a millisecond), and the pause after them in which requests pass."""


class Refusal(Exception):
    """It is not done: why, each reason in a sentence."""

    def __init__(self, code: str, *reasons: str) -> None:
        self.code = code
        """In one word, for programs: busy, refused, invalid, ..."""
        self.reasons = reasons
        super().__init__("; ".join(reasons))


class Papers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to deploy."""

    policy: Annotated[str, Meta(max_length=POLICY_MOST)]
    """The policy file's text."""
    evidence: str = ""
    """The evidence file's text, as it was written."""
    log: str = ""
    """The decision log beside it: base64 of its bytes as zlib packs them."""
    override: Annotated[str, Meta(max_length=OVERRIDE_MOST)] = ""
    """Why it is to be deployed whatever the evidence says; empty: it is not."""
    plan: dict[str, Any] = {}
    """What differs from the usual plan, by its fields."""


class Question(msgspec.Struct, frozen=True):
    """What evidence is held against."""

    candidate: Parameters
    live: Parameters
    key: bytes
    now_s: float
    """Time of day, seconds since 1970."""
    drifting: Sequence[str] = ()
    """Replicas that no longer keep to their profile."""


def load_key(path: Path) -> bytes:
    """The deploy key in a file; one is made if there is none.

    Raises:
        FileError: it holds no key.
    """
    text = kept(path, lambda: f"{secrets.token_hex(32)}\n".encode())
    try:
        return key_of(text.decode("ascii", "replace"), str(path))
    except EvidenceError as error:
        raise FileError(str(path), str(error).removeprefix(f"{path}: ")) from error


def read_policy(body: bytes) -> Parameters:
    """The policy file that somebody sent. A large one takes long to parse.

    Raises:
        FileError: what is wrong with the text.
    """
    try:
        text = body.decode("utf-8")
        if _nesting(text) > NESTING_MOST:  # the parser's time grows with the square of it
            raise FileError("the policy", "is nested too deeply")
        return parse_policy(text, "the policy")
    except UnicodeDecodeError as error:
        raise FileError("the policy", f"is no valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise FileError("the policy", "is nested too deeply") from None
    except FileError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        # YAML's own conversions, such as of a date that no calendar has.
        raise FileError("the policy", str(error)) from error


def _nesting(text: str) -> int:
    """Brackets open at once, those in comments and texts included."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def drifting_replicas(policy: Policy) -> list[str]:
    """Names of the replicas whose steps no longer take what their profile says."""
    drift = policy.mechanisms.get("drift") if isinstance(policy, Service) else None
    if not isinstance(policy, Service) or not isinstance(drift, Drift):
        return []
    alarm = policy.parameters.drift.alarm_permille
    return [
        replica.spec.name
        for number, replica in policy.facts.replicas.items()
        if abs(drift.permille_of(number) or 0) >= alarm
    ]


def check(papers: Papers, question: Question) -> tuple[Evidence | None, list[str]]:
    """The evidence, if there is any that can be read, and what keeps it from being accepted, each
    in a sentence. Takes seconds where there is a log to replay."""
    if not papers.evidence:
        return None, [
            "there is no evidence: run `twinkeel validate` on the policy, and give the file that it"
            " writes with --evidence"
        ]
    try:
        evidence = decode(papers.evidence.encode(), "the evidence")
    except EvidenceError as error:
        return None, [str(error)]
    found = refusals(
        evidence,
        key=question.key,
        policy_hash=policy_hash(question.candidate),
        live_hash=policy_hash(question.live),
        code_hash=code_hash(),
        now_s=question.now_s,
        drifting=question.drifting,
    )
    # Only what somebody with the key has written is replayed.
    return evidence, found or _log_refusals(papers.log, evidence, question.candidate)


def unpacked(log: str) -> bytes:
    """The log's bytes.

    Raises:
        ValueError: they are not packed as they should be, or are too many.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(b64decode(log, validate=True), LOG_BYTES_MOST + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"it cannot be unpacked ({error})") from None
    if len(data) > LOG_BYTES_MOST:
        raise ValueError(f"it has more than {LOG_BYTES_MOST} bytes")
    if not unpacker.eof:
        raise ValueError("it is cut off")
    return data


def _log_refusals(log: str, evidence: Evidence, candidate: Parameters) -> list[str]:
    """What keeps the log from being proof of the evidence."""
    if not log:
        return ["the decision log that belongs to the evidence is missing: it lies beside it"]
    try:
        data = unpacked(log)
    except ValueError as error:
        return [f"the decision log beside the evidence: {error}"]
    if sha256(data).hexdigest() != evidence.log_sha256:
        return ["the decision log is not the one that the evidence was made with"]
    try:
        header = read_segment(data).header
        if canonical(from_canonical(header.policy)) != canonical(candidate):
            return ["the decision log is another policy's"]
        difference = audit.replay([data], _gentle)
    except (LogError, msgspec.MsgspecError, ValueError) as error:
        return [f"the decision log cannot be replayed: {error}"]
    if difference is not None:
        return [
            f"replayed here, the decision log differs from its record {difference.record} on: this"
            " version decides otherwise than the one that validated"
        ]
    return []


def _gentle(header: Header, snapshot: bytes) -> Policy:
    return _Gentle(restore(from_canonical(header.policy), snapshot))


class _Gentle:
    """A policy that is replayed beside live traffic: it lets the event loop have its turn."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._steps = 0
        self.deadline_ns = policy.deadline_ns
        self.snapshot = policy.snapshot

    def step(self, now_ns: int, event: Event) -> Sequence[Decision]:
        self._steps += 1
        if not self._steps % STEPS_AT_ONCE:
            time.sleep(PAUSE_S)
        return self._policy.step(now_ns, event)
