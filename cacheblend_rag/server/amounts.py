"""Refuses requests larger than any prompt can be, before a model, template or tokeniser reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

CHARACTERS_A_TOKEN: Final = 16
"""Most characters per token: a text with more characters for each token of the context window does not fit the window."""
FEWEST_CHARACTERS: Final = 1 << 17
"""Smallest limit on a prompt's characters, and the limit on a body's other text. Tokenising so much text takes 0.1 s."""
MOST_ITEMS: Final = 2048
"""Most messages, text blocks, tools, stop strings and other list elements of one request."""
_SLICE: Final = 1 << 16
"""Bytes counted in one step, so that other threads can run between steps."""
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


class Amount(NamedTuple):
    """Counts the text and the list elements in a part of a body.

    Attributes:
        characters: Characters of all strings, including the names of members.
        items: Elements of all lists, without numbers: a list of token ids has a number for each token of a prompt.
    """

    characters: int = 0
    items: int = 0


def most_characters(window: int) -> int:
    """Return how many characters a prompt may have if the context window has ``window`` tokens."""
    return max(CHARACTERS_A_TOKEN * window, FEWEST_CHARACTERS)


def count_values(body: bytes | bytearray) -> int:
    """Return the approximate number of values in a JSON text, including member names; at least half of the true number.

    A JSON parser holds the interpreter lock until all values are made. Tens of bytes of brackets take the parser as long as a
    page of text, and the server answers nobody meanwhile.
    """
    found, inside, escaped = 0, False, False
    for start in range(0, len(body), _SLICE):
        part = bytes(body[start : start + _SLICE])
        if escaped:
            part = part[1:]
        escaped = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[inside::2])
        found += sum(map(outside.count, (b",", b"[", b"{", b":")))
        inside ^= len(pieces) % 2 == 0
    return found


def is_small(body: bytes | bytearray, most: int) -> bool:
    """Return whether a body is so small that :func:`refusal` never refuses the body."""
    return len(body) <= min(most, FEWEST_CHARACTERS) and body.count(b",") + body.count(b"[") <= MOST_ITEMS


def refusal(path: str, body: bytes | bytearray, most: int) -> str:
    """Return why a JSON body exceeds the limits of a route; empty if the body is within the limits.

    A prompt may have ``most`` characters, and so may each element of a batch. The other fields have a limit of their own,
    because they may be tokenised for each answer while other requests wait. A body that is not JSON counts as one prompt.
    """
    try:
        parsed = json.loads(bytes(body))
    except (ValueError, RecursionError):
        parsed = {"prompt": " " * len(body)}
    prompts: list[Any] = []
    rest = parsed
    if isinstance(parsed, dict):
        for name in _BATCHES.get(path, ()):
            if isinstance(parsed.get(name), list):
                prompts += filter(_has_text, parsed.pop(name))
        prompts.append({name: value for name, value in parsed.items() if name in _PROMPT})
        rest = {name: value for name, value in parsed.items() if name not in _PROMPT}
    prompt, other = (_most(map(_amount, each)) for each in (prompts, [rest]))
    if prompt.characters > most:
        return (
            f"A prompt or text of the request has {prompt.characters} characters. No more than {most} fit the model's context "
            "window. Send a shorter one."
        )
    if other.characters > FEWEST_CHARACTERS:
        return (
            f"The request has {other.characters} characters besides its prompt. No more than {FEWEST_CHARACTERS} are read. Leave "
            "out what is long."
        )
    if (items := max(prompt.items, other.items)) > MOST_ITEMS:
        return f"The request has {items} messages, blocks, tools and the like. No more than {MOST_ITEMS} are read. Send fewer."
    return ""


def _most(amounts: Iterable[Amount]) -> Amount:
    characters, items = 0, 0
    for each in amounts:
        characters, items = max(characters, each.characters), max(items, each.items)
    return Amount(characters, items)


def _has_text(value: Any) -> bool:
    return isinstance(value, (str, dict, list))


def _amount(value: Any) -> Amount:
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
            some = list(filter(_has_text, each))
            items += len(some)
            left += some
    return Amount(characters, items)
