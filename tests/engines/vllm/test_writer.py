"""Compare blends of chunks that a KV writer has written in vLLM with the reference over KV of peft's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.writer import describe
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import ModelFingerprint, read_whole
from tests.blending import reference
from tests.blending.families import make_model
from tests.blending.prompts import Scene
from tests.blending.writers import alter_config, write_for
from tests.engines.vllm.engines import FULL, PIECES, SHAPE, VOCABULARY, concurrently, first_logprobs, save_model, start
from tests.engines.vllm.test_windows import _PIECES, _SHORT

SCENE = Scene(chunk_tokens=(150, 90, 170, 61), question=9)
ANSWER = SamplingParams(max_tokens=24)
PARTS = SCENE.parts()  # the first chunk has the model's own KV behind the header
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "llama, chunked prefill": (
        lambda: hf.LlamaConfig(**SHAPE),
        PIECES,
        {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    ),
    "phi3, which has joined modules, compiled": (lambda: hf.Phi3Config(**SHAPE), {"enforce_eager": False}, {}),
    "gemma3, windows shorter than a chunk": (lambda: hf.Gemma3TextConfig(**SHAPE, **_SHORT), _PIECES, {}),
    "llama, two ranks": (lambda: hf.LlamaConfig(**SHAPE), {"tensor_parallel_size": 2}, {}),
    "qwen3, behind the probe": (lambda: hf.Qwen3Config(**SHAPE, head_dim=32), PIECES, {}),
}


class Case(NamedTuple):
    """An engine with a writer, its model, the reference's options, the directory of both, and the writer's name or directory.

    The options ``how`` are the model with the writer in it, or the probe between header and chunk.
    """

    engine: Any
    model: Any
    how: dict[str, Any]
    directory: Path
    name: Any


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    config, options, lora = CASES[request.param]
    directory = tmp_path_factory.mktemp("model")
    model = save_model(config(), directory / "model")
    name: Path | str = directory / "writer"
    if "probe" in request.param:
        name, how = "probe", {"behind": probe_ids(None, VOCABULARY, model.config.max_position_embeddings)}
    else:
        fingerprint = ModelFingerprint.from_directory(directory / "model", torch.float32)
        how = {"writer": write_for(make_model(config()), fingerprint, directory / "writer", **lora).eval()}
    with start(
        directory / "model",
        directory / "store",
        header=SCENE.header,
        ram_budget=0,
        writer=name,
        **options,
    ) as engine:
        yield Case(engine, model, how, directory, name)


def computed(case: Case) -> Any:
    done = case.engine.precompute(SCENE.chunks)
    assert not done.failed
    return case.engine


def test_ratio_1_is_the_full_prefill_of_the_model_itself(engine: Any, case: Case) -> None:
    full = first_logprobs(engine, SCENE.prompt, FULL)
    with torch.no_grad():
        want = case.model(input_ids=torch.tensor([SCENE.prompt.token_ids]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(full, want.log_softmax(-1), atol=1e-4, rtol=0)
    computed(case)
    for settings in (BlendSettings(ratio=1.0), FULL, BlendSettings(quality="exact")):
        torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, settings), full, atol=1e-4, rtol=0)


# With windows shorter than a chunk, deviations at layer 1 are little more than rounding.
@pytest.mark.parametrize(("ratio", "check"), [(0.0, 1), (0.15, 3), (0.5, 3)])
def test_blends_equal_the_reference_over_kv_of_pefts_model(engine: Any, case: Case, ratio: float, check: int) -> None:
    got = first_logprobs(computed(case), SCENE.prompt, BlendSettings(ratio, "hkvd", (check,)))
    want = reference.blend(case.model, SCENE.header, PARTS, ratio, (check,), **case.how)
    torch.testing.assert_close(got, want.logits.log_softmax(-1), atol=1e-4, rtol=0)
    plain = reference.blend(case.model, SCENE.header, SCENE.parts(), ratio, (check,)).logits.log_softmax(-1)
    assert (got - plain).abs().max() > 1e-2, "the writer changes too little: the test would prove nothing"


def test_the_ranking_is_measured_while_the_writer_acts(engine: Any, case: Case) -> None:
    engine.ranking = "now"
    computed(case)
    engine.ranking = "lazy"
    header, probe = SCENE.header, list(engine.probe)
    positions = torch.tensor([at for span in SCENE.prompt.spans[1:] for at in range(span.start, span.end)])
    score = torch.cat(
        [
            reference.static_deviation(
                case.how.get("writer", case.model), header, probe, list(chunk.token_ids), case.how.get("behind", ())
            )
            for chunk in SCENE.chunks[1:]
        ]
    )
    chosen = positions[score.argsort(descending=True)[: round(0.3 * len(score))]].sort().values.tolist()
    want = reference.blend(case.model, header, PARTS, 0.3, chosen=chosen, **case.how)
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(0.3, "static", (1,)))
    torch.testing.assert_close(got, want.logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_both_engines_write_the_same_kv_under_the_same_keys(engine: Any, case: Case) -> None:
    computed(case)
    assert engine.precompute_first(SCENE.chunks).computed == len(SCENE.chunks)
    wanted = [(), *(chunk.token_ids for chunk in SCENE.chunks)]
    ours = [(by, ids, _whole(engine.entries.by(by), ids)) for by in (engine.writer, None) for ids in wanted]
    store = case.directory / "transformers"
    with TransformersEngine(
        case.directory / "model", tokenizer=object(), device="cpu", header=SCENE.header, store=store, ranking="off",
        writer=case.name,
    ) as other:  # fmt: skip
        other._probe = case.how.get("behind", ())
        other.precompute(SCENE.chunks)
        other.precompute_first(SCENE.chunks)
        for by, ids, mine in ours:
            hand = other.entries.by(by)
            assert hand.own_key(ids) in engine.entries.by(by).read_keys(ids)
            theirs = hand.get(ids, other.num_layers)
            for layer in range(other.num_layers):
                for a, b in zip(mine(layer), theirs.layer(layer), strict=True):
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def _whole(entries: Any, ids: Any) -> Any:
    """Return a function that gives a layer of an entry, with its ranks' shards joined."""
    parts = [read_whole(entries.store.get(key)) for key in entries.written_keys(ids)]
    return lambda layer: [torch.cat(side) for side in zip(*(part.layer(layer) for part in parts), strict=True)]


