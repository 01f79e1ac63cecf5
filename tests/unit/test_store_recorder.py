"""The trace of what passed: a row per request, never a text, and replay takes it as it is."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any, cast

import pytest

from controller.call import Call, EngineTimes
from controller.gateway.asking import PREFIX_BLOCK_BYTES, read
from controller.store.recorder import Ended, Recorder, merge
from policy.decisions import Settled
from policy.facts import Open
from policy.files import FileError, load_policy
from tests.policy_support import MS, S, arrived, up
from traces import open_trace
from twin.fleet import fleet_of
from twin.replay import replay

if TYPE_CHECKING:
    from pathlib import Path

    from policy.decisions import Outcome

SECRET = "the emperor's new prompt"
START_NS = 5_000 * S


def call(number: int, at_ns: int, **changes: Any) -> Call:
    """An answered request, ``at_ns`` after the recording began; ``changes`` to the call."""
    headers = {
        "x-twinkeel-sla": "P0", "x-twinkeel-line": "shop", "x-twinkeel-user": "ann",
        "x-twinkeel-session": "s1", "x-twinkeel-chain": "c1", "x-twinkeel-step": "plan",
        "x-twinkeel-deadline-ms": "1500",
    }  # fmt: skip
    body = {
        "model": "m", "max_tokens": 50,
        "messages": [{"role": "user", "content": SECRET * 200}],
    }  # fmt: skip
    asked = read("chat", headers, json.dumps(body).encode(), b"k" * 16, ("acme", "", ""))
    asked = asked._replace(**changes.pop("asked", {}))
    made = Call(asked, f"tk-{number}", START_NS + at_ns - MS, cast("Any", None))
    made.request = number
    made.arrived_ns = START_NS + at_ns
    made.dispatched_ns = made.arrived_ns + 3 * MS
    made.first_ns = made.arrived_ns + 103 * MS
    made.last_ns = made.settled_ns = made.arrived_ns + 503 * MS
    made.replica, made.tier, made.tries = 0, "turbo", 2
    made.prompt_tokens, made.output_tokens = 1_000, 41
    made.gateway_ns, made.network_ns = MS, 2 * MS
    made.engine = EngineTimes(0, 98 * MS, 400 * MS)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def unanswered(number: int, at_ns: int, **changes: Any) -> Call:
    nothing = {
        "dispatched_ns": -1, "first_ns": -1, "last_ns": -1, "replica": -1, "tries": 0,
        "engine": None, "prompt_tokens": -1, "output_tokens": 0, "network_ns": -1, "tier": "",
    }  # fmt: skip
    return call(number, at_ns, **(nothing | changes))


def settled(number: int, outcome: Outcome = "answered", **fields: Any) -> Settled:
    return Settled(number, outcome, **fields)


def recorder(folder: Path, **options: Any) -> Recorder:
    made = Recorder(folder, START_NS, on_trouble=pytest.fail, **options)
    made.fed(START_NS, up(0, name="gpu-a", version="v7"))
    return made


def kill(made: Recorder) -> None:
    """What is not with the operating system is lost."""
    made._executor.shutdown()
    made._merger.shutdown()


def merged(made: Recorder) -> Recorder:
    """When it has merged what it found."""
    made._merger.submit(lambda: None).result()
    return made


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for batch in open_trace(path).batches() for row in batch.to_pylist()]


def test_a_row_says_all_that_was_observed(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.settled(
        call(3, 0), settled(3, tier="turbo", confidence_permille=700, verification="match")
    )
    made.close()
    (row,) = rows(tmp_path / "trace" / "trace.parquet")
    seen = {name: value for name, value in row.items() if value is not None}
    ids = {name: seen.pop(name) for name in ("user_id", "session_id", "chain_id")}
    assert all(0 <= value < 2**63 for value in ids.values())
    assert len(set(ids.values())) == 3
    assert seen.pop("trace_id").startswith("live-")
    assert len(seen.pop("prefix_ids")) == len(SECRET) * 200 // PREFIX_BLOCK_BYTES
    floats = {name: seen.pop(name) for name in list(seen) if isinstance(seen[name], float)}
    assert seen == {
        "request_id": 3, "prompt_tokens": 1_000, "output_tokens": 41,
        "prompt_bytes": len(SECRET) * 200, "max_output_tokens": 50, "model": "m",
        "model_version": "v7", "endpoint": "chat", "tenant_id": "acme", "step": "plan",
        "prefix_block_tokens": PREFIX_BLOCK_BYTES // 4, "sla_class": "P0",
        "business_line": "shop", "outcome": "answered", "http_code": 200, "retries": 1,
        "tier": "turbo", "replica": "gpu-a", "verification_status": "match", "provenance": "real",
    }  # fmt: skip
    assert floats == pytest.approx({
        "arrival_s": 0.0, "arrival_res_s": 0.0, "deadline_s": 1.5, "confidence": 0.7,
        "gateway_s": 0.001, "queue_s": 0.003, "schedule_s": 0.0, "prefill_s": 0.098,
        "decode_s": 0.4, "network_s": 0.002, "ttft_s": 0.103, "e2e_s": 0.503, "tpot_s": 0.01,
        "weight": 1.0,
    })  # fmt: skip


def test_no_text_is_in_the_file(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.settled(call(0, 0), settled(0))
    made.close()
    for path in (tmp_path / "trace").iterdir():
        (row,) = rows(path)
        assert SECRET not in str(row)
        assert "ann" not in {str(value) for value in row.values()}


def test_every_outcome_has_a_row_and_replay_takes_them(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    embedding = {"endpoint": "embeddings", "prefix": (), "prefix_block_bytes": 0, "chain": ""}
    made.settled(call(0, 0), settled(0))
    made.settled(unanswered(1, 10 * MS), settled(1, "shed", why="deadline", http_code=429))
    made.settled(
        call(2, 20 * MS, output_tokens=7, prompt_tokens=-1),
        settled(2, "failed", why="stream_cut", http_code=502),
    )
    made.settled(
        call(3, 30 * MS, output_tokens=7, prompt_tokens=-1),
        settled(3, "cancelled", why="client", http_code=499),
    )
    made.settled(unanswered(4, 40 * MS), settled(4, "degraded", why="template"))
    made.settled(call(5, 50 * MS, asked=embedding, output_tokens=0, first_ns=-1), settled(5))
    made.settled(
        call(6, 60 * MS, served_status=404, prompt_tokens=-1, output_tokens=0, first_ns=-1),
        settled(6, "failed", why="rejected", http_code=400),
    )
    made.settled(
        unanswered(7, 70 * MS, asked={"model": "new", "max_tokens": 10**15}),
        settled(7, "shed", why="no_replica", http_code=503),
    )
    made.close()
    path = tmp_path / "trace" / "trace.parquet"
    found = rows(path)
    assert [row["output_tokens"] for row in found] == [41, 41, 41, 7, 41, 0, 41, 256]
    assert [row["provenance"] for row in found] == ["real"] + ["derived"] * 4 + ["real"] + [
        "derived"
    ] * 2
    size = len(SECRET) * 200
    assert [row["prompt_tokens"] for row in found] == [1_000] * 7 + [size // 4]
    assert [row["error_kind"] for row in found if row["error_kind"]] == ["stream_cut", "rejected"]
    assert [row["http_code"] for row in found] == [200, 429, 502, 499, 200, 200, 404, 503]
    assert found[4]["degraded_how"] == "template"
    assert found[1]["e2e_s"] is None
    assert found[1]["replica"] is None
    assert found[1]["prefix_ids"] == found[0]["prefix_ids"] != []
    assert found[5]["prefix_ids"] is None
    played = replay(open_trace(path), fleet_of([("h100-sxm/qwen3-8b", 1)]), load_policy("stable"))
    assert played.summary.all.offered == 8


def test_rows_are_in_order_of_arrival_and_ids_are_kept(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_rows=4)
    order = [5, 3, 4, 1, 0, 7, 2, 6, 9, 8]
    for number in order:
        made.settled(call(number, number * S), settled(number))
    parts = tmp_path / "trace"
    made.close()
    found = rows(parts / "trace.parquet")
    assert [row["request_id"] for row in found] == list(range(10))
    assert [row["arrival_s"] for row in found] == pytest.approx(list(range(10)))
    assert not list(parts.glob("part-*"))
    assert len(list(parts.glob("trace-*"))) == 1


def test_a_part_is_a_trace_that_replays(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_s=1.0)
    for number in range(30):
        made.settled(
            call(29 - number, (29 - number) * 100 * MS, settled_ns=START_NS + number * 100 * MS),
            settled(number),
        )
    made._executor.submit(lambda: None).result()
    parts = sorted((tmp_path / "trace").glob("part-*"))
    assert len(parts) == 2
    for part in parts:
        replay(open_trace(part), fleet_of([("h100-sxm/qwen3-8b", 1)]), load_policy("fifo"))
    whole = merge(parts, tmp_path / "whole.parquet")
    assert open_trace(whole).rows == sum(open_trace(part).rows for part in parts)
    made.close()


def test_what_a_crash_left_becomes_a_trace_of_its_own(tmp_path: Path) -> None:
    crashed = recorder(tmp_path, part_rows=2)
    for number in range(5):
        crashed.settled(call(number, number * S), settled(number))
    crashed.flush(START_NS + 5 * S)  # two parts, and a row in the journal
    kill(crashed)
    (journal,) = (tmp_path / "trace").glob("part-*.rows")
    journal.write_bytes(journal.read_bytes() + b'[1,2,"to')
    (tmp_path / "trace" / ".part-x.tmp").touch()
    (tmp_path / "trace" / ".twinkeel-x").mkdir()

    later = merged(recorder(tmp_path))
    later.settled(call(9, 0), settled(9))
    later.close()
    folder = tmp_path / "trace"
    traces = sorted(folder.glob("trace-*"))
    assert [[row["request_id"] for row in rows(path)] for path in traces] == [[0, 1, 2, 3, 4], [9]]
    assert rows(folder / "trace.parquet") == rows(traces[1]), "the newest"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*(path.name for path in traces), "trace.parquet"]
    )


def test_a_journal_whose_part_is_there_adds_nothing(tmp_path: Path) -> None:
    crashed = recorder(tmp_path, part_rows=1)
    crashed.settled(call(0, 0), settled(0))
    kill(crashed)
    (part,) = (tmp_path / "trace").glob("part-*")
    part.with_suffix(".rows").write_bytes(b"killed before it was removed\n")
    merged(recorder(tmp_path)).close()
    assert [row["request_id"] for row in rows(tmp_path / "trace" / "trace.parquet")] == [0]
    assert not list((tmp_path / "trace").glob("part-*"))


def test_the_trace_is_there_while_it_records(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_s=1.0)
    path = tmp_path / "trace" / "trace.parquet"
    for number in range(3):
        made.settled(call(number, number * S), settled(number))
        made._executor.submit(lambda: None).result()
        made.flush(START_NS + number * S)
        merged(made)
        if number:
            assert 1 <= len(rows(path)) <= number + 1
        made._files._merge_after_s = 0.0
    assert [row["request_id"] for row in rows(path)][:2] == [0, 1]
    made.close()
    assert [row["request_id"] for row in rows(path)] == [0, 1, 2]


def test_merging_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_rows=1)
    made.settled(call(0, 0), settled(0))
    made._executor.submit(made._files.refresh).result()
    first = rows(tmp_path / "trace" / "trace.parquet")
    made.settled(call(1, S), settled(1))
    made._executor.submit(made._files.refresh).result()
    assert rows(tmp_path / "trace" / "trace.parquet") == first, "not again at once"
    made.close()


def test_what_is_being_merged_at_the_end_is_left_for_the_next(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_rows=1)
    made.settled(call(0, 0), settled(0))
    made._executor.submit(lambda: None).result()
    parts = list((tmp_path / "trace").glob("part-*"))
    with pytest.raises(Ended):
        merge(parts, tmp_path / "whole.parquet", lambda: True)
    assert not (tmp_path / "whole.parquet").exists()
    made.close()


def test_names_are_hashed_alike_before_and_after_a_crash(tmp_path: Path) -> None:
    asked = {"user": "acme/ann", "session": "acme/s1", "chain": "c1", "tenant": "acme"}
    event = arrived(4, user="acme/ann", session="acme/s1", chain="c1", step="plan")
    made = Recorder(tmp_path, START_NS, [Open(event, START_NS - S)], on_trouble=pytest.fail)
    made.lost(Settled(4, "failed", "stable", "controller_lost", 503))
    made.settled(call(5, 0, asked=asked), settled(5))
    made.settled(call(6, S, asked=asked | {"user": "acme/bob"}), settled(6))
    made.close()
    lost, same, other = rows(tmp_path / "trace" / "trace.parquet")
    for name in ("user_id", "session_id", "chain_id"):
        assert lost[name] == same[name], name
    assert same["session_id"] == other["session_id"]
    assert same["chain_id"] != other["chain_id"], "a chain belongs to its user"


def test_what_was_open_at_the_crash_has_its_row(tmp_path: Path) -> None:
    event = arrived(4, user="acme/ann", model="m", sla="P1", prefix=(1, 2), prefix_block_bytes=512)
    made = Recorder(
        tmp_path, START_NS, [Open(event, START_NS - 2 * S, tries=1)], on_trouble=pytest.fail
    )
    made.lost(Settled(4, "failed", "stable", "controller_lost", 503))
    made.lost(Settled(5, "failed", "stable", "controller_lost", 503))  # nothing is known of it
    made.settled(call(6, 0), settled(6))
    made.close()
    lost, answered = rows(tmp_path / "trace" / "trace.parquet")
    assert (lost["request_id"], lost["arrival_s"], answered["arrival_s"]) == (4, 0.0, 2.0)
    assert (lost["outcome"], lost["error_kind"]) == ("failed", "controller_lost")
    assert (lost["prefix_ids"], lost["prefix_block_tokens"]) == ([1, 2], 128)
    assert lost["provenance"] == "derived"
    assert lost["user_id"] == answered["user_id"]


def test_hashes_hold_over_restarts_and_differ_between_folders(tmp_path: Path) -> None:
    users: list[int] = []
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        made = recorder(tmp_path / folder)
        made.settled(call(0, 0), settled(0))
        made.close()
        users.append(rows(tmp_path / folder / "trace" / "trace.parquet")[0]["user_id"])
    assert users[0] == users[1] != users[2]
    key = tmp_path / "a" / "trace.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.write_bytes(b"short")
    with pytest.raises(FileError, match=r"trace\.key: 5 bytes are no key"):
        recorder(tmp_path / "a")


def test_nothing_passed_nothing_is_written(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.flush(START_NS + 100 * S)
    made.close()
    assert list((tmp_path / "trace").iterdir()) == []


def test_the_last_rows_before_a_silence_are_written(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_s=60.0)
    made.settled(call(0, 0), settled(0))
    made.flush(START_NS + 59 * S)
    made._executor.submit(lambda: None).result()
    assert [path.suffix for path in (tmp_path / "trace").iterdir()] == [".rows"]
    made.flush(START_NS + 60 * S)
    made._executor.submit(lambda: None).result()
    assert len(list((tmp_path / "trace").glob("part-*"))) == 1
    made.close()


def test_a_disk_that_fails_is_told_once_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    told: list[str] = []
    made = Recorder(tmp_path, START_NS, on_trouble=told.append, part_rows=2)
    folder = tmp_path / "trace"
    folder.rmdir()
    folder.touch()  # no folder: nothing can be written
    for number in range(6):
        made.settled(call(number, number), settled(number))
    made._executor.submit(lambda: None).result()
    made.flush(START_NS)
    assert len(told) == 1
    assert made.dropped_rows == 6
    folder.unlink()
    folder.mkdir()
    for number in range(6, 8):
        made.settled(call(number, number), settled(number))
    made._executor.submit(lambda: None).result()
    made.flush(START_NS)
    assert made.trouble == ""
    made.close()
    assert [row["request_id"] for row in rows(folder / "trace.parquet")] == [6, 7]


def test_the_oldest_files_go(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_rows=1, keep_bytes=60_000, merge_rows_most=1)
    for number in range(12):
        made.settled(call(number, number * S), settled(number))
        made._executor.submit(lambda: None).result()
    made.close()
    parts = sorted((tmp_path / "trace").glob("part-*"))
    assert 1 <= len(parts) < 12
    assert rows(parts[-1])[0]["request_id"] == 11, "more rows than may be merged stay in parts"
    trace = tmp_path / "trace" / "trace.parquet"
    assert not trace.exists() or rows(trace)[-1]["request_id"] < 11
    merged(recorder(tmp_path)).close()
    assert rows(tmp_path / "trace" / "trace.parquet")[-1]["request_id"] == 11, "but not for ever"
