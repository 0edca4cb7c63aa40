"""Defines the tunable encoders: a layer behind the query encoder, the query encoder, or the chunk encoder, too."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, get_args

import torch
from torch.nn.functional import normalize

Part = Literal["adapter", "tower", "both"]
PARTS: Final[tuple[str, ...]] = get_args(Part)


class Student(ABC):
    """Encodes questions with weights that are trained.

    Attributes:
        epochs: Default of the most rounds over the questions.
        batch: Default number of questions in a step.
        documents: Whether the student embeds the chunks, too; else the chunks' vectors stay fixed.
        model: The student as a sentence-transformers model.
    """

    epochs: ClassVar[int] = 20
    batch: ClassVar[int] = 32
    documents: ClassVar[bool] = False
    model: Any

    @abstractmethod
    def __init__(self, model: Any):
        """Start with the outputs of ``model``, without changing ``model``."""

    @abstractmethod
    def rate(self, done: float) -> float:
        """Return the learning rate after a share ``done`` of all steps."""

    @abstractmethod
    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters to tune."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the unit vectors of questions, ``[questions, dim]``, differentiable while gradients are enabled."""

    @torch.no_grad()
    def vectors(self, texts: Sequence[str], batch: int = 64) -> Any:
        """Return the unit vectors of questions as an fp32 array, computed in evaluation mode."""
        self.model.eval()
        parts = [self.encode(texts[at : at + batch]) for at in range(0, len(texts), batch)]
        self.model.train()
        return torch.cat(parts).float().cpu().numpy()

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the model's current weights."""
        return copy.deepcopy(self.model.state_dict())

    @torch.no_grad()
    def step_back(self, start: Mapping[str, torch.Tensor], share: float) -> None:
        """Move every weight by ``share`` of the way back to its value in ``start`` (WiSE-FT, arXiv 2109.01903)."""
        for name, weight in self.model.state_dict().items():
            if weight.is_floating_point():
                weight.lerp_(start[name].to(weight), share)


class Adapter(Student):
    """Tunes one linear layer with a residual connection behind the embedding model, whose outputs are computed once."""

    def __init__(self, model: Any):
        """Start with the outputs of ``model``: the layer's weights are 0."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Dense, Normalize

        self._base = model
        size = int(model.get_embedding_dimension())
        weight = torch.zeros(size, size)
        self._dense = Dense(size, size, bias=False, activation_function=None, init_weight=weight, use_residual=True).to(
            model.device
        )
        self.model = SentenceTransformer(
            modules=[*model.children(), self._dense, Normalize()],
            device=str(model.device),
            prompts=model.prompts,
            default_prompt_name=model.default_prompt_name,
        )
        self._known: dict[str, torch.Tensor] = {}

    def rate(self, done: float) -> float:
        return 5e-4

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self._dense.parameters())

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            with torch.no_grad():
                found = self._base.encode_query(new, convert_to_tensor=True, show_progress_bar=False)
            self._known.update(zip(new, found.clone(), strict=True))
        base = torch.stack([self._known[text] for text in texts])
        return normalize(self._dense({"sentence_embedding": base})["sentence_embedding"], dim=-1)


class TunedTower(Student):
    """Tunes a copy of the whole embedding model, for questions."""

    def __init__(self, model: Any):
        """Copy ``model``."""
        self.model = copy.deepcopy(model)
        self.model.train()

    def rate(self, done: float) -> float:
        return 3e-5

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        return self._encode(texts, "query")

    def _encode(self, texts: Sequence[str], prompt: str) -> torch.Tensor:
        features = self.model.preprocess(list(texts), prompt=self.model.prompts.get(prompt))
        on_device = {
            name: value.to(self.model.device) if torch.is_tensor(value) else value for name, value in features.items()
        }
        return normalize(self.model(on_device)["sentence_embedding"], dim=-1)


class Both(TunedTower):
    """Tunes a copy of the whole embedding model, for questions and chunks."""

    epochs = 2
    batch = 16
    documents = True

    def rate(self, done: float) -> float:
        return 3e-5 * min(1.0, 10 * done + 0.1) * (1 - done)

    def encode_chunks(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the unit vectors of chunks or windows of chunks, ``[texts, dim]``; see :meth:`encode`."""
        return self._encode(texts, "document")


STUDENTS: Final[dict[str, type[Student]]] = {"adapter": Adapter, "tower": TunedTower, "both": Both}
