"""The live demo in front of two real vLLM servers on the CPU, with the tiny model.

python -m tests.live.demo        # `make live-demo VLLM=1`; about two minutes
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from controller.demo import Load, run
from tests.live.server import MAX_NUM_BATCHED_TOKENS, measured_profile, vllm_servers

OPTIONS = (
    "--enable-per-request-metrics", "--enable-prompt-tokens-details",
    "--num-gpu-blocks-override", "256", "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
)  # fmt: skip
LOAD = Load(seconds=15.0, rate=3.0, words_most=150, tokens_most=48)
"""What two servers on two cores bear beside their callers."""


def main() -> int:
    """Start both, show, and stop both."""
    print("starting two vLLM servers: a minute or two", flush=True)
    with vllm_servers(2, *OPTIONS) as servers, tempfile.TemporaryDirectory() as folder:
        profile = str(measured_profile(servers[0], Path(folder)))
        return run([_upstream(server.upstream(profile)) for server in servers], LOAD)


def _upstream(parts: dict[str, object]) -> str:
    """As ``twinkeel serve --upstream`` takes it."""
    rest = (f",{name}={value}" for name, value in parts.items() if name != "url")
    return f"{parts['url']}{''.join(rest)}"


if __name__ == "__main__":
    raise SystemExit(main())
