"""Packs prompts to the context window without cutting through chunks: `ChunkPreservingPromptHelper`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.prompts import BasePromptTemplate

from cacheblend_rag import BlendEngine, Chunk, InputError, chat_prompt
from cacheblend_rag.frameworks import ChunkRegistry, encoder_for
from llama_index_cacheblend.requests import answer_tokens

_SEPARATOR = "\n\n"
_PROBE = "probe"


class _Piece(NamedTuple):
    """Holds a text that is not cut, the whitespace before it, and its number of tokens."""

    before: str
    text: str
    size: int


class _Room(NamedTuple):
    """Holds the tokens available to each text of a prompt, and a function that splits a text to that size."""

    tokens: int
    split: Callable[[str], list[str]]


class ChunkPreservingPromptHelper(PromptHelper):
    """Packs as many whole chunks as fit into each prompt, since a cut chunk cannot reuse its KV.

    The helper counts with the model's tokenizer, counts chunks by their own tokens, and leaves room for the tokens of
    the chat template. Only a text that is longer than a whole prompt is cut, as LlamaIndex does.

    Example:
        Pack prompts for an LLM in LlamaIndex's settings::

            llm = CacheBlendLLM(engine=engine, max_tokens=64)
            Settings.prompt_helper = ChunkPreservingPromptHelper.of(llm)
    """

    _registry: ChunkRegistry = PrivateAttr()
    _template_tokens: int = PrivateAttr(default=0)

    def __init__(self, engine: BlendEngine, num_output: int | None = None, **kwargs: Any) -> None:
        """Pack prompts for ``engine``.

        Args:
            engine: The engine that answers.
            num_output: Tokens to leave for the answer: the LLM's ``max_tokens``. None leaves the default of an LLM
                without ``max_tokens``.
            kwargs: Arguments of LlamaIndex's `PromptHelper`; ``context_window`` is the engine's unless given.
        """
        kwargs = {
            "context_window": engine.context_window,
            "tokenizer": encoder_for(engine.tokenizer).document,
            **kwargs,
        }
        super().__init__(num_output=answer_tokens(num_output, kwargs["context_window"]), **kwargs)
        self._registry = engine.registry
        self._template_tokens = _template_tokens(engine)

    @classmethod
    def of(cls, llm: Any) -> Self:
        """Return a helper for a `CacheBlendLLM`, with its context window and room for its answers."""
        return cls(llm.engine, llm.metadata.num_output, context_window=llm.metadata.context_window)

    @classmethod
    def from_llm_metadata(cls, llm_metadata: LLMMetadata, *args: Any, **kwargs: Any) -> PromptHelper:
        """Raise InputError: metadata has neither tokenizer nor chunks."""
        raise InputError(f"{cls.__name__} needs the engine: {cls.__name__}.of(llm).")

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the class."""
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
        """Join texts, in order and by whole chunks, to the contexts of as few prompts as possible.

        Raises:
            ValueError: The prompt template alone fills the context window.
        """
        room = self._room(prompt, 1, padding=padding, llm=llm, tools=tools)
        pieces: list[_Piece] = []
        for text in filter(None, map(str.strip, text_chunks)):
            first, *rest = self._pieces(text, room)
            # Texts are joined as LlamaIndex joins them; pieces of one text keep their original whitespace.
            pieces += [first._replace(before=_SEPARATOR), *rest]
        return self._pack(pieces, room.tokens)

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: Any = None,
        tools: Any = None,
    ) -> list[str]:
        """Shorten each text to its share of the context window, by whole chunks if possible."""
        if not text_chunks:
            return []
        room = self._room(prompt, len(text_chunks), padding=padding, llm=llm, tools=tools)
        packed = (self._pack(self._pieces(text.strip(), room), room.tokens) for text in text_chunks)
        return [texts[0] if texts else "" for texts in packed]

    def _room(self, prompt: BasePromptTemplate, count: int, **options: Any) -> _Room:
        # The splitter is slow to create, and few texts need it.
        return _Room(
            self._get_available_chunk_size(prompt, count, **options),
            lambda text: self.get_text_splitter_given_prompt(prompt, count, **options).split_text(text),
        )

    def _pieces(self, text: str, room: _Room) -> list[_Piece]:
        """Return the pieces of ``text`` that must not be cut."""
        size = self._size(text)
        if size <= room.tokens:
            return [_Piece("", text, size)]
        found: list[_Piece] = []
        before = ""
        for part in self._registry.find(text):
            if isinstance(part, Chunk):
                body, behind = part.text, ""
            else:
                body = part.strip()
                before += part[: len(part) - len(part.lstrip())]
                behind = part[len(part.rstrip()) :]
            if not body:
                continue
            fits = self._size(body) <= room.tokens
            for unit in [body] if fits else room.split(body):
                found.append(_Piece(before, unit, self._size(unit)))
                before = " "
            before = behind
        return found

    def _pack(self, pieces: Sequence[_Piece], budget: int) -> list[str]:
        packed: list[str] = []
        room = 0
        joints: dict[str, int] = {}
        for before, text, size in pieces:
            joint = joints.get(before)
            if joint is None:
                joint = joints[before] = self._size(before)
            if packed and size + joint <= room:
                packed[-1] += before + text
                room -= size + joint
            else:
                packed.append(text)
                room = budget - size
        return packed

    def _size(self, text: str) -> int:
        """Return the number of tokens in a prompt: chunks and the text between them are tokenised separately."""
        return sum(
            len(piece.token_ids) if isinstance(piece, Chunk) else len(self._token_counter.tokenizer(piece))
            for piece in self._registry.find(text)
        )


def _template_tokens(engine: BlendEngine) -> int:
    """Return the number of tokens that a chat template adds around a system and a user message."""
    messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": _PROBE}]
    whole = engine.tokenize(chat_prompt(engine.tokenizer, messages, ChunkRegistry()))
    return max(0, len(whole.token_ids) - 2 * len(encoder_for(engine.tokenizer).document(_PROBE)))
