"""Tests that what is measured in batches is what calibration measures prompt by prompt."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import DynamicCache

from cacheblend_lab.evaluation.prepare import Preparation
from cacheblend_lab.frontier.__main__ import main
from cacheblend_lab.frontier.frontier import Frontier
from cacheblend_lab.frontier.measured import (
    BEHIND,
    PLAIN,
    RECOMPUTED,
    WRITTEN,
    Measured,
    append_measured,
    differences,
    read_measured,
    summarise,
    table_of,
)
from cacheblend_lab.frontier.prompts import FrontierPrompt, prepare_prompts, read_prompts, write_prompts
from cacheblend_lab.frontier.weights import WEIGHTS, coarser
from cacheblend_lab.learn.adapter import weights_of, writing_copy
from cacheblend_lab.learn.blend import BatchBlender, PromptBatch
from cacheblend_lab.learn.lesson import Lesson
from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.gate import cut
from cacheblend_rag.blending.plan import make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.calibrate.compared import PromptMeasurement, decoded
from cacheblend_rag.calibrate.rounding import rounded
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import ChunkKV
from tests.blending.families import _BASE, BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.calibrate.planning import ChunksAlone
from tests.conftest import tokenizer_named

PROBE = tuple(range(40, 70))
SCENES = [Scene(), Scene(1, chunk_tokens=(20, 33, 16))]


GOLD = (7, 30, 11, 25)
NAMES = ("full-recompute", "random", "hkvd", "static", "query", "static-query", "sink", "hybrid")


def prompt_of(scene: Scene, data: str = "made up", gold: tuple[int, ...] = ()) -> FrontierPrompt:
    spans = tuple((span.start, span.end) for span in scene.prompt.spans)
    return FrontierPrompt(data, tuple(scene.header), spans, scene.prompt.token_ids, gold=gold)


def measured(
    family: str,
    written: bool = False,
    gold: tuple[int, ...] = (),
    weights: Sequence[str] = (),
    batch_tokens: int = 4096,
    blends_by: type[BatchBlender] = BatchBlender,
    behind: bool = False,
) -> list[list[Measured]]:
    model = make_model(BLENDED[family]())
    writing = writing_copy(model, rank=2) if written else None
    for tensor in weights_of(writing).values() if written else ():
        torch.nn.init.normal_(tensor, std=0.2)
    prompts = [prompt_of(scene, gold=gold) for scene in SCENES]
    lesson = Lesson(blends_by(model), writing)
    copies = coarser(model, weights)
    return list(Frontier(lesson, PROBE, frozenset(), batch_tokens, (0.3,), NAMES, copies, behind).measure(prompts))


def alone_measured(engine: Any, scene: Scene, **options: Any) -> PromptMeasurement:
    subject = engine.subject()
    planner = ChunksAlone(subject, engine.rope, scene.header, PROBE)
    return PromptMeasurement(subject, engine.rope, scene.prompt, planner, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_policys_kl_agreement_and_compute_are_those_of_calibration(family: str) -> None:
    for scene, mine in zip(SCENES, measured(family, gold=GOLD), strict=True):
        engine = engine_for(make_model(BLENDED[family]()), scene)
        one = alone_measured(engine, scene)
        assert [each.policy for each in mine] == ["full-reuse", *NAMES[:2], *NAMES[3:7], "hkvd", "hybrid"]
        for each in mine:
            want = one.compare(FuseOptions(policy(each.policy), each.ratio))
            assert each.kv == PLAIN
            assert each.kl == pytest.approx(fmean(want.kl), abs=1e-5)
            assert each.agrees == fmean(want.agrees)
            assert each.compute == pytest.approx(want.compute)


def computed(subject: Any, before: Sequence[int], header: Sequence[int], static: Any, ids: Sequence[int]) -> ChunkKV:
    """KV of a chunk behind ``before``, with its static deviation; ``()`` is the header's own."""
    kv = cut(subject.full_prefill([*before, *ids] if ids else list(header))[1], len(before) if ids else 0)
    return ChunkKV(kv.layers, kv.start, static=static.get(tuple(ids)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_kv_that_was_computed_behind_the_probe_is_blended_as_an_engine_blends_it(family: str) -> None:
    for scene, mine in zip(SCENES, measured(family, behind=True), strict=True):
        engine, header = engine_for(make_model(BLENDED[family]()), scene), tuple(scene.header)
        subject = engine.subject()
        alone = alone_measured(engine, scene)
        static = {span.chunk.token_ids: span.static_deviation() for span in alone._plan.stale if span.chunk}

        behind = partial(computed, subject, (*header, *PROBE), header, static)
        plan = make_plan(scene.prompt, header, behind, own=partial(computed, subject, header, header, {}))
        one = PromptMeasurement(subject, engine.rope, scene.prompt, lambda _, plan=plan: plan)
        found = {each.policy: each for each in mine if each.kv == BEHIND}
        assert found.keys() == {"full-reuse", *NAMES} - {"full-recompute"}
        for each in found.values():
            want = one.compare(FuseOptions(policy(each.policy), each.ratio))
            assert each.kl == pytest.approx(fmean(want.kl), abs=1e-5)


def test_the_right_answers_likelihood_is_the_models_behind_the_blend() -> None:
    for scene, mine in zip(SCENES, measured("llama", gold=GOLD), strict=True):
        engine = engine_for(make_model(BLENDED["llama"]()), scene)
        subject = engine.subject()
        one = alone_measured(engine, scene, continuation=GOLD)
        full = None
        for each in sorted(mine, key=lambda each: -each.ratio):
            target = subject.target(scene.prompt.token_ids, engine.rope)
            fuse(one._plan, target, FuseOptions(policy(each.policy), each.ratio))
            logits = torch.cat([subject.logits(target)[None], decoded(subject, target, list(GOLD[:-1]))])
            want = float(logits.log_softmax(-1).gather(1, torch.tensor(GOLD)[:, None]).mean())
            full = want if each.policy == "full-recompute" else full
            assert each.gold == pytest.approx(want, abs=1e-4)
            assert full is not None
            assert each.gold_change == pytest.approx(want - full, abs=1e-4)


def test_few_tokens_at_once_give_the_same_numbers_and_no_right_answer_none() -> None:
    for many, few in zip(measured("llama"), measured("llama", batch_tokens=1), strict=True):
        assert [each.kl for each in many] == pytest.approx([each.kl for each in few], abs=1e-6)
        assert {each.gold for each in many} == {None}


class TwoRows(BatchBlender):
    """Computes each continuation of a prompt in a row of its own."""

    def blend(self, batch: PromptBatch, *others: Any) -> torch.Tensor:
        return self.apart(batch, lambda each: super(TwoRows, self).blend(each, *others))

    def follow(self, batch: PromptBatch, cache: DynamicCache, model: Any = None) -> torch.Tensor:
        return self.apart(batch, lambda each: super(TwoRows, self).follow(each, deepcopy(cache), model))

    def apart(self, batch: PromptBatch, compute: Callable[[PromptBatch], torch.Tensor]) -> torch.Tensor:
        layout, ids = batch.layout, batch.ids
        end = layout.length - layout.watched + 1
        one, other = (
            compute(PromptBatch(replace(layout, length=row.shape[1], watched=row.shape[1] - end + 1, fork=0), row, row))
            for row in (ids[:, : layout.fork], torch.cat([ids[:, :end], ids[:, layout.fork :]], 1))
        )
        return torch.cat([one, other[:, 1:]], 1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_two_answers_behind_one_prompt_are_as_each_behind_a_prompt_of_its_own(family: str) -> None:
    ways = (measured(family, True, GOLD, ["8-bit"], blends_by=way) for way in (BatchBlender, TwoRows))
    together, apart = ([each for one in way for each in one] for way in ways)
    for mine, want in zip(together, apart, strict=True):
        assert (mine.kv, mine.policy, mine.ratio, mine.agrees) == (want.kv, want.policy, want.ratio, want.agrees)
        assert mine.kl == pytest.approx(want.kl, abs=1e-5)
        assert mine.gold == pytest.approx(want.gold, abs=1e-5)
    assert {each.kv for each in together} == {RECOMPUTED, PLAIN, WRITTEN}


def test_with_a_writer_every_policy_is_measured_once_more() -> None:
    for mine in measured("llama", written=True):
        plain, written = ({each.policy: each.kl for each in mine if each.kv == kind} for kind in (PLAIN, WRITTEN))
        assert plain.keys() - written.keys() == {"full-recompute"}
        assert all(plain[name] != kl for name, kl in written.items())


def test_only_what_is_asked_for_is_measured() -> None:
    model = make_model(BLENDED["llama"]())
    frontier = Frontier(Lesson(BatchBlender(model), None), PROBE, frozenset(), 4096, (0.3, 0.1), ("query",))
    (found,) = frontier.measure([prompt_of(Scene())])
    assert [(each.policy, each.ratio) for each in found] == [("full-reuse", 0.0), ("query", 0.1), ("query", 0.3)]


def test_coarser_weights_are_farther_from_the_model_the_fewer_bits_they_have() -> None:
    found = [each for one in measured("llama", weights=WEIGHTS) for each in one if each.kv == RECOMPUTED]
    kl = {name: fmean(each.kl for each in found if each.policy == name) for name in WEIGHTS}
    assert 0 < kl["8-bit"] < kl["6-bit"] < kl["4-bit"]
    assert 0 < kl["bf16"] < kl["4-bit"]
    weight = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert (rounded(weight, 8) - weight).abs().max() <= weight.abs().max() / 127 / 2 + 1e-6
    assert len(rounded(weight, 4)[0, :32].unique()) <= 15


def test_prompts_are_read_as_they_were_written_one_of_each_data_set_in_turn(tmp_path: Path) -> None:
    prompts = [prompt_of(scene, data, GOLD) for data in ("one", "other") for scene in SCENES]
    write_prompts(tmp_path / "prompts.gz", prompts)
    assert read_prompts(tmp_path / "prompts.gz") == [prompts[i] for i in (0, 2, 1, 3)]
    assert read_prompts(tmp_path / "prompts.gz", 1) == [prompts[0], prompts[2]]
    assert read_prompts(tmp_path / "prompts.gz", only=["other"]) == prompts[2:]
    assert len({each.key for each in prompts}) == 4
    write_prompts(tmp_path / "none.gz", [])
    with pytest.raises(InputError, match="no prompts"):
        read_prompts(tmp_path / "none.gz")


def test_what_was_measured_outlives_a_killed_run_and_is_summed_up_by_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "measured.jsonl"
    known = Measured("a", "1", "", PLAIN, "full-reuse", 0.0, 1.0, 1.0, 1.0, 0.1, -2.0, -0.5)
    other = Measured("b", "2", "", PLAIN, "full-reuse", 0.0, 3.0, 1.0, 1.0, 0.1)
    append_measured(file, [known])
    append_measured(file, [other])
    with file.open("a") as out:
        out.write('\n[{"data": "b", "pro')
    append_measured(file, [known])
    (again := tmp_path / "again.jsonl").write_text(file.read_text())
    assert read_measured([file, again]) == [known, other], "what two draws have in common counts once"
    assert read_measured([tmp_path / "none"]) == []
    (tmp_path / "measured.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert read_measured([tmp_path / "measured.jsonl.gz"]) == [known, other]
    rows = summarise([known, other])
    assert [(row["data"], row["kl"], row["gold_change"]) for row in rows] == [
        ("a", 1, -0.5),
        ("all", 2, -0.5),
        ("b", 3, None),
    ]
    file.write_text("")
    append_measured(file, [known, other])
    main(["summarise", str(file), "--out", str(tmp_path / "means.json")])
    assert "| all | as it is | full-reuse | 0% | 10% | 2.0000 | 1.000 | 1.00 | -0.500 | 2 |" in capsys.readouterr().out
    assert table_of(rows).count("\n") == 4


def test_a_writers_blends_are_compared_with_others_of_the_same_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kls = {
        (RECOMPUTED, "6-bit", 1.0): 0.5,
        (PLAIN, "query", 0.5): 2.0,
        (PLAIN, "static-query", 0.15): 3.0,
        (WRITTEN, "full-reuse", 0.0): 4.0,
        (WRITTEN, "query", 0.15): 1.0,
    }
    found = [Measured("a", "1", "", *how, kl, 1.0, 1.0, 0.5, -2.0, -0.5) for how, kl in kls.items()]
    elsewhere = replace(found[1], prompt="2", kl=9.0, gold_change=None)
    rows = summarise(differences([*found, elsewhere]))
    assert {(row["kv"], row["policy"]): (row["kl"], row["prompts"]) for row in rows if row["data"] == "all"} == {
        ("as it is, less full recompute, 6-bit 100%", "query"): (1.5, 1),
        ("as it is, less full recompute, 6-bit 100%", "static-query"): (2.5, 1),
        ("by the writer, less full recompute, 6-bit 100%", "full-reuse"): (3.5, 1),
        ("by the writer, less full recompute, 6-bit 100%", "query"): (0.5, 1),
        ("by the writer, less as it is, query 50%", "query"): (-1.0, 1),
        ("by the writer, less as it is, static-query 15%", "full-reuse"): (1.0, 1),
    }
    append_measured(tmp_path / "measured.jsonl", found)
    main(["summarise", str(tmp_path / "measured.jsonl")])
    line = (
        "| all | by the writer, less as it is, query 50% | query | 15% | +0% | -1.0000 | +0.000 | +0.00 | +0.000 | 1 |"
    )
    assert line in capsys.readouterr().out


def test_prompts_are_drawn_from_all_of_a_file_by_each_seed_others(tmp_path: Path) -> None:
    rows = [
        {"question": f"Who is {n}?", "answers": [str(n)], "chunks": [f"{n} sails.", "She is here."]} for n in range(60)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = hf.LlamaConfig(**{**_BASE, "vocab_size": 448, "bos_token_id": 0, "eos_token_id": 1})
    with TransformersEngine(make_model(config), tokenizer=tokenizer_named("byte_level"), device="cpu") as engine:

        def drawn(*seeds: int) -> list[int]:
            made = prepare_prompts(engine, "rows", str(file), 20, seeds, Preparation())
            return [int(engine.tokenizer.decode(each.gold)) for each in made]

        found = drawn(1, 2)
        assert len(set(found)) == len(found) == 20
        assert all(sum(place in part for place in found) for part in (range(20), range(20, 40), range(40, 60)))
        assert found == drawn(1, 2)
        assert set(found) != set(drawn(3, 4))
