"""The query encoder as it is tuned: an adapter behind the embedding model, or all of it. The chunks' vectors stay as they are."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch.nn.functional import normalize

Part = Literal["adapter", "tower"]
PARTS: Final[tuple[str, ...]] = get_args(Part)


class Student(ABC):
    """A query encoder that learns.

    Attributes:
        rate: A learning rate that suits it.
        model: It as a sentence-transformers model.
    """

    rate: float
    model: Any

    @abstractmethod
    def parameters(self) -> list[torch.nn.Parameter]:
        """Return what is tuned."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the unit vectors of questions, ``[questions, dim]``, with a graph behind them while gradients are on."""

    @torch.no_grad()
    def vectors(self, texts: Sequence[str], batch: int = 64) -> Any:
        """Return the same as an fp32 array, as the tuned model will give them."""
        self.model.eval()
        parts = [self.encode(texts[at : at + batch]) for at in range(0, len(texts), batch)]
        self.model.train()
        return torch.cat(parts).float().cpu().numpy()


class Adapter(Student):
    """One linear layer with a residual connection behind the embedding model; what is before it is computed once."""

    rate = 5e-4

    def __init__(self, model: Any):
        """Start as ``model`` itself: the layer's weights are 0."""
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

    def parameters(self) -> list[torch.nn.Parameter]:
        """See :class:`Student`."""
        return list(self._dense.parameters())

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """See :class:`Student`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            with torch.no_grad():
                found = self._base.encode_query(new, convert_to_tensor=True, show_progress_bar=False)
            self._known.update(zip(new, found.clone(), strict=True))
        base = torch.stack([self._known[text] for text in texts])
        return normalize(self._dense({"sentence_embedding": base})["sentence_embedding"], dim=-1)


class Tower(Student):
    """A copy of the whole embedding model."""

    rate = 3e-5

    def __init__(self, model: Any):
        """Start as ``model`` itself."""
        self.model = copy.deepcopy(model)
        self.model.train()

    def parameters(self) -> list[torch.nn.Parameter]:
        """See :class:`Student`."""
        return list(self.model.parameters())

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """See :class:`Student`."""
        prompt = self.model.prompts.get("query")
        features = self.model.preprocess(list(texts), prompt=prompt)
        on_device = {
            name: value.to(self.model.device) if torch.is_tensor(value) else value for name, value in features.items()
        }
        return normalize(self.model(on_device)["sentence_embedding"], dim=-1)


def student_of(part: Part, model: Any) -> Student:
    """Return a student that starts as ``model``."""
    return Adapter(model) if part == "adapter" else Tower(model)
