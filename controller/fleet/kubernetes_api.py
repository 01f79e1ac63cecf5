"""The few calls to a cluster's API server that a fleet needs, over plain HTTPS.

Shapes and rules are those of the Kubernetes API reference (v1.31): a list and a watch of pods from
its ``resourceVersion``, bookmarks, 410 Gone, the scale subresource with optimistic concurrency.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from policy.files import FileError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from controller.fleet.kubernetes_config import Cluster

CALL_S_MOST = 15.0
TOKEN_S = 10.0
"""How often the token's file is read: a kubelet renews it minutes before the old one ends."""
PAGE = 500
"""Pods in one answer of a list."""
WATCH_S = 120
"""After which the server ends a watch, and another begins where it ended."""
SILENCE_S = 90.0
"""Bookmarks come once a minute: a watch that says nothing for longer is a dead connection."""
OBJECT_BYTES_MOST = 1 << 21
"""No object is larger: etcd takes 1.5 MiB."""
BACKOFF_S = (0.2, 30.0)
CONFLICTS_MOST = 8
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Of a ReplicaSet's pods, the one with the lowest goes first."""
MERGE = "application/merge-patch+json"

log = logging.getLogger(__name__)


class ApiError(Exception):
    """The API server said no, with its ``Status``; ``code`` is the HTTP status."""

    def __init__(self, what: str, code: int, reason: str, message: str) -> None:
        self.code = code
        self.reason = reason
        hint = _HINTS.get(code, "")
        super().__init__(f"{what}: {code} {reason}: {message}" + (f" ({hint})" if hint else ""))


_HINTS = {
    401: "its token is not taken: does the token file belong to this cluster?",
    403: "give the controller's service account the Role of controller/deploy/kubernetes/rbac.yaml",
    404: "is the name in the fleet file that of a Deployment of this namespace?",
}
UNREACHED = (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError)


class Pod(msgspec.Struct, frozen=True):
    """What matters of a pod."""

    uid: str
    name: str
    ip: str
    """Empty: it has none yet."""
    node: str
    ready: bool
    ending: bool
    """Somebody deleted it: it finishes what it has."""
    why: str
    """It is not ready."""
    restarts: int
    """Of its containers: each is another process."""
    cost: str
    """What it costs to delete it, as its annotation says; empty: it has none."""


class Scale(msgspec.Struct, frozen=True):
    """A Deployment's scale subresource."""

    replicas: int
    version: str
    """Its ``resourceVersion``."""
    selector: str
    """Of its pods."""


