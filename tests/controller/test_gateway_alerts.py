"""Alerts reach a webhook: what happened, the figures, what was done, and each trouble only once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.controller.asking import ask_all, chat
from tests.controller.inprocess import story_of
from tests.controller.processes import MODEL, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Twin


def test_a_broken_server_is_told_once(
    twins: list[Twin], tmp_path: Path, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, told = hook

    async def play(gateway: str) -> None:
        twins[0].fault("http_500")
        for _ in range(25):  # it is tried again and again, and ejected again and again
            answers = await ask_all(gateway, [chat(MODEL, "?", 4)] * 2)
            assert all(answer.good for answer in answers)

    story = story_of([twin.url for twin in twins], tmp_path, play, webhook=url)
    assert story.alerts, "nothing went wrong"
    eventually("the alert is there", lambda: told)
    keys = [alert["key"] for alert in told]
    assert len(keys) == len(set(keys)) == len(story.alerts)
    name = f"replica {urlsplit(twins[0].url).netloc}"
    (alert,) = [alert for alert in told if alert["key"] == name]
    assert "ejected" in alert["cause"]
    assert alert["figures"]
    assert all(isinstance(value, int) for value in alert["figures"].values())
    assert alert["action"] == "out of rotation"
    assert alert["policy"] == "stable"
    assert alert["at"].endswith("+00:00")
