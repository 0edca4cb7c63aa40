"""How to decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cacheblend_rag.errors import InputError

# What vLLM returns unless it is started with another `max_logprobs`.
_MOST_LOGPROBS = 20
# vLLM and OpenAI's API take no more.
_HOTTEST = 2.0
_PENALTY = 2.0


@dataclass(frozen=True)
class SamplingParams:
    """How to decode.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy, 2 the highest.
        top_p: Nucleus mass in (0, 1].
        seed: Makes sampling repeatable.
        stop: Strings that end the answer; they are not part of it.
        json_schema: JSON schema (a mapping, or its JSON text) that the answer must conform to by guided decoding; engines
            without it (:attr:`BlendEngine.supports_json_schema`) refuse it.
        logprobs: Return the log-probability of every generated token and of so many likeliest alternatives (0 to 20).
        top_k: Sample from so many of the likeliest tokens; 0 for all.
        presence_penalty: Taken off the logit of every token that the answer has already, -2 to 2.
        frequency_penalty: The same, times how often it has it.
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

    def __post_init__(self) -> None:
        """Refuse values of a wrong type or outside their range."""
        if not _is_whole(self.max_tokens) or self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens!r:.200}; give a whole number from 1 on.")
        if not _is_number(self.temperature) or not 0 <= self.temperature <= _HOTTEST:
            raise InputError(f"temperature is {self.temperature!r:.200}; give 0 (greedy) to {_HOTTEST}.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r:.200}; give a value in (0, 1].")
        if self.seed is not None and not _is_whole(self.seed):
            raise InputError(f"seed is {self.seed!r:.200}; give a whole number.")
        if not isinstance(self.stop, (tuple, list)) or not all(isinstance(s, str) for s in self.stop):
            raise InputError(f"stop is {self.stop!r:.200}; give strings in a tuple or list.")
        if any(not s for s in self.stop):
            raise InputError("A stop string is empty; leave it out.")
        if self.logprobs is not None and not (_is_whole(self.logprobs) and 0 <= self.logprobs <= _MOST_LOGPROBS):
            raise InputError(f"logprobs is {self.logprobs!r:.200}; give 0 to {_MOST_LOGPROBS}.")
        if not _is_whole(self.top_k) or self.top_k < 0:
            raise InputError(f"top_k is {self.top_k!r:.200}; give a whole number, 0 for all tokens.")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -_PENALTY <= value <= _PENALTY:
                raise InputError(f"{name} is {value!r:.200}; give -{_PENALTY} to {_PENALTY}.")


SAMPLING_OPTIONS = tuple(field.name for field in fields(SamplingParams) if field.name != "json_schema")
"""Names of the options that say how to decode, as the frameworks' models take them."""

DEFAULT_MAX_TOKENS = 512
"""Most tokens of an answer in the frameworks' models, where the context window leaves as many."""

_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "stop_sequences": "stop", "request_timeout": "timeout"}


def with_usual_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a framework's model or call with our names where OpenAI's and others' were given.

    ``max_completion_tokens`` is ``max_tokens``, ``stop_sequences`` is ``stop``, ``request_timeout`` is ``timeout``; OpenAI's
    ``logprobs=True`` and ``top_logprobs=n`` are ``logprobs=n``.

    Raises:
        InputError: One thing is given under two names.
    """
    found = {name: value for name, value in options.items() if name not in (*_OTHER_NAMES, "top_logprobs")}
    for other, name in _OTHER_NAMES.items():
        if options.get(other) is not None:
            if found.get(name) is not None:
                raise InputError(f"{other} and {name} are the same; give one of them.")
            found[name] = options[other]
    if isinstance(found.get("logprobs"), bool):
        found["logprobs"] = 0 if found["logprobs"] else None
    if (count := options.get("top_logprobs")) is not None:
        if found.get("logprobs") != 0:
            raise InputError("top_logprobs goes with logprobs=True; give that, too, or logprobs=n alone.")
        found["logprobs"] = count
    return found


def sampling_of(options: Mapping[str, Any], room: int) -> SamplingParams:
    """Return how to decode by the options of a framework's model; what is None is left open.

    Args:
        options: :data:`SAMPLING_OPTIONS` and ``json_schema``; ``stop`` may be one string.
        room: Tokens that the context window leaves for the answer.

    Raises:
        InputError: A value of a wrong type or outside its range.
    """
    names = (*SAMPLING_OPTIONS, "json_schema")
    given = {name: options[name] for name in names if options.get(name) is not None}
    given.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, room)))
    stop = given.get("stop", ())
    return SamplingParams(**{**given, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
