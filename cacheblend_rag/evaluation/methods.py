"""The methods compared, by name, each answering a case on the same engine."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings, ResolvedSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.evaluation.baselines import MapReduce, MapRerank
from cacheblend_rag.evaluation.baselines.chunkwise import ChunkwiseAnswer
from cacheblend_rag.evaluation.samples import EvalCase

NAMES: Final = (
    "full",
    "prefix",
    "reuse",
    "blend",
    "map_reduce",
    "map_rerank",
    "langchain_map_reduce",
    "langchain_map_rerank",
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
}
_BLEND = re.compile(r"(?P<policy>[a-z_-]+)@(?P<ratio>[\d.]+)(?:@(?P<layers>\d+(?:\+\d+)*))?")


@dataclass(frozen=True)
class Reply:
    """A method's answer to one case. Times in seconds.

    Attributes:
        text: The answer.
        ttft_s: Time to first token.
        total_s: Time to the last one.
        load_s: Of the TTFT, how long the computation waited for stored KV.
        prompt_tokens: Tokens of the prompt; of all prompts for MapReduce and MapRerank.
        computed_tokens: Those that went through all layers.
        reused_tokens: Those whose stored KV was used.
        mode: ``blend`` or ``prefill``; ``requests`` for answers that took several.
        first_logits: Logits ``[vocab]`` of the first token, where the engine shows them.
    """

    text: str
    ttft_s: float
    total_s: float
    load_s: float
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    mode: str
    first_logits: torch.Tensor | None = None


class Method(ABC):
    """A way to answer.

    Attributes:
        name: As in results.
        label: As people read it.
        key: All that its answers depend on: answers of equal keys may be reused.
    """

    name: str
    label: str
    key: str

    @abstractmethod
    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """Answer; the case's chunks have been precomputed."""


class SettingsMethod(Method):
    """One request with given settings."""

    def __init__(self, name: str, label: str, settings: BlendSettings, free_loads: bool = False):
        """With ``free_loads`` the time spent waiting for stored KV is not counted (the paper's ideal prefix caching)."""
        self.name, self.label, self.settings, self._free_loads = name, label, settings, free_loads
        self.key = f"{sorted(asdict(settings).items())}{free_loads}"

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """See :class:`Method`."""
        seen: list[torch.Tensor] = []
        watched: Any = engine
        if hasattr(engine, "on_first_logits"):
            watched.on_first_logits = seen.append
        try:
            done = engine.generate(case.prompt, SamplingParams(case.max_tokens), self.settings)
        finally:
            if hasattr(engine, "on_first_logits"):
                watched.on_first_logits = None
        free = done.timings.load_s if self._free_loads else 0.0
        return Reply(
            done.text.strip(),
            done.timings.ttft_s - free,
            done.timings.total_s - free,
            done.timings.load_s - free,
            done.usage.prompt_tokens,
            done.usage.computed_tokens,
            done.usage.reused_tokens,
            done.mode,
            seen[0] if seen else None,
        )


class ChunkwiseMethod(Method):
    """Our MapReduce and MapRerank."""

    def __init__(self, kind: type[MapReduce] | type[MapRerank]):
        """Ask by ``kind``."""
        self._kind = kind
        self.name = self.key = kind.name
        self.label = LABELS[self.name]

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """See :class:`Method`."""
        asked = self._kind(engine, instruction=case.sample.instruction)
        done = asked.answer(case.sample.question, case.chunks, SamplingParams(case.max_tokens))
        return _reply(done)


def _reply(done: ChunkwiseAnswer) -> Reply:
    return Reply(
        done.text,
        done.ttft_s,
        done.total_s,
        0.0,
        done.prompt_tokens,
        done.computed_tokens,
        done.reused_tokens,
        "requests",
    )


class LangChainMethod(Method):
    """LangChain's own MapReduce and MapRerank chains, with their own prompts, over the same engine and chunks."""

    def __init__(self, name: str):
        """Run the chain behind ``name``."""
        self.name = self.key = name
        self.label = LABELS[name]

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """See :class:`Method`."""
        from cacheblend_rag.evaluation.baselines.langchain import map_reduce, map_rerank

        run = map_reduce if self.name == "langchain_map_reduce" else map_rerank
        done = run(engine, case.sample.question, case.chunks, SamplingParams(case.max_tokens))
        return _reply(done)


def make_methods(names: Sequence[str], blend: ResolvedSettings) -> list[Method]:
    """Return the methods called ``names``.

    Args:
        names: Of :data:`NAMES`, or ``POLICY@RATIO`` and ``POLICY@RATIO@LAYERS`` for further blends, as ``sink@0.1`` and
            ``hkvd@0.15@1+3``.
        blend: Settings of the method ``blend``.

    Raises:
        InputError: An unknown name, one given twice, or settings out of range.
    """
    found: list[Method] = []
    for name in names:
        if any(method.name == name for method in found):
            raise InputError(f"The method {name} is given twice.")
        found.append(_method(name, blend))
    if not found:
        raise InputError(f"Name at least one method: {', '.join(NAMES)}.")
    return found


def _method(name: str, blend: ResolvedSettings) -> Method:
    ends = {"full": (FULL_RECOMPUTE, False), "prefix": (PREFIX_CACHING, True), "reuse": (FULL_REUSE, False)}
    if name in ends:
        settings, free = ends[name]
        return SettingsMethod(name, LABELS[name], settings, free)
    if name == "blend":
        return SettingsMethod(name, f"blend, {blend.policy} {blend.ratio:.3g}", blend)
    if name in ("map_reduce", "map_rerank"):
        return ChunkwiseMethod(MapReduce if name == "map_reduce" else MapRerank)
    if name in ("langchain_map_reduce", "langchain_map_rerank"):
        return LangChainMethod(name)
    match = _BLEND.fullmatch(name)
    if match is None:
        raise InputError(
            f"There is no method {name!r}; known ones: {', '.join(NAMES)}, and further blends as POLICY@RATIO or "
            "POLICY@RATIO@LAYERS (sink@0.1, hkvd@0.15@1+3)."
        )
    layers = tuple(int(layer) for layer in match["layers"].split("+")) if match["layers"] else None
    settings = BlendSettings(float(match["ratio"]), match["policy"], layers)
    where = f", layers {match['layers']}" if layers else ""
    return SettingsMethod(name, f"{match['policy']} {settings.ratio:.3g}{where}", settings)
