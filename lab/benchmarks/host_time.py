"""Measures the host's time for a blend on a GPU, without copies and kernels: Python, tables, plan. Needs no GPU.

    python lab/benchmarks/host_time.py [--layers N] [--chunks N] [--chunk-tokens N] [--rounds N] [--profile N]

The transformers engine answers a prompt with a model of ``--layers`` very narrow layers and a fake CUDA: streams and
events do nothing, "device" tensors are ordinary tensors, graphs compute nothing. The remaining time is the host's work
for a prompt, on the processor that runs the benchmark. Copies, which are asynchronous on a GPU, are real here, but of a
few bytes per token.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend_lab.policies import rank_for
from cacheblend_lab.workbench import Workbench
from cacheblend_rag import BlendSettings, SamplingParams, TransformersEngine
from cacheblend_rag.blending import transfer
from cacheblend_rag.blending.bulk import Arrivals, StoredLayers, bring
from cacheblend_rag.blending.transfer import sent, transfer_to
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.engines.transformers.attention import Looks

_CPU = torch.device("cpu")
QUESTION = 32
# `hkvd` and full recompute run the model itself.
METHODS = {
    "static-query 15%": BlendSettings(0.15, "static-query"),
    "static 15%": BlendSettings(0.15, "static"),
    "static 5%": BlendSettings(0.05, "static"),
    "full KV reuse": BlendSettings(0.0, "static"),
}


class Nothing:
    """Replaces a stream and an event, and never waits."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True


class FakeCUDA:
    """Replaces ``torch.cuda``."""

    Stream = Event = Nothing

    @staticmethod
    def current_stream(_: object = None) -> Nothing:
        return Nothing()

    @staticmethod
    def stream(_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def current_device() -> int:
        return 0


class Replayed:
    """Replaces the engine's graphs: copies the inputs of a pass, computes nothing, and counts the caches placed."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._arrivals, self.placed = runner, Arrivals(runner.device, runner.num_layers), 0

    def lend(self, tokens: int) -> None:
        return None

    def kept(self, cache: Any) -> Any:
        return cache

    def place(self, cache: Any, stored: StoredLayers) -> Any:
        way = transfer_to(self._runner.device)
        assert way is not None
        sent(stored.table(), self._runner.device)

        def one_launch(_begin: int, _end: int, memory: torch.Tensor) -> None:
            memory[:1].zero_()

        self.placed += 1
        bring(stored, way, self._arrivals, one_launch, ())
        return self._arrivals.wait

    def run(self, cache: Any, ids: torch.Tensor, positions: torch.Tensor, looks: Looks | None = None) -> torch.Tensor:
        for into in (ids, positions) if looks is None else (ids, positions, positions):
            sent(into, self._runner.device)
        if looks is not None:
            looks.begin_layer(torch.zeros(1, int(positions[-1]) + 1, 1, device=self._runner.device))
            looks.layers = self._runner.num_layers
        return torch.zeros(self._runner.model.config.vocab_size, device=self._runner.device)


class Buffers:
    """Replaces page-locked buffers, which are not needed, since all stored KV counts as page-locked."""

    def __init__(self, *_: object) -> None: ...

    def grow(self, _: int) -> bool:
        return False


@contextlib.contextmanager
def cuda_faked() -> Iterator[None]:
    """Make CPU tensors count as page-locked memory and as a GPU's tensors inside the context."""
    with contextlib.ExitStack() as fakes:
        for target, name, fake in (
            (torch, "get_device_module", lambda *_: FakeCUDA),
            (torch.Tensor, "is_pinned", lambda *_: True),
            (torch.Tensor, "record_stream", lambda *_: None),
            (transfer, "can_page_lock", lambda _: True),
            (transfer, "PageLockedMemory", Buffers),
            (transfer, "_pinned", lambda values: values),
        ):
            fakes.enter_context(patch.object(target, name, fake))
        yield


def measure(o: argparse.Namespace) -> None:
    """Print the median times of each method and, with ``--profile``, the slowest functions."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=4, intermediate_size=4, num_hidden_layers=o.layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1 << 20,
    )  # fmt: skip
    torch.manual_seed(0)
    with TransformersEngine(LlamaForCausalLM(config).eval(), device="cpu", header=(1, 2), prefix_cache=0) as engine:
        place = Workbench(engine, "", None, _CPU, torch.float32, 256)
        chunks = place.random_chunks(o.chunks, o.chunk_tokens, 0)
        prompts = [place.prompt(chunks, QUESTION, number) for number in range(o.rounds)]
        rank_for(engine, METHODS["static 5%"])
        engine.precompute(chunks)
        with cuda_faked():
            graphs = engine.runner.graphs = Replayed(engine.runner)  # type: ignore[assignment]
            print(
                f"{o.chunks} chunks of {o.chunk_tokens} tokens, {o.layers} layers, ms of the host a prompt, median of"
            )
            print(f"{o.rounds} rounds; {describe_machine(_CPU)}")
            print(f"{'':18}to the first token    in all")
            for name, settings in METHODS.items():
                took, first, before = [], [], graphs.placed
                for prompt in prompts:
                    begin = time.perf_counter()
                    done = engine.generate(prompt, SamplingParams(max_tokens=1), settings)
                    took.append(1e3 * (time.perf_counter() - begin))
                    first.append(1e3 * done.timings.ttft_s)
                if graphs.placed != before + o.rounds:
                    raise SystemExit("Stored KV was placed layer by layer, which a GPU's host would not do.")
                print(f"{name:18}{median(first):18.2f}{median(took):10.2f}")
            if o.profile:
                with cProfile.Profile() as watched:
                    for prompt in prompts:
                        engine.generate(prompt, SamplingParams(max_tokens=1), METHODS["static 15%"])
                pstats.Stats(watched).sort_stats("tottime").print_stats(o.profile)
            engine.runner.graphs = None


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 32), ("chunks", 6), ("chunk-tokens", 512), ("rounds", 50), ("profile", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    torch.set_num_threads(1)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
