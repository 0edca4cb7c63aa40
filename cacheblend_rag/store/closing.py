"""Defines what is closed at the end of a ``with`` block; imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Is closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds open; it must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
