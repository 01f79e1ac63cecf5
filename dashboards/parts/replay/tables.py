"""Figures as real HTML tables, so that they can be read, copied and compared."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards.state import colours, said
from twin.report.charts import policy_colour

if TYPE_CHECKING:
    from collections.abc import Sequence

STYLE = """<style>
.tk { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums;
  margin-bottom: .4rem; }
.tk th, .tk td { padding: 3px 10px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid rgba(128, 128, 128, .22); vertical-align: baseline; }
.tk th { font-weight: 600; opacity: .75; }
.tk th.l, .tk td.l { text-align: left; }
.tk td.note { text-align: left; opacity: .65; white-space: normal; font-size: .8rem; }
.tk td.sub { padding-left: 26px; opacity: .75; }
.tk td.best { font-weight: 700; }
.tk tr.first td { border-top: 1px solid rgba(128, 128, 128, .5); }
.tk-key { margin-right: 18px; font-size: .9rem; }
.tk i, .tk-key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; }
.tk-wide { overflow-x: auto; }
</style>"""


def figure_table(table: dict[str, Any], places: dict[str, int]) -> None:
    """A table of ``twin.report.texts``.

    Args:
        places: of the policies, for their colours.
    """
    quantiles = table["quantiles"]
    span = f' colspan="{len(quantiles)}"' if quantiles else ""
    heads = "".join(f"<th{span}>{_name(label, places)}</th>" for label in table["labels"])
    first = '<th class="l"></th>' * (2 if quantiles else 1)
    top = f"<tr>{first}{heads}{'' if quantiles else '<th></th>'}</tr>"
    if quantiles:
        parts = "".join(f"<th>{name}</th>" for name in quantiles) * len(table["labels"])
        top += f"<tr>{first}{parts}</tr>"
    rows = "".join(_row(row, wide=bool(quantiles)) for row in table["rows"])
    _show(f"<thead>{top}</thead><tbody>{rows}</tbody>")


def policy_keys(places: dict[str, int]) -> None:
    """Which colour is which policy, for charts that have no legend of their own."""
    names = "".join(f'<span class="tk-key">{_name(label, places)}</span>' for label in places)
    st.html(f"{STYLE}{names}")


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Texts; the first ``left`` columns stand at the left."""
    top = "".join(_cell("th", text, place < left) for place, text in enumerate(heads))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, place < left) for place, text in enumerate(row))}</tr>"
        for row in rows
    )
    _show(f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>")


def _row(row: dict[str, Any], *, wide: bool) -> str:
    name = row["name"]
    kind = "l sub" if name.startswith(" ") else "l"
    cells = "".join(
        f'<td class="{"best" if cell["best"] else ""}">{escape(cell["text"])}'
        f"{' (' + escape(cell['between']) + ')' if cell['between'] else ''}</td>"
        for cell in row["cells"]
    )
    named = f'<td class="{kind}">{escape(said(name.strip()))}</td>'
    if not wide:
        return f'<tr>{named}{cells}<td class="note">{escape(said(row["note"]))}</td></tr>'
    group = f'<td class="l">{escape(said(row["group"]))}</td>'
    return f'<tr class="{"first" if row["group"] else ""}">{group}{named}{cells}</tr>'


def _name(label: str, places: dict[str, int]) -> str:
    colour = colours()[policy_colour(places.get(label, 0))]
    return f'<i style="background:{colour}"></i>{escape(label)}'


def _cell(tag: str, text: str, left: bool) -> str:
    place = ' class="l"' if left else ""
    return f"<{tag}{place}>{escape(text)}</{tag}>"


def _show(inner: str) -> None:
    st.html(f'{STYLE}<div class="tk-wide"><table class="tk">{inner}</table></div>')
