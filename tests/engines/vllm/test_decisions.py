"""Tests of the loading controller in the scheduler's half: places of entries, waiting blends and measured times."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput

from cacheblend_rag.blending.controller import Choice
from cacheblend_rag.blending.costs import ComputeCost, Computed, Costs, TierCost
from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import FuseOptions, TextRatio
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm.client import BlendClient
from cacheblend_rag.engines.vllm.messages import (
    PARAMS,
    BlendJob,
    FinishReport,
    SaveJob,
    WorkerMeta,
    read_params,
    read_report,
    to_params,
)
from cacheblend_rag.engines.vllm.pages import page_groups
from cacheblend_rag.engines.vllm.scheduler_side import SchedulerSide, Whereabouts
from cacheblend_rag.engines.vllm.worker_side import RAMLog, _context
from cacheblend_rag.errors import InputError
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore
from cacheblend_rag.store.files import DEFAULT, Namespace
from cacheblend_rag.store.kv import ChunkKV, LayerKV, ModelFingerprint
from tests.outcomes import differing, filled

TOKENS, CHUNKS, QUESTION = 50, 4, 8
MODEL = ModelFingerprint("0" * 32, "m")
OPTIONS = FuseOptions(policy("full-reuse"), 0.2, auto=True)  # this policy measures nothing, so a blend is one pass


def ids(chunk: int) -> tuple[int, ...]:
    return tuple(range(1000 * chunk, 1000 * chunk + TOKENS))


def kv() -> ChunkKV:
    layer = torch.zeros(1, TOKENS, 8)
    return ChunkKV([LayerKV(layer, layer)] * 2, 0)


def entries(root: Path, rank: int = 0, ranks: int = 1) -> Entries:
    return Entries(DiskStore(root), MODEL, (), rank, ranks)


class Scheduler:
    """The scheduler's half over a disk that has the chunks; a pass takes 1 ms a token."""

    def __init__(self, root: Path, **seconds: float):
        self.entries = entries(root)
        for chunk in range(CHUNKS):
            self.entries.put(ids(chunk), kv())
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.side = SchedulerSide(self.entries, page_groups(KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)])))
        nbytes = CHUNKS * self.entries.entry(ids(0)).nbytes
        tiers = {tier: TierCost(0.0, nbytes / took) for tier, took in seconds.items()}
        self.costs = Costs(2, ComputeCost(0.0, 1e-3, 0.0), tiers)

    def request(self, name: str, unasked: int = 0) -> Any:
        spans = tuple((n * TOKENS, (n + 1) * TOKENS, f"chunk {n}") for n in range(CHUNKS))
        prompt = [*(token for chunk in range(CHUNKS) for token in ids(chunk)), *range(QUESTION)]
        made = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=len(prompt),
            prompt_token_ids=prompt,
            block_hashes=[],  # no prefix cache
            kv_transfer_params=to_params(BlendJob(spans, OPTIONS, self.costs, unasked=unasked)),
        )
        self.side.new_request(made)
        return made

    def blend(self, name: str, computed: int = 0) -> int:
        """Request a prompt, and give its blend to the workers if there is one; return how many tokens the blend provides."""
        request = self.request(name)
        count, _ = self.side.matched_tokens(request, computed)
        assert count is not None
        if count:
            self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (list(range(1, 21)),)), count)  # type: ignore[arg-type]
        return count

    def report(self, *ended: str, **meta: Any) -> None:
        report = KVConnectorOutput(finished_recving=set(ended))
        report.kv_connector_worker_meta = WorkerMeta(**meta)
        self.side.worker_output(report)

    def finished(self, name: str) -> FinishReport:
        found = self.side.finished(SimpleNamespace(request_id=name, num_prompt_tokens=CHUNKS * TOKENS + QUESTION))
        report = read_report(found)
        assert report is not None
        return report

    def outcome(self, name: str) -> PromptOutcome:
        return self.finished(name).outcome


def test_the_scheduler_knows_the_workers_ram_entries_from_their_reports(tmp_path: Path) -> None:
    known = entries(tmp_path)
    store = TieredStore([MemoryStore(kv().nbytes), DiskStore(tmp_path)])
    worker, log, where = Entries(store, MODEL, ()), RAMLog(store), Whereabouts()
    assert where.find(known, ids(0)) is None
    worker.put(ids(0), kv())
    found = where.find(known, ids(0))
    assert (found.tier, found.num_tokens) == ("disk", TOKENS)
    assert found.stored_nbytes == known.entry(ids(0)).nbytes > kv().nbytes
    where.take(log.take())
    assert (where.find(known, ids(0)).tier, where.find(known, ids(0)).stored_nbytes) == ("ram", kv().nbytes)
    worker.put(ids(1), kv())  # RAM has room for one entry
    where.take(log.take())
    assert [where.find(known, ids(chunk)).tier for chunk in (0, 1)] == ["disk", "ram"]
    worker.delete(ids(1))
    where.take(log.take())
    assert where.find(known, ids(1)) is None
    assert log.take() == {}


