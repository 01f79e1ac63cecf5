"""Who may call, how much and how slowly; and that no text is kept anywhere."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pyarrow.parquet as pq
import pytest

from controller.gateway.keys import Entry, add_entry, digest_of, new_key
from tests.controller.asking import CHAT, Answer, ask, ask_all, chat, session
from tests.controller.processes import MODEL, http
from tests.controller.stories import read_story
from tests.controller.wire import exchange, messages, post

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controllers, Twin

MARKER = "xyzzy-plugh-secret-marker"


def test_callers_need_a_key_and_its_tenant_is_known(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    key, keys = new_key(), tmp_path / "keys.yaml"
    add_entry(keys, Entry(digest_of(key), "support", "P0", "chat"))
    assert key not in keys.read_text()
    controller = controllers([twins[0].url], keys=str(keys))

    async def run() -> list[Answer]:
        async with session() as client:
            given = [{}, {"Authorization": "Bearer twk_wrong"}, {"Authorization": f"Bearer {key}"}]
            return [await ask(client, controller.url, chat(MODEL, "?", 4), each) for each in given]

    none, wrong, right = asyncio.run(run())
    for refused in (none, wrong):
        assert refused.status == 401
        assert refused.error["code"] == "invalid_api_key"
        assert refused.error["type"] == "authentication_error"
    assert right.good
    assert http("GET", f"{controller.url}/v1/models")[0] == 401
    controller.stop()
    (request,) = read_story(controller.records()).requests.values()
    assert (request.arrived.sla, request.arrived.line) == ("P0", "chat")
    assert request.arrived.user == "support"


def test_the_admin_api_is_on_a_port_of_its_own_with_a_token(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twins[0].url])
    for path in ("/status", "/policy", "/log", "/alerts"):
        assert http("GET", f"{controller.admin_url}{path}")[0] == 401
        wrong = {"Authorization": "Bearer " + "x" * len(controller.admin_token)}
        assert http("GET", f"{controller.admin_url}{path}", headers=wrong)[0] == 401
        assert controller.admin("GET", path)[0] == 200
        assert http("GET", f"{controller.url}{path}")[0] == 404, "never on the public port"
    assert http("POST", f"{controller.admin_url}/drain")[0] == 401
    token = controller.data / "admin.token"
    assert token.stat().st_mode & 0o077 == 0
    assert controller.admin_token not in controller.output.read_text()


def test_bounds_on_what_callers_send(twins: list[Twin], controllers: Controllers) -> None:
    limits = {"body_bytes_most": 20_000, "header_bytes_most": 4096, "body_s_most": 0.5}
    controller = controllers([twins[0].url], limits=limits)
    small = json.dumps(chat(MODEL, "?", 4, stream=False)).encode()
    large = json.dumps(chat(MODEL, "x" * 30_000, 4)).encode()

    def status(request: bytes) -> int:
        (answer,) = messages(exchange(controller.url, request))
        code = int(answer.head.split()[1])
        if code != 200 and answer.headers["content-type"].startswith("application/json"):
            assert json.loads(answer.body)["error"]["message"]
        return code

    assert status(post(CHAT, small)) == 200
    assert status(post(CHAT, large)) == 413
    chunked = b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in (large[:15_000], large[15_000:])
    )
    head = post(CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert status(head + chunked + b"0\r\n\r\n") == 413
    assert status(post(CHAT, small, "x-long: " + "y" * 6000)) in (400, 431)

    parts = urlsplit(controller.url)
    with socket.create_connection((parts.hostname, parts.port), 10) as slow:
        request = post(CHAT, small)
        slow.sendall(request[:-10])
        began_s = time.monotonic()
        answer = slow.recv(65_536)
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert time.monotonic() - began_s < 3.0
    assert status(post(CHAT, small)) == 200
    assert twins[0].busy == 0


def test_a_caller_cannot_choose_the_server(twins: list[Twin], controllers: Controllers) -> None:
    """Addresses come from the configuration only."""
    controller = controllers([twins[0].url])
    before = twins[1].state()["requests"]
    target = urlsplit(twins[1].url).netloc
    body = json.dumps(chat(MODEL, "?", 4, stream=False)).encode()
    for request in (
        post(CHAT, body).replace(b"Host: test", b"Host: " + target.encode()),
        post(f"{twins[1].url}{CHAT}", body),
        post(CHAT, body, f"x-forwarded-host: {target}", f"x-twinkeel-upstream: {twins[1].url}"),
    ):
        exchange(controller.url, request)
    assert twins[1].state()["requests"] == before


@pytest.mark.parametrize("confidence", [False, True])
def test_no_text_is_kept(twins: list[Twin], controllers: Controllers, confidence: bool) -> None:
    """Neither prompts nor answers: not in logs, traces, metrics, or what it prints."""
    controller = controllers([twin.url for twin in twins], features={"confidence": confidence})
    twins[0].fault("cut", share=0.3, after_tokens=3)  # errors must not show it either
    asked = [chat(MODEL, f"{MARKER} {n} " * 200, 12, stream=n % 2 == 0) for n in range(8)]
    asked += [{"model": MODEL, "messages": MARKER}, {"model": MODEL, MARKER: MARKER}]
    answers = asyncio.run(ask_all(controller.url, asked))
    said = {word for answer in answers[:8] if answer.good for word in [answer.text.strip()[:40]]}
    assert said
    seen = [controller.metrics().encode(), controller.admin("GET", "/status")[1]]
    controller.stop()
    files = [path for path in controller.folder.rglob("*") if path.is_file()]
    assert len(files) >= 4
    seen += [path.read_bytes() for path in files]
    recordings = [path for path in files if path.suffix == ".parquet"]
    assert recordings
    seen += [repr(pq.read_table(path).to_pylist()).encode() for path in recordings]  # unpacked
    for content in seen:
        assert MARKER.encode() not in content
        for text in said:
            assert text.encode() not in content
