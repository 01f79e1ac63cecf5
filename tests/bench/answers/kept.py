"""Kept answers: does a look-alike ever get one, how many paraphrases do, and how long it takes.

``python -m tests.bench.answers.kept [--quick]``. Questions are the hand-written pairs of
``tests/unit/question_pairs.yaml``; store, look-up and HTTP are the real ones. The vectors are
hashed words (``tests/embeddings_server.py``), and once all one, so that only the words decide.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import yaml

from controller.gateway.answers import Answers
from controller.gateway.asking import read
from controller.http import session
from controller.store.answers import KeptAnswers
from controller.upstream.embeddings import Embeddings
from tests.embeddings_server import embeddings_server
from tests.figures import Figure, show

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from controller.gateway.asking import Asked
    from tests.embeddings_server import Served

PAIRS = Path(__file__).parents[2] / "unit" / "question_pairs.yaml"
VERSIONS = ("v1",)
KEPT, QUICK_KEPT = 5_000, 500
LOOK_UPS, QUICK_LOOK_UPS = 2_000, 200
KEPT_AT_ONCE = 200


class Pair(NamedTuple):
    first: str
    second: str
    same: bool
    kind: str


class Counted(NamedTuple):
    """Of pairs, each asked in both directions."""

    wrong: int
    right: int
    paraphrases: int


def load_pairs() -> list[Pair]:
    return [Pair(**each) for each in yaml.safe_load(PAIRS.read_text(encoding="utf-8"))]


def meanings_of(pairs: Sequence[Pair]) -> dict[str, str]:
    """One text for all that say the same, by each of them."""
    found = {text: text for pair in pairs for text in (pair.first, pair.second)}
    for pair in pairs:
        if pair.same:
            old, new = found[pair.second], found[pair.first]
            found = {text: new if said == old else said for text, said in found.items()}
    return found


def chat(text: str, tenant: str = "") -> Asked:
    document = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return read("chat", {}, json.dumps(document).encode(), b"k" * 32, (tenant, "", ""))


@contextlib.asynccontextmanager
async def _bench() -> AsyncIterator[tuple[Answers, Served]]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = KeptAnswers(folder / "answers.sqlite", bytes_most=1 << 28, s_most=3600.0)
        stack.callback(store.close)
        server = await stack.enter_async_context(embeddings_server())
        client = await stack.enter_async_context(session())
        answers = Answers(store, Embeddings(client, server.url))
        stack.push_async_callback(answers.close)
        yield answers, server


async def keep_all(
    answers: Answers, asked: Sequence[Asked], versions: Sequence[str] = VERSIONS
) -> None:
    """Keep an answer to each, which says what was asked, and wait for the vectors."""
    for at, each in enumerate(asked):
        said = each.document["messages"][-1]["content"]
        answers.keep(each, said.encode(), 900, versions[at % len(versions)])
        if at % KEPT_AT_ONCE == KEPT_AT_ONCE - 1:  # no more wait than the bound lets in
            await answers.embedded()
    await answers.embedded()


async def count(pairs: Sequence[Pair], all_alike: bool) -> Counted:
    """Ask with each text of a pair for an answer to the other: each pair alone, and then for an
    answer to any text of all. With ``all_alike`` every two vectors are one."""
    meanings = meanings_of(pairs)
    wrong = right = paraphrases = 0
    async with _bench() as (answers, server):
        server.same = all_alike
        ways = [(pair, *way) for pair in pairs
                for way in ((pair.first, pair.second), (pair.second, pair.first))]  # fmt: skip
        await keep_all(answers, [chat(kept, f"{at}") for at, (_, kept, _) in enumerate(ways)])
        for at, (pair, _, asked) in enumerate(ways):
            hit = await answers.find(chat(asked, f"{at}"), VERSIONS) is not None
            wrong += hit and not pair.same
            right += hit and pair.same
            paraphrases += pair.same
        everything = sorted({text for pair in pairs for text in (pair.first, pair.second)})
        # Each has a version of its own, so that the answer to the very question can be left out.
        await keep_all(answers, [chat(text, "all") for text in everything], everything)
        for text in everything:
            others = [version for version in everything if version != text]
            found = await answers.find(chat(text, "all"), others)
            wrong += found is not None and meanings[found.body.decode()] != meanings[text]
    return Counted(wrong, right, paraphrases)


async def times_s(kept: int, look_ups: int) -> list[float]:
    """How long look-ups take with so many answers kept: of the same question, of one that says the
    same (a call to the server of embeddings is part of it), and of one that nobody asked."""
    found: list[float] = []
    hits = 0
    async with _bench() as (answers, server):
        server.same = True
        questions = [f"How do I reset the password of account {at}?" for at in range(kept)]
        await keep_all(answers, [chat(text) for text in questions])
        assert answers.store.rows == kept, answers.store.rows
        for at in range(look_ups):
            text = questions[at * 7919 % kept]
            asked = (text, text.replace("How do I", "Hi, how can I"), f"Why is it {at}?")[at % 3]
            began_s = time.perf_counter()
            answer = await answers.find(chat(asked), VERSIONS)
            found.append(time.perf_counter() - began_s)
            hits += answer is not None
    assert hits == look_ups - look_ups // 3, hits
    return found


async def _measure(quick: bool) -> list[Figure]:
    pairs = load_pairs()
    near = await count(pairs, all_alike=False)
    alike = await count(pairs, all_alike=True)
    kept, look_ups = (QUICK_KEPT, QUICK_LOOK_UPS) if quick else (KEPT, LOOK_UPS)
    took = await times_s(kept, look_ups)
    different = sum(not pair.same for pair in pairs)
    return [
        Figure(
            "wrong_cache_hits", near.wrong + alike.wrong, "1", "= 0",
            f"answers to another question, {different} look-alikes of {len(pairs)} pairs in both"
            " directions and each text against all others; once with all vectors alike",
        ),
        Figure(
            "cache_paraphrase_hits_pct", 100 * near.right / near.paraphrases, "%", ">= 10",
            f"of {near.paraphrases} paraphrases; {100 * alike.right / near.paraphrases:.0f} % where"
            " only the words decide",
        ),
        Figure(
            "kept_answer_look_up_ms_p99", 1000 * float(np.percentile(took, 99)), "ms", "<= 20",
            f"{look_ups} look-ups at {kept} kept answers, a third each the same, alike, unknown",
        ),
    ]  # fmt: skip


def measure(quick: bool = False) -> list[Figure]:
    return asyncio.run(_measure(quick))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    show(measure(parser.parse_args().quick))


if __name__ == "__main__":
    main()
