"""The tuned policy as a file: the parent's, with the changed values and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from policy.files import load_policy, parse_policy
from twin.tune.edit import diff, edited
from twin.tune.space import Space

MINE = """\
# Ours, since spring.
schema: 1
name: mine
tiers: {lend_wait_ms: 5, aging_ms: 3000}  # asked for by search
breakers:
  rules:
    - {name: errors, kinds: [timeout], share_permille: 5}
    - name: lost
      kinds: [replica_lost]
      share_permille: 7  # seven
inflight:
  kv_permille: 900  # measured in May

# The end.
"""


def changed(text: str, changes: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Lines that the edit takes away and adds."""
    parent = parse_policy(text, "mine")
    wanted = Space(parent, (), "mine").policy(changes)
    after = edited(text, wanted, changes, before)
    assert parse_policy(after, "after") == wanted
    shown = diff(text, after, "a", "b").splitlines()
    return [line for line in shown if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_a_value_is_changed_where_it_stands_and_comments_stay() -> None:
    assert changed(MINE, {"inflight.kv_permille": 950}, {}) == [
        "-  kv_permille: 900  # measured in May",
        "+  kv_permille: 950  # measured in May",
    ]
    assert changed(MINE, {"breakers.rules.lost.share_permille": 9}, {}) == [
        "-      share_permille: 7  # seven",
        "+      share_permille: 9  # seven",
    ]


@pytest.mark.parametrize(
    ("key", "value", "before", "lines"),
    [
        ("inflight.reserve_permille", 70, 50, ["+  reserve_permille: 70  # 50 before"]),
        ("shedding.enabled", False, True, ["+shedding:", "+  enabled: false  # true before"]),
        ("breakers.rules.lost.open_ms", 9, 2000, ["+      open_ms: 9  # 2000 before"]),
        (
            "tiers.aging_ms", 4000, 3000,
            ["-tiers: {lend_wait_ms: 5, aging_ms: 3000}  # asked for by search",
             "+tiers: {lend_wait_ms: 5, aging_ms: 4000}  # asked for by search"],
        ),
        (
            "tiers.boost_permille", 7, 100,
            ["-tiers: {lend_wait_ms: 5, aging_ms: 3000}  # asked for by search",
             "+tiers: {boost_permille: 7, lend_wait_ms: 5, aging_ms: 3000}  # asked for by search"],
        ),
    ],
)  # fmt: skip
def test_what_the_file_does_not_write_out_is_added_with_what_it_was(
    key: str, value: Any, before: Any, lines: list[str]
) -> None:
    assert changed(MINE, {key: value}, {key: before}) == lines


def test_a_file_that_cannot_be_edited_is_written_anew() -> None:
    text = "schema: 1\nname: mine\ntiers: &t\n  aging_ms: 3000\ninflight: {}\n"
    changes = {"inflight.kv_permille": 950}
    parent = parse_policy(text, "mine")
    wanted = Space(parent, (), "mine").policy(changes)
    after = edited(text, wanted, changes, {})
    assert parse_policy(after, "after") == wanted
    assert "# Per mille of the replica's KV tokens" in after


def test_many_changes_of_a_preset_at_once() -> None:
    changes = {"tiers.lend_wait_ms": 77, "tiers.aging_ms": 5, "shedding.enabled": False}
    parent = load_policy("stable")
    wanted = Space(parent, (), "stable").policy(changes)
    after = edited("schema: 1\nname: stable\n", wanted, changes, dict.fromkeys(changes, 1))
    assert after.splitlines()[2:5] == [
        "tiers:", "  lend_wait_ms: 77  # 1 before", "  aging_ms: 5  # 1 before",
    ]  # fmt: skip
