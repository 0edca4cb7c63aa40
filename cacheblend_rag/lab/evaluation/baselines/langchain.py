"""Runs LangChain's own MapReduce and MapRerank chains on our engine, for comparison (paper figure 13).

The chains bring their own prompts, which their model must be able to follow. MapRerank's parser asks for a ``Score:`` line and
fails without one; here an answer without a score counts as one of score 0, or a single slip would end a whole evaluation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.lab.evaluation.baselines.chunkwise import ChunkwiseAnswer
from cacheblend_rag.prompts.chunk import Chunk

if TYPE_CHECKING:
    from langchain_core.language_models import BaseLLM


def map_reduce(
    engine: BlendEngine, question: str, chunks: Sequence[Chunk], sampling: SamplingParams | None = None
) -> ChunkwiseAnswer:
    """Answer through ``load_qa_chain(chain_type="map_reduce")``.

    Raises:
        InputError: There are no chunks.
        ModelError: langchain-classic is not installed.
    """
    log: list[Generation] = []
    room = engine.context_window - (sampling or SamplingParams()).max_tokens
    output = _run("map_reduce", engine, question, chunks, sampling, log, return_intermediate_steps=True, token_max=room)
    return _summed(output["output_text"].strip(), tuple(output["intermediate_steps"]), (), log, reduces=True)


def map_rerank(
    engine: BlendEngine, question: str, chunks: Sequence[Chunk], sampling: SamplingParams | None = None
) -> ChunkwiseAnswer:
    """Answer through ``load_qa_chain(chain_type="map_rerank")``; raises as :func:`map_reduce` does."""
    log: list[Generation] = []
    output = _run("map_rerank", engine, question, chunks, sampling, log, return_intermediate_steps=True)
    steps = output["intermediate_steps"]
    parts, scores = tuple(step["answer"] for step in steps), tuple(int(step["score"]) for step in steps)
    return _summed(output["output_text"].strip(), parts, scores, log, reduces=False)


def _run(
    kind: str,
    engine: BlendEngine,
    question: str,
    chunks: Sequence[Chunk],
    sampling: SamplingParams | None,
    log: list[Generation],
    **options: Any,
) -> dict[str, Any]:
    if not chunks:
        raise InputError(f"LangChain's {kind} needs at least one chunk.")
    try:
        from langchain_classic.chains.question_answering import load_qa_chain
        from langchain_classic.chains.question_answering.map_rerank_prompt import PROMPT
        from langchain_core.documents import Document
    except ImportError as error:
        raise ModelError("LangChain's chains need langchain-classic: pip install 'cacheblend-rag[eval]'.") from error
    if kind == "map_rerank":
        options["prompt"] = PROMPT.model_copy(update={"output_parser": _lenient_parser()})
    llm = _llm(engine, sampling or SamplingParams(), FULL_RECOMPUTE, log)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the whole package is deprecated; the paper's baselines are these chains
        chain = load_qa_chain(llm, chain_type=kind, **options)
        documents = [Document(page_content=chunk.text) for chunk in chunks]
        output: dict[str, Any] = chain.invoke({"input_documents": documents, "question": question})
    return output


def _lenient_parser() -> Any:
    from langchain_classic.output_parsers.regex import RegexParser

    class Lenient(RegexParser):
        def parse(self, text: str) -> dict[str, str]:
            found = super().parse(text)
            return found if found["score"].isdigit() else {"answer": text.strip(), "score": "0"}

    return Lenient(regex=r"(?s)(.*?)\s*Score:\s*(\d+)", output_keys=["answer", "score"], default_output_key="answer")


def _llm(engine: BlendEngine, sampling: SamplingParams, settings: BlendSettings, log: list[Generation]) -> BaseLLM:
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
                done = engine.generate(
                    prompt, SamplingParams(sampling.max_tokens, stop=tuple(stop or sampling.stop)), settings
                )
                log.append(done)
                texts.append([Text(text=done.text)])
            return LLMResult(generations=texts)

        def get_token_ids(self, text: str) -> list[int]:
            return list(engine.tokenizer.encode(text, add_special_tokens=False))

    return EngineLLM()


def _summed(
    text: str, parts: tuple[str, ...], scores: tuple[float, ...], log: Sequence[Generation], *, reduces: bool
) -> ChunkwiseAnswer:
    total = sum(done.timings.total_s for done in log)
    last = log[-1].timings
    return ChunkwiseAnswer(
        text,
        parts,
        scores,
        total - last.total_s + last.ttft_s if reduces else total,
        total,
        sum(done.usage.prompt_tokens for done in log),
        sum(done.usage.computed_tokens for done in log),
        sum(done.usage.reused_tokens for done in log),
    )
