"""Reads how to decode from the options of a framework's model or call, whatever it calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError

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
