"""Refuses requests that hold more than fits a prompt, before any model, template or tokeniser sees a part of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

CHARACTERS_A_TOKEN: Final = 16
"""No prompt has more on average: a text with more characters for each token of the context window does not fit that window."""
FEWEST_CHARACTERS: Final = 1 << 17
"""Characters that a prompt may have in the smallest context window, and the rest of a body in any: 0.1 s to tokenise."""
MOST_ITEMS: Final = 2048
"""Messages, blocks of messages, tools, stop strings and the like of one request."""
_SLICE: Final = 1 << 16
"""Bytes looked at in one go, so that other threads get their turns."""
_PROMPT: Final = {
    *("messages", "prompt", "suffix", "input", "instructions", "system", "tools", "documents"),
    *("cacheblend", "chunk_ids"),
}
"""Fields whose text is in the prompt, on all routes."""
_BATCHES: Final = {
    "/v1/chunks": ("texts", "chunks"),
    "/v1/completions": ("prompt",),
    "/v1/completions/render": ("prompt",),
    "/v1/chat/completions/batch": ("messages",),
    "/v1/embeddings": ("input",),
}
"""Fields, by route, whose elements are computed each for itself."""


class Amount(NamedTuple):
    """Says how much there is to read in a part of a body.

    Attributes:
        characters: Characters of all its strings, names of members included.
        items: Elements of all its lists but numbers, of which a list of token ids has as many as a prompt has tokens.
    """

    characters: int = 0
    items: int = 0


def most_characters(window: int) -> int:
    """Return how many characters a prompt may have where ``window`` tokens fit the context window."""
    return max(CHARACTERS_A_TOKEN * window, FEWEST_CHARACTERS)


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


def is_small(body: bytes | bytearray, most: int) -> bool:
    """Say whether a body is too short to be refused by :func:`refusal`, whatever it holds."""
    return len(body) <= min(most, FEWEST_CHARACTERS) and body.count(b",") + body.count(b"[") <= MOST_ITEMS


def refusal(path: str, body: bytes | bytearray, most: int) -> str:
    """Return why a JSON body for a route holds more than is read; empty if it does not.

    A prompt may have ``most`` characters, and so may each element of a batch. All the rest of a body, which may be tokenised for
    each answer while everybody waits, has a limit of its own. What is no JSON is a text.
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
