"""Measures the cost of loading and computing here, for the loading controller: ``cacheblend store calibrate``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path
from statistics import median

import torch

from cacheblend_rag.blending.costs import Costs, TierCost
from cacheblend_rag.calibrate.bandwidth import measure_device_copy, measure_disk, measure_ram_copy
from cacheblend_rag.calibrate.compute import measure_compute
from cacheblend_rag.calibrate.workbench import Workbench
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import StoreUnavailableError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.store import ChunkKV, DiskStore, KVKey, KVStore, LayerKV, open_store
from cacheblend_rag.store.codec import get_codec
from cacheblend_rag.store.kv import StoredKV, read_whole

_REPEAT = 3
# Shape of the entry that measures tiers on other machines: 8 MiB in 16 layers.
_PROBE_LAYERS, _PROBE_TOKENS, _PROBE_DIM = 16, 256, 1024
_LEAST_S = 1e-4
_STORED = 64


def measure_costs(place: Workbench, store: Path, progress: Callable[[str], None] | None = None) -> Costs:
    """Measure a model on its device, and the tiers of the store at ``store``; takes seconds.

    Disks are read with an empty page cache: the controller starts with the worst case, and later runs correct it. For
    any other tier an entry of 8 MiB is written, read and removed; a tier that does not answer is left out.
    """
    say = progress or (lambda line: None)
    say("computing")
    compute = measure_compute(place)
    say("RAM")
    ram = measure_ram_copy() if place.device.type == "cpu" else measure_device_copy(place.device)
    tiers = {"ram": TierCost(0.0, ram)}
    with open_store(store, ram_budget=0) as kv:
        for tier in kv.tiers:
            if isinstance(tier, DiskStore):
                say(tier.tier)
                if (cost := measure_disk(tier.root, cold=True)) is not None:
                    tiers[tier.tier] = cost
            elif tier.lasts:
                say(tier.tier)
                if (cost := measure_remote(tier)) is not None:
                    tiers[tier.tier] = cost
    return Costs(place.engine.num_layers, compute, tiers)


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


def token_bytes(place: Workbench, codec: str = "none") -> int:
    """Return the size of one token's KV in all layers and ranks, as a tier with ``codec`` stores it.

    Raises:
        InputError: There is no such codec.
    """
    engine, encode = place.engine, get_codec(codec).encode
    tokens = [token % place.vocab_size for token in range(_STORED)]
    if isinstance(engine, TransformersEngine):
        stored = [engine.subject().full_prefill(tokens)[1]]
    else:
        engine.precompute([Chunk("stored", "", tuple(tokens))])
        found = [engine.store.get(key) for key in engine.entries.written_keys(tokens)]
        stored = [whole for each in found if each is not None and (whole := read_whole(each)) is not None]
    encoded = (encode(layer) for kv in stored for layer in kv.layers)
    return sum(tensor.nbytes for tensors in encoded for tensor in tensors.values()) // len(tokens)
