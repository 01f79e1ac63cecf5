"""How often two sound replicas are thought to differ, under load.

Two vLLM servers have the same weights. A request at temperature 0 is run on one and again on the
other, beside others, and each run in another batch. Where the sums of a batch of five differ from
those of one by the last bits, as they do on GPUs, the one or the other of two tokens is taken that
are about equally likely, and what follows is another text. Such answers must not count as
differing.

A processor adds up in the same order for any batch, so two servers that are wholly alike hardly
ever part. A second pair shows near-ties: one of it computes in float32, so that all sums differ.

Every answer is verified. The comparisons are those that the controller makes; they are looked at
as they are made, to say how many answers parted at all, and how many of those at a near-tie.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

from policy.signals import Said, compare
from tests.bench.answers.replicas import policy, questions, replicas, upstreams
from tests.controller.asking import ask, session
from tests.controller.inprocess import serving
from tests.controller.processes import audit, settings_for
from tests.figures import Figure, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.controller.asking import Answer
    from tests.live.server import Vllm

ANSWERS, QUICK_ANSWERS = 480, 60
CALLERS = 8
TOKENS = 32
ALIKE, OTHER = "", ", one of which computes in float32 and the other in bfloat16"
EVERYTHING: dict[str, object] = {
    "verify_below_permille": 1001, "degrade_below_permille": 0, "budget_permille": 2000,
    "burst_tokens": 1_000_000,
}  # fmt: skip


class Comparison(NamedTuple):
    """One that the controller made."""

    first: Said
    second: Said
    gap_min_permille: int
    same: bool

    @property
    def parted(self) -> int:
        """The place of the first token that differs; -1: none does."""
        pairs = zip(self.first.tokens, self.second.tokens, strict=False)
        found = next((at for at, (one, other) in enumerate(pairs) if one != other), -1)
        if found < 0 and len(self.first.tokens) != len(self.second.tokens):
            return min(len(self.first.tokens), len(self.second.tokens))
        return found

    @property
    def gap_permille(self) -> int:
        """The wider of both where they part; -1: they do not, or one had ended."""
        at, both = self.parted, (self.first.gaps_permille, self.second.gaps_permille)
        return max([gaps[at] for gaps in both if at < len(gaps)], default=-1) if at >= 0 else -1


@contextlib.contextmanager
def looking() -> Iterator[list[Comparison]]:
    """The comparisons that a controller in this process makes."""
    seen: list[Comparison] = []

    def looked_at(first: Said, second: Said, **how: int) -> bool:
        same = compare(first, second, **how)  # type: ignore[arg-type]
        seen.append(Comparison(first, second, how["gap_min_permille"], same))
        return same

    with patch("controller.errands.compare", looked_at):
        yield seen


async def asked(url: str, documents: Sequence[dict[str, object]], callers: int) -> list[Answer]:
    """So many callers, each with one request after the other."""
    answers: list[Answer] = []
    numbers = count()

    async def caller() -> None:
        while (number := next(numbers)) < len(documents):
            answers.append(await ask(client, url, documents[number]))

    async with session() as client:
        await asyncio.gather(*(caller() for _ in range(callers)))
    return answers


def verified(
    servers: Sequence[Vllm], folder: Path, answers: int
) -> tuple[list[Answer], list[Comparison]]:
    """Ask under load, with every answer verified."""
    folder.mkdir(exist_ok=True)
    settings = settings_for(
        upstreams(servers), folder,
        policy=policy(folder / "verifying.yaml", **EVERYTHING), features={"confidence": True},
    )  # fmt: skip

    async def run() -> list[Answer]:
        async with serving(settings) as running:
            await asked(running.url, questions(4, 4, seed=9, stream=False), 4)
            seen.clear()
            documents = questions(answers, TOKENS, stream=False)
            return await asked(running.url, documents, CALLERS)

    with looking() as seen:
        found = asyncio.run(run())
    audit(settings.data_path)
    return found, seen


def figures(
    answers: Sequence[Answer], seen: Sequence[Comparison], name: str = "clean", what: str = ALIKE
) -> list[Figure]:
    """The share of mismatches, and what parted, of replicas that are ``what``."""
    statuses = [answer.headers.get("x-twinkeel-verification", "none") for answer in answers]
    told = {status: statuses.count(status) for status in sorted(set(statuses))}
    wrong = statuses.count("mismatch")
    compared = wrong + statuses.count("match")
    parted = [each for each in seen if each.parted >= 0]
    near = [each for each in parted if 0 <= each.gap_permille <= each.gap_min_permille]
    gaps = sorted(each.gap_permille for each in parted)[-10:]
    how = (
        f"two vLLM servers with the same weights{what}, {CALLERS} callers, temperature 0, {TOKENS}"
        f" tokens: {compared} answers compared ({told}); {len(parted)} parted, of which"
        f" {len(near)} at a near-tie; widest gaps where they parted, per mille: {gaps}"
    )
    share = 100 * wrong / compared if compared else None
    enough = "answers compared by the controller, of those asked for"
    return [
        Figure(f"{name}_false_mismatch_pct", share, "%", "<= 1", how),
        Figure(f"{name}_compared", float(compared), "answers", f">= {len(answers) * 0.9}", enough),
    ]


def measure(quick: bool = False) -> list[Figure]:
    """The false mismatches of two sound replicas."""
    count = QUICK_ANSWERS if quick else ANSWERS
    with (
        tempfile.TemporaryDirectory(prefix="twinkeel-clean-") as scratch,
        replicas([0, 0, 0], [[], [], ["--dtype", "float32"]]) as (one, alike, other),
    ):
        folder = Path(scratch)
        found = figures(*verified([one, alike], folder / "alike", count))
        answers, seen = verified([one, other], folder / "other", count // 2)
        return [*found, *figures(answers, seen, "clean_other_kernels", OTHER)]


def main() -> None:
    """Measure, and show."""
    show(measure())


if __name__ == "__main__":
    main()
