"""Questions answered by Celery workers over one store: ``python examples/celery_workers.py [folder]``.

Models are given by name: each worker opens its own with its first question, and all of them read the KV that was stored when the
documents were indexed. Queue and results are files here; give Celery your broker instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from celery import Celery, group
from langchain_cacheblend import (
    BundledEmbeddings,
    CacheBlendRetriever,
    CacheBlendVectorStore,
    ChatCacheBlend,
    ChunkSplitter,
)
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag import QUESTIONS, load_documents

FOLDER = Path(os.environ.setdefault("NOTES_FOLDER", sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
INDEX = FOLDER / "index.json"

app = Celery("celery_workers")
app.conf.update(
    broker_url="filesystem://",
    broker_transport_options={
        "data_folder_in": str(FOLDER / "queue"),
        "data_folder_out": str(FOLDER / "queue"),
        "control_folder": str(FOLDER / "control"),
    },
    result_backend=f"file://{FOLDER / 'results'}",
)


def model() -> ChatCacheBlend:
    return ChatCacheBlend(model="bundled", store=str(FOLDER / "kv"), max_tokens=24)


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


@cache
def chain() -> Runnable[str, Any]:
    """Made once in each worker, when it is first needed: a model does not survive a fork."""
    llm = model()
    found = InMemoryVectorStore.load(str(INDEX), BundledEmbeddings()).as_retriever(search_kwargs={"k": 6})
    retriever = CacheBlendRetriever(base_retriever=found, engine=llm.engine)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from the notes."), ("human", "{context}\n\nQuestion: {question}")]
    )
    return {"context": retriever | joined, "question": RunnablePassthrough()} | prompt | llm


@app.task
def answer(question: str) -> dict[str, Any]:
    message = chain().invoke(question)
    return {"answer": message.text.strip(), "worker": os.getpid(), "usage": message.usage_metadata}


def index() -> None:
    """Compute each chunk's KV once, and write the vectors where the workers look for them."""
    engine = model().engine
    store = CacheBlendVectorStore(InMemoryVectorStore(BundledEmbeddings()), engine)
    store.add_documents(ChunkSplitter(engine, max_tokens=512).split_documents(load_documents()))
    store.base.dump(str(INDEX))
    engine.close()


def main() -> list[dict[str, Any]]:
    for folder in ("queue", "results"):
        (FOLDER / folder).mkdir(exist_ok=True)
    index()
    command = [
        sys.executable,
        "-m",
        "celery",
        "--app",
        "celery_workers",
        "worker",
        "--concurrency",
        "2",
        "--loglevel",
        "ERROR",
    ]
    worker = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
    try:
        answers = group(answer.s(question) for question in QUESTIONS)().get(timeout=300)
    finally:
        worker.terminate()
        worker.wait()
    for question, got in zip(QUESTIONS, answers, strict=True):
        read = got["usage"]["input_token_details"]["cache_read"]
        print(f"{question} {got['answer']}")
        print(f"  worker {got['worker']}: {read} of {got['usage']['input_tokens']} tokens from stored KV")
    return answers


if __name__ == "__main__":
    main()
