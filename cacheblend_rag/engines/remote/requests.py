"""Says what a remote engine sends: completions and chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from cacheblend_rag.engines.base import Request
from cacheblend_rag.prompts.chunk import Chunk

_BATCH_CHUNKS, _BATCH_BYTES = 64, 4 << 20


def completion_request(model: str, request: Request, prefix: str = "") -> dict[str, Any]:
    """Return the arguments of a streamed completion.

    Args:
        model: Name the server has it under.
        request: What to ask.
        prefix: What the server's tokenizer puts before a text by itself: a text that spells it is sent without.

    Raises:
        InputError: The JSON schema is no JSON.
    """
    prompt, sampling = request.prompt, request.sampling
    blend = request.settings.to_params()
    if prompt.text is None:
        blend["spans"] = [
            {"id": span.chunk.id, "start": span.start, "end": span.end, "text": span.chunk.text or None}
            for span in prompt.spans
        ]
    extra: dict[str, Any] = {"cacheblend": blend, "return_token_ids": True}
    # The server may have other defaults, from the model's generation_config.json.
    extra |= {"top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0}
    if sampling.json_schema is not None:
        extra["structured_outputs"] = {"json": sampling.schema()}
    if sampling.logprobs is not None:
        extra["return_tokens_as_token_ids"] = True
    return {
        "model": model,
        "prompt": list(prompt.token_ids) if prompt.text is None else prompt.text.removeprefix(prefix),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "logprobs": sampling.logprobs,
        "stop": list(sampling.stop) or None,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": extra,
    }


def chunk_bodies(chunks: Iterable[Chunk]) -> list[dict[str, Any]]:
    """Return chunks as ``POST /v1/chunks`` takes them."""
    return [
        {
            "id": chunk.id,
            "text": chunk.text,
            "token_ids": list(chunk.token_ids),
            "metadata": json.loads(json.dumps(dict(chunk.metadata), default=str)),
        }
        for chunk in chunks
    ]


def batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Cut chunks into groups that stay well below a server's limit on the size of a request."""
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        weight = 4 * len(chunk.text) + 8 * len(chunk.token_ids)
        if batch and (len(batch) == _BATCH_CHUNKS or size + weight > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += weight
    if batch:
        yield batch
