"""Holds the KV of one sequence while a model runs; the slot of a token is its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cacheblend_rag.blending.rope import Move, moved
from cacheblend_rag.blending.target import StopForward
from cacheblend_rag.engines.kernels.check import placing_works
from cacheblend_rag.store.kv import LayerKV

# Names of the state that models take and return: attention caches, state space models, RWKV.
_STATES = ("past_key_values", "cache_params", "state")


class ModelsOwnCache:
    """Holds the state of a model that is not blended; the model itself creates and updates the state.

    Attributes:
        length: Number of tokens so far.
        ids: All tokens so far ``[batch, tokens]``; a model that returns no state runs all of them again for each token.
        state: State that the model returned, by the name of the argument that takes the state.
    """

    def __init__(self, length: int = 0, state: dict[str, Any] | None = None) -> None:
        """Start without state, or with the ``state`` after ``length`` tokens."""
        self.length = length
        self.ids: torch.Tensor | None = None
        self.state = state or {}

    def run(self, model: Any, ids: torch.Tensor, says_positions: bool, **options: Any) -> torch.Tensor:
        """Run the next tokens ``[batch, tokens]``; return the last token's logits ``[batch, vocab]``.

        ``says_positions`` says whether the model takes position ids. Without position ids, some models (Bamba) start at
        position 0 in every call.
        """
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        first = self.length
        self.length += ids.shape[1]
        if self.state or self.ids is ids:
            if says_positions:
                options["position_ids"] = torch.arange(first, self.length, device=ids.device)[None]
            output = model(input_ids=ids, use_cache=True, **self.state, **options)
        else:
            output = model(input_ids=self.ids, use_cache=False, **options)
        self.state = {name: output[name] for name in _STATES if output.get(name) is not None}
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class PositionedCache:
    """Holds keys and values of one batch, each layer ``[batch, kv_heads, capacity, head_dim]``.

    Transformers calls :meth:`update` in every attention layer, after RoPE. To build its own masks (full prefill and
    decoding), transformers also calls the methods that return lengths and mask sizes.
    """

    is_compileable = False

    def __init__(self, num_layers: int, capacity: int, latent_first: bool = False, block: torch.Tensor | None = None):
        """Reserve ``capacity`` slots; a layer's memory is allocated at its first write.

        With ``latent_first`` the model passes the latent before the rotary key (MLA); :class:`LayerKV` calls the latent
        values and the rotary key keys. If all layers have one shape, ``block``,
        ``[2, layers, kv_heads, capacity, head_dim]``, may be the memory of the keys and values of one sequence.
        """
        self._latent_first = latent_first
        self.block = block
        self._k: list[torch.Tensor | None] = [None] * num_layers if block is None else list(block[0, :, None])
        self._v: list[torch.Tensor | None] = [None] * num_layers if block is None else list(block[1, :, None])
        self._capacity = capacity
        self._length = 0
        self._positions: torch.Tensor | slice = slice(0, 0)
        self._visible = 0
        self._before_layer: Callable[[int], None] | None = None
        self._stop_layer: int | None = None

    @property
    def length(self) -> int:
        """Return the number of slots that are written in all layers, counted from slot 0."""
        return self._length

    def append(self, count: int) -> None:
        """Prepare for a forward over the next ``count`` tokens."""
        self._positions = slice(self._length, self._length + count)
        self._length = self._visible = self._length + count
        if self._length > self._capacity:
            self._grow(max(self._length, 2 * self._capacity))

    @contextmanager
    def scattered(
        self, positions: torch.Tensor, visible: int, before_layer: Callable[[int], None], stop_layer: int | None
    ) -> Iterator[None]:
        """Run a forward in the context over tokens at ``positions`` that see the first ``visible`` slots (and a mask)."""
        self._positions, self._visible = positions, visible
        self._before_layer, self._stop_layer = before_layer, stop_layer
        try:
            yield
        finally:  # the callback refers to the blend and so back to this cache
            self._before_layer = self._stop_layer = None

    def filled(self, length: int) -> None:
        """Declare that the first ``length`` slots of all layers are written."""
        self._length = length

    def begin(self, prefix: Sequence[LayerKV], batch: int) -> None:
        """Write the same KV, one item per layer, at the beginning of each of ``batch`` sequences."""
        for layer, kv in enumerate(prefix):
            k, v = (tensor[None].expand(batch, -1, -1, -1) for tensor in kv)
            own_k, own_v = self._buffers(layer, k, v)
            own_k[:, :, : k.shape[2]], own_v[:, :, : v.shape[2]] = k, v
        self._length = prefix[0].k.shape[1]

    def extend(self, layers: Sequence[LayerKV], tokens: int) -> None:
        """Append a copy of the first ``tokens`` of one sequence's KV that :meth:`copied` returned."""
        start, end = self._length, self._length + tokens
        for layer, kv in enumerate(layers):
            k, v = self._buffers(layer, kv.k[None], kv.v[None])
            k[0, :, start:end], v[0, :, start:end] = kv.k[:, :tokens], kv.v[:, :tokens]
        self._length = end

    def place(self, layer: int, kv: LayerKV, move: Move | None, positions: torch.Tensor) -> None:
        """Write stored ``kv``, ``[kv_heads, tokens, head_dim]``, with keys rotated by ``move``, at ``positions``."""
        k, v = self._buffers(layer, kv.k[None], kv.v[None])
        if kv.k.shape == kv.v.shape and placing_works(k.device, k.dtype, k.shape[1], k.shape[3]):
            from cacheblend_rag.engines.kernels.place import place

            place(kv, move, positions, k, v)  # the buffer counts as one page
            return
        kv = moved(kv, move)
        k[0].index_copy_(1, positions, kv.k)
        v[0].index_copy_(1, positions, kv.v)

    def view(self, layer: int, batch: int, start: int, end: int) -> LayerKV:
        """Return a view of the slots ``start`` to ``end`` of one sequence, valid until the cache is written to."""
        k, v = self._k[layer], self._v[layer]
        if k is None or v is None:
            raise RuntimeError(f"layer {layer} keeps no keys and values")
        return LayerKV(k[batch, :, start:end], v[batch, :, start:end])

    def read(self, layer: int, batch: int, start: int, end: int) -> LayerKV:
        """Return a copy of the slots ``start`` to ``end`` of one sequence."""
        return LayerKV(*(tensor.clone() for tensor in self.view(layer, batch, start, end)))

    def copied(self, start: int, end: int) -> list[LayerKV]:
        """Return a copy of the slots ``start`` to ``end`` of the first sequence, for all layers."""
        return [self.read(layer, 0, start, end) for layer in range(len(self))]

    # Methods that transformers calls.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the fresh KV ``[batch, kv_heads, tokens, head_dim]`` and return all visible keys and values."""
        if self._latent_first:
            key_states, value_states = value_states, key_states
        if self._before_layer is not None:
            self._before_layer(layer_idx)
        if layer_idx == self._stop_layer:
            raise StopForward(LayerKV(key_states[0], value_states[0]))
        k, v = self._buffers(layer_idx, key_states, value_states)
        if isinstance(self._positions, slice):
            k[:, :, self._positions] = key_states
            v[:, :, self._positions] = value_states
        else:
            k.index_copy_(2, self._positions, key_states)
            v.index_copy_(2, self._positions, value_states)
        k, v = k[:, :, : self._visible], v[:, :, : self._visible]
        return (v, k) if self._latent_first else (k, v)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that precede the running tokens."""
        return self.get_query_offset(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first running token in a contiguous pass; 0 in a scattered pass."""
        return self._positions.start if isinstance(self._positions, slice) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of visible slots and their offset."""
        return self._visible, 0

    def __len__(self) -> int:
        return len(self._k)

    def _buffers(self, layer: int, k_like: torch.Tensor, v_like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._k[layer], self._v[layer]
        if k is None or v is None:
            k = self._k[layer] = k_like.new_empty((*k_like.shape[:2], self._capacity, k_like.shape[3]))
            v = self._v[layer] = v_like.new_empty((*v_like.shape[:2], self._capacity, v_like.shape[3]))
        return k, v

    def _grow(self, capacity: int) -> None:
        for buffers in (self._k, self._v):
            for layer, old in enumerate(buffers):
                if old is not None:
                    new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
                    new[:, :, : self._capacity] = old
                    buffers[layer] = new
        self._capacity, self.block = capacity, None
