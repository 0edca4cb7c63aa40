"""`bench`: counts must add up; the tests do not check times."""

from __future__ import annotations

import json
from statistics import median

import pytest
import torch

from cacheblend_lab.bench import (
    BenchModel,
    IndexSettings,
    StreamsSettings,
    ThroughputSettings,
    TTFTSettings,
    Workbench,
    bench_index,
    bench_streams,
    bench_throughput,
    bench_ttft,
    open_workbench,
)
from cacheblend_lab.bench.random_models import random_model
from cacheblend_lab.bench.throughput import _Load, _rate_at, _Way
from cacheblend_lab.measure import PeakMemory
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.measure import drop_page_cache
from cacheblend_rag.calibrate.rounding import own_attention
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError, ModelError

pytestmark = pytest.mark.usefixtures("collected")

TINY = BenchModel(random_weights="llama:2x256", device="cpu")
CHUNKS, TOKENS, QUESTION = 3, 20, 5
SETTINGS = TTFTSettings(chunks=CHUNKS, chunk_tokens=TOKENS, question_tokens=QUESTION, ratio=0.5, repeat=2)


@pytest.fixture
def in_ram():
    with open_workbench(TINY) as bench:
        yield bench


@pytest.fixture
def on_disk(tmp_path):
    with open_workbench(TINY, "disk", tmp_path) as bench:
        yield bench


@pytest.mark.slow
def test_every_method_computes_exactly_the_expected_number_of_tokens(in_ram):
    result = bench_ttft(in_ram, SETTINGS)
    prompt = CHUNKS * TOKENS + QUESTION
    stale = (CHUNKS - 1) * TOKENS  # the first chunk is an exact prefix
    assert {name: m["computed_tokens"] for name, m in result["methods"].items()} == {
        "full": prompt,
        "prefix": prompt - TOKENS,
        "reuse": QUESTION,
        "blend": QUESTION + stale // 2,
    }
    assert all(m["computed_tokens"] + m["reused_tokens"] == prompt for m in result["methods"].values())


@pytest.mark.slow
def test_the_result_is_json_and_its_summary_follows_from_its_samples(in_ram):
    result = json.loads(json.dumps(bench_ttft(in_ram, SETTINGS)))
    assert {"engine", "model", "settings", "methods", "speedup_blend_vs_full"} <= result.keys()
    full, blend = (result["methods"][name]["ttft_s"] for name in ("full", "blend"))
    assert len(full) == len(blend) == len(result["plain_transformers"]["ttft_s"]) == SETTINGS.repeat
    assert result["speedup_blend_vs_full"] == pytest.approx(median(full) / median(blend))
    assert result["settings"]["ratio"] == 0.5
    assert result["machine"]["torch"] == torch.__version__
    layers, kv_heads, head_dim, fp32 = 2, 1, 64, 4
    assert result["chunk_kv_bytes"] == 2 * layers * kv_heads * head_dim * fp32 * CHUNKS * TOKENS


@pytest.mark.slow
def test_cold_runs_report_the_disks_read_limit(on_disk):
    result = bench_ttft(on_disk, TTFTSettings(CHUNKS, TOKENS, QUESTION, repeat=2, cold=True))
    files = sum(file.stat().st_size for file in on_disk.files())
    assert result["cold_read"]["bytes"] == files > 0
    assert len(result["cold_read"]["read_s"]) == 2
    assert result["settings"]["kv"] == "disk"


def test_int8_kv_takes_a_third_of_the_ram_of_fp32(in_ram):
    settings = TTFTSettings(CHUNKS, TOKENS, QUESTION, repeat=1)
    with open_workbench(TINY, "int8") as place:
        result = bench_ttft(place, settings)
    assert result["settings"]["kv"] == "int8"
    whole = bench_ttft(in_ram, settings)["chunk_kv_bytes"]
    assert result["chunk_kv_bytes"] == whole * (64 + 4) / (4 * 64)


