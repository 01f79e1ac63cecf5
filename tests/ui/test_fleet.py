"""The slots and cards on the page Live: from canned answers, and what is unknown stays so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.fleet.contract import FleetView, SlotState
from controller.fleet.reload import OVER, Phase, ReloadView, Step
from controller.gpus.view import CardView
from dashboards.admin import RELOADED, Admin, AdminError, Reload
from dashboards.parts.live.cards import card_table, ordered
from dashboards.parts.live.slots import STATES, slot_table
from dashboards.words import Words
from tests.ui.canned import CARD, OTHER, SLICE, cards, document, local_fleet, slot, told
from tests.ui.test_live import everything, replica, status_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from streamlit.testing.v1 import AppTest

WORDS = Words.load()


@pytest.fixture
def live(
    app: Callable[..., AppTest], knows: Callable[..., None], tmp_path: Path
) -> Callable[..., str]:
    """All that the page says of what an admin API answers."""
    token = tmp_path / "admin.token"
    token.write_text("a-token")

    def shown(answers: dict[str, object], language: str = "en") -> str:
        usual = {"/status": status_of(replica()), "/openapi.json": {"paths": {}}}
        with told(usual | answers) as url:
            knows({"east": url}, {"east": str(token)})
            session = app("live", {"lang": [language]})
            assert not session.error
            return everything(session)

    return shown


def cells(html: str) -> list[list[str]]:
    """Of a table's body, without marks."""
    rows = re.findall(r"<tr>(.*?)</tr>", html.partition("<tbody>")[2], re.DOTALL)
    return [
        [re.sub(r"<[^>]*>", " ", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)]
        for row in rows
    ]


def test_slots_and_cards_are_shown(live: Callable[..., str]) -> None:
    shown = live({"/fleet": document(local_fleet(), cards())})
    for wanted in (
        "qwen3-8b-standby-0", "failed, waits to be started again", "hung", CARD, OTHER, SLICE,
        "slice 3g.40gb", "23771 of 143771 MB", "17 of 18", "two sockets", "61 of 87 °C",
        "512 of 700 W", "cuda=9.0", "last Xid: 79", "xid fatal", "uncorrected 0, corrected 3",
    ):  # fmt: skip
        assert wanted in shown, wanted


def test_they_are_shown_in_chinese(live: Callable[..., str]) -> None:
    shown = live({"/fleet": document(local_fleet(), cards())}, "zh")
    for wanted in ("槽位与显卡", "等待重启", "切片 3g.40gb", "23771 / 143771 MB"):
        assert wanted in shown, wanted


def test_servers_of_others_without_cards_are_one_quiet_line(live: Callable[..., str]) -> None:
    fleet = FleetView("static", (slot(0, name="quiet-name", state="outside"),))
    shown = live({"/fleet": document(fleet)})
    assert "(1) are run by someone else" in shown
    assert "quiet-name" not in shown
    assert WORDS.text("live.card.about", "en") not in shown


def test_servers_of_others_on_cards_that_are_watched_are_shown(live: Callable[..., str]) -> None:
    fleet = FleetView("static", (slot(0, name="quiet-name", state="outside"),))
    shown = live({"/fleet": document(fleet, cards()[:1])})
    assert "quiet-name" in shown
    assert CARD in shown


def test_processes_without_cards_say_so(live: Callable[..., str]) -> None:
    assert "knows no card" in live({"/fleet": document(local_fleet())})


def test_a_controller_that_does_not_tell_is_a_quiet_line(live: Callable[..., str]) -> None:
    assert WORDS.text("live.slot.not_told", "en") in live({})


def test_an_answer_of_another_version_is_a_sentence(live: Callable[..., str]) -> None:
    assert "is no admin API of this version" in live({"/fleet": {"fleet": {"kind": "local"}}})


# What a card does not tell


def test_a_card_that_tells_nothing_has_no_figure() -> None:
    (row,) = cells(card_table([CardView(OTHER, "NVIDIA A100")], {}))
    name, *rest = row
    assert "NVIDIA A100" in name
    assert re.findall(r"\d", " ".join(rest)) == [], rest
    memory, bandwidth, closeness, heat, _, labels, health = rest
    for cell, unknown in ((memory, 1), (bandwidth, 2), (closeness, 1), (heat, 3), (labels, 1)):
        assert cell.count("unknown") == unknown, cell
    assert "cannot be read" in health


