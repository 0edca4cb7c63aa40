"""Runs a transformers model's own forward at given positions, with an exact mask, for the fusor and the parity gate."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cacheblend_rag.blending.bulk import StoredLayers
from cacheblend_rag.blending.gate import GateSubject
from cacheblend_rag.blending.rope import CosSin, Move, Rope, differ, rope_of_runs, two_runs
from cacheblend_rag.blending.target import BlendTarget, StopForward, Watch
from cacheblend_rag.blending.transfer import sent, whole_numbers
from cacheblend_rag.engines.models import longest_blendable
from cacheblend_rag.engines.results import GivenUp
from cacheblend_rag.engines.transformers.attention import NAME, Looks, additive, scattered
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache, PositionedCache
from cacheblend_rag.engines.transformers.graphs import Graphs
from cacheblend_rag.store.kv import ChunkKV, LayerKV

# Free slots behind the prompt, so that most answers fit without reallocating the cache.
_DECODE_ROOM = 256


class ModelRunner:
    """Runs a causal LM's own forward over positions of one sequence, without code for single architectures.

    Attributes:
        config: Config of the text model.
        latent_first: Whether the model caches a latent, then a rotary key (MLA); measured with the rotation.
        longest: Maximum length of a blended prompt; None for any length.
        layer_shape: Number of KV heads and head dimension, measured with the rotation; None unless keys and values of
            all layers have one shape.
        graphs: CUDA graphs of passes on a GPU; None on other devices.
    """

    def __init__(self, model: Any):
        """Wrap a loaded ``AutoModelForCausalLM``."""
        self.model = model
        self.config = config = model.config.get_text_config()
        self.num_layers = int(config.num_hidden_layers)
        self.latent_first = False
        self.longest = longest_blendable(config)
        self.device = torch.device(model.device)
        self.dtype: torch.dtype = model.dtype
        layer_types = getattr(config, "layer_types", None)
        self.window: int | None = getattr(config, "sliding_window", None)
        # Only models with several kinds of layers take one mask per kind.
        self._layer_types: Sequence[str] | None = None
        if layer_types and set(layer_types) != {"full_attention"}:
            self._layer_types = sorted(set(layer_types))
        elif layer_types or not getattr(config, "use_sliding_window", True):
            self.window = None
        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        self._layers = next((each for each in lists if len(each) == self.num_layers), torch.nn.ModuleList())
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits, self._says_positions = "logits_to_keep" in parameters, "position_ids" in parameters
        self.layer_shape: tuple[int, int] | None = None
        self.graphs = Graphs(self) if self.device.type == "cuda" else None

    def prompt_cache(self, num_tokens: int) -> PositionedCache:
        """Return an empty cache for a prompt of ``num_tokens`` and its answer, in the graphs' memory if available."""
        lent = None if self.graphs is None else self.graphs.lend(num_tokens + _DECODE_ROOM)
        return self.new_cache(num_tokens) if lent is None else lent

    def new_cache(self, num_tokens: int, room: int = _DECODE_ROOM) -> PositionedCache:
        """Return an empty cache for a prompt of ``num_tokens`` and ``room`` tokens of its answer."""
        return PositionedCache(self.num_layers, num_tokens + room, self.latent_first)

    @contextmanager
    def until(self, gone: threading.Event) -> Iterator[None]:
        """End every pass in the context before its next layer once ``gone`` is set, which leaves the cache unusable.

        Raises:
            GivenUp: ``gone`` was set.
        """

        def look(*_: object) -> None:
            # The capture of a pass must go on: it computes nothing, and the graph serves later prompts.
            if gone.is_set() and not torch.cuda.is_current_stream_capturing():
                raise GivenUp

        hooks = [layer.register_forward_pre_hook(look) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def append(self, ids: torch.Tensor, cache: PositionedCache | ModelsOwnCache, offset: int = 0) -> torch.Tensor:
        """Run the next tokens ``[batch, tokens]`` with the model's own masks.

        ``offset`` is added to all positions, which leaves the attention between the tokens unchanged.

        Returns:
            The last token's logits ``[batch, vocab]``.
        """
        if isinstance(cache, ModelsOwnCache):
            return cache.run(self.model, ids, self._says_positions, **self._kept(1))
        if ids.numel() > 1 or offset or self.graphs is None:
            return self.follow(ids, cache, offset, 1)[:, -1]
        at = torch.tensor([cache.length])
        replayed = self.graphs.run(cache, ids[0], at)
        if replayed is not None:
            cache.filled(cache.length + 1)
            return replayed[None]
        logits = self.follow(ids, cache, 0, 1)[:, -1]
        self.graphs.ran(cache, ids[0], at, logits[0])
        return logits

    @torch.inference_mode()
    def follow(
        self, ids: torch.Tensor, cache: PositionedCache, offset: int = 0, keep: int | None = None
    ) -> torch.Tensor:
        """Run the next tokens as :meth:`append` does; return logits ``[batch, keep, vocab]``.

        The logits are those of the last ``keep`` tokens, or of all tokens for None.
        """
        start, count = cache.length, ids.shape[1]
        cache.append(count)
        positions = torch.arange(start + offset, start + offset + count, device=self.device)[None]
        return self._forward(ids, positions, cache, None, keep or count)

    @torch.inference_mode()
    def scatter(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        at: torch.Tensor,
        visible: int,
        cache: PositionedCache,
        before_layer: Callable[[int], None],
        stop_layer: int | None = None,
        looks: Looks | None = None,
    ) -> LayerKV | torch.Tensor:
        """Run tokens ``ids``, ``[tokens]``, on the device, at ascending ``positions``, ``[tokens]``, in host memory.

        ``at`` holds the same positions on the device. The tokens see the first ``visible`` slots of the cache, more
        than the last position. ``before_layer`` is called with each layer's index before the layer writes or reads KV.
        ``looks`` receives the tokens' attention.

        Returns:
            The stop layer's fresh KV; without a stop layer, the last token's logits ``[vocab]``.
        """
        try:
            with cache.scattered(at, visible, before_layer, stop_layer), scattered(positions, at, looks):
                return self._forward(ids[None], at[None], cache, self._mask(at, visible))[0, -1]
        except StopForward as stop:
            return stop.fresh

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: PositionedCache, mask: Any, keep: int = 1
    ) -> torch.Tensor:
        """Return the logits of the last ``keep`` tokens, ``[batch, keep, vocab]``."""
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **self._kept(keep),
        )
        logits: torch.Tensor = output.logits[:, -keep:]
        return logits

    def _kept(self, last: int) -> dict[str, int]:
        return {"logits_to_keep": last} if self._keeps_logits else {}

    def _mask(self, positions: torch.Tensor, visible: int) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """Return the causal masks ``[1, 1, tokens, visible]`` for eager attention, one per kind of layer; else None."""
        if self.config._attn_implementation == NAME:
            return None
        keys = torch.arange(visible, device=self.device)
        causal = keys <= positions[:, None]

        def build(kind: str) -> torch.Tensor:
            allowed = causal
            if kind == "sliding_attention" and self.window is not None:
                allowed = causal & (keys > positions[:, None] - self.window)
            return additive(allowed, self.dtype)[None, None]

        if self._layer_types is None:
            return build("sliding_attention")
        return {kind: build(kind) for kind in self._layer_types}

    def rope_tables(self) -> list[CosSin]:
        """Return every distinct RoPE table of the model, computed in fp32 by the model's own rotary modules."""
        tables: list[CosSin] = []
        for module in self.model.modules():
            names = [
                n for n, _ in module.named_buffers(recurse=False) if n.endswith("inv_freq") and "original" not in n
            ]
            if not names:
                continue
            kinds = inspect.signature(module.forward).parameters
            for name in names:
                extra = {"layer_type": name.removesuffix("_inv_freq")} if "layer_type" in kinds else {}
                tables.append(self._table(module, extra, len(getattr(module, name))))
        return tables

    def _table(self, module: torch.nn.Module, extra: dict[str, str], frequencies: int) -> CosSin:
        def table(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            like = torch.zeros(1, dtype=torch.float32, device=self.device)
            made = module(like, positions[None].to(self.device), **extra)
            # DeepSeek-V2's tables are complex numbers. DeepSeek-V2 and gpt-oss have one value per pair of dimensions.
            cos, sin = (x[0].float() for x in ((made.real, made.imag) if torch.is_tensor(made) else made))
            if cos.shape[-1] == frequencies:
                return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            return cos, sin

        return table


class TransformersTarget(BlendTarget):
    """Lets the fusor blend one prompt on a :class:`ModelRunner`.

    Attributes:
        logits: Logits ``[vocab]`` of the prompt's last token; None before the sparse pass.
        cache: KV cache of the prompt; ready for decoding after the sparse pass.
    """

    def __init__(self, runner: ModelRunner, rope: Rope, token_ids: Sequence[int], cache: PositionedCache | None = None):
        """Prepare the prompt ``token_ids``; ``cache`` may already hold the KV of the first tokens."""
        self._runner = runner
        self._ids = whole_numbers(token_ids)
        self.num_layers, self.device, self.rope = runner.num_layers, runner.device, rope
        self.cache = runner.prompt_cache(len(token_ids)) if cache is None else cache
        self.logits: torch.Tensor | None = None

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        self.cache.place(layer, kv, move, positions)

    def place_layers(self, stored: StoredLayers) -> Callable[[int], None] | None:
        graphs = self._runner.graphs
        return None if graphs is None else graphs.place(self.cache, stored)

    def forward(
        self,
        positions: torch.Tensor,
        before_layer: Callable[[int], None],
        stop_layer: int | None = None,
        looks: Looks | None = None,
    ) -> LayerKV | None:
        """See :meth:`BlendTarget.forward`; the tokens' attention weights are added to ``looks``."""
        graphs = self._runner.graphs if self.placed and stop_layer is None else None
        ids = self._ids[positions]
        self.logits = None if graphs is None else graphs.run(self.cache, ids, positions, looks)
        if self.logits is None:
            ids = sent(ids, self.device)
            at, visible = sent(positions, self.device), int(positions[-1]) + 1
            result = self._runner.scatter(ids, positions, at, visible, self.cache, before_layer, stop_layer, looks)
            if isinstance(result, LayerKV):
                return result
            self.logits = result
            if graphs is not None:
                graphs.ran(self.cache, ids, positions, result, looks)
        self.cache.filled(len(self._ids))
        return None

    @property
    def shows_attention(self) -> bool:
        """Return whether the model's attention can be measured; eager attention of the model's own cannot."""
        return bool(self._runner.config._attn_implementation != "eager")

    def attention(self, watch_from: int, before_layer: Callable[[int], None]) -> _Watch:
        return _Watch(self, watch_from, before_layer, len(self._ids))

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """Return all of ``positions``: no other work waits for the model."""
        return positions

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Return ``deviation`` unchanged: one process holds all heads."""
        return deviation

    def agree(self, ok: bool) -> bool:
        """Return ``ok`` unchanged: there is no other rank."""
        return ok


class _Watch(Watch):
    """Runs all watched tokens in one pass."""

    def __init__(self, target: TransformersTarget, watch_from: int, before_layer: Callable[[int], None], tokens: int):
        self._target, self._watch_from, self._before_layer, self._tokens = target, watch_from, before_layer, tokens
        self._looks: Looks | None = None

    def run(self, positions: torch.Tensor) -> None:
        watched = (positions >= self._watch_from).float()
        self._looks = Looks(sent(watched / watched.sum(), self._target.device))
        self._target.forward(positions, self._before_layer, looks=self._looks)

    def mean(self) -> torch.Tensor:
        assert self._looks is not None
        return self._looks.mean(self._tokens)


class TransformersSubject(GateSubject):
    """Lets the gate and calibration drive a :class:`ModelRunner`."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.num_layers, self.dtype = runner.num_layers, runner.dtype
        self.vocab_size = int(runner.config.vocab_size)

    @property
    def window(self) -> int | None:
        return self.runner.window

    def detect_rope(self) -> Rope:
        """Run the same tokens at two offsets; return the rotation of their keys, and set ``runner.latent_first``."""
        old, new = two_runs(self.full_prefill, self.vocab_size)
        # Layer 0's KV depends on token and position alone. If only the second tensor moves, the first is MLA's latent.
        if not differ(old[0].k, new[0].k) and differ(old[0].v, new[0].v):
            self.runner.latent_first = True
            old, new = (tuple(LayerKV(x.v, x.k) for x in side) for side in (old, new))
        shapes = {(tensor.shape[0], tensor.shape[2]) for layer in old for tensor in layer}
        self.runner.layer_shape = shapes.pop() if len(shapes) == 1 else None
        return rope_of_runs(self.runner.rope_tables(), (old, new))

    def full_prefill(self, token_ids: Sequence[int], offset: int = 0) -> tuple[torch.Tensor, ChunkKV]:
        cache = self.runner.new_cache(len(token_ids))
        logits = self.runner.append(torch.tensor([token_ids], device=self.runner.device), cache, offset)[0]
        return logits, ChunkKV([cache.read(i, 0, 0, len(token_ids)) for i in range(self.num_layers)], offset)

    def fits(self, tokens: int) -> bool:
        return True

    def target(self, token_ids: Sequence[int], rope: Rope) -> BlendTarget:
        return TransformersTarget(self.runner, rope, token_ids)

    def logits(self, target: BlendTarget) -> torch.Tensor:
        assert isinstance(target, TransformersTarget)
        assert target.logits is not None
        return target.logits

    def kv(self, target: BlendTarget) -> list[LayerKV]:
        assert isinstance(target, TransformersTarget)
        return [target.cache.view(layer, 0, 0, target.cache.length) for layer in range(self.num_layers)]
