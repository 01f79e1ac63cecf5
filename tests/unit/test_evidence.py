"""Evidence: what is written is read again, and what must not be accepted is refused, each for its
own reason."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.evidence import (
    BYTES_MOST,
    GATES,
    SCHEMA,
    Band,
    Evidence,
    EvidenceError,
    Expected,
    Figure,
    Gate,
    Source,
    decode,
    encode,
    key_of,
    refusals,
    signed,
)
from policy.parameters import Parameters, canonical, policy_hash

DAY_S = 86_400
NOW_S = 1_800_000_000
KEY = bytes(range(32))
CODE = "5f" * 16
LIVE = Parameters(name="live")
CANDIDATE = Parameters(name="candidate")


def evidence(**changes: object) -> Evidence:
    effect = Figure("miss_share_difference", 0.001, -0.002, 0.004)
    made = Evidence(
        schema=SCHEMA,
        name="candidate",
        policy=canonical(CANDIDATE),
        policy_hash=policy_hash(CANDIDATE),
        against=policy_hash(LIVE),
        against_name="live",
        code_hash=CODE,
        sources=(
            Source("trace", "week", "ab" * 32),
            Source("profile", "h100-sxm/qwen3-8b", "cd" * 32, "fitted", 4.1, 2.5),
        ),
        seeds=(0, 1),
        made_s=NOW_S - DAY_S,
        gates=tuple(Gate(name, True, "It holds: às ordens.", (effect,)) for name in GATES),
        figures=(effect, Figure("starved_s", 1.25, 0.5, 1.25, "s")),
        expected=Expected(effect, 50, 1200, 25, 600, (Band("slo_miss_share", 0.0, 0.02),)),
        log_sha256="ef" * 32,
        log_records=12_345,
    )
    return msgspec.structs.replace(made, **changes)


def refused(made: Evidence, **changes: object) -> list[str]:
    given_ = {
        "key": KEY, "policy_hash": policy_hash(CANDIDATE), "live_hash": policy_hash(LIVE),
        "code_hash": CODE, "now_s": float(NOW_S),
    }  # fmt: skip
    return refusals(made, **{**given_, **changes})  # type: ignore[arg-type]


def test_signed_evidence_is_accepted_as_it_was_written() -> None:
    made = signed(evidence(), KEY)
    again = decode(encode(made), "ev.json")
    assert again == made
    assert again.holds
    assert refused(again) == []


def test_whole_numbers_are_read_as_they_were_signed() -> None:
    made = signed(evidence(figures=(Figure("steps", 12, 12, 12),)), KEY)
    assert refused(decode(encode(made), "ev.json")) == []


def test_the_signature_does_not_depend_on_an_earlier_one() -> None:
    once = signed(evidence(), KEY)
    assert signed(once, KEY) == once
    assert signed(once, bytes(32)).signature != once.signature


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schema": 2}, "schema 2 is not known"),
        ({"policy_hash": policy_hash(LIVE)}, "validate the file that you deploy"),
        ({"policy": canonical(LIVE)}, "has another hash"),
        ({"against": "00" * 32}, "validate --against the live policy"),
        ({"code_hash": "00" * 16}, "validate with the version that runs here"),
        ({"made_s": NOW_S - 7 * DAY_S - 1}, "7.0 days old"),
        ({"made_s": NOW_S + 3600}, "made 3600 s from now"),
        ({"gates": evidence().gates[1:]}, "the gate invariants is missing"),
        ({"gates": (*evidence().gates, evidence().gates[3])}, "not_worse stands in it twice"),
    ],
)
def test_each_fault_is_refused_alone(changes: dict[str, object], sentence: str) -> None:
    said = refused(signed(evidence(**changes), KEY))
    assert len(said) == 1
    assert sentence in said[0]


@pytest.mark.parametrize("name", GATES)
def test_a_gate_that_fails_is_told_with_its_reason(name: str) -> None:
    gates = tuple(
        Gate(name, False, "it floods the replicas") if gate.name == name else gate
        for gate in evidence().gates
    )
    made = signed(evidence(gates=gates), KEY)
    assert refused(made) == [f"the gate {name} fails: it floods the replicas"]
    assert not made.holds


def test_a_failing_gate_that_nobody_asked_for_is_refused_too() -> None:
    gates = (*evidence().gates, Gate("own", False, "no"))
    assert refused(signed(evidence(gates=gates), KEY)) == ["the gate own fails: no"]


def test_without_a_signature_or_with_another_it_is_refused() -> None:
    assert "not signed" in refused(evidence())[0]
    other = refused(signed(evidence(), bytes(32)))
    assert len(other) == 1
    assert "signature is wrong" in other[0]
    changed = msgspec.structs.replace(signed(evidence(), KEY), quick=True)
    assert "signature is wrong" in refused(changed)[0]


def test_a_drifting_profile_is_refused_by_name() -> None:
    said = refused(signed(evidence(), KEY), drifting=["gpu-3"])
    assert len(said) == 1
    assert said[0].startswith("gpu-3 drifts")


def test_nothing_matches_an_empty_hash() -> None:
    made = signed(evidence(policy_hash="", against="", code_hash=""), KEY)
    assert len(refused(made, policy_hash="", live_hash="", code_hash="")) == 3


def test_the_oldest_and_the_youngest_that_pass() -> None:
    assert refused(signed(evidence(made_s=NOW_S - 7 * DAY_S), KEY)) == []
    assert refused(signed(evidence(made_s=NOW_S + 60), KEY)) == []
    assert refused(signed(evidence(), KEY), most_age_s=3600) != []


WRITTEN = encode(signed(evidence(), KEY))


def rejected(data: bytes) -> bool:
    try:
        made = decode(data, "ev.json")
    except EvidenceError:
        return True
    return bool(refused(made))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(WRITTEN) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(at: int, flipped: int) -> None:
    changed = bytes([WRITTEN[at] ^ flipped])
    assert rejected(WRITTEN[:at] + changed + WRITTEN[at + 1 :])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(WRITTEN)), st.binary(min_size=1, max_size=3))
def test_a_byte_more_or_less_is_refused(at: int, more: bytes) -> None:
    assert rejected(WRITTEN[:at] + more + WRITTEN[at:])
    if at < len(WRITTEN):
        assert rejected(WRITTEN[:at] + WRITTEN[at + 1 :])
        assert rejected(WRITTEN[:at])
    assert not rejected(WRITTEN)


def test_another_schema_is_told_before_anything_else() -> None:
    with pytest.raises(EvidenceError, match=r"ev\.json: schema 9 is not known .*schema 1"):
        decode(b'{"schema": 9, "all": "else"}', "ev.json")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"\xff", b'{"schema": 1}', b" " * (BYTES_MOST + 1)], ids=len
)
def test_what_is_no_evidence_is_told(data: bytes) -> None:
    with pytest.raises(EvidenceError, match=r"ev\.json: "):
        decode(data, "ev.json")


def test_unknown_keys_are_refused() -> None:
    written = encode(evidence()).replace(b'"seeds"', b'"seedz"')
    with pytest.raises(EvidenceError, match="seedz"):
        decode(written, "ev.json")


def test_a_key_is_32_bytes_of_hex_and_never_told() -> None:
    assert key_of(f"{KEY.hex()}\n", "deploy.key") == KEY
    for text in ("", "secret", KEY.hex()[2:], KEY.hex() + "00"):
        with pytest.raises(EvidenceError) as caught:
            key_of(text, "deploy.key")
        assert "deploy.key" in str(caught.value)
        assert not text or text not in str(caught.value)
    with pytest.raises(EvidenceError, match="32 bytes, and this one 0"):
        signed(evidence(), b"")
    with pytest.raises(EvidenceError, match="32 bytes"):
        refused(signed(evidence(), KEY), key=b"short")


@pytest.mark.parametrize("ends", [(0.2, 0.1), (float("nan"), 1.0), (0.0, float("inf"))])
def test_an_interval_has_two_ends_in_order(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no interval"):
        Figure("share", 0.1, *ends)
    with pytest.raises(ValueError, match="no interval"):
        Band("slo_miss_share", *ends)
