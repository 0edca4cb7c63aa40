"""Run the contracts on the transformers engine, and test what only this engine does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from cacheblend_lab.scoring import score

from cacheblend_rag.blending.profile import ModelProfile, log_uncalibrated, save_profile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.engine import PromptRun, planned
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import rag_prompt
from cacheblend_rag.store import MemoryStore
from tests.blending.families import _BASE, make_model
from tests.blending.prompts import Scene, engine_for
from tests.blending.reference import Part, blend
from tests.conftest import tokenizer_named
from tests.engines.contract import TEXTS, EngineContract
from tests.engines.contract_controller import ControllerContract
from tests.engines.contract_conversation import ConversationContract
from tests.engines.contract_spans import SpansContract

pytestmark = pytest.mark.usefixtures("gate_once")
_CONFIG = {**_BASE, "vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(hf.Qwen3Config(**_CONFIG, head_dim=16)).save_pretrained(directory)
    tokenizer_named("byte_level").save_pretrained(directory)
    return directory


class TestConversations(ConversationContract):
    @pytest.fixture
    def engine(self, model_directory: Path) -> Iterator[TransformersEngine]:
        with TransformersEngine(model_directory, device="cpu") as engine:
            yield engine


class TestTransformersEngine(EngineContract, ControllerContract, SpansContract):
    @pytest.fixture(autouse=True)
    def _directory(self, model_directory: Path) -> None:
        self.directory = model_directory

    def make(self, store: Any, **options: Any) -> TransformersEngine:
        """Make an engine without a prefix cache, so that a repeated prompt is blended again."""
        return TransformersEngine(self.directory, store=store, device="cpu", **{"prefix_cache": 0, **options})

    def test_the_fingerprint_depends_on_dtype_and_weights_and_not_on_the_directory(
        self, engine, tmp_path: Path
    ) -> None:
        import shutil

        import torch

        assert self.make(None).fingerprint == engine.fingerprint
        assert self.make(None, dtype=torch.bfloat16).fingerprint != engine.fingerprint
        copy = tmp_path / "copy"
        shutil.copytree(self.directory, copy)
        assert TransformersEngine(copy, device="cpu").fingerprint == engine.fingerprint
        make_model(hf.Qwen3Config(**_CONFIG, head_dim=16), seed=1).save_pretrained(copy)
        assert TransformersEngine(copy, device="cpu").fingerprint != engine.fingerprint

    def test_answers_report_calibration_and_the_log_warns_once_of_an_uncalibrated_model(
        self, prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
        caplog.set_level("WARNING", "cacheblend_rag.blending.profile")  # commands suppress this warning
        log_uncalibrated.cache_clear()
        for _ in range(2):
            with self.make(None) as engine:
                assert engine.generate(prompt, SamplingParams(max_tokens=1)).calibrated is False
        assert [record.getMessage()[:23] for record in caplog.records] == ["A model that is not cal"]
        save_profile(ModelProfile(ratio=0.2, calibrated={"why": "made up"}), engine.fingerprint.digest)
        log_uncalibrated.cache_clear()
        with self.make(None) as engine:
            assert engine.generate(prompt, SamplingParams(max_tokens=1)).calibrated is True
        assert len(caplog.records) == 1

    @pytest.mark.slow
    def test_answers_longer_than_the_reserved_room_stay_right(self, engine, chunks, prompt) -> None:
        import torch

        long = SamplingParams(max_tokens=264)  # the engine reserves room for 256
        got = engine.generate(prompt, long).token_ids
        tokens = torch.tensor([engine.tokenize(prompt).token_ids])
        with torch.no_grad():
            everything = torch.ones_like(tokens)
            want = engine.runner.model.generate(tokens, attention_mask=everything, max_new_tokens=264, do_sample=False)
        assert list(got) == want[0, tokens.shape[1] :].tolist()

    def test_logprobs_equal_those_of_the_models_own_forward(self, engine, prompt) -> None:
        import torch

        got = engine.generate(prompt, SamplingParams(max_tokens=8, temperature=2.0, seed=4, logprobs=5))
        ids = (*engine.tokenize(prompt).token_ids, *got.token_ids)
        with torch.no_grad():
            want = engine.runner.model(torch.tensor([ids])).logits[0, -9:-1].log_softmax(-1)
        for row, mine in zip(want, got.logprobs, strict=True):
            assert mine.logprob == pytest.approx(float(row[mine.token_id]), abs=1e-4)
            assert [p for _, p in mine.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)

    def test_scores_equal_those_of_the_models_own_forward_of_the_whole_text(self, engine, chunks, prompt) -> None:
        import torch

        engine.precompute(chunks)
        answers = [[5, 6, 7], [9, 8, 7, 6, 5]]
        for settings in (BlendSettings(quality="full"), BlendSettings(ratio=1.0)):
            for ids, got in zip(answers, score(engine, prompt, answers, settings), strict=True):
                whole = torch.tensor([[*engine.tokenize(prompt).token_ids, *ids]])
                with torch.no_grad():
                    rows = engine.runner.model(whole).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
                want = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
                assert got.token_logprobs == pytest.approx(want, abs=1e-4)

    def test_exact_reuse_stores_a_missing_header_again(self, engine, chunks, prompt) -> None:
        exact, tokens = BlendSettings(quality="exact"), len(engine.header_ids) + len(chunks[0].token_ids)
        engine.precompute(chunks)
        assert engine.store.delete(engine.entries.own_key(()))
        lacking, again = (engine.generate(prompt, SamplingParams(max_tokens=1), exact) for _ in range(2))
        assert (lacking.missing, lacking.usage.reused_tokens) == ((chunks[0].id,), 0)
        assert (again.missing, again.usage.reused_tokens) == ((), tokens)

    def test_kv_read_from_disk_is_in_ram_for_the_next_prompt(self, tmp_path: Path) -> None:
        root = tmp_path / "store"
        with self.make(root) as engine:
            chunks = [make_chunk(text, engine.tokenizer) for text in TEXTS]
            engine.precompute(chunks)
        with self.make(root) as engine:
            prompt = rag_prompt(engine.tokenizer, chunks, "Who?")
            tiers = []
            for _ in range(2):
                plan = planned(engine, engine.request(prompt))
                tiers.append({span.kv.tier for span in (*plan.exact, *plan.stale)})
                del plan
                engine.generate(prompt, SamplingParams(max_tokens=1), BlendSettings(ratio=0.3, check_layers=(2,)))
            assert tiers == [{"disk"}, {"ram"}]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_scores_behind_a_blend_equal_those_of_the_reference(ratio: float) -> None:
    """The reference computes the prompt with ever longer parts of the completion behind it, and gives the next token."""
    scene = Scene()
    model = make_model(hf.LlamaConfig(**_CONFIG))
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    answer = [7, 11, 5]
    settings = BlendSettings(ratio=ratio, policy="hkvd", check_layers=(1,))
    (got,) = score(engine, scene.prompt, [answer], settings)
    parts = scene.parts()
    first = blend(model, scene.header, parts, ratio)
    for at, token in enumerate(answer):
        longer = [*parts, Part(answer[:at], "text")] if at else parts
        result = blend(model, scene.header, longer, ratio, chosen=first.recomputed)
        assert got.token_logprobs[at] == pytest.approx(float(result.logits.log_softmax(-1)[token]), abs=1e-4)


class HeldUp(MemoryStore):
    """A store whose writes wait until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.reached = threading.Event(), threading.Event()
        self.go_on.set()

    def put(self, *args: Any, **options: Any) -> bool:
        self.reached.set()
        assert self.go_on.wait(30)
        return super().put(*args, **options)


