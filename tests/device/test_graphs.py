"""Tests that placing stored KV at once equals placing it layer by layer, and that replayed passes equal ordinary passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan

from cacheblend_rag.blending import reads
from cacheblend_rag.blending.bulk import Arrivals, StoredLayers
from cacheblend_rag.blending.fusor import fuse_stepwise
from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.policies import Candidates
from cacheblend_rag.blending.policies import policy as policy_named
from cacheblend_rag.blending.rope import Move, moved
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines import spans as engine_spans
from cacheblend_rag.engines.kernels import check
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine, graphs
from cacheblend_rag.engines.transformers.engine import planned
from cacheblend_rag.engines.transformers.graphs import Graphs
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.store import open_store
from cacheblend_rag.store.codec import numbers
from cacheblend_rag.store.kv import ChunkKV, LayerKV, join_tokens
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import blended_logits
from tests.blending.writers import write_writer
from tests.device import simulated
from tests.device.conftest import NO_CUDA
from tests.engines.kernels.interpreter import interpret

STATIC = BlendSettings(0.25, "static")
ANSWER = SamplingParams(max_tokens=8)


@dataclass(frozen=True)
class Places:
    """The places of the layers, for :func:`place_in_torch`."""

    caches: Sequence[LayerKV]
    offsets: Any

    def _replace(self, offsets: Any) -> Places:
        return replace(self, offsets=offsets)


def place_in_torch(memory: torch.Tensor, staged: Any, move: Move | None, layers: Places) -> None:
    """Place as the kernel does, in operations that the simulated device checks."""
    _, heads, _, dim = layers.caches[0].k.shape
    before, within, length, slots = staged
    placed = layers.offsets.raw.tolist()
    for number, layer in enumerate(placed):
        ahead = before * len(placed) + number * length
        rows = [
            [2 * heads * ahead + (side * heads + head) * length + within for head in range(heads)] for side in (0, 1)
        ]
        dtype = layers.caches[layer].k.dtype
        width = dim + dtype.itemsize if memory.dtype == torch.uint8 else dim
        kv = LayerKV(*(torch.stack([memory.view(-1, width).index_select(0, row) for row in side]) for side in rows))
        kv = kv if width == dim else numbers(kv, dtype)
        for cache, tensor in zip(layers.caches[layer], moved(kv, move), strict=True):
            cache[0].index_copy_(1, slots, tensor)


class LayerByLayer:
    """A block whose layers are separate allocations, because the simulated device tracks streams by whole allocations."""

    def __init__(self, layers: list[list[torch.Tensor]]):
        self._layers = layers
        one = layers[0][0]
        self.shape = (2, len(layers), *one.shape)
        self.dtype, self.device = one.dtype, one.device

    def record_stream(self, stream: Any) -> None:
        for side in self._layers:
            for tensor in side:
                tensor.record_stream(stream)

    def __getitem__(self, at: tuple[Any, ...]) -> Any:
        side, layer, _ = at  # with a batch of one
        if isinstance(layer, int):
            return self._layers[layer][side][None]
        return [each[side][None] for each in self._layers[layer]]


class RecordingSpan(NonRecordingSpan):
    """A span that is recorded and exported nowhere."""

    def __init__(self) -> None:
        super().__init__(INVALID_SPAN_CONTEXT)

    def is_recording(self) -> bool:
        return True


@pytest.fixture
def at_once(sim: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Make an engine on the simulated device place all layers at once; it captures nothing."""
    interpret(monkeypatch)  # the kernels run as they were first imported
    from cacheblend_rag.engines.kernels import place

    monkeypatch.setattr(graphs, "placing_works", lambda *_: True)
    monkeypatch.setattr(check, "rows_work", lambda *_: True)
    monkeypatch.setattr(graphs, "total_memory", lambda device: 1 << 30)
    monkeypatch.setattr(place, "place_layers", place_in_torch)
    monkeypatch.setattr(place.Layers, "of", lambda caches: Places(caches, torch.arange(len(caches), device=sim)))

    def turned(engine: Any) -> Any:
        runner = engine.runner
        runner.graphs = Graphs(runner)
        runner.graphs.replays.refused, runner.graphs.brought = True, 0
        place = runner.graphs.place

        def brings(*args: Any) -> Any:
            waiting = place(*args)
            runner.graphs.brought += waiting is not None
            return waiting

        runner.graphs.place = brings

        def block(capacity: int) -> LayerByLayer:
            heads, dim = runner.layer_shape
            size = (heads, capacity, dim)
            return LayerByLayer([[torch.empty(size, device=sim) for _ in range(2)] for _ in range(runner.num_layers)])

        monkeypatch.setattr(runner.graphs, "_new_block", block)
        return engine

    return turned


