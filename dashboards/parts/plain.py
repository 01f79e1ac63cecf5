"""Texts of others, shown as they stand: Streamlit takes what it is given for Markdown."""

from __future__ import annotations

import re

import streamlit as st

_MARKS = re.compile(r"([\\`*_\[\]~$#<>|:])")


def plain_text(text: str) -> str:
    """As it stands: none of its characters is Markdown."""
    return _MARKS.sub(r"\\\1", text)


def complain(what: object) -> None:
    """An error's own sentence, which may name a file or quote what was given."""
    st.error(plain_text(str(what)))
