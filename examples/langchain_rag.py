"""Answers from documents by LangChain's own chain on a CacheBlend engine: ``python examples/langchain_rag.py [model]``.

Without a model it is the bundled one, over two bundled documents.
"""

from __future__ import annotations

import sys

from langchain_cacheblend import CacheBlendRetriever, ChatCacheBlend, ChunkSplitter
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate

from cacheblend_rag import BlendEngine, TransformersEngine, bundled_corpus, bundled_questions

SOURCES = ("ship-logs.md", "town-chronicle.md")
QUESTIONS = [q.question for q in bundled_questions() if q.source in SOURCES and q.kind == "single"][:3]


def load_documents() -> list[Document]:
    files = [bundled_corpus() / name for name in SOURCES]
    return [Document(page_content=file.read_text(encoding="utf-8"), metadata={"source": file.name}) for file in files]


def main(engine: BlendEngine | None = None) -> list[str]:
    engine = engine or TransformersEngine(*sys.argv[1:2])

    # Indexing: each chunk's KV is computed once, here.
    chunks = ChunkSplitter(engine, max_tokens=512).split_documents(load_documents())
    retriever = CacheBlendRetriever.from_documents(chunks, engine=engine, k=6)

    # The chain is LangChain's, unchanged.
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from the notes."), ("human", "{context}\n\nQuestion: {input}")]
    )
    llm = ChatCacheBlend(engine=engine, max_tokens=24)
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt))

    answers = []
    for question in QUESTIONS:
        counter = UsageMetadataCallbackHandler()
        print(question, end=" ")
        pieces = []
        for event in chain.stream({"input": question}, config={"callbacks": [counter]}):
            if "answer" in event:
                print(event["answer"], end="", flush=True)
                pieces.append(event["answer"])
        (usage,) = counter.usage_metadata.values()
        details = usage["input_token_details"]
        print(
            f"\n  {usage['input_tokens']} prompt tokens: {details['cache_read']} from stored KV, "
            f"{details['recomputed']} recomputed"
        )
        answers.append("".join(pieces).strip())
    return answers


if __name__ == "__main__":
    main()
