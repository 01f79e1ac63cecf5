"""Does an answer contradict its prompt? Do two answers say the same?

Both are rules of thumb for Chinese and English: no model is asked, so that they cost milliseconds
and give one result everywhere. They err towards "no contradiction" and "no match".

Clauses are compared that are about one thing, which is when they share most content words. What
turns the meaning of one is then counted: a negation or a prohibition, a word for its opposite,
sides of a comparison in another order. Turned once it says the contrary, turned twice the same.
What the prompt says both ways, asks, or reports of others contradicts nothing.
"""

from __future__ import annotations

from fractions import Fraction
from heapq import nlargest
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from policy.signals.words import DIGITS_MOST, Number, clauses, content, negated, numbers, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policy.signals.words import Clause, Deed, Side

SAME_SUBJECT_PERMILLE = 660
"""Of the shorter clause's words that the other must have for both to be about one thing."""
SAME_CLAUSE_PERMILLE = 600
"""Of the words of both together, where only a negation makes the difference."""
EXCEPTED_PERMILLE = 750
"""The same where the prompt names exceptions."""
SAME_COUNTED_PERMILLE = 500
"""Of the shorter clause's words, where a number does."""
NUMBERS_TOO_PERMILLE = 400
"""The same where their numbers are the same too."""
SAME_ANSWER_PERMILLE = 500
"""Of the words of two answers together that both must have."""
COMPUTED_MOST = 12
"""Numbers of a prompt of which sums, differences, products and quotients are expected."""
FOUND_MOST = 8
NEAR_MOST = 8
"""Clauses of the prompt that one of the answer is held against."""
NEGATIVE_PREFIXES = ("un", "dis", "in", "im", "non")


def contradicts(prompt: str, answer: str) -> bool:
    """Does the answer say the contrary of something that the prompt says?"""
    return bool(_found(prompt, answer, 1))


def contradictions(prompt: str, answer: str) -> list[str]:
    """How, for people: at most 8, each with the rule and both clauses."""
    return _found(prompt, answer, FOUND_MOST)


def answers_match(first: str, second: str, *, same_permille: int = SAME_ANSWER_PERMILLE) -> bool:
    """Do two answers say the same: numbers, negation, what is allowed, and most content words?

    ``same_permille`` is the share of the words of both together that both must have.
    """
    if first.split() == second.split():
        return bool(first.strip())
    if numbers(first) != numbers(second) or negated(first) != negated(second):
        return False
    ours, theirs = content(first), content(second)
    both = len(ours & theirs)
    if both * 1000 < same_permille * len(ours | theirs) or not both:
        return False
    return not (_opposites(ours, theirs) or contradicts(first, second))


class _Compared(NamedTuple):
    """A clause of the answer beside one of the prompt."""

    given: Clause
    shorter_permille: int
    """Words of both as a share of the shorter clause's words, and of all words of the two."""
    union_permille: int
    turns: tuple[str, ...]
    """What turns the meaning of one into that of the other."""
    shared: frozenset[int]
    """Antonym pairs that both have a side of."""
    other_subject: bool


def _found(prompt: str, answer: str, most: int) -> list[str]:
    asked = plain(prompt)
    read = clauses(asked)
    given = [clause for clause in read if clause.stated]
    if not given:
        return []
    repeated = frozenset([clause.text for clause in read])
    expected: frozenset[Number] | None = None
    found: list[str] = []
    for clause in clauses(plain(answer)):
        if not clause.stated or clause.text in repeated:
            continue
        near = _near(clause, given, asked)
        why = _turned(clause, near) or _swapped(clause, near)
        if not why and clause.numbers and near:
            expected = _expected(read) if expected is None else expected
            why = _counted(clause, near, expected)
        if why:
            found.append(why)
            if len(found) >= most:
                break
    return found


