"""Defines `BlendEngine`, the interface of all engines, and `Request`, one call of an engine with every option set."""

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
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
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
    """Holds one call of an engine with every option set; :meth:`BlendEngine.request` creates a request.

    Attributes:
        prompt: The tokenised prompt.
        sampling: How the answer is sampled.
        settings: Blend settings as the caller gave them.
        options: Decisions about the blend, by the settings and the engine's profile.
    """

    prompt: TokenizedPrompt
    sampling: SamplingParams
    settings: BlendSettings
    options: FuseOptions


class BlendEngine(Closing):
    """Answers prompts of text and chunks with one model, and reuses the chunks' stored KV.

    All methods may be called from several threads; each engine decides how many calls run at the same time.

    Attributes:
        fingerprint: Identity of the model, part of every store key.
        tokenizer: The model's Hugging Face tokenizer.
        context_window: Maximum number of tokens of prompt and completion together.
        num_layers: Number of transformer layers.
        registry: Chunks that the engine knows; chunk references and plain text are looked up in the registry.
        header_ids: Token ids of the header, behind which chunks are precomputed.
        gate: Result of the parity gate. A model that fails the gate is not blended: the engine serves the model by
            ordinary prefill, or by prefix caching if the model has recurrent layers.
        profile: Default values of the blend options that a request leaves open.
        ranking: When the static deviations of chunks are measured (:mod:`cacheblend_rag.blending.static`).
        store: Store of the chunks' KV; None if this process cannot access the store.
        device: Device that the model runs on; None if the model runs outside this process.
        dtype: Dtype that the model computes in; None if the model runs outside this process.
        costs: Costs of loading and computing, for the loading controller; None if nothing was measured.
        writer: Identity of the KV writer that computes the chunks' KV (:mod:`cacheblend_rag.engines.writer`); None if
            the model itself computes the KV.
        namespace: Namespace of the engine's chunks and stored KV (:meth:`within`).
        prefix_cache_tokens: Maximum number of tokens in the engine's own prefix cache; 0 if the engine has none or
            limits its cache in bytes.
        supports_json_schema: Whether the engine has guided decoding (:attr:`SamplingParams.json_schema`).
        without_json_schema: Advice in the error message of an engine without guided decoding.

    Example:
        Precompute chunks once, then answer a prompt that contains the chunks::

            chunks = split_text(text, engine.tokenizer)
            engine.precompute(chunks)
            prompt = BlendPrompt((*chunks, "Question: Who is the captain? Answer:"))
            print(engine.generate(prompt).text)
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
    _root: Self | None = None  # the engine behind a view; None for the engine itself
    _views: Mapping[str, Self] = MappingProxyType({})
    _reopen: Callable[[], BlendEngine] | None = None  # opens the engine in another process; None if not opened by name

    @property
    def entries(self) -> Entries | None:
        """Return this model's entries in the store, computed behind the engine's header; None without a store."""
        return (
            None
            if self.store is None
            else Entries(self.store, self.fingerprint, self.header_ids, namespace=self.namespace, writer=self.writer)
        )

    def within(self, name: str) -> Self:
        """Return the view of this engine for a namespace, with its own chunks, stored KV and prefix cache.

        A view shares the model and the store with its engine. Each name has one view; ``default`` names the engine
        itself. Closing a view does nothing. A view must not be used after its engine was closed.

        Raises:
            InputError: The name is not 1 to 63 of a-z, 0-9, '.', '_' and '-', the engine supports no views, or the
                store is encrypted and has no key for the namespace.
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
        """Turn a copy of an engine into a view; raise InputError if the engine supports no views."""
        raise InputError(f"{type(self).__name__} has no views within namespaces; use TransformersEngine or VLLMEngine.")

    @property
    def controlled(self) -> bool:
        """Return whether a loading controller can choose the ratio when a request asks for ``"auto"``."""
        return self.costs is not None and self.costs.calibrated

    @abstractmethod
    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """Register ``chunks``, and compute and store their KV; chunks whose KV is already stored are skipped.

        Args:
            chunks: Chunks that were split with this engine's tokenizer.
            progress: Called with the number of chunks finished since the previous call.

        Raises:
            StoreError: The store cannot be written. Entries stored before the error remain.
        """

    def precompute_first(self, chunks: Sequence[Chunk]) -> PrecomputeReport:
        """Compute and store the model's own KV of ``chunks``, beside the KV writer's; does nothing without a KV writer.

        A prompt's first chunk uses the model's own KV. By default an engine stores the model's own KV of a chunk after
        the first prompt that lacked the KV. Raises the same errors as :meth:`precompute`.
        """
        return PrecomputeReport()

    @abstractmethod
    def stream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        """Answer ``prompt`` piece by piece. Closing the iterator stops the computation.

        A plain string is searched for registered chunks; a string without chunks is prefilled ordinarily. A prompt that
        :meth:`tokenize` returned is used unchanged, and so is a call that :meth:`request` returned.

        Raises:
            PromptTooLongError: Prompt and ``max_tokens`` exceed the context window.
            UnknownChunkError: The prompt refers to a chunk that was never registered.
            InputError: This engine or model does not support one of the options, or options are given beside a call.
        """

    def generate(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Return the whole answer to ``prompt``; raises the same errors as :meth:`stream`."""
        last = None
        for event in self.stream(prompt, sampling, settings):
            last = event.generation
        assert last is not None
        return last

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Return the prompt's token ids and chunk positions; a plain string is searched for registered chunks.

        Raises:
            UnknownChunkError: The prompt refers to a chunk that was never registered.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        if not isinstance(prompt, str):
            return tokenize(prompt, self.tokenizer, self.registry)
        tokens = tokenize(text_prompt(self.tokenizer, prompt, self.registry), self.tokenizer, self.registry)
        return tokens if tokens.spans else replace(tokens, text=prompt)

    def request(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Request:
        """Tokenise a prompt, set open options and reject unsupported ones; raises the same errors as :meth:`stream`."""
        self.check_open()
        if not isinstance(prompt, Request):
            settings = settings or BlendSettings()
            options = self.profile.resolve(settings, self.num_layers, self.controlled)
            prompt = Request(self.tokenize(prompt), sampling or SamplingParams(), settings, options)
        elif sampling is not None or settings is not None:
            raise InputError("A Request has its sampling and settings already; give a prompt, or the Request alone.")
        if prompt.sampling.json_schema is not None and not self.supports_json_schema:
            raise InputError(f"{type(self).__name__} has no guided decoding here; {self.without_json_schema}.")
        check_length(len(prompt.prompt.token_ids), prompt.sampling.max_tokens, self.context_window)
        return prompt

    async def agenerate(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Answer asynchronously; see :meth:`generate`."""
        last = None
        async for event in self.astream(prompt, sampling, settings):
            last = event.generation
        assert last is not None
        return last

    async def astream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Answer asynchronously; see :meth:`stream`. Cancelling the consumer stops the work by the next token."""
        async for event in iterate_in_thread(lambda _: self.stream(prompt, sampling, settings)):
            yield event

    def forget(self, chunks: Iterable[str | Chunk]) -> int:
        """Remove chunks from the registry and delete their KV from the store; unknown ids are ignored.

        The KV of a chunk is not deleted if a chunk with another id has the same text.

        Args:
            chunks: Chunk ids; or chunks, which the registry need not know any more. Chunks of an attached index stay
                registered: their KV is computed again when a prompt needs the KV.

        Returns:
            Number of deleted store entries.
        """
        known = ((self.registry.get(given) if isinstance(given, str) else given) for given in chunks)
        gone = [chunk for chunk in known if chunk is not None]
        self.registry.remove([chunk.id for chunk in gone])
        if self.entries is None:
            return 0
        alone = (chunk for chunk in gone if not self.registry.others_have(chunk))
        return sum(self.entries.delete(chunk.token_ids) for chunk in alone)

    def prefetch(self, chunk_ids: Iterable[str]) -> None:
        """Move the stored KV of chunks into the fastest tier (blocking); unknown and unstored chunks are ignored."""
        for chunk in map(self.registry.get, chunk_ids):
            if chunk is not None and self.entries is not None:
                self.entries.warm(chunk.token_ids)

    def flush(self) -> None:  # most engines write before they return
        """Wait until the KV that earlier prompts found missing has been written to the store."""

    def reset_prefix_cache(self) -> None:  # most engines have no prefix cache
        """Empty the engine's own prefix cache, so that the next prompt reuses stored KV only (for measurements)."""

    @abstractmethod
    def close(self) -> None:
        """Release the model and the store. The engine must not be used afterwards."""

    @property
    def closed(self) -> bool:
        """Return whether the engine was closed; a view is closed when its engine is closed."""
        return (self._root or self)._closed

    def check_open(self) -> None:
        """Raise InputError if the engine was closed."""
        if self.closed:
            raise InputError(
                f"This {type(self).__name__} was closed. Open another one, or close it when it is used no more."
            )

    def __copy__(self) -> Self:
        """Return another object for the same model, which shares the attributes of this engine."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the engine itself: a deep copy of an object that refers to an engine does not copy the model."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how another process opens this engine: by the name of the model, if the engine was opened by name.

        Raises:
            InputError: The engine was not opened by name.
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
    """Check that a prompt is not empty, and that prompt and answer fit the context window.

    Raises:
        PromptTooLongError: The prompt is empty, or prompt and ``max_tokens`` exceed the context window.
    """
    if not prompt_tokens:
        raise PromptTooLongError("The prompt is empty; give at least one token.")
    if prompt_tokens + max_tokens > context_window:
        raise PromptTooLongError(
            f"The prompt has {prompt_tokens} tokens; with max_tokens={max_tokens} that exceeds the model's context window of "
            f"{context_window}. Retrieve fewer or smaller chunks, or lower max_tokens."
        )
