"""Prompt templates that begin as chunks were computed: what stands before the first chunk is the engine's default header."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate

from cacheblend_rag import DEFAULT_INSTRUCTION


def _context(context_str: Any = "", **_: Any) -> str:
    # SimpleSummarize hands over a list, which would be printed as one: quoted, its line ends escaped.
    return context_str if isinstance(context_str, str) else "\n".join(context_str)


def qa_template(instruction: str = DEFAULT_INSTRUCTION) -> BasePromptTemplate:
    """Return the question-answering template: instruction, chunks, question.

    The engine computes chunks behind a header; a prompt that begins with it reuses the first chunk as it is, and answers read as
    those of `RagPipeline`. Any other template works as well: its first chunk is then blended like the rest.

    Args:
        instruction: The system message; that of the engine's ``header`` if you gave it one.
    """
    return ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content=instruction),
            ChatMessage(role=MessageRole.USER, content="{context_str}\n\nQuestion: {query_str}"),
        ],
        function_mappings={"context_str": _context},
    )


CONTEXT_PROMPT = DEFAULT_INSTRUCTION + "\n\n{context_str}"
"""System message of chat engines: the same instruction, and the chunks right behind it."""
