"""Measures the cost of loading and computing here, for the loading controller: ``cacheblend store calibrate``."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from cacheblend_rag.blending.controller import Decision, Load, Located
from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FULL_REUSE, BlendSettings
from cacheblend_rag.calibrate.measure import drop_page_cache, prompt_of, random_chunks, random_ids, vocab_size
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import StoreUnavailableError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store import ChunkKV, DiskStore, KVKey, KVStore, LayerKV, MemoryStore, open_store
from cacheblend_rag.store.kv import StoredKV, read_whole

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine

CHUNKS, CHUNK_TOKENS, QUESTION_TOKENS = 6, 512, 32
"""Shape of a typical prompt."""
_REPEAT = 3
# Lengths of the prompts that computing is measured by.
_LONG, _PLACED_CHUNKS, _PLACED_QUESTION = 1024, 4, 8
_BLOCK = 256 << 20
# Shape of the entry that measures tiers on other machines: 8 MiB in 16 layers.
_PROBE_LAYERS, _PROBE_TOKENS, _PROBE_DIM = 16, 256, 1024
_LEAST_S = 1e-4
_STORED = 64


def measure_costs(
    engine: TransformersEngine | VLLMEngine, store: Path, progress: Callable[[str], None] | None = None
) -> Costs:
    """Measure a model on its device, and the tiers of the store at ``store``; takes seconds.

    Disks are read with an empty page cache: the controller starts with the worst case, and later runs correct it. For
    any other tier an entry of 8 MiB is written, read and removed; a tier that does not answer is left out.
    """
    say = progress or (lambda line: None)
    say("computing")
    compute = measure_compute(engine)
    say("RAM")
    assert engine.device is not None
    tiers = {"ram": measure_ram(engine.device)}
    with open_store(store, ram_budget=0) as kv:
        for tier in kv.tiers:
            if not tier.lasts:
                continue
            say(tier.tier)
            cost = measure_disk(tier.root) if isinstance(tier, DiskStore) else measure_remote(tier)
            if cost is not None:
                tiers[tier.tier] = cost
    return Costs(engine.num_layers, compute, tiers)


def measure_compute(engine: TransformersEngine | VLLMEngine) -> ComputeCost:
    """Return the cost of computing, with the cost of placing stored KV, by the times of prefills and of a full KV reuse.

    The cost of placing is 0 if the model is not blended or its context window is too short. On vLLM the chunks of
    random tokens stay in the engine's store.
    """
    vocabulary, long = vocab_size(engine), min(_LONG, engine.context_window - 1)
    lengths = sorted({max(1, long // 32), max(1, long // 4), long})
    prompts = {count: TokenizedPrompt(random_ids(vocabulary, count, seed=0), ()) for count in lengths}
    compute = fit_compute({count: _first_token_s(engine, prompt) for count, prompt in prompts.items()})
    tokens = (long - len(engine.header_ids) - _PLACED_QUESTION) // _PLACED_CHUNKS
    if not engine.gate.passed or tokens < 1:
        return compute
    chunks = random_chunks(vocabulary, _PLACED_CHUNKS, tokens, seed=0)
    prompt = prompt_of(engine.header_ids, chunks, random_ids(vocabulary, _PLACED_QUESTION, seed=1))
    with _memory_alone(engine):
        engine.precompute(chunks)
        took = _first_token_s(engine, prompt, FULL_REUSE)
    length = len(prompt.token_ids)
    beside = took - compute.seconds(_PLACED_QUESTION, length)  # the question's tokens are computed
    return replace(compute, per_placed_s=max(0.0, beside / (length - _PLACED_QUESTION)))


def fit_compute(measured_s: dict[int, float]) -> ComputeCost:
    """Return the cost, with no negative part, that fits the measured seconds of prefills best."""
    from scipy.optimize import nnls

    tokens = np.array(sorted(measured_s), np.float64)
    seconds = np.array([measured_s[int(count)] for count in tokens])
    terms = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
    # Relative errors give short lengths the same weight as long lengths.
    parts, _ = nnls(terms / seconds[:, None], np.ones_like(seconds))
    return ComputeCost(*parts.tolist())


@contextmanager
def _memory_alone(engine: TransformersEngine | VLLMEngine) -> Iterator[None]:
    """Give the engine an empty store in RAM for the measurement.

    vLLM keeps its store, because its workers have opened the store; they read from RAM from the second use on.
    """
    if not isinstance(engine, TransformersEngine):
        yield
        return
    usual, engine.store = engine.store, MemoryStore()
    try:
        yield
    finally:
        engine.store = usual


def _first_token_s(
    engine: TransformersEngine | VLLMEngine, prompt: TokenizedPrompt, settings: BlendSettings | None = None
) -> float:
    times = []
    for _ in range(_REPEAT + 1):  # the first one warms up
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        engine.generate(prompt, SamplingParams(max_tokens=1), settings)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def measure_ram(device: torch.device) -> TierCost:
    """Return the cost of copying from RAM to a device: to a CPU within RAM, to a CUDA device out of page-locked memory."""
    source, cuda = torch.ones(_BLOCK, dtype=torch.uint8), device.type == "cuda"
    source = source.pin_memory() if cuda else source
    target = torch.empty(_BLOCK, dtype=torch.uint8, device=device if cuda else "cpu")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize(device)

    return TierCost(0.0, _rate(copy, _BLOCK))


def measure_disk(directory: Path) -> TierCost | None:
    """Return the cost of reading up to 256 MiB of entry files in ``directory`` that the page cache does not hold.

    If ``directory`` holds less than 64 MiB and is writable, a temporary file of 256 MiB is read instead. The latency is
    that of reading 4 KiB. Return None if ``directory`` is empty and not writable.
    """
    with _files(directory) as files:
        if not files:
            return None

        def read() -> None:
            for file in files:
                with file.open("rb", buffering=0) as handle:
                    handle.read()

        nbytes = sum(file.stat().st_size for file in files)
        rate = _rate(read, nbytes, lambda: drop_page_cache(files))
        return TierCost(_latency(files[0]), rate)


def _latency(file: Path) -> float:
    times = []
    for part in range(_REPEAT):
        drop_page_cache([file])
        with file.open("rb", buffering=0) as handle:
            handle.seek(part * file.stat().st_size // (_REPEAT + 1))
            begin = time.perf_counter()
            handle.read(4096)
            times.append(time.perf_counter() - begin)
    return median(times)


@contextmanager
def _files(directory: Path) -> Iterator[list[Path]]:
    found: list[Path] = []
    total = 0
    for file in sorted(directory.rglob("*.safetensors")):
        if total >= _BLOCK or not os.access(file, os.R_OK):
            break
        found.append(file)
        total += file.stat().st_size
    if total >= _BLOCK // 4 or not os.access(directory, os.W_OK):
        yield found
        return
    with tempfile.NamedTemporaryFile(dir=directory, prefix="bandwidth-") as handle:
        handle.write(os.urandom(1 << 20) * (_BLOCK >> 20))
        handle.flush()
        os.fsync(handle.fileno())
        yield [Path(handle.name)]


def _rate(step: Callable[[], object], nbytes: int, before: Callable[[], object] = lambda: None) -> float:
    times = []
    step()
    for _ in range(_REPEAT):
        before()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return nbytes / median(times)


def measure_remote(tier: KVStore) -> TierCost | None:
    """Return the cost of reading layers from a tier that is no directory; None if the tier does not answer or has no room."""
    # Random bytes, which no codec makes smaller.
    layer = LayerKV(*torch.randint(256, (2, 1, _PROBE_TOKENS, _PROBE_DIM), dtype=torch.uint8))
    probe = ChunkKV([layer] * _PROBE_LAYERS, 0)
    key = KVKey(secrets.token_hex(20))
    try:
        if not tier.put(key, probe):
            return None
        try:
            found = tier.get(key)
            return None if found is None else _reading(tier, key, found)
        finally:
            tier.delete(key)
    except StoreUnavailableError:
        return None


def _reading(tier: KVStore, key: KVKey, found: StoredKV) -> TierCost:
    waits, whole = [], []
    with ThreadPoolExecutor(found.at_once) as pool:
        for _ in range(_REPEAT):
            begin = time.perf_counter()
            tier.contains(key)  # a round trip with hardly any bytes
            waits.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            list(pool.map(found.layer, range(found.num_layers)))
            whole.append(time.perf_counter() - begin)
    latency = median(waits)
    rounds = ceil(found.num_layers / found.at_once)
    return TierCost(latency, found.stored_nbytes / max(median(whole) - rounds * latency, _LEAST_S), found.at_once)


def token_bytes(engine: TransformersEngine | VLLMEngine) -> int:
    """Return the size of one token's KV in all layers and ranks."""
    tokens = [token % vocab_size(engine) for token in range(_STORED)]
    if isinstance(engine, TransformersEngine):
        stored = [engine.subject().full_prefill(tokens)[1]]
    else:
        engine.precompute([Chunk("stored", "", tuple(tokens))])
        found = [engine.store.get(key) for key in engine.entries.written_keys(tokens)]
        stored = [whole for each in found if each is not None and (whole := read_whole(each)) is not None]
    return sum(layer.k.nbytes + layer.v.nbytes for kv in stored for layer in kv.layers) // len(tokens)


