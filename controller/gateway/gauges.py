"""Prometheus families of kept answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from controller.gateway.answers import Answers


def families(answers: Answers) -> Iterator[Metric]:
    """For ``Metrics.also``."""
    store, embeddings = answers.store, answers.embeddings
    yield GaugeMetricFamily("twinkeel_kept_answers", "Answers that are kept.", store.rows)
    yield GaugeMetricFamily(
        "twinkeel_kept_answers_bytes", "What they and their vectors take.", store.kept_bytes
    )
    yield CounterMetricFamily(
        "twinkeel_kept_answers_left_out", "Answers that could not be kept.", store.left_out
    )
    looked = CounterMetricFamily(
        "twinkeel_kept_answers_look_ups", "Look-ups of a kept answer, by what was found.",
        labels=["found"],
    )  # fmt: skip
    for found, count in answers.looked.items():
        looked.add_metric([found], count)
    yield looked
    if embeddings is not None:
        yield CounterMetricFamily(
            "twinkeel_embeddings_calls", "Calls for vectors of questions.", embeddings.asked
        )
        yield CounterMetricFamily(
            "twinkeel_embeddings_failures", "Of these, those that came to nothing.",
            embeddings.failed,
        )  # fmt: skip
