"""Orders chunks so that an ordinary prefix cache hits: a lossless alternative to blending (ContextPilot, MLSys '26).

A prefix cache reuses KV only up to the first chunk that stood elsewhere before. Requests that share chunks can share
prefixes if the longest earlier sequence whose chunks are all wanted goes first. The KV is then exact; the order of the
chunks, which may inform the model, is lost. (ContextPilot also writes hints about the order into the prompt and
schedules requests; this module does neither.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk

DEFAULT_BUDGET = 1 << 17
"""Default tokens in the prefix cache: 16 GiB of KV at 128 KiB a token, as for an 8B model with grouped-query attention."""


@dataclass
class _Node:
    """Holds a chunk behind the chunks above it in the tree: one cached prefix."""

    tokens: int = 0
    used: int = 0
    below: dict[str, _Node] = field(default_factory=dict)


class ReorderedPrompts:
    """Orders each request's chunks by earlier requests, and simulates which prefix of them is cached.

    The simulated cache is a tree of the served chunk sequences, of at most ``budget`` tokens. When the tree exceeds the
    budget, the least recently used sequence loses its last chunk first, as in RadixAttention.

    Attributes:
        cached_tokens: Number of tokens in the cache.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET):
        """Create an empty cache of ``budget`` tokens; 0 caches nothing.

        Raises:
            InputError: The budget is negative.
        """
        if budget < 0:
            raise InputError(f"budget is {budget}; give a number of tokens from 0 on.")
        self.budget = budget
        self._root = _Node()
        self.cached_tokens = 0
        self._clock = 0

    def order(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return ``chunks``, each once: the cached sequence with most tokens first, the other chunks in their order behind it."""
        wanted: dict[str, Chunk] = {}
        for chunk in chunks:
            wanted.setdefault(chunk.id, chunk)
        first = self._longest(self._root, tuple(wanted))[1]
        return [wanted[name] for name in (*first, *(name for name in wanted if name not in first))]

    def count_cached(self, chunks: Sequence[Chunk]) -> int:
        """Return the number of ``chunks``, in their order, that form a cached prefix."""
        node, count = self._root, 0
        while count < len(chunks) and (below := node.below.get(chunks[count].id)) is not None:
            node, count = below, count + 1
        return count

    def serve(self, chunks: Sequence[Chunk]) -> None:
        """Record that a prompt of ``chunks``, in this order, was computed: all its prefixes are cached, within the budget."""
        self._clock += 1
        node = self._root
        for chunk in chunks:
            if chunk.id not in node.below:
                node.below[chunk.id] = _Node(len(chunk.token_ids))
                self.cached_tokens += len(chunk.token_ids)
            node = node.below[chunk.id]
            node.used = self._clock
        while self.cached_tokens > self.budget:
            self._evict()

    def _longest(self, node: _Node, wanted: Sequence[str]) -> tuple[int, list[str]]:
        best: tuple[int, list[str]] = (0, [])
        for name in wanted:  # among equal sequences the first in retrieval order is chosen
            if (below := node.below.get(name)) is not None:
                tokens, rest = self._longest(below, [other for other in wanted if other != name])
                if tokens + below.tokens > best[0]:
                    best = (tokens + below.tokens, [name, *rest])
        return best

    def _evict(self) -> None:
        """Drop the least recently used leaf; among the chunks of one request, the last chunk."""
        ends = [(node.used, -depth, above, name) for above, name, node, depth in self._nodes() if not node.below]
        _, _, above, name = min(ends, key=lambda end: end[:2])
        self.cached_tokens -= above.below.pop(name).tokens

    def _nodes(self) -> Iterable[tuple[_Node, str, _Node, int]]:
        waiting = [(self._root, 0)]
        while waiting:
            above, depth = waiting.pop()
            for name, node in above.below.items():
                yield above, name, node, depth + 1
                waiting.append((node, depth + 1))
