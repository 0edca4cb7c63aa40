"""Answers prompts with a Hugging Face causal LM on CPU or GPU, and blends through the model's own forward."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Collection, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch

from cacheblend_rag.blending.controller import Choice, choose, controlled
from cacheblend_rag.blending.costs import Computed, MeasuredCost
from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.plan import BlendPlan, PlannedChunk, origins
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.blending.trace import DECODE, PREFILL, REST, Trace, computing
from cacheblend_rag.blending.transfer import whole_numbers
from cacheblend_rag.engines.base import Prompt, Request
from cacheblend_rag.engines.entries import Entries, SideBySide
from cacheblend_rag.engines.results import Generation, GivenUp, StreamEvent, Timings, iterate_in_thread
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.spans import RequestSpans
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache, PositionedCache
from cacheblend_rag.engines.transformers.decoding import GUIDED, AnswerBuilder, Guide
from cacheblend_rag.engines.transformers.owner import ModelOwner
from cacheblend_rag.engines.transformers.prefixes import CachedPrefix, PromptKey
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.prompts.templates import turn_ends, turn_lead
from cacheblend_rag.store.kv import StoredKV


class PromptRun:
    """Runs one prompt: prefills it, generates the answer, and finally releases the KV.

    Once nobody waits for the answer any more, the computation stops with GivenUp.

    Attributes:
        plan: Blend plan for the tokens behind those whose KV came from the prefix cache.
        logits: Logits of the last token so far, ``[vocab]``.
        outcome: Outcome of the prompt.
        cache: KV of the prompt and the answer; None before the prefill and after the run.
    """

    plan: BlendPlan
    logits: torch.Tensor
    outcome: PromptOutcome
    cache: PositionedCache | ModelsOwnCache | None = None
    _trace: Trace | None = None
    _began = 0.0  # start of the computation

    def __init__(self, model: ModelOwner, request: Request, gone: threading.Event | None = None):
        self._model, self._request = model, request
        self._gone = gone or threading.Event()  # set once nobody waits for the answer any more
        self._costs = model.costs  # the costs before this prompt corrects them
        self._key, self._kept = self._prefix_key(), CachedPrefix()
        names = {span.chunk.id for span in request.prompt.spans}
        self._known = names - model.registry.unknown(names)
        self._tokens: list[int] = []  # tokens of the answer
        self._fed = 0  # number of the answer's tokens in the cache
        self._passes, self._watched = 1.0, 0  # see FuseResult

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Copy the KV to the prefix cache, release stored KV, and write back missing KV."""
        if self.cache is None:
            return
        key, cache, self.cache = self._key, self.cache, None
        gone = self._model.registry.unknown(self._known)  # chunks forgotten meanwhile: none of their KV may stay
        own, missing = ([c for c in self.plan.lacking(what) if c.id not in gone] for what in ("own_kv", "kv"))
        if own and self._kept.exact and isinstance(cache, PositionedCache):
            (chunk,), begin = own, self._request.prompt.spans[0].start
            layers = [cache.view(n, 0, begin, begin + len(chunk.token_ids)) for n in range(self._model.num_layers)]
            self._model.keep_first(chunk, layers, all(span.kv.exact for span in self.plan.exact))
        if key is not None and not gone and isinstance(cache, PositionedCache):
            exact = self._kept.exact and not self.plan.stale and all(span.kv.exact for span in self.plan.exact)
            tokens = (*key.token_ids, *self._tokens[: self._fed])
            if cache.length == len(tokens):  # false if a token was interrupted
                self._model.prefixes.keep(PromptKey(tokens, () if exact else key.origins, key.namespace), cache)
        del cache
        for span in self.plan.spans:
            span.kv.finish()
        lacking = set(self.outcome.lacking("static")) - gone
        unranked = [span.chunk for span in self.plan.stale if span.chunk and span.chunk.id in lacking]
        self._model.write_back(missing, unranked, self._known)

    def prefill(self, trace: Trace | None) -> None:
        """Compute the prompt's KV and its last token's logits, from stored KV where that is useful."""
        self._trace = trace
        self._look()
        if self._model.profile.blockwise and self._request.options.reuse == "chunks":
            self._model.write_back([span.chunk for span in self._request.prompt.spans], (), self._known)
        unusable: set[tuple[int, ...]] = set()
        late: set[tuple[int, ...]] = set()
        with self._model.lock, self._model.runner.until(self._gone):
            while True:
                self._look()  # other requests may have held the model for long
                try:
                    self.cache = self._prefilled(unusable, late)
                    return
                except UnusableSpanError as error:
                    # The next plan treats these entries as missing and computes their chunks in place. The tier has
                    # dropped damaged entries; entries that cannot be read now remain, and so do copies in other tiers.
                    (late if error.late else unusable).update(error.entries)
                    self._model.learn(MeasuredCost((), error.reads, error.waited_s))

    def _look(self) -> None:
        """Raise GivenUp if nobody waits for the answer any more."""
        if self._gone.is_set():
            raise GivenUp

    def _prefilled(
        self, unusable: Collection[tuple[int, ...]], late: Collection[tuple[int, ...]]
    ) -> PositionedCache | ModelsOwnCache:
        """Plan without ``unusable`` and ``late`` entries, and carry out the plan; return the cache with the prompt."""
        model, prompt, looked = self._model, self._request.prompt, time.perf_counter()
        whole = planned(model, self._request, {*unusable, *late}).after_late(late)
        if self._trace is not None and prompt.spans and self._request.options.reuse != "off":
            whole.record(self._trace, looked)
        cache = model.runner.prompt_cache(len(prompt.token_ids)) if model.gate.passed else ModelsOwnCache()
        if self._key is not None and isinstance(cache, PositionedCache):
            self._kept = model.prefixes.begin(self._key, cache)
        plan = whole.behind_kept(self._kept.tokens, self._kept.exact) if self._kept.tokens else whole
        choice = self._choose(plan)
        self.plan = plan = plan if choice is None else choice.applied_to(plan)
        self._began = time.perf_counter()  # after the look-ups, whose waiting is not computation
        if plan.uses_stored_kv and isinstance(cache, PositionedCache):
            outcome = self._blend(cache, choice)
        else:
            outcome, cache = self._run(cache)
        blended = plan.uses_stored_kv or not self._kept.exact
        self.outcome = replace(
            outcome,
            mode="blend" if blended else "prefill",
            expected_s=None if choice is None else choice.expected_s,
            fingerprint=model.fingerprint.digest,
            calibrated=model.profile.is_calibrated,
        )
        return cache

    def _run(self, cache: PositionedCache | ModelsOwnCache) -> tuple[PromptOutcome, PositionedCache | ModelsOwnCache]:
        """Run the tokens behind ``cache``, or behind a snapshot of the exact prefix, which then replaces ``cache``."""
        model, stored, load_s = self._model, self.plan.uses_stored_kv, 0.0
        if stored:
            assert model.snapshots is not None
            cache = model.snapshots.resume(self.plan.exact)
            load_s = time.perf_counter() - self._began
        ids = whole_numbers(self._request.prompt.token_ids[cache.length :])[None].to(model.device)
        with computing(self._trace, REST if stored else PREFILL, ids.shape[1]):
            self.logits = model.runner.append(ids, cache)[0]
        return replace(self.plan.outcome(ids.shape[1]), load_s=load_s), cache

    def _blend(self, cache: PositionedCache, choice: Choice | None) -> PromptOutcome:
        model = self._model
        assert model.rope is not None
        target = TransformersTarget(model.runner, model.rope, self._request.prompt.token_ids, cache)
        options, most_wait_s = self._request.options, None
        if choice is not None:
            options, most_wait_s = options.at_least(choice.ratio), choice.most_wait_s
        done = fuse(self.plan, target, options, trace=self._trace, most_wait_s=most_wait_s)
        self._passes, self._watched = done.passes, done.watched
        assert target.logits is not None
        self.logits = target.logits
        return done.outcome

    def _choose(self, plan: BlendPlan) -> Choice | None:
        """Return the loading controller's choice of stored KV for the plan; None if the controller has no choice."""
        model, options = self._model, self._request.options
        costs = controlled(model.costs, options)
        if costs is None or not (plan.uses_stored_kv and model.gate.passed):
            return None
        return choose(plan, costs, options)

    def _prefix_key(self) -> PromptKey | None:
        """Return the prompt's key in the prefix cache; None if the prompt must not use the prefix cache."""
        model, prompt, options = self._model, self._request.prompt, self._request.options
        longest = model.runner.longest
        if options.reuse == "off" or not model.gate.passed or (longest and len(prompt.token_ids) > longest):
            return None
        found = origins(
            [(span.start, span.end) for span in prompt.spans],
            prompt.token_ids,
            turn_ends(prompt.token_ids, turn_lead(model.tokenizer)),
            len(model.header_ids),
            options.terms,
            options.watches_question,
        )
        return PromptKey(prompt.token_ids, found, model.namespace.name)

    def answer(self, guide: Guide | None, begin: float) -> Generator[StreamEvent, None, StreamEvent]:
        """Generate the answer to a prompt that arrived at ``begin``.

        Yields:
            Pieces of the answer.

        Returns:
            The last piece, with the whole answer.
        """
        model = self._model
        answer = AnswerBuilder(self._request.sampling, model.tokenizer, model.end_tokens, model.device, guide)
        self._tokens, ttft = answer.tokens, 0.0
        while not answer.finished:
            piece = answer.push(self.logits)
            if not ttft:
                ttft = time.perf_counter() - begin
                self._learn()
                if model.on_first_logits is not None:
                    model.on_first_logits(self.logits)
            if piece is not None:
                yield StreamEvent(piece)
            if not answer.finished:
                self._decode(answer.tokens[-1])
                self._fed = len(answer.tokens)
        timings = Timings(ttft, time.perf_counter() - begin)
        rest, how = answer.flush(), (answer.tokens, answer.finish_reason, timings, answer.logprobs)
        return StreamEvent(rest, Generation.of(self.outcome, answer.text, *how))

    def _decode(self, token: int) -> None:
        """Run a token of the answer."""
        assert self.cache is not None
        ids = torch.tensor([[token]], device=self._model.device)
        with self._model.lock, computing(self._trace, DECODE, 1):
            self._look()
            self.logits = self._model.runner.append(ids, self.cache)[0]

    def _learn(self) -> None:
        """Use the prompt's time, once the first token has arrived: for the outcome and for the controller's costs."""
        outcome, usage, plan = self.outcome, self.outcome.usage, self.plan
        took = time.perf_counter() - self._began - outcome.load_s
        tokens = usage.computed_tokens + usage.selection_tokens
        computed = Computed(tokens, plan.num_tokens, took, plan.stored_tokens, self._passes, self._watched)
        if self._costs is not None:
            prefill_s = self._costs.prefill_s(plan.num_tokens - plan.start, plan.num_tokens, (computed,))
            self.outcome = replace(outcome, prefill_s=prefill_s)
        self._model.learn(MeasuredCost((computed,), outcome.reads, outcome.load_s))


