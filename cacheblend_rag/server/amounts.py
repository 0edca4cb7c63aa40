"""Measures what the body of a request holds, before any model, template or tokeniser sees a part of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

CHARACTERS_A_TOKEN: Final = 16
"""No prompt has more on average: a text with more characters for each token of the context window does not fit that window."""
FEWEST_CHARACTERS: Final = 1 << 17
"""What a prompt may have however small the context window is: tokenising so many takes a tenth of a second."""
MOST_ITEMS: Final = 4096
"""Messages, blocks of messages, tools, stop strings and the like of one prompt."""
_SLICE: Final = 1 << 16
"""Bytes looked at in one go, so that other threads get their turns."""
_BATCHES: Final = {
    "/v1/chunks": ("texts", "chunks"),
    "/v1/completions": ("prompt",),
    "/v1/completions/render": ("prompt",),
    "/v1/chat/completions/batch": ("messages",),
    "/v1/embeddings": ("input",),
}
"""Fields, by route, whose elements are computed each for itself."""


@dataclass(frozen=True)
class Amount:
    """Says how much there is to read in a part of a body.

    Attributes:
        characters: Characters of all its strings, names of members included.
        items: Elements of all its lists but numbers, of which a list of token ids has as many as a prompt has tokens.
    """

    characters: int = 0
    items: int = 0


def count_values(body: bytes | bytearray) -> int:
    """Return about how many values a JSON text holds, its members' names included; at least half of the true number.

    A parser holds the interpreter until it has made all of them: tens of bytes of brackets take it as long as a page of text,
    and nothing else is served meanwhile.
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


def largest(path: str, body: bytes | bytearray) -> Amount:
    """Return the most characters, and the most items, that one prompt or text of a JSON body has.

    A body is one prompt. Where the route ``path`` takes a batch, each element of the batch is one, and so is all the rest of the
    body together.

    Raises:
        ValueError: The body is not JSON.
        RecursionError: Its values are nested too deeply for a parser.
    """
    parsed = json.loads(bytes(body))
    parts: list[Any] = [parsed]
    if isinstance(parsed, dict):
        for name in _BATCHES.get(path, ()):
            if isinstance(parsed.get(name), list):
                parts += filter(_has_text, parsed.pop(name))
    amounts = list(map(_amount, parts))
    return Amount(max(each.characters for each in amounts), max(each.items for each in amounts))


def most_characters(window: int) -> int:
    """Return how many characters a prompt may have where ``window`` tokens fit the context window."""
    return max(CHARACTERS_A_TOKEN * window, FEWEST_CHARACTERS)


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