def test_a_tenant_finds_only_its_entries_and_those_of_namespaces_that_it_reads(tmp_path: Path) -> None:
    mine = entries(tmp_path).within(Namespace("acme", ("public",)))
    public, other = (mine.within(Namespace(name)) for name in ("public", "other"))
    where = Whereabouts()
    other.put(ids(0), kv())
    assert where.find(mine, ids(0)) is None
    public.put(ids(0), kv())
    assert where.find(mine, ids(0)).tier == "disk"
    where.take({public.own_key(ids(0)): 7, other.own_key(ids(0)): 9})
    found = where.find(mine, ids(0))
    assert (found.tier, found.stored_nbytes) == ("ram", 7)
    assert where.find(entries(tmp_path), ids(0)) is None  # the default tenant reads no other tenant's entries


def test_a_rank_finds_its_shard_once_all_ranks_have_theirs_or_its_share_of_a_whole_entry(tmp_path: Path) -> None:
    first, second = (entries(tmp_path, rank, 2) for rank in range(2))
    first.put(ids(0), kv())
    assert first.entry(ids(0)) is None
    second.put(ids(0), kv())
    assert first.entry(ids(0)).key == first.own_key(ids(0)) == first.read_keys(ids(0))[0]
    entries(tmp_path).put(ids(1), kv())
    assert 2 * first.entry(ids(1)).nbytes in range(entries(tmp_path).entry(ids(1)).nbytes - 1, 1 << 20)


def test_entries_on_slow_storage_are_used_only_once_the_workers_have_them_in_ram(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, disk=3600.0, ram=1e-6)
    assert scheduler.blend("a") == 0
    outcome = scheduler.outcome("a")
    assert (outcome.mode, outcome.missing) == ("prefill", ())
    assert outcome.in_place == tuple(f"chunk {n}" for n in range(CHUNKS))
    assert outcome.expected_s == pytest.approx(0.208)
    scheduler.report(held={scheduler.entries.own_key(ids(n)): 3200 for n in range(CHUNKS)})
    assert scheduler.blend("b") == CHUNKS * TOKENS
    assert scheduler.outcome("b").in_place == ()


def test_the_controller_counts_only_tokens_outside_the_prefix_cache(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, disk=3600.0)
    scheduler.report(held={scheduler.entries.own_key(ids(3)): 3200})
    assert scheduler.blend("a", computed=3 * TOKENS) == TOKENS
    assert scheduler.outcome("a").expected_s == pytest.approx(QUESTION * 1e-3 + 0.2 * TOKENS * 1e-3, rel=0.06)
    assert scheduler.blend("b", computed=2 * TOKENS) == 2 * TOKENS
    assert scheduler.outcome("b").in_place == ("chunk 2",)
    assert scheduler.blend("c", computed=CHUNKS * TOKENS) == 0


def test_the_last_look_up_of_a_prompt_decides_its_cached_tokens(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, disk=1e-6)
    request = scheduler.request("a")
    for computed in (0, 3 * TOKENS):
        assert scheduler.side.matched_tokens(request, computed) == (CHUNKS * TOKENS - computed, True)
    assert scheduler.outcome("a").usage.kept_tokens == 3 * TOKENS


@pytest.mark.parametrize("unasked", [0, QUESTION - 1, QUESTION])
def test_vllm_computes_the_last_token_in_front_of_a_scored_answer(tmp_path: Path, unasked: int) -> None:
    scheduler = Scheduler(tmp_path, disk=1e-6)
    count, _ = scheduler.side.matched_tokens(scheduler.request("a", unasked), 0)
    assert count == min(CHUNKS * TOKENS, CHUNKS * TOKENS + QUESTION - unasked - 1)


def test_a_prompt_does_not_wait_for_many_blends_before_it(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, disk=1e-6)
    names = [f"blend {n}" for n in range(20)]
    blended = [scheduler.blend(name) > 0 for name in names]
    # Each blend takes some 50 ms; prefilling in turns with the blends takes twice 208 ms.
    assert blended == [True] * blended.count(True) + [False] * blended.count(False)
    assert 6 <= blended.count(True) <= 8
    scheduler.report(*names[: blended.count(True)])
    assert scheduler.blend("when they have ended") > 0


def test_a_prompt_does_not_wait_for_blends_of_ended_requests(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, disk=1e-6)
    for number in range(20):
        assert scheduler.blend(f"blend {number}") > 0
        scheduler.outcome(f"blend {number}")


def test_the_workers_measurements_are_sent_once_with_the_next_answer(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, disk=1e-6)
    for name in ("a", "b"):
        scheduler.blend(name)
    scheduler.report(computed=[Computed(100, 208, 0.1)])
    assert scheduler.finished("a").measured == (Computed(100, 208, 0.1),)
    assert scheduler.finished("b").measured == ()


