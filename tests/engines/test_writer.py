"""Tests which KV writers are refused, and that an engine reads no entries of another writer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cacheblend_rag.blending.profile import ModelProfile, load_profile, save_profile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.models import writer_directory, writer_of
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.writer import KVWriter, Writing, describe
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.retrieval.database import IndexConfig
from cacheblend_rag.store import open_store
from cacheblend_rag.store.kv import ChunkKV, ModelFingerprint, WrittenBy
from tests.blending.families import BLENDED, NOT_BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import blended_logits
from tests.blending.writers import alter_config, fingerprint_of, write_writer

SCENE = Scene()
ONE = SamplingParams(max_tokens=1)
LLAMA = BLENDED["llama"]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(LLAMA())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_writer(tmp_path / "writer", LLAMA())
    return tmp_path / "writer"


def weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no such directory": (lambda d: (d / "writer.json").unlink(), "has no writer.json; give the directory"),
    "a newer format": (lambda d: (d / "writer.json").write_text('{"format": 2}'), "its format is 2"),
    "no JSON": (lambda d: (d / "writer.json").write_text("{"), "writer.json cannot be read"),
    "a list": (lambda d: (d / "adapter_config.json").write_text("[]"), "is no JSON object"),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), "safetensors cannot be read"),
    "half the weights": (
        lambda d: (d / "adapter_model.safetensors").write_bytes((d / "adapter_model.safetensors").read_bytes()[:4000]),
        "safetensors cannot be read",
    ),
    "another model": (
        lambda d: describe(d, ModelFingerprint("0" * 32, "other"), {}),
        "made for another model .00000000. than .* make one with `cacheblend learn --model",
    ),
    "DoRA": (lambda d: alter_config(d, use_dora=True), "takes use_dora of peft's"),
    "a bias": (lambda d: alter_config(d, bias="all"), "takes bias of peft's"),
    "scales of its own": (lambda d: alter_config(d, alpha_pattern={"q_proj": 3}), "takes alpha_pattern"),
    "an option that is newer than this": (lambda d: alter_config(d, use_xora=True), "takes use_xora"),
    "weights that begin elsewhere": (lambda d: alter_config(d, init_lora_weights="pissa"), "takes init_lora_weights"),
    "another kind of adapter": (lambda d: alter_config(d, peft_type="IA3"), "it is a IA3 of peft's"),
    "no rank": (lambda d: alter_config(d, r=None), "has no rank"),
    "another rank": (lambda d: alter_config(d, r=8), "is not of rank 8"),
    "half a pair": (lambda d: weights(d, lambda t: t.pop(FIRST.replace("_A", "_B"))), "no half of a pair"),
    "the other half": (lambda d: weights(d, lambda t: t.pop(FIRST)), "or half of one"),
    "something else": (lambda d: weights(d, lambda t: t.update({"head": torch.ones(1)})), "holds head, which is no"),
    "nothing": (lambda d: weights(d, dict.clear), "holds no LoRA"),
    "no numbers": (lambda d: weights(d, lambda t: t[FIRST].fill_(float("nan"))), "holds numbers that are none"),
    "another size": (
        lambda d: weights(d, lambda t: t.update({FIRST: torch.ones(4, 9)})),
        "q_proj goes from 64 to 64 features, not from 9 to 64",
    ),
    "a module that the model has not": (
        lambda d: weights(
            d, lambda t: [t.update({k.replace("q_proj", "r_proj"): t.pop(k)}) for k in list(t) if "q_proj" in k]
        ),
        "has no linear module model.layers.0.self_attn.r_proj",
    ),
}


def test_a_chunk_that_does_not_fit_behind_the_probe_is_not_written(model: Any) -> None:
    with engine_for(model, SCENE, writer="probe", ranking="off") as engine:
        engine._probe, longest = tuple(range(40, 60)), max(len(chunk.token_ids) for chunk in SCENE.chunks)
        engine.context_window = len(SCENE.header) + len(engine._probe) + longest
        failed = engine.precompute(SCENE.chunks).failed
    too_long = {chunk.id for chunk in SCENE.chunks if len(chunk.token_ids) == longest}
    assert failed == dict.fromkeys(too_long, "it does not fit the model's context window")


@pytest.mark.parametrize("name", FAULTS)
def test_an_unusable_writer_is_refused_with_the_reason(directory: Path, model: Any, name: str) -> None:
    harm, why = FAULTS[name]
    harm(directory)
    with pytest.raises(InputError, match=f"KV writer in {directory} cannot be used: .*{why}"):
        engine_for(model, SCENE, writer=directory)


def test_a_writers_identity_depends_on_its_weights_and_options_but_not_on_its_card(tmp_path: Path, model: Any) -> None:
    found = []
    for number, options in enumerate(({}, {}, {"rank": 8}, {"lora_alpha": 7}, {"use_rslora": True}, {"seed": 1})):
        write_writer(tmp_path / str(number), LLAMA(), **options)
        describe(tmp_path / str(number), fingerprint_of(model), {"number": number})
        found.append(KVWriter.read(tmp_path / str(number), fingerprint_of(model)))
    assert [each.card["number"] for each in found] == list(range(6))
    assert found[0].name == found[1].name
    assert len({each.name.digest for each in found}) == 5


def test_a_writer_serves_its_model_in_every_dtype(tmp_path: Path) -> None:
    make_model(LLAMA()).save_pretrained(tmp_path / "model")
    with TransformersEngine(tmp_path / "model", tokenizer=object(), header=SCENE.header, device="cpu") as engine:
        write_writer(tmp_path / "writer", LLAMA())
        describe(tmp_path / "writer", engine.fingerprint, {})
    options: dict[str, Any] = {"tokenizer": object(), "header": SCENE.header, "device": "cpu", "ranking": "off"}
    with TransformersEngine(tmp_path / "model", dtype=torch.bfloat16, writer=tmp_path / "writer", **options) as engine:
        assert engine.writer is not None
        assert engine.precompute(SCENE.chunks).computed == len(SCENE.chunks)


def test_a_model_that_is_not_blended_takes_no_writer(tmp_path: Path) -> None:
    config, _ = NOT_BLENDED["one layer"]
    write_writer(tmp_path, config())
    with pytest.raises(InputError, match=r"not blended .*a KV writer has nothing to write: leave it out"):
        engine_for(make_model(config()), SCENE, writer=tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The store has KV")
def test_entries_of_one_writer_are_a_miss_for_every_other_writer(tmp_path: Path, model: Any) -> None:
    hands = []
    for seed in range(2):
        write_writer(tmp_path / str(seed), LLAMA(), seed=seed)
        hands.append(tmp_path / str(seed))
    store = open_store(tmp_path / "kv")
    engines = [engine_for(model, SCENE, store=store, writer=hand, write_back=False) for hand in (None, *hands)]
    for engine in engines[1:]:
        engine.precompute(SCENE.chunks)
        settings = BlendSettings(ratio=0.5)
        engine.precompute_first(SCENE.chunks[:1])
        found = [each.generate(SCENE.prompt, ONE, settings).missing for each in engines]
        # All engines share the model's own KV of the first chunk.
        behind = tuple(chunk.id for chunk in SCENE.chunks[1:])
        assert found == [() if each is engine else behind for each in engines]
        engine.forget(SCENE.chunks)
    engines[0].precompute(SCENE.chunks)
    engines[1] = engine_for(model, SCENE, store=store, writer=hands[0], write_back=False)
    with pytest.warns(UserWarning, match=f"written without the KV writer in {hands[0]}.*Index") as said:
        for _ in range(2):
            assert engines[1].generate(SCENE.prompt, ONE).missing == behind
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engines[0].generate(SCENE.prompt, ONE).missing == ()


@pytest.mark.filterwarnings("error:The store has KV")
def test_missing_chunks_of_a_prompt_are_written_back_by_the_writer(directory: Path, model: Any) -> None:
    with engine_for(model, SCENE, writer=directory) as engine:
        assert engine.generate(SCENE.prompt, ONE).mode == "prefill"
        again = engine.generate(SCENE.prompt, ONE, BlendSettings(ratio=0.5))
        assert (again.mode, again.missing, again.lacking("own_kv")) == ("blend", (), ())
        assert stored_by(engine) == ([True] * 4, [True, False, False, False])


@pytest.mark.filterwarnings("error:The store has KV")
def test_a_chunk_that_a_prompt_has_twice_warns_of_no_other_writer(directory: Path, model: Any) -> None:
    chunk, header = SCENE.chunks[0], SCENE.header
    twice = [
        ChunkSpan(chunk, at, at + len(chunk.token_ids)) for at in (len(header), len(header) + len(chunk.token_ids))
    ]
    with engine_for(model, SCENE, writer=directory) as engine:
        done = engine.generate(TokenizedPrompt((*header, *chunk.token_ids * 2, 7), tuple(twice)), ONE)
        assert (set(done.missing), done.lacking("own_kv")) == ({chunk.id}, (chunk.id,))


@pytest.mark.parametrize("stored", [True, False])
def test_a_chunk_forgotten_while_its_prompt_runs_is_not_stored_afterwards(
    directory: Path, model: Any, stored: bool
) -> None:
    with engine_for(model, SCENE, writer=directory) as engine:
        engine.registry.add(SCENE.chunks)
        if stored:
            engine.precompute(SCENE.chunks)
        stream = engine.stream(SCENE.prompt, SamplingParams(max_tokens=2))
        next(stream)
        engine.forget(SCENE.chunks[:2])
        *_, last = stream
        assert last.generation.lacking("own_kv") == (SCENE.chunks[0].id,)
        assert stored_by(engine) == ([False, False, True, True], [False] * 4)
        assert {chunk.id for chunk in engine.registry} == {chunk.id for chunk in SCENE.chunks[2:]}
        assert engine.generate(SCENE.prompt, ONE).usage.kept_tokens == 0


def test_a_chunk_forgotten_during_write_back_is_not_stored_afterwards(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = SCENE.chunks
    with engine_for(model, SCENE, writer=None) as engine:
        run = engine.runner.append

        def forget_behind(ids: Any, *given: Any) -> Any:
            found = run(ids, *given)
            if len(ids) > 1:  # the batch of the write back
                engine.forget([first.id])
            return found

        monkeypatch.setattr(engine.runner, "append", forget_behind)
        assert engine.generate(SCENE.prompt, ONE).missing == tuple(chunk.id for chunk in SCENE.chunks)
        assert [engine.entries.contains(chunk.token_ids) for chunk in SCENE.chunks] == [False, True, True, True]
        assert {chunk.id for chunk in engine.registry} == {chunk.id for chunk in others}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_chunk_forgotten_just_before_write_back_is_not_registered_again(
    model: Any, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    *stored, last = SCENE.chunks
    with engine_for(model, SCENE, writer=None) as engine:
        engine.precompute(stored)
        if not in_place:
            engine.registry.add([last])
        monkeypatch.setattr(ChunkKV, "finish", lambda self: engine.forget([last.id]))  # as another thread may do
        assert engine.generate(SCENE.prompt, ONE).missing == (last.id,)
        # The prompt registers a chunk that it contains.
        assert engine.entries.contains(last.token_ids) == (last.id in engine.registry) == in_place


def stored_by(engine: TransformersEngine) -> tuple[list[bool], ...]:
    """Return which of the chunks have an entry of the writer, and which an entry of the model itself."""
    hands = (engine.entries, engine.entries.by(None))
    return tuple([hand.contains(chunk.token_ids) for chunk in SCENE.chunks] for hand in hands)


@pytest.mark.parametrize("write_back", [True, False])
def test_the_first_prompt_that_begins_with_a_chunk_stores_the_models_own_kv_of_it(
    directory: Path, model: Any, write_back: bool
) -> None:
    settings, first = BlendSettings(ratio=0.3), SCENE.chunks[0]
    with engine_for(model, SCENE, writer=directory, write_back=write_back) as engine:
        engine.precompute(SCENE.chunks)
        assert stored_by(engine) == ([True] * 4, [False] * 4), "indexing takes the disk of one hand"
        before = engine.generate(SCENE.prompt, ONE, settings)
        assert (before.mode, before.missing, before.lacking("own_kv")) == ("blend", (), (first.id,))
        assert stored_by(engine) == ([True] * 4, [write_back, False, False, False])
        after = engine.generate(SCENE.prompt, ONE, settings)
        assert after.lacking("own_kv") == (() if write_back else (first.id,))
        assert before.usage.computed_tokens - after.usage.computed_tokens == (len(first.token_ids) if write_back else 0)
        assert engine.forget(SCENE.chunks) == 4 + write_back


@pytest.mark.parametrize("policy", ["hkvd", "static", "query", "static-query"])
def test_loading_or_computing_the_first_chunk_gives_the_same_blend(directory: Path, model: Any, policy: Any) -> None:
    blends = []
    with engine_for(model, SCENE, writer=directory, ranking="now") as engine:
        engine._probe = (5, 6, 7)
        engine.precompute(SCENE.chunks)
        for _ in range(2):
            got, recomputed, _ = blended_logits(engine, SCENE, BlendSettings(ratio=0.3, policy=policy))
            blends.append((got, [at for at in recomputed if at >= SCENE.prompt.spans[0].end]))
            engine.precompute_first(SCENE.chunks[:1])
    assert blends[0][1] == blends[1][1]
    assert (blends[0][0] - blends[1][0]).abs().max() < 1e-4


def test_precompute_first_stores_the_models_own_kv_once_and_reports_failures(directory: Path, model: Any) -> None:
    empty = Chunk("empty", "", ())
    with engine_for(model, SCENE, writer=directory) as engine:
        assert engine.precompute_first([*SCENE.chunks[:2], empty]).failed == {"empty": "it has no tokens"}
        again = engine.precompute_first(SCENE.chunks[:2])
        assert (again.computed, again.present) == (0, 2)
        assert stored_by(engine) == ([False] * 4, [True, True, False, False])
    with engine_for(model, SCENE) as engine:
        assert engine.precompute_first(SCENE.chunks) == PrecomputeReport()
        assert not any(stored_by(engine)[0]), "without a writer all KV is the model's own"


def test_the_models_own_kv_is_not_ranked_if_a_writer_has_written_the_chunk(directory: Path, model: Any) -> None:
    with engine_for(model, SCENE, writer=directory, ranking="now") as engine:
        engine._probe = (5, 6, 7)
        assert engine.precompute(SCENE.chunks).ranked == len(SCENE.chunks)
        assert engine.precompute_first(SCENE.chunks).ranked == 0
        hands = (engine.entries, engine.entries.by(None))
        assert [[e.has_static(chunk.token_ids) for chunk in SCENE.chunks] for e in hands] == [[True] * 4, [False] * 4]
        settings = BlendSettings(ratio=0.3, policy="static")
        assert engine.generate(SCENE.prompt, ONE, settings).policy == "static"


def test_a_writer_acts_only_while_no_prompt_runs(directory: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    with engine_for(model, SCENE, writer=directory, ranking="now") as engine:
        engine._probe = (5, 6, 7)
        enter = Writing.__enter__
        monkeypatch.setattr(Writing, "__enter__", lambda self: begun.append(engine.lock.locked()) or enter(self))
        engine.precompute(SCENE.chunks)
    assert len(begun) == 3  # the chunks, the probe, and the chunks behind the probe
    assert all(begun)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_profile_of_a_writer_is_used_with_this_writer_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path))
    hand, other = WrittenBy("ab", str(tmp_path / "writer")), WrittenBy("cd", "elsewhere")
    found: dict[str, Any] = {"calibrated": {"why": "made up"}}
    save_profile(ModelProfile(ratio=0.3, **found), "model")
    save_profile(ModelProfile(ratio=0.1, **found), "model", tmp_path / "writer")  # ships with the writer
    assert [load_profile("model", writer=each).ratio for each in (hand, other, None)] == [0.1, 0.3, 0.3]
    save_profile(ModelProfile(ratio=0.05, **found), "model", None, hand)
    assert [load_profile("model", writer=each).ratio for each in (hand, other, None)] == [0.05, 0.3, 0.3]


def test_a_calibrated_profile_overrides_the_defaults_of_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path))
    hand = WrittenBy("ab", str(tmp_path / "writer"))
    save_profile(ModelProfile(ratio=0.2, fast=0.1), "model", tmp_path / "writer")
    default = load_profile("model", writer=hand)
    assert (default.ratio, default.fast, default.is_calibrated) == (0.2, 0.1, False)
    assert load_profile("model") == ModelProfile()
    save_profile(ModelProfile(ratio=0.4, calibrated={"why": "made up"}), "model")
    assert load_profile("model", writer=hand).ratio == 0.4


def test_the_shipped_writer_is_found_by_name_is_small_and_names_its_training_data() -> None:
    shipped = KVWriter.read("smollm2", ModelFingerprint("0" * 32, "smollm2"))
    directory = Path(shipped.name.directory)
    assert sum(file.stat().st_size for file in directory.iterdir()) < 10_000_000
    assert "Apache-2.0" in shipped.card["licences"]
    assert all(each["after"] < each["before"] for each in shipped.card["held_out_kl"].values())
    default = load_profile("0" * 32, writer=shipped.name)
    assert (default.origin, default.is_calibrated) == (str(directory / "cacheblend.json"), False)
    assert default.fast < default.ratio < ModelProfile.ratio
    with pytest.raises(InputError, match="another model"):
        KVWriter.read("smollm2", ModelFingerprint("0" * 32, "other"))


def test_the_probe_writer_recomputes_less_than_a_model_without_a_writer() -> None:
    default = load_profile("0" * 32, writer=KVWriter.read("probe").name)
    assert (default.policy, default.is_calibrated) == (ModelProfile.policy, False)
    assert default.fast < default.ratio < ModelProfile.ratio


def test_an_index_distinguishes_a_changed_writer_from_a_moved_writer() -> None:
    made = IndexConfig(ModelFingerprint("0" * 32, "m"), writer=WrittenBy("ab", "/hand"))
    assert made.unused_by(WrittenBy("ab", "/moved")) is None
    assert "The KV writer in /hand has changed" in str(made.unused_by(WrittenBy("cd", "/hand")))
    assert "Give --writer /hand, or index them again with the one in /other" in str(
        made.unused_by(WrittenBy("cd", "/other"))
    )
    assert IndexConfig(made.model).unused_by(WrittenBy("cd", "/other")) is None


def test_only_the_name_smollm2_selects_the_shipped_writer() -> None:
    shipped = writer_of("smollm2", None)
    assert shipped == writer_directory("smollm2")
    for model in (None, "bundled", "acme/smollm2", Path("/models/smollm2"), object()):
        assert writer_of(model, None) is None
    assert (writer_of("smollm2", "none"), writer_of("smollm2", "own"), writer_of("acme/llm", "smollm2")) == (
        None,
        "own",
        "smollm2",
    )
