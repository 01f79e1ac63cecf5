"""Does an answer contradict its prompt? Do two answers say the same?

Both are rules of thumb for Chinese and English: no model is asked, so that they cost microseconds
and give one result everywhere. They err towards "no contradiction" and "no match".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policy.signals.words import content, negated, numbers, rulings

if TYPE_CHECKING:
    from policy.signals.words import Clause

SAME_SUBJECT_PERMILLE = 660
"""Of the shorter clause's words that the other must have for both to be about one thing."""
SAME_ANSWER_PERMILLE = 500
"""Of the words of two answers together that both must have."""
NEGATIVE_PREFIXES = ("un", "dis", "in", "im", "non")


def contradicts(prompt: str, answer: str) -> bool:
    """Does the answer allow what the prompt forbids, or the reverse?"""
    given = rulings(prompt)
    return any(_opposed(clause, given) for clause in rulings(answer)) if given else False


def answers_match(first: str, second: str) -> bool:
    """Do two answers say the same: numbers, negation, what is allowed, and most content words?"""
    if first.split() == second.split():
        return bool(first.strip())
    if numbers(first) != numbers(second) or negated(first) != negated(second):
        return False
    ours, theirs = content(first), content(second)
    both = len(ours & theirs)
    if both * 1000 < SAME_ANSWER_PERMILLE * len(ours | theirs) or not both:
        return False
    return not (_opposites(ours, theirs) or contradicts(first, second))


def _opposed(clause: Clause, given: list[Clause]) -> bool:
    """By what the prompt says that is nearest to it: a rule may have its exceptions."""
    nearest, ruling = 0, clause.ruling
    for other in given:
        both = len(clause.words & other.words)
        shorter = min(len(clause.words), len(other.words))
        if both * 1000 < SAME_SUBJECT_PERMILLE * shorter or clause.numbers != other.numbers:
            continue
        likeness = 1000 * both // len(clause.words | other.words)
        if likeness > nearest or (likeness == nearest and other.ruling == clause.ruling):
            nearest, ruling = likeness, other.ruling
    return ruling != clause.ruling


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
