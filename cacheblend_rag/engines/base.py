"""Defines `BlendEngine`, which users and integrations hold, and `Request`, one call of it with nothing left open."""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings, ResolvedSettings
from cacheblend_rag.engines.entries import Entries, Ranking
from cacheblend_rag.engines.results import Generation, PrecomputeReport, StreamEvent, iterate_in_thread
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError, PromptTooLongError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, TokenizedPrompt, text_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.base import Closing
from cacheblend_rag.store.files import DEFAULT, DEFAULT_NAME, Namespace
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

if TYPE_CHECKING:
    import torch

Prompt = BlendPrompt | TokenizedPrompt | str
_making_views = threading.Lock()


@dataclass(frozen=True)
class Request:
    """Holds what an engine is asked to do, nothing left open; :meth:`BlendEngine.request` makes one."""

    prompt: TokenizedPrompt
    sampling: SamplingParams
    settings: ResolvedSettings


class BlendEngine(Closing):
    """A model that answers prompts made of text and chunks, reusing the chunks' stored KV.

    Safe to call from several threads; how much runs side by side is the engine's business.

    Attributes:
        fingerprint: Identity of the model, part of every store key.
        tokenizer: The model's Hugging Face tokenizer.
        context_window: Most tokens of prompt and completion together.
        num_layers: Number of transformer layers.
        registry: Chunks the engine knows: references are resolved and plain text is matched against it.
        header_ids: Tokens that chunks are precomputed behind.
        gate: What the parity gate found; a model that fails it is not blended: it is served by ordinary prefill, or by prefix
            caching where it has recurrent layers.
        profile: The blend options that a request leaves open.
        ranking: When chunks' static deviations are measured (:mod:`cacheblend_rag.blending.static`).
        store: Where the chunks' KV is kept, if this process can see it.
        device: What the model runs on; None if that is another machine's business.
        dtype: What it computes in, likewise.
        costs: What loading and computing cost, for the loading controller; None where nothing was measured.
        writer: Names what writes the chunks' KV in the model's place (:mod:`cacheblend_rag.engines.writer`); None for the model.
        namespace: Where its chunks and stored KV are (:meth:`within`).
        prefix_cache_tokens: How many tokens the engine's own prefix cache holds at the most; 0 where it has none.
        supports_json_schema: Whether it has guided decoding (:attr:`SamplingParams.json_schema`).
        without_json_schema: What to do where it has not.
    """

    supports_json_schema: ClassVar[bool] = False
    without_json_schema: ClassVar[str] = "leave json_schema out or use VLLMEngine"

    fingerprint: ModelFingerprint
    tokenizer: Any
    context_window: int
    num_layers: int
    registry: ChunkRegistry
    header_ids: tuple[int, ...]
    gate: GateReport
    profile: ModelProfile
    ranking: Ranking = "off"
    store: KVStore | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    costs: Costs | None = None
    writer: WrittenBy | None = None
    prefix_cache_tokens: int = 0
    namespace: Namespace = DEFAULT
    _closed: bool = False
    _root: Self | None = None  # of a view: the engine that it is a view of
    _views: Mapping[str, Self] = MappingProxyType({})
    _reopen: Callable[[], BlendEngine] | None = None  # how another process opens it, where it was opened by name

    @property
    def entries(self) -> Entries | None:
        """This model's entries in the store, behind the engine's header."""
        return (
            None
            if self.store is None
            else Entries(self.store, self.fingerprint, self.header_ids, namespace=self.namespace, writer=self.writer)
        )

    def within(self, name: str) -> Self:
        """Return a view of this engine within a namespace: chunks, stored KV and prefix cache of its own, one model and store.

        It is the same object each time. What the engine itself knows is in the one named ``default``. To close a view does
        nothing; none may be used after its engine was closed.

        Raises:
            InputError: A name that is not 1 to 63 of a-z, 0-9, '.', '_' and '-', an engine that has no
                views, or an encrypted store without the namespace's key.
        """
        namespace, root = Namespace(name), self._root or self
        if name == DEFAULT_NAME:
            return root
        with _making_views:
            if name not in root._views:
                view = copy.copy(root)
                view.namespace, view._root, view._views = namespace, root, {}
                view.registry = ChunkRegistry()
                view._become()
                if view.store is not None:
                    view.store.key_name(name)
                root._views = {**root._views, name: view}
            return root._views[name]

    def _become(self) -> None:
        """Finish a view, which is a copy of its engine so far; raises InputError where an engine can have none."""
        raise InputError(f"{type(self).__name__} has no views within namespaces; use TransformersEngine or VLLMEngine.")

    @property
    def controlled(self) -> bool:
        """Return whether there is a loading controller to choose a ratio of ``"auto"``."""
        return self.costs is not None and self.costs.calibrated

    @abstractmethod
    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """Compute, store and register the KV of ``chunks`` (those already stored are skipped).

        Args:
            chunks: Chunks cut with this engine's tokenizer.
            progress: Called with the number of chunks finished since its last call.

        Raises:
            StoreError: The store cannot be written. What was stored before stays.
        """

    def precompute_first(self, chunks: Sequence[Chunk]) -> PrecomputeReport:
        """Compute and store the KV of ``chunks`` as the model itself writes it, beside that of a KV writer, if it has one.

        It is what a prompt's first chunk takes, and is stored after the first prompt that lacked it; raises as
        :meth:`precompute` does.
        """
        return PrecomputeReport()

    @abstractmethod
    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        """Answer piece by piece. Closing the iterator ends the work.

        A plain string is searched for registered chunks; without any it is an ordinary prefill. A prompt that
        :meth:`tokenize` has returned is taken as it is.

        Raises:
            PromptTooLongError: Prompt and ``max_tokens`` exceed the context window.
            UnknownChunkError: A reference to a chunk that was never registered.
            InputError: An option that this engine or model cannot serve.
        """

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Answer in one piece; raises as :meth:`stream` does."""
        last = None
        for event in self.stream(prompt, sampling, settings):
            last = event.generation
        assert last is not None
        return last

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Return the prompt as token ids, and where its chunks are; a plain string is searched for registered chunks.

        Raises:
            UnknownChunkError: A reference to a chunk that was never registered.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        if not isinstance(prompt, str):
            return tokenize(prompt, self.tokenizer, self.registry)
        tokens = tokenize(text_prompt(self.tokenizer, prompt, self.registry), self.tokenizer, self.registry)
        return tokens if tokens.spans else replace(tokens, text=prompt)

    def request(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Request:
        """Tokenise a prompt, fill in what is left open, and refuse what cannot be served; raises as :meth:`stream` does."""
        self.check_open()
        sampling = sampling or SamplingParams()
        if sampling.json_schema is not None and not self.supports_json_schema:
            raise InputError(f"{type(self).__name__} has no guided decoding here; {self.without_json_schema}.")
        resolved = self.profile.resolve(settings or BlendSettings(), self.num_layers, self.controlled)
        tokens = self.tokenize(prompt)
        check_length(len(tokens.token_ids), sampling.max_tokens, self.context_window)
        return Request(tokens, sampling, resolved)

    async def agenerate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Async twin of :meth:`generate`."""
        last = None
        async for event in self.astream(prompt, sampling, settings):
            last = event.generation
        assert last is not None
        return last

    async def astream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Async twin of :meth:`stream`; when the consumer is cancelled, the work ends at its next token at the latest."""
        async for event in iterate_in_thread(lambda _: self.stream(prompt, sampling, settings)):
            yield event

    def forget(self, chunks: Iterable[str | Chunk]) -> int:
        """Drop chunks from the registry and delete their KV from the store; unknown ids are ignored.

        KV that a chunk of another id with the same text needs stays.

        Args:
            chunks: Ids, or chunks where the registry may not know them any more. Those of an attached index stay known: their
                KV is computed again when a prompt needs it.

        Returns:
            How many stored entries were deleted.
        """
        known = ((self.registry.get(given) if isinstance(given, str) else given) for given in chunks)
        gone = [chunk for chunk in known if chunk is not None]
        self.registry.remove([chunk.id for chunk in gone])
        if self.entries is None:
            return 0
        alone = (chunk for chunk in gone if not self.registry.others_have(chunk))
        return sum(self.entries.delete(chunk.token_ids) for chunk in alone)

    def prefetch(self, chunk_ids: Iterable[str]) -> None:
        """Move the stored KV of chunks into the fastest tier (blocking); what is not stored or not known is left out."""
        for chunk in map(self.registry.get, chunk_ids):
            if chunk is not None and self.entries is not None:
                self.entries.warm(chunk.token_ids)

    def flush(self) -> None:  # most engines write before they return
        """Wait until the chunks that answers found missing have been written back."""

    def reset_prefix_cache(self) -> None:  # most engines have none
        """Empty the engine's own prefix cache, so that the next prompt finds the store alone (for measuring)."""

    @abstractmethod
    def close(self) -> None:
        """Release the model and the store. The engine must not be used afterwards."""

    @property
    def closed(self) -> bool:
        """Return whether it was closed; a view is when its engine is."""
        return (self._root or self)._closed

    def check_open(self) -> None:
        """Refuse to go on with an engine that was closed; raises InputError."""
        if self.closed:
            raise InputError(
                f"This {type(self).__name__} was closed. Open another one, or close it when it is used no more."
            )

    def __copy__(self) -> Self:
        """Return another object for the same model; its attributes are shared."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: a model is not copied with what holds it."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Say how another process gets it: one that was opened by name is opened there by that name.

        Raises:
            InputError: It was made here.
        """
        if self._root is not None:
            return methodcaller("within", self.namespace.name), (self._root,)
        if self._reopen is None:
            raise InputError(
                f"This {type(self).__name__} lives in this process and cannot be sent to another. Use num_workers=1, a "
                "RemoteEngine, or a model given by name, which each process opens for itself."
            )
        return self._reopen, ()


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
