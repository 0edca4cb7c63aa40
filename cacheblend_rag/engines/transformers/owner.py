"""Owns a transformers model: loads it, judges it by the parity gate, and computes the KV of chunks; it knows no prompt."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend_rag.blending.costs import Costs, MeasuredCost
from cacheblend_rag.blending.gate import GateReport, run_gate
from cacheblend_rag.blending.profile import load_costs, load_profile, log_uncalibrated
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.blending.transfer import fetch
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.entries import Entries, Ranking, chosen_ranking
from cacheblend_rag.engines.models import (
    BUNDLED_MODEL,
    NO_WRITER,
    SMOLLM2,
    end_tokens,
    is_bundled,
    model_directory,
    why_not_blendable,
    writer_of,
)
from cacheblend_rag.engines.precompute import drop_forgotten
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.engines.transformers import attention
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
from cacheblend_rag.store.base import page_lock_for, room_in
from cacheblend_rag.store.kv import ChunkKV, LayerKV, ModelFingerprint
from cacheblend_rag.store.opening import parse_size


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run; ``directory`` is where it was read from, if anywhere."""

    model: Any
    tokenizer: Any
    fingerprint: ModelFingerprint
    directory: Path | None


def load_model(model: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype | None) -> LoadedModel:
    """Load ``model``, which is loaded already, or found as :func:`model_directory` finds it.

    Raises:
        ModelError: It cannot be loaded; the message says why.
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
        # A CPU without bf16 units is slower and less exact in bf16 than in fp32.
        dtype = dtype or (torch.float32 if device.type == "cpu" else getattr(config, "dtype", None) or torch.bfloat16)
        # Quantised weights are made for the device that they will be on, and cannot be moved to another.
        placed = {"device_map": {"": device}} if getattr(config, "quantization_config", None) else {}
        loaded = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype, **placed)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"Cannot load the model {name!r}: {first_line(error)}. Give a directory with a Hugging Face causal LM "
            "(config.json, weights, tokenizer), a GGUF file, a hub name, or a model that is known by name: "
            f"{BUNDLED_MODEL}, {SMOLLM2}."
        ) from error
    loaded = _on(device, loaded, name)
    return LoadedModel(
        usable_attention(loaded), tokenizer, ModelFingerprint.from_directory(directory, dtype, name), directory
    )


def device_named(name: str | torch.device | None) -> torch.device:
    """Return the torch device of that name; None takes CUDA if there is one.

    Raises:
        InputError: There is no such device on this machine.
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
    """Return ``model`` on ``device``; raises ModelError if it is spread over several, or cannot be moved there."""
    places = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(places) > 1:
        raise ModelError(
            f"The model {name!r} is spread over {', '.join(places)} (device_map). Blending needs it on one device: load it "
            "with device_map={'': 0}, or in vLLM with tensor_parallel_size."
        )
    here = torch.device(model.device)
    if getattr(model, "is_quantized", False) and here.type == device.type and device.index in (None, here.index):
        return model.eval()  # some kinds refuse to be moved even to where they are
    try:
        return model.to(device).eval()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"The model {name!r} cannot be moved to {device}: {first_line(error)}.") from error


