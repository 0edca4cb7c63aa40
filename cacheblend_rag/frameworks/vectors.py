"""Makes the embedding models of frameworks: one vector a text, of the model that comes with a package or of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cacheblend_rag.retrieval.embedding import Embedder


def open_embedder(name: str, query_encoder: str | Path | None, device: str | None = None) -> Embedder:
    """Load an embedding model.

    Args:
        name: A directory, or a sentence-transformers model of the hub.
        query_encoder: Directory that `cacheblend tune-retriever` has made for this model: it embeds the questions.
        device: As torch names it.

    Raises:
        ModelError: It cannot be loaded.
        StoreMismatchError: The query encoder was tuned for another model.
    """
    embedder = Embedder.load(name, device)
    return embedder if query_encoder is None else embedder.asked_by(query_encoder)


def text_vectors(embedder: Embedder, texts: Sequence[str]) -> list[list[float]]:
    """Return a unit vector for each text: of one longer than the model reads, the mean of its windows'."""
    means = [windows.mean(axis=0) for windows in embedder.texts(texts)]
    return [(mean / max(float(np.linalg.norm(mean)), 1e-12)).tolist() for mean in means]
