"""Queues the blends of one worker and runs the blends between engine steps, as far as each step allows."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from cacheblend_rag.blending.costs import Computed
from cacheblend_rag.blending.fusor import Awaited, FuseResult, Segment, fuse_stepwise
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.plan import BlendPlan
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.engines.entries import Entries, SideBySide
from cacheblend_rag.engines.vllm.messages import BlendJob, LoadOrder, Save, SaveJob, WorkerMeta
from cacheblend_rag.engines.vllm.pace import Allowance, StepClock, Stopwatch
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import Pages
from cacheblend_rag.engines.vllm.target import PagedTarget, all_ranks
from cacheblend_rag.engines.writer import Writing
from cacheblend_rag.store.events import TierReads, added
from cacheblend_rag.store.kv import StoredKV, WrittenBy

_log = logging.getLogger(__name__)
_Steps = Generator[Segment, int | None, None]
_LOADING = 4
"""Most blends whose stored KV is loaded into host memory at the same time, while other requests stream."""


@dataclass(frozen=True)
class ChunkWriter:
    """Holds a KV writer: the context ``writing``, which applies the writer, and ``save``, which stores chunks' KV."""

    writing: Writing
    save: Callable[[Sequence[Save]], None]


class BlendQueue:
    """Runs blends in the order of their arrival, and reports each ended blend once."""

    def __init__(self, entries: Entries):
        """Blend with the KV of ``entries``, once :meth:`bind` has set the model."""
        self._entries = entries
        self._writer: ChunkWriter | None = None
        self._model: tuple[PagedModel, Rope] | None = None
        self.clock = StepClock(torch.device("cpu"))
        self._waiting: deque[_Blend] = deque()
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._results = WorkerMeta()
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-finish")

    def bind(self, paged: PagedModel, rope: Rope, clock: StepClock, writer: ChunkWriter | None = None) -> None:
        """Set the model, once it has passed the parity gate; ``writer`` is the KV writer that computes chunks, if any."""
        self._model, self.clock, self._writer = (paged, rope), clock, writer

    def add(self, load: LoadOrder) -> None:
        """Append a blend to the queue; refuse a KV writer's job if there is no KV writer."""
        assert self._model is not None
        given = load, *self._model, self._entries, self.clock
        if isinstance(load.job, BlendJob):
            self._waiting.append(_Blend(*given))
        elif self._writer is not None:
            self._waiting.append(_Written(*given, self._writer))
        else:
            self.refuse(load.request_id, "this server has no KV writer")

    def advance(self, allowance: Allowance | None, held: Collection[str] = ()) -> None:
        """Advance the blends of requests not in ``held``, within ``allowance``; if None, until one blend is complete.

        While other requests stream, blends that wait for stored KV are skipped; at most ``_LOADING`` blends wait.
        """
        loading = 0
        for blend in [each for each in self._waiting if each.load.request_id not in held]:
            try:
                complete = blend.advance(allowance)
            except Exception as error:
                # No error may end the engine: vLLM prefills this prompt like any other.
                _log.exception("The blend of request %s failed", blend.load.request_id)
                self._drop(blend)
                self.refuse(blend.load.request_id, f"the blend failed ({type(error).__name__}: {error})")
                continue
            if not complete:
                loading += blend.loading
                if blend.loading and loading < _LOADING:
                    continue
                return
            self._drop(blend)
            assert blend.result is not None
            self._results.done[blend.load.request_id] = blend.result
            if blend.trace is not None:
                self._results.traces[blend.load.request_id] = blend.trace.events()
            self._ended.add(blend.load.request_id)
            if allowance is None:
                return

    def refuse(self, request_id: str, reason: str) -> None:
        """Report a request as not blended, and why."""
        self._results.failed[request_id] = reason
        self._ended.add(request_id)
        self._failed.add(request_id)

    def abort(self, request_ids: set[str]) -> None:
        """End the blends of aborted requests at once: vLLM frees a request's blocks only when its blend has ended."""
        for blend in [b for b in self._waiting if b.load.request_id in request_ids]:
            self._drop(blend)
            self._ended.add(blend.load.request_id)

    def _drop(self, blend: _Blend) -> None:
        """Remove a blend, and finish its entries in a thread, so that no step waits for the tiers' reads and writes."""
        self._waiting.remove(blend)
        for kv in blend.close():
            self._finisher.submit(kv.finish)

    def close(self) -> None:
        """Wait until the entries of removed blends are finished."""
        self._finisher.shutdown(wait=True)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blends ended since the last call, and the requests whose blends failed."""
        ended, failed = self._ended, self._failed
        self._ended, self._failed = set(), set()
        return ended, failed

    def take_results(self) -> WorkerMeta:
        """Return the results of blends that ended since the last call, and the time that work took."""
        results, self._results = self._results, WorkerMeta()
        results.times, results.computed = self.clock.take(), self.clock.take_computed()
        return results


class _Blend:
    """Runs one request's blend, segment by segment."""

    def __init__(self, load: LoadOrder, paged: PagedModel, rope: Rope, entries: Entries, clock: StepClock):
        self.load = load
        self._filled: PagedTarget | None = None
        self._paged, self._rope, self._clock = paged, rope, clock
        job = load.job
        self._entries = entries.within(job.namespace)
        self.result: PromptOutcome | None = None
        self._begin, self._watch = time.perf_counter(), Stopwatch()
        self.trace = Trace() if isinstance(job, BlendJob) and job.trace else None
        self._spans: list[StoredKV] = []
        self._unusable: set[tuple[int, ...]] = set()
        self._late: set[tuple[int, ...]] = set()
        self._reads: Mapping[str, TierReads] = {}
        self._waited_s = 0.0
        self._streams = False
        self._steps: _Steps = self._run()
        self._ahead: Segment | None = None

    @property
    def loading(self) -> bool:
        """Return whether the blend waits for its stored KV, while other requests stream."""
        return self._ahead is not None and self._ahead.kind == "load"

    def advance(self, allowance: Allowance | None) -> bool:
        """Run segments within ``allowance``, or all segments if None; return whether the blend is complete."""
        with torch.inference_mode():
            self._streams = allowance is not None
            if self._ahead is None and not self._go_on(None):
                return True
            while True:
                ahead = self._ahead
                assert ahead is not None
                if ahead.awaited is not None:
                    # Waiting for stored KV would delay the tokens of streaming requests.
                    if allowance is not None and not all_ranks(ahead.awaited.ready):
                        if (late := self._late_in(ahead.awaited)) is None:
                            return False
                        self._ahead = self._steps.throw(late)
                        continue
                    most = None
                elif ahead.kind == "fetch":
                    # Waiting for the device would delay streaming requests; the measurement arrives by the next step.
                    waits = allowance is not None and self._paged.device.type != "cpu" and not ahead.done
                    ahead.done = 1
                    if waits:
                        return False
                    most = None
                elif allowance is None:
                    most = None
                elif not (most := allowance.tokens(ahead.kind, ahead.share)):
                    return False
                begin = self._clock.mark()
                more = self._go_on(most)
                if ahead.kind not in ("fetch", "load"):
                    self._clock.add(ahead.kind, ahead.done * ahead.share, begin, self._watch)
                    self._capture()
                    if allowance is not None:
                        allowance.spend(ahead.kind, ahead.share, ahead.done)
                if not more:
                    return True

    def _capture(self) -> None:
        """Capture the last pass if a capture is due, untimed, while the pages still hold the KV that the pass read."""
        if self._filled is not None and self._filled.due is not None:
            due, self._filled.due = self._filled.due, None
            due()

    def _late_in(self, awaited: Awaited) -> UnusableSpanError | None:
        """Return the error to throw into the blend if stored KV is late on any rank, else None."""
        late = awaited.too_late() if isinstance(awaited, LayerLoader) and awaited.overdue else None
        return None if all_ranks(late is None) else late or UnusableSpanError(late=True)

    def _go_on(self, most: int | None) -> bool:
        """Run the announced segment until the next segment is announced; return whether there is a next segment."""
        try:
            self._ahead = next(self._steps) if self._ahead is None else self._steps.send(most)
        except StopIteration:
            return False
        return True

    def close(self) -> list[StoredKV]:
        """End the passes; return the stored KV, which the caller must finish."""
        self._steps.close()
        return self._spans

    def _run(self) -> _Steps:
        while True:
            plan, self._watch = (yield from self._plan()), Stopwatch()
            try:
                result = yield from self._fuse(plan)
            except UnusableSpanError as error:
                # The next plan treats the entries as missing and computes their chunks in place.
                (self._late if error.late else self._unusable).update(error.entries)
                self._reads = added(self._reads, error.reads)
                self._waited_s += error.waited_s
                continue
            load, done = self.load, result.outcome
            tokens = done.usage.computed_tokens + done.usage.selection_tokens
            placed = plan.within(load.start, load.end).stored_tokens
            work = Computed(tokens, len(load.token_ids), 0.0, placed, result.passes, result.watched)
            self._clock.complete(self._watch, work, done.load_s)
            self.result = replace(
                done,
                load_s=self._waited_s + done.load_s,
                blend_s=time.perf_counter() - self._begin,
                reads=added(self._reads, done.reads),
            )
            return

    def _fuse(self, plan: BlendPlan) -> Generator[Segment, int | None, FuseResult]:
        load = self.load
        assert isinstance(load.job, BlendJob)
        most_wait_s = None if load.choice is None else load.choice.most_wait_s
        part = plan.within(load.start, load.end, load.start_exact)
        part = replace(part, behind=max(0, part.behind - load.job.unasked))
        return fuse_stepwise(
            part, self._target(), load.options, trace=self.trace, most_wait_s=most_wait_s, whole=self._streams
        )

    def _target(self) -> BlendTarget:
        self._filled = PagedTarget(self._paged, self._rope, self.load.token_ids, self._pages())
        return self._filled

    def _pages(self) -> Pages:
        load = self.load
        pages = Pages(self._paged, load.pages, len(load.token_ids))
        pages.check(load.start, load.end)
        return pages

    def _plan(self) -> Generator[Segment, int | None, BlendPlan]:
        job = self.load.job
        assert isinstance(job, BlendJob)
        entries = self._entries

        def get(source: Entries, token_ids: Sequence[int]) -> StoredKV | None:
            return source.get(token_ids, self._paged.num_layers, self._paged.kv_heads)

        prompt = job.prompt(self.load.token_ids)
        unusable = self._unusable | self._late
        wanted = [each for each in entries.wanted(prompt) if each[1] not in unusable]
        look = SideBySide(get, wanted, entries.store.remote)
        if entries.store.remote:
            yield Segment("load", awaited=look)

        found: dict[tuple[WrittenBy | None, tuple[int, ...]], StoredKV | None] = {}

        def lookup(source: Entries, token_ids: Sequence[int]) -> StoredKV | None:
            asked = source.writer, tuple(token_ids)
            if asked not in found:
                kv = None
                try:
                    if asked[1] not in unusable:
                        kv = look(source, token_ids)
                except Exception:  # not raised, since the other ranks wait for this rank's vote
                    _log.exception("Stored KV cannot be looked up; its chunk is computed in place")
                if kv is not None:
                    self._spans.append(kv)
                found[asked] = kv
            return found[asked]

        def agreed(source: Entries, token_ids: Sequence[int]) -> StoredKV | None:
            kv = lookup(source, token_ids)
            return kv if all_ranks(kv is not None) else None

        plan = entries.plan(prompt, lookup, job.options.reuse)
        if not all_ranks(all(kv is not None and kv.exact for kv in found.values())):  # ranks might plan differently
            plan = entries.plan(prompt, agreed, job.options.reuse, agree=all_ranks)
        plan = plan.after_late(self._late)
        return plan if self.load.choice is None else self.load.choice.applied_to(plan)


class _Written(_Blend):
    """Computes one chunk's KV with the KV writer and saves the KV; no stored KV is used."""

    def __init__(
        self, load: LoadOrder, paged: PagedModel, rope: Rope, entries: Entries, clock: StepClock, writer: ChunkWriter
    ):
        super().__init__(load, paged, rope, entries, clock)
        self._writer = writer

    def _run(self) -> _Steps:
        load, job, pages = self.load, self.load.job, self._pages()
        assert isinstance(job, SaveJob)
        ids, rest = torch.tensor(load.token_ids), torch.arange(load.start, load.end)
        while len(rest):
            ahead = Segment("sparse", len(rest), 1.0)
            most = yield ahead
            part = self._paged.segment(rest, most)
            with self._writer.writing:
                self._paged.forward(ids[part], part, pages, lambda _: None, compiled=False)
            ahead.done, rest = len(part), rest[len(part) :]
        whole = load.token_ids[: job.written]
        if job.start < job.written:
            self._writer.save([Save(load.request_id, whole, load.pages, job.start, job.written, job)])
        self.result = BlendPlan(len(whole), (), (), "written by the KV writer").outcome(load.end - load.start)
