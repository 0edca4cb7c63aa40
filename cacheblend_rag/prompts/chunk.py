"""Defines a chunk, the unit of retrieval and of KV reuse, identified by its content; encodes text as token ids.

Encoding does not use the mutable state that a Hugging Face tokenizer shares between its callers.
"""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from cacheblend_rag.errors import InputError, ModelError

_T = TypeVar("_T")

EDGE = 16
"""Number of neighbouring characters that decide how the tokenizer splits the two ends of a text."""

_KEPT = 1 << 14
# Text before and after a chunk in most prompts.
_BEHIND, _BEFORE = "\n", "\n\na"


class PerTokenizer(Generic[_T]):
    """Caches one value per tokenizer while the tokenizer lives and its vocabulary and template stay. Thread-safe."""

    def __init__(self, make: Callable[[Any], _T]):
        """Make each value by calling ``make`` with the tokenizer."""
        self._make = make
        self._known: WeakKeyDictionary[Any, tuple[object, _T]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, tokenizer: Any) -> _T:
        state = (len(tokenizer), str(getattr(tokenizer, "chat_template", None)))
        with self._lock:
            known = self._known.get(tokenizer)
            if known is None or known[0] != state:
                known = self._known[tokenizer] = (state, self._make(tokenizer))
            return known[1]


