"""All texts are in the dictionary, in both languages, and nothing else is."""

from __future__ import annotations

import ast
import re
from string import Formatter
from typing import TYPE_CHECKING

import pytest

from dashboards.words import FILE, LANGUAGES, Words

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = FILE.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}
WORDS = Words.load()
_SHOWN = """
    badge button caption checkbox download_button error expander feedback file_uploader
    form_submit_button header info link_button markdown menu_button metric multiselect number_input
    page_link pills popover progress radio segmented_control select_slider selectbox slider spinner
    status subheader success tabs text text_area text_input title toast toggle warning
    write
"""
SHOWN = frozenset(_SHOWN.split())
"""Of Streamlit, what shows its first argument."""
NAMED = frozenset(["label", "help", "placeholder", "caption", "text", "body", "title", "delta"])
"""Arguments that are shown."""
ALLOWED = {"Language · 语言"}
"""Texts that are the same in both languages."""
_UNITS = "GB GiB GPU KV MB MiB h kW min ms ns req rps s tok tokens"
UNITS = frozenset(_UNITS.split())
MARKUP = re.compile(r"<[^>]*>|:[a-z-]+(/\w+)?[:\[]|&\w+;")
SAME = frozenset({"frame.language", "live.how.domain"})
"""Names of texts that are the same in Chinese."""


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Of a function by its bare name, or as an attribute of a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            func = node.func
            called = func.id if isinstance(func, ast.Name) else ""
            if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
                called = func.attr if func.value.id == "state" else ""
            if called == name:
                yield node


def keys(node: ast.AST) -> list[str]:
    """The texts that an expression may name: literally, or as a pattern."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [re.escape(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = (
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z0-9_.]+"
            for part in node.values
        )
        return ["".join(parts)]
    if isinstance(node, ast.IfExp):
        return keys(node.body) + keys(node.orelse)
    return []


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


USES = [
    (file, node.lineno, key, node)
    for file, tree in SOURCES.items()
    for node in calls(tree, "t") if node.args
    for key in keys(node.args[0])
]  # fmt: skip


@pytest.mark.parametrize("file", SOURCES)
def test_every_text_that_is_used_is_there(file: str) -> None:
    missing = [
        f"{file}:{line}: {key}"
        for where, line, key, _ in USES
        if where == file and not any(re.fullmatch(key, known) for known in WORDS.texts)
    ]
    assert not missing, missing


@pytest.mark.parametrize("file", SOURCES)
def test_every_text_is_given_its_values(file: str) -> None:
    wrong = []
    for where, line, key, node in USES:
        composed = not isinstance(node.args[0], ast.Constant)  # whose values only a page can tell
        if where != file or composed or any(word.arg is None for word in node.keywords):
            continue
        given = {word.arg for word in node.keywords}
        for known, texts in WORDS.texts.items():
            if re.fullmatch(key, known) and not fields(texts["en"]) <= given:
                wrong.append(f"{file}:{line}: {known} needs {fields(texts['en'])}, has {given}")
    assert not wrong, wrong


def test_no_text_is_left_over() -> None:
    patterns = {key for _, _, key, _ in USES if len(re.sub(r"\[.*?\]\+|\W", "", key)) >= 3}
    literals = {
        node.value
        for tree in SOURCES.values() for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }  # fmt: skip
    unused = [
        key
        for key in WORDS.texts
        if key not in literals and not any(re.fullmatch(pattern, key) for pattern in patterns)
    ]
    assert not unused, unused


def test_both_languages_say_the_same() -> None:
    wrong = []
    for key, texts in WORDS.texts.items():
        if set(texts) != set(LANGUAGES) or not all(
            isinstance(text, str) and text.strip() for text in texts.values()
        ):
            wrong.append(f"{key}: {texts}")
        elif fields(texts["en"]) != fields(texts["zh"]):
            wrong.append(f"{key}: {fields(texts['en'])} is not {fields(texts['zh'])}")
    assert not wrong, wrong


def test_chinese_is_chinese() -> None:
    prose = re.compile(r"[a-z]{2,} [a-z]{2,}")
    plain = {key: texts for key, texts in WORDS.texts.items() if key not in SAME}
    english = [
        key
        for key, texts in plain.items()
        if prose.search(re.sub(r"\{.*?\}|`.*?`", "", texts["en"]))
        and not re.search("[\u4e00-\u9fff]", texts["zh"])
    ]
    assert not english, english
    assert all(isinstance(text, str) and text for text in WORDS.others.values())


def literal(node: ast.AST) -> Iterator[str]:
    """What of an expression is written out in the code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from literal(part)
    elif isinstance(node, ast.BinOp):
        yield from literal(node.left)
        yield from literal(node.right)
    elif isinstance(node, ast.IfExp):
        yield from literal(node.body)
        yield from literal(node.orelse)
    elif isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            yield from literal(item)


def prose(text: str) -> list[str]:
    """Words that somebody would have to translate."""
    if text in ALLOWED:
        return []
    words: list[str] = re.findall(r"[^\W\d_]+", MARKUP.sub(" ", text))
    return [word for word in words if word not in UNITS]


@pytest.mark.parametrize("file", SOURCES)
def test_no_text_is_written_in_the_code(file: str) -> None:
    found = []
    for node in ast.walk(SOURCES[file]):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in SHOWN:
            continue
        shown = [*node.args[:1], *(word.value for word in node.keywords if word.arg in NAMED)]
        found += [
            f"{file}:{node.lineno}: {text!r}"
            for each in shown for text in literal(each) if prose(text)
        ]  # fmt: skip
    assert not found, found


def test_the_check_sees_what_is_written_in_the_code() -> None:
    for code in ("'Run'", "f'{x} requests'", "'Run' if x else t('a')", "['a', t('b')]", "x + 'y'"):
        assert any(prose(text) for text in literal(ast.parse(code, mode="eval").body)), code
    for code in ("t('a.b')", "f'**{x}** ms'", "':material/undo:'", "f':red[{x}]'", "'<br>'"):
        assert not any(prose(text) for text in literal(ast.parse(code, mode="eval").body)), code


def test_what_is_not_known_stays_as_it_is() -> None:
    assert WORDS.translated("no such text", "zh") == "no such text"
    assert WORDS.text("frame.wrong_link", "en", why="x {y}") == "This link cannot be used: x {y}"
    with pytest.raises(KeyError):
        WORDS.text("no.such", "en")
