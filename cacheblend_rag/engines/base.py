"""What users and integrations hold: `BlendEngine`, and the values that go in and come out of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.results import Generation, PrecomputeReport, StreamEvent
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.streaming import iterate_in_thread
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import BlendPrompt
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.kv import KVKey, ModelFingerprint, kv_key


def check_length(prompt_tokens: int, max_tokens: int, context_window: int) -> None:
    """Refuse an empty prompt, and one that leaves no room for its answer.

    Raises:
        PromptTooLongError: Prompt and ``max_tokens`` exceed the context window, or there is no prompt.
    """
    if not prompt_tokens:
        raise PromptTooLongError("The prompt is empty; give at least one token.")
    if prompt_tokens + max_tokens > context_window:
        raise PromptTooLongError(
            f"The prompt has {prompt_tokens} tokens; with max_tokens={max_tokens} that exceeds the model's context window of "
            f"{context_window}. Retrieve fewer or smaller chunks, or lower max_tokens."
        )


class BlendEngine(ABC):
    """A model that answers prompts made of text and chunks, reusing the chunks' stored KV.

    Safe to call from several threads; how much runs side by side is the engine's business.

    Attributes:
        fingerprint: Identity of the model, part of every store key.
        tokenizer: The model's Hugging Face tokenizer.
        context_window: Most tokens of prompt and completion together.
        registry: Chunks the engine knows: references are resolved and plain text is matched against it.
        header_ids: Tokens that chunks are precomputed behind.
        store: Where their KV is kept, if this process can see it.
        supports_json_schema: Whether it has guided decoding (:attr:`SamplingParams.json_schema`).
    """

    supports_json_schema: ClassVar[bool] = False

    fingerprint: ModelFingerprint
    tokenizer: Any
    context_window: int
    registry: ChunkRegistry
    header_ids: tuple[int, ...]
    store: KVStore | None = None

    @abstractmethod
    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """Compute, store and register the KV of ``chunks`` (those already stored are skipped).

        Args:
            chunks: Chunks cut with this engine's tokenizer.
            progress: Called with the number of chunks finished since its last call.

        Raises:
            StoreError: The store cannot be written. What was stored before stays.
        """

    @abstractmethod
    def stream(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        """Answer piece by piece. Closing the iterator ends the work.

        A plain string is searched for registered chunks; without any it is an ordinary prefill.

        Raises:
            PromptTooLongError: Prompt and ``max_tokens`` exceed the context window.
            UnknownChunkError: A reference to a chunk that was never registered.
        """

    def generate(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Answer in one piece; raises as :meth:`stream` does."""
        last = None
        for event in self.stream(prompt, sampling, settings):
            last = event.generation
        assert last is not None
        return last

    async def aprecompute(
        self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """Async twin of :meth:`precompute`, off the event loop."""
        return await asyncio.to_thread(self.precompute, chunks, progress)

    async def agenerate(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Async twin of :meth:`generate`, off the event loop; the pool of threads bounds how many hold KV at once."""
        return await asyncio.to_thread(self.generate, prompt, sampling, settings)

    async def astream(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Async twin of :meth:`stream`; a cancelled consumer stops the work at its next token."""
        async for event in iterate_in_thread(lambda: self.stream(prompt, sampling, settings)):
            yield event

    def forget(self, chunk_ids: Iterable[str]) -> int:
        """Drop chunks from the registry and their KV from the store; unknown ids are ignored.

        Returns:
            How many stored entries were removed.
        """
        chunks = self._registered(chunk_ids)
        self.registry.remove([chunk.id for chunk in chunks])
        if self.store is None:
            return 0
        return sum(self.store.delete(key) for chunk in chunks for key in self._store_keys(chunk))

    def prefetch(self, chunk_ids: Iterable[str]) -> None:
        """Move the stored KV of chunks into the fastest tier (blocking); what is not stored or not known is left out."""
        if self.store is None:
            return
        for chunk in self._registered(chunk_ids):
            for key in self._store_keys(chunk):
                kv = self.store.get(key)
                if kv is not None:
                    kv.finish()

    def _registered(self, chunk_ids: Iterable[str]) -> list[Chunk]:
        return [chunk for chunk_id in chunk_ids if (chunk := self.registry.get(chunk_id)) is not None]

    def _store_keys(self, chunk: Chunk) -> Sequence[KVKey]:
        return [kv_key(self.fingerprint, self.header_ids, chunk.token_ids)]

    def flush(self) -> None:  # noqa: B027 - most engines write before they return
        """Wait until the chunks that answers found missing have been written back."""

    @abstractmethod
    def close(self) -> None:
        """Release the model and the store. The engine must not be used afterwards."""

    def __enter__(self) -> Self:
        """Use as a context manager that closes."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()
