"""The report says what the replays found, in the terminal, on a page and as JSON."""

import io
import json
import math
import re
from dataclasses import replace as changed
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from policy.files import load_policy
from traces import Trace, TraceWriter, open_trace
from twin.fleet import fleet_of
from twin.replay import Replay, replay
from twin.report import ReportError, table, write_html, write_json
from twin.report.charts import curve, log_ticks, over_time
from twin.report.figures import (
    best,
    between,
    count,
    differences,
    duration,
    interval_texts,
    overall_rows,
    share,
    usd,
    verdict,
)
from twin.summary import Histogram, Summary
from twin.uncertainty import uncertain_replay

ROWS = 400
NAN = math.nan


def small_trace(path: Path) -> Trace:
    """Twenty requests a second on one replica; every fourth has a long prompt."""
    with TraceWriter(path, defaults={"model": "qwen3-8b", "endpoint": "chat"}) as writer:
        writer.write(
            pa.RecordBatch.from_pydict(
                {
                    "request_id": list(range(ROWS)),
                    "arrival_s": [0.05 * row for row in range(ROWS)],
                    "arrival_res_s": [0.0] * ROWS,
                    "prompt_tokens": [9000 if row % 4 == 0 else 120 for row in range(ROWS)],
                    "output_tokens": [20 + row % 30 for row in range(ROWS)],
                    "sla_class": ["P2" if row % 4 == 0 else f"P{row % 2}" for row in range(ROWS)],
                    "weight": [1.0] * ROWS,
                }
            )
        )
    return open_trace(path)


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> list[Replay]:
    trace = small_trace(tmp_path_factory.mktemp("report") / "small.parquet")
    fleet = fleet_of([("h100-sxm/qwen3-8b", 1)])
    return [
        replay(trace, fleet, load_policy(name), policy_name=name) for name in ("fifo", "stable")
    ]


@pytest.fixture(scope="module")
def unsure(replays: list[Replay], tmp_path_factory: pytest.TempPathFactory) -> list[Replay]:
    """The same with intervals."""
    trace = small_trace(tmp_path_factory.mktemp("unsure") / "small.parquet")
    return [
        uncertain_replay(run, trace, load_policy(run.policy), runs=19, jobs=1) for run in replays
    ]


def printed(replays: list[Replay], width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table(replays))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


