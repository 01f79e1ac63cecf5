"""Counters, histograms and the fairness index: what Prometheus reads, and their bounds."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.telemetry.fairness import SLOT_NS, SLOTS, USERS_MOST, Fairness
from controller.telemetry.tallies import Counter, Histogram, Names
from tests.telemetry_support import MS, S


def read(family: Counter | Histogram) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    lines: list[str] = []
    family.write(lines)
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for parsed in text_string_to_metric_families("".join(lines))
        for sample in parsed.samples
    }


def test_a_histogram_counts_each_value_at_or_below_its_bound() -> None:
    histogram = Histogram("t", "h", ("hop",), (0.001, 0.5, 1))
    for ns in (0, MS, MS + 1, S // 2, S, S + 1):
        histogram.cell(("queue",)).observe(ns)
    samples = read(histogram)
    hop = ("hop", "queue")
    assert [samples["t_bucket", (hop, ("le", le))] for le in ("0.001", "0.5", "1.0", "+Inf")] == [
        2, 4, 5, 6,
    ]  # fmt: skip
    assert samples["t_count", (hop,)] == 6
    assert samples["t_sum", (hop,)] == pytest.approx(2.502, abs=1e-6)


def test_bounds_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ValueError, match="bounds must rise"):
        Histogram("t", "h", (), (1.0, 0.5))
    with pytest.raises(ValueError, match="bounds must rise"):
        Histogram("t", "h", (), (1e-10, 2e-10))


def test_whatever_stands_in_a_label_can_be_read_back() -> None:
    counter = Counter("c", "h", ("key",))
    ugly = 'a "b"\\n\n{,}=#'
    counter.add((ugly,))
    counter.add((ugly,), 2)
    assert read(counter) == {("c_total", (("key", ugly),)): 3}


def test_a_counter_without_labels_is_there_from_the_start() -> None:
    assert read(Counter("c", "h")) == {("c_total", ()): 0}


def test_series_are_bounded() -> None:
    counter, histogram = Counter("c", "h", ("a",), 3), Histogram("t", "h", ("a",), (1,), 1, 3)
    for number in range(1000):
        counter.add((str(number),))
        histogram.cell((str(number),)).observe(1)
    other = (("a", "other"),)
    assert len(read(counter)) == 4
    assert read(counter)["c_total", other] == 997
    assert read(histogram)["t_count", other] == 997


def test_names_are_bounded_in_number_and_length() -> None:
    names = Names(2)
    assert [names(name) for name in ("a", "", "b", "c", "a", "b")] == [
        "a", "none", "b", "other", "a", "b",
    ]  # fmt: skip
    assert Names(9)("x" * 1000) == "other"


def test_fairness_is_jains_index_of_the_last_minutes() -> None:
    fairness = Fairness()
    assert fairness.figures(0) == (1.0, 0)
    for user in "abcd":
        fairness.add(0, user, 100)
    assert fairness.figures(S) == (1.0, 4)
    fairness.add(SLOT_NS, "a", 500)
    assert fairness.figures(SLOT_NS) == (pytest.approx(900**2 / (4 * (600**2 + 3 * 100**2))), 4)
    # The first minute leaves as a whole, and one user alone is even.
    assert fairness.figures(SLOTS * SLOT_NS) == (1.0, 1)
    assert fairness.figures(100 * SLOTS * SLOT_NS) == (1.0, 0)


def test_who_wanted_service_and_got_none_counts() -> None:
    fairness = Fairness()
    fairness.add(0, "a", 100)
    fairness.add(0, "b", 0)
    assert fairness.figures(0) == (0.5, 2)


def test_fairness_is_bounded_and_takes_a_clock_that_waits() -> None:
    fairness = Fairness()
    for number in range(USERS_MOST + 5):
        fairness.add(7 * SLOT_NS, str(number), 1)
    assert fairness.figures(6 * SLOT_NS)[1] == USERS_MOST
