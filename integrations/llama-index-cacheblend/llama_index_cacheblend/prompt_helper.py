"""`ChunkPreservingPromptHelper`: packs prompts to the context window without cutting through chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.prompts import BasePromptTemplate

from cacheblend_rag.chunking import Chunk
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompt import chat_prompt, tokenize
from cacheblend_rag.registry import ChunkRegistry
from cacheblend_rag.tokens import encoder_for

_SEPARATOR = "\n\n"
_PROBE = "probe"


class ChunkPreservingPromptHelper(PromptHelper):
    """Packs as many whole chunks as fit into each prompt; a chunk that is cut could not bring its KV.

    It counts with the model's tokenizer, chunks by their own tokens, and leaves room for what the chat template adds. Only what
    is longer than a whole prompt by itself is cut, as LlamaIndex does.
    """

    _registry: ChunkRegistry = PrivateAttr()
    _template_tokens: int = PrivateAttr(default=0)

    def __init__(self, engine: BlendEngine, num_output: int = 256, **kwargs: Any) -> None:
        """Pack for ``engine``.

        Args:
            engine: The model.
            num_output: Tokens to leave for the answer: the LLM's ``max_tokens``.
            kwargs: As of LlamaIndex's `PromptHelper`; ``context_window`` is the engine's unless given.
        """
        kwargs = {
            "context_window": engine.context_window,
            "tokenizer": encoder_for(engine.tokenizer).document,
            **kwargs,
        }
        super().__init__(num_output=num_output, **kwargs)
        self._registry = engine.registry
        self._template_tokens = _template_tokens(engine)

    @classmethod
    def from_llm_metadata(cls, llm_metadata: LLMMetadata, *args: Any, **kwargs: Any) -> PromptHelper:
        """Refuse: metadata knows neither tokenizer nor chunks."""
        raise InputError(f"{cls.__name__} needs the engine: {cls.__name__}(engine, num_output=llm.max_tokens).")

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex knows the class by."""
        return "ChunkPreservingPromptHelper"

    def _get_available_context_size(self, num_prompt_tokens: int) -> int:
        return super()._get_available_context_size(num_prompt_tokens + self._template_tokens)

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: Any = None,
        tools: Any = None,
    ) -> list[str]:
        """Join texts to as few prompts' contexts as will hold them, in order, whole chunks each.

        Raises:
            ValueError: The prompt template alone fills the context window.
        """
        budget = self._get_available_chunk_size(prompt, padding=padding, llm=llm, tools=tools)
        split = self._splitter(prompt, padding, llm, tools)
        pieces: list[tuple[str, str]] = []
        for text in filter(None, map(str.strip, text_chunks)):
            units = list(self._units(text, budget, split))
            # Texts are joined as LlamaIndex joins them; pieces of one text as they stood in it.
            pieces += [(_SEPARATOR if at == 0 else before, unit) for at, (before, unit) in enumerate(units)]
        return self._pack(pieces, budget)

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: Any = None,
        tools: Any = None,
    ) -> list[str]:
        """Shorten each text to its share of the context window, by whole chunks where it can."""
        if not text_chunks:
            return []
        count = len(text_chunks)
        budget = self._get_available_chunk_size(prompt, count, padding=padding, llm=llm, tools=tools)
        split = self._splitter(prompt, padding, llm, tools, count)
        packed = (self._pack(list(self._units(text.strip(), budget, split)), budget) for text in text_chunks)
        return [texts[0] if texts else "" for texts in packed]

    def _splitter(
        self, prompt: BasePromptTemplate, padding: int, llm: Any, tools: Any, count: int = 1
    ) -> Callable[[str], list[str]]:
        splitter = self.get_text_splitter_given_prompt(prompt, count, padding=padding, llm=llm, tools=tools)
        return splitter.split_text

    def _units(self, text: str, budget: int, split: Callable[[str], list[str]]) -> Iterator[tuple[str, str]]:
        """Yield what may not be cut, each with the whitespace before it."""
        if self._size(text) <= budget:
            yield "", text
            return
        before = ""
        for piece in self._registry.find(text):
            body = piece.text if isinstance(piece, Chunk) else piece.strip()
            if not isinstance(piece, Chunk):
                before += piece[: len(piece) - len(piece.lstrip())]
                if not body:
                    continue
            for index, unit in enumerate([body] if self._size(body) <= budget else split(body)):
                yield before if index == 0 else " ", unit
            before = "" if isinstance(piece, Chunk) else piece[len(piece.rstrip()) :]

    def _pack(self, pieces: Sequence[tuple[str, str]], budget: int) -> list[str]:
        packed: list[str] = []
        room = 0
        for before, text in pieces:
            size, joint = self._size(text), self._size(before)
            if packed and size + joint <= room:
                packed[-1] += before + text
                room -= size + joint
            else:
                packed.append(text)
                room = budget - size
        return packed

    def _size(self, text: str) -> int:
        """Count tokens as the prompt will have them: chunks and the text between them are tokenised apart."""
        return sum(
            len(piece.token_ids) if isinstance(piece, Chunk) else len(self._token_counter.tokenizer(piece))
            for piece in self._registry.find(text)
        )


def _template_tokens(engine: BlendEngine) -> int:
    """Count the tokens a chat template puts around a system and a user message."""
    messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": _PROBE}]
    whole = tokenize(chat_prompt(engine.tokenizer, messages, ChunkRegistry()), engine.tokenizer, ChunkRegistry())
    return max(0, len(whole.token_ids) - 2 * len(encoder_for(engine.tokenizer).document(_PROBE)))
