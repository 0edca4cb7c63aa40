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
    """A text that is not cut, its tokens, and the whitespace that was before it."""

    before: str
    text: str
    size: int


class _Room(NamedTuple):
    """Tokens that each of a prompt's texts may have, and what cuts a text into pieces of that size."""

    tokens: int
    split: Callable[[str], list[str]]


class ChunkPreservingPromptHelper(PromptHelper):
    """Packs as many whole chunks as fit into each prompt; a chunk that is cut could not bring its KV.

    It counts with the model's tokenizer, chunks by their own tokens, and leaves room for what the chat template adds. Only what
    is longer than a whole prompt by itself is cut, as LlamaIndex does.
    """

    _registry: ChunkRegistry = PrivateAttr()
    _template_tokens: int = PrivateAttr(default=0)

    def __init__(self, engine: BlendEngine, num_output: int | None = None, **kwargs: Any) -> None:
        """Pack for ``engine``.

        Args:
            engine: The model.
            num_output: Tokens to leave for the answer: the LLM's ``max_tokens``. None leaves what an LLM without one takes.
            kwargs: As of LlamaIndex's `PromptHelper`; ``context_window`` is the engine's unless given.
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
        """Pack for a `CacheBlendLLM`: for its context window, and with room for its answers."""
        return cls(llm.engine, llm.metadata.num_output, context_window=llm.metadata.context_window)

    @classmethod
    def from_llm_metadata(cls, llm_metadata: LLMMetadata, *args: Any, **kwargs: Any) -> PromptHelper:
        """Refuse: metadata knows neither tokenizer nor chunks."""
        raise InputError(f"{cls.__name__} needs the engine: {cls.__name__}.of(llm).")

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
        room = self._room(prompt, 1, padding=padding, llm=llm, tools=tools)
        pieces: list[_Piece] = []
        for text in filter(None, map(str.strip, text_chunks)):
            first, *rest = self._pieces(text, room)
            # Texts are joined as LlamaIndex joins them; pieces of one text as they stood in it.
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
        """Shorten each text to its share of the context window, by whole chunks where it can."""
        if not text_chunks:
            return []
        room = self._room(prompt, len(text_chunks), padding=padding, llm=llm, tools=tools)
        packed = (self._pack(self._pieces(text.strip(), room), room.tokens) for text in text_chunks)
        return [texts[0] if texts else "" for texts in packed]

    def _room(self, prompt: BasePromptTemplate, count: int, **options: Any) -> _Room:
        # The splitter takes time to make, and few texts need it.
        return _Room(
            self._get_available_chunk_size(prompt, count, **options),
            lambda text: self.get_text_splitter_given_prompt(prompt, count, **options).split_text(text),
        )

    def _pieces(self, text: str, room: _Room) -> list[_Piece]:
        """Return what may not be cut."""
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
        """Count tokens as the prompt will have them: chunks and the text between them are tokenised apart."""
        return sum(
            len(piece.token_ids) if isinstance(piece, Chunk) else len(self._token_counter.tokenizer(piece))
            for piece in self._registry.find(text)
        )


def _template_tokens(engine: BlendEngine) -> int:
    """Count the tokens a chat template puts around a system and a user message."""
    messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": _PROBE}]
    whole = engine.tokenize(chat_prompt(engine.tokenizer, messages, ChunkRegistry()))
    return max(0, len(whole.token_ids) - 2 * len(encoder_for(engine.tokenizer).document(_PROBE)))
