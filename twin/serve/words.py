"""What the twin says: words drawn by the prompt's hash, each a token, and how sure it is of them.

The same prompt gives the same words in every process. The words are neutral on purpose: nothing is
allowed or forbidden in them, so they never look like a contradiction.
"""

from __future__ import annotations

from hashlib import blake2b, shake_128
from math import log

_LIST = """
amber anchor apple autumn bamboo basin beacon birch blossom boat border brass bridge brook cabin
canal candle canvas canyon cargo castle cedar chalk cherry circle cliff cloud clover coast copper
coral corner cotton cradle crane creek crystal current dawn delta desert dome dune eagle early
east echo elm ember engine evening falcon feather fern field finch flame forest fountain garden
gentle glacier glass golden granite grove gull harbor harvest hazel heron hill hollow horizon
iris island ivory jade jasmine juniper kettle lagoon lake lantern lark laurel lemon light linen
lotus maple marble meadow mellow mill mist moon moss mountain north oak ocean olive orchard otter
paper pearl pebble pine planet plateau pond prairie quartz quiet rain reef ridge river sail sand
silver spring stone summer sunrise valley willow
"""
_WORDS = _LIST.split()

MOST_LOGPROBS = 20
"""vLLM's limit on candidates a token."""
_BARE = 128
"""Codes from here on stand for the same words without the space in front."""
_TO_WORD = bytes(number & 127 for number in range(256))
_UNSURE = 255
"""The row of a token that could as well have been another."""
_DOUBTFUL = 254
"""Of one that its model would say, and is not sure of."""
_TO_ROW = bytes(min(number, _DOUBTFUL - 1) for number in range(256))

TEXTS = [f" {word}".encode() for word in _WORDS] + [word.encode() for word in _WORDS]
"""A token's text by its code; fit to stand inside a JSON string."""


def key_of(seed: int, model: str, prompt: bytes) -> bytes:
    """What an answer is drawn by."""
    named = f"{seed} {model}\0".encode()
    return blake2b(prompt, key=blake2b(named, digest_size=32).digest(), digest_size=16).digest()


def length_of(key: bytes, least: int, most: int) -> int:
    """The answer's length where the caller gives no limit, in tokens."""
    return least + int.from_bytes(key[:4], "big") % (most - least + 1)


def codes_of(key: bytes, tokens: int) -> bytes:
    """One code a token; a longer answer begins with the shorter one."""
    drawn = bytearray(shake_128(key).digest(tokens).translate(_TO_WORD))
    if drawn:
        drawn[0] += _BARE
    return bytes(drawn)


def noisy(key: bytes) -> bytes:
    """What weights that have gone wrong answer by."""
    return blake2b(key, key=b"noisy", digest_size=16).digest()


def certainty_of(key: bytes, tokens: int, kind: str = "") -> bytes:
    """One row of ``LOGPROBS`` a token; ``kind``: of the fault, ``unsure`` or ``noisy``."""
    if kind in ("unsure", "noisy"):
        return bytes([_UNSURE if kind == "unsure" else _DOUBTFUL]) * tokens
    return shake_128(key + b"certainty").digest(tokens).translate(_TO_ROW)


def text_of(codes: bytes) -> bytes:
    return b"".join([TEXTS[code] for code in codes])


def candidate(code: int, rank: int) -> int:
    """The code of a token's ``rank``-th candidate; its own at rank 0."""
    return (code & _BARE) | ((code & 127) + 7 * rank) & 127


def _row(number: int) -> tuple[float, ...]:
    """Log-probabilities of a token's candidates, likeliest first: mostly sure, sometimes not."""
    if number == _UNSURE:
        return tuple(log(0.06 * 0.97**rank) for rank in range(MOST_LOGPROBS))
    top = 0.6 if number == _DOUBTFUL else 1.0 - 0.5 * (number / 255) ** 5 - 1e-4
    return (log(top), *(log((1.0 - top) * 0.5**rank) for rank in range(1, MOST_LOGPROBS)))


LOGPROBS = [_row(number) for number in range(256)]
