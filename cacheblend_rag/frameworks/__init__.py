"""Serves the LangChain and LlamaIndex packages: holds their common parts, and re-exports names of other folders.

Both packages need nearly all names as soon as they are imported, so no import here is lazy.
"""

from cacheblend_rag.blending.settings import Quality as Quality
from cacheblend_rag.engines.base import Request as Request
from cacheblend_rag.engines.thoughts import Parts as Parts
from cacheblend_rag.frameworks.asking import CALL_OPTIONS as CALL_OPTIONS
from cacheblend_rag.frameworks.asking import DEFAULT_MAX_TOKENS as DEFAULT_MAX_TOKENS
from cacheblend_rag.frameworks.asking import Asked as Asked
from cacheblend_rag.frameworks.asking import ask as ask
from cacheblend_rag.frameworks.asking import check_given as check_given
from cacheblend_rag.frameworks.asking import options_of as options_of
from cacheblend_rag.frameworks.asking import with_usual_names as with_usual_names
from cacheblend_rag.frameworks.calls import NO_TOOLS as NO_TOOLS
from cacheblend_rag.frameworks.calls import CallsRead as CallsRead
from cacheblend_rag.frameworks.calls import ToolsAsked as ToolsAsked
from cacheblend_rag.frameworks.calls import check_shown as check_shown
from cacheblend_rag.frameworks.calls import new_call_id as new_call_id
from cacheblend_rag.frameworks.calls import openai_call as openai_call
from cacheblend_rag.frameworks.calls import required_tool as required_tool
from cacheblend_rag.frameworks.calls import tools_asked as tools_asked
from cacheblend_rag.frameworks.existing import ExistingEstimate as ExistingEstimate
from cacheblend_rag.frameworks.existing import estimate_existing as estimate_existing
from cacheblend_rag.frameworks.existing import open_embedder as open_embedder
from cacheblend_rag.frameworks.existing import precompute_existing as precompute_existing
from cacheblend_rag.frameworks.existing import text_vectors as text_vectors
from cacheblend_rag.frameworks.retrieved import OnMiss as OnMiss
from cacheblend_rag.frameworks.retrieved import RetrievalLog as RetrievalLog
from cacheblend_rag.frameworks.sharing import EngineName as EngineName
from cacheblend_rag.frameworks.sharing import check_engine as check_engine
from cacheblend_rag.frameworks.sharing import shared_engine as shared_engine
from cacheblend_rag.frameworks.uses import StoreChunks as StoreChunks
from cacheblend_rag.frameworks.uses import owner_of as owner_of
from cacheblend_rag.frameworks.uses import read_ahead as read_ahead
from cacheblend_rag.frameworks.uses import uses_of as uses_of
from cacheblend_rag.prompts.chunk import encoder_for as encoder_for
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION as DEFAULT_INSTRUCTION
from cacheblend_rag.prompts.prompt import chunk_of as chunk_of
from cacheblend_rag.prompts.registry import ChunkRegistry as ChunkRegistry
from cacheblend_rag.prompts.templates import reads_tools as reads_tools
from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS as DEFAULT_CHUNK_TOKENS
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING as DEFAULT_EMBEDDING
from cacheblend_rag.retrieval.embedding import Embedder as Embedder
