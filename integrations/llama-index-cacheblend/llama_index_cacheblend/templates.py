"""Begins prompts as chunks were computed: what stands before the first chunk is the engine's default header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate

from cacheblend_rag.frameworks import DEFAULT_INSTRUCTION


def _context(context_str: Any = "", **_: Any) -> str:
    # SimpleSummarize hands over a list, which would be printed as one: quoted, its line ends escaped.
    return context_str if isinstance(context_str, str) else "\n".join(context_str)


def qa_template(instruction: str = DEFAULT_INSTRUCTION, history: Sequence[ChatMessage] = ()) -> BasePromptTemplate:
    """Return the question-answering template: instruction, what was said before, chunks, question.

    The engine computes chunks behind a header; a prompt that begins with it reuses the first chunk as it is, and answers read as
    those of `RagPipeline`. Any other template works as well: its first chunk is then blended like the rest.

    Args:
        instruction: The system message; that of the engine's ``header`` if you gave it one.
        history: Earlier messages. In front of the chunks they are a prefix of every later prompt, and not computed again.
    """
    return ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content=instruction),
            *history,
            ChatMessage(role=MessageRole.USER, content="{context_str}\n\nQuestion: {query_str}"),
        ],
        function_mappings={"context_str": _context},
    )
