"""Tests of lent pages for layers with a window, in vLLM's cache manager with two groups; no model runs."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm.messages import PARAMS, BlendJob, SaveJob, to_params
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import NO_PAGE, MissingPageError, PageGroup, Pages, page_groups
from cacheblend_rag.engines.vllm.scheduler_side import _PATIENCE, SchedulerSide
from cacheblend_rag.store import KVStore, MemoryStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, ModelFingerprint

BLOCK, WINDOW, CHUNK = 4, 10, tuple(range(100, 160))
_names = (f"request-{n}" for n in itertools.count())


class Scheduler:
    """vLLM's cache manager and the connector, driven as vLLM's scheduler does for one request at a time."""

    def __init__(self, blocks: int, window: int = WINDOW, store: KVStore | None = None):
        init_none_hash(sha256)
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        specs = (FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=window))
        config = KVCacheConfig(blocks, [], [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)])
        self.manager = KVCacheManager(config, 1024, BLOCK, BLOCK, 1024)
        self.entries = Entries(store or MemoryStore(), ModelFingerprint("0" * 32, "m"), ())
        kv = torch.zeros(1, len(CHUNK), 8)
        self.entries.put(CHUNK, ChunkKV([LayerKV(kv, kv)] * 2, 0), replace=False)
        self.side = SchedulerSide(self.entries, page_groups(config), hash_block_size=lambda: BLOCK)
        self.side.bind(self.manager.block_pool)

    @property
    def free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def request(self, ids: tuple[int, ...], job: BlendJob | SaveJob | None = None) -> Request:
        params = None if job is None else {"kv_transfer_params": to_params(job)}
        sampling = SamplingParams(max_tokens=1, extra_args=params)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(next(_names), list(ids), sampling, None, block_hasher=hasher)
        self.side.new_request(request)
        return request

    def blend(self, before: int = 20, chunks: int = 1, behind: int = 5) -> Request:
        """Add a conversation of ``chunks`` turns with the stored chunk in each, behind ``before`` tokens.

        The last turn ends with ``behind`` tokens of text.
        """
        size = len(CHUNK)
        spans = tuple((before + i * size, before + (i + 1) * size, f"chunk {i}") for i in range(chunks))
        ids = (*range(1, before + 1), *CHUNK * chunks, *range(200, 200 + behind))
        ends = tuple(end for _, end, _ in spans[:-1])
        return self.request(ids, BlendJob(spans, FuseOptions(policy("hkvd"), 0.2), turn_ends=ends))

    def admit(self, request: Request) -> int | None:
        """Allocate the tokens that the connector reports as matched; return their number."""
        found, computed, _ = self.manager.get_computed_blocks(request)
        count, _ = self.side.matched_tokens(request, computed)
        if count:
            taken = self.manager.allocate_slots(
                request, 0, computed, found, num_external_computed_tokens=count, delay_cache_blocks=True
            )
            assert taken is not None
            self.side.allocated(request, self.manager.get_blocks(request.request_id), count)
            request.num_computed_tokens = computed + count
        return count

    def step(self, request: Request | None = None, computed: int = 0, scheduled: int = 0) -> Any:
        """Return the metadata for the workers of a step that computes ``scheduled`` tokens of a request."""
        ids = [] if request is None else [request.request_id]
        cached = SimpleNamespace(req_ids=ids, num_computed_tokens=[computed] * len(ids))
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(ids, scheduled),
            total_num_scheduled_tokens=scheduled,
        )
        return self.side.step(output, self.manager)  # type: ignore[arg-type]

    def prefill(self, request: Request, each: int) -> list[Any]:
        """Compute a prompt in steps of ``each`` tokens at the most; return the saves."""
        found, computed, _ = self.manager.get_computed_blocks(request)
        count, _ = self.side.matched_tokens(request, computed)
        if count is None:
            self.step()
            return self.prefill(request, each)
        saves = []
        while computed < request.num_prompt_tokens:
            scheduled = min(each, request.num_prompt_tokens - computed)
            first = request.num_computed_tokens == 0
            hits = (computed, found) if first else (0, None)
            assert self.manager.allocate_slots(request, scheduled, *hits) is not None
            if first:
                self.side.allocated(request, self.manager.get_blocks(request.request_id), 0)
            saves += self.step(request, computed, scheduled).saves
            computed += scheduled
            request.num_computed_tokens = computed
        return saves

    def ended(self, request: Request) -> None:
        self.side.worker_output(KVConnectorOutput(finished_recving={request.request_id}))


def test_vllm_gives_no_pages_before_the_last_window() -> None:
    scheduler = Scheduler(100)
    request = scheduler.request(tuple(range(80)))
    scheduler.manager.allocate_slots(request, 0, num_external_computed_tokens=80, delay_cache_blocks=True)
    everything, windowed = scheduler.manager.get_blocks(request.request_id).get_block_ids()
    assert NO_PAGE not in everything
    assert windowed[:17] == [NO_PAGE] * 17, "vLLM keeps more than it did: then nothing need be lent"


def test_a_blend_has_pages_for_every_position_and_returns_the_lent_pages() -> None:
    scheduler = Scheduler(100)
    request = scheduler.blend()
    before = scheduler.free
    assert scheduler.admit(request) == 80
    (load,) = scheduler.step().loads
    used = [page for pages in load.pages for page in pages]
    assert all(len(pages) * BLOCK >= 80 and NO_PAGE not in pages for pages in load.pages)
    assert len(set(used)) == len(used)
    assert before - scheduler.free == len(used)
    scheduler.ended(request)
    own = [page for pages in scheduler.manager.get_blocks(request.request_id).get_block_ids() for page in pages]
    assert before - scheduler.free == sum(page != NO_PAGE for page in own) < len(used)
    scheduler.ended(request)  # the second call changes nothing
    scheduler.manager.free(request)
    assert scheduler.free == before


def test_blends_borrow_pages_in_turn_and_do_not_wait_if_they_need_none() -> None:
    scheduler = Scheduler(200)
    first, second = scheduler.blend(), scheduler.blend(before=24)
    assert scheduler.admit(first) == 80
    for _ in range(_PATIENCE + 1):
        assert scheduler.admit(second) is None
    wide = Scheduler(200, window=1000)
    assert [wide.admit(wide.blend()), wide.admit(wide.blend(before=24))] == [80, 84]
    scheduler.ended(first)
    assert scheduler.admit(second) == 84


def test_a_prompt_that_needs_too_many_pages_is_prefilled_with_the_reason() -> None:
    scheduler = Scheduler(40)  # the prompt needs 22 blocks in each of the two groups
    request = scheduler.blend()
    assert scheduler.admit(request) == 0
    outcome = (scheduler.side.finished(request) or {})[PARAMS]["outcome"]
    assert outcome["mode"] == "prefill"
    assert "44 of vLLM's blocks" in outcome["reason"]


def test_a_blend_waits_a_limited_time_for_other_requests_pages() -> None:
    scheduler = Scheduler(70)
    other = scheduler.request(tuple(range(300, 360)))
    assert scheduler.manager.allocate_slots(other, 60) is not None
    request = scheduler.blend()
    assert [scheduler.admit(request) for _ in range(_PATIENCE)] == [None] * (_PATIENCE - 1) + [0]
    assert "too full" in (scheduler.side.finished(request) or {})[PARAMS]["outcome"]["reason"]
    patient = scheduler.blend(before=21)
    assert scheduler.admit(patient) is None
    scheduler.manager.free(other)
    assert scheduler.admit(patient) == 81


def test_vllm_computes_the_rest_behind_a_prefix_hit_without_window_pages() -> None:
    scheduler = Scheduler(300, window=3)
    first = scheduler.blend()
    assert scheduler.admit(first) == 80
    scheduler.ended(first)
    scheduler.manager.cache_blocks(first, 80)
    again, longer = scheduler.blend(), scheduler.blend(chunks=2)
    assert scheduler.admit(again) == 0  # the prefix cache has all of it
    assert scheduler.manager.get_computed_blocks(longer)[1] == 80, (
        "what was blended should be found in the prefix cache"
    )
    assert scheduler.admit(longer) == 0
    outcome = (scheduler.side.finished(longer) or {})[PARAMS]["outcome"]
    assert outcome["mode"] == "blend"
    assert "prefix cache" in outcome["reason"]


@settings(max_examples=60)
@given(st.integers(1, 70), st.integers(1, 30), st.integers(0, 69), st.lists(st.integers(1, 70)))
def test_precomputed_kv_is_saved_before_its_pages_are_freed(
    each: int, window: int, start: int, warm: list[int]
) -> None:
    scheduler = Scheduler(300, window)
    ids = tuple(range(300, 370))
    for length in warm:  # prompts with the same beginning fill the prefix cache
        other = scheduler.request(ids[:length])
        scheduler.prefill(other, each)
        scheduler.manager.free(other)
    request = scheduler.request(ids, SaveJob(start))
    saves = scheduler.prefill(request, each)
    assert [save.begin for save in saves] == [start, *(save.end for save in saves[:-1])]
    assert [save.complete for save in saves] == [False] * (len(saves) - 1) + [True]
    for save in saves:
        for pages in save.pages:
            assert NO_PAGE not in pages[save.begin // BLOCK : -(-save.end // BLOCK)]


def test_vllm_computes_the_last_token_of_the_prompt() -> None:
    scheduler = Scheduler(100, window=1000)
    assert scheduler.admit(scheduler.blend(behind=0)) == 20 + len(CHUNK) - 1
    assert scheduler.admit(scheduler.blend(behind=1)) == 20 + len(CHUNK)


def test_a_request_aborted_before_its_blend_returns_its_lent_pages() -> None:
    scheduler = Scheduler(100)
    before = scheduler.free
    request, waiting = scheduler.blend(), scheduler.blend(before=24)
    assert scheduler.admit(request) == 80
    assert scheduler.admit(waiting) is None, "what the first has borrowed is not there"
    scheduler.side.finished(request)
    scheduler.manager.free(request)
    assert scheduler.free == before
    assert scheduler.step().loads == []
    assert scheduler.admit(waiting) == 84


def test_only_prompts_with_the_same_blend_find_its_blocks_in_the_prefix_cache() -> None:
    scheduler = Scheduler(300, window=1000)
    first = scheduler.blend()
    assert scheduler.admit(first) == 80
    scheduler.ended(first)
    scheduler.manager.cache_blocks(first, 80)
    ids = tuple(first.prompt_token_ids or ())
    assert scheduler.manager.get_computed_blocks(scheduler.blend())[1] == 80
    assert scheduler.manager.get_computed_blocks(scheduler.request(ids))[1] == 20, (
        "what stands before its chunk is exact"
    )


def test_a_position_without_a_page_is_neither_read_nor_written() -> None:
    paged: Any = SimpleNamespace(block_size=BLOCK, groups=[PageGroup(BLOCK, None)], device=torch.device("cpu"))
    ids = [[7, NO_PAGE, 9]]
    pages = Pages(paged, ids, 13)
    for slots in (lambda at: PagedModel.slots(paged, 0, ids, at), lambda at: pages.at(0, at)):
        assert slots(torch.tensor([1, 8])).tolist() == [29, 36]
        for position in (4, 12):
            with pytest.raises(MissingPageError, match="pages"):
                slots(torch.tensor([1, position]))


def test_the_pages_of_every_group_are_checked_before_a_blend_writes() -> None:
    groups = [PageGroup(BLOCK, None), PageGroup(BLOCK, 5)]
    paged: Any = SimpleNamespace(block_size=BLOCK, groups=groups, device=torch.device("cpu"))
    pages = Pages(paged, [[7, 8, 9, 10], [NO_PAGE, 11, 12, 13]], 16)
    assert [slots[-1] for slots in (x.tolist() for x in pages.on_device)] == [43, 55]
    assert [table.tolist() for table in pages.tables] == [[[7, 8, 9, 10]], [[NO_PAGE, 11, 12, 13]]]
    pages.check(8, 16)  # the token at 8 looks back to 4
    for start, end in ((7, 16), (8, 17)):
        with pytest.raises(MissingPageError, match="pages"):
            pages.check(start, end)


class Afar(MemoryStore):
    """A remote store that answers when ``go_on`` is set."""

    remote = True

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.asked = threading.Event(), threading.Event()

    def contains(self, key: KVKey) -> bool:
        self.asked.set()
        assert self.go_on.wait(30)
        return super().contains(key)


def test_steps_continue_during_a_look_up_in_a_remote_store() -> None:
    store = Afar()
    scheduler = Scheduler(blocks=200, store=store)
    request = scheduler.blend()
    assert scheduler.admit(request) is None, "to be asked for again in the next step"
    assert store.asked.wait(30)
    assert scheduler.admit(request) is None
    store.go_on.set()
    tracked = scheduler.side._tracked[request.request_id]
    tracked.looking.result(30)
    assert scheduler.admit(request) == 20 + len(CHUNK)
    scheduler.side.close()