@dataclass(frozen=True)
class Estimate:
    """Holds the computed, not measured, times of a typical prompt whose KV is in one tier.

    Attributes:
        full_s: Seconds of a full recompute.
        blend_s: Seconds of a blend with the profile's policy and ratio; loading and computing overlap as the policy
            allows.
        load_s: Seconds of loading alone.
    """

    full_s: float
    blend_s: float
    load_s: float


def typical_load(engine: TransformersEngine | VLLMEngine) -> Load | None:
    """Return the load of a prompt of 6 chunks of 512 tokens, the first one exact; None if the model is not blended."""
    if not engine.gate.passed:
        return None
    profile, nbytes = engine.profile, token_bytes(engine) * CHUNK_TOKENS
    spans = [Located(CHUNK_TOKENS, nbytes, "", exact=not number) for number in range(CHUNKS)]
    chosen = policy(profile.policy)
    dense = profile.check_layers[0] / engine.num_layers if chosen.needs_deviation else 0.0
    asked = 0 if chosen.needs_attention else None
    return Load(spans, QUESTION_TOKENS, profile.ratio, dense=dense, asked=asked)


def estimate(load: Load, costs: Costs) -> dict[str, Estimate]:
    """Return what the loading controller expects of a blend of all of ``load`` at its lowest ratio, by the KV's tier."""
    found = {}
    full_s = costs.compute.seconds(load.tokens, load.tokens)
    for tier in costs.tiers:
        placed = replace(load, spans=[replace(span, tier=tier) for span in load.spans])
        blend = Decision(placed, costs, [True] * len(placed.spans), load.least)
        found[tier] = Estimate(full_s, blend.seconds, blend.load_s)
    return found