class TextEncoder:
    """Encodes document text and template text with one tokenizer, from any number of threads.

    A tokenizer call with ``split_special_tokens=`` changes a setting of the tokenizer object that all callers share, so
    that one thread could make another thread parse control tokens. This class has two private copies of the backend
    instead: the template copy parses special tokens (text rendered by a chat template), the document copy never parses
    special tokens.

    Attributes:
        prefix_ids: Special tokens the tokenizer puts before a text by default (BOS, or nothing).
    """

    def __init__(self, tokenizer: Any):
        """Copy the backend of ``tokenizer``.

        Raises:
            ModelError: The tokenizer has no ``tokenizers`` backend, so token edges cannot be mapped to characters.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ModelError(
                f"{type(tokenizer).__name__} is not a fast tokenizer. Add a tokenizer.json to the model directory."
            )
        spec = json.loads(backend.to_str())
        spec["truncation"] = spec["padding"] = None
        _keep_spaces(spec["post_processor"])
        self._template = Tokenizer.from_str(json.dumps(spec))
        template = str(getattr(tokenizer, "chat_template", None) or "")
        for token in spec["added_tokens"]:
            # Some models add their turn markers as ordinary tokens. A document must not spell turn markers either.
            token["special"] = token["special"] or (bool(token["content"].strip()) and token["content"] in template)
        self._document = Tokenizer.from_str(json.dumps(spec))
        self._document.encode_special_tokens = True
        unknown = getattr(tokenizer, "unk_token", None)
        special = (token for token in spec["added_tokens"] if token["special"] and token["content"] != unknown)
        self._special = {token["id"]: token["content"] for token in special}
        normal = spec.get("normalizer") is not None
        self._renamed = normal and any(t["normalized"] and t["id"] in self._special for t in spec["added_tokens"])
        self._tails: dict[tuple[str, int], str] = {}
        self.prefix_ids = self._default_prefix()

    def template(self, text: str) -> list[int]:
        """Encode text that a chat template has rendered. Special tokens are parsed, and none are added."""
        return list(_encode(self._template, text, False).ids)

    def template_between(self, text: str, begin: int, end: int) -> list[int]:
        """Encode all of a template's ``text``; return the tokens between the characters ``begin`` and ``end``."""
        encoding = _encode(self._template, text, False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [token for token, (first, behind) in found if begin <= first < behind <= end]

    def between(self, before: str, text: str, after: str, data: int = 0) -> list[int] | None:
        """Return the tokens of a template's ``text`` as encoded between ``before`` and ``after``.

        The result is None if a token crosses an end of ``text``, or if the first ``data`` characters, which come from a
        document, spell a special token.
        """
        encoding = _encode(self._template, before + text + after, False)
        ids, offsets = encoding.ids, encoding.offsets  # each access copies the list
        found = _within(offsets, len(before), len(before) + len(text))
        if found is None or any(ids[at] in self._special and offsets[at][0] < len(before) + data for at in found):
            return None
        return [ids[at] for at in found]

    def chunk(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a chunk, encoded behind a line break, and the character offset of each token.

        Tokens that cross the chunk's end, if a blank line follows, are left out: the chunk's last characters
        (:meth:`tail`) are encoded together with the following text of a prompt. If the tokenizer joins the chunk with
        the text before it, or the chunk spells a special token, the chunk is encoded alone.
        """
        encoding = _encode(self._document, _BEHIND + text + _BEFORE, False)
        begin, ids, offsets = len(_BEHIND), encoding.ids, encoding.offsets  # each access copies the list
        found = _within(offsets, begin, begin + len(text) - self._longest_tail(text))
        if not found or self._spelled(ids, text):
            return self.document(text), self.document_starts(text)
        return [ids[at] for at in found], [offsets[at][0] - begin for at in found]

    def tail(self, text: str, token_ids: Sequence[int]) -> str:
        """Return the end of a chunk's text that the chunk's tokens do not cover."""
        known = self._tails.get((text, len(token_ids)))
        if known is None:
            longest = self._longest_tail(text)
            # Tokens that another program made may cover the whole text.
            known = "" if not longest or self.document(text) == list(token_ids) else text[-longest:]
            if len(self._tails) >= _KEPT:
                self._tails.clear()
            self._tails[text, len(token_ids)] = known
        return known

    def document(self, text: str) -> list[int]:
        """Encode document text. Special tokens are neither parsed nor added."""
        encoding = _encode(self._document, text, False)
        return self._cut_apart(text) if self._spelled(encoding.ids, text) else list(encoding.ids)

    def markers(self, text: str) -> list[tuple[int, int]]:
        """Return the character ranges that :meth:`template` may parse as special tokens: ascending, disjoint."""
        if not self._renamed:
            # Adjacent ranges are not merged, because they are two tokens.
            merged: list[tuple[int, int]] = []
            for begin, end in self._contents_in(text):
                if merged and begin < merged[-1][1]:
                    merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
                else:
                    merged.append((begin, end))
            return merged
        # A normalizer may turn other spellings into a special token, so only the encoded tokens show the ranges.
        encoding = _encode(self._template, text, False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [(begin, end) for token, (begin, end) in found if token in self._special]

    def controls(self, token_ids: Iterable[int]) -> list[int]:
        """Return the special tokens among ``token_ids``."""
        return [token for token in token_ids if token in self._special]

    def document_starts(self, text: str) -> list[int]:
        """Return the character offset of each token of ``text`` (ascending), without parsing special tokens."""
        starts = [start for start, _ in _encode(self._document, text, False).offsets]
        highest = 0
        for index, start in enumerate(starts):
            highest = starts[index] = max(highest, start)
        return starts

    def _longest_tail(self, text: str) -> int:
        """Return how many characters at a chunk's end belong to tokens that reach into a following blank line."""
        end = text[-4 * EDGE :]
        offsets = _encode(self._document, _BEHIND + end + _BEFORE, False).offsets
        edge = len(_BEHIND) + len(end)
        begins = min((begin for begin, behind in offsets if begin < edge < behind), default=edge)
        return edge - begins if begins > len(_BEHIND) else 0

    def _contents_in(self, text: str) -> list[tuple[int, int]]:
        """Return the character ranges in which ``text`` spells special tokens: ascending, possibly overlapping."""
        ranges: list[tuple[int, int]] = []
        for content in set(self._special.values()):
            at = text.find(content)
            while at >= 0:
                ranges.append((at, at + len(content)))
                at = text.find(content, at + 1)
        return sorted(ranges)

    def _spelled(self, ids: Iterable[int], text: str) -> bool:
        return any(token in self._special and self._special[token] in text for token in ids)

    def _cut_apart(self, text: str) -> list[int]:
        # Unigram and WordLevel vocabularies have control tokens as ordinary entries: encode each marker in two halves.
        cuts = {0, len(text)} | {begin + max(1, (end - begin) // 2) for begin, end in self._contents_in(text)}
        pieces = (text[a:b] for a, b in pairwise(sorted(cuts)))
        return [token for piece in pieces for token in _encode(self._document, piece, False).ids]

    def _default_prefix(self) -> tuple[int, ...]:
        bare = list(_encode(self._template, "a", False).ids)
        full = list(_encode(self._template, "a", True).ids)
        for size in range(len(full) - len(bare) + 1):
            if full[size : size + len(bare)] == bare:
                return tuple(full[:size])
        return ()


def _within(offsets: Sequence[tuple[int, int]], begin: int, end: int) -> range | None:
    """Return the indices of the tokens between characters ``begin`` and ``end``; None if a token crosses either end."""
    starts = [start for start, _ in offsets]
    first, last = bisect_left(starts, begin), bisect_left(starts, end)
    if any(stop > edge for at, edge in ((first, begin), (last, end)) for _, stop in offsets[max(0, at - 4) : at]):
        return None
    return range(first, last)


def _keep_spaces(processor: dict[str, Any] | None) -> None:
    """Make the offsets of a tokenizer's tokens include the leading space of each token."""
    for each in [processor, *(processor or {}).get("processors", ())]:
        if each and "trim_offsets" in each:
            each["trim_offsets"] = False


def _encode(backend: Tokenizer, text: str, add_special_tokens: bool) -> Any:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError) as error:
        raise InputError(f"Text that is not valid Unicode cannot be tokenised ({error}).") from error


encoder_for = PerTokenizer(TextEncoder)
"""Returns the encoder of a tokenizer, made on first use and again after a change of its vocabulary or chat template."""
_integers: list[int] = []
_integers_lock = threading.Lock()


def pack_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return ``ids`` as a tuple that shares its integers with all such tuples: 8 bytes a token instead of 36."""
    ids = list(ids)
    top = max(ids, default=-1)
    with _integers_lock:
        if top >= len(_integers):
            _integers.extend(range(len(_integers), top + 1))
    return tuple(map(_integers.__getitem__, ids))


def begins_with_space(tokenizer: Any, token_ids: Sequence[int]) -> bool:
    """Return whether an answer of ``token_ids`` begins with a space if the answer is decoded alone.

    vLLM decodes an answer behind the prompt's last token, where some tokenizers turn their word boundary into a space.
    """
    return bool(tokenizer.decode(list(token_ids), skip_special_tokens=True).startswith(" "))


@dataclass(frozen=True)
class Chunk:
    """Holds a piece of a document, the unit of retrieval and of KV reuse.

    Attributes:
        id: Content hash of the text; equal texts have equal ids everywhere.
        text: The exact text, without outer whitespace.
        token_ids: Tokens of the text, as the model will see them; never re-tokenised. If the tokenizer joins the text's
            last characters with a following blank line, the tokens end before these characters.
        metadata: ``source``, ``start`` and ``end`` (character offsets in the source), and further values from the
            loader.
        metadata_bytes: Size of the metadata as JSON in bytes; 0 without metadata.

    Example::

        chunk = make_chunk("The Gull sailed in 1911.", engine.tokenizer, {"source": "logs.md"})
        print(chunk.id, len(chunk.token_ids), chunk.metadata["source"])
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    metadata_bytes: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the id and the metadata.

        Raises:
            InputError: The id has a NUL character or is not valid Unicode, or the metadata cannot be written as JSON.
        """
        checked_id(self.id)
        if self.metadata:
            try:
                object.__setattr__(self, "metadata_bytes", len(_JSON.encode(dict(self.metadata))))
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(
                    f"the metadata of the chunk {self.id!r} cannot be written as JSON ({error}). Use None for a number that is "
                    "missing (NaN) or infinite."
                ) from None


@dataclass(frozen=True)
class PlainText:
    """Holds text without special tokens, such as a part of a known document whose KV is not used in the prompt."""

    text: str


_JSON = json.JSONEncoder(allow_nan=False, default=str)


def checked_id(name: str) -> str:
    """Return the id ``name``; raise InputError if SQLite cannot read the id: a NUL character, or invalid Unicode."""
    if "\0" in name:
        raise InputError(f"the id {name!r} has a NUL character. Use another id.")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"the id {name!r} is not valid Unicode. Use another id.") from None
    return name


def chunk_id(text: str) -> str:
    """Return the id of a chunk with the text ``text``: 128 bits of the text's SHA-256 hash, as hex digits.

    Example::

        name = chunk_id("The Gull sailed in 1911.")
        known = name in engine.registry
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def make_chunk(text: str, tokenizer: Any, metadata: Mapping[str, Any] | None = None) -> Chunk:
    """Make one chunk of text that any splitter has already cut.

    The function strips outer whitespace, because prompts and chat templates strip outer whitespace, too. Strings such
    as ``<|im_end|>`` in the text are encoded as plain text and never become control tokens.

    Raises:
        InputError: The text is empty or has only whitespace, or is not valid Unicode.

    Example::

        chunks = [make_chunk(text, engine.tokenizer) for text in texts]
        report = engine.precompute(chunks)
    """
    text = text.strip()
    if not text:
        raise InputError("A chunk needs some text; this one is empty or whitespace only.")
    return Chunk(chunk_id(text), text, pack_ids(encoder_for(tokenizer).chunk(text)[0]), dict(metadata or {}))