def shallow(family: str) -> Any:
    """Return a family's configuration with three of its five layers, because an interpreted layer takes seconds."""
    config = BLENDED[family]()
    config.num_hidden_layers = 3
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:3]
    return config


def on(device: str, scene: Scene, family: str = "llama", config: Any = None, **options: Any) -> Any:
    model = make_model(config or BLENDED[family]())
    return TransformersEngine(model, device=device, header=scene.header, ranking="now", **options)


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.parametrize(
    ("family", "policy", "codec"),
    [
        ("llama", "static", "int8"),
        ("llama", "hkvd", "none"),
        ("gemma3", "static-query", "none"),
    ],
)
def test_layers_placed_at_once_give_the_logits_of_placing_layer_by_layer(
    sim: str, at_once: Callable[[Any], Any], family: str, policy: str, codec: str
) -> None:
    scene = Scene()
    found = []
    for turn in (lambda engine: engine, at_once):
        store = open_store(f"ram://4MiB?codec={codec}")
        engine = turn(on(sim, scene, config=shallow(family), store=store))
        engine.precompute(scene.chunks)
        copies = simulated.SimulatedTensor.copies
        logits, recomputed, outcome = blended_logits(engine, scene, BlendSettings(0.25, policy))
        found.append((logits.cpu(), recomputed, outcome.loaded_bytes, outcome.loads))
        copies = simulated.SimulatedTensor.copies - copies
    want, got = found
    assert got[1:] == want[1:]
    assert torch.equal(got[0], want[0])
    assert engine.runner.graphs.brought, "layers were placed one by one"
    if (
        family == "llama"
    ):  # a copy for each entry and group of layers, up to a check of each layer; and ids, positions, tables
        assert copies <= (1 + len(scene.chunks)) * (1 + len(engine.runner.graphs._placed.groups)) + 10


@pytest.mark.device
def test_a_traced_request_has_its_layers_placed_at_once(
    sim: str, at_once: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_spans.spans, "begin", lambda *_, **__: RecordingSpan())
    traced: list[Any] = []
    monkeypatch.setattr(engine_spans, "_add_parts", lambda span, events: traced.append(events))
    scene = Scene()
    engine = at_once(on(sim, scene, store=open_store(None, ram_budget=1 << 22)))
    engine.precompute(scene.chunks)
    for settings, first in ((STATIC, 0), (BlendSettings(0.25, "hkvd", check_layers=(1,)), 2)):
        before = engine.runner.graphs.brought
        done = engine.generate(scene.prompt, ANSWER, settings)
        assert engine.runner.graphs.brought == before + 1
        loads = [event for event in traced[-1] if event.kind == "loading"]
        assert loads[-1].name == f"layers {first} to {engine.num_layers - 1}"
        assert {event.details["tier"] for event in loads} == {"ram"}
        assert sum(event.details["bytes"] for event in loads) == sum(load.nbytes for load in done.loads)