def planned(model: ModelOwner, request: Request, unusable: Collection[tuple[int, ...]] = ()) -> BlendPlan:
    """Look up a prompt's entries, except ``unusable`` ones, and return the blend plan for the entries found."""
    reuse, runner, snapshots = request.options.reuse, model.runner, model.snapshots
    entries = model.entries

    def find(source: Entries, token_ids: Sequence[int]) -> StoredKV | None:
        return source.get(token_ids, snapshots.num_layers if snapshots else model.num_layers)

    wanted = entries.wanted(request.prompt) if reuse == "chunks" else ()
    look = SideBySide(find, (each for each in wanted if each[1] not in unusable), model.store.remote)

    def lookup(source: Entries, token_ids: Sequence[int]) -> StoredKV | None:
        return None if tuple(token_ids) in unusable else look(source, token_ids)

    if model.gate.passed:
        return entries.plan(request.prompt, lookup, reuse, runner.longest)
    why = f"this model is not blended: {model.gate.reason}"
    if snapshots is None:
        return BlendPlan(len(request.prompt.token_ids), (), (), why, tuple(map(PlannedChunk, request.prompt.spans)))
    plan = entries.plan(request.prompt, lookup, "off" if reuse == "off" else "prefix")
    # A chunk that ends the prompt is not reused: KV could be cut before the last token, a recurrent state cannot.
    return replace(plan.without(plan.stale, f"{plan.reason}; {why}"), exact=plan.exact)


