"""Shows a working chain before and after: ``python examples/migrate_existing_chain.py``.

``before`` is a chain as it may stand in your code, here around a model that transformers runs in this process. ``after`` is
the same chain with two lines changed. Both are asked the same questions; the chunks' KV is computed once, by ``after``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from langchain_cacheblend import BundledEmbeddings, CacheBlendRetriever, ChatCacheBlend, ChunkSplitter
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.embeddings import Embeddings
from langchain_core.language_models.chat_models import BaseChatModel, SimpleChatModel
from langchain_core.messages import BaseMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag import QUESTIONS, load_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag import BlendEngine, TransformersEngine, bundled_corpus

MODEL = bundled_corpus().parent / "model"
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the notes."), ("human", "{context}\n\nQuestion: {input}")]
)


def before(llm: BaseChatModel, store: InMemoryVectorStore) -> Runnable[Any, Any]:
    retriever = store.as_retriever(search_kwargs={"k": 6})
    return create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))


def after(engine: BlendEngine, store: InMemoryVectorStore) -> Runnable[Any, Any]:
    llm = ChatCacheBlend(engine=engine, max_tokens=24)  # <-- 1: was your chat model
    retriever = CacheBlendRetriever(  # <-- 2: wraps your retriever
        base_retriever=store.as_retriever(search_kwargs={"k": 6}), engine=engine
    )
    return create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))


class YourChat(SimpleChatModel):
    """Stands for the chat model you have."""

    model: Any
    tokenizer: Any

    @property
    def _llm_type(self) -> str:
        return "yours"

    def _call(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        roles = {"human": "user", "ai": "assistant", "system": "system"}
        chat = [{"role": roles[message.type], "content": message.text} for message in messages]
        ids = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        with torch.inference_mode():
            out = self.model.generate(ids, max_new_tokens=24, do_sample=False)
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def main(engine: BlendEngine | None = None, embedding: Embeddings | None = None) -> list[tuple[str, str]]:
    engine = engine or TransformersEngine()
    store = InMemoryVectorStore(embedding or BundledEmbeddings())
    store.add_documents(ChunkSplitter(engine, max_tokens=512).split_documents(load_documents()))
    yours = YourChat(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(MODEL),
    )
    old, new = before(yours, store), after(engine, store)
    answers = []
    for question in QUESTIONS:
        print(question)
        said = []
        # The first time, `after` computes the KV of chunks it has not met and stores it; the second time it is there.
        for name, chain in (("before", old), ("after", new), ("again", new)):
            begin = time.perf_counter()
            said.append(chain.invoke({"input": question})["answer"].strip())
            print(f"  {name:<7} {said[-1]:<20} {1e3 * (time.perf_counter() - begin):5.0f} ms")
        answers.append((said[0], said[2]))
    return answers


if __name__ == "__main__":
    main()