def test_cold_runs_without_a_disk_are_refused(in_ram):
    with pytest.raises(InputError, match="--kv disk"):
        bench_ttft(in_ram, TTFTSettings(CHUNKS, TOKENS, QUESTION, cold=True))


def test_an_unblendable_model_is_refused():
    with (
        pytest.warns(UserWarning, match="ordinary prefill"),
        pytest.raises(ModelError, match="not blended"),
        open_workbench(BenchModel(random_weights="llama:1x256")),
    ):
        pass


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"model": "a", "random_weights": "b"}, "both"), ({"dtype": "int"}, "dtype"), ({"threads": 0}, "threads")],
)
def test_an_impossible_model_choice_names_its_field(fields, named):
    with pytest.raises(InputError, match=named):
        BenchModel(**fields)


def test_a_workbench_keeps_kv_on_disk_below_the_given_directory(tmp_path, on_disk):
    assert on_disk.kv == "disk"
    assert on_disk.directory.parent == tmp_path


def test_indexing_rounds_add_up_and_remove_their_chunks(on_disk):
    result = bench_index(on_disk, IndexSettings(chunks=5, chunk_tokens=TOKENS, repeat=2))
    for method in result["methods"].values():
        assert method["tokens_per_s"] == pytest.approx(5 * TOKENS / median(method["seconds"]))
    plain, index = (result["methods"][name]["tokens_per_s"] for name in ("plain", "index"))
    assert result["rate_index_vs_plain"] == pytest.approx(index / plain)
    assert result["rank_cost"] == pytest.approx(index / result["methods"]["ranked"]["tokens_per_s"])
    assert on_disk.files() == []


def test_a_ranked_round_ranks_chunks_and_an_unranked_one_does_not(in_ram, monkeypatch):
    ranked = []
    precompute = in_ram.engine.precompute

    def watched(chunks):
        report = precompute(chunks)
        ranked.append([in_ram.engine.entries.has_static(chunk.token_ids) for chunk in chunks])
        return report

    monkeypatch.setattr(in_ram.engine, "precompute", watched)
    bench_index(in_ram, IndexSettings(chunks=2, chunk_tokens=TOKENS, repeat=1))
    assert sorted(ranked) == [[False, False]] * 2 + [[True, True]] * 2


def test_the_plain_prefill_runs_with_transformers_attention_and_restores_ours(in_ram):
    model = in_ram.engine.runner.model
    ours = model.config._attn_implementation
    with own_attention(model):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == ours != "sdpa"


def test_throughput_raises_the_rate_until_the_target_is_missed(in_ram):
    settings = ThroughputSettings(
        corpus=3, chunks=2, chunk_tokens=TOKENS, question_tokens=4, answer_tokens=1, requests=3, target_ttft_s=1e-9
    )
    result = bench_throughput(in_ram, settings)
    for method in result["methods"].values():
        (point,) = method["points"]
        assert point["p90_s"] >= point["ttft_s"] > 1e-9
        assert 0 < method["requests_per_s"] < point["rate"]
    rates = {name: method["requests_per_s"] for name, method in result["methods"].items()}
    assert result["blend_vs_full"] == pytest.approx(rates["blend"] / rates["full"])
    assert list(result["methods"]) == ["full", "prefix", "blend", "reorder", "reorder+blend"]


def test_the_prefix_cache_of_transformers_serves_reordered_prompts(in_ram):
    sizes = {"corpus": 2, "chunks": 2, "chunk_tokens": TOKENS, "question_tokens": 4, "answer_tokens": 1, "requests": 6}
    # A policy that looks at the question would make blended KV serve one question alone.
    settings = ThroughputSettings(**sizes, ratio=0.5, policy="static", target_ttft_s=1e-9)
    methods = bench_throughput(in_ram, settings)["methods"]
    computed = {name: method["points"][0]["computed_tokens"] for name, method in methods.items()}
    # All reordered prompts except the first begin with the first prompt's chunks.
    assert computed["reorder"] < computed["full"]
    assert computed["reorder+blend"] < computed["blend"]


