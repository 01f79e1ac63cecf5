"""What must not be kept is taken out of texts: ``[email]`` stands where an address stood.

Patterns find what looks like a secret or like somebody's data, and checks (Luhn, mod 97, dates)
tell it from other numbers. No pattern finds everything: names, addresses and whatever is secret for
what it says stay. A file may add patterns, one ``NAME = REGEX`` a line.

Python's patterns have no time bound, and hold the interpreter while they run. So texts are cut, the
patterns here take a time in proportion to the text, and those of a file are refused where they
repeat a repetition, or are slow on texts made of their own letters.
"""

from __future__ import annotations

import ipaddress
import re
import time
from datetime import date
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, NamedTuple

from policy.files import FileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Replace = Callable[[re.Match[str], str], str]

CHARS_MOST = 32 * 1024
"""Of a text; what follows is cut off."""
LAST_CHARS = 256
"""At a cut, in which something may have been cut in two: they go, too."""
CARD_DIGITS_MOST = 19
PATTERNS_MOST = 100
PATTERN_CHARS_MOST = 1000
TIMES_MOST = 8
"""A repetition with a fixed number of times, up to which it may hold others."""
SLOW_S = 0.01
TRIED_CHARS = (64, 128, 256, 512, 1024, 2048)
"""Lengths of what a new pattern is tried on, until it is slow."""

# No letter or digit before; but the end of an escape in JSON is not part of a word.
_START = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt])|(?<=\\u[0-9A-Fa-f]{4}))"
_END = r"(?![A-Za-z0-9_])"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_IS = r"\\?[\"']?\s{0,3}(?:[:=：]|是|为|為)\s{0,3}\\?[\"']?"  # noqa: RUF001
_VALUE = r"[^\s\"'，。；,;\\]"  # noqa: RUF001
_SECRET = r"[A-Za-z0-9._~+/=-]"


class Pattern(NamedTuple):
    """What is looked for, and what is put in its place."""

    name: str
    regex: re.Pattern[str]
    replace: Replace | None = None
    """Told the match and ``[name]``; None: ``[name]`` alone."""


class Redactor:
    """Takes it out.

    Args:
        more: patterns beside the usual ones, which go first.
    """

    def __init__(self, more: Sequence[Pattern] = ()) -> None:
        self._patterns = (*more, *USUAL)

    def redact(self, text: str) -> str:
        """The text as it may be kept, cut to ``CHARS_MOST``."""
        text = cut(text)
        for name, regex, replace in self._patterns:
            text = regex.sub(_replacer(name, replace), text)
        return text


def _replacer(name: str, replace: Replace | None) -> Callable[[re.Match[str]], str]:
    said = f"[{name}]"
    if replace is None:
        return lambda match: said
    return lambda match: replace(match, said)


def cut(text: str) -> str:
    """A text without what is too much, and without what may have been cut in two there."""
    if len(text) <= CHARS_MOST:
        return text
    kept = text[: CHARS_MOST - LAST_CHARS]
    words = kept.rsplit(None, 1)
    if len(words) == 2 and len(words[1]) < LAST_CHARS:
        kept = words[0]
    return f"{kept} [cut]"


# What the usual patterns check


def _keeps_first(match: re.Match[str], said: str) -> str:
    """What says what it is may stay: ``Bearer``, ``password=``, ``https://``."""
    return f"{match[1]}{said}"


def _keeps_ends(match: re.Match[str], said: str) -> str:
    return f"{match[1]}{said}@"


IBAN_CHARS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22,
    "BR": 29, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28, "EE": 20,
    "ES": 24, "FI": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27,
    "GT": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30,
    "KZ": 20, "LB": 28, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MD": 24, "ME": 22,
    "MK": 19, "MR": 27, "MT": 31, "MU": 30, "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29,
    "PT": 25, "QA": 29, "RO": 24, "RS": 22, "SA": 24, "SE": 24, "SI": 19, "SK": 24, "SM": 27,
    "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
}  # fmt: skip


def _iban(match: re.Match[str], said: str) -> str:
    """As long as its country's are, and with the right remainder of 97."""
    text = match[0]
    wanted = IBAN_CHARS.get(text[:2].upper(), 0)
    places = [at for at, char in enumerate(text, 1) if char not in " -"]
    if not wanted or len(places) < wanted:
        return text
    taken = places[wanted - 1]
    account = re.sub("[ -]", "", text[:taken]).upper()
    if text[taken : taken + 1].isalnum():
        return text
    number = int("".join(str(int(char, 36)) for char in account[4:] + account[:4]))
    return said + text[taken:] if number % 97 == 1 else text


