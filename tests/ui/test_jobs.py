"""Jobs: found by what they do, alone in their processes, and never lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from hashlib import sha256
from threading import Barrier, Thread
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dashboards.jobs import Job, Jobs, JobsError, store
from tests.controller.processes import eventually
from tests.controller.turns import Turns
from tests.ui.conftest import KINDS
from tests.ui.kinds.count import GO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENDS_S = 120.0
CANCEL_S = 1.0
SESSIONS = 6


def ended(jobs: Jobs, job: Job) -> Job:
    """It, once it has ended; as a page waits for it."""

    def over() -> Job | None:
        jobs.look()
        found = jobs.get(job.id)
        return None if found.open else found

    found: Job = eventually(f"{job.kind} ends", over, ENDS_S)
    return found


def let_go(job: Job) -> None:
    """It need not wait any more, or not at all if it has not begun."""
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / GO).touch()


def row(jobs: Jobs, job: Job) -> dict[str, Any]:
    """What the store keeps of it."""
    with closing(sqlite3.connect(job.folder.parent / "jobs.db")) as database:
        database.row_factory = sqlite3.Row
        return dict(database.execute("select * from jobs where id = ?", (job.id,)).fetchone())


def group(pgid: int) -> list[int]:
    """Processes of a group that are there and no zombies."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if (
                os.getpgid(process.info["pid"]) == pgid
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ):
                found.append(process.info["pid"])
        except ProcessLookupError:
            pass
    return found


def test_a_job_is_done_and_leaves_its_results(jobs: Jobs) -> None:
    job = jobs.start("count", {"to": 3, "waits": 1})
    assert job.state == "running"
    seen = eventually("it tells how far it is", lambda: jobs.get(job.id).share, ENDS_S)
    assert seen == pytest.approx(1 / 3)
    assert jobs.get(job.id).said == "counting 1"
    let_go(job)
    done = ended(jobs, job)
    assert (done.state, done.error) == ("done", "")
    assert json.loads((done.folder / "result.json").read_text()) == {"began_at": 0}
    assert 0 < done.began_s < done.ended_s


def test_the_same_request_is_the_same_job(jobs: Jobs) -> None:
    request = {"to": 1, "waits": 1}
    assert jobs.find("count", request) is None
    first = jobs.start("count", request)
    assert jobs.start("count", {"waits": 1, "to": 1}).id == first.id
    let_go(first)
    done = ended(jobs, first)
    assert jobs.start("count", request) == done, "what was done is not done again"
    (first.folder / GO).unlink()
    again = jobs.start("count", request, again=True)
    assert (again.id, again.open) == (done.id, True), "unless that is asked for"
    let_go(again)
    done = ended(jobs, again)
    assert jobs.find("count", {"to": 2, "waits": 1}) is None
    assert jobs.find("other", request) is None
    assert [job.id for job in jobs.recent("count")] == [first.id]
    assert jobs.recent("other") == []


def test_a_failure_is_a_sentence(jobs: Jobs) -> None:
    why = "the trace has no rows: import it again"
    failed = ended(jobs, jobs.start("wrong", {"why": why}))
    assert (failed.state, failed.error) == ("failed", why)
    ours = ended(jobs, jobs.start("wrong", {"why": "x", "ours": True}))
    assert ours.state == "failed"
    assert ours.error == "a fault of ours: KeyError: 'x'"
    assert "Traceback" in (ours.folder / "log.txt").read_text()


def test_what_is_not_installed_is_named(jobs: Jobs) -> None:
    failed = ended(jobs, jobs.start("needs", {}))
    assert failed.error.startswith("twinkeel_of_nowhere is not installed: ")
    unknown = ended(jobs, jobs.start("nothing", {}))
    assert unknown.error == f"a fault of ours: there is no module {KINDS}.nothing"


