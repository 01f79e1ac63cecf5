"""A small Kubernetes API server for tests, with a ReplicaSet controller and a kubelet.

It is meant to behave as the real one for the calls that a fleet makes. The shapes (PodList, watch
events, Scale, Status of 401, 404, 409, 410 and 422) are written by hand after the API reference of
v1.31 and its "API concepts" page; none was recorded from a cluster.
A watch begins after its ``resourceVersion`` and sends bookmarks; one that is
too old gets an event of type ERROR with code 410, reason Expired; an old ``continue`` gets HTTP
410; a patch with another ``metadata.resourceVersion`` or ``metadata.uid`` gets 409; a Scale of 0
has an empty ``spec``. ReplicaSets remove pods as ``controller_utils.go`` ranks them: not ready
first, then the lower ``pod-deletion-cost``, then the younger.

Each pod is a real server on an address of its own (127.1.0.0/16), made by ``Deployment.serve``.
"""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml
from aiohttp import web

from tests.fleet.ports import lasting_port
from tests.upstream_support import Server

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

COST = "controller.kubernetes.io/pod-deletion-cost"
STAMP = "2026-01-05T10:00:00Z"
NAMESPACE = "serving"
TOKEN = "the-first-token"
SCALES = "deployments/scale"
ROOT = Path(__file__).parents[2]


class Runs(Protocol):
    """What runs in a pod."""

    async def stop(self) -> None: ...


