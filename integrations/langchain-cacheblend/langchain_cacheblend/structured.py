"""Adds structured output by guided decoding."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough, RunnablePick
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from cacheblend_rag import InputError

METHODS = ("json_schema", "function_calling", "json_mode")


def schema_of(response_format: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema that OpenAI's ``response_format`` requests; None for plain text.

    Raises:
        InputError: The format is of an unknown kind.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
        schema = response_format["json_schema"].get("schema")
        if isinstance(schema, Mapping):
            return schema
    raise InputError(f"response_format {response_format!r:.80} is not understood; use with_structured_output().")


def bound_arguments(schema: Any, method: str) -> dict[str, Any]:
    """Return the per-call arguments that make answers conform to ``schema`` by ``json_schema`` or ``json_mode``."""
    if method == "json_mode":
        wanted: dict[str, Any] = {"type": "object"}
    else:
        wanted = convert_to_json_schema(schema)
    return {"json_schema": wanted, "ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}


def tool_name(schema: Any) -> str:
    """Return the name of the tool that LangChain makes of ``schema``."""
    return str(convert_to_openai_tool(schema)["function"]["name"])


def parser_for(schema: Any, method: str) -> Runnable[Any, Any]:
    """Return the parser from an answer to an instance of ``schema``; to a dictionary if it is no pydantic class.

    A truncated answer raises `OutputParserException`; LangChain's parsers would repair and return half an object.
    """
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Runnable[Any, Any]
    if method == "function_calling" and pydantic:
        parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
    elif method == "function_calling":
        parser = JsonOutputKeyToolsParser(key_name=tool_name(schema), first_tool_only=True)
    else:
        parser = PydanticOutputParser(pydantic_object=schema) if pydantic else JsonOutputParser()
    return RunnableGenerator(_uncut, _auncut) | parser


def _uncut(pieces: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    said = ""
    for piece in pieces:
        said += piece.text
        _check_whole(piece, said)
        yield piece


async def _auncut(pieces: AsyncIterator[BaseMessage]) -> AsyncIterator[BaseMessage]:
    said = ""
    async for piece in pieces:
        said += piece.text
        _check_whole(piece, said)
        yield piece


def _check_whole(last: BaseMessage, said: str) -> None:
    """Refuse an answer that ``max_tokens`` has truncated, given its last piece and its text."""
    if last.response_metadata.get("finish_reason") != "length" or getattr(last, "tool_calls", None):
        return
    try:
        json.loads(said)
    except ValueError:
        raise OutputParserException(
            "The answer was cut off by max_tokens before the object was whole. Give more of them: max_tokens=...",
            llm_output=said,
        ) from None


def parsed(llm: Runnable[Any, Any], parser: Runnable[Any, Any], include_raw: bool) -> Runnable[Any, Any]:
    """Return ``llm`` with its answers parsed, as LangChain's own models do; see ``with_structured_output``."""
    if not include_raw:
        return llm | parser
    attempt = RunnablePassthrough.assign(parsed=RunnablePick("raw") | parser, parsing_error=lambda _: None)
    refused = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | attempt.with_fallbacks([refused], exception_key="parsing_error")
