"""The live demo in front of two real vLLM servers on the CPU, with the tiny model.

python -m tests.live.demo        # `make live-demo VLLM=1`; about two minutes
"""

from __future__ import annotations

from controller.demo import Load, run
from tests.live.server import vllm_server

OPTIONS = ("--enable-per-request-metrics", "--enable-prompt-tokens-details",
           "--num-gpu-blocks-override", "256")  # fmt: skip
LOAD = Load(seconds=15.0, rate=4.0, words_most=300, tokens_most=48)
"""What two servers on two cores bear beside their callers."""


def main() -> int:
    """Start both, show, and stop both."""
    print("starting two vLLM servers, 30 to 60 s each", flush=True)
    with vllm_server(*OPTIONS) as first, vllm_server(*OPTIONS) as second:
        return run([f"{url},profile=cpu/tiny-qwen3" for url in (first, second)], LOAD)


if __name__ == "__main__":
    raise SystemExit(main())
