"""What a local fleet runs where: the fleet file's slots, their commands, and their versions."""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from controller.config import Upstream
from controller.fleet import processes
from controller.fleet.slot import Rules, Slot

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from controller.fleet.config import FleetFile, Model, Place
    from controller.fleet.processes import Child, Record
    from controller.upstream.discovery import Card
    from controller.upstream.replica import Replica

NS_PER_S = 1_000_000_000
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
PORT_TRIES = 100

log = logging.getLogger(__name__)


class KeptModel(msgspec.Struct, frozen=True):
    """What is remembered of a model beside the fleet file."""

    version: str
    """The one that serves."""
    versions: dict[str, str]
    file_version: str
    """As the fleet file said it then: an operator who changes the file since has the last word."""
    file_versions: dict[str, str]


class Served:
    """A model of the fleet, and the versions that there are of it now."""

    def __init__(self, name: str, spec: Model, kept: KeptModel | None) -> None:
        self.name = name
        self.spec = spec
        self.version = spec.version
        """The one that serves."""
        self.versions = {name: resolved(weights) for name, weights in spec.versions.items()}
        """Weights by version: those of the file, and those that were added since. Links are
        followed once: one that is moved later changes nothing under a version's name."""
        if kept is not None and (kept.file_version, kept.file_versions) == (
            spec.version, spec.versions,
        ):  # fmt: skip
            for version, weights in self.versions.items():
                if kept.versions.get(version, weights) != weights:
                    log.warning(
                        "version %s of %s was %s and is %s now: give what has changed a name of"
                        " its own", version, name, kept.versions[version], weights,
                    )  # fmt: skip
            self.versions = {**kept.versions, **self.versions}
            if kept.version in self.versions:
                self.version = kept.version

    def kept(self) -> KeptModel:
        """What is to be remembered of it."""
        return KeptModel(self.version, self.versions, self.spec.version, self.spec.versions)


def resolved(weights: str) -> str:
    """Where a folder of weights really is; a hub name as it is."""
    path = Path(weights).expanduser()
    return str(path.resolve()) if weights.startswith(("/", ".", "~")) and path.exists() else weights


class Versions:
    """The file in which a fleet remembers them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, KeptModel]:
        """By model; what cannot be read is as if it were not there."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, KeptModel])
        except (OSError, msgspec.MsgspecError):
            return {}

    def write(self, models: Mapping[str, Served]) -> None:
        processes.write_file(self.path, {name: each.kept() for name, each in models.items()})


