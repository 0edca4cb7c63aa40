"""Look-ups of a prompt's chunks, side by side where each is a round trip to another machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from cacheblend_rag.prompts.prompt import TokenizedPrompt

_T = TypeVar("_T")
_AT_ONCE = 8

Lookup = Callable[[Sequence[int]], _T]
"""Token ids of a chunk, ``()`` for the header, to what is known of its entry."""


class SideBySide(Generic[_T]):
    """A look-up, with its answers on their way already where the store is remote.

    So a prompt of many chunks waits for a few round trips, and for a tier that hangs no longer than one deadline. What a look-up
    raises is raised where it is asked for.
    """

    def __init__(self, look: Lookup[_T], wanted: Iterable[Sequence[int]], remote: bool):
        """Begin to ``look`` for ``wanted`` if the store is ``remote``."""
        self._look = look
        self._asked: dict[tuple[int, ...], Future[_T]] = {}
        if remote:
            pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="cacheblend-lookup")
            self._asked = {key: pool.submit(look, key) for key in dict.fromkeys(map(tuple, wanted))}
            pool.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Whether every answer is there."""
        return all(answer.done() for answer in self._asked.values())

    def __call__(self, token_ids: Sequence[int]) -> _T:
        """Return what is known of an entry, waiting for it if need be."""
        answer = self._asked.get(tuple(token_ids))
        return self._look(token_ids) if answer is None else answer.result()


def entries_of(prompt: TokenizedPrompt) -> list[tuple[int, ...]]:
    """Return the token ids of all entries that a plan for ``prompt`` may look up: the header's, and each chunk's."""
    return [(), *(span.chunk.token_ids for span in prompt.spans)]
