"""Every notebook runs from scratch, is thin, and is kept without outputs."""

from __future__ import annotations

import ast

import nbformat
import pytest

from tests.notebooks.__main__ import NOTEBOOKS, names, run

STATEMENTS_MOST = 60
"""Of a notebook: what takes more is a function of some package."""
SECTIONS = ("## The claim", "## Where it comes from", "## What was run", "## What came of it",
            "## Where it does not hold")  # fmt: skip
NAMES = names()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_thin_and_has_no_outputs(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    statements = [
        node for cell in code for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.stmt)
    ]  # fmt: skip
    assert len(statements) <= STATEMENTS_MOST
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert [section for section in SECTIONS if section not in text] == []
    assert text.startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_scratch(name: str) -> None:
    figures = run(name, "fast")
    assert figures, "a notebook that claims something measures something"
    assert all(figure.how for figure in figures)


def test_each_claim_has_one() -> None:
    assert len(NAMES) == 15