def test_a_worker_that_cannot_begin_has_died(
    stores: Callable[..., Jobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    jobs = stores()
    job = jobs.start("count", {"to": 1})
    assert ended(jobs, job).state == "died"
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    failed = jobs.start("count", {"to": 1})
    assert failed.state == "failed"
    assert "could not be started" in failed.error


def test_cancel_ends_the_whole_group(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.start("pool", {})
    eventually("its children are busy", lambda: len(list(job.folder.glob("*.child"))) == 3, ENDS_S)
    pgid = row(jobs, job)["pid"]
    assert len(group(pgid)) >= 4
    sent_s: dict[int, float] = {}
    killpg = os.killpg
    with Turns() as turns:

        def noted(to: int, number: int) -> None:
            sent_s.setdefault(number, turns.s)
            killpg(to, number)

        monkeypatch.setattr(os, "killpg", noted)
        cancelled = jobs.cancel(job.id)
        monkeypatch.undo()
    assert group(pgid) == []
    # In our own turns, and to the signal: how soon the kernel has done it is the machine's.
    assert sent_s[signal.SIGKILL] < CANCEL_S
    assert cancelled.state == "cancelled"
    assert jobs.cancel(job.id).state == "cancelled", "a second time is nothing new"


def test_a_killed_worker_has_died_with_its_children_and_goes_on(jobs: Jobs) -> None:
    job = jobs.start("pool", {})
    eventually("its children are busy", lambda: len(list(job.folder.glob("*.child"))) == 3, ENDS_S)
    pid = row(jobs, job)["pid"]
    os.kill(pid, signal.SIGKILL)
    died = ended(jobs, job)
    assert died.state == "died"
    assert group(pid) == [], "its children do not go on"

    request = {"to": 5, "waits": 2}
    counting = jobs.start("count", request)
    eventually("it counts", lambda: (counting.folder / "1.number").exists(), ENDS_S)
    os.kill(row(jobs, counting)["pid"], signal.SIGKILL)
    assert ended(jobs, counting).state == "died"
    let_go(counting)
    again = jobs.start("count", request)
    assert again.id == counting.id
    assert ended(jobs, again).state == "done"
    assert json.loads((again.folder / "result.json").read_text())["began_at"] == 2


def test_a_cancelled_job_goes_on_where_it_was(jobs: Jobs) -> None:
    request = {"to": 4, "waits": 1}
    job = jobs.start("count", request)
    eventually("it counts", lambda: (job.folder / "0.number").exists(), ENDS_S)
    assert jobs.cancel(job.id).state == "cancelled"
    let_go(job)
    assert ended(jobs, jobs.start("count", request)).state == "done"
    assert json.loads((job.folder / "result.json").read_text())["began_at"] == 1


def test_a_job_outlives_the_app(stores: Callable[..., Jobs], tmp_path: Path) -> None:
    app = (
        "import sys; from pathlib import Path; from dashboards.jobs import Jobs;"
        "print(Jobs(Path(sys.argv[1]), 2, sys.argv[2]).start('count',"
        " {'to': 3, 'waits': 0}).id, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", app, str(tmp_path / "jobs"), KINDS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        number = process.stdout.readline().strip()
        process.kill()
    later = stores()
    later.look()
    assert later.get(number).state == "running"
    let_go(later.get(number))
    assert ended(later, later.get(number)).state == "done"


def test_what_waits_begins_when_nobody_looks(stores: Callable[..., Jobs]) -> None:
    jobs = stores(1)
    asked = [jobs.start("count", {"to": 1, "waits": 0, "n": n}) for n in range(4)]
    assert [job.state for job in asked] == ["running", "waiting", "waiting", "waiting"]
    for job in asked:
        let_go(job)

    def all_done() -> bool:  # only reads
        return all(jobs.get(job.id).state == "done" for job in asked)

    eventually("all are done", all_done, 2 * ENDS_S)
    done = [jobs.get(job.id) for job in asked]
    assert [job.id for job in sorted(done, key=lambda job: job.began_s)] == [j.id for j in asked]
    for before, after in itertools.pairwise(done):
        assert after.began_s >= before.ended_s, "a worker begins no more than the app may"


def test_a_waiting_job_can_be_cancelled(stores: Callable[..., Jobs]) -> None:
    jobs = stores(1)
    first = jobs.start("count", {"to": 1, "waits": 0})
    second = jobs.start("count", {"to": 2})
    assert jobs.cancel(second.id).state == "cancelled"
    assert jobs.get(first.id).state == "running"
    third = jobs.start("count", {"to": 3})
    jobs.cancel(first.id)
    assert ended(jobs, third).state == "done"
    assert jobs.get(second.id).state == "cancelled"


def test_many_sessions_ask_at_once(stores: Callable[..., Jobs]) -> None:
    """Of several processes of the app, each with many sessions: one process for each job."""
    wrong: list[BaseException] = []
    together = Barrier(SESSIONS, timeout=ENDS_S)

    def session() -> None:
        try:
            jobs = stores(3)
            for n in range(3):
                together.wait()
                job = jobs.start("count", {"to": 2, "waits": 1, "n": n})
                together.wait()
                let_go(job)
                while jobs.get(job.id).open:
                    jobs.look()
                    time.sleep(0.001)  # somebody else's turn
        except BaseException as error:
            wrong.append(error)
            together.abort()

    threads = [Thread(target=session) for _ in range(SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    done = stores().recent("count")
    assert [job.state for job in done] == ["done"] * 3
    for job in done:
        assert json.loads((job.folder / "result.json").read_text()) == {"began_at": 0}


def test_a_number_that_another_process_has_is_not_taken_for_the_old(jobs: Jobs) -> None:
    job = jobs.start("count", {"to": 1, "waits": 0})
    real = row(jobs, job)["pid"]
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as stranger:
        with closing(sqlite3.connect(job.folder.parent / "jobs.db")) as database, database:
            database.execute("update jobs set pid = ?", (stranger.pid,))
        jobs.look()
        assert jobs.get(job.id).state == "died"
        assert stranger.poll() is None, "nobody else's process is ended"
        with closing(sqlite3.connect(job.folder.parent / "jobs.db")) as database, database:
            database.execute("update jobs set state = 'running'")
        assert jobs.cancel(job.id).state == "cancelled"
        assert stranger.poll() is None
        stranger.kill()
    os.killpg(real, signal.SIGKILL)


def test_old_jobs_are_forgotten_with_their_folders(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "KEPT_MOST", 2)
    asked = []
    for n in range(4):
        asked.append(jobs.start("count", {"to": 1, "n": n}))
        ended(jobs, asked[-1])
    jobs.look()
    assert [job.id for job in jobs.recent()] == [asked[3].id, asked[2].id]
    assert [job.folder.exists() for job in asked] == [False, False, True, True]
    with pytest.raises(JobsError, match="there is no job"):
        jobs.get(asked[0].id)
    assert jobs.find("count", {"to": 1, "n": 0}) is None


def test_a_job_that_is_not_known(jobs: Jobs) -> None:
    for ask in (jobs.get, jobs.cancel):
        with pytest.raises(JobsError, match="there is no job 'abc'"):
            ask("abc")


def test_other_code_is_another_job(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    one = store.job_id("count", {})
    monkeypatch.setattr(store, "code_version", lambda: "later")
    assert store.job_id("count", {}) != one


# What takes something back, and what is told in secret


def test_a_drill_takes_back_what_it_broke_before_its_helpers_are_ended(jobs: Jobs) -> None:
    job = jobs.start("drill", {})
    eventually("it is broken", (job.folder / "broken").exists, ENDS_S)
    pgid = row(jobs, job)["pid"]
    assert psutil.Process(pgid).nice() == os.nice(0), "nor is it held up by other work"
    assert jobs.cancel(job.id).state == "cancelled"
    assert not (job.folder / "broken").exists()
    assert group(pgid) == []


def test_a_drill_that_does_not_end_is_ended(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store.PATIENCE_S, "drill", 0.2)
    job = jobs.start("drill", {})
    eventually("it is broken", (job.folder / "broken").exists, ENDS_S)
    pgid = row(jobs, job)["pid"]
    jobs.cancel(job.id)
    assert group(pgid) == []


def test_a_secret_reaches_the_process_and_lies_nowhere(jobs: Jobs) -> None:
    secret = "a-token-that-nobody-may-see"
    job = jobs.start_now("drill", {}, secret)
    assert job.state == "running"
    pgid = row(jobs, job)["pid"]
    let_go(job)
    assert ended(jobs, job).state == "done"
    eventually("its process has left the store", lambda: not group(pgid), ENDS_S)
    assert (job.folder / "told").read_text() == sha256(secret.encode()).hexdigest()
    kept = [path for path in job.folder.parent.rglob("*") if path.is_file()]
    assert len(kept) >= 3
    assert [path for path in kept if secret.encode() in path.read_bytes()] == []
    with pytest.raises(JobsError, match="was there before"):
        jobs.start_now("drill", {}, secret)


def test_what_was_agreed_to_now_does_not_begin_later(stores: Callable[..., Jobs]) -> None:
    jobs = stores(1)
    counting = jobs.start("count", {"to": 1, "waits": 0})
    with pytest.raises(JobsError, match="1 other jobs run or wait"):
        jobs.start_now("drill", {}, "x")
    assert jobs.recent("drill") == [], "it was not asked for at all"
    jobs.cancel(counting.id)
    assert jobs.start_now("drill", {}, "x").state == "running"
