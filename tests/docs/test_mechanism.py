"""The worked example of docs/mechanism.md passes the suite that every mechanism passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.docs.strikes import Strikes
from tests.docs.strikes_section import Strikes as Section
from tests.policy_support import MS, S
from tests.unit import test_policy_conformance as suite

if TYPE_CHECKING:
    import random

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mechanism.md").read_text(encoding="utf-8")
USERS = ("ann", "bob", "cid", "dan")


class UseStrikes(suite.Use):
    """What the suite needs to know: how it is used."""

    def __init__(self, mechanism: Any, seed: int) -> None:
        super().__init__(mechanism, seed)
        self.calls = [self.observe, self.observe, self.observe, self.ask, self.tick]

    def observe(self, now_ns: int) -> object:
        user, rejected = self.rng.choice(USERS), self.rng.random() < 0.8
        return list(self.mechanism.observe(now_ns, user, rejected))

    def ask(self, now_ns: int) -> object:
        return [self.mechanism.held(now_ns, user) for user in USERS]


def section_of(name: str, rng: random.Random | None = None) -> Section:
    del name
    least = 3 if rng is None else rng.choice((1, 3, 20))
    return Section(rejections_least=least, hold_ms=700, users_max=3)


CONFORMANCE = (
    suite.test_the_protocol_is_there,
    suite.test_a_fresh_state_is_a_round_trip,
    suite.test_a_state_has_no_floats_and_survives_the_wire,
    suite.test_a_state_is_apart_from_what_it_was_taken_from,
    suite.test_a_loaded_state_goes_on_alike_with_another_clock,
    suite.test_its_size_keeps_to_its_bound,
    suite.test_after_a_tick_the_deadline_lies_later,
)


@pytest.mark.parametrize("test", CONFORMANCE, ids=lambda test: test.__name__)
def test_the_example_conforms(test: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.USES, "strikes", UseStrikes)
    monkeypatch.setattr(suite, "section_of", section_of)
    monkeypatch.setattr(suite, "made", lambda _, section: Strikes(section))
    test("strikes")


@given(st.lists(st.tuples(st.integers(0, 2 * S), st.sampled_from(USERS), st.booleans())))
def test_who_sends_good_requests_is_never_held(steps: list[tuple[int, str, bool]]) -> None:
    """The property: held is only who was rejected that often in a row within the memory."""
    strikes, now_ns, rows = Strikes(Section(rejections_least=3, hold_ms=1000)), 0, dict[str, int]()
    until_ns = dict[str, int]()
    for gap_ns, user, rejected in steps:
        now_ns += gap_ns
        strikes.ticked(now_ns)
        for each in [each for each in until_ns if until_ns[each] <= now_ns]:
            del until_ns[each], rows[each]
        told = strikes.observe(now_ns, user, rejected)
        rows[user] = min(rows.get(user, 0) + 1, 3) if rejected else 0
        if rows[user] >= 3 and user not in until_ns:
            until_ns[user] = now_ns + 1000 * MS
            assert told
        assert {each for each in USERS if strikes.held(now_ns, each)} == set(until_ns)


def blocks(info: str) -> list[str]:
    return re.findall(rf"^```{info}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_shows_these_files() -> None:
    shown = blocks("python")
    for name in ("strikes_section.py", "strikes.py"):
        assert (Path(__file__).parent / name).read_text(encoding="utf-8") in shown, (
            f"docs/mechanism.md does not show tests/docs/{name} as it is"
        )


def test_the_lines_that_the_page_quotes_are_in_the_code() -> None:
    """Quoted as `text`: a first line with the file's name, then lines of it."""
    quoted = [block.splitlines() for block in blocks("text") if block.startswith("# policy/")]
    assert len(quoted) >= 2
    for name, *lines in quoted:
        code = (ROOT / name.removeprefix("# ")).read_text(encoding="utf-8")
        missing = [line for line in lines if line.strip() not in code]
        assert not missing, f"{name}: {missing}"


def test_times_in_its_state_are_what_is_left() -> None:
    strikes = Strikes(Section(rejections_least=2, hold_ms=500))
    strikes.observe(0, "ann", rejected=True)
    assert strikes.observe(100 * MS, "ann", rejected=True)
    assert strikes.held(599 * MS, "ann")
    assert not strikes.held(600 * MS, "ann")
    assert msgspec.to_builtins(strikes.state(200 * MS)) == [[("ann", 2, 400 * MS)]]
