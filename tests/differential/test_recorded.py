"""The engine's schedule equals the recorded ones of vLLM's own scheduler, step by step."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.differential.choose import EACH_FAMILY, TELLING, read
from tests.differential.compare import compare, first_difference, twin_schedule
from tests.differential.probe import RARE_PATHS
from tests.differential.workloads import FAMILIES, Workload, dump, generate, is_possible, load


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return read()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", FAMILIES)
def test_schedules_are_equal(
    lines: list[dict[str, Any]], family: str, async_scheduling: bool
) -> None:
    assert compare_all(lines, family, async_scheduling) >= EACH_FAMILY


def test_telling_schedules_are_equal(lines: list[dict[str, Any]]) -> None:
    telling = TELLING.read_text(encoding="utf-8").splitlines()
    compared = compare_all(lines, "telling", False) + compare_all(lines, "telling", True)
    assert compared == len(telling)


def compare_all(lines: list[dict[str, Any]], family: str, async_scheduling: bool) -> int:
    """Compare the recorded schedules of a family; how many there were."""
    compared = 0
    for line in lines:
        workload = Workload.from_json(line["workload"])
        if workload.family == family and workload.async_scheduling == async_scheduling:
            difference = compare(workload, line["steps"])
            assert difference is None, f"{difference}\n{dump(workload)}"
            compared += 1
    return compared


def test_every_rare_path_was_recorded(lines: list[dict[str, Any]]) -> None:
    taken: Counter[str] = Counter()
    for line in lines:
        taken.update(path for path, count in line["paths"].items() if count)
    assert {path: taken[path] for path in RARE_PATHS if taken[path] < 8} == {}
    assert set(taken) <= set(RARE_PATHS)


@pytest.mark.parametrize("place", range(7))
def test_any_change_is_noticed(lines: list[dict[str, Any]], place: int) -> None:
    workload = Workload.from_json(lines[0]["workload"])
    changed = json.loads(json.dumps(lines[0]["steps"]))
    value = changed[3][place]
    extra: Any = [99, 1] if place == 1 else 99
    changed[3][place] = [*value, extra] if isinstance(value, list) else value + 1
    difference = first_difference(workload, changed, twin_schedule(workload))
    assert difference is not None
    assert difference.step == 3
    assert workload.name in str(difference)


@pytest.mark.parametrize("family", FAMILIES)
def test_workloads_are_repeatable_and_possible(family: str) -> None:
    first = generate(family, 7, async_scheduling=True)
    assert load(dump(first)) == first == generate(family, 7, async_scheduling=True)
    assert all(is_possible(first, request) for request in first.requests)
    assert len({request.id for request in first.requests}) == len(first.requests)
