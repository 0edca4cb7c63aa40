"""Defines the decoding options of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cacheblend_rag.blending.settings import is_number, is_whole
from cacheblend_rag.errors import InputError

# vLLM's default of `max_logprobs`.
_MOST_LOGPROBS = 20
# Upper limits of vLLM and OpenAI's API.
_HOTTEST = 2.0
_PENALTY = 2.0
_SEEDS = 1 << 63
REPEATED: Final = {"min_pattern_size": 16, "max_pattern_size": 128, "min_count": 2}
"""vLLM's form of :attr:`SamplingParams.stop_repeating`. Shorter patterns may be table rows; longer ones cost time."""


@dataclass(frozen=True)
class SamplingParams:
    """Holds the decoding options of one request.

    Attributes:
        max_tokens: Maximum number of tokens to generate.
        temperature: Sampling temperature from 0 (greedy) to 2.
        top_p: Nucleus mass in (0, 1].
        seed: Seed that makes sampling repeatable.
        stop: Strings that end the answer and are not part of the answer.
        json_schema: JSON schema (a mapping, or its JSON text) that the answer must conform to by guided decoding.
            Engines without guided decoding (:attr:`BlendEngine.supports_json_schema`) reject a schema.
        logprobs: Number (0 to 20) of most likely tokens whose log-probabilities are returned for every generated token,
            beside the generated token's own; None returns no log-probabilities.
        top_k: Number of most likely tokens to sample from; 0 for all tokens.
        presence_penalty: Number, -2 to 2, subtracted from the logit of every token that the answer already contains.
        frequency_penalty: Number, -2 to 2, subtracted from a token's logit for each occurrence in the answer.
        stop_repeating: Whether an answer ends when its last 16 to 128 tokens repeat the tokens right before them.

    Example:
        Sample a short answer repeatably::

            sampling = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, seed=1)
            generation = engine.generate(prompt, sampling)
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    logprobs: int | None = None
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_repeating: bool = False

    def __post_init__(self) -> None:
        if not is_whole(self.max_tokens) or self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens!r:.200}; give a whole number from 1 on.")
        if not is_number(self.temperature) or not 0 <= self.temperature <= _HOTTEST:
            raise InputError(f"temperature is {self.temperature!r:.200}; give 0 (greedy) to {_HOTTEST}.")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r:.200}; give a value in (0, 1].")
        if self.seed is not None and not (is_whole(self.seed) and -_SEEDS <= self.seed < _SEEDS):
            raise InputError(f"seed is {self.seed!r:.200}; give a whole number of 64 bits.")
        if not isinstance(self.stop, (tuple, list)) or not all(isinstance(s, str) for s in self.stop):
            raise InputError(f"stop is {self.stop!r:.200}; give strings in a tuple or list.")
        if any(not s for s in self.stop):
            raise InputError("A stop string is empty; leave it out.")
        if self.logprobs is not None and not (is_whole(self.logprobs) and 0 <= self.logprobs <= _MOST_LOGPROBS):
            raise InputError(f"logprobs is {self.logprobs!r:.200}; give 0 to {_MOST_LOGPROBS}.")
        if not is_whole(self.top_k) or self.top_k < 0:
            raise InputError(f"top_k is {self.top_k!r:.200}; give a whole number, 0 for all tokens.")
        if not isinstance(self.stop_repeating, bool):
            raise InputError(f"stop_repeating is {self.stop_repeating!r:.200}; give True or False.")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not is_number(value) or not -_PENALTY <= value <= _PENALTY:
                raise InputError(f"{name} is {value!r:.200}; give -{_PENALTY} to {_PENALTY}.")

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema as a dictionary; None without a schema.

        Raises:
            InputError: The schema is not JSON.
        """
        if not isinstance(self.json_schema, str):
            return None if self.json_schema is None else dict(self.json_schema)
        try:
            found: dict[str, Any] = json.loads(self.json_schema)
        except ValueError as error:
            raise InputError(f"json_schema is not JSON: {error}") from error
        return found


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether ``tokens`` end with the same passage twice, as vLLM's ``repetition_detection`` finds it."""
    fewest, most, _ = REPEATED.values()
    return any(tokens[-2 * n : -n] == tokens[-n:] for n in range(fewest, min(most, len(tokens) // 2) + 1))


def begun_at_end(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of ``mark`` that ``text`` ends with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
