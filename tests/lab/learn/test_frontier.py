"""What is measured in batches is what calibration measures prompt by prompt."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

from cacheblend_rag.blending.options import FuseOptions
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.errors import InputError
from cacheblend_rag.lab.doctor.compared import PromptMeasurement
from cacheblend_rag.lab.learn.adapter import weights_of, writing_copy
from cacheblend_rag.lab.learn.blend import BatchBlender
from cacheblend_rag.lab.learn.frontier import (
    FIRST_EXACT,
    PLAIN,
    WRITTEN,
    FrontierPrompt,
    Measured,
    measure_frontier,
    read_prompts,
    summarise,
    table_of,
    write_prompts,
)
from cacheblend_rag.lab.learn.lesson import Lesson
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for

PROBE = tuple(range(40, 70))
SCENES = [Scene(), Scene(1, chunk_tokens=(20, 33, 16))]


def prompt_of(scene: Scene, data: str = "made up") -> FrontierPrompt:
    spans = tuple((span.start, span.end) for span in scene.prompt.spans)
    return FrontierPrompt(data, tuple(scene.header), spans, scene.prompt.token_ids)


def measured(family: str, written: bool = False) -> list[Measured]:
    model = make_model(BLENDED[family]())
    writing = writing_copy(model, rank=2) if written else None
    for tensor in weights_of(writing).values() if written else ():
        torch.nn.init.normal_(tensor, std=0.2)
    prompts = [prompt_of(scene) for scene in SCENES]
    return measure_frontier(Lesson(BatchBlender(model), writing), prompts, PROBE, frozenset(), 4096, None, (0.0, 0.3))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_kl_agreement_and_compute_are_those_of_calibration(family: str) -> None:
    found = measured(family)
    for scene in SCENES:
        engine = engine_for(make_model(BLENDED[family]()), scene)
        one = PromptMeasurement(engine.subject(), engine.rope, scene.header, scene.prompt, None, PROBE)
        half = len(found) // 2
        mine = found[:half] if scene is SCENES[0] else found[half:]
        assert {each.policy for each in mine} == {"none", "static", "query", "static-query"}
        for each in mine:
            named = policy("full-reuse" if each.policy == "none" else each.policy)
            want = one.compare(FuseOptions(named, each.ratio))
            assert each.written == PLAIN
            assert each.kl == pytest.approx(fmean(want.kl), abs=1e-5)
            assert each.agrees == fmean(want.agrees)
            assert each.compute == pytest.approx(want.compute)


def test_with_a_writer_every_chunk_is_stale_and_beside_it_stands_an_exact_first_one() -> None:
    found = [each for each in measured("llama", written=True) if each.policy == "none"]
    by_kind = {kind: [each.kl for each in found if each.written == kind] for kind in (PLAIN, WRITTEN, FIRST_EXACT)}
    assert [len(kls) for kls in by_kind.values()] == [2, 2, 2]
    assert by_kind[WRITTEN] != by_kind[FIRST_EXACT] != by_kind[PLAIN]


def test_prompts_are_read_as_they_were_written_and_summed_up_by_data_set(tmp_path: Path) -> None:
    prompts = [prompt_of(scene, data) for data in ("one", "other") for scene in SCENES]
    write_prompts(tmp_path / "prompts.gz", prompts)
    assert read_prompts(tmp_path / "prompts.gz") == prompts
    assert [each.data for each in read_prompts(tmp_path / "prompts.gz", 1)] == ["one", "other"]
    write_prompts(tmp_path / "none.gz", [])
    with pytest.raises(InputError, match="no prompts"):
        read_prompts(tmp_path / "none.gz")
    rows = summarise([Measured(d, "", PLAIN, "none", 0.0, kl, 1.0, 1.0, 0.1) for d, kl in (("a", 1.0), ("b", 3.0))])
    assert [(row["data"], row["kl"]) for row in rows] == [("a", 1.0), ("all", 2.0), ("b", 3.0)]
    assert "| all | as it is | none | 0% | 10% | 2.0000 | 1.000 | 1.00 | 2 |" in table_of(rows)
