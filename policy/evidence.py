"""What is known about a policy before it may rule live traffic: the evidence file.

``twinkeel validate`` writes it, the controller reads it. It holds hashes of all that was played,
every figure with its interval, what the canary is expected to show, whether each gate holds and
why, and an HMAC with the deploy key over all of it. ``refusals`` says what keeps it from being
accepted. Only the bytes that ``encode`` writes can be read again, so a changed byte never passes.
"""

from __future__ import annotations

import hmac
import math
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCHEMA = 1
KEY_BYTES = 32
BYTES_MOST = 1024 * 1024
"""Of an evidence file; a real one has some 20 kB."""
AGE_S_MOST = 7 * 86_400
"""Traffic changes with the week: what was shown before the last one is no longer shown."""
CLOCKS_APART_S = 120
"""How far the clocks of two machines may lie apart."""
GATES = (
    "invariants", "slo", "faults", "not_worse", "profile", "determinism",
    "verification_storm", "breaker_flap", "starvation", "retry_storm",
)  # fmt: skip
"""What must hold, each by its name; evidence without one of them is refused."""

Kind = Literal["measured", "fitted", "extrapolated", "estimated"]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]*$", max_length=64)]
Text = Annotated[str, Meta(max_length=2000)]
Count = Annotated[int, Meta(ge=0)]


class EvidenceError(ValueError):
    """An evidence file or a key that cannot be used: which, why, and what to do."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with its 95 % interval. What is counted, not sampled, has no width."""

    name: str
    value: float
    low: float
    high: float
    unit: str = ""
    """Empty: a share from 0 to 1, or a bare number."""
    kind: Kind = "estimated"
    """How it came about: measured live, fitted, or extrapolated beyond what was; ``estimated``: the
    twin's own."""

    def __post_init__(self) -> None:
        _check_span(self.name, self.low, self.high)
        if not math.isfinite(self.value):
            raise ValueError(f"{self.name} is {self.value}: it must be a number")


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One condition, and whether it holds."""

    name: str
    holds: bool
    why: Text
    """In a sentence: what holds, or what does not and what to change."""
    figures: tuple[Figure, ...] = ()


class Band(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a live figure of the candidate is expected to lie."""

    figure: str
    """``slo_miss_share``, or ``ttft_s_p95/`` and a class, such as ``ttft_s_p95/P0``."""
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_span(self.figure, self.low, self.high)


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the canary should show, said before it begins."""

    effect: Figure
    """Share of requests that miss their deadline, the candidate's less the live policy's."""
    share_permille: Annotated[int, Meta(ge=1, le=1000)]
    """The canary's share of the keys that the sample size is for."""
    sample_size: Count
    """Requests of the canary after which a policy that misses five times as often is found out,
    four times in five."""
    hurt_budget: Count
    """Requests of the canary that may miss for its sake before it must be over."""
    window_s: Annotated[int, Meta(ge=1)]
    """The band is for figures over this long."""
    band: tuple[Band, ...]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that was played or computed with."""

    kind: Literal["trace", "profile", "scenario"]
    name: str
    sha256: Hex
    trust: str = ""
    """A profile's: fitted, untuned or scaled."""
    held_out_error_percent: float | None = None
    """A profile's: the worst of its tables' mean errors on what it was not fitted on; none: the
    profile knows none."""
    age_days: float | None = None
    """Of a profile's file, when the evidence was made; none: shipped with the program."""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See above. Hashes are lower-case hex."""

    schema: int
    name: str
    """The candidate's."""
    policy: str
    """The candidate, in ``policy.parameters.canonical`` form."""
    policy_hash: Hex
    against: Hex
    """Hash of the policy that it was compared with: the live one."""
    against_name: str
    code_hash: Hex
    """Of the policy's code (``policy.files.code_hash``)."""
    sources: tuple[Source, ...]
    seeds: tuple[int, ...]
    made_s: Count
    """Time of day, in seconds since 1970."""
    gates: tuple[Gate, ...]
    figures: tuple[Figure, ...]
    expected: Expected
    log_sha256: Hex
    """Of the decision log beside this file: one stress run, to be replayed by whoever accepts."""
    log_records: Count
    quick: bool = False
    """Fewer seeds and shorter runs than a full validation: for demonstrations."""
    signature: Hex = ""
    """HMAC-SHA256 of all the rest; empty: not signed."""

    @property
    def holds(self) -> bool:
        """Every gate holds, and none is missing."""
        return not _gates(self)


def key_of(text: str, where: str) -> bytes:
    """The deploy key that a file holds: 32 bytes in hex.

    Raises:
        EvidenceError: it holds something else. What it holds is not told.
    """
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise EvidenceError(
            f"{where}: this is no deploy key: {2 * KEY_BYTES} hex digits are expected, such as"
            f" `openssl rand -hex {KEY_BYTES}` writes"
        )
    return key


def signed(evidence: Evidence, key: bytes) -> Evidence:
    """The same with its signature.

    Raises:
        EvidenceError: the key is too short to protect anything.
    """
    return msgspec.structs.replace(evidence, signature=_signature(evidence, key))


def encode(evidence: Evidence) -> bytes:
    """The one text of it: JSON, keys in order, an item a line."""
    return msgspec.json.format(_plain(evidence), indent=1) + b"\n"


