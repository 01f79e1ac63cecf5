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
WORKS_S = 120.0
TOKENS = "vllm:generation_tokens_total"
TRIES = 3
"""A machine that is busy with something else for a second is so now and then. A request that goes
on in vLLM is there for half a minute, each time."""


def _send(controller: Controller, document: dict[str, object]) -> socket.socket:
    parts = urlsplit(controller.url)
    line = socket.create_connection((parts.hostname, parts.port), WORKS_S)
    line.sendall(post(CHAT, json.dumps(document).encode()))
    return line


def _read_some(line: socket.socket) -> None:
    """Until tokens come."""
    got = b""
    while got.count(b"data:") < 3:
        data = line.recv(65_536)
        assert data, got
        got += data


def _free_within(server: Vllm, controller: Controller) -> float:
    """Seconds until neither knows of any request."""
    began_s = time.monotonic()
    eventually("vLLM is idle", lambda: server.busy == 0, WORKS_S)
    eventually("none is open", lambda: controller.status()["open_requests"] == 0, WORKS_S)
    return time.monotonic() - began_s


def _come_and_go(
    server: Vllm, controller: Controller, documents: list[dict[str, object]], *, midway: bool
) -> None:
    """Callers who leave, midway or as soon as vLLM works on what they want."""
    made = server.samples()[TOKENS]
    lines = [_send(controller, document) for document in documents]
    try:
        eventually("vLLM works on them", lambda: server.busy == len(documents), WORKS_S)
        if midway and documents[0]["stream"]:
            for line in lines:
                _read_some(line)
        elif midway:
            some = made + 3 * len(documents)
            eventually("tokens come", lambda: server.samples()[TOKENS] >= some, WORKS_S)
    finally:
        for line in lines:
            line.close()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["before_the_first_byte", "midway"])
def test_a_caller_that_leaves_frees_the_engine(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers, phase: str, stream: bool
) -> None:
    server = vllm[0]
    controller = controllers([server.upstream(profile)], policy=patient)
    sent = 0
    taken_s: list[float] = []
    while len(taken_s) < TRIES and min(taken_s, default=FREE_S_MOST + 1) > FREE_S_MOST:
        if phase == "midway":
            documents = [chat("tiny", f"go on {n}", 2000, stream=stream) for n in range(8)]
        else:
            documents = [chat("tiny", f"{time.time()} " + "one two " * 1500, 500, stream=stream)]
        sent += len(documents)
        _come_and_go(server, controller, documents, midway=phase == "midway")
        taken_s.append(_free_within(server, controller))
    assert min(taken_s) <= FREE_S_MOST, taken_s
    controller.stop()
    story = read_story(controller.records())
    outcomes = [request.settled[0].outcome for request in story.requests.values()]
    assert outcomes == ["cancelled"] * sent
    assert not story.rotated  # it says nothing about the server


def test_a_caller_that_leaves_the_queue_never_reaches_vllm(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers
) -> None:
    server = vllm[0]
    controller = controllers([server.upstream(profile, max_num_seqs=1)], policy=patient)
    taken_s: list[float] = []
    while len(taken_s) < TRIES and min(taken_s, default=FREE_S_MOST + 1) > FREE_S_MOST:
        first = _send(controller, chat("tiny", "go on", 3000))
        _read_some(first)
        waiting = [_send(controller, chat("tiny", f"wait {n}", 50)) for n in range(5)]
        eventually("five wait", lambda: controller.status()["open_requests"] == 6)
        assert server.busy == 1
        for line in waiting:
            line.close()
        began_s = time.monotonic()
        eventually("they are gone", lambda: controller.status()["open_requests"] == 1)
        gone_s = time.monotonic() - began_s
        assert server.busy == 1
        first.close()
        taken_s.append(max(gone_s, _free_within(server, controller)))
    assert min(taken_s) <= FREE_S_MOST, taken_s
    controller.stop()
    requests = read_story(controller.records()).requests.values()
    assert [request.tries for request in requests] == [[0], *([[]] * 5)] * len(taken_s)
    assert {request.settled[0].outcome for request in requests} == {"cancelled"}
