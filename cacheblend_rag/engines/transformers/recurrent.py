"""Reuses the exact prefix of models with recurrent layers (linear attention, Mamba, short convolutions).

A recurrent layer keeps one state of all tokens so far, which is valid only after exactly these tokens. An entry of a
recurrent model is therefore a *snapshot*: the attention layers' KV of the entry's tokens, and the recurrent states
after the last token. A prompt's header and first chunk were computed in the same context, so the prompt continues from
the first chunk's snapshot.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, cache_utils

from cacheblend_rag.blending.gate import TOLERANCE
from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache
from cacheblend_rag.engines.transformers.precompute import Computed
from cacheblend_rag.engines.transformers.target import ModelRunner
from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError
from cacheblend_rag.store.kv import ChunkKV, LayerKV

# Kinds of layers whose caches this module supports; "moe" and "mlp" layers have no cache.
_ATTENTION, _RECURRENT = {"full_attention", "hybrid"}, {"linear_attention", "conv", "hybrid"}
_KNOWN = _ATTENTION | _RECURRENT | {"moe", "mlp"}
_HEADER, _CHUNK, _REST = 7, 21, 9  # parts of the check's prompt; no multiple of a recurrent layer's block size


def snapshots_of(runner: ModelRunner) -> Snapshots | None:
    """Return the snapshots of a model with recurrent layers; None for other models, and if snapshots are not exact."""
    kinds = set(getattr(runner.config, "layer_types", None) or ())
    # Older versions of transformers have a special cache class for each recurrent model.
    native = hasattr(cache_utils, "LinearAttentionLayer")
    if not (native and kinds & _RECURRENT and kinds & _ATTENTION and kinds <= _KNOWN):
        return None
    try:
        snapshots = Snapshots(runner)
        return snapshots if snapshots.are_exact() else None
    except Exception:  # any error of the model's forward means that snapshots do not work
        return None


class Snapshots:
    """Takes snapshots of a model, and restores the model's cache from snapshots.

    A snapshot is stored like any entry. Its layers are the KV of the attention layers, then the states of the recurrent
    layers: the convolution's state in place of keys, the recurrence's state in place of values, and an empty tensor for
    a state that a layer lacks.
    """

    def __init__(self, runner: ModelRunner):
        """Inspect the cache of the model of ``runner``, without running the model."""
        self._runner = runner
        parameters = inspect.signature(runner.model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"
        empty = self._new_cache()
        self._num_kv, num_states = len(list(_attention(empty))), len(list(_states(empty)))
        self.num_layers = self._num_kv + num_states
        self._header: tuple[tuple[int, ...], ChunkKV] | None = None

    def compute(self, header: tuple[int, ...], batch: Sequence[tuple[int, ...]]) -> Iterator[Computed]:
        """Run each row of ``batch`` behind ``header``, one by one, because padding would change the state.

        Yields:
            Token ids of a row, ``()`` for the header itself, and the row's snapshot.
        """
        for token_ids in batch:
            if token_ids:
                behind = [StoredSpan(0, len(header), self._of_header(header))] if header else []
                snapshot = self._run(token_ids, behind)[1]
            else:
                snapshot = self._of_header(header)
            yield token_ids, (snapshot, partial(list, snapshot.layers))

    def _of_header(self, header: tuple[int, ...]) -> ChunkKV:
        if self._header is None or self._header[0] != header:
            self._header = header, self._run(header, [])[1]
        return self._header[1]

    def _run(self, token_ids: Sequence[int], behind: Sequence[StoredSpan]) -> tuple[torch.Tensor, ChunkKV]:
        """Run tokens behind a prefix; return the last token's logits ``[vocab]`` and the snapshot of the tokens."""
        cache = self.resume(behind)
        logits = self._runner.append(torch.tensor([list(token_ids)], device=self._runner.device), cache)[0]
        return logits, self._take(cache, behind[-1].end if behind else 0)

    def _take(self, cache: ModelsOwnCache, start: int) -> ChunkKV:
        whole = cache.state[self._cache_name]
        kv = [
            LayerKV(_host(layer.keys[:, :, start:]), _host(layer.values[:, :, start:])) for layer in _attention(whole)
        ]
        states = [LayerKV(_host(layer.conv_states[i]), _host(layer.recurrent_states[i])) for layer, i in _states(whole)]
        return ChunkKV([*kv, *states], start)

    @torch.inference_mode()
    def resume(self, prefix: Sequence[StoredSpan]) -> ModelsOwnCache:
        """Return the cache of a model after ``prefix``, the snapshots of adjacent spans from position 0 on.

        Only the last snapshot's states are read; KV is read from all snapshots.

        Raises:
            UnusableSpanError: A stored layer failed its checks, or cannot be read now.
        """
        cache = self._new_cache()
        for span in prefix:
            for index, layer in enumerate(_attention(cache)):
                layer.update(*self._read(span, index))
        if not prefix:
            return ModelsOwnCache()
        for index, (layer, state) in enumerate(_states(cache), self._num_kv):
            conv, recurrent = self._read(prefix[-1], index)
            if conv.numel():
                layer.update_conv_state(conv, state)
            if recurrent.numel():
                layer.update_recurrent_state(recurrent, state)
            layer.has_previous_state[state] = bool(conv.numel() or recurrent.numel())
        return ModelsOwnCache(prefix[-1].end, {self._cache_name: cache})

    def _read(self, span: StoredSpan, index: int) -> LayerKV:
        try:
            kv = span.kv.layer(index)
        except (DamagedKVError, StoreUnavailableError) as error:
            raise UnusableSpanError(span) from error
        return LayerKV(*(tensor[None].to(self._runner.device) for tensor in kv))

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._runner.model.config)

    def are_exact(self) -> bool:
        """Run a random prompt as a whole, and part by part from snapshots; return whether the logits agree."""
        vocabulary = int(self._runner.config.vocab_size)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (_HEADER + _CHUNK + _REST,), generator=generator).tolist()
        want, whole = self._run(ids, [])
        prefix: list[StoredSpan] = []
        for start, end in ((0, _HEADER), (_HEADER, _HEADER + _CHUNK)):
            prefix.append(StoredSpan(start, end, self._run(ids[start:end], prefix)[1]))
        got, _ = self._run(ids[prefix[-1].end :], prefix)
        # A model with a window or an index would keep fewer than all tokens in the cache.
        complete = whole.num_layers == self.num_layers and whole.num_tokens == len(ids)
        error = float((got.float() - want.float()).abs().max() / want.float().std())
        return complete and error <= TOLERANCE[self._runner.dtype]


def _attention(cache: DynamicCache) -> Iterator[Any]:
    return (layer for layer in cache.layers if isinstance(layer, cache_utils.DynamicLayer))


def _states(cache: DynamicCache) -> Iterator[tuple[Any, int]]:
    """Yield every recurrent layer once for each of its states, with the state's index."""
    for layer in cache.layers:
        if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
            yield from ((layer, index) for index in range(layer.number_of_states))


def _host(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a host copy of the only row of a batch, since the model overwrites its tensor; empty for None."""
    return torch.empty(0) if tensor is None else tensor[0].detach().to("cpu", copy=True)
