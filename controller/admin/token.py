"""The admin token: where it comes from, and the comparison that tells nothing about it."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from typing import TYPE_CHECKING

from controller.store.secret import kept
from policy.files import FileError

if TYPE_CHECKING:
    from pathlib import Path

    from controller.config import Settings

FILE = "admin.token"
ADDRESS_FILE = "admin.url"
"""Beside it, while the controller runs: where its admin API is."""
LENGTH_LEAST = 16
"""Characters; shorter ones can be guessed."""


def token_path(settings: Settings) -> Path:
    """Where the token is kept that nobody gave."""
    return settings.data_path / FILE


def load_token(settings: Settings) -> str:
    """The token that was given; else the one in the data folder, made if it is not there.

    Raises:
        FileError: it is too short, or no header can carry it.
    """
    if settings.admin_token:
        return checked(settings.admin_token, "the settings", "admin_token")
    path = token_path(settings)
    return read_token(kept(path, lambda: f"{secrets.token_urlsafe(32)}\n".encode()), path)


def read_token(data: bytes, path: Path) -> str:
    """The token that a file holds.

    Raises:
        FileError: it holds none that can serve as one.
    """
    try:
        return checked(data.decode().strip(), str(path))
    except UnicodeDecodeError as error:
        raise FileError(str(path), "is no text, so it holds no token") from error


def checked(token: str, where: str, key: str = "") -> str:
    """The token, if it can serve as one.

    Raises:
        FileError: it cannot; the token itself is not in the message.
    """
    if len(token) < LENGTH_LEAST:
        raise FileError(
            where, f"the admin token has {len(token)} characters: use at least {LENGTH_LEAST}"
            " random ones", key=key,
        )  # fmt: skip
    if not token.isascii() or any(letter.isspace() for letter in token):
        raise FileError(
            where, "the admin token has spaces or letters beyond ASCII: no header can carry it",
            key=key,
        )  # fmt: skip
    return token


class Gate:
    """Compares what is presented with the token, in the same time whatever it is."""

    def __init__(self, token: str) -> None:
        self._digest = sha256(token.encode()).digest()

    def opens(self, authorization: str) -> bool:
        """For an ``Authorization: Bearer TOKEN`` header; a missing one is an empty one."""
        scheme, _, token = authorization.partition(" ")
        presented = sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        return hmac.compare_digest(presented, self._digest) and scheme.lower() == "bearer"
