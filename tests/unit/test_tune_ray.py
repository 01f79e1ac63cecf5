"""Plays on a local Ray with two workers."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from tests.tune_support import GRID, plan_of, space_of, work
from twin.tune.engines import RayEngine
from twin.tune.objectives import TuneError, goals_of
from twin.tune.tuning import tune

if TYPE_CHECKING:
    from pathlib import Path

GOODPUT = goals_of((), (), trace=True)


def test_two_ray_workers_find_what_this_process_finds(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'twinkeel[ray]'")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    space = space_of(GRID)
    known = tune(plan_of(here, space, 12, rungs=()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        found = tune(plan_of(there, space, 12, rungs=(), engine="ray", jobs=2))
    assert _by_params(found) == _by_params(known)
    assert found.verdict is not None
    assert known.verdict is not None
    assert found.verdict.why == known.verdict.why


def _by_params(tuned: Any) -> dict[str, dict[str, float]]:
    return {str(tried.params): tried.values for tried in tuned.tuning.tried.values()}


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TuneError, match=r"twinkeel\[ray\]"):
        RayEngine(work(), GOODPUT, 2)
