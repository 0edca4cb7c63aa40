"""Refuses what is no question, before anything is loaded for its answer."""

from __future__ import annotations

from cacheblend_rag.errors import InputError


def check_question(question: str) -> None:
    """Refuse an empty question, and one with halves of characters, which cannot be tokenised.

    Raises:
        InputError: It is one.
    """
    if not question.strip():
        raise InputError("The question is empty.")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The question is not valid Unicode ({error}).") from None
