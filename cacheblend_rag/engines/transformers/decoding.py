"""Decodes answers: picks each token, guided by a JSON schema (llguidance) on request, and returns pieces of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final, Literal

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from cacheblend_rag.engines.results import TokenLogprob
from cacheblend_rag.engines.sampling import SamplingParams, begun_at_end, repeats
from cacheblend_rag.errors import InputError

# Parts of a schema that are values, and parts that map names to schemas.
_LITERAL: Final = {"enum", "const", "default", "examples", "required"}
_NAMED: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
GUIDED: Final = find_spec("llguidance") is not None


class Guide:
    """Guides one answer to conform to a JSON schema."""

    def __init__(self, schema: Mapping[str, Any], tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]):
        """Compile ``schema`` for a model with ``vocab_size`` logits, whose answers end with one of ``end_tokens``.

        Raises:
            InputError: llguidance cannot guide by this schema, or there is no tokenizer that ends answers.
        """
        if tokenizer is None or not end_tokens:
            raise InputError(
                "A JSON schema needs a tokenizer with an end token; this engine has none. Leave json_schema out."
            )
        from llguidance import LLMatcher

        # Free white space is switched off: a weak model might write blanks for ever.
        grammar = LLMatcher.grammar_from_json_schema(_closed(schema), overrides={"whitespace_flexible": False})
        self._matcher = LLMatcher(_tokenizer(tokenizer, vocab_size, tuple(sorted(end_tokens))), str(grammar))
        self._check("json_schema cannot be followed")

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits``, ``[vocab]``, with minus infinity for every token that cannot come next."""
        # The mask has one bit per token, lowest first. llguidance's torch function compiles a kernel at its first call.
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check("Guided decoding failed")
        bits = (mask[:, None] >> torch.arange(8)) & 1
        allowed = bits.flatten()[: len(logits)].bool().to(logits.device)
        return logits.masked_fill(~allowed, float("-inf"))

    def take(self, token: int) -> bool:
        """Record the next token of the answer; return whether the answer cannot go on behind the token."""
        self._matcher.consume_token(token)
        self._check("Guided decoding failed")
        return bool(self._matcher.is_stopped())

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise InputError(f"{what}: {self._matcher.get_error()}")


def _closed(schema: Any) -> Any:
    """Return ``schema`` with additional properties forbidden wherever the schema does not mention them, as on vLLM."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping) or "allOf" in schema:  # a schema that is joined with others must stay open
        return schema
    kept = {name: part if name in _LITERAL else _closed(part) for name, part in schema.items() if name not in _NAMED}
    named = {name: {k: _closed(v) for k, v in schema[name].items()} for name in _NAMED if name in schema}
    says = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"} & set(schema)
    return {**kept, **named, **({"additionalProperties": False} if "properties" in schema and not says else {})}


@lru_cache(maxsize=4)
def _tokenizer(tokenizer: Any, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_tokens))


class Sampler:
    """Picks tokens greedily, or by temperature and nucleus sampling, repeatable by seed."""

    def __init__(self, params: SamplingParams, device: torch.device):
        """Seed the generator with the given seed, or from the system without one."""
        self._temperature = params.temperature
        self._top_k = TopKLogitsWarper(params.top_k) if params.top_k else None
        self._top_p = TopPLogitsWarper(params.top_p) if params.top_p < 1 else None
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._counts: Counter[int] = Counter()
        self._generator: torch.Generator | None = None
        if self._temperature == 0:
            return
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the next token for ``logits``, ``[vocab]``; the request's penalties apply to earlier tokens."""
        token = self._sampled(self._penalised(logits))
        self._counts[token] += 1
        return token

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._counts or not (self._presence or self._frequency):
            return logits
        tokens, counts = (
            torch.tensor(list(each), device=logits.device) for each in zip(*self._counts.items(), strict=True)
        )
        scores = logits.float().clone()
        scores[tokens] -= self._presence + self._frequency * counts
        return scores

    def _sampled(self, logits: torch.Tensor) -> int:
        if self._temperature == 0:
            return int(logits.argmax())
        scores = logits[None].float() / self._temperature
        if self._top_k is not None:
            scores = self._top_k(None, scores)
        if self._top_p is not None:
            scores = self._top_p(None, scores)
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


def token_logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """Return the log-probabilities of ``token`` and of the ``count`` most likely tokens for ``logits``, ``[vocab]``."""
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(count)
    return TokenLogprob(
        token, float(logprobs[token]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    )


class TextStream:
    """Decodes token ids to text, and withholds text that may turn out to be part of a stop string."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]):
        """Decode with ``tokenizer``; without a tokenizer the text is always empty."""
        self._backend: Any = None if tokenizer is None else tokenizer.backend_tokenizer
        self._ids: list[int] = []  # the tokens of the last returned piece, and later tokens without text so far
        self._told = 0  # number of tokens of the last returned piece
        self._told_text = ""  # text of the last returned piece
        self._stop = stop
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the new text that is certain after ``token``; set ``stopped`` when a stop string is complete."""
        self._held += self._decoded(token) if self._backend is not None else ""
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        hold = max((begun_at_end(self._held, stop) for stop in self._stop), default=0)
        return self._release(len(self._held) - hold)

    def _decoded(self, token: int) -> str:
        """Return the text that ``token`` adds; empty while the tokens end within a character."""
        self._ids.append(token)
        text = self._backend.decode(self._ids)
        # Bytes that form no character may change the text in front of them, which makes tokenizers' DecodeStream fail.
        piece: str = "" if text.endswith("\ufffd") else text[len(self._told_text) :]
        if piece:
            del self._ids[: self._told]
            self._told, self._told_text = len(self._ids), self._backend.decode(self._ids)
        return piece

    def flush(self) -> str:
        """Return the text that is still withheld at the end of the answer."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        self.text += out
        return out


class AnswerBuilder:
    """Builds an answer token by token: samples, ends and decodes it; excludes the end-of-sequence token."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Any,
        end_tokens: frozenset[int],
        device: torch.device,
        guide: Guide | None = None,
    ):
        """Start an empty answer, without text if ``tokenizer`` is None; ``guide`` says which tokens can come next."""
        self._guide = guide
        self._params, self._has_text, self._end_tokens = params, tokenizer is not None, end_tokens
        self._sample, self._stream = Sampler(params, device), TextStream(tokenizer, params.stop)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finished = False
        self.finish_reason: Literal["stop", "length"] = "length"

    @property
    def text(self) -> str:
        """Return the text that is certain so far."""
        return self._stream.text

    def push(self, logits: torch.Tensor) -> str | None:
        """Sample from ``logits``, ``[vocab]``; return the new certain text, or None if there is no event to yield."""
        token = self._sample(logits if self._guide is None else self._guide.allowed(logits))
        if token in self._end_tokens:
            self._finish("stop")
            return None
        self.tokens.append(token)
        if self._params.logprobs is not None:
            self.logprobs.append(token_logprob(logits, token, self._params.logprobs))
        piece = self._stream.push(token)
        repeating = self._params.stop_repeating and repeats(self.tokens)
        if self._stream.stopped or (self._guide is not None and self._guide.take(token)) or repeating:
            self._finish("stop")
        elif len(self.tokens) == self._params.max_tokens:
            self._finish("length")
        return piece if piece or not self._has_text else None

    def flush(self) -> str:
        """Return the text that is still withheld at the end of the answer."""
        return self._stream.flush()

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self.finished, self.finish_reason = True, reason
