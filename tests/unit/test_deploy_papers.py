"""What is handed in with a policy: nothing is taken that is not proof of this policy, now, here."""

from __future__ import annotations

import stat
import zlib
from base64 import b64encode
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.deployment.papers import (
    LOG_BYTES_MOST,
    Papers,
    Question,
    check,
    drifting_replicas,
    load_key,
    read_policy,
    unpacked,
)
from policy.events import StepsRead
from policy.evidence import Gate, encode, signed
from policy.files import FileError
from policy.parameters import render
from policy.service import Service
from tests.deploy_support import KEY, Made, decision_log, evidence_for, packed
from tests.policy_support import S, parameters, up

if TYPE_CHECKING:
    from pathlib import Path

LIVE = parameters(name="live")
MINE = parameters(name="mine", tiers={"turbo_max_tflop": 60})
OTHER = parameters(name="other")


def refused(made: Made, **how: Any) -> list[str]:
    """What keeps these papers from being accepted for ``MINE``."""
    key, drifting = how.pop("key", KEY), how.pop("drifting", ())
    given = {"policy": render(MINE), "evidence": encode(made.evidence).decode(),
             "log": packed(made.log), **how}  # fmt: skip
    question = Question(MINE, LIVE, key, float(made.evidence.made_s), drifting)
    return check(Papers(**given), question)[1]


def test_papers_that_are_proof_are_taken() -> None:
    made = evidence_for(MINE, LIVE)
    evidence, reasons = check(
        Papers(render(MINE), encode(made.evidence).decode(), packed(made.log)),
        Question(MINE, LIVE, KEY, float(made.evidence.made_s)),
    )
    assert reasons == []
    assert evidence == made.evidence


@pytest.mark.parametrize(
    ("made", "how", "said"),
    [
        (evidence_for(MINE, LIVE), {"evidence": ""}, "there is no evidence"),
        (evidence_for(MINE, LIVE), {"evidence": "{}"}, "schema 0 is not known"),
        (evidence_for(MINE, LIVE), {"key": bytes(32)}, "another deploy key"),
        (evidence_for(OTHER, LIVE), {}, "the evidence is for the policy"),
        (evidence_for(MINE, OTHER), {}, "is live: validate --against"),
        (evidence_for(MINE, LIVE, code_hash="00"), {}, "was made with policy code"),
        (evidence_for(MINE, LIVE), {"drifting": ["r0"]}, "r0 drifts from its profile"),
        (evidence_for(MINE, LIVE), {"log": ""}, "is missing: it lies beside it"),
        (evidence_for(MINE, LIVE), {"log": "?"}, "cannot be unpacked"),
        (evidence_for(MINE, LIVE), {"log": packed(b"")}, "is not the one"),
        (evidence_for(MINE, LIVE, log_sha256=sha256(b"x").hexdigest()),
         {"log": packed(b"x")}, "cannot be replayed"),
    ],
)  # fmt: skip
def test_what_is_missing_or_of_another_is_told(made: Made, how: dict[str, Any], said: str) -> None:
    (reason,) = refused(made, **how)
    assert said in reason


def test_what_is_not_signed_is_old_or_fails_is_told_at_once() -> None:
    made = evidence_for(MINE, LIVE)
    gates = tuple(
        Gate(each.name, each.name != "retry_storm", "retries feed on themselves")
        for each in made.evidence.gates
    )
    bad = msgspec.structs.replace(made.evidence, gates=gates, signature="")
    papers = Papers(render(MINE), encode(bad).decode(), packed(made.log))
    late_s = float(bad.made_s + 8 * 86_400)
    _, reasons = check(papers, Question(MINE, LIVE, KEY, late_s))
    assert len(reasons) == 3
    for said in ("not signed", "8.0 days old", "retry_storm fails: retries feed on themselves"):
        assert any(said in reason for reason in reasons), said


def test_a_log_of_another_policy_or_with_other_decisions_is_no_proof() -> None:
    def with_log(log: bytes) -> Made:
        made = evidence_for(MINE, LIVE)
        changed = msgspec.structs.replace(made.evidence, log_sha256=sha256(log).hexdigest())
        return Made(signed(changed, KEY), log)

    assert refused(with_log(decision_log(OTHER))) == ["the decision log is another policy's"]
    log = decision_log(MINE)
    place = log.rindex(b"stable") if b"stable" in log else log.rindex(b"turbo")
    (reason,) = refused(with_log(log[:place] + b"batch!"[: 6 if b"stable" in log else 5]
                                 + log[place + (6 if b"stable" in log else 5):]))  # fmt: skip
    assert "differs from its record" in reason


def test_a_bomb_is_not_unpacked() -> None:
    bomb = b64encode(zlib.compress(bytes(40 * LOG_BYTES_MOST))).decode()
    assert len(bomb) < 1_000_000
    with pytest.raises(ValueError, match=f"more than {LOG_BYTES_MOST} bytes"):
        unpacked(bomb)
    whole = zlib.compress(b"x" * 1000)
    with pytest.raises(ValueError, match="cut off"):
        unpacked(b64encode(whole[:-3]).decode())


def test_a_key_is_made_once_and_kept_private(tmp_path: Path) -> None:
    path = tmp_path / "data" / "deploy.key"
    key = load_key(path)
    assert (len(key), load_key(path)) == (32, key)
    assert path.read_text() == f"{key.hex()}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("secret")
    with pytest.raises(FileError, match="no deploy key") as caught:
        load_key(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"[" * 40, b"\xff", b"schema: 1\nname: 2020-99-99\n", b"schema: 1\nx: 1\n"]
)
def test_a_policy_that_cannot_be_read_is_a_file_error(body: bytes) -> None:
    with pytest.raises(FileError, match="the policy"):
        read_policy(body)


def test_replicas_that_drift_are_named() -> None:
    policy = Service(parameters(drift={"sample_ms": 0, "steps_least": 1}))
    for number in (0, 1):
        policy.step(0, up(number))
    for turn in range(1, 8):
        policy.step(turn * S, StepsRead(0, 10, 1000, 1000))
        policy.step(turn * S, StepsRead(1, 10, 1300, 1000))
    assert drifting_replicas(policy) == ["r1"]
