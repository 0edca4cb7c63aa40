"""Measures the overhead of LlamaIndex and ``llama_index_cacheblend`` on an engine call.

    python lab/benchmarks/framework_overhead_llamaindex.py [chunks] [calls]

The method is that of ``framework_overhead.py`` for LangChain: an engine that answers at once is called directly and
through the package, in turns. The synthesizers get six nodes and build the prompt. LlamaIndex's own prompt helper
splits and joins all context on each call; the row with the mock LLM shows this cost. ``use_engine`` replaces
LlamaIndex's helper with the package's.
"""

from __future__ import annotations

import sys
from typing import Any

from framework_overhead import CHUNK_TOKENS, QUESTION, SIX, differences, engine_with, report
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import MockLLM
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_cacheblend import CacheBlendLLM, CacheBlendSynthesizer, ChunkPreservingPromptHelper, qa_template

from cacheblend_rag import Chunk, SamplingParams, chat_prompt


def main(count: int = 100_000, calls: int = 200) -> None:
    engine, six = engine_with(count)
    context = "\n\n".join(chunk.text for chunk in six)
    messages = qa_template().format_messages(context_str=context, query_str=QUESTION)
    plain = [{"role": message.role.value, "content": message.content} for message in messages]
    prompt = chat_prompt(engine.tokenizer, plain, engine.registry)
    assert [s for s in prompt.segments if isinstance(s, Chunk)] == six
    print(
        f"{count} chunks registered, {SIX} of {CHUNK_TOKENS} tokens in the prompt ({len(context)} characters), {calls} calls"
    )

    llm = CacheBlendLLM(engine=engine, max_tokens=8)
    nodes = [NodeWithScore(node=TextNode(text=chunk.text), score=1.0) for chunk in six]
    ours = CacheBlendSynthesizer(llm=llm)
    theirs = get_response_synthesizer(llm=llm, text_qa_template=qa_template())
    helper = ChunkPreservingPromptHelper(engine, 8)  # use_engine() sets it as Settings.prompt_helper
    packed = get_response_synthesizer(llm=llm, text_qa_template=qa_template(), prompt_helper=helper)
    mock = get_response_synthesizer(llm=MockLLM(max_tokens=1), text_qa_template=qa_template())
    user = [ChatMessage(role="user", content=f"{context}\n\nQuestion: {QUESTION}")]

    def direct() -> Any:
        return engine.generate(prompt, SamplingParams(max_tokens=8))

    def synthesize(synthesizer: Any) -> Any:
        response = synthesizer.synthesize(QUESTION, nodes)
        assert len(response.source_nodes) == SIX
        return response

    raw = llm.chat(messages).raw
    assert raw["usage"]["reused_tokens"] == SIX * CHUNK_TOKENS, raw
    report("content match alone", *differences(lambda: None, lambda: engine.registry.find(context), calls))
    report("CacheBlendLLM.chat", *differences(direct, lambda: llm.chat(messages), calls))
    report("CacheBlendLLM.stream_chat", *differences(direct, lambda: list(llm.stream_chat(messages)), calls))
    report("CacheBlendLLM.complete", *differences(direct, lambda: llm.complete(user[0].content or ""), calls))
    report("CacheBlendSynthesizer", *differences(direct, lambda: synthesize(ours), calls))
    report("LlamaIndex's compact", *differences(direct, lambda: synthesize(theirs), calls))
    report("compact, mock LLM", *differences(lambda: None, lambda: synthesize(mock), calls))
    report("compact after use_engine()", *differences(direct, lambda: synthesize(packed), calls))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
