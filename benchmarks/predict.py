"""Predicts a prompt's cost on a GPU from counted launches, bytes and FLOPs. Nothing here is measured on one.

python benchmarks/predict.py [--shape llama-3.1-8b] [--chunks N] [--codec int8] [--flops F] [--memory B] [--bus B] [--json]

- FLOPs and bytes follow from the model's shape and the positions each pass computes, in bf16.
- Launches and synchronisations are counted: the transformers engine itself runs the prompt with a model of the same layers'
  structure, narrower, on the tests' simulated device, once with 2 layers and once with 4, which gives those of a layer.
- Time = the larger of what the device needs (the larger of FLOPs / ``--flops`` and bytes / ``--memory``, pass by pass), what
  launching takes on one thread (``--launch-us`` each), and, for stored KV in host memory, bytes / ``--bus``.

The defaults are an H200's: 770e12 bf16 FLOP/s and 4.3e12 bytes/s as large matrix products and copies reach them, 50e9 bytes/s
over PCIe 5. 20 us is what a launch takes that machine through Python, hooks and all: the 2,346 of a blend at 0% took it 49 ms.

"With graphs" is a blend whose stored KV is brought at once and whose passes are replayed (docs/performance.md): copies begin
behind the launches in front of them, and go on beside further launches and the first pass that reads all layers, which waits for
each group of layers. A second pass begins behind the first, and the launches between them behind both.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from cacheblend_rag import BlendSettings, SamplingParams, TransformersEngine
from cacheblend_rag.blending.bulk import Arrivals, StoredLayers, bring
from cacheblend_rag.blending.transfer import sent, transfer_to
from cacheblend_rag.engines.transformers.attention import Looks
from cacheblend_rag.lab.doctor.random_models import random_config
from cacheblend_rag.lab.doctor.workbench import Workbench
from cacheblend_rag.lab.policies import rank_for
from tests.device import simulated

QUESTION, BF16 = 32, 2
METHODS = {
    "full recompute": BlendSettings(quality="full"),
    "hkvd 15%": BlendSettings(0.15, "hkvd"),
    "static-query 15%": BlendSettings(0.15, "static-query"),
    "static 15%": BlendSettings(0.15, "static"),
    "static 5%": BlendSettings(0.05, "static"),
    "full KV reuse": BlendSettings(0.0, "static"),
}


@dataclass(frozen=True)
class Device:
    """Says what the device and its host can do; rates per second."""

    flops: float
    memory: float
    bus: float
    launch_s: float


@dataclass(frozen=True)
class Cost:
    """Holds the time of one prompt up to its first token; ``limit`` names what decides without graphs.

    ``replayed_launches`` and ``replayed_s`` are those with graphs; the full prefill has none.
    """

    computed_tokens: int
    flops: float
    device_bytes: float
    host_bytes: float
    launches: int
    synchronisations: int
    seconds: float
    limit: str
    replayed_launches: int
    replayed_s: float


class Counter(TorchDispatchMode):
    """Counts what would be a launch on a GPU: operators on the simulated device that make no mere view of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.synchronisations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fused = func is torch.ops.aten.scaled_dot_product_attention.default
        if not fused:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        tensors = [x for x in (*tree_leaves((args, kwargs)), *tree_leaves(out)) if isinstance(x, torch.Tensor)]
        if not any(x.device.type == simulated.NAME for x in tensors) or func.is_view or "empty" in func.__name__:
            return out
        self.launches += 1
        leaves = not any(isinstance(x, torch.Tensor) and x.device.type == simulated.NAME for x in tree_leaves(out))
        self.synchronisations += leaves
        return out


@dataclass(frozen=True)
class Counted:
    """Holds what one prompt asked of the host.

    Attributes:
        launches: Of all of it.
        synchronisations: How often it waited for the device.
        computed: Tokens.
        marks: Launches by when copies were asked for, when all had been, and before each replay.
    """

    launches: int
    synchronisations: int
    computed: int
    marks: tuple[int, ...] = ()


