"""Alerts: told once, and again only after it was quiet."""

from __future__ import annotations

import msgspec

from policy.alerts import Alerts
from policy.decisions import Alert
from policy.parameters.alerts import Alerts as Section
from tests.policy_support import MS, S, assert_integers


def test_the_same_trouble_is_told_once() -> None:
    alerts = Alerts(Section())
    told = alerts.raised(0, "replica 0", "silent", (("replica", 0),), "ejected")
    assert told == (Alert("replica 0", "silent", (("replica", 0),), "ejected"),)
    for minute in range(1, 60):
        assert alerts.raised(minute * 60 * S, "replica 0", "silent") == ()
    assert len(alerts.raised(60 * S, "replica 1", "silent")) == 1


def test_after_a_quiet_while_it_is_told_again() -> None:
    alerts = Alerts(Section())
    alerts.raised(0, "a", "x")
    assert alerts.raised(300 * S - 1, "a", "x") == ()
    assert len(alerts.raised(600 * S - 1, "a", "x")) == 1


def test_of_too_many_the_one_quiet_longest_is_forgotten() -> None:
    alerts = Alerts(Section(keys_max=2))
    for at_ms, key in enumerate("abacab"):
        alerts.raised(at_ms * MS, key, "x")
    assert alerts.size() == alerts.size_most() == 2
    assert alerts.raised(6 * MS, "a", "x") == ()
    assert len(alerts.raised(7 * MS, "c", "x")) == 1


def test_a_state_goes_on_with_another_clock() -> None:
    alerts = Alerts(Section())
    alerts.raised(7 * S, "b", "x")
    alerts.raised(8 * S, "a", "x")
    state = alerts.state(9 * S)
    assert_integers(msgspec.msgpack.decode(msgspec.msgpack.encode(state)))
    later = Alerts(Section())
    later.load(state, 1000 * S)
    assert later.state(1000 * S) == state
    assert later.raised(1297 * S, "b", "x") == ()
    assert len(later.raised(1299 * S, "a", "x")) == 1
    assert (later.deadline_ns(), later.ticked(0)) == (None, ())