class Api:
    """One namespace's pods and scales.

    Args:
        session: its own: reads of large objects need a large buffer (``OBJECT_BYTES_MOST``).
    """

    def __init__(self, session: aiohttp.ClientSession, cluster: Cluster) -> None:
        self._session = session
        self._cluster = cluster
        self.url = (cluster.api or _in_cluster()).rstrip("/")
        self._base = f"/namespaces/{cluster.namespace or _own_namespace(cluster)}"
        self._token = ""
        self._token_read_s = -TOKEN_S
        self._ssl: ssl.SSLContext | None = None
        self._ssl_of: tuple[int, int] = (0, 0)

    async def scale(self, deployment: str) -> Scale:
        """How many pods it should have.

        Raises:
            ApiError, and those of ``UNREACHED``.
        """
        return _scale(await self._call("GET", self._scale_path(deployment)))

    async def set_scale(self, deployment: str, seen: Scale, replicas: int) -> Scale:
        """Change it, if nobody did since it was ``seen``: else ``ApiError`` with code 409."""
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": replicas}}
        return _scale(await self._call("PATCH", self._scale_path(deployment), body))

    async def set_cost(self, pod: Pod, cost: str | None) -> None:
        """What it costs to delete ``pod``, and no other that took its name: else code 409."""
        body = {"metadata": {"uid": pod.uid, "annotations": {DELETION_COST: cost}}}
        await self._call("PATCH", f"/api/v1{self._base}/pods/{pod.name}", body)

    async def delete(self, pod: Pod, grace_s: int | None = None) -> None:
        """Delete ``pod``, and no other that took its name.

        Args:
            grace_s: from SIGTERM to SIGKILL; None: as the pod says.
        """
        body: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        await self._call("DELETE", f"/api/v1{self._base}/pods/{pod.name}", body)

    async def pods(self, selector: str) -> tuple[list[Pod], str]:
        """All pods of ``selector``, and the resourceVersion to watch from."""
        found: list[Pod] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            page = await self._call("GET", f"/api/v1{self._base}/pods", query=query)
            found += [_pod(item) for item in page.get("items") or () if _lives(item)]
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                return found, str(meta.get("resourceVersion", ""))
            query["continue"] = meta["continue"]

    async def watch(self, selector: str, since: str) -> AsyncIterator[tuple[Pod | str, str]]:
        """What changes from ``since`` on: a pod, or the uid of one that is gone, or empty for a
        bookmark; and the resourceVersion to go on from. Ends when the server ends it.

        Raises:
            ApiError: code 410 where ``since`` is too long ago: list again.
        """
        query = {
            "labelSelector": selector, "watch": "true", "allowWatchBookmarks": "true",
            "resourceVersion": since, "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(
            total=WATCH_S + SILENCE_S, sock_connect=CALL_S_MOST, sock_read=SILENCE_S
        )
        what = f"watching pods of {selector}"
        async with self._session.get(
            f"{self.url}/api/v1{self._base}/pods", params=query, headers=self._headers(),
            ssl=self._trust(), timeout=timeout, allow_redirects=False,
        ) as answer:  # fmt: skip
            if answer.status != 200:
                raise self._error(what, answer.status, await answer.read())
            while line := await _line(answer.content):
                event = json.loads(line)
                found = event["object"]
                if event["type"] == "ERROR":
                    raise self._error(what, int(found.get("code", 0)), line, found)
                version = found["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    yield "", version
                elif event["type"] == "DELETED" or not _lives(found):
                    yield found["metadata"]["uid"], version
                else:
                    yield _pod(found), version

    def _scale_path(self, deployment: str) -> str:
        return f"/apis/apps/v1{self._base}/deployments/{deployment}/scale"

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        again: bool = True,
    ) -> dict[str, Any]:
        headers = self._headers()
        if body is not None:
            headers["Content-Type"] = MERGE if method == "PATCH" else "application/json"
        async with self._session.request(
            method, self.url + path, params=query, headers=headers, ssl=self._trust(),
            data=None if body is None else json.dumps(body).encode(),
            timeout=aiohttp.ClientTimeout(total=CALL_S_MOST), allow_redirects=False,
        ) as answer:  # fmt: skip
            text = await answer.read()
        if answer.status == 401 and again:  # it was renewed, and the old one has ended
            self._token_read_s = -TOKEN_S
            return await self._call(method, path, body, query, again=False)
        if answer.status not in (200, 201, 202):
            raise self._error(f"{method} {path}", answer.status, text)
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ApiError(f"{method} {path}", answer.status, "NotAnObject", text[:200].decode())
        return found

    def _error(self, what: str, code: int, text: bytes, status: object = None) -> ApiError:
        if status is None:
            try:
                status = json.loads(text)
            except ValueError:
                status = None
        if not isinstance(status, dict):
            status = {"message": text[:200].decode(errors="replace")}
        return ApiError(what, code, str(status.get("reason", "")), str(status.get("message", "")))

    def _headers(self) -> dict[str, str]:
        now_s = time.monotonic()
        path = self._cluster.token_file
        if path and now_s - self._token_read_s >= TOKEN_S:
            with open(path, encoding="utf-8") as file:
                self._token = file.read().strip()
            self._token_read_s = now_s
        headers = {"Accept": "application/json", "User-Agent": "twinkeel"}
        return headers | ({"Authorization": f"Bearer {self._token}"} if self._token else {})

    def _trust(self) -> ssl.SSLContext | bool:
        """The CA's file is read again when another lies there."""
        path = self._cluster.ca_file
        if not self.url.startswith("https:") or not path:
            return True
        status = os.stat(path)
        made_of = (status.st_ino, status.st_mtime_ns)
        if self._ssl is None or made_of != self._ssl_of:
            self._ssl, self._ssl_of = ssl.create_default_context(cafile=path), made_of
        return self._ssl


class Reflector:
    """Keeps a copy of a Deployment's pods up to date, until it is cancelled.

    Args:
        changed: called with what is known after every change.
        trouble: called where the copy cannot be kept up to date.
    """

    def __init__(
        self,
        api: Api,
        deployment: str,
        changed: Callable[[], object],
        trouble: Callable[[str], object],
    ) -> None:
        self._api = api
        self._deployment = deployment
        self._changed = changed
        self._trouble = trouble
        self.pods: dict[str, Pod] = {}
        """By uid, as far as they are known."""
        self.listed = False
        """``pods`` was complete once."""
        self.lists = 0
        self._failed = 0

    async def run(self) -> None:
        """List and watch, again and again."""
        while True:
            try:
                await self._follow()
            except (ApiError, *UNREACHED, ValueError, KeyError) as error:
                gone = isinstance(error, ApiError) and error.code == 410
                if not gone:
                    self._trouble(
                        f"the API server at {self._api.url} does not tell the pods of"
                        f" {self._deployment}: {error or type(error).__name__}; what is known of"
                        " them stays"
                    )
                if gone and not self._failed:
                    self._failed = 1
                    continue
                self._failed += 1
                first_s, most_s = BACKOFF_S
                pause_s = min(most_s, first_s * 2 ** min(self._failed, 10))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311

    async def _follow(self) -> None:
        """Until a watch fails."""
        selector = (await self._api.scale(self._deployment)).selector
        if not selector:  # it would select every pod of the namespace
            raise ValueError(f"the scale of {self._deployment} names no selector of its pods")
        pods, since = await self._api.pods(selector)
        self.lists += 1
        self.listed = True
        self.pods = {pod.uid: pod for pod in pods}
        self._changed()
        while True:
            begun_s = time.monotonic()
            async for pod, version in self._api.watch(selector, since):
                self._failed = 0
                since = version
                if isinstance(pod, Pod):
                    self.pods[pod.uid] = pod
                    self._changed()
                elif self.pods.pop(pod, None) is not None:
                    self._changed()
            if time.monotonic() - begun_s < 1.0:  # a server that ends every watch at once
                await asyncio.sleep(1.0)


