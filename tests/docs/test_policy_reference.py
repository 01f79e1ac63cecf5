"""The page of the policy file's keys says what the schema says."""

from __future__ import annotations

from policy.parameters import Parameters, render
from tests.docs.policy_reference import PAGE, keys, page


def test_it_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "docs/policy-reference.md is not what the schema says: run"
        " `python -m tests.docs.policy_reference`"
    )


def test_every_key_that_a_rendered_policy_has_is_there() -> None:
    """By another way than the page's own: the YAML that `twinkeel policy show` prints."""
    text = PAGE.read_text(encoding="utf-8")
    rendered = render(Parameters(), comments=False)
    found = {line.split(":")[0].strip(" -") for line in rendered.splitlines() if ":" in line}
    assert len(found) > 150
    missing = {key for key in found if f"`{key}`" not in text}
    assert not missing


def test_no_key_is_without_a_reason() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert all(len(row.split(" | ")[-1].strip(" |")) >= 10 for row in rows)
    assert len(keys()) >= len(rows)
