"""Defines the compared methods by name; each method answers a case on the same engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from cacheblend_lab.evaluation.chunkwise import LangChainMethod, MapReduce, MapRerank
from cacheblend_lab.evaluation.marginal import marginalise, priors
from cacheblend_lab.evaluation.method import Method, Reply, generate_reply
from cacheblend_lab.evaluation.reordered import ReorderMethod
from cacheblend_lab.samples import EvalCase
from cacheblend_rag.blending.policies import policy_name
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings, Ratio, TextRatio
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import rag_prompt

NAMES: Final = (
    "full",
    "prefix",
    "reuse",
    "blend",
    "map_reduce",
    "map_rerank",
    "langchain_map_reduce",
    "langchain_map_rerank",
    "reorder",
    "reorder+blend",
    "marginal",
)
DEFAULT: Final = ("full", "prefix", "reuse", "blend")
LABELS: Final = {
    "full": "full recompute",
    "prefix": "prefix caching",
    "reuse": "full KV reuse",
    "map_reduce": "MapReduce",
    "map_rerank": "MapRerank",
    "langchain_map_reduce": "MapReduce (LangChain)",
    "langchain_map_rerank": "MapRerank (LangChain)",
    "reorder": "prefix caching, reordered",
    "reorder+blend": "blend, reordered",
    "marginal": "sum over chunks, each alone",
}
_BLEND = re.compile(r"(?P<policy>[a-z_-]+)@(?P<ratio>[\d.]+)(?:@(?P<layers>\d+(?:\+\d+)*))?")


class SettingsMethod(Method):
    """Answers by one request with given settings."""

    def __init__(self, name: str, label: str, settings: BlendSettings, free_loads: bool = False):
        """Set the request's settings; ``free_loads`` subtracts the wait for stored KV (the paper's ideal prefix caching)."""
        self.name, self.label, self.settings, self._free_loads = name, label, settings, free_loads
        self.key = f"{sorted(asdict(settings).items())}{free_loads}"

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        return generate_reply(engine, case.prompt, case.max_tokens, self.settings, self._free_loads)


class MarginalMethod(Method):
    """Answers with the answer that is likeliest over the chunks, each alone in its prompt (REALM, RAG-Sequence).

    Chunks are weighted by their similarity to the question, or equally if no chunks were retrieved.
    """

    name = key = "marginal"
    label = LABELS[name]

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        sample = case.sample
        prompts = [rag_prompt(engine.tokenizer, [chunk], sample.question, sample.instruction) for chunk in case.chunks]
        prior = priors(case.similarity or [0.0] * len(prompts))
        engine.precompute_first(case.chunks)  # each chunk is the first chunk of its prompt
        begin = time.perf_counter()
        found = marginalise(engine, prompts, prior, SamplingParams(case.max_tokens))
        seconds = time.perf_counter() - begin
        uses = [done.usage for done in found.generations]
        return Reply(
            found.best,
            seconds,  # the answer is unknown until every chunk has been asked
            seconds,
            sum(done.load_s for done in found.generations),
            sum(use.prompt_tokens for use in uses),
            sum(use.computed_tokens for use in uses) + found.weighing_tokens,
            sum(use.reused_tokens for use in uses),
            "requests",
        )


def make_methods(names: Sequence[str], blend: BlendSettings, profile: ModelProfile, num_layers: int) -> list[Method]:
    """Return the methods called ``names``.

    Args:
        names: Names in :data:`NAMES`, or ``POLICY@RATIO`` and ``POLICY@RATIO@LAYERS`` for further blends, as
            ``sink@0.1`` and ``hkvd@0.15@1+3``.
        blend: Settings of the method ``blend``, which blends even if the profile advises against blending.
        profile: Profile of the model, for the options that ``blend`` leaves open.
        num_layers: Number of the model's layers.

    Raises:
        InputError: A name is unknown or given twice, or settings are out of range.
    """
    found: list[Method] = []
    blend = _filled(blend, profile, num_layers)
    for name in names:
        made = _method(name, blend)
        # Answers of methods with equal keys could not be distinguished in the file.
        if (same := next((method.name for method in found if method.key == made.key), None)) is not None:
            raise InputError(f"The method {name} is given twice{'' if same == name else f': {same} is the same'}.")
        found.append(made)
    if not found:
        raise InputError(f"Name at least one method: {', '.join(NAMES)}.")
    return found


def _filled(blend: BlendSettings, profile: ModelProfile, num_layers: int) -> BlendSettings:
    """Return ratio, policy and check layers of a blend, none left open."""
    options = profile.resolve(blend, num_layers)
    ratio: Ratio = "auto" if isinstance(options.ratio, TextRatio) else options.ratio
    return BlendSettings(ratio, blend.policy or profile.policy, options.check_layers)


def _method(name: str, blend: BlendSettings) -> Method:
    assert blend.policy is not None
    how = f"{policy_name(blend.policy)} {_ratio(blend)}"
    named: dict[str, Callable[[], Method]] = {
        "full": lambda: SettingsMethod(name, LABELS[name], FULL_RECOMPUTE),
        "prefix": lambda: SettingsMethod(name, LABELS[name], PREFIX_CACHING, free_loads=True),
        "reuse": lambda: SettingsMethod(name, LABELS[name], FULL_REUSE),
        "blend": lambda: SettingsMethod(name, f"blend, {how}", blend),
        "map_reduce": lambda: MapReduce(name, LABELS[name]),
        "map_rerank": lambda: MapRerank(name, LABELS[name]),
        "langchain_map_reduce": lambda: LangChainMethod(name, LABELS[name]),
        "langchain_map_rerank": lambda: LangChainMethod(name, LABELS[name]),
        "marginal": MarginalMethod,
        "reorder": lambda: ReorderMethod(name, LABELS[name], None),
        "reorder+blend": lambda: ReorderMethod(name, f"{LABELS[name]}, {how}", blend),
    }
    if name in named:
        return named[name]()
    match = _BLEND.fullmatch(name)
    if match is None:
        raise InputError(
            f"There is no method {name!r}; known ones: {', '.join(NAMES)}, and further blends as POLICY@RATIO or "
            "POLICY@RATIO@LAYERS (sink@0.1, hkvd@0.15@1+3)."
        )
    layers = tuple(int(layer) for layer in match["layers"].split("+")) if match["layers"] else None
    settings = BlendSettings(float(match["ratio"]), match["policy"], layers)
    where = f", layers {match['layers']}" if layers else ""
    return SettingsMethod(name, f"{match['policy']} {_ratio(settings)}{where}", settings)


def _ratio(settings: BlendSettings) -> str:
    return settings.ratio if isinstance(settings.ratio, str) else f"{settings.ratio:.3g}"
