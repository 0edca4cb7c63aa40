"""Keeps KV of conversations so far, for the prompts that go on with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cacheblend_rag.blending.plan import Origin, common_tokens
from cacheblend_rag.engines.transformers.cache import PositionedCache

# Each is compared with every prompt.
_MOST: Final = 64
# Around a template's tokens at the end of a prompt, text may be cut into others once it goes on.
_MERGED: Final = 2


@dataclass(frozen=True)
class Said:
    """Tokens, how their KV came about, and where it belongs.

    Attributes:
        token_ids: A prompt, or a prompt and its answer.
        origins: From where on that KV is approximate, and by what.
        namespace: Name of the one that it was asked in.
        asked: How many of the tokens are the prompt's.
    """

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    namespace: str
    asked: int

    def common(self, other: Said) -> int:
        """Return how many tokens of KV, from the first on, serve both."""
        if self.namespace != other.namespace:
            return 0
        return common_tokens(self.token_ids, self.origins, other.token_ids, other.origins)


class Conversations:
    """Prompts that were answered last, with their answers and the KV of both. Safe to call from several threads."""

    def __init__(self, budget: int):
        """Keep no more than ``budget`` bytes of KV; the conversation that rested longest goes first."""
        self.budget = budget
        self._kept: list[tuple[Said, PositionedCache]] = []  # the last used is the last
        self._lock = threading.Lock()

    def begin(self, prompt: Said, turn_ends: Sequence[int], lead_tokens: int, cache: PositionedCache) -> int:
        """Fill an empty ``cache`` with what a conversation has left of ``prompt``; return for how many tokens.

        That is none unless the prompt goes on from an earlier one: a turn of it, or that prompt as a whole but for what the
        template writes behind it. What only begins like another is no conversation. The last token's logits are wanted, so that
        it is never among them.
        """
        # The last end of a turn is where the answer begins that is asked for.
        first_turn = turn_ends[0] if len(turn_ends) > 1 else len(prompt.token_ids)

        def serves(said: Said) -> int:
            common = min(said.common(prompt), len(prompt.token_ids) - 1)
            goes_on = said.asked - lead_tokens - _MERGED <= common and said.asked < len(prompt.token_ids)
            goes_on = goes_on and 2 * common > said.asked  # of the shortest prompts that would be next to nothing
            return common if goes_on or common >= first_turn else 0

        with self._lock:
            lengths = [serves(said) for said, _ in self._kept]
            most = max(lengths, default=0)
            if not most:
                return 0
            found = self._kept.pop(lengths.index(most))
            self._kept.append(found)
        cache.begin_as(found[1], most)
        return most

    def keep(self, said: Said, cache: PositionedCache) -> None:
        """Keep the KV of what was said; ``cache`` must not be written to any more."""
        nbytes = cache.nbytes
        if nbytes > self.budget:
            return
        with self._lock:
            # What it goes on with is in it.
            self._kept = [each for each in self._kept if each[0].common(said) < len(each[0].token_ids)]
            self._kept.append((said, cache))
            while len(self._kept) > _MOST or sum(kept.nbytes for _, kept in self._kept) > self.budget:
                del self._kept[0]

    def clear(self, namespace: str | None = None) -> None:
        """Forget the conversations of a namespace, or all."""
        with self._lock:
            self._kept = [each for each in self._kept if namespace is not None and each[0].namespace != namespace]
