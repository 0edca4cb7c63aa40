"""Defines the chat model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from cacheblend_rag import BlendEngine, BlendPrompt, Generation, InputError, StreamEvent, chat_prompt
from cacheblend_rag.frameworks import DEFAULT_MAX_TOKENS, Asked, check_shown, reads_tools, required_tool, tools_asked
from langchain_cacheblend.messages import chat_messages, thoughts, tool_call_chunks, tool_calls
from langchain_cacheblend.requests import EngineFields, langchain_errors, usage_metadata
from langchain_cacheblend.runs import run_of
from langchain_cacheblend.structured import METHODS, bound_arguments, parsed, parser_for, schema_of, tool_name

_OWN_ARGUMENTS = ("chunk_ids", "tools", "tool_choice", "response_format")


class ChatCacheBlend(EngineFields, BaseChatModel):
    """Answers chats, reusing the stored KV of every chunk in the messages.

    Chunks are resolved in the final messages. First come explicit references: a text block whose ``id`` is the chunk's,
    the documents in a ``ToolMessage``'s artifact, and ``chunk_ids=`` of a call. Then come registered chunks found by
    content. All other text is prefilled. Every answer reports the reused KV: ``usage_metadata["input_token_details"]``
    and ``response_metadata["cacheblend"]``.

    Safe to use from several threads.

    Attributes:
        streaming: Whether ``invoke`` streams internally, for callbacks that listen to tokens.
        chat_template_kwargs: Additional variables of the model's chat template: with ``{"enable_thinking": False}``
            Qwen3 answers without thinking first.

    Example:
        Ask a question and print the reused tokens::

            llm = ChatCacheBlend(engine=engine, max_tokens=64)
            answer = llm.invoke(f"{chunk.text} Who is the captain?")
            print(answer.text, answer.usage_metadata["input_token_details"])
    """

    streaming: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "cacheblend-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop if stop is not None else self.stop, **kwargs)
        params["ls_provider"] = "cacheblend"
        return params

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "chat_template_kwargs": self.chat_template_kwargs}

    @property
    def engine(self) -> BlendEngine:
        """Return the engine that answers (see :class:`EngineFields`); sets the model's profile once it is open."""
        engine = super().engine
        if self.profile is None:
            self.profile = self._profile_of(engine)
        return engine

    def _resolve_model_profile(self) -> Any:
        return self._profile_of(self.given_engine) if isinstance(self.given_engine, BlendEngine) else None

    def _profile_of(self, engine: BlendEngine) -> Any:
        guided = engine.supports_json_schema
        tools = reads_tools(engine.tokenizer)
        return {
            "max_input_tokens": engine.context_window - (self.max_tokens or 1),
            "max_output_tokens": self.max_tokens or DEFAULT_MAX_TOKENS,
            "text_inputs": True,
            "text_outputs": True,
            "tool_calling": tools,
            "tool_choice": tools and guided,
            "structured_output": guided,
        }

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the number of prompt tokens for these messages, rendered with the model's chat template.

        If the template refuses the messages, as many templates refuse parts of a history (which ``trim_messages``
        counts), each message is counted alone.
        """
        specs = [convert_to_openai_tool(tool) for tool in tools or ()]
        try:
            return self._length(messages, specs) if messages else 0
        except InputError:
            return sum(self._length_alone(message, specs if at == 0 else ()) for at, message in enumerate(messages))

    def _length(self, messages: Sequence[BaseMessage], tools: Sequence[Mapping[str, Any]]) -> int:
        return len(self.engine.tokenize(self._prompt(messages, tools=tools)).token_ids)

    def _length_alone(self, message: BaseMessage, tools: Sequence[Mapping[str, Any]]) -> int:
        try:
            return self._length([message], tools)
        except InputError:  # no template refuses a user's first message
            return self._length([HumanMessage(message.content)], tools)

    def _prompt(
        self, messages: Sequence[BaseMessage], chunk_ids: Sequence[str] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> BlendPrompt:
        check_shown(self.engine, tools)
        plain = chat_messages(messages, self.engine)
        return chat_prompt(
            self.engine.tokenizer,
            plain,
            self.engine.registry,
            chunk_ids=chunk_ids,
            tools=tools or None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _call(
        self, messages: Sequence[BaseMessage], run: UUID | None, stop: Sequence[str] | None, kwargs: dict[str, Any]
    ) -> Asked:
        """Return the engine call for ``messages`` as a part of ``run``."""
        choice = kwargs.get("tool_choice")
        tools = tools_asked([convert_to_openai_tool(tool) for tool in kwargs.get("tools") or ()], choice)
        schema = schema_of(kwargs.get("response_format")) or kwargs.get("json_schema")
        if tools.required is not False:
            self._require_guidance(f"tool_choice={choice!r}")
        elif schema is not None:
            self._require_guidance("a JSON schema")
        build = partial(self._prompt, messages, kwargs.get("chunk_ids") or (), tools.specs)
        return self.request(build, run, stop, {**kwargs, "json_schema": schema}, _OWN_ARGUMENTS, tools, chat=True)

    def _require_guidance(self, what: str) -> None:
        if not self.engine.supports_json_schema:
            raise InputError(
                f"{type(self.engine).__name__} has no guided decoding here, so {what} cannot be enforced: "
                f"{self.engine.without_json_schema}, and parse plain text."
            )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            asked = self._call(messages, run_of(run_manager), stop, kwargs)
            return self._result(asked.answer(), asked)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            asked = await asyncio.to_thread(self._call, messages, run_of(run_manager), stop, kwargs)
            return self._result(await asked.aanswer(), asked)

    def _result(self, done: Generation, asked: Asked) -> ChatResult:
        text, calls, reasoning = asked.read(done.text)
        message = AIMessage(
            content=text,
            additional_kwargs=thoughts(reasoning),
            usage_metadata=usage_metadata(done, asked.request),
            response_metadata=self.answer_metadata(done, asked),
        )
        if calls is not None:
            message.tool_calls, message.invalid_tool_calls = tool_calls(calls)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            asked = self._call(messages, run_of(run_manager), stop, kwargs)
            with asked.events() as events:
                for event in events:
                    for chunk in self._chunks(event, asked):
                        if run_manager is not None:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            asked = await asyncio.to_thread(self._call, messages, run_of(run_manager), stop, kwargs)
            async with asked.aevents() as events:
                async for event in events:
                    for chunk in self._chunks(event, asked):
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    def _chunks(self, event: StreamEvent, asked: Asked) -> Iterator[ChatGenerationChunk]:
        done = event.generation
        text, calls, reasoning = asked.read(event.text, last=done is not None)
        if done is None:
            if text or reasoning:
                yield ChatGenerationChunk(message=AIMessageChunk(content=text, additional_kwargs=thoughts(reasoning)))
            return
        message = AIMessageChunk(
            content=text,
            additional_kwargs=thoughts(reasoning),
            tool_call_chunks=[] if calls is None else tool_call_chunks(calls),
            usage_metadata=usage_metadata(done, asked.request),
            response_metadata=self.answer_metadata(done, asked),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=message)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools: the chat template shows the tools, and calls are parsed from the answers.

        Args:
            tools: Anything LangChain converts to a tool.
            tool_choice: ``"auto"`` or ``"none"``; ``"any"`` or a tool's name, which require an engine with guided
                decoding.
            **kwargs: Further arguments of every call.

        Raises:
            InputError: ``tool_choice`` names no bound tool. Calls raise it if the template does not show tools, or if
                the engine cannot enforce the choice.
        """
        formatted = [convert_to_openai_tool(tool) for tool in tools]
        required_tool(tool_choice, formatted)
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return cast("Runnable[LanguageModelInput, AIMessage]", self.bind(tools=formatted, **kwargs))

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return this model with answers that conform to ``schema``, by guided decoding.

        Args:
            schema: A pydantic class, a ``TypedDict`` or a JSON schema.
            method: ``"json_schema"``: the answer is the JSON text. ``"function_calling"``: the answer is a call of a
                tool with that schema. ``"json_mode"``: the answer is any JSON object, which the prompt must describe.
            include_raw: Return ``raw``, ``parsed`` and ``parsing_error`` instead of raising when parsing fails.
            strict: Accepted for compatibility with other models; guided decoding is always strict.
            **kwargs: Further arguments of every call.

        Raises:
            InputError: The engine has no guided decoding, or ``method`` is unknown.
        """
        if method not in METHODS:
            raise InputError(f"method is {method!r}; give one of {', '.join(METHODS)}.")
        self._require_guidance("the schema")
        if method == "function_calling":
            traced = {"kwargs": {"method": method}, "schema": schema}
            name = tool_name(schema)
            llm = self.bind_tools([schema], tool_choice=name, ls_structured_output_format=traced, **kwargs)
        else:
            llm = self.bind(**bound_arguments(schema, method), **kwargs)
        return parsed(llm, parser_for(schema, method), include_raw)