_PROVINCES = frozenset(
    {*range(11, 16), *range(21, 24), *range(31, 38), *range(41, 47), *range(50, 55),
     *range(61, 66), 71, 81, 82, 83}
)  # fmt: skip
_FACTORS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def _chinese_id(match: re.Match[str], said: str) -> str:
    """A province, a birthday, and in one of 18 digits the right check digit."""
    digits = re.sub("[ -]", "", match[0]).upper()
    born = digits[6:14] if len(digits) == 18 else f"19{digits[6:12]}"
    try:
        date(int(born[:4]), int(born[4:6]), int(born[6:]))
    except ValueError:
        return match[0]
    if int(digits[:2]) not in _PROVINCES or not "1900" <= born[:4] <= "2099":
        return match[0]
    if len(digits) == 18:
        total = sum(int(digit) * by for digit, by in zip(digits, _FACTORS, strict=False))
        if "10X98765432"[total % 11] != digits[17]:
            return match[0]
    return said


def _cards(match: re.Match[str], said: str) -> str:
    """Runs of groups of digits that are card numbers; the groups around them stay."""
    parts = re.split("([ -])", match[0])
    groups, between = parts[::2], [*parts[1::2], ""]
    out: list[str] = []
    at = 0
    while at < len(groups):
        most = min(len(groups), at + CARD_DIGITS_MOST)
        end = next((e for e in range(most, at, -1) if _is_card("".join(groups[at:e]))), 0)
        out.append(said if end else groups[at])
        at = end or at + 1
        out.append(between[at - 1])
    return "".join(out)


def _is_card(digits: str) -> bool:
    issued = digits[:1] in ("3", "4", "5", "6") or "2221" <= digits[:4] <= "2720"
    if not issued or not 13 <= len(digits) <= CARD_DIGITS_MOST or len(set(digits)) == 1:
        return False
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _phone(match: re.Match[str], said: str) -> str:
    return said if 8 <= sum(char.isdigit() for char in match[0]) <= 15 else match[0]


def _ipv6(match: re.Match[str], said: str) -> str:
    text = match[0].rstrip(".:") if not match[0].endswith("::") else match[0]
    hexes = sum(char not in ":." for char in text)
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return match[0]
    return said + match[0][len(text) :] if hexes >= 4 else match[0]


def _usual(name: str, regex: str, replace: Replace | None = None, flags: int = 0) -> Pattern:
    return Pattern(name, re.compile(regex, flags), replace)


USUAL = (
    _usual(
        "private_key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
        flags=re.DOTALL,
    ),
    _usual("url_login", r"\b([A-Za-z][A-Za-z0-9+.-]{1,20}://)[^\s/@:]{0,100}:[^\s/@]{1,200}@",
           _keeps_ends),
    _usual("jwt", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    _usual("token", rf"\b((?:bearer|basic)\s{{1,4}})(?={_SECRET}{{0,100}}[0-9_=]){_SECRET}{{12,}}",
           _keeps_first, re.IGNORECASE),
    _usual("aws_key", rf"{_START}(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA|AIPA)[A-Z0-9]{{16}}{_END}"),
    _usual(
        "api_key",
        rf"{_START}(?:[srp]k[-_](?=[A-Za-z_-]{{0,40}}[0-9])[A-Za-z0-9_-]{{16,}}"
        r"|twk_[A-Za-z0-9_-]{20,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,}"
        r"|glpat-[A-Za-z0-9_-]{20,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{35}"
        r"|hf_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{36}|ya29\.[A-Za-z0-9_-]{20,}"
        r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,})",
    ),
    _usual(
        "secret",
        rf"((?:password|passwd|passphrase|pwd|密码|口令|密碼){_IS}){_VALUE}{{4,200}}",
        _keeps_first, re.IGNORECASE,
    ),
    _usual(
        "secret",
        rf"((?:api[_ -]?key|secret|token|access[_ -]?key|密钥|密鑰|令牌){_IS})"
        rf"(?={_VALUE}{{0,60}}[0-9]){_VALUE}{{8,200}}",
        _keeps_first, re.IGNORECASE,
    ),
    _usual(
        "email",
        r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,256}@(?:[A-Za-z0-9-]{1,63}\.){1,8}"
        r"[A-Za-z]{2,24}",
    ),
    _usual("iban", rf"{_START}[A-Z]{{2}}\d\d(?:[ -]?[A-Z0-9]){{11,30}}", _iban, re.IGNORECASE),
    _usual(
        "id_number",
        rf"{_START}(?:[1-8]\d{{5}}[ -]?(?:19|20)\d\d[01]\d[0-3]\d[ -]?\d{{3}}[\dXx]"
        rf"|[1-8]\d{{7}}[01]\d[0-3]\d{{4}}){_END}",
        _chinese_id,
    ),
    _usual("card", rf"{_START}\d(?:[ -]?\d){{12,40}}{_END}", _cards),
    _usual(
        "phone",
        rf"{_START}(?:(?:\+|00)?86[ -]?)?1[3-9]\d[ -]?\d{{4}}[ -]?\d{{4}}{_END}",
    ),
    _usual("phone", r"(?<![A-Za-z0-9_+])(?:\+|00(?=[1-9]\d{0,2}[ .(/-]))[1-9]\d{0,2}"
                    r"(?:[ .()/-]{0,2}\d){6,13}(?!\d)", _phone),
    _usual(
        "phone",
        rf"{_START}(?:0\d{{2,3}}-\d{{7,8}}|\d{{3}}-\d{{3}}-\d{{4}}){_END}"
        r"|\(\d{3}\) ?\d{3}-\d{4}(?!\d)",
    ),
    _usual("ip", r"(?<![A-Za-z0-9:.])[0-9A-Fa-f:][0-9A-Fa-f:.]{3,44}(?![A-Za-z0-9])", _ipv6),
    _usual("ip", rf"(?<![A-Za-z0-9_.])(?:{_OCTET}\.){{3}}{_OCTET}(?!\.?[A-Za-z0-9_])"),
)  # fmt: skip