class Replayed:
    """Stands for the engine's graphs: asks for what stands in front of a pass, and computes nothing."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._arrivals = runner, Arrivals(runner.device, runner.num_layers)
        self.counter, self.marks = Counter(), [0]
        self.groups = [end - begin for begin, end, _ in self._arrivals.groups]

    def watch(self, counter: Counter) -> None:
        """Note from now on how many launches ``counter`` has seen at each step."""
        self.counter, self.marks = counter, []

    def _mark(self) -> None:
        self.marks.append(self.counter.launches)

    def lend(self, tokens: int) -> None:
        return None

    def kept(self, cache: Any) -> Any:
        return cache

    def place(self, cache: Any, stored: StoredLayers) -> Any:
        transfer = transfer_to(self._runner.device)
        assert transfer is not None
        sent(stored.table(), self._runner.device)

        def one_launch(_begin: int, _end: int, memory: torch.Tensor) -> None:
            memory[:1].zero_()

        self._mark()
        bring(stored, transfer, self._arrivals, one_launch, ())
        self._mark()
        return self._arrivals.wait

    def run(self, cache: Any, ids: torch.Tensor, positions: torch.Tensor, looks: Looks | None = None) -> torch.Tensor:
        self._mark()
        for into in (ids, positions) if looks is None else (ids, positions, positions):
            sent(into, self._runner.device)
        if looks is not None:
            looks.begin_layer(torch.zeros(1, int(positions[-1]) + 1, 1, device=self._runner.device))
            looks.layers = self._runner.num_layers
        return torch.zeros(self._runner.model.config.vocab_size, device=self._runner.device)


def _engine(layers: int, codec: str) -> TransformersEngine:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32768,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    engine = TransformersEngine(model, device=simulated.NAME, header=(1, 2), store=f"ram://?codec={codec}")
    for thread in threading.enumerate():  # KV that comes before there is page-locked memory is in ordinary memory
        if thread.name == "cacheblend-page-lock":
            thread.join()
    return engine


def count_launches(chunks: int, chunk_tokens: int, layers: int, codec: str = "none") -> dict[str, Counted]:
    """Return what every method asks for in a model of ``layers`` layers, without graphs."""
    two, four = (counted(chunks, chunk_tokens, few, codec, replayed=False)[0] for few in (2, 4))
    return {
        name: Counted(
            a.launches + (four[name].launches - a.launches) * (layers - 2) // 2,
            a.synchronisations + (four[name].synchronisations - a.synchronisations) * (layers - 2) // 2,
            a.computed,
        )
        for name, a in two.items()
    }


@cache
def counted(
    chunks: int, chunk_tokens: int, layers: int, codec: str, replayed: bool
) -> tuple[dict[str, Counted], list[int]]:
    """Return what every method asks for, and how many layers are waited for together where passes are replayed."""
    engine, found = _engine(layers, codec), {}
    place = Workbench(engine, "", None, torch.device(simulated.NAME), torch.float32, 256)
    prompt = place.prompt(place.random_chunks(chunks, chunk_tokens, 0), QUESTION, 0)
    rank_for(engine, METHODS["static 5%"])
    engine.precompute(place.random_chunks(chunks, chunk_tokens, 0))
    graphs = Replayed(engine.runner)
    if replayed:
        engine.runner.graphs = graphs  # type: ignore[assignment]
    for name, settings in METHODS.items():
        with Counter() as counter:
            graphs.watch(counter)
            done = engine.generate(prompt, SamplingParams(max_tokens=1), settings)
        computed = done.usage.computed_tokens
        found[name] = Counted(counter.launches, counter.synchronisations, computed, tuple(graphs.marks))
    engine.close()
    return found, graphs.groups


def with_graphs(device: Device, asked: Counted, groups: list[int], passes: list[float], host: float) -> float:
    """Return the seconds of a blend whose passes are replayed.

    Args:
        device: Where.
        asked: What it asks for; the last of ``passes`` are the replays, those before run while KV is not needed yet.
        groups: Layers that are waited for together.
        passes: Seconds of each on the device.
        host: Bytes of stored KV.
    """
    first, behind, *replays = asked.marks
    layers, on_host = sum(groups), first * device.launch_s
    now = on_host = max(on_host, sum(passes[: len(passes) - len(replays)]))
    arrivals, each = [], (behind - first) * device.launch_s / len(groups)
    for number, group in enumerate(groups):
        # Copied in, read to be rotated, written, and read once more where pieces are joined.
        takes = host * group / layers * (1 / device.bus + 4 / device.memory)
        now = max(now, on_host + number * each) + takes
        arrivals.append(now)
    on_host += (behind - first) * device.launch_s
    done, at = 0.0, behind
    for launches, seconds in zip(replays, passes[-len(replays) :], strict=True):
        done = on_host = max(on_host, done) + (launches - at) * device.launch_s
        at = launches
        for group, arrival in zip(groups, arrivals, strict=True):
            done = max(done, arrival) + seconds * group / layers
    return max(done, on_host + (asked.launches - at) * device.launch_s)


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of a Llama-like model, in numbers per token and layer."""

    layers: int
    layer_weights: int
    other_weights: int
    query_width: int
    kv_width: int
    head_dim: int

    @classmethod
    def of(cls, spec: str) -> Shape:
        config = random_config(spec)
        dim = config.hidden_size // config.num_attention_heads
        kv = 2 * config.num_key_value_heads * dim
        weights = config.hidden_size * (2 * config.hidden_size + kv) + 3 * config.hidden_size * config.intermediate_size
        return cls(
            config.num_hidden_layers, weights, config.vocab_size * config.hidden_size, config.hidden_size, kv, dim
        )

    def kv_bytes(self, codec: str) -> float:
        """Return the bytes of a token's KV in host memory."""
        each = BF16 if codec == "none" else 1 + BF16 / self.head_dim  # a scale for each head's numbers
        return self.layers * self.kv_width * each

    def passes(
        self, settings: BlendSettings, computed: int, chunks: int, chunk_tokens: int
    ) -> list[tuple[int, float, int, bool]]:
        """Return what :meth:`a_pass` is asked for each pass of a prompt, the one that gives its logits last."""
        prompt, stale = chunks * chunk_tokens + QUESTION, (chunks - 1) * chunk_tokens
        keys = prompt / 2 if settings.reuse == "off" else (prompt + chunk_tokens) / 2
        last = (computed, keys, self.layers, True)
        if settings.policy == "hkvd":
            return [(stale, prompt / 2, 1, False), last]
        if settings.policy == "static-query":
            return [(QUESTION, prompt, self.layers, True), last]
        return [last]

    def a_pass(self, tokens: int, keys: float, layers: int, ends: bool) -> tuple[float, float]:
        """Return FLOPs and device bytes of ``tokens`` queries with ``keys`` visible keys each on average through ``layers``."""
        flops = layers * (2 * self.layer_weights * tokens + 4 * self.query_width * tokens * keys)
        moved = layers * (BF16 * self.layer_weights + BF16 * tokens * (4 * self.query_width + self.kv_width))
        moved += layers * BF16 * self.kv_width * keys
        return flops + 2 * self.other_weights * ends, moved + BF16 * self.other_weights * ends


