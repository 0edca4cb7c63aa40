"""The methods compared, by name, each answering a case on the same engine."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
import xxhash

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings, ResolvedSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.evaluation.baselines import MapReduce, MapRerank
from cacheblend_rag.evaluation.baselines.chunkwise import ChunkwiseAnswer
from cacheblend_rag.evaluation.baselines.reorder import DEFAULT_BUDGET, ReorderedPrompts
from cacheblend_rag.evaluation.samples import EvalCase
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt
from cacheblend_rag.prompts.templates import SEPARATOR

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
        chunks: The chunks in the prompt, where they are not the case's, in its order.
        reordered_full: What full recompute answers to a reordered prompt.
        background_tokens: Tokens that were computed behind the answer, for later prompts.
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
    chunks: Sequence[Chunk] | None = None
    reordered_full: str | None = None
    background_tokens: int = 0


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
        return _generate(engine, case.prompt, case.max_tokens, self.settings, self._free_loads)


def _generate(
    engine: BlendEngine, prompt: BlendPrompt, max_tokens: int, settings: BlendSettings, free_loads: bool = False
) -> Reply:
    seen: list[torch.Tensor] = []
    watched: Any = engine
    if hasattr(engine, "on_first_logits"):
        watched.on_first_logits = seen.append
    try:
        done = engine.generate(prompt, SamplingParams(max_tokens), settings)
    finally:
        if hasattr(engine, "on_first_logits"):
            watched.on_first_logits = None
    free = done.timings.load_s if free_loads else 0.0
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


class InTurn(Method):
    """A method whose answer to a case depends on the cases before it.

    What it depends on is worked out before the first answer, so that neither an interruption nor a repetition changes it.
    """

    @abstractmethod
    def begin(self, cases: Sequence[EvalCase]) -> None:
        """Take every case of the run, in turn; sets :attr:`key`."""


class ReorderMethod(InTurn):
    """Chunks in the order that an ordinary prefix cache hits, alone or with the other chunks blended.

    The cached prefix is computed in its context, without being timed, put into the prompt as one exact span, and deleted
    behind the answer, so that tokens and times are those of a prefill behind that very prefix. Loading it is free without a
    blend, as for ``prefix``. The header alone, without a chunk behind it, is not reused.

    A blended prompt leaves approximate KV, which must not serve as an exact prefix: what it adds to the prefix cache is computed
    once more behind the answer (:attr:`Reply.background_tokens`).
    """

    def __init__(self, name: str, label: str, blend: BlendSettings | None, budget: int = DEFAULT_BUDGET):
        """Blend what is not cached with ``blend``; None computes it. The prefix cache holds ``budget`` tokens."""
        self.name, self.label, self.key = name, label, name
        self._blend, self._budget = blend, budget
        self._planned: dict[str, tuple[list[Chunk], int]] = {}

    def begin(self, cases: Sequence[EvalCase]) -> None:
        """See :class:`InTurn`."""
        prompts = ReorderedPrompts(self._budget)
        for case in cases:
            chunks = prompts.order(case.chunks)
            self._planned[case.sample.id] = chunks, prompts.count_cached(chunks)
            prompts.serve(chunks)
        history = [[case.sample.id, [chunk.id for chunk in case.chunks]] for case in cases]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(history).encode())
        self.key = f"{self.name} {None if self._blend is None else sorted(asdict(self._blend).items())} {self._budget} {digest}"

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """See :class:`Method`."""
        chunks, count = self._planned[case.sample.id]
        prompt = rag_prompt(engine.tokenizer, chunks, case.sample.question, case.sample.instruction)
        settings, free = (PREFIX_CACHING, True) if self._blend is None else (self._blend, False)
        if count == 0 and self._blend is None:  # the first chunk's own KV is in the store, but not in the prefix cache
            settings = FULL_RECOMPUTE
        with _cached_prefix(engine, prompt, count) as with_prefix:
            reply = _generate(engine, with_prefix, case.max_tokens, settings, free)
        want = engine.generate(prompt, SamplingParams(case.max_tokens), FULL_RECOMPUTE)
        spans = engine.tokenize(prompt).spans
        # The first chunk is exact in a blend, whether it is cached or not.
        behind = 0 if self._blend is None else spans[-1].end - spans[max(count, 1) - 1].end
        return replace(reply, chunks=chunks, reordered_full=want.text.strip(), background_tokens=behind)


@contextmanager
def _cached_prefix(engine: BlendEngine, prompt: BlendPrompt, count: int) -> Iterator[BlendPrompt]:
    """Give the prompt with its first ``count`` chunks, and what stands between them, as one chunk with stored KV.

    Raises:
        ModelError: The template has changed the chunks, or the prefix does not fit the engine's store.
    """
    if count < 2:
        yield prompt  # a single chunk behind the header is in the store as it is
        return
    spans = engine.tokenize(prompt).spans
    places = [at for at, segment in enumerate(prompt.segments) if isinstance(segment, Chunk)]
    if len(spans) < count or spans[0].start != len(engine.header_ids) or places[0] != 1:
        raise ModelError(
            "The prompt does not begin with its header and chunks; a prefix cache cannot be measured on it."
        )
    text = SEPARATOR.join(span.chunk.text for span in spans[:count])
    ids = engine.tokenize(prompt).token_ids[spans[0].start : spans[count - 1].end]
    joined = Chunk(chunk_id(text), text, ids)
    failed = engine.precompute([joined]).failed
    if failed:
        raise ModelError(f"The prefix of {len(ids)} tokens cannot be kept: {failed[joined.id]}.")
    try:
        yield BlendPrompt((prompt.segments[0], joined, *prompt.segments[places[count - 1] + 1 :]))
    finally:
        engine.forget([joined.id])


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
    # The method is a blend, even where the profile says that there better were none.
    blend = replace(blend, reuse="chunks")
    how = f"{blend.policy} {_ratio(blend)}"
    named: dict[str, Callable[[], Method]] = {
        "full": lambda: SettingsMethod(name, LABELS[name], FULL_RECOMPUTE),
        "prefix": lambda: SettingsMethod(name, LABELS[name], PREFIX_CACHING, free_loads=True),
        "reuse": lambda: SettingsMethod(name, LABELS[name], FULL_REUSE),
        "blend": lambda: SettingsMethod(name, f"blend, {how}", blend),
        "map_reduce": lambda: ChunkwiseMethod(MapReduce),
        "map_rerank": lambda: ChunkwiseMethod(MapRerank),
        "langchain_map_reduce": lambda: LangChainMethod(name),
        "langchain_map_rerank": lambda: LangChainMethod(name),
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
