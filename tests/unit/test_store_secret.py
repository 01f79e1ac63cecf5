"""Secrets of the data folder: made once, whole, private, and never a bad one."""

from __future__ import annotations

import errno
import stat
from typing import TYPE_CHECKING

import pytest

from controller.store.secret import kept, kept_key
from policy.files import FileError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "trace.key"
    key = kept_key(path)
    assert len(key) == 32
    assert kept_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["trace.key"]


@pytest.mark.parametrize("size", [0, 15, 65])
def test_what_is_no_key_is_refused_with_what_to_do(tmp_path: Path, size: int) -> None:
    path = tmp_path / "fingerprint.key"
    path.write_bytes(b"k" * size)
    with pytest.raises(FileError, match=f"fingerprint.key: {size} bytes are no key.*delete it"):
        kept_key(path)


def test_what_others_could_read_they_no_longer_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o644)
    assert kept_key(path) == b"k" * 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "could be read by others" in caplog.text


def test_one_whose_mode_is_not_ours_to_change_is_read_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deploy.key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o644)

    def mounted(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(path), "chmod", mounted)
    assert kept_key(path) == b"k" * 32
    assert "can be read by others" in caplog.text


def test_a_secret_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "full").touch()
    with pytest.raises(OSError, match="a"):
        kept(tmp_path / "a", lambda: b"secret")
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["full"]
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
