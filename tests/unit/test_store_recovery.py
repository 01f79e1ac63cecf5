"""The policy after a crash is the policy before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.store.log import LiveLog, segments
from controller.store.recovery import recover
from policy.audit import replay
from policy.compose import build_policy
from policy.decisions import BreakerMoved
from policy.events import (
    Failed,
    Finished,
    FirstToken,
    PolicySwitched,
    Restored,
)
from policy.files import code_hash
from policy.log import _ENCODER, _frame, read_segment
from policy.parameters import canonical
from policy.service import Service
from tests.policy_support import MS, arrived, parameters, up

if TYPE_CHECKING:
    from pathlib import Path

    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters

PARAMETERS = parameters(
    breakers={
        "rules": [
            {
                "name": "errors",
                "by": ["model"],
                "kinds": ["http_5xx"],
                "consecutive_least": 3,
                "consecutive_ms": 0,
            }
        ]
    },
    retries={"tries_most": 1},
)


class Process:
    """A controller with nothing but a policy and its log."""

    def __init__(self, folder: Path, params: Parameters = PARAMETERS, **options: Any) -> None:
        self.policy = build_policy(params)
        self.now_ns = 0
        self.decisions: list[Decision] = []
        self.log = LiveLog(folder, self.policy, params, 0, on_trouble=pytest.fail, **options)

    def feed(self, event: Event, after_ns: int = MS) -> None:
        self.now_ns += after_ns
        decisions = tuple(self.policy.step(self.now_ns, event))
        self.decisions += decisions
        self.log.append(self.now_ns, event, decisions)

    def answer(self, request: int, **fields: Any) -> None:
        self.feed(arrived(request, **fields))
        assert isinstance(self.policy, Service)
        replica = self.policy.facts.open[request].replica
        self.feed(FirstToken(request, replica))
        self.feed(Finished(request, replica, 250, 0, 20))

    def fail(self, request: int) -> None:
        self.feed(arrived(request))
        assert isinstance(self.policy, Service)
        opened = self.policy.facts.open.get(request)
        if opened is not None and opened.replica >= 0:
            self.feed(Failed(request, opened.replica, "http_5xx"))


def opened_breaker(folder: Path, **options: Any) -> Process:
    process = Process(folder, **options)
    process.feed(up(0))
    process.feed(up(1, domain="elsewhere"))
    for request in range(20):
        process.answer(request, user=f"u{request}", line="shop")
    for request in range(20, 23):
        process.fail(request)
    assert any(isinstance(one, BreakerMoved) for one in process.decisions)
    process.feed(arrived(30, model="other"))
    return process


def test_the_state_is_the_same_to_the_byte(tmp_path: Path) -> None:
    process = opened_breaker(tmp_path)
    process.log.close()
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == process.policy.snapshot()
    assert recovered.policy.deadline_ns() == process.policy.deadline_ns()
    assert recovered.parameters == PARAMETERS
    assert recovered.last_ns == process.now_ns
    assert recovered.note == ""
    assert recovered.records == process.log.count
    header = read_segment(segments(tmp_path)[0][1].read_bytes()).header
    assert recovered.wall_ns_of_last == header.wall_ns + process.now_ns
    assert recovered.next_request == 31
    assert isinstance(recovered.policy, Service)
    breakers = recovered.policy.mechanisms["breakers"]
    assert breakers.open_keys(), "it is still open"  # type: ignore[attr-defined]


def test_a_new_process_goes_on_and_its_log_audits(tmp_path: Path) -> None:
    process = opened_breaker(tmp_path)
    process.log.close()
    recovered = recover(tmp_path)
    assert recovered is not None
    (lost,) = recovered.open
    assert (lost.event.request, lost.event.model, lost.arrived_ns) == (
        30, "other", process.now_ns,
    )  # fmt: skip
    start_ns = recovered.last_ns + 1
    log = LiveLog(
        tmp_path, recovered.policy, recovered.parameters, start_ns, on_trouble=pytest.fail
    )
    event = Restored(5)
    decisions = tuple(recovered.policy.step(start_ns, event))
    log.append(start_ns, event, decisions)
    log.close()
    assert ("failed", "controller_lost") in {
        (one.outcome, one.why) for one in decisions if hasattr(one, "outcome")
    }
    assert [number for number, _ in segments(tmp_path)] == [0, 1]
    assert replay(path.read_bytes() for _, path in segments(tmp_path)) is None


def test_fifo_comes_back_too(tmp_path: Path) -> None:
    process = Process(tmp_path, parameters("fifo"))
    process.feed(up(0))
    process.feed(arrived(0))
    process.feed(arrived(7))
    process.feed(Finished(0, 0, 100, 0, 1))
    process.log.close()
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == process.policy.snapshot()
    assert recovered.next_request == 8
    assert [(one.event.request, one.arrived_ns) for one in recovered.open] == [(7, 3 * MS)]


def test_the_parameters_are_those_after_the_last_switch(tmp_path: Path) -> None:
    process = Process(tmp_path)
    new = msgspec.structs.replace(PARAMETERS, name="new")
    process.feed(PolicySwitched(canonical(PARAMETERS), canonical(new)))
    process.feed(PolicySwitched(canonical(PARAMETERS), canonical(parameters())))  # refused
    process.log.close()
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.parameters == new


def test_a_torn_tail_costs_only_the_tail(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.feed(up(0))
    process.answer(0)
    process.log.flush()
    at_ns, snapshot = process.now_ns, process.policy.snapshot()
    process.answer(1)
    process.log.close()
    path = segments(tmp_path)[0][1]
    path.write_bytes(path.read_bytes()[:-5])
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == snapshot
    assert recovered.last_ns == at_ns
    assert recovered.note == ""


@pytest.mark.parametrize("left", [0, 3, 60, -1])
def test_a_segment_that_has_no_beginning_is_put_aside(tmp_path: Path, left: int) -> None:
    process = opened_breaker(tmp_path)
    process.log.close()
    data = segments(tmp_path)[0][1].read_bytes()
    torn = tmp_path / "decisions.1.log"
    torn.write_bytes(data[:left] if left >= 0 else b"\0\0\0\2no" + data)
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == process.policy.snapshot()
    assert recovered.segment == 0
    assert "segment 1 cannot be used" in recovered.note
    assert not torn.exists()
    assert (tmp_path / "decisions.1.log.torn").exists()
    again = recover(tmp_path)
    assert again is not None
    assert again.note == ""


def test_a_damaged_frame_ends_what_is_used(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.feed(up(0))
    process.log.close()
    path = segments(tmp_path)[0][1]
    path.write_bytes(path.read_bytes() + _frame(b"\x07"))
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == process.policy.snapshot()
    assert "damaged" in recovered.note


def test_without_a_log_there_is_nothing_to_recover(tmp_path: Path) -> None:
    assert recover(tmp_path) is None
    assert recover(tmp_path / "nowhere") is None


# Other policy code


def rewritten(path: Path, snapshot: bytes | None = None, **header: Any) -> None:
    """The segment as other code would have written it."""
    segment = read_segment(path.read_bytes())
    changed = msgspec.structs.replace(segment.header, **header)
    records = _ENCODER.encode(list(segment.records))
    state = segment.snapshot if snapshot is None else snapshot
    path.write_bytes(_frame(_ENCODER.encode(changed)) + _frame(state) + _frame(records))


def test_other_code_that_decides_the_same_keeps_the_state(tmp_path: Path) -> None:
    process = opened_breaker(tmp_path)
    process.log.close()
    rewritten(segments(tmp_path)[0][1], code_hash="0ther")
    assert code_hash() != "0ther"
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.policy.snapshot() == process.policy.snapshot()
    assert recovered.note == ""


@pytest.mark.parametrize("change", ["snapshot", "policy", "decisions"])
def test_a_state_that_does_not_fit_gives_a_fresh_policy_that_goes_on(
    tmp_path: Path, change: str
) -> None:
    process = opened_breaker(tmp_path)
    process.log.close()
    path = segments(tmp_path)[0][1]
    if change == "snapshot":
        rewritten(path, b"\x93\x01\x02\x03", code_hash="0ther")
    elif change == "policy":
        rewritten(path, policy='{"schema":1,"gone":2}', code_hash="0ther")
    else:
        other = parameters(retries={"budget_permille": 0, "budget_least": 0})
        rewritten(path, policy=canonical(other), code_hash="0ther")
    fallback = parameters(name="deployed")
    recovered = recover(tmp_path, fallback)
    assert recovered is not None
    assert recovered.parameters == fallback
    assert recovered.policy.snapshot() == build_policy(fallback).snapshot()
    assert "without memory" in recovered.note
    assert "0ther" in recovered.note
    assert recovered.last_ns == process.now_ns
    assert recovered.next_request == 31, "ids go on all the same"
    assert [one.event.request for one in recovered.open] == [30]


def test_ids_go_on_though_the_last_segment_saw_none(tmp_path: Path) -> None:
    process = Process(tmp_path, segment_bytes=1)
    process.feed(up(4))
    process.feed(arrived(9))
    process.log.flush()
    process.log.close()
    last = segments(tmp_path)[-1][1]
    assert not list(read_segment(last.read_bytes()).records)
    rewritten(last, b"", code_hash="0ther")
    recovered = recover(tmp_path)
    assert recovered is not None
    assert recovered.next_request == 10
    assert recovered.parameters == PARAMETERS, "without a fallback, the segment's own"
