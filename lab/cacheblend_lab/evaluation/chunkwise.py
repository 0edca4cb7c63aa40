"""Asks every chunk separately, as a baseline: MapReduce and MapRerank, without a framework and by LangChain's chains.

No chunk sees another chunk, which lowers quality. Every chunk is prefilled anew, which takes time (paper section 7.2,
figure 13). LangChain's chains have their own prompts, which the model must be able to follow. MapRerank's parser asks
for a ``Score:`` line and fails without it. Here an answer without a score counts as score 0, because otherwise a single
such answer would end a whole evaluation.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from cacheblend_lab.evaluation.method import Method, Reply
from cacheblend_lab.samples import EvalCase
from cacheblend_rag.blending.settings import FULL_RECOMPUTE
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import generate_answer
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt

if TYPE_CHECKING:
    from langchain_core.language_models import BaseLLM

_SCORE = re.compile(r"score\s*:?\s*(\d{1,3})", re.IGNORECASE)
_SCORE_REQUEST = "\nAfter the answer, write 'Score:' and how sure you are of it, from 0 to 100."


@runtime_checkable
class _ShowsLogits(Protocol):
    on_first_logits: Callable[[torch.Tensor], None] | None


class Chunkwise(Method):
    """Answers by several requests without reusing stored KV, as the paper's baseline does."""

    def __init__(self, name: str, label: str):
        """Set name, label and key."""
        self.name, self.label, self.key = name, label, name


class MapReduce(Chunkwise):
    """Answers from each chunk, then answers again from these answers."""

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        found = _map(engine, case)
        prompt = _reduce_prompt(engine, case, [done.text.strip() for done in found])
        last = generate_answer(engine, prompt, SamplingParams(case.max_tokens), FULL_RECOMPUTE)
        return Reply.of_requests(last.text.strip(), [*found, last], last)


class MapRerank(Chunkwise):
    """Answers from each chunk with a score of the model's certainty, and returns the answer with the highest score.

    The score is the probability of the answer's first token if the engine shows it. With other engines the model is
    asked to write a score behind its answer; an answer without a score gets 0. Among equal scores the earlier chunk's
    answer wins.
    """

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        found, scored = self.ask(engine, case)
        return Reply.of_requests(max(scored, key=lambda each: each[1])[0], found)

    def ask(self, engine: BlendEngine, case: EvalCase) -> tuple[list[Generation], list[tuple[str, float]]]:
        """Return the generation of each chunk's request, and each chunk's answer with its score, 0 to 100."""
        if not isinstance(engine, _ShowsLogits):
            found = _map(engine, case, _SCORE_REQUEST)
            return found, [_split_score(done.text) for done in found]
        sure: list[float] = []
        engine.on_first_logits = lambda logits: sure.append(100 * float(logits.float().softmax(-1).max()))
        try:
            found = _map(engine, case)
        finally:
            engine.on_first_logits = None
        return found, [(done.text.strip(), score) for done, score in zip(found, sure, strict=True)]


def _map(engine: BlendEngine, case: EvalCase, request: str = "") -> list[Generation]:
    sample, sampling = case.sample, SamplingParams(case.max_tokens)
    prompts = (
        rag_prompt(engine.tokenizer, [chunk], sample.question + request, sample.instruction) for chunk in case.chunks
    )
    return [generate_answer(engine, prompt, sampling, FULL_RECOMPUTE) for prompt in prompts]


def _reduce_prompt(engine: BlendEngine, case: EvalCase, parts: Sequence[str]) -> BlendPrompt:
    notes = "\n".join(f"- {part}" for part in parts if part)
    head, *rest = rag_prompt(engine.tokenizer, (), case.sample.question, case.sample.instruction).segments
    # The answers are new text every time, and therefore replace the chunks as plain text.
    return BlendPrompt((head, f"{notes}\n\n", *rest))


def _split_score(text: str) -> tuple[str, float]:
    matches = list(_SCORE.finditer(text))
    if not matches:
        return text.strip(), 0
    return text[: matches[-1].start()].strip(), min(100, int(matches[-1][1]))


class LangChainMethod(Chunkwise):
    """Answers by LangChain's own MapReduce and MapRerank chains, with their own prompts, over the same engine and chunks."""

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """Answer through ``load_qa_chain``; raises ModelError if langchain-classic is not installed."""
        try:
            from langchain_classic.chains.question_answering import load_qa_chain
            from langchain_classic.chains.question_answering.map_rerank_prompt import PROMPT
            from langchain_core.documents import Document
        except ImportError as error:
            raise ModelError(
                "LangChain's chains need langchain-classic: pip install 'cacheblend-lab[eval]'."
            ) from error
        kind = self.name.removeprefix("langchain_")
        options: dict[str, Any] = {"token_max": engine.context_window - case.max_tokens}
        if kind == "map_rerank":
            options = {"prompt": PROMPT.model_copy(update={"output_parser": _lenient_parser()})}
        log: list[Generation] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the whole package is deprecated; the paper's baselines are these chains
            chain = load_qa_chain(_llm(engine, case.max_tokens, log), chain_type=kind, **options)
            documents = [Document(page_content=chunk.text) for chunk in case.chunks]
            output = chain.invoke({"input_documents": documents, "question": case.sample.question})
        return Reply.of_requests(output["output_text"].strip(), log, log[-1] if kind == "map_reduce" else None)


def _lenient_parser() -> Any:
    from langchain_classic.output_parsers.regex import RegexParser

    class Lenient(RegexParser):
        def parse(self, text: str) -> dict[str, str]:
            found = super().parse(text)
            return found if found["score"].isdigit() else {"answer": text.strip(), "score": "0"}

    return Lenient(regex=r"(?s)(.*?)\s*Score:\s*(\d+)", output_keys=["answer", "score"], default_output_key="answer")


def _llm(engine: BlendEngine, max_tokens: int, log: list[Generation]) -> BaseLLM:
    from langchain_core.language_models import BaseLLM
    from langchain_core.outputs import Generation as Text
    from langchain_core.outputs import LLMResult

    class EngineLLM(BaseLLM):
        @property
        def _llm_type(self) -> str:
            return "cacheblend-baseline"

        def _generate(
            self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **_: Any
        ) -> LLMResult:
            texts = []
            for prompt in prompts:
                done = engine.generate(prompt, SamplingParams(max_tokens, stop=tuple(stop or ())), FULL_RECOMPUTE)
                log.append(done)
                texts.append([Text(text=done.text)])
            return LLMResult(generations=texts)

        def get_token_ids(self, text: str) -> list[int]:
            return list(engine.tokenizer.encode(text, add_special_tokens=False))

    return EngineLLM()
