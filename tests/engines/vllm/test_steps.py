"""Tests of blends between engine steps, in the order of calls of either model runner."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.engines.vllm import connector
from cacheblend_rag.engines.vllm.messages import SaveJob, StepMeta, WorkerMeta
from cacheblend_rag.engines.vllm.pace import Stopwatch
from cacheblend_rag.store import MemoryStore, TieredStore
from tests.engines.vllm.stepping import CHUNK_END, Engine, RunnerV1, RunnerV2

Start = Callable[..., Engine]


@pytest.fixture(params=[RunnerV1, RunnerV2])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(request.param, monkeypatch)


def admitted(engine: Engine, name: str = "a") -> Any:
    request = engine.request(name)
    external, between_steps = engine.admit(request)
    assert (external, between_steps) == (CHUNK_END, True)
    engine.allocate(request, external)
    return request


def test_a_blend_does_not_delay_sampling_and_is_reported_with_its_step(engine: Engine) -> None:
    request = admitted(engine)
    first = engine.step(tokens=5)
    assert engine.events == ["forward", ("save", 0), "sample", ("blend", "streams"), "out"] or engine.events == [
        "forward",
        "sample",
        ("save", 0),
        ("blend", "streams"),
        "out",
    ]
    assert not first.finished_recving
    engine.events.clear()
    second = engine.step(tokens=5)
    assert engine.events.index("sample") < engine.events.index(("blend", "streams")) < engine.events.index("out")
    assert second.finished_recving == {"a"}
    assert not second.failed_recving
    assert engine.finish(request)["recomputed_tokens"] == 1


def test_a_blend_beside_streams_gets_the_step_size_of_a_prefill(engine: Engine) -> None:
    steps = engine.config.scheduler_config
    for threshold, tokens in ((0, steps.max_num_batched_tokens), (96, 96)):
        steps.long_prefill_token_threshold = threshold
        worker = engine.connector(engine.config, KVConnectorRole.WORKER).worker
        allowed = list[Any]()
        worker._blends = SimpleNamespace(advance=lambda allowance, _, into=allowed: into.append(allowance))
        worker._step = StepMeta()
        worker.blend()
        assert allowed[0].tokens("prefill", 1.0) == tokens


def test_a_held_blend_waits_and_a_blend_of_shared_steps_is_never_done_in_one_step(
    engine: Engine,
) -> None:
    admitted(engine)
    side = engine._scheduler.scheduler
    side.shared, side.held = True, {"default"}
    engine.step(tokens=0)
    assert not [event for event in engine.events if event[0] == "blend"]
    side.held = set()
    engine.step(tokens=0)
    assert ("blend", "streams") in engine.events
    assert ("blend", "idle") not in engine.events


def test_a_blend_is_done_in_one_step_if_the_step_computes_no_tokens(engine: Engine) -> None:
    admitted(engine)
    report = engine.step(tokens=0)
    assert ("blend", "idle") in engine.events
    assert report.finished_recving == {"a"}
    assert "forward" not in engine.events


def test_a_step_with_scheduled_tokens_is_not_idle_without_a_forward_context(engine: Engine) -> None:
    admitted(engine)
    engine.step(tokens=3)
    assert ("blend", "idle") not in engine.events


def test_an_empty_step_reports_nothing_and_does_not_change_vllms_shared_output(engine: Engine) -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    engine.step(tokens=0)
    admitted(engine)
    engine.step(tokens=0)
    report = engine.step(tokens=0)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None
    assert report is None or not report.finished_recving


def test_an_aborted_requests_blend_ends_at_the_next_step_and_frees_its_blocks(engine: Engine) -> None:
    request = admitted(engine)
    engine.step(tokens=5)
    engine.finish(request)
    engine.events.clear()
    report = engine.step(tokens=5, finished=("a",))
    assert report.finished_recving == {"a"}
    assert ("closed", "a") in engine.events
    assert ("blend", "streams") not in engine.events


def test_a_request_that_ends_before_its_step_is_not_blended(engine: Engine) -> None:
    engine.finish(admitted(engine))
    engine.step(tokens=0)
    assert ("blend", "idle") not in engine.events


def test_a_preempted_request_is_blended_again(engine: Engine) -> None:
    request = admitted(engine)
    engine.step(tokens=0)
    engine.events.clear()
    # vLLM has freed the request's blocks and looks for tokens again.
    external, _ = engine.admit(request)
    engine.allocate(request, external)
    report = engine.step(tokens=0)
    assert engine.events.count(("blend", "idle")) == 1
    assert report.finished_recving == {"a"}


def test_blocks_may_be_allocated_steps_after_the_tokens_were_matched(engine: Engine) -> None:
    request = engine.request("a")
    external, _ = engine.admit(request)
    engine.step(tokens=5)
    assert ("blend", "streams") not in engine.events
    engine.allocate(request, external)
    assert engine.step(tokens=0).finished_recving == {"a"}


def test_a_failed_blend_is_reported_as_failed_and_is_not_repeated(engine: Engine) -> None:
    request = admitted(engine, "broken")
    report = engine.step(tokens=5)
    assert report.finished_recving == report.failed_recving == {"broken"}
    assert engine.admit(request) == (0, False)
    assert "out of memory" in engine.finish(request)["reason"]


def test_a_model_that_is_not_blended_refuses_every_blend(engine: Engine) -> None:
    engine.worker.worker.gate = GateReport(False, "its layers are unknown")
    request = admitted(engine)
    report = engine.step(tokens=5)
    assert report.finished_recving == report.failed_recving == {"a"}
    assert not engine.step(tokens=5).finished_recving
    assert "not blended" in engine.finish(request)["reason"]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_complete_prompt_is_saved_once_with_and_without_deferred_saves(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    monkeypatch.setattr(RunnerV2, "deferred", deferred)
    engine = Engine(RunnerV2, monkeypatch)
    request = engine.request("p", SaveJob(0))
    engine.admit(request)
    engine.allocate(request, 0)
    engine.step(tokens=40, new=(request,))
    assert [event for event in engine.events if event[0] == "save"] == [("save", 1)]
    engine.step(tokens=1)
    assert ("save", 1) not in engine.events[-4:]


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
def test_blends_advance_even_if_vllm_does_not_step_through_the_worker(
    runner: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(runner, monkeypatch, through_worker=False)
    admitted(engine)
    assert not engine.step(tokens=5).finished_recving
    assert engine.step(tokens=5).finished_recving == {"a"}


def test_a_steps_earlier_results_stay_in_its_report(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = ({"mine"}, {"mine, failed"}), ({"theirs"}, {"theirs, failed"})
    results = WorkerMeta({}, {}, {}, {}, {}, {"mine": 1})
    monkeypatch.setattr(engine.worker.worker, "take_finished", lambda _: ours)
    monkeypatch.setattr(engine.worker.worker, "take_results", lambda: results)
    report = KVConnectorOutput(
        finished_recving=theirs[0],
        failed_recving=theirs[1],
        kv_connector_worker_meta=WorkerMeta({}, {}, {}, {}, {}, {"theirs": 2}),
    )
    engine.worker.step_ended(ModelRunnerOutput([], {}, kv_connector_output=report))
    assert (report.finished_recving, report.failed_recving) == (ours[0] | theirs[0], ours[1] | theirs[1])
    assert report.kv_connector_worker_meta.held == {"mine": 1, "theirs": 2}


def test_each_ranks_store_is_opened_with_the_number_of_ranks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr(connector, "open_store", lambda *_, **how: opened.update(how) or TieredStore([MemoryStore()]))
    engine.config.parallel_config.tensor_parallel_size = 3
    engine.connector(engine.config, KVConnectorRole.WORKER)
    assert opened["processes"] == 3


def test_all_ranks_get_the_same_measured_pace(engine: Engine) -> None:
    engine.worker.worker._blends.clock._sum("prefill", 1000, 2.0, Stopwatch())
    engine.step(tokens=5)
    engine.step(tokens=5)
    assert engine.worker.worker._step.pace == {"prefill": pytest.approx(0.002)}
