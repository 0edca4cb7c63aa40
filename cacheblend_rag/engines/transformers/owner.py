"""Owns a transformers model: loads the model, runs the parity gate, and computes the KV of chunks, but no prompts."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend_rag.blending.costs import Costs, MeasuredCost
from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.profile import load_costs, load_profile, log_uncalibrated
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.blending.transfer import fetch
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.entries import Entries, Ranking, chosen_ranking
from cacheblend_rag.engines.models import (
    BUNDLED_MODEL,
    NAMED_MODELS,
    NO_WRITER,
    end_tokens,
    is_bundled,
    model_directory,
    why_not_blendable,
    writer_of,
)
from cacheblend_rag.engines.precision import check_memory, cpu_dtype
from cacheblend_rag.engines.precompute import drop_forgotten
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.engines.transformers import attention
from cacheblend_rag.engines.transformers.judging import judge
from cacheblend_rag.engines.transformers.precompute import Ranker, precompute
from cacheblend_rag.engines.transformers.prefixes import PrefixCache
from cacheblend_rag.engines.transformers.recurrent import snapshots_of
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersSubject
from cacheblend_rag.engines.writer import KVWriter, WriterNotice
from cacheblend_rag.errors import CacheBlendError, InputError, ModelError, first_line
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import Header, chosen_header_ids
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.kv import ChunkKV, LayerKV, ModelFingerprint
from cacheblend_rag.store.opening import parse_size


@dataclass(frozen=True)
class LoadedModel:
    """Holds a model that is ready to run; ``directory`` is the directory of its files, None for a model in memory."""

    model: Any
    tokenizer: Any
    fingerprint: ModelFingerprint
    directory: Path | None


def load_model(model: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype | None) -> LoadedModel:
    """Load ``model``, which is a loaded model or an argument of :func:`model_directory`.

    Raises:
        ModelError: The model cannot be loaded; the message gives the reason.
    """
    if isinstance(model, PreTrainedModel):
        name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        model = _on(device, model, name)
        fingerprint = ModelFingerprint.from_module(model, model.config.to_dict(), model.dtype, name)
        return LoadedModel(usable_attention(model), tokenizer, fingerprint, None)
    name = BUNDLED_MODEL if is_bundled(model) else str(model)
    try:
        directory = model_directory(model)
        config = AutoConfig.from_pretrained(directory)
        own = getattr(config, "dtype", None) or torch.bfloat16
        dtype = dtype or (cpu_dtype({"dtype": own}) if device.type == "cpu" else own)
        # Quantised weights are created for one device, and cannot be moved to another.
        placed = {"device_map": {"": device}} if getattr(config, "quantization_config", None) else {}
        if not placed:
            check_memory(directory, own, dtype, device)
        loaded = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype, **placed)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"Cannot load the model {name!r}: {first_line(error)}. Give a directory with a Hugging Face causal LM "
            "(config.json, weights, tokenizer), a GGUF file, a hub name, or a model that is known by name: "
            f"{', '.join(NAMED_MODELS)}."
        ) from error
    loaded = _on(device, loaded, name)
    return LoadedModel(
        usable_attention(loaded), tokenizer, ModelFingerprint.from_directory(directory, dtype, name), directory
    )


def device_named(name: str | torch.device | None) -> torch.device:
    """Return the torch device called ``name``; None means CUDA if available, else the CPU.

    Raises:
        InputError: This machine has no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"The device {str(name)!r} cannot be used here: {first_line(error)}.") from error
    return device


def _on(device: torch.device, model: Any, name: str) -> Any:
    """Return ``model`` on ``device``; raise ModelError if the model is on several devices or cannot be moved."""
    places = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(places) > 1:
        raise ModelError(
            f"The model {name!r} is spread over {', '.join(places)} (device_map). Blending needs it on one device: load it "
            "with device_map={'': 0}, or in vLLM with tensor_parallel_size."
        )
    here = torch.device(model.device)
    if getattr(model, "is_quantized", False) and here.type == device.type and device.index in (None, here.index):
        return model.eval()  # some quantised models cannot be moved, not even to their own device
    try:
        return model.to(device).eval()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"The model {name!r} cannot be moved to {device}: {first_line(error)}.") from error


