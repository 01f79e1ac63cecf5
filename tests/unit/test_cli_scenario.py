"""The commands on scenarios and on decision logs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import CliRunner, Result

from policy.compose import build_policy
from policy.decisions import Dispatch
from policy.events import Arrived, Cancelled, Forecasted
from policy.log import BATCH_RECORDS, FullLog, Header, read_segment
from policy.parameters import canonical
from tests.policy_support import S, arrived, parameters, up
from tests.unit.test_scenario import SMALL
from twin.forecasts import Dated, write_forecasts
from twin.story import forecast_words, tell
from twinkeel import main

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from policy.log import Record

CLAIMS = [
    {"name": "all answered", "goal": "== 1", "value": {"of": "a/all.answered_share"}},
    {"name": "of b", "goal": "== 1", "value": {"of": "b/all.answered_share"}},
]


class Pieces:
    """A segment's bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.write = pieces.append

    def close(self) -> None:
        pass


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenario") / "small.yaml"
    runs = {"a": {"policy": "fifo"}, "b": {}}
    path.write_text(yaml.safe_dump({**SMALL, "seeds": [1], "runs": runs, "expect": CLAIMS}))
    return path


@pytest.fixture(scope="module")
def played(scenario: Path) -> Path:
    out = scenario.parent / "out"
    result = run("scenario", "run", scenario, "--log", "--out", out)
    assert result.exit_code == 0, result.output
    return out


def test_scenarios_are_listed_and_shown() -> None:
    listed = run("scenario", "list")
    assert "peak" in listed.output
    assert "retries" in listed.output
    shown = run("scenario", "show", "peak")
    assert yaml.safe_load(shown.output)["name"] == "peak"