def test_a_prompt_does_not_wait_while_another_chunk_is_written() -> None:
    scene, store = Scene(), HeldUp()
    engine = engine_for(make_model(hf.LlamaConfig(**_CONFIG)), scene, store=store)
    engine.precompute(scene.chunks[:-1])
    store.go_on.clear()
    store.reached.clear()
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(engine.precompute, scene.chunks[-1:])
        assert store.reached.wait(30)
        answer = pool.submit(engine.generate, Scene(chunk_tokens=(24, 17)).prompt, SamplingParams(max_tokens=2))
        try:
            assert answer.result(timeout=600).token_ids
            assert not writing.done()
        finally:
            store.go_on.set()
    assert writing.result().computed == 1


def test_the_error_names_a_model_that_cannot_be_loaded_and_an_alternative(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "missing", Path(__file__)):
        with pytest.raises(ModelError, match="bundled"):
            TransformersEngine(wrong)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match=str(tmp_path)):
        TransformersEngine(tmp_path)


def test_a_chat_template_is_honoured_and_its_header_is_exact(tmp_path: Path) -> None:
    tokenizer = tokenizer_named("byte_level_chatml")
    engine = TransformersEngine(make_model(hf.LlamaConfig(**_CONFIG)), tokenizer=tokenizer, device="cpu")
    chunks = [make_chunk(text, tokenizer) for text in TEXTS]
    engine.precompute(chunks)
    prompt = rag_prompt(tokenizer, chunks, "Who?")
    tokens = engine.tokenize(prompt)
    assert tokenizer.decode(tokens.token_ids).rstrip().endswith("assistant")
    assert tokens.token_ids[: len(engine.header_ids)] == engine.header_ids
    assert tokens.spans[0].start == len(engine.header_ids)
    assert len(tokens.spans) == len(TEXTS)


async def test_a_cancelled_call_stops_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, tokens = Scene(), []
    engine = engine_for(make_model(hf.LlamaConfig(**_CONFIG)), scene)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    decode, leave = PromptRun._decode, PromptRun.__exit__

    def held_up(run: PromptRun, token: int) -> None:
        tokens.append(token)
        begun.set()
        go_on.wait(30)
        decode(run, token)

    def left(run: PromptRun, *error: object) -> None:
        leave(run, *error)
        ended.set()

    monkeypatch.setattr(PromptRun, "_decode", held_up)
    monkeypatch.setattr(PromptRun, "__exit__", left)
    call = asyncio.create_task(engine.agenerate(scene.prompt, SamplingParams(max_tokens=100)))
    assert await asyncio.to_thread(begun.wait, 30)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 30)
    assert len(tokens) < 100 - 1