def decode(data: bytes, where: str) -> Evidence:
    """The evidence that ``encode`` wrote; ``where`` is what errors call it.

    Raises:
        EvidenceError: it is too long, no evidence, of another schema, or not as it was written.
    """
    if len(data) > BYTES_MOST:
        raise EvidenceError(f"{where}: {len(data)} bytes are too many: at most {BYTES_MOST}")
    try:
        schema = msgspec.json.decode(data, type=_AnySchema).schema
        if schema != SCHEMA:
            raise EvidenceError(
                f"{where}: schema {schema} is not known (hint: this version reads schema {SCHEMA};"
                " run `twinkeel validate` again with this version)"
            )
        evidence = msgspec.json.decode(data, type=Evidence)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EvidenceError(f"{where}: this is no evidence: {error}") from None
    if encode(evidence) != data:
        raise EvidenceError(
            f"{where}: it is not as `twinkeel validate` wrote it: use the file unchanged"
        )
    return evidence


def refusals(
    evidence: Evidence,
    *,
    key: bytes,
    policy_hash: str,
    live_hash: str,
    code_hash: str,
    now_s: float,
    most_age_s: float = AGE_S_MOST,
    drifting: Sequence[str] = (),
) -> list[str]:
    """What keeps the evidence from being accepted, each in a sentence; none: nothing does.

    Args:
        policy_hash: of the policy that is to be deployed.
        live_hash: of the policy that rules now.
        code_hash: of the policy code that runs here.
        now_s: time of day, in seconds since 1970.
        drifting: replicas or profiles whose drift alarm is on.

    Raises:
        EvidenceError: the key is too short to protect anything.
    """
    return [
        *_forged(evidence, key),
        *_mismatched(evidence, policy_hash, live_hash, code_hash),
        *_untimely(evidence, now_s, most_age_s),
        *_gates(evidence),
        *(
            f"{name} drifts from its profile, so that the twin's figures no longer hold:"
            " recalibrate it (twinkeel calibrate) and validate again"
            for name in drifting
        ),
    ]


def _forged(evidence: Evidence, key: bytes) -> Iterator[str]:
    if not evidence.signature:
        yield (
            "the evidence is not signed: run `twinkeel validate` with --key and the controller's"
            " deploy key"
        )
    elif not hmac.compare_digest(evidence.signature, _signature(evidence, key)):
        yield (
            "the signature is wrong: the evidence was changed after it was made, or signed with"
            " another deploy key than this controller's"
        )


def _mismatched(
    evidence: Evidence, policy_hash: str, live_hash: str, code_hash: str
) -> Iterator[str]:
    if evidence.schema != SCHEMA:
        yield f"schema {evidence.schema} is not known: this version reads schema {SCHEMA}"
    if not policy_hash or evidence.policy_hash != policy_hash:
        yield (
            f"the evidence is for the policy {_short(evidence.policy_hash)} ({evidence.name}), and"
            f" {_short(policy_hash)} is to be deployed: validate the file that you deploy"
        )
    elif sha256(evidence.policy.encode()).hexdigest() != policy_hash:
        yield f"the policy in the evidence has another hash than {_short(policy_hash)}"
    if not live_hash or evidence.against != live_hash:
        yield (
            f"the evidence compares with {_short(evidence.against)} ({evidence.against_name}), and"
            f" {_short(live_hash)} is live: validate --against the live policy"
        )
    if not code_hash or evidence.code_hash != code_hash:
        yield (
            f"the evidence was made with policy code {_short(evidence.code_hash)}, and"
            f" {_short(code_hash)} runs here: validate with the version that runs here"
        )


def _untimely(evidence: Evidence, now_s: float, most_age_s: float) -> Iterator[str]:
    age_s = now_s - evidence.made_s
    if age_s > most_age_s:
        yield (
            f"the evidence is {age_s / 86_400:.1f} days old: at most {most_age_s / 86_400:g} are"
            " allowed, so validate again"
        )
    elif age_s < -CLOCKS_APART_S:
        yield (
            f"the evidence was made {-age_s:.0f} s from now: set the clock of one of the machines"
            " right"
        )


def _gates(evidence: Evidence) -> list[str]:
    names = [gate.name for gate in evidence.gates]
    return [
        *(
            f"the gate {name} is missing: validate with this version"
            for name in GATES
            if name not in names
        ),
        *(
            f"the gate {name} stands in it twice"
            for name in sorted(set(names))
            if names.count(name) > 1
        ),
        *(f"the gate {gate.name} fails: {gate.why}" for gate in evidence.gates if not gate.holds),
    ]


class _AnySchema(msgspec.Struct):
    schema: int = 0


def _plain(evidence: Evidence) -> bytes:
    """Of the value that a reader will have: a whole number in a field for floats becomes one."""
    read = msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence)
    return msgspec.json.encode(read, order="sorted")


def _signature(evidence: Evidence, key: bytes) -> str:
    if len(key) != KEY_BYTES:
        raise EvidenceError(f"a deploy key has {KEY_BYTES} bytes, and this one {len(key)}")
    unsigned = msgspec.structs.replace(evidence, signature="")
    return hmac.digest(key, _plain(unsigned), "sha256").hex()


def _short(hash_: str) -> str:
    return hash_[:12] or "none"


def _check_span(name: str, low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"{name}: from {low} to {high} is no interval")