def _near(clause: Clause, given: list[Clause], asked: str) -> list[_Compared]:
    """Those of the prompt's clauses that may be about the same, the nearest first."""
    found: list[tuple[int, int, Clause]] = []
    for other in given:
        both = len(clause.words & other.words)
        if not both:
            continue
        fewer, more = sorted((len(clause.words), len(other.words)))
        if both * 1000 < NUMBERS_TOO_PERMILLE * fewer or (fewer == 1 and more > 3):
            continue
        found.append((1000 * both // (fewer + more - both), 1000 * both // fewer, other))
    near: list[_Compared] = []
    for union_permille, shorter_permille, other in nlargest(
        NEAR_MOST, found, key=lambda each: each[:2]
    ):
        shared = frozenset(clause.sides.keys() & other.sides.keys())
        near.append(
            _Compared(
                other,
                shorter_permille,
                union_permille,
                tuple(_turns(clause, other, shared)),
                shared,
                _other_subject(clause, other, shared, asked),
            )
        )
    return near


def _turns(clause: Clause, other: Clause, shared: Iterable[int]) -> list[str]:
    turns: list[str] = []
    if clause.negative != other.negative:
        turns.append("ruling" if clause.rules and other.rules else "negation")
    for pair in sorted(shared):
        ours, theirs = clause.sides[pair], other.sides[pair]
        if ours.side != theirs.side:
            turns.append("antonym")
        if ours.order and _crossed(ours, theirs):
            turns.append("order")
    return turns


def _crossed(ours: Side, theirs: Side) -> bool:
    """Does what stands before it in one stand after it in the other, and the reverse?"""
    left, right = ours.before - ours.after, ours.after - ours.before
    return not (
        left.isdisjoint(theirs.after - theirs.before)
        or right.isdisjoint(theirs.before - theirs.after)
    )


def _other_subject(clause: Clause, other: Clause, shared: Iterable[int], asked: str) -> bool:
    """Do both begin with what the other lacks, and the prompt knows the answer's?"""
    befores = [(clause.sides[pair].before, other.sides[pair].before) for pair in shared]
    for ours, theirs in befores or [(clause.before, other.before)]:
        own = ours - other.words
        if own and theirs - clause.words and any(word in asked for word in own):
            return True
    return False


def _turned(clause: Clause, near: list[_Compared]) -> str:
    """Is its meaning turned? What the prompt says that is nearest counts: rules have exceptions."""
    best, nearest = None, 0
    for each in near:
        if not _same_thing(clause, each):
            continue
        contrary = len(each.turns) % 2 == 1
        # At the same distance, what supports it wins.
        if each.union_permille * 2 + (not contrary) > nearest:
            best, nearest = each, each.union_permille * 2 + (not contrary)
    if best is None or len(best.turns) % 2 == 0:
        return ""
    for each in near:  # said of both sides
        if best.shared & each.shared and not each.turns:
            return ""
    return _tell(best.turns[0], best.given, clause)


def _same_thing(clause: Clause, each: _Compared) -> bool:
    given = each.given
    if each.other_subject or not set(clause.numbers) <= set(given.numbers):
        return False
    holds = min(clause.holds, given.holds)
    if holds == 0 and each.turns != ("antonym",):
        return False
    if holds == 1:
        return each.union_permille >= EXCEPTED_PERMILLE
    if each.shared:
        numbers_too = clause.numbers and clause.numbers == given.numbers
        least = NUMBERS_TOO_PERMILLE if numbers_too else SAME_SUBJECT_PERMILLE
        return each.shorter_permille >= least
    if clause.rules and given.rules:
        return each.shorter_permille >= SAME_SUBJECT_PERMILLE
    return each.union_permille >= SAME_CLAUSE_PERMILLE


def _swapped(clause: Clause, near: list[_Compared]) -> str:
    """Does it say that the one did to the other what the other did to the one?"""
    for deed in clause.deeds:
        against: Clause | None = None
        for each in near:
            if len(each.turns) % 2:
                continue
            for other in each.given.deeds:
                if other.kind != deed.kind:
                    continue
                if _other_way(deed, other):
                    against = each.given
                elif not deed.doer.isdisjoint(other.doer):
                    break  # and the prompt says so
            else:
                continue
            against = None
            break
        if against is not None:
            return _tell("parties", against, clause)
    return ""


def _other_way(deed: Deed, other: Deed) -> bool:
    ours, theirs = deed.doer - other.doer, other.doer - deed.doer
    if deed.side != other.side:  # to lend to someone is not to borrow from them
        return not (ours or theirs) and not deed.others.isdisjoint(other.others)
    return (
        not (ours.isdisjoint(other.others) or theirs.isdisjoint(deed.others))
        and theirs.isdisjoint(other.others)
        and ours.isdisjoint(deed.others)
    )


def _counted(clause: Clause, near: list[_Compared], expected: frozenset[Number]) -> str:
    """Does it give another number of the same, that the prompt neither has nor lets expect?"""
    if clause.rough:
        return ""
    for each in near:
        given = each.given
        if given.rough or each.turns or each.other_subject:
            continue
        if each.shorter_permille < SAME_COUNTED_PERMILLE:
            continue
        for number in clause.numbers:
            said = [one.value for one in clause.numbers if one.unit == number.unit]
            told = [one.value for one in given.numbers if one.unit == number.unit]
            if len(said) > len(told) or number in expected or Number(number.value, "") in expected:
                continue
            # Nothing says that a bare number, or a date's, counts the same as another.
            loose = (
                not number.unit
                or number.unit == "月"
                or "月" in {one.unit for one in given.numbers}
            )
            if loose and each.union_permille < SAME_CLAUSE_PERMILLE:
                continue
            return _tell("number", given, clause)
    return ""


def _expected(read: list[Clause]) -> frozenset[Number]:
    """The prompt's numbers, and, whatever they count, what comes of them."""
    given = [number for clause in read for number in clause.numbers]
    values = list(dict.fromkeys([each.value for each in given if len(each.value) <= DIGITS_MOST]))
    exact = [Fraction(value) for value in values[:COMPUTED_MOST]]
    made = {sum(exact, Fraction(0))}
    for one, other in combinations(exact, 2):
        made |= {one + other, one - other, other - one, one * other}
        made |= {one / other} if other else set()
        made |= {other / one} if one else set()
    if any(clause.rescales for clause in read):
        made |= {one * by for one in exact for by in (2, 3, Fraction(1, 2), Fraction(1, 3))}
    return frozenset([*given, *[Number(_shown(value), "") for value in made]])


def _shown(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else str(float(value))


def _tell(rule: str, given: Clause, clause: Clause) -> str:
    return f"{rule}: {given.text[:120]!r}, answered {clause.text[:120]!r}"


def _opposites(ours: frozenset[str], theirs: frozenset[str]) -> bool:
    """Is a word of one the other's with a negative prefix: safe and unsafe, enable and disable?"""
    return any(
        not other.isdisjoint(_without_prefix(word))
        for one, other in ((ours, theirs), (theirs, ours))
        for word in one - other
    )


def _without_prefix(word: str) -> list[str]:
    bare = [word.removeprefix(prefix) for prefix in NEGATIVE_PREFIXES if word.startswith(prefix)]
    return bare + ["en" + rest for rest in bare]
