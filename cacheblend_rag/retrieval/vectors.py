"""Keeps the table of vectors by their ids: these grow, and none is used twice, so a higher id is a newer vector."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cacheblend_rag.retrieval.embedding import Vectors
from cacheblend_rag.retrieval.sqlite import SQLiteFile, checksum

_PAGE = 1 << 15
_HIGHEST = (1 << 63) - 1

VECTOR_TABLES = """
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk INTEGER NOT NULL REFERENCES chunks ON DELETE CASCADE,
    vector BLOB NOT NULL,
    checksum BLOB NOT NULL
);
CREATE INDEX vectors_of_chunk ON vectors (chunk);
"""
PACKED_TABLE = (
    "CREATE TABLE packed (file TEXT NOT NULL, checksum BLOB NOT NULL, last INTEGER NOT NULL, vectors INTEGER NOT NULL)"
)


@dataclass(frozen=True)
class PackedVectors:
    """Describes a file of packed vectors (``search.py``).

    Attributes:
        file: Its name, in the index's directory.
        checksum: Of its contents.
        last: The highest id in it.
        vectors: How many are in it.
    """

    file: str
    checksum: bytes
    last: int
    vectors: int


class VectorTable:
    """Vectors of an index's chunks, float32 of unit length, each with a checksum. Changes need a transaction around them."""

    def __init__(self, file: SQLiteFile):
        self._file = file

    def put(self, row: int, vectors: Vectors) -> None:
        """Enter the vectors ``[windows, dimension]`` of the chunk in ``row``, which has none."""
        stored = [vector.astype("<f4").tobytes() for vector in vectors]
        query = "INSERT INTO vectors (chunk, vector, checksum) VALUES (?, ?, ?)"
        self._file.db.executemany(query, ((row, data, checksum(data)) for data in stored))

    def replace(self, vectors: Iterable[tuple[int, Vectors]]) -> None:
        """Remove all vectors and enter those of these chunks (by row), ``[windows, dimension]`` each."""
        self._file.db.execute("DELETE FROM packed")
        self._file.db.execute("DELETE FROM vectors")
        for row, windows in vectors:
            self.put(row, windows)

    def embedded(self, names: Iterable[str]) -> set[str]:
        """Return which of these chunks are stored with their vectors."""
        # CROSS: the names first, or SQLite may go through all chunks.
        query = (
            "SELECT c.name FROM json_each(?) j CROSS JOIN chunks c ON c.name = j.value "
            "WHERE EXISTS (SELECT 1 FROM vectors v WHERE v.chunk = c.id)"
        )
        return {name for (name,) in self._file.rows(query, json.dumps(list(names)))}

    def of(self, names: Iterable[str]) -> dict[str, Vectors]:
        """Return the vectors ``[windows, dimension]`` of these chunks by id; those without any are left out.

        Raises:
            StoreError: One does not match its checksum.
        """
        query = (
            "SELECT c.name, v.vector, v.checksum FROM json_each(?) j CROSS JOIN chunks c ON c.name = j.value "
            "JOIN vectors v ON v.chunk = c.id ORDER BY v.id"
        )
        found: dict[str, list[Vectors]] = {}
        for name, data, stored in self._file.rows(query, json.dumps(list(dict.fromkeys(names)))):
            found.setdefault(name, []).append(self._decoded([(data, stored)])[0])
        return {name: np.stack(windows) for name, windows in found.items()}

    def between(self, after: int, last: int = _HIGHEST) -> Iterator[tuple[npt.NDArray[np.int64], Vectors]]:
        """Yield ids and vectors ``[vectors, dimension]`` behind the id ``after``, up to ``last``, in the order of the ids.

        Raises:
            StoreError: One does not match its checksum or those around it.
        """
        query = "SELECT id, vector, checksum FROM vectors WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
        while rows := self._file.rows(query, after, last, _PAGE):
            after = rows[-1][0]
            yield np.array([row[0] for row in rows], np.int64), self._decoded([row[1:] for row in rows])

    def sample(self, most: int, last: int) -> Vectors:
        """Return up to ``most`` vectors with ids up to ``last``, chosen evenly: ``[vectors, dimension]``."""
        query = "SELECT vector, checksum FROM vectors WHERE id <= ? AND id % ? = 0 ORDER BY id LIMIT ?"
        return self._decoded(self._file.rows(query, last, max(self.count(last=last) // most, 1), most))

    def nearest(self, ids: Iterable[int], question: Vectors) -> list[tuple[int, float]]:
        """Return row and cosine similarity of the chunks of these vectors, best first; vectors that are gone are left out.

        A chunk with several of them has the similarity of the best one.
        """
        query = "SELECT v.chunk, v.vector, v.checksum FROM json_each(?) j CROSS JOIN vectors v ON v.id = j.value"
        rows = self._file.rows(query, json.dumps([int(i) for i in ids]))
        if not rows:
            return []
        scores = self._decoded([row[1:] for row in rows]) @ question
        best: dict[int, float] = {}
        for place in np.argsort(-scores, kind="stable").tolist():
            best.setdefault(rows[place][0], float(scores[place]))
        return list(best.items())

    def count(self, after: int = 0, last: int = _HIGHEST) -> int:
        """Return the number of vectors with ids behind ``after``, up to ``last``."""
        return int(self._file.rows("SELECT count(*) FROM vectors WHERE id > ? AND id <= ?", after, last)[0][0])

    def last(self) -> int:
        """Return the highest id, 0 where there is no vector."""
        return int(self._file.rows("SELECT ifnull(max(id), 0) FROM vectors")[0][0])

    def packed(self) -> PackedVectors | None:
        """Return the file of packed vectors that belongs to the table as it is."""
        return next((PackedVectors(*row) for row in self._file.rows("SELECT * FROM packed")), None)

    def put_packed(self, packed: PackedVectors) -> None:
        """Note the file of packed vectors, in place of an earlier one."""
        self._file.db.execute("DELETE FROM packed")
        query = "INSERT INTO packed (file, checksum, last, vectors) VALUES (?, ?, ?, ?)"
        self._file.db.execute(query, (packed.file, packed.checksum, packed.last, packed.vectors))

    def _decoded(self, rows: Sequence[tuple[bytes, bytes]]) -> Vectors:
        length = len(rows[0][0]) if rows else 0
        for data, stored in rows:
            if checksum(data) != stored or len(data) != length:
                raise self._file.damaged("a vector fails its checksum; rebuilding the index repairs that")
        values = np.frombuffer(b"".join(data for data, _ in rows), "<f4")
        return values.reshape(len(rows), length // 4).astype(np.float32, copy=False)