def test_every_fact_of_a_blend_reaches_the_client(tmp_path: Path) -> None:
    scheduler, outcome = Scheduler(tmp_path, disk=1e-6), filled()
    assert scheduler.blend("a") > 0
    scheduler.report("a", done={"a": outcome})
    report = scheduler.finished("a")
    assert differing(report.outcome, outcome) == {
        "usage",
        "expected_s",
    }  # the scheduler adds cached tokens and the decision
    client: Any = BlendClient.__new__(BlendClient)
    client.gate, client.costs, client.fingerprint = GateReport(True), scheduler.costs, MODEL
    client.profile = ModelProfile()
    done = client.report(to_params(report), 208, 200, 5, asked=True)
    assert differing(done.outcome, report.outcome) == {"usage", "prefill_s", "fingerprint", "calibrated"}
    counts, known = done.outcome.usage, outcome.usage
    assert (counts.prompt_tokens, counts.completion_tokens, counts.kept_tokens) == (208, 5, 0)
    assert counts.reused_tokens == 200 - known.computed_tokens == 208 - counts.computed_tokens
    assert (counts.recomputed_tokens, counts.selection_tokens) == (known.recomputed_tokens, known.selection_tokens)
    assert client.report(None, 208, 7, 5, asked=False).outcome.usage == Usage(208, 7, 0, 201, 5, 0.0, 7, 7)


def test_a_failed_blend_reports_no_expected_time(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, disk=1e-6)
    request = scheduler.request("a")
    assert scheduler.side.matched_tokens(request, 0) == (CHUNKS * TOKENS, True)
    scheduler.report("a", failed={"a": "out of memory"})
    assert scheduler.side.matched_tokens(request, 0) == (0, False), "it is not tried again"
    outcome = scheduler.outcome("a")
    assert (outcome.reason, outcome.mode) == ("out of memory", "prefill")
    assert outcome.expected_s is None


@pytest.mark.parametrize("ratio", [0.2, TextRatio(0.2, 0.5)])
def test_a_job_survives_serialisation(tmp_path: Path, ratio: Any) -> None:
    costs = Scheduler(tmp_path, disk=1.0).costs
    for job in (BlendJob(((0, 5, "a"),), replace(OPTIONS, ratio=ratio), each) for each in (costs, None)):
        assert read_params(json.loads(json.dumps(to_params(job))), 10) == job


@pytest.mark.parametrize("whose", [DEFAULT, Namespace("public"), Namespace("acme", ("public",))])
def test_a_namespace_reaches_the_workers_unchanged_and_the_default_is_not_sent(whose: Namespace) -> None:
    for job in (BlendJob(((0, 5, "a"),), OPTIONS, namespace=whose), SaveJob(0, namespace=whose)):
        travels = json.loads(json.dumps(to_params(job)))
        assert ("namespace" in travels[PARAMS]) == (whose != DEFAULT)
        assert read_params(travels, 10) == job


@pytest.mark.parametrize(
    "wrong",
    [
        *({"costs": costs} for costs in ({}, 3)),
        *({"options": {"policy": "hkvd", "ratio": ratio, "auto": True}} for ratio in (2.0, None, {"a": 1})),
        *({"options": options} for options in ({"policy": "hkvd"}, {"ratio": 0.1}, {}, [], "hkvd", None)),
        {"options": {"policy": ["hkvd"], "ratio": 0.1}},
        {"options": {"policy": "hkvd", "ratio": {"least": 0.1, "left_out": 0.5}}},
        {"options": {"policy": "hkvd", "ratio": 0.1, "widths": [1, 1]}},
        {"options": {"policy": "hkvd", "ratio": 0.1, "more": 1}},
    ],
)
def test_a_malformed_job_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    job = BlendJob(((0, 5, "a"),), OPTIONS, Scheduler(tmp_path, disk=1.0).costs)
    with pytest.raises(InputError, match="malformed"):
        read_params({PARAMS: to_params(job)[PARAMS] | wrong}, 10)


def test_the_controllers_ratio_is_the_lower_bound_of_the_text_ratio() -> None:
    from cacheblend_rag.engines.vllm.messages import LoadOrder

    choice, ruled = Choice(frozenset(), 0.4, "", 1.0), replace(OPTIONS, ratio=TextRatio(0.2, 0.5))
    load = LoadOrder("a", (), 0, 0, (), BlendJob((), ruled), choice)
    assert load.options.ratio == TextRatio(0.4, 0.5)
    assert replace(load, job=BlendJob((), OPTIONS)).options.ratio == 0.4
    assert replace(load, choice=None).options.ratio == TextRatio(0.2, 0.5)
    assert pickle.loads(pickle.dumps(load)) == load, "it is pickled on its way to the workers"


def test_the_costs_of_a_chunked_prefills_pieces_add_up_to_the_whole_prefill() -> None:
    """The sum is over tokens times context, as attention costs."""

    def step(begin: int, count: int) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {"a": count}
        output.scheduled_new_reqs = [SimpleNamespace(req_id="a", num_computed_tokens=begin)]  # type: ignore[list-item]
        return output

    pieces = ((0, 300), (300, 500), (800, 200))
    assert sum(count * _context(step(begin, count)) for begin, count in pieces) == 1000 * _context(step(0, 1000))
    assert _context(step(0, 1000)) == 1000