class PodServer(Server):
    """A server with vLLM's API, in this process, on a pod's address."""

    def __init__(self, ip: str, port: int, model: str = "m") -> None:
        super().__init__()
        self.ip, self.port = ip, port
        self.cards[0] |= {"id": model, "root": model}
        self._at_ip: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._at_ip = web.AppRunner(app, shutdown_timeout=0.01)
        await self._at_ip.setup()
        await web.TCPSite(self._at_ip, self.ip, self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._at_ip is not None:
            await self._at_ip.cleanup()
            self._at_ip = None


@dataclass
class Deployment:
    """A Deployment with its one ReplicaSet."""

    name: str
    replicas: int
    version: int = 0
    """resourceVersion of its scale."""
    starts_s: float = 0.02
    """From a pod's creation until it is ready."""
    schedules: bool = True
    """False: there is no node for its pods."""
    creates: bool = True
    """False: a quota allows no more pods."""
    serve: Callable[[str, int], Awaitable[Runs]] | None = None
    """What its pods run; None: a ``PodServer``."""
    answers: Callable[[PodServer], object] = field(default=lambda server: None)
    """What is changed of a ``PodServer`` before it starts."""

    @property
    def selector(self) -> dict[str, str]:
        return {"app": self.name}


class KubeApi:
    """One namespace of a cluster. Everything happens in the event loop that ``start`` ran in."""

    def __init__(self, *deployments: Deployment) -> None:
        self.deployments = {each.name: each for each in deployments}
        self.pods: dict[str, dict[str, Any]] = {}
        """By name."""
        self.servers: dict[str, Runs] = {}
        """What runs, by uid of its pod."""
        self.calls: list[tuple[str, str, Any]] = []
        """(method, path, body) of all but GET."""
        self.gets: list[str] = []
        self.tokens = {TOKEN}
        self.role = role()
        """Verbs, and what they are allowed on; and (next) those that were used."""
        self.used: set[tuple[str, str]] = set()
        self.pod_port = lasting_port()
        self.page_most = 500
        self.bookmark_s = 60.0
        self.watch_s_most = 300.0
        self.before: Callable[[str, str], None] = lambda method, path: None
        """Called ahead of each call: to change something meanwhile, or to raise an answer."""
        self.after: Callable[[str, str], None] = lambda method, path: None
        """Called when a change was made, before it is answered."""
        self.scheme = "http"
        self._version = 100
        self._oldest = 0
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._snapshots: dict[int, list[dict[str, Any]]] = {}
        """Of lists that come in pages, by version."""
        self._news = asyncio.Event()
        self._numbers = 0
        self._port = lasting_port()  # also while it is away
        self._runner: web.AppRunner | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- the server ----

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self._port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen; the first time, make the pods that there should be."""
        self.scheme = "https" if tls else "http"
        app = web.Application()
        base = f"/api/v1/namespaces/{NAMESPACE}/pods"
        scale = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{{name}}/scale"
        app.router.add_get(base, self._checked(self._list_or_watch, "list", "pods"))
        app.router.add_patch(f"{base}/{{name}}", self._checked(self._patch_pod, "patch", "pods"))
        app.router.add_delete(f"{base}/{{name}}", self._checked(self._delete_pod, "delete", "pods"))
        app.router.add_get(scale, self._checked(self._get_scale, "get", SCALES))
        app.router.add_patch(scale, self._checked(self._patch_scale, "patch", SCALES))
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(
            self._runner, "127.0.0.1", self._port, reuse_address=True, ssl_context=tls
        ).start()
        for deployment in self.deployments.values():
            self.reconcile(deployment)

    async def go_away(self) -> None:
        """The API server is gone; the cluster goes on."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._tell()
            await runner.cleanup()

    async def stop(self) -> None:
        """It, and all pods."""
        await self.go_away()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self.servers.values():
            await server.stop()

    def compact(self) -> None:
        """What happened so far is forgotten: older watches are told 410, and all are cut off."""
        self._version += 10
        self._oldest = self._version
        self._history.clear()
        self._tell()

    def _checked(self, handle: Any, verb: str, resource: str) -> Any:
        """With a token, and only what the Role allows; which of it was used is kept."""

        async def checked(request: web.Request) -> web.StreamResponse:
            done = ("watch" if request.query.get("watch") == "true" else verb, resource)
            if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
                return status_answer(401, "Unauthorized", "Unauthorized")
            if done not in self.role:
                group = "apps" if resource == SCALES else ""
                return status_answer(
                    403, "Forbidden",
                    f'{resource} is forbidden: User "system:serviceaccount:{NAMESPACE}:twinkeel"'
                    f' cannot {done[0]} resource "{resource}" in API group "{group}"',
                )  # fmt: skip
            self.used.add(done)
            if request.method == "GET":
                self.gets.append(request.path_qs)
            else:
                text = await request.text()
                self.calls.append((request.method, request.path, json.loads(text or "{}")))
            try:
                self.before(request.method, request.path)
                answer: web.StreamResponse = await handle(request)
                if request.method != "GET" and answer.status == 200:
                    self.after(request.method, request.path)
                return answer
            except Refusal as refusal:
                return status_answer(refusal.code, refusal.reason, refusal.message)

        return checked

    # ---- pods ----

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        selector = dict(each.split("=") for each in request.query["labelSelector"].split(","))
        if request.query.get("watch") == "true":
            return await self._watch(request, selector)
        version, after = self._version, ""
        found = sorted(
            (pod for pod in self.pods.values() if _selected(pod, selector)),
            key=lambda pod: pod["metadata"]["name"],
        )
        if token := request.query.get("continue", ""):
            at, after = token.split("/")
            version = int(at)
            if version < self._oldest:
                raise Refusal(
                    410, "Expired",
                    "The provided continue parameter is too old to display a consistent list"
                    " result. You can start a new list without the continue parameter.",
                )  # fmt: skip
            found = self._snapshots[version]
        left = [pod for pod in found if pod["metadata"]["name"] > after]
        most = min(int(request.query.get("limit", "500")), self.page_most)
        meta: dict[str, Any] = {"resourceVersion": str(version)}
        if len(left) > most:  # the next page is of the same instant
            self._snapshots[version] = copy.deepcopy(found)
            meta["continue"] = f"{version}/{left[most - 1]['metadata']['name']}"
            meta["remainingItemCount"] = len(left) - most
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": left[:most]}
        )

    async def _watch(self, request: web.Request, selector: dict[str, str]) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)

        async def send(kind: str, item: object) -> None:
            await answer.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")

        loop = asyncio.get_running_loop()
        end_s = loop.time() + min(int(request.query["timeoutSeconds"]), self.watch_s_most)
        while loop.time() < end_s and self._runner is not None:
            if since < self._oldest:
                text = f"too old resource version: {since} ({self._oldest})"
                await send("ERROR", status_of(410, "Expired", text))
                break
            news = self._news
            for version, kind, pod in [each for each in self._history if each[0] > since]:
                since = version
                if _selected(pod, selector):
                    await send(kind, pod)
            try:
                async with asyncio.timeout(min(self.bookmark_s, max(0.0, end_s - loop.time()))):
                    await news.wait()
            except TimeoutError:
                since = self._version
                meta = {"resourceVersion": str(since), "creationTimestamp": None}
                bookmark = {"kind": "Pod", "apiVersion": "v1", "metadata": meta}
                await send("BOOKMARK", bookmark | {"spec": {"containers": None}, "status": {}})
        return answer

    async def _patch_pod(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod(request)
        change = await self._merge(request)
        meta = change.get("metadata", {})
        _same(pod, meta.get("uid"), "pods")
        notes = pod["metadata"].setdefault("annotations", {})
        for key, value in meta.get("annotations", {}).items():
            if value is None:
                notes.pop(key, None)
            else:
                notes[key] = value
        self.changed(pod)
        return web.json_response(pod)

    async def _delete_pod(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod(request)
        options = json.loads(await request.text() or "{}")
        _same(pod, options.get("preconditions", {}).get("uid"), "pods")
        grace = options.get("gracePeriodSeconds", pod["spec"]["terminationGracePeriodSeconds"])
        self.delete(pod["metadata"]["name"], grace)
        return web.json_response(pod)

    def _pod(self, request: web.Request) -> dict[str, Any]:
        name = request.match_info["name"]
        if name not in self.pods:
            raise Refusal(404, "NotFound", f'pods "{name}" not found')
        return self.pods[name]

    async def _merge(self, request: web.Request) -> dict[str, Any]:
        if request.content_type != "application/merge-patch+json":
            raise Refusal(415, "UnsupportedMediaType", f"no patch: {request.content_type}")
        change: dict[str, Any] = json.loads(await request.text())
        return change

    # ---- scales ----

    async def _get_scale(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._scale(self._deployment(request)))

    async def _patch_scale(self, request: web.Request) -> web.StreamResponse:
        deployment = self._deployment(request)
        change = await self._merge(request)
        version = change.get("metadata", {}).get("resourceVersion")
        if version is not None and version != str(deployment.version):
            raise Refusal(
                409, "Conflict",
                f'Operation cannot be fulfilled on deployments.apps "{deployment.name}": the object'
                " has been modified; please apply your changes to the latest version and try again",
            )  # fmt: skip
        replicas = change["spec"]["replicas"]
        if replicas < 0:
            raise Refusal(422, "Invalid", "spec.replicas: must be greater than or equal to 0")
        self.scale(deployment.name, replicas)
        return web.json_response(self._scale(deployment))

    def _deployment(self, request: web.Request) -> Deployment:
        name = request.match_info["name"]
        if name not in self.deployments:
            raise Refusal(404, "NotFound", f'deployments.apps "{name}" not found')
        return self.deployments[name]

    def _scale(self, deployment: Deployment) -> dict[str, Any]:
        selector = ",".join(f"{key}={value}" for key, value in deployment.selector.items())
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {
                "name": deployment.name, "namespace": NAMESPACE, "uid": f"d-{deployment.name}",
                "resourceVersion": str(deployment.version), "creationTimestamp": STAMP,
            },
            "spec": {"replicas": deployment.replicas} if deployment.replicas else {},
            "status": {"replicas": len(self.living(deployment)), "selector": selector},
        }  # fmt: skip

    # ---- the cluster: what kubectl, an HPA, a ReplicaSet and a kubelet do ----

    def scale(self, name: str, replicas: int) -> None:
        """As ``kubectl scale`` does."""
        deployment = self.deployments[name]
        deployment.replicas = replicas
        deployment.version = self._next()
        self.reconcile(deployment)

    def living(self, deployment: Deployment) -> list[dict[str, Any]]:
        """Its pods that nobody deleted."""
        return [
            pod for pod in self.pods.values()
            if _selected(pod, deployment.selector) and "deletionTimestamp" not in pod["metadata"]
            and pod["status"]["phase"] not in ("Failed", "Succeeded")
        ]  # fmt: skip

    def ready(self, deployment: str) -> list[str]:
        """Names of its pods that are."""
        return [
            pod["metadata"]["name"] for pod in self.living(self.deployments[deployment])
            if _is_ready(pod)
        ]  # fmt: skip

    def reconcile(self, deployment: Deployment) -> None:
        """The ReplicaSet's: as many pods as there should be."""
        living = self.living(deployment)
        while deployment.creates and len(living) < deployment.replicas:
            living.append(self.make(deployment))
        living.sort(
            key=lambda pod: (
                _is_ready(pod),
                int(pod["metadata"].get("annotations", {}).get(COST, "0")),
                -int(pod["metadata"]["uid"].split("-")[1]),
            )
        )
        for pod in living[: max(0, len(living) - deployment.replicas)]:
            self.delete(pod["metadata"]["name"], pod["spec"]["terminationGracePeriodSeconds"])

    def make(self, deployment: Deployment, name: str = "") -> dict[str, Any]:
        """A new pod, and what runs in it a little later."""
        self._numbers += 1
        number = self._numbers
        name = name or f"{deployment.name}-6d4cf56db6-{number:05d}"
        pod: dict[str, Any] = {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {
                "name": name, "namespace": NAMESPACE, "uid": f"uid-{number:05d}",
                "resourceVersion": "0", "creationTimestamp": STAMP,
                "labels": {**deployment.selector, "pod-template-hash": "6d4cf56db6"},
            },
            "spec": {
                "containers": [{"name": "vllm", "image": "vllm"}],
                "terminationGracePeriodSeconds": 600,
            },
            "status": {"phase": "Pending", "qosClass": "Burstable"},
        }  # fmt: skip
        self.pods[name] = pod
        self.changed(pod, "ADDED")
        self.spawn(self._run_pod(deployment, pod, number))
        return pod

    async def _run_pod(self, deployment: Deployment, pod: dict[str, Any], number: int) -> None:
        if not deployment.schedules:
            said = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            pod["status"]["conditions"] = [
                condition("PodScheduled", False, "Unschedulable", said)
            ]  # fmt: skip
            self.changed(pod)
            return
        ip = f"127.1.{number // 250}.{number % 250 + 1}"
        pod["spec"]["nodeName"] = f"node-{number % 3}"
        pod["status"] |= {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
        self._set_ready(pod, False)
        await asyncio.sleep(deployment.starts_s)
        if deployment.serve is not None:
            self.servers[pod["metadata"]["uid"]] = await deployment.serve(ip, self.pod_port)
        else:
            server = PodServer(ip, self.pod_port)
            deployment.answers(server)
            await server.start()
            self.servers[pod["metadata"]["uid"]] = server
        if self.pods.get(pod["metadata"]["name"]) is pod:
            self._set_ready(pod, True)

    def server(self, name: str) -> Any:
        """What runs in the pod."""
        return self.servers[self.pods[name]["metadata"]["uid"]]

    def set_ready(self, name: str, ready: bool, **container: Any) -> None:
        """As its readiness probe finds; ``container`` is of the container's status."""
        self._set_ready(self.pods[name], ready, **container)

    def _set_ready(self, pod: dict[str, Any], ready: bool, **container: Any) -> None:
        status = pod["status"]
        unready = "containers with unready status: [vllm]"
        status["conditions"] = [
            condition("PodScheduled", True),
            condition("Ready", ready, "" if ready else "ContainersNotReady", unready),
        ]
        before = (status.get("containerStatuses") or [{"restartCount": 0}])[0]
        status["containerStatuses"] = [
            {"name": "vllm", "state": {"running": {"startedAt": STAMP}}, "lastState": {},
             "started": ready, **before, "ready": ready, **container},
        ]  # fmt: skip
        self.changed(pod)

    def delete(self, name: str, grace_s: float = 600.0) -> None:
        """As ``kubectl delete pod`` does: it ends when what runs in it has, or the time is over."""
        pod = self.pods[name]
        if "deletionTimestamp" in pod["metadata"]:
            return
        pod["metadata"]["deletionTimestamp"] = STAMP
        pod["metadata"]["deletionGracePeriodSeconds"] = int(grace_s)
        self.changed(pod)
        self.spawn(self._end_pod(pod, grace_s))
        for deployment in self.deployments.values():
            if _selected(pod, deployment.selector):
                self.reconcile(deployment)

    async def _end_pod(self, pod: dict[str, Any], grace_s: float) -> None:
        await self.ending(pod, grace_s)
        server = self.servers.pop(pod["metadata"]["uid"], None)
        if server is not None:
            await server.stop()
        self.gone(pod)

    async def ending(self, pod: dict[str, Any], grace_s: float) -> None:
        """How long it takes to end; tests replace it."""
        await asyncio.sleep(0.02)

    def gone(self, pod: dict[str, Any]) -> None:
        """It is no more."""
        if self.pods.get(pod["metadata"]["name"]) is pod:
            del self.pods[pod["metadata"]["name"]]
            self.changed(pod, "DELETED")

    async def vanish(self, name: str) -> None:
        """Its node is gone, and somebody deleted it with force; the ReplicaSet makes another."""
        pod = self.pods[name]
        server = self.servers.pop(pod["metadata"]["uid"], None)
        if server is not None:
            await server.stop()
        self.gone(pod)
        for deployment in self.deployments.values():
            if _selected(pod, deployment.selector):
                self.reconcile(deployment)

    def changed(self, pod: dict[str, Any], kind: str = "MODIFIED") -> None:
        """Whoever watches is told."""
        pod["metadata"]["resourceVersion"] = str(self._next())
        self._history.append((self._version, kind, copy.deepcopy(pod)))
        self._tell()

    def _tell(self) -> None:
        """Wake everybody who watches."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _next(self) -> int:
        self._version += 1
        return self._version

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def role() -> set[tuple[str, str]]:
    """What the Role of ``controller/deploy`` allows."""
    text = (ROOT / "controller/deploy/kubernetes/rbac.yaml").read_text()
    (found,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "Role")
    return {
        (verb, resource) for rule in found["rules"] for resource in rule["resources"]
        for verb in rule["verbs"]
    }  # fmt: skip


class Refusal(Exception):
    """A call that is answered with a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


def status_of(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    }  # fmt: skip


def status_answer(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(status_of(code, reason, message), status=code)


def condition(kind: str, true: bool, reason: str = "", message: str = "") -> dict[str, Any]:
    made = {"type": kind, "status": "True" if true else "False", "lastTransitionTime": STAMP}
    return made | ({} if true else {"reason": reason, "message": message})


def _selected(pod: dict[str, Any], selector: dict[str, str]) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _same(pod: dict[str, Any], uid: str | None, kind: str) -> None:
    meta = pod["metadata"]
    if uid is not None and uid != meta["uid"]:
        raise Refusal(
            409, "Conflict",
            f'Operation cannot be fulfilled on {kind} "{meta["name"]}": Precondition failed: UID in'
            f" precondition: {uid}, UID in object meta: {meta['uid']}",
        )  # fmt: skip
