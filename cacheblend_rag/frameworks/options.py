"""Reads the options of a framework's model, or of one call of it: how to decode, and how to treat stored KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from cacheblend_rag.blending.settings import HOW_NAMES, OPTION_NAMES, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.frameworks.misses import checked_on_miss

SAMPLING_OPTIONS = tuple(option.name for option in fields(SamplingParams) if option.name != "json_schema")

CALL_OPTIONS = (*SAMPLING_OPTIONS, *OPTION_NAMES)
"""Names of the options that a call of a framework's model may give in place of the model's own attributes."""

DEFAULT_MAX_TOKENS = 512
"""Most tokens of an answer, where the context window leaves as many."""

_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "stop_sequences": "stop", "request_timeout": "timeout"}


def with_usual_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model or call with our names where OpenAI's and others' were given.

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
    """Return how to decode; what is None is left open.

    Args:
        options: SamplingParams' names; ``stop`` may be one string.
        room: Tokens that the context window leaves for the answer.

    Raises:
        InputError: A value of a wrong type or outside its range.
    """
    names = (*SAMPLING_OPTIONS, "json_schema")
    given = {name: options[name] for name in names if options.get(name) is not None}
    given.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, room)))
    stop = given.get("stop", ())
    return SamplingParams(**{**given, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def blend_settings(options: Mapping[str, Any]) -> BlendSettings:
    """Return how to treat stored KV.

    Raises:
        InputError: A value of a wrong type or outside its range.
    """
    return BlendSettings.from_params({name: options[name] for name in OPTION_NAMES if name in options})


def check_given(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be an option's value, before pydantic coerces it: what is wrong is said as in a call.

    Raises:
        InputError: A value of a wrong type or outside its range.
    """
    blend_settings(options)
    checked_on_miss(options.get("on_miss", "warn"))


def options_of(model: Any, call: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the attributes of a framework's model that a call may give, too, and over them what ``call`` gives.

    Where a call gives ``quality`` the model's ratio, policy and check layers are nothing to it, and the other way round.
    """
    own = {name: getattr(model, name) for name in CALL_OPTIONS}
    if call.get("quality") is not None:
        own |= dict.fromkeys(HOW_NAMES)
    elif any(call.get(name) is not None for name in HOW_NAMES):
        own["quality"] = None
    return {**own, **call}
