"""The published descriptions of both APIs."""

from __future__ import annotations

from importlib import resources

import msgspec
import yaml


def published(package: str) -> bytes:
    """``openapi.yaml`` of a package, as JSON."""
    text = (resources.files(package) / "openapi.yaml").read_text(encoding="utf-8")
    return msgspec.json.encode(yaml.safe_load(text))
