"""Overhears what LangChain's retrievers return: the model says what became of it, whatever stands between the two."""

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
"""Of all chains in this process. Runnables run in copies of their context, so it goes by the runs that callbacks are told of."""

_asking: ContextVar[UUID | None] = ContextVar("cacheblend_asking_run", default=None)


class RetrievalWatcher(BaseCallbackHandler):
    """Notes which runs there are, and what the retrievers among them return; one inside another counts for nothing."""

    run_inline = True

    @property
    def ignore_llm(self) -> bool:
        """Leave out texts' models, whose prompts LangChain would print for it, and all tokens."""
        return True

    def on_chain_start(self, *args: Any, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        """Note a run."""
        RETRIEVALS.begin(run_id, parent_run_id)

    on_tool_start = on_retriever_start = on_chain_start

    def on_chain_end(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        """Note that it has ended."""
        RETRIEVALS.end(run_id)

    on_chain_error = on_tool_end = on_tool_error = on_retriever_error = on_chain_end

    def on_chat_model_start(self, *args: Any, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        """Note the run that asks a chat model: its stream is not told of it."""
        _asking.set(parent_run_id)

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any) -> None:
        """Note what it has returned."""
        RETRIEVALS.note(run_id, retrieved(documents))
        RETRIEVALS.end(run_id)


def retrieved(documents: Sequence[Document]) -> list[tuple[str, ...]]:
    """Return documents as a :class:`RetrievalLog` takes them."""
    return [(text,) for document in documents if (text := document.page_content.strip())]


def run_of(manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> UUID | None:
    """Return the run that asked for a model's run, None where it is the outermost; LangChain hands chat streams no manager."""
    return _asking.get() if manager is None else manager.parent_run_id


_WATCHER = RetrievalWatcher()
_watcher: ContextVar[BaseCallbackHandler | None] = ContextVar("cacheblend_retrieval_watcher", default=_WATCHER)
register_configure_hook(_watcher, inheritable=True)
