"""Tests that tenants share vLLM's steps, in its own scheduler under the fair one; the model is a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.models import model_directory
from cacheblend_rag.engines.vllm import connector, fairness
from cacheblend_rag.engines.vllm.arguments import _connect
from cacheblend_rag.engines.vllm.fairness import PATIENCE, fair_scheduler
from cacheblend_rag.engines.vllm.messages import BlendJob, to_params
from cacheblend_rag.store import MemoryStore, TieredStore
from cacheblend_rag.store.files import Namespace

CUT, BLOCK = 64, 16
LOUD, QUIET = Namespace("loud"), Namespace("quiet")


class Steps:
    """vLLM's scheduler with a model whose every token is 7."""

    def __init__(self, fair: bool = True, blocks: int = 200, cut: int = CUT, asynchronous: bool = False):
        scheduling = SchedulerConfig.default_factory(
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            long_prefill_token_threshold=cut,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
        )
        config = VllmConfig(
            scheduler_config=scheduling,
            model_config=ModelConfig(model=str(model_directory(None)), dtype="float32", skip_tokenizer_init=True),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(**_connect(store="/nowhere", fingerprint="0" * 32, header_ids=[])),
            device_config=DeviceConfig(device="cpu"),
        )
        config.scheduler_config.async_scheduling = asynchronous  # vLLM turns this off on a CPU
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        make: Callable[..., Any] = fair_scheduler if fair else config.scheduler_config.get_scheduler_cls()
        self.scheduler = make(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._under_way: list[Any] = []
        self.depth = 2 if asynchronous else 1
        self.said: dict[str, list[int]] = {}

    def ask(self, name: str, whose: Namespace, prompt: int, answer: int = 4, blend: bool = False) -> None:
        """Add a request; most of its prompt is stored if it is a ``blend``."""
        job = BlendJob(((0, prompt - 10, "chunk"),), FuseOptions(policy("hkvd"), 0.15), namespace=whose)
        sampling = SamplingParams(
            max_tokens=answer, ignore_eos=True, extra_args={"kv_transfer_params": to_params(job)} if blend else None
        )
        ids = [100 + sum(map(ord, name)) % 1000] * prompt
        request = Request(name, ids, sampling, None, cache_salt=whose.salt(), block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def step(self) -> dict[str, int]:
        """Do one step; return how many tokens of each request are in it."""
        output = self.scheduler.schedule()
        self._under_way.append(output)
        if len(self._under_way) == self.depth:
            self.end()
        return dict(output.num_scheduled_tokens)

    def end(self) -> None:
        """Take the model's output of the oldest step under way."""
        output = self._under_way.pop(0)
        names = list(output.num_scheduled_tokens)
        new = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        new.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            whole = request is None or new[name] + output.num_scheduled_tokens[name] >= request.num_tokens
            sampled.append([7] if whole else [])
        result = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self.said.setdefault(each.request_id, []).extend(each.new_token_ids)

    def until(self, done: Callable[[], bool], most: int = 300) -> list[dict[str, int]]:
        """Step until ``done`` is true; return the steps."""
        steps = list[dict[str, int]]()
        while not done():
            assert len(steps) < most
            steps.append(self.step())
        return steps


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "open_store", lambda *_, **__: TieredStore([MemoryStore()]))
    monkeypatch.setattr(connector.Entries, "contains", lambda *_: True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_prompt_waits_for_another_tenants_short_answer(asynchronous: bool) -> None:
    steps = Steps(asynchronous=asynchronous)
    steps.ask("long", LOUD, 500)
    steps.step()
    steps.ask("short", QUIET, 6)
    seen = steps.until(lambda: len(steps.said.get("short", ())) == 4)
    assert [set(step) for step in seen[:4]] == [{"short"}] * 4
    assert sum(seen[at].get("long", 0) for at in range(4)) == 0
    steps.until(lambda: len(steps.said.get("long", ())) == 4)


def test_a_prompt_waits_for_a_limited_number_of_steps() -> None:
    steps = Steps()
    steps.ask("long", LOUD, 400)
    steps.step()
    steps.ask("stream", QUIET, 6, answer=900)
    seen = steps.until(lambda: "long" in steps.said)
    without = [not step.get("long") for step in seen]
    assert max(sum(without[at : at + PATIENCE + 1]) for at in range(len(without) - PATIENCE)) == PATIENCE
    assert all(step.get("stream") for step in seen), "answers that have begun are never held back"


def test_a_prompt_held_back_for_a_loading_blend_continues_soon() -> None:
    steps = Steps()
    steps.ask("long", LOUD, 400)
    steps.step()
    steps.ask("blend", QUIET, 40, blend=True)
    steps.until(lambda: "long" in steps.said, most=12 * (PATIENCE + 1))
    assert steps.scheduler.requests["blend"].status == RequestStatus.WAITING_FOR_REMOTE_KVS


def test_the_tenant_that_has_computed_less_is_served_first() -> None:
    steps = Steps()
    for number in range(50):
        steps.ask(f"loud {number}", LOUD, 300)
    steps.step()
    steps.ask("short", QUIET, 6)
    assert set(steps.step()) == {"short"}


def test_prompts_get_small_steps_while_two_tenants_are_active_and_large_steps_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(fairness.time, "monotonic", lambda: now[0])
    steps = Steps()
    steps.ask("first", LOUD, 600)
    assert steps.step() == {"first": 4 * CUT}
    steps.ask("second", QUIET, 6, answer=1)
    assert steps.step() == {"second": 6}
    assert steps.step() == {"first": CUT // 4}
    steps.ask("another", LOUD, 400)
    assert sum(steps.step().values()) == CUT // 4, "of all prompts together"
    now[0] += fairness.LATELY_S + 1
    assert steps.step()["first"] > CUT // 4


def test_many_prompts_do_not_delay_answers_that_have_begun() -> None:
    steps = Steps()
    steps.ask("other", QUIET, 6, answer=1)
    for number in range(4):
        steps.ask(f"loud {number}", LOUD, 600 if number else 20)
    steps.ask("short", LOUD, 4, answer=40)
    steps.until(lambda: "short" in steps.said)
    for number in range(4):
        steps.ask(f"quiet {number}", QUIET, 600)
    seen = steps.until(lambda: len(steps.said["short"]) == 40)
    assert all(step["short"] == 1 for step in seen)
    assert sum(sum(step.values()) for step in seen) >= len(seen) * CUT // 4


def test_a_single_tenant_gets_the_steps_and_tokens_of_vllms_own_scheduler() -> None:
    runs = []
    for fair in (True, False):
        steps = Steps(fair, cut=0)
        for number in range(6):
            steps.ask(f"{number}", LOUD, 90 + 70 * number, answer=3 + number)
        runs.append((steps.until(lambda: not steps.scheduler.requests), steps.said))  # noqa: B023
    assert runs[0] == runs[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tenants_share_a_full_cache_by_preemption_and_every_request_ends(asynchronous: bool) -> None:
    steps = Steps(blocks=40, asynchronous=asynchronous)
    for number in range(4):
        steps.ask(f"loud {number}", LOUD, 200, answer=60)
        steps.ask(f"quiet {number}", QUIET, 40, answer=60)
        steps.step()
    steps.until(lambda: not steps.scheduler.requests, most=2000)
    assert {name: len(ids) for name, ids in steps.said.items()} == dict.fromkeys(
        [f"{who} {number}" for who in ("loud", "quiet") for number in range(4)], 60
    )


def test_a_request_aborted_while_it_is_held_back_frees_its_blocks() -> None:
    steps = Steps()
    steps.ask("long", LOUD, 500)
    steps.step()
    steps.ask("waiting", LOUD, 500)
    steps.ask("short", QUIET, 6, answer=20)
    assert set(steps.step()) == {"short"}
    steps.scheduler.finish_requests(["long", "waiting"], RequestStatus.FINISHED_ABORTED)
    steps.until(lambda: not steps.scheduler.requests)
    assert not steps.scheduler.running and not steps.scheduler.waiting
    assert steps.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 199  # vLLM keeps one


def test_a_returning_tenant_has_saved_up_no_priority() -> None:
    steps = Steps()
    steps.ask("long", LOUD, 1000)
    for _ in range(3):
        steps.step()
    steps.ask("longer", LOUD, 1000)
    steps.ask("early", QUIET, 600)
    seen = steps.until(lambda: "early" in steps.said)
    assert sum(step.get("long", 0) + step.get("longer", 0) for step in seen) > 300


def test_blends_are_held_back_as_prompts_are() -> None:
    steps = Steps()
    steps.ask("blend", LOUD, 40, blend=True)
    alone = steps.scheduler.schedule()
    assert (alone.kv_connector_metadata.idle, alone.kv_connector_metadata.held) == (True, set())
    steps._under_way.append(alone)
    steps.end()
    steps.ask("short", QUIET, 6)
    beside = steps.scheduler.schedule()
    assert (beside.kv_connector_metadata.idle, beside.kv_connector_metadata.held) == (False, {"blend"})
