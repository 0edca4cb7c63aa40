"""The embedded default engine: a Hugging Face causal LM on CPU or GPU, blended through its own forward."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from cacheblend_rag.blending.auto import raised
from cacheblend_rag.blending.controller import Choice, Terms, control
from cacheblend_rag.blending.costs import Computed, MeasuredCost, load_costs
from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.gate import GateReport, run_gate
from cacheblend_rag.blending.origins import blend_terms, origins
from cacheblend_rag.blending.plan import BlendPlan, make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.profile import load_profile
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.blending.trace import DECODE, PREFILL, REST, Trace
from cacheblend_rag.engines.base import BlendEngine, Prompt
from cacheblend_rag.engines.blendable import why_not_blendable
from cacheblend_rag.engines.end_tokens import end_tokens
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.lookups import SideBySide, entries_of
from cacheblend_rag.engines.precompute import Rank
from cacheblend_rag.engines.request import Request
from cacheblend_rag.engines.results import PrecomputeReport, Score, StreamEvent, Timings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.spans import RequestSpans
from cacheblend_rag.engines.transformers import guidance
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache, PositionedCache
from cacheblend_rag.engines.transformers.conversations import Conversations, Said
from cacheblend_rag.engines.transformers.decoding import AnswerBuilder
from cacheblend_rag.engines.transformers.guidance import Guide
from cacheblend_rag.engines.transformers.loading import device_named, load_model
from cacheblend_rag.engines.transformers.precompute import precompute
from cacheblend_rag.engines.transformers.prefill import Prefill, generation_of
from cacheblend_rag.engines.transformers.ranking import Ranker
from cacheblend_rag.engines.transformers.recurrent import snapshots_of
from cacheblend_rag.engines.transformers.scoring import score_behind
from cacheblend_rag.engines.transformers.subject import TransformersSubject
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersTarget
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt, chosen_header_ids
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.turns import turn_ends, turn_lead
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.kv import StoredKV
from cacheblend_rag.store.tenants import Tenant
from cacheblend_rag.store.urls import parse_size


class TransformersEngine(BlendEngine):
    """Answers prompts of text and chunks with a transformers model.

    Requests from several threads share the model: their forwards take turns, token by token.

    Attributes:
        runner: The model's own forward.
        rope: Its rotation; None where the gate found none.
        on_first_logits: Called, if set, with the logits ``[vocab]`` of every prompt's last token, after the TTFT was taken.
    """

    supports_json_schema: ClassVar[bool] = guidance.INSTALLED
    without_json_schema: ClassVar[str] = 'install llguidance ("cacheblend-rag[guided]"), or leave json_schema out'
    supports_scoring: ClassVar[bool] = True
    supports_trace: ClassVar[bool] = True

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        store: KVStore | str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        header: str | Sequence[int] | None = None,
        ratio: float | None = None,
        write_back: bool = True,
        rank: Rank | None = None,
        conversations: int | str = "1GiB",
    ):
        """Load the model and run the parity gate.

        Args:
            model: A directory, a hub name, a loaded model, or None for the bundled one.
            tokenizer: Its tokenizer; None loads the one beside the model.
            store: A store; a directory for one (RAM in front of disk); its tiers by address, as
                ``"ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix"``; or None for RAM alone.
            device: ``"cpu"``, ``"cuda"``...; None takes CUDA if there is one.
            dtype: None takes fp32 on a CPU, the model's own elsewhere.
            header: What stands before the first chunk in your prompts: the rendered text, or its token ids. None takes
                :func:`rag_header`'s.
            ratio: Default recompute ratio; None takes the model profile's.
            write_back: Store the KV of chunks that a prompt held but the store did not, after the answer.
            rank: When chunks' static deviations are measured (:mod:`cacheblend_rag.blending.static`); None is ``"now"`` for a
                model whose profile's policy needs them, else ``"lazy"``.
            conversations: Most memory for the KV of prompts and their answers, on the model's device, for prompts that go on from
                there: bytes, or a size such as ``"4GiB"``; 0 keeps none.

        Raises:
            InputError: There is no such device, or ``conversations`` is no size.
            ModelError: The model cannot be loaded.
            StoreError: The store cannot be opened.
        """
        loaded = load_model(model, tokenizer, device_named(device), dtype)
        self.tokenizer, self.fingerprint = loaded.tokenizer, loaded.fingerprint
        self.runner = ModelRunner(loaded.model)
        self.store: KVStore = store if isinstance(store, KVStore) else open_store(store)
        self.store.pin_for(self.runner.device)
        self.registry = ChunkRegistry()
        config = loaded.model.config.get_text_config()
        self.num_layers, self.device, self.dtype = self.runner.num_layers, self.runner.device, self.runner.dtype
        self.context_window = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self.header_ids = chosen_header_ids(self.tokenizer, header)
        self.profile = load_profile(self.fingerprint.digest, loaded.directory, ratio)
        self.costs = load_costs(self.fingerprint.digest, str(self.device))
        self._write_back = write_back
        self.rank = rank or ("now" if policy(self.profile.policy).needs_static else "lazy")
        self._probe: tuple[int, ...] = ()
        self._ranker: Ranker | None = None
        self._lock, self._storing = threading.Lock(), threading.Lock()
        self._conversations = Conversations(parse_size(str(conversations)))
        self._closed = False
        self.on_first_logits: Callable[[torch.Tensor], None] | None = None
        self._end_tokens = end_tokens(config, getattr(loaded.model, "generation_config", None), self.tokenizer)
        self._judge()

    def _judge(self) -> None:
        """Run the parity gate in front of the store; it decides what the model is served by."""
        self.rope: Rope | None = None
        refusal = why_not_blendable(self.runner.model.config.get_text_config())
        if refusal:
            self.gate = GateReport(False, refusal)
        else:
            self.gate, self.rope = run_gate(self.subject(), self.store.codecs)
        self._snapshots = None if self.gate.passed else snapshots_of(self.runner)
        self._stores = self.gate.passed or self._snapshots is not None
        if not self.gate.passed:
            served = "ordinary prefill" if self._snapshots is None else "prefix caching of header and first chunk"
            served = f"{self.fingerprint.name} is served by {served}, without blending: {self.gate.reason}."
            warnings.warn(served, stacklevel=3)

    def beside(self, store: KVStore) -> Self:
        """Return an engine in front of another store; they share the model, and the lock that lets requests take turns."""
        sibling = copy.copy(self)
        sibling.store, sibling.registry, sibling._views = store, ChunkRegistry(), {}
        sibling._conversations = Conversations(self._conversations.budget)
        store.pin_for(self.runner.device)
        if set(store.codecs) != set(self.store.codecs):
            sibling._judge()
        return sibling

    @property
    def entries(self) -> Entries:
        """See :class:`BlendEngine`; made for each use, since evaluations change header and store."""
        return Entries(self.store, self.fingerprint, self.header_ids, tenant=self.tenant)

    def _become(self, tenant: Tenant) -> None:
        """See :class:`BlendEngine`: all there is to do is to see that an encrypted store has the tenant's key."""
        self.store.key_name(tenant.name)

    def subject(self) -> TransformersSubject:
        """Return the model as the parity gate and calibration drive it."""
        return TransformersSubject(self.runner)

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """See :class:`BlendEngine`; ``[header] + chunk`` is computed, batched, and the chunk's slice kept."""
        self.check_open()
        return self._precompute(chunks, progress, self.rank == "now")

    def _precompute(
        self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None, rank: bool
    ) -> PrecomputeReport:
        self.registry.add(chunks)
        if not self._stores:
            return PrecomputeReport(failed={c.id: f"not blended: {self.gate.reason}" for c in chunks})
        with self._storing:  # one at a time, so that none computes what another is about to store
            ranker = self._make_ranker() if rank and self.gate.passed else None
            compute = self._snapshots.compute if self._snapshots else None
            return precompute(
                self.runner, self.entries, chunks, self.context_window, progress, ranker, compute, self._lock
            )

    def _make_ranker(self) -> Ranker:
        """Return the ranker for the engine's header; the probe's KV is kept from call to call."""
        assert self.rope is not None
        if not self._probe:
            self._probe = probe_ids(self.tokenizer, self.subject().vocab_size, self.context_window)
        if self._ranker is None or self._ranker.prefix != (*self.header_ids, *self._probe):
            self._ranker = Ranker(self.runner, self.rope, self.header_ids, self._probe)
        return self._ranker

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        """See :class:`BlendEngine`."""
        begin = time.perf_counter()
        request = self.request(prompt, sampling, settings)
        schema = request.sampling.json_schema
        vocabulary = self.subject().vocab_size
        guide = None if schema is None else Guide(schema, self.tokenizer, vocabulary, self._end_tokens)
        return self._stream(request, guide, begin)

    def _stream(self, request: Request, guide: Guide | None, begin: float) -> Iterator[StreamEvent]:
        prefill: Prefill | None = None
        answer = AnswerBuilder(request.sampling, self.tokenizer, self._end_tokens, self.runner.device, guide)
        try:
            with RequestSpans(self.trace, self.tenant.name) as spans:
                costs = self.costs  # as they are before this prompt corrects them
                prefill = self._prefill(request, spans.trace)
                timings = yield from self._answer(answer, prefill, begin, spans.trace)
                rest, done = answer.flush(), generation_of(request, prefill, answer, timings, costs)
                spans.answered(done, prefill.load_s)
                yield StreamEvent(rest, done)
        finally:
            if prefill is not None:
                self._keep(request, prefill, answer.tokens[: prefill.fed])
                del prefill.cache
                self._release(prefill)

    def _answer(
        self, answer: AnswerBuilder, prefill: Prefill, begin: float, trace: Trace | None
    ) -> Generator[StreamEvent, None, Timings]:
        """Yield the answer's pieces, but for what is still to be flushed."""
        logits, ttft = prefill.logits, 0.0
        while not answer.finished:
            piece = answer.push(logits)
            if not ttft:
                ttft = time.perf_counter() - begin
                self._observe(prefill)
                if self.on_first_logits is not None:
                    self.on_first_logits(logits)
            if piece is not None:
                yield StreamEvent(piece)
            if not answer.finished:
                logits = self._decode(answer.tokens[-1], prefill, trace)
                prefill.fed = len(answer.tokens)
        return Timings(prefill.load_s, ttft, time.perf_counter() - begin)

    def _keep(self, request: Request, prefill: Prefill, answer: Sequence[int]) -> None:
        """Keep the KV of prompt and answer for what is asked next."""
        said, cache = prefill.said, prefill.cache
        if said is None or not isinstance(cache, PositionedCache):
            return
        said = replace(said, token_ids=(*request.prompt.token_ids, *answer))
        if cache.length == len(said.token_ids):  # not where a token was on its way
            self._conversations.keep(said, cache)

    def score(
        self, prompt: Prompt, completions: Sequence[Sequence[int]], settings: BlendSettings | None = None
    ) -> list[Score]:
        """See :class:`BlendEngine`; a model that is not blended runs the prompt anew for each completion."""
        request = self.scoring_request(prompt, completions, settings)
        if self.gate.passed:
            return self._score(request, completions)
        # The state of a recurrent layer cannot go back to where the prompt ended.
        return [score for ids in completions for score in self._score(request, [ids])]

    def _score(self, request: Request, completions: Sequence[Sequence[int]]) -> list[Score]:
        prefill = self._prefill(request, None)
        try:
            with self._lock:
                return score_behind(self.runner, prefill.cache, prefill.logits, completions)
        finally:
            del prefill.cache
            self._release(prefill)

    def _observe(self, prefill: Prefill) -> None:
        """Let what a prompt took keep the controller's costs current; its first token is there, so its work is done."""
        if self.costs is not None:
            plan, took = prefill.plan, time.perf_counter() - prefill.began - prefill.load_s
            tokens = prefill.computed + prefill.selection
            computed = Computed(tokens, plan.num_tokens, took, plan.stored_tokens)
            self.costs = self.costs.after(MeasuredCost((computed,), prefill.reads, prefill.load_s))

    def _decode(self, token: int, prefill: Prefill, trace: Trace | None) -> torch.Tensor:
        with self._lock, _traced(trace, DECODE, 1):
            return self.runner.append(torch.tensor([[token]], device=self.runner.device), prefill.cache)[0]

    def _release(self, prefill: Prefill) -> None:
        """Let go of stored KV, and write back what was missing."""
        plan = prefill.plan
        for span in (*plan.exact, *plan.stale):
            span.kv.finish()
        if not (self._write_back and self._stores):
            return
        if plan.missing:
            self._store_missing(plan.missing)
        if self.rank != "off" and prefill.unranked:
            self._rank_after_use([span.chunk for span in plan.stale if span.chunk is not None])

    def _store_missing(self, chunks: Sequence[Chunk]) -> None:
        # Computed anew behind the header: what the prompt left in its cache has attended to its context.
        try:
            self.precompute(chunks)
        except CacheBlendError as error:
            warnings.warn(f"The KV of {len(chunks)} chunks could not be written back: {error}", stacklevel=2)

    def _rank_after_use(self, chunks: Sequence[Chunk]) -> None:
        try:
            self._precompute(chunks, None, rank=True)
        except CacheBlendError as error:
            warnings.warn(f"The static deviation of {len(chunks)} chunks could not be stored: {error}", stacklevel=2)

    def _prefill(self, request: Request, trace: Trace | None) -> Prefill:
        unusable: set[tuple[int, ...]] = set()
        late: set[tuple[int, ...]] = set()
        lead = turn_lead(self.tokenizer)
        ends = turn_ends(request.prompt.token_ids, lead)
        said = self._said(request, ends)
        with self._lock:
            while True:
                looked = time.perf_counter()
                whole = self._plan(request, unusable | late).after_late(late)
                if trace is not None and request.prompt.spans and request.settings.reuse != "off":
                    trace.planned(whole, looked)
                cache = self.runner.new_cache(len(request.prompt.token_ids)) if self.gate.passed else ModelsOwnCache()
                kept = 0
                if said is not None and isinstance(cache, PositionedCache):
                    kept = self._conversations.begin(said, ends, len(lead), cache)
                plan = whole.behind_kept(kept) if kept else whole
                choice = self._choose(request, plan)
                plan = plan if choice is None else choice.applied_to(plan)
                began = time.perf_counter()  # behind the look-ups: what they wait for is no computing
                how: dict[str, Any] = {"choice": choice, "said": said, "kept": kept}
                how["blended"] = plan.uses_stored_kv or (kept > 0 and whole.uses_stored_kv)
                try:
                    if not plan.uses_stored_kv:
                        return replace(self._full_prefill(request.prompt, plan, began, cache, trace), **how)
                    if isinstance(cache, ModelsOwnCache):
                        return replace(self._go_on(request, plan, began, trace), **how)
                    return replace(self._blend(request, plan, choice, began, cache, trace), **how)
                except UnusableSpanError as error:
                    # Missing, as far as this prompt goes: the next plan computes its chunk in place. Its tier has dropped
                    # what is damaged; what cannot be read now stays, and so does what other tiers have.
                    (late if error.late else unusable).update(error.entries)
                    if self.costs is not None:
                        self.costs = self.costs.after(MeasuredCost((), error.reads, error.waited_s))

    def _said(self, request: Request, ends: Sequence[int]) -> Said | None:
        """Return the prompt as it is looked for among the conversations; None where it may use none of them."""
        prompt, settings = request.prompt, request.settings
        longest = self.runner.longest
        if settings.reuse == "off" or not self.gate.passed or (longest and len(prompt.token_ids) > longest):
            return None
        found = origins(
            [(span.start, span.end) for span in prompt.spans],
            prompt.token_ids,
            ends,
            len(self.header_ids),
            blend_terms(settings, self.profile.schedule(settings.check_layers).widths, self.profile.ratio_of(settings)),
            policy(settings.policy).needs_attention,
        )
        return Said(prompt.token_ids, found, self.tenant.name, len(prompt.token_ids))

    def _plan(self, request: Request, unusable: Collection[tuple[int, ...]] = ()) -> BlendPlan:
        reuse = request.settings.reuse
        wanted = entries_of(request.prompt) if reuse == "chunks" else ()
        look = SideBySide(self._lookup, (ids for ids in wanted if ids not in unusable), self.store.remote)

        def lookup(token_ids: Sequence[int]) -> StoredKV | None:
            return None if tuple(token_ids) in unusable else look(token_ids)

        if self.gate.passed:
            return make_plan(request.prompt, self.header_ids, lookup, reuse, self.runner.longest)
        why = f"this model is not blended: {self.gate.reason}"
        if self._snapshots is None:
            return BlendPlan(len(request.prompt.token_ids), (), (), (), why)
        plan = make_plan(request.prompt, self.header_ids, lookup, "off" if reuse == "off" else "prefix")
        # A chunk that ends the prompt cannot be cut by its last token, as KV can: its state is behind all of it.
        return replace(plan, stale=(), reason=f"{plan.reason}; {why}")

    def _lookup(self, token_ids: Sequence[int]) -> StoredKV | None:
        return self.entries.get(token_ids, self._snapshots.num_layers if self._snapshots else self.num_layers)

    def _choose(self, request: Request, plan: BlendPlan) -> Choice | None:
        """Let the loading controller choose what to load, and the ratio that costs no time, where the request leaves it both."""
        settings, costs = request.settings, self.costs
        if settings.ratio != "auto" or costs is None or not (plan.uses_stored_kv and self.gate.passed):
            return None
        terms = Terms.of(costs, self.profile, settings, self.num_layers)
        return control(plan, terms, self.profile.ratio_of(settings))

    def _full_prefill(
        self,
        prompt: TokenizedPrompt,
        plan: BlendPlan,
        began: float,
        cache: PositionedCache | ModelsOwnCache,
        trace: Trace | None,
    ) -> Prefill:
        """Run all that is not in ``cache``."""
        ids = torch.tensor([prompt.token_ids[cache.length :]], device=self.runner.device)
        with _traced(trace, PREFILL, ids.shape[1]):
            logits = self.runner.append(ids, cache)[0]
        return Prefill(plan, began, logits, cache, ids.shape[1])

    def _go_on(self, request: Request, plan: BlendPlan, began: float, trace: Trace | None) -> Prefill:
        """Run what stands behind the exact prefix, from its snapshot."""
        assert self._snapshots is not None
        begin = time.perf_counter()
        cache = self._snapshots.resume(plan.exact)
        load_s = time.perf_counter() - begin
        ids = torch.tensor([request.prompt.token_ids[plan.exact_tokens :]], device=self.runner.device)
        with _traced(trace, REST, ids.shape[1]):
            logits = self.runner.append(ids, cache)[0]
        return Prefill(plan, began, logits, cache, ids.shape[1], load_s=load_s)

    def _blend(
        self,
        request: Request,
        plan: BlendPlan,
        choice: Choice | None,
        began: float,
        cache: PositionedCache,
        trace: Trace | None,
    ) -> Prefill:
        assert self.rope is not None
        settings = request.settings
        target = TransformersTarget(self.runner, self.rope, request.prompt.token_ids, cache)
        schedule = self.profile.schedule(settings.check_layers)
        ratio = self.profile.ratio_of(settings)
        ratio = ratio if choice is None else raised(ratio, choice.ratio)
        most_wait_s = None if choice is None else choice.most_wait_s
        result = fuse(plan, target, policy(settings.policy), ratio, schedule, trace, most_wait_s)
        assert target.logits is not None
        return Prefill(
            plan,
            began,
            target.logits,
            target.cache,
            result.computed_tokens,
            len(result.recomputed),
            result.selection_tokens,
            result.load_wait_s,
            result.policy,
            result.ratio,
            result.unranked,
            result.reads,
            result.loads,
        )

    def forget(self, chunks: Iterable[str | Chunk]) -> int:
        """See :class:`BlendEngine`; conversations may hold their KV, too, and are forgotten with them."""
        self._conversations.clear(self.tenant.name)
        return super().forget(chunks)

    def reset_prefix_cache(self) -> None:
        """See :class:`BlendEngine`: forget the conversations so far."""
        self._conversations.clear()

    def close(self) -> None:
        """Close the store and drop the model; closing twice is allowed."""
        if self._root is not None:
            return
        self.store.close()
        self._conversations.clear()
        if not self._closed:
            self._closed = True
            every: list[TransformersEngine] = [self, *self._views.values()]
            for each in every:
                del each.runner


def _traced(trace: Trace | None, name: str, tokens: int) -> AbstractContextManager[None]:
    return nullcontext() if trace is None else trace.during("computing", name, tokens=tokens)
