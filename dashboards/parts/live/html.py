"""Small tables, bars and tiles as HTML: one element for many rows, so that polling flickers not.

What comes from elsewhere is escaped here, once: cells are texts, unless they are ``Html``.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import streamlit as st

from dashboards.state import colours

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CELL_CHARS_MOST = 400


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html_of(value: object) -> Html:
    """A value as HTML."""
    if isinstance(value, Html):
        return value
    text = str(value)
    if len(text) > CELL_CHARS_MOST:
        text = text[: CELL_CHARS_MOST - 1] + "…"
    return Html(escape(text))


def joined(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(html_of(part) for part in parts))


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()
) -> Html:
    """Rows under a head; the columns in ``numbers`` stand to the right."""
    palette = colours()
    right = set(numbers)
    line = f"border-bottom:1px solid {palette['--line']};padding:3px 8px;vertical-align:top"

    def cell(tag: str, column: int, value: object) -> str:
        align = "right" if column in right else "left"
        figures = ";font-variant-numeric:tabular-nums;white-space:nowrap" if column in right else ""
        ink = f";color:{palette['--muted']};font-weight:600" if tag == "th" else ""
        return f'<{tag} style="{line};text-align:{align}{figures}{ink}">{html_of(value)}</{tag}>'

    titles = "".join(cell("th", column, title) for column, title in enumerate(head))
    body = "".join(
        "<tr>" + "".join(cell("td", column, value) for column, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return Html(
        '<div style="overflow-x:auto"><table style="width:100%;border-collapse:collapse;'
        f'font-size:.82rem">'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def badge(text: object, colour: str) -> Html:
    """A word in a coloured frame; ``colour`` is a name of ``twin.report.colours``."""
    shade = colours()[colour]
    return Html(
        f'<span style="border:1px solid {shade};color:{shade};border-radius:9px;padding:0 7px;'
        f'font-size:.78rem;white-space:nowrap">{html_of(text)}</span>'
    )


def dot(colour: str) -> Html:
    """A spot of a tier's or a policy's colour."""
    return Html(
        '<span style="display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px;'
        f'background:{colours()[colour]}"></span>'
    )


def bar(share: float, colour: str, mark: float | None = None) -> Html:
    """How much of a whole, from 0 to 1, with a line across at ``mark``."""
    palette = colours()
    width = 100 * min(1.0, max(0.0, share))
    line = ""
    if mark is not None:
        at = 100 * min(1.0, max(0.0, mark))
        line = (
            f'<div style="position:absolute;left:{at:.1f}%;top:-2px;bottom:-2px;width:2px;'
            f'background:{palette["--ink"]}"></div>'
        )
    return Html(
        f'<div style="position:relative;height:7px;min-width:60px;border-radius:4px;'
        f'background:{palette["--line"]}"><div style="height:7px;border-radius:4px;'
        f'width:{width:.1f}%;background:{palette[colour]}"></div>{line}</div>'
    )


def muted(text: object) -> Html:
    return Html(f'<span style="color:{colours()["--muted"]}">{html_of(text)}</span>')


def whole(text: object) -> Html:
    """Not broken into lines."""
    return Html(f'<span style="white-space:nowrap">{html_of(text)}</span>')


def title(text: str) -> None:
    """A panel's."""
    st.markdown(f"#### {text}")


def steady(*keys: str) -> None:
    """Containers with these keys are asked for again and again: they are not greyed meanwhile."""
    rules = ",".join(f".st-key-{key} [data-stale='true']" for key in keys)
    st.html(f"<style>{rules}{{opacity:1 !important;transition:none !important}}</style>")


def strong(text: object) -> Html:
    return Html(f"<strong>{html_of(text)}</strong>")


def strip(parts: Iterable[object]) -> Html:
    """Facts side by side."""
    spans = "".join(f"<span>{html_of(part)}</span>" for part in parts)
    return Html(
        '<div style="display:flex;flex-wrap:wrap;gap:4px 18px;align-items:center;'
        f'font-size:.9rem">{spans}</div>'
    )
