"""Which kind of fleet the settings ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from controller.fleet.config import check_fleet, load_fleet
from controller.fleet.kubernetes import kubernetes_fleet
from controller.fleet.local import LocalFleet
from controller.fleet.static import StaticFleet
from policy.files import read_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.config import Settings
    from controller.fleet.contract import Fleet

CLUSTER = "kubernetes"
"""What stands at the top of a fleet file whose servers are pods."""
FOLDER = "fleet"
"""In the data folder."""


def open_fleet(settings: Settings) -> Fleet:
    """The fleet of a fleet file, else of the upstreams.

    Raises:
        policy.files.FileError: the fleet file cannot be used.
        OSError: the folder of a local fleet cannot be used.
    """
    if not settings.fleet:
        return StaticFleet(settings.upstreams)
    path = Path(settings.fleet)
    document = read_document(path)
    if CLUSTER in document:
        return kubernetes_fleet(settings.fleet, document)
    return LocalFleet(load_fleet(path), settings.data_path / FOLDER)


def checked(path: Path) -> Iterator[str]:
    """See whether a fleet file can be used here; what there is of it, line by line.

    Raises:
        policy.files.FileError: it cannot be used.
    """
    document = read_document(path)
    if CLUSTER in document:
        count = len(kubernetes_fleet(str(path), document).upstreams)
        yield f"pods of a cluster, slots {count}"
        return
    file = load_fleet(path)
    check_fleet(file, str(path))
    for name, model in file.models.items():
        slots = f"replicas {len(model.replicas)}, standbys {len(model.standbys)}"
        yield f"{name}, version {model.version}: {slots}"
