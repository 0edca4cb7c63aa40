"""Defines a chunk, the unit of retrieval and of KV reuse, named by its content; turns text into token ids.

That is done apart from the state that a Hugging Face tokenizer shares between its callers.
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
"""So many characters of what stands beside a text decide how the tokenizer cuts its ends."""

_KEPT = 1 << 14
# What stands beside a chunk in most prompts.
_BEHIND, _BEFORE = "\n", "\n\na"


class PerTokenizer(Generic[_T]):
    """Keeps what was made of a tokenizer for as long as it lives, or until its vocabulary or template changes. Thread-safe."""

    def __init__(self, make: Callable[[Any], _T]):
        """Make it by ``make``, which is given the tokenizer."""
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

    A tokenizer call with ``split_special_tokens=`` flips a switch inside the object that all its users share, so two
    threads can hand each other control tokens. This class keeps two private copies of the backend instead: one that
    parses special tokens (text rendered by a chat template) and one that never does (documents).

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
            # Some models add their turn markers as ordinary tokens; a document must not be able to spell those either.
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
        """Encode text whose special tokens mean what they say (rendered by a chat template). Adds none."""
        return list(_encode(self._template, text, False).ids)

    def template_between(self, text: str, begin: int, end: int) -> list[int]:
        """Return those tokens of a template's ``text`` that lie between two characters, as they are in all of it."""
        encoding = _encode(self._template, text, False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [token for token, (first, behind) in found if begin <= first < behind <= end]

    def between(self, before: str, text: str, after: str, data: int = 0) -> list[int] | None:
        """Return the tokens of a template's ``text`` as they are between two other texts.

        Returns None where a token reaches over an end of it, or is a special one that its first ``data`` characters, which are a
        document's, spell.
        """
        encoding = _encode(self._template, before + text + after, False)
        ids, offsets = encoding.ids, encoding.offsets  # each reading of them copies all
        found = _within(offsets, len(before), len(before) + len(text))
        if found is None or any(ids[at] in self._special and offsets[at][0] < len(before) + data for at in found):
            return None
        return [ids[at] for at in found]

    def chunk(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a chunk, and the characters that they start at, as they are behind a line's end.

        Tokens that reach over the chunk's end, where a blank line follows, are left out: what they begin with (:meth:`tail`) is
        tokenised with what follows it in a prompt. A chunk whose edges the tokenizer cuts otherwise is tokenised on its own.
        """
        encoding = _encode(self._document, _BEHIND + text + _BEFORE, False)
        begin, ids, offsets = len(_BEHIND), encoding.ids, encoding.offsets  # each reading of them copies all
        found = _within(offsets, begin, begin + len(text) - self._longest_tail(text))
        if not found or self._spelled(ids, text):
            return self.document(text), self.document_starts(text)
        return [ids[at] for at in found], [offsets[at][0] - begin for at in found]

    def tail(self, text: str, token_ids: Sequence[int]) -> str:
        """Return the end of a chunk's text that its tokens leave out."""
        known = self._tails.get((text, len(token_ids)))
        if known is None:
            longest = self._longest_tail(text)
            # Chunks may come with tokens of others' making, which are all of it.
            known = "" if not longest or self.document(text) == list(token_ids) else text[-longest:]
            if len(self._tails) >= _KEPT:
                self._tails.clear()
            self._tails[text, len(token_ids)] = known
        return known

    def document(self, text: str) -> list[int]:
        """Encode text in which nothing is a special token. Adds none."""
        encoding = _encode(self._document, text, False)
        return self._cut_apart(text) if self._spelled(encoding.ids, text) else list(encoding.ids)

    def markers(self, text: str) -> list[tuple[int, int]]:
        """Return the character ranges of ``text`` that :meth:`template` may read as special tokens: ascending, apart."""
        if not self._renamed:
            # Those that touch stay apart: they are two tokens.
            merged: list[tuple[int, int]] = []
            for begin, end in self._contents_in(text):
                if merged and begin < merged[-1][1]:
                    merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
                else:
                    merged.append((begin, end))
            return merged
        # A normalizer may make a token of what is spelled in another way: then only the tokens themselves tell.
        encoding = _encode(self._template, text, False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [(begin, end) for token, (begin, end) in found if token in self._special]

    def controls(self, token_ids: Iterable[int]) -> list[int]:
        """Return those of the tokens that are special ones."""
        return [token for token in token_ids if token in self._special]

    def document_starts(self, text: str) -> list[int]:
        """Return the character offset at which each token of ``text`` starts (ascending), special tokens not parsed."""
        starts = [start for start, _ in _encode(self._document, text, False).offsets]
        highest = 0
        for index, start in enumerate(starts):
            highest = starts[index] = max(highest, start)
        return starts

    def _longest_tail(self, text: str) -> int:
        """Return how many characters at the end of a chunk are of tokens that reach over it, where a blank line follows."""
        end = text[-4 * EDGE :]
        offsets = _encode(self._document, _BEHIND + end + _BEFORE, False).offsets
        edge = len(_BEHIND) + len(end)
        begins = min((begin for begin, behind in offsets if begin < edge < behind), default=edge)
        return edge - begins if begins > len(_BEHIND) else 0

    def _contents_in(self, text: str) -> list[tuple[int, int]]:
        """Return where special tokens are spelled: ascending; they may overlap."""
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
        # Unigram and WordLevel vocabularies hold control tokens as ordinary entries: encode the halves of each apart.
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
    """Return which tokens lie between two characters; None where one reaches over either."""
    starts = [start for start, _ in offsets]
    first, last = bisect_left(starts, begin), bisect_left(starts, end)
    if any(stop > edge for at, edge in ((first, begin), (last, end)) for _, stop in offsets[max(0, at - 4) : at]):
        return None
    return range(first, last)


def _keep_spaces(processor: dict[str, Any] | None) -> None:
    """Let a tokenizer say where its tokens start with the space that belongs to them."""
    for each in [processor, *(processor or {}).get("processors", ())]:
        if each and "trim_offsets" in each:
            each["trim_offsets"] = False


def _encode(backend: Tokenizer, text: str, add_special_tokens: bool) -> Any:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError) as error:
        raise InputError(f"Text that is not valid Unicode cannot be tokenised ({error}).") from error


encoder_for = PerTokenizer(TextEncoder)
"""Returns the encoder of a tokenizer, made on first use and again when its vocabulary or chat template changed."""
_integers: list[int] = []
_integers_lock = threading.Lock()


def pack_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return ``ids`` as a tuple that shares its integers with every other: 8 bytes a token instead of 36."""
    ids = list(ids)
    top = max(ids, default=-1)
    with _integers_lock:
        if top >= len(_integers):
            _integers.extend(range(len(_integers), top + 1))
    return tuple(map(_integers.__getitem__, ids))


def begins_with_space(tokenizer: Any, token_ids: Sequence[int]) -> bool:
    """Say whether an answer of these tokens begins with a space by itself, as every engine decodes it.

    vLLM decodes it behind the prompt's last token, where some tokenizers turn their word boundary into a space.
    """
    return bool(tokenizer.decode(list(token_ids), skip_special_tokens=True).startswith(" "))


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, the unit of retrieval and of KV reuse.

    Attributes:
        id: Content hash of the text; the same text has the same id everywhere.
        text: The exact text, without outer whitespace.
        token_ids: Its tokens, as the model will see them; never re-tokenised. Of a tokenizer that joins a text's last characters
            with the blank line behind them, without that last token.
        metadata: ``source``, ``start`` and ``end`` (character offsets in the source), and what else the loader knows.
        metadata_bytes: Their size as JSON; 0 without any.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    metadata_bytes: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be stored and found again, or be answered.

        Raises:
            InputError: The id has a NUL, or the metadata hold what is no JSON.
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
    """Text in which nothing is a special token, such as a part of a known document whose KV is not used here."""

    text: str


_JSON = json.JSONEncoder(allow_nan=False, default=str)


def checked_id(name: str) -> str:
    """Return a chunk's id; raises InputError for one that SQLite's functions cannot read, or not beyond its NUL."""
    if "\0" in name:
        raise InputError(f"the id {name!r} has a NUL character. Use another id.")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"the id {name!r} is not valid Unicode. Use another id.") from None
    return name


def chunk_id(text: str) -> str:
    """Return the id of a chunk with that text: 128 bits of its SHA-256, in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def make_chunk(text: str, tokenizer: Any, metadata: Mapping[str, Any] | None = None) -> Chunk:
    """Make one chunk of text that is already cut, by whatever splitter.

    Outer whitespace is stripped, because prompts and chat templates strip it too. Strings such as ``<|im_end|>`` in the
    text are encoded as plain text and never become control tokens.

    Raises:
        InputError: The text holds nothing but whitespace, or is not valid Unicode.
    """
    text = text.strip()
    if not text:
        raise InputError("A chunk needs some text; this one is empty or whitespace only.")
    return Chunk(chunk_id(text), text, pack_ids(encoder_for(tokenizer).chunk(text)[0]), dict(metadata or {}))
