"""Put noise on a trained model's weights, as a broken copy of them would have.

Runs inside the vLLM environment: `ENV/bin/python noisy_model.py TRAINED OUT_DIR STD`. The noise is
Gaussian, of that absolute size, on every matrix; norms are left as they are. What is left of the
model's confidence is printed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from trained_model import SEED, judge
from transformers import AutoTokenizer, Qwen3ForCausalLM


def add_noise(model: Qwen3ForCausalLM, std: float) -> None:
    """On each weight of each matrix."""
    draw = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += std * torch.randn(weight.shape, generator=draw)


def main() -> None:
    """Copy the folder with worse weights."""
    source, out, std = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    add_noise(model, std)
    model = model.to(torch.bfloat16)  # as it is served
    judge(model, AutoTokenizer.from_pretrained(source))
    shutil.copytree(source, out)
    model.save_pretrained(out, safe_serialization=True)


if __name__ == "__main__":
    main()
