"""Serves the packages for LangChain and LlamaIndex: it holds what both need, and names what they use of the other folders.

They use nearly all of it as soon as they are imported, so nothing here waits for its first use.
"""

from cacheblend_rag.blending.settings import Reuse as Reuse
from cacheblend_rag.engines.base import Request as Request
from cacheblend_rag.engines.results import openai_logprobs as openai_logprobs
from cacheblend_rag.frameworks.altered import RetrievalReport as RetrievalReport
from cacheblend_rag.frameworks.altered import explain_miss as explain_miss
from cacheblend_rag.frameworks.calls import CallReader as CallReader
from cacheblend_rag.frameworks.calls import CallsRead as CallsRead
from cacheblend_rag.frameworks.calls import call_schema as call_schema
from cacheblend_rag.frameworks.calls import required_tool as required_tool
from cacheblend_rag.frameworks.existing import ExistingEstimate as ExistingEstimate
from cacheblend_rag.frameworks.existing import estimate_existing as estimate_existing
from cacheblend_rag.frameworks.existing import precompute_existing as precompute_existing
from cacheblend_rag.frameworks.misses import OnMiss as OnMiss
from cacheblend_rag.frameworks.misses import checked_on_miss as checked_on_miss
from cacheblend_rag.frameworks.misses import find_retrieved as find_retrieved
from cacheblend_rag.frameworks.retrieved import RetrievalLog as RetrievalLog
from cacheblend_rag.frameworks.sampling import DEFAULT_MAX_TOKENS as DEFAULT_MAX_TOKENS
from cacheblend_rag.frameworks.sampling import SAMPLING_OPTIONS as SAMPLING_OPTIONS
from cacheblend_rag.frameworks.sampling import sampling_of as sampling_of
from cacheblend_rag.frameworks.sampling import with_usual_names as with_usual_names
from cacheblend_rag.frameworks.sharing import EngineName as EngineName
from cacheblend_rag.frameworks.sharing import shared_engine as shared_engine
from cacheblend_rag.frameworks.uses import ChunkUses as ChunkUses
from cacheblend_rag.frameworks.uses import uses_of as uses_of
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION as DEFAULT_INSTRUCTION
from cacheblend_rag.prompts.prompt import chunk_of as chunk_of
from cacheblend_rag.prompts.registry import ChunkRegistry as ChunkRegistry
from cacheblend_rag.prompts.templates import reads_tools as reads_tools
from cacheblend_rag.prompts.tokens import encoder_for as encoder_for
from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS as DEFAULT_CHUNK_TOKENS
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING as DEFAULT_EMBEDDING
from cacheblend_rag.retrieval.embedding import Embedder as Embedder