def predict(shape: Shape, device: Device, chunks: int, chunk_tokens: int, codec: str = "none") -> dict[str, Cost]:
    """Predict every method."""
    counts = count_launches(chunks, chunk_tokens, shape.layers, codec)
    replays, groups = counted(chunks, chunk_tokens, shape.layers, codec, replayed=True)
    costs = {}
    for name, settings in METHODS.items():
        launches, syncs, computed = counts[name].launches, counts[name].synchronisations, counts[name].computed
        whole = settings.reuse == "off"
        passes = [shape.a_pass(*each) for each in shape.passes(settings, computed, chunks, chunk_tokens)]
        host = 0 if whole else shape.kv_bytes(codec) * chunks * chunk_tokens
        computing = [max(f / device.flops, b / device.memory) for f, b in passes]
        times = {
            "compute": sum(computing) + 4 * host / device.memory,
            "launches": launches * device.launch_s,
            "loading": host / device.bus,
        }
        limit = max(times, key=lambda what: times[what])
        flops, moved = (sum(side) for side in zip(*passes, strict=True))
        replayed = times[limit] if whole else with_graphs(device, replays[name], groups, computing, host)
        costs[name] = Cost(
            computed, flops, moved + 4 * host, host, launches, syncs, times[limit], limit,
            launches if whole else replays[name].launches, replayed,
        )  # fmt: skip
    return costs


@contextmanager
def quiet() -> Iterator[None]:
    with simulated.usable(), torch.inference_mode():
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="as --random-weights of `cacheblend bench`")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--codec", default="none", choices=["none", "int8"], help="as host memory holds KV")
    parser.add_argument("--flops", type=float, default=770e12)
    parser.add_argument("--memory", type=float, default=4.3e12)
    parser.add_argument("--bus", type=float, default=50e9)
    parser.add_argument("--launch-us", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = Device(options.flops, options.memory, options.bus, options.launch_us / 1e6)
    with quiet():
        costs = predict(Shape.of(options.shape), device, options.chunks, options.chunk_tokens, options.codec)
    if options.json:
        print(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=2))
        return
    full = costs["full recompute"].seconds
    print(
        "| | tokens | TFLOP | GB on the device | MB from the host | launches | syncs | predicted | limit | speed-up "
        "| launches with graphs | predicted | speed-up |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|")
    for name, c in costs.items():
        print(
            f"| {name} | {c.computed_tokens:,} | {c.flops / 1e12:.1f} | {c.device_bytes / 1e9:.1f} | {c.host_bytes / 1e6:.0f} "
            f"| {c.launches:,} | {c.synchronisations} | {1000 * c.seconds:.1f} ms | {c.limit} | {full / c.seconds:.1f}x "
            f"| {c.replayed_launches:,} | {1000 * c.replayed_s:.1f} ms | {full / c.replayed_s:.1f}x |"
        )


if __name__ == "__main__":
    main()
