"""Refuses invalid questions before anything is loaded to answer them."""

from __future__ import annotations

from cacheblend_rag.errors import InputError


def check_question(question: str) -> None:
    """Raise an error for an empty question, or a question with lone surrogates, which cannot be tokenised.

    Raises:
        InputError: The question is empty, or is not valid Unicode.
    """
    if not question.strip():
        raise InputError("The question is empty.")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The question is not valid Unicode ({error}).") from None
