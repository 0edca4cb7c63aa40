"""Lists common English words that are worth a token each, so that documents do not fall apart into letters."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

FREQUENT: Final = 260
"""The first words of the list are also kept in their capitalised form."""

COMMON_WORDS: Final = tuple((files(__package__) / "common_words.txt").read_text(encoding="utf-8").split())