class TransformersEngine(ModelOwner):
    """Answers prompts of text and chunks with a transformers model, on CPU or GPU.

    Requests from several threads share the model: their forwards take turns, token by token.

    Example:
        Precompute chunks, then answer a question from the chunks::

            with TransformersEngine("smollm2", store="kv") as engine:
                chunks = split_text(text, engine.tokenizer)
                engine.precompute(chunks)
                print(engine.generate(BlendPrompt((*chunks, "Question: Who is the captain? Answer:"))).text)
    """

    supports_json_schema: ClassVar[bool] = GUIDED
    without_json_schema: ClassVar[str] = 'install llguidance ("cacheblend-rag[guided]"), or leave json_schema out'

    def stream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        return self._begun(prompt, sampling, settings)

    async def astream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Answer asynchronously; if the consumer is cancelled, a waiting prompt is dropped and a running one ends."""
        async for event in iterate_in_thread(lambda gone: self._begun(prompt, sampling, settings, gone)):
            yield event

    def _begun(
        self,
        prompt: Prompt | Request,
        sampling: SamplingParams | None,
        settings: BlendSettings | None,
        gone: threading.Event | None = None,
    ) -> Iterator[StreamEvent]:
        """Return the iterator of :meth:`stream`, which raises GivenUp once ``gone`` is set."""
        begin = time.perf_counter()
        request = self.request(prompt, sampling, settings)
        schema, guide = request.sampling.schema(), None
        if schema is not None:
            guide = Guide(schema, self.tokenizer, self.subject().vocab_size, self.end_tokens)
        return self._stream(request, guide, begin, gone)

    async def agenerate(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Answer asynchronously; the event loop's thread pool limits how many requests hold KV at the same time."""
        gone = threading.Event()

        def answered() -> Generation | None:
            done: Generation | None = None
            with suppress(GivenUp), closing(cast(Any, self._begun(prompt, sampling, settings, gone))) as events:
                for event in events:
                    done = event.generation
            return done

        try:
            done = await asyncio.to_thread(answered)
        finally:
            gone.set()
        assert done is not None
        return done

    def _stream(
        self, request: Request, guide: Guide | None, begin: float, gone: threading.Event | None
    ) -> Iterator[StreamEvent]:
        # The write-back after the answer belongs to no span of the request.
        with PromptRun(self, request, gone) as run, RequestSpans(self.namespace.name) as spans:
            run.prefill(spans.trace)
            last = yield from run.answer(guide, begin)
            assert last.generation is not None
            spans.answered(last.generation)
            yield last
