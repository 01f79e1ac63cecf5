"""All texts of the app, in English and Chinese: ``words.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy.files import parse_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LANGUAGES = ("en", "zh")
FILE = Path(__file__).with_name("words.yaml")
OTHERS = "others"
"""Section of texts that are written elsewhere, such as titles in charts: English to Chinese."""


@dataclass(frozen=True, slots=True)
class Words:
    """Texts by name and language."""

    texts: Mapping[str, Mapping[str, str]]
    others: Mapping[str, str]

    @classmethod
    def load(cls) -> Words:
        """
        Raises:
            FileError: the file is no YAML.
        """
        raw = parse_document(FILE.read_text(encoding="utf-8"), FILE.name)
        others = raw.pop(OTHERS)
        return cls(dict(_flat(raw, "")), others)

    def text(self, key: str, language: str, **values: Any) -> str:
        """The text with ``{name}`` replaced by values.

        Raises:
            KeyError: the dictionary has no such text.
        """
        return self.texts[key][language].format_map(values)

    def translated(self, text: str, language: str) -> str:
        """An English text in another language, if it is known; else as it is."""
        return text if language == LANGUAGES[0] else self.others.get(text, text)


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name, value in tree.items():
        if set(value) == set(LANGUAGES):
            yield f"{prefix}{name}", value
        else:
            yield from _flat(value, f"{prefix}{name}.")
