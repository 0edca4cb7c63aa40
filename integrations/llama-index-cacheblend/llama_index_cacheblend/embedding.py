"""Embeds with the retrieval model that comes with cacheblend-rag, without download or account: `BundledEmbedding`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from cacheblend_rag.frameworks import DEFAULT_EMBEDDING, Embedder, open_embedder, text_vectors


class BundledEmbedding(BaseEmbedding):
    """Embeds with all-MiniLM-L6-v2, or with another sentence-transformers model by directory or name.

    A text longer than the model's limit (256 word pieces, half a chunk) is embedded window by window; its vector is the
    mean of the windows' vectors.

    Example:
        Embed an index's nodes with the bundled model::

            index = VectorStoreIndex(nodes, embed_model=BundledEmbedding())
    """

    _embedder: Embedder = PrivateAttr()

    def __init__(
        self,
        model_name: str = DEFAULT_EMBEDDING,
        device: str | None = None,
        query_encoder: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        """Load the model.

        Args:
            model_name: Directory or name.
            device: Device in torch's notation, such as ``"cuda:0"``.
            query_encoder: Directory that `cacheblend tune-retriever` has made for this model: it embeds the questions.
            kwargs: Arguments of LlamaIndex's base class.

        Raises:
            ModelError: The model cannot be loaded.
            StoreMismatchError: The query encoder was tuned for another model.
        """
        super().__init__(model_name=model_name, **kwargs)
        self._embedder = open_embedder(model_name, query_encoder, device)

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the class."""
        return "CacheBlendBundledEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._embedder.question(query).tolist()
        return vector

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return text_vectors(self._embedder, texts)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
