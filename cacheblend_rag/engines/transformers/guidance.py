"""Guides decoding: at each token only those are left that can still become JSON of the wanted schema (llguidance)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final

import torch

from cacheblend_rag.errors import InputError

# Parts of a schema that are values, and those that map names to schemas.
_LITERAL: Final = {"enum", "const", "default", "examples", "required"}
_NAMED: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
INSTALLED: Final = find_spec("llguidance") is not None


class Guide:
    """One answer that conforms to a JSON schema."""

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

        self._matcher = LLMatcher(_tokenizer(tokenizer, vocab_size, tuple(sorted(end_tokens))), _grammar(schema))
        self._check("json_schema cannot be followed")

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits``, ``[vocab]``, with minus infinity for every token that cannot come next."""
        # One bit a token, the lowest first. llguidance's own function for torch compiles a kernel when it is first called.
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check("Guided decoding failed")
        bits = (mask[:, None] >> torch.arange(8)) & 1
        allowed = bits.flatten()[: len(logits)].bool().to(logits.device)
        return logits.masked_fill(~allowed, float("-inf"))

    def take(self, token: int) -> bool:
        """Take note of the next token; return whether nothing can come behind it."""
        self._matcher.consume_token(token)
        self._check("Guided decoding failed")
        return bool(self._matcher.is_stopped())

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise InputError(f"{what}: {self._matcher.get_error()}")


def _grammar(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    # Without free white space a model of little mind never ends: it may write blanks for ever.
    return str(LLMatcher.grammar_from_json_schema(_closed(schema), overrides={"whitespace_flexible": False}))


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties it names and no others, where it does not say: as on vLLM."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping) or "allOf" in schema:  # what is joined with another object must stay open
        return schema
    kept = {name: part if name in _LITERAL else _closed(part) for name, part in schema.items() if name not in _NAMED}
    named = {name: {k: _closed(v) for k, v in schema[name].items()} for name in _NAMED if name in schema}
    says = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"} & set(schema)
    return {**kept, **named, **({"additionalProperties": False} if "properties" in schema and not says else {})}


@lru_cache(maxsize=4)
def _tokenizer(tokenizer: Any, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_tokens))
