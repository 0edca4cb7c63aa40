"""Stuffs documents into a prompt as separate content blocks, one for each chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cacheblend_rag import InputError, chunk_id

_PLAIN = PromptTemplate.from_template("{page_content}")


def create_blended_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """Return a chain like ``create_stuff_documents_chain``, with each document a content block of its own.

    The model sees the same text. The blocks carry the chunks' ids, so no search by content is needed: documents that
    are unknown to the engine, or that contain one another's text, are reused as well. With a string prompt, or a prompt
    that changes the documents, the chain works like the stuff chain.

    Args:
        llm: :class:`~langchain_cacheblend.ChatCacheBlend`, or any other model that takes text blocks.
        prompt: Prompt template with the variable ``document_variable_name``; its other variables come from the chain's
            input.
        output_parser: Parser of the answer; None returns the answer's text.
        document_prompt: Formats one document, from ``page_content`` and its metadata; None takes ``page_content``
            alone.
        document_separator: Text between two documents.
        document_variable_name: Key of the documents in the chain's input.

    Raises:
        InputError: ``prompt`` has no such variable.

    Example:
        Answer from retrieved documents::

            chain = create_blended_documents_chain(ChatCacheBlend(engine=engine), prompt)
            answer = chain.invoke({"context": documents, "input": "Who is the captain?"})
    """
    if document_variable_name not in prompt.input_variables:
        raise InputError(
            f"The prompt must take {document_variable_name!r}; it takes {', '.join(prompt.input_variables) or 'nothing'}."
        )
    template = document_prompt or _PLAIN

    def blocks(documents: Sequence[Document]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for index, document in enumerate(documents):
            formatted = _formatted(document, template)
            found.append(_text((document_separator if index else "") + formatted.before))
            if formatted.text:
                found.append({**_text(formatted.text), "id": chunk_id(formatted.text.strip())})
            found.append(_text(formatted.after))
        return [block for block in found if block["text"]]

    def filled(inputs: dict[str, Any], documents: str) -> dict[str, Any]:
        return {**inputs, document_variable_name: documents}

    def fill(inputs: dict[str, Any], config: RunnableConfig) -> PromptValue:
        mark, parts = _new_mark(), blocks(inputs[document_variable_name])
        whole = prompt.invoke(filled(inputs, _joined(parts)), config)
        return _put(whole, prompt.format_prompt(**filled(inputs, mark)), mark, parts)

    async def afill(inputs: dict[str, Any], config: RunnableConfig) -> PromptValue:
        mark, parts = _new_mark(), blocks(inputs[document_variable_name])
        whole = await prompt.ainvoke(filled(inputs, _joined(parts)), config)
        return _put(whole, await prompt.aformat_prompt(**filled(inputs, mark)), mark, parts)

    chain = (
        RunnableLambda(fill, afill).with_config(run_name="format_inputs") | llm | (output_parser or StrOutputParser())
    )
    return chain.with_config(run_name="blended_documents_chain")


def _new_mark() -> str:
    # A new random mark for each call, which is gone before the model is called, so that no document can contain it.
    return f"documents-{uuid4().hex}"


class _Formatted(NamedTuple):
    """Holds a document as its template formats it: the document's text, and the template's text before and after."""

    before: str
    text: str
    after: str


def _formatted(document: Document, template: BasePromptTemplate[str]) -> _Formatted:
    if template is _PLAIN:
        return _Formatted("", document.page_content, "")
    mark = f"text-{uuid4().hex}"
    marked = format_document(Document(page_content=mark, metadata=document.metadata), template)
    before, _, after = marked.partition(mark)
    whole = format_document(document, template)
    same = before + document.page_content + after == whole
    return _Formatted(before, document.page_content, after) if same else _Formatted(whole, "", "")


def _put(whole: PromptValue, marked: PromptValue, mark: str, blocks: list[dict[str, Any]]) -> PromptValue:
    """Return the prompt with ``blocks`` at the mark if its text is then the same as ``whole``; else ``whole``."""
    if not isinstance(marked, ChatPromptValue):
        return whole
    put = ChatPromptValue(messages=[_put_message(message, mark, blocks) for message in marked.messages])
    return put if _said(put) == _said(whole) else whole


def _said(value: PromptValue) -> list[str]:
    return [_joined(message.content) for message in value.to_messages()]


def _joined(content: str | Sequence[Any]) -> str:
    return content if isinstance(content, str) else "".join(map(_text_in, content))


def _put_message(message: BaseMessage, mark: str, blocks: list[dict[str, Any]]) -> BaseMessage:
    parts = [message.content] if isinstance(message.content, str) else message.content
    if not any(mark in _text_in(part) for part in parts):
        return message
    return message.model_copy(update={"content": [block for part in parts for block in _put_part(part, mark, blocks)]})


def _put_part(part: Any, mark: str, blocks: list[dict[str, Any]]) -> Iterator[Any]:
    if mark not in _text_in(part):
        yield _text(part) if isinstance(part, str) else part
        return
    for index, text in enumerate(_text_in(part).split(mark)):
        if index:
            yield from blocks
        if text:
            yield _text(text)


def _text_in(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text", "")
    return text if isinstance(text, str) else ""


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
