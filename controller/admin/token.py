"""The admin token: where it comes from, and the comparison that tells nothing about it."""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from controller.config import Settings

FILE = "admin.token"
LENGTH_LEAST = 16
"""Characters; shorter ones can be guessed."""


def token_path(settings: Settings) -> Path:
    """Where the token is kept that nobody gave."""
    return settings.data_path / FILE


def load_token(settings: Settings) -> str:
    """The token that was given; else the one in the data folder, made if it is not there.

    Raises:
        ValueError: it is too short, or the file is readable by others.
    """
    if settings.admin_token:
        return checked(settings.admin_token, "the admin token")
    path = token_path(settings)
    try:
        return checked(path.read_text(encoding="utf-8").strip(), str(path))
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    # Complete before it has its name: a crash never leaves half a token behind.
    making = path.with_name(f".{FILE}.{secrets.token_hex(4)}")
    handle = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    making.replace(path)
    return token


def checked(token: str, where: str) -> str:
    """The token, if it can serve as one."""
    if len(token) < LENGTH_LEAST:
        raise ValueError(
            f"{where} has {len(token)} characters: use at least {LENGTH_LEAST} random ones"
        )
    if not token.isascii() or any(letter.isspace() for letter in token):
        raise ValueError(f"{where} has spaces or letters beyond ASCII: no header can carry it")
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
