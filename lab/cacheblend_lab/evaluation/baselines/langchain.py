"""Runs LangChain's own MapReduce and MapRerank chains on the engine, for comparison (paper figure 13).

The chains have their own prompts, which the model must be able to follow. MapRerank's parser asks for a ``Score:`` line
and fails without it. Here an answer without a score counts as score 0, because otherwise a single such answer would end
a whole evaluation.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from cacheblend_lab.evaluation.baselines.chunkwise import Chunkwise
from cacheblend_lab.evaluation.method import Reply
from cacheblend_lab.samples import EvalCase
from cacheblend_rag.blending.settings import FULL_RECOMPUTE
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ModelError

if TYPE_CHECKING:
    from langchain_core.language_models import BaseLLM


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
