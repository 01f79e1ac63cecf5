"""Texts as sets of content words, English and Chinese, and what they allow or forbid."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

CLAUSES_MAX = 400  # of a text; the work grows with the square of those that rule on something

_CLAUSE = re.compile(r"[^.!?;:,\n。！？；：，]+(?:\.\d+[^.!?;:,\n。！？；：，]*)*[?？]?")  # noqa: RUF001
_WORD = re.compile(r"\d+\.\d+|[a-z0-9]+|[\u4e00-\u9fff]+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")

_NEGATION = re.compile(
    r"\b(?:not|no|never|none|neither|nor|without|cannot)\b|n't\b|[不没無无未非勿别莫]"
)
_FORBIDS = re.compile(
    r"\b(?:forbid(?:den|s)?|prohibit(?:ed|s|ion)?|ban(?:ned|s)?|disallow(?:ed|s)?|illegal"
    r"|unlawful|impermissible|denied|(?:can|may|must|shall|should)(?: never| not)"
    r"|cannot|can't|mustn't|shouldn't|shan't)\b"
    r"|禁止|严禁|嚴禁|不得|不准|不许|不許|不可|不能|不允许|不允許|不应|不應|不宜|勿|违法|違法"
)
_ALLOWS = re.compile(
    r"\b(?:allow(?:ed|s)?|permit(?:ted|s)?|permissible|legal|lawful|free to|can|may)\b"
    r"|允许|允許|准许|准許|可以|许可|許可|能够|能夠|合法"
)
_TURNED = re.compile(
    r"(?:\b(?:not|never|no longer|isn't|aren't|wasn't|weren't|don't|doesn't|nor)\s+(?:\w+\s+){0,2}$"
    r"|(?:不|没有|沒有|未|未被|不再|并非|並非|不是|不被)$)"
)
_QUESTION = re.compile(r"[?？]$|[吗嗎呢]$|是否|^(?:is|are|may|can|does|do|whether|if)\b|如果")  # noqa: RUF001

_EMPTY_WORDS = re.compile(
    r"\b(?:an?|the|is|are|was|were|be|been|being|am|i|you|he|she|it|we|they|this|that|these|those"
    r"|and|or|but|so|if|then|than|as|at|by|for|from|in|into|of|on|onto|to|with|about|all|any|each"
    r"|some|will|would|shall|should|can|could|may|might|must|do|does|did|done|have|has|had|having"
    r"|not|no|never|none|neither|nor|without|cannot|[a-z]+n't|there|here|its|their|your|our|his|her"
    r"|my|me|them|us|also|just|only|very|too|please|yes|allow|allowed|allows|permit|permitted"
    r"|permits|forbid|forbidden|forbids|prohibit|prohibited|prohibits|ban|banned|bans|disallowed"
    r"|illegal|legal|lawful|unlawful|permissible|impermissible|denied|free|longer|strictly)\b"
)
_EMPTY_SIGNS = re.compile(
    r"禁止|严禁|嚴禁|允许|允許|准许|准許|可以|许可|許可|能够|能夠|合法|违法|違法|没有|沒有|并非|並非|是否"
    r"|如果|[的了是在和与與或也都就不没無无未非勿别莫得准许許可能应應宜被有把吗嗎呢啊吧这這那你我他她它们們]"
)

Ruling = Literal["allows", "forbids"]


class Clause(NamedTuple):
    """A clause that allows or forbids something."""

    ruling: Ruling
    words: frozenset[str]
    numbers: frozenset[str]


def content(text: str) -> frozenset[str]:
    """The words that carry a meaning: English ones without their endings, Chinese ones as pairs
    of signs, since nothing parts them, and numbers."""
    found: set[str] = set()
    text = _EMPTY_SIGNS.sub(" ", _EMPTY_WORDS.sub(" ", _plain(text)))
    for word in _WORD.findall(text):
        if "\u4e00" <= word[0] <= "\u9fff":
            found.update([word[at : at + 2] for at in range(len(word) - 1)] or [word])
        else:
            found.add(_stem(word))
    return frozenset(found)


def numbers(text: str) -> frozenset[str]:
    return frozenset(_NUMBER.findall(_plain(text)))


def negated(text: str) -> bool:
    """Does it say no to something, an odd number of times?"""
    return len(_NEGATION.findall(_plain(text))) % 2 == 1


def rulings(text: str) -> list[Clause]:
    """What the text's clauses allow or forbid. Questions and conditions rule on nothing."""
    found: list[Clause] = []
    for clause in _CLAUSE.findall(_plain(text))[:CLAUSES_MAX]:
        ruling = _ruling(clause.strip())
        if ruling is not None:
            words = content(clause)
            if words:
                found.append(Clause(ruling, words, numbers(clause)))
    return found


def _plain(text: str) -> str:
    """Small letters, one kind of apostrophe, no commas between thousands."""
    return _THOUSANDS.sub("", text.lower().replace("\u2019", "'"))


def _ruling(clause: str) -> Ruling | None:
    if _QUESTION.search(clause):
        return None
    forbids = _FORBIDS.search(clause)
    if forbids:
        return "allows" if _TURNED.search(clause[: forbids.start()]) else "forbids"
    allows = _ALLOWS.search(clause)
    if allows:
        return "forbids" if _TURNED.search(clause[: allows.start()]) else "allows"
    return None


def _stem(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word