async def change_scale(
    api: Api, deployment: str, wanted: Callable[[Scale], int]
) -> tuple[Scale, bool]:
    """Bring a Deployment to what ``wanted`` makes of its scale, also where others change it.

    Returns:
        The scale, and whether it had to be changed.

    Raises:
        ApiError: it cannot be, or others change it all the time (409).
    """
    for turn in range(CONFLICTS_MOST):
        seen = await api.scale(deployment)
        replicas = max(0, wanted(seen))
        if replicas == seen.replicas:
            return seen, False
        try:
            return await api.set_scale(deployment, seen, replicas), True
        except ApiError as error:
            if error.code != 409 or turn == CONFLICTS_MOST - 1:
                raise
            log.info("%s was changed by someone else meanwhile: looking again", deployment)
    raise AssertionError("the last turn returns or raises")


async def _line(content: aiohttp.StreamReader) -> bytes:
    line = await content.readline()
    if line and not line.endswith(b"\n"):
        raise ValueError("the watch ended within an event")
    return line


def _in_cluster() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise FileError(
            "kubernetes", "this is no pod: KUBERNETES_SERVICE_HOST is not set", key="api",
            hint="name the API server with api: and its token_file",
        )  # fmt: skip
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _own_namespace(cluster: Cluster) -> str:
    path = os.path.join(os.path.dirname(cluster.token_file), "namespace")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise FileError(
            path, f"cannot be read: {error.strerror}", hint="say namespace: in the fleet file"
        ) from error


def _scale(found: dict[str, Any]) -> Scale:
    spec, status, meta = found.get("spec") or {}, found.get("status") or {}, found["metadata"]
    return Scale(
        int(spec.get("replicas", 0)), str(meta.get("resourceVersion", "")),
        str(status.get("selector", "")),
    )  # fmt: skip


def _lives(item: Mapping[str, Any]) -> bool:
    """Evicted and finished pods stay listed until somebody cleans up; they serve nothing."""
    return (item.get("status") or {}).get("phase") not in ("Failed", "Succeeded")


def _pod(item: Mapping[str, Any]) -> Pod:
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    ready = (conditions.get("Ready") or {}).get("status") == "True"
    containers = status.get("containerStatuses") or ()
    return Pod(
        uid=meta["uid"],
        name=meta["name"],
        ip=status.get("podIP") or "",
        node=spec.get("nodeName") or "",
        ready=ready,
        ending="deletionTimestamp" in meta,
        why="" if ready else _why(status.get("phase") or "Pending", conditions, containers),
        restarts=sum(each.get("restartCount", 0) for each in containers),
        cost=(meta.get("annotations") or {}).get(DELETION_COST, ""),
    )


def _why(phase: str, conditions: Mapping[str, Any], containers: Any) -> str:
    """A pod is not ready, as its containers, its node or the scheduler tell it."""
    for container in containers:
        state, last = container.get("state") or {}, container.get("lastState") or {}
        ended = state.get("terminated")
        if not container.get("started"):  # else it has been well since
            ended = ended or last.get("terminated")
        waiting = (state.get("waiting") or {}).get("reason", "")
        if ended:
            signal = ended.get("signal") or max(0, ended.get("exitCode", 0) - 128)
            code = ended.get("exitCode", 0)
            how = f"killed by signal {signal}" if signal else f"exited with code {code}"
            return f"{how} ({ended.get('reason') or waiting or 'Terminated'})"
        if waiting and waiting != "ContainerCreating":
            return f"{waiting}: {(state['waiting'].get('message') or '')[:200]}"
    for kind in ("PodScheduled", "Ready"):
        condition = conditions.get(kind) or {}
        if condition.get("status") == "False" and condition.get("reason"):
            said = (condition.get("message") or "")[:200]
            return f"{condition['reason']}: {said}" if said else condition["reason"]
    return "not ready" if phase == "Running" else phase
