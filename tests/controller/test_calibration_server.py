"""What a server says of itself, and what is told where it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from controller.calibration import CalibrationError, record_load
from controller.calibration.server import KEY_VARIABLE, Metrics, ModelCard, Server

PAGE = (
    'vllm:num_requests_running{{engine="{0}"}} 0.0\n'
    'vllm:num_requests_waiting{{engine="{0}"}} 0.0\n'
    'vllm:cache_config_info{{block_size="16",engine="{0}",num_gpu_blocks="512"}} 1.0\n'
)
STEPS = 'twinkeel_steps_info{engine="0",life="ab",path="/tmp/a\\\\n/steps-1-0.jsonl"} 1.0\n'


def asked(path: str = "", engines: int = 1, folder: Path | None = None) -> Metrics | ModelCard:
    """What it says to the address with that path; with ``folder``, a load is begun."""
    text = "".join(PAGE.format(number) for number in range(engines)) + STEPS

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text)

    async def models(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer s3cret":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 2048}]})

    async def run() -> Metrics | ModelCard:
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}{path}"
        try:
            if folder is not None:
                (folder / "vllm.log").touch()
                await asyncio.to_thread(record_load, url, folder, log=folder / "vllm.log")
            async with Server(url) as server:
                found = await server.metrics()
                return found if path or engines > 1 else await server.model()
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_the_key_is_read_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    assert asked() == ModelCard("tiny", None, 2048)
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(
        CalibrationError, match=rf"refuses the API key \(status 401\).*{KEY_VARIABLE}"
    ):
        asked()
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(CalibrationError, match=rf"wants an API key \(status 401\).*{KEY_VARIABLE}"):
        asked()
    monkeypatch.setenv(KEY_VARIABLE, "two\r\nlines")
    with pytest.raises(CalibrationError, match=KEY_VARIABLE):
        asked()


def test_an_address_with_a_path_is_told_as_such() -> None:
    with pytest.raises(CalibrationError, match=r"ends in /v1: write http://127\.0\.0\.1:\d+$"):
        asked("/v1/")
    with pytest.raises(CalibrationError, match=r"status 404.*without a path"):
        asked("/somewhere")


def test_several_engines_are_refused_whatever_the_records(tmp_path: Path) -> None:
    found = asked(engines=2)
    assert isinstance(found, Metrics)
    assert found.engines == 2
    assert found.steps_paths == (Path("/tmp/a\\n/steps-1-0.jsonl"),)
    with pytest.raises(CalibrationError, match="2 engines are behind"):
        asked(engines=2, folder=tmp_path)
