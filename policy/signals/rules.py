"""What is known about words: ``rules.yaml`` beside this file, read once, when first needed."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCHEMA = 1
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built
Role = Literal[
    "antonym", "negation", "neutral", "allows", "forbids", "question", "condition", "exception",
    "hearsay", "roughly", "rescale", "deed", "doer", "empty",
]  # fmt: skip
_CHINESE = re.compile("[\u4e00-\u9fff]")


class RulesError(ValueError):
    """The rules cannot be used: which entry, what is wrong with it."""


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    one: list[str]
    other: list[str]
    order: bool = False


class _Deed(msgspec.Struct, forbid_unknown_fields=True):
    given: list[str]
    taken: list[str] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    antonyms: list[_Pair]
    compared: list[_Pair]
    much_after: list[str]
    negations: list[str]
    neutral: list[str]
    allows: list[str]
    forbids: list[str]
    questions: list[str]
    conditions: list[str]
    exceptions: list[str]
    hearsay: list[str]
    roughly: list[str]
    rescales: list[str]
    deeds: list[_Deed]
    doers: list[str]
    doer_ends: list[str]
    numerals: dict[str, int]
    units: list[list[str]]
    empty: list[str]
    empty_signs: str


class Mark(NamedTuple):
    """What a word or phrase does."""

    role: Role
    pair: int = -1
    """Of antonyms and of deeds: which."""
    side: int = 0
    """Of antonyms 0 or 1; of deeds 0 given, 1 taken."""
    order: bool = False
    chinese: bool = False


class Rules(NamedTuple):
    """The file, made ready for reading texts."""

    words: dict[str, Mark]
    """English single words, all forms."""
    phrases: dict[str, list[tuple[tuple[str, ...], Mark]]]
    """English phrases as stems, by their first, the longest first."""
    signs: dict[str, Mark]
    """Chinese words."""
    pattern: re.Pattern[str]
    """Finds them, and the numbers, words and signs between them."""
    compared: dict[str, Mark]
    """Chinese adjectives that compare after 比."""
    compared_pattern: re.Pattern[str]
    numerals: dict[str, int]
    units: dict[str, str]
    """Each name of a unit to the first of its entry."""
    unit_signs: re.Pattern[str]
    empty_signs: frozenset[str]
    doer_ends: frozenset[str]


@cache
def rules() -> Rules:
    """Those that are shipped."""
    return parse(resources.files("policy.signals").joinpath("rules.yaml").read_text("utf-8"))


def parse(text: str) -> Rules:
    """Rules from a YAML text.

    Raises:
        RulesError: an entry is missing, of a wrong kind, empty, or stands in two places.
    """
    try:
        raw: object = yaml.load(text, Loader=_Loader)
        file = msgspec.convert(raw, _File)
    except yaml.YAMLError as error:
        raise RulesError(f"rules: no valid YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise RulesError(f"rules: {error}") from error
    if file.schema != SCHEMA:
        raise RulesError(f"rules: schema {file.schema} is not known, this version reads {SCHEMA}")
    words: dict[str, Mark] = {}
    phrases: dict[str, list[tuple[tuple[str, ...], Mark]]] = {}
    signs: dict[str, Mark] = {}
    stands: dict[str, str] = {}
    formed: list[tuple[str, Mark]] = []
    for where, phrase, mark in _entries(file):
        if not phrase.strip():
            raise RulesError(f"rules: {where} has an empty word")
        if phrase in stands:
            raise RulesError(f"rules: {phrase!r} stands in {stands[phrase]} and in {where}")
        stands[phrase] = where
        if _CHINESE.search(phrase):
            signs[phrase] = mark._replace(chinese=True)
        elif " " in phrase:
            parts = tuple(phrase.split())
            parts = tuple([stem(part) for part in parts])
            phrases.setdefault(parts[0], []).append((parts, mark))
        else:
            words[phrase] = mark
            if mark.role not in ("empty", "negation", "doer"):
                formed += [(form, mark) for form in _forms(phrase)]
    for form, mark in formed:  # a form gives way to a word that is written out
        words.setdefault(form, mark)
    for first in phrases.values():
        first.sort(key=lambda phrase: -len(phrase[0]))
    units = {name: names[0] for names in file.units for name in names}
    compared = {
        phrase: Mark("antonym", at, side, order=True)
        for at, pair in enumerate(file.compared, len(file.antonyms))
        for side, listed in enumerate((pair.one, pair.other))
        for phrase in listed
    }
    compares = f"比.{{1,40}}?({'|'.join(map(re.escape, compared))})(?:了|得多|很多|一些|一点|些)?$"
    return Rules(
        words, phrases, signs, _pattern(signs, units), compared, re.compile(compares),
        file.numerals, units,
        re.compile("|".join(sorted(map(re.escape, _chinese(units)), key=len, reverse=True))),
        frozenset(file.empty_signs), frozenset(file.doer_ends),
    )  # fmt: skip


def _entries(file: _File) -> Iterator[tuple[str, str, Mark]]:
    for at, pair in enumerate(file.antonyms):
        for side, listed in enumerate((pair.one, pair.other)):
            for phrase in listed:
                yield f"antonyms[{at}]", phrase, Mark("antonym", at, side, pair.order)
    for at, pair in enumerate(file.compared, len(file.antonyms)):
        for side, listed in enumerate((pair.one, pair.other)):
            for phrase in listed:
                where = f"compared[{at - len(file.antonyms)}]"
                yield where, f"更{phrase}", Mark("antonym", at, side)
                if phrase in ("多", "少"):
                    for before in file.much_after:
                        yield where, before + phrase, Mark("antonym", at, side)
    for at, deed in enumerate(file.deeds):
        for side, listed in enumerate((deed.given, deed.taken)):
            for phrase in listed:
                yield f"deeds[{at}]", phrase, Mark("deed", at, side)
    plain: list[tuple[Role, str, list[str]]] = [
        ("negation", "negations", file.negations),
        ("neutral", "neutral", file.neutral),
        ("allows", "allows", file.allows),
        ("forbids", "forbids", file.forbids),
        ("question", "questions", file.questions),
        ("condition", "conditions", file.conditions),
        ("exception", "exceptions", file.exceptions),
        ("hearsay", "hearsay", file.hearsay),
        ("roughly", "roughly", file.roughly),
        ("rescale", "rescales", file.rescales),
        ("doer", "doers", file.doers),
        ("empty", "empty", file.empty),
    ]
    for role, where, listed in plain:
        for phrase in listed:
            yield where, phrase, Mark(role)


@lru_cache(maxsize=8192)
def stem(word: str) -> str:
    """An English word without its endings, so that its forms are one."""
    for ending in ("ing", "ies", "ied", "ery", "ed", "es", "s", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    if word.endswith("e") and len(word) > 3:
        return word[:-1]
    doubled = len(word) > 3 and word[-1] == word[-2] and word[-1] in "bdgmnprt"
    return word[:-1] if doubled else word


def _forms(word: str) -> list[str]:
    """Regular forms of an English verb or noun."""
    bare = word[:-1] if word.endswith("e") else word
    formed = [word + "s", word + "es", bare + "ed", bare + "ing"]
    if word.endswith("y"):
        formed += [word[:-1] + "ies", word[:-1] + "ied"]
    if len(word) > 2 and word[-1] in "bdgmnprt" and word[-2] in "aeiou":
        formed += [word + word[-1] + "ed", word + word[-1] + "ing"]
    return formed


def _chinese(phrases: Iterable[str]) -> list[str]:
    return [phrase for phrase in phrases if _CHINESE.search(phrase)]


def _pattern(signs: dict[str, Mark], units: dict[str, str]) -> re.Pattern[str]:
    """Chinese words by their first sign, the longest first, so that few are tried at a place."""
    first: dict[str, list[str]] = {}
    for phrase in sorted(signs, key=len, reverse=True):
        first.setdefault(phrase[0], []).append(re.escape(phrase[1:]))
    listed = "|".join(f"{sign}(?:{'|'.join(rests)})" for sign, rests in first.items())
    counted = "|".join(sorted(map(re.escape, _chinese(units)), key=len, reverse=True))
    digit = "[\u4e00二两三四五六七八九]"
    return re.compile(
        rf"(?P<number>(?:(?<![^\s(=:])[-\u2212])?(?:\d+(?:\.\d+)?|(?<!\S)\.\d+)[万千亿]?"
        rf"|(?:(?:{digit}?+[十百千万]){{1,6}}+{digit}?+|[二两三四五六七八九])(?={counted}))"
        rf"|(?P<word>[a-z]+\d[a-z\d]*|[a-z]+(?:'[a-z]+)?|°c)"
        rf"|(?P<mark>{listed})"
        rf"|(?P<sign>[\u4e00-\u9fff])"
        rf"|(?P<unit>[$€£¥%])"
    )
