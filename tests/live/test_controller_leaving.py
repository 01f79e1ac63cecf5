"""Callers that leave, in every phase: vLLM is free again within a second."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.controller.asking import CHAT, chat
from tests.controller.processes import eventually
from tests.controller.stories import read_story
from tests.controller.wire import post

if TYPE_CHECKING:
    from tests.controller.processes import Controller, Controllers
    from tests.live.server import Vllm

pytestmark = pytest.mark.live

FREE_S_MOST = 1.0


def _send(controller: Controller, document: dict[str, object]) -> socket.socket:
    parts = urlsplit(controller.url)
    line = socket.create_connection((parts.hostname, parts.port), 30)
    line.sendall(post(CHAT, json.dumps(document).encode()))
    return line


def _read_some(line: socket.socket) -> None:
    """Until tokens come."""
    got = b""
    while got.count(b"data:") < 3:
        got += line.recv(65_536)


def _free_within(server: Vllm, controller: Controller) -> float:
    """Seconds until neither knows of any request."""
    began_s = time.monotonic()
    eventually("vLLM is idle", lambda: server.busy == 0, 10.0)
    eventually("none is open", lambda: controller.status()["open_requests"] == 0, 10.0)
    return time.monotonic() - began_s


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["before_the_first_byte", "midway"])
def test_a_caller_that_leaves_frees_the_engine(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers, phase: str, stream: bool
) -> None:
    server = vllm[0]
    controller = controllers([server.upstream(profile)], policy=patient)
    if phase == "midway":
        documents = [chat("tiny", f"go on {n}", 2000, stream=stream) for n in range(8)]
    else:
        documents = [chat("tiny", f"{time.time()} " + "one two " * 1500, 500, stream=stream)]
    lines = [_send(controller, document) for document in documents]
    try:
        eventually("vLLM works on them", lambda: server.busy == len(documents), 10.0)
        if phase == "midway" and stream:
            for line in lines:
                _read_some(line)
        elif phase == "midway":
            time.sleep(1.0)
    finally:
        for line in lines:
            line.close()
    assert _free_within(server, controller) <= FREE_S_MOST
    controller.stop()
    story = read_story(controller.records())
    outcomes = [request.settled[0].outcome for request in story.requests.values()]
    assert outcomes == ["cancelled"] * len(documents)
    assert not story.rotated  # it says nothing about the server


def test_a_caller_that_leaves_the_queue_never_reaches_vllm(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers
) -> None:
    server = vllm[0]
    controller = controllers([server.upstream(profile, max_num_seqs=1)], policy=patient)
    first = _send(controller, chat("tiny", "go on", 3000))
    _read_some(first)
    waiting = [_send(controller, chat("tiny", f"wait {n}", 50)) for n in range(5)]
    eventually("five wait", lambda: controller.status()["open_requests"] == 6)
    assert server.busy == 1
    for line in waiting:
        line.close()
    began_s = time.monotonic()
    eventually("they are gone", lambda: controller.status()["open_requests"] == 1)
    assert time.monotonic() - began_s <= FREE_S_MOST
    assert server.busy == 1
    first.close()
    assert _free_within(server, controller) <= FREE_S_MOST
    controller.stop()
    requests = read_story(controller.records()).requests.values()
    assert [request.tries for request in requests] == [[0], *([[]] * 5)]
    assert {request.settled[0].outcome for request in requests} == {"cancelled"}
