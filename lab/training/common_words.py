"""Lists common English words that get a token each, so that user documents are not tokenised into letters."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

FREQUENT: Final = 260
"""Number of the list's first words that get a token for their capitalised form, too."""

COMMON_WORDS: Final = tuple((files(__package__) / "common_words.txt").read_text(encoding="utf-8").split())
