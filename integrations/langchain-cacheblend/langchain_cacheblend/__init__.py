"""Runs LangChain on CacheBlend engines: chains stay unchanged and reuse the stored KV of retrieved chunks."""

from langchain_cacheblend.chains import create_blended_documents_chain
from langchain_cacheblend.chat import ChatCacheBlend
from langchain_cacheblend.documents import BundledEmbeddings, ChunkSplitter
from langchain_cacheblend.llm import CacheBlendLLM
from langchain_cacheblend.retriever import CacheBlendRetriever
from langchain_cacheblend.vectorstore import CacheBlendVectorStore

__all__ = [
    "BundledEmbeddings",
    "CacheBlendLLM",
    "CacheBlendRetriever",
    "CacheBlendVectorStore",
    "ChatCacheBlend",
    "ChunkSplitter",
    "create_blended_documents_chain",
]
