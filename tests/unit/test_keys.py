"""API keys: only hashes are kept, and what might be a key is never shown."""

from __future__ import annotations

import stat
from datetime import date
from typing import TYPE_CHECKING

import pytest

from controller.gateway.keys import (
    Entry,
    Keys,
    Tenant,
    add_entry,
    digest_of,
    load_keys,
    new_key,
    read_entries,
)
from policy.files import FileError

if TYPE_CHECKING:
    from pathlib import Path

DAY = date(2026, 5, 17)


def keys_of(*entries: Entry) -> Keys:
    return Keys(entries, lambda: DAY)


def entry(key: str, tenant: str = "support", **more: object) -> Entry:
    return Entry(digest_of(key), tenant, **more)  # type: ignore[arg-type]


def test_a_known_key_names_its_tenant() -> None:
    keys = keys_of(entry("alpha", "support", sla="P0", line="chat"), entry("beta", "search"))
    assert keys.check("Bearer alpha") == Tenant("support", "P0", "chat")
    assert keys.check("bearer  beta ") == Tenant("search", "", "")


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer ", "alpha", "Basic alpha", "Bearer alph", "Bearer alphaa",
        "Bearer Alpha", "Bearer " + "a" * 10_000, "Bearer alpha\x00", "Bearer \udce4",
        "Bearer " + digest_of("alpha"),
    ],
)  # fmt: skip
def test_anything_else_is_nobody(header: str) -> None:
    assert keys_of(entry("alpha")).check(header) is None


def test_nothing_is_taken_where_there_are_no_keys() -> None:
    assert keys_of().check("Bearer alpha") is None


@pytest.mark.parametrize(
    ("expires", "taken"),
    [(date(2026, 5, 16), False), (DAY, True), (date(2026, 5, 18), True), (None, True)],
)
def test_a_key_is_taken_up_to_its_last_day(expires: date | None, taken: bool) -> None:
    keys = keys_of(entry("alpha", expires=expires))
    assert (keys.check("Bearer alpha") is not None) == taken


def test_keys_go_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first, second = new_key(), new_key()
    assert first != second
    add_entry(path, entry(first, "team: a", line='quoted "line"'))
    add_entry(path, entry(second, "search", sla="P2", expires=date(2027, 1, 31)))
    text = path.read_text()
    assert first not in text
    assert second not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["keys.yaml"]
    keys = load_keys(path, lambda: DAY)
    assert len(keys) == 2
    assert keys.check(f"Bearer {first}") == Tenant("team: a", "", 'quoted "line"')
    assert keys.check(f"Bearer {second}") == Tenant("search", "P2", "")
    assert read_entries(path)[1].expires == date(2027, 1, 31)


def test_adding_keeps_comments_indentation_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f'# ours\nschema: 1\nkeys:\n# first\n- sha256: "{digest_of("a")}"\n  tenant: a\n'
    )
    path.chmod(0o640)
    add_entry(path, entry("b", "b"))
    assert path.read_text().startswith("# ours\nschema: 1\nkeys:\n# first\n- sha256:")
    assert [item.tenant for item in read_entries(path)] == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("text", ["schema: 1\n", "schema: 1\nkeys: []\n", "schema: 1\nkeys:\n"])
def test_adding_to_a_file_without_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    assert len(load_keys(path)) == 0
    add_entry(path, entry("b", "b"))
    assert [item.tenant for item in read_entries(path)] == ["b"]


def test_a_file_laid_out_otherwise_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    text = f'keys: [{{sha256: "{digest_of("a")}", tenant: a}}]\nschema: 1\n'
    path.write_text(text)
    with pytest.raises(FileError, match="by hand"):
        add_entry(path, entry("b", "b"))
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("key: hunter2hunter2", "plain key"),
        ("{Token: hunter2hunter2, tenant: a}", "plain key"),
        ("{sha256: hunter2hunter2, tenant: a}", "sha256"),
        ("{sha256: 12345, tenant: a}", "sha256"),
        ("hunter2hunter2", "mapping"),
        (f"{{sha256: {digest_of('x').upper()}, tenant: a}}", "sha256"),
        (f'{{sha256: "{digest_of("x")}"}}', "tenant"),
        (f'{{sha256: "{digest_of("x")}", tenant: a, slaa: P1}}', "sla"),
        (f'{{sha256: "{digest_of("x")}", tenant: a, sla: P7}}', "P7"),
        (f'{{sha256: "{digest_of("x")}", tenant: a, expires: soon}}', "expires"),
    ],
)
def test_a_bad_item_is_refused_and_never_shown(tmp_path: Path, item: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"schema: 1\nkeys:\n  - {item}\n")
    with pytest.raises(FileError, match=said) as caught:
        load_keys(path)
    assert "hunter2" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: []\n", "schema"),
        ("schema: 2\nkeys: []\n", "schema 2"),
        ("schema: 1\nkeys: 5\n", "list"),
        ("schema: 1\nkees: []\n", "keys"),
        ("[1]\n", "mapping"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=said):
        load_keys(path)


def test_no_tenant_is_another_ones_user(tmp_path: Path) -> None:
    """Users are TENANT/USER: ``eu/bob`` of ``acme`` would be ``bob`` of ``acme/eu``."""
    path = tmp_path / "keys.yaml"
    add_entry(path, entry("a", "acme/eu"))
    add_entry(path, entry("b", "acme/us"))
    add_entry(path, entry("c", "acme/eu"))
    add_entry(path, entry("d", "ac"))
    for tenant in ("acme", "acme/us/west"):
        text = path.read_text()
        with pytest.raises(FileError, match="reads as a user of tenant"):
            add_entry(path, entry("e", tenant))
        assert path.read_text() == text
        item = f'- sha256: "{digest_of("e")}"\n  tenant: {tenant}\n'
        other = tmp_path / "other.yaml"
        other.write_text(text + item.replace("\n  t", "\n    t").replace("- s", "  - s"))
        with pytest.raises(FileError, match="reads as a user of tenant"):
            load_keys(other)


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    item = f'  - {{sha256: "{digest_of("x")}", tenant: a}}\n'
    path.write_text(f"schema: 1\nkeys:\n{item}{item}")
    with pytest.raises(FileError, match=r"same key as keys\[0\]"):
        load_keys(path)
