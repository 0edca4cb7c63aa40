"""Tests of blends whose stored KV is loading: they do not hold up streams, and late chunks are computed in place.

The queue is the worker's, with a transformers model, so that no vLLM runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.controller import Choice
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.engines.vllm import blends
from cacheblend_rag.engines.vllm.blends import BlendQueue
from cacheblend_rag.engines.vllm.messages import BlendJob, LoadOrder
from cacheblend_rag.engines.vllm.pace import Allowance, StepClock
from tests.blending import reference
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import model_of
from tests.store.held_up import HeldUpStore

SCENES = Scene(), Scene(seed=1)
RATIO = 0.3
LONG = 3600.0


class Worker:
    """A worker's queue over a store that holds up some entries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.store, self.targets = HeldUpStore(), {}
        self.engine = engine_for(model_of("llama"), SCENES[0], store=self.store)
        for scene in SCENES:
            scene.header = SCENES[0].header
            self.engine.precompute(scene.chunks)
        worker = self

        class Blend(blends._Blend):
            def _target(self) -> Any:
                filled = self.load.token_ids[: self.load.end]
                made = TransformersTarget(worker.engine.runner, worker.engine.rope, filled)
                worker.targets[self.load.request_id] = made
                return made

        monkeypatch.setattr(blends, "_Blend", Blend)
        monkeypatch.setattr(blends, "all_ranks", lambda ok: ok)
        self.engine.runner.kv_heads = 0
        clock = StepClock(torch.device("cpu"))
        self.queue = BlendQueue(self.engine.entries)
        self.queue.bind(self.engine.runner, self.engine.rope, clock)
        self.ended: set[str] = set()

    def hold_up(self, scene: Scene, *chunks: int) -> None:
        self.store.far |= {self.engine.entries.own_key(scene.chunks[number].token_ids) for number in chunks}

    def add(self, name: str, scene: Scene, most_wait_s: float | None = None, reuse: Any = "chunks") -> None:
        spans = tuple((span.start, span.end, span.chunk.id) for span in scene.prompt.spans)
        job = BlendJob(spans, FuseOptions(policy("hkvd"), RATIO, reuse=reuse))
        ids = scene.prompt.token_ids
        choice = None if most_wait_s is None else Choice(frozenset(), RATIO, "", 1.0, most_wait_s)
        self.queue.add(LoadOrder(name, ids, 0, scene.prompt.spans[-1].end, (), job, choice))

    def step(self, streams: bool = True) -> None:
        """Advance the blends by one step of the worker."""
        self.queue.advance(Allowance({}, 1e6) if streams else None)
        ended, failed = self.queue.take_ended()
        assert not failed
        self.ended |= ended

    def steps_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(10**6):
            if condition():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def results(self) -> dict[str, Any]:
        return self.queue.take_results().done

    def agrees(self, name: str, scene: Scene, missing: tuple[int, ...] = ()) -> None:
        """Assert that the model's logits behind the blend equal those behind the reference's blend."""
        want = reference.blend(model_of("llama"), scene.header, scene.parts(missing), RATIO)
        rest = torch.tensor([scene.prompt.token_ids[scene.prompt.spans[-1].end :]])
        got = self.engine.runner.append(rest, self.targets[name].cache)[0]
        assert (got - want.logits).abs().max() < 1e-4


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(monkeypatch)
    yield made
    made.store.go_on.set()
    made.queue.close()


@pytest.mark.parametrize("most_wait_s", [None, LONG])
def test_a_loading_blend_holds_up_neither_streams_nor_other_blends(worker: Worker, most_wait_s: float | None) -> None:
    far, near = SCENES
    worker.hold_up(far, 1, 2)
    worker.add("far", far, most_wait_s)
    worker.add("near", near)
    worker.step()  # returns although no entry can be read
    assert worker.ended == {"near"}
    worker.agrees("near", near)
    worker.step()
    assert worker.ended == {"near"}
    worker.store.go_on.set()
    worker.steps_until(lambda: "far" in worker.ended)
    worker.agrees("far", far)
    result = worker.results()["far"]
    assert (result.missing, result.in_place, result.reason) == ((), (), "stored KV for 4 of 4 chunks")
    assert {load.tier for load in result.loads} == {"ram", "far"}


def test_late_chunks_are_computed_in_place_while_streams_run(worker: Worker) -> None:
    far, _ = SCENES
    worker.hold_up(far, 1, 2)
    worker.add("far", far, most_wait_s=0.0)
    worker.steps_until(lambda: "far" in worker.ended)
    worker.agrees("far", far, missing=(1, 2))
    result = worker.results()["far"]
    assert result.in_place == tuple(far.chunks[number].id for number in (1, 2))
    assert result.missing == ()
    assert "2 of them too late" in result.reason
    assert result.load_s > 0


def test_late_chunks_are_computed_in_place_without_streams(worker: Worker) -> None:
    far, _ = SCENES
    worker.hold_up(far, 3)
    worker.add("far", far, most_wait_s=0.0)
    worker.step(streams=False)
    assert worker.ended == {"far"}
    worker.agrees("far", far, missing=(3,))
    assert worker.results()["far"].in_place == (far.chunks[3].id,)


def test_chunks_that_are_late_on_another_rank_are_computed_in_place_on_this_rank(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk 1 is missing on the other rank when the first plan loads; both ranks vote in one order."""
    scene = SCENES[0]
    chunks = 1 + len(scene.chunks)
    others = iter([True, False, False, False, *[number != 2 for number in range(chunks)]])
    monkeypatch.setattr(blends, "all_ranks", lambda ok: next(others, True) and ok)
    worker.add("here", scene, LONG)
    worker.steps_until(lambda: "here" in worker.ended)
    worker.agrees("here", scene, missing=(1,))


def test_kv_that_is_inexact_on_another_rank_is_not_reused_as_exact_on_this_rank(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has header and first chunk in int8; ranks that used different KV would wait for each other."""
    others = iter([False, True, True, False])
    monkeypatch.setattr(blends, "all_ranks", lambda ok: next(others, True) and ok)
    worker.add("here", SCENES[0], reuse="prefix")
    worker.step(streams=False)
    result = worker.results()["here"]
    assert (result.mode, result.usage.reused_tokens) == ("prefill", 0)
    assert "int8, which is not exact" in result.reason


def test_ranks_vote_once_on_a_prompt_if_they_have_all_its_kv(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    votes: list[bool] = []
    monkeypatch.setattr(blends, "all_ranks", lambda ok: votes.append(ok) or ok)
    worker.add("here", SCENES[0])
    worker.step(streams=False)
    assert worker.ended == {"here"}
    assert votes == [True]


def test_a_blend_aborted_while_its_kv_loads_ends_at_once(worker: Worker) -> None:
    worker.hold_up(SCENES[0], 1)
    worker.add("far", SCENES[0])
    worker.step()
    worker.queue.abort({"far"})
    worker.step()
    assert worker.ended == {"far"}


def test_the_number_of_loading_blends_is_limited(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blends, "_LOADING", 2)
    worker.hold_up(SCENES[0], 1)
    for number in range(4):
        worker.add(f"{number}", SCENES[0])
    worker.step()
    assert [blend.loading for blend in worker.queue._waiting] == [True, True, False, False]
    worker.store.go_on.set()
    worker.steps_until(lambda: len(worker.ended) == 4)
