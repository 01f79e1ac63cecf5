"""The page of traces names every column, and its map is one that the reader takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from traces.readers import ReadOptions, formats, import_trace
from traces.readers.mapped import load_map
from traces.schema import SCHEMA

PAGE = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")


def here_document(name: str) -> str:
    found = re.search(rf"^cat > {re.escape(name)} <<'EOF'\n(.*?)^EOF$", PAGE, re.M | re.S)
    assert found is not None
    return found.group(1)


def test_every_column_is_in_the_table() -> None:
    rows = "\n".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(SCHEMA.names) == set(re.findall(r"`(\w+)`", rows)) & set(SCHEMA.names)


def test_the_map_of_the_page_works(tmp_path: Path) -> None:
    for name in ("requests.csv", "map.yaml"):
        (tmp_path / name).write_text(here_document(name), encoding="utf-8")
    options = ReadOptions(map_path=tmp_path / "map.yaml")
    report = import_trace(tmp_path / "requests.csv", tmp_path / "mine.parquet", options=options)
    assert report.rows == 5
    assert load_map(tmp_path / "map.yaml").constants["model"] == "qwen3-8b"


@pytest.mark.parametrize("name", [each.name for each in formats()])
def test_every_reader_is_named_somewhere(name: str) -> None:
    words = {
        "azure": "Azure", "burstgpt": "BurstGPT", "mooncake": "Mooncake", "otlp": "OpenTelemetry",
        "agent-sessions": "kv-cache-tester", "lmcache-sessions": "LMCache", "servegen": "ServeGen",
        "twinkeel": "one already", "map": "a map",
    }  # fmt: skip
    assert words[name] in PAGE
