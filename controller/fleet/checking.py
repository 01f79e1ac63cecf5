"""Does a new version answer as a model should? Asked before it takes requests.

It is asked the model's own questions, or a few general ones, at temperature 0, and so is a replica
that serves. An answer has to be whole, not empty, not one token over and over (as weights full of
NaN answer) unless the version that serves does the same there, with logprobs that are numbers, and
with what the question wants in it. The score is that of ``policy.confidence``, so what is compared
here is what callers' answers are judged by.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from controller.fleet.config import Question
from controller.upstream import judge
from controller.upstream.scrape import ANSWERLESS, told
from policy.confidence import Confidence
from policy.events import Finished

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.fleet.config import Checks
    from controller.upstream.replica import Replica
    from policy.parameters import Parameters

QUESTIONS = (
    Question("What is the capital of France?"),
    Question("Count from one to ten."),
    Question("Write one sentence about the sea."),
    Question("What is 17 plus 25?"),
    Question("Translate into Chinese: good morning, everybody."),
)
"""Where a model has none of its own. Nothing has to stand in the answers: not every model knows."""
ANSWER_S_MOST = 60.0
"""One answer, of a replica that may be busy."""
REPEATED_LEAST = 8
"""So many equal tokens, and nothing else, are no answer."""
CANDIDATES = 5
"""Whose logprobs are asked for, as for callers' answers."""
SHOWN = 60
"""Characters of an answer that are shown to people."""

log = logging.getLogger(__name__)


class Trial(NamedTuple):
    """How a new version did."""

    why: str
    """What is wrong with it; empty: nothing."""
    confidence: float = -1.0
    """Its mean; -1: its answers have no logprobs."""
    before: float = -1.0
    """That of the version that serves, of the same questions; -1: it could not be asked."""


class Answer(NamedTuple):
    """One of them."""

    wrong: str
    """What is wrong with it; empty: nothing."""
    text: str = ""
    tokens: tuple[str, ...] = ()
    permille: int = -1
    """Its confidence; -1: it has no logprobs."""

    @property
    def repeated(self) -> bool:
        """It is one token over and over."""
        if self.tokens:
            return len(self.tokens) >= REPEATED_LEAST and len(set(self.tokens)) == 1
        signs = "".join(self.text.split())
        return len(signs) >= REPEATED_LEAST and len(set(signs)) == 1


async def try_out(
    replica: Replica,
    beside: Replica | None,
    model: str,
    checks: Checks,
    parameters: Parameters,
    pooling: bool = False,
) -> Trial:
    """Ask a replica with a new version, and one that serves.

    Args:
        beside: serves the version from before; None: there is none, and nothing is compared.
        parameters: of the policy in force: how a score is made.
        pooling: the model gives embeddings: these must be numbers, and not all zero.
    """
    questions = checks.questions or QUESTIONS
    score = Confidence(parameters.confidence)
    path = "/v1/embeddings" if pooling else await _endpoint(replica, model)
    ours: list[int] = []
    theirs: list[int] = []
    for question in questions:
        answer = await _ask(replica, path, model, question, score)
        other = None
        if beside is not None:
            other = await _ask(beside, path, model, question, score)
            if other.wrong:
                log.info("%s, beside the new version: %s", beside.name, other.wrong)
                other = None
        wrong = answer.wrong or _unlike(answer, other, question)
        if wrong:
            return Trial(f"asked {question.prompt[:SHOWN]!r}, {wrong}")
        if answer.permille >= 0:
            ours.append(answer.permille)
            if other is not None and other.permille >= 0:
                theirs.append(other.permille)
    mean, before = _mean(ours), _mean(theirs if len(theirs) == len(ours) else [])
    return Trial(_unsure(mean, before, checks), mean, before)


def _unlike(answer: Answer, other: Answer | None, question: Question) -> str:
    """What is wrong with an answer that came whole."""
    if answer.repeated and not (other is not None and other.repeated):
        said = answer.tokens[0] if answer.tokens else answer.text.strip()[0]
        return f"it says {said!r} over and over"
    wanted = question.contains
    if wanted and wanted.casefold() not in answer.text.casefold():
        return f"it says {answer.text[:SHOWN]!r}, which does not contain {wanted!r}"
    return ""