class Seat:
    """A slot of the fleet file, and what runs in it.

    Args:
        base: it serves from the beginning; else it is a standby.
        folder: of its log and its record.
    """

    def __init__(
        self,
        name: str,
        served: Served,
        place: Place,
        base: bool,
        warm: bool,
        file: FleetFile,
        folder: Path,
    ) -> None:
        self.name = name
        self.served = served
        self.place = place
        self.base = base
        self.log = folder / f"{name}.log"
        self.record_path = folder / f"{name}.json"
        self.slot = Slot(_rules(served.spec, file, warm), served.version,
                         "serve" if base else "spare", 0)  # fmt: skip
        self.replica: Replica
        self.child: Child | None = None
        self.record: Record | None = None
        self.work: asyncio.Task[None] | None = None
        """Starting it, waiting for its first answer, or warming it."""
        self.sweeping: asyncio.Future[int] | None = None
        """What its last process left behind is being ended."""
        self.models: tuple[str, ...] = ()
        """Names that its server lists; empty: not asked yet."""
        self.announced = False
        """As a standby, since this controller began."""
        self.counts = True
        """When it serves, new requests get its version: it is neither still tried out, nor does it
        only finish what it has."""
        self.failure = ""
        """Why the version that was asked for last could not be had."""
        self.dumb_ns = 0
        """Since when its gate is open and it is not up; 0: it is."""
        self._host = file.host

    @property
    def known(self) -> bool:
        """The policy has been told of it since this controller began."""
        return self.announced or self.replica.spec is not None

    def url(self, port: int) -> str:
        host = EVERYWHERE.get(self._host, self._host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def command(self, version: str, port: int) -> tuple[str, ...]:
        """What is run; what stands in braces and is none of ours stays as it is."""
        spec = self.served.spec
        parts = (*spec.command, *spec.args, *self.place.args)
        values = {
            "weights": self.served.versions[version], "model": self.served.name,
            "version": version, "host": self._host, "port": str(port),
        }  # fmt: skip
        return tuple(_filled(part, values) for part in parts)

    def env(self) -> dict[str, str]:
        """What its environment has beside the controller's."""
        found = {**self.served.spec.env, **self.place.env}
        if self.place.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.place.gpus)
        return found

    def upstream(self, port: int, domain: str) -> Upstream:
        """It as a server of the driver's; what its command says of it is believed.

        Args:
            domain: what fails together with its cards, where the file does not say it.
        """
        version = self.served.version
        command = self.command(version, port)
        return Upstream(
            self.url(port), self.served.spec.profile,
            self.place.domain or domain, self.place.labels, version,
            _number(command, "--max-num-seqs"), _number(command, "--max-num-batched-tokens"),
            gpus=self.place.gpus,
        )  # fmt: skip

    def free_port(self, taken: frozenset[int]) -> int:
        """The one it is given, else one that is free now.

        Raises:
            OSError: somebody has it, in words.
        """
        if self.place.port:
            self._try(self.place.port)
            return self.place.port
        for _ in range(PORT_TRIES):
            port = self._try(0)
            if port not in taken:
                return port
        raise OSError(f"no port is free on {self._host}")

    def _try(self, port: int) -> int:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind((self._host, port))
            except OSError as error:
                raise OSError(f"port {port} of {self._host}: {error.strerror}") from error
            found: int = probe.getsockname()[1]
            return found

    def wants(self, record: Record) -> bool:
        """Whether the process of a record is what would be started here now."""
        served = self.served
        port = int(record.url.rpartition(":")[2])
        return (
            record.version == served.version
            and record.weights == served.versions[record.version]
            and self.place.port in (0, port)
            and record.url == self.url(port)
            and record.command == self.command(record.version, port)
            and dict(record.env) == self.env()
        )

    def keep(self, serves: bool, warmed: bool) -> None:
        """Let the next controller know what runs here."""
        if self.record is None:
            return
        changed = msgspec.structs.replace(self.record, serves=serves, warmed=warmed)
        if changed != self.record:
            self.note(changed)

    def note(self, record: Record) -> None:
        """This runs here. Where it cannot be written, such as on a full disk, it runs all the same:
        only the next controller will not adopt it."""
        self.record = record
        try:
            processes.write_file(self.record_path, record)
        except OSError as error:
            log.warning(
                "%s cannot be written: %s: if this controller is killed, the next one starts %s"
                " anew", self.record_path, error.strerror, self.name,
            )  # fmt: skip

    def forget(self) -> None:
        """Nothing runs here any more. A record that stays names a process that has ended."""
        self.record = None
        with contextlib.suppress(OSError):
            self.record_path.unlink()


def seats_of(file: FleetFile, models: Mapping[str, Served], folder: Path) -> tuple[Seat, ...]:
    """In the order of the file: for each model its replicas, then its standbys."""
    found: list[Seat] = []
    for name, model in file.models.items():
        served = models[name]
        for number, place in enumerate(model.replicas):
            found.append(Seat(f"{name}-{number}", served, place, True, True, file, folder))
        for number, spare in enumerate(model.standbys):
            label = f"{name}-standby-{number}"
            found.append(Seat(label, served, spare, False, spare.warm, file, folder))
    return tuple(found)


class Another(NamedTuple):
    """What a server has loaded is not what it was started for."""

    loaded: str
    why: str


def another(cards: Sequence[Card], base: Card, seat: Seat, version: str) -> Another | None:
    """Whether what a server lists is not what was to be started; None: it is, as far as it says."""
    name, weights = seat.served.name, seat.served.versions[version]
    names = [card.id for card in cards]
    if name not in names:
        served = ", ".join(names)
        return Another(
            served, f"it serves {served}, not {name}: its command must give it {{model}}"
        )
    if base.twinkeel_version:
        loaded, wanted = base.twinkeel_version, version
    elif base.twinkeel_profile or base.root is None or base.root == base.id:
        return None  # it does not say
    else:
        loaded, wanted = base.root, weights
    if loaded == wanted or Path(loaded).resolve() == Path(wanted).resolve():
        return None
    return Another(loaded, f"another version was loaded: {loaded}, not {wanted}")


def _rules(spec: Model, file: FleetFile, warm: bool) -> Rules:
    backoff = file.backoff
    return Rules(
        warm, _ns(spec.start_s_most), _ns(spec.stop_s_most), _ns(backoff.first_s),
        _ns(backoff.most_s), _ns(backoff.forgive_s), backoff.give_up_after,
    )  # fmt: skip


def _ns(s: float) -> int:
    return round(s * NS_PER_S)


def _filled(part: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        part = part.replace(f"{{{key}}}", value)
    return part


def _number(command: Sequence[str], option: str) -> int:
    """The whole number that a command gives an option; 0: none."""
    for part, after in zip(command, (*command[1:], ""), strict=True):
        name, equals, value = part.partition("=")
        if name == option:
            text = value if equals else after
            return int(text) if text.isascii() and text.isdigit() else 0
    return 0
