"""Tests probes, sweeps and figures on a small random model."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cacheblend_lab.bench.sweeps import ThrottledStore, simulate_queue, sweep_devices, sweep_ratio, sweep_sizes
from cacheblend_lab.evaluation.attention import AttentionInspector
from cacheblend_lab.evaluation.evaluate import EvalSettings
from cacheblend_lab.evaluation.figures import FIGURES, FigureContext, make_figures, parse_numbers, quality
from cacheblend_lab.evaluation.figures.attention import attention_deviation
from cacheblend_lab.evaluation.figures.findings import FINDINGS
from cacheblend_lab.evaluation.figures.make import _settings
from cacheblend_lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_rag.blending.costs import ComputeCost
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
from cacheblend_rag.errors import InputError
from lab_tests.evaluation.test_run import SAMPLES

pytestmark = pytest.mark.slow

MADE = [2, 4, 6, 7, 8, 10, 12, 13, 14, 16, 17]
SMALL = EvalSettings("demo", limit=4, preparation=Preparation(3, 300, max_tokens=2))


@pytest.fixture
def inspector(engine):
    set_header(engine, SAMPLES)
    return AttentionInspector.of(engine, Preparer(engine, Preparation(max_tokens=4)).case(SAMPLES[0]).prompt)


def test_inspected_attention_equals_the_models_eager_attention(engine, inspector):
    got = inspector.measure_attention(FuseOptions(policy("full-recompute"), 1.0))
    ids = torch.tensor([inspector.tokens.token_ids])
    model = engine.runner.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            want = model(input_ids=ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    rows = len(inspector.question)
    torch.testing.assert_close(got, torch.stack([layer[0, :, -rows:] for layer in want]), atol=1e-5, rtol=1e-4)


def test_attention_deviation_falls_as_more_is_recomputed(inspector):
    want = inspector.measure_attention(FuseOptions(policy("full-recompute"), 1.0))
    deviations = [
        float(attention_deviation(inspector.measure_attention(FuseOptions(policy("hkvd"), ratio)), want)[2:].mean())
        for ratio in (0.0, 0.5, 1.0)
    ]
    assert deviations[0] > deviations[1] > deviations[2] == pytest.approx(0, abs=1e-5)


def test_kv_deviation_is_0_in_layer_0_only(inspector):
    deviation = inspector.measure_deviation()
    assert deviation.shape[0] == 5
    assert deviation[0].max() < 1e-6 * deviation[1].mean()
    assert (deviation[1:].mean(1) > 0).all()


def test_a_queue_waits_longer_under_load_and_has_no_answer_beyond_its_capacity():
    points = simulate_queue({"a": [(0.1, 0.5), (0.1, 0.5)]}, [0.1, 1.0, 1.6, 1.99, 3.0])
    ttft = [point["ttft_s"] for point in points]
    assert ttft[0] < ttft[1] < ttft[2]
    assert ttft[3:] == [None, None]
    assert points[0]["capacity"] == pytest.approx(2)
    # Service is constant: the mean wait of an M/D/1 queue is rho / (2 mu (1 - rho)).
    assert ttft[1] == pytest.approx(0.1 + 0.5 / (2 * 2 * 0.5), rel=0.15)


def test_a_throttled_store_gives_the_same_answers_as_the_usual_store(engine, monkeypatch):
    monkeypatch.setattr(engine, "ranking", "now")
    usual, settings = engine.store, SAMPLES
    set_header(engine, settings)
    case = Preparer(engine, Preparation(max_tokens=4)).case(SAMPLES[0])
    engine.precompute(case.chunks)
    blend = BlendSettings(0.5, "static-query")
    want = engine.generate(case.prompt, settings=blend)
    engine.store = ThrottledStore(1e9)
    try:
        engine.precompute(case.chunks)
        engine.reset_prefix_cache()
        got = engine.generate(case.prompt, settings=blend)
        assert got.token_ids == want.token_ids
        assert (got.mode, got.policy, got.ratio) == ("blend", want.policy, want.ratio)
        by_rank = engine.generate(case.prompt, settings=BlendSettings(0.1, "static"))
        assert by_rank.policy == "static"
        assert got.load_s >= 0
    finally:
        engine.store = usual
    with pytest.raises(InputError, match="bandwidth"):
        ThrottledStore(0)


def test_reads_of_one_device_wait_for_each_other(monkeypatch):
    from cacheblend_lab.bench import sweeps

    now, slept = [0.0], []
    monkeypatch.setattr(sweeps.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sweeps.time, "sleep", slept.append)
    device = sweeps._Device(100.0)
    device.read(50)
    device.read(50)
    now[0] = 10.0
    device.read(100)
    assert slept == pytest.approx([0.5, 1.0, 1.0])


def test_sweeps_time_every_method_at_every_point(engine):
    place = FigureContext(engine, SMALL, Path()).workbench
    points = sweep_sizes(place, "chunks", (1, 2), repeat=1)
    assert [(p["chunks"], p["method"]) for p in points] == [
        (n, m) for n in (1, 2) for m in ("full", "prefix", "reuse", "blend")
    ]
    for point in points:
        assert point["fastest_s"] <= point["ttft_s"] <= point["slowest_s"]
    full, prefix, reuse, blend = points[4:]
    assert full["computed_tokens"] == full["prompt_tokens"] > prefix["computed_tokens"]
    assert prefix["computed_tokens"] > blend["computed_tokens"] > reuse["computed_tokens"]
    ratios = sweep_ratio(place, (0.25,), repeat=1)
    assert [(p["ratio"], p["method"]) for p in ratios] == [(1.0, "full"), (0.0, "reuse"), (0.25, "blend")]
    assert len(sweep_sizes(place, "batch", (1,), repeat=1)) == 4
    with pytest.raises(InputError, match="throttled"):
        sweep_devices(place)


@pytest.mark.parametrize(
    ("text", "want"),
    [(None, list(FIGURES)), ("2", [2]), ("9-17", [10, 12, 13, 14, 15, 16, 17]), ("6, 2,7-8", [2, 6, 7, 8])],
)
def test_figures_are_selected_by_number(text, want):
    assert parse_numbers(text) == want


@pytest.mark.parametrize("text", ["", "x", "3", "9", "2-"])
def test_unknown_figures_are_refused(text):
    if text == "2-":
        assert parse_numbers(text) == [2]
        return
    with pytest.raises(InputError):
        parse_numbers(text)


def test_findings_are_computed_from_the_rows_of_a_run():
    def timed(**ttft: float) -> list[dict[str, object]]:
        return [{"method": name, "ttft_s": seconds} for name, seconds in ttft.items()]

    def scored(name: str, quality: float, ttft: float) -> dict[str, object]:
        return {"method": name, "score": "F1", "quality": quality, "ttft_median_s": ttft, "label": name}

    rows = [scored("full", 0.9, 3.0), scored("reuse", 0.5, 0.5), scored("blend", 0.88, 1.0)]
    assert FINDINGS[12](rows) == (
        "The blend's first token comes 3.0 times as soon as full recompute's; it takes 2.0 times full KV reuse's time. Its F1 is "
        "-0.02 against full recompute and +0.38 against full KV reuse."
    )
    rows = [{"panel": "chunks", "x": 2, **row} for row in timed(full=4.0, blend=2.0)]
    rows += [{"panel": "batch", "x": 2, **row} for row in timed(full=9.0, blend=3.0)]
    assert "2.0 to 3.0 times as soon" in FINDINGS[15](rows)
    rows = [{"bytes_per_s": 5e8, **row} for row in timed(reuse=1.0, blend=1.1)]
    rows += [{"bytes_per_s": 4e9, **row} for row in timed(reuse=0.2, blend=0.8)]
    assert (
        FINDINGS[17](rows)
        == "The blend's TTFT is 1.1 times full KV reuse's at 0.5 GB/s and 4.0 times full KV reuse's at 4 GB/s."
    )


def test_figure_16_names_the_ratio_from_which_all_higher_ones_are_near():
    def row(method, ratio, quality):
        return {"method": method, "ratio": ratio, "quality": quality, "score": "F1", "ttft_median_s": 1.0}

    rows = [row("reuse", 0.0, 0.5), row("full", 1.0, 0.8)]
    rows += [row(f"hkvd@{ratio}", ratio, quality) for ratio, quality in ((0.05, 0.79), (0.1, 0.7), (0.3, 0.79))]
    assert FINDINGS[16](rows).endswith("from 30% on it is within 0.02.")


def test_figure_10_names_the_speed_at_which_loading_is_hidden_and_the_controllers_loss():
    def at(rate: float, full: float, blend: float, controller: float, computed: int) -> list[dict[str, object]]:
        shared = {"bytes_per_s": rate, "recompute_s": 0.5, "load_s": 1e9 / rate, "prompt_tokens": 100}
        return [
            {**shared, "method": "full", "ttft_s": full, "computed_tokens": 100},
            {**shared, "method": "blend", "ttft_s": blend, "computed_tokens": 10},
            {**shared, "method": "controller", "ttft_s": controller, "computed_tokens": computed},
        ]

    rows = at(5e8, 3.0, 2.1, 2.31, 40) + at(4e9, 3.0, 0.6, 0.63, 12)
    assert FINDINGS[10](rows) == (
        "From 4 GB/s on a device adds no delay; the blend takes at most 1.20 times the longer of loading and recomputing. The "
        "controller computes 40% to 12% of the prompt, and takes at most 1.10 times the sooner of blend and full recompute."
    )
    assert FINDINGS[10](rows[:3]).startswith("Every device adds delay; ")


def test_all_figures_are_made_and_measured_once(engine, tmp_path, monkeypatch):
    for module in ("quality", "attention", "devices"):
        monkeypatch.setattr(f"cacheblend_lab.evaluation.figures.{module}.figure", _small(module))
    monkeypatch.setattr("cacheblend_lab.plotting._DOTS_PER_INCH", 40)
    monkeypatch.setattr("cacheblend_lab.evaluation.figures.quality._COUNTS", (1, 3))
    monkeypatch.setattr("cacheblend_lab.evaluation.figures.quality._POOL", 3)
    monkeypatch.setattr("cacheblend_lab.evaluation.figures.quality._RATIOS", (0.1, 0.5))
    monkeypatch.setattr("cacheblend_lab.evaluation.figures.attention._RATIOS", (0.0, 0.3))
    monkeypatch.setattr("cacheblend_lab.evaluation.figures.base._INSPECTED", 2)
    monkeypatch.setattr("cacheblend_lab.evaluation.figures.devices._RATES", (2e5, 1e9))
    # On a busy machine, measured costs of so small a model may not grow with the number of tokens.
    monkeypatch.setattr("cacheblend_lab.bench.sweeps.measure_compute", lambda _: ComputeCost(1e-4, 1e-5, 0.0))
    monkeypatch.setattr("cacheblend_lab.bench.sweeps.CHUNK_TOKENS", 24)
    monkeypatch.setattr("cacheblend_lab.evaluation.prepare.Embedder.load", lambda name: _Flat())
    seen: list[float] = []
    page = make_figures(FigureContext(engine, SMALL, tmp_path, repeat=1), MADE, lambda done, *_: seen.append(done))
    assert seen == sorted(seen)
    text = page.read_text()
    for number in MADE:
        name = f"figure-{number:02}"
        with (tmp_path / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) > 1
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")
        assert f'id="figure-{number}"' in text
    assert len(re.findall("<svg", text)) >= len(MADE)
    assert text.count("Here:") == len(MADE) - 1  # figure 4 has no finding
    with (tmp_path / "figure-10.csv").open() as file:
        chosen = [row for row in csv.DictReader(file) if row["method"] == "controller"]
    slow, fast = (int(row["computed_tokens"]) for row in chosen)
    assert slow == int(chosen[0]["prompt_tokens"])  # nothing is loaded at 200 kB a second
    assert fast < slow
    assert "Worst disagreements" in text

    def again(*_: object) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(engine, "stream", again)
    make_figures(FigureContext(engine, SMALL, tmp_path, repeat=1), [6, 12])
    other = FigureContext(engine, EvalSettings("demo", limit=5, preparation=SMALL.preparation), tmp_path, repeat=1)
    with pytest.raises(AssertionError, match="twice"):
        make_figures(other, [12])


def test_figures_of_a_blend_at_ratio_0_are_not_taken_for_the_profiles_blend(engine, tmp_path):
    zero = replace(SMALL, blend=BlendSettings(0.0))
    kept = [_settings(FigureContext(engine, settings, tmp_path), FIGURES[2]) for settings in (zero, SMALL)]
    assert kept[0] != kept[1]


def test_figures_of_a_changed_data_file_are_measured_again(engine, tmp_path):
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question": f"Q{i}?", "answers": ["x"], "chunks": [f"{word} {i}" for word in ("harbour", "dawn", "grain")]}
        for i in range(3)
    ]
    settings = replace(SMALL, dataset=str(file))

    def once(rows):
        file.write_text("\n".join(map(json.dumps, rows)))
        page = make_figures(FigureContext(engine, settings, tmp_path / "out", repeat=1), [8]).read_text()
        return page, json.loads((tmp_path / "out" / "figure-08.json").read_text())

    first, second = once(rows), once([*rows[:2], {**rows[2], "chunks": ["canary 1", "cello 2", "anchor 3"]}])
    assert first[1]["rows"] != second[1]["rows"]
    assert first[1]["settings"]["files"] != second[1]["settings"]["files"]
    assert second[1]["settings"]["files"]["questions.jsonl"] in second[0]


def test_a_data_file_changed_between_figures_ends_the_run(engine, tmp_path):
    file = tmp_path / "questions.jsonl"
    row = {"question": "Q?", "answers": ["x"], "chunks": ["harbour", "dawn"]}
    file.write_text(json.dumps(row))
    context = FigureContext(engine, replace(SMALL, dataset=str(file)), tmp_path, repeat=1)
    assert context.identity["files"]
    file.write_text(json.dumps({**row, "answers": ["y"]}))
    with pytest.raises(InputError, match="has changed"):
        context.evaluate(("full",), lambda *_: None)


class _Flat:
    def question(self, text):
        return np.zeros(1)

    def texts(self, texts):
        return [np.zeros((1, 1)) for _ in texts]


def _small(module):
    from contextlib import contextmanager

    from cacheblend_lab.plotting import figure

    @contextmanager
    def small(width, height, columns=1, rows=1):
        with figure(width / 2, height / 2, columns, rows) as made:
            made[0].set_layout_engine("none")  # that engine draws everything twice
            yield made

    return small


def test_figure_16_blends_with_the_given_check_layers(monkeypatch):
    asked = []
    monkeypatch.setattr(quality, "_quality", lambda result: [])

    def measured(blend):
        given = SimpleNamespace(blend=blend)
        context = SimpleNamespace(
            blend=ModelProfile().resolve(blend, 5), settings=given, evaluate=lambda names, say: asked.append(names)
        )
        quality._measure_ratios(context, lambda share, text: None)
        return asked[-1][2:]

    assert measured(BlendSettings(0.2, "hkvd", (1, 3)))[0] == "hkvd@0.05@1+3"
    assert measured(BlendSettings(0.2, "hkvd"))[0] == "hkvd@0.05"
