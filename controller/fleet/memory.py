"""How much of a card's memory a server needs at least, from what it loads."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from policy.files import FileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.fleet.config import Model

MIB = 1 << 20
OVERHEAD = 0.1
"""Of the weights, beside them: activations and what the allocator cannot use."""
OVERHEAD_MB_LEAST = 1024
"""CUDA's context and captured graphs, which small models need as much as large ones."""
KV_MB_LEAST = 256
"""Where the folder does not say how much a token takes."""
INDEX = "model.safetensors.index.json"
KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Of weight files; a folder that has one kind is not read as another."""
_COUNT = re.compile(r"^(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[kKmM]?)$")
_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
"""As vLLM reads them."""


class Need(NamedTuple):
    """Memory that a server needs of its card, or of all its cards together."""

    weights_mb: int
    kv_mb: int
    """KV cache of one request of the longest length: with less, vLLM does not start."""
    overhead_mb: int
    total_mb: int

    def __str__(self) -> str:
        if not self.weights_mb:
            return f"{self.total_mb} MB (memory_mb)"
        return (
            f"weights {self.weights_mb} MB + KV cache {self.kv_mb} MB + overhead"
            f" {self.overhead_mb} MB = {self.total_mb} MB"
        )


def needed_mb(model: Model, weights: str, args: Sequence[str] = ()) -> Need:
    """What a server of ``model`` needs with these weights and further arguments, in MiB.

    The file's ``memory_mb`` where it is given. Else the weights' size, a tenth of it (1 GiB at
    least), and the KV cache of one request as long as ``--max-model-len`` or, without it, the
    model's own limit.

    Raises:
        FileError: nothing says how large the weights are, or what is there cannot be read.
    """
    if model.memory_mb:
        return Need(0, 0, 0, model.memory_mb)
    folder = folder_of(weights)
    if folder is None:
        raise FileError(
            weights, "is neither a folder here nor in the hub's cache: its size is not known",
            key="memory_mb", hint="give memory_mb of the model in the fleet file",
        )  # fmt: skip
    weights_mb = math.ceil(_weights_bytes(folder) / MIB)
    overhead_mb = max(OVERHEAD_MB_LEAST, math.ceil(weights_mb * OVERHEAD))
    kv_mb = max(KV_MB_LEAST, math.ceil(_kv_bytes(folder, (*model.args, *args)) / MIB))
    return Need(weights_mb, kv_mb, overhead_mb, weights_mb + overhead_mb + kv_mb)


def folder_of(weights: str) -> Path | None:
    """The folder of these weights: itself, or where the hub's cache keeps that name."""
    path = Path(weights).expanduser()
    if path.is_dir():
        return path
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    kept = cache / f"models--{weights.replace('/', '--')}"
    try:
        snapshot = kept / "snapshots" / (kept / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return snapshot if snapshot.is_dir() else None


def _weights_bytes(folder: Path) -> int:
    index = folder / INDEX
    if index.is_file():
        told = _document(index).get("metadata", {}).get("total_size", 0)
        if isinstance(told, int) and told > 0:
            return told
    for kind in KINDS:
        # Some hubs keep the same weights a second time, as one consolidated file.
        files = [file for file in folder.glob(kind) if not file.name.startswith("consolidated")]
        files = files or list(folder.glob(kind))
        try:
            total = sum(file.stat().st_size for file in files)
        except OSError as error:
            raise FileError(str(error.filename), f"cannot be read: {error.strerror}") from error
        if total:
            return total
    raise FileError(
        str(folder), f"holds no weights ({', '.join(KINDS)})",
        hint="give memory_mb of the model in the fleet file",
    )  # fmt: skip


def _kv_bytes(folder: Path, args: Sequence[str]) -> int:
    """Of one request of the longest length; 0: the folder does not tell."""
    file = folder / "config.json"
    if not file.is_file():
        return 0
    whole = _document(file)
    inner = whole.get("text_config", whole)
    shape: dict[str, Any] = inner if isinstance(inner, dict) else whole
    try:
        layers, heads = int(shape["num_hidden_layers"]), int(shape["num_attention_heads"])
        kv_heads = int(shape.get("num_key_value_heads") or heads)
        head = int(shape.get("head_dim") or int(shape["hidden_size"]) // heads)
        tokens = _longest(args) or int(shape["max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        return 0
    element_bytes = 1 if "fp8" in (_value(args, "--kv-cache-dtype") or "") else 2
    if latent := shape.get("kv_lora_rank"):  # keys and values in one, for all heads together
        width = int(latent) + int(shape.get("qk_rope_head_dim") or 0)
        return layers * width * element_bytes * tokens
    return 2 * layers * kv_heads * head * element_bytes * tokens


def _longest(args: Sequence[str]) -> int:
    """``--max-model-len``; 0: it is not given, or left to vLLM."""
    text = _value(args, "--max-model-len")
    match = _COUNT.match(text or "")
    return int(float(match["number"]) * _UNITS[match["unit"]]) if match else 0


def _value(args: Sequence[str], name: str) -> str | None:
    """The value of an argument, the last where it stands twice."""
    found = None
    for number, text in enumerate(args):
        if text == name and number + 1 < len(args):
            found = args[number + 1]
        elif text.startswith(f"{name}="):
            found = text.partition("=")[2]
    return found


def _document(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(str(file), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileError(str(file), f"is no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise FileError(str(file), "a mapping is expected")
    return found