# Patterns of a file


def load_patterns(path: Path) -> tuple[Pattern, ...]:
    """The patterns of a file: ``NAME = REGEX`` a line, ``#`` begins a comment line.

    Raises:
        FileError: which line cannot be used, and why.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(str(path), "is no UTF-8 text") from error
    found: dict[str, Pattern] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            pattern = _pattern(f"{path}, line {number}", line)
            if pattern.name in found:
                raise FileError(f"{path}, line {number}", f"{pattern.name} stands twice")
            found[pattern.name] = pattern
    if len(found) > PATTERNS_MOST:
        raise FileError(str(path), f"has {len(found)} patterns: at most {PATTERNS_MOST}")
    return tuple(found.values())


def _pattern(where: str, line: str) -> Pattern:
    name, equals, regex = line.partition("=")
    name, regex = name.strip(), regex.strip()
    if not equals or not regex or not re.fullmatch("[a-z][a-z0-9_]{0,39}", name):
        raise FileError(
            where, f"{line.strip()[:60]!r} is no pattern",
            hint=r"write NAME = REGEX with a name of small letters, such as: order = ORD-\d{8}",
        )  # fmt: skip
    if len(regex) > PATTERN_CHARS_MOST:
        raise FileError(where, f"{name} has {len(regex)} characters: at most {PATTERN_CHARS_MOST}")
    try:
        compiled = re.compile(regex)
        parsed = sre_parser.parse(regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise FileError(where, f"{name} is no regular expression: {error}", value=regex) from error
    if _repeats_repetition(parsed):
        raise FileError(
            where, f"{name} repeats what has a repetition or a choice in it", value=regex,
            hint=r"such a pattern may take hours: write (?:ab){1,9}, not (?:a+b){1,9} or (?:a|b+)*",
        )  # fmt: skip
    if compiled.search("") is not None:
        raise FileError(where, f"{name} finds nothing at all, everywhere", value=regex)
    slow = _slow_on(compiled)
    if slow:
        raise FileError(
            where, f"{name} takes more than {SLOW_S * 1000:g} ms on {slow} characters", value=regex,
            hint=r"give its repetitions a bound, as in \d{1,20}",
        )  # fmt: skip
    return Pattern(name, compiled)


def _repeats_repetition(parsed: object, inside: bool = False) -> bool:
    """Whether a repetition stands in one, which may take a time that doubles with each letter."""
    for operation, argument in _operations(parsed):
        repeats = operation in (sre.MAX_REPEAT, sre.MIN_REPEAT)
        varies = repeats and argument[0] != argument[1]
        if inside and (varies or operation is sre.BRANCH):
            return True
        # A few times exactly, or once at most, is no harm: ``(?:a+b){3}``, ``(?:a+)?``.
        within = inside or (repeats and argument[1] > (1 if varies else TIMES_MOST))
        if any(_repeats_repetition(each, within) for each in _inner(argument)):
            return True
    return False


def _operations(parsed: object) -> Iterator[tuple[object, tuple[int, int]]]:
    yield from parsed  # type: ignore[misc]


def _inner(argument: object) -> Iterator[object]:
    """Patterns in an operation's argument."""
    if isinstance(argument, sre_parser.SubPattern):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _inner(each)


def _slow_on(regex: re.Pattern[str]) -> int:
    """The length of a text that it takes long for; 0: none was found."""
    letters = dict.fromkeys(regex.pattern)
    seeds = ["a", "1", " ", "A", "-", "a1 ", "1 ", "a.", "ab-", *letters, regex.pattern]
    for chars in TRIED_CHARS:
        for seed in seeds:
            text = (seed * chars)[:chars] + "\x00"
            if min(_took_s(regex, text) for _ in range(3)) > SLOW_S:
                return chars
    return 0


def _took_s(regex: re.Pattern[str], text: str) -> float:
    began_s = time.thread_time()
    regex.sub("", text)
    return time.thread_time() - began_s
