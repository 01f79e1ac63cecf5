"""Uploads: kept by what is in them, and refused with a sentence."""

from __future__ import annotations

import gzip
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dashboards.shelf import Shelf, label
from policy.files import FileError, load_policy
from traces import TraceError, open_trace
from traces.store import resolve_path

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROWS = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
MOONCAKE = '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
POLICY = "schema: 1\nname: mine\ndiscipline: tiered\n"


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "uploads")


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("azure.csv", (AZURE + AZURE_ROWS).encode()),
        ("azure.csv.gz", gzip.compress((AZURE + AZURE_ROWS).encode())),
        ("mooncake.jsonl", (2 * MOONCAKE).encode()),
        ("demo.parquet", resolve_path("shipped:demo").read_bytes()),
        ("DEMO.PARQUET", resolve_path("shipped:demo").read_bytes()),
    ],
)
def test_traces_of_every_kind_are_kept(shelf: Shelf, name: str, content: bytes) -> None:
    found = shelf.add_trace(name, content)
    trace = open_trace(shelf.path_of(found.name))
    assert trace.rows >= 2
    assert found.name in shelf.traces()
    assert label(found.name) == name.partition(".")[0]
    assert shelf.add_trace(name, content).name == found.name
    assert len(shelf.traces()) == len(Shelf(Path("nowhere")).traces()) + 1


def test_the_same_name_with_other_content_is_another_trace(shelf: Shelf) -> None:
    one = shelf.add_trace("a.csv", (AZURE + AZURE_ROWS).encode())
    two = shelf.add_trace("a.csv", (AZURE + AZURE_ROWS + AZURE_ROWS).encode())
    assert one.name != two.name
    assert shelf.path_of(one.name) != shelf.path_of(two.name)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.csv", b"", "empty.csv"),
        ("empty.parquet", b"", "empty.parquet"),
        ("head.csv", AZURE.encode(), "no request to import"),
        ("other.csv", b"a,b\n1,2\n", "other.csv"),
        ("noise.bin", noise(1, 5000), "noise.bin"),
        ("noise.csv", noise(2, 5000), "noise.csv"),
        ("noise.parquet", b"PAR1" + noise(3, 5000) + b"PAR1", "noise.parquet"),
        ("noise.jsonl.gz", b"\x1f\x8b" + noise(4, 500), "noise.jsonl.gz"),
        ("row.csv", (AZURE + AZURE_ROWS + "later,many,10\n").encode(), "row.csv.*(row|line)"),
        (
            "long.csv",
            (AZURE + AZURE_ROWS + "2023-11-16 18:17:05," + "9" * 2_000_000 + ",1\n").encode(),
            "long.csv",
        ),
        ("half.parquet", resolve_path("shipped:demo").read_bytes()[:-3000], "half.parquet"),
        ("list.jsonl", b"[1, 2]\n", "list.jsonl"),
        ("torn.jsonl", (MOONCAKE + MOONCAKE[:20]).encode(), "torn.jsonl"),
    ],
)
def test_a_bad_trace_is_a_sentence_and_is_not_kept(
    shelf: Shelf, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    with pytest.raises(TraceError, match=said) as caught:
        shelf.add_trace(name, content)
    sentence = str(caught.value)
    assert str(tmp_path) not in sentence, "it speaks of the file as the user knows it"
    assert len(sentence) < 1000
    assert kept(tmp_path) == []


@settings(max_examples=60, deadline=None)
@given(some.binary(max_size=300), some.sampled_from(["csv", "jsonl", "parquet", "gz", "zst", ""]))
def test_anything_can_be_uploaded(content: bytes, ending: str) -> None:
    with TemporaryDirectory() as folder, pytest.raises(TraceError):
        Shelf(Path(folder)).add_trace(f"x.{ending}", content)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd.csv", "/etc/passwd", "..", ".", "", "a b\tc.csv", "日志 2026.csv",
        "~.csv",
        "\U00020000" * 80 + ".csv", "x" * 300 + ".csv", "a." + "y" * 300, "a.c\0v", "\ud800.csv",
        "-o.csv", "upload:x.csv", "a\\b.csv", "<b>x</b>.csv", "a%2fb.csv", "q?x=1&y=2.csv",
    ],
)  # fmt: skip
def test_any_file_name_is_good(shelf: Shelf, tmp_path: Path, name: str) -> None:
    found = shelf.add_trace(name, (AZURE + AZURE_ROWS).encode())
    path = shelf.path_of(found.name)
    assert isinstance(path, Path)
    assert path.parent == tmp_path / "uploads"
    assert len(kept(tmp_path)) == 1
    assert found.name in shelf.traces()
    policy = shelf.add_policy(name, POLICY)
    assert load_policy(shelf.path_of(policy.name)).name == "mine"
    assert policy.name in shelf.policies()


@pytest.mark.parametrize(
    "name",
    [
        "upload:", "upload:x", "upload:x~0123456789abcdef.trace",
        "upload:../x~0123456789abcdef.trace",
        "upload:..~0123456789abcdef.trace", "upload:x~0123.trace", "upload:/etc/passwd",
    ],
)  # fmt: skip
def test_an_unknown_upload_is_a_sentence(shelf: Shelf, name: str) -> None:
    with pytest.raises(TraceError, match="not among the uploads here: upload it again"):
        shelf.path_of(name)
    with pytest.raises(FileError, match="not among the uploads here: upload it again"):
        shelf.path_of("upload:x~0123456789abcdef.policy")


def test_what_is_no_upload_is_named_as_it_is(shelf: Shelf) -> None:
    for name in ("shipped:demo", "stable"):
        assert shelf.path_of(name) == name
        assert label(name) == name


@pytest.mark.parametrize("name", ["some/file.parquet", "/etc/passwd", "../mine.yaml", "mine.yml"])
def test_a_path_is_no_name(shelf: Shelf, name: str) -> None:
    with pytest.raises((TraceError, FileError), match="none of the shipped ones: upload it"):
        shelf.path_of(name)


def test_a_policy_is_checked(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"mine\.yaml.*turbo_mx_tflop"):
        shelf.add_policy("mine.yaml", POLICY + "tiers: {turbo_mx_tflop: 5}\n")
    with pytest.raises(FileError, match="no valid YAML"):
        shelf.add_policy("mine.yaml", "a: [")
    with pytest.raises(FileError, match="a mapping is expected"):
        shelf.add_policy("mine.yaml", "")
    assert kept(tmp_path) == []
    found = shelf.add_policy("mine.yaml", POLICY)
    assert found == shelf.add_policy("mine.yaml", POLICY)
    assert label(found.name) == "mine"
