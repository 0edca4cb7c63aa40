"""Answers from documents by LlamaIndex's own query engine on a CacheBlend engine: ``python examples/llamaindex_rag.py [model]``.

Without a model it is the bundled one, over two bundled documents.
"""

from __future__ import annotations

import sys

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import PrevNextNodePostprocessor
from llama_index_cacheblend import BundledEmbedding, CacheBlendPrecompute, collect_usage, qa_template, use_engine

from cacheblend_rag import BlendEngine, TransformersEngine, bundled_corpus, bundled_questions

SOURCES = ("ship-logs.md", "town-chronicle.md")
QUESTIONS = [q.question for q in bundled_questions() if q.source in SOURCES and q.kind == "single"][:3]


def main(engine: BlendEngine | None = None) -> list[str]:
    engine = engine or TransformersEngine(*sys.argv[1:2])

    # LLM, tokenizer and prompt helper for all that follows; the embedding model comes with the package.
    use_engine(engine, max_tokens=24, stop=["\n"])
    Settings.embed_model = BundledEmbedding()

    # Indexing: each chunk's KV is computed once, here. The splitter counts the model's own tokens.
    files = [bundled_corpus() / name for name in SOURCES]
    documents = [Document(text=file.read_text(encoding="utf-8"), metadata={"file_name": file.name}) for file in files]
    splitter = SentenceSplitter(chunk_size=512, chunk_overlap=0)
    nodes = IngestionPipeline(transformations=[splitter, CacheBlendPrecompute(engine)]).run(documents=documents)
    index = VectorStoreIndex(nodes)

    # The query engine is LlamaIndex's, unchanged.
    neighbours = PrevNextNodePostprocessor(docstore=index.docstore, num_nodes=1, mode="next")
    query_engine = index.as_query_engine(
        similarity_top_k=4, node_postprocessors=[neighbours], text_qa_template=qa_template(), streaming=True
    )

    answers = []
    for question in QUESTIONS:
        print(question, end=" ")
        with collect_usage() as calls:
            response = query_engine.query(question)
            pieces = []
            for piece in response.response_gen:
                print(piece, end="", flush=True)
                pieces.append(piece)
        usage = calls[-1].usage
        print(
            f"\n  {usage['prompt_tokens']} prompt tokens: {usage['reused_tokens']} from stored KV, "
            f"{usage['recomputed_tokens']} recomputed ({calls[-1].reason})"
        )
        answers.append("".join(pieces).strip())
    return answers


if __name__ == "__main__":
    main()