def test_what_is_none_of_a_slice_is_told_by_its_card() -> None:
    rows = cells(card_table(cards(), {0: "qwen3-8b-0", 1: "qwen3-8b-1"}))
    assert [row[5].strip() for row in rows] == ["qwen3-8b-0", "nothing", "qwen3-8b-1"]
    part = rows[2]
    assert "9000 of 40192 MB" in part[1]
    assert [part[column].strip() for column in (2, 3, 4, 6)] == ["as its card"] * 4
    assert part[7].strip() == "its card is broken"
    (_, alone) = cells(card_table([msgspec.structs.replace(cards()[1], broken=""), cards()[2]], {}))
    assert alone[7].strip() == "well"


def test_a_true_zero_is_a_zero() -> None:
    card = CardView(CARD, "x", memory_total_mb=10, memory_free_mb=0, pcie_rx_mb_s=0, nvlinks=0)
    (row,) = cells(card_table([card], {}))
    assert "free: 0 of 10 MB" in row[1]
    assert "PCIe in 0, out unknown" in row[2]
    assert "no NVLink" in row[3]


def test_slices_stand_beneath_their_card() -> None:
    shuffled = cards()[::-1]
    lost = CardView("MIG-9", "x", parent="GPU-9")
    assert [card.uuid for card in ordered([lost, *shuffled])] == [OTHER, SLICE, CARD, "MIG-9"]


def test_what_comes_from_elsewhere_is_no_html() -> None:
    evil = "<script>x</script>"
    card = CardView(
        evil, evil, near=((evil, evil),), labels=(evil,), broken=evil, recovery=evil,
        clocks=(evil,), read_ms_ago=1, profile=evil, parent="",
    )  # fmt: skip
    bad = slot(0, name=evil, model=evil, version=evil, why=evil, domain=evil, gpus=(evil,))
    for made in (
        card_table([card, msgspec.structs.replace(card, parent=evil)], {0: evil}),
        slot_table([bad]),
    ):
        assert "<script" not in made


def test_every_state_of_a_slot_has_a_colour_and_words() -> None:
    states = set(SlotState.__args__)  # type: ignore[attr-defined]
    assert set(STATES) == states
    assert {f"live.slot.states.{state}" for state in states} <= set(WORDS.texts)


# Hot reloads


def reload_of(phase: Phase, **more: Any) -> ReloadView:
    given: dict[str, Any] = {
        "model": "qwen3-8b", "version": "v2", "before": "v1", "phase": phase, "why": "",
        "took_s": 12.0, "new": 1, "old": 2, "open_on_old": 7, "confidence": -1.0,
        "confidence_before": -1.0, "steps": (Step(0.5, "qwen3-8b-2 is started"),),
    }  # fmt: skip
    return ReloadView(**{**given, **more})


def test_a_reload_that_is_under_way_is_shown(live: Callable[..., str]) -> None:
    path = "/fleet/models/qwen3-8b/reload"
    shown = live({"/fleet": document(local_fleet()), path: reload_of("verifying")})
    for wanted in ("hot reload", "v1 → v2", "verifying", "1 new, 2 old, 7 open on the old"):
        assert wanted in shown, wanted
    assert "qwen3-8b-2 is started" in shown
    over = live({"/fleet": document(local_fleet()), path: reload_of("given up", why="no room")})
    assert "Last hot reload: qwen3-8b v1 → v2, given up after 12 s: no room" in over


def test_the_client_reads_reloads_as_the_controller_tells_them() -> None:
    seen = msgspec.json.decode(msgspec.json.encode(reload_of("done")), type=Reload)
    assert (seen.over, seen.steps[0].text) == (True, "qwen3-8b-2 is started")
    assert RELOADED == OVER
    with told({"/fleet/models/org%2Fmodel/reload": reload_of("warming")}) as url:
        admin = Admin(url, "x")
        found = admin.reload("org/model")
        assert found is not None
        assert (found.version, found.over) == ("v2", False)
        assert admin.reload("other") is None
        with pytest.raises(AdminError, match="/fleet"):
            admin.fleet()


def test_a_real_controller_tells_of_its_fleet(
    app: Callable[..., AppTest], controller: Any, knows: Callable[..., None]
) -> None:
    seen = Admin(controller.admin_url, controller.admin_token).fleet()
    assert seen.fleet.kind == "static"
    assert [each.state for each in seen.fleet.slots] == ["outside"]
    knows({"east": controller.admin_url}, {"east": str(controller.data / "admin.token")})
    assert "(1) are run by someone else" in everything(app("live"))
