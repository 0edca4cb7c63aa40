"""Computes a question's similarity to its candidate chunks, and searches a few chunks while their encoder is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch

from cacheblend_lab.tuning.judging import Texts, Vectors
from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_lab.tuning.students import Both
from cacheblend_lab.tuning.teacher import Judged
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex

NEAREST: Final = 32
"""Chunks taken for each question, besides the known relevant chunks."""


class Rehearsal:
    """Holds the chunks nearest to some questions in the index and their relevant chunks, embedded by the student."""

    def __init__(self, index: ChunkIndex, questions: Sequence[TuningQuestion], embedder: Embedder, student: Both):
        """Choose the chunks; :meth:`embed` must be called before a search."""
        self._embedder = Embedder(embedder.name, student.model)
        self._student = student
        names = dict.fromkeys(name for question in questions for name in sorted(index.known(sorted(question.relevant))))
        for vector in embedder.questions([question.text for question in questions]):
            names.update(dict.fromkeys(name for name, _ in index.nearest(vector, NEAREST)))
        self._chunks = {name: index.chunk(name) for name in names}
        self._names = list(names)

    def embed(self) -> None:
        """Embed all chunks by the student's current weights."""
        self._student.model.eval()
        self._texts = Texts(self._embedder.texts([self._chunks[name].text for name in self._names]))
        self._student.model.train()

    def nearest(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        """See :meth:`ChunkIndex.nearest`."""
        scores = self._texts.similarity(vector)
        return [(self._names[at], float(scores[at])) for at in np.argsort(-scores, kind="stable")[:k]]

    def chunk(self, chunk_id: str) -> Chunk:
        """See :meth:`ChunkIndex.chunk`."""
        return self._chunks[chunk_id]


_NEVER = -1e4  # a log-likelihood or similarity whose softmax is 0
EMBEDDED: Final = 4
"""Number of a question's candidates that are embedded in a step."""


class CandidateChunks(Protocol):
    """Holds the candidates of all questions."""

    def of(self, rows: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return questions' similarities to candidates, and the reader's log p(y|z, x), both ``[rows, candidates]``.

        ``rows`` are numbers of questions; ``vectors`` are the questions' vectors, ``[rows, dim]``.
        """


class StoredCandidates:
    """Holds the index's vectors of all candidates, with the null document as each question's last candidate.

    Each vector is stored once. A chunk of several windows counts by the window nearest to the question, as in a search.
    """

    def __init__(self, judged: Sequence[Judged], index: ChunkIndex, embedder: Embedder, device: torch.device):
        """Read the chunks' vectors from the index; the null document is an empty text (REALM, section 3.4)."""
        (null,) = embedder.texts([""])
        windows = {"": null, **index.vectors.of(name for each in judged for name in each.chunks)}
        first, start = {}, 0
        for name, vectors in windows.items():
            first[name] = start
            start += len(vectors)
        most = max(len(each.chunks) for each in judged) + 1
        widest = max(map(len, windows.values()))
        slots = np.full((len(judged), most, widest), -1)
        reader = np.full((len(judged), most), -math.inf, np.float32)
        for row, each in enumerate(judged):
            for column, name in enumerate((*each.chunks, "")):
                count = len(windows[name])
                slots[row, column, :count] = range(first[name], first[name] + count)
                reader[row, column] = each.logprobs[column]
        self._table = torch.from_numpy(np.concatenate(list(windows.values()))).to(device)
        self._slots = torch.from_numpy(slots).to(device)
        # If a question has fewer candidates than others, its empty places get no relevance and no likelihood.
        self._reader = torch.from_numpy(np.maximum(reader, _NEVER)).to(device)

    def of(self, rows: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`CandidateChunks`."""
        slots = self._slots[rows]
        similar = torch.einsum("qd,qcwd->qcw", vectors, self._table[slots.clamp_min(0)])
        return similar.masked_fill(slots < 0, _NEVER).amax(-1), self._reader[rows]


class LearnedCandidates:
    """Holds candidates that the student embeds in each step, so that gradients reach the chunks' vectors.

    For each question, a step takes the chunk with the reader's highest likelihood and some random others. All chunks of
    a step are candidates of all its questions. A chunk that was not judged for a question gets the likelihood of the
    null document.
    """

    def __init__(self, judged: Sequence[Judged], index: ChunkIndex, embedder: Embedder, student: Both, seed: int):
        """Cut the chunks into the windows that ``embedder`` reads at once."""
        self._judged, self._student = judged, student
        names = dict.fromkeys(name for each in judged for name in each.chunks)
        self._windows = {"": [""], **{name: embedder.windows(index.chunk(name).text) for name in names}}
        self._drawn = np.random.default_rng(seed)

    def of(self, rows: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`CandidateChunks`."""
        asked = [self._judged[row] for row in rows.tolist()]
        names = list(dict.fromkeys(["", *(name for each in asked for name in self._drawn_of(each))]))
        owner = torch.tensor([at for at, name in enumerate(names) for _ in self._windows[name]], device=vectors.device)
        windows = self._student.encode_chunks([text for name in names for text in self._windows[name]])
        similar = vectors @ windows.T
        best = similar.new_full((len(asked), len(names)), _NEVER)
        relevance = best.scatter_reduce(1, owner.expand(len(asked), -1), similar, "amax")
        known = [dict(zip(each.chunks, each.logprobs, strict=False)) for each in asked]
        reader = [[of.get(name, each.logprobs[-1]) for name in names] for of, each in zip(known, asked, strict=True)]
        return relevance, torch.tensor(reader, device=vectors.device).clamp_min(_NEVER)

    def _drawn_of(self, each: Judged) -> list[str]:
        liked = max(range(len(each.chunks)), key=each.logprobs.__getitem__)
        rest = [name for at, name in enumerate(each.chunks) if at != liked]
        return [each.chunks[liked], *self._drawn.permutation(rest)[: EMBEDDED - 1].tolist()]
