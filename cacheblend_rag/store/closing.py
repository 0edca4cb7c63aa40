"""Defines the base class of objects that a ``with`` block closes; imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closes an object at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release open resources; the object must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
