"""A controller in front of a small cluster whose pods are served twins, each a process of its own,
under load: what its pods and its API server do costs no request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import yaml

from tests.controller.deploying import load_on
from tests.controller.processes import MODEL, PROFILE, ROOT, audit, settings_for, start_controller
from tests.fleet.conformance import until
from tests.fleet.kube_api import NAMESPACE, TOKEN, Deployment, KubeApi
from tests.fleet.support import patient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from typing import Any

    from tests.controller.processes import Controller

WITHIN_S = 90.0
RATE = 12.0
SILENT_MS = 3000
"""Another pod that has no turn for so long is not taken for the one that hangs."""


class TwinPod:
    """A served twin on a pod's address; it finishes what it has when it is told to end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, ip: str, port: int) -> TwinPod:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twinkeel", "twin", "serve", "--profile", PROFILE, "--host", ip,
            "--port", str(port), "--shutdown-timeout", "20",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        assert process.stdout is not None
        said = await process.stdout.readline()
        assert said.startswith(b"twin serving "), said
        return cls(process)

    async def end(self, grace_s: float) -> None:
        """As a kubelet does: SIGTERM, and SIGKILL when the grace is over."""
        self.process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class TwinCluster(KubeApi):
    """Its kubelets end pods as they ask to be ended."""

    async def ending(self, pod: dict[str, Any], grace_s: float) -> None:
        server = self.servers.get(pod["metadata"]["uid"])
        if isinstance(server, TwinPod):
            await server.end(grace_s)

    def process(self, name: str) -> asyncio.subprocess.Process:
        found: asyncio.subprocess.Process = self.server(name).process
        return found


@contextlib.asynccontextmanager
async def serving(
    folder: Path, silent_ms: int = 30_000
) -> AsyncIterator[tuple[TwinCluster, Controller]]:
    """Two pods up to three, and a controller that has found them."""
    api = TwinCluster(Deployment("vllm", 2, serve=TwinPod.start))
    await api.start()
    (folder / "token").write_text(TOKEN)
    model = {
        "versions": {"v1": {"deployment": "vllm", "loads": MODEL}}, "version": "v1",
        "replicas_least": 2, "replicas_most": 4, "port": api.pod_port,
    }  # fmt: skip
    cluster = {
        "api": api.url, "namespace": NAMESPACE, "token_file": str(folder / "token"),
        "models": {MODEL: model},
    }  # fmt: skip
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump({"schema": 1, "kubernetes": cluster}))
    settings = settings_for([], folder, fleet=str(file), policy=patient(folder, silent_ms))
    controller: Controller | None = None
    try:
        await until("pods are ready", lambda: len(api.ready("vllm")) == 2, WITHIN_S)
        controller = await asyncio.to_thread(start_controller, settings, folder)
        await all_up(api, controller)
        yield api, controller
    finally:
        if controller is not None:
            assert await asyncio.to_thread(controller.stop) == 0
        await api.stop()
    assert not controller.complaints()
    audit(controller.data)


async def up(controller: Controller) -> set[str]:
    """Names of the pods that take requests."""
    status = await asyncio.to_thread(controller.status)
    _, body = await asyncio.to_thread(controller.admin, "GET", "/fleet")
    there = {each["id"] for each in status["replicas"] if each["up"]}
    slots = json.loads(body)["fleet"]["slots"]
    return {each["name"] for each in slots if each["replica"] in there}


async def all_up(api: KubeApi, controller: Controller) -> None:
    """The controller has found the pods that there are now."""
    async with asyncio.timeout(WITHIN_S):
        while await up(controller) != set(api.ready("vllm")):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


def test_pods_that_are_replaced_one_by_one_cost_no_request(tmp_path: Path) -> None:
    """As ``kubectl rollout restart`` does it, with an API server that goes away in between."""

    async def run() -> None:
        async with serving(tmp_path) as (api, controller), load_on(controller.url, RATE) as load:
            first = api.ready("vllm")
            for name in first:
                api.delete(name)
                await until(
                    "another is ready", lambda name=name: len(api.ready("vllm")) == 2, WITHIN_S
                )
                await all_up(api, controller)
                await api.go_away()
                await asyncio.sleep(0.5)
                assert len(await up(controller)) >= 2
                await api.start()
            await until("the old are gone", lambda: not set(first) & set(api.pods), WITHIN_S)
            await all_up(api, controller)
            so_far = len(load.answers)
            await until("others are answered", lambda: len(load.answers) > so_far + 25, WITHIN_S)
            bad = [answer for answer in load.answers if not answer.good]
            assert not bad, [(answer.status, answer.trouble, answer.body[:200]) for answer in bad]

    asyncio.run(run())


def test_a_pod_that_hangs_is_isolated_deleted_and_replaced(tmp_path: Path) -> None:
    """The policy finds it out; the cluster is told; the Deployment makes another."""

    async def run() -> None:
        async with (
            serving(tmp_path, SILENT_MS) as (api, controller),
            load_on(controller.url, RATE) as load,
        ):
            await until("they are answered", lambda: len(load.answers) > 10, WITHIN_S)
            name = api.ready("vllm")[0]
            os.kill(api.process(name).pid, signal.SIGSTOP)
            await until("it is gone", lambda: name not in api.pods, WITHIN_S)
            await until("another is ready", lambda: len(api.ready("vllm")) >= 2, WITHIN_S)
            await all_up(api, controller)
            await until("they are answered", lambda: len(load.answers) > 60, WITHIN_S)
            deleted = {path.rpartition("/")[2]: body["gracePeriodSeconds"]
                       for method, path, body in api.calls if method == "DELETE"}  # fmt: skip
            assert deleted == {name: 1}
            alerts = (await asyncio.to_thread(controller.admin, "GET", "/alerts"))[1].decode()
            assert "silent" in alerts
            bad = sum(not answer.good for answer in load.answers)
            assert bad <= len(load.answers) // 20

    asyncio.run(run())