def test_a_run_prints_tables_and_writes_what_came_of_it(scenario: Path, tmp_path: Path) -> None:
    result = run("scenario", "run", scenario, "--out", tmp_path, "--run", "a", "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "all answered" in result.output
    assert "not run" in result.output
    plain = json.loads((tmp_path / "result.json").read_text())
    assert (plain["seeds"], plain["holds"], plain["skipped"]) == ([3], True, ["of b"])
    (one,) = plain["runs"]["a"]["by_seed"]
    assert one["figures"]["all"]["offered"] > 5


def test_a_claim_that_does_not_hold_is_an_exit_code(scenario: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load(scenario.read_text())
    raw["expect"][0]["goal"] = "< 1"
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(raw))
    result = run("scenario", "run", path, "--out", tmp_path, "--run", "a", "--quiet")
    assert result.exit_code == 1
    assert "claims" not in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scenario", "run", "peek"), "no such scenario (hint: did you mean peak"),
        (("scenario", "show", "peek"), "no such scenario"),
        (("scenario", "run", "none.yaml"), "none.yaml: cannot be read"),
        (("audit", "nowhere"), "no such file or folder"),
        (("audit", "."), "no decisions.N.log"),
        (("explain", "pyproject.toml", 3), "pyproject.toml: "),
    ],
)
def test_bad_input_is_one_clear_line(words: tuple[object, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


# Logs


def test_a_log_is_what_the_policy_does(played: Path) -> None:
    result = run("audit", played / "a" / "seed-1", played / "b" / "seed-1" / "decisions.0.log")
    assert result.exit_code == 0, result.output
    assert "2 segments: the same decisions" in result.output


def test_the_first_difference_is_shown(played: Path, tmp_path: Path) -> None:
    source = played / "a" / "seed-1" / "decisions.0.log"
    header, snapshot, records = read_segment(source.read_bytes())
    log = FullLog(header, lambda: snapshot, lambda index: (tmp_path / "decisions.0.log").open("wb"))
    copied = _with_another_replica(records)
    for record in copied:
        log.append(record.now_ns, record.event, record.decisions)
    log.close()
    result = run("audit", tmp_path)
    assert result.exit_code == 1
    assert "segment 0, record" in result.output
    assert "replica=9" in result.output


def _with_another_replica(records: Iterable[Record]) -> list[Record]:
    """The log as a policy would have written it that sends the third request elsewhere."""
    altered = []
    for record in records:
        decisions = tuple(
            Dispatch(decision.request, 9, decision.tier)
            if isinstance(decision, Dispatch) and decision.request == 2
            else decision
            for decision in record.decisions
        )
        altered.append(type(record)(record.now_ns, record.event, decisions))
    return altered


def test_a_request_has_its_story(played: Path) -> None:
    result = run("explain", played / "b" / "seed-1", 4)
    assert result.exit_code == 0, result.output
    for words in ("request 4: completions of 800 bytes", "class P0", "sent to a replica",
                  "first token", "outcome            answered", "event     arrived",
                  "decision  dispatch: replica=0 (h100-sxm/qwen3-8b#0)", "event     finished",
                  "decision  settled"):  # fmt: skip
        assert words in result.output
    assert "      +0.000 ms  event     arrived" in result.output


def test_a_story_goes_on_from_segment_to_segment(played: Path, tmp_path: Path) -> None:
    """However a log is cut, the story is the same."""
    source = played / "b" / "seed-1" / "decisions.0.log"
    data = source.read_bytes()
    header, snapshot, records = read_segment(data)
    from policy.compose import restore
    from policy.parameters import from_canonical

    policy = restore(from_canonical(header.policy), snapshot)
    log = FullLog(
        header, policy.snapshot, lambda index: (tmp_path / f"decisions.{index}.log").open("wb"),
        segment_bytes=1,
    )  # fmt: skip
    for count, record in enumerate(records, 1):
        policy.step(record.now_ns, record.event)
        log.append(record.now_ns, record.event, record.decisions)
        if count % 7 == 0:
            log.flush()
    log.close()
    pieces = [path.read_bytes() for path in sorted(tmp_path.iterdir(), key=_number)]
    assert 1 < len(pieces) < BATCH_RECORDS
    whole, cut = tell([data], 4), tell(pieces, 4)
    assert cut.lines == whole.lines
    assert cut.settled == whole.settled


def _number(path: Path) -> int:
    return int(path.name.split(".")[1])


def test_forecasts_stand_in_the_log_in_words(tmp_path: Path) -> None:
    """What the policy was told from a file, and from the scenario: byte for byte in replay."""
    recorded = [
        Dated(0, Forecasted((0, 300 * S), (4000, 4500), (5000, 6250), (900, 950), (1000, 1100))),
        Dated(S, Forecasted((0, 300 * S), (4000, 9000), (5000, 9990), (900, 1950), (1000, 2100))),
    ]
    write_forecasts(tmp_path / "told.jsonl", recorded)
    raw = {**SMALL, "seeds": [1], "events": [{"kind": "forecasts", "file": "told.jsonl"}]}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**raw, "runs": {"a": {}}}))
    result = run("scenario", "run", path, "--log", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    log = tmp_path / "out" / "a" / "seed-1"
    (data,) = [each.read_bytes() for each in log.glob("decisions.*.log")]
    found = [each for each in read_segment(data).records if isinstance(each.event, Forecasted)]
    assert [Dated(each.now_ns, each.event) for each in found] == recorded
    words = "forecast: in 0, 300 s: requests/s 4, {} (p90 5, {}), tokens/s 900, {} (p90 1000, {})"
    first, last = words.format("4.5", "6.25", 950, 1100), words.format("9", "9.99", 1950, 2100)
    audited = run("audit", log)
    assert f"2 forecasts were told, the last after 1.000 s: {last}" in audited.output
    records = read_segment(data).records
    came_ns = [each.now_ns for each in records if isinstance(each.event, Arrived)]
    early = next(number for number, at_ns in enumerate(came_ns) if 0 < at_ns < S)
    told = run("explain", log, early).output
    assert f"ms  before    {first}" in told
    late = next(number for number, at_ns in enumerate(came_ns) if at_ns > S)
    told = run("explain", log, late).output
    assert f"ms  before    {last}" in told
    assert first not in told


def test_a_forecast_meanwhile_is_part_of_a_story() -> None:
    policy = build_policy(parameters())
    pieces: list[bytes] = []
    header = Header(1, "", canonical(parameters()), 0)
    log = FullLog(header, policy.snapshot, lambda _: Pieces(pieces))
    forecast = Forecasted((0,), (4000,), (5000,), (900,), (1000,))
    for now_ns, event in enumerate((up(), arrived(1), forecast, Cancelled(1))):
        log.append(now_ns, event, tuple(policy.step(now_ns, event)))
    log.close()
    lines = tell([b"".join(pieces)], 1).lines
    assert (2, "meanwhile forecast: in 0 s: requests/s 4 (p90 5), tokens/s 900 (p90 1000)") in lines
    nothing = Forecasted((), (), (), (), ())
    assert forecast_words(nothing) == "forecast: nothing"


def test_a_request_that_is_not_there_is_said_so(played: Path) -> None:
    result = run("explain", played / "b" / "seed-1", 99_999)
    assert result.exit_code == 2
    assert "request 99999 is in none of the segments" in result.output
