"""Test blends with a real small model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.cli import app
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.writer import KVWriter
from cacheblend_rag.prompts.chunk import encoder_for, make_chunk
from cacheblend_rag.prompts.prompt import rag_prompt
from tests.blending import reference
from tests.blending.test_parity import blended_logits
from tests.command_line import spend_less

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gate_once")]

NOTES = (
    "# Travel\n\nTravel above 500 euros is approved by Maria Okafor, head of finance. Ask her two weeks before.",
    "The canteen opens at 11:30. On Fridays there is fish; whoever wants something else asks the cook by Thursday.",
    "- Keys are kept by the porter.\n- The porter's number is 4711.\n- After 22:00 ring at the gate.",
)
QUESTION = "Who approves travel above 500 euros?"


@pytest.fixture(scope="module")
def engine(smollm2: Path, gate_once: None) -> TransformersEngine:
    return TransformersEngine(smollm2, device="cpu", ranking="off")  # no test here needs a ranking


class RealScene:
    """The notes and the question in the model's chat template, as parts for the reference."""

    def __init__(self, engine: TransformersEngine):
        self.chunks = [make_chunk(text, engine.tokenizer) for text in NOTES]
        engine.precompute(self.chunks)
        request = engine.request(rag_prompt(engine.tokenizer, self.chunks, QUESTION), SamplingParams(max_tokens=1))
        self.prompt, self.header = request.prompt, list(engine.header_ids)

    def parts(self) -> list[reference.Part]:
        ids, parts, at = self.prompt.token_ids, [reference.Part(self.header, "exact")], len(self.header)
        for number, span in enumerate(self.prompt.spans):
            parts += [reference.Part(list(ids[at : span.start]), "text")] if span.start > at else []
            parts.append(reference.Part(list(ids[span.start : span.end]), "stale" if number else "exact"))
            at = span.end
        return [*parts, reference.Part(list(ids[at:]), "text")]


@pytest.fixture(scope="module")
def scene(engine: TransformersEngine) -> RealScene:
    return RealScene(engine)


def test_the_prompt_follows_the_models_template_and_digits_are_single_tokens(
    engine: TransformersEngine, scene: RealScene
) -> None:
    text = engine.tokenizer.decode(scene.prompt.token_ids)
    assert text.startswith("<|im_start|>system\n")
    assert all(note in text for note in NOTES)
    assert list(scene.prompt.token_ids) == engine.tokenizer(text, add_special_tokens=False).input_ids
    assert text.endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert [engine.tokenizer.decode(i) for i in encoder_for(engine.tokenizer).document("a  4711")] == [
        *"a",
        "  ",
        *"4711",
    ]


def test_ratio_1_is_the_full_prefill_and_the_models_own_greedy_answer(
    engine: TransformersEngine, scene: RealScene
) -> None:
    ids = torch.tensor([scene.prompt.token_ids])
    with torch.no_grad():
        want = engine.runner.model(input_ids=ids, use_cache=False).logits[0, -1]
        own = engine.runner.model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    got, *_ = blended_logits(engine, scene, BlendSettings(ratio=1.0))
    assert (got - want).abs().max() < 1e-3  # the logits reach 30, after 30 layers
    answer = engine.generate(scene.prompt, SamplingParams(max_tokens=16), BlendSettings(ratio=1.0))
    assert answer.mode == "blend"
    assert list(answer.token_ids) == own[: len(answer.token_ids)]
    assert "Maria Okafor" in answer.text


@pytest.mark.parametrize("ratio", [0.0, 0.15])
def test_a_blend_equals_the_independent_reference(engine: TransformersEngine, scene: RealScene, ratio: float) -> None:
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=ratio, policy="hkvd", check_layers=(1,)))
    want = reference.blend(engine.runner.model, scene.header, scene.parts(), ratio)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-3


def test_the_name_smollm2_brings_a_kv_writer_that_only_blends_read(
    engine: TransformersEngine, scene: RealScene
) -> None:
    assert engine.writer is None, "a directory is a plain model"
    sampling = SamplingParams(max_tokens=3)
    with TransformersEngine("smollm2", device="cpu") as written:
        assert written.writer == KVWriter.read("smollm2").name
        written.precompute(scene.chunks)
        answer = written.generate(scene.prompt, sampling)
        assert (answer.mode, answer.missing, answer.calibrated) == ("blend", (), False)
        assert answer.ratio == pytest.approx(written.profile.ratio, abs=0.02)
        assert written.profile.ratio < ModelProfile.ratio
        # Full recompute equals the plain model's, and reuse without a blended chunk reads no KV of the writer.
        full, *_ = blended_logits(engine, scene, BlendSettings(ratio=1.0))
        by_writer, *_ = blended_logits(written, scene, BlendSettings(ratio=1.0))
        assert (by_writer - full).abs().max() < 1e-3
        for quality in ("full", "exact"):
            asked = BlendSettings(quality=quality)
            both = [each.generate(scene.prompt, sampling, asked) for each in (written, engine)]
            assert both[0].token_ids == both[1].token_ids
        assert both[0].usage == both[1].usage
        reused = [blended_logits(each, scene, BlendSettings(ratio=0.0))[0] for each in (written, engine)]
        assert (reused[0] - reused[1]).abs().max() > 1e-2


def test_index_and_ask_answer_from_a_users_documents(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend_less(monkeypatch)
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(smollm2.parent)
    (tmp_path / "notes").mkdir()
    for number, text in enumerate(NOTES):
        (tmp_path / "notes" / f"{number}.md").write_text(text)
    indexed = CliRunner().invoke(app, ["index", str(tmp_path / "notes"), "--model", "smollm2"])
    assert indexed.exit_code == 0, indexed.stderr
    asked = CliRunner().invoke(app, ["ask", QUESTION, "--model", "smollm2", "--max-tokens", "24"])
    assert asked.exit_code == 0, asked.stderr
    assert "Maria Okafor" in asked.stdout