@pytest.mark.parametrize(
    ("target", "rate"),
    [(0.5, 0.5), (1.0, 1.0), (2.0, 2.0**0.5), (3.0, 2.0), (9.0, 2.0)],
)
def test_the_sustained_rate_is_interpolated_to_the_target(target, rate):
    points = [{"rate": 1.0, "ttft_s": 1.0}, {"rate": 2.0, "ttft_s": 3.0}]
    assert _rate_at(points, target) == pytest.approx(rate)


def test_streams_continue_while_prompts_are_answered(in_ram):
    settings = StreamsSettings(streams=2, prompts=2, chunks=2, chunk_tokens=TOKENS, question_tokens=4, repeat=1)
    result = bench_streams(in_ram, settings)
    for method in result["methods"].values():
        assert method["tokens"] > 0
        assert 0 < method["p50_s"] <= method["p99_s"] <= method["max_s"]
    full, blend = (result["methods"][name]["p99_s"] for name in ("full", "blend"))
    assert result["p99_blend_vs_full"] == pytest.approx(blend / full)


@pytest.mark.slow
def test_peak_memory_includes_memory_already_freed():
    memory = PeakMemory(torch.device("cpu"))
    memory.restart()
    before = memory.nbytes()
    if before is None:
        pytest.skip("this system does not let the peak be reset")
    size = 200_000_000
    torch.ones(size, dtype=torch.uint8).sum()
    assert memory.nbytes() - before > 0.9 * size
    memory.restart()
    assert memory.nbytes() - before < 0.5 * size


def test_dropping_the_page_cache_keeps_the_bytes(tmp_path):
    file = tmp_path / "kv"
    file.write_bytes(b"kv" * 5000)
    drop_page_cache([file])
    assert file.read_bytes() == b"kv" * 5000


@pytest.mark.parametrize(("skew", "times"), [(0.0, range(10, 30)), (3.0, range(90, 101))])
def test_a_skewed_stream_requests_some_chunks_more_often(in_ram, skew, times):
    settings = ThroughputSettings(corpus=10, chunks=2, chunk_tokens=TOKENS, skew=skew)
    corpus = in_ram.random_chunks(10, TOKENS, 0)
    load = _Load(in_ram, settings, corpus)
    drawn = [[span.chunk for span in prompt.spans] for prompt in load._prompts(100, _Way(BlendSettings()), 0)]
    assert all(len({chunk.id for chunk in chunks}) == 2 for chunks in drawn)
    asked = sum(corpus[0] in chunks for chunks in drawn)
    assert asked in times
    # A popular chunk does not always stand first.
    assert 0 < sum(chunks[0] == corpus[0] for chunks in drawn) < asked


def test_every_chunk_of_a_kv_writer_may_come_first_in_a_stream_of_questions():
    model = random_model("llama:2x256", torch.device("cpu"), torch.float32)
    settings = ThroughputSettings(
        corpus=3, chunks=2, chunk_tokens=TOKENS, question_tokens=4, answer_tokens=1, requests=3, target_ttft_s=1e-9
    )
    with TransformersEngine(model, device="cpu", header=(1, 2), writer="probe", prefix_cache=0) as engine:
        methods = bench_throughput(Workbench.of(engine), settings)["methods"]
    assert list(methods) == ["full", "prefix", "blend"], "there is no prefix cache"
    # The prefix is the header and the first chunk, which are stored.
    assert methods["prefix"]["points"][0]["computed_tokens"] == TOKENS + 4


def test_finished_streams_are_replaced_even_in_a_short_window(in_ram, monkeypatch):
    monkeypatch.setattr(in_ram.engine, "context_window", 80)
    monkeypatch.setattr("cacheblend_lab.bench.streams._LONGEST", 3)  # ends before its stream is running
    settings = StreamsSettings(streams=2, prompts=2, chunks=2, chunk_tokens=TOKENS, question_tokens=4, repeat=1)
    assert all(method["tokens"] for method in bench_streams(in_ram, settings)["methods"].values())
