"""The twin plays a drill as the live log tells it: same fleet, same traffic, same fault."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pytest

from controller.drills.asking import Admin, DrillError, Log
from controller.drills.measure import read_figures
from policy.announce import Sizes, announce
from policy.compose import build_policy
from policy.cost import StepCost
from policy.decisions import Rotated
from policy.drills import Broken, DrillReader
from policy.events import Arrived, ReplicaDown, ReplicaUp, Restored, Standby
from policy.files import load_models, load_policy, load_profile
from policy.log import FullLog, Header, Record, read_segment
from policy.parameters import canonical
from traces import SCHEMA, TraceWriter, open_trace
from twin.arrivals import arrivals
from twin.drills import PredictionError, _spec, predict
from twin.faults import BadAnswers, EngineKilled
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from pathlib import Path

    from policy.decisions import Decision
    from policy.drills import DrillFigures, DrillKind
    from policy.events import Event

NS = 1_000_000_000
PROFILE = "h100-sxm/qwen3-8b"
MODEL = "qwen3-8b"
PER_S, FOR_S = 20, 30
SHIFT_S = 5.0
"""The live log began that long before its trace."""
AT_S, BACK_S = 15.0, 22.0
"""By the live log's clock."""


def up(replica: int) -> ReplicaUp:
    profile = load_profile(PROFILE)
    sizes = Sizes(20_000, 16, 256, 8192, 32_768)
    return announce(
        replica, f"{MODEL}-{replica}", profile, load_models()[profile.model],
        StepCost.from_profile(profile), sizes, models=(MODEL,), version="v1",
        domain=f"host0/card{replica}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evenly spaced requests, two of a hundred with a long prompt."""
    rows = PER_S * FOR_S
    path = tmp_path_factory.mktemp("drill") / "trace.parquet"
    given = {
        "trace_id": ["t"] * rows,
        "request_id": [1000 + row for row in range(rows)],
        "arrival_s": [row / PER_S for row in range(rows)],
        "arrival_res_s": [0.0] * rows,
        "prompt_tokens": [8000 if row % 50 == 0 else 300 for row in range(rows)],
        "output_tokens": [40] * rows,
        "model": [MODEL] * rows,
        "endpoint": ["chat"] * rows,
        "sla_class": ["P1"] * rows,
        "weight": [1.0] * rows,
        "provenance": ["generated"] * rows,
    }
    columns = [
        pa.array(given.get(field.name, [None] * rows)).cast(field.type)
        if not pa.types.is_dictionary(field.type)
        else pa.array(given.get(field.name, [None] * rows), pa.string()).dictionary_encode()
        for field in SCHEMA
    ]
    with TraceWriter(path) as writer:
        writer.write(pa.RecordBatch.from_arrays(columns, names=SCHEMA.names))
    return path


def records(start_s: float = 0.1) -> list[Record]:
    """The live log before the fault: a controller that came back, two replicas, a standby."""
    events = [
        (0.0, up(0)), (1.0, ReplicaDown(0, "controller_lost")), (1.0, Restored()),
        (3.0, up(1)), (3.5, up(0)),
        (4.0, Standby(2, f"{MODEL}-standby-0", (MODEL,), round(start_s * NS), "v1", "host0/card2")),
        (SHIFT_S, Arrived(1000, MODEL, "chat", 1200)),
        (AT_S + 1, ReplicaDown(0, "killed by signal 9")),
    ]  # fmt: skip
    return [Record(round(at_s * NS), event, ()) for at_s, event in events]


def played(
    kind: DrillKind, trace: Path, lasts: bool = False, log: list[Record] | None = None
) -> DrillFigures:
    broken = Broken(
        kind, (0,), round(AT_S * NS), round((SHIFT_S + FOR_S) * NS),
        round(BACK_S * NS) if lasts else -1, 6000 if kind == "oom" else 0,
    )  # fmt: skip
    return predict(broken, log or records(), trace, load_policy("stable"), {MODEL: PROFILE})


def test_a_killed_engine_is_out_at_once_and_the_standby_serves_when_it_said(trace: Path) -> None:
    figures = played("engine-kill", trace)
    assert (figures.serving_before, figures.serving_least) == (2, 1)
    assert figures.isolated_s == pytest.approx(0.0002)
    assert figures.recovered_s == pytest.approx(0.1, abs=0.01)
    assert figures.offered == pytest.approx(PER_S * 20, abs=PER_S)  # what came from the fault on
    assert 0 < figures.failed <= 10  # streams that it was answering
    assert figures.avoidable == figures.lost == 0
    assert played("engine-kill", trace) == figures


def test_a_later_standby_is_later(trace: Path) -> None:
    figures = played("engine-kill", trace, log=records(start_s=2.0))
    assert figures.recovered_s == pytest.approx(2.0, abs=0.01)


def test_a_hung_engine_is_silent_for_as_long_as_the_policy_waits(trace: Path) -> None:
    figures = played("engine-hang", trace)
    assert figures.isolated_s is not None
    assert 1.5 <= figures.isolated_s <= 2.8
    assert any("silent" in raised.cause for raised in figures.alerts)


def test_a_black_hole_is_as_silent_and_is_over_when_it_is_taken_back(trace: Path) -> None:
    figures = played("network", trace, lasts=True)
    assert figures.isolated_s is not None
    assert 1.5 <= figures.isolated_s <= 2.8
    assert figures.recovered_s is not None
    assert figures.lost == 0


def test_a_slow_link_takes_nobody_out_and_other_bad_ones_are_not_the_twin_s(trace: Path) -> None:
    broken = Broken(
        "network", (0,), round(AT_S * NS), round((SHIFT_S + FOR_S) * NS), round(BACK_S * NS),
        link="delay", delay_ms=50.0,
    )  # fmt: skip
    given = (records(), trace, load_policy("stable"), {MODEL: PROFILE})
    slow = predict(broken, *given)
    assert slow.isolated_s is None
    assert (slow.failed, slow.lost, slow.recovered_s) == (0, 0, 0.0)
    for link in ("loss", "reset"):
        with pytest.raises(PredictionError, match=f"no link with {link}"):
            predict(msgspec.structs.replace(broken, link=link), *given)


def test_hollow_answers_eject_a_replica_and_hurt_nobody(trace: Path) -> None:
    figures = played("bad-answers", trace, lasts=True)
    assert figures.isolated_s is not None
    assert figures.isolated_s < 2.0
    assert figures.recovered_s is not None
    assert figures.recovered_s >= BACK_S - AT_S  # a probe that is answered well
    assert (figures.failed, figures.lost) == (0, 0)
    assert figures.alerts[0].cause == "ejected: failures"


def test_a_long_prompt_ends_the_engine_that_it_is_sent_to(trace: Path) -> None:
    figures = played("oom", trace)
    assert figures.isolated_s is not None
    assert figures.isolated_s <= 10.0  # a few long ones come meanwhile
    assert figures.recovered_s is not None


@pytest.mark.parametrize(("kind", "word"), [("ecc", "ecc_uncorrectable"), ("gpu-loss", "xid")])
def test_a_broken_card_is_isolated_when_it_is_told(kind: DrillKind, word: str, trace: Path) -> None:
    figures = played(kind, trace)
    assert figures.isolated_s == pytest.approx(0.02)
    assert word in figures.alerts[0].cause
    assert figures.recovered_s == pytest.approx(0.12, abs=0.01)


def test_what_is_not_known_is_said(trace: Path) -> None:
    broken = Broken("engine-kill", (0,), round(AT_S * NS), round(30 * NS))
    policy = load_policy("stable")
    with pytest.raises(PredictionError, match="no profile is known for qwen3-8b"):
        predict(broken, records(), trace, policy, {"another": PROFILE})
    with pytest.raises(PredictionError, match="no replica was up"):
        predict(broken, records()[6:], trace, policy, {MODEL: PROFILE})
    with pytest.raises(PredictionError, match="none of the trace's requests"):
        predict(broken, records()[:6], trace, policy, {MODEL: PROFILE})
    elsewhere = msgspec.structs.replace(broken, replicas=(7,))
    with pytest.raises(PredictionError, match="none of the replicas that were hit"):
        predict(elsewhere, records(), trace, policy, {MODEL: PROFILE})


def test_a_trace_that_began_before_the_log_is_laid_beside_it_by_a_later_request(
    trace: Path,
) -> None:
    log = records()
    at_row = 40
    late = Arrived(1000 + at_row, MODEL, "chat", 1200)
    log[6] = Record(round((SHIFT_S + at_row / PER_S) * NS), late, ())
    assert played("engine-kill", trace, log=log) == played("engine-kill", trace)


# The end of a long log


class Held(Admin):
    """A controller whose decision log is these segments."""

    def __init__(self, segments: dict[str, bytes]) -> None:
        super().__init__("http://127.0.0.1:1", "t")
        self.held = segments
        self.fetched: list[str] = []

    def segments(self) -> list[tuple[str, int]]:
        return [(name, len(data)) for name, data in self.held.items()]

    def segment(self, name: str) -> bytes:
        self.fetched.append(name)
        return self.held[name]


@pytest.fixture(scope="module")
def segments(trace: Path) -> dict[str, bytes]:
    """Three replicas, of which one is out for bad answers and another is killed at 15 s, when a
    standby takes its place; in many small segments."""
    kept: dict[str, io.BytesIO] = {}

    class Kept(io.BytesIO):
        def close(self) -> None:
            """It is read afterwards."""

    class Often(FullLog):
        """It is written again and again, as a controller's is."""

        def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
            super().append(now_ns, event, decisions)
            if self.count % 50 == 0:
                self.flush()

    def begin(index: int) -> io.BytesIO:
        return kept.setdefault(f"decisions.{index}.log", Kept())

    parameters = load_policy("stable")
    policy = build_policy(parameters)
    header = Header(1, "code", canonical(parameters), 0)
    log = Often(header, policy.snapshot, begin, segment_bytes=6_000)
    specs = [_spec(number, up(number), {MODEL: PROFILE}, 2 * NS) for number in range(4)]
    world = World(
        specs[:3], policy, log, lambda chunk: None, WorldSettings(sample_every_ns=0),
        standbys=specs[3:], faults=[BadAnswers(at_s=2.0, on=1), EngineKilled(at_s=AT_S, on=0)],
    )  # fmt: skip
    world.run(arrivals(open_trace(trace)))
    log.close()
    return {name: data.getvalue() for name, data in kept.items()}


def until(segments: dict[str, bytes], at_s: float) -> dict[str, bytes]:
    """Those that had begun by then."""
    return {
        name: data for name, data in segments.items()
        if read_segment(data).header.start_ns <= at_s * NS
    }  # fmt: skip


def test_the_end_of_a_log_tells_as_much_of_a_drill_as_all_of_it(
    segments: dict[str, bytes],
) -> None:
    broken = Broken("engine-kill", (0,), round(AT_S * NS), round(FOR_S * NS))
    whole = DrillReader(load_policy("stable"), broken)
    for data in segments.values():
        for record in read_segment(data).records:
            whole.step(record.now_ns, record.event, record.decisions)
    expected = whole.end()
    assert (expected.serving_before, expected.serving_least) == (2, 1)
    assert expected.recovered_s is not None
    assert expected.offered > 200
    before = until(segments, AT_S - 1.0)
    assert 3 < len(before) < len(segments) - 3
    admin = Held(before)
    log = Log(admin)
    assert admin.fetched == [list(before)[-1]]
    admin.held = segments
    log.read()
    assert read_figures(log, broken) == expected
    assert sorted(admin.fetched) == sorted(set(segments) - set(list(before)[:-1]))


def test_what_stood_before_is_told_by_the_snapshot(segments: dict[str, bytes]) -> None:
    first = Log(Held(dict(list(segments.items())[:1])))
    assert next(record.now_ns for record in first.records()) == 0  # nothing was before
    log = Log(Held(until(segments, AT_S - 1.0)))
    told = list(log.records())
    ups = [each for each in told if isinstance(each.event, ReplicaUp)]
    assert [each.event.replica for each in ups] == [0, 1, 2]
    assert {each.now_ns for each in ups} == {2 * NS}  # its start, by the standby of its pool
    (standby,) = [each.event for each in told if isinstance(each.event, Standby)]
    assert (standby.replica, standby.models, standby.start_ns) == (3, (MODEL,), 2 * NS)
    assert (standby.version, standby.domain) == ("v1", "host0/card3")
    outs = [each for record in told for each in record.decisions if isinstance(each, Rotated)]
    assert (outs[0].replica, outs[0].state) == (1, "ejected")


def test_a_log_is_read_on_where_it_grows(segments: dict[str, bytes]) -> None:
    names = list(segments)[:4]
    whole = segments[names[1]]
    admin = Held({names[0]: segments[names[0]], names[1]: whole[: len(whole) - 20]})
    log = Log(admin)
    admin.held = {name: segments[name] for name in names[:3]} | {names[3]: segments[names[3]][:9]}
    log.read()
    log.read()
    # A segment that has only just begun is looked at again; what is there is not.
    assert admin.fetched == [names[1], names[1], names[2], names[3], names[3]]
    admin.held = {name: segments[name] for name in names}
    log.read()
    expected = [
        record for name in names[1:] for record in read_segment(segments[name]).records
    ]  # fmt: skip
    assert list(log.records())[-len(expected) :] == expected
    assert log.clock_ns(5) == 5
    admin.held = {name: segments[name] for name in names[2:]}
    with pytest.raises(DrillError, match=rf"{names[1]}.*is gone: do a shorter one"):
        log.read()


def test_a_log_that_cannot_be_read_is_said() -> None:
    for held, why in (({}, "it has no segment"), ({"decisions.0.log": b"?"}, "complete")):
        with pytest.raises(DrillError, match=why):
            Log(Held(held))
