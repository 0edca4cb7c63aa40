"""From a request to the engine's input: chunks are found in what vLLM has rendered, and bring their own token ids.

vLLM's renderer does all of its own work first: templates, tools, limits, errors. Only the token ids of a prompt that holds
chunks are replaced, because a chunk's tokens must be those its KV was computed for.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt, text_prompt, tokenize
from cacheblend_rag.protocol import RequestOptions, read_options
from cacheblend_rag.server.naming import ChunkNaming, tokens_match
from cacheblend_rag.server.ticket import REQUEST_FIELD, Ticket, with_ticket

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.inputs import EngineInput
    from vllm.renderers.chat_utils import ConversationMessage
    from vllm.renderers.online_renderer import OnlineRenderer, ResponsesRenderResult

    from cacheblend_rag.engines.vllm.client import BlendClient
    from cacheblend_rag.server.catalogue import ChunkCatalogue

    CompletionLike = ChatCompletionRequest | CompletionRequest | ResponsesRequest


class BlendRenderer:
    """Stands in for vLLM's ``OnlineRenderer``; what it does not know itself, that one does.

    Searching and tokenising long prompts takes milliseconds: it is done off the event loop, which streams other answers.
    """

    def __init__(self, inner: OnlineRenderer, client: BlendClient, catalogue: ChunkCatalogue):
        """Blend what ``inner`` renders."""
        self._inner, self._client, self._catalogue = inner, client, catalogue
        self._naming = ChunkNaming(client.tokenizer, client.registry, catalogue.note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def render_chat(
        self, request: ChatCompletionRequest, *, skip_mm_cache: bool = False
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """Render a chat; see vLLM's method of that name.

        Raises:
            VLLMValidationError: Our own fields are malformed, or name an unknown chunk.
        """
        options = await asyncio.to_thread(self._begin, request)
        try:
            naming = self._naming.messages
            request.messages, named = await asyncio.to_thread(naming, request.messages, options.chunk_ids)
        except InputError as error:
            raise VLLMValidationError(str(error)) from error
        result = await self._inner.render_chat(request, skip_mm_cache=skip_mm_cache)
        if isinstance(result, ErrorResponse):
            return result
        conversation, inputs = result
        return conversation, await asyncio.to_thread(self._finish, request, inputs, options, named)

    async def render_completion(
        self, request: CompletionRequest, *, skip_mm_cache: bool = False
    ) -> list[EngineInput] | ErrorResponse:
        """Render prompts; see vLLM's method of that name.

        Raises:
            VLLMValidationError: Our own fields are malformed, or name an unknown chunk.
        """
        options = await asyncio.to_thread(self._begin, request)
        if options.chunk_ids:
            try:
                request.prompt = self._naming.prompts(request.prompt, options.chunk_ids)
            except InputError as error:
                raise VLLMValidationError(str(error)) from error
        result = await self._inner.render_completion(request, skip_mm_cache=skip_mm_cache)
        if isinstance(result, ErrorResponse):
            return result
        return await asyncio.to_thread(self._finish, request, result, options, options.chunk_ids)

    async def render_responses(
        self, request: ResponsesRequest, **options: Any
    ) -> ResponsesRenderResult | ErrorResponse:
        """Render a request of the Responses API; see vLLM's method of that name.

        Raises:
            VLLMValidationError: Our own fields are malformed.
        """
        chosen = await asyncio.to_thread(self._begin, request)
        if chosen.chunk_ids or chosen.spans:
            raise VLLMValidationError(
                "The Responses API finds registered chunks by their text; chunk_ids and spans go with chat completions and "
                "completions.",
                parameter="chunk_ids",
            )
        result = await self._inner.render_responses(request, **options)
        if isinstance(result, ErrorResponse):
            return result
        (engine_input,) = await asyncio.to_thread(self._finish, request, [result.engine_input], chosen, ())
        return replace(result, engine_input=engine_input)

    def _begin(self, request: CompletionLike) -> RequestOptions:
        if request.kv_transfer_params is not None:
            raise VLLMValidationError(
                "kv_transfer_params is not for clients of this server. Name chunks with chunk_ids, or by the id of a text block.",
                parameter="kv_transfer_params",
            )
        try:
            options = read_options(request.model_extra)
            # Here, not only where a prompt is blended: a wrong option is refused whatever the prompt holds.
            self._client.resolve(options.settings)
        except InputError as error:
            raise VLLMValidationError(str(error), parameter="cacheblend") from error
        self._catalogue.refresh()
        return options

    def _finish(
        self, request: CompletionLike, inputs: list[EngineInput], options: RequestOptions, named: tuple[str, ...]
    ) -> list[EngineInput]:
        if options.spans and len(inputs) != 1:
            raise VLLMValidationError("spans go with one prompt of token ids.", parameter="cacheblend.spans")
        why_not = _why_not(request)
        done, tickets = [], []
        for engine_input in inputs:
            ticket, blended = Ticket(reason=why_not), engine_input
            if not why_not and engine_input.get("type") == "token":
                blended = self._blended(request, engine_input, options, named, ticket)
            elif not why_not:
                ticket.reason = "the prompt is not text alone"
            if options.settings.reuse == "off" and not why_not:
                ticket.exact, ticket.reason = True, "reuse was switched off"
            done.append(with_ticket(blended, ticket))
            tickets.append(ticket)
        setattr(request, REQUEST_FIELD, tickets)
        return done

    def _blended(
        self,
        request: CompletionLike,
        engine_input: Any,
        options: RequestOptions,
        named: tuple[str, ...],
        ticket: Ticket,
    ) -> Any:
        text = engine_input.get("prompt")
        if options.spans:
            prompt = self._spanned(tuple(engine_input["prompt_token_ids"]), options)
        elif isinstance(text, str):
            found = text_prompt(text, self._client.registry, chunk_ids=named)
            if not any(isinstance(segment, Chunk) for segment in found.segments):
                return engine_input
            prompt = tokenize(found, self._client.tokenizer, self._client.registry)
        else:
            return engine_input
        self._check_length(request, len(prompt.token_ids))
        tokens, ticket.params = self._client.tokens_prompt(prompt, options.settings, engine_input.get("cache_salt"))
        offsets = "prompt_token_offsets"  # of tokens that are no longer those of the prompt
        return {**{name: value for name, value in engine_input.items() if name != offsets}, **tokens}

    def _spanned(self, token_ids: tuple[int, ...], options: RequestOptions) -> TokenizedPrompt:
        spans, end = [], 0
        for body in options.spans:
            if not end <= body.start < body.end <= len(token_ids):
                raise VLLMValidationError(
                    f"The span {body.start} to {body.end} of chunk {body.id!r} overlaps the one before it or lies outside the "
                    f"prompt of {len(token_ids)} tokens.",
                    parameter="cacheblend.spans",
                )
            end = body.end
            own = token_ids[body.start : body.end]
            known = self._client.registry.get(body.id)
            # The prompt's tokens decide: an id that means other tokens here is another chunk to this client.
            chunk = known if known is not None and known.token_ids == own else Chunk(body.id, "", own)
            if known is None and body.text and tokens_match(self._client.tokenizer, body.text, own):
                chunk = replace(chunk, text=body.text)
                self._catalogue.note(chunk)
            spans.append(ChunkSpan(chunk, body.start, body.end))
        return TokenizedPrompt(token_ids, tuple(spans))

    def _check_length(self, request: CompletionLike, prompt_tokens: int) -> None:
        names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
        wanted = next((value for name in names if (value := getattr(request, name, None))), 1)
        window = self._client.context_window
        if prompt_tokens + wanted > window:
            raise VLLMValidationError(
                f"The prompt has {prompt_tokens} tokens; with {wanted} to generate that exceeds the context window of {window}.",
                parameter="max_tokens",
            )


def _why_not(request: CompletionLike) -> str:
    """Return why this request's prompt cannot be blended; empty if it can."""
    if getattr(request, "use_beam_search", False):
        return "beam search is served by ordinary prefill"
    if getattr(request, "prompt_logprobs", None) is not None or getattr(request, "echo", False):
        return "logprobs of the prompt and echo need every prompt token computed"
    if (
        getattr(request, "truncate_prompt_tokens", None) is not None
        or getattr(request, "truncation", "disabled") == "auto"
    ):
        return "a truncated prompt is served by ordinary prefill"
    if getattr(request, "suffix", None) is not None:
        return "a prompt with a suffix is served by ordinary prefill"
    return ""
