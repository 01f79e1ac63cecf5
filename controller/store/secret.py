"""Secrets that are made once and kept in the data folder, readable by their owner only."""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

from policy.files import FileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOGGER = logging.getLogger("twinkeel")
KEY_BYTES = 32
KEY_BYTES_LEAST, KEY_BYTES_MOST = 16, 64
"""What a keyed hash takes; of an empty key, anybody could make the same hashes."""


def kept(path: Path, make: Callable[[], bytes]) -> bytes:
    """What the file holds; made, with its folder, if it is not there."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return _written(path, make())
    if path.stat().st_mode & 0o077:
        try:
            path.chmod(0o600)
        except OSError:  # mounted into a container, it is not ours to change
            LOGGER.warning("%s can be read by others than its owner", path)
        else:
            LOGGER.warning("%s could be read by others than its owner: now it cannot", path)
    return secret


def kept_key(path: Path) -> bytes:
    """A key for hashes, kept so that they stay comparable over restarts.

    Raises:
        FileError: the file holds none.
    """
    key = kept(path, lambda: secrets.token_bytes(KEY_BYTES))
    if not KEY_BYTES_LEAST <= len(key) <= KEY_BYTES_MOST:
        raise FileError(
            str(path), f"{len(key)} bytes are no key",
            hint="delete it and a new one is made; hashes made with the old one match no more",
        )  # fmt: skip
    return key


def _written(path: Path, secret: bytes) -> bytes:
    """Complete before it has its name: a crash never leaves half a secret behind."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    making = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    return secret
