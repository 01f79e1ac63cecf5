"""Texts as clauses: their content words, numbers, and what turns their meaning."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import NamedTuple
from unicodedata import normalize

from policy.signals.rules import Mark, rules, stem

TEXT_MOST = 6_000
"""Signs of a text that are looked at: of a longer one its beginning and its end."""
CLAUSES_MOST = 100
"""Of a text that are compared with the other's."""
DIGITS_MOST = 12
"""A longer number is a name: nothing is computed from it."""

_CLAUSE = re.compile(r"((?:[^.!?;:,\n。、]|[.:,](?=\d)){1,400})([.!?;:,\n。、]*)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ABBREVIATION = re.compile(r"\b(dr|mr|mrs|ms|prof|st|vs|approx|e\.g|i\.e|etc|no(?=\.\s\d))\.(?=\s)")
_MANY = {"千": 10**3, "万": 10**4, "亿": 10**8}
_DIGITS = {sign: at for at, sign in enumerate("零\u4e00二三四五六七八九")} | {"两": 2}
_MONTH_BEFORE = frozenset(
    ("in", "from", "since", "until", "of", "to", "by", "before", "after", "early", "late", "mid")
)
_BORDERS = frozenset(("to", "with", "for", "from", "on", "at", "in", "before", "after"))
_RULING = frozenset(("must", "should", "shall"))
_RULING_NOT = frozenset(("mustn't", "shouldn't", "shan't", "can't", "couldn't"))
_SILENT = ("empty", "negation", "neutral", "allows", "forbids", "question", "doer", "roughly")
_Token = tuple[str | None, str, int, int]
"""Which group of the pattern, what, from where to where in the clause."""
_BE = frozenset(("is", "are", "was", "were", "be", "been", "being", "get", "gets", "got"))


class Number(NamedTuple):
    """A number and what it counts."""

    value: str
    """In its shortest form: 1.50 is 1.5."""
    unit: str
    """Empty: nothing that is known, and no word follows it."""


class Deed(NamedTuple):
    """Who does it, and what else the clause names: whom it is done to, and what."""

    kind: int
    side: int
    doer: frozenset[str]
    others: frozenset[str]


class Side(NamedTuple):
    """A word that has an opposite, and the content words before and after it."""

    side: int
    order: bool
    before: frozenset[str]
    after: frozenset[str]


class Clause(NamedTuple):
    """What lies between two punctuation marks."""

    text: str
    words: frozenset[str]
    """Content words, without numbers and without what is in the fields below."""
    numbers: tuple[Number, ...]
    sides: dict[int, Side]
    """By antonym pair. A clause with both sides of one is on neither."""
    negative: bool
    """Says no an odd number of times."""
    rules: bool
    """Allows or forbids something."""
    deeds: tuple[Deed, ...]
    stated: bool
    """Neither asked nor reported as what others say."""
    holds: int
    """0 in a given case only, 1 with exceptions, 2 always."""
    rough: bool
    """Its numbers are not exact."""
    rescales: bool
    """Asks for other numbers than are given."""
    before: frozenset[str]
    """The content words before the first number, negation, or word that allows."""


def plain(text: str) -> str:
    """Small letters, one form of each sign, no commas between thousands; the middle of a long text
    is left out."""
    if len(text) > TEXT_MOST:
        text = f"{text[: TEXT_MOST // 2]}\n{text[-TEXT_MOST // 2 :]}"
    text = normalize("NFKC", text.replace("℃", "度")).lower().replace("\u2019", "'")
    return _ABBREVIATION.sub(r"\1", _THOUSANDS.sub("", text))


def clauses(text: str) -> list[Clause]:
    """All that say something, of a text as ``plain`` gives it."""
    found: list[Clause] = []
    sentence: list[_Reading] = []
    for piece in _CLAUSE.finditer(text):
        sentence.append(_Reading(piece[1].strip()))
        end = piece[2]
        if not end or end[0] in ",、":
            continue
        found += _sentence(sentence, "?" in end)
        sentence = []
        if len(found) >= 2 * CLAUSES_MOST:
            break
    found += _sentence(sentence, False)
    if len(found) <= CLAUSES_MOST:
        return found
    return found[: CLAUSES_MOST // 2] + found[-CLAUSES_MOST // 2 :]


def content(text: str) -> frozenset[str]:
    """The words of a text that carry a meaning: English ones without their endings, Chinese ones
    as pairs of signs, since nothing parts them, and numbers."""
    known = rules()
    found: set[str] = set()
    run, run_end = "", -1
    for each in known.pattern.finditer(plain(text)):
        kind, value = each.lastgroup, each[0]
        if value in known.numerals:
            kind = "number"
        if kind == "sign" and value not in known.empty_signs:
            if each.start() != run_end:
                found.update(_pairs(run) or [run])
                run = ""
            run += value
            run_end = each.end()
        elif kind == "number":
            found.add(_value(value))
        elif kind == "word":
            mark = known.words.get(value)
            if not value.endswith("n't") and (mark is None or mark.role not in _SILENT):
                found.add(stem(value))
        elif kind == "mark" and known.signs[value].role not in _SILENT:
            found.update(_pairs(value) or [value])
    found.update(_pairs(run) or [run])
    found.discard("")
    return frozenset(found)


def numbers(text: str) -> frozenset[str]:
    """Those of a text, by their value."""
    known = rules()
    return frozenset(
        [
            _value(each[0])
            for each in known.pattern.finditer(plain(text))
            if each["number"] or each[0] in known.numerals
        ]
    )


def negated(text: str) -> bool:
    """Does a text say no to something, an odd number of times?"""
    known = rules()
    said = 0
    for each in known.pattern.finditer(plain(text)):
        value = each[0]
        mark = known.words.get(value) if each["word"] else known.signs.get(value)
        said += value.endswith("n't") or (mark is not None and mark.role == "negation")
        said += mark is not None and mark.role == "forbids" and value[0] in "不无"
    return said % 2 == 1


class _Reading:
    """Takes a clause apart."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.order: list[str] = []
        """Content words as they stand."""
        self.starts: list[int] = []
        """Where in the text each does."""
        self.numbers: list[Number] = []
        self.sides: list[tuple[Mark, int]] = []
        self.negations = 0
        self.rules = False
        self.flags: set[str] = set()
        self.deeds: list[tuple[Mark, int, int, bool]] = []
        """Each with its place among the content words and in the text, and whether something is
        being done: a passive."""
        self.doer_at = -1
        self.borders: set[int] = set()
        """Places among the content words where a preposition stands."""
        self.split_at = -1
        self._rules = rules()
        # 新系统比旧系统短: the adjective stands far from its 比, and the two sides around that.
        compared = self._rules.compared_pattern.search(text)
        self._read(text[: compared.start(1)] if compared else text)
        if compared:
            place = bisect_left(self.starts, compared.start())
            self.sides.append((self._rules.compared[compared[1]], place))

    def _read(self, text: str) -> None:
        numerals = self._rules.numerals
        tokens = [
            ("number" if each[0] in numerals else each.lastgroup, each[0], each.start(), each.end())
            for each in self._rules.pattern.finditer(text)
        ]
        skip_to = at = 0
        run = ""
        run_end = -1
        last = len(tokens)
        while at < last:
            kind, value, start, end = tokens[at]
            if kind == "sign" and start >= skip_to and value not in self._rules.empty_signs:
                if start != run_end:
                    self._run(run, run_end)
                    run = ""
                run += value
                run_end = end
                at += 1
                continue
            if run:
                self._run(run, run_end)
                run, run_end = "", -1
            if start < skip_to:
                at += 1
            elif kind == "number":
                skip_to = self._number(tokens, at)
                at += 1
            elif kind == "word":
                at += self._word(tokens, at)
            else:
                if kind == "mark":
                    self._mark(self._rules.signs[value], value, start)
                at += 1
        self._run(run, run_end)

    def _run(self, run: str, end: int) -> None:
        """Nothing parts Chinese words: every pair of signs stands for one."""
        begin = end - len(run)
        for at in range(max(1, len(run) - 1) if run else 0):
            self._content(run[at : at + 2], begin + at)

    def _content(self, word: str, start: int) -> None:
        self.order.append(word)
        self.starts.append(start)

    def _word(self, tokens: list[_Token], at: int) -> int:
        """Takes the word there, or the phrase that begins with it; how many tokens."""
        value = tokens[at][1]
        known = self._rules
        if value == "may" and _is_month(tokens, at):
            self._content(value, tokens[at][2])
            return 1
        for parts, mark in known.phrases.get(stem(value), ()):
            heard = tokens[at : at + len(parts)]
            if len(heard) == len(parts) and all(
                token[0] == "word" and stem(token[1]) == part
                for token, part in zip(heard, parts, strict=True)
            ):
                self._mark(mark, value, tokens[at][2], tokens, at)
                return len(parts)
        if value in _BORDERS:
            self.borders.add(len(self.order))
        if value.endswith("n't"):
            self._mark(Mark("negation"), value, tokens[at][2])
            self.rules |= value in _RULING_NOT or (value == "don't" and not self.order)
            return 1
        single = known.words.get(value)
        if single is None:
            self._content(stem(value), tokens[at][2])
        else:
            self._mark(single, value, tokens[at][2], tokens, at)
        return 1

    def _mark(
        self, mark: Mark, value: str, start: int, tokens: list[_Token] | None = None, at: int = 0
    ) -> None:
        role = mark.role
        if role == "antonym":
            self.sides.append((mark, len(self.order)))
        elif role in ("negation", "forbids"):
            self.negations += 1
            before = tokens[at - 1][1] if tokens and at else ""
            orders = not self.order and (before == "do" or value == "never")
            self.rules |= role == "forbids" or before in _RULING or orders
            self._split()
        elif role == "allows":
            self.rules = True
            self._split()
        elif role == "deed":
            earlier = tokens[max(0, at - 3) : at] if tokens else []
            passive = any(token[1] in _BE for token in earlier)
            self.deeds.append((mark, len(self.order), start, passive))
        elif role == "doer":
            self.doer_at = len(self.order) if value == "by" else start
        else:
            self.flags.add(role)

    def _split(self) -> None:
        if self.split_at < 0:
            self.split_at = len(self.order)

    def _number(self, tokens: list[_Token], at: int) -> int:
        """Takes it with its unit; where in the text that ends."""
        _, value, start, end = tokens[at]
        known = self._rules
        number = _value(value)
        self._split()
        counted = known.unit_signs.match(self.text, end)
        if counted:
            self.numbers.append(Number(number, known.units[counted[0]]))
            return counted.end()
        if at and tokens[at - 1][0] == "unit" and tokens[at - 1][3] >= start - 1:
            self.numbers.append(Number(number, known.units.get(tokens[at - 1][1], "")))
            return end
        following = tokens[at + 1 : at + 3]
        for place, (kind, word, _, word_end) in enumerate(following):
            unit = known.units.get(word) or known.units.get(word.removesuffix("s"))
            if unit and (kind == "unit" or len(word) > 1 or not place):
                self.numbers.append(Number(number, unit))
                return word_end if not place else end
        unit = ""
        if following and following[0][0] == "word" and following[0][1] not in known.words:
            unit = stem(following[0][1])
        self.numbers.append(Number(number, unit))
        return end


def _is_month(tokens: list[_Token], at: int) -> bool:
    """Is a "may" May?"""
    kind, before = tokens[at - 1][:2] if at else ("", "")
    if kind == "number":  # the 3rd of it, but "those over 12 may"
        return at + 1 == len(tokens) or tokens[at + 1][0] == "number"
    return before in _MONTH_BEFORE


def _value(number: str) -> str:
    """1.50 as 1.5, 5万 as 50000, 十二 as 12."""
    number = number.replace("\u2212", "-").replace("-.", "-0.")
    number = "0" + number if number.startswith(".") else number
    if number.isalpha():
        return str(rules().numerals.get(number) or _chinese_number(number))
    many = _MANY.get(number[-1]) if len(number) <= DIGITS_MOST else None
    if many:
        return _value(str(float(number[:-1]) * many))
    return number.rstrip("0").rstrip(".") if "." in number else number


def _chinese_number(signs: str) -> int:
    whole = part = digit = 0
    for sign in signs:
        if sign in _DIGITS:
            digit = _DIGITS[sign]
        elif sign == "万":
            whole, part, digit = (whole + part + digit) * 10_000, 0, 0
        else:
            part += (digit or 1) * {"十": 10, "百": 100, "千": 1000}[sign]
            digit = 0
    return whole + part + digit


def _sentence(readings: list[_Reading], asked: bool) -> list[Clause]:
    """The clauses of one: what holds in a given case only does so for all of it."""
    flags = frozenset([flag for each in readings for flag in each.flags])
    holds = 0 if "condition" in flags else 1 if "exception" in flags else 2
    found: list[Clause] = []
    for at, each in enumerate(readings):
        words = frozenset(each.order)
        sides: dict[int, Side] = {}
        both: set[int] = set()
        for mark, place in each.sides:
            if mark.pair in sides and sides[mark.pair].side != mark.side:
                both.add(mark.pair)
            sides[mark.pair] = Side(
                mark.side, mark.order, frozenset(each.order[:place]), frozenset(each.order[place:])
            )
        if not (words or sides or each.numbers):
            continue
        found.append(
            Clause(
                each.text, words, tuple(each.numbers),
                {pair: side for pair, side in sides.items() if pair not in both},
                each.negations % 2 == 1, each.rules, _deeds(readings, at),
                not (asked or "question" in each.flags or "hearsay" in flags),
                holds, "roughly" in each.flags, "rescale" in each.flags,
                frozenset(each.order[: each.split_at] if each.split_at >= 0 else each.order),
            )
        )  # fmt: skip
    return found


def _deeds(readings: list[_Reading], at: int) -> tuple[Deed, ...]:
    reading = readings[at]
    found: list[Deed] = []
    for mark, place, start, passive in reading.deeds:
        if mark.chinese:
            doer, others = _chinese_parties(readings, at, start)
        else:
            doer, others = _english_parties(reading, place, passive)
        if doer and others:
            found.append(Deed(mark.pair, mark.side, frozenset(doer), frozenset(others)))
    return tuple(found)


def _english_parties(reading: _Reading, place: int, passive: bool) -> tuple[list[str], list[str]]:
    """The one or two words before the deed, or in a passive those after "by"; and all others."""
    order = reading.order
    if passive and reading.doer_at >= place:
        begin = reading.doer_at
        end = min([each for each in reading.borders if each > begin] + [begin + 2, len(order)])
    elif passive:
        return [], []
    else:
        begin, end = max(0, place - 2), place
    return order[begin:end], order[:begin] + order[end:]


def _chinese_parties(readings: list[_Reading], at: int, start: int) -> tuple[list[str], list[str]]:
    """Who stands first, or after 由 or 被: up to the first sign that ends a name; and all else."""
    reading = readings[at]
    known = rules()
    pieces = [reading.text[:start], *[each.text for each in reversed(readings[:at])]]
    if 0 <= reading.doer_at < start:
        pieces.insert(0, reading.text[reading.doer_at + 1 : start])
    for piece in pieces:
        ends = [place for place, sign in enumerate(piece) if sign in known.doer_ends]
        name = piece[: ends[0]] if ends else piece
        if len(name) >= 2:
            break
    else:
        return [], []
    sentence = " ".join([each.text for each in readings[: at + 1]]).replace(name, " ", 1)
    return _pairs(name), _pairs(sentence)


def _pairs(text: str) -> list[str]:
    return [text[at : at + 2] for at in range(len(text) - 1)]
