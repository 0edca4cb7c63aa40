"""Refuses requests larger than any prompt can be, before a model, template or tokeniser reads them."""

from __future__ import annotations

import json
import re
from typing import Any, Final

CHARACTERS_A_TOKEN: Final = 16
"""Most characters per token: a text with more characters for each token of the context window does not fit the window."""
FEWEST_CHARACTERS: Final = 1 << 17
"""Smallest limit on a prompt's characters, and the limit on a body's other text. Tokenising so much text takes 0.1 s."""
MOST_ITEMS: Final = 2048
"""Most messages, text blocks, tools, stop strings and other list elements of one request."""
MOST_VALUES = 500_000
"""Most values of a body. A parser makes all values without a pause, and others wait meanwhile."""
MOST_STRINGS = 500_000
"""Most strings that are looked at to count the values of a body."""
_SEPARATORS: Final = (b",", b":", b"[", b"{")
# A string that does not end goes to the end of the body; no quantifier gives anything back, so that the time is linear.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_PROMPT: Final = {
    *("messages", "prompt", "suffix", "input", "instructions", "system", "tools", "documents"),
    *("cacheblend", "chunk_ids"),
}
"""Request fields whose text becomes part of the prompt, on all routes."""
_BATCHES: Final = {
    "/v1/chunks": ("texts", "chunks"),
    "/v1/completions": ("prompt",),
    "/v1/completions/render": ("prompt",),
    "/v1/chat/completions/batch": ("messages",),
    "/v1/embeddings": ("input",),
}
"""Request fields, by route, whose list elements are separate prompts or texts."""


def most_characters(window: int) -> int:
    """Return how many characters a prompt may have if the context window has ``window`` tokens."""
    return max(CHARACTERS_A_TOKEN * window, FEWEST_CHARACTERS)


def _has_too_many_values(body: bytes | bytearray) -> bool:
    """Return whether a JSON text has more separators outside of its strings than :data:`MOST_VALUES`."""
    separators = _separators(body)
    for strings, string in enumerate(_STRING.finditer(body) if separators > MOST_VALUES else ()):
        separators -= _separators(string.group())
        if separators <= MOST_VALUES or strings > MOST_STRINGS:
            break
    return separators > MOST_VALUES


def _separators(text: bytes | bytearray) -> int:
    return sum(map(text.count, _SEPARATORS))


def refusal(path: str, body: bytes | bytearray, most: int) -> str:
    """Return why a JSON body exceeds the limits of a route; empty if the body is within the limits.

    A prompt may have ``most`` characters, and so may each element of a batch. The other fields have a limit of their own,
    because they may be tokenised for each answer while other requests wait. A body that is not JSON counts as one prompt.
    """
    if _has_too_many_values(body):
        return (
            f"The request holds more than {MOST_VALUES} values. Send fewer at a time, and long prompts as text, not as token "
            "ids."
        )
    try:
        parsed = json.loads(bytes(body))
    except (ValueError, RecursionError):
        parsed = {"prompt": " " * len(body)}
    rest = parsed if isinstance(parsed, dict) else {"": parsed}
    prompts: list[Any] = []
    for name in _BATCHES.get(path, ()):
        if isinstance(rest.get(name), list):
            prompts += rest.pop(name)
    prompts.append({name: rest.pop(name) for name in _PROMPT & rest.keys()})
    characters = items = 0
    for prompt in prompts:
        more, parts = _amount(prompt)
        characters, items = max(characters, more), max(items, parts)
    others, parts = _amount(rest)
    items = max(items, parts)
    if characters > most:
        return (
            f"A prompt or text of the request has {characters} characters. No more than {most} fit the model's context window. "
            "Send a shorter one."
        )
    if others > FEWEST_CHARACTERS:
        return (
            f"The request has {others} characters besides its prompt. No more than {FEWEST_CHARACTERS} are read. Leave out what "
            "is long."
        )
    if items > MOST_ITEMS:
        return f"The request has {items} messages, blocks, tools and the like. No more than {MOST_ITEMS} are read. Send fewer."
    return ""


def _amount(value: Any) -> tuple[int, int]:
    """Return how many characters the strings in ``value`` have, names of members included, and how many elements the lists have.

    Numbers are no elements: a list of token ids has a number for each token of a prompt.
    """
    characters = items = 0
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            characters += len(each)
        elif isinstance(each, dict):
            characters += sum(map(len, each))
            left += each.values()
        elif isinstance(each, list):
            some = [part for part in each if isinstance(part, (str, dict, list))]
            items += len(some)
            left += some
    return characters, items
