"""Builds the engine input of a request: chunks found in the rendered prompt contribute their own token ids.

vLLM's renderer does all of its own work first: templates, tools, limits, errors. Only the token ids of a prompt with chunks are
replaced, because a chunk's tokens must be the tokens that the chunk's KV was computed for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, encoder_for
from cacheblend_rag.prompts.placing import Piece, search_rendered
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkSpan, TokenizedPrompt, tokenize
from cacheblend_rag.prompts.templates import SEPARATOR
from cacheblend_rag.protocol import RequestOptions, read_options
from cacheblend_rag.server.amounts import CHARACTERS_A_TOKEN
from cacheblend_rag.server.harmony import rendered_text, why_not_as
from cacheblend_rag.server.naming import ChunkNaming, lead_text, search_contents, texts_in, tokens_match
from cacheblend_rag.server.served_engine import REQUEST_FIELD, Ticket, clients_salt, refused, with_ticket
from cacheblend_rag.server.tenants import calling
from cacheblend_rag.spans import recording, span

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
    """Replaces vLLM's ``OnlineRenderer``, and delegates all other attributes to it.

    Searching and tokenising long prompts takes milliseconds, so both run off the event loop, which streams other answers. If
    the rendered text does not show where vLLM's template has put the chunks, the request is rendered once more with stand-ins
    for its texts (:mod:`cacheblend_rag.prompts.placing`).
    """

    use_harmony = False  # otherwise vLLM would render batches for gpt-oss without this class

    def __init__(self, inner: OnlineRenderer, client: BlendClient, catalogue: ChunkCatalogue):
        self._inner, self._client, self._catalogue = inner, client, catalogue
        self._naming = ChunkNaming(client.tokenizer, client.registry, catalogue.note)
        self._most = CHARACTERS_A_TOKEN * client.context_window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def render_chat(
        self, request: ChatCompletionRequest, *, skip_mm_cache: bool = False
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """Render a chat and find its chunks; replaces vLLM's ``render_chat``.

        Raises:
            VLLMValidationError: A field of this library is malformed, or names an unknown chunk.
        """
        options = await asyncio.to_thread(self._begin, request)
        request.messages, named = await asyncio.to_thread(self._named, request.messages, options)
        again = request.model_copy()  # a copy from before rendering, which changes a request
        result = await self._inner.render_chat(request, skip_mm_cache=skip_mm_cache)
        if isinstance(result, ErrorResponse):
            return result
        conversation, inputs = result

        async def skeleton(probed: Sequence[Any]) -> Any:
            again.messages = probed[0]
            answer = await self._inner.render_chat(again, skip_mm_cache=True)
            return None if isinstance(answer, ErrorResponse) else answer[1][0]

        with span("cacheblend.find"):
            found = await self._found(inputs, [request.messages], named, skeleton)
        return conversation, await self._finished(request, inputs, options, found)

    async def preprocess_chat(
        self, request: ChatCompletionRequest, *_: Any, **__: Any
    ) -> tuple[list[ConversationMessage], list[EngineInput]]:
        """Render one chat of a batch; replaces vLLM's ``preprocess_chat``.

        Raises:
            VLLMValidationError: The chat cannot be rendered.
        """
        calling.get().chats += 1
        rendered = await self.render_chat(request)
        if isinstance(rendered, ErrorResponse):
            raise VLLMValidationError(rendered.error.message)
        return rendered

    async def render_completion(
        self, request: CompletionRequest, *, skip_mm_cache: bool = False
    ) -> list[EngineInput] | ErrorResponse:
        """Render prompts and find their chunks; replaces vLLM's ``render_completion``.

        Raises:
            VLLMValidationError: A field of this library is malformed, or names an unknown chunk.
        """
        options = await asyncio.to_thread(self._begin, request)
        leads: list[list[Chunk]] = []
        if options.chunk_ids:
            request.prompt, leads = await asyncio.to_thread(self._led, request.prompt, options.chunk_ids)
        result: list[EngineInput] = []
        for each in _one_by_one(request):
            rendered = await self._inner.render_completion(each, skip_mm_cache=skip_mm_cache)
            if isinstance(rendered, ErrorResponse):
                return rendered
            result += rendered
        with span("cacheblend.find"):
            found = await asyncio.to_thread(self._found_in_texts, request, result, options, leads)
        return await self._finished(request, result, options, found)

    async def render_responses(
        self, request: ResponsesRequest, **options: Any
    ) -> ResponsesRenderResult | ErrorResponse:
        """Render a request of the Responses API and find its chunks; replaces vLLM's ``render_responses``.

        Raises:
            VLLMValidationError: A field of this library is malformed, or names chunks (``chunk_ids``, ``spans``).
        """
        chosen = await asyncio.to_thread(self._begin, request)
        if chosen.chunk_ids or chosen.spans:
            raise VLLMValidationError(
                "The Responses API finds registered chunks by their text; chunk_ids and spans go with chat completions and "
                "completions.",
                parameter="chunk_ids",
            )
        again = request.model_copy()
        result = await self._inner.render_responses(request, **options)
        if isinstance(result, ErrorResponse):
            return result

        async def skeleton(probed: Sequence[Any]) -> Any:
            again.instructions, again.input = probed
            answer = await self._inner.render_responses(again, **options)
            return None if isinstance(answer, ErrorResponse) else answer.engine_input

        inputs = [result.engine_input]
        with span("cacheblend.find"):
            found = await self._found(inputs, [request.instructions, request.input], (), skeleton)
        (engine_input,) = await self._finished(request, inputs, chosen, found)
        return replace(result, engine_input=engine_input)

    def _named(self, messages: Any, options: RequestOptions) -> tuple[list[Any], tuple[str, ...]]:
        with refused():
            return self._naming.messages(messages, self._affordable(options.chunk_ids, [messages]))

    def _led(self, prompt: Any, chunk_ids: Sequence[str]) -> tuple[Any, list[list[Chunk]]]:
        with refused():
            return self._naming.prompts(prompt, self._affordable(chunk_ids, prompt))

    def _affordable(self, chunk_ids: Sequence[str], said: Any) -> Sequence[str]:
        """Return ``chunk_ids``; raises InputError, before any search, if the chunks or the texts exceed the context window."""
        window = self._client.context_window
        tokens = sum(len(chunk.token_ids) for chunk in self._naming.resolved(chunk_ids))
        if tokens > window:
            raise InputError(f"The chunks in chunk_ids have {tokens} tokens; the context window is {window}.")
        characters = sum(map(len, texts_in(said)))
        if chunk_ids and characters > self._most:
            raise InputError(
                f"The prompt has {characters} characters; no more than {self._most} fit the context window."
            )
        return chunk_ids

    async def _found(
        self,
        inputs: Sequence[Any],
        said: Sequence[Any],
        named: Sequence[str],
        skeleton: Callable[[Sequence[Any]], Awaitable[Any]],
    ) -> list[list[Piece]]:
        """Return the pieces of each rendered prompt that contains chunks, and an empty list for each other prompt."""
        nothing: list[list[Piece]] = [[] for _ in inputs]
        encoder, registry = encoder_for(self._client.tokenizer), self._client.registry
        chunks = self._naming.resolved(named)
        with refused():
            searched = await asyncio.to_thread(search_contents, said, registry, chunks, encoder, self._most)
        if searched is None:
            return nothing
        contents, probed = searched
        read = partial(rendered_text, tokenizer=self._client.tokenizer, harmony=self._inner.use_harmony)
        rendered = await asyncio.to_thread(read, inputs[0]) if len(inputs) == 1 else None
        if rendered is None:
            if contents.spells(encoder):
                raise VLLMValidationError(
                    "A registered chunk stands in this prompt that spells special tokens. In a prompt that is not text alone "
                    "they would steer the model: leave out the chunk, or what is not text."
                )
            return nothing
        pieces = await asyncio.to_thread(contents.found_in, rendered, encoder)
        if pieces is None:
            try:
                probing = await asyncio.to_thread(read, await skeleton(probed) or {})
            except (ValueError, VLLMValidationError):  # the template depends on the texts
                probing = None
            pieces = await asyncio.to_thread(contents.placed, rendered, probing or "", registry, encoder)
        return [pieces]

    def _found_in_texts(
        self, request: CompletionLike, inputs: Sequence[Any], options: RequestOptions, leads: Sequence[Sequence[Chunk]]
    ) -> list[list[Piece]]:
        """Return the pieces of prompts without a template; ``leads`` holds the chunks that were put in front of each prompt."""
        found: list[list[Piece]] = []
        named = self._naming.resolved(options.chunk_ids)
        for engine_input, lead in zip(inputs, [*leads, *([] for _ in inputs)], strict=False):
            text, before = str(engine_input.get("prompt") or ""), lead_text(lead)
            if not text.startswith(before):
                raise VLLMValidationError(
                    "chunk_ids go in front of a prompt as it is, with no suffix, and not cut by its characters.",
                    parameter="chunk_ids",
                )
            rest = text[len(before) :]
            pieces: list[Piece] = [piece for chunk in lead for piece in (chunk, SEPARATOR)]
            if len(rest) <= self._most and not _why_not(request):
                pieces += search_rendered(rest, self._client.registry, named, encoder_for(self._client.tokenizer))
            elif pieces:
                pieces.append(rest)
            found.append(pieces)
        return found

    def _begin(self, request: CompletionLike) -> RequestOptions:
        if request.kv_transfer_params is not None:
            raise VLLMValidationError(
                "kv_transfer_params is not for clients of this server. Name chunks with chunk_ids, or by the id of a text block.",
                parameter="kv_transfer_params",
            )
        with refused("cacheblend"):
            options = read_options(request.model_extra)
            # Also resolved here, so that a wrong option is refused even if the prompt is not blended.
            self._client.resolve(options.settings)
        return options

    async def _finished(self, request: CompletionLike, *rendered: Any) -> list[EngineInput]:
        done = await asyncio.to_thread(self._finish, request, *rendered)
        self._admit(request, done)
        return done

    def _admit(self, request: CompletionLike, inputs: Sequence[Any]) -> None:
        """Count a request's answers for its tenant; raises an error if the tenant's quota does not allow them."""
        caller, n, most = calling.get(), getattr(request, "n", None) or 1, _most_tokens(request)
        sequences = max(n * len(inputs), caller.chats)
        prompts = sum(len(each.get("prompt_token_ids") or ()) for each in inputs)
        logprobs, quota = 0, caller.admission.quota
        if (each := _prompt_logprobs(request)) is not None:
            logprobs = n * prompts * (1 + (each if each >= 0 else self._client.tokenizer.vocab_size))
            prompts *= 1 + n  # counted as in :class:`TokensUsed`
        with refused():
            quota.check_request(sequences, prompts + sequences * (most or 1), logprobs)
        if most is None and (rate := quota.tokens_per_minute) is not None:
            longest = (rate - prompts) // sequences
            if longest < self._client.context_window:
                setattr(request, _limit_field(request), longest)
        if getattr(request, "use_beam_search", False):
            caller.unpaid = prompts
        if (refusal := caller.count(sequences)) is not None:
            raise GracefulHTTPError(refusal[0], HTTPStatus.TOO_MANY_REQUESTS)

    def _finish(
        self,
        request: CompletionLike,
        inputs: list[EngineInput],
        options: RequestOptions,
        found: Sequence[Sequence[Piece]],
    ) -> list[EngineInput]:
        if options.spans and (len(inputs) != 1 or hasattr(request, "messages")):
            raise VLLMValidationError("spans go with one prompt of token ids.", parameter="cacheblend.spans")
        why_not = _why_not(request)
        done, tickets = [], []
        for engine_input, pieces in zip(inputs, found, strict=True):
            ticket, blended = Ticket(reason=why_not), engine_input
            if engine_input.get("type") == "token":
                blended = self._blended(request, engine_input, options, pieces, ticket)
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
        pieces: Sequence[Piece],
        ticket: Ticket,
    ) -> Any:
        if options.spans and not ticket.reason:
            prompt = self._spanned(tuple(engine_input["prompt_token_ids"]), options)
        elif any(not isinstance(piece, str) for piece in pieces):
            prompt = tokenize(BlendPrompt(tuple(pieces)), self._client.tokenizer, self._client.registry)
            if "prompt" not in engine_input:  # rendered by harmony
                made, rendered = prompt.token_ids, engine_input["prompt_token_ids"]
                ticket.reason = ticket.reason or why_not_as(rendered, made, self._client.tokenizer)
                if ticket.reason:
                    return engine_input
        else:
            return engine_input
        if ticket.reason:
            # Not blended, but special tokens spelled in documents must still be data.
            tokens: Any = {"prompt_token_ids": list(prompt.token_ids)}
            limits = request.build_tok_params(self._inner.model_config)
            tokens = limits.apply_post_tokenization(self._inner.renderer.tokenizer, tokens)
        else:
            self._check_length(request, len(prompt.token_ids))
            salt = clients_salt(engine_input.get("cache_salt"))
            tokens, ticket.params = self._client.tokens_prompt(
                prompt, self._client.resolve(options.settings), salt, recording()
            )
            if not ticket.params:
                tokens.pop("cache_salt", None)  # ServedEngine adds the salt, as to every prompt that is not blended
        offsets = "prompt_token_offsets"  # offsets of tokens that have been replaced
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
            # The prompt's tokens decide: if the registered chunk has other tokens, the span becomes a chunk of its own.
            chunk = known if known is not None and known.token_ids == own else Chunk(body.id, "", own)
            if known is None and body.text and tokens_match(self._client.tokenizer, body.text, own):
                chunk = replace(chunk, text=body.text)
                self._catalogue.note(chunk)
            spans.append(ChunkSpan(chunk, body.start, body.end))
        return TokenizedPrompt(token_ids, tuple(spans))

    def _check_length(self, request: CompletionLike, prompt_tokens: int) -> None:
        wanted, window = _most_tokens(request) or 1, self._client.context_window
        if prompt_tokens + wanted > window:
            raise VLLMValidationError(
                f"The prompt has {prompt_tokens} tokens; with {wanted} to generate that exceeds the context window of {window}.",
                parameter="input_tokens",
            )


def _one_by_one(request: CompletionRequest) -> Iterator[CompletionRequest]:
    """Yield a request for each text of a batch: vLLM tokenises in one thread, and other requests get turns between texts."""
    texts = request.prompt if isinstance(request.prompt, list) else []
    if request.prompt_embeds is None and isinstance(next(iter(texts), None), str):
        for text in texts:
            yield request.model_copy(update={"prompt": [text]})
    else:
        yield request


def _limit_field(request: CompletionLike) -> str:
    """Return the name of the field that limits the length of an answer."""
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    return next(name for name in names if name in type(request).model_fields)


def _most_tokens(request: CompletionLike) -> int | None:
    """Return the most tokens of each answer to a request; None if the request sets no limit."""
    found = getattr(request, _limit_field(request))
    return getattr(request, "max_tokens", None) if found is None else found


def _prompt_logprobs(request: CompletionLike) -> int | None:
    """Return the logprobs asked for at each prompt token beside the token's own, as vLLM reads a request; None for none."""
    asked = getattr(request, "prompt_logprobs", None)
    if asked is None and getattr(request, "echo", False):
        asked = getattr(request, "top_logprobs", None) or getattr(request, "logprobs", None) or 0
    return None if asked is None else int(asked)


def _why_not(request: CompletionLike) -> str:
    """Return why a request's prompt cannot be blended; empty if it can."""
    if getattr(request, "use_beam_search", False):
        return "beam search is served by ordinary prefill"
    if _prompt_logprobs(request) is not None:
        return "logprobs of the prompt and echo need every prompt token computed"
    truncated = getattr(request, "truncate_prompt_tokens", None)
    if truncated is not None or getattr(request, "truncation", "disabled") == "auto":
        return "a truncated prompt is served by ordinary prefill"
    if getattr(request, "suffix", None) is not None:
        return "a prompt with a suffix is served by ordinary prefill"
    return ""
