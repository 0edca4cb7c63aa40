"""Tests that the classes do what the pages for LangChain's integration directory claim; the pages' code runs in `tests/docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.vectorstores import VectorStore

import langchain_cacheblend
from cacheblend_rag.errors import InputError
from langchain_cacheblend import CacheBlendVectorStore, ChatCacheBlend

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.mdx"))


def table(page: str, heading: str) -> dict[str, str]:
    """Return the only row of the table behind a heading, by column."""
    text = (DOCS / page).read_text("utf-8").partition(f"### {heading}\n")[2].strip()
    head, _, row = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n\n")[0].splitlines()[:3]
    )
    return dict(zip(head, row, strict=True))


def own(kind: type, name: str, base: type) -> bool:
    return getattr(kind, name) is not getattr(base, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_front_matter_required_by_the_directory(page: Path) -> None:
    assert re.match(r'---\ntitle: "[^"]+"\ndescription: "[^"]+"\n---\n\n', page.read_text("utf-8"))


def test_the_pages_name_every_class() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    classes = [name for name in langchain_cacheblend.__all__ if name[0].isupper()]
    assert [name for name in classes if f"`{name}`" not in text] == ["ChunkSplitter"]  # no LangChain component


def test_the_documented_features_of_the_chat_model_match_the_class(engine: Any) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=2)

    def accepts(kind: str) -> bool:
        block = {"type": kind, "base64": "AAAA", "mime_type": f"{kind}/any"}
        try:
            llm.invoke([HumanMessage([block])])
        except InputError:
            return False
        return True

    answer = llm.invoke("Hello", logprobs=True)
    found = {
        "Tool calling": own(ChatCacheBlend, "bind_tools", BaseChatModel),
        "Structured output": own(ChatCacheBlend, "with_structured_output", BaseChatModel),
        **{f"{kind.capitalize()} input": accepts(kind) for kind in ("image", "audio", "video")},
        "Token-level streaming": own(ChatCacheBlend, "_stream", BaseChatModel),
        "Native async": own(ChatCacheBlend, "_agenerate", BaseChatModel),
        "Token usage": answer.usage_metadata is not None,
        "Logprobs": bool(answer.response_metadata.get("logprobs")),
    }
    assert {name: "✅" if yes else "❌" for name, yes in found.items()} == table("chat.mdx", "Model features")
    claimed = table("chat.mdx", "Integration details")["Serializable"]
    assert (claimed == "✅") == ChatCacheBlend.is_lc_serializable()


def test_the_documented_features_of_the_vector_store_match_the_class() -> None:
    claimed = table("retriever.mdx", "Vector store features")
    methods = {
        "Delete by ID": "delete",
        "Search by vector": "similarity_search_by_vector",
        "Search with score": "similarity_search_with_score",
        "Async": "aadd_documents",
        "IDs in add documents": "add_documents",
    }
    for feature, method in methods.items():
        assert (claimed[feature] == "✅") == own(CacheBlendVectorStore, method, VectorStore), feature