@pytest.mark.device
def test_copies_in_groups_of_bounded_memory_give_the_same_logits(
    sim: str, at_once: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend_rag.blending import bulk

    scene = Scene()
    engine = at_once(on(sim, scene, store=open_store(None, ram_budget=1 << 22)))
    engine.precompute(scene.chunks)
    want, *_ = blended_logits(engine, scene, STATIC)
    monkeypatch.setattr(bulk, "_STAGED_BYTES", 1)  # a layer at a time
    got, *_ = blended_logits(engine, scene, STATIC)
    assert torch.equal(got.cpu(), want.cpu())


@pytest.mark.device
def test_the_simulated_device_detects_a_missing_wait_for_a_group(
    sim: str, at_once: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene()
    engine = at_once(on(sim, scene, store=open_store(None, ram_budget=1 << 22)))
    engine.precompute(scene.chunks)
    monkeypatch.setattr(Arrivals, "wait", lambda self, layer: None)
    with pytest.raises(RuntimeError, match="another stream may still be using"):
        blended_logits(engine, scene, STATIC)


@pytest.mark.device
def test_an_abandoned_blend_leaves_no_copies_that_conflict_with_later_writes(
    sim: str, at_once: Callable[[Any], Any]
) -> None:
    scene = Scene()
    engine = at_once(on(sim, scene, store=open_store(None, ram_budget=1 << 22)))
    engine.precompute(scene.chunks)
    request = engine.request(scene.prompt, ANSWER, STATIC)
    target = TransformersTarget(engine.runner, engine.rope, scene.prompt.token_ids)
    steps = fuse_stepwise(planned(engine, request), target, request.options)
    assert next(steps).kind == "sparse"  # all stored KV is being copied
    steps.close()
    for layer in range(engine.num_layers):  # as another request would reuse the memory
        for side in range(2):
            target.cache.block[side, layer, None].zero_()


def test_the_table_gives_each_tokens_offset_in_its_entry_and_the_entrys_offset() -> None:
    def span(start: int, end: int, tokens: int, skip: int) -> StoredSpan:
        kv = LayerKV(*torch.zeros(2, 1, tokens, 2))
        return StoredSpan(start, end, ChunkKV([kv], 0), skip=skip)

    spans = (span(3, 6, 5, 2), span(6, 13, 7, 0), span(20, 22, 4, 1))
    before, own, whole = StoredLayers(0, spans, (), torch.empty(0)).table().tolist()
    assert before == [0] * 3 + [5] * 7 + [12] * 2
    assert own == [2, 3, 4, *range(7), 1, 2]
    assert whole == [5] * 3 + [7] * 7 + [4] * 2
    assert StoredLayers(0, (), (), torch.empty(0)).table().shape == (3, 0)


def place_here(num_layers: int, cache: Any, stored: StoredLayers) -> Callable[[int], None] | None:
    """Place all stored KV at once, without a device."""
    if cache.block is None:
        return None
    for layer in range(stored.first, num_layers if stored.spans else 0):
        parts = [
            LayerKV(*(t[:, span.skip : span.skip + span.end - span.start] for t in span.kv.layer(layer)))
            for span in stored.spans
        ]
        cache.place(layer, join_tokens(parts), stored.moves[layer], stored.positions)
    return lambda layer: None


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Make an engine on a CPU replay passes by running them again, with the kernels in Triton's interpreter."""
    interpret(monkeypatch)
    # An interpreted parity gate takes seconds, and it replays no passes.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(reads._CPUReads, "in_place", True)
    monkeypatch.setattr(ChunkKV, "blocks", lambda self, begin, end: [])
    monkeypatch.setattr(graphs, "total_memory", lambda device: 1 << 30)
    monkeypatch.setattr(graphs, "_LEAST_CAPACITY", 64)
    monkeypatch.setattr(Arrivals, "record", lambda self: None)
    monkeypatch.setattr(Arrivals, "wait", lambda self, layer: None)

    def turned(engine: Any) -> Any:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        found = engine.runner.graphs = Graphs(engine.runner)
        found.replays.refused = False

        def capture(run: Callable[[], Any], pool: Any) -> Any:
            before = found._block.clone()
            logits, looks = run()
            found._block.copy_(before)  # a capture runs nothing

            def replay() -> None:
                new, looked = run()
                logits.copy_(new)
                if looks is not None:
                    looks.total.copy_(looked.total)

            return (logits, looks), replay, pool

        monkeypatch.setattr(graphs, "capture", capture)
        monkeypatch.setattr(found, "place", partial(place_here, engine.num_layers))
        return engine

    return turned


@pytest.mark.slow
def test_a_replayed_pass_padded_by_its_last_token_gives_the_same_logits(
    replayed: Callable[[Any], Any],
) -> None:
    scene = Scene(chunk_tokens=(12, 9, 15, 10))
    engine = replayed(engine_for(make_model(shallow("llama")), scene, ranking="now"))
    engine.precompute(scene.chunks)
    runner = engine.runner
    ids = torch.tensor(scene.prompt.token_ids)
    for count in (13, 32):  # both fit a graph of 32
        positions = torch.arange(len(ids) - count, len(ids))
        found = []
        for _ in range(3):
            cache = runner.prompt_cache(len(ids))
            runner.append(ids[None, :-count], cache)
            logits = runner.graphs.run(cache, ids[positions], positions)
            if logits is None:
                logits = runner.scatter(ids[positions], positions, positions, len(ids), cache, lambda layer: None)
                runner.graphs.ran(cache, ids[positions], positions, logits)
            found.append(logits)
            del cache
        assert [width for width, _ in runner.graphs.replays.passes] == [32]
        for got in found:
            assert (got - found[0]).abs().max() < 1e-4


@pytest.mark.slow
def test_the_questions_replayed_pass_gives_the_attention_and_selection_of_the_ordinary_pass(
    replayed: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(chunk_tokens=(12, 9, 15, 10))
    seen: list[torch.Tensor] = []

    def watched(self: Any, candidates: Candidates) -> torch.Tensor:
        assert candidates.attention is not None
        seen.append(candidates.attention)
        return candidates.static.sqrt() * candidates.attention

    monkeypatch.setattr(type(policy_named("static-query")), "score", watched)
    found, store = [], open_store(None, ram_budget=1 << 22)
    for turn, rounds in ((lambda engine: engine, 1), (replayed, 3)):
        engine = turn(on("cpu", scene, config=shallow("gemma3"), store=store))
        engine.precompute(scene.chunks)
        for _ in range(rounds):
            found.append(blended_logits(engine, scene, BlendSettings(0.25, "static-query")))
    assert sorted(looks for _, looks in engine.runner.graphs.replays.passes) == [False, True]
    for (logits, chosen, _), attention in zip(found, seen, strict=True):
        assert (attention - seen[0]).abs().max() < 1e-6
        assert chosen == found[0][1]
        assert (logits - found[0][0]).abs().max() < 1e-4


@pytest.mark.slow
def test_an_answer_longer_than_the_graphs_memory_continues_without_graphs(replayed: Callable[[Any], Any]) -> None:
    engine = replayed(engine_for(make_model(shallow("llama")), Scene()))
    runner, token = engine.runner, torch.tensor([[5]])
    cache = runner.prompt_cache(4)
    runner.append(torch.tensor([[7, 8, 9, 10]]), cache)
    for _ in range(3):
        runner.append(token, cache)
    assert [width for width, _ in runner.graphs.replays.passes] == [1]
    room = cache.block.shape[3]
    cache.filled(room - 1)
    runner.append(token, cache)
    assert cache.block is not None
    runner.append(token, cache)
    assert (cache.block, cache.length) == (None, room + 1)


@pytest.mark.slow
def test_a_model_whose_layers_differ_answers_without_graphs(replayed: Callable[[Any], Any]) -> None:
    scene, model = Scene(), make_model(BLENDED["deepseek_v3"]())
    want = engine_for(model, scene).generate(scene.prompt, ANSWER).token_ids
    engine = replayed(engine_for(model, scene))
    assert engine.generate(scene.prompt, ANSWER).token_ids == want
    assert engine.runner.graphs.replays.passes == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_passes_of_a_kv_writer_use_no_graph(replayed: Callable[[Any], Any], tmp_path: Path, family: str) -> None:
    scene, target = (
        Scene(header=1, chunk_tokens=(12, 1, 15, 1)),
        ["q_proj" if family == "llama" else "q_b_proj", "o_proj"],
    )
    write_writer(tmp_path, shallow(family), target_modules=target)
    model = make_model(shallow(family))
    plain = engine_for(model, scene, writer=tmp_path, ranking="off")
    engine = replayed(engine_for(model, scene, writer=tmp_path, ranking="off"))
    for _ in range(2):
        for chunk in scene.chunks:
            for each in (plain, engine):
                each.precompute([chunk])
        few = SamplingParams(max_tokens=3)  # an interpreted token takes a third of a second
        found = [each.generate(scene.prompt, few, BlendSettings(ratio=0.3)) for each in (plain, engine)]
        assert found[0].token_ids == found[1].token_ids
        for chunk in scene.chunks:
            ours, theirs = (each.entries.get(chunk.token_ids, each.num_layers) for each in (engine, plain))
            assert torch.equal(ours.layer(2).v, theirs.layer(2).v)
        for each in (plain, engine):
            each.forget(scene.chunks)


@pytest.mark.slow
def test_two_concurrent_prompts_use_separate_memory(replayed: Callable[[Any], Any]) -> None:
    scene = Scene()
    engine = replayed(engine_for(make_model(BLENDED["llama"]()), scene))
    one, two = (engine.runner.prompt_cache(40) for _ in range(2))
    assert one.block is not two.block
    block = one.block
    del one
    assert engine.runner.prompt_cache(40).block is block
    assert engine.runner.prompt_cache(5000).block.shape[3] == 8192


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window", "gemma3"])
@pytest.mark.parametrize("policy", ["static", "hkvd", "static-query"])
def test_a_replayed_blend_on_a_gpu_equals_the_blend_on_the_cpu(family: str, policy: str) -> None:
    scene, how = Scene(chunk_tokens=(300, 200, 400, 250)), BlendSettings(0.2, policy)
    there, here = on("cuda", scene, family), engine_for(make_model(BLENDED[family]()), scene, ranking="now")
    found: dict[str, list[torch.Tensor]] = {"there": [], "here": []}
    for name, engine, rounds in (("there", there, 4), ("here", here, 1)):
        engine.on_first_logits = lambda logits, name=name: found[name].append(logits.float().cpu())
        engine.precompute(scene.chunks)
        answers = []
        for _ in range(rounds):
            engine.reset_prefix_cache()
            answers.append(engine.generate(scene.prompt, ANSWER, how))
        assert {answer.mode for answer in answers} == {"blend"}
    assert there.runner.graphs.replays.passes, "nothing was captured"
    for logits in found["there"]:
        assert (logits - found["here"][0]).abs().max() < 1e-2


@pytest.mark.gpu
@NO_CUDA
def test_interleaved_prompts_on_a_gpu_do_not_change_each_others_answers() -> None:
    scenes = [Scene(seed, chunk_tokens=(300, 200, 400)) for seed in (1, 2)]
    engine = on("cuda", scenes[0])
    for scene in scenes:
        scene.header = scenes[0].header
        engine.precompute(scene.chunks)
    alone = []
    for _ in range(3):
        engine.reset_prefix_cache()
        alone = [engine.generate(scene.prompt, ANSWER, STATIC).token_ids for scene in scenes]
    engine.reset_prefix_cache()
    streams = [engine.stream(scene.prompt, ANSWER, STATIC) for scene in scenes]
    ends: list[Any] = [None, None]
    while not all(end is not None and end.generation for end in ends):
        ends = [next(stream, end) for stream, end in zip(streams, ends, strict=True)]
    assert [end.generation.token_ids for end in ends] == alone
