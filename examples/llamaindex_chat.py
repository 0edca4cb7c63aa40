"""Converses over documents with LlamaIndex: ``python examples/llamaindex_chat.py [model]``.

Without a model it is the bundled one, over two bundled documents. It is too small to rewrite a question that refers to an earlier
one, so its questions are asked in full and the condensing step is left out.
"""

from __future__ import annotations

import asyncio
import sys

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index_cacheblend import (
    BundledEmbedding,
    CacheBlendChatEngine,
    CacheBlendLLM,
    collect_usage,
    precompute_nodes,
)

from cacheblend_rag import BlendEngine, TransformersEngine, bundled_corpus, bundled_questions

SOURCES = ("ship-logs.md", "town-chronicle.md")
TURNS = [f"Question: {q.question}" for q in bundled_questions() if q.source in SOURCES and q.kind == "single"][:3]


async def talk(engine: BlendEngine) -> list[str]:
    llm = CacheBlendLLM(engine=engine, max_tokens=24, stop=["\n"])
    files = [bundled_corpus() / name for name in SOURCES]
    documents = [Document(text=file.read_text(encoding="utf-8"), metadata={"file_name": file.name}) for file in files]
    nodes = SentenceSplitter(chunk_size=512, chunk_overlap=0, tokenizer=llm.tokenizer)(documents)
    precompute_nodes(engine, nodes)
    index = VectorStoreIndex(nodes, embed_model=BundledEmbedding())

    bundled = len(sys.argv) < 2
    chat = CacheBlendChatEngine.from_index(index, llm=llm, similarity_top_k=6, skip_condense=bundled)
    answers = []
    for turn in TURNS:
        with collect_usage() as calls:
            response = await chat.astream_chat(turn)
            print(f"{turn} ", end="")
            pieces = []
            async for piece in response.async_response_gen():
                print(piece, end="", flush=True)
                pieces.append(piece)
        usage = calls[-1].usage
        print(
            f"\n  {usage['prompt_tokens']} prompt tokens: {usage['reused_tokens']} from stored KV ({calls[-1].reason})"
        )
        answers.append("".join(pieces).strip())
    return answers


def main(engine: BlendEngine | None = None) -> list[str]:
    return asyncio.run(talk(engine or TransformersEngine(*sys.argv[1:2])))


if __name__ == "__main__":
    main()
