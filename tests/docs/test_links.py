"""Links of README.md and docs/ lead somewhere; the README's figures are in docs/figures.md."""

from __future__ import annotations

import re

import pytest

from tests.docs.snippets import PAGES, ROOT

LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`", lambda found: found[0].replace("[", "").replace("]", ""), text)


def anchors(page: str) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        number = sum(name == other or other.startswith(f"{name}-") for other in found)
        found.add(name if name not in found else f"{name}-{number}")
    found |= set(re.findall(r'<a (?:id|name)="([^"]+)"', prose(page)))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists():
            wrong.append(target)
        elif anchor and path.suffix == ".md":
            known = anchors(str(path.resolve().relative_to(ROOT)))
            wrong += [target] * (anchor not in known)
    assert not wrong, f"{page}: {wrong}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [
        page for page in PAGES
        if page.startswith("docs/") and page.count("/") == 1 and page != "docs/README.md"
        and f"({page.removeprefix('docs/')})" not in index
    ]  # fmt: skip
    assert not missing


def test_the_readme_shows_figures_that_are_in_the_table() -> None:
    rows = [
        {line for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
         if re.match(r"\| `[\w-]+` \| `\w+` \|", line)}
        for page in ("README.md", "docs/figures.md")
    ]  # fmt: skip
    assert rows[0]
    assert rows[0] <= rows[1]
