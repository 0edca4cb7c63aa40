"""Remembers what was made of a tokenizer for as long as the tokenizer lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

_T = TypeVar("_T")


class PerTokenizer(Generic[_T]):
    """Something of each tokenizer, made on first use and again when its vocabulary or chat template has changed. Thread-safe."""

    def __init__(self, make: Callable[[Any], _T]):
        """Make it by ``make``, which is given the tokenizer."""
        self._make = make
        self._known: WeakKeyDictionary[Any, tuple[object, _T]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, tokenizer: Any) -> _T:
        """Return what belongs to ``tokenizer``."""
        state = (len(tokenizer), str(getattr(tokenizer, "chat_template", None)))
        with self._lock:
            known = self._known.get(tokenizer)
            if known is None or known[0] != state:
                known = self._known[tokenizer] = (state, self._make(tokenizer))
            return known[1]
