"""Every query of the dashboard and of the rules, against the metrics that are really exposed."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from controller.sharing.gauges import Counts
from controller.telemetry.metrics import LogHealth, Metrics, Sink, State
from policy.decisions import Alert, BreakerMoved, Refused, Rotated, Scaled, Settled, Verify
from policy.events import Failed, ReplicaDown, Scraped, StepsRead
from policy.tiers import NAMES
from tests.telemetry_support import MS, S, answer, call, dispatch, metrics, refuse, up

DEPLOY = Path(__file__).parents[2] / "controller" / "deploy"
SCRAPED = {"job", "instance"}  # what Prometheus adds to everything
RISING = ("rate", "irate", "increase")
SAMPLES = ("_total", "_bucket", "_sum", "_count")

Series = dict[str, list[dict[str, str]]]


def exercised() -> Metrics:
    """Metrics after a little of everything."""
    state = State(
        60 * S, dict.fromkeys(NAMES, 1), {(0, tier): 1 for tier in NAMES}, LogHealth(1, 1, 2),
        {name: Sink(1, 1, 1) for name in ("spans", "webhook", "trace")}, False, {"shed": 1},
    )  # fmt: skip
    of = metrics(state)
    shared = Counts()
    shared.leases["user"] = 1
    of.also(shared.families)
    for replica in range(6):
        of.fed(0, up(replica))
        of.fed(S, Scraped(replica, 1, 1, 10, 0, MS))
        of.fed(S, StepsRead(replica, 100, 1300, 1000))
    of.fed(2 * S, ReplicaDown(5, "gone"))
    of.fed(2 * S, Failed(0, 0, "timeout"))
    for number, (tier, sla) in enumerate((t, s) for t in NAMES for s in ("P0", "P1", "P2")):
        made = call(number, sla=sla)
        of.arrived(made)
        dispatch(made, tier=tier)
        of.dispatched(made)
        answer(made)
        of.settled(made, Settled(number, "answered", tier, "", 200, 0, 700, "match"))
    for outcome in ("shed", "failed", "degraded", "cancelled"):
        made = call(99)
        of.arrived(made)
        of.settled(made, refuse(made, outcome, "deadline"))
    for state_name in ("ejected", "probing", "draining", "isolated"):
        of.decided(Rotated(1, state_name, "x"))
    of.lost(Settled(98, "failed", "", "controller_lost", 503))
    of.rejected(401)
    for decision in (
        BreakerMoved("k", "open", "x"), Alert("replica 1", "x"), Refused("Finished", "x"),
        Scaled("qwen", 2, "x"), Verify(1, 1),
    ):  # fmt: skip
        of.decided(decision)
    of.chain_step("request", "answered")
    of.chain_step("client", "done")
    of.chain_partial()
    of.policy("stable", "abc")
    return of


@cache
def exposed() -> Series:
    found: Series = {"up": [{"job": "twinkeel"}]}
    for family in text_string_to_metric_families(exercised().render()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def labels_of(expr: Any) -> set[str] | None:
    """The labels of what ``expr`` gives, None for a plain number; fails where it can give nothing:
    an unknown metric, a label that it has not, a value that no series has."""
    if isinstance(expr, promql.NumberLiteral | promql.StringLiteral):
        return None
    if isinstance(expr, promql.ParenExpr | promql.SubqueryExpr | promql.UnaryExpr):
        return labels_of(expr.expr)
    if isinstance(expr, promql.MatrixSelector):
        return labels_of(expr.vector_selector)
    if isinstance(expr, promql.VectorSelector):
        return of_selector(expr)
    if isinstance(expr, promql.Call):
        return of_call(expr)
    if isinstance(expr, promql.AggregateExpr):
        return of_aggregate(expr)
    assert isinstance(expr, promql.BinaryExpr), type(expr)
    return of_binary(expr)


def of_selector(expr: Any) -> set[str]:
    series = exposed().get(expr.name)
    assert series is not None, f"no metric {expr.name}"
    labels = set(series[0]) | SCRAPED
    for matcher in expr.matchers.matchers:
        assert matcher.name in labels, f"{expr.name} has no label {matcher.name}"
        if matcher.name in SCRAPED:
            continue
        values = {each[matcher.name] for each in series}
        if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
            known = matcher.value in values
        else:  # each alternative has to be a value, so that a misspelt one is seen
            known = all(
                any(re.fullmatch(part, value) for value in values)
                for part in matcher.value.split("|")
            )
        assert known, f"{expr.name}: no {matcher.name} is {matcher.value}, but {sorted(values)}"
    return labels


def of_call(expr: Any) -> set[str] | None:
    name, arguments = expr.func.name, list(expr.args)
    if name == "time":
        return None
    inner = [(each, labels_of(each)) for each in arguments]
    (vector, labels), *more = [each for each in inner if each[1] is not None]
    assert not more
    assert labels is not None
    if name == "absent":
        return {each.name for each in vector.matchers.matchers}
    if name in RISING:
        metric = vector.vector_selector.name
        assert metric.endswith(SAMPLES), f"{name}({metric}): it does not only rise"
    if name == "histogram_quantile":
        assert "le" in labels, "histogram_quantile needs le"
        return labels - {"le"}
    return labels


def of_aggregate(expr: Any) -> set[str]:
    labels = labels_of(expr.expr)
    assert labels is not None
    modifier = expr.modifier
    if modifier is None:
        return set()
    named = set(modifier.labels)
    assert named <= labels, f"by {named}: there are only {labels}"
    return named if modifier.type == promql.AggModifierType.By else labels - named


def of_binary(expr: Any) -> set[str] | None:
    left, right = labels_of(expr.lhs), labels_of(expr.rhs)
    if left is None or right is None:
        return left if right is None else right
    operator = str(expr.op)
    if operator == "or":
        return left | right
    matching = None if expr.modifier is None else expr.modifier.matching
    if matching is None:
        assert left == right, f"{left} and {right} never match"
    else:
        assert set(matching.labels) <= left & right
    return left


def parsed(text: str) -> Any:
    """A query as Grafana would send it."""
    for variable, value in (
        ("$__rate_interval", "1m"), ("$__range", "1h"), ("$__interval", "15s"), ("$instance", ".*"),
    ):  # fmt: skip
        text = text.replace(variable, value)
    assert "$" not in text, f"a variable that is not known: {text}"
    return promql.parse(text)


@cache
def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "twinkeel.json").read_text())  # type: ignore[no-any-return]


def queries() -> list[tuple[str, str, str]]:
    """(panel, query, legend) of the dashboard."""
    found = [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]
    for note in dashboard()["annotations"]["list"]:
        found.append((note["name"], note["expr"], note["textFormat"]))
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize(("panel", "query", "legend"), queries())
def test_a_query_of_the_dashboard_finds_something(panel: str, query: str, legend: str) -> None:
    labels = labels_of(parsed(query))
    assert labels is not None
    named = set(re.findall(r"{{\s*(\w+)\s*}}", legend))
    assert named <= labels, f"{panel}: the legend names {named - labels}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_can_fire_and_says_what_to_do(rule: dict[str, Any]) -> None:
    labels = labels_of(parsed(rule["expr"]))
    assert labels is not None
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert set(rule["annotations"]) == {"summary", "action"}
    for text in rule["annotations"].values():
        named = set(re.findall(r"\$labels\.(\w+)", text))
        assert named <= labels, f"{rule['alert']} names {named - labels}"


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(twinkeel_requests[5m])", "sum by (user) (twinkeel_queued)", "twinkeel_nothing",
        'twinkeel_queued{tier="turb"}', 'twinkeel_replica_state{state=~"ejected|dwon"}',
        "rate(twinkeel_queued[5m])", 'twinkeel_queued{sla="P0"}', "twinkeel_ttft_seconds",
        "sum by (tier) (twinkeel_queued) / sum(twinkeel_open_requests)",
        "histogram_quantile(0.9, sum(rate(twinkeel_ttft_seconds_bucket[5m])))",
    ],
)  # fmt: skip
def test_a_query_that_finds_nothing_is_found_out(wrong: str) -> None:
    with pytest.raises(AssertionError):
        labels_of(parsed(wrong))


def test_the_dashboard_is_whole() -> None:
    panels = dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    assert dashboard()["schemaVersion"] >= 39
    assert dashboard()["templating"]["list"][0]["type"] == "datasource"
    for panel in panels:
        if panel["type"] != "row":
            assert panel["targets"]
            for part in (panel, *panel["targets"]):
                assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variable = dashboard()["templating"]["list"][1]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
    assert metric in exposed()
    assert label in SCRAPED


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    for place in places:
        assert place["x"] + place["w"] <= 24
    for one, two in combinations(places, 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        above = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert beside or above, (one, two)


def test_each_alert_has_its_own_name() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


def test_whatever_is_exposed_is_looked_at_somewhere() -> None:
    text = json.dumps(dashboard()) + json.dumps(rules())
    for name in exposed():
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in text or not name.startswith("twinkeel_"), f"nobody looks at {name}"


def test_the_example_of_a_scrape_job_fits_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == ["twinkeel"]
    assert config["rule_files"] == ["rules.yaml"]
