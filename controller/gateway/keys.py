"""API keys of callers, kept as hashes: whose request it is, and what it gets by default.

The file holds the SHA-256 of each key, never the key itself: whoever reads it can call nobody.

    schema: 1
    keys:
      - sha256: "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
        tenant: support
        sla: P1              # of its requests that name no class
        line: support-chat   # of its requests that name no business line
        expires: 2027-01-31  # the last day, UTC, on which it is taken

Keys are long and random, so one round of SHA-256 is enough. A presented key is looked up by a keyed
hash whose secret lives only in this process, and then compared in full in constant time: how long
it takes says nothing about how near a guess came.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from contextlib import suppress
from datetime import UTC, date, datetime
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from policy.files import FileError, decode, parse_document, read_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SCHEMA = 1
PREFIX = "twk_"
"""Of the keys made here, so that a leaked one can be found by searching for it."""
KEY_BYTES_MOST = 512
"""Of a presented key; longer ones are no keys."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLAIN = frozenset({"key", "api_key", "apikey", "token", "secret", "password", "value", "plain"})
_NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._@:/-]*$"

Name = Annotated[str, Meta(pattern=_NAME, max_length=80)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key, as the file has it."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    """Of the whole key, in lower-case hexadecimal digits."""
    tenant: Name
    sla: Literal["P0", "P1", "P2", ""] = ""
    line: Annotated[str, Meta(max_length=80)] = ""
    expires: date | None = None
    """The last day, in UTC, on which it is taken."""


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    schema: int
    keys: Annotated[tuple[Entry, ...], Meta(max_length=10_000)] = ()


class Tenant(NamedTuple):
    """Whose key it was, and what its requests get where they say nothing."""

    name: str
    sla: str
    line: str


class Keys:
    """The keys that are taken. ``today()`` is the present day in UTC."""

    def __init__(self, entries: Iterable[Entry], today: Callable[[], date] | None = None) -> None:
        self._today = today or _utc_today
        self._secret = secrets.token_bytes(32)
        self._known: dict[bytes, tuple[bytes, Tenant, date | None]] = {}
        for entry in entries:
            digest = bytes.fromhex(entry.sha256)
            tenant = Tenant(entry.tenant, entry.sla, entry.line)
            self._known[self._tag(digest)] = (digest, tenant, entry.expires)

    def __len__(self) -> int:
        return len(self._known)

    def check(self, authorization: str) -> Tenant | None:
        """The tenant behind an ``Authorization: Bearer KEY`` header; None: no key that is taken."""
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > KEY_BYTES_MOST:
            return None
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        known = self._known.get(self._tag(digest))
        # The comparison also runs where nothing was found, against something that never fits.
        expected, tenant, expires = known or (bytes(32), None, None)
        if not hmac.compare_digest(digest, expected) or tenant is None:
            return None
        if expires is not None and self._today() > expires:
            return None
        return tenant

    def _tag(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


def load_keys(path: str | Path, today: Callable[[], date] | None = None) -> Keys:
    """The keys of a file. Errors never show what might be a key."""
    return Keys(read_entries(Path(path)), today)


def read_entries(path: Path) -> tuple[Entry, ...]:
    """What the file holds, in its order."""
    return _entries(read_document(path), str(path))


def new_key() -> str:
    """A fresh random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What the file holds of a key."""
    return sha256(key.encode()).hexdigest()


def add_entry(path: Path, entry: Entry) -> None:
    """Append a key to the file, made if it is not there; comments and order stay as they are.

    The file is replaced as a whole, so a crash leaves the old one or the new one.
    """
    before: tuple[Entry, ...] = ()
    text = f"schema: {SCHEMA}\nkeys:\n"
    mode = 0o600
    if path.exists():
        before = read_entries(path)
        _check_apart((*before, entry), str(path))
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode & 0o777
        if not before:  # `keys: []`, or no keys at all
            text = re.sub(r"(?m)^keys:.*\n?", "", text)
            text = f"{text.rstrip()}\nkeys:\n"
    item = _item(entry)
    indent = re.search(r"(?m)^keys:[^\n]*\n(?:\s*#[^\n]*\n|\s*\n)*(?P<indent> *)- ", text)
    pad = "  " if indent is None else indent["indent"]
    text = f"{text.rstrip()}\n" + "".join(f"{pad}{line}\n" for line in item)
    _check_added(path, text, (*before, entry), item)
    _replace(path, text, mode)


def _check_added(path: Path, text: str, expected: tuple[Entry, ...], item: tuple[str, ...]) -> None:
    """A file laid out in another way is left alone."""
    entries: tuple[Entry, ...] | None = None
    with suppress(FileError):
        entries = _entries(parse_document(text, str(path)), str(path))
    if entries != expected:
        raise FileError(
            str(path),
            "the new key cannot be put at its end, since `keys:` is not the last part of it, or is"
            " written in one line",
            key="keys",
            hint="add it by hand: " + " ".join(item),
        )


def _item(entry: Entry) -> tuple[str, ...]:
    lines = [f'- sha256: "{entry.sha256}"', f"  tenant: {_quoted(entry.tenant)}"]
    if entry.sla:
        lines.append(f"  sla: {entry.sla}")
    if entry.line:
        lines.append(f"  line: {_quoted(entry.line)}")
    if entry.expires is not None:
        lines.append(f"  expires: {entry.expires.isoformat()}")
    return tuple(lines)


def _quoted(text: str) -> str:
    """JSON is YAML."""
    return msgspec.json.encode(text).decode()


def _replace(path: Path, text: str, mode: int) -> None:
    making = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    handle = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        making.chmod(mode)
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise


def _entries(raw: dict[str, Any], where: str) -> tuple[Entry, ...]:
    """The file's keys. What is no hash may be a key, so it is refused before anything is shown."""
    listed: object = raw.get("keys") or []
    if not isinstance(listed, list):
        raise FileError(where, "a list is expected", key="keys")
    seen: dict[str, int] = {}
    for index, item in enumerate(listed):
        key = f"keys[{index}]"
        if not isinstance(item, dict):
            raise FileError(where, "a mapping is expected", key=key, hint=_HINT)
        plain = sorted(_PLAIN & {str(name).lower() for name in item})
        if plain:
            raise FileError(where, "holds a plain key", key=f"{key}.{plain[0]}", hint=_HINT)
        digest = item.get("sha256")
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            raise FileError(
                where,
                "64 lower-case hexadecimal digits in quotes are expected (what stands there is not"
                " shown: it may be a key)",
                key=f"{key}.sha256",
                hint=_HINT,
            )
        if digest in seen:
            raise FileError(where, f"the same key as keys[{seen[digest]}]", key=f"{key}.sha256")
        seen[digest] = index
    if not listed:
        raw = {**raw, "keys": []}
    entries = decode(raw, KeysFile, where, schema=SCHEMA).keys
    _check_apart(entries, where)
    return entries


def _check_apart(entries: tuple[Entry, ...], where: str) -> None:
    """A user is known as TENANT/USER: a tenant must be no other's user."""
    tenants = {entry.tenant for entry in entries}
    for index, entry in enumerate(entries):
        parts = entry.tenant.split("/")
        above = ("/".join(parts[:count]) for count in range(1, len(parts)))
        other = next((name for name in above if name in tenants), None)
        if other is not None:
            raise FileError(
                where,
                f"tenant {entry.tenant!r} reads as a user of tenant {other!r}, who could get its"
                " chains and answers",
                key=f"keys[{index}].tenant",
                hint="name one of them otherwise",
            )


_HINT = "the file holds only the SHA-256 of keys: `twinkeel keys add TENANT` makes one and adds it"


def _utc_today() -> date:
    return datetime.now(UTC).date()