def test_the_writer_does_not_change_prompts_that_stream_meanwhile(engine: Any, case: Case) -> None:
    before = engine.generate(SCENE.prompt, ANSWER, FULL).token_ids

    async def ask() -> Any:
        return [event async for event in engine.events(engine.request(SCENE.prompt, ANSWER, FULL))][-1].generation

    found = concurrently(engine, [ask, lambda: engine.register(SCENE.chunks), ask])
    assert found[0].token_ids == found[2].token_ids == before
    assert not found[1].failed
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio=0.0))
    want = reference.blend(case.model, SCENE.header, PARTS, 0.0, **case.how)
    torch.testing.assert_close(got, want.logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_the_writer_writes_back_missing_chunks_of_a_prompt(engine: Any, case: Case) -> None:
    engine.generate(SCENE.prompt, ANSWER)
    engine.flush()
    hands = (engine.entries, engine.entries.by(None))
    stored = [[hand.contains(chunk.token_ids) for chunk in SCENE.chunks] for hand in hands]
    assert stored == [[True] * len(SCENE.chunks), [chunk is SCENE.chunks[0] for chunk in SCENE.chunks]]
    assert engine.generate(SCENE.prompt, ANSWER, BlendSettings(ratio=0.5)).mode == "blend"


def test_the_first_prompt_that_begins_with_a_chunk_stores_the_models_own_kv_of_it(engine: Any, case: Case) -> None:
    computed(case)
    first, own = SCENE.chunks[0], engine.entries.by(None)
    for ratio, check in ((0.0, 1), (0.5, 3)):
        settings = BlendSettings(ratio, "hkvd", (check,))
        want = reference.blend(case.model, SCENE.header, PARTS, ratio, (check,), **case.how).logits.log_softmax(-1)
        for lacking in ((first.id,), ()):
            assert own.contains(first.token_ids) == (not lacking)
            torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, settings), want, atol=1e-4, rtol=0)
            answer = engine.generate(SCENE.prompt, SamplingParams(max_tokens=1), settings)
            assert (answer.mode, answer.missing, answer.lacking("own_kv")) == ("blend", (), lacking)
            engine.flush()
            engine.reset_prefix_cache()
        for key in own.written_keys(first.token_ids):
            engine.store.delete(key)


def test_chunks_that_end_anywhere_in_a_block_are_written(engine: Any, case: Case) -> None:
    size = int(engine.llm.vllm_config.cache_config.block_size)
    scene = Scene(seed=3, chunk_tokens=tuple(range(size - 6, size)))
    for chunk in scene.chunks:
        assert not engine.precompute([chunk]).failed
        engine.forget([chunk])
        assert not engine.precompute([chunk]).failed  # now vLLM's prefix cache has a part of the chunk
    engine.precompute(scene.chunks)
    scene.header = SCENE.header
    got = first_logprobs(engine, scene.prompt, BlendSettings(ratio=0.0))
    want = reference.blend(case.model, SCENE.header, scene.parts(), 0.0, **case.how)
    torch.testing.assert_close(got, want.logits.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", ["another model", "a module that vLLM has not", "DoRA"])
def test_an_unusable_writer_is_refused_when_vllm_starts(tmp_path: Path, fault: str) -> None:
    directory, more = tmp_path / "model", {}
    save_model(hf.LlamaConfig(**SHAPE), directory)
    fingerprint = ModelFingerprint.from_directory(directory, torch.float32)
    if fault == "a module that vLLM has not":
        more = {"target_modules": ["lm_head", "q_proj"]}
    write_for(make_model(hf.LlamaConfig(**SHAPE)), fingerprint, tmp_path / "writer", **more)
    if fault == "another model":
        describe(tmp_path / "writer", ModelFingerprint("0" * 32, "other"), {})
    if fault == "DoRA":
        alter_config(tmp_path / "writer", use_dora=True)
    with pytest.raises(InputError, match=f"KV writer in {tmp_path / 'writer'} cannot be used"):
        start(directory, tmp_path / "store", header=SCENE.header, writer=tmp_path / "writer")
