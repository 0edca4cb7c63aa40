"""Look-ups of a prompt's chunks, side by side where each is a round trip to another machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cacheblend_rag.prompts.prompt import TokenizedPrompt

_T = TypeVar("_T")
_AT_ONCE = 8

Lookup = Callable[[Sequence[int]], _T]
"""Token ids of a chunk, ``()`` for the header, to what is known of its entry."""


def side_by_side(look: Lookup[_T], wanted: Iterable[Sequence[int]], remote: bool) -> Lookup[_T]:
    """Return ``look``, with its answers for ``wanted`` on their way already if the store is ``remote``.

    So a prompt of many chunks waits for a few round trips, and for a tier that hangs no longer than one deadline. What a look-up
    raises is raised where it is asked for.
    """
    if not remote:
        return look
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="cacheblend-lookup")
    asked = {key: pool.submit(look, key) for key in dict.fromkeys(map(tuple, wanted))}
    pool.shutdown(wait=False)

    def found(token_ids: Sequence[int]) -> _T:
        answer = asked.get(tuple(token_ids))
        return look(token_ids) if answer is None else answer.result()

    return found


def entries_of(prompt: TokenizedPrompt) -> list[tuple[int, ...]]:
    """Return the token ids of all entries that a plan for ``prompt`` may look up: the header's, and each chunk's."""
    return [(), *(span.chunk.token_ids for span in prompt.spans)]
