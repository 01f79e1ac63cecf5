"""Make a tiny random Qwen3 model with a byte-level tokenizer; no hub is reached.

Runs inside the vLLM environment: `ENV/bin/python tiny_model.py OUT_DIR`. Four layers, 4.2 M
parameters, a vocabulary of up to 4096 learned from the text of Python's standard library. Fixed
seeds: the same Python gives the same bytes.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 4096
MAX_MODEL_LEN = 8192
CORPUS_FILES = 150
PAD, TURN_STARTS, TURN_ENDS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-pair merges learned from the standard library's own source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, TURN_STARTS, TURN_ENDS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer.train([str(path) for path in sorted(library.glob("*.py"))[:CORPUS_FILES]], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_ENDS,
        additional_special_tokens=[TURN_STARTS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights of a small Qwen3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    """Write model, tokenizer and generation settings to the directory named."""
    out = Path(sys.argv[1])
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out)
    make_model(tokenizer).save_pretrained(out, safe_serialization=True)
    GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    ).save_pretrained(out)
    print(f"tiny model: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
