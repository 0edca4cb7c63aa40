"""The public names: the one list of them, which type checkers and editors read, and `__init__.py` when it is imported."""

from cacheblend_rag.blending.outcome import ChunkLoad as ChunkLoad
from cacheblend_rag.blending.outcome import ChunkOutcome as ChunkOutcome
from cacheblend_rag.blending.outcome import PromptOutcome as PromptOutcome
from cacheblend_rag.blending.outcome import Usage as Usage
from cacheblend_rag.blending.policies import Candidates as Candidates
from cacheblend_rag.blending.policies import SelectionPolicy as SelectionPolicy
from cacheblend_rag.blending.settings import BlendSettings as BlendSettings
from cacheblend_rag.demo.bundle import bundled_corpus as bundled_corpus
from cacheblend_rag.demo.bundle import bundled_questions as bundled_questions
from cacheblend_rag.engines.base import BlendEngine as BlendEngine
from cacheblend_rag.engines.remote import RemoteEngine as RemoteEngine
from cacheblend_rag.engines.results import Generation as Generation
from cacheblend_rag.engines.results import PrecomputeReport as PrecomputeReport
from cacheblend_rag.engines.results import StreamEvent as StreamEvent
from cacheblend_rag.engines.results import Timings as Timings
from cacheblend_rag.engines.sampling import SamplingParams as SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine as TransformersEngine
from cacheblend_rag.engines.vllm import VLLMEngine as VLLMEngine
from cacheblend_rag.errors import CacheBlendError as CacheBlendError
from cacheblend_rag.errors import InputError as InputError
from cacheblend_rag.errors import ModelError as ModelError
from cacheblend_rag.errors import ServerError as ServerError
from cacheblend_rag.errors import StoreError as StoreError
from cacheblend_rag.prompts.chunk import Chunk as Chunk
from cacheblend_rag.prompts.chunk import chunk_id as chunk_id
from cacheblend_rag.prompts.chunk import make_chunk as make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt as BlendPrompt
from cacheblend_rag.prompts.prompt import chat_prompt as chat_prompt
from cacheblend_rag.prompts.prompt import text_prompt as text_prompt
from cacheblend_rag.rag.pipeline import RagPipeline as RagPipeline
from cacheblend_rag.rag.results import Turn as Turn
from cacheblend_rag.retrieval.chunking import split_text as split_text
from cacheblend_rag.retrieval.index import ChunkIndex as ChunkIndex
from cacheblend_rag.store import KVStore as KVStore
from cacheblend_rag.store import open_store as open_store

__version__: str