def usable_attention(model: Any) -> Any:
    """Return ``model`` with an attention implementation that follows its config and takes an explicit mask."""
    config = model.config.get_text_config()
    # SDPA ignores the soft cap on attention scores (Gemma-2) and learned sinks: such models need eager attention.
    no_sdpa = getattr(config, "attn_logit_softcapping", None) or not getattr(model, "_supports_sdpa", True)
    chosen = config._attn_implementation
    eager = no_sdpa or chosen == "eager"
    if chosen not in {None, "eager", "sdpa", attention.NAME}:
        warnings.warn(
            f"The model was to run with attention {chosen!r}; here it runs with {'eager' if eager else 'sdpa'}, and blends with "
            "attention of their own: no other takes scattered positions.",
            stacklevel=2,
        )
    model.set_attn_implementation("eager" if eager else attention.NAME)
    return model


class ModelOwner(BlendEngine):
    """Holds a model with everything that its prompts share.

    Attributes:
        runner: Runner of the model's own forward.
        rope: RoPE rotations of the model; None if the gate found no rotation.
        snapshots: Snapshots of a model with recurrent layers, stored in place of KV; None for other models.
        lock: Lock of the model: requests from several threads take turns, token by token.
        prefixes: Prefix cache with the KV of earlier prompts and their answers.
        end_tokens: Tokens that end an answer.
        on_first_logits: Callback for the logits ``[vocab]`` of every prompt's last token, called after the TTFT was
            measured; None for no callback.
    """

    store: KVStore
    device: torch.device
    dtype: torch.dtype
    _probe: tuple[int, ...]
    _rankers: dict[tuple[int, ...], Ranker]

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        store: KVStore | str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        header: Header | None = None,
        ratio: float | None = None,
        write_back: bool = True,
        ranking: Ranking | None = None,
        prefix_cache: int | str = "1GiB",
        writer: str | Path | None = None,
    ):
        """Load the model and run the parity gate.

        Args:
            model: A directory, a GGUF file, a hub name, ``"smollm2"``, a loaded model, or None for the bundled model.
            tokenizer: Tokenizer of the model; None loads the tokenizer beside the model.
            store: A store; a directory for a store (RAM in front of disk); the addresses of tiers, such as
                ``"ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix"``; or None for RAM alone.
            device: ``"cpu"``, ``"cuda"``...; None means CUDA if available, else the CPU.
            dtype: Dtype of the model; None means the model's own dtype, but fp32 on a CPU that is not faster in bf16.
            header: Text before the first chunk of your prompts: the rendered text, its token ids, or a function that
                renders the text for the tokenizer. None means the header of :func:`rag_header`.
            ratio: Default recompute ratio; None means the ratio of the model's profile.
            write_back: Whether to store, after an answer, the KV of the prompt's chunks that the store lacked.
            ranking: When the static deviations of chunks are measured (:mod:`cacheblend_rag.blending.static`); None
                means ``"now"`` if the policy of the model's profile needs static deviations, else ``"lazy"``.
            prefix_cache: Maximum memory, on the model's device, for the KV of earlier prompts and answers, which later
                prompts with the same beginning reuse: bytes, or a size such as ``"4GiB"``; 0 switches the cache off.
            writer: KV writer of chunks, in a form that :func:`writer_of` takes: a directory, ``"none"``, or None for
                the writer that ``"smollm2"`` comes with. KV stored without this writer, or by another, is not used.

        Raises:
            InputError: ``device``, ``ranking`` or ``prefix_cache`` is invalid, or the writer does not fit the model.
            ModelError: The model cannot be loaded.
            StoreError: The store cannot be opened.
        """
        loaded = load_model(model, tokenizer, device_named(device), dtype)
        self.tokenizer, self.fingerprint = loaded.tokenizer, loaded.fingerprint
        self.runner = ModelRunner(loaded.model)
        self.store = store if isinstance(store, KVStore) else open_store(store)
        self.store.page_lock_for(self.runner.device)
        self.registry = ChunkRegistry()
        config = loaded.model.config.get_text_config()
        self.num_layers, self.device, self.dtype = self.runner.num_layers, self.runner.device, self.runner.dtype
        self.context_window = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self._use(writer_of(model, writer), loaded)
        self.profile = load_profile(self.fingerprint.digest, loaded.directory, ratio, self.writer)
        self.header_ids = chosen_header_ids(self.tokenizer, header, self.profile.blockwise)
        self.costs = load_costs(self.fingerprint.digest, str(self.device))
        self.ranking = chosen_ranking(ranking, self.profile.policy)
        self.prefixes = PrefixCache(parse_size(prefix_cache))
        self.on_first_logits: Callable[[torch.Tensor], None] | None = None
        self.end_tokens = end_tokens(config, getattr(loaded.model, "generation_config", None), self.tokenizer)
        self._write_back, self.lock, self._storing = write_back, threading.Lock(), threading.Lock()
        self._probe, self._rankers = (), {}
        self._judge(loaded)

    def _use(self, writer: str | Path | None, loaded: LoadedModel) -> None:
        """Set up the KV writer that computes chunks' KV, if there is a writer."""
        self._writing: AbstractContextManager[None] = nullcontext()
        self._notice = WriterNotice()
        if writer is None:
            return
        read = KVWriter.read(writer, self.fingerprint, loaded.directory)
        self._writing, self.writer = read.on(loaded.model, self.dtype, self.device), read.name

    def _judge(self, loaded: LoadedModel) -> None:
        """Run the parity gate with the store's codecs; its result decides how the model serves prompts."""
        self.rope: Rope | None = None
        refusal = why_not_blendable(self.runner.config)
        if refusal:
            self.gate = GateReport(False, refusal)
        else:
            files = loaded.fingerprint if loaded.directory else None
            self.gate, self.rope = judge(self.subject(), self.store.codecs, loaded.model, files)
        if self.gate.passed and self.costs is None:
            self.costs = Costs.of_model(self.gate.pass_s, self.gate.token_s, self.runner.config)
        if self.gate.passed and not self.profile.is_calibrated:
            log_uncalibrated()
        self.snapshots = None if self.gate.passed else snapshots_of(self.runner)
        if not self.gate.passed and self.writer is not None:
            raise InputError(
                f"{self.fingerprint.name} is not blended ({self.gate.reason}), so a KV writer has nothing to write: leave it out "
                f"(--writer {NO_WRITER})."
            )
        if not self.gate.passed:
            served = "ordinary prefill" if self.snapshots is None else "prefix caching of header and first chunk"
            served = f"{self.fingerprint.name} is served by {served}, without blending: {self.gate.reason}."
            warnings.warn(served, stacklevel=3)

    @property
    def stores(self) -> bool:
        """Return whether KV or snapshots of this model are stored."""
        return self.gate.passed or self.snapshots is not None

    @property
    def entries(self) -> Entries:
        """Return the engine's entries, created for each use, since evaluations change header and store."""
        return Entries(self.store, self.fingerprint, self.header_ids, namespace=self.namespace, writer=self.writer)

    def _become(self) -> None:
        """Do nothing: the copy of the engine is complete."""

    def subject(self) -> TransformersSubject:
        """Return the model's interface for the parity gate and calibration."""
        return TransformersSubject(self.runner)

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """See :class:`BlendEngine`; the model computes ``[header] + chunk`` in batches and stores the chunk's part."""
        self.check_open()
        self.registry.add(chunks)
        return self._precompute(self.entries, chunks, progress, self.ranking == "now")

    def precompute_first(self, chunks: Sequence[Chunk]) -> PrecomputeReport:
        self.check_open()
        if self.writer is None:
            return PrecomputeReport()
        self.registry.add(chunks)
        return self._precompute(self.entries.by(None), chunks)

    def _precompute(
        self,
        entries: Entries,
        chunks: Sequence[Chunk],
        progress: Callable[[int], None] | None = None,
        ranking: bool = False,
    ) -> PrecomputeReport:
        if not self.stores:
            return PrecomputeReport(failed={c.id: f"not blended: {self.gate.reason}" for c in chunks})
        with self._storing:  # one call at a time, so that no call computes KV that another is about to store
            behind = self._behind(self._probed) if self.writer is not None and self.writer.behind_probe else None
            # KV written behind the probe is ranked by how far it moves without the probe.
            ranker = self._behind(() if behind else self._probed) if ranking and self.gate.passed else None
            how = ranker, self.snapshots.compute if self.snapshots else None, self.lock, self._writing, behind
            report = precompute(self.runner, entries, chunks, self.context_window, progress, *how)
        drop_forgotten(chunks, self.registry, self.entries)
        return report

    @property
    def _probed(self) -> tuple[int, ...]:
        if not self._probe:
            self._probe = probe_ids(self.tokenizer, self.subject().vocab_size, self.context_window)
        return self._probe

    def _behind(self, probe: tuple[int, ...]) -> Ranker:
        """Return the ranker for chunks behind the engine's header and ``probe``, whose KV is cached between calls."""
        assert self.rope is not None
        prefix = (*self.header_ids, *probe)
        if prefix not in self._rankers:
            kept = self._rankers if len(self._rankers) < 2 else {}  # at most two are in use
            self._rankers = {**kept, prefix: Ranker(self.runner, self.rope, prefix, self._writing)}
        return self._rankers[prefix]

    def keep_first(self, chunk: Chunk, layers: Sequence[LayerKV], exact: bool) -> None:
        """Store the model's own KV of a chunk, which a prompt computed right behind the header, if write-back is on.

        ``exact`` says whether the header's KV was exact.
        """
        if not (self._write_back and self.stores):
            return
        kv = ChunkKV(fetch(layers, self.store.room)(), len(self.header_ids), exact=exact)
        try:
            self.entries.by(None).put(chunk.token_ids, kv)
        except CacheBlendError as error:
            warnings.warn(f"The model's own KV of a chunk could not be stored: {error}", stacklevel=2)

    def write_back(self, missing: Sequence[Chunk], unranked: Sequence[Chunk], known: Collection[str]) -> None:
        """Store the KV of ``missing`` chunks and the static deviations of ``unranked`` chunks, if write-back is on.

        The KV is computed again behind the header, because the KV in the prompt's cache depends on the prompt. Chunks
        whose ids were not ``known`` at the prompt's start are registered; chunks forgotten since then stay forgotten.
        """
        self._notice.look(self.entries, missing)
        if not (self._write_back and self.stores):
            return
        try:
            self.check_open()
            wanted = (*missing, *(unranked if self.ranking != "off" else ()))
            self.registry.add(chunk for chunk in wanted if chunk.id not in known)
            if missing:
                self._precompute(self.entries, missing, ranking=self.ranking == "now")
        except CacheBlendError as error:
            warnings.warn(f"The KV of {len(missing)} chunks could not be written back: {error}", stacklevel=2)
        try:
            if unranked and self.ranking != "off":
                self._precompute(self.entries, unranked, ranking=True)
        except CacheBlendError as error:
            warnings.warn(f"The static deviation of {len(unranked)} chunks could not be stored: {error}", stacklevel=2)

    def learn(self, measured: MeasuredCost) -> None:
        """Correct the loading controller's costs, if there are any, by the measured costs of a run."""
        if self.costs is not None:
            self.costs = self.costs.after(measured)

    def forget(self, chunks: Iterable[str | Chunk]) -> int:
        """See :class:`BlendEngine`; also empties the namespace's prefix cache, which may hold the chunks' KV."""
        self.prefixes.clear(self.namespace.name)
        return super().forget(chunks)

    def reset_prefix_cache(self) -> None:
        """See :class:`BlendEngine`."""
        self.prefixes.clear()

    def close(self) -> None:
        """Close the store and release the model; closing twice is allowed."""
        if self._root is not None:
            return
        self.store.close()
        self.prefixes.clear()
        if not self._closed:
            self._closed = True
            every: list[ModelOwner] = [self, *self._views.values()]
            for each in every:
                del each.runner
