"""Train the tiny model for about two minutes.

Runs inside the vLLM environment: `ENV/bin/python trained_model.py TINY OUT_DIR`. A random model has
no confidence to lose: each of its 4096 words is as likely as the next. This one learns from the
text of Python's standard library, half of it as turns of a chat: a user gives the beginning of a
piece, the assistant goes on. The seed is fixed; another number of threads or another processor
changes the last digits. What it has learned is printed, of text that it never saw, and must be in a
band.
"""

from __future__ import annotations

import math
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

SEED = 0
STEPS = 480
WARM_STEPS = 15
BATCH = 8
LENGTH = 128
"""Tokens of a piece of text."""
MUON_RATE, ADAM_RATE = 0.02, 5e-3
FILES = 48
"""Modules whose text it sees about once in its few minutes."""
HELD_OUT_EVERY = 12
"""One part in so many, of ``PART`` tokens, is never trained on."""
PART = 512
HELD_OUT_PIECES = 96
ENTROPY_NATS = (2.2, 4.0)
"""Mean token entropy on held-out text: 8.3 before training."""
FIRST_SHARE = (0.3, 0.6)
"""Share of held-out tokens that were the model's first candidate: 0.0002 before training."""


def corpus(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the library's own modules, in two: to train on, and to hold out."""
    library = Path(sysconfig.get_path("stdlib"))
    tokens: list[int] = []
    for path in sorted(library.glob("*.py"))[:FILES]:
        tokens += tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"))
    parts = torch.tensor(tokens).split(PART)
    held = [part for number, part in enumerate(parts) if number % HELD_OUT_EVERY == 0]
    seen = [part for number, part in enumerate(parts) if number % HELD_OUT_EVERY]
    return torch.cat(seen), torch.cat(held)


class Pieces:
    """Draws pieces of text, every other one as a user's turn and an assistant's."""

    def __init__(self, tokens: torch.Tensor, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokens = tokens
        self._draw = torch.Generator().manual_seed(seed)
        self._user = tokenizer.encode("<|im_start|>user\n")
        self._turn = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
        self._end = tokenizer.encode("<|im_end|>")

    def batch(self, size: int) -> torch.Tensor:
        """``size`` pieces, each a token longer than the model reads."""
        return torch.stack([self._piece(chat=number % 2 == 1) for number in range(size)])

    def _piece(self, chat: bool) -> torch.Tensor:
        start = self._number(len(self._tokens) - LENGTH - 1)
        text = self._tokens[start : start + LENGTH + 1].tolist()
        if chat:
            asked = self._number(LENGTH // 2) + 4
            said = LENGTH + 1 - asked - len(self._user) - len(self._turn) - len(self._end)
            answer = text[asked : asked + said]
            text = [*self._user, *text[:asked], *self._turn, *answer, *self._end]
        return torch.tensor(text[: LENGTH + 1])

    def _number(self, below: int) -> int:
        return int(torch.randint(below, (1,), generator=self._draw))


def train(model: Qwen3ForCausalLM, pieces: Pieces) -> None:
    """Muon on the matrices, AdamW on the rest; a short warm-up, then down along a cosine."""
    named = dict(model.named_parameters())
    matrices = [name for name, weight in named.items() if weight.dim() > 1 and "embed" not in name]
    rest = [weight for name, weight in named.items() if name not in matrices]
    optimizers = [
        (Muon([named[name] for name in matrices], lr=MUON_RATE, weight_decay=0.0), MUON_RATE),
        (AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE),
    ]
    began_s = time.monotonic()
    for step in range(STEPS):
        fallen = min(1.0, (step + 1) / WARM_STEPS) * (1 + math.cos(math.pi * step / STEPS)) / 2
        batch = pieces.batch(BATCH)
        with torch.autocast("cpu", torch.bfloat16):  # as it is served, and faster
            logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * fallen
            optimizer.step()
        if step % 60 == 0 or step == STEPS - 1:
            _say(f"step {step}: loss {loss.item():.2f}, {time.monotonic() - began_s:.0f} s")


def judged(model: Qwen3ForCausalLM, pieces: Pieces) -> tuple[float, float]:
    """Mean token entropy in nats, and the share of tokens that were the first candidate."""
    entropies: list[torch.Tensor] = []
    firsts: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(HELD_OUT_PIECES // BATCH):
            batch = pieces.batch(BATCH)
            likely = model(input_ids=batch[:, :-1]).logits.float().log_softmax(-1)
            entropies.append(-(likely.exp() * likely).sum(-1).flatten())
            firsts.append((likely.argmax(-1) == batch[:, 1:]).float().flatten())
    return torch.cat(entropies).mean().item(), torch.cat(firsts).mean().item()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def judge(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    """``judged`` on what is held out, and said."""
    entropy, first = judged(model, Pieces(corpus(tokenizer)[1], tokenizer, SEED + 1))
    _say(f"held-out text: mean entropy {entropy:.2f} nats, first candidate right {first:.3f}")
    return entropy, first


def main() -> None:
    """Copy the folder, its tokenizer and settings included, with trained weights."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(source)
    seen, held = corpus(tokenizer)
    _say(f"training on {len(seen)} tokens; {len(held)} are held out")
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    train(model, Pieces(seen, tokenizer, SEED))
    model = model.to(torch.bfloat16)  # as it is served
    entropy, first = judge(model, tokenizer)
    low, high = ENTROPY_NATS
    assert low <= entropy <= high, f"mean entropy {entropy:.2f} is not in {ENTROPY_NATS}"
    low, high = FIRST_SHARE
    assert low <= first <= high, f"first candidate right {first:.3f} is not in {FIRST_SHARE}"
    shutil.copytree(source, out)
    model.save_pretrained(out, safe_serialization=True)


if __name__ == "__main__":
    main()
