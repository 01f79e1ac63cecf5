"""Studies on a small trace, played for real: what is found, what is kept, what is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import optuna
import psutil
import pytest

from tests.tune_support import (
    GRID,
    OBJECTIVES,
    STABLE,
    exhaustive,
    plan_of,
    small_trace,
    space_of,
    work,
)
from traces import TraceError, open_trace
from twin.replay import ReplayOptions
from twin.tune.confirm import confirm
from twin.tune.engines import HereEngine, LocalEngine
from twin.tune.objectives import TuneError, goals_of
from twin.tune.study import OWNER, PLAYED, Settings, open_tuning
from twin.tune.tuning import tune
from twin.tune.work import Order, Rival

if TYPE_CHECKING:
    from pathlib import Path

    from policy.parameters import Parameters

GOODPUT = goals_of((), (), trace=True)


def finished(storage: str) -> list[optuna.trial.FrozenTrial]:
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    study = optuna.load_study(study_name="tune", storage=storage)
    return study.get_trials(deepcopy=False, states=states)


def one_at_a_time() -> Parameters:
    """Far worse than any other."""
    keys = {"limits.global_in_flight_most": {"low": 0, "high": 1}}
    return space_of(keys).policy({"limits.global_in_flight_most": 1})


def test_the_same_trial_twice_gives_identical_figures() -> None:
    goals = goals_of(OBJECTIVES, (), trace=True)
    play = work().ready(goals)
    for seed in (0, 1):
        first, second = play(Order(0, STABLE, seed)), play(Order(5, STABLE, seed))
        assert first.values == second.values
        assert np.array_equal(first.blocks, second.blocks, equal_nan=True)
    assert play(Order(0, STABLE, 0)).values != play(Order(0, STABLE, 1)).values


def test_a_trial_that_stops_early_saw_the_same_as_the_whole() -> None:
    plain = work().ready(GOODPUT)
    whole = plain(Order(0, space_of(GRID).policy({"inflight.prefill_steps_milli": 100})))
    rival = Rival(3, whole.blocks, (0,), (1,))
    stopped = plain(Order(1, STABLE, 0, (rival,), (10, 20, 30, 40)))
    assert stopped.beaten_by == 3
    assert len(stopped.blocks) < 50
    assert np.array_equal(stopped.blocks, plain(Order(1, STABLE)).blocks[: len(stopped.blocks)])


def test_a_small_grid_is_tried_in_full_and_its_best_is_found(tmp_path: Path) -> None:
    """With pruning: the best of the exhaustive search is never stopped."""
    space = space_of(GRID)
    known = exhaustive()
    best = max(played.values["goodput"] for played in known.values())
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        tuned = tune(plan_of(folder, space, 50, seed=seed))
        assert len(tuned.tuning.tried) == len(known) == 12
        assert sum(not tried.whole for tried in tuned.tuning.tried.values()) >= 2
        assert tuned.raced.best.values["goodput"] == best


def test_the_front_of_a_grid_is_that_of_the_exhaustive_search(tmp_path: Path) -> None:
    space = space_of(GRID)
    rows = {tuple(played.values[name] for name in OBJECTIVES) for played in exhaustive().values()}
    tuned = tune(plan_of(tmp_path, space, 12, OBJECTIVES, rungs=()))
    found = {tuple(one.values[name] for name in OBJECTIVES) for one in tuned.tuning.front()}

    def beaten(row: tuple[float, ...]) -> bool:
        gains = [(r[0] - row[0], row[1] - r[1], r[2] - row[2]) for r in rows if r != row]
        return any(min(gain) >= 0 for gain in gains)

    assert found == {row for row in rows if not beaten(row)}


def test_the_incumbent_is_the_first_trial_and_stays_where_nothing_is_better(
    tmp_path: Path,
) -> None:
    space = space_of({"history.keys_max": {"low": 9000, "high": 11_000}})
    tuned = tune(plan_of(tmp_path, space, 4))
    first = min(tuned.tuning.tried)
    assert tuned.tuning.tried[first].params == {"history.keys_max": 10_000}
    assert tuned.changes == {}
    assert tuned.best == STABLE
    assert tuned.verdict is None


def test_constraints_keep_the_best_from_being_chosen(tmp_path: Path) -> None:
    """The P0 percentile is best where many are sent at once, and goodput is worst there."""
    bound = 15.2
    constraint = f"goodput >= {bound}"
    tuned = tune(plan_of(tmp_path, space_of(GRID), 12, ["p0_ttft_p95_s"], [constraint], rungs=()))
    known = [played.values for played in exhaustive().values()]
    able = [values["p0_ttft_p95_s"] for values in known if values["goodput"] >= bound]
    assert min(able) > min(values["p0_ttft_p95_s"] for values in known)
    assert tuned.raced.best.values["p0_ttft_p95_s"] == min(able)
    assert tuned.raced.best.values["goodput"] >= bound


def test_draws_that_make_no_policy_are_no_trials(tmp_path: Path) -> None:
    keys = {"tiers.turbo_max_tflop": {"low": 50, "high": 400}}  # above 200: above stable_max_tflop
    tuned = tune(plan_of(tmp_path, space_of(keys), 8))
    assert len(tuned.tuning.tried) == 8
    assert all(tried.params["tiers.turbo_max_tflop"] <= 200
               for tried in tuned.tuning.tried.values())  # fmt: skip


def test_more_seeds_go_to_those_that_are_close(tmp_path: Path) -> None:
    tuned = tune(plan_of(tmp_path, space_of(GRID), 12, rungs=(), seeds=3))
    seeds = {one.number: len(one.by_seed) for one in tuned.raced.finalists}
    assert len(tuned.raced.best.by_seed) == 3
    dropped = [one for one in tuned.raced.finalists if one.dropped]
    assert dropped
    assert any(seeds[one.number] == 2 for one in dropped), "it is out before the last seed"
    parent = tuned.raced.finalists[0]
    assert not parent.dropped
    assert len(parent.by_seed) == 3


def test_a_verdict_goes_either_way() -> None:
    tight = one_at_a_time()

    def judged(parent: Any, tuned: Any) -> Any:
        return confirm(parent, tuned, GOODPUT, (work(8),), 2, lambda one: HereEngine(one, GOODPUT))

    better = judged(tight, STABLE)
    (figure,) = better.compared
    assert better.better
    assert figure.difference.low > 0
    assert better.why.startswith("better than its parent on held-out traffic: goodput")
    worse = judged(STABLE, tight)
    assert not worse.better
    assert worse.why.startswith("not better: on held-out traffic it is worse in goodput")
    assert worse.compared[0].difference.value == pytest.approx(-figure.difference.value)
    same = judged(STABLE, STABLE)
    assert not same.better
    assert same.why.startswith("not better: on held-out traffic no difference is certain")


def test_a_policy_that_breaks_a_constraint_is_not_better() -> None:
    goals = goals_of(("p0_ttft_p95_s",), ("goodput >= 1000",), trace=True)
    tight = one_at_a_time()
    found = confirm(tight, STABLE, goals, (work(8),), 1, lambda one: HereEngine(one, goals))
    assert found.compared[0].difference.better
    assert not found.better
    assert "does not keep goodput >= 1000" in found.why


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, space_of(GRID), 2)
    wrong = replace(plan, work=replace(plan.work, options=ReplayOptions(scale=0.0)))
    open_tuning(
        wrong.space, wrong.goals, wrong.work, wrong.settings, storage=wrong.storage,
        name=wrong.study,
    )  # fmt: skip
    tune(plan)  # nothing had been played: it may be played otherwise
    faster = replace(plan, work=replace(plan.work, options=ReplayOptions(speed=2.0)))
    with pytest.raises(TuneError, match="other: what is played"):
        tune(faster)
    other = replace(plan, space=space_of({"shedding.enabled": [True, False]}))
    with pytest.raises(TuneError, match="about something else"):
        tune(other)
    goals = goals_of(OBJECTIVES, (), trace=True)
    with pytest.raises(TuneError, match="has 1 objectives, not 3"):
        tune(replace(plan, goals=goals))


@pytest.mark.parametrize("url", ["here.db", "mysql+nothing://x/y", "sqlite:////no/such/place.db"])
def test_a_storage_that_cannot_be_used_is_told(url: str) -> None:
    with pytest.raises(TuneError, match=r"storage|install"):
        open_tuning(space_of(GRID), GOODPUT, work(), Settings(2), storage=url, name="tune")


def test_a_journal_holds_a_study_too(tmp_path: Path) -> None:
    storage = f"journal:{tmp_path / 'study.log'}"
    plan = plan_of(tmp_path, space_of(GRID), 12, storage=storage)
    assert len(tune(plan).tuning.tried) == 12
    again = tune(plan)
    assert len(again.tuning.tried) == 12


def test_a_worker_that_is_killed_costs_nothing_but_time() -> None:
    engine = LocalEngine(work(), GOODPUT, 2)
    space = space_of(GRID)
    policies = [space.policy({"inflight.sequences_permille": at}) for at in (12, 40, 100, 500)]
    try:
        for number, policy in enumerate(policies):
            engine.submit(Order(number, policy))
        found = dict([_numbered(engine)])
        os.kill(engine.processes()[0], signal.SIGKILL)
        found.update(_numbered(engine) for _ in range(3))
    finally:
        engine.close()
    here = work().ready(GOODPUT)
    expected = {n: here(Order(n, policy)).values for n, policy in enumerate(policies)}
    assert found == expected


@pytest.mark.parametrize("scale", [0.5, 2.7])
def test_another_scale_is_played_whole(scale: float) -> None:
    scaled = replace(work(), options=ReplayOptions(scale=scale))
    whole, again = (scaled.ready(GOODPUT)(Order(0, STABLE, keep_rows=True)) for _ in range(2))
    requests = sum(len(part.good) for part in whole.rows)
    assert requests == pytest.approx(scale * open_trace(scaled.path).rows, rel=0.15)
    assert whole.values == again.values
    spans_s = sum(part.span_s for part in whole.rows)
    assert spans_s == pytest.approx(open_trace(scaled.path).duration_s, rel=0.1)


def test_what_a_process_cannot_play_is_told_by_its_own_error() -> None:
    short = replace(work(), begin=0.9)
    engine = LocalEngine(short, GOODPUT, 2)
    try:
        engine.submit(Order(0, STABLE))
        with pytest.raises(TraceError, match="too few to compare policies by"):
            engine.next()
    finally:
        engine.close()


def _numbered(engine: LocalEngine) -> tuple[int, dict[str, float]]:
    order, played = engine.next()
    return order.number, played.values


def test_a_tuning_that_is_killed_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(
        "schema: 1\nspace:\n  inflight.sequences_permille: {low: 12, high: 4000, log: true}\n"
        "  inflight.prefill_steps_milli: {low: 100, high: 9000, log: true}\n",
        encoding="utf-8",
    )  # fmt: skip
    command = [
        sys.executable, "-c", "from twin.tune.cli import tune_command as t; t()",
        str(tmp_path / "space.yaml"), "--trace", small_trace(), "--held-out", small_trace(8),
        "--replicas", "1", "--trials", "16", "--jobs", "2", "--seeds", "1", "--held-seeds", "1",
        "--out", str(tmp_path), "--quiet",
    ]  # fmt: skip
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    before = _wait_for(storage, 4, first)
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.wait()
    for child in children:
        child.kill()
    kept = {trial.number: trial.user_attrs[PLAYED] for trial in finished(storage)}
    assert len(kept) >= before
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    after = {trial.number: trial.user_attrs[PLAYED] for trial in finished(storage)}
    assert len(after) == 16
    assert {number: after[number] for number in kept} == kept
    study = optuna.load_study(study_name="tune", storage=storage)
    running = (optuna.trial.TrialState.RUNNING,)
    left = study.get_trials(deepcopy=False, states=running)
    assert not [trial for trial in left if OWNER in trial.user_attrs]  # else it died as it began
    result = msgspec.json.decode((tmp_path / "result.json").read_bytes())
    assert result["trials"]["finished"] == 16


def _wait_for(storage: str, count: int, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        try:
            done = len(finished(storage))
        except Exception:  # the tables are not there yet
            done = 0
        if done >= count:
            return done
        time.sleep(0.05)
    raise AssertionError("no trial ended")
