"""The fleet file, schema 1: which models this machine serves, in which versions, on what."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from controller.config import Port, Seconds  # noqa: TC001 - msgspec reads them
from controller.gpus.mig import check_places
from policy.files import FileError, decode, load_profile, read_document

VLLM = (
    "vllm", "serve", "{weights}", "--served-model-name", "{model}", "--host", "{host}",
    "--port", "{port}",
)  # fmt: skip
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one server runs."""

    port: Port = 0
    """On which it listens; 0: any that is free, chosen when the controller starts."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its cards, or of one MIG slice; empty: none, as on a CPU."""
    domain: str = ""
    """What fails together, such as ``host0/card3``; empty: told by its cards, else itself."""
    labels: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    """Further arguments of this server."""
    env: dict[str, str] = {}


class Standby(Place, frozen=True, forbid_unknown_fields=True):
    """Where one more server can run, if the policy asks for it."""

    warm: bool = True
    """Its process runs, has loaded the model and answered its first prompts: it serves at once.
    False: it is started when it is asked for."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a new version must answer before it takes requests."""

    prompt: str
    contains: str = ""
    """What must stand in the answer, whatever the case; empty: it must only be an answer."""
    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 32


class Checks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a new version is tried, beside the one that serves."""

    questions: tuple[Question, ...] = ()
    """Empty: a few general prompts, whose answers must be answers."""
    confidence_drop_most: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.2
    """By how much its mean confidence may lie below that of the version that serves."""
    min_confidence: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Its mean confidence at least; 0: any."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is served."""

    versions: dict[Name, str]
    """Weights by version: a folder of this machine, or a hub name."""
    version: str
    """The one that serves."""
    replicas: Annotated[tuple[Place, ...], Meta(min_length=1)]
    """Where it is served, always."""
    standbys: tuple[Standby, ...] = ()
    command: Annotated[tuple[str, ...], Meta(min_length=1)] = VLLM
    """Of a server. ``{weights}``, ``{model}``, ``{version}``, ``{host}`` and ``{port}`` are put in;
    ``args`` follow."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    profile: str = ""
    """Of its step times; empty: found by the model that it serves."""
    memory_mb: Annotated[int, Meta(ge=0)] = 0
    """That one server needs of its card or slice; 0: worked out from the size of its weights."""
    pooling: bool = False
    """It serves embeddings only."""
    checks: Checks = Checks()
    start_s_most: Seconds = 900.0
    """From the process to its first answer; later it is killed."""
    stop_s_most: Seconds = 30.0
    """From SIGTERM to SIGKILL."""

    def __post_init__(self) -> None:
        if self.version not in self.versions:
            known = ", ".join(self.versions) or "none"
            raise ValueError(f"version {self.version!r} is none of versions: {known}")


class Backoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a server that ended by itself is started again."""

    first_s: Seconds = 1.0
    """After its first failure; doubles with each further one."""
    most_s: Seconds = 60.0
    forgive_s: Seconds = 120.0
    """Serving that long, it begins anew."""
    give_up_after: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Failures in a row after which it stays down and somebody is told; 0: never."""


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet file."""

    models: dict[Name, Model]
    schema: Literal[1] = 1
    host: str = "127.0.0.1"
    """On which the servers listen."""
    backoff: Backoff = Backoff()

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty: a fleet serves at least one")
        ports = [
            place.port
            for model in self.models.values()
            for place in (*model.replicas, *model.standbys)
            if place.port
        ]
        twice = sorted({port for port in ports if ports.count(port) > 1})
        if twice:
            raise ValueError(f"port {twice[0]} is given twice")


_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_fleet(path: Path) -> FleetFile:
    """Read a fleet file.

    Raises:
        FileError: it cannot be used: where, which key, what stands there.
    """
    return decode(read_document(path), FleetFile, str(path))


def check_fleet(file: FleetFile, where: str) -> None:
    """See whether this machine has what a fleet file names.

    Raises:
        FileError: it has not: which key, and what to do.
    """
    places_by_key: dict[str, tuple[str, ...]] = {}
    for name, model in file.models.items():
        key = f"models.{name}"
        for version, weights in model.versions.items():
            _check_weights(weights, where, f"{key}.versions.{version}")
        _check_command(model, where, f"{key}.command")
        if model.profile:
            load_profile(model.profile)
        for kind, places in (("replicas", model.replicas), ("standbys", model.standbys)):
            for number, place in enumerate(places):
                at = f"{key}.{kind}[{number}].gpus"
                for uuid in place.gpus:
                    _check_uuid(uuid, where, at)
                if place.gpus:
                    places_by_key[at] = place.gpus
    if not places_by_key:
        return
    from controller.gpus.mig_device import read_cards  # needs the extra `live`

    wrong = check_places(places_by_key, read_cards())
    if wrong:
        raise FileError(where, "; ".join(wrong), hint="`nvidia-smi -L` lists cards and slices")


def _check_weights(weights: str, where: str, key: str) -> None:
    """A hub name is the server's to find; a path has to be here."""
    if HUB_NAME.fullmatch(weights) and not weights.startswith((".", "/")):
        return
    if weights.startswith(("/", ".", "~")) and not Path(weights).exists():
        raise FileError(
            where, f"{weights} is not here", key=key, value=weights,
            hint="the folder of the model's weights, or a hub name such as Qwen/Qwen3-8B",
        )  # fmt: skip


def _check_command(model: Model, where: str, key: str) -> None:
    program = model.command[0]
    path = model.env.get("PATH", os.environ.get("PATH", ""))
    if shutil.which(program, path=path) is None:
        raise FileError(
            where, f"{program} is no program that can be run here", key=key, value=program,
            hint="install vLLM, or give the whole path of its command",
        )  # fmt: skip
    if "{port}" not in " ".join((*model.command, *model.args)):
        raise FileError(
            where, "{port} is missing, so its server would not know where to listen", key=key,
            hint="such as --port {port}",
        )  # fmt: skip


def _check_uuid(uuid: str, where: str, key: str) -> None:
    if not _UUID.fullmatch(uuid):
        raise FileError(
            where, f"{uuid!r} is no UUID of a card or a MIG slice", key=key, value=uuid,
            hint="`nvidia-smi -L` lists them; numbers are not taken, since they change",
        )  # fmt: skip
