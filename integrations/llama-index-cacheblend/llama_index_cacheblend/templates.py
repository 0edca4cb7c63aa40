"""Begins prompts with the engine's default header, behind which the chunks were computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate

from cacheblend_rag.frameworks import DEFAULT_INSTRUCTION


def _context(context_str: Any = "", **_: Any) -> str:
    # SimpleSummarize passes a list, which would be formatted with quotes and escaped line ends.
    return context_str if isinstance(context_str, str) else "\n".join(context_str)


def qa_template(instruction: str = DEFAULT_INSTRUCTION, history: Sequence[ChatMessage] = ()) -> BasePromptTemplate:
    """Return the question-answering template: instruction, earlier messages, chunks, question.

    The engine computes chunks behind a header. A prompt that begins with the header reuses the first chunk exactly, and
    its answers are like the answers of `RagPipeline`. Other templates work as well: their first chunk is then blended
    like the other chunks.

    Args:
        instruction: The system message; take the system message of the engine's ``header`` if you gave the engine one.
        history: Earlier messages. In front of the chunks they are a prefix of every later prompt, and not computed
            again.

    Example:
        Use the template in a synthesizer of LlamaIndex::

            synthesizer = get_response_synthesizer(llm=llm, text_qa_template=qa_template())
    """
    return ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content=instruction),
            *history,
            ChatMessage(role=MessageRole.USER, content="{context_str}\n\nQuestion: {query_str}"),
        ],
        function_mappings={"context_str": _context},
    )
