"""Defines `CacheBlendLLM`: a LlamaIndex LLM over a `BlendEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.prompts import PromptTemplate

from cacheblend_rag import BlendEngine, Chunk, Generation, InputError, StreamEvent
from cacheblend_rag.frameworks import (
    CALL_OPTIONS,
    Asked,
    EngineName,
    OnMiss,
    Parts,
    Quality,
    check_given,
    encoder_for,
    options_of,
    reads_tools,
    shared_engine,
    with_usual_names,
)
from llama_index_cacheblend.handles import check_window, count_with, refuse_unpicklable
from llama_index_cacheblend.requests import Build, answer_tokens, listed, make_request, of_messages, of_text
from llama_index_cacheblend.responses import chat_response, completion_response, raw_of, with_thoughts
from llama_index_cacheblend.tools import chat_arguments, selections, with_calls
from llama_index_cacheblend.watch import Inbox, watch_for, watch_retrievals

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

LLM_OPTIONS = (*CALL_OPTIONS, "on_miss", "context_window", "is_chat_model")
"""Names of the LLM options that this package's query engines, chat engines and synthesizers accept."""

_Response = TypeVar("_Response", ChatResponse, CompletionResponse)
_Make = Callable[[str, str | None, dict[str, Any] | None], _Response]


class CacheBlendLLM(FunctionCallingLLM):
    """Answers chats and completions, and reuses the stored KV of the chunks in them.

    Chunks named by ``chunk_ids=`` or by a message's ``additional_kwargs["chunk_ids"]`` are found first, then chunks of
    the engine's registry by exact content. Responses report reuse in ``raw["usage"]`` and ``raw["reason"]``. A call may
    override all attributes except ``engine``, ``is_chat_model`` and ``chat_template_kwargs``, and takes ``json_schema``.

    Attributes:
        engine: The engine that answers; the LLM does not close it.
        max_tokens: Most tokens to generate. None takes 512, or the tokens left in the context window; prompts are packed
            to leave 512 tokens, or a quarter of a window below 2048.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Number of likeliest tokens to sample from; 0 for all. ``seed`` makes sampling repeatable.
        presence_penalty: Subtracted from the logit of every token that the answer already contains, -2 to 2.
        frequency_penalty: Subtracted from the logit of a token for each time that the answer contains it, -2 to 2.
        stop_repeating: End an answer that says 16 to 128 tokens twice, one behind the other.
        logprobs: Number of alternatives whose log-probability is returned beside each token's; None for none at all.
        stop: Strings that end the answer; they are not part of it.
        ratio: Recompute ratio in [0, 1], or ``"auto"``: the model profile's, and more for text unlike the calibration's
            text. None takes the profile's ratio, and likewise for the next three attributes.
        policy: Token-selection policy.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        quality: Replaces the three attributes above: ``"high"`` (the profile's blend), ``"fast"`` (recomputes less),
            ``"exact"`` (reuses only the KV that a prefix cache could reuse) or ``"full"`` (full prefill).
        on_miss: Reaction to retrieved chunks that the prompt lacks or has in an altered form, so that their stored KV
            is useless: ``"warn"``, ``"ignore"`` or ``"error"``, which also raises if the policy fell back to another.
            Responses report these chunks in ``raw["retrieved"]`` in any case.
        context_window: Context window for the prompts that LlamaIndex packs; at most the engine's, which None takes.
        is_chat_model: False makes LlamaIndex format prompts to text itself, without the chat template.
        chat_template_kwargs: Additional variables of the chat template: with ``{"enable_thinking": False}`` Qwen3
            answers without thinking first.

    Example::

        Settings.llm = CacheBlendLLM(engine=engine, max_tokens=64)
        response = index.as_query_engine().query("Who is the captain?")
    """

    engine: BlendEngine = Field(exclude=True)
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_repeating: bool = False
    logprobs: int | None = None
    stop: list[str] | None = None
    ratio: float | Literal["auto"] | None = None
    policy: str | None = None
    check_layers: tuple[int, ...] | None = None
    quality: Quality | None = None
    on_miss: OnMiss = "warn"
    context_window: int | None = None
    is_chat_model: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    _inbox: Inbox | None = PrivateAttr(default=None)
    _explicit: tuple[Chunk, ...] = PrivateAttr(default=())
    _record: list[dict[str, Any]] | None = PrivateAttr(default=None)
    _calls_tools: bool | None = PrivateAttr(default=None)

    def __init__(
        self,
        *,
        engine: BlendEngine | EngineName | None = None,
        model: str | None = None,
        store: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        writer: str | None = None,
        threads: int | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
        watch_retrieval: bool = True,
        set_tokenizer: bool = True,
        **data: Any,
    ) -> None:
        """Use a given engine, or open a named engine, which all LLMs with the same names share.

        Args:
            engine: The engine that answers, which the LLM does not close; or ``"vllm"``, to run the named model on
                vLLM.
            model: Directory, GGUF file, hub name, ``"smollm2"`` or ``"bundled"``; with ``base_url`` the name that the
                server must serve. Without both, the environment names the engine: ``CACHEBLEND_BASE_URL``, or
                ``CACHEBLEND_MODEL`` and ``CACHEBLEND_STORE``.
            store: Location of stored KV: a directory, or tiers by address. None stores KV in RAM.
            device: ``"cpu"``, ``"cuda"``... None takes CUDA if available.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None takes fp32 on a CPU, else the model's own.
            writer: KV writer of the chunks: its directory, ``"probe"`` or ``"none"``; None takes the model's own.
            threads: CPU threads of torch in the whole process; the last LLM with a number decides.
            base_url: Address of a `cacheblend serve`, which runs the model.
            api_key: Key for the server; None takes ``CACHEBLEND_API_KEY`` from the environment.
            timeout: Longest wait for the next piece of the server's answer, in seconds.
            max_retries: Number of times that a request is sent to the server again.
            watch_retrieval: Register the chunks that LlamaIndex's retrievers return, so that unchanged query engines
                reuse KV. Otherwise :class:`CacheBlendRetriever` or :class:`CacheBlendPrecompute` must register them.
            set_tokenizer: Make the model's tokenizer LlamaIndex's global tokenizer, unless you have set another. Without
                it, LlamaIndex counts with GPT-2's tokenizer, and prompts overflow.
            data: The attributes above, and the attributes of every LlamaIndex LLM (`system_prompt`,
                `callback_manager`...).

        Raises:
            InputError: An attribute does not exist, an option is out of range, or engine and names are both given.
            ModelError, ServerError, StoreError: The named engine cannot be opened.
        """
        data = with_usual_names({**data, "timeout": timeout})
        named: dict[str, Any] = {"model": model, "store": store, "device": device, "dtype": dtype, "writer": writer}
        named |= {"threads": threads, "base_url": base_url, "api_key": api_key, "max_retries": max_retries}
        named["timeout_s"] = data.pop("timeout")
        if unknown := set(data) - set(type(self).model_fields) - {"class_name"}:
            raise InputError(f"{type(self).__name__} has no {listed(unknown)}.")
        # Check before pydantic coerces the values, so that the error messages are the same as a call's.
        check_given(data)
        super().__init__(**{**data, "engine": shared_engine(engine=engine, **named)})
        check_window(self)
        watch_retrievals()
        if watch_retrieval:
            self._inbox = watch_for(self.engine)
        if set_tokenizer:
            count_with(self.tokenizer)

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the class."""
        return "CacheBlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Return context window, room for the answer and model name."""
        window = self.context_window or self.engine.context_window
        return LLMMetadata(
            context_window=window,
            num_output=answer_tokens(self.max_tokens, window),
            is_chat_model=self.is_chat_model,
            model_name=self.engine.fingerprint.name,
            is_function_calling_model=self.calls_tools,
        )

    @property
    def calls_tools(self) -> bool:
        """Return whether the chat template shows tools and the engine's guided decoding can force calls."""
        if self._calls_tools is None:
            self._calls_tools = self.engine.supports_json_schema and reads_tools(self.engine.tokenizer)
        return self._calls_tools

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """Return the model's tokenizer in LlamaIndex's form: text to token ids, without special tokens. Thread-safe."""
        return encoder_for(self.engine.tokenizer).document

    def with_options(self, **options: Any) -> Self:
        """Return a copy with ``options`` from :data:`LLM_OPTIONS` replaced; the other options stay.

        Raises:
            InputError: A value is of a wrong type or out of range.
        """
        options = options_of(self, with_usual_names(options))
        check_given({"on_miss": self.on_miss, **options})
        copy = self.model_copy(update=options)
        check_window(copy)
        return copy

    def holding(self, chunks: Sequence[Chunk], record: list[dict[str, Any]] | None = None) -> Self:
        """Return a copy for prompts that hold exactly ``chunks``; the copy searches for them before all other chunks.

        Args:
            chunks: Chunks registered with this engine.
            record: List to append the `raw` of every call of the copy to.
        """
        copy = self.model_copy()
        copy._explicit, copy._record = tuple(chunks), record
        return copy

    @llm_chat_callback()  # type: ignore[untyped-decorator, unused-ignore]
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        return self._answer(self._chat(messages, kwargs), chat_response)

    @llm_completion_callback()  # type: ignore[untyped-decorator, unused-ignore]
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt; see :meth:`_of_text` for its formatting."""
        return self._answer(self._request(self._of_text(prompt, formatted), kwargs), completion_response)

    @llm_chat_callback()  # type: ignore[untyped-decorator, unused-ignore]
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat piece by piece; the last piece has the usage. Closing the generator stops the computation."""
        return self._pieces(self._chat(messages, kwargs), chat_response)

    @llm_completion_callback()  # type: ignore[untyped-decorator, unused-ignore]
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a prompt piece by piece."""
        return self._pieces(self._request(self._of_text(prompt, formatted), kwargs), completion_response)

    @llm_chat_callback()  # type: ignore[untyped-decorator, unused-ignore]
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat asynchronously; see :meth:`chat`. The prompt, too, is built off the event loop."""
        return await self._aanswer(await asyncio.to_thread(self._chat, messages, kwargs), chat_response)

    @llm_completion_callback()  # type: ignore[untyped-decorator, unused-ignore]
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt asynchronously; see :meth:`complete`."""
        asked = await asyncio.to_thread(self._request, self._of_text(prompt, formatted), kwargs)
        return await self._aanswer(asked, completion_response)

    @llm_chat_callback()  # type: ignore[untyped-decorator, unused-ignore]
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat asynchronously; see :meth:`stream_chat`. A cancelled consumer stops it at the next token."""
        return self._apieces(await asyncio.to_thread(self._chat, messages, kwargs), chat_response)

    @llm_completion_callback()  # type: ignore[untyped-decorator, unused-ignore]
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Complete a prompt asynchronously; see :meth:`stream_complete`."""
        asked = await asyncio.to_thread(self._request, self._of_text(prompt, formatted), kwargs)
        return self._apieces(asked, completion_response)

    def structured_predict(
        self, output_cls: type[BaseModel], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **args: Any
    ) -> Any:
        """Predict an object: by guided decoding if the engine has it, else LlamaIndex prompts for it and parses it."""
        return super().structured_predict(output_cls, prompt, self._guided(output_cls, llm_kwargs), **args)

    async def astructured_predict(
        self, output_cls: type[BaseModel], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **args: Any
    ) -> Any:
        """Predict an object asynchronously; see :meth:`structured_predict`."""
        return await super().astructured_predict(output_cls, prompt, self._guided(output_cls, llm_kwargs), **args)

    def _guided(self, output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        # If the model calls tools, LlamaIndex forces a tool call with the object as its arguments.
        guided = self.engine.supports_json_schema and not self.calls_tools
        return {**({"json_schema": output_cls.model_json_schema()} if guided else {}), **(llm_kwargs or {})}

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return chat_arguments(tools, user_msg, chat_history, tool_required, kwargs)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls of an answer.

        Raises:
            ValueError: The answer has no call, and ``error_on_no_tool_call`` is set.
        """
        return selections(response, error_on_no_tool_call)

    def _of_messages(self, messages: Sequence[ChatMessage]) -> Build:
        """Return the builder of a chat's prompt: your `messages_to_prompt` if given, else the chat template."""
        render = self.messages_to_prompt
        if render is not None and render is not generic_messages_to_prompt:
            return of_text(self.engine, render(messages))
        return of_messages(self.engine, messages, self.chat_template_kwargs)

    def _of_text(self, prompt: str, formatted: bool) -> Build:
        """Return the builder of a completion's prompt.

        The prompt is used as it is if it is formatted, if your `completion_to_prompt` formats it, or if the model has
        no chat template. Otherwise it becomes a user's message, as with every chat model of LlamaIndex.
        """
        wrap = self.completion_to_prompt
        if not formatted and wrap is not None and wrap is not default_completion_to_prompt:
            prompt, formatted = wrap(prompt), True
        if formatted or not self.is_chat_model or not getattr(self.engine.tokenizer, "chat_template", None):
            return of_text(self.engine, prompt)
        return self._of_messages([ChatMessage(role=MessageRole.USER, content=prompt)])

    def _chat(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Asked:
        return self._request(self._of_messages(messages), kwargs, chat=True)

    def _request(self, build: Build, kwargs: dict[str, Any], chat: bool = False) -> Asked:
        if self._inbox is not None:
            self._inbox.register(self.engine)
        return make_request(build, self, [chunk.id for chunk in self._explicit], kwargs, chat)

    def _answer(self, asked: Asked, make: _Make[_Response]) -> _Response:
        return self._made(asked.answer(), asked, make)

    async def _aanswer(self, asked: Asked, make: _Make[_Response]) -> _Response:
        return self._made(await asked.aanswer(), asked, make)

    def _made(self, done: Generation, asked: Asked, make: _Make[_Response]) -> _Response:
        part = asked.read(done.text)
        return with_calls(with_thoughts(make(part.text, None, self._raw(done, asked)), part.reasoning), part.calls)

    def _raw(self, generation: Generation, asked: Asked) -> dict[str, Any]:
        raw = raw_of(generation, asked)
        if self._record is not None:
            self._record.append(raw)
        return raw

    def _pieces(self, asked: Asked, make: _Make[_Response]) -> Generator[_Response, None, None]:
        # Outside the generator, so that the call itself refuses a prompt that cannot be answered, not its first piece.
        events = asked.events()

        def generator() -> Generator[_Response, None, None]:
            said = Parts("")
            with events as stream:
                for event in stream:
                    said, piece = self._piece(said, event, make, asked)
                    yield piece

        return generator()

    async def _apieces(self, asked: Asked, make: _Make[_Response]) -> AsyncGenerator[_Response, None]:
        said = Parts("")
        async with asked.aevents() as stream:
            async for event in stream:
                said, piece = self._piece(said, event, make, asked)
                yield piece

    def _piece(
        self, before: Parts, event: StreamEvent, make: _Make[_Response], asked: Asked
    ) -> tuple[Parts, _Response]:
        """Return all text so far, and the next piece of the answer; the last piece has the tool calls."""
        done = event.generation
        new, calls, thought = asked.read(event.text, last=done is not None)
        said = Parts(before.answer + new, before.reasoning + thought)
        response = make(said.answer, new, None if done is None else self._raw(done, asked))
        return said, with_calls(with_thoughts(response, said.reasoning, thought), calls)

    def __getstate__(self) -> dict[str, Any]:
        """Raise InputError if the engine cannot be pickled."""
        refuse_unpicklable(self.engine, type(self).__name__)
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy that shares the engine."""
        return self.model_copy()
