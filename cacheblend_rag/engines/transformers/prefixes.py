"""Caches the KV of earlier prompts and answers for prompts with the same beginning, in a radix tree per namespace."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Final

from cacheblend_rag.blending.plan import Origin
from cacheblend_rag.engines.transformers.cache import PositionedCache
from cacheblend_rag.store.kv import LayerKV

_LEAST: Final = 16
"""Minimum number of reused tokens: fewer cost as much to copy as to compute, and all chats begin with the same few."""

_Label = int | tuple[int, str]


@dataclass(frozen=True)
class PromptKey:
    """Identifies a prompt, or a prompt and its answer, in the prefix cache.

    Attributes:
        token_ids: Token ids of the prompt, or of prompt and answer.
        origins: Positions from which on the KV is approximate, each with its blend; empty for the KV of a full prefill.
        namespace: Name of the prompt's namespace; no other namespace reuses the KV.
    """

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    namespace: str

    @property
    def labels(self) -> tuple[_Label, ...]:
        """Return the labels that the tree compares: token ids, and at each origin the token id with the blend's key."""
        labels: list[_Label] = list(self.token_ids)
        for origin in self.origins:
            labels[origin.start] = (self.token_ids[origin.start], origin.key)
        return tuple(labels)


@dataclass(frozen=True)
class CachedPrefix:
    """Says how many tokens of a prompt got their KV from the prefix cache.

    Attributes:
        tokens: Number of first tokens with cached KV.
        exact: Whether the KV equals a full prefill's KV; False if the KV comes from another prompt's blend.
    """

    tokens: int = 0
    exact: bool = True


@dataclass
class _Branch:
    """Holds the KV of the tokens ``labels``, which follow the tokens of the parent nodes.

    Each of ``layers`` is ``[kv_heads, tokens, head_dim]``.
    """

    labels: tuple[_Label, ...] = ()
    layers: list[LayerKV] = field(default_factory=list)
    used: int = 0
    children: dict[_Label, _Branch] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

    def split(self, tokens: int) -> None:
        """Shorten the node to its first ``tokens``; the other tokens, with all children, become its only child."""
        rest = _Branch(self.labels[tokens:], _cut(self.layers, tokens, None), self.used, self.children)
        self.labels, self.layers = self.labels[:tokens], _cut(self.layers, 0, tokens)
        self.children = {rest.labels[0]: rest}


def _cut(layers: Sequence[LayerKV], start: int, end: int | None) -> list[LayerKV]:
    return [LayerKV(kv.k[:, start:end].clone(), kv.v[:, start:end].clone()) for kv in layers]


class PrefixCache:
    """Caches KV on the model's device within a budget, and evicts least recently used KV first; thread-safe.

    A prompt reuses KV from a full prefill, or KV that was blended by the same settings from the same chunks at the same
    positions (:func:`~cacheblend_rag.blending.plan.origins`), whichever covers more tokens.
    """

    def __init__(self, budget: int):
        """Cache at most ``budget`` bytes of KV; 0 switches the cache off."""
        self.budget, self.nbytes = budget, 0
        self._roots: dict[str, _Branch] = {}
        self._clock = 0
        self._lock = threading.Lock()

    def begin(self, prompt: PromptKey, cache: PositionedCache) -> CachedPrefix:
        """Fill an empty ``cache`` with cached KV of the prompt's beginning, without the last token (for its logits)."""
        most = len(prompt.token_ids) - 1
        with self._lock:
            paths = [self._path(prompt.namespace, labels) for labels in (prompt.token_ids, prompt.labels)]
            exact, blended = (min(most, sum(tokens for _, tokens in path)) for path in paths)
            kept = CachedPrefix(exact) if exact >= blended else CachedPrefix(blended, exact=False)
            if kept.tokens < _LEAST:
                return CachedPrefix()
            path = self._touched(paths[not kept.exact])
            found = [(node.layers, tokens) for node, tokens in path]
        left = kept.tokens
        for layers, tokens in found:
            cache.extend(layers, min(tokens, left))
            left -= min(tokens, left)
        return kept

    def keep(self, key: PromptKey, cache: PositionedCache) -> None:
        """Copy the KV of ``key`` that is not cached yet; ``cache`` holds the KV from its first slot on."""
        if not self.budget:
            return
        labels = key.labels
        with self._lock:
            path = self._touched(self._path(key.namespace, labels))
            known = sum(tokens for _, tokens in path)
            if known == len(labels):
                return
            node = _Branch(labels[known:], cache.copied(known, len(labels)), self._clock)
            if node.nbytes > self.budget:
                return
            parent = path[-1][0] if path else self._roots.setdefault(key.namespace, _Branch())
            if path and path[-1][1] < len(parent.labels):
                parent.split(path[-1][1])
            parent.children[node.labels[0]] = node
            self.nbytes += node.nbytes
            while self.nbytes > self.budget:
                self._drop_oldest()

    def clear(self, namespace: str | None = None) -> None:
        """Remove the cached KV of a namespace, or of all namespaces."""
        with self._lock:
            for name in [name for name in self._roots if namespace in (None, name)]:
                del self._roots[name]
            self.nbytes = sum(node.nbytes for root in self._roots.values() for node in _below(root))

    def _path(self, namespace: str, labels: Sequence[_Label]) -> list[tuple[_Branch, int]]:
        """Return the nodes along the path of ``labels``, each with its number of shared tokens."""
        path: list[tuple[_Branch, int]] = []
        node, at = self._roots.get(namespace), 0
        while node is not None and at < len(labels) and (node := node.children.get(labels[at])) is not None:
            ahead = labels[at : at + len(node.labels)]
            shared = next(compress(count(), map(ne, node.labels, ahead)), len(ahead))
            path.append((node, shared))
            at += shared
            if shared < len(node.labels):
                break
        return path

    def _touched(self, path: list[tuple[_Branch, int]]) -> list[tuple[_Branch, int]]:
        self._clock += 1
        for node, _ in path:
            node.used = self._clock
        return path

    def _drop_oldest(self) -> None:
        """Remove the least recently used node without children; its parents were used at the same time or later."""
        leaves = (
            (node, label, child)
            for root in self._roots.values()
            for node in (root, *_below(root))
            for label, child in node.children.items()
            if not child.children
        )
        parent, label, leaf = min(leaves, key=lambda each: each[2].used)
        del parent.children[label]
        self.nbytes -= leaf.nbytes


def _below(node: _Branch) -> Iterator[_Branch]:
    """Yield all nodes below ``node``, without recursion, since an edited conversation may be a deep path."""
    waiting = list(node.children.values())
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(found.children.values())
