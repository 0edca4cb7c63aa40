"""Runs LlamaIndex on CacheBlend engines: prompts reuse the stored KV of retrieved chunks."""

from llama_index_cacheblend.defaults import use_engine
from llama_index_cacheblend.embedding import BundledEmbedding
from llama_index_cacheblend.llm import CacheBlendLLM
from llama_index_cacheblend.nodes import node_text, precompute_nodes, register_nodes
from llama_index_cacheblend.precompute import CacheBlendPrecompute
from llama_index_cacheblend.prompt_helper import ChunkPreservingPromptHelper
from llama_index_cacheblend.query_engine import CacheBlendChatEngine, CacheBlendQueryEngine
from llama_index_cacheblend.responses import Call, UsageHandler, collect_usage
from llama_index_cacheblend.retriever import CacheBlendPostprocessor, CacheBlendRetriever
from llama_index_cacheblend.synthesizer import CacheBlendSynthesizer
from llama_index_cacheblend.templates import qa_template
from llama_index_cacheblend.vectorstore import CacheBlendVectorStore

__version__ = "0.1.0"

__all__ = [
    "BundledEmbedding",
    "CacheBlendChatEngine",
    "CacheBlendLLM",
    "CacheBlendPostprocessor",
    "CacheBlendPrecompute",
    "CacheBlendQueryEngine",
    "CacheBlendRetriever",
    "CacheBlendSynthesizer",
    "CacheBlendVectorStore",
    "Call",
    "ChunkPreservingPromptHelper",
    "UsageHandler",
    "collect_usage",
    "node_text",
    "precompute_nodes",
    "qa_template",
    "register_nodes",
    "use_engine",
]
