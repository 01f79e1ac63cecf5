"""Do two answers to one request say the same? What a second run is judged by.

No model is asked: two runs of one model differ in wording when it samples, and where two tokens are
about equally likely even when it does not, since the batch that a request runs in changes the last
bits of its sums. So the rules go from strict to lenient, and each says what it passes over.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn, cast
from unicodedata import normalize

from policy.signals.text import answers_match

# A line of prose before it or after it is manners.
_FENCED = re.compile(
    r"(?:[^`\n]{0,120}\n)?\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*(?:[^`\n]{0,120})?", re.DOTALL
)
_OPENING = " \"'`\u201c\u2018\u300c\u300e\u00ab"
# No question mark: it makes another sentence. No minus, no sign of a currency: they are values.
_CLOSING = _OPENING + ".,;:!\u2026\u3002\u3001\u201d\u2019\u300d\u300f\u00bb"
_NO_JSON = object()
# What is no word, and turns a value or an expression into another one.
_TURNING = (
    re.compile(r"[\u20ac$\u00a3\u00a5]"),
    re.compile(r"(?<=[\w)\]])\s?([<>]=?|[!=]==?)\s?(?=[\w(])"),
    re.compile(r"(?<=[\w)\]])\s?([+-])\s?(?=\d)"),
)
_PART_OF_A_SIGN = "\ufffd"
"""What a token is shown as that is some bytes of a sign only, as of rare Chinese ones or emoji."""


class Said(NamedTuple):
    """One run's answer."""

    text: str
    tokens: tuple[str, ...] = ()
    """Its tokens as strings; empty: it came without logprobs."""
    gaps_permille: tuple[int, ...] = ()
    """For each token, the probability of the likeliest candidate minus the second's; -1: unknown,
    as for every token that it is too short for."""
    cut: bool = False
    """Ended by the length limit, not by the model."""


def compare(
    first: Said,
    second: Said,
    *,
    greedy: bool,
    gap_min_permille: int,
    same_tokens_permille: int,
) -> bool:
    """Do they say the same? An empty answer matches none.

    Args:
        first: The answer that was given.
        second: That of the second run.
        greedy: Both ran at temperature 0, so only a near-tie may make them differ.
        gap_min_permille: Where they part at a token with at most this gap in both it is a
            near-tie: sound replicas see the same one, and bad weights are unsure of nearly every
            token. What follows it cannot be compared, so they match.
        same_tokens_permille: Without such tokens: the share of their content words, taken
            together, that both must have.
    """
    ours, theirs = normal(first.text), normal(second.text)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    left, right = _json(first.text), _json(second.text)
    if left is not _NO_JSON and right is not _NO_JSON:
        if _same_json(left, right):
            return True
        # A near-tie is flipped by batching inside of JSON as well.
        tied = greedy and first.tokens and second.tokens
        return bool(tied and _same_tokens(first, second, gap_min_permille))
    # What the length limit has cut off was perhaps to be JSON.
    if (left is not _NO_JSON and not second.cut) or (right is not _NO_JSON and not first.cut):
        return False
    if greedy and first.tokens and second.tokens:
        same = _same_tokens(first, second, gap_min_permille)
        if same is not None:
            return same
    if any(_differ(sign, first.text, second.text) for sign in _TURNING):
        return False
    return answers_match(first.text, second.text, same_permille=same_tokens_permille)


def _differ(sign: re.Pattern[str], first: str, second: str) -> bool:
    """Do both have such signs, and none in common?"""
    ours, theirs = set(sign.findall(first)), set(sign.findall(second))
    return bool(ours and theirs) and ours.isdisjoint(theirs)


def normal(text: str) -> str:
    """A text without what two writers of the same may differ in: forms of a character, case, white
    space, and quotes and full stops at its ends."""
    plain = " ".join(normalize("NFKC", text).casefold().split())
    return plain.lstrip(_OPENING).rstrip(_CLOSING) or plain


def _same_tokens(first: Said, second: Said, gap_min_permille: int) -> bool | None:
    """None: how close the choice was where they part is not known."""
    shorter = min(len(first.tokens), len(second.tokens))
    at = next((at for at in range(shorter) if first.tokens[at] != second.tokens[at]), shorter)
    if _PART_OF_A_SIGN in "".join(first.tokens[:at]):
        return None  # all such tokens read alike: they may have parted before
    ended = first if len(first.tokens) == at else second if len(second.tokens) == at else None
    if len(first.tokens) == len(second.tokens) == at or (ended is not None and ended.cut):
        return True
    gaps = [each.gaps_permille[at] for each in (first, second) if at < len(each.gaps_permille)]
    known = [gap for gap in gaps if gap >= 0]
    return max(known) <= gap_min_permille if known else None


def _json(text: str) -> Any:
    """The object or array that a text is, by itself or in a fence; else ``_NO_JSON``.

    A bare number or word is JSON too, but is compared as text. Numbers are exact.
    """
    bare = text.strip()
    fenced = _FENCED.fullmatch(bare) if "```" in bare else None
    if fenced:
        bare = fenced.group(1).strip()
    if not bare.startswith(("{", "[")):
        return _NO_JSON
    try:
        return json.loads(bare, parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse)
    except (ValueError, ArithmeticError, RecursionError):
        return _NO_JSON


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _same_json(first: object, second: object) -> bool:
    """Objects without order, arrays in theirs, numbers by value, strings as ``normal`` has them."""
    pairs = [(first, second)]
    while pairs:
        ours, theirs = pairs.pop()
        if type(ours) is not type(theirs):
            return False
        if isinstance(ours, dict):
            left, right = cast("dict[str, object]", ours), cast("dict[str, object]", theirs)
            if left.keys() != right.keys():
                return False
            pairs += [(left[key], right[key]) for key in left]
        elif isinstance(ours, list):
            these, those = cast("list[object]", ours), cast("list[object]", theirs)
            if len(these) != len(those):
                return False
            pairs += zip(these, those, strict=True)
        elif isinstance(ours, str):
            if normal(ours) != normal(cast("str", theirs)):
                return False
        elif ours != theirs:
            return False
    return True