def usable_attention(model: Any) -> Any:
    """Return ``model`` with an attention that honours its config and takes an explicit mask."""
    config = model.config.get_text_config()
    # SDPA drops the soft cap on attention scores (Gemma-2) and learned sinks: there only eager computes what the config says.
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
    """Holds a model with all that its prompts share.

    Attributes:
        runner: The model's own forward.
        rope: Its rotation; None where the gate found none.
        snapshots: What is stored of a model with recurrent layers in place of KV; None for other models.
        lock: Held by whoever runs the model: requests from several threads take turns, token by token.
        prefixes: KV of earlier prompts and their answers.
        end_tokens: Tokens that end an answer.
        on_first_logits: Called, if set, with the logits ``[vocab]`` of every prompt's last token, after the TTFT was taken.
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
            model: A directory, a GGUF file, a hub name, ``"smollm2"``, a loaded model, or None for the bundled one.
            tokenizer: Its tokenizer; None loads the one beside the model.
            store: A store; a directory for one (RAM in front of disk); its tiers by address, as
                ``"ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix"``; or None for RAM alone.
            device: ``"cpu"``, ``"cuda"``...; None takes CUDA if there is one.
            dtype: None takes fp32 on a CPU, the model's own elsewhere.
            header: What stands before the first chunk in your prompts: the rendered text, its token ids, or a function that
                renders it for the tokenizer. None takes :func:`rag_header`'s.
            ratio: Default recompute ratio; None takes the model profile's.
            write_back: Store the KV of chunks that a prompt held but the store did not, after the answer.
            ranking: When chunks' static deviations are measured (:mod:`cacheblend_rag.blending.static`); None is ``"now"`` for a
                model whose profile's policy needs them, else ``"lazy"``.
            prefix_cache: Most memory, on the model's device, for the KV of earlier prompts and answers, which later prompts that
                begin alike do not compute again: bytes, or a size such as ``"4GiB"``; 0 keeps none.
            writer: What computes chunks' KV in the model's place, as :func:`writer_of` takes it: a directory, ``"none"``, or
                None for the one that ``"smollm2"`` comes with. What is stored without it, or by another, is not used.

        Raises:
            InputError: ``device``, ``ranking`` or ``prefix_cache`` is none, or the writer cannot be used with this model.
            ModelError: The model cannot be loaded.
            StoreError: The store cannot be opened.
        """
        loaded = load_model(model, tokenizer, device_named(device), dtype)
        self.tokenizer, self.fingerprint = loaded.tokenizer, loaded.fingerprint
        self.runner = ModelRunner(loaded.model)
        self.store = store if isinstance(store, KVStore) else open_store(store)
        page_lock_for(self.store, self.runner.device)
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
        self._judge()

    def _use(self, writer: str | Path | None, loaded: LoadedModel) -> None:
        """Have chunks' KV written by a writer, if there is one."""
        self._writing: AbstractContextManager[None] = nullcontext()
        self._notice = WriterNotice()
        if writer is None:
            return
        read = KVWriter.read(writer, self.fingerprint, loaded.directory)
        self._writing, self.writer = read.on(loaded.model, self.dtype, self.device), read.name

    def _judge(self) -> None:
        """Run the parity gate in front of the store; it decides what the model is served by."""
        self.rope: Rope | None = None
        refusal = why_not_blendable(self.runner.config)
        if refusal:
            self.gate = GateReport(False, refusal)
        else:
            self.gate, self.rope = run_gate(self.subject(), self.store.codecs)
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
        """Return whether anything of this model is kept in a store."""
        return self.gate.passed or self.snapshots is not None

    @property
    def entries(self) -> Entries:
        """See :class:`BlendEngine`; made for each use, since evaluations change header and store."""
        return Entries(self.store, self.fingerprint, self.header_ids, namespace=self.namespace, writer=self.writer)

    def _become(self) -> None:
        """See :class:`BlendEngine`; there is nothing else to do."""

    def subject(self) -> TransformersSubject:
        """Return the model as the parity gate and calibration drive it."""
        return TransformersSubject(self.runner)

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """See :class:`BlendEngine`; ``[header] + chunk`` is computed, batched, and the chunk's slice kept."""
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
        with self._storing:  # one at a time, so that none computes what another is about to store
            behind = self._behind(self._probed) if self.writer is not None and self.writer.behind_probe else None
            # What is written behind the probe is ranked by how far it moves without.
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
        """Return what computes behind the engine's header and a probe, whose KV is kept from call to call."""
        assert self.rope is not None
        prefix = (*self.header_ids, *probe)
        if prefix not in self._rankers:
            kept = self._rankers if len(self._rankers) < 2 else {}  # two are in use; others are of another header
            self._rankers = {**kept, prefix: Ranker(self.runner, self.rope, prefix, self._writing)}
        return self._rankers[prefix]

    def keep_first(self, chunk: Chunk, layers: Sequence[LayerKV], exact: bool) -> None:
        """Store what a prompt has computed of a chunk right behind the header, where that is wanted: the model's own KV.

        It is as ``exact`` as the header's.
        """
        if not (self._write_back and self.stores):
            return
        kv = ChunkKV(fetch(layers, partial(room_in, self.store))(), len(self.header_ids), exact=exact)
        try:
            self.entries.by(None).put(chunk.token_ids, kv)
        except CacheBlendError as error:
            warnings.warn(f"The model's own KV of a chunk could not be stored: {error}", stacklevel=2)

    def write_back(self, missing: Sequence[Chunk], unranked: Sequence[Chunk], known: Collection[str]) -> None:
        """Store what a prompt found missing, where that is wanted: the KV of chunks, and static deviations of others.

        All is computed anew behind the header: what the prompt left in its cache has attended to its context. Of the chunks
        whose ids were ``known`` when it came, those that are not any more were forgotten, and stay so; others become known.
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
        """Correct the loading controller's costs, where there are any, by what was measured."""
        if self.costs is not None:
            self.costs = self.costs.after(measured)

    def forget(self, chunks: Iterable[str | Chunk]) -> int:
        """See :class:`BlendEngine`; the namespace's prefix cache may hold their KV, too, and is emptied."""
        self.prefixes.clear(self.namespace.name)
        return super().forget(chunks)

    def reset_prefix_cache(self) -> None:
        """See :class:`BlendEngine`."""
        self.prefixes.clear()

    def close(self) -> None:
        """Close the store and drop the model; closing twice is allowed."""
        if self._root is not None:
            return
        self.store.close()
        self.prefixes.clear()
        if not self._closed:
            self._closed = True
            every: list[ModelOwner] = [self, *self._views.values()]
            for each in every:
                del each.runner
