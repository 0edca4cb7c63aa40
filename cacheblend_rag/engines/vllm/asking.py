"""Calls methods of vLLM's workers, builds vLLM's sampling parameters, and has vLLM precompute the KV of chunks."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams as VLLMSampling
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.precompute import plan_precompute, report_of
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.engines.sampling import REPEATED, SamplingParams
from cacheblend_rag.engines.vllm.messages import BUSY, PARAMS, SaveJob, receipt, to_params
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput

    from cacheblend_rag.engines.vllm.arguments import Launch

_LOOK_S = 0.5


async def ask_workers(llm: EngineClient, method: str) -> list[Any]:
    """Call a method of :class:`~cacheblend_rag.engines.vllm.worker.BlendWorker` on each rank; return all results.

    In vLLM itself a call waits for ever if the engine dies before it answers; this function raises.

    Raises:
        EngineDeadError: vLLM's engine has died.
    """
    asked = asyncio.ensure_future(_of_each_engine(llm, method))
    try:
        while not asked.done():
            await asyncio.wait({asked}, timeout=_LOOK_S)
            if llm.errored and not asked.done():
                raise llm.dead_error
        return asked.result()
    finally:
        asked.cancel()


async def _of_each_engine(llm: EngineClient, method: str) -> list[Any]:
    core: Any = getattr(llm, "engine_core", None)
    if len(getattr(core, "core_engines", ())) < 2:
        return list(await llm.collective_rpc(method))
    # With data parallelism vLLM's collective_rpc calls all engines, but returns the results of the first engine alone.
    answers = await core.call_utility_all_async("collective_rpc", method, None, (), None)
    return [rank for engine in answers for rank in engine]


async def ask_gate(llm: EngineClient, launch: Launch) -> GateReport:
    """Return the gate's report from the first worker; warn if the model failed the gate and is not blended.

    Raises:
        EngineDeadError: vLLM's engine has died meanwhile.
        InputError: The model failed the gate, and there is a KV writer.
    """
    gate = GateReport(**(await ask_workers(llm, "cacheblend_gate"))[0])
    if not gate.passed and launch.writer is not None:
        raise InputError(
            f"{launch.fingerprint.name} is not blended with a KV writer: {gate.reason}. Leave the writer out (--writer none)."
        )
    if not gate.passed:
        served = "is served by ordinary prefill, without blending"
        warnings.warn(f"{launch.fingerprint.name} {served}: {gate.reason}.", stacklevel=2)
    return gate


def vllm_sampling(
    sampling: SamplingParams, params: dict[str, Any], end_tokens: Iterable[int], has_text: bool, whole: bool
) -> VLLMSampling:
    """Return vLLM's sampling parameters for ``sampling``, with ``params`` as the request's ``kv_transfer_params``.

    ``has_text`` says whether there is a tokenizer. A prompt that is computed ``whole``, as a reference, must not be
    served from vLLM's prefix cache.

    Raises:
        InputError: The JSON schema is not valid JSON.
    """
    schema = sampling.schema()
    return VLLMSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        stop=list(sampling.stop),
        repetition_detection=RepetitionDetectionParams(**REPEATED) if sampling.stop_repeating else None,
        stop_token_ids=sorted(end_tokens),  # vLLM knows only the generation config's and the tokenizer's
        detokenize=has_text,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        skip_reading_prefix_cache=True if whole else None,
        output_kind=RequestOutputKind.DELTA,
        logprobs=sampling.logprobs,
        extra_args={"kv_transfer_params": params} if params else None,
    )


# Most requests that are computed or written at a time, of all callers together: enough for vLLM's scheduler to fill its
# batches, and no more than the entries that may wait for a worker's disk.
IN_FLIGHT = 64
_POLL_S = 0.005
# Tries of a save, and the first pause: other clients may have filled the workers' queues. Each pause is twice as long.
_TRIES, _PAUSE_S = 8, 0.1
# Most tokens that are put behind the tokens that a KV writer computes.
_MOST_BEHIND = 3
# Seconds that storage may take to write an entry before the caller gets an error.
_WRITTEN_WITHIN_S = 120.0


class Precompute:
    """Computes each entry once, even if several callers request the entry at once. Runs in the client's event loop."""

    def __init__(
        self,
        llm: EngineClient,
        context_window: int,
        names: Iterator[str],
        probe: tuple[int, ...],
        block_size: int = 16,
        behind: tuple[int, ...] = (),
    ):
        """Send requests to ``llm``, whose blocks hold ``block_size`` tokens, under ids of ``names``.

        Chunks are ranked behind the tokens ``probe``. A KV writer computes chunks behind the tokens ``behind``.
        """
        self._llm, self._context_window, self._block_size, self._names = llm, context_window, block_size, names
        self._probe, self._probed, self._behind = probe, set[str](), behind
        self._written: dict[str, str] = {}
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        # Limits how many requests of one namespace queue for a slot: one chunk must not wait for another's thousands.
        self._own = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(IN_FLIGHT))
        self._collecting: asyncio.Future[None] | None = None
        self._computing: dict[str, asyncio.Future[str]] = {}

    async def run(
        self, entries: Entries, chunks: Sequence[Chunk], progress: Callable[[int], None] | None, ranking: bool
    ) -> PrecomputeReport:
        """Compute missing chunks, with ``ranking`` also static deviations; see :meth:`BlendEngine.precompute`."""
        begin = time.perf_counter()
        plan = await asyncio.to_thread(
            plan_precompute,
            chunks,
            entries,
            self._context_window - (_MOST_BEHIND if entries.writer is not None else 0),
            progress,
            len(self._probe) if ranking else None,
            len(self._behind),
        )
        failed, header = dict(plan.failed), entries.header_ids

        async def one(token_ids: tuple[int, ...], unranked: bool = False) -> None:
            async with self._own[entries.namespace.name], self._slots:
                key, why = entries.own_key(token_ids), ""
                if not unranked:
                    by = (*header, *self._behind) if token_ids and entries.writer is not None else header
                    why = await self._once(key, lambda: self._saved(entries, token_ids, by))
                if not why and 0 < len(token_ids) <= plan.most_ranked:
                    before = (*header, *self._probe)
                    again = receipt(key, ranking=True)
                    await self._once(again, lambda: self._saved(entries, token_ids, before, ranking=True))
            if unranked or not token_ids:
                return
            if why:
                failed[plan.chunks[token_ids]] = why
            if progress is not None:
                progress(1)

        if ranking and self._probe and (plan.chunks or plan.unranked):
            await self._compute_probe(entries)
        async with asyncio.TaskGroup() as group:
            for token_ids in plan.token_ids:
                group.create_task(one(token_ids))
            for token_ids in plan.unranked:
                group.create_task(one(token_ids, unranked=True))
        return report_of(plan, failed, time.perf_counter() - begin)

    async def _once(self, name: str, compute: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Run ``compute``, or await another caller's run; return why the entry is not in the store, or an empty string."""
        running = self._computing.get(name)
        if running is None:
            running = self._computing[name] = asyncio.ensure_future(compute())
            running.add_done_callback(lambda _: self._computing.pop(name, None))
        return await asyncio.shield(running)  # a cancelled caller must not cancel the others' computation

    async def _compute_probe(self, entries: Entries) -> None:
        """Put header and probe into vLLM's prefix cache, so that each ranking computes only its chunk."""
        if (name := entries.namespace.name) not in self._probed:
            prompt = [*entries.header_ids, *self._probe]
            # No KV of the prompt is stored: the job's start is the prompt's end.
            await self._prefill(entries, *self._by_writer(entries, prompt, SaveJob(len(prompt))))
            self._probed.add(name)

    async def _saved(
        self, entries: Entries, token_ids: tuple[int, ...], before: tuple[int, ...], ranking: bool = False
    ) -> str:
        """Have workers store or rank ``token_ids`` behind ``before``; return why that failed, or an empty string."""
        why, job = "", SaveJob(len(before) if token_ids else 0, ranking, entries.namespace)
        prompt, job = self._by_writer(entries, [*before, *token_ids], job)
        for attempt in range(_TRIES):
            keys = [receipt(key, ranking) for key in entries.written_keys(token_ids)]
            for key in keys:
                self._written.pop(key, None)  # receipt of an abandoned write
            if why := await self._prefill(entries, prompt, job):
                return why
            why = await self._receipt(keys)
            if why != BUSY:
                break
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        return why

    async def _receipt(self, keys: Sequence[str]) -> str:
        try:
            async with asyncio.timeout(_WRITTEN_WITHIN_S):
                while not all(key in self._written for key in keys):
                    # One call serves all waiting entries: a call for each entry would delay the engine's steps.
                    if self._collecting is None or self._collecting.done():
                        self._collecting = asyncio.ensure_future(self._collect())
                    # Shielded, since the workers report each receipt once, and other callers wait for their receipts.
                    await asyncio.shield(self._collecting)
        except TimeoutError:
            self._collecting = None  # the call may hang, and must not delay later callers
            return f"storage has not written it within {_WRITTEN_WITHIN_S:g} seconds"
        return next(filter(None, [self._written.pop(key) for key in keys]), "")

    async def _collect(self) -> None:
        await asyncio.sleep(_POLL_S)
        for rank in await ask_workers(self._llm, "cacheblend_written"):
            self._written.update(rank)

    def _by_writer(self, entries: Entries, prompt: list[int], job: SaveJob) -> tuple[list[int], SaveJob]:
        """Return ``prompt`` and ``job``, changed so that the KV writer, if there is one, computes the prompt.

        One to three copies of the last token are put behind the prompt. vLLM computes the last copy itself. The last
        copy must not complete a block, since vLLM would cache the block, and must not stand alone in a block.
        """
        tokens = len(prompt)
        if entries.writer is None or (entries.header_ids and not job.start):  # the model itself computes the header
            return prompt, job
        more = next(count for count in range(1, _MOST_BEHIND + 1) if (tokens + count) % self._block_size > 1)
        return [*prompt, *prompt[-1:] * more], replace(job, written=tokens)

    async def _prefill(self, entries: Entries, prompt: list[int], job: SaveJob) -> str:
        """Have vLLM compute a prompt; return why vLLM did not, or an empty string."""
        tokens: Any = {"prompt_token_ids": prompt}
        if (salt := entries.namespace.salt()) is not None:
            tokens["cache_salt"] = salt
        params = {"kv_transfer_params": to_params(job)} if job.start < len(prompt) else None
        sampling = VLLMSampling(max_tokens=1, temperature=0, detokenize=False, extra_args=params)
        last: RequestOutput | None = None
        async for output in self._llm.generate(tokens, sampling, next(self._names)):
            last = output
        if last is None or last.outputs[0].finish_reason not in {"length", "stop"}:
            return "vLLM ended its request before its KV was complete"
        return str(((last.kv_transfer_params or {}).get(PARAMS) or {}).get("refused", ""))