class Page(HTMLParser):
    """What a page refers to, says, and carries as data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: set[str] = set()
        self.words = ""
        self.data = ""
        self.policy = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.references += [f"{name}={values[name]}" for name in ("src", "href", "srcset")
                            if name in values]  # fmt: skip
        self.ids.add(values.get("id") or "")
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        if tag in ("script", "style", "title"):
            self._inside.append(values.get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "title"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.words += f" {data}"
        elif self._inside[-1] == "charts":
            self.data += data


@pytest.fixture(scope="module")
def page(replays: list[Replay], tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(replays, path)
    assert path.stat().st_size < 6_000_000
    return Page(path.read_text(encoding="utf-8"))


def test_table_fits_a_hundred_columns(replays: list[Replay]) -> None:
    text = printed(replays)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "…" not in text
    for word in ("fifo", "stable", "goodput", "prefix hit share", "GPU busy", "P0", "P2", "TTFT",
                 "TPOT", "end to end", "policy queue", "by tier", "USD", "p99"):  # fmt: skip
        assert word in text


def test_table_shows_the_summarys_figures(replays: list[Replay]) -> None:
    text = printed(replays)
    for run in replays:
        assert share(run.summary.all.attainment()) in text
        assert duration(run.summary.groups["sla"]["P0"].metrics["ttft_s"].quantile_s(0.95)) in text


def test_four_policies_go_below_each_other(replays: list[Replay]) -> None:
    text = printed([*replays, *replays])
    assert "stable (4)" in text
    assert text.count("by SLA class") == 2
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100


def test_names_are_not_markup(replays: list[Replay], tmp_path: Path) -> None:
    odd = changed(replays[0], policy="[red]</script><b>", trace="<i>.parquet")
    assert "[red]</script><b>" in printed([odd])
    write_html([odd], tmp_path / "odd.html")
    text = (tmp_path / "odd.html").read_text(encoding="utf-8")
    assert "</script><b>" not in text
    assert "<i>.parquet" not in text


def test_table_shows_intervals_below_the_figures(unsure: list[Replay]) -> None:
    for several in (unsure, [*unsure, *unsure, *unsure]):
        text = printed(several)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
        assert "…" not in text
        for run in unsure:
            assert run.intervals is not None
            known = run.intervals.by_figure["by_sla.P0.ttft_s_p95"]
            assert between(known.low, known.high, duration) in text
        assert "Intervals hold 90 %, from 19 more runs" in text


def test_page_and_charts_show_intervals(unsure: list[Replay], tmp_path: Path) -> None:
    write_html(unsure, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    for text in interval_texts(unsure):
        assert text in page.words
    for run in unsure:
        assert run.intervals is not None
        for figure in ("all.e2e_s_p99", "by_sla.P2.ttft_s_p50", "all.ttft_s_p95"):
            known = run.intervals.by_figure[figure]
            assert between(known.low, known.high, duration) in page.words
    bars = json.loads(page.data)["attainment"]["traces"]
    whiskers = [bar["error_y"] for bar in bars if "error_y" in bar]
    assert whiskers
    assert any("\u2013" in said for bar in bars for said in bar.get("customdata", []))
    for bar in whiskers:
        assert all(value >= 0 for value in (*bar["array"], *bar["arrayminus"]))


def test_without_intervals_nothing_is_said_of_them(page: Page, replays: list[Replay]) -> None:
    assert interval_texts(replays) == []
    assert "ntervals" not in page.words
    assert "error_y" not in page.data


@pytest.mark.parametrize(
    ("low", "high", "write", "text"),
    [
        (0.0812, 0.094, duration, "81.2-94.0 ms"),
        (0.0004, 0.002, duration, "0.40-2.00 ms"),
        (0.0, 1.5, duration, "0-1.50 s"),
        (0.0812, 0.08121, duration, ""),
        (0.5, math.inf, duration, "≥ 500 ms"),
        (math.inf, math.inf, duration, "∞"),
        (0.952, 0.984, share, "95.2-98.4 %"),
        (0.952, 1.0, share, "95.2-100 %"),
        (3.0, 1200.0, count, "3-1,200"),
        (1.3, 1.4, usd, "1.30-1.40 USD"),
    ],
)
def test_an_interval_has_its_unit_once(low: float, high: float, write: Any, text: str) -> None:
    assert between(low, high, write) == text.replace("-", "\u2013")


def test_page_needs_no_network(page: Page) -> None:
    assert page.references == []
    assert page.policy.startswith("default-src 'none'")
    assert "http" not in page.policy
    assert not re.search(r"https?://", page.data)


def test_page_has_every_section(page: Page) -> None:
    for words in (
        "fifo and stable on small.parquet", "SLO attainment", "Were the promises kept?",
        "How long did requests take?", "Where did the time go?", "What happened over time?",
        "How did each tier fare?", "All figures", "Replicas", "Assumptions and limits",
        "within 0.5 % of exact", "USD an hour", "gpus.yaml", "arrival at the controller",
    ):  # fmt: skip
        assert words in page.words, words


def test_page_says_how_far_a_profile_can_be_trusted(replays: list[Replay], tmp_path: Path) -> None:
    spec = replays[0].fleet[0]
    trust = type(spec.profile.trust)(status="scaled", fitted_on="from another card")
    profile = type(spec.profile)(
        **{name: getattr(spec.profile, name) for name in spec.profile.__struct_fields__}
        | {"trust": trust}
    )
    write_html([changed(replays[0], fleet=[changed(spec, profile=profile)])], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "scaled, not yet fitted" in page.words


def test_every_chart_has_its_place_and_units(page: Page) -> None:
    charts: dict[str, dict[str, Any]] = json.loads(page.data)
    assert set(charts) <= page.ids
    assert sum(chart.get("kind") == "cdf" for chart in charts.values()) == 9
    for name, chart in charts.items():
        titles = [axis.get("title") for key, axis in chart["layout"].items() if "axis" in key]
        assert any(titles), name
        for trace in chart["traces"]:
            assert len(trace["x"]) <= 1100, name


def test_json_round_trips(replays: list[Replay], tmp_path: Path) -> None:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path in paths:
        write_json(replays, path)
    text = paths[0].read_text(encoding="utf-8")
    assert text == paths[1].read_text(encoding="utf-8")
    document = json.loads(text, parse_constant=pytest.fail)
    assert [run["label"] for run in document["replays"]] == ["fifo", "stable"]
    figures = replays[1].figures()
    assert document["replays"][1]["all"] == figures["all"]
    assert list(document["replays"][1])[1:] == list(figures)


def test_a_run_without_answers_is_reported(replays: list[Replay], tmp_path: Path) -> None:
    summary = Summary()
    summary.all.offered = summary.all.shed = 3
    summary.shed_why = {"shed: deadline": 3}
    run = changed(replays[0], summary=summary, samples=[], gpu_busy=[0.0], span_s=0.0)
    write_html([run], tmp_path / "r.html")
    write_json([run], tmp_path / "r.json")
    json.loads((tmp_path / "r.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert "deadline" in printed([run])


def test_errors_say_what_is_wrong(replays: list[Replay], tmp_path: Path) -> None:
    for make in (write_html, write_json):
        with pytest.raises(ReportError, match="0 were given"):
            make([], tmp_path / "none")
        with pytest.raises(ReportError, match="cannot write the report: No such file"):
            make(replays[:1], tmp_path / "nowhere" / "report")
    with pytest.raises(ReportError, match="0 were given"):
        table([])


def test_nothing_half_written_is_left(
    replays: list[Replay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ReportError, match="No space left"):
        write_json(replays, target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert target.read_text() == "old"


def test_unlike_runs_are_called_so(replays: list[Replay]) -> None:
    assert differences(replays) == []
    other = changed(replays[1], options=changed(replays[1].options, seed=7))
    assert differences([replays[0], other]) == ["seed"]
    assert "not like with like; different: seed" in printed([replays[0], other])


def test_verdict_names_every_policy(replays: list[Replay]) -> None:
    text = verdict(replays)
    assert text.startswith("Answered within SLO, of all requests offered: fifo ")
    assert "stable" in text


def test_reasons_add_up_to_what_was_shed_and_failed(replays: list[Replay]) -> None:
    rows = {row.name: row.values for row in overall_rows(replays)}
    reasons = [values for name, values in rows.items() if name.startswith("  ")]
    for run in range(len(replays)):
        expected = rows["shed"][run] + rows["failed"][run]
        assert sum(values[run] for values in reasons) == expected


@pytest.mark.parametrize(
    ("values", "better", "expected"),
    [
        ((1.0, 2.0), "low", {0}),
        ((1.0, 2.0), "high", {1}),
        ((1.0, 1.005), "low", set()),
        ((1.0, 1.005, 2.0), "low", {0, 1}),
        ((0.0, 0.0), "low", set()),
        ((NAN, 1.0), "low", set()),
        ((NAN, 1.0, 3.0), "low", {1}),
        ((1.0, 2.0), "neither", set()),
    ],
)
def test_best(values: tuple[float, ...], better: Any, expected: set[int]) -> None:
    assert best(values, better) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.000412, "412 µs"),
        (0.00104, "1.04 ms"),
        (0.0812, "81.2 ms"),
        (0.9994, "999 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (1234.4, "1,234 s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shares_are_not_rounded_to_all_or_nothing() -> None:
    assert [share(value) for value in (0.0, 0.0001, 0.5, 0.9999, 1.0)] == [
        "0 %", "<0.1 %", "50.0 %", ">99.9 %", "100 %",
    ]  # fmt: skip


def test_curves_are_thinned_but_keep_their_ends() -> None:
    import numpy as np

    histogram = Histogram()
    histogram.add(np.geomspace(1e-3, 10, 100_000))
    seconds, shares = curve(histogram)
    full_seconds, full_shares = histogram.curve()
    assert len(full_seconds) > len(seconds)
    assert len(seconds) <= 400
    assert (seconds[0], seconds[-1]) == pytest.approx((full_seconds[0], full_seconds[-1]), rel=1e-4)
    assert shares[-1] == full_shares[-1] == 1
    assert shares == sorted(shares)


def test_arrival_rate_is_shown_where_arrivals_were_counted(replays: list[Replay]) -> None:
    samples: list[Any] = [
        SimpleNamespace(
            at_ns=second * 1_000_000_000, queued=0, running=1, waiting=0,
            kv_used_permille=(5,), arrived=20 * second,
        )
        for second in range(21)
    ]  # fmt: skip
    chart = over_time([changed(replays[0], samples=samples)], ["fifo"])["arrivals"]
    assert chart["traces"][0]["x"] == [5, 10, 15, 20]
    assert chart["traces"][0]["y"] == [20, 20, 20, 20]


def test_log_ticks_lie_in_range() -> None:
    values, texts = log_ticks(0.004, 200)
    assert texts == ["10 ms", "100 ms", "1 s", "10 s", "100 s"]
    assert all(0.004 <= value <= 200 for value in values)