def _unsure(mean: float, before: float, checks: Checks) -> str:
    if 0 <= mean < checks.min_confidence:
        return f"its mean confidence is {mean:.2f}, below min_confidence, {checks.min_confidence:g}"
    if mean < 0 and checks.min_confidence > 0:
        return f"its answers have no logprobs, and min_confidence is {checks.min_confidence:g}"
    if mean >= 0 and round(before - mean, 6) > checks.confidence_drop_most:
        return (
            f"its mean confidence is {mean:.2f}, that of the version that serves {before:.2f}:"
            f" more than confidence_drop_most, {checks.confidence_drop_most:g}, below it"
        )
    return ""


def _mean(permilles: Sequence[int]) -> float:
    return sum(permilles) / len(permilles) / 1000 if permilles else -1.0


# ---- asking ----


async def _endpoint(replica: Replica, model: str) -> str:
    """Chat, where the model has a template for it."""
    body = _body("/v1/chat/completions", model, Question("Hello", max_tokens=1))
    try:
        status, _ = await _post(replica, "/v1/chat/completions", body)
    except ANSWERLESS:
        return "/v1/chat/completions"  # it is asked again, and then it counts
    return "/v1/completions" if 400 <= status < 500 else "/v1/chat/completions"


def _body(path: str, model: str, question: Question) -> dict[str, Any]:
    if path == "/v1/embeddings":
        return {"model": model, "input": question.prompt}
    asked: dict[str, Any] = {
        "model": model, "max_tokens": question.max_tokens, "temperature": 0, "seed": 0,
    }  # fmt: skip
    if path == "/v1/completions":
        return {**asked, "prompt": question.prompt, "logprobs": CANDIDATES}
    messages = [{"role": "user", "content": question.prompt}]
    return {**asked, "messages": messages, "logprobs": True, "top_logprobs": CANDIDATES}


async def _post(replica: Replica, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    async with (
        asyncio.timeout(ANSWER_S_MOST),
        replica.post(path, json.dumps(body).encode(), headers) as answer,
    ):
        return answer.status, await answer.read()


async def _ask(
    replica: Replica, path: str, model: str, question: Question, score: Confidence
) -> Answer:
    try:
        status, data = await _post(replica, path, _body(path, model, question))
    except ANSWERLESS as error:
        return Answer(f"it does not answer: {told(error)}")
    if status != 200:
        return Answer(f"it answers {status}: {data[:SHOWN].decode(errors='replace')}")
    return read_vectors(data) if path == "/v1/embeddings" else read_answer(data, score)


def read_vectors(data: bytes) -> Answer:
    """An embedding."""
    rows = _loaded(data).get("data")
    found = [each.get("embedding") for each in _listed(rows) if isinstance(each, dict)]
    vectors = [each for each in found if isinstance(each, list)]
    if not vectors:
        return Answer("its answer holds no vector")
    numbers = [number for vector in vectors for number in vector]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return Answer("its vector holds what are no numbers (NaN)")
    return Answer("") if any(numbers) else Answer("its vector is all zero")


def read_answer(data: bytes, score: Confidence) -> Answer:
    """The answer to a chat or a completion."""
    document = _loaded(data)
    first: Any = next(iter(_listed(document.get("choices"))), {})
    found = first.get("logprobs") if isinstance(first, dict) else None
    tokens, chosen = _tokens(found if isinstance(found, dict) else {})
    if any(not isinstance(at, int | float) or not math.isfinite(at) for at in chosen):
        return Answer("its logprobs are no numbers (NaN)")
    wrong, whole = judge.whole(data, "chat")
    if wrong is not None or whole is None:
        return Answer(f"its answer is {wrong}")
    message = whole.choices[0].message
    thought = None if message is None else message.reasoning or message.reasoning_content
    text = judge.text_of(whole) or (thought if isinstance(thought, str) else "")
    if not text.strip():
        return Answer("its answer is empty")
    certainties = judge.Certainties()
    certainties.add(found)
    mean, worst, close = certainties.features()
    permille = score.score(Finished(0, 0, 0, 0, 0, mean, worst, close))
    return Answer("", text, tokens, permille)


def _loaded(data: bytes) -> dict[str, Any]:
    """NaN is no JSON, and is written all the same."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _tokens(logprobs: dict[str, Any]) -> tuple[tuple[str, ...], list[Any]]:
    """The tokens of an answer, and the logprob of each."""
    content = logprobs.get("content")
    if isinstance(content, list):
        entries = [each for each in content if isinstance(each, dict)]
        return (
            tuple(str(each.get("token")) for each in entries),
            [each.get("logprob") for each in entries],
        )
    tokens, chosen = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(chosen, list):
        return (), []
    return tuple(map(str, tokens)), chosen
