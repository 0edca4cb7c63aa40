"""Records the documents that LangChain's retrievers return, so that the model can report how prompts used them."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, BaseCallbackHandler, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from cacheblend_rag.frameworks import RetrievalLog

RETRIEVALS = RetrievalLog()
"""Retrievals of all chains in this process, by the callbacks' runs: runnables run in copies of their context."""

_asking: ContextVar[UUID | None] = ContextVar("cacheblend_asking_run", default=None)


class RetrievalWatcher(BaseCallbackHandler):
    """Records all runs and the documents of the retrievers among them; a retriever inside another does not count."""

    run_inline = True

    @property
    def ignore_llm(self) -> bool:
        """Return True, to ignore text models, for which LangChain would print prompts, and all token events."""
        return True

    def on_chain_start(self, *args: Any, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        """Record the start of a run."""
        RETRIEVALS.begin(run_id, parent_run_id)

    on_tool_start = on_retriever_start = on_chain_start

    def on_chain_end(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a run."""
        RETRIEVALS.end(run_id)

    on_chain_error = on_tool_end = on_tool_error = on_retriever_error = on_chain_end

    def on_chat_model_start(self, *args: Any, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        """Record the run that calls a chat model; LangChain passes no run to the model's stream."""
        _asking.set(parent_run_id)

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any) -> None:
        """Record the documents that a retriever returned."""
        RETRIEVALS.note(run_id, retrieved(documents))
        RETRIEVALS.end(run_id)


def retrieved(documents: Sequence[Document]) -> list[tuple[str, ...]]:
    """Return documents in the format of :class:`RetrievalLog`."""
    return [(text,) for document in documents if (text := document.page_content.strip())]


def run_of(manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> UUID | None:
    """Return the run that called a model, None if the model's run is the outermost.

    LangChain passes no manager to chat streams; then the run comes from the callbacks.
    """
    return _asking.get() if manager is None else manager.parent_run_id


_WATCHER = RetrievalWatcher()
_watcher: ContextVar[BaseCallbackHandler | None] = ContextVar("cacheblend_retrieval_watcher", default=_WATCHER)
register_configure_hook(_watcher, inheritable=True)
