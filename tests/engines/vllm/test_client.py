"""Tests which events the client records of an answer, without a running vLLM."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.trace import DECODE, PREFILL, Trace
from cacheblend_rag.engines.vllm.client import record
from cacheblend_rag.engines.vllm.messages import FinishReport

REPORT = FinishReport(PromptOutcome("prefill", "reuse was switched off", Usage(30, 0, 0, 30, 3)))


@pytest.mark.parametrize("pieces", [(1, 1, 1), (1, 2), (2, 1), (3,)])
def test_tokens_after_the_first_are_recorded_as_decoding_in_pieces_of_any_size(pieces: tuple[int, ...]) -> None:
    trace, begin = Trace(), time.perf_counter()
    record(trace, REPORT, begin, [(begin + 0.1 * n, tokens) for n, tokens in enumerate(pieces, 1)])
    events = trace.events()
    assert events[0].name == PREFILL
    assert sum(event.details["tokens"] for event in events if event.name == DECODE) == 2
