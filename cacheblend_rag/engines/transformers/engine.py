"""The embedded default engine: a Hugging Face causal LM on CPU or GPU, blended through its own forward."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.gate import GateReport, run_gate
from cacheblend_rag.blending.loader import DamagedSpanError
from cacheblend_rag.blending.plan import BlendPlan, make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.profile import ModelProfile, load_profile
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine, check_length
from cacheblend_rag.engines.blendable import why_not_blendable
from cacheblend_rag.engines.results import Generation, Mode, PrecomputeReport, StreamEvent, Timings, TokenLogprob, Usage
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache, PositionedCache
from cacheblend_rag.engines.transformers.decoding import Sampler, TextStream, token_logprob
from cacheblend_rag.engines.transformers.loading import device_named, load_model
from cacheblend_rag.engines.transformers.precompute import precompute
from cacheblend_rag.engines.transformers.subject import TransformersSubject
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersTarget
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, TokenizedPrompt, chosen_header_ids, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.kv import KVKey, StoredKV, kv_key


class TransformersEngine(BlendEngine):
    """Answers prompts of text and chunks with a transformers model.

    Requests from several threads share the model: their forwards take turns, token by token.

    Attributes:
        store: Where chunk KV is kept.
        header_ids: Tokens that chunks are precomputed behind.
        profile: Check layers and ratio of this model.
        gate: What the parity gate found; a model that fails it is served by ordinary prefill.
        on_first_logits: Called, if set, with the logits ``[vocab]`` of every prompt's last token, after the TTFT was taken.
    """

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
    ):
        """Load the model and run the parity gate.

        Args:
            model: A directory, a hub name, a loaded model, or None for the bundled one.
            tokenizer: Its tokenizer; None loads the one beside the model.
            store: A store, a directory for one (RAM in front of disk), or None for RAM alone.
            device: ``"cpu"``, ``"cuda"``...; None takes CUDA if there is one.
            dtype: None takes fp32 on a CPU, the model's own elsewhere.
            header: What stands before the first chunk in your prompts: the rendered text, or its token ids. None takes
                :func:`rag_header`'s.
            ratio: Default recompute ratio; None takes the model profile's.
            write_back: Store the KV of chunks that a prompt held but the store did not, after the answer.

        Raises:
            InputError: There is no such device.
            ModelError: The model cannot be loaded.
            StoreError: The store cannot be opened.
        """
        loaded = load_model(model, tokenizer, device_named(device), dtype)
        self.tokenizer, self.fingerprint = loaded.tokenizer, loaded.fingerprint
        self.runner = ModelRunner(loaded.model)
        self.store: KVStore = store if isinstance(store, KVStore) else open_store(store)
        self.registry = ChunkRegistry()
        config = loaded.model.config.get_text_config()
        self.context_window = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self.header_ids = chosen_header_ids(self.tokenizer, header)
        self.profile: ModelProfile = load_profile(self.fingerprint.digest, loaded.directory)
        self._ratio = self.profile.ratio if ratio is None else ratio
        self._write_back = write_back
        self._lock = threading.Lock()
        self.on_first_logits: Callable[[torch.Tensor], None] | None = None
        self._end_tokens = _end_tokens(loaded.model)
        self.rope: Rope | None = None
        refusal = why_not_blendable(config)
        self.gate = GateReport(False, refusal) if refusal else self._run_gate()
        if not self.gate.passed:
            warnings.warn(
                f"{self.fingerprint.name} is served by ordinary prefill, without blending: {self.gate.reason}.",
                stacklevel=2,
            )

    def _run_gate(self) -> GateReport:
        report, self.rope = run_gate(self.subject())
        return report

    def subject(self) -> TransformersSubject:
        """Return the model as the parity gate and calibration drive it."""
        return TransformersSubject(self.runner)

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """See :class:`BlendEngine`; ``[header] + chunk`` is computed, batched, and the chunk's slice kept."""
        self.registry.add(chunks)
        if not self.gate.passed:
            return PrecomputeReport(failed={c.id: f"not blended: {self.gate.reason}" for c in chunks})
        with self._lock:
            return precompute(self.runner, self.store, self.fingerprint, self.header_ids, chunks, progress)

    def stream(
        self,
        prompt: BlendPrompt | str | TokenizedPrompt,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
    ) -> Iterator[StreamEvent]:
        """See :class:`BlendEngine`. A :class:`TokenizedPrompt` is taken as it is."""
        begin = time.perf_counter()
        sampling, settings = sampling or SamplingParams(), settings or BlendSettings()
        if sampling.json_schema is not None:
            raise InputError("The transformers engine has no guided decoding; leave json_schema out or use VLLMEngine.")
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else self._tokenize(prompt)
        check_length(len(tokens.token_ids), sampling.max_tokens, self.context_window)
        policy(settings.policy)
        return self._stream(tokens, sampling, settings, begin)

    def _tokenize(self, prompt: BlendPrompt | str) -> TokenizedPrompt:
        if isinstance(prompt, str):
            prompt = BlendPrompt(tuple(self.registry.find(prompt)))
        return tokenize(prompt, self.tokenizer, self.registry)

    def _stream(
        self, prompt: TokenizedPrompt, sampling: SamplingParams, settings: BlendSettings, begin: float
    ) -> Iterator[StreamEvent]:
        prefill = self._prefill(prompt, settings)
        sample, text = Sampler(sampling, self.runner.device), TextStream(self.tokenizer, sampling.stop)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish = "length"
        ttft = 0.0
        logits = prefill.logits
        try:
            while True:
                token = sample(logits)
                if not ttft:
                    ttft = time.perf_counter() - begin
                    if self.on_first_logits is not None:
                        self.on_first_logits(logits)
                if token in self._end_tokens:
                    finish = "stop"
                    break
                tokens.append(token)
                if sampling.logprobs is not None:
                    logprobs.append(token_logprob(logits, token, sampling.logprobs))
                piece = text.push(token)
                if piece or self.tokenizer is None:
                    yield StreamEvent(piece)
                if text.stopped:
                    finish = "stop"
                    break
                if len(tokens) == sampling.max_tokens:
                    break
                with self._lock:
                    logits = self.runner.append(torch.tensor([[token]], device=self.runner.device), prefill.cache)[0]
            rest = text.flush()
            yield StreamEvent(
                rest,
                Generation(
                    text=text.text,
                    token_ids=tuple(tokens),
                    finish_reason="stop" if finish == "stop" else "length",
                    mode=prefill.mode,
                    reason=prefill.plan.reason,
                    usage=Usage(
                        prompt_tokens=len(prompt.token_ids),
                        reused_tokens=len(prompt.token_ids) - prefill.computed,
                        recomputed_tokens=prefill.recomputed,
                        computed_tokens=prefill.computed,
                        completion_tokens=len(tokens),
                    ),
                    timings=Timings(prefill.load_s, ttft, time.perf_counter() - begin),
                    missing=tuple(chunk.id for chunk in prefill.plan.missing),
                    logprobs=tuple(logprobs),
                ),
            )
        finally:
            del prefill.cache
            for span in (*prefill.plan.exact, *prefill.plan.stale):
                span.kv.finish()
            if self._write_back and prefill.plan.missing and self.gate.passed:
                self._store_missing(prefill.plan.missing)

    def _store_missing(self, chunks: Sequence[Chunk]) -> None:
        # Computed anew behind the header: what the prompt left in its cache is coloured by its context.
        try:
            self.precompute(chunks)
        except CacheBlendError as error:
            warnings.warn(f"The KV of {len(chunks)} chunks could not be written back: {error}", stacklevel=2)

    def _prefill(self, prompt: TokenizedPrompt, settings: BlendSettings) -> _Prefill:
        with self._lock:
            while True:
                plan = self._plan(prompt, settings)
                if not plan.uses_stored_kv:
                    return self._full_prefill(prompt, plan)
                try:
                    return self._blend(prompt, plan, settings)
                except DamagedSpanError as error:
                    # Damaged is missing: the store has dropped the entry, the next plan computes it in place.
                    chunk = error.span.chunk if error.span is not None else None
                    self.store.delete(self._key(chunk.token_ids if chunk is not None else ()))

    def _plan(self, prompt: TokenizedPrompt, settings: BlendSettings) -> BlendPlan:
        if not self.gate.passed:
            return BlendPlan(len(prompt.token_ids), (), (), (), f"this model is not blended: {self.gate.reason}")
        return make_plan(prompt, self.header_ids, self._lookup, settings.reuse)

    def _key(self, token_ids: Sequence[int]) -> KVKey:
        return kv_key(self.fingerprint, self.header_ids, token_ids)

    def _lookup(self, token_ids: Sequence[int]) -> StoredKV | None:
        kv = self.store.get(self._key(token_ids))
        wanted = len(token_ids) or len(self.header_ids)
        return kv if kv is not None and kv.num_tokens == wanted and kv.num_layers == self.runner.num_layers else None

    def _full_prefill(self, prompt: TokenizedPrompt, plan: BlendPlan) -> _Prefill:
        # A model that failed the gate may keep something else than KV: it gets its own kind of cache.
        cache = self.runner.new_cache(len(prompt.token_ids)) if self.gate.passed else ModelsOwnCache()
        ids = torch.tensor([prompt.token_ids], device=self.runner.device)
        logits = self.runner.append(ids, cache)[0]
        return _Prefill(plan, logits, cache, len(prompt.token_ids), 0, 0.0)

    def _blend(self, prompt: TokenizedPrompt, plan: BlendPlan, settings: BlendSettings) -> _Prefill:
        assert self.rope is not None
        target = TransformersTarget(self.runner, self.rope, prompt.token_ids)
        ratio = self._ratio if settings.ratio is None else settings.ratio
        result = fuse(plan, target, policy(settings.policy), ratio, self.profile.schedule(settings.check_layers))
        assert target.logits is not None
        return _Prefill(
            plan, target.logits, target.cache, result.computed_tokens, len(result.recomputed), result.load_wait_s
        )

    def close(self) -> None:
        """Close the store and drop the model; closing twice is allowed."""
        self.store.close()
        self.__dict__.pop("runner", None)


class _Prefill:
    """A prompt whose first token can be sampled."""

    def __init__(
        self,
        plan: BlendPlan,
        logits: torch.Tensor,
        cache: PositionedCache | ModelsOwnCache,
        computed: int,
        recomputed: int,
        load_s: float,
    ):
        self.plan, self.logits, self.cache = plan, logits, cache
        self.computed, self.recomputed, self.load_s = computed, recomputed, load_s

    @property
    def mode(self) -> Mode:
        return "blend" if self.plan.uses_stored_kv else "prefill"


def _end_tokens(model: Any) -> frozenset[int]:
    configs = (getattr(model, "generation_config", None), model.config)
    found = next((c.eos_token_id for c in configs if c is not None and c.eos_token_id is not None), None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, (list, tuple)) else [found])
